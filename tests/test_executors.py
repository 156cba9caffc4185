"""Runs that are killed go on elsewhere, to the same bits; what fails is named."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from assay.config import dump, resolve
from assay.executors import Local, Watch
from assay.seeds import Job, key, read_row

SMALL: dict[str, Any] = {
    "env": "babyai/GoToRedBallNoDists",
    "model": "tiny-300k",
    "steps": 6,
    "tasks_per_step": 2,
    "rollouts_per_task": 4,
    "max_turn_tokens": 4,
    "evaluation": {"tasks": 4, "before": False, "ood": False},
    "runtime": {"checkpoint_every": 2},
}


def job(folder: Path, seed: int = 0, **changes: Any) -> Job:
    config = resolve({**SMALL, **changes, "seed": seed}, "test")
    return Job(f"seed {seed}", dump(config), folder / f"run-{seed}", folder, key(config, "v"), "v")


class Killer(Watch):
    """Kills the process of the first run that is past its third step, once."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.done: list[str] = []
        self.notes: list[str] = []

    def progress(self, job: Job, step: int, share: float, success: float | None) -> None:
        if step >= 3 and not self.killed:
            holder = (job.folder / ".lock").read_text().strip()
            if holder.isdigit():
                os.kill(int(holder), signal.SIGKILL)
                self.killed.append(job.name)

    def finished(self, job: Job) -> None:
        self.done.append(job.name)

    def note(self, text: str) -> None:
        self.notes.append(text)


def numbers(row: dict[str, Any]) -> Any:
    return row["end"], row["curves"], row["steps"], row["key"]


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_checkpoint_on_ray_and_here_to_the_same_bits(tmp_path: Path) -> None:
    ray_executor = pytest.importorskip("assay.ray_executor")
    pytest.importorskip("ray")
    plain = job(tmp_path / "plain")
    assert Local(1).run([plain], Watch()) == {}
    expected = numbers(read_row(plain.row))
    for name, executor in (("local", Local(2)), ("ray", ray_executor.Ray(2))):
        jobs, watch = [job(tmp_path / name, seed) for seed in (0, 1)], Killer()
        assert executor.run(jobs, watch) == {}
        assert len(watch.killed) == 1 and sorted(watch.done) == ["seed 0", "seed 1"]
        assert numbers(read_row(jobs[0].row)) == expected, name
        mine = (jobs[0].folder / "metrics.jsonl").read_bytes()
        assert mine == (plain.folder / "metrics.jsonl").read_bytes(), name


@pytest.mark.slow
def test_a_run_that_cannot_run_is_named_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    good, bad = job(tmp_path, 0, steps=1), job(tmp_path, 1, steps=1, env="no.such:Env")
    failed = Local(2).run([bad, good], Watch())
    assert list(failed) == [bad.row] and "no.such" in failed[bad.row]
    assert good.row.exists() and not bad.row.exists()


def test_the_key_is_of_what_decides_the_numbers_and_of_nothing_else() -> None:
    base = key(resolve(SMALL, "a"), "v")
    same = [{"out": "x"}, {"evaluation": {**SMALL["evaluation"], "before": True}}, {"runtime": {"workers": 3}}]
    assert {key(resolve(SMALL | change, "a"), "v") for change in same} == {base}
    other = [{"seed": 1}, {"steps": 7}, {"slots": {"clip_high": 0.3}}, {"model": "tiny-1m"}, {"budget": "tokens:5k"}]
    keys = {key(resolve(SMALL | change, "a"), "v") for change in other} | {key(resolve(SMALL, "a"), "w")}
    assert len(keys) == len(other) + 1 and base not in keys
