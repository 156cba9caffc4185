"""Templates and examples: what they print to type next does run."""

import shlex
from pathlib import Path

import pytest
from small_run import ROOT, SMALL, only_json

from assay.cli.main import main
from assay.cli.new import names
from assay.protocols import UserError
from assay.rundir import RunDir

TINY = [*SMALL[2:], "--steps", "1"]


@pytest.mark.parametrize("kind", ["env", "method"])
def test_what_new_writes_runs_as_it_is(
    kind: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["new", kind, f"fresh-{kind}", "--json"]) == 0
    written = only_json(capsys.readouterr().out)
    assert written["file"] == f"fresh_{kind}.py"
    for command in written["next"]:
        arguments = shlex.split(command)[1:]
        more = ["--model", str(policy), *TINY, "--out", "run"] if arguments[0] == "train" else []
        assert main([*arguments, *more]) == 0
    assert main(["new", kind, f"fresh-{kind}"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_examples_run_together(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "run"
    command = "train --env examples.my_env:MyEnv --method grpo,examples.my_method:MyMethod --warm-start.episodes 4"
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    more = ["--MyMethod.price", "0.25", "--model", str(policy), "--out", str(out), *TINY]
    assert main([*command.split(), *more]) == 0
    (metrics,) = RunDir(out).read_metrics()
    assert metrics["turn_price"] == 0.25 * metrics["turns"]


@pytest.mark.parametrize("split", ["train", "iid", "ood"])
def test_the_example_environment_keeps_the_contract(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from examples.my_env import MyEnv

    env, hashes = MyEnv(), set()
    for task in range(50):
        observation, info = env.reset(options={"task": task, "split": split})
        assert (observation, info["hash"]) == (lambda o, i: (o, i["hash"]))(
            *env.reset(options={"task": task, "split": split})
        )
        hashes.add(info["hash"])
        ended = horizon = False
        while not (ended or horizon):
            observation, reward, ended, horizon, info = env.step(env.expert())
        assert info["success"] and reward == 1.0  # halving 8 numbers takes at most 4 guesses
    others = {
        env.reset(options={"task": task, "split": other})[1]["hash"]
        for other in {"train", "iid", "ood"} - {split}
        for task in range(200)
    }
    assert not hashes & others


@pytest.mark.parametrize("spelling", ["my-env", "my_env", "MyEnv", "myEnv"])
def test_spellings_of_a_name(spelling: str) -> None:
    assert names(spelling) == ("my_env", "MyEnv")


@pytest.mark.parametrize("name", ["", "3d", "a/b", "../x", "class", "é!"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UserError, match="is no name for a class"):
        names(name)
