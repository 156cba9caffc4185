"""Success on a fixed panel of held-out tasks, with an interval over tasks.

The panel of a split is its first N task ids, the same for every run, method and seed; its version is a hash of the task
keys, content included, so that two figures can be told to be of the same panel. No method takes part.

Each environment of a mixture has the panel and the draws that it has alone. The figure of the whole is the mean over the
environments, each counting the same whatever its share of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from assay.build import Bench
from assay.protocols import UserError
from assay.rng import stable_hash
from assay.rollout import Job, Progress
from assay.stats import mean_of_rates, wilson
from assay.trace import Outcome, Trace

PANEL_SEED = 20_26  # of the draws; the run's own seed does not enter, so runs share their luck


def panel(size: int | None, tasks: int) -> list[int]:
    """Task ids: all of a split that has fewer than `tasks`."""
    return list(range(tasks if size is None else min(size, tasks)))


def evaluate(
    bench: Bench,
    split: str,
    tasks: int,
    greedy: bool,
    progress: Callable[[Progress], None] | None = None,
    temperature: float = 1.0,
) -> tuple[dict[str, Any], list[Trace]]:
    """One episode on each task of the panel: (summary, traces). `summary` is `summarise`'s; of a mixture it is `macro`'s,
    with those of the environments in "environments"."""
    found: dict[str, dict[str, Any]] = {}
    kept: list[Trace] = []
    for name, pool in bench.pools.items():
        sizes = pool.spec["sizes"]
        if split not in sizes:
            raise UserError(f"split {split!r} does not exist: the splits are {', '.join(sizes)}")
        driver = bench.driver(0.0 if greedy else temperature, PANEL_SEED, progress=progress)
        ids = panel(sizes[split], tasks)
        jobs = [Job(task, split, slot=slot, environment=name) for slot, task in enumerate(ids)]
        traces = driver.collect(jobs, bench.sampler.version)
        found[name] = summarise(traces)
        kept += [replace(t, slot=t.slot + len(kept)) for t in traces]  # played, numbered through: keys stay unique
    if not bench.mixture:
        return found[bench.environments[0]], kept
    return macro(found) | {"environments": found}, kept


def summarise(traces: Sequence[Trace]) -> dict[str, Any]:
    """Share of tasks solved, Wilson's 95 % interval over tasks, and what ended the others. Environment errors are not
    attempts: they leave the share and are counted."""
    attempts = [t for t in traces if t.learnable]
    interval = wilson(sum(t.success for t in attempts), len(attempts)) if attempts else None
    return {
        "success": interval.estimate if interval else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "n": len(attempts),
        "turns": sum(len(t.turns) for t in attempts) / max(len(attempts), 1),
        "outcomes": {
            o.value: sum(t.outcome is o for t in traces) for o in Outcome if any(t.outcome is o for t in traces)
        },
        "panel": stable_hash("\n".join(str(t.task) for t in attempts)),
    }


def macro(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over environments of what `summarise` gave, with its interval over tasks (stats.mean_of_rates); None where
    an environment has no attempt. `n`, outcomes: sums."""
    found = list(summaries.values())
    known = all(s["success"] is not None for s in found)
    interval = mean_of_rates([(s["success"], s["low"], s["high"], s["n"]) for s in found]) if known else None
    names = [o.value for o in Outcome if any(o.value in s["outcomes"] for s in found)]
    return {
        "success": interval.estimate if interval else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "n": sum(s["n"] for s in found),
        "turns": sum(s["turns"] for s in found) / len(found),
        "outcomes": {name: sum(s["outcomes"].get(name, 0) for s in found) for name in names},
        "panel": stable_hash("\n".join(s["panel"] for s in found)),
    }


def evaluate_all(
    bench: Bench,
    tasks: int,
    ood: bool,
    greedy: bool,
    progress: Callable[[str, Progress], None] | None = None,
    temperature: float = 1.0,
) -> tuple[dict[str, Any], list[Trace]]:
    """{"sampled", "greedy", "ood": {"sampled", "greedy"}} and the sampled traces on iid. Of a mixture: of the mean over its
    environments, and under "environments" the same of each."""
    result: dict[str, Any] = _empty(ood)
    if bench.mixture:
        result["environments"] = {name: _empty(ood) for name in bench.environments}
    kept: list[Trace] = []
    for split in ("iid", "ood") if ood else ("iid",):
        for mode in ("sampled", "greedy") if greedy else ("sampled",):
            report = partial(progress, f"{split}, {mode}") if progress else None
            summary, traces = evaluate(bench, split, tasks, mode == "greedy", report, temperature)
            parts = summary.pop("environments", {})
            (result if split == "iid" else result["ood"])[mode] = summary
            for name, own in parts.items():
                place = result["environments"][name]
                (place if split == "iid" else place["ood"])[mode] = own
            if split == "iid" and mode == "sampled":
                kept = traces
    return result, kept


def _empty(ood: bool) -> dict[str, Any]:
    return {"ood": {}} if ood else {}
