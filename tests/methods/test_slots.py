"""Filter, corrections, covariance gates and penalty on length: by hand, by brute force, and inside the host."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.config import Slots
from assay.learner.terms import Computed, pack_loss, prepare
from assay.losses import GATES, policy_loss
from assay.methods.host import Host, total
from assay.methods.presets import PRESETS
from assay.methods.slots import (
    clip_cov_tokens,
    covariances,
    effective_share,
    importance_weights,
    kl_cov_tokens,
    overlong,
    top_spread,
)
from assay.protocols import Setting, UserError
from assay.rng import generator
from assay.rows import Batch, Layout, Row, build_rows
from assay.trace import Group, Outcome, Provenance, TaskKey, Trace, Turn


def turn(logprobs: list[float], reward: float = 0.0) -> Turn:
    """Two context tokens and one sampled token per log-prob; NaN: a grafted one."""
    context, template = np.array([1, 2], np.int32), np.full(2, Provenance.TEMPLATE, np.uint8)
    known = np.array(logprobs, np.float32)
    provenance = np.where(np.isnan(known), Provenance.GRAFTED, Provenance.SAMPLED).astype(np.uint8)
    ids = np.arange(len(logprobs), dtype=np.int32) + 5
    return Turn(context, template, ids, provenance, known, -known, np.zeros(0, np.int32), "o", "a", reward, True, "x",
                "s", False, 0)  # fmt: skip


def trace(slot: int, rollout: int, turns: list[list[float]], reward: float = 0.0, env: str = "e") -> Trace:
    rewards = [0.0] * (len(turns) - 1) + [reward]
    return Trace(
        TaskKey(env, "1", "train", slot, "h"), 1, 0, slot, rollout, np.array([9], np.int32),
        np.array([Provenance.TEMPLATE], np.uint8),
        tuple(turn(t, r) for t, r in zip(turns, rewards, strict=True)), "", reward,
        Outcome.SUCCESS if reward > 0 else Outcome.FAILURE, 1.0,
    )  # fmt: skip


def batch(*traces: Trace) -> Batch:
    keys = sorted({t.group_key for t in traces})
    own = [tuple(t for t in traces if t.group_key == key) for key in keys]
    return Batch([Group(group[0].task, group) for group in own])


def host(preset: str = "grpo", tokens: int = 100, **slots: Any) -> Host:
    return Host(Slots(**{**PRESETS[preset].slots, **slots}), tokens)


def rows_of(data: Batch, layout: str = "append", old: float = -1.0) -> list[Row]:
    rows = build_rows(data.traces, Layout.parse(layout))
    for i, row in enumerate(rows):
        row.columns["old_logprob"] = np.full(len(row.at), old, np.float32)
        row.columns["advantage"] = np.full(len(row.at), 1.0 - i, np.float32)
    return rows


def tensor(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def gradient(loss: torch.Tensor, of: torch.Tensor) -> list[float]:
    return torch.autograd.grad(loss.sum(), of)[0].tolist()


# ------------------------------------------------------------------------------------------- StarPO-S: which groups


def test_s12_a_quarter_of_eight_groups_are_the_two_of_largest_spread() -> None:
    spreads = [0.1, 0.5, 0.0, 0.433, 0.2, 0.5, 0.0, 0.3]
    assert np.flatnonzero(top_spread(spreads, 0.25)).tolist() == [1, 5]
    assert np.flatnonzero(top_spread(spreads, 0.5)).tolist() == [1, 3, 5, 7]


def test_s12_ties_go_to_the_earlier_group_at_least_one_is_kept_and_none_of_spread_zero() -> None:
    assert top_spread([0.5] * 5, 0.25).tolist() == [True, False, False, False, False]
    assert top_spread([0.0, 0.5, 0.0], 1.0).tolist() == [False, True, False]
    assert not top_spread([0.0, 0.0], 0.5).any()
    assert top_spread([], 0.5).tolist() == []
    assert top_spread(np.arange(1, 101) / 100, 0.29).sum() == 29, "0.29 x 100 is 28.999999999999996 in floats"


def groups_of(rewards: list[list[float]], envs: list[str] | None = None) -> Batch:
    names = envs or ["e"] * len(rewards)
    return batch(*[trace(s, r, [[-1.0]], x, names[s]) for s, own in enumerate(rewards) for r, x in enumerate(own)])


def test_s12_the_filter_ranks_inside_each_environment_and_counts_what_it_drops() -> None:
    """By raw reward: environment f is dull beside e, and keeps its share all the same."""
    rewards = [[10, 0], [0, 0], [8, 0], [0, 0], [1, 0], [0.5, 0], [0, 0], [1, 1]]
    data = groups_of(rewards, ["e"] * 4 + ["f"] * 4)
    kept = host("starpo-s").select(data)
    assert [g.traces[0].slot for g in kept.groups] == [0, 4]
    assert [g.traces[0].slot for g in kept.dropped] == [1, 2, 3, 5, 6, 7]
    assert [g.traces[0].slot for g in host("starpo-s", keep_share=0.5).select(data).groups] == [0, 2, 4, 5]


def test_s12_groups_that_were_dropped_before_stay_dropped_and_in_key_order() -> None:
    data = groups_of([[1, 0], [0, 0], [0, 0]])
    earlier = data.groups.pop(1)
    kept = host("starpo-s").select(Batch(data.groups, [earlier]))
    assert [g.traces[0].slot for g in kept.dropped] == [1, 2]


def test_s12_when_no_group_has_a_spread_the_step_trains_on_nothing() -> None:
    kept = host("starpo-s").select(groups_of([[1, 1], [0, 0], [0, 1e-9]]))
    assert kept.groups == [] and len(kept.dropped) == 3


def test_s12_no_other_preset_selects() -> None:
    assert [p for p in PRESETS if host(p).select is not None] == ["starpo-s"]


# ------------------------------------------------------------------------------------------------ DAPO: overlong


@pytest.mark.parametrize(
    ("length", "expected"), [(16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0), (0, 0.0)]
)
def test_s06_overlong_penalty_golden_numbers(length: int, expected: float) -> None:
    assert overlong(length, 20480, 4096) == pytest.approx(expected)
    assert overlong(length, 20480, 4096, 0.5) == pytest.approx(expected / 2)
    assert overlong(length, 20480, 0) == 0.0


def test_s06_the_penalty_is_on_the_score_and_neither_the_filter_nor_the_fact_sees_it() -> None:
    """Limit 10, cache 4: 6 tokens cost nothing, 8 a half, 10 all. Observations are no tokens of the policy."""
    data = batch(*[trace(0, i, [[-1.0] * 3, [-1.0] * (n - 3)], 1.0) for i, n in enumerate((6, 8, 10))])
    filtering = host("dapo", tokens=10, overlong_cache=4, overlong_factor=2.0)
    rows = rows_of(data)
    metrics = filtering.reward(data, rows)
    assert [total(data, t) for t in data.traces] == pytest.approx([1.0, 0.0, -1.0])
    assert [t.reward for t in data.traces] == [1.0] * 3
    assert filtering.keep is not None and not filtering.keep(data.groups[0]), "all succeeded: a dead group as before"
    assert metrics == pytest.approx({"overlong": 2 / 3, "overlong_penalty": -1.0})
    filtering.advantage(data, rows)
    assert [row.columns["advantage"][0] for row in rows] == pytest.approx([1.0, 0.0, -1.0], abs=1e-5)


def test_s06_without_a_cache_no_score_is_touched() -> None:
    data = batch(trace(0, 0, [[-1.0] * 10], 1.0))
    before = dict(data.scores)
    assert host("dapo", tokens=10).reward(data, rows_of(data)) == {} and data.scores == before


def test_s06_a_cache_beyond_the_limit_is_refused() -> None:
    with pytest.raises(UserError, match="at most max_episode_tokens, 10"):
        host(tokens=10, overlong_cache=11)


# ------------------------------------------------------------------------------------------ DPPO: by how much it moves


def test_s14_dppo_drops_a_token_that_moved_too_far_in_the_direction_of_its_advantage() -> None:
    p, sampled = [0.9, 0.9, 0.5, 0.5, 0.35], [0.6, 0.6, 0.8, 0.8, 0.2]  # moves: .3 .3 -.3 -.3 .15
    logprob = tensor(*np.log(p), grad=True)
    old = logprob.detach() - math.log(1.5)  # every ratio is 1.5
    advantage = tensor(1, -1, 1, -1, 2)
    loss, metrics = policy_loss("dppo", logprob, old, advantage, sampler_logprob=tensor(*np.log(sampled)))
    np.testing.assert_allclose(loss.detach(), [0, 1.5, -1.5, 0, -3])
    np.testing.assert_allclose(gradient(loss, logprob), [0, 1.5, -1.5, 0, -3])
    assert metrics["clip_high"].tolist() == [1, 0, 0, 0, 0] and metrics["clip_low"].tolist() == [0, 0, 0, 1, 0]


def test_s14_dppo_holds_rare_tokens_less_than_a_ratio_does() -> None:
    """A ratio of 10 at probability .001 moves the policy by .009; a ratio of 1.3 at .7 by .21."""
    logprob = tensor(math.log(0.01), math.log(0.91), grad=True)
    sampler = tensor(math.log(0.001), math.log(0.7))
    loss, _ = policy_loss("dppo", logprob, sampler, tensor(1, 1), sampler_logprob=sampler)
    np.testing.assert_allclose(gradient(loss, logprob), [-10, 0])
    assert gradient(policy_loss("ppo", logprob, sampler, tensor(1, 1))[0], logprob) == [0, 0]


def test_s14_dppo_bounds_are_separate_and_a_token_without_a_sampler_logprob_is_measured_from_its_old_one() -> None:
    logprob = tensor(*np.log([0.75, 0.75]), grad=True)
    old, nan = tensor(*np.log([0.5, 0.5])), tensor(math.nan, math.nan)
    for sampler in (nan, None):
        wide, _ = policy_loss("dppo", logprob, old, tensor(1, -1), sampler_logprob=sampler, high=0.3)
        narrow, _ = policy_loss("dppo", logprob, old, tensor(1, -1), sampler_logprob=sampler, high=0.2)
        np.testing.assert_allclose(gradient(wide, logprob), [-1.5, 1.5])
        np.testing.assert_allclose(gradient(narrow, logprob), [0, 1.5])


def test_s14_dppo_s_quadratic_term_is_on_every_token_the_dropped_ones_too() -> None:
    logprob = tensor(*np.log([0.9, 0.55]), grad=True)
    sampler, old = tensor(*np.log([0.5, 0.5])), tensor(*np.log([0.45, 0.55]))
    loss, _ = policy_loss("dppo", logprob, old, tensor(1, 1), sampler_logprob=sampler, penalty=0.001)
    gap = [math.log(1.8), math.log(1.1)]  # to the sampler; the ratios are 2 and 1
    np.testing.assert_allclose(loss.detach(), [0.001 * gap[0] ** 2, -1.0 + 0.001 * gap[1] ** 2])
    np.testing.assert_allclose(gradient(loss, logprob), [0.002 * gap[0], -1.0 + 0.002 * gap[1]])


# ------------------------------------------------------------------------------------------ corrections: TIS, IcePop


LOG = np.log([0.25, 1.0, 1.5, 8.0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tis", [0.25, 1.0, 1.5, 2.0]),
        ("icepop", [0.0, 1.0, 1.5, 0.0]),
        ("tis-sequence", [2.0] * 4),  # the product is 3
    ],
)
def test_s14_weights_golden_numbers(kind: str, expected: list[float]) -> None:
    (weights,) = importance_weights([LOG], kind, cap=2.0, low=0.5)
    np.testing.assert_allclose(weights, expected)


def test_s14_a_sequence_s_weight_is_its_own_and_extreme_products_stay_finite() -> None:
    weights = importance_weights([LOG[:2], LOG[1:3], [400.0] * 9, [-400.0] * 9], "tis-sequence", cap=2.0)
    np.testing.assert_allclose(weights[0], [0.25] * 2)
    np.testing.assert_allclose(weights[1], [1.5] * 2)
    assert (weights[2] == 2.0).all() and (weights[3] > 0).all() and (weights[3] < 1e-8).all()


@pytest.mark.parametrize("kind", ["tis", "tis-sequence", "icepop"])
def test_s14_a_token_that_was_not_sampled_as_it_stands_counts_one(kind: str) -> None:
    (weights,) = importance_weights([[math.nan, 0.0]], kind)
    assert weights.tolist() == [1.0, 1.0]


def test_s14_effective_share_by_hand() -> None:
    assert effective_share([1.0, 1.0, 1.0]) == pytest.approx(1.0)
    assert effective_share([3.0, 1.0, 0.0, 0.0]) == pytest.approx(16 / (4 * 10))
    assert effective_share([0.0, 0.0]) == 0.0


def corrected(kind: str, layout: str = "append", old: float = -1.0) -> tuple[list[Row], dict[str, float]]:
    data = batch(trace(0, 0, [[-1.0, -2.0], [-1.5]], 1.0), trace(0, 1, [[-0.5, math.nan]], 0.0))
    rows = rows_of(data, layout, old)
    return rows, host(correction=kind, correction_cap=2.0).modulate(data, rows)


def test_s14_columns_and_figures_of_a_batch() -> None:
    rows, metrics = corrected("tis")
    ratios = [1.0, math.e, math.exp(0.5), math.exp(-0.5), 1.0]  # old -1 against the sampler's; the last is not known
    weights = np.minimum(ratios, 2.0)
    np.testing.assert_allclose(np.concatenate([r.columns["correction"] for r in rows]), weights, rtol=1e-6)
    assert metrics == pytest.approx(
        {
            "mismatch": (0 + 1 + 0.5 + 0.5) / 4,
            "tis_mean": weights.mean(),
            "tis_max": 2.0,
            "tis_ess": weights.sum() ** 2 / (5 * (weights**2).sum()),
            "tis_dropped": 0.0,
        },
        rel=1e-6,
    )


@pytest.mark.parametrize("kind", ["tis", "tis-sequence", "icepop"])
def test_s14_a_product_runs_over_the_episode_whatever_rows_it_is_stored_in(kind: str) -> None:
    (one, append), (many, window) = corrected(kind), corrected(kind, "window(0)")
    assert append == pytest.approx(window)
    joined = [np.concatenate([r.columns["correction"] for r in rows]).tolist() for rows in (one, many)]
    assert joined[0] == joined[1] and len(many) == 3
    if kind == "tis-sequence":
        assert joined[0][:3] == [2.0] * 3 and joined[0][3:] == pytest.approx([math.exp(-0.5)] * 2)


def loss_of(rows: list[Row], made: Host, logprob: float = -1.0) -> tuple[float, np.ndarray, Any]:
    """(loss, gradient per token, term) of one optimiser step in which every new log-prob is this."""
    streams = made.streams(rows, [], 0.0)
    (term,) = prepare([s for s in streams if s.name == "policy"], skip_zero_advantage=False)
    n = sum(len(row.at) for row in term.rows)
    new = torch.full((n,), logprob, requires_grad=True)
    total_ = pack_loss(term, Computed(term.rows, new, torch.zeros(n), None, None))
    return float(total_.detach()), torch.autograd.grad(total_, new)[0].numpy(), term


def test_s14_weights_multiply_the_token_losses_and_no_denominator_sees_them() -> None:
    """Not even where all tokens of a row are dropped: the mean is over the episodes that there are."""
    data = batch(trace(0, 0, [[-1.0, -3.0]], 1.0), trace(0, 1, [[-4.0, -5.0]], 0.0))
    made = host(correction="icepop", correction_cap=2.0)
    rows = rows_of(data)
    made.modulate(data, rows)
    assert [row.columns["correction"].tolist() for row in rows] == [[1.0, 0.0], [0.0, 0.0]]
    for row in rows:
        row.columns["advantage"] = np.ones(len(row.at), np.float32)
    _, slopes, _ = loss_of(rows, made)
    np.testing.assert_allclose(slopes, [-1 / 4, 0, 0, 0])  # 2 episodes of 2 tokens each, whatever is dropped


def test_s14_the_kl_to_the_reference_is_not_weighed() -> None:
    data = batch(trace(0, 0, [[-3.0, -1.0]], 1.0))
    made = host(correction="icepop", kl="loss", kl_coefficient=0.5, kl_kind="k2", denominator="token")
    rows = rows_of(data)
    made.modulate(data, rows)
    rows[0].columns["ref_logprob"] = np.full(2, -2.0, np.float32)
    loss, slopes, _ = loss_of(rows, made)
    np.testing.assert_allclose(slopes, [0.25, 0.25 - 0.5])  # k2's slope is q = 1, times .5, over 2 tokens
    assert loss == pytest.approx((2 * 0.5 * 0.5 - 1.0) / 2)


def test_s14_without_a_correction_nothing_is_asked_for_or_written() -> None:
    data = batch(trace(0, 0, [[-1.0]], 1.0))
    rows = rows_of(data)
    columns = {name: values.copy() for name, values in rows[0].columns.items()}
    assert host().modulate(data, rows) == {} and "old_logprob" not in host().needs
    (stream,) = host().streams(rows, [], 0.0)
    assert stream.constants == {"low": 0.2, "high": 0.2} and stream.token_weight == ""
    assert rows[0].columns.keys() == columns.keys()
    assert "old_logprob" in host(correction="tis").needs


def test_s14_some_rows_with_weights_and_some_without_is_named() -> None:
    rows = rows_of(batch(trace(0, 0, [[-1.0]], 1.0), trace(0, 1, [[-1.0]], 0.0)))
    rows[0].columns["correction"] = np.ones(1, np.float32)
    with pytest.raises(UserError, match="no column 'correction'"):
        prepare(host().streams(rows, [], 0.0), True)


def test_s14_bounds_that_leave_nothing_are_refused() -> None:
    with pytest.raises(UserError, match=r"below slots\.correction_cap"):
        host(correction="icepop", correction_low=2.0)


# ------------------------------------------------------------------------------------------- covariance: which tokens


ADVANTAGE, LOGPROB = [2.0, -1.0, 0.5, -1.5], [-0.1, -3.0, -1.0, -0.5]


def test_s13_covariance_by_hand() -> None:
    """Mean advantage 0, mean log-prob -1.15."""
    np.testing.assert_allclose(covariances(ADVANTAGE, LOGPROB), [2 * 1.05, 1.85, 0.5 * 0.15, -1.5 * 0.65])
    assert covariances([], []).tolist() == []


@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 0)), min_size=1, max_size=40), st.floats(0.001, 1.0))
def test_s13_kl_cov_takes_the_largest_by_brute_force(pairs: list[tuple[int, int]], share: float) -> None:
    a, l = zip(*pairs, strict=True)
    n = len(pairs)
    c = [(x - sum(a) / n) * (y - sum(l) / n) for x, y in pairs]
    chosen = kl_cov_tokens(c, share)
    assert chosen.sum() == max(1, math.floor(share * n + 1e-9))
    assert min(np.array(c)[chosen]) >= max([x for x, yes in zip(c, chosen, strict=True) if not yes], default=-math.inf)


@given(st.lists(st.floats(-6, 6), max_size=40), st.floats(0.001, 1.0), st.integers(0, 99))
def test_s13_clip_cov_draws_between_the_bounds_by_brute_force(c: list[float], share: float, seed: int) -> None:
    chosen = clip_cov_tokens(c, share, 1.0, 5.0, generator(seed, "x"))
    able = [i for i, x in enumerate(c) if 1.0 < x < 5.0]
    assert set(np.flatnonzero(chosen)) <= set(able)
    assert chosen.sum() == min(len(able), max(1, math.floor(share * len(c) + 1e-9)))


def test_s13_clip_cov_draws_all_candidates_alike() -> None:
    c, counts = [2.0, 0.0, 3.0, 6.0, 4.0], np.zeros(5)
    for seed in range(600):
        counts += clip_cov_tokens(c, 0.01, 1.0, 5.0, generator(seed, "x"))
    assert counts[[1, 3]].tolist() == [0, 0] and counts.sum() == 600
    assert all(140 < n < 260 for n in counts[[0, 2, 4]]), "200 each, and 5 standard deviations are 58"


def test_s13_the_share_is_a_fraction_and_not_per_cent() -> None:
    assert kl_cov_tokens(np.arange(10_000), 2e-3).sum() == 20  # the paper's .2 per cent
    assert Slots(**PRESETS["kl-cov"].slots).cov_share == 2e-3
    assert Slots(**PRESETS["clip-cov"].slots).cov_share == 2e-4


def test_s13_clip_cov_drops_the_chosen_and_hardly_clips_the_rest() -> None:
    logprob = tensor(-1, -1, -1, grad=True)
    old = logprob.detach() - torch.log(tensor(1.5, 1.5, 2.5))
    loss, metrics = policy_loss("clip-cov", logprob, old, tensor(1, 1, 1), chosen=tensor(1, 0, 0), low=1.0, high=1.0)
    np.testing.assert_allclose(loss.detach(), [0, -1.5, -2.0])
    np.testing.assert_allclose(gradient(loss, logprob), [0, -1.5, 0])
    assert metrics["chosen"].tolist() == [1, 0, 0] and metrics["clip_high"].tolist() == [0, 0, 1]


def test_s13_kl_cov_adds_the_size_of_the_log_ratio_to_the_chosen_only() -> None:
    logprob = tensor(-1, -1, -1, grad=True)
    old = logprob.detach() - torch.log(tensor(2.0, 0.5, 2.0))
    loss, _ = policy_loss("kl-cov", logprob, old, tensor(1, 1, 1), chosen=tensor(1, 1, 0), penalty=0.5)
    np.testing.assert_allclose(loss.detach(), [-2 + 0.5 * math.log(2), -0.5 + 0.5 * math.log(2), -2])
    np.testing.assert_allclose(gradient(loss, logprob), [-2 + 0.5, -0.5 - 0.5, -2])  # towards the old policy


def test_s13_kl_cov_does_nothing_at_ratio_one() -> None:
    """The no-effect trap: with one update per batch it is the plain gradient."""
    logprob = tensor(-1, -2, grad=True)
    loss, _ = policy_loss("kl-cov", logprob, logprob.detach(), tensor(1, -1), chosen=tensor(1, 1), penalty=1.0)
    assert gradient(loss, logprob) == [-1.0, 1.0]


def cov_rows(layout: str = "append") -> list[Row]:
    """Two episodes of two tokens with the numbers of ADVANTAGE and LOGPROB; in the window layout, four rows."""
    rows = rows_of(batch(trace(0, 0, [[-1.0], [-1.0]], 1.0), trace(0, 1, [[-1.0], [-1.0]], 0.0)), layout)
    at = 0
    for row in rows:
        for name, values in (("advantage", ADVANTAGE), ("old_logprob", LOGPROB)):
            row.columns[name] = np.array(values[at : at + len(row.at)], np.float32)
        at += len(row.at)
    return rows


@pytest.mark.parametrize("layout", ["append", "window(0)"])
def test_s13_the_host_chooses_over_all_tokens_of_the_optimiser_step(layout: str) -> None:
    rows = cov_rows(layout)
    made = host("kl-cov", cov_share=0.3)
    (stream,) = made.streams(rows[::-1], [], 0.0)
    assert np.concatenate([row.columns["chosen"] for row in rows]).tolist() == [1, 0, 0, 0]
    assert stream.loss == "policy:kl-cov" and stream.constants == {"penalty": 1.0}
    assert made.needs == {"old_logprob"}


def test_s13_means_are_those_of_the_optimiser_step_and_not_of_the_batch() -> None:
    """Over all four tokens the last has the least covariance, -.975; without the second it has more than the third."""
    rows = cov_rows("window(0)")
    made = host("kl-cov", cov_share=0.5)
    made.streams([rows[0], rows[2], rows[3]], [], 0.0)  # means 1/3 and -8/15: c = .72, -.08, -.06
    assert [rows[i].columns["chosen"].tolist() for i in (0, 2, 3)] == [[1], [0], [0]]
    made = host("kl-cov", cov_share=0.67)
    made.streams([rows[0], rows[2], rows[3]], [], 0.0)
    assert [rows[i].columns["chosen"].tolist() for i in (0, 2, 3)] == [[1], [0], [1]]


def test_s13_a_chosen_token_loses_its_gradient_and_stays_in_the_denominator() -> None:
    rows = cov_rows()
    made = host("clip-cov", cov_low=0.05, cov_high=0.1, cov_share=0.25)  # only the third token: .075
    loss, slopes, term = loss_of(rows, made, logprob=-1.0)
    assert np.concatenate([row.columns["chosen"] for row in rows]).tolist() == [0, 0, 1, 0]
    assert term.totals["chosen"] == 1 and slopes[2] == 0
    ratio = np.exp(-1.0 - np.array(LOGPROB))
    bounded = np.minimum(np.array(ADVANTAGE) * ratio, np.array(ADVANTAGE) * np.clip(ratio, 0, 2))
    assert loss == pytest.approx(-(bounded[0] + bounded[1] + bounded[3]) / 4, rel=1e-5)


def test_s13_clip_cov_draws_anew_at_every_update_and_alike_in_a_run_that_was_resumed() -> None:
    data = batch(*[trace(0, i, [[-1.0] * 30], float(i % 2)) for i in range(4)])

    def draws(seed: int, steps_before: int = 0) -> list[list[float]]:
        made = host("clip-cov", cov_low=-9.0, cov_high=9.0, cov_share=0.1)
        made.bind(Setting({}, Layout(), 3, 100, seed))
        rows, found = rows_of(data), []
        for _ in range(steps_before):
            made.modulate(data, rows)
            made.streams(rows, [], 0.0)
        made.modulate(data, rows)
        for _ in range(3):
            made.streams(rows, [], 0.0)
            found.append(np.concatenate([row.columns["chosen"] for row in rows]).tolist())
        return found

    first = draws(1)
    assert draws(1) == draws(1, steps_before=2) == first and draws(2) != first
    assert first[0] != first[1] != first[2]


@pytest.mark.parametrize("gate", ["dppo", "kl-cov"])
def test_a_row_without_advantage_is_not_skipped_where_a_penalty_pulls_on_it(gate: str) -> None:
    rows = rows_of(batch(trace(0, 0, [[-1.0]], 1.0)))
    rows[0].columns |= {"advantage": np.zeros(1, np.float32), "chosen": np.ones(1, np.float32)}
    rows[0].columns["sampler_logprob"] = np.full(1, -1.0, np.float32)
    for penalty, left in ((0.0, 0), (0.5, 1)):
        (term,) = prepare(host(gate, gate_penalty=penalty).streams(rows, [], 0.0), skip_zero_advantage=True)
        assert len(term.rows) == left and term.skipped == 1 - left


@pytest.mark.parametrize(
    ("gate", "column"), [("dppo", "sampler_logprob"), ("kl-cov", "chosen"), ("clip-cov", "chosen")]
)
def test_a_gate_without_its_column_is_named(gate: str, column: str) -> None:
    rows = rows_of(batch(trace(0, 0, [[-1.0]], 1.0)))
    (stream,) = host(gate).streams(rows, [], 0.0)
    rows[0].columns.pop(column, None)
    with pytest.raises(UserError, match=f"no column {column!r}"):
        prepare([stream], True)


def test_dppo_s_sampler_log_probs_come_from_the_trace_and_need_no_score_pass() -> None:
    data = batch(trace(0, 0, [[-1.0, math.nan], [-3.0]], 1.0))
    rows = build_rows(data.traces, Layout.parse("window(0)"))
    made = host("dppo")
    assert made.modulate(data, rows) == {} and made.needs == frozenset()
    np.testing.assert_array_equal(np.concatenate([r.columns["sampler_logprob"] for r in rows]), [-1, np.nan, -3])
    with_old = rows_of(data)
    assert made.modulate(data, with_old) == pytest.approx({"mismatch": (0 + 2) / 2})


@pytest.mark.parametrize("gate", GATES)
def test_one_update_per_batch_says_which_gates_then_do_nothing(gate: str) -> None:
    one, two = (host(gate=gate).bind(Setting({}, Layout(), updates, 100, 0)) for updates in (1, 4))
    assert two == ()
    assert len(one) == (gate not in ("ppo", "none", "clip-cov"))
    assert all(gate in text and "--updates-per-batch" in text for text in one)


def test_an_empty_step_has_no_choice_to_make() -> None:
    for preset in ("kl-cov", "clip-cov", "dppo"):
        made = host(preset, correction="tis")
        assert made.modulate(Batch([]), []) == {}
        assert made.streams([], [], 0.0)[0].rows == []


def test_a_child_view_is_in_no_choice() -> None:
    rows = cov_rows()
    other = replace(rows[0], view="hinted", columns={})
    host("kl-cov").streams([*rows, other], [], 0.0)
    assert "chosen" not in other.columns
