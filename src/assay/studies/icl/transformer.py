"""A small pre-LN causal Transformer on interactions: which law over actions does it give after each prefix of an episode?

Token 0 is a start token; token t is interaction t - 1: one-hot action, feedback features, and a flag that is 1 in the
start token only. Position t therefore sees D_t and nothing later, so one pass over an episode gives all its decisions.
Section 4.0 of our reading of Agentic ICL; GELU, no dropout, GPT-2's initial scale.

Positions: "learned" ones are refused beyond the trained horizon. "none" (the causal mask alone) and "relative" (a linear
penalty on distance, Press et al. 2022) go on, which is what the extrapolation experiment asks about.
Left out: dropout, mixed precision, vocabularies. `step` keeps keys and values, so that a tree of contexts costs one token
a context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from assay.rng import generator

Positions = Literal["learned", "none", "relative"]
Past = list[tuple[Tensor, Tensor]]  # keys and values of a layer, [B, heads, T, width / heads]


@dataclass(frozen=True, slots=True)
class Shape:
    """`features` of a token with the flag, `outputs` of each head by name ("decision": actions, "state": coordinates),
    `horizon` interactions."""

    features: int
    horizon: int
    outputs: tuple[tuple[str, int], ...]
    width: int = 32
    layers: int = 2
    heads: int = 2
    positions: Positions = "learned"


def torch_generator(seed: int, purpose: str, *key: int | str) -> torch.Generator:
    """Keyed like `assay.rng.generator`."""
    return torch.Generator().manual_seed(int(generator(seed, purpose, *key).integers(2**62)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.width
        self.heads = shape.heads
        self.norm_a, self.norm_b = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = _linear(d, 3 * d), _linear(d, d)
        self.up, self.down = _linear(d, 4 * d), _linear(4 * d, d)

    def forward(self, x: Tensor, bias: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, d = x.shape
        q, k, v = self.qkv(self.norm_a(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, d))
        return x + self.down(nn.functional.gelu(self.up(self.norm_b(x)))), k, v


class CausalTransformer(nn.Module):
    """Weights are drawn from `rng`, so the same generator gives the same model."""

    def __init__(self, shape: Shape, rng: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.embed = _linear(shape.features, shape.width)
        if shape.positions == "learned":
            self.place = nn.Parameter(torch.empty(shape.horizon + 1, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.read = nn.ModuleDict({name: _linear(shape.width, size) for name, size in shape.outputs})
        with torch.no_grad():
            for name, weights in self.named_parameters():
                if name == "place" or (weights.ndim == 2 and not name.startswith("embed")):
                    deep = (2 * shape.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                    weights.normal_(0.0, shape.width**-0.5 * 0.2 * deep, generator=rng)
                elif name.startswith("embed.weight"):
                    weights.normal_(0.0, 0.5, generator=rng)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T, F] -> hidden [B, T, width]; position t depends on tokens <= t only."""
        return self.step(tokens, None)[0]

    def step(self, tokens: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        """Hidden of `tokens` [B, T, F] that follow those of `past`, and what the next call needs."""
        before = past[0][0].shape[2] if past else 0
        end = before + tokens.shape[1]
        x = self.embed(tokens)
        if self.shape.positions == "learned":
            if end > self.shape.horizon + 1:
                raise ValueError(
                    f"{end - 1} interactions, but positions were learned for {self.shape.horizon}: beyond them there is"
                    ' nothing to read; positions "none" or "relative" go on'
                )
            x = x + self.place[before:end]
        bias = self._bias(before, end)
        grown: Past = []
        for i, block in enumerate(self.blocks):
            x, k, v = block(x, bias, past[i] if past else None)
            grown.append((k, v))
        return self.norm(x), grown

    def log_law(self, tokens: Tensor) -> Tensor:
        """Log-probabilities [B, T, A] of the decision head: [:, t] is the law at D_t."""
        return self.read["decision"](self(tokens)).log_softmax(-1)

    def state(self, tokens: Tensor) -> Tensor:
        """State head [B, T, n]: [:, t] estimates s_t."""
        out: Tensor = self.read["state"](self(tokens))
        return out

    def _bias(self, before: int, end: int) -> Tensor:
        """Added to attention scores, [heads or 1, end - before, end]: -inf on later keys, and the distance penalty."""
        behind = torch.arange(before, end)[:, None] - torch.arange(end)
        kind = self.norm.weight.dtype
        causal = torch.zeros(behind.shape, dtype=kind).masked_fill(behind < 0, float("-inf"))
        if self.shape.positions != "relative":
            return causal[None]
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.shape.heads + 1, dtype=kind) / self.shape.heads)
        return causal - slopes[:, None, None] * behind.clamp(min=0)


def start_tokens(batch: int, features: int) -> Tensor:
    """[B, 1, F]: the flag alone."""
    token = torch.zeros(batch, 1, features)
    token[..., -1] = 1.0
    return token


def episode_tokens(interactions: np.ndarray | Tensor) -> Tensor:
    """Interactions [B, T, F - 1] -> tokens [B, T + 1, F] with the start token in front."""
    body = torch.as_tensor(interactions, dtype=torch.float32)
    body = torch.cat([body, torch.zeros(*body.shape[:2], 1)], -1)
    return torch.cat([start_tokens(len(body), body.shape[-1]), body], 1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """Zero weights and bias: the model draws its own, from its own generator."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
