"""What the findings of this study are made of: quantities over seeds with a bound each, and one rule that judges them.

A claim is one or more quantities. A quantity is the mean over seeds, paired where two cells are compared, with its 95 % t
interval. The claim holds where every interval lies beyond its bound, fails where one lies wholly on the other side ("does
not hold", or "reversed" where the bound of a difference is 0), and is inconclusive otherwise. With fewer than two seeds
there is no interval and no claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.studies.charts import mean_interval
from assay.studies.grid import Finding, Row, Verdict

Values = Mapping[int, float]  # seed -> value


@dataclass(frozen=True, slots=True)
class Quantity:
    """Claimed to lie above `bound`, or below it."""

    what: str
    values: Values
    bound: float = 0.0
    above: bool = True
    digits: int = 3

    @property
    def interval(self) -> tuple[float, float, float]:
        return mean_interval(list(self.values.values()))

    def say(self) -> str:
        if not self.values:
            return f"{self.what}: no cell of it is finished"
        mean, low, high = self.interval
        reach = f" [{low:.{self.digits}f}, {high:.{self.digits}f}]" if np.isfinite(low) else ""
        sign = "above" if self.above else "below"
        return f"{self.what}: {mean:.{self.digits}f}{reach}, claimed {sign} {self.bound:g}"


def judge(quantities: Sequence[Quantity]) -> Verdict:
    if not quantities or any(len(q.values) < 2 for q in quantities):
        return "no claim"
    sides = []
    for q in quantities:
        _, low, high = q.interval
        reaches, misses = (low > q.bound, high < q.bound) if q.above else (high < q.bound, low > q.bound)
        sides.append((reaches, misses, q.bound == 0))
    if any(missed for _, missed, _ in sides):
        return "reversed" if any(missed and zero for _, missed, zero in sides) else "does not hold"
    return "holds" if all(reached for reached, _, _ in sides) else "inconclusive"


def finding(
    name: str, claim: str, quantities: Sequence[Quantity], table: list[dict[str, Any]], note: str = ""
) -> Finding:
    """The sentence says every quantity, its interval, its bound and the number of seeds."""
    seeds = {len(q.values) for q in quantities}
    count = f"{min(seeds)} to {max(seeds)} seeds" if len(seeds) > 1 else f"{min(seeds, default=0)} seeds"
    said = "; ".join(q.say() for q in quantities)
    return Finding(name, claim, judge(quantities), f"{said}. {count}.{' ' + note if note else ''}", table)


def values(rows: Sequence[Row], name: str, *keys: str | int) -> dict[int, float]:
    """Seed -> result[keys...] of the cells of one name; None is left out."""
    found = {}
    for row in rows:
        if row["name"] == name:
            value = row["result"]
            for key in keys:
                value = value[key]
            if value is not None:
                found[row["seed"]] = float(value)
    return found


def less(one: Values, other: Values) -> dict[int, float]:
    """Difference over the seeds that both have."""
    return {seed: one[seed] - other[seed] for seed in sorted(set(one) & set(other))}


def gap(found: Values, target: float) -> dict[int, float]:
    return {seed: abs(value - target) for seed, value in found.items()}


def average(found: Values, digits: int = 4) -> float | None:
    return round(float(np.mean(list(found.values()))), digits) if found else None


def seen(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    there = {row["name"] for row in rows}
    return [name for name in names if name in there]
