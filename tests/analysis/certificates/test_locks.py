"""Confirmatory or exploratory: what is checked against the lock, and how the reason is told."""

import json

import pytest

from toolkit.analysis.certificates import locks
from toolkit.analysis.reading.reports import read
from toolkit.records.lock import Lock


@pytest.fixture
def study(builder):
    """A finished, locked study of one budget."""
    made = builder(draws=5, budgets=("layers=0.1",), count_matched=False)
    made.seal()
    made.write()
    made.study.save(made.results / "study.json")
    return made


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_report(path, lock=None, started=None):
    data = json.loads(path.read_text())
    if lock is not None:
        data["lock"] = lock or None
    if started is not None:
        data["provenance"]["started"] = started
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


def status(study):
    return locks.status(read(study.folder))


def test_a_locked_study_is_confirmatory(study):
    found = status(study)
    assert found == locks.Status(True, (), Lock.load(study.results / "lock.json").hash)
    assert found.hash == study.lock


def test_without_a_lock_it_is_exploratory(builder):
    made = builder(draws=5, budgets=("layers=0.1",))
    made.write()
    found = status(made)
    assert not found.confirmatory and found.hash is None and "not locked before the first run" in found.reasons[0]


def test_a_lock_that_was_taken_away_is_missed(study):
    (study.results / "lock.json").unlink()
    assert "lock.json is missing, although 6 of 6 reports" in status(study).reasons[0]


@pytest.mark.parametrize("content", ["", "{", '{"schema": 1, "kind": "lock"}', '{"schema": 2}', "[]"])
def test_a_damaged_lock_is_named(study, content):
    (study.results / "lock.json").write_text(content)
    found = status(study)
    assert not found.confirmatory and found.hash is None
    assert found.reasons[0].startswith("the lock is damaged: lock.json") and str(study.folder) not in found.reasons[0]


def test_a_changed_analysis_is_told_key_by_key(study):
    data = study.study.to_json()
    data["analysis"] |= {"level": 0.1, "side": "greater"}
    (study.results / "study.json").write_text(json.dumps(data))
    reasons = status(study).reasons
    assert len(reasons) == 1
    assert "side was 'less' and is now 'greater'" in reasons[0] and "level was 0.05 and is now 0.1" in reasons[0]


@pytest.mark.parametrize("key, value", [("seed", 8), ("question", "Another?"), ("window", 256), ("base", "nvfp4")])
def test_another_declaration_is_found(study, key, value):
    edit(study.results / "study.json", **{key: value})
    assert "the study was changed after it was locked" in status(study).reasons[0]


def test_another_form_is_found(study):
    edit(study.results / "lock.json", form="small")
    reasons = status(study).reasons
    assert "(small form)" in reasons[0] and "another lock" in reasons[1]


def test_other_weights_and_texts_are_found(study):
    texts = {"python-topics": "00" * 32, "wikitext2": "11" * 32}
    edit(study.results / "lock.json", fingerprint="cd" * 32, texts=texts)
    reasons = " | ".join(status(study).reasons)
    assert "fingerprint abababababab, and cdcdcdcdcdcd" in reasons
    assert (
        "text 'python-topics' is not the one that was locked" in reasons
        and "text 'wikitext2' was locked, and is not there" in reasons
    )


def test_a_text_that_was_not_locked_is_found(study):
    edit(study.results / "lock.json", texts={"other": "00" * 32})
    assert "text 'python-topics' was not locked" in status(study).reasons


def test_reports_without_the_lock_are_counted(study):
    paths = sorted(study.results.glob("*/report.json"))
    for path in paths[1:3]:
        edit_report(path, lock="")
    edit_report(paths[4], lock="ee" * 32)
    none, other = status(study).reasons
    assert none.startswith("2 of 6 reports") and f"the first is {paths[1].parent.name}/report.json" in none
    assert "carry no lock" in none
    assert other.startswith("1 of 6 reports") and "carries another lock (eeeeeeeeeeee" in other


@pytest.mark.parametrize(
    "created, fine",
    [
        ("2025-12-31T23:59:59Z", True),
        ("2026-01-01T00:00:00.900000+00:00", True),  # runs record whole seconds
        ("2026-01-01T00:00:01Z", False),
        ("2026-01-01T01:30:00+02:00", True),  # 23:30 UTC
        ("2026-01-01T00:30:00", False),  # without a zone: UTC
        ("2025-12-31T23:30:00-01:00", False),  # 00:30 UTC
        ("yesterday", False),
    ],
)
def test_a_lock_is_older_than_the_first_run(builder, created, fine):
    made = builder(draws=5, budgets=("layers=0.1",), count_matched=False)
    made.seal()
    edit(made.results / "lock.json", created=created)
    made.lock = Lock.load(made.results / "lock.json").hash
    made.write()
    found = status(made)
    assert found.confirmatory is fine
    if not fine:
        expected = "does not say when" if created == "yesterday" else "younger than the first run"
        assert expected in found.reasons[0]


def test_the_first_run_decides(study):
    paths = sorted(study.results.glob("*/report.json"))
    edit_report(paths[3], started="2025-12-30T00:00:00Z")
    edit_report(paths[2], started="2025-12-29T12:00:00+00:00")
    (reason,) = status(study).reasons
    assert f"{paths[2].parent.name}/report.json started 2025-12-29T12:00:00+00:00" in reason


def test_a_run_without_a_date_is_no_proof(study):
    edit_report(sorted(study.results.glob("*/report.json"))[0], started="?")
    assert "does not say when the run started" in status(study).reasons[0]
