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
from assay.config import Slots
from assay.methods.registry import FIDELITIES

ROOT = Path(__file__).parents[1]
METHODS = "docs/methods"
SHARED = f"{METHODS}/baselines.md"  # of the presets that have no page of their own; all slots are there
BEGIN, END = "<!-- generated: make pages -->", "<!-- end -->"


def main(arguments: list[str]) -> int:
    found, check = blocks(), "--check" in arguments
    lacking = [path for path in found if not _parts(path)]
    for path in lacking:
        print(f"{path} has no block to fill: write it, with the two lines {BEGIN} and {END}")
    old = stale()
    for path, text in old.items():
        print(f"{path} is stale: make pages" if check else f"wrote {path}")
        if not check:
            (ROOT / path).write_text(text, "utf-8")
    return int(bool(lacking or (check and old)))


def stale() -> dict[str, str]:
    """Path -> its text as it should be, of the files whose block is another one."""
    found = {}
    for path, inner in blocks().items():
        if parts := _parts(path):
            old, new = parts[1], f"\n{inner}\n"
            if old != new:
                found[path] = f"{parts[0]}{BEGIN}{new}{END}{parts[2]}"
    return found


def blocks() -> dict[str, str]:
    """Path -> what stands between its markers."""
    found = {page: block(methods) for page, methods in pages().items()}
    found[f"{METHODS}/README.md"] = overview("", stages=True)
    found["README.md"] = overview(f"{METHODS}/", stages=False)
    return found


def _parts(path: str) -> tuple[str, str, str] | None:
    """What is before, between and after the markers; None for a file that is not there or has none."""
    text = (ROOT / path).read_text("utf-8") if (ROOT / path).exists() else ""
    before, begin, rest = text.partition(BEGIN)
    between, end, after = rest.partition(END)
    return (before, between, after) if begin and end else None


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
        ("preset", "idea", "paper", "fidelity", "sets"),
        [(f"`{m['name']}`", m["line"], linked(m["paper"]), m["fidelity"], _sets(m)) for m in methods],
    )
    yield f"    {methods[0]['example']}"
    stages = [dict(stage.split(": ", 1) for stage in m["stages"]) for m in methods]
    titles = list(dict.fromkeys(title for own in stages for title in own))
    rows = [(f"`{m['name']}`", *(own.get(t, "") for t in titles)) for m, own in zip(methods, stages, strict=True)]
    yield table(("preset", *titles), rows)
    usual = Slots().model_dump()
    rows = [
        (f"`{s['flag']}`", f"`{shown(usual[s['name']])}`", s["type"], s["meaning"])
        for s in methods[0]["settings"]
        if methods[0]["page"] == SHARED or _concerns(s, methods)
    ]
    yield table(("slot", "default", "type", "meaning"), rows)
    if methods[0]["page"] != SHARED:
        yield f"All slots: [{Path(SHARED).stem}]({Path(SHARED).name})."


def _sets(preset: dict[str, Any]) -> str:
    return ", ".join(f"`{slot} = {shown(value)}`" for slot, value in preset["differs"].items()) or "the defaults"


def _concerns(setting: dict[str, Any], methods: list[dict[str, Any]]) -> bool:
    """Does one of the presets set the slot, or does its meaning speak of one?"""
    named = {m["name"] for m in methods} | {str(m["differs"].get("advantage", "")) for m in methods} - {""}
    return any(setting["name"] in m["differs"] for m in methods) or any(name in setting["meaning"] for name in named)


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
    lines = [f"| {' | '.join(cells)} |" for cells in [head, *([c.replace("|", "\\|") for c in row] for row in rows)]]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]).replace("|  |", "| |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
