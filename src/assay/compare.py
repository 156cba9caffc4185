"""Compare methods: paired training seeds, one panel, one start, and a verdict that may be "inconclusive".

A comparison is a folder. `compare.toml` is its plan, `seeds/` has one row per finished training seed, `runs/` the runs, and
`compare.json`, `report.html`, `table.md`, `table.tex` what came out. Whatever is there is not done again: killed at any
moment and started again it ends with the same numbers. The statistics are judge.py's, the runs an executor's.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from pydantic import Field, ValidationError

from assay.compare_report import latex, markdown, write_page
from assay.config import RunConfig, Section, dump, env_settings, environments, flat, resolve
from assay.envs.remote import RemoteEnv
from assay.executors import Executor, Watch
from assay.files import read_file, write_file, write_json, writing
from assay.judge import curve, judge, self_difference
from assay.methods.registry import compose, fidelity_of
from assay.protocols import UserError
from assay.rundir import lock
from assay.seeds import EVALUATIONS, Job, key, made, rate_of, read_row, split_metric, value
from assay.stats import bca

PLAN, RESULT = "compare.toml", "compare.json"
PLAN_BYTES = 1 << 22
OTHER_SEEDS = 10_000  # added to the seeds of a method's second arm, which are other ones than those of the first
SCHEMA = 1
FREE = {"seeds", "looks", "secondary", "store", "command"}  # of a plan: what may change without changing the question
OF_TRAINING = (  # what cannot change the policy that training starts from
    *("method", "method_args", "slots", "seed", "steps", "budget", "planned_steps", "cut"),
    *("env_shares", "tasks_per_step", "rollouts_per_task", "updates_per_batch", "epochs", "rounds"),
    *("learning_rate", "schedule", "warmup_steps", "weight_decay", "grad_clip"),
)
AXES = {"env_steps": "total_env_steps", "tokens": "total_tokens"}


class Plan(Section):
    """What is compared, written before the first run."""

    arms: dict[str, dict[str, Any]]
    """Name -> complete keys of a run, without seed and out."""
    seeds: list[int]
    """Training seeds, the same for every arm: the pairs."""
    metric: str = "iid sampled"
    """The figure that the verdict is about, chosen before the runs."""
    secondary: list[str] = Field([])
    """Further figures, reported without a verdict."""
    effect: float = Field(0.05, gt=0)
    """Smallest difference of that figure that would matter."""
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Share of comparisons of equal methods that may end in a false verdict."""
    noise: list[str] = Field([])
    """Arms that run a second time with other seeds: the noise floor, measured."""
    store: str | None = None
    """Folder of finished seeds that several comparisons share, from the comparison's folder; absent: its own `seeds`."""
    looks: list[int] = Field([])
    """Numbers of seeds at which the result was looked at; each further look costs."""
    command: str = ""
    """That made it."""


def create(folder: Path, plan: Plan) -> None:
    """Writes the plan. One that asks the same question is no error: it may bring seeds, secondary figures, another store."""
    check(plan)
    path = folder / PLAN
    if path.exists():
        found = load(folder)
        if _question(found) != _question(plan):
            raise UserError(
                f"{folder} holds another comparison: 'assay compare {folder}' goes on with it, --out starts one"
            )
        plan = plan.model_copy(update={"seeds": sorted({*found.seeds, *plan.seeds}), "looks": found.looks})
    elif folder.exists() and any(entry.name != ".lock" for entry in folder.iterdir()):
        raise UserError(f"{folder} exists and is no comparison: name another folder with --out")
    save(folder, plan)


def _question(plan: Plan) -> dict[str, Any]:
    """What may not change, every arm complete: an older plan does not name the settings that came after it."""
    arms = {name: arm_of(resolve(values, f"arm {name!r}")) for name, values in plan.arms.items()}
    return plan.model_dump(exclude=FREE) | {"arms": arms}


def check(plan: Plan) -> None:
    """UserError for what could not be compared."""
    if len(plan.arms) + len(plan.noise) < 2:
        raise UserError("a comparison needs two arms: name a second method, or the same one twice for its noise floor")
    if len(set(plan.seeds)) < 2:
        raise UserError("a comparison needs two training seeds at least, and says little below five: --seeds 8")
    configs = {name: resolve(values, f"arm {name!r}") for name, values in plan.arms.items()}
    for name, config in configs.items():
        try:
            compose(config.method[1:], config.method_args)
        except UserError as error:
            raise UserError(f"arm {name!r}: {error}") from error
    for field in ("env", "env_args"):
        if len({str(getattr(config, field)) for config in configs.values()}) > 1:
            raise UserError(f"the arms differ in {field}: success on unlike tasks cannot be compared")
    panels = {(c.evaluation.tasks, c.evaluation.ood, c.evaluation.greedy) for c in configs.values()}
    if len(panels) > 1:
        raise UserError("the arms differ in their panel (evaluation.tasks, ood, greedy): give all the same")
    first = next(iter(configs.values()))
    for metric in (plan.metric, *plan.secondary):
        env = split_metric(metric)[1]
        if env and env not in (there := environments(first) if len(environments(first)) > 1 else []):
            raise UserError(
                f"metric {metric!r} is of an environment of a mixture: {', '.join(there) or 'there is none'}"
            )
    if split_metric(plan.metric)[0] in EVALUATIONS and plan.metric not in measured(first):
        raise UserError(
            f"metric {plan.metric!r} is not measured: the panel has {', '.join(measured(first)) or 'no task'}"
        )
    for metric in (plan.metric, *plan.secondary):
        value({"curves": {}, "end": {}, "timings": {}}, metric)


def arm_of(config: RunConfig) -> dict[str, Any]:
    """Complete keys of an arm: all but what each of its runs has of its own."""
    return {name: item for name, item in dump(config).items() if name not in ("seed", "out", "planned_steps")}


def measured(config: RunConfig) -> list[str]:
    """The panel's figures; of a mixture the mean's, then those of each environment."""
    if not config.evaluation.tasks:
        return []
    splits = ["iid", "ood"] if config.evaluation.ood else ["iid"]
    found = [name for name in EVALUATIONS if name[:3] in splits and (config.evaluation.greedy or "sampled" in name)]
    worlds = environments(config)
    return found + [f"{name}[{world}]" for world in worlds for name in found if len(worlds) > 1]


def load(folder: Path) -> Plan:
    path = folder / PLAN
    if not path.is_file():
        raise UserError(f"{folder} is no comparison: there is no {PLAN} in it")
    try:
        return Plan.model_validate(tomllib.loads(read_file(path, PLAN_BYTES).decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected TOML, found something else ({error}): restore the file") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}: restore the file") from error


def save(folder: Path, plan: Plan) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / PLAN, tomli_w.dumps(plan.model_dump(exclude_none=True)).encode())


def compare(folder: Path, executor: Executor, watch: Watch | None = None, add_seeds: int = 0) -> dict[str, Any]:
    """Runs what is missing, then judges: the content of compare.json."""
    watch = watch or Watch()
    with _writing(folder):
        plan = load(folder)
        if add_seeds:
            plan.seeds = plan.seeds + [max(plan.seeds) + 1 + i for i in range(add_seeds)]
            save(folder, plan)
        store = folder / (plan.store or "seeds")
        version = environment_version(next(iter(plan.arms.values())))
        starts = start_jobs(folder, plan, store, version)
        failed = _run("the start of training", list(starts.values()), executor, watch)
        if failed:
            raise UserError(f"the policy that training starts from cannot be evaluated: {next(iter(failed.values()))}")
        jobs = seed_jobs(folder, plan, store, version)
        failed = _run("training seeds", list(jobs.values()), executor, watch)
        if not failed and len(plan.seeds) not in plan.looks:
            plan.looks.append(len(plan.seeds))
            save(folder, plan)
        result = outcome(plan, starts, jobs, failed)
        write_json(folder / RESULT, result)
        write_file(folder / "table.md", markdown(result).encode())
        write_file(folder / "table.tex", latex(result).encode())
        write_page(result, folder / "report.html")
        return result


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / ".lock"):
        yield


def _run(phase: str, jobs: Sequence[Job], executor: Executor, watch: Watch) -> dict[Path, str]:
    distinct = {job.row: job for job in jobs}
    missing = [job for row, job in distinct.items() if not row.exists()]
    watch.phase(phase, len(distinct), len(distinct) - len(missing))
    return executor.run(missing, watch) if missing else {}


def environment_version(values: Mapping[str, Any]) -> str:
    config = resolve(dict(values), "arm")
    versions = []
    for name in environments(config):
        with closing(RemoteEnv(name, env_settings(config, name), config.runtime.step_timeout_s)) as env:
            versions.append(env.version)
    return ",".join(versions)


# ---------------------------------------------------------------------------------------------------------------- jobs


def start_jobs(folder: Path, plan: Plan, store: Path, version: str) -> dict[str, Job]:
    """Arm -> the run of no steps that makes its warm start and evaluates it; arms that start alike share one."""
    jobs = {}
    for arm, values in plan.arms.items():
        kept = {name: v for name, v in values.items() if name not in OF_TRAINING} | {"steps": 0, "method": ["grpo"]}
        jobs[arm] = _job(folder, f"start of {arm}", "start", kept, store, version)
    return jobs


def seed_jobs(folder: Path, plan: Plan, store: Path, version: str) -> dict[tuple[str, int], Job]:
    """(arm, seed) -> its run, a whole seed after the other, so that what is there after a while is paired."""
    jobs = {}
    for seed in plan.seeds:
        for arm, values in plan.arms.items():
            for shift in (0, OTHER_SEEDS) if arm in plan.noise else (0,):
                numbered = {**values, "seed": seed + shift}
                jobs[arm, seed + shift] = _job(
                    folder, f"{arm}, seed {seed + shift}", f"{slug(arm)}-s{seed + shift}", numbered, store, version
                )
    return jobs


def _job(folder: Path, name: str, short: str, values: dict[str, Any], store: Path, version: str) -> Job:
    values = {**values, "evaluation": {**values.get("evaluation", {}), "before": False}}
    config = resolve(values, name)
    named = key(config, version)
    run = folder / "runs" / f"{short}-{named[:6]}"
    return Job(name, dump(config), run, store, named, version)


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text).strip("-")[:60] or "arm"


# -------------------------------------------------------------------------------------------------------------- result


def outcome(
    plan: Plan, starts: Mapping[str, Job], jobs: Mapping[tuple[str, int], Job], failed: Mapping[Path, str]
) -> dict[str, Any]:
    """What the rows come to. Only the seconds, the date and the machine depend on where and when they were made."""
    rows = {at: read_row(job.row) for at, job in jobs.items() if job.row.exists()}
    first = resolve(next(iter(plan.arms.values())), "arm")
    metrics = list(dict.fromkeys([plan.metric, *measured(first), *plan.secondary]))
    figures = {
        metric: {arm: {s: value(rows[arm, s], metric) for s in plan.seeds if (arm, s) in rows} for arm in plan.arms}
        for metric in metrics
    }
    begin = {arm: read_row(job.row)["end"] for arm, job in starts.items()}
    pairs = []
    for metric in metrics:
        judged = judge(figures[metric], effect=plan.effect, alpha=plan.alpha, looks=max(1, len(plan.looks)))
        pairs += [{"metric": metric, **plain(pair)} for pair in judged]
    result = {
        "schema": SCHEMA,
        "title": f"{', '.join(plan.arms)} on {first.env}",
        "env": first.env,
        "model": first.model,
        "budget": first.budget or f"steps:{first.steps}",
        "metric": plan.metric,
        "metrics": metrics,
        "effect": plan.effect,
        "alpha": plan.alpha,
        "looks": max(1, len(plan.looks)),
        "seeds": plan.seeds,
        "environment_version": next(iter(starts.values())).environment_version,
        "panel": _panel(begin, first),
        "start": {metric: _start(next(iter(begin.values())), metric) for metric in measured(first)},
        "arms": {arm: _arm(plan, arm, rows, figures) for arm in plan.arms},
        "pairs": pairs,
        "noise": [noise for arm in plan.noise if (noise := _noise(plan, arm, rows, figures)) is not None],
        "curves": {axis: _curves(plan, rows, axis) for axis in (*AXES, "seconds")},
        "unfinished": [
            {"arm": arm, "seed": seed, "error": failed.get(jobs[arm, seed].row, "not run yet")}
            for arm, seed in jobs
            if (arm, seed) not in rows
        ],
        "command": plan.command,
        **{name: text for name, text in made().items() if name in ("assay", "date", "machine")},
    }
    return _finite(result)


def _panel(begin: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    first = next(iter(begin.values()))
    found = {"iid": first.get("sampled", {}).get("panel"), "ood": first.get("ood", {}).get("sampled", {}).get("panel")}
    return {name: text for name, text in found.items() if text} | {"tasks": config.evaluation.tasks}


def _start(end: Mapping[str, Any], metric: str) -> dict[str, Any]:
    found = rate_of(end, metric)
    return {name: found.get(name) for name in ("success", "low", "high", "n")}


def _arm(plan: Plan, arm: str, rows: Mapping[tuple[str, int], Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    seeds, means = {}, {}
    for seed in plan.seeds:
        if (arm, seed) in rows:
            row = rows[arm, seed]
            spent = {name: value(row, name) for name in ("env_steps", "tokens", "seconds")}
            seeds[str(seed)] = {metric: figures[metric][arm][seed] for metric in figures} | spent | {"key": row["key"]}
    for metric in figures:
        known = [v for v in figures[metric][arm].values() if math.isfinite(v)]
        if known:
            means[metric] = plain(bca(known, 0, "arm", arm, metric, over="seeds"))
    methods = plan.arms[arm]["method"]
    return {
        "method": methods,
        "differs": _differs(plan, arm),
        "fidelity": fidelity_of(methods),
        "seeds": seeds,
        "mean": means,
    }


def _differs(plan: Plan, arm: str) -> dict[str, Any]:
    """Keys in which the arm is not like the first one."""
    own, first = flat(plan.arms[arm]), flat(next(iter(plan.arms.values())))
    return {name: own.get(name) for name in sorted({*own, *first}) if own.get(name) != first.get(name)}


def _noise(
    plan: Plan, arm: str, rows: Mapping[tuple[str, int], Any], figures: Mapping[str, Any]
) -> dict[str, Any] | None:
    others = {s: value(rows[arm, s + OTHER_SEEDS], plan.metric) for s in plan.seeds if (arm, s + OTHER_SEEDS) in rows}
    own = figures[plan.metric][arm]
    return {"arm": arm, "difference": plain(self_difference(own, others))} if min(len(own), len(others)) > 1 else None


def _curves(plan: Plan, rows: Mapping[tuple[str, int], Any], axis: str) -> dict[str, Any]:
    """Training success of each arm along one axis: interquartile mean over seeds, with its band."""
    found = {}
    for arm in plan.arms:
        mine = [rows[arm, seed] for seed in plan.seeds if (arm, seed) in rows]
        xs = [row["timings"]["seconds"] if axis == "seconds" else row["curves"][AXES[axis]] for row in mine]
        runs = [
            (x, [np.nan if y is None else y for y in row["curves"]["success"]]) for x, row in zip(xs, mine, strict=True)
        ]
        runs = [(x, y) for x, y in runs if len(x)]
        if runs:
            found[arm] = plain(curve(runs, 0, "curve", arm, axis))
    return found


def plain(record: Any) -> dict[str, Any]:
    """A dataclass as JSON values."""
    assert is_dataclass(record) and not isinstance(record, type)
    return {name: item.tolist() if isinstance(item, np.ndarray) else item for name, item in asdict(record).items()}


def _finite(item: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(item, Mapping):
        return {name: _finite(inner) for name, inner in item.items()}
    if isinstance(item, list | tuple):
        return [_finite(inner) for inner in item]
    item = item.item() if isinstance(item, np.generic) else item
    return None if isinstance(item, float) and not math.isfinite(item) else item
