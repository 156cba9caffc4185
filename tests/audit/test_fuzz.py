"""Damaged and hostile files: every one is read, or refused in one sentence; nothing else may happen.

ASSAY_FUZZ=20000 pytest tests/audit/test_fuzz.py runs as many mutations of every format.
"""

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rollout_files as files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_files import WRITERS, json_lines

from assay.audit.columns import Rollouts
from assay.audit.readers import FORMATS, read
from assay.audit.readers.collect import TOKENS
from assay.protocols import UserError

COUNT = int(os.environ.get("ASSAY_FUZZ", "150"))
FUZZ = settings(
    max_examples=COUNT,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PIECES = [
    b"null",
    b"NaN",
    b"-1e999",
    b"[" * 2000,
    b'"',
    b"{}",
    b"[]",
    b"\x00" * 8,
    b"\xff" * 8,
    b"\x80\x04",
    b"9" * 5000,
]
PIECES += [b"\n", b",", b"1.5", b"true", b'"\\ud800"', b"-1", b"2147483648", b"\x7f\xff\xff\xff\xff\xff\xff\xff"]


def survives(path: Path, format: str | None = None) -> bool:
    """Was it read? Then what came out is as the checks need it."""
    try:
        found = read(path, format=format)
    except UserError as error:
        assert str(path) in str(error) and len(str(error)) < 2500
        return False
    sound(found)
    return True


def sound(found: Rollouts) -> None:
    n = len(found)
    assert n > 0 and found.format in FORMATS
    for name, column in found.tokens.items():
        assert column.values.dtype == TOKENS[name][0] and len(column) == n
        assert column.offsets[0] == 0 and column.offsets[-1] == len(column.values) and (column.lengths >= 0).all()
    for values in (*found.samples.values(), *found.texts.values()):
        assert len(values) == n
    json.dumps([found.where, found.declared])


def mutated(data: bytes, draw: random.Random) -> bytes:
    """One to four changes: a bit, a byte, a piece put in, taken out, doubled or moved, the end cut off."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, end = sorted(draw.randrange(len(changed) + 1) for _ in range(2))
        end = min(end, at + draw.choice([1, 4, 64, len(data)]))
        match draw.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(changed):
                changed[at] = draw.randrange(256)
            case 2:
                changed[at:at] = draw.choice(PIECES)
            case 3:
                del changed[at:end]
            case 4:
                changed[at:at] = changed[at:end]
            case 5:
                changed[at:end] = draw.choice(PIECES)
            case 6 if draw.randrange(4) == 0:
                del changed[at:]
    return bytes(changed)


@pytest.mark.parametrize("name", WRITERS)
def test_files_with_changed_bytes_are_read_or_refused(name: str, tmp_path: Path) -> None:
    writer, format = WRITERS[name]
    path = writer(tmp_path)
    data = path.read_bytes()
    read_count = 0
    for seed in range(COUNT):
        path.write_bytes(mutated(data, random.Random(seed)))
        read_count += survives(path, format if seed % 2 else None)
    assert read_count < COUNT  # the mutations do reach something


@pytest.mark.parametrize(
    "name", [name for name in WRITERS if name not in ("ours", "verl", "verl npz", "trl", "skyrl npz")]
)
def test_every_prefix_of_a_text_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    path = WRITERS[name][0](tmp_path)
    data = path.read_bytes()
    for end in range(0, len(data), max(1, len(data) // COUNT)):
        path.write_bytes(data[:end])
        survives(path)


# ---------------------------------------------------------------------------------------------------- JSON by structure

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
scalars |= st.sampled_from(["\ud800", "token_id:5", "token_id:99999999999999", 2**31, -1, "a_0_1", "user", "role"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "node", "type", "id", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
RECORDS: dict[str, list[Any]] = {
    "verifiers": [files.verifiers_episode(), files.verifiers_trace()],
    "skyrl": [files.skyrl_batch()],
    "trl": [{"prompt_ids": [[1, 2]], "completion_ids": [[3, 4]], "logprobs": [[-0.5, 0.0]], "env_mask": [[1, 0]]}],
    "verl": [{"input": "a", "output": "b", "gts": ["c"], "score": 1.0, "step": 3, "uid": "q_0_1"}],
}


def record_of_file(name: str, folder: Path) -> list[Any]:
    return [json.loads(line) for line in WRITERS[name][0](folder).read_text().splitlines()]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    return found + [place for key, inner in items for place in places(inner, (*path, key))]


def put(record: Any, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        record = record[key]
    record[place[-1]] = value


@pytest.mark.parametrize("format", ["verifiers", "verifiers-v0", "verl", "trl", "skyrl", "openai"])
def test_records_with_changed_fields_are_read_or_refused(format: str, tmp_path: Path) -> None:
    records = RECORDS.get(format) or record_of_file(format, tmp_path)
    spots = [(i, place) for i, record in enumerate(records) for place in places(record)]

    @FUZZ
    @given(st.lists(st.tuples(st.sampled_from(spots), values), min_size=1, max_size=3), st.booleans())
    def check(changes: list[tuple[tuple[int, tuple[Any, ...]], Any]], document: bool) -> None:
        changed = copy.deepcopy(records)
        for (i, place), value in changes:
            try:
                put(changed[i], place, value)
            except (KeyError, IndexError, TypeError):  # an earlier change took the place away
                continue
        path = tmp_path / "a.json"
        path.write_text(json.dumps(changed) if document else json_lines(*changed))
        survives(path, format)

    check()


@FUZZ
@given(format=st.sampled_from(list(FORMATS)), value=values)
def test_any_json_is_read_or_refused(format: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "any.json"
    path.write_text(json.dumps(value))
    survives(path, format)
    survives(path)


# ----------------------------------------------------------------------------------------------------------- columns

KINDS = [
    pa.int8(),
    pa.int64(),
    pa.uint64(),
    pa.float16(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.bool_(),
    pa.null(),
]
KINDS += [pa.timestamp("ns"), pa.date64(), pa.decimal128(20, 3), pa.duration("s"), pa.large_string()]
kinds = st.recursive(
    st.sampled_from(KINDS),
    lambda inner: (
        inner.map(pa.list_)
        | inner.map(lambda kind: pa.struct([("role", pa.string()), ("content", kind)]))
        | inner.map(lambda kind: pa.map_(pa.string(), kind))
    ),
    max_leaves=2,
)


def column(kind: pa.DataType, draw: random.Random) -> pa.Array:
    plain = [
        None,
        0,
        1,
        -1,
        2**40,
        0.5,
        "a",
        b"\xff",
        True,
        [],
        [1],
        ["a"],
        {"role": "user", "content": "x"},
        [("k", 1)],
    ]
    found = []
    for _ in range(3):
        value = draw.choice(plain)
        try:
            found.append(pa.array([value], kind)[0].as_py())
        except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
            found.append(None)
    return pa.array(found, kind)


@FUZZ
@given(
    chosen=st.dictionaries(
        st.sampled_from(["prompt", "completion", "advantage", "step", "reward", "input", "output", "score", "right"]),
        kinds,
        min_size=1,
    ),
    seed=st.integers(0, 1000),
    format=st.sampled_from(["trl", "verl", "skyrl", "openai", "verifiers", "verifiers-v0", "assay", None]),
)
def test_tables_of_any_types_are_read_or_refused(
    chosen: dict[str, Any], seed: int, format: str | None, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({name: column(kind, draw) for name, kind in chosen.items()}), path)
    survives(path, format)


@FUZZ
@given(
    chosen=st.dictionaries(
        st.sampled_from(
            ["input_ids", "responses", "attention_mask", "response_mask", "advantages", "rm_scores", "uid"]
        ),
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
            st.sampled_from(["i8", "i4", "u8", "f2", "f8", "?", "U3", "S2", "c8", "M8[s]"]),
        ),
    ),
    format=st.sampled_from(["verl", "skyrl"]),
)
def test_archives_of_any_shapes_are_read_or_refused(chosen: dict[str, Any], format: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    names = {"input_ids": "prompt_token_ids", "responses": "response_ids", "response_mask": "loss_masks"}
    arrays = {
        names.get(n, n) if format == "skyrl" else n: np.ones(shape).astype(kind) for n, (shape, kind) in chosen.items()
    }
    np.savez(path, **arrays)
    survives(path, format)
