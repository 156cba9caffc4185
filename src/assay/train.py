"""Training: the step, and the run around it.

`Trainer.step` is the algorithm box of the design: collect, rows, score, reward, advantage, modulate, streams, update.
The run around it keeps one promise: killed at any instant and resumed, it gives the same bits.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from assay.build import Bench, build, build_curriculum, build_learner, build_methods, needs_reference
from assay.checkpoints import Retention, checkpoint_steps
from assay.config import BUDGETS, RunConfig, default_out, dump, parse_budget, resolve
from assay.evaluate import evaluate, evaluate_all
from assay.facts import entropy, facts, group_counts, mean_of, without_cut
from assay.files import beside
from assay.guard import Guard, watch
from assay.learner.torch_learner import TorchLearner
from assay.loggers import Loggers
from assay.protocols import Method, Metrics, UserError
from assay.report import write_report
from assay.rng import generator
from assay.rollout import Collection, Progress
from assay.rows import Batch, Row, Stream, build_rows
from assay.rundir import RunDir
from assay.warmstart import warm_start


class Display:
    """What a run tells a person; this one says nothing. The command line has one that draws."""

    def phase(self, name: str) -> None: ...
    def episodes(self, progress: Progress, part: str = "") -> None: ...
    def imitation(self, done: int, total: int, loss: float) -> None: ...
    def evaluated(self, when: str, result: dict[str, Any]) -> None: ...
    def step(self, metrics: Metrics, timings: Metrics) -> None: ...
    def note(self, text: str) -> None: ...
    def interrupted(self) -> None: ...  # from a signal handler: remember it, draw later


class Trainer:
    """One run's state between steps. `spent` counts steps, episodes, generated tokens and environment steps so far."""

    def __init__(self, bench: Bench, learner: TorchLearner, display: Display) -> None:
        self.bench, self.learner, self.display = bench, learner, display
        self.config = bench.config
        self.methods: list[Method] = build_methods(self.config)
        self.curriculum = build_curriculum(self.config, bench.pools)
        self.spent: dict[str, int] = dict.fromkeys(("steps", "episodes", "tokens", "env_steps"), 0)
        self.driver = bench.driver(
            self.config.temperature, self.config.seed, [m.episode for m in self.methods], display.episodes
        )
        self.needs = _needs(self.methods, learner, self.config)
        for method in self.methods:
            for warning in method.bind(bench.setting):
                display.note(f"{method.name or type(method).__name__}: {warning}")
        self.guard: Guard | None = None

    def step(self) -> tuple[Metrics, Metrics, Batch]:
        """One training step: (metrics, timings, batch)."""
        began = time.perf_counter()
        progress = self.progress
        collection = self.collect()
        worlds = self.bench.mixture
        batch, metrics = collection.batch, facts(collection, worlds)
        if self.config.cut == "drop":
            batch = without_cut(batch)
            metrics |= group_counts(batch, worlds)

        for method in self.methods:
            if method.select is not None:
                batch = method.select(batch)
                metrics |= group_counts(batch, worlds)

        rows = build_rows(batch.traces, self.bench.layout)
        views = rows + [view for method in self.methods for view in method.rows(batch)]
        scored = time.perf_counter()
        self.learner.score(views, self.needs, self.config.temperature)
        metrics |= entropy(rows, views, self.needs, worlds)
        for method in self.methods:
            metrics |= method.reward(batch, rows)
        for method in self.methods:
            if method.advantage is not None and rows:
                metrics |= method.advantage(batch, rows)
        for method in self.methods:
            metrics |= method.modulate(batch, rows)
        if self.guard:
            self.guard.batch(self.spent["steps"] + 1, batch, rows)
        updates = [self.update(part, progress) for part in self.parts(rows, views)]
        metrics |= mean_of(updates)
        self.bench.sampler.load(self.learner)

        self.spent["steps"] += 1
        self.spent["episodes"] += int(collection.counters["episodes"])
        self.spent["tokens"] += int(collection.counters["generated_tokens"])
        self.spent["env_steps"] += int(collection.counters["env_steps"])
        metrics |= {f"total_{name}": float(value) for name, value in self.spent.items() if name != "steps"}
        ended = time.perf_counter()
        timings = collection.timings | {"update_s": ended - scored, "step_s": ended - began}
        timings["tokens_per_s"] = collection.counters["generated_tokens"] / timings["step_s"]
        return metrics, timings, batch

    @property
    def progress(self) -> float:
        """Share of the planned budget spent before this step, whatever it is counted in: what schedules take."""
        return min(1.0, share_spent(self.config, self.spent))

    @property
    def ended(self) -> bool:
        """By its number of steps, or by its budget."""
        budget = self.config.budget is not None and share_spent(self.config, self.spent) >= 1
        return budget or self.spent["steps"] >= self.config.steps

    def collect(self) -> Collection:
        """Groups of fresh episodes on this step's tasks."""
        config, step = self.config, self.spent["steps"] + 1
        return self.driver.collect_groups(
            self.curriculum.sources(step),
            tasks_per_step=self.curriculum.quotas,
            rollouts_per_task=config.rollouts_per_task,
            step=step,
            revise=[m.revise for m in self.methods if m.revise is not None],
            keep=[m.keep for m in self.methods if m.keep is not None],
            max_rounds=config.rounds if any(m.keep is not None for m in self.methods) else 1,
            policy_version=self.learner.version,
        )

    def parts(self, rows: Sequence[Row], views: Sequence[Row]) -> Iterator[list[Row]]:
        """The views of each optimiser step: the task instances in a keyed order, dealt into `updates_per_batch` hands.
        Those of a mixture are shuffled and dealt one environment after the other, so that each hand has its part of all."""
        found = {row.trace.group_key: row.trace.task.environment for row in rows}
        for epoch in range(self.config.epochs):
            deck: list[str] = []
            for name in self.bench.environments:
                keys = sorted(key for key, environment in found.items() if environment == name)
                own = (name,) if self.bench.mixture else ()
                draw = generator(self.config.seed, "parts", self.spent["steps"], epoch, *own)
                deck += [keys[i] for i in draw.permutation(len(keys))]
            for part in range(self.config.updates_per_batch):
                chosen = set(deck[part :: self.config.updates_per_batch])
                yield [row for row in views if row.trace.group_key in chosen]

    def update(self, rows: list[Row], progress: float) -> Metrics:
        """One optimiser step on what the methods make of these rows."""
        streams: list[Stream] = []
        for method in self.methods:
            streams = method.streams(rows, streams, progress)
        metrics = self.learner.update(streams, progress)
        return metrics | {name: value for stream in streams for name, value in stream.metrics.items()}

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(tensors, JSON state): everything that the next step depends on."""
        learner = self.learner.state_dict()
        methods = {f"{i}.{type(m).__name__}": m.state_dict() for i, m in enumerate(self.methods)}
        json_state = {
            "learner": learner["json"],
            "methods": methods,
            "curriculum": self.curriculum.state_dict(),
            "spent": dict(self.spent),
            "environment": self.environment,
        }
        return learner["tensors"], json_state

    @property
    def environment(self) -> str:
        return ",".join(f"{name}@{pool.spec['version']}" for name, pool in self.bench.pools.items())

    def load_state(self, tensors: dict[str, Any], state: dict[str, Any]) -> None:
        if (trained_on := state.get("environment", self.environment)) != self.environment:
            raise UserError(
                f"the checkpoint was trained on environment {trained_on}, and this is {self.environment}: restore that "
                "one to go on, or train anew from its policy with --model RUN"
            )
        self.learner.load_state_dict({"tensors": tensors, "json": state["learner"]})
        for i, method in enumerate(self.methods):
            method.load_state_dict(state["methods"][f"{i}.{type(method).__name__}"])
        self.curriculum.load_state_dict(state["curriculum"])
        self.spent = {name: int(value) for name, value in state["spent"].items()}
        self.bench.sampler.load(self.learner)


# -------------------------------------------------------------------------------------------------------------- the run


@dataclass(slots=True)
class Result:
    """What a run came to; `as_json` is what `--json` prints."""

    run: Path
    config: RunConfig
    before: dict[str, Any]
    after: dict[str, Any]
    spent: dict[str, int]
    seconds: float
    stopped: bool = False  # by the user, before its last step
    warm_start: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "before": self.before,
            "after": self.after,
            "steps": self.spent["steps"],
            "episodes": self.spent["episodes"],
            "tokens": self.spent["tokens"],
            "env_steps": self.spent["env_steps"],
            "seconds": round(self.seconds, 3),
            "stopped": self.stopped,
            "warm_start": self.warm_start,
            "run": str(self.run),
            "seed": self.config.seed,
        }


def train(values: dict[str, Any], display: Display | None = None, where: str = "configuration") -> Result:
    """Train from nested configuration keys in a new run directory."""
    config = resolve(values, where)
    if config.budget is None:
        config = config.model_copy(update={"planned_steps": config.planned_steps or max(config.steps, 1)})
    with RunDir.create(config.out or default_out(config), dump(config)) as run, _forgotten_if_it_never_began(run):
        return _run(config, run, display or Display())


@contextmanager
def _forgotten_if_it_never_began(run: RunDir) -> Iterator[None]:
    """A mistake in the configuration leaves no folder behind: the mended command can be typed again."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        if not any(run.checkpoints.iterdir()) and not any(run.traces.iterdir()):
            shutil.rmtree(run.path)
        raise


def resume(path: str | Path, steps: str | None = None, display: Display | None = None, replan: bool = False) -> Result:
    """Go on from the last checkpoint of a run. `steps` "+50" extends it, "200" sets its end."""
    with RunDir(path, write=True) as run:
        config = resolve(run.config, str(Path(path) / "config.toml"))
        if steps is not None:
            config = extend(config, steps, replan)
        _check_end(config, run)
        if steps is not None:
            run.replace_config(dump(config))
        return _run(config, run, display or Display())


def _check_end(config: RunConfig, run: RunDir) -> None:
    """UserError where going on would not be going on: an end that is behind, or lines without their checkpoint."""
    done = checkpoint_steps(run.checkpoints)
    if done and config.steps < done[-1]:
        raise UserError(
            f"{run.path} has {done[-1]} steps behind it, which do not end at {config.steps}: give --steps a total of at "
            f"least {done[-1]}, or train anew with --steps {config.steps}"
        )
    lines = run.read_metrics()
    known = [line["step"] for line in lines if done and line["step"] <= done[-1]]
    if done and known != list(range(1, done[-1] + 1)):
        raise UserError(
            f"{run.path}/metrics.jsonl has lines of {len(known)} steps, not one of each up to the checkpoint of step "
            f"{done[-1]}: restore the file, or move the run away and train anew"
        )
    if not done and lines:
        raise UserError(
            f"{run.path} has the metrics of {len(lines)} steps, but no checkpoint to go on from: restore its folder "
            "checkpoints, or move the run away and train anew"
        )


def _run(config: RunConfig, run: RunDir, display: Display) -> Result:
    began = time.perf_counter()
    display.phase("building")
    bench = build(config)
    with (
        closing(bench),
        closing(Loggers(config.runtime.loggers, run, dump(config))) as loggers,
        _interrupts(display) as interrupted,
    ):
        return _phases(config, run, bench, loggers, display, began, interrupted)


def _phases(
    config: RunConfig,
    run: RunDir,
    bench: Bench,
    loggers: Loggers,
    display: Display,
    began: float,
    interrupted: list[int],
) -> Result:
    """Warm start and first evaluation unless a checkpoint has them behind it; the steps; the last evaluation."""
    started: dict[str, Any] = {}
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        run.cut_back(-1)
    if checkpoint is None or needs_reference(config):  # the reference is the policy that RL started from
        started = warm_start(bench, display)
        bench.sampler.load(build_learner(config, bench.network, None))
    trainer = Trainer(bench, build_learner(config, bench.network, run.path / "failures"), display)
    if checkpoint is None:
        if config.evaluation.before:
            _evaluate_into(run, "before", bench, display)
        run.write_evaluation(run.evaluation | {"warm_start": started})
        _save(run, trainer, {})
    else:
        tensors, state = run.load_checkpoint(checkpoint)
        trainer.load_state(dict(tensors), state)
        run.cut_back(trainer.spent["steps"])
        display.note(f"resumed after step {trainer.spent['steps']}")
    if config.runtime.guard:
        trainer.guard = Guard(config, trainer.learner, run.read_metrics(), run.read_guard())
    if not trainer.ended:
        _forget_end(run)
    display.phase("training")
    while not trainer.ended and not interrupted:
        metrics, timings, batch = trainer.step()
        step = trainer.spent["steps"]
        if config.evaluation.every and step % config.evaluation.every == 0 and config.evaluation.tasks:
            summary, _ = evaluate(bench, "iid", config.evaluation.tasks, greedy=False, temperature=config.temperature)
            for name, own in {"": summary, **summary.get("environments", {})}.items():
                tail = f"[{name}]" if name else ""
                metrics |= {f"iid_{which}{tail}": own[which] for which in ("success", "low", "high")}
        if config.runtime.traces_every and step % config.runtime.traces_every == 0:
            run.write_traces(step, [t for g in batch.groups + batch.dropped for t in (*g.traces, *g.others)])
        run.append_metrics(step, metrics)
        run.append_tables(step, {title: rows for m in trainer.methods for title, rows in m.tables().items()})
        if trainer.guard:
            timings["guard_s"] = watch(trainer.guard, run, step, metrics, display.note)
        run.append_timings(step, timings)
        loggers.log(step, metrics | timings)
        display.step({"step": step, **metrics}, timings)
        if step % config.runtime.checkpoint_every == 0 or trainer.ended or interrupted:
            _save(run, trainer, metrics)
    done = trainer.ended
    if done:
        _save_policy(run, trainer, bench)
        _evaluate_into(run, "after", bench, display)
    evaluation = run.evaluation
    write_report(run, bench.renderer.decode)
    return Result(
        run.path, config, evaluation.get("before", {}), evaluation.get("after", {}) if done else {}, trainer.spent,
        time.perf_counter() - began, not done, evaluation.get("warm_start", {}),
    )  # fmt: skip


def share_spent(config: RunConfig, spent: Mapping[str, float]) -> float:
    """Of the budget, or of the planned steps; beyond 1 where the last step went over."""
    if config.budget is None:
        return spent["steps"] / (config.planned_steps or max(config.steps, 1))
    unit, amount = parse_budget(config.budget, "configuration")
    return spent[BUDGETS[unit]] / amount


def _save_policy(run: RunDir, trainer: Trainer, bench: Bench) -> None:
    """Beside, then renamed: a folder `policy` is whole, and of the run's end."""
    unfinished = beside(run.path / "policy")
    shutil.rmtree(unfinished, ignore_errors=True)
    trainer.learner.save_pretrained(unfinished)
    bench.tokenizer.save_pretrained(unfinished)
    shutil.rmtree(run.path / "policy", ignore_errors=True)
    os.replace(unfinished, run.path / "policy")


def _forget_end(run: RunDir) -> None:
    """What a finished run had at its old end is not what an extended one has, until it ends again."""
    shutil.rmtree(run.path / "policy", ignore_errors=True)
    run.trace_path("after").unlink(missing_ok=True)
    if "after" in run.evaluation:
        run.write_evaluation({name: value for name, value in run.evaluation.items() if name != "after"})


def _evaluate_into(run: RunDir, when: str, bench: Bench, display: Display) -> None:
    settings = bench.config.evaluation
    if settings.tasks:
        display.phase(f"evaluating {when} training")
        result, traces = evaluate_all(
            bench,
            settings.tasks,
            settings.ood,
            settings.greedy,
            lambda part, progress: display.episodes(progress, part),
            bench.config.temperature,
        )
        run.write_traces(when, traces)
        display.evaluated(when, result)
    else:
        result = {}
    run.write_evaluation(run.evaluation | {when: result})


def _save(run: RunDir, trainer: Trainer, metrics: Metrics) -> None:
    tensors, state = trainer.state()
    held_out = trainer.config.evaluation.every and trainer.config.evaluation.tasks
    best = "iid_success" if held_out else "success"
    retention = Retention(trainer.config.runtime.keep_checkpoints, best)
    run.save_checkpoint(trainer.spent["steps"], tensors, state, metrics, retention)


def extend(config: RunConfig, steps: str, replan: bool) -> RunConfig:
    """The configuration of a run that goes on to `steps`: "+50" more, or "200" in all."""
    if config.budget is not None:
        raise UserError(f"this run ends by its budget, {config.budget}, not by steps: resume it without --steps")
    try:
        total = config.steps + int(steps[1:]) if steps.startswith("+") else int(steps)
    except ValueError as error:
        raise UserError(f"--steps {steps!r}: give +N for N more steps, or N for their total") from error
    if total < 1 or (steps.startswith("+") and total < config.steps):
        raise UserError(f"--steps {steps!r}: give +N for N more steps, or N for their total, at least 1")
    planned = total if replan else config.planned_steps or config.steps
    return config.model_copy(update={"steps": total, "planned_steps": planned})


@contextmanager
def _interrupts(display: Display) -> Iterator[list[int]]:
    """Ctrl-C (and SIGTERM) end the run after the present step; a second one ends it at once."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        display.interrupted()

    try:
        old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever called us handles signals
        old = {}
    try:
        yield seen
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------------------- details


def _needs(methods: Sequence[Method], learner: TorchLearner, config: RunConfig) -> frozenset[str]:
    """What the score pass must compute. The ratio's old log-prob is the learner's own: with one update per batch the
    detached new one serves, else it is scored; entropies come from the score pass if one runs."""
    needs = frozenset().union(*(m.needs for m in methods))
    if config.updates_per_batch * config.epochs > 1:
        needs |= {"old_logprob"}
    if needs - learner.provides:
        raise UserError(f"the in-process learner cannot provide {', '.join(sorted(needs - learner.provides))}")
    return needs | {"entropy"} if needs - {"entropy"} else needs


class _Callable(ModuleType):
    """`assay.train` names this module and the function in it; whichever was imported first, `assay.train(...)` works."""

    def __call__(self, values: dict[str, Any], display: Display | None = None, where: str = "configuration") -> Result:
        return train(values, display, where)


sys.modules[__name__].__class__ = _Callable
