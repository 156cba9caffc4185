"""What all readers share: checked conversions of untrusted values, and columns that grow sample by sample.

A file may promise or repeat more than it holds. Whatever is kept is charged against an allowance that follows from the
file's size, so that a small file cannot fill the memory. Left out: coercion. "3" is not 3, 1 is not 1.5 of a token.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from assay.audit.columns import Ragged, Rollouts
from assay.protocols import UserError

TOKENS: dict[str, tuple[Any, Any]] = {  # column -> dtype, and what stands for a sample that lacks it
    "ids": (np.int32, 0),
    "mask": (np.bool_, False),
    "sampled": (np.bool_, False),
    "attention": (np.bool_, True),
    "logprobs": (np.float32, np.nan),
    "trainer_logprobs": (np.float32, np.nan),
    "advantages": (np.float32, np.nan),
    "weights": (np.float32, np.nan),
}
NUMBERS: dict[str, tuple[Any, Any]] = {
    "reward": (np.float64, np.nan),
    "score": (np.float64, np.nan),
    "turn": (np.int64, -1),
    "version": (np.int64, -1),
    "padded": (np.int64, 0),
}
ALLOWANCE = 1 << 28  # bytes that any file may unfold to ...
UNFOLDING = 100  # ... and bytes per byte of a larger one
BYTES_PER_TOKEN = 24  # of all columns together, about


def refuse(place: str, field_name: str, expected: str, found: Any) -> NoReturn:
    """The one sentence of every reader."""
    raise UserError(f"{place}: field {field_name!r}: expected {expected}, found {said(found)}")


def said(value: Any) -> str:
    """A value in a few words, whatever it is and however large."""
    if isinstance(value, str):
        return reprlib.repr(value)
    if value is None:
        return "null"
    if isinstance(value, list | dict):
        kind = "list" if isinstance(value, list) else "object"
        return f"an empty {kind}" if not value else f"a {kind} of {len(value)}"
    if isinstance(value, bool | float):
        return str(value)
    return f"the number {reprlib.repr(value)}" if isinstance(value, int) else f"a {type(value).__name__}"


# ------------------------------------------------------------------------------------------------------------- values


def as_ints(values: Any, place: str, name: str) -> NDArray[np.int32]:
    """A list of integers that 32 bits can hold (True and False are none)."""
    _plain(values, {int}, place, name, "a list of integers")
    try:
        wide = np.array(values, np.int64)
    except OverflowError:
        wide = np.array([2**62])
    if wide.size and not -(2**31) <= wide.min() <= wide.max() < 2**31:
        refuse(place, name, "integers of 32 bits", next(v for v in values if not -(2**31) <= v < 2**31))
    return wide.astype(np.int32)


def as_floats(values: Any, place: str, name: str) -> NDArray[np.float32]:
    """A list of numbers; null is NaN."""
    _plain(values, {int, float, type(None)}, place, name, "a list of numbers")
    try:
        with np.errstate(over="ignore"):
            return np.array(values, np.float64).astype(np.float32)
    except OverflowError:
        refuse(place, name, "numbers", "an integer beyond any float")


def as_flags(values: Any, place: str, name: str) -> NDArray[np.bool_]:
    """A list of true and false, or of 1 and 0 (as integers or floats)."""
    kinds = _plain(values, {bool, int, float}, place, name, "a list of true/false or 1/0")
    if kinds <= {bool}:
        return np.array(values, np.bool_)
    wrong = set(values) - {0, 1}
    if wrong:
        refuse(place, name, "only 0 and 1", next(iter(wrong)))
    return np.array(values, np.float64) != 0


def _plain(values: Any, allowed: set[type], place: str, name: str, expected: str) -> set[type]:
    """Types are looked at before numpy is: it would turn mixed lists into text of any width."""
    if not isinstance(values, list):
        refuse(place, name, expected, values)
    kinds = set(map(type, values))
    if kinds - allowed:
        at = next(i for i, value in enumerate(values) if type(value) not in allowed)
        refuse(place, f"{name}[{at}]", expected.removeprefix("a list of ") + " only", values[at])
    return kinds


@dataclass(frozen=True, slots=True)
class Record:
    """An object from a file, and where it stands. Getters give None where the key is absent or null."""

    values: Mapping[str, Any]
    place: str  # "rollouts.jsonl, line 3"

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def _get(self, name: str, convert: Callable[[Any, str, str], Any]) -> Any:
        value = self.values.get(name)
        return None if value is None else convert(value, self.place, name)

    def ints(self, name: str) -> NDArray[np.int32] | None:
        return self._get(name, as_ints)

    def floats(self, name: str) -> NDArray[np.float32] | None:
        return self._get(name, as_floats)

    def flags(self, name: str) -> NDArray[np.bool_] | None:
        return self._get(name, as_flags)

    def needed(self, name: str) -> NDArray[np.int32]:
        """Token ids that must be there."""
        found = self.ints(name)
        if found is None:
            refuse(self.place, name, "a list of token ids", None)
        return found

    def number(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool):
            return float(value)
        if not isinstance(value, int | float):
            refuse(self.place, name, "a number", value)
        try:
            return float(value)
        except OverflowError:
            refuse(self.place, name, "a number", value)

    def integer(self, name: str) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is not int or not -(2**63) <= value < 2**63:
            refuse(self.place, name, "an integer of 64 bits", value)
        return value

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            refuse(self.place, name, "text", value)
        return value

    def name(self, name: str) -> str | int | None:
        """Text or an integer: an id of something."""
        value = self.values.get(name)
        if value is None or isinstance(value, str):
            return value
        return self.integer(name)

    def truth(self, name: str) -> bool | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            refuse(self.place, name, "true or false", value)
        return value

    def items(self, name: str) -> list[Any] | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            refuse(self.place, name, "a list", value)
        return value

    def sub(self, name: str) -> Record | None:
        """An object under a key."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            refuse(self.place, name, "an object", value)
        return Record(value, f"{self.place}, {name}")

    def subs(self, name: str) -> list[Record]:
        """A list of objects under a key; [] where there is none."""
        found = []
        for i, value in enumerate(self.items(name) or []):
            if not isinstance(value, dict):
                refuse(self.place, f"{name}[{i}]", "an object", value)
            found.append(Record(value, f"{self.place}, {name}[{i}]"))
        return found


def messages(values: Any, place: str, name: str) -> list[dict[str, str]]:
    """Chat messages as {"role", "content"}: the texts of a content's parts joined, tool calls as they were written."""
    if isinstance(values, str):
        return [{"role": "user", "content": values}]
    if not isinstance(values, list):
        refuse(place, name, "a list of messages, or text", values)
    found = []
    for i, message in enumerate(values):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            refuse(place, f"{name}[{i}]", "a message with a role", message)
        found.append({"role": message["role"], "content": content(message, place, f"{name}[{i}]")})
    return found


def content(message: Mapping[str, Any], place: str, name: str) -> str:
    """The text of a message."""
    value = message.get("content")
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        refuse(place, f"{name}.content", "text or a list of parts", value)
    parts = [part.get("text") if isinstance(part, dict) else part for part in value]
    return "".join(part for part in parts if isinstance(part, str))


def joined(chat: Iterable[Mapping[str, str]], *roles: str) -> str | None:
    """The contents of these roles (all, if none is named), one below the other; None where there is none."""
    texts = [message["content"] for message in chat if not roles or message["role"] in roles]
    return "\n".join(texts) if texts else None


# ------------------------------------------------------------------------------------------------------------ columns


@dataclass(slots=True)
class Collector:
    """Samples of one source, added one by one or, by vectorised readers, in blocks. `finish` gives the Rollouts."""

    source: str
    format: str
    declared: dict[str, Any] = field(default_factory=dict)  # what the user said; readers add what the file says
    limit: int | None = None
    size: int = 0  # bytes of the source
    where: list[str] = field(default_factory=list)
    tokens: dict[str, list[tuple[int, Ragged]]] = field(default_factory=dict)  # blocks: (first sample, its rows)
    samples: dict[str, dict[int, Any]] = field(default_factory=dict)  # sample -> value
    texts: dict[str, dict[int, Any]] = field(default_factory=dict)
    charged: int = 0
    said_by_user: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.said_by_user = frozenset(self.declared)

    @property
    def full(self) -> bool:
        return self.limit is not None and len(self.where) >= self.limit

    def charge(self, size: int, place: str) -> None:
        """Count `size` bytes that are about to be kept. UserError beyond what a file of this size may unfold to."""
        self.charged += size
        if self.charged > max(ALLOWANCE, UNFOLDING * self.size):
            raise UserError(
                f"{place}: what the file repeats unfolds to more than {self.charged >> 20} MiB out of "
                f"{self.size / 2**20:.1f} MiB: read a part of it with --limit, or write less into one file"
            )

    def declare(self, **values: Any) -> None:
        """What the file says of all samples; the user's word stands."""
        for name, value in values.items():
            if value is not None and name not in self.said_by_user:
                self.declared[name] = value

    def add(
        self,
        where: str,
        tokens: Mapping[str, NDArray[Any] | None] | None = None,
        samples: Mapping[str, Any] | None = None,
        texts: Mapping[str, Any] | None = None,
        place: str = "",
    ) -> None:
        """One sample. None stands for what is not known; a column of another length than the ids is for a check to find."""
        if self.full:
            return
        place = place or f"{self.source}, {where}"
        i = len(self.where)
        known = {name: array for name, array in (tokens or {}).items() if array is not None}
        longest = max((len(array) for array in known.values()), default=0)
        written = sum(len(t) if isinstance(t, str) else 100 * len(t) for t in (texts or {}).values() if t is not None)
        self.charge(BYTES_PER_TOKEN * longest + written + 200, place)
        for name, array in known.items():
            block = Ragged(array, np.array([0, len(array)], np.int64))
            self.tokens.setdefault(name, []).append((i, block))
        for name, value in (samples or {}).items():
            if value is not None:
                self.samples.setdefault(name, {})[i] = value
        for name, text in (texts or {}).items():
            if text is not None:
                self.texts.setdefault(name, {})[i] = text
        self.where.append(where)

    def add_block(self, where: list[str], tokens: Mapping[str, Ragged], samples: Mapping[str, Iterable[Any]]) -> None:
        """Many samples at once, columns of equal length, charged already."""
        i = len(self.where)
        for name, rows in tokens.items():
            self.tokens.setdefault(name, []).append((i, rows))
        for name, values in samples.items():
            known = {i + k: value for k, value in enumerate(values) if value is not None}
            if known:
                self.samples.setdefault(name, {}).update(known)
        self.where += where

    def finish(self) -> Rollouts:
        """Columns in one piece each. What a sample lacks is filled with "not known"; columns that none has are absent."""
        n = len(self.where)
        lengths = np.zeros(n, np.int64)  # of what a sample lacks: that of its ids, else of any other column
        for name in [*(name for name in self.tokens if name != "ids"), *(["ids"] if "ids" in self.tokens else [])]:
            for first, rows in self.tokens[name]:
                lengths[first : first + len(rows)] = rows.lengths
        told = np.zeros(n, np.bool_)  # of which samples the file says what was sampled
        for first, rows in self.tokens.get("sampled", []):
            told[first : first + len(rows)] = True
        columns = {name: self._whole(name, lengths) for name in TOKENS if name in self.tokens}
        aligned = "mask" in columns and np.array_equal(columns["mask"].lengths, lengths)
        if "sampled" in columns and aligned:  # no check may find fault with what is not known
            silent = np.repeat(~told, lengths)
            columns["sampled"].values[silent] = columns["mask"].values[silent]
        return Rollouts(
            self.source,
            self.format,
            self.where,
            columns,
            {name: _sample_column(name, values, n) for name, values in self.samples.items()},
            {name: [values.get(i) for i in range(n)] for name, values in self.texts.items()},
            self.declared,
        )

    def _whole(self, name: str, lengths: NDArray[np.int64]) -> Ragged:
        """The flat column; its blocks are let go of, so that two copies of one column at most stand in memory."""
        dtype, unknown = TOKENS[name]
        blocks = self.tokens[name]
        lengths = lengths.copy()
        for first, rows in blocks:
            lengths[first : first + len(rows)] = rows.lengths
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        flat = np.full(int(offsets[-1]), unknown, dtype)
        while blocks:
            first, rows = blocks.pop()
            flat[offsets[first] : offsets[first + len(rows)]] = rows.values
        return Ragged(flat, offsets)


def _sample_column(name: str, values: Mapping[int, Any], n: int) -> NDArray[Any]:
    if name in NUMBERS:
        dtype, unknown = NUMBERS[name]
    elif name == "group" and all(type(value) is int for value in values.values()):
        dtype, unknown = np.int64, -1
    else:
        dtype, unknown = object, ""
        values = {i: str(value) for i, value in values.items()}
    column = np.full(n, unknown, dtype)
    if values:
        column[np.fromiter(values, np.int64, len(values))] = list(values.values())
    return column


def spread(values: NDArray[Any], where: NDArray[np.bool_], place: str, name: str) -> NDArray[np.float32]:
    """[T] with compact `values` at the True positions of `where` [T], NaN elsewhere."""
    if len(values) != int(where.sum()):
        refuse(place, name, f"one value per sampled token, {int(where.sum())} of them", f"{len(values)} values")
    full = np.full(len(where), np.nan, np.float32)
    full[where] = values
    return full
