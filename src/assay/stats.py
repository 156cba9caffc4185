"""Intervals that say what they are over: tasks for one run, training seeds for a claim. Keyed draws, never global ones.

numpy and scipy compute; this file decides what is resampled and what happens where a formula has no answer (one value,
all equal). NaN is "not known" (an environment error) and is left out, never counted as failure. Left out: p-values
without an interval beside them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize
from scipy import stats as scipy_stats

from assay.rng import Key, generator

Array = NDArray[np.float64]

RESAMPLES = 9999  # scipy's default; the 2.5 % tail then rests on 250 resamples
BATCH = 2_000_000  # numbers resampled at once: 16 MB
ROUNDING = 1e-12  # differences of values around 1 that are nearer than this are equal
FLIPS = 16  # pairs up to which all 2^n sign patterns are tried
FAR = 5.0  # noncentrality from which the other tail is below 3e-7; scipy's is NaN from about 8


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with a two-sided confidence interval."""

    estimate: float
    low: float
    high: float
    n: int  # independent units behind it: tasks, seeds or pairs, not episodes or tokens
    over: str  # what these units are: "tasks", "seeds"
    method: str  # "wilson", "bca", "percentile", "paired t", "welch", "mover", "point" (all values equal)
    confidence: float = 0.95

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}] ({self.n} {self.over}, {self.method})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Mean paired difference `a - b` with its interval; p is two-sided, of the same t-test."""

    interval: Interval
    p: float
    dropped: int  # pairs left out because one side is NaN


def wilson(successes: int, n: int, confidence: float = 0.95, over: str = "tasks") -> Interval:
    """Wilson score interval of a success rate; honest at 0 of n and n of n. Source: Wilson 1927.

    Raises ValueError if n is not positive or successes are not within 0 .. n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"a success rate needs 0 <= successes <= n and n >= 1, not {successes} of {n}")
    ci = scipy_stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return Interval(successes / n, float(ci.low), float(ci.high), n, over, "wilson", confidence)


def mean_of_rates(rates: Sequence[tuple[float, float, float, int]], over: str = "tasks") -> Interval:
    """Mean of independent rates, each (rate, low, high, n) with its own Wilson interval, all counting the same.

    The distances from each rate to its bounds are added in squares. Source: Zou and Donner 2008 (MOVER), of which Newcombe's
    interval for a difference is a case. Of one rate it is that rate's interval; unlike the normal interval of stratified
    samples it claims no certainty where all or none are solved.
    """
    p, low, high = (np.array([rate[i] for rate in rates], float) for i in range(3))
    down, up = np.sqrt(np.sum((p - low) ** 2)), np.sqrt(np.sum((high - p) ** 2))
    mean, k, n = float(np.mean(p)), len(rates), sum(rate[3] for rate in rates)
    return Interval(mean, max(0.0, float(mean - down / k)), min(1.0, float(mean + up / k)), n, over, "mover")


def success_interval(
    outcomes: Sequence[ArrayLike], seed: int, *key: Key, confidence: float = 0.95, resamples: int = RESAMPLES
) -> Interval:
    """Success rate of one run, each task counted once: Wilson for one episode a task, else a bootstrap over tasks.

    Episodes of one task are not independent, so whole tasks are resampled. If the tasks do not differ (all solved,
    none solved) the bootstrap would claim certainty; then it is Wilson's with the number of tasks, at the common rate.

    Args:
      outcomes: per task, 0 or 1 per episode; NaN episodes are left out, tasks without another one too.
      seed, key: name the bootstrap's draws.

    Raises:
      ValueError: no task has a known outcome, or an outcome is neither 0 nor 1.
    """
    tasks = [_known(task) for task in outcomes]
    tasks = [task for task in tasks if task.size]
    if not tasks:
        raise ValueError("a success rate needs at least one task with a known outcome, there is none")
    if not np.isin(np.concatenate(tasks), (0.0, 1.0)).all():
        raise ValueError("outcomes must be 0 or 1 (or NaN where not known)")
    rates = np.array([task.mean() for task in tasks])
    if max(task.size for task in tasks) == 1:
        return wilson(int(rates.sum()), len(rates), confidence)
    if np.ptp(rates) == 0:
        return _wilson_of_rate(float(rates[0]), len(rates), confidence)
    return bca(rates, seed, *key, confidence=confidence, resamples=resamples)


def bca(
    values: ArrayLike,
    seed: int,
    *key: Key,
    statistic: Callable[..., NDArray[np.float64] | float] = np.mean,
    over: str = "tasks",
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> Interval:
    """Bias-corrected and accelerated bootstrap interval of a statistic. Source: Efron 1987; scipy.stats.bootstrap.

    Where the jackknife has no spread the acceleration is 0 / 0 and the percentile interval is given; all values equal
    give a point. `method` says which it was. Small samples (below about 10) give intervals that are too short.

    Args:
      values: [n], one per independent unit; NaN is left out.
      seed, key: name the draws.
      statistic: takes (values, axis=...).
      over: what the units are.
    """
    known = _known(values)
    if known.size == 0:
        raise ValueError(f"a bootstrap needs at least one known value, there is none over {over}")
    estimate = float(statistic(known, axis=0))
    if np.ptp(known) == 0:
        return Interval(estimate, estimate, estimate, known.size, over, "point", confidence)
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():  # scipy warns where it gives NaN; we go on to the next method instead
            warnings.simplefilter("ignore", RuntimeWarning)
            ci = scipy_stats.bootstrap(
                (known,),
                statistic,
                n_resamples=resamples,
                confidence_level=confidence,
                method=method,
                batch=max(1, BATCH // known.size),
                rng=generator(seed, "bootstrap", *key),
            ).confidence_interval
        if np.isfinite([ci.low, ci.high]).all():
            break
    return Interval(estimate, float(ci.low), float(ci.high), known.size, over, method.lower(), confidence)


def iqm(values: ArrayLike, axis: int | None = None) -> NDArray[np.float64] | float:
    """Interquartile mean: the mean of the middle half. Source: Agarwal et al., arXiv 2108.13264 (rliable).

    int(n / 4) values are cut from each end, as rliable does. Over all entries, or along an axis.
    """
    return scipy_stats.trim_mean(np.asarray(values, np.float64), 0.25, axis=axis)


def paired_difference(a: ArrayLike, b: ArrayLike, over: str = "seeds", confidence: float = 0.95) -> Comparison:
    """Mean of `a - b` over pairs (same seed or same task) with a t interval and p-value.

    If all differences are equal the t-test knows no spread: the interval is a point, p is 1 for 0 and else 0.

    Args:
      a, b: [n] in the same order of units; a pair with a NaN is dropped and counted.
      over: what the pairs are.

    Raises:
      ValueError: lengths differ, or fewer than two pairs are known: one pair says nothing about spread.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"pairs need two sequences of one length, not shapes {x.shape} and {y.shape}")
    difference = _known(x - y)
    n = difference.size
    if n < 2:
        raise ValueError(f"a paired interval needs at least two known pairs over {over}, there are {n}")
    mean, dropped = float(difference.mean()), x.size - n
    if np.ptp(difference) <= 1e-12:  # rounding of equal differences; scipy would divide by it
        return Comparison(Interval(mean, mean, mean, n, over, "point", confidence), float(abs(mean) <= 1e-12), dropped)
    test = scipy_stats.ttest_1samp(difference, 0.0)
    ci = test.confidence_interval(confidence)
    return Comparison(
        Interval(mean, float(ci.low), float(ci.high), n, over, "paired t", confidence), float(test.pvalue), dropped
    )


def paired_t(difference: ArrayLike, rounding: float = ROUNDING) -> tuple[Array, Array, Array]:
    """Mean, standard deviation and two-sided p of the paired t-test, for many comparisons at once.

    Where all differences of a comparison are equal there is no spread to divide by, and t would claim p = 0. Then the
    standard deviation is exactly 0 and p is that of the sign-flip test: 2^(1 - n), or 1 if all are 0.

    Args:
      difference: [..., n] over pairs, n >= 2, without NaN.
      rounding: differences that are nearer than this are equal.

    Returns:
      Three arrays [...].
    """
    d = np.asarray(difference, np.float64)
    n = d.shape[-1]
    if n < 2:
        raise ValueError(f"a paired test needs at least two pairs, not {n}")
    mean, sd = d.mean(-1), d.std(-1, ddof=1)
    equal = np.ptp(d, axis=-1) <= rounding
    p = 2 * scipy_stats.t.sf(np.abs(mean) / np.where(equal, 1.0, sd) * n**0.5, n - 1)
    of_equal = np.where(np.abs(mean) <= rounding, 1.0, 2.0 ** (1 - n))
    return mean, np.where(equal, 0.0, sd), np.where(equal, of_equal, p)


def sign_flip(difference: ArrayLike, seed: int, *key: Key, resamples: int = RESAMPLES) -> float:
    """Two-sided p of the mean difference when each pair's sign is a coin's: needs symmetry, not normality.

    All 2^n sign patterns up to n = 16; beyond that `resamples` keyed ones, the observed one counted among them, so that
    p is never 0. Its smallest value is 2^(1 - n): below 6 pairs it cannot reach 0.05. Source: Fisher 1935; Phipson and
    Smyth 2010.

    Args:
      difference: [n] over pairs, without NaN.
      seed, key: name the draws.
    """
    d = np.asarray(difference, np.float64)
    n = d.size
    if n < 1:
        raise ValueError("a sign-flip test needs at least one pair, there is none")
    if n <= FLIPS:
        patterns = np.arange(2**n)[:, None] >> np.arange(n) & 1
    else:
        patterns = generator(seed, "sign flips", *key).integers(0, 2, (resamples, n), dtype=np.int8)
    sums = np.abs(d.sum() - 2 * (patterns @ d))
    as_far = int((sums >= abs(d.sum()) - ROUNDING * np.abs(d).sum()).sum())  # a tie is as far, whatever its rounding
    return as_far / len(sums) if n <= FLIPS else (as_far + 1) / (resamples + 1)


def holm(p: Sequence[float], family: int | None = None) -> list[float]:
    """Holm's adjusted p-values, in the order given: at most alpha of families have any false rejection. Source: Holm 1979.

    Args:
      p: NaN is a test that could not be made: it stays NaN and counts as if it were the largest.
      family: number of tests planned, at least those given; None: those given.
    """
    return [float(value) for value in adjust(np.asarray(p, np.float64), family)]


def adjust(p: Array, family: int | None = None) -> Array:
    """`holm` along the last axis of [..., k], for many families at once."""
    k = p.shape[-1]
    family = k if family is None else family
    if family < k:
        raise ValueError(f"a family of {family} tests cannot hold the {k} that were made")
    order = np.argsort(p, axis=-1, kind="stable")  # NaN last
    stepped = np.maximum.accumulate(np.take_along_axis(p, order, -1) * (family - np.arange(k)), axis=-1)
    adjusted = np.empty_like(stepped)
    np.put_along_axis(adjusted, order, np.minimum(stepped, 1.0), -1)
    return adjusted


def power_of(effect: float, sd: float, n: int, alpha: float = 0.05) -> float:
    """Share of comparisons of n pairs in which a two-sided paired t-test at alpha finds a true difference `effect`.

    Exact for normal differences with standard deviation `sd` (same unit as effect): noncentral t. Needs sd > 0, n >= 2.
    """
    if not sd > 0 or n < 2:
        raise ValueError(f"power needs a spread and at least two pairs, not a standard deviation of {sd} and {n} pairs")
    shift, bound = abs(effect) / sd * n**0.5, scipy_stats.t.isf(alpha / 2, n - 1)
    far = 0.0 if shift > FAR else scipy_stats.nct.cdf(-bound, n - 1, shift)
    return float(scipy_stats.nct.sf(bound, n - 1, shift) + far)


def minimum_detectable(sd: float, n: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest true difference that `power` of the comparisons of n pairs find at alpha; the unit is sd's."""
    if not alpha < power < 1:
        raise ValueError(f"power must lie between alpha and 1, not {power} with alpha {alpha}")
    high = 1.0
    while power_of(high, 1.0, n, alpha) < power:
        high *= 2
    return sd * float(optimize.brentq(lambda d: power_of(d, 1.0, n, alpha) - power, 0.0, high))


def pairs_for(effect: float, sd: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """Fewest pairs, two at least, with which `power` of the comparisons find a true difference `effect` at alpha."""
    if not effect > 0:
        raise ValueError(f"the difference to find must be above 0, not {effect}")
    few, many = 1, 2  # `few` pairs are too few, `many` enough
    while power_of(effect, sd, many, alpha) < power:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if power_of(effect, sd, middle, alpha) >= power else (middle, many)
    return many


def welch(a: ArrayLike, b: ArrayLike, over: str = "seeds", confidence: float = 0.95) -> Interval:
    """Mean of a minus mean of b, two independent sets of units, spreads not assumed alike. Source: Welch 1947.

    Args:
      a, b: [n] and [m]; NaN is left out. `n` of the interval is the sum of those known.

    Raises:
      ValueError: fewer than two known values on a side.
    """
    x, y = _known(a), _known(b)
    if min(x.size, y.size) < 2:
        raise ValueError(f"a difference of means needs two known values a side, there are {x.size} and {y.size}")
    difference, n = float(x.mean() - y.mean()), x.size + y.size
    error, degrees = spread_of_means(x, y)
    if error == 0:
        return Interval(difference, difference, difference, n, over, "point", confidence)
    half = float(scipy_stats.t.isf((1 - confidence) / 2, degrees)) * error
    return Interval(difference, difference - half, difference + half, n, over, "welch", confidence)


def spread_of_means(x: Array, y: Array) -> tuple[float, float]:
    """Standard error of mean(x) - mean(y) of independent sets, and Satterthwaite's degrees of freedom (NaN if 0)."""
    parts = np.array([0.0 if np.ptp(v) <= ROUNDING * np.abs(v).max() else v.var(ddof=1) / v.size for v in (x, y)])
    if not parts.sum() > 0:
        return 0.0, float("nan")
    return float(parts.sum() ** 0.5), float(parts.sum() ** 2 / (parts**2 / [x.size - 1, y.size - 1]).sum())


def _known(values: ArrayLike) -> Array:
    array = np.atleast_1d(np.asarray(values, np.float64)).ravel()
    return array[~np.isnan(array)]


def _wilson_of_rate(rate: float, n: int, confidence: float) -> Interval:
    """Wilson's formula at a rate that need not be a multiple of 1 / n."""
    z = float(scipy_stats.norm.ppf(0.5 + confidence / 2))
    centre, spread = rate + z**2 / (2 * n), z * np.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    low, high = max(0.0, float((centre - spread) / scale)), min(1.0, float((centre + spread) / scale))
    return Interval(rate, low, high, n, "tasks", "wilson", confidence)
