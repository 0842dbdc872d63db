"""Reading fine-tuning studies: what is there, what is missing, and what is refused."""

import json

import numpy as np
import pytest

from toolkit.analysis.reading.outcomes import Reader, read_outcomes
from toolkit.analysis.reading.trained import declared_runs, locate, read
from toolkit.errors import InputError
from toolkit.records.levers import Seeds
from toolkit.records.trained import Flag


def edit(path, **changes):
    """Change a report's values; a key `a.b` goes down."""
    data = json.loads(path.read_text())
    for key, value in changes.items():
        *way, last = key.split("__")
        at = data
        for step in way:
            at = at[step]
        at[last] = value
    path.write_text(json.dumps(data))
    return path


def report(builder, name):
    return builder.results / "runs" / name / "report.json"


@pytest.mark.parametrize(
    "study",
    [
        {},
        {"tasks": ("sums", "words"), "repeats": {"arm": "aqlora-q", "count": 4}, "tune": {"values": [1e-4, 3e-4]}},
        {"seeds": [{"adapter": 1, "data": 2, "draw": 3}, {"adapter": 1, "data": 2, "draw": 4}]},
        {
            "arms": [
                {"name": "qlora"},
                {"name": "aqlora-q", "protect": {"selector": "top-error", "budget": "layers=0.2"}},
                {"name": "matched", "protect": {"selector": "random-matched", "like": "aqlora-q", "draws": 3}},
            ],
            "repeats": {"arm": "matched", "count": 4},
            "tune": {"values": [1e-4, 3e-4]},
        },
    ],
)
def test_the_declared_runs_are_those_that_the_runner_makes(trained, study):
    from toolkit.runs.finetuning.design import expand

    declared = trained.study(**study)
    made = {
        (r.role, r.task, r.arm, r.seeds, r.draw, r.value if r.role == "tune" else None)
        for r in expand(declared)
        if r.role != "untrained"
    }
    keys = declared_runs(declared)
    assert {tuple(key[:6]) for key in keys} == made and len(keys) == len(made)


def test_a_study_is_found_by_its_folder_its_results_and_its_file(made):
    builder = made(seeds=1).write()
    (builder.folder / "study.yaml").write_text("kind: fine-tuning\n")
    for place in (builder.folder, builder.results, builder.folder / "study.yaml"):
        assert locate(place) == builder.results
        assert len(read(place).runs) == 3


def test_runs_come_in_the_studys_order_and_missing_ones_are_named(made):
    builder = made(seeds=4, repeats={"arm": "qlora", "count": 4}).write()
    report(builder, "sums--qlora--seed2").unlink()
    report(builder, "sums--qlora--seed0-r3").unlink()
    results = read(builder.folder)
    assert [run.seeds.data for run in results.of("sums", "qlora")] == [0, 1, 3]
    assert [str(key) for key in results.missing] == ["qlora on sums (seed2)", "repeat of qlora on sums (seed0-r3)"]
    assert [run.seeds for run in results.repeats("sums")] == [Seeds.all(0), Seeds.all(0, 1), Seeds.all(0, 2)]


def test_own_runs_are_asked_for_once_the_trials_are_done(made):
    builder = made(seeds=2, tune={"values": [1e-4, 1e-3]}).write()
    results = read(builder.folder)
    assert sum(key.own for key in results.missing) == 6
    builder.write_own(1e-4)
    assert not read(builder.folder).missing


def test_an_arm_that_chose_the_shared_value_has_its_shared_runs_as_its_own(made):
    """Shared is 3e-4; qlora's trials choose it, aqlora-q's do not, and matched's are not done."""
    builder = made(seeds=2, tune={"values": [1e-4, 3e-4]}).write()
    for arm, losses in {"qlora": (2.0, 1.0), "aqlora-q": (1.0, 2.0), "matched": (2.0, 1.0)}.items():
        for value, loss in zip((1e-4, 3e-4), losses, strict=True):
            path = builder.run("sums", arm, Seeds.all(10**6), role="tune", value=value, loss=np.full(60, loss))
            if arm == "matched" and value == 1e-4:
                path.unlink()
    results = read(builder.folder)
    chosen = {arm: results.chosen("sums", arm) for arm in ("qlora", "aqlora-q", "matched")}
    assert chosen == {"qlora": 3e-4, "aqlora-q": 1e-4, "matched": 3e-4}
    assert results.shares("sums", "qlora") and results.of("sums", "qlora", own=True) == results.of("sums", "qlora")
    assert len(results.of("sums", "qlora")) == 2
    for arm in ("aqlora-q", "matched"):
        assert not results.shares("sums", arm) and results.of("sums", arm, own=True) == []
    assert [key.arm for key in results.missing if key.own] == ["aqlora-q"] * 2
    assert [key.arm for key in results.missing if key.role == "tune"] == ["matched"]


def test_an_unfinished_run_counts_nowhere_but_is_kept(made):
    builder = made(seeds=2)
    builder.write()
    builder.run("sums", "qlora", 1, fatal=Flag(check="memory", severity="fatal", reason="out of memory", step=7))
    results = read(builder.folder)
    assert [run.seeds.data for run in results.of("sums", "qlora")] == [0]
    assert [(run.name, run.fatal.step) for run in results.unfinished] == [("sums--qlora--seed1", 7)]


def test_a_study_of_which_the_untrained_run_alone_is_there_makes_a_table(made):
    from toolkit.analysis.printing.table import table

    builder = made(seeds=1)
    builder.run("sums", "qlora", 0, role="untrained")
    results = read(builder.folder)
    assert results.untrained["sums"].role == "untrained" and results.tasks == [] and len(results.missing) == 3
    assert "Missing runs (3)" in table(builder.folder)


def test_undeclared_runs_are_set_aside(made):
    builder = made(seeds=2).write()
    builder.run("sums", "qlora", 9)
    assert [run.seeds.data for run in read(builder.folder).others] == [9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"study": "other"}, "differ in study"),
        ({"fingerprint": "f" * 64}, "differ in weights fingerprint"),
        ({"settings": "f" * 64}, "differ in settings of task 'sums'.*seed1"),
        ({"form": "small"}, "differ in form"),
        ({"schema": 2}, "schema 2"),
        ({"kind": "report"}, "kind"),
        ({"role": "control"}, "role"),
        ({"seeds__adapter": -1}, "adapter"),
        ({"finished": False}, "no fatal flag says why"),
        ({"scores": {}}, "scores of all rows together"),
        ({"scores____score": 1.5}, "a number from 0 to 1"),
        ({"scores____loss": float("inf")}, "the loss is inf"),
        ({"surprise": 1}, "unknown key 'surprise'"),
    ],
)
def test_a_report_that_does_not_fit_is_refused_by_name(made, changes, message):
    builder = made(seeds=4).write()
    edit(report(builder, "sums--qlora--seed1"), **changes)
    with pytest.raises(InputError, match=message) as caught:
        read(builder.folder)
    assert "sums--qlora--seed1" in str(caught.value)


def test_a_damaged_report_is_refused(made):
    builder = made(seeds=1).write()
    path = report(builder, "sums--qlora--seed0")
    path.write_text(path.read_text()[:100])
    with pytest.raises(InputError, match="move it away"):
        read(builder.folder)


def test_two_reports_of_one_run_are_refused(made):
    builder = made(seeds=1).write()
    path = report(builder, "sums--qlora--seed0")
    (path.parent.parent / "copy").mkdir()
    (path.parent.parent / "copy" / "report.json").write_text(path.read_text())
    with pytest.raises(InputError, match=r"both tell of qlora on sums \(seed0\)"):
        read(builder.folder)


def test_results_without_a_study_are_refused(made):
    builder = made(seeds=1).write()
    (builder.results / "study.json").unlink()
    with pytest.raises(InputError, match=r"neither study.json nor a study.yaml"):
        read(builder.results)


def test_no_results_name_what_makes_them(tmp_path, trained):
    trained.study().save(tmp_path / "results" / "study.json")
    with pytest.raises(InputError, match="toolkit run"):
        read(tmp_path)


def test_rows_become_arrays(made):
    """Σ nll/Σ tokens by hand: (1·2 + 3·0.5)/(1 + 3) = 0.875."""
    builder = made(seeds=1)
    builder.run("sums", "qlora", 0, loss=np.array([2.0, 0.5]), score=np.array([1.0, 0.0]), tokens=np.array([1, 3]))
    results = read(builder.folder)
    run = results.of("sums", "qlora")[0]
    found = read_outcomes(run)
    assert found.nll.tolist() == [2.0, 1.5] and found.tokens.tolist() == [1, 3] and found.score.tolist() == [1, 0]
    assert run.scores[""].loss == pytest.approx(0.875)
    assert Reader().scored([run]).loss.tolist() == [[2.0, 0.5]]


def test_a_task_may_have_no_losses_or_no_scores(made):
    builder = made(seeds=1)
    builder.run("sums", "qlora", 0, loss=np.array([2.0, 0.5]), with_score=False, chance=None)
    assert Reader().scored(read(builder.folder).of("sums", "qlora")).score is None


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (2, "0.3", "nll is '0.3'"),
        (2, float("nan"), "nll is nan"),
        (2, True, "nll is True"),
        (3, 0, "tokens is 0.*at least one target token"),
        (7, "right", "score is 'right'"),
    ],
)
def test_rows_of_another_kind_are_refused_by_line(made, column, value, message):
    from toolkit.records import rows as rows_file
    from toolkit.records.trained import ROW

    builder = made(seeds=1)
    path = builder.run("sums", "qlora", 0)
    lines = [["", n, 0.5, 1, None, None, None, 1.0, True] for n in range(60)]
    lines[4][column] = value
    written = rows_file.write(path.parent, ROW, lines)
    edit(path, rows=written.model_dump(mode="json"))
    with pytest.raises(InputError, match=f":5: {message}"):
        read_outcomes(read(builder.folder).of("sums", "qlora")[0])


def test_a_changed_loss_score_or_rows_file_is_refused(made):
    builder = made(seeds=1).write()
    path = report(builder, "sums--qlora--seed0")
    run = read(builder.folder).of("sums", "qlora")[0]
    read_outcomes(run)
    edit(path, scores____loss=run.scores[""].loss + 0.01)
    with pytest.raises(InputError, match=r"the loss is .*add up to"):
        read_outcomes(read(builder.folder).of("sums", "qlora")[0])
    edit(path, scores____loss=run.scores[""].loss, scores____score=0.0123)
    with pytest.raises(InputError, match=r"the accuracy is 0\.0123"):
        read_outcomes(read(builder.folder).of("sums", "qlora")[0])
    edit(path, scores____loss=float("nan"))  # rows have losses, and the report says that none was measured
    with pytest.raises(InputError, match="the loss is nan"):
        read_outcomes(read(builder.folder).of("sums", "qlora")[0])
    (path.parent / "rows.jsonl.gz").write_bytes(b"x")
    with pytest.raises(InputError, match="is not the file"):
        read_outcomes(read(builder.folder).of("sums", "qlora")[0])
    (path.parent / "rows.jsonl.gz").unlink()
    with pytest.raises(InputError, match="no file"):
        read_outcomes(read(builder.folder).of("sums", "qlora")[0])


def test_arms_that_scored_other_rows_are_refused_with_both_names(made):
    builder = made(seeds=1).write()
    builder.run("sums", "aqlora-q", 0, loss=np.ones(59))
    results, reader = read(builder.folder), Reader()
    reader.outcomes(results.of("sums", "qlora")[0])
    with pytest.raises(InputError, match=r"arm 'aqlora-q'.*arm 'qlora'.*did not score the same rows.*59"):
        reader.outcomes(results.of("sums", "aqlora-q")[0])


def test_arms_with_scores_of_other_sets_are_refused(made):
    builder = made(seeds=1)
    builder.run("sums", "qlora", 0, loss=np.ones(60), groups=["a"] * 30 + ["b"] * 30)
    edit(builder.run("sums", "aqlora-q", 0, loss=np.ones(60), groups=["a"] * 30 + ["b"] * 30))
    path = report(builder, "sums--aqlora-q--seed0")
    scores = json.loads(path.read_text())["scores"]
    edit(path, scores={name: value for name, value in scores.items() if name != "b"})
    results, reader = read(builder.folder), Reader()
    reader.outcomes(results.of("sums", "qlora")[0])
    with pytest.raises(InputError, match=r"scores of other sets.*'a' and .*'b'"):
        reader.outcomes(results.of("sums", "aqlora-q")[0])


def test_arms_that_count_tokens_otherwise_are_refused(made):
    builder = made(seeds=1).write()
    builder.run("sums", "aqlora-q", 0, loss=np.ones(60), tokens=np.array([1 + n % 3 + (n == 7) for n in range(60)]))
    results, reader = read(builder.folder), Reader()
    reader.outcomes(results.of("sums", "qlora")[0])
    with pytest.raises(InputError, match=r"target tokens of row 7.*3 and 2"):
        reader.outcomes(results.of("sums", "aqlora-q")[0])


def test_trials_may_score_other_rows_than_the_tables(made):
    builder = made(seeds=1, tune={"values": [1e-4, 3e-4]}).write()
    builder.run("sums", "qlora", Seeds.all(1_000_000), role="tune", value=1e-4, loss=np.ones(7))
    reader, results = Reader(), read(builder.folder)
    for run in (*results.of("sums", "qlora"), results.trials("sums", "qlora")[0]):
        reader.outcomes(run)
