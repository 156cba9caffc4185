"""TRL: tables of completions (log_completions, also a folder of them) and dictionaries that a rollout function returns.

A table has texts, one column per reward function and one advantage per completion, but no tokens. Reward functions are the
floating-point columns between `completion` and `advantage`; `--declare.rewards` names them where further numbers were
logged. Completions of one prompt stand behind one another: such a run is a group (cut at rollouts_per_task, if declared).
A rollout dictionary has tokens: prompt_ids, completion_ids, logprobs, env_mask, of one sample or of a batch.
Source: trainer/grpo_trainer.py of TRL 1.16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assay.audit.readers.collect import Collector, Record, joined, messages, refuse, spread
from assay.audit.readers.files import Progress, kind_of
from assay.audit.readers.records import records
from assay.audit.readers.tables import parquet
from assay.protocols import UserError

KNOWN = ("step", "prompt", "completion", "advantage", "advantages", "reward", "answer", "solution", "ground_truth")
GOLD = ("answer", "solution", "ground_truth")
ROLLOUT = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward", "rewards", "advantage", "advantages")


def read(files: Sequence[Path], into: Collector, progress: Progress) -> None:
    """Completions tables and rollout dictionaries: a sample per completion."""
    groups = Groups(into.declared.get("rollouts_per_task"))
    for path in files:
        kind = kind_of(path)
        prefix = f"{path.name}, " if len(files) > 1 else ""
        rewards = _reward_columns(path, into) if kind == "parquet" else []
        for where, record in records(path, kind, [*KNOWN, *rewards], progress):
            if "completion_ids" in record:
                for place, sample in _samples(record, where):
                    _rollout(sample, prefix + place, groups, into)
            else:
                _completion(record, prefix + where, rewards, groups, into)
            if into.full:
                return


class Groups:
    """Numbers runs of one prompt in one step."""

    def __init__(self, size: Any) -> None:
        self.size = size if isinstance(size, int) and size > 0 else math.inf
        self.number, self.count, self.last = -1, 0, None

    def of(self, key: Any) -> int:
        if self.number < 0 or key != self.last or self.count >= self.size:
            self.number, self.count, self.last = self.number + 1, 0, key
        self.count += 1
        return self.number


# ------------------------------------------------------------------------------------------------------------- tables


def _reward_columns(path: Path, into: Collector) -> list[str]:
    declared = into.declared.get("rewards")
    with parquet(path) as file:
        schema = file.schema_arrow
    if isinstance(declared, str | list):
        names = [declared] if isinstance(declared, str) else [str(name) for name in declared]
        missing = [name for name in names if name not in schema.names]
        if missing:
            raise UserError(
                f"{path}: expected the reward column {missing[0]!r} that was declared, found {schema.names}"
            )
        return names
    names = [f.name for f in schema if str(f.type) in ("double", "float") and f.name not in KNOWN]
    return names


def _completion(record: Record, where: str, rewards: Sequence[str], groups: Groups, into: Collector) -> None:
    step = record.integer("step")
    prompt = messages(record.values.get("prompt") or "", record.place, "prompt")
    if "completion" not in record:
        refuse(record.place, "completion", "text or messages", None)
    value = record.values["completion"]
    completion = messages(value, record.place, "completion")
    if isinstance(value, str):
        completion[0]["role"] = "assistant"
    text = joined(prompt)
    scored = [score for name in rewards if (score := record.number(name)) is not None and not math.isnan(score)]
    reward = record.number("reward")
    samples = {
        "reward": sum(scored) if scored else reward,
        "group": groups.of((step, text)),
        "task": text,
        "version": step,
    }
    advantage = record.number("advantage")
    gold = next((found for name in GOLD if isinstance(found := record.values.get(name), str)), None)
    texts = {
        "prompt": text,
        "completion": joined(completion, "assistant"),
        "messages": prompt + completion,
        "gold": gold,
    }
    tokens = {} if advantage is None else {"advantages": np.array([advantage], np.float32)}
    into.add(where, tokens, samples, texts, record.place)


# ----------------------------------------------------------------------------------------------------------- rollouts


def _samples(record: Record, where: str) -> Iterator[tuple[str, Record]]:
    """One record per completion, of a batch or of one sample."""
    ids = record.items("completion_ids") or []
    if not any(isinstance(row, list) for row in ids):
        yield where, record
        return
    batch: dict[str, Any] = {}
    for name, values in record.values.items():
        if isinstance(values, list) and name not in ("prompt", "messages"):
            if len(values) != len(ids):
                refuse(record.place, name, f"a list of {len(ids)}, one per completion", values)
            batch[name] = values
    for i in range(len(ids)):
        yield f"{where}, completion {i}", Record(_row(batch, i), f"{record.place}, completion {i}")


def _row(batch: Mapping[str, Sequence[Any]], i: int) -> dict[str, Any]:
    return {name: values[i] for name, values in batch.items()}


def _rollout(record: Record, where: str, groups: Groups, into: Collector) -> None:
    prompt, completion = record.needed("prompt_ids"), record.needed("completion_ids")
    answer = np.arange(len(prompt) + len(completion)) >= len(prompt)
    tokens: dict[str, Any] = {"ids": np.concatenate([prompt, completion]), "mask": answer}
    mask = record.flags("env_mask")
    if mask is not None:
        tokens["mask"] = np.concatenate([np.zeros(len(prompt), np.bool_), mask])
    if "logprobs" in record:
        tokens["logprobs"] = spread(_first(record, "logprobs"), answer, record.place, "logprobs")
    for name in ("advantages", "advantage"):
        if name in record:
            value = record.values[name]
            credit = record.floats(name) if isinstance(value, list) else np.full(len(completion), record.number(name))
            tokens["advantages"] = spread(credit, answer, record.place, name)  # type: ignore[arg-type]
    reward = next((record.number(name) for name in ("reward", "rewards") if name in record), None)
    samples = {
        "reward": reward,
        "group": groups.of(prompt.tobytes()),
        "task": record.name("task"),
        "stop": record.text("stop"),
    }
    into.add(where, tokens, samples, {}, record.place)


def _first(record: Record, name: str) -> Any:
    """Log-probs are one per token, or a list of the most likely ones per token, the sampled one first."""
    values = record.items(name) or []
    if any(isinstance(value, list) for value in values):
        flat = [value[0] if isinstance(value, list) and value else value for value in values]
        return Record({name: flat}, record.place).floats(name)
    return record.floats(name)
