"""The guard says what ruins a run, once, and changes nothing of what is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import main
from assay.guard import Guard, explain
from assay.guard_rules import RULES
from assay.protocols import UserError
from assay.rundir import RunDir

HEALTHY = {
    "success": 0.5,
    "reward": 0.5,
    "entropy": 0.8,
    "invalid_actions": 0.03,
    "grad_norm": 0.2,
    "ratio_per_trained_token": 1.0,
    "approx_kl_per_trained_token": 0.0,
    "episodes": 128.0,
    "environment_errors": 0.0,
    "outcome_environment_error": 0.0,
    "outcome_cut": 0.0,
    "kept_groups": 16.0,
    "dead_groups": 0.25,
    "tokens_trained": 5000.0,
    "updates": 1.0,
    "updates_skipped": 0.0,
    "turns": 8.0,
    "episode_tokens": 200.0,
}


def said(changes: dict[int, dict[str, float]], steps: int = 30) -> list[tuple[int, str]]:
    """(step, code) of a healthy run with a little noise, and some steps that are not."""
    guard = Guard(None, None)  # type: ignore[arg-type]  # the rules see metrics only
    found = []
    for step in range(1, steps + 1):
        record = {
            "step": step,
            **{k: v * (1 + 0.01 * ((step * 7) % 5 - 2)) if k != "updates" else v for k, v in HEALTHY.items()},
        }
        record["ratio_per_trained_token"] = 1.0
        record |= changes.get(step, {})
        written, _ = guard.step(record)
        found += [(line.step, line.code) for line in written]
    return found


def test_a_healthy_run_is_left_in_peace() -> None:
    assert said({}) == []


@pytest.mark.parametrize(
    ("code", "planted"),
    [
        ("G101", {s: {"entropy": 0.01, "success": 0.4} for s in range(20, 31)}),
        ("G102", {s: {"entropy": 3.0, "success": 0.3, "reward": 0.3} for s in range(20, 31)}),
        ("G103", {20: {"invalid_actions": 0.6, "reward": 0.05, "success": 0.05}}),
        ("G112", {s: {"outcome_environment_error": 20.0, "environment_errors": 20.0} for s in range(20, 31)}),
        ("G113", {s: {"outcome_cut": 60.0} for s in range(20, 31)}),
    ],
)
def test_each_fault_is_named_once(code: str, planted: dict[int, dict[str, float]]) -> None:
    codes = [c for _, c in said(planted)]
    assert codes.count(code) == 1, codes


def test_every_rule_teaches() -> None:
    for code in RULES:
        assert "Mend" in explain(code)
    with pytest.raises(UserError, match="G999"):
        explain("G999")


@pytest.mark.slow
def test_the_guard_changes_nothing_of_what_is_learnt(tmp_path: Path) -> None:
    line = "--env babyai/GoToRedBallNoDists --model tiny-300k --steps 4 --tasks-per-step 2"
    common = f"{line} --max-turn-tokens 4 --evaluation.tasks 0".split()
    for name, more in (("with", []), ("without", ["--runtime.guard", "false"])):
        assert main(["train", *common, *more, "--out", str(tmp_path / name)]) == 0
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("with", "without")]
    assert metrics[0] == metrics[1]
    timings: list[Any] = [json.loads(line) for line in (tmp_path / "with" / "timings.jsonl").read_text().splitlines()]
    assert all("guard_s" in record for record in timings)


def test_its_lines_are_cut_back_with_the_run(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", {"env": "x"}) as run:
        for step in (1, 2, 3):
            run.append_metrics(step, {"success": 0.5})
            run.append_guard(step, {"code": "G101", "text": f"step {step}"})
        run.cut_back(2)
        assert [line["step"] for line in run.read_guard()] == [1, 2]


def test_the_page_has_every_rule() -> None:
    page = (Path(__file__).parent.parent / "docs" / "guard.md").read_text()
    assert all(f"### {code}\n" in page for code in RULES)
