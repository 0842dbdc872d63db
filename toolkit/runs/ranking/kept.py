"""What a ranking study keeps in its results folder: draws as they are finished, rows and reports, each atomically.

results/<run>/report.json            and rows.jsonl.gz beside it: one line a draw and text
results/<run>/draws.partial.jsonl    draws finished so far, while a control is being measured
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import RunError
from toolkit.records import rows
from toolkit.records.report import PARTIAL, Rows
from toolkit.records.study import Study
from toolkit.runs import results
from toolkit.runs.texts.evaluation import WindowScore

Outcome = dict[str, list[WindowScore]]
"""Text → its windows' scores."""


def same_study(folder: Path, study: Study) -> None:
    """Keep the study beside its results, or refuse one that declares something else (`toolkit.runs.results`)."""
    # A text's file is named as in the reports: results may be published, and folders are the user's own.
    published = study.model_copy(update={"texts": {name: Path(source).name for name, source in study.texts.items()}})
    results.same_study(folder, published, ("name", "form", "analysis", "seed"))


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
