"""Seeds × rows against loops from the docstring, special cases with known answers, and coverage in simulation."""

import numpy as np
import pytest
from scipy import stats

from toolkit.analysis.statistics import crossed, seeds
from toolkit.errors import InputError


def tables(runs=(4, 6), rows=13, seed=0):
    rng = np.random.default_rng(seed)
    base = rng.gamma(1.0, 2.0, rows)
    sides = [
        base + 0.2 * rng.normal(size=(n, 1)) + 0.5 * rng.normal(size=(n, rows)) + 0.1 * k for k, n in enumerate(runs)
    ]
    return sides, rng.integers(1, 9, rows).astype(float)


def by_loops(sides, weights):
    """V_seeds, V_rows, V_cells as the docstring writes them."""
    w = weights / weights.sum()
    rows = len(w)
    d = [sum(sign * x[:, r].mean() for sign, x in zip((1, -1), sides, strict=False)) for r in range(rows)]
    difference = sum(w[r] * d[r] for r in range(rows))
    by_rows = rows / (rows - 1) * sum(w[r] ** 2 * (d[r] - difference) ** 2 for r in range(rows))
    by_seeds = cells = 0.0
    for x in sides:
        n, means = len(x), [float(np.dot(w, run)) for run in x]
        middle = sum(means) / n
        by_seeds += sum((m - middle) ** 2 for m in means) / (n - 1) / n
        for r in range(rows):
            for i in range(n):
                rest = x[i, r] - means[i] - x[:, r].mean() + middle
                cells += rows / (rows - 1) * w[r] ** 2 * rest**2 / (n * (n - 1))
    return difference, by_seeds, by_rows, cells


@pytest.mark.parametrize("paired", [False, True])
def test_the_parts_are_those_of_the_docstring(paired):
    sides, weights = tables((5, 5) if paired else (4, 6))
    sides = [sides[0] - sides[1]] if paired else sides
    found = crossed.parts(sides, weights)
    assert (found.difference, found.seeds, found.rows, found.cells) == pytest.approx(
        by_loops(sides, weights), rel=1e-12
    )


def test_equal_weights_give_the_two_way_analysis_of_variance():
    """One table, rows alike: V = (MS_runs + MS_rows − MS_rest)/(n·R), from sums of squares."""
    (x,), n, rows = tables((5,), 8)[0], 5, 8
    grand, by_run, by_row = x.mean(), x.mean(axis=1), x.mean(axis=0)
    ms_runs = rows * np.square(by_run - grand).sum() / (n - 1)
    ms_rows = n * np.square(by_row - grand).sum() / (rows - 1)
    rest = np.square(x - by_run[:, None] - by_row + grand).sum() / ((n - 1) * (rows - 1))
    found = crossed.parts([x], np.full(rows, 3.0))
    assert found.variance == pytest.approx((ms_runs + ms_rows - rest) / (n * rows))
    assert (found.seeds_df, found.rows_df, found.cells_df) == pytest.approx((n - 1, rows - 1, (n - 1) * (rows - 1)))


def test_rows_that_do_not_matter_leave_welchs_interval():
    """Every row of a run holds the same difference: rows add nothing."""
    rng = np.random.default_rng(3)
    base, weights = rng.normal(size=40), rng.integers(1, 5, 40).astype(float)
    sides = [base + rng.normal(size=(n, 1)) for n in (3, 5)]
    found, oracle = crossed.interval(sides, weights), stats.ttest_ind(*(s[:, 0] for s in sides), equal_var=False)
    assert found.p == pytest.approx(oracle.pvalue, rel=1e-6) and found.df == pytest.approx(oracle.df, rel=1e-6)


def test_seeds_that_do_not_matter_leave_the_rows_interval():
    """All runs of an arm are alike: what is left is the paired t over rows."""
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=50), rng.normal(size=50)
    found = crossed.interval([np.tile(a, (3, 1)), np.tile(b, (4, 1))], np.ones(50))
    oracle = stats.ttest_rel(a, b)
    assert found.error == pytest.approx(oracle.statistic and abs((a - b).mean() / oracle.statistic), rel=1e-9)
    assert found.p == pytest.approx(oracle.pvalue, rel=0.02)


def test_counting_all_outcomes_as_independent_is_far_too_narrow():
    """Shared rows counted once a run: the error of 4 × 100 outcomes a side as 400 is several times too small."""
    sides, _ = tables((4, 4), 100, seed=6)
    own = [x + np.linspace(-2, 2, 100) * k for k, x in enumerate(sides)]  # an arm's own effect on each row
    naive = np.sqrt(sum(np.square((x - x.mean()) / x.size).sum() for x in [own[0] - own[1]]))
    assert crossed.interval(own, np.ones(100)).error > 1.8 * naive


@pytest.mark.parametrize("shape", [(1, 5, 9), (4, 4, 1), (1, 1, 3)])
def test_one_run_or_one_row_has_no_interval(shape):
    found = crossed.interval([np.ones((shape[0], shape[2])), np.zeros((shape[1], shape[2]))], np.ones(shape[2]))
    assert (found.estimate, found.low, found.p) == (1.0, None, None)


def test_tables_must_share_their_rows():
    with pytest.raises(InputError, match=r"4 shared rows is asked for; found shape \(2, 3\)"):
        crossed.interval([np.ones((2, 4)), np.ones((2, 3))], np.ones(4))


def test_joint_df_lies_between_its_parts():
    """All in one part: that part's df; both: between the smaller and their sum; more coverage asks for no fewer."""
    assert crossed.joint_df((1.0, 3), (0.0, 90), coverage=0.95) == pytest.approx(3, rel=1e-6)
    assert crossed.joint_df((0.0, 3), (1.0, 90), coverage=0.95) == pytest.approx(90, rel=1e-6)
    assert 3 < crossed.joint_df((1.0, 3), (1.0, 90), coverage=0.95) < 93
    assert crossed.joint_df((0.0, 3), (0.0, 9), coverage=0.95) == 3


def test_resamples_follow_the_definition():
    """One resample, written out with repeated rows and runs, gives the t that the algebra of counts gives."""
    sides, weights = tables((10, 11), 17, seed=2)
    centre = crossed.parts(sides, weights).difference
    found = crossed._studentized(sides, weights, centre, 25, np.random.PCG64(9))
    rng = np.random.PCG64(9)
    times = crossed._counts(rng, 25, 17, 17)
    picks = [crossed._counts(rng, 25, len(x), len(x)) for x in sides]
    for k in range(25):
        row = np.repeat(np.arange(17), times[k].astype(int))
        drawn = [x[np.repeat(np.arange(len(x)), p[k].astype(int))][:, row] for x, p in zip(sides, picks, strict=True)]
        made = crossed.parts(drawn, weights[row])
        assert found[k] == pytest.approx(abs(made.difference - centre) / np.sqrt(made.variance), rel=1e-9)


def test_the_bootstrap_is_reproducible_and_near_the_t_of_many_runs():
    sides, weights = tables((20, 20), 150, seed=8)
    one, two = (crossed.resampled(sides, weights, resamples=600, seed=s) for s in (1, 1))
    plain = crossed.interval(sides, weights)
    assert one == two != crossed.resampled(sides, weights, resamples=600, seed=2)
    assert one.high - one.low == pytest.approx(plain.high - plain.low, rel=0.15) and one.error == plain.error
    assert one.p == pytest.approx(plain.p, abs=0.04) and "crossed bootstrap of 600" in one.method


def test_chunks_do_not_change_the_bootstrap(monkeypatch):
    sides, weights = tables((10, 10), 30)
    whole = crossed.resampled(sides, weights, resamples=300)
    monkeypatch.setattr(crossed, "CELLS", 30 * 300)
    assert crossed.resampled(sides, weights, resamples=300) == whole


@pytest.mark.parametrize("runs", [3, 4, 6, 10])
@pytest.mark.parametrize("paired", [False, True])
def test_coverage_where_seeds_and_rows_both_vary(simulation, runs, paired):
    """1,000 studies each; more worlds and studies are in benchmarks/results/seeds.json."""
    for world in ("seeds as wide as rows", "seeds wider than rows"):
        assert 0.93 <= simulation.covered(simulation.WORLDS[world], runs, paired, 1000) <= 0.97


def test_over_seeds_alone_does_not_cover_other_rows(simulation):
    """Welch's interval tells of these rows: where rows vary as much as seeds, it misses the truth over other rows."""
    rng, held = np.random.default_rng(1), 0
    world = simulation.WORLDS["seeds as wide as rows"]
    for _ in range(800):
        a, b, w = world.study(rng, 6)
        found = seeds.welch(a @ w / w.sum(), b @ w / w.sum())
        held += found.low <= 0 <= found.high
    assert held / 800 < 0.85


@pytest.mark.slow
@pytest.mark.parametrize("paired", [False, True])
def test_the_bootstrap_covers_at_ten_runs(simulation, paired):
    assert 0.93 <= simulation.covered(simulation.WORLDS["seeds as wide as rows"], 10, paired, 1000, boot=400) <= 0.97


def test_strata_are_tasks_of_their_own():
    """An average over two tasks: each task's variances add, by the square of its share; tasks that differ add none."""
    (a, b), weights = tables((4, 4), 24, seed=5)
    strata = np.repeat([0, 1], [9, 15])
    a = a + 5.0 * strata  # the arm gains far more on one task: no news of other rows
    shares = np.concatenate([weights[:9] / weights[:9].sum(), weights[9:] / weights[9:].sum()]) / 2
    found = crossed.parts([a, b], shares, strata)
    alone = [crossed.parts([a[:, s], b[:, s]], weights[s]) for s in (slice(0, 9), slice(9, 24))]
    assert found.difference == pytest.approx(sum(p.difference for p in alone) / 2)
    assert found.rows == pytest.approx(sum(p.rows for p in alone) / 4)
    assert found.cells == pytest.approx(sum(p.cells for p in alone) / 4)
    assert found.rows < 0.2 * crossed.parts([a, b], shares).rows


def test_one_stratum_is_none():
    sides, weights = tables()
    assert crossed.interval(sides, weights, strata=np.zeros(13, dtype=int)) == crossed.interval(sides, weights)
