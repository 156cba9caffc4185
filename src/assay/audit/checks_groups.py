"""A30x: who is compared with whom."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from assay.audit.credit import GROUP, estimator_of
from assay.audit.sheet import ERROR_OUTCOMES, Found, Indices, Reals, Sheet, reduce_rows, share

CHANCE = 1e-6  # expected number of equal pairs in a group below which they are no coincidence
LONG_ANSWER = 64  # sampled tokens that two rollouts do not share by chance, where no log-prob tells


def mixed_tasks(s: Sheet) -> list[Found]:
    task, by = s.task_of
    group = s.episodes.group
    known = (group >= 0) & (task >= 0)
    if by != "task" and (not known.any() or np.bincount(task[known]).max() < 2):
        return []  # no prompt comes twice: it holds something random, and tells no task
    pairs = np.unique(np.stack([group[known], task[known]], 1), axis=0)
    tasks = np.bincount(pairs[:, 0], minlength=len(s.episodes.names))
    mixed = np.flatnonzero(tasks > 1)
    if not len(mixed):
        return []
    what = "tasks" if by == "task" else "prompts"
    sentence = (
        f"{share(len(mixed), int((tasks > 0).sum()))} groups hold rollouts of different {what}, up to {int(tasks.max())} in "
        "one: the baseline compares what cannot be compared"
    )
    advice = (
        "give every rollout of one task, and no other, one group id; sort by it before any reshape to [tasks, rollouts]"
    )
    return [Found(sentence, len(mixed), s.at_groups(mixed), advice, "error" if by == "task" else "warning")]


def scattered(s: Sheet) -> list[Found]:
    """Rollouts of one task, each in a group of its own."""
    estimator = estimator_of(s)
    if estimator and estimator not in GROUP.values() and estimator != "reinforce++-baseline":
        return []  # nothing is compared inside groups
    episodes, (task, _) = s.episodes, s.task_of
    size = episodes.size
    lone = (episodes.group >= 0) & (task >= 0) & (size[episodes.group] == 1) & ~s.evaluation[episodes.first]
    times = np.bincount(task[lone], minlength=int(task.max(initial=0)) + 1)
    at = np.flatnonzero(lone & (times[task] > 1))
    if not len(at):
        return []
    tasks = int((times > 1).sum())
    sentence = (
        f"{share(len(at), len(episodes))} rollouts stand in groups of one although their tasks ({tasks:,} of them) have "
        "further rollouts: there is no baseline, so the update is REINFORCE on the raw reward, or nothing"
    )
    advice = "make the group id from the task, not from the request or the rollout"
    return [Found(sentence, len(at), s.at_episodes(at), advice, "error" if estimator else "warning")]


def wrong_size(s: Sheet) -> list[Found]:
    size, expected = s.episodes.size, s.expected_size
    if expected is None or not len(size) or expected < 2:
        return []
    declared = s.declared.get("rollouts_per_task") is not None
    said = f"{expected} declared" if declared else f"{expected} in most"
    found = []
    large = np.flatnonzero(size > expected)
    if len(large):
        sentence = f"{share(len(large), len(size))} groups have more rollouts than the {said}, up to {int(size.max())}"
        advice = "are ids reused between steps, workers or tasks? Put the step into the group id"
        found.append(Found(sentence, len(large), s.at_groups(large), advice, "error" if declared else "warning"))
    lone = np.flatnonzero((size == 1) & (expected > 2))
    lone = lone[~np.isin(lone, _told_groups(s))]
    if len(lone):
        sentence = f"{share(len(lone), len(size))} groups have one rollout where {said} groups are the rule: nothing to compare"
        found.append(
            Found(sentence, len(lone), s.at_groups(lone), "drop such groups, or sample the missing members anew")
        )
    short = np.flatnonzero((size < expected) & (size > 0))
    short = short[~np.isin(short, lone)]
    if len(short):
        least = int(size[short].min())
        sentence = f"{share(len(short), len(size))} groups have fewer rollouts than the {said}, down to {least}"
        advice = "say why members were left out (environment errors, filters); statistics over fewer are noisier"
        found.append(Found(sentence, len(short), s.at_groups(short), advice, "note"))
    return found


def _told_groups(s: Sheet) -> Indices:
    """Groups with a member that says that its environment failed."""
    failed = s.among("outcome", ERROR_OUTCOMES)[s.episodes.first]
    return np.unique(s.episodes.group[failed])


def duplicates(s: Sheet) -> list[Found]:
    """The same ids twice in a group, where the sampled answer is too long or too unlikely for chance."""
    if s.evaluation.all():
        return []
    ids, episodes = s.tokens["ids"], s.episodes
    surprise = _surprise(s)
    same: dict[tuple[int, bytes], list[int]] = {}
    for e in np.flatnonzero((episodes.group >= 0) & (episodes.size[episodes.group] > 1)):
        own = episodes.order[episodes.start[e] : episodes.start[e + 1]]
        text = b"|".join(ids[s.offsets[i] : s.offsets[i + 1]].tobytes() for i in own)
        if text and surprise[e] > -np.log(CHANCE):
            same.setdefault((int(episodes.group[e]), text), []).append(int(e))
    pairs = [pair for members in same.values() for pair in combinations(members[:8], 2)]
    if not pairs:
        return []
    groups = {int(episodes.group[a]) for a, _ in pairs}
    copies = sum(len(m) - 1 for m in same.values())
    sentence = (
        f"{copies:,} rollouts in {share(len(groups), len(episodes.names))} groups repeat another one of their group token by "
        "token, which chance does not do: a fixed seed, a cache, or the same sample written twice"
    )
    rows = [f"{s.where[episodes.first[a]]} = {s.where[episodes.first[b]]}" for a, b in pairs[:5]]
    return [Found(sentence, copies, rows, "seed each rollout apart; drop copies before the group statistic")]


def _surprise(s: Sheet) -> Reals:
    """[E] nats that it would take to sample the episode's answers a second time: at least what the log-probs say."""
    count = np.zeros(s.n) if s.policy is None else s.count(s.policy).astype(np.float64)
    if "logprobs" in s.tokens:
        known = np.isfinite(s.tokens["logprobs"])
        known &= True if s.policy is None else s.policy
        nats = -reduce_rows(np.add, np.where(known, s.tokens["logprobs"], 0), s.offsets, 0.0, np.float64)
        nats[s.count(known) == 0] = np.nan
    else:
        nats = np.full(s.n, np.nan)
    nats = np.where(np.isnan(nats), np.where(count >= LONG_ANSWER, np.inf, 0.0), nats)
    return np.asarray(np.bincount(s.episodes.of, nats, len(s.episodes)), np.float64)


def split_episode(s: Sheet) -> list[Found]:
    """Samples of one episode in several groups, or of several tasks."""
    episodes, found = s.episodes, []
    for name, severity in (("group", "error"), ("task", "error")):
        if name not in s.samples:
            continue
        values = s.samples[name][episodes.order]
        own = np.repeat(values[episodes.start[:-1]], episodes.samples)
        other = (values != own) & np.array([v not in ("", -1) for v in values.tolist()])
        at = np.unique(episodes.of[episodes.order[other]])
        if len(at):
            sentence = f"{share(len(at), len(episodes))} rollouts have samples of more than one {name}"
            advice = "a rollout id must be unique in the file: put step, task and index into it"
            found.append(Found(sentence, len(at), s.at_episodes(at), advice, severity))
    return found
