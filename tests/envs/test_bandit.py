"""The text bandit against exact values, and what every environment must keep."""

import itertools

import gymnasium.utils.env_checker
import numpy as np
import pytest

from assay.bandits import count_game, oracle_value, policy_value
from assay.envs.bandit import REFERENCES, RETURNS, Bandit
from assay.envs.base import bucket
from assay.envs.registry import make
from assay.protocols import SPLITS, UserError


def start(env, task, split="train"):
    return env.reset(options={"task": task, "split": split})


def play(env, task, actions, split="train"):
    """Answers of `step` to the actions, "expert" among them."""
    start(env, task, split)
    return [env.step(env.expert() if action == "expert" else action) for action in actions]


def test_an_episode_reads_as_the_page_says():
    env = make("bandit", horizon=3)
    observation, info = start(env, 4)
    assert observation == "3 left" and info["admissible"] == ["1", "2"] and info["horizon"] == 3
    shown, reward, ended, truncated, info = env.step("arm 2")
    assert shown == f"2: {int(reward)}, 2 left" and not ended and not truncated and info["skill"] == "arm 2"
    assert env.step(" 1 ")[0].startswith("1: ") and env.step("2")[2]
    with pytest.raises(UserError, match="call reset"):
        env.step("1")


def test_payments_are_a_function_of_task_turn_and_arm():
    env = Bandit(horizon=4)
    for split in SPLITS:
        paid = {}
        for actions in itertools.product("12", repeat=4):
            for turn, answer in enumerate(play(env, 9, actions, split)):
                assert paid.setdefault((turn, actions[turn]), answer[1]) == answer[1]


def test_payments_come_with_the_arms_probability_and_the_arms_from_the_prior():
    env = Bandit(horizon=1)
    paid = np.array([play(env, task, "1")[0][1] for task in range(4000)])
    means = np.array([env.means("train", task)[0] for task in range(4000)])
    for low in np.arange(0, 1, 0.25):
        own = (means >= low) & (means < low + 0.25)
        assert abs(paid[own].mean() - means[own].mean()) < 0.05 and abs(own.mean() - 0.25) < 0.03
    assert abs(np.mean([env.means("ood", task) for task in range(2000)]) - 0.25) < 0.02  # Beta(1, 3)


GOLDEN = [0.36483, 0.236189, 0.077652, 0.742881, 0.036124, 0.219872]
GOLDEN_PAYMENTS = "11001111011110111010"
# pulls left from which arm 1 is worth a try at (0, 0, 2, 1): with 7 Q is (4.410, 4.415), with 8 (5.074, 5.072)
EXPLORES = 8


@pytest.mark.parametrize("returns", ["cum", "final"])
def test_the_expert_earns_the_exact_optimum(returns):
    env = Bandit(horizon=5, returns=returns)
    found = [sum(answer[1] for answer in play(env, task, ["expert"] * 5)) for task in range(2500)]
    optimum = {"cum": 2.888889, "final": 0.625}[returns]
    assert env.optimum() == pytest.approx(optimum, abs=1e-6)
    assert abs(np.mean(found) - optimum) < 4 * np.std(found) / 50


def test_final_pays_the_posterior_mean_of_the_recommended_arm_at_the_end_only():
    answers = play(Bandit(horizon=3, returns="final"), 1, "112")
    won = [int(answer[0][3]) for answer in answers]
    means = [(won[0] + won[1] + 1) / 4, (won[2] + 1) / 3]
    assert [answer[1] for answer in answers] == pytest.approx([0, 0, max(means)])


def test_cost_charges_each_pull_and_stopping_ends_it():
    env = Bandit(horizon=10, returns="cost", price=0.1)
    assert play(env, 0, ["stop"])[0][:4] == ("stop, 9 left", 0.5, True, False)  # nothing seen: 1/2
    answers = play(env, 0, ["1", "stop"])
    assert answers[0][1] == -0.1 and answers[1][1] == max(0.5, (int(answers[0][0][3]) + 1) / 3)
    assert start(env, 0)[1]["admissible"] == ["1", "2", "stop"] and env.expert() == "stop"  # too dear to look
    assert Bandit(returns="cost", price=0.02).optimum() == pytest.approx(0.564444, abs=1e-6)
    assert not play(Bandit(), 0, ["stop"])[0][4]["valid"]  # no such action elsewhere


def test_process_pays_for_what_the_reference_might_do():
    env = Bandit(horizon=4, returns="process", reference="ucb1")
    assert [a[1] for a in play(env, 3, ["expert"] * 4)] == [0.25] * 4 and env.optimum() == 1.0
    answers = play(env, 3, "11")  # either arm first; then UCB1 wants the untried one
    assert [a[1] for a in answers] == [0.25, 0.0]
    assert [a[1] for a in play(env, 3, "12")] == [0.25, 0.25]


def test_the_experts_choice_among_equals_is_fair_and_fixed_by_task_and_turn():
    env = Bandit(horizon=5)
    first = []
    for task in range(400):
        start(env, task)
        first.append(env.expert())
        assert env.expert() == first[-1]
    assert abs(first.count("1") / 400 - 0.5) < 0.08


def test_a_wasted_turn_changes_nothing_and_shortens_the_experts_game():
    env = Bandit(horizon=6)
    start(env, 0)
    shown, reward, ended, _, info = env.step("arm 3")
    assert (shown, reward, ended, info["valid"], info["noop"]) == ("none, 5 left", 0.0, False, False, True)
    assert [env.step("x") for _ in range(5)][-1][:3] == ("none, 0 left", 0.0, True)
    found = []
    for task in range(60):  # where arm 2 pays 2 of 3
        env = Bandit(horizon=3 + EXPLORES)
        if sum(a[1] for a in play(env, task, "222")) == 2:
            found.append(env.expert())
            for _ in range(EXPLORES - 2):
                env.step("x")
            found.append(env.expert())  # two pulls left: Q = (1.1333, 1.2), as in the specification's example
    assert len(found) > 10 and set(found[::2]) == {"1"} and set(found[1::2]) == {"2"}


def test_success_is_that_the_best_arm_is_recommended():
    env = Bandit(horizon=6, returns="final")
    seen = set()
    for task in range(60):
        answers = play(env, task, "121212")
        won = {arm: sum(int(a[0][3]) for a in answers[arm::2]) for arm in (0, 1)}
        recommended = 0 if won[0] >= won[1] else 1  # three pulls each
        means = env.means("train", task)
        assert answers[-1][4]["success"] == (recommended == int(np.argmax(means)))
        assert not any(a[4]["success"] for a in answers[:-1])
        seen.add(answers[-1][4]["success"])
    assert seen == {True, False}


def test_evidence_has_the_regret_of_the_pulls_and_the_optimum():
    env = Bandit(horizon=5)
    play(env, 7, "1122x")
    low, high = sorted(env.means("train", 7))
    checks = {check["name"]: check for check in env.evidence()["checks"]}
    assert checks["no regret"]["value"] == pytest.approx(2 * (high - low)) and not checks["no regret"]["passed"]
    assert checks["optimal value"]["value"] == pytest.approx(2.888889, abs=1e-6)
    assert checks["as the expert"]["value"] <= 4
    assert env.evidence()["gold"] == [f"{mean:.3f}" for mean in env.means("train", 7)]


@pytest.mark.parametrize("returns", RETURNS)
def test_restore_on_another_object_gives_an_identical_future(returns):
    one, other = Bandit(horizon=5, returns=returns), Bandit(horizon=5, returns=returns)
    start(one, 11, "ood"), start(other, 5)
    one.step("1"), one.step("bad")
    other.restore(one.snapshot())
    for _ in range(3):
        action = one.expert()
        assert action == other.expert()
        answer = one.step(action)
        assert answer == other.step(action) and one.evidence() == other.evidence()
        if answer[2]:
            break


def test_splits_share_no_task_and_keep_the_prior():
    env = Bandit()
    hashes = {split: {start(env, task, split)[1]["hash"] for task in range(200)} for split in SPLITS}
    assert all(len(found) == 200 for found in hashes.values()) and not hashes["train"] & hashes["iid"]
    assert all(bucket(one) == "iid" for one in hashes["iid"])


def test_tasks_never_change_unnoticed():
    """A change here changes every panel: give the version hash a new leading number when it is meant."""
    env = Bandit(horizon=5)
    assert [round(mean, 6) for split in SPLITS for mean in env.means(split, 0)] == GOLDEN
    assert "".join(str(int(a[1])) for task in range(4) for a in play(env, task, "12121")) == GOLDEN_PAYMENTS


def test_version_changes_with_every_setting():
    variants = [{}, {"arms": 3}, {"horizon": 9}, {"returns": "final"}, {"price": 0.02}, {"reference": "greedy"},
                {"ood_prior": (2, 2)}]  # fmt: skip
    assert len({Bandit(**settings).version for settings in variants}) == len(variants)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"arms": 1}, "arms is 1"),
        ({"arms": 3, "horizon": 23}, "1 to 22"),
        ({"returns": "median"}, "'median'"),
        ({"price": float("nan")}, "price is nan"),
        ({"reference": "ucb2"}, "'ucb2'"),
        ({"ood_prior": (1,)}, "two numbers"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_sentence(settings, words):
    with pytest.raises(UserError, match=words):
        Bandit(**settings)


def test_more_arms_and_every_reference_have_an_expert():
    for reference in REFERENCES:
        env = Bandit(arms=3, horizon=6, returns="process", reference=reference)
        assert sum(a[1] for a in play(env, 2, ["expert"] * 6)) == pytest.approx(1.0)
    env = Bandit(arms=3, horizon=6)
    assert start(env, 0)[1]["admissible"] == ["1", "2", "3"] and 3 < env.optimum() < oracle_value(6, 3)


def test_gymnasium_check_env_passes():
    gymnasium.utils.env_checker.check_env(Bandit(), skip_render_check=True)


def test_random_pulls_are_worth_what_exact_evaluation_says_of_uniform():
    game = count_game(5)
    law = [np.full((len(c), 2), 0.5) for c in game.counts[:-1]]
    env, rng = Bandit(horizon=5, returns="final"), np.random.default_rng(0)
    found = [play(env, task, rng.choice(["1", "2"], 5))[-1][1] for task in range(2000)]
    assert abs(np.mean(found) - policy_value(law, game)[1]) < 4 * np.std(found) / np.sqrt(2000)
