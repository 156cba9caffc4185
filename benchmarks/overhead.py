"""What a method costs: whole training steps with and without it, in pairs, from the same weights, on the same draws.

    python benchmarks/overhead.py                 # aem, reuserl, envrl, eppo; --pairs 15 each
    python benchmarks/overhead.py aem --json

Both arms of a pair start from one snapshot (weights, optimiser, curriculum), so they play the same episodes token by token
and differ in the method's work and in the update alone. Which arm goes first alternates. The snapshot moves on by a plain
step after each pair, so that the policy learns as in a run. ReuseRL's buffer is filled beforehand with 512 sequences of 50
actions. EPPO is measured on two environments with four updates a batch, the others on the demo.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import closing
from typing import Any

import numpy as np

from assay.build import build, build_learner
from assay.cli.layers import preset_values
from assay.config import overlay, resolve
from assay.rng import generator
from assay.stats import bca
from assay.train import Display, Trainer
from assay.warmstart import warm_start

MIXTURE = {"env": "babyai/GoToRedBallNoDists,babyai/GoToLocal", "updates_per_batch": 4}
METHODS: dict[str, dict[str, Any]] = {"aem": {}, "reuserl": {}, "envrl": {}, "eppo": MIXTURE}
LIMITS = {"aem": 0.03, "reuserl": 0.05, "eppo": 0.03}  # aimed at, as a share of the plain step
BUFFER = (512, 50)  # sequences, actions each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(METHODS), help="which (default: all)")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args()
    found = {name: measure(name, options.pairs) for name in options.methods}
    if options.json:
        print(json.dumps(found))
        return
    for name, r in found.items():
        limit = f", aimed at: below {LIMITS[name]:.0%}" if name in LIMITS else ""
        print(
            f"{name:8s} {r['overhead']:+.1%} [{r['low']:+.1%}, {r['high']:+.1%}] of a plain step by processor time "
            f"({r['wall_overhead']:+.1%} by the clock; its own stages {r['own']:.2%}; plain {r['plain_s']:.2f} s, "
            f"{r['pairs']} pairs{limit})"
        )


def measure(name: str, pairs: int) -> dict[str, Any]:
    """Median over pairs of (with / without) - 1, by processor time of this process, with a bootstrap interval."""
    values = overlay(preset_values("demo"), METHODS[name])
    plain_config = resolve(values, name)
    config = resolve(values | {"method": ["grpo", name]}, name)
    with closing(build(plain_config)) as bench:
        warm_start(bench, Display())
        learner = build_learner(plain_config, bench.network, None)
        bench.sampler.load(learner)
        plain = Trainer(bench, learner, Display())
        bench.config = config
        other = Trainer(bench, learner, Display())
        prepare(name, other)
        spent = clocked(other.methods[1])
        snapshot = plain.state()
        ratios, walls, seconds, own = [], [], [], []
        for pair in range(pairs + 1):
            timed = {}
            spent[0] = 0.0
            for trainer in (plain, other) if pair % 2 else (other, plain):
                timed[trainer] = timed_step(trainer, snapshot)
            if pair:  # the first one warms caches up
                ratios.append(timed[other][0] / timed[plain][0])
                walls.append(timed[other][1] / timed[plain][1])
                seconds.append(timed[plain][1])
                own.append(spent[0] / timed[plain][0])
            load(plain, snapshot)
            plain.step()
            snapshot = plain.state()
    interval = bca(ratios, 0, "overhead", statistic=np.median, over="pairs")
    return {
        "overhead": statistics.median(ratios) - 1,
        "low": interval.low - 1,
        "high": interval.high - 1,
        "wall_overhead": statistics.median(walls) - 1,
        "own": statistics.median(own),
        "plain_s": statistics.median(seconds),
        "pairs": pairs,
    }


def clocked(method: Any) -> list[float]:
    """[processor seconds spent in the method's own stages], added to as they run."""
    spent = [0.0]

    def wrap(stage: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return stage(*arguments)
            finally:
                spent[0] += time.process_time() - began

        return timed

    for stage in ("rows", "reward", "modulate", "streams"):
        setattr(method, stage, wrap(getattr(method, stage)))
    return spent


def timed_step(trainer: Trainer, snapshot: Any) -> tuple[float, float]:
    """(processor seconds, seconds) of a step from the snapshot."""
    load(trainer, snapshot)
    cpu, clock = time.process_time(), time.perf_counter()
    trainer.step()
    return time.process_time() - cpu, time.perf_counter() - clock


def load(trainer: Trainer, snapshot: Any) -> None:
    """Weights, optimiser, curriculum and counts; the methods keep what they remember."""
    tensors, state = snapshot
    trainer.learner.load_state_dict({"tensors": tensors, "json": state["learner"]})
    trainer.curriculum.load_state_dict(state["curriculum"])
    trainer.spent = dict(state["spent"])
    trainer.bench.sampler.load(trainer.learner)


def prepare(name: str, trainer: Trainer) -> None:
    """ReuseRL with a buffer that is full."""
    if name != "reuserl":
        return
    count, length = BUFFER
    draws = generator(0, "overhead").integers(0, 3, (count, length))  # left, right, forward: what walking is made of
    method: Any = trainer.methods[1]
    for library in method.libraries.values():
        library.buffer = [tuple(int(symbol) for symbol in sequence) for sequence in draws]


if __name__ == "__main__":
    main()
