"""The methods by name: presets fill the host's slots, papers fold around it.

What a paper's class says of itself (docstring, paper, fidelity, settings) is what `assay methods` and its page show.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from assay.methods.presets import PRESETS
from assay.protocols import Method, UserError

PAPERS = {  # name -> class
    "aem": "assay.methods.aem:AEM",
    "empg": "assay.methods.empg:EMPG",
    "reuserl": "assay.methods.reuserl:ReuseRL",
    "envrl": "assay.methods.envrl:EnvRL",
    "eppo": "assay.methods.eppo:EPPO",
    "task-norm": "assay.methods.task_norm:TaskNorm",
}


def path_of(name: str) -> str:
    """module:Class of a paper's name, or of what is such a path already; UserError with the nearest name."""
    if ":" in name:
        return name
    if name in PAPERS:
        return PAPERS[name]
    if name in PRESETS:
        raise UserError(f"method {name!r} is a preset, which comes first and once: --method {name},OTHER")
    near = difflib.get_close_matches(name, [*PAPERS, *PRESETS], 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(PAPERS)}, or your own as mypkg.module:Class"
    raise UserError(f"method {name!r} does not exist: {hint}")


def class_of(name: str) -> type[Method]:
    """The class of a paper's name or of module:Class; UserError if it cannot be imported or is no method."""
    module, _, attribute = path_of(name).partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"method {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"method {name!r} is not a class derived from assay.Method")
    return found


def make(name: str, settings: dict[str, Any]) -> Method:
    """A further method with its settings; UserError for settings that it does not take."""
    try:
        return class_of(name)(**settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"method {name!r} does not take these settings: {error}") from error
