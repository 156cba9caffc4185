"""The built-in small policies: a Llama of 0.3 or 1 million parameters and the one tokenizer of all environments.

They are ordinary Hugging Face folders (`AutoModelForCausalLM.from_pretrained` loads them), so that nothing else in the
package knows that they are small. How the shipped weights were made stands in their model cards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).parent / "weights"
VOCABULARY = 2048
CONTEXT = 2048  # tokens
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CONTROL = ["<|pad|>", "<|end|>", *ROLES, "<think>", "</think>", "<tool_call>", "</tool_call>"]
SPECIAL = [*CONTROL, "<tool_response>", "</tool_response>", *(f"<|reserved_{i}|>" for i in range(8))]
NUMBERS = 200  # whole numbers below it are one token each

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SHAPES: dict[str, dict[str, Any]] = {
    "tiny-300k": {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1},
    "tiny-1m": {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2},
}


def build_model(name: str, seed: int) -> Any:
    """An untrained `LlamaForCausalLM` of that shape, its weights a function of the seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|end|>"),
        pad_token_id=SPECIAL.index("<|pad|>"),
        **SHAPES[name],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def train_tokenizer(texts: Iterable[str], folder: Path) -> Any:
    """Byte-level BPE of VOCABULARY tokens (any text has ids and comes back), saved as a Hugging Face tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    numbers = [f" {n}" for n in range(NUMBERS)] * 1000  # merged before rare words
    tokenizer.train_from_iterator([*texts, *numbers], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[2:],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    fast.chat_template = TEMPLATE
    fast.init_kwargs["assay_prompt"] = "brief"  # short prompts: these policies know the environments by name
    fast.save_pretrained(folder)
    return fast


def folder_of(name: str) -> Path | None:
    """Where a built-in policy lies; None if the name is not one."""
    return WEIGHTS / name if name in SHAPES else None


def card(name: str) -> dict[str, Any]:
    """What is recorded of a shipped checkpoint: command, data seeds, success per environment."""
    path = WEIGHTS / name / "training.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return record
