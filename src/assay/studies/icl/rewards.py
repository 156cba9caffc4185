"""Experiment "rewards": the same weights, tasks and network under different returns. Which decision policy comes out?

REINFORCE, eq. (9) of our reading of Agentic ICL, with the context as the policy's state. Two Bernoulli arms, H = 5. The
returns: "cum" (sum of rewards), "final" (largest posterior mean at the end), "cost" (final less a price a pull, with a
stop action) and "info" (entropy that the belief loses, nats). After every update the policy is known on all 341 contexts,
so values, curves and distances are exact; only the gradient is sampled.

The baseline at step t is the mean return-to-go of the other episodes of the group that still play at t: leave-one-out,
hence unbiased. A group shares its hidden means ("group"), or is the whole batch ("batch"). One standard deviation over the
whole batch scales the advantages: one per group would weigh tasks unequally. Left out: clipping, several epochs, a critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from assay.bandits import (
    TIE,
    Array,
    Game,
    Law,
    Mask,
    Solution,
    bayes,
    best_of,
    context_game,
    disagreement,
    distance,
    entropy,
    information,
    law_of,
    policy_value,
    pulls,
    visits,
)
from assay.rng import generator
from assay.studies.grid import Cell
from assay.studies.icl.rollouts import FEATURES, Episodes, sheet, walk
from assay.studies.icl.transformer import CausalTransformer, Shape, torch_generator

REFERENCES = ("ucb1", "thompson", "bayes-cum", "bayes-final")
RETURNS = ("cum", "final", "cost", "info")
CURVE = 25  # updates between points of a learning curve

ARMS: dict[str, dict[str, Any]] = {
    "cum": {"returns": "cum"},
    "final": {"returns": "final"},
    "info": {"returns": "info"},
    "cost-0.01": {"returns": "cost", "price": 0.01},
    "cost-0.02": {"returns": "cost", "price": 0.02},
    "cost-0.05": {"returns": "cost", "price": 0.05},
    "cum-batch": {"returns": "cum", "baseline": "batch"},
    "final-batch": {"returns": "final", "baseline": "batch"},
    "cum-low-entropy": {"returns": "cum", "entropy": 0.01},
}
USUAL: dict[str, Any] = {
    "experiment": "rewards",
    "price": 0.0,
    "horizon": 5,
    "width": 32,
    "layers": 2,
    "updates": 1200,
    "batch": 384,
    "group": 16,
    "baseline": "group",
    "rate": 1e-3,
    "entropy": 0.1,  # bonus at the start, in units of an advantage, whose standard deviation is 1
    "explore": 0.75,  # share of the updates in which it falls to 0
}


def cells(options: Any, seeds: Sequence[int]) -> list[Cell]:
    """Every return with every seed, a seed of all before the next one."""
    size = {"updates": options.updates} if options.updates else {}
    return [Cell(name, seed, USUAL | arm | size) for seed in seeds for name, arm in ARMS.items()]


# --------------------------------------------------------------------------------------------------------- returns


def rewards_of(kind: str, price: float, game: Game, episodes: Episodes) -> Array:
    """Reward [B, H] of each decision: its sum over the decisions that were made is the episode's return."""
    if kind not in RETURNS:
        raise ValueError(f"return {kind!r}: one of {', '.join(RETURNS)}")
    horizon = episodes.arms.shape[1]
    rows, playing = episodes.rows, episodes.playing
    if kind == "cum":
        paid = episodes.outcomes.astype(np.float64)
    elif kind == "info":
        nats = np.stack([entropy(game.counts[t])[rows[:, t]] for t in range(horizon + 1)], 1)
        paid = nats[:, :-1] - nats[:, 1:]
    else:
        best = np.stack([game.means(t).max(1)[rows[:, t]] for t in range(horizon + 1)], 1)
        stopped = playing[:, :-1] & ~playing[:, 1:]
        paid = np.where(stopped, best[:, :-1], 0.0)
        paid[:, -1] += np.where(playing[:, -1], best[:, -1], 0.0)
        if kind == "cost":
            paid -= price * playing[:, 1:]
    return np.where(playing[:, :-1], paid, 0.0)


def advantages(rewards: Array, playing: Mask, group: int) -> Array:
    """G_t - B_t, [B, H], of rewards [B, H]; episodes of a group of `group` lie side by side. B_t: mean of G_t over the
    others of the group that still play at t, 0 where there are none. `playing` [B, H]: the decision was made."""
    to_go = np.cumsum(rewards[:, ::-1], 1)[:, ::-1].reshape(-1, group, rewards.shape[1])
    here = playing.reshape(to_go.shape)
    others = here.sum(1, keepdims=True) - here
    sums = (to_go * here).sum(1, keepdims=True) - to_go * here
    return np.asarray(((to_go - sums / np.maximum(others, 1)) * here).reshape(rewards.shape))


# -------------------------------------------------------------------------------------------------------- training


def make_model(seed: int, settings: dict[str, Any]) -> CausalTransformer:
    """Weights by seed alone, so that all returns begin with the same; a third action's row of the head is drawn last."""
    actions = 3 if settings["returns"] == "cost" else 2
    shape = Shape(FEATURES, settings["horizon"], (("decision", actions),), settings["width"], settings["layers"])
    return CausalTransformer(shape, torch_generator(seed, "icl rewards weights"))


def train(seed: int, settings: dict[str, Any]) -> tuple[CausalTransformer, dict[str, list[float]]]:
    """The trained model, and its exact values on the way."""
    model = make_model(seed, settings)
    kind, price, horizon = settings["returns"], settings["price"], settings["horizon"]
    updates, batch = settings["updates"], settings["batch"]
    group = settings["group"] if settings["baseline"] == "group" else batch
    tasks = batch // settings["group"] if settings["baseline"] == "group" else batch
    game, page = context_game(horizon), sheet(horizon)
    optimizer = torch.optim.AdamW(model.parameters(), settings["rate"], weight_decay=1e-4, fused=True)
    steps = np.arange(horizon)
    curve: dict[str, list[float]] = {"update": [], "cum": [], "final": [], "return": []}
    for update in range(updates):
        left = 1 - update / updates
        bonus = max(1 - update / (settings["explore"] * updates), 0.0)
        optimizer.param_groups[0]["lr"] = settings["rate"] * min(1.0, 0.1 + 2 * left)
        log_law = model.log_law(page.tokens)
        law = page.law(log_law)
        if update % CURVE == 0:
            _note(curve, update, law, game, kind, price)
        rng = generator(seed, "icl rewards episodes", update)
        means = np.repeat(rng.random((tasks, 2)), batch // tasks, 0)
        episodes = walk(law, game, means, rng)
        playing = episodes.playing[:, :-1]
        gain = advantages(rewards_of(kind, price, game, episodes), playing, group)
        gain /= max(float(gain[playing].std()), 1e-8)
        sequences = np.stack([page.sequence(t, episodes.rows[:, t]) for t in steps], 1)
        chosen = log_law[torch.from_numpy(sequences), torch.from_numpy(steps)]  # [B, H, A]
        taken = chosen.gather(-1, torch.from_numpy(episodes.arms)[..., None])[..., 0]
        spread = -(chosen.exp() * chosen).sum(-1)
        weights = torch.from_numpy((gain / batch).astype(np.float32))
        here = torch.from_numpy((playing / batch).astype(np.float32))
        loss = -(weights * taken).sum() - settings["entropy"] * bonus * (here * spread).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    _note(curve, updates, model_law(model), game, kind, price)
    return model, curve


def model_law(model: CausalTransformer) -> list[Array]:
    """Its law on all contexts of its horizon."""
    page = sheet(model.shape.horizon)
    with torch.no_grad():
        return page.law(model.log_law(page.tokens))


def _note(curve: dict[str, list[float]], update: int, law: Law, game: Game, kind: str, price: float) -> None:
    cum, final = policy_value(law, game)
    curve["update"].append(update)
    curve["cum"].append(cum)
    curve["final"].append(final)
    curve["return"].append(exact_return(law, game, kind, price))


# ------------------------------------------------------------------------------------------------------ evaluation


def exact_return(law: Law, game: Game, kind: str, price: float = 0.0) -> float:
    """Expected return of a law under one of `RETURNS`."""
    if kind == "info":
        return information(law, game)
    cum, final = policy_value(law, game)
    return cum if kind == "cum" else final - price * pulls(law, game) if kind == "cost" else final


@lru_cache(maxsize=32)
def optimum(horizon: int, kind: str, price: float = 0.0) -> Solution:
    """On ordered contexts."""
    return bayes(context_game(horizon), ("cost", price) if kind == "cost" else kind)


def uniform_return(horizon: int, kind: str, price: float = 0.0) -> float:
    """Of the policy that takes all actions alike: what a policy that learned nothing gets."""
    game = context_game(horizon)
    actions = 3 if kind == "cost" else 2
    return exact_return([np.full((len(c), actions), 1 / actions) for c in game.counts[:-1]], game, kind, price)


@lru_cache(maxsize=8)
def reference_laws(horizon: int) -> dict[str, list[Array]]:
    return {name: law_of(name, context_game(horizon)) for name in REFERENCES}


def taking_cum_side(law: Law, horizon: int, visitor: Law) -> float:
    """Where the optima of "cum" and "final" share no action: P(an action that is optimal for "cum") under `law`, mean over
    those contexts weighted as `visitor` visits them. NaN where it visits none, as up to H = 3, where they always share
    one."""
    game = context_game(horizon)
    cum = optimum(horizon, "cum")
    seen = visits(visitor, game)
    mass = total = 0.0
    for t, where in enumerate(disagreement(cum, optimum(horizon, "final"))):
        weight = seen[t] * where
        total += float(weight.sum())
        mass += float(weight @ (law[t][:, :2] * cum.optimal[t]).sum(1))
    return mass / total if total > TIE else float("nan")


def measure(law: Law, settings: dict[str, Any]) -> dict[str, Any]:
    """Exact value under its own return and the others, distances to references, behaviour where the optima differ."""
    horizon, kind, price = settings["horizon"], settings["returns"], settings["price"]
    game = context_game(horizon)
    cum, final = policy_value(law, game)
    found: dict[str, Any] = {
        "cum": cum,
        "final": final,
        "pulls": pulls(law, game),
        "return": exact_return(law, game, kind, price),
        "optimum": optimum(horizon, kind, price).value,
        "uniform": uniform_return(horizon, kind, price),
    }
    found["closed"] = (found["return"] - found["uniform"]) / (found["optimum"] - found["uniform"])
    if kind != "cost":
        found["cum_side"] = taking_cum_side(law, horizon, law_of("uniform", game))  # all are asked the same contexts
        found["cum_side_met"] = taking_cum_side(law, horizon, law)  # only those that it meets
        for name, reference in reference_laws(horizon).items():
            found[f"distance {name}"] = distance(law, reference, game)
    return {name: value if np.isfinite(value) else None for name, value in found.items()}


def run_cell(seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """{"sample": measures, "argmax": measures, "curve": exact values on the way}."""
    model, curve = train(seed, settings)
    law = model_law(model)
    return {"sample": measure(law, settings), "argmax": measure([best_of(p) for p in law], settings), "curve": curve}
