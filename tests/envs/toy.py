"""A walk on a line, and everything an environment can do wrong. Hosted by real workers as "toy:Line"."""

import os
import random
import time
from typing import Any

import gymnasium

from assay.rng import stable_hash


class Line(gymnasium.Env[str, str]):
    """From 0 to the goal 1 + id % 3: "R..." and "L..." move, "S..." ends the episode, successful at the goal.

    `fault` happens at turn `fault_turn` of the tasks in `fault_tasks`, when the action is executed.
    """

    version = "line-1"
    skills = ("R", "L", "S")
    instructions = "R, L or S"
    brief = ""
    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)

    def __init__(
        self,
        horizon: int = 5,
        fault: str = "",
        fault_turn: int = 1,
        fault_tasks: tuple[int, ...] = (),
        sleep_ms: float = 0.0,
    ) -> None:
        self.horizon, self.fault, self.fault_turn, self.fault_tasks = horizon, fault, fault_turn, fault_tasks
        self.sleep_ms = sleep_ms
        self.dead = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert options is not None and not self.dead
        self.task, self.at, self.turn = options["task"], 0, 0
        self.goal = 1 + self.task % 3
        if self.fault == "reset" and self.task in self.fault_tasks:
            raise RuntimeError("no such map")
        return self._look(), {"hash": f"h{self.task}", "goal": f"goal {self.goal}", "horizon": self.horizon}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.sleep_ms:
            time.sleep(random.SystemRandom().random() * self.sleep_ms / 1000)
        if self.turn == self.fault_turn and self.task in self.fault_tasks:
            result = self._fail()
            if result is not None:
                return result
        verb = action[:1]
        self.turn += 1
        self.at += {"R": 1, "L": -1}.get(verb, 0)
        ended, success = verb == "S", verb == "S" and self.at == self.goal
        info = {
            "valid": verb in self.skills,
            "success": success,
            "skill": verb if verb in self.skills else "other",
            "noop": verb not in ("R", "L"),
            "anchor": stable_hash(self._look()),
        }
        return self._look(), float(success), ended, not ended and self.turn >= self.horizon, info

    def expert(self) -> str:
        return "R" if self.at < self.goal else "L" if self.at > self.goal else "S"

    def evidence(self) -> dict[str, Any]:
        return {"checks": [{"name": "at goal", "passed": self.at == self.goal, "where": "", "value": self.at}]}

    def _look(self) -> str:
        return f"at {self.at}"

    def _fail(self) -> Any:
        match self.fault:
            case "exception":
                self.dead = True
                raise ValueError("a wall is missing")
            case "exit":
                raise SystemExit(3)
            case "crash":
                os._exit(7)
            case "hang":
                while True:
                    time.sleep(3600)
            case "print":
                print("stray one\nstray two", flush=True)
                os.system("echo stray three 1>&2")
            case "observation":
                return 17, 0.0, False, False, {}
            case "nan":
                return "at ?", float("nan"), False, False, {}
            case "four":
                return "at ?", 0.0, False, {}
            case "info":
                return "at ?", 0.0, False, False, {"where": object()}
        return None


class Copied(Line):
    """With snapshots of its own."""

    def snapshot(self) -> Any:
        return self.task, self.goal, self.at, self.turn

    def restore(self, state: Any) -> None:
        self.task, self.goal, self.at, self.turn = state


class Forgetful(Line):
    """Not a function of its task: what it shows depends on the process."""

    def _look(self) -> str:
        return f"at {self.at} in {os.getpid()}"
