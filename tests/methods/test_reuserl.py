"""ReuseRL: who is priced, at what, and what is kept for the next step. The dictionary has tests in test_phrases.py."""

import inspect
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from assay.checkpoints import decode_state, encode_state
from assay.config import Slots
from assay.envs.babyai import BabyAI
from assay.envs.countdown import Countdown
from assay.envs.textworld import TextWorldCooking
from assay.envs.textworld_kitchen import Kitchen
from assay.methods.host import Host
from assay.methods.registry import class_of, make
from assay.methods.reuserl import ReuseRL
from assay.protocols import Setting, UserError, World
from assay.rows import Batch, Layout, build_rows
from assay.rundir import RunDir
from assay.trace import Group, Outcome, Provenance, TaskKey, Trace, Turn
from assay.train import resume, train

DATA = Path(__file__).parent.parent / "data"
SKILLS = {"S": "search", "T": "take", "M": "move", "D": "deliver", "?": "other"}


def make_turn(skill):
    context, sampled = np.array([1], np.int32), np.array([5, 6], np.int32)
    known = np.full(2, -0.5, np.float32)
    return Turn(
        context, np.full(1, Provenance.TEMPLATE, np.uint8), sampled, np.zeros(2, np.uint8), known, -known,
        np.zeros(0, np.int32), "o", "a", 0.0, skill != "other", "x", skill, False, 0,
    )  # fmt: skip


def trace(letters, slot=0, rollout=0, success=True, env="e", horizon=10, step=1, reward=None):
    reward = float(success) if reward is None else reward
    return Trace(
        TaskKey(env, "1", "train", slot, "h"), step, 0, slot, rollout, np.array([9], np.int32),
        np.ones(1, np.uint8), tuple(make_turn(SKILLS.get(a, a)) for a in letters), "", reward,
        Outcome.SUCCESS if success else Outcome.HORIZON, 1.0, horizon=horizon,
    )  # fmt: skip


def batch(traces):
    keys = sorted({t.group_key for t in traces})
    groups = [[t for t in traces if t.group_key == key] for key in keys]
    return Batch([Group(own[0].task, tuple(own)) for own in groups])


def setting(**skills):
    skills = skills or {"e": ("search", "take", "move", "deliver")}
    return Setting({name: World(name, own, None) for name, own in skills.items()}, Layout(), 1, 100, 0)


def bound_to(where=None, **settings):
    method = ReuseRL(**settings)
    method.bind(where or setting())
    return method


def priced(method, traces):
    """(scores by trace key, metrics)."""
    data = batch(traces)
    metrics = method.reward(data, [])
    return data.scores, metrics


MANY = [trace("STMD", slot=i // 8, rollout=i % 8) for i in range(24)]


# ------------------------------------------------------------------------------------------------------ prices


def test_a_success_pays_for_its_phrases_as_a_share_of_the_turn_limit():
    # 4 symbols, "other" and 25 sequences: MD, ST and STMD are phrases; TSDM is none
    odd = trace("TSDM", slot=4, horizon=8)
    scores, metrics = priced(bound_to(lam=0.5), [*MANY, odd])
    assert scores[MANY[0].key] == 1 - 0.5 * 1 / 10
    assert scores[odd.key] == 1 - 0.5 * 4 / 8
    assert metrics["reuserl_cost"] == pytest.approx((24 * 0.1 + 0.5) / 25)
    assert metrics["reuserl_phrases"] == 3
    assert metrics["reuserl_dictionary_bits"] == pytest.approx(8 * np.log2(5) + 6)
    assert metrics["reuserl_turns_per_phrase"] == 100 / 28
    assert metrics["reuserl_buffer"] == 25
    assert metrics["reuserl_spread_groups"] == 0
    bits = 8 * np.log2(5) + 6 + 2
    slack = np.sqrt((bits * np.log(2) + np.log(20)) / 50)
    assert metrics["reuserl_bound"] == pytest.approx(metrics["reuserl_cost"] + slack)


def test_p01_without_extraction_the_price_is_that_of_the_turns():
    traces = [*MANY, trace("TSDM", slot=4), trace("S", slot=5, horizon=4)]
    scores, metrics = priced(bound_to(lam=0.5, extract=False), traces)
    assert scores == {t.key: 1 - 0.5 * len(t.turns) / t.horizon for t in traces}
    assert metrics["reuserl_phrases"] == 0 and metrics["reuserl_turns_per_phrase"] == 1


def test_p09_failures_keep_their_score_to_the_bit():
    failed = [trace("STMD", 5, 0, False), trace("STMD", 5, 1, False, reward=0.3), trace("T", 5, 2, False, reward=-0.1)]
    scores, _ = priced(bound_to(lam=1.0), [*MANY, *failed])
    assert [scores[t.key] for t in failed] == [0.0, 0.3, -0.1]


def test_p09_with_lam_0_nothing_is_touched_and_all_is_logged():
    priced_, free = bound_to(lam=0.5), bound_to(lam=0.0)
    data, other = batch(MANY), batch(MANY)
    rows = build_rows(data.traces, Layout())
    metrics = free.reward(data, rows)
    assert data == Batch(data.groups)  # scores of traces and turns are what they were
    assert all(not row.columns for row in rows)
    loud = priced_.reward(other, [])
    assert metrics == loud | {"reuserl_spread_groups": 0.0}
    assert free.tables() == priced_.tables() != {}
    assert free.needs == frozenset() and ReuseRL.streams is not None
    assert free.streams(rows, [], 0.0) == [] and free.rows(data) == []


def test_lam_0_is_said_to_have_no_effect():
    assert len(ReuseRL(lam=0.0).bind(setting())) == 1
    assert list(ReuseRL(lam=0.1).bind(setting())) == []


def test_p10_below_lam_1_every_success_is_above_every_failure():
    rng = random.Random(1)
    for lam in (0.3, 0.9, 0.999):
        traces = [
            trace("".join(rng.choice("STMD?") for _ in range(rng.randint(1, 10))), i // 4, i % 4, i % 3 > 0)
            for i in range(24)
        ]
        scores, _ = priced(bound_to(lam=lam), traces)
        lowest = min(scores[t.key] for t in traces if t.success)
        assert lowest > max(scores[t.key] for t in traces if not t.success)


def test_lam_1_meets_failure_only_at_a_full_horizon_without_reuse():
    scores, _ = priced(bound_to(lam=1.0, buffer=0), [trace("STMDTSMTDM"), trace("STMDTSMTD", rollout=1)])
    assert [round(v, 12) for v in scores.values()] == [0.0, 0.1]


def test_the_success_flag_decides_and_the_score_is_what_is_shared():
    unpaid, paid, partial = trace("S", reward=0.0), trace("S", 1, reward=2.0), trace("S", 2, 0, False, reward=0.5)
    scores, _ = priced(bound_to(lam=0.5), [unpaid, paid, partial])
    assert [scores[t.key] for t in (unpaid, paid, partial)] == [0.0, 2 - 0.5 * 2 * 0.1, 0.5]


def test_what_another_method_made_of_the_score_is_what_is_priced():
    data = batch([trace("S")])
    key = data.traces[0].key
    data.scores[key] = 3.0
    bound_to(lam=0.5).reward(data, [])
    assert data.scores[key] == 3 - 0.5 * 3 * 0.1


def test_p17_among_successes_only_the_advantages_do_not_depend_on_lam():
    letters = ["STMD", "STMDSTMD", "TSDM", "SSTTMMDD"]
    found = []
    for lam in (0.05, 0.4, 1.0):
        traces = [trace(a, 9, i) for i, a in enumerate(letters)]
        data = batch([*MANY, *traces])
        metrics = bound_to(lam=lam).reward(data, [])
        rows = build_rows(traces, Layout())
        Host(Slots(), 100).advantage(Batch([data.groups[-1]], scores=data.scores), rows)
        found.append([float(r.columns["advantage"][0]) for r in rows])
        assert metrics["reuserl_spread_groups"] == 1 / 4
    assert found[0] == pytest.approx(found[1], abs=1e-3) and found[1] == pytest.approx(found[2], abs=1e-3)
    assert found[0][0] > 0.5 > -0.5 > found[0][3]


def test_warmup_raises_lam_step_by_step():
    method = bound_to(lam=0.8, warmup=4, buffer=0)
    for step, lam in ((1, 0.2), (2, 0.4), (4, 0.8), (9, 0.8)):
        scores, _ = priced(method, [trace("S", step=step)])
        assert list(scores.values()) == [pytest.approx(1 - lam * 0.1)]


# -------------------------------------------------------------------------------------------- what enters where


def test_only_learnable_traces_of_kept_groups_are_seen():
    broken = replace(trace("STMD", 7, 1), outcome=Outcome.ENVIRONMENT_ERROR)
    data = batch([*MANY, trace("STMD", 7), broken])
    data.dropped = [Group(MANY[0].task, (trace("STMD", 8),))]
    method = bound_to()
    assert method.reward(data, [])["reuserl_buffer"] == 25


def test_the_step_is_scored_before_it_enters_the_buffer():
    method = bound_to()
    _, first = priced(method, MANY[:4])  # 4 copies pay for no phrase, 8 do
    _, second = priced(method, MANY[:4])
    assert [m["reuserl_phrases"] for m in (first, second)] == [0, 3]
    assert "reuserl_churn" not in first and second["reuserl_churn"] == 1.0
    _, third = priced(method, [trace("S", success=False)])
    assert third["reuserl_churn"] == 0.0 and third["reuserl_buffer"] == 8
    assert not {"reuserl_cost", "reuserl_bound", "reuserl_turns_per_phrase"} & third.keys()


def test_churn_is_one_minus_the_share_of_common_phrases():
    method = bound_to(buffer=0)
    priced(method, MANY)  # ST, MD, STMD
    _, metrics = priced(method, [*MANY, *(trace("TS", 5, i) for i in range(40))])
    now = {row["phrase"] for row in method.tables()["Phrases that spell the successes of e"]}
    assert now == {"search take", "move deliver", "search take move deliver", "take search"}
    assert metrics["reuserl_churn"] == 1 - 3 / 4


def test_p12_the_buffer_keeps_the_last_in_order_and_0_keeps_none():
    method = bound_to(buffer=3)
    priced(method, [trace("S"), trace("T", rollout=1)])
    priced(method, [trace("M", rollout=1, step=2), trace("D", step=2), trace("SS", 1, 0, False, step=2)])
    letters = dict(enumerate(method.libraries["e"].alphabet))
    assert [letters[s[0]] for s in method.libraries["e"].buffer] == ["take", "deliver", "move"]  # in key order
    none = bound_to(buffer=0)
    assert priced(none, MANY)[1]["reuserl_buffer"] == 0
    assert none.libraries["e"].buffer == []
    assert priced(none, [trace("STMD")])[1]["reuserl_phrases"] == 0


def test_p08_the_order_of_traces_changes_nothing():
    traces = [*MANY[:8], *(trace("TSDMS"[: 1 + i % 5], 3, i) for i in range(8))]
    shuffled = [*traces]
    random.Random(0).shuffle(shuffled)
    a, b = bound_to(buffer=5), bound_to(buffer=5)
    first, second = priced(a, traces), priced(b, shuffled)
    assert first[0] == second[0] and first[1] == second[1] and a.tables() == b.tables()
    assert a.libraries["e"].buffer == b.libraries["e"].buffer


def test_p13_before_any_success_nothing_is_priced():
    method = bound_to()
    scores, metrics = priced(method, [trace("STMD", rollout=i, success=False) for i in range(4)])
    assert set(scores.values()) == {0.0}
    assert metrics == {
        "reuserl_phrases": 0.0,
        "reuserl_dictionary_bits": 0.0,
        "reuserl_spread_groups": 0.0,
        "reuserl_buffer": 0.0,
    }
    assert method.tables() == {}
    assert method.reward(Batch([]), [])["reuserl_phrases"] == 0


def test_an_invalid_action_is_a_symbol_of_its_own_or_is_dropped():
    traces = [trace("ST?", horizon=10), trace("wave", rollout=1), trace(["wave", "take"], rollout=2)]
    method, dropping = bound_to(extract=False), bound_to(extract=False, invalid_symbol=False)
    assert method.libraries["e"].alphabet == ("deliver", "move", "search", "take", "other")
    assert dropping.libraries["e"].alphabet == ("deliver", "move", "search", "take")
    assert [round((1 - v) * 20) for v in priced(method, traces)[0].values()] == [3, 4, 2]
    assert [round((1 - v) * 20) for v in priced(dropping, traces)[0].values()] == [2, 0, 1]


def test_a_refused_command_is_other_whatever_verb_it_had():
    refused = replace(make_turn("take"), valid=False)
    traces = [replace(trace("STT"), turns=(make_turn("search"), refused, make_turn("take")))]
    for keep, found in ((True, ("search", "other", "take")), (False, ("search", "take"))):
        library = (method := bound_to(invalid_symbol=keep)).libraries["e"]
        assert tuple(library.alphabet[a] for a in method.symbols(traces[0], library)) == found


def test_an_environment_may_name_other_among_its_skills():
    method = bound_to(setting(e=("take", "other", "search")))
    assert method.libraries["e"].alphabet == ("search", "take", "other")


def test_environments_share_no_phrase_and_have_metrics_of_their_own():
    method = bound_to(setting(e=("search", "take", "move", "deliver"), f=("take", "search")))
    others = [trace("ST", slot=30 + i, env="f") for i in range(2)]
    scores, metrics = priced(method, [*MANY, *others])
    assert metrics["reuserl_phrases[e]"] == 3 and metrics["reuserl_phrases[f]"] == 0
    assert "reuserl_phrases" not in metrics
    assert scores[others[0].key] == 1 - 0.5 * 2 / 10
    assert list(method.tables()) == ["Phrases that spell the successes of e"]
    assert len(method.libraries["f"].buffer) == 2


def test_tables_name_phrases_with_their_uses_and_first_step():
    method = bound_to()
    priced(method, [replace(t, step=3) for t in MANY])
    priced(method, [trace("STMDST", step=4)])
    assert method.tables() == {
        "Phrases that spell the successes of e": [
            {"phrase": "search take move deliver", "count": 25, "length": 4, "first step": 3},
            {"phrase": "search take", "count": 1, "length": 2, "first step": 3},
            {"phrase": "move deliver", "count": 0, "length": 2, "first step": 3},
        ]
    }


# ------------------------------------------------------------------------------------------------------- state


def test_p18_dictionary_and_buffer_survive_a_checkpoint():
    rng = random.Random(3)

    def step(number):
        letters = ["STMD" * rng.randint(1, 2) + rng.choice(["", "T", "?"]) for _ in range(12)]
        return [trace(a, i // 4, i % 4, i != 5, step=number) for i, a in enumerate(letters)]

    steps = [step(n) for n in range(1, 7)]
    straight, killed = bound_to(buffer=20), bound_to(buffer=20)
    for one in steps[:3]:
        priced(straight, one), priced(killed, one)
    arrays = {}
    state = encode_state(killed.state_dict(), "methods", arrays)
    resumed = bound_to(buffer=20)
    resumed.load_state_dict(decode_state(state, arrays))
    for one in steps[3:]:
        assert priced(straight, one) == priced(resumed, one)
        assert straight.tables() == resumed.tables()
    assert straight.libraries["e"].buffer == resumed.libraries["e"].buffer
    assert repr(straight.state_dict()) == repr(resumed.state_dict())


def test_p18_a_state_from_before_the_first_step_is_that_state():
    arrays = {}
    state = encode_state(bound_to().state_dict(), "methods", arrays)
    fresh = bound_to()
    fresh.load_state_dict(decode_state(state, arrays))
    assert "reuserl_churn" not in priced(fresh, MANY)[1]


@pytest.mark.slow
def test_a_stopped_and_resumed_run_has_the_same_tables(tmp_path):
    base = {
        "env": "babyai/GoToRedBallNoDists",
        "method": ["grpo", "reuserl"],
        "method_args": {"reuserl": {"cost": "count_sum"}},
        "model": "tiny-300k",
        "planned_steps": 4,
        "tasks_per_step": 4,
        "rollouts_per_task": 8,
        "max_turn_tokens": 4,
        "evaluation": {"tasks": 0},
        "warm_start": {"episodes": 100, "passes": 4, "learning_rate": 3e-3, "from_scratch": True},
    }
    train({**base, "steps": 4, "out": str(tmp_path / "whole")})
    train({**base, "steps": 2, "out": str(tmp_path / "parts")})
    resume(tmp_path / "parts", "4")
    for name in ("tables.jsonl", "metrics.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    assert [record["step"] for record in RunDir(tmp_path / "whole").read_tables()] == [1, 2, 3, 4]
    assert "Phrases that spell the successes of" in (tmp_path / "whole" / "report.html").read_text()


# ---------------------------------------------------------------------------------------------------- refusals


def test_an_environment_without_skills_is_refused():
    with pytest.raises(UserError, match="environment e names no skills"):
        ReuseRL().bind(setting(e=()))


def test_an_episode_without_or_beyond_its_turn_limit_is_refused():
    with pytest.raises(UserError, match="e does not say its turn limit"):
        priced(bound_to(), [trace("S", horizon=0, success=False)])
    with pytest.raises(UserError, match="has 4 turns, and its horizon is 3"):
        priced(bound_to(), [trace("STMD", horizon=3)])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lam": 1.5}, "lam is 1.5"),
        ({"lam": float("nan")}, "lam is nan"),
        ({"max_phrase": 9}, "max_phrase is 9"),
        ({"max_phrase": 0}, "max_phrase is 0"),
        ({"buffer": -1}, "buffer is -1"),
        ({"cost": "bits"}, "cost is 'bits'"),
        ({"beta": 0.0}, "beta is 0"),
        ({"warmup": -2}, "warmup is -2"),
    ],
)
def test_wrong_settings_are_named(wrong, said):
    with pytest.raises(UserError, match=said):
        make("reuserl", wrong)


def test_every_setting_has_its_line():
    assert class_of("reuserl") is ReuseRL
    names = list(inspect.signature(ReuseRL).parameters)
    assert re.findall(r"^    (\w+): ", ReuseRL.__doc__, re.MULTILINE) == names


def test_alphabets_too_large_for_their_codes_are_refused():
    with pytest.raises(UserError, match="max_phrase 8 is too long"):
        ReuseRL(max_phrase=8).bind(setting(e=tuple(map(str, range(250)))))


# ---------------------------------------------------------------------------------------------------- skill maps


def fuzz(env, rng, tasks, turns):
    """Skills of admissible and of odd commands; each of the admissible ones must have one."""
    seen = set()
    for task in tasks:
        _, info = env.reset(options={"split": "train", "task": task})
        assert isinstance(info["horizon"], int) and info["horizon"] > 0
        for _ in range(turns):
            odd = rng.random() < 0.1
            action = rng.choice(["", "fly", "1 + + 2", "take", "go"]) if odd else rng.choice(info["admissible"])
            admissible = action in info["admissible"]
            _, _, terminated, truncated, info = env.step(action)
            assert info["skill"] in (*env.skills, "other")
            if admissible:
                assert info["skill"] in env.skills and info["valid"], action
                seen.add(info["skill"])
            assert info["valid"] or not admissible
            if terminated or truncated:
                break
    env.close()
    return seen


def test_p15_every_admissible_action_has_a_skill_in_babyai():
    assert fuzz(BabyAI(level="GoToLocal"), random.Random(0), range(5), 30) == set(BabyAI.skills)


def test_p15_every_admissible_action_has_a_skill_in_countdown():
    assert fuzz(Countdown(), random.Random(0), range(20), 20) == set(Countdown.skills)


def test_p15_every_admissible_command_has_a_skill_in_textworlds_model_of_a_game():
    kitchen, rng, seen = Kitchen.parse(json.loads((DATA / "kitchen.json").read_text())), random.Random(0), set()
    for _ in range(40):
        state = kitchen.start
        for _ in range(60):
            commands = kitchen.admissible(state)
            seen |= {command.split()[0] for command in commands}
            state = kitchen.after(state, rng.choice(commands))
    assert seen == set(TextWorldCooking.skills)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jericho.UnsupportedGameWarning")
def test_p15_every_admissible_action_has_a_skill_in_textworld(tmp_path):
    pytest.importorskip("textworld")
    env = TextWorldCooking(games=4, cook=True, cut=True, drop=True, cache=tmp_path)
    assert {"look", "inventory", "take", "examine", "open"} <= fuzz(env, random.Random(0), range(4), 60)
