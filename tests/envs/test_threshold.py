"""The threshold game: bisection is exact, and what every environment must keep."""

import math

import gymnasium.utils.env_checker
import pytest

from assay.envs.registry import make
from assay.envs.threshold import RETURNS, Threshold, least
from assay.protocols import SPLITS, UserError


def start(env, task, split="train"):
    return env.reset(options={"task": task, "split": split})


def test_an_episode_reads_as_the_page_says():
    env = make("threshold")
    observation, info = start(env, 5)
    assert observation == "1 to 15" and info["horizon"] == 4 and len(info["admissible"]) == 15
    assert [env.step(q)[:4] for q in ("8", "4", "6", "5")] == [
        ("8 no", 0.0, False, False),
        ("4 yes", 0.0, False, False),
        ("6 no", 0.0, False, False),
        ("5 yes", 1.0, True, False),
    ]
    with pytest.raises(UserError, match="call reset"):
        env.step("1")


def test_p06_the_expert_needs_at_most_log2_questions_and_exactly_4_for_15():
    for n in (1, 2, 7, 15, 20, 63):
        env = Threshold(n=n)
        used = []
        for theta in range(n + 1):
            start(env, theta)
            for turn in range(1, 99):
                _, _, found, truncated, info = env.step(env.expert())
                assert not truncated
                if found:
                    assert info["success"] and env.evidence()["gold"] == [str(theta)]
                    used.append(turn)
                    break
        assert len(used) == n + 1 and max(used) <= math.ceil(math.log2(n + 1))
        assert n != 15 or set(used) == {4}


def test_any_other_question_first_leaves_some_number_unknown():
    """15 questions, 4 turns: only 8 leaves both halves within 3 more."""
    env = Threshold()
    for query in range(1, 16):
        known = 0
        for theta in range(16):
            start(env, theta)
            answer = env.step(str(query))
            while not (answer[2] or answer[3]):
                answer = env.step(env.expert())
            known += answer[2]
        assert (known == 16) == (query == 8)


def test_what_is_not_a_question_costs_a_turn_and_changes_nothing():
    env = Threshold()
    start(env, 3)
    for bad in ("0", "16", "eight", "", "-1", "8.0"):
        before = env.snapshot()
        if before[-1] == 4:
            start(env, 3)
        shown, reward, _, _, info = env.step(bad)
        assert (shown, reward, info["valid"], info["noop"], info["skill"]) == ("none", 0.0, False, True, "other")


def test_a_question_whose_answer_is_known_is_valid_and_useless():
    env = Threshold(slack=2)
    start(env, 10)
    env.step("8")
    shown, _, _, _, info = env.step("5")
    assert shown == "5 yes" and info["valid"] and info["noop"] and info["skill"] == "known"
    assert env.expert() == "12"
    assert env.step("10")[4]["skill"] == "cuts"
    start(env, 3)
    env.step("8")
    assert env.step("12")[4]["skill"] == "known" and env.expert() == "4"  # what was known stays known


def test_the_horizon_truncates_and_is_a_failure():
    env = Threshold()
    start(env, 10)
    answers = [env.step("1") for _ in range(4)]
    assert [a[3] for a in answers] == [False, False, False, True] and not answers[-1][4]["success"]
    checks = {check["name"]: check for check in env.evidence()["checks"]}
    assert checks["number known"]["value"] == "1 to 15" and not checks["bisection can still end in time"]["passed"]


@pytest.mark.parametrize("theta", range(16))
def test_all_returns_sum_to_1_for_bisection(theta):
    for returns in RETURNS:
        env, total, done = Threshold(returns=returns), 0.0, False
        start(env, theta)
        while not done:
            _, reward, done, _, _ = env.step(env.expert())
            total += reward
        assert total == pytest.approx(1.0)


def test_info_pays_the_bits_of_an_answer_and_process_the_question():
    env = Threshold(returns="info")
    start(env, 15)
    assert env.step("4")[1] == pytest.approx(math.log2(16 / 12) / 4)  # 4..15 stay
    env = Threshold(returns="process")
    start(env, 15)
    assert [env.step(q)[1] for q in ("8", "11", "14")] == [0.25, 0.0, 0.0]  # after 8 and 11: 13 halves 11..15


def test_restore_on_another_object_gives_an_identical_future():
    one, other = Threshold(slack=3), Threshold(slack=3)
    start(one, 11, "ood"), start(other, 5)
    one.step("7"), one.step("bad")
    other.restore(one.snapshot())
    done = False
    while not done:
        action = one.expert()
        assert action == other.expert()
        answer = one.step(action)
        assert answer == other.step(action) and one.evidence() == other.evidence()
        done = answer[2] or answer[3]


def test_ood_is_another_range_and_a_hash_tells_splits_apart():
    env = Threshold()
    assert start(env, 40, "ood")[0] == "1 to 31"
    assert len({start(env, 0, split)[1]["hash"] for split in SPLITS}) == 3
    assert start(env, 3)[1]["hash"] == start(env, 19)[1]["hash"] != start(env, 4)[1]["hash"]


def test_version_changes_with_every_setting_and_bad_ones_are_refused():
    variants = [{}, {"n": 7}, {"ood_n": 63}, {"slack": 1}, {"returns": "info"}]
    assert len({Threshold(**settings).version for settings in variants}) == len(variants)
    for settings, words in (({"n": 0}, "n is 0"), ({"ood_n": 15}, "another range"), ({"returns": "x"}, "'x'")):
        with pytest.raises(UserError, match=words):
            Threshold(**settings)
    with pytest.raises(UserError, match="task is -1"):
        start(Threshold(), -1)


def test_least_is_the_ceiling_of_log2():
    assert all(least(n) == math.ceil(math.log2(n + 1)) for n in range(1000))


def test_gymnasium_check_env_passes():
    gymnasium.utils.env_checker.check_env(Threshold(), skip_render_check=True)
