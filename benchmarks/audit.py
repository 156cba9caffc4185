"""Time and memory of an audit of many turns: our Parquet, and the JSON Lines of verifiers.

    python benchmarks/audit.py [--turns 100000] [--tokens 200] [--formats assay verifiers] [--json]

Files are made first: episodes of ten turns, half of each turn's tokens sampled, groups of eight. Each is then read and
checked in a process of its own, on one thread; its peak of resident memory is what the system counted, imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

TURNS = 10  # of one episode
GROUP = 8
VOCABULARY = 150_000
UNIT = 1024 if sys.platform == "linux" else 1  # of ru_maxrss


def turns(rng: np.random.Generator, tokens: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(context, answer, log-probs of the answer) without end."""
    while True:
        ids = rng.integers(3, VOCABULARY, tokens).astype(np.int32)
        half = tokens // 2
        yield ids[:half], ids[half:], -rng.exponential(0.3, tokens - half).astype(np.float32)


def make_assay(path: Path, episodes: int, tokens: int) -> None:
    from assay.trace import Outcome, TaskKey, Trace, Turn
    from assay.trace_store import write_traces

    rng = np.random.default_rng(0)
    source = turns(rng, tokens)
    prompt, none = np.arange(3, 35, dtype=np.int32), np.zeros(0, np.int32)

    def turn() -> Turn:
        context, ids, logprobs = next(source)
        provenance = np.full(len(context), 2, np.uint8), np.zeros(len(ids), np.uint8)
        fields = (context, provenance[0], ids, provenance[1], logprobs, np.abs(logprobs), none)
        return Turn(*fields, "you see a door", "open door", 0.0, True, "anchor", "open", False, 0)

    traces = []
    for i in range(episodes):
        win = rng.random() < 0.5
        task = TaskKey("grid", "1", "train", i // GROUP, f"{i // GROUP:x}")
        outcome = Outcome.SUCCESS if win else Outcome.FAILURE
        own = tuple(turn() for _ in range(TURNS))
        step, slot = 1 + i // (GROUP * 1000), i // GROUP % 1000
        provenance = np.ones(len(prompt), np.uint8)
        traces.append(
            Trace(task, step, 0, slot, i % GROUP, prompt, provenance, own, "the end", float(win), outcome, 1.0)
        )
    write_traces(path, traces)


def make_verifiers(path: Path, episodes: int, tokens: int) -> None:
    rng = np.random.default_rng(0)
    source = turns(rng, tokens)
    with path.open("w") as file:
        for i in range(episodes):
            nodes: list[dict[str, Any]] = []
            for _ in range(TURNS):
                context, ids, logprobs = next(source)
                nodes += [
                    _node(nodes, "user", "you see a door", context),
                    _node([*nodes, {}], "assistant", "open", ids),
                ]
                nodes[-1] |= {"sampled": True, "mask": [True] * len(ids), "logprobs": np.round(logprobs, 4).tolist()}
                nodes[-1]["logprobs"] = [round(value, 4) for value in nodes[-1]["logprobs"]]
            rewards = {"won": {"score": float(rng.random() < 0.5), "weight": 1.0}}
            task = {"type": "Grid", "data": {"idx": i // GROUP}, "key": f"grid-{i // GROUP}"}
            trace = {"id": f"t{i}", "task": task, "nodes": nodes, "rewards": rewards, "errors": [], "ok": True}
            episode = {"id": f"e{i}", "task": task, "group": {"id": f"g{i // GROUP}"}, "traces": [trace]}
            file.write(json.dumps(episode) + "\n")


def _node(before: list[dict[str, Any]], role: str, text: str, ids: np.ndarray) -> dict[str, Any]:
    parent = len(before) - 1 if before else None
    flags = {"mask": [False] * len(ids), "is_content": [True] * len(ids), "logprobs": []}
    return {"parent": parent, "message": {"role": role, "content": text}, "token_ids": ids.tolist(), **flags}


def measure(path: Path) -> dict[str, Any]:
    """Read and check, here and now."""
    from assay.audit.checks import audit
    from assay.audit.readers import read

    began = time.perf_counter(), time.process_time()
    rollouts = read(path)
    done = time.perf_counter(), time.process_time()
    after_read = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT
    report = audit(rollouts)
    return {
        "format": rollouts.format,
        "samples": len(rollouts),
        "tokens": len(rollouts.tokens["ids"].values),
        "file_bytes": path.stat().st_size,
        "read_s": round(done[0] - began[0], 2),
        "check_s": round(time.perf_counter() - done[0], 2),
        "read_cpu_s": round(done[1] - began[1], 2),  # what a core that does nothing else would take
        "check_cpu_s": round(time.process_time() - done[1], 2),
        "peak_read_bytes": after_read,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT,
        "findings": len(report.findings),
    }


MAKERS = {"assay": (make_assay, "traces.parquet"), "verifiers": (make_verifiers, "traces.jsonl")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=200, help="of a turn, half of them sampled")
    parser.add_argument("--formats", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, and nothing else")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.formats:
            make, file = MAKERS[name]
            path = Path(folder) / file
            make(path, options.turns // TURNS, options.tokens)
            print(f"{name}: {path.stat().st_size / 1e6:.0f} MB made", file=sys.stderr, flush=True)
            command = [sys.executable, __file__, "--measure", str(path)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            results[name] = json.loads(
                subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
            )
            path.unlink()
    if options.json:
        print(json.dumps(results))
        return
    for name, r in results.items():
        print(
            f"{name:<10} {r['samples']:,} samples, {r['tokens'] / 1e6:.1f} M tokens, {r['file_bytes'] / 1e6:.0f} MB: "
            f"read {r['read_s']:.1f} s ({r['read_cpu_s']:.1f} of the processor), checked {r['check_s']:.1f} s "
            f"({r['check_cpu_s']:.1f}), peak {r['peak_bytes'] / 2**30:.2f} GiB"
        )


if __name__ == "__main__":
    main()
