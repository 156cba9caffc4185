"""The demystify study: what decides whether RL post-training works, with the algorithm held fixed?

Tiny scale: policies of 24 to 333 thousand parameters, pre-trained here on text that comes with Python, one target sentence
whose prior is moved at will and known exactly. With `--model` the full-size protocol (full.py) runs instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from assay.protocols import UserError
from assay.studies.demystify import full
from assay.studies.demystify.full_options import FullOptions
from assay.studies.demystify.policies import SCALES
from assay.studies.grid import Cell, Finding, Options, Row

STARTS, REWARDS = ("base", "sft+", "sft-"), ("sparse", "dense")
ONE = "51k"  # the scale of what is asked at one scale only
RATIOS = (0.0, 0.001, 0.01, 0.05)  # of SFT+ in the prior sweep; the matrix has 0.2
PLAIN: dict[str, Any] = {
    "part": "matrix",
    "scale": ONE,
    "start": "base",
    "recipe": {},
    "reward": "sparse",
    "algorithm": "grpo",
    "prompts": "quote",
    "steps": 96,
    "tasks": 1,
    "rollouts": 32,  # the whole batch is one group, as the paper's 32 samples of one prompt
    "updates": 1,
    "rate": 1e-3,
    "temperature": 1.0,
    "kl": 0.01,  # PPO only
}
RANDOM: dict[str, Any] = {"part": "random", "reward": "random", "steps": 60, "tasks": 16, "rollouts": 8, "rate": 1e-3}
MATHS: dict[str, Any] = {"part": "maths", "prompts": "pairs", "steps": 40}  # the paper's two tasks: 128 and 54 batches
COPIES: dict[str, Any] = {"tuning_updates": 12, "tuning_rate": 6e-4}  # SFT+ of maths: 384 copies, the paper's number


class DemystifyOptions(Options, FullOptions):
    """Without a model: the tiny scale."""

    scale: Literal["tiny"] = "tiny"
    """Policies made here, 24 to 333 thousand parameters. For larger ones give --model."""
    part: Literal["all", "matrix", "prior", "random", "maths"] = "all"
    """Tiny scale: every part; or starts x rewards x sizes; the sweep of the prior; random rewards; a maths problem
    with milestones."""


class Demystify:
    name = "demystify"
    title = "What decides whether RL post-training works: the prior, the reward, the prompts, or the size?"
    paper = "arXiv 2608.24949, Demystifying Reinforcement Learning Post-Training of Language Models"
    fidelity = "reconstruction"
    about = (
        "Starts {base, SFT+, SFT-} x rewards {sparse, dense} x four sizes, PPO beside GRPO, a sweep of the prior, random "
        "rewards on narrow and broad prompts, and a maths problem with milestones. Probabilities and entropies are exact. "
        "Tiny scale: 5 priors, about half an hour on 2 cores; --model PATH runs the paper's protocol on a model of yours."
    )
    version = 1
    seeds = 5
    options = DemystifyOptions

    def folder(self, options: DemystifyOptions) -> str:
        """Another model, task or part has its own: none replaces the report of another."""
        if options.model:
            return f"demystify-full-{options.task}-{Path(options.model).name}"
        return f"demystify-{options.scale}" + (f"-{options.part}" if options.part != "all" else "")

    def cells(self, options: DemystifyOptions, seeds: Sequence[int]) -> list[Cell]:
        """Seed by seed, so that what is finished early has all parts. Neighbours are of unlike sizes: two workers do not
        wait for one prior."""
        given = options.model_fields_set
        if options.model and "part" in given:
            raise UserError("--part is of the tiny scale: leave it out, or leave out --model")
        if not options.model and (full_only := sorted(given & set(FullOptions.model_fields) - {"model"})):
            name = full_only[0].replace("_", "-")
            raise UserError(
                f"--{name} needs --model; without it the tiny scale runs, whose maths problem is --part maths"
            )
        if options.model:
            return full.cells(options, seeds)
        found = [Cell(name, seed, settings) for seed in seeds for name, settings in tiny_cells()]
        chosen = [cell for cell in found if options.part in ("all", cell.settings["part"])]
        if not chosen:
            raise UserError(f"part {options.part!r} has no cells")
        return chosen

    def run(self, cell: Cell, folder: Path) -> dict[str, Any]:
        if full.is_full(cell.settings):
            return full.run(cell, folder)
        from assay.studies.demystify import cells

        return cells.run(cell.settings, cell.seed)

    def findings(self, rows: Sequence[Row], options: DemystifyOptions) -> list[Finding]:
        if options.model:
            return full.findings(rows, options)
        from assay.studies.demystify import findings, findings_maths

        return [*findings.findings(rows), *findings_maths.findings(rows)]

    def figures(self, rows: Sequence[Row], options: DemystifyOptions) -> dict[str, Any]:
        if options.model:
            return full.figures(rows, options)
        from assay.studies.demystify import figures

        return figures.figures(rows)


def tiny_cells() -> list[tuple[str, dict[str, Any]]]:
    """(name, settings) of the tiny grid."""
    found: list[tuple[str, dict[str, Any]]] = []
    for start in STARTS:
        for reward in REWARDS:
            for scale in reversed(SCALES):
                own = {"start": start, "reward": reward, "scale": scale}
                found.append((f"{start}-{reward}-{scale}", PLAIN | own))
    for start in STARTS:
        for reward in REWARDS:
            other = {"start": start, "reward": reward, "algorithm": "ppo"}
            found.append((f"{start}-{reward}-{ONE}-ppo", PLAIN | other))
    for ratio in RATIOS:
        mixed: dict[str, Any] = {"part": "prior", "start": "sft+", "recipe": {"ratio": ratio}}
        found.append((f"prior-{ratio:g}-{ONE}", PLAIN | mixed))
    for prompts in ("narrow", "broad"):
        for updates in (1, 8):
            found.append((f"random-{prompts}-{updates}", PLAIN | RANDOM | {"prompts": prompts, "updates": updates}))
    for start in STARTS:
        for reward in REWARDS:
            recipe = {"task": "maths"} | (COPIES if start == "sft+" else {})
            found.append(
                (f"maths-{start}-{reward}", PLAIN | MATHS | {"start": start, "reward": reward, "recipe": recipe})
            )
    return found


STUDY = Demystify()
