"""EMPG: the gradient of a step rescaled by its entropy over the whole batch, and a bonus for a clear next step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from assay.methods.aem import Array, Responses
from assay.protocols import Method, Metrics
from assay.rows import Batch, Row

EPSILON = 1e-8  # nats, added to the batch's entropy range


class EMPG(Method):
    """Confident steps get more of their advantage, unsure ones less, and steps that lead to clarity get a bonus.

    The mean token entropy of each step is scaled to 0 .. 1 over the batch. The host's advantage is multiplied by a
    weight that falls with it and is 1 on average; a small bonus rewards a next step of low entropy, whatever the
    episode came to; the result is centred over the steps of the batch, each counted once.

    k: how fast the weight falls with the step's entropy; 0: all weights are 1 (paper's form; ARLArena: 1).
    k_future: how fast the bonus falls with the next step's entropy (ARLArena: 1).
    zeta: weight of the bonus, in units of the advantage (ARLArena: 0.05); k and zeta both 0 leave everything as it is.
    score: take entropies from a pass of the learner, one more forward, not from the sampler's record (reference: true).
    """

    name = "empg"
    paper = "arXiv 2509.09265, Harnessing Uncertainty: Entropy-Modulated Policy Gradients for Long-Horizon LLM Agents"
    fidelity = "reconstruction"

    def __init__(self, k: float = 1.0, k_future: float = 1.0, zeta: float = 0.05, score: bool = False) -> None:
        for name, value in (("k", k), ("k_future", k_future), ("zeta", zeta)):
            if not (value >= 0 and np.isfinite(value)):
                raise ValueError(f"{name} is a number, 0 or more, not {value!r}")
        self.k, self.k_future, self.zeta = k, k_future, zeta
        self.needs = frozenset({"entropy"} if score and (k or zeta) else ())

    def modulate(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """Column "advantage" becomes `A g + zeta f - mean(A g + zeta f)`; all terms but A are one per step."""
        if not rows or (self.k == 0 and self.zeta == 0):
            return {}
        steps = Responses(rows)
        entropy = steps.entropy("empg")
        weight, bonus = empg(entropy, steps.following(), self.k, self.k_future)
        modulated = steps.column("advantage") * weight[steps.of] + self.zeta * bonus[steps.of]
        centre = float(np.mean(steps.mean(modulated)))
        steps.write("advantage", modulated - centre)
        return {
            "empg_range": float(np.ptp(entropy)),
            "empg_min": float(weight.min()),
            "empg_max": float(weight.max()),
            "empg_bonus": self.zeta * float(bonus.mean()),
            "empg_centre": centre,
        }


def empg(entropy: ArrayLike, following: ArrayLike, k: float = 1.0, k_future: float = 1.0) -> tuple[Array, Array]:
    """(g, f), [n] each: `g = exp(-k h) / mean exp(-k h)` and `f = exp(-k' h_next)`, h the entropy scaled to 0 .. 1.

    Source: EMPG, arXiv 2509.09265; minimum, maximum and mean are over all n steps of the batch. f is 0 where no step
    follows.

    Args:
      entropy: [n] mean token entropy of each step, nats.
      following: [n] index of the step that follows in the same trace, -1 for none.
    """
    h, after = np.asarray(entropy, np.float64), np.asarray(following, np.int64)
    if h.ndim != 1 or h.shape != after.shape:
        raise ValueError(f"entropy and following must have one entry per step, not {h.shape} and {after.shape}")
    if h.size == 0:
        return np.ones(0), np.zeros(0)
    scaled = (h - h.min()) / (np.ptp(h) + EPSILON)
    power = np.exp(-k * scaled)
    return power / power.mean(), np.where(after >= 0, np.exp(-k_future * scaled[after]), 0.0)
