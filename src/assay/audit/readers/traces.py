"""Our own: a run directory, a Parquet file of traces, traces or rows in memory.

A sample is what one row is made of: a whole trace (append) or a turn behind its window. Flat columns of prompts and
turns are gathered into sequences at once, so that a token costs no Python object. What is never learnt from (evaluation,
environment errors) has no trained token; replaced and child traces are left out, and counted in `declared`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from assay.audit.columns import Ragged, Rollouts
from assay.audit.readers.collect import BYTES_PER_TOKEN, Collector
from assay.audit.readers.files import Progress
from assay.audit.readers.tables import parquet
from assay.files import read_file, read_json
from assay.protocols import UserError
from assay.rows import Batch, Layout, Row
from assay.trace import POLICY, Outcome, Trace, among
from assay.trace_store import TRACE_V1, TURN_V1, VERSION_KEY

TURN_LISTS = ("context_ids", "ids", "provenance", "logprobs", "closing_ids")
CONFIG_BYTES = 1 << 20
TURN_FACTS = ("policy_version", "stop")
TRACE_FACTS = ("step", "round", "slot", "rollout", "reward", "outcome", "temperature", "mode", "kind", "error")


@dataclass(slots=True, eq=False)
class Block:
    """Some traces as flat columns. `traces` and `turns` hold one entry per trace and per turn."""

    prompt_ids: Ragged  # per trace
    turn_count: NDArray[np.int64]  # per trace
    context_ids: Ragged  # per turn, as the others
    ids: Ragged
    provenance: Ragged
    logprobs: Ragged
    closing_ids: Ragged
    traces: dict[str, list[Any]]  # TRACE_FACTS, and "task", "split"
    turns: dict[str, list[Any]]  # TURN_FACTS


# ------------------------------------------------------------------------------------------------------------- files


def read(files: Sequence[Path], into: Collector, progress: Progress) -> None:
    """Parquet files of traces; the layout is the declared one, append if nothing says otherwise."""
    layout = _layout(into.declared.get("layout", "append"), into.source)
    for path in files:
        name = f"{path.stem}, " if len(files) > 1 and not path.stem.startswith("step-") else ""
        for block in _blocks(path, progress):
            _add(block, layout, into, name)
            if into.full:
                return


def read_run(folder: Path, into: Collector, progress: Progress) -> None:
    """All of a run's traces; what its configuration says is declared."""
    path = folder / "config.toml"
    try:
        config = tomllib.loads(read_file(path, CONFIG_BYTES).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: expected TOML, found something else ({str(error)[:100]})") from error
    _declare(config, into)
    _declare_policy(folder / "policy", into)
    files = sorted((folder / "traces").glob("*.parquet"))
    if not files:
        raise UserError(
            f"{folder}: expected traces of at least one step in traces/, found none: runtime.traces_every 1"
        )
    read(files, into, progress)


def _declare(config: Mapping[str, Any], into: Collector) -> None:
    """Config is a user's file as well: only what has the right type is taken from it."""
    slots = config.get("slots") if isinstance(config.get("slots"), dict) else {}
    assert isinstance(slots, dict)
    said = {
        "temperature": (config.get("temperature"), (int, float)),
        "rollouts_per_task": (config.get("rollouts_per_task"), (int,)),
        "layout": (config.get("layout"), (str,)),
        "denominator": (slots.get("denominator"), (str,)),
        "environment": (config.get("env"), (str,)),
    }
    method = config.get("method")
    if isinstance(method, list) and len(method) <= 1:  # a further method may set or change the advantage
        said["estimator"] = (slots.get("advantage"), (str,))
    into.declare(**{name: value for name, (value, kinds) in said.items() if isinstance(value, kinds)})


def _declare_policy(policy: Path, into: Collector) -> None:
    """Vocabulary and special ids of the run's trained policy, where they can be had."""
    path = policy / "config.json"
    if not path.is_file():
        return
    config = read_json(path, CONFIG_BYTES)
    ends = config.get("eos_token_id")
    ends = [ends] if isinstance(ends, int) else ends
    if isinstance(config.get("vocab_size"), int):
        into.declare(vocabulary=config["vocab_size"])
    if isinstance(ends, list) and all(isinstance(end, int) for end in ends):
        into.declare(end_ids=ends)


def _layout(text: Any, source: str) -> Layout:
    try:
        return Layout.parse(str(text))
    except ValueError as error:
        raise UserError(f"{source}: {error}: give it with --declare.layout") from error


def _blocks(path: Path, progress: Progress) -> Iterator[Block]:
    with parquet(path) as file:
        schema = file.schema_arrow
        if VERSION_KEY not in (schema.metadata or {}):
            raise UserError(f"{path}: expected a file of traces, found Parquet without {VERSION_KEY.decode()!r}")
        for name in ("task", *TRACE_FACTS, "prompt_ids", "turns"):
            found = schema.field(name).type if name in schema.names else "no such column"
            if found != TRACE_V1[name]:
                raise UserError(
                    f"{path}: column {name!r}: expected {str(TRACE_V1[name])[:80]}, found {str(found)[:80]}"
                )
        names = ["task", *TRACE_FACTS, "prompt_ids", "turns"]
        for group in range(file.num_row_groups):
            columns = [name for name in names if name != "turns"]
            columns += [f"turns.list.element.{name}" for name in (*TURN_LISTS, *TURN_FACTS)]
            table = file.read_row_group(group, columns=columns, use_threads=False).combine_chunks()
            if missing := set(names) - set(table.column_names):
                raise UserError(f"{path}: column {min(missing)!r}: expected it with all its fields, found a part")
            yield _block({name: _whole(table[name]) for name in names}, f"{path}, row group {group}")
            progress(path.stat().st_size // max(1, file.num_row_groups))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _block(columns: Mapping[str, pa.Array], place: str) -> Block:
    turns = _list(columns["turns"], place, "turns")
    nested = columns["turns"].flatten()
    if nested.null_count:
        raise UserError(f"{place}: column 'turns': expected turns, found {nested.null_count} nulls")
    flat = {name: nested.field(name) for name in (*TURN_LISTS, *TURN_FACTS)}
    lists = {name: _ragged(flat[name], TURN_V1[name].value_type, place, f"turns.{name}") for name in TURN_LISTS}
    for name in ("provenance", "logprobs"):
        if not np.array_equal(lists[name].offsets, lists["ids"].offsets):
            raise UserError(
                f"{place}: field 'turns.{name}': expected one value per token of 'turns.ids', found another number"
            )
    task = {name: columns["task"].field(name).to_pylist() for name in ("environment", "version", "split", "hash")}
    facts = {name: _values(columns[name], place, name) for name in TRACE_FACTS}
    facts["split"] = task["split"]
    facts["task"] = [f"{e}@{v}#{h}" for e, v, h in zip(task["environment"], task["version"], task["hash"], strict=True)]
    return Block(
        _ragged(columns["prompt_ids"], pa.int32(), place, "prompt_ids"),
        np.diff(turns),
        traces=facts,
        turns={name: _values(flat[name], place, f"turns.{name}") for name in TURN_FACTS},
        **lists,
    )


def _list(column: pa.ListArray, place: str, name: str) -> NDArray[np.int64]:
    """Offsets of the lists in `column.flatten()`."""
    if column.null_count:
        raise UserError(f"{place}: column {name!r}: expected lists, found {column.null_count} nulls")
    offsets = column.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0]


def _ragged(column: pa.ListArray, kind: pa.DataType, place: str, name: str) -> Ragged:
    offsets = _list(column, place, name)
    values = column.flatten()
    if values.null_count and not pa.types.is_floating(kind):
        raise UserError(f"{place}: column {name!r}: expected values, found {values.null_count} nulls")
    return Ragged(values.to_numpy(zero_copy_only=False).astype(kind.to_pandas_dtype(), copy=False), offsets)


def _values(column: pa.Array, place: str, name: str) -> list[Any]:
    if column.null_count:
        raise UserError(f"{place}: column {name!r}: expected values, found {column.null_count} nulls")
    return list(column.to_pylist())


# ------------------------------------------------------------------------------------------------------------- memory


def from_traces(
    traces: Sequence[Trace], layout: Layout | None = None, source: str = "traces", **declared: Any
) -> Rollouts:
    """Rollouts of traces in memory, without credit: there is none on a trace."""
    into = Collector(source, "assay", declared, size=1 << 62)
    layout = layout or Layout()
    into.declare(layout=layout.name if layout.name == "append" else f"window({layout.k})")
    turns = [turn for trace in traces for turn in trace.turns]
    block = Block(
        Ragged.of((t.prompt_ids for t in traces), np.int32),
        np.array([len(t.turns) for t in traces], np.int64),
        traces={name: [getattr(t, name) for t in traces] for name in TRACE_FACTS},
        turns={name: [getattr(t, name) for t in turns] for name in TURN_FACTS},
        context_ids=Ragged.of((t.context_ids for t in turns), np.int32),
        ids=Ragged.of((t.ids for t in turns), np.int32),
        provenance=Ragged.of((t.provenance for t in turns), np.uint8),
        logprobs=Ragged.of((t.logprobs for t in turns), np.float32),
        closing_ids=Ragged.of((t.closing_ids for t in turns), np.int32),
    )
    block.traces["task"] = [f"{t.task.environment}@{t.task.version}#{t.task.hash}" for t in traces]
    block.traces["split"] = [t.task.split for t in traces]
    _add(block, layout, into, "")
    return into.finish()


def from_rows(rows: Sequence[Row], batch: Batch, source: str = "rows", **declared: Any) -> Rollouts:
    """Rollouts of what is about to be trained on, with the credit that stands on the rows: columns "advantage",
    "old_logprob" and "weight" where a row has them. Only rows of the view that sampled them have log-probs."""
    into = Collector(source, "assay", declared, size=1 << 62)
    for row in rows:
        trace, turns = row.trace, _turns_of(row)
        mask = np.zeros(len(row.ids), np.bool_)
        mask[row.at] = True
        tokens: dict[str, Any] = {"ids": row.ids, "mask": mask, "sampled": among(row.provenance, POLICY)}
        sampled = [turn.logprobs[among(turn.provenance, POLICY)] for turn in turns]
        compact = {"logprobs": np.concatenate(sampled) if sampled and not row.view else None}
        compact |= {"trainer_logprobs": row.columns.get("old_logprob"), "advantages": row.columns.get("advantage")}
        compact |= {"weights": row.columns.get("weight")}
        for name, values in compact.items():
            if values is not None and values.shape == row.at.shape:
                tokens[name] = np.full(len(row.ids), np.nan, np.float32)
                tokens[name][row.at] = values
        samples = {
            "reward": trace.reward,
            "score": batch.scores.get(trace.key),
            "group": trace.group_key,
            "task": f"{trace.task.environment}@{trace.task.version}#{trace.task.hash}",
            "split": trace.task.split,
            "rollout": f"{trace.key}{f' view {row.view}' if row.view else ''}",
            "turn": row.turn,
            "outcome": trace.outcome.value,
            "stop": turns[-1].stop if turns else None,
            "error": trace.error,
            "version": min((turn.policy_version for turn in turns), default=None),
        }
        turn = f", turn {row.turn}" if row.turn >= 0 else ""
        view = f", view {row.view}" if row.view else ""
        into.add(
            _where("", trace.step, trace.round, trace.slot, trace.rollout, trace.mode) + turn + view, tokens, samples
        )
    return into.finish()


def _turns_of(row: Row) -> Sequence[Any]:
    return row.trace.turns if row.turn < 0 else row.trace.turns[row.turn : row.turn + 1]


# ---------------------------------------------------------------------------------------------------------- sequences


@dataclass(slots=True, eq=False)
class Pieces:
    """Samples as runs of pieces. A piece is a list of the block: the prompt of a trace, or context, answer or closing of
    a turn, counted in this order; `own` says of each whether its sample is there to train on it."""

    piece: NDArray[np.int64]  # [K]
    own: NDArray[np.bool_]  # [K]
    first: NDArray[np.int64]  # [n + 1] the pieces of sample i are first[i] to first[i + 1]
    trace: list[int]  # [n]
    turn: list[int]  # [n] turn of its trace; -1: all of it


def _add(block: Block, layout: Layout, into: Collector, name: str) -> None:
    """All samples of a block: a list of pieces, then one gather for every column."""
    room = None if into.limit is None else into.limit - len(into.where)
    pieces = _pieces(block, layout, into)
    n = len(pieces.trace) if room is None else min(room, len(pieces.trace))
    last = int(pieces.first[n])
    piece, own = pieces.piece[:last], pieces.own[:last]
    sources = (block.prompt_ids, block.context_ids, block.ids, block.closing_ids)
    sizes = np.concatenate([source.lengths for source in sources])[piece]
    base = np.cumsum([0, *(len(source.values) for source in sources)])
    begins = np.concatenate([source.offsets[:-1] + at for source, at in zip(sources, base, strict=False)])[piece]
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if last else 0
    into.charge(BYTES_PER_TOKEN * total, into.source)
    gather = np.repeat(begins - (ends - sizes), sizes) + np.arange(total)
    whole: dict[str, NDArray[Any]] = {
        "ids": np.concatenate([source.values for source in sources]),
        "sampled": np.zeros(base[-1], np.bool_),
        "logprobs": np.full(base[-1], np.nan, np.float32),
    }
    whole["sampled"][base[2] : base[3]] = among(block.provenance.values, POLICY)
    whole["logprobs"][base[2] : base[3]] = block.logprobs.values
    columns = {column: values[gather] for column, values in whole.items()}
    columns["mask"] = columns["sampled"] & np.repeat(own, sizes)
    if layout.name == "window":  # what stands in the window was sampled in another context
        columns["logprobs"][~columns["mask"]] = np.nan
    offsets = np.concatenate([[0], ends])[pieces.first[: n + 1]]
    where, samples = _facts(block, pieces, n, name)
    into.add_block(where, {column: Ragged(values, offsets) for column, values in columns.items()}, samples)


def _pieces(block: Block, layout: Layout, into: Collector) -> Pieces:
    traces, turns = len(block.turn_count), len(block.turns["stop"])
    starts = np.concatenate([[0], np.cumsum(block.turn_count)])
    roots = [i for i, kind in enumerate(block.traces["kind"]) if kind == "root"]
    if len(roots) < traces:
        into.declared["traces_left_out"] = into.declared.get("traces_left_out", 0) + traces - len(roots)
    piece: list[int] = []
    own: list[bool] = []
    found = Pieces(np.zeros(0, np.int64), np.zeros(0, np.bool_), np.zeros(0, np.int64), [], [])
    first = [0]
    for i in roots:
        learnt = block.traces["step"][i] >= 0 and block.traces["outcome"][i] != Outcome.ENVIRONMENT_ERROR.value
        count = int(block.turn_count[i])
        spans = [(-1, 0, count)]
        if layout.name == "window":
            spans = [(t, max(0, t - layout.k), t + 1) for t in range(count)]
            into.charge(100 * sum(end - begin for _, begin, end in spans), into.source)
        for turn, begin, end in spans:
            piece.append(i)
            own.append(False)
            for t in range(begin, end):
                at = traces + int(starts[i]) + t
                piece += (at, at + turns, at + 2 * turns) if t < end - 1 else (at, at + turns)
                target = learnt and turn in (-1, t)
                own += (False, target, False) if t < end - 1 else (False, target)
            first.append(len(piece))
            found.trace.append(i)
            found.turn.append(turn)
    found.piece, found.own, found.first = np.array(piece, np.int64), np.array(own, np.bool_), np.array(first, np.int64)
    return found


def _facts(block: Block, pieces: Pieces, n: int, name: str) -> tuple[list[str], dict[str, list[Any]]]:
    """Where the samples are, and what is known of each."""
    facts, starts = block.traces, np.concatenate([[0], np.cumsum(block.turn_count)]).tolist()
    where: list[str] = []
    samples: dict[str, list[Any]] = {key: [] for key in ("group", "rollout", "stop", "version")}
    keys = ("step", "round", "slot", "rollout", "mode")
    for i, turn in zip(pieces.trace[:n], pieces.turn[:n], strict=True):
        step, round_, slot, rollout, mode = (facts[key][i] for key in keys)
        place = _where(name, step, round_, slot, rollout, mode)
        where.append(place if turn < 0 else f"{place}, turn {turn}")
        samples["group"].append(f"{step:06d}.{round_:02d}.{slot:04d}" if step >= 0 else None)
        samples["rollout"].append(place)
        span = range(starts[i], starts[i + 1]) if turn < 0 else range(starts[i] + turn, starts[i] + turn + 1)
        samples["stop"].append(block.turns["stop"][span[-1]] if span else None)
        samples["version"].append(min((block.turns["policy_version"][t] for t in span), default=None))
    for key in ("reward", "outcome", "error", "task", "split"):
        samples[key] = [facts[key][i] for i in pieces.trace[:n]]
    samples["turn"] = pieces.turn[:n]
    return where, samples


def _where(name: str, step: int, round_: int, slot: int, rollout: int, mode: str) -> str:
    when = f"step {step}, " if step >= 0 else ""
    more = (f", round {round_}" if round_ else "") + (f", mode {mode}" if mode else "")
    return f"{name}{when}task {slot}, rollout {rollout}{more}"
