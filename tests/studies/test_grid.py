"""A study's cells run in processes, are kept, and go on; its page, its pictures and its command."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from toy_study import STUDY, ToyOptions

from assay.cli.main import main
from assay.protocols import UserError
from assay.studies import charts, workers
from assay.studies.grid import Cell, Watch, load_rows, row_path, run_cell
from assay.studies.registry import STUDIES, study_named
from assay.studies.report import write
from assay.studies.workers import run_grid

TOY = "toy_study:STUDY"


def run(out: Path, seeds: int = 2, watch: Watch | None = None, **options: object) -> tuple[list, dict[str, str]]:
    asked = ToyOptions(**options)
    cells = STUDY.cells(asked, range(seeds))
    failed = run_grid(STUDY, cells, out, 2, watch or Watch(), TOY)
    return load_rows(out, STUDY, cells), failed


def test_cells_run_in_processes_with_one_thread_and_give_what_they_give_here(tmp_path):
    rows, failed = run(tmp_path / "grid")
    assert not failed and len(rows) == 4
    cells = STUDY.cells(ToyOptions(), range(2))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for cell in cells:
        run_cell(STUDY, cell, tmp_path / "here")
    here = load_rows(tmp_path / "here", STUDY, cells)
    assert [row["result"]["share"] for row in rows] == [row["result"]["share"] for row in here]
    assert all(row["result"]["threads"] == 1 for row in rows)


def test_finished_cells_are_kept_and_further_seeds_are_added(tmp_path):
    run(tmp_path, seeds=1)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    seen: list[str] = []

    class Seen(Watch):
        def begin(self, cells: int, done: int) -> None:
            seen.append(f"{done} of {cells}")

        def finished(self, cell, seconds) -> None:
            seen.append(cell.name)

    rows, _ = run(tmp_path, seeds=2, watch=Seen())
    assert len(rows) == 4 and seen[0] == "2 of 4" and sorted(seen[1:]) == ["a", "b"]
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in kept.items())


def test_a_row_is_found_by_everything_that_decides_it(tmp_path, monkeypatch):
    cells = STUDY.cells(ToyOptions(), [0])
    other = STUDY.cells(ToyOptions(bias=0.4), [0])
    paths = {row_path(tmp_path, STUDY, cell) for cell in [*cells, *other]}
    monkeypatch.setattr(type(STUDY), "version", 2)
    paths |= {row_path(tmp_path, STUDY, cell) for cell in cells}
    assert len(paths) == 6


@pytest.mark.parametrize(
    ("mode", "said"), [("fail", "this coin is lost"), ("bug", "toy_study.py, line"), ("killed", "3 times")]
)
def test_one_failing_cell_leaves_the_others_their_results(tmp_path, mode, said):
    rows, failed = run(tmp_path, mode=mode)
    assert len(rows) == 3 and list(failed) == ["b, seed 1"] and said in failed["b, seed 1"]


def test_a_cell_whose_process_was_killed_is_run_again(tmp_path):
    rows, failed = run(tmp_path, mode="killed-once")
    assert len(rows) == 4 and not failed


def test_a_worker_that_was_killed_between_two_cells_costs_an_attempt_and_not_the_study(tmp_path, monkeypatch):
    real, killed = workers._Worker.take, []

    def take(self, cell, attempt):
        if not killed:
            killed.append(self.process.pid)
            self.process.kill()
            self.process.join()
        real(self, cell, attempt)

    monkeypatch.setattr(workers._Worker, "take", take)
    rows, failed = run(tmp_path)
    assert killed and len(rows) == 4 and not failed


def test_a_killed_study_leaves_no_process_behind_and_goes_on(tmp_path):
    command = [sys.executable, "-m", "assay", "study", TOY, "--mode", "wait", "--seeds", "2", "--jobs", "2"]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths}
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for _ in range(600):
        if len(list((tmp_path / "cells").glob("*.json"))) == 3:
            break
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    for _ in range(100):
        if not any(alive(int(child)) for child in children):
            break
        time.sleep(0.05)
    assert children and not any(alive(int(child)) for child in children)
    assert len(list((tmp_path / "cells").glob("*.json"))) == 3
    rows, _ = run(tmp_path)
    assert len(rows) == 4


def alive(pid: int) -> bool:
    """Not gone and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_record_names_what_is_missing_and_the_page_shows_text_as_text(tmp_path):
    asked = ToyOptions(mode="fail")
    cells = STUDY.cells(asked, range(2))
    failed = run_grid(STUDY, cells, tmp_path, 2, Watch(), TOY)
    record = write(tmp_path, STUDY, asked, cells, load_rows(tmp_path, STUDY, cells), failed, "assay study toy")
    assert record == json.loads((tmp_path / "study.json").read_text())
    assert record["unfinished"] == ["b, seed 1"] and record["cells"] == 4 and record["seeds"] == [0, 1]
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;3&lt;/b&gt; rows" in page and "this coin is lost" in page and "1 of them not finished" in page
    assert (tmp_path / "figures" / "shares.png").read_bytes().startswith(b"\x89PNG")
    first = (tmp_path / "figures" / "shares.svg").read_bytes()
    write(tmp_path, STUDY, asked, cells, load_rows(tmp_path, STUDY, cells), failed, "assay study toy")
    assert (tmp_path / "figures" / "shares.svg").read_bytes() == first


def test_the_command_runs_reports_and_says_its_findings(tmp_path, capsys):
    out = str(tmp_path / "toy")
    assert main(["study", TOY, "--seeds", "1", "--jobs", "1", "--out", out]) == 0
    said = capsys.readouterr()
    assert "falls: holds" in said.out and "share" in said.out and "report.html" in said.err
    assert main(["study", TOY, "--seeds", "1", "--out", out, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["command"] == f"assay study {TOY} --seeds 1" and record["findings"][0]["verdict"] == "holds"
    assert main(["study", TOY, "--seeds", "2", "--mode", "fail", "--out", out]) == 1
    assert "1 of 4 cells have no result" in capsys.readouterr().out


def test_a_dry_run_names_the_cells_and_starts_nothing(tmp_path, capsys):
    assert main(["study", TOY, "--dry-run", "--out", str(tmp_path / "none")]) == 0
    assert "a: seeds 0, 1, 2" in capsys.readouterr().out and not (tmp_path / "none").exists()


def test_a_wrong_name_option_or_value_is_one_sentence(capsys):
    with pytest.raises(UserError, match="did you mean 'demystify'"):
        study_named("demistify")
    with pytest.raises(UserError, match="cannot be imported"):
        study_named("no_such_module:STUDY")
    assert main(["study", TOY, "--bais", "0.3"]) == 2 and "--bias" in capsys.readouterr().err
    assert main(["study", TOY, "--seeds", "-1"]) == 2


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_of_ours_has_help_cells_and_something_to_say_without_rows(name, capsys):
    assert main(["study", name, "--help"]) == 0
    assert "--seeds" in capsys.readouterr().out
    study = study_named(name)
    options = study.options()
    cells = study.cells(options, range(2))
    assert {cell.seed for cell in cells} == {0, 1} and len({(c.name, c.seed) for c in cells}) == len(cells)
    assert all(
        set(cell.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.+-_") for cell in cells
    )
    assert isinstance(study.findings([], options), list) and isinstance(study.figures([], options), dict)


def test_the_interval_of_a_mean_is_students(tmp_path):
    mean, low, high = charts.mean_interval([1.0, 2.0, 3.0, np.nan])
    assert mean == 2.0 and (low, high) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), abs=1e-6)
    assert np.isnan(charts.mean_interval([1.0])[1]) and np.isnan(charts.mean_interval([])[0])


@pytest.mark.parametrize("content", ["", "{}", '{"name": "b", "seed": 0}', "foreign"])
def test_a_row_that_is_cut_or_foreign_is_run_again(tmp_path: Path, content: str) -> None:
    cells = STUDY.cells(ToyOptions(), [0])
    assert run_grid(STUDY, cells, tmp_path, 1, Watch(), "toy_study:STUDY") == {}
    mine, other = (row_path(tmp_path, STUDY, cell) for cell in cells)
    good = mine.read_bytes()
    mine.write_bytes(other.read_bytes() if content == "foreign" else content.encode())
    assert [row["name"] for row in load_rows(tmp_path, STUDY, cells)] == ["b"]
    said: list[str] = []
    watch = Watch()
    watch.note = said.append  # type: ignore[method-assign]
    assert run_grid(STUDY, cells, tmp_path, 1, watch, "toy_study:STUDY") == {}
    assert json.loads(mine.read_bytes())["result"] == json.loads(good)["result"] and "runs again" in said[0]


def test_a_folder_in_use_and_a_cell_that_would_leave_it_are_refused(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use"):
            run_grid(STUDY, STUDY.cells(ToyOptions(), [0]), tmp_path, 1, Watch(), "toy_study:STUDY")
    with pytest.raises(UserError, match="must be of letters"):
        row_path(tmp_path, STUDY, Cell("../x", 0, {}))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        run_grid(STUDY, [], tmp_path / "file", 1, Watch(), "toy_study:STUDY")


def test_an_object_that_is_no_study_is_refused() -> None:
    with pytest.raises(UserError, match=r"has no .*title"):
        study_named("json:loads")
    with pytest.raises(UserError, match="is a class"):
        study_named("collections:Counter")
