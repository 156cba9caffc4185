"""Advantage estimators: pure functions over float64 arrays, without a model, a row or a mask in sight.

Two shapes occur. Group statistics take `rewards [G]`, one per episode of one (group, prompt mode), each episode counted
once however many rows it is stored in. Token statistics take *compact* arrays, one number per sampled token of one
trace in order, so that prompts, observations and padding cannot enter: what runs over the sampled tokens carries over
the observation between two turns by construction.

NaN is "no reward" (an environment error), not zero: it is left out of every statistic and its own advantage is NaN, so
that a row which reaches a loss all the same is loud. Where no comparison is possible the advantage is exactly 0: a
group of one, and a group whose rewards differ by less than `TIE`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

TIE = 1e-6  # reward units: closer rewards are equal, else noise of 1e-7 is blown up to advantages of .07
STD_FLOOR = 1e-3  # reward units: the smallest spread that a group or a batch is divided by


def all_equal(rewards: ArrayLike) -> bool:
    """True if no two rewards [G] differ by more than `TIE`: such a group is dead, its advantages are exactly 0."""
    known = _known(rewards)
    return known.size == 0 or float(known.max() - known.min()) <= TIE


def grpo(rewards: ArrayLike, epsilon: float = 1e-6) -> Array:
    """Group-normalised reward, `(R_i - mean) / (std + epsilon)`, with the unbiased (G - 1) std.

    Source: Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1. The std is floored at `STD_FLOOR` before epsilon is
    added; a group of one gives 0, not the raw reward that verl gives.

    Args:
      rewards: [G] of one group; NaN is left out.
      epsilon: added to the std; 1e-6 as in verl, 1e-4 in TRL.

    Returns:
      Advantages [G]; their sum is 0.
    """
    centred = dr_grpo(rewards)
    if all_equal(rewards):
        return centred
    std = float(np.std(_known(rewards), ddof=1))
    return centred / (max(std, STD_FLOOR) + epsilon)


def dr_grpo(rewards: ArrayLike) -> Array:
    """Centred reward, `R_i - mean`: no division, so neither nearly solved nor nearly failed groups are inflated.

    Source: Liu et al., Understanding R1-Zero-like training, arXiv 2503.20783. Args and returns as `grpo`.
    """
    values = _vector(rewards, "rewards")
    known = values[~np.isnan(values)]
    if all_equal(known):
        return np.where(np.isnan(values), np.nan, 0.0)
    return values - known.mean()


def rloo(rewards: ArrayLike) -> Array:
    """Leave-one-out baseline, `R_i - mean_{j != i} R_j`, which is G / (G - 1) times `dr_grpo`.

    Source: Ahmadian et al., Back to basics, arXiv 2402.14740. Args and returns as `grpo`.
    """
    size = _known(rewards).size
    return dr_grpo(rewards) * (size / (size - 1) if size > 1 else 1.0)


def opo(rewards: ArrayLike, lengths: ArrayLike) -> Array:
    """Centred by the baseline of least variance, `R_i - sum_j l_j R_j / sum_j l_j`: long episodes count more in it.

    Source: Hao et al., On-policy RL with optimal reward baseline, arXiv 2505.23585.

    Args:
      rewards: [G] of one group; NaN is left out.
      lengths: [G] sampled tokens of each episode.

    Returns:
      Advantages [G]; their sum weighted by length is 0.
    """
    values, length = _vector(rewards, "rewards"), _vector(lengths, "lengths")
    if values.shape != length.shape:
        raise ValueError(f"rewards and lengths must have one entry per episode, not {len(values)} and {len(length)}")
    known = ~np.isnan(values)
    if all_equal(values) or not length[known].any():
        return dr_grpo(values)
    return values - np.average(values[known], weights=length[known])


def returns(rewards: ArrayLike, gamma: float = 1.0, bootstrap: float = 0.0, turns: ArrayLike | None = None) -> Array:
    """Reward to go, `G_t = r_t + gamma G_{t+1}`, over sampled tokens or over turns.

    Args:
      rewards: [N] per sampled token, or [T] per turn (then gamma is per turn).
      gamma: discount per element; with `turns`, per turn and only where the turn changes.
      bootstrap: value of what follows the last element; 0 if the episode ended.
      turns: [N] turn of each token.

    Returns:
      [N] or [T].
    """
    r = _vector(rewards, "rewards")
    return _backward(r, _discounts(len(r), gamma, turns), bootstrap)


def place_rewards(turn_rewards: ArrayLike, turns: ArrayLike) -> Array:
    """Rewards [T] of turns as rewards [N] of tokens: each on the last sampled token of its turn.

    A turn that sampled nothing gives its reward to the nearest token before it (to the first token if there is none),
    so the sum over the episode stays.

    Args:
      turn_rewards: [T].
      turns: [N >= 1] turn of each sampled token, not decreasing.
    """
    rewards, turn = _vector(turn_rewards, "turn_rewards"), np.asarray(turns)
    if turn.size == 0:
        raise ValueError("place_rewards needs at least one sampled token to carry the rewards, turns is empty")
    if np.any(np.diff(turn) < 0) or turn[-1] >= len(rewards):
        raise ValueError(f"turns must rise from 0 to at most {len(rewards) - 1}, one reward per turn, not {turn}")
    last = np.maximum(np.searchsorted(turn, np.arange(len(rewards)), side="right") - 1, 0)
    placed = np.zeros(len(turn))
    np.add.at(placed, last, rewards)
    return placed


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: float = 0.0,
    turns: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Generalised advantage estimation over the sampled tokens of one trace, across turns and rows.

    `delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`. Source: Schulman et al.,
    arXiv 1506.02438, eq. 16. Token t+1 is the next *sampled* token: observations in between neither discount nor reset.

    Args:
      rewards: [N] per sampled token (`place_rewards`).
      values: [N] value of the context before each sampled token.
      gamma: discount per token, which punishes long answers; with `turns`, per turn (1 inside a turn).
      lam: trace decay per token.
      bootstrap: value after the last token: 0 unless the episode was cut.
      turns: [N] turn of each token.

    Returns:
      (advantages [N], value targets [N]); the targets are taken before any whitening.
    """
    r, v = _vector(rewards, "rewards"), _vector(values, "values")
    if r.shape != v.shape:
        raise ValueError(f"rewards and values must have one entry per sampled token, not {len(r)} and {len(v)}")
    discount = _discounts(len(r), gamma, turns)
    delta = r + discount * np.append(v[1:], bootstrap) - v
    advantages = _backward(delta, discount * lam, 0.0)
    return advantages, advantages + v


def turn_gae(
    rewards: ArrayLike,
    values: ArrayLike,
    turns: ArrayLike,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: float = 0.0,
) -> tuple[Array, Array]:
    """GAE over the turns of one trace: a turn is one action, whatever number of tokens it took.

    `V_k` is the value before the first sampled token of turn k, `r_k` the sum of the turn's rewards; then `gae` with
    both discounts per turn. Turns that sampled nothing are no actions: the next one follows directly.

    Args:
      rewards: [N] per sampled token (`place_rewards`).
      values: [N] value of the context before each sampled token; read at the first token of each turn only.
      turns: [N] turn of each token, not decreasing.
      gamma, lam: discount and trace decay per turn.
      bootstrap: value after the last turn: 0 unless the episode was cut.

    Returns:
      (advantages [N], value targets [N]): the turn's number on each of its tokens, targets before any whitening. Only
      the first token of a turn has a value to train (`first_tokens`).
    """
    r, v, turn = _vector(rewards, "rewards"), _vector(values, "values"), np.asarray(turns)
    if not r.shape == v.shape == turn.shape:
        raise ValueError(
            f"rewards, values, turns must have one entry per token, not {r.shape}, {v.shape}, {turn.shape}"
        )
    first = np.flatnonzero(first_tokens(turn))
    place = np.cumsum(first_tokens(turn)) - 1  # [N] which of the turns with tokens
    advantages, targets = gae(np.bincount(place, r, len(first)), v[first], gamma, lam, bootstrap)
    return advantages[place], targets[place]


def first_tokens(turns: ArrayLike) -> NDArray[np.bool_]:
    """[N] true on the first of each run of equal entries of `turns` [N]."""
    turn = np.asarray(turns)
    return np.append(np.ones(1, bool), np.diff(turn) != 0)[: len(turn)]


def whiten(values: Sequence[ArrayLike], epsilon: float = 1e-8) -> list[Array]:
    """Mean 0 and unbiased variance 1 over all tokens of the batch: every token counts once, long traces count more.

    Args:
      values: one [N_i] per trace, sampled tokens only; NaN is left out.
      epsilon: added to the variance (verl).

    Returns:
      One [N_i] per trace; exactly 0 where all values are equal within `TIE`.
    """
    known = _known(np.concatenate([_vector(v, "values") for v in values])) if len(values) else np.zeros(0)
    if all_equal(known):
        return centre(values)
    std = max(float(np.sqrt(np.var(known, ddof=1) + epsilon)), STD_FLOOR)
    return [a / std for a in centre(values)]


def centre(values: Sequence[ArrayLike]) -> list[Array]:
    """Mean 0 over all tokens of the batch, spread as it is: `whiten` without its division (OpenRLHF: no_advantage_std_norm).

    Args:
      values: one [N_i] per trace, sampled tokens only; NaN is left out.

    Returns:
      One [N_i] per trace; exactly 0 where all values are equal within `TIE`.
    """
    arrays = [_vector(v, "values") for v in values]
    known = _known(np.concatenate(arrays)) if arrays else np.zeros(0)
    if all_equal(known):
        return [np.where(np.isnan(a), np.nan, 0.0) for a in arrays]
    return [a - known.mean() for a in arrays]


def reinforce_pp(
    token_rewards: Sequence[ArrayLike], gamma: float = 1.0, turns: Sequence[ArrayLike] | None = None
) -> list[Array]:
    """REINFORCE++: token returns, whitened over the global batch.

    Source: Hu et al., arXiv 2501.03262. The return is carried over observations, so that the first turn of a success
    is credited (verl resets it there and gives such turns a negative advantage).

    Args:
      token_rewards: one [N_i] per trace: the outcome on the last token, minus beta times k1 on each.
      gamma: discount per token, or per turn with `turns`.
      turns: one [N_i] per trace.

    Returns:
      Advantages, one [N_i] per trace.
    """
    each = [None] * len(token_rewards) if turns is None else turns
    return whiten([returns(r, gamma, turns=t) for r, t in zip(token_rewards, each, strict=True)])


def reinforce_pp_baseline(rewards: ArrayLike, groups: Sequence[object], lengths: Sequence[int]) -> list[Array]:
    """REINFORCE++-baseline: rewards centred in their group, no group std, then whitened over all tokens of the batch.

    Source: Hu et al., arXiv 2501.03262. Its KL belongs in the loss (k2), not in the reward.

    Args:
      rewards: [B], one per trace; NaN is left out.
      groups: [B] key of the group of each trace.
      lengths: [B] number of sampled tokens of each trace.

    Returns:
      Advantages, one [lengths[i]] per trace.
    """
    values = _vector(rewards, "rewards")
    if not len(values) == len(groups) == len(lengths):
        raise ValueError(f"{len(values)} rewards, {len(groups)} groups, {len(lengths)} lengths: one of each per trace")
    members: dict[object, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    centred = np.empty_like(values)
    for index in members.values():
        centred[index] = dr_grpo(values[index])
    return whiten([np.full(n, a) for a, n in zip(centred, lengths, strict=True)])


def _vector(values: ArrayLike, name: str) -> Array:
    array = np.asarray(values, np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {array.shape}")
    return array


def _known(values: ArrayLike) -> Array:
    array = np.asarray(values, np.float64)
    return array[~np.isnan(array)]


def _discounts(n: int, gamma: float, turns: ArrayLike | None) -> Array:
    """[n] factor between element t and t+1; the last stands before the bootstrap, always the end of a turn."""
    if turns is None:
        return np.full(n, float(gamma))
    turn = np.asarray(turns)
    if turn.shape != (n,):
        raise ValueError(f"turns must have one entry per token, shape ({n},), not {turn.shape}")
    ends = np.append(np.diff(turn) != 0, True)[:n]
    return np.where(ends, float(gamma), 1.0)


def _backward(terms: Array, factors: Array, last: float) -> Array:
    """`x_t = terms_t + factors_t x_{t+1}` from the end, where x_{N} is `last`."""
    out, running = np.empty_like(terms), float(last)
    for t in range(len(terms) - 1, -1, -1):
        running = float(terms[t]) + float(factors[t]) * running
        out[t] = running
    return out
