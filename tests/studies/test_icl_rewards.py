"""Policy gradient on four returns: the estimator against the enumerated gradient, returns by hand, and (slow) the policies."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from assay.bandits import context_game, law_of
from assay.rng import generator
from assay.studies.icl.rewards import (
    USUAL,
    advantages,
    exact_return,
    make_model,
    measure,
    model_law,
    optimum,
    rewards_of,
    run_cell,
    taking_cum_side,
    uniform_return,
)
from assay.studies.icl.rollouts import Episodes, sheet, walk

SETTINGS: dict[str, Any] = {
    "returns": "cum",
    "price": 0.0,
    "horizon": 2,
    "width": 8,
    "layers": 1,
    "updates": 3,
    "batch": 16,
    "group": 4,
    "baseline": "group",
    "rate": 1e-3,
    "entropy": 0.05,
    "explore": 0.75,
}


# ------------------------------------------------------------------------------------------- the estimator, exactly


def all_pairs(actions: int) -> tuple[Episodes, np.ndarray]:
    """Every pair of episodes at H = 2, and which episodes they are: group members side by side."""
    game = context_game(2)
    each = actions * 2
    one = np.arange(each**2)
    choices = np.stack([one // each, one % each], 1)
    arms, outcomes = choices // 2, 1 - choices % 2
    pairs = np.stack(np.meshgrid(one, one, indexing="ij"), -1).reshape(-1)
    arms, outcomes = arms[pairs], outcomes[pairs]
    rows = np.zeros((len(pairs), 3), np.int64)
    playing = np.ones((len(pairs), 3), bool)
    for t in range(2):
        rows[:, t + 1] = game.children[t][rows[:, t], np.minimum(arms[:, t], 1), 1 - outcomes[:, t]]
        playing[:, t + 1] = playing[:, t] & (arms[:, t] < 2)
    return Episodes(np.zeros((len(pairs), 2)), arms, outcomes, rows, playing), pairs


def gradients(kind: str, price: float, keep_self: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(expected gradient of eq. (9) over all groups of two and all hidden means, gradient of the exact return)."""
    settings = SETTINGS | {"returns": kind, "price": price}
    net = make_model(3, settings).double()
    with torch.no_grad():
        net.read["decision"].weight.mul_(30)
    game, page = context_game(2), sheet(2)
    actions = 3 if kind == "cost" else 2
    log_law = net.log_law(page.tokens.double())
    laws = [log_law[page.sequence(t, slice(None)), t] for t in range(2)]
    episodes, _ = all_pairs(actions)
    playing = episodes.playing[:, :-1]
    paid = rewards_of(kind, price, game, episodes)
    gain = advantages(paid, playing, 2)
    if keep_self:  # the mean of both instead of the other's: for two episodes that still play, half the difference
        gain = gain / 2
    logp = torch.stack([laws[t][episodes.rows[:, t], episodes.arms[:, t]] for t in range(2)], 1)
    nodes, weights = np.polynomial.legendre.leggauss(5)  # exact: of degree 4 in each hidden mean
    nodes, weights = (nodes + 1) / 2, weights / 2
    probability = np.zeros(len(gain) // 2)
    for x, wx in zip(nodes, weights, strict=True):
        for y, wy in zip(nodes, weights, strict=True):
            mean = np.array([x, y, 0.5])[episodes.arms]  # after "stop" the outcome is a coin that does not count
            each = np.where(episodes.outcomes == 1, mean, 1 - mean) * np.exp(logp.detach().numpy())
            probability += wx * wy * each.prod(1).reshape(-1, 2).prod(1)
    assert probability.sum() == pytest.approx(1.0)
    mass = torch.from_numpy(np.repeat(probability, 2)[:, None] * gain / 2)
    estimate = torch.autograd.grad((mass * logp).sum(), list(net.parameters()), retain_graph=True, allow_unused=True)

    value = torch.zeros(())
    reach = torch.ones(1, dtype=torch.float64)
    for t in range(2):
        m = torch.from_numpy(game.means(t))
        best = m.max(1).values
        p = laws[t].exp()
        if kind == "cum":
            value = value + (reach * (p[:, :2] * m).sum(1)).sum()
        if kind == "cost":
            value = value + (reach * (p[:, 2] * best - price * p[:, :2].sum(1))).sum()
        flow = reach[:, None, None] * p[:, :2, None] * torch.stack([m, 1 - m], -1)
        reach = flow.reshape(-1)  # contexts are numbered by their last interaction
    if kind != "cum":
        value = value + (reach * torch.from_numpy(game.means(2).max(1))).sum()
    exact = torch.autograd.grad(value, list(net.parameters()), allow_unused=True)
    flat = [torch.cat([torch.zeros(1) if g is None else g.reshape(-1) for g in each]) for each in (estimate, exact)]
    return flat[0], flat[1]


@pytest.mark.parametrize(("kind", "price"), [("cum", 0.0), ("final", 0.0), ("cost", 0.05)])
def test_p10_a_leave_one_out_baseline_of_the_group_is_unbiased(kind: str, price: float) -> None:
    estimate, exact = gradients(kind, price, keep_self=False)
    assert (exact.abs().max() > 1e-3) == (kind != "final")  # every action is optimal for "final" at H = 2
    assert torch.allclose(estimate, exact, atol=1e-10)


def test_p10_a_group_mean_with_itself_scales_the_gradient_by_g_less_one_over_g() -> None:
    estimate, exact = gradients("cum", 0.0, keep_self=True)
    assert torch.allclose(estimate, exact / 2, atol=1e-10)


# ----------------------------------------------------------------------------------------------- returns, by hand


def episodes_of(arms: list[list[int]], outcomes: list[list[int]]) -> Episodes:
    """Walks given choices."""
    game = context_game(2)
    a, y = np.array(arms), np.array(outcomes)
    rows, playing = np.zeros((len(a), 3), np.int64), np.ones((len(a), 3), bool)
    for t in range(2):
        rows[:, t + 1] = game.children[t][rows[:, t], np.minimum(a[:, t], 1), 1 - y[:, t]]
        playing[:, t + 1] = playing[:, t] & (a[:, t] < 2)
    return Episodes(np.zeros((len(a), 2)), a, y, rows, playing)


def test_rewards_by_hand() -> None:
    game = context_game(2)
    found = episodes_of([[0, 0], [0, 1], [0, 2], [2, 0]], [[1, 1], [0, 0], [1, 1], [1, 1]])
    assert rewards_of("cum", 0, game, found)[:2].tolist() == [[1, 1], [0, 0]]
    # two successes: 3/4; a failure of each arm: 1/3; stop after a success: 2/3; stop at once: 1/2
    assert np.allclose(rewards_of("final", 0, game, found), [[0, 3 / 4], [0, 1 / 3], [0, 2 / 3], [1 / 2, 0]])
    cost = [[-0.1, 3 / 4 - 0.1], [-0.1, 1 / 3 - 0.1], [-0.1, 2 / 3], [1 / 2, 0]]
    assert np.allclose(rewards_of("cost", 0.1, game, found), cost)
    # entropies of Beta(1, 1): 0, of Beta(2, 1): 1/2 - ln 2
    assert np.allclose(rewards_of("info", 0, game, found)[1], np.log(2) - 0.5)


def test_p11_information_telescopes_to_the_entropy_that_the_belief_lost() -> None:
    game = context_game(2)
    found = episodes_of([[0, 0], [0, 1]], [[1, 1], [0, 0]])
    # Ent Beta(3, 1) = 2/3 - ln 3; two of Beta(1, 2): 2 (1/2 - ln 2)
    assert np.allclose(rewards_of("info", 0, game, found).sum(1), [np.log(3) - 2 / 3, 2 * np.log(2) - 1])


def test_a_return_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="cum, final, cost, info"):
        rewards_of("regret", 0, context_game(2), episodes_of([[0, 0]], [[1, 1]]))


def test_advantages_leave_the_episode_itself_out() -> None:
    rewards = np.array([[1.0, 2.0], [0.0, 1.0], [0.0, 0.0], [5.0, 5.0]])
    playing = np.ones((4, 2), bool)
    # returns to go 3, 1 | 0, 10 in two groups; second step 2, 1 | 0, 5
    assert advantages(rewards, playing, 2).tolist() == [[2, 1], [-2, -1], [-10, -5], [10, 5]]
    assert advantages(rewards, playing, 4)[0].tolist() == [3 - 11 / 3, 2 - 2]


def test_advantages_compare_only_with_episodes_that_still_play() -> None:
    rewards = np.array([[0.5, 0.0], [-0.1, 0.9], [-0.1, 0.7]])
    playing = np.array([[True, False], [True, True], [True, True]])
    found = advantages(rewards, playing, 3)
    assert np.allclose(found[:, 1], [0, 0.2, -0.2])
    assert np.allclose(found[0, 0], 0.5 - (0.8 + 0.6) / 2)
    alone = advantages(rewards[:2], playing[:2], 2)
    assert alone[1, 1] == 0.9  # nobody else plays: no baseline


# ----------------------------------------------------------------------------------------------------- evaluation


def test_exact_returns_of_known_policies() -> None:
    game = context_game(5)
    assert exact_return(law_of("bayes-cum", game), game, "cum") == pytest.approx(26 / 9, abs=1e-6)
    assert exact_return(law_of("bayes-final", game), game, "final") == pytest.approx(0.625, abs=1e-6)
    assert exact_return(law_of("uniform", game), game, "cost", 0.05) == pytest.approx(0.621280 - 0.25, abs=1e-6)
    assert uniform_return(5, "cum") == pytest.approx(2.5)
    # with a third of the mass stopping at each step: sum of (2/3)^t pulls
    expected = uniform_return(5, "cost", 0.0) - 0.1 * sum((2 / 3) ** t for t in range(1, 6))
    assert uniform_return(5, "cost", 0.1) == pytest.approx(expected)


def test_the_side_taken_where_the_optima_differ() -> None:
    game = context_game(5)
    laws = {name: law_of(name, game) for name in ("bayes-cum", "bayes-final", "uniform", "round-robin")}
    for name, expected in (("bayes-cum", 1.0), ("bayes-final", 0.0), ("uniform", 0.5)):
        assert taking_cum_side(laws[name], 5, laws["uniform"]) == pytest.approx(expected)
        assert taking_cum_side(laws[name], 5, laws[name]) == pytest.approx(expected)
    assert np.isnan(taking_cum_side(laws["uniform"], 5, laws["round-robin"])) == (unbalanced() == 0)


def unbalanced() -> int:
    """Contexts where the optima share no action that round-robin (arms in turn) can meet, by going through all."""
    game = context_game(5)
    one, other = (optimum(5, kind) for kind in ("cum", "final"))
    met = 0
    for t in range(5):
        for q, p, counts in zip(one.optimal[t], other.optimal[t], game.counts[t], strict=True):
            pulled = counts.sum(1)
            met += not (q & p).any() and pulled[0] - pulled[1] in (0, 1)
    return met


def test_measures_of_an_optimal_law_and_unknown_distances_are_none() -> None:
    settings = SETTINGS | {"returns": "final", "horizon": 5}
    found = measure(law_of("bayes-final", context_game(5)), settings)
    assert found["closed"] == pytest.approx(1.0) and found["distance bayes-final"] == pytest.approx(0.0)
    for law in (law_of("round-robin", context_game(5)), law_of("bayes-cum", context_game(5))):
        gap = measure(law, settings)["distance bayes-final"]
        assert gap is None or np.isfinite(gap)


# ------------------------------------------------------------------------------------------------------- training


def test_all_returns_begin_with_the_same_weights_but_for_the_third_action() -> None:
    one, other = (make_model(1, SETTINGS | {"returns": kind}) for kind in ("cum", "cost"))
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert name.startswith("read") or torch.equal(a, b)


def test_a_cell_is_a_function_of_its_seed() -> None:
    first, again = run_cell(1, copy.deepcopy(SETTINGS)), run_cell(1, copy.deepcopy(SETTINGS))
    assert first == again
    assert first != run_cell(2, copy.deepcopy(SETTINGS))
    assert first["curve"]["update"] == [0, 3]


def test_one_update_moves_towards_the_better_return() -> None:
    """A few large updates at H = 2: more money than at the start."""
    found = run_cell(0, SETTINGS | {"updates": 60, "batch": 128, "rate": 1e-2})
    assert found["curve"]["cum"][-1] > found["curve"]["cum"][0] + 0.04
    assert found["sample"]["optimum"] == pytest.approx(13 / 12)  # 1/2 + (2/3 + 1/2) / 2


def test_the_first_point_of_a_curve_is_the_untrained_policy() -> None:
    found = run_cell(0, SETTINGS)
    law = model_law(make_model(0, SETTINGS))
    assert found["curve"]["cum"][0] == pytest.approx(exact_return(law, context_game(2), "cum"))


@pytest.mark.slow
def test_p09_two_returns_make_two_policies() -> None:
    cum = run_cell(1000, USUAL | {"returns": "cum", "updates": 800})["sample"]
    final = run_cell(1000, USUAL | {"returns": "final", "updates": 800})["sample"]
    assert cum["cum"] > 2.80
    assert final["cum"] < 2.65
    assert cum["distance bayes-final"] > final["distance bayes-final"]


def test_walking_a_law_with_three_actions_uses_the_same_game() -> None:
    game = context_game(2)
    law = [np.full((len(c), 3), 1 / 3) for c in game.counts[:-1]]
    found = walk(law, game, generator(0, "t").random((9000, 2)), generator(1, "t"))
    assert found.playing[:, 1].mean() == pytest.approx(2 / 3, abs=0.02)
    paid = rewards_of("cost", 0.05, game, found).sum(1)
    assert paid.mean() == pytest.approx(exact_return(law, game, "cost", 0.05), abs=0.006)
