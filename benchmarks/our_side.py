"""Assay's whole training step on the benchmark's environment, run by step.py; prints one JSON object.

Nothing is stripped: the objects are those that `assay train` builds, the step is `Trainer.step` (collect from a real
worker process, rows, advantages, update, reload of the sampler). Only the run directory is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

from measure import matrix_rate

WORLD = "world:World"


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "env": WORLD,
        "env_args": {"turns": options.turns},
        "method": ["grpo" if options.rollouts > 1 else "reinforce++"],  # a group of one has no advantage under GRPO
        "model": str(options.model),
        "tasks_per_step": options.prompts,
        "rollouts_per_task": options.rollouts,
        "learning_rate": 1e-6,
        "warmup_steps": 0,
        "max_turn_tokens": 8,
        "max_episode_tokens": 2048,
        "steps": options.warmup + options.steps,
        "runtime": {"concurrency": min(128, options.prompts * options.rollouts)},
    }


def counts_of(batch: Any) -> dict[str, int]:
    """What was really produced: episodes, turns, sampled tokens, and all others up to the last answer."""
    traces = batch.traces
    closings = sum(len(trace.turns[-1].closing_ids) for trace in traces)
    sampled = sum(trace.sampled_tokens for trace in traces)
    return {
        "episodes": len(traces),
        "turns": sum(len(trace.turns) for trace in traces),
        "sampled_tokens": sampled,
        "other_tokens": sum(trace.length for trace in traces) - closings - sampled,
    }


def cpu_s() -> float:
    """Processor seconds of this process and of the environment's worker so far."""
    ticks = 0
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from assay.build import build, build_learner
    from assay.config import resolve
    from assay.train import Display, Trainer

    bench = build(resolve(configuration(options), "benchmark"))
    try:
        rate = matrix_rate()
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer = Trainer(bench, build_learner(bench.config, bench.network, None), Display())
        records, tasks = [], []
        for _ in range(options.warmup + options.steps):
            cpu = cpu_s()
            metrics, timings, batch = trainer.step()
            tasks += [group.task.id for group in batch.groups]
            record = {**counts_of(batch), "cpu_s": cpu_s() - cpu, "collect_s": timings["total_s"]}
            record |= {"trained_tokens": int(metrics["tokens_trained"])}
            records.append({**record, "step_s": timings["step_s"], "update_s": timings["update_s"]})
    finally:
        bench.close()
    return {
        "matrix_flops": rate,
        "start_bytes": start * 1024,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "worker_peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "tasks": tasks,
        "steps": records[options.warmup :],
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    for name, default in (("turns", 5), ("prompts", 16), ("rollouts", 8), ("steps", 1), ("warmup", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


if __name__ == "__main__":
    print(json.dumps(measure(parser().parse_args())))
