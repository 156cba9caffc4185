"""Attention of a pack: each segment looks at itself and at the segments before it on its path.

A tile is one call of the fused CPU kernel: queries are the segments' own tokens, keys are [prefix | own]. Prefixes of a
tile are equally long, so one causal mask serves all its rows, and padding stands behind every real token: no mask per
row. Query heads that share a key head stand one after the other in the query axis: fewer and larger products, and keys
are not repeated. On the CPU the backward pass is written out, because autograd would copy keys of shared prefixes once
per layer and zero-fill every slice; elsewhere torch's own attention runs on the same tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.learner.packing import Tile
from assay.model import Attend

CHUNK = 96  # tokens whose queries are one call: the keys behind a chunk are not looked at

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tile_attention(tiles: list[Tile], device: torch.device) -> Attend:
    """The `attend` of `Network.hidden` for a pack's tiles."""
    longest = max(tile.prefix + tile.size for tile in tiles)
    tiles = [tile.to(device) for tile in tiles]
    bands: dict[int, Tensor] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if q.dtype != v.dtype:  # rotation leaves autocast's type
            q, k = q.to(v.dtype), k.to(v.dtype)
        shared = q.shape[1] // k.shape[1]
        if shared not in bands:
            bands[shared] = _band(longest, shared, device).to(q.dtype)
        if q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16):
            mixed: Tensor = _TileAttention.apply(q, k, v, tiles, bands[shared], scale)
            return mixed
        return _plain(q, k, v, tiles, bands[shared], scale)

    return attend


def _band(longest: int, shared: int, device: torch.device) -> Tensor:
    """[CHUNK * shared, longest + CHUNK]: the mask of a chunk, `shared` queries a token. Column c is the key
    c - longest places after the first token's own: 0 if seen, else -inf."""
    place = torch.arange(longest + CHUNK, device=device) - longest
    seen = place[None] <= torch.arange(CHUNK, device=device).repeat_interleave(shared)[:, None]
    return torch.zeros(seen.shape, device=device).masked_fill(~seen, -torch.inf)


def _chunks(tile: Tile, mask: Tensor) -> Iterator[tuple[slice, int, Tensor]]:
    """Per chunk: its queries, how many keys it looks at, its mask [1, 1, queries, keys], a view."""
    shared, middle = mask.shape[0] // CHUNK, mask.shape[1] - CHUNK
    for a in range(0, tile.size, CHUNK):
        n = min(CHUNK, tile.size - a)
        before = tile.prefix + a
        window = mask[None, None, : n * shared, middle - before : middle + n]
        yield slice(a * shared, (a + n) * shared), before + n, window


def _own(x: Tensor, tile: Tile) -> Tensor:
    """Flat [N, H, E] -> [B, S, H, E] of the tile's own tokens."""
    own = x[tile.first : tile.last]
    if tile.pad is not None:
        own = own.index_select(0, tile.pad)
    return own.reshape(tile.rows, tile.size, *x.shape[1:])


def _queries(x: Tensor, tile: Tile, key_heads: int) -> Tensor:
    """Flat [N, H, E] -> [B, K, S * H / K, E]."""
    own = _own(x, tile)
    if x.shape[1] == key_heads:
        return own.transpose(1, 2)
    grouped = own.unflatten(2, (key_heads, -1)).transpose(1, 2)
    return grouped.reshape(tile.rows, key_heads, -1, x.shape[2])


def _outputs(x: Tensor, tile: Tile, heads: int) -> Tensor:
    """[B, K, S * H / K, E] -> [own tokens, H, E], padding left out: the inverse of `_queries`."""
    if heads == x.shape[1]:
        return _flat(x.transpose(1, 2), tile)
    grouped = x.unflatten(2, (tile.size, -1)).transpose(1, 2)
    return _flat(grouped.reshape(tile.rows, tile.size, heads, x.shape[3]), tile)


def _keys(x: Tensor, tile: Tile) -> Tensor:
    """Flat [N, K, E] -> [B, K, P + S, E]: prefix and own tokens."""
    keys = _own(x, tile)
    if tile.prefix:
        before = x.index_select(0, tile.before).view(tile.rows, tile.prefix, *x.shape[1:])
        keys = torch.cat([before, keys], 1)
    return keys.transpose(1, 2)


def _flat(x: Tensor, tile: Tile) -> Tensor:
    """[B, S, ...] -> [own tokens, ...], padding left out."""
    flat = x.reshape(-1, *x.shape[2:])
    return flat if tile.slots is None else flat.index_select(0, tile.slots)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _plain(q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], mask: Tensor, scale: float) -> Tensor:
    mixed = []
    for tile in tiles:
        queries, keys, values = _queries(q, tile, k.shape[1]), _keys(k, tile), _keys(v, tile)
        parts = [
            F.scaled_dot_product_attention(queries[:, :, own], keys[:, :, :end], values[:, :, :end], seen, scale=scale)
            for own, end, seen in _chunks(tile, mask)
        ]
        mixed.append(_outputs(_join(parts), tile, q.shape[1]))
    return torch.cat(mixed)


class _TileAttention(torch.autograd.Function):
    """The same with the kernel's own backward, gradients of shared keys summed in place."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], mask: Tensor, scale: float) -> Tensor:
        mixed = torch.empty(q.shape, dtype=q.dtype)
        saved = []
        for tile in tiles:
            queries, keys, values = _queries(q, tile, k.shape[1]), _keys(k, tile), _keys(v, tile)
            saved += [queries, keys, values]
            parts = []
            for own, end, seen in _chunks(tile, mask):
                out, lse = _forward(
                    queries[:, :, own], keys[:, :, :end], values[:, :, :end], attn_mask=seen, scale=scale
                )
                saved += [out, lse]
                parts.append(out)
            mixed[tile.first : tile.last] = _outputs(_join(parts), tile, q.shape[1])
        ctx.save_for_backward(mask, *saved)
        ctx.tiles, ctx.scale, ctx.key_heads = tiles, scale, k.shape[1]
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        mask, *saved = ctx.saved_tensors
        n, heads, size = grad.shape
        grad_q = torch.empty_like(grad)
        grad_k, grad_v = grad.new_zeros(n, ctx.key_heads, size), grad.new_zeros(n, ctx.key_heads, size)
        rest = iter(saved)
        for tile in ctx.tiles:
            kept = next(rest), next(rest), next(rest)
            dq, dk, dv = _tile_backward(tile, _incoming(grad, tile, ctx.key_heads), kept, rest, mask, ctx.scale)
            grad_q[tile.first : tile.last] = _outputs(dq, tile, heads)
            for total, part in ((grad_k, dk.transpose(1, 2)), (grad_v, dv.transpose(1, 2))):
                total[tile.first : tile.last] += _flat(part[:, tile.prefix :], tile)
                for a, b in tile.families if tile.prefix else ():
                    index = tile.before[a * tile.prefix : (a + 1) * tile.prefix]
                    total.index_add_(0, index, part[a:b, : tile.prefix].sum(0))
        return grad_q, grad_k, grad_v, None, None, None


def _incoming(grad: Tensor, tile: Tile, key_heads: int) -> Tensor:
    """Gradient of a tile's outputs, as its queries lie; padding has outputs too, and no gradient."""
    if tile.slots is None:
        return _queries(grad, tile, key_heads)
    padded = grad.new_zeros(tile.rows * tile.size, *grad.shape[1:])
    padded[tile.slots] = grad[tile.first : tile.last]
    return _queries(padded, replace(tile, first=0, last=len(padded), pad=None), key_heads)


def _tile_backward(
    tile: Tile,
    grad: Tensor,
    kept: tuple[Tensor, Tensor, Tensor],
    rest: Iterator[Tensor],
    mask: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the tile's queries, keys and values, summed over its chunks."""
    queries, keys, values = kept
    dqs: list[Tensor] = []
    dk: Tensor | None = None
    dv: Tensor | None = None
    for own, end, seen in _chunks(tile, mask):
        out, lse = next(rest), next(rest)
        dq, dk_part, dv_part = _backward(
            grad[:, :, own],
            queries[:, :, own],
            keys[:, :, :end],
            values[:, :, :end],
            out,
            lse,
            0.0,
            False,
            attn_mask=seen,
            scale=scale,
        )
        dqs.append(dq)
        if dk is None and end == keys.shape[2]:
            dk, dv = dk_part, dv_part
            continue
        if dk is None or dv is None:
            dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        dk[:, :, :end] += dk_part
        dv[:, :, :end] += dv_part
    assert dk is not None and dv is not None
    return _join(dqs), dk, dv
