"""A31x: advantages against the rewards and groups that they come from."""

from __future__ import annotations

import numpy as np

from assay.advantages import TIE, whiten
from assay.audit.credit import GROUP, WHITENED, Credit, by_sample, close, credit, estimator_of, without_baseline
from assay.audit.sheet import Bools, Found, Indices, Sheet, share

BY_STEP = ("gae", "ppo", "turn-gae", "ppo-turn", "gigpo", "hgpo")  # where samples of one episode differ
NOT_GROUPED = (*WHITENED.values(), *BY_STEP)  # where the group mean says nothing about zero or sign


def _grouped(s: Sheet) -> bool:
    return estimator_of(s) not in NOT_GROUPED


def _zero_samples(s: Sheet, c: Credit) -> Bools:
    """[N] samples of zero advantage where the rewards of the group differ, or where another sample of the episode has one."""
    episode = s.episodes.of
    wrong = np.zeros(s.n, np.bool_)
    if _grouped(s):
        wrong |= c.zero & (np.abs(c.centred[episode]) > TIE)
    if estimator_of(s) not in BY_STEP:
        credited = np.bincount(episode[~c.zero & ~np.isnan(c.low)], minlength=len(s.episodes)) > 0
        wrong |= c.zero & credited[episode]
    return wrong & ~s.evaluation


def zero_advantage(s: Sheet) -> list[Found]:
    c = credit(s)
    wrong = _zero_samples(s, c)
    at = np.flatnonzero(wrong)
    if not len(at):
        return []
    episodes = s.episodes
    steps = np.flatnonzero(wrong & (episodes.samples[episodes.of] > 1))
    sentence = f"{share(len(at), s.n)} samples have advantage 0 on every trained token though the rewards of their group differ"
    advice = "give every sample of an episode the episode's advantage"
    if len(steps):
        own = episodes.samples[np.unique(episodes.of[steps])]
        sentence = (
            f"{share(len(at), s.n)} samples have advantage 0 though their episode is credited: of episodes with "
            f"{int(own.min())} to {int(own.max())} samples, only some got the advantage"
        )
        last = np.isin(episodes.last[np.unique(episodes.of[steps])], at)
        if not last.any():
            advice = "only the last sample of each episode is credited: spread its advantage over all its samples"
    if s.cut[at].all():  # an overlong filter by way of the advantage
        return [Found(sentence + "; all of them were cut", len(at), s.at_samples(at), "", "note")]
    return [Found(sentence, len(at), s.at_samples(at), advice)]


def advantage_of_equals(s: Sheet) -> list[Found]:
    c = credit(s)
    if not _grouped(s) or not c.estimator:
        return []
    wrong = np.flatnonzero(c.dead & (np.abs(np.nan_to_num(c.advantage)) > 1e-6))
    if not len(wrong):
        return []
    largest = float(np.abs(c.advantage[wrong]).max())
    groups = np.unique(s.episodes.group[wrong])
    sentence = (
        f"{len(groups):,} groups of equal rewards have advantages up to {largest:.3g}, where {c.estimator} gives 0"
    )
    advice = "subtract the mean of the same group; floor the std, else rounding of 1e-7 becomes an advantage"
    sure = c.declared and s.has("score")
    return [Found(sentence, len(groups), s.at_groups(groups), advice, "error" if sure else "warning")]


def same_everywhere(s: Sheet) -> list[Found]:
    c = credit(s)
    known = ~np.isnan(c.low)
    if known.sum() < 4 or not np.ptp(c.low[known]) == 0 == np.ptp(c.high[known]) or c.low[known][0] != c.high[known][0]:
        return []
    value = float(c.low[known][0])
    if value == 0:
        return []  # told where rewards differ, or as rewards that do not
    sentence = (
        f"the advantage is {value:g} on every trained token of all {int(known.sum()):,} samples: it is no comparison"
    )
    return [Found(sentence, int(known.sum()), (), "is a baseline subtracted at all?")]


def varies_inside(s: Sheet) -> list[Found]:
    """Where the estimator gives an episode one number, its tokens have one."""
    c = credit(s)
    declared = estimator_of(s) in GROUP.values()
    if not declared and not c.estimator:
        return []
    flags = _uneven(s, c)
    at = np.flatnonzero(flags)
    if not len(at):
        return []
    widest = float(np.nan_to_num(c.high - c.low)[at].max())
    name = estimator_of(s) or c.estimator
    which, by = ("inside", f", by up to {widest:.3g},") if widest else ("between the samples of an episode in", "")
    sentence = f"advantages differ {which} {share(len(at), s.n)} samples{by} where {name} gives an episode one number"
    advice = "spread one number over the episode's tokens; a mask shifted by one shows like this too"
    return [Found(sentence, len(at), s.at_samples(at), advice)]


def _uneven(s: Sheet, c: Credit) -> Bools:
    inside = c.high - c.low > 1e-5 * np.maximum(1, np.abs(c.high))
    episode = s.episodes.of
    across = np.isnan(c.advantage)[episode] & ~np.isnan(c.low) & ~inside
    blamed = np.bincount(episode[inside], minlength=len(s.episodes)) > 0
    zeroed = np.bincount(episode[_zero_samples(s, c)], minlength=len(s.episodes)) > 0
    return (inside | (across & ~blamed[episode])) & ~zeroed[episode]


def opposite_sign(s: Sheet) -> list[Found]:
    c = credit(s)
    if not _grouped(s):
        return []
    wrong = _opposite(c) & ~s.evaluation[s.episodes.first]
    at = np.flatnonzero(wrong)
    if not len(at):
        return []
    known = int((~np.isnan(c.centred) & ~np.isnan(c.advantage)).sum())
    sure = bool(c.estimator) or estimator_of(s) in GROUP.values()
    sentence = (
        f"{share(len(at), known)} rollouts have an advantage whose sign is opposite to reward minus group mean: "
        "the update pushes the better ones down"
    )
    advice = "is the reward a cost? Do rewards and advantages stand in the same order?"
    return [Found(sentence, len(at), s.at_episodes(at), advice, "error" if sure and s.has("score") else "warning")]


def _opposite(c: Credit) -> Bools:
    return (c.advantage * c.centred < 0) & (np.abs(c.centred) > 1e-4) & (np.abs(c.advantage) > 1e-4)


def recomputed(s: Sheet) -> list[Found]:
    """The declared estimator (or the one that most groups follow) against the advantages that are there."""
    if estimator_of(s) in WHITENED.values():
        return _whitened(s)
    c = credit(s)
    if not c.estimator:
        return []
    told = _opposite(c) | (np.bincount(s.episodes.of[_zero_samples(s, c)], minlength=len(s.episodes)) > 0)
    compared = ~np.isnan(c.expected) & ~np.isnan(c.advantage) & ~c.dead & ~told
    wrong = compared & ~close(c.advantage, c.expected)
    groups = np.unique(s.episodes.group[wrong])
    if not len(groups):
        return _raw(s, c)
    largest = float(np.abs(c.advantage - c.expected)[wrong].max())
    total = len(np.unique(s.episodes.group[compared]))
    sentence = (
        f"advantages of {share(len(groups), total)} groups are not what {c.variant} makes of their rewards; the largest "
        f"difference is {largest:.3g}"
    )
    return [Found(sentence, len(groups), s.at_groups(groups), _cause(s, c, wrong), _certainty(s, c, wrong, compared))]


def _certainty(s: Sheet, c: Credit, wrong: Bools, compared: Bools) -> str:
    """Shaping that the file does not show can explain all groups, not a few of many."""
    most_agree = 2 * wrong.sum() < compared.sum()
    return "error" if c.declared and (s.has("score") or most_agree) else "warning"


def _cause(s: Sheet, c: Credit, wrong: Bools) -> str:
    if close(c.advantage, by_sample(s, c))[wrong].mean() > 0.9:
        return (
            "they follow if each sample is counted, not each episode: count an episode once however many samples it has"
        )
    if without_baseline(c)[wrong].mean() > 0.9:
        return "they are the raw rewards: no baseline was subtracted"
    size = c.advantage[wrong] / c.expected[wrong]
    if np.isfinite(size).all() and np.ptp(size) < 0.02 * abs(size.mean()):
        return (
            f"they are {size.mean():.3g} times what is expected: is the std there once, or twice, or of other rewards?"
        )
    return "recompute them from the group's rewards; is every rollout counted once, in its own group?"


def _raw(s: Sheet, c: Credit) -> list[Found]:
    """Groups of one keep the raw reward in some trainers: REINFORCE without a baseline."""
    at = np.flatnonzero(c.alone & without_baseline(c))
    if not len(at):
        return []
    sentence = (
        f"{share(len(at), len(s.episodes))} rollouts are alone in their group and have their raw reward as advantage"
    )
    return [
        Found(
            sentence, len(at), s.at_episodes(at), "a group of one has no baseline: its advantage should be 0", "warning"
        )
    ]


def _whitened(s: Sheet) -> list[Found]:
    """Mean 0 and variance 1 over the trained tokens; and, where each episode has one number, a line in the reward."""
    c = credit(s)
    advantages = s.tokens["advantages"]
    known = np.isfinite(advantages) if s.trained is None else np.isfinite(advantages) & s.trained
    values = advantages[known].astype(np.float64)
    if len(values) < 8 or np.ptp(values) <= TIE:
        return []
    mean, std = float(values.mean()), float(values.std(ddof=1))
    if abs(mean) <= 0.02 and abs(std - 1) <= 0.02:
        return []
    sentence = (
        f"advantages have mean {mean:.3f} and std {std:.3f} over {len(values):,} trained tokens, "
        "where whitening gives 0 and 1"
    )
    scored = np.flatnonzero(np.isfinite(c.reward) & ~np.isnan(c.advantage))
    tokens = np.bincount(s.episodes.of, s.trained_count, len(s.episodes)).astype(np.int64)
    if estimator_of(s) == "reinforce++" and len(scored) == len(s.episodes) and tokens.min() > 0:
        expected = np.array([v[0] for v in whiten([np.full(tokens[e], c.reward[e]) for e in scored])])
        sentence += f"; the largest difference from the whitened rewards is {np.abs(expected - c.advantage).max():.3g}"
    worst: Indices = np.argsort(-np.abs(np.nan_to_num(c.low)), kind="stable")
    advice = "whiten over the sampled tokens of the whole batch: no padding, no prompt, not each micro-batch apart"
    return [Found(sentence, len(values), s.at_samples(worst[:5]), advice, "warning")]
