"""Experiment "recursions": can a causal Transformer carry a learner's state, and what does depth, supervision or a
scratchpad change? Section 4.1 of our reading of Agentic ICL.

Each recursion is a state s_{t+1} = U(s_t, interaction) folded over H = 20 interactions of random play. Three ways:
"direct" reads s_t off the prefix at every t, "final" is the same network with s_H alone supervised, "pad" is a network
that sees only its last state and the newest interaction (state tokens), taught on true states and run on its own.
Beyond H, learned positions are refused; "none" and "relative" positions and the pad go on to 2H.

Errors are root mean squares in units of a coordinate's standard deviation over t = 1..H, so recursions compare; for the
interval (discrete, cross-entropy) they are the share of states that are wrong. Left out: linear bandits (their state is
that of least squares).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.bandits import Array
from assay.rng import generator
from assay.studies.grid import Cell
from assay.studies.icl.transformer import CausalTransformer, Shape, episode_tokens, torch_generator

HORIZON = 20
ALPHA = 0.3  # of the constant-step recursion
Q_ALPHA, GAMMA = 0.5, 0.9
STATES, ACTIONS = 3, 2  # of the Markov decision process
POINTS = 15  # of the threshold: theta in {0..15}
TEST_EPISODES = 512

USUAL: dict[str, Any] = {
    "experiment": "recursions",
    "way": "direct",
    "layers": 2,
    "positions": "learned",
    "horizon": HORIZON,
    "width": 32,
    "updates": 400,
    "batch": 64,
    "pairs": 512,
    "rate": 3e-3,
}
WAYS: dict[str, dict[str, Any]] = {
    "direct-2": {},
    "pad-2": {"way": "pad"},
    "final-2": {"way": "final"},
    "direct-1": {"layers": 1},
    "direct-4": {"layers": 4},
    "pad-1": {"way": "pad", "layers": 1},
}
BEYOND: dict[str, dict[str, Any]] = {"none-2": {"positions": "none"}, "relative-2": {"positions": "relative"}}
BEYOND_OF = ("ema", "counts", "interval")


def cells(options: Any, seeds: Sequence[int]) -> list[Cell]:
    """Every recursion with every way, a seed of all before the next one."""
    size = {"updates": options.updates} if options.updates else {}
    grid = [(kind, name, way) for kind in RECURSIONS for name, way in WAYS.items()]
    grid += [(kind, name, way) for kind in BEYOND_OF for name, way in BEYOND.items()]
    settings = {f"{kind}-{name}": USUAL | way | {"recursion": kind} | size for kind, name, way in grid}
    return [Cell(name, seed, settings[name]) for seed in seeds for name in settings]


# ------------------------------------------------------------------------------------------------------- recursions


@dataclass(frozen=True, slots=True)
class Recursion:
    """`update`: U, from states [B, n] and interactions [B, F] to states [B, n]. `play`: interactions [B, T, F] of random
    actions on fresh tasks. `start`: s_0. `lipschitz`: of U in the largest coordinate, or None where none holds globally.
    `levels`: each coordinate is one of 0..levels - 1 (0: real numbers)."""

    start: Array
    update: Callable[[Array, Array], Array]
    play: Callable[[np.random.Generator, int, int], Array]
    lipschitz: float | None
    levels: int = 0

    def fold(self, interactions: Array) -> Array:
        """s_1..s_T, [B, T, n]."""
        states = [np.repeat(self.start[None], len(interactions), 0)]
        for t in range(interactions.shape[1]):
            states.append(self.update(states[-1], interactions[:, t]))
        return np.stack(states[1:], 1)


def _bandit(rng: np.random.Generator, size: int, length: int) -> Array:
    """Features: one-hot arm, success, failure."""
    arms = rng.integers(2, size=(size, length))
    won = rng.random((size, length)) < np.take_along_axis(rng.random((size, 2)), arms, 1)
    return np.concatenate([np.eye(2)[arms], np.eye(2)[1 - won.astype(int)]], -1)


def _ema(state: Array, seen: Array) -> Array:
    """Q <- Q + alpha (r - Q) of the arm that was pulled."""
    return state + ALPHA * seen[:, :2] * (seen[:, 2:3] - state)


def _count(state: Array, seen: Array) -> Array:
    """(S_1, F_1, S_2, F_2)."""
    return state + (seen[:, :2, None] * seen[:, None, 2:]).reshape(len(seen), 4)


def _regression(rng: np.random.Generator, size: int, length: int) -> Array:
    """Features: x (2 coordinates), y."""
    x, w = rng.standard_normal((size, length, 2)), rng.standard_normal((size, 1, 2))
    y = (x * w).sum(-1, keepdims=True) + 0.1 * rng.standard_normal((size, length, 1))
    return np.concatenate([x, y], -1)


def _rls(state: Array, seen: Array) -> Array:
    """(P_11, P_12, P_22, w_1, w_2), eq. (2)."""
    x, y = seen[:, :2], seen[:, 2]
    p = state[:, [0, 1, 1, 2]].reshape(-1, 2, 2)
    px = np.einsum("bij,bj->bi", p, x)
    scale = 1 + np.einsum("bi,bi->b", x, px)
    w = state[:, 3:] + px * ((y - (x * state[:, 3:]).sum(1)) / scale)[:, None]
    p = p - px[:, :, None] * px[:, None, :] / scale[:, None, None]
    return np.concatenate([p.reshape(-1, 4)[:, [0, 1, 3]], w], 1)


def _threshold(rng: np.random.Generator, size: int, length: int) -> Array:
    """Features: one-hot point 1..POINTS, "theta is at least this" 0 or 1."""
    points = rng.integers(1, POINTS + 1, size=(size, length))
    at_least = rng.integers(POINTS + 1, size=(size, 1)) >= points
    return np.concatenate([np.eye(POINTS)[points - 1], at_least[..., None]], -1)


def _interval(state: Array, seen: Array) -> Array:
    """(lo, hi): the thresholds that survive."""
    point, yes = seen[:, :-1].argmax(1) + 1, seen[:, -1] > 0.5
    low = np.where(yes, np.maximum(state[:, 0], point), state[:, 0])
    high = np.where(yes, state[:, 1], np.minimum(state[:, 1], point - 1))
    return np.stack([low, high], 1)


def _process(rng: np.random.Generator, size: int, length: int) -> Array:
    """Features: one-hot state, one-hot action, reward, one-hot next state. Transitions Dirichlet(1), rewards uniform."""
    chances = rng.dirichlet(np.ones(STATES), (size, STATES, ACTIONS)).cumsum(-1)
    pay = rng.random((size, STATES, ACTIONS))
    here, every, found = np.zeros(size, np.int64), np.arange(size), []
    for _ in range(length):
        action = rng.integers(ACTIONS, size=size)
        after = np.minimum((rng.random(size)[:, None] >= chances[every, here, action]).sum(1), STATES - 1)
        reward = pay[every, here, action][:, None]
        found.append(np.concatenate([np.eye(STATES)[here], np.eye(ACTIONS)[action], reward, np.eye(STATES)[after]], 1))
        here = after
    return np.stack(found, 1)


def _q_learning(state: Array, seen: Array) -> Array:
    """The table, row by row, eq. (3); never done."""
    here, action, reward, after = np.split(seen, [STATES, STATES + ACTIONS, STATES + ACTIONS + 1], 1)
    table = state.reshape(-1, STATES, ACTIONS)
    goal = reward[:, 0] + GAMMA * (table.max(2) * after).sum(1)
    where = here[:, :, None] * action[:, None, :]
    return (table + Q_ALPHA * where * (goal[:, None, None] - table)).reshape(state.shape)


RECURSIONS: dict[str, Recursion] = {
    "ema": Recursion(np.zeros(2), _ema, _bandit, 1.0),
    "counts": Recursion(np.zeros(4), _count, _bandit, 1.0),
    "rls": Recursion(np.array([1.0, 0.0, 1.0, 0.0, 0.0]), _rls, _regression, None),
    "interval": Recursion(np.array([0.0, POINTS]), _interval, _threshold, None, POINTS + 1),
    "q-learning": Recursion(np.zeros(STATES * ACTIONS), _q_learning, _process, 1.0),
}


@lru_cache(maxsize=8)
def scale_of(kind: str, horizon: int) -> tuple[Array, Array]:
    """(mean, standard deviation) [n] of each coordinate over t = 1..H of 2,000 episodes."""
    recursion = RECURSIONS[kind]
    states = recursion.fold(recursion.play(generator(0, "icl recursions scale", kind), 2000, horizon))
    flat = states.reshape(-1, states.shape[-1])
    return flat.mean(0), flat.std(0)


# ---------------------------------------------------------------------------------------------------------- networks


def head_size(recursion: Recursion) -> int:
    return len(recursion.start) * max(recursion.levels, 1)


def encode(recursion: Recursion, kind: str, horizon: int, states: Array) -> Array:
    """States as a network reads and is taught them: standardised, or one-hot per coordinate."""
    if recursion.levels:
        return np.eye(recursion.levels)[np.clip(states, 0, recursion.levels - 1).astype(int)].reshape(
            *states.shape[:-1], -1
        )
    mean, sd = scale_of(kind, horizon)
    return np.asarray((states - mean) / sd)


def decode(recursion: Recursion, kind: str, horizon: int, read: Array) -> Array:
    """States [..., n] from a head's output."""
    if recursion.levels:
        return read.reshape(*read.shape[:-1], len(recursion.start), recursion.levels).argmax(-1).astype(np.float64)
    mean, sd = scale_of(kind, horizon)
    return np.asarray(read * sd + mean)


def loss_of(recursion: Recursion, read: Tensor, wanted: Array) -> Tensor:
    """Mean squared error of standardised states, or cross-entropy per coordinate; `wanted` is encoded."""
    goal = torch.from_numpy(wanted.astype(np.float32))
    if not recursion.levels:
        return ((read - goal) ** 2).mean()
    parts = read.reshape(*read.shape[:-1], len(recursion.start), recursion.levels).log_softmax(-1)
    return -(parts * goal.reshape(parts.shape)).sum(-1).mean()


def pad_tokens(states: Array, interactions: Array) -> Tensor:
    """[B, 2, n' + F + 1]: an encoded state with the flag, then the newest interaction."""
    size, n = states.shape
    tokens = np.zeros((size, 2, n + interactions.shape[1] + 1), np.float32)
    tokens[:, 0, :n] = states
    tokens[:, 0, -1] = 1.0
    tokens[:, 1, n:-1] = interactions
    return torch.from_numpy(tokens)


def train(seed: int, settings: dict[str, Any]) -> CausalTransformer:
    kind, horizon, way = settings["recursion"], settings["horizon"], settings["way"]
    if way not in ("direct", "final", "pad"):
        raise ValueError(f"way {way!r}: one of direct, final, pad")
    recursion = RECURSIONS[kind]
    features = recursion.play(generator(0, "icl recursions width"), 1, 1).shape[2] + 1
    features += head_size(recursion) if way == "pad" else 0
    shape = Shape(
        features,
        1 if way == "pad" else horizon,
        (("state", head_size(recursion)),),
        settings["width"],
        settings["layers"],
        positions=settings["positions"],
    )
    model = CausalTransformer(shape, torch_generator(seed, "icl recursions weights"))
    optimizer = torch.optim.AdamW(model.parameters(), settings["rate"], weight_decay=1e-4, fused=True)
    start = encode(recursion, kind, horizon, recursion.start)
    for update in range(settings["updates"]):
        optimizer.param_groups[0]["lr"] = settings["rate"] * min(
            1.0, (update + 1) / 30, 1.02 - update / settings["updates"]
        )
        rng = generator(seed, "icl recursions episodes", update)
        seen = recursion.play(rng, settings["batch"], horizon)
        states = encode(recursion, kind, horizon, recursion.fold(seen))
        if way == "pad":
            before = np.concatenate([np.broadcast_to(start, (len(states), 1, len(start))), states[:, :-1]], 1)
            flat = [part.reshape(-1, part.shape[-1]) for part in (before, seen, states)]
            drawn = rng.integers(len(flat[0]), size=settings["pairs"])
            loss = loss_of(recursion, model.state(pad_tokens(flat[0][drawn], flat[1][drawn]))[:, 1], flat[2][drawn])
        else:
            first = horizon if way == "final" else 1
            loss = loss_of(recursion, model.state(episode_tokens(seen))[:, first:], states[:, first - 1 :])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


# --------------------------------------------------------------------------------------------------------- evaluation


def errors(recursion: Recursion, kind: str, horizon: int, found: Array, true: Array) -> list[float]:
    """Per t: root mean square in standard deviations, or share of wrong states, of [B, T, n]."""
    if recursion.levels:
        return [float(wrong) for wrong in (found != true).any(-1).mean(0)]
    return [float(e) for e in np.sqrt((((found - true) / scale_of(kind, horizon)[1]) ** 2).mean((0, 2)))]


def run_cell(seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """{"error": per t = 1..H or 1..2H} and, for the pad, its one-step errors and both sides of (7) in raw units, largest
    coordinate, mean over episodes."""
    kind, horizon = settings["recursion"], settings["horizon"]
    recursion = RECURSIONS[kind]
    model = train(seed, settings)
    long = horizon if settings["way"] != "pad" and settings["positions"] == "learned" else 2 * horizon
    seen = recursion.play(generator(seed, "icl recursions test"), TEST_EPISODES, long)
    true = recursion.fold(seen)
    if settings["way"] != "pad":
        with torch.no_grad():
            read = model.state(episode_tokens(seen))[:, 1:].double().numpy()
        return {"error": errors(recursion, kind, horizon, decode(recursion, kind, horizon, read), true)}
    carried = [np.repeat(recursion.start[None], len(seen), 0)]
    for t in range(long):
        carried.append(pad_step(model, kind, horizon, carried[-1], seen[:, t]))
    found = np.stack(carried, 1)
    exact = np.stack([recursion.update(found[:, t], seen[:, t]) for t in range(long)], 1)
    before = np.concatenate([np.broadcast_to(recursion.start, (len(true), 1, true.shape[2])), true[:, :-1]], 1)
    taught = np.stack([pad_step(model, kind, horizon, before[:, t], seen[:, t]) for t in range(long)], 1)
    result: dict[str, Any] = {
        "error": errors(recursion, kind, horizon, found[:, 1:], true),
        "one_step": errors(recursion, kind, horizon, taught, true),
    }
    if recursion.lipschitz is not None:
        gap, slip = (np.abs(a - b).max(-1) for a, b in ((found[:, 1:], true), (found[:, 1:], exact)))
        result |= bound_of(gap, slip, recursion.lipschitz)
    return result


def bound_of(gap: Array, slip: Array, lipschitz: float) -> dict[str, Any]:
    """(7) along each episode: error e_t of the carried state [B, T] against e_t <= L e_{t-1} + (its own one-step error at
    t, `slip` [B, T]). "excess": by how much the worst episode exceeds it, 0 but for rounding."""
    bound = np.zeros_like(slip)
    for t in range(slip.shape[1]):
        bound[:, t] = slip[:, t] + (lipschitz * bound[:, t - 1] if t else 0.0)
    return {
        "gap": [float(g) for g in gap.mean(0)],
        "bound": [float(b) for b in bound.mean(0)],
        "excess": float(np.maximum(gap - bound, 0).max()),
    }


def pad_step(model: CausalTransformer, kind: str, horizon: int, states: Array, seen: Array) -> Array:
    """The next state [B, n] that the network writes."""
    recursion = RECURSIONS[kind]
    with torch.no_grad():
        read = model.state(pad_tokens(encode(recursion, kind, horizon, states), seen))[:, 1].double().numpy()
    return decode(recursion, kind, horizon, read)
