"""The grammar of the command line, and help that tells the truth about it."""

import pytest

from assay.cli.flags import Help, Line, interpret, leaves, read, show_help, split
from assay.cli.layers import read_train
from assay.config import RunConfig, Section
from assay.protocols import UserError


def keys(text: str) -> dict:
    return interpret(split(text.split()), RunConfig, "train")


def test_flags_become_typed_nested_keys() -> None:
    assert keys("--steps 7 --slots.clip-high 0.3 --warm_start.noise=0.5 --layout window(2)") == {
        "steps": 7,
        "slots": {"clip_high": 0.3},
        "warm_start": {"noise": 0.5},
        "layout": "window(2)",
    }


def test_a_list_ends_at_the_next_flag_and_may_be_empty() -> None:
    assert keys("--method grpo a:B c:D --steps 1")["method"] == ["grpo", "a:B", "c:D"]
    assert keys("--runtime.loggers --steps 1")["runtime"] == {"loggers": []}


@pytest.mark.parametrize(
    ("text", "value"),
    [("--evaluation.ood", True), ("--evaluation.no-ood", False), ("--evaluation.ood false", False)],
)
def test_switches(text: str, value: bool) -> None:
    assert keys(text) == {"evaluation": {"ood": value}}


def test_none_means_absent_only_where_absence_is_allowed() -> None:
    assert keys("--slots.dual-clip None") == {"slots": {"dual_clip": None}}
    with pytest.raises(UserError, match="--steps None: input should be a valid integer"):
        keys("--steps None")


def test_a_negative_number_is_a_value_not_a_flag() -> None:
    assert keys("--steps -1") == {"steps": -1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--step 3", "unknown option --step: did you mean --steps?"),
        ("--clip-high 3", "did you mean --slots.clip-high?"),
        ("--evaluation.tsaks 3", "did you mean --evaluation.tasks?"),
        ("--zzz", "'assay train --help' lists all"),
        ("--steps", "--steps needs a value"),
        ("--steps 3 4", "--steps takes one value, not 2 (3 4): take '4' out"),
        ("--steps x", "--steps x: input should be a valid integer"),
        ("--steps 2.5", "--steps 2.5: input should be a valid integer"),
        ("--slots.gate foo", "--slots.gate foo: input should be 'ppo'"),
        ("--evaluation.ood maybe", "--evaluation.ood is true or false, not 'maybe'"),
        ("--no-steps", "unknown option --no-steps"),
    ],
)
def test_mistakes_are_named_with_the_nearest_right_thing(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        keys(text)
    assert message in str(error.value)


def test_every_field_is_a_flag_of_the_help_page_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    asked = read_train(split(["--env", "countdown"]))
    model = asked.model
    assert show_help(Help("train", "About.", ("train --steps 3",)), model, asked.shown()) == 0
    page = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name in leaves(model):
        assert f"--{name.replace('_', '-')}" in page
    for name, field in RunConfig.model_fields.items():
        if name not in ("env_args", "method_args"):
            assert " ".join((field.description or "?").split()) in page
    assert "assay train --steps 3" in page


class Small(Section):
    run: str
    """Where."""
    steps: int = 3
    """How many."""


def test_positional_arguments_fill_their_fields() -> None:
    page = Help("resume", "", (), ("run",))
    assert read(split(["x", "--steps", "4"]), Small, page) == Small(run="x", steps=4)
    with pytest.raises(UserError, match="RUN is missing"):
        read(Line([], []), Small, page)
    with pytest.raises(UserError, match="unexpected 'y'"):
        read(split(["x", "y"]), Small, page)
