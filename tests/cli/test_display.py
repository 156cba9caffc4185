"""The display: what it says in a terminal and in a log, and that trouble is never silent."""

import io
import math

import pytest
from rich.console import Console

from assay.cli.display import BARS, TerminalDisplay, sparkline
from assay.cli.plan import count, duration, estimate, slots_in_words
from assay.cli.tables import held_out_table
from assay.config import RunConfig, Slots
from assay.methods.presets import PRESETS
from assay.rollout import Progress

RATE = {"success": 0.25, "low": 0.2, "high": 0.31, "n": 200, "outcomes": {"success": 50}}


def metrics(step: int, **more: float) -> dict[str, float]:
    return {
        "step": step,
        "success": 0.5,
        "reward": 0.5,
        "entropy": 1.25,
        "clip_low_per_trained_token": 0.01,
        "clip_high": 0.02,
        **more,
    }


def timings(seconds: float) -> dict[str, float]:
    return {
        "step_s": seconds,
        "model_s": seconds / 2,
        "env_wait_s": seconds / 10,
        "update_s": seconds / 4,
        "tokens_per_s": 9.0,
    }


def play(terminal: bool) -> str:
    out = io.StringIO()
    display = TerminalDisplay(
        Console(file=out, force_terminal=terminal, width=120, highlight=False, soft_wrap=True), 10
    )
    display.phase("evaluating before training")
    display.episodes(Progress(1, 2, 3, 5, 70), "iid, sampled")
    display.evaluated("before", {"sampled": RATE, "ood": {"greedy": RATE}})
    for step in (1, 2, 3):
        display.step(metrics(step), timings(60.0))
    display.step(metrics(4, environment_errors=2, outcome_cut=3, approx_kl_per_trained_token=0.125), timings(60.0))
    display.close()
    return out.getvalue()


def test_in_a_log_each_step_is_one_aligned_line() -> None:
    lines = play(terminal=False).splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 4 and all("\x1b" not in line for line in lines)
    assert steps[0].startswith("step  1/10  success 0.500  reward  0.500  entropy 1.250  kl -  clip 3.0%")
    assert "model 50%, environment 10%, update 25%" in steps[0] and steps[0].endswith("left ...")
    assert steps[1].endswith("left 8 min")  # 8 steps of a minute
    assert steps[2].endswith("left 7 min")
    assert "kl 0.1250" in steps[3] and "2 environment errors  3 episodes cut by a token limit" in steps[3]
    assert any(
        "held-out success before training: iid sampled 0.250 [0.200, 0.310] n=200, ood greedy" in x for x in lines
    )


def test_in_a_terminal_the_picture_has_progress_success_and_trouble() -> None:
    shown = play(terminal=True)
    for text in ("evaluating before training", "4/10", BARS[4] * 4, "2 environment errors", "6 min left"):
        assert text in shown


def test_an_interruption_is_acknowledged_outside_the_signal_handler() -> None:
    out = io.StringIO()
    display = TerminalDisplay(Console(file=out, width=120), 10)
    display.interrupted()
    assert out.getvalue() == ""
    display.episodes(Progress(1, 0, 1, 0, 0))
    display.episodes(Progress(2, 0, 1, 0, 0))
    assert out.getvalue().count("stopping after this step") == 1


def test_sparkline_is_from_0_to_1_and_unknown_is_blank() -> None:
    assert sparkline([0.0, 1.0, 0.5, math.nan], width=5) == " ▁█▅ "
    assert len(sparkline([0.3] * 100)) == 32


def test_held_out_table_shows_before_and_after() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120)
    console.print(held_out_table({"sampled": RATE, "ood": {"sampled": RATE}}, {"sampled": {**RATE, "success": 0.75}}))
    text = out.getvalue()
    assert "95 % interval over tasks" in text and "0.750 [0.200, 0.310] n=200" in text and "ood sampled" in text


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_slots_of_every_preset_have_words(name: str) -> None:
    words = slots_in_words(Slots.model_validate(PRESETS[name].slots))
    assert list(words) == ["advantage", "filter", "gate", "aggregation", "KL"] and "{" not in "".join(words.values())


def test_words_for_slots_give_their_numbers() -> None:
    words = slots_in_words(Slots(clip_high=0.28, dual_clip=10.0, kl="loss", kl_coefficient=0.01))
    assert words["gate"].endswith("[0.8, 1.28], at most 10 where the advantage is negative")
    assert words["KL"] == "KL to the reference in the loss (0.01)"


def test_units() -> None:
    assert [count(n) for n in (512, 310_000, 1_070_000)] == ["512", "310k", "1.07M"]
    assert [duration(s) for s in (4.4, 89, 180, 7800)] == ["4 s", "89 s", "3 min", "2 h 10 min"]


def test_the_estimate_grows_with_what_is_asked_for() -> None:
    config = RunConfig()
    twice = config.model_copy(update={"steps": 200})
    assert estimate(config, 10**6, 20) < estimate(twice, 10**6, 20) < estimate(twice, 10**7, 20)
