"""Log-probs of targets from hidden states: logits only where something is predicted, in chunks that bound memory.

Positions that several rows share have their logits computed once. The softmax of the forward pass is kept and becomes
the gradient in place; where all chunks together would be too big, they are computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from assay.model import Network

CHUNK_ELEMENTS = 1 << 20  # logits of a chunk, 4 MiB: what stays near the core
CHUNK_ROWS = 256  # at least: below it the product reads the head's weights too often
KEEP_ELEMENTS = 1 << 26  # logits that a forward may hold for its backward, 256 MiB in fp32


def target_logprobs(
    network: Network, hidden: Tensor, sources: Tensor, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs [M], with gradient, and full-vocabulary entropies [M], without, in nats, fp32.

    hidden [N, D]; sources int64 [M]: the flat token that predicts target m; targets int64 [M]; temperatures [M] > 0.
    """
    pairs = torch.stack([sources.double(), temperatures.double()])
    places, inverse = torch.unique(pairs, dim=1, return_inverse=True)
    order = torch.argsort(inverse, stable=True)  # targets by position, so that a chunk's are neighbours
    inverse, wanted = inverse[order], targets[order]
    states = hidden.index_select(0, places[0].long()).to(network.dtype)
    heat = places[1].float()
    rows = max(CHUNK_ROWS, CHUNK_ELEMENTS // network.vocabulary)
    keep = not torch.is_grad_enabled() or len(states) * network.vocabulary <= KEEP_ELEMENTS

    def chunk(part: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = _TargetLogProbs.apply(network.logits(part), *rest)
        return both

    parts = []
    for a in range(0, len(states), rows):
        b = min(a + rows, len(states))
        first, last = torch.searchsorted(inverse, torch.tensor([a, b], device=inverse.device)).tolist()
        arguments = (states[a:b], inverse[first:last] - a, wanted[first:last], heat[a:b])
        parts.append(chunk(*arguments) if keep else checkpoint(chunk, *arguments, use_reentrant=False))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    logprobs, entropies = (torch.cat(list(column)) for column in zip(*parts, strict=True))
    return logprobs[back], entropies[back]


def full_logprobs(network: Network, hidden: Tensor, sources: Tensor, temperatures: Tensor) -> Tensor:
    """Log-softmax [M, V] in fp32 of every token of the vocabulary, with gradient."""
    states = hidden.index_select(0, sources).to(network.dtype)
    return (network.logits(states) / temperatures.float()[:, None]).log_softmax(-1)


class _TargetLogProbs(torch.autograd.Function):
    """logits [U, V], which of them [M], targets [M], temperatures [U] -> log-probs [M], entropies [M]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, which: Tensor, targets: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        scaled = logits / temperatures[:, None] if bool((temperatures != 1.0).any()) else logits
        top = scaled.amax(-1, keepdim=True)
        weight = (scaled - top).exp_()
        total = weight.sum(-1)
        normaliser = total.log() + top[:, 0]
        # an impossible token has weight 0 and logit -inf: it counts 0, not NaN
        expected = torch.linalg.vecdot(weight, scaled.clamp(min=torch.finfo(torch.float32).min)) / total
        ctx.save_for_backward(weight, total, which, targets, temperatures)
        entropies = (normaliser - expected)[which]
        ctx.mark_non_differentiable(entropies)
        return scaled[which, targets] - normaliser[which], entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, total, which, targets, temperatures = ctx.saved_tensors
        grad = grads[0] / temperatures[which]
        share = torch.zeros_like(total).index_add_(0, which, grad)
        out = weight * (-share / total)[:, None]
        return out.index_put_((which, targets), grad, accumulate=True), None, None, None
