"""What there is: environments, methods, models, one line each. Nothing is made or loaded for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay import tiny
from assay.cli import methods as known
from assay.cli.flags import Help, Line, read, show_help
from assay.cli.layers import env_model
from assay.cli.plan import count, parameter_count
from assay.config import Section
from assay.envs.registry import ENVIRONMENTS


class Nothing(Section):
    """No settings."""


def envs(line: Line) -> int:
    records = [
        {"name": name, "line": entry.line, "settings": list(env_model(name).model_fields)}
        for name, entry in ENVIRONMENTS.items()
    ]
    more = "settings are flags of train: --env-args.NAME VALUE; your own: --env package.module:Class ('assay new env NAME')"
    return _show(
        line, "envs", "The environments: name, what it is, settings.", records, ("name", "line", "settings"), more
    )


class Methods(Section):
    name: str = ""
    """Of one method, or module:Class: its stages, settings, page and verdicts; absent: all, one line each."""


def methods(line: Line) -> int:
    switches = {"json": (bool, "JSON on standard output, with all that is known: one object, or a list of them.")}
    examples = ("methods", "methods aem", "methods --json")
    about = "The methods: name, what it is, paper, fidelity to it; or one of them with its settings."
    page = Help("methods", about, examples, ("name",), switches)
    if line.wants_help:
        return show_help(page, Methods)
    asked = read(line, Methods, page)
    chosen = [asked.name] if asked.name else known.names()
    records = [known.describe(name) | {"verdicts": known.verdicts(name, Path("results"))} for name in chosen]
    if line.switch("json"):
        print(json.dumps(records[0] if asked.name else records))
    elif asked.name:
        print(known.page(records[0]))
    else:
        more = (
            "'assay methods NAME' says more. A preset comes first, papers go around it: --method grpo,aem --aem.lam 0.5\n"
            "your own: --method grpo,package.module:Class ('assay new method NAME')"
        )
        records = [record | {"paper": record["paper"].partition(",")[0]} for record in records]
        _table(records, ("name", "line", "paper", "fidelity"), more)
    return 0


def models(line: Line) -> int:
    records = []
    for name in tiny.SHAPES:
        numbers = parameter_count(name)
        records.append(
            {"name": name, "parameters": numbers, "line": _about(name, numbers), "training": tiny.card(name)},
        )
    more = "any other: --model FOLDER or a hub name, of a causal language model with a chat template; or a finished run"
    return _show(
        line, "models", "The built-in policies, and what else can be trained.", records, ("name", "line"), more
    )


def _about(name: str, numbers: int | None) -> str:
    if numbers is None:
        return f"not in this installation: 'assay pretrain --model {name} --out DIR' makes it"
    card = tiny.card(name)
    success = card.get("success", {})
    about = f"{count(numbers)} parameters, pre-trained on the built-in environments"
    return about + (f"; success {', '.join(f'{k} {v}' for k, v in success.items())}" if success else "")


def _show(
    line: Line, command: str, about: str, records: Sequence[dict[str, Any]], columns: Sequence[str], more: str
) -> int:
    switches = {"json": (bool, "One JSON list on standard output, with all that is known.")}
    page = Help(command, about, (command, f"{command} --json"), switches=switches)
    if line.wants_help:
        return show_help(page, Nothing)
    read(line, Nothing, page)
    if line.switch("json"):
        print(json.dumps(records))
    else:
        _table(records, columns, more)
    return 0


def _table(records: Sequence[dict[str, Any]], columns: Sequence[str], more: str) -> None:
    cells = [[_cell(record[column]) for column in columns] for record in records]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\n{more}")


def _cell(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
