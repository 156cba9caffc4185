"""Pairs: how many integer pairs solve a quadratic form that factors? One question, one number, five milestones.

    goal "12 -1 -6 100"   action "3 2 4 3;33 25;67 51;1;\\boxed{117}"   success

One turn. Task M of "Demystifying Reinforcement Learning Post-Training of Language Models" (arXiv 2608.24949), there the
fourth problem of AIME 2025, I: the ordered pairs (x, y) of integers from -100 to 100 with 12x^2 - xy - 6y^2 = 0. The form is
(3x + 2y)(4x - 3y): two lines through the origin, and the typical mistake counts the origin twice.

In the paper a judge of 32 billion parameters reads the free text and finds the milestones. It is no part of this
environment, which never calls anything (studies/demystify/judge.py has one). What the environment can check itself is a
strict short language, made for small policies; in free text it finds the boxed answer only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from assay.envs.base import TextEnv, check_task
from assay.protocols import UserError
from assay.rng import stable_hash

REWARDS = ("sparse", "milestones")
FORMS = ("words", "short")
WEIGHTS = (5, 5, 10, 15, 25)  # hundredths of a reward, eq. (4)
NEAR_MISS = 60  # hundredths, for the answer with the origin counted twice
NO_BOX = 50  # hundredths subtracted
LARGEST = 99  # of a coefficient
LARGEST_N = 10_000
NUMBER = re.compile(r"-?[0-9]{1,6}")
BOX = re.compile(r"\\boxed\{([^{}]*)\}")
DRAWN = (1, 6)  # coefficients of other problems
DRAWN_N = (30, 120)  # their ranges
LEARNT = (
    'A task "a b c N" asks how many ordered pairs of integers from -N to N solve a x^2 + b x y + c y^2 = 0, which is '
    "(p x + q y)(r x - s y) = 0. Answer in one line, p q r s;K L;A B;o;\\boxed{answer}: K and L are the largest |k| of the "
    "solutions (q k, -p k) and (s k, r k), A and B how many solutions each line has, o how many they share."
)
FREE = (
    "Solve the problem by analysis, step by step. Write no code and do not pretend to run any. "
    "End with the final answer in \\boxed{}."
)


@dataclass(frozen=True, slots=True)
class Problem:
    """(p x + q y)(r x - s y) = 0 with x and y from -n to n. UserError unless both factors are primitive and the two lines
    are different."""

    p: int = 3
    q: int = 2
    r: int = 4
    s: int = 3
    n: int = 100

    def __post_init__(self) -> None:
        for name in "pqrs":
            if abs(getattr(self, name)) > LARGEST:
                raise UserError(f"pairs: {name} is {getattr(self, name)}; it must be {-LARGEST} to {LARGEST}")
        if not 1 <= self.n <= LARGEST_N:
            raise UserError(f"pairs: n is {self.n}; it must be 1 to {LARGEST_N}")
        if gcd(self.p, self.q) != 1 or gcd(self.r, self.s) != 1:
            raise UserError(
                f"pairs: p, q = {self.p}, {self.q} and r, s = {self.r}, {self.s} must have no common factor"
            )
        if self.q * self.r + self.p * self.s == 0:
            raise UserError("pairs: both factors are the same line: change p, q, r or s")

    @property
    def coefficients(self) -> tuple[int, int, int]:
        """Of x^2, xy and y^2."""
        return self.p * self.r, self.q * self.r - self.p * self.s, -self.q * self.s

    @property
    def bounds(self) -> tuple[int, int]:
        """Largest |k| of (q k, -p k) and of (s k, r k) in the range."""
        return self.n // max(abs(self.p), abs(self.q)), self.n // max(abs(self.r), abs(self.s))

    @property
    def counts(self) -> tuple[int, int]:
        """Solutions on each line, the origin in both."""
        first, second = self.bounds
        return 2 * first + 1, 2 * second + 1

    @property
    def answer(self) -> int:
        """Solutions: those of both lines, the origin once."""
        return sum(self.counts) - 1

    @property
    def short(self) -> str:
        """Coefficients and range: "12 -1 -6 100"."""
        return " ".join(map(str, (*self.coefficients, self.n)))

    @property
    def words(self) -> str:
        return (
            f"How many ordered pairs of integers (x, y), both from {-self.n} to {self.n}, satisfy {self.equation}? "
            "Give the number of pairs."
        )

    @property
    def factors(self) -> tuple[str, str]:
        """ "3x + 2y" and "4x - 3y"."""
        return _sum((self.p, self.q), ("x", "y")), _sum((self.r, -self.s), ("x", "y"))

    @property
    def equation(self) -> str:
        """ "12x^2 - xy - 6y^2 = 0"."""
        return f"{_sum(self.coefficients, ('x^2', 'xy', 'y^2'))} = 0"


def _sum(coefficients: Sequence[int], names: Sequence[str]) -> str:
    """ "3x + 2y" of (3, 2) and ("x", "y")."""
    text = ""
    for number, name in zip(coefficients, names, strict=True):
        if number:
            size = "" if abs(number) == 1 else str(abs(number))
            sign = "-" if number < 0 else "+"
            text += f" {sign} {size}{name}" if text else f"{'-' if number < 0 else ''}{size}{name}"
    return text


# ---------------------------------------------------------------------------------------------------- pure functions


def boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}` without braces inside, stripped; "" where none can be read; None where `\\boxed{`
    does not occur at all."""
    found = BOX.findall(text)
    if found:
        return str(found[-1]).strip()
    return "" if "\\boxed{" in text else None


def milestones(text: str, problem: Problem) -> tuple[bool, bool, bool, bool, bool]:
    """(m1, ..., m5) of a solution in the strict language `p q r s;K L;A B;o;\\boxed{answer}`, each part by itself.

    m1 one of the two factors is right, m2 both are (in either order, up to a common factor); m3 both bounds; m4 one of the
    two counts; m5 the overlap is 1. A part that is not so many numbers gives nothing; spaces around parts do not matter.
    """
    factors, bounds, counts, overlap, *_ = [*map(_numbers, text.split(";")[:4]), (), (), (), ()]
    right = set()
    if len(factors) == 4:
        a, b, c, d = factors
        for written in ((a, b), (c, -d)):
            for line in ((problem.p, problem.q), (problem.r, -problem.s)):
                if written != (0, 0) and written[0] * line[1] == written[1] * line[0]:
                    right.add(line)
    return (
        len(right) > 0,
        len(right) == 2,
        len(bounds) == 2 and sorted(bounds) == sorted(problem.bounds),
        len(counts) == 2 and bool(set(counts) & set(problem.counts)),
        overlap == (1,),
    )


def _numbers(part: str) -> tuple[int, ...]:
    """Whole numbers with single spaces between them; () for anything else."""
    words = part.strip(" \n").split(" ")
    return tuple(map(int, words)) if all(NUMBER.fullmatch(word) for word in words) else ()


def milestone_reward(reached: Sequence[bool], box: str | None, answer: int) -> float:
    """Eq. (4): 1 for the answer, 0.6 for the answer and 1, else the weights of the milestones reached; 0.5 less without
    `\\boxed{` (box None), and never below 0. Counted in hundredths, so that 0.6 - 0.5 is 0.1."""
    if box == str(answer):
        points = 100
    elif box == str(answer + 1):
        points = NEAR_MISS
    else:
        points = sum(weight for weight, yes in zip(WEIGHTS, reached, strict=True) if yes)
    return max(0, points - (NO_BOX if box is None else 0)) / 100


def sparse_reward(text: str, problem: Problem) -> float:
    """1 where the boxed text is the answer, else 0."""
    return float(boxed(text) == str(problem.answer))


def solution(problem: Problem, origin_twice: bool = False) -> str:
    """A worked solution in the strict language; with the typical mistake: overlap 0 and the answer one too large."""
    first, second = problem.bounds
    a, b = problem.counts
    overlap = 0 if origin_twice else 1
    factors = f"{problem.p} {problem.q} {problem.r} {problem.s}"
    return f"{factors};{first} {second};{a} {b};{overlap};\\boxed{{{a + b - overlap}}}"


def written(problem: Problem) -> str:
    """A worked solution in words, by factoring."""
    first, second = problem.bounds
    a, b = problem.counts
    p, q, r, s, n = problem.p, problem.q, problem.r, problem.s, problem.n
    one, two = problem.factors
    form = problem.equation.removesuffix(" = 0")
    return (
        f"The form factors: {form} = ({one})({two}).\n"
        f"So a pair is a solution if {one} = 0 or {two} = 0.\n"
        f"First case, {one} = 0: as {abs(p)} and {abs(q)} have no common factor, (x, y) = ({q}k, {-p}k) for an integer k. "
        f"Both stay within {n} if |k| <= {first}: {2 * first} + 1 = {a} pairs.\n"
        f"Second case, {two} = 0: likewise (x, y) = ({s}k, {r}k), and |k| <= {second}: {2 * second} + 1 = {b} pairs.\n"
        f"The lines differ, so they share only (0, 0), which is in both counts: {a} + {b} - 1 = {problem.answer}.\n"
        f"\\boxed{{{problem.answer}}}"
    )


def solutions(
    draw: np.random.Generator, n: int, mistake_rate: float = 0.0, other_than: Problem | None = None
) -> list[tuple[Problem, str]]:
    """n random problems with solutions in the strict language, for pre-training text: never `other_than` (absent: the
    default problem), in no spelling of its form. Each has the typical mistake with probability `mistake_rate`."""
    avoided = _form(other_than or Problem())
    found: list[tuple[Problem, str]] = []
    while len(found) < n:
        p, q, r, s = (int(i) for i in draw.integers(DRAWN[0], DRAWN[1] + 1, 4))
        size, mistake = int(draw.integers(DRAWN_N[0], DRAWN_N[1] + 1)), bool(draw.random() < mistake_rate)
        if gcd(p, q) == 1 == gcd(r, s):
            problem = Problem(p, q, r, s, size)  # positive numbers: the lines differ in the sign of their slope
            if _form(problem) != avoided:
                found.append((problem, solution(problem, mistake)))
    return found


def _form(problem: Problem) -> tuple[int, ...]:
    """The same for equal sets of solutions: -100 to 100 and -101 to 101 can have the same."""
    a, b, c = problem.coefficients
    sign = -1 if next(i for i in (a, b, c) if i) < 0 else 1
    return sign * a, sign * b, sign * c, *sorted(problem.bounds)


# ------------------------------------------------------------------------------------------------------- environment


class Pairs(TextEnv):
    """Pairs (task M).

    p, q, r, s, n  the problem: (p x + q y)(r x - s y) = 0 with x and y from -n to n
    reward         "sparse": 1 for the boxed answer, else 0; "milestones": eq. (4), closeness, see `milestone_reward`
    form           "words": the problem and its solution in words, as in the paper; "short": the goal is "a b c n", and the
                   answer is asked for in the strict language, which alone has milestones that the environment can find

    **The splits are not disjoint**: every task is the same problem, as in the paper, and a further sample; hashes cover the
    split. Success there is the probability of solving the problem that was trained on, and says nothing of others.

    An answer without a `\\boxed{}` that can be read is invalid. Success is the right boxed number. Raises UserError for
    settings that make no problem.
    """

    skills = ()
    brief = "pairs"

    def __init__(
        self,
        p: int = 3,
        q: int = 2,
        r: int = 4,
        s: int = 3,
        n: int = 100,
        reward: str = "sparse",
        form: str = "words",
    ) -> None:
        super().__init__(observation_length=64, action_length=1 << 16)
        if reward not in REWARDS:
            raise UserError(f"pairs: reward is {reward!r}; it must be one of {', '.join(REWARDS)}")
        if form not in FORMS:
            raise UserError(f"pairs: form is {form!r}; it must be one of {', '.join(FORMS)}")
        self.problem, self.reward, self.form = Problem(p, q, r, s, n), reward, form
        self.instructions = FREE if form == "words" else LEARNT
        self.version = stable_hash(f"1 {self.problem} {reward} {form}")
        self._split: str | None = None
        self._answer: str | None = None  # None: not given yet

    @property
    def goal(self) -> str:
        return self.problem.words if self.form == "words" else self.problem.short

    # ------------------------------------------------------------------------------------------------ gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        split, task = self.pick(seed, options)
        check_task("pairs", task)
        self._split, self._answer = split, None
        shown = "Your solution?" if self.form == "words" else "?"
        info = {
            "hash": stable_hash(f"{self.goal}\0{split}"),
            "goal": self.goal,
            "horizon": 1,
            "admissible": None,
            "anchor": self.anchor(shown),
        }
        return shown, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._running()
        self._answer = action
        box, answer = boxed(action), self.problem.answer
        reward = (
            sparse_reward(action, self.problem)
            if self.reward == "sparse"
            else milestone_reward(milestones(action, self.problem), box, answer)
        )
        info = {
            "valid": bool(box),
            "success": box == str(answer),
            "anchor": self.anchor(""),
            "skill": "other",
            "noop": False,
            "admissible": None,
        }
        return "", reward, True, False, info

    def _running(self) -> None:
        if self._split is None or self._answer is not None:
            raise UserError("pairs: no episode is running: call reset() before step() or expert()")

    # --------------------------------------------------------------------------------------------------- powers

    def expert(self) -> str:
        """A worked solution in the form that is asked for."""
        self._running()
        return written(self.problem) if self.form == "words" else solution(self.problem)

    def snapshot(self) -> tuple[str | None, str | None]:
        return self._split, self._answer

    def restore(self, state: tuple[str | None, str | None]) -> None:
        self._split, self._answer = state

    def evidence(self) -> dict[str, Any]:
        """The boxed answer and the milestones of the strict language; `gold` is the answer in its box."""
        if self._split is None:
            raise UserError("pairs: no episode has begun: call reset() before evidence()")
        text, answer = self._answer or "", self.problem.answer
        box, reached = boxed(text), milestones(text, self.problem)
        checks = [{"name": "boxed answer", "passed": box == str(answer), "where": "answer", "value": box or ""}]
        names = ("one factor", "both factors", "bounds", "one count", "overlap")
        for i, (name, passed) in enumerate(zip(names, reached, strict=True)):
            checks.append({"name": name, "passed": passed, "where": "answer", "value": WEIGHTS[i] / 100 * passed})
        return {"checks": checks, "gold": [f"\\boxed{{{answer}}}"]}
