"""What is known of a method, from its source: `assay methods NAME` and its page show the same."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from assay.cli.plan import slots_in_words
from assay.cli.signature import REQUIRED, about, parameters, type_name
from assay.config import Slots, overlay
from assay.methods.presets import PRESETS
from assay.methods.registry import FIDELITIES, PAPERS, path_of

HOOKS = {  # of protocols.Method, in the order in which a step calls them -> in words
    "episode": "wraps the episode",
    "revise": "revises groups",
    "keep": "keeps groups",
    "select": "keeps groups, the whole batch in view",
    "rows": "rows (further views)",
    "reward": "reward",
    "advantage": "advantage (sets it)",
    "modulate": "advantage (reads or rescales)",
    "streams": "loss streams",
    "tables": "tables of the report",
    "state_dict": "state",
}
BY_SETTING = ("revise", "keep", "select", "advantage")  # hooks that a class may set on self: they may be absent
NEEDS = {
    "old_logprob": "old log-probs",
    "ref_logprob": "the reference's log-probs",
    "entropy": "entropy",
    "value": "a critic",
    "target": "frozen targets",
}
RECIPES = Path(__file__).parent.parent / "recipes"
EXAMPLE = "assay train --env countdown --method "


def names() -> list[str]:
    return [*PRESETS, *PAPERS]


def describe(name: str) -> dict[str, Any]:
    """Everything about a preset, a paper or module:Class, as JSON values. UserError if there is none."""
    return _preset(name) if name in PRESETS else _class(name)


def _preset(name: str) -> dict[str, Any]:
    preset = PRESETS[name]
    usual = Slots().model_dump()
    slots = Slots.model_validate(overlay(Slots().model_dump(exclude_none=True), preset.slots))
    return {
        "name": name,
        "kind": "preset",
        "line": preset.line,
        "paper": preset.paper,
        "fidelity": preset.fidelity,
        "stages": [f"{title}: {words}" for title, words in slots_in_words(slots).items()],
        "differs": {slot: value for slot, value in slots.model_dump().items() if value != usual[slot]},
        "settings": [
            {
                "name": slot,
                "flag": f"--slots.{slot.replace('_', '-')}",
                "type": type_name(info.annotation),
                "default": getattr(slots, slot),
                "meaning": " ".join((info.description or "").split()),
            }
            for slot, info in Slots.model_fields.items()
        ],
        "example": EXAMPLE + name,
        "page": f"docs/methods/{preset.page}.md",
    }


def _class(name: str) -> dict[str, Any]:
    path = path_of(name)
    found = about(path, list(NEEDS))
    hooks = [
        words for hook, words in HOOKS.items() if hook in found.defines or (hook in BY_SETTING and hook in found.sets)
    ]
    needs = [f"needs {NEEDS[need]}" for need in found.always]
    needs += [f"needs {NEEDS[need]} (by its settings)" for need in found.perhaps]
    section = path.partition(":")[2] if ":" in name else name
    return {
        "name": name,
        "kind": "paper" if name in PAPERS else "own",
        "line": found.docstring.partition("\n")[0].strip().rstrip("."),
        "paper": found.attributes.get("paper", ""),
        "fidelity": found.attributes.get("fidelity", list(FIDELITIES)[-1]),
        "stages": hooks + needs,
        "settings": [
            {
                "name": parameter.name,
                "flag": f"--{section}.{parameter.name.replace('_', '-')}",
                "type": type_name(parameter.type),
                "default": None if parameter.default is REQUIRED else parameter.default,
                "meaning": parameter.help,
            }
            for parameter in parameters(path)
            if parameter.type is not None
        ],
        "example": EXAMPLE + ("grpo," if name in PAPERS else "grpo ") + name,
        "page": f"docs/methods/{name}.md" if name in PAPERS else "",
    }


def verdicts(name: str, folder: Path) -> list[dict[str, Any]]:
    """The last verdict on each published claim that is about the method: its own (of two arms that are both of a preset
    neither is about it). Those of `folder`, as `assay replicate` writes them, before those that came with the package."""
    known: dict[str, dict[str, Any]] = {}
    for place in (RECIPES, folder):
        path = place / "verdicts.json"
        if path.is_file():
            known |= {verdict["name"]: verdict for verdict in json.loads(path.read_text("utf-8"))["verdicts"]}
    found = []
    for recipe, verdict in known.items():
        path = RECIPES / f"{recipe}.toml"
        if path.is_file() and _is_about(tomllib.loads(path.read_text("utf-8")), name):
            found.append(
                {key: verdict.get(key) for key in ("name", "claim", "verdict", "sentence", "scale", "seeds", "date")}
            )
    return found


def _is_about(recipe: dict[str, Any], name: str) -> bool:
    a, b = ([word for part in recipe["arms"][recipe[arm]]["method"] for word in part.split(",")] for arm in ("a", "b"))
    return name in a and (name not in b or name not in PRESETS)


def page(known: dict[str, Any]) -> str:
    """For a terminal."""
    lines = [f"{known['name']}: {known['line']}", ""]
    facts = {
        "paper": known["paper"] or "none named",
        "fidelity": f"{known['fidelity']}: {FIDELITIES[known['fidelity']]}",
        "stages": known["stages"] if known["kind"] == "preset" else ", ".join(known["stages"]),
        "page": known["page"],
        "try": known["example"],
    }
    for title, text in facts.items():
        for i, line in enumerate(text if isinstance(text, list) else [text] if text else []):
            lines.append(f"{title if i == 0 else '':<10}{line}")
    lines.append("")
    for setting in known["settings"]:
        mark = " (set by this preset)" if setting["name"] in known.get("differs", {}) else ""
        lines.append(f"  {setting['flag']}  {setting['type']}, default {shown(setting['default'])}{mark}")
        lines += [f"      {setting['meaning']}"] if setting["meaning"] else []
    for verdict in known.get("verdicts", []):
        lines += [
            "",
            f"claim     {verdict['claim']}",
            f"          {verdict['sentence']} ({verdict['name']}, {verdict['date']})",
        ]
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A value as a flag takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
