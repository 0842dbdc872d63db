"""Reading reports: where they are found, and what is refused by name."""

import gzip
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from toolkit.analysis.reading import report_file, reports, windows, workers
from toolkit.analysis.reading.study_evidence import evidence
from toolkit.errors import InputError
from toolkit.records.report import Report, unmask


def change(path, edit):
    """Edit a JSON file in place."""
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("place", ["", "study.yaml", "results"])
def test_a_study_is_found_by_folder_file_or_results(whole, place):
    results = reports.read(whole.folder / place)
    assert results.folder == whole.results
    assert results.count == 2 + 2 * (2 + 3)
    assert results.budgets == ["layers=0.1", "layers=0.2"]


def test_an_out_folder_needs_the_study_beside_its_runs(builder):
    made = builder(draws=3)
    made.write()
    out = made.results.rename(made.folder.parent / "out")
    with pytest.raises(InputError, match=r"neither study\.json nor a study\.yaml"):
        reports.read(out)
    made.study.save(out / "study.json")
    assert reports.read(out).study == made.study


def test_the_study_as_it_ran_counts_before_the_file(builder, builders):
    made = builder(draws=3)
    made.write()
    builders.make_study(draws=3, side="greater").save(made.results / "study.json")
    assert reports.read(made.folder).study.analysis.side == "greater"


def test_numbers_are_those_of_the_reports(whole):
    results = reports.read(whole.folder)
    run = results.controls["layers=0.2", "bottom-error", "matched"]
    raw = json.loads(run.path.read_text())
    assert run.draws.parameters.tolist() == [d["parameters"] for d in raw["draws"]]
    for text in ("python-topics", "wikitext2"):
        for outcome in ("loss", "kl", "agreement"):
            expected = [d["scores"][text][outcome] for d in raw["draws"]]
            assert run.draws.outcomes[text][outcome].tolist() == expected
    chosen = unmask(hex(run.draws.sets[0]), list(results.layers))
    sizes = {row.name: row.parameters for row in whole.profile.layers}
    assert sum(sizes[n] for n in chosen) == run.draws.parameters[0]
    assert results.sixteen_bit.arm == "16-bit" and results.base.arm == "base"


def test_reports_of_one_control_are_put_together(builder):
    made = builder(draws=10, count_matched=False)
    made.write()
    budget = made.study.budgets[0]
    whole = reports.read(made.folder).controls[str(budget), "top-error", "matched"]
    first = made.control("matched", "top-error", budget, 4)
    made.put(first)
    made.put(made.control("matched", "top-error", budget, 6, first=4, part="-b"))
    together = reports.read(made.folder).controls[str(budget), "top-error", "matched"]
    assert together.draws.sets == whole.draws.sets
    assert np.array_equal(
        together.draws.outcomes["python-topics"]["loss"], whole.draws.outcomes["python-topics"]["loss"]
    )
    made.put(made.control("matched", "top-error", budget, 6, first=3, part="-b"))  # draw 3 in both
    with pytest.raises(InputError, match="drawn twice"):
        reports.read(made.folder)


def test_nothing_there(tmp_path, builder):
    with pytest.raises(InputError, match="no study or results folder at"):
        reports.read(tmp_path / "nothing")
    (tmp_path / "ranking").mkdir()
    (tmp_path / "rankin.txt").touch()
    with pytest.raises(InputError, match=r"did you mean 'ranking'\?"):  # a file is no results folder
        reports.read(tmp_path / "rankin")
    with pytest.raises(InputError, match=r"`toolkit run STUDY --out .*results` makes"):
        reports.read(tmp_path / "results")
    with pytest.raises(InputError, match="no run has left a report"):
        reports.read(tmp_path / "ranking")
    made = builder(draws=2, form="small")
    made.write()
    made.study.save(made.results / "study.json")
    made.results.rename(made.folder / "results-small")
    with pytest.raises(InputError, match=r"there are some in .*results-small"):
        reports.read(made.folder)
    assert reports.read(made.folder / "results-small").form == "small"


DAMAGE = {
    "empty": (lambda text: "", "is empty"),
    "cut short": (lambda text: text[: len(text) // 2], "is not JSON"),
    "a list": (lambda text: "[1]", "holds list"),
    "another file": (lambda text: '{"schema": 1, "kind": "profile"}', "kind"),
    "no schema": (lambda text: text.replace('"schema"', '"version"', 1), "no key 'schema'"),
    "newer schema": (lambda text: text.replace('"schema": 1', '"schema": 2', 1), "has schema 2"),
    "a missing key": (lambda text: text.replace('"settings"', '"setting"', 1), "settings: Field required"),
    "an unknown key": (lambda text: text.replace('"seed"', '"sede": 1, "seed"', 1), "unknown key 'sede'.*'seed'"),
    "a wrong type": (lambda text: re.sub(r'"loss": [0-9.]+', '"loss": "low"', text, count=1), "loss"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_report_is_named(builder, damage):
    made = builder(draws=2, budgets=("layers=0.1",))
    made.write()
    path = made.results / "layers-0.1--top-error" / "report.json"
    edit, message = DAMAGE[damage]
    path.write_text(edit(path.read_text()))
    with pytest.raises(InputError, match=f"(?s){message}") as error:
        reports.read(made.folder)
    assert str(path) in str(error.value)


MIXED = {
    "study": (lambda d: d.update(study="other"), "differ in study"),
    "form": (lambda d: d.update(form="small"), "differ in form"),
    "model": (lambda d: d.update(model="another/model"), "differ in model"),
    "weights": (lambda d: d.update(fingerprint="cd" * 32), "differ in weights fingerprint"),
    "settings": (lambda d: d.update(settings="00" * 32), "differ in settings hash"),
    "text": (lambda d: d["texts"]["python-topics"].update(sha256="9" * 64), "differ in texts"),
    "windows": (lambda d: d["texts"]["python-topics"].update(windows=4), "differ in texts"),
    "reference": (lambda d: d["reference"].update(note="the original"), "differ in reference weights"),
}


@pytest.mark.parametrize("what", MIXED)
def test_mixed_results_are_refused_and_the_odd_report_named(builder, what):
    made = builder(draws=2, budgets=("layers=0.1",))
    made.write()
    path = made.results / "layers-0.1--bottom-error" / "report.json"
    edit, message = MIXED[what]
    change(path, edit)
    with pytest.raises(InputError, match=message) as error:
        reports.read(made.folder)
    assert str(path) in str(error.value)


def test_other_layers_and_another_study_are_refused(builder, builders):
    made = builder(draws=2, budgets=("layers=0.1",))
    made.write()
    path = made.results / "layers-0.1--top-error--matched" / "report.json"
    change(path, lambda d: d["layers"].pop())
    with pytest.raises(InputError, match="differ in layers"):
        reports.read(made.folder)
    made.write()
    builders.make_study(name="another", draws=2).save(made.results / "study.json")
    with pytest.raises(InputError, match="reports of study 'ranking-control', and 'another' is asked for"):
        reports.read(made.folder)


@pytest.mark.parametrize("outcome", ["loss", "kl", "agreement"])
def test_scores_that_are_not_numbers_are_refused(builder, outcome):
    made = builder(draws=3, budgets=("layers=0.1",))
    made.write()
    arm = made.results / "layers-0.1--top-error" / "report.json"
    change(arm, lambda d: d["scores"]["python-topics"].update({outcome: float("nan")}))
    with pytest.raises(InputError, match=f"top-error.*{outcome} on text 'python-topics' is nan"):
        reports.read(made.folder)
    made.write()
    control = made.results / "layers-0.1--top-error--matched" / "report.json"
    change(control, lambda d: d["draws"][1]["scores"]["python-topics"].update({outcome: float("inf")}))
    with pytest.raises(InputError, match=f"draw 1: {outcome} on text 'python-topics' is inf"):
        reports.read(made.folder)


def test_incomplete_reports_are_refused(builder):
    made = builder(draws=3, budgets=("layers=0.1",), texts=("a", "b"))
    made.write()
    arm = made.results / "layers-0.1--top-error" / "report.json"
    control = made.results / "layers-0.1--top-error--matched" / "report.json"
    for path, edit, message in (
        (arm, lambda d: d["scores"].pop("b"), "no score on text 'b'"),
        (arm, lambda d: d.pop("selection"), "selection is missing"),
        (arm, lambda d: d.pop("budget"), "budget is missing"),
        (control, lambda d: d.pop("law"), "law is missing"),
        (control, lambda d: d.update(draws=[]), "draws is missing"),
        (control, lambda d: d["draws"][2]["scores"].pop("a"), "draw 2: no score on text 'a'"),
        (control, lambda d: d["draws"][2].update(mask="0xzz"), "invalid literal for int.*0xzz"),
        (control, lambda d: d["draws"][2].update(mask=d["draws"][0]["mask"]), "drawn twice"),
    ):
        change(path, edit)
        with pytest.raises(InputError, match=message):
            reports.read(made.folder)
        made.write()


def test_two_reports_of_one_run_are_refused(builder):
    made = builder(draws=3, budgets=("layers=0.1",))
    made.write()
    (made.results / "layers-0.1--top-error").rename(made.results / "copy")
    made.write()
    with pytest.raises(InputError, match="both tell of arm 'top-error'"):
        reports.read(made.folder)


def test_set_aside_reports_and_other_files_are_left_alone(builder):
    made = builder(draws=3, budgets=("layers=0.1",))
    made.write()
    (made.results / "layers-0.1--top-error" / "report.json.damaged").write_text("{")
    (made.results / "notes").mkdir()
    assert reports.read(made.folder).count == 7


def test_windows_are_read_and_checked_against_their_hash(whole):
    results = reports.read(whole.folder)
    run = results.arms["layers=0.1", "top-error"]
    found = windows.by_window(run)
    assert set(found) == {"python-topics", "wikitext2"}
    assert len(found["wikitext2"]) == 8
    assert sum(found["wikitext2"]) / (511 * 8) == pytest.approx(run.scores["wikitext2"].loss, rel=1e-12)
    control = results.controls["layers=0.1", "top-error", "matched"]
    drawn = windows.draws_by_window(control)["wikitext2"]
    assert drawn.sum(axis=1) / (511 * 8) == pytest.approx(control.draws.outcomes["wikitext2"]["loss"], rel=1e-12)
    with pytest.raises(InputError, match="names no rows file"):
        windows.draws_by_window(replace(control, rows=None))


def test_wrong_rows_are_refused(builder):
    made = builder(draws=2, budgets=("layers=0.1",))
    made.write(rows=True)
    run = reports.read(made.folder).arms["layers=0.1", "top-error"]
    path = run.path.parent / run.rows.file
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match="is not the file that"):
        windows.by_window(run)
    path.unlink()
    with pytest.raises(InputError, match="no file"):
        windows.by_window(run)


@pytest.mark.parametrize(
    ("lines", "columns", "count", "message"),
    [
        (["[1, 2, 3]"], ["text", "window"], 1, "a list of 2 values"),
        (["[1, 2]", "[3, 4]"], ["text", "window"], 3, "has 2 rows, and .* states 3"),
        (["[1, 2"], ["text", "window"], 1, "rows.jsonl.gz:1"),
        (['{"text": 1}'], ["text", "window"], 1, "a list of 2 values"),
        (["[1, 2]"], ["text", "window"], 1, "no column 'draw'"),
    ],
)
def test_rows_of_another_shape_are_refused(builder, lines, columns, count, message):
    import hashlib

    made = builder(draws=2, budgets=("layers=0.1",))
    made.write(rows=True)
    path = made.results / "layers-0.1--top-error" / "report.json"
    content = gzip.compress("\n".join(lines).encode())
    (path.parent / "rows.jsonl.gz").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    change(path, lambda d: d["rows"].update(sha256=digest, columns=columns, count=count))
    run = reports.read(made.folder).arms["layers=0.1", "top-error"]
    with pytest.raises(InputError, match=message):
        windows.by_window(run)


DRAWS = {
    "an unknown key": lambda d: d.update(sede=1),
    "a missing key": lambda d: d.pop("parameters"),
    "no number": lambda d: d.update(parameters="many"),
    "a fraction of a layer": lambda d: d.update(layers=2.5),
    "a number without end": lambda d: d.update(parameters=2**70),
    "a list": lambda d: d.update(mismatch=[1]),
    "nothing": lambda d: d.update(mismatch=None),
    "no scores": lambda d: d.update(scores=[]),
    "an unknown score": lambda d: d["scores"]["python-topics"].update(accuracy=1),
    "a score that is text": lambda d: d["scores"]["python-topics"].update(loss="low"),
    "a missing score": lambda d: d["scores"]["python-topics"].pop("kl"),
    "no mask": lambda d: d.update(mask=12),
}


@pytest.mark.parametrize("damage", DRAWS)
def test_damaged_draws_are_named(builder, damage):
    """Draws are checked as they become columns, and no less than by their record."""
    made = builder(draws=3, budgets=("layers=0.1",))
    made.write()
    path = made.results / "layers-0.1--top-error--matched" / "report.json"
    change(path, lambda d: DRAWS[damage](d["draws"][1]))
    with pytest.raises(InputError, match="is damaged or no report") as error:
        reports.read(made.folder)
    assert str(path) in str(error.value)


def test_what_the_record_takes_is_read(builder):
    """Numbers as text are taken by the record, and so by the table."""
    made = builder(draws=3, budgets=("layers=0.1",))
    made.write()
    before = reports.read(made.folder).controls["layers=0.1", "top-error", "matched"]
    change(before.path, lambda d: d["draws"][1].update(parameters=str(d["draws"][1]["parameters"])))
    after = reports.read(made.folder).controls["layers=0.1", "top-error", "matched"]
    assert after.draws.parameters.tolist() == before.draws.parameters.tolist()
    change(before.path, lambda d: d["draws"][1].update(mask="0x00" + d["draws"][1]["mask"][2:].upper()))
    assert reports.read(made.folder).controls["layers=0.1", "top-error", "matched"].draws.sets == before.draws.sets
    change(before.path, lambda d: d["draws"][2].update(mask=d["draws"][1]["mask"].lower().replace("0x00", "0x")))
    with pytest.raises(InputError, match="drawn twice"):
        reports.read(made.folder)


def test_what_is_read_is_the_records(whole):
    """The quick way gives what `Report.load` gives."""
    for path in whole.results.glob("*/report.json"):
        (common, run), full = report_file.read_report(path), Report.load(path)
        assert common == (full.study, full.form, full.model, full.fingerprint, full.settings, *common[5:])
        assert dict(common.texts) == full.texts and common.reference == full.reference
        assert (run.name, run.role, run.arm, run.control) == (full.run, full.role, full.arm, full.control)
        assert run.selection == full.selection and run.scores == full.scores and run.rows == full.rows
        assert run.budget == (None if full.budget is None else str(full.budget))
        assert run.layers == (None if full.layers is None else tuple(full.layers))
        assert (run.draws is None) == (full.draws == [])
        if run.draws is not None:
            assert run.law.model_dump() == full.law.model_dump() | {"inclusion": None}
            assert [hex(s) for s in run.draws.sets] == [d.mask for d in full.draws]
            for name in ("layers", "parameters", "bytes", "mismatch"):
                assert getattr(run.draws, name).tolist() == [getattr(d, name) for d in full.draws]


def same(first, second):
    """Whether two answers of `read_reports` tell of the same runs."""
    return [(c, r.path, r.name, r.scores, r.draws and r.draws.masks) for c, r in first] == [
        (c, r.path, r.name, r.scores, r.draws and r.draws.masks) for c, r in second
    ]


def test_workers_read_what_one_process_reads(whole, tmp_path):
    paths = sorted(whole.results.glob("*/report.json"))
    alone = workers.read_reports(paths)
    assert len(alone) == len(paths) == 12
    for processes in (2, 5):
        assert same(workers.read_reports(paths, processes), alone)


def test_errors_of_a_worker_are_raised_here(builder):
    made = builder(draws=2, budgets=("layers=0.1",))
    made.write()
    paths = sorted(made.results.glob("*/report.json"))
    paths[-1].write_text("{")
    with pytest.raises(InputError, match="is not JSON") as error:
        workers.read_reports(paths, 3)
    assert str(paths[-1]) in str(error.value)


@pytest.mark.parametrize("broken", ["no interpreter", "wrong answer", "nothing"])
def test_workers_that_fail_are_done_without(whole, monkeypatch, broken):
    paths = sorted(whole.results.glob("*/report.json"))
    if broken == "no interpreter":
        monkeypatch.setattr(workers.sys, "executable", "/nowhere/python")
    else:
        code = {
            "wrong answer": "import pickle, sys; pickle.dump([], sys.stdout.buffer)",
            "nothing": "raise SystemExit(1)",
        }
        monkeypatch.setattr(workers, "START", code[broken])
    assert same(workers.read_reports(paths, 3), workers.read_reports(paths))


def test_every_role_is_read(full):
    results = reports.read(full.folder)
    assert set(results.sweeps) == {"restore", "quantize"} and results.repeat.arm == "base"
    names = ("oracle-additive", "anti-oracle")
    expected = {(b, a, n) for b in results.budgets for a in ("top-error", "bottom-error") for n in names}
    assert set(results.oracles) == expected
    assert {mark.lock for mark in results.marks} == {full.lock} and len(results.marks) == results.count == 50
    assert {mark.started for mark in results.marks} == {"2026-01-01T00:00:00Z"}
    for kind, run in results.sweeps.items():
        raw = json.loads(run.path.read_text())
        assert [d["scores"]["wikitext2"]["loss"] for d in raw["draws"]] == run.draws.outcomes["wikitext2"][
            "loss"
        ].tolist()
        alone = [1 << at for at in range(210)]
        assert run.draws.sets == (alone if kind == "restore" else [2**210 - 1 - one for one in alone])
    law = results.controls["layers=0.1", "top-error", "permuted"].law
    assert law.shared and law.chain and law.inclusion is None


def test_each_report_keeps_its_own_lock(builder):
    made = builder(draws=2, budgets=("layers=0.1",))
    made.write()
    assert {mark.lock for mark in reports.read(made.folder).marks} == {None}
    made.seal()
    made.put(made.reference("base"))
    assert {mark.lock for mark in reports.read(made.folder).marks} == {None, made.lock}


def test_families_may_repeat_a_set_and_their_numbers_count(builders, tmp_path):
    """Draw i of every budget goes together, so a number may neither be missing nor stand twice."""
    study = builders.make_full_study(draws=6, few=3, headroom=None, repeat=False, budgets=("layers=0.1", "layers=0.2"))
    made = builders.Builder(tmp_path / "study", study)
    made.write()
    budget = study.budgets[0]
    report = made.control("permuted", "top-error", budget, 6)
    same = [d.model_copy(update={"mask": report.draws[0].mask}) for d in report.draws]
    made.put(report.model_copy(update={"draws": same}))
    assert len(set(reports.read(made.folder).controls[str(budget), "top-error", "permuted"].draws.sets)) == 1
    made.put(report.model_copy(update={"draws": [*same[:2], *same[3:]]}))
    with pytest.raises(InputError, match=r"permuted.*draw 2 is missing"):
        reports.read(made.folder)
    made.put(report.model_copy(update={"draws": [*same, same[4]]}))
    with pytest.raises(InputError, match="draw 4 stands twice"):
        reports.read(made.folder)
    made.put(report.model_copy(update={"draws": list(report.draws[4:])}))
    made.put(report.model_copy(update={"run": report.run + "-b", "draws": list(report.draws[:4])}))
    found = reports.read(made.folder).controls[str(budget), "top-error", "permuted"].draws
    assert found.index.tolist() == list(range(6)) and [hex(s) for s in found.sets] == [d.mask for d in report.draws]
    assert found.outcomes["python-topics"]["loss"].tolist() == [d.scores["python-topics"].loss for d in report.draws]


def test_a_sweep_that_is_none_is_refused(builders, tmp_path):
    study = builders.make_full_study(draws=3, few=3, budgets=("layers=0.1",), test="each")
    made = builders.Builder(tmp_path / "study", study)
    made.write()
    report = made.sweep("restore")
    for draws in (report.draws[:-1], [*report.draws[1:], report.draws[0]]):
        made.put(report.model_copy(update={"draws": list(draws)}))
        with pytest.raises(InputError, match="each of the 210 layers alone"):
            reports.read(made.folder)
    made.put(report.model_copy(update={"layers": None}))
    with pytest.raises(InputError, match="layers is missing"):
        reports.read(made.folder)
    made.put(report)
    oracle = made.oracle("anti-oracle", "top-error", study.budgets[0])
    made.put(oracle.model_copy(update={"run": "copy"}))
    with pytest.raises(InputError, match="both tell of oracle 'top-error'"):
        reports.read(made.folder)


def test_evidence_is_what_the_reports_and_rows_say(full):
    """Outcomes, and the second half of the windows, read again by other means."""
    found = evidence(reports.read(full.folder))
    assert [(a.budget, a.arm) for a in found.arms] == [
        (str(b), a.label) for b in full.study.budgets for a in full.study.arms
    ]
    assert found.texts == ("python-topics", "wikitext2") and found.headroom == full.study.headroom
    arm = found.arms[-1]
    budget = full.study.budgets[-1]
    assert [c.control for c in arm.chances] == ["matched", "permuted", "composition", "shuffled"]
    raw = json.loads((full.results / "layers-0.2--bottom-error--matched" / "report.json").read_text())
    sizes = np.array([d["parameters"] for d in raw["draws"]])
    off = sizes / arm.parameters - 1
    assert arm.chances[0].mismatch == (pytest.approx(off.mean()), pytest.approx(max(off, key=abs)))
    for text in found.texts:
        room = arm.headroom[text]
        losses = [d["scores"][text]["loss"] for d in raw["draws"]]
        assert arm.chances[0].outcomes[text].tolist() == losses
        sets = [frozenset(unmask(d["mask"], full.names)) for d in raw["draws"]]
        nll = np.array([full.nll(chosen, text)[8:] for chosen in sets])
        assert room.chance == pytest.approx(nll.mean(axis=0), rel=1e-12)
        assert room.draws == pytest.approx(nll.sum(axis=1) / (8 * 511), rel=1e-12)
        assert room.tokens.tolist() == [511.0] * 8
        for name, values in (("oracle-additive", room.oracle), ("anti-oracle", room.anti)):
            chosen = frozenset(full.oracle(name, "bottom-error", budget).selection.layers)
            assert values.tolist() == full.nll(chosen, text)[8:]
        assert room.arm.tolist() == full.nll(full.chosen("bottom-error", budget), text)[8:]


def test_headroom_needs_all_its_runs(builders, tmp_path):
    import shutil

    study = builders.make_full_study(draws=3, few=3, budgets=("layers=0.1",), test="each")
    made = builders.Builder(tmp_path / "study", study)
    made.write(rows=True)
    shutil.rmtree(made.results / "layers-0.1--top-error--anti-oracle")
    found = evidence(reports.read(made.folder))
    assert [bool(a.headroom) for a in found.arms] == [False, True]
    path = made.results / "layers-0.1--bottom-error--oracle-additive" / "report.json"
    made.windows = 6
    made.put(made.oracle("oracle-additive", "bottom-error", study.budgets[0]), rows=True)
    change(path, lambda d: d["texts"]["python-topics"].update(windows=8, tokens=4096))
    with pytest.raises(InputError, match="hold 6 windows of text 'python-topics', and 8 are stated"):
        evidence(reports.read(made.folder))
