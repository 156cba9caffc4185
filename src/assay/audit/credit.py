"""What advantages should be, by the estimator that the file declares or that its own numbers follow.

The formulas are those of advantages.py, over all groups at once. One number per episode; episodes of a group that lacks
members are not compared: the statistic was taken with members that the file does not show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from assay.advantages import STD_FLOOR, TIE
from assay.audit.sheet import Bools, Reals, Sheet, reduce_rows

RELATIVE, ABSOLUTE = 5e-3, 1e-3  # bf16 keeps three digits
GROUP = {  # what people call it -> which of ours
    "grpo": "grpo",
    "dapo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "sapo": "grpo",
    "dr-grpo": "dr-grpo",
    "drgrpo": "dr-grpo",
    "rloo": "rloo",
}
WHITENED = {
    "reinforce++": "reinforce++",
    "reinforce-plus-plus": "reinforce++",
    "reinforce++-baseline": "reinforce++-baseline",
    "reinforce-plus-plus-baseline": "reinforce++-baseline",
}
VARIANTS = tuple((ddof, epsilon) for ddof in (1, 0) for epsilon in (1e-6, 1e-4, 1e-8, 0.0))  # verl, TRL, others


@dataclass(frozen=True, slots=True)
class Credit:
    """N samples, E episodes, G groups. NaN: not known or not to be compared."""

    low: Reals  # [N] smallest advantage over the trained tokens
    high: Reals  # [N] largest
    zero: Bools  # [N] trained tokens, and the advantage of each is exactly 0
    advantage: Reals  # [E] the one number of the episode; NaN where its tokens differ
    reward: Reals  # [E] what the estimator reads: the score, else the reward
    centred: Reals  # [E] reward minus group mean
    dead: Bools  # [E] of a complete group whose rewards are equal
    alone: Bools  # [E] the only one of its group
    expected: Reals  # [E] recomputed
    estimator: str  # "grpo", "dr-grpo", "rloo", or "": not one number per episode, as far as can be told
    variant: str  # in words
    declared: bool  # did the file say so


def estimator_of(s: Sheet) -> str:
    """The declared estimator, in our name of it where we have one."""
    name = str(s.declared.get("estimator") or "").lower().replace("_", "-")
    return GROUP.get(name) or WHITENED.get(name) or name


def credit(s: Sheet) -> Credit:
    return s.once(_credit)


def close(a: Reals, b: Reals) -> Bools:
    """Equal up to what half precision does to an advantage; False beside NaN."""
    return np.abs(a - b) <= ABSOLUTE + RELATIVE * np.abs(b)


def _credit(s: Sheet) -> Credit:
    episodes, advantages = s.episodes, s.tokens["advantages"]
    known = ~np.isnan(advantages)
    if s.trained is not None:
        known &= s.trained
    low = reduce_rows(np.minimum, np.where(known, advantages, np.inf), s.offsets, np.inf).astype(np.float64)
    high = reduce_rows(np.maximum, np.where(known, advantages, -np.inf), s.offsets, -np.inf).astype(np.float64)
    some = low <= high
    low[~some] = high[~some] = np.nan
    bottom = reduce_rows(np.fmin, low[episodes.order], episodes.start, np.nan)
    top = reduce_rows(np.fmax, high[episodes.order], episodes.start, np.nan)
    one = top - bottom <= 1e-6 + 1e-5 * np.abs(top)
    advantage = np.where(one, (top + bottom) / 2, np.nan)
    reward, centred, dead, alone = _centred(s)
    blank = Credit(
        low, high, some & (low == 0) & (high == 0), advantage, reward, centred, dead, alone,
        np.full(len(episodes), np.nan), "", "", False,
    )  # fmt: skip
    declared = estimator_of(s)
    names = [declared] if declared in GROUP.values() else [] if declared else ["grpo", "dr-grpo", "rloo"]
    return _fit(s, blank, names, bool(declared))


def _centred(s: Sheet) -> tuple[Reals, Reals, Bools, Bools]:
    """(reward, reward minus group mean, dead, alone), each [E]."""
    episodes = s.episodes
    name = "score" if s.has("score") else "reward"
    if not s.has(name):
        nothing = np.full(len(episodes), np.nan)
        return nothing, nothing, np.zeros(len(episodes), np.bool_), np.zeros(len(episodes), np.bool_)
    reward, clear = s.of_episodes(name)
    group, groups = episodes.group, len(episodes.names)
    used = (group >= 0) & np.isfinite(reward)
    size, count = episodes.size, np.bincount(group[used], minlength=groups)
    unclear = np.bincount(group[(group >= 0) & ~clear], minlength=groups) > 0
    whole = ~unclear & (size >= (s.expected_size or 0))
    mean = np.bincount(group[used], reward[used], groups) / np.maximum(count, 1)
    apart = _spread(group, reward, used, groups)
    inside = used.copy()
    inside[used] = (whole & (count > 1))[group[used]]
    centred = np.where(inside, reward - (mean[group] if groups else 0.0), np.nan)
    dead = inside & (apart[group] <= TIE if groups else False)
    alone = (group >= 0) & (size[group] == 1 if groups else False)
    return reward, np.where(dead, 0.0, centred), dead, alone


def _spread(group: NDArray[np.int64], reward: Reals, used: Bools, groups: int) -> Reals:
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, group[used], reward[used])
    np.maximum.at(high, group[used], reward[used])
    return high - low


def _fit(s: Sheet, c: Credit, names: list[str], declared: bool) -> Credit:
    """The variant of the estimators `names` that most live episodes follow; an undeclared one needs four fifths."""
    live = ~np.isnan(c.centred) & ~c.dead & ~np.isnan(c.advantage)
    best, best_count = None, -1
    for name in names:
        for variant, expected in _candidates(s, c, name):
            count = int(close(c.advantage, expected)[live].sum())
            if count > best_count:
                best, best_count = (name, variant, expected), count
    if best is None or (not declared and (live.sum() < 4 or best_count < 0.8 * live.sum())):
        return replace(c, declared=declared)
    return replace(c, estimator=best[0], variant=best[1], expected=best[2], declared=declared)


def _candidates(s: Sheet, c: Credit, name: str) -> list[tuple[str, Reals]]:
    """(in words, advantages [E]) of the forms that an estimator has in the field."""
    group, groups = s.episodes.group, len(s.episodes.names)
    used = ~np.isnan(c.centred)
    count = np.bincount(group[used], minlength=groups)
    if name == "dr-grpo":
        return [("dr-grpo", c.centred)]
    if name == "rloo":
        factor = count / np.maximum(count - 1, 1)
        return [("rloo", c.centred * (factor[group] if groups else 1.0))]
    squares = np.bincount(group[used], c.centred[used] ** 2, groups)
    found = []
    for ddof, epsilon in VARIANTS:
        std = np.maximum(np.sqrt(squares / np.maximum(count - ddof, 1)), STD_FLOOR) + epsilon
        words = f"grpo, std with {'G - 1' if ddof else 'G'}, epsilon {epsilon:g}"
        found.append((words, c.centred / (std[group] if groups else 1.0)))
    return found


def by_sample(s: Sheet, c: Credit) -> Reals:
    """[E] what comes out when each sample of an episode is counted in the statistic: long episodes count more."""
    episodes = s.episodes
    group, groups, weight = episodes.group, len(episodes.names), episodes.samples.astype(np.float64)
    used = ~np.isnan(c.centred)
    total = np.bincount(group[used], weight[used], groups)
    mean = np.bincount(group[used], (weight * c.reward)[used], groups) / np.maximum(total, 1)
    centred = np.where(used, c.reward - mean[group], np.nan)
    if c.estimator != "grpo":
        return centred
    squares = np.bincount(group[used], (weight * centred**2)[used], groups)
    return centred / (np.sqrt(squares / np.maximum(total - 1, 1))[group] + 1e-6)


def without_baseline(c: Credit) -> Bools:
    """[E] the advantage is the reward itself."""
    return close(c.advantage, c.reward) & (np.abs(c.advantage) > ABSOLUTE)
