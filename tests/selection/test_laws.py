"""What laws say of themselves: what they match, how closely, what else they hold; and the quantizers that are read."""

from __future__ import annotations

from collections import Counter

import pytest

from toolkit.interfaces import Law
from toolkit.records.profile import Profile
from toolkit.registry import registry
from toolkit.selection.laws import declared, expected
from toolkit.selection.select import draws, select


@pytest.mark.parametrize(
    ("key", "match", "within", "holds", "shared"),
    [
        ("random-matched", "parameters", 0.001, [], False),
        ("random-matched(within=0.25,match=bytes,roles=true)", "bytes", 0.25, ["roles"], False),
        ("placement-matched(lowest-block=true)", "adapter-parameters", 0.001, ["lowest_block"], False),
        ("random-shuffle-matched(match=extra-bytes)", "extra-bytes", 0.001, [], False),
        ("random-permuted", "parameters", 0.0, ["roles", "sizes"], True),
        ("random-permuted(among=size)", "parameters", 0.0, ["sizes"], True),
        ("random-count", "layers", 0.0, [], False),
        ("depth-matched", "layers", 0.0, ["thirds"], False),
    ],
)
def test_what_a_law_says_is_what_its_draws_do(profile_of, key, match, within, holds, shared):
    law = registry.make("selector", key)
    assert declared(law) == {"match": match, "within": within, "holds": holds, "shared": shared}
    profile: Profile = profile_of(6, {"a": (2, 3), "b": (3, 2), "c": (4, 3)})
    arm = select("depth", profile, "layers=0.4")
    count = {
        "layers": lambda s: len(s.layers),
        "parameters": lambda s: s.parameters,
        "bytes": lambda s: s.bytes,
        "adapter-parameters": lambda s: sum(sum(r.shape) for r in profile.layers if r.name in set(s.layers)),
    }.get(match)
    if count is None:  # the packed bytes of these layers were not measured
        return
    roles = {row.name: row.role for row in profile.layers}
    for draw in draws(law, profile, like=arm, count=20):
        assert abs(count(draw) - count(arm)) <= within * count(arm)
        if "roles" in holds:
            assert Counter(map(roles.get, draw.layers)) == Counter(map(roles.get, arm.layers))


def test_a_selector_that_is_no_law_says_nothing():
    assert declared(registry.make("selector", "top-error")) == {}


def test_a_law_promises_nothing_by_itself():
    class Mine(Law):
        """Any."""

        name = "mine"

        def draws(self, profile, budget, rng, like, count):
            return []

    assert declared(Mine()) == {"match": "parameters", "within": None, "holds": [], "shared": False}


def test_the_expected_layers_of_a_role_are_the_mean_over_draws(profile_of):
    profile = profile_of(3, {"a": (2, 3), "b": (3, 2), "c": (6, 2)})
    arm = select("depth", profile, "layers=0.5")
    every = draws("random-matched(within=0.1)", profile, like=arm, count=10**4)
    assert len(every) == every[0].feasible_subsets
    roles = {row.name: row.role for row in profile.layers}
    seen = Counter(roles[name] for draw in every for name in draw.layers)
    found = expected(every[0].inclusion, profile)
    assert found == pytest.approx({role: n / len(every) for role, n in seen.items()})


@pytest.mark.parametrize(
    ("key", "read"),
    [
        ("top-error(quantizer=nvfp4)", ("nvfp4",)),
        ("bottom-error", ("nf4",)),
        ("random-matched", ()),
        ("random-matched(match=extra-bytes,quantizer=mxfp4)", ("mxfp4",)),
        ("random-shuffle-matched(match=extra-bytes)", ("nf4",)),
        ("density", ()),
    ],
)
def test_selectors_name_the_quantizers_that_they_read(key, read):
    assert registry.make("selector", key).quantizers == read
