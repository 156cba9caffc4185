"""What ReuseRL costs: its dictionary against the slow way, and its share of a demo step with a full buffer.

    python benchmarks/reuserl.py [--pairs 3] [--steps 20] [--json]

First 512 sequences of 50 actions, of routines with noise: the dictionary of assay.methods.phrases and that of the tests'
reference, in turns, which must agree; the ratio is the median over pairs. Then the demo with `--method grpo,reuserl`: the
seconds that the method takes and those of the whole step, in every step that began with a full buffer. One thread; beside
wall time stands processor time, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEMO = HERE.parent / "src" / "assay" / "presets" / "demo.toml"
SEQUENCES, ACTIONS = 512, 50
NOISE = 0.5  # share of actions that belong to no routine
Timed = tuple[float, float]  # wall, processor


def sequences(symbols: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    routines = [tuple(rng.randrange(symbols) for _ in range(rng.randint(2, 6))) for _ in range(8)]
    found = []
    for _ in range(SEQUENCES):
        s: tuple[int, ...] = ()
        while len(s) < ACTIONS:
            s += (rng.randrange(symbols),) if rng.random() < NOISE else rng.choice(routines)
        found.append(s[:ACTIONS])
    return found


def timed(work: Callable[[], Any]) -> tuple[Timed, Any]:
    wall, processor = time.perf_counter(), time.process_time()
    result = work()
    return (time.perf_counter() - wall, time.process_time() - processor), result


def against_reference(pairs: int, symbols: int) -> dict[str, Any]:
    sys.path.insert(0, str(HERE.parent / "tests" / "methods"))
    from phrase_reference import merges

    from assay.methods.phrases import Cluster, Code, extract

    fast, slow = [], []
    for seed in range(pairs):
        data = sequences(symbols, seed)
        seconds, found = timed(lambda data=data: extract(Cluster(data, symbols, 4), Code(symbols, 4)))
        fast.append(seconds)
        seconds, reference = timed(lambda data=data: merges(data, symbols, 4)[0])
        slow.append(seconds)
        assert list(found.phrases) == reference, "the two dictionaries differ"
    return {
        "symbols": symbols,
        "phrases": len(found.phrases),
        "ours_s": statistics.median(wall for wall, _ in fast),
        "ours_cpu_s": statistics.median(cpu for _, cpu in fast),
        "reference_cpu_s": statistics.median(cpu for _, cpu in slow),
        "cpu_ratios": [round(b[1] / a[1], 1) for a, b in zip(fast, slow, strict=True)],
    }


def of_a_step(steps: int) -> dict[str, Any]:
    from assay.build import build, build_learner
    from assay.config import resolve
    from assay.train import Display, Trainer
    from assay.warmstart import warm_start

    values = tomllib.loads(DEMO.read_text()) | {"method": ["grpo", "reuserl"], "steps": steps, "planned_steps": steps}
    config = resolve(values, str(DEMO))
    bench = build(config)
    try:
        warm_start(bench, Display())
        bench.sampler.load(build_learner(config, bench.network, None))
        trainer = Trainer(bench, build_learner(config, bench.network, None), Display())
        method = trainer.methods[1]
        price, spent = method.reward, []

        def reward(batch: Any, rows: Any) -> Any:
            seconds, metrics = timed(lambda: price(batch, rows))
            spent.append(seconds)
            return metrics

        method.reward = reward
        pairs: list[tuple[Timed, Timed]] = []
        (library,) = method.libraries.values()
        for _ in range(steps):
            full = len(library.buffer) == method.buffer
            seconds, (metrics, *_) = timed(trainer.step)
            if full:
                pairs.append((spent[-1], seconds))
    finally:
        bench.close()
    if not pairs:
        raise SystemExit(f"the buffer was not full in {steps} steps: give more --steps")
    lengths = [len(s) for s in library.buffer]
    return {
        "steps": len(pairs),
        "actions": statistics.mean(lengths),
        "phrases": metrics["reuserl_phrases"],
        "method_s": statistics.median(own[0] for own, _ in pairs),
        "method_cpu_s": statistics.median(own[1] for own, _ in pairs),
        "step_s": statistics.median(step[0] for _, step in pairs),
        "step_cpu_s": statistics.median(step[1] for _, step in pairs),  # of this process: without environment workers
        "share": statistics.median(own[0] / step[0] for own, step in pairs),
        "largest_share": max(own[0] / step[0] for own, step in pairs),
        "cpu_share": statistics.median(own[1] / step[1] for own, step in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, and nothing else")
    options = parser.parse_args()
    results: dict[str, Any] = {"dictionary": [against_reference(options.pairs, k) for k in (7, 17)]}
    results["demo"] = demo = of_a_step(options.steps)
    for one in results["dictionary"]:
        one["share_of_demo_step"] = one["ours_cpu_s"] / demo["step_cpu_s"]
    if options.json:
        print(json.dumps(results))
        return
    for one in results["dictionary"]:
        print(
            f"{SEQUENCES} sequences of {ACTIONS} actions, {one['symbols']} symbols, {one['phrases']} phrases: "
            f"{1e3 * one['ours_cpu_s']:.1f} ms, the slow way {one['reference_cpu_s']:.2f} s (processor time); ratios "
            f"{one['cpu_ratios']}; {100 * one['share_of_demo_step']:.1f} % of a demo step"
        )
    print(
        f"demo, {demo['steps']} steps with a full buffer of {demo['actions']:.1f} actions on average, "
        f"{demo['phrases']:.0f} phrases: {1e3 * demo['method_cpu_s']:.1f} ms of {demo['step_cpu_s']:.2f} s a step, "
        f"{100 * demo['cpu_share']:.2f} % (processor time, median over pairs); by the clock {100 * demo['share']:.2f} %, "
        f"at most {100 * demo['largest_share']:.2f} %"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
