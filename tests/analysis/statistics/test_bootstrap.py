"""Intervals over windows: Fieller's set by brute force, scipy's at many windows, and coverage in simulation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import signal, stats

from toolkit.analysis.statistics import bootstrap
from toolkit.errors import InputError


def windows(n=16, seed=0, gain=5.0, share=0.4):
    """Losses above and below the line whose ratio is near `share`."""
    rng = np.random.default_rng(seed)
    denominator = gain + rng.normal(size=n)
    return share * denominator + 0.5 * rng.normal(size=n), denominator


def t_of(a, d, theta, block):
    """|ū(θ)|/s(u(θ)) by loops over pairs of windows, from the docstring."""
    u = a - theta * d
    n, m = len(u), min(len(u), 4 * (block - 1) + 1)
    centred = u - u.mean()
    total = sum(max(0.0, 1 - abs(i - j) / m) * centred[i] * centred[j] for i in range(n) for j in range(n))
    return abs(u.mean()) / np.sqrt(total / n / (n - 1))


@pytest.mark.parametrize("block", [1, 2, 4])
def test_the_interval_is_the_set_of_ratios_that_the_windows_allow(block):
    a, d = windows(20, seed=block)
    found = bootstrap.ratio(a, d, block=block)
    assert found.value == a.sum() / d.sum() and (found.windows, found.block) == (20, block)
    low, high = t_of(a, d, found.low, block), t_of(a, d, found.high, block)
    assert low == pytest.approx(high, rel=1e-9)  # one critical value at both ends
    for inside in np.linspace(found.low, found.high, 9)[1:-1]:
        assert t_of(a, d, inside, block) < low
    for outside in (found.low - 0.01, found.high + 0.01):
        assert t_of(a, d, outside, block) > low


@given(st.integers(0, 99), st.floats(-3, 3), st.floats(0.1, 50), st.sampled_from([1, 3]))
def test_other_units_and_another_zero_move_the_interval_along(seed, shift, scale, block):
    a, d = windows(seed=seed)
    found = bootstrap.ratio(a, d, block=block, resamples=200)
    moved = bootstrap.ratio(scale * (a + shift * d), d, block=block, resamples=200)
    ends = [scale * (x + shift) for x in (found.value, found.low, found.high)]
    assert [moved.value, moved.low, moved.high] == pytest.approx(ends, rel=1e-6, abs=1e-6 * scale)


def test_many_independent_windows_give_the_usual_interval_of_a_mean():
    values = np.random.default_rng(0).normal(1400, 20, size=400)
    found = bootstrap.mean(values, np.full(400, 511), resamples=20_000)
    oracle = stats.ttest_1samp(values / 511, 0).confidence_interval(0.95)
    assert found.value == pytest.approx(values.mean() / 511)
    assert [found.low - found.value, found.high - found.value] == pytest.approx(
        [oracle.low - found.value, oracle.high - found.value], rel=0.03
    )


def test_the_critical_value_equals_students_t_for_few_normal_windows():
    """Averaged over texts, c is the quantile of |t| with n − 1 degrees of freedom, to a few percent."""
    cs = [bootstrap._critical(np.random.default_rng(i).normal(size=16), 1, 999, 0.95, seed=i) for i in range(300)]
    assert np.mean(cs) == pytest.approx(stats.t.ppf(0.975, 15), rel=0.04)


def test_a_mean_weighs_windows_by_their_tokens():
    tokens = np.array([511] * 11 + [100])
    found = bootstrap.mean(3.0 * tokens, tokens)
    assert (found.value, found.low, found.high) == pytest.approx((3.0, 3.0, 3.0))
    with pytest.raises(InputError, match="window 1 has no scored tokens"):
        bootstrap.mean([1.0, 2.0], [5, 0])


def test_equal_seeds_give_equal_intervals():
    a, d = windows()
    assert bootstrap.ratio(a, d, seed=3) == bootstrap.ratio(list(a), list(d), seed=3)
    assert bootstrap.ratio(a, d, seed=3) != bootstrap.ratio(a, d, seed=4)


def test_the_stream_is_that_of_the_bit_generator():
    """Pinned, since certificates are recomputed elsewhere: raw output of PCG64 does not change between versions."""
    found = bootstrap.ratio([1.0, 2.0, 4.0, 3.0, 2.5, 3.5], [2.0, 3.0, 5.0, 4.0, 3.0, 3.0], resamples=200)
    assert found.value == pytest.approx(0.8)
    assert (found.low, found.high) == pytest.approx((0.4766038483121307, 1.0823565861331756), rel=1e-9)


def test_no_interval_where_the_denominators_own_includes_zero():
    a, d = windows(gain=0.1)
    own = bootstrap.mean(d, np.ones(16))
    found = bootstrap.ratio(a, d)
    assert own.low < 0 < own.high and found.low is None and found.high is None
    assert found.value == a.sum() / d.sum()
    assert bootstrap.ratio([1.0, 2.0], [1.0, -1.0]).value is None


@pytest.mark.parametrize(("n", "block"), [(1, 1), (3, 1), (7, 2), (16, 5)])
def test_fewer_than_four_blocks_give_no_interval(n, block):
    a, d = windows(n)
    found = bootstrap.ratio(a, d, block=block)
    assert found.low is None and found.high is None and found.value == a.sum() / d.sum()
    a, d = windows(4 * block)
    assert bootstrap.ratio(a, d, block=block).windows == 4 * block


@pytest.mark.parametrize(
    ("a", "d", "options", "message"),
    [
        ([1.0], [1.0, 2.0], {}, "1 windows above and 2 below"),
        ([], [], {}, "at least one window"),
        ([1.0, np.nan], [1.0, 2.0], {}, "top: window 1 is nan"),
        ([1.0, 2.0], [1.0, 2.0], {"block": 3}, "a block of 3 windows; there are 2"),
        ([1.0, 2.0], [1.0, 2.0], {"block": 0}, "a block of 0 windows"),
        ([1.0, 2.0], [1.0, 2.0], {"level": 1.0}, "between 0 and 1; found 1.0"),
    ],
)
def test_bad_windows_are_named(a, d, options, message):
    with pytest.raises(InputError, match=message):
        bootstrap.ratio(a, d, what="top", **options)


def autoregressive(rng, n, rho, gamma):
    """A stationary series of unit variance, normal or skewed (gamma of shape 2)."""
    shocks = (rng.gamma(2.0, 1.0, size=n + 40) - 2) / 2**0.5 if gamma else rng.normal(size=n + 40)
    return signal.lfilter([(1 - rho**2) ** 0.5], [1.0, -rho], shocks)[40:]


def coverage(n, rho, block, errors, repeats, gamma=False, seed=1):
    """Share of intervals that hold the ratio, of those with ends and of all; no ends claims nothing, and holds it.

    `errors`: how many standard errors the denominator's mean lies from zero; numerator and denominator correlate.
    """
    rng, share, held, none = np.random.default_rng(seed), 0.4, 0, 0
    mean = errors * ((1 + rho) / (1 - rho) / n) ** 0.5
    for repeat in range(repeats):
        x, y = autoregressive(rng, n, rho, gamma), autoregressive(rng, n, rho, gamma)
        d = mean + y
        found = bootstrap.ratio(share * d + 0.6 * (0.5 * y + 0.75**0.5 * x), d, block=block, resamples=199, seed=repeat)
        none += found.low is None
        held += found.low is not None and found.low <= share <= found.high
    return held / (repeats - none), (held + none) / repeats


@pytest.mark.parametrize(("n", "rho", "block"), [(16, 0.0, 1), (32, 0.3, 2)])
def test_coverage_in_a_small_simulation(n, rho, block):
    repeats = 300
    _, all_of_them = coverage(n, rho, block, 5, repeats)
    assert abs(all_of_them - 0.95) < 3.5 * (0.95 * 0.05 / repeats) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("errors", "gamma"), [(3, False), (5, True)])
@pytest.mark.parametrize(("n", "rho", "block"), [(16, 0.0, 1), (32, 0.0, 1), (16, 0.3, 2), (32, 0.3, 3)])
def test_coverage_is_93_to_97_percent(n, rho, block, errors, gamma, capsys):
    """Of the intervals that are given; the figures of a longer simulation stand in the docstring of `ratio`."""
    given, all_of_them = coverage(n, rho, block, errors, 2500, gamma)
    with capsys.disabled():
        shape = "gamma" if gamma else "normal"
        print(
            f"\n  {n} windows, AR({rho}), block {block}, {errors} errors, {shape}: {given:.3f}, all {all_of_them:.3f}"
        )
    assert 0.93 <= given <= 0.97
