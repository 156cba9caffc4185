"""Named arrays from safetensors and npz files: headers are checked against the file before anything is made of them."""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from assay.audit.readers.collect import refuse, said
from assay.audit.readers.files import PICKLE, opened
from assay.audit.readers.records import parse
from assay.protocols import UserError

HEADER_BYTES = 1 << 26  # of a safetensors header, which holds the metadata too
ARRAY_BYTES = 1 << 32  # of all arrays of an npz archive, unpacked
UNPACKED = 200  # most bytes out of one byte of an archive (beyond SMALL): padded batches shrink a lot, bombs more
SMALL = 1 << 28
NPY_HEADER = 10_000  # characters; numpy's own bound
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "U16": np.uint16,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
    "U64": np.uint64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": np.uint16,  # widened below
}

Arrays = dict[str, NDArray[Any]]


def load(path: Path, kind: str) -> tuple[Arrays, dict[str, Any]]:
    """(arrays, metadata): metadata of safetensors, its JSON texts parsed; of both, a side file of the same name (.json)."""
    arrays, metadata = _npz(path) if kind == "npz" else _safetensors(path)
    side = path.with_suffix(".json")
    if side.is_file():
        with opened(side) as file:
            data = file.read(HEADER_BYTES + 1)
        if len(data) > HEADER_BYTES:
            raise UserError(f"{side}: expected at most {HEADER_BYTES >> 20} MiB of JSON beside {path.name}, found more")
        found = parse(data, str(side))
        if not isinstance(found, dict):
            refuse(str(side), "(whole)", "an object of names and lists", found)
        if not found.keys() & arrays.keys():  # else it is another writing of the same batch
            metadata |= found
    return arrays, metadata


# -------------------------------------------------------------------------------------------------------- safetensors


def _safetensors(path: Path) -> tuple[Arrays, dict[str, Any]]:
    size = path.stat().st_size
    with opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(HEADER_BYTES, size - 8):
            raise UserError(f"{path}: expected a safetensors header of at most {size - 8} bytes, found one of {length}")
        header = parse(file.read(length), f"{path}, header")
        if not isinstance(header, dict):
            refuse(f"{path}, header", "(whole)", "an object", header)
        metadata = _metadata(header.pop("__metadata__", {}), path)
        spans = {name: _span(entry, size - 8 - length, path, name) for name, entry in header.items()}
        if sum(end - start for _, _, start, end in spans.values()) > size - 8 - length:
            raise UserError(f"{path}, header: expected tensors that lie beside one another, found some that overlap")
        arrays = {}
        for name, (dtype, shape, start, end) in spans.items():
            file.seek(8 + length + start)
            array = np.frombuffer(bytearray(file.read(end - start)), DTYPES[dtype]).reshape(shape)
            arrays[name] = (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array
    return arrays, metadata


def _span(entry: Any, room: int, path: Path, name: str) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, start, end) of one tensor, all of them plausible."""
    place = f"{path}, header"
    if not isinstance(entry, dict):
        refuse(place, name, "dtype, shape and data_offsets", entry)
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        refuse(place, f"{name}.dtype", f"one of {', '.join(DTYPES)}", dtype)
    if not _counts(shape) or not _sane(shape):
        refuse(place, f"{name}.shape", "up to 8 sizes that a file can hold", shape)
    if not _counts(offsets) or len(offsets) != 2:
        refuse(place, f"{name}.data_offsets", "two positions", offsets)
    needed = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if not (0 <= offsets[0] <= offsets[1] <= room and offsets[1] - offsets[0] == needed):
        found = f"bytes {said(offsets[0])} to {said(offsets[1])} of {room}"
        raise UserError(f"{place}: tensor {name!r:.60}: expected {said(needed)} bytes inside the file, found {found}")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _sane(shape: Any) -> bool:
    """Sizes with which numpy can count, empty dimensions or not."""
    return len(shape) <= 8 and math.prod(max(1, n) for n in shape) < 2**40 and min(shape, default=0) >= 0


def _metadata(values: Any, path: Path) -> dict[str, Any]:
    """safetensors holds text only: what is JSON is read as such, the rest stays text."""
    if not isinstance(values, dict):
        refuse(f"{path}, header", "__metadata__", "an object", values)
    found: dict[str, Any] = {}
    for name, text in values.items():
        if not isinstance(text, str):
            refuse(f"{path}, header", f"__metadata__.{name}", "text", text)
        looks = text.lstrip()[:1] in ("[", "{", '"') or _is_number(text)
        found[name] = parse(text.encode("utf-8", "replace"), f"{path}, metadata {name!r:.60}") if looks else text
    return found


def _is_number(text: str) -> bool:
    try:
        return isinstance(json.loads(text), int | float) and len(text) < 40
    except (ValueError, RecursionError):
        return False


# ---------------------------------------------------------------------------------------------------------------- npz


def _npz(path: Path) -> tuple[Arrays, dict[str, Any]]:
    size = path.stat().st_size
    arrays: Arrays = {}
    metadata: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            unpacked = sum(member.file_size for member in members)
            if unpacked > min(ARRAY_BYTES, max(SMALL, UNPACKED * size)):
                raise UserError(
                    f"{path}: expected arrays that fit a file of {size} bytes, found {unpacked} when unpacked"
                )
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in arrays or name in metadata:
                    raise UserError(f"{path}: expected arrays of different names, found {name!r:.60} twice")
                array = _npy(archive, member, f"{path}, array {name!r:.60}")
                if array.dtype.kind in "US":
                    metadata[name] = [str(text) for text in array.ravel()] if array.ndim else str(array)
                else:
                    arrays[name] = array
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, zlib.error, RuntimeError) as error:
        raise UserError(f"{path}: expected an npz archive, found one that is damaged ({str(error)[:80]})") from error
    return arrays, metadata


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, place: str) -> NDArray[Any]:
    with archive.open(member) as file:
        try:
            version = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = header(file, NPY_HEADER)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, OverflowError) as error:
            raise UserError(f"{place}: expected an array, found a header that is none ({str(error)[:80]})") from error
        if dtype.hasobject:
            raise UserError(f"{place}: expected numbers or text, found Python objects: {PICKLE}")
        if dtype.kind not in "biufUS" or not dtype.itemsize:
            refuse(place, "dtype", "numbers or text", str(dtype)[:60])
        if not _sane(shape):
            refuse(place, "shape", "up to 8 sizes that a file can hold", str(shape)[:60])
        needed = math.prod(shape) * dtype.itemsize
        data = file.read(needed + 1) if needed <= member.file_size else b""
        if len(data) != needed:
            raise UserError(f"{place}: expected {said(needed)} bytes for shape {str(shape)[:60]}, found another number")
    array = np.frombuffer(bytearray(data), dtype) if needed else np.zeros(math.prod(shape), dtype)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)
