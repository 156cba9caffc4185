"""Experiment "text": the same question asked of a language model. A tiny policy plays the bandit and the threshold game as
text, from one start and with one method (leave-one-out policy gradient); only the return differs. Section 4.4 of our reading.

What it has learnt of the bandit is read, not sampled: the probabilities of the answers in every context it can meet (5 pulls:
341), hence its exact value and its distance to reference learners. The start is the shipped policy after it has imitated a
learner with many random actions (UCB1, bisection). A start without that knowledge learns nothing in this budget: from random
weights, or from imitating uniform play, the probabilities do not come to depend on what was paid.

Left out: return-to-go (advantages are by episode here, as in RL of language models), and a price on pulls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from assay.build import build, build_learner
from assay.config import resolve
from assay.studies.grid import Cell
from assay.studies.icl.text_findings import figures, findings
from assay.studies.icl.text_law import HORIZON, N, read_bandit, read_threshold
from assay.train import Display, Trainer
from assay.warmstart import warm_start

__all__ = ["cells", "figures", "findings", "run"]

READ_EVERY = 10  # steps between the laws that are read
BANDIT_STEPS, THRESHOLD_STEPS = 80, 50
ARMS: dict[str, dict[str, Any]] = {  # cell -> environment, its settings, steps; both games first, each makes its start
    "text-bandit-cum": {"env": "bandit", "args": {"returns": "cum"}, "steps": BANDIT_STEPS},
    "text-threshold-found": {"env": "threshold", "args": {"returns": "found"}, "steps": THRESHOLD_STEPS},
    "text-bandit-final": {"env": "bandit", "args": {"returns": "final"}, "steps": BANDIT_STEPS},
    "text-threshold-process": {"env": "threshold", "args": {"returns": "process"}, "steps": THRESHOLD_STEPS},
    "text-threshold-info": {"env": "threshold", "args": {"returns": "info"}, "steps": THRESHOLD_STEPS},
    "text-bandit-process": {
        "env": "bandit",
        "args": {"returns": "process", "reference": "ucb1"},
        "steps": BANDIT_STEPS,
    },
}
STARTS: dict[str, dict[str, Any]] = {  # whose noisy expert is imitated first
    "bandit": {"returns": "process", "reference": "ucb1"},
    "threshold": {"returns": "found"},
}
WARM_STARTS: dict[str, dict[str, Any]] = {
    "bandit": {"episodes": 800, "noise": 0.5, "passes": 3, "learning_rate": 1e-3},
    "threshold": {"episodes": 1000, "noise": 0.5, "passes": 4, "learning_rate": 1e-3},
}


# ---------------------------------------------------------------------------------------------------------------- cells


def cells(options: Any, seeds: Sequence[int]) -> list[Cell]:
    """Every arm with every seed, a seed of all arms before the next one."""
    return [Cell(name, seed, settings) for seed in seeds for name, settings in ARMS.items()]


def configuration(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The run of a cell, as `assay train` would take it."""
    bandit = settings["env"] == "bandit"
    return {
        "env": settings["env"],
        "env_args": settings["args"] | ({"horizon": HORIZON} if bandit else {"n": N}),
        "method": ["rloo"],
        "model": "tiny-300k",
        "seed": seed,
        "steps": settings["steps"],
        "tasks_per_step": 16,
        "rollouts_per_task": 8,
        "learning_rate": 1e-3,
        "schedule": "linear",
        "max_turn_tokens": 3,
        "max_episode_tokens": 128,
        "warm_start": WARM_STARTS[settings["env"]],
        "evaluation": {"tasks": 0},
        "runtime": {"workers": 0, "guard": False},
    }


def run(cell: Cell, folder: Path) -> dict[str, Any]:
    """Trains, and reads the law before, every few steps, and after. It writes no run directory."""
    config = resolve(configuration(cell.settings, cell.seed), cell.name)
    read = read_bandit if config.env == "bandit" else read_threshold
    with closing(build(config)) as bench:
        bench.network.model.load_state_dict(start(cell.settings))
        learner = build_learner(config, bench.network, None)
        bench.sampler.load(learner)
        trainer = Trainer(bench, learner, Display())
        steps, found, rewards = [0], [read(bench)], []
        while not trainer.ended:
            metrics, _, _ = trainer.step()
            rewards.append(float(metrics["reward"]))
            if trainer.spent["steps"] % READ_EVERY == 0 or trainer.ended:
                steps.append(trainer.spent["steps"])
                found.append(read(bench))
    curves = {key: [one[key] for one in found] for key in found[0]}
    return {"steps": steps, "episodes": trainer.spent["episodes"], "rewards": rewards, **curves}


def start(settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Weights of the start that all arms of a game and all seeds share."""
    first = next(one for one in ARMS.values() if one["env"] == settings["env"])
    config = resolve(configuration(first | {"args": STARTS[settings["env"]], "steps": 0}, 0), "start")
    with closing(build(config)) as bench:
        warm_start(bench, Display())
        weights: dict[str, torch.Tensor] = bench.network.model.state_dict()
        return weights
