"""Profiles, selections, plans and reports: the same after a round trip, and their own checks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InputError
from toolkit.records.budget import Budget
from toolkit.records.plan import Adapter, LayerPlan, Plan
from toolkit.records.profile import LayerErrors, LayerProfile, Profile, Reference, fingerprint, thirds
from toolkit.records.report import mask, unmask
from toolkit.records.selection import MatchedTo, Selection

numbers = st.floats(0, 1e6)
names = st.from_regex(r"[a-z_]{1,8}(\.[a-z0-9_]{1,8}){0,3}", fullmatch=True)


@st.composite
def rows(draw, name):
    out, into = draw(st.integers(1, 4096)), draw(st.integers(1, 4096))
    errors = LayerErrors(mse=draw(numbers), mae=draw(numbers), relative=draw(numbers), max=draw(numbers))
    return LayerProfile(
        name=name,
        tensor=draw(st.just(f"{name}.weight") | st.just([f"{name}.w1", f"{name}.w3"])),
        role=name.rpartition(".")[2],
        block=draw(st.none() | st.integers(0, 40)),
        shape=(out, into),
        parameters=out * into,
        bytes=2 * out * into,
        norm=draw(numbers),
        density=draw(numbers),
        error={"nf4": errors, "nf4(block=128)": errors},
    )


@st.composite
def profiles(draw):
    chosen = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    return Profile(
        model=draw(st.text(min_size=1, max_size=20)),
        fingerprint=draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
        reference=Reference(dtype="bfloat16", lattice=draw(st.booleans()), note="as stored"),
        blocks=draw(st.integers(41, 99)),
        layers=[draw(rows(name)) for name in chosen],
    )


@st.composite
def selections(draw):
    chosen = draw(st.lists(names, max_size=6, unique=True))
    matched = MatchedTo(selector="top", hash="0" * 64, layers=3, parameters=7, bytes=14)
    return Selection(
        selector=draw(st.text(min_size=1, max_size=10)),
        options=draw(st.dictionaries(names, st.integers() | st.text() | st.booleans(), max_size=3)),
        budget=draw(st.none() | st.sampled_from([Budget(layers="0.05"), Budget(bytes="512MiB")])),
        seed=draw(st.none() | st.integers(0, 2**63)),
        model="m",
        fingerprint="f",
        layers=chosen,
        parameters=draw(st.integers(1, 2**50)) if chosen else 0,
        bytes=draw(st.integers(1, 2**50)) if chosen else 0,
        of={"layers": 9, "parameters": 2**50, "bytes": 2**51},
        matched_to=draw(st.none() | st.just(matched)),
        mismatch=draw(st.none() | st.floats(-1, 1)),
        feasible_subsets=draw(st.none() | st.integers(0, 2**3000)),
        inclusion=draw(st.none() | st.lists(st.floats(0, 1), max_size=4)),
        single_total=draw(st.none() | st.booleans()),
    )


layer_plans = st.builds(
    LayerPlan,
    quantizer=st.sampled_from(["nf4", "none", "residual(inner=nvfp4)"]),
    compute_dtype=st.sampled_from([None, "float32", "bfloat16"]),
    adapter=st.none()
    | st.builds(
        Adapter, rank=st.integers(1, 64), alpha=numbers, scaler=st.just("rslora"), scaling=st.floats(0.01, 100)
    ),
)
plans = st.builds(
    Plan,
    model=st.none() | st.text(max_size=9),
    fingerprint=st.none() | st.text(max_size=9),
    default=layer_plans,
    layers=st.dictionaries(names, layer_plans, max_size=5),
)


@given(profiles() | selections() | plans)
def test_a_round_trip_changes_nothing(tmp_path_factory, record):
    path = record.save(tmp_path_factory.getbasetemp() / "record.json")
    again = type(record).load(path)
    assert again == record and again.hash == record.hash and again.to_json() == record.to_json()


@given(profiles())
def test_columns_are_the_rows(profile):
    assert len(profile) == len(profile.layers) == len(profile.names)
    assert profile["parameters"].tolist() == [r.shape[0] * r.shape[1] for r in profile.layers]
    assert profile["parameters"].sum() == profile.parameters and profile["bytes"].sum() == profile.bytes
    assert profile["in_features"].tolist() == [r.shape[1] for r in profile.layers]
    assert profile["out_features"].tolist() == [r.shape[0] for r in profile.layers]
    assert profile["error.nf4(block=128).mae"].tolist() == [r.error["nf4"].mae for r in profile.layers]
    assert profile["block"].tolist() == [-1 if r.block is None else r.block for r in profile.layers]
    for column in ("name", "role", "parameters", "bytes", "norm", "density"):
        assert profile[column].tolist() == [getattr(r, column) for r in profile.layers]


def small(blocks=3, layers=None):
    row = LayerProfile(
        name="a", tensor="a.weight", role="a", block=0, shape=(2, 3), parameters=6, bytes=12, norm=1.0, density=0.5
    )
    rows = layers or [row.model_copy(update={"name": f"l{b}", "block": b}) for b in range(blocks)]
    return Profile(
        model="m", fingerprint="f" * 64, reference=Reference(dtype="x", note="n"), blocks=blocks, layers=rows
    )


def test_a_profile_refuses_what_it_does_not_hold():
    profile = small()
    for column, message in (
        ("parametres", "no column 'parametres'; did you mean 'parameters'"),
        ("error", "no column 'error'"),
        ("error.nf4.mse", "holds no errors under 'nf4'"),
        ("error.nf4.msa", "no error measure is called 'msa'; did you mean 'mse'"),
    ):
        with pytest.raises(InputError, match=message):
            profile[column]
    with pytest.raises(InputError, match="no layer 'l12'; did you mean"):
        profile.row("l12")
    assert profile.row("l1").block == 1
    with pytest.raises(InputError, match="'l0' stands twice"):
        small(layers=[profile.layers[0], profile.layers[0]])


def test_other_models_and_changed_weights_are_told_apart():
    profile = small()
    profile.expect("m", "f" * 64, "the plan")
    with pytest.raises(InputError, match=r"the plan belongs to n .*another model: the profile is of m"):
        profile.expect("n", "e" * 64, "the plan")
    with pytest.raises(InputError, match="whose weights have changed since"):
        profile.expect("m", "e" * 64, "the plan")


@given(st.integers(1, 80))
def test_thirds_are_the_floor_of_three_times_the_depth(blocks):
    assert thirds(small(blocks)) == [3 * b // blocks for b in range(blocks)]
    assert set(thirds(small(blocks))) <= {0, 1, 2}


def test_layers_outside_the_blocks_are_in_the_last_third():
    profile = small(3)
    outside = profile.layers[0].model_copy(update={"name": "head", "block": None})
    assert thirds(small(3, [*profile.layers, outside])) == [0, 1, 2, 2]


def test_the_fingerprint_is_of_names_shapes_values_and_order():
    rows = [("a", (2, 3), "x"), ("b", (3, 2), "y")]
    changed = (
        [("a", (3, 2), "x"), rows[1]],
        [("c", (2, 3), "x"), rows[1]],
        [("a", (2, 3), "z"), rows[1]],
        rows[::-1],
        rows[:1],
    )
    assert len({fingerprint(r) for r in (rows, *changed)}) == 6 and fingerprint(list(rows)) == fingerprint(rows)


def selection(**changes):
    data = {"selector": "s", "model": "m", "fingerprint": "f", "layers": ["a", "b"], "parameters": 3, "bytes": 6}
    return Selection(**data | {"of": {"layers": 4, "parameters": 12, "bytes": 24}} | changes)


def test_records_are_shown_in_one_line():
    chosen = selection(layers=["a"], selector="top", seed=3)
    assert repr(chosen).startswith("Selection(selector='top', budget=None, seed=3, model=")
    assert "layers=1" in repr(chosen) and "'a'" not in repr(chosen)
    shown = f"Profile(model='m', fingerprint='{'f' * 12}', layers=3, parameters=18, quantizers=[])"
    assert repr(small(blocks=3)) == shown


def test_a_selection_knows_its_set_and_share():
    assert selection().share == 0.25
    assert selection().layers_hash == selection(seed=3, selector="t").layers_hash
    hashes = {selection(**c).layers_hash for c in ({}, {"layers": ["a"]}, {"fingerprint": "g"}, {"layers": ["b", "a"]})}
    assert len(hashes) == 4
    with pytest.raises(InputError, match="twice"):
        selection(layers=["a", "a"])


@given(st.lists(names, unique=True, max_size=300), st.data())
def test_masks_hold_sets_of_any_size(layers, data):
    chosen = frozenset(n for n in layers if data.draw(st.booleans()))
    text = mask(chosen, layers)
    assert unmask(text, layers) == [n for n in layers if n in chosen]
    assert int(text, 16).bit_count() == len(chosen)
    assert text == hex(sum(2**at for at, n in enumerate(layers) if n in chosen))


def test_a_plan_decides_for_every_layer():
    plan = Plan(default=LayerPlan(quantizer="nf4"), layers={"a": LayerPlan(quantizer="none")})
    assert plan.of("a").quantizer == "none" and plan.of("b").quantizer == "nf4"
    with pytest.raises(ValueError, match="greater than 0"):
        Adapter(rank=0, alpha=1.0, scaler="lora", scaling=1.0)
