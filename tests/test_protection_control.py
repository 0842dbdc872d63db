"""The committed results of protection-control: its table is printed from them, and lock and README hold.

Means are taken from the reports as plain JSON; p-values, verdicts and shares of variance from the table's own data.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import re
import statistics
import subprocess
import tarfile
from collections import defaultdict
from pathlib import Path, PurePosixPath

import pytest

import toolkit as tk
from toolkit.records.finetuning import FineTuning
from toolkit.records.lock import Lock, differences

ROOT = Path(__file__).parent.parent
STUDY = ROOT / "studies" / "protection-control"
RESULTS = STUDY / "results"
TASKS = {"SST-2": "sst2", "ARC-E": "arc-easy", "RTE": "rte"}
ARMS = ("qlora", "lora", "aqlora-q", "aqlora-s", "random", "gradient")
COMMIT = "bfcfdc3"


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    return [json.loads(path.read_bytes()) for path in sorted(RESULTS.glob("runs/*/report.json"))]


@pytest.fixture(scope="module")
def table() -> dict:
    return json.loads(tk.table(STUDY, format="json"))


@pytest.fixture(scope="module")
def found() -> str:
    """The README's section of results, its lines joined."""
    whole = (STUDY / "README.md").read_text(encoding="utf-8")
    return whole.split("## What it found\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def prose(found) -> str:
    return " ".join(found.split())


@pytest.fixture(scope="module")
def arms(reports) -> dict[tuple[str, str, str], list[float]]:
    """(task, arm, `loss` or `score`) → its eight runs, by seed."""
    made: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in sorted((one for one in reports if one["role"] == "arm"), key=lambda one: one["seeds"]["data"]):
        for what in ("loss", "score"):
            made[one["task"], one["arm"], what].append(one["scores"][""][what])
    return made


@pytest.fixture(scope="module")
def contrast(table):
    """(task, `first − second`) → the loss's contrast, or the score's."""

    def of(task: str, words: str, outcome: str = "loss") -> dict:
        first, second = words.split(" − ")
        (one,) = [
            c
            for c in table["contrasts"]
            if (c["task"], c["first"], c["second"], c["outcome"]) == (task, first, second, outcome) and not c["own"]
        ]
        return one

    return of


def all_tasks(table: dict) -> str:
    """How the table names the average over tasks."""
    (name,) = {c["task"] for c in table["contrasts"]} - set(TASKS.values())
    return name


@pytest.fixture(scope="module")
def study() -> FineTuning:
    """The study's file, its rows read from the folders that the runs were given, whose names are declared too."""
    ran = FineTuning.load(RESULTS / "study.json")
    return FineTuning.read(STUDY).with_data({name: task.data for name, task in ran.tasks.items()})


def shown(value: float, digits: int) -> str:
    """As the README writes numbers: a true minus, no zero before the point."""
    text = f"{abs(value):.{digits}f}"
    return text[1:] if text.startswith("0.") else text


def signed(value: float, digits: int) -> str:
    return ("−" if value < 0 else "+") + shown(value, digits)


def p_of(value: float) -> str:
    return "p < .001" if value < 0.0005 else f"p {shown(value, 3)}"


# -- the files ---------------------------------------------------------------------------------------------------------


def test_the_committed_table_is_what_is_printed():
    assert tk.table(STUDY) + "\n" == (STUDY / "table.md").read_text(encoding="utf-8")


def test_every_declared_run_is_there_once_and_finished(reports, table):
    assert len(reports) == 6 * 3 * 8 + 3 * 3 + 3 == 156
    assert table["missing"] == [] and table["unfinished"] == []
    keys = {(r["role"], r["task"], r["arm"], tuple(r["seeds"].values())) for r in reports}
    assert len(keys) == 156 and all(r["finished"] for r in reports)


def test_the_lock_is_of_this_study_and_every_report_carries_it(reports, study):
    """Declaration, analysis, weights and rows; made before the first report. The code is that commit's, below."""
    lock = Lock.load(RESULTS / "lock.json")
    rows = {f"{r['task']} {split}": r[split]["sha256"] for r in reports for split in ("train", "test")}
    (weights,) = {r["fingerprint"] for r in reports}
    assert list(differences(lock, study, weights, rows)) == []
    assert {r["lock"] for r in reports} == {lock.hash}
    assert lock.created < min(r["provenance"]["started"] for r in reports)
    packages = {name: version for r in reports for name, version in r["provenance"]["packages"].items()}
    assert all(packages[name] == version for name, version in lock.code.items() if name in packages)


def test_another_study_or_other_rows_are_not_what_was_locked(reports, study):
    lock = Lock.load(RESULTS / "lock.json")
    rows = {f"{r['task']} {split}": r[split]["sha256"] for r in reports for split in ("train", "test")}
    changed = study.model_copy(update={"seeds": 9})
    told = list(differences(lock, changed, reports[0]["fingerprint"], rows | {"rte test": "0" * 64}))
    assert len(told) == 2 and "changed after it was locked" in told[0] and "'rte test'" in told[1]


def test_the_locks_sources_are_those_of_the_commit_that_the_readme_names(prose):
    assert f"At commit {COMMIT} (the lock's hashes of the sources are that commit's" in prose
    code = Lock.load(RESULTS / "lock.json").code
    for package, folder in (("toolkit", "toolkit"), ("toolkit_plugins", "plugins/toolkit_plugins")):
        command = ["git", "-C", str(ROOT), "archive", COMMIT, folder]
        try:
            done = subprocess.run(command, capture_output=True)
        except OSError:
            pytest.skip("git is not installed")
        if done.returncode:
            pytest.skip(f"commit {COMMIT} is not in this repository's history")
        whole = hashlib.sha256()
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            files = {
                PurePosixPath(file.name).relative_to(folder).as_posix(): archive.extractfile(file).read()
                for file in archive
                if file.isfile() and file.name.endswith((".py", ".c"))
            }
        for name, content in sorted(files.items()):
            whole.update(f"{name}\0{len(content)}\0".encode() + content)
        assert whole.hexdigest() == code[f"sources of {package}"]


# -- the README --------------------------------------------------------------------------------------------------------


def test_the_readmes_table_holds_the_reports_means(found, reports, arms):
    lines = [line.strip("| ").split(" | ") for line in found.splitlines() if line.startswith("| ")]
    assert lines[0] == ["task", "untrained", *ARMS]
    rows = {line[0]: line[1:] for line in lines[2:]}
    assert len(rows) == 6
    untrained = {r["task"]: r["scores"][""] for r in reports if r["role"] == "untrained"}
    for task in TASKS.values():
        means = [statistics.mean(arms[task, arm, "loss"]) for arm in ARMS]
        assert rows[f"{task}, loss"] == [f"{untrained[task]['loss']:.3f}", *(shown(mean, 4) for mean in means)]
        shares = [untrained[task]["score"], *(statistics.mean(arms[task, arm, "score"]) for arm in ARMS)]
        assert rows[f"{task}, accuracy"] == [f"{100 * share:.1f}%" for share in shares]


def test_how_it_was_run(prose, reports, table):
    assert {r["provenance"]["device"] for r in reports} == {"NVIDIA H200"} and "One NVIDIA H200, bfloat16" in prose
    assert {r["provenance"]["compute_dtype"] for r in reports} == {"bfloat16"}
    assert table["status"]["confirmatory"] and "locked before the first run" in prose
    versions = {name: {r["provenance"]["packages"][name] for r in reports} for name in ("torch", "transformers")}
    assert versions == {"torch": {"2.11.0"}, "transformers": {"5.17.0"}}
    assert "torch 2.11, transformers 5.17" in prose
    assert not any("commit" in r["provenance"] for r in reports) and "so the reports name none" in prose
    assert {r["train"]["rows"] for r in reports if r["task"] == "sst2"} == {4000} and "4,000 training rows" in prose
    told = "One of the 1,000 scored rows of ARC-E stands among its training rows too"
    trained = [r for r in reports if r["role"] != "untrained"]
    assert told in prose and all(
        (r["labels"] == ["1 of 1000 scored rows stand among the training rows"]) is (r["task"] == "arc-easy")
        for r in trained
    )


def test_the_time_that_it_took_and_the_pieces(prose, reports):
    """Runs that were stopped were begun again, and their first part is in no report: minutes have a range."""
    shown_runs, minutes, low, high = map(
        int, re.search(r"The (\d+) runs took (\d+) minutes, (\d) to (\d) side by side, in four pieces", prose).groups()
    )
    spans = []
    for r in reports:
        started = datetime.datetime.fromisoformat(r["provenance"]["started"]).timestamp()
        spans.append((started, started + r["provenance"]["seconds"]))
    pieces: list[list[float]] = []
    for started, ended in sorted(spans):
        if pieces and started <= pieces[-1][1] + 30:
            pieces[-1][1] = max(pieces[-1][1], ended)
        else:
            pieces.append([started, ended])
    busy = sum(ended - started for started, ended in pieces)
    assert len(pieces) == 4 and shown_runs == len(reports)
    assert busy / 60 <= minutes <= (pieces[-1][1] - pieces[0][0]) / 60
    assert low <= sum(ended - started for started, ended in spans) / busy <= high


def test_the_ranking_against_chance(prose, arms, contrast, table, reports):
    family = {c["family"] for c in table["contrasts"] if c["primary"] and c["task"] in TASKS.values()}
    assert family == {24} and "corrected by Holm over the 24 declared contrasts" in prose
    words = "aqlora-q − random"
    gaps = {}
    for task in TASKS.values():
        one = contrast(task, words)
        pairs = zip(arms[task, "aqlora-q", "loss"], arms[task, "random", "loss"], strict=True)
        gaps[task] = statistics.mean(a - b for a, b in pairs)
        assert one["difference"] == pytest.approx(gaps[task], abs=1e-12)
        assert one["verdict"] == "equivalent" and one["equivalence"]["margin"] == 0.02
    sst2, arc, rte = (signed(gaps[task], 4) for task in TASKS.values())
    assert f"is {sst2} (SST-2), {arc} (ARC-E) and {rte} nats (RTE): within the declared margin of .02" in prose
    score = contrast(all_tasks(table), words, "score")
    mean = {key: statistics.mean(values) for key, values in arms.items()}
    below = [mean[task, "random", "score"] - mean[task, "aqlora-q", "score"] for task in TASKS.values()]
    assert score["difference"] == pytest.approx(-statistics.mean(below), abs=1e-12)
    assert score["family"] == 8 and not score["primary"]
    assert f"it is {shown(100 * statistics.mean(below), 2)} points *below* random layers" in prose
    assert f"({p_of(score['adjusted'])} corrected within its own family of eight)" in prose


def test_what_protection_does(prose, contrast, reports):
    separated = [name for name, task in TASKS.items() if contrast(task, "lora − qlora")["verdict"] == "better"]
    assert separated == ["ARC-E"] and "Of the three tasks only ARC-E separates `lora` from `qlora`" in prose
    lora, ranked, drawn = (contrast("arc-easy", f"{arm} − qlora") for arm in ("lora", "aqlora-q", "random"))
    assert f"({signed(lora['difference'], 3)} nats, {p_of(lora['adjusted'])})" in prose
    assert f"`aqlora-q` gains {shown(ranked['difference'], 3)} ({p_of(ranked['adjusted'])})" in prose
    assert f"same memory gain {shown(drawn['difference'], 3)} ({p_of(drawn['adjusted'])})" in prose
    shares = {r["protect"]["parameters"] for r in reports if r["arm"] in ("aqlora-q", "random") and r["role"] == "arm"}
    assert len(shares) == 1 and "a tenth of the parameters buys an eighth to a seventh of the gap" in prose
    parts = [lora["difference"] / one["difference"] for one in (ranked, drawn)]
    assert [round(part) for part in parts] == [8, 7]


def test_what_data_buy(prose, contrast, table):
    drawn, ranked = (contrast("arc-easy", f"gradient − {arm}") for arm in ("random", "aqlora-q"))
    assert drawn["verdict"] == ranked["verdict"] == "better"
    assert f"ahead of `random` by {shown(drawn['difference'], 3)} nats ({p_of(drawn['adjusted'])})" in prose
    assert f"of `aqlora-q` by {shown(ranked['difference'], 3)} ({p_of(ranked['adjusted'])}) on ARC-E" in prose
    verdicts = {
        task: {contrast(task, f"gradient − {arm}")["verdict"] for arm in ("random", "aqlora-q")}
        for task in ("sst2", "rte", all_tasks(table))
    }
    assert verdicts == {"sst2": {"equivalent"}, "rte": {"not separated"}, all_tasks(table): {"equivalent"}}
    assert "on SST-2 it is equivalent to both, on RTE it is not separated from either" in prose
    assert "on average over the tasks it is equivalent to both" in prose
    selection = FineTuning.read(STUDY).arm("gradient").protect
    assert selection.calibration_rows == 32 and "Its 32 rows are training rows of the same task" in prose


def test_the_shorter_backward(prose, contrast, reports):
    verdicts = [contrast(task, "aqlora-s − qlora")["verdict"] for task in TASKS.values()]
    assert verdicts == ["not separated", "equivalent", "equivalent"]
    assert "equivalent to `qlora` on ARC-E and RTE, not separated on SST-2" in prose
    peaks: dict[tuple[str, str], int] = defaultdict(int)
    for r in reports:
        if r["role"] == "arm":
            key = r["task"], r["arm"]
            peaks[key] = max(peaks[key], r["provenance"]["peak_memory"]["peak_allocated"])
    less = [100 * (1 - peaks[task, "aqlora-s"] / peaks[task, "qlora"]) for task in TASKS.values()]
    low, high = map(int, re.search(r"at (\d+) to (\d+)% less peak memory", prose).groups())
    assert (low, high) == (round(min(less)), round(max(less)))


def test_the_noise(prose, reports, table):
    sd: dict[str, tuple[float, float]] = {}
    for task in TASKS.values():
        runs = [r for r in reports if (r["task"], r["arm"]) == (task, "qlora") and r["role"] in ("arm", "repeat")]
        again = [r["scores"][""]["loss"] for r in runs if r["seeds"]["data"] == 0]
        others = [r["scores"][""]["loss"] for r in runs if r["seeds"]["data"] != 0]
        assert (len(again), len(others)) == (4, 7)
        sd[task] = statistics.stdev(again), statistics.stdev(others)
    assert sd["sst2"][0] == sd["arc-easy"][0] == 0
    assert "Four runs under the same seeds agree to the last digit on SST-2 and ARC-E" in prose
    assert round(sd["rte"][1] / sd["rte"][0]) == 4 and "on RTE their sd is a quarter of that over seeds" in prose
    removed = {
        task: [c["pairing"]["removed"] for c in table["contrasts"] if c["task"] == task and c["outcome"] == "loss"]
        for task in TASKS.values()
    }
    assert {len(of) for of in removed.values()} == {8}
    both = removed["sst2"] + removed["arc-easy"]
    low, high = map(int, re.search(r"removed (\d+) to (\d+)% of the variance", prose).groups())
    assert (low, high) == (round(100 * min(both)), round(100 * max(both)))
    assert sum(of < 0 for of in removed["rte"]) == 3 and "added some for three of eight contrasts on RTE" in prose
