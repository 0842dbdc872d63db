"""Draw as a random effect: sums of squares by hand, unbalanced grids against brute force, coverage in simulation."""

import numpy as np
import pytest
from scipy import stats

from toolkit.analysis.statistics import seeds
from toolkit.analysis.statistics.draws import grid
from toolkit.errors import InputError


def world(draws=5, count=4, draw=1.0, seed=0.5, rest=0.3, number=0):
    rng = np.random.default_rng(number)
    return (
        10
        + draw * rng.normal(size=(draws, 1))
        + seed * rng.normal(size=(1, count))
        + rest * rng.normal(size=(draws, count))
    )


def test_balanced_components_are_those_of_the_analysis_of_variance():
    y, d, s = world(), 5, 4
    grand, by_draw, by_seed = y.mean(), y.mean(axis=1), y.mean(axis=0)
    ms_d, ms_s = s * np.square(by_draw - grand).sum() / (d - 1), d * np.square(by_seed - grand).sum() / (s - 1)
    ms_e = np.square(y - by_draw[:, None] - by_seed + grand).sum() / ((d - 1) * (s - 1))
    found = grid(y)
    assert (found.draw, found.seed, found.rest) == pytest.approx(((ms_d - ms_e) / s, (ms_s - ms_e) / d, ms_e))
    assert found.mean.estimate == pytest.approx(grand) and found.mean.p is None and found.contrast is None
    assert found.mean.error == pytest.approx(np.sqrt((ms_d + ms_s - ms_e) / (d * s)))
    assert (found.draws, found.seeds, found.cells, found.notes) == (5, 4, 20, ())


def test_unbalanced_components_solve_the_moments():
    """The sums of squares' expectations under each component alone, by brute force over basis vectors."""
    y = world(4, 5, number=3)
    for cell in ((0, 1), (2, 3), (3, 0), (3, 4)):
        y[cell] = np.nan
    present = ~np.isnan(y)
    places = np.argwhere(present)
    n = len(places)

    def squares(x):
        left = []
        for kinds in ((0, 1), (1,), (0,)):
            z = np.hstack([(places[:, k, None] == np.arange(y.shape[k])).astype(float) for k in kinds])
            left.append(np.square(x - z @ np.linalg.pinv(z) @ x).sum())
        return np.array(left)

    # E of a quadratic form x'Qx with Var x = ZZ' is the sum of the forms of Z's columns
    columns = [
        [(places[:, 0] == d).astype(float) for d in range(4)],
        [(places[:, 1] == s).astype(float) for s in range(5)],
        list(np.eye(n)),
    ]
    expected = np.array([sum(squares(z) for z in kind) for kind in columns]).T
    oracle = np.maximum(np.linalg.solve(expected, squares(y[present])), 0)
    found = grid(y)
    assert (found.draw, found.seed, found.rest) == pytest.approx(tuple(oracle))
    assert "4 of 20 runs of the grid are missing" in found.notes[0] and found.mean.estimate == pytest.approx(
        np.nanmean(y)
    )


def test_components_average_to_the_truth_with_cells_missing():
    rng, found = np.random.default_rng(0), []
    for number in range(1500):
        y = world(6, 6, 1.0, 0.5, 0.3, number)
        y[rng.random(y.shape) < 0.15] = np.nan
        if np.isnan(y).all(axis=0).any() or np.isnan(y).all(axis=1).any():
            continue
        made = grid(y)
        found.append((made.draw, made.seed, made.rest))
    assert np.mean(found, axis=0) == pytest.approx([1.0, 0.25, 0.09], rel=0.06)


def test_one_run_a_draw_would_hide_the_draws_behind_seeds():
    """Draws spread, seeds do not: taking all cells as independent runs is too narrow by far."""
    y = world(4, 8, 1.0, 0.0, 0.1, 7)
    naive = np.std(y, ddof=1) / np.sqrt(y.size)
    found = grid(y).mean
    assert found.error > 2.3 * naive and found.df == pytest.approx(3, rel=0.1)
    assert found.error == pytest.approx(np.std(y.mean(axis=1), ddof=1) / 2, rel=0.05)


def test_draws_that_do_not_matter_leave_the_seeds_interval():
    y = np.tile(np.array([[1.0, 2.0, 4.0, 3.0]]), (5, 1))
    found, oracle = grid(y).mean, stats.ttest_1samp(y[0], 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx((oracle.low, oracle.high), rel=1e-6)


def test_arm_unpaired_adds_its_own_variance_and_paired_its_differences():
    y, arm = world(6, 5, number=2), 10.5 + world(1, 5, number=9)[0] - 10
    own, both = grid(y, arm), grid(y, arm, paired=True)
    assert own.contrast.estimate == pytest.approx(arm.mean() - y.mean()) == both.contrast.estimate
    assert own.contrast.error == pytest.approx(np.hypot(grid(y).mean.error, np.std(arm, ddof=1) / np.sqrt(5)))
    assert both.contrast.error == pytest.approx(grid(arm - y).mean.error) and "paired by seed" in both.contrast.method
    assert grid(y, arm[:1]).contrast.low is None


@pytest.mark.parametrize(("draw", "seed"), [(1.0, 0.3), (0.3, 0.3), (0.0, 1.0)])
@pytest.mark.parametrize("paired", [False, True])
def test_coverage_over_other_draws_and_seeds(draw, seed, paired):
    """Six draws × five seeds, the arm on the same seeds; 93–97% (98% where draws add nothing at all)."""
    rng, held, studies = np.random.default_rng(4), 0, 1500
    for _ in range(studies):
        common = seed * rng.normal(size=5)
        y = draw * rng.normal(size=(6, 1)) + common + 0.3 * rng.normal(size=(6, 5))
        arm = (common if paired else seed * rng.normal(size=5)) + 0.3 * rng.normal(size=5)
        found = grid(y, arm, paired=paired).contrast
        held += found.low <= 0 <= found.high
    assert 0.93 <= held / studies <= (0.98 if not draw else 0.97)


def test_few_draws_are_noted():
    assert grid(world(3, 4)).notes == ("3 draws: how draws spread is barely known",)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (np.ones((1, 4)), "two draws and two seeds at least.*'this draw only'"),
        (np.ones((4, 1)), "two draws and two seeds"),
        (np.array([[1.0, np.inf], [1, 2]]), "infinite"),
        (np.array([[1.0, 2.0], [np.nan, np.nan], [1, 2]]), "draw b has no finished run"),
        (np.array([[1.0, np.nan], [2.0, np.nan], [1, np.nan]]), "seed 1 has no finished run"),
        (np.array([[1.0, np.nan], [np.nan, 2.0], [1, np.nan]]), "3 runs are too few for 3 draws × 2 seeds"),
    ],
)
def test_what_is_refused(table, said):
    with pytest.raises(InputError, match=said):
        grid(table, names="abc")


def test_pairing_needs_the_seeds_of_the_grid():
    with pytest.raises(InputError, match="found 3 for 4"):
        grid(world(), [1.0, 2.0, 3.0], paired=True)
    with pytest.raises(InputError, match="finite"):
        grid(world(), [1.0, np.nan])
    assert seeds.mean([1.0, 2.0]).p is None
