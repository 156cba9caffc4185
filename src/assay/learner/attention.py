"""Attention of a pack: each segment looks at itself and at the segments before it on its path.

A tile is one call of the fused CPU kernel: queries are the segments' own tokens, keys are [prefix | own]. Prefixes of a
tile are equally long, so one causal mask serves all its rows, and padding stands behind every real token: no mask per
row. On the CPU the backward pass is written out, because autograd would copy keys of shared prefixes once per layer and
zero-fill every slice; elsewhere torch's own attention runs on the same tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.learner.packing import Tile
from assay.model import Attend

CHUNK = 128  # queries per call: the keys behind a chunk are not looked at

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tile_attention(tiles: list[Tile], device: torch.device) -> Attend:
    """The `attend` of `Network.hidden` for a pack's tiles."""
    mask = _band(max(tile.prefix + tile.size for tile in tiles), device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if q.dtype != v.dtype:  # rotation leaves autocast's type
            q, k = q.to(v.dtype), k.to(v.dtype)
        if q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16):
            mixed: Tensor = _TileAttention.apply(q, k, v, tiles, mask.to(q.dtype), scale)
            return mixed
        return _plain(q, k, v, tiles, mask.to(q.dtype), scale)

    return attend


def _band(longest: int, device: torch.device) -> Tensor:
    """[CHUNK, longest + CHUNK], column c is the key c - longest places after the first query's: 0 if seen, else -inf."""
    place = torch.arange(longest + CHUNK, device=device) - longest
    seen = place[None] <= torch.arange(CHUNK, device=device)[:, None]
    return torch.zeros(seen.shape, device=device).masked_fill(~seen, -torch.inf)


def _window(mask: Tensor, before: int, queries: int) -> Tensor:
    """[1, 1, queries, before + queries] view: query i sees `before` keys and then those up to its own."""
    middle = mask.shape[1] - CHUNK
    return mask[None, None, :queries, middle - before : middle + queries]


def _own(x: Tensor, tile: Tile) -> Tensor:
    """Flat [N, H, E] -> [B, S, H, E] of the tile's own tokens."""
    own = x[tile.first : tile.last]
    if tile.pad is not None:
        own = own.index_select(0, tile.pad)
    return own.reshape(tile.rows, tile.size, *x.shape[1:])


def _keys(x: Tensor, tile: Tile, repeat: int) -> Tensor:
    """Flat [N, K, E] -> [B, H, P + S, E]: prefix and own tokens, key heads repeated for their query heads."""
    keys = _own(x, tile)
    if tile.prefix:
        before = x.index_select(0, tile.before).view(tile.rows, tile.prefix, *x.shape[1:])
        keys = torch.cat([before, keys], 1)
    return (keys.repeat_interleave(repeat, 2) if repeat > 1 else keys).transpose(1, 2)


def _flat(x: Tensor, tile: Tile) -> Tensor:
    """[B, S, ...] -> [own tokens, ...], padding left out."""
    flat = x.reshape(-1, *x.shape[2:])
    return flat if tile.slots is None else flat.index_select(0, tile.slots)


def _plain(q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], mask: Tensor, scale: float) -> Tensor:
    repeat, mixed = q.shape[1] // k.shape[1], []
    for tile in tiles:
        queries, keys, values = _own(q, tile).transpose(1, 2), _keys(k, tile, repeat), _keys(v, tile, repeat)
        chunks = []
        for a in range(0, tile.size, CHUNK):
            n = min(CHUNK, tile.size - a)
            end = tile.prefix + a + n
            seen = _window(mask, tile.prefix + a, n)
            part = queries[:, :, a : a + n]
            chunks.append(F.scaled_dot_product_attention(part, keys[:, :, :end], values[:, :, :end], seen, scale=scale))
        mixed.append(_flat(torch.cat(chunks, 2).transpose(1, 2), tile))
    return torch.cat(mixed)


class _TileAttention(torch.autograd.Function):
    """The same with the kernel's own backward, gradients of shared keys summed in place."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], mask: Tensor, scale: float) -> Tensor:
        mixed = torch.empty(q.shape, dtype=q.dtype)
        repeat, saved = q.shape[1] // k.shape[1], []
        for tile in tiles:
            queries, keys, values = _own(q, tile).transpose(1, 2), _keys(k, tile, repeat), _keys(v, tile, repeat)
            saved += [queries, keys, values]
            chunks = []
            for a in range(0, tile.size, CHUNK):
                n = min(CHUNK, tile.size - a)
                end = tile.prefix + a + n
                seen = _window(mask, tile.prefix + a, n)
                out, lse = _forward(
                    queries[:, :, a : a + n], keys[:, :, :end], values[:, :, :end], attn_mask=seen, scale=scale
                )
                saved += [out, lse]
                chunks.append(out)
            out = chunks[0] if len(chunks) == 1 else torch.cat(chunks, 2)
            mixed[tile.first : tile.last] = _flat(out.transpose(1, 2), tile)
        ctx.save_for_backward(mask, *saved)
        ctx.tiles, ctx.scale, ctx.key_heads = tiles, scale, k.shape[1]
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        mask, *saved = ctx.saved_tensors
        n, heads, size = grad.shape
        key_heads = ctx.key_heads
        grad_q = torch.empty_like(grad)
        grad_k, grad_v = grad.new_zeros(n, key_heads, size), grad.new_zeros(n, key_heads, size)
        rest = iter(saved)
        for tile in ctx.tiles:
            queries, keys, values = next(rest), next(rest), next(rest)
            incoming = _own(grad, tile)
            if tile.pad is not None and tile.slots is not None:  # padding has outputs, they have no gradient
                incoming = torch.zeros_like(incoming)
                incoming.view(-1, heads, size)[tile.slots] = grad[tile.first : tile.last]
            incoming = incoming.transpose(1, 2)
            dq, dk, dv = _tile_backward(tile, incoming, queries, keys, values, rest, mask, ctx.scale)
            grad_q[tile.first : tile.last] = _flat(dq.transpose(1, 2), tile)
            for total, part in ((grad_k, dk), (grad_v, dv)):
                part = part.transpose(1, 2)
                if heads != key_heads:
                    part = part.unflatten(2, (key_heads, heads // key_heads)).sum(3)
                total[tile.first : tile.last] += _flat(part[:, tile.prefix :], tile)
                for a, b in tile.families if tile.prefix else ():
                    index = tile.before[a * tile.prefix : (a + 1) * tile.prefix]
                    total.index_add_(0, index, part[a:b, : tile.prefix].sum(0))
        return grad_q, grad_k, grad_v, None, None, None


def _tile_backward(
    tile: Tile, grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, rest: Any, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [B, H, S, E], [B, H, P + S, E] twice, summed over the chunks of queries."""
    dqs: list[Tensor] = []
    dk: Tensor | None = None
    dv: Tensor | None = None
    for a in range(0, tile.size, CHUNK):
        n = min(CHUNK, tile.size - a)
        end = tile.prefix + a + n
        out, lse = next(rest), next(rest)
        dq, dk_part, dv_part = _backward(
            grad[:, :, a : a + n],
            queries[:, :, a : a + n],
            keys[:, :, :end],
            values[:, :, :end],
            out,
            lse,
            0.0,
            False,
            attn_mask=_window(mask, tile.prefix + a, n),
            scale=scale,
        )
        dqs.append(dq)
        if end == keys.shape[2] and dk is None:
            dk, dv = dk_part, dv_part
        else:
            dk, dv = (torch.zeros_like(keys), torch.zeros_like(values)) if dk is None or dv is None else (dk, dv)
            dk[:, :, :end] += dk_part
            dv[:, :, :end] += dv_part
    assert dk is not None and dv is not None
    return dqs[0] if len(dqs) == 1 else torch.cat(dqs, 2), dk, dv
