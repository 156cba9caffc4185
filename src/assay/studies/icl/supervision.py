"""Experiment "supervision": the same network is taught a learner's steps (process) or the best actions (outcome-optimal).
Which decision policy does it then execute, sampled or by argmax?

Cross-entropy on action labels, eq. (10) of our reading of Agentic ICL, at all decisions of a batch of episodes. Labels: the
law of UCB1 or Thompson sampling at the counts (process), the best arm in hindsight ("oracle": its population minimiser is
Thompson's law when contexts do not depend on the hidden means), or the Bayes-optimal action for the sum of rewards or for
the final posterior mean. Contexts: half UCB1 and half uniform play, or one of them, or the model's own (DAgger), or those
of an expert that knows the best arm, whose *actions* then leak it (the control).

Two arms, H = 10: the trained law is read on all contexts (`tree_law`), so values, distances and both sides of the
closed-loop bounds (4) and (5) are exact. Left out: truncated contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.bandits import (
    Array,
    Game,
    Ints,
    Law,
    best_of,
    closed_loop,
    context_game,
    count_game,
    distance,
    law_of,
    policy_value,
    thompson,
    tied,
)
from assay.rng import generator
from assay.studies.grid import Cell
from assay.studies.icl.rollouts import (
    FEATURES,
    bandit_tokens,
    context_rows,
    count_rows,
    on_contexts,
    play,
    tree_law,
    walk,
)
from assay.studies.icl.transformer import CausalTransformer, Shape, torch_generator

HORIZON = 10
LAW_LABELS = ("ucb1", "thompson", "bayes-cum", "bayes-final")
REFERENCES = ("ucb1", "thompson", "argmax-thompson", "bayes-cum", "bayes-final")
CONTEXTS = ("mixed", "learner", "uniform", "own", "expert")
EXPERT = 0.9  # chance that the expert who knows pulls the best arm
REFRESH = 25  # updates between the model's own contexts
OWN = 4  # batches of them that are kept

ARMS: dict[str, dict[str, Any]] = {
    "process-ucb1": {"label": "ucb1"},
    "oracle-arm": {"label": "oracle"},
    "bayes-cum": {"label": "bayes-cum"},
    "bayes-final": {"label": "bayes-final", "ties": "mask"},
    "process-thompson": {"label": "thompson"},
    "oracle-leak": {"label": "oracle", "contexts": "expert"},
    "bayes-final-ties": {"label": "bayes-final"},
    "ucb1-on-own": {"label": "ucb1", "contexts": "own"},
    "ucb1-on-learner": {"label": "ucb1", "contexts": "learner"},
    "ucb1-on-uniform": {"label": "ucb1", "contexts": "uniform"},
    "ucb1-and-state": {"label": "ucb1", "state_weight": 1.0},
}
USUAL: dict[str, Any] = {
    "experiment": "supervision",
    "ties": "uniform",
    "contexts": "mixed",
    "state_weight": 0.0,
    "horizon": HORIZON,
    "width": 32,
    "layers": 2,
    "updates": 800,
    "batch": 128,
    "rate": 4e-3,
}


def cells(options: Any, seeds: Sequence[int]) -> list[Cell]:
    """Every arm with every seed, a seed of all arms before the next one."""
    size = {"updates": options.updates} if options.updates else {}
    return [Cell(name, seed, USUAL | arm | size) for seed in seeds for name, arm in ARMS.items()]


# ------------------------------------------------------------------------------------------------ contexts and labels


@lru_cache(maxsize=32)
def count_law(name: str, horizon: int) -> list[Array]:
    return leak_law(count_game(horizon)) if name == "leak" else law_of(name, count_game(horizon))


def leak_law(game: Game) -> list[Array]:
    """P(best arm | context) where the context is the expert's: its actions are evidence, each worth a factor
    EXPERT / (1 - EXPERT). What "oracle" labels on such contexts teach."""
    found = []
    for counts in game.counts[:-1]:
        pulled = counts.sum(-1)
        odds = thompson(counts) * EXPERT**pulled * (1 - EXPERT) ** pulled[:, ::-1]
        found.append(odds / odds.sum(1, keepdims=True))
    return found


def behave(contexts: str, size: int, horizon: int, rng: np.random.Generator) -> tuple[Array, Ints, Ints, Ints]:
    """(means [B, 2], arms, outcomes [B, H], count rows [B, H + 1]) of `size` episodes."""
    if contexts not in CONTEXTS:
        raise ValueError(f"contexts {contexts!r}: one of {', '.join(CONTEXTS)}")
    means, game = rng.random((size, 2)), count_game(horizon)
    if contexts == "expert":
        best = means.argmax(1)[:, None]
        arms = np.where(rng.random((size, horizon)) < EXPERT, best, 1 - best)
        outcomes = (rng.random((size, horizon)) < np.take_along_axis(means, arms, 1)).astype(np.int64)
        return means, arms, outcomes, count_rows(arms, outcomes)
    of_learner = {"mixed": size // 2, "learner": size, "uniform": 0}[contexts]
    parts = [
        walk(count_law(name, horizon), game, part, rng)
        for name, part in (("ucb1", means[:of_learner]), ("uniform", means[of_learner:]))
        if len(part)
    ]
    arms, outcomes, rows = (np.concatenate([getattr(p, key) for p in parts]) for key in ("arms", "outcomes", "rows"))
    return means, arms, outcomes, rows


def targets(label: str, ties: str, means: Array, rows: Ints) -> tuple[Array, Array]:
    """(label laws [B, H, 2], weights [B, H] that are 0 where a tie is masked)."""
    horizon = rows.shape[1] - 1
    if label == "oracle":
        return np.repeat(np.eye(2)[means.argmax(1)][:, None], horizon, 1), np.ones((len(rows), horizon))
    law = count_law(label, horizon)
    laws = np.stack([law[t][rows[:, t]] for t in range(horizon)], 1)
    if ties != "mask":
        return laws, np.ones(laws.shape[:2])
    return laws, np.stack([~mask[rows[:, t]] for t, mask in enumerate(tied(law))], 1).astype(np.float64)


def state_targets(rows: Ints) -> Array:
    """Counts / H along episodes, [B, H + 1, 4]: what the state head is asked for."""
    horizon = rows.shape[1] - 1
    counts = [count_game(horizon).counts[t].reshape(-1, 4)[rows[:, t]] for t in range(horizon + 1)]
    return np.stack(counts, 1) / horizon


# --------------------------------------------------------------------------------------------------------- training


def train(seed: int, settings: dict[str, Any]) -> CausalTransformer:
    horizon, batch, updates = settings["horizon"], settings["batch"], settings["updates"]
    heads = (("decision", 2), ("state", 4))
    shape = Shape(FEATURES, horizon, heads, settings["width"], settings["layers"])
    model = CausalTransformer(shape, torch_generator(seed, "icl supervision weights"))
    optimizer = torch.optim.AdamW(model.parameters(), settings["rate"], weight_decay=1e-4, fused=True)
    own: tuple[Array, Ints, Ints, Ints] | None = None
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = settings["rate"] * min(1.0, (update + 1) / 30, 1.03 - update / updates)
        rng = generator(seed, "icl supervision contexts", update)
        if settings["contexts"] == "own":
            if update % REFRESH == 0:
                means = rng.random((OWN * batch, 2))
                arms, outcomes = play(model, means, horizon, rng)
                own = means, arms, outcomes, count_rows(arms, outcomes)
            assert own is not None
            kept = rng.integers(OWN * batch, size=batch)
            means, arms, outcomes, rows = (part[kept] for part in own)
        else:
            means, arms, outcomes, rows = behave(settings["contexts"], batch, horizon, rng)
        loss = loss_of(model, settings, means, arms, outcomes, rows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def loss_of(
    model: CausalTransformer, settings: dict[str, Any], means: Array, arms: Ints, outcomes: Ints, rows: Ints
) -> Tensor:
    """Eq. (10): cross-entropy at the H decisions, and mean squared error of the state head if it has a weight."""
    laws, weights = targets(settings["label"], settings["ties"], means, rows)
    tokens = bandit_tokens(arms, outcomes)
    extra = settings["state_weight"] > 0
    hidden = model(tokens if extra else tokens[:, :-1])  # no decision follows the last interaction
    logp = model.read["decision"](hidden[:, : laws.shape[1]]).log_softmax(-1)
    each = -(torch.from_numpy(laws.astype(np.float32)) * logp).sum(-1)
    mask = torch.from_numpy(weights.astype(np.float32))
    loss: Tensor = (each * mask).sum() / mask.sum().clamp(min=1.0)
    if extra:
        wanted = torch.from_numpy(state_targets(rows).astype(np.float32))
        loss = loss + settings["state_weight"] * ((model.read["state"](hidden) - wanted) ** 2).sum(-1).mean()
    return loss


# ------------------------------------------------------------------------------------------------------- evaluation


def target_law(settings: dict[str, Any]) -> str:
    """The reference that unlimited capacity and data would reach: table 3.5."""
    if settings["label"] == "oracle":
        return "leak" if settings["contexts"] == "expert" else "thompson"
    return str(settings["label"])


def measure(law: Law, settings: dict[str, Any]) -> dict[str, Any]:
    """Exact values, distances to the references on visited, non-tied states, and both sides of (4) and (5) against the
    law that the labels aim at."""
    horizon = settings["horizon"]
    game = context_game(horizon)
    cum, final = policy_value(law, game)
    found: dict[str, Any] = {"cum": cum, "final": final}
    for name in (*REFERENCES, "leak"):
        found[f"distance {name}"] = distance(
            law, on_contexts(count_law(name, horizon), horizon), game, decided(name, horizon)
        )
    aim = on_contexts(count_law(target_law(settings), horizon), horizon)
    found |= closed_loop(aim, law, game)._asdict()
    return {name: value if np.isfinite(value) else None for name, value in found.items()}


@lru_cache(maxsize=16)
def decided(name: str, horizon: int) -> list[Any]:
    """[4^t]: contexts where the reference is not tied."""
    masks, rows = tied(count_law(name, horizon)), context_rows(horizon)
    return [~mask[row] for mask, row in zip(masks, rows, strict=False)]


def reference_values(horizon: int) -> dict[str, tuple[float, float]]:
    """(cum, final) of the references and of the law that leaking contexts teach, exactly."""
    return {
        name: policy_value(count_law(name, horizon), count_game(horizon)) for name in (*REFERENCES, "uniform", "leak")
    }


def run_cell(seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """{"sample": measures, "argmax": measures}."""
    law = tree_law(train(seed, settings), settings["horizon"])
    return {"sample": measure(law, settings), "argmax": measure([best_of(p) for p in law], settings)}
