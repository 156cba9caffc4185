"""Transformers on Bernoulli bandits: contexts as tokens, the law on all contexts, closed-loop episodes, and values.

Two arms and binary outcomes make 4^t contexts at step t, and the decisions of all of them lie on the 4^(H-1) episodes
without their last interaction. So at H = 5 one pass over 256 sequences is the whole policy, and an episode is a walk
through it (`Sheet`). At H = 10 the tree is walked with kept keys and values, one token a context (`tree_law`).
Either way values and distances are exact, by `assay.bandits` on the game of ordered contexts: no sampling error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.bandits import Array, Game, Ints, Law, context_digits, count_game
from assay.studies.icl.transformer import CausalTransformer, Past, episode_tokens, start_tokens

FEATURES = 5  # one-hot arm, success, failure, flag of the start token
ANSWERS = 4  # of one decision: arm 1 success, arm 1 failure, arm 2 success, arm 2 failure
CHUNK = 16384  # contexts that the tree holds at once


def bandit_tokens(arms: NDArray[np.integer], outcomes: NDArray[np.integer]) -> Tensor:
    """Tokens [B, T + 1, 5] of arms and outcomes [B, T]."""
    return episode_tokens(np.concatenate([np.eye(2)[arms], np.eye(2)[1 - np.asarray(outcomes)]], -1))


def context_rows(horizon: int) -> list[Ints]:
    """For t = 0..H, [4^t]: row in `count_game(horizon)` of each row of `context_game(horizon)`."""
    rows = [np.zeros(1, np.int64)]
    for children in count_game(horizon).children:
        rows.append(children[rows[-1]].reshape(-1))
    return rows


def on_contexts(law: Law, horizon: int) -> list[Array]:
    """A law on counts as a law on ordered contexts."""
    return [found[rows] for found, rows in zip(law, context_rows(horizon), strict=False)]


# --------------------------------------------------------------------------------------- all contexts in one pass


@dataclass(frozen=True, slots=True)
class Sheet:
    """All decisions of a horizon: `tokens` [4^(H-1), H, 5]. Context i of step t lies at sequence i * 4^(H-1-t), position
    t."""

    horizon: int
    tokens: Tensor

    def sequence(self, step: int, rows: Ints | slice) -> Ints:
        """Sequences on which contexts `rows` of a step lie."""
        return np.arange(ANSWERS**step)[rows] * ANSWERS ** (self.horizon - 1 - step)

    def law(self, log_law: Tensor) -> list[Array]:
        """[4^t, A] per step of the model's log_law [4^(H-1), H, A], float64 rows that sum to 1."""
        known = log_law.detach().double().exp()
        known = known / known.sum(-1, keepdim=True)
        return [known[self.sequence(t, slice(None)), t].numpy() for t in range(self.horizon)]


@lru_cache(maxsize=8)
def sheet(horizon: int) -> Sheet:
    return Sheet(horizon, bandit_tokens(*context_digits(horizon - 1)))


def tree_law(model: CausalTransformer, horizon: int) -> list[Array]:
    """The law at all contexts, [4^t, A] for t < H, float64: each context costs one token."""
    answers = bandit_tokens(np.array([[0], [0], [1], [1]]), np.array([[1], [0], [1], [0]]))[:, 1:]
    found: list[list[Tensor]] = [[] for _ in range(horizon)]

    def descend(step: int, tokens: Tensor, past: Past | None) -> None:
        hidden, kept = model.step(tokens, past)
        found[step].append(model.read["decision"](hidden[:, -1]).double().softmax(-1))
        if step + 1 == horizon:
            return
        size = max(CHUNK // ANSWERS ** (horizon - step - 1), 1)
        for first in range(0, len(tokens), size):
            part = slice(first, first + size)
            below = [(k[part].repeat_interleave(ANSWERS, 0), v[part].repeat_interleave(ANSWERS, 0)) for k, v in kept]
            descend(step + 1, answers.repeat(len(below[0][0]) // ANSWERS, 1, 1), below)

    with torch.no_grad():
        descend(0, start_tokens(1, FEATURES), None)
    return [torch.cat(parts).numpy() for parts in found]


# ------------------------------------------------------------------------------------------------------- episodes


def draw(law: Array, uniform: Array) -> Ints:
    """Actions [B] of laws [B, A] by inversion of uniforms [B]."""
    return np.minimum((uniform[:, None] >= np.cumsum(law, 1)).sum(1), law.shape[1] - 1)


@dataclass(frozen=True, slots=True)
class Episodes:
    """`means` [B, 2] hidden; `arms` and `outcomes` [B, H]; `rows` [B, H + 1] of the game that was walked. `playing`
    [B, H + 1] turns False with the action "stop" (2): what follows in the other arrays is not part of the episode."""

    means: Array
    arms: Ints
    outcomes: Ints
    rows: Ints
    playing: NDArray[np.bool_]


def walk(law: Law, game: Game, means: Array, rng: np.random.Generator) -> Episodes:
    """Episodes [B] of a law on the rows of `game` against arms with `means` [B, 2]."""
    size, horizon = len(means), game.horizon
    rows, playing = np.zeros((size, horizon + 1), np.int64), np.ones((size, horizon + 1), np.bool_)
    arms, outcomes = np.zeros((size, horizon), np.int64), np.zeros((size, horizon), np.int64)
    draws = rng.random((horizon, 2, size))
    for t in range(horizon):
        arms[:, t] = draw(law[t][rows[:, t]], draws[t, 0])
        pulled = np.minimum(arms[:, t], 1)
        outcomes[:, t] = draws[t, 1] < means[np.arange(size), pulled]
        rows[:, t + 1] = game.children[t][rows[:, t], pulled, 1 - outcomes[:, t]]
        playing[:, t + 1] = playing[:, t] & (arms[:, t] < 2)
    return Episodes(means, arms, outcomes, rows, playing)


def play(model: CausalTransformer, means: Array, horizon: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """(arms, outcomes) [B, H] of the model in closed loop, sampled; for horizons whose tree is too large to ask often."""
    size = len(means)
    arms, outcomes = np.zeros((size, horizon), np.int64), np.zeros((size, horizon), np.int64)
    draws = rng.random((horizon, 2, size))
    tokens, past = start_tokens(size, FEATURES), None
    with torch.no_grad():
        for t in range(horizon):
            hidden, past = model.step(tokens, past)
            law = model.read["decision"](hidden[:, -1]).double().softmax(-1).numpy()
            arms[:, t] = draw(law, draws[t, 0])
            outcomes[:, t] = draws[t, 1] < means[np.arange(size), arms[:, t]]
            tokens = bandit_tokens(arms[:, t : t + 1], outcomes[:, t : t + 1])[:, 1:]
    return arms, outcomes


def count_rows(arms: Ints, outcomes: Ints) -> Ints:
    """[B, H + 1]: rows in `count_game(H)` along episodes [B, H]."""
    rows = np.zeros((len(arms), arms.shape[1] + 1), np.int64)
    for t, children in enumerate(count_game(arms.shape[1]).children):
        rows[:, t + 1] = children[rows[:, t], arms[:, t], 1 - outcomes[:, t]]
    return rows
