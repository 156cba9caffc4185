"""The host of a run: the method that a preset's slots make.

It sets the estimator and the policy stream; papers fold theirs around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from assay.advantages import (
    dr_grpo,
    first_tokens,
    gae,
    grpo,
    place_rewards,
    reinforce_pp,
    reinforce_pp_baseline,
    returns,
    rloo,
    turn_gae,
    whiten,
)
from assay.protocols import Method, Metrics
from assay.rows import Batch, Row, Stream
from assay.step_groups import Members, anchor_groups, anchor_metrics, gigpo, hgpo
from assay.trace import Group, Outcome, Trace

GROUP_ESTIMATORS: dict[str, Callable[..., Any]] = {"grpo": grpo, "dr-grpo": dr_grpo, "rloo": rloo}
STEP_ESTIMATORS = ("gigpo", "hgpo")
CRITICS = ("gae", "turn-gae")


def mixed(group: Group) -> bool:
    """Both a success and a non-success among the learnable traces (DAPO's dynamic sampling): raw outcomes only."""
    successes = sum(t.success for t in group.learnable)
    return 0 < successes < len(group.learnable)


class Host(Method):
    """GRPO and its relatives: see presets.py for the slots of each name."""

    fidelity = "paper"

    def __init__(self, slots: Any, episode_tokens: int) -> None:
        """`slots`: a config.Slots. `episode_tokens`: the token budget of an episode, Dr.GRPO's constant by default."""
        self.slots = slots
        self.constant = slots.constant_tokens or episode_tokens
        needs = {"value"} if slots.advantage in CRITICS else set()
        if slots.kl != "none" and slots.kl_coefficient > 0:
            needs |= {"ref_logprob"} | ({"old_logprob"} if slots.kl == "reward" else set())
        self.needs = frozenset(needs)
        self.keep = mixed if slots.keep == "mixed" else None

    def reward(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """The penalty on invalid turns; KL in the reward: minus coefficient x k1 on each sampled token."""
        if self.slots.invalid_penalty > 0:
            for trace in batch.traces:
                scores = batch.turn_scores[trace.key]
                for t, turn in enumerate(trace.turns):
                    scores[t] -= 0.0 if turn.valid else self.slots.invalid_penalty
        if self.slots.kl != "reward" or self.slots.kl_coefficient == 0:
            return {}
        for key, own in by_trace(rows):
            k1 = np.concatenate([r.columns["old_logprob"] - r.columns["ref_logprob"] for r in own])
            batch.token_scores[key] = np.asarray(
                batch.token_scores.get(key, 0.0) - self.slots.kl_coefficient * k1, np.float32
            )
        return {}

    def advantage(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """Writes column "advantage" on every row, and "return" where there is a critic."""
        if self.slots.advantage in GROUP_ESTIMATORS:
            return self._group_advantage(batch, rows)
        if self.slots.advantage in STEP_ESTIMATORS:
            return self._step_advantage(batch, rows)
        traces = {t.key: t for t in batch.traces}
        own = [(traces[key], rows_) for key, rows_ in by_trace(rows)]
        turns = [np.concatenate([r.turns for r in rows_]) for _, rows_ in own]
        rewards = [token_rewards(batch, trace, t) for (trace, _), t in zip(own, turns, strict=True)]
        if self.slots.advantage == "reinforce++":
            advantages = reinforce_pp(rewards, self.slots.gamma, turns)
        elif self.slots.advantage == "reinforce++-baseline":
            groups = [(trace.group_key, trace.mode) for trace, _ in own]
            advantages = reinforce_pp_baseline([total(batch, t) for t, _ in own], groups, [len(t) for t in turns])
        else:
            advantages = self._gae(own, rewards, turns)
        for (_, rows_), advantage in zip(own, advantages, strict=True):
            _write(rows_, "advantage", advantage)
        return {}

    def _group_advantage(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """One number per episode, statistics per (group, prompt mode), each trace counted once whatever its rows."""
        estimator, values, dead = GROUP_ESTIMATORS[self.slots.advantage], {}, 0
        ordered = sorted(batch.traces, key=_statistic)
        groups = [list(traces) for _, traces in groupby(ordered, key=_statistic)]
        for traces in groups:
            advantages = estimator(np.array([total(batch, t) for t in traces]))
            dead += not np.any(advantages)
            values.update({t.key: a for t, a in zip(traces, advantages, strict=True)})
        for row in rows:
            row.columns["advantage"] = np.full(len(row.at), values[row.trace.key], np.float32)
        return {"dead_groups": dead / max(len(groups), 1)}

    def _step_advantage(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """One number per (trace, turn), on the turn's tokens in either layout; statistics as `_group_advantage`."""
        slots, values, dead = self.slots, dict[str, Any](), 0
        turns = {key: np.concatenate([r.turns for r in own]) for key, own in by_trace(rows)}
        ordered = sorted(batch.traces, key=_statistic)
        groups = [list(traces) for _, traces in groupby(ordered, key=_statistic)]
        members: list[Members] = []
        for traces in groups:
            anchors = [[turn.anchor for turn in t.turns] for t in traces]
            own = [returns(turn_rewards(batch, t, turns.get(t.key)), slots.gamma) for t in traces]
            if slots.advantage == "gigpo":
                scores = np.array([total(batch, t) for t in traces])
                advantages = gigpo(scores, own, anchors, slots.step_weight, slots.step_norm)
            else:
                advantages = hgpo(own, anchors, slots.history, slots.step_alpha, slots.step_norm)
            dead += not any(np.any(a) for a in advantages)
            values.update({t.key: a for t, a in zip(traces, advantages, strict=True)})
            members += anchor_groups(anchors)
        for row in rows:
            row.columns["advantage"] = np.asarray(values[row.trace.key][row.turns], np.float32)
        return {"dead_groups": dead / max(len(groups), 1)} | anchor_metrics(members)

    def _gae(self, own: list[tuple[Trace, list[Row]]], rewards: list[Any], turns: list[Any]) -> list[Any]:
        advantages = []
        for (trace, rows), reward, turn in zip(own, rewards, turns, strict=True):
            value = np.concatenate([r.columns["value"] for r in rows])
            # `cut` is not an end of the task: the value of its final context stands for what would have followed
            bootstrap = float(rows[-1].columns["final_value"][0]) if trace.outcome is Outcome.CUT else 0.0
            if self.slots.advantage == "turn-gae":
                advantage, target = turn_gae(reward, value, turn, self.slots.gamma, self.slots.lam, bootstrap)
                # under the denominator "turn", a mean over tokens, this leaves the error of the first token alone
                _write(rows, "value_weight", np.bincount(turn)[turn] * first_tokens(turn))
            else:
                advantage, target = gae(reward, value, self.slots.gamma, self.slots.lam, bootstrap, turn)
            _write(rows, "return", target)
            advantages.append(advantage)
        return whiten(advantages)

    def streams(self, rows: Sequence[Row], streams: list[Stream], progress: float) -> list[Stream]:
        slots = self.slots
        constants: dict[str, Any] = {"length": float(self.constant)} if slots.denominator == "constant" else {}
        if slots.gate in ("ppo", "gspo", "sequence"):
            constants |= {"low": slots.clip_low, "high": slots.clip_high}
            constants |= {"dual": slots.dual_clip} if slots.dual_clip else {}
        elif slots.gate == "cispo":
            constants["cispo_weight_cap"] = slots.clip_high
        if slots.kl == "loss" and slots.kl_coefficient > 0:
            constants |= {"kl": slots.kl_coefficient, "kl_kind": slots.kl_kind}
        own = [row for row in rows if not row.view]
        policy = Stream("policy", own, f"policy:{slots.gate}", slots.denominator, constants)
        if slots.advantage not in CRITICS:
            return [*streams, policy]
        if slots.advantage == "turn-gae":
            return [*streams, policy, Stream("value", own, "value", "turn", {"clip": 0.5}, token_weight="value_weight")]
        return [*streams, policy, Stream("value", own, "value", "token", {"clip": 0.5})]


def total(batch: Batch, trace: Trace) -> float:
    """The episode's score: its own, plus what shaping added to its turns and tokens."""
    turns = sum(batch.turn_scores[trace.key]) - sum(t.reward for t in trace.turns)
    return batch.scores[trace.key] + turns + float(np.sum(batch.token_scores.get(trace.key, 0.0)))


def token_rewards(batch: Batch, trace: Trace, turns: Any) -> Any:
    """[N] float64: turn scores on the last sampled token of their turn, what is left of the episode's score on the last
    one, token scores where they stand."""
    placed = place_rewards(batch.turn_scores[trace.key], turns)
    placed[-1] += batch.scores[trace.key] - sum(t.reward for t in trace.turns)
    return placed + batch.token_scores.get(trace.key, 0.0)


def turn_rewards(batch: Batch, trace: Trace, turns: Any) -> Any:
    """[T] float64: turn scores, what is left of the episode's score on the last turn, token scores summed in theirs.
    `turns` [N] is the turn of each sampled token, None if there is none."""
    rewards = np.array(batch.turn_scores[trace.key], np.float64)
    if len(rewards):
        rewards[-1] += batch.scores[trace.key] - sum(t.reward for t in trace.turns)
    if turns is not None and trace.key in batch.token_scores:
        np.add.at(rewards, turns, batch.token_scores[trace.key])
    return rewards


def by_trace(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows per trace, in key order."""
    ordered = sorted(rows, key=lambda r: r.key)
    return [(key, list(own)) for key, own in groupby(ordered, key=lambda r: r.trace.key)]


def _statistic(trace: Trace) -> tuple[str, str]:
    return trace.group_key, trace.mode


def _write(rows: Sequence[Row], name: str, values: Any) -> None:
    start = 0
    for row in rows:
        row.columns[name] = np.asarray(values[start : start + len(row.at)], np.float32)
        start += len(row.at)
