"""One episode in the terminal: the expert wins, the keyboard plays, a policy shows its numbers."""

import io
from pathlib import Path

import pytest

from assay.cli.main import main

Text = pytest.CaptureFixture[str]


def test_the_expert_is_shown_turn_by_turn(capsys: Text) -> None:
    assert main(["play", "--env", "countdown", "--task", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "countdown, train task 1" and lines[1].startswith("goal: make ")
    assert any(line.startswith("   > ") for line in lines) and any(line.startswith("   can: ") for line in lines)
    assert lines[-1].startswith("success after ") and lines[-1].endswith("reward 1")


def test_settings_of_the_environment_are_flags_here_too(capsys: Text) -> None:
    assert main(["play", "--env", "countdown", "--env-args.numbers", "4", "--policy", "random", "--seed", "1"]) == 0
    first_observation = capsys.readouterr().out.splitlines()[3].split()[1:]
    assert len(first_observation) == 4


def test_chance_is_keyed(capsys: Text) -> None:
    shown = []
    for seed in ("1", "1", "2"):
        assert main(["play", "--policy", "random", "--seed", seed]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]


def test_the_keyboard_plays_with_numbers_or_words_and_may_leave(capsys: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1\nright\ndance\n"))
    assert main(["play", "--policy", "me"]) == 0
    out = capsys.readouterr().out
    assert "1: left  2: right  3: forward" in out
    assert [line.strip() for line in out.splitlines() if line.startswith("   > ")] == [
        "> left",
        "> right",
        "> dance (not valid)",
    ]
    assert out.splitlines()[-1] == "ended after 3 turns: no more input"


def test_a_number_that_is_itself_an_action_is_that_action(capsys: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("sys.stdin", io.StringIO("50\n"))
    assert main(["play", "--env", "examples.my_env:MyEnv", "--env-args.width", "60", "--policy", "me"]) == 0
    assert "   > 50" in capsys.readouterr().out


def test_a_trained_policy_shows_its_tokens_with_log_probs_and_entropy(finished: Path, capsys: Text) -> None:
    assert main(["play", "--policy", str(finished), "--split", "iid", "--task", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("babyai/GoToRedBallNoDists, iid task 2") and "(H 7.6" in out  # ln 2048 = 7.62: untrained
    assert "turns, reward" in out.splitlines()[-1]


def test_text_of_an_environment_is_never_markup(capsys: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "marked.py").write_text(
        "from assay.envs.countdown import Countdown\n\nclass Marked(Countdown):\n"
        "    def reset(self, **more):\n        seen, info = super().reset(**more)\n"
        "        return '[red]' + seen, {**info, 'goal': '[bold]x'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["play", "--env", "marked:Marked"]) == 0
    out = capsys.readouterr().out
    assert "goal: [bold]x" in out and "1  [red]" in out
