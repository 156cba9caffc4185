"""Causal language models as three functions: hidden states, logits, and where attention looks.

Tokens come *flat*: N tokens of many contexts in one row, with their positions, and no padding. All layers but attention
act per token; attention is a callback `attend(layer, q, k, v, scale)`, so the sampler (which keeps keys and values in
slots) and the learner (which shares a group's prompt) run the very same model code. Plain Llama-family models take a
fused path of about 25 operations a layer; any other architecture of transformers that has pluggable attention goes
through its own module; `check_exact` compares with the model's own forward and refuses by name what cannot be exact.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface

from assay.protocols import UserError

# (layer, q [N, H, E], k [N, K, E], v [N, K, E], scale) -> [N, H, E]: H query heads, K key heads, E head size
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]

FUSED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
PLAIN_ROPE = ("default", "linear", "llama3")  # frequencies that do not depend on the length seen
EXACT = 2e-4  # largest difference of a log-prob, nats, that fp32 rounding explains
ROUNDED = 0.08  # `_distance` that rounding to bf16 explains: 0.033 in 30 layers; a wrong rotation gives 0.1 to 1.1
HUB_TIMEOUT = 5.0  # seconds
FETCHED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]  # from the hub; pickles stay there
NOT_FETCHED = ["*/*", "consolidated*"]  # other formats of the same weights
LOADING = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)  # what from_pretrained throws


class LayerWeights(NamedTuple):
    """One decoder layer, projections fused: `qkv` [(H + 2K)E, D], `gate_up` [2M, D]."""

    norm_in: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    norm_mid: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Network:
    """A causal model for the sampler and the learner. It owns no copy of the weights: where the path is fused, the model's
    own projections become neighbours in memory, so that under `no_grad` the fused weights are views of them."""

    def __init__(self, model: Any) -> None:
        """`model`: a PreTrainedModel for causal language modelling, or a peft model around one."""
        self.model: Any = model
        config = model.config
        if not getattr(config, "num_attention_heads", 0):
            raise UserError(
                f"{type(model).__name__} cannot be run by the in-process backend: it has no attention to hook into"
            )
        self.heads = config.num_attention_heads
        self.key_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.layers = config.num_hidden_layers
        self.vocabulary = config.vocab_size
        self.max_length = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
        self.fused = _can_fuse(model)
        if self.fused:
            _lay_together(model)
            positions = torch.arange(self.max_length, device=model.device)[None]
            with torch.no_grad():
                cos, sin = model.model.rotary_emb(torch.zeros(1, 1, dtype=model.dtype, device=model.device), positions)
            half = self.head_size // 2
            self.cos, self.sin = cos[0, :, None, :half].contiguous(), sin[0, :, None, :half].contiguous()
        else:
            AttentionInterface.register("assay", _attention_hook)
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            base.set_attn_implementation("assay")

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def weights(self) -> list[LayerWeights] | None:
        """Fused weights of all layers, differentiable unless under `no_grad`; None where the path is not fused."""
        if not self.fused:
            return None
        return [_fuse(layer) for layer in self.model.model.layers]

    def hidden(
        self, ids: Tensor, positions: Tensor, attend: Attend, weights: list[LayerWeights] | None = None
    ) -> Tensor:
        """Final hidden states [N, D] of N flat tokens (`ids`, `positions`: int64 [N])."""
        if not self.fused:
            return _backbone(self.model)(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, assay_attend=attend
            ).last_hidden_state[0]
        model: Any = self.model.model
        heads, key_heads, size = self.heads, self.key_heads, self.head_size
        eps, scale = self.model.config.rms_norm_eps, size**-0.5
        cos, sin = self.cos[positions], self.sin[positions]
        x = F.embedding(ids, model.embed_tokens.weight)
        for layer, w in enumerate(self.weights() or [] if weights is None else weights):
            h = F.rms_norm(x, (x.shape[-1],), w.norm_in, eps)
            qkv = F.linear(h, w.qkv, w.qkv_bias).view(-1, heads + 2 * key_heads, size)
            rotated, v = qkv[:, : heads + key_heads], qkv[:, heads + key_heads :]
            if w.q_norm is not None and w.k_norm is not None:
                q, k = rotated[:, :heads], rotated[:, heads:]
                rotated = torch.cat([F.rms_norm(q, (size,), w.q_norm, eps), F.rms_norm(k, (size,), w.k_norm, eps)], 1)
            a, b = rotated.chunk(2, -1)
            rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            mixed = attend(layer, rotated[:, :heads], rotated[:, heads:], v, scale)
            x = x + F.linear(mixed.reshape(-1, heads * size), w.out, w.out_bias)
            h = F.rms_norm(x, (x.shape[-1],), w.norm_mid, eps)
            gate, up = F.linear(h, w.gate_up, w.gate_up_bias).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w.down, w.down_bias)
        return F.rms_norm(x, (x.shape[-1],), model.norm.weight, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [N, V] from hidden [N, D]: call it only where a token is sampled or scored."""
        head: Any = self.model.get_output_embeddings()
        return head(hidden).float()


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend of one context from its start."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return mixed[0].transpose(0, 1)


def load_model(path: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A causal model in evaluation mode, from a folder, a .gguf file or a hub name: a PreTrainedModel, or a peft model
    where the folder holds an adapter (its base is loaded from where the adapter says).

    Only safetensors and GGUF are read, never a pickle; code that lies beside the weights is never run. UserError if
    anything is missing, so that no weight is ever left random in silence.
    """
    from transformers import AutoModelForCausalLM

    source, where = _locate(path)
    if (Path(source) / "adapter_config.json").is_file():
        return _load_adapter(Path(source), dtype)
    loader: Any = AutoModelForCausalLM
    try:
        model, report = loader.from_pretrained(
            source, dtype=dtype, trust_remote_code=False, use_safetensors=True, output_loading_info=True,
            **where, **options,
        )  # fmt: skip
    except LOADING as error:
        raise UserError(f"model {path!r} cannot be loaded: {_reason(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(f"model {path!r} cannot be loaded: its files lack {len(missing)} weights, {missing[0]!r} first")
    if "gguf_file" in where:  # de-quantised on loading; say so, or it cannot be saved
        model.hf_quantizer, model.is_quantized = None, False
        model.config.__dict__.pop("quantization_config", None)
    elif getattr(model.config, "quantization_config", None):
        raise UserError(f"model {path!r} is quantised: its weights cannot be trained; use the folder it was made from")
    model.name_or_path = str(Path(path).resolve()) if Path(path).exists() else path  # an adapter notes it as its base
    return model.eval()


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder, a .gguf file or a hub name; UserError if there is none."""
    from transformers import AutoTokenizer

    source, where = _locate(path)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **where)
    except (*LOADING, TypeError, AttributeError) as error:  # the last two: its files are not what their names say
        raise UserError(f"model {path!r} has no tokenizer that can be loaded: {_reason(error)}") from error


def _locate(path: str) -> tuple[str, dict[str, Any]]:
    """A local folder and options for `from_pretrained`. What a hub name stands for is fetched into the hub's cache, or
    found there; the hub is asked once, briefly: left alone, its client tries for minutes where there is no network."""
    from huggingface_hub import snapshot_download

    place = Path(path).expanduser()
    if place.is_dir():
        return str(place), {}
    if place.suffix == ".gguf" and place.is_file():
        return str(place.parent), {"gguf_file": place.name}
    if place.exists() or place.suffix == ".gguf" or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"model {path!r} cannot be loaded: give a folder with config.json, a .gguf file or a hub name")
    local = not _hub_answers()
    try:
        folder = snapshot_download(path, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED, local_files_only=local)
    except (OSError, ValueError) as error:
        unreachable = "the hub cannot be reached: check the network, or give the path of a folder"
        reason = unreachable if local else _first_line(error)
        raise UserError(f"model {path!r} cannot be loaded: it is no folder here, and {reason}") from error
    return folder, {}


def _hub_answers() -> bool:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT).close()
    except urllib.error.HTTPError:  # it answered
        return True
    except OSError:
        return False
    return True


def _load_adapter(folder: Path, dtype: torch.dtype) -> Any:
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise UserError(f"model {str(folder)!r} is an adapter, which needs peft: pip install 'assay[lora]'") from error
    if not (folder / "adapter_model.safetensors").is_file():
        raise UserError(f"model {str(folder)!r} has an adapter_config.json but no adapter_model.safetensors")
    try:
        base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
        return PeftModel.from_pretrained(load_model(str(base), dtype), str(folder), is_trainable=True).eval()
    except LOADING as error:
        raise UserError(f"adapter {str(folder)!r} cannot be loaded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """First line of what transformers says, or its meaning."""
    text = _first_line(error)
    if "no file named model.safetensors" in text:
        return "its folder has no model.safetensors (pickled .bin weights are not read: save it with safetensors)"
    if "ignore_mismatched_sizes" in text:
        return "the shapes of its weights are not those of its config.json"
    return text


def check_exact(network: Network, length: int = 48) -> None:
    """Compares log-probs with the model's own forwards on two contexts in one flat row; UserError names the
    architecture if they differ. Lowers `network.max_length` to the length up to which the comparison can speak.

    Two contexts, since with one an architecture that ignores the hook or the positions would look exact.
    """
    name = type(network.model).__name__
    network.max_length = min(network.max_length, _exact_room(network.model.config))
    first = min(length, network.max_length)
    lengths = [first, first // 2 + 1]
    ids = torch.arange(sum(lengths), device=network.device) * 7919 % network.vocabulary
    positions = torch.cat([torch.arange(n, device=network.device) for n in lengths])
    seen: set[int] = set()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        seen.add(layer)
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([causal(layer, *part, scale) for part in parts])

    refusal = f"{name} cannot be run exactly by the in-process backend: "
    with torch.no_grad():
        try:
            ours = network.logits(network.hidden(ids, positions, attend))
            theirs = torch.cat([_own_logits(network.model, part) for part in ids.split(lengths)])
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            raise UserError(refusal + _first_line(error)) from error
    if len(seen) != network.layers:
        raise UserError(refusal + f"{network.layers - len(seen)} of its {network.layers} layers have other attention")
    worst = float((ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max())
    if not (worst <= EXACT if network.dtype == torch.float32 else _distance(ours, theirs) <= ROUNDED):
        raise UserError(refusal + f"its log-probs come out {worst:.3g} nats off")


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Mean over tokens of |ours - theirs| / |theirs|, both [N, V] and centred: what adds a constant changes no log-prob."""
    ours, theirs = (logits - logits.mean(-1, keepdim=True) for logits in (ours, theirs))
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)).mean())


def _exact_room(config: Any) -> int:
    """Length up to which attention is full and rotary frequencies do not depend on the length."""
    room = 1 << 30
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        room = config.sliding_window  # inside one window, sliding attention is full attention
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        room = min(room, original)
    return room


def _own_logits(model: Any, ids: Tensor) -> Tensor:
    """fp32 [N, V] of the model's own forward of one context, with its eager attention."""
    config = (model.get_base_model() if hasattr(model, "get_base_model") else model).config
    saved = config._attn_implementation
    config._attn_implementation_internal = "eager"
    try:
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    finally:
        config._attn_implementation_internal = saved
    return logits


def _backbone(model: Any) -> nn.Module:
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone: nn.Module = getattr(base, base.base_model_prefix)
    return backbone


def _attention_hook(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float | None = None, **extra: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface -> `attend`: q [1, H, N, E] in, [1, N, H, E] out."""
    for name in ("softcap", "s_aux"):
        if extra.get(name) is not None:
            raise ValueError(f"its attention uses {name!r}, which this backend does not have")
    attend: Attend | None = extra.get("assay_attend")
    if attend is None:
        raise ValueError("its layers do not hand attention on")
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return attend(layer, q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), scale)[None], None


def _can_fuse(model: Any) -> bool:
    if type(model).__name__ not in FUSED:  # a LoRA model is of another class
        return False
    config = model.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return rope.get("rope_type", "default") in PLAIN_ROPE and config.hidden_act == "silu"


def _together(layer: Any) -> list[list[Any]]:
    """Parameters that are used as one: [q, k, v] and [gate, up], weights and biases."""
    groups = [[getattr(layer.self_attn, f"{x}_proj") for x in "qkv"], [layer.mlp.gate_proj, layer.mlp.up_proj]]
    return [[getattr(linear, name) for linear in group] for group in groups for name in ("weight", "bias")]


@torch.no_grad()
def _lay_together(model: Any) -> None:
    """Moves what is used as one into one storage, layer by layer: values and gradients stay what they are."""
    for layer in model.model.layers:
        for parameters in _together(layer):
            if parameters[0] is not None and not _neighbours(parameters):
                whole = torch.cat(parameters)
                for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
                    parameter.data = part


def _neighbours(tensors: Sequence[Tensor]) -> bool:
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.is_contiguous() and tensor.data_ptr() == end):
            return False
        end += tensor.numel() * tensor.element_size()
    return True


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors as one: a view where no gradient is wanted and they are neighbours, else a copy."""
    present = [t for t in tensors if t is not None]
    if not present:
        return None
    if torch.is_grad_enabled() or not _neighbours(present):
        return torch.cat(present)
    first = present[0].detach()
    return first.as_strided((sum(len(t) for t in present), *first.shape[1:]), first.stride())


def _fuse(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias, gate_up, gate_up_bias = (_cat(parameters) for parameters in _together(layer))
    assert qkv is not None and gate_up is not None
    return LayerWeights(
        layer.input_layernorm.weight,
        qkv,
        qkv_bias,
        getattr(getattr(attention, "q_norm", None), "weight", None),
        getattr(getattr(attention, "k_norm", None), "weight", None),
        attention.o_proj.weight,
        attention.o_proj.bias,
        layer.post_attention_layernorm.weight,
        gate_up,
        gate_up_bias,
        mlp.down_proj.weight,
        mlp.down_proj.bias,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
