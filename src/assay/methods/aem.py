"""AEM: the advantage of a whole answer, rescaled by how uncertain the policy was while it gave it.

A *response* is what the policy sampled in one turn of one trace. The pure functions below take responses, [n] arrays
in any order, and their groups as numbers; `Responses` reads them off rows, in either layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.protocols import Method, Metrics, UserError
from assay.rows import Batch, Row

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

SCOPES = ("group", "trace", "batch")


class AEM(Method):
    """Answers that the policy was sure of get more of their advantage, answers that it was unsure of get less.

    No reward, no loss and no forward pass is added. The mean token entropy of each answer is scaled to 0 .. 1 among all
    answers of the task's episodes, turned into a weight that falls with it and is 1 on average, and multiplied into the
    host's advantage. Failures then cost entropy less, and successes spend it, without a schedule.

    lam: modulation temperature; 0 switches it off, below 0 the direction is reversed (paper: 1).
    gate: nats of mean token entropy; a group whose answers differ by less is left alone (paper: 0.1).
    scope: whose answers are compared: those of the task's group, of one trace, or of the batch (paper: group).
    score: take entropies from a pass of the learner, one more forward, not from the sampler's record (paper: true).
    """

    name = "aem"
    paper = "arXiv 2605.00425, Adaptive Entropy Modulation for Multi-Turn Agentic RL"
    fidelity = "reconstruction"

    def __init__(self, lam: float = 1.0, gate: float = 0.1, scope: str = "group", score: bool = False) -> None:
        if not np.isfinite(lam):
            raise ValueError(f"lam is a finite number, not {lam!r}")
        if not (gate >= 0 and np.isfinite(gate)):
            raise ValueError(f"gate is a number of nats, 0 or more, not {gate!r}")
        if scope not in SCOPES:
            raise ValueError(f"scope is one of {', '.join(SCOPES)}, not {scope!r}")
        self.lam, self.gate, self.scope = lam, gate, scope
        self.needs = frozenset({"entropy"} if score and lam else ())

    def modulate(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """Multiplies column "advantage" by the coefficient of the token's response."""
        if self.lam == 0 or not rows:
            return {}
        responses = Responses(rows)
        entropy = responses.entropy("aem")
        group = responses.groups(self.scope)
        alpha = coefficients(entropy, group, self.lam, self.gate)
        advantage = responses.column("advantage")
        responses.write("advantage", advantage * alpha[responses.of])
        low, high = extremes(entropy, group)
        active = active_groups(low, high, self.gate)
        return {
            "aem_range": float(np.mean(high - low)),
            "aem_active": float(np.mean(active)),
            "aem_min": float(alpha.min()),
            "aem_max": float(alpha.max()),
            "aem_shift": float(np.mean((alpha - 1.0) * responses.mean(advantage))),
        }


def coefficients(entropy: ArrayLike, group: ArrayLike, lam: float = 1.0, gate: float = 0.1) -> Array:
    """`alpha = exp(-lam h) / mean exp(-lam h)`, h the entropy scaled to 0 .. 1 in its group: [n], mean 1 per group.

    Source: AEM, arXiv 2605.00425, steps 3 and 4. Exactly 1 in a group whose entropies are equal or differ by less than
    `gate`, and everywhere for `lam` 0.

    Args:
      entropy: [n] mean token entropy of each response, nats.
      group: [n] number of the group of each response, from 0.
      lam: modulation temperature.
      gate: nats.
    """
    h, index = np.asarray(entropy, np.float64), np.asarray(group, np.int64)
    if h.ndim != 1 or h.shape != index.shape:
        raise ValueError(f"entropy and group must have one entry per response, not {h.shape} and {index.shape}")
    if lam == 0 or h.size == 0:
        return np.ones(h.shape)
    low, high = extremes(h, index)
    active = active_groups(low, high, gate)
    scaled = (h - low[index]) / np.where(active, high - low, 1.0)[index]
    power = np.exp(-lam * scaled - max(-lam, 0.0))  # at most 1, whatever lam
    size = np.maximum(np.bincount(index), 1)
    return np.where(active[index], power / (np.bincount(index, power) / size)[index], 1.0)


def extremes(entropy: ArrayLike, group: ArrayLike) -> tuple[Array, Array]:
    """(lowest, highest) [g] of the entropies [n] of each group; args as `coefficients`."""
    h, index = np.asarray(entropy, np.float64), np.asarray(group, np.int64)
    low, high = np.full(int(index.max()) + 1, np.inf), np.full(int(index.max()) + 1, -np.inf)
    np.minimum.at(low, index, h)
    np.maximum.at(high, index, h)
    return low, high


def active_groups(low: Array, high: Array, gate: float) -> NDArray[np.bool_]:
    """[g] groups that differ by `gate` or more, and at all."""
    return (high > low) & (high - low >= gate)


class Responses:
    """The n responses of rows: runs of targets of one row and turn, in the rows' order. In both layouts these are the
    same responses in the same order, and a turn without targets is none."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.lengths = np.array([len(row.at) for row in rows])
        row = np.repeat(np.arange(len(rows)), self.lengths)
        turns = np.concatenate([row.turns for row in rows])
        first = np.append(True, (np.diff(row) != 0) | (np.diff(turns) != 0))
        self.starts = np.flatnonzero(first)  # [n] in the N targets of all rows
        self.of = np.cumsum(first) - 1  # [N] response of each target
        self.row, self.turn = row[self.starts], turns[self.starts]  # [n]

    def column(self, name: str) -> Array:
        """[N] float64."""
        return np.concatenate([row.columns[name] for row in self.rows]).astype(np.float64)

    def mean(self, values: Array) -> Array:
        """[n] means over the tokens of each response, of [N]."""
        return np.add.reduceat(values, self.starts) / np.bincount(self.of)

    def entropy(self, method: str) -> Array:
        """[n] mean token entropy, nats; UserError for that method where the sampler did not record it."""
        means = self.mean(self.column("entropy"))
        if unknown := int(np.count_nonzero(~np.isfinite(means))):
            raise UserError(
                f"{method}: the sampler recorded no entropy for tokens of {unknown} of {len(means)} answers: set score "
                f"of {method} to true, and the learner computes it"
            )
        return means

    def following(self) -> Ints:
        """[n] index of the response that comes next in the same trace, -1 for none."""
        numbers = {row.trace.key: i for i, row in enumerate(self.rows)}
        trace = np.array([numbers[row.trace.key] for row in self.rows])[self.row]
        order = np.lexsort((self.turn, trace))
        same = np.append(np.diff(trace[order]) == 0, False)
        after = np.full(len(order), -1)
        after[order] = np.where(same, np.roll(order, -1), -1)
        return after

    def write(self, name: str, values: Array) -> None:
        """[N] into that column of the rows, as float32."""
        for row, part in zip(self.rows, np.split(values, np.cumsum(self.lengths)[:-1]), strict=True):
            row.columns[name] = part.astype(np.float32)

    def groups(self, scope: str) -> Ints:
        """[n] number of the group of each response: the task's episodes under one prompt mode, a trace, or all."""
        traces = [row.trace for row in self.rows]
        if scope == "batch":
            keys: list[tuple[str, ...]] = [()] * len(traces)
        elif scope == "trace":
            keys = [(trace.key,) for trace in traces]
        else:
            keys = [(trace.group_key, trace.mode) for trace in traces]
        numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        return np.array([numbers[key] for key in keys], np.int64)[self.row]
