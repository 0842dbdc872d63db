"""Who is timed and in which order: rounds are permutations, seeded; the baseline and the noisiest arm stand twice."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InputError
from toolkit.records.finetuning import FineTuning
from toolkit.runs.timing.order import Entry, entries, noisiest, rounds, timed_arms


def study(**timing):
    return FineTuning.model_validate(
        {
            "kind": "fine-tuning",
            "name": "timed",
            "question": "how fast?",
            "tasks": {"sums": {"task": "arithmetic"}},
            "arms": [{"name": "lora", "base": "none"}, {"name": "qlora"}, {"name": "rslora", "scaler": "rslora"}],
            "analysis": {"baseline": "qlora"},
            "timing": timing,
        }
    )


def test_the_baseline_stands_three_times_and_the_noisiest_arm_twice():
    found = Counter(entry.arm for entry in entries(["lora", "qlora", "rslora"], "qlora", 2, "rslora"))
    assert found == {"qlora": 3, "rslora": 2, "lora": 1}


def test_a_baseline_that_is_the_noisiest_gets_no_further_run():
    assert Counter(e.arm for e in entries(["lora", "qlora"], "qlora", 2, "qlora")) == {"qlora": 3, "lora": 1}


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 2**31))
def test_every_round_holds_every_entry_once(arms, count, seed):
    everyone = [Entry(f"arm{i}") for i in range(arms)]
    made = rounds(everyone, count, seed)
    assert len(made) == count and all(Counter(order) == Counter(everyone) for order in made)
    assert made == rounds(everyone, count, seed)


def test_places_are_even_over_many_rounds():
    """χ² of entry × place over 4,000 rounds of 5: expectation 16 (16 degrees), 99.9% bound 39.3."""
    everyone = [Entry(f"arm{i}") for i in range(5)]
    counts = Counter((entry, place) for order in rounds(everyone, 4000, 1) for place, entry in enumerate(order))
    assert sum((counts[e, p] - 800) ** 2 / 800 for e in everyone for p in range(5)) < 39.3


def test_another_seed_gives_another_order():
    everyone = [Entry(f"arm{i}") for i in range(7)]
    assert len({str(rounds(everyone, 3, seed)) for seed in range(20)}) == 20


def test_only_the_arms_asked_for_and_the_baseline_in_the_studys_order():
    assert timed_arms(study(), ["rslora"]) == ["qlora", "rslora"]
    assert timed_arms(study()) == ["lora", "qlora", "rslora"]
    assert timed_arms(study(arms=["lora"])) == ["lora", "qlora"]


def test_an_unknown_arm_is_refused_with_the_closest_name():
    with pytest.raises(InputError, match="no arm 'rslra' is timed; did you mean 'rslora'"):
        timed_arms(study(), ["rslra"])


def test_without_earlier_sessions_the_noisiest_is_the_arm_with_most_quantized_layers():
    quantized = {"lora": 0, "qlora": 21, "q": 17, "s": 16}
    assert noisiest(list(quantized), "qlora", quantized) == "q"
    assert noisiest(["qlora"], "qlora", quantized) is None
