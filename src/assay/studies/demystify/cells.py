"""One cell: a policy with a known prior, one run of RL in this process, and what changed.

A run is a RunConfig and a loop of Trainer.step without a run directory: a cell that is killed is run again from its start,
to the same numbers. Every draw is keyed by the cell's seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from assay.build import Bench, build, build_learner
from assay.config import RunConfig, resolve
from assay.envs.pairs import Problem
from assay.model import Network
from assay.studies.demystify.corpus import TARGET, corpus
from assay.studies.demystify.measure import (
    answer_logits,
    entropy,
    hear,
    log_probability,
    mean_entropy,
    reading,
    sample,
    solved,
)
from assay.studies.demystify.policies import ANSWER, CONTEXT, answer_ids, policy, prompt_ids, prompts_file, record
from assay.studies.demystify.tasks import TASKS, Recipe, TaskName
from assay.train import Display, Trainer

EVALUATION_TEMPERATURE = 1.0
COLD = 0.4  # the paper's temperature of RL on this task: the prior is reported there too
SAMPLES = 128  # answers that measure shares and entropies, before and after; half of it on prompts outside
HELD_OUT = 60  # pieces of text that nobody trained on
EVERY = 6  # steps between entropies of the random-reward cells


def run(settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """A cell's numbers; settings as `study.cells` writes them."""
    transformers_logging.disable_progress_bar()  # of loading and saving, once a cell
    recipe = Recipe(settings["scale"], seed, settings["start"], **settings["recipe"])
    folder = policy(recipe)
    config = configuration(settings, seed, str(folder))
    torch.set_num_threads(1)
    with closing(build(config)) as bench:
        trainer = Trainer(bench, build_learner(config, bench.network, None), Display())
        about = {
            "parameters": sum(p.numel() for p in bench.network.model.parameters()),
            "text": TASKS[recipe.task].text,
            "policy": {key: value for key, value in record(folder).items() if key not in ("recipe", "text")},
            "prompts": len(prompts_of(settings)),
        }
        before = look(bench, settings)
        curves = _train(trainer, settings)
        return about | {"before": before, "after": look(bench, settings)} | curves


def configuration(settings: dict[str, Any], seed: int, model: str) -> RunConfig:
    ppo, random = settings["algorithm"] == "ppo", settings["reward"] == "random"
    methods = ["ppo" if ppo else "grpo"]
    values: dict[str, Any] = {
        "env": TASKS[task_of(settings)].env,
        "env_args": environment(settings),
        "method": methods + (["random-reward"] if random else []),
        "model": model,
        "seed": seed,
        "steps": settings["steps"],
        "tasks_per_step": settings["tasks"],
        "rollouts_per_task": settings["rollouts"],
        "updates_per_batch": settings["updates"],
        "learning_rate": settings["rate"],
        "warmup_steps": 1,
        "temperature": settings["temperature"],
        "max_turn_tokens": ANSWER,
        "max_episode_tokens": CONTEXT,
        "runtime": {"workers": 0, "guard": False},
    }
    if ppo:
        values["slots"] = {"kl": "reward", "kl_coefficient": settings["kl"], "advantage_norm": "mean"}
    return resolve(values, "study demystify")


def prompts_of(settings: dict[str, Any]) -> tuple[str, ...]:
    """The training prompts of a cell. The narrow set is repeated so that a step has its number of groups."""
    name = settings["prompts"]
    if name in ("quote", "pairs"):
        return (TASKS[task_of(settings)].prompt,)
    if name == "broad":
        return corpus().broad
    return corpus().narrow * (settings["tasks"] // len(corpus().narrow))


def task_of(settings: dict[str, Any]) -> TaskName:
    return settings["recipe"].get("task", "quote")


def environment(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of the cell's own environment: `quote`, or `pairs` with answers in the strict language."""
    if task_of(settings) == "maths":
        return {"form": "short", "reward": "milestones" if settings["reward"] == "dense" else "sparse"}
    return quoting(settings, prompts_of(settings))


def quoting(settings: dict[str, Any], prompts: Sequence[str]) -> dict[str, Any]:
    """The quote environment for these prompts: exact matches only (the page's reward, without the code's substring
    credit)."""
    reward = "sparse" if settings["reward"] == "random" else settings["reward"]
    file = str(prompts_file("prompts", prompts))
    return {"target": TARGET, "reward": reward, "substring_credit": False, "prefix": "", "prompts": file}


def look(bench: Bench, settings: dict[str, Any]) -> dict[str, Any]:
    """The policy as it stands: the target's exact probability at two temperatures, sampled answers to the cell's own prompts
    and (quote) to prompts outside, first guesses on held-out text."""
    name, network = task_of(settings), bench.network
    task = TASKS[name]

    def log_p(temperature: float) -> float:
        return log_probability(network, task.prompt, task.target, temperature, name)

    found = {
        "log_p": log_p(EVALUATION_TEMPERATURE),
        "log_p_cold": log_p(COLD),
        "log_p_training": log_p(settings["temperature"]),
        "reading": reading(network, task.held_out[:HELD_OUT], name),
    }
    if name == "maths":
        answers = sample(bench, environment(settings), 1, SAMPLES, EVALUATION_TEMPERATURE, task.env)
        return found | {"inside": solved(answers, Problem()).as_json()}
    own, outside, few = prompts_of(settings), corpus().outside, SAMPLES // 2
    inside = sample(bench, quoting(settings, own), min(len(own), SAMPLES), SAMPLES, EVALUATION_TEMPERATURE)
    other = sample(bench, quoting(settings, outside), few, few, EVALUATION_TEMPERATURE)
    return found | {"inside": hear(inside, TARGET).as_json(), "outside": hear(other, TARGET).as_json()}


def _train(trainer: Trainer, settings: dict[str, Any]) -> dict[str, Any]:
    """Curves over steps, the first value of `log_p` before any: lists of numbers."""
    network, name = trainer.bench.network, task_of(settings)
    prompt, target = TASKS[name].prompt, TASKS[name].target
    log_p = [log_probability(network, prompt, target, task=name)]
    curves: dict[str, list[Any]] = {"reward": [], "success": [], "entropy": [], "dead": [], "clipped": []}
    probe: dict[str, list[Any]] = {"at": [0], "outside": [teacher_entropy(network)]} if _random(settings) else {}
    first: int | None = None
    played = 0
    while not trainer.ended:
        metrics, _, batch = trainer.step()
        traces = batch.traces
        hits = [trace.success for trace in traces]
        if first is None and any(hits):
            first = played + hits.index(True) + 1
        played += len(traces)
        curves["reward"].append(float(np.mean([trace.reward for trace in traces])))
        curves["success"].append(float(np.mean(hits)))
        curves["entropy"].append(mean_entropy([trace.turns[0].entropies for trace in traces]))
        curves["dead"].append(_finite(metrics.get("dead_groups")))
        curves["clipped"].append(sum(metrics.get(f"clip_{side}_per_trained_token", 0.0) for side in ("low", "high")))
        log_p.append(log_probability(network, prompt, target, task=name))
        step = trainer.spent["steps"]
        if probe and (step % EVERY == 0 or trainer.ended):
            probe["at"].append(step)
            probe["outside"].append(teacher_entropy(network))
    return {"curves": curves | {"log_p": log_p}, "probe": probe, "played": played, "first_hit": first}


def teacher_entropy(network: Network) -> float:
    """Eq. (6) on held-out text instead of samples: exact, the same positions at every step."""
    pieces = corpus().held_out[: HELD_OUT // 3]
    own = []
    for piece in pieces:
        logits = answer_logits(network, prompt_ids(piece.opening), answer_ids(piece.line))
        own.append(entropy(logits.numpy()))
    return mean_entropy(own)


def _random(settings: dict[str, Any]) -> bool:
    return bool(settings["reward"] == "random")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
