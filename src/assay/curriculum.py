"""Which tasks a step trains on: keyed, without replacement inside a step, every task once per epoch.

A finite split is walked through one keyed permutation per epoch; an unbounded one draws keyed 31-bit ids. A task that a
step has already had (at the seam of two epochs) waits for the next step. A mixture has one such walk per environment,
each the same as in a run on that environment alone. Left out: adaptive difficulty, adaptive mixtures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from assay.protocols import UserError
from assay.rng import digest, generator


class Curriculum:
    """`tasks(step, count)` hands out the next ids; the same (seed, calls) give the same ids in every process.

    `size` is that of the split, None when unbounded. UserError when a step wants more tasks than there are.
    """

    def __init__(self, seed: int, size: int | None, tasks_per_step: int, name: str = "") -> None:
        if size is not None and tasks_per_step > size:
            raise UserError(f"tasks_per_step is {tasks_per_step}, but the split has {size} tasks: lower it to {size}")
        self.seed = seed
        self.size = size
        self.tasks_per_step = tasks_per_step
        self.name = name  # keys the draws: two environments of one run are independent
        self.position = 0  # ids taken from the endless sequence of epochs
        self.deferred: list[int] = []
        self._step: int | None = None
        self._used: set[int] = set()
        self._epoch = -1
        self._order = np.zeros(0, np.int64)

    def tasks(self, step: int, count: int | None = None) -> list[int]:
        """`count` ids (default `tasks_per_step`) that this step has not had; fewer when the split is exhausted."""
        if step != self._step:
            self._step, self._used = step, set()
        count = self.tasks_per_step if count is None else count
        if self.size is not None:
            count = min(count, self.size - len(self._used))
        chosen: list[int] = []
        again: list[int] = []
        while len(chosen) < count:
            task = self.deferred.pop(0) if self.deferred else self._next()
            if task in self._used:
                again.append(task)
            else:
                self._used.add(task)
                chosen.append(task)
        self.deferred = again + self.deferred if self.size is not None else []
        return chosen

    def _next(self) -> int:
        position, self.position = self.position, self.position + 1
        if self.size is None:
            return int.from_bytes(digest(self.seed, "task", self.name, position)[:4], "little") >> 1
        epoch, index = divmod(position, self.size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, generator(self.seed, "epoch", self.name, epoch).permutation(self.size)
        return int(self._order[index])

    def state_dict(self) -> dict[str, Any]:
        """At a step boundary."""
        return {"position": self.position, "deferred": list(self.deferred)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position, self.deferred = int(state["position"]), [int(task) for task in state["deferred"]]
        self._step = None


class Mixture:
    """The curricula of a run by environment; a run on one environment is the mixture of one."""

    def __init__(self, curricula: Mapping[str, Curriculum]) -> None:
        self.curricula = dict(curricula)

    @property
    def quotas(self) -> dict[str, int]:
        """Tasks a step of each."""
        return {name: one.tasks_per_step for name, one in self.curricula.items()}

    def sources(self, step: int) -> dict[str, Callable[[int, int], list[int]]]:
        """For Driver.collect_groups: (round, missing) -> ids of each."""
        return {name: lambda round_, missing, one=one: one.tasks(step, missing) for name, one in self.curricula.items()}  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Of one environment as it stands, of several by name."""
        states = {name: one.state_dict() for name, one in self.curricula.items()}
        return states if len(states) > 1 else next(iter(states.values()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, one in self.curricula.items():
            one.load_state_dict(state[name] if len(self.curricula) > 1 else state)
