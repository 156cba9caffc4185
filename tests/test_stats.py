"""Intervals against published numbers, formulas, brute force and their own coverage."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from assay.stats import (
    bca,
    holm,
    iqm,
    minimum_detectable,
    paired_difference,
    paired_t,
    pairs_for,
    power_of,
    sign_flip,
    success_interval,
    welch,
    wilson,
)

NAN = float("nan")


def test_wilson_agrees_with_its_formula_and_stays_honest_at_the_ends() -> None:
    z, n = 1.959963984540054, 10
    for successes in (0, 3, 10):
        p = successes / n
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
        got = wilson(successes, n)
        assert (got.low, got.high) == pytest.approx((centre - half, centre + half), abs=1e-12)
        assert got.estimate == p and got.n == 10 and got.over == "tasks"
    assert wilson(10, 10).low < 0.75


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_impossible_counts_are_refused(successes, n) -> None:
    with pytest.raises(ValueError, match=f"not {successes} of {n}"):
        wilson(successes, n)


def test_one_episode_a_task_is_wilson_over_the_tasks_that_are_known() -> None:
    assert success_interval([[1], [0], [1], [NAN], 1.0, 0.0], 0) == wilson(3, 5)


def test_several_episodes_of_a_task_do_not_count_as_independent() -> None:
    correlated = success_interval([[1] * 10] * 6 + [[0] * 10] * 6, 0)
    assert correlated.n == 12 and correlated.method == "bca"
    assert correlated.high - correlated.low > 1.8 * (wilson(60, 120).high - wilson(60, 120).low)


def test_each_task_counts_once_however_many_episodes_it_has() -> None:
    assert success_interval([[1] * 30, [0], [0, NAN]], 0).estimate == pytest.approx(1 / 3)


@pytest.mark.parametrize("episode", [0, 1])
def test_equal_tasks_do_not_give_certainty(episode) -> None:
    got, expected = success_interval([[episode] * 4] * 8, 0), wilson(8 * episode, 8)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high))
    half = success_interval([[0, 1]] * 8, 0)
    assert (half.estimate, half.low) == (0.5, pytest.approx(wilson(4, 8).low))


def test_outcomes_that_are_no_outcomes_are_refused() -> None:
    with pytest.raises(ValueError, match="there is none"):
        success_interval([[NAN], []], 0)
    with pytest.raises(ValueError, match="0 or 1"):
        success_interval([[0.5], [1]], 0)


def test_bca_agrees_with_the_formula_written_out() -> None:
    values = np.array([0.1, 0.2, 0.2, 0.4, 0.9, 1.0, 0.3, 0.2])
    n, random = len(values), np.random.default_rng(0)
    resampled = np.sort(values[random.integers(0, n, (200_000, n))].mean(1))
    jackknife = np.array([np.delete(values, i).mean() for i in range(n)])
    d = jackknife.mean() - jackknife
    a = (d**3).sum() / (6 * ((d**2).sum()) ** 1.5)
    below = (np.sum(resampled < values.mean()) + np.sum(resampled <= values.mean())) / (2 * len(resampled))
    z0 = scipy_stats.norm.ppf(below)
    levels = [scipy_stats.norm.cdf(z0 + (z0 + z) / (1 - a * (z0 + z))) for z in scipy_stats.norm.ppf([0.025, 0.975])]
    got = bca(values, 1)
    assert (got.low, got.high) == pytest.approx(np.quantile(resampled, levels), abs=0.02)
    assert got.method == "bca" and got.n == 8


def test_the_same_key_gives_the_same_interval_and_another_key_another() -> None:
    values = np.random.default_rng(0).normal(size=15)
    assert bca(values, 1, "panel") == bca(values, 1, "panel")
    assert bca(values, 1, "panel").low != bca(values, 1, "other").low


def test_values_without_spread_give_a_point_and_no_warning() -> None:
    got = bca([0.5, 0.5, NAN, 0.5], 0)
    assert (got.low, got.high, got.n, got.method) == (0.5, 0.5, 3, "point")
    with pytest.raises(ValueError, match="at least one known value"):
        bca([NAN], 0, over="seeds")


def test_a_jackknife_without_spread_falls_back_to_percentiles() -> None:
    got = bca([0.0] * 4 + [1.0] + [9.0] * 4, 0, statistic=np.median)
    assert np.isfinite([got.low, got.high]).all() and got.low <= got.estimate <= got.high
    lonely = bca([0.0] * 20 + [1.0], 0, statistic=iqm)
    assert lonely.method == "percentile" and (lonely.low, lonely.estimate) == (0, 0)


@pytest.mark.slow
def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    hits = {"bootstrap": 0, "paired": 0, "wilson": 0}
    for i in range(600):
        rates = random.beta(2, 2, size=40)
        got = success_interval(random.random((40, 4)) < rates[:, None], i, resamples=999)
        hits["bootstrap"] += got.low <= 0.5 <= got.high
        a = random.normal(size=8)
        pair = paired_difference(a + random.normal(0.3, 1, 8), a).interval
        hits["paired"] += pair.low <= 0.3 <= pair.high
        one = wilson(int(random.binomial(40, 0.3)), 40)
        hits["wilson"] += one.low <= 0.3 <= one.high
    assert all(0.92 < h / 600 < 0.98 for h in hits.values()), hits


def test_interquartile_mean_is_the_mean_of_the_middle_half() -> None:
    assert iqm([100, 1, 2, 3, 4, 5, 6, -50]) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert iqm([[0, 1], [2, 9]]) == pytest.approx(1.5)  # over all entries
    assert iqm([1.0, 2.0, 6.0]) == 3.0  # int(3 / 4) = 0 cut, as rliable
    np.testing.assert_allclose(iqm([[0, 1, 3, 9], [0, 0, 2, 5]], axis=1), [2, 1])


def test_paired_interval_by_hand() -> None:
    got = paired_difference([0.6, 0.7, 0.5, NAN], [0.5, 0.5, 0.2, 0.1])
    d = np.array([0.1, 0.2, 0.3])
    half = 4.302652729911275 * d.std(ddof=1) / 3**0.5  # t quantile, 2 degrees of freedom
    assert (got.interval.low, got.interval.high) == pytest.approx((0.2 - half, 0.2 + half))
    assert got.p == pytest.approx(scipy_stats.ttest_rel([0.6, 0.7, 0.5], [0.5, 0.5, 0.2]).pvalue)
    assert (got.interval.n, got.dropped, got.interval.over) == (3, 1, "seeds")


def test_pairing_removes_what_both_sides_share() -> None:
    seeds = np.array([0.1, 0.5, 0.9, 0.3])
    got = paired_difference(seeds + np.array([0.05, 0.06, 0.04, 0.05]), seeds)
    assert got.interval.low > 0 and got.p < 0.01


def test_equal_differences_give_a_point_and_no_warning() -> None:
    same = paired_difference([0.1, 0.2, 0.3], [0.1, 0.2, 0.3])
    assert (same.interval.low, same.interval.high, same.p) == (0, 0, 1)
    shifted = paired_difference([0.4, 0.3], [0.3, 0.2])
    assert shifted.interval.method == "point" and shifted.p == 0


def test_one_pair_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="at least two known pairs over seeds, there are 1"):
        paired_difference([0.5, NAN], [0.4, 0.1])
    with pytest.raises(ValueError, match="one length"):
        paired_difference([0.5], [0.4, 0.1])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.floats(-1, 1))
def test_swapping_the_sides_mirrors_the_interval(values, shift) -> None:
    other = np.array(values[::-1]) + shift
    one, two = paired_difference(values, other).interval, paired_difference(other, values).interval
    assert (one.low, one.high) == pytest.approx((-two.high, -two.low))
    assert one.low <= one.estimate <= one.high


def test_an_interval_says_what_it_is_over() -> None:
    assert str(wilson(7, 10)) == "0.700 [0.397, 0.892] (10 tasks, wilson)"


def test_many_paired_tests_at_once_are_scipys() -> None:
    d = np.random.default_rng(0).normal(0.2, 1, (3, 4, 7))
    mean, sd, p = paired_t(d)
    np.testing.assert_allclose(p, scipy_stats.ttest_1samp(d, 0, axis=-1).pvalue)
    np.testing.assert_allclose((mean, sd), (d.mean(-1), d.std(-1, ddof=1)))
    with pytest.raises(ValueError, match="at least two pairs, not 1"):
        paired_t([[0.1]])


def test_equal_differences_get_the_sign_flip_p_and_no_warning() -> None:
    mean, sd, p = paired_t([[0.3, 0.1 + 0.2, 0.3], [0, 0, 0], [-1, -1, -1], [0, 0, 1]])
    assert sd[:3].tolist() == [0, 0, 0] and sd[3] > 0
    assert p[:3].tolist() == [0.25, 1, 0.25] and mean[0] == pytest.approx(0.3)
    assert [sign_flip([v] * 3, 0) for v in (0.3, 0.0, -1)] == [0.25, 1, 0.25]


@pytest.mark.parametrize("n", [1, 2, 5, 9])
@pytest.mark.parametrize("kind", ["normal", "tied", "two-valued"])
def test_sign_flips_are_brute_force_over_all_patterns(n, kind) -> None:
    random = np.random.default_rng(n)
    d = {
        "normal": random.normal(0.5, 1, n),
        "tied": random.integers(-2, 4, n) / 10,
        "two-valued": random.choice([-0.1, 0.3], n),
    }[kind]
    exact = [round(1e9 * v) for v in d]  # whole numbers: a tie is a tie
    far = [abs(sum(s * v for s, v in zip(signs, exact, strict=True))) for signs in product((1, -1), repeat=n)]
    assert sign_flip(d, 0) == pytest.approx(np.mean([f >= abs(sum(exact)) - n for f in far]))


def test_beyond_16_pairs_sign_flips_are_drawn_by_key_and_p_is_never_0() -> None:
    d = np.random.default_rng(3).normal(0.4, 1, 17)
    signs = 1 - 2 * (np.arange(2**17)[:, None] >> np.arange(17) & 1)
    exact = (np.abs(signs @ d) >= abs(d.sum()) - 1e-9).mean()
    got = sign_flip(d, 0, "a")
    assert got == pytest.approx(exact, abs=4 * (exact / 9999) ** 0.5) and got == sign_flip(d, 0, "a")
    assert got != sign_flip(d, 0, "b")
    assert sign_flip(np.ones(40), 0) == 1 / 10_000
    with pytest.raises(ValueError, match="there is none"):
        sign_flip([], 0)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3 x .01, 2 x .03, and not less than that
    assert holm([0.01, 0.04, 0.03], family=5) == pytest.approx([0.05, 0.12, 0.12])  # 5 x .01, 4 x .03, 3 x .04
    assert holm([0.5, 0.4]) == pytest.approx([0.8, 0.8])
    assert holm([0.9, 0.8]) == [1, 1] and holm([]) == []
    np.testing.assert_allclose(holm([0.02, NAN, 0.03]), [0.06, NAN, 0.06])  # as if the unknown one were the largest
    with pytest.raises(ValueError, match="family of 1 tests cannot hold the 2"):
        holm([0.1, 0.2], family=1)


@pytest.mark.parametrize(("effect", "power", "n"), [(0.2, 0.8, 199), (0.5, 0.8, 34), (0.8, 0.8, 15), (0.5, 0.9, 44)])
def test_pairs_for_are_the_tabled_sample_sizes(effect, power, n) -> None:
    """Two-sided paired t-test at 0.05: G*Power 3 (Faul et al. 2007), "difference between two dependent means"."""
    assert pairs_for(effect, 1.0, 0.05, power) == n == pairs_for(effect / 50, 0.02, 0.05, power)
    assert power_of(effect, 1.0, n) >= power > power_of(effect, 1.0, n - 1)


@pytest.mark.parametrize(("n", "expected"), [(5, 1.68), (8, 1.16), (16, 0.749), (34, 0.495)])
def test_the_minimum_detectable_effect_is_the_tabled_one(n, expected) -> None:
    assert minimum_detectable(1.0, n) == pytest.approx(expected, rel=0.01)
    assert power_of(minimum_detectable(0.3, n), 0.3, n) == pytest.approx(0.8)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("alpha", [0.05, 0.001])
def test_power_is_the_integral_over_the_spread_also_where_scipys_tail_is_not_a_number(n, alpha) -> None:
    bound = scipy_stats.t.isf(alpha / 2, n - 1)
    spread = np.sqrt(scipy_stats.chi2.ppf((np.arange(200_000) + 0.5) / 200_000, n - 1) / (n - 1))
    for shift in (0.0, 0.5, 4.9, 5.1, 8.0, bound, 2 * bound):
        tails = scipy_stats.norm.cdf(shift - bound * spread) + scipy_stats.norm.cdf(-shift - bound * spread)
        assert power_of(shift / n**0.5, 1.0, n, alpha) == pytest.approx(tails.mean(), abs=2e-5)


def test_power_without_a_spread_or_an_effect_is_refused() -> None:
    for call in (lambda: power_of(0.1, 0.0, 8), lambda: power_of(0.1, 1, 1), lambda: pairs_for(0.0, 1.0)):
        with pytest.raises(ValueError, match="not"):
            call()
    with pytest.raises(ValueError, match="between alpha and 1"):
        minimum_detectable(1.0, 8, 0.05, 1.0)


def test_welch_is_scipys_and_a_point_where_nothing_varies() -> None:
    a, b = [0.9, NAN, 0.7, 0.8], [0.5, 0.52, 0.51, 0.4, 0.6]
    expected = scipy_stats.ttest_ind(a, b, equal_var=False, nan_policy="omit").confidence_interval(0.9)
    got = welch(a, b, confidence=0.9)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high)) and got.n == 8
    still = welch([0.3, 0.3], [0.1, 0.1, 0.1])
    assert (still.low, still.high, still.method) == (pytest.approx(0.2), pytest.approx(0.2), "point")
    assert welch([0.3, 0.3], [0.1, 0.2]).high > 0.5  # one side varies: one degree of freedom
