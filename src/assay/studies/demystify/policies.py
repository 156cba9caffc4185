"""The small policies of the study: a character-level tokenizer, four sizes, pre-training, and the two tunings of the prior.

A policy is a Hugging Face folder in the cache (`warmstart.cache_folder()`), keyed by all that decides its weights. Rows have
the very format of RL's prompts: they come from the same renderer. The loop is a plain one, not the TorchLearner: rows of 40
tokens and models this small spend more time on packing rows than on products (measured: 1.5 to 1.9 times the seconds of
padded rows). SFT- is gradient ascent on the target's cross-entropy with a floor that the paper's code lacks: it stops where
the cross-entropy has passed log V, that of knowing nothing.

Left out: dropout, weight decay, low-rank adapters (all weights are tuned).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.renderers import ChatRenderer
from assay.rng import generator, stable_hash
from assay.studies.demystify.tasks import SPECIAL, TASKS, Pair, Recipe, TaskName
from assay.tiny import TEMPLATE
from assay.warmstart import cache_folder

CONTEXT = 96  # tokens
ANSWER = 32  # sampled tokens at most: a line of the corpus has 25 with its end

# hidden, intermediate, query heads of 16, key heads; two layers each
SCALES: dict[str, tuple[int, int, int, int]] = {
    "24k": (32, 88, 2, 1),
    "51k": (48, 128, 3, 1),
    "134k": (80, 208, 5, 1),
    "333k": (128, 320, 8, 2),
}
LAYERS, HEAD = 2, 16


# ---------------------------------------------------------------------------------------------------------- tokenizer


def tokens(task: TaskName = "quote") -> list[str]:
    """The vocabulary, in the order of its ids."""
    own = TASKS[task]
    return [*SPECIAL, own.unknown, f"{own.brief}\n", own.observation, *own.letters]


def build_tokenizer(task: TaskName = "quote") -> Any:
    """One token a letter; the environment's two fixed texts are one token each, which halves the prompt."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = TASKS[task]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens(task))}, unk_token=own.unknown))
    long = [re.escape(text) for text in (f"{own.brief}\n", own.observation, *own.letters) if len(text) > 1]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*long, r"[\s\S]"])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        additional_special_tokens=list(SPECIAL[2:]),
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    fast.chat_template = TEMPLATE
    fast.init_kwargs["assay_prompt"] = "brief"
    return fast


@cache
def renderer(task: TaskName = "quote") -> ChatRenderer:
    return ChatRenderer(build_tokenizer(task), TASKS[task].brief)


def prompt_ids(prompt: str, task: TaskName = "quote") -> np.ndarray:
    """int32 [P]: what stands before the answer to a prompt, as a run puts it there."""
    own = renderer(task)
    shown = own.observation(TASKS[task].observation, first=True)[0]
    return np.concatenate([own.prompt(prompt)[0], shown]).astype(np.int32)


def answer_ids(answer: str, task: TaskName = "quote") -> np.ndarray:
    """int32 [A]: an answer with its end token."""
    return renderer(task).answer(answer)


def build_model(scale: str, seed: int, task: TaskName = "quote") -> Any:
    """An untrained LlamaForCausalLM, its weights a function of the seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, heads, key_heads = SCALES[scale]
    config = LlamaConfig(
        vocab_size=len(tokens(task)),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        num_hidden_layers=LAYERS,
        head_dim=HEAD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator(seed, "demystify weights", scale).integers(2**31)))
        return LlamaForCausalLM(config).eval()


# ------------------------------------------------------------------------------------------------------------ training


def cross_entropy(model: Any, pairs: Sequence[Pair], task: TaskName = "quote") -> Tensor:
    """Mean over the answers' tokens, their end tokens included, of -log p; prompts are masked. Natural log."""
    rows = [(prompt_ids(prompt, task), answer_ids(answer, task)) for prompt, answer in pairs]
    length = max(len(p) + len(a) for p, a in rows)
    ids = np.zeros((len(rows), length), np.int64)
    labels = np.full((len(rows), length), -100, np.int64)
    for i, (p, a) in enumerate(rows):
        ids[i, : len(p) + len(a)] = np.concatenate([p, a])
        labels[i, len(p) : len(p) + len(a)] = a
    logits = model(input_ids=torch.from_numpy(ids), use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), torch.from_numpy(labels)[:, 1:].flatten())


def descend(model: Any, losses: Iterator[Tensor], rate: Callable[[int], float], enough: Callable[[], bool]) -> int:
    """AdamW on each loss in turn, gradients clipped to norm 1, until there are none or it is `enough`: updates made."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    made = 0
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(made)
        optimizer.step()
        made += 1
        if enough():
            break
    return made


def pretrain(model: Any, recipe: Recipe) -> dict[str, Any]:
    """In place; what is recorded of it."""

    def rate(step: int) -> float:
        rise = min(1.0, (step + 1) / 30)
        return recipe.learning_rate * rise * (0.05 + 0.95 * (1 + np.cos(np.pi * step / recipe.updates)) / 2)

    batches = TASKS[recipe.task].pretraining(recipe)
    made = descend(model, (cross_entropy(model, batch, recipe.task) for batch in batches), rate, lambda: False)
    return {"updates": made}


def tune_up(model: Any, recipe: Recipe) -> dict[str, Any]:
    """SFT+: one pass over the task's examples, the learning rate falling linearly."""
    pairs, rows = TASKS[recipe.task].tuning(recipe), recipe.rows
    losses = (cross_entropy(model, pairs[at : at + rows], recipe.task) for at in range(0, len(pairs), rows))
    made = descend(model, losses, lambda step: recipe.tuning_rate * (1 - step / recipe.tuning_updates), lambda: False)
    return {"updates": made}


def tune_down(model: Any, recipe: Recipe) -> dict[str, Any]:
    """SFT-: minus the target's cross-entropy (lambda = 1) until it is above log V; prompt masked."""
    task, name = TASKS[recipe.task], recipe.task
    pair, floor = [(task.prompt, task.target)], float(np.log(len(tokens(name))))
    reached = [0.0]

    def losses() -> Iterator[Tensor]:
        for _ in range(recipe.tuning_updates):
            yield -cross_entropy(model, pair, name)

    def enough() -> bool:
        with torch.no_grad():
            reached[0] = float(cross_entropy(model, pair, name))
        return reached[0] > floor

    made = descend(model, losses(), lambda step: recipe.tuning_rate / 10, enough)
    return {"updates": made, "cross_entropy": reached[0], "floor": floor}


# --------------------------------------------------------------------------------------------------------------- cache


def root() -> Path:
    return cache_folder() / "studies" / "demystify"


def policy(recipe: Recipe) -> Path:
    """The recipe's folder; made if it is not there. Workers that want the same one wait for the first."""
    folder = root() / f"{recipe.task}-{recipe.scale}-{recipe.start}-s{recipe.seed}-{recipe.key}"
    if folder.exists():
        return folder
    base = policy(recipe.base) if recipe.start != "base" else None
    with _alone(folder):
        if not folder.exists():
            _make(recipe, base, folder)
    return folder


def record(folder: Path) -> dict[str, Any]:
    """How the policy was made: recipe, updates, what the tuning reached."""
    found: dict[str, Any] = json.loads((folder / "recipe.json").read_text("utf-8"))
    return found


def _make(recipe: Recipe, base: Path | None, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    if base is None:
        model = build_model(recipe.scale, recipe.seed, recipe.task)
        made = pretrain(model, recipe)
    else:
        model = LlamaForCausalLM.from_pretrained(base)
        made = (tune_up if recipe.start == "sft+" else tune_down)(model, recipe)
    beside = folder.with_name(f".tmp-{os.getpid()}-{folder.name}")
    shutil.rmtree(beside, ignore_errors=True)
    model.save_pretrained(beside)
    build_tokenizer(recipe.task).save_pretrained(beside)
    (beside / "recipe.json").write_text(json.dumps({"recipe": asdict(recipe), "text": TASKS[recipe.task].text, **made}))
    os.replace(beside, folder)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A lock beside the folder, freed by the system when its holder dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prompts_file(name: str, prompts: Sequence[str]) -> Path:
    """A file of prompts in the cache, one a line, named by its content."""
    text = "\n".join(prompts) + "\n"
    path = root() / f"{name}-{stable_hash(text)}.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".tmp-{os.getpid()}-{path.name}")
        beside.write_text(text, "utf-8")
        os.replace(beside, path)
    return path
