import json
import math
import time

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


def test_without_names_nothing_is_written_beside_the_run_directorys_own_lines(run):
    before = sorted(run.path.iterdir())
    log = Loggers(["jsonl"], run, CONFIG)
    log.log(1, {"success": 0.5})
    log.close()
    assert sorted(run.path.iterdir()) == before


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
        log.log(step, {"success": step / 4, "note": "text", "none": None, "count": step})
    log.close()
    resumed = Loggers(["tensorboard"], run, CONFIG)  # from the checkpoint of step 2
    resumed.log(3, {"success": 0.875, "kl": math.nan})
    resumed.close()
    scalars = tensorboard_scalars(run.path / "tensorboard")
    assert scalars["success"] == [(1, 0.25), (2, 0.5), (3, 0.875)]
    assert scalars["count"] == [(1, 1.0), (2, 2.0)]
    assert math.isnan(scalars["kl"][0][1])
    assert scalars.keys() == {"success", "count", "kl"}


def test_wandb_offline_leaves_its_record_in_the_run(run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = Loggers(["wandb"], run, CONFIG)
    log.log(1, {"success": 0.5})
    log.close()
    (record,) = run.path.glob("wandb/offline-run-*/*.wandb")
    assert record.stem == f"run-{loggers.run_id(run)}"
    for _ in range(200):  # its own process writes the file, and goes on after `finish` has returned
        if b"success" in record.read_bytes():
            return
        time.sleep(0.05)
    pytest.fail("the metric did not reach wandb's record")


def test_a_run_keeps_its_name_for_the_loggers_wherever_it_is_moved(run, tmp_path):
    before = loggers.run_id(run)
    run.path.rename(tmp_path / "moved")
    assert loggers.run_id(RunDir(tmp_path / "moved")) == before


def test_trackio_keeps_its_local_curve_across_a_resume(run, monkeypatch, tmp_path):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    for step in (1, 2):
        log = Loggers(["trackio"], run, CONFIG)
        log.log(step, {"success": step / 4})
        log.close()
    (name,) = SQLiteStorage.get_runs("assay")
    assert name == f"run-{loggers.run_id(run)}"
    curve = [(log["step"], log["success"]) for log in SQLiteStorage.get_logs("assay", name)]
    assert curve == [(1, 0.25), (2, 0.5)], json.dumps(curve)
