"""Figures of the tiny study. Bands and bars are 95 % t intervals over seeds; dots are seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from assay.studies.charts import GREY, PALETTE, band, mean_interval, subplots
from assay.studies.demystify.findings import RAISED, chance, matrix, pick, sparse_quote
from assay.studies.demystify.measure import hit_probability
from assay.studies.demystify.policies import SCALES
from assay.studies.grid import Row

STARTS = {"sft-": "SFT-", "base": "base", "sft+": "SFT+"}
COLOURS = dict(zip(STARTS, PALETTE, strict=False))
LEAST = 1e-8  # the smallest prior that an axis shows: what is below stands at its edge


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Those for which there are rows."""
    made = {
        "matrix": before_after(rows),
        "curves": curves(rows),
        "prior": prior(rows),
        "entropy": entropy_by_stage(rows),
        "algorithms": algorithms(rows),
        "random": spurious(rows),
        "maths": maths(rows),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def before_after(rows: Sequence[Row]) -> tuple[Any, str] | None:
    own = matrix(rows)
    if not own:
        return None
    figure, axes = subplots(2, len(SCALES), 2.5, 2.4)
    for line, reward in enumerate(("sparse", "dense")):
        for column, scale in enumerate(SCALES):
            axis = axes[line, column]
            for place, start in enumerate(STARTS):
                cells = pick(own, start=start, reward=reward, scale=scale)
                _column(axis, place - 0.17, [chance(row, "before") for row in cells], GREY)
                _column(axis, place + 0.17, [chance(row, "after") for row in cells], COLOURS[start])
            axis.set(ylim=(-0.03, 1.03), title=f"{scale}, {reward}", xticks=range(len(STARTS)))
            axis.set_xticklabels(list(STARTS.values()))
            if not column:
                axis.set_ylabel("P(target), T = 1")
    return figure, (
        "Exact probability of the target before (grey) and after RL (colour), by start, reward and size. Look at the crushed "
        "start (SFT-), which should stay at 0 in every panel, and at base, where rewards may differ."
    )


def curves(rows: Sequence[Row]) -> tuple[Any, str] | None:
    own = matrix(rows)
    if not own:
        return None
    figure, axes = subplots(2, len(SCALES), 2.5, 2.3)
    for line, reward in enumerate(("sparse", "dense")):
        for column, scale in enumerate(SCALES):
            axis = axes[line, column]
            for start, label in STARTS.items():
                cells = pick(own, start=start, reward=reward, scale=scale)
                if cells:
                    lines = [np.exp(np.array(row["result"]["curves"]["log_p"])) for row in cells]
                    band(axis, range(len(lines[0])), lines, label, COLOURS[start])
            axis.set(ylim=(-0.03, 1.03), title=f"{scale}, {reward}")
            if not column:
                axis.set_ylabel("P(target), T = 1")
            if line:
                axis.set_xlabel("RL step (32 answers)")
    _legend(axes[0, 0])
    return figure, (
        "Exact probability of the target after each RL step. Look at base under the sparse reward: a plateau until the first "
        "hit, then a rise; where the band is wide some seeds have taken off and others have not."
    )


def prior(rows: Sequence[Row]) -> tuple[Any, str] | None:
    own = sparse_quote(rows)
    if not own:
        return None
    figure, axes = subplots(1, 2, 4.6, 3.3)
    seen = [row for row in own if row["result"]["first_hit"] is not None]
    missed = [row for row in own if row["result"]["first_hit"] is None]
    played = max(row["result"]["played"] for row in own)
    left, right = axes[0]
    left.plot(
        [_shown(row) for row in seen],
        [row["result"]["first_hit"] for row in seen],
        "o",
        color=PALETTE[0],
        label="first hit",
    )
    left.plot([_shown(row) for row in missed], [played] * len(missed), "x", color=PALETTE[1], label="none in the run")
    grid = np.logspace(math.log10(LEAST), 0, 200)
    for share, style in ((0.5, "-"), (0.05, ":"), (0.95, ":")):
        needed = np.log1p(-share) / np.log1p(-np.minimum(grid, 1 - 1e-9))
        label = "median of 1 - (1 - p0)^N" if share == 0.5 else "5 % and 95 %" if share == 0.05 else None
        left.plot(grid, np.maximum(needed, 1), style, color=GREY, label=label)
    left.set(
        xscale="log",
        yscale="log",
        xlabel="exact prior p0",
        ylabel="answers until the first hit",
        ylim=(0.8, played * 3),
    )
    _legend(left)
    for start, label in STARTS.items():
        cells = [row for row in own if row["settings"]["start"] == start]
        if cells:
            right.plot(
                [_shown(row) for row in cells],
                [chance(row, "after") for row in cells],
                "o",
                color=COLOURS[start],
                label=label,
            )
    right.plot(grid, [hit_probability(float(p), played) for p in grid], color=GREY, label=f"1 - (1 - p0)^{played}")
    right.axhline(RAISED, color=GREY, linewidth=0.8, linestyle="--")
    right.set(xscale="log", xlabel="exact prior p0", ylabel="P(target) after sparse RL")
    _legend(right)
    return figure, (
        f"Every sparse GRPO run on the quote prompt, a dot each; priors below {LEAST:g} stand at the left edge. Left: the "
        "first hit comes when the exact prior says it does. Right: the final probability jumps where the run is long enough "
        "for a hit."
    )


def _shown(row: Row) -> float:
    return max(chance(row, "before"), LEAST)


def entropy_by_stage(rows: Sequence[Row]) -> tuple[Any, str] | None:
    stages: dict[str, Callable[[str], list[float]]] = {
        "pre-trained": lambda scale: _entropies(matrix(rows, start="base", reward="sparse", scale=scale), "before"),
        "SFT+": lambda scale: _entropies(matrix(rows, start="sft+", reward="sparse", scale=scale), "before"),
        "SFT+, sparse RL": lambda scale: _entropies(matrix(rows, start="sft+", reward="sparse", scale=scale), "after"),
        "SFT+, dense RL": lambda scale: _entropies(matrix(rows, start="sft+", reward="dense", scale=scale), "after"),
    }
    if not any(made(scale) for made in stages.values() for scale in SCALES):
        return None
    figure, axes = subplots(1, 1, 6.0, 3.2)
    axis = axes[0, 0]
    for i, scale in enumerate(SCALES):
        at = [
            (j + 0.12 * (i - 1.5), mean_interval(made(scale))) for j, made in enumerate(stages.values()) if made(scale)
        ]
        means = [found[0] for _, found in at]
        reach = [[found[0] - found[1] for _, found in at], [found[2] - found[0] for _, found in at]]
        finite = np.isfinite(reach).all()
        axis.errorbar(
            [x for x, _ in at],
            means,
            yerr=reach if finite else None,
            fmt="o-",
            capsize=2,
            markersize=4,
            color=PALETTE[i],
            label=scale,
        )
    axis.set_xticks(range(len(stages)), list(stages), fontsize=8)
    axis.set(ylabel="entropy (nats per step)")
    _legend(axis)
    return figure, (
        "Exact full-vocabulary entropy of answers to the quote prompt by stage and size, T = 1. Look at how much of it is left "
        "after supervised tuning, and how little after RL."
    )


def _entropies(rows: Sequence[Row], when: str) -> list[float]:
    return [float(row["result"][when]["inside"]["entropy"]) for row in rows]


def algorithms(rows: Sequence[Row]) -> tuple[Any, str] | None:
    ppo = pick(rows, part="matrix", algorithm="ppo")
    if not ppo:
        return None
    scale = ppo[0]["settings"]["scale"]
    figure, axes = subplots(2, 3, 2.7, 2.2)
    for line, reward in enumerate(("sparse", "dense")):
        for column, (start, label) in enumerate(STARTS.items()):
            axis = axes[line, column]
            for i, algorithm in enumerate(("grpo", "ppo")):
                cells = pick(rows, part="matrix", algorithm=algorithm, scale=scale, start=start, reward=reward)
                if cells:
                    lines = [np.exp(np.array(row["result"]["curves"]["log_p"])) for row in cells]
                    band(axis, range(len(lines[0])), lines, algorithm.upper(), PALETTE[i], ("-", "--")[i])
            axis.set(ylim=(-0.03, 1.03), title=f"{label}, {reward}")
            if not column:
                axis.set_ylabel("P(target), T = 1")
            if line:
                axis.set_xlabel("RL step (32 answers)")
    _legend(axes[0, 0])
    return (
        figure,
        f"PPO with a critic beside GRPO at {scale}, same priors. Look at whether the six panels have the same order.",
    )


def spurious(rows: Sequence[Row]) -> tuple[Any, str] | None:
    own = pick(rows, part="random")
    if not own:
        return None
    figure, axes = subplots(1, 3, 3.6, 3.0)
    inside, outside, guesses = axes[0]
    arms = [(prompts, updates) for prompts in ("narrow", "broad") for updates in (1, 8)]
    for prompts, updates in arms:
        cells = pick(own, prompts=prompts, updates=updates)
        colour, style = PALETTE[("narrow", "broad").index(prompts)], "-" if updates == 8 else "--"
        if cells:
            label = f"{prompts}, {updates} update{'s' if updates > 1 else ''}"
            lines = [row["result"]["curves"]["entropy"] for row in cells]
            band(inside, range(1, len(lines[0]) + 1), lines, label, colour, style)
            band(
                outside,
                cells[0]["result"]["probe"]["at"],
                [row["result"]["probe"]["outside"] for row in cells],
                label,
                colour,
                style,
            )
    for place, (prompts, updates) in enumerate(arms):
        cells = pick(own, prompts=prompts, updates=updates)
        for shift, when, colour in (
            (-0.15, "before", GREY),
            (0.15, "after", PALETTE[("narrow", "broad").index(prompts)]),
        ):
            _column(guesses, place + shift, [row["result"][when]["reading"]["accuracy"] for row in cells], colour)
    inside.set(title="answers to training prompts", xlabel="step (128 answers)", ylabel="entropy (nats per step)")
    outside.set(title="held-out text", xlabel="step (128 answers)", ylabel="entropy (nats per step)")
    guesses.set(title="held-out text", ylabel="share of right first guesses")
    guesses.set_xticks(range(len(arms)), [f"{p}\n{u}" for p, u in arms], fontsize=8)
    _legend(inside)
    return figure, (
        "Random rewards: entropy of the answers to the training prompts and, teacher-forced, on held-out text; right the share "
        "of right first guesses there, before (grey) and after, by prompts and updates a batch. Look at whether narrow prompts "
        "sharpen and broad ones blur, and at what both forget."
    )


def maths(rows: Sequence[Row]) -> tuple[Any, str] | None:
    own = pick(rows, part="maths")
    if not own:
        return None
    figure, axes = subplots(1, 4, 2.7, 2.6)
    for axis, (start, label) in zip(axes[0], STARTS.items(), strict=False):
        for i, reward in enumerate(("sparse", "dense")):
            lines = [row["result"]["curves"]["success"] for row in pick(own, start=start, reward=reward)]
            if lines:
                name = ("the answer alone", "milestones")[i]
                band(axis, range(1, len(lines[0]) + 1), lines, name, PALETTE[i], ("-", "--")[i])
        axis.set(ylim=(-0.03, 1.03), title=label, xlabel="RL step (32 answers)")
    axes[0, 0].set_ylabel("share of right answers")
    _legend(axes[0, 0])
    axis = axes[0, -1]
    for place, start in enumerate(STARTS):
        cells = pick(own, start=start)
        for shift, when, colour in ((-0.17, "before", GREY), (0.17, "after", COLOURS[start])):
            tenfold: dict[int, list[float]] = {}  # seed -> its rewards' values
            for row in cells:
                tenfold.setdefault(row["seed"], []).append(row["result"][when]["log_p"] / math.log(10))
            _column(axis, place + shift, [float(np.mean(own)) for own in tenfold.values()], colour)
    axis.set_xticks(range(len(STARTS)), list(STARTS.values()))
    axis.set(title="worked solution", ylabel="log10 P, T = 1")
    return figure, (
        "The maths problem: share of right boxes while RL goes on, by start and reward. Right the exact probability of the "
        "worked solution before (grey) and after, mean of both rewards. Look at whether milestones make a difference, and at "
        "what becomes of the way to the answer."
    )


def _column(axis: Any, x: float, values: Sequence[float], colour: str) -> None:
    """Seeds as dots, their mean with its interval."""
    if not values:
        return
    axis.plot([x] * len(values), values, "o", color=colour, alpha=0.35, markersize=3)
    mean, low, high = mean_interval(values)
    reach = [[mean - low], [high - mean]] if math.isfinite(low) else None
    axis.errorbar([x], [mean], yerr=reach, fmt="D", color=colour, markersize=4, capsize=2)


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, frameon=False)
