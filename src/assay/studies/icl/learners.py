"""Interactive learners L = (S, s_0, U, pi, g): a state, an update rule, a decision rule and an output rule, and the tasks
that answer them.

    for t in range(H):  a ~ law(state, x, t);  y, x' = task(x, a);  state = update(state, x, a, y)

States are immutable values, so a trace of them can be kept. Actions are indices from 0 and a law is a vector [A] that sums
to 1, ties uniform. Tasks hold the hidden phi; a learner sees only x, a and y (non-anticipation is by construction).
Left out: learners that plan over what they would learn; the exact ones are `assay.bandits.bayes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from assay.bandits import best_of, greedy, thompson, ucb1

Array = NDArray[np.float64]


class InteractiveLearner(Protocol):
    def start(self) -> Any:
        """s_0."""
        ...

    def update(self, state: Any, x: Any, a: int, y: Any) -> Any:
        """U: the state after action `a` at input `x` was answered with `y`; the old one stays as it was."""
        ...

    def law(self, state: Any, x: Any, t: int) -> Array:
        """pi: probabilities [A] of the actions before decision t."""
        ...

    def output(self, state: Any) -> Any:
        """g: final hypothesis, recommended arm or predictor."""
        ...


class Task(Protocol):
    """Holds phi. A learner's input at t = 0 and the answer to an action, with the input that follows it."""

    def first(self) -> Any: ...
    def answer(self, x: Any, a: int, t: int, generator: np.random.Generator) -> tuple[Any, Any]: ...


@dataclass(frozen=True, slots=True)
class Play:
    """One episode: H inputs, actions and answers, and H + 1 states."""

    inputs: list[Any]
    actions: list[int]
    answers: list[Any]
    states: list[Any]


def play(learner: InteractiveLearner, task: Task, horizon: int, generator: np.random.Generator) -> Play:
    """The closed loop. The generator is drawn from for actions and answers: key it by seed, purpose and episode."""
    x = task.first()
    found = Play([], [], [], [learner.start()])
    for t in range(horizon):
        law = learner.law(found.states[-1], x, t)
        a = int(np.searchsorted(np.cumsum(law)[:-1], generator.random(), side="right"))
        y, after = task.answer(x, a, t, generator)
        found.inputs.append(x)
        found.actions.append(a)
        found.answers.append(y)
        found.states.append(learner.update(found.states[-1], x, a, y))
        x = after
    return found


def fold(
    learner: InteractiveLearner, inputs: Sequence[Any], actions: Sequence[int], answers: Sequence[Any]
) -> list[Any]:
    """s_0, ..., s_T of given interactions, whoever chose the actions."""
    states = [learner.start()]
    for x, a, y in zip(inputs, actions, answers, strict=True):
        states.append(learner.update(states[-1], x, a, y))
    return states


# ---------------------------------------------------------------------------------------------------- active learning


@dataclass(frozen=True, slots=True)
class Bisection:
    """Threshold theta in {0..n} by bisection. State (lo, hi): what theta can be. Action i asks "is theta >= i + 1?" (y 1 or
    0); when lo = hi it knows, and asks that point again (point 1 where theta is 0)."""

    n: int

    def start(self) -> tuple[int, int]:
        return 0, self.n

    def update(self, state: tuple[int, int], x: Any, a: int, y: int) -> tuple[int, int]:
        lo, hi = state
        point = a + 1
        return (max(lo, point), hi) if y else (lo, min(hi, point - 1))

    def law(self, state: tuple[int, int], x: Any, t: int) -> Array:
        lo, hi = state
        return np.eye(self.n)[max((lo + hi + 1) // 2, 1) - 1]

    def output(self, state: tuple[int, int]) -> int:
        return state[0]


class Rls(NamedTuple):
    """Recursive least squares: P [d, d] and w [d]."""

    p: Array
    w: Array


def rls_start(size: int, ridge: float) -> Rls:
    return Rls(np.eye(size) / ridge, np.zeros(size))


def rls_update(state: Rls, x: Array, y: float) -> Rls:
    """Eq. (2): the ridge solution after one more pair."""
    p, w = state
    k = p @ x / (1 + x @ p @ x)
    return Rls(p - np.outer(k, x @ p), w + k * (y - x @ w))


@dataclass(frozen=True, slots=True)
class ActiveRegression:
    """Ridge regression that asks for the label of the pool's most uncertain point, argmax x' P x. `x` is the pool [M, d]."""

    size: int
    ridge: float = 1.0

    def start(self) -> Rls:
        return rls_start(self.size, self.ridge)

    def update(self, state: Rls, x: Array, a: int, y: float) -> Rls:
        return rls_update(state, x[a], y)

    def law(self, state: Rls, x: Array, t: int) -> Array:
        return best_of(np.einsum("md,de,me->m", x, state.p, x))

    def output(self, state: Rls) -> Array:
        return state.w


# -------------------------------------------------------------------------------------------------------------- bandits

BANDIT_RULES = ("ucb1", "thompson", "greedy", "epsilon-greedy", "uniform")


@dataclass(frozen=True, slots=True)
class BernoulliLearner:
    """Counts per arm, [K, 2] successes and failures, under one of `BANDIT_RULES`; recommends the best posterior mean."""

    arms: int
    rule: str
    epsilon: float = 0.1

    def start(self) -> NDArray[np.int64]:
        return np.zeros((self.arms, 2), np.int64)

    def update(self, state: NDArray[np.int64], x: Any, a: int, y: int) -> NDArray[np.int64]:
        grown = state.copy()
        grown[a, 0 if y else 1] += 1
        return grown

    def law(self, state: NDArray[np.int64], x: Any, t: int) -> Array:
        if self.rule not in BANDIT_RULES:
            raise ValueError(f"rule {self.rule!r}: one of {', '.join(BANDIT_RULES)}")
        if self.rule == "epsilon-greedy":
            return (1 - self.epsilon) * greedy(state) + self.epsilon / self.arms
        if self.rule == "uniform":
            return np.full(self.arms, 1 / self.arms)
        return {"ucb1": ucb1, "thompson": thompson, "greedy": greedy}[self.rule](state)

    def output(self, state: NDArray[np.int64]) -> int:
        return int(np.argmax(greedy(state)))


@dataclass(frozen=True, slots=True)
class LinUcb:
    """Linear bandit: argmax x'w + beta sqrt(x'Px) over the arms' features `x` [K, d]."""

    size: int
    beta: float = 1.0
    ridge: float = 1.0

    def start(self) -> Rls:
        return rls_start(self.size, self.ridge)

    def update(self, state: Rls, x: Array, a: int, y: float) -> Rls:
        return rls_update(state, x[a], y)

    def law(self, state: Rls, x: Array, t: int) -> Array:
        spread = np.sqrt(np.maximum(np.einsum("kd,de,ke->k", x, state.p, x), 0.0))
        return best_of(x @ state.w + self.beta * spread)

    def output(self, state: Rls) -> Array:
        return state.w


# ------------------------------------------------------------------------------------------------------------ online RL


class Transition(NamedTuple):
    """The answer of a Markov decision process."""

    reward: float
    state: int
    done: bool


@dataclass(frozen=True, slots=True)
class QLearning:
    """Tabular Q-learning, eq. (3); the state is the table [states, actions], the input the process's state. `temperature`
    0: epsilon-greedy, else softmax(Q / temperature)."""

    states: int
    actions: int
    alpha: float = 0.5
    gamma: float = 0.9
    epsilon: float = 0.1
    temperature: float = 0.0

    def start(self) -> Array:
        return np.zeros((self.states, self.actions))

    def update(self, state: Array, x: int, a: int, y: Transition) -> Array:
        grown = state.copy()
        target = y.reward + self.gamma * (not y.done) * state[y.state].max()
        grown[x, a] += self.alpha * (target - state[x, a])
        return grown

    def law(self, state: Array, x: int, t: int) -> Array:
        q = state[x]
        if self.temperature:
            odds = np.exp((q - q.max()) / self.temperature)
            return np.asarray(odds / odds.sum())
        return (1 - self.epsilon) * best_of(q) + self.epsilon / self.actions

    def output(self, state: Array) -> NDArray[np.int64]:
        """Greedy policy [states]; the first of equals."""
        return state.argmax(1)


# ---------------------------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True, slots=True)
class Threshold:
    theta: int

    def first(self) -> None:
        return None

    def answer(self, x: None, a: int, t: int, generator: np.random.Generator) -> tuple[int, None]:
        return int(self.theta >= a + 1), None


@dataclass(frozen=True, slots=True)
class Bernoulli:
    """`means` [K] of the arms."""

    means: tuple[float, ...]

    def first(self) -> None:
        return None

    def answer(self, x: None, a: int, t: int, generator: np.random.Generator) -> tuple[int, None]:
        return int(generator.random() < self.means[a]), None


@dataclass(frozen=True, slots=True)
class Linear:
    """Labels x'w + noise of the points `pools[t]` [M, d]: a pool of points, or the arms' features of a round."""

    w: Array
    pools: Sequence[Array]
    noise: float = 0.1

    def first(self) -> Array:
        return self.pools[0]

    def answer(self, x: Array, a: int, t: int, generator: np.random.Generator) -> tuple[float, Array]:
        label = float(x[a] @ self.w + self.noise * generator.standard_normal())
        return label, self.pools[min(t + 1, len(self.pools) - 1)]


@dataclass(frozen=True, slots=True)
class Tabular:
    """`transitions` [S, A, S], `rewards` [S, A] expected and paid as they are; never done. It starts in state 0."""

    transitions: Array
    rewards: Array

    def first(self) -> int:
        return 0

    def answer(self, x: int, a: int, t: int, generator: np.random.Generator) -> tuple[Transition, int]:
        after = int(generator.choice(len(self.transitions), p=self.transitions[x, a]))
        return Transition(float(self.rewards[x, a]), after, False), after
