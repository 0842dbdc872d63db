"""A study's results folder: reports and rows written atomically, finished draws kept, what is there checked.

results/settings.json           what fixes the numbers; a run under other settings is refused
results/study.json              the study as it ran
results/profile.json            the profile, made once
results/<run>/report.json       and rows.jsonl.gz beside it: one line a draw and text
results/<run>/draws.partial.jsonl    draws finished so far, while a control is being measured
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
from toolkit.records import rows
from toolkit.records.io import atomic, digest, read_bytes, read_json, write_json
from toolkit.records.report import REPORT, Report, Rows
from toolkit.records.study import STUDY_COPY, Study
from toolkit.records.trained import Trained
from toolkit.runs.evaluation import WindowScore

SETTINGS = "settings.json"
PARTIAL = "draws.partial.jsonl"

R = TypeVar("R", Report, Trained)

Outcome = dict[str, list[WindowScore]]
"""Text → its windows' scores."""


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


def same_study(folder: Path, study: Study) -> None:
    """Keep the study beside its results; what was declared before them cannot change after them.

    Raises:
        InputError: the results there belong to another study or form, or another analysis was declared.
    """
    path = folder / STUDY_COPY
    # A text's file is named as in the reports: results may be published, and folders are the user's own.
    study = study.model_copy(update={"texts": {name: Path(source).name for name, source in study.texts.items()}})
    if path.exists():
        old = Study.load(path)
        for key in ("name", "form", "analysis", "seed"):
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


class Partial:
    """The draws of a control that are finished, in a file that grows by a line a draw.

    The first line ties the file to the settings, and each line names its draw's set of layers. A torn last line,
    left by a kill or a full disk, is dropped, and so is everything from the first line on that does not fit.
    """

    def __init__(self, folder: Path, settings: str, masks: Sequence[str]) -> None:
        self.path = folder / PARTIAL
        self._header = {"settings": settings}
        self.done: dict[int, Outcome] = {}
        self._sound = 0
        if self.path.exists():
            self._read(masks)

    def _read(self, masks: Sequence[str]) -> None:
        content = self.path.read_bytes()
        for number, line in enumerate(content.splitlines(keepends=True)):
            try:
                item = json.loads(line)
                if not line.endswith(b"\n"):
                    break
                if number == 0:
                    if item != self._header:
                        break
                else:
                    index, windows = item["draw"], item["windows"]
                    if item["mask"] != masks[index]:
                        break
                    self.done[index] = {k: [WindowScore(*each) for each in scored] for k, scored in windows.items()}
            except (ValueError, KeyError, TypeError, IndexError):
                break
            self._sound += len(line)

    def add(self, finished: Sequence[tuple[int, str, Outcome]]) -> None:
        """Append draws (index, mask, outcome), and see them onto the disk.

        Raises:
            RunError: the disk is full or the folder cannot be written; draws kept so far stay.
        """
        lines = [] if self._sound else [self._header]
        lines += [{"draw": index, "mask": mask, "windows": plain(outcome)} for index, mask, outcome in finished]
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "r+b" if self.path.exists() else "w+b") as file:
                file.truncate(self._sound)
                file.seek(self._sound)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"cannot write {self.path}: {error.strerror or error}; the draws finished before are kept, and the "
                "same command goes on from there"
            ) from error
        self._sound += len(data)
        self.done |= {index: outcome for index, _, outcome in finished}

    def remove(self) -> None:
        """Delete the file: the report now holds its draws."""
        self.path.unlink(missing_ok=True)


def plain(outcome: Outcome) -> dict[str, list[list[Any]]]:
    """An outcome as JSON: text → [tokens, nll, kl, top] a window."""
    return {name: [[w.tokens, w.nll, w.kl, w.top] for w in windows] for name, windows in outcome.items()}


def write_rows(folder: Path, outcomes: Sequence[Outcome], *, many: bool) -> Rows:
    """Write a run's rows (`toolkit.records.rows`): every measured sum of one selection, or the losses of many."""
    lines: list[list[Any]] = []
    for draw, outcome in enumerate(outcomes):
        for name, windows in outcome.items():
            sums = [[w.nll for w in windows]]
            if not many:
                sums += [[w.kl for w in windows], [w.top for w in windows]]
            lines.append([draw, name, *sums])
    return rows.write(folder, rows.MANY if many else rows.ONE, lines)


def write_report(folder: Path, report: Report) -> Path:
    """Write `report.json` atomically, one draw a line."""
    data = report.to_json()
    draws = data.pop("draws", [])
    text = json.dumps(data, indent=1, ensure_ascii=False)
    if draws:
        lines = ",\n".join(f"  {json.dumps(draw, ensure_ascii=False)}" for draw in draws)
        text = f'{text.removesuffix(chr(10) + "}")},\n "draws": [\n{lines}\n ]\n}}'
    with atomic(folder / REPORT) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return folder / REPORT
