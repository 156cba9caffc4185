"""What slots compute beside the advantage and the loss: which groups, which tokens, and what each of them counts.

Pure functions over numpy arrays. Log-probs are nats of the sampled token; arrays are compact, one entry per sampled
token, so prompts and observations are in no statistic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

LOG_LIMIT = 20.0  # nats, either side, of a token's or an episode's log ratio (verl): exp() stays finite
CORRECTIONS = ("none", "tis", "tis-sequence", "icepop")


def top_spread(spreads: ArrayLike, share: float) -> NDArray[np.bool_]:
    """Which of K groups have the largest spread of rewards: the `share` of them, at least one, none of spread 0.

    Source: StarPO-S, arXiv 2504.20073 (its "uncertainty" filter, 0.25). Ties go to the earlier group.

    Args:
      spreads: [K] standard deviation of each group's rewards, in key order; 0 for a group whose rewards are equal.
      share: of the K groups, those of spread 0 included.
    """
    spread = np.asarray(spreads, np.float64)
    chosen = np.zeros(len(spread), np.bool_)
    chosen[np.argsort(-spread, kind="stable")[: _count(share, len(spread))]] = True
    return chosen & (spread > 0)


def overlong(length: int, limit: int, cache: int, factor: float = 1.0) -> float:
    """The penalty, 0 or below, on an episode of `length` sampled tokens: it grows over the last `cache` tokens before
    `limit` from 0 to -factor, and stays there.

    Source: DAPO, arXiv 2503.14476, eq. 13 (limit 20480, cache 4096, factor 1); its code has no floor.
    """
    if cache == 0:
        return 0.0
    return -factor * min(max((length - (limit - cache)) / cache, 0.0), 1.0)


def importance_weights(
    log_ratios: Sequence[ArrayLike], kind: str, cap: float = 2.0, low: float = 0.5
) -> list[NDArray[np.float64]]:
    """What each token counts, so that samples of one policy stand for those of another.

    "tis": `min(ratio, cap)` of each token: biased, little variance. "tis-sequence": `min(product, cap)` of the whole
    episode, on each of its tokens: unbiased up to the cap, much variance. "icepop": the token's ratio where it is within
    [low, cap], else 0. Nothing is normalised.

    Args:
      log_ratios: one [N_i] per episode, `log pi_old - log pi_sampler`; NaN (not sampled as it stands) counts as 0.

    Returns:
      One [N_i] per episode.
    """
    weights = []
    for values in log_ratios:
        log = np.nan_to_num(np.asarray(values, np.float64), nan=0.0)
        if kind == "tis-sequence":
            log = np.full(len(log), log.sum())
        ratio = np.exp(np.clip(log, -LOG_LIMIT, LOG_LIMIT))
        if kind == "icepop":
            weights.append(np.where((ratio >= low) & (ratio <= cap), ratio, 0.0))
        else:
            weights.append(np.minimum(ratio, cap))
    return weights


def effective_share(weights: ArrayLike) -> float:
    """Effective sample size over the number of weights [N]: `(sum w)^2 / (N sum w^2)`; 1 where all are equal."""
    w = np.asarray(weights, np.float64)
    return float(w.sum() ** 2 / (len(w) * np.square(w).sum())) if w.any() else 0.0


def covariances(advantage: ArrayLike, logprob: ArrayLike) -> NDArray[np.float64]:
    """`(A_t - mean A)(log pi_t - mean log pi)` of each token [N]; their mean is what drives the entropy's fall.

    Source: Cui et al., The entropy mechanism, arXiv 2505.22617.
    """
    a, l = np.asarray(advantage, np.float64), np.asarray(logprob, np.float64)
    return (a - a.mean()) * (l - l.mean()) if len(a) else np.zeros(0)


def kl_cov_tokens(covariance: ArrayLike, share: float) -> NDArray[np.bool_]:
    """KL-Cov's tokens [N]: the `share` of all with the largest covariance, at least one; ties go to the earlier."""
    c = np.asarray(covariance, np.float64)
    chosen = np.zeros(len(c), np.bool_)
    chosen[np.argsort(-c, kind="stable")[: _count(share, len(c))]] = True
    return chosen


def clip_cov_tokens(
    covariance: ArrayLike, share: float, low: float, high: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Clip-Cov's tokens [N]: of those with a covariance strictly between the bounds, as many as `share` of all N, at
    least one if there is one, drawn without replacement."""
    c = np.asarray(covariance, np.float64)
    able = np.flatnonzero((c > low) & (c < high))
    chosen = np.zeros(len(c), np.bool_)
    chosen[rng.permutation(able)[: _count(share, len(c))]] = True
    return chosen


def _count(share: float, n: int) -> int:
    """The share of n, rounded down but for what floats lose (0.29 of 100 is 29), at least 1."""
    return max(1, int(share * n + 1e-9))
