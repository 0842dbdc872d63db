"""Judging scores computed anywhere: numbers against scipy and a study of the same draws; bad input by name."""

import csv
import io
import itertools
import json
import shutil
import subprocess
import sys
import time
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import toolkit as tk
from toolkit.analysis import judge as judging
from toolkit.analysis.printing.summary import summary
from toolkit.analysis.reading import reports
from toolkit.analysis.reading.scores_file import COLUMNS, read_scores
from toolkit.analysis.reading.selection_files import grouped, read_selections
from toolkit.cli import main
from toolkit.errors import InputError

BUDGETS = ("layers=0.1", "layers=0.2")
DRAWS = 19


@pytest.fixture(scope="module")
def profile(builders):
    return builders.make_profile(blocks=6)


@pytest.fixture(scope="module")
def family(profile, tmp_path_factory):
    """Two arms at two budgets, families of two laws and single draws of a third; it is only read."""
    folder = tmp_path_factory.mktemp("selections")
    for name in ("top-error", "bottom-error"):
        arms = [tk.select(name, profile, budget=b) for b in BUDGETS]
        for arm, budget in zip(arms, BUDGETS, strict=True):
            arm.save(folder / f"{name}-{budget}.json")
        for law in ("random-matched", "random-permuted"):
            for at, made in enumerate(tk.chains(law, profile, likes=arms, count=DRAWS)):
                for one, budget in zip(made, BUDGETS, strict=True):
                    one.save(folder / law / name / budget / f"{at:04}.json")
        if name == "top-error":
            for at, one in enumerate(tk.draws("random-count", profile, like=arms[0], count=DRAWS)):
                one.save(folder / "count" / f"{at:04}.json")
    return folder


@pytest.fixture
def one(profile, tmp_path):
    """One arm and nine draws in a folder of its own, which may be changed."""
    folder = tmp_path / "selections"
    arm = tk.select("top-error", profile, budget="layers=0.1")
    arm.save(folder / "top.json")
    for at, draw in enumerate(tk.draws("random-matched", profile, like=arm, count=9)):
        draw.save(folder / f"draw-{at}.json")
    return folder


def write(path, lines, columns=COLUMNS, **how):
    """A CSV file from dictionaries or lists of cells."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, **how)
        writer.writerow(columns)
        writer.writerows([line[c] for c in columns] if isinstance(line, dict) else line for line in lines)
    return path


def lines_of(folder, value=None, metric="loss", seeds=(0,)):
    """One line a selection and seed, with a value that is a function of the two."""
    files = read_selections(folder)
    arms = {c.hash: c.budget for c in files if c.matched_to is None}
    made = {}
    for c in files:
        for seed in seeds:
            drawn = Random(f"{c.hash} {seed} {metric}").gauss(2.8, 0.01) if value is None else value(c, seed)
            made[c.hash, seed] = {
                "selection": c.hash,
                "model": c.model,
                "budget": c.budget or arms.get(c.matched_to) or "",
                "seed": seed,
                "metric": metric,
                "value": drawn,
            }
    return list(made.values())


def change(path, edit):
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


# right numbers


def test_ranks_are_scipys(family, tmp_path):
    lines = lines_of(family, seeds=(0, 1, 2))
    path = write(tmp_path / "s.csv", lines)
    data = json.loads(tk.judge(family, path, "json", control="random-matched", test="each", side="greater"))
    mean = {}
    for line in lines:
        mean.setdefault(line["selection"], []).append(line["value"])
    files = {c.name: c for c in read_selections(family)}
    seen = 0
    for arm in data["arms"]:
        value = np.mean(mean[arm["hash"]])
        for control in arm["controls"]:
            matched = [
                c
                for c in files.values()
                if c.matched_to == arm["hash"] and c.selector == control["law"].partition("(")[0]
            ]
            drawn = [np.mean(mean[c.hash]) for c in matched]
            found = control["texts"]["loss"]
            assert control["draws"] == len(drawn) == DRAWS
            assert found["outcome"] == pytest.approx(value, rel=1e-12)
            better = 100 - stats.percentileofscore(drawn, value, kind="strict")
            assert found["at_least_as_good"] == round(better / 100 * DRAWS)
            assert found["p"] == pytest.approx((1 + round(better / 100 * DRAWS)) / (DRAWS + 1))
            assert found["median"] == pytest.approx(np.median(drawn), rel=1e-12)
            seen += 1
    assert seen == 9 and len(data["verdicts"]["claims"]) == 4


def test_scores_of_a_study_are_judged_as_the_study_is(full, tmp_path):
    """The study's own losses, through files of its selections and a CSV: the same tests and verdicts."""
    folder = tmp_path / "selections"
    results, lines = reports.read(full.folder), []

    def put(selection, losses, name):
        selection.save(folder / f"{name}.json")
        for text, loss in losses.items():
            lines.append([name, selection.model, "", 0, text, repr(float(loss))])

    for (budget, arm), run in results.arms.items():
        put(run.selection, {t: run.scores[t].loss for t in results.texts}, f"{arm}-{budget}")
    for arm in ("top-error", "bottom-error"):
        for control in ("matched", "permuted"):
            columns = full.families[control, arm]
            for budget, column in zip(results.budgets, columns, strict=True):
                drawn = results.controls[budget, arm, control].draws
                for at, selection in enumerate(column):
                    losses = {t: drawn.outcomes[t]["loss"][at] for t in results.texts}
                    put(selection, losses, f"{control}-{arm}-{budget}-{at}")
    path = write(tmp_path / "s.csv", lines)
    ours = json.loads(
        tk.judge(folder, path, "json", control="random-matched", margin=0.005, margin_reason="half a percent")
    )
    theirs = summary(results)
    assert ours["analysis"]["test"] == "joint"  # families over budgets
    keyed = {(c["arm"], c["text"]): c for c in theirs["verdicts"]["claims"]}
    assert len(keyed) == len(ours["verdicts"]["claims"]) == 4
    for claim in ours["verdicts"]["claims"]:
        other = keyed[claim["arm"], claim["text"]]
        assert all(claim[k] == other[k] for k in ("p", "adjusted", "at_least_as_good", "verdict", "gaps", "budgets"))
    laws = {(law["arm"], law["text"]): law["tests"] for law in theirs["verdicts"]["laws"]}
    for law in ours["verdicts"]["laws"]:
        assert [t["p"] for t in law["tests"]] == [t["p"] for t in laws[law["arm"], law["text"]][:2]]
        assert law["tests"][1]["holds"] == laws[law["arm"], law["text"]][1]["holds"] != []


def test_values_are_averaged_over_seeds_and_windows(one, tmp_path):
    lines = []
    rng = np.random.default_rng(0)
    expected = {}
    for line in lines_of(one):
        values = rng.normal(size=(2, 5))
        expected[line["selection"]] = values.mean()
        for seed, window in itertools.product(range(2), range(5)):
            lines.append(line | {"seed": seed, "window": f"w{window}", "value": repr(float(values[seed, window]))})
    Random(0).shuffle(lines)
    path = write(tmp_path / "s.csv", lines, (*COLUMNS, "window"))
    data, found = judging.judgement(one, path, side="less", level=0.2, correction="none", margin=0.0)
    arm = data["arms"][0]
    assert found.arms[0].outcomes["loss"] == pytest.approx(expected[arm["hash"]], rel=1e-12)
    drawn = sorted(found.arms[0].chances[0].outcomes["loss"])
    assert drawn == pytest.approx(sorted(v for k, v in expected.items() if k != arm["hash"]), rel=1e-12)
    assert "over 5 windows" in tk.judge(one, path)
    for missing in (lines[1:], [x for x in lines if x["window"] != "w3" or x["seed"] != 1 or x != lines[7]][:-1]):
        write(path, missing, (*COLUMNS, "window"))
        with pytest.raises(
            InputError, match=r"has no loss of .* for seed \d, row 'w\d'.* all have the same seeds and rows"
        ):
            tk.judge(one, path)


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(10)), st.booleans(), st.sampled_from([8, 12, 64]))
def test_order_repeats_and_prefixes_change_nothing(profile, order, twice, digits):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "selections"
        arm = tk.select("top-error", profile, budget="layers=0.1")
        arm.save(folder / "top.json")
        for at, draw in enumerate(tk.draws("random-matched", profile, like=arm, count=9)):
            draw.save(folder / f"{at}.json")
        lines = lines_of(folder)
        path = write(Path(root) / "s.csv", lines)
        before = json.loads(tk.judge(folder, path, "json"))
        mixed = [lines[at] | {"selection": lines[at]["selection"][:digits]} for at in order]
        write(path, mixed + (mixed[:4] if twice else []))
        after = json.loads(tk.judge(folder, path, "json"))
        assert before["arms"] == after["arms"] and before["verdicts"] == after["verdicts"]


def test_an_empty_part_is_no_part(one, tmp_path):
    """A column `window` without a cell in it, as a joined table has it, changes nothing."""
    lines = lines_of(one)
    plain = tk.judge(one, write(tmp_path / "s.csv", lines), "json")
    wide = write(tmp_path / "w.csv", [line | {"window": ""} for line in lines], (*COLUMNS, "window"))
    assert json.loads(tk.judge(one, wide, "json"))["verdicts"] == json.loads(plain)["verdicts"]
    for form in ("md", "latex", "csv"):
        assert tk.judge(one, wide, form)


def test_neighbouring_seeds_stay_two_however_long(one, tmp_path):
    seeds = (2**53, 2**53 + 1, 10**30, 10**30 + 1)
    data = json.loads(tk.judge(one, write(tmp_path / "s.csv", lines_of(one, seeds=seeds)), "json"))
    assert data["scores"]["seeds"] == list(seeds)


@pytest.mark.parametrize("value", [1e308, -1e150])
def test_scores_whose_squares_leave_the_range_are_refused(one, tmp_path, value, recwarn):
    lines = lines_of(one)
    lines[3]["value"] = value
    with pytest.raises(InputError, match=r"the outcome is -?1e\+\d+; only ones up to 1e\+100 in size"):
        tk.judge(one, write(tmp_path / "s.csv", lines))
    assert not recwarn.list


def test_selections_are_named_by_hash_prefix_file_or_path(one, tmp_path):
    files = {c.hash: c for c in read_selections(one)}
    lines = lines_of(one)
    expected = tk.judge(one, write(tmp_path / "s.csv", lines), "json")
    for name in (lambda h: h[:8], lambda h: files[h].path.stem, lambda h: h):
        named = [line | {"selection": name(line["selection"])} for line in lines]
        assert (
            json.loads(tk.judge(one, write(tmp_path / "s.csv", named), "json"))["arms"] == json.loads(expected)["arms"]
        )
    (one / "deep").mkdir()
    (one / "draw-3.json").rename(one / "deep" / "draw-2.json")
    named = [
        line | {"selection": "deep/draw-2" if files[line["selection"]].name == "draw-3" else line["selection"]}
        for line in lines
    ]
    arms = json.loads(tk.judge(one, write(tmp_path / "s.csv", named), "json"))["arms"]
    assert arms == json.loads(expected)["arms"]
    named[-1]["selection"] = "draw-2"
    with pytest.raises(InputError, match=r"'draw-2' is the name of several files \(deep/draw-2, draw-2\)"):
        tk.judge(one, write(tmp_path / "s.csv", named), "json")


@pytest.mark.parametrize("form", ["bom", "crlf", "quoted", "bom crlf quoted"])
def test_what_other_programs_write_is_read(one, tmp_path, form):
    lines = lines_of(one)
    expected = tk.judge(one, write(tmp_path / "s.csv", lines), "json")
    how = {"lineterminator": "\r\n" if "crlf" in form else "\n"}
    if "quoted" in form:
        how["quoting"] = csv.QUOTE_ALL
    path = write(tmp_path / "s.csv", [*lines, []], **how)
    if "bom" in form:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert json.loads(tk.judge(one, path, "json"))["verdicts"] == json.loads(expected)["verdicts"]


def test_draws_of_one_seed_each_are_one_control(profile, tmp_path):
    folder = tmp_path / "selections"
    arm = tk.select("top-error", profile, budget="layers=0.1")
    arm.save(folder / "top.json")
    for seed in range(12):
        tk.select("random-matched", profile, like=arm, seed=seed).save(folder / f"draw-{seed}.json")
    (arm,) = grouped(read_selections(folder))
    assert [len(group.draws) for group in arm.groups] == [12]
    assert [c.seed for c in arm.groups[0].draws] == list(range(12))


def test_two_seeds_of_many_draws_are_two_controls(profile, one, tmp_path):
    arm = tk.select("top-error", profile, budget="layers=0.1")
    for at, draw in enumerate(tk.draws("random-matched", profile, like=arm, count=5, seed=1)):
        draw.save(one / f"other-{at}.json")
    (arm,) = grouped(read_selections(one))
    assert [(group.control, len(group.draws)) for group in arm.groups] == [
        ("random-matched@seed-0", 9),
        ("random-matched@seed-1", 5),
    ]
    path = write(tmp_path / "s.csv", lines_of(one))
    with pytest.raises(InputError, match=r"several laws \(random-matched@seed-0, .*--control random-matched@seed-0"):
        tk.judge(one, path)
    with pytest.raises(InputError, match="did you mean 'random-matched@seed-"):
        tk.judge(one, path, control="random-matched@seed-2")


def test_families_tell_their_law(family):
    arms = grouped(read_selections(family))
    assert [(a.label, a.chosen.budget) for a in arms] == [
        (a, b) for b in BUDGETS for a in ("bottom-error", "top-error")
    ]
    laws = {group.control: group.law for arm in arms for group in arm.groups}
    assert set(laws) == {"random-matched", "random-permuted", "random-count"}
    assert laws["random-matched"].chain and not laws["random-matched"].shared
    assert laws["random-permuted"].chain and laws["random-permuted"].shared
    assert not laws["random-count"].chain and "roles" in laws["random-permuted"].holds


@pytest.mark.parametrize("format", ["md", "json", "csv", "latex"])
def test_every_format_and_the_figure(family, tmp_path, format):
    path = write(tmp_path / "s.csv", lines_of(family) + lines_of(family, metric="accuracy"))
    picture = tmp_path / "out.png"
    out = tk.judge(family, path, format, control="random-permuted", correction="max-t", figure=picture)
    assert out == out.rstrip() and "top-error" in out and picture.read_bytes().startswith(b"\x89PNG")
    if format == "md":
        assert out.startswith("- Exploratory: scores of a file") and "**accuracy: each arm against" in out
        assert "corrected by max-t" in out and "**In sentences**" in out
    if format == "csv":
        lines = list(csv.DictReader(io.StringIO(out)))
        assert sum(line["role"] == "arm" for line in lines) == 2 * 9
        assert sum(line["role"] == "claim" for line in lines) == 2 * 2
    only = json.loads(tk.judge(family, path, "json", control="random-permuted", metrics=["accuracy"]))
    assert list(only["texts"]) == ["accuracy"] and only["analysis"]["outcome"] == "accuracy"


# bad input, named and refused


def refused(one, tmp_path, edit, message):
    lines = lines_of(one)
    edited = edit(lines) or lines
    with pytest.raises(InputError, match=message) as error:
        tk.judge(one, write(tmp_path / "s.csv", edited))
    return str(error.value)


def cell(at, **values):
    def edit(lines):
        lines[at] |= values

    return edit


BAD_LINES = {
    "an unknown hash": (
        cell(3, selection="0123456789abcdef"),
        r"s\.csv:5: selection '0123456789abcdef' is unknown; the closest hash is [0-9a-f]{16}",
    ),
    "an unknown name": (cell(3, selection="drow-3"), r"s\.csv:5: selection 'drow-3' is unknown; did you mean 'draw-3'"),
    "too short a prefix": (lambda lines: cell(2, selection=lines[2]["selection"][:7])(lines), "is unknown"),
    "no selection": (cell(2, selection=" "), r"s\.csv:4: the cell of column 'selection' is empty"),
    "no metric": (cell(2, metric=""), r"s\.csv:4: the cell of column 'metric' is empty"),
    "another model": (cell(4, model="other/model"), r"s\.csv:6: scores of model 'other/model', .* mixed"),
    "another budget": (cell(0, budget="layers=0.2"), r"s\.csv:2: budget 'layers=0.2', and selection .* has layers=0.1"),
    "no budget": (cell(0, budget="10%"), r"s\.csv:2: cannot read budget '10%'"),
    "NaN": (cell(5, value="nan"), r"s\.csv:7: value is 'nan'; a finite number"),
    "infinity": (cell(5, value="-inf"), r"s\.csv:7: value is '-inf'"),
    "a number too large": (cell(5, value="1e999"), r"s\.csv:7: value is '1e999'"),
    "nothing": (cell(5, value=""), r"s\.csv:7: value is ''"),
    "text": (cell(5, value="2,81"), r"s\.csv:7: value is '2,81'"),
    "underscores": (cell(5, value="2_8"), r"s\.csv:7: value is '2_8'"),
    "no seed": (cell(5, seed="a"), r"s\.csv:7: seed is 'a'; an integer"),
    "half a seed": (cell(5, seed="0.5"), r"s\.csv:7: seed is '0.5'"),
    "another seed": (
        cell(5, seed=1),
        r"has no loss of .*draw-\d\.json .* for seed 0: all have the same seeds",
    ),
    "a missing draw": (
        lambda lines: [x for x in lines if x is not lines[4]],
        r"has no loss of .*draw-\d\.json \(draw [0-9a-f]{12}\)",
    ),
    "a missing arm": (lambda lines: lines[:-1], r"has no loss of .*top\.json \(arm [0-9a-f]{12}\)"),
    "another value": (
        lambda lines: [*lines, lines[2] | {"value": 3.5}],
        r"s\.csv:12: loss of selection .*, seed 0, is 3\.5, and line 4 gives 2\.\d+; keep one",
    ),
    "a metric of some": (
        lambda lines: [*lines, lines[2] | {"metric": "acc"}],
        "has no acc of .*; 9 of 10 selections lack it",
    ),
    "a cell too few": (lambda lines: [*lines, ["a", "b"]], r"s\.csv:12: 2 cells, and the heading has 6"),
    "a cell too many": (lambda lines: [*lines, [*lines[0].values(), "x"]], r"s\.csv:12: 7 cells"),
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_bad_lines_are_named_and_refused(one, tmp_path, bad):
    edit, message = BAD_LINES[bad]
    refused(one, tmp_path, edit, message)


HEADINGS = {
    "an unknown column": (
        ("selection", "model", "budget", "seed", "metrics", "value"),
        "unknown column 'metrics'; did you mean 'metric'",
    ),
    "a missing column": (
        ("selection", "model", "seed", "metric", "value"),
        "column 'budget' is missing; the columns are selection, ",
    ),
    "a column twice": ((*COLUMNS, "value"), "column 'value' stands twice"),
    "rows and windows": ((*COLUMNS, "row", "window"), "columns 'row' and 'window' both"),
    "semicolons": ((";".join(COLUMNS),), "unknown column 'selection;model"),
}


@pytest.mark.parametrize("bad", HEADINGS)
def test_bad_headings_are_refused(one, tmp_path, bad):
    columns, message = HEADINGS[bad]
    path = write(tmp_path / "s.csv", [], columns)
    with pytest.raises(InputError, match=rf"s\.csv:1: {message}"):
        tk.judge(one, path)


FILES = {
    "nothing": (b"", "is empty; its first line names the columns"),
    "blank lines": (b"\n\n", "is empty"),
    "a heading": (b"selection,model,budget,seed,metric,value\n", "holds a heading and no scores"),
    "no text": (b"selection,model,budget,seed,metric,value\n\xff\xfe\n", "is not UTF-8 text"),
    "UTF-16": ("selection,model".encode("utf-16"), "is not UTF-8 text"),
    "an open quote": (b'selection,model,budget,seed,metric,value\n"a,b', r"s\.csv:2: "),
    "zeros": (b"selection,model,budget,seed,metric,value\n\0,a,b,c,d,e\n", r"s\.csv"),
    "one cell without end": (b"selection,model,budget,seed,metric,value\n" + b"a" * 10**6, r"s\.csv:2: "),
}


@pytest.mark.parametrize("bad", FILES)
def test_files_that_hold_no_scores_are_refused(one, tmp_path, bad):
    content, message = FILES[bad]
    path = tmp_path / "s.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        tk.judge(one, path)


def test_no_file_and_no_folder(one, tmp_path):
    (tmp_path / "scores.csv").touch()
    with pytest.raises(InputError, match=r"no file .*score\.csv; did you mean 'scores\.csv'"):
        tk.judge(one, tmp_path / "score.csv")
    with pytest.raises(InputError, match="did you mean 'selections'"):
        tk.judge(tmp_path / "selection", tmp_path / "scores.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no selection file"):
        tk.judge(tmp_path / "empty", tmp_path / "scores.csv")


FOLDERS = {
    "a hole": (
        lambda f: (f / "draw-4.json").unlink(),
        r"draw 4 of random-matched \(seed 0\) .* is missing; .*draw-5\.json is draw 5",
    ),
    "a copy": (
        lambda f: shutil.copy(f / "draw-4.json", f / "copy.json"),
        r"draw 4 of .* stands twice, as .*copy\.json and .*draw-4\.json$",
    ),
    "no arm": (lambda f: (f / "top.json").unlink(), "every selection is matched to another one"),
    "no draws": (lambda f: [p.unlink() for p in f.glob("draw-*")], "no selection is matched to another one"),
    "other weights": (
        lambda f: change(f / "draw-4.json", lambda d: d.update(fingerprint="cd" * 32)),
        r"different models: most have fingerprint 'abab.*draw-4\.json: 'cdcd",
    ),
    "another model": (
        lambda f: change(f / "draw-4.json", lambda d: d.update(model="x/y")),
        r"most have model .* not so .*draw-4\.json: 'x/y'",
    ),
    "another target": (
        lambda f: change(f / "draw-4.json", lambda d: d["matched_to"].update(hash="12" * 32)),
        r"draw-4\.json is matched to selection 121212121212, which is not there; there are [0-9a-f]{12} \(top\)",
    ),
    "no seed": (
        lambda f: change(f / "draw-4.json", lambda d: d.pop("seed")),
        r"draw-4\.json is matched to another selection, and is no random draw",
    ),
    "damage": (lambda f: (f / "draw-4.json").write_text("{"), r"draw-4\.json is not JSON"),
    "totals of another set": (
        lambda f: change(f / "draw-4.json", lambda d: d.update(parameters=10**400)),
        r"draw-4\.json: parameters is 1000000",
    ),
    "an arm of nothing": (
        lambda f: change(f / "top.json", lambda d: d.update(parameters=0)),
        r"top\.json: parameters is 0 for \d+ layers",
    ),
    "another file": (
        lambda f: (f / "draw-4.json").write_text('{"schema": 1, "kind": "profile"}'),
        r"draw-4\.json: kind",
    ),
}


@pytest.mark.parametrize("bad", FOLDERS)
def test_bad_folders_are_refused(one, tmp_path, bad):
    path = write(tmp_path / "s.csv", lines_of(one))
    edit, message = FOLDERS[bad]
    edit(one)
    with pytest.raises(InputError, match=message):
        tk.judge(one, path)


def test_an_ambiguous_prefix_is_refused(one, tmp_path, monkeypatch):
    from toolkit.analysis.reading import score_evidence

    monkeypatch.setattr(score_evidence, "DIGITS", 1)
    hashes = sorted(c.hash for c in read_selections(one))
    short = next(a[0] for a, b in itertools.pairwise([*hashes, hashes[0][:0] + "g"]) if a[0] == b[0])
    with pytest.raises(InputError, match=f"'{short}' begins the hashes of several selections; write more digits"):
        tk.judge(one, write(tmp_path / "s.csv", [x | {"selection": short} for x in lines_of(one)[:1]]))


def test_scores_of_another_model_are_refused(one, tmp_path):
    lines = [line | {"model": "other/model"} for line in lines_of(one)]
    with pytest.raises(InputError, match="scores of model 'other/model', and the selections are of 'SmolLM2"):
        tk.judge(one, write(tmp_path / "s.csv", lines))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "latx"}, "did you mean 'latex'"),
        ({"side": "lower"}, r"side: Input should be 'less' or 'greater' \(found 'lower'\)"),
        ({"correction": "holms"}, "correction: Input should be 'holm', 'max-t' or 'none'"),
        ({"test": "joined"}, "test: Input should be 'each' or 'joint'"),
        ({"level": 1.5}, r"level: .* \(found 1\.5\)"),
        ({"margin": 0.1}, "margin 0.1 has no margin_reason"),
        ({"margin": float("nan"), "margin_reason": "x"}, r"margin: .* \(found nan\)"),
        ({"metrics": ["los"]}, "no score of metric 'los'; did you mean 'loss'"),
        ({"test": "joint", "correction": "max-t"}, "max-t"),
        ({"figure": "out.jpg"}, "png, pdf or svg"),
    ],
)
def test_options_that_do_not_exist_are_refused(one, tmp_path, options, message):
    path = write(tmp_path / "s.csv", lines_of(one))
    with pytest.raises(InputError, match=message):
        tk.judge(one, path, **options)


def test_a_template_is_filled_in_and_judged(family, tmp_path, capsys):
    path = tmp_path / "t.csv"
    assert (
        main(["judge", "--selections", str(family), "--template", str(path), "--metric", "loss", "--seeds", "0,1"]) == 0
    )
    lines = list(csv.DictReader(path.open()))
    sets = {c.hash for c in read_selections(family)}
    assert len(lines) == 2 * len(sets) and {line["selection"] for line in lines} == sets
    assert {line["budget"] for line in lines} == set(BUDGETS) and {line["value"] for line in lines} == {""}
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"t\.csv:2: value is ''"):
        tk.judge(family, path, control="random-matched")
    assert main(["judge", "--selections", str(family), "--template", str(path)]) == 2
    assert "never replaces a file" in capsys.readouterr().err and path.read_bytes() == before
    for line in lines:
        line["value"] = Random(line["selection"]).random()
    out = tmp_path / "out.md"
    shell = ["judge", "--selections", str(family), "--results", str(write(path, lines))]
    assert main([*shell, "--control", "random-matched", "-o", str(out)]) == 0
    assert out.read_text() == tk.judge(family, path, control="random-matched") + "\n"
    assert main(shell[:3]) == 2 and main([*shell[:3], "--template", "x", "--seeds", "a"]) == 2
    assert "--results names the CSV file" in capsys.readouterr().err


def test_a_repeated_set_has_one_score(profile, tmp_path):
    """Draws of a permutation law may be equal: one line under their hash tells of them all."""
    folder = tmp_path / "selections"
    arm = tk.select("top-error", profile, budget="layers=0.05")
    arm.save(folder / "top.json")
    draws = tk.draws("random-permuted(among=size)", profile, like=arm, count=3)
    for at, draw in enumerate([*draws, *draws]):
        draw.model_copy(update={"draw": at}).save(folder / f"{at}.json")
    lines = lines_of(folder)
    assert len(lines) == len({c.hash for c in read_selections(folder)}) < 7
    data = json.loads(tk.judge(folder, write(tmp_path / "s.csv", lines), "json"))
    assert data["arms"][0]["controls"][0]["draws"] == 6


def test_a_large_file_is_read_in_time(tmp_path):
    """200,000 lines, and no more than a few seconds."""
    rng = Random(0)
    lines = [[f"{at % 500:064x}", "m", "", at // 5000, "loss", rng.random(), at % 5000 // 500] for at in range(200_000)]
    path = write(tmp_path / "s.csv", lines, (*COLUMNS, "row"))
    start = time.perf_counter()
    scores = read_scores(path)
    assert time.perf_counter() - start < 10
    assert len(scores.values) == 200_000 and len(scores.selections) == 500
    assert scores.values[7] == lines[7][5] and scores.lines[7] == 9


def test_judging_starts_neither_torch_nor_transformers(one, tmp_path):
    path = write(tmp_path / "s.csv", lines_of(one))
    code = (
        "import sys; import toolkit as tk; tk.judge(sys.argv[1], sys.argv[2]);"
        "heavy = {'torch', 'transformers', 'bitsandbytes', 'scipy', 'matplotlib'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code, one, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
