"""One environment in a worker process, called like one in this process.

For what plays an environment outside a collection (a look at its first task, demonstrations): it may hang, die or print
there as it may in a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.envs.inline import open_pool
from assay.protocols import Reset, Step, StepResult, UserError

Answer = tuple[str, float, bool, bool, Mapping[str, Any]]


class RemoteEnv:
    """`reset`, `step`, `expert`, `size` and `version` of slot 0 of a pool. UserError where the environment fails.
    `workers` 0: in this process after all."""

    def __init__(self, name: str, settings: Mapping[str, Any], timeout_s: float, workers: int = 1) -> None:
        self.name = name
        self.pool = open_pool(name, settings, min(workers, 1), timeout_s)
        self.version: str = self.pool.spec["version"]
        self.task = ""

    def size(self, split: str) -> int | None:
        size: int | None = self.pool.spec["sizes"][split]
        return size

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """`seed` is not used: the task names what is to be seen."""
        self.task = f"{options['split']}/{options['task']}"
        observation, *_, info = self._ask(Reset(options["split"], options["task"]))
        return observation, info

    def step(self, action: str) -> Answer:
        return self._ask(Step(action))

    def expert(self) -> str:
        if "expert" not in self.pool.spec["powers"]:
            raise UserError(f"environment {self.name!r} has no expert(): use warm_start.episodes = 0")
        (action,) = self.pool.ask([0], "expert")
        if not isinstance(action, str) or not action:
            self._ask(Step(""))  # carries the error, if there was one
            raise UserError(f"environment {self.name!r}, task {self.task}: expert() gave {action!r}, not an action")
        return action

    def close(self) -> None:
        self.pool.close()

    def _ask(self, request: Reset | Step) -> Answer:
        self.pool.submit(0, request)
        result: StepResult = self.pool.collect([0])[0]
        if result.error:
            raise UserError(f"environment {self.name!r} fails on task {self.task}: {result.error}")
        return result.observation, result.reward, result.terminated, result.truncated, result.info
