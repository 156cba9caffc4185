import json
import math

import pytest

from assay import loggers
from assay.loggers import Loggers
from assay.protocols import UserError
from assay.rundir import RunDir

CONFIG = {"seed": 3, "group": {"size": 4}}


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        yield run


def test_metrics_and_timings_reach_the_run_directory_whatever_is_named(run):
    log = Loggers([], run, CONFIG)
    log.log(1, {"success": 0.5, "note": "text"}, {"seconds": 2.0})
    log.close()
    assert run.read_metrics() == [{"step": 1, "success": 0.5, "note": "text"}]
    assert run.read_timings() == [{"step": 1, "seconds": 2.0}]


def test_an_unknown_logger_is_refused_with_those_there_are(run):
    with pytest.raises(
        UserError, match="logger 'mlflow' does not exist: choose from jsonl, tensorboard, wandb, trackio"
    ):
        Loggers(["mlflow"], run, CONFIG)


def test_a_missing_package_is_named_with_what_installs_it(run, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'assay\[wandb\]'"):
        Loggers(["wandb"], run, CONFIG)


def tensorboard_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_every_number_and_a_resumed_run_continues_its_curve(run):
    pytest.importorskip("tensorboard")
    log = Loggers(["tensorboard", "jsonl"], run, CONFIG)
    for step in (1, 2, 3):
        log.log(step, {"success": step / 4, "note": "text", "none": None}, {"seconds": 2})
    log.close()
    resumed = Loggers(["tensorboard"], run, CONFIG, last_step=2)  # step 3 came after the checkpoint
    resumed.log(3, {"success": 0.875, "kl": math.nan})
    resumed.close()
    scalars = tensorboard_scalars(run.path / "tensorboard")
    assert scalars["success"] == [(1, 0.25), (2, 0.5), (3, 0.875)]
    assert scalars["timing/seconds"] == [(1, 2.0), (2, 2.0)]
    assert math.isnan(scalars["kl"][0][1])
    assert scalars.keys() == {"success", "timing/seconds", "kl"}


def test_wandb_offline_leaves_its_record_in_the_run(run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for last_step in (0, 1):
        log = Loggers(["wandb"], run, CONFIG, last_step)
        log.log(last_step + 1, {"success": 0.5})
        log.close()
    records = list(run.path.glob("wandb/offline-run-*/*.wandb"))
    assert len(records) == 2
    assert {path.stem for path in records} == {f"run-{loggers.run_id(run)}"}  # one run for wandb
    assert all(b"success" in path.read_bytes() for path in records)


def test_trackio_keeps_its_local_curve_across_a_resume(run, monkeypatch, tmp_path):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    for last_step in (0, 1):
        log = Loggers(["trackio"], run, CONFIG, last_step)
        log.log(last_step + 1, {"success": (last_step + 1) / 4})
        log.close()
    (name,) = SQLiteStorage.get_runs("assay")
    assert name == f"run-{loggers.run_id(run)}"
    curve = [(log["step"], log["success"]) for log in SQLiteStorage.get_logs("assay", name)]
    assert curve == [(1, 0.25), (2, 0.5)], json.dumps(curve)
