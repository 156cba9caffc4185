"""A study of the tests: its cells are coins, one of which can fail, be killed, or wait."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.protocols import UserError
from assay.rng import generator
from assay.studies.charts import points, subplots
from assay.studies.grid import Cell, Finding, Options, Row


class ToyOptions(Options):
    bias: float = 0.5
    """Of the coin."""
    mode: str = "plain"
    """plain, fail, bug, killed, killed-once, wait."""


class Toy:
    name, title, paper, fidelity = "toy", "Does the coin fall?", "none", "inferred"
    about, version, seeds, options = "A toy.", 1, 3, ToyOptions

    def folder(self, options: ToyOptions) -> str:
        return "toy"

    def cells(self, options: ToyOptions, seeds: Sequence[int]) -> list[Cell]:
        return [
            Cell(name, seed, {"bias": options.bias, "mode": options.mode if (name, seed) == ("b", 1) else "plain"})
            for seed in seeds
            for name in ("a", "b")
        ]

    def run(self, cell: Cell, folder: Path) -> dict[str, Any]:
        mode = cell.settings["mode"]
        if mode == "fail":
            raise UserError("this coin is lost: find it")
        if mode == "bug":
            raise ZeroDivisionError("a bug")
        if mode == "wait":
            time.sleep(600)
        if mode.startswith("killed") and not (mode == "killed-once" and folder.exists()):
            folder.mkdir(parents=True, exist_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        draws = generator(cell.seed, "coin", cell.name).random(100) < cell.settings["bias"]
        return {"share": float(draws.mean()), "threads": int(os.environ["OMP_NUM_THREADS"])}

    def findings(self, rows: Sequence[Row], options: ToyOptions) -> list[Finding]:
        table = [{"cell": row["name"], "share": row["result"]["share"], "unknown": None} for row in rows]
        return [Finding("falls", "It falls.", "holds", f"<b>{len(rows)}</b> rows", table)] if rows else []

    def figures(self, rows: Sequence[Row], options: ToyOptions) -> dict[str, Any]:
        figure, axes = subplots()
        points(axes[0, 0], {name: [r["result"]["share"] for r in rows if r["name"] == name] for name in ("a", "b")})
        return {"shares": (figure, 'Shares of "heads"')}


STUDY = Toy()
