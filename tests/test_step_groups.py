"""GiGPO and HGPO as pure functions: golden numbers of the reference codes, brute force, what may not change them."""

from collections.abc import Hashable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.advantages import dr_grpo, grpo, returns
from assay.step_groups import anchor_groups, anchor_metrics, biased, episode_advantages, gigpo, hgpo, step_advantages

# the data of the reference runs: A visits s0, s1, s2 and succeeds, B visits s0, s3 and fails; discount .95
ANCHORS = [["s0", "s1", "s2"], ["s0", "s3"]]
REWARDS = [1.0, 0.0]
RETURNS = [[0.9025, 0.95, 1.0], [0.0, 0.0]]

grid = st.integers(-8, 8).map(lambda i: i / 4)  # spaced: equal or clearly different
traces = st.lists(st.lists(st.tuples(st.sampled_from("abc"), grid), max_size=6), min_size=1, max_size=5)


def flat(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(list(parts))


# ------------------------------------------------------------------------------------------------------------ GiGPO


def test_s09_step_returns_golden() -> None:
    np.testing.assert_allclose(returns([0.0, 0.0, 1.0], 0.95), [0.9025, 0.95, 1.0])
    np.testing.assert_array_equal(returns([0.0, 0.0], 0.95), [0.0, 0.0])


@pytest.mark.parametrize(
    ("norm", "episode_weight", "episode", "totals"),
    [
        ("none", "row", [0.4, -0.6], [0.85125, 0.4, 0.4, -1.05125, -0.6]),
        ("none", "trace", [0.5, -0.5], [0.95125, 0.5, 0.5, -0.95125, -0.5]),
        ("std", "row", [0.730295, -1.095443], [1.437401, 0.730295, 0.730295, -1.802549, -1.095443]),
        ("std", "trace", [0.707106, -0.707106], [1.414211, 0.707106, 0.707106, -1.414211, -0.707106]),
    ],
)
def test_s09_golden(norm: str, episode_weight: str, episode: list[float], totals: list[float]) -> None:
    estimator = {"none": dr_grpo, "std": grpo}[norm]
    np.testing.assert_allclose(episode_advantages(REWARDS, [3, 2], estimator, episode_weight), episode, atol=1.5e-6)
    found = gigpo(REWARDS, RETURNS, ANCHORS, norm=norm, episode_weight=episode_weight)
    np.testing.assert_allclose(flat(found), totals, atol=1.5e-6)


def test_s09_row_weighting_makes_long_episodes_weigh_more_for_grpo_too() -> None:
    """verl-agent's GRPO baseline has the same default: ten steps of a failure against one of a success."""
    np.testing.assert_allclose(episode_advantages([0.0, 1.0], [10, 1], dr_grpo, "row"), [-1 / 11, 10 / 11])
    np.testing.assert_allclose(episode_advantages([0.0, 1.0], [10, 1], dr_grpo), [-0.5, 0.5])


def test_s09_singletons_have_no_step_advantage_and_a_group_of_one_no_advantage_at_all() -> None:
    steps = step_advantages(RETURNS, ANCHORS, 1, dr_grpo)
    assert [s.tolist() for s in steps] == [[0.45125, 0.0, 0.0], [-0.45125, 0.0]]
    assert gigpo([1.0], [[0.95, 1.0]], [["a", "b"]])[0].tolist() == [0.0, 0.0]  # verl-agent: the raw reward


def test_s09_a_loop_is_compared_with_itself() -> None:
    """One trace sees x, x, y, x and is rewarded at the end: its three returns at x are .857375, .9025 and 1."""
    own = returns([0.0, 0.0, 0.0, 1.0], 0.95)
    (found,) = gigpo([1.0], [own], [["x", "x", "y", "x"]], norm="none")
    mean = (0.857375 + 0.9025 + 1.0) / 3
    np.testing.assert_allclose(found, [0.857375 - mean, 0.9025 - mean, 0.0, 1.0 - mean], atol=1e-12)


def test_s09_two_members_have_the_same_std_form_whatever_their_gap() -> None:
    small, large = [[0.95], [0.9025]], [[1.0], [0.0]]
    for own in (small, large):
        found = flat(gigpo([1.0, 1.0], own, [["x"], ["x"]]))
        np.testing.assert_allclose(found, [0.7071068, -0.7071068], atol=3e-5)
    assert flat(gigpo([1.0, 1.0], small, [["x"], ["x"]], norm="none")) == pytest.approx([0.02375, -0.02375])


def test_s09_without_discount_a_terminal_reward_says_nothing_of_when() -> None:
    """gamma 1: a success compares alike with a failure from whichever of its steps."""
    anchors = [["a", "b", "c"], ["a", "b", "c"]]
    found = gigpo([1.0, 0.0], [returns([0, 0, 1], 1.0), returns([0, 0, 0], 1.0)], anchors)
    assert len(set(flat(found).round(12))) == 2


@pytest.mark.parametrize("norm", ["std", "none"])
def test_s09_equal_returns_give_exactly_zero(norm: str) -> None:
    own, anchors = [[0.1 + 0.2, 0.3], [0.3, 0.3 + 1e-7]], [["a", "b"], ["a", "b"]]
    assert not flat(gigpo([0.1, 0.1], own, anchors, norm=norm)).any()
    assert not flat(hgpo(own, anchors, norm=norm)).any()


def test_s09_weight_zero_is_the_episode_advantage_bit_for_bit() -> None:
    found = gigpo([1.0, 0.0, 0.25], [*RETURNS, [0.3]], [*ANCHORS, ["s0"]], weight=0.0)
    for one, advantage in zip(found, grpo([1.0, 0.0, 0.25]), strict=True):
        assert (one == advantage).all()


@settings(max_examples=25, deadline=None)
@given(traces, st.sampled_from(["std", "none"]), st.sampled_from([0.0, 0.5, 1.0]))
def test_s09_gigpo_is_its_double_loop(data: list, norm: str, weight: float) -> None:
    anchors = [[a for a, _ in steps] for steps in data]
    own = [[r for _, r in steps] for steps in data]
    rewards = [sum(r) for r in own]

    def against(value: float, peers: list[float]) -> float:
        if max(peers) - min(peers) < 1e-6:
            return 0.0
        mean = sum(peers) / len(peers)
        std = (sum((p - mean) ** 2 for p in peers) / (len(peers) - 1)) ** 0.5 + 1e-6
        return (value - mean) / (std if norm == "std" else 1.0)

    for i, found in enumerate(gigpo(rewards, own, anchors, weight, norm)):
        for t, value in enumerate(found):
            peers = [own[j][u] for j in range(len(data)) for u in range(len(data[j])) if anchors[j][u] == anchors[i][t]]
            expected = against(rewards[i], rewards) + weight * against(own[i][t], peers)
            assert value == pytest.approx(expected, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(traces, grid, st.sampled_from([0.5, 2.0, 10.0]), st.integers(0, 99))
def test_s19_shift_scale_and_permutation(data: list, shift: float, scale: float, seed: int) -> None:
    anchors = [[a for a, _ in steps] for steps in data]
    own = [np.array([r for _, r in steps], np.float64) for steps in data]
    rewards = np.array([r.sum() for r in own])
    order = np.random.default_rng(seed).permutation(len(data))
    for name in ("gigpo", "hgpo"):

        def estimate(rewards: np.ndarray, own: list, anchors: list, norm: str, name: str = name) -> list[np.ndarray]:
            return gigpo(rewards, own, anchors, norm=norm) if name == "gigpo" else hgpo(own, anchors, 1, norm=norm)

        for norm in ("std", "none"):
            usual = estimate(rewards, own, anchors, norm)
            shifted = estimate(rewards + shift, [r + shift for r in own], anchors, norm)
            np.testing.assert_allclose(flat(shifted), flat(usual), atol=1e-9)
            scaled = estimate(rewards * scale, [r * scale for r in own], anchors, norm)
            np.testing.assert_allclose(flat(scaled), flat(usual) * (1 if norm == "std" else scale), atol=1e-4)
            moved = estimate(rewards[order], [own[i] for i in order], [anchors[i] for i in order], norm)
            for place, i in enumerate(order):
                np.testing.assert_allclose(moved[place], usual[i], atol=1e-12)


# ------------------------------------------------------------------------------------------------------------- HGPO


def test_s10_golden_of_two_traces() -> None:
    found = flat(hgpo(RETURNS, ANCHORS, norm="none"))
    np.testing.assert_allclose(found, [0.45125, 0, 0, -0.45125, 0], atol=1e-6)
    np.testing.assert_allclose(flat(hgpo(RETURNS, ANCHORS)), [0.999997, 0, 0, -0.999997, 0], atol=1e-6)


def test_s10_golden_with_the_row_weighted_episode_as_level_zero() -> None:
    base = episode_advantages(REWARDS, [3, 2], dr_grpo, "row")
    found = flat(hgpo(RETURNS, ANCHORS, norm="none", base=base))
    np.testing.assert_allclose(found, [0.434166, 0.4, 0.4, -0.500833, -0.6], atol=1e-6)


def test_s10_golden_of_three_traces() -> None:
    own, anchors = [[0.95, 1], [0, 0], [0.95, 1]], [["s0", "s1"], ["s0", "s1"], ["s0", "s4"]]
    found = flat(hgpo(own, anchors, norm="none"))
    np.testing.assert_allclose(found, [0.316667, 0.5, -0.633333, -0.5, 0.316667, 0], atol=1e-6)


THREE = [["s0", "s1"], ["s0", "s1"], ["s4", "s1"]]


def test_s10_golden_that_separates_the_levels() -> None:
    own = [[0.95, 1], [0, 0], [0.95, 1]]
    found = flat(hgpo(own, THREE, history=1, norm="none"))
    np.testing.assert_allclose(found, [0.475, 0.433333, -0.475, -0.566667, 0, 0.333333], atol=1e-6)
    found = flat(hgpo(own, THREE, history=1))
    np.testing.assert_allclose(found, [0.999997, 0.882841, -0.999997, -1.165683, 0, 0.707105], atol=1e-6)


def test_s10_the_first_level_is_gigpo_s_anchor_group() -> None:
    own, anchors = [[0.95, 1], [0, 0], [0.95, 1]], THREE
    expected = flat(step_advantages(own, anchors, 1, dr_grpo))
    np.testing.assert_allclose(flat(hgpo(own, anchors, history=0, norm="none")), expected, atol=2e-6)


def test_s10_alpha_zero_counts_all_levels_alike() -> None:
    found = flat(hgpo([[0.95, 1], [0, 0], [0.95, 1]], THREE, history=1, alpha=0.0, norm="none"))
    assert found[1] == pytest.approx((1 / 3 + 1 / 2) / 2, abs=1e-6)


def test_s10_a_level_that_says_average_is_ignored_not_averaged_in() -> None:
    """Returns 0, .5, 1 behind s1; the middle one is at the mean of level 1 and above that of level 2."""
    own, anchors = [[0.0, 0.5], [0.0, 0.0], [0.0, 1.0]], [["a", "s"], ["a", "s"], ["b", "s"]]
    found = hgpo(own, anchors, history=1, norm="none")
    assert found[0][1] == pytest.approx(0.25, abs=1e-6)  # averaged in, it would be 3/5 of that


def test_s10_rounding_does_not_decide_whether_a_level_counts() -> None:
    """.1, .2, .3: the middle is the mean, and in floating point differs from it in the last bit."""
    own, anchors = [[0.0, 0.2], [0.0, 0.1], [0.0, 0.1 * 3]], [["a", "s"], ["a", "s"], ["b", "s"]]
    assert hgpo(own, anchors, history=1, norm="none")[0][1] == pytest.approx(0.05, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(traces, st.sampled_from(["std", "none"]), st.integers(0, 3), st.sampled_from([0.0, 1.0, 2.0]))
def test_s10_hgpo_is_its_triple_loop(data: list, norm: str, history: int, alpha: float) -> None:
    anchors = [[a for a, _ in steps] for steps in data]
    own = [[r for _, r in steps] for steps in data]
    found = hgpo(own, anchors, history, alpha, norm)
    for i in range(len(data)):
        for t in range(len(data[i])):
            above, below = 0.0, 1e-6
            for k in range(1, min(history + 1, t + 1) + 1):
                peers = []
                for j in range(len(data)):
                    for u in range(k - 1, len(data[j])):
                        if all(anchors[j][u - b] == anchors[i][t - b] for b in range(k)):
                            peers.append(own[j][u])
                centred = own[i][t] - sum(peers) / len(peers)
                if len(peers) > 1 and abs(centred) > 1e-9:
                    std = float(np.std(peers)) + 1e-6
                    above += (k + 1) ** alpha * centred / (std if norm == "std" else 1.0)
                    below += (k + 1) ** alpha
            assert found[i][t] == pytest.approx(above / below, abs=1e-8)


def test_s10_its_std_is_the_biased_one() -> None:
    np.testing.assert_allclose(biased([1, 0, 0, 1]), [1, -1, -1, 1], atol=3e-6)
    assert biased([0.1, 0.1, 0.1]).tolist() == [0.0, 0.0, 0.0]
    assert np.abs(biased([0.5, 0.5 + 1e-5])).max() < 0.01  # 1 without the floor


# ------------------------------------------------------------------------------------------------ groups and figures


def test_anchor_groups_by_hand() -> None:
    found = [g.tolist() for g in anchor_groups([["a", "b", "a"], ["a", "b"]], 1)]
    assert found == [[[0, 0], [0, 2], [1, 0]], [[0, 1], [1, 1]]]
    assert [g.tolist() for g in anchor_groups([["a", "b", "a"], ["a", "b"]], 2)] == [[[0, 1], [1, 1]], [[0, 2]]]
    assert anchor_groups([[], ["a"]], 2) == []


def test_anchor_metrics_by_hand() -> None:
    """a: three steps, two of them of one trace (3 pairs, 1 inside); b: two (1 pair); c: alone."""
    members = anchor_groups([["a", "b", "a"], ["a", "b", "c"]], 1)
    expected = {"anchor_groups": 2 / 3, "anchor_singletons": 1 / 6, "anchor_size": 2.0, "anchor_within": 1 / 4}
    assert anchor_metrics(members) == pytest.approx(expected)
    alone = anchor_metrics(anchor_groups([["a", "b"]], 1))
    assert alone == {"anchor_groups": 0.0, "anchor_singletons": 1.0, "anchor_size": 1.0, "anchor_within": 0.0}
    assert anchor_metrics([]) == {}


def test_traces_without_a_step_count_in_the_episode_statistic_only() -> None:
    anchors: list[list[Hashable]] = [["a"], []]
    found = gigpo([1.0, 0.0], [[1.0], []], anchors, norm="none")
    assert [f.tolist() for f in found] == [[0.5], []]
    assert [f.tolist() for f in hgpo([[1.0], []], anchors)] == [[0.0], []]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="norm is 'std' or 'none', not 'mean'"):
        gigpo(REWARDS, RETURNS, ANCHORS, norm="mean")
    with pytest.raises(ValueError, match="episode_weight is 'trace' or 'row', not 'step'"):
        gigpo(REWARDS, RETURNS, ANCHORS, episode_weight="step")
    with pytest.raises(ValueError, match="one entry per step"):
        gigpo(REWARDS, [[1.0], [0.0, 0.0]], ANCHORS)
