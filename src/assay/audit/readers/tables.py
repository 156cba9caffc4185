"""Parquet tables: opened when the sizes they claim are believable, read as records a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from assay.audit.readers.collect import Record
from assay.audit.readers.files import Progress
from assay.audit.readers.footer import value_counts
from assay.protocols import UserError

BATCH = 256  # rows of a table in memory at once
CELLS = 1 << 24  # values of one column of a row group that any file may have ...
CELLS_PER_BYTE = 64  # ... and per byte of a larger one (a run of equal masks costs next to nothing)


@contextmanager
def parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A table whose column sizes are believable. UserError for whatever Arrow finds in it while it is open."""
    try:
        _check_counts(path)
        with pq.ParquetFile(path, memory_map=False) as file:
            _check_names(file, path)
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        message = " ".join(str(error).split())[:160]
        raise UserError(f"{path}: expected a Parquet table, found one that cannot be read: {message}") from error


def _check_counts(path: Path) -> None:
    most = max(CELLS, CELLS_PER_BYTE * path.stat().st_size)
    for name, count in value_counts(path):
        if not 0 <= count <= most:
            raise UserError(
                f"{path}: column {name!r:.60}: expected at most {most} values in a file of this size, found {count}"
            )


def _check_names(file: pq.ParquetFile, path: Path) -> None:
    names = file.schema_arrow.names
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path}: expected columns of different names, found {twice!r:.60} twice")


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
