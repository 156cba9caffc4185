"""Figures of the experiments "rewards", "supervision" and "recursions": (matplotlib figure, caption) by file name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from assay.bandits import count_game, law_of, policy_value
from assay.studies.charts import GREY, PALETTE, band, mean_interval, points, subplots
from assay.studies.grid import Row
from assay.studies.icl import recursions, rewards, supervision
from assay.studies.icl.verdicts import seen, values

FLOOR = 1e-3  # of errors on a logarithmic axis: half of one wrong state in 512
Figures = dict[str, tuple[Any, str]]


def of_rewards(rows: Sequence[Row]) -> Figures:
    names = seen(rows, list(rewards.ARMS))
    if not names:
        return {}
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(rewards.ARMS)}
    figure, axes = subplots(1, 2)
    for axis, group in zip(axes[0], (("cum", "final", "info"), ("cost-0.01", "cost-0.02", "cost-0.05")), strict=True):
        for name in seen(rows, group):
            curves = [row["result"] for row in rows if row["name"] == name]
            x = curves[0]["curve"]["update"]
            shares = [_share(found) for found in curves]
            band(axis, x, shares, name, colours[name])
        axis.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
        axis.set(xlabel="updates", ylabel="share of the way to the optimum", ylim=(-0.6, 1.05))
        if seen(rows, group):
            axis.legend(fontsize=7, frameon=False, loc="lower right")
    found: Figures = {
        "learning": (
            figure,
            "Exact expected return while learning, from uniform play (0) to the exact optimum of that return (1): mean over "
            "seeds with the 95 % interval. Look at where a curve levels off below 1: a local optimum, not noise.",
        )
    }
    figure, axes = subplots(1, 2)
    groups = {n: list(values(rows, n, "sample", "cum_side").values()) for n in names if not n.startswith("cost")}
    if groups:
        points(axes[0, 0], groups, colours)
    axes[0, 0].axhline(0.5, color=GREY, linewidth=0.8, linestyle=":")
    axes[0, 0].set(ylabel="probability of cum's action", ylim=(-0.02, 1.02))
    axis = axes[0, 1]
    for i, name in enumerate(groups):
        xs, ys = (list(values(rows, name, "sample", key).values()) for key in ("cum", "final"))
        axis.plot(xs, ys, "os^Dvp"[i % 6], color=colours[name], alpha=0.7, markersize=4, label=name)
    game = count_game(rewards.USUAL["horizon"])
    for reference in ("bayes-cum", "bayes-final", "thompson", "uniform", "ucb1"):
        x, y = policy_value(law_of(reference, game), game)
        axis.plot([x], [y], "x", color="black", markersize=6)
        axis.annotate(reference, (x, y), fontsize=6, xytext=(3, -8), textcoords="offset points")
    axis.set(xlabel="expected sum of rewards (H = 5)", ylabel="expected final posterior mean")
    if groups:
        axis.legend(fontsize=6, frameon=False, loc="lower left")
    found["policies"] = (
        figure,
        "Left: probability of the action that is optimal for the sum of rewards, over the contexts where the optima of cum "
        "and final share no action. Right: exact value of each trained policy under both returns, a dot a seed; crosses are "
        "known policies. Same weights, tasks and network: only the return differs.",
    )
    return found


def _share(result: dict[str, Any]) -> list[float]:
    low, high = result["sample"]["uniform"], result["sample"]["optimum"]
    return [(value - low) / (high - low) for value in result["curve"]["return"]]


def of_supervision(rows: Sequence[Row]) -> Figures:
    names = seen(rows, list(supervision.ARMS))
    if not names:
        return {}
    figure, axes = subplots(1, 2, width=4.6, height=0.32 * len(names) + 1.4)
    for axis, how in zip(axes[0], ("sample", "argmax"), strict=True):
        grid = np.array(
            [
                [
                    mean_interval(list(values(rows, name, how, f"distance {ref}").values()))[0]
                    for ref in supervision.REFERENCES
                ]
                for name in names
            ]
        )
        axis.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axis.grid(False)
        for (i, j), value in np.ndenumerate(grid):
            if np.isfinite(value):
                axis.text(
                    j,
                    i,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if value > 0.5 else "black",
                )
        axis.set_xticks(range(len(supervision.REFERENCES)), supervision.REFERENCES, rotation=30, fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.set_title("sampled" if how == "sample" else how, fontsize=8)
        axis.set(xlabel="reference", ylabel="trained on")
    found: Figures = {
        "distances": (
            figure,
            "Distance of each trained policy to reference policies, mean over seeds: total variation on the states that the "
            "policy itself visits and the reference does not tie. Empty: it visits no such state. Look along a row for the "
            "pale cell: the learner that is executed. Sampled and argmax are different learners for the same weights.",
        )
    }
    figure, axes = subplots(1, 2, width=5.0, height=4.2)
    points(axes[0, 0], {name: list(values(rows, name, "sample", "cum").values()) for name in names})
    axes[0, 0].set_xticks(range(len(names)), names, rotation=60, fontsize=7, ha="right")
    exact = supervision.reference_values(supervision.HORIZON)
    for name in ("bayes-cum", "thompson", "ucb1", "uniform"):
        axes[0, 0].axhline(exact[name][0], color=GREY, linewidth=0.8, linestyle=":")
        axes[0, 0].annotate(name, (len(names) - 1, exact[name][0]), fontsize=6, ha="right", va="bottom")
    axes[0, 0].set(ylabel="exact sum of rewards, sampled (H = 10)")
    axis = axes[0, 1]
    for i, name in enumerate(names):
        xs, ys = (list(values(rows, name, "sample", key).values()) for key in ("drift", "tv"))
        axis.plot(xs, ys, "os^Dv"[i % 5], color=PALETTE[i % len(PALETTE)], markersize=4, alpha=0.7, label=name)
    axis.plot([1e-3, 1], [1e-3, 1], color=GREY, linewidth=0.8)
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="sum of one-step distances (right side of (4))",
        ylabel="distance of episodes' laws",
    )
    axis.legend(fontsize=5, frameon=False)
    found["values"] = (
        figure,
        "Left: exact sum of rewards of each trained policy, a dot a seed, the mean with its 95 % interval beside it; dotted "
        "lines are known policies. Right: both sides of (4) for each trained policy against the law its labels aim at; the "
        "line is equality, above it nothing may lie.",
    )
    return found


def of_recursions(rows: Sequence[Row]) -> Figures:
    kinds = [kind for kind in recursions.RECURSIONS if seen(rows, [f"{kind}-{way}" for way in recursions.WAYS])]
    if not kinds:
        return {}
    ways = [*recursions.WAYS, *recursions.BEYOND]
    styles = ("-", "-", "-", "--", "-.", "--", ":", ":")
    figure, axes = subplots(2, 3, width=3.8)
    for axis, kind in zip(axes.flat, kinds, strict=False):
        for i, way in enumerate(ways):
            curves = [row["result"]["error"] for row in rows if row["name"] == f"{kind}-{way}"]
            if curves:
                x = np.arange(1, len(curves[0]) + 1)
                band(axis, x, list(np.maximum(curves, FLOOR)), way, PALETTE[i % len(PALETTE)], styles[i])
        axis.axvline(recursions.HORIZON, color=GREY, linewidth=0.8, linestyle=":")
        axis.set_title(kind, fontsize=8)
        unit = "share of wrong states" if recursions.RECURSIONS[kind].levels else "error (standard deviations)"
        axis.set(xlabel="interactions t", ylabel=unit, yscale="log")
        axis.set_ylim(bottom=FLOOR if recursions.RECURSIONS[kind].levels else None)
    for axis in list(axes.flat)[len(kinds) :]:
        axis.set_axis_off()
    named = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    axes[-1, -1].legend(named.values(), named, fontsize=9, frameon=False, loc="center")
    found: Figures = {
        "errors": (
            figure,
            "Error of the state that is read or carried after t interactions: mean over seeds with the 95 % interval. "
            "direct: off the prefix, taught at every t; final: taught at H alone; pad: carried in a state token; none and "
            "relative: direct without learned positions. The dotted line is the trained horizon: learned positions end there.",
        )
    }
    bounded = [kind for kind in kinds if any(row["name"] == f"{kind}-pad-2" and "gap" in row["result"] for row in rows)]
    if bounded:
        figure, axes = subplots(1, len(bounded), width=3.4)
        for axis, kind in zip(axes[0], bounded, strict=True):
            results = [row["result"] for row in rows if row["name"] == f"{kind}-pad-2"]
            x = np.arange(1, len(results[0]["gap"]) + 1)
            band(axis, x, [found["gap"] for found in results], "error of the carried state", PALETTE[0])
            band(axis, x, [found["bound"] for found in results], "bound (7), L = 1", PALETTE[1], "--")
            axis.axvline(recursions.HORIZON, color=GREY, linewidth=0.8, linestyle=":")
            axis.set_title(kind, fontsize=8)
            axis.set(xlabel="interactions t", ylabel="largest coordinate's error", yscale="log")
            axis.legend(fontsize=6, frameon=False)
        found["growth"] = (
            figure,
            "Growth of a carried state's error against (7) with its own one-step errors, both in the state's own units. The "
            "gap between the lines is what contraction and errors of both signs save.",
        )
    return found


FIGURES: dict[str, Callable[[Sequence[Row]], Figures]] = {
    "rewards": of_rewards,
    "supervision": of_supervision,
    "recursions": of_recursions,
}
