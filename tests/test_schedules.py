"""Schedules at hand-computed points, at their ends, and past the end."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.schedules import SCHEDULES, constant, cosine, linear, scheduled, warmup

progress = st.floats(0, 1)


def test_values_at_hand_computed_points() -> None:
    assert [linear(p, 0.2, 0.6) for p in (0, 0.25, 1)] == pytest.approx([0.2, 0.3, 0.6])
    assert [cosine(p, 2.0, 1.0) for p in (0, 0.25, 0.5, 1)] == pytest.approx([2, 1 + (2 + 2**0.5) / 4, 1.5, 1])
    assert [constant(p, 0.3) for p in (0, 1)] == [0.3, 0.3]
    assert cosine(30 / 150, 0.5) == pytest.approx(0.5 * 0.5 * (1 + math.cos(math.pi * 30 / 150)))


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_ends_are_exact_and_a_run_that_is_extended_stays_at_the_end(name) -> None:
    schedule = SCHEDULES[name]
    assert schedule(0.0, 0.1, 0.3) == 0.1
    assert schedule(1.0, 0.1, 0.3) == 0.3
    assert schedule(1.7, 0.1, 0.3) == 0.3  # a cosine would rise again
    assert schedule(1.0, 0.5, 0.0) == 0.0  # exactly: a stream of weight 0 is removed


@given(progress, progress, st.sampled_from(["linear", "cosine"]))
def test_decays_never_rise(a, b, name) -> None:
    low, high = sorted((a, b))
    assert SCHEDULES[name](high, 1.0, 0.0) <= SCHEDULES[name](low, 1.0, 0.0)


def test_warm_up_begins_above_zero_so_that_no_step_is_lost() -> None:
    assert [warmup(p, 0.1) for p in (0.0, 0.05, 0.1)] == pytest.approx([0.1, 0.55, 1.0])
    assert [warmup(p, 0.2, floor=0.0) for p in (0.05, 0.1, 0.2, 0.9)] == pytest.approx([0.25, 0.5, 1, 1])
    assert warmup(0.0, 0.0) == 1.0


def test_scheduled_multiplies_decay_and_warm_up() -> None:
    assert scheduled("linear", 0.05, 1.0, 0.0, warmup_share=0.1, floor=0.0) == pytest.approx(0.95 * 0.5)
    assert scheduled("constant", 0.5, 3e-4) == 3e-4


def test_an_unknown_schedule_and_a_budget_of_zero_are_named() -> None:
    with pytest.raises(ValueError, match="schedules are constant, linear, cosine"):
        scheduled("cosin", 0.5)
    with pytest.raises(ValueError, match="budget"):
        linear(float("nan"))
