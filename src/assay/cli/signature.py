"""Settings of an environment or a method as a pydantic model, read from its source.

The source is parsed, not imported: help must be quick, and asking what a class takes should not run it. A class whose
`__init__` is not its own (inherited, a dataclass, C) is imported and asked.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model

from assay.cli.flags import is_union
from assay.protocols import UserError

PLAIN = {"int": int, "float": float, "str": str, "bool": bool, "None": NoneType}
REQUIRED = inspect.Parameter.empty


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Parameter:
    """`type` is None where text cannot say it (a mapping, an object): such a setting is for a file."""

    name: str
    type: Any
    default: Any
    help: str = ""


@dataclass(frozen=True, slots=True)
class About:
    """What a class says of itself: literal attributes of its body, names that the body defines and that its functions set
    on self, and those of `needed` strings that it sets `needs` to, always or (on self) by its settings."""

    docstring: str
    attributes: dict[str, Any]
    defines: frozenset[str]
    sets: frozenset[str]
    always: tuple[str, ...]
    perhaps: tuple[str, ...]


def about(path: str, needed: Sequence[str]) -> About:
    """Of the class "module:Class" and its bases in the same file. UserError when there is none."""
    module, _, name = path.partition(":")
    source = _source(module)
    tree = _tree(source) if source else ast.Module([], [])
    node = _class(tree, name)
    if node is None:
        raise UserError(f"{path!r} is not a class: write package.module:Class")
    lineage = [node]
    for known in lineage:  # grows while it is gone through
        lineage += [base for b in known.bases if (base := _class(tree, ast.unparse(b))) and base not in lineage]
    attributes: dict[str, Any] = {}
    defines: set[str] = set()
    sets: set[str] = set()
    always: set[str] = set()
    perhaps: set[str] = set()
    for statement in (s for known in reversed(lineage) for s in known.body):
        if isinstance(statement, ast.FunctionDef):
            defines.add(statement.name)
            for assigned in (n for n in ast.walk(statement) if isinstance(n, ast.Assign)):
                owner, _, attribute = ast.unparse(assigned.targets[0]).partition(".")
                sets |= {attribute} if owner == "self" else set()
                perhaps |= set(_words(assigned)) if (owner, attribute) == ("self", "needs") else set()
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            defines.add(ast.unparse(target))
            attributes[ast.unparse(target)] = _literal(statement.value)
            always |= set(_words(statement)) if ast.unparse(target) == "needs" else set()
    docstring = next((text for known in lineage if (text := ast.get_docstring(known))), "")
    ordered = [tuple(word for word in needed if word in found) for found in (always, perhaps - always)]
    return About(docstring, attributes, frozenset(defines), frozenset(sets), ordered[0], ordered[1])


def _words(node: ast.AST) -> list[str]:
    """The strings written in it."""
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def type_name(found: Any) -> str:
    """ "int", "float | None", "ratio | tanh"."""
    if get_origin(found) is Literal:
        return " | ".join(map(str, get_args(found)))
    parts = get_args(found) if is_union(found) else (found,)
    if len(parts) == 1:
        return "None" if found is NoneType else str(found.__name__)
    return " | ".join(map(type_name, parts))


def settings_model(path: str, fixed: Mapping[str, Any], name: str) -> type[Settings]:
    """A model with one field per setting of "module:Class" that a flag can give, the `fixed` ones left out."""
    fields: dict[str, Any] = {}
    for parameter in parameters(path):
        if parameter.name not in fixed and parameter.type is not None:
            default = ... if parameter.default is REQUIRED else parameter.default
            fields[parameter.name] = (parameter.type, Field(default, description=parameter.help or None))
    return create_model(name, __base__=Settings, **fields)


def parameters(path: str) -> list[Parameter]:
    """Of the class's `__init__`. UserError when module or class do not exist."""
    module, _, name = path.partition(":")
    source = _source(module)
    node = _class(_tree(source), name) if source else None
    init = (
        next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None) if node else None
    )
    return _of_node(init, ast.get_docstring(node) or "") if node and init else _of_class(path, module, name)


def _source(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise UserError(f"{module!r} cannot be imported ({error}): write package.module:Class") from error
    if spec is None:
        raise UserError(f"module {module!r} does not exist: install it, or run where Python finds it")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _tree(source: Path) -> ast.Module:
    try:
        return ast.parse(source.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        raise UserError(f"{source} cannot be read as Python: {error}") from error


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _of_node(init: ast.FunctionDef, docstring: str) -> list[Parameter]:
    docstring = f"{docstring}\n\n{ast.get_docstring(init) or ''}"
    arguments = init.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    pairs = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    found = []
    for argument, node in pairs[1:]:  # without self
        default = REQUIRED if node is None else _literal(node)
        found.append(
            Parameter(argument.arg, _type(argument.annotation, default), default, _help(argument.arg, docstring))
        )
    return found


def _help(name: str, docstring: str) -> str:
    """What a docstring says of a setting, in either of two usual forms: "name: text" or "name   text". Lines below
    that are further in go on with it."""
    start = rf"(?:^|\. )([ ]*)`*{re.escape(name)}`*(?::|  ) *"
    match = re.search(start + r"(.+(?:\n\1[ ]+\S.*)*)$", docstring, re.MULTILINE)
    return re.split(r"\. [a-z_]+:", " ".join(match[2].split()))[0].strip() if match else ""


def _of_class(path: str, module: str, name: str) -> list[Parameter]:
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{path!r} cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise UserError(f"{path!r} is not a class: write package.module:Class")
    kept = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        Parameter(p.name, _known(p.annotation if p.annotation in PLAIN.values() else type(p.default)), p.default)
        for p in inspect.signature(found).parameters.values()
        if p.kind in kept
    ]


def _literal(node: ast.expr) -> Any:
    """The value of a default; an expression that is no literal (a name, a call) stays unknown and its setting with it."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ...


def _type(annotation: ast.expr | None, default: Any) -> Any:
    """The union of the plain types that an annotation names; without annotation, that of the default."""
    if default is ...:
        return None
    if annotation is None:
        return str if default is REQUIRED else _known(type(default))
    node = annotation
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        node = ast.parse(annotation.value, mode="eval").body
    plain = [found for part in _parts(node) if (found := _plain(part)) is not None]
    return _known(reduce(or_, plain)) if plain else None


def _parts(node: ast.expr) -> list[ast.expr]:
    """Of a union."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_parts(node.left), *_parts(node.right)]
    return [node]


def _plain(node: ast.expr) -> Any:
    """The type that an annotation names, or a Literal of words; None for anything else."""
    name = ast.unparse(node)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] == "Literal":
        words = _literal(node.slice)
        return Literal[words if isinstance(words, tuple) else (words,)]
    return PLAIN.get(name)


def _known(found: Any) -> Any:
    """None where nothing but None is left."""
    parts = (get_args(found) if is_union(found) else (found,)) if found is not None else ()
    return (
        found if any(p is not NoneType and (p in PLAIN.values() or get_origin(p) is Literal) for p in parts) else None
    )
