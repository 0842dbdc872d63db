"""The family of claims that a study declares, and the level that its draws reach."""

from __future__ import annotations

import itertools

import pytest

from toolkit.records.study import Study


def study(**analysis):
    return Study.model_validate(
        {
            "name": "x",
            "question": "?",
            "texts": {"a": "a.txt", "b": "b.txt"},
            "budgets": ["layers=0.1", "layers=0.2", "layers=0.3"],
            "arms": [{"selector": "one"}, {"selector": "two"}, {"selector": "three"}],
            "controls": [{"selector": "matched", "draws": 99}],
            "analysis": {"control": "matched"} | analysis,
        }
    )


@pytest.mark.parametrize("test", ["each", "joint"])
@pytest.mark.parametrize("arms", [None, ["two"], ["one", "three"]])
@pytest.mark.parametrize(
    "exclusions", [[], [{"arm": "one"}], [{"text": "b"}, {"arm": "two", "budget": "layers=0.2"}], [{"text": "a"}] * 2]
)
def test_the_family_is_what_is_claimed(test, arms, exclusions):
    """Counted one by one, an exclusion striking out every claim that it matches; one of a budget, no joint claim."""
    declared = study(test=test, arms=arms, exclusions=[e | {"reason": "why not"} for e in exclusions])
    budgets = [None] if test == "joint" else ["layers=0.1", "layers=0.2", "layers=0.3"]
    left = 0
    for arm, text, budget in itertools.product(arms or ["one", "two", "three"], "ab", budgets):
        claim = {"arm": arm, "text": text, "budget": budget}
        left += not any(all(claim[key] == value for key, value in e.items()) for e in exclusions)
    assert declared.family_size == left


@pytest.mark.parametrize(
    ("analysis", "draws", "level"),
    [
        ({"test": "joint"}, 499, 6 / 500),
        ({"test": "each"}, 99, 18 / 100),
        ({"test": "each"}, 10, 1.0),
        ({"test": "each", "correction": "none"}, 10, 1 / 11),
        ({"test": "each", "correction": "max-t"}, 99, 1 / 100),
        ({"exclusions": [{"text": "b", "reason": "r"}], "test": "joint", "arms": ["one"]}, 9, 1 / 10),
    ],
)
def test_the_level_that_draws_reach(analysis, draws, level):
    assert study(**analysis).reachable(draws) == level


def test_a_declaration_knows_no_folders():
    declared = study()
    moved = declared.model_copy(update={"model": "/somewhere/demo", "texts": {"a": "/x/a.txt", "b": "y/b.txt"}})
    assert moved.declaration == declared.declaration
    assert declared.model_copy(update={"seed": 1}).declaration != declared.declaration
