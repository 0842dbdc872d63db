"""Locking a study: its analysis, code, weights and texts are hashed before the first run; reports carry the hash.

A lock shows that the analysis was not chosen after the results were seen. It holds against mistakes, and not
against fraud: whoever writes all files can write them in any order.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path

import toolkit
from toolkit.errors import InputError
from toolkit.records.finetuning import FineTuning
from toolkit.records.initialization import Initialization
from toolkit.records.lock import LOCK, Lock, differences
from toolkit.records.report import PARTIAL, REPORT
from toolkit.records.study import Study
from toolkit.records.trained import RUNS
from toolkit.registry import registry
from toolkit.runs import results

SOURCES = (".py", ".c")
"""Suffixes of the files that compute; the rest of a package is data that has hashes of its own."""

VERSIONS = ("torch", "transformers", "numpy")
"""Packages beside our own whose version is locked."""


def seal(
    folder: Path,
    declared: Study | FineTuning | Initialization,
    texts: Mapping[str, str],
    named: Iterable[tuple[str, str]],
    packages: Iterable[str] = VERSIONS,
) -> Path:
    """Write the lock of a study of any kind, or keep the same one that is there.

    Args:
        folder: of the results.
        declared: the study.
        texts: name → SHA-256 of what is scored or trained on.
        named: kind and key of the components that the study names.
        packages: others whose version is locked.

    Raises:
        InputError: results exist already (the first is named), or another lock stands there (what differs is
            named).
        RunError: the folder cannot be written, or another process is writing in it.
    """
    from toolkit.weights.profiling import fingerprint_of
    from toolkit.weights.sources import resolve

    made = Lock(
        study=declared.name,
        form=declared.form,
        analysis=declared.analysis,
        declaration=declared.declaration,
        code=code(named, packages),
        model=resolve(declared.model).name,
        fingerprint=fingerprint_of(declared.model),
        texts=dict(texts),
        created=datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat(),
    )
    path = folder / LOCK
    with results.locked(folder):
        if path.exists():
            differing = list(differences(Lock.load(path), declared, made.fingerprint, made.texts, made.code))
            if differing:
                results_too = " with its results" if _first_result(folder) else " (nothing was run under it yet)"
                raise InputError(
                    f"{path} locks something else: {'; '.join(differing)}. A lock is never replaced: use --out for "
                    f"another folder, or move this one away{results_too}"
                )
            return path
        found = _first_result(folder)
        if found is not None:
            raise InputError(
                f"{found} exists: a lock made after results would say nothing; use --out for another folder, or move "
                "the results away and make them anew"
            )
        return made.save(path)


def _first_result(folder: Path) -> Path | None:
    """A report, or draws of an interrupted run, sound or damaged."""
    found = [*folder.glob(f"*/{REPORT}*"), *folder.glob(f"*/{PARTIAL}"), *folder.glob(f"{RUNS}/*/*")]
    return min(found, default=None)


def standing(
    folder: Path,
    study: Study | FineTuning | Initialization,
    fingerprint: str,
    texts: Mapping[str, str],
    named: Iterable[tuple[str, str]],
    packages: Iterable[str] = VERSIONS,
) -> tuple[str | None, list[str]]:
    """The hash that reports carry now, where a lock stands and everything is as it was locked; else what differs.

    Args:
        folder: of the results.
        fingerprint: of the weights.
        texts: name → SHA-256.
        named: kind and key of the components that the study names.
        packages: others whose version is locked.
    """
    path = folder / LOCK
    if not path.exists():
        return None, [f"there is no {LOCK}; `toolkit lock` before the first run makes results confirmatory"]
    try:
        found = Lock.load(path)
    except InputError as error:
        return None, [str(error)]
    differing = list(differences(found, study, fingerprint, texts, code(named, packages)))
    return (None, differing) if differing else (found.hash, [])


def code(named: Iterable[tuple[str, str]], packages: Iterable[str] = VERSIONS) -> dict[str, str]:
    """What computes a study's results: versions, and the hash of each package's sources that takes part.

    Those packages are toolkit itself and every one that provides a component which the study names. A class that
    was registered by hand, in a script or a notebook's cell, is hashed by itself.

    Args:
        named: kind and key of each component.
        packages: others whose version is locked.
    """
    classes = {type(registry.make(kind, key)) for kind, key in named}
    found = {"toolkit": toolkit.__version__}
    found |= {name: importlib.metadata.version(name) for name in packages}
    parts = {f"sources of {package}": _sources(package) for package in ["toolkit", *map(_package, classes)]}
    parts |= {
        f"source of {c.__module__}.{c.__qualname__}": _source(c) for c in classes if _sources(_package(c)) is None
    }
    return found | {name: value for name, value in sorted(parts.items()) if value is not None}


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _source(cls: type) -> str:
    """SHA-256 of a class's own text; in words, where Python has kept none."""
    try:
        return hashlib.sha256(inspect.getsource(cls).encode()).hexdigest()
    except (OSError, TypeError):
        return "not available"


@functools.cache
def _sources(package: str) -> str | None:
    """SHA-256 over the source files of a package, or of a module: each one's path in it, length and content.

    None where it is no installed package: a script, or a notebook.
    """
    spec = importlib.util.find_spec(package) if package != "__main__" else None
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    folders = list(spec.submodule_search_locations or ())
    files = [(p, Path(f)) for f in folders for p in Path(f).rglob("*") if p.suffix in SOURCES] or [
        (origin, origin.parent)
    ]
    whole = hashlib.sha256()
    for name, path in sorted((path.relative_to(above).as_posix(), path) for path, above in files):
        content = path.read_bytes()
        whole.update(f"{name}\0{len(content)}\0".encode())
        whole.update(content)
    return whole.hexdigest()
