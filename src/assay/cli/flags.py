"""From arguments to nested configuration keys, by the fields of a pydantic model.

Three rules make the whole grammar: an argument that begins with "--" names a field (dots for sections, hyphens or
underscores), what follows up to the next one are its values, and what stands before the first one is positional.
Only what the user said comes out, so that a preset or a file can be laid under it; bounds are the model's to check. The
help page is tyro's, of the same model.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model

from assay.protocols import UserError

Model = TypeVar("Model", bound=BaseModel)
BLANK: dict[Any, Any] = {bool: False, str: "", str | None: None}  # what stands for an absent switch
TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0")


@dataclass(frozen=True, slots=True)
class Help:
    """What a help page says beside the fields: switches are name -> (type, text), for flags that are no field."""

    command: str
    line: str
    examples: tuple[str, ...]
    positional: tuple[str, ...] = ()
    switches: Mapping[str, tuple[Any, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """A command line taken apart: `given` holds (name as typed, its values) in order."""

    positional: list[str]
    given: list[tuple[str, list[str]]]

    def values(self, name: str) -> list[str] | None:
        """Values of a top-level flag, the last one given; None if it was not."""
        found = [values for typed, values in self.given if dotted(typed) == name]
        return found[-1] if found else None

    def value(self, name: str) -> str | None:
        """The one value of a top-level flag; None if it was not given."""
        values = self.values(name)
        return None if values is None else one(name.replace("_", "-"), values)

    @property
    def wants_help(self) -> bool:
        words = [*self.positional, *(word for _, values in self.given for word in values)]
        return "-h" in words or self.switch("help")

    def without_help(self) -> Line:
        given = [(typed, [w for w in words if w != "-h"]) for typed, words in self.given if typed != "help"]
        return Line([word for word in self.positional if word != "-h"], given)

    def switch(self, name: str) -> bool:
        words = self.values(name)
        return words is not None and truth(name.replace("_", "-"), words)

    def without(self, *names: str) -> Line:
        return Line(self.positional, [(typed, values) for typed, values in self.given if dotted(typed) not in names])


def split(arguments: Sequence[str]) -> Line:
    """Take a command line apart; needs no model, so that the model may depend on what it says."""
    positional: list[str] = []
    given: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            name, equals, value = argument[2:].partition("=")
            given.append((name, [value] if equals else []))
        elif given:
            given[-1][1].append(argument)
        else:
            positional.append(argument)
    return Line(positional, given)


def interpret(line: Line, model: type[BaseModel], command: str) -> dict[str, Any]:
    """Nested keys of what the line says; UserError for a flag that no field has, or that lacks its value."""
    fields = leaves(model)
    values: dict[str, Any] = {}
    for typed, words in line.given:
        name, negated = _find(typed, fields, command)
        annotation = fields[name]
        if is_bool(annotation) and words != ["None"]:
            value: Any = truth(typed, words) is not negated
        elif is_list(annotation) and not (words == ["None"] and is_union(annotation)):
            value = listed(typed, words, annotation)
        else:
            value = scalar(typed, one(typed, words), annotation)
        _put(values, name, value)
    return values


def read(line: Line, model: type[Model], page: Help) -> Model:
    """The settings of a command; its positional arguments fill the named fields in order."""
    line = line.without(*page.switches)
    if len(line.positional) > len(page.positional):
        extra = line.positional[len(page.positional)]
        raise UserError(f"unexpected {extra!r}: 'assay {page.command} --help' shows what it takes")
    values = dict(zip(page.positional, line.positional, strict=False)) | interpret(line, model, page.command)
    for name, info in model.model_fields.items():
        if info.is_required() and name not in values:
            what = name.upper() if name in page.positional else f"--{name.replace('_', '-')}"
            raise UserError(f"{what} is missing: 'assay {page.command} --help' shows what it is")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        flag = ".".join(str(part) for part in first["loc"]).replace("_", "-")
        raise UserError(f"--{flag} {first['input']}: {_reason(error)}") from error


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> annotation of every field that a flag sets."""
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found |= leaves(info.annotation, f"{prefix}{name}.")
        elif get_origin(info.annotation) is not dict:
            found[prefix + name] = info.annotation
    return found


def nearest(word: str, words: Iterable[str], cutoff: float = 0.5) -> str:
    """The most similar of the words, "" if none is."""
    return next(iter(difflib.get_close_matches(word, list(words), 1, cutoff)), "")


def dotted(typed: str) -> str:
    """The field that a typed flag names."""
    return typed.replace("-", "_")


def one(typed: str, words: Sequence[str]) -> str:
    if not words:
        raise UserError(f"--{typed} needs a value: give one after it")
    if len(words) > 1:
        raise UserError(f"--{typed} takes one value, not {len(words)} ({' '.join(words)}): take {words[1]!r} out")
    return words[0]


def listed(typed: str, words: list[str], annotation: Any) -> list[Any]:
    """Words as the items of a list; numbers also with commas between them."""
    item = get_args(annotation if get_origin(annotation) in (list, tuple) else get_args(annotation)[0])[0]
    if item not in (int, float):
        return words
    return [scalar(typed, part, item) for word in words for part in word.split(",") if part]


def scalar(typed: str, text: str, annotation: Any) -> Any:
    """Text as the field's type; None where it may be absent and the text is "None"."""
    if text == "None" and NoneType in get_args(annotation):
        return None
    try:
        return TypeAdapter(annotation).validate_python(text)
    except ValidationError as error:
        raise UserError(f"--{typed} {text}: {_reason(error)}") from error


def truth(typed: str, words: Sequence[str]) -> bool:
    """A switch: on when named alone."""
    word = one(typed, words).lower() if words else "true"
    if word not in (*TRUE, *FALSE):
        raise UserError(f"--{typed} is true or false, not {word!r}")
    return word in TRUE


def is_bool(annotation: Any) -> bool:
    return annotation is bool or (is_union(annotation) and set(get_args(annotation)) == {bool, NoneType})


def is_list(annotation: Any) -> bool:
    listed = [get_origin(part) in (list, tuple) for part in (annotation, *get_args(annotation)) if part is not NoneType]
    return listed[0] or (is_union(annotation) and all(listed[1:]))


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _reason(error: ValidationError) -> str:
    message: str = error.errors()[0]["msg"]
    return message[0].lower() + message[1:].partition(", unable")[0]


def _find(typed: str, fields: Mapping[str, Any], command: str) -> tuple[str, bool]:
    """(field, negated) of a typed flag; `--section.no-switch` negates a switch."""
    name = dotted(typed)
    by_plain = {field.lower(): field for field in fields}
    if name.lower() in by_plain:
        return by_plain[name.lower()], False
    section, dot, last = name.rpartition(".")
    positive = by_plain.get(f"{section}{dot}{last.removeprefix('no_')}".lower())
    if last.startswith("no_") and positive and is_bool(fields[positive]):
        return positive, True
    last_parts = {field.rpartition(".")[2]: field for field in fields}
    near = nearest(name, fields, 0.6) or last_parts.get(nearest(last, last_parts, 0.6), "")
    hint = f"did you mean --{near.replace('_', '-')}?" if near else f"'assay {command} --help' lists all"
    raise UserError(f"unknown option --{typed}: {hint}")


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[last] = value


def show_help(page: Help, model: type[Model], default: Model | None = None) -> int:
    """tyro's page of the model's fields: docstrings, types, and the values that hold when a flag is absent."""
    import tyro

    fields: dict[str, Any] = {}
    for name in page.positional:
        info = model.model_fields[name]
        place: Any = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar=name.upper())]
        fields[name] = (place, Field(... if info.is_required() else info.default, description=info.description))
    for name, (annotation, text) in page.switches.items():
        switch = tyro.conf.arg(name=name.replace("_", "-"))
        fields[f"switch_{name}"] = (Annotated[annotation, switch], Field(BLANK[annotation], description=text))
    shown: Any = create_model("Shown", __base__=model, **fields)
    values = {name: getattr(default, name) for name in model.model_fields} if default is not None else {}
    examples = "\n".join(f"  assay {example}" for example in page.examples)
    with suppress(SystemExit):  # tyro leaves after its page
        tyro.cli(
            shown,
            default=shown.model_construct(**values) if values else None,
            args=["--help"],
            prog=f"assay {page.command}",
            description=f"{page.line}\n\n{examples}",
        )
    return 0
