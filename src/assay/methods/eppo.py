"""EPPO: clip bounds of several environments in one run, each scaled by how its entropy stands to the others'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import fsum, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.protocols import Method, Metrics, Setting, UserError
from assay.rows import Batch, Row, Stream, build_rows
from assay.trace import Trace

Array = NDArray[np.float64]

PACES = ("ratio", "tanh", "relative", "step")
SIDES = ("both", "high")
USUAL = 0.2  # the host's bound that eps_min and eps_max are given for (PPO's, arXiv 1707.06347)
DELTA = 1e-6  # nats, added to entropies before they are divided by one another
STEP_LOW, STEP_HIGH = 0.8, 1.25  # ratios of entropies beyond which pace "step" halves and doubles; ours
DEAD_BAND = 0.05  # of the reference entropy: two environments that are nearer have not crossed
SPIKE = 3.0  # standard deviations of an environment's increments
SPIKE_AFTER = 5  # increments before which their spread is not known well enough


class EPPO(Method):
    """Each environment of a run has clip bounds of its own: tight where the policy is sure, loose where it searches.

    The entropy of an environment is the mean over the sampled tokens of its episodes, smoothed over steps. Its ratio to
    the mean over environments scales the bounds of the host's clip, alike for all updates of a batch. An environment
    that is ahead is held back until the others have caught up; with equal entropies, or one environment, it is the host.

    alpha: strength of the pacing, the exponent of the ratio; 0 switches it off and only logs (ours: 1).
    eps_min: tightest bound, given for a host bound of 0.2 and scaled with the host's, 0 to 0.2 (ours: 0.05).
    eps_max: loosest bound, given for a host bound of 0.2 and scaled with the host's, from 0.2 (ours: 0.4).
    beta: share of its past that a smoothed entropy keeps per step, 0 to below 1; 0 reacts at once (ours: 0.9).
    pace: how entropies become bounds: ratio, tanh, relative (to each environment's first entropy) or step (ours: ratio).
    kappa: of pace tanh: largest relative change of a bound, 0 to below 1 (ours: 0.75).
    sides: which bounds are scaled: both, or high only (ours: both).
    preserve_budget: scale all bounds once more so that their mean is the host's, before the limits (ours: false).
    episode_mean: entropy of an environment as mean over episodes of token means, not over tokens (ours: false).
    swap: a control: each environment gets the bounds of the next one by name, which must not help (ours: false).
    """

    name = "eppo"
    paper = "arXiv 2607.07178, Entropy Pacing Policy Optimization for Multi-Task Agentic Reinforcement Learning"
    fidelity = "reconstruction"

    def __init__(
        self,
        alpha: float = 1.0,
        eps_min: float = 0.05,
        eps_max: float = 0.4,
        beta: float = 0.9,
        pace: str = "ratio",
        kappa: float = 0.75,
        sides: str = "both",
        preserve_budget: bool = False,
        episode_mean: bool = False,
        swap: bool = False,
    ) -> None:
        if not (alpha >= 0 and np.isfinite(alpha)):
            raise ValueError(f"alpha is a finite number, 0 or more, not {alpha!r}")
        if not 0 < eps_min <= USUAL:
            raise ValueError(
                f"eps_min is above 0 and at most {USUAL}, which stands for the host's bound, not {eps_min!r}"
            )
        if not USUAL <= eps_max < 1:
            raise ValueError(
                f"eps_max is at least {USUAL}, which stands for the host's bound, and below 1, not {eps_max!r}"
            )
        if not 0 <= beta < 1:
            raise ValueError(f"beta is 0 to below 1, not {beta!r}")
        if pace not in PACES:
            raise ValueError(f"pace is one of {', '.join(PACES)}, not {pace!r}")
        if not 0 <= kappa < 1:
            raise ValueError(f"kappa is 0 to below 1, not {kappa!r}")
        if sides not in SIDES:
            raise ValueError(f"sides is one of {', '.join(SIDES)}, not {sides!r}")
        self.alpha, self.beta, self.pace, self.kappa = alpha, beta, pace, kappa
        self.limits = eps_min / USUAL, eps_max / USUAL  # of a factor on the host's bounds
        self.sides, self.preserve_budget, self.episode_mean, self.swap = sides, preserve_budget, episode_mean, swap
        self.setting: Setting | None = None
        self.further: list[Row] = []  # of this step's dropped groups
        self.factors: dict[str, float] = {}  # of this batch, by environment
        self.tasks: dict[str, Pace] = {}
        self.order: dict[str, dict[str, int]] = {}  # a < b by name: 1 where a was above b when last apart, -1 below
        self.crossovers = 0

    def family(self, trace: Trace) -> str:
        """What shares one entropy and one bound; override it where one environment holds several kinds of tasks."""
        return trace.task.environment

    def bind(self, setting: Setting) -> Sequence[str]:
        self.setting = setting
        if self.alpha == 0:
            return ["alpha is 0: it scales no bound, and only logs"]
        warnings = []
        if not self._several:
            warnings.append("one environment: there is none to be paced against, and no bound is scaled")
        if setting.updates == 1:
            warnings.append(
                "one update per batch: every ratio is 1 and no bound is reached, so this is plain grpo: add "
                "--updates-per-batch 4"
            )
        return warnings

    @property
    def _several(self) -> bool:
        """More than one environment, or families of a subclass, which may be several in one."""
        return self.setting is None or len(self.setting.worlds) > 1 or type(self).family is not EPPO.family

    def rows(self, batch: Batch) -> list[Row]:
        """Default rows of the dropped groups: scored, as they too show how sure the policy is, and never trained."""
        self.further = []
        if self.alpha and self._several and self.setting is not None and self.setting.updates > 1:
            traces = [trace for group in batch.dropped for trace in group.learnable]
            self.further = build_rows(traces, self.setting.layout)
        return self.further

    def modulate(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """Entropies of this batch and the factors on the bounds, the same for all its updates; changes no column."""
        entropies, unknown = self._entropies([*(row for row in rows if not row.view), *self.further])
        for name, entropy in sorted(entropies.items()):
            if name in self.tasks:
                self.tasks[name].add(entropy, self.beta)
            else:
                self.tasks[name] = Pace(entropy, entropy, entropy)
        names = sorted(self.tasks)
        smoothed = [self.tasks[name].smoothed for name in names]
        first = [self.tasks[name].first for name in names]
        factors = pace_factors(
            smoothed, self.alpha, *self.limits, self.pace, self.kappa, first, preserve_budget=self.preserve_budget
        )
        self.factors = dict(zip(names, np.roll(factors, -self.swap).tolist(), strict=True))
        return self._metrics(dict(zip(names, smoothed, strict=True))) | {"eppo_rows_unknown": float(unknown)}

    def _entropies(self, rows: Iterable[Row]) -> tuple[dict[str, float], int]:
        """(entropy of each family that has a known one, rows left out because one of their entropies is not known)."""
        parts: dict[str, dict[str, list[tuple[float, int]]]] = {}  # family -> trace -> (sum, tokens) of its rows
        unknown = 0
        for row in rows:
            known = row.columns["entropy"]
            if np.isfinite(known).all():
                own = parts.setdefault(self.family(row.trace), {}).setdefault(row.trace.key, [])
                own.append((float(np.sum(known, dtype=np.float64)), len(known)))
            else:
                unknown += 1
        return {name: task_entropy(episodes.values(), self.episode_mean) for name, episodes in parts.items()}, unknown

    def _metrics(self, smoothed: Mapping[str, float]) -> Metrics:
        if not smoothed:
            return {}
        if not self._several:
            return {"eppo_entropy": next(iter(smoothed.values()))}
        reference = float(np.mean(list(smoothed.values())))
        self.crossovers += crossings(smoothed, self.order, DEAD_BAND * reference)
        gap = max(smoothed.values()) - min(smoothed.values())
        spikes = sum(task.spikes for task in self.tasks.values())
        metrics = {f"eppo_entropy[{name}]": value for name, value in smoothed.items()} | {
            "eppo_gap": gap,
            "eppo_gap_relative": gap / reference if reference > 0 else 0.0,
            "eppo_crossovers": float(self.crossovers),
            "eppo_spikes": float(spikes),
        }
        return metrics | ({"eppo_spike": sum(t.excess for t in self.tasks.values()) / spikes} if spikes else {})

    def streams(self, rows: Sequence[Row], streams: list[Stream], progress: float) -> list[Stream]:
        """The bounds of every policy stream that has them, one per row."""
        policy = [stream for stream in streams if stream.loss.partition(":")[0] == "policy"]
        bounded = [stream for stream in policy if "high" in stream.constants]
        if policy and not bounded and self.alpha:
            raise UserError(
                f"eppo: stream {policy[0].name!r} has loss {policy[0].loss!r}, which has no bounds that it could scale: "
                "use --slots.gate ppo, or leave eppo out"
            )
        for stream in bounded:
            high = stream.constants["high"]
            if isinstance(high, float):
                for name, factor in self.factors.items():
                    stream.metrics[f"eppo_bound[{name}]" if self._several else "eppo_bound"] = high * factor
            each = np.array([self.factors.get(self.family(row.trace), 1.0) for row in stream.rows])
            if np.any(each != 1.0):
                scaled = {"high": high} | ({"low": stream.constants["low"]} if self.sides == "both" else {})
                scaled = {name: np.asarray(bound * each, np.float32) for name, bound in scaled.items()}
                stream.constants = stream.constants | scaled
        return streams

    def state_dict(self) -> dict[str, Any]:
        tasks = {name: asdict(task) for name, task in self.tasks.items()}
        order = {a: dict(below) for a, below in self.order.items()}
        return {"tasks": tasks, "order": order, "crossovers": self.crossovers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tasks = {name: Pace(**task) for name, task in state["tasks"].items()}
        self.order = {a: dict(below) for a, below in state["order"].items()}
        self.crossovers = state["crossovers"]


@dataclass(slots=True)
class Pace:
    """Entropies of one environment over the steps that had it, nats: smoothed, first, last; how its increments spread
    (Welford's sums); spikes so far, and the sum of how far they stood out."""

    smoothed: float
    first: float
    last: float
    increments: int = 0
    mean: float = 0.0
    squares: float = 0.0
    spikes: int = 0
    excess: float = 0.0

    def add(self, entropy: float, beta: float) -> None:
        above = entropy - self.smoothed
        if self.increments >= SPIKE_AFTER and above > SPIKE * sqrt(self.squares / (self.increments - 1)):
            self.spikes += 1
            self.excess += above
        increment, self.last = entropy - self.last, entropy
        self.increments += 1
        off = increment - self.mean
        self.mean += off / self.increments
        self.squares += off * (increment - self.mean)
        self.smoothed = beta * self.smoothed + (1.0 - beta) * entropy


def task_entropy(episodes: Iterable[Sequence[tuple[float, int]]], episode_mean: bool = False) -> float:
    """Entropy of one environment in a batch, nats: over all sampled tokens, or the mean over episodes of token means.

    The sums are correctly rounded, so that order, layout and cut of the rows give the same bits but for the rounding
    of each row's own sum.

    Args:
      episodes: per episode the (sum of token entropies, tokens) of its rows.
    """
    sums = [(fsum(total for total, _ in parts), sum(tokens for _, tokens in parts)) for parts in episodes]
    if episode_mean:
        return fsum(total / tokens for total, tokens in sums) / len(sums)
    return fsum(total for total, _ in sums) / sum(tokens for _, tokens in sums)


def pace_factors(
    entropies: ArrayLike,
    alpha: float = 1.0,
    lowest: float = 0.25,
    highest: float = 2.0,
    pace: str = "ratio",
    kappa: float = 0.75,
    first: ArrayLike | None = None,
    preserve_budget: bool = False,
    delta: float = DELTA,
) -> Array:
    """Factors on the clip bound of K environments: `rho^alpha`, `rho = (m + delta) / (mean m + delta)`, [K].

    Source: ours, for the mechanism that EPPO's abstract describes (arXiv 2607.07178): below 1 for an environment of low
    entropy, above 1 for one of high entropy. Exactly 1 for equal entropies and for alpha 0.

    Args:
      entropies: [K] smoothed entropies m, any unit.
      alpha: 0 or more; at 1 the mean factor is 1 before the limits.
      lowest, highest: limits of a factor.
      pace: "ratio"; "relative", the same with `m / first` in place of m; "tanh", `1 + kappa tanh(alpha (m - mean m) /
        (std m + delta))`; "step", `2^-alpha` where rho is below 0.8, `2^alpha` where it is above 1.25, else 1.
      first: [K] first entropy of each environment, for "relative".
      preserve_budget: divide by the mean factor before the limits.
    """
    m = np.asarray(entropies, np.float64)
    if pace == "relative":
        if first is None:
            raise ValueError("pace 'relative' needs `first`, the first entropy of each environment")
        m = (m + delta) / (np.asarray(first, np.float64) + delta)
    if m.size == 0 or alpha == 0 or m.max() == m.min():
        return np.ones(m.shape)
    rho = (m + delta) / (m.mean() + delta)
    if pace == "tanh":
        factors = 1.0 + kappa * np.tanh(alpha * (m - m.mean()) / (m.std() + delta))
    elif pace == "step":
        factors = 2.0 ** (alpha * ((rho > STEP_HIGH).astype(float) - (rho < STEP_LOW)))
    else:
        factors = rho**alpha
    if preserve_budget:
        factors = factors / factors.mean()
    return np.clip(factors, lowest, highest)


def crossings(levels: Mapping[str, float], order: dict[str, dict[str, int]], band: float) -> int:
    """How many pairs have changed sides since they were last more than `band` apart; brings `order` up to date.

    Without a band, curves that coincide cross all the time, and a method that makes them coincide would look worse.
    """
    found = 0
    for a, b in combinations(sorted(levels), 2):
        apart = levels[a] - levels[b]
        if abs(apart) > band:
            side = 1 if apart > 0 else -1
            found += order.setdefault(a, {}).get(b, side) != side
            order[a][b] = side
    return found
