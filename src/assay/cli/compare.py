"""compare: arms and shared flags to a plan; the runs as they go; the verdict."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from rich.console import Console

from assay.cli.flags import Help, Line, dotted, read, show_help, split
from assay.cli.layers import read_train
from assay.cli.preflight import warnings
from assay.cli.tables import console
from assay.config import Section, environments, method_names, resolve
from assay.protocols import UserError

if TYPE_CHECKING:
    from assay.compare import Plan
    from assay.executors import Executor
    from assay.seeds import Job

UNFINISHED = 1
LEAN = {"traces_every": 0, "keep_checkpoints": 1}  # what the runs of a comparison need not keep, unless asked to


class Compare(Section):
    arms: str = ""
    """Methods to compare, each a preset or a quoted "grpo --learning-rate 1e-3" with flags of its own; or the folder of a
    comparison to go on with. A method that is named twice runs with other seeds as well: the noise floor, measured."""
    seeds: int = Field(8, ge=2, le=1000)
    """Training seeds of every arm, paired. 5 pairs find differences of 1.7 standard deviations, 8 of 1.2, 16 of 0.75."""
    add_seeds: int = Field(0, ge=0, le=1000)
    """Further seeds for a comparison that exists. Looking more than once costs: p is multiplied by the number of looks."""
    metric: str = "iid sampled"
    """The figure that the verdict is about: "iid sampled", "iid greedy", "ood sampled", "ood greedy", or a mean over training
    such as "entropy last third"; of one environment of a mixture: "iid sampled[ENV]"."""
    effect: float = Field(0.05, gt=0)
    """Smallest difference of that figure that would matter to you: what "no difference" and "more seeds" refer to."""
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Share of false verdicts that is accepted."""
    executor: Literal["local", "ray"] = "local"
    """Processes on this machine, or a Ray cluster ($RAY_ADDRESS, else a local one)."""
    jobs: int = Field(0, ge=0, le=10_000)
    """Runs at once; 0: one per processor core."""
    store: str | None = None
    """Folder of finished seeds shared by several comparisons; absent: the comparison's own."""
    base: str | None = None
    """A .toml file or run directory whose values all arms start from."""
    out: str | None = None
    """Folder of the comparison; absent: comparisons/ENV-ARMS."""


def compare(line: Line) -> int:
    examples = (
        "compare grpo dr-grpo rloo --env babyai/GoToLocal --seeds 8 --budget env-steps:200k --out cmp",
        'compare grpo "grpo --slots.denominator token" --preset demo    # any flag of train, for one arm or for all',
        "compare grpo grpo dr-grpo --preset demo                        # twice: the noise floor, measured",
        "compare cmp --add-seeds 4                                      # goes on; nothing is run again",
    )
    about = (
        "Which method is better, and is the difference real? Paired training seeds, one start, one panel. Flags that are not\n"
        "below are those of 'assay train', and hold for all arms."
    )
    switches = {"json": (bool, "One JSON object on standard output (compare.json), and nothing else there.")}
    page = Help("compare", about, examples, ("arms",), switches)
    if line.wants_help:
        return show_help(page, Compare)
    own = [(typed, words) for typed, words in line.given if typed.replace("-", "_") in {*Compare.model_fields, "json"}]
    common = [(typed, words) for typed, words in line.given if (typed, words) not in own]
    asked = read(Line([], own), Compare, page)
    from assay.compare import compare as run
    from assay.compare import create
    from assay.compare_report import terminal

    notes: list[str] = []
    if len(line.positional) == 1 and (Path(line.positional[0]) / "compare.toml").exists():
        folder = Path(line.positional[0])
        if common:
            raise UserError(f"{folder} has its plan: only --add-seeds, --executor and --jobs can be given with it")
    else:
        if asked.add_seeds:
            raise UserError("--add-seeds is for a comparison that exists: give its folder, or --seeds for a new one")
        plan = plan_of(line.positional, common, asked)
        notes = cautions(plan)
        folder = Path(asked.out or default_folder(plan))
        if plan.store is not None:
            plan.store = os.path.relpath(plan.store, folder)  # found again from wherever the comparison is gone on with
        create(folder, plan)
    err = console()
    for note in notes:
        err.print(note, style="dim")
    try:
        with watching(err) as watch:
            result = run(folder, executor(asked.executor, asked.jobs), watch, asked.add_seeds)
    except KeyboardInterrupt:
        err.print(f"stopped before its end, nothing is lost: 'assay compare {folder}' goes on")
        raise
    if line.switch("json"):
        print(json.dumps(result, allow_nan=False))
    else:
        out = Console(highlight=False, markup=False, width=None if Console().is_terminal else 160)
        for renderable in terminal(result):
            out.print(renderable)
    err.print(f"report     {folder}/report.html\ntables     {folder}/table.md, {folder}/table.tex")
    return UNFINISHED if result["unfinished"] else 0


def plan_of(arms: Sequence[str], common: Sequence[tuple[str, list[str]]], asked: Compare) -> Plan:
    """The plan that a command line means. UserError names the arm that is wrong."""
    from assay.compare import Plan

    if any(typed == "seed" for typed, _ in common):
        raise UserError("--seed is for one run; the seeds of a comparison are --seeds N, the same for every arm")
    found: dict[str, dict[str, Any]] = {}
    noise: list[str] = []
    sections = {section for arm in arms for section in _sections(arm)}
    for arm in arms:
        name = " ".join(arm.split())
        if name in found:
            noise.append(name)
        else:
            others = sections - _sections(name)  # --aem.lam is for the arms that name aem
            found[name] = _arm(
                name, [(flag, words) for flag, words in common if _section(flag) not in others], asked.base
            )
    words = ["assay", "compare", *arms, *(w for t, ws in common for w in (f"--{t}", *ws)), "--seeds", str(asked.seeds)]
    words += ["--metric", asked.metric] if asked.metric != Compare().metric else []
    return Plan(
        arms=found,
        seeds=list(range(asked.seeds)),
        metric=asked.metric,
        effect=asked.effect,
        alpha=asked.alpha,
        noise=noise,
        store=asked.store,
        command=shlex.join(words),
    )


def _arm(text: str, common: Sequence[tuple[str, list[str]]], base: str | None) -> dict[str, Any]:
    """Complete keys of an arm, without seed and out."""
    from assay.compare import arm_of

    line = split(shlex.split(text))
    methods = _methods(text)
    if not methods:
        raise UserError(f'arm {text!r} names no method: begin with one, as in "grpo --learning-rate 1e-3"')
    given = [*common, ("method", methods), *line.given]
    try:
        values = arm_of(read_train(Line([base] if base else [], given)).config)
    except UserError as error:
        raise UserError(f"arm {text!r}: {error}") from error
    said = {typed.replace("-", "_") for typed, _ in given}
    for name, value in LEAN.items():
        if f"runtime.{name}" not in said:
            values["runtime"][name] = value
    return values


def _methods(arm: str) -> list[str]:
    return method_names(split(shlex.split(arm)).positional)


def _sections(arm: str) -> set[str]:
    """First words of the flags that set its further methods."""
    return {method.rpartition(":")[2].replace("-", "_") for method in _methods(arm)[1:]}


def _section(flag: str) -> str:
    return dotted(flag).removeprefix("method_args.").partition(".")[0]


def cautions(plan: Plan) -> list[str]:
    """What the methods say of their arms, as a run would when it begins. UserError where one cannot work there."""
    from assay.cli.plan import look

    configs = {arm: resolve(values, f"arm {arm!r}") for arm, values in plan.arms.items()}
    found: list[str] = []
    specs: dict[str, Any] = {}  # the arms share their environments
    for arm, config in configs.items():
        try:
            for name in environments(config) if len(config.method) > 1 else ():
                specs[name] = specs.get(name) or look(config, name).spec
            found += [f"arm {arm!r}: {text}" for text in warnings(config, specs)]
        except UserError as error:
            raise UserError(f"arm {arm!r}: {error}") from error
    return found


def default_folder(plan: Plan) -> str:
    from assay.compare import slug

    env = str(next(iter(plan.arms.values()))["env"])
    return f"comparisons/{slug(env)}-{slug('-'.join(plan.arms))}"


def executor(name: str, jobs: int) -> Executor:
    if name == "ray":
        from assay.ray_executor import Ray

        return Ray(jobs)
    from assay.executors import Local

    return Local(jobs)


@contextmanager
def watching(err: Console) -> Iterator[Any]:
    """Bars on a terminal: one of all runs and one of each that goes on; a line for each that is finished elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from assay.executors import Watch

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=err, disable=not err.is_terminal, transient=True)

    class Bars(Watch):
        def __init__(self) -> None:
            self.all: Any = None
            self.each: dict[Path, Any] = {}
            self.done = self.total = 0

        def phase(self, name: str, jobs: int, done: int) -> None:
            self.done, self.total = done, jobs
            if self.all is not None:
                bars.remove_task(self.all)
            self.all = bars.add_task(name, total=jobs, completed=done)
            if done < jobs or name == "training seeds":
                kept = f", {done} of them there already" if done else ""
                err.print(f"{name}: {jobs} run{'s' if jobs != 1 else ''}{kept}", style="dim")

        def progress(self, job: Job, step: int, share: float, success: float | None) -> None:
            if job.row not in self.each:
                self.each[job.row] = bars.add_task(job.name, total=100)
            text = f"  {job.name}, step {step}" + (f", success {success:.2f}" if success is not None else "")
            bars.update(self.each[job.row], completed=round(100 * share), description=text)

        def finished(self, job: Job) -> None:
            self._end(job)
            self.done += 1
            bars.update(self.all, completed=self.done)
            if not err.is_terminal:
                err.print(f"{self.done}/{self.total}  {job.name}")

        def failed(self, job: Job, error: str) -> None:
            self._end(job)
            err.print(f"{job.name} failed: {error}", style="red")

        def note(self, text: str) -> None:
            err.print(text, style="dim")

        def _end(self, job: Job) -> None:
            if (bar := self.each.pop(job.row, None)) is not None:
                bars.remove_task(bar)

    with bars:
        yield Bars()
