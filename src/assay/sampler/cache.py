"""Keys and values of many contexts in slots, and attention over them.

One slot holds one context for its whole life: `keys[layer]` is [S, K, A, E], S slots of A tokens. Both grow in blocks, so
memory follows use. Attention runs on *views* of neighbouring slots; gathering the busy slots first would read and write
the whole cache once more, and decoding is bound by exactly that. So the busy slots are cut into runs (`Segment`), and an
idle slot or a shorter neighbour inside a run is masked when that is cheaper than one more call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

BLOCK = 64  # tokens: granularity of growth
CALL_BYTES = 800_000  # cache bytes that are read in the time of one more attention call (40 us at 20 GB/s)
QUERY_PRICE = 1 / 6  # time of one query's arithmetic on a cache entry, in times of reading that entry
QUERIES = 256  # most queries of one context in one attention call: bounds the mask and skips half of the triangle
MASK = 1 << 22  # most entries of one mask


class SlotCache:
    """K key heads of size E in each layer. Stale entries stay finite, as masked entries are multiplied by zero."""

    def __init__(self, layers: int, key_heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.key_heads, self.head_size, self.dtype, self.device = key_heads, head_size, dtype, device
        self.slots = self.length = 0
        self.keys = [self._empty(0, 0) for _ in range(layers)]
        self.values = [self._empty(0, 0) for _ in range(layers)]

    def _empty(self, slots: int, length: int) -> Tensor:
        return torch.zeros(slots, self.key_heads, length, self.head_size, dtype=self.dtype, device=self.device)

    def memory_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def reserve(self, slots: int, length: int) -> None:
        """Room for `slots` contexts of `length` tokens, grown by a quarter at least, one layer after the other."""
        if slots <= self.slots and length <= self.length:
            return
        slots = max(slots, self.slots * 5 // 4) if slots > self.slots else self.slots
        length = max(length, self.length * 5 // 4) if length > self.length else self.length
        length = -(-length // BLOCK) * BLOCK
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = self._empty(slots, length)
                new[: self.slots, :, : self.length] = old
                tensors[layer] = new
        self.slots, self.length = slots, length

    def copy(self, source: int, target: int, length: int) -> None:
        for t in (*self.keys, *self.values):
            t[target, :, :length] = t[source, :, :length]


@dataclass(slots=True)
class Segment:
    """Slots lo:hi attend together: Q queries each over their first L entries; the flat tokens a:b are those queries."""

    lo: int
    hi: int
    length: int  # L
    queries: int  # Q
    first: int  # a
    end: int  # b
    gather: Tensor | None  # [(hi - lo) Q] flat token of each query, None where that is a:b
    scatter: Tensor | None  # [b - a] row of `gather` that answers each flat token
    mask: Tensor | None  # [hi - lo, 1, Q G, L], 0 or -inf


class SlotAttention:
    """`Attend` for one forward: P pieces of contexts, (slot, start, count), as N flat tokens in that order.

    All pieces of a slot are adjacent and in order. `source` and `copies` name flat tokens whose keys and values
    are also written into other slots (a shared prompt): [C] and two arrays [C] of slots and positions.
    """

    def __init__(
        self,
        cache: SlotCache,
        slot: Ints,
        start: Ints,
        count: Ints,
        group: int,
        copies: tuple[Ints, Ints, Ints] | None = None,
    ) -> None:
        self.cache, self.group = cache, group
        self.token_slot = np.repeat(slot, count)
        first = np.cumsum(count) - count
        self.token_position = np.repeat(start - first, count) + np.arange(len(self.token_slot))
        row, position = self.token_slot, self.token_position
        self.source: Tensor | None = None
        if copies is not None:
            source, to_slot, to_position = copies
            self.source = self._tensor(np.concatenate([np.arange(len(row)), source]))
            row, position = np.concatenate([row, to_slot]), np.concatenate([position, to_position])
        heads = np.arange(cache.key_heads)
        self.rows = self._tensor(((row[:, None] * cache.key_heads + heads) * cache.length + position[:, None]).ravel())
        self.segments = [
            self._segment(slot[i:j], start[i:j], count[i:j], int(first[i]))
            for i, j in cut(slot, start, count, group, self._call_tokens())
        ]

    def _tensor(self, array: NDArray) -> Tensor:
        return torch.from_numpy(array).to(self.cache.device)

    def _call_tokens(self) -> float:
        c = self.cache
        return CALL_BYTES / (2 * c.key_heads * c.head_size * c.dtype.itemsize)

    def _segment(self, slot: Ints, start: Ints, count: Ints, first: int) -> Segment:
        lo, hi = int(slot[0]), int(slot[-1]) + 1
        queries, length, tokens = int(count.max()), int((start + count).max()), int(count.sum())
        segment = Segment(lo, hi, length, queries, first, first + tokens, None, None, None)
        position = np.zeros((hi - lo, queries), np.int64)  # queries that fill up look at entry 0: no row is empty
        if tokens == position.size:
            position[:] = start[:, None] + np.arange(queries)
        else:
            own = np.zeros(position.shape, bool)
            own[slot - lo] = np.arange(queries) < count[:, None]
            position[own] = self.token_position[first : first + tokens]
            gather = np.full(position.shape, first)
            gather[own] = np.arange(first, first + tokens)
            segment.gather, segment.scatter = self._tensor(gather.ravel()), self._tensor(np.flatnonzero(own))
        if queries > 1 or (position != length - 1).any():
            segment.mask = self._mask(position, length)
        return segment

    def _mask(self, position: Ints, length: int) -> Tensor:
        hidden = torch.arange(length, device=self.cache.device) > self._tensor(position)[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=self.cache.device)
        mask.masked_fill_(hidden, float("-inf"))
        if self.group == 1:
            return mask
        if position.shape[1] == 1:
            return mask.expand(-1, -1, self.group, -1)
        return mask.repeat_interleave(self.group, 2)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        cache, size = self.cache, self.cache.head_size
        if self.source is not None:
            k, v = k.index_select(0, self.source), v.index_select(0, self.source)
        keys, values = cache.keys[layer], cache.values[layer]
        keys.view(-1, size).index_copy_(0, self.rows, k.reshape(-1, size))
        values.view(-1, size).index_copy_(0, self.rows, v.reshape(-1, size))
        parts = [self._attend(s, q, keys, values, scale) for s in self.segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, s: Segment, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """A key head's G query heads are further queries of it, so keys and values are never repeated."""
        k, v = keys[s.lo : s.hi, :, : s.length], values[s.lo : s.hi, :, : s.length]
        rows, heads, size = s.hi - s.lo, k.shape[1], k.shape[3]
        q = q[s.first : s.end] if s.gather is None else q.index_select(0, s.gather)
        split = q.reshape(rows, s.queries, heads, self.group, size).transpose(1, 2)  # [rows, K, Q, G, E]
        grouped = split.reshape(rows, heads, s.queries * self.group, size)
        mixed = F.scaled_dot_product_attention(grouped, k, v, attn_mask=s.mask, scale=scale)
        mixed = mixed.reshape(rows, heads, s.queries, self.group, size).transpose(1, 2)
        mixed = mixed.reshape(rows * s.queries, heads * self.group, size)
        return mixed if s.scatter is None else mixed.index_select(0, s.scatter)


def cut(slot: Ints, start: Ints, count: Ints, group: int, call: float) -> list[tuple[int, int]]:
    """Spans of pieces that share an attention call: joined while padding costs less than the call that it saves.

    The price of R slots of L entries with Q queries is R L (1 + Q group QUERY_PRICE), and that of a call `call`, both in
    entries read. A mask has at most MASK entries.
    """
    spans: list[tuple[int, int]] = []
    begin, rows, length, queries, price = 0, 0, 0, 0, 0.0
    previous = -1
    per_query = group * QUERY_PRICE
    for i, (s, n, c) in enumerate(zip(slot.tolist(), (start + count).tolist(), count.tolist(), strict=True)):
        alone = n * (1 + c * per_query)
        if i > begin and s > previous:
            more, longest, most = rows + s - previous, max(length, n), max(queries, c)
            joined = more * longest * (1 + most * per_query)
            if joined <= price + alone + call and more * longest * most * group <= MASK:
                rows, length, queries, price, previous = more, longest, most, joined, s
                continue
        if i > begin:
            spans.append((begin, i))
        begin, rows, length, queries, price, previous = i, 1, n, c, alone, s
    if len(slot):
        spans.append((begin, len(slot)))
    return spans


def pieces(slot: Ints, start: Ints, count: Ints) -> tuple[Ints, Ints, Ints]:
    """Contexts with more than QUERIES pending tokens are cut into several pieces; (slot, start, count) of each."""
    if count.max(initial=0) <= QUERIES:
        return slot, start, count
    number = -(-count // QUERIES)
    owner = np.repeat(np.arange(len(slot)), number)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(number) - number, number)
    begin = start[owner] + part * QUERIES
    return slot[owner], begin, np.minimum(QUERIES, start[owner] + count[owner] - begin)
