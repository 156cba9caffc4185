"""Small real models and rows for the learner's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from assay.rows import Layout, Row, build_rows
from assay.trace import Outcome, Provenance, TaskKey, Trace, Turn

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def model(name: str = "llama", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if name == "llama":
        built: Any = LlamaForCausalLM(LlamaConfig(**SHAPE))
    elif name == "qwen3":
        built = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    else:
        built = GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=512, bos_token_id=None)
        )
    with torch.no_grad():  # default initialisation is so flat that errors would hide
        for p in built.parameters():
            p.mul_(3.0) if p.dim() > 1 else p.add_(0.6 * torch.randn_like(p))  # some norm weights below 0
    return built.eval()


def trace(rng: np.random.Generator, slot: int, rollout: int, prompt: np.ndarray, turns: list[tuple[int, int]]) -> Trace:
    """Turns of (observation tokens, answer tokens); the last answer token of the first turn is FORCED."""
    made = []
    for t, (seen, said) in enumerate(turns):
        provenance = np.full(said, Provenance.SAMPLED, np.uint8)
        if t == 0 and said > 1:
            provenance[-1] = Provenance.FORCED
        logprobs = rng.normal(-2.0, 0.3, said).astype(np.float32)
        made.append(
            Turn(
                rng.integers(0, VOCABULARY, seen).astype(np.int32),
                np.full(seen, Provenance.ENVIRONMENT, np.uint8),
                rng.integers(0, VOCABULARY, said).astype(np.int32),
                provenance,
                logprobs,
                -logprobs,
                rng.integers(0, VOCABULARY, 1).astype(np.int32),
                "seen",
                "done",
                0.0,
                True,
                "anchor",
                "other",
                False,
                0,
            )
        )
    return Trace(
        TaskKey("test", "1", "train", slot, "hash"),
        0,
        0,
        slot,
        rollout,
        prompt,
        np.full(len(prompt), Provenance.TEMPLATE, np.uint8),
        tuple(made),
        "",
        float(rollout % 2),
        Outcome.SUCCESS if rollout % 2 else Outcome.FAILURE,
        1.0,
    )


def traces(seed: int = 0, groups: int = 2, size: int = 3, prompt: int = 19) -> list[Trace]:
    """Groups of one prompt, with episodes of one to three turns of uneven length; two share their first turn's ids."""
    rng = np.random.default_rng(seed)
    made = []
    for slot in range(groups):
        ids = rng.integers(0, VOCABULARY, prompt + slot).astype(np.int32)
        for rollout in range(size):
            turns = [(int(rng.integers(3, 9)), int(rng.integers(1, 5))) for _ in range(int(rng.integers(1, 4)))]
            made.append(trace(rng, slot, rollout, ids, turns))
        twin = trace(rng, slot, size, ids, [(5, 3), (4, 2)])
        made.append(twin_of(made[-1], twin))
    return made


def twin_of(first: Trace, second: Trace) -> Trace:
    """The second with the first turn of the first: their common path goes on past the prompt."""
    return replace(second, turns=(first.turns[0], *second.turns[1:]))


def rows_of(made: list[Trace], layout: str = "append", seed: int = 5) -> list[Row]:
    """Rows with columns whose numbers belong to the token (trace, turn, place), so they agree in all layouts."""
    rows = build_rows(made, Layout.parse(layout))
    index = {t.key: i for i, t in enumerate(made)}
    for row in rows:
        places = np.concatenate([np.arange((row.turns == t).sum()) for t in sorted(set(row.turns.tolist()))])
        for c, (name, centre, spread) in enumerate(
            [("advantage", 0.0, 1.0), ("old_logprob", -4.0, 0.3), ("ref_logprob", -4.0, 0.5), ("return", 0.5, 0.5)]
        ):
            values = [
                np.random.default_rng((seed, c, index[row.trace.key], int(t), int(p))).normal(centre, spread)
                for t, p in zip(row.turns, places, strict=True)
            ]
            row.columns[name] = np.array(values, np.float32)
    return rows


def gradients(built: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in built.named_parameters() if p.grad is not None}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, all parameters together."""
    assert a.keys() == b.keys()
    apart = sum(float((a[n] - b[n]).double().square().sum()) for n in a)
    return (apart / sum(float(b[n].double().square().sum()) for n in b)) ** 0.5
