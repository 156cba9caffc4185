"""The study "agentic-icl": four experiments on which decision policy a fixed network executes in contexts it shapes itself.

Each experiment is a module with `cells` and `run_cell`, its verdicts are in findings.py and its pictures in figures.py;
"text" (a language model) brings its own. All follow our reading of the paper, whose text and results we do not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from assay.protocols import UserError
from assay.studies.grid import Cell, Finding, Options, Row
from assay.studies.icl import figures, findings, recursions, rewards, supervision, text

RUN = {"recursions": recursions.run_cell, "rewards": rewards.run_cell, "supervision": supervision.run_cell}
CELLS = {"recursions": recursions.cells, "rewards": rewards.cells, "supervision": supervision.cells}


class AgenticIclOptions(Options):
    experiment: Literal["recursions", "rewards", "supervision", "text"] = "rewards"
    """recursions: carry a learner's state; rewards: one network, several returns; supervision: a learner's steps or the best
    actions as labels; text: a language model plays."""
    updates: int = Field(0, ge=0)
    """Training updates of each network; 0: the experiment's own number. Few of them show only that it runs. Not for text."""


@dataclass(frozen=True, slots=True)
class AgenticIcl:
    name: str = "agentic-icl"
    title: str = "Agentic in-context learning: the learner that a fixed network executes"
    paper: str = "Wu, Wang and Yao, Agentic In-Context Learning (our reading: its text was not at hand)"
    fidelity: str = "inferred"
    about: str = (
        "A small causal Transformer with fixed weights decides in contexts that it shapes itself. What recursions can it "
        "carry, which policy does each return teach, and what do a learner's steps teach that the best actions do not? "
        "Bandits small enough that every value and distance is exact. About 10 minutes an experiment on two cores."
    )
    version: int = 1
    seeds: int = 5
    options: type[Options] = AgenticIclOptions

    def folder(self, options: Any) -> str:
        return f"{self.name}-{options.experiment}" + (f"-{options.updates}-updates" if options.updates else "")

    def cells(self, options: Any, seeds: Sequence[int]) -> list[Cell]:
        if options.experiment == "text" and options.updates:
            raise UserError("--updates is not for --experiment text: give --seeds 1 for a first look")
        return CELLS.get(options.experiment, text.cells)(options, seeds)

    def run(self, cell: Cell, folder: Path) -> dict[str, Any]:
        experiment = cell.settings.get("experiment")
        return RUN[experiment](cell.seed, cell.settings) if experiment in RUN else text.run(cell, folder)

    def findings(self, rows: Sequence[Row], options: Any) -> list[Finding]:
        if options.experiment == "text":
            return text.findings(rows, options)
        return findings.FINDINGS[options.experiment](rows)

    def figures(self, rows: Sequence[Row], options: Any) -> dict[str, Any]:
        if options.experiment == "text":
            return text.figures(rows, options)
        return figures.FIGURES[options.experiment](rows)


STUDY = AgenticIcl()
