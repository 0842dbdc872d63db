"""Controls whose draws are families over all budgets, and random changes that all arms share."""

from __future__ import annotations

import functools

import pytest

import toolkit as tk
from toolkit.errors import InputError
from toolkit.records.profile import Profile
from toolkit.records.report import Report, unmask
from toolkit.records.study import Study
from toolkit.runs.ranking import design, runner
from toolkit.selection.select import chains

run = functools.partial(runner.run, dtype="float32", device="cpu", progress=False)

STUDY = {
    "name": "families",
    "question": "Do budgets go together?",
    "tokens": 128,
    "window": 64,
    "batch": 2,
    "budgets": ["layers=0.4", "layers=0.2", "layers=0.3"],  # in no order
    "arms": [{"selector": "top-error"}, {"selector": "bottom-error"}],
    "controls": [
        {"selector": "random-matched(within=0.1)", "name": "nested", "draws": 6, "chain": True},
        {"selector": "random-permuted", "name": "permuted", "draws": 5},
        {"selector": "random-matched(within=0.1)", "name": "alone", "draws": 3, "like": ["top-error"]},
    ],
    "seed": 4,
    "analysis": {"control": "nested", "test": "joint", "level": 0.5, "correction": "none"},
    "repeat": False,
}
SINGLE = 1 + 2 * 3  # base, arms
MEASURED = SINGLE + 3 * (2 * 6 + 2 * 5 + 3)


@pytest.fixture
def study(tmp_path, checkpoints, text_file, put):
    data = STUDY | {"model": str(checkpoints()), "texts": {"letters": str(text_file)}}
    return lambda **changes: put(tmp_path / "study", data | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, checkpoints, text_file, put):
    data = STUDY | {"model": str(checkpoints()), "texts": {"letters": str(text_file)}}
    return run(put(tmp_path_factory.mktemp("whole"), data))


def held(folder, budget, arm, control=None):
    """The sets of a run, in the order of its draws."""
    report = Report.load(folder / "--".join(filter(None, (f"layers-{budget}", arm, control))) / "report.json")
    if control is None:
        return [set(report.selection.layers)]
    return [set(unmask(draw.mask, report.layers)) for draw in report.draws]


def test_draw_i_of_every_budget_is_one_nested_family(whole):
    profile = Profile.load(whole / "profile.json")
    size = {row.name: row.parameters for row in profile.layers}
    for arm in ("top-error", "bottom-error"):
        likes = [held(whole, b, arm)[0] for b in ("0.2", "0.3", "0.4")]
        families = list(zip(*(held(whole, b, arm, "nested") for b in ("0.2", "0.3", "0.4")), strict=True))
        assert len({tuple(map(frozenset, family)) for family in families}) == 6
        for family in families:
            assert family[0] < family[1] < family[2]
            for found, like in zip(family, likes, strict=True):
                total = sum(map(size.get, like))
                assert abs(sum(map(size.get, found)) - total) <= 0.1 * total
    single = [held(whole, b, "top-error", "alone") for b in ("0.2", "0.3", "0.4")]
    assert any(not a < b for a, b in zip(single[0], single[1], strict=True))  # these do not go together


def test_families_are_those_that_the_law_draws(whole):
    """Asked for once more, in the study's order of budgets."""
    profile = Profile.load(whole / "profile.json")
    likes = [tk.select("top-error", profile, tk.Budget(layers=b)) for b in ("0.4", "0.2", "0.3")]
    again = chains("random-matched(within=0.1)", profile, likes=likes, count=6, seed=4)
    for at, budget in enumerate(("0.4", "0.2", "0.3")):
        assert held(whole, budget, "top-error", "nested") == [set(family[at].layers) for family in again]


def test_one_shuffle_is_shared_by_arms_and_budgets(whole):
    """A shuffle moves one layer to the same place everywhere, so that overlaps of the arms' sets are kept."""
    runs = [(b, a) for b in ("0.2", "0.3", "0.4") for a in ("top-error", "bottom-error")]
    own = [held(whole, *r)[0] for r in runs]
    shuffled = [held(whole, *r, "permuted") for r in runs]
    for draw in range(5):
        for one in range(len(runs)):
            for two in range(one):
                overlap = len(own[one] & own[two])
                assert len(shuffled[one][draw] & shuffled[two][draw]) == overlap
    assert any(shuffled[0][draw] != own[0] for draw in range(5))


def test_the_law_is_reported(whole):
    profile = Profile.load(whole / "profile.json")
    laws = {}
    for control in ("nested", "permuted", "alone"):
        report = Report.load(whole / f"layers-0.2--top-error--{control}" / "report.json")
        law = laws[control] = report.law
        assert sum(law.expected.values()) == pytest.approx(sum(law.inclusion))
        for role in ("q_proj", "down_proj"):
            rows = [p for row, p in zip(profile.layers, law.inclusion, strict=True) if row.role == role]
            assert law.expected[role] == pytest.approx(sum(rows))
    assert [(laws[c].chain, laws[c].shared) for c in laws] == [(True, False), (True, True), (False, False)]
    assert laws["nested"].holds == [] and "roles" in laws["permuted"].holds
    top = held(whole, "0.2", "top-error")[0]
    roles = {row.name: row.role for row in profile.layers}
    counts = {role: sum(roles[n] == role for n in top) for role in laws["permuted"].expected}
    assert laws["permuted"].expected == pytest.approx(counts)  # same count of every role as the arm


@pytest.mark.parametrize("stop", [SINGLE + 15, MEASURED - 1])
def test_interrupted_families_go_on(whole, study, measurements, facts, stop):
    measurements.stop = stop
    with pytest.raises(KeyboardInterrupt):
        run(study())
    measurements.stop = None
    assert facts(run(study())) == facts(whole)
    assert measurements.count == MEASURED


def test_another_budget_makes_other_families(whole, study):
    """A family is drawn over all budgets, so that results with fewer are refused; those of a shuffle stay."""
    import shutil

    folder = study() / "results"
    shutil.copytree(whole, folder)
    more = ["layers=0.4", "layers=0.2", "layers=0.3", "layers=0.5"]
    with pytest.raises(InputError, match=r"--nested holds 6 draws, and the study asks for 6 \(or others\)"):
        run(study(budgets=more))
    for path in folder.glob("*--nested"):
        shutil.rmtree(path)
    before = held(whole, "0.2", "top-error", "permuted")
    run(study(budgets=more))
    assert held(folder, "0.2", "top-error", "permuted") == before


def test_what_the_draws_reach_is_said(study, measurements, capsys):
    measurements.stop = 0
    with pytest.raises(KeyboardInterrupt):
        run(study(analysis={"control": "nested", "test": "joint", "level": 0.2}))
    said = capsys.readouterr().err
    assert (
        "note: 2 claims (2 arms, 1 text), test joint, correction holm: 6 draws reach p = 0.286, and the declared level "
        "is 0.2"
    ) in said
    assert (
        "note: layers-0.4--top-error--nested: descriptive: 6 draws give no p below 0.143 (0.286 after correction for "
        "2 claims), and the declared level is 0.2"
    ) in said


def test_fewer_families_than_asked_for_are_all_used(study, measurements, capsys):
    measurements.stop = 0
    control = {"selector": "random-matched(within=0)", "name": "nested", "draws": 10**5, "chain": True}
    with pytest.raises(KeyboardInterrupt):
        run(study(controls=[control], budgets=["bytes=40KiB", "bytes=48KiB"], arms=[{"selector": "top-error"}]))
    assert "families exist of the 100000 draws asked for; all are used" in capsys.readouterr().err


NESTED = STUDY["controls"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"controls": [NESTED | {"selector": "random-matched(disjoint=true)"}]},
            "'nested': .*disjoint=true.* draws no nested families; leave `chain` out",
        ),
        ({"controls": [NESTED | {"selector": "depth"}]}, "is not random"),
        (
            {"controls": [NESTED | {"chain": False}]},
            "analysis.test is joint, and the draws of control 'nested' are made",
        ),
        (
            {"analysis": {"control": "nested", "test": "joint", "correction": "max-t"}},
            "correction is max-t, and every arm has draws of its own from control 'nested'",
        ),
        (
            {"controls": [NESTED | {"like": ["top-error"]}]},
            "control is 'nested', which is not matched to arm 'bottom-error'",
        ),
        ({"controls": [NESTED | {"selector": "random-matched(within=0.1)", "name": "top-error"}]}, "analysis.control"),
    ],
)
def test_declarations_that_the_draws_do_not_allow_are_refused_before_anything_loads(changes, message):
    with pytest.raises(InputError, match=message):
        design.check(Study.model_validate(STUDY | {"texts": {"a": "nowhere.txt"}} | changes))


def test_shared_draws_allow_joint_tests_and_max_t():
    analysis = {"control": "permuted", "test": "joint", "correction": "max-t"}
    design.check(Study.model_validate(STUDY | {"texts": {"a": "nowhere.txt"}, "analysis": analysis}))


def test_the_analysis_reads_what_the_runner_wrote(whole, tmp_path):
    """A joint test among families, and a certificate that makes them again."""
    from toolkit.analysis.certificates.certifying import certify
    from toolkit.analysis.certificates.verification import verify
    from toolkit.analysis.printing.table import table

    assert "nested" in table(whole, paired=True)
    certificate = certify(whole, tmp_path / "control.json")
    assert all(claim["budget"] is None for claim in certificate.verdicts["claims"])
    verify(tmp_path / "control.json", whole)
