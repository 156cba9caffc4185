"""Files of strangers: found, recognised by their first bytes, and read as records without trusting a length in them.

JSON Lines, JSON documents and Parquet tables all become records. Bounds come first: bytes of a line or document, objects
in it, values of a column. Pickles are refused: reading one runs what is in it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from assay.audit.readers.collect import Record, refuse
from assay.protocols import UserError

LINE_BYTES = 1 << 27  # of one line, or of a JSON document: Python needs ten times as much for it
OBJECTS = 1 << 22  # lists and objects in one line
FILES = 100_000  # in one folder
BATCH = 256  # rows of a table in memory at once
CELLS = 1 << 24  # values of one column of a row group that any file may have ...
CELLS_PER_BYTE = 64  # ... and per byte of a larger one (a run of equal masks costs next to nothing)
HEAD = 1 << 16  # bytes by which a file is recognised
PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin")
SUFFIXES = (".parquet", ".safetensors", ".npz", ".jsonl", ".json")  # of data files in a folder, the most telling first

PICKLE = """it is a pickle, and to open one is to run what is in it: convert it where it was made, in three lines: \
import json; from safetensors.torch import save_file; save_file({k: v.contiguous() for k, v in data.batch.items()}, \
"rollouts.safetensors", {k: json.dumps(v.tolist(), default=str) for k, v in data.non_tensor_batch.items()}) (data being \
verl's DataProto, or whatever holds your tensors)"""

Progress = Callable[[int], None]  # told how many further bytes of the source are done


def files_of(path: Path) -> list[Path]:
    """The file, or the data files of the folder in natural order (step 2 before step 10). UserError for all else."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # a loop of links, a name with a NUL byte
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: there is no file or folder that can be opened ({reason})") from error
    if stat.S_ISREG(mode):
        return [path]
    if not stat.S_ISDIR(mode):
        raise UserError(
            f"{path}: expected a file or a folder, found a pipe, a socket or a device: write to a file first"
        )
    entries = list(islice(os.scandir(path), FILES + 1))
    if len(entries) > FILES:
        raise UserError(f"{path}: expected at most {FILES} entries in a folder, found more: name one file")
    found = [Path(entry.path) for entry in entries if entry.name.endswith(SUFFIXES) and entry.is_file()]
    if not found:
        raise UserError(f"{path}: expected data files ({', '.join(SUFFIXES)}) in this folder, found none")
    return sorted(found, key=lambda file: [(len(p), p) if p.isdigit() else (0, p) for p in _digits(file.name)])


def _digits(name: str) -> list[str]:
    return re.split(r"([0-9]+)", name)


def kind_of(path: Path) -> str:
    """ "parquet", "npz", "safetensors", "json" or "lines", by content. UserError for a pickle, or for what is none."""
    with opened(path) as file:
        head = file.read(HEAD)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"PK\x03\x04"):
        return _zip_kind(path)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise UserError(f"{path}: {PICKLE}")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= path.stat().st_size:
        return "safetensors"
    if head.startswith(b"\x1f\x8b"):
        raise UserError(f"{path}: expected data, found it compressed with gzip: gunzip it first")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text and len(head) < HEAD:
        raise UserError(f"{path}: expected rollouts, found an empty file")
    if path.suffix in PICKLES:
        raise UserError(f"{path}: {PICKLE}")
    if text[:1] not in (b"{", b"["):
        raise UserError(f"{path}: expected Parquet, JSON, JSON Lines, safetensors or npz, found none of them")
    first, newline, _ = text.partition(b"\n")
    return "lines" if text[:1] == b"{" and (not newline or first.rstrip().endswith(b"}")) else "json"


def _zip_kind(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError) as error:
        raise UserError(f"{path}: expected an npz archive, found a zip file that is damaged ({error})") from error
    if any(name.endswith((".pkl", ".pickle")) for name in names):
        raise UserError(f"{path}: {PICKLE}")
    if not names or not all(name.endswith(".npy") for name in names):
        raise UserError(f"{path}: expected an npz archive of arrays, found a zip file of other things: unpack it")
    return "npz"


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The bytes of a regular file; whatever it became in the meantime, opening does not wait."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path}: expected a regular file, found something else")
        yield file


# --------------------------------------------------------------------------------------------------------------- JSON


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


# ------------------------------------------------------------------------------------------------------------ Parquet


@contextmanager
def parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A table whose column sizes are believable. UserError for whatever Arrow finds in it while it is open."""
    try:
        with pq.ParquetFile(path, memory_map=False) as file:
            _check_sizes(file, path)
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        message = " ".join(str(error).split())[:160]
        raise UserError(f"{path}: expected a Parquet table, found one that cannot be read: {message}") from error


def _check_sizes(file: pq.ParquetFile, path: Path) -> None:
    names = file.schema_arrow.names
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path}: expected columns of different names, found {twice!r:.60} twice")
    most = max(CELLS, CELLS_PER_BYTE * path.stat().st_size)
    for i in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(i)
        for j in range(group.num_columns):
            count = group.column(j).num_values
            if not 0 <= count <= most:
                name = group.column(j).path_in_schema
                raise UserError(
                    f"{path}: column {name!r:.60}: expected at most {most} values in a file of this size, found {count}"
                )


def rows(path: Path, columns: Sequence[str] | None, progress: Progress) -> Iterator[tuple[str, Record]]:
    """Rows of a table as records, of the columns that are there (None: all)."""
    with parquet(path) as file:
        names = file.schema_arrow.names
        wanted = names if columns is None else [name for name in names if name in columns]
        total, size, done = max(1, file.metadata.num_rows), path.stat().st_size, 0
        for batch in file.iter_batches(BATCH, columns=wanted, use_threads=False):
            for values in batch.to_pylist():
                yield f"row {done}", Record(values, f"{path}, row {done}")
                done += 1
            progress(size * batch.num_rows // total)
