"""EPPO: the numbered properties of its control law, with numbers by hand or by brute force."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entropy_parts import NAN, rows_of, turn
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mixture_parts import bounds, gather, mixture, play, policy, setting

from assay.learner.torch_learner import TorchLearner
from assay.losses import policy_loss
from assay.methods.eppo import EPPO, Pace, crossings, pace_factors, task_entropy
from assay.methods.registry import make
from assay.model import Network
from assay.protocols import UserError
from assay.rows import Row, Stream
from assay.trace import Trace

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))
from learner_parts import difference, gradients, model

LEVELS = st.lists(st.floats(0.01, 3.0), min_size=2, max_size=5)
FREE = {"lowest": 0.0, "highest": np.inf, "delta": 0.0}  # no limits, and exact arithmetic


def paced(method: EPPO, entropies: dict[str, float], **more: Any) -> Stream:
    """The policy stream of one batch of an environment per entropy."""
    data, rows = mixture(entropies)
    method.modulate(data, rows)
    return method.streams(rows, [policy(rows, **more)], 0.0)[0]


# ------------------------------------------------------------------------------------------- the numbered properties


@pytest.mark.parametrize(
    ("method", "entropies"),
    [
        (EPPO(alpha=0.0), {"a": 1.0, "b": 0.1}),
        (EPPO(), {"a": 0.7}),
        (EPPO(), {"a": 0.7, "b": 0.7, "c": 0.7}),
        (EPPO(pace="tanh"), {"a": 0.3, "b": 0.3, "c": 0.3}),
        (EPPO(pace="relative"), {"a": 1.0, "b": 0.1}),  # the first batch: each stands at its start
        (EPPO(preserve_budget=True, sides="high"), {"a": 0.0, "b": 0.0}),
    ],
)
def test_p01_no_strength_one_environment_or_equal_entropies_touch_nothing(
    method: EPPO, entropies: dict[str, float]
) -> None:
    data, rows = mixture(entropies)
    columns = [dict(row.columns) for row in rows]
    stream = policy(rows, high=0.28)
    constants = stream.constants
    method.modulate(data, rows)
    streams = [stream]
    assert method.streams(rows, streams, 0.0) is streams and streams == [stream]
    assert stream.constants is constants and constants == {"low": 0.2, "high": 0.28}
    assert method.rows(data) == [] and method.needs == frozenset()
    assert all(row.columns.keys() == old.keys() for row, old in zip(rows, columns, strict=True))
    assert all(row.columns[name] is old[name] for row, old in zip(rows, columns, strict=True) for name in old)


def test_p01_a_row_that_is_on_pace_has_the_gradient_of_the_host_to_the_bit() -> None:
    """a, b, c at 0.2, 0.4, 0.6: b's factor is exactly 1, and its bound comes as one of an array."""
    built = model()
    data, rows = trained({"a": 0.25, "b": 0.5, "c": 0.75})
    method = EPPO()
    method.modulate(data, rows)
    own = [row for row in rows if row.trace.task.environment == "b"]
    found = [
        gradient(built, method.streams(own, [policy(own)], 0.0)),
        gradient(built, [policy(own)]),
    ]
    assert method.factors["b"] == 1.0 != method.factors["a"]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    everyone = method.streams(rows, [policy(rows)], 0.0)
    assert difference(gradient(built, everyone), gradient(built, [policy(rows)])) > 1e-3, "the bounds do bite here"


@given(LEVELS, st.integers(0, 4), st.floats(0.0, 2.0), st.floats(0.1, 3.0), st.booleans())
def test_p02_a_bound_rises_with_its_own_entropy_and_falls_with_the_others(
    levels: list[float], at: int, more: float, alpha: float, limited: bool
) -> None:
    k = at % len(levels)
    raised = list(levels)
    raised[k] += more
    options: dict[str, Any] = {} if limited else {"lowest": 0.0, "highest": np.inf}
    before, after = (pace_factors(x, alpha, **options) for x in (levels, raised))
    others = np.arange(len(levels)) != k
    assert after[k] >= before[k] - 1e-12
    assert np.all(after[others] <= before[others] + 1e-12)


@given(LEVELS, st.floats(0.0, 3.0), st.sampled_from(["ratio", "tanh", "relative", "step"]), st.booleans())
def test_p03_bounds_stay_within_their_limits(levels: list[float], alpha: float, pace: str, budget: bool) -> None:
    first = np.linspace(0.5, 1.5, len(levels))
    eps = 0.2 * pace_factors(levels, alpha, 0.05 / 0.2, 0.4 / 0.2, pace, 0.9, first, budget)
    assert np.all(eps >= 0.05 - 1e-12) and np.all(eps <= 0.4 + 1e-12)


@given(LEVELS, st.floats(0.1, 3.0))
def test_p03_the_mean_bound_is_the_hosts_where_nothing_is_limited(levels: list[float], alpha: float) -> None:
    assert np.mean(0.2 * pace_factors(levels, 1.0, **FREE)) == pytest.approx(0.2, rel=1e-12)
    kept = pace_factors(levels, alpha, **FREE, preserve_budget=True)
    assert np.mean(0.2 * kept) == pytest.approx(0.2, rel=1e-12)


@given(LEVELS, st.floats(0.01, 100.0), st.floats(0.0, 2.0), st.sampled_from(["ratio", "tanh"]))
def test_p04_the_unit_of_entropy_does_not_matter(levels: list[float], unit: float, alpha: float, pace: str) -> None:
    assume(np.std(levels) > 1e-3)
    before = pace_factors(levels, alpha, pace=pace, delta=0.0)
    assert pace_factors(np.multiply(levels, unit), alpha, pace=pace, delta=0.0) == pytest.approx(before, rel=1e-9)


@given(st.permutations([0.2, 0.5, 0.9, 1.3]), st.floats(0.1, 2.0))
def test_p05_no_environment_is_special_and_one_at_the_mean_moves_no_other(levels: list[float], alpha: float) -> None:
    order = np.argsort(levels)
    straight = pace_factors(sorted(levels), alpha)
    assert pace_factors(levels, alpha)[order] == pytest.approx(straight, rel=1e-12)
    more = pace_factors([*levels, float(np.mean(levels))], alpha)
    assert more[:-1] == pytest.approx(pace_factors(levels, alpha), rel=1e-9)
    assert more[-1] == pytest.approx(1.0, rel=1e-9)


def test_p05_names_and_their_order_in_the_batch_do_not_matter() -> None:
    one = bounds(paced(EPPO(), {"a": 0.9, "b": 0.3}))
    other = bounds(paced(EPPO(), {"z": 0.3, "y": 0.9}))
    assert (one["a"], one["b"]) == (other["y"], other["z"])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_p06_a_ratio_between_two_bounds_has_gradient_in_the_looser_environment_only(sign: float) -> None:
    """a is at 1, b at 0.5: factors 4/3 and 2/3, bounds 0.2667 and 0.1333; a ratio 0.2 away lies between them."""
    stream = paced(EPPO(), {"a": 1.0, "b": 0.5})
    assert bounds(stream) == pytest.approx({"a": 0.8 / 3, "b": 0.4 / 3}, rel=1e-5)
    assert bounds(stream, "low") == pytest.approx(bounds(stream), rel=1e-6)
    names = [row.trace.task.environment for row in stream.rows]
    constants: dict[str, Any] = {name: torch.from_numpy(value) for name, value in stream.constants.items()}
    for away, expected in (
        (0.1, {"a": True, "b": True}),
        (0.2, {"a": True, "b": False}),
        (0.3, dict.fromkeys("ab", False)),
    ):
        logprob = torch.full((len(names),), float(np.log(1 + sign * away)), requires_grad=True)
        loss, _ = policy_loss("ppo", logprob, torch.zeros(len(names)), torch.full((len(names),), sign), **constants)
        loss.sum().backward()
        assert logprob.grad is not None
        for name, slope in zip(names, logprob.grad.tolist(), strict=True):
            assert slope == (pytest.approx(-sign * (1 + sign * away)) if expected[name] else 0.0), (name, away)


def test_p07_only_tokens_of_the_policy_count() -> None:
    """Tokens that code put there have no entropy, and what the environment showed has none at all."""
    tokens = [[0.2, 0.4], [0.9]]
    plain = play("a", 0, 0, tokens)
    forced = play("a", 0, 0, [turn(tokens[0], forced=3), turn(tokens[1], forced=1)])
    found = []
    for own in (plain, forced):
        data = gather([own])
        method = EPPO()
        method.modulate(data, rows_of(data))
        found.append(method.tasks["a"].smoothed)
    assert found[0] == found[1] == pytest.approx((0.2 + 0.4 + 0.9) / 3, rel=1e-6)


def test_p07_what_stands_behind_tool_output_in_the_learners_pass_changes_nothing() -> None:
    """The learner scores the entropies of targets only: an observation after the last answer is in no row."""
    learner = TorchLearner(Network(model()), learning_rate=0.0)
    data, rows = trained({"a": 1.0, "b": 0.5})
    learner.score(rows, frozenset({"entropy"}))
    assert all(row.columns["entropy"].shape == row.at.shape for row in rows)
    method = EPPO()
    method.modulate(data, rows)
    for name in ("a", "b"):
        every = np.concatenate([r.columns["entropy"] for r in rows if r.trace.task.environment == name])
        assert method.tasks[name].smoothed == pytest.approx(float(every.mean(dtype=np.float64)), rel=1e-6)


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=30)
def test_p08_any_cut_and_order_of_the_rows_gives_the_same_entropy(seed: int, episode_mean: bool) -> None:
    rng = np.random.default_rng(seed)
    traces = random_traces(rng)
    data = gather(traces)
    expected: dict[str, float] = {}
    for name in ("a", "b"):
        tokens = [np.concatenate([t.entropies for t in x.turns]) for x in traces if x.task.environment == name]
        per_episode = np.mean([np.mean(x, dtype=np.float64) for x in tokens])
        expected[name] = float(per_episode if episode_mean else np.mean(np.concatenate(tokens), dtype=np.float64))
    found = []
    for layout in ("append", "window(1)"):
        rows = rows_of(data, layout)
        for _ in range(2):
            method = EPPO(episode_mean=episode_mean)
            order = rng.permutation(len(rows))
            cut = int(rng.integers(len(rows)))
            method.further = [rows[i] for i in order[:cut]]
            method.modulate(data, [rows[i] for i in order[cut:]])
            found.append({name: task.smoothed for name, task in method.tasks.items()})
        assert found[-1] == found[-2], "the order of the rows changes no bit"
    assert all(one == pytest.approx(expected, rel=1e-9) for one in found)


def test_p09_the_bounds_of_a_batch_are_frozen_and_constant() -> None:
    data, rows = mixture({"a": 1.0, "b": 0.5})
    method = EPPO()
    method.modulate(data, rows)
    first = bounds(method.streams(rows, [policy(rows)], 0.0)[0])
    for row in rows:  # whatever the weights come to meanwhile
        row.columns["entropy"] = row.columns["entropy"] * 3 + 1
    part = [row for row in rows if row.trace.task.environment == "a"]
    assert bounds(method.streams(part, [policy(part)], 1.0)[0]) == {"a": first["a"]}
    assert bounds(method.streams(rows, [policy(rows)], 1.0)[0]) == first
    bound = torch.full((1,), 0.1, requires_grad=True)
    logprob = torch.full((1,), 0.5, requires_grad=True)
    loss, _ = policy_loss("ppo", logprob, torch.zeros(1), torch.ones(1), low=bound, high=bound)
    assert loss.item() == pytest.approx(-1.1)
    loss.sum().backward()
    assert bound.grad is None


def test_p10_one_update_per_batch_is_the_host() -> None:
    found = []
    for method in (None, EPPO()):
        built = model()
        data, rows = trained({"a": 1.0, "b": 0.2})
        for row in rows:
            del row.columns["old_logprob"]  # with one update no pass scores it, and the ratio is 1
        streams = [policy(rows)]
        if method is not None:
            assert "one update per batch" in " ".join(method.bind(setting("a", "b", updates=1)))
            method.modulate(data, rows)
            streams = method.streams(rows, streams, 0.0)
            assert bounds(streams[0])["a"] > 0.3 > 0.1 > bounds(streams[0])["b"]
        TorchLearner(Network(built), learning_rate=1e-2, warmup_steps=1).update(streams, 0.0)
        found.append({name: p.detach().clone() for name, p in built.named_parameters()})
    untrained = dict(model().named_parameters())
    assert all(torch.equal(found[0][name], found[1][name]) for name in untrained)
    assert any(not torch.equal(found[0][name], p) for name, p in untrained.items()), "something was learnt"


def test_p11_an_environment_that_is_missing_keeps_its_entropy() -> None:
    method = EPPO(beta=0.5)
    paced(method, {"a": 1.0})
    assert method.factors == {"a": 1.0}, "b is in no reference before it appears"
    paced(method, {"b": 0.5})
    assert {name: task.smoothed for name, task in method.tasks.items()} == {"a": 1.0, "b": 0.5}
    paced(method, {"b": 0.1})
    assert method.tasks["b"].smoothed == pytest.approx(0.5 * 0.5 + 0.5 * 0.1, rel=1e-6)
    assert method.tasks["a"].smoothed == 1.0
    assert method.factors["a"] == pytest.approx(1.0 / 0.65, rel=1e-5)  # mean of 1 and 0.3


@pytest.mark.parametrize("pace", ["ratio", "relative"])
def test_p11_resumed_from_a_checkpoint_the_next_bounds_and_counts_are_the_same(pace: str) -> None:
    rng = np.random.default_rng(3)
    levels = [{"a": float(x), "b": float(y), "c": float(z)} for x, y, z in rng.gamma(2.0, 0.3, (14, 3))]
    straight = EPPO(pace=pace, beta=0.3)
    for level in levels[:9]:
        paced(straight, level)
    resumed = EPPO(pace=pace, beta=0.3)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for level in levels[9:]:
        one, other = paced(straight, level), paced(resumed, level)
        assert one.constants["high"].tolist() == other.constants["high"].tolist()
        assert one.metrics == other.metrics
    assert straight.state_dict() == resumed.state_dict()
    assert straight.crossovers > 0


@given(LEVELS, st.sampled_from([0.5, 1.0, 2.0]), st.floats(0.01, 10.0))
def test_p12_idealised_entropies_close_up_and_never_change_places(
    levels: list[float], alpha: float, speed: float
) -> None:
    """H <- H - c eps: while all stay above 0 (alpha <= 1), or while c eps_0 alpha max(H)^(alpha - 1) <= H_ref^alpha."""
    h, eps = np.array(levels), 0.2
    assume(len(np.unique(h)) == len(h))
    for _ in range(20):
        bound = eps * pace_factors(h, alpha, **FREE)
        if np.any(h - speed * bound <= 0):
            return
        if alpha > 1 and speed * eps * alpha * h.max() ** (alpha - 1) > h.mean() ** alpha:
            return
        after = h - speed * bound
        assert np.ptp(after) <= np.ptp(h) + 1e-12
        apart = np.subtract.outer(h, h)
        moved = np.subtract.outer(after, after)
        assert np.all(apart * moved >= -1e-12)
        if alpha == 1.0:
            assert np.log(after / after[0]) == pytest.approx(np.log(h / h[0]), abs=1e-9)
        h = after


def test_p12_a_large_step_at_alpha_2_can_change_places() -> None:
    """The condition of the property is needed: 1, 0.5 at c eps_0 = 0.3125 end at 0.444, 0.361; at twice that reversed."""
    h = np.array([1.0, 0.5])
    factors = pace_factors(h, 2.0, **FREE)
    assert factors == pytest.approx([16 / 9, 4 / 9])
    assert h - 0.3125 * factors == pytest.approx([0.4444, 0.3611], abs=1e-4)
    assert h - 0.5 * factors == pytest.approx([0.1111, 0.2778], abs=1e-4)


def bandits(alpha: float, seed: int, updates: int = 4, steps: int = 150) -> float:
    """Mean entropy gap of three softmax bandits of 8, 16, 32 arms and 12 contexts each under one linear policy, trained
    by GRPO in groups of 8, nats."""
    rng, arms, contexts, size, rate = np.random.default_rng(seed), np.array([8, 16, 32]), 12, 8, 10.0
    task = np.repeat(np.arange(3), contexts)
    row = np.arange(len(task))[:, None]
    x = rng.normal(size=(len(task), 24)) / np.sqrt(24)
    legal = np.arange(32)[None] < arms[task][:, None]
    right = np.array([rng.integers(arms[k]) for k in task])
    weights, gaps = np.zeros((24, 32)), []

    def logprobs() -> Any:
        logits = np.where(legal, x @ weights, -1e9)
        logits -= logits.max(1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    for _ in range(steps):
        old = logprobs()
        p = np.exp(old)
        entropy = np.array([-(p * old).sum(1)[task == k].mean() for k in range(3)])
        gaps.append(float(np.ptp(entropy)))
        eps = 0.2 * pace_factors(entropy, alpha)[task][:, None]
        arm = (rng.random((len(task), size, 1)) > p.cumsum(1)[:, None, :-1]).sum(-1)
        reward = (arm == right[:, None]).astype(float)
        advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, ddof=1, keepdims=True) + 1e-6)
        for _ in range(updates):
            now = logprobs()
            ratio = np.exp(now[row, arm] - old[row, arm])
            stopped = ((advantage > 0) & (ratio > 1 + eps)) | ((advantage < 0) & (ratio < 1 - eps))
            push = np.where(stopped, 0.0, advantage * ratio) / advantage.size
            slope = -np.exp(now) * push.sum(1, keepdims=True)
            np.add.at(slope, (np.broadcast_to(row, arm.shape), arm), push)
            weights = weights + rate * (x.T @ slope)
    return float(np.mean(gaps))


@pytest.mark.slow
def test_p13_bandits_that_share_a_policy_are_nearer_in_entropy_than_under_grpo() -> None:
    seeds = range(6)
    plain, paced_ = ([bandits(alpha, seed) for seed in seeds] for alpha in (0.0, 1.0))
    assert all(p < g for p, g in zip(paced_, plain, strict=True))
    assert np.mean(paced_) < 0.85 * np.mean(plain)
    assert bandits(1.0, 0, updates=1) == bandits(0.0, 0, updates=1), "one update per batch: the same to the last digit"


# ------------------------------------------------------------------------------------------------------ the bounds


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [4 / 3, 2 / 3]),
        ({"alpha": 2.0}, [16 / 9, 4 / 9]),
        ({"alpha": 0.5}, [(4 / 3) ** 0.5, (2 / 3) ** 0.5]),
        ({"alpha": 3.0}, [2.0, 8 / 27]),  # (4/3)^3 = 2.37 is above the limit
        ({"alpha": 3.0, "preserve_budget": True}, [16 / 9, 2 / 9 + 1 / 36]),  # 64 : 8, mean 36; 8/36 limited to 1/4
        ({"pace": "tanh", "kappa": 0.5}, [1 + 0.5 * np.tanh(1), 1 - 0.5 * np.tanh(1)]),  # one std from the mean, each
        ({"pace": "step"}, [2.0, 0.5]),
        ({"pace": "step", "alpha": 0.5}, [2**0.5, 0.5**0.5]),
        ({"pace": "relative", "first": [2.0, 0.5]}, [2 / 3, 4 / 3]),  # at 1/2 and at 1 of where they began
    ],
)
def test_factors_of_entropies_1_and_half_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    assert pace_factors([1.0, 0.5], **options) == pytest.approx(expected, rel=1e-4)


def test_steps_leave_what_is_near_the_mean_alone() -> None:
    assert pace_factors([1.0, 1.2, 0.8, 2.0], pace="step").tolist() == [1.0, 1.0, 0.5, 2.0]  # mean 1.25


def test_relative_needs_the_first_entropies() -> None:
    with pytest.raises(ValueError, match="first"):
        pace_factors([1.0, 0.5], pace="relative")


def test_entropies_near_zero_leave_the_bounds_alone() -> None:
    assert pace_factors([0.0, 1e-12]) == pytest.approx([1.0, 1.0], abs=1e-5)
    assert pace_factors([]).shape == (0,)


def test_both_bounds_are_scaled_each_from_its_own() -> None:
    stream = paced(EPPO(), {"a": 1.0, "b": 0.5}, low=0.2, high=0.28, dual=10.0)
    assert bounds(stream) == pytest.approx({"a": 0.28 * 4 / 3, "b": 0.28 * 2 / 3}, rel=1e-5)
    assert bounds(stream, "low") == pytest.approx({"a": 0.2 * 4 / 3, "b": 0.2 * 2 / 3}, rel=1e-5)
    assert stream.constants["dual"] == 10.0
    assert stream.constants["high"].dtype == np.float32
    assert stream.metrics == pytest.approx({"eppo_bound[a]": 0.28 * 4 / 3, "eppo_bound[b]": 0.28 * 2 / 3}, rel=1e-5)


def test_the_limits_scale_with_the_hosts_bound() -> None:
    levels = {"a": 3.0, "b": 0.001}  # factors 2.0 and 0.0007
    assert bounds(paced(EPPO(alpha=3.0), levels)) == pytest.approx({"a": 0.4, "b": 0.05}, rel=1e-6)
    gspo = paced(EPPO(alpha=3.0), levels, gate="gspo", low=3e-4, high=4e-4)
    assert bounds(gspo) == pytest.approx({"a": 8e-4, "b": 1e-4}, rel=1e-6)
    assert bounds(gspo, "low") == pytest.approx({"a": 6e-4, "b": 7.5e-5}, rel=1e-6)


def test_one_side_leaves_the_lower_bound_a_number() -> None:
    stream = paced(EPPO(sides="high"), {"a": 1.0, "b": 0.5})
    assert stream.constants["low"] == 0.2 and isinstance(stream.constants["low"], float)
    assert bounds(stream) == pytest.approx({"a": 0.8 / 3, "b": 0.4 / 3}, rel=1e-5)


def test_the_control_gives_each_environment_the_bound_of_the_next() -> None:
    stream = paced(EPPO(swap=True), {"a": 1.0, "b": 0.5, "c": 1.5})
    assert bounds(stream) == pytest.approx({"a": 0.1, "b": 0.3, "c": 0.2}, rel=1e-5)


def test_value_streams_and_policy_streams_without_bounds_are_left_alone() -> None:
    data, rows = mixture({"a": 1.0, "b": 0.5})
    method = EPPO()
    method.modulate(data, rows)
    plain = Stream("more", rows, "policy:none", "token")
    value = Stream("value", rows, "value", "token", {"clip": 0.5})
    found = method.streams(rows, [policy(rows), plain, value], 0.0)
    assert [s.name for s in found] == ["policy", "more", "value"]
    assert plain.constants == {} and value.constants == {"clip": 0.5}
    with pytest.raises(UserError, match=r"policy:none.*--slots.gate ppo"):
        method.streams(rows, [plain], 0.0)
    assert method.streams(rows, [value], 0.0) == [value]
    assert EPPO(alpha=0.0).streams(rows, [plain], 0.0) == [plain]


def test_bounds_that_came_one_per_row_are_scaled_row_by_row() -> None:
    data, rows = mixture({"a": 1.0, "b": 0.5})
    method = EPPO(sides="high")
    method.modulate(data, rows)
    stream = policy(rows)
    stream.constants["high"] = np.array([0.1, 0.2, 0.3, 0.6], np.float32)
    method.streams(rows, [stream], 0.0)
    assert stream.constants["high"].tolist() == pytest.approx([0.4 / 3, 0.8 / 3, 0.2, 0.4], rel=1e-5)


# ---------------------------------------------------------------------------------------------------- the entropies


def test_tokens_or_episodes_count_once_each() -> None:
    assert task_entropy([[(3.0, 3)], [(0.5, 1)]]) == pytest.approx(3.5 / 4)
    assert task_entropy([[(3.0, 3)], [(0.5, 1)]], episode_mean=True) == pytest.approx(0.75)
    assert task_entropy([[(1.0, 1), (2.0, 2)], [(0.5, 1)]], episode_mean=True) == pytest.approx(0.75)


def test_smoothing_starts_at_the_first_entropy() -> None:
    method = EPPO(beta=0.9)
    for value in (1.0, 0.5):
        paced(method, {"a": value, "b": 0.5})
    assert method.tasks["a"].smoothed == pytest.approx(0.95)
    assert method.tasks["a"].first == 1.0


def test_dropped_groups_count_and_are_never_trained() -> None:
    kept = [play("a", 0, 0, [[1.0]]), play("b", 1, 0, [[0.5]])]
    gone = [play("b", 2, 0, [[0.1], [0.1]])]
    data = gather(kept, gone)
    method = EPPO()
    method.bind(setting("a", "b"))
    further = method.rows(data)
    assert [row.trace.key for row in further] == [gone[0].key] and further[0].view == ""
    further[0].columns["entropy"] = np.array([0.1, 0.1], np.float32)
    rows = rows_of(data)
    method.modulate(data, rows)
    assert method.tasks["b"].smoothed == pytest.approx(0.7 / 3)
    assert method.streams(rows, [policy(rows)], 0.0)[0].rows == rows
    assert method.rows(gather(kept)) == [], "the next step has rows of its own"


@pytest.mark.parametrize(
    ("method", "setting_"),
    [
        (EPPO(alpha=0.0), setting("a", "b")),
        (EPPO(), setting("a")),
        (EPPO(), setting("a", "b", updates=1)),
    ],
)
def test_where_it_has_no_effect_no_further_row_is_scored(method: EPPO, setting_: Any) -> None:
    data = gather([play("a", 0, 0, [[1.0]])], [play("a", 1, 0, [[0.1]])])
    assert len(method.bind(setting_)) == 1
    assert method.rows(data) == []
    assert EPPO().bind(setting("a", "b")) == []


def test_a_row_with_an_entropy_that_is_not_known_is_left_out_and_counted() -> None:
    data = gather([play("a", 0, 0, [[1.0, NAN]]), play("a", 0, 1, [[0.5]]), play("b", 1, 0, [[NAN]])])
    method = EPPO()
    metrics = method.modulate(data, rows_of(data))
    assert metrics["eppo_rows_unknown"] == 2.0
    assert {name: task.smoothed for name, task in method.tasks.items()} == {"a": 0.5}
    rows = rows_of(data)
    assert bounds(method.streams(rows, [policy(rows)], 0.0)[0]) == {"a": 0.2, "b": 0.2}


def test_a_batch_without_rows_changes_nothing() -> None:
    method = EPPO()
    assert method.modulate(gather([]), []) == {"eppo_rows_unknown": 0.0}
    assert method.streams([], [policy([])], 0.0)[0].constants == {"low": 0.2, "high": 0.2}


def test_families_can_be_finer_than_environments() -> None:
    class ByDifficulty(EPPO):
        def family(self, trace: Trace) -> str:
            return "easy" if trace.task.id == 0 else "hard"

    data = gather([play("a", 0, 0, [[0.5]]), play("a", 1, 0, [[1.0]])])
    method = ByDifficulty()
    assert method.bind(setting("a")) == []
    metrics = method.modulate(data, rows_of(data))
    assert metrics["eppo_entropy[easy]"] == 0.5 and metrics["eppo_entropy[hard]"] == 1.0
    rows = rows_of(data)
    found = method.streams(rows, [policy(rows)], 0.0)[0].constants["high"]
    assert found.tolist() == pytest.approx([0.4 / 3, 0.8 / 3], rel=1e-5)


# --------------------------------------------------------------------------------------------------- the diagnostics


def test_gaps_are_of_the_smoothed_entropies() -> None:
    data, rows = mixture({"a": 1.0, "b": 0.5, "c": 0.75})
    metrics = EPPO().modulate(data, rows)
    assert metrics["eppo_gap"] == pytest.approx(0.5)
    assert metrics["eppo_gap_relative"] == pytest.approx(0.5 / 0.75)
    assert {k: v for k, v in metrics.items() if "[" in k} == pytest.approx(
        {"eppo_entropy[a]": 1.0, "eppo_entropy[b]": 0.5, "eppo_entropy[c]": 0.75}
    )


def test_one_environment_has_one_entropy_and_no_gap() -> None:
    data, rows = mixture({"a": 1.0})
    method = EPPO()
    assert "one environment" in " ".join(method.bind(setting("a")))
    assert method.modulate(data, rows) == {"eppo_entropy": 1.0, "eppo_rows_unknown": 0.0}
    assert method.streams(rows, [policy(rows)], 0.0)[0].metrics == {"eppo_bound": 0.2}


def test_a_crossover_counts_only_when_the_pair_comes_out_on_the_other_side() -> None:
    order: dict[str, dict[str, int]] = {}
    found = [crossings({"a": 1.0 + x, "b": 1.0}, order, 0.05) for x in (0.1, 0.01, -0.01, 0.02, 0.1, -0.04, -0.1, 0.1)]
    assert found == [0, 0, 0, 0, 0, 0, 1, 1]


def test_crossovers_are_counted_per_pair() -> None:
    method = EPPO(beta=0.0)
    for level in ({"a": 1.0, "b": 0.5, "c": 0.2}, {"a": 0.2, "b": 0.5, "c": 1.0}):
        data, rows = mixture(level)
        metrics = method.modulate(data, rows)
    assert metrics["eppo_crossovers"] == 3.0


def brute_spikes(values: list[float], beta: float) -> tuple[int, float]:
    smoothed, found = values[0], []
    for n in range(1, len(values)):
        increments = np.diff(values[:n])
        if len(increments) >= 5 and values[n] - smoothed > 3 * np.std(increments, ddof=1):
            found.append(values[n] - smoothed)
        smoothed = beta * smoothed + (1 - beta) * values[n]
    return len(found), float(sum(found))


@pytest.mark.parametrize("beta", [0.0, 0.6, 0.9])
def test_spikes_stand_out_of_their_own_past(beta: float) -> None:
    rng = np.random.default_rng(1)
    values = (1 + 0.05 * rng.normal(size=40)).tolist()
    values[20], values[33] = 2.0, 2.5
    pace = Pace(values[0], values[0], values[0])
    for value in values[1:]:
        pace.add(value, beta)
    count, excess = brute_spikes(values, beta)
    assert (pace.spikes, pace.excess) == (count, pytest.approx(excess))
    assert count >= 1


def test_spikes_and_their_mean_size_are_reported_once_there_is_one() -> None:
    method = EPPO(beta=0.0)
    values = [1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0]
    for value in values:
        data, rows = mixture({"a": value, "b": 1.0})
        metrics = method.modulate(data, rows)
    assert metrics["eppo_spikes"] == 0.0 and "eppo_spike" not in metrics
    data, rows = mixture({"a": 3.0, "b": 1.0})
    metrics = method.modulate(data, rows)
    assert metrics["eppo_spikes"] == 1.0 and metrics["eppo_spike"] == pytest.approx(2.0, rel=1e-6)


# ------------------------------------------------------------------------------------------------------- its settings


@pytest.mark.parametrize(
    "values",
    [
        {"alpha": -1.0},
        {"alpha": float("nan")},
        {"eps_min": 0.0},
        {"eps_min": 0.3},
        {"eps_max": 0.1},
        {"eps_max": 1.0},
        {"beta": 1.0},
        {"pace": "fast"},
        {"kappa": 1.0},
        {"sides": "low"},
        {"speed": 1},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(values))):
        make("eppo", values)


def test_every_setting_has_its_line() -> None:
    names = list(inspect.signature(EPPO).parameters)
    lines = [line.split(":")[0].strip() for line in (EPPO.__doc__ or "").splitlines() if ": " in line]
    assert [line for line in lines if line in names] == names


# ------------------------------------------------------------------------------------------------------------- parts


def random_traces(rng: np.random.Generator) -> list[Trace]:
    """Of two environments, two groups each, of traces of one to four turns of one to five tokens."""
    return [
        play(
            "ab"[slot % 2], slot, i, [rng.uniform(0, 2, rng.integers(1, 6)).tolist() for _ in range(rng.integers(1, 5))]
        )
        for slot in range(4)
        for i in range(3)
    ]


def trained(entropies: dict[str, float]) -> tuple[Any, list[Row]]:
    """A mixture whose rows the small model can be trained on: ratios spread about 1, advantages of both signs."""
    data, rows = mixture(entropies)
    rng = np.random.default_rng(0)
    TorchLearner(Network(model()), learning_rate=0.0).score(rows, frozenset({"old_logprob"}))
    for row in rows:
        row.columns["old_logprob"] = row.columns["old_logprob"] + rng.normal(0, 0.3, len(row.at)).astype(np.float32)
        row.columns["advantage"] = rng.normal(0, 1, len(row.at)).astype(np.float32)
    return data, rows


def gradient(built: Any, streams: list[Stream]) -> dict[str, torch.Tensor]:
    """Of one update, as the optimiser would see it."""
    learner = TorchLearner(Network(built), learning_rate=0.0)
    found: list[dict[str, torch.Tensor]] = []
    step: Callable[..., None] = learner._step
    learner._step = lambda *args: (found.append(gradients(built)), step(*args))[1]  # type: ignore[method-assign]
    learner.update(streams, 0.0)
    return found[0]
