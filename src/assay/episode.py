"""One episode as a generator of requests (protocols.py); also replay of a trace, and playing on from inside one.

The context of the sampler already holds what it sampled: a turn appends the previous answer's closing and the new
observation (append), or goes back to the fixed prompt and appends stored blocks (window). What does not fit ends the
episode as `cut`, never as a crash. Left out: retries, and everything that methods do by wrapping an episode.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.protocols import (
    Completion,
    Episode,
    Generate,
    Renderer,
    Request,
    Reset,
    Sampling,
    Step,
    StepResult,
    Truncate,
)
from assay.rng import stable_hash
from assay.rows import Layout
from assay.trace import Ids, Outcome, Provenance, TaskKey, Trace, Turn

EMPTY = -1  # Fork(EMPTY) is answered with a new, empty context
NO_IDS: Ids = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to play: a task, and its place in the collection. `step` is -1 outside training."""

    id: int
    split: str = "train"
    step: int = -1
    round: int = 0
    slot: int = 0  # which task of the round
    rollout: int = 0
    mode: str = ""
    environment: str = ""  # which of a mixture; "": the first, or only one

    @property
    def key(self) -> str:
        return f"{self.step:06d}.{self.round:02d}.{self.slot:04d}.{self.rollout:04d}"


@dataclass(frozen=True, slots=True)
class Settings:
    """What all episodes of a collection share. Limits count tokens."""

    environment: str
    version: str
    sampling: Sampling
    layout: Layout = field(default_factory=Layout)
    max_episode_tokens: int = 1 << 30  # of the whole trace, in either layout
    max_length: int = 1 << 30  # of a context: the sampler's
    policy_version: int = 0


def episode(renderer: Renderer, job: Job, settings: Settings, context: int) -> Episode:
    """Play one task from its start in an empty context."""
    result: StepResult = yield Reset(job.split, job.id)
    info = result.info
    task = TaskKey(settings.environment, settings.version, job.split, job.id, str(info.get("hash", "")))
    prompt_ids, provenance = NO_IDS, np.zeros(0, np.uint8)
    if not result.error:
        prompt_ids, provenance = renderer.prompt(str(info.get("goal", "")), job.mode)
    start = Trace(
        task=task,
        step=job.step,
        round=job.round,
        slot=job.slot,
        rollout=job.rollout,
        prompt_ids=prompt_ids,
        prompt_provenance=provenance,
        turns=(),
        final_observation=result.observation,
        reward=0.0,
        outcome=Outcome.CUT,
        temperature=settings.sampling.temperature,
        mode=job.mode,
        horizon=_horizon(info),
    )
    return (yield from _play(renderer, settings, start, result, context))


def replay(trace: Trace, turn: int | None = None) -> Generator[Request, Any, StepResult | None]:
    """Re-enter a trace before `turn` (None: at its end) by reset and replay of its executed actions.

    Returns what the environment shows there, or None where it showed or did anything else than it did in the trace.
    """
    turns = [past for past in trace.turns[:turn] if past.stop != "context"]  # such a turn was not executed
    shown = [past.observation for past in trace.turns[: len(turns)]]
    shown.append(trace.turns[len(turns)].observation if len(turns) < len(trace.turns) else trace.final_observation)
    result: StepResult = yield Reset(trace.task.split, trace.task.id)
    if result.error or str(result.info.get("hash", "")) != trace.task.hash or result.observation != shown[0]:
        return None
    for past, expected in zip(turns, shown[1:], strict=True):
        result = yield Step(past.action)
        if result.error or result.observation != expected or result.reward != past.reward:
            return None
    return result


def resume(
    renderer: Renderer, settings: Settings, trace: Trace, turn: int, context: int
) -> Generator[Request, Any, Trace | None]:
    """Play on from before `turn` of a trace, in an empty context; None where the replay does not match."""
    result = yield from replay(trace, turn)
    if result is None:
        return None
    start = replace(trace, turns=trace.turns[:turn], extra_tokens=0, error="", evidence={})
    return (yield from _play(renderer, settings, start, result, context))


def _play(renderer: Renderer, settings: Settings, start: Trace, result: StepResult, context: int) -> Episode:
    """Turns until the end, from a start whose last answer of the environment is `result`."""
    turns = list(start.turns)
    limit = settings.sampling.max_new_tokens
    tokens = start.length  # of the trace
    held = 0  # tokens in the context
    while (outcome := _outcome(result)) is None:
        observation = renderer.observation(result.observation, first=not turns)
        first = max(0, len(turns) - settings.layout.k) if settings.layout.name == "window" else 0
        if held and not first:
            keep, parts = held, [turns[-1].closing_ids, observation[0]]
        else:  # a new context, or a window that moves on: the prompt stays, the stored blocks come again
            keep = len(start.prompt_ids) if held else 0
            parts = [] if held else [start.prompt_ids]
            parts += [*(past.block()[0] for past in turns[first:]), observation[0]]
        ids = np.concatenate(parts).astype(np.int32)
        room = min(
            settings.max_length - keep - len(ids), settings.max_episode_tokens - tokens - len(observation[0]), limit
        )
        if room < 1:
            outcome = Outcome.CUT
            break
        if keep < held:
            yield Truncate(context, keep)
        sampling = replace(settings.sampling, max_new_tokens=room)
        completion: Completion = yield Generate(context, ids, sampling, len(turns))
        stop = "context" if completion.stop == "length" and room < limit else completion.stop
        before, result = result, StepResult(result.observation, 0.0, False, False, {"valid": False, "noop": True})
        action = "" if stop == "context" else renderer.action(completion.ids)
        if stop != "context":
            result = yield Step(action)
        closing = renderer.closing(completion.ids)
        turns.append(_turn(observation, completion, stop, closing, before, action, result, settings.policy_version))
        held = keep + len(ids) + len(completion.ids)
        tokens += len(observation[0]) + len(completion.ids) + len(closing)
        if stop == "context":
            outcome = Outcome.CUT
            break
    return replace(
        start,
        turns=tuple(turns),
        final_observation=turns[-1].observation if result.error and turns else result.observation,
        reward=math.nan if result.error else float(sum(turn.reward for turn in turns)),
        outcome=outcome,
        error=result.error,
    )


def _horizon(info: Mapping[str, Any]) -> int:
    """Turn limit of the task, 0 where the environment says none that fits."""
    horizon = info.get("horizon")
    return horizon if isinstance(horizon, int) and 0 < horizon < 1 << 31 else 0


def _outcome(result: StepResult) -> Outcome | None:
    """None while the episode goes on. Success at the horizon is success."""
    if result.error:
        return Outcome.ENVIRONMENT_ERROR
    if not (result.terminated or result.truncated):
        return None
    if result.info.get("success"):
        return Outcome.SUCCESS
    return Outcome.FAILURE if result.terminated else Outcome.HORIZON


def _turn(
    observation: tuple[Ids, NDArray[np.uint8]],
    completion: Completion,
    stop: str,
    closing: Ids,
    before: StepResult,
    action: str,
    after: StepResult,
    policy_version: int,
) -> Turn:
    provenance = completion.provenance
    if provenance is None:
        provenance = np.full(len(completion.ids), Provenance.SAMPLED, np.uint8)
    return Turn(
        context_ids=observation[0],
        context_provenance=observation[1],
        ids=completion.ids,
        provenance=provenance,
        logprobs=completion.logprobs,
        entropies=completion.entropies,
        closing_ids=closing,
        observation=before.observation,
        action=action,
        reward=math.nan if after.error else after.reward,
        valid=bool(after.info.get("valid", not after.error)),
        anchor=str(before.info.get("anchor") or stable_hash(before.observation)),
        skill=str(after.info.get("skill", "other")),
        noop=bool(after.info.get("noop", False)),
        policy_version=policy_version,
        stop=stop,
    )
