"""Tables on standard error: the plan before a run, held-out success after it. Standard output is for results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """Standard error, as it is now."""
    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False)  # names have brackets


def show_plan(out: Console, lines: Mapping[str, str]) -> None:
    if not out.is_terminal:  # a log: one line each
        for title, line in lines.items():
            out.print(Text(f"{title:<12}  {line}"))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for title, line in lines.items():
        table.add_row(title, Text(line))
    out.print(table, soft_wrap=False)


def held_out_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> Table:
    """Success with 95 % intervals over the tasks of the panel."""
    table = Table(
        title="held-out success, 95 % interval over tasks", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    table.add_column("")
    table.add_column("before")
    table.add_column("after")
    rows: dict[str, list[str]] = {}
    for column, result in enumerate((before, after)):
        for name, summary in cells(result):
            rows.setdefault(name, ["", ""])[column] = rate(summary)
    for name, columns in rows.items():
        table.add_row(name, *columns)
    if any(r.get("outcomes", {}).get("environment error") for result in (before, after) for _, r in cells(result)):
        table.caption = "episodes with an environment error are left out: see evaluation.json"
    return table


def cells(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, summary) of an evaluation, iid first; of a mixture the mean's, then those of each environment."""
    found = [(f"iid {mode}", result[mode]) for mode in ("sampled", "greedy") if mode in result]
    ood = result.get("ood", {})
    found += [(f"ood {mode}", ood[mode]) for mode in ("sampled", "greedy") if mode in ood]
    parts = result.get("environments", {})
    return found + [(f"{name}[{env}]", own) for env, part in parts.items() for name, own in cells(part)]


def rate(summary: Mapping[str, Any]) -> str:
    if summary.get("success") is None:
        return "no episode"
    return f"{summary['success']:.3f} [{summary['low']:.3f}, {summary['high']:.3f}] n={summary['n']}"
