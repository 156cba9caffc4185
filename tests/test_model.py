"""The flat forward against transformers' own, and the refusal of what it cannot run exactly."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.bloom import BloomConfig
from transformers.models.cohere import CohereConfig
from transformers.models.falcon import FalconConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gpt2 import GPT2Config
from transformers.models.gpt_neox import GPTNeoXConfig
from transformers.models.mamba import MambaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from assay.model import Network, causal, check_exact, load_model
from assay.protocols import UserError

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
GROUPED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": None}
EXACT = {
    "llama": LlamaConfig(**GROUPED),
    "llama with biases": LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "llama tied, wide heads": LlamaConfig(**GROUPED, head_dim=24, tie_word_embeddings=True),
    "llama dynamic rope": LlamaConfig(**GROUPED, rope_parameters=DYNAMIC),
    "mistral": MistralConfig(**GROUPED, sliding_window=None),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "gpt2": GPT2Config(**GPT2, bos_token_id=None, initializer_range=0.2),
    "neox": GPTNeoXConfig(**SMALL, intermediate_size=64),
    "gemma3": Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=64, layer_types=["sliding_attention", "full_attention"]
    ),
}
FUSED = ("llama", "llama with biases", "llama tied, wide heads", "mistral", "qwen2", "qwen3")


def build(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases and norms that do something
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize("name", EXACT)
def test_flat_forward_of_two_contexts_equals_the_models_own(name):
    model = build(EXACT[name])
    a, b = torch.arange(20) * 31 % 97, torch.arange(7) * 17 % 97
    with torch.no_grad():
        own = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in (a, b)]).log_softmax(-1)
    network = Network(model)
    assert network.fused == (name in FUSED)

    def attend(layer, q, k, v, scale):
        parts = zip(q.split([20, 7]), k.split([20, 7]), v.split([20, 7]), strict=True)
        return torch.cat([causal(layer, *part, scale) for part in parts])

    with torch.no_grad():
        flat = network.hidden(torch.cat([a, b]), torch.cat([torch.arange(20), torch.arange(7)]), attend)
        ours = network.logits(flat).log_softmax(-1)
    assert (ours - own).abs().max() < 1e-5


@pytest.mark.parametrize("name", EXACT)
def test_check_exact_passes_what_is_exact(name):
    check_exact(Network(build(EXACT[name])))


def test_check_exact_lowers_the_room_to_where_attention_is_full():
    network = Network(build(EXACT["gemma3"]))
    assert network.max_length == 128
    check_exact(network)
    assert network.max_length == 64


REFUSED = {
    "Gemma2ForCausalLM": (Gemma2Config(**GROUPED, head_dim=8), "softcap"),
    "MambaForCausalLM": (MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8), "attention"),
    "CohereForCausalLM": (CohereConfig(**GROUPED), "nats"),  # scales its logits
    # these run attention of their own over the flat row: with one context in it they would look exact
    "BloomForCausalLM": (BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4), "other attention"),
    "FalconForCausalLM": (
        FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        "other attention",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(name):
    config, reason = REFUSED[name]
    with pytest.raises(UserError, match=rf"{name} cannot be run .*{reason}"):
        check_exact(Network(build(config)))


def test_check_exact_sees_one_wrong_layer():
    network = Network(build(EXACT["llama"]))
    network.cos = network.cos.roll(1, 0)
    with pytest.raises(UserError, match=r"LlamaForCausalLM cannot be run exactly .* nats off"):
        check_exact(network)


def test_check_exact_leaves_the_models_attention_as_it_was():
    network = Network(build(EXACT["gpt2"]))
    before = network.model.config._attn_implementation
    check_exact(network)
    assert network.model.config._attn_implementation == before


def test_gradients_of_the_fused_path_equal_the_models_own():
    model = build(EXACT["qwen3"])
    ids = torch.arange(12) * 31 % 97
    model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)[:, 5].sum().backward()
    own = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    network = Network(model)
    network.logits(network.hidden(ids, torch.arange(12), causal)).log_softmax(-1)[:, 5].sum().backward()
    for n, p in model.named_parameters():
        assert torch.allclose(p.grad, own[n], rtol=1e-3, atol=1e-4), n


def test_a_saved_model_loads_and_a_missing_one_is_one_sentence(tmp_path):
    model = build(EXACT["llama"])
    model.save_pretrained(tmp_path / "m")
    loaded = load_model(str(tmp_path / "m"))
    assert not loaded.training and torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    with pytest.raises(UserError, match=r"none. (is no folder|cannot be loaded)"):
        load_model(str(tmp_path / "none"))
