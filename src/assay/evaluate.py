"""Success on a fixed panel of held-out tasks, with an interval over tasks.

The panel of a split is its first N task ids, the same for every run, method and seed; its version is a hash of the task
keys, content included, so that two figures can be told to be of the same panel. No method takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from assay.build import Bench
from assay.protocols import UserError
from assay.rng import stable_hash
from assay.rollout import Job, Progress
from assay.stats import wilson
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
    """One episode on each task of the panel: (summary, traces). `summary` is `summarise`'s."""
    sizes = bench.pool.spec["sizes"]
    if split not in sizes:
        raise UserError(f"split {split!r} does not exist: the splits are {', '.join(sizes)}")
    driver = bench.driver(0.0 if greedy else temperature, PANEL_SEED, progress=progress)
    jobs = [Job(task, split, slot=slot) for slot, task in enumerate(panel(sizes[split], tasks))]
    traces = driver.collect(jobs, bench.sampler.version)
    return summarise(traces), traces


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


def evaluate_all(
    bench: Bench,
    tasks: int,
    ood: bool,
    greedy: bool,
    progress: Callable[[str, Progress], None] | None = None,
    temperature: float = 1.0,
) -> tuple[dict[str, Any], list[Trace]]:
    """{"sampled", "greedy", "ood": {"sampled", "greedy"}} and the sampled traces on iid."""
    result: dict[str, Any] = {"ood": {}} if ood else {}
    kept: list[Trace] = []
    for split in ("iid", "ood") if ood else ("iid",):
        for mode in ("sampled", "greedy") if greedy else ("sampled",):
            report = partial(progress, f"{split}, {mode}") if progress else None
            summary, traces = evaluate(bench, split, tasks, mode == "greedy", report, temperature)
            (result if split == "iid" else result["ood"])[mode] = summary
            if split == "iid" and mode == "sampled":
                kept = traces
    return result, kept
