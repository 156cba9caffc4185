"""Mistakes and edges of a run that would end in a wrong number, a traceback or a lost run."""

import dataclasses
import json
import math
import shutil
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.cli.commands import policy_config
from assay.cli.main import main
from assay.cli.policy import open_policy
from assay.config import WITHOUT_END, load, resolve
from assay.evaluate import evaluate
from assay.facts import mean_of, without_cut
from assay.protocols import UserError
from assay.rows import Batch
from assay.rundir import RunDir
from assay.trace import POLICY, Group, Outcome, TaskKey, Trace, among
from assay.train import Display, resume, share_spent, train

BASE: dict[str, Any] = {
    "env": "babyai/GoToRedBallNoDists",
    "model": "tiny-300k",
    "steps": 2,
    "tasks_per_step": 2,
    "rollouts_per_task": 3,
    "max_turn_tokens": 4,
    "evaluation": {"tasks": 0},
}


def settings(out: Path, **more: Any) -> dict[str, Any]:
    return {**BASE, "out": str(out), **more}


# ------------------------------------------------------------------------------------------------------ numbers


def test_figures_of_a_step_are_those_of_its_traces_cut_episodes_included(tmp_path: Path) -> None:
    """With cut = drop they leave the training, not the books: success over what is left would be 1."""
    train(settings(tmp_path / "run", cut="drop", max_episode_tokens=100, tasks_per_step=3))
    run = RunDir(tmp_path / "run")
    cuts = 0
    for metrics in run.read_metrics():
        traces = [t for t in run.read_traces(metrics["step"]) if t.kind == "root"]
        assert metrics["episodes"] == len(traces) == 9
        assert metrics["success"] == pytest.approx(np.mean([t.success for t in traces]))
        assert metrics["reward"] == pytest.approx(np.mean([t.reward for t in traces]))
        assert metrics["turns"] == pytest.approx(np.mean([len(t.turns) for t in traces]))
        assert metrics["generated_tokens"] == sum(t.sampled_tokens for t in traces)
        assert metrics["outcome_cut"] == metrics["cuts"] == sum(t.outcome is Outcome.CUT for t in traces)
        cuts += metrics["cuts"]
    assert cuts > 0, "nothing was cut: nothing is tested"


def test_entropy_of_a_step_is_the_mean_over_its_sampled_tokens(tmp_path: Path) -> None:
    train(settings(tmp_path / "run", steps=1))
    run = RunDir(tmp_path / "run")
    turns = [turn for trace in run.read_traces(1) for turn in trace.turns]
    known = np.concatenate([turn.entropies[among(turn.provenance, POLICY)] for turn in turns])
    assert run.read_metrics()[0]["entropy"] == pytest.approx(float(known.mean()), rel=1e-6)


def trace(rollout: int, outcome: Outcome) -> Trace:
    nothing = np.zeros(0, np.int32)
    key = TaskKey("env", "1", "train", 7, "hash")
    return Trace(key, 1, 0, 0, rollout, nothing, nothing.astype(np.uint8), (), "", 0.0, outcome, 1.0)


def test_group_of_nothing_but_cut_episodes_is_dropped() -> None:
    mixed = Group(trace(0, Outcome.CUT).task, (trace(0, Outcome.CUT), trace(1, Outcome.SUCCESS)))
    cut = Group(mixed.task, tuple(dataclasses.replace(trace(i, Outcome.CUT), slot=1) for i in range(2)))
    broken = Group(mixed.task, tuple(dataclasses.replace(trace(i, o), slot=2) for i, o in enumerate(
        (Outcome.CUT, Outcome.ENVIRONMENT_ERROR))))  # fmt: skip
    batch = without_cut(Batch([mixed, cut, broken]))
    assert [[t.rollout for t in g.traces] for g in batch.groups] == [[1]]
    assert [t.rollout for t in batch.groups[0].others] == [0]
    assert batch.dropped == [cut, broken]


def test_means_over_updates_weigh_tokens_and_leave_out_updates_that_had_nothing_to_train_on() -> None:
    idle = {"tokens_trained": 0.0, "loss": 0.0, "grad_norm": 0.0}
    small = {"tokens_trained": 10.0, "loss": 1.0, "grad_norm": 2.0, "ratio_per_trained_token": 1.0}
    large = {"tokens_trained": 30.0, "loss": 3.0, "grad_norm": 4.0, "ratio_per_trained_token": 2.0}
    metrics = mean_of([idle, small, large])
    assert metrics["updates"] == 3 and metrics["tokens_trained"] == 40
    assert metrics["loss"] == 2 and metrics["grad_norm"] == 3
    assert metrics["ratio_per_trained_token"] == pytest.approx((10 * 1 + 30 * 2) / 40)
    assert mean_of([idle])["grad_norm"] == 0


def test_eval_of_a_finished_run_gives_the_run_s_own_figures(tmp_path: Path) -> None:
    """At the run's temperature: both, or they are not of the same policy."""
    out = str(tmp_path / "run")
    own = train(settings(tmp_path / "run", steps=1, temperature=0.5, evaluation={"tasks": 5, "ood": False})).after
    config = policy_config(out, None)
    with open_policy(config, out) as bench:
        for name in ("sampled", "greedy"):
            summary, _ = evaluate(bench, "iid", 5, name == "greedy", None, config.temperature)
            assert summary == own[name]


# ------------------------------------------------------------------------------------------------------- resuming


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    train(settings(out, evaluation={"tasks": 2, "ood": False, "greedy": False}))
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    names = [*folder.glob("policy/*"), folder / "metrics.jsonl", folder / "evaluation.json", folder / "config.toml"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


@pytest.mark.parametrize("steps", ["1", "0", "-1", "+-1", "+x", "1.5", ""])
def test_end_that_is_behind_or_is_no_number_is_refused_and_changes_nothing(run: Path, steps: str) -> None:
    before = contents(run)
    with pytest.raises(UserError, match="steps"):
        resume(run, steps)
    assert contents(run) == before


def test_resuming_a_finished_run_changes_nothing(run: Path) -> None:
    before = contents(run)
    resume(run)
    assert contents(run) == before


def test_run_whose_checkpoints_were_deleted_is_not_silently_started_anew(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    with pytest.raises(UserError, match="no checkpoint to go on from"):
        resume(run)
    assert contents(run) == before


@pytest.mark.parametrize("what", ["last line torn", "no file", "lines twice"])
def test_metrics_that_lack_a_step_of_the_checkpoint_are_not_silently_continued(run: Path, what: str) -> None:
    lines = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes({"last line torn": lines[:-9], "no file": b"", "lines twice": lines * 2}[what])
    with pytest.raises(UserError, match=r"metrics\.jsonl has lines of"):
        resume(run, "+1")


def test_run_is_not_continued_on_another_environment(run: Path) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text().replace("GoToRedBallNoDists", "GoToObj"))
    with pytest.raises(UserError, match="was trained on environment babyai/GoToRedBallNoDists"):
        resume(run, "+1")


def test_evaluation_of_another_shape_is_one_sentence(run: Path) -> None:
    (run / "evaluation.json").write_text('{"before": 3}')
    with pytest.raises(UserError, match=r"evaluation\.json"):
        resume(run)


def test_damaged_newest_checkpoint_is_passed_over_to_the_same_bits(run: Path) -> None:
    before = contents(run)
    tensors = sorted((run / "checkpoints").glob("step-*"))[-1] / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.warns(UserWarning, match="skipped"):
        resume(run)
    assert contents(run) == before


def test_extended_run_that_stopped_early_shows_no_figures_or_policy_of_its_old_end(run: Path) -> None:
    class Die(Display):
        def step(self, metrics: Any, timings: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resume(run, "+2", Die())
    assert not (run / "policy").exists() and not (run / "traces" / "after.parquet").exists()
    assert set(RunDir(run).evaluation) == {"before", "warm_start"}
    assert resume(run).after["sampled"]["n"] == 2 and (run / "policy" / "model.safetensors").is_file()


def test_policy_that_was_half_written_is_none(run: Path) -> None:
    (run / "policy").rename(run / ".tmp-policy")
    (run / ".tmp-policy" / "model.safetensors").write_bytes(b"half")
    resume(run)
    assert (run / "policy" / "model.safetensors").stat().st_size > 1000 and not (run / ".tmp-policy").exists()


# ---------------------------------------------------------------------------------------------------- environments

HOSTILE = """
    import os
    import gymnasium
    class Minimal(gymnasium.Env):
        def reset(self, *, seed=None, options=None):
            self.turn = 0
            return "hello", {}
        def step(self, action):
            self.turn += 1
            return f"turn {self.turn}", 1.0, self.turn >= 2, False, {"success": True}
    class Broken(Minimal):
        def step(self, action):
            raise ValueError("no")
    class HalfPair(Minimal):
        def step(self, action):
            return "half a pair \\ud800", 0.0, False, False, {}
    class HalfPairInInfo(Minimal):
        def reset(self, *, seed=None, options=None):
            return "hello", {"goal": "\\ud800"}
    class HalfPairRaised(Minimal):
        def step(self, action):
            raise ValueError("\\ud800")
    class Saying(Minimal):
        def step(self, action):
            return "no success", 0.0, True, False, {"success": "no"}
    class Endless(Minimal):
        def step(self, action):
            return "", 0.0, False, False, {}
    class Teacher(Minimal):
        def step(self, action):
            print("stray")
            return super().step(action)
        def expert(self):
            return "go"
    class EndlessTeacher(Endless, Teacher):
        pass
    class BrokenTeacher(Broken, Teacher):
        pass
    class NoExpert(Teacher):
        def expert(self):
            raise ValueError("no idea")
    class DyingTeacher(Teacher):
        def expert(self):
            os._exit(3)
    class Dies(Minimal):
        def reset(self, *, seed=None, options=None):
            os.kill(os.getpid(), 9)
    class NoStart(Minimal):
        def __init__(self):
            raise SystemExit(3)
    class NoTasks(Minimal):
        def size(self, split):
            return 0
    class OddSize(Minimal):
        def size(self, split):
            return "many"
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "hostileenv.py").write_text(textwrap.dedent(HOSTILE))
    (tmp_path / "numbers.py").write_text("raise RuntimeError('the user has a module of this name')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "hostileenv"


@pytest.mark.parametrize("name", ["Broken", "HalfPair", "HalfPairInInfo", "HalfPairRaised", "Saying"])
def test_environment_that_always_fails_ends_episodes_and_not_the_run(hostile: str, tmp_path: Path, name: str) -> None:
    result = train(settings(tmp_path / "run", env=f"{hostile}:{name}", evaluation={"tasks": 2, "ood": False}))
    assert result.after["sampled"]["success"] is None and result.after["sampled"]["n"] == 0
    assert json.loads(json.dumps(result.as_json(), allow_nan=False))["steps"] == 2
    for metrics in RunDir(tmp_path / "run").read_metrics():
        assert metrics["outcome_environment_error"] == 6 and "success" not in metrics
        assert metrics["tokens_trained" if "tokens_trained" in metrics else "kept_groups"] == 0
    assert all(t.error and math.isnan(t.reward) for t in RunDir(tmp_path / "run").read_traces(1))


def test_environment_with_the_least_info_trains(hostile: str, tmp_path: Path) -> None:
    train(settings(tmp_path / "run", env=f"{hostile}:Minimal", steps=1))
    assert RunDir(tmp_path / "run").read_metrics()[0]["success"] == 1


def test_environment_without_end_is_cut(hostile: str, tmp_path: Path) -> None:
    train(settings(tmp_path / "run", env=f"{hostile}:Endless", steps=1, max_episode_tokens=80))
    assert RunDir(tmp_path / "run").read_metrics()[0]["outcome_cut"] == 6


# --------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rate": math.inf},
        {"temperature": math.inf},
        {"temperature": 1e-300},
        {"grad_clip": math.nan},
        {"slots": {"kl_coefficient": math.inf}},
        {"steps": True},
        {"steps": "5"},
        {"steps": 2.0},
        {"rounds": 101},
        {"seed": 2**64},
        {"rollouts_per_task": 10_000},
        {"runtime": {"step_timeout_s": 1e300}},
        {"evaluation": 5},
    ],
)
def test_value_of_the_wrong_kind_or_size_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(values))):
        resolve(values, "test")


@pytest.mark.parametrize("device", ["banana", "cuda:99"])
def test_device_that_cannot_be_used_is_one_sentence_and_leaves_no_folder(tmp_path: Path, device: str) -> None:
    with pytest.raises(UserError, match=r"runtime\.device"):
        train(settings(tmp_path / "run", runtime={"device": device}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"seed = ", None])
def test_configuration_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "config.toml"
    path.mkdir() if data is None else path.write_bytes(data)
    with pytest.raises(UserError, match=r"config\.toml"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["os:path", "brokenmodule:Thing"])
def test_environment_that_is_no_class_or_no_python_is_one_sentence(
    hostile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "brokenmodule.py").write_text("class Thing(:")
    assert main(["train", "--env", name, "--dry-run"]) == 2
    assert name.partition(":")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("NoStart", "cannot be made"),
        ("NoTasks", "size"),
        ("OddSize", "size"),
        ("EndlessTeacher", "horizon"),
        ("BrokenTeacher", "ValueError: no"),
        ("NoExpert", "no idea"),
        ("DyingTeacher", "exited with 3"),
        ("Minimal", "has no expert"),
    ],
)
def test_environment_that_no_run_can_start_from_is_one_sentence(
    hostile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=says):
        train(settings(tmp_path / "run", env=f"{hostile}:{name}", warm_start={"episodes": 1}))
    assert not (tmp_path / "run").exists()


def test_what_an_environment_prints_in_a_warm_start_is_not_on_standard_output(
    hostile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    result = train(settings(tmp_path / "run", env=f"{hostile}:Teacher", steps=0, warm_start={"episodes": 2}))
    assert result.warm_start["episodes"] == 2 and "stray" not in capfd.readouterr().out


def test_plan_survives_an_environment_that_dies_in_its_reset(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--env", f"{hostile}:Dies", "--model", "tiny-300k", "--dry-run"]) == 0
    assert "FAILS: " in capsys.readouterr().out


def test_a_budget_ends_the_run_with_the_step_that_reaches_it(tmp_path: Path) -> None:
    unlimited = {
        name: value for name, value in settings(tmp_path / "run", budget="episodes:13").items() if name != "steps"
    }
    result = train(unlimited)
    assert result.spent["episodes"] == 18 and result.spent["steps"] == 3 and not result.stopped  # six episodes a step
    with pytest.raises(UserError, match="ends by its budget"):
        resume(tmp_path / "run", "+1")
    config = resolve({"budget": "env-steps:200k"}, "here")
    assert config.steps == WITHOUT_END  # and not after the default number of steps
    assert share_spent(config, {"env_steps": 50_000, "steps": 7}) == 0.25
    for wrong in ("env-steps", "env_steps:5", "steps:0", "tokens:many", "tokens:-5", "tokens:1e99", "tokens:nan"):
        with pytest.raises(UserError, match="UNIT:AMOUNT"):
            resolve({"budget": wrong}, "here")
