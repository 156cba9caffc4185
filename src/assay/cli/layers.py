"""What a `train` command line means: a preset, a file, and flags, laid over one another.

Two passes: --preset, FILE, --env and --method are read first, for the settings that a flag may name depend on them.
Then what a preset or file says about another environment or method than the one named is dropped, never mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, create_model

from assay.cli.flags import Line, dotted, interpret, nearest
from assay.cli.signature import settings_model
from assay.config import RunConfig, Slots, load, method_names, overlay, resolve, split_env
from assay.envs.registry import ENVIRONMENTS, Entry
from assay.methods.presets import PRESETS
from assay.methods.registry import PAPERS, check_names, path_of
from assay.protocols import UserError

PRESET_FOLDER = Path(__file__).parent.parent / "presets"
HERE = "command line"
PREFIX = "method-args."


@dataclass(frozen=True, slots=True)
class Request:
    """A training that was asked for. `values` re-run it; `model` is RunConfig with the settings of its environment."""

    values: dict[str, Any]
    config: RunConfig
    model: type[RunConfig]
    dry_run: bool
    json: bool

    def shown(self) -> RunConfig:
        """For a help page: what holds where no flag says otherwise, settings that no flag can give left out."""
        values = {name: getattr(self.config, name) for name in RunConfig.model_fields}
        env = self.model.model_fields["env_args"].annotation
        if isinstance(env, type) and issubclass(env, BaseModel):
            values["env_args"] = shown_settings(env, self.config)
        for name, method in method_sections(self.config.method).items():
            values[name] = filled(section(self.model, name), self.config.method_args.get(method, {}))
        return self.model.model_construct(**values)


def read_train(line: Line) -> Request:
    """Preset, file and flags as one configuration. UserError says which of them is wrong."""
    base = _base(line)
    over: dict[str, Any] = {}
    if (env := line.value("env")) is not None:
        over["env"] = env
    if (methods := line.values("method")) is not None:
        over["method"] = method_names(methods)
    base = adapt(base, over)
    both = overlay(base, over)
    methods = _methods(both)
    env = str(both.get("env", RunConfig.model_fields["env"].default))
    model = flag_model(env, methods)
    typed = interpret(_without_prefix(line.without("preset", "dry_run", "json"), methods), model, "train")
    values = overlay(base, _typed_settings(typed, base, model, env, methods) | over)
    if typed.get("budget") is not None and typed.get("steps") is None:
        values.pop("steps", None)  # of a preset or file: the budget ends the run in their place
    if typed.get("steps") is not None and base.get("planned_steps") == base.get("steps", -1):
        values.pop("planned_steps", None)  # a copied run's plan was its own number of steps
    return Request(values, resolve(values, HERE), model, line.switch("dry_run"), line.switch("json"))


def _base(line: Line) -> dict[str, Any]:
    """The preset, under the file."""
    base: dict[str, Any] = {}
    if (preset := line.value("preset")) is not None:
        base = preset_values(preset)
    if len(line.positional) > 1:
        raise UserError(
            f"unexpected {line.positional[1]!r}: one file or run directory is enough, options begin with --"
        )
    if line.positional:
        path = Path(line.positional[0])
        file = load(path)
        resolve(file, str(path))
        if path.is_dir():
            file.pop("out", None)  # a run that is copied goes elsewhere
        base = overlay(adapt(base, file), file)
    return base


def preset_values(name: str) -> dict[str, Any]:
    """Nested keys of a preset of the package."""
    path = PRESET_FOLDER / f"{name}.toml"
    if name not in presets():
        near = nearest(name, presets())
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(presets())}"
        raise UserError(f"preset {name!r} does not exist: {hint}")
    return load(path)


def presets() -> dict[str, str]:
    """Name -> its first comment line."""
    found = {}
    for path in sorted(PRESET_FOLDER.glob("*.toml")):
        first = path.read_text().partition("\n")[0]
        found[path.stem] = first.lstrip("# ").rstrip(".") if first.startswith("#") else ""
    return found


def adapt(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` without what belongs to another environment or method than `over` names."""
    base = dict(base)
    if "env" in over and split_env(over["env"]) != split_env(base.get("env", "")):
        base.pop("env_args", None)
        base.pop("env_shares", None)
    if "method" in over and _methods(over)[:1] != _methods(base)[:1] and "slots" in base:
        base["slots"] = _own_slots(base)
    if "method" in over and "method_args" in base:
        base["method_args"] = {name: v for name, v in base["method_args"].items() if name in _methods(over)}
    return base


def _own_slots(base: dict[str, Any]) -> dict[str, Any]:
    """Slots that `base` sets by hand: those that its preset would not. A run's complete configuration names all."""
    preset = PRESETS.get(_methods(base)[0])
    usual = Slots.model_validate(preset.slots if preset else {}).model_dump(exclude_none=True)
    return {name: value for name, value in base["slots"].items() if usual.get(name) != value}


def _methods(values: dict[str, Any]) -> list[str]:
    return method_names(values.get("method") or RunConfig().method)


# ------------------------------------------------------------------------------------------- settings of env and methods


def flag_model(env: str, methods: list[str]) -> type[RunConfig]:
    """RunConfig, its `env_args` a model of what the environment takes (of a mixture: with a section for each of them), with
    a section for each further method that takes settings."""
    check_names(methods, ())
    settings = mixture_model(env)
    fields: dict[str, Any] = {}
    if settings.model_fields:
        fields["env_args"] = (settings, Field(default=None, description=f"Settings of {env}."))
    for name, method in method_sections(methods).items():
        taken = settings_model(path_of(method), {}, name)
        fields[name] = (taken, Field(default=None, description=f"Settings of {method}."))
    return create_model("Flags", __base__=RunConfig, __doc__=RunConfig.__doc__, **fields)


def method_sections(methods: Sequence[str]) -> dict[str, str]:
    """Section of flags -> further method that it sets: a paper's name, or the class of one's own. A name that is another
    one's already, or a field's, has no flags: a file sets it."""
    found: dict[str, str] = {}
    for method in methods[1:]:
        name = method.rpartition(":")[2].replace("-", "_")
        if (
            name not in found
            and name not in RunConfig.model_fields
            and settings_model(path_of(method), {}, name).model_fields
        ):
            found[name] = method
    return found


def _without_prefix(line: Line, methods: list[str]) -> Line:
    """`--method-args.NAME.SETTING`, as the file's key has it, is `--NAME.SETTING`. UserError for settings of a paper that
    is not among the methods."""
    given = []
    for typed, words in line.given:
        short = typed[len(PREFIX) :] if dotted(typed).startswith(dotted(PREFIX)) else typed
        paper = dotted(short.partition(".")[0]).replace("_", "-")
        if "." in short and paper in PAPERS and paper not in methods:
            raise UserError(
                f"--{typed} sets {paper}, which is not among the methods: --method {','.join([*methods, paper])}"
            )
        given.append((short, words))
    return Line(line.positional, given)


def env_model(env: str) -> type[BaseModel]:
    """Settings that an environment takes as flags. UserError if there is no such environment."""
    if env not in ENVIRONMENTS and ":" not in env:
        near = nearest(env, ENVIRONMENTS, 0.0)
        raise UserError(
            f"environment {env!r} does not exist: did you mean {near!r}? "
            "'assay envs' lists them, and your own is given as 'package.module:Class'"
        )
    entry = ENVIRONMENTS.get(env, Entry(env, {}, ""))
    return settings_model(entry.path, entry.settings, "EnvArgs")


def mixture_model(env: str) -> type[BaseModel]:
    """`env_model` of one environment; of several, a section for each that takes settings."""
    names = split_env(env)
    if len(names) < 2:
        return env_model(names[0] if names else env)
    fields: dict[str, Any] = {}
    for name, one in env_sections(names).items():
        settings = env_model(one)
        if settings.model_fields:
            fields[name] = (settings, Field(default=None, description=f"Settings of {one}."))
    return create_model("MixtureArgs", **fields)


def env_sections(names: Sequence[str]) -> dict[str, str]:
    """Section of flags -> environment of a mixture: its name, or the class of one's own. A class that two have has no
    flags: a file sets them."""
    short = [dotted(name.rpartition(":")[2]) for name in names]
    return {section: name for section, name in zip(short, names, strict=True) if short.count(section) == 1}


def shown_settings(model: type[BaseModel], config: RunConfig) -> BaseModel:
    """For a help page: the settings of the run's environments."""
    names = split_env(config.env)
    if len(names) < 2:
        return filled(model, config.env_args)
    sections = env_sections(names)
    parts: dict[str, Any] = {
        short: filled(section(model, short), config.env_args.get(sections[short], {})) for short in model.model_fields
    }
    return model.model_construct(**parts)


def _typed_settings(
    typed: dict[str, Any], base: dict[str, Any], model: type[RunConfig], env: str, methods: list[str]
) -> dict[str, Any]:
    """The keys of `typed` with the settings of environment and methods as numbers, the latter in `method_args`."""
    typed = dict(typed)
    if "env_args" in typed:
        typed["env_args"] = _env_settings(typed["env_args"], base.get("env_args", {}), section(model, "env_args"), env)
    before = base.get("method_args", {})
    for name, method in method_sections(methods).items():
        if name in typed:
            flag, own = name.replace("_", "-"), before.get(method, {})
            found = _convert(section(model, name), typed.pop(name), own, flag)
            typed.setdefault("method_args", {})[method] = found
    return typed


def _env_settings(typed: dict[str, Any], before: dict[str, Any], model: type[BaseModel], env: str) -> dict[str, Any]:
    """What was typed of the environment's settings, of a mixture by environment."""
    names = split_env(env)
    if len(names) < 2:
        return _convert(model, typed, before, "env-args")
    sections = env_sections(names)
    return {
        sections[short]: _convert(section(model, short), own, before.get(sections[short], {}), f"env-args.{short}")
        for short, own in typed.items()
    }


def section(model: type[BaseModel], name: str) -> type[BaseModel]:
    """The model of a nested field."""
    found = model.model_fields[name].annotation
    assert isinstance(found, type) and issubclass(found, BaseModel)
    return found


def filled(model: type[BaseModel], values: dict[str, Any]) -> BaseModel:
    """An instance for a help page: a setting without value or default is shown as None."""
    fields = model.model_fields.items()
    return model.model_construct(
        **{name: values.get(name, None if field.is_required() else field.default) for name, field in fields}
    )


def _convert(model: type[BaseModel], typed: dict[str, Any], before: dict[str, Any], flag: str) -> dict[str, Any]:
    """What was typed, as the types that the model asks for; what a file gave counts as given."""
    known = {name: value for name, value in before.items() if name in model.model_fields}
    try:
        whole = model.model_validate(known | typed)
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0]
        if first["type"] == "missing":
            raise UserError(f"--{flag}.{name} is missing: it has no default") from error
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(f"--{flag}.{name} {first['input']}: {reason}") from error
    return {name: getattr(whole, name) for name in typed}
