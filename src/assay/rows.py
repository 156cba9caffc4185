"""What training computes on: rows, their columns, and loss streams.

A row is a context and its target tokens. The append layout gives one row per trace, `window(k)` one per turn. Every
column is *compact*: one number per target token, in order, so that the views of one trace align one to one and no
statistic can ever see padding, prompt or observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from assay.trace import POLICY, Group, Ids, Provenance, Trace, among

Column = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layout:
    """`append` (one row per episode) or `window` (one row per turn: prompt, the last `k` turns' blocks, this turn)."""

    name: str = "append"
    k: int = 0

    @classmethod
    def parse(cls, text: str) -> Layout:
        """From "append" or "window(K)"; ValueError says what was found."""
        if text == "append":
            return cls()
        if text.startswith("window(") and text.endswith(")") and text[7:-1].isdecimal():
            return cls("window", int(text[7:-1]))
        raise ValueError(f"layout is 'append' or 'window(K)' with K turns of history, not {text!r}")


@dataclass(slots=True, eq=False)
class Row:
    """T tokens, N of them targets. `at[n]` is the position in `ids` of target n, predicted from the tokens before it."""

    trace: Trace
    turn: int  # turn index in the window layout, -1 for a whole trace
    view: str  # "" is the view that sampled it; methods name further ones
    ids: Ids  # [T]
    provenance: NDArray[np.uint8]  # [T]
    at: NDArray[np.int32]  # [N] positions of the targets, at[0] >= 1
    turns: NDArray[np.int32]  # [N] turn of each target
    shared: int  # leading tokens that all rows of the group share (the prompt): computed once
    columns: dict[str, Column] = field(default_factory=dict)  # [N] each, or [N, K] for top-k targets

    @property
    def key(self) -> tuple[str, int, str]:
        return self.trace.key, self.turn, self.view

    @property
    def targets(self) -> Ids:
        return self.ids[self.at]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class Batch:
    """What one step collected. Scores start as facts; reward hooks shape them, metrics never read them."""

    groups: list[Group]  # kept, in key order
    dropped: list[Group] = field(default_factory=list)  # by `keep` or surplus: cost, in no statistic
    scores: dict[str, float] = field(default_factory=dict)  # trace key -> score
    turn_scores: dict[str, list[float]] = field(default_factory=dict)  # trace key -> one per turn
    token_scores: dict[str, Column] = field(default_factory=dict)  # trace key -> per sampled token (k1 in the reward)

    def __post_init__(self) -> None:
        for trace in self.traces:
            self.scores.setdefault(trace.key, trace.reward)
            self.turn_scores.setdefault(trace.key, [turn.reward for turn in trace.turns])

    @property
    def traces(self) -> list[Trace]:
        """Root traces of the kept groups that can be learnt from."""
        return [t for g in self.groups for t in g.learnable]


@dataclass(slots=True)
class Stream:
    """Rows under one loss. The sum of `token weight x loss` over all targets is divided by the named denominator over
    the whole optimiser step, then multiplied by `weight`. Micro-batching and packing cannot change it beyond rounding."""

    name: str
    rows: list[Row]
    loss: str  # "policy", "nll", "kl", "value": a function of losses.py
    denominator: str  # "token", "sequence" (mean of row means), "turn", "episode", "group", "constant"
    constants: dict[str, float | NDArray[np.float32]] = field(default_factory=dict)  # scalar, or one per row
    weight: float = 1.0
    token_weight: str = ""  # column of token weights; "" means 1
    metrics: dict[str, float] = field(default_factory=dict)  # what its method says of it, beside the learner's


def build_rows(
    traces: Sequence[Trace], layout: Layout, view: str = "", targets: Sequence[Provenance] = POLICY
) -> list[Row]:
    """Rows of the traces in key order; a trace without policy tokens gives none (legal: it counts in statistics)."""
    rows: list[Row] = []
    for trace in sorted(traces, key=lambda t: t.key):
        if layout.name == "append":
            spans = [(-1, 0, len(trace.turns))]
        else:
            spans = [(t, max(0, t - layout.k), t + 1) for t in range(len(trace.turns))]
        for turn, first, end in spans:
            row = _row(trace, turn, first, end, view, targets)
            if len(row.at):
                if row.at[0] == 0:
                    raise ValueError(f"trace {trace.key}: nothing before its first target, so nothing predicts it")
                rows.append(row)
    return rows


def _row(trace: Trace, turn: int, first: int, end: int, view: str, targets: Sequence[Provenance]) -> Row:
    ids, provenance = [trace.prompt_ids], [trace.prompt_provenance]
    at: list[NDArray[np.int32]] = []
    turns: list[NDArray[np.int32]] = []
    length = len(trace.prompt_ids)
    for t in range(first, end):
        block = trace.turns[t]
        if t == end - 1:  # nothing is predicted from what follows the last answer
            block_ids = np.concatenate([block.context_ids, block.ids])
            block_provenance = np.concatenate([block.context_provenance, block.provenance])
        else:
            block_ids, block_provenance = block.block()
        if turn in (-1, t):
            policy = np.flatnonzero(among(block.provenance, targets)) + length + len(block.context_ids)
            at.append(policy.astype(np.int32))
            turns.append(np.full(len(policy), t, np.int32))
        ids.append(block_ids)
        provenance.append(block_provenance)
        length += len(block_ids)
    return Row(
        trace,
        turn,
        view,
        np.concatenate(ids).astype(np.int32),
        np.concatenate(provenance).astype(np.uint8),
        np.concatenate(at) if at else np.zeros(0, np.int32),
        np.concatenate(turns) if turns else np.zeros(0, np.int32),
        shared=len(trace.prompt_ids),
    )


def sampler_column(row: Row, name: str) -> Column:
    """`logprobs` or `entropies` as the sampler recorded them, on the row's targets; NaN where not known."""
    turns = range(len(row.trace.turns)) if row.turn == -1 else [row.turn]
    targets = np.unique(row.provenance[row.at])  # those of the row: not the policy's where it was built for others
    parts = []
    for t in turns:
        turn = row.trace.turns[t]
        parts.append(getattr(turn, name)[among(turn.provenance, targets)])
    return np.concatenate(parts).astype(np.float32)
