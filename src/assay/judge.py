"""Is one method better than another? A verdict per pair of arms, over paired training seeds, that may be "inconclusive".

`paired_tests` and `rule` decide, over arrays: `judge` calls them on one comparison and its tests on ten thousand, so that
the rates on the page of comparing are those of this code. Left out: a verdict from one run, and one without the spread
behind it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats as scipy_stats

from assay.rng import Key, generator
from assay.stats import (
    ROUNDING,
    Array,
    Interval,
    adjust,
    bca,
    holm,
    iqm,
    minimum_detectable,
    paired_t,
    pairs_for,
    power_of,
    sign_flip,
    spread_of_means,
    welch,
)

__all__ = [
    "Curve",
    "Pair",
    "curve",
    "holm",
    "judge",
    "minimum_detectable",
    "paired_interval",
    "paired_tests",
    "pairs_for",
    "power_of",
    "rule",
    "self_difference",
]

VERDICTS = ("inconclusive", "no difference", "worse", "better")
INCONCLUSIVE, NO_DIFFERENCE, WORSE, BETTER = range(4)
BAND_RESAMPLES = 2000  # of whole runs, for the band of a curve: a picture needs no third digit
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Pair:
    """Arm a against arm b in one figure, over training seeds that both have. NaN is "not known"."""

    a: str
    b: str
    n: int  # paired seeds
    difference: (
        Interval  # mean of a - b, paired t at 1 - alpha; no ends ("all equal", "too few") where there is no spread
    )
    bootstrap: Interval  # the same mean, BCa over seeds: too short below about 10 seeds, so it decides nothing
    p: float  # paired t, two-sided; where all differences are equal the sign-flip test's
    p_permutation: float  # sign-flip test of the mean
    p_corrected: float  # p after Holm over the family and times `looks`, at most 1: the one that decides
    sd: float  # of the paired differences
    noise_floor: (
        float  # 95 % of comparisons of a method with itself, n other seeds a side, differ by less (arms' spread)
    )
    mde: float  # smallest true difference that `power` of comparisons of n such pairs find, correction included
    seeds_needed: (
        int | None
    )  # further pairs until mde <= effect, with one look more; 0: already; None: spread not known
    missing: tuple[int, ...]  # seeds that only one arm has, or where a value is no number
    verdict: str  # one of VERDICTS; "better" is a higher figure of a
    sentence: str  # the verdict in words


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked of every pair."""

    effect: float
    alpha: float
    power: float
    looks: int
    family: int
    seed: int
    unit: str

    def number(self, value: float, sign: str = "") -> str:
        """One digit more than the effect has: 0.05 gives 0.031, 500 gives 312."""
        return f"{value:{sign},.{max(0, 1 - math.floor(math.log10(self.effect)))}f}{self.unit}"

    def level(self, looks: int) -> float:
        """Of one test after correction, as if it were the family's smallest p: what a plan can count on."""
        return self.alpha / (self.family * looks)


def paired_tests(difference: Array, looks: int = 1, family: int | None = None) -> tuple[Array, Array, Array]:
    """Mean, standard deviation and corrected p of paired differences [..., k, n]: k pairs of arms are one family."""
    mean, sd, p = paired_t(difference)
    return mean, sd, correct(p, looks, family)


def correct(p: Array, looks: int = 1, family: int | None = None) -> Array:
    """Holm over the last axis [..., k], then times the number of looks, at most 1; NaN stays."""
    return np.minimum(adjust(p, family) * looks, 1.0)


def rule(
    mean: Array, sd: Array, n: int | NDArray[np.int64], p_corrected: Array, effect: float, alpha: float
) -> NDArray[np.int64]:
    """Index into VERDICTS for each comparison; all arguments broadcast.

    Better or worse if the corrected p is at most alpha. Else no difference, if the 1 - 2 alpha interval lies inside
    (-effect, +effect): two one-sided tests, Schuirmann 1987. Differences that are all equal (sd 0) are no certainty:
    either of the two tests is then the sign-flip one, whose p is 2^-n. Else, and below two pairs, inconclusive.
    """
    mean, sd, n, p = np.broadcast_arrays(mean, sd, n, p_corrected)
    half = scipy_stats.t.isf(alpha, np.maximum(n - 1, 1)) * sd / np.maximum(n, 1) ** 0.5
    inside = np.where(sd > 0, np.abs(mean) + half < effect, (np.abs(mean) < effect) & (0.5**n <= alpha)) & (n >= 2)
    found = (n >= 2) & (p <= alpha)
    return np.select([found & (mean > 0), found & (mean < 0), inside], [BETTER, WORSE, NO_DIFFERENCE], INCONCLUSIVE)


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
    """Every pair of arms, a later arm against an earlier one, in order; fewer than two arms give none.

    Args:
      results: arm -> training seed -> figure; higher is better. Seeds are paired by number.
      effect: smallest difference that would matter, in the figure's unit.
      alpha: share of comparisons of equal methods that may end in "better" or "worse".
      power: share of comparisons that should find a true difference of `effect`: what mde and seeds_needed plan for.
      looks: how often this comparison has been judged, this time included: once for every time that seeds were added.
      family: pairs of arms over which errors are counted; None: those of `results`.
      seed: names the draws of bootstrap and sign flips.
      unit: stands behind numbers in sentences.

    Raises:
      ValueError: an argument is out of its range.
    """
    pairs = [(late, early) for early, late in combinations(results, 2)]
    family = len(pairs) if family is None else family
    if not 0 < effect < math.inf or not 0 < alpha < 0.5 or looks < 1:
        raise ValueError(
            f"effect above 0, alpha in (0, 0.5) and looks from 1 are needed, not {effect}, {alpha}, {looks}"
        )
    question = _Question(effect, alpha, power, looks, max(1, family), seed, unit)
    matched = [_match(results[a], results[b]) for a, b in pairs]
    tested = [paired_t(x - y, _rounding(x, y)) if len(x) > 1 else (NAN, NAN, NAN) for x, y, _ in matched]
    mean, sd, p = np.array(tested, np.float64).reshape(-1, 3).T
    n = np.array([len(x) for x, _, _ in matched], np.int64)
    p_corrected = correct(p, looks, family)
    verdicts = rule(mean, sd, n, p_corrected, effect, alpha)
    return [
        _pair(question, names, match, float(sd[i]), (float(p[i]), float(p_corrected[i])), int(verdicts[i]))
        for i, (names, match) in enumerate(zip(pairs, matched, strict=True))
    ]


def self_difference(values: Mapping[int, float], others: Mapping[int, float], confidence: float = 0.95) -> Interval:
    """Two arms of one method, other seeds: what no change at all comes to. Welch's interval; `n` counts both sides.

    Where neither arm has a spread the interval has no ends. ValueError with fewer than two known values on a side.
    """
    interval = welch(list(values.values()), list(others.values()), confidence=confidence)
    return interval if interval.method == "welch" else _endless(interval.estimate, interval.n, "all equal", confidence)


def _match(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[Array, Array, tuple[int, ...]]:
    """Values of both arms in order of their common seeds, and the seeds that are not paired."""
    seeds = sorted({*a, *b})
    paired = [s for s in seeds if s in a and s in b and math.isfinite(a[s]) and math.isfinite(b[s])]
    x, y = (np.array([arm[s] for s in paired], np.float64) for arm in (a, b))
    return x, y, tuple(s for s in seeds if s not in set(paired))


def _rounding(x: Array, y: Array) -> float:
    """Two differences nearer than this are equal: what floating point makes of values of this size."""
    return ROUNDING * float(np.abs([x, y]).max())


def _endless(estimate: float, n: int, method: str, confidence: float) -> Interval:
    return Interval(estimate, NAN, NAN, n, "seeds", method, confidence)


def _pair(
    question: _Question,
    names: tuple[str, str],
    match: tuple[Array, Array, tuple[int, ...]],
    sd: float,
    p: tuple[float, float],
    verdict: int,
) -> Pair:
    x, y, missing = match
    n, d, confidence = len(x), x - y, 1 - question.alpha
    if n < 2 or sd == 0:
        mean = float(d.mean()) if n else NAN
        difference = bootstrap = _endless(mean, n, "too few" if n < 2 else "all equal", confidence)
        mde, needed = NAN, None
    else:
        difference = paired_interval(float(d.mean()), sd, n, confidence)
        bootstrap = bca(d, question.seed, "judge", *names, over="seeds", confidence=confidence)
        mde = minimum_detectable(sd, n, question.level(question.looks), question.power)
        more = pairs_for(question.effect, sd, question.level(question.looks + 1), question.power) - n
        needed = 0 if mde <= question.effect else max(1, more)
    return Pair(
        *names,
        n=n,
        difference=difference,
        bootstrap=bootstrap,
        p=p[0],
        p_permutation=sign_flip(d, question.seed, *names) if n > 1 else NAN,
        p_corrected=p[1],
        sd=sd,
        noise_floor=_noise_floor(x, y),
        mde=mde,
        seeds_needed=needed,
        missing=missing,
        verdict=VERDICTS[verdict],
        sentence=_sentence(question, names, difference, sd, p[1], needed, verdict) + _named(missing),
    )


def paired_interval(mean: float, sd: float, n: int, confidence: float) -> Interval:
    """Of n paired differences with this mean and standard deviation."""
    half = float(scipy_stats.t.isf((1 - confidence) / 2, n - 1)) * sd / n**0.5
    return Interval(mean, mean - half, mean + half, n, "seeds", "paired t", confidence)


def _noise_floor(x: Array, y: Array) -> float:
    """From the spread within the arms, not of the differences: what pairing saves must not hide the noise of a method."""
    if x.size < 2:
        return NAN
    error, degrees = spread_of_means(x, y)
    return NAN if error == 0 else float(scipy_stats.t.isf(0.025, degrees)) * error


def _sentence(
    question: _Question,
    names: tuple[str, str],
    difference: Interval,
    sd: float,
    p_corrected: float,
    needed: int | None,
    verdict: int,
) -> str:
    (a, b), n, effect = names, difference.n, f"{question.effect:g}{question.unit}"
    seeds = f"{n} paired seed{'' if n == 1 else 's'}"
    if n < 2:
        return f"inconclusive: {seeds} of {a} and {b}, where two are the least and eight a start"
    estimate, equal = question.number(difference.estimate, "+"), difference.method == "all equal"
    interval = "" if equal else f" [{question.number(difference.low)}, {question.number(difference.high)}]"
    if verdict == NO_DIFFERENCE and not equal:
        inner = paired_interval(difference.estimate, sd, n, 1 - 2 * question.alpha)  # the one that decided
        ends = f"[{question.number(inner.low)}, {question.number(inner.high)}]"
        interval = f", {100 * inner.confidence:g} % interval {ends}"
    measured = f"{a} against {b} {estimate}{interval} ({seeds})"
    if verdict in (BETTER, WORSE):
        small = (
            f", though less than {effect}" if max(abs(difference.low), abs(difference.high)) < question.effect else ""
        )
        text = f"{a} {'beats' if verdict == BETTER else 'falls behind'} {b} by {estimate}{interval} ({seeds}){small}"
    elif verdict == NO_DIFFERENCE:
        text = f"no difference of {effect} or more: {measured}"
    elif needed:
        more = f"about {needed} more seed{'' if needed == 1 else 's'} needed to see a difference of {effect}"
        text = f"inconclusive: {more}: {measured}"
    else:
        text = f"inconclusive: {measured}, neither apart from 0 nor within {effect} of it"
    if equal:
        return f"{text}; all {n} differences are equal, which is no certainty: does the seed reach the runs?"
    if verdict == INCONCLUSIVE and (difference.low > 0 or difference.high < 0):
        return f"{text}; p is {p_corrected:.2g} after correction for {_correction(question)}"
    return text


def _correction(question: _Question) -> str:
    parts = [(question.family, "pairs of arms"), (question.looks, "looks")]
    return " and ".join(f"{count} {what}" for count, what in parts if count > 1)


def _named(missing: Sequence[int]) -> str:
    return f"; not paired: seed{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}" if missing else ""


# -------------------------------------------------------------------------------------------------------------- curves


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One arm over training: interquartile mean over seeds with a 95 % band. Arrays [P]; empty where no x is common."""

    x: Array
    iqm: Array
    low: Array  # NaN with one run: it says nothing about others
    high: Array
    n: int  # runs behind it


def curve(runs: Sequence[tuple[ArrayLike, ArrayLike]], seed: int, *key: Key, points: int = 50) -> Curve:
    """Runs of unequal length as one line: interquartile mean and percentile bootstrap over runs, as rliable does.

    All runs are interpolated on one grid from the largest first x to the smallest last one: nothing is extrapolated and
    nothing smoothed. Points whose y is NaN are gaps; a run without a known point is left out and not in `n`. The band is
    for one x at a time, not for the whole line. Source: Agarwal et al., arXiv 2108.13264.

    Args:
      runs: (x, y) each [steps], x ascending (environment steps, tokens, seconds); the runs may differ in length.
      seed, key: name the bootstrap's draws.
      points: of the grid.

    Raises:
      ValueError: no run, or a run whose x and y differ in length or whose x descends.
    """
    known = []
    for i, (xs, ys) in enumerate(runs):
        x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
        if x.ndim != 1 or x.shape != y.shape or not (np.diff(x) >= 0).all():
            raise ValueError(f"run {i}: expected ascending x and as many y, found shapes {x.shape} and {y.shape}")
        if np.isfinite(y).any():
            known.append((x[np.isfinite(y)], y[np.isfinite(y)]))
    if not known:
        raise ValueError("a curve needs a run with a known point, there is none")
    first, last = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    grid = np.linspace(first, last, points if last > first else 1 if last == first else 0)
    y = np.array([np.interp(grid, x, y) for x, y in known])  # [runs, P]
    low, high = np.full((2, grid.size), NAN)
    if len(known) > 1 and grid.size:
        picks = generator(seed, "curve", *key).integers(0, len(known), (BAND_RESAMPLES, len(known)))
        middle = np.array([iqm(y[:, p][picks], axis=1) for p in range(grid.size)])  # [P, resamples]
        low, high = np.quantile(middle, [0.025, 0.975], axis=1)
    return Curve(grid, np.asarray(iqm(y, axis=0)), low, high, len(known))
