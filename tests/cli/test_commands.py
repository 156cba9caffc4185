"""train, resume, eval, report through the real command line, on a real small policy."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
from small_run import SMALL, only_json

import assay
from assay.cli.main import main
from assay.config import resolve
from assay.rundir import RunDir

Text = pytest.CaptureFixture[str]


def fails(arguments: list[str], capsys: Text) -> str:
    """The one sentence."""
    capsys.readouterr()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and last.startswith("assay: ") and "Traceback" not in err
    return last


def test_train_prints_one_json_object_and_the_rest_on_standard_error(
    policy: Path, tmp_path: Path, capsys: Text
) -> None:
    out = tmp_path / "run"
    assert main(["train", "--model", str(policy), "--out", str(out), *SMALL, "--json"]) == 0
    stdout, stderr = capsys.readouterr()
    result = only_json(stdout)
    assert (result["steps"], result["episodes"], result["run"]) == (2, 8, str(out))
    assert result["after"]["sampled"]["n"] == 3 and "greedy" not in result["after"]
    for word in (
        "304k parameters",
        "step 1/2",
        "step 2/2",
        "held-out success before",
        "95 % interval",
        f"assay eval {out}",
    ):
        assert word in stderr
    assert len(RunDir(out).read_metrics()) == 2


def test_a_written_configuration_runs_again_to_the_same_bits(finished: Path, tmp_path: Path) -> None:
    assert main(["train", str(finished), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again/metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_dry_run_prints_plan_and_complete_configuration_and_starts_nothing(tmp_path: Path, capsys: Text) -> None:
    out = tmp_path / "run"
    asked = ["train", "--out", str(out), "--method", "dapo", "--env-args.room", "6", *SMALL]
    assert main([*asked, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "groups with successes and failures only" in text and "2 tasks x 2 rollouts = 4 episodes" in text
    assert resolve(tomllib.loads(text), "printed").slots.keep == "mixed"
    assert main([*asked, "--dry-run", "--json"]) == 0
    printed = only_json(capsys.readouterr().out)
    assert printed["config"]["env_args"] == {"room": 6} and "room 6" in printed["plan"]["environment"]
    assert not out.exists()


def test_resume_extends_a_run_and_eval_and_report_read_it(finished: Path, tmp_path: Path, capsys: Text) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert main(["resume", str(run), "--steps", "+1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert only_json(out)["steps"] == 3 and "step 3/3" in err and "resumed after step 2" in err
    assert main(["eval", str(run), "--split", "ood", "--episodes", "4", "--json"]) == 0
    result = only_json(capsys.readouterr().out)
    assert (result["n"], result["split"], result["greedy"]) == (4, "ood", False)
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html") and (run / "report.html").exists()
    shutil.rmtree(run / "policy")  # as while it runs: its last checkpoint plays
    assert main(["eval", str(run), "--split", "ood", "--episodes", "4", "--json"]) == 0
    assert only_json(capsys.readouterr().out)["outcomes"] == result["outcomes"]


def test_a_model_is_evaluated_on_an_environment(policy: Path, capsys: Text) -> None:
    assert main(["eval", str(policy), "--env", "countdown", "--episodes", "3", "--greedy"]) == 0
    shown = capsys.readouterr().out
    assert "countdown, iid, greedy: success" in shown and "n=3 (95 % over tasks" in shown


def test_a_run_that_is_there_is_not_overwritten(finished: Path, capsys: Text) -> None:
    message = fails(["train", "--out", str(finished), *SMALL], capsys)
    assert f"{finished} exists already: 'assay resume {finished}' goes on with it" in message


def test_a_corrupt_checkpoint_is_named(finished: Path, tmp_path: Path, capsys: Text) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for path in run.glob("checkpoints/*/tensors.safetensors"):
        path.write_bytes(path.read_bytes()[:-100])
    assert str(run) in fails(["resume", str(run), "--steps", "+1"], capsys)


def without_template(policy: Path, folder: Path) -> Path:
    shutil.copytree(policy, folder)
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "{policy}", "--max-episode-tokens", "5"], "leave no room in a context of 5"),
        (["--model", "{plain}"], "has no chat template"),
        (["--model", "{tmp}/nothing"], "nothing"),
        (["--model", "{policy}", "--layout", "window(x)"], "layout is 'append' or 'window(K)'"),
        (["--model", "{policy}", "--tasks-per-step", "9", "--env", "conftest_env:Few"], "lower it to 3"),
    ],
)
def test_what_cannot_be_trained_leaves_no_folder_behind(
    more: list[str], message: str, policy: Path, tmp_path: Path, capsys: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conftest_env.py").write_text(FEW)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {"policy": policy, "tmp": tmp_path, "plain": without_template(policy, tmp_path / "plain")}
    out = tmp_path / "run"
    arguments = ["train", "--out", str(out), *SMALL, *(word.format(**names) for word in more)]
    assert message in fails(arguments, capsys)
    assert not out.exists()


FEW = """
from assay.envs.countdown import Countdown

class Few(Countdown):
    def size(self, split):
        return 3
"""


def test_ctrl_c_ends_after_the_step_and_resume_goes_on(policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "assay", "train", "--model", str(policy), "--out", str(out), *SMALL, "--json"]
    many = [*command, "--steps", "500", "--runtime.checkpoint-every", "500"]
    process = subprocess.Popen(many, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stderr is not None and process.stdout is not None
    for line in process.stderr:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGINT)
    said, printed = process.stderr.read(), process.stdout.read()
    assert process.wait() == 130
    result = json.loads(printed)
    assert result["stopped"] and 1 <= result["steps"] < 500 and "Traceback" not in said
    assert f"assay resume {out}" in said
    with RunDir(out) as run:
        checkpoint = run.latest_checkpoint()
    assert checkpoint is not None and int(checkpoint.name.removeprefix("step-")) == result["steps"]
    assert main(["resume", str(out), "--steps", str(result["steps"] + 1)]) == 0


def test_ctrl_c_before_anything_ran_leaves_nothing(policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "assay", "train", "--model", str(policy), "--out", str(out), *SMALL]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job would be deaf to it
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("building"):
            break
    process.send_signal(signal.SIGINT)
    said = process.stderr.read()
    assert process.wait() == 130 and said == "assay: interrupted\n"
    assert not out.exists()


def test_the_python_api_is_lazy_complete_and_independent_of_import_order() -> None:
    from assay.train import Trainer

    assert callable(assay.train) and assay.train.Trainer is Trainer  # type: ignore[attr-defined]
    for name in assay.__all__:
        assert getattr(assay, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        assay.trian  # type: ignore[attr-defined]  # noqa: B018
