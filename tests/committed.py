"""A study's committed results: reports as plain JSON, the table's own data, and the README that tells of them.

Means are taken from the reports, and not from the table, so that the two can be held to each other.
"""

from __future__ import annotations

import datetime
import json
import math
import subprocess
from collections import defaultdict
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import pytest

import toolkit as tk
from toolkit.records.finetuning import FineTuning

ROOT = Path(__file__).parent.parent
STARTS = 30  # seconds between two runs of one piece, at most


class Committed:
    """Results of the study of this name; each part is read once, when it is first asked for."""

    def __init__(self, name: str):
        self.folder = ROOT / "studies" / name
        self.results = self.folder / "results"

    @cached_property
    def reports(self) -> list[dict]:
        return [json.loads(path.read_bytes()) for path in sorted(self.results.glob("runs/*/report.json"))]

    @cached_property
    def table(self) -> dict:
        return json.loads(tk.table(self.folder, format="json"))

    @cached_property
    def printed(self) -> str:
        """What `toolkit table` prints."""
        return tk.table(self.folder) + "\n"

    @cached_property
    def readme(self) -> str:
        return (self.folder / "README.md").read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The README's section of results, its lines joined."""
        return " ".join(section(self.readme, "What it found").split())

    @cached_property
    def rows(self) -> list[list[str]]:
        """The cells of the table in that section, its header first."""
        lines = [line for line in section(self.readme, "What it found").splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert set("".join(cells[1])) <= set("-:"), "the second line rules the header off"
        return [cells[0], *cells[2:]]

    @cached_property
    def arms(self) -> dict[tuple[str, str, str], list[float]]:
        """(task, arm, `loss` or `score`) → its runs, by seed."""
        made: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        of = [one for one in self.reports if one["role"] == "arm"]
        for one in sorted(of, key=lambda one: one["seeds"]["data"]):
            for what in ("loss", "score"):
                made[one["task"], one["arm"], what].append(one["scores"][""][what])
        return dict(made)

    @cached_property
    def untrained(self) -> dict[str, dict]:
        """task → what the model scores before training."""
        return {one["task"]: one["scores"][""] for one in self.reports if one["role"] == "untrained"}

    @cached_property
    def all_tasks(self) -> str:
        """How the table names the average over tasks."""
        (name,) = {c["task"] for c in self.table["contrasts"]} - set(self.untrained)
        return name

    @cached_property
    def study(self) -> FineTuning:
        """The study's file, its rows read from the folders that the runs were given, whose names are declared too."""
        ran = FineTuning.load(self.results / "study.json")
        return FineTuning.read(self.folder).with_data({name: task.data for name, task in ran.tasks.items()})

    def contrast(self, task: str, words: str, outcome: str = "loss") -> dict:
        """(task, `first − second`) → the loss's contrast, or the score's."""
        key = task, *words.split(" − "), outcome
        found = [c for c in self.table["contrasts"] if not c["own"]]
        (one,) = [c for c in found if (c["task"], c["first"], c["second"], c["outcome"]) == key]
        return one

    def gap(self, task: str, words: str, outcome: str = "loss") -> float:
        """The same contrast's difference as the reports have it: the mean over seeds of first − second."""
        first, second = (self.arms[task, arm, outcome] for arm in words.split(" − "))
        return math.fsum(a - b for a, b in zip(first, second, strict=True)) / len(first)

    def percent(self, task: str, arm: str) -> str:
        """An arm's mean score, from its counts of right answers: exact, a half rounded up."""
        if arm == "untrained":
            return percent([self.untrained[task]["score"]], self.untrained[task]["rows"])
        (rows,) = {one["scores"][""]["rows"] for one in self.reports if one["task"] == task}
        return percent(self.arms[task, arm, "score"], rows)

    @cached_property
    def peaks(self) -> dict[tuple[str, str], int]:
        """(task, arm) → bytes allocated at most, the largest of its runs."""
        made: dict[tuple[str, str], int] = defaultdict(int)
        for one in self.reports:
            if one["role"] == "arm":
                key = one["task"], one["arm"]
                made[key] = max(made[key], one["provenance"]["peak_memory"]["peak_allocated"])
        return dict(made)

    @cached_property
    def spans(self) -> list[tuple[float, float]]:
        """When each run began and ended, in seconds, in order."""
        begun = [datetime.datetime.fromisoformat(one["provenance"]["started"]).timestamp() for one in self.reports]
        lasted = [one["provenance"]["seconds"] for one in self.reports]
        return sorted((at, at + seconds) for at, seconds in zip(begun, lasted, strict=True))

    @cached_property
    def pieces(self) -> list[list[float]]:
        """When each stretch without a pause began and ended. A stopped run's first part is in no report."""
        made: list[list[float]] = []
        for began, ended in self.spans:
            if made and began <= made[-1][1] + STARTS:
                made[-1][1] = max(made[-1][1], ended)
            else:
                made.append([began, ended])
        return made

    @property
    def busy(self) -> float:
        """Seconds within the pieces."""
        return sum(ended - began for began, ended in self.pieces)

    @property
    def whole(self) -> float:
        """Seconds from the first run's begin to the last one's end."""
        return self.pieces[-1][1] - self.pieces[0][0]

    @property
    def side_by_side(self) -> float:
        """How many runs were under way, on average within the pieces."""
        return sum(ended - began for began, ended in self.spans) / self.busy


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def shown(value: float, digits: int) -> str:
    """As the READMEs write numbers: no zero before the point; of a difference, its size."""
    text = f"{abs(value):.{digits}f}"
    return text[1:] if text.startswith("0.") else text


def signed(value: float, digits: int) -> str:
    """The same with its sign, a true minus."""
    return ("−" if value < 0 else "+") + shown(value, digits)


def p_of(value: float) -> str:
    return "p < .001" if value < 0.0005 else f"p {shown(value, 3)}"


def percent(shares: list[float], rows: int) -> str:
    """The mean of shares of `rows`: as counts, since a mean of floats rounds 58.55% down and 61.45% up."""
    counts = [round(share * rows) for share in shares]
    assert all(math.isclose(count / rows, share) for count, share in zip(counts, shares, strict=True))
    tenths = math.floor(Fraction(1000 * sum(counts), rows * len(counts)) + Fraction(1, 2))
    return f"{tenths // 10}.{tenths % 10}%"


def git(commit: str, *command: str) -> bytes:
    """What git answers; the test is skipped where there is no git, or no such commit in the history."""
    start = ["git", "-C", str(ROOT)]
    try:
        known = subprocess.run([*start, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True)
    except OSError:
        pytest.skip("git is not installed")
    if known.returncode:
        pytest.skip(f"commit {commit} is not in this repository's history")
    return subprocess.run([*start, *command], capture_output=True, check=True).stdout
