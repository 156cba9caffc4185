"""How the small policies are made: imitation at length of expert and noisy episodes of all built-in environments.

Episodes are drawn from a stream that names every seed, rendered once, and imitated action token by action token. Half of
the episodes are an expert's, the others have a share of random admissible actions: a policy that has seen mistakes
knows how to go on after them. What is left out on purpose: the harder levels are rare, so that RL has something to do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from assay import tiny
from assay.demonstrations import demonstrations, imitation_rows
from assay.envs.registry import make
from assay.learner.torch_learner import TorchLearner
from assay.model import Network
from assay.protocols import UserError
from assay.renderers import ChatRenderer
from assay.rng import generator
from assay.rows import Layout, Row, Stream
from assay.trace import Trace

NOISES = (0.0, 0.25, 0.0, 0.5)  # of successive episodes of one environment
# environment -> share of the episodes
MIXTURE: dict[str, float] = {
    "babyai/GoToRedBallNoDists": 0.05,
    "babyai/GoToRedBall": 0.05,
    "babyai/GoToObj": 0.05,
    "babyai/GoToLocal": 0.2,
    "babyai/PickupLoc": 0.15,
    "babyai/PutNextLocal": 0.1,
    "countdown": 0.3,
    "textworld-cooking": 0.1,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a checkpoint is made of; written beside it."""

    model: str
    updates: int = 20_000
    rows_per_update: int = 16
    learning_rate: float = 2e-3
    seed: int = 0
    tokenizer_episodes: int = 300  # per environment
    mixture: dict[str, float] = field(default_factory=lambda: dict(MIXTURE))
    noises: tuple[float, ...] = NOISES


def episodes(recipe: Recipe, tokenizer: Any, seed: int) -> Iterator[Trace]:
    """An endless stream over the mixture; which environment comes next is a keyed draw."""
    names, shares = list(recipe.mixture), list(recipe.mixture.values())
    streams = {}
    for name in names:
        env: Any = make(name)
        renderer = ChatRenderer(tokenizer, env.brief)
        streams[name] = demonstrations(env, renderer, name, recipe.noises, seed)
    total, block = sum(shares), 0
    while True:
        order = generator(seed, "mixture", block).choice(len(names), 1024, p=[s / total for s in shares])
        for index in order:
            yield next(streams[names[int(index)]])
        block += 1


def texts(recipe: Recipe) -> Iterator[str]:
    """What the tokenizer learns from: goals, observations and actions of a few hundred episodes of each environment, and
    the Python manual's plain English, so that other environments' words are not spelt byte by byte."""
    yield from (line for topic in topics.values() for line in topic.splitlines() if line.strip())
    for name in recipe.mixture:
        env: Any = make(name)
        yield env.brief
        for task in range(recipe.tokenizer_episodes):
            size = env.size("train")
            observation, info = env.reset(options={"task": task % (size or 2**31), "split": "train"})
            yield str(info["goal"])
            yield observation
            over = False
            while not over:
                action = env.expert()
                yield action
                observation, _, ended, horizon, _ = env.step(action)
                yield observation
                over = ended or horizon


def pretrain(recipe: Recipe, folder: Path, tokenizer_from: Path | None = None, say: Any = print) -> dict[str, Any]:
    """Trains the policy of `recipe` and saves a Hugging Face folder with a model card and training.json."""
    from transformers import AutoTokenizer

    if recipe.model not in tiny.SHAPES:
        raise UserError(f"model {recipe.model!r} is not a built-in policy: there are {', '.join(tiny.SHAPES)}")
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer_from is None:
        say("training the tokenizer")
        tokenizer = tiny.train_tokenizer(texts(recipe), folder)
    else:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
        tokenizer.save_pretrained(folder)
    network = Network(tiny.build_model(recipe.model, recipe.seed))
    learner = TorchLearner(
        network,
        learning_rate=recipe.learning_rate,
        warmup_steps=200,
        schedule="cosine",
        weight_decay=0.01,
        tokens_per_forward=1 << 15,
    )
    began, losses, tokens = time.perf_counter(), [], 0
    stream = episodes(recipe, tokenizer, recipe.seed)
    for update in range(recipe.updates):
        rows = _rows(stream, recipe.rows_per_update)
        metrics = learner.update([Stream("imitation", rows, "nll", "token")], update / recipe.updates)
        losses.append(metrics["loss"])
        tokens += sum(len(row) for row in rows)
        if (update + 1) % 500 == 0 or update + 1 == recipe.updates:
            mean = sum(losses[-500:]) / len(losses[-500:])
            seconds = time.perf_counter() - began
            say(f"{update + 1}/{recipe.updates}: {mean:.4f} nats a target token, {tokens / seconds:.0f} tokens/s")
            learner.save_pretrained(folder)
    record = {"recipe": asdict(recipe), "tokens": tokens, "seconds": round(time.perf_counter() - began), "nats": mean}
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def _rows(stream: Iterator[Trace], count: int) -> list[Row]:
    """Rows of that many episodes that fit the context; each episode its own group."""
    traces: list[Trace] = []
    while len(traces) < count:
        trace = next(stream)
        if trace.length <= tiny.CONTEXT:
            traces.append(replace(trace, slot=len(traces), rollout=0))
    return imitation_rows(traces, Layout())
