"""Several environments in one run: quotas, groups that never mix, figures of each, and exactness of the whole."""

import io
import json
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from assay.cli.commands import policy_config
from assay.cli.flags import split
from assay.cli.layers import read_train
from assay.cli.play import play
from assay.cli.tables import held_out_table
from assay.compare import Plan, check, measured, start_jobs
from assay.config import default_out, dump, env_settings, environments, resolve, task_quotas, with_env
from assay.curriculum import Curriculum, Mixture
from assay.demonstrations import numbered
from assay.envs.workers import Pool
from assay.evaluate import macro
from assay.facts import entropy, facts
from assay.protocols import Sampling, UserError
from assay.report import curves, held_out, other_charts
from assay.rng import generator
from assay.rollout import Collection, Driver
from assay.rows import Batch, Layout, build_rows
from assay.rundir import RunDir
from assay.seeds import row_of, value
from assay.stats import mean_of_rates, wilson
from assay.trace import Group, Outcome, Provenance, TaskKey, Trace, Turn
from assay.train import Trainer, resume, train

sys.path.insert(0, str(Path(__file__).parent / "envs"))  # "toy:Line" for the workers, who get this path
from test_rollout import HashSampler, LineRenderer, fingerprint
from test_train_variants import bits, kill_at, settings

A, B = "babyai/GoToRedBallNoDists", "babyai/GoToObj"
ONE, TWO = "toy:Line", "toy:Copied"


def ask(text: str) -> Any:
    return read_train(split(text.split())).config


def mixed(**more: Any) -> Any:
    return resolve({"env": f"{A},{B}", **more}, "here")


# ------------------------------------------------------------------------------------------------------ configuration


def test_the_environments_stand_in_the_order_named_without_spaces() -> None:
    config = resolve({"env": f" {B} , {A} "}, "here")
    assert config.env == f"{B},{A}" and environments(config) == [B, A]
    assert environments(resolve({}, "here")) == ["babyai/GoToLocal"]
    assert default_out(mixed(seed=3)) == "runs/babyai-GoToRedBallNoDists+babyai-GoToObj-grpo-tiny-1m-s3"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"env": f"{A},{B},{A}"}, f"here: .* names '{A}' twice"),
        ({"env": " , "}, "here: env is empty"),
        ({"env": f"{A},{B}", "tasks_per_step": 1}, "tasks_per_step is 1, and the mixture has 2 environments"),
        (
            {"env": f"{A},{B}", "env_shares": [1.0]},
            r"env_shares \[1.0\] does not fit: give one number above 0 for each",
        ),
        ({"env": f"{A},{B}", "env_shares": [1.0, 0.0]}, "does not fit"),
        (
            {"env": f"{A},{B}", "env_args": {"room": 6}},
            r'env_args.room: .* go by environment.*\[env_args."babyai/GoToRed',
        ),
        ({"env": f"{A},{B}", "env_args": {"countdown": {}}}, "env_args.countdown: the settings of a mixture"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_in_a_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(values, "here")


@pytest.mark.parametrize(
    ("tasks", "shares", "expected"),
    [  # by hand: 16 x (1, 1, 1) / 3 = 5.33 each, the one left over goes to the first
        (16, None, [6, 5, 5]),
        (16, [1.0, 1.0, 2.0], [4, 4, 8]),
        (7, [0.5, 0.3, 0.2], [4, 2, 1]),  # 3.5, 2.1, 1.4: the largest remainder is the first's
        (10, [1.0, 1.0, 98.0], [1, 1, 8]),  # 0.1, 0.1, 9.8: one each, taken from the largest
        (3, [1.0, 1.0, 98.0], [1, 1, 1]),
    ],
)
def test_tasks_are_split_by_largest_remainder_one_each_at_least(
    tasks: int, shares: list[float] | None, expected: list[int]
) -> None:
    config = resolve({"env": f"{A},{B},countdown", "tasks_per_step": tasks, "env_shares": shares}, "here")
    assert task_quotas(config) == dict(zip([A, B, "countdown"], expected, strict=True))


def test_settings_of_a_mixture_go_by_environment_and_those_of_one_as_ever() -> None:
    config = mixed(env_args={B: {"room": 6}}, env_shares=[1.0, 2.0])
    assert env_settings(config, A) == {} and env_settings(config, B) == {"room": 6}
    assert env_settings(resolve({"env": B, "env_args": {"room": 5}}, "here"), B) == {"room": 5}
    alone = with_env(config, B)
    assert (alone.env, alone.env_args, alone.env_shares) == (B, {"room": 6}, None)


def test_flags_set_each_environments_settings_and_the_shares(tmp_path: Path) -> None:
    import tomli_w

    text = f"--env {A},textworld-cooking,{ONE} --env-args.{A}.room 6 --env-args.textworld-cooking.games 8"
    config = ask(f"{text} --env-args.Line.horizon 3 --env-shares 2,1 1")
    assert config.env_args == {A: {"room": 6}, "textworld-cooking": {"games": 8}, ONE: {"horizon": 3}}
    assert config.env_shares == [2.0, 1.0, 1.0]
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(dump(config)))
    again = ask(f"{file} --env-args.{A}.horizon 7")
    assert again.env_args[A] == {"room": 6, "horizon": 7} and again.env_args[ONE] == {"horizon": 3}
    other = ask(f"{file} --env {A},{ONE}")
    assert other.env_args == {} and other.env_shares is None, "nothing of another mixture is kept"
    with pytest.raises(UserError, match=r"unknown option --env-args.room: did you mean"):
        ask(f"--env {A},{B} --env-args.room 6")
    with pytest.raises(UserError, match="environment 'countdwn' does not exist: did you mean 'countdown'"):
        ask(f"--env {A},countdwn")
    with pytest.raises(UserError, match="--env-shares one"):
        ask(f"--env {A},{B} --env-shares one 2")


# ------------------------------------------------------------------------------------------------------------ the driver


class Shout(LineRenderer):
    """Of another environment: its prompts begin with another token."""

    def prompt(self, goal: str, mode: str = "") -> tuple[Any, Any]:
        ids, provenance = super().prompt(goal, mode)
        ids[0] = 99
        return ids, provenance


def collect(workers: int = 1, env: dict[str, Any] | None = None, **options: Any) -> Collection:
    driver_options = {name: options.pop(name) for name in ("concurrency", "delay", "evidence") if name in options}
    tasks = {
        ONE: lambda round_, n: [10 * round_ + i for i in range(n)],
        TWO: lambda round_, n: [5 + i for i in range(n)],
    }
    arguments = {"tasks_per_step": {ONE: 2, TWO: 3}, "rollouts_per_task": 2, "step": 4} | options
    with Pool(ONE, env, workers) as one, Pool(TWO, env, workers) as two:
        sampling, others = Sampling(max_new_tokens=3), [(two, Shout())]
        driver = Driver(HashSampler(), one, LineRenderer(), sampling, seed=1, others=others, **driver_options)
        return driver.collect_groups(arguments.pop("tasks", tasks), **arguments)


def test_slots_are_numbered_through_and_no_group_mixes_environments() -> None:
    collection = collect(evidence=True)
    found = [(g.key[-4:], g.task.environment, g.task.id) for g in collection.batch.groups]
    assert found == [("0000", ONE, 0), ("0001", ONE, 1), ("0002", TWO, 5), ("0003", TWO, 6), ("0004", TWO, 7)]
    for group in collection.batch.groups:
        assert {t.task.environment for t in group.traces} == {group.task.environment}
        assert {int(t.prompt_ids[0]) for t in group.traces} == {99 if group.task.environment == TWO else 6}
        assert all(t.evidence for t in group.traces), "each is asked where it was played"
    assert collection.counters["episodes"] == 10 and collection.counters["kept_groups"] == 5


def test_each_quota_is_filled_by_groups_of_its_own_and_rounds_ask_for_what_is_missing_of_each() -> None:
    asked = []

    def source(name: str) -> Any:
        def tasks(round_: int, missing: int) -> list[int]:
            asked.append((name, round_, missing))
            return [10 * round_ + i for i in range(missing + (name == TWO))]  # TWO gives one more than it need

        return tasks

    collection = collect(
        tasks={ONE: source(ONE), TWO: source(TWO)},
        keep=[lambda g: g.task.environment == TWO or g.task.id >= 10],  # ONE keeps none of the first round
        max_rounds=3,
    )
    assert asked == [(ONE, 0, 2), (TWO, 0, 3), (ONE, 1, 2)]
    kept = [(g.task.environment, g.task.id) for g in collection.batch.groups]
    assert kept == [(TWO, 0), (TWO, 1), (TWO, 2), (ONE, 10), (ONE, 11)], "in key order"
    assert collection.counters["surplus_groups"] == 1 and collection.counters["dropped_groups"] == 3
    assert [g.task.id for g in collection.batch.dropped if g.task.environment == TWO] == [3]
    assert collection.counters["rounds"] == 2


def test_neither_workers_nor_their_speed_change_what_a_mixture_collects() -> None:
    calm = collect(concurrency=3, delay=2)
    hasty = collect(workers=2, env={"sleep_ms": 5.0}, concurrency=3, delay=2)
    traces = [[t for g in c.batch.groups for t in g.traces] for c in (calm, hasty)]
    assert fingerprint(traces[0]) == fingerprint(traces[1]) and calm.counters == hasty.counters


def test_one_environment_by_name_is_what_it_is_without() -> None:
    def tasks(round_: int, missing: int) -> list[int]:
        return list(range(missing))

    found = []
    for source, quota in ((tasks, 3), ({ONE: tasks}, {ONE: 3})):
        with Pool(ONE) as pool:
            driver = Driver(HashSampler(), pool, LineRenderer(), Sampling(max_new_tokens=3), seed=1)
            collection = driver.collect_groups(source, tasks_per_step=quota, rollouts_per_task=2, step=1)
        found.append((fingerprint(collection.batch.traces), collection.counters))
    assert found[0] == found[1]


def test_revisions_play_in_the_environment_of_their_group() -> None:
    from assay.protocols import Reset

    seen = {}

    def revise(group: Group) -> Any:
        result = yield Reset("train", group.task.id)
        seen[group.task.environment, group.task.id] = result.observation
        return group

    collect(revise=[revise])
    assert seen == {(name, i): "at 0" for name, ids in ((ONE, (0, 1)), (TWO, (5, 6, 7))) for i in ids}


# ------------------------------------------------------------------------------------------------------------ curriculum


def test_each_environment_walks_as_it_would_alone() -> None:
    mixture = Mixture({A: Curriculum(0, 10, 4, A), B: Curriculum(0, None, 2, B)})
    alone = {A: Curriculum(0, 10, 4, A), B: Curriculum(0, None, 2, B)}
    assert mixture.quotas == {A: 4, B: 2}
    for step in range(4):
        for name, tasks in mixture.sources(step).items():
            assert tasks(0, 3) == alone[name].tasks(step, 3)


def test_a_mixtures_state_holds_all_and_one_environments_is_as_it_was_before_mixtures() -> None:
    def fresh() -> Mixture:
        return Mixture({A: Curriculum(0, 10, 4, A), B: Curriculum(0, 7, 2, B)})

    first = fresh()
    for tasks in first.sources(1).values():
        tasks(0, 4)
    state = json.loads(json.dumps(first.state_dict()))
    second = fresh()
    second.load_state_dict(state)
    assert [tasks(0, 4) for tasks in first.sources(2).values()] == [tasks(0, 4) for tasks in second.sources(2).values()]
    old = Curriculum(0, 10, 4, A)
    old.tasks(1)
    single = Mixture({A: Curriculum(0, 10, 4, A)})
    single.load_state_dict(old.state_dict())
    assert single.state_dict() == old.state_dict() == {"position": 4, "deferred": []}


# ----------------------------------------------------------------------------------------------------------- the trainer


def trace_of(env: str, slot: int, rollout: int, success: bool, turns: int = 1, valid: bool = True) -> Trace:
    ids, ones = np.array([5, 6], np.int32), np.ones(2, np.uint8)
    answer = np.full(2, Provenance.SAMPLED, np.uint8)
    numbers = np.full(2, 0.5 if env == A else 1.5, np.float32)
    turn = Turn(
        ids, ones, ids, answer, -numbers, numbers, ids[:0], "", "x", float(success), valid, "a", "other", False, 0
    )
    outcome = Outcome.SUCCESS if success else Outcome.FAILURE
    return Trace(
        TaskKey(env, "v", "train", slot, "h"), 1, 0, slot, rollout, ids, ones, (turn,) * turns, "", float(success),
        outcome, 1.0,
    )  # fmt: skip


def collection_of(traces: list[Trace]) -> Collection:
    keys = sorted({t.group_key for t in traces})
    parts = [tuple(t for t in traces if t.group_key == key) for key in keys]
    return Collection(Batch([Group(p[0].task, p) for p in parts]), {"episodes": len(traces)}, {})


def test_facts_of_each_environment_are_of_its_episodes_and_tokens_alone() -> None:
    traces = [trace_of(A, 0, r, r < 3, turns=1) for r in range(4)] + [
        trace_of(B, 1, r, False, 2, r == 0) for r in range(4)
    ]
    found = facts(collection_of(traces), [A, B])
    assert found["success"] == 3 / 8, "over all episodes alike"
    assert (found[f"success[{A}]"], found[f"success[{B}]"]) == (0.75, 0.0)
    interval = wilson(3, 4)
    assert (found[f"success_low[{A}]"], found[f"success_high[{A}]"]) == (interval.low, interval.high)
    assert (found[f"reward[{A}]"], found[f"turns[{A}]"], found[f"turns[{B}]"]) == (0.75, 1.0, 2.0)
    assert (found[f"invalid_actions[{A}]"], found[f"invalid_actions[{B}]"]) == (0.0, 0.75)
    assert (found[f"episodes[{A}]"], found[f"kept_groups[{A}]"], found[f"kept_groups[{B}]"]) == (4.0, 1.0, 1.0)
    rows = build_rows(traces, Layout())
    entropies = entropy(rows, rows, frozenset(), [A, B])
    # 8 tokens at 0.5 nats, 16 at 1.5
    assert (entropies[f"entropy[{A}]"], entropies[f"entropy[{B}]"]) == (0.5, 1.5)
    assert entropies["entropy"] == pytest.approx(28 / 24)


def test_a_run_on_one_environment_has_no_metric_with_brackets() -> None:
    traces = [trace_of(A, 0, r, r < 3) for r in range(4)]
    rows = build_rows(traces, Layout())
    assert not [name for name in {**facts(collection_of(traces)), **entropy(rows, rows, frozenset())} if "[" in name]


def dealt(names: list[str], counts: list[int], parts: int, step: int = 0) -> list[list[str]]:
    """Environment of each task instance in each part, in key order."""
    slots = [(name, i) for name, n in zip(names, counts, strict=True) for i in range(n)]
    rows = build_rows([trace_of(name, slot, 0, True) for slot, (name, _) in enumerate(slots)], Layout())
    config = SimpleNamespace(seed=7, epochs=1, updates_per_batch=parts)
    bench = SimpleNamespace(environments=names, mixture=names if len(names) > 1 else [])
    trainer: Any = SimpleNamespace(config=config, bench=bench, spent={"steps": step})
    return [[row.trace.key for row in part] for part in Trainer.parts(trainer, rows, rows)]


@pytest.mark.parametrize(("counts", "parts"), [([4, 4], 4), ([5, 3], 4), ([1, 7], 4), ([6, 2], 2), ([3, 3], 4)])
def test_each_part_has_its_share_of_every_environment_and_every_task_once(counts: list[int], parts: int) -> None:
    hands = dealt([A, B], counts, parts)
    keys = [key for hand in hands for key in hand]
    assert len(keys) == len(set(keys)) == sum(counts)
    slots = [[int(key.split(".")[2]) for key in hand] for hand in hands]
    for low, high in ((0, counts[0]), (counts[0], sum(counts))):
        held = [sum(low <= slot < high for slot in hand) for hand in slots]
        assert max(held) - min(held) <= 1, "even in each environment"
    assert max(map(len, hands)) - min(map(len, hands)) <= 1, "and in all"
    assert dealt([A, B], counts, parts, step=1) != hands or sum(counts) < 3, "drawn anew each step"


def test_the_parts_of_one_environment_are_those_of_a_run_before_mixtures() -> None:
    keys = [f"000001.00.{i:04d}" for i in range(7)]
    order = generator(7, "parts", 0, 0).permutation(7)
    expected = [sorted(keys[i] for i in order[part::3]) for part in range(3)]
    assert [sorted(key[:14] for key in hand) for hand in dealt([A], [7], 3)] == expected


# ------------------------------------------------------------------------------------------------------------ evaluation


def summary(k: int, n: int, panel: str = "p") -> dict[str, Any]:
    interval = wilson(k, n)
    low, high = interval.low, interval.high
    outcomes = {"success": k, "failure": n - k}
    return {"success": k / n, "low": low, "high": high, "n": n, "turns": 2.0, "outcomes": outcomes, "panel": panel}


def test_the_interval_of_a_mean_of_rates_by_hand() -> None:
    # distances (0.1, 0.2) and (0.3, 0.1) below and above: roots of 0.01 + 0.09 and 0.04 + 0.01, halved
    found = mean_of_rates([(0.5, 0.4, 0.7, 10), (0.8, 0.5, 0.9, 20)])
    assert found.estimate == pytest.approx(0.65) and found.n == 30
    assert found.low == pytest.approx(0.65 - np.sqrt(0.10) / 2) and found.high == pytest.approx(
        0.65 + np.sqrt(0.05) / 2
    )


def test_the_mean_of_one_rate_is_that_rate_and_all_solved_is_no_certainty() -> None:
    one, both = wilson(7, 9), wilson(9, 9)
    alone = mean_of_rates([(one.estimate, one.low, one.high, 9)])
    assert (alone.estimate, alone.low, alone.high) == pytest.approx((one.estimate, one.low, one.high))
    whole = mean_of_rates([(1.0, both.low, 1.0, 9)] * 2)
    assert whole.high == 1.0 and both.low < whole.low < 1.0


def test_the_interval_of_a_mean_of_rates_covers_as_it_says() -> None:
    """Exact, by going through all outcomes of 12 and 30 tasks at rates of 0.15 and 0.7: no draw is involved."""
    from scipy.stats import binom

    covered = 0.0
    for a, b in product(range(13), range(31)):
        inner = [wilson(a, 12), wilson(b, 30)]
        found = mean_of_rates([(i.estimate, i.low, i.high, i.n) for i in inner])
        if found.low <= (0.15 + 0.7) / 2 <= found.high:
            covered += binom.pmf(a, 12, 0.15) * binom.pmf(b, 30, 0.7)
    assert 0.93 < covered < 0.98


def test_the_figure_of_a_mixture_is_the_mean_over_environments_not_over_tasks() -> None:
    found = macro({A: summary(10, 10, "pa"), B: summary(0, 90, "pb")})
    assert found["success"] == 0.5 and found["n"] == 100
    assert found["outcomes"] == {"success": 10, "failure": 90}
    assert found["panel"] != macro({A: summary(10, 10, "pa"), B: summary(0, 90, "pc")})["panel"]
    nothing = {"success": None, "low": None, "high": None, "n": 0, "turns": 0.0, "outcomes": {}, "panel": "x"}
    assert macro({A: summary(10, 10), B: nothing})["success"] is None, "not the mean of the others"


RESULT: dict[str, Any] = {
    "sampled": summary(12, 20),
    "ood": {"sampled": summary(9, 20)},
    "environments": {
        A: {"sampled": summary(9, 10), "ood": {"sampled": summary(8, 10)}},
        B: {"sampled": summary(3, 10), "ood": {"sampled": summary(1, 10)}},
    },
}


def test_tables_show_the_panel_of_every_environment_with_its_name() -> None:
    out = Console(width=200, file=(file := io.StringIO()), markup=False)
    out.print(held_out_table({}, RESULT))
    text = file.getvalue()
    assert f"iid sampled[{A}]" in text and f"ood sampled[{B}]" in text and "0.100 [0.018, 0.404] n=10" in text


def test_the_report_shows_the_mean_and_every_environment() -> None:
    rows = held_out({"before": {}, "after": RESULT})
    assert [row["panel"] for row in rows] == [
        "iid, mean of environments", "ood, mean of environments", f"iid, {A}", f"ood, {A}", f"iid, {B}", f"ood, {B}",
    ]  # fmt: skip
    assert rows[5]["after"]["success"] == 0.1
    alone = held_out({"before": {}, "after": RESULT["environments"][A]})
    assert [row["panel"] for row in alone] == ["iid", "ood"]


def test_the_reports_curves_have_a_line_for_each_environment() -> None:
    metrics = [
        {"step": s, "success": 0.5, f"success[{A}]": 0.6, f"success[{B}]": 0.4, "reward": 1.0, f"reward[{A}]": 2.0}
        | {f"success_low[{A}]": 0.1, f"pace[{A}]": 1.0}
        for s in (1, 2, 3)
    ]
    found = {curve["title"]: curve["names"] for curve in curves(metrics, [])}
    assert [name for name, _ in found["Success by environment"]] == [f"success[{A}]", f"success[{B}]"]
    assert [name for name, _ in found["Reward per episode"]] == ["reward", f"reward[{A}]"]
    assert [chart["title"] for chart in other_charts(metrics)] == [f"pace[{A}]"]


def test_a_comparison_can_be_about_one_environment(tmp_path: Path) -> None:
    curve = {"success": [0.0] * 6, f"success[{B}]": [0.0, 0.0, 0.0, 0.0, 0.6, 0.8]}
    row = {"end": RESULT, "curves": curve, "timings": {}}
    assert value(row, "iid sampled") == 0.6 and value(row, f"iid sampled[{B}]") == 0.3
    assert value(row, f"ood sampled[{A}]") == 0.8
    assert value(row, f"success[{B}] last third") == pytest.approx(0.7)
    assert np.isnan(value(row, "iid sampled[countdown]"))
    with pytest.raises(UserError, match="does not exist"):
        value(row, f"nothing[{B}]")
    arm = dump(mixed(evaluation={"ood": False, "greedy": False}))
    assert measured(resolve(arm, "x")) == ["iid sampled", f"iid sampled[{A}]", f"iid sampled[{B}]"]
    check(Plan(arms={"a": arm, "b": arm}, seeds=[0, 1], metric=f"iid sampled[{B}]", secondary=[f"entropy[{A}]"]))
    for metric in ("iid sampled[countdown]", "entropy[countdown]"):
        with pytest.raises(UserError, match=f"is of an environment of a mixture: {A}, {B}"):
            check(Plan(arms={"a": arm, "b": arm}, seeds=[0, 1], metric=metric))
    with pytest.raises(UserError, match="is not measured"):
        check(Plan(arms={"a": arm, "b": arm}, seeds=[0, 1], metric=f"ood sampled[{B}]"))
    shared = {"a": {**arm, "env_shares": [1.0, 3.0]}, "b": arm}
    jobs = start_jobs(tmp_path, Plan(arms=shared, seeds=[0, 1]), tmp_path, "v")
    assert jobs["a"].key == jobs["b"].key, "shares are of the training: the start is the same"


def test_a_finished_seed_keeps_the_curves_of_every_environment(tmp_path: Path) -> None:
    lines = [{"step": 1, "success": 0.5, f"success[{A}]": 0.25, f"pace[{A}]": 2.0}, {"step": 2, f"success[{A}]": 0.5}]
    run: Any = SimpleNamespace(
        read_metrics=lambda: lines, read_timings=lambda: [], evaluation={"after": RESULT}, config={"env": f"{A},{B}"}
    )
    row = row_of(run, "k", "v")
    assert row["curves"][f"success[{A}]"] == [0.25, 0.5] and f"pace[{A}]" not in row["curves"]


def test_a_mixtures_policy_is_asked_on_all_of_its_environments_or_on_one(tmp_path: Path) -> None:
    import tomli_w

    config = mixed(env_args={B: {"room": 6}}, env_shares=[1.0, 2.0])
    (tmp_path / "config.toml").write_text(tomli_w.dumps(dump(config)))
    assert policy_config(str(tmp_path), None) == config == policy_config(str(tmp_path), f"{A},{B}")
    one = policy_config(str(tmp_path), B)
    assert (one.env, one.env_args) == (B, {"room": 6})
    other = policy_config(str(tmp_path), "countdown")
    assert (other.env, other.env_args, other.env_shares) == ("countdown", {}, None)
    with pytest.raises(UserError, match=f"an episode is of one environment: give --env, one of {A}, {B}"):
        play(split(["--policy", str(tmp_path)]))


def test_demonstrations_of_a_mixture_are_numbered_through() -> None:
    trace = trace_of(A, 3, 0, True)
    assert numbered(trace, 12_345).slot == 2_345 and numbered(trace, 12_345).rollout == 1
    keys = [numbered(trace_of(env, i, 0, True), n * 3 + i).group_key for n, env in enumerate((A, B)) for i in range(3)]
    assert len(set(keys)) == 6


# ----------------------------------------------------------------------------------------------------------- whole runs


MIX: dict[str, Any] = {
    "env": f"{A},{B}",
    "env_args": {B: {"room": 6}},
    "env_shares": [2.0, 1.0],
    "tasks_per_step": 5,
    "updates_per_batch": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"slots": {"keep": "mixed"}, "rounds": 3}, {"method": ["ppo"]}], ids=str)
def test_a_mixture_twice_and_killed_and_resumed_gives_the_same_bits(more: dict[str, Any], tmp_path: Path) -> None:
    train(settings(tmp_path / "straight", **MIX, **more))
    train(settings(tmp_path / "again", **MIX, **more))
    killed = settings(tmp_path / "killed", **MIX, **more)
    kill_at("step 2", killed, again=False)
    kill_at("episodes  tick 3", killed, again=True)
    resume(tmp_path / "killed")
    expected = bits(tmp_path / "straight")
    assert bits(tmp_path / "again") == expected and bits(tmp_path / "killed") == expected
    lines = RunDir(tmp_path / "straight").read_metrics()
    assert all(line[f"episodes[{A}]"] + line[f"episodes[{B}]"] == line["episodes"] for line in lines)
    if not more:
        assert Counter((line[f"kept_groups[{A}]"], line[f"kept_groups[{B}]"]) for line in lines) == {(3.0, 2.0): 4}


@pytest.mark.slow
def test_the_warm_start_and_the_panels_of_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in its imitation and in its evaluations too; each panel is what the environment has alone."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache one"))
    more = MIX | {"steps": 1, "warm_start": {"episodes": 8}, "evaluation": {"tasks": 4, "ood": False, "every": 1}}
    train(settings(tmp_path / "straight", **more))
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache two"))
    for moment in ("imitation 1", "episodes iid, sampled tick 2", "evaluating after training"):
        kill_at(moment, settings(tmp_path / "killed", **more), again=(tmp_path / "killed" / "config.toml").exists())
    resume(tmp_path / "killed")
    assert bits(tmp_path / "killed") == bits(tmp_path / "straight")
    evaluation = RunDir(tmp_path / "straight").evaluation
    assert RunDir(tmp_path / "killed").evaluation["after"] == evaluation["after"]
    line = RunDir(tmp_path / "straight").read_metrics()[0]
    assert line["iid_success"] == pytest.approx((line[f"iid_success[{A}]"] + line[f"iid_success[{B}]"]) / 2)
    keys = [t.key for t in RunDir(tmp_path / "straight").read_traces("after")]
    assert len(keys) == len(set(keys)) == 8
    for name in (A, B):
        alone = {"env": name, "env_args": MIX["env_args"].get(name, {}), "model": str(tmp_path / "straight")}
        alone |= {"steps": 0, "evaluation": {"tasks": 4, "ood": False}}
        result = train(settings(tmp_path / f"alone {name[7:]}", **alone))
        assert result.after["sampled"] == evaluation["after"]["environments"][name]["sampled"]


@pytest.mark.slow
def test_another_mixture_does_not_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    train(settings(tmp_path / "run", **MIX | {"steps": 1}))
    run = tmp_path / "run" / "config.toml"
    run.write_text(run.read_text().replace(f'"{A},{B}"', f'"{B},{A}"').replace("steps = 1\n", "steps = 2\n"))
    with pytest.raises(UserError, match=f"was trained on environment {A}@.*,{B}@.*, and this is {B}@"):
        resume(tmp_path / "run")
