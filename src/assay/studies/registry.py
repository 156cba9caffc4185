"""The studies by name. A module is imported when its study is asked for."""

from __future__ import annotations

import difflib
import importlib
from typing import cast

from assay.protocols import UserError
from assay.studies.grid import Study

STUDIES: dict[str, str] = {  # name -> "module:object"
    "demystify": "assay.studies.demystify.study:STUDY",
    "agentic-icl": "assay.studies.icl.study:STUDY",
}
PARTS = ("title", "about", "version", "seeds", "options", "folder", "cells", "run", "findings", "figures")


def study_named(name: str) -> Study:
    """One of ours, or a user's own "module:OBJECT". UserError with the nearest name if there is none."""
    if name not in STUDIES and ":" not in name:
        near = difflib.get_close_matches(name, STUDIES, 1, 0.3)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(STUDIES)}"
        raise UserError(f"study {name!r} does not exist: {hint}")
    module, _, attribute = STUDIES.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        if name in STUDIES:
            raise
        raise UserError(f"study {name!r} cannot be imported ({error}): give it as package.module:OBJECT") from error
    missing = [part for part in PARTS if not hasattr(found, part)]
    if isinstance(found, type) or missing:
        what = "is a class: give an instance" if isinstance(found, type) else f"has no {', '.join(missing)}"
        raise UserError(f"study {name!r} {what}; the protocol is assay.studies.grid.Study")
    return cast(Study, found)
