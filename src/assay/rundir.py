"""One folder holds a run: written by one process at a time, readable by all, sound after any kill.

    config.toml           complete and re-runnable; an absent key is None
    metrics.jsonl         one object a step: facts that a resumed run repeats bit for bit
    timings.jsonl         one object a step: clocks and rates, which it does not
    guard.jsonl           one object for each thing that the guard has said: step, code, text
    tables.jsonl          one object for each step in which a method had tables: {"step", "tables": {title: rows}}
    evaluation.json       held-out success before and after
    traces/               step-000012.parquet, and named ones (before.parquet, after.parquet)
    checkpoints/          see checkpoints.py
    report.html

JSON has no NaN: `{"step": 3, "kl": null, "nonfinite": {"kl": "nan"}}` is how a line holds one ("nan", "inf", "-inf");
a null that `nonfinite` does not name is None. `read_metrics` gives the numbers back.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import tomli_w
import torch

from assay import checkpoints
from assay.checkpoints import Retention, Tensors
from assay.files import TEMPORARY, beside, read_file, read_json, sync, write_file, write_json, writing
from assay.protocols import Metrics, UserError
from assay.trace import Trace
from assay.trace_store import read_traces, write_traces

CONFIG, METRICS, TIMINGS, GUARD, LOCK = "config.toml", "metrics.jsonl", "timings.jsonl", "guard.jsonl", ".lock"
TABLES = "tables.jsonl"
LINES = (METRICS, TIMINGS, GUARD, TABLES)
CONFIG_BYTES = 1 << 20
JSON_BYTES = 1 << 26
LOCK_PATIENCE = 3.0  # seconds that workers of a killed process may take to notice and let the lock go


class RunDir:
    """`RunDir.create(path, config)` starts a run, `RunDir(path, write=True)` continues one, `RunDir(path)` reads it.

    Whoever writes holds a lock until `close` (or the end of the process). Use it as a context manager.
    """

    def __init__(self, path: str | Path, write: bool = False) -> None:
        self.path = Path(path)
        self.traces = self.path / "traces"
        self.checkpoints = self.path / "checkpoints"
        self._lock: IO[str] | None = None
        if not (self.path / CONFIG).is_file():
            raise UserError(f"{self.path} is not a run directory: there is no {CONFIG} in it; give the folder of a run")
        if write:
            self._lock = lock(self.path / LOCK)
            self._recover()

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> Self:
        """Start a run and write its configuration. UserError if there is one already, whatever its state."""
        path = Path(path)
        leftovers = (LOCK, beside(path / CONFIG).name)  # of a `create` that was killed
        if path.exists() and (not path.is_dir() or any(name not in leftovers for name in os.listdir(path))):
            raise UserError(f"{path} exists already: resume the run that is in it, or name another folder")
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        with lock(path / LOCK):
            _write_config(path / CONFIG, config)
        return cls(path, write=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def _recover(self) -> None:
        with writing(self.path):
            self.traces.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        checkpoints.recover(self.checkpoints)
        for leftover in (*self.path.glob(f"{TEMPORARY}*"), *self.traces.glob("*.partial")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for name in LINES:  # a torn last line must not swallow the next one
            self._keep_lines(name, math.inf)

    # ---------------------------------------------------------------------------------------- configuration, JSON

    @property
    def config(self) -> dict[str, Any]:
        """As it was given to `create`; keys that were None are absent."""
        path = self.path / CONFIG
        try:
            return tomllib.loads(read_file(path, CONFIG_BYTES).decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: expected TOML, found something else ({error}): restore the file") from error

    def replace_config(self, config: Mapping[str, Any]) -> None:
        """For a run that is extended: the only change that a written configuration may see."""
        self._check_writer()
        _write_config(self.path / CONFIG, config)

    def write_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        self._check_writer()
        write_json(self.path / "evaluation.json", evaluation)

    @property
    def evaluation(self) -> dict[str, Any]:
        """{} where no evaluation was written yet."""
        path = self.path / "evaluation.json"
        found = read_json(path, JSON_BYTES) if path.exists() else {}
        for name, value in found.items():
            if not isinstance(value, dict):
                raise UserError(
                    f"{path}: expected an object {name!r}, found {str(value)[:80]}: restore or remove the file"
                )
        return found

    # ------------------------------------------------------------------------------------------------------ lines

    def append_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._append(METRICS, step, metrics)

    def append_timings(self, step: int, timings: Mapping[str, Any]) -> None:
        self._append(TIMINGS, step, timings)

    def append_guard(self, step: int, line: Mapping[str, str]) -> None:
        self._append(GUARD, step, line)

    def append_tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Tables of a step by title; none of them, no line. A cell that is not finite is written as its name."""
        written = {
            title: [{k: _cell(v) for k, v in row.items()} for row in rows] for title, rows in tables.items() if rows
        }
        if written:
            self._append(TABLES, step, {"tables": written})

    def read_metrics(self) -> list[dict[str, Any]]:
        return [record for _, record in self._records(METRICS)]

    def read_timings(self) -> list[dict[str, Any]]:
        return [record for _, record in self._records(TIMINGS)]

    def read_guard(self) -> list[dict[str, Any]]:
        return [record for _, record in self._records(GUARD)]

    def read_tables(self) -> list[dict[str, Any]]:
        """{"step", "tables": {title: rows}} for each step that has any; UserError where a line is something else."""
        records = [record for _, record in self._records(TABLES)]
        for record in records:
            if not _are_tables(record.get("tables")):
                raise UserError(
                    f"{self.path / TABLES}: expected tables of rows at step {record['step']}, found "
                    f"{str(record.get('tables'))[:80]!r}: repair or remove the file"
                )
        return records

    def _append(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        """One whole line in the system's hands, or none: a full disk takes back what it had written of it."""
        self._check_writer()
        path = self.path / name
        line = (json.dumps(encode_record(step, values), allow_nan=False) + "\n").encode()
        with writing(path), open(path, "ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[file.write(line) or 0 :]
            except OSError:
                file.truncate(end)
                raise

    def _records(self, name: str) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """(line, record) of all whole lines; a torn last one is as if it had not been written."""
        path = self.path / name
        if not path.exists():
            return
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    record = decode_record(json.loads(line))
                    record["step"] = int(record["step"])
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    found = line[:80].decode(errors="replace").strip()
                    message = (
                        f"{path}, line {number}: expected an object with a step, found {found!r}: repair or cut it"
                    )
                    raise UserError(message) from error
                yield line, record

    def _keep_lines(self, name: str, last_step: float) -> None:
        path = self.path / name
        if not path.exists():
            return
        data = b"".join(line for line, record in self._records(name) if record["step"] <= last_step)
        if len(data) != path.stat().st_size:
            write_file(path, data)

    # ----------------------------------------------------------------------------------------------------- traces

    def trace_path(self, which: int | str) -> Path:
        """Of a step, or of a name such as "before"."""
        return self.traces / f"{f'step-{which:06d}' if isinstance(which, int) else which}.parquet"

    def write_traces(self, which: int | str, traces: Sequence[Trace]) -> Path:
        """One file, the old one or the new one whatever happens. UserError when the disk refuses."""
        self._check_writer()
        path = self.trace_path(which)
        with writing(path):
            write_traces(path, traces)
        return path

    def read_traces(self, which: int | str) -> list[Trace]:
        return read_traces(self.trace_path(which))

    def trace_steps(self) -> list[int]:
        """Steps of which there are traces, ascending."""
        numbers = (path.stem.removeprefix("step-") for path in self.traces.glob("step-*.parquet"))
        return sorted(int(number) for number in numbers if number.isdigit())

    # ------------------------------------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor | np.ndarray],
        state: Mapping[str, Any],
        metrics: Metrics | None = None,
        retention: Retention | None = None,
    ) -> Path:
        """The state after `step`; the lines before it reach the disk first. See `checkpoints.save_checkpoint`."""
        self._check_writer()
        for name in LINES:
            if (path := self.path / name).exists():
                sync(path)
        return checkpoints.save_checkpoint(self.checkpoints, step, tensors, state, metrics, retention)

    def latest_checkpoint(self) -> Path | None:
        return checkpoints.latest_checkpoint(self.checkpoints)

    def best_checkpoint(self, metric: str) -> Path | None:
        return checkpoints.best_checkpoint(self.checkpoints, metric)

    def load_checkpoint(self, path: Path) -> tuple[Tensors, dict[str, Any]]:
        return checkpoints.load_checkpoint(path)

    def cut_back(self, step: int) -> None:
        """Forget everything after `step`: checkpoints first, so that a kill in between leaves none whose lines are
        gone, then traces, then lines. What has no later step stays (a record of step 0, before.parquet)."""
        self._check_writer()
        with writing(self.path):
            for later in checkpoints.checkpoint_steps(self.checkpoints):
                if later > step:
                    checkpoints.remove_checkpoint(self.checkpoints / checkpoints.checkpoint_name(later))
            for later in self.trace_steps():
                if later > step:
                    self.trace_path(later).unlink()
        for name in LINES:
            self._keep_lines(name, step)

    def _check_writer(self) -> None:
        if self._lock is None:
            raise RuntimeError(f"{self.path} was opened for reading: RunDir(path, write=True) writes")


# ---------------------------------------------------------------------------------------------------------- helpers


def lock(path: Path) -> IO[str]:
    """An exclusive lock that the system lets go when its holders end, however they end. UserError names the holder.

    Forked children hold it too: those of a killed process get a moment to notice that their parent is gone.
    """
    with writing(path):
        file = open(path, "a+")  # noqa: SIM115 (stays open as long as the run)
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read(20).strip()
            if _alive(holder) or time.monotonic() > deadline:
                file.close()
                whose = f"process {holder}" if _alive(holder) else f"a process left behind by {holder or 'another'}"
                raise UserError(
                    f"{path.parent} is being written by {whose}: wait for it, end it, or choose another"
                ) from error
            time.sleep(0.05)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _alive(holder: str) -> bool:
    if not holder.isdigit():
        return False
    try:
        os.kill(int(holder), 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, hence alive
        pass
    return True


def encode_record(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """One line of metrics as JSON has it: numpy scalars become numbers, what is not finite becomes null and is named."""
    record: dict[str, Any] = {"step": int(step)}
    nonfinite = {}
    for name, value in values.items():
        if name == "nonfinite" or (name == "step" and value != step):
            raise ValueError(f"{name!r} is no name for a metric (step {step})")
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[name], value = repr(value), None
        record[name] = value
    return {**record, "nonfinite": nonfinite} if nonfinite else record


def decode_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `encode_record`, the step included."""
    values = {name: value for name, value in record.items() if name != "nonfinite"}
    return values | {name: float(text) for name, text in record.get("nonfinite", {}).items()}


def _cell(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _are_tables(value: Any) -> bool:
    """Is it {title: [{key: scalar}]}?"""
    tables = list(value.values()) if isinstance(value, dict) else [None]
    rows = [row for table in tables for row in (table if isinstance(table, list) else [None])]
    cells = [cell for row in rows for cell in (row.values() if isinstance(row, dict) else [rows])]
    return all(cell is None or isinstance(cell, str | int | float) for cell in cells)


def _write_config(path: Path, config: Mapping[str, Any]) -> None:
    write_file(path, tomli_w.dumps(_without_none(config)).encode())


def _without_none(value: Any) -> Any:
    """TOML has no null: an absent key is None."""
    if isinstance(value, Mapping):
        return {str(key): _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value
