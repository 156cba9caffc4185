"""Methods with settings as arms of a comparison."""

from pathlib import Path

import pytest

from assay.cli.compare import Compare, cautions, plan_of
from assay.cli.main import main
from assay.compare import Plan, arm_of, check, create, load, seed_jobs, start_jobs
from assay.config import resolve
from assay.methods import registry
from assay.protocols import UserError


@pytest.fixture(autouse=True)
def papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PAPERS, "sharp-er", "fake_methods:Sharp")


def made(arms: list[str], *common: tuple[str, list[str]]) -> Plan:
    return plan_of(arms, common, Compare(seeds=2))


def test_an_arm_is_methods_with_settings_of_its_own(tmp_path: Path) -> None:
    plan = made(["grpo,sharp-er --sharp-er.lam 2", "grpo", "sharp-er"])
    first, second, third = plan.arms.values()
    assert (first["method"], first["method_args"]) == (["grpo", "sharp-er"], {"sharp-er": {"lam": 2.0}})
    assert (second["method"], third["method"], third["method_args"]) == (["grpo"], ["grpo", "sharp-er"], {})
    create(tmp_path / "c", plan)
    again = load(tmp_path / "c").arms["grpo,sharp-er --sharp-er.lam 2"]
    assert again == first == arm_of(resolve(again, "x"))
    assert len({job.key for job in start_jobs(tmp_path, plan, tmp_path, "v").values()}) == 1  # one start for all
    assert len({job.key for job in seed_jobs(tmp_path, plan, tmp_path, "v").values()}) == 6


def test_a_setting_for_all_arms_is_for_those_that_have_the_method() -> None:
    for flag in ("sharp-er.lam", "method-args.sharp_er.lam"):
        plan = made(["rloo", "rloo,sharp-er", "sharp-er --sharp-er.lam 3"], (flag, ["2"]))
        settings = [arm["method_args"] for arm in plan.arms.values()]
        assert settings == [{}, {"sharp-er": {"lam": 2.0}}, {"sharp-er": {"lam": 3.0}}]
    with pytest.raises(UserError, match=r"arm 'grpo': --sharp-er\.lam sets sharp-er, which is not among the methods"):
        made(["grpo", "rloo"], ("sharp-er.lam", ["2"]))


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("sharp-er --sharp-er.lam 11", "arm 'sharp-er --sharp-er.lam 11': method 'sharp-er': lam is 11"),
        ("grpo,fake_methods:Estimator,fake_methods:Other", "two methods set the advantage: Estimator, Other"),
    ],
)
def test_what_cannot_be_composed_is_refused_with_its_arm(arm: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        check(made([arm, "grpo"]))
    assert message in str(error.value)


def test_what_methods_say_of_their_arms_is_said_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = ["grpo", "sharp-er", "sharp-er --updates-per-batch 2"]
    assert cautions(made(arms, ("env", ["countdown"]))) == [
        "arm 'sharp-er': sharp-er: one update per batch: nothing to sharpen"
    ]
    (tmp_path / "fake_rest.py").write_text(
        "from assay.envs.countdown import Countdown\n\nclass Rest(Countdown):\n    skills = ('rest',)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "c"
    assert main(["compare", "grpo", "sharp-er", "--env", "fake_rest:Rest", "--out", str(out)]) == 2
    assert capsys.readouterr().err == "assay: arm 'sharp-er': Sharp cannot rest\n"
    assert not out.exists()
