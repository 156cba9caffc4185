"""`assay new`: a file to start from, which runs as it is."""

from __future__ import annotations

import json
import keyword
import re
from pathlib import Path
from typing import Literal

from assay.cli.flags import Help, Line, read, show_help
from assay.config import Section
from assay.protocols import UserError

TEMPLATES = Path(__file__).parent.parent / "templates"
NEXT = {
    "env": (
        "assay play --env {module}:{cls} --policy random",
        "assay train --env {module}:{cls} --steps 5 --evaluation.tasks 20",
    ),
    "method": (
        "assay methods {module}:{cls}",
        "assay train --method grpo,{module}:{cls} --steps 5 --evaluation.tasks 20",
    ),
}


class New(Section):
    kind: Literal["env", "method"]
    """env or method."""
    name: str
    """Of the class, in any spelling: my-env, my_env and MyEnv are the same."""


def new(line: Line) -> int:
    examples = ("new env my-env", "new method my-idea")
    about = "Write a file to start from: it runs as it is, and says what to change."
    switches = {"json": (bool, "One JSON object on standard output.")}
    page = Help("new", about, examples, ("kind", "name"), switches)
    if line.wants_help:
        return show_help(page, New)
    asked = read(line, New, page)
    module, cls = names(asked.name)
    path = Path(f"{module}.py")
    text = (TEMPLATES / f"{asked.kind}.py.txt").read_text().replace("my_module", module).replace("MyClass", cls)
    commands = [command.format(module=module, cls=cls) for command in NEXT[asked.kind]]
    try:
        with open(path, "x") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{path} exists already: choose another name, or move it away") from error
    if line.switch("json"):
        print(json.dumps({"file": str(path), "next": commands}))
        return 0
    print(f"wrote {path}\nnext  " + "\n      ".join(commands))
    return 0


def names(name: str) -> tuple[str, str]:
    """(module, class) of a name in any spelling."""
    words = [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]
    module, cls = "_".join(words), "".join(word.capitalize() for word in words)
    if not words or not re.fullmatch(r"[\w-]+", name) or not module.isidentifier() or keyword.iskeyword(module):
        raise UserError(f"{name!r} is no name for a class: take letters, digits and hyphens, a letter first")
    return module, cls
