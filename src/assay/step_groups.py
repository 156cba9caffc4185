"""Step-level credit by comparison of steps that began in the same place: GiGPO and HGPO, pure functions.

All functions take one (task group, prompt mode): G traces, trace i with T_i environment steps. An *anchor* names what
the environment showed before a step (any hashable, `Turn.anchor` in a run); steps with equal anchors started from the
same observation, whichever trace they belong to, so their returns can be compared without a critic. A step whose anchor
occurs once has nothing to be compared with, and its step advantage is exactly 0. So is that of a group whose returns
differ by less than `TIE`.

Left out: grouping of similar but not equal observations (a text distance with a threshold). Equality needs no tuning;
an environment whose observations hold a counter or a clock sets `info["anchor"]` without it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.advantages import STD_FLOOR, TIE, Array, all_equal, dr_grpo, grpo

Anchors = Sequence[Sequence[Hashable]]
Members = NDArray[np.int64]  # [n, 2] (trace, step) of the steps of one anchor group

EPISODE_WEIGHTS = ("trace", "row")


def biased(values: ArrayLike, epsilon: float = 1e-6) -> Array:
    """`(x - mean) / (std + epsilon)` with the biased (n) std, as HGPO has it; floored at `STD_FLOOR` as in `grpo`."""
    centred = dr_grpo(values)
    return centred if all_equal(values) else centred / (max(float(np.std(centred)), STD_FLOOR) + epsilon)


GIGPO_NORMS: dict[str, Callable[..., Array]] = {"std": grpo, "none": dr_grpo}
HGPO_NORMS: dict[str, Callable[..., Array]] = {"std": biased, "none": dr_grpo}


def anchor_groups(anchors: Anchors, length: int = 1) -> list[Members]:
    """Steps with the same last `length` anchors, their own included, in the order in which the groups first occur.

    Args:
      anchors: one [T_i] per trace.
      length: how many anchors must agree; a step with fewer behind it is in no group.

    Returns:
      One [n, 2] of (trace, step) per group; a group of one is a singleton.
    """
    found: dict[tuple[Hashable, ...], list[tuple[int, int]]] = {}
    for i, own in enumerate(anchors):
        for t in range(length - 1, len(own)):
            found.setdefault(tuple(own[t - length + 1 : t + 1]), []).append((i, t))
    return [np.array(members, np.int64) for members in found.values()]


def step_advantages(
    step_returns: Sequence[ArrayLike], anchors: Anchors, length: int, estimator: Callable[..., Array]
) -> list[Array]:
    """The estimator applied to the returns of each anchor group.

    Args:
      step_returns: one [T_i] per trace, the discounted reward from each step on (`advantages.returns`).
      anchors: one [T_i] per trace.
      length: anchors that must agree, see `anchor_groups`.
      estimator: [n] -> [n].

    Returns:
      One [T_i] per trace; exactly 0 for singletons and for steps in no group.
    """
    values = [np.asarray(r, np.float64) for r in step_returns]
    if [v.shape for v in values] != [(len(a),) for a in anchors]:
        raise ValueError(
            f"step_returns and anchors must have one entry per step of each trace, not {[v.shape for v in values]} and "
            f"{[len(a) for a in anchors]}"
        )
    out = [np.zeros(len(v)) for v in values]
    for members in anchor_groups(anchors, length):
        for (i, t), advantage in zip(members, estimator(np.array([values[i][t] for i, t in members])), strict=True):
            out[i][t] = advantage
    return out


def episode_advantages(
    rewards: ArrayLike, steps: Sequence[int], estimator: Callable[..., Array], episode_weight: str = "trace"
) -> Array:
    """The group-relative advantage [G] of whole episodes.

    Args:
      rewards: [G] score of each trace.
      steps: [G] environment steps of each trace.
      estimator: [n] -> [n].
      episode_weight: "trace": each trace counts once, the paper's form. "row": each trace counts once per step, so that
        long episodes weigh more: what verl-agent does unless told otherwise, for GiGPO and for its GRPO baseline.
    """
    if episode_weight not in EPISODE_WEIGHTS:
        raise ValueError(f"episode_weight is 'trace' or 'row', not {episode_weight!r}")
    values = np.asarray(rewards, np.float64)
    if episode_weight == "trace":
        return estimator(values)
    out = np.zeros(len(values))
    index = np.repeat(np.arange(len(values)), steps)
    out[index] = estimator(values[index])
    return out


def gigpo(
    rewards: ArrayLike,
    step_returns: Sequence[ArrayLike],
    anchors: Anchors,
    weight: float = 1.0,
    norm: str = "std",
    episode_weight: str = "trace",
) -> list[Array]:
    """GiGPO: `A_{i,t} = A^E_i + w A^S_{i,t}`, one number per environment step.

    Source: Feng et al., Group-in-Group Policy Optimization, arXiv 2505.10978. A^E compares the episodes of the task, A^S
    the returns of the steps with the same anchor; both are divided by their group's unbiased std, or by 1.

    Args:
      rewards: [G] score of each trace.
      step_returns: one [T_i] per trace, discounted per step.
      anchors: one [T_i] per trace.
      weight: w; 0 leaves the episode's advantage, bit for bit.
      norm: "std" (the reference's `mean_std_norm`) or "none" (`mean_norm`).
      episode_weight: see `episode_advantages`.

    Returns:
      Advantages, one [T_i] per trace.
    """
    estimator = _norm(GIGPO_NORMS, norm)
    episode = episode_advantages(rewards, [len(a) for a in anchors], estimator, episode_weight)
    steps = step_advantages(step_returns, anchors, 1, estimator)
    return [e + weight * s for e, s in zip(episode, steps, strict=True)]


def hgpo(
    step_returns: Sequence[ArrayLike],
    anchors: Anchors,
    history: int = 2,
    alpha: float = 1.0,
    norm: str = "std",
    base: ArrayLike | None = None,
    epsilon: float = 1e-6,
) -> list[Array]:
    """HGPO: a weighted mean of step advantages under ever longer shared histories, one number per environment step.

    `A = sum_k w_k A^(k)` over levels k = 1 .. history + 1, where level k groups steps by their last k anchors;
    `w_k = (k + 1)^alpha / (sum (k + 1)^alpha + epsilon)` over the levels that say something. Source: Hierarchy-of-Groups
    Policy Optimization (HGPO), ICLR 2026, and its published recipe.

    A level says nothing where the step is alone in its group or stands at the group's mean: the recipe drops exact
    zeros, we drop what is within `TIE` of the mean, so that rounding does not decide. A step with no level left has 0.

    Args:
      step_returns, anchors: as `gigpo`.
      history: K, turns of history beside the present one; level 1 alone (K = 0) is GiGPO's anchor group.
      alpha: how much more a longer shared history counts; 0: all levels alike.
      norm: "std" (biased) or "none".
      base: [G] an episode advantage per trace as level k = 0, of weight 1 before normalising; None: none.
      epsilon: in the weights' denominator.

    Returns:
      Advantages, one [T_i] per trace.
    """
    estimator = _norm(HGPO_NORMS, norm)

    def without_ties(values: Array) -> Array:
        return np.where(np.abs(values - values.mean()) <= TIE, 0.0, estimator(values))

    levels = [step_advantages(step_returns, anchors, k, without_ties) for k in range(1, history + 2)]
    shares = [float(k + 1) ** alpha for k in range(1, history + 2)]
    if base is not None:
        levels.insert(0, [np.full(len(a), b) for a, b in zip(anchors, np.asarray(base, np.float64), strict=True)])
        shares.insert(0, 1.0)
    out = []
    for each in zip(*levels, strict=True):
        stacked = np.stack(each)  # [levels, T_i]
        weights = np.array(shares)[:, None] * (stacked != 0.0)
        out.append((weights * stacked).sum(0) / (weights.sum(0) + epsilon))
    return out


def anchor_metrics(groups: Sequence[Members]) -> dict[str, float]:
    """How much there is to compare, over the anchor groups of all task groups of a batch.

    Returns:
      `anchor_groups`: share of the anchor groups with at least two steps. `anchor_singletons`: share of the steps that
      are alone. `anchor_size`: mean steps of an anchor group. `anchor_within`: of the pairs of steps with one anchor,
      the share inside one trace (loops: the trace is compared with itself). {} without a step.
    """
    if not groups:
        return {}
    sizes = np.array([len(members) for members in groups])
    inside = 0.0
    for members in groups:
        counts = np.bincount(members[:, 0])
        inside += float((counts * (counts - 1)).sum() / 2)
    pairs = float((sizes * (sizes - 1)).sum() / 2)
    return {
        "anchor_groups": float(np.mean(sizes > 1)),
        "anchor_singletons": float(np.sum(sizes == 1) / sizes.sum()),
        "anchor_size": float(sizes.mean()),
        "anchor_within": inside / pairs if pairs else 0.0,
    }


def _norm(norms: dict[str, Callable[..., Array]], name: str) -> Callable[..., Array]:
    if name not in norms:
        raise ValueError(f"norm is {' or '.join(map(repr, norms))}, not {name!r}")
    return norms[name]
