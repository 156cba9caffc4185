"""How figures of studies look: matplotlib figures of means over seeds with their 95 % t intervals, one palette."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats as scipy_stats

PALETTE = ("#1f5fa8", "#c8501e", "#2b8a5a", "#8a4fa3", "#9a7b00", "#5c6470")  # told apart in grey as well
GREY = "#8b939c"


def subplots(rows: int = 1, columns: int = 1, width: float = 4.2, height: float = 3.0) -> tuple[Any, NDArray[Any]]:
    """(figure, axes [rows, columns]) without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes: NDArray[Any] = np.atleast_2d(figure.subplots(rows, columns, squeeze=False))
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e4e7ea", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, axes


def mean_interval(values: ArrayLike, confidence: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high) of the t interval over seeds; NaN is left out; one value has no interval (NaN bounds)."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    if known.size == 0:
        return float("nan"), float("nan"), float("nan")
    mean = float(known.mean())
    if known.size == 1:
        return mean, float("nan"), float("nan")
    reach = float(scipy_stats.t.ppf(0.5 + confidence / 2, known.size - 1) * known.std(ddof=1) / np.sqrt(known.size))
    return mean, mean - reach, mean + reach


def band(axis: Any, x: ArrayLike, curves: Sequence[ArrayLike], label: str, colour: str, style: str = "-") -> None:
    """Mean of the seeds' curves [S, X] with the pointwise 95 % t interval as a band."""
    stacked = np.asarray(curves, float)
    found = np.array([mean_interval(column) for column in stacked.T])
    axis.plot(x, found[:, 0], style, color=colour, label=label, linewidth=1.6)
    if len(stacked) > 1:
        axis.fill_between(x, found[:, 1], found[:, 2], color=colour, alpha=0.18, linewidth=0)


def points(axis: Any, groups: Mapping[str, ArrayLike], colours: Mapping[str, str] | None = None) -> None:
    """One column a group: every seed as a dot, the mean with its interval beside them."""
    for i, (name, values) in enumerate(groups.items()):
        colour = (colours or {}).get(name, PALETTE[i % len(PALETTE)])
        seeds = np.asarray(values, float)
        axis.plot(np.full(len(seeds), i - 0.12), seeds, "o", color=colour, alpha=0.45, markersize=4)
        mean, low, high = mean_interval(seeds)
        reach = [[mean - low], [high - mean]] if np.isfinite(low) else None
        axis.errorbar([i + 0.12], [mean], yerr=reach, fmt="D", color=colour, markersize=5, capsize=3)
    axis.set_xticks(range(len(groups)), list(groups), rotation=0 if len(groups) < 5 else 30, fontsize=8)
