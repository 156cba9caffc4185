"""Exactness of every kind of run: the same seed twice, and killed and resumed, give the same bits."""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from assay.rundir import RunDir
from assay.train import Display, resume, train

BASE: dict[str, Any] = {
    "env": "babyai/GoToRedBallNoDists",
    "model": "tiny-300k",
    "steps": 4,
    "tasks_per_step": 3,
    "rollouts_per_task": 4,
    "learning_rate": 1e-3,
    "max_turn_tokens": 4,
    "evaluation": {"tasks": 0},
    "runtime": {"checkpoint_every": 1},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "updates and epochs": {"updates_per_batch": 2, "epochs": 2, "schedule": "cosine"},
    "window": {"layout": "window(2)", "updates_per_batch": 2},
    "mixed groups in rounds": {"slots": {"keep": "mixed"}, "rounds": 3},
    "critic": {"method": ["ppo"], "updates_per_batch": 2},
    "draws and weights of tokens": {
        "method": ["clip-cov"],
        "slots": {"correction": "tis", "cov_low": -9.0, "cov_high": 9.0, "cov_share": 0.1, "overlong_cache": 900},
        "updates_per_batch": 2,
        "epochs": 2,
    },
    "groups of largest spread": {"method": ["starpo-s"], "slots": {"keep_share": 0.7}, "updates_per_batch": 2},
    "KL loss": {"slots": {"kl": "loss", "kl_coefficient": 0.1}, "warm_start": {"episodes": 8}},
    "KL reward": {"slots": {"kl": "reward", "kl_coefficient": 0.1}},
    "cut episodes dropped": {"cut": "drop", "max_episode_tokens": 110, "env_args": {"horizon": 6}, "temperature": 1.5},
    "evaluations between": {"evaluation": {"tasks": 4, "ood": False, "greedy": False, "every": 1}, "temperature": 1.5},
    "papers in one run": {
        "method": ["grpo", "aem", "reuserl", "envrl"],
        "method_args": {"reuserl": {"buffer": 12, "cost": "count_sum"}, "envrl": {"fraction": 0.5}},
        "updates_per_batch": 2,
        "warm_start": {"episodes": 20},
    },
    "EPPO over two environments": {
        "env": "babyai/GoToRedBallNoDists,babyai/GoToLocal",
        "method": ["grpo", "eppo", "task-norm"],
        "updates_per_batch": 2,
        "tasks_per_step": 4,
        "slots": {"keep": "mixed"},
    },
    "steps by their observation": {"method": ["gigpo"], "layout": "window(1)"},
    "critic of turns": {"method": ["ppo-turn"], "updates_per_batch": 2},
    "adapter": {"lora_rank": 2},
    "few at once": {"runtime": {"checkpoint_every": 1, "concurrency": 3, "workers": 2, "delay_ticks": 3}},
}


def settings(out: Path, **more: Any) -> dict[str, Any]:
    return {**BASE, "out": str(out), **more}


def bits(out: Path) -> dict[str, bytes]:
    weights = {path.name: path.read_bytes() for path in sorted((out / "policy").glob("*.safetensors"))}
    assert weights
    tables = out / "tables.jsonl"
    more = {"tables": tables.read_bytes()} if tables.exists() else {}
    return weights | {"metrics": (out / "metrics.jsonl").read_bytes()} | more


class DiesAt(Display):
    """kill -9 of its own process at a named moment: a phase, an update of the warm start, a tick, the end of a step, or
    "call MODULE FUNCTION", which is when that function would begin."""

    def __init__(self, moment: str) -> None:
        self.moment = moment
        if moment.startswith("call "):
            _, module, function = moment.split()
            found = importlib.import_module(module)
            assert hasattr(found, function)
            setattr(found, function, lambda *_: self.die_at(moment))

    def imitation(self, done: int, total: int, loss: float) -> None:
        self.die_at(f"imitation {done}")

    def step(self, metrics: dict, timings: dict) -> None:
        self.die_at(f"step {int(metrics['step'])}")

    def phase(self, name: str) -> None:
        self.die_at(name)

    def episodes(self, progress: Any, part: str = "") -> None:
        self.die_at(f"episodes {part} tick {progress.tick}")

    def die_at(self, moment: str) -> None:
        if moment == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_at(moment: str, values: dict[str, Any], again: bool) -> None:
    """Starts or resumes a run in a process of its own, which dies at that moment."""
    script = (
        f"import sys, json; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        "from test_train_variants import DiesAt, resume, train;"
        "values, moment, again = json.loads(sys.argv[1]);"
        "display = DiesAt(moment);"
        "resume(values['out'], None, display) if again else train(values, display)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps([values, moment, again])], capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]


SWITCHED_OFF: dict[str, dict[str, Any]] = {
    "aem": {"lam": 0.0},
    "reuserl": {"lam": 0.0},
    "envrl": {"lam_sp": 0.0, "lam_id": 0.0},
    "eppo": {"alpha": 0.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["append", "window(1)"])
def test_a_method_that_is_switched_off_gives_the_plain_weights(layout: str, tmp_path: Path) -> None:
    """After five steps of four updates, over two environments: the bits of the policy, for each method alone and all."""
    more = {
        "env": "babyai/GoToRedBallNoDists,babyai/GoToLocal",
        "tasks_per_step": 4,
        "updates_per_batch": 4,
        "steps": 5,
    }
    more |= {"layout": layout}
    train(settings(tmp_path / "plain", **more))
    plain = {name: data for name, data in bits(tmp_path / "plain").items() if name.endswith(".safetensors")}
    for methods in ([name] for name in SWITCHED_OFF):
        out = tmp_path / "-".join(methods)
        train(settings(out, **more, method=["grpo", *methods], method_args={n: SWITCHED_OFF[n] for n in methods}))
        assert {name: bits(out)[name] for name in plain} == plain, methods
    on = {"envrl": {"lam_sp": 0.01}}
    train(settings(tmp_path / "on", **more, method=["grpo", "envrl"], method_args=on))
    assert {name: bits(tmp_path / "on")[name] for name in plain} != plain  # or the comparison would say nothing


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_seed_twice_and_killed_twice_give_the_same_bits(variant: str, tmp_path: Path) -> None:
    more = VARIANTS[variant]
    train(settings(tmp_path / "straight", **more))
    train(settings(tmp_path / "again", **more))
    killed = settings(tmp_path / "killed", **more)
    kill_at("step 2", killed, again=False)
    kill_at("episodes  tick 3", killed, again=True)
    resume(tmp_path / "killed")
    expected = bits(tmp_path / "straight")
    assert sum(m["tokens_trained"] for m in RunDir(tmp_path / "straight").read_metrics()) > 0, "nothing was learnt"
    assert bits(tmp_path / "again") == expected
    assert bits(tmp_path / "killed") == expected


MOMENTS = (
    "imitation 1",
    "call assay.train build_learner",
    "evaluating before training",
    "episodes iid, sampled tick 2",
    "call assay.checkpoints _swap_in",
    "episodes  tick 2",
    "call assay.checkpoints write_file",
    "call assay.checkpoints retain",
    "step 2",
    "evaluating after training",
    "episodes iid, greedy tick 2",
    "call assay.train write_report",
)


@pytest.mark.slow
def test_killed_in_every_phase_and_resumed_gives_the_same_bits_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run that dies a dozen times, each time at another place. The cache of warm starts is its own."""
    more = {
        "steps": 3,
        "warm_start": {"episodes": 8},
        "evaluation": {"tasks": 4, "ood": False},
        "slots": {"kl": "loss", "kl_coefficient": 0.1},
    }
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache one"))
    train(settings(tmp_path / "straight", **more))
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache two"))
    for moment in MOMENTS:
        values = settings(tmp_path / "killed", **more)
        kill_at(moment, values, again=(tmp_path / "killed" / "config.toml").exists())
    resume(tmp_path / "killed")
    assert bits(tmp_path / "killed") == bits(tmp_path / "straight")
    ours, theirs = (RunDir(tmp_path / name).evaluation for name in ("killed", "straight"))
    assert (ours["before"], ours["after"]) == (theirs["before"], theirs["after"])
