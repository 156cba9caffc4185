"""Methods by name on the command line, and their settings as flags."""

import tomllib
from pathlib import Path

import fake_methods
import pytest
import tomli_w

from assay.build import build_methods
from assay.cli.flags import split
from assay.cli.layers import Request, read_train
from assay.cli.main import main
from assay.config import dump, resolve
from assay.methods import registry
from assay.protocols import UserError


@pytest.fixture(autouse=True)
def papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PAPERS, "sharp-er", "fake_methods:Sharp")
    monkeypatch.setitem(registry.PAPERS, "estimator", "fake_methods:Estimator")


def ask(text: str) -> Request:
    return read_train(split(text.split()))


@pytest.mark.parametrize(
    "text", ["grpo,sharp-er", "grpo, sharp-er", "grpo sharp-er", "sharp-er", "sharp-er --method grpo,sharp-er"]
)
def test_commas_and_spaces_name_methods_and_a_paper_alone_goes_around_grpo(text: str) -> None:
    assert ask(f"--method {text}").config.method == ["grpo", "sharp-er"]


def test_settings_are_flags_under_the_method_s_name_in_either_spelling() -> None:
    asked = ask("--method rloo,sharp-er --sharp-er.lam 2 --sharp_er.no-keep-all --sharp-er.most 3 --sharp-er.pace tanh")
    given = {"lam": 2.0, "keep_all": False, "most": 3, "pace": "tanh"}
    assert asked.config.method_args == {"sharp-er": given}
    (_, sharp) = build_methods(asked.config)
    assert isinstance(sharp, fake_methods.Sharp) and sharp.lam == 2.0
    assert ask("--method rloo,sharp-er --method-args.sharp-er.lam 2").config.method_args == {"sharp-er": {"lam": 2.0}}


def test_a_file_with_settings_survives_a_flag_and_another_method_takes_none_of_them(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('method = ["rloo,sharp-er"]\n[method_args.sharp-er]\nlam = 3\npace = "tanh"\n')
    assert ask(f"{file} --seed 4").config.method_args == {"sharp-er": {"lam": 3, "pace": "tanh"}}
    assert ask(f"{file} --sharp-er.lam 0.5").config.method_args == {"sharp-er": {"lam": 0.5, "pace": "tanh"}}
    assert ask(f"{file} --method dr-grpo,sharp-er").config.method_args == {"sharp-er": {"lam": 3, "pace": "tanh"}}
    assert ask(f"{file} --method rloo").config.method_args == {}
    assert ask(f"{file} --method sharp-er").config.slots.advantage == "grpo"


def test_a_setting_without_default_may_come_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('method = ["grpo", "fake_methods:Needy"]\n[method_args."fake_methods:Needy"]\nmust = 3.0\n')
    args = ask(f"{file} --Needy.lam 2").config.method_args
    assert args == {"fake_methods:Needy": {"must": 3.0, "lam": 2.0}}
    with pytest.raises(UserError, match=r"--Needy\.must is missing: it has no default"):
        ask("--method fake_methods:Needy --Needy.lam 2")


def test_what_a_run_writes_runs_it_again(tmp_path: Path) -> None:
    config = ask("--method dr-grpo,sharp-er --sharp-er.lam 2 --slots.clip-high 0.3 --seed 3").config
    file = tmp_path / "config.toml"
    file.write_text(tomli_w.dumps(dump(config)))
    assert ask(str(file)).config == config
    assert resolve(tomllib.loads(file.read_text()), "file") == config


def test_help_shows_the_settings_of_the_methods_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--method", "grpo,sharp-er", "--sharp-er.lam", "2", "--help"]) == 0
    page = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--sharp-er.lam FLOAT how sharp; 0 switches it off (paper: 1). (default: 2.0)" in page
    assert "--sharp-er.pace {ratio,tanh} what follows the ratio. (default: ratio)" in page
    assert "Settings of sharp-er" in page
    assert main(["train", "--help"]) == 0
    assert "sharp" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--method grpo,sharper", "method 'sharper' does not exist: did you mean 'sharp-er'?"),
        ("--method sharper", "method 'sharper' is no preset, and the first one must be: did you mean 'sharp-er'?"),
        ("--method grpo,rloo", "'rloo' is a preset, which comes first and once"),
        ("--method sharp-er,dapo", "'dapo' is a preset, which comes first and once"),
        ("--method sharp-er,sharp-er", "'sharp-er' is named twice"),
        ("--method ,", "method is empty"),
        ("--method sharp-er --sharp-er.lamb 1", "unknown option --sharp-er.lamb: did you mean --sharp-er.lam?"),
        ("--method sharp-er --sharp-er.lam much", "--sharp-er.lam much: input should be a valid number"),
        ("--method sharp-er --sharp-er.pace slow", "--sharp-er.pace slow: input should be 'ratio' or 'tanh'"),
        ("--sharp-er.lam 1", "--sharp-er.lam sets sharp-er, which is not among the methods: --method grpo,sharp-er"),
        ("--method rloo --method-args.sharp_er.lam 1", "which is not among the methods: --method rloo,sharp-er"),
        ("--method grpo,nowhere_at_all:Idea", "module 'nowhere_at_all' does not exist"),
    ],
)
def test_a_wrong_name_or_value_is_one_sentence_with_the_nearest_name(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        ask(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        (["grpo", "sharper"], {}, "x: method 'sharper' does not exist: did you mean 'sharp-er'?"),
        (["grpo"], {"sharp-er": {"lam": 1}}, "has settings for 'sharp-er', which is not among the methods grpo"),
        (["grpo"], {"grpo": {"clip_high": 1}}, "has settings for 'grpo', which is a preset: its settings are slots"),
    ],
)
def test_a_configuration_names_what_exists(method: list[str], args: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        resolve({"method": method, "method_args": args}, "x")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (["sharp-er"], {"lamb": 1}, "method 'sharp-er' has no setting 'lamb': did you mean 'lam'?"),
        (["sharp-er"], {"x": 1}, "method 'sharp-er' has no setting 'x': there are lam, pace, keep_all, most"),
        (["sharp-er"], {"lam": 11}, "method 'sharp-er': lam is 11, and must lie in [0, 10]"),
        (["estimator"], {"x": 1}, "method 'estimator' has no setting 'x': there is none"),
        (["estimator", "fake_methods:Other"], {}, "two methods set the advantage: estimator, Other; use one"),
        (["fake_methods:None_such"], {}, "cannot be imported"),
        (["fake_methods:UserError"], {}, "is not a class derived from assay.Method"),
    ],
)
def test_what_cannot_be_composed_is_one_sentence(names: list[str], settings: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        registry.compose(names, {names[0]: settings})
    assert message in str(error.value)


def test_methods_together_are_as_sure_as_the_least_sure() -> None:
    assert registry.fidelity_of(["grpo"]) == "paper"
    assert registry.fidelity_of(["grpo", "sharp-er"]) == "reconstruction"
    assert registry.fidelity_of(["dapo", "estimator", "sharp-er"]) == "inferred"
