"""The host of a run: the method that a preset's slots make.

It sets the estimator and the policy stream; papers fold theirs around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from assay.advantages import (
    all_equal,
    centre,
    dr_grpo,
    first_tokens,
    gae,
    grpo,
    opo,
    place_rewards,
    reinforce_pp,
    reinforce_pp_baseline,
    returns,
    rloo,
    turn_gae,
    whiten,
)
from assay.methods.slots import (
    clip_cov_tokens,
    covariances,
    effective_share,
    importance_weights,
    kl_cov_tokens,
    overlong,
    top_spread,
)
from assay.protocols import Method, Metrics, Setting, UserError
from assay.rng import generator
from assay.rows import Batch, Row, Stream, sampler_column
from assay.step_groups import Members, anchor_groups, anchor_metrics, gigpo, hgpo
from assay.trace import Group, Outcome, Trace

GROUP_ESTIMATORS: dict[str, Callable[..., Any]] = {"grpo": grpo, "dr-grpo": dr_grpo, "rloo": rloo}
FURTHER_GROUP_ESTIMATORS = ("opo", "gpg")  # that need more than one group's rewards
STEP_ESTIMATORS = ("gigpo", "hgpo")
CRITICS = ("gae", "turn-gae")
COVARIANCE_GATES = ("clip-cov", "kl-cov")
IDLE_AT_ONE = ("cispo", "gspo", "sequence", "sapo", "dppo", "kl-cov")  # gates that do nothing at ratio 1


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
        self.episode_tokens = episode_tokens
        self.constant = slots.constant_tokens or episode_tokens
        self.seed, self.update = 0, 0  # the run's; which update of its batch comes next
        if slots.overlong_cache > episode_tokens:
            raise UserError(
                f"slots.overlong_cache is {slots.overlong_cache}: at most max_episode_tokens, {episode_tokens}, as the "
                "penalty begins so many tokens before it"
            )
        if slots.correction == "icepop" and slots.correction_low >= slots.correction_cap:
            raise UserError(
                f"slots.correction_low is {slots.correction_low:g}: below slots.correction_cap, {slots.correction_cap:g}"
            )
        needs = {"value"} if slots.advantage in CRITICS else set()
        if slots.kl != "none" and slots.kl_coefficient > 0:
            needs |= {"ref_logprob"} | ({"old_logprob"} if slots.kl == "reward" else set())
        if slots.correction != "none" or slots.gate in COVARIANCE_GATES:
            needs |= {"old_logprob"}
        self.needs = frozenset(needs)
        self.keep = mixed if slots.keep == "mixed" else None
        self.select = self._top_std if slots.keep == "top-std" else None

    def bind(self, setting: Setting) -> Sequence[str]:
        self.seed = setting.seed
        if setting.updates > 1 or self.slots.gate not in IDLE_AT_ONE:
            return ()
        return (
            f"one update per batch: every ratio is 1, and gate {self.slots.gate!r} does what 'none' does: "
            "add --updates-per-batch 4",
        )

    def _top_std(self, batch: Batch) -> Batch:
        """Per environment, the groups whose raw rewards differ most (StarPO-S); the rest is dropped."""
        kept: list[Group] = []
        for name in sorted({group.task.environment for group in batch.groups}):
            groups = [group for group in batch.groups if group.task.environment == name]
            rewards = [[trace.reward for trace in group.learnable] for group in groups]
            spreads = [0.0 if all_equal(r) else float(np.std(r)) for r in rewards]
            chosen = top_spread(spreads, self.slots.keep_share)
            kept += [group for group, yes in zip(groups, chosen, strict=True) if yes]
        keys = {group.key for group in kept}
        gone = [group for group in batch.groups if group.key not in keys]
        return Batch(
            sorted(kept, key=lambda group: group.key), sorted(batch.dropped + gone, key=lambda group: group.key)
        )

    def reward(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """The penalties on invalid turns and on length; KL in the reward: minus coefficient x k1 on each sampled token."""
        metrics = self._shorten(batch) if self.slots.overlong_cache else {}
        if self.slots.invalid_penalty > 0:
            for trace in batch.traces:
                scores = batch.turn_scores[trace.key]
                for t, turn in enumerate(trace.turns):
                    scores[t] -= 0.0 if turn.valid else self.slots.invalid_penalty
        if self.slots.kl != "reward" or self.slots.kl_coefficient == 0:
            return metrics
        for key, own in by_trace(rows):
            k1 = np.concatenate([r.columns["old_logprob"] - r.columns["ref_logprob"] for r in own])
            batch.token_scores[key] = np.asarray(
                batch.token_scores.get(key, 0.0) - self.slots.kl_coefficient * k1, np.float32
            )
        return metrics

    def _shorten(self, batch: Batch) -> Metrics:
        """DAPO's soft punishment, on scores only: `keep` and the figures see the reward as it was."""
        slots, penalties = self.slots, []
        for trace in batch.traces:
            penalty = overlong(trace.sampled_tokens, self.episode_tokens, slots.overlong_cache, slots.overlong_factor)
            batch.scores[trace.key] += penalty
            penalties.append(penalty)
        if not penalties:
            return {}
        return {"overlong": float(np.mean([p < 0 for p in penalties])), "overlong_penalty": float(np.mean(penalties))}

    def advantage(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """Writes column "advantage" on every row, and "return" where there is a critic."""
        if self.slots.advantage in (*GROUP_ESTIMATORS, *FURTHER_GROUP_ESTIMATORS):
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
        estimator, values, dead, live = GROUP_ESTIMATORS.get(self.slots.advantage, dr_grpo), dict[str, Any](), 0, 0
        ordered = sorted(batch.traces, key=_statistic)
        groups = [list(traces) for _, traces in groupby(ordered, key=_statistic)]
        for traces in groups:
            scores, lengths = np.array([total(batch, t) for t in traces]), [t.sampled_tokens for t in traces]
            advantages = opo(scores, lengths) if self.slots.advantage == "opo" else estimator(scores)
            dead += not np.any(advantages)
            live += len(traces) * bool(np.any(advantages))
            values.update({t.key: a for t, a in zip(traces, advantages, strict=True)})
        scale = len(values) / max(live, 1) if self.slots.advantage == "gpg" else 1.0  # dead groups shrink no step
        for row in rows:
            row.columns["advantage"] = np.full(len(row.at), scale * values[row.trace.key], np.float32)
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
        return whiten(advantages) if self.slots.advantage_norm == "std" else centre(advantages)

    def modulate(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """Columns of the gate and the correction that need the whole batch; advantages stay as they are."""
        self.update, metrics = 0, Metrics()
        compared = self.slots.correction != "none" or self.slots.gate == "dppo"
        for row in rows if compared else ():
            row.columns["sampler_logprob"] = sampler_column(row, "logprobs")
        if compared and rows and "old_logprob" in rows[0].columns:
            metrics |= self._correct(rows)
        if self.slots.gate in COVARIANCE_GATES and rows:
            metrics["covariance"] = float(np.mean(covariances(_all(rows, "advantage"), _all(rows, "old_logprob"))))
        return metrics

    def _correct(self, rows: Sequence[Row]) -> Metrics:
        """Column "correction" where there is one, and how far learner and sampler are apart."""
        slots, traces = self.slots, [own for _, own in by_trace(rows)]
        gaps = [_all(own, "old_logprob") - _all(own, "sampler_logprob") for own in traces]
        known = np.concatenate(gaps)
        known = known[~np.isnan(known)]
        metrics = {"mismatch": float(np.mean(np.abs(known)))} if len(known) else {}
        if slots.correction == "none":
            return metrics
        weights = importance_weights(gaps, slots.correction, slots.correction_cap, slots.correction_low)
        for own, values in zip(traces, weights, strict=True):
            _write(own, "correction", values)
        every = np.concatenate(weights)
        return metrics | {
            "tis_mean": float(every.mean()),
            "tis_max": float(every.max()),
            "tis_ess": effective_share(every),
            "tis_dropped": float(np.mean(every == 0)),
        }

    def _choose(self, rows: Sequence[Row]) -> None:
        """Column "chosen": the tokens of this optimiser step that the covariance picks."""
        slots, ordered = self.slots, sorted(rows, key=lambda row: row.key)
        if not ordered:
            return
        covariance = covariances(_all(ordered, "advantage"), _all(ordered, "old_logprob"))
        if slots.gate == "clip-cov":
            rng = generator(self.seed, "clip-cov", ordered[0].trace.step, self.update)
            chosen = clip_cov_tokens(covariance, slots.cov_share, slots.cov_low, slots.cov_high, rng)
        else:
            chosen = kl_cov_tokens(covariance, slots.cov_share)
        _write(ordered, "chosen", chosen)

    def streams(self, rows: Sequence[Row], streams: list[Stream], progress: float) -> list[Stream]:
        slots = self.slots
        constants: dict[str, Any] = {"length": float(self.constant)} if slots.denominator == "constant" else {}
        if slots.gate in ("ppo", "gspo", "sequence", "dppo", "clip-cov"):
            constants |= {"low": slots.clip_low, "high": slots.clip_high}
        if slots.gate in ("ppo", "gspo", "sequence"):
            constants |= {"dual": slots.dual_clip} if slots.dual_clip else {}
        elif slots.gate in ("dppo", "kl-cov"):
            constants["penalty"] = slots.gate_penalty
        elif slots.gate == "cispo":
            constants["cispo_weight_cap"] = slots.clip_high
        if slots.kl == "loss" and slots.kl_coefficient > 0:
            constants |= {"kl": slots.kl_coefficient, "kl_kind": slots.kl_kind}
        own = [row for row in rows if not row.view]
        if slots.gate in COVARIANCE_GATES:
            self._choose(own)
            self.update += 1
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


def _all(rows: Sequence[Row], name: str) -> Any:
    return np.concatenate([row.columns[name] for row in rows])


def _write(rows: Sequence[Row], name: str, values: Any) -> None:
    start = 0
    for row in rows:
        row.columns[name] = np.asarray(values[start : start + len(row.at)], np.float32)
        start += len(row.at)
