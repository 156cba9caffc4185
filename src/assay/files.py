"""Files that survive a kill, a full disk and a stranger: written beside and renamed, bounded and checked when read."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from assay.protocols import UserError

TEMPORARY = ".tmp-"  # prefix of what is not finished yet: never read, cleared when the run is next opened
ADVICE = {
    errno.ENOSPC: "free some space, then resume the run",
    errno.EDQUOT: "free some of your quota, then resume the run",
    errno.EFBIG: "raise the file size limit (ulimit -f), then resume the run",
    errno.EACCES: "make the folder writable, then resume the run",
    errno.EROFS: "the file system is read-only: choose another folder",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the system's refusal to write `path` into one sentence. The caller has left what was there untouched."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        advice = ADVICE.get(
            getattr(error, "errno", None) or 0, "mend that (most often a full disk), then resume the run"
        )
        raise UserError(f"could not write {path}: {reason}; what was there before is untouched; {advice}") from error


def sync(path: Path) -> None:
    """Flush a file or a folder (that is, its renames) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def beside(path: Path) -> Path:
    """Where `path` is written before it is renamed. One writer at a time is the run directory's lock."""
    return path.with_name(TEMPORARY + path.name)


def put(path: Path) -> None:
    """`beside(path)` is complete: make it `path`, atomically and durably."""
    sync(beside(path))
    os.replace(beside(path), path)
    sync(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """The old file or the new one, never a part of either. UserError when the disk refuses."""
    with writing(path):
        try:
            beside(path).write_bytes(data)
            put(path)
        finally:
            beside(path).unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_file(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_file(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes (links are refused: they may lead anywhere)."""
    if path.is_symlink() or not path.is_file():
        raise UserError(f"{path}: expected a regular file, found {'a link' if path.is_symlink() else 'none'}")
    size = path.stat().st_size
    if size > limit:
        raise UserError(f"{path}: expected at most {limit} bytes, found {size}: this file was not written by assay")
    return path.read_bytes()


def text_lines(path: Path, what: str, limit: int) -> list[str]:
    """The lines of a user's UTF-8 file of at most `limit` bytes; UserError names the file as `what` and says what is wrong.
    Links and pipes are followed: the user named it."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise UserError(f"{what} {path} has more than {limit} bytes: give fewer {what.rpartition(' ')[2]}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} {path} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from error
    return text.removesuffix("\n").split("\n")


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """One JSON object; UserError names the file and what was found instead."""
    data = read_file(path, limit)
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # RecursionError: a million opening brackets
        raise UserError(f"{path}: expected one JSON object, found text that is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected one JSON object, found a {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
