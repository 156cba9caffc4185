"""The facts of a training step: raw outcomes, entropies, and what the optimiser steps of one batch come to together.

A metric of one environment of a mixture is NAME[ENVIRONMENT]; one without brackets is over all episodes or tokens alike, so
that an environment with more of them counts more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from assay.learner.terms import BY_ENVIRONMENT
from assay.protocols import Metrics
from assay.rollout import Collection
from assay.rows import Batch, Row, sampler_column
from assay.stats import wilson
from assay.trace import Group, Outcome, Trace


def facts(collection: Collection, worlds: Sequence[str] = ()) -> Metrics:
    """Raw outcomes of a step. Means are over learnable episodes, entropies over sampled tokens. `worlds`: environments of
    a mixture, each of which has its own as well."""
    batch, counters = collection.batch, collection.counters
    everything: list[Trace] = [t for g in batch.groups + batch.dropped for t in g.traces]
    metrics: Metrics = {name: float(value) for name, value in sorted(counters.items())}
    metrics |= _attempts([t for t in everything if t.learnable])
    for outcome in Outcome:
        metrics[f"outcome_{outcome.value.replace(' ', '_')}"] = float(sum(t.outcome is outcome for t in everything))
    for world in worlds:
        own = [t for t in everything if t.task.environment == world]
        metrics[f"episodes[{world}]"] = float(len(own))
        metrics |= {f"{name}[{world}]": value for name, value in _attempts([t for t in own if t.learnable]).items()}
    return metrics | group_counts(batch, worlds)


def _attempts(attempts: Sequence[Trace]) -> Metrics:
    """Of learnable episodes; {} if there is none."""
    if not attempts:
        return {}
    interval = wilson(sum(t.success for t in attempts), len(attempts))
    turns = [turn for t in attempts for turn in t.turns]
    return {
        "success": interval.estimate,
        "success_low": interval.low,
        "success_high": interval.high,
        "reward": float(np.mean([t.reward for t in attempts])),
        "turns": float(np.mean([len(t.turns) for t in attempts])),
        "episode_tokens": float(np.mean([t.length for t in attempts])),
        "invalid_actions": float(np.mean([not turn.valid for turn in turns])) if turns else 0.0,
    }


def group_counts(batch: Batch, worlds: Sequence[str] = ()) -> Metrics:
    """How many groups are trained on, and how many are not."""
    counts = {"kept_groups": float(len(batch.groups)), "dropped_groups": float(len(batch.dropped))}
    return counts | {f"kept_groups[{w}]": float(sum(g.task.environment == w for g in batch.groups)) for w in worlds}


def entropy(rows: Sequence[Row], views: Sequence[Row], needs: frozenset[str], worlds: Sequence[str] = ()) -> Metrics:
    """Column "entropy" of all views, from the trace unless a score pass gave it; its mean over the rows' tokens."""
    if "entropy" not in needs:
        for row in views:
            row.columns["entropy"] = sampler_column(row, "entropies")
    metrics = _entropy("entropy", rows)
    for world in worlds:
        metrics |= _entropy(f"entropy[{world}]", [row for row in rows if row.trace.task.environment == world])
    return metrics


def _entropy(name: str, rows: Sequence[Row]) -> Metrics:
    values = np.concatenate([row.columns["entropy"] for row in rows]) if rows else np.zeros(0)
    return {name: float(np.mean(values))} if len(values) and np.isfinite(values).all() else {}


def mean_of(updates: Sequence[Metrics]) -> Metrics:
    """Over the optimiser steps of a batch: counts are summed, means per token are over the tokens of all (those of one
    environment over its own), the rest is a mean over the steps that had something to train on (over all where none
    had)."""
    metrics: Metrics = {"updates": float(len(updates))}
    busy = [u for u in updates if u["tokens_trained"]] or updates
    for name in dict.fromkeys(name for u in updates for name in u):
        having = [u for u in busy if name in u]
        if name.startswith(("tokens_", "updates_", "rows_")):
            metrics[name] = float(sum(u[name] for u in updates if name in u))
        elif having:
            tokens = _tokens_under(name)
            weights = [u[tokens] for u in having] if tokens else None
            metrics[name] = float(np.average([u[name] for u in having], weights=weights))
    return metrics


def _tokens_under(name: str) -> str:
    """The count of tokens that a mean per token is over; "" for any other metric."""
    metric, bracket, environment = name.partition("[")
    if bracket and metric in BY_ENVIRONMENT:
        return f"tokens_policy[{environment}"
    return "tokens_trained" if name.endswith("_per_trained_token") else ""


def without_cut(batch: Batch) -> Batch:
    """The batch as if its cut episodes had not been rolled out: they stay as cost. Only what is trained on changes;
    facts are taken before. A group that has no other episode is dropped."""
    groups, dropped = [], list(batch.dropped)
    for group in batch.groups:
        kept = tuple(t for t in group.traces if t.outcome is not Outcome.CUT)
        gone = tuple(t for t in group.traces if t.outcome is Outcome.CUT)
        if any(t.learnable for t in kept):
            groups.append(Group(group.task, kept, group.others + gone))
        else:
            dropped.append(group)
    return Batch(groups, sorted(dropped, key=lambda group: group.key))
