"""The contracts: Env, Renderer, Sampler, Learner, Method. What crosses a room crosses here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from assay.rows import Batch, Layout, Row, Stream
from assay.trace import Floats, Group, Ids, Trace

Metrics = dict[str, float]
SPLITS = ("train", "iid", "ood")


class UserError(Exception):
    """A mistake that the user can mend: one sentence that says what, where and what to do. The command line prints it
    and exits with 2; it never shows a traceback for one."""


# ---------------------------------------------------------------------------------------------------- environment


@runtime_checkable
class Env(Protocol):
    """A `gymnasium.Env` with text in and text out, and optional powers. One object plays one episode at a time.

    `reset(options={"task": id, "split": split})` is a pure function of (settings, split, id); without options the id is
    derived from `seed` and the split is "train". Its `info` has
        hash        content hash of the task instance: splits are disjoint by it
        goal        str, the task in words; the renderer puts it into the fixed prompt ("" if the observation says it)
        horizon     int, turn limit of this task
        admissible  list[str] of actions, or None
        anchor      stable_hash of the raw observation text
    `step(action)` takes any text. Its `info` has `valid`, `success`, `anchor`, `skill`, `noop`, `admissible`.
    An inadmissible or malformed action is valid=False, changes nothing, and still costs a turn. `truncated` is True at
    the horizon only. Observations are short: what the agent sees now, nothing of the past.
    """

    version: str  # changes when any task or reward would: a short string, kept by hand or hashed from settings
    skills: ClassVar[tuple[str, ...]]  # alphabet of info["skill"]; what is none of them is "other"
    instructions: str  # how to act, for a general language model
    brief: str  # the same in at most a few words, for the built-in small policies

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]: ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]: ...

    def close(self) -> None: ...


class FullEnv(Env, Protocol):
    """The optional powers; `hasattr` decides. All built-in environments have them."""

    def size(self, split: str) -> int | None:
        """Number of tasks of a split; None: unbounded (ids are any non-negative 31-bit integer)."""
        ...

    def expert(self) -> str:
        """The next action of a solver, from the current state (also after non-expert actions)."""
        ...

    def snapshot(self) -> Any:
        """The whole state; `restore` of it, on this or an equal object, gives an identical future."""
        ...

    def restore(self, state: Any) -> None: ...

    def evidence(self) -> dict[str, Any]:
        """What the reward knows beyond its scalar, JSON: {"checks": [{"name", "passed", "where", "value"}], "gold": [str]};
        `gold` are the strings that must not leak into a prompt."""
        ...


# ------------------------------------------------------------------------------------------------------- renderer


class Renderer(Protocol):
    """Prompt, template, stops and limits of one environment for one model. Every piece is rendered once, as ids."""

    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]

    def prompt(self, goal: str, mode: str = "") -> tuple[Ids, NDArray[np.uint8]]:
        """The fixed prompt: instructions and goal; (ids, provenance)."""
        ...

    def observation(self, text: str, first: bool) -> tuple[Ids, NDArray[np.uint8]]:
        """An observation up to and including the header of the assistant's answer; (ids, provenance)."""
        ...

    def closing(self, ids: Ids) -> Ids:
        """Template after an answer: what must stand between its ids and the next observation."""
        ...

    def action(self, ids: Ids) -> str:
        """The text to execute: the answer without end token and thinking block."""
        ...

    def decode(self, ids: Ids) -> str:
        """Exact text of the ids, special tokens shown."""
        ...


# ------------------------------------------------------------------------------------------- requests of an episode


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw an answer. Training refuses top-p; greedy is temperature 0 (log-probs then are at temperature 1)."""

    temperature: float = 1.0
    max_new_tokens: int = 16  # per turn
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """L sampled tokens (the stop token included); log-probs and full-vocabulary entropies in nats, float32, at the
    sampling temperature. `stop` is "stop", "length" or "context" (the model has no room left)."""

    ids: Ids
    logprobs: Floats
    entropies: Floats
    stop: str
    provenance: NDArray[np.uint8] | None = None  # None: all SAMPLED; a wrapper may compose an answer (CLEANER)


@dataclass(frozen=True, slots=True)
class Generate:
    """Append `ids` to the context, then sample. `attempt` keys the draws of a repetition. Answered with a Completion."""

    context: int
    ids: Ids
    sampling: Sampling
    turn: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Fork:
    """Answered with the handle of a copy of the context."""

    context: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """Forget everything after the first `length` tokens. Answered with None."""

    context: int
    length: int


@dataclass(frozen=True, slots=True)
class Close:
    """Free a context. Answered with None."""

    context: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Start the episode's environment on a task. Answered with a StepResult (reward 0)."""

    split: str
    id: int


@dataclass(frozen=True, slots=True)
class Step:
    """Execute an action. Answered with a StepResult."""

    action: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Answered with a handle that lives in the worker."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Answered with None."""

    handle: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """An answer of the environment. `error` is not empty when it threw, hung or died: the episode ends there."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]
    error: str = ""


Request = Generate | Fork | Truncate | Close | Reset | Step | Snapshot | Restore
Episode = Generator[Request, Any, Trace]  # yields requests, is sent the answers, returns the trace


# -------------------------------------------------------------------------------------------------------- backends


@dataclass(frozen=True, slots=True)
class Draw:
    """One submitted request: its context, the ids to append, and one uniform in [0, 1) per token it may sample."""

    context: int
    ids: Ids
    sampling: Sampling
    uniforms: NDArray[np.float64]


class Sampler(Protocol):
    """Generation with contexts that stay. Which rows share a forward is a function of the calls only, never of time."""

    max_length: int  # tokens a context can hold

    def open(self) -> int: ...
    def fork(self, context: int) -> int: ...
    def truncate(self, context: int, length: int) -> None: ...
    def close(self, context: int) -> None: ...
    def length(self, context: int) -> int: ...
    def submit(self, draw: Draw) -> None: ...

    def tick(self) -> list[tuple[int, Completion]]:
        """One decode step over all submitted requests; the (context, completion) pairs that ended in it, by context."""
        ...

    def load(self, learner: Learner) -> None:
        """Take the learner's weights as they are now."""
        ...


class Learner(Protocol):
    """Owns the weights and the optimiser."""

    version: int  # optimiser steps done

    @property
    def provides(self) -> frozenset[str]:
        """Needs that `score` can fill: "old_logprob", "ref_logprob", "entropy", "value", "target"."""
        ...

    def score(self, rows: Sequence[Row], needs: frozenset[str], temperature: float = 1.0) -> None:
        """Writes each need as a column of every row, without gradient."""
        ...

    def update(self, streams: Sequence[Stream], progress: float) -> Metrics:
        """One optimiser step on the weighted sum of the streams."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def save_pretrained(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class World:
    """One environment of a run, as methods see it."""

    name: str
    skills: tuple[str, ...]  # alphabet of Turn.skill, without "other"; () where it has none
    renderer: Renderer


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run tells its methods before its first step."""

    worlds: Mapping[str, World]  # by the name that stands in TaskKey.environment
    layout: Layout
    updates: int  # optimiser steps per batch: updates_per_batch x epochs
    max_row_tokens: int  # that the model can hold
    seed: int  # of the run: keyed draws derive from it


class Method:
    """One paper, in one file: override the stages it touches, leave the rest. Fidelity is part of the API.

    Folds (`episode`, `reward`, `modulate`, `streams`) run in the order the methods are named; `advantage` is set by
    exactly one. Hooks get what they need and return metrics where they have any; a metric of one environment of several
    is named `NAME[ENVIRONMENT]`. Settings are keyword arguments of `__init__` of plain types, each with a default and
    a line "name: meaning" in the class's docstring: flags, help and pages are made of them.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # arXiv id, title
    fidelity: ClassVar[str] = "inferred"  # "paper", "reconstruction", "inferred"
    needs: frozenset[str] = frozenset()

    def bind(self, setting: Setting) -> Sequence[str]:
        """Once, before the first step and before `load_state_dict`. UserError where the method cannot work in such a
        run; what is returned are warnings, one sentence each, for where it works and has no effect."""
        return ()

    def episode(self, episode: Episode) -> Episode:
        """Wrap the stream of requests of one episode."""
        return episode

    revise: Callable[[Group], Generator[Request, Any, Group]] | None = None
    keep: Callable[[Group], bool] | None = None
    select: Callable[[Batch], Batch] | None = None  # a filter that must see the whole batch; moves groups to `dropped`

    def rows(self, batch: Batch) -> list[Row]:
        """Further views, beside the default rows."""
        return []

    def reward(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        return {}

    advantage: Callable[[Batch, Sequence[Row]], Metrics] | None = None  # writes column "advantage"

    def modulate(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        return {}

    def streams(self, rows: Sequence[Row], streams: list[Stream], progress: float) -> list[Stream]:
        """For one optimiser step: `rows` are those of its task instances, default view and further views."""
        return streams

    def tables(self) -> Mapping[str, list[dict[str, Any]]]:
        """After a step: tables for the report by title, rows of JSON scalars with the same keys. The first key names
        the row, so that the report can follow it over the steps; {} for none."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """JSON values and numpy arrays only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None
