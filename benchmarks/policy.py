"""The policy of the step benchmark: a random Llama that is bound to end each answer after TURN_TOKENS tokens.

The work of a turn must not depend on chance, and neither side should need a hook into its sampling. So embedding and head
are set by hand for a dozen tokens: after <|assistant|> comes <tool_call>, then one of eight actions with equal
probability, </tool_call> and <|end|>, each ahead of every other token by about 25 nats. All else is random.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from world import ACTIONS, CALL, SPECIAL, VOCABULARY, WORDS

WIDTH, LAYERS = 128, 4
LENGTH = 2048  # positions
SPIKE = 8.0  # of a bound token's embedding, where the residual stream's other entries stay below 0.3
AHEAD = 2.3  # of its successor's head row: times sqrt(WIDTH), about 25 nats

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_policy(folder: Path, seed: int = 0) -> int:
    """Saves model and tokenizer as a Hugging Face folder; the number of parameters."""
    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=352,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    _bind(model, tokenizer.convert_tokens_to_ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def _bind(model: Any, token_id: Callable[[str], Any]) -> None:
    """Each token of a stage is followed by one of the next stage, evenly."""
    stages = [["<|assistant|>"], [CALL[0]], ACTIONS, [CALL[1]], ["<|end|>"]]
    ids = [torch.tensor([token_id(token) for token in stage]) for stage in stages]
    with torch.no_grad():
        for axis, (now, following) in enumerate(pairwise(ids)):
            spike = torch.zeros(WIDTH)
            spike[axis] = 1.0
            model.model.embed_tokens.weight[now] = SPIKE * spike
            model.lm_head.weight[following] = AHEAD * spike


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CALL, *ACTIONS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in [*CALL, *ACTIONS]])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
        model_max_length=LENGTH,
    )
    fast.chat_template = TEMPLATE
    return fast
