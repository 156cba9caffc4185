"""Bandit: pull arms that pay 1 or 0 with hidden probabilities. The optimum is exact, for every return that can be chosen.

    observation "5 left"   action "2"   observation "2: 1, 4 left" (arm 2 paid 1, 4 pulls left)   action "arm 2"

Which return is paid decides what is learnt: collecting ("cum"), finding the best arm ("final"), finding it cheaply ("cost"),
or imitating a learner ("process"). An episode is a function of task and actions: what an arm pays at a turn is drawn by
(task, turn, arm). The bridge from our reading of "Agentic In-Context Learning" to language models.

Left out: arms that change, contexts, rewards other than 0 and 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from assay.bandits import Array, bayes, count_game, law_of
from assay.envs.base import TRIES, TextEnv, bucket, check_task
from assay.protocols import UserError
from assay.rng import digest, generator, stable_hash

RETURNS = ("cum", "final", "cost", "process")
REFERENCES = ("ucb1", "greedy", "argmax-thompson", "bayes-cum", "bayes-final")
MOST_ARMS = 5
STATES = 400_000  # counts up to which the optimum is computed
STOP = "stop"
PULL = re.compile(r"(?:arm\s*)?([1-9])")
Counts = tuple[tuple[int, int], ...]  # successes and failures by arm


class Bandit(TextEnv):
    """Bandit.

    arms        2 to 5 arms; "train" and "iid" draw each probability from Beta(1, 1)
    horizon     pulls of an episode
    returns     "cum": each pull pays what the arm pays; "final": at the end, the posterior mean of the recommended arm;
                "cost": the same less `price` per pull, and the action "stop" ends the episode; "process": 1 / horizon for
                each pull that `reference` might do too
    price       of a pull, for "cost"
    reference   for "process": ucb1, greedy, argmax-thompson, bayes-cum or bayes-final
    ood_prior   (a, b): "ood" draws from Beta(a, b), by default arms that pay less often

    The recommended arm has the largest posterior mean under Beta(1, 1), also in "ood"; the first of equals. "final" pays
    that mean, which is the expected payment of the recommended arm given all that was seen: no luck of one more pull.
    **Success** is that the recommended arm is the best one, for every return; "cum" does not reward that directly.
    Raises UserError for settings out of range.
    """

    skills = (*(f"arm {k}" for k in range(1, MOST_ARMS + 1)), STOP)
    brief = "bandit"

    def __init__(
        self,
        arms: int = 2,
        horizon: int = 10,
        returns: str = "cum",
        price: float = 0.01,
        reference: str = "ucb1",
        ood_prior: Sequence[float] = (1.0, 3.0),
    ) -> None:
        super().__init__(observation_length=64, action_length=64)
        if not 2 <= arms <= MOST_ARMS:
            raise UserError(f"bandit: arms is {arms}; it must be 2 to {MOST_ARMS}")
        if not 1 <= horizon <= 1000 or math.comb(horizon + 2 * arms, 2 * arms) > STATES:
            raise UserError(
                f"bandit: horizon is {horizon}; with {arms} arms it must be 1 to {_longest(arms)}, for the exact optimum"
            )
        if returns not in RETURNS:
            raise UserError(f"bandit: returns is {returns!r}; it must be one of {', '.join(RETURNS)}")
        if not 0 <= price <= 1:
            raise UserError(f"bandit: price is {price}; it must be 0 to 1")
        if reference not in REFERENCES:
            raise UserError(f"bandit: reference is {reference!r}; it must be one of {', '.join(REFERENCES)}")
        if len(ood_prior) != 2 or not all(0.01 <= value <= 100 for value in ood_prior):
            raise UserError(f"bandit: ood_prior is {list(ood_prior)}; it must be two numbers from 0.01 to 100")
        self.arms, self.horizon, self.returns = arms, horizon, returns
        self.price, self.reference = price, reference
        self.ood_prior = (float(ood_prior[0]), float(ood_prior[1]))
        self.version = stable_hash(f"1 {arms} {horizon} {returns} {price} {reference} {self.ood_prior}")
        aims = {
            "cum": "Collect as much as you can.",
            "final": "What you collect does not count: find out which arm pays most often.",
            "cost": f'Find out which arm pays most often. A pull costs {price}; answer "{STOP}" when you know enough.',
            "process": f"Pull as the learner {reference} would.",
        }
        self.instructions = (
            f"There are {arms} arms. Each pays 1 with its own hidden probability, else 0. Answer with the number of the arm "
            f"to pull. Each turn shows the arm that you pulled, what it paid, and how many pulls are left. {aims[returns]}"
        )
        self._means: tuple[float, ...] = ()
        self._task = ("train", 0)
        self._counts: Counts = ()
        self._turn = 0
        self._matched = 0  # actions that the expert's law allows
        self._done = True

    # ------------------------------------------------------------------------------------------------ generator

    def means(self, split: str, task: int) -> tuple[float, ...]:
        """The arms' probabilities: a pure function of (arms, ood_prior, split, id)."""
        check_task("bandit", task)
        prior = self.ood_prior if split == "ood" else (1.0, 1.0)
        for attempt in range(TRIES):
            found = tuple(generator(0, "bandit", split, task, attempt).beta(*prior, self.arms).tolist())
            if split == "ood" or bucket(stable_hash(repr(found))) == split:
                return found
        raise AssertionError("one hash in five is iid")

    def _pays(self, arm: int) -> bool:
        draw = int.from_bytes(digest("bandit", "pays", *self._task, self._turn, arm)[:6], "little") / (1 << 48)
        return draw < self._means[arm]

    # ------------------------------------------------------------------------------------------------ gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._task = self.pick(seed, options)
        self._means = self.means(*self._task)
        self._counts, self._turn, self._matched, self._done = ((0, 0),) * self.arms, 0, 0, False
        observation = f"{self.horizon} left"
        info = {
            "hash": stable_hash(repr(self._means)),
            "goal": "",
            "horizon": self.horizon,
            "admissible": self._admissible(),
            "anchor": self.anchor(observation),
        }
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._running()
        text = action.strip().lower()
        match = PULL.fullmatch(text)
        arm = int(match[1]) - 1 if match and int(match[1]) <= self.arms else -1
        stops = text == STOP and self.returns == "cost"
        column = self.arms if stops else arm
        matches = column >= 0 and bool(self._law()[column] > 0)
        self._matched += matches
        reward, shown = 0.0, "none"
        if arm >= 0:
            paid = self._pays(arm)
            won, lost = self._counts[arm]
            grown = (won + paid, lost + (not paid))
            self._counts = (*self._counts[:arm], grown, *self._counts[arm + 1 :])
            reward = {"cum": float(paid), "cost": -self.price, "process": matches / self.horizon}.get(self.returns, 0.0)
            shown = f"{arm + 1}: {int(paid)}"
        self._turn += 1
        self._done = stops or self._turn >= self.horizon
        if self._done and self.returns in ("final", "cost"):
            reward += max(self._posterior())
        observation = f"{STOP if stops else shown}, {self.horizon - self._turn} left"
        info = {
            "valid": column >= 0,
            "success": self._done and self._means[self._recommended()] == max(self._means),
            "anchor": self.anchor(observation),
            "skill": STOP if stops else f"arm {arm + 1}" if arm >= 0 else "other",
            "noop": column < 0,
            "admissible": self._admissible(),
        }
        return observation, reward, self._done, False, info

    def _admissible(self) -> list[str]:
        return [*(str(k + 1) for k in range(self.arms)), *([STOP] if self.returns == "cost" else [])]

    def _posterior(self) -> list[float]:
        return [(won + 1) / (won + lost + 2) for won, lost in self._counts]

    def _recommended(self) -> int:
        return int(np.argmax(self._posterior()))

    def _running(self) -> None:
        if self._done:
            raise UserError("bandit: no episode is running: call reset() before step() or expert()")

    # --------------------------------------------------------------------------------------------------- powers

    def _law(self) -> Array:
        """What the expert might do here, [arms] or [arms + 1] with "stop" last. Pulls that were wasted shorten its game."""
        pulled = sum(map(sum, self._counts))
        laws, rows = _expert(self.arms, pulled + self.horizon - self._turn, self.returns, self.price, self.reference)
        return laws[pulled][rows[pulled][self._counts]]

    def expert(self) -> str:
        """The Bayes-optimal action for the return, from the counts and the pulls that are left; for "process" the
        reference's. Equals are drawn by (task, turn), for a fixed choice would teach to prefer arm 1."""
        self._running()
        choices = np.flatnonzero(self._law())
        draw = int.from_bytes(digest("bandit", "expert", *self._task, self._turn)[:6], "little")
        return self._admissible()[choices[draw % len(choices)]]

    def snapshot(self) -> tuple[Any, ...]:
        return self._task, self._means, self._counts, self._turn, self._matched, self._done

    def restore(self, state: tuple[Any, ...]) -> None:
        self._task, self._means, self._counts, self._turn, self._matched, self._done = state

    def evidence(self) -> dict[str, Any]:
        """The recommendation, the regret of the pulls so far (in expected payments), and the expert's agreement; `gold`
        are the hidden probabilities."""
        if not self._means:
            raise UserError("bandit: no episode has begun: call reset() before evidence()")
        where, best = f"turn {self._turn}", max(self._means)
        arm, n = self._recommended(), [sum(one) for one in self._counts]
        regret = sum(pulls * (best - mean) for pulls, mean in zip(n, self._means, strict=True))
        checks = [
            {"name": "best arm recommended", "passed": self._means[arm] == best, "where": where, "value": arm + 1},
            {"name": "no regret", "passed": regret == 0, "where": where, "value": regret},
            {"name": "as the expert", "passed": self._matched == self._turn, "where": where, "value": self._matched},
            {"name": "optimal value", "passed": True, "where": "episode", "value": self.optimum()},
        ]
        return {"checks": checks, "gold": [f"{mean:.3f}" for mean in self._means]}

    def optimum(self) -> float:
        """Expected return of the best policy, exactly; for "process" 1, which the reference gets."""
        if self.returns == "process":
            return 1.0
        returns = ("cost", self.price) if self.returns == "cost" else self.returns
        return bayes(count_game(self.horizon, self.arms), returns).value


@lru_cache(maxsize=64)
def _expert(
    arms: int, horizon: int, returns: str, price: float, reference: str
) -> tuple[list[Array], list[dict[Counts, int]]]:
    """Laws of the expert by step, and the row of each tuple of counts."""
    game = count_game(horizon, arms)
    if returns == "process":
        laws = law_of(reference, game)
    else:
        laws = bayes(game, ("cost", price) if returns == "cost" else returns).law
    rows = [
        {tuple((won, lost) for won, lost in state): i for i, state in enumerate(counts.tolist())}
        for counts in game.counts[:-1]
    ]
    return laws, rows


def _longest(arms: int) -> int:
    return max(h for h in range(1, 200) if math.comb(h + 2 * arms, 2 * arms) <= STATES)
