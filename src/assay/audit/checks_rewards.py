"""A4xx: what was scored, and what was only broken."""

from __future__ import annotations

from typing import Any

import numpy as np

from assay.advantages import TIE
from assay.audit.sheet import CUT_STOPS, ERROR_OUTCOMES, Bools, Found, Reals, Sheet, share

BROKEN = (  # what infrastructure says, hardly ever a task; in small letters
    *("error executing tool", "internal server error", "service unavailable", "bad gateway", "gateway timeout"),
    *("connection refused", "connection reset", "connection aborted", "connection error", "broken pipe"),
    *("timed out", "timeouterror", "timeout expired", "timeout exceeded", "timeout after", "gateway time-out"),
    *("no space left on device", "out of memory", "max retries exceeded", "rate limit exceeded", "rate limited"),
    *("environment error", "environment crashed", "sandbox error", "sandbox failed", "container died"),
)
CRASH = "Traceback (most recent call last)"  # also what an agent's own code may show it
TAIL = 2000  # characters at the end of what the environment said, where a crash that ended the episode stands
ENOUGH = 8  # episodes before a constant reward is more than bad luck


def _name(s: Sheet) -> str:
    return "reward" if s.has("reward") else "score"


def _failed(s: Sheet) -> Bools:
    """[N] samples whose episode has reward 0, or the lowest reward of the file where none is 0."""
    reward = _reward(s)
    floor = min(0.0, float(reward[np.isfinite(reward)].min(initial=0.0)))
    return np.isfinite(reward) & ((reward == 0) | (reward == floor))


def _reward(s: Sheet) -> Reals:
    """[N] reward of the sample's episode."""
    return s.of_episodes(_name(s))[0][s.episodes.of]


def learnt_error(s: Sheet) -> list[Found]:
    failed = _failed(s) & (s.trained_count > 0) & ~s.evaluation
    told = s.among("outcome", ERROR_OUTCOMES)
    if "error" in s.samples:
        told |= np.array([bool(str(text).strip()) for text in s.samples["error"].tolist()], np.bool_)
    said = np.bincount(s.episodes.of[told], minlength=len(s.episodes))[s.episodes.of] > 0
    found = []
    advice = (
        "give it no reward (NaN) and leave it out of loss and group statistic, or sample it anew; count such episodes"
    )
    at = _once_per_episode(s, failed & said)
    if len(at):
        sentence = (
            f"{share(len(at), len(s.episodes))} episodes ended in an error of the environment, tool or engine, have reward "
            "0 and are trained on: the policy learns to avoid what did not fail"
        )
        found.append(Found(sentence, len(at), _quoted(s, at, {}), advice))
    found += _read_errors(s, failed & ~said & ~s.cut, advice)
    return found


def _read_errors(s: Sheet, candidates: Bools, advice: str) -> list[Found]:
    """Errors that stand only in the text."""
    broken: dict[int, str] = {}
    crashed: dict[int, str] = {}
    for i in _once_per_episode(s, candidates) if s.has("messages") or s.has("completion") else []:
        text = _environment_text(s, int(i))
        small = text.lower()
        if phrase := next((phrase for phrase in BROKEN if phrase in small), ""):
            broken[int(i)] = phrase
        elif CRASH in text[-TAIL:]:
            crashed[int(i)] = CRASH
    found = []
    if broken:
        words = sorted(set(broken.values()))[:3]
        sentence = (
            f"{share(len(broken), len(s.episodes))} episodes of reward 0 that are trained on say that a tool or the "
            f"environment failed ({', '.join(repr(w) for w in words)})"
        )
        found.append(Found(sentence, len(broken), _quoted(s, list(broken), broken), advice, "warning"))
    if crashed:
        sentence = f"{share(len(crashed), len(s.episodes))} episodes of reward 0 that are trained on end in a traceback"
        cause = (
            "if the crash is the agent's own code this is the task; if it is the environment's, it must not be learnt"
        )
        found.append(Found(sentence, len(crashed), _quoted(s, list(crashed), crashed), cause, "warning"))
    return found


def _environment_text(s: Sheet, i: int) -> str:
    """What others than the policy said in the last sample of an episode, or its whole text where roles are not known."""
    messages = s.texts["messages"][i] if "messages" in s.texts else None
    if messages:
        first = next((k for k, m in enumerate(messages) if m.get("role") == "assistant"), len(messages))
        return "\n".join(str(m.get("content") or "") for m in messages[first:] if m.get("role") != "assistant")
    completion = s.texts["completion"][i] if "completion" in s.texts else None
    return completion or ""


def _once_per_episode(s: Sheet, flags: Bools) -> Any:
    """Last sample of each episode that has a flagged one."""
    hit = np.unique(s.episodes.of[flags])
    return s.episodes.last[hit]


def _quoted(s: Sheet, at: Any, words: dict[int, str]) -> list[str]:
    said = []
    for i in list(at)[:5]:
        own = words.get(int(i)) or " ".join(str(s.words("error")[i]).split()) or str(s.words("outcome")[i])
        said.append(f"{s.where[int(i)]}: {own[:80]}")
    return said


def cut_as_failure(s: Sheet) -> list[Found]:
    """Episodes that a limit ended, scored as failures, and nothing in the outcome says so."""
    final = np.zeros(s.n, np.bool_)
    final[s.episodes.last] = True
    silent = np.array(
        [str(o).lower() in ("", "failure", "fail", "failed") for o in s.words("outcome").tolist()], np.bool_
    )
    candidates = final & silent & _failed(s) & (s.trained_count > 0) & ~s.evaluation
    limited = s.among("stop", CUT_STOPS)
    reason = "stopped at a token limit"
    if not s.has("stop"):
        limited, reason = _unfinished(s), "do not end in an end token"
    at = np.flatnonzero(candidates & limited)
    if not len(at):
        return []
    sentence = (
        f"{share(len(at), len(s.episodes))} episodes {reason}, have reward 0 and are learnt as failures, "
        "with no outcome that says that they were cut"
    )
    advice = "mark them as cut and decide: mask them, bootstrap their value, or punish length on purpose"
    # a turn's own token budget is a rule of our environments, and a cut episode has an outcome of its own
    severity = "note" if s.rollouts.format == "assay" and s.has("stop") else ""
    return [Found(sentence, len(at), s.at_samples(at), advice, severity)]


def _unfinished(s: Sheet) -> Bools:
    """[N] the last answer does not end in an end id, where nearly all answers of the file do."""
    answers, ids = s.answers, s.tokens.get("ids")
    out = np.zeros(s.n, np.bool_)
    if ids is None or not s.end_ids or not len(answers.row):
        return out
    ended = np.isin(ids[answers.end - 1], list(s.end_ids))
    behind = np.minimum(answers.end, len(ids) - 1)  # an end token that code put behind an answer ends it too
    ended |= (answers.end < s.offsets[answers.row + 1]) & np.isin(ids[behind], list(s.end_ids))
    if ended.mean() < 0.5:
        return out
    out[answers.row] = ~ended  # the last answer of a sample is written last
    return out


def constant_reward(s: Sheet) -> list[Found]:
    reward = s.of_episodes(_name(s))[0]
    used = np.isfinite(reward) & ~s.evaluation[s.episodes.first]
    if used.sum() < 2 or np.ptp(reward[used]) > TIE:
        return []
    sentence = f"the reward is {reward[used][0]:g} for all {int(used.sum()):,} episodes: there is nothing to learn from"
    advice = "score a known right and a known wrong answer by hand first; does the parser find the answer at all?"
    return [Found(sentence, int(used.sum()), (), advice, "" if used.sum() >= ENOUGH else "note")]


def dead_groups(s: Sheet) -> list[Found]:
    """Groups whose members all have the same reward."""
    episodes = s.episodes
    reward = s.of_episodes(_name(s))[0]
    used = np.isfinite(reward) & (episodes.group >= 0) & ~s.evaluation[episodes.first]
    groups = len(episodes.names)
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, episodes.group[used], reward[used])
    np.maximum.at(high, episodes.group[used], reward[used])
    several = np.bincount(episodes.group[used], minlength=groups) > 1
    dead = several & (high - low <= TIE)
    if several.sum() < 4 or np.ptp(reward[used]) <= TIE or 2 * dead.sum() < several.sum():
        return []
    at = np.flatnonzero(dead)
    solved = int((high[at] >= reward[used].max() - TIE).sum())
    sentence = f"{share(len(at), int(several.sum()))} groups have one reward for all rollouts ({solved:,} the highest)"
    every = dead.sum() == several.sum()
    sentence += ": no group says which rollout was better" if every else ": they give no gradient to a group estimator"
    advice = "choose tasks between always and never solved, or sample more rollouts of a task"
    return [Found(sentence, len(at), s.at_groups(at), advice, "warning" if every else "note")]


def out_of_range(s: Sheet) -> list[Found]:
    bounds = s.declared["reward_range"]
    low, high = float(bounds[0]), float(bounds[1])
    reward = np.asarray(s.samples["reward"], np.float64)
    at = np.flatnonzero((reward < low - 1e-6) | (reward > high + 1e-6))
    if not len(at):
        return []
    sentence = (
        f"{share(len(at), s.n)} rewards are outside the declared range {low:g} to {high:g}, {reward[at[0]]:g} for one"
    )
    return [Found(sentence, len(at), s.at_samples(at), "is a bonus added twice, or a sum not divided?")]


def unscored_trained(s: Sheet) -> list[Found]:
    """A reward that is not known, and an advantage all the same."""
    reward = s.of_episodes(_name(s))[0]
    live = ~np.isnan(s.tokens["advantages"])
    live &= s.tokens["advantages"] != 0
    live &= True if s.trained is None else s.trained
    at = np.flatnonzero(np.isnan(reward)[s.episodes.of] & (s.count(live) > 0))
    if not len(at):
        return []
    sentence = (
        f"{share(len(at), s.n)} samples have no reward (not known, or a crash) and yet an advantage that is trained on"
    )
    return [
        Found(
            sentence,
            len(at),
            s.at_samples(at),
            "a missing reward is not 0: leave the episode out before the group mean",
        )
    ]


def contradiction(s: Sheet) -> list[Found]:
    """Successes with a reward below that of failures of the same task, or of the file."""
    won, lost = s.among("outcome", ("success", "solved", "correct")), s.among("outcome", ("failure", "fail", "failed"))
    reward = _reward(s)
    won, lost = won & np.isfinite(reward), lost & np.isfinite(reward)
    if not won.any() or not lost.any():
        return []
    best_lost = float(reward[lost].max())
    at = _once_per_episode(s, won & (reward < best_lost - TIE) & (reward <= 0))
    if not len(at):
        return []
    sentence = (
        f"{share(len(at), len(s.episodes))} episodes are called a success and have reward {reward[at[0]]:g}, "
        "less than a failure"
    )
    return [Found(sentence, len(at), s.at_samples(at), "which of the two is right: the outcome or the reward?")]
