"""Presets, files and flags: who wins, and that nothing of another environment or method is mixed in."""

import inspect
from pathlib import Path

import pytest
import tomli_w

from assay.cli import layers
from assay.cli.flags import split
from assay.cli.layers import Request, read_train
from assay.cli.signature import parameters
from assay.config import dump
from assay.envs.registry import ENVIRONMENTS, _load
from assay.protocols import UserError


def ask(text: str) -> Request:
    return read_train(split(text.split()))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The complete configuration of a run of dr-grpo on a room of 5, one slot set by hand."""
    asked = ask("--env babyai/GoToObj --env-args.room 5 --method dr-grpo --slots.clip-high 0.4 --steps 9")
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(dump(asked.config.model_copy(update={"planned_steps": 9}))))
    return path


def test_preset_under_file_under_flags(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quick.toml").write_text('# Quick.\nsteps = 2\nenv = "countdown"\nenv_args = {numbers = 4}\nseed = 5\n')
    monkeypatch.setattr(layers, "PRESET_FOLDER", tmp_path)
    assert ask("--preset quick").config.steps == 2
    assert ask("--preset quick --steps 3").config.steps == 3
    both = tmp_path / "small.toml"
    both.write_text("steps = 4\n")
    asked = ask(f"{both} --preset quick").config
    assert (asked.steps, asked.seed, asked.env_args) == (4, 5, {"numbers": 4})
    with pytest.raises(UserError, match="preset 'quik' does not exist: did you mean 'quick'"):
        ask("--preset quik")


def test_a_file_is_taken_whole(file: Path) -> None:
    config = ask(str(file)).config
    assert (config.env_args, config.slots.advantage, config.slots.clip_high) == ({"room": 5}, "dr-grpo", 0.4)


def test_a_run_directory_is_copied_to_another_place_a_file_goes_where_it_says(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(f'out = "{run}"\n' + file.read_text())
    assert ask(str(run)).config.out is None
    assert ask(str(run / "config.toml")).config.out == str(run)


def test_another_method_takes_its_own_slots_but_keeps_those_set_by_hand(file: Path) -> None:
    slots = ask(f"{file} --method rloo").config.slots
    assert (slots.advantage, slots.denominator, slots.clip_high) == ("rloo", "token", 0.4)


def test_another_environment_takes_none_of_the_old_ones_settings(file: Path) -> None:
    assert ask(f"{file} --env countdown").config.env_args == {}
    assert ask(f"{file} --env babyai/GoToObj --env-args.horizon 7").config.env_args == {"room": 5, "horizon": 7}


def test_a_copied_run_with_another_length_plans_anew(file: Path) -> None:
    assert ask(str(file)).config.planned_steps == 9
    assert ask(f"{file} --steps 20").config.planned_steps is None


def test_settings_of_an_environment_are_typed_flags_with_the_nearest_name() -> None:
    assert ask("--env-args.room 10").values["env_args"] == {"room": 10}
    assert ask("--env textworld-cooking --env-args.cook None --env-args.open false").values["env_args"] == {
        "cook": None,
        "open": False,
    }
    with pytest.raises(UserError, match=r"unknown option --env-args.rom: did you mean --env-args.room"):
        ask("--env-args.rom 10")
    with pytest.raises(UserError, match=r"unknown option --env-args.level"):  # fixed by the environment's name
        ask("--env-args.level GoToObj")
    with pytest.raises(UserError, match=r"--env-args.room x: input should be a valid integer"):
        ask("--env-args.room x")


def test_settings_of_a_method_of_ones_own_go_by_its_class_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    for flag in ("--MyMethod.price", "--method-args.MyMethod.price"):
        asked = ask(f"--method grpo examples.my_method:MyMethod {flag} 0.5")
        assert asked.values["method_args"] == {"examples.my_method:MyMethod": {"price": 0.5}}
        assert asked.shown().MyMethod.price == 0.5  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"did you mean --MyMethod.price"):
        ask("--method grpo examples.my_method:MyMethod --method-args.MyMethod.prize 0.5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--env babyai/GoToLocl", "environment 'babyai/GoToLocl' does not exist: did you mean 'babyai/GoToLocal'"),
        ("--env nowhere.at_all:Env", "cannot be imported"),
        ("--method grpp", "method 'grpp' is no preset"),
        ("--steps -1", "command line: steps = -1"),
        ("missing.toml", "missing.toml does not exist"),
        ("a.toml b.toml", "unexpected 'b.toml'"),
    ],
)
def test_mistakes_name_what_and_where(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        ask(text)
    assert message in str(error.value)


def test_a_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("stepz = 3\n")
    with pytest.raises(UserError, match=r"a\.toml: unknown key 'stepz'; did you mean 'steps'"):
        ask(str(path))
    path.write_text("steps = \n")
    with pytest.raises(UserError, match=r"a\.toml is not valid TOML"):
        ask(str(path))


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_what_the_source_says_is_what_python_says(name: str) -> None:
    path = ENVIRONMENTS[name].path
    real = inspect.signature(_load(path)).parameters
    assert [(p.name, p.default) for p in parameters(path)] == [(p.name, p.default) for p in real.values()]


def test_a_class_without_its_own_init_is_asked_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heirs.py").write_text(
        "from dataclasses import dataclass\n\nclass A:\n    def __init__(self, x: int = 3, y=None): ...\n\n"
        "class B(A): ...\n\n@dataclass\nclass C:\n    z: float = 0.5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [(p.name, p.type, p.default) for p in parameters("heirs:B")] == [("x", int, 3), ("y", None, None)]
    assert [(p.name, p.type, p.default) for p in parameters("heirs:C")] == [("z", float, 0.5)]
    with pytest.raises(UserError, match="'heirs:D' cannot be imported"):
        parameters("heirs:D")


@pytest.mark.parametrize("name", sorted(layers.presets()))
def test_every_preset_resolves_and_says_what_it_is_for(name: str) -> None:
    assert layers.presets()[name]
    assert ask(f"--preset {name} --seed 3").config.seed == 3
