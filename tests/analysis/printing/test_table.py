"""The table: every number recomputed from the raw report files by other means, and four renderings of it."""

import csv
import io
import itertools
import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import toolkit as tk
from toolkit.analysis.printing import grid, latex_table, markdown_table
from toolkit.analysis.printing.formats import rendered
from toolkit.analysis.printing.summary import summary
from toolkit.analysis.printing.table import table
from toolkit.errors import InputError


def raw(made, run):
    return json.loads((made.results / run / "report.json").read_text())


def columns(text):
    """Rows of a Markdown table as dictionaries."""
    lines = [[c.strip() for c in line.strip("|").split(" | ")] for line in text.splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


@pytest.fixture(scope="module")
def data(whole):
    return json.loads(table(whole.folder, "json", paired=True))


def test_plain_data_with_a_schema_version(data):
    assert data["schema"] == 1 and data["kind"] == "table"
    assert [r["kind"] for r in data["references"]] == ["16-bit", "base"]
    assert [(a["budget"], a["arm"]) for a in data["arms"]] == [
        (b, a) for b in ("layers=0.1", "layers=0.2") for a in ("top-error", "bottom-error")
    ]


@pytest.mark.parametrize("text", ["python-topics", "wikitext2"])
def test_scores_are_those_of_the_reports(whole, data, text):
    high = raw(whole, "reference-base")["scores"][text]["loss"]
    low = raw(whole, "reference-16-bit")["scores"][text]["loss"]
    for arm in data["arms"]:
        report = raw(whole, arm["run"])
        score, found = report["scores"][text], arm["scores"][text]
        assert {k: found[k] for k in ("tokens", "loss", "kl", "agreement")} == {
            k: score[k] for k in ("tokens", "loss", "kl", "agreement")
        }
        assert found["perplexity"] == pytest.approx(math.e ** score["loss"], rel=1e-12)
        assert found["recovered"] == pytest.approx((high - score["loss"]) / (high - low), rel=1e-12)
        sizes = {row.name: row.parameters for row in whole.profile.layers}
        assert arm["parameters"] == sum(sizes[n] for n in report["selection"]["layers"])
        assert arm["bytes"] == 2 * arm["parameters"]
        assert arm["share"] == arm["parameters"] / sum(sizes.values())
    assert data["references"][0]["scores"][text]["recovered"] == 1.0
    assert data["references"][1]["scores"][text]["recovered"] == 0.0


@pytest.mark.parametrize("text", ["python-topics", "wikitext2"])
def test_comparisons_equal_scipys(whole, data, text):
    seen = 0
    for arm in data["arms"]:
        value = raw(whole, arm["run"])["scores"][text]["loss"]
        for control in arm["controls"]:
            report = raw(whole, f"{arm['run']}--{control['control']}")
            drawn = [d["scores"][text]["loss"] for d in report["draws"]]
            found = control["texts"][text]
            beaten = stats.percentileofscore(drawn, value, kind="weak") / 100 * len(drawn)
            assert found["at_least_as_good"] == round(beaten)
            assert found["p"] == pytest.approx((1 + beaten) / 25) and control["smallest_p"] == 1 / 25
            assert found["gap"] == pytest.approx(value - stats.scoreatpercentile(drawn, 50), abs=1e-12)
            off = np.array([d["parameters"] for d in report["draws"]]) / report_parameters(whole, arm) - 1
            assert control["mismatch"]["mean"] == pytest.approx(off.mean(), abs=1e-12)
            assert abs(control["mismatch"]["largest"]) == pytest.approx(abs(off).max(), abs=1e-12)
            assert control["mismatch"]["largest"] in (pytest.approx(off.max()), pytest.approx(off.min()))
            assert control["feasible_subsets"] == report["law"].get("feasible_subsets")
            seen += 1
    assert seen == 6


def report_parameters(whole, arm):
    return raw(whole, arm["run"])["selection"]["parameters"]


def test_paired_differences_equal_the_t_test_of_scipy(whole, data):
    chosen = whole.chosen("top-error", whole.study.budgets[0])
    arm = next(a for a in data["arms"] if (a["arm"], a["budget"]) == ("top-error", "layers=0.1"))
    for text in whole.texts:
        a, b = whole.nll(chosen, text), whole.nll(frozenset(), text)
        oracle = stats.ttest_rel(a, b)
        found = arm["paired"][text]["base"]
        assert found["difference"] == pytest.approx(np.mean(np.subtract(a, b)) / 511, rel=1e-9)
        assert found["difference"] / found["standard_error"] == pytest.approx(oracle.statistic, rel=1e-9)


def test_each_arm_is_judged_against_its_own_draws(data):
    medians = {c["texts"]["python-topics"]["median"] for a in data["arms"] for c in a["controls"] if c["claim"]}
    assert len(medians) == 4
    assert all(c["like"] == a["arm"] for a in data["arms"] for c in a["controls"])


def test_draws_matched_on_count_are_labelled_flawed(data):
    for arm in data["arms"]:
        for control in arm["controls"]:
            assert control["matched"] == (control["control"] == "matched")
    assert any("Flawed control" in n and "count-matched" in n for n in data["notes"])
    flawed = [c for a in data["arms"] for c in a["controls"] if not c["matched"]]
    assert flawed and all(abs(c["mismatch"]["largest"]) > 0.001 for c in flawed)


@pytest.mark.parametrize("percent", [(-30, 10), (-10, 30)])
def test_the_largest_mismatch_keeps_its_sign(builder, percent):
    made = builder(draws=2, budgets=("layers=0.1",), count_matched=False)
    made.write()
    arm = made.arm("top-error", made.study.budgets[0]).selection
    report = made.control("matched", "top-error", made.study.budgets[0], 2)
    sizes = [arm.parameters * (100 + p) // 100 for p in percent]
    draws = [d.model_copy(update={"parameters": size}) for d, size in zip(report.draws, sizes, strict=True)]
    made.put(report.model_copy(update={"draws": draws}))
    found = summary(made.folder)["arms"][0]["controls"][0]["mismatch"]
    assert found["largest"] == pytest.approx(max(percent, key=abs) / 100, rel=1e-2)
    assert found["mean"] == pytest.approx(sum(percent) / 200, rel=1e-2)


def test_a_wider_tolerance_that_the_law_declares_is_no_flaw(builder):
    made = builder(draws=4, budgets=("layers=0.1",), count_matched=False)
    made.write()
    arm = made.arm("top-error", made.study.budgets[0]).selection
    report = made.control("matched", "top-error", made.study.budgets[0], 4)
    off = [d.model_copy(update={"parameters": arm.parameters * 101 // 100}) for d in report.draws]
    made.put(report.model_copy(update={"draws": off}))
    assert not summary(made.folder)["arms"][0]["controls"][0]["matched"]
    law = report.law.model_copy(update={"within": 0.01})
    made.put(report.model_copy(update={"draws": off, "law": law}))
    assert summary(made.folder)["arms"][0]["controls"][0]["matched"]


@pytest.mark.parametrize(("single", "label"), [(True, "exact"), (False, "Monte Carlo"), (None, "Monte Carlo")])
def test_exact_only_for_a_single_total(builder, single, label):
    made = builder(draws=19, budgets=("layers=0.1",), count_matched=False)
    made.write()
    for arm in ("top-error", "bottom-error"):
        report = made.control("matched", arm, made.study.budgets[0], 19)
        made.put(report.model_copy(update={"law": report.law.model_copy(update={"single_total": single})}))
    text = table(made.folder)
    rows = columns(text.split("**")[4].strip())
    assert [row["p is"] for row in rows] == [label, label]
    assert {row["law"] for row in rows} == {"random-matched(within=0.001,unit=parameters)"}


def test_side_and_outcome_are_those_declared(builder):
    less = builder(draws=15, budgets=("layers=0.1",), count_matched=False)
    less.write()
    greater = builder("other", draws=15, budgets=("layers=0.1",), count_matched=False, side="greater", outcome="kl")
    greater.write()
    for made, key, better in ((less, "loss", np.less_equal), (greater, "kl", np.greater_equal)):
        for arm in summary(made.folder)["arms"]:
            value = raw(made, arm["run"])["scores"]["python-topics"][key]
            drawn = [d["scores"]["python-topics"][key] for d in raw(made, f"{arm['run']}--matched")["draws"]]
            found = arm["controls"][0]["texts"]["python-topics"]
            assert found["at_least_as_good"] == int(better(drawn, value).sum())
            assert found["outcome"] == value
    assert "a higher kl than the draws" in table(greater.folder)


def test_missing_runs_are_named_and_the_rest_is_printed(builder):
    import shutil

    made = builder(draws=10)
    made.write()
    for run in ("reference-16-bit", "layers-0.05--top-error", "layers-0.2--bottom-error--matched"):
        shutil.rmtree(made.results / run)
    made.put(made.control("matched", "top-error", made.study.budgets[1], 7))
    data = summary(made.folder)
    assert data["missing"] == [
        "the 16-bit reference",
        "arm top-error at layers=0.05",
        "3 of 10 draws of control matched of top-error at layers=0.1",
        "control matched of bottom-error at layers=0.2",
    ]
    assert all(a["scores"]["python-topics"]["recovered"] is None for a in data["arms"])
    text = table(made.folder)
    assert "Missing runs (4): the 16-bit reference; arm top-error at layers=0.05;" in text
    assert len(columns(text.split("**")[2].strip())) == 1 + 5
    for format in ("csv", "latex", "json"):
        assert "bottom-error" in table(made.folder, format)


def test_all_subsets_used_is_not_missing(builder):
    made = builder(draws=10, budgets=("layers=0.1",), count_matched=False)
    made.write()
    report = made.control("matched", "top-error", made.study.budgets[0], 6)
    made.put(report.model_copy(update={"law": report.law.model_copy(update={"feasible_subsets": 6})}))
    data = summary(made.folder)
    assert data["missing"] == []
    assert any("fewer subsets exist" in n for n in data["notes"])


def test_a_study_that_cannot_reach_its_level_is_descriptive(builder):
    made = builder(draws=19, budgets=("layers=0.1",))
    made.write()
    said = "Descriptive: 19 draws give no corrected p below 0.100 for 2 claims, and the declared level is 0.05."
    assert said in table(made.folder)  # Holm: 2/20
    enough = builder("enough", draws=39, budgets=("layers=0.1",))  # 2/40 reaches .05
    enough.write()
    assert "escriptive" not in table(enough.folder)


def test_the_caption_names_model_reference_texts_and_form(builder):
    made = builder(draws=10, budgets=("layers=0.1", "layers=0.2"), form="small")
    made.write()
    made.study.save(made.results / "study.json")
    text = table(made.folder).replace("\\", "")
    assert "Model: SmolLM2-135M-Instruct (dequantized Q4_1)" in text
    assert "Reference weights: weights are dequantized 4-bit values (at most 16 distinct per 32 weights)." in text
    assert f"SHA-256 {made.texts['python-topics'].sha256[:12]}, 8 windows of 512 tokens, 4,096 tokens" in text
    assert "(small form)" in text and "This is the small form" in text
    assert "Budgets of one model are nested: their p-values are not combined; the joint test ranks" in text


def test_markdown_prints_full_readable_numbers(whole, data):
    text = table(whole.folder)
    rows = columns(text.split("**")[2].strip())
    assert [r["arm"] for r in rows] == ["16-bit", "base", "top-error", "bottom-error", "top-error", "bottom-error"]
    arm, row = data["arms"][0], rows[2]
    score = arm["scores"]["python-topics"]
    assert row["loss"] == f"{score['loss']:.4f}" and row["perplexity"] == f"{score['perplexity']:.3f}"
    assert row["parameters"].replace(",", "") == str(arm["parameters"])
    assert row["MiB"] == f"{arm['bytes'] / 1048576:.1f}"
    control = data["arms"][0]["controls"][0]
    row = columns(text.split("**")[4].strip())[0]
    assert row["p"] == f"{control['texts']['python-topics']['p']:.3f}" and row["smallest p"] == "0.040"
    assert float(row["gap"].replace("−", "-")) == pytest.approx(control["texts"]["python-topics"]["gap"], abs=5e-5)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(a) == len(b) for a, b in itertools.pairwise(lines) if a.count("|") == b.count("|"))


def test_likeness_equals_sets_and_scipy(whole, data):
    sets = [set(raw(whole, a["run"])["selection"]["layers"]) for a in data["arms"][:2]]
    expected = [[len(a & b) / len(a | b) for b in sets] for a in sets]
    assert data["likeness"]["selections"]["layers=0.1"]["jaccard"] == expected
    scores = data["likeness"]["scores"]
    assert scores["selectors"] == ["top-error", "bottom-error"]
    mse = whole.profile["error.nf4.mse"]
    assert scores["spearman"][0][1] == pytest.approx(stats.spearmanr(mse, -mse).statistic)
    assert "Spearman" in table(whole.folder)


def test_likeness_without_a_profile_or_a_plug_in(builder):
    made = builder(draws=4, budgets=("layers=0.1",), extra_arms=("not-installed",))
    made.write(profile=False)
    assert "no profile.json" in summary(made.folder)["likeness"]["scores"]["reason"]
    made.profile.save(made.results / "profile.json")
    found = summary(made.folder)["likeness"]["scores"]
    assert found["reason"] == "not installed here: not-installed" and len(found["selectors"]) == 2


def test_a_profile_of_other_weights_is_refused(builder, builders):
    made = builder(draws=4, budgets=("layers=0.1",))
    made.write()
    builders.make_profile(fingerprint="cd" * 32).save(made.results / "profile.json")
    with pytest.raises(InputError, match="fingerprint"):
        table(made.folder)


def test_csv_reads_back_in_full_precision(whole, data):
    lines = list(csv.DictReader(io.StringIO(table(whole.folder, "csv"))))
    assert sum(line["role"] == "claim" for line in lines) == 2 * 4
    lines = [line for line in lines if line["role"] != "claim"]
    assert len(lines) == 2 * (2 + 6)
    for line in lines:
        if line["role"] == "reference":
            assert line["control"] == "" and line["p"] == ""
            continue
        arm = next(a for a in data["arms"] if (a["arm"], a["budget"]) == (line["arm"], line["budget"]))
        control = next(c for c in arm["controls"] if c["control"] == line["control"])
        assert float(line["loss"]) == arm["scores"][line["text"]]["loss"]
        assert float(line["p"]) == control["texts"][line["text"]]["p"]
        assert line["feasible_subsets"] == (
            "" if control["feasible_subsets"] is None else str(control["feasible_subsets"])
        )
        assert line["matched"] == str(control["matched"]).lower()


def test_csv_quotes_commas_quotes_and_line_breaks(builder):
    made = builder(draws=4, budgets=("layers=0.1",))
    made.MODEL = None
    for arm in ("16-bit", "base"):
        made.put(made.reference(arm).model_copy(update={"model": 'a, "b"\nc'}))
    (made.folder / "study.yaml").write_text(json.dumps(made.study.to_json()))
    lines = list(csv.DictReader(io.StringIO(table(made.folder, "csv"))))
    assert [line["model"] for line in lines] == ['a, "b"\nc'] * 2


@given(st.text(alphabet=st.sampled_from('ab\\`*_|<>[]&%$#{}~^"−–—±‖'), max_size=30))
def test_latex_escapes_every_special_character(text):
    back = {code: char for char, code in latex_table.SPECIAL.items()}
    codes = "|".join(re.escape(code) for code in sorted(back, key=len, reverse=True))
    escaped = latex_table.escape(text)
    assert re.sub(codes, lambda code: back[code[0]], escaped) == text  # nothing lost, nothing taken for another
    assert set(re.sub(codes, "", escaped)) <= set("ab*")  # no special character stands bare


@given(st.text(alphabet=st.sampled_from("ab\\`*_|<>[] "), max_size=30))
def test_markdown_cells_keep_their_bars_to_themselves(text):
    escaped = markdown_table.escape(text)
    bare = escaped.replace("\\\\", "").replace("\\|", "")
    assert "|" not in bare
    assert escaped.replace("\\\\", "\0").replace("\\", "").replace("\0", "\\") == " ".join(text.split())


def test_latex_joins_no_hyphens():
    assert latex_table.escape("a---b") == "a-{}-{}-b" and latex_table.escape("layers=0.1") == "layers=0.1"


def test_latex_is_balanced_and_has_as_many_cells_as_columns(whole):
    text = table(whole.folder, "latex")
    for part in text.split(r"\begin{tabular}{")[1:]:
        width = len(part.partition("}")[0])
        body = part.partition(r"\end{tabular}")[0]
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert rows and all(line.replace(r"\&", "").count("&") == width - 1 for line in rows)
    for name in ("table", "tabular", "quote"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") > 0
    assert text.isascii()


def test_numbers_as_text():
    assert grid.signed(-0.00004) == "0.0000" and grid.signed(-0.0123) == "−0.0123"
    assert grid.signed(0.5) == "+0.5000"
    assert grid.probability(0.0004) == "<0.001" and grid.probability(0.002) == "0.002"
    assert grid.percent(0.00098) == "+0.098%" and grid.percent(-0.186) == "−18.6%" and grid.percent(0.0) == "0%"
    assert grid.count(999_999) == "999,999" and grid.count(None) == "–"
    assert grid.count(12_395_678) == "1.2e7" and grid.count(9_999_999) == "1.0e7"
    assert grid.count(10**5000 * 3) == "3.0e5000"


def test_an_unknown_format_offers_the_closest(whole):
    with pytest.raises(InputError, match="'latx'; did you mean 'latex'"):
        table(whole.folder, "latx")


def test_public_name_and_no_last_line_break(whole):
    for format in ("md", "json", "csv", "latex"):
        text = tk.table(whole.folder, format)
        assert text == text.rstrip() and text == tk.table(whole.folder, format=format)


def test_the_table_starts_neither_torch_nor_transformers(whole):
    code = (
        "import sys; from toolkit.analysis.printing.table import table; table(sys.argv[1]);"
        "from toolkit.analysis.printing.figure import figure; figure(sys.argv[1], sys.argv[2]);"
        "heavy = {'torch', 'transformers', 'bitsandbytes', 'scipy', 'matplotlib.pyplot'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    out = whole.folder.parent / "figure.svg"
    done = subprocess.run([sys.executable, "-c", code, whole.folder, out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def everything(full):
    return json.loads(table(full.folder, "json"))


def test_it_starts_with_whether_results_are_confirmatory(full, whole, builder):
    first = table(full.folder).partition("\n")[0]
    locked = f"made under the analysis locked before the first run, lock {full.lock[:12]}"
    assert first == f"- Descriptive: {locked}, with draws that cannot reach its level."
    data = summary(full.folder)
    data["verdicts"]["family"]["descriptive"] = False
    assert rendered(data, "latex").splitlines()[1].startswith(f"Confirmatory: {locked}.")
    assert next(csv.DictReader(io.StringIO(table(full.folder, "csv"))))["confirmatory"] == "true"
    assert table(whole.folder).startswith("- Exploratory: there is no lock.json")
    made = builder(draws=3, budgets=("layers=0.1",))
    made.seal()
    made.write()
    made.study.save(made.results / "study.json")
    assert summary(made.folder)["status"]["confirmatory"]
    made.lock = None
    made.put(made.arm("top-error", made.study.budgets[0]))
    assert table(made.folder).startswith("- Exploratory: 1 of 7 reports (the first is")


def test_confirmatory_losses_are_held_to_their_rows(full, tmp_path):
    """One figure of one report is changed: the table of a locked study is refused, and names it."""
    shutil.copytree(full.folder, tmp_path / "study")
    path = next((tmp_path / "study").rglob("layers-0.1--top-error/report.json"))
    data = json.loads(path.read_text(encoding="utf-8"))
    text = next(iter(data["scores"]))
    data["scores"][text]["loss"] -= 0.1
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(InputError, match=rf"layers-0.1--top-error/report.json: text '{text}': the loss is "):
        table(tmp_path / "study")


def test_claims_are_the_verdicts(full, everything):
    from toolkit.analysis.reading import reports
    from toolkit.analysis.reading.study_evidence import evidence
    from toolkit.analysis.statistics.verdicts import verdicts

    found = verdicts(evidence(reports.read(full.folder)))
    assert everything["verdicts"] == {k: v for k, v in found.items() if k != "comparisons"}
    assert everything["untested"] is None
    text = table(full.folder)
    part = text.partition("**The declared claims")[2].split("\n\n")[1]
    rows = columns(part)
    assert [(r["arm"], r["text"], r["budget"], r["test"]) for r in rows] == [
        (a, t, "over 3 budgets", "joint") for a in ("top-error", "bottom-error") for t in full.texts
    ]
    for row, claim in zip(rows, found["claims"], strict=True):
        assert row["p"] == f"{claim['p']:.3f}" and row["corrected p"] == f"{claim['adjusted']:.3f}"
        assert row["verdict"] == claim["verdict"]
    said = text.partition("**In sentences**")[2].replace("\\", "")
    assert all(sentence in said for sentence in found["sentences"])
    for sentence in (law["sentence"] for law in found["laws"]):
        assert (sentence in said) == (not next(x for x in found["laws"] if x["sentence"] == sentence)["agree"])


def test_the_joint_p_is_a_rank_among_families(full, everything):
    """Recomputed from the raw reports: the mean over budgets of the values, each over its standard deviation."""
    for claim in everything["verdicts"]["claims"]:
        totals = 0
        for budget in ("0.05", "0.1", "0.2"):
            run = f"layers-{budget}--{claim['arm']}"
            drawn = [d["scores"][claim["text"]]["loss"] for d in raw(full, f"{run}--matched")["draws"]]
            values = np.array([raw(full, run)["scores"][claim["text"]]["loss"], *drawn])
            totals = totals + stats.zscore(values)
        better = int((totals[1:] <= totals[0] + 1e-12).sum())
        assert claim["at_least_as_good"] == better and claim["p"] == (1 + better) / 40


def test_headroom_is_that_of_the_scored_windows(full, everything):
    half = slice(8, 16)
    seen = 0
    for item in everything["verdicts"]["headroom"]:
        budget = next(b for b in full.study.budgets if str(b) == item["budget"])
        drawn = full.control("matched", item["arm"], budget, 39).draws
        sets = [frozenset(n for at, n in enumerate(full.names) if int(d.mask, 16) >> at & 1) for d in drawn]
        chance = np.mean([full.nll(chosen, item["text"])[half] for chosen in sets], axis=0).sum()
        arm = sum(full.nll(full.chosen(item["arm"], budget), item["text"])[half])
        best = frozenset(full.oracle("oracle-additive", item["arm"], budget).selection.layers)
        oracle = sum(full.nll(best, item["text"])[half])
        assert item["headroom"] == pytest.approx((chance - arm) / (chance - oracle), rel=1e-9)
        assert item["low"] < item["headroom"] < item["high"] and item["separated"]
        seen += 1
    assert seen == 2 * 2 * 3
    rows = columns(table(full.folder).partition("**Headroom")[2].split("\n\n")[1])
    assert len(rows) == 12 and {row["the oracle is"] for row in rows} == {"separated"}


def test_no_headroom_where_the_oracle_is_no_better(builders, tmp_path):
    study = builders.make_full_study(draws=39, few=3, budgets=("layers=0.1",), test="each", repeat=False)
    made = builders.Builder(tmp_path / "study", study)
    made.GAP = 0.0
    made.write(rows=True)
    found = summary(made.folder)["verdicts"]["headroom"]
    assert found and not any(item["separated"] for item in found)
    rows = columns(table(made.folder).partition("**Headroom")[2].split("\n\n")[1])
    assert {row["the oracle is"] for row in rows} == {"this study cannot rank selectors"}
    assert {row["headroom"] for row in rows} == {"–"}
    assert "this study cannot rank selectors" in table(made.folder).partition("**In sentences**")[2]


def test_chance_is_told_by_role(full, everything):
    roles = {row.name: row.role for row in full.profile.layers}
    for arm in everything["arms"]:
        chosen = raw(full, arm["run"])["selection"]["layers"]
        assert arm["roles"] == {r: [roles[n] for n in chosen].count(r) for r in arm["roles"]}
        for control in arm["controls"]:
            law = raw(full, f"{arm['run']}--{control['control']}")["law"]
            expected = dict.fromkeys(roles.values(), 0.0)
            for row, p in zip(full.profile.layers, law["inclusion"], strict=True):
                expected[row.role] += p
            assert control["expected"] == pytest.approx(expected)
            if "roles" in control["holds"]:
                assert control["expected"] == pytest.approx(dict.fromkeys(roles.values(), 0) | arm["roles"])
    rows = columns(table(full.folder).partition("**What chance means")[2].split("\n\n")[1])
    assert len(rows) == 3 * (1 + 5 + 1 + 4)
    assert rows[0]["of"] == "the arm itself" and rows[0]["layers"] == "11"
    assert rows[2]["holds"] == "roles, sizes" and float(rows[2]["layers"]) == pytest.approx(11)


def test_the_floor_marks_gaps_below_it(builder):
    made = builder(draws=19, budgets=("layers=0.1",), count_matched=False, repeat=True)
    made.write()
    data = summary(made.folder)
    gaps = sorted(abs(a["controls"][0]["texts"]["python-topics"]["gap"]) for a in data["arms"])
    assert data["floor"]["difference"]["python-topics"] == pytest.approx(3e-6)
    assert not any(a["controls"][0]["texts"]["python-topics"]["below_floor"] for a in data["arms"])
    report = made.repeat()
    loss = made.reference("base").scores["python-topics"].loss + sum(gaps) / 2
    scores = {"python-topics": report.scores["python-topics"].model_copy(update={"loss": loss})}
    made.put(report.model_copy(update={"scores": scores, "labels": ["batch 2 in place of 4"]}))
    marked = [a["controls"][0]["texts"]["python-topics"]["below_floor"] for a in summary(made.folder)["arms"]]
    assert sorted(marked) == [False, True]
    text = table(made.folder)
    assert text.count("(≤ floor)") == 1 and "computed otherwise (batch 2 in place of 4)" in text


def test_the_replica_is_labelled(full, everything):
    for item in everything["verdicts"]["replica"]:
        assert item["sign_test"]["label"] == item["draw_count"]["label"] == "assumes independence"
    text = table(full.folder)
    assert "Replica of AQLoRA's own tests (§7.2), two-sided; assumes independence" in text
    item = next(i for i in everything["verdicts"]["replica"] if i["control"] == "matched")
    row = columns(text.partition("**Replica")[2].split("\n\n")[1])[0]
    signs, draws = item["sign_test"], item["draw_count"]
    assert stats.binomtest(signs["better"], signs["total"]).pvalue == pytest.approx(signs["p"])
    assert row["draws better than the arm"] == f"{draws['better']} of {draws['total']}"


def test_single_layer_effects_correlate_as_scipy_says(full, everything):
    error = full.profile["error.nf4.mse"]
    for item in everything["effects"]["spearman"]:
        drawn = [d["scores"][item["text"]]["loss"] for d in raw(full, f"sweep--{item['kind']}")["draws"]]
        base = raw(full, "reference-base" if item["kind"] == "restore" else "reference-16-bit")
        gain = np.array(drawn) - base["scores"][item["text"]]["loss"]
        gain = -gain if item["kind"] == "restore" else gain
        assert item["rho"] == pytest.approx(stats.spearmanr(gain, error).statistic)
    assert len(everything["effects"]["spearman"]) == 4


def test_excluded_claims_are_shown_and_not_tested(builder):
    made = builder(
        draws=39,
        budgets=("layers=0.1", "layers=0.2"),
        exclusions=[{"arm": "bottom-error", "budget": "layers=0.2", "reason": "it is the other arm's mirror"}],
    )
    made.write()
    text = table(made.folder)
    rows = columns(text.partition("**The declared claims")[2].split("\n\n")[1])
    assert len(rows) == 4 and rows[-1]["verdict"] == "excluded: it is the other arm's mirror"
    assert rows[-1]["p"] == "–" and "Declared family: 3 claims against matched, corrected by holm" in text


def test_what_is_not_complete_is_compared_and_not_tested(builders, tmp_path):
    """A family cut short cannot be tested together; its draws still stand in the table."""
    study = builders.make_full_study(draws=6, few=3, headroom=None, budgets=("layers=0.1", "layers=0.2"))
    made = builders.Builder(tmp_path / "study", study)
    made.write()
    made.put(made.control("matched", "top-error", study.budgets[0], 4))
    data = summary(made.folder)
    assert data["verdicts"] is None and "unlike numbers of draws" in data["untested"]
    assert [c["draws"] for c in data["arms"][0]["controls"]] == [4, 6, 3, 3, 3]
    assert "2 of 6 draws of control matched of top-error at layers=0.1" in data["missing"]
    for format in ("md", "csv", "latex", "json"):
        assert "top-error" in table(made.folder, format)
    assert "No claim is tested: " in table(made.folder) and "In sentences" not in table(made.folder)


def test_what_calibrates_is_missed(builders, tmp_path):
    import shutil

    study = builders.make_full_study(draws=3, few=3, budgets=("layers=0.1",), test="each")
    made = builders.Builder(tmp_path / "study", study)
    made.write(rows=True)
    for run in ("repeat--base", "sweep--quantize", "layers-0.1--top-error--anti-oracle"):
        shutil.rmtree(made.results / run)
    assert summary(made.folder)["missing"] == [
        "the base once more",
        "the quantize sweep",
        "anti-oracle of top-error at layers=0.1",
    ]
    report = made.results / "layers-0.1--bottom-error" / "report.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"rows": None}))
    assert summary(made.folder)["missing"][-1] == "windows of bottom-error at layers=0.1"


def test_csv_holds_claims_and_headroom(full, everything):
    lines = list(csv.DictReader(io.StringIO(table(full.folder, "csv"))))
    claims = [line for line in lines if line["role"] == "claim"]
    assert [float(line["corrected_p"]) for line in sorted(claims, key=lambda x: (x["text"], x["arm"]))] == [
        c["adjusted"] for c in sorted(everything["verdicts"]["claims"], key=lambda x: (x["text"], x["arm"]))
    ]
    rooms = {(x["text"], x["arm"], x["budget"]): x for x in lines if x["role"] == "headroom"}
    assert len(rooms) == 12
    for item in everything["verdicts"]["headroom"]:
        line = rooms[item["text"], item["arm"], item["budget"]]
        assert float(line["headroom"]) == item["headroom"] and line["oracle_separated"] == "true"
