"""At full size: the policies that RL starts from, made with the library's own learner, and what is measured of a policy.

SFT+ is cross-entropy on the answers of sft_data.py. SFT- is gradient ascent on that of the target (lambda = 1), with a floor
that the released code lacks: it stops where the cross-entropy has passed log V, that of knowing nothing. An adapter is merged
into the weights afterwards, so that RL's KL is to the policy that RL started from. A start is made and measured once, by
whichever cell comes first, and lies beside the cells' folders.

Otherwise than in the released code: end tokens are in the loss (its collator masks them as padding), and the learning rate
falls linearly to 0, which is the usual default of the trainer it calls (inferred).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from assay.build import Bench, build
from assay.config import resolve
from assay.envs.pairs import boxed
from assay.envs.quote import extract, norm
from assay.envs.registry import make
from assay.episode import Job
from assay.files import read_json, write_json
from assay.learner.saving import save_pretrained
from assay.learner.torch_learner import TorchLearner
from assay.model import Network
from assay.rng import stable_hash
from assay.rows import Row, Stream
from assay.studies.demystify.sft_data import Lines, maths_answers, quote_answers, read_lines, usable_lines
from assay.trace import Outcome, Provenance, TaskKey, Trace, Turn

VERSION = 1  # raise when the same settings would give another start
BATCH = {"quote": (8, 2), "maths": (4, 4)}  # rows, accumulation: 16 rows an update
PROMPT_ROOM = 1024  # tokens of an episode beside its answer
CHUNK = 1000  # answers that are sampled and measured at a time
RECORD_BYTES = 1 << 20
DECIDE = (  # settings that decide a start and what is measured of it
    *("task", "form", "start", "model", "model_hash", "lora_rank", "dtype", "device", "sft_steps", "sft_learning_rate"),
    *("mask_prompt", "lines_hash", "samples", "max_tokens", "temperature", "eval_temperature"),
)


def environment(settings: dict[str, Any], reward: str = "sparse") -> tuple[str, dict[str, Any]]:
    """(name, settings) of the task's environment."""
    if settings["task"] == "quote":
        return "quote", {"reward": reward}
    return "pairs", {"reward": "milestones" if reward == "dense" else "sparse", "form": settings["form"]}


def run_values(settings: dict[str, Any], seed: int, model: str, reward: str = "sparse") -> dict[str, Any]:
    """What every bench of a cell has in common, as a run's configuration; without an adapter."""
    name, values = environment(settings, reward)
    return {
        "env": name,
        "env_args": values,
        "model": model,
        "seed": seed,
        "max_turn_tokens": settings["max_tokens"],
        "max_episode_tokens": settings["max_tokens"] + PROMPT_ROOM,
        "temperature": settings["temperature"],
        "runtime": {
            "workers": 0,
            "concurrency": max(settings["rollouts"], 32),
            "device": settings["device"],
            "dtype": settings["dtype"],
        },
    }


def adapter(settings: dict[str, Any]) -> dict[str, Any]:
    """The configuration keys of a fresh adapter; none where all weights are trained."""
    rank = settings["lora_rank"]
    return {"lora_rank": rank, "lora_alpha": 2 * rank} if rank else {}


# ------------------------------------------------------------------------------------------------------------ starts


def start_of(settings: dict[str, Any], seed: int, place: Path) -> tuple[str, dict[str, Any]]:
    """(model, record) of the policy that RL starts from: {"sft": how it was made, "before": at the temperature of
    evaluations, "before_rl": at RL's}. Made below `place` if it is not there; processes that want the same one wait."""
    key = stable_hash(json.dumps([VERSION, seed, *(settings[name] for name in DECIDE)]))
    folder = place / f"start-{settings['task']}-{settings['start']}-s{seed}-{key}"
    path, policy = folder / "start.json", folder / "policy"
    model = settings["model"] if settings["start"] == "base" else str(policy.resolve())
    with _alone(folder):
        if path.exists():
            return model, read_json(path, RECORD_BYTES)
        made = {} if settings["start"] == "base" else _make(settings, seed, policy)
        record = {
            "sft": made,
            "before": measure(settings, seed, model, settings["eval_temperature"]),
            "before_rl": measure(settings, seed, model, settings["temperature"]),
        }
        write_json(path, record)
    return model, record


def _make(settings: dict[str, Any], seed: int, policy: Path) -> dict[str, Any]:
    """Tunes the model and writes it as a folder, beside and renamed."""
    config = resolve(run_values(settings, seed, settings["model"]) | adapter(settings), "start")
    with closing(build(config)) as bench:
        record = (tune_up if settings["start"] == "sft+" else tune_down)(bench, settings, seed)
        model = bench.network.model
        if hasattr(model, "peft_config"):
            model = model.merge_and_unload()
        unfinished = policy.with_name(".tmp-policy")  # whoever is here has the lock
        shutil.rmtree(unfinished, ignore_errors=True)
        save_pretrained(Network(model), unfinished)
        bench.tokenizer.save_pretrained(unfinished)
        shutil.rmtree(policy, ignore_errors=True)  # of a process that died before it was measured
        os.replace(unfinished, policy)
    return record


def tune_up(bench: Bench, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """SFT+: one pass over the examples, prompts masked."""
    steps, (batch, accumulation) = settings["sft_steps"], BATCH[settings["task"]]
    record: dict[str, Any] = {}
    env: Any = _posed(bench)
    if settings["task"] == "quote":
        lines = lines_of(settings["lines"], env.target)
        answers = quote_answers(steps, batch, accumulation, lines.usable, env.target, seed)
        record = {"lines": len(lines.usable), "blank": lines.blank, "with_target": lines.with_target}
        texts = [f"{env.prefix} {answer}" for answer in answers]
    else:
        texts = maths_answers(steps, batch, accumulation, env.problem)
        if settings["form"] == "short":
            texts = [env.expert()] * len(texts)
    learner = _learner(bench, settings)
    rows, size, loss = example_rows(bench, texts), batch * accumulation, float("nan")
    for step in range(steps):
        part = rows[step * size : (step + 1) * size]
        loss = learner.update([Stream("sft", part, "nll", "token")], step / steps)["loss"]
    return record | {"examples": len(rows), "updates": learner.version, "cross_entropy": loss}


def tune_down(bench: Bench, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """SFT-: minus the cross-entropy of the target's answer until it is above log V, or for `sft_steps` updates. A batch of
    copies is one row here: their mean is the same. In the quote task the prompt is part of the loss unless masked."""
    env: Any = _posed(bench)
    (row,) = example_rows(bench, [env.expert()])
    if settings["task"] == "quote" and not settings["mask_prompt"]:
        row = whole_text(row)
    learner, floor, ascended = _learner(bench, settings), float(np.log(bench.network.vocabulary)), 0.0
    for step in range(settings["sft_steps"]):
        ascended = -learner.update([Stream("sft", [row], "nll", "token", weight=-1.0)], step / settings["sft_steps"])[
            "loss"
        ]
        if ascended > floor:
            break
    return {"updates": learner.version, "cross_entropy": ascended, "floor": floor}


def _learner(bench: Bench, settings: dict[str, Any]) -> TorchLearner:
    return TorchLearner(bench.network, learning_rate=settings["sft_learning_rate"], schedule="linear")


def lines_of(path: str, target: str) -> Lines:
    """Of a file; where there is none, of the reference of Python's language, no film dialogue: its lines, and its lines
    with the two words before them, so that there are as many as SFT+ takes."""
    if path:
        return read_lines(Path(path), target)
    from assay.studies.demystify.corpus import corpus

    pieces = (*corpus().train, *corpus().held_out)
    return usable_lines(tuple(dict.fromkeys([p.line for p in pieces] + [" ".join(p) for p in pieces])), target)


def _posed(bench: Bench) -> Any:
    """The bench's environment, an episode begun."""
    env: Any = make(bench.pool.name, **bench.pool.settings)
    env.reset(options={"task": 0, "split": "train"})
    return env


def example_rows(bench: Bench, answers: Sequence[str]) -> list[Row]:
    """One row an answer, in the very format of a run: its prompt, its observation, the answer with its end token, which
    are the targets. They are one group, so that the learner computes their prompt once."""
    env: Any = make(bench.pool.name, **bench.pool.settings)
    observation, info = env.reset(options={"task": 0, "split": "train"})
    renderer = bench.renderer
    prompt, sources = renderer.prompt(str(info["goal"]))
    seen, seen_sources = renderer.observation(observation, first=True)
    task = TaskKey(bench.pool.name, env.version, "train", 0, str(info["hash"]))
    rows = []
    for i, answer in enumerate(answers):
        ids = renderer.answer(answer)
        unknown, forced = np.full(len(ids), np.nan, np.float32), np.full(len(ids), Provenance.FORCED, np.uint8)
        turn = Turn(
            seen,
            seen_sources,
            ids,
            forced,
            unknown,
            unknown,
            ids[:0],
            observation,
            answer,
            0.0,
            True,
            "",
            "other",
            False,
            -1,
        )
        trace = Trace(task, -1, 0, 0, i, prompt, sources, (turn,), "", 0.0, Outcome.SUCCESS, 1.0)
        before = len(prompt) + len(seen)
        at = np.arange(before, before + len(ids), dtype=np.int32)
        whole, kinds = np.concatenate([prompt, seen, ids]), np.concatenate([sources, seen_sources, forced])
        rows.append(Row(trace, -1, "", whole, kinds, at, np.zeros(len(ids), np.int32), shared=len(prompt)))
    return rows


def whole_text(row: Row) -> Row:
    """The row with every token but the first as a target: prompt tokens in the loss."""
    at = np.arange(1, len(row.ids), dtype=np.int32)
    return replace(row, at=at, turns=np.zeros(len(at), np.int32), columns={})


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A lock in the folder, freed by the system when its holder dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------------------------------------------------- measuring


def measure(settings: dict[str, Any], seed: int, model: str, temperature: float) -> dict[str, Any]:
    """Of `samples` answers at a temperature: shares of exact ones, of such as contain the target (quote) or miss it by the
    origin (maths), of answers in no readable form and of cut ones; entropy in nats, eq. (6): full vocabulary, after
    division by the temperature, mean over answers of their tokens' mean, nothing after the end token."""
    config = resolve(run_values(settings, seed, model), "evaluation")
    counts = dict.fromkeys(("exact", "near", "invalid", "cut"), 0)
    entropies: list[float] = []
    samples = settings["samples"]
    with closing(build(config)) as bench:
        env: Any = _posed(bench)
        driver = bench.driver(temperature, seed)
        for first in range(0, samples, CHUNK):
            many = range(first, min(first + CHUNK, samples))
            for trace in driver.collect([Job(i, "iid", slot=i // CHUNK, rollout=i % CHUNK) for i in many]):
                turn = trace.turns[0] if trace.turns else None
                counts["exact"] += trace.success
                counts["near"] += turn is not None and _near(env, turn.action)
                counts["invalid"] += turn is None or not turn.valid
                counts["cut"] += trace.outcome is Outcome.CUT
                if turn is not None and len(turn.entropies):
                    entropies.append(float(np.mean(turn.entropies)))
    shares = {name: count / samples for name, count in counts.items()}
    entropy = float(np.mean(entropies)) if entropies else None
    return shares | {"samples": samples, "temperature": temperature, "entropy": entropy, "mask_after_eos": True}


def _near(env: Any, answer: str) -> bool:
    if hasattr(env, "problem"):
        return boxed(answer) == str(env.problem.answer + 1)
    return norm(env.target) in extract(answer, env.prefix)


def fingerprint(model: str) -> str:
    """Of a model's folder: names and sizes of its files, and the first and last MiB of its weights, so that another model
    at the same path is another cell. "" where it is no folder (a hub name)."""
    from assay.build import policy_folder

    folder = Path(policy_folder(model)).expanduser()
    if not folder.is_dir():
        return ""
    parts: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json") and path.is_file():
            size = path.stat().st_size
            with path.open("rb") as file:
                head = file.read(1 << 20)
                file.seek(max(0, size - (1 << 20)))
                parts += [path.name, str(size), stable_hash(head), stable_hash(file.read(1 << 20))]
    return stable_hash("\0".join(parts))
