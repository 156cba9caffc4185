"""Seconds a training step: Assay against TRL's `GRPOTrainer`, on the same episodes.

    python benchmarks/step.py                 turns 1, 5, 10 and 20, three pairs each; TRL in benchmarks/.venv-trl
    python benchmarks/step.py --no-trl        our side alone
    python benchmarks/step.py --json          one JSON object on standard output

Same environment, policy, tasks and counts of tokens on both sides (asserted for every step), fp32, AdamW, one thread, each
side in a process of its own, pairs alternating, one warm-up step each. A speed-up is the median over pairs; a pair in which
either side waited for the processor (wall time over DISTURBED times its processor time) counts only if all did, and the
report says how many are left. Beside wall time stands processor time, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from world import VOCABULARY

HERE = Path(__file__).parent
PEER = HERE / ".venv-trl"
REQUIREMENTS = HERE / "requirements-trl.txt"
COUNTS = ("episodes", "turns", "sampled_tokens", "other_tokens")
GRID_TURNS, GRID_ROLLOUTS = (5, 10, 20, 40), (1, 8, 32)
DISTURBED = 1.25
GRID_TURN = 5  # turns while the group size varies


def peer_python() -> str:
    """The peer's interpreter; its environment is made when it is missing or its requirements have changed."""
    marker, wanted = PEER / "requirements.txt", REQUIREMENTS.read_text()
    python = str(PEER / "bin" / "python")
    if not marker.exists() or marker.read_text() != wanted:
        print(f"installing {REQUIREMENTS.name} into {PEER} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
        (PEER / ".gitignore").write_text("*\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)], check=True, stdout=2)
        marker.write_text(wanted)
    return python


def run(python: str, script: str, **options: Any) -> dict[str, Any]:
    """What a side prints, from a process of its own."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([python, str(HERE / script), *flags], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(flags)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def check_counts(ours: dict[str, Any], theirs: dict[str, Any], expected: dict[str, int]) -> None:
    """Both sides really did the work, and the same work."""
    for mine, peer in zip(ours["steps"], theirs["steps"], strict=True):
        for name in COUNTS:
            assert mine[name] == peer[name], f"{name}: ours {mine[name]}, TRL's {peer[name]}"
        # an episode that met its group's mean exactly has no gradient, and our learner leaves it out: rare, and bounded
        assert mine["trained_tokens"] >= 0.95 * mine["sampled_tokens"], "our side left out more than 5 % of the tokens"
        for name, value in expected.items():
            assert mine[name] == value, f"{name}: {mine[name]} where {value} was asked for"


def figures(results: list[dict[str, Any]], layer_parameters: int, head_parameters: int) -> dict[str, float]:
    """Medians over all measured steps of a side.

    The shares are of the matrix-product rate in the same process: the products that the tokens need at least once (two
    operations a parameter, the head at sampled tokens only, threefold for the update), over the seconds they took.
    """
    steps = [step | {"rate": result["matrix_flops"]} for result in results for step in result["steps"]]
    values: dict[str, list[float]] = {}
    for step in steps:
        sampled, tokens = step["sampled_tokens"], step["sampled_tokens"] + step["other_tokens"]
        operations = 2 * (layer_parameters * tokens + head_parameters * sampled)
        for name, value in {
            **{name: step[name] for name in ("step_s", "cpu_s", "collect_s", "update_s", *COUNTS)},
            "sampled_tokens_per_s": sampled / step["collect_s"],
            "trained_tokens_per_s": tokens / step["update_s"],
            "collect_share": operations / step["collect_s"] / step["rate"],
            "update_share": 3 * operations / step["update_s"] / step["rate"],
            "matrix_gflops": step["rate"] / 1e9,
        }.items():
            values.setdefault(name, []).append(value)
    medians = {name: statistics.median(column) for name, column in values.items()}
    medians["start_bytes"] = max(result["start_bytes"] for result in results)
    medians["peak_bytes"] = max(result["peak_bytes"] for result in results)
    return medians


def compare(turns: int, options: argparse.Namespace, model: dict[str, Any], peer: str | None) -> dict[str, Any]:
    """Pairs of runs at one number of turns, ours and theirs in turn."""
    shape = {"model": model["folder"], "turns": turns, "prompts": options.prompts, "rollouts": options.rollouts}
    shape |= {"steps": options.steps}
    episodes = options.prompts * options.rollouts
    expected = {"episodes": episodes, "turns": episodes * turns, "sampled_tokens": episodes * turns * 4}
    ours, theirs, pairs = [], [], []
    for pair in range(options.pairs):
        ours.append(run(sys.executable, "our_side.py", **shape))
        if peer is None:
            check_counts(ours[-1], ours[-1], expected)
            continue
        theirs.append(run(peer, "trl_side.py", tasks=json.dumps(ours[-1]["tasks"]), **shape))
        check_counts(ours[-1], theirs[-1], expected)
        pairs.append(_pair(ours[-1], theirs[-1]))
        _say(f"{turns:3} turns, pair {pair + 1}: {pairs[-1]}")
    result: dict[str, Any] = {"ours": figures(ours, model["layers"], model["head"])}
    if pairs:
        result |= {"trl": figures(theirs, model["layers"], model["head"]), "pairs": pairs}
    return result


def _pair(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    mine, peer = (
        {name: statistics.median(step[name] for step in side["steps"]) for name in ("step_s", "cpu_s")}
        for side in (ours, theirs)
    )
    return {
        "ours_s": round(mine["step_s"], 3),
        "trl_s": round(peer["step_s"], 3),
        "speedup": round(peer["step_s"] / mine["step_s"], 2),
        "cpu_speedup": round(peer["cpu_s"] / mine["cpu_s"], 2),
        "disturbed": any(side["step_s"] > DISTURBED * side["cpu_s"] for side in (mine, peer)),
    }


def speedups(pairs: list[dict[str, Any]], name: str) -> float:
    """Median over the pairs that were not disturbed, or over all if every one was."""
    quiet = [pair[name] for pair in pairs if not pair["disturbed"]]
    return statistics.median(quiet or [pair[name] for pair in pairs])


def grid(options: argparse.Namespace, model: dict[str, Any]) -> dict[str, Any]:
    """Our own time against turns, and against the group size."""
    out: dict[str, Any] = {"turns": {}, "rollouts": {}}
    cases = [("turns", turns, turns, options.rollouts) for turns in GRID_TURNS]
    cases += [("rollouts", rollouts, GRID_TURN, rollouts) for rollouts in GRID_ROLLOUTS]
    for axis, value, turns, rollouts in cases:
        result = run(
            sys.executable,
            "our_side.py",
            model=model["folder"],
            turns=turns,
            prompts=options.prompts,
            rollouts=rollouts,
            steps=options.steps,
        )
        out[axis][str(value)] = figures([result], model["layers"], model["head"])
        _say(f"ours, {turns} turns x {rollouts} rollouts: {out[axis][str(value)]['step_s']:.3f} s")
    return out


def describe(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        "turns  ours s (collect + update)   TRL s (collect + update)    speed-up  by CPU time"
        "   tokens/s sampled, trained   peak MB ours, TRL"
    ]
    for turns, case in report["turns"].items():
        ours, trl = case["ours"], case.get("trl")
        line = f"{turns:>5}  {ours['step_s']:6.2f} ({ours['collect_s']:5.2f} + {ours['update_s']:5.2f})"
        if trl:
            line += f"         {trl['step_s']:6.2f} ({trl['collect_s']:5.2f} + {trl['update_s']:5.2f})"
            line += f"      {report['speedup_vs_trl'][turns]:5.2f}x    {report['cpu_speedup_vs_trl'][turns]:5.2f}x   "
        line += f"   {ours['sampled_tokens_per_s']:9.0f} {ours['trained_tokens_per_s']:9.0f}"
        line += f"          {ours['peak_bytes'] / 1e6:6.0f}" + (f" {trl['peak_bytes'] / 1e6:6.0f}" if trl else "")
        lines.append(line)
        lines.append(
            f"       episodes, turns, sampled, other tokens a step on {'both sides' if trl else 'our side'}: "
            + ", ".join(f"{ours[name]:.0f}" for name in COUNTS)
        )
        if trl:
            lines.append(
                f"       pairs not disturbed by other work: {report['undisturbed_pairs'][turns]} of {len(case['pairs'])}"
            )
        for name, side in (("ours", ours), ("TRL", trl)):
            if side:
                lines.append(
                    f"       {name}: {side['collect_share']:.1%} of {side['matrix_gflops']:.0f} GFLOP/s in collecting, "
                    f"{side['update_share']:.1%} in updating"
                )
    for axis, cases in report.get("own", {}).items():
        lines.append(f"our step against {axis}: " + ", ".join(f"{k}: {v['step_s']:.2f} s" for k, v in cases.items()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 5, 10, 20])
    for name, default in (("pairs", 3), ("steps", 1), ("prompts", 16), ("rollouts", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-trl", action="store_true", help="our side alone")
    parser.add_argument("--no-grid", action="store_true", help="leave out our own time against turns and group size")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, and nothing else")
    options = parser.parse_args()
    peer = None if options.no_trl else peer_python()
    with tempfile.TemporaryDirectory() as folder:
        model = _model(Path(folder))
        turns = {str(turns): compare(turns, options, model, peer) for turns in options.turns}
        own = {} if options.no_grid else {"own": grid(options, model)}
    report = {
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "parameters": model["layers"] + 2 * model["head"],
        "prompts": options.prompts,
        "rollouts": options.rollouts,
        "turns": turns,
        "speedup_vs_trl": {k: speedups(case["pairs"], "speedup") for k, case in turns.items() if "pairs" in case},
        "cpu_speedup_vs_trl": {
            k: statistics.median(pair["cpu_speedup"] for pair in case["pairs"])
            for k, case in turns.items()
            if "pairs" in case
        },
        "undisturbed_pairs": {
            k: sum(not pair["disturbed"] for pair in case["pairs"]) for k, case in turns.items() if "pairs" in case
        },
        **own,
    }
    print(json.dumps(report) if options.json else describe(report))


def _model(folder: Path) -> dict[str, Any]:
    from policy import WIDTH, make_policy

    head = WIDTH * VOCABULARY
    return {"folder": folder, "head": head, "layers": make_policy(folder) - 2 * head}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
