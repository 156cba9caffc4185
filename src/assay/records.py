"""Lines of metrics as series, and what a careful reader would ask about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from assay.charts import mean, number

Records = Sequence[Mapping[str, Any]]  # each with a "step"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def series(records: Records, key: str, default: float = math.nan) -> list[float]:
    """The key's value in each record, `default` where there is none or it is not finite."""
    return [float(record[key]) if is_number(record.get(key)) else default for record in records]


def points_of(records: Records, key: str) -> list[tuple[float, float]]:
    """(step, value) of every record, NaN where it has none; [] if none has."""
    values = series(records, key)
    known = any(map(math.isfinite, values))
    return [(record["step"], value) for record, value in zip(records, values, strict=True)] if known else []


def total(records: Records, key: str) -> float:
    return sum(series(records, key, default=0))


def anomalies(metrics: Records, evaluation: Mapping[str, Any]) -> list[str]:
    """What a careful reader would ask about, as sentences."""
    found = []
    for name in sorted({name for record in metrics for name in record}):
        steps = [r["step"] for r in metrics if isinstance(r.get(name), float) and not math.isfinite(r[name])]
        if steps:
            found.append(f"{name} was not finite at {_steps(steps)}.")
    steps = [record["step"] for record in metrics]
    jumps = [f"{a} to {b}" for a, b in pairwise(steps) if b != a + 1]
    if jumps:
        found.append(f"Step numbers jump: {', '.join(jumps[:5])}.")
    empty = [r["step"] for r in metrics if r.get("kept_groups") == 0]
    if empty:
        found.append(f"No group was kept at {_steps(empty)}: nothing was learnt there.")
    norms = [v for v in series(metrics, "grad_norm") if math.isfinite(v)]
    median = sorted(norms)[len(norms) // 2] if norms else math.inf
    spikes = [r["step"] for r in metrics if is_number(r.get("grad_norm")) and r["grad_norm"] > 10 * median > 0]
    if spikes:
        found.append(f"The gradient norm was above ten times its median ({number(median)}) at {_steps(spikes)}.")
    episodes = total(metrics, "episodes")
    for key, name, most in (
        ("outcome_environment_error", "ended in an environment error", 0.01),
        ("outcome_cut", "were cut", 0.05),
    ):
        if episodes and total(metrics, key) / episodes > most:
            found.append(f"{number(total(metrics, key) / episodes, True)} of the episodes {name}.")
    return found + _trends(metrics) + _panels(evaluation)


def _trends(metrics: Records) -> list[str]:
    """Collapses, told from means over a tenth of the run (at least three steps)."""
    found = []
    entropy, success = (_windows(metrics, key, max(3, len(metrics) // 10)) for key in ("entropy", "success"))
    if len(entropy) > 1:
        (_, first), (_, last) = entropy[0], entropy[-1]
        if last < first / 10:
            found.append(f"Entropy fell from {first:.3g} to {last:.3g} nats: the policy has all but stopped exploring.")
        if last > max(2 * first, 0.5):
            found.append(f"Entropy rose from {first:.3g} to {last:.3g} nats.")
    if len(success) > 1:
        (at, best), (_, last) = max(success, key=lambda window: window[1]), success[-1]
        if best - last > 0.2:
            found.append(
                f"Training success fell from {100 * best:.0f} % (from step {at}) to {100 * last:.0f} % at the end."
            )
    return found


def _windows(metrics: Records, key: str, width: int) -> list[tuple[int, float]]:
    """(first step, mean) of whole windows that end with the last record; unknown ones left out."""
    starts = range(len(metrics) % width, len(metrics), width)
    means = [(metrics[i]["step"], mean(series(metrics[i : i + width], key))) for i in starts]
    return [(step, value) for step, value in means if math.isfinite(value)]


def _panels(evaluation: Mapping[str, Any]) -> list[str]:
    both = [evaluation.get(when) for when in ("before", "after")]
    sampled = [half.get("sampled") if isinstance(half, Mapping) else None for half in both]
    before, after = (rate.get("panel") if isinstance(rate, Mapping) else None for rate in sampled)
    if before and after and before != after:
        return ["Before and after were measured on different panels: their difference says nothing."]
    return []


def _steps(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps[:5]))}{more}"
