"""Files of strangers: found, opened without waiting, and recognised by their first bytes.

Pickles are refused: reading one runs what is in it.
"""

from __future__ import annotations

import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from assay.protocols import UserError

FILES = 100_000  # in one folder
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
        raise UserError(
            f"{path}: expected an npz archive, found a zip file that is damaged ({str(error)[:80]})"
        ) from error
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
