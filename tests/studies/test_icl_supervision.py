"""Labels, contexts and the closed loop of what was taught."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from assay.bandits import closed_loop, context_game, count_game, policy_value
from assay.rng import generator
from assay.studies.icl.rollouts import on_contexts, tree_law
from assay.studies.icl.supervision import (
    ARMS,
    CONTEXTS,
    EXPERT,
    USUAL,
    behave,
    cells,
    count_law,
    leak_law,
    loss_of,
    measure,
    reference_values,
    run_cell,
    state_targets,
    targets,
    train,
)

TINY: dict[str, Any] = {"updates": 2, "batch": 8, "horizon": 5, "width": 8, "layers": 1}


def test_labels_are_the_references_laws_at_the_counts() -> None:
    means, _arms, _outcomes, rows = behave("uniform", 50, 5, generator(0, "test"))
    laws, weights = targets("thompson", "uniform", means, rows)
    assert (weights == 1).all() and np.allclose(laws[:, 0], 0.5)
    after = count_game(5).counts[1][rows[:, 1]]  # one outcome: Thompson 2/3 towards a success, from a failure
    first = np.where(after[:, 0, 0] + after[:, 1, 1] > 0, 2 / 3, 1 / 3)
    assert np.allclose(laws[:, 1, 0], first)
    oracle, _ = targets("oracle", "uniform", means, rows)
    assert (oracle.argmax(-1) == means.argmax(1)[:, None]).all() and (oracle.sum(-1) == 1).all()


def test_ties_are_masked_or_labelled_uniformly() -> None:
    means, _arms, _outcomes, rows = behave("mixed", 200, 10, generator(0, "test"))
    laws, kept = targets("bayes-final", "mask", means, rows)
    assert ((laws == 0.5).all(-1) == (kept == 0)).all()
    assert 0.9 < (kept == 0).mean() < 0.98  # 94.2 % of visits are tied
    _, every = targets("bayes-final", "uniform", means, rows)
    assert (every == 1).all()


def test_contexts_are_what_they_are_called() -> None:
    rng = generator(0, "test")
    for contexts in CONTEXTS:
        if contexts != "own":
            means, arms, outcomes, rows = behave(contexts, 64, 4, rng)
            assert means.shape == (64, 2) and arms.shape == outcomes.shape == (64, 4) and rows.shape == (64, 5)
    _, arms, _, _ = behave("learner", 64, 4, rng)
    assert (arms[:, 0] != arms[:, 1]).all()  # UCB1 tries both arms first
    _, arms, _, _ = behave("mixed", 64, 4, rng)
    assert (arms[:32, 0] != arms[:32, 1]).all() and not (arms[32:, 0] != arms[32:, 1]).all()
    means, arms, outcomes, _ = behave("expert", 4000, 4, rng)
    assert (arms == means.argmax(1)[:, None]).mean() == pytest.approx(EXPERT, abs=0.01)
    assert outcomes.mean() == pytest.approx(0.9 * 2 / 3 + 0.1 / 3, abs=0.02)
    with pytest.raises(ValueError, match="mixed, learner"):
        behave("random", 4, 4, rng)


def test_the_leak_is_bayes_rule_with_the_experts_actions_as_evidence() -> None:
    """By quadrature over both hidden means: one pull of arm 1, by the expert, and its success."""
    law = leak_law(count_game(2))
    x = (np.arange(400) + 0.5) / 400
    one, two = np.meshgrid(x, x, indexing="ij")
    better = (one > two) + 0.5 * (one == two)
    seen = one * (EXPERT * better + (1 - EXPERT) * (1 - better))
    expected = (one * EXPERT * better).sum() / seen.sum()
    row = next(i for i, c in enumerate(count_game(2).counts[1]) if c[0, 0] == 1)
    assert law[1][row, 0] == pytest.approx(expected, abs=1e-5)


def test_state_targets_are_shares_of_the_horizon() -> None:
    _, arms, outcomes, rows = behave("uniform", 20, 5, generator(0, "test"))
    found = state_targets(rows)
    assert (found[:, 0] == 0).all() and np.allclose(found[:, 5].sum(-1), 1.0)
    assert np.allclose(found[:, 5, 0], ((arms == 0) & (outcomes == 1)).sum(1) / 5)


def test_the_loss_is_the_cross_entropy_of_the_decisions_before_the_end() -> None:
    settings = USUAL | TINY | {"label": "ucb1"}
    model = train(0, settings)
    batch = behave("mixed", 8, 5, generator(1, "test"))
    loss = loss_of(model, settings, *batch)
    law = tree_law(model, 5)
    means, arms, outcomes, rows = batch
    labels, _ = targets("ucb1", "uniform", means, rows)
    total, digits = 0.0, 2 * arms + 1 - outcomes
    for b in range(8):
        for t in range(5):
            context = int(digits[b, :t] @ 4 ** np.arange(t - 1, -1, -1)) if t else 0
            total -= float(labels[b, t] @ np.log(law[t][context])) / 40
    assert loss.item() == pytest.approx(total, abs=1e-5)
    heavier = loss_of(model, settings | {"state_weight": 1.0}, *batch)
    assert heavier.item() > loss.item()


def test_p07_bounds_hold_for_perturbed_learners_and_bind_nothing_else() -> None:
    game = context_game(5)
    for name in ("ucb1", "thompson", "bayes-cum"):
        law = on_contexts(count_law(name, 5), 5)
        for noise in (0.0, 0.01, 0.1, 0.5):
            found = closed_loop(law, [(1 - noise) * p + noise * 0.5 for p in law], game)
            assert found.tv <= found.drift + 1e-12
            assert found.cum_gap <= found.cum_bound + 1e-12 and found.final_gap <= found.final_bound + 1e-12
            assert (found.tv == 0) == (noise == 0)


@pytest.mark.parametrize("name", ["process-ucb1", "oracle-leak", "ucb1-on-own", "bayes-final", "ucb1-and-state"])
def test_p07_bounds_hold_for_trained_models_and_cells_repeat(name: str) -> None:
    settings = USUAL | ARMS[name] | TINY
    found = run_cell(0, settings)
    for how in ("sample", "argmax"):
        m = found[how]
        assert m["tv"] <= m["drift"] + 1e-9
        assert m["cum_gap"] <= m["cum_bound"] + 1e-9 and m["final_gap"] <= m["final_bound"] + 1e-9
    assert run_cell(0, settings) == found


def test_a_law_is_at_no_distance_from_itself_and_has_its_own_value() -> None:
    settings = USUAL | TINY | {"label": "ucb1"}
    found = measure(on_contexts(count_law("ucb1", 5), 5), settings)
    assert found["distance ucb1"] == pytest.approx(0.0) and found["tv"] == pytest.approx(0.0)
    assert (found["cum"], found["final"]) == pytest.approx((2.727778, 0.625), abs=1e-6)
    assert found["distance bayes-cum"] > 0.1


def test_exact_values_at_the_horizon_of_the_study() -> None:
    found = reference_values(10)
    assert found["ucb1"] == pytest.approx((5.602189, 0.638889), abs=1e-6)
    assert found["bayes-cum"] == pytest.approx((6.021786, 0.634147), abs=1e-6)
    assert found["leak"] == pytest.approx(policy_value(leak_law(count_game(10)), count_game(10)))


def test_the_grid_names_each_arm_once_a_seed() -> None:
    found = cells(SimpleNamespace(updates=0), [0, 1])
    assert len(found) == 2 * len(ARMS) and [c.seed for c in found[: len(ARMS)]] == [0] * len(ARMS)
    assert len({tuple(sorted(map(str, c.settings.items()))) for c in found}) == len(ARMS)


@pytest.mark.slow
def test_p09_a_network_taught_ucb1_is_ucb1() -> None:
    torch.set_num_threads(1)
    found = run_cell(1000, USUAL | ARMS["process-ucb1"])["sample"]
    assert found["distance ucb1"] < 0.02
    assert found["cum"] == pytest.approx(5.602189, abs=0.05)
