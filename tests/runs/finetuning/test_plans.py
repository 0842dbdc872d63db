"""Plans of arms: what is chosen for which seed, what is matched, and what is refused before weights are loaded."""

import pytest

from toolkit.errors import InputError
from toolkit.records.levers import Seeds
from toolkit.runs.finetuning.plans import calibration_rows, check, components, plan, quantizers

TOP = {"name": "top", "protect": {"selector": "top-error", "budget": "layers=0.2"}}


def drawn(**changes):
    return {"name": "drawn", "protect": {"selector": "random-matched(within=0.5)", "like": "top"} | changes}


def arms(*more):
    return {"arms": [{"name": "qlora"}, TOP, *more]}


def protected(study, profile, arm, seeds, draw=None):
    return plan(study, arm, profile, seeds, draw)[1].layers


def test_every_method_is_a_composition(declared, profile):
    deep = {"selector": "depth", "budget": "layers=0.85"}
    study = declared(
        **arms(
            {"name": "lora", "base": "none"},
            {"name": "dora", "base": "none", "dora": True},
            {"name": "rslora", "scaler": "rslora"},
            {"name": "both", "protect": TOP["protect"], "adapt": deep, "compute_dtype": "float32"},
            {"name": "guarded", "protect": TOP["protect"], "range_guard": True},
        )
    )
    made = {arm.name: plan(study, arm.name, profile, Seeds.all(0))[0] for arm in study.arms}
    assert made["qlora"].default.quantizer == "nf4" and made["lora"].default.quantizer == "none"
    assert made["qlora"].default.adapter.scaling == 16 / 2
    assert made["rslora"].default.adapter.scaling == pytest.approx(16 / 2**0.5)
    assert made["dora"].default.adapter.dora and not made["lora"].default.adapter.dora
    both, protect, adapt = plan(study, "both", profile, Seeds.all(0))
    assert len(protect.layers) == 5 and len(adapt.layers) == 18  # ⌈.2·21⌉ and ⌈.85·21⌉
    for name in profile.names:
        layer = both.of(name)
        assert layer.quantizer == ("none" if name in protect.layers else "nf4")
        assert (layer.adapter is not None) == (name in adapt.layers)
        assert layer.compute_dtype == ("float32" if name in protect.layers else None)
        assert made["guarded"].of(name).range_guard == (name in protect.layers)
    assert all(p.fingerprint == profile.fingerprint for p in made.values())


def test_a_draw_is_new_for_each_draw_seed_and_for_nothing_else(declared, profile):
    study = declared(**arms(drawn()))
    first = protected(study, profile, "drawn", Seeds(adapter=0, data=0, draw=5))
    assert first == protected(study, profile, "drawn", Seeds(adapter=3, data=7, draw=5, repeat=2))
    others = {tuple(protected(study, profile, "drawn", Seeds(adapter=0, data=0, draw=s))) for s in range(8)}
    assert len(others) > 4


def test_draws_stay_matched(declared, profile):
    study = declared(**arms(drawn()))
    sizes = {layer.name: layer.parameters for layer in profile.layers}
    target = sum(sizes[n] for n in protected(study, profile, "top", Seeds.all(0)))
    for seed in range(8):
        total = sum(sizes[n] for n in protected(study, profile, "drawn", Seeds.all(seed)))
        assert abs(total - target) <= 0.5 * target


def test_a_matched_arm_follows_the_draws_of_the_arm_it_is_matched_to(declared, profile):
    counted = {"name": "counted", "protect": {"selector": "random-count", "budget": "layers=0.3"}}
    study = declared(**arms(counted, drawn(like="counted")))
    for seed in range(4):
        matched = plan(study, "drawn", profile, Seeds.all(seed))[1]
        target = plan(study, "counted", profile, Seeds.all(seed))[1]
        assert matched.matched_to.hash == target.layers_hash


def test_once_is_the_draw_of_seed_0_for_all(declared, profile):
    study = declared(**arms(drawn(draw="once")))
    seeds = [protected(study, profile, "drawn", Seeds.all(seed)) for seed in range(3)]
    assert seeds[0] == seeds[1] == seeds[2]
    assert seeds[0] == protected(declared(**arms(drawn())), profile, "drawn", Seeds.all(0))


def test_a_grid_has_distinct_draws_that_no_seed_changes(declared, profile):
    study = declared(**arms(drawn(draws=3)))
    assert study.draws_of("drawn") == 3 and study.draws_of("top") is None
    grid = [tuple(protected(study, profile, "drawn", Seeds.all(4), draw)) for draw in range(3)]
    assert len(set(grid)) == 3
    assert grid == [tuple(protected(study, profile, "drawn", Seeds.all(9), draw)) for draw in range(3)]


def test_adapters_are_matched_on_their_own_parameters(declared, profile):
    density = {"name": "density", "adapt": {"selector": "density", "budget": "layers=0.5"}}
    matched = {"name": "matched", "adapt": {"selector": "placement-matched(within=0.2)", "like": "density"}}
    study = declared(**arms(density, matched))
    rank = {layer.name: sum(layer.shape) for layer in profile.layers}
    target = sum(rank[n] for n in plan(study, "density", profile, Seeds.all(0))[2].layers)
    for seed in range(4):
        total = sum(rank[n] for n in plan(study, "matched", profile, Seeds.all(seed))[2].layers)
        assert abs(total - target) <= 0.2 * target


def test_the_profile_measures_what_bases_and_selectors_read(declared):
    study = declared(arms=[{"name": "qlora"}, {"name": "other", "base": "nf4(block=128)"}, TOP])
    assert quantizers(study) == ["nf4", "nf4(block=128)"]
    assert {("task", "arithmetic(largest=10)"), ("selector", "top-error"), ("scaler", "lora")} <= set(components(study))


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"name": "a", "base": "nf5"}, "arm 'a': .*nf5.*did you mean 'nf4'"),
        ({"name": "a", "scaler": "rslor"}, "arm 'a': .*rslora"),
        ({"name": "a", "protect": {"selector": "top-eror", "budget": "layers=0.2"}}, "arm 'a': .*top-error"),
        ({"name": "a", "protect": {"selector": "random-matched"}}, "matches another arm's layers.*top"),
        ({"name": "a", "protect": TOP["protect"] | {"draws": 3}}, "is not random, and has no 3 draws"),
        ({"name": "a", "protect": TOP["protect"] | {"draw": "once"}}, "is not random: leave `draw` out"),
        ({"name": "a"}, "arms 'qlora' and 'a' are the same.*repeats"),
        (
            {
                "name": "a",
                "protect": {"selector": "random-count", "budget": "layers=0.2", "draws": 2},
                "adapt": {"selector": "random-count", "budget": "layers=0.2", "draws": 3},
            },
            "grids of 2 and 3 draws",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(declared, arm, message):
    with pytest.raises(InputError, match=message):
        check(declared(**arms(arm)))


def test_selectors_of_a_task_are_measured_on_the_same_rows(declared):
    """Two numbers would leave one arm's ranking measured on rows that it does not name."""
    ask = {"selector": "gradient-sensitivity", "budget": "layers=0.2"}
    both = arms({"name": "a", "protect": ask | {"calibration_rows": 8}}, {"name": "b", "adapt": ask})
    with pytest.raises(InputError, match=r"arm 'b': adapt\.calibration_rows is 32, and arm 'a' has 8 for protect"):
        check(declared(**both))
    assert calibration_rows(declared(**arms({"name": "a", "protect": ask | {"calibration_rows": 8}}))) == 8
    assert calibration_rows(declared()) is None


def test_a_task_that_does_not_exist_is_named(declared):
    with pytest.raises(InputError, match=r"task 'sums': .*did you mean 'arithmetic'"):
        check(declared(tasks={"sums": {"task": "arithmetc"}}))


def test_selectors_that_cannot_answer_name_their_arm(declared, profile):
    study = declared(**arms({"name": "a", "protect": {"selector": "top-error"}}))
    with pytest.raises(InputError, match="arm 'a': top-error needs a budget"):
        plan(study, "a", profile, Seeds.all(0))
    study = declared(
        **arms({"name": "a", "protect": {"selector": "random-matched(within=0)", "like": "top", "draws": 9999}})
    )
    with pytest.raises(InputError, match=r"arm 'a': protect\.draws: 9999 are declared, and .* has \d+ different ones"):
        plan(study, "a", profile, Seeds.all(0), 0)


def test_an_arm_that_adapts_nothing_is_named(declared, profile):
    study = declared(arms=[{"name": "qlora"}, {"name": "bare", "adapt": {"selector": "none"}}])
    with pytest.raises(InputError, match="arm 'bare': adapt: none selects no layer, and nothing would be trained"):
        plan(study, "bare", profile, Seeds.all(0))
