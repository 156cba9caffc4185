"""Episodes of an environment's own expert, made imperfect on purpose: what warm starts and pre-training imitate.

With probability `noise` a turn's action is drawn from the admissible ones instead of the expert's. Demonstrations are
ordinary traces whose answers have provenance FORCED: code wrote them, no policy sampled them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from assay.protocols import FullEnv, Renderer, UserError
from assay.rng import generator, stable_hash
from assay.rows import Layout, Row, build_rows
from assay.trace import Outcome, Provenance, TaskKey, Trace, Turn

LONGEST = 1000  # turns of a demonstration
SLOTS = 10_000  # a trace's key has four digits for its slot


def demonstrate(
    env: FullEnv,
    renderer: Any,
    name: str,
    task: int,
    noise: float,
    seed: int,
    rollout: int = 0,
    imitate_noise: bool = True,
) -> Trace:
    """One episode on a training task. `imitate_noise` False marks noisy answers TEMPLATE: context, never a target."""
    draw = generator(seed, "demonstration", task, rollout)
    observation, info = env.reset(options={"task": task, "split": "train"})
    key = TaskKey(name, env.version, "train", task, str(info.get("hash", "")))
    prompt_ids, prompt_provenance = renderer.prompt(str(info.get("goal", "")))
    turns: list[Turn] = []
    reward, ended, horizon = 0.0, False, False
    while not (ended or horizon):
        if len(turns) == LONGEST:
            raise UserError(f"environment {name!r}, task {task}: no end after {LONGEST} turns: give it a horizon")
        noisy = bool(draw.random() < noise)
        choices = info.get("admissible") or [env.expert()]
        action = str(choices[int(draw.integers(len(choices)))]) if noisy else env.expert()
        context_ids, context_provenance = renderer.observation(observation, first=not turns)
        ids = renderer.answer(action)
        source = Provenance.FORCED if imitate_noise or not noisy else Provenance.TEMPLATE
        unknown = np.full(len(ids), np.nan, np.float32)
        before, anchor = observation, str(info.get("anchor") or stable_hash(observation))
        observation, gained, ended, horizon, info = env.step(action)
        reward += gained
        turns.append(
            Turn(
                context_ids, context_provenance, ids, np.full(len(ids), source, np.uint8), unknown, unknown,
                renderer.closing(ids), before, action, float(gained), bool(info.get("valid", True)), anchor,
                str(info.get("skill", "other")), bool(info.get("noop", False)), policy_version=-1,
            )
        )  # fmt: skip
    outcome = Outcome.SUCCESS if info.get("success") else Outcome.FAILURE if ended else Outcome.HORIZON
    return Trace(
        key, step=-1, round=0, slot=rollout % SLOTS, rollout=rollout // SLOTS, prompt_ids=prompt_ids,
        prompt_provenance=prompt_provenance, turns=tuple(turns), final_observation=observation, reward=reward,
        outcome=outcome, temperature=1.0,
    )  # fmt: skip


def demonstrations(
    env: FullEnv, renderer: Renderer, name: str, noises: Sequence[float], seed: int, imitate_noise: bool = True
) -> Iterator[Trace]:
    """An endless, reproducible stream over training tasks; episode i has noise `noises[i % len(noises)]`."""
    if not hasattr(env, "expert"):
        raise UserError(f"environment {name!r} has no expert(): a warm start needs one; use warm_start.episodes = 0")
    size = env.size("train") if hasattr(env, "size") else None
    index = 0
    while True:
        task = int(generator(seed, "demonstrated task", index).integers(size or 2**31))
        yield demonstrate(env, renderer, name, task, noises[index % len(noises)], seed, index, imitate_noise)
        index += 1


def numbered(trace: Trace, index: int) -> Trace:
    """The trace as number `index` of a collection: its key names it there, whatever stream it came from."""
    return replace(trace, slot=index % SLOTS, rollout=index // SLOTS)


def imitation_rows(traces: Sequence[Trace], layout: Layout) -> list[Row]:
    """Rows whose targets are the demonstrated answers."""
    return build_rows(traces, layout, targets=(Provenance.FORCED,))
