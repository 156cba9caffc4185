"""What a run is going to do, in words, before anything heavy is imported: the plan that `train` prints first."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay import tiny
from assay.cli.preflight import warnings
from assay.config import RunConfig, Slots, env_settings, environments, task_quotas
from assay.envs.remote import RemoteEnv
from assay.protocols import UserError

ADVANTAGES = {
    "grpo": "reward minus group mean, over group std",
    "dr-grpo": "reward minus group mean",
    "rloo": "reward minus the mean of the others",
    "reinforce++": "token returns whitened over the batch",
    "reinforce++-baseline": "reward minus group mean, whitened over the batch",
    "gae": "GAE with a critic",
    "turn-gae": "GAE over turns with a critic",
    "gigpo": "group advantage plus that of steps with the same observation",
    "hgpo": "advantage of steps with the same history",
    "opo": "reward minus group mean weighted by length",
    "gpg": "reward minus group mean, scaled up by the share of dead groups",
}
KEEPS = {
    "all": "all groups",
    "mixed": "groups with successes and failures only",
    "top-std": "the {share:.0%} of the groups whose rewards differ most",
}
GATES = {
    "ppo": "ratio clipped to [{low:g}, {high:g}]",
    "none": "ratio not bounded",
    "cispo": "ratio as a weight of at most {cap:g}",
    "gspo": "one ratio per episode, clipped to [{low:g}, {high:g}]",
    "sequence": "one ratio per sequence, clipped to [{low:g}, {high:g}]",
    "sapo": "ratio behind a soft gate",
    "dppo": "tokens dropped whose probability moves by more than {clip_low:g} down or {cap:g} up",
    "clip-cov": "ratio clipped to [{low:g}, {high:g}], a share of {share:g} of the tokens dropped by covariance",
    "kl-cov": "ratio not bounded, a share of {share:g} of the tokens under a KL of {penalty:g}",
}
DENOMINATORS = {
    "token": "mean over tokens",
    "sequence": "mean over rows of token means",
    "turn": "mean over turns of token means",
    "episode": "mean over episodes of token means",
    "group": "mean over groups of token means",
    "constant": "sum over tokens, over a constant per episode",
}
WARNINGS = "warnings"  # title of the line of what methods say; a run says it again when it begins
TOKENS_PER_S = (
    4000.0  # generated, then trained on, per second and core, of a million fp32 parameters: measured, tiny-1m
)
OVERHEAD_S = 0.004  # of one decode step or forward, whatever its size
ANSWER_TOKENS = 4  # of a short action: a guess
SHARE_OF_HORIZON = 0.6  # turns that an episode takes: a guess


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """What a look at one training task says; `error` is what went wrong with it."""

    version: str
    tasks: int | None
    horizon: int
    error: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)  # what its process says of itself: skills, instructions


def plan(config: RunConfig, out: str) -> dict[str, str]:
    """Title -> one line. UserError for what can be seen to fail without starting anything."""
    quotas = task_quotas(config)
    found = {name: look(config, name) for name in quotas}
    horizon = round(sum(found[name].horizon * tasks for name, tasks in quotas.items()) / config.tasks_per_step)
    parameters = parameter_count(config.model)
    lines = {
        "environment": "; ".join(_environment(config, name, quotas, found[name]) for name in quotas),
        "model": _model(config, parameters),
        "method": " + ".join(config.method) + ": " + "; ".join(slots_in_words(config.slots).values()),
        "each step": _step(config),
        "steps": _steps(config),
        "warm start": _warm_start(config),
        "held-out": _evaluation(config),
        "time": _time(config, parameters, horizon),
        WARNINGS: "; ".join(warnings(config, {name: one.spec for name, one in found.items()})),
        "writes to": out + (" (there is a run already)" if (Path(out) / "config.toml").exists() else ""),
    }
    return {title: line for title, line in lines.items() if line}


def look(config: RunConfig, name: str) -> EnvFacts:
    """Makes one of the environments, in a process of its own, and resets it on a training task."""
    with closing(RemoteEnv(name, env_settings(config, name), config.runtime.step_timeout_s)) as env:
        try:
            _, info = env.reset(options={"task": 0, "split": "train"})
        except UserError as error:  # a run would count it and go on
            return EnvFacts(env.version, None, 0, str(error), env.pool.spec)
        horizon = info.get("horizon")
        return EnvFacts(env.version, env.size("train"), horizon if isinstance(horizon, int) else 0, "", env.pool.spec)


def parameter_count(model: str) -> int | None:
    """Numbers in a local checkpoint's safetensors headers; None if the model is not on this disk."""
    folder = tiny.folder_of(model) or Path(model)
    folder = folder / "policy" if (folder / "policy").is_dir() else folder
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return sum(_numbers(path) for path in files) or None


def _numbers(path: Path) -> int:
    with open(path, "rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 1 << 26)))
        except (struct.error, ValueError) as error:
            raise UserError(f"{path} is not a safetensors file: {error}") from error
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def slots_in_words(slots: Slots) -> dict[str, str]:
    """Advantage, filter, gate, aggregation, KL: title -> what the slots say of it."""
    gate = GATES[slots.gate].format(
        low=1 - slots.clip_low, high=1 + slots.clip_high, clip_low=slots.clip_low, cap=slots.clip_high,
        share=slots.cov_share, penalty=slots.gate_penalty,
    )  # fmt: skip
    if slots.dual_clip:
        gate += f", at most {slots.dual_clip:g} where the advantage is negative"
    if slots.correction != "none":
        gate += (
            f", each token weighed by the ratio to its sampler ({slots.correction}, at most {slots.correction_cap:g})"
        )
    advantage = ADVANTAGES[slots.advantage]
    if slots.overlong_cache:
        advantage += (
            f", with up to {slots.overlong_factor:g} off for the last {slots.overlong_cache} tokens before the limit"
        )
    if slots.invalid_penalty:
        advantage += f", {slots.invalid_penalty:g} off for every invalid action"
    kl = "no KL to the reference"
    if slots.kl != "none" and slots.kl_coefficient > 0:
        kl = f"KL to the reference in the {slots.kl} ({slots.kl_coefficient:g})"
    return {
        "advantage": advantage,
        "filter": KEEPS[slots.keep].format(share=slots.keep_share),
        "gate": gate,
        "aggregation": DENOMINATORS[slots.denominator],
        "KL": kl,
    }


def duration(seconds: float) -> str:
    """ "45 s", "3 min", "2 h 10 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def count(number: float) -> str:
    """ "1.07M", "310k", "512"."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _environment(config: RunConfig, env: str, quotas: Mapping[str, int], facts: EnvFacts) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in env_settings(config, env).items())
    tasks = "tasks without end" if facts.tasks is None else f"{facts.tasks} tasks"
    if facts.error:
        return f"{env} (version {facts.version}): ITS FIRST TRAINING TASK FAILS: {facts.error}"
    parts = [f"version {facts.version}", settings, f"{tasks} to train on"]
    if facts.horizon:
        parts.append(f"about {facts.horizon} turns at most")
    if len(quotas) > 1:
        parts.append(f"{quotas[env]} of the {config.tasks_per_step} tasks of a step")
    return f"{env} ({', '.join(p for p in parts if p)})"


def _model(config: RunConfig, parameters: int | None) -> str:
    size = f"{count(parameters)} parameters" if parameters else "not looked at before it is loaded"
    adapter = f", adapter of rank {config.lora_rank}" if config.lora_rank else ""
    return f"{config.model} ({size}{adapter}, {config.runtime.dtype} on {config.runtime.device})"


def _step(config: RunConfig) -> str:
    episodes = config.tasks_per_step * config.rollouts_per_task
    updates = config.updates_per_batch * config.epochs
    return (
        f"{config.tasks_per_step} tasks x {config.rollouts_per_task} rollouts = {episodes} episodes of at most "
        f"{config.max_episode_tokens} tokens ({config.max_turn_tokens} sampled a turn), {updates} "
        f"update{'s' if updates > 1 else ''}"
    )


def _steps(config: RunConfig) -> str:
    episodes = config.steps * config.tasks_per_step * config.rollouts_per_task
    until = f"{config.steps} ({episodes:,} episodes)" if config.budget is None else f"until {config.budget} are spent"
    rate = f"learning rate {config.learning_rate:g}, {config.schedule} after {config.warmup_steps} warm-up updates"
    return f"{until}, {rate}, seed {config.seed}"


def _warm_start(config: RunConfig) -> str:
    start = config.warm_start
    if not start.episodes:
        return ""
    passes = f", {start.passes} passes" if start.passes > 1 else ""
    scratch = ", from scratch" if start.from_scratch else ""
    each = " of each environment" if len(environments(config)) > 1 else ""
    return f"imitation of {start.episodes} expert episodes{each} with {start.noise:.0%} random actions{passes}{scratch}"


def _evaluation(config: RunConfig) -> str:
    panel = config.evaluation
    if not panel.tasks:
        return "no evaluation"
    splits = "iid and ood" if panel.ood else "iid"
    modes = "sampled and greedy" if panel.greedy else "sampled"
    every = f", sampled on iid every {panel.every} steps" if panel.every else ""
    when = "before and after" if panel.before else "after"
    each = " and environment" if len(environments(config)) > 1 else ""
    return f"{panel.tasks} tasks a split{each}, {splits}, {modes}, {when}{every}"


def _time(config: RunConfig, parameters: int | None, horizon: int) -> str:
    if not parameters or config.budget is not None:
        return "measured after two steps"
    return f"about {duration(estimate(config, parameters, horizon))} (a guess; measured after two steps)"


def estimate(config: RunConfig, parameters: int, horizon: int) -> float:
    """Seconds, by a rule of thumb for one core: good to a factor of two or three."""
    turns, worlds = max(1.0, SHARE_OF_HORIZON * (horizon or 10)), len(environments(config))
    answer = min(config.max_turn_tokens, ANSWER_TOKENS)
    panel = config.evaluation
    passes = (1 + panel.before) * (1 + panel.ood) * (1 + panel.greedy) * panel.tasks * worlds
    episodes = config.tasks_per_step * config.rollouts_per_task

    def generation(episodes: int) -> float:
        waves = max(1.0, episodes / config.runtime.concurrency)
        return episodes * turns * answer / TOKENS_PER_S * parameters / 1e6 + waves * turns * answer * OVERHEAD_S

    update = episodes * turns * 4 * answer / TOKENS_PER_S * parameters / 1e6 * config.epochs
    start = worlds * config.warm_start.episodes * config.warm_start.passes * turns * 4 * answer / TOKENS_PER_S
    return config.steps * (generation(episodes) + update) + generation(passes) + start + 5.0
