"""What happened: Trace, Turn, Group, Outcome, Provenance. Facts only, immutable; credit lives on rows (rows.py).

Token ids are those that the model saw and sampled, spliced and never re-tokenised. A trace is stored once, as blocks:

    prompt_ids  [context_0 ids_0 closing_0]  [context_1 ids_1 closing_1] ...

so that both history layouts (append, window) and another prompt (`under`) are concatenations of stored blocks.
None is not zero: NaN in `logprobs` or `entropies` means "not known, or the token was not sampled as it stands".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


class Outcome(StrEnum):
    """How an episode ended. The raw fact; what a method makes of it is the method's business."""

    SUCCESS = "success"
    FAILURE = "failure"  # the task's own end, without success
    HORIZON = "horizon"  # the task's turn limit: the task's own failure
    CUT = "cut"  # a token or context limit of ours: counted, policy configurable
    ENVIRONMENT_ERROR = "environment error"  # exception, hang, crash: never learnt from, counted


class Provenance(IntEnum):
    """Where a token comes from. Only SAMPLED, GRAFTED and HINTED tokens can be targets of a policy loss."""

    SAMPLED = 0  # drawn from the policy as it stands
    TEMPLATE = 1  # chat template, role markers
    ENVIRONMENT = 2  # observation text
    FORCED = 3  # put into the assistant's turn by code (an appended end token)
    GRAFTED = 4  # sampled by the policy in another context, composed into this turn
    HINTED = 5  # sampled by the policy while a hint was in the context


POLICY = (Provenance.SAMPLED, Provenance.GRAFTED, Provenance.HINTED)


def among(provenance: NDArray[np.uint8], wanted: Iterable[int]) -> NDArray[np.bool_]:
    """bool [N]: which of [N] provenances are wanted. Asked once a turn, where `np.isin` costs ten times as much."""
    table = np.zeros(256, np.bool_)
    table[list(wanted)] = True
    return table[provenance]


@dataclass(frozen=True, slots=True)
class TaskKey:
    """Names one task instance for good. `hash` is of the task's content, so that a panel can be checked."""

    environment: str  # registry name, "babyai/GoToLocal"
    version: str  # the environment's version hash
    split: str  # "train", "iid", "ood"
    id: int
    hash: str

    def __str__(self) -> str:
        return f"{self.environment}@{self.version}/{self.split}/{self.id}#{self.hash}"


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn: what was put before the policy, what it answered, what the environment made of it.

    L is the number of tokens in the policy's answer, C those put before it.
    """

    context_ids: Ids  # [C] observation and template since the previous turn, up to where the answer begins
    context_provenance: NDArray[np.uint8]  # [C] TEMPLATE or ENVIRONMENT
    ids: Ids  # [L] the answer, its end token included when the policy sampled it
    provenance: NDArray[np.uint8]  # [L] Provenance of each
    logprobs: Floats  # [L] the sampler's, nats, at the trace's temperature; NaN where not sampled as it stands
    entropies: Floats  # [L] full vocabulary, nats, at the trace's temperature; NaN likewise
    closing_ids: Ids  # template after the answer, when it is put back into a context ([] for most templates)
    observation: str  # raw text of what the environment showed before this turn
    action: str  # text that was executed
    reward: float  # the environment's, for this turn
    valid: bool  # did the environment accept the action as well-formed and admissible
    anchor: str  # hash of the raw observation text before the turn
    skill: str  # abstract symbol of the action, in the environment's alphabet
    noop: bool  # the action changed nothing
    policy_version: int  # number of optimiser steps of the weights that sampled it
    stop: str = "stop"  # why the answer ended: "stop", "length" (turn budget), "context" (no room)

    def block(self) -> tuple[Ids, NDArray[np.uint8]]:
        """Context, answer and closing as one (ids, provenance) pair: [C + L + closing]."""
        closing = np.full(len(self.closing_ids), Provenance.TEMPLATE, np.uint8)
        return (
            np.concatenate([self.context_ids, self.ids, self.closing_ids]),
            np.concatenate([self.context_provenance, self.provenance, closing]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One episode. `key` is unique inside a collection and decides every order that must not depend on time."""

    task: TaskKey
    step: int  # training step (or -1: evaluation, warm start) that collected it
    round: int  # collection round inside the step (dynamic sampling)
    slot: int  # which task of the round
    rollout: int  # index in its group
    prompt_ids: Ids  # fixed prompt: behind it stand all turns (append) or the last k (window)
    prompt_provenance: NDArray[np.uint8]
    turns: tuple[Turn, ...]
    final_observation: str
    reward: float  # the environment's sum; NaN for an environment error, never 0
    outcome: Outcome
    temperature: float  # that of the sampler; 0 for greedy
    mode: str = ""  # prompt mode that sampled it
    kind: str = "root"  # "root", "child" (a retrospection), "replaced" (kept for the record)
    parent: str = ""  # key of the trace that a child or replaced trace belongs to
    error: str = ""  # what an environment error said
    extra_tokens: int = 0  # generated for this episode and not in it (look-aheads): cost
    evidence: dict[str, Any] = field(default_factory=dict)  # env.evidence() at the end
    horizon: int = 0  # turn limit of the task; 0: the environment did not say

    @property
    def key(self) -> str:
        """Sorts by collection order: step, round, slot, rollout, kind, mode."""
        return f"{self.step:06d}.{self.round:02d}.{self.slot:04d}.{self.rollout:04d}.{self.kind}.{self.mode}"

    @property
    def group_key(self) -> str:
        return f"{self.step:06d}.{self.round:02d}.{self.slot:04d}"

    @property
    def success(self) -> bool:
        return self.outcome is Outcome.SUCCESS

    @property
    def learnable(self) -> bool:
        return self.outcome is not Outcome.ENVIRONMENT_ERROR

    @property
    def sampled_tokens(self) -> int:
        """Tokens of the policy in this trace (SAMPLED, GRAFTED, HINTED)."""
        return int(sum(among(turn.provenance, POLICY).sum() for turn in self.turns))

    @property
    def length(self) -> int:
        """Tokens of the whole trace in the append layout."""
        return len(self.prompt_ids) + sum(len(t.context_ids) + len(t.ids) + len(t.closing_ids) for t in self.turns)

    def under(self, prompt_ids: Ids, prompt_provenance: NDArray[np.uint8] | None = None) -> Trace:
        """The same sampled ids behind another prompt (a hint, a mode, a protocol)."""
        if prompt_provenance is None:
            prompt_provenance = np.full(len(prompt_ids), Provenance.TEMPLATE, np.uint8)
        return replace(self, prompt_ids=np.asarray(prompt_ids, np.int32), prompt_provenance=prompt_provenance)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All root traces of one task instance in one collection, and apart from them its children and replaced ones."""

    task: TaskKey
    traces: tuple[Trace, ...]  # kind "root", in rollout order
    others: tuple[Trace, ...] = ()  # kinds "child" and "replaced": cost, in no statistic

    @property
    def key(self) -> str:
        return self.traces[0].group_key

    @property
    def learnable(self) -> tuple[Trace, ...]:
        return tuple(t for t in self.traces if t.learnable)
