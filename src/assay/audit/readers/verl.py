"""verl: a DataProto saved as safetensors or npz, and the rollout dumps of its trainer (JSONL, or Parquet alike).

A batch is [B, P + R]: prompts padded on the left, responses on the right. Padding is taken off where nothing is trained
on it; what belongs to the response only is spread behind the prompt. Per-sample facts (uid, data_source, reward_model,
extra_info) stand as JSON in the metadata of a safetensors file, as text arrays in npz, or in a side file (.json).
Source: protocol.py, core_algos.py and ray_trainer.py of verl 0.9.1; traj_uid and step indices as verl-agent has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.audit.readers.collect import BYTES_PER_TOKEN, Collector, Record, messages, refuse
from assay.audit.readers.files import Progress, kind_of
from assay.audit.readers.records import records
from assay.audit.readers.tensors import Arrays, load
from assay.protocols import UserError

DUMP = ("input", "output", "gts", "score", "step", "uid", "request_id", "reward", "acc", "data_source")
RESPONSE = {  # tensor over the response -> our column
    "rollout_log_probs": "logprobs",
    "old_log_probs": "trainer_logprobs",
    "advantages": "advantages",
    "rollout_is_weights": "weights",
}
REWARDS = ("token_level_scores", "rm_scores")  # the raw one; token_level_rewards is the shaped one
META = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "eos_token_id": "end_ids",
    "pad_token_id": "pad_id",
}


def read(files: Sequence[Path], into: Collector, progress: Progress) -> None:
    """DataProto tensors and rollout dumps: a sample per row."""
    for path in files:
        kind = kind_of(path)
        prefix = f"{path.name}, " if len(files) > 1 else ""
        if kind in ("safetensors", "npz"):
            arrays, metadata = load(path, kind)
            progress(path.stat().st_size)
            _batch(arrays, metadata, prefix, str(path), into)
        else:
            for where, record in records(path, kind, DUMP, progress):
                _dumped(record, prefix + where, into)
                if into.full:
                    return


def _dumped(record: Record, where: str, into: Collector) -> None:
    """A line of a dump: texts, score, and since verl 0.9 a key "{sample}_{rollout}_{output}" as uid."""
    step, prompt = record.integer("step"), record.text("input")
    if "output" not in record:
        refuse(record.place, "output", "the text of a response, as rollout dumps have it", None)
    key, gold = record.name("uid"), record.values.get("gts")
    group: Any = None if prompt is None else f"{step}/{prompt}"
    rollout, turn = record.name("request_id"), -1
    if isinstance(key, str):
        sample, *rest = key.rsplit("_", 2)
        numbered = len(rest) == 2 and all(part.isdecimal() and len(part) < 10 for part in rest)
        group, rollout = (sample, f"{sample}_{rest[0]}") if numbered else (key, rollout)
        turn = int(rest[1]) if numbered and rest[1] != "0" else -1
    elif key is not None:
        group = key
    samples = {
        "reward": record.number("score"),
        "group": group,
        "task": prompt,
        "rollout": rollout,
        "turn": turn,
        "version": step,
    }
    golds = [g for g in (gold if isinstance(gold, list) else [gold]) if isinstance(g, str)]
    texts = {"prompt": prompt, "completion": record.text("output"), "gold": "\n".join(golds) or None}
    into.add(where, {}, samples, texts, record.place)


# ---------------------------------------------------------------------------------------------------------- DataProto


def _batch(arrays: Arrays, metadata: Mapping[str, Any], prefix: str, place: str, into: Collector) -> None:
    ids = _matrix(arrays, "input_ids", None, place)
    responses = _matrix(arrays, "responses", None, place)
    if ids is None and responses is not None and (prompts := _matrix(arrays, "prompts", None, place)) is not None:
        if len(prompts) != len(responses):
            refuse(place, "prompts", f"{len(responses)} rows, as responses has", f"{len(prompts)} rows")
        ids = np.concatenate([prompts, responses], axis=1)
    if ids is None:
        raise UserError(f"{place}: tensor 'input_ids': expected token ids [batch, length], found none")
    _check_ids(ids, place)
    rows, length = ids.shape
    answer = length if responses is None else responses.shape[1]
    if responses is not None and (len(responses) != rows or answer > length):
        refuse(place, "responses", f"at most the shape of input_ids, {ids.shape}", f"{responses.shape}")
    into.charge(BYTES_PER_TOKEN * ids.size, place)
    attention = _matrix(arrays, "attention_mask", (rows, length), place)
    present = np.ones(ids.shape, np.bool_) if attention is None else attention != 0
    columns = _columns(arrays, rows, length, answer, place)
    samples, texts = _facts(arrays, metadata, rows, place, into)
    for i in range(rows):
        begin, end = _extent(present[i], columns["mask"][i] if "mask" in columns else None)
        tokens: dict[str, Any] = {"ids": ids[i, begin:end].astype(np.int32)}
        tokens |= {name: values[i, begin:end] for name, values in columns.items()}
        if not present[i, begin:end].all():
            tokens["attention"] = present[i, begin:end]
        facts = {name: values[i] for name, values in samples.items()}
        facts["padded"] = length - (end - begin)
        into.add(
            f"{prefix}row {i}", tokens, facts, {name: values[i] for name, values in texts.items()}, f"{place}, row {i}"
        )
        if into.full:
            return


def _extent(present: NDArray[np.bool_], mask: NDArray[np.bool_] | None) -> tuple[int, int]:
    """Where the sequence begins and ends; padding that is trained on stays, to be found."""
    kept = np.flatnonzero(present if mask is None else present | mask)
    return (int(kept[0]), int(kept[-1]) + 1) if len(kept) else (0, 0)


def _columns(arrays: Arrays, rows: int, length: int, answer: int, place: str) -> dict[str, NDArray[Any]]:
    """Our columns [B, P + R] of tensors over the response [B, R], or over everything [B, P + R]."""
    found: dict[str, NDArray[Any]] = {}
    for name in ("loss_mask", "response_mask"):  # where both are there, the first is trained on, the second was sampled
        if name in arrays:
            mask = _wide(arrays, name, rows, length, answer, place, np.float32(0)) != 0
            found["sampled" if "mask" in found else "mask"] = mask
    for name, column in RESPONSE.items():
        if name in arrays:
            found[column] = _wide(arrays, name, rows, length, answer, place, np.float32(np.nan))
    return found


def _wide(arrays: Arrays, name: str, rows: int, length: int, answer: int, place: str, fill: np.float32) -> NDArray[Any]:
    values = arrays[name]
    if values.shape not in ((rows, answer), (rows, length)):
        refuse(place, name, f"the shape ({rows}, {answer}) or ({rows}, {length})", f"{values.shape}")
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    if values.shape[1] == length:
        return values
    return np.concatenate([np.full((rows, length - answer), fill, np.float32), values], axis=1)


def _matrix(arrays: Arrays, name: str, shape: tuple[int, int] | None, place: str) -> NDArray[Any] | None:
    if name not in arrays:
        return None
    found = arrays[name]
    if found.ndim != 2 or (shape is not None and found.shape != shape):
        refuse(place, name, f"the shape {shape or '[batch, length]'}", f"{found.shape}")
    return found


def _check_ids(ids: NDArray[Any], place: str) -> None:
    if ids.dtype.kind not in "iu":
        refuse(place, "input_ids", "integers", str(ids.dtype))
    if ids.size and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
        refuse(place, "input_ids", "token ids of 32 bits", int(ids.max()))


def _facts(
    arrays: Arrays, metadata: Mapping[str, Any], rows: int, place: str, into: Collector
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Per-sample facts and texts from the rewards and from what is not a tensor."""
    samples: dict[str, list[Any]] = {}
    for column, names in {"reward": REWARDS, "score": ("token_level_rewards",)}.items():
        name = next((name for name in names if name in arrays), None)
        if name is not None:
            scores = arrays[name].astype(np.float64)
            if scores.ndim not in (1, 2) or len(scores) != rows:
                refuse(place, name, f"{rows} rows", f"the shape {scores.shape}")
            with np.errstate(invalid="ignore", over="ignore"):
                samples[column] = (scores.sum(axis=1) if scores.ndim == 2 else scores).tolist()
    flat = dict(metadata)
    for nested in ("non_tensor_batch", "non_tensors"):
        flat |= flat.pop(nested) if isinstance(flat.get(nested), dict) else {}
    meta = flat.pop("meta_info", None)
    meta = Record(meta if isinstance(meta, dict) else flat, place)
    said = {ours: meta.values.get(name) for name, ours in META.items()}
    into.declare(**{name: value for name, value in said.items() if isinstance(value, int | float | list)})
    texts: dict[str, list[Any]] = {}
    for column, (name, convert) in FACTS.items():
        values = flat.get(name, arrays[name].tolist() if name in arrays and arrays[name].ndim == 1 else None)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != rows:
            refuse(place, name, f"a list of {rows} values", values)
        made = [convert(value, place, f"{name}[{i}]") for i, value in enumerate(values)]
        (texts if column in ("messages", "gold") else samples)[column] = made
    return samples, texts


def _key(value: Any, place: str, name: str) -> str | int | None:
    return Record({name: value}, place).name(name)


def _count(value: Any, place: str, name: str) -> int | None:
    return Record({name: value}, place).integer(name)


def _gold(value: Any, place: str, name: str) -> str | None:
    truth = value.get("ground_truth") if isinstance(value, dict) else value
    return truth if isinstance(truth, str) else None


def _index(value: Any, place: str, name: str) -> str | None:
    index = value.get("index") if isinstance(value, dict) else value
    split = value.get("split") if isinstance(value, dict) else None
    return None if not isinstance(index, int | str) else f"{split}/{index}" if isinstance(split, str) else str(index)


FACTS: dict[str, tuple[str, Callable[[Any, str, str], Any]]] = {  # our column -> verl's list, and what is made of it
    "group": ("uid", _key),
    "rollout": ("traj_uid", _key),
    "task": ("extra_info", _index),
    "gold": ("reward_model", _gold),
    "messages": ("raw_prompt", messages),
    "turn": ("turn_idx", _count),
    "version": ("global_steps", _count),
}
