"""Countdown against an independent brute force that knows neither prices, caches nor sorted states."""

import itertools
import os
import random
import subprocess
import sys

import gymnasium.utils.env_checker
import pytest

from assay.envs.base import bucket
from assay.envs.countdown import STRATA, Countdown, Task, content_hash, moves, reach, solutions, targets
from assay.protocols import SPLITS, UserError
from assay.rng import stable_hash


def play_out(numbers, max_result):
    """Every sequence of operations on a list: yields (operators so far, numbers then), by trial of all ordered pairs."""
    stack = [("", list(numbers))]
    while stack:
        used, left = stack.pop()
        yield used, left
        for i, j in itertools.permutations(range(len(left)), 2):
            rest = [left[k] for k in range(len(left)) if k not in (i, j)]
            results = {"+": left[i] + left[j], "-": left[i] - left[j], "*": left[i] * left[j]}
            results |= {"/": left[i] // left[j]} if left[i] % left[j] == 0 else {}
            stack += [(used + op, [*rest, r]) for op, r in results.items() if 0 < r <= max_result]


def strata_by_force(numbers, max_result):
    """Value -> stratum: fewest operations, then whether some way with so few has neither * nor /."""
    ways = {}
    for used, left in play_out(numbers, max_result):
        for value in left:
            ways.setdefault(value, []).append(used)
    found = {}
    for value, used in ways.items():
        fewest = min(map(len, used))
        plain = any(not set(way) & set("*/") for way in used if len(way) == fewest)
        found[value] = f"{fewest}{'+' if plain else '*'}"
    return found


def start(env, task, split="train"):
    return env.reset(options={"task": task, "split": split})


SOME = [
    (2, 5, 12),
    (1, 1, 1),
    (7, 7, 7),
    (3, 8, 8),
    (1, 6, 11),
    (4, 9, 12),
    (2, 2, 3, 11),
    (1, 5, 5, 9),
    (6, 8, 10, 12),
]


@pytest.mark.parametrize("numbers", SOME)
def test_solver_agrees_with_brute_force_on_every_value(numbers):
    expected = strata_by_force(numbers, 144)
    prices = reach(numbers, 144, 144)
    assert {value: f"{p // 64}{'*' if p % 64 else '+'}" for value, p in prices.items()} == expected


@pytest.mark.parametrize("numbers", SOME)
def test_a_limit_on_values_hides_no_way_through_larger_intermediate_results(numbers):
    everything = reach(numbers, 144, 144)
    assert reach(numbers, 144, 20) == {value: price for value, price in everything.items() if value <= 20}


@pytest.mark.parametrize("split", SPLITS)
def test_generated_tasks_are_solvable_and_of_the_stated_stratum(split):
    env = Countdown()
    low, high, count, longest = (51, 100, 4, 3) if split == "ood" else (1, 50, 3, 2)
    for task in range(0, 40 if split == "ood" else 300):
        observation, info = start(env, task, split)
        numbers, target = [int(n) for n in observation.split()], int(info["goal"].removeprefix("make "))
        assert numbers == sorted(numbers) and len(numbers) == count and numbers[0] >= 1 and numbers[-1] <= 12
        assert low <= target <= high and target not in numbers
        assert strata_by_force(numbers, 144)[target] == info["stratum"]
        assert int(info["stratum"][0]) <= longest
        assert info["horizon"] == 3 * count - 1


def test_solutions_lists_all_shortest_and_nothing_else():
    assert solutions((2, 5, 12), 17, 144, 100) == [("12 + 5",)]
    assert sorted(solutions((1, 2, 3), 6, 144, 100)) == [("3 * 2",)]
    # 24 from 2, 3, 4 by hand: 2*3*4 in its three orders; nothing with one operation
    assert sorted(solutions((2, 3, 4), 24, 144, 100)) == [
        ("3 * 2", "6 * 4"),
        ("4 * 2", "8 * 3"),
        ("4 * 3", "12 * 2"),
    ]
    assert solutions((7, 7, 7), 50, 144, 100) == [] and solutions((1, 2), 2, 144, 100) == [()]


def test_moves_by_hand():
    assert {action: left for action, (_, left) in moves((2, 4, 4), 10).items()} == {
        "4 + 4": (2, 8),
        "4 + 2": (4, 6),
        "4 - 2": (2, 4),
        "4 * 2": (4, 8),
        "4 / 4": (1, 2),
        "4 / 2": (2, 4),
    }  # 4 - 4 gives 0 and 4 * 4 is above the largest result: neither is allowed


def test_splits_are_disjoint_whatever_the_order_of_the_numbers():
    everything = {"train": set(), "iid": set()}
    for numbers in itertools.combinations_with_replacement(range(1, 13), 3):
        for split in everything:
            for values in targets(numbers, split, 1, 50, 144, 100).values():
                everything[split] |= {(numbers, value) for value in values}
    assert not everything["train"] & everything["iid"]
    assert (len(everything["train"]), len(everything["iid"])) == (3787, 977)
    env = Countdown()
    for split in ("train", "iid"):
        for task in range(500):
            observation, info = start(env, task, split)
            numbers, target = sorted(map(int, observation.split())), int(info["goal"].split()[1])
            assert (tuple(numbers), target) in everything[split]
            assert info["hash"] == stable_hash(f"{' '.join(map(str, numbers))} = {target}")
            assert bucket(info["hash"]) == split


@pytest.mark.parametrize("split", SPLITS)
def test_expert_wins_from_random_mid_states_with_fewest_turns(split):
    env, rng = Countdown(), random.Random(0)
    for task in range(300):
        _, info = start(env, task, split)
        target, given = int(info["goal"].split()[1]), tuple(env.snapshot()[1])
        for _ in range(rng.randrange(5)):  # wander, never into the target
            options = [a for a, (_, left) in moves(env.snapshot()[1], 144).items() if target not in left]
            env.step(rng.choice([*options, "reset", "nonsense"]))
        here = solutions(env.snapshot()[1], target, 144, 100)
        anew = 1 + len(solutions(given, target, 144, 100)[0])
        fewest = min(len(here[0]), anew) if here else anew
        for turn in range(1, fewest + 1):
            action = env.expert()
            _, reward, terminated, truncated, info = env.step(action)
            assert info["valid"] and not truncated
            assert (terminated, reward, info["success"]) == (
                (True, 1.0, True) if turn == fewest else (False, 0.0, False)
            )


def test_expert_resets_from_a_dead_end_and_where_starting_anew_is_shorter():
    env = Countdown()
    env.restore((Task((2, 5, 12), 17, "1+", 8), (7, 12), 1, 12, False))
    assert env.expert() == "reset"
    env.restore((Task((2, 5, 12), 17, "1+", 8), (2, 5, 12), 1, 12, False))
    assert env.expert() == "12 + 5"
    # after 10 - 5 it takes three operations, (3 + 2) * 2 * 5; reset and 10 * 5 are two turns
    env.restore((Task((2, 2, 3, 5, 10), 50, "1*", 14), (2, 2, 3, 5), 1, 10, False))
    assert len(solutions((2, 2, 3, 5), 50, 144, 100)[0]) == 3 and env.expert() == "reset"
    # a reset is not preferred to an equally long way on: 6 / 3 and 12 * 2, or reset and 12 * 2
    env.restore((Task((2, 3, 4, 12), 24, "1*", 11), (3, 6, 12), 1, 12, False))
    assert env.expert() in ("6 / 3", "12 * 6")


def test_an_action_the_rules_forbid_changes_nothing_and_costs_a_turn():
    env = Countdown()
    begin = (Task((4, 4, 6), 3, "2*", 8), (4, 4, 6), 0, 4, False)
    for text in ["", "5 + 4", "6 + 6", "4 - 4", "4 - 6", "6 / 4", "4 + 4 + 6", "06 + 4", "-4 + 6", "6 ** 4", "٤ + 4",
                 "resett", "9" * 5000, "6 +\n4", "4 + 6 = 10", "6 × 4"]:  # fmt: skip
        env.restore(begin)
        observation, reward, terminated, truncated, info = env.step(text)
        assert (observation, reward, terminated, truncated) == ("4 4 6", 0.0, False, False), text
        assert (info["valid"], info["noop"], info["skill"]) == (False, True, "other"), text
        assert env.snapshot()[2] == 1
    for text, numbers, skill in [("6 + 4", "4 10", "+"), ("4+6", "4 10", "+"), (" 6 - 4 ", "2 4", "-"),
                                 ("4 * 4", "6 16", "*"), ("4 / 4", "1 6", "/")]:  # fmt: skip
        env.restore(begin)
        observation, _, _, _, info = env.step(text)
        assert (observation, info["valid"], info["noop"], info["skill"]) == (numbers, True, False, skill)
        assert info["anchor"] == stable_hash(numbers)


def test_reset_brings_the_given_numbers_back_and_is_a_noop_only_there():
    env = Countdown()
    first, info = start(env, 3)
    _, _, _, _, info = env.step("reset")
    assert info["valid"] and info["noop"] and info["skill"] == "reset"
    dull = next(a for a, (_, left) in moves(env.snapshot()[1], 144).items() if env.snapshot()[0].target not in left)
    env.step(dull)
    observation, _, _, _, info = env.step("RESET")
    assert observation == first and info["valid"] and not info["noop"]


def test_admissible_actions_are_exactly_the_valid_ones():
    env = Countdown()
    for split, task in itertools.product(SPLITS, range(10)):
        _, info = start(env, task, split)
        state, numbers = env.snapshot(), env.snapshot()[1]
        assert info["admissible"][-1] == "reset"
        for a, op, b in itertools.product(set(numbers), "+-*/", set(numbers)):
            env.restore(state)
            valid = env.step(f"{a} {op} {b}")[4]["valid"]
            canonical = f"{b} {op} {a}" if op in "+*" and a < b else f"{a} {op} {b}"
            assert valid == (canonical in info["admissible"])


def test_the_last_turn_can_succeed_and_otherwise_truncates():
    env = Countdown(horizon=3)
    start(env, 0, "iid")
    env.step("reset"), env.step("reset")
    assert env.step("reset")[2:4] == (False, True)
    with pytest.raises(UserError, match="reset"):
        env.step("reset")
    env.restore((Task((2, 3, 9), 5, "1+", 3), (2, 3, 9), 2, 3, False))
    assert env.step("3 + 2")[1:4] == (1.0, True, False)
    with pytest.raises(UserError, match="reset"):
        env.expert()


def test_evidence_names_the_closest_value_and_the_strings_that_must_not_leak():
    env = Countdown()
    env.restore((Task((2, 3, 4), 24, "2*", 8), (2, 3, 4), 0, 4, False))
    env.step("4 + 3"), env.step("7 * 2"), env.step("reset"), env.step("4 - 2")
    evidence = env.evidence()
    checks = {check["name"]: (check["passed"], check["where"], check["value"]) for check in evidence["checks"]}
    assert checks == {
        "target reached": (False, "turn 4", "2 3"),
        "target in reach without reset": (False, "turn 4", None),
        "closest value": (False, "episode", 14),
    }
    assert set(evidence["gold"]) == {"3 * 2, 6 * 4", "4 * 2, 8 * 3", "4 * 3, 12 * 2",
                                     "3 * 2", "6 * 4", "4 * 2", "8 * 3", "4 * 3", "12 * 2"}  # fmt: skip
    env.step("reset"), env.step("4 * 2"), env.step("8 * 3")
    assert all(check["passed"] for check in env.evidence()["checks"])


def test_restore_on_another_object_gives_an_identical_future():
    one, other = Countdown(), Countdown()
    start(one, 11, "ood"), start(other, 5)
    one.step(one.expert())
    other.restore(one.snapshot())
    for action in ["reset", "bad", "reset"]:
        assert one.step(action) == other.step(action)
    while True:
        action = one.expert()
        assert action == other.expert()
        answer = one.step(action)
        assert answer == other.step(action) and one.evidence() == other.evidence()
        if answer[2]:
            break


GOLDEN = [("1 7 10", 18), ("3 6 9", 12), ("9 11 12", 32), ("1 2 10", 13), ("4 7 8 12", 85), ("3 7 8 8", 53)]
GOLDEN_VERSION = "ccb98411b33ff079"
PRINT_TASKS = (
    "from assay.envs.countdown import Countdown; e = Countdown();"
    "print(e.version, *(e.reset(options={'task': i, 'split': s}) for s in ('train', 'iid', 'ood') for i in range(40)))"
)


def test_tasks_are_the_same_in_every_process():
    outputs = {
        subprocess.run([sys.executable, "-c", PRINT_TASKS], env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
                       capture_output=True, check=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1


def test_tasks_never_change_unnoticed():
    """A change here changes every panel: give the version hash a new leading number when it is meant."""
    env = Countdown()
    seen = [(start(env, task, split)[0], env.snapshot()[0].target) for split in SPLITS for task in (0, 1)]
    assert seen == GOLDEN and env.version == GOLDEN_VERSION


def test_tasks_do_not_depend_on_what_was_played_before():
    fresh, used = Countdown(), Countdown()
    for task in range(20):
        start(used, task + 7, "ood"), used.step("reset")
        assert start(used, task, "iid") == start(fresh, task, "iid")
    assert fresh.reset(seed=5) == used.reset(seed=5) and fresh.reset() == used.reset()


def test_strata_come_in_the_proportions_asked_for():
    env = Countdown(stratum={"1+": 1, "2*": 3})
    strata = [start(env, task)[1]["stratum"] for task in range(2000)]
    assert set(strata) == {"1+", "2*"} and abs(strata.count("2*") / 2000 - 0.75) < 0.04
    env = Countdown()
    strata = [start(env, task)[1]["stratum"] for task in range(2000)]
    assert all(abs(strata.count(name) / 2000 - 0.25) < 0.04 for name in STRATA[:4])
    env = Countdown(stratum="2*", ood_stratum="3*")
    assert {start(env, task, split)[1]["stratum"] for split in ("train", "iid") for task in range(50)} == {"2*"}
    assert {start(env, task, "ood")[1]["stratum"] for task in range(50)} == {"3*"}


@pytest.mark.parametrize(
    ("settings", "count", "low", "high", "strata"),
    [
        ({"ood_numbers": 3}, 3, 51, 100, {"2*"}),
        ({"ood_max_target": 50}, 4, 1, 50, {"2+", "2*", "3+", "3*"}),
        ({"numbers": 2, "ood_numbers": 2}, 2, 51, 100, {"1*"}),
    ],
)
def test_ood_can_shift_the_numbers_or_the_targets_alone(settings, count, low, high, strata):
    env = Countdown(**settings)
    seen = [start(env, task, "ood") for task in range(100)]
    assert {len(observation.split()) for observation, _ in seen} == {count}
    assert {info["stratum"] for _, info in seen} == strata
    goals = [int(info["goal"].split()[1]) for _, info in seen]
    assert low <= min(goals) <= max(goals) <= high


def test_version_changes_with_every_setting_that_changes_a_task():
    variants = [{}, {"numbers": 2}, {"max_number": 11}, {"max_target": 49}, {"ood_numbers": 5}, {"ood_max_target": 99},
                {"max_result": 143}, {"stratum": "2*"}, {"stratum": {"2*": 1, "1+": 2}}, {"ood_stratum": "3*"},
                {"horizon": 9}]  # fmt: skip
    assert len({Countdown(**settings).version for settings in variants}) == len(variants)
    assert Countdown(stratum="2*").version == Countdown(stratum={"2*": 5}).version


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"numbers": 7}, "numbers is 7"),
        ({"ood_numbers": 2}, "ood_numbers is 2"),
        ({"ood_max_target": 49}, "ood_max_target is 49"),
        ({"ood_numbers": 3, "ood_max_target": 50}, "one must be larger"),
        ({"max_result": 50}, "max_result is 50"),
        ({"stratum": "3+"}, "'3\\+'"),
        ({"stratum": {"1+": -1.0}}, "weight -1.0"),
        ({"stratum": {"1+": float("nan")}}, "weight nan"),
        ({"stratum": {"1+": 0}}, "no stratum"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_sentence(settings, words):
    with pytest.raises(UserError, match=words):
        Countdown(**settings)


def test_an_empty_stratum_and_bad_tasks_are_refused_in_one_sentence():
    with pytest.raises(UserError, match="no task of stratum '2\\+'"):
        start(Countdown(max_number=1, max_target=2, ood_max_target=3, stratum="2+"), 0)
    with pytest.raises(UserError, match="split 'test'"):
        start(Countdown(), 0, "test")
    with pytest.raises(UserError, match="task is -1"):
        start(Countdown(), -1)
    with pytest.raises(UserError, match="call reset"):
        Countdown().step("reset")


def test_gymnasium_check_env_passes():
    gymnasium.utils.env_checker.check_env(Countdown(), skip_render_check=True)


def test_observations_fit_the_declared_space_for_the_largest_settings():
    env = Countdown(numbers=5, ood_numbers=6, max_number=99, max_result=99999, max_target=9998, ood_max_target=9999)
    observation, _ = start(env, 0)
    assert env.observation_space.contains(observation)
    assert env.observation_space.contains(" ".join(["99999"] * 6))


def test_six_numbers_as_in_the_game_are_solved_within_the_horizon():
    env = Countdown(numbers=6, ood_numbers=6)
    for split in ("train", "ood"):
        _, info = start(env, 1, split)
        turns, terminated = 0, False
        while not terminated:
            _, _, terminated, truncated, _ = env.step(env.expert())
            turns += 1
            assert not truncated
        assert turns == int(info["stratum"][0])


def test_content_hash_ignores_nothing_that_makes_a_task():
    assert content_hash((1, 2, 3), 4) != content_hash((1, 23), 4) != content_hash((1, 2), 34)
