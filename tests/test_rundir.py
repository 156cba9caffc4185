import errno
import hashlib
import io
import json
import math
import multiprocessing
import os
import random
import re
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from assay import checkpoints
from assay.checkpoints import Retention, load_checkpoint
from assay.protocols import UserError
from assay.rundir import RunDir
from assay.trace import Outcome, Provenance, TaskKey, Trace, Turn

FORK = multiprocessing.get_context("fork")  # as quick as a function call: torch is imported already
CONFIG = {"env": "babyai/GoToLocal", "seed": 3, "critic": None, "group": {"size": 4, "cap": None}}


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        yield run


def make_trace(step, rollout=0):
    ids = np.array([7, 8, 9], np.int32)
    turn = Turn(
        context_ids=np.array([1, 2], np.int32),
        context_provenance=np.full(2, Provenance.ENVIRONMENT, np.uint8),
        ids=ids,
        provenance=np.zeros(3, np.uint8),
        logprobs=np.array([-0.5, np.nan, -2.0], np.float32),
        entropies=np.array([0.1, np.nan, 0.3], np.float32),
        closing_ids=np.zeros(0, np.int32),
        observation="a red ball",
        action="forward",
        reward=1.0,
        valid=True,
        anchor="ab",
        skill="forward",
        noop=False,
        policy_version=step,
    )
    task = TaskKey("babyai/GoToLocal", "1", "train", 5, "cd")
    prompt = np.array([0], np.int32)
    return Trace(task, step, 0, 0, rollout, prompt, np.ones(1, np.uint8), (turn,), "end", 1.0, Outcome.SUCCESS, 1.0)


def save(run, step, **keywords):
    return run.save_checkpoint(step, {"w": torch.full((3,), float(step))}, {"budget": step * 10}, **keywords)


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------------------------------------- create, config, lock


def test_a_run_is_not_started_over_another(run):
    run.close()
    with pytest.raises(UserError, match="exists already: resume the run"):
        RunDir.create(run.path, CONFIG)


def test_a_folder_with_a_users_files_is_not_taken_for_a_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="exists already"):
        RunDir.create(tmp_path, CONFIG)
    with pytest.raises(UserError, match=r"no config\.toml in it"):
        RunDir(tmp_path)


def test_a_creation_that_was_killed_before_its_config_can_be_repeated(tmp_path):
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".tmp-config.toml").write_text("half")
    with RunDir.create(tmp_path, CONFIG) as run:
        assert run.config["seed"] == 3
        assert not (tmp_path / ".tmp-config.toml").exists()


def test_none_in_the_configuration_is_an_absent_key(run):
    assert run.config == {"env": "babyai/GoToLocal", "seed": 3, "group": {"size": 4}}


def test_an_extended_run_has_its_new_configuration(run):
    run.replace_config({**CONFIG, "steps": 200})
    assert run.config == {"env": "babyai/GoToLocal", "seed": 3, "group": {"size": 4}, "steps": 200}


def test_a_damaged_config_is_named(run):
    (run.path / "config.toml").write_text("seed = = 3")
    with pytest.raises(UserError, match=r"config\.toml: expected TOML"):
        _ = run.config


def forked(function, *arguments):
    """The function's result in another process, or its exception."""
    with ProcessPoolExecutor(1, mp_context=FORK) as pool:
        return pool.submit(function, *arguments).result()


def open_to_write(path):
    RunDir(path, write=True).close()


def hold_the_lock(path, ready, worker_seconds):
    with RunDir(path, write=True):
        FORK.Process(target=time.sleep, args=(worker_seconds,), daemon=True).start()
        ready.set()
        time.sleep(60)


def test_two_processes_cannot_write_one_run_but_others_can_read_it(run):
    with pytest.raises(UserError, match=f"is being written by process {os.getpid()}"):
        forked(open_to_write, run.path)
    assert RunDir(run.path).config["seed"] == 3


def test_the_lock_of_a_killed_process_is_free_as_soon_as_its_workers_are_gone(run):
    run.close()
    ready = FORK.Event()
    holder = FORK.Process(target=hold_the_lock, args=(run.path, ready, 0.5))
    holder.start()
    assert ready.wait(30)
    holder.kill()
    holder.join()
    open_to_write(run.path)


def test_a_worker_that_outlives_its_killed_run_is_reported(run, monkeypatch):
    run.close()
    monkeypatch.setattr("assay.rundir.LOCK_PATIENCE", 0.2)
    ready = FORK.Event()
    holder = FORK.Process(target=hold_the_lock, args=(run.path, ready, 3))
    holder.start()
    assert ready.wait(30)
    holder.kill()
    holder.join()
    with pytest.raises(UserError, match=f"is being written by a process left behind by {holder.pid}"):
        open_to_write(run.path)


def test_a_reader_cannot_write(run):
    with pytest.raises(RuntimeError, match="opened for reading"):
        RunDir(run.path).append_metrics(1, {})


# ------------------------------------------------------------------------------------------------------------- lines


def test_metrics_come_back_with_every_nan_and_infinity(run):
    values = {
        "kl": math.nan,
        "up": math.inf,
        "down": np.float32(-np.inf),
        "third": np.float64(1 / 3),
        "n": np.int64(4),
        "no": None,
    }
    run.append_metrics(1, values)
    line = (run.path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["kl"] is None
    (record,) = run.read_metrics()
    assert math.isnan(record.pop("kl"))
    assert record == {"step": 1, "up": math.inf, "down": -math.inf, "third": 1 / 3, "n": 4, "no": None}


def test_a_torn_last_line_is_dropped_and_does_not_swallow_the_next(run):
    run.append_metrics(1, {"success": 0.5})
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "succ')
    assert [r["step"] for r in RunDir(run.path).read_metrics()] == [1]
    run.close()
    with RunDir(run.path, write=True) as again:
        again.append_metrics(2, {"success": 0.75})
        assert [r["success"] for r in again.read_metrics()] == [0.5, 0.75]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"success": 1}',
        "[" * 100_000,
        '{"step": 1, "nonfinite": {"kl": "x"}}',
        '{"step": 1, "nonfinite": 3}',
    ],
)
def test_a_damaged_line_is_named(run, line):
    run.append_metrics(1, {})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: expected an object with a step"):
        run.read_metrics()


def test_tables_come_back_and_a_step_without_any_has_no_line(run):
    rows = [{"word": "go north", "n": np.int64(3), "share": np.float32(0.5), "odd": math.inf, "no": None, "yes": True}]
    run.append_tables(1, {"Words": rows, "Empty": []})
    run.append_tables(2, {"Empty": []})
    run.append_tables(3, {})
    line = (run.path / "tables.jsonl").read_text()
    assert line.count("\n") == 1 and json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    found = [{"word": "go north", "n": 3, "share": 0.5, "odd": "inf", "no": None, "yes": True}]
    assert run.read_tables() == [{"step": 1, "tables": {"Words": found}}]


@pytest.mark.parametrize("tables", ["", 3, [], {"a": 1}, {"a": [1]}, {"a": [{"b": [1]}]}, {"a": [{"b": {}}]}])
def test_a_line_without_tables_is_named(run, tables):
    (run.path / "tables.jsonl").write_text(json.dumps({"step": 7, "tables": tables}) + "\n")
    with pytest.raises(UserError, match=r"tables\.jsonl: expected tables of rows at step 7"):
        run.read_tables()


def test_cut_back_leaves_the_run_as_it_was_after_the_step(run):
    run.append_metrics(0, {"success": 0.1})
    run.write_traces("before", [make_trace(-1)])
    before = {}
    for step in range(1, 7):
        run.append_metrics(step, {"success": step / 10})
        run.append_timings(step, {"seconds": 1.5})
        run.append_tables(step, {"Words": [{"word": "a", "n": step}]})
        run.write_traces(step, [make_trace(step)])
        save(run, step, retention=Retention(last=9))
        if step == 4:
            before = {p.relative_to(run.path): p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    (run.path / "metrics.jsonl").open("ab").write(b'{"torn')
    run.cut_back(4)
    assert {p.relative_to(run.path): p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before
    assert run.trace_steps() == [1, 2, 3, 4]


def test_traces_come_back(run):
    run.write_traces(12, [make_trace(12, 0), make_trace(12, 1)])
    assert (run.path / "traces" / "step-000012.parquet").is_file()
    traces = run.read_traces(12)
    assert [t.key for t in traces] == [make_trace(12, 0).key, make_trace(12, 1).key]
    np.testing.assert_array_equal(traces[1].turns[0].logprobs, make_trace(12).turns[0].logprobs)


# ------------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_gives_back_what_it_was_given(run):
    tied = torch.arange(6.0).reshape(2, 3)
    tensors = {
        "wte": tied,
        "head": tied,
        "transposed": tied.t(),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "moment": np.array([1e-30, np.nan]),
        "scalar": np.array(3, np.int64),
        "none": torch.zeros(0, 4),
    }
    state = {
        "budget": 12,
        "nan": math.nan,
        "inf": [-math.inf, None, True, "é"],
        "optimiser": {"state": {0: {"exp_avg": torch.ones(2)}}, "$odd": 1},
        "a": {"b": np.array([1], np.uint8)},
        "a.b": np.array([2], np.uint8),
    }
    path = run.save_checkpoint(10, tensors, state)
    assert path.name == "step-000010"
    back, again = run.load_checkpoint(path)
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert type(back[name]) is type(value), name
        assert back[name].dtype == value.dtype, name
        np.testing.assert_array_equal(
            back[name].float() if name == "half" else back[name], value.float() if name == "half" else value
        )
    assert math.isnan(again.pop("nan"))
    assert again.pop("inf") == [-math.inf, None, True, "é"]
    assert torch.equal(again["optimiser"]["state"][0]["exp_avg"], torch.ones(2))
    assert (again["optimiser"]["$odd"], again["budget"]) == (1, 12)
    assert (again["a"]["b"].tolist(), again["a.b"].tolist()) == ([1], [2])


@pytest.mark.parametrize("value", [object(), {1.5: 2}, {1, 2}, b"bytes"])
def test_a_state_that_could_not_come_back_is_refused_when_saved(run, value):
    with pytest.raises(TypeError, match="a checkpoint's state holds JSON values"):
        run.save_checkpoint(1, {}, {"x": value})
    assert list(run.checkpoints.iterdir()) == []


def test_the_last_k_and_the_best_are_kept(run):
    for step, success in enumerate([0.1, 0.9, 0.9, math.nan, 0.3, 0.2], 1):
        save(run, step, metrics={"success": success}, retention=Retention(last=2, best="success"))
    assert checkpoints.checkpoint_steps(run.checkpoints) == [2, 5, 6]
    assert run.best_checkpoint("success").name == "step-000002"
    assert run.best_checkpoint("return") is None


def test_the_same_step_saved_twice_is_the_second(run):
    save(run, 3)
    run.save_checkpoint(3, {}, {"budget": 31})
    assert run.load_checkpoint(run.latest_checkpoint())[1] == {"budget": 31}
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-000003"]


def test_what_stood_aside_when_the_process_was_killed_is_put_back(run):
    os.rename(save(run, 3), run.checkpoints / ".old-step-000003")
    (run.checkpoints / ".tmp-step-000003").mkdir()
    run.close()
    with RunDir(run.path, write=True) as again:
        assert again.load_checkpoint(again.latest_checkpoint())[1] == {"budget": 30}
        assert [p.name for p in run.checkpoints.iterdir()] == ["step-000003"]


def test_latest_skips_damaged_checkpoints_and_says_so(run):
    assert run.latest_checkpoint() is None
    good, flipped, cut, headless = (save(run, step, retention=Retention(last=9)) for step in (1, 2, 3, 4))
    flip_a_byte(flipped / "tensors.safetensors")
    (cut / "state.json").write_text("")
    (headless / "manifest.json").unlink()
    with pytest.warns(UserWarning) as warned:
        assert run.latest_checkpoint() == good
    assert [str(w.message).split(" skipped")[0] for w in warned] == [f"checkpoint step-00000{i}" for i in (4, 3, 2)]
    flip_a_byte(good / "state.json")
    with pytest.warns(UserWarning), pytest.raises(UserError, match=r"no checkpoint in .* is sound"):
        run.latest_checkpoint()


def test_a_damaged_checkpoint_is_refused_with_expected_and_found(run):
    path = save(run, 1)
    expected = hashlib.blake2b((path / "tensors.safetensors").read_bytes(), digest_size=32).hexdigest()
    flip_a_byte(path / "tensors.safetensors")
    found = hashlib.blake2b((path / "tensors.safetensors").read_bytes(), digest_size=32).hexdigest()
    with pytest.raises(UserError, match=f"tensors.safetensors: expected BLAKE2b {expected}, found {found}"):
        load_checkpoint(path)


def fake_checkpoint(folder, tensors: bytes, state: bytes, **changes):
    """A checkpoint of an attacker: hashes fit whatever is in it."""
    path = folder / "step-000001"
    path.mkdir(parents=True)
    (path / "tensors.safetensors").write_bytes(tensors)
    (path / "state.json").write_bytes(state)
    files = {
        name: {"size": len(data), "blake2b": hashlib.blake2b(data, digest_size=32).hexdigest()}
        for name, data in (("tensors.safetensors", tensors), ("state.json", state))
    }
    manifest = {"format": 1, "step": 1, "metrics": {}, "files": files} | changes
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def safetensors_file(header: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


SOUND = safetensors_file(b"{}")
HOSTILE_TENSORS = {
    "header of 2^63 bytes": safetensors_file(b"{}", 2**63),
    "header of 4 GB": safetensors_file(b"{}", 2**32),
    "empty": b"",
    "offsets beyond the end": safetensors_file(b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'),
    "shape that overflows": safetensors_file(
        b'{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}', data=b"0000"
    ),
    "pickle": b"\x80\x04\x95" + b"x" * 40,
    "names that are no list": safetensors_file(b'{"__metadata__":{"numpy":"3"}}'),
}
HOSTILE_STATES = [
    b"[" * 1_000_000,
    b"[]",
    b"\xff",
    b'{"a": NaN}',
    b'{"a": {"$array": "missing"}}',
    b'{"a": {"$float": []}}',
    b'{"a": {"$map": [[[], 1]]}}',
]


def test_a_checkpoint_made_by_hand_loads_when_it_is_sound(tmp_path):
    assert load_checkpoint(fake_checkpoint(tmp_path, SOUND, b'{"a": 1}')) == ({}, {"a": 1})


@pytest.mark.parametrize("name", HOSTILE_TENSORS)
def test_hostile_tensors_are_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"tensors\.safetensors: expected a safetensors file"):
        load_checkpoint(fake_checkpoint(tmp_path, HOSTILE_TENSORS[name], b"{}"))


@pytest.mark.parametrize("state", HOSTILE_STATES)
def test_hostile_states_are_refused(tmp_path, state):
    with pytest.raises(UserError, match=r"state\.json: expected"):
        load_checkpoint(fake_checkpoint(tmp_path, SOUND, state))


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../../secret": {"size": 1, "blake2b": ""}}},
        {"files": {"state.json": {}, "tensors.safetensors": None}},
        {"files": []},
        {"step": 2},
        {"step": "1/../../x"},
        {"format": 2},
        {"metrics": []},
        {"padding": "x" * 100_000},
    ],
)
def test_hostile_manifests_are_refused(tmp_path, changes):
    with pytest.raises(UserError, match=r"expected .*, found"):
        load_checkpoint(fake_checkpoint(tmp_path, SOUND, b"{}", **changes))


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_a_link_out_of_the_checkpoint_is_refused(tmp_path, name):
    path = fake_checkpoint(tmp_path, SOUND, b"{}")
    os.rename(path / name, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path / name)
    with pytest.raises(UserError, match="expected a regular file, found a link"):
        load_checkpoint(path)


def test_a_manifest_cannot_name_a_file_outside_its_folder(tmp_path):
    path = fake_checkpoint(tmp_path, SOUND, b"{}")
    (tmp_path / "outside").write_bytes(b"{}")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../outside"] = manifest["files"]["state.json"]  # size and hash fit
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        UserError, match=r"expected the files state\.json and tensors\.safetensors, found .*\.\./outside"
    ):
        load_checkpoint(path)


def test_a_huge_state_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = fake_checkpoint(tmp_path, SOUND, b'{"a": "' + b"x" * 1000 + b'"}')
    monkeypatch.setattr(checkpoints, "STATE_BYTES", 100)
    with pytest.raises(UserError, match="expected at most 100 bytes, found 1009"):
        load_checkpoint(path)


# ----------------------------------------------------------------------------------------------------- full disk, kill


def write_everything(path, limit):
    """What each kind of write says in a process whose files may have `limit` bytes: beyond, as on a full disk, it fails."""
    refusals = {}
    with RunDir(path, write=True) as run:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        attempts = {
            "metrics": lambda: run.append_metrics(2, {"text": "x" * 4000}),
            "evaluation": lambda: run.write_evaluation({"text": "x" * 4000}),
            "traces": lambda: run.write_traces(1, [make_trace(1, i) for i in range(200)]),
            "tensors": lambda: run.save_checkpoint(1, {"w": np.zeros(10_000)}, {}),
            "state": lambda: run.save_checkpoint(1, {}, {"text": "x" * 4000}),
        }
        for name, attempt in attempts.items():
            try:
                attempt()
            except UserError as error:
                refusals[name] = str(error)
    return refusals


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_when_the_system_refuses_to_write_nothing_is_lost(run):
    run.append_metrics(1, {"success": 0.5})
    run.write_evaluation({"before": {}})
    run.write_traces(1, [make_trace(1)])
    save(run, 1)
    run.close()
    before = contents(run.path)
    refusals = forked(write_everything, run.path, 2000)
    assert list(refusals) == ["metrics", "evaluation", "traces", "tensors", "state"]
    for text in refusals.values():
        assert re.search(r"File too large.*; what was there before is untouched; .*then resume the run", text), text
    assert contents(run.path) == before


def test_a_full_disk_says_so_and_what_to_do(run, monkeypatch):
    run.append_metrics(1, {"success": 0.5})
    before = contents(run.path)

    class Full(io.FileIO):
        def write(self, data):
            if self.tell() > len(before[Path("metrics.jsonl")]):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data[:10])  # the disk takes a little, then no more

    monkeypatch.setattr("builtins.open", lambda path, *args, **keywords: Full(path, "ab"))
    with pytest.raises(UserError, match=r"metrics\.jsonl: No space left on device; .* free some space, then resume"):
        run.append_metrics(2, {"success": 0.75})
    monkeypatch.undo()
    assert contents(run.path) == before


def write_checkpoints_for_ever(path, ready):
    with RunDir(path, write=True) as run:
        latest = run.latest_checkpoint()
        step = run.load_checkpoint(latest)[1]["step"] if latest else 0
        run.cut_back(step)
        ready.set()
        while True:
            step += 1
            run.append_metrics(step, {"twice": 2 * step})
            for _ in range(2):  # the second replaces the first
                run.save_checkpoint(
                    step, {"w": torch.full((100_000,), float(step))}, {"step": step}, retention=Retention(1)
                )


def test_killed_at_any_instant_the_newest_checkpoint_loads_and_agrees_with_the_lines(run):
    run.close()
    draws, last = random.Random(0), 0
    for _ in range(20):
        ready = FORK.Event()
        writer = FORK.Process(target=write_checkpoints_for_ever, args=(run.path, ready))
        writer.start()
        assert ready.wait(30)
        time.sleep(draws.uniform(0.001, 0.1))
        writer.kill()
        writer.join()
        with RunDir(run.path, write=True) as after:
            latest, step = after.latest_checkpoint(), 0
            if latest:
                tensors, state = after.load_checkpoint(latest)
                step = state["step"]
                assert latest.name == f"step-{step:06d}"
                assert torch.equal(tensors["w"], torch.full((100_000,), float(step)))
            assert step >= last, "a checkpoint that an earlier life had finished is gone"
            last = step
            after.cut_back(step)
            assert [(r["step"], r["twice"]) for r in after.read_metrics()] == [(s, 2 * s) for s in range(1, step + 1)]
    assert last > 0, "no life was long enough to write one checkpoint"
