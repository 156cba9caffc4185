"""The step benchmark's own side does the work that it claims, and its arithmetic is right. No timings are asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_observations_have_10_to_20_words_whose_number_does_not_depend_on_the_action() -> None:
    from world import observation

    counts = set()
    for task in range(20):
        for turn in range(5):
            own = {len(observation(task, turn, action).split()) for action in range(8)}
            assert len(own) == 1
            counts |= own
    assert counts == set(range(10, 21))


def test_the_world_ends_after_its_turns_and_pays_for_the_last_action_only() -> None:
    from world import ACTIONS, REWARDS, World

    world = World(turns=3)
    world.reset(options={"task": 4})
    results = [world.step(f"<tool_call> {ACTIONS[i]} </tool_call>") for i in (7, 7, 4)]
    assert [r[1:4] for r in results] == [(0.0, False, False), (0.0, False, False), (REWARDS[4], True, False)]
    assert results[-1][4]["success"]


def test_every_answer_is_a_tool_call_of_four_tokens_and_the_counts_are_those_of_the_texts(tmp_path: Path) -> None:
    """Counts by hand: a prompt is <|system|> 10 + 6 words <|end|>, each turn <|user|> words <|end|> <|assistant|>, then 4
    sampled tokens. The policy's own end token closes the answer, so nothing else is between turns."""
    from our_side import measure, parser
    from policy import make_policy
    from world import observation

    make_policy(tmp_path)
    flags = ["--model", str(tmp_path), "--turns", "3", "--prompts", "2", "--rollouts", "3", "--steps", "1"]
    result = measure(parser().parse_args(flags))
    assert len(result["tasks"]) == 4 and len(result["steps"]) == 1  # the warm-up's two tasks, then the measured two
    (step,) = result["steps"]
    other = 0
    for task in result["tasks"][2:]:
        shown = sum(len(observation(task, turn, 0).split()) + 3 for turn in range(3))
        other += 3 * (18 + shown)
    assert step["episodes"] == 6 and step["turns"] == 18
    assert step["sampled_tokens"] == 18 * 4
    assert step["other_tokens"] == other
    assert step["trained_tokens"] <= step["sampled_tokens"]
    assert result["peak_bytes"] >= result["start_bytes"] > 0


def test_rates_and_shares_by_hand() -> None:
    from step import figures

    step = {"step_s": 3.0, "cpu_s": 3.0, "collect_s": 1.0, "update_s": 2.0}
    step |= {"episodes": 1, "turns": 1, "sampled_tokens": 40, "other_tokens": 60}
    side = {"matrix_flops": 1e6, "start_bytes": 5, "peak_bytes": 9, "steps": [step]}
    result = figures([side, side], layer_parameters=1000, head_parameters=500)
    operations = 2 * (1000 * 100 + 500 * 40)
    assert result["sampled_tokens_per_s"] == 40 and result["trained_tokens_per_s"] == 50
    assert result["collect_share"] == pytest.approx(operations / 1e6)
    assert result["update_share"] == pytest.approx(3 * operations / 2 / 1e6)


def test_a_side_that_did_less_work_is_found_out() -> None:
    from step import check_counts

    side = {"episodes": 2, "turns": 4, "sampled_tokens": 16, "other_tokens": 90, "trained_tokens": 16}
    check_counts({"steps": [side]}, {"steps": [dict(side)]}, {"turns": 4})
    with pytest.raises(AssertionError, match="other_tokens: ours 90, TRL's 89"):
        check_counts({"steps": [side]}, {"steps": [side | {"other_tokens": 89}]}, {})
    with pytest.raises(AssertionError, match="turns: 4 where 6 was asked for"):
        check_counts({"steps": [side]}, {"steps": [dict(side)]}, {"turns": 6})
    with pytest.raises(AssertionError, match="left out"):
        check_counts({"steps": [side | {"trained_tokens": 8}]}, {"steps": [side]}, {})


def test_a_pair_that_other_work_disturbed_does_not_make_the_speed_up() -> None:
    from step import _pair, speedups

    def side(step_s: float, cpu_s: float) -> dict:
        return {"steps": [{"step_s": step_s, "cpu_s": cpu_s}]}

    pairs = [_pair(side(8.0, 8.0), side(36.0, 36.0)), _pair(side(8.0, 8.0), side(320.0, 36.0))]
    assert [pair["disturbed"] for pair in pairs] == [False, True]
    assert speedups(pairs, "speedup") == 4.5
    assert speedups(pairs[1:], "speedup") == 40.0  # nothing else to go by
    assert pairs[1]["cpu_speedup"] == 4.5


def test_memory_slope_is_that_of_the_second_half() -> None:
    from memory import summary

    samples = [100, 900, 500, 500, 510, 520, 530, 540]
    result = summary(samples)
    assert (result["start_bytes"], result["peak_bytes"], result["end_bytes"]) == (100, 900, 540)
    assert np.isclose(result["slope_bytes_per_step"], 10)


def test_json_is_one_object_on_standard_output_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import step

    flags = ["--no-trl", "--no-grid", "--json", "--turns", "2", "--pairs", "1", "--prompts", "2", "--rollouts", "4"]
    monkeypatch.setattr(sys, "argv", ["step.py", *flags])
    step.main()
    report = json.loads(capfd.readouterr().out)
    assert report["turns"]["2"]["ours"]["turns"] == 16
    assert report["speedup_vs_trl"] == {}
