"""study: a controlled experiment from one command, with findings, figures and a page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from assay.cli.flags import Help, Line, read, show_help
from assay.cli.tables import console
from assay.studies.grid import Options

if TYPE_CHECKING:
    from assay.studies.grid import Cell, Study

INCOMPLETE = 1
WIDE = 120  # columns that a table of findings may take, whatever the terminal has: a cut name is worth nothing
STYLES = {"holds": "bold green", "reversed": "bold red", "does not hold": "bold red", "inconclusive": "bold yellow"}


class Named(Options):
    name: str = ""
    """A study of --list, or module:OBJECT of your own."""


def study(line: Line) -> int:
    from assay.studies.registry import study_named

    switches = {
        "list": (bool, "Every study with what it asks."),
        "dry_run": (bool, "Print the cells that would run, start nothing."),
        "json": (bool, "One JSON object on standard output, and nothing else there."),
    }
    if line.switch("list") or (not line.positional and not line.wants_help):
        return _list(line.switch("json"))
    if not line.positional or line.positional[0] == "-h":
        return _overview(switches)
    name = line.positional[0]
    chosen = study_named(name)
    examples = (f"study {name} --seeds 1", f"study {name} --dry-run", "study --list")
    end = "" if chosen.title.endswith("?") else "."
    about = f"{chosen.title}{end}\n{chosen.about}\nA finished cell is kept: the same command goes on where it was."
    page = Help(f"study {name}", about, examples, (), switches)
    if line.wants_help:
        return show_help(page, chosen.options)
    asked: Any = read(Line(line.positional[1:], line.given), chosen.options, page)
    cells = chosen.cells(asked, range(asked.seeds or chosen.seeds))
    out = Path(asked.out or Path("results") / chosen.folder(asked))
    if line.switch("dry_run"):
        return _dry_run(chosen, cells, out, line.switch("json"))
    record = _run(chosen, cells, out, asked, line)
    if line.switch("json"):
        print(json.dumps(record, allow_nan=False))
    else:
        _say(record)
    err = console()
    err.print(f"figures    {out / 'figures'}")
    err.print(f"report     {out / 'report.html'}")
    return INCOMPLETE if record["unfinished"] else 0


def _run(chosen: Study, cells: list[Cell], out: Path, asked: Any, line: Line) -> dict[str, Any]:
    from assay.studies.grid import load_rows
    from assay.studies.report import write
    from assay.studies.workers import run_grid

    err = console()
    err.print(f"{chosen.title} ({len(cells)} cells)")
    with _watching(err) as watch:
        failed = run_grid(chosen, cells, out, asked.jobs, watch, line.positional[0])
    return write(out, chosen, asked, cells, load_rows(out, chosen, cells), failed, _command(line))


def _command(line: Line) -> str:
    given = [word for typed, words in line.without("json", "jobs", "out").given for word in (f"--{typed}", *words)]
    return shlex.join(["assay", "study", line.positional[0], *given])


def _list(as_json: bool) -> int:
    from assay.studies.registry import STUDIES, study_named

    found = [study_named(name) for name in STUDIES]
    if as_json:
        rows = [{k: getattr(s, k) for k in ("name", "title", "paper", "fidelity", "about", "seeds")} for s in found]
        print(json.dumps({"studies": rows}))
        return 0
    table = Table(box=None, padding=(0, 2, 1, 0))
    for title in ("name", "what it asks", "fidelity"):
        table.add_column(title, overflow="fold", no_wrap=title != "what it asks")
    for one in found:
        table.add_row(one.name, Text(f"{one.title} ({one.paper})\n{one.about}"), one.fidelity)
    Console(highlight=False).print(table)
    print("assay study NAME --help shows its options.")
    return 0


def _overview(switches: Mapping[str, tuple[Any, str]]) -> int:
    examples = (
        "study --list",
        "study demystify --seeds 1                   # a first look",
        "study agentic-icl --experiment rewards",
        "study agentic-icl --help                    # with the study's own options",
    )
    about = (
        "A controlled experiment that explains methods: a grid of cells over seeds, findings with a verdict by a rule that\n"
        "was stated before, figures and a page. A finished cell is kept: the same command goes on where it was."
    )
    return show_help(Help("study", about, examples, ("name",), switches), Named)


def _dry_run(chosen: Study, cells: list[Cell], out: Path, as_json: bool) -> int:
    from assay.studies.grid import finished

    done = [finished(out, chosen, cell) is not None for cell in cells]
    if as_json:
        listed = [
            {"name": c.name, "seed": c.seed, "settings": c.settings, "done": d}
            for c, d in zip(cells, done, strict=True)
        ]
        print(json.dumps({"study": chosen.name, "out": str(out), "cells": listed}))
        return 0
    seeds_of: dict[str, list[int]] = {}
    for cell in cells:
        seeds_of.setdefault(cell.name, []).append(cell.seed)
    print(f"{chosen.title}: {len(cells)} cells, {sum(done)} of them finished, in {out}")
    for name, seeds in seeds_of.items():
        print(f"  {name}: seeds {', '.join(map(str, seeds))}")
    return 0


def _say(record: Mapping[str, Any]) -> None:
    out = Console(highlight=False, soft_wrap=True, markup=False, width=max(Console().width, WIDE))
    for finding in record["findings"]:
        head = Text.assemble(
            (f"{finding['name']}: ", "bold"), (finding["verdict"], STYLES.get(finding["verdict"], "dim"))
        )
        out.print(head)
        out.print(f"  {finding['claim']}\n  {finding['sentence']}")
        if finding["table"]:
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            for i, key in enumerate(finding["table"][0]):
                table.add_column(key, overflow="fold", no_wrap=not i)  # nothing is cut: names differ in their ends
            for row in finding["table"]:
                table.add_row(*(_cell(value) for value in row.values()))
            out.print(table)
    if record["unfinished"]:
        out.print(f"{len(record['unfinished'])} of {record['cells']} cells have no result: the same command runs them")


def _cell(value: Any) -> Text:
    return Text("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))


@contextmanager
def _watching(err: Console) -> Iterator[Any]:
    """One bar of all cells on a terminal, a line per cell elsewhere."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from assay.studies.grid import Watch

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(*columns, TimeRemainingColumn(), console=err, disable=not err.is_terminal, transient=True)

    class Bar(Watch):
        def __init__(self) -> None:
            self.bar: Any = None
            self.done = self.total = 0

        def begin(self, cells: int, done: int) -> None:
            self.done, self.total = done, cells
            self.bar = bars.add_task("cells", total=cells, completed=done)
            if done:
                err.print(f"{done} of {cells} cells are there already", style="dim")

        def finished(self, cell: Cell, seconds: float) -> None:
            self.done += 1
            bars.update(self.bar, completed=self.done, description=f"{cell.name}, seed {cell.seed}")
            if not err.is_terminal:
                err.print(f"{self.done}/{self.total}  {cell.name}, seed {cell.seed} ({seconds:.1f} s)", markup=False)

        def failed(self, cell: Cell, error: str) -> None:
            err.print(f"{cell.name}, seed {cell.seed} failed: {error}", style="red", markup=False)

        def note(self, text: str) -> None:
            err.print(text, style="dim", markup=False)

    with bars:
        yield Bar()
