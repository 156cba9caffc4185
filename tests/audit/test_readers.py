"""What readers make of each format, against numbers worked out by hand; and what they say of files that are none."""

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rollout_files as files
from rollout_files import WRITERS, json_lines
from safetensors.numpy import save_file

from assay.audit.checks import audit
from assay.audit.columns import Ragged
from assay.audit.readers import FORMATS, from_rows, from_traces, read
from assay.audit.readers.files import opened
from assay.protocols import UserError
from assay.rows import Batch, Layout, build_rows
from assay.trace import POLICY, Group, Outcome, among
from assay.trace_store import write_traces

NAN = float("nan")


def same(column: Ragged, *rows: list[float]) -> None:
    assert len(column) == len(rows)
    for i, row in enumerate(rows):
        np.testing.assert_allclose(column.row(i).astype(float), row, rtol=1e-6)


def refused(path: Path, *words: str, **more: object) -> str:
    """The sentence; it names the file and has these words."""
    with pytest.raises(UserError) as caught:
        read(path, **more)  # type: ignore[arg-type]
    sentence = str(caught.value)
    for word in (str(path), *words):
        assert word in sentence, (word, sentence)
    return sentence


def written(path: Path, *values: object) -> Path:
    path.write_text(json_lines(*values))
    return path


# ------------------------------------------------------------------------------------------------------- each format


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_is_recognised_by_its_content(name: str, tmp_path: Path) -> None:
    writer, format = WRITERS[name]
    path = writer(tmp_path)
    plain = path.rename(tmp_path / f"rollouts{path.suffix if path.suffix in ('.json', '.npz') else ''}")
    found = read(plain)
    assert found.format == format and len(found) == len(found.where) > 0
    for column in found.tokens.values():
        assert len(column) == len(found) and column.offsets[0] == 0 and column.offsets[-1] == len(column.values)
        assert np.array_equal(column.offsets, next(iter(found.tokens.values())).offsets)
    assert all(len(values) == len(found) for values in (*found.samples.values(), *found.texts.values()))
    again = read(plain, format=format, limit=1)
    assert len(again) == 1 and again.where[0] == found.where[0]


def test_our_traces_become_the_sequences_that_training_sees(tmp_path: Path) -> None:
    found = read(files.ours(tmp_path))
    ids = [1, 2, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    same(found.tokens["ids"], ids, ids, [1, 2])
    mask = [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0]  # 18 was forced into the answer
    same(found.tokens["mask"], mask, mask, [0, 0])
    same(found.tokens["sampled"], mask, mask, [0, 0])
    logprobs = [NAN, NAN, NAN, -1.1, -1.2, NAN, NAN, NAN, -1.6, -1.7, NAN]
    same(found.tokens["logprobs"], logprobs, logprobs, [NAN, NAN])
    assert found.samples["reward"].tolist() == [1.0, 0.0, 1.0]
    assert found.samples["outcome"].tolist() == ["success", "failure", "success"]
    assert found.samples["group"].tolist() == ["000004.00.0000", "000004.00.0000", "000004.00.0001"]
    assert found.samples["task"].tolist() == ["grid@v1#hash0", "grid@v1#hash0", "grid@v1#hash1"]
    assert found.samples["version"].tolist() == [0, 0, -1] and found.samples["turn"].tolist() == [-1, -1, -1]
    assert found.where[1] == "step 4, task 0, rollout 1"


@pytest.mark.parametrize("layout", ["append", "window(0)", "window(1)", "window(5)"])
def test_sequences_masks_and_logprobs_are_those_of_the_rows_that_are_trained(layout: str, tmp_path: Path) -> None:
    turns = tuple(
        files.turn([20 + t], [30 + t, 40 + t], [files.S, files.F if t == 1 else files.S], [50]) for t in range(4)
    )
    traces = [files.trace(0, 0, turns=turns), files.trace(0, 1), files.trace(1, 0, turns=turns[:2])]
    write_traces(tmp_path / "t.parquet", traces)
    found = read(tmp_path / "t.parquet", declared={"layout": layout})
    rows = build_rows(traces, Layout.parse(layout))
    assert len(found) == len(rows)
    for i, row in enumerate(rows):
        assert found.tokens["ids"].row(i).tolist() == row.ids.tolist()
        assert np.flatnonzero(found.tokens["mask"].row(i)).tolist() == row.at.tolist()
        assert found.tokens["sampled"].row(i).tolist() == among(row.provenance, POLICY).tolist()
        assert found.samples["turn"][i] == row.turn
        own = row.trace.turns if row.turn < 0 else row.trace.turns[row.turn : row.turn + 1]
        expected = np.concatenate([turn.logprobs[among(turn.provenance, POLICY)] for turn in own])
        assert found.tokens["logprobs"].row(i)[row.at].tolist() == expected.tolist()
        assert np.isnan(np.delete(found.tokens["logprobs"].row(i), row.at)).all()
        assert found.samples["version"][i] == min(turn.policy_version for turn in own)
    memory = from_traces(traces, Layout.parse(layout))
    for name, column in found.tokens.items():
        np.testing.assert_array_equal(column.values, memory.tokens[name].values)
        np.testing.assert_array_equal(column.offsets, memory.tokens[name].offsets)
    assert {name: list(values) for name, values in found.samples.items()} == {
        name: list(values) for name, values in memory.samples.items()
    }


def test_what_is_never_learnt_from_has_no_trained_token_and_no_group(tmp_path: Path) -> None:
    traces = [
        files.trace(0, 0, step=-1),
        files.trace(0, 1, outcome=Outcome.ENVIRONMENT_ERROR, reward=NAN, error="it crashed"),
        files.trace(0, 2, kind="replaced", parent="x"),
        files.trace(0, 3),
    ]
    write_traces(tmp_path / "t.parquet", traces)
    found = read(tmp_path / "t.parquet")
    assert [int(found.tokens["mask"].row(i).sum()) for i in range(len(found))] == [0, 0, 4]
    assert [int(found.tokens["sampled"].row(i).sum()) for i in range(len(found))] == [4, 4, 4]
    assert (
        found.samples["group"][0] == ""
        and found.samples["split"][0] == "iid"
        and found.declared["traces_left_out"] == 1
    )
    assert np.isnan(found.samples["reward"][1]) and found.samples["error"][1] == "it crashed"


def test_a_run_directory_brings_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    config = 'env = "grid"\nmethod = ["rloo"]\nlayout = "window(1)"\ntemperature = 0.8\nrollouts_per_task = 4\n'
    (tmp_path / "config.toml").write_text(config + '[slots]\nadvantage = "rloo"\ndenominator = "token"\n')
    for step in (2, 10):
        write_traces(tmp_path / f"traces/step-{step:06d}.parquet", [files.trace(0, 0, step)])
    write_traces(tmp_path / "traces/after.parquet", [files.trace(0, 0, -1)])
    found = read(tmp_path, declared={"temperature": 0.5})
    assert found.declared == {
        **{"temperature": 0.5, "rollouts_per_task": 4, "layout": "window(1)", "denominator": "token"},
        **{"environment": "grid", "estimator": "rloo"},
    }
    assert (
        found.where[0] == "after, task 0, rollout 0, turn 0" and found.where[-1] == "step 10, task 0, rollout 0, turn 1"
    )
    (tmp_path / "config.toml").write_text("method = [")
    refused(tmp_path, "TOML")


def test_rows_carry_credit_old_logprobs_and_weights_to_the_tokens_they_belong_to() -> None:
    traces = (files.trace(0, 0), files.trace(0, 1, reward=0.0))
    rows = build_rows(traces, Layout())
    rows[0].columns |= {"advantage": np.float32([1, 2, 3, 4]), "old_logprob": np.float32([-1, -2, -3, -4])}
    rows[1].columns["weight"] = np.float32([0.5, 0.5, 0.5, 0.5])
    batch = Batch([Group(traces[0].task, traces)], scores={traces[1].key: -0.5})
    found = from_rows(rows, batch, estimator="grpo")
    same(found.tokens["advantages"], [NAN, NAN, NAN, 1, 2, NAN, NAN, NAN, 3, 4, NAN], [NAN] * 11)
    same(found.tokens["trainer_logprobs"], [NAN, NAN, NAN, -1, -2, NAN, NAN, NAN, -3, -4, NAN], [NAN] * 11)
    same(found.tokens["weights"], [NAN] * 11, [NAN, NAN, NAN, 0.5, 0.5, NAN, NAN, NAN, 0.5, 0.5, NAN])
    np.testing.assert_array_equal(found.tokens["logprobs"].values, from_traces(traces).tokens["logprobs"].values)
    assert found.samples["score"].tolist() == [1.0, -0.5] and found.samples["reward"].tolist() == [1.0, 0.0]
    assert found.declared["estimator"] == "grpo" and found.where[1] == "step 4, task 0, rollout 1"


def test_verifiers_branches_are_samples_of_one_rollout(tmp_path: Path) -> None:
    found = read(files.verifiers(tmp_path))
    assert len(found) == 4 and found.where[:2] == ["line 1, branch 0", "line 1, branch 1"]
    one, two = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8, 9]
    same(found.tokens["ids"], one, two, one, two)
    same(found.tokens["mask"], *[[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0, 1]] * 2)
    same(found.tokens["sampled"], *[[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0, 1]] * 2)
    same(found.tokens["logprobs"], *[[NAN] * 4 + [-0.5, -0.25, NAN], [NAN] * 4 + [-0.5, -0.25, NAN, -0.125]] * 2)
    same(found.tokens["advantages"], *[[NAN] * 4 + [1, 2, NAN], [NAN] * 4 + [1, 2, NAN, 0]] * 2)
    same(found.tokens["weights"], *[[NAN] * 7, [0] * 7 + [0.5]] * 2)
    assert found.samples["rollout"].tolist() == ["t1", "t1", "t2", "t2"] and found.samples["turn"].tolist() == [
        0,
        1,
        0,
        1,
    ]
    np.testing.assert_equal(found.samples["reward"], [1.0, 1.0, NAN, NAN])  # 1.0 x 0.5 + 0.5 x 1.0; not scored is not 0
    assert found.samples["group"].tolist() == ["g1"] * 4 and found.samples["task"].tolist() == ["grid-3"] * 4
    assert found.samples["version"].tolist() == [5] * 4 and found.samples["stop"][1] == "length"
    assert found.samples["outcome"].tolist() == ["", "", "environment error", "environment error"]
    assert found.samples["error"][2] == "ToolError: down" and found.samples["split"][0] == "train"
    assert found.texts["prompt"][0] == "play\nyou see" and found.texts["completion"][:2] == ["go", "go\nstay"]
    assert found.texts["gold"][0] == "42" and found.texts["messages"][0][3] == {"role": "tool", "content": "you went"}


def test_verifiers_mask_on_scaffold_shows_against_what_was_sampled(tmp_path: Path) -> None:
    trace = files.verifiers_trace()
    trace["nodes"][2]["mask"] = [True, True, True]
    trace["nodes"][2]["advantages"] = [9.0, 1.0, 2.0]
    found = read(written(tmp_path / "traces.jsonl", files.verifiers_episode(traces=[trace])))
    assert found.tokens["mask"].row(0)[4 - 1 : 6].tolist() == [True, True, True]
    assert found.tokens["sampled"].row(0)[3:6].tolist() == [False, True, True]
    assert found.tokens["advantages"].row(0)[3:6].tolist() == [9, 1, 2]


def test_verifiers_judges_and_dropped_compactions_are_not_trained(tmp_path: Path) -> None:
    judge = files.verifiers_trace()
    judge["agent"]["trainable"] = False
    attempt = files.verifiers_trace()
    attempt["nodes"][4]["semantic_parents"] = [{"node": 2, "type": "compaction_attempt"}]
    found = read(written(tmp_path / "traces.jsonl", files.verifiers_episode(traces=[judge, attempt])))
    assert [int(found.tokens["mask"].row(i).sum()) for i in range(4)] == [0, 0, 2, 0]
    assert found.where[2] == "line 1, trace 1, branch 0"


def test_verifiers_without_tokens_or_without_logprobs_says_less_and_claims_nothing(tmp_path: Path) -> None:
    trace = files.verifiers_trace()
    for node in trace["nodes"]:
        node["logprobs"] = []
        node.pop("advantages", None)
    found = read(written(tmp_path / "a.jsonl", trace))  # a line may be a trace without an episode
    assert set(found.tokens) == {"ids", "mask", "weights"}
    for node in trace["nodes"]:
        for name in ("token_ids", "mask", "is_content", "loss_weights"):
            node.pop(name, None)
    found = read(written(tmp_path / "b.jsonl", trace))
    assert found.tokens == {} and found.texts["completion"][0] == "go"


def test_a_sample_that_says_nothing_of_what_was_sampled_gives_no_ground_for_a_finding(tmp_path: Path) -> None:
    silent = files.verifiers_trace()
    for node in silent["nodes"]:
        node |= {"logprobs": []}
    found = read(written(tmp_path / "a.jsonl", files.verifiers_trace(), silent))
    for i in range(4):
        mask = found.tokens["mask"].row(i).tolist()
        assert found.tokens["sampled"].row(i).tolist() == mask and any(mask)


def test_verifiers_v0_steps_with_tokens_are_samples(tmp_path: Path) -> None:
    found = read(files.verifiers_v0(tmp_path))
    assert found.where == ["line 1", "line 2, step 0", "line 2, step 1", "line 3"]
    same(found.tokens["ids"], [], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [])
    same(found.tokens["mask"], [], [0, 0, 1, 0], [0, 0, 0, 0, 0, 1], [])
    same(found.tokens["sampled"], [], [0, 0, 1, 1], [0, 0, 0, 0, 0, 1], [])
    same(found.tokens["logprobs"], [], [NAN, NAN, -0.5, -1], [NAN] * 5 + [-2], [])
    same(found.tokens["advantages"], [], [NAN, NAN, 0.5, 0.5], [NAN] * 6, [])
    assert found.samples["turn"].tolist() == [-1, 0, 1, -1] and found.samples["group"].tolist() == [7] * 4
    assert found.samples["outcome"].tolist() == ["horizon"] * 3 + ["environment error"]
    assert np.isnan(found.samples["reward"][3]) and found.samples["error"][3] == "ToolError"
    assert found.texts["gold"] == ["4"] * 4 and found.texts["completion"][0] == "4"


def test_verl_padding_is_taken_off_and_response_columns_stand_behind_the_prompt(tmp_path: Path) -> None:
    found = read(files.verl(tmp_path))
    same(found.tokens["ids"], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    same(found.tokens["mask"], [0, 0, 1, 0, 1], [0, 0, 0, 1, 1])
    same(found.tokens["trainer_logprobs"], [NAN, NAN, -1, -2, -3], [NAN] * 3 + [-4, -5])
    same(found.tokens["logprobs"], [NAN, NAN, -1.5, 0, -3.5], [NAN] * 3 + [-4.5, -5.5])
    same(found.tokens["advantages"], [NAN, NAN, 0.5, 0.5, 0.5], [NAN] * 3 + [-0.5, -0.5])
    assert found.samples["padded"].tolist() == [2, 2] and "attention" not in found.tokens
    np.testing.assert_allclose(found.samples["reward"], [1.0, 0.25])
    np.testing.assert_allclose(found.samples["score"], [0.8, 0.25], rtol=1e-6)
    assert found.samples["group"].tolist() == ["u1", "u1"] and found.samples["task"].tolist() == ["train/0", "train/1"]
    assert found.texts["gold"] == ["42", "43"] and found.declared == {"temperature": 0.7, "end_ids": 5}


def test_verl_padding_that_is_trained_on_stays_to_be_found(tmp_path: Path) -> None:
    tensors = files.verl_tensors()
    tensors["response_mask"][1, 3] = 1
    tensors["attention_mask"][0, 3] = 0  # a hole
    save_file(tensors, tmp_path / "b.safetensors")
    found = read(tmp_path / "b.safetensors")
    same(found.tokens["ids"], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 0, 0])
    same(found.tokens["attention"], [1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0, 0])
    assert found.tokens["mask"].row(1)[-1] and found.samples["padded"].tolist() == [2, 0]


def test_verl_half_precision_side_files_and_missing_input_ids(tmp_path: Path) -> None:
    tensors = files.verl_tensors()
    del tensors["input_ids"]
    path = tmp_path / "b.safetensors"
    save_file(tensors, path)
    (tmp_path / "b.json").write_text(json.dumps({"non_tensor_batch": {"uid": ["x", "y"], "traj_uid": ["r", "r"]}}))
    header = json.loads(path.read_bytes()[8 : 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]])
    bf16 = tensors["advantages"].view(np.uint32) >> 16
    _patch_bf16(path, header, "advantages", bf16.astype(np.uint16))
    found = read(path)
    same(found.tokens["ids"], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    same(found.tokens["advantages"], [NAN, NAN, 0.5, 0.5, 0.5], [NAN] * 3 + [-0.5, -0.5])
    assert found.samples["group"].tolist() == ["x", "y"] and found.samples["rollout"].tolist() == ["r", "r"]
    assert len(read(tmp_path)) == 2  # the folder: the side file is no second batch


def _patch_bf16(path: Path, header: dict, name: str, values: np.ndarray) -> None:
    """The file again with one tensor as bfloat16, at the end."""
    start = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    data = path.read_bytes()[start:]
    header[name] = {
        "dtype": "BF16",
        "shape": list(values.shape),
        "data_offsets": [len(data), len(data) + values.nbytes],
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data + values.tobytes())


def test_verl_dumps_read_alike_from_lines_and_from_a_table(tmp_path: Path) -> None:
    found = read(files.verl_dump(tmp_path))
    assert found.samples["group"].tolist() == ["q", "q"] and found.samples["rollout"].tolist() == ["q_0", "q_1"]
    assert found.samples["version"].tolist() == [12, 12] and found.texts["gold"] == ["4", "4"]
    np.testing.assert_equal(found.samples["reward"], [1.0, NAN])
    pq.write_table(
        pa.table({"input": ["a", "a"], "output": ["b", "c"], "score": [1, 0], "step": [1, 1]}), tmp_path / "d.parquet"
    )
    table = read(tmp_path / "d.parquet", format="verl")
    assert table.samples["reward"].tolist() == [1.0, 0.0] and table.samples["group"].tolist() == ["1/a"] * 2
    assert table.where == ["row 0", "row 1"] and table.texts["completion"] == ["b", "c"]


def test_trl_tables_have_one_reward_column_per_function_and_groups_of_one_prompt(tmp_path: Path) -> None:
    found = read(files.trl(tmp_path))
    np.testing.assert_equal(found.samples["reward"], [1.5, 0.5, 1.0, NAN])
    assert found.samples["group"].tolist() == [0, 0, 1, 1] and found.texts["completion"] == list("4567")
    same(found.tokens["advantages"], [0.7], [-0.7], [0], [0])
    assert read(files.trl(tmp_path), declared={"rollouts_per_task": 1}).samples["group"].tolist() == [0, 1, 2, 3]
    only = read(files.trl(tmp_path), declared={"rewards": "right"})
    np.testing.assert_equal(only.samples["reward"], [1, 0, 1, NAN])
    refused(files.trl(tmp_path), "'wrong'", declared={"rewards": ["wrong"]})


def test_a_folder_of_tables_is_read_in_the_order_of_its_steps(tmp_path: Path) -> None:
    for step in (10, 9):
        table = files.trl_table().set_column(0, "step", pa.array([step] * 4))
        pq.write_table(table, tmp_path / f"completions_{step}.parquet")
    (tmp_path / "notes.txt").write_text("not data")
    found = read(tmp_path)
    assert found.samples["version"].tolist() == [9] * 4 + [10] * 4
    assert found.where[0] == "completions_9.parquet, row 0" and found.samples["group"].tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]


def test_trl_rollout_dictionaries_of_a_batch_and_of_a_sample(tmp_path: Path) -> None:
    found = read(files.trl_rollout(tmp_path))
    same(found.tokens["ids"], [1, 2, 3, 4], [1, 2, 5])
    same(found.tokens["mask"], [0, 0, 1, 0], [0, 0, 1])
    same(found.tokens["logprobs"], [NAN, NAN, -0.5, 0], [NAN, NAN, -1])
    same(found.tokens["advantages"], [NAN, NAN, 0.5, 0.5], [NAN, NAN, -0.5])
    assert found.samples["reward"].tolist() == [1.0, 0.0] and found.samples["group"].tolist() == [0, 0]
    one = {"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": None}
    same(read(written(tmp_path / "one.jsonl", one)).tokens["mask"], [0, 1, 1])


def test_skyrl_steps_of_a_trajectory_are_turns(tmp_path: Path) -> None:
    found = read(files.skyrl(tmp_path))
    same(found.tokens["ids"], [1, 2, 3], [1, 2, 3, 4, 5, 6], [7, 8, 9])
    same(found.tokens["mask"], [0, 0, 1], [0, 0, 0, 0, 1, 0], [0, 1, 1])
    same(found.tokens["logprobs"], [NAN, NAN, -1], [NAN] * 4 + [-2, -3], [NAN, -4, -5])
    assert found.samples["reward"].tolist() == [0.0, 0.75, 1.0] and found.samples["turn"].tolist() == [0, 1, 0]
    assert found.samples["rollout"].tolist() == ["a_0", "a_0", "b_1"] and found.samples["group"].tolist() == [
        "a",
        "a",
        "b",
    ]
    assert found.samples["stop"].tolist() == ["stop", "length", "stop"] and "sampled" not in found.tokens
    packed = read(files.skyrl_npz(tmp_path))
    same(packed.tokens["ids"], [1, 2, 3], [1, 2, 3, 4, 5, 6])
    same(packed.tokens["mask"], [0, 0, 1], [0, 0, 0, 0, 1, 0])
    assert packed.samples["reward"].tolist() == [0.0, 0.75] and packed.samples["stop"].tolist() == ["stop", "length"]


def test_skyrl_ids_that_come_again_are_other_trajectories_and_groups(tmp_path: Path) -> None:
    one = {"prompt_token_ids": [1], "response_ids": [2], "rewards": 1.0, "trajectory_ids": "a_0"}
    steps = [{**one, "is_last_step": last} for last in (False, True, False, True)]
    found = read(written(tmp_path / "a.jsonl", *steps))
    assert found.samples["turn"].tolist() == [0, 1, 0, 1] and found.samples["group"].tolist() == ["a"] * 4
    assert found.samples["rollout"].tolist() == ["a_0", "a_0", "a_0 (2)", "a_0 (2)"]
    batch = {name: [value] for name, value in one.items()}
    found = read(written(tmp_path / "b.jsonl", batch, batch))
    assert found.samples["rollout"].tolist() == ["a_0", "a_0 (2)"] and found.samples["turn"].tolist() == [-1, -1]
    assert found.samples["group"].tolist() == ["a", "a (batch 1)"]


def test_skyrl_evaluation_dumps(tmp_path: Path) -> None:
    line = {"input_prompt": "2+2?", "output_response": "4", "score": [0.0, 1.0], "stop_reason": "stop"}
    found = read(written(tmp_path / "grid.jsonl", line))
    assert (found.format, found.samples["reward"][0], found.texts["completion"][0]) == ("skyrl", 1.0, "4")


def test_chat_logs_give_a_sample_per_choice_and_no_mask(tmp_path: Path) -> None:
    found = read(files.openai(tmp_path))
    assert found.where == ["line 1, choice 0", "line 1, choice 1", "line 2"]
    same(found.tokens["ids"], [1, 2, 8, 9], [1, 2, 8], [1, 8, 9])
    same(found.tokens["sampled"], [0, 0, 1, 1], [0, 0, 1], [0, 1, 1])
    same(found.tokens["logprobs"], [NAN, NAN, -0.5, -1.5], [NAN, NAN, -0.5], [NAN, -0.5, -1.5])
    assert "mask" not in found.tokens and found.declared == {"top_p": 0.9}
    assert found.samples["stop"].tolist() == ["", "length", ""] and found.samples["rollout"].tolist() == [
        "c1",
        "c1",
        "",
    ]
    assert found.texts["prompt"] == ["2+2?"] * 3 and found.texts["completion"] == ["four", "4", "four"]


def test_sampling_settings_are_declared_only_where_all_requests_agree(tmp_path: Path) -> None:
    record = {"messages": [], "prompt_token_ids": [1], "choices": [{"token_ids": [2]}], "temperature": 1.0}
    found = read(written(tmp_path / "a.jsonl", {**record, "top_p": 0.9}, {**record, "top_p": 1.0}))
    assert found.declared == {"temperature": 1.0}


# ------------------------------------------------------------------------------------------------ files that are none


def test_what_is_no_rollout_is_told_what_each_format_needs(tmp_path: Path) -> None:
    sentence = refused(written(tmp_path / "a.jsonl", {"text": "hello", "label": 1}), "label, text", "--format")
    assert all(f"{name}:" in sentence for name in FORMATS)
    with pytest.raises(UserError, match="format 'nope' does not exist"):
        read(tmp_path / "a.jsonl", format="nope")


@pytest.mark.parametrize(
    ("format", "field"),
    [
        ("verifiers", "nodes"),
        ("verifiers-v0", "completion"),
        ("verl", "output"),
        ("trl", "completion"),
        ("openai", "choices"),
    ],
)
def test_a_record_of_another_format_is_no_empty_sample(format: str, field: str, tmp_path: Path) -> None:
    refused(written(tmp_path / "a.jsonl", {"text": "hello"}), "line 1", f"'{field}'", format=format)


@pytest.mark.parametrize("name", ["a.pkl", "a.pt", "a.bin", "torch.pt", "object.npz"])
def test_pickles_are_refused_with_three_lines_of_advice_and_never_opened(name: str, tmp_path: Path) -> None:
    path = tmp_path / name

    class Bomb:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "it ran"),)

    if name == "torch.pt":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    elif name == "object.npz":
        np.savez(path, input_ids=np.array([Bomb()], object))
    else:
        path.write_bytes(pickle.dumps(Bomb(), protocol=0 if name == "a.pt" else 4))
    refused(path, "save_file", "import json")
    for format in FORMATS:
        refused(path, format=format)
    assert not (tmp_path / "it ran").exists()


def test_pipes_devices_folders_and_links_into_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "a pipe")
    refused(Path("/dev/zero"), "a pipe, a socket or a device")
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop")
    refused(tmp_path / "absent.jsonl", "no file or folder")
    (tmp_path / "folder.jsonl").mkdir()
    refused(tmp_path / "folder.jsonl", "found none")
    (tmp_path / "real").mkdir()
    (tmp_path / "link.jsonl").symlink_to(files.verl_dump(tmp_path / "real"))
    assert len(read(tmp_path / "link.jsonl")) == 2
    with pytest.raises(UserError), opened(tmp_path / "pipe"):  # a file that became a pipe: nobody waits for a writer
        pass
    os.mkfifo(tmp_path / "real/x.jsonl")
    assert len(read(tmp_path / "real")) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[" * 100_000, ["nested"]),
        (b'{"a":' * 100_000, ["nested"]),
        (b'{"input": "a", "input": "b"}', ["line 1", "twice"]),
        (b'{"input": "a\xff"}', ["line 1", "UTF-8"]),
        (b'{"input": ' + b"9" * 5000 + b"}", ["line 1"]),
        (b'{"input": "a", "output": "b", "score": 1' + b"0" * 400 + b"}", ["line 1", "score"]),
        (b'{"input": "a", "output": 3, "score": 1}', ["line 1", "'output'", "text", "the number 3"]),
        (b'{"input": "a", "output": "b", "score": "1"}', ["line 1", "'score'", "a number", "'1'"]),
        (b'{"input": "a", "output": "b", "score": 1, "step": 1.5}', ["line 1", "'step'", "integer"]),
        (b'{"input": "a\x00b", "output": "b", "score": 1}', ["line 1"]),
        (b'{"input": "a"', ["line 1", "JSON"]),
        (b"[1, 2]\n", ["object"]),
        (b"\x00" * 1000, ["none of them"]),
        (b"", ["empty"]),
        (b"\n\n \n", ["empty"]),
        (b"[]", ["no"]),
        (b"{}{}", ["JSON"]),
    ],
)
def test_broken_json_names_file_line_and_field(line: bytes, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(line)
    refused(tmp_path / "a.jsonl", *words, format="verl") if line else refused(tmp_path / "a.jsonl", *words)


def test_numbers_that_are_none_and_lone_surrogates_are_data_not_errors(tmp_path: Path) -> None:
    line = '{"input": "\\ud800 \\u0000", "output": "b", "score": %s}\n'
    (tmp_path / "a.jsonl").write_text("".join(line % score for score in ("NaN", "Infinity", "-1e999", "null")))
    np.testing.assert_equal(read(tmp_path / "a.jsonl").samples["reward"], [NAN, np.inf, -np.inf, NAN])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": [1, 2.5, 3]}, ["nodes[2]", "token_ids[1]", "2.5"]),
        ({"token_ids": [1, True, 3]}, ["token_ids[1]", "True"]),
        ({"token_ids": [1, 2**31, 3]}, ["32 bits"]),
        ({"token_ids": [1, 2**70, 3]}, ["32 bits"]),
        ({"token_ids": "abc"}, ["a list of integers", "'abc'"]),
        ({"token_ids": [1, [2], 3]}, ["token_ids[1]", "a list of 1"]),
        ({"mask": [True]}, ["'mask'", "3 of them", "1 values"]),
        ({"mask": [0, 1, 2]}, ["'mask'", "0 and 1", "2"]),
        ({"logprobs": [-1.0] * 4}, ["'logprobs'", "3 of them"]),
        ({"advantages": [1.0]}, ["'advantages'", "2 of them"]),
        ({"parent": 2}, ["'parent'", "an earlier node"]),
        ({"parent": 99}, ["'parent'"]),
        ({"parent": -1}, ["'parent'"]),
        ({"message": "hi"}, ["'message'", "an object"]),
        ({"message": {"role": 3}}, ["'message'", "role"]),
        ({"sampled": 1}, ["'sampled'", "true or false"]),
        ({"loss_weights": {"rl": [1.0]}}, ["'rl'", "3 of them"]),
    ],
)
def test_a_wrong_field_of_a_node_is_named(change: dict, words: list[str], tmp_path: Path) -> None:
    trace = files.verifiers_trace()
    trace["nodes"][2] |= change
    refused(written(tmp_path / "t.jsonl", trace), "line 1", "nodes[2]", *words)


def test_a_small_graph_of_many_long_branches_is_refused_before_it_is_unfolded(tmp_path: Path) -> None:
    trunk = [files.node(i - 1 if i else None, "user", "", []) for i in range(20_000)]
    leaves = [files.node(19_999, "user", "", []) for _ in range(20_000)]
    refused(written(tmp_path / "t.jsonl", {"nodes": trunk + leaves}), "branches")
    heavy = [files.node(None, "user", "", [1] * 100_000)] + [files.node(0, "user", "", []) for _ in range(5_000)]
    refused(written(tmp_path / "u.jsonl", {"nodes": heavy}), "branches that repeat")
    wordy = [files.node(None, "user", "x" * 1_000_000, [1])] + [files.node(0, "user", "", []) for _ in range(2_000)]
    refused(written(tmp_path / "v.jsonl", {"nodes": wordy}), "unfolds", "--limit")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "I64", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 8]}, ["shape"]),
        ({"dtype": "I64", "shape": [1 << 30], "data_offsets": [0, 8]}, ["bytes inside the file"]),
        ({"dtype": "I64", "shape": [2, 2], "data_offsets": [0, 1 << 60]}, ["inside the file"]),
        ({"dtype": "I64", "shape": [2, 2], "data_offsets": [-8, 24]}, ["two positions"]),
        ({"dtype": "I64", "shape": [2, 2], "data_offsets": [32, 0]}, ["inside the file"]),
        ({"dtype": "F8", "shape": [2], "data_offsets": [0, 2]}, ["dtype", "BF16"]),
        ({"dtype": ["I64"], "shape": [2], "data_offsets": [0, 2]}, ["dtype"]),
        ({"dtype": "I64", "shape": [True], "data_offsets": [0, 8]}, ["shape"]),
        ({"dtype": "I64", "shape": [4], "data_offsets": [0, 32]}, ["'input_ids'", "[batch, length]"]),
        ({"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}, ["'input_ids'", "integers"]),
        ("x", ["input_ids"]),
    ],
)
def test_safetensors_headers_that_promise_what_is_not_there(entry: object, words: list[str], tmp_path: Path) -> None:
    header = json.dumps({"input_ids": entry}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    refused(tmp_path / "a", *words)


def test_overlapping_tensors_and_endless_headers_are_refused(tmp_path: Path) -> None:
    entry = {"dtype": "I64", "shape": [2, 2], "data_offsets": [0, 32]}
    header = json.dumps({f"t{i}": entry for i in range(3)}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    refused(tmp_path / "a", "overlap")
    (tmp_path / "b").write_bytes(struct.pack("<Q", 1 << 50) + header)
    refused(tmp_path / "b", format="verl")


def test_archives_that_unpack_to_far_more_than_they_are(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.npz"
    with (
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("input_ids.npy", "w", force_zip64=True) as file,
    ):
        np.lib.format.write_array_header_1_0(file, {"descr": "|i1", "fortran_order": False, "shape": (400, 1 << 20)})
        for _ in range(400):
            file.write(bytes(1 << 20))
    refused(bomb, "unpacked")
    for shape in ("(1 << 40, 8)", "(1099511627776, 8)", "(-1, 8)", "(0, 1099511627776)", "('a',)"):
        with zipfile.ZipFile(tmp_path / "liar.npz", "w") as archive:
            text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
            archive.writestr(
                "input_ids.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + bytes(64)
            )
        refused(tmp_path / "liar.npz", "input_ids")


def test_shapes_that_do_not_fit_one_another_are_named(tmp_path: Path) -> None:
    for name, shape in {
        "responses": (2, 9),
        "attention_mask": (2, 3),
        "advantages": (1, 4),
        "old_log_probs": (4,),
    }.items():
        tensors = files.verl_tensors() | {name: np.zeros(shape, np.int64)}
        save_file(tensors, tmp_path / "a.safetensors")
        refused(tmp_path / "a.safetensors", f"'{name}'")
    facts = {"uid": json.dumps(["u1"])}
    save_file(files.verl_tensors(), tmp_path / "a.safetensors", facts)
    refused(tmp_path / "a.safetensors", "'uid'", "a list of 2 values")


def test_tables_whose_columns_unfold_are_refused(tmp_path: Path) -> None:
    long = pa.array(["x" * 1_000_000]).dictionary_encode()
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2_000, np.int32)), long.dictionary)
    table = pa.table({"input": column, "output": column, "score": np.zeros(2_000)})
    pq.write_table(table, tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 100_000
    refused(tmp_path / "t.parquet", "unfolds")
    runs = pa.table({"a": pa.array(np.zeros(1 << 25, np.int8))})
    pq.write_table(runs, tmp_path / "runs.parquet", row_group_size=1 << 25)
    refused(tmp_path / "runs.parquet", "at most", "'a'")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"prompt": pa.nulls(1), "completion": ["a"], "advantage": pa.nulls(1)}, None),
        ({"prompt": ["a"], "completion": pa.nulls(1), "advantage": [1.0]}, ["row 0", "completion"]),
        ({"prompt": pa.array(["a"]).dictionary_encode(), "completion": ["a"], "advantage": [1]}, None),
        ({"prompt": [["a"]], "completion": ["a"], "advantage": [1.0]}, ["row 0", "prompt[0]", "role"]),
        ({"prompt": [[{"role": "user", "content": None}]], "completion": [[]], "advantage": [1.0]}, None),
        ({"prompt": [7], "completion": ["a"], "advantage": [1.0]}, ["row 0", "'prompt'", "the number 7"]),
        ({"prompt": ["a"], "completion": ["a"], "advantage": ["1"]}, ["row 0", "'advantage'", "'1'"]),
        ({"prompt": ["a"], "completion": ["a"], "advantage": [1.0], "step": ["x"]}, ["'step'"]),
        ({"prompt": [b"\xff"], "completion": ["a"], "advantage": [1.0]}, ["'prompt'", "a bytes"]),
    ],
)
def test_tables_of_other_types_and_of_nulls(columns: dict, words: list[str] | None, tmp_path: Path) -> None:
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    if words is None:
        assert len(read(tmp_path / "t.parquet")) == 1
    else:
        refused(tmp_path / "t.parquet", *words)


def test_ragged_lists_of_a_batch_are_named(tmp_path: Path) -> None:
    batch = files.skyrl_batch()
    for name, value, words in [
        ("rewards", [1.0], ["'rewards'", "a list of 3"]),
        ("loss_masks", [[1], 1, [1, 1]], ["sample 1", "'loss_masks'"]),
        ("rollout_logprobs", [[-1.0], [[-1.0], -2.0], [-1.0]], ["sample 1", "'rollout_logprobs[0]'"]),
        ("rewards", [[1.0], [1.0], [1.0, 1.0]], ["sample 1", "'rewards'", "2 of them"]),
        ("response_ids", [[3], [5, 6], 8], ["sample 2", "'response_ids'"]),
        ("is_last_step", [0, 1, 1], ["sample 0", "true or false"]),
    ]:
        refused(written(tmp_path / "a.jsonl", {**batch, name: value}), *words)


def test_a_column_of_another_length_than_the_ids_is_left_for_a_check_to_find(tmp_path: Path) -> None:
    masks = [[1], [1], [1, 1]]
    found = read(written(tmp_path / "a.jsonl", {**files.skyrl_batch(), "loss_masks": masks}))
    assert found.tokens["ids"].lengths.tolist() == [3, 6, 3] and found.tokens["mask"].lengths.tolist() == [3, 5, 3]
    assert found.tokens["mask"].row(2).tolist() == [False, True, True]
    assert [finding.count for finding in audit(found, ["A106"]).findings] == [1]


def test_progress_ends_at_the_whole_and_never_goes_back(tmp_path: Path) -> None:
    for name, (writer, _) in WRITERS.items():
        seen: list[float] = []
        read(writer(tmp_path), progress=seen.append)
        assert seen == sorted(seen) and 0 < seen[-1] <= 1, name


def test_a_limit_below_one_and_a_file_without_samples(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one sample"):
        read(files.ours(tmp_path), limit=0)
    write_traces(tmp_path / "none.parquet", [])
    refused(tmp_path / "none.parquet", "found none")
