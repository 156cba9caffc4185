"""The training forward of plain Llama-family networks, its memory-bound parts with a backward of their own.

On a CPU half the time of a small model's update is not products: autograd rotates, gates and normalises in ten passes
where two or three do, fills slices with zeros and joins them again. Here each of these is one autograd function, heads
are rotated as complex numbers (the rows of the projections are put in that order, which attention scores cannot see),
and residuals are added inside the product. Values equal `Network.hidden` up to rounding; a test holds that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.model import Attend, LayerWeights, Network


class TrainingWeights:
    """Fused weights as leaves that gather the gradients of many packs, then hand them to the model once."""

    def __init__(self, network: Network) -> None:
        order = _complex_order(network.head_size, network.device)
        self.fused = [_reorder(w, network, order) for w in network.weights() or []]
        self.leaves = [LayerWeights._make(_leaf(t) for t in w) for w in self.fused]

    def backward(self) -> None:
        """Adds the gathered gradients to the model's parameters."""
        pairs = [
            (tensor, leaf.grad)
            for whole, leaves in zip(self.fused, self.leaves, strict=True)
            for tensor, leaf in zip(whole, leaves, strict=True)
            if tensor is not None and leaf is not None and tensor.requires_grad and leaf.grad is not None
        ]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def hidden(
    network: Network, weights: list[LayerWeights], ids: Tensor, positions: Tensor, attend: Attend, dtype: torch.dtype
) -> Tensor:
    """Final hidden states [N, D] of N flat tokens, in `dtype`."""
    model: Any = network.model.model
    heads, key_heads, size = network.heads, network.key_heads, network.head_size
    eps, scale = float(network.model.config.rms_norm_eps), size**-0.5
    angles = torch.complex(network.cos[positions].float(), network.sin[positions].float())
    x = F.embedding(ids, model.embed_tokens.weight).to(dtype)
    for layer, full in enumerate(weights):
        w = LayerWeights._make(None if t is None else t.to(dtype) for t in full)
        h: Tensor = _Norm.apply(x, w.norm_in, eps)
        qkv = F.linear(h, w.qkv, w.qkv_bias).view(-1, heads + 2 * key_heads, size)
        q, k, v = qkv.split([heads, key_heads, key_heads], 1)
        if w.q_norm is not None:
            q, k = _Norm.apply(q, w.q_norm, eps), _Norm.apply(k, w.k_norm, eps)
        mixed = attend(layer, _Rotate.apply(q, angles), _Rotate.apply(k, angles), v, scale)
        x = _add_product(x, mixed.reshape(-1, heads * size), w.out, w.out_bias)
        h = _Norm.apply(x, w.norm_mid, eps)
        act: Tensor = _Gate.apply(F.linear(h, w.gate_up, w.gate_up_bias))
        x = _add_product(x, act, w.down, w.down_bias)
    return _Norm.apply(x, model.norm.weight.to(dtype), eps)


def _add_product(x: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = torch.addmm(x, a, weight.t())
    return x if bias is None else x + bias


def _complex_order(size: int, device: torch.device) -> Tensor:
    """int64 [E]: 0, E/2, 1, E/2 + 1, ...: the two halves that a rotation pairs become neighbours."""
    return torch.arange(size, device=device).view(2, -1).t().reshape(-1)


def _reorder(w: LayerWeights, network: Network, order: Tensor) -> LayerWeights:
    size, rotated = network.head_size, network.heads + network.key_heads
    rows = torch.arange((rotated + network.key_heads) * size, device=order.device).view(-1, size)
    rows = torch.cat([rows[:rotated][:, order], rows[rotated:]]).reshape(-1)
    return w._replace(
        qkv=w.qkv[rows],
        qkv_bias=None if w.qkv_bias is None else w.qkv_bias[rows],
        q_norm=None if w.q_norm is None else w.q_norm[order],
        k_norm=None if w.k_norm is None else w.k_norm[order],
    )


def _leaf(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)


class _Norm(torch.autograd.Function):
    """`x / rms(x) * weight` over the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        power = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        inverse = power.div_(x.shape[-1]).add_(eps).rsqrt_().to(x.dtype)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse
        product = grad * unit
        share = (product @ weight).div_(-x.shape[-1]).unsqueeze(-1)
        grad_weight = product.flatten(0, -2).sum(0)
        return (grad * weight).addcmul_(unit, share).mul_(inverse), grad_weight, None


class _Rotate(torch.autograd.Function):
    """[N, H, E] whose pairs of neighbours are complex numbers, times angles [N, 1, E/2]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return _turn(x, angles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        (angles,) = ctx.saved_tensors
        return _turn(grad, angles.conj()), None


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)


class _Gate(torch.autograd.Function):
    """[N, 2M] -> silu(first half) * second half."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        act = F.silu(gate)
        ctx.save_for_backward(both, act)
        return act * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        both, act = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        out = torch.empty_like(both)
        first, second = out.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=first)
        torch.mul(grad, act, out=second)
        return out
