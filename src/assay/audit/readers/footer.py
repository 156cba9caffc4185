"""How many values the columns of a Parquet file claim to have, read from its footer without Arrow.

Arrow's own view of a column chunk ends the process when the statistics beside the count are damaged, so the count is
taken from the bytes: the footer is a Thrift struct in the compact protocol, of which three levels matter here.
Source: parquet.thrift and the Thrift compact protocol. Left out: everything but counts and names; it is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from assay.audit.readers.files import opened
from assay.protocols import UserError

FOOTER_BYTES = 1 << 26
DEPTH = 32  # of structs and lists inside one another; Parquet needs nine
ROW_GROUPS, COLUMNS, METADATA, PATH, VALUES = 4, 1, 3, 3, 5  # field ids
BOOLEANS, BYTE, INTEGERS, DOUBLE, BINARY, LISTS, MAP, STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 11, 12


@dataclass(slots=True)
class Cursor:
    """Bytes, and how far they are read. IndexError or ValueError where they end too soon or make no sense."""

    data: bytes
    at: int = 0

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def integer(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def binary(self) -> bytes:
        size = self.varint()
        if size > len(self.data) - self.at:
            raise ValueError("a text that is longer than the footer")
        self.at += size
        return self.data[self.at - size : self.at]

    def fields(self) -> Iterator[tuple[int, int]]:
        """(field id, type) of a struct; whoever iterates must read or skip each value."""
        field = 0
        while header := self.byte():
            field = field + (header >> 4) if header >> 4 else self.integer()
            yield field, header & 15

    def items(self) -> tuple[int, int]:
        """(number, type) of a list; each item takes a byte at least."""
        header = self.byte()
        count = self.varint() if header >> 4 == 15 else header >> 4
        if count > len(self.data) - self.at:
            raise ValueError("a list that is longer than the footer")
        return count, header & 15

    def skip(self, kind: int, depth: int = 0, inside: bool = False) -> None:
        """A value of any type; a boolean takes a byte `inside` a list only."""
        if depth > DEPTH:
            raise ValueError("structs without end")
        if kind in BOOLEANS:
            self.at += inside
        elif kind == BYTE:
            self.at += 1
        elif kind in INTEGERS:
            self.varint()
        elif kind == DOUBLE:
            self.at += 8
        elif kind == BINARY:
            self.binary()
        elif kind in LISTS:
            count, item = self.items()
            for _ in range(count):
                self.skip(item, depth + 1, inside=True)
        elif kind == STRUCT:
            for _, field in self.fields():
                self.skip(field, depth + 1)
        elif kind == MAP:
            self._skip_map(depth)
        else:
            raise ValueError(f"a value of type {kind}")

    def _skip_map(self, depth: int) -> None:
        count = self.varint()
        if count > len(self.data) - self.at:
            raise ValueError("a map that is longer than the footer")
        kinds = self.byte() if count else 0
        for _ in range(count):
            self.skip(kinds >> 4, depth + 1, inside=True)
            self.skip(kinds & 15, depth + 1, inside=True)


def value_counts(path: Path) -> list[tuple[str, int]]:
    """(column, values) of every column chunk. UserError for a file whose end is no footer."""
    size = path.stat().st_size
    with opened(path) as file:
        file.seek(max(0, size - 8))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length > min(size - 12, FOOTER_BYTES):
            raise UserError(
                f"{path}: expected a Parquet table, found a file without its end: was it written to the end?"
            )
        file.seek(size - 8 - length)
        cursor = Cursor(file.read(length))
    try:
        return list(_chunks(cursor))
    except (IndexError, ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected a Parquet table, found one whose footer is damaged ({error})") from error


def _chunks(cursor: Cursor) -> Iterator[tuple[str, int]]:
    for field, kind in cursor.fields():
        if field != ROW_GROUPS or kind not in LISTS:
            cursor.skip(kind)
            continue
        for _ in range(cursor.items()[0]):
            for inner, kind in cursor.fields():
                if inner != COLUMNS or kind not in LISTS:
                    cursor.skip(kind)
                    continue
                for _ in range(cursor.items()[0]):
                    yield _chunk(cursor)


def _chunk(cursor: Cursor) -> tuple[str, int]:
    name, count = "", 0
    for field, kind in cursor.fields():
        if field != METADATA or kind != STRUCT:
            cursor.skip(kind)
            continue
        for inner, kind in cursor.fields():
            if inner == VALUES and kind in INTEGERS:
                count = cursor.integer()
            elif inner == PATH and kind in LISTS:
                name = ".".join(cursor.binary().decode(errors="replace") for _ in range(cursor.items()[0]))
            else:
                cursor.skip(kind)
    return name, count
