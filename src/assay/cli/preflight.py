"""What methods say of a run that has not begun: refusals and warnings of `Method.bind`, without its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.config import RunConfig
from assay.methods.registry import compose
from assay.protocols import Setting, UserError, World
from assay.rows import Layout


class NotHere(Exception):
    """The model is not on this disk: what needs its tokenizer is asked again when the run begins."""


class Later:
    """A renderer that is made when it is asked something: most methods do not, and its tokenizer takes seconds."""

    def __init__(self, config: RunConfig, spec: Mapping[str, Any]) -> None:
        self._config, self._spec, self._made = config, spec, None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = _renderer(self._config, self._spec)
        return getattr(self._made, name)


def warnings(config: RunConfig, specs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One sentence each, after the method's name. UserError where methods cannot work together or in such a run.

    `specs`: of each environment, what its process says of itself (envs.host), {} for one that was not looked at."""
    further = compose(config.method[1:], config.method_args)
    if not further or not all(specs.values()):
        return []
    setting = Setting(
        {name: World(name, tuple(spec["skills"]), Later(config, spec)) for name, spec in specs.items()},
        _layout(config),
        config.updates_per_batch * config.epochs,
        config.max_episode_tokens,  # or less, if the model holds less
        config.seed,
    )
    found = []
    for method in further:
        try:
            found += [f"{method.name or type(method).__name__}: {text}" for text in method.bind(setting)]
        except NotHere:
            continue
    return found


def _layout(config: RunConfig) -> Layout:
    try:
        return Layout.parse(config.layout)
    except ValueError as error:
        raise UserError(str(error)) from error


def _renderer(config: RunConfig, spec: Mapping[str, Any]) -> Any:
    from assay.build import policy_folder, renderer_of
    from assay.model import load_tokenizer

    folder = policy_folder(config.model)
    if not Path(folder).is_dir():
        raise NotHere
    return renderer_of(config, load_tokenizer(folder), spec)
