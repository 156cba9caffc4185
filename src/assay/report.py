"""`report.html`: one run on one page that opens anywhere, without a network. All it needs is in the run directory.

Keys of metrics.jsonl that it knows (each may be missing; all other numbers get a small chart at the end):
    success success_low success_high episodes      training success of the step's episodes, with its interval
    iid_success iid_low iid_high                   held-out success measured between steps
    reward entropy grad_norm turns invalid_actions, {ref_kl,approx_kl,clip_low,clip_high}_per_trained_token
    kept_groups dropped_groups surplus_groups      what `keep` did
    generated_tokens extra_tokens environment_errors
    outcome_success outcome_failure outcome_horizon outcome_cut outcome_environment_error
of timings.jsonl: step_s, and of it model_s, env_wait_s, update_s; tokens_per_s.
of evaluation.json: {"before": {"sampled": RATE, "greedy": RATE, "ood": {the same}}, "after": the same},
    RATE = {"success", "low", "high", "n"} and, if it is there, "panel"; of a mixture also "environments": {NAME: the same}.
of guard.jsonl: every line.
of tables.jsonl: the last table of each title, and the rows' numbers over the steps (report_tables.py).
of traces/: before.parquet and after.parquet, of which the tasks in both give the examples.

Everything shown is untrusted (a model or an environment wrote it): the template escapes all of it, and the page's
content policy forbids scripts. Unreadable parts are named on the page; missing ones leave their section out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from assay import charts
from assay.charts import Line
from assay.config import flat
from assay.files import write_file
from assay.protocols import UserError
from assay.records import Records, anomalies, is_number, points_of, series, total
from assay.report_tables import method_tables
from assay.rundir import RunDir
from assay.trace import Ids, Trace
from assay.transcripts import episode, paired_examples

CURVES = (  # title, keys of its lines, what to read it as
    ("Reward per episode", ("reward",), ""),
    ("Entropy", ("entropy",), "nats per sampled token"),
    (
        "KL",
        ("ref_kl_per_trained_token", "approx_kl_per_trained_token"),
        "to the reference and to the sampling policy, nats per trained token",
    ),
    (
        "Clipped tokens",
        ("clip_low_per_trained_token", "clip_high_per_trained_token"),
        "share beyond the lower and the upper bound",
    ),
    ("Gradient norm", ("grad_norm",), "before clipping"),
    ("Turns per episode", ("turns",), ""),
    ("Invalid actions", ("invalid_actions",), "share of turns"),
)
SHARES = ("clip_low_per_trained_token", "clip_high_per_trained_token", "invalid_actions")  # axis in per cent
TIMES = {"model_s": "model", "env_wait_s": "environment", "update_s": "update"}
OUTCOMES = {  # key -> name, colour of the page
    "outcome_success": ("success", "good"),
    "outcome_failure": ("failure", "bad"),
    "outcome_horizon": ("horizon", "warn"),
    "outcome_cut": ("cut", "c3"),
    "outcome_environment_error": ("environment error", "c4"),
}
DROPPED = {
    "dropped_groups": ("groups dropped by the filter or as surplus", "kept_groups"),
    "outcome_cut": ("episodes cut by a token limit", "episodes"),
    "outcome_environment_error": ("episodes lost to environment errors", "episodes"),
    "extra_tokens": ("tokens generated outside the episodes", "generated_tokens"),
}
PANELS: dict[str, tuple[str, ...]] = {"iid": (), "ood": ("ood",)}  # split -> where its rates are
COLOURS = 5  # of lines, in the page's style sheet
MOST_OTHER = 48  # small charts of metrics that are not named above


def write_report(
    run: RunDir, decode: Callable[[Ids], str] | None = None, context: Mapping[str, Any] | None = None
) -> Path:
    """Write `report.html` into the run directory and return its path.

    `decode` turns ids into text; without it the examples show no tokens. `context` may hold "advantages" (trace key ->
    one per policy token), "tables" ({"title", "columns", "rows"} each) and "anomalies" (sentences).
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("assay", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("report.html.j2").render(page(run, decode, context or {}))
    path = run.path / "report.html"
    write_file(path, html.encode("utf-8", "replace"))  # a model can write half a character
    return path


def page(run: RunDir, decode: Callable[[Ids], str] | None, context: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows; empty values leave their section out."""
    problems: list[str] = []
    config = _readable(lambda: run.config, {}, problems)
    metrics = _readable(run.read_metrics, [], problems)
    timings = _readable(run.read_timings, [], problems)
    guard = _readable(run.read_guard, [], problems)
    tables = _readable(run.read_tables, [], problems)
    evaluation = _readable(lambda: run.evaluation, {}, problems)
    traces = {
        when: _readable(lambda when=when: run.read_traces(when), [], problems)  # type: ignore[misc]
        for when in ("before", "after")
        if run.trace_path(when).exists()
    }
    return {
        "title": heading(config, run.path.name),
        "facts": facts(config, metrics, timings),
        "held_out": held_out(evaluation),
        "success": success_chart(metrics),
        "curves": curves(metrics, timings),
        "times": time_shares(timings),
        "outcomes": outcomes(metrics),
        "examples": examples(traces, decode, context.get("advantages", {})),
        "tables": [*method_tables(tables), *context.get("tables", ())],
        "dropped": dropped(metrics),
        "anomalies": [
            *problems,
            *(f"Step {line['step']}: {line.get('text')} ({line.get('code')})" for line in guard),
            *context.get("anomalies", ()),
            *anomalies(metrics, evaluation),
        ],
        "others": other_charts(metrics),
        "config": [(name, written(value)) for name, value in flat(config).items()],
    }


def _readable(read: Callable[[], Any], default: Any, problems: list[str]) -> Any:
    try:
        return read()
    except UserError as error:
        problems.append(str(error))
        return default


# ------------------------------------------------------------------------------------------------------------ pieces


def heading(config: Mapping[str, Any], name: str) -> str:
    """Environment, methods and model, or the folder's name."""
    method = config.get("method", "")
    parts = [
        config.get("env"),
        " + ".join(map(str, method)) if isinstance(method, list) else method,
        config.get("model"),
    ]
    return " · ".join(str(part) for part in parts if part) or name


def facts(config: Mapping[str, Any], metrics: Records, timings: Records) -> list[tuple[str, str]]:
    """The line under the title."""
    seconds = sum(series(timings, "step_s", default=0))
    found = [
        ("seed", str(config["seed"]) if "seed" in config else ""),
        ("steps", str(max((record["step"] for record in metrics), default=""))),
        ("episodes", charts.number(total(metrics, "episodes")) if total(metrics, "episodes") else ""),
        ("tokens", charts.number(total(metrics, "generated_tokens")) if total(metrics, "generated_tokens") else ""),
        ("training time", duration(seconds) if seconds else ""),
    ]
    return [(name, value) for name, value in found if value]


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def held_out(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per panel and decoding: rates before and after, and their difference with Newcombe's interval. Of a mixture
    the mean of its environments, then each of them."""
    rows = []
    parts = _environments(evaluation)
    panels = [(f"{split}, mean of environments" if parts else split, path) for split, path in PANELS.items()]
    panels += [(f"{split}, {env}", ("environments", env, *path)) for env in parts for split, path in PANELS.items()]
    for panel, path in panels:
        for decoding in ("sampled", "greedy"):
            before, after = (_rate(evaluation, (when, *path, decoding)) for when in ("before", "after"))
            if before or after:
                change = difference(before, after) if before and after else None
                picture = charts.interval_bar(before, after)
                rows.append(
                    {
                        "panel": panel,
                        "decoding": decoding,
                        "before": before,
                        "after": after,
                        "change": change,
                        "picture": picture,
                    }
                )
    return rows


def _environments(evaluation: Mapping[str, Any]) -> list[str]:
    """Of a mixture, whose panels are apart."""
    halves = [half for half in (evaluation.get("before"), evaluation.get("after")) if isinstance(half, Mapping)]
    found = [half["environments"] for half in halves if isinstance(half.get("environments"), Mapping)]
    return list(dict.fromkeys(str(name) for environments in found for name in environments))


def _rate(evaluation: Any, path: Sequence[str]) -> dict[str, float] | None:
    for name in path:
        evaluation = evaluation.get(name) if isinstance(evaluation, Mapping) else None
    if not isinstance(evaluation, Mapping):
        return None
    rate: dict[str, Any] = {
        name: value for name in ("success", "low", "high", "n") if is_number(value := evaluation.get(name))
    }
    return rate if len(rate) == 4 else None


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float, float, float]:
    """(after - before, low, high) of two rates from their own intervals. Source: Newcombe 1998, method 10. The panels are
    taken as independent; on the same tasks they are positively dependent, and the interval is wider than it need be."""
    change = after["success"] - before["success"]
    low = math.hypot(after["success"] - after["low"], before["high"] - before["success"])
    high = math.hypot(after["high"] - after["success"], before["success"] - before["low"])
    return change, change - low, change + high


def success_chart(metrics: Records) -> Markup:
    """Training success with its band, and the held-out measurements between steps."""
    measured = [record for record in metrics if is_number(record.get("iid_success"))]
    lines = [
        _banded("training", metrics, ("success", "success_low", "success_high")),
        replace(_banded("held out", measured, ("iid_success", "iid_low", "iid_high")), colour=1, dots=True),
    ]
    return charts.line_chart(
        [line for line in lines if line.points], percent=True, label="success per step", size=charts.WIDE
    )


def _banded(name: str, records: Records, keys: tuple[str, str, str]) -> Line:
    low, high = series(records, keys[1]), series(records, keys[2])
    known = any(map(math.isfinite, low)) and any(map(math.isfinite, high))
    return Line(name, points_of(records, keys[0]), low if known else (), high if known else ())


def curves(metrics: Records, timings: Records) -> list[dict[str, Any]]:
    """Title, caption, names of several lines, picture."""
    found = []
    worlds = _worlds(metrics)
    by_world = (
        "Success by environment",
        tuple(f"success[{world}]" for world in worlds),
        "share of the step's episodes",
    )
    sources = [(*curve, metrics) for curve in (by_world, *CURVES)] + [
        ("Tokens per second", ("tokens_per_s",), "generated, over the whole step", timings)
    ]
    for title, keys, caption, records in sources:
        if len(keys) == 1:
            keys = (*keys, *(f"{keys[0]}[{world}]" for world in worlds))
        drawn = [(i % COLOURS, key) for i, key in enumerate(keys) if points_of(records, key)]
        lines = [Line(key, points_of(records, key), colour=i) for i, key in drawn]
        picture = charts.line_chart(lines, label=title)
        if picture:
            names = [(line.name, line.colour) for line in lines] if len(lines) > 1 else []
            found.append({"title": title, "caption": caption, "names": names, "picture": picture})
    return found


def _worlds(metrics: Records) -> list[str]:
    """Environments of a mixture, by their success."""
    names = dict.fromkeys(name for record in metrics for name in record)
    return [name[len("success[") : -1] for name in names if name.startswith("success[") and name.endswith("]")]


def other_charts(metrics: Records) -> list[dict[str, Any]]:
    """Every other number that was written, in the order of its first appearance."""
    known = {"step", "success", "success_low", "success_high", "iid_success", "iid_low", "iid_high", *OUTCOMES}
    known.update(key for _, keys, _ in CURVES for key in keys)
    shown = {"success", "success_low", "success_high", *(keys[0] for _, keys, _ in CURVES if len(keys) == 1)}
    known.update(f"{name}[{world}]" for name in shown for world in _worlds(metrics))
    names = dict.fromkeys(name for record in metrics for name, value in record.items() if is_number(value))
    pictures = [(n, charts.line_chart([Line(n, points_of(metrics, n))], label=n)) for n in names if n not in known]
    return [{"title": name, "picture": picture} for name, picture in pictures if picture][:MOST_OTHER]


def time_shares(timings: Records) -> dict[str, Any]:
    """Seconds of model, environment, update and the rest of the step."""
    parts = {name: sum(series(timings, key, default=0)) for key, name in TIMES.items()}
    rest = sum(series(timings, "step_s", default=0)) - sum(parts.values())
    parts = {name: seconds for name, seconds in {**parts, "rest": max(rest, 0.0)}.items() if seconds > 0}
    whole = sum(parts.values())
    if not whole:
        return {}
    legend = [
        (name, duration(seconds), charts.number(seconds / whole, True), i)
        for i, (name, seconds) in enumerate(parts.items())
    ]
    return {"picture": charts.share_bar(parts), "legend": legend}


def outcomes(metrics: Records) -> dict[str, Any]:
    """How episodes ended: totals, and shares per step."""
    counts = {name: series(metrics, key, default=0) for key, (name, _) in OUTCOMES.items()}
    whole = sum(map(sum, counts.values()))
    if not whole:
        return {}
    colours = dict(OUTCOMES.values())
    picture = charts.stacked_bars([record["step"] for record in metrics], counts, colours)
    totals = [
        (n, charts.number(sum(v)), charts.number(sum(v) / whole, True), colours[n]) for n, v in counts.items() if sum(v)
    ]
    return {"picture": picture, "totals": totals}


def examples(
    traces: Mapping[str, Sequence[Trace]],
    decode: Callable[[Ids], str] | None,
    advantages: Mapping[str, Sequence[float]],
) -> list[dict[str, Any]]:
    """Two tasks, each as it went before and after training."""
    found = []
    for pair in paired_examples(traces.get("before", ()), traces.get("after", ())):
        episodes = [(when, episode(t, decode, advantages.get(t.key))) for when, t in pair.items()]
        found.append({"task": str(next(iter(pair.values())).task), "episodes": episodes})
    return found


def dropped(metrics: Records) -> list[tuple[str, str, str]]:
    """(what, count, share): nothing is dropped without being counted."""
    rows = []
    for key, (name, of) in DROPPED.items():
        if any(key in record for record in metrics):
            count, whole = total(metrics, key), total(metrics, of)
            whole += count if of == "kept_groups" else 0
            rows.append((name, charts.number(count), charts.number(count / whole, True) if whole else ""))
    return rows


def written(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def curve_png(run: RunDir, path: Path) -> Path:
    """The curve of training success with its band, as a picture of 1200 x 675 pixels for a page or a talk."""
    metrics = run.read_metrics()
    if not points_of(metrics, "success"):
        raise UserError(f"{run.path / 'metrics.jsonl'}: expected training success to draw, found none: train first")
    steps, values = zip(*points_of(metrics, "success"), strict=True)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(
        steps, series(metrics, "success_low"), series(metrics, "success_high"), color="#2563eb", alpha=0.15, lw=0
    )
    axes.plot(steps, values, color="#2563eb", lw=1, alpha=0.4)
    reach = max(1, len(steps) // 15)
    axes.plot(
        *zip(*charts.running_mean(list(zip(steps, values, strict=True)), reach), strict=True), color="#2563eb", lw=2.2
    )
    axes.set(xlabel="step", ylabel="success in training", ylim=(0, 1), title=heading(run.config, run.path.name))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return path
