"""replicate: one published claim, at a stated scale, with a verdict; or the list of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table

from assay.cli.compare import executor, watching
from assay.cli.flags import Help, Line, read, show_help
from assay.cli.tables import console
from assay.config import Section
from assay.protocols import UserError

if TYPE_CHECKING:
    from assay.replicate import Recipe

INCOMPLETE = 1


class Replicate(Section):
    name: str = ""
    """A recipe of --list, "all", or a .toml file of your own."""
    scale: Literal["tiny", "full"] = "tiny"
    """tiny: minutes to an hour on a laptop. full: the paper's own configuration, for a GPU."""
    seeds: int = Field(0, ge=0, le=1000)
    """Training seeds of each arm; 0: the recipe's. More than before goes on from what is there."""
    executor: Literal["local", "ray"] = "local"
    """Processes on this machine, or a Ray cluster."""
    jobs: int = Field(0, ge=0, le=10_000)
    """Runs at once; 0: one per processor core."""
    out: str = "results"
    """Folder of verdicts and finished seeds, shared by all recipes; the table is written to OUT.md beside it."""


def replicate(line: Line) -> int:
    examples = (
        "replicate --list",
        "replicate group-size            # its runs, then the verdict by the rule that was written down before",
        "replicate all --out docs/results",
        "replicate clip-higher --scale full --dry-run",
    )
    about = (
        "A published claim, put to the test. A recipe names the claim, the arms, the seeds and the rule that decides, before\n"
        "the first run; a negative or inconclusive verdict stays in the table."
    )
    switches = {
        "list": (bool, "Every claim with its last verdict."),
        "dry_run": (bool, "Print what would run and the rule, start nothing."),
        "json": (bool, "One JSON object on standard output, and nothing else there."),
    }
    page = Help("replicate", about, examples, ("name",), switches)
    if line.wants_help:
        return show_help(page, Replicate)
    asked = read(line, Replicate, page)
    from assay.replicate import load, recipes

    if line.switch("list"):
        return _list(Path(asked.out), line.switch("json"))
    if not asked.name:
        raise UserError("NAME is missing: 'assay replicate --list' shows the claims")
    chosen = [load(name) for name in (recipes() if asked.name == "all" else [asked.name])]
    if line.switch("dry_run"):
        return _dry_run(chosen, asked, line.switch("json"))
    found = [_run(asked.name if asked.name != "all" else name, asked) for name, _ in chosen]
    if line.switch("json"):
        print(json.dumps(found[0] if asked.name != "all" else {"verdicts": found}, allow_nan=False))
    else:
        for verdict in found:
            _say(verdict)
    console().print(f"table      {Path(asked.out)}.md")
    return 0


def _run(name: str, asked: Replicate) -> dict[str, Any]:
    from assay.replicate import load, replicate

    short, recipe = load(name)
    err = console()
    err.print(f"{short}: {recipe.claim}")
    err.print(f"rule       {recipe.rule(asked.scale)}", style="dim")
    with watching(err) as watch:
        return replicate(name, Path(asked.out), executor(asked.executor, asked.jobs), watch, asked.scale, asked.seeds)


def _say(verdict: dict[str, Any]) -> None:
    out = Console(highlight=False, soft_wrap=True, markup=False)
    out.print(
        f"{verdict['name']}: the claim {said(verdict)} ({verdict['seeds']} paired seeds, {verdict['metric']})",
        style="bold",
    )
    out.print(f"  {verdict['sentence']}")


def said(verdict: dict[str, Any]) -> str:
    """ "holds", "is reversed": as a sentence goes on."""
    words = {"reversed": "is reversed", "inconclusive": "is neither confirmed nor refuted"}
    return words.get(verdict["verdict"], str(verdict["verdict"]))


def _list(out: Path, as_json: bool) -> int:
    from assay.replicate import SHIPPED, load, recipes, verdicts

    known = {(v["name"], v["scale"]): v for v in [*verdicts(SHIPPED.parent), *verdicts(out)]}
    rows: list[dict[str, Any]] = []
    for name in recipes():
        _, recipe = load(name)
        verdict = known.get((name, "tiny"))
        rows.append(
            {"name": name, "claim": recipe.claim, "paper": recipe.paper, "fidelity": recipe.fidelity, "last": verdict}
        )
    if as_json:
        print(json.dumps({"claims": rows}, allow_nan=False))
        return 0
    table = Table(box=None, padding=(0, 2, 1, 0))
    for title in ("name", "claim", "last verdict", "fidelity"):
        table.add_column(title, overflow="fold", no_wrap=title in ("name", "fidelity"))
    for row in rows:
        last = row["last"]
        text = (
            f"{last['verdict']}, {last['seeds']} seeds, {last['date']}, version {last['assay']}"
            if last
            else "not run yet"
        )
        table.add_row(str(row["name"]), f"{row['claim']} ({row['paper']})", text, str(row["fidelity"]))
    Console(highlight=False).print(table)
    return 0


def _dry_run(chosen: list[tuple[str, Recipe]], asked: Replicate, as_json: bool) -> int:
    from assay.replicate import plan_of

    plans = {name: plan_of(name, recipe, asked.scale, asked.seeds) for name, recipe in chosen}
    if as_json:
        print(json.dumps({name: plan.model_dump(exclude_none=True) for name, plan in plans.items()}))
        return 0
    out = Console(highlight=False, soft_wrap=True, markup=False)
    for name, recipe in chosen:
        scale, plan = getattr(recipe, asked.scale), plans[name]
        out.print(f"{name}: {recipe.claim} ({recipe.paper})")
        out.print(f"  scale  {scale.about}\n  rule   {recipe.rule(asked.scale)}")
        out.print(f"  runs   {len(plan.arms)} arms x {len(plan.seeds)} seeds: {', '.join(plan.arms)}")
        first = next(iter(plan.arms.values()))
        shared = {k: v for k, v in scale.common.items() if not isinstance(v, dict)}
        out.print(f"  keys   {', '.join(f'{k} {v}' for k, v in shared.items())} (env {first['env']})")
    return 0
