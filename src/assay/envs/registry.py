"""Environments by name. A dict literal is the registry: a name stands for a class and the settings that the name fixes.

Classes are imported when they are made, so that listing them costs nothing and needs no extra.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import gymnasium

from assay.protocols import Env, UserError


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the class is ("module:Class"), the settings that are the meaning of the name, and one line about it."""

    path: str
    settings: dict[str, Any]
    line: str


_BABYAI = "assay.envs.babyai:BabyAI"

ENVIRONMENTS: dict[str, Entry] = {
    "babyai/GoToRedBallNoDists": Entry(_BABYAI, {"level": "GoToRedBallNoDists"}, "go to the red ball, alone in a room"),
    "babyai/GoToRedBall": Entry(_BABYAI, {"level": "GoToRedBall"}, "go to the red ball among other objects"),
    "babyai/GoToObj": Entry(_BABYAI, {"level": "GoToObj"}, "go to the object that the task names, alone in a room"),
    "babyai/GoToLocal": Entry(_BABYAI, {"level": "GoToLocal"}, "go to the object that the task names, among others"),
    "babyai/PickupLoc": Entry(_BABYAI, {"level": "PickupLoc"}, "pick up an object, named or placed ('on your left')"),
    "babyai/PutNextLocal": Entry(_BABYAI, {"level": "PutNextLocal"}, "put one named object next to another"),
    "bandit": Entry("assay.envs.bandit:Bandit", {}, "pull arms with hidden odds: the optimum of every return is exact"),
    "countdown": Entry("assay.envs.countdown:Countdown", {}, "reach a number from given ones, an operation a turn"),
    "pairs": Entry("assay.envs.pairs:Pairs", {}, "count the integer pairs on two lines: five milestones and an answer"),
    "quote": Entry("assay.envs.quote:Quote", {}, "say one exact sentence: priors and rewards under a lens"),
    "threshold": Entry("assay.envs.threshold:Threshold", {}, "find a hidden number by asking whether it is at least k"),
    "textworld-cooking": Entry("assay.envs.textworld:TextWorldCooking", {}, "a text adventure: follow a recipe, eat"),
}

EXTRAS = {"textworld": "textworld"}  # top-level module -> extra of assay that brings it


def environments() -> list[tuple[str, str]]:
    """(name, one line) of the built-in environments."""
    return [(name, entry.line) for name, entry in ENVIRONMENTS.items()]


def make(name: str, **settings: Any) -> Env:
    """The environment of a registry name, or of a user's own "package.module:Class".

    Raises UserError for an unknown name, module, class or setting, for a setting that the name itself fixes, for a
    required one that is missing, for a class that is no gymnasium.Env, and for an extra that is not installed.
    """
    if name not in ENVIRONMENTS and ":" not in name:
        raise UserError(
            f"environment {name!r} does not exist: did you mean {_nearest(name, ENVIRONMENTS)!r}? "
            "'assay envs' lists them, and your own is given as 'package.module:Class'"
        )
    entry = ENVIRONMENTS.get(name, Entry(name, {}, ""))
    try:
        cls = _load(entry.path)
        _check_settings(name, cls, entry, settings)
        return cast(Env, cls(**entry.settings, **settings))
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if name not in ENVIRONMENTS or extra is None:
            raise
        message = f"environment {name!r} needs {error.name!r}, which is not installed: pip install assay[{extra}]"
        raise UserError(message) from error


def _load(path: str) -> type[gymnasium.Env[Any, Any]]:
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if module_name.startswith("assay.envs."):
            raise  # ours: a missing extra, or a bug
        raise UserError(
            f"environment {path!r}: module {module_name!r} could not be imported ({error}): "
            "install it, or run where Python finds it"
        ) from error
    except ValueError as error:  # an empty module name
        raise UserError(f"environment {path!r} names no module: write 'package.module:Class'") from error
    cls = getattr(module, class_name, None)
    if cls is None:
        hint = _nearest(class_name, [n for n, v in vars(module).items() if isinstance(v, type)])
        raise UserError(
            f"environment {path!r}: {module_name!r} has no {class_name!r}"
            + (f": did you mean {hint!r}?" if hint else "")
        )
    if not (isinstance(cls, type) and issubclass(cls, gymnasium.Env)):
        raise UserError(f"environment {path!r}: {class_name!r} is not a gymnasium.Env: derive it from that class")
    return cls


def _check_settings(name: str, cls: type, entry: Entry, settings: dict[str, Any]) -> None:
    parameters = inspect.signature(cls).parameters
    accepted = [p for p, one in parameters.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    accepted = [p for p in accepted if p not in entry.settings]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for setting in settings:
        if setting in entry.settings:
            raise UserError(f"environment {name!r} fixes {setting!r} itself: take it out, or name another environment")
        if setting not in accepted and not takes_any:
            known = f"did you mean {_nearest(setting, accepted)!r}? It takes {', '.join(accepted)}"
            raise UserError(
                f"environment {name!r} has no setting {setting!r}: {known if accepted else 'it takes none'}"
            )
    missing = [p for p in accepted if parameters[p].default is inspect.Parameter.empty and p not in settings]
    if missing:
        raise UserError(f"environment {name!r} needs the setting {', '.join(missing)}: give a value")


def _nearest(word: str, words: Iterable[str]) -> str:
    """The most similar of the words, "" if there are none."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)), "")
