"""Threshold: find a hidden number by asking "is it at least k?". Bisection needs log2(n + 1) questions, and no more are given.

    observation "1 to 15"   action "8"   observation "8 no"   action "4"   observation "4 yes" ...

The smallest active-learning task: what is asked decides what is learnt, and the optimal learner is known. The bridge from
our reading of "Agentic In-Context Learning" to language models.

Left out: noisy answers, and a final guess (the answers say when the number is known).
"""

from __future__ import annotations

import math
import re
from typing import Any

from assay.envs.base import TextEnv, check_task
from assay.protocols import UserError
from assay.rng import stable_hash

RETURNS = ("found", "info", "process")
QUERY = re.compile(r"[0-9]{1,6}")
MOST = 9999


class Threshold(TextEnv):
    """Threshold.

    n         the hidden number is 0 to n; asked is "at least k?" for k from 1 to n
    ood_n     the same for "ood"; another range
    slack     questions beyond the ceil(log2(n + 1)) that bisection needs
    returns   "found": 1 when the number is known; "info": each answer pays the share of the log2(n + 1) bits that it gives,
              which sums to 1; "process": each question that is bisection's own pays 1 / its number of questions

    **The splits "train" and "iid" are not disjoint**: there are only n + 1 tasks, and holding some back would make bisection
    no longer the best. Task i hides i modulo (n + 1); ids are further samples, and a task's hash covers its split.
    **Success**: the number is known, hence within ceil(log2(n + 1)) + slack questions. A question whose answer is already
    known is valid and useless (noop). Raises UserError for settings out of range.
    """

    skills = ("halves", "cuts", "known")
    instructions = (
        "Find a hidden whole number. Each turn you ask whether it is at least some number k: answer with k alone. Each turn "
        "shows your last question and its answer, yes or no. You have just as many questions as halving the range needs."
    )
    brief = "threshold"

    def __init__(self, n: int = 15, ood_n: int = 31, slack: int = 0, returns: str = "found") -> None:
        super().__init__(observation_length=64, action_length=64)
        for name, value, low, high in (("n", n, 1, MOST), ("ood_n", ood_n, 1, MOST), ("slack", slack, 0, 1000)):
            if not low <= value <= high:
                raise UserError(f"threshold: {name} is {value}; it must be {low} to {high}")
        if ood_n == n:
            raise UserError(f"threshold: ood_n is {n}, as n; it must be another range")
        if returns not in RETURNS:
            raise UserError(f"threshold: returns is {returns!r}; it must be one of {', '.join(RETURNS)}")
        self.ranges = {"train": n, "iid": n, "ood": ood_n}
        self.slack, self.returns = slack, returns
        self.version = stable_hash(f"1 {n} {ood_n} {slack} {returns}")
        self._n = self._theta = 0  # n = 0: no episode yet
        self._lo = self._hi = self._turn = 0

    # ------------------------------------------------------------------------------------------------ gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        split, task = self.pick(seed, options)
        check_task("threshold", task)
        self._n = self.ranges[split]
        self._theta = task % (self._n + 1)
        self._lo, self._hi, self._turn = 0, self._n, 0
        observation = f"1 to {self._n}"
        info = {
            "hash": stable_hash(f"{split} {self._n} {self._theta}"),
            "goal": "",
            "horizon": self._horizon,
            "admissible": self._admissible(),
            "anchor": self.anchor(observation),
        }
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._running()
        text = action.strip()
        query = int(text) if QUERY.fullmatch(text) else 0
        valid = 1 <= query <= self._n
        halves = valid and query == bisect(self._lo, self._hi)
        before = self._hi - self._lo
        shown = "none"
        if valid:
            above = self._theta >= query
            if above:
                self._lo = max(self._lo, query)
            else:
                self._hi = min(self._hi, query - 1)
            shown = f"{query} {'yes' if above else 'no'}"
        self._turn += 1
        after = self._hi - self._lo
        found = after == 0
        bits = math.log2((before + 1) / (after + 1)) / math.log2(self._n + 1)
        reward = {"found": float(found), "info": bits, "process": halves / least(self._n)}[self.returns]
        truncated = not found and self._turn >= self._horizon
        info = {
            "valid": valid,
            "success": found,
            "anchor": self.anchor(shown),
            "skill": "other" if not valid else "halves" if halves else "cuts" if after < before else "known",
            "noop": after == before,
            "admissible": self._admissible(),
        }
        return shown, reward, found, truncated, info

    @property
    def _horizon(self) -> int:
        return least(self._n) + self.slack

    def _admissible(self) -> list[str]:
        return [str(k) for k in range(1, self._n + 1)]

    def _running(self) -> None:
        if self._lo == self._hi or self._turn >= self._horizon:
            raise UserError("threshold: no episode is running: call reset() before step() or expert()")

    # --------------------------------------------------------------------------------------------------- powers

    def expert(self) -> str:
        """Bisection's question: the upper middle of what the number can be."""
        self._running()
        return str(bisect(self._lo, self._hi))

    def snapshot(self) -> tuple[int, ...]:
        return self._n, self._theta, self._lo, self._hi, self._turn

    def restore(self, state: tuple[int, ...]) -> None:
        self._n, self._theta, self._lo, self._hi, self._turn = state

    def evidence(self) -> dict[str, Any]:
        """What is known of the number; `gold` is the number."""
        if not self._n:
            raise UserError("threshold: no episode has begun: call reset() before evidence()")
        where, left = f"turn {self._turn}", self._hi - self._lo + 1
        checks = [
            {"name": "number known", "passed": left == 1, "where": where, "value": f"{self._lo} to {self._hi}"},
            {"name": "bisection can still end in time", "passed": least(left - 1) <= self._horizon - self._turn,
             "where": where, "value": least(left - 1)},
        ]  # fmt: skip
        return {"checks": checks, "gold": [str(self._theta)]}


def bisect(lo: int, hi: int) -> int:
    """ceil((lo + hi) / 2): the question that halves lo..hi."""
    return (lo + hi + 1) // 2


def least(n: int) -> int:
    """ceil(log2(n + 1)): questions that bisection needs for 0..n."""
    return n.bit_length()
