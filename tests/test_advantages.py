"""Golden numbers by hand or from the reference codes, brute force in a few lines, and what rewards may not change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.advantages import (
    all_equal,
    centre,
    dr_grpo,
    gae,
    grpo,
    place_rewards,
    reinforce_pp,
    reinforce_pp_baseline,
    returns,
    rloo,
    whiten,
)

GROUP_ESTIMATORS = [grpo, dr_grpo, rloo]
grid = st.integers(-40, 40).map(lambda i: i / 4)  # spaced rewards: equal or clearly different
groups = st.lists(grid, min_size=1, max_size=12)
tokens = st.lists(st.floats(-3, 3, allow_nan=False), min_size=1, max_size=12)


# ------------------------------------------------------------------------------------------------ group statistics


def test_grpo_golden_numbers() -> None:
    np.testing.assert_allclose(grpo([1, 0, 0, 1]), [0.866024, -0.866024, -0.866024, 0.866024], atol=5e-7)
    np.testing.assert_allclose(grpo([1, 0, 0, 1], epsilon=1e-4)[:2], [0.86588, -0.86588], atol=5e-6)
    np.testing.assert_allclose(grpo([1] + [0] * 7), [2.474867] + [-0.353552] * 7, atol=1e-6)


def test_dr_grpo_and_rloo_golden_numbers() -> None:
    np.testing.assert_allclose(dr_grpo([1, 0, 0, 1]), [0.5, -0.5, -0.5, 0.5])
    np.testing.assert_allclose(rloo([1, 0, 0, 1]), [2 / 3, -2 / 3, -2 / 3, 2 / 3])


@given(groups.filter(lambda r: len(r) > 1))
def test_group_estimators_agree_with_their_definitions(rewards: list[float]) -> None:
    n, mean = len(rewards), sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (n - 1)) ** 0.5
    others = [(sum(rewards) - r) / (n - 1) for r in rewards]
    np.testing.assert_allclose(rloo(rewards), [r - o for r, o in zip(rewards, others, strict=True)], atol=1e-12)
    np.testing.assert_allclose(dr_grpo(rewards), [r - mean for r in rewards], atol=1e-12)
    if len(set(rewards)) > 1:
        np.testing.assert_allclose(grpo(rewards), [(r - mean) / (std + 1e-6) for r in rewards], atol=1e-9)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [1.0], [0.0], [1, 1 + 1e-7, 1 - 1e-7, 1], [0.1 + 0.2, 0.3], []])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(estimator, rewards) -> None:
    advantages = estimator(rewards)
    assert advantages.shape == (len(rewards),) and (advantages == 0.0).all()


def test_a_spread_just_above_a_tie_is_not_blown_up() -> None:
    assert np.abs(grpo([0.5, 0.5 + 1e-5])).max() < 0.01  # 0.7 without the floor under the std
    assert not all_equal([0.5, 0.5 + 1e-5])


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_an_environment_error_neither_poisons_nor_moves_its_group(estimator) -> None:
    advantages = estimator([1, np.nan, 0, 0, 1])
    assert np.isnan(advantages[1])
    np.testing.assert_array_equal(np.delete(advantages, 1), estimator([1, 0, 0, 1]))
    np.testing.assert_array_equal(estimator([np.nan, 1.0]), [np.nan, 0.0])
    assert np.isnan(estimator([np.nan, np.nan])).all()


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@given(rewards=groups, shift=grid, scale=st.sampled_from([0.5, 2.0, 10.0]), seed=st.integers(0, 99))
def test_shift_scale_permutation_and_sum(estimator, rewards, shift, scale, seed) -> None:
    r = np.array(rewards)
    advantages = estimator(r)
    assert abs(advantages.sum()) < 1e-9
    np.testing.assert_allclose(estimator(r + shift), advantages, atol=1e-9)
    order = np.random.default_rng(seed).permutation(len(r))
    np.testing.assert_allclose(estimator(r[order]), advantages[order], atol=1e-12)
    np.testing.assert_allclose(estimator(r * scale), advantages * (1 if estimator is grpo else scale), atol=1e-4)


@given(groups.filter(lambda r: len(r) > 1))
def test_rloo_is_dr_grpo_times_g_over_g_minus_1(rewards: list[float]) -> None:
    np.testing.assert_allclose(rloo(rewards), dr_grpo(rewards) * len(rewards) / (len(rewards) - 1), atol=1e-12)


def test_float32_rewards_are_computed_in_float64() -> None:
    rewards = np.array([0.1, 0.7, 0.2, 0.9], np.float32)
    np.testing.assert_array_equal(grpo(rewards), grpo(rewards.astype(np.float64)))
    assert grpo(rewards).dtype == np.float64


def test_a_matrix_of_rewards_is_refused_instead_of_mixed_into_one_group() -> None:
    with pytest.raises(ValueError, match="one-dimensional"):
        grpo([[1, 0], [0, 1]])


# ------------------------------------------------------------------------------------------------ token statistics


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1.0, 1.0, [0.8, 0.7, 0.6, 0.5]),
        (1.0, 0.95, [0.713938, 0.64625, 0.575, 0.5]),
        (0.99, 0.95, [0.687274, 0.627618, 0.56525, 0.5]),
    ],
)
def test_gae_golden_numbers_of_two_turns(gamma, lam, expected) -> None:
    values, sampled = np.array([0.2, 0.3, 9, 9, 0.4, 0.5]), np.array([1, 1, 0, 0, 1, 1], bool)
    advantages, targets = gae([0, 0, 0, 1], values[sampled], gamma, lam)
    np.testing.assert_allclose(advantages, expected, atol=1e-6)
    np.testing.assert_allclose(targets, advantages + values[sampled])


@given(tokens, st.integers(0, 99), st.floats(0, 1), st.floats(0, 1), st.floats(-2, 2))
def test_gae_is_the_discounted_sum_of_temporal_differences(rewards, seed, gamma, lam, bootstrap) -> None:
    n = len(rewards)
    values = [*np.random.default_rng(seed).normal(size=n), bootstrap]
    delta = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(n)]
    expected = [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, n)) for t in range(n)]
    np.testing.assert_allclose(gae(rewards, values[:-1], gamma, lam, bootstrap)[0], expected, atol=1e-9)


def test_gae_of_a_cut_episode_bootstraps_and_of_a_finished_one_does_not() -> None:
    assert gae([0.0], [0.25], gamma=0.5, bootstrap=2.0)[0] == [0.75]
    assert gae([0.0], [0.25], gamma=0.5)[0] == [-0.25]


def test_discount_per_turn_does_not_punish_long_answers() -> None:
    np.testing.assert_allclose(returns([0, 0, 0, 0, 1], 0.5, turns=[0, 0, 0, 1, 1]), [0.5, 0.5, 0.5, 1, 1])
    np.testing.assert_allclose(returns([0, 0, 1], 0.5, bootstrap=4.0, turns=[0, 1, 1]), [1.5, 3.0, 3.0])
    advantages, _ = gae([0, 0, 1], [0, 0, 0], gamma=0.5, turns=[0, 0, 1])
    np.testing.assert_allclose(advantages, [0.5, 0.5, 1])


def test_turn_returns_golden_number() -> None:
    np.testing.assert_allclose(returns([0, 0, 1], 0.95), [0.9025, 0.95, 1])  # the step returns of GiGPO's example


@given(tokens, st.floats(0, 1))
def test_returns_agree_with_the_double_sum(rewards, gamma) -> None:
    n = len(rewards)
    expected = [sum(gamma ** (u - t) * rewards[u] for u in range(t, n)) for t in range(n)]
    np.testing.assert_allclose(returns(rewards, gamma), expected, atol=1e-9)


def test_turn_rewards_stand_on_the_last_token_of_their_turn_and_none_is_lost() -> None:
    np.testing.assert_array_equal(place_rewards([1, 2, 3], [0, 0, 1, 2, 2]), [0, 1, 2, 0, 3])
    np.testing.assert_array_equal(place_rewards([1, 2, 3, 4], [1, 1, 3]), [1, 5, 4])  # turns 0 and 2 sampled nothing
    with pytest.raises(ValueError, match="empty"):
        place_rewards([1.0], [])
    with pytest.raises(ValueError, match="one reward per turn"):
        place_rewards([1.0], [0, 1])


def test_whitening_is_over_tokens_and_leaves_nan_out() -> None:
    out = whiten([[1.0, 2.0, np.nan], [6.0]])
    mean, std = 3.0, np.sqrt((4 + 1 + 9) / 2)
    np.testing.assert_allclose(np.concatenate(out), [(1 - mean) / std, (2 - mean) / std, np.nan, (6 - mean) / std])
    assert [len(a) for a in out] == [3, 1]


@pytest.mark.parametrize("values", [[[0.1] * 3, [0.1]], [[5.0]], [[]], []])
def test_whitening_equal_values_gives_exactly_zero(values) -> None:
    assert all((a == 0).all() for a in whiten(values))


def test_centring_keeps_the_spread_and_leaves_nan_out() -> None:
    out = centre([[1.0, 2.0, np.nan], [6.0]])
    np.testing.assert_allclose(np.concatenate(out), [-2.0, -1.0, np.nan, 3.0])
    assert all((a == 0).all() for values in ([[0.1] * 3, [0.1]], [[5.0]], [[]], []) for a in centre(values))


def test_reinforce_pp_credits_the_first_turn_of_a_success() -> None:
    success, failure = reinforce_pp([[0, 0, 0, 1], [0, 0, 0, 0]])
    np.testing.assert_allclose(success, [0.9354] * 4, atol=5e-5)
    np.testing.assert_allclose(failure, [-0.9354] * 4, atol=5e-5)
    reset, _ = whiten([[0, 0, 1, 1], [0, 0, 0, 0]])  # what a return that is reset at the observation would give
    np.testing.assert_allclose(reset, [-0.5401, -0.5401, 1.6202, 1.6202], atol=5e-5)


def test_reinforce_pp_keeps_a_trace_without_reward_out_of_the_statistics() -> None:
    success, error, failure = reinforce_pp([[0, 1], [0, np.nan], [0, 0]])
    np.testing.assert_array_equal(np.r_[success, failure], np.concatenate(reinforce_pp([[0, 1], [0, 0]])))
    assert np.isnan(error).all()


def test_reinforce_pp_baseline_centres_per_group_then_whitens_over_tokens() -> None:
    out = reinforce_pp_baseline([1, 5, 0, 7], ["a", "b", "a", "b"], [1, 2, 1, 1])
    centred = np.array([0.5, -1, -1, -0.5, 1])  # tokens, in trace order
    expected = (centred - centred.mean()) / centred.std(ddof=1)
    np.testing.assert_allclose(np.concatenate(out), expected, rtol=1e-7)
    with pytest.raises(ValueError, match="one of each per trace"):
        reinforce_pp_baseline([1, 2], ["a"], [1, 1])


@settings(max_examples=50)
@given(st.lists(tokens, min_size=2, max_size=5), st.integers(0, 99))
def test_whitening_does_not_depend_on_the_order_of_traces(values, seed) -> None:
    order = np.random.default_rng(seed).permutation(len(values))
    direct = whiten(values)
    for a, i in zip(whiten([values[i] for i in order]), order, strict=True):
        np.testing.assert_allclose(a, direct[i], atol=1e-9)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry per sampled token"):
        gae([0, 1], [0.5])
    with pytest.raises(ValueError, match="one entry per token"):
        returns([0, 1], turns=[0])
