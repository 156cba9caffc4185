"""Countdown, one operation a turn: reach a target from a few given numbers; the environment does the arithmetic.

    goal "make 24"   observation "3 4 12"   action "12 - 4"   observation "3 8"   action "8 * 3"   success

Rules. An action joins two of the remaining numbers; both go, the result stays. Results are whole numbers from 1 to
`max_result`; division is exact. The task is solved as soon as the target is among the numbers; others may be left over.
"reset" brings the given numbers back and costs a turn, so no state is lost: an episode ends with success or at the
horizon, and has no other failure. Every task is solvable, and the target is never one of the given numbers.

Left out: scores for coming close (the closest value is in `evidence`), and a choice of expressions in one turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from assay.envs.base import TRIES, TextEnv, bucket, check_task
from assay.protocols import UserError
from assay.rng import digest, stable_hash

Numbers = tuple[int, ...]  # what is left, ascending: one multiset has one spelling

RESET = "reset"
ACTION = re.compile(r"([1-9][0-9]{0,8}) ?([-+*/]) ?([1-9][0-9]{0,8})", re.ASCII)
OPERATION = 64  # price of an operation in `reach`; "*" and "/" cost one more, so a price is (operations, times)
FEWEST, MOST = 2, 6  # given numbers; six, as in the game, take the solver 0.1 s the first time, seven ten times that
ATTEMPTS = 3  # of using up all numbers that the horizon has room for, with a reset between them
STRATA = tuple(f"{operations}{kind}" for operations in range(1, MOST) for kind in "+*")


@dataclass(frozen=True, slots=True)
class Task:
    """One instance. `stratum` is the number of operations of a shortest solution, then "+" if one of these shortest
    uses only + and -, "*" if each needs * or /."""

    numbers: Numbers
    target: int
    stratum: str
    horizon: int

    @property
    def hash(self) -> str:
        return content_hash(self.numbers, self.target)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the tasks of one split are drawn from: targets in [low, high], strata with cumulative weights ending in 1."""

    split: str
    numbers: int
    low: int
    high: int
    horizon: int
    strata: tuple[str, ...]
    cumulative: tuple[float, ...]


def content_hash(numbers: Numbers, target: int) -> str:
    """Of the ascending numbers and the target: tasks that differ in the order of their numbers are one task."""
    return stable_hash(f"{' '.join(map(str, numbers))} = {target}")


@lru_cache(maxsize=1 << 14)
def moves(numbers: Numbers, max_result: int) -> Mapping[str, tuple[str, Numbers]]:
    """Admissible operations, spelled with the larger number first: action -> (operator, the numbers after it)."""
    found: dict[str, tuple[str, Numbers]] = {}
    for operator in "+-*/":
        for i in range(len(numbers) - 1, 0, -1):
            for j in range(i - 1, -1, -1):
                result = apply(operator, numbers[i], numbers[j])
                if 1 <= result <= max_result:
                    left = (*numbers[:j], *numbers[j + 1 : i], *numbers[i + 1 :], result)
                    found[f"{numbers[i]} {operator} {numbers[j]}"] = operator, tuple(sorted(left))
    return MappingProxyType(found)


def apply(operator: str, a: int, b: int) -> int:
    """a operator b for positive a and b; 0, which no rule allows, where the division is not exact."""
    if operator == "+":
        return a + b
    if operator == "-":
        return a - b
    if operator == "*":
        return a * b
    return a // b if a % b == 0 else 0


@lru_cache(maxsize=1 << 14)
def reach(numbers: Numbers, max_result: int, limit: int) -> Mapping[int, int]:
    """Every value up to `limit` that can appear without a reset -> the least price: 64 x operations + how many of them
    are "*" or "/". Exact: all orders of all operations, so the quotient by 64 is the length of a shortest solution."""
    prices = {number: 0 for number in numbers if number <= limit}
    for operator, left in moves(numbers, max_result).values():
        step = OPERATION + (operator in "*/")
        for value, price in reach(left, max_result, limit).items():
            if price + step < prices.get(value, price + step + 1):
                prices[value] = price + step
    return prices


def solutions(numbers: Numbers, target: int, max_result: int, limit: int) -> list[tuple[str, ...]]:
    """All shortest solutions without a reset, each the actions in order; [] if there is none, [()] if solved."""
    if target in numbers:
        return [()]
    best = reach(numbers, max_result, limit).get(target)
    if best is None:
        return []
    found = []
    for action, (_, left) in moves(numbers, max_result).items():
        rest = reach(left, max_result, limit).get(target)
        if rest is not None and rest // OPERATION == best // OPERATION - 1:
            found += [(action, *tail) for tail in solutions(left, target, max_result, limit)]
    return found


def stratum_of(price: int) -> str:
    operations, times = divmod(price, OPERATION)
    return f"{operations}{'*' if times else '+'}"


@lru_cache(maxsize=1 << 14)
def targets(numbers: Numbers, split: str, low: int, high: int, max_result: int, limit: int) -> dict[str, list[int]]:
    """Stratum -> the targets of these numbers that belong to the split, ascending."""
    found: dict[str, list[int]] = {}
    for target, price in sorted(reach(numbers, max_result, limit).items()):
        if price and low <= target <= high:
            if split != "ood" and bucket(content_hash(numbers, target)) != split:
                continue
            found.setdefault(stratum_of(price), []).append(target)
    return found


class Countdown(TextEnv):
    """Countdown-Stepwise.

    numbers, max_number       how many numbers are given, each drawn from 1..max_number
    max_target                targets of "train" and "iid" are 1..max_target
    ood_numbers, ood_max_target
                              "ood" gives ood_numbers, and its targets are max_target+1..ood_max_target; either may
                              equal its partner, to study one shift alone (equal targets: again 1..max_target)
    max_result                largest result that an operation may have
    stratum, ood_stratum      a stratum ("1+", "1*", "2+", "2*", "3+", ...) or stratum -> weight; "": see below
    horizon                   turns of an episode; 0: room to use up all numbers three times, 3 x numbers - 1

    "" is an equal mix of the strata from "1+" to the longest of `numbers`; for "ood", of those that need at least two
    operations, and only of "*" ones where its targets are larger (sums hardly get there). The defaults are small on
    purpose: the results of two given numbers are a multiplication table that a policy of a million parameters can
    hold, and no number has more than three digits.
    Raises UserError for settings out of range.
    """

    skills = ("+", "-", "*", "/", RESET)
    instructions = (
        "Reach the target number. Each turn shows the numbers you have. Answer with one operation on two of them: "
        '"A + B", "A - B", "A * B" or "A / B". The result replaces both numbers. It must be a whole number, at least 1; '
        'division must be exact. You need not use all numbers. Answer "reset" to get the given numbers back.'
    )
    brief = "countdown"

    def __init__(
        self,
        numbers: int = 3,
        max_number: int = 12,
        max_target: int = 50,
        ood_numbers: int = 4,
        ood_max_target: int = 100,
        max_result: int = 144,
        stratum: str | Mapping[str, float] = "",
        ood_stratum: str | Mapping[str, float] = "",
        horizon: int = 0,
    ) -> None:
        super().__init__(observation_length=64, action_length=64)
        sizes = {"numbers": (numbers, FEWEST, MOST), "ood_numbers": (ood_numbers, numbers, MOST)}
        sizes |= {"max_number": (max_number, 1, 99), "max_target": (max_target, 1, 9_998)}
        sizes |= {"ood_max_target": (ood_max_target, max_target, 9_999), "horizon": (horizon, 0, 1_000)}
        sizes |= {"max_result": (max_result, max(max_number, ood_max_target), 99_999)}
        for name, (value, low, high) in sizes.items():
            if not low <= value <= high:
                raise UserError(f"countdown: {name} is {value}; with the other settings it must be {low} to {high}")
        if (ood_numbers, ood_max_target) == (numbers, max_target):
            raise UserError("countdown: ood_numbers and ood_max_target are those of training; one must be larger")
        self.max_number, self.max_result, self.limit = max_number, max_result, ood_max_target
        larger = ood_max_target > max_target
        everyday = stratum or dict.fromkeys(STRATA[: 2 * (numbers - 1)], 1.0)
        long = STRATA[2 if ood_numbers > 2 else 0 : 2 * (ood_numbers - 1)]
        longest = ood_stratum or {name: 1.0 for name in long if name[-1] == "*" or not larger}
        usual = (numbers, 1, max_target, horizon or ATTEMPTS * numbers - 1, *_mix("stratum", everyday, numbers))
        low = max_target + 1 if larger else 1
        far = (ood_numbers, low, ood_max_target, horizon or ATTEMPTS * ood_numbers - 1)
        self.recipes = {
            "train": Recipe("train", *usual),
            "iid": Recipe("iid", *usual),
            "ood": Recipe("ood", *far, *_mix("ood_stratum", longest, ood_numbers)),
        }
        self.version = stable_hash(f"1 {max_number} {max_result} {list(self.recipes.values())}")
        self._task: Task | None = None
        self._numbers: Numbers = ()
        self._turn = 0
        self._closest = 0  # the value nearest to the target among all that were there since the reset
        self._done = True

    # ------------------------------------------------------------------------------------------------ generator

    def task(self, split: str, task_id: int) -> Task:
        """A pure function of (settings, split, id); UserError for an id out of range or a stratum without tasks."""
        check_task("countdown", task_id)
        recipe = self.recipes[split]
        share = int.from_bytes(digest("countdown", "stratum", split, task_id)[:6], "little") / (1 << 48)
        stratum = next(s for s, up_to in zip(recipe.strata, recipe.cumulative, strict=True) if share < up_to)
        for attempt in range(TRIES):
            draw = int.from_bytes(digest("countdown", split, task_id, attempt), "little")
            given = []
            for _ in range(recipe.numbers):
                draw, rest = divmod(draw, self.max_number)
                given.append(rest + 1)
            numbers = tuple(sorted(given))
            choice = targets(numbers, split, recipe.low, recipe.high, self.max_result, self.limit).get(stratum)
            if choice:
                return Task(numbers, choice[draw % len(choice)], stratum, recipe.horizon)
        raise UserError(
            f"countdown: no task of stratum {stratum!r} in {TRIES} draws of {recipe.numbers} numbers up to "
            f"{self.max_number} with targets {recipe.low} to {recipe.high}: leave that stratum out, or widen the ranges"
        )

    # ------------------------------------------------------------------------------------------------ gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        task = self.task(*self.pick(seed, options))
        self._task, self._numbers, self._turn, self._done = task, task.numbers, 0, False
        self._closest = min(task.numbers, key=lambda number: (abs(number - task.target), number))
        observation = self._show()
        info = {
            "hash": task.hash,
            "goal": f"make {task.target}",
            "horizon": task.horizon,
            "admissible": self._admissible(),
            "anchor": self.anchor(observation),
            "stratum": task.stratum,
        }
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        task = self._running()
        before = self._numbers
        skill, self._numbers = self._execute(action, task)
        self._turn += 1
        self._closest = min((self._closest, *self._numbers), key=lambda number: (abs(number - task.target), number))
        success = task.target in self._numbers
        truncated = not success and self._turn >= task.horizon
        self._done = success or truncated
        observation = self._show()
        info = {
            "valid": skill != "other",
            "success": success,
            "anchor": self.anchor(observation),
            "skill": skill,
            "noop": self._numbers == before,
            "admissible": self._admissible(),
        }
        return observation, float(success), success, truncated, info

    def _execute(self, action: str, task: Task) -> tuple[str, Numbers]:
        """(skill, numbers afterwards); "other" and the numbers as they are for what the rules do not allow."""
        text = action.strip().lower()
        if text == RESET:
            return RESET, task.numbers
        match = ACTION.fullmatch(text)
        if not match:
            return "other", self._numbers
        a, operator, b = int(match[1]), match[2], int(match[3])
        if operator in "+*" and a < b:
            a, b = b, a
        return moves(self._numbers, self.max_result).get(f"{a} {operator} {b}", ("other", self._numbers))

    def _show(self) -> str:
        return " ".join(map(str, self._numbers))

    def _admissible(self) -> list[str]:
        return [*moves(self._numbers, self.max_result), RESET]

    def _running(self) -> Task:
        if self._task is None or self._done:
            raise UserError("countdown: no episode is running: call reset() before step() or expert()")
        return self._task

    # --------------------------------------------------------------------------------------------------- powers

    def expert(self) -> str:
        """First action of a shortest way to the target, counting a reset as one turn; fewest * and / among equals."""
        task = self._running()
        here = reach(self._numbers, self.max_result, self.limit).get(task.target)
        anew = OPERATION + reach(task.numbers, self.max_result, self.limit)[task.target]
        if here is None or here // OPERATION > anew // OPERATION:
            return RESET
        for action, (operator, left) in moves(self._numbers, self.max_result).items():
            price = OPERATION + (operator in "*/")
            if reach(left, self.max_result, self.limit).get(task.target) == here - price:
                return action
        raise AssertionError("a value within reach has a first operation")

    def snapshot(self) -> tuple[Task | None, Numbers, int, int, bool]:
        return self._task, self._numbers, self._turn, self._closest, self._done

    def restore(self, state: tuple[Task | None, Numbers, int, int, bool]) -> None:
        self._task, self._numbers, self._turn, self._closest, self._done = state

    def evidence(self) -> dict[str, Any]:
        """`gold`: every shortest solution of the given numbers, actions joined by ", ", then its single actions."""
        task = self._task
        if task is None:
            raise UserError("countdown: no episode has begun: call reset() before evidence()")
        price = reach(self._numbers, self.max_result, self.limit).get(task.target)
        where = f"turn {self._turn}"
        solved = task.target in self._numbers
        checks = [
            {"name": "target reached", "passed": solved, "where": where, "value": self._show()},
            {"name": "target in reach without reset", "passed": price is not None, "where": where,
             "value": None if price is None else price // OPERATION},
            {"name": "closest value", "passed": self._closest == task.target, "where": "episode",
             "value": self._closest},
        ]  # fmt: skip
        ways = solutions(task.numbers, task.target, self.max_result, self.limit)
        gold = dict.fromkeys([", ".join(way) for way in ways] + [action for way in ways for action in way])
        return {"checks": checks, "gold": list(gold)}


def _mix(setting: str, stratum: str | Mapping[str, float], numbers: int) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """(strata, cumulative weights that end in 1), in the order of STRATA."""
    weights = {stratum: 1.0} if isinstance(stratum, str) else dict(stratum)
    possible = STRATA[: 2 * (numbers - 1)]
    for name, weight in weights.items():
        if name not in possible or not 0 <= weight < float("inf"):
            raise UserError(
                f"countdown: {setting} has {name!r} with weight {weight}; with {numbers} numbers the strata are "
                f"{', '.join(possible)}, and a weight is a finite number that is not negative"
            )
    strata = tuple(name for name in possible if weights.get(name))
    if not strata:
        raise UserError(
            f"countdown: {setting} gives no stratum a positive weight; the strata are {', '.join(possible)}"
        )
    total = sum(weights[name] for name in strata)
    return strata, (*(part / total for part in accumulate(weights[name] for name in strata[:-1])), 1.0)
