"""The driver plays many episodes at once, by a logical clock.

An episode (episode.py) is a generator of requests; the driver answers them in batches. Which rows share a forward is a
function of the traces, never of time: a request to an environment issued at decode tick n is answered at tick n + delay,
before that tick decodes, the driver waiting if it is late; episodes are admitted, advanced and replaced in key order. So
the order in which workers finish has no effect. Left out on purpose: asynchronous training, episodes that outlive a
collection.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.envs.inline import AnyPool
from assay.episode import EMPTY, Job, Settings, episode, replay, resume
from assay.protocols import (
    Close,
    Draw,
    Episode,
    Fork,
    Generate,
    Metrics,
    Renderer,
    Request,
    Sampler,
    Sampling,
    Step,
    Truncate,
)
from assay.rng import Key, uniforms
from assay.rows import Batch, Layout
from assay.trace import Group, Outcome, Trace

__all__ = ["EMPTY", "Collection", "Driver", "Job", "Progress", "Settings", "episode", "replay", "resume"]


@dataclass(frozen=True, slots=True)
class Progress:
    """For a live display, after every tick."""

    tick: int
    done: int
    live: int
    waiting: int  # not yet admitted
    tokens: int  # generated so far


@dataclass(slots=True)
class Collection:
    """A batch, counters that are functions of the traces, and timings that are not."""

    batch: Batch
    counters: Metrics
    timings: Metrics


@dataclass(order=True, slots=True)
class _Run:
    """A generator that the driver plays: an episode, or a revision of a group."""

    key: str  # decides every order
    draw_key: tuple[Key, ...] = field(compare=False)
    start: Callable[[int], Generator[Request, Any, Any]] = field(compare=False)  # from its context
    pool: AnyPool = field(compare=False)  # of its environment
    lane: int = field(default=-1, compare=False)  # its slot there
    generator: Generator[Request, Any, Any] | None = field(default=None, compare=False)
    contexts: list[int] = field(default_factory=list, compare=False)
    generations: int = field(default=0, compare=False)
    tokens: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One environment of the collection."""

    pool: AnyPool
    renderer: Renderer
    settings: Settings


class Driver:
    """Plays up to `concurrency` episodes at once on one sampler, of the environment of one pool or of several (`others`).

    `delay` d >= 1: an environment has d - 1 decode ticks to work in while other episodes generate. `wrappers` are
    functions episode -> episode, the first one innermost. `evidence`: ask each environment for it at the end, which costs
    as much as many steps.
    """

    def __init__(
        self,
        sampler: Sampler,
        pool: AnyPool,
        renderer: Renderer,
        sampling: Sampling,
        *,
        seed: int = 0,
        layout: Layout | None = None,
        max_episode_tokens: int | None = None,
        concurrency: int = 128,
        delay: int = 1,
        wrappers: Sequence[Callable[[Episode], Episode]] = (),
        evidence: bool = False,
        progress: Callable[[Progress], None] | None = None,
        others: Sequence[tuple[AnyPool, Renderer]] = (),
    ) -> None:
        if concurrency < 1 or delay < 1:
            raise ValueError(f"concurrency and delay are at least 1, not {concurrency} and {delay}")
        self.sampler = sampler
        self.seed, self.concurrency, self.delay = seed, concurrency, delay
        self.wrappers, self.evidence, self.progress = tuple(wrappers), evidence, progress
        self.first = pool.name
        self.stages: dict[str, _Stage] = {}
        for one, its in ((pool, renderer), *others):
            stops = replace(
                sampling,
                stop_ids=sampling.stop_ids or its.stop_ids,
                stop_strings=sampling.stop_strings or its.stop_strings,
            )
            tokens = max_episode_tokens or sampler.max_length * 1000
            version, length = one.spec["version"], sampler.max_length
            settings = Settings(one.name, version, stops, layout or Layout(), tokens, length)
            self.stages[one.name] = _Stage(one, its, settings)
        self.counters: Metrics = {}  # of the last collection
        self.timings: Metrics = {}
        self._done = 0
        self._waiting: list[_Run] = []
        self._due: dict[int, list[_Run]] = {}
        self._generating: dict[int, _Run] = {}
        self._lanes: list[int] = []
        self._tick = 0
        self._finished: Callable[[_Run, Any], None] = lambda run, value: None

    @property
    def settings(self) -> Settings:
        """Of the first environment."""
        return self.stages[self.first].settings

    def collect(self, jobs: Iterable[Job], policy_version: int = 0) -> list[Trace]:
        """Play the jobs; their traces in key order."""
        self._begin(policy_version)
        return self._collect(jobs)

    def collect_groups(
        self,
        tasks: Callable[[int, int], Sequence[int]] | Mapping[str, Callable[[int, int], Sequence[int]]],
        *,
        tasks_per_step: int | Mapping[str, int],
        rollouts_per_task: int,
        step: int = -1,
        split: str = "train",
        modes: Sequence[str] = ("",),
        revise: Sequence[Callable[[Group], Generator[Request, Any, Group]]] = (),
        keep: Sequence[Callable[[Group], bool]] = (),
        max_rounds: int = 1,
        max_tokens: float = math.inf,
        policy_version: int = 0,
    ) -> Collection:
        """Groups until `tasks_per_step` of them are kept, or `max_rounds` or `max_tokens` (generated) are spent.

        `tasks(round, missing)` names the task ids of a round, `missing` or more. Rollout r of a task uses mode r modulo
        the number of modes. A group is revised once complete, then judged by all of `keep`; one in which nothing can be
        learnt from is dropped, and so are kept ones beyond `tasks_per_step`, in key order. For a mixture both are given
        by environment: each has its own quota, which only its own groups fill; rounds are common.
        """
        if not 1 <= max_rounds <= 100:
            raise ValueError(f"max_rounds is 1 to 100 (a trace's key has two digits for it), not {max_rounds}")
        self._begin(policy_version)
        sources = tasks if isinstance(tasks, Mapping) else {self.first: tasks}
        quotas = tasks_per_step if isinstance(tasks_per_step, Mapping) else {self.first: tasks_per_step}
        found: dict[str, list[Group]] = {name: [] for name in quotas}
        dropped: list[Group] = []
        rounds = 0
        while rounds < max_rounds and self.counters["generated_tokens"] < max_tokens:
            missing = {name: quota - len(found[name]) for name, quota in quotas.items()}
            ids = [(name, task) for name, n in missing.items() if n > 0 for task in sources[name](rounds, n)]
            if not ids:
                break
            jobs = [
                Job(task, split, step, rounds, slot, rollout, modes[rollout % len(modes)], name)
                for slot, (name, task) in enumerate(ids)
                for rollout in range(rollouts_per_task)
            ]
            for group in self._groups(jobs, rollouts_per_task, revise):
                good = bool(group.learnable) and all(judge(group) for judge in keep)
                (found[group.task.environment] if good else dropped).append(group)
            rounds += 1
        kept = _in_order(group for name, own in found.items() for group in own[: quotas[name]])
        surplus = [group for name, own in found.items() for group in own[quotas[name] :]]
        self.counters |= {
            "rounds": rounds,
            "kept_groups": len(kept),
            "dropped_groups": len(dropped) + len(surplus),
            "surplus_groups": len(surplus),
        }
        batch = Batch(kept, _in_order(dropped + surplus))
        return Collection(batch, dict(self.counters), dict(self.timings))

    def _groups(
        self, jobs: list[Job], size: int, revise: Sequence[Callable[[Group], Generator[Request, Any, Group]]]
    ) -> list[Group]:
        """Complete groups in key order, each revised as soon as its last episode has ended."""
        groups: dict[str, Group] = {}
        parts: dict[str, list[Trace]] = {}

        def complete(trace: Trace) -> None:
            part = parts.setdefault(trace.group_key, [])
            part.append(trace)
            if len(part) == size:
                traces = tuple(sorted(part, key=lambda t: t.rollout))
                task = next((t.task for t in traces if t.learnable), traces[0].task)
                group = groups[trace.group_key] = Group(task, traces)
                if revise:
                    key = (trace.step, trace.round, trace.slot, "revise")
                    pool = self.stages[task.environment].pool
                    run = _Run(f"{group.key}.revise", key, lambda _: _revise_all(revise, group), pool)
                    heapq.heappush(self._waiting, run)

        def revised(run: _Run, value: Any) -> None:
            if not isinstance(value, Group) or len(value.traces) != size:
                raise TypeError(f"revise returns the group with its {size} root traces, not {value!r:.80}")
            groups[value.key] = value

        self._collect(jobs, complete, revised)
        return [groups[key] for key in sorted(groups)]

    def _begin(self, policy_version: int) -> None:
        for name, stage in self.stages.items():
            settings = replace(stage.settings, policy_version=policy_version)
            self.stages[name] = replace(stage, settings=settings)
        names = ("episodes", "generated_tokens", "extra_tokens", "env_steps", "environment_errors", "cuts", "ticks")
        self.counters = dict.fromkeys(names, 0)
        self.timings = dict.fromkeys(("env_wait_s", "model_s", "total_s"), 0.0)

    def _collect(
        self,
        jobs: Iterable[Job],
        complete: Callable[[Trace], None] = lambda trace: None,
        revised: Callable[[_Run, Any], None] = lambda run, value: None,
    ) -> list[Trace]:
        traces: list[Trace] = []

        def finished(run: _Run, value: Any) -> None:
            if run.draw_key[-1] == "revise":
                return revised(run, value)
            trace = self._account(run, value)
            traces.append(trace)
            complete(trace)

        runs = [self._run(job) for job in jobs]
        if len({run.key for run in runs}) < len(runs):
            raise ValueError("two jobs have the same key (step, round, slot, rollout)")
        self._finished = finished
        self._drive(runs)
        return sorted(traces, key=lambda trace: trace.key)

    def _run(self, job: Job) -> _Run:
        stage = self.stages[job.environment or self.first]

        def start(context: int) -> Episode:
            played = episode(stage.renderer, job, stage.settings, context)
            for wrapper in self.wrappers:
                played = wrapper(played)
            return played

        return _Run(job.key, (job.step, job.round, job.slot, job.rollout), start, stage.pool)

    def _account(self, run: _Run, trace: Trace) -> Trace:
        """Count an ended episode; what was generated for it and is not in it is its extra cost."""
        extra = max(0, run.tokens - trace.sampled_tokens)
        evidence = trace.evidence
        if self.evidence and trace.learnable and "evidence" in run.pool.spec["powers"]:
            (evidence,) = run.pool.ask([run.lane], "evidence")
        self.counters["episodes"] += 1
        self.counters["extra_tokens"] += extra
        self.counters["environment_errors"] += trace.outcome is Outcome.ENVIRONMENT_ERROR
        self.counters["cuts"] += trace.outcome is Outcome.CUT
        return replace(trace, extra_tokens=trace.extra_tokens + extra, evidence=evidence)

    # ------------------------------------------------------------------------------------------------ clock

    def _drive(self, runs: list[_Run]) -> None:
        """Play until nothing waits, lives or is due."""
        self._waiting, self._due, self._generating = runs, {}, {}
        self._lanes = list(range(self.concurrency))
        self._tick, self._done = 0, 0
        heapq.heapify(self._waiting)
        began = time.perf_counter()
        live: list[_Run] = []
        try:
            while self._waiting or self._due or self._generating:
                self._deliver()
                self._admit(live)
                self._flush()
                self._decode()
                self._flush()
                live = [run for run in live if run.generator is not None]
                self._tick += 1
                if self.progress:
                    tokens = int(self.counters["generated_tokens"])
                    self.progress(Progress(self._tick, self._done, len(live), len(self._waiting), tokens))
        finally:  # also when a method's code raised: the sampler stays usable
            for run in live:
                self._release(run)
            self.counters["ticks"] += self._tick
            self.timings["total_s"] += time.perf_counter() - began

    def _deliver(self) -> None:
        """Answers of the environments that are due at this tick, in key order."""
        runs = sorted(self._due.pop(self._tick, []))
        began = time.perf_counter()
        answers: dict[str, Any] = {}
        for stage in self.stages.values():
            own = [run for run in runs if run.pool is stage.pool]
            answers |= zip((run.key for run in own), stage.pool.collect([run.lane for run in own]), strict=True)
        self.timings["env_wait_s"] += time.perf_counter() - began
        for run in runs:
            self._advance(run, answers[run.key])

    def _flush(self) -> None:
        for stage in self.stages.values():
            stage.pool.flush()

    def _admit(self, live: list[_Run]) -> None:
        while self._waiting and self._lanes:
            run = heapq.heappop(self._waiting)
            run.lane = heapq.heappop(self._lanes)
            run.contexts.append(self.sampler.open())
            run.generator = run.start(run.contexts[0])
            live.append(run)
            self._advance(run, None)

    def _decode(self) -> None:
        """One decode step for all that generate; those that end in it go on, in key order."""
        if not self._generating:
            return
        began = time.perf_counter()
        ended = self.sampler.tick()
        self.timings["model_s"] += time.perf_counter() - began
        for run, completion in sorted(
            ((self._generating.pop(context), completion) for context, completion in ended), key=lambda pair: pair[0]
        ):
            run.tokens += len(completion.ids)
            self.counters["generated_tokens"] += len(completion.ids)
            self._advance(run, completion)

    def _advance(self, run: _Run, answer: Any) -> None:
        """Run a generator until it asks for what only a tick can answer."""
        assert run.generator is not None
        while True:
            try:
                request = run.generator.send(answer)
            except StopIteration as stop:
                self._finished(run, stop.value)
                self._release(run)
                heapq.heappush(self._lanes, run.lane)
                self._done += 1
                return
            match request:
                case Generate():
                    return self._generate(run, request)
                case Fork(context):
                    answer = self.sampler.open() if context == EMPTY else self.sampler.fork(context)
                    run.contexts.append(answer)
                case Truncate(context, length):
                    self.sampler.truncate(context, length)
                    answer = None
                case Close(context):
                    run.contexts.remove(context)
                    self.sampler.close(context)
                    answer = None
                case _:
                    self.counters["env_steps"] += isinstance(request, Step)
                    run.pool.submit(run.lane, request)
                    self._due.setdefault(self._tick + self.delay, []).append(run)
                    return

    def _generate(self, run: _Run, request: Generate) -> None:
        key = (*run.draw_key, request.turn, request.attempt)
        if run.draw_key[-1] == "revise":  # one generator for many traces: its own count keeps draws apart
            key = (*key, run.generations)
        run.generations += 1
        draws = uniforms(self.seed, "token", *key, n=request.sampling.max_new_tokens)
        self.sampler.submit(Draw(request.context, request.ids, request.sampling, draws))
        self._generating[request.context] = run

    def _release(self, run: _Run) -> None:
        for context in run.contexts:
            self.sampler.close(context)
        run.contexts.clear()
        run.generator = None


def _in_order(groups: Iterable[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.key)


def _revise_all(
    revise: Sequence[Callable[[Group], Generator[Request, Any, Group]]], group: Group
) -> Generator[Request, Any, Group]:
    for one in revise:
        group = yield from one(group)
    return group
