import io
import json
import subprocess
import sys
from contextlib import redirect_stdout

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from minigrid.core.grid import Grid
from minigrid.core.world_object import Ball, Box, Door, Key, Wall
from minigrid.envs.babyai.goto import GoTo, GoToLocal

from assay.envs.babyai import LEVELS, PAIRS, RESERVED, TRAINED, WORDS, BabyAI, _checks, _content, describe, visible
from assay.protocols import SPLITS, Env, UserError
from assay.rng import stable_hash

RIGHT, DOWN, LEFT, UP = range(4)  # minigrid's directions of the agent


def start(env, task=0, split="train"):
    return env.reset(options={"split": split, "task": task})


def play(env, task, split, noise=0.0, rng=None):
    """Success and turns of the expert, a share `noise` of whose actions is replaced by random ones."""
    start(env, task, split)
    for turn in range(1, env.horizon + 1):
        random = rng is not None and rng.random() < noise
        _, _, terminated, truncated, _ = env.step(WORDS[rng.integers(6)] if random else env.expert())
        if terminated or truncated:
            return terminated, turn
    raise AssertionError("no end at the horizon")


def room(pose, things, side=8, carrying=None):
    """A world of one room with the things {(x, y): object} and the agent at (x, y, direction)."""
    world = GoToLocal(room_size=side)
    world.grid = Grid(side, side)
    world.grid.wall_rect(0, 0, side, side)
    for (x, y), thing in things.items():
        world.put_obj(thing, x, y)
    world.agent_pos, world.agent_dir, world.carrying = pose[:2], pose[2], carrying
    return world


def things(env):
    return [(cell.type, cell.color) for cell in env.world.grid.grid if cell is not None and cell.type != "wall"]


# ------------------------------------------------------------------------------------------------------------ text


def text(pose, placed, **more):
    world = room(pose, placed, **more)
    return describe(visible(world), world.carrying)


def test_positions_are_told_from_where_the_agent_stands_and_faces():
    ball = {(4, 2): Ball("red")}
    assert text((3, 4, UP), ball) == "red ball 1 right 2 forward, wall 4 forward"
    assert text((3, 4, RIGHT), ball) == "red ball 2 left 1 forward, wall 4 forward"
    assert text((4, 6, UP), ball) == "red ball 4 forward, wall 6 forward"
    assert text((6, 2, UP), ball) == "red ball 2 left, wall 2 forward, wall right"
    assert text((3, 4, DOWN), ball) == "wall 3 forward"  # behind


def test_what_is_next_to_the_agent_has_a_word_of_its_own():
    placed = {(3, 1): Key("blue"), (2, 2): Box("grey"), (4, 2): Ball("red")}
    assert text((3, 2, UP), placed) == "blue key ahead, grey box left, red ball right, wall 2 forward"
    assert text((1, 1, UP), {}) == "wall ahead, wall left"
    assert text((6, 1, UP), {}) == "wall ahead, wall right"


def test_objects_come_nearest_then_straightest_first_and_what_is_carried_last():
    placed = {(3, 1): Key("blue"), (5, 4): Box("grey"), (1, 3): Ball("red"), (4, 3): Ball("green")}
    assert text((3, 4, UP), placed, carrying=Key("yellow")) == (
        "green ball 1 right 1 forward, grey box 2 right, blue key 3 forward, red ball 2 left 1 forward, "
        "wall 4 forward, carrying yellow key"
    )


def test_the_view_ends_seven_cells_ahead_and_three_to_the_side():
    far = {(1, 2): Ball("red"), (6, 10): Ball("blue"), (9, 9): Key("red"), (10, 8): Key("blue")}
    assert text((6, 9, UP), {(6, 3): Ball("red"), (6, 2): Ball("blue")}, side=16) == "red ball 6 forward"
    assert text((6, 9, UP), far, side=16) == "red key 3 right"
    assert text((6, 9, UP), {}, side=16) == "wall forward"


def test_doors_are_told_with_their_state_and_hide_what_is_behind_unless_open():
    wall = {(x, 3): Wall() for x in range(1, 7)}
    beyond = {(3, 2): Ball("red")}
    for state, door in {"closed": Door("blue"), "locked": Door("blue", is_locked=True)}.items():
        assert text((3, 4, UP), {**wall, (3, 3): door, **beyond}) == f"{state} blue door ahead"
    opened = text((3, 4, UP), {**wall, (3, 3): Door("blue", is_open=True), **beyond})
    assert opened == "open blue door ahead, red ball 2 forward, wall 4 forward"


def test_the_visible_cells_are_those_of_minigrid_also_with_walls_and_doors_in_between():
    world = GoTo()
    with redirect_stdout(io.StringIO()):
        world.reset(seed=3)
    rng, doors = np.random.default_rng(0), 0
    for _ in range(300):
        world.step(int(rng.choice([0, 1, 2, 2, 2, 5])))
        grid, mask = world.gen_obs_grid()
        ours = {(right + 3, 6 - forward): cell for forward, right, _, _, cell in visible(world)}
        theirs = {(int(i), int(j)): grid.get(i, j) for i, j in np.argwhere(mask)}
        theirs[3, 6] = ours[3, 6]  # minigrid shows there what is carried
        outside = {at: cell for at, cell in theirs.items() if at not in ours}
        assert all(cell.type == "wall" for cell in outside.values())  # minigrid walls up what is outside of the grid
        assert {at: id(cell) for at, cell in ours.items()} == {at: id(theirs[at]) for at in ours}
        doors += any(cell is not None and cell.type == "door" for cell in ours.values())
    assert doors > 50


# ------------------------------------------------------------------------------------------------- the environment


@pytest.mark.parametrize("level", LEVELS)
def test_gymnasium_accepts_every_level(level):
    env = BabyAI(level)
    check_env(env, skip_render_check=True)
    assert isinstance(env, Env)
    assert env.skills == WORDS and 1 <= len(env.brief.split()) <= 3


def test_reset_says_all_that_the_contract_asks():
    env = BabyAI("GoToLocal")
    observation, info = start(env, 5)
    assert set(info) == {"hash", "goal", "horizon", "admissible", "anchor"}
    assert info["goal"] == env.world.mission and info["goal"].startswith("go to ")
    assert info["anchor"] == stable_hash(observation) and info["admissible"] == list(WORDS)
    _, _, _, _, info = env.step("left")
    assert set(info) == {"valid", "success", "anchor", "skill", "noop", "admissible"}


def test_one_room_by_hand_from_start_to_success():
    env = BabyAI("GoToRedBallNoDists")
    start(env)
    (ball,) = (cell for cell in env.world.grid.grid if cell is not None and cell.type == "ball")
    env.world.grid.set(*ball.cur_pos, None)
    env.world.put_obj(ball, 3, 2)
    env.world.agent_pos, env.world.agent_dir = (2, 4), UP
    env.world.instrs.reset_verifier(env.world)
    steps = [env.step(word) for word in ("forward", "forward", "right")]
    assert [step[0] for step in steps] == [
        "red ball 1 right 1 forward, wall 3 forward",
        "red ball right, wall 2 forward",
        "red ball ahead, wall 5 forward",
    ]
    assert [step[1:4] for step in steps] == [(0.0, False, False), (0.0, False, False), (1.0, True, False)]
    assert [step[4]["success"] for step in steps] == [False, False, True]
    with pytest.raises(UserError, match="over"):
        env.step("left")


def test_a_move_that_changes_nothing_is_valid_and_a_noop():
    env = BabyAI("GoToLocal", objects=1)
    start(env)
    env.world.agent_pos, env.world.agent_dir = (1, 1), UP
    for word, noop in {"forward": True, "pickup": True, "drop": True, "toggle": True, "left": False}.items():
        info = env.step(word)[4]
        assert (info["valid"], info["skill"], info["noop"]) == (True, word, noop), word


def test_picking_up_dropping_and_opening_a_box_are_no_noops():
    env = BabyAI("PutNextLocal")
    start(env)
    env.world.agent_pos, env.world.agent_dir = (3, 4), UP
    for y in (3, 2, 1):
        env.world.grid.set(3, y, None)
    env.world.put_obj(Box("red"), 3, 3)
    infos = [env.step(word)[4] for word in ("pickup", "pickup", "drop", "toggle", "toggle")]
    assert [info["noop"] for info in infos] == [False, True, False, False, True]
    env.world.put_obj(Door("red"), 3, 3)
    assert [env.step("toggle")[4]["noop"] for _ in range(2)] == [False, False]


@pytest.mark.parametrize("action", ["", "jump", "go forward", "forward forward", "3", "done", "left\nright"])
def test_what_is_no_action_word_is_invalid_and_changes_nothing_but_costs_a_turn(action):
    env = BabyAI("GoToLocal", horizon=2)
    before, _ = start(env)
    after, reward, terminated, truncated, info = env.step(action)
    assert (after, reward, terminated, truncated) == (before, 0.0, False, False)
    assert (info["valid"], info["skill"], info["noop"]) == (False, "other", True)
    assert env.step(action)[3]


def test_space_case_and_a_full_stop_around_the_word_are_forgiven():
    env = BabyAI("GoToLocal")
    start(env)
    for action in (" left", "Right\n", "LEFT", "right."):
        info = env.step(action)[4]
        assert info["valid"] and not info["noop"] and info["skill"] == action.strip(" \n.").lower()


def test_the_episode_is_truncated_at_the_horizon_and_never_before():
    env = BabyAI("GoToLocal", horizon=7)
    _, info = start(env, 1)
    assert info["horizon"] == 7
    assert [env.step("nothing")[3] for _ in range(7)] == [False] * 6 + [True]
    with pytest.raises(UserError):
        env.step("left")


def test_larger_rooms_give_proportionally_more_turns():
    assert BabyAI("GoToLocal").limits == {"train": 24, "iid": 24, "ood": 30}
    assert BabyAI("PutNextLocal", room=6, ood_room=9).limits == {"train": 30, "iid": 30, "ood": 45}


def test_success_in_the_last_turn_is_success_and_not_truncated():
    env = BabyAI("GoToRedBallNoDists")
    terminated, turns = play(env, 3, "train")
    assert terminated
    tight = BabyAI("GoToRedBallNoDists", horizon=turns)
    start(tight, 3)
    for _ in range(turns):
        _, reward, terminated, truncated, _ = tight.step(tight.expert())
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert play(BabyAI("GoToRedBallNoDists", horizon=turns - 1), 3, "train") == (False, turns - 1)


def test_nothing_is_printed_although_minigrid_prints_its_rejections(capfd):
    env = BabyAI("PutNextLocal", objects=8, room=7)
    for task in range(40):
        start(env, task)
    assert capfd.readouterr().out == ""
    for seed in range(40):
        env.world.np_random = np.random.default_rng(seed)
        env.world._gen_grid(env.world.width, env.world.height)
    assert "Sampling rejected" in capfd.readouterr().out


# ---------------------------------------------------------------------------------------------------------- splits


def test_each_colour_is_reserved_once_and_each_type_twice():
    assert sorted(color for _, color in RESERVED) == sorted({color for _, color in PAIRS})
    assert sorted(kind for kind, _ in RESERVED) == ["ball", "ball", "box", "box", "key", "key"]
    assert set(PAIRS) == set(TRAINED) | RESERVED and ("ball", "red") in TRAINED


@pytest.mark.parametrize("level", LEVELS)
def test_reserved_pairs_are_never_trained_and_ood_is_about_them_in_a_larger_room(level):
    env = BabyAI(level)
    for task in range(30):
        for split in ("train", "iid"):
            start(env, task, split)
            assert not RESERVED & set(things(env)) and env.world.width == 8
        start(env, task, "ood")
        assert env.world.width == 10
        if level == "GoToRedBall":
            assert RESERVED & set(things(env))
        elif level != "GoToRedBallNoDists":
            instr = env.world.instrs
            target = getattr(instr, "desc_move", None) or instr.desc
            assert {(thing.type, thing.color) for thing in target.obj_set} <= RESERVED


@pytest.mark.parametrize("level", LEVELS)
def test_ood_shows_no_word_that_training_never_shows(level):
    env, words = BabyAI(level), {split: set() for split in SPLITS}
    for split, tasks in {"train": 60, "ood": 40}.items():
        for task in range(tasks):
            observation, info = start(env, task, split)
            texts = [info["goal"], observation]
            while not env.over:
                texts.append(env.step(env.expert())[0])
            words[split].update(" ".join(texts).replace(",", "").split())
    assert words["ood"] <= words["train"]


def hashes(env, split, n):
    return {start(env, task, split)[1]["hash"] for task in range(n)}


@pytest.mark.parametrize("level", LEVELS)
def test_splits_share_no_layout(level):
    env = BabyAI(level)
    train, iid, ood = (hashes(env, split, 100) for split in SPLITS)
    assert not train & iid and not train & ood and not iid & ood
    assert min(len(train), len(iid), len(ood)) > 80


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_splits_share_no_layout_over_thousands_of_tasks(level):
    env = BabyAI(level)
    train, iid, ood = (hashes(env, split, 5000) for split in SPLITS)
    assert not train & iid and not train & ood and not iid & ood


def test_the_hash_is_of_the_whole_task():
    env = BabyAI("GoToLocal")
    _, info = start(env, 3)
    assert _content(env.world) == info["hash"]
    env.world.agent_dir = (env.world.agent_dir + 1) % 4
    assert _content(env.world) != info["hash"]
    env.world.agent_dir = (env.world.agent_dir - 1) % 4
    env.world.mission += "!"
    assert _content(env.world) != info["hash"]


def test_a_task_is_the_same_whatever_was_played_before():
    fresh = [start(BabyAI("PickupLoc"), task, split) for split in SPLITS for task in range(3)]
    env = BabyAI("PickupLoc")
    again = [None] * 9
    for k in (8, 0, 4, 7, 1, 3, 6, 5, 2):
        again[k] = start(env, k % 3, SPLITS[k // 3])
        env.step("forward"), env.step("pickup")
    assert again == fresh


STORY = """
import json
from assay.envs.babyai import LEVELS, BabyAI
story = []
for level in LEVELS:
    env = BabyAI(level)
    for split in ("train", "iid", "ood"):
        observation, info = env.reset(options={"split": split, "task": 11})
        story.append([env.version, observation, info])
        for _ in range(4):
            if not env.over:
                word = env.expert()
                story.append([word, env.step(word)])
        story.append(env.evidence())
print(json.dumps(story))
"""


def test_tasks_texts_expert_and_evidence_are_equal_in_every_process():
    told = [
        subprocess.run(
            [sys.executable, "-c", STORY], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] and len(json.loads(told[0])) > 50


def test_without_a_task_the_seed_decides_and_the_split_is_train():
    env = BabyAI("GoToObj")
    first, second = env.reset(seed=4), env.reset()
    assert env.split == "train" and first != second
    assert (env.reset(seed=4), env.reset()) == (first, second)
    with pytest.raises(UserError, match="split 'test'"):
        env.reset(options={"split": "test", "task": 0})


# ---------------------------------------------------------------------------------------------------------- expert


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_succeeds(level):
    env = BabyAI(level)
    played = [play(env, task, split)[0] for split in SPLITS for task in range(20)]
    assert np.mean(played) >= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_succeeds_on_two_hundred_tasks_of_a_split(level, split):
    env = BabyAI(level)
    assert np.mean([play(env, task, split)[0] for task in range(200)]) >= 0.98


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_reaches_the_goal_within_the_horizon_with_a_tenth_of_random_actions(level):
    env, rng = BabyAI(level), np.random.default_rng(0)
    played = [play(env, task, split, 0.1, rng)[0] for split in SPLITS for task in range(12)]
    assert np.mean(played) >= 0.95


@pytest.mark.parametrize("level", ["PickupLoc", "PutNextLocal"])
def test_the_expert_goes_on_from_wherever_random_actions_led(level):
    env, rng = BabyAI(level, horizon=200), np.random.default_rng(0)
    harmless = ("left", "right", "forward", "pickup", "drop")  # toggle can destroy the box that the mission is about
    solved = carried = 0
    for task in range(30):
        start(env, task)
        for _ in range(20):
            if not env.over:
                env.step(harmless[rng.integers(5)])
        carried += env.world.carrying is not None
        while not env.over:
            _, _, terminated, _, _ = env.step(env.expert())
            solved += terminated
        solved += len(env.history) <= 20
    assert solved >= 29 and carried >= 3


def test_asking_the_expert_changes_nothing():
    env = BabyAI("PutNextLocal")
    start(env, 2)
    while not env.over:
        words = {env.expert() for _ in range(3)}
        assert len(words) == 1
        env.step(words.pop())
    asked = len(env.history)
    assert play(env, 2, "train") == (True, asked)


def test_a_mission_whose_object_is_gone_still_gets_an_answer():
    env = BabyAI("PickupLoc", objects=1, horizon=20)
    start(env, 0)
    thing = env.world.instrs.desc.obj_set[0]
    env.world.grid.set(*thing.cur_pos, None)
    while not env.over:
        word = env.expert()
        assert word in WORDS
        env.step(word)
    assert len(env.history) == 20


# --------------------------------------------------------------------------------------------- snapshot, evidence


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", SPLITS)
def test_a_restored_episode_has_the_same_future_in_this_and_in_a_fresh_object(level, split):
    env, rng = BabyAI(level), np.random.default_rng(7)
    words = [(*WORDS, "no such word")[rng.integers(7)] for _ in range(env.limits[split])]
    env.reset(seed=1)
    start(env, 6, split)
    for word in words[:5]:
        if not env.over:
            env.step(word)
    state = json.loads(json.dumps(env.snapshot()))

    def future(env):
        told = [env.expert(), env.evidence()]
        for word in words[5:]:
            if not env.over:
                told += [env.step(word), env.expert()]
        return [*told, env.evidence(), env.reset(), env.reset()]

    first = future(env)
    env.restore(state)
    assert future(env) == first
    other = BabyAI(level)
    start(other, 1)
    other.restore(state)
    assert future(other) == first


def test_a_restored_episode_knows_that_it_was_over():
    env = BabyAI("GoToObj", horizon=1)
    start(env, 2)
    running = env.snapshot()
    env.step("wait")
    over = env.snapshot()
    env.restore(running)
    env.step("wait")
    env.restore(over)
    with pytest.raises(UserError, match="over"):
        env.step("wait")


def test_a_snapshot_of_other_settings_is_refused():
    env = BabyAI("GoToObj")
    start(env)
    with pytest.raises(UserError, match="equal settings"):
        BabyAI("GoToObj", room=7).restore(env.snapshot())


def test_evidence_follows_the_mission_part_by_part():
    env = BabyAI("PutNextLocal")
    start(env, 4)

    def passed():
        return {check["name"]: check["passed"] for check in env.evidence()["checks"]}

    assert passed() == {"target ahead": False, "target carried": False, "target put next": False}
    seen = []
    while not env.over:
        env.step(env.expert())
        seen.append(passed())
    assert not any(one["target ahead"] and one["target carried"] for one in seen)
    assert any(one["target ahead"] for one in seen) and any(one["target carried"] for one in seen)
    assert [one["target put next"] for one in seen] == [False] * (len(seen) - 1) + [True]


def test_the_distance_in_the_evidence_is_in_cells_from_the_cell_ahead():
    env = BabyAI("GoToRedBallNoDists")
    start(env)
    ball = env.world.instrs.desc.obj_set[0]
    env.world.grid.set(*ball.cur_pos, None)
    env.world.put_obj(ball, 2, 6)
    env.world.agent_pos, env.world.agent_dir = (5, 2), UP
    env.world.instrs.reset_verifier(env.world)
    (check,) = _checks(env.world)  # evidence() itself would replay the episode from its seed
    assert check == {"name": "target ahead", "passed": False, "where": "x 5 y 1", "value": 3 + 5}


def test_gold_is_a_plan_that_solves_the_task_from_its_start_and_reading_it_changes_nothing():
    env = BabyAI("PickupLoc")
    for task in range(5):
        start(env, task)
        env.step("left")
        before = env.snapshot()
        gold = env.evidence()["gold"]
        assert env.snapshot() == before
        start(env, task)
        plan = gold[0].split() if gold else [env.expert()]
        ends = [env.step(word)[2] for word in plan]
        assert not gold or (ends[-1] and len(plan) > 2)


# -------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"level": "GoToMoon"}, "'GoToMoon' does not exist"),
        ({"room": 4}, "room 4"),
        ({"ood_room": 99}, "room 99"),
        ({"objects": 13}, "objects 13"),
        ({"objects": 0}, "objects 0"),
        ({"level": "GoToObj", "objects": 3}, "always has 1"),
        ({"level": "PutNextLocal", "room": 12, "objects": 13}, "2 to 12"),
        ({"horizon": 0}, "horizon 0"),
    ],
)
def test_settings_that_no_room_can_meet_are_refused_in_a_sentence(settings, complaint):
    with pytest.raises(UserError, match=complaint):
        BabyAI(**settings)


def test_the_version_names_the_settings():
    made = [BabyAI(), BabyAI(room=7), BabyAI(ood_room=9), BabyAI(objects=3), BabyAI(horizon=9), BabyAI("PickupLoc")]
    assert len({env.version for env in made}) == len(made)
    assert BabyAI().version == BabyAI(level="GoToLocal", room=8, ood_room=10, objects=4, horizon=None).version
