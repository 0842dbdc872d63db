"""A/A components: by hand, in simulation, and where there is nothing to say."""

import numpy as np
import pytest
from scipy import stats

from toolkit.analysis.statistics.repeats import components
from toolkit.errors import InputError


def test_components_by_hand():
    found = components([1.0, 2.0, 3.0, 4.0], [0.0, 4.0, 8.0])
    assert (found.noise, found.total, found.seed) == pytest.approx((5 / 3, 16.0, 16 - 5 / 3))
    assert found.share == pytest.approx(5 / 48) and (found.repeats, found.seeds, found.notes) == (4, 3, ())
    assert found.ratio.f == pytest.approx(9.6) and found.ratio.df == (2, 3)
    assert found.noise_low == pytest.approx(5 / stats.chi2.ppf(0.975, 3))
    assert found.noise_high == pytest.approx(5 / stats.chi2.ppf(0.025, 3))


def test_seeds_that_add_are_told_from_noise():
    rng = np.random.default_rng(0)
    found = components(rng.normal(0, 0.1, 8), rng.normal(0, 1, 8))
    assert found.ratio.p < 0.01 and "seeds add to the run-to-run noise" in found.sentence and found.share < 0.1


def test_noise_alone_leaves_the_seed_nothing_on_average():
    """4 repeats and 8 seeds, only noise: F rejects at its level; the seed's own part is near 0."""
    rng = np.random.default_rng(1)
    found = [components(x[:4], x[4:]) for x in rng.normal(0, 1, (2000, 12))]
    assert np.mean([f.ratio.p <= 0.05 for f in found]) == pytest.approx(0.05, abs=0.015)
    assert np.mean([f.total - f.noise for f in found]) == pytest.approx(0, abs=0.06)
    assert all(f.seed >= 0 and f.share <= 1 for f in found)


def test_deterministic_repeats_agree_to_the_last_digit():
    found = components([0.1 + 0.2, 0.3, 0.3, 0.3], [0.3, 0.5, 0.2])
    assert (found.noise, found.ratio, found.noise_low) == (0.0, None, None) and found.seed == found.total
    assert (
        found.sentence == "4 runs under the same seeds agree to the last digit: the spread over 3 seeds is the seeds'"
    )


def test_one_seed_has_noise_but_no_total():
    found = components([1.0, 1.5, 1.2, 0.9], [])
    assert (found.total, found.seed, found.ratio) == (None, None, None) and "seeds were not varied" in found.sentence
    one = components([1.0, 1.5, 1.2, 0.9], [1.0])  # beside the repeats' own seeds: they were varied
    assert one.total is None and one.sentence.endswith("one run under other seeds has no spread to set beside it")


def test_two_repeats_at_least():
    with pytest.raises(InputError, match="two runs under the same seeds; found 1"):
        components([1.0], [1.0, 2.0])
    assert "barely known" in components([1.0, 2.0], [1.0, 3.0]).notes[0]
