"""Checkpoints: one folder a step, complete or absent.

    step-000010/tensors.safetensors   model, optimiser moments, arrays of method states, by flat names
    step-000010/state.json            everything else: method states, curriculum, budget (randomness is keyed: none)
    step-000010/manifest.json         step, metrics, and size and BLAKE2b hash of the two files

Step N holds the state after step N. A folder is written as `.tmp-step-000010`, flushed, then renamed; what is replaced
stands aside as `.old-step-000010` until then. No pickle anywhere. A checkpoint is a file that users bring: names are a
fixed list, sizes are bounded, hashes are compared before anything is parsed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from assay.files import TEMPORARY, beside, read_json, sync, write_file, writing
from assay.protocols import Metrics, UserError

Tensors = dict[str, torch.Tensor | np.ndarray]

FORMAT = 1
MANIFEST, TENSORS, STATE = "manifest.json", "tensors.safetensors", "state.json"
MANIFEST_BYTES = 1 << 16  # a real one has about 500
STATE_BYTES = 1 << 28  # big states belong into arrays
ASIDE = ".old-"
IN_STATE = "state:"  # prefix of arrays that stood inside the state
TAG = "$"  # first character of the keys that encode what JSON has not


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints stay: the `last` newest, and the one with the largest value of the metric named `best`."""

    last: int = 2
    best: str = ""


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the finished folders, ascending; whether they verify is not asked."""
    names = [re.fullmatch(r"step-(\d{6,9})", path.name) for path in folder.glob("step-*")]
    return sorted(int(name[1]) for name in names if name)


# ---------------------------------------------------------------------------------------------------------- write


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor | np.ndarray],
    state: Mapping[str, Any],
    metrics: Metrics | None = None,
    retention: Retention | None = None,
) -> Path:
    """Write `folder/step-000010`, then remove what `retention` no longer keeps.

    `tensors` is flat; `state` is nested and may hold arrays and tensors anywhere, NaN, infinities and dicts with integer
    keys: `load_checkpoint` gives back the same two. UserError when the disk refuses; older checkpoints are then untouched.
    """
    target = folder / checkpoint_name(step)
    temporary = beside(target)
    if taken := [name for name in tensors if name.startswith(IN_STATE)]:
        raise ValueError(f"names of tensors do not begin with {IN_STATE!r}: {taken}")
    arrays: Tensors = dict(tensors)
    encoded = encode_state(state, IN_STATE, arrays)
    text = json.dumps(encoded, allow_nan=False).encode()
    if len(text) > STATE_BYTES:
        raise UserError(f"{target}: the state has {len(text)} bytes of JSON, at most {STATE_BYTES}: keep it in arrays")
    try:
        with writing(target):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _write_tensors(temporary / TENSORS, arrays)
            write_file(temporary / STATE, text)
            files = {name: _fingerprint(temporary / name) for name in (TENSORS, STATE)}
            finite = {name: value for name, value in (metrics or {}).items() if math.isfinite(value)}
            manifest = {"format": FORMAT, "step": step, "metrics": finite, "files": files}
            write_file(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
            _swap_in(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    retain(folder, retention or Retention())
    return target


def _write_tensors(path: Path, arrays: Mapping[str, torch.Tensor | np.ndarray]) -> None:
    """The file remembers which were numpy arrays. Tensors that share memory (tied weights) are written as copies."""
    plain: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, array in arrays.items():
        tensor = (
            torch.from_numpy(np.array(array)) if isinstance(array, np.ndarray) else array.detach().cpu().contiguous()
        )
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    numpy = [name for name, array in arrays.items() if isinstance(array, np.ndarray)]
    save_file(plain, path, metadata={"numpy": json.dumps(numpy)})
    sync(path)


def _swap_in(temporary: Path, target: Path) -> None:
    """Rename; a checkpoint of the same step stands aside meanwhile, and `recover` puts it back after a kill."""
    sync(temporary)
    aside = target.with_name(ASIDE + target.name)
    if target.exists():
        os.replace(target, aside)
    os.replace(temporary, target)
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
    return {"size": path.stat().st_size, "blake2b": digest}


def encode_state(value: Any, path: str, arrays: Tensors) -> Any:
    """JSON of a nested state; arrays move into `arrays` under their path, and what JSON has not is tagged."""
    if isinstance(value, np.ndarray | torch.Tensor):
        while path in arrays:  # {"a.b": x, "a": {"b": y}}
            path += "'"
        arrays[path] = value
        return {"$array": path}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [encode_state(item, f"{path}.{i}", arrays) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        items = [(key, encode_state(item, f"{path}.{key}", arrays)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith(TAG) for key in value):
            return dict(items)
        if all(isinstance(key, int | str) for key in value):
            return {"$map": [list(item) for item in items]}
    raise TypeError(f"a checkpoint's state holds JSON values, numpy arrays and tensors, not {type(value)} ({path})")


def decode_state(value: Any, arrays: Mapping[str, torch.Tensor | np.ndarray]) -> Any:
    """The inverse of `encode_state`; KeyError or ValueError for what it would not have written."""
    if isinstance(value, list):
        return [decode_state(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "$array" in value:
        return arrays[value["$array"]]
    if "$float" in value:
        return float(value["$float"])
    if "$map" in value:
        return {key: decode_state(item, arrays) for key, item in value["$map"]}
    return {key: decode_state(item, arrays) for key, item in value.items()}


# ----------------------------------------------------------------------------------------------------------- read


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """The manifest, once both files have its sizes and hashes. UserError names file, expected and found."""
    manifest = read_json(path / MANIFEST, MANIFEST_BYTES)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path / MANIFEST}: expected format {FORMAT}, found {manifest.get('format')!r}")
    if checkpoint_name(_integer(manifest.get("step"))) != path.name:
        raise UserError(f"{path / MANIFEST}: expected the step of {path.name}, found {manifest.get('step')!r}")
    files = manifest.get("files")
    if not isinstance(files, dict) or sorted(files) != [STATE, TENSORS]:  # hence no name can lead out of the folder
        found = sorted(files) if isinstance(files, dict) else files
        raise UserError(f"{path / MANIFEST}: expected the files {STATE} and {TENSORS}, found {str(found)[:200]}")
    if not isinstance(manifest.get("metrics"), dict):
        raise UserError(f"{path / MANIFEST}: expected an object 'metrics', found {str(manifest.get('metrics'))[:200]}")
    for name, expected in files.items():
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise UserError(f"{file}: expected a regular file, found {'a link' if file.is_symlink() else 'none'}")
        size = file.stat().st_size
        wanted = expected if isinstance(expected, dict) else {}
        if size != wanted.get("size"):  # before hashing: a wrong size needs no reading
            raise UserError(f"{file}: expected {wanted.get('size')} bytes, found {size}: the file is damaged")
        if (found := _fingerprint(file)["blake2b"]) != wanted.get("blake2b"):
            raise UserError(f"{file}: expected BLAKE2b {wanted.get('blake2b')}, found {found}: the file is damaged")
    return manifest


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else -1


def load_checkpoint(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """(tensors, state) as `save_checkpoint` was given them, tensors on the CPU. UserError when anything is amiss."""
    verify_checkpoint(path)
    arrays = _read_tensors(path / TENSORS)
    encoded = read_json(path / STATE, STATE_BYTES)
    try:
        state = decode_state(encoded, arrays)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path / STATE}: expected a state written by assay, found {error!r}") from error
    return {name: array for name, array in arrays.items() if not name.startswith(IN_STATE)}, state


def _read_tensors(path: Path) -> Tensors:
    try:
        with safe_open(path, "pt") as file:  # bounds the header and every offset by the file's size
            numpy = set(json.loads((file.metadata() or {}).get("numpy", "[]")))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return {name: tensor.numpy() if name in numpy else tensor for name, tensor in tensors.items()}
    except (SafetensorError, ValueError, TypeError) as error:
        raise UserError(f"{path}: expected a safetensors file written by assay, found {error}") from error


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest that verifies; every newer one is named in a warning. None when there is none at all; UserError when
    there are some and none verifies, since starting again from nothing must be the user's decision."""
    failures = []
    for step in reversed(checkpoint_steps(folder)):
        path = folder / checkpoint_name(step)
        try:
            verify_checkpoint(path)
        except UserError as error:
            failures.append(str(error))
            warnings.warn(f"checkpoint {path.name} skipped: {error}", stacklevel=2)
            continue
        return path
    if failures:
        raise UserError(
            f"no checkpoint in {folder} is sound (newest: {failures[0]}): move the folder away to start anew"
        )
    return None


def best_checkpoint(folder: Path, metric: str) -> Path | None:
    """The one with the largest value of the metric, the earliest among equals; not verified (loading does that)."""
    values: dict[Path, float] = {}
    for step in checkpoint_steps(folder):
        path = folder / checkpoint_name(step)
        try:
            value = read_json(path / MANIFEST, MANIFEST_BYTES)["metrics"][metric]
        except (UserError, KeyError, TypeError):  # damaged, or saved without this metric: not the best
            continue
        if isinstance(value, int | float):
            values[path] = value
    return max(values, key=lambda path: values[path], default=None)


# --------------------------------------------------------------------------------------------------------- remove


def retain(folder: Path, retention: Retention) -> None:
    """Remove all but the newest `last` and the best."""
    steps = checkpoint_steps(folder)
    keep = {folder / checkpoint_name(step) for step in steps[-max(1, retention.last) :]}
    if retention.best and (best := best_checkpoint(folder, retention.best)):
        keep.add(best)
    for step in steps:
        if (path := folder / checkpoint_name(step)) not in keep:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Renamed first, so that a kill in between leaves no half of one under a good name."""
    doomed = path.with_name(f"{TEMPORARY}removed-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def recover(folder: Path) -> None:
    """After a kill: put back what stood aside, clear what was half written or half removed."""
    for aside in folder.glob(f"{ASIDE}step-*"):
        target = folder / aside.name.removeprefix(ASIDE)
        if target.exists():
            shutil.rmtree(aside)
        else:
            os.replace(aside, target)
    for leftover in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover)
