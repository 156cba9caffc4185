"""train, resume, eval, report, pretrain: what they ask, what they call, what they say at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from assay.cli.flags import Help, Line, read, show_help
from assay.cli.layers import HERE, presets, read_train
from assay.cli.plan import WARNINGS, plan
from assay.cli.tables import console, held_out_table, rate, show_plan
from assay.config import (
    RunConfig,
    Section,
    default_out,
    dump,
    environments,
    load,
    parse_budget,
    resolve,
    split_env,
    with_env,
)
from assay.protocols import UserError

if TYPE_CHECKING:
    from assay.cli.display import TerminalDisplay
    from assay.train import Result

INTERRUPTED = 130
JSON = {"json": (bool, "One JSON object on standard output, and nothing else there.")}


def train(line: Line) -> int:
    switches = {
        "preset": (str | None, f"Values to start from: {', '.join(presets())}. A file and flags lie on top."),
        "dry_run": (bool, "Print the plan and the complete configuration, start nothing."),
        **JSON,
    }
    examples = (
        "train --preset demo",
        "train --env countdown --method dr-grpo --steps 50 --evaluation.tasks 100",
        "train runs/NAME --seed 1        # a run directory or FILE.toml, again with changes",
    )
    page = Help("train", "Train a language-model agent with RL over many turns.", examples, switches=switches)
    if line.wants_help:
        asked = read_train(line.without_help())
        return show_help(page, asked.model, asked.shown())
    asked = read_train(line)
    out = asked.config.out or default_out(asked.config)
    lines = plan(asked.config, out)
    if asked.dry_run:
        return _dry_run(asked.config, lines, asked.json)
    if (Path(out) / "config.toml").exists():
        raise UserError(f"{out} exists already: 'assay resume {out}' goes on with it, --out NAME starts another")
    err = console()
    show_plan(err, {title: text for title, text in lines.items() if title != WARNINGS})
    from assay.train import train as start

    with _display(asked.config) as display:
        result = start(asked.values, display, HERE)
    return _finish(result, asked.json)


def _dry_run(config: RunConfig, lines: dict[str, str], as_json: bool) -> int:
    if as_json:
        print(json.dumps({"plan": lines, "config": dump(config)}))
        return 0
    import tomli_w

    print("\n".join(f"# {title}: {text}" for title, text in lines.items()))
    print(f"\n{tomli_w.dumps(dump(config))}", end="")
    return 0


class Resume(Section):
    run: str
    """The run directory."""
    steps: str | None = None
    """+N for N more steps than planned so far, N for another total; absent: up to the planned end."""
    replan: bool = False
    """Schedules take the new end as theirs; else they keep the old plan."""


def resume(line: Line) -> int:
    examples = ("resume runs/NAME", "resume runs/NAME --steps +50", "resume runs/NAME --steps 200 --replan")
    about = "Go on from the last checkpoint of a run that was stopped or killed, or extend a finished one."
    page = Help("resume", about, examples, ("run",), JSON)
    if line.wants_help:
        return show_help(page, Resume)
    asked = read(line, Resume, page)
    config = resolve(load(_run_folder(asked.run)), asked.run)
    from assay.train import extend
    from assay.train import resume as go_on

    config = extend(config, asked.steps, asked.replan) if asked.steps else config
    show_plan(console(), {title: text for title, text in plan(config, asked.run).items() if title != WARNINGS})
    with _display(config) as display:
        result = go_on(asked.run, asked.steps, display, asked.replan)
    return _finish(result, line.switch("json"))


@contextmanager
def _display(config: RunConfig | None) -> Iterator[TerminalDisplay]:
    from assay.cli.display import TerminalDisplay

    budget = parse_budget(config.budget, HERE) if config and config.budget else None
    display = TerminalDisplay(console(), config.steps if config else 0, budget)
    try:
        yield display
    finally:
        display.close()


def _finish(result: Result, as_json: bool) -> int:
    """What came out, where it is, and what to type next."""
    err = console()
    if result.before or result.after:
        err.print(held_out_table(result.before, result.after))
    run, spent = str(result.run), result.spent
    err.print(
        f"{spent['steps']} steps, {spent['episodes']} episodes, {spent['tokens']} tokens generated; this took "
        f"{result.seconds:.0f} s"
    )
    if result.stopped:
        err.print(f"stopped before its end, nothing is lost: 'assay resume {run}' goes on")
    else:
        err.print(f"policy     {run}/policy\nreport     {run}/report.html")
        err.print(f"next       assay play --policy {run}   or   assay eval {run} --split ood --episodes 500")
    if as_json:
        print(json.dumps(result.as_json(), allow_nan=False))
    return INTERRUPTED if result.stopped else 0


class Eval(Section):
    policy: str
    """A run directory, or with --env a model: a built-in name, a folder, a hub name."""
    env: str | None = None
    """Environment; absent: the run's, of a mixture all of them."""
    split: str = "iid"
    """train, iid or ood."""
    episodes: int = Field(200, ge=1)
    """Tasks of the split, one episode each: always the same ones, from the first."""
    greedy: bool = False
    """Always the most likely token; else sampled at the run's temperature."""


def evaluate(line: Line) -> int:
    examples = ("eval runs/NAME --split ood --episodes 500", "eval runs/NAME --greedy", "eval tiny-1m --env countdown")
    about = "Success of a run's policy, or of a model, on held-out tasks, with a 95 % interval over the tasks."
    page = Help("eval", about, examples, ("policy",), JSON)
    if line.wants_help:
        return show_help(page, Eval)
    asked = read(line, Eval, page)
    config = policy_config(asked.policy, asked.env)
    from assay.cli.policy import open_policy
    from assay.evaluate import evaluate as measure

    with _display(None) as display, open_policy(config, asked.policy) as bench:
        display.phase(f"evaluating on {asked.split}")
        summary, _ = measure(bench, asked.split, asked.episodes, asked.greedy, display.episodes, config.temperature)
        display.close()
    mode = "greedy" if asked.greedy else f"sampled at temperature {config.temperature:g}"
    record = {"policy": asked.policy, "env": config.env, "split": asked.split, "greedy": asked.greedy}
    if line.switch("json"):
        print(json.dumps({**record, "interval": _interval(summary), **summary}, allow_nan=False))
    else:
        parts = summary.get("environments", {})
        for env, one in (parts or {config.env: summary}).items():
            outcomes = ", ".join(f"{n} {name}" for name, n in one["outcomes"].items())
            print(f"{env}, {asked.split}, {mode}: success {rate(one)} (95 % over tasks; panel {one['panel']})")
            print(f"outcomes: {outcomes}; {one['turns']:.1f} turns an episode")
        if parts:
            print(f"mean of the {len(parts)} environments: success {rate(summary)} (95 % over tasks)")
    return 0


def _interval(summary: Mapping[str, Any]) -> str:
    return f"95 % over tasks ({'MOVER of Wilson' if 'environments' in summary else 'Wilson'})"


def policy_config(policy: str, env: str | None) -> RunConfig:
    """The configuration under which a run's policy, or a model, plays."""
    folder = Path(policy)
    if (folder / "config.toml").is_file():
        values = load(folder)
        config = resolve(values, str(folder / "config.toml"))
        if env in environments(config):
            return with_env(config, env)
        if env is not None and split_env(env) != environments(config):
            values = {name: v for name, v in values.items() if name != "env_shares"} | {"env": env, "env_args": {}}
        return resolve(values, str(folder / "config.toml"))
    if env is None:
        raise UserError(f"{policy!r} is not a run directory, so it has no environment: name one with --env")
    return resolve({"model": policy, "env": env}, HERE)


class Report(Section):
    run: str
    """The run directory."""


def report(line: Line) -> int:
    page = Help("report", "Write the report.html of a run again.", ("report runs/NAME",), ("run",), JSON)
    if line.wants_help:
        return show_help(page, Report)
    asked = read(line, Report, page)
    folder = _run_folder(asked.run)
    config = resolve(load(folder), asked.run)
    from assay.cli.policy import decoder
    from assay.report import write_report
    from assay.rundir import RunDir

    with RunDir(folder, write=True) as run:
        write_report(run, decoder(config, folder))
    path = str(folder / "report.html")
    print(json.dumps({"report": path}) if line.switch("json") else path)
    return 0


class Pretrain(Section):
    model: str = "tiny-1m"
    """Shape: a built-in policy's name."""
    out: str
    """Folder that the checkpoint goes to."""
    updates: int = Field(20_000, ge=1)
    """Optimiser steps."""
    rows_per_update: int = Field(16, ge=1)
    """Episodes per optimiser step."""
    learning_rate: float = Field(2e-3, gt=0)
    """AdamW learning rate at its peak."""
    seed: int = Field(0, ge=0)
    """Of the weights and the episodes."""
    tokenizer_episodes: int = Field(300, ge=1)
    """Episodes per environment that the tokenizer learns from."""
    tokenizer_from: str | None = None
    """Take the tokenizer of this checkpoint instead of training one."""


def pretrain(line: Line) -> int:
    examples = ("pretrain --model tiny-1m --out my-tiny", "pretrain --model tiny-300k --out small --updates 2000")
    about = "Make a small policy from nothing: imitation of expert and noisy episodes of the built-in environments."
    page = Help("pretrain", about, examples, switches=JSON)
    if line.wants_help:
        return show_help(page, Pretrain)
    asked = read(line, Pretrain, page)
    out = Path(asked.out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists and is not empty: name another folder with --out")
    from assay.pretrain import Recipe
    from assay.pretrain import pretrain as make

    recipe = Recipe(**asked.model_dump(exclude={"out", "tokenizer_from"}))
    say = console().print
    record = make(recipe, out, Path(asked.tokenizer_from) if asked.tokenizer_from else None, say)
    say(f"next       assay eval {out} --env countdown")
    if line.switch("json"):
        print(json.dumps({**record, "folder": str(out)}, default=str))
    return 0


def _run_folder(run: str) -> Path:
    folder = Path(run)
    if not (folder / "config.toml").is_file():
        raise UserError(f"{run} is not a run directory: there is no config.toml in it; give the folder of a run")
    return folder
