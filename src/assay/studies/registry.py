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


def study_named(name: str) -> Study:
    """One of ours, or a user's own "module:OBJECT". UserError with the nearest name if there is none."""
    if name not in STUDIES and ":" not in name:
        near = difflib.get_close_matches(name, STUDIES, 1, 0.3)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(STUDIES)}"
        raise UserError(f"study {name!r} does not exist: {hint}")
    module, _, attribute = STUDIES.get(name, name).partition(":")
    try:
        return cast(Study, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        if name in STUDIES:
            raise
        raise UserError(f"study {name!r} cannot be imported ({error}): give it as package.module:OBJECT") from error
