"""Records out of JSON Lines, JSON documents and tables, without trusting a length in them.

Bounds come first: bytes of a line or document, lists and objects in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from assay.audit.readers.collect import Record, refuse
from assay.audit.readers.files import Progress, opened
from assay.audit.readers.tables import rows
from assay.protocols import UserError

LINE_BYTES = 1 << 27  # of one line, or of a JSON document: Python needs ten times as much for it
OBJECTS = 1 << 22  # lists and objects in one line


def records(path: Path, kind: str, columns: Sequence[str] | None, progress: Progress) -> Iterator[tuple[str, Record]]:
    """(where, record) of a file of any of the three kinds; of a table only `columns`, those of them that it has."""
    if kind == "parquet":
        yield from rows(path, columns, progress)
    elif kind == "lines":
        yield from lines(path, progress)
    elif kind == "json":
        yield from document(path, progress)
    else:
        raise UserError(f"{path}: expected records (JSON Lines, JSON or Parquet), found {kind}")


def lines(path: Path, progress: Progress) -> Iterator[tuple[str, Record]]:
    """One object a line; empty lines are skipped."""
    with opened(path) as file:
        number = 0
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            place = f"{path}, line {number}"
            if len(line) > LINE_BYTES:
                raise UserError(f"{place}: expected at most {LINE_BYTES >> 20} MiB in one line, found more: split it")
            progress(len(line))
            if line.strip():
                yield f"line {number}", record_of(parse(line, place), place)


def document(path: Path, progress: Progress) -> Iterator[tuple[str, Record]]:
    """One object, or a list of them."""
    with opened(path) as file:
        data = file.read(LINE_BYTES + 1)
    if len(data) > LINE_BYTES:
        raise UserError(f"{path}: expected at most {LINE_BYTES >> 20} MiB of JSON, found more: write one object a line")
    value = parse(data, str(path))
    progress(len(data))
    if not isinstance(value, list):
        yield "the document", record_of(value, str(path))
        return
    for i, item in enumerate(value):
        yield f"item {i}", record_of(item, f"{path}, item {i}")


def record_of(value: Any, place: str) -> Record:
    if not isinstance(value, dict):
        refuse(place, "(whole)", "an object", value)
    return Record(value, place)


def parse(data: bytes, place: str) -> Any:
    """JSON as Python writes it (NaN and Infinity are numbers). UserError for what is not, and for a key given twice."""
    if data.count(b"[") + data.count(b"{") > OBJECTS:
        raise UserError(f"{place}: expected at most {OBJECTS} lists and objects, found more: split it")
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: expected JSON, found none at character {error.pos}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: expected UTF-8, found other bytes at {error.start}") from error
    except ValueError as error:  # a key twice, an integer of thousands of digits
        raise UserError(f"{place}: expected JSON that can be read, found a flaw: {str(error)[:120]}") from error
    except RecursionError as error:
        raise UserError(f"{place}: expected JSON, found lists or objects nested without end") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"key {next(name for name in names if names.count(name) > 1)!r:.60} stands twice in one object"
        )
    return found
