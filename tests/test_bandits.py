"""Golden numbers are those of the specification's tables, or come from fractions and brute force written here."""

import math
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from scipy.special import beta

from assay.bandits import (
    bayes,
    best_of,
    closed_loop,
    constant_step,
    constant_step_by_attention,
    context_digits,
    context_game,
    count_game,
    disagreement,
    distance,
    entropy,
    error_growth,
    info_gain,
    information,
    law_of,
    oracle_value,
    policy_value,
    pulls,
    thompson,
    tied,
    ucb1,
    visits,
)

TABLE = {  # two arms: (cum, final) at H = 5, 10, 20
    "bayes-cum": [(2.888889, 0.618651), (6.021786, 0.634147), (12.431265, 0.646183)],
    "bayes-final": [(2.5, 0.625), (5.0, 0.640833), (10.0, 0.652357)],
    "thompson": [(2.716380, 0.620862), (5.704544, 0.638186), (11.931792, 0.650437)],
    "argmax-thompson": [(2.884722, 0.617560), (6.003203, 0.630817), (12.350454, 0.638313)],
    "ucb1": [(2.727778, 0.625), (5.602189, 0.638889), (11.526158, 0.651579)],
    "greedy": [(2.884722, 0.617560), (6.005811, 0.631275), (12.365352, 0.639496)],
    "uniform": [(2.5, 0.621280), (5.0, 0.638968), (10.0, 0.651473)],
    "round-robin": [(2.5, 0.625), (5.0, 0.638889), (10.0, 0.651515)],
}


def row(game, step, *counts):
    """Index of the state (S1, F1, S2, F2)."""
    (found,) = np.flatnonzero((game.counts[step].reshape(-1, 4) == counts).all(1))
    return found


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("i", range(3))
def test_p02_every_listed_policy_has_its_exact_values(name, i):
    game = count_game((5, 10, 20)[i])
    assert policy_value(law_of(name, game), game) == pytest.approx(TABLE[name][i], abs=1e-6)


@pytest.mark.parametrize("i", range(3))
def test_p02_the_optimum_is_the_value_of_the_optimal_policy(i):
    game = count_game((5, 10, 20)[i])
    assert bayes(game, "cum").value == pytest.approx(TABLE["bayes-cum"][i][0], abs=1e-6)
    assert bayes(game, "final").value == pytest.approx(TABLE["bayes-final"][i][1], abs=1e-6)
    assert oracle_value(game.horizon) == pytest.approx((3.333333, 6.666667, 13.333333)[i], abs=1e-6)


@pytest.mark.parametrize(
    ("price", "value", "queries"),
    [
        (0.005, 0.610708, 4.930),
        (0.01, 0.591445, 3.665),
        (0.02, 0.564444, 2.333),
        (0.05, 0.533333, 1.0),
        (0.1, 0.5, 0.0),
    ],
)
def test_p02_a_price_on_pulls_shortens_the_search(price, value, queries):
    game = count_game(10)
    solution = bayes(game, ("cost", price))
    assert solution.value == pytest.approx(value, abs=1e-6)
    assert pulls(solution.law, game) == pytest.approx(queries, abs=5e-4)
    _, final = policy_value(solution.law, game)
    assert final - price * pulls(solution.law, game) == pytest.approx(solution.value, abs=1e-12)


def test_p02_backward_induction_equals_exact_fractions():
    """An independent recursion over dictionaries in exact arithmetic, H = 4, for three returns."""
    horizon, price = 4, Fraction(1, 50)
    values = {}
    for kind in ("cum", "final", "cost"):

        @cache
        def value(state, kind=kind):
            m = [Fraction(state[2 * k] + 1, state[2 * k] + state[2 * k + 1] + 2) for k in (0, 1)]
            if sum(state) == horizon:
                return Fraction(0) if kind == "cum" else max(m)
            found = []
            for k in (0, 1):
                up, down = list(state), list(state)
                up[2 * k] += 1
                down[2 * k + 1] += 1
                after = m[k] * value(tuple(up), kind) + (1 - m[k]) * value(tuple(down), kind)
                found.append(after + {"cum": m[k], "final": 0, "cost": -price}[kind])
            return max(found + ([max(m)] if kind == "cost" else []))

        values[kind] = float(value((0, 0, 0, 0)))
    game = count_game(horizon)
    for kind, expected in values.items():
        assert bayes(game, ("cost", 0.02) if kind == "cost" else kind).value == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize(
    ("horizon", "states", "apart", "ties_cum", "ties_final"),
    [(5, 70, 4, 8, 60), (10, 715, 62, 15, 571), (20, 8855, 840, 55, 6859)],
)
def test_p02_states_where_the_optima_disagree_and_where_they_are_tied(horizon, states, apart, ties_cum, ties_final):
    game = count_game(horizon)
    cum, final = bayes(game, "cum"), bayes(game, "final")
    assert sum(map(len, game.counts[:-1])) == states
    assert sum(mask.sum() for mask in disagreement(cum, final)) == apart
    assert [sum(mask.sum() for mask in tied(one.law)) for one in (cum, final)] == [ties_cum, ties_final]


def test_p02_the_example_of_a_disagreement():
    game = count_game(5)
    state = row(game, 3, 0, 0, 2, 1)
    cum, final = bayes(game, "cum"), bayes(game, "final")
    assert cum.q[3][state] == pytest.approx([1.133333, 1.2], abs=1e-6)
    assert final.q[3][state] == pytest.approx([0.65, 0.633333], abs=1e-6)
    assert disagreement(cum, final)[3][state]


DISTANCES = {  # H = 10: of the law that acts to UCB1, Bayes-cum, Bayes-final, on its own visits where those are not tied
    "ucb1": (0.000, 0.298, 0.741),
    "bayes-cum": (0.639, 0.000, 0.848),
    "bayes-final": (0.492, 0.494, 0.000),
    "thompson": (0.462, 0.241, 0.588),
    "argmax-thompson": (0.676, 0.049, 0.952),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_p02_distances_between_policies_on_visited_states_without_ties(name):
    game = count_game(10)
    found = [distance(law_of(name, game), law_of(other, game), game) for other in ("ucb1", "bayes-cum", "bayes-final")]
    assert found == pytest.approx(DISTANCES[name], abs=5e-4)


def test_a_distance_without_any_state_to_compare_is_unknown_not_zero():
    game = count_game(1)  # before the only pull every policy is indifferent
    assert math.isnan(distance(law_of("uniform", game), law_of("bayes-cum", game), game))


def test_tied_states_are_94_percent_of_visits_under_half_ucb1_half_uniform():
    game = count_game(10)
    ties = tied(law_of("bayes-final", game))
    share = 0.0
    for name in ("ucb1", "uniform"):
        seen = visits(law_of(name, game), game)[:-1]
        share += sum(float(p @ mask) for p, mask in zip(seen, ties, strict=True)) / 10 / 2
    assert share == pytest.approx(0.942, abs=5e-4) and share * math.log(2) == pytest.approx(0.6528, abs=5e-4)


# ------------------------------------------------------------------------------------------------------------ policies


def test_p03_thompson_law_of_three_states():
    found = thompson(np.array([[[0, 0], [0, 0]], [[1, 0], [0, 0]], [[1, 0], [0, 1]]]))
    assert found[:, 0] == pytest.approx([1 / 2, 2 / 3, 5 / 6], abs=1e-12)


def test_p03_thompson_law_equals_the_closed_sum_and_works_for_three_arms():
    rng = np.random.default_rng(0)
    for a1, b1, a2, b2 in rng.integers(1, 12, (40, 4)):
        terms = [beta(a1 + i, b1 + b2) / ((b2 + i) * beta(1 + i, b2) * beta(a1, b1)) for i in range(a2)]
        second = math.fsum(terms)  # P(the second is larger)
        found = thompson(np.array([[a1 - 1, b1 - 1], [a2 - 1, b2 - 1]]))
        assert found == pytest.approx([1 - second, second], abs=1e-12)
    three = thompson(np.array([[[0, 0]] * 3, [[1, 0], [0, 0], [0, 0]]]))
    assert three == pytest.approx(np.array([[1 / 3] * 3, [1 / 2, 1 / 4, 1 / 4]]), abs=1e-12)  # E x^2 2x = 1/2


def test_ucb1_pulls_what_was_never_pulled_then_the_largest_bound():
    assert ucb1(np.array([[0, 0], [0, 0], [3, 0]])).tolist() == [0.5, 0.5, 0.0]
    tried = ucb1(np.array([[1, 0], [0, 1]]))
    assert tried.tolist() == [1.0, 0.0]
    # t = 6: 4/5 + sqrt(2 ln 6 / 5) = 1.647 against 0/1 + sqrt(2 ln 6) = 1.893
    assert ucb1(np.array([[4, 1], [0, 1]])).tolist() == [0.0, 1.0]


def test_ties_are_uniform():
    assert best_of(np.array([0.1 + 0.2, 0.3, 0.0])).tolist() == [0.5, 0.5, 0.0]


def test_three_arms_have_the_value_of_exact_fractions():
    game = count_game(2, arms=3)
    assert len(game.counts[2]) == math.comb(7, 5)
    # after a success (1/2) stay: 2/3; after a failure an untried arm: 1/2
    assert bayes(game, "cum").value == pytest.approx(0.5 + 0.5 * 2 / 3 + 0.5 * 0.5, abs=1e-14)
    assert oracle_value(2, 3) == 1.5


# ------------------------------------------------------------------------------------------------------------- contexts


@pytest.mark.parametrize("name", ["bayes-cum", "ucb1", "thompson"])
def test_contexts_in_order_and_counts_give_the_same_values(name):
    ordered, merged = context_game(5), count_game(5)
    assert policy_value(law_of(name, ordered), ordered) == pytest.approx(policy_value(law_of(name, merged), merged))
    assert bayes(ordered, "final").value == pytest.approx(0.625, abs=1e-12)


def test_rows_of_contexts_are_their_digits():
    arms, outcomes = context_digits(3)
    counts = context_game(3).counts[3]
    assert len({(*a, *y) for a, y in zip(arms.tolist(), outcomes.tolist(), strict=True)}) == 64
    for i in range(64):
        for k in (0, 1):
            won = int(outcomes[i][arms[i] == k].sum())
            assert counts[i, k].tolist() == [won, int((arms[i] == k).sum()) - won]
    assert context_game(3).children[0][0, 1, 0] == 2  # arm 2, success: the third child
    assert (context_digits(1)[0][2, 0], context_digits(1)[1][2, 0]) == (1, 1)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2, 1.0])
@pytest.mark.parametrize("name", ["ucb1", "bayes-cum", "thompson"])
def test_p07_closed_loop_bounds_hold_for_a_perturbed_policy(name, noise):
    game = context_game(5)
    rng = np.random.default_rng(int(100 * noise))
    reference = law_of(name, game)
    law = [(1 - noise) * p + noise * rng.dirichlet([1, 1], len(p)) for p in reference]
    found = closed_loop(reference, law, game)
    assert found.tv <= found.drift + 1e-12 and (found.tv > 0) == (noise > 0)
    assert found.cum_gap <= found.cum_bound + 1e-12 and found.final_gap <= found.final_bound + 1e-12
    assert found.cum_bound == pytest.approx(5 * found.drift)


def test_p07_the_bound_is_met_with_equality_by_a_difference_at_the_last_decision():
    game = context_game(2)
    reference = law_of("uniform", game)
    law = [reference[0], np.tile([0.8, 0.2], (4, 1))]
    found = closed_loop(reference, law, game)
    assert found.drift == pytest.approx(0.3) and found.tv == pytest.approx(0.3)


def test_p07_drift_is_counted_where_the_reference_goes_alone():
    """The law differs in what follows arm 2 as well, which the reference never pulls: only the first decision counts."""
    game = context_game(2)
    reference = [np.array([[1.0, 0.0]]), np.tile([1.0, 0.0], (4, 1))]
    law = [np.array([[0.0, 1.0]]), np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])]
    found = closed_loop(reference, law, game)
    assert (found.tv, found.drift, found.final_bound, found.cum_bound) == pytest.approx((1.0, 1.0, 1.0, 2.0))


def test_p07_episodes_that_stop_count_as_what_they_are():
    game = context_game(1)
    reference, law = [np.array([[0.0, 0.0, 1.0]])], [np.array([[0.5, 0.0, 0.5]])]
    found = closed_loop(reference, law, game)
    assert (found.tv, found.drift) == pytest.approx((0.5, 0.5))
    assert policy_value(law, game) == pytest.approx((0.25, 0.5 * 0.5 + 0.5 * (0.5 * 2 / 3 + 0.5 * 0.5)))


# ---------------------------------------------------------------------------------------------- carrying the recursion


def test_p04_two_attention_layers_equal_the_constant_step_recursion():
    rng = np.random.default_rng(1)
    for _ in range(200):
        arms, rewards = rng.integers(0, 2, 20), rng.random(20)
        by_hand = constant_step(arms, rewards, 0.3)
        assert np.abs(constant_step_by_attention(arms, rewards, 0.3) - by_hand).max() < 1e-12


def test_p04_an_arm_that_was_never_pulled_reads_zero():
    found = constant_step_by_attention([1, 1], [1.0, 0.0], 0.5)
    assert found.tolist() == [[0.0, 0.5], [0.0, 0.25]] == constant_step([1, 1], [1.0, 0.0], 0.5).tolist()


@pytest.mark.parametrize("slope", [0.5, 1.0, 1.5, -0.7])
def test_p08_error_growth_is_an_equality_for_an_affine_update_with_a_constant_bias(slope):
    state = carried = 0.3
    bound = error_growth(slope, 0.01, 12)
    for t in range(12):
        state, carried = slope * state + 0.2, slope * carried + 0.2 + 0.01
        assert carried - state == pytest.approx(bound[t + 1], abs=1e-12)
    assert bound[0] == 0.0


# --------------------------------------------------------------------------------------------------------- information


def test_p11_information_telescopes():
    game = count_game(6)
    for name in ("uniform", "ucb1", "bayes-final"):
        law = law_of(name, game)
        left = float(visits(law, game)[-1] @ entropy(game.counts[-1]))
        assert information(law, game) == pytest.approx(float(entropy(game.counts[0][0])) - left, abs=1e-12)


def test_p11_entropy_of_a_uniform_mean_is_zero_and_gain_is_mutual_information():
    assert entropy([[0, 0], [0, 0]]) == pytest.approx(0.0, abs=1e-14)
    # Beta(1, 1): I = ln 2 - E[-x ln x - (1 - x) ln(1 - x)] = ln 2 - 1/2
    assert info_gain([[0, 0], [0, 0]]) == pytest.approx([math.log(2) - 0.5] * 2, abs=1e-13)


def test_p11_the_optimum_of_information_is_at_least_that_of_any_policy():
    game = count_game(6)
    best = bayes(game, "info")
    assert information(best.law, game) == pytest.approx(best.value, abs=1e-12)
    assert all(information(law_of(name, game), game) <= best.value + 1e-12 for name in TABLE)


def test_an_unknown_return_is_refused():
    with pytest.raises(ValueError, match="median"):
        bayes(count_game(1), "median")
