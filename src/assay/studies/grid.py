"""A study is a grid of cells, each a small experiment with a seed. Finished cells are kept, one file each, so that a study
that is stopped or killed goes on where it was, and `--seeds 5` after `--seeds 1` runs four more.

A cell is a pure function of (study, its version, name, settings, seed): it runs in any process and gives the same numbers.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from assay.config import Section
from assay.files import read_json, write_json
from assay.protocols import UserError
from assay.rng import stable_hash

ROW_BYTES = 1 << 24
CELL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9.+_-]*")
Verdict = Literal["holds", "does not hold", "reversed", "inconclusive", "no claim"]
Row = dict[str, Any]  # a finished cell: name, seed, settings, seconds (clock), cpu_seconds (its process), result


class Options(Section):
    """What every study takes; a study's own options derive from it."""

    seeds: int = Field(0, ge=0, le=1000)
    """Seeds of each cell; 0: the study's own number. More than before goes on from what is there."""
    jobs: int = Field(0, ge=0, le=10_000)
    """Cells at once; 0: one per processor core."""
    out: str = ""
    """Folder of cells, figures and report; absent: results/ and the study's name."""


@dataclass(frozen=True, slots=True)
class Cell:
    """`name` says what it is, without the seed, in letters, digits and ".+-_"; cells of one name differ in the seed only.
    `settings` are JSON values and decide, with the seed, every number of the result."""

    name: str
    seed: int
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """What the cells say of one claim. `table`: rows of scalars and text with the same keys, shown as they are."""

    name: str
    claim: str
    verdict: Verdict
    sentence: str  # the numbers behind the verdict: difference, interval, number of seeds
    table: list[dict[str, Any]] = field(default_factory=list)


class Study(Protocol):
    """One file or package under studies/; registry.py names them."""

    name: str
    title: str
    paper: str  # "arXiv ID, Title"
    fidelity: str  # "paper", "reconstruction", "inferred"
    about: str  # what it asks and at what scale, for --help
    version: int  # raise when the same settings would give other numbers: kept cells of another version are not used
    seeds: int  # usual number
    options: type[Options]

    def folder(self, options: Any) -> str:
        """Its own part of the default folder's name, "agentic-icl-rewards"."""
        ...

    def cells(self, options: Any, seeds: Sequence[int]) -> list[Cell]:
        """All cells, those that decide most first. UserError for options that cannot work."""
        ...

    def run(self, cell: Cell, folder: Path) -> dict[str, Any]:
        """The numbers of a cell: JSON, finite or None; lists for curves. `folder` is the cell's own, for what it must keep
        while it runs (a run directory); most need none and must not make it."""
        ...

    def findings(self, rows: Sequence[Row], options: Any) -> list[Finding]:
        """From whatever rows there are: some cells or seeds may be missing."""
        ...

    def figures(self, rows: Sequence[Row], options: Any) -> dict[str, Any]:
        """File name without ending -> (matplotlib Figure, caption)."""
        ...


class Watch:
    """What a study tells a person; this one says nothing."""

    def begin(self, cells: int, done: int) -> None: ...
    def finished(self, cell: Cell, seconds: float) -> None: ...
    def failed(self, cell: Cell, error: str) -> None: ...
    def note(self, text: str) -> None: ...


def row_path(out: Path, study: Study, cell: Cell) -> Path:
    """Where a finished cell lies; its name covers all that decides its numbers. UserError: the cell's name is none."""
    if not CELL_NAME.fullmatch(cell.name):
        raise UserError(f"study {study.name}: cell name {cell.name!r} must be of letters, digits and .+-_")
    what = json.dumps([study.name, study.version, cell.name, cell.seed, cell.settings], sort_keys=True)
    return out / "cells" / f"{cell.name}-s{cell.seed}-{stable_hash(what)[:12]}.json"


def finished(out: Path, study: Study, cell: Cell) -> Row | None:
    """The cell's row; None where there is none, or a file that is not it (cut, foreign)."""
    path = row_path(out, study, cell)
    if not path.is_file():
        return None
    try:
        row = read_json(path, ROW_BYTES)
    except UserError:
        return None
    asked = {"name": cell.name, "seed": cell.seed, "settings": json.loads(json.dumps(cell.settings))}
    same = all(row.get(key) == value for key, value in asked.items())
    return row if same and isinstance(row.get("result"), dict) and isinstance(row.get("seconds"), float) else None


def load_rows(out: Path, study: Study, cells: Sequence[Cell]) -> list[Row]:
    """Those of `cells` that are finished, in their order."""
    return [row for cell in cells if (row := finished(out, study, cell))]


def run_cell(study: Study, cell: Cell, out: Path) -> None:
    """Runs one cell and writes its row."""
    path = row_path(out, study, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    began, worked = time.perf_counter(), time.process_time()
    result = study.run(cell, out / "work" / path.stem)
    row = {"name": cell.name, "seed": cell.seed, "settings": cell.settings}
    times = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - worked}
    write_json(path, row | {name: round(value, 3) for name, value in times.items()} | {"result": result})
