"""The promise of a run: the same seed gives the same bits, whatever kills it and however slow its workers are."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from assay.protocols import UserError
from assay.rundir import RunDir
from assay.train import Display, resume, train

SMALL = {
    "env": "babyai/GoToRedBallNoDists",
    "model": "tiny-300k",
    "steps": 4,
    "tasks_per_step": 3,
    "rollouts_per_task": 4,
    "learning_rate": 1e-3,
    "max_turn_tokens": 4,
    "evaluation": {"tasks": 6, "ood": False},
    "runtime": {"checkpoint_every": 2},
}


def settings(out: Path, **more: object) -> dict:
    return {**SMALL, "out": str(out), **more}


def bits(out: Path) -> tuple[bytes, bytes]:
    """What must be identical: the final weights and the metrics."""
    return (out / "policy" / "model.safetensors").read_bytes(), (out / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("straight") / "run"
    train(settings(out))
    assert sum(m["tokens_trained"] for m in RunDir(out).read_metrics()) > 0, "nothing was learnt: nothing is compared"
    return out


def test_same_seed_twice_gives_the_same_bits(straight: Path, tmp_path: Path) -> None:
    train(settings(tmp_path / "run"))
    assert bits(tmp_path / "run") == bits(straight)


def test_another_seed_gives_another_run(straight: Path, tmp_path: Path) -> None:
    train(settings(tmp_path / "run", seed=1))
    ours, theirs = bits(tmp_path / "run"), bits(straight)
    assert ours[0] != theirs[0] and ours[1] != theirs[1]


def test_workers_and_their_speed_do_not_change_the_bits(straight: Path, tmp_path: Path) -> None:
    slow = textwrap.dedent(
        """
        import random, time
        from assay.envs.babyai import BabyAI
        class Slow(BabyAI):
            def step(self, action):
                time.sleep(random.random() * 0.004)
                return super().step(action)
        """
    )
    (tmp_path / "slowenv.py").write_text(slow)
    script = "import sys, json; from assay.train import train; values = json.loads(sys.argv[1]); train(values)"
    runs = []
    for workers in (1, 3):
        out = tmp_path / f"run{workers}"
        values = settings(out, env="slowenv:Slow", env_args={"level": "GoToRedBallNoDists"})
        values["runtime"] = {**values["runtime"], "workers": workers}
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        subprocess.run([sys.executable, "-c", script, json.dumps(values)], check=True, env=environment)
        runs.append(bits(out))
    assert runs[0] == runs[1]


def test_resuming_a_finished_run_with_more_steps_equals_the_longer_run(straight: Path, tmp_path: Path) -> None:
    train(settings(tmp_path / "long", steps=6, planned_steps=4))
    train(settings(tmp_path / "short"))
    resume(tmp_path / "short", "+2")
    assert bits(tmp_path / "short") == bits(tmp_path / "long")


def test_config_of_a_run_reruns_it(straight: Path, tmp_path: Path) -> None:
    from assay.config import load

    train({**load(straight), "out": str(tmp_path / "again")})
    assert bits(tmp_path / "again") == bits(straight)


def test_existing_run_directory_is_refused(straight: Path) -> None:
    with pytest.raises(UserError, match="exists already"):
        train(settings(straight))


def test_metrics_have_one_line_a_step_and_timings_stand_apart(straight: Path) -> None:
    run = RunDir(straight)
    metrics, timings = run.read_metrics(), run.read_timings()
    assert [m["step"] for m in metrics] == [1, 2, 3, 4] == [t["step"] for t in timings]
    assert not {"step_s", "update_s", "tokens_per_s"} & set(metrics[0])
    assert metrics[-1]["total_episodes"] == 4 * 3 * 4
    assert all(sum(v for k, v in m.items() if k.startswith("outcome_")) == 12 for m in metrics)


def test_traces_of_a_step_are_what_was_trained_on(straight: Path) -> None:
    traces = RunDir(straight).read_traces(3)
    assert len(traces) == 12
    assert len({t.group_key for t in traces}) == 3
    for group in {t.group_key for t in traces}:
        assert len({t.task for t in traces if t.group_key == group}) == 1


RUNNER = """
import sys, json
import assay.build
from assay.train import train, resume
values = json.loads(sys.argv[1])
print("ready", flush=True)
resume(values["out"]) if sys.argv[2] == "again" else train(values)
"""


def run_until(values: dict, seconds: float) -> bool:
    """Starts or resumes in a process of its own; True if it ended, False if kill -9 ended it after `seconds`."""
    again = "again" if (Path(values["out"]) / "config.toml").exists() else "first"
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER, json.dumps(values), again], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout and process.stderr and process.stdout.readline() == b"ready\n"
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return False
    assert code == 0, process.stderr.read().decode()[-2000:]
    return True


@pytest.mark.slow
def test_killed_at_random_instants_and_resumed_gives_the_same_bits(tmp_path: Path) -> None:
    """At least six kills in warm start, rollout, update and checkpoint writing, wherever the clock finds them."""
    values = settings(tmp_path / "straight", steps=12, warm_start={"episodes": 8})
    values["runtime"] = {"checkpoint_every": 1}
    began = time.monotonic()
    train(values)
    length = time.monotonic() - began
    values["out"] = str(tmp_path / "killed")
    draw, kills = random.Random(time.time_ns()), 0
    while not run_until(values, draw.random() * length / 3 if kills < 6 else 600.0):
        kills += 1
    assert kills >= 6, "the run was too short for the kills that this test is about"
    assert bits(tmp_path / "killed") == bits(tmp_path / "straight")


def test_ctrl_c_saves_and_the_run_goes_on(straight: Path, tmp_path: Path) -> None:
    class Stop(Display):
        def step(self, metrics: dict, timings: dict) -> None:
            if metrics["step"] == 3:
                os.kill(os.getpid(), signal.SIGINT)

    result = train(settings(tmp_path / "run"), Stop())
    assert result.stopped and result.spent["steps"] == 3
    assert not resume(tmp_path / "run").stopped
    assert bits(tmp_path / "run") == bits(straight)
