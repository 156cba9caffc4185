"""Fills what methods say of themselves into their pages, into docs/methods/README.md and into README.md: `make pages`.

Only what stands between the two markers is written. The same `describe` feeds `assay methods NAME`. `python tools/pages.py
--check` writes nothing and names what is stale, which a test does too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from assay.cli.methods import describe, names, shown
from assay.methods.registry import FIDELITIES

ROOT = Path(__file__).parents[1]
METHODS = "docs/methods"
BEGIN, END = "<!-- generated: make pages -->", "<!-- end -->"


def main(arguments: list[str]) -> int:
    found = stale()
    for path, text in found.items():
        if "--check" in arguments:
            print(f"{path} is stale: make pages")
        else:
            (ROOT / path).write_text(text, "utf-8")
            print(f"wrote {path}")
    return int(bool(found)) if "--check" in arguments else 0


def stale() -> dict[str, str]:
    """Path -> its text as it should be, of the files whose generated block is not. SystemExit for a file without one."""
    blocks = {page: block(methods) for page, methods in pages().items()}
    blocks[f"{METHODS}/README.md"] = overview("", stages=True)
    blocks["README.md"] = overview(f"{METHODS}/", stages=False)
    found = {}
    for path, inner in blocks.items():
        old = (ROOT / path).read_text("utf-8") if (ROOT / path).exists() else ""
        head, begin, rest = old.partition(BEGIN)
        _, end, tail = rest.partition(END)
        if not (begin and end):
            raise SystemExit(f"{path} has no block to fill: write it, with the two lines {BEGIN} and {END}")
        new = f"{head}{BEGIN}\n{inner}\n{END}{tail}"
        if new != old:
            found[path] = new
    return found


def pages() -> dict[str, list[dict[str, Any]]]:
    """Page -> descriptions of the methods that are on it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names():
        known = describe(name)
        found.setdefault(known["page"], []).append(known)
    return found


def block(methods: list[dict[str, Any]]) -> str:
    """Of a page: its paper's facts and settings, or the table of its presets and what each sets."""
    return "\n\n".join(_presets(methods) if methods[0]["kind"] == "preset" else _paper(methods[0]))


def _paper(known: dict[str, Any]) -> Iterable[str]:
    facts = [
        ("paper", linked(known["paper"])),
        ("fidelity", f"{known['fidelity']}: {FIDELITIES[known['fidelity']]}"),
        ("stages", ", ".join(known["stages"])),
    ]
    yield table(("", ""), facts)
    yield f"    {known['example']}"
    settings = known["settings"]
    if settings:
        rows = [(f"`{s['flag']}`", f"`{shown(s['default'])}`", s["type"], s["meaning"]) for s in settings]
        yield table(("setting", "default", "type", "meaning"), rows)


def _presets(methods: list[dict[str, Any]]) -> Iterable[str]:
    yield table(
        ("preset", "idea", "paper", "fidelity"),
        [(f"`{m['name']}`", m["line"], linked(m["paper"]), m["fidelity"]) for m in methods],
    )
    yield f"    {methods[0]['example']}"
    stages = [dict(stage.split(": ", 1) for stage in m["stages"]) for m in methods]
    titles = list(dict.fromkeys(title for own in stages for title in own))
    rows = [(f"`{m['name']}`", *(own.get(t, "") for t in titles)) for m, own in zip(methods, stages, strict=True)]
    yield table(("preset", *titles), rows)
    differs = {slot for m in methods for slot in m["differs"]}
    chosen = [s for s in methods[0]["settings"] if s["name"] in differs]
    by_name = [{s["name"]: s for s in m["settings"]} for m in methods]
    yield table(
        ("slot", "meaning", *(f"`{m['name']}`" for m in methods)),
        [(f"`{s['flag']}`", s["meaning"], *(shown(own[s["name"]]["default"]) for own in by_name)) for s in chosen],
    )


def overview(folder: str, stages: bool) -> str:
    """All methods, each with a link to its page."""
    rows = []
    for name in names():
        known = describe(name)
        link = f"[`{name}`]({folder}{Path(known['page']).name})"
        words = "slots" if known["kind"] == "preset" else ", ".join(known["stages"])
        rows.append((link, known["line"], linked(known["paper"], short=True), known["fidelity"], words)[: 4 + stages])
    return table(("name", "idea", "paper", "fidelity", "stages")[: 4 + stages], rows)


def linked(paper: str, short: bool = False) -> str:
    """ "arXiv ID, Title" with the id as a link; `short`: the link alone."""
    found = re.match(r"arXiv (\d{4}\.\d{5})(.*)", paper)
    if not found:
        return paper
    link = f"[{found[1]}](https://arxiv.org/abs/{found[1]})"
    return link if short else link + found[2]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines).replace("|  |", "| |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
