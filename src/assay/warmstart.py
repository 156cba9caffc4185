"""Warm start: imitate a stated number of imperfect expert episodes, once; the result is cached by content.

RL needs successes to learn from. A warm start is cheap where an expert exists, and honest where its noise, its number of
episodes and what it reaches are stated. The cache key covers everything that enters: weights, tokenizer, template,
environment, settings, and the code's version. A mixture imitates that number of episodes of each of its environments,
those that each would imitate alone, shuffled together.
"""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from assay import tiny
from assay.build import Bench
from assay.config import env_settings
from assay.demonstrations import demonstrations, imitation_rows, numbered
from assay.envs.remote import RemoteEnv
from assay.learner.torch_learner import TorchLearner
from assay.protocols import UserError
from assay.rng import generator, stable_hash
from assay.rows import Stream
from assay.trace import Trace

VERSION = 1  # raise when the same settings would give other weights


class Watcher(Protocol):
    def phase(self, name: str) -> None: ...
    def imitation(self, done: int, total: int, loss: float) -> None: ...
    def note(self, text: str) -> None: ...


def cache_folder() -> Path:
    """$ASSAY_CACHE, or assay in the user's cache folder."""
    base = os.environ.get("ASSAY_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay"
    return Path(base)


def warm_start(bench: Bench, watcher: Watcher) -> dict[str, Any]:
    """Tunes the bench's network in place; returns what was done, {} for nothing."""
    config, settings = bench.config, bench.config.warm_start
    if not settings.episodes:
        return {}
    if config.lora_rank:
        raise UserError(
            "warm_start.episodes and lora_rank exclude each other: warm-start the model first, then adapt it"
        )
    if settings.from_scratch:
        _forget(bench)
    path = cache_folder() / "warm-starts" / f"{_key(bench)}.safetensors"
    record = {"episodes": settings.episodes, "noise": settings.noise, "passes": settings.passes}
    model = bench.network.model
    if path.exists():
        model.load_state_dict(load_file(path), strict=False)
        model.tie_weights()
        watcher.note(f"warm start: {settings.episodes} episodes with {settings.noise:.0%} noise, from the cache")
        return {**record, "cached": True}
    watcher.phase("warm start")
    imitate(bench, watcher)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".tmp-{os.getpid()}")
    save_file({name: t.contiguous() for name, t in _own(model).items()}, beside)
    os.replace(beside, path)
    return {**record, "cached": False}


def imitate(bench: Bench, watcher: Watcher) -> None:
    """The imitation itself: `passes` over the demonstrated episodes, `rows_per_update` rows an optimiser step."""
    config, settings = bench.config, bench.config.warm_start
    traces: list[Trace] = []
    for name in bench.environments:
        runtime = config.runtime
        env: Any = RemoteEnv(name, env_settings(config, name), runtime.step_timeout_s, runtime.workers)
        with closing(env):
            stream = demonstrations(env, bench.renderers[name], name, [settings.noise], settings.seed)
            traces += [numbered(next(stream), len(traces) + i) for i in range(settings.episodes)]
    rows = imitation_rows(traces, bench.layout)
    per_pass = -(-len(rows) // settings.rows_per_update)
    total = settings.passes * per_pass
    learner = TorchLearner(
        bench.network,
        learning_rate=settings.learning_rate,
        warmup_steps=min(20, total // 10 + 1),
        schedule="linear",
        tokens_per_forward=config.runtime.tokens_per_forward,
    )
    for step in range(total):
        order = generator(settings.seed, "imitation", step // per_pass).permutation(len(rows))
        start = step % per_pass * settings.rows_per_update
        chosen = [rows[i] for i in order[start : start + settings.rows_per_update]]
        metrics = learner.update([Stream("imitation", chosen, "nll", "token")], step / total)
        watcher.imitation(step + 1, total, metrics["loss"])


def _forget(bench: Bench) -> None:
    name = bench.config.model
    if name not in tiny.SHAPES:
        raise UserError(f"warm_start.from_scratch is for the built-in policies {', '.join(tiny.SHAPES)}, not {name!r}")
    fresh = tiny.build_model(name, bench.config.warm_start.seed)
    bench.network.model.load_state_dict(fresh.state_dict())


def _own(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by name, tied ones once."""
    return {name: p.detach() for name, p in model.named_parameters()}


def _key(bench: Bench) -> str:
    config = bench.config
    weights = stable_hash(b"".join(p.detach().float().numpy().tobytes() for p in _own(bench.network.model).values()))
    renderers = bench.renderers.values()
    texts = [text for own in renderers for text in (own.decode(own.prompt("goal")[0]), own.instructions)]
    versions = ",".join(pool.spec["version"] for pool in bench.pools.values())
    parts = [VERSION, weights, len(bench.tokenizer), texts, config.env, config.env_args, versions]
    return stable_hash(json.dumps([*parts, config.layout, config.warm_start.model_dump()], sort_keys=True))
