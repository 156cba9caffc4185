"""Traces whose token entropies are given, for the methods that read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from assay.rows import Batch, Layout, Row, build_rows, sampler_column
from assay.trace import Group, Outcome, Provenance, TaskKey, Trace, Turn

NAN = float("nan")


def turn(entropies: Sequence[float], forced: int = 0) -> Turn:
    """Three context tokens, one sampled token per entropy, then `forced` tokens that were not sampled."""
    n = len(entropies) + forced
    context, template = np.array([1, 2, 3], np.int32), np.full(3, Provenance.TEMPLATE, np.uint8)
    provenance = np.full(n, Provenance.SAMPLED, np.uint8)
    provenance[len(entropies) :] = Provenance.FORCED
    known = np.array([*entropies, *[NAN] * forced], np.float32)
    return Turn(context, template, np.arange(n, dtype=np.int32) + 5, provenance, -known, known, np.zeros(0, np.int32),
                "seen", "done", 0.0, True, "anchor", "other", False, 0)  # fmt: skip


def trace(slot: int, rollout: int, turns: Sequence[Turn | Sequence[float]], mode: str = "", bad: bool = False) -> Trace:
    """Turns, or their entropies; an even rollout succeeds."""
    made = tuple(t if isinstance(t, Turn) else turn(t) for t in turns)
    outcome = Outcome.FAILURE if rollout % 2 else Outcome.SUCCESS
    return Trace(
        TaskKey("test", "1", "train", slot, "hash"), 1, 0, slot, rollout, np.array([9], np.int32),
        np.array([Provenance.TEMPLATE], np.uint8), made, "", 1.0 - rollout % 2,
        Outcome.ENVIRONMENT_ERROR if bad else outcome, 1.0, mode,
    )  # fmt: skip


def batch(*traces: Trace) -> Batch:
    keys = sorted({t.group_key for t in traces})
    return Batch([Group(traces[0].task, tuple(t for t in traces if t.group_key == key)) for key in keys])


def rows_of(data: Batch, layout: str = "append") -> list[Row]:
    """Rows with the sampler's entropies, and advantage 1 for successes, -1 for failures."""
    rows = build_rows(data.traces, Layout.parse(layout))
    for row in rows:
        row.columns["entropy"] = sampler_column(row, "entropies")
        row.columns["advantage"] = np.full(len(row.at), 1.0 if row.trace.success else -1.0, np.float32)
    return rows


def random_batch(seed: int, groups: int = 3, size: int = 4) -> Batch:
    """Groups of traces of one to five turns of one to four tokens, entropies of 0 to 2 nats."""
    rng = np.random.default_rng(seed)
    return batch(
        *(
            trace(g, i, [rng.uniform(0, 2, int(rng.integers(1, 5))).tolist() for _ in range(int(rng.integers(1, 6)))])
            for g in range(groups)
            for i in range(size)
        )
    )


def advantages(rows: Sequence[Row]) -> dict[tuple[str, int], list[float]]:
    """(trace, turn) -> the advantages of its tokens."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        for t, value in zip(row.turns.tolist(), row.columns["advantage"].tolist(), strict=True):
            found.setdefault((row.trace.key, t), []).append(value)
    return found
