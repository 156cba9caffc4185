"""One finished training seed as a row on disk, which any later comparison can build on, here or on another machine.

A row is keyed by everything that decides its numbers: the configuration (but for its folder, its processes and its
memory), the content of the model, the environment's version, and the version of this package. Runs of one key are the same
to the bit on one machine, and the same but for floating point on two; what differs in a setting is another row.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.build import policy_folder
from assay.config import RunConfig, flat, resolve
from assay.files import read_json, write_json, writing
from assay.protocols import UserError
from assay.records import is_number, series
from assay.rng import stable_hash
from assay.rundir import RunDir

SCHEMA = 1
ROW_BYTES = 1 << 24
CURVES = (  # columns of metrics.jsonl that a row keeps, one number a step
    "success",
    "total_env_steps",
    "total_tokens",
    "entropy",
    "turns",
    "episode_tokens",
    "invalid_actions",
    "dropped_groups",
    "clip_high_per_trained_token",
    "grad_norm",
)
SMOOTH = 5  # steps that "NAME steps to X" averages over
FREE = ("out", "planned_steps", "evaluation.before")  # do not decide a finished seed's numbers
ROUNDING = ("runtime.concurrency", "runtime.delay_ticks", "runtime.dtype")  # the part of runtime that moves a rounding
EVALUATIONS = ("iid sampled", "iid greedy", "ood sampled", "ood greedy")


@dataclass(frozen=True, slots=True)
class Job:
    """A training run that somebody wants: complete nested keys, and the folder that it runs in."""

    name: str  # for people: "grpo, seed 3"
    values: dict[str, Any]
    folder: Path  # of the run
    store: Path  # folder of rows
    key: str
    environment_version: str

    @property
    def config(self) -> RunConfig:
        return resolve(self.values, self.name)

    @property
    def row(self) -> Path:
        return self.store / f"{self.key}.json"

    def as_json(self) -> str:
        return json.dumps(asdict(self) | {"folder": str(self.folder.absolute()), "store": str(self.store.absolute())})

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**values | {"folder": Path(values["folder"]), "store": Path(values["store"])})


def key(config: RunConfig, environment_version: str) -> str:
    """16 hex digits that name the run whatever the machine: see the top of the file."""
    import assay

    usual = flat(RunConfig().model_dump())
    # what is as usual is left out: a setting that a later version adds leaves the rows of those who do not use it
    values = {name: item for name, item in flat(config.model_dump()).items() if item != usual.get(name, ...)}
    matters = {name: item for name, item in values.items() if name not in FREE and not name.startswith("runtime.")}
    matters |= {name: item for name, item in values.items() if name in ROUNDING}
    parts = [SCHEMA, assay.__version__, matters, environment_version, _weights(config.model)]
    return stable_hash(json.dumps(parts, sort_keys=True))


def _weights(model: str) -> str:
    """Content of a local checkpoint, or its name where it is a hub's."""
    folder = Path(policy_folder(model))
    if not folder.is_dir():
        return model
    files = [(path, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    return _digest(tuple((path, status.st_size, status.st_mtime_ns) for path, status in files))


@lru_cache
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Of the files' bytes: read once for all runs of a comparison, as long as size and time of writing stay."""
    h = hashlib.blake2b(digest_size=8)
    for path, _, _ in files:
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                h.update(block)
    return h.hexdigest()


def row_of(run: RunDir, key: str, environment_version: str) -> dict[str, Any]:
    """What a finished run came to: curves to six decimals, evaluations as they are. `timings` are of this machine."""
    metrics, evaluation = run.read_metrics(), run.evaluation
    seconds = np.cumsum(series(run.read_timings(), "step_s", default=0.0)).tolist()
    names = [*CURVES, *(n for n in dict.fromkeys(n for line in metrics for n in line) if n.partition("[")[0] in CURVES)]
    curves = {name: [_json(value) for value in series(metrics, name)] for name in dict.fromkeys(names)}
    return {
        "schema": SCHEMA,
        "key": key,
        "environment_version": environment_version,
        "config": {name: value for name, value in run.config.items() if name != "out"},
        "start": evaluation.get("before", {}),
        "end": evaluation.get("after", {}),
        "curves": curves,
        "steps": len(metrics),
        "timings": {"seconds": [round(s, 3) for s in seconds]},
        "made": made(),
    }


def made() -> dict[str, str]:
    """Where and when."""
    import assay

    return {
        "assay": assay.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
    }


def read_row(path: Path) -> dict[str, Any]:
    """UserError names the file and what is wrong with it."""
    row = read_json(path, ROW_BYTES)
    for name, kind in (("key", str), ("config", dict), ("end", dict), ("curves", dict), ("timings", dict)):
        if not isinstance(row.get(name), kind):
            raise UserError(f"{path}: no row of a finished seed, {name!r} is missing or not {kind.__name__}: remove it")
    if row.get("schema") != SCHEMA:
        raise UserError(
            f"{path}: row of schema {row.get('schema')!r}, and this version reads {SCHEMA}: remove the file"
        )
    if row["key"] != path.stem:
        raise UserError(f"{path}: its key is {row['key']!r}, not its name: remove the file")
    return row


def write_row(path: Path, row: Mapping[str, Any]) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, row)


def value(row: Mapping[str, Any], metric: str) -> float:
    """A figure of a finished seed; NaN where it is not known.

    "iid sampled", "iid greedy", "ood sampled", "ood greedy": held-out success at the end. "NAME first third", "NAME last
    third": mean of a training curve over that part of the steps. "NAME": mean over all steps. "NAME steps to X": first
    step at which the mean of the last five reaches X, all steps and one where none does. "seconds", "env_steps",
    "tokens": spent. "iid sampled[ENV]", "NAME[ENV] last third": of one environment of a mixture.
    """
    if metric.partition("[")[0] in EVALUATIONS:
        return _number(rate_of(row["end"], metric).get("success"))
    if metric == "seconds":
        return _number((row["timings"].get("seconds") or [None])[-1])
    if metric in ("env_steps", "tokens"):
        return _number((row["curves"].get(f"total_{metric}") or [None])[-1])
    name, _, part = metric.partition(" ")
    values = [_number(v) for v in row["curves"].get(name, [])]
    name = name.partition("[")[0]
    if name in CURVES and (match := re.fullmatch(r"steps to (-?[0-9.]+)", part)):
        return _first_reach(values, float(match[1])) if values else float("nan")
    third = max(1, len(values) // 3)
    chosen = {"first third": values[:third], "last third": values[-third:], "": values}.get(part)
    if name not in CURVES or chosen is None:
        known = [*EVALUATIONS, *CURVES, "NAME first third", "NAME last third", "NAME steps to X", "NAME[ENVIRONMENT]"]
        known += ["seconds", "env_steps", "tokens"]
        raise UserError(f"metric {metric!r} does not exist: there are {', '.join(known)}")
    known_ones = [v for v in chosen if v == v]
    return float(np.mean(known_ones)) if known_ones else float("nan")


def rate_of(end: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
    """Of a result of evaluate.evaluate_all, the summary that "iid sampled" or "ood greedy[ENV]" names; {} for none."""
    panel, env = split_metric(metric)
    whole = end.get("environments", {}).get(env, {}) if env else end
    split, mode = panel.split()
    found: Mapping[str, Any] = (whole if split == "iid" else whole.get("ood", {})).get(mode, {})
    return found


def split_metric(metric: str) -> tuple[str, str]:
    """("success last third", "countdown") of "success[countdown] last third"; "" for a metric of the whole."""
    found = re.fullmatch(r"([^\[]*)\[([^\]]+)\](.*)", metric)
    return (found[1] + found[3], found[2]) if found else (metric, "")


def _first_reach(values: list[float], level: float) -> float:
    """Step, from 1, whose mean with up to four steps before it is at least `level`; one more than all where none is."""
    reached = (i + 1 for i in range(SMOOTH - 1, len(values)) if np.mean(values[i + 1 - SMOOTH : i + 1]) >= level)
    return float(next(reached, len(values) + 1))


def _number(value: Any) -> float:
    return float(value) if is_number(value) else float("nan")


def _json(value: float) -> float | None:
    return round(value, 6) if value == value else None
