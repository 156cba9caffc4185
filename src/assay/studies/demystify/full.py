"""The full-size protocol of the study, for those who have a model: three starts times two rewards, trained and measured.

    assay study demystify --model PATH --task quote            one sentence, sparse and dense reward
    assay study demystify --model PATH --task maths --judge http://host:port/v1

Each cell makes (or finds) its start, trains with RL in a run directory of its own, and samples. A cell that was killed goes on
from its run's last checkpoint. Values are those of arXiv 2608.24949's released code (PAPER); options override them, so that
the whole protocol also runs on a policy of 300 thousand parameters, which says that it works and nothing else.

Otherwise than there: one learning rate for actor and critic (task M has 1e-4 for its critic); the optimiser steps on each of
the `epochs` passes over a batch, where the released code may add them up to one step (`--epochs 1`); a dual clip of 3, as
our preset `ppo` has it. Left out: the pre-training stages of OLMo 3, and random rewards at full size (train with the method
random-reward on prompts of studies/demystify/wildchat.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from assay.envs.pairs import Problem
from assay.envs.quote import TARGET
from assay.protocols import UserError
from assay.rng import stable_hash
from assay.rundir import RunDir
from assay.studies.charts import PALETTE, mean_interval, points, subplots
from assay.studies.demystify.full_options import FullOptions
from assay.studies.demystify.full_policies import (
    BATCH,
    adapter,
    fingerprint,
    lines_of,
    measure,
    run_values,
    start_of,
)
from assay.studies.demystify.judge import Judge
from assay.studies.demystify.sft_data import SHARE
from assay.studies.grid import Cell, Finding, Row, Verdict
from assay.train import resume, train

STARTS = ("base", "sft+", "sft-")
REWARDS = ("sparse", "dense")
JUDGED = "assay.studies.demystify.judge:JudgedMilestones"


@dataclass(frozen=True, slots=True)
class Values:
    """The paper's, of one task; the learning rates are AdamW's."""

    steps: int  # RL rollout batches
    rollouts: int  # of a batch, all of the same prompt
    sft_steps: int
    samples: int
    max_tokens: int
    learning_rate: float
    sft_learning_rate: float
    temperature: float  # of RL's samples
    eval_temperature: float
    kl: float  # coefficient of k1 in the reward
    norm: str  # of PPO's advantages


PAPER = {
    "quote": Values(128, 32, 500, 10_000, 75, 2e-5, 2e-5, 0.4, 0.9, 0.01, "mean"),
    "maths": Values(54, 32, 24, 128, 1500, 5e-5, 5e-5, 0.7, 0.7, 1e-4, "std"),
}


def is_full(settings: dict[str, Any]) -> bool:
    """Are these a cell's settings at full size?"""
    return settings.get("scale") == "full"


# --------------------------------------------------------------------------------------------------------------- cells


def cells(options: FullOptions, seeds: Sequence[int]) -> list[Cell]:
    """Base before the tuned starts, sparse before dense. UserError for options that cannot work, before anything runs."""
    common = _common(options)
    found = []
    for seed in seeds:
        for start in STARTS:
            for reward in REWARDS if options.reward == "both" else (options.reward,):
                judged = reward == "dense" and options.task == "maths"
                own: dict[str, Any] = {"start": start, "reward": reward, "judge": options.judge if judged else ""}
                own["judge_model"] = options.judge_model if own["judge"] else ""
                own |= {"lines": "", "lines_hash": ""} if start != "sft+" else {}
                own |= {"mask_prompt": False} if start != "sft-" else {}
                own |= {"sft_steps": 0, "sft_learning_rate": 0.0} if start == "base" else {}
                found.append(Cell(f"full-{options.task}-{start}-{reward}", seed, common | own))
    return found


def _common(options: FullOptions) -> dict[str, Any]:
    if not options.model:
        raise UserError("full size needs --model: a folder, a hub name or a built-in policy")
    paper = PAPER[options.task]
    taken = ("steps", "rollouts", "sft_steps", "samples", "max_tokens", "learning_rate", "sft_learning_rate")
    values = {name: getattr(options, name) or getattr(paper, name) for name in taken}
    lines_hash = ""
    if options.task == "quote":
        rows, accumulation = BATCH["quote"]
        lines, size = lines_of(options.lines, TARGET), values["sft_steps"] * rows * accumulation
        if len(lines.usable) < size - round(SHARE * size):
            raise UserError(
                f"SFT+ takes {size - round(SHARE * size)} different lines, and there are {len(lines.usable)}: give --lines a "
                "longer text, or fewer --sft-steps"
            )
        lines_hash = stable_hash("\n".join(lines.usable))
    if options.judge:
        if options.task != "maths":
            raise UserError("--judge is for --task maths: the quote task's rewards need none")
        Judge(options.judge, options.judge_model)
    words = bool(options.judge) or options.reward == "sparse"
    return {
        "scale": "full",
        "task": options.task,
        "form": "words" if words else "short",
        "model": str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model,
        "model_hash": fingerprint(options.model),
        "algorithm": options.algorithm,
        **values,
        "temperature": paper.temperature,
        "eval_temperature": paper.eval_temperature,
        "epochs": options.epochs,
        "mask_prompt": options.mask_prompt,
        "lines": str(Path(options.lines).resolve()) if options.lines else "",
        "lines_hash": lines_hash,
        "lora_rank": options.lora_rank,
        "device": options.device,
        "dtype": options.dtype,
    }


def rl_values(settings: dict[str, Any], seed: int, model: str, out: Path) -> dict[str, Any]:
    """The configuration of a cell's run: every batch is one group of answers to one prompt."""
    paper = PAPER[settings["task"]]
    values = run_values(settings, seed, model, settings["reward"]) | adapter(settings)
    methods, arguments = [settings["algorithm"]], dict[str, Any]()
    if settings["judge"]:
        methods.append(JUDGED)
        arguments[JUDGED] = {"url": settings["judge"], "model": settings["judge_model"]}
    slots: dict[str, Any] = {"kl": "reward", "kl_coefficient": paper.kl}
    if settings["algorithm"] == "ppo":
        slots["advantage_norm"] = paper.norm
    return values | {
        "method": methods,
        "method_args": arguments,
        "slots": slots,
        "steps": settings["steps"],
        "tasks_per_step": 1,
        "rollouts_per_task": settings["rollouts"],
        "epochs": settings["epochs"],
        "learning_rate": settings["learning_rate"],
        "evaluation": {"tasks": 0, "before": False},
        "out": str(out),
    }


def run(cell: Cell, folder: Path) -> dict[str, Any]:
    """Start, RL, samples. `folder` keeps the run directory; starts lie beside it, for cells share them."""
    transformers_logging.disable_progress_bar()  # of loading and saving, several times a cell
    settings = cell.settings
    if settings["judge"]:  # a dead one would give every answer 0 for hours
        Judge(settings["judge"], settings["judge_model"]).check(Problem())
    model, start = start_of(settings, cell.seed, folder.parent)
    out = folder.resolve() / "run"
    if (out / "config.toml").exists():
        result = resume(out)
    else:
        result = train(rl_values(settings, cell.seed, model, out), where=cell.name)
    if result.stopped:
        raise UserError(
            f"{cell.name} was stopped after step {result.spent['steps']}: the same command goes on from there"
        )
    lines = RunDir(out).read_metrics()
    return {
        **start,
        "after": measure(settings, cell.seed, str(out), settings["eval_temperature"]),
        "curve_reward": [line.get("reward") for line in lines],
        "curve_success": [line.get("success") for line in lines],
        "curve_entropy": [line.get("entropy") for line in lines],
        "judge_failures": [line.get("judge_failures") for line in lines] if settings["judge"] else [],
        "tokens": result.spent["tokens"],
    }


# ------------------------------------------------------------------------------------------------------------ findings


def findings(rows: Sequence[Row], options: FullOptions) -> list[Finding]:
    """Verdicts take two seeds or more: over one, an interval would be of samples and not of trainings."""
    own = [row for row in rows if is_full(row["settings"])]
    sampled = [
        row["result"]["after"]["exact"] - row["result"]["before"]["exact"]
        for row in _of(own, "sft+", "sparse")
        if row["result"]["before"]["exact"]
    ]
    learnable = any(row["result"]["before"]["exact"] for row in own)
    found = [
        Finding(
            "coverage", "Sparse RL raises the target where the start samples it already (SFT+).",
            *_raised(sampled, "exact share after minus before RL"), _table(own),
        ),
        Finding(
            "crushed, sparse", "Sparse RL brings nothing back where the prior was crushed (SFT-).",
            *_nothing(_of(own, "sft-", "sparse"), learnable),
        ),
        Finding(
            "crushed, dense", "A dense reward brings nothing back either where the prior was crushed (SFT-).",
            *_nothing(_of(own, "sft-", "dense"), learnable),
        ),
        Finding(
            "dense lifts base", "From the base policy, the dense reward ends with more of the target than the sparse one.",
            *_raised(_paired(own, "base", "dense", "sparse"), "exact share, dense minus sparse, paired by seed"),
        ),
    ]  # fmt: skip
    if options.task == "quote":
        hit = any(row["result"]["after"]["exact"] for reward in REWARDS for row in _of(own, "sft+", reward))
        worse = _paired(own, "sft+", "sparse", "dense") if hit else []
        found.append(
            Finding(
                "proxy", "From SFT+, the dense reward ends with fewer exact matches than the sparse one.",
                *_raised(worse, "exact share, sparse minus dense, paired by seed"),
            )
        )  # fmt: skip
    return found


def _of(rows: Sequence[Row], start: str, reward: str) -> list[Row]:
    wanted = (start, reward)
    return [row for row in rows if (row["settings"]["start"], row["settings"]["reward"]) == wanted]


def _paired(rows: Sequence[Row], start: str, more: str, less: str) -> list[float]:
    """Differences of the exact share after RL between two rewards, over seeds that have both."""
    after = {
        reward: {row["seed"]: row["result"]["after"]["exact"] for row in _of(rows, start, reward)}
        for reward in (more, less)
    }
    return [after[more][seed] - after[less][seed] for seed in sorted(after[more].keys() & after[less].keys())]


def _raised(differences: Sequence[float], what: str) -> tuple[Verdict, str]:
    """holds: the t interval is above 0; reversed: below; does not hold: no difference in any seed; else inconclusive."""
    mean, low, high = mean_interval(differences)
    if not differences:
        return "no claim", "no seed has what it is about"
    if len(differences) < 2:
        return "no claim", f"{what}: {mean:+.4f} over one seed, which has no interval"
    verdict: Verdict = "inconclusive"
    if not any(differences):
        verdict = "does not hold"
    elif low > 0:
        verdict = "holds"
    elif high < 0:
        verdict = "reversed"
    return verdict, f"{what}: {mean:+.4f} [{low:+.4f}, {high:+.4f}] over {len(differences)} seeds"


def _nothing(rows: Sequence[Row], learnable: bool) -> tuple[Verdict, str]:
    """holds: no hit before RL and none after, in every seed; does not hold: the t interval of the share after RL is above 0;
    else inconclusive. No claim where SFT- left hits, or where no start had any, so that nothing was crushed."""
    if not rows:
        return "no claim", "no seed has what it is about"
    if not learnable:
        return "no claim", "no start had a hit before RL: nothing was there to crush"
    after = [row["result"]["after"]["exact"] for row in rows]
    if any(row["result"]["before"]["exact"] for row in rows):
        return "no claim", "SFT- did not crush the prior: there were hits before RL"
    mean, low, _ = mean_interval(after)
    samples = sum(row["result"]["after"]["samples"] for row in rows)
    said = f"share after RL {mean:.4f} over {len(rows)} seed{'s' * (len(rows) > 1)}, {samples} samples in all"
    if len(rows) < 2:
        return "no claim", f"{said}, and one seed makes no claim"
    return "holds" if not any(after) else "does not hold" if low > 0 else "inconclusive", said


def _table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line a start and reward, means over its seeds: shares of exact answers before RL (T: at the temperature of
    evaluations; RL: at that of RL), the probability of a hit among all of RL's samples at the latter, then after RL."""
    found = []
    for start in STARTS:
        for reward in REWARDS:
            own = _of(rows, start, reward)
            if own:
                drawn = own[0]["settings"]["steps"] * own[0]["settings"]["rollouts"]
                hit = [1 - (1 - row["result"]["before_rl"]["exact"]) ** drawn for row in own]
                found.append(
                    {
                        "start": start,
                        "reward": reward,
                        "seeds": len(own),
                        "before": _mean(own, "before", "exact"),
                        "before, RL": _mean(own, "before_rl", "exact"),
                        "P(hit)": round(sum(hit) / len(hit), 4),
                        "after": _mean(own, "after", "exact"),
                        "near": _mean(own, "after", "near"),
                        "invalid": _mean(own, "after", "invalid"),
                        "H before": _mean(own, "before", "entropy"),
                        "H after": _mean(own, "after", "entropy"),
                    }
                )
    return found


def _mean(rows: Sequence[Row], when: str, what: str) -> float | None:
    values = [row["result"][when][what] for row in rows if row["result"][when][what] is not None]
    return round(sum(values) / len(values), 4) if values else None


def figures(rows: Sequence[Row], options: FullOptions) -> dict[str, Any]:
    """The matrix of starts and rewards: exact share, and entropy, before and after RL."""
    own = [row for row in rows if is_full(row["settings"])]
    if not own:
        return {}
    figure, axes = subplots(2, 2)
    for column, reward in enumerate(REWARDS):
        for line, (what, label) in enumerate((("exact", "share of exact answers"), ("entropy", "entropy (nats)"))):
            groups, colours = dict[str, Any](), dict[str, str]()
            for i, start in enumerate(STARTS):
                cells_ = _of(own, start, reward)
                for when in ("before", "after"):
                    values = [v for row in cells_ if (v := row["result"][when][what]) is not None]
                    if values:
                        groups[f"{start}\n{when}"], colours[f"{start}\n{when}"] = values, PALETTE[i]
            points(axes[line, column], groups, colours)
            axes[line, column].set_ylabel(label)
            axes[line, column].set_title(f"{reward} reward", fontsize=9)
    question = f"answer {Problem().answer}" if options.task == "maths" else "the sentence"
    caption = (
        f"Three starts times two rewards, {question}, {own[0]['settings']['model']}. Dots are seeds, diamonds their mean with "
        "its 95 % t interval. Look for which starts rise, and what the dense reward changes."
    )
    return {"full-matrix": (figure, caption)}
