"""Golden numbers, gradients against hand and autograd, and denominators that no layout and no micro-batch can change."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.losses import (
    DENOMINATORS,
    GATES,
    KL_KINDS,
    entropy,
    kl,
    kl_full,
    kl_topk,
    nll,
    policy_loss,
    sequence_log_ratio,
    stream_weights,
    token_logprobs,
    value_loss,
    weights,
)
from assay.rows import Layout, Row, Stream, build_rows
from assay.trace import Outcome, Provenance, TaskKey, Trace, Turn


def tensor(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def at_ratio(*ratios: float) -> tuple[Tensor, Tensor]:
    """Log-probs with a gradient and old ones, so that the ratios are these."""
    logprob = tensor(*[-1.0] * len(ratios), grad=True)
    return logprob, logprob.detach() - torch.tensor(ratios, dtype=torch.float64).log()


def gradient(loss: Tensor, of: Tensor) -> list[float]:
    return torch.autograd.grad(loss.sum(), of)[0].tolist()


# --------------------------------------------------------------------------------------------------- policy losses


def test_ppo_loss_and_gradient_on_either_side_of_the_bounds() -> None:
    ratios = [1.0, 1.5, 0.5, 1.5, 0.5, 10.0]
    logprob, old = at_ratio(*ratios)
    advantage = tensor(2, 2, 2, -2, -2, -2)
    loss, metrics = policy_loss("ppo", logprob, old, advantage, low=0.2, high=0.28, dual=3.0)
    np.testing.assert_allclose(loss.detach(), [-2, -2.56, -1, 3, 1.6, 6])
    np.testing.assert_allclose(gradient(loss, logprob), [-2, 0, -1, 3, 0, 0])
    assert metrics["clip_high"].tolist() == [0, 1, 0, 0, 0, 0]
    assert metrics["clip_low"].tolist() == [0, 0, 0, 0, 1, 0]
    assert metrics["clip_dual"].tolist() == [0, 0, 0, 0, 0, 1]
    np.testing.assert_allclose(metrics["ratio"], ratios)
    np.testing.assert_allclose(metrics["approx_kl"], [r - 1 - math.log(r) for r in ratios])
    assert not any(m.requires_grad for m in metrics.values())


def test_ppo_bounds_per_token_clip_each_token_by_its_own() -> None:
    logprob, old = at_ratio(1.25, 1.25, 0.75, 0.75)
    loss, metrics = policy_loss(
        "ppo", logprob, old, tensor(1, 1, -1, -1), low=tensor(0.2, 0.2, 0.2, 0.3), high=tensor(0.2, 0.3, 0.2, 0.2)
    )
    np.testing.assert_allclose(gradient(loss, logprob), [0, -1.25, 0, 0.75])
    assert metrics["clip_high"].tolist() == [1, 0, 0, 0] and metrics["clip_low"].tolist() == [0, 0, 1, 0]


def test_equal_bounds_as_number_and_per_token_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    logprob, advantage = torch.randn(2, 500, generator=generator)
    old = logprob + 0.5 * torch.randn(500, generator=generator)
    for low, high in np.random.default_rng(0).uniform(0.01, 0.5, (20, 2)).tolist():
        scalar, _ = policy_loss("ppo", logprob, old, advantage, low=low, high=high)
        bounds = {"low": torch.full((500,), low), "high": torch.full((500,), high)}
        assert torch.equal(scalar, policy_loss("ppo", logprob, old, advantage, **bounds)[0])


def test_no_gradient_reaches_advantages_bounds_or_the_old_policy() -> None:
    logprob, old = at_ratio(1.5, 0.5)
    constants = [old.requires_grad_(), tensor(1, -1, grad=True), *(tensor(0.2, 0.2, grad=True) for _ in range(2))]
    for gate in GATES:
        bounds = {"low": constants[2], "high": constants[3]} if gate in ("ppo", "gspo", "sequence") else {}
        loss, _ = policy_loss(gate, logprob, constants[0], constants[1], torch.tensor([0, 1]), **bounds)
        grads = torch.autograd.grad(loss.sum(), [logprob, *constants], allow_unused=True)
        assert grads[0] is not None and all(g is None for g in grads[1:]), gate


@pytest.mark.parametrize("gate", [g for g in GATES if g != "sequence"])
def test_at_ratio_one_the_gradient_is_that_of_reinforce(gate) -> None:
    logprob, old = at_ratio(1, 1, 1, 1)
    advantage = tensor(0.7, 0.7, -1.3, -1.3)
    loss, metrics = policy_loss(gate, logprob, old, advantage, torch.tensor([0, 0, 1, 1]))
    np.testing.assert_allclose(gradient(loss, logprob), -advantage)
    assert all(metrics[name].sum() == 0 for name in ("clip_low", "clip_high", "clip_dual", "approx_kl"))


def test_ppo_drops_the_gradient_above_its_bound_and_cispo_keeps_it_capped() -> None:
    logprob, old = at_ratio(6.0, 3.0)
    advantage = tensor(1, 1)
    assert gradient(policy_loss("ppo", logprob, old, advantage)[0], logprob) == [0, 0]
    loss, metrics = policy_loss("cispo", logprob, old, advantage, cispo_weight_cap=5.0)
    np.testing.assert_allclose(gradient(loss, logprob), [-5, -3])  # the cap is the weight itself, not 1 + 5
    np.testing.assert_allclose(loss.detach(), [5, 3])  # -weight * A * log pi at log pi = -1
    assert metrics["clip_high"].tolist() == [1, 0]


def test_sapo_golden_numbers() -> None:
    logprob, old = at_ratio(1.0, 1.0, 2.0, 2.0)
    loss, _ = policy_loss("sapo", logprob, old, tensor(1, -1, 1, -1))
    sigmoid = [1 / (1 + math.exp(-x)) for x in (0, 0, 1.0, 1.05)]
    np.testing.assert_allclose(loss.detach(), [-2, 2 / 1.05, -4 * sigmoid[2], 4 / 1.05 * sigmoid[3]])
    slope = [4 * s * (1 - s) * r for s, r in zip(sigmoid, (1, 1, 2, 2), strict=True)]
    np.testing.assert_allclose(gradient(loss, logprob), np.array(slope) * [-1, 1, -1, 1])


def test_unbounded_ratio_is_plain_importance_sampling() -> None:
    logprob, old = at_ratio(8.0, 0.1)
    loss, _ = policy_loss("none", logprob, old, tensor(1, -2))
    np.testing.assert_allclose(loss.detach(), [-8, 0.2])
    np.testing.assert_allclose(gradient(loss, logprob), [-8, 0.2])


@pytest.mark.parametrize(("gate", "mean"), [("gspo", True), ("sequence", False)])
def test_sequence_gates_have_the_gradient_of_the_sequence_objective(gate, mean) -> None:
    logprob, old = at_ratio(1.2, 0.9, 1.1, 1.4, 1.3, 0.6)
    sequence = torch.tensor([0, 2, 0, 2, 0, 4])  # interleaved and not dense: what a micro-batch may look like
    advantage = tensor(1, -1, 1, -1, 1, -1)
    loss, metrics = policy_loss(gate, logprob, old, advantage, sequence, low=0.3, high=0.3)
    objective = tensor(0)
    for s in (0, 2, 4):
        own = sequence == s
        log_ratio = (logprob - old)[own].mean() if mean else (logprob - old)[own].sum()
        ratio, a = log_ratio.exp(), advantage[own][0]
        objective = objective - torch.minimum(ratio * a, ratio.clamp(0.7, 1.3) * a)
    reduced = loss / torch.bincount(sequence)[sequence] if mean else loss
    np.testing.assert_allclose(gradient(reduced, logprob), gradient(objective, logprob), atol=1e-12)
    np.testing.assert_allclose(metrics["ratio"][5], 0.6)
    assert metrics["clip_low"][5] == 1
    if mean:
        np.testing.assert_allclose(metrics["ratio"][0], (1.2 * 1.1 * 1.3) ** (1 / 3))
        np.testing.assert_allclose(reduced.sum().item(), objective.item())
    else:
        np.testing.assert_allclose(metrics["ratio"][0], 1.2 * 1.1 * 1.3)


def test_ratios_of_impossible_tokens_stay_finite() -> None:
    for gate in GATES:
        logprob, old = tensor(-1, -900, grad=True), tensor(-900, -1)
        loss, metrics = policy_loss(gate, logprob, old, tensor(-1, 1), torch.tensor([0, 1]))
        assert torch.isfinite(loss).all() and np.isfinite(gradient(loss, logprob)).all(), gate
        assert torch.isfinite(metrics["approx_kl"]).all()
    whole = sequence_log_ratio(tensor(30, 30), torch.tensor([0, 0]), mean=True)
    assert whole.tolist() == [10, 10]


def test_no_tokens_give_no_loss_and_no_error() -> None:
    empty = torch.zeros(0)
    for gate in GATES:
        assert policy_loss(gate, empty, empty, empty, torch.zeros(0, dtype=torch.int64))[0].shape == (0,)
    assert all(weights(d, [], traces=[], groups=[], turns=[], constant=1).shape == (0,) for d in DENOMINATORS)


def test_mistakes_are_named() -> None:
    one = tensor(-1)
    with pytest.raises(ValueError, match="gates are ppo"):
        policy_loss("pop", one, one, one)
    with pytest.raises(ValueError, match="one shape"):
        policy_loss("ppo", one, one, tensor(1, 1))
    with pytest.raises(ValueError, match="needs `sequence`"):
        policy_loss("gspo", one, one, one)
    with pytest.raises(ValueError, match="above 1"):
        policy_loss("ppo", one, one, one, dual=0.5)
    with pytest.raises(ValueError, match="kinds are k1"):
        kl(one, one, "k4")
    with pytest.raises(ValueError, match="needs old_value"):
        value_loss(one, one, clip=0.2)
    with pytest.raises(ValueError, match="one shape"):
        kl_topk(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))


# ---------------------------------------------------------------------------------- divergences and other losses


def test_kl_golden_numbers() -> None:
    logprob, ref = tensor(-1, -2), tensor(-1.5, -1)
    np.testing.assert_allclose(kl(logprob, ref, "k1"), [0.5, -1])
    np.testing.assert_allclose(kl(logprob, ref, "k2"), [0.125, 0.5])
    for kind in ("k3", "k3+", "is_k3"):
        np.testing.assert_allclose(kl(logprob, ref, kind), [0.106531, 0.718282], atol=5e-7)
    np.testing.assert_allclose(kl(logprob, ref, "k1+"), [0.5, -1])
    off_policy = kl(logprob, ref, "is_k3", old_logprob=logprob - math.log(2))
    np.testing.assert_allclose(off_policy, [2 * 0.106531, 2 * 0.718282], atol=1e-6)


def test_kl_is_clamped_where_the_reference_thinks_a_token_impossible() -> None:
    assert kl(tensor(-500), tensor(0), "k3").tolist() == [10]
    assert all(torch.isfinite(kl(tensor(-2000, 0), tensor(0, -2000), kind)).all() for kind in KL_KINDS)


def test_no_gradient_reaches_the_reference() -> None:
    logprob, ref = tensor(-1, -2, grad=True), tensor(-1.5, -1, grad=True)
    for kind in KL_KINDS:
        assert torch.autograd.grad(kl(logprob, ref, kind).sum(), ref, allow_unused=True)[0] is None


def expected_gradient(kind: str, logits: Tensor, reference: Tensor) -> Tensor:
    """Exact expectation over the vocabulary of the estimator's gradient on-policy, by enumeration."""
    policy = torch.log_softmax(logits, -1)
    loss = (policy.exp().detach() * kl(policy, torch.log_softmax(reference, -1), kind)).sum()
    return torch.autograd.grad(loss, logits)[0]


def test_kl_estimators_have_in_expectation_the_gradient_that_is_claimed() -> None:
    logits, reference = tensor(0.3, -0.4, 1.1, 0.0, grad=True), tensor(-0.2, 0.5, 0.4, 0.1)
    policy, ref = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
    reverse = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)[0]
    forward = torch.autograd.grad((ref.exp() * (ref - policy)).sum(), logits)[0]
    claims = {"k1": torch.zeros(4), "k2": reverse, "k1+": reverse, "k3+": reverse, "is_k3": reverse, "k3": forward}
    assert set(claims) == set(KL_KINDS)
    for kind, claim in claims.items():
        np.testing.assert_allclose(expected_gradient(kind, logits, reference), claim, atol=1e-12, err_msg=kind)


def test_is_k3_has_the_reverse_kl_gradient_off_policy_and_k2_has_not() -> None:
    logits, reference = tensor(0.3, -0.4, 1.1, 0.0, grad=True), tensor(-0.2, 0.5, 0.4, 0.1)
    old = torch.log_softmax(tensor(1.0, 0.0, -1.0, 0.5), -1)
    policy, ref = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
    reverse = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)[0]
    for kind, right in (("is_k3", True), ("k2", False)):
        loss = (old.exp() * kl(policy, ref, kind, old)).sum()
        got = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        assert torch.allclose(got, reverse, atol=1e-12) is right


def test_full_kl_agrees_with_the_sum_and_its_gradient_spares_the_target() -> None:
    logits, target = tensor(0.3, -0.4, 1.1, grad=True), tensor(-0.2, 0.5, 0.4, grad=True)
    s, p = torch.softmax(logits, -1), torch.softmax(target, -1)
    loss = kl_full(torch.log_softmax(logits, -1)[None], torch.log_softmax(target, -1)[None])
    by_hand = sum(a * math.log(a / b) for a, b in zip(s.tolist(), p.tolist(), strict=True))
    np.testing.assert_allclose(loss.tolist(), [by_hand])
    grads = torch.autograd.grad(loss.sum(), [logits, target], allow_unused=True)
    np.testing.assert_allclose(grads[0], (s * ((s / p).log() - by_hand)).detach(), atol=1e-12)
    assert grads[1] is None
    assert kl_full(torch.log_softmax(logits, -1)[None], torch.log_softmax(logits, -1)[None]).tolist() == [0]


def test_forbidden_tokens_count_nothing_in_kl_and_entropy() -> None:
    logits = torch.tensor([[0.5, -0.5, -torch.inf]], requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)
    for loss, reference in (
        (kl_full(logprobs, torch.log_softmax(torch.tensor([[0.0, 0.0, -torch.inf]]), -1)), None),
        (entropy(logits), entropy(logits[:, :2])),
    ):
        assert torch.isfinite(loss).all()
        assert torch.isfinite(torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0]).all()
        assert reference is None or torch.allclose(loss, reference)


def test_top_k_kl_is_the_kl_of_the_bucketed_distributions() -> None:
    logprobs = torch.log_softmax(tensor(0.3, -0.4, 1.1, 0.0, 0.7), -1)[None]
    target = torch.log_softmax(tensor(-0.2, 0.5, 0.4, 0.1, 2.0), -1)[None]
    ids = torch.tensor([[4, 1]])
    s, p = (x.exp()[0].tolist() for x in (logprobs, target))
    pairs = [(s[4], p[4]), (s[1], p[1]), (s[0] + s[2] + s[3], p[0] + p[2] + p[3])]
    by_hand = sum(a * math.log(a / b) for a, b in pairs)
    np.testing.assert_allclose(kl_topk(logprobs, ids, target.gather(-1, ids)), [by_hand])
    assert by_hand < kl_full(logprobs, target).item()
    exact = kl_topk(logprobs, torch.tensor([[0, 1, 2, 3]]), target[:, :4])  # the bucket is a single token
    np.testing.assert_allclose(exact, kl_full(logprobs, target))


def test_top_k_kl_stays_finite_when_the_named_tokens_take_all_the_mass() -> None:
    logits = torch.tensor([[40.0, 0.0, 0.0]], requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)
    loss = kl_topk(logprobs, torch.tensor([[0]]), torch.tensor([[0.0]]))
    assert torch.isfinite(loss).all() and torch.isfinite(torch.autograd.grad(loss.sum(), logits)[0]).all()


def test_value_loss_by_hand() -> None:
    value, old = tensor(1.0, 0.45, 0.0, grad=True), tensor(0.5, 0.5, 0.5)
    loss = value_loss(value, tensor(1.0, 1.0, 1.0), old, clip=0.2)
    np.testing.assert_allclose(loss.detach(), [0.5 * 0.3**2, 0.5 * 0.55**2, 0.5])
    np.testing.assert_allclose(gradient(loss, value), [0, -0.55, -1])  # clipped: no gradient though it is right
    np.testing.assert_allclose(value_loss(value, tensor(0, 0, 1)).detach(), [0.5, 0.10125, 0.5])


def test_logprobs_and_entropy_are_fp32_and_at_the_temperature() -> None:
    logits = torch.tensor([[2.0, 0.0, -2.0], [0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    p = np.exp([1.0, 0.0, -1.0]) / np.exp([1.0, 0.0, -1.0]).sum()
    got = token_logprobs(logits, torch.tensor([1, 2]), temperature=2.0)
    assert got.dtype == torch.float32 and entropy(logits).dtype == torch.float32
    np.testing.assert_allclose(got, [math.log(p[1]), -math.log(3)], rtol=1e-6)
    np.testing.assert_allclose(entropy(logits, 2.0), [-(p * np.log(p)).sum(), math.log(3)], rtol=1e-6)
    assert nll(got).tolist() == (-got).tolist()


# ------------------------------------------------------------------------------------------------------ denominators

LOSS = np.array([[1, 1, 1, 1], [4, 0, 0, 0]], float)
MASK = np.array([[1, 1, 1, 1], [1, 0, 0, 0]], bool)


def golden(denominator: str, **kwargs: object) -> float:
    """The step's loss of the two padded sequences above, each its own trace."""
    row = np.repeat([0, 1], 4)
    w = weights(denominator, row, traces=["a", "b"], mask=MASK.ravel(), **kwargs)  # type: ignore[arg-type]
    return float((w * LOSS.ravel()).sum())


def test_aggregation_golden_numbers() -> None:
    assert golden("token") == pytest.approx(1.6)
    assert golden("sequence") == golden("episode") == pytest.approx(2.5)
    assert golden("constant", constant=1) == pytest.approx(4.0)  # sequence mean of token sums
    assert 2 * golden("constant", constant=4) == pytest.approx(2.0)  # verl's form, not divided by the sequences


def test_dr_grpo_constant_does_not_grow_with_the_batch() -> None:
    one = weights("constant", [0, 0, 1], traces=["a", "b"], constant=4)
    two = weights("constant", [0, 0, 1, 2, 2, 3], traces=["a", "b", "c", "d"], constant=4)
    assert (one * [3, 1, 2]).sum() == pytest.approx((two * [3, 1, 2, 3, 1, 2]).sum())
    assert one.tolist() == [1 / 8] * 3


def brute_force(denominator: str, rows: list[Row], loss: list[np.ndarray], constant: float) -> float:
    """Mean over units of the token mean of each, from dictionaries of lists."""
    units: dict[object, list[float]] = {}
    for number, (row, values) in enumerate(zip(rows, loss, strict=True)):
        for turn, value in zip(row.turns.tolist(), values.tolist(), strict=True):
            key = {
                "token": 0,
                "sequence": number,
                "turn": (row.trace.key, turn),
                "episode": row.trace.key,
                "group": row.trace.group_key,
                "constant": row.trace.key,
            }[denominator]
            units.setdefault(key, []).append(value)
    if denominator == "constant":
        return sum(sum(v) for v in units.values()) / (len(units) * constant)
    return sum(sum(v) / len(v) for v in units.values()) / len(units)


def make_trace(slot: int, rollout: int, lengths: list[int]) -> Trace:
    """A trace whose turn t samples lengths[t] tokens, with a forced token at the end of each."""
    turns = []
    for length in lengths:
        ids = np.arange(length + 1, dtype=np.int32)
        turns.append(
            Turn(
                context_ids=np.array([7, 8], np.int32),
                context_provenance=np.full(2, Provenance.ENVIRONMENT, np.uint8),
                ids=ids,
                provenance=np.array([Provenance.SAMPLED] * length + [Provenance.FORCED], np.uint8),
                logprobs=np.zeros(length + 1, np.float32),
                entropies=np.zeros(length + 1, np.float32),
                closing_ids=np.zeros(0, np.int32),
                observation="",
                action="",
                reward=0.0,
                valid=True,
                anchor="",
                skill="",
                noop=False,
                policy_version=0,
            )
        )
    task = TaskKey("test", "1", "train", slot, "0")
    prompt = np.array([1, 2, 3], np.int32)
    provenance = np.full(3, Provenance.TEMPLATE, np.uint8)
    return Trace(task, 0, 0, slot, rollout, prompt, provenance, tuple(turns), "", 1.0, Outcome.SUCCESS, 1.0)


TRACES = [make_trace(0, 0, [2, 3]), make_trace(0, 1, [1]), make_trace(1, 0, [4, 0, 1]), make_trace(1, 1, [0])]


def step_loss(stream: Stream, per_token: Callable[[Row], np.ndarray]) -> float:
    return float(sum((w * per_token(r)).sum() for w, r in zip(stream_weights(stream), stream.rows, strict=True)))


def by_turn_and_position(row: Row) -> np.ndarray:
    """A loss that belongs to the token itself, so it is the same in every layout."""
    return np.sin(row.targets + 10.0 * row.turns + 100.0 * row.trace.rollout + 1000.0 * row.trace.slot)


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("layout", ["append", "window(1)"])
def test_denominators_agree_with_brute_force(denominator, layout) -> None:
    rows = build_rows(TRACES, Layout.parse(layout))
    stream = Stream("policy", rows, "policy", denominator, {"length": 5.0})
    expected = brute_force(denominator, rows, [by_turn_and_position(r) for r in rows], 5.0)
    assert step_loss(stream, by_turn_and_position) == pytest.approx(expected)


@pytest.mark.parametrize("denominator", [d for d in DENOMINATORS if d != "sequence"])
def test_the_layout_does_not_change_the_loss(denominator) -> None:
    append, window = (
        Stream("policy", build_rows(TRACES, Layout.parse(name)), "policy", denominator, {"length": 5.0}, weight=0.5)
        for name in ("append", "window(2)")
    )
    assert len(append.rows) < len(window.rows)
    assert step_loss(append, by_turn_and_position) == pytest.approx(step_loss(window, by_turn_and_position), rel=1e-12)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.sampled_from(DENOMINATORS), st.integers(0, 99))
def test_weights_sum_to_one_and_do_not_depend_on_the_order_of_tokens(row, denominator, seed) -> None:
    random = np.random.default_rng(seed)
    turns = random.integers(0, 3, len(row))
    keys = {"traces": list("aabbcd"), "groups": list("xxxyyy"), "constant": 3.0}
    w = weights(denominator, row, turns=turns, **keys)
    assert (w > 0).all()
    assert denominator == "constant" or w.sum() == pytest.approx(1)
    order = random.permutation(len(row))
    shuffled = weights(denominator, np.array(row)[order], turns=turns[order], **keys)
    np.testing.assert_allclose(shuffled, w[order], rtol=1e-12)


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_fully_masked_rows_leave_the_denominator(denominator) -> None:
    keys = {"constant": 3.0}
    with_masked = weights(
        denominator,
        [0, 0, 1, 1, 1, 2],
        traces=["a", "b", "c"],
        groups=["x", "y", "z"],
        turns=[0, 1, 0, 0, 1, 0],
        mask=[1, 1, 0, 0, 0, 1],
        **keys,
    )
    without = weights(denominator, [0, 0, 1], traces=["a", "c"], groups=["x", "z"], turns=[0, 1, 0], **keys)
    np.testing.assert_array_equal(with_masked, [without[0], without[1], 0, 0, 0, without[2]])
    assert (weights(denominator, [0], traces=["a"], groups=["x"], turns=[0], mask=[False], **keys) == 0).all()


def test_two_views_of_an_episode_are_one_unit() -> None:
    two_views = {"traces": ["a", "a", "b"], "turns": [0, 0, 0]}
    assert weights("turn", [0, 1, 2], **two_views).tolist() == [0.25, 0.25, 0.5]
    assert weights("episode", [0, 1, 2], **two_views).tolist() == [0.25, 0.25, 0.5]
    assert weights("constant", [0, 1, 2], constant=2, **two_views).tolist() == [0.25] * 3


def test_rows_of_token_weight_zero_leave_the_denominator_and_single_tokens_do_not() -> None:
    rows = build_rows(TRACES, Layout())
    for row, w in zip(rows, ([1, 0, 1, 1, 2], [0], [1] * 5), strict=True):
        row.columns["w"] = np.array(w, np.float32)
    got = stream_weights(Stream("policy", rows, "policy", "sequence", weight=3.0, token_weight="w"))
    np.testing.assert_allclose(got[0], 3.0 * np.array([1, 0, 1, 1, 2]) / (2 * 5))
    assert got[1].tolist() == [0] and got[2].tolist() == pytest.approx([0.3] * 5)
    assert stream_weights(Stream("policy", [], "policy", "token")) == []


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(DENOMINATORS), st.sampled_from(sorted(GATES)), st.integers(0, 10**6))
def test_micro_batches_change_neither_loss_nor_gradient(denominator, gate, seed) -> None:
    random = np.random.default_rng(seed)
    row = np.repeat(np.arange(6), random.integers(1, 5, 6))
    n = len(row)
    w = torch.from_numpy(
        weights(denominator, row, traces=list("aabcde"), groups=list("xxxyyy"), turns=row % 2, constant=7.0)
    )
    base = torch.from_numpy(random.normal(size=(3, n)))
    parameter = tensor(0.3, grad=True)

    def loss_of(take: np.ndarray) -> Tensor:
        index = torch.from_numpy(take)
        logprob = -base[0, index].abs() * parameter.exp()
        old = -base[0, index].abs() + 0.2 * base[1, index]
        loss, _ = policy_loss(gate, logprob, old, base[2, index], torch.from_numpy(row[take]))
        return (w[index] * loss).sum()

    whole = loss_of(np.arange(n))
    parts = sum((loss_of(np.flatnonzero(np.isin(row, rows))) for rows in ([3, 0], [5], [1, 2, 4])), tensor(0))
    np.testing.assert_allclose(parts.detach(), whole.detach(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient(parts, parameter), gradient(whole, parameter), rtol=1e-9, atol=1e-12)


def test_missing_keys_are_named_and_unknown_denominators_too() -> None:
    for denominator, match in (("episode", "traces"), ("group", "groups"), ("constant", "tokens per episode")):
        with pytest.raises(ValueError, match=match):
            weights(denominator, [0])
    with pytest.raises(ValueError, match="needs `turns`"):
        weights("turn", [0], traces=["a"])
    with pytest.raises(ValueError, match="names are token"):
        weights("tokens", [0])
    with pytest.raises(ValueError, match="one key per row"):
        weights("episode", [0, 1], traces=["a"])


@pytest.mark.parametrize("gate", ["ppo", "none", "cispo", "sapo"])
def test_what_stands_on_a_masked_token_changes_neither_loss_nor_gradient(gate) -> None:
    w = torch.from_numpy(weights("sequence", [0, 0, 1], mask=[True, False, True]))
    results = []
    for masked in (-1.0, -7.0):
        logprob = tensor(-1, masked, -2, grad=True)
        loss, _ = policy_loss(gate, logprob, tensor(-1.1, 0, -1.8), tensor(1, 100 * masked, -1))
        results.append(((w * loss).sum().item(), gradient(w * loss, logprob)))
    assert results[0] == results[1] and results[0][1][1] == 0
