"""Traces on disk: exact to the bit, and damaged or foreign files refused in one sentence."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay import trace_store
from assay.protocols import UserError
from assay.trace import Outcome, Provenance, TaskKey, Trace, Turn
from assay.trace_store import read_traces, write_traces

# ------------------------------------------------------------------------------------------------ traces at random

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text(
    st.sampled_from("a\x00é\n😀\ud800\udfff\ud83d\ude00"), max_size=5
)
numbers = st.floats(allow_nan=True, allow_infinity=True)
float32s = st.floats(width=32, allow_nan=False) | st.just(math.nan)


@st.composite
def token_arrays(draw, most=5):
    n = draw(st.integers(0, most))
    ids = st.integers(0, 2**31 - 1)
    provenance = st.integers(0, max(Provenance))
    return (
        np.array(draw(st.lists(ids, min_size=n, max_size=n)), np.int32),
        np.array(draw(st.lists(provenance, min_size=n, max_size=n)), np.uint8),
        np.array(draw(st.lists(float32s, min_size=n, max_size=n)), np.float32),
        np.array(draw(st.lists(float32s, min_size=n, max_size=n)), np.float32),
    )


@st.composite
def turns(draw):
    context, answer = draw(token_arrays()), draw(token_arrays())
    return Turn(
        *context[:2],
        *answer,
        draw(token_arrays(2))[0],
        draw(texts),
        draw(texts),
        draw(numbers),
        draw(st.booleans()),
        *(draw(names), draw(names)),
        draw(st.booleans()),
        draw(st.integers(0, 2**40)),
        draw(st.sampled_from(["stop", "length", "context"])),
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def traces(draw):
    prompt = draw(token_arrays())
    count = st.integers(-1, 2**31)
    return Trace(
        TaskKey(draw(names), draw(names), draw(names), draw(st.integers(0, 2**31)), draw(names)),
        *(draw(count), draw(count), draw(count), draw(count)),
        *prompt[:2],
        tuple(draw(st.lists(turns(), max_size=3))),
        draw(texts),
        draw(numbers),
        draw(st.sampled_from(Outcome)),
        draw(numbers),
        *(draw(names), draw(names), draw(names)),
        draw(texts),
        draw(count),
        draw(st.dictionaries(names, json_values, max_size=2)),
    )


def bits(value):
    """Something that is equal only if the value is the same to the bit and of the same type."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    if dataclasses.is_dataclass(value):
        return type(value), *(bits(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, tuple | list):
        return type(value), *map(bits, value)
    if isinstance(value, dict):
        return tuple((key, bits(inner)) for key, inner in value.items())
    return type(value), value


def turn(n=3, **changes):
    """A turn of n sampled tokens."""
    made = Turn(
        np.arange(2, dtype=np.int32),
        np.array([1, 2], np.uint8),
        np.arange(n, dtype=np.int32),
        np.zeros(n, np.uint8),
        np.linspace(-1, -0.1, n, dtype=np.float32),
        np.linspace(0.1, 2, n, dtype=np.float32),
        np.zeros(0, np.int32),
        *("see a ball", "go forward", 0.0, True, "anchor", "go", False, 7),
    )
    return dataclasses.replace(made, **changes)


def trace(*its_turns, **changes):
    made = Trace(
        TaskKey("env/A", "v1", "train", 5, "abcd"),
        *(1, 0, 2, 3),
        np.array([9, 8], np.int32),
        np.array([1, 1], np.uint8),
        its_turns,
        *("the end", 1.0, Outcome.SUCCESS, 1.0),
    )
    return dataclasses.replace(made, **changes)


def round_trip(tmp_path, some):
    write_traces(tmp_path / "t.parquet", some)
    return read_traces(tmp_path / "t.parquet")


# ------------------------------------------------------------------------------------------------------ round trips


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(some=st.lists(traces(), max_size=4))
def test_round_trip_is_exact_to_the_bit(tmp_path_factory, some):
    again = round_trip(tmp_path_factory.mktemp("round"), some)
    assert [bits(t) for t in again] == [bits(t) for t in some]


def test_round_trip_of_the_corners(tmp_path):
    nan = np.float32("nan")
    some = [
        trace(),  # no turn at all
        trace(turn(0), turn(0)),
        trace(turn(2, logprobs=np.array([nan, nan], np.float32), entropies=np.array([nan, -0.0], np.float32))),
        trace(turn(observation="x" * 3_000_000), reward=math.nan, outcome=Outcome.ENVIRONMENT_ERROR, error="died"),
        trace(turn(observation="\ud800", action="\ud83d\ude00"), turn(action="ok 😀"), turn(action="\udfff\x00"),
              final_observation="a\ud800b", error="\udc00"),
        trace(turn(), prompt_ids=np.zeros(0, np.int32), prompt_provenance=np.zeros(0, np.uint8)),
        trace(evidence={"checks": [{"name": "n", "passed": False, "where": None, "value": 0.1}], "gold": ["\ud800"]}),
    ]  # fmt: skip
    again = round_trip(tmp_path, some)
    assert [bits(t) for t in again] == [bits(t) for t in some]
    assert round_trip(tmp_path, []) == []


def test_empty_arrays_of_any_dtype_do_not_change_what_is_stored(tmp_path):
    """np.array([]) is float64: next to int32 ids it would make floats of all of them."""
    lazy = turn(0, ids=np.array([]), provenance=np.array([]), logprobs=np.array([]), entropies=np.array([]))
    (again,) = round_trip(tmp_path, [trace(lazy, turn(3))])
    assert bits(again.turns[1]) == bits(turn(3)) and bits(again.turns[0]) == bits(turn(0))


def test_more_traces_than_one_row_group_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_store, "TRACES_PER_GROUP", 3)
    some = [trace(*[turn(k)] * (k % 3), rollout=k, final_observation="\ud800" * (k % 2)) for k in range(10)]
    again = round_trip(tmp_path, some)
    assert pq.ParquetFile(tmp_path / "t.parquet").num_row_groups == 4
    assert [bits(t) for t in again] == [bits(t) for t in some]


def test_arrays_that_are_read_can_be_written_to_without_touching_their_neighbours(tmp_path):
    (again,) = round_trip(tmp_path, [trace(turn(3), turn(3))])
    again.turns[0].logprobs[:] = 0
    assert bits(again.turns[1]) == bits(turn(3))


def golden():
    """What tests/data/traces-1.parquet holds: every outcome and provenance, a null, an odd text, no turn."""
    nan = np.float32("nan")
    odd = turn(3, logprobs=np.array([-0.5, nan, -2], np.float32), observation="caf\u00e9 \ud800")
    kinds = turn(6, provenance=np.arange(6, dtype=np.uint8), closing_ids=np.array([4], np.int32), stop="length")
    outcomes = [trace(rollout=r, outcome=outcome) for r, outcome in enumerate(Outcome)]
    return [
        *outcomes,
        trace(odd, kinds, mode="explore", kind="child", parent="p", extra_tokens=9, evidence={"gold": [1]}),
    ]


def test_a_file_of_schema_version_1_is_read_for_ever():
    """The file was written once, when version 1 was made. Never write it anew."""
    again = read_traces(Path(__file__).parent / "data" / "traces-1.parquet")
    assert [bits(t) for t in again] == [bits(t) for t in golden()]


def test_the_same_traces_give_the_same_bytes(tmp_path):
    some = [trace(turn(k), evidence={"b": 1, "a": 2}) for k in range(20)]
    write_traces(tmp_path / "a", some), write_traces(tmp_path / "b", some)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_any_parquet_reader_sees_nulls_text_and_json(tmp_path):
    nan = np.float32("nan")
    made = turn(2, logprobs=np.array([nan, -0.5], np.float32), observation="a\ud800")
    write_traces(tmp_path / "t", [trace(made, evidence={"gold": ["x"]}, reward=math.nan)])
    row = pq.read_table(tmp_path / "t").to_pylist()[0]
    assert row["turns"][0]["logprobs"] == [None, -0.5] and row["turns"][0]["observation"] == "a\ufffd"
    assert row["exact_text"] == [("turns.0.observation", b"a\xed\xa0\x80")]  # only what its column cannot hold
    assert math.isnan(row["reward"]) and json.loads(row["evidence"]) == {"gold": ["x"]}
    assert row["task"]["environment"] == "env/A" and row["outcome"] == "success"


def test_schema_names_the_fields_of_trace_and_turn_in_their_order():
    """A new field of Trace or Turn needs a new schema version, and this test to notice."""
    assert list(trace_store.TURN_V1) == [field.name for field in dataclasses.fields(Turn)]
    ours = [name for name in trace_store.TRACE_V2 if name != "exact_text"]
    assert ours == [field.name for field in dataclasses.fields(Trace)]
    assert list(trace_store.TASK_V1) == [field.name for field in dataclasses.fields(TaskKey)]


def test_a_file_of_the_first_version_is_read_without_a_horizon(tmp_path):
    write_traces(tmp_path / "new", [trace(turn(2), horizon=7)])
    assert read_traces(tmp_path / "new")[0].horizon == 7
    table = pq.read_table(tmp_path / "new").drop_columns(["horizon"])
    pq.write_table(table.replace_schema_metadata({trace_store.VERSION_KEY: b"1"}), tmp_path / "old")
    (old,) = read_traces(tmp_path / "old")
    assert old.horizon == 0 and old.task == trace(turn(2)).task


# ------------------------------------------------------------------------------------------------ writing goes wrong


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (trace(turn(logprobs=np.zeros(3, np.float64))), "logprobs.*float64"),
        (trace(turn(ids=np.array([1, 2, 2**31], np.int64))), "turns.ids|ids"),
        (trace(turn(ids=np.array([1, 2, -1], np.int32))), "'turns.ids'.*found -1"),
        (trace(turn(ids=np.array([1.5, 2, 3]))), "ids"),
        (trace(turn(entropies=np.zeros(2, np.float32))), "'turns.entropies'.*3 in list 1, found 2"),
        (trace(turn(provenance=np.array([0, 0, 6], np.uint8))), "'turns.provenance'.*0 to 5, found 6"),
        (trace(prompt_provenance=np.zeros(1, np.uint8)), "'prompt_provenance'"),
        (trace(turn(observation=None)), "observation"),
        (trace(turn(observation=b"bytes")), "observation"),
        (trace(turn(skill=None)), "'turns.skill'.*1 nulls"),
        (trace(mode="\ud800"), "mode"),
        (trace(reward=None), "'reward'.*1 nulls"),
        (trace(evidence={"x": {1, 2}}), "evidence of trace 000001.00.0002.0003.root. .*set"),
        (trace(evidence=None), "evidence of trace .*NoneType"),
        (trace(extra_tokens=2**70), "extra_tokens"),
    ],
)
def test_a_trace_that_cannot_be_stored_exactly_is_refused_and_the_old_file_stays(tmp_path, bad, words):
    path = tmp_path / "t.parquet"
    write_traces(path, [trace(turn())])
    before = path.read_bytes()
    with pytest.raises(UserError, match=words) as caught:
        write_traces(path, [trace(turn()), bad])
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_a_folder_that_does_not_exist_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        write_traces(tmp_path / "nowhere" / "t.parquet", [trace()])


# ------------------------------------------------------------------------------------------------ reading goes wrong


def rewritten(tmp_path, change, metadata=None):
    """A good file after `change(table)`, as a stranger would write it."""
    path = tmp_path / "t.parquet"
    write_traces(path, [trace(turn(3), turn(2)), trace(turn(1))])
    table = change(pq.read_table(path))
    pq.write_table(table.replace_schema_metadata(metadata or {b"assay.trace.schema": b"1"}), path)
    return path


def with_column(name, values, kind=None):
    def change(table):
        at = table.schema.get_field_index(name)
        return table.set_column(at, name, pa.array(values, kind or table.schema.field(name).type))

    return change


def with_turns(**changes):
    def change(table):
        rows = table["turns"].to_pylist()
        rows[0][0] |= changes
        return with_column("turns", rows)(table)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.drop_columns(["turns"]), "'turns'.*found no such column"),
        (lambda t: t.drop_columns(["reward"]), "'reward': expected one double, found no such column"),
        (lambda t: t.append_column("reward", t["reward"]), "'reward'"),
        (with_column("reward", ["1", "2"], pa.string()), "'reward': expected one double, found string"),
        (with_column("turns", ["", ""], pa.string()), "'turns'.*found string"),
        (with_column("outcome", ["success", "won"]), "'outcome'.*found 'won'"),
        (with_column("step", [1, None]), "'step'.*1 nulls"),
        (with_column("turns", [[], None]), "'turns'.*1 nulls"),
        (with_column("turns", [[None], []]), "'turns \\(elements\\)'.*1 nulls"),
        (with_column("task", [None, None]), "'task'.*2 nulls"),
        (with_column("prompt_ids", [[1, None], [1, 2]]), "'prompt_ids \\(elements\\)'.*1 nulls"),
        (with_column("prompt_ids", [[1], [1, 2]]), "'prompt_provenance'.*1 in list 0, found 2"),
        (with_column("evidence", ["{", "{}"]), "'evidence'.*JSON"),
        (with_column("evidence", ["[" * 100_000, "{}"]), "'evidence'.*JSON"),
        (with_column("evidence", ["[]", "{}"]), "'evidence'.*found a list"),
        (with_column("exact_text", [[("turns.2.action", b"x")], []]), "'exact_text'.*'turns.2.action'"),
        (with_column("exact_text", [[], [("task.hash", b"x")]]), "'exact_text'.*'task.hash'"),
        (with_column("exact_text", [[("error", b"\xff")], []]), "cannot be read"),
        (with_column("exact_text", [[("error", None)], []]), "'exact_text .values.'.*1 nulls"),
        (with_turns(ids=[1, 2]), "'turns.provenance'.*2 in list 0, found 3"),
        (with_turns(ids=[1, 2, -3]), "'turns.ids'.*found -3"),
        (with_turns(provenance=[0, 1, 9]), "'turns.provenance'.*found 9"),
        (with_turns(logprobs=None), "'turns.logprobs'.*1 nulls"),
        (with_turns(action=None), "'turns.action'.*1 nulls"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_file_and_field(tmp_path, change, words):
    path = rewritten(tmp_path, change)
    with pytest.raises(UserError, match=words) as caught:
        read_traces(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_columns_that_users_add_are_ignored(tmp_path):
    path = rewritten(tmp_path, lambda t: t.append_column("label", pa.array(["good", "bad"])))
    assert [bits(t) for t in read_traces(path)] == [bits(trace(turn(3), turn(2))), bits(trace(turn(1)))]


@pytest.mark.parametrize("version", [b"3", b"", b"99999", b"1.0", b"\xff", b"9" * 5000])
def test_an_unknown_schema_version_is_refused(tmp_path, version):
    path = rewritten(tmp_path, lambda t: t, {b"assay.trace.schema": version})
    with pytest.raises(UserError, match="expected a version up to 2"):
        read_traces(path)


def test_foreign_missing_and_senseless_files_are_refused(tmp_path):
    path = tmp_path / "x.parquet"
    with pytest.raises(UserError, match=r"x\.parquet: there is no such file"):
        read_traces(path)
    pq.write_table(pa.table({"prompt": ["a"], "reward": [1.0]}), path)
    with pytest.raises(UserError, match="columns prompt, reward, but not a file of traces"):
        read_traces(path)
    for data in [b"", b"PAR1", b'{"a": 1}\n', b"PAR1" + bytes(100) + b"PAR1", b"PAR1" + b"\xff" * 12 + b"PAR1"]:
        path.write_bytes(data)
        with pytest.raises(UserError, match="cannot be read"):
            read_traces(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_traces(tmp_path)


def test_a_truncated_file_is_refused_at_every_length(tmp_path):
    path = tmp_path / "t.parquet"
    write_traces(path, [trace(turn(3), turn(2))])
    data = path.read_bytes()
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        with pytest.raises(UserError):
            read_traces(path)


def test_a_flipped_bit_is_refused_or_harmless_in_the_data(tmp_path):
    """Pages carry checksums. Damage may also hit the footer, which Parquet does not check: then no crash is promised."""
    path = tmp_path / "t.parquet"
    some = [trace(turn(k), turn(5), evidence={"k": k}) for k in range(30)]
    write_traces(path, some)
    data, expected = path.read_bytes(), [bits(t) for t in some]
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    rng = np.random.default_rng(0)
    refused = 0
    for at in [*rng.integers(4, footer, 200), *rng.integers(footer, len(data), 200)]:
        broken = bytearray(data)
        broken[at] ^= 1 << rng.integers(8)
        path.write_bytes(broken)
        try:
            again = [bits(t) for t in read_traces(path)]
        except UserError:
            refused += 1
            continue
        if at < footer:
            assert again == expected
    assert refused > 200
