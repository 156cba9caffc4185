"""Is the difference real? What a comparison of training runs can and cannot say; the unit is the training seed.

Pairs share a seed: the same start, tasks in the same order, the same panel. The t-test on paired differences decides; the
bootstrap and the permutation test stand beside it, as do the noise floor (what a method differs from itself by) and the
minimum detectable effect, so that "we saw nothing" is told from "we could not have seen it".
Left out: p-values without an interval, and power computed from the observed difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize
from scipy import stats as scipy_stats

from assay.rng import Key, generator
from assay.stats import Array, Interval, bca, iqm

EXACT_PAIRS = 16  # up to 2^16 sign patterns are all looked at
DRAWS = 9_999
MOST_PAIRS = 100_000  # seeds_needed beyond this is no plan
RESAMPLES = 2_000  # of a curve's band, at every point
EQUAL = 1e-12  # differences whose spread is below this are equal but for rounding


@dataclass(frozen=True, slots=True)
class Pair:
    """Arm `a` against arm `b` in one figure."""

    a: str
    b: str
    n: int  # paired seeds
    difference: Interval  # mean of a - b, paired t
    bootstrap: Interval  # BCa over seeds
    p: float  # paired t, two-sided
    p_permutation: float  # sign flips of the differences
    p_corrected: float  # of the t-test: Holm over the family of pairs, times the looks
    sd: float  # of the paired differences
    noise_floor: float  # |difference| below which 95 % of comparisons of a method with itself stay
    mde: float  # smallest true difference found with the power asked for
    seeds_needed: int | None  # further pairs until mde <= effect; None where sd is not known
    missing: tuple[int, ...]  # seeds that one side lacks
    verdict: str  # "better", "worse", "no difference", "inconclusive"
    sentence: str


@dataclass(frozen=True, slots=True, eq=False)
class Tests:
    """What `paired_test` finds in K comparisons of n pairs: arrays of K."""

    mean: Array
    sd: Array
    half: Array  # half width of the t interval at alpha
    equivalence: Array  # half width at 2 alpha: two one-sided tests
    p: Array


def paired_test(differences: ArrayLike, alpha: float = 0.05) -> Tests:
    """The paired t-test of [K, n] differences, n >= 2. `judge` and the simulations of docs/comparing.md both call it.

    Where all differences of a comparison are equal there is no spread to judge by: p is 1 and the interval endless.
    """
    d = np.atleast_2d(np.asarray(differences, np.float64))
    n = d.shape[1]
    mean, sd = d.mean(1), d.std(1, ddof=1)
    known = sd > EQUAL
    error = np.where(known, sd, np.nan) / math.sqrt(n)
    p = np.where(known, 2 * scipy_stats.t.sf(np.abs(mean) / np.where(known, error, 1.0), n - 1), 1.0)
    half, wide = (scipy_stats.t.ppf(1 - tail, n - 1) * np.where(known, error, np.inf) for tail in (alpha / 2, alpha))
    return Tests(mean, np.where(known, sd, 0.0), half, wide, p)


def verdicts(found: Tests, p_corrected: ArrayLike, effect: float, alpha: float = 0.05) -> NDArray[np.str_]:
    """The rule: a corrected p of at most alpha is "better" or "worse"; else "no difference" if the (1 - 2 alpha) interval
    lies within the effect of interest; else "inconclusive"."""
    sure = np.asarray(p_corrected) <= alpha
    equal = (np.abs(found.mean) + found.equivalence) < effect
    word = np.where(found.mean > 0, "better", "worse")
    return np.where(sure, word, np.where(equal, "no difference", "inconclusive"))


def judge(
    results: Mapping[str, Mapping[int, float]],
    *,
    effect: float = 0.05,
    alpha: float = 0.05,
    power: float = 0.8,
    looks: int = 1,
    family: int | None = None,
    seed: int = 0,
    unit: str = "",
) -> list[Pair]:
    """All pairs of arms, the later one as `a`.

    Args:
      results: arm -> training seed -> figure; NaN is not known.
      effect: smallest difference that matters.
      looks: how often the comparison was looked at; p is multiplied by it.
      family: number of tests that Holm's correction is over; absent: the pairs.
    """
    pairs = list(combinations(results, 2))
    shared = [_paired(results[a], results[b]) for b, a in pairs]
    found = [paired_test(d, alpha) if len(d) > 1 else None for d, _ in shared]
    raw = [float(t.p[0]) if t else 1.0 for t in found]
    corrected = [min(1.0, p * looks) for p in holm(raw, family)]
    return [
        _pair(a, b, d, missing, t, p, results, effect, alpha, power, seed, unit)
        for (b, a), (d, missing), t, p in zip(pairs, shared, found, corrected, strict=True)
    ]


def _paired(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[Array, tuple[int, ...]]:
    seeds = sorted({*a, *b})
    known = [s for s in seeds if math.isfinite(a.get(s, math.nan)) and math.isfinite(b.get(s, math.nan))]
    return np.array([a[s] - b[s] for s in known], np.float64), tuple(s for s in seeds if s not in known)


def _pair(
    a: str, b: str, d: Array, missing: tuple[int, ...], found: Tests | None, p: float,
    results: Mapping[str, Mapping[int, float]], effect: float, alpha: float, power: float, seed: int, unit: str,
) -> Pair:  # fmt: skip
    n = len(d)
    mean = float(d.mean()) if n else math.nan
    if found is None:
        nothing = Interval(mean, -math.inf, math.inf, n, "seeds", "none", 1 - alpha)
        text = f"inconclusive: {a} and {b} share {n} finished seed{'s' * (n != 1)}, and a difference needs two at least"
        nan = math.nan
        return Pair(a, b, n, nothing, nothing, nan, nan, nan, nan, nan, nan, None, missing, "inconclusive", text)
    sd, half = float(found.sd[0]), float(found.half[0])
    difference = Interval(mean, mean - half, mean + half, n, "seeds", "paired t" if sd else "none", 1 - alpha)
    verdict = str(verdicts(found, [p], effect, alpha)[0])
    needed = max(0, pairs_for(effect, sd, alpha, power) - n) if sd else None
    return Pair(
        a, b, n, difference, bca(d, seed, "pair", a, b, over="seeds", confidence=1 - alpha),
        float(found.p[0]), permutation(d, seed, "flips", a, b), p, sd,
        noise_floor([list(results[arm].values()) for arm in (a, b)], n, alpha),
        minimum_detectable(sd, n, alpha, power) if sd else math.nan,
        needed, missing, verdict, _sentence(a, b, difference, verdict, needed, effect, unit),
    )  # fmt: skip


def _sentence(a: str, b: str, difference: Interval, verdict: str, needed: int | None, effect: float, unit: str) -> str:
    unit = f" {unit}" if unit else ""
    d = difference
    figure = f"{d.estimate:+.3f}{unit} [{d.low:+.3f}, {d.high:+.3f}] ({d.n} paired seeds)"
    if verdict in ("better", "worse"):
        return f"{a} is {'above' if verdict == 'better' else 'below'} {b}: {figure}"
    if verdict == "no difference":
        return f"no difference of {effect:g}{unit} or more between {a} and {b}: {figure}"
    if needed is None:
        return f"inconclusive: all {d.n} differences between {a} and {b} are {d.estimate:+.3f}, which says nothing about spread"
    if needed == 0:
        return (
            f"inconclusive: {a} minus {b} is {figure}; a difference of {effect:g}{unit} would probably have been seen"
        )
    return f"inconclusive: {a} minus {b} is {figure}; about {needed} more seeds needed to see {effect:g}{unit}"


def holm(p: Sequence[float], family: int | None = None) -> list[float]:
    """Holm's step-down correction of p-values, in their order. Source: Holm 1979. `family`: tests in all, at least these."""
    m = max(len(p), family or 0)
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(np.argsort(p, kind="stable")):
        largest = max(largest, min(1.0, (m - rank) * p[i]))
        corrected[i] = largest
    return corrected


def permutation(differences: ArrayLike, seed: int, *key: Key) -> float:
    """Two-sided p of the mean under random signs; exact up to 16 pairs, else over 9,999 keyed draws with the observed one
    counted among them. Source: Fisher 1935; Phipson and Smyth 2010."""
    d = np.asarray(differences, np.float64)
    n = len(d)
    if n <= EXACT_PAIRS:
        bits = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
        means = np.abs(((2.0 * bits - 1) * d).mean(1))
        return float((means >= abs(d.mean()) - EQUAL).mean())
    signs = generator(seed, "permutation", *key).integers(0, 2, (DRAWS, n)) * 2.0 - 1
    return float((1 + (np.abs((signs * d).mean(1)) >= abs(d.mean()) - EQUAL).sum()) / (DRAWS + 1))


def power_of(effect: float, sd: float, n: int, alpha: float = 0.05) -> float:
    """Chance that n pairs end in "better" or "worse" when the true difference is `effect`: noncentral t, exact for normal
    differences."""
    shift, bound = abs(effect) / sd * math.sqrt(n), float(scipy_stats.t.ppf(1 - alpha / 2, n - 1))
    upper, lower = scipy_stats.nct.sf(bound, n - 1, shift), scipy_stats.nct.cdf(-bound, n - 1, shift)
    return float(np.nan_to_num(upper, nan=1.0) + np.nan_to_num(lower, nan=0.0))  # nan: far out in the tail


def minimum_detectable(sd: float, n: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """The true difference that n pairs find with this power."""

    def lacking(size: float) -> float:
        return power_of(size, 1.0, n, alpha) - power

    top = 2.0
    while lacking(top) < 0:
        top *= 2
    return sd * float(optimize.brentq(lacking, 1e-9, top, xtol=1e-10))


def pairs_for(effect: float, sd: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """Smallest number of pairs that finds `effect` with this power; at most 100,000."""
    low, high = 1, 2
    while power_of(effect, sd, high, alpha) < power:
        low, high = high, high * 2
        if high > MOST_PAIRS:
            return MOST_PAIRS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(effect, sd, middle, alpha) >= power else (middle, high)
    return high


def noise_floor(arms: Sequence[Sequence[float]], n: int, alpha: float = 0.05) -> float:
    """|difference| of two n-seed means of one method that a share 1 - alpha stays below, from the spread over seeds within
    the arms: t(1 - alpha / 2) x sd x sqrt(2 / n). NaN where no arm has two seeds."""
    known = [np.array([v for v in arm if math.isfinite(v)]) for arm in arms]
    freedom = sum(len(arm) - 1 for arm in known if len(arm) > 1)
    if not freedom or not n:
        return math.nan
    pooled = math.sqrt(sum(float(arm.var(ddof=1)) * (len(arm) - 1) for arm in known if len(arm) > 1) / freedom)
    return float(scipy_stats.t.ppf(1 - alpha / 2, freedom)) * pooled * math.sqrt(2 / n)


def self_difference(values: Mapping[int, float], others: Mapping[int, float], confidence: float = 0.95) -> Interval:
    """Two arms of one method with different seeds: mean difference with Welch's interval. The measured noise."""
    x, y = (np.array([v for v in arm.values() if math.isfinite(v)]) for arm in (values, others))
    mean = float(x.mean() - y.mean())
    n = min(len(x), len(y))
    if np.ptp(x) <= EQUAL and np.ptp(y) <= EQUAL:
        return Interval(mean, mean, mean, n, "seeds", "point", confidence)
    ci = scipy_stats.ttest_ind(x, y, equal_var=False).confidence_interval(confidence)
    return Interval(mean, float(ci.low), float(ci.high), n, "seeds", "welch t", confidence)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Interquartile mean over seeds on a common grid, with a 95 % band over seeds; NaN band for fewer than two runs."""

    x: Array
    iqm: Array
    low: Array
    high: Array
    n: int


def curve(runs: Sequence[tuple[ArrayLike, ArrayLike]], seed: int, *key: Key, points: int = 50) -> Curve:
    """Curves of several seeds as one, as rliable draws them (Agarwal et al., arXiv 2108.13264).

    Args:
      runs: per seed (x, y), x ascending (environment steps, tokens, seconds); NaN in y is interpolated over.
      points: of the common grid, from the largest first x to the smallest last one: nothing is extrapolated.
    """
    known = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in (map(_floats, run) for run in runs)]
    known = [(x, y) for x, y in known if len(x)]
    start, end = max((x[0] for x, _ in known), default=0.0), min((x[-1] for x, _ in known), default=-1.0)
    if end < start:
        empty = np.zeros(0)
        return Curve(empty, empty, empty, empty, len(known))
    grid = np.linspace(start, end, points if end > start else 1)
    values = np.stack([np.interp(grid, x, y) for x, y in known])  # [n, points]
    middle, n = np.asarray(iqm(values, axis=0)), len(values)
    if n < 2:
        return Curve(grid, middle, np.full_like(grid, np.nan), np.full_like(grid, np.nan), n)
    chosen = generator(seed, "curve", *key).integers(0, n, (RESAMPLES, n))
    low, high = np.quantile(np.asarray(iqm(values[chosen], axis=1)), (0.025, 0.975), axis=0)
    return Curve(grid, middle, low, high, n)


def _floats(values: ArrayLike) -> Array:
    return np.array([math.nan if v is None else v for v in np.asarray(values, object).ravel()], np.float64)
