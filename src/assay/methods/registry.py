"""The methods by name: presets fill the host's slots, papers fold around it.

What a paper's class says of itself (docstring, paper, fidelity, settings) is what `assay methods` and its page show.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
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
    "random-reward": "assay.methods.random_reward:RandomReward",
}
FIDELITIES = {  # surest first -> what the word means
    "paper": "as the paper has it",
    "reconstruction": "known but for some part",
    "inferred": "our design for a known idea",
}


def path_of(name: str) -> str:
    """module:Class of a paper's name, or of what is such a path already; UserError with the nearest name."""
    if ":" in name:
        return name
    if name in PAPERS:
        return PAPERS[name]
    if name in PRESETS:
        raise UserError(f"method {name!r} is a preset, which comes first and once: --method {name},OTHER")
    raise UserError(f"method {name!r} does not exist: {_hint(name, [*PRESETS, *PAPERS])}")


def check_names(methods: Sequence[str], settings: Iterable[str]) -> None:
    """What names alone can say of methods, the host's preset first, and of those that settings are given for: UserError
    where one does not exist, stands in a wrong place or twice, or where settings are for none of them."""
    if methods[0] not in PRESETS:
        near = difflib.get_close_matches(methods[0], [*PRESETS, *PAPERS], 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"the presets are {', '.join(PRESETS)}"
        raise UserError(f"method {methods[0]!r} is no preset, and the first one must be: {hint}")
    for i, name in enumerate(methods[1:], 1):
        if name in methods[:i]:
            raise UserError(f"method {name!r} is named twice: take one of them out")
        path_of(name)
    for name in settings:
        if name not in methods[1:]:
            if name in PRESETS:
                raise UserError(f"method_args has settings for {name!r}, which is a preset: its settings are slots")
            raise UserError(
                f"method_args has settings for {name!r}, which is not among the methods {', '.join(methods)}"
            )


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


def make(name: str, settings: Mapping[str, Any]) -> Method:
    """A further method with its settings; UserError for settings that it does not take."""
    found = class_of(name)
    takes = inspect.signature(found).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        for key in settings:
            if key not in takes:
                raise UserError(f"method {name!r} has no setting {key!r}: {_hint(key, takes)}")
    try:
        return found(**settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"method {name!r}: {error}") from error


def compose(names: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> list[Method]:
    """Further methods, in their order. UserError also for two that set the estimator."""
    made = [make(name, settings.get(name, {})) for name in names]
    estimators = [
        name.rpartition(":")[2] for name, method in zip(names, made, strict=True) if method.advantage is not None
    ]
    if len(estimators) > 1:
        raise UserError(f"two methods set the advantage: {', '.join(estimators)}; use one")
    return made


def fidelity_of(methods: Sequence[str]) -> str:
    """Of methods together: that of the least sure one."""
    found = [PRESETS[name].fidelity if name in PRESETS else class_of(name).fidelity for name in methods]
    return max(found, key=list(FIDELITIES).index)


def _hint(word: str, words: Iterable[str]) -> str:
    known = list(words)
    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else f"there {'are ' + ', '.join(known) if known else 'is none'}"
