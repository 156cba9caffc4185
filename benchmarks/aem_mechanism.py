"""Does AEM work for the reason that it gives? Ablations and mechanism on a tiny policy, on a CPU.

    python benchmarks/aem_mechanism.py             # all of it; killed and started again, it goes on
    python benchmarks/aem_mechanism.py --tiny      # a minute, to see that it runs

Arms, each with the same seeds and tasks, on one warm start with failures in the majority at first:

    host      GRPO alone                         reversed  lam = -1
    aem       as in the paper                    shuffled  coefficients permuted inside their group
    trace     compared inside one trace          batch     compared over the whole batch
    negative  aem, answers with A(alpha - 1) > 0 dropped: entropy should rise against aem
    positive  aem, answers with A(alpha - 1) < 0 dropped: entropy should fall against aem
    rising    host, only answers with A (S - sum of token entropies) > 0: a control of the drift formula by itself
    falling   host, only answers with A (S - sum of token entropies) < 0

S is the answer's surprisal, minus its summed log-probs. The proxy check asks whether alpha - 1 tells the relative
surprisal H(s) - S(a|s), with H(s) by Monte Carlo: answers are drawn again from the state of a recorded answer and their
summed token entropies averaged.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy import stats

from assay.build import Bench, build, build_learner
from assay.config import resolve
from assay.files import beside
from assay.methods.aem import Responses, coefficients
from assay.protocols import Draw, Method, Metrics, Sampling, Setting
from assay.rng import generator
from assay.rows import Batch, Row, build_rows, sampler_column
from assay.train import Display, Trainer, train
from assay.warmstart import warm_start

ROOT = Path(__file__).resolve().parents[1]
SETTINGS: dict[str, Any] = {
    "env": "babyai/GoToRedBallNoDists",
    "model": "tiny-300k",
    "steps": 20,
    "tasks_per_step": 4,
    "rollouts_per_task": 8,
    "learning_rate": 5e-4,
    "max_turn_tokens": 4,
    "warm_start": {"episodes": 300, "noise": 0.6, "passes": 4, "learning_rate": 3e-3, "from_scratch": True},
    "evaluation": {"tasks": 0},
    "runtime": {"traces_every": 0, "keep_checkpoints": 1, "checkpoint_every": 1000, "guard": False},
}
KEPT = ("success", "entropy", "turns", "aem_range", "aem_active", "aem_min", "aem_max", "aem_shift")


class Permuted(Method):
    """AEM's coefficients, dealt out at random among the answers of their group."""

    name = "shuffled"

    def bind(self, setting: Setting) -> Sequence[str]:
        self.seed = setting.seed
        return ()

    def modulate(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        if not rows:
            return {}
        responses = Responses(rows)
        group = responses.groups("group")
        alpha = coefficients(responses.entropy("shuffled"), group)
        draws = generator(self.seed, "shuffled", rows[0].trace.step)
        for g in range(int(group.max()) + 1):
            own = np.flatnonzero(group == g)
            alpha[own] = alpha[draws.permutation(own)]
        responses.write("advantage", responses.column("advantage") * alpha[responses.of])
        return {}


class Filtered(Method):
    """AEM without the answers whose A(alpha - 1) has the other sign."""

    sign: ClassVar[float]

    def modulate(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        if not rows:
            return {}
        responses = Responses(rows)
        alpha = coefficients(responses.entropy(self.name), responses.groups("group"))
        advantage = responses.column("advantage")
        kept = responses.mean(advantage) * (alpha - 1.0) * self.sign > 0
        responses.write("advantage", advantage * (alpha * kept)[responses.of])
        return {"aem_kept": float(np.mean(kept))}


class Negative(Filtered):
    name, sign = "negative", -1.0


class Positive(Filtered):
    name, sign = "positive", 1.0


class Rising(Method):
    """The host's advantage on the answers that by the drift formula, A (S - H), raise entropy; H is taken to be the sum
    of the answer's token entropies, which has the same mean."""

    name = "rising"
    sign: ClassVar[float] = 1.0

    def modulate(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        if not rows:
            return {}
        responses = Responses(rows)
        surprisal = -np.concatenate([sampler_column(row, "logprobs") for row in rows]).astype(np.float64)
        advantage = responses.column("advantage")
        drift = responses.mean(advantage) * responses.mean(surprisal - responses.column("entropy"))
        kept = drift * self.sign > 0
        responses.write("advantage", advantage * kept[responses.of])
        return {"aem_kept": float(np.mean(kept))}


class Falling(Rising):
    name, sign = "falling", -1.0


ARMS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "host": (["grpo"], {}),
    "aem": (["grpo", "aem"], {"aem": {}}),
    "negative": (["grpo", "aem_mechanism:Negative"], {}),
    "positive": (["grpo", "aem_mechanism:Positive"], {}),
    "rising": (["grpo", "aem_mechanism:Rising"], {}),
    "falling": (["grpo", "aem_mechanism:Falling"], {}),
    "reversed": (["grpo", "aem"], {"aem": {"lam": -1.0}}),
    "shuffled": (["grpo", "aem_mechanism:Permuted"], {}),
    "trace": (["grpo", "aem"], {"aem": {"scope": "trace"}}),
    "batch": (["grpo", "aem"], {"aem": {"scope": "batch"}}),
}


# ------------------------------------------------------------------------------------------------------------ the parts


def learn(arm: str, seed: int, settings: dict[str, Any], work: Path) -> dict[str, list[float]]:
    """Curves of one run; the run is kept for `proxy`."""
    out = work / f"{arm}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    method, args = ARMS[arm]
    train({**settings, "method": method, "method_args": args, "seed": seed, "out": str(out)})
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {name: [line[name] for line in lines] for name in (*KEPT, "aem_kept") if name in lines[0]}


def proxy(seed: int, settings: dict[str, Any], states: int, samples: int) -> dict[str, Any]:
    """One batch of the policy as it stands: alpha - 1 against the Monte-Carlo relative surprisal of some answers."""
    config = resolve({**settings, "seed": seed, "method": ["grpo"]}, "aem_mechanism")
    with closing(build(config)) as bench:
        warm_start(bench, Display())
        learner = build_learner(config, bench.network, None)
        bench.sampler.load(learner)
        rows = build_rows(Trainer(bench, learner, Display()).collect().batch.traces, bench.layout)
        for row in rows:
            row.columns["entropy"] = sampler_column(row, "entropies")
            row.columns["surprisal"] = -sampler_column(row, "logprobs")
        responses = Responses(rows)
        alpha = coefficients(responses.entropy("aem"), responses.groups("group"))
        length = np.bincount(responses.of)
        surprisal = responses.mean(responses.column("surprisal")) * length
        summed = responses.entropy("aem") * length
        chosen = generator(seed, "states").permutation(len(alpha))[:states]
        state = np.array([entropy_of_state(bench, rows, responses, int(i), seed, samples) for i in chosen])
    group = responses.groups("group")
    together = [float(np.cov(alpha[group == g], surprisal[group == g])[0, 1]) for g in range(int(group.max()) + 1)]
    return {
        "excess": (alpha[chosen] - 1.0).tolist(),
        "relative": (state - surprisal[chosen]).tolist(),  # > 0: less surprising than the state's answers are
        "expected": (state - summed[chosen]).tolist(),  # the same without the noise of drawing tokens
        "state_entropy": state.tolist(),
        "length": length[chosen].tolist(),  # tokens of the answer
        "falling_groups": float(np.mean(np.array(together) < 0)),  # Cov(alpha, S) < 0
        "groups": len(together),
    }


def entropy_of_state(bench: Bench, rows: list[Row], responses: Responses, i: int, seed: int, samples: int) -> float:
    """H of the answers to the state before response i, nats: mean of the summed token entropies of fresh answers."""
    row = rows[responses.row[i]]
    first = int(row.at[np.flatnonzero(row.turns == responses.turn[i])[0]])
    sampling = Sampling(bench.config.temperature, bench.config.max_turn_tokens, bench.renderer.stop_ids)
    draws = generator(seed, "answers", i).random((samples, sampling.max_new_tokens))
    total = 0.0
    for start in range(0, samples, bench.sampler.capacity):
        contexts = [bench.sampler.open() for _ in draws[start : start + bench.sampler.capacity]]
        for context, draw in zip(contexts, draws[start:], strict=False):
            bench.sampler.submit(Draw(context, row.ids[:first], sampling, draw))
        done = 0
        while done < len(contexts):
            for _, completion in bench.sampler.tick():
                total += float(np.sum(completion.entropies, dtype=np.float64))
                done += 1
        for context in contexts:
            bench.sampler.close(context)
    return total / samples


# ------------------------------------------------------------------------------------------------------------- figures


def difference(curves: dict[str, Any], a: str, b: str, metric: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Arm a less arm b, mean of the last third of the steps, paired by seed; 95 % t interval over seeds."""
    values = []
    for seed in seeds:
        if f"{a}-{seed}" in curves and f"{b}-{seed}" in curves:
            late = [np.array(curves[f"{arm}-{seed}"][metric]) for arm in (a, b)]
            third = max(len(late[0]) // 3, 1)
            values.append(float(late[0][-third:].mean() - late[1][-third:].mean()))
    found: dict[str, Any] = {"of": f"{a} - {b}", "metric": metric, "seeds": len(values), "each": values}
    if len(values) > 1:
        mean, half = np.mean(values), stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
        found |= {"mean": float(mean), "low": float(mean - half), "high": float(mean + half)}
        found["verdict"] = "inconclusive" if abs(mean) <= half else "higher" if mean > 0 else "lower"
    return found


def pearson(x: Any, y: Any) -> float | None:
    """None where one of them does not vary."""
    return float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) and np.ptp(y) else None


def summary(curves: dict[str, Any], proxies: dict[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    pairs = [("aem", "host"), ("reversed", "aem"), ("shuffled", "aem"), ("trace", "aem"), ("batch", "aem")]
    found: dict[str, Any] = {
        "learning": [difference(curves, a, b, metric, seeds) for a, b in pairs for metric in ("success", "entropy")],
        "filter": [
            difference(curves, a, b, "entropy", seeds)
            for a, b in (
                ("negative", "aem"),
                ("positive", "aem"),
                ("negative", "positive"),
                ("rising", "host"),
                ("falling", "host"),
                ("rising", "falling"),
            )
        ],
        "proxy": {},
    }
    for when in ("start", "trained"):
        parts = [proxies[key] for key in sorted(proxies) if key.startswith(when)]
        if parts:
            excess, relative, expected, length = (
                np.concatenate([p[name] for p in parts]) for name in ("excess", "relative", "expected", "length")
            )
            found["proxy"][when] = {
                "states": len(excess),
                "pearson": pearson(excess, relative),
                "sign_agreement": float(np.mean(np.sign(excess) == np.sign(relative))),
                "pearson_without_token_noise": pearson(excess, expected),
                "pearson_with_length": pearson(excess, length),
                "relative_with_length": pearson(relative, length),
                "variance_ratio": float(np.var(expected) / np.var(relative)),  # below 1: summed entropy is less noisy
                "falling_groups": float(np.average([p["falling_groups"] for p in parts])),
            }
    return found


CURVES = (  # arm, colour, line
    ("host", "0.6", "-"),
    ("aem", "C0", "-"),
    ("negative", "C2", "-"),
    ("positive", "C3", "-"),
    ("rising", "C2", "--"),
    ("falling", "C3", "--"),
)


def draw(curves: dict[str, Any], proxies: dict[str, Any], found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "aem"
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for arm, colour, line in CURVES:
        own = [curve["entropy"] for key, curve in curves.items() if key.rsplit("-", 1)[0] == arm]
        if own:
            steps = np.arange(1, len(own[0]) + 1)
            left.plot(steps, np.mean(own, 0), ls=line, color=colour, label=f"{arm} ({len(own)} seeds)")
            left.fill_between(steps, np.min(own, 0), np.max(own, 0), color=colour, alpha=0.12, lw=0)
    left.set(title="Entropy with answers left out by sign", xlabel="step", ylabel="nats per token")
    left.legend(fontsize=8, frameon=False)
    known = [d for d in found["learning"] if d["metric"] == "success" and "mean" in d]
    for y, d in enumerate(reversed(known)):
        middle.plot([100 * d["low"], 100 * d["high"]], [y, y], color="C0")
        middle.plot([100 * v for v in d["each"]], [y] * len(d["each"]), "o", color="0.6", ms=4)
        middle.plot(100 * d["mean"], y, "o", color="C0")
    middle.axvline(0, color="0.8", zorder=0)
    middle.set_yticks(range(len(known)), [d["of"] for d in reversed(known)])
    middle.set(title="Success, last third of the steps", xlabel="points; 95 % interval over seeds")
    for when, colour in (("start", "C0"), ("trained", "C1")):
        parts = [p for key, p in proxies.items() if key.startswith(when)]
        if parts:
            x, y = (np.concatenate([p[name] for p in parts]) for name in ("relative", "excess"))
            label = f"{when}: r = {found['proxy'][when]['pearson'] or 0.0:.2f}"
            right.plot(x, y, ".", color=colour, alpha=0.6, label=label)
    right.set(title="Coefficient and relative surprisal", xlabel="H(s) - S(a|s), nats", ylabel="alpha - 1")
    if right.lines:
        right.legend(fontsize=8, frameon=False)
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="two steps, two seeds, nothing to conclude from")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "aem-mechanism", help="runs and what is done")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "results" / "aem-mechanism.json")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "img" / "aem-mechanism.svg")
    args = parser.parse_args()
    settings, states, samples, seeds = SETTINGS, 64, 64, list(range(args.seeds))
    if args.tiny:
        small = {"steps": 2, "tasks_per_step": 2, "rollouts_per_task": 3, "warm_start": {"episodes": 0}}
        settings, states, samples, seeds = {**SETTINGS, **small}, 4, 8, [0, 1]
        args.work, args.json, args.figure = (args.work / "tiny" / name for name in ("", "tiny.json", "tiny.svg"))
    args.work.mkdir(parents=True, exist_ok=True)
    store = args.work / "done.json"
    done: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    if done.setdefault("settings", settings) != settings:
        parser.error(f"{store} is of other settings: remove it, or give another --work")
    curves, proxies = done.setdefault("curves", {}), done.setdefault("proxy", {})

    for seed in seeds:
        for arm in ARMS:
            if f"{arm}-{seed}" not in curves:
                began = time.perf_counter()
                curves[f"{arm}-{seed}"] = learn(arm, seed, settings, args.work)
                keep(done, store)
                print(f"{arm} {seed}: {time.perf_counter() - began:.0f} s", flush=True)
        trained = {**settings, "model": str(args.work / f"aem-{seed}"), "warm_start": {"episodes": 0}}
        for when, start in (("start", settings), ("trained", trained)):
            if f"{when}-{seed}" not in proxies:
                proxies[f"{when}-{seed}"] = proxy(seed, start, states, samples)
                keep(done, store)
        found = summary(curves, proxies, seeds)
        keep({"summary": found, **done}, args.json)
        draw(curves, proxies, found, args.figure)
    print(json.dumps(found, indent=1))


def keep(value: dict[str, Any], path: Path) -> None:
    """Beside, then renamed: a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = beside(path)
    unfinished.write_text(json.dumps(rounded(value)) + "\n")
    unfinished.replace(path)


def rounded(value: Any) -> Any:
    """Floats to six significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
