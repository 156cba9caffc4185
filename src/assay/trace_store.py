"""Traces on disk: Parquet, one row per trace, its turns as a nested list of structs. Lossless to the bit.

In the file a log-prob or entropy that is not known is null; in memory it is NaN. The reward of an environment error is
NaN in both. Evidence is JSON text. The few texts that UTF-8 cannot hold (lone surrogates) stand with U+FFFD in their
column, for other readers, and exactly in `exact_text`. Columns that are not ours are ignored by the reader.

Every past schema version keeps its reader (READERS). Pages carry checksums, which are verified. Files are untrusted:
what does not fit is a UserError that names the file, the field, what was expected and what was found.
Left out: appending. One file is written once, beside its place, and renamed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from assay.files import beside, put, writing
from assay.protocols import UserError
from assay.trace import Outcome, Provenance, TaskKey, Trace, Turn

VERSION = b"2"  # what is written; READERS has what can be read
VERSION_KEY = b"assay.trace.schema"
TRACES_PER_GROUP = 1024  # traces of one row group: what a reader holds at once beside its result

TURN_V1 = {  # in the order of the fields of Turn
    "context_ids": pa.list_(pa.int32()),
    "context_provenance": pa.list_(pa.uint8()),
    "ids": pa.list_(pa.int32()),
    "provenance": pa.list_(pa.uint8()),
    "logprobs": pa.list_(pa.float32()),
    "entropies": pa.list_(pa.float32()),
    "closing_ids": pa.list_(pa.int32()),
    "observation": pa.string(),
    "action": pa.string(),
    "reward": pa.float64(),
    "valid": pa.bool_(),
    "anchor": pa.string(),
    "skill": pa.string(),
    "noop": pa.bool_(),
    "policy_version": pa.int64(),
    "stop": pa.string(),
}
TASK_V1 = {
    "environment": pa.string(),
    "version": pa.string(),
    "split": pa.string(),
    "id": pa.int64(),
    "hash": pa.string(),
}
TRACE_V1 = {  # in the order of the fields of Trace, then what is not a field
    "task": pa.struct(list(TASK_V1.items())),
    "step": pa.int64(),
    "round": pa.int64(),
    "slot": pa.int64(),
    "rollout": pa.int64(),
    "prompt_ids": pa.list_(pa.int32()),
    "prompt_provenance": pa.list_(pa.uint8()),
    "turns": pa.list_(pa.struct(list(TURN_V1.items()))),
    "final_observation": pa.string(),
    "reward": pa.float64(),
    "outcome": pa.string(),
    "temperature": pa.float64(),
    "mode": pa.string(),
    "kind": pa.string(),
    "parent": pa.string(),
    "error": pa.string(),
    "extra_tokens": pa.int64(),
    "evidence": pa.string(),
    "exact_text": pa.map_(pa.string(), pa.binary()),
}
TRACE_V2 = TRACE_V1 | {"horizon": pa.int64()}
FREE_TEXT = ("observation", "action", "final_observation", "error")  # may hold lone surrogates; names may not
MAY_BE_NULL = ("logprobs", "entropies")
SAME_LENGTH = {  # a list field -> the list field that it annotates, one value each
    "context_provenance": "context_ids",
    "provenance": "ids",
    "logprobs": "ids",
    "entropies": "ids",
    "prompt_provenance": "prompt_ids",
}
SURROGATE = re.compile("[\ud800-\udfff]")
PLACE = re.compile(r"turns\.([0-9]{1,9})\.(observation|action)|(final_observation|error)", re.ASCII)


# ---------------------------------------------------------------------------------------------------------- writing


def write_traces(path: str | os.PathLike[str], traces: Sequence[Trace]) -> None:
    """Writes all traces, in the order given, beside `path`, then renames: a killed writer leaves the old file or none.

    The same traces give the same bytes. UserError for a trace that the format cannot hold; then nothing is written.
    """
    path = Path(path)
    schema = pa.schema(list(TRACE_V2.items()), metadata={VERSION_KEY: VERSION})
    floats = [f"turns.list.element.{name}.list.element" for name in MAY_BE_NULL]
    split = dict.fromkeys(floats, "BYTE_STREAM_SPLIT")  # the bytes of floats sorted by place: only so they compress
    dictionaries = _dictionary_columns(schema, split)
    try:
        with (
            writing(path),
            pq.ParquetWriter(
                beside(path),
                schema,
                compression="zstd",
                use_dictionary=dictionaries,
                column_encoding=split,
                write_page_checksum=True,
            ) as writer,
        ):
            for first in range(0, len(traces), TRACES_PER_GROUP):
                writer.write_table(_table(traces[first : first + TRACES_PER_GROUP], schema, path))
        with writing(path):
            put(path)
    finally:
        beside(path).unlink(missing_ok=True)


def _dictionary_columns(schema: pa.Schema, without: dict[str, str]) -> list[str]:
    """Parquet paths of all leaves but those with an encoding of their own."""

    def leaves(name: str, kind: pa.DataType) -> Iterator[str]:
        if pa.types.is_map(kind):
            yield from (f"{name}.key_value.key", f"{name}.key_value.value")
        elif pa.types.is_list(kind):
            yield from leaves(f"{name}.list.element", kind.value_type)
        elif pa.types.is_struct(kind):
            for field in kind:
                yield from leaves(f"{name}.{field.name}", field.type)
        else:
            yield name

    return [leaf for field in schema for leaf in leaves(field.name, field.type) if leaf not in without]


def _table(traces: Sequence[Trace], schema: pa.Schema, path: Path) -> pa.Table:
    turns = [turn for trace in traces for turn in trace.turns]
    turn_columns = [_column(name, [getattr(t, name) for t in turns], kind, path) for name, kind in TURN_V1.items()]
    nested = pa.StructArray.from_arrays(turn_columns, list(TURN_V1))
    counts = [len(trace.turns) for trace in traces]
    task = [_column(f"task.{n}", [getattr(t.task, n) for t in traces], kind, path) for n, kind in TASK_V1.items()]
    made: dict[str, Callable[[], pa.Array]] = {
        "task": lambda: pa.StructArray.from_arrays(task, list(TASK_V1)),
        "turns": lambda: pa.ListArray.from_arrays(_offsets(counts), nested),
        "outcome": lambda: pa.array([trace.outcome.value for trace in traces], pa.string()),
        "evidence": lambda: pa.array([_evidence(trace, path) for trace in traces], pa.string()),
        "exact_text": lambda: pa.array([_exact_texts(trace) for trace in traces], TRACE_V1["exact_text"]),
    }
    columns = {
        name: made[name]() if name in made else _column(name, [getattr(t, name) for t in traces], kind, path)
        for name, kind in TRACE_V2.items()
    }
    _check(columns, path)
    _check(dict(zip(TURN_V1, turn_columns, strict=True)), path, "turns.")
    return pa.Table.from_arrays(list(columns.values()), schema=schema)


def _column(name: str, values: list[Any], kind: pa.DataType, path: Path) -> pa.Array:
    """One Arrow array from one Python value each; UserError where a value does not fit `kind` without loss."""
    try:
        if pa.types.is_list(kind):
            return _lists(values, kind.value_type)
        if name in FREE_TEXT:
            values = [SURROGATE.sub("\ufffd", text) for text in values]
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError) as error:
        raise UserError(f"{path}: cannot write {name}: expected {kind}: {error}") from error


def _lists(arrays: Sequence[NDArray[Any]], kind: pa.DataType) -> pa.ListArray:
    filled = [array for array in arrays if len(array)]  # the dtype of an empty array says nothing
    values = np.concatenate(filled) if filled else np.zeros(0, kind.to_pandas_dtype())
    if pa.types.is_floating(kind) and values.dtype != kind.to_pandas_dtype():
        raise TypeError(f"found {values.dtype}, which would be rounded")
    return pa.ListArray.from_arrays(
        _offsets([len(array) for array in arrays]), pa.array(values, kind, from_pandas=True)
    )


def _offsets(counts: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), pa.int32())


def _evidence(trace: Trace, path: Path) -> str:
    try:
        if not isinstance(trace.evidence, dict):
            raise TypeError(f"found a {type(trace.evidence).__name__} in place of a dict")
        return json.dumps(trace.evidence)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{path}: cannot write evidence of trace {trace.key} ({trace.task}): expected JSON values: {error}"
        ) from error


def _exact_texts(trace: Trace) -> dict[str, bytes]:
    """Place -> UTF-8 with surrogates let through, for the texts that plain UTF-8 cannot hold."""
    texts = {"final_observation": trace.final_observation, "error": trace.error}
    texts |= {f"turns.{t}.{name}": getattr(turn, name) for t, turn in enumerate(trace.turns) for name in FREE_TEXT[:2]}
    return {place: text.encode("utf-8", "surrogatepass") for place, text in texts.items() if SURROGATE.search(text)}


# ---------------------------------------------------------------------------------------------------------- reading


def read_traces(path: str | os.PathLike[str]) -> list[Trace]:
    """All traces of a file in the order they were written. UserError for whatever is not such a file, or is damaged."""
    path = Path(path)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return list(READERS[_version(file, path)](file, path))
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected a Parquet file of traces, found one that cannot be read: {error}") from error


def _version(file: pq.ParquetFile, path: Path) -> bytes:
    found = (file.schema_arrow.metadata or {}).get(VERSION_KEY)
    key = VERSION_KEY.decode()
    if found is None:
        columns = ", ".join(file.schema_arrow.names[:8])
        raise UserError(
            f"{path}: metadata key {key!r}: expected a schema version, found none: this is Parquet, with columns "
            f"{columns or 'none'}, but not a file of traces"
        )
    if found not in READERS:
        raise UserError(
            f"{path}: metadata key {key!r}: expected a version up to {VERSION.decode()}, found "
            f"{found[:20].decode(errors='replace')!r}: read it with the version of Assay that wrote it, or a newer one"
        )
    return found


def _read(file: pq.ParquetFile, path: Path, wanted: dict[str, Any]) -> Iterator[Trace]:
    schema = file.schema_arrow
    for name, kind in wanted.items():
        found = [field.type for field in schema if field.name == name]
        if found != [kind]:
            raise UserError(
                f"{path}: column {name!r}: expected one {kind}, found {found[0] if found else 'no such column'}"
            )
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, columns=list(wanted), use_threads=False).combine_chunks()
        columns = {name: _whole(table[name]) for name in wanted}
        _check(columns, path)
        nested = columns["turns"].flatten()
        turn_columns = {name: nested.field(name) for name in TURN_V1}
        _check(turn_columns, path, "turns.")
        yield from _traces(columns, turn_columns, path)


def _traces(columns: dict[str, pa.Array], turn_columns: dict[str, pa.Array], path: Path) -> Iterator[Trace]:
    spans = list(pairwise(_bounds(columns["turns"])))
    values = {name: _values(column) for name, column in columns.items() if name != "turns"}
    turn_values = {name: _values(column) for name, column in turn_columns.items()}
    for i, exact in enumerate(values.pop("exact_text")):
        for place, text in exact:
            match = PLACE.fullmatch(place)
            if not match or (match[1] and int(match[1]) >= spans[i][1] - spans[i][0]):
                raise UserError(
                    f"{path}: column 'exact_text': expected a text of trace {i} of its group, found {place!r}"
                )
            column, at = (turn_values, spans[i][0] + int(match[1])) if match[1] else (values, i)
            column[match[2] or match[3]][at] = text.decode("utf-8", "surrogatepass")
    turns = [Turn(*fields) for fields in zip(*turn_values.values(), strict=True)]
    values["task"] = [TaskKey(**task) for task in values["task"]]
    values["outcome"] = [Outcome(outcome) for outcome in values["outcome"]]
    for i, (first, end) in enumerate(spans):
        fields = {name: column[i] for name, column in values.items()}
        fields["evidence"] = _parsed(fields["evidence"], path)
        yield Trace(**fields, turns=tuple(turns[first:end]))


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: column 'evidence': expected JSON, found text that is not: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: column 'evidence': expected a JSON object, found a {type(value).__name__}")
    return value


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _bounds(column: pa.ListArray) -> list[int]:
    """[n + 1]: where each list begins in `column.flatten()`, and the end."""
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return [0, *np.cumsum(lengths, dtype=np.int64).tolist()]


def _values(column: pa.Array) -> list[Any]:
    """Lists as numpy arrays that share one writable buffer, null as NaN; anything else as Python values."""
    if not pa.types.is_list(column.type):
        return column.to_pylist()
    flat = np.array(column.flatten().to_numpy(zero_copy_only=False), column.type.value_type.to_pandas_dtype())
    return [flat[a:b] for a, b in pairwise(_bounds(column))]


def _check(columns: dict[str, pa.Array], path: Path, prefix: str = "") -> None:
    """What must hold in a file whoever wrote it: no null where none may be, lengths that fit, known symbols."""
    for name, column in columns.items():
        parts = {"": column}
        if pa.types.is_struct(column.type):
            parts |= {f".{field.name}": column.field(field.name) for field in column.type}
        elif pa.types.is_list(column.type):
            parts |= {} if name in MAY_BE_NULL else {" (elements)": column.flatten()}
        elif pa.types.is_map(column.type):
            parts |= {" (values)": column.items}
        for part, array in parts.items():
            if array.null_count:
                raise UserError(
                    f"{path}: field '{prefix}{name}{part}': expected values, found {array.null_count} nulls"
                )
        if name in SAME_LENGTH:
            _check_length(column, columns[SAME_LENGTH[name]], f"{prefix}{name}", f"{prefix}{SAME_LENGTH[name]}", path)
        if name.endswith("provenance"):
            most = pc.max(column.flatten()).as_py() or 0
            if most > max(Provenance):
                raise UserError(f"{path}: field '{prefix}{name}': expected 0 to {max(Provenance):d}, found {most}")
        if name.endswith("ids"):
            least = pc.min(column.flatten()).as_py() or 0
            if least < 0:
                raise UserError(f"{path}: field '{prefix}{name}': expected token ids from 0, found {least}")
    if "outcome" in columns:
        unknown = set(columns["outcome"].to_pylist()) - {outcome.value for outcome in Outcome}
        if unknown:
            known = ", ".join(outcome.value for outcome in Outcome)
            raise UserError(f"{path}: column 'outcome': expected one of {known}, found {sorted(unknown)[0]!r}")


def _check_length(column: pa.ListArray, of: pa.ListArray, name: str, of_name: str, path: Path) -> None:
    found, expected = pc.list_value_length(column), pc.list_value_length(of)
    wrong = np.flatnonzero(pc.not_equal(found, expected).to_numpy(zero_copy_only=False))
    if len(wrong):
        i = int(wrong[0])
        raise UserError(
            f"{path}: field {name!r}: expected one value per {of_name!r}, {expected[i]} in list {i}, found {found[i]}"
        )


READERS: dict[bytes, Callable[[pq.ParquetFile, Path], Iterator[Trace]]] = {
    b"1": partial(_read, wanted=TRACE_V1),
    b"2": partial(_read, wanted=TRACE_V2),
}
