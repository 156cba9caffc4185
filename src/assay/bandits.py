"""Bernoulli bandits with Beta(1, 1) priors solved exactly: optimal values for several returns, the value and the visited
states of any policy, and what Transformers need to carry a learner's recursion.

A `Game` lists what a policy can know before each decision: counts (S_1, F_1, ..., S_K, F_K) merge all orders of the same
pulls, contexts keep the order (a Transformer's law may depend on it). A *law* is a list over steps t < H of arrays
[n_t, A] with rows that sum to 1: A is K arms, or K + 1 with "stop" last. Two arms and H = 20 have 8,855 states, and 4^t
contexts at step t: H = 5 is 341 decisions, H = 10 is too many.

Numbers of equations are those of our reading of "Agentic In-Context Learning". Left out: other priors and discounting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Law = Sequence[Array]
Returns = str | tuple[str, float]  # "cum", "final", "info" or ("cost", price of a pull)

TIE = 1e-9  # closer values are equal: true gaps are at least 2.7e-6 up to H = 20, rounding is below 1e-13


# ------------------------------------------------------------------------------------------------------------ games


@dataclass(frozen=True, slots=True)
class Game:
    """`counts[t]` [n_t, K, 2]: successes and failures; `children[t]` [n_t, K, 2]: rows at t + 1 after success and failure.
    `counts` has H + 1 entries, `children` H."""

    horizon: int
    arms: int
    counts: list[Ints]
    children: list[Ints]

    def means(self, step: int) -> Array:
        """Posterior means [n_t, K], which are also the probabilities of success of the next pull."""
        return (self.counts[step][..., 0] + 1) / (self.counts[step].sum(2) + 2)


@lru_cache(maxsize=32)
def count_game(horizon: int, arms: int = 2) -> Game:
    """Every state (S_1, F_1, ..., S_K, F_K) once, in lexicographic order."""
    cells = 2 * arms
    powers = (horizon + 1) ** np.arange(cells - 1, -1, -1)
    counts = []
    for step in range(horizon + 1):
        bars = np.array(list(combinations(range(step + cells - 1), cells - 1)), np.int64)
        edges = np.concatenate([np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), step + cells - 1)], axis=1)
        counts.append((np.diff(edges, axis=1) - 1).reshape(-1, arms, 2))
    codes = [found.reshape(-1, cells) @ powers for found in counts]
    steps = powers.reshape(arms, 2)
    children = [np.searchsorted(codes[t + 1], codes[t][:, None, None] + steps) for t in range(horizon)]
    return Game(horizon, arms, counts, children)


@lru_cache(maxsize=32)
def context_game(horizon: int, arms: int = 2) -> Game:
    """Every ordered context once. Row i at step t has the base-2K digits 2 * arm + (0 after success, 1 after failure),
    the first interaction most significant: `context_digits`."""
    counts = [np.zeros((1, arms, 2), np.int64)]
    children = []
    for _ in range(horizon):
        size = len(counts[-1])
        children.append(np.arange(size * 2 * arms).reshape(size, arms, 2))
        grown = counts[-1][:, None] + np.eye(2 * arms, dtype=np.int64).reshape(1, 2 * arms, arms, 2)
        counts.append(grown.reshape(-1, arms, 2))
    return Game(horizon, arms, counts, children)


def context_digits(step: int, arms: int = 2) -> tuple[Ints, Ints]:
    """(arms pulled, outcomes 0 or 1), each [(2K)^t, t], of the rows of `context_game` at a step."""
    digits = np.arange((2 * arms) ** step)[:, None] // (2 * arms) ** np.arange(step - 1, -1, -1) % (2 * arms)
    return digits // 2, 1 - digits % 2


# --------------------------------------------------------------------------------------------------- optimal policies


@dataclass(frozen=True, slots=True)
class Solution:
    """Bayes-optimal for one return: `values[t]` [n_t] (t = 0..H), `q[t]` [n_t, A]."""

    values: list[Array]
    q: list[Array]

    @property
    def value(self) -> float:
        """Of the whole episode, from the prior."""
        return float(self.values[0][0])

    @property
    def optimal(self) -> list[Mask]:
        """[n_t, A]: the actions within `TIE` of the best."""
        return [q >= q.max(1, keepdims=True) - TIE for q in self.q]

    @property
    def law(self) -> list[Array]:
        """Uniform over the optimal actions."""
        return [best / best.sum(1, keepdims=True) for best in self.optimal]


def bayes(game: Game, returns: Returns) -> Solution:
    """Backward induction, eq. (11), for the sum of rewards ("cum"), the largest posterior mean at the end ("final"), the
    same less a price per pull with "stop" as last action (("cost", c)), and the entropy that the belief loses in nats
    ("info")."""
    kind, price = returns if isinstance(returns, tuple) else (returns, 0.0)
    if kind not in ("cum", "final", "cost", "info"):
        raise ValueError(f"returns {returns!r}: one of cum, final, info, (cost, price)")
    last = game.means(game.horizon).max(1)
    values: list[Array] = [last if kind in ("final", "cost") else np.zeros_like(last)]
    q: list[Array] = []
    for step in reversed(range(game.horizon)):
        m = game.means(step)
        after = values[0][game.children[step]]  # [n, K, 2]
        found = m * after[..., 0] + (1 - m) * after[..., 1]
        found += m if kind == "cum" else info_gain(game.counts[step]) if kind == "info" else -price
        if kind == "cost":
            found = np.concatenate([found, m.max(1, keepdims=True)], axis=1)
        q.insert(0, found)
        values.insert(0, found.max(1))
    return Solution(values, q)


def entropy(counts: ArrayLike) -> Array:
    """Differential entropy in nats of the belief: the sum over arms of that of Beta(1 + S, 1 + F). counts [..., K, 2]."""
    a, b = np.moveaxis(np.asarray(counts, float) + 1, -1, 0)
    psi = special.digamma
    each = special.betaln(a, b) - (a - 1) * psi(a) - (b - 1) * psi(b) + (a + b - 2) * psi(a + b)
    return np.asarray(each.sum(-1))


def info_gain(counts: ArrayLike) -> Array:
    """Expected loss of entropy in nats by pulling each arm, [..., K], of counts [..., K, 2]: the mutual information of
    the arm's mean and its next outcome."""
    counts = np.asarray(counts)
    arms = counts.shape[-2]
    m = (counts[..., 0] + 1) / (counts.sum(-1) + 2)
    grown = counts[..., None, None, :, :] + np.eye(2 * arms, dtype=np.int64).reshape(arms, 2, arms, 2)
    after = entropy(grown)  # [..., K, 2]
    return np.asarray(entropy(counts)[..., None] - m * after[..., 0] - (1 - m) * after[..., 1])


# ------------------------------------------------------------------------------------------------------ known policies


def law_of(name: str, game: Game, epsilon: float = 0.1) -> list[Array]:
    """The law of "ucb1", "thompson", "argmax-thompson", "greedy", "epsilon-greedy", "uniform", "round-robin", or of the
    Bayes policies "bayes-cum" and "bayes-final". Ties are uniform; counts decide, except that round-robin goes by t."""
    if name in ("bayes-cum", "bayes-final"):
        return bayes(game, name.removeprefix("bayes-")).law
    laws = {
        "ucb1": ucb1,
        "thompson": thompson,
        "argmax-thompson": lambda counts: best_of(thompson(counts)),
        "greedy": greedy,
        "epsilon-greedy": lambda counts: (1 - epsilon) * greedy(counts) + epsilon / game.arms,
        "uniform": lambda counts: np.full(counts.shape[:-1], 1 / game.arms),
        "round-robin": lambda counts: np.eye(game.arms)[counts.sum((-1, -2)) % game.arms],
    }
    return [laws[name](found) for found in game.counts[:-1]]


def best_of(scores: Array) -> Array:
    """The uniform law over the largest of `scores` [..., K]."""
    best = scores >= scores.max(-1, keepdims=True) - TIE
    return best / best.sum(-1, keepdims=True)


def greedy(counts: Ints) -> Array:
    """[..., K]: the largest posterior mean of counts [..., K, 2]."""
    return best_of((counts[..., 0] + 1) / (counts.sum(-1) + 2))


def ucb1(counts: Ints) -> Array:
    """[..., K] of counts [..., K, 2]: untried arms first, then the largest S/n + sqrt(2 ln t / n), t = pulls so far.
    Source: Auer et al. 2002."""
    pulls = counts.sum(-1)
    n, total = np.maximum(pulls, 1), np.maximum(pulls.sum(-1, keepdims=True), 1)
    scores = np.where(pulls == 0, np.inf, counts[..., 0] / n + np.sqrt(2 * np.log(total) / n))
    untried = pulls == 0
    first = untried / np.maximum(untried.sum(-1, keepdims=True), 1)
    return np.where(untried.any(-1, keepdims=True), first, best_of(np.where(untried, 0.0, scores)))


def thompson(counts: Ints) -> Array:
    """[..., K]: P(arm k has the largest mean) under Beta(1 + S, 1 + F), of counts [..., K, 2].

    The density of one arm times the distribution functions of the others is a polynomial of degree t + K - 1, which
    Gauss-Legendre integrates exactly."""
    pulls = int(counts.sum((-1, -2)).max(initial=0))
    nodes, weights = np.polynomial.legendre.leggauss((pulls + counts.shape[-2]) // 2 + 1)
    x = (nodes + 1) / 2
    a, b = (np.moveaxis(counts, -1, 0) + 1.0)[..., None]
    below = special.betainc(a, b, x)  # [..., K, nodes]
    density = np.exp((a - 1) * np.log(x) + (b - 1) * np.log1p(-x) - special.betaln(a, b))
    others = np.stack([np.delete(below, k, -2).prod(-2) for k in range(counts.shape[-2])], -2)
    return np.asarray((density * others) @ (weights / 2))


# ----------------------------------------------------------------------------------------------------- exact evaluation


def visits(law: Law, game: Game) -> list[Array]:
    """P(still playing and in row i before decision t), [n_t] for t = 0..H, when `law` acts and the arms come from the
    prior. A law with "stop" loses the mass that stops."""
    found: list[Array] = [np.ones(1)]
    for step in range(game.horizon):
        m = game.means(step)
        each = found[-1][:, None] * law[step][:, : game.arms]
        flow = np.stack([each * m, each * (1 - m)], -1)
        after = np.bincount(game.children[step].ravel(), flow.ravel(), len(game.counts[step + 1]))
        found.append(after.astype(np.float64))
    return found


def policy_value(law: Law, game: Game) -> tuple[float, float]:
    """(expected sum of rewards, expected largest posterior mean at the end or when it stops), exactly."""
    seen = visits(law, game)
    total, final = 0.0, float(seen[-1] @ game.means(game.horizon).max(1))
    for step in range(game.horizon):
        m = game.means(step)
        total += float(seen[step] @ (law[step][:, : game.arms] * m).sum(1))
        if law[step].shape[1] > game.arms:
            final += float((seen[step] * law[step][:, game.arms]) @ m.max(1))
    return total, final


def pulls(law: Law, game: Game) -> float:
    """Expected number of pulls; the horizon for a law without "stop". R_cost is final - price * pulls."""
    return sum(float(mass.sum()) for mass in visits(law, game)[1:])


def oracle_value(horizon: int, arms: int = 2) -> float:
    """Expected sum of rewards of one who knows the best arm: H E max of K uniforms."""
    return horizon * arms / (arms + 1)


def information(law: Law, game: Game) -> float:
    """E sum of the gains step by step, nats; it telescopes to entropy before less expected entropy after."""
    seen = visits(law, game)
    gains = [info_gain(game.counts[step]) for step in range(game.horizon)]
    return sum(float(seen[t] @ (law[t][:, : game.arms] * gains[t]).sum(1)) for t in range(game.horizon))


def tied(law: Law) -> list[Mask]:
    """[n_t]: rows where a deterministic rule does not decide, which its law shows as two equal largest probabilities.
    For laws that are stochastic by design (Thompson) that is only where it is indifferent."""
    return [np.asarray((found >= found.max(1, keepdims=True) - TIE).sum(1) > 1) for found in law]


def disagreement(one: Solution, other: Solution) -> list[Mask]:
    """[n_t]: rows where no action is optimal for both."""
    pairs = zip(one.optimal, other.optimal, strict=True)
    return [np.logical_not((mine & theirs).any(1)) for mine, theirs in pairs]


def distance(law: Law, reference: Law, game: Game, where: Sequence[Mask] | None = None) -> float:
    """Mean d_TV (with two arms: |difference of P(arm 1)|) of the laws over the rows that `law` itself visits, weighted by
    its visits, on the rows `where` [n_t]; absent: those where the reference is not tied. NaN where it visits none."""
    kept = [~mask for mask in tied(reference)] if where is None else where
    weights = [seen * mask for seen, mask in zip(visits(law, game)[:-1], kept, strict=True)]
    mass = sum(float(weight.sum()) for weight in weights)
    gaps = [np.abs(mine - theirs).sum(1) / 2 for mine, theirs in zip(law, reference, strict=True)]
    found = sum(float(weight @ gap) for weight, gap in zip(weights, gaps, strict=True))
    return found / mass if mass > TIE else float("nan")


class Bounds(NamedTuple):
    """Both sides of (4) and of (5), the latter for each return."""

    tv: float  # d_TV of the laws of whole episodes
    drift: float  # sum over t of delta_t, the reference's own expected d_TV: the right side of (4)
    cum_gap: float
    cum_bound: float
    final_gap: float
    final_bound: float


def closed_loop(reference: Law, law: Law, game: Game) -> Bounds:
    """Closed-loop bounds by enumeration; (4) speaks of whole episodes, so give a `context_game`."""
    ours, theirs = visits(reference, game), visits(law, game)
    drift, tv = 0.0, float(np.abs(ours[-1] - theirs[-1]).sum()) / 2
    for step, (p, q) in enumerate(zip(reference, law, strict=True)):
        drift += float(ours[step] @ np.abs(p - q).sum(1)) / 2
        if p.shape[1] > game.arms:
            tv += float(np.abs(ours[step] * p[:, -1] - theirs[step] * q[:, -1]).sum()) / 2
    one, other = policy_value(reference, game), policy_value(law, game)
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return Bounds(tv, drift, gaps[0], game.horizon * drift, gaps[1], drift)


# ------------------------------------------------------------------------------------ what a Transformer can carry


def constant_step(pulled: ArrayLike, rewards: ArrayLike, alpha: float, arms: int = 2) -> Array:
    """Q [T, K] after each of T pulls of Q <- Q + alpha (r - Q), from 0, by the recursion."""
    q = np.zeros(arms)
    trace = []
    for arm, reward in zip(np.asarray(pulled), np.asarray(rewards), strict=True):
        q[arm] += alpha * (reward - q[arm])
        trace.append(q.copy())
    return np.array(trace).reshape(-1, arms)


def constant_step_by_attention(pulled: ArrayLike, rewards: ArrayLike, alpha: float, arms: int = 2) -> Array:
    """The same [T, K] by two causal attention layers, eq. (6). Layer 1: t times the uniform average of one-hot arms is the
    running count N_i. Layer 2, one head an arm: softmax over its own pulls with logits -N_i ln(1 - alpha), times
    1 - (1 - alpha)^N; exactly 0 where the arm has no pull."""
    chosen = np.eye(arms)[np.asarray(pulled, int)]  # [T, K]
    values = np.asarray(rewards, float)
    length = len(values)
    causal = np.tril(np.ones((length, length)))
    position = np.arange(1, length + 1)[:, None]
    counts = position * ((causal / position) @ chosen)  # layer 1, [T, K]
    logits = np.where(chosen.astype(bool), -counts * np.log1p(-alpha), -np.inf).T[:, None, :]  # [K, 1, T]
    masked = np.where(causal[None].astype(bool), logits, -np.inf)  # [K, T queries, T keys]
    top = masked.max(-1, keepdims=True)
    weights = np.exp(masked - np.where(np.isfinite(top), top, 0.0))
    mass = weights.sum(-1)  # [K, T]
    read = (weights @ values) / np.where(mass > 0, mass, 1.0)
    return (read * (1 - (1 - alpha) ** counts.T)).T


def error_growth(lipschitz: float, epsilon: float, steps: int) -> Array:
    """The bounds e_0 = 0, ..., e_H of (7), [H + 1]: error of a state that is carried with one-step error epsilon."""
    t = np.arange(steps + 1)
    if lipschitz == 1:
        return epsilon * t.astype(float)
    return np.asarray(epsilon * (lipschitz**t - 1.0) / (lipschitz - 1.0))
