"""Random rewards: what a policy learns when its reward knows nothing. A control, and an instrument of studies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from assay.protocols import Method, Metrics, Setting
from assay.rng import generator
from assay.rows import Batch, Row


class RandomReward(Method):
    """The reward of every episode is replaced by a coin that knows neither the prompt nor the answer.

    r ~ Bernoulli(p) for each response on its own, drawn anew in every step. The host takes it for the episode's reward;
    success, reward and all other figures of a run stay those of the environment, so that they show what the coin did to
    the policy. Penalties that the host put on scores (invalid turns, length) are replaced as well, and rewards of single
    turns are gone; a KL in the reward stays. On strictly on-policy data the expected gradient is 0 and the policy only
    diffuses; from the second update on a batch ratios leave 1, and the clip makes a drift of the noise.

    p: probability of reward 1, 0 to 1 (paper: 0.5).
    """

    name = "random-reward"
    paper = "arXiv 2608.24949, Demystifying Reinforcement Learning Post-Training of Language Models"
    fidelity = "paper"

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f"p is {p}: it must be a probability, 0 to 1")
        self.p, self.seed = p, 0

    def bind(self, setting: Setting) -> Sequence[str]:
        self.seed = setting.seed
        warnings = []
        if self.p in (0, 1):
            warnings.append(f"p is {self.p:g}: all rewards are equal, and a group has nothing to learn from")
        if setting.updates == 1:
            warnings.append("one update per batch: its expected gradient is 0: add --updates-per-batch 8, as the paper")
        return warnings

    def reward(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """Eq. (5), arXiv 2608.24949: writes batch.scores, and the environment's turn rewards out of batch.turn_scores."""
        agrees, draws = [], []
        for trace in batch.traces:
            place = (trace.step, trace.round, trace.slot, trace.rollout)
            draw = float(generator(self.seed, "random reward", *place).random() < self.p)
            batch.scores[trace.key] = draw
            turns = batch.turn_scores[trace.key]
            if turns:  # estimators subtract the environment's sum from the last turn: there the draw alone is left
                turns[:] = [0.0] * (len(turns) - 1) + [sum(turn.reward for turn in trace.turns)]
            draws.append(draw)
            agrees.append(draw == float(trace.success))
        if not draws:
            return {}
        return {"random_reward": float(np.mean(draws)), "random_reward_agrees": float(np.mean(agrees))}
