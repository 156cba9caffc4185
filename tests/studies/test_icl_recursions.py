"""Recursions by hand, what a network is asked, and the bound on a carried error."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from assay.bandits import constant_step, error_growth
from assay.rng import generator
from assay.studies.icl.learners import QLearning, Transition, rls_start, rls_update
from assay.studies.icl.recursions import (
    RECURSIONS,
    USUAL,
    WAYS,
    bound_of,
    cells,
    decode,
    encode,
    errors,
    pad_tokens,
    run_cell,
    train,
)

TINY: dict[str, Any] = {"updates": 2, "batch": 4, "pairs": 8, "horizon": 4, "width": 8, "layers": 1}


def fold(kind: str, *interactions: list[float]) -> list[list[float]]:
    found = RECURSIONS[kind].fold(np.array([interactions], float))
    return [[round(float(x), 12) for x in state] for state in found[0]]


def test_p04_least_squares_by_the_trace_of_the_specification() -> None:
    # (x, y) = ((1, 0), 1), ((1, 1), 0), ((0, 1), 2), ridge 1; state (P11, P12, P22, w1, w2)
    assert fold("rls", [1, 0, 1], [1, 1, 0], [0, 1, 2]) == [
        [0.5, 0, 1, 0.5, 0],
        [0.4, -0.2, 0.6, 0.4, -0.2],
        [0.375, -0.125, 0.375, 0.125, 0.625],
    ]


def test_p04_the_constant_step_is_that_of_the_attention_construction() -> None:
    seen = RECURSIONS["ema"].play(generator(0, "test"), 3, 12)
    for episode, states in zip(seen, RECURSIONS["ema"].fold(seen), strict=True):
        trace = constant_step(episode[:, 1].astype(int), episode[:, 2], 0.3)
        assert np.allclose(states, trace, atol=1e-12)


def test_p05_q_learning_by_the_trace_of_the_specification() -> None:
    """alpha .5, gamma .9, alternately (s0, a0, 0 -> s1) and (s1, a1, 1, done): done is here a state of value 0, s2."""
    one = [1, 0, 0, 1, 0, 0, 0, 1, 0]
    other = [0, 1, 0, 0, 1, 1, 0, 0, 1]
    states = fold("q-learning", one, other, one, other, one)
    assert [s[0] for s in states] == [0, 0, 0.225, 0.225, 0.45]
    assert [s[3] for s in states] == [0, 0.5, 0.5, 0.75, 0.75]


def test_batched_updates_equal_those_of_the_learners() -> None:
    seen = RECURSIONS["rls"].play(generator(1, "test"), 2, 6)
    for episode, states in zip(seen, RECURSIONS["rls"].fold(seen), strict=True):
        state = rls_start(2, 1.0)
        for (x1, x2, y), found in zip(episode, states, strict=True):
            state = rls_update(state, np.array([x1, x2]), y)
            assert np.allclose(found, [state.p[0, 0], state.p[0, 1], state.p[1, 1], *state.w])
    seen = RECURSIONS["q-learning"].play(generator(1, "test"), 2, 9)
    learner = QLearning(3, 2)
    for episode, states in zip(seen, RECURSIONS["q-learning"].fold(seen), strict=True):
        table = learner.start()
        for e, found in zip(episode, states, strict=True):
            step = Transition(float(e[5]), int(e[6:].argmax()), False)
            table = learner.update(table, int(e[:3].argmax()), int(e[3:5].argmax()), step)
            assert np.allclose(found, table.reshape(-1))


def test_counts_and_intervals_by_hand() -> None:
    assert fold("counts", [1, 0, 1, 0], [0, 1, 0, 1], [0, 1, 0, 1])[-1] == [1, 0, 0, 2]
    ask = np.eye(15)
    states = fold("interval", [*ask[7], 1], [*ask[11], 0], [*ask[3], 1], [*ask[9], 1])  # 8 yes, 12 no, 4 yes, 10 yes
    assert states == [[8, 15], [8, 11], [8, 11], [10, 11]]


def test_a_process_goes_on_from_where_it_went() -> None:
    seen = RECURSIONS["q-learning"].play(generator(2, "test"), 5, 8)
    assert (seen[:, 0, :3] == [1, 0, 0]).all()
    assert (seen[:, 1:, :3] == seen[:, :-1, 6:]).all()


@pytest.mark.parametrize("kind", [k for k, r in RECURSIONS.items() if r.lipschitz == 1.0])
def test_updates_that_claim_it_do_not_expand_the_largest_difference(kind: str) -> None:
    recursion, rng = RECURSIONS[kind], generator(3, "test")
    seen = recursion.play(rng, 200, 1)[:, 0]
    a, b = rng.normal(0, 2, (2, 200, len(recursion.start)))
    after = np.abs(recursion.update(a, seen) - recursion.update(b, seen)).max(1)
    assert (after <= np.abs(a - b).max(1) + 1e-12).all()


def test_p08_the_bound_holds_with_equality_for_an_affine_update_with_a_constant_bias() -> None:
    for lipschitz in (0.7, 1.0, 1.2):
        error, gaps = 0.0, []
        for _ in range(6):
            error = lipschitz * error + 0.01
            gaps.append(error)
        found = bound_of(np.array([gaps]), np.full((1, 6), 0.01), lipschitz)
        assert np.allclose(found["bound"], gaps) and np.allclose(found["bound"], error_growth(lipschitz, 0.01, 6)[1:])
        assert found["excess"] < 1e-12
    assert bound_of(np.array([[0.3]]), np.array([[0.1]]), 1.0)["excess"] == pytest.approx(0.2)


def test_states_are_read_as_they_were_written() -> None:
    for kind, recursion in RECURSIONS.items():
        states = recursion.fold(recursion.play(generator(4, "test"), 50, 20))
        code = encode(recursion, kind, 20, states)
        assert np.allclose(decode(recursion, kind, 20, code), states)
        if not recursion.levels:
            assert abs(code.mean()) < 0.2 and abs(code.std() - 1) < 0.2


def test_errors_are_in_standard_deviations_or_shares() -> None:
    interval = RECURSIONS["interval"]
    found, true = np.array([[[0.0, 15.0]], [[3.0, 9.0]]]), np.array([[[0.0, 15.0]], [[3.0, 8.0]]])
    assert errors(interval, "interval", 20, found, true) == [0.5]
    ema = RECURSIONS["ema"]
    true = ema.fold(ema.play(generator(5, "test"), 4000, 20))
    guess = np.broadcast_to(true.reshape(-1, 2).mean(0), true.shape)
    assert np.sqrt(np.mean(np.square(errors(ema, "ema", 20, guess, true)))) == pytest.approx(1.0, abs=0.03)


def test_the_pad_sees_its_state_and_the_newest_interaction_only() -> None:
    tokens = pad_tokens(np.array([[7.0, 8.0]]), np.array([[1.0, 0.0, 1.0]]))
    assert tokens.tolist() == [[[7, 8, 0, 0, 0, 1], [0, 0, 1, 0, 1, 0]]]


@pytest.mark.parametrize("kind", list(RECURSIONS))
@pytest.mark.parametrize("way", ["direct", "pad"])
def test_cells_run_and_repeat(kind: str, way: str) -> None:
    settings = USUAL | TINY | {"recursion": kind, "way": way}
    found = run_cell(1, settings)
    assert len(found["error"]) == (8 if way == "pad" else 4) and np.isfinite(found["error"]).all()
    assert ("excess" in found) == (way == "pad" and RECURSIONS[kind].lipschitz is not None)
    assert run_cell(1, settings) == found


def test_without_learned_positions_a_cell_goes_beyond_the_horizon() -> None:
    found = run_cell(1, USUAL | TINY | {"recursion": "ema", "positions": "relative"})
    assert len(found["error"]) == 8


def test_a_way_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="direct, final, pad"):
        train(0, USUAL | TINY | {"recursion": "ema", "way": "guess"})


def test_final_supervision_does_not_teach_earlier_states() -> None:
    """After the same few updates the last state is nearer than the first one only where it alone was taught."""
    settings = USUAL | TINY | {"recursion": "counts", "updates": 150, "batch": 64, "width": 16}
    final, every = (run_cell(0, settings | {"way": way})["error"] for way in ("final", "direct"))
    assert final[0] > 2 * every[0]


def test_the_grid_holds_every_recursion_with_every_way() -> None:
    found = cells(SimpleNamespace(updates=7), [3])
    assert len(found) == len({c.name for c in found}) == len(RECURSIONS) * len(WAYS) + 6
    assert all(c.settings["updates"] == 7 and c.seed == 3 for c in found)
