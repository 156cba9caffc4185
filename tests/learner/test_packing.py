"""Packs: which rows share a forward, and what of it they share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_parts import VOCABULARY, rows_of, trace, traces, twin_of

from assay.learner import attention
from assay.learner.attention import tile_attention
from assay.learner.packing import Pack, context, pack
from assay.rows import Layout, Row, build_rows


def paths(part: Pack) -> list[np.ndarray]:
    """Per row, the flat tokens that the context of its last target sees."""
    seen = sight(part)
    return [np.flatnonzero(seen[s[np.argmax(row.at)]]) for row, s in zip(part.rows, part.sources, strict=True)]


def sight(part: Pack) -> np.ndarray:
    """bool [N, N]: which flat token sees which, from attention itself: values are one-hot, eight tokens at a time."""
    n = part.tokens
    attend = tile_attention(part.tiles, torch.device("cpu"))
    seen = np.zeros((n, n), bool)
    for a in range(0, n, 8):
        v = torch.zeros(n, 1, 8)
        v[torch.arange(a, min(a + 8, n)), 0, torch.arange(min(8, n - a))] = 1.0
        mixed = attend(0, torch.zeros(n, 1, 8), torch.zeros(n, 1, 8), v, 1.0)
        seen[:, a : a + 8] = mixed[:, 0, : n - a].numpy() > 0
    return seen


def check(rows: list[Row], limit: int, share: bool = True) -> None:
    packs = pack(rows, limit, share=share)
    assert sorted(id(r) for p in packs for r in p.rows) == sorted(map(id, rows))
    assert [r.key for p in packs for r in p.rows] == sorted(r.key for r in rows)
    for part in packs:
        assert part.tokens <= limit or len({r.key for r in part.rows}) == 1
        for row, seen in zip(part.rows, paths(part), strict=True):
            order = seen[np.argsort(part.positions.numpy()[seen])]
            assert part.positions.numpy()[order].tolist() == list(range(len(context(row))))
            assert part.ids.numpy()[order].tolist() == context(row).tolist()


@pytest.mark.parametrize("layout", ["append", "window(1)"])
@pytest.mark.parametrize("limit", [1, 70, 9999])
@pytest.mark.parametrize("share", [True, False])
def test_every_target_sees_its_own_context_and_nothing_else(layout: str, limit: int, share: bool) -> None:
    check(rows_of(traces(), layout), limit, share)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(20, 400))
def test_any_tree_of_rows_is_laid_out_right(seed: int, letters: int, limit: int) -> None:
    """Few letters and short turns: rows are equal, inside one another, and branch everywhere."""
    rng = np.random.default_rng(seed)
    made = []
    for slot in range(2):
        prompt = rng.integers(0, letters, int(rng.integers(1, 30))).astype(np.int32)
        for rollout in range(5):
            turns = [(int(rng.integers(0, 4)), int(rng.integers(1, 30))) for _ in range(int(rng.integers(1, 3)))]
            one = trace(rng, slot, rollout, prompt, turns)
            for turn in one.turns:
                turn.ids[:] = np.where(rng.random(len(turn.ids)) < 0.9, 0, turn.ids % letters)
                turn.context_ids[:] %= letters
            made.append(one)
    check(build_rows(made, Layout.parse("append" if seed % 2 else "window(1)")), limit)


def test_rows_share_prompt_first_observation_and_first_action() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, 30).astype(np.int32)
    first = trace(rng, 0, 0, prompt, [(20, 2), (10, 2)])
    twin = twin_of(first, trace(rng, 0, 1, prompt, [(20, 2), (10, 2)]))
    rows = build_rows([first, twin], Layout())
    (part,) = pack(rows, 999)
    whole = len(context(rows[0]))
    shared = 30 + 20 + 2 + 1  # prompt, observation, answer and what closes it
    assert part.tokens == 2 * whole - shared and part.unshared == 2 * whole


def test_equal_rows_cost_one() -> None:
    rows = rows_of(traces())
    again = rows_of(traces())
    assert pack(rows + again, 9999)[0].tokens == pack(rows, 9999)[0].tokens


def test_packing_does_not_depend_on_the_order_of_arrival() -> None:
    rows = rows_of(traces(groups=3))
    shuffled = [rows[i] for i in np.random.default_rng(1).permutation(len(rows))]
    for a, b in zip(pack(rows, 90), pack(shuffled, 90), strict=True):
        assert torch.equal(a.ids, b.ids) and torch.equal(a.positions, b.positions)
        assert [r.key for r in a.rows] == [r.key for r in b.rows]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_attention_and_its_gradient_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]) -> None:
    """Queries in chunks of 8, so that tiles have several; the plain path, and every row by itself."""
    monkeypatch.setattr(attention, "CHUNK", 8)
    rows = rows_of(traces(groups=3, size=4))
    (part,) = pack(rows, 9999)
    torch.manual_seed(0)
    q, k, v = (torch.randn(part.tokens, h, 8, requires_grad=True) for h in (heads[0], heads[1], heads[1]))
    mask = attention._band(200, heads[0] // heads[1], torch.device("cpu"))
    out = tile_attention(part.tiles, torch.device("cpu"))(0, q, k, v, 0.3)
    plain = attention._plain(q, k, v, part.tiles, mask, 0.3)
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
    for row, seen in zip(part.rows, paths(part), strict=True):
        order = torch.from_numpy(seen[np.argsort(part.positions.numpy()[seen])])
        alone = F.scaled_dot_product_attention(
            *(x[order].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
        )[0].transpose(0, 1)
        torch.testing.assert_close(out[order], alone, atol=1e-5, rtol=1e-5)
        assert len(order) == len(context(row))
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((plain * weight).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
