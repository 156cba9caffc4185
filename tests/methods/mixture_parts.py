"""Hand-made batches over several environments, and what a run tells its methods of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from entropy_parts import rows_of, trace, turn

from assay.protocols import Setting, World
from assay.rows import Batch, Layout, Row, Stream
from assay.trace import Group, Trace


def play(environment: str, slot: int, rollout: int, turns: Sequence[Any]) -> Trace:
    made = trace(slot, rollout, turns)
    return replace(made, task=replace(made.task, environment=environment))


def gather(traces: Sequence[Trace], dropped: Sequence[Trace] = ()) -> Batch:
    """Groups by slot; each keeps the task of its own environment."""

    def groups(of: Sequence[Trace]) -> list[Group]:
        keys = sorted({t.group_key for t in of})
        own = [tuple(t for t in of if t.group_key == key) for key in keys]
        return [Group(members[0].task, members) for members in own]

    return Batch(groups(traces), groups(dropped))


def mixture(entropies: Mapping[str, float], layout: str = "append") -> tuple[Batch, list[Row]]:
    """Of each environment a group of two episodes whose every token has the given entropy."""
    traces = [
        play(name, slot, rollout, [[h, h], turn([h], forced=1)])
        for slot, (name, h) in enumerate(entropies.items())
        for rollout in (0, 1)
    ]
    batch = gather(traces)
    return batch, rows_of(batch, layout)


def setting(*names: str, updates: int = 4, layout: str = "append") -> Setting:
    renderer: Any = None
    return Setting({n: World(n, (), renderer) for n in names}, Layout.parse(layout), updates, 512, 0)


def policy(rows: list[Row], gate: str = "ppo", low: float = 0.2, high: float = 0.2, **more: Any) -> Stream:
    return Stream("policy", rows, f"policy:{gate}", "episode", {"low": low, "high": high, **more})


def bounds(stream: Stream, side: str = "high") -> dict[str, float]:
    """Environment -> its bound; all its rows must have the same."""
    each = np.broadcast_to(stream.constants[side], (len(stream.rows),)).tolist()
    found: dict[str, set[float]] = {}
    for row, bound in zip(stream.rows, each, strict=True):
        found.setdefault(row.trace.task.environment, set()).add(bound)
    assert all(len(values) == 1 for values in found.values())
    return {name: values.pop() for name, values in found.items()}
