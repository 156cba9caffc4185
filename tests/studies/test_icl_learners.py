"""Interactive learners against traces computed by hand, closed forms and exact values."""

import numpy as np
import pytest

from assay.bandits import count_game, law_of, policy_value
from assay.rng import generator
from assay.studies.icl.learners import (
    BANDIT_RULES,
    ActiveRegression,
    Bernoulli,
    BernoulliLearner,
    Bisection,
    Linear,
    LinUcb,
    QLearning,
    Rls,
    Tabular,
    Threshold,
    Transition,
    fold,
    play,
    rls_start,
    rls_update,
)


def test_p04_recursive_least_squares_gives_the_trace_and_the_ridge_solution():
    pairs = [((1, 0), 1), ((1, 1), 0), ((0, 1), 2)]
    expected = [
        ([0.5, 0], [[0.5, 0], [0, 1]]),
        ([0.4, -0.2], [[0.4, -0.2], [-0.2, 0.6]]),
        ([0.125, 0.625], [[0.375, -0.125], [-0.125, 0.375]]),
    ]
    state = rls_start(2, 1.0)
    for i, (x, y) in enumerate(pairs):
        state = rls_update(state, np.array(x, float), y)
        features, labels = np.array([p[0] for p in pairs[: i + 1]], float), np.array([p[1] for p in pairs[: i + 1]])
        gram = features.T @ features + np.eye(2)
        assert state.w == pytest.approx(np.array(expected[i][0]), abs=1e-12)
        assert state.p == pytest.approx(np.array(expected[i][1]), abs=1e-12)
        assert state.w == pytest.approx(np.linalg.solve(gram, features.T @ labels), abs=1e-12)
        assert state.p == pytest.approx(np.linalg.inv(gram), abs=1e-12)


def test_p05_q_learning_gives_the_trace():
    learner = QLearning(states=2, actions=2, alpha=0.5, gamma=0.9)
    first, second = (0, 0, Transition(0.0, 1, False)), (1, 1, Transition(1.0, 0, True))
    states = fold(learner, *zip(first, second, first, second, first, strict=True))
    assert [q[0, 0] for q in states[1:]] == pytest.approx([0, 0, 0.225, 0.225, 0.45])
    assert [q[1, 1] for q in states[1:]] == pytest.approx([0, 0.5, 0.5, 0.75, 0.75])


def test_p06_bisection_ends_within_log2_queries_for_every_threshold():
    for n in (1, 2, 7, 15, 20, 63):
        limit = int(np.ceil(np.log2(n + 1)))
        used = []
        for theta in range(n + 1):
            learner, task = Bisection(n), Threshold(theta)
            state, queries = learner.start(), 0
            while state[0] < state[1]:
                law = learner.law(state, None, queries)
                a = int(law.argmax())
                assert law[a] == 1.0 and state[0] < a + 1 <= state[1]  # never a question whose answer is known
                state = learner.update(state, None, a, task.answer(None, a, queries, None)[0])
                queries += 1
            assert learner.output(state) == theta and queries <= limit
            used.append(queries)
        assert n != 15 or set(used) == {4}


def test_a_bandit_that_is_played_earns_what_exact_evaluation_says():
    game = count_game(5)
    for rule in ("ucb1", "greedy", "uniform"):
        total = []
        for i in range(1500):
            draw = generator(0, "learners", rule, i)
            found = play(BernoulliLearner(2, rule), Bernoulli(tuple(draw.random(2))), 5, draw)
            total.append(sum(found.answers))
        cum, _ = policy_value(law_of(rule, game), game)
        assert abs(np.mean(total) - cum) < 4 * np.std(total) / np.sqrt(1500)


def test_play_is_the_fold_of_its_own_interactions_and_same_draws_give_the_same_play():
    learner = BernoulliLearner(3, "thompson")
    one, again = (play(learner, Bernoulli((0.2, 0.5, 0.8)), 8, generator(3, "play")) for _ in range(2))
    assert one.actions == again.actions and one.answers == again.answers
    states = fold(learner, one.inputs, one.actions, one.answers)
    assert np.array_equal(states, one.states) and one.states[0].sum() == 0 and one.states[-1].sum() == 8


@pytest.mark.parametrize("rule", BANDIT_RULES)
def test_every_rule_gives_a_law_and_an_unknown_one_is_refused(rule):
    state = np.array([[2, 1], [0, 0]])
    law = BernoulliLearner(2, rule).law(state, None, 3)
    expected = {"ucb1": 0.0, "greedy": 1.0, "epsilon-greedy": 0.95, "uniform": 0.5, "thompson": 3 / 5}
    assert law == pytest.approx([expected[rule], 1 - expected[rule]], abs=1e-12)
    with pytest.raises(ValueError, match="ucb2"):
        BernoulliLearner(2, "ucb2").law(state, None, 3)


def test_active_regression_asks_where_it_knows_least():
    pool = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    learner = ActiveRegression(2)
    assert learner.law(learner.start(), pool, 0).argmax() == 1  # x'Px: 1, 4, 2
    after = learner.update(learner.start(), pool, 1, 0.0)  # P = diag(1, 1/5): 1, 4/5, 6/5
    assert learner.law(after, pool, 1).argmax() == 2
    found = play(
        ActiveRegression(2, ridge=1e-6), Linear(np.array([1.0, -2.0]), [pool], noise=0.0), 4, generator(0, "a")
    )
    assert ActiveRegression(2).output(found.states[-1]) == pytest.approx([1.0, -2.0], abs=1e-3)


def test_linucb_adds_its_width_to_its_estimate():
    arms = np.array([[1.0, 0.0], [0.0, 1.0]])
    state = Rls(np.diag([0.04, 1.0]), np.array([0.5, 0.0]))
    assert LinUcb(2, beta=1.0).law(state, arms, 0).tolist() == [0.0, 1.0]  # .5 + .2 against 0 + 1
    assert LinUcb(2, beta=0.5).law(state, arms, 0).tolist() == [1.0, 0.0]  # .5 + .1 against 0 + .5


def test_softmax_and_epsilon_greedy_laws_of_a_table():
    table = np.array([[1.0, 1.0, 0.0]])
    assert QLearning(1, 3, epsilon=0.3).law(table, 0, 0) == pytest.approx([0.45, 0.45, 0.1])
    assert QLearning(1, 3, temperature=1.0).law(table, 0, 0) == pytest.approx(np.exp(table[0]) / np.exp(table[0]).sum())


def test_q_learning_finds_the_way_in_a_small_process():
    """Two states: action 1 in state 0 pays 1 and stays, all else pays 0 and goes to state 0."""
    transitions = np.zeros((2, 2, 2))
    transitions[..., 0] = 1.0
    rewards = np.array([[0.0, 1.0], [0.0, 0.0]])
    found = play(QLearning(2, 2, epsilon=0.5), Tabular(transitions, rewards), 60, generator(0, "mdp"))
    assert QLearning(2, 2).output(found.states[-1])[0] == 1
