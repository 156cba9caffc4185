"""Readers: rollouts of any framework as optional columns. They fill what a format has, and claim nothing that it has not.

`read(path)` recognises the format by what is in the file; FORMATS lists the formats and what each needs.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.audit.columns import Rollouts
from assay.audit.readers import chat, skyrl, traces, trl, verifiers, verl
from assay.audit.readers.collect import Collector
from assay.audit.readers.files import SUFFIXES, Progress, files_of, kind_of
from assay.audit.readers.records import records
from assay.audit.readers.tables import parquet
from assay.audit.readers.tensors import load
from assay.audit.readers.traces import from_rows, from_traces
from assay.protocols import UserError
from assay.trace_store import VERSION_KEY

__all__ = ["FORMATS", "Format", "from_rows", "from_traces", "read"]
FILE_OF = {"traces.jsonl": "verifiers", "results.jsonl": "verifiers-v0"}  # in a folder of a run of theirs


@dataclass(frozen=True, slots=True)
class Format:
    """`needs` lists sets of names; a file that has all names of one set can be read as this format."""

    name: str
    line: str  # what it is, and what it needs
    read: Callable[[Sequence[Path], Collector, Progress], None]
    needs: tuple[frozenset[str], ...]


def _needs(*sets: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(names.split()) for names in sets)


FORMATS: dict[str, Format] = {  # in the order in which they are tried
    "assay": Format("assay", "a run directory, or its traces (Parquet)", traces.read, _needs("assay.trace.schema")),
    "verifiers": Format(
        "verifiers", "traces.jsonl of verifiers v1 and prime-rl: nodes, or traces with nodes", verifiers.read_v1,
        _needs("nodes", "traces task", "traces env"),
    ),
    "verl": Format(
        "verl", "a DataProto (safetensors, npz): input_ids, or prompts and responses; rollout dumps: input, output, score",
        verl.read, _needs("input_ids", "prompts responses", "input output score"),
    ),
    "trl": Format(
        "trl", "completions tables (Parquet) of TRL: prompt, completion, advantage; or prompt_ids and completion_ids",
        trl.read, _needs("prompt completion advantage", "prompt completion step", "prompt_ids completion_ids"),
    ),
    "skyrl": Format(
        "skyrl", "generator outputs (JSON, npz) of SkyRL: prompt_token_ids and response_ids; or input_prompt, output_response",
        skyrl.read, _needs("prompt_token_ids response_ids", "input_prompt output_response"),
    ),
    "openai": Format(
        "openai", "chat logs: choices (of a response) and messages or prompt_token_ids", chat.read,
        _needs("messages choices", "prompt_token_ids choices", "request response"),
    ),
    "verifiers-v0": Format(
        "verifiers-v0", "results.jsonl of verifiers v0: prompt, completion, reward", verifiers.read_v0,
        _needs("prompt completion reward", "completion_ids completion_mask", "trajectory reward"),
    ),
}  # fmt: skip


def read(
    path: Path,
    format: str | None = None,
    declared: Mapping[str, Any] | None = None,
    limit: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Rollouts:
    """Rollouts of a file, a folder of files, or a run directory; `limit` samples at most.

    `progress` is told the share of the source that is done, 0 to 1. UserError for what cannot be read, and why.
    """
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise UserError(f"format {format!r} does not exist: the formats are {', '.join(FORMATS)}")
    if limit is not None and limit < 1:
        raise UserError(f"limit {limit}: expected at least one sample")
    into = Collector(str(path), format or "", dict(declared or {}), limit)
    try:
        _read(path, format, into, progress)
    except OSError as error:
        reason = error.strerror or errno.errorcode.get(error.errno or 0, str(error))
        raise UserError(f"{path}: cannot be read: {reason}") from error
    rollouts = into.finish()
    if not len(rollouts):
        raise UserError(f"{path}: expected at least one sample, found none in what looks like {into.format}")
    return rollouts


def _read(path: Path, format: str | None, into: Collector, progress: Callable[[float], None] | None) -> None:
    if format in (None, "assay") and (path / "config.toml").is_file() and (path / "traces").is_dir():
        files = sorted((path / "traces").glob("*.parquet"))
        into.format, into.size = "assay", sum(file.stat().st_size for file in files)
        traces.read_run(path, into, _shares(into.size, progress))
        return
    files = _files(path, format, into)
    into.size = sum(file.stat().st_size for file in files)
    into.format = format or _recognised(path, files[0])
    FORMATS[into.format].read(files, into, _shares(into.size, progress))


def _files(path: Path, format: str | None, into: Collector) -> list[Path]:
    """Of a folder, its one file of a known name, or all data files of one kind; how many others there are is declared."""
    files = files_of(path)
    if not path.is_dir():
        return files
    for name, of in FILE_OF.items():
        if format in (None, of) and (path / name) in files:
            return [path / name]
    suffix = next(suffix for suffix in SUFFIXES if any(file.suffix == suffix for file in files))
    chosen = [file for file in files if file.suffix == suffix]
    beside = {file.with_suffix(".json") for file in chosen}
    left_out = len({*files} - {*chosen} - beside)
    if left_out:
        into.declared["files_left_out"] = left_out
    return chosen


def _shares(size: int, progress: Callable[[float], None] | None) -> Progress:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(min(1.0, done / max(1, size)))

    return advance


def _recognised(path: Path, file: Path) -> str:
    """The first format whose needs the file meets. UserError says what each would need."""
    kind, names = kind_of(file), frozenset[str]()
    if kind == "parquet":
        with parquet(file) as table:
            schema = table.schema_arrow
        names = frozenset(schema.names)
        names |= {key.decode(errors="replace") for key in schema.metadata or {}} & {VERSION_KEY.decode()}
    elif kind in ("safetensors", "npz"):
        arrays, metadata = load(file, kind)
        names = frozenset({*arrays, *metadata})
    else:
        for _, record in records(file, kind, None, lambda count: None):
            names = frozenset(name for name in record.values if name in record)
            break
    for format in FORMATS.values():
        if any(needed <= names for needed in format.needs):
            return format.name
    shown = ", ".join(sorted(names)[:12])[:200] or "nothing"
    known = "; ".join(f"{format.name}: {format.line}" for format in FORMATS.values())
    raise UserError(
        f"{path}: expected rollouts of a known format, found {shown}. Known are: {known}. --format says which"
    )
