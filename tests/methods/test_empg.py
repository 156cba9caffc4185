"""EMPG: golden numbers by hand, and the properties of its section."""

from __future__ import annotations

import inspect
from math import exp
from typing import Any

import numpy as np
import pytest
from entropy_parts import NAN, advantages, batch, random_batch, rows_of, trace, turn

from assay.methods.empg import EMPG, empg
from assay.methods.registry import make
from assay.protocols import UserError

# mean entropies 0, 1 | 0.5 | 2: scaled 0, 1/2, 1/4, 1; two task groups
GOLDEN = [trace(0, 0, [[0.0, 0.0], [0.5, 1.0, 1.5]]), trace(0, 1, [[0.5]]), trace(1, 1, [[2.0]])]
POWERS = [1.0, exp(-0.5), exp(-0.25), exp(-1.0)]


def golden(k: float, zeta: float) -> list[float]:
    """A g + zeta f, centred, of the four steps; only the first has one that follows, of scaled entropy 1/2."""
    powers = [p**k for p in POWERS]
    g = [p / (sum(powers) / 4) for p in powers]
    raw = [g[0] + zeta * exp(-0.5), g[1], -g[2], -g[3]]
    return [r - sum(raw) / 4 for r in raw]


@pytest.mark.parametrize(("k", "zeta"), [(1.0, 0.05), (2.0, 0.0), (0.0, 0.3)])
def test_the_worked_example(k: float, zeta: float) -> None:
    data = batch(*GOLDEN)
    rows = rows_of(data)
    metrics = EMPG(k=k, zeta=zeta).modulate(data, rows)
    found = advantages(rows)
    assert [v[0] for v in found.values()] == pytest.approx(golden(k, zeta), rel=1e-6)
    assert all(len(set(v)) == 1 for v in found.values()), "one number per step"
    assert rows[0].columns["advantage"].dtype == np.float32
    powers = [p**k for p in POWERS]
    assert metrics["empg_range"] == pytest.approx(2.0)
    assert metrics["empg_max"] == pytest.approx(4 / sum(powers), rel=1e-6)
    assert metrics["empg_min"] == pytest.approx(powers[3] * 4 / sum(powers), rel=1e-6)
    assert metrics["empg_bonus"] == pytest.approx(zeta * exp(-0.5) / 4, rel=1e-6)
    assert metrics["empg_centre"] == pytest.approx(4 / sum(powers) + zeta * exp(-0.5) - golden(k, zeta)[0])


def test_the_numbers_of_the_worked_example_written_out() -> None:
    weight, bonus = empg([0.0, 1.0, 0.5, 2.0], [1, -1, -1, -1])
    assert weight == pytest.approx([1.4528, 0.8812, 1.1315, 0.5345], abs=5e-5)
    assert bonus == pytest.approx([0.6065, 0, 0, 0], abs=1e-4)


def test_the_mean_weight_is_one_over_the_steps_of_the_batch() -> None:
    h = np.random.default_rng(1).gamma(1.0, 0.5, 40)
    weight, _ = empg(h, np.full(40, -1))
    assert weight.mean() == pytest.approx(1.0, abs=1e-12)
    assert weight.max() / weight.min() == pytest.approx(np.e, rel=1e-6)
    assert np.array_equal(np.argsort(weight), np.argsort(-h))


def test_advantages_are_centred_over_steps_not_over_tokens() -> None:
    data = random_batch(2)
    rows = rows_of(data)
    EMPG(zeta=0.4).modulate(data, rows)
    steps = [np.mean(v) for v in advantages(rows).values()]
    tokens = [a for v in advantages(rows).values() for a in v]
    assert np.mean(steps) == pytest.approx(0.0, abs=1e-7)
    assert abs(np.mean(tokens)) > 1e-3


def test_the_bonus_comes_from_the_turn_that_follows_in_the_same_trace() -> None:
    data = batch(trace(0, 0, [[1.0], turn([], forced=2), [0.0], [2.0]]), trace(0, 2, [[2.0]]))
    for layout in ("append", "window(1)"):
        rows = rows_of(data, layout)
        EMPG(k=0.0, zeta=1.0).modulate(data, rows)
        found = [v[0] for v in advantages(rows).values()]
        raw = [1 + 1.0, 1 + exp(-1.0), 1.0, 1.0]  # the first is followed by entropy 0, its second turn sampled nothing
        assert found == pytest.approx([r - np.mean(raw) for r in raw], abs=1e-6)


def test_both_layouts_give_every_step_the_same_advantage() -> None:
    data = random_batch(3)
    found = []
    for layout in ("append", "window(2)"):
        rows = rows_of(data, layout)
        EMPG().modulate(data, rows)
        found.append(advantages(rows))
    assert found[0] == found[1]


def test_strength_zero_touches_nothing_and_needs_nothing() -> None:
    data = batch(*GOLDEN)
    rows = rows_of(data)
    columns = [row.columns["advantage"] for row in rows]
    method = EMPG(k=0.0, zeta=0.0, score=True)
    assert method.modulate(data, rows) == {}
    assert all(row.columns["advantage"] is column for row, column in zip(rows, columns, strict=True))
    assert method.needs == frozenset() and EMPG(score=True).needs == {"entropy"}


def test_equal_entropies_give_weight_one_and_no_nan() -> None:
    weight, bonus = empg([0.3, 0.3, 0.3], [1, -1, -1])
    assert weight.tolist() == [1.0, 1.0, 1.0]
    assert bonus.tolist() == [1.0, 0.0, 0.0]
    assert EMPG().modulate(batch(), []) == {}


def test_environment_errors_are_in_no_statistic() -> None:
    data, broken = batch(*GOLDEN), batch(*GOLDEN, trace(1, 2, [[7.0]], bad=True))
    rows, other = rows_of(data), rows_of(broken)
    EMPG().modulate(data, rows)
    EMPG().modulate(broken, other)
    assert advantages(rows) == advantages(other)


def test_an_entropy_that_the_sampler_did_not_record_is_an_error_that_says_what_to_do() -> None:
    data = batch(trace(0, 0, [[0.2], [NAN, 0.3]]))
    with pytest.raises(UserError, match="1 of 2 answers: set score of empg to true"):
        EMPG().modulate(data, rows_of(data))


@pytest.mark.parametrize("settings", [{"k": -1.0}, {"k_future": float("nan")}, {"zeta": -0.1}, {"beta": 1}])
def test_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        make("empg", settings)


def test_every_setting_has_its_line() -> None:
    names = list(inspect.signature(EMPG).parameters)
    lines = [line.split(":")[0].strip() for line in (EMPG.__doc__ or "").splitlines() if ": " in line]
    assert lines == names


def test_empg_refuses_arrays_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="one entry per step"):
        empg([0.1, 0.2], [-1])
