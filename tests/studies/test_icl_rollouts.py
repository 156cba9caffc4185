"""Bandit contexts as tokens: the sheet, the tree and the closed loop ask the same model the same questions."""

import numpy as np
import pytest
import torch

from assay.bandits import context_digits, context_game, count_game, law_of, policy_value
from assay.rng import generator
from assay.studies.icl.rollouts import (
    bandit_tokens,
    context_rows,
    count_rows,
    draw,
    on_contexts,
    play,
    sheet,
    tree_law,
    walk,
)
from assay.studies.icl.transformer import CausalTransformer, Shape, torch_generator


def model(horizon: int = 4) -> CausalTransformer:
    shape = Shape(5, horizon, (("decision", 2),), width=16, layers=2, heads=2)
    net = CausalTransformer(shape, torch_generator(0, "test"))
    with torch.no_grad():
        net.read["decision"].weight.mul_(20)  # laws far from uniform
    return net


def test_tokens_hold_arm_success_failure_and_flag() -> None:
    tokens = bandit_tokens(np.array([[0, 1]]), np.array([[1, 0]]))
    assert tokens.tolist() == [[[0, 0, 0, 0, 1], [1, 0, 1, 0, 0], [0, 1, 0, 1, 0]]]


def test_a_context_has_the_counts_of_its_interactions() -> None:
    game, rows = count_game(4), context_rows(4)
    for step in range(5):
        arms, outcomes = context_digits(step)
        for i in range(0, len(arms), 7):
            counts = np.zeros((2, 2), int)
            for arm, outcome in zip(arms[i], outcomes[i], strict=True):
                counts[arm, 1 - outcome] += 1
            assert (game.counts[step][rows[step][i]] == counts).all()


def test_a_law_on_counts_keeps_its_value_on_contexts() -> None:
    law = law_of("ucb1", count_game(5))
    assert policy_value(on_contexts(law, 5), context_game(5)) == pytest.approx((2.727778, 0.625), abs=1e-6)


def test_the_sheet_gives_every_context_the_law_of_its_own_prefix() -> None:
    net, page = model(), sheet(4)
    with torch.no_grad():
        law = page.law(net.log_law(page.tokens))
        for step in range(4):
            arms, outcomes = context_digits(step)
            alone = net.log_law(bandit_tokens(arms, outcomes))[:, step].exp()
            assert law[step].shape == (4**step, 2)
            assert np.allclose(law[step], alone.numpy(), atol=1e-5)


def test_the_tree_and_the_sheet_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    net, page = model(), sheet(4)
    with torch.no_grad():
        law = page.law(net.log_law(page.tokens))
    for chunk in (16, 16384):  # in pieces and at once
        monkeypatch.setattr("assay.studies.icl.rollouts.CHUNK", chunk)
        for ours, theirs in zip(tree_law(net, 4), law, strict=True):
            assert np.allclose(ours, theirs, atol=1e-5)


def test_draws_invert_the_law() -> None:
    law = np.array([[0.2, 0.5, 0.3]] * 4)
    assert draw(law, np.array([0.0, 0.19, 0.2, 0.71])).tolist() == [0, 0, 1, 2]
    assert draw(np.array([[0.5, 0.5 - 1e-16]]), np.array([1 - 1e-17])).tolist() == [1]


def test_episodes_of_a_law_earn_its_exact_value() -> None:
    game = context_game(4)
    law = tree_law(model(), 4)
    means = generator(0, "test").random((40_000, 2))
    found = walk(law, game, means, generator(1, "test"))
    spread = found.outcomes.sum(1).std() / 200
    assert found.outcomes.sum(1).mean() == pytest.approx(policy_value(law, game)[0], abs=4 * spread)
    digits = 2 * found.arms + 1 - found.outcomes
    assert (found.rows[:, 4] == digits @ [64, 16, 4, 1]).all()
    assert (count_rows(found.arms, found.outcomes)[:, 4] == context_rows(4)[4][found.rows[:, 4]]).all()


def test_stop_ends_an_episode() -> None:
    game = context_game(2)
    law = [np.array([[0.0, 0.0, 1.0]]), np.tile([1.0, 0.0, 0.0], (4, 1))]
    found = walk(law, game, np.full((3, 2), 0.5), generator(0, "test"))
    assert found.playing.tolist() == [[True, False, False]] * 3


def test_the_closed_loop_and_the_walk_draw_the_same_episodes() -> None:
    net = model()
    means = generator(0, "test").random((64, 2))
    arms, outcomes = play(net, means, 4, generator(1, "test"))
    found = walk(tree_law(net, 4), context_game(4), means, generator(1, "test"))
    assert (arms == found.arms).all() and (outcomes == found.outcomes).all()
