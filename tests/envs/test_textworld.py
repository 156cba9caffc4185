"""TextWorld-Cooking against the real engine: a handful of games are made once, in a cache of this module."""

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict

import pytest
from gymnasium.utils.env_checker import check_env

from assay.envs.base import bucket
from assay.envs.textworld import TextWorldCooking, resolve
from assay.envs.textworld_games import Entry, Level, Library, _sweep, build, locked, record, write_game
from assay.envs.textworld_kitchen import COOKS, Kitchen
from assay.protocols import UserError

pytest.importorskip("textworld")
pytestmark = pytest.mark.filterwarnings("ignore::jericho.UnsupportedGameWarning")  # of textworld's own loader

HARD = Level(recipe=2, take=2, go=6, open=True, cook=True, cut=True, drop=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Four games to train, one iid, one ood: of content, so a few more are made on the way."""
    folder = tmp_path_factory.mktemp("cache")
    TextWorldCooking.prepare(games=4, cache=folder, drop=None)
    return folder


@pytest.fixture
def env(cache):
    env = TextWorldCooking(games=4, cache=cache, drop=None)
    yield env
    env.close()


@pytest.fixture(scope="module")
def hard(tmp_path_factory):
    """(textworld's game, its story file with the full .json beside it) of six rooms, doors and a small inventory."""
    folder = tmp_path_factory.mktemp("hard")
    write_game(folder, HARD, 12)
    game, _ = build(HARD, 12)
    story = folder / f"{Entry(HARD, 12, '').name}.z8"
    shutil.copy(story, folder / "full.z8")
    game.save(str(folder / "full.json"))
    return game, folder / "full.z8"


def tasks(env):
    return [(split, task) for split in ("train", "iid", "ood") for task in range(env.size(split))]


def play(env, commands):
    return [env.step(command) for command in commands]


def test_expert_eats_the_meal_in_every_game_within_half_the_horizon(env):
    for split, task in tasks(env):
        _, info = env.reset(options={"split": split, "task": task})
        commands, reward = [], 0.0
        while not env.over:
            commands.append(env.expert())
            assert commands[-1] in info["admissible"]
            _, reward, terminated, truncated, info = env.step(commands[-1])
        assert (reward, terminated, truncated, info["success"], info["score"]) == (1.0, True, False, True, 1.0)
        assert 2 * len(commands) == env.horizon
        assert all(check["passed"] for check in env.evidence()["checks"])


def test_expert_wins_after_random_commands_wherever_the_game_is_not_lost(env):
    rng, played = random.Random(0), 0
    for split, task in tasks(env) * 4:
        _, info = env.reset(options={"split": split, "task": task})
        env.horizon = 1000
        for _ in range(rng.randrange(1, 12)):
            if not env.over:
                info = env.step(rng.choice(info["admissible"]))[4]
        if env.over:
            continue
        played += 1
        while not env.over:
            info = env.step(env.expert())[4]
        assert info["success"]
    assert played > 12


def test_admissible_commands_score_and_rooms_are_those_of_textworlds_own_tracker(hard):
    import textworld

    game, story = hard
    kitchen, rng = Kitchen.parse(record(game, HARD, 12)), random.Random(1)
    real = textworld.start(str(story), textworld.EnvInfos(admissible_commands=True))
    checked = 0
    for _ in range(6):
        theirs, state = real.reset(), kitchen.start
        for _ in range(50):
            assert kitchen.admissible(state) == list(theirs.admissible_commands)
            command = kitchen.expert(state) if rng.random() < 0.4 else rng.choice(kitchen.admissible(state))
            theirs, score, _ = real.step(command)
            state = kitchen.after(state, command)
            if "You scored" in theirs.feedback:
                break
            assert score == len(state.done & kitchen.todo)
            checked += 1
    assert checked > 100


def test_planner_goes_through_doors_and_puts_things_down_when_its_hands_are_full(hard):
    game, _ = hard
    kitchen = Kitchen.parse(record(game, HARD, 12))
    assert kitchen.capacity == 2
    plan = kitchen.plan(kitchen.start)
    assert plan[-2:] == ["prepare meal", "eat meal"] and any(command.startswith("drop ") for command in plan)
    rng, state = random.Random(3), kitchen.start
    for _ in range(300):  # anything that cannot lose: no food is eaten, cut or cooked
        safe = [c for c in kitchen.admissible(state) if c.split()[0] not in ("eat", "chop", "slice", "dice", "cook")]
        state = kitchen.after(state, rng.choice(safe))
        assert kitchen.plan(state)[-1] == "eat meal"


def test_compact_room_names_everything_that_the_engine_names(hard):
    import textworld

    game, story = hard
    kitchen = Kitchen.parse(record(game, HARD, 12))
    env = TextWorldCooking.__new__(TextWorldCooking)
    env.kitchen, env.state, rng = kitchen, kitchen.start, random.Random(2)
    real = textworld.start(str(story), textworld.EnvInfos(admissible_commands=True))
    real.reset()
    names = sorted((n for n, kind in kitchen.kinds.items() if kind in ("c", "d", "s", "f", "o", *COOKS)), key=len)
    for _ in range(60):
        command = rng.choice(
            [c for c in kitchen.admissible(env.state) if c.split()[0] in ("go", "open", "close", "take", "drop", "put")]
        )
        real.step(command)
        env.state = kitchen.after(env.state, command)
        theirs, ours = real.step("look")[0].feedback.split("=-", 1)[1], env.room()
        # the longest name first, so that "table" is not found inside "patio table"
        found = {text: set() for text in (theirs, ours)}
        for text, kept in found.items():
            rest = text
            for name in reversed(names):
                if re.search(rf"\b{re.escape(name)}\b", rest):
                    kept.add(name)
                    rest = re.sub(rf"\b{re.escape(name)}\b", "#", rest)
        assert found[ours] == found[theirs], (ours, theirs)
        for direction in kitchen.exits[env.state.room]:
            assert direction in ours and direction in theirs


def test_splits_share_no_content_and_ood_asks_for_more_ingredients(env):
    hashes = {}
    for split, task in tasks(env):
        _, info = env.reset(options={"split": split, "task": task})
        hashes.setdefault(split, set()).add(info["hash"])
        assert len(env.kitchen.recipe) == (2 if split == "ood" else 1)
        assert split == "ood" or bucket(info["hash"]) == split
    assert [len(hashes[split]) for split in ("train", "iid", "ood")] == [4, 1, 1]
    assert not hashes["train"] & hashes["iid"] and not hashes["train"] & hashes["ood"]


def test_content_hash_ignores_prose_but_not_placement():
    first, _ = build(Level(), 5)
    again, _ = build(Level(), 5)
    assert record(first, Level(), 5)["hash"] == record(again, Level(), 5)["hash"]
    again.infos["r_0"].desc = "Other words."
    assert record(first, Level(), 5)["hash"] == record(again, Level(), 5)["hash"]
    for infos in again.infos.values():
        infos.name = {"counter": "table", "table": "counter"}.get(infos.name, infos.name)
    assert record(first, Level(), 5)["hash"] != record(again, Level(), 5)["hash"]


def test_a_second_run_uses_the_cache_and_makes_nothing(cache):
    def stamps():
        return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}

    before = stamps()
    stories = TextWorldCooking.prepare(games=4, cache=cache, drop=None)
    assert stamps() == before
    assert len(stories) == 6 and all(os.path.exists(story) for story in stories)


def test_killed_generation_leaves_no_broken_game_and_is_made_up_later(env, tmp_path):
    entry = env.library.entries("train", 1)[0]
    library = Library([entry.level], {"train": 1, "iid": 1, "ood": 1}, tmp_path)
    library.index = {"tried": {"train": 1, "ood": 0}, "train": [[0, entry.seed, entry.hash]], "iid": [], "ood": []}
    library.games.mkdir(parents=True)
    command = [sys.executable, "-m", "assay.envs.textworld_games", str(library.games)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(json.dumps([asdict(entry.level), entry.seed]).encode() + b"\n")
        process.stdin.flush()
        while not list(library.games.glob(".making-*/*.ni")) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not list(library.games.glob("*.json")) and not list(library.games.glob("*.z8"))
    assert library.entry("train", 0) == entry
    assert library.record(entry)["hash"] == entry.hash
    old = next(iter(library.games.glob(".making-*")))
    os.utime(old, (0, 0))
    _sweep(library.games)
    assert not list(library.games.glob(".making-*"))


def test_reset_makes_a_missing_game_of_a_known_index(env, cache, tmp_path):
    shutil.copytree(cache / "textworld", tmp_path / "textworld")
    fresh = TextWorldCooking(games=4, cache=tmp_path, drop=None)
    entry = fresh.library.entries("train", 2)[1]
    fresh.library.record_path(entry).unlink()
    fresh.library.story_path(entry).unlink()
    here = env.reset(options={"task": 1})
    assert fresh.reset(options={"task": 1}) == here
    assert fresh.step(env.expert()) == env.step(env.expert())


def test_content_that_differs_from_the_index_is_refused(env, tmp_path):
    entry = env.library.entries("train", 1)[0]
    library = Library([entry.level], {"train": 1, "iid": 1, "ood": 1}, tmp_path)
    library.games.mkdir(parents=True)
    library.record_path(entry).write_text(json.dumps({"hash": "0" * 16}))
    with pytest.raises(UserError, match="different generators"):
        library.record(entry)


def test_lock_keeps_another_process_out_until_its_holder_dies(tmp_path):
    code = "import sys,time;from pathlib import Path;from assay.envs.textworld_games import locked\n"
    code += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    waiter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE)
    os.set_blocking(waiter.stdout.fileno(), False)
    time.sleep(0.5)
    assert waiter.stdout.read() is None
    holder.kill()
    holder.wait()
    os.set_blocking(waiter.stdout.fileno(), True)
    assert waiter.stdout.readline() == b"held\n"
    waiter.kill()
    waiter.wait()
    with locked(tmp_path / "lock"):
        pass


def test_restored_snapshot_has_an_identical_future_here_and_in_another_object(env, cache):
    rng = random.Random(4)
    other = TextWorldCooking(games=4, cache=cache, drop=None)
    other.reset(options={"task": 3})
    for split, task in (("train", 0), ("ood", 0)):
        _, info = env.reset(options={"split": split, "task": task})
        play(env, [env.expert(), rng.choice(info["admissible"])])
        saved = env.snapshot()
        commands = [rng.choice(["look", "inventory", "zork", env.expert(), "examine stove"]) for _ in range(4)]
        future = play(env, commands)
        env.restore(saved)
        assert play(env, commands) == future
        other.restore(pickle.loads(pickle.dumps(saved)))
        assert play(other, commands) == future
        assert other.evidence() == env.evidence()
    other.close()


def test_reset_is_a_function_of_split_and_id_whatever_was_played_before(env):
    first = env.reset(options={"split": "ood", "task": 0})
    transcript = play(env, ["look", "examine cookbook", "inventory"])
    env.reset(options={"task": 2})
    play(env, ["take knife", "look"])
    assert env.reset(options={"split": "ood", "task": 0}) == first
    assert play(env, ["look", "examine cookbook", "inventory"]) == transcript
    assert env.reset(seed=7) == env.reset(seed=7)


def test_refused_commands_are_invalid_change_nothing_and_cost_a_turn(env):
    env.reset(options={"task": 0})
    state, table = env.state, env.step("examine table")[0]
    for action in ("take unicorn", "xyzzy", "", "quit", "restart", "take knife. eat knife", "a" * 5000, "\n", "drop"):
        observation, reward, terminated, truncated, info = env.step(action)
        assert (info["valid"], info["noop"], reward, terminated, truncated) == (False, True, 0.0, False, False)
        assert observation and "[" not in observation and env.state == state
        env.turn -= 1
    assert env.step("examine table")[0] == table  # nor does the engine keep anything of it
    env.turn = env.horizon - 1
    assert env.step("xyzzy")[2:4] == (False, True)
    with pytest.raises(UserError, match="call reset first"):
        env.step("look")


def test_losing_ends_the_episode_without_success(env):
    for split, task in tasks(env):
        env.reset(options={"split": split, "task": task})
        env.horizon = 100
        while env.expert() != "prepare meal" and not env.expert().startswith(("cook", "chop", "slice", "dice")):
            env.step(env.expert())
        food = env.kitchen.recipe[0][0]
        if f"eat {food}" in env.kitchen.admissible(env.state):
            _, reward, terminated, truncated, info = env.step(f"eat {food}")
            assert (reward, terminated, truncated, info["success"], info["admissible"]) == (0.0, True, False, False, [])
            return
    pytest.fail("no game had an ingredient that can be eaten")


def test_observations_are_short_lines_without_banner_score_or_prompt(env):
    words = []
    for split, task in tasks(env):
        observation, info = env.reset(options={"split": split, "task": task})
        while not env.over:
            for noise in ("=-", "$$", "Recipe #1", "score", "***", ">", "\n"):
                assert noise not in observation
            assert observation == observation.strip() and env.observation_space.contains(observation)
            assert all(name not in observation for name in info["admissible"] if " " in name)
            words.append(len(observation.split()))
            observation, _, _, _, info = env.step(env.expert())
    assert sum(words) / len(words) < 20


def test_cookbook_is_read_whole(env):
    env.reset(options={"split": "ood", "task": 0})
    env.state = env.kitchen.start
    while env.expert() != "examine cookbook":
        env.step(env.expert())
    observation = env.step("examine cookbook")[0]
    assert observation == env.recipe() == env.evidence()["gold"][0]
    assert all(food in observation for food, _, _ in env.record["ingredients"])


def test_full_text_is_the_engines_prose_without_its_banner(cache):
    env = TextWorldCooking(games=4, cache=cache, drop=None, text="full")
    observation, _ = env.reset(options={"task": 0})
    assert observation.startswith("-= Kitchen =-\n") and "$$" not in observation and "fridge" in observation
    assert env.step("inventory")[0].startswith("You are carrying")
    assert "Gather all following ingredients" in env.step("read the cookbook")[0]
    env.close()


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("Take the carrot from the fridge", "take carrot from fridge"),
        ("get carrot", "take carrot from fridge"),
        ("pick up  a carrot", "take carrot from fridge"),
        ("take knife", ""),  # two places
        ("cook carrot in oven", "cook carrot with oven"),
        ("cook carrot using the bbq", "cook carrot with BBQ"),
        ("put carrot in the fridge", "insert carrot into fridge"),
        ("place carrot on table", "put carrot on table"),
        ("put carrot on fridge", ""),
        ("n", "go north"),
        ("North", "go north"),
        ("i", "inventory"),
        ("read cookbook", "examine cookbook"),
        ("go up", ""),
        ("", ""),
    ],
)
def test_usual_phrasings_are_understood_and_nothing_else(text, command):
    admissible = ["take carrot from fridge", "take knife", "take knife from table", "take knife from counter"][:1]
    admissible += ["take knife from table", "take knife from counter", "cook carrot with oven", "cook carrot with BBQ"]
    admissible += ["insert carrot into fridge", "put carrot on table", "go north", "inventory", "examine cookbook"]
    assert resolve(text, admissible) == command


def test_skill_noop_and_anchor_describe_the_step(env):
    env.reset(options={"task": 0})
    observation, _, _, _, info = env.step("look")
    assert (info["skill"], info["noop"], info["valid"], info["anchor"]) == ("look", True, True, env.anchor(observation))
    info = env.step("examine cookbook")[4]
    assert (info["skill"], info["noop"]) == ("examine", False)  # it was read
    assert env.step("examine cookbook")[4]["noop"]
    assert env.step("dance")[4]["skill"] == "other"


def test_evidence_counts_the_quests_that_the_engine_scores(env):
    for split, task in tasks(env):
        env.reset(options={"split": split, "task": task})
        assert len(env.evidence()["checks"]) == env.record["max_score"] + 1
        while not env.over:
            env.step(env.expert())
            *steps, score = env.evidence()["checks"]
            assert sum(check["passed"] for check in steps) == round(score["value"] * env.record["max_score"])
        json.dumps(env.evidence())


def test_gymnasium_accepts_it_and_nothing_is_printed(env, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # check_env warns that the environment has no spec
        check_env(env, skip_render_check=True)
    assert capfd.readouterr().out == ""


def test_version_changes_with_what_changes_the_tasks_and_not_with_their_number(cache):
    def version(**settings):
        return TextWorldCooking(cache=cache, **settings).version

    assert version() == version(games=8)
    assert len({version(), version(cut=True), version(text="full"), version(patience=3), version(go=6)}) == 5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"go": 2}, "set recipe to 1..5"),
        ({"take": 3}, "set recipe to 1..5"),
        ({"text": "short"}, "compact, full"),
        ({"games": 1}, "at least 4"),
        ({"recipe": 5, "take": 5, "go": 12}, "nothing harder"),
    ],
)
def test_wrong_settings_say_what_to_do(settings, says):
    with pytest.raises(UserError, match=says):
        TextWorldCooking(**settings)


def test_a_task_that_does_not_exist_is_refused(env):
    with pytest.raises(UserError, match="ids go from 0 to 3"):
        env.reset(options={"task": 4})


def test_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install assay\[textworld\]"):
        TextWorldCooking()


def test_default_index_ships_with_the_package(tmp_path):
    env = TextWorldCooking(cache=tmp_path)
    entries = {split: env.library.entries(split, env.size(split)) for split in ("train", "iid", "ood")}
    assert {split: len(rows) for split, rows in entries.items()} == {"train": 256, "iid": 64, "ood": 64}
    assert len({entry.hash for rows in entries.values() for entry in rows}) == 384
    assert not list(tmp_path.iterdir())
