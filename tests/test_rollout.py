"""The driver and its logical clock, with real workers and a sampler whose answers are a hash of its context."""

import math
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.curriculum import Curriculum
from assay.envs.workers import Pool
from assay.protocols import (
    Completion,
    Draw,
    Episode,
    Fork,
    Generate,
    Request,
    Restore,
    Sampling,
    Snapshot,
    Step,
    Truncate,
    UserError,
)
from assay.rng import digest, uniforms
from assay.rollout import EMPTY, Driver, Job, Progress, Settings, replay, resume
from assay.rows import Layout, build_rows
from assay.trace import Group, Ids, Outcome, Provenance, Trace

sys.path.insert(0, str(Path(__file__).parent / "envs"))  # "toy:Line" for the workers, who get this path

LETTERS = "RRLS?"  # token 0 to 4
END, PROMPT, SHOW, ASK, CLOSE = 5, 6, 7, 8, 9
JOBS = [Job(task, step=3, slot=task, rollout=r) for task in range(4) for r in range(3)]


class HashSampler:
    """Keeps the protocol to the letter; records which contexts, as they stand, shared each tick."""

    def __init__(self, max_length: int = 1000) -> None:
        self.max_length = max_length
        self.contexts: dict[int, list[int]] = {}
        self.opened = 0
        self.busy: dict[int, tuple[Draw, list[int]]] = {}
        self.shared: list[list[tuple[int, str]]] = []
        self.seen: list[tuple[Ids, Draw]] = []  # (whole context, draw) of every request
        self.most = 0

    def open(self) -> int:
        self.opened += 1
        self.contexts[self.opened] = []
        self.most = max(self.most, len(self.contexts))
        return self.opened

    def fork(self, context: int) -> int:
        copy = self.open()
        self.contexts[copy] = list(self.contexts[context])
        return copy

    def truncate(self, context: int, length: int) -> None:
        assert length <= len(self.contexts[context])
        del self.contexts[context][length:]

    def close(self, context: int) -> None:
        del self.contexts[context]
        self.busy.pop(context, None)

    def length(self, context: int) -> int:
        return len(self.contexts[context])

    def submit(self, draw: Draw) -> None:
        assert draw.context not in self.busy and len(draw.uniforms) >= draw.sampling.max_new_tokens
        self.contexts[draw.context] += draw.ids.tolist()
        self.seen.append((np.array(self.contexts[draw.context], np.int32), draw))
        self.busy[draw.context] = (draw, [])

    def tick(self) -> list[tuple[int, Completion]]:
        assert self.busy
        self.shared.append([(c, digest(*self.contexts[c]).hex()) for c in self.busy])
        ended = []
        for context, (draw, ids) in sorted(self.busy.items()):
            held = self.contexts[context]
            token = int.from_bytes(digest(*held, str(draw.uniforms[len(ids)]))[:4], "little") % 6
            held.append(token)
            ids.append(token)
            stop = "stop" if token in draw.sampling.stop_ids else "length"
            if len(held) >= self.max_length and stop == "length":
                stop = "context"
            if stop != "length" or len(ids) == draw.sampling.max_new_tokens:
                del self.busy[context]
                values = np.arange(len(ids), dtype=np.float32)
                ended.append((context, Completion(np.array(ids, np.int32), -values, values, stop)))
        return ended


class LineRenderer:
    stop_ids = (END,)
    stop_strings: tuple[str, ...] = ()

    def prompt(self, goal: str, mode: str = "") -> tuple[Ids, Any]:
        ids = np.array([PROMPT, 10 + int(goal.split()[-1]), *(50 + ord(c) for c in mode)], np.int32)
        return ids, np.full(len(ids), Provenance.TEMPLATE, np.uint8)

    def observation(self, text: str, first: bool) -> tuple[Ids, Any]:
        shown = [100 + ord(c) for c in text]
        ids = np.array([SHOW, *shown, ASK], np.int32)
        return ids, np.array([1, *(2 for _ in shown), 1], np.uint8)

    def closing(self, ids: Ids) -> Ids:
        return np.array([CLOSE] if len(ids) and ids[-1] == END else [END, CLOSE], np.int32)

    def action(self, ids: Ids) -> str:
        return "".join(LETTERS[i] for i in ids if i < END)

    def decode(self, ids: Ids) -> str:
        return " ".join(map(str, ids))


def play(
    jobs: list[Job] | None = None, env: dict[str, Any] | None = None, name: str = "toy:Line", **options: Any
) -> Any:
    """(traces, sampler, driver)."""
    sampler = HashSampler(options.pop("max_length", 1000))
    workers, timeout_s = options.pop("workers", 1), options.pop("timeout_s", 30.0)
    sampling = Sampling(max_new_tokens=options.pop("max_new_tokens", 3))
    pool = options.pop("pool", None)
    with nullcontext(pool) if pool else Pool(name, env or {}, workers, timeout_s) as pool:
        driver = Driver(sampler, pool, LineRenderer(), sampling, seed=1, evidence=True, **options)
        traces = driver.collect(JOBS if jobs is None else jobs)
    assert not sampler.contexts and not sampler.busy, "every context is closed"
    return traces, sampler, driver


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool("toy:Line") as shared:
        yield shared


def fingerprint(traces: list[Trace]) -> list[Any]:
    return [
        (
            t.key,
            str(t.task),
            str(t.outcome),
            None if math.isnan(t.reward) else t.reward,
            re.sub(r"worker \d", "worker", t.error),
            t.extra_tokens,
            t.evidence,
            t.prompt_ids.tolist(),
            t.final_observation,
            [
                (
                    *(a.tolist() for a in (*u.block(), u.logprobs, u.closing_ids)),
                    u.observation,
                    u.action,
                    u.stop,
                    u.skill,
                )
                for u in t.turns
            ],
        )
        for t in traces
    ]


# ------------------------------------------------------------------------------------------------------ one episode


def test_a_trace_holds_what_the_environment_and_the_sampler_said() -> None:
    traces, sampler, driver = play()
    assert [t.key for t in traces] == [f"{job.key}.root." for job in JOBS]
    asked = {(tuple(ids), tuple(draw.uniforms)) for ids, draw in sampler.seen}
    for trace in traces:
        ids, at, goal = list(trace.prompt_ids), 0, 1 + trace.task.id % 3
        assert trace.task.hash == f"h{trace.task.id}" and trace.task.environment == "toy:Line"
        for t, turn in enumerate(trace.turns):
            assert turn.observation == f"at {at}"
            ids += turn.context_ids.tolist()
            draws = uniforms(1, "token", 3, 0, trace.slot, trace.rollout, t, 0, n=3)
            assert (tuple(ids), tuple(draws)) in asked, "the context was exactly the blocks spliced"
            ids += turn.ids.tolist() + turn.closing_ids.tolist()
            assert turn.action == "".join(LETTERS[i] for i in turn.ids if i != END)
            at += {"R": 1, "L": -1}.get(turn.action[:1], 0)
            assert turn.valid == (turn.action[:1] in ("R", "L", "S")) and turn.noop == (
                turn.action[:1] in ("S", "?", "")
            )
            assert turn.stop == ("stop" if turn.ids[-1] == END else "length")
        assert trace.final_observation == f"at {at}" and trace.evidence["checks"][0]["value"] == at
        stopped = trace.turns[-1].action[:1] == "S"
        good = stopped and at == goal
        outcome = Outcome.SUCCESS if good else Outcome.FAILURE if stopped else Outcome.HORIZON
        assert trace.outcome is outcome and trace.reward == float(good)
        assert len(trace.turns) == 5 or stopped
    assert {t.outcome for t in traces} == {Outcome.SUCCESS, Outcome.FAILURE, Outcome.HORIZON}, "the toy shows all three"
    assert driver.counters["generated_tokens"] == sum(t.sampled_tokens for t in traces)
    assert driver.counters["env_steps"] == sum(len(t.turns) for t in traces)


@pytest.mark.parametrize("layout", ["append", "window(0)", "window(1)", "window(2)", "window(9)"])
def test_the_sampler_sees_exactly_the_ids_of_the_training_row(layout: str) -> None:
    traces, sampler, _ = play(layout=Layout.parse(layout))
    contexts = sorted(ids.tolist() for ids, _ in sampler.seen)
    rows = build_rows(traces, Layout.parse(layout))
    if layout == "append":
        assert len(rows) == len(traces)
        for row in rows:
            starts = [int(row.at[row.turns == t][0]) for t in range(len(row.trace.turns))]
            assert all(row.ids[:start].tolist() in contexts for start in starts)
    else:
        assert contexts == sorted(row.ids[: row.at[0]].tolist() for row in rows)


def test_a_long_window_and_append_give_the_same_traces() -> None:
    assert fingerprint(play()[0]) == fingerprint(play(layout=Layout.parse("window(9)"))[0])


@pytest.mark.parametrize("layout", ["append", "window(1)"])
def test_what_does_not_fit_is_cut_and_never_a_crash(layout: str, pool: Pool) -> None:
    plain = play(layout=Layout.parse(layout), pool=pool)[0]
    seen = set()
    for limit in range(1, 40):
        for option in ("max_length", "max_episode_tokens"):
            traces, sampler, driver = play(JOBS[:2], layout=Layout.parse(layout), pool=pool, **{option: limit})
            assert all(len(ids) + 1 <= sampler.max_length for ids, _ in sampler.seen)
            for trace, whole in zip(traces, plain, strict=False):
                if option == "max_episode_tokens":
                    last = len(trace.turns[-1].closing_ids) if trace.turns else 0
                    assert trace.length - last <= limit or not trace.turns
                if trace.outcome is Outcome.CUT:
                    full = trace.turns[:-1] if trace.turns and trace.turns[-1].stop == "context" else trace.turns
                    assert [t.ids.tolist() for t in full] == [t.ids.tolist() for t in whole.turns[: len(full)]]
                    assert trace.reward == 0.0 and trace.evidence["checks"], "evidence of the state it was cut in"
                    seen.add((len(trace.turns) > 0, bool(trace.turns) and trace.turns[-1].stop))
                else:
                    assert fingerprint([trace]) == fingerprint([whole])
            assert driver.counters["cuts"] == sum(t.outcome is Outcome.CUT for t in traces)
    assert {(False, False), (True, "context")} <= seen


def test_a_prompt_longer_than_the_context_gives_a_trace_without_turns() -> None:
    traces, sampler, _ = play(max_length=7)
    assert all(t.outcome is Outcome.CUT and not t.turns and t.sampled_tokens == 0 for t in traces)
    assert not sampler.seen and build_rows(traces, Layout()) == []


@pytest.mark.parametrize("fault", ["exception", "crash", "hang"])
def test_an_environment_error_has_reward_nan_and_leaves_the_others_as_they_were(fault: str) -> None:
    jobs = [job for job in JOBS if job.rollout == job.id % 3 or job.id < 2]  # one rollout of the task that fails
    calm = fingerprint(play(jobs)[0])
    traces, _, driver = play(jobs, env={"fault": fault, "fault_tasks": [2]}, timeout_s=1.0)
    failed = [t for t in traces if t.outcome is Outcome.ENVIRONMENT_ERROR]
    assert failed and {t.task.id for t in failed} == {2}
    assert all(
        math.isnan(t.reward) and t.error and math.isnan(t.turns[-1].reward) and len(t.turns) == 2 for t in failed
    )
    assert all(t.final_observation == t.turns[-1].observation for t in failed)
    others = [i for i, t in enumerate(traces) if t not in failed]
    assert [fingerprint(traces)[i] for i in others] == [calm[i] for i in others]
    assert driver.counters["environment_errors"] == len(failed)


def test_an_environment_that_cannot_start_its_task_gives_an_error_trace_without_turns() -> None:
    traces, _, _ = play(env={"fault": "reset", "fault_tasks": [1]})
    failed = [t for t in traces if t.outcome is Outcome.ENVIRONMENT_ERROR]
    assert [t.task.id for t in failed] == [1, 1, 1]
    assert all("no such map" in t.error and math.isnan(t.reward) and t.length == 0 for t in failed)


# ------------------------------------------------------------------------------------------------- the logical clock


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_slow_environments_change_neither_traces_nor_which_rows_share_a_forward(delay: int) -> None:
    calm, quick, _ = play(delay=delay, concurrency=5)
    for workers in (1, 3):
        traces, slow, _ = play(env={"sleep_ms": 6.0}, workers=workers, delay=delay, concurrency=5)
        assert fingerprint(traces) == fingerprint(calm)
        assert slow.shared == quick.shared


def test_delay_and_concurrency_change_the_batches_and_not_the_traces() -> None:
    plain, all_at_once, _ = play()
    delayed, later, _ = play(delay=3)
    few, narrow, _ = play(concurrency=2)
    assert fingerprint(plain) == fingerprint(delayed) == fingerprint(few)
    assert len(all_at_once.shared[0]) == len(JOBS) and all_at_once.shared != later.shared
    assert narrow.most == 2 and max(len(rows) for rows in narrow.shared) == 2


def test_a_step_is_answered_exactly_delay_ticks_later() -> None:
    for delay in (1, 2, 4):
        ticks: list[Progress] = []
        traces, _, _ = play(JOBS[:1], delay=delay, progress=ticks.append)
        decoded = traces[0].sampled_tokens
        requests = 1 + len(traces[0].turns)  # Reset and Steps, each in flight for `delay` ticks, decoding in its last
        assert len(ticks) - 1 == delay + decoded + (requests - 1) * (delay - 1)
        assert [p.tick for p in ticks] == list(range(1, len(ticks) + 1)) and ticks[-1].done == 1
        assert ticks[-1].tokens == decoded and ticks[-1].live == ticks[-1].waiting == 0


def test_a_finished_episode_is_replaced_in_key_order() -> None:
    ticks: list[Progress] = []
    _, sampler, _ = play(list(reversed(JOBS)), concurrency=3, progress=ticks.append)
    firsts = {uniforms(1, "token", 3, 0, job.slot, job.rollout, 0, 0, n=3)[0]: job for job in JOBS}
    order = [firsts[draw.uniforms[0]] for _, draw in sampler.seen if draw.uniforms[0] in firsts]
    assert order == JOBS, "first requests come in key order, whatever the input's"
    assert all(p.live <= 3 for p in ticks) and ticks[-1].done == len(JOBS)


def test_a_worker_killed_in_the_middle_changes_nothing_but_the_restart_counter() -> None:
    calm, quick, _ = play()
    sampler = HashSampler()
    with Pool("toy:Line", workers=2) as pool:

        def kill(progress: Progress) -> None:
            if progress.tick == 4:
                os.kill(pool.pids[1], signal.SIGKILL)
                while Path(f"/proc/{pool.pids[1]}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    pass  # a request that it was executing would be blamed: none is, once it is dead

        driver = Driver(
            sampler, pool, LineRenderer(), Sampling(max_new_tokens=3), seed=1, delay=1, evidence=True, progress=kill
        )
        pause = pool.flush

        def settled() -> None:  # let every worker finish what it has, so that the kill hits an idle one
            pause()
            while any(w.pending for w in pool._workers):
                pool._pump(0.05)

        pool.flush = settled  # type: ignore[method-assign]
        traces = driver.collect(JOBS)
        assert pool.counters["restarts"] == 1 and pool.counters["errors"] == 0
    assert fingerprint(traces) == fingerprint(calm) and sampler.shared == quick.shared


def test_an_exception_in_a_method_leaves_sampler_and_pool_usable() -> None:
    sampler = HashSampler()

    def broken(inner: Episode) -> Episode:
        request = next(inner)
        while not isinstance(request, Step):
            request = inner.send((yield request))
        raise RuntimeError("a bug in a method")

    with Pool("toy:Line") as pool:
        driver = Driver(
            sampler, pool, LineRenderer(), Sampling(max_new_tokens=3), seed=1, evidence=True, wrappers=[broken]
        )
        with pytest.raises(RuntimeError, match="a bug in a method"):
            driver.collect(JOBS)
        assert not sampler.contexts and not sampler.busy
        driver.wrappers = ()
        assert fingerprint(driver.collect(JOBS)) == fingerprint(play()[0])


def test_two_jobs_with_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match="same key"):
        play([JOBS[0], JOBS[0]])


# ----------------------------------------------------------------------------------------------- wrappers, revisions


def look_ahead(inner: Episode) -> Generator[Request, Any, Trace]:
    """Before every answer: sample another in a fork, try it in the environment, take both back."""
    request = next(inner)
    while True:
        if isinstance(request, Generate):
            fork = yield Fork(request.context)
            state = yield Snapshot()
            other: Completion = yield replace(request, context=fork, attempt=7)
            yield Step(LineRenderer().action(other.ids))
            yield Restore(state)
        try:
            request = inner.send((yield request))
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["toy:Line", "toy:Copied"])
@pytest.mark.parametrize("concurrency", [2, 64])
def test_a_look_ahead_leaves_the_trace_as_it_was_and_counts_as_cost(name: str, concurrency: int) -> None:
    plain, _, _ = play()
    traces, sampler, driver = play(name=name, wrappers=[look_ahead], concurrency=concurrency)
    assert fingerprint([replace(t, extra_tokens=0) for t in traces]) == fingerprint(
        [replace(t, task=replace(t.task, environment=name)) for t in plain]
    )
    attempts = [draw for _, draw in sampler.seen]
    assert len(attempts) == 2 * sum(len(t.turns) for t in traces) and all(t.extra_tokens > 0 for t in traces)
    total = sum(t.sampled_tokens + t.extra_tokens for t in traces)
    assert driver.counters["generated_tokens"] == total
    assert driver.counters["extra_tokens"] == sum(t.extra_tokens for t in traces)


def graft(inner: Episode) -> Generator[Request, Any, Trace]:
    """Answer every Generate with a composed completion: "R" as if sampled elsewhere."""
    request = next(inner)
    held: list[int] = []  # what the context should hold
    while True:
        answer: Any = yield request
        if isinstance(request, Generate):
            nan = np.full(2, np.nan, np.float32)
            answer = Completion(
                np.array([0, END], np.int32),
                nan,
                nan,
                "stop",
                np.array([Provenance.GRAFTED, Provenance.FORCED], np.uint8),
            )
            yield Truncate(request.context, 0)  # the context now holds the composed answer instead
            held = [*request.ids, 0, END]
        try:
            request = inner.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        if isinstance(request, Generate):
            request = replace(request, ids=np.array([*held, *request.ids], np.int32))


def test_a_composed_answer_is_what_the_trace_and_the_next_context_hold() -> None:
    traces, sampler, _ = play(JOBS[:2], wrappers=[graft])
    contexts = [ids.tolist() for ids, _ in sampler.seen]
    for trace in traces:
        assert [turn.action for turn in trace.turns] == ["R"] * 5 and trace.outcome is Outcome.HORIZON
        assert all(turn.provenance.tolist() == [Provenance.GRAFTED, Provenance.FORCED] for turn in trace.turns)
        assert trace.sampled_tokens == 5 and np.isnan(trace.turns[0].logprobs).all()
        row = build_rows([trace], Layout())[0]
        assert row.ids[: row.at[-1]].tolist() in contexts


def groups(driver_options: dict[str, Any] | None = None, **options: Any) -> Any:
    """(collection, sampler); tasks of round r are 10 r, 10 r + 1, ..."""
    sampler = HashSampler()
    arguments = {"tasks_per_step": 3, "rollouts_per_task": 4, "step": 2} | options
    tasks = arguments.pop("tasks", lambda round_, missing: [10 * round_ + i for i in range(missing)])
    with Pool(arguments.pop("name", "toy:Line"), arguments.pop("env", {})) as pool:
        driver = Driver(sampler, pool, LineRenderer(), Sampling(max_new_tokens=3), seed=1, **driver_options or {})
        revise = [partial(revise_two, driver.settings)] if arguments.pop("revise", False) else []
        return driver.collect_groups(tasks, revise=revise, **arguments), sampler


def test_groups_hold_all_rollouts_of_their_task_in_order() -> None:
    collection, _ = groups(modes=("", "x"))
    assert [g.key for g in collection.batch.groups] == [f"000002.00.000{i}" for i in range(3)]
    for i, group in enumerate(collection.batch.groups):
        assert group.task.id == i and [t.rollout for t in group.traces] == [0, 1, 2, 3]
        assert [t.mode for t in group.traces] == ["", "x", "", "x"]
        assert len(group.traces[1].prompt_ids) == 3
    assert collection.counters["episodes"] == 12 and collection.counters["dropped_groups"] == 0
    assert set(collection.timings) == {"env_wait_s", "model_s", "total_s"}


def test_refill_rounds_ask_for_what_is_missing_until_the_batch_is_full() -> None:
    asked = []

    def tasks(round_: int, missing: int) -> list[int]:
        asked.append((round_, missing))
        return [10 * round_ + i for i in range(missing)]

    collection, _ = groups(tasks=tasks, keep=[lambda g: g.task.id not in (0, 2, 10)], max_rounds=9)
    assert asked == [(0, 3), (1, 2), (2, 1)]
    assert [g.task.id for g in collection.batch.groups] == [1, 11, 20]
    assert [g.task.id for g in collection.batch.dropped] == [0, 2, 10]
    assert collection.counters["rounds"] == 3 and collection.counters["dropped_groups"] == 3


def test_surplus_groups_in_key_order_are_dropped_and_counted() -> None:
    collection, _ = groups(tasks=lambda round_, missing: range(5), keep=[lambda g: g.task.id != 1, lambda g: True])
    assert [g.task.id for g in collection.batch.groups] == [0, 2, 3]
    assert [g.task.id for g in collection.batch.dropped] == [1, 4]
    assert collection.counters["surplus_groups"] == 1 and collection.counters["kept_groups"] == 3
    assert len(collection.batch.traces) == 12 and collection.counters["episodes"] == 20


@pytest.mark.parametrize("budget", [{"max_rounds": 2}, {"max_rounds": 50, "max_tokens": 150}])
def test_the_step_goes_on_with_what_was_kept_when_the_budget_ends(budget: dict[str, Any]) -> None:
    collection, _ = groups(keep=[lambda g: g.task.id == 1], **budget)
    assert [g.task.id for g in collection.batch.groups] == [1] and collection.counters["rounds"] < 5
    generated = sum(t.sampled_tokens for g in [*collection.batch.groups, *collection.batch.dropped] for t in g.traces)
    assert collection.counters["generated_tokens"] == generated


def test_a_group_of_environment_errors_only_is_dropped_and_replaced() -> None:
    collection, _ = groups(env={"fault": "reset", "fault_tasks": [1]}, max_rounds=2)
    assert [g.task.id for g in collection.batch.groups] == [0, 2, 10] and len(collection.batch.dropped) == 1
    assert collection.counters["environment_errors"] == 4


def revise_two(settings: Settings, group: Group) -> Generator[Request, Any, Group]:
    """Play the first two traces again from their second turn; the originals become `replaced`."""
    traces, others = list(group.traces), list(group.others)
    for i, old in enumerate(group.traces[:2]):
        if len(old.turns) < 2:
            continue
        context = yield Fork(EMPTY)
        new = yield from resume(LineRenderer(), settings, old, 1, context)
        assert new is not None
        traces[i] = new
        others.append(replace(old, kind="replaced", parent=new.key))
    return replace(group, traces=tuple(traces), others=tuple(others))


def test_a_revision_plays_on_from_inside_a_trace_and_keep_judges_the_result() -> None:
    plain, _ = groups()
    judged: list[Group] = []
    revised, sampler = groups(revise=True, keep=[lambda g: judged.append(g) is None])
    assert not sampler.contexts
    assert any(g.others for g in judged) and [g.key for g in revised.batch.groups] == [g.key for g in judged]
    assert max(len(g.others) for g in judged) == 2
    assert len({draw.uniforms[0] for _, draw in sampler.seen}) == len(sampler.seen), "no draw is used twice"
    for old, new in zip(plain.batch.groups, revised.batch.groups, strict=True):
        assert fingerprint(list(old.traces[2:])) == fingerprint(list(new.traces[2:]))
        assert [t.key for t in new.traces] == [t.key for t in old.traces]
        for replaced in new.others:
            before, after = old.traces[replaced.rollout], new.traces[replaced.rollout]
            assert replaced.parent == after.key
            assert fingerprint([replace(replaced, kind="root", parent="")]) == fingerprint([before])
            assert after.turns[0] is replaced.turns[0] and after.turns[1].observation == before.turns[1].observation
    assert revised.counters["generated_tokens"] > plain.counters["generated_tokens"]


def test_revisions_do_not_depend_on_time_or_concurrency() -> None:
    def run(sleep_ms: float, concurrency: int) -> Any:
        collection, sampler = groups(
            {"concurrency": concurrency}, revise=True, env={"sleep_ms": sleep_ms, "horizon": 6}
        )
        return [fingerprint([*g.traces, *g.others]) for g in collection.batch.groups], sampler.shared

    assert run(0.0, 4) == run(4.0, 4)
    assert run(0.0, 4)[0] == run(0.0, 64)[0]


def drive_alone(pool: Pool, generator: Generator[Request, Any, Any], steps: list[Step] | None = None) -> Any:
    answer = None
    while True:
        try:
            request = generator.send(answer)
            pool.submit(0, request)
        except StopIteration as stop:
            return stop.value
        if steps is not None and isinstance(request, Step):
            steps.append(request)
        (answer,) = pool.collect([0])


def test_replay_re_enters_any_turn_and_notices_what_differs(pool: Pool) -> None:
    traces = play(pool=pool)[0]
    trace: Trace = max(traces, key=lambda t: len(t.turns))
    for turn in range(len(trace.turns)):
        assert drive_alone(pool, replay(trace, turn)).observation == trace.turns[turn].observation
    assert drive_alone(pool, replay(trace)).observation == trace.final_observation
    swapped = {"R": "L", "L": "R", "S": "R", "?": "R", "": "R"}
    forged = replace(trace.turns[0], action=swapped[trace.turns[0].action[:1]])
    assert drive_alone(pool, replay(replace(trace, turns=(forged, *trace.turns[1:])), 1)) is None
    assert drive_alone(pool, replay(replace(trace, task=replace(trace.task, hash="other")), 0)) is None
    cuts = [t for n in range(12, 40) for t in play(JOBS[:1], pool=pool, max_length=n)[0] if t.turns]
    cut: Trace = next(t for t in cuts if t.turns[-1].stop == "context")
    steps: list[Step] = []
    assert drive_alone(pool, replay(cut), steps).observation == cut.final_observation
    assert len(steps) == len(cut.turns) - 1, "a turn that the context cut was not executed"


# -------------------------------------------------------------------------------------------------------- curriculum


def test_every_task_comes_once_per_epoch_and_never_twice_in_a_step() -> None:
    curriculum = Curriculum(0, 10, 4)
    steps = [curriculum.tasks(step) for step in range(50)]
    assert all(len(set(ids)) == 4 for ids in steps)
    counts = np.bincount(np.concatenate(steps), minlength=10)
    assert counts.max() - counts.min() <= 1 + len(curriculum.deferred) and counts.sum() == 200
    assert steps[:5] != [Curriculum(1, 10, 4).tasks(step) for step in range(5)]


def test_refills_of_a_step_are_fresh_tasks_until_there_are_none() -> None:
    curriculum = Curriculum(0, 10, 4)
    ids = [*curriculum.tasks(0), *curriculum.tasks(0, 3), *curriculum.tasks(0, 9)]
    assert sorted(ids) == list(range(10)) and curriculum.tasks(0, 1) == []


@pytest.mark.parametrize("size", [7, None])
def test_a_curriculum_resumed_at_a_step_goes_on_as_if_never_stopped(size: int | None) -> None:
    whole = Curriculum(5, size, 3, "babyai")
    ids = [[whole.tasks(step), whole.tasks(step, 2)] for step in range(9)]
    for stop in range(9):
        first = Curriculum(5, size, 3, "babyai")
        for step in range(stop):
            first.tasks(step), first.tasks(step, 2)
        second = Curriculum(5, size, 3, "babyai")
        second.load_state_dict(first.state_dict())
        assert [[second.tasks(step), second.tasks(step, 2)] for step in range(stop, 9)] == ids[stop:]


def test_unbounded_tasks_are_31_bit_ids_without_repetition_in_a_step() -> None:
    ids = Curriculum(0, None, 1000).tasks(0)
    assert len(set(ids)) == 1000 and all(0 <= i < 2**31 for i in ids) and max(ids) > 2**30


def test_more_tasks_than_the_split_has_is_the_users_error() -> None:
    with pytest.raises(UserError, match="lower it to 3"):
        Curriculum(0, 3, 4)
