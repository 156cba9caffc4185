"""Resident memory of a training run over its steps: does it grow?

    python benchmarks/memory.py [--steps 200] [--json]

A whole run, with its run directory (metrics, traces, checkpoints), on the small environment of the step benchmark. Prints
memory at the first step, the peak, the end, and the slope over the second half, where caches have filled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from policy import make_policy

from assay.protocols import Metrics
from assay.train import Display, train

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Of this process now. Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Watch(Display):
    """Resident memory after every step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def step(self, metrics: Metrics, timings: Metrics) -> None:
        self.bytes.append(resident_bytes())
        if len(self.bytes) % 50 == 0:
            print(f"step {len(self.bytes)}: {self.bytes[-1] / 1e6:.1f} MB", file=sys.stderr, flush=True)


def summary(samples: list[int]) -> dict[str, float]:
    """`slope_bytes_per_step` is a least-squares line through the second half of the steps."""
    half = np.array(samples[len(samples) // 2 :], float)
    slope = float(np.polyfit(np.arange(len(half)), half, 1)[0]) if len(half) > 1 else 0.0
    return {
        "steps": len(samples),
        "start_bytes": samples[0],
        "peak_bytes": max(samples),
        "end_bytes": samples[-1],
        "slope_bytes_per_step": slope,
    }


def configuration(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "env": "world:World",
        "env_args": {"turns": options.turns},
        "model": str(folder / "policy"),
        "out": str(folder / "run"),
        "steps": options.steps,
        "tasks_per_step": 4,
        "rollouts_per_task": 4,
        "learning_rate": 1e-6,
        "max_turn_tokens": 8,
        "evaluation": {"tasks": 0},
        "runtime": {"concurrency": 16},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, and nothing else")
    options = parser.parse_args()
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        make_policy(Path(folder) / "policy")
        train(configuration(Path(folder), options), watch, "benchmark")
    result = summary(watch.bytes)
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['steps']} steps: start {result['start_bytes'] / 1e6:.1f} MB, peak {result['peak_bytes'] / 1e6:.1f} MB, "
            f"end {result['end_bytes'] / 1e6:.1f} MB, slope {result['slope_bytes_per_step'] / 1e3:.1f} kB a step"
        )


if __name__ == "__main__":
    main()
