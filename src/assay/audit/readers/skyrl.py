"""SkyRL: what its generator returns, as JSON, JSON Lines (one batch or one sample a line) or npz, and its evaluation dumps.

Lists are parallel, one entry per sample; `rewards` is one number per sample or one per response token. Step-wise training
repeats a trajectory id, and `is_last_step` ends it. `loss_masks` say what is trained on; nothing says what was sampled.
npz has no ragged arrays: there ids are rows padded at the end with -1, the other arrays have the shape of response_ids.
Source: train/generators/base.py and train/utils/trainer_utils.py of SkyRL 0.3.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.audit.readers.collect import Collector, Record, refuse
from assay.audit.readers.files import Progress, kind_of
from assay.audit.readers.records import records
from assay.audit.readers.tensors import load

PER_SAMPLE = (
    "prompt_token_ids",
    "response_ids",
    "rewards",
    "loss_masks",
    "stop_reasons",
    "rollout_logprobs",
    "trajectory_ids",
    "is_last_step",
    "advantages",
)
DUMP = ("input_prompt", "output_response", "score", "stop_reason", "env_class", "env_extras", "data_source")


def read(files: Sequence[Path], into: Collector, progress: Progress) -> None:
    """Generator outputs and dumped trajectories: a sample per response; the steps of one trajectory are its turns."""
    turns = Turns()
    for path in files:
        kind = kind_of(path)
        prefix = f"{path.name}, " if len(files) > 1 else ""
        if kind == "npz":
            found = [("the archive", _unpadded(*load(path, kind), str(path)))]
            progress(path.stat().st_size)
        for where, record in found if kind == "npz" else records(path, kind, (*PER_SAMPLE, *DUMP), progress):
            if "response_ids" not in record and "output_response" in record:
                _dumped(record, prefix + where, into)
            else:
                turns.batch += _is_batch(record)
                for place, sample in _samples(record, where):
                    _sample(sample, prefix + place, turns, into)
                    if into.full:
                        return


class Turns:
    """Counts the samples of each trajectory until its last step; an id that comes again later is another trajectory."""

    def __init__(self) -> None:
        self.batch = -1  # which record: an instance that comes again in the next batch is another group
        self.open: dict[str, int] = {}
        self.times: dict[str, int] = {}

    def of(self, trajectory: str, last: bool) -> tuple[str, int]:
        """(name of the trajectory, turn)."""
        turn = self.open.get(trajectory, 0)
        self.open[trajectory] = 0 if last else turn + 1
        times = self.times.get(trajectory, 0)
        self.times[trajectory] = times + last
        return f"{trajectory} ({times + 1})" if times else trajectory, turn


def _is_batch(record: Record) -> bool:
    return any(isinstance(row, list) for row in record.items("response_ids") or [])


def _samples(record: Record, where: str) -> Iterator[tuple[str, Record]]:
    ids = record.items("response_ids")
    if ids is None:
        refuse(record.place, "response_ids", "a list of token ids per sample", None)
    if not _is_batch(record):
        yield where, record
        return
    batch = {}
    for name in PER_SAMPLE:
        values = record.items(name)
        if values is not None:
            if len(values) != len(ids):
                refuse(record.place, name, f"a list of {len(ids)}, one per sample", values)
            batch[name] = values
    for i in range(len(ids)):
        yield f"{where}, sample {i}", Record({n: v[i] for n, v in batch.items()}, f"{record.place}, sample {i}")


def _sample(record: Record, where: str, turns: Turns, into: Collector) -> None:
    prompt, response = record.needed("prompt_token_ids"), record.needed("response_ids")
    ahead = np.zeros(len(prompt), np.bool_)
    tokens: dict[str, Any] = {"ids": np.concatenate([prompt, response])}
    mask = record.flags("loss_masks")
    if mask is not None:
        tokens["mask"] = np.concatenate([ahead, mask])
    for column, name in {"logprobs": "rollout_logprobs", "advantages": "advantages"}.items():
        values = record.floats(name)
        if values is not None:
            tokens[column] = np.concatenate([np.full(len(prompt), np.nan, np.float32), values])
    trajectory, instance = _trajectory(record)
    last, turn = record.truth("is_last_step"), -1
    if trajectory is not None:
        trajectory, turn = turns.of(trajectory, last is not False)
    samples = {
        "reward": _reward(record, len(response)),
        "group": f"{instance} (batch {turns.batch})" if instance is not None and turns.batch > 0 else instance,
        "task": instance,
        "rollout": trajectory,
        "turn": -1 if last is None else turn,
        "stop": record.text("stop_reasons"),
    }
    into.add(where, tokens, samples, {}, record.place)


def _reward(record: Record, length: int) -> float | None:
    value = record.values.get("rewards")
    if not isinstance(value, list):
        return record.number("rewards")
    rewards = record.floats("rewards")
    assert rewards is not None
    if len(rewards) != length:
        refuse(record.place, "rewards", f"one per response token, {length} of them", f"{len(rewards)} values")
    return float(rewards.sum(dtype=np.float64))


def _trajectory(record: Record) -> tuple[str | None, str | None]:
    """(trajectory, instance): from an object, or from "{instance}_{repetition}"."""
    value = record.values.get("trajectory_ids")
    if isinstance(value, dict):
        found = Record(value, f"{record.place}, trajectory_ids")
        instance, repetition = found.name("instance_id"), found.name("repetition_id")
        return (None, None) if instance is None else (f"{instance}_{repetition}", str(instance))
    text = record.text("trajectory_ids")
    if text is None:
        return None, None
    instance, _, repetition = text.rpartition("_")
    return text, instance if instance and repetition.isdecimal() else text


def _dumped(record: Record, where: str, into: Collector) -> None:
    score = record.values.get("score")
    reward = record.floats("score") if isinstance(score, list) else None
    prompt = record.text("input_prompt")
    samples = {
        "reward": record.number("score") if reward is None else float(reward.sum(dtype=np.float64)),
        "group": prompt,
        "task": prompt,
        "split": "eval",
        "stop": record.text("stop_reason"),
    }
    into.add(where, {}, samples, {"prompt": prompt, "completion": record.text("output_response")}, record.place)


# ---------------------------------------------------------------------------------------------------------------- npz


def _unpadded(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any], place: str) -> Record:
    """The archive as the lists that JSON would have."""
    lists: dict[str, Any] = {name: value for name, value in metadata.items() if name in PER_SAMPLE}
    for name in PER_SAMPLE:
        if name not in arrays:
            continue
        values = arrays[name]
        if values.ndim not in (1, 2):
            refuse(place, name, "one or two dimensions", f"{values.ndim}")
        of = "prompt_token_ids" if name == "prompt_token_ids" else "response_ids"
        if values.ndim == 2 and of in arrays and arrays[of].shape == values.shape:
            kept = (arrays[of] != -1).sum(axis=1)
            lists[name] = [row[:n].tolist() for row, n in zip(values, kept, strict=True)]
        else:
            lists[name] = values.tolist()
    return Record(lists, place)
