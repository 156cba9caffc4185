"""Which rows share a forward, and how a forward shares what rows have in common.

The rows of a group are a tree: they share the prompt, the first observation, often the first action. A pack holds each
*segment* of that tree once, flat, without padding: products, norms and the backward pass run over segments; only
attention looks along a path of the tree. Everything here is a function of the rows in key order, never of time.

Left out: sharing between groups (their prompts differ in the task), and segments that save less than MIN_SAVED tokens,
because each one costs calls.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.rows import Row
from assay.trace import Ids

MIN_SAVED = 16  # tokens; an extra segment costs about as much as 10 tokens of a 1M model
SLACK = 1.25  # rows of one attention tile differ in length by at most this factor
TILE_TOKENS = 2048  # keys in one tile: beyond it, tiles fall out of a core's cache


@dataclass(slots=True, eq=False)
class Segment:
    """Tokens [start, end) of a path of the tree; what stands before them are the segments of `parents`, root first."""

    ids: Ids  # of the whole path up to `end`
    start: int
    parents: tuple[Segment, ...]
    offset: int = -1  # of its first token in the pack

    @property
    def end(self) -> int:
        return len(self.ids)

    def __len__(self) -> int:
        return len(self.ids) - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """B segments behind prefixes of one length P, padded to S tokens: one attention call.

    Their own tokens are the flat tokens [first, last), in order.
    """

    prefix: int  # P
    size: int  # S
    first: int
    last: int
    rows: int  # B
    pad: Tensor | None  # int64 [B * S] place among the own tokens; None: nothing is padded
    slots: Tensor | None  # int64 [last - first] where each own token stands in the padded tile
    before: Tensor  # int64 [B * P] flat tokens before each segment
    families: tuple[tuple[int, int], ...]  # (a, b): segments a..b have the same tokens before them

    def to(self, device: torch.device) -> Tile:
        pad, slots = (None if t is None else t.to(device) for t in (self.pad, self.slots))
        return replace(self, pad=pad, slots=slots, before=self.before.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One forward: N flat tokens and where each row finds its targets' contexts."""

    rows: list[Row]
    ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    tiles: list[Tile]
    sources: list[NDArray[np.int64]]  # per row, [number of targets]: flat token whose output predicts the target
    unshared: int  # tokens that the rows have one by one

    @property
    def tokens(self) -> int:
        return len(self.ids)


def pack(rows: Sequence[Row], tokens_per_forward: int, *, whole_traces: bool = False, share: bool = True) -> list[Pack]:
    """Packs of at most `tokens_per_forward` flat tokens, rows in key order. A longer row is a pack of its own.

    whole_traces: keep all rows of a trace in one pack, whatever it takes (a loss with one ratio per episode).
    share: False computes every row from its start; for tests and measurements.
    """
    ordered = sorted(rows, key=lambda row: row.key)
    packs: list[Pack] = []
    pending: list[Segment] = []
    held: list[Row] = []
    used = 0
    for unit in _units(ordered, tokens_per_forward, whole_traces, share):
        segments = _forest(unit, share)
        size = sum(map(len, segments))
        if held and used + size > tokens_per_forward:
            packs.append(_lay_out(held, pending))
            held, pending, used = [], [], 0
        held, pending, used = held + unit, pending + segments, used + size
    if held:
        packs.append(_lay_out(held, pending))
    return packs


def _units(rows: list[Row], limit: int, whole_traces: bool, share: bool) -> list[list[Row]]:
    """Groups in key order; a group that is over the limit is halved until it is not, between traces or rows."""
    stack = list(reversed(_runs(rows, lambda row: row.trace.group_key)))
    units: list[list[Row]] = []
    while stack:
        unit = stack.pop()
        parts = _runs(unit, lambda row: row.trace.key) if whole_traces else [[row] for row in unit]
        if len(parts) == 1 or sum(map(len, _forest(unit, share))) <= limit:
            units.append(unit)
            continue
        half = len(parts) // 2
        stack += [[row for part in parts[half:] for row in part], [row for part in parts[:half] for row in part]]
    return units


def _runs(rows: list[Row], key: Callable[[Row], Hashable]) -> list[list[Row]]:
    return [list(run) for _, run in groupby(rows, key)]


def context(row: Row) -> Ids:
    """The ids that the row's targets are predicted from: nothing is computed from its last target on."""
    return np.ascontiguousarray(row.ids[: int(row.at.max())], np.int32)


def _forest(rows: list[Row], share: bool) -> list[Segment]:
    """The segments of the rows' contexts, each before its children; equal contexts, or one inside another, are one."""
    contexts = [context(row) for row in rows]
    if not share:
        return [Segment(ids, 0, ()) for ids in contexts]
    contexts.sort(
        key=lambda ids: ids.tobytes()
    )  # what shares a beginning stands together, a prefix before its extension
    kept = [
        ids
        for ids, following in zip(contexts, [*contexts[1:], None], strict=True)
        if following is None or not _is_prefix(ids, following)
    ]
    segments: list[Segment] = []
    _split(kept, 0, (), segments)
    return segments


def _split(paths: list[Ids], start: int, parents: tuple[Segment, ...], into: list[Segment]) -> None:
    """Segments below `parents` of sorted paths that agree in their first `start` tokens, none a prefix of another."""
    if len(paths) == 1:
        into.append(Segment(paths[0], start, parents))
        return
    common = _common(paths[0], paths[-1])  # sorted: what the first and the last share, all share
    if (common - start) * (len(paths) - 1) >= MIN_SAVED:
        node = Segment(paths[0][:common], start, parents)
        into.append(node)
        parents, start = (*parents, node), common
    first = 0
    for i in range(1, len(paths) + 1):
        if i == len(paths) or paths[i][common] != paths[first][common]:
            _split(paths[first:i], start, parents, into)
            first = i


def _common(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _is_prefix(a: Ids, b: Ids) -> bool:
    return len(a) <= len(b) and np.array_equal(a, b[: len(a)])


def _lay_out(rows: list[Row], segments: list[Segment]) -> Pack:
    """Flat order: by prefix length, then by about equal length, so that the segments of a tile are neighbours."""
    ordered = sorted(segments, key=lambda s: (s.start, _level(s)))  # stable: families stay together, in key order
    offset = 0
    for segment in ordered:
        segment.offset = offset
        offset += len(segment)
    paths = {s.ids.tobytes(): _path(s) for s in ordered}
    names = sorted(paths)
    sources = []
    for row in rows:
        # its own path, or one that extends it: the first that does not stand before it in byte order
        path = paths[names[bisect_left(names, context(row).tobytes())]]
        sources.append(path[row.at.astype(np.int64) - 1])
    return Pack(
        rows,
        torch.from_numpy(np.concatenate([s.ids[s.start :] for s in ordered]).astype(np.int64)),
        torch.from_numpy(np.concatenate([np.arange(s.start, s.end) for s in ordered])),
        _tiles(ordered),
        sources,
        sum(len(context(row)) for row in rows),
    )


def _path(segment: Segment) -> NDArray[np.int64]:
    """int64 [end]: the flat index of every token of the path."""
    chain = (*segment.parents, segment)
    return np.concatenate([np.arange(s.offset, s.offset + len(s)) for s in chain])


def _level(segment: Segment) -> int:
    """Segments of one level differ in length by less than the factor SLACK."""
    return int(math.log(len(segment)) / math.log(SLACK))


def _tiles(ordered: list[Segment]) -> list[Tile]:
    tiles, first = [], 0
    for i in range(1, len(ordered) + 1):
        a = ordered[first]
        if i < len(ordered):
            b = ordered[i]
            end = max(s.end for s in ordered[first : i + 1])
            if (b.start, _level(b)) == (a.start, _level(a)) and (i - first + 1) * end <= TILE_TOKENS:
                continue
        tiles.append(_tile(ordered[first:i]))
        first = i
    return tiles


def _tile(segments: list[Segment]) -> Tile:
    lengths = np.array([len(s) for s in segments])
    size = int(lengths.max())
    own = np.concatenate([np.arange(n) + b * size for b, n in enumerate(lengths)])
    padded = int(lengths.min()) < size
    pad = np.minimum(np.arange(size)[None], lengths[:, None] - 1) + (np.cumsum(lengths) - lengths)[:, None]
    before = [_path(s.parents[-1]) if s.parents else np.zeros(0, np.int64) for s in segments]
    families, start = [], 0
    for b in range(1, len(segments) + 1):
        if b == len(segments) or segments[b].parents is not segments[start].parents:
            families.append((start, b))
            start = b
    return Tile(
        segments[0].start,
        size,
        segments[0].offset,
        segments[0].offset + int(lengths.sum()),
        len(segments),
        torch.from_numpy(pad.reshape(-1)) if padded else None,
        torch.from_numpy(own) if padded else None,
        torch.from_numpy(np.concatenate(before)),
        tuple(families),
    )
