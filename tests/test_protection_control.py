"""The committed results of protection-control: its table is printed from them, and lock and README hold.

Means are taken from the reports as plain JSON; p-values, verdicts and shares of variance from the table's own data.
"""

from __future__ import annotations

import hashlib
import io
import re
import statistics
import tarfile
from pathlib import PurePosixPath

import pytest

from tests.committed import Committed, git, p_of, shown, signed
from toolkit.records.lock import Lock, differences

RAN = Committed("protection-control")
TASKS = {"SST-2": "sst2", "ARC-E": "arc-easy", "RTE": "rte"}
ARMS = ("qlora", "lora", "aqlora-q", "aqlora-s", "random", "gradient")
COMMIT = "bfcfdc3"


# -- the files ---------------------------------------------------------------------------------------------------------


def test_the_committed_table_is_what_is_printed():
    assert RAN.printed == (RAN.folder / "table.md").read_text(encoding="utf-8")


def test_every_declared_run_is_there_once_and_finished():
    assert len(RAN.reports) == 6 * 3 * 8 + 3 * 3 + 3 == 156
    assert RAN.table["missing"] == [] and RAN.table["unfinished"] == []
    keys = {(r["role"], r["task"], r["arm"], tuple(r["seeds"].values())) for r in RAN.reports}
    assert len(keys) == 156 and all(r["finished"] for r in RAN.reports)


def test_the_lock_is_of_this_study_and_every_report_carries_it():
    """Declaration, analysis, weights and rows; made before the first report. The code is that commit's, below."""
    lock = Lock.load(RAN.results / "lock.json")
    rows = {f"{r['task']} {split}": r[split]["sha256"] for r in RAN.reports for split in ("train", "test")}
    (weights,) = {r["fingerprint"] for r in RAN.reports}
    assert list(differences(lock, RAN.study, weights, rows)) == []
    assert {r["lock"] for r in RAN.reports} == {lock.hash}
    assert lock.created < min(r["provenance"]["started"] for r in RAN.reports)
    packages = {name: version for r in RAN.reports for name, version in r["provenance"]["packages"].items()}
    assert all(packages[name] == version for name, version in lock.code.items() if name in packages)


def test_another_study_or_other_rows_are_not_what_was_locked():
    lock = Lock.load(RAN.results / "lock.json")
    rows = {f"{r['task']} {split}": r[split]["sha256"] for r in RAN.reports for split in ("train", "test")}
    changed = RAN.study.model_copy(update={"seeds": 9})
    told = list(differences(lock, changed, RAN.reports[0]["fingerprint"], rows | {"rte test": "0" * 64}))
    assert len(told) == 2 and "changed after it was locked" in told[0] and "'rte test'" in told[1]


def test_the_locks_sources_are_those_of_the_commit_that_the_readme_names():
    assert f"At commit {COMMIT} (the lock's hashes of the sources are that commit's" in RAN.prose
    code = Lock.load(RAN.results / "lock.json").code
    for package, folder in (("toolkit", "toolkit"), ("toolkit_plugins", "plugins/toolkit_plugins")):
        packed = git(COMMIT, "archive", COMMIT, folder)
        whole = hashlib.sha256()
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            files = {
                PurePosixPath(file.name).relative_to(folder).as_posix(): archive.extractfile(file).read()
                for file in archive
                if file.isfile() and file.name.endswith((".py", ".c"))
            }
        for name, content in sorted(files.items()):
            whole.update(f"{name}\0{len(content)}\0".encode() + content)
        assert whole.hexdigest() == code[f"sources of {package}"]


# -- the README --------------------------------------------------------------------------------------------------------


def test_the_readmes_table_holds_the_reports_means():
    header, *lines = RAN.rows
    assert header == ["task", "untrained", *ARMS] and len(lines) == 6
    rows = {line[0]: line[1:] for line in lines}
    for task in TASKS.values():
        means = [shown(statistics.mean(RAN.arms[task, arm, "loss"]), 4) for arm in ARMS]
        assert rows[f"{task}, loss"] == [f"{RAN.untrained[task]['loss']:.3f}", *means]
        assert {len(RAN.arms[task, arm, "loss"]) for arm in ARMS} == {8} and "mean over eight seeds" in RAN.prose
        assert rows[f"{task}, accuracy"] == [RAN.percent(task, arm) for arm in ("untrained", *ARMS)]


def test_how_it_was_run():
    device = {(r["provenance"]["device"], r["provenance"]["compute_dtype"]) for r in RAN.reports}
    assert device == {("NVIDIA H200", "bfloat16")} and "One NVIDIA H200, bfloat16" in RAN.prose
    assert RAN.table["status"]["confirmatory"] and "locked before the first run" in RAN.prose
    versions = {name: {r["provenance"]["packages"][name] for r in RAN.reports} for name in ("torch", "transformers")}
    assert versions == {"torch": {"2.11.0"}, "transformers": {"5.17.0"}}
    assert "torch 2.11, transformers 5.17" in RAN.prose
    assert not any("commit" in r["provenance"] for r in RAN.reports) and "so the reports name none" in RAN.prose
    rows = {r["train"]["rows"] for r in RAN.reports if r["task"] == "sst2"}
    assert rows == {4000} and "4,000 training rows" in RAN.prose
    told = "One of the 1,000 scored rows of ARC-E stands among its training rows too"
    trained = [r for r in RAN.reports if r["role"] != "untrained"]
    assert told in RAN.prose and all(
        (r["labels"] == ["1 of 1000 scored rows stand among the training rows"]) is (r["task"] == "arc-easy")
        for r in trained
    )


def test_the_time_that_it_took_and_the_pieces():
    """Runs that were stopped were begun again, and their first part is in no report: minutes have a range."""
    words = r"The (\d+) runs took (\d+) minutes, (\d) to (\d) side by side, in four pieces"
    runs, minutes, low, high = map(int, re.search(words, RAN.prose).groups())
    assert len(RAN.pieces) == 4 and runs == len(RAN.reports)
    assert RAN.busy / 60 <= minutes <= RAN.whole / 60
    assert low <= RAN.side_by_side <= high


def test_the_ranking_against_chance():
    family = {c["family"] for c in RAN.table["contrasts"] if c["primary"] and c["task"] in TASKS.values()}
    assert family == {24} and "corrected by Holm over the 24 declared contrasts" in RAN.prose
    words = "aqlora-q − random"
    gaps = {}
    for task in TASKS.values():
        one = RAN.contrast(task, words)
        gaps[task] = RAN.gap(task, words)
        assert one["difference"] == pytest.approx(gaps[task], abs=1e-12)
        assert one["verdict"] == "equivalent" and one["equivalence"]["margin"] == 0.02
    sst2, arc, rte = (signed(gaps[task], 4) for task in TASKS.values())
    told = f"is {sst2} (SST-2), {arc} (ARC-E) and {rte} nats (RTE): within the declared margin of .02 on all three"
    assert f"{told}, so *equivalent*," in RAN.prose
    score = RAN.contrast(RAN.all_tasks, words, "score")
    below = [-RAN.gap(task, words, "score") for task in TASKS.values()]
    assert score["difference"] == pytest.approx(-statistics.mean(below), abs=1e-12)
    assert score["family"] == 8 and not score["primary"]
    assert f"it is {shown(100 * statistics.mean(below), 2)} points *below* random layers" in RAN.prose
    assert f"({p_of(score['adjusted'])} corrected within its own family of eight)" in RAN.prose


def test_what_protection_does():
    separated = [name for name, task in TASKS.items() if RAN.contrast(task, "lora − qlora")["verdict"] == "better"]
    assert separated == ["ARC-E"] and "Of the three tasks only ARC-E separates `lora` from `qlora`" in RAN.prose
    lora, ranked, drawn = (RAN.contrast("arc-easy", f"{arm} − qlora") for arm in ("lora", "aqlora-q", "random"))
    assert f"({signed(lora['difference'], 3)} nats, {p_of(lora['adjusted'])})" in RAN.prose
    assert f"`aqlora-q` gains {shown(ranked['difference'], 3)} ({p_of(ranked['adjusted'])})" in RAN.prose
    assert f"same memory gain {shown(drawn['difference'], 3)} ({p_of(drawn['adjusted'])})" in RAN.prose
    both = [r for r in RAN.reports if r["arm"] in ("aqlora-q", "random") and r["role"] == "arm"]
    shares = {r["protect"]["parameters"] for r in both}
    assert len(shares) == 1 and "a tenth of the parameters buys an eighth to a seventh of the gap" in RAN.prose
    parts = [lora["difference"] / one["difference"] for one in (ranked, drawn)]
    assert [round(part) for part in parts] == [8, 7]


def test_what_data_buy():
    drawn, ranked = (RAN.contrast("arc-easy", f"gradient − {arm}") for arm in ("random", "aqlora-q"))
    assert drawn["verdict"] == ranked["verdict"] == "better"
    assert f"ahead of `random` by {shown(drawn['difference'], 3)} nats ({p_of(drawn['adjusted'])})" in RAN.prose
    assert f"of `aqlora-q` by {shown(ranked['difference'], 3)} ({p_of(ranked['adjusted'])}) on ARC-E" in RAN.prose
    verdicts = {
        task: {RAN.contrast(task, f"gradient − {arm}")["verdict"] for arm in ("random", "aqlora-q")}
        for task in ("sst2", "rte", RAN.all_tasks)
    }
    assert verdicts == {"sst2": {"equivalent"}, "rte": {"not separated"}, RAN.all_tasks: {"equivalent"}}
    assert "on SST-2 it is equivalent to both, on RTE it is not separated from either" in RAN.prose
    assert "on average over the tasks it is equivalent to both" in RAN.prose
    selection = RAN.study.arm("gradient").protect
    assert selection.calibration_rows == 32 and "Its 32 rows are training rows of the same task" in RAN.prose


def test_the_shorter_backward():
    verdicts = [RAN.contrast(task, "aqlora-s − qlora")["verdict"] for task in TASKS.values()]
    assert verdicts == ["not separated", "equivalent", "equivalent"]
    assert "equivalent to `qlora` on ARC-E and RTE, not separated on SST-2" in RAN.prose
    adapted = {len(r["adapt"]["layers"]) / 210 for r in RAN.reports if r["arm"] == "aqlora-s"}
    assert "with adapters on 85% of the layers" in RAN.prose and [round(share, 2) for share in adapted] == [0.85]
    less = [100 * (1 - RAN.peaks[task, "aqlora-s"] / RAN.peaks[task, "qlora"]) for task in TASKS.values()]
    low, high = map(int, re.search(r"at (\d+) to (\d+)% less peak memory", RAN.prose).groups())
    assert (low, high) == (round(min(less)), round(max(less)))


def test_the_noise():
    sd: dict[str, tuple[float, float]] = {}
    for task in TASKS.values():
        runs = [r for r in RAN.reports if (r["task"], r["arm"]) == (task, "qlora") and r["role"] in ("arm", "repeat")]
        again = [r["scores"][""]["loss"] for r in runs if r["seeds"]["data"] == 0]
        others = [r["scores"][""]["loss"] for r in runs if r["seeds"]["data"] != 0]
        assert (len(again), len(others)) == (4, 7)
        sd[task] = statistics.stdev(again), statistics.stdev(others)
    assert sd["sst2"][0] == sd["arc-easy"][0] == 0
    assert "Four runs under the same seeds agree to the last digit on SST-2 and ARC-E" in RAN.prose
    assert round(sd["rte"][1] / sd["rte"][0]) == 4 and "on RTE their sd is a quarter of that over seeds" in RAN.prose
    removed = {
        task: [c["pairing"]["removed"] for c in RAN.table["contrasts"] if c["task"] == task and c["outcome"] == "loss"]
        for task in TASKS.values()
    }
    assert {len(of) for of in removed.values()} == {8}
    both = removed["sst2"] + removed["arc-easy"]
    low, high = map(int, re.search(r"removed (\d+) to (\d+)% of the variance", RAN.prose).groups())
    assert (low, high) == (round(100 * min(both)), round(100 * max(both)))
    assert sum(of < 0 for of in removed["rte"]) == 3 and "added some for three of eight contrasts on RTE" in RAN.prose
