"""A study's results folder, whatever its kind: held by one process, what is there checked, and never mixed.

results/settings.json    what fixes the numbers; a run under other settings is refused
results/study.json       the study as it ran
results/profile.json     the profile of its model, made once
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from toolkit.errors import InputError, RunError
from toolkit.records.finetuning import FineTuning
from toolkit.records.initialization import Initialization
from toolkit.records.io import atomic, digest, read_bytes, read_json, write_json
from toolkit.records.profile import PROFILE, Profile
from toolkit.records.report import REPORT, Report
from toolkit.records.started import Started
from toolkit.records.study import STUDY_COPY, Study
from toolkit.records.trained import Trained

SETTINGS = "settings.json"

R = TypeVar("R", Report, Trained, Started)
S = TypeVar("S", Study, FineTuning, Initialization)


def folder_of(out: str | os.PathLike[str] | None, home: Path, *, small: bool) -> Path:
    """The folder of a study's results: `out`, or `results` beside its file (`results-small` for its small form).

    Raises:
        InputError: `out` is empty, which would be the current folder.
    """
    own = home / ("results-small" if small else "results")
    if out is None:
        return own
    if not os.fspath(out).strip():
        raise InputError(f"out is empty: name a folder for the results, or leave it out for the study's own ({own})")
    return Path(out)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a results folder for this process alone, where the system can (it cannot on Windows).

    Raises:
        RunError: the folder cannot be made, or another process is writing in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the results folder {folder}: {error.strerror or error}") from error
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process is writing results in {folder}; wait for it, or use --out") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def same_settings(folder: Path, settings: Mapping[str, Any]) -> str:
    """Write the settings, or refuse those that differ from the ones that results were made with; their hash.

    Raises:
        InputError: they differ; every differing key is named.
    """
    path = folder / SETTINGS
    plain = json.loads(json.dumps(settings))
    if path.exists():
        found = read_json(path)
        old = found.get("settings") if isinstance(found, dict) else None
        if not isinstance(old, dict):
            raise InputError(f"{path} is damaged: it holds no settings; move the folder away, or use --out")
        differing = _differences(old, plain)
        if differing:
            raise InputError(
                f"{folder} holds results of other settings, and they are not mixed: {'; '.join(differing)}. "
                "Write to another folder with --out, or move this one away"
            )
    else:
        write_json(path, {"schema": 1, "kind": "settings", "settings": plain})
    return digest(plain)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> list[str]:
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{at}{key}.")
        elif a != b:
            found.append(f"{at}{key} was {_short(a)} and is now {_short(b)}")
    return found


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text[:12] if len(text) == 64 else text[:80]


def same_study(folder: Path, study: S, keys: Sequence[str]) -> None:
    """Keep the study beside its results; what was declared before them cannot change after them.

    Args:
        study: as it is published, without the folders of this machine.
        keys: of what was declared before the results.

    Raises:
        InputError: the results there belong to another study or form, or something else was declared.
    """
    path = folder / STUDY_COPY
    if path.exists():
        old = type(study).load(path)
        for key in keys:
            was, now = getattr(old, key), getattr(study, key)
            if was != now:
                raise InputError(
                    f"{folder} holds results that were declared with {key} {_plain(was)}, and the study now has "
                    f"{_plain(now)}: use --out for another folder"
                )
        if old == study:
            return
    study.save(path)


def _plain(value: Any) -> str:
    return str(value.model_dump(mode="json")) if hasattr(value, "model_dump") else repr(value)


def profile_of(
    folder: Path, model: str, quantizers: Sequence[str], *, name: str | None = None, progress: bool = True
) -> Profile:
    """The profile in the folder, where it is of this model and measured what is needed; else a new one.

    Args:
        quantizers: keys of those that it must have measured.
        name: how it calls the model; where left out, as `toolkit.weights.profiling.profile` does.

    Raises:
        InputError: it is of other weights.
    """
    from toolkit.weights.profiling import fingerprint_of, profile

    path, wanted = folder / PROFILE, list(quantizers)
    if path.exists():
        kept = Profile.load(path)
        found = fingerprint_of(model)
        if found != kept.fingerprint:
            raise InputError(
                f"{folder} holds results on {kept.model} (weights {kept.fingerprint[:12]}), and the weights of {model} "
                f"are {found[:12]}: another model, or changed weights; use --out for another folder"
            )
        if set(wanted) <= set(kept.quantizers):
            return kept
        wanted = list(dict.fromkeys([*kept.quantizers, *wanted]))
    made = profile(model, wanted, progress=None if progress else False)
    if name is not None:
        made = made.model_copy(update={"model": name})
    made.save(path)
    return made


def write_report(folder: Path, report: Report | Started, lines: str) -> Path:
    """Write `report.json` atomically, the items of its field `lines` one a line: a list's, or an object's."""
    data = report.to_json()
    items = data.pop(lines, None)
    text = json.dumps(data, indent=1, ensure_ascii=False)
    if items:
        named = isinstance(items, dict)
        names = [f"{json.dumps(name)}: " for name in items] if named else [""] * len(items)
        values = [json.dumps(item, ensure_ascii=False) for item in (items.values() if named else items)]
        each = ",\n".join(f"  {name}{value}" for name, value in zip(names, values, strict=True))
        opened, closed = "{}" if named else "[]"
        text = f'{text.removesuffix(chr(10) + "}")},\n "{lines}": {opened}\n{each}\n {closed}\n}}'
    with atomic(folder / REPORT) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return folder / REPORT


def only_these(folder: Path, names: Sequence[str]) -> None:
    """Refuse reports of runs that the study does not have: they would stand in its table.

    Raises:
        InputError: naming them.
    """
    foreign = sorted(p.parent.name for p in folder.glob(f"*/{REPORT}") if p.parent.name not in set(names))
    if foreign:
        shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise InputError(f"{folder} holds runs that the study does not have ({shown}); move them away, or use --out")


def tidy(folder: Path) -> None:
    """Remove temporary files that a killed process left."""
    for path in [*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp"), *folder.glob("*/*/.*.tmp")]:
        path.unlink(missing_ok=True)


def finished(folder: Path, settings: str, record: type[R] = Report) -> tuple[R | None, str | None]:  # type: ignore[assignment]
    """The report of a run, where there is a sound one; else None, and a message where one was set aside.

    Args:
        folder: of the run.
        settings: hash of those that it must have been made under.
        record: which kind of report it is.

    Raises:
        InputError: the report is sound and was made under other settings, or by another version.
    """
    path = folder / REPORT
    if not path.exists():
        return None, None
    try:
        report = record.load(path)
        if report.rows is not None:
            content = read_bytes(folder / report.rows.file)
            if hashlib.sha256(content).hexdigest() != report.rows.sha256:
                raise InputError(f"{folder / report.rows.file} is not the file that the report tells of")
    except InputError as error:
        _refuse_newer(path)
        aside = _set_aside(path)
        return None, f"{error}\nset aside as {aside.name}; the run is repeated"
    if report.settings != settings:
        raise InputError(f"{path} was made under other settings (hash {report.settings[:12]}, now {settings[:12]})")
    return report, None


def _refuse_newer(path: Path) -> None:
    """A sound file of another schema version is no damaged one."""
    try:
        data = read_json(path)
    except InputError:
        return
    if isinstance(data, dict) and isinstance(data.get("schema"), int) and data["schema"] > Report.version:
        raise InputError(f"{path} has schema {data['schema']}: a newer version of the toolkit wrote it")


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged")
    for number in range(2, 1000):
        if not aside.exists():
            break
        aside = path.with_name(f"{path.name}.damaged-{number}")
    try:
        os.replace(path, aside)
    except OSError as error:
        raise RunError(f"cannot set the damaged report {path} aside: {error.strerror or error}") from error
    return aside
