"""One optimiser step against a reference written plainly: transformers' own forward, one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learner_parts import difference, gradients, model, rows_of, traces

from assay import losses
from assay.learner.packing import pack
from assay.learner.terms import prepare
from assay.learner.torch_learner import TorchLearner
from assay.model import Network
from assay.rows import Row, Stream
from assay.trace import Outcome

DENOMINATORS = ("token", "sequence", "turn", "episode", "group", "constant")


def build(built: Any, **options: Any) -> TorchLearner:
    return TorchLearner(Network(built), learning_rate=1e-3, **options)


def gradient(learner: TorchLearner, streams: Sequence[Stream]) -> dict[str, torch.Tensor]:
    """Of the whole step, before clipping."""
    terms = prepare(streams, learner.skip_zero_advantage)
    rows = list({id(r): r for term in terms for r in term.rows}.values())
    learner._clear()
    assert learner._backward(terms, pack(rows, learner.tokens_per_forward, share=learner.share))
    found = gradients(learner.network.model)
    learner._clear()
    return found


def brute(built: Any, rows: Sequence[Row], loss: Callable[[Row, torch.Tensor, float], torch.Tensor]) -> Any:
    """Gradient of the sum over rows of `loss(row, log-softmax [N, V] of its targets at its temperature, ...)`."""
    built.zero_grad()
    total = 0.0
    for row in rows:
        logits = built(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None], use_cache=False).logits[0]
        heat = row.trace.temperature
        value = loss(row, (logits[row.at - 1] / heat).log_softmax(-1), heat)
        value.backward()
        total += float(value.detach())
    return gradients(built), total


def picked(row: Row, full: torch.Tensor) -> torch.Tensor:
    return full[torch.arange(len(row.at)), torch.from_numpy(row.targets.astype(np.int64))]


def plain_weights(rows: Sequence[Row], denominator: str, length: float = 7.0) -> dict[int, np.ndarray]:
    """By loops: the mean over units of the token mean of the unit."""
    names = {
        "token": lambda row, n: 0,
        "sequence": lambda row, n: row.key,
        "turn": lambda row, n: (row.trace.key, int(row.turns[n])),
        "episode": lambda row, n: row.trace.key,
        "group": lambda row, n: row.trace.group_key,
    }
    if denominator == "constant":
        return {id(r): np.full(len(r.at), 1 / (len({x.trace.key for x in rows}) * length)) for r in rows}
    unit = names[denominator]
    counts: dict[Any, int] = {}
    for row in rows:
        for n in range(len(row.at)):
            counts[unit(row, n)] = counts.get(unit(row, n), 0) + 1
    return {id(r): np.array([1 / (len(counts) * counts[unit(r, n)]) for n in range(len(r.at))]) for r in rows}


def policy(rows: list[Row], denominator: str = "token", name: str = "policy", **constants: Any) -> Stream:
    return Stream(name, rows, "policy:ppo", denominator, {"length": 7.0, "low": 0.2, "high": 0.3, **constants})


def ppo(row: Row, full: torch.Tensor, weights: np.ndarray, low: float = 0.2, high: float = 0.3) -> torch.Tensor:
    ratio = (picked(row, full) - torch.from_numpy(row.columns["old_logprob"])).exp()
    advantage = torch.from_numpy(row.columns["advantage"])
    worst = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return (torch.from_numpy(weights).float() * worst).sum()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_gradient_is_that_of_one_row_at_a_time_for_every_denominator(name: str, denominator: str) -> None:
    built = model(name)
    rows = rows_of(traces(), "window(2)")
    weights = plain_weights(rows, denominator)
    expected, loss = brute(built, rows, lambda row, full, heat: ppo(row, full, weights[id(row)]))
    learner = build(built)
    assert difference(gradient(learner, [policy(rows, denominator)]), expected) < 2e-5
    assert learner.update([policy(rows, denominator)], 0.0)["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("gate", ["gspo", "sequence"])
def test_one_ratio_per_episode_even_when_its_rows_do_not_fit_a_forward(gate: str) -> None:
    built = model()
    rows = rows_of(traces(), "window(1)")
    learner = build(built, tokens_per_forward=8)
    learner.score(rows, frozenset({"old_logprob"}))
    for i, row in enumerate(rows):  # near the true values, or the bounds take every gradient
        row.columns["old_logprob"] = row.columns["old_logprob"] + np.float32(0.02 * (i % 3 - 1))
    by_trace: dict[str, list[Row]] = {}
    for row in rows:
        by_trace.setdefault(row.trace.key, []).append(row)
    weights = plain_weights(rows, "episode")
    for own in by_trace.values():
        logprobs = []
        for row in own:
            logits = built(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0]
            logprobs.append(picked(row, logits[row.at - 1].log_softmax(-1)))
        lp = torch.cat(logprobs)
        old, advantage = (torch.from_numpy(np.concatenate([r.columns[c] for r in own])) for c in COLUMNS)
        weight = torch.from_numpy(np.concatenate([weights[id(r)] for r in own])).float()
        apart = (lp - old).detach()
        ratio = (apart.mean() if gate == "gspo" else apart.sum()).exp()
        (-(weight * advantage * ratio * lp).sum()).backward()
    expected = gradients(built)
    built.zero_grad()
    stream = Stream("policy", rows, f"policy:{gate}", "episode", {"low": 0.9, "high": 9.0})
    terms = prepare([stream], True)
    assert learner._backward(terms, pack(rows, 8, whole_traces=True))
    assert difference(gradients(built), expected) < 2e-5


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_small_forwards_change_no_gradient(name: str) -> None:
    built = model(name)
    rows = rows_of(traces(groups=3, size=4))
    whole = gradient(build(built), [policy(rows)])
    assert len(pack(rows, 40)) > 4
    assert difference(gradient(build(built, tokens_per_forward=40), [policy(rows)]), whole) < 1e-6


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_sharing_changes_no_gradient_and_no_score(name: str) -> None:
    built = model(name)
    rows = rows_of(traces(groups=3, size=4))
    shared, alone = build(built), build(built, share=False)
    assert difference(gradient(shared, [policy(rows)]), gradient(alone, [policy(rows)])) < 2e-6
    assert sum(p.tokens for p in pack(rows, 9999)) < 0.7 * sum(p.unshared for p in pack(rows, 9999))
    columns = {}
    for learner in (shared, alone):
        learner.score(rows, frozenset({"old_logprob", "entropy"}))
        columns[learner] = {c: np.concatenate([r.columns[c] for r in rows]) for c in ("old_logprob", "entropy")}
    for c in ("old_logprob", "entropy"):
        np.testing.assert_allclose(columns[shared][c], columns[alone][c], atol=2e-5)


@pytest.mark.parametrize("denominator", ["token", "turn", "episode", "group", "constant"])
def test_append_and_window_weigh_the_same_numbers_alike(denominator: str) -> None:
    """With the window so wide that contexts agree, gradients do too: the tokens have the same coefficients."""
    built = model()
    made = traces()
    found = [gradient(build(built), [policy(rows_of(made, layout), denominator)]) for layout in ("append", "window(9)")]
    assert difference(found[0], found[1]) < 2e-6


def test_reference_kl_is_a_term_of_the_policy_rows_under_their_denominator() -> None:
    built = model()
    rows = rows_of(traces())
    weights = plain_weights(rows, "episode")

    def loss(row: Row, full: torch.Tensor, heat: float) -> torch.Tensor:
        q = picked(row, full) - torch.from_numpy(row.columns["ref_logprob"])
        k3 = (torch.exp(-q.clamp(-20, 20)) + q.clamp(-20, 20) - 1).clamp(-10, 10)
        return ppo(row, full, weights[id(row)]) + 0.3 * (torch.from_numpy(weights[id(row)]).float() * k3).sum()

    expected, _ = brute(built, rows, loss)
    found = gradient(build(built), [policy(rows, "episode", kl=0.3, kl_kind="k3")])
    assert difference(found, expected) < 2e-5


def test_bounds_per_row_reach_the_tokens_of_their_row() -> None:
    built = model()
    rows = rows_of(traces())
    rng = np.random.default_rng(0)
    low, high = (rng.uniform(0.05, 0.9, len(rows)).astype(np.float32) for _ in range(2))
    place = {id(row): i for i, row in enumerate(rows)}
    weights = plain_weights(rows, "token")
    expected, _ = brute(
        built,
        rows,
        lambda row, full, heat: ppo(
            row, full, weights[id(row)], float(low[place[id(row)]]), float(high[place[id(row)]])
        ),
    )
    stream = policy(rows, "token", low=low, high=high)
    assert difference(gradient(build(built, tokens_per_forward=60), [stream]), expected) < 2e-5
    assert difference(gradient(build(built), [policy(rows, "token", low=high, high=low)]), expected) > 1e-2


def test_at_ratio_one_the_gradient_is_that_of_reinforce() -> None:
    built = model()
    rows = rows_of(traces())
    for row in rows:
        del row.columns["old_logprob"]
    weights = plain_weights(rows, "token")
    expected, _ = brute(
        built,
        rows,
        lambda row, full, heat: (
            -(torch.from_numpy(weights[id(row)] * row.columns["advantage"]).float() * picked(row, full)).sum()
        ),
    )
    learner = build(built)
    assert difference(gradient(learner, [policy(rows)]), expected) < 2e-5
    metrics = learner.update([policy(rows)], 0.0)
    assert metrics["ratio_per_trained_token"] == 1.0 and metrics["approx_kl_per_trained_token"] == 0.0


def test_temperature_is_the_trace_s_for_policy_and_one_for_nll() -> None:
    built = model()
    made = [replace(t, temperature=0.7) for t in traces()]
    rows = rows_of(made)
    weights = plain_weights(rows, "token")

    def loss(row: Row, full: torch.Tensor, heat: float) -> torch.Tensor:
        plain = (full * heat).log_softmax(-1)  # back to temperature 1, up to the normaliser
        return ppo(row, full, weights[id(row)]) - 0.5 * (torch.from_numpy(weights[id(row)]) * picked(row, plain)).sum()

    expected, _ = brute(built, rows, loss)
    streams = [policy(rows), Stream("imitation", rows, "nll", "token", weight=0.5)]
    learner = build(built)
    assert difference(gradient(learner, streams), expected) < 2e-5
    packs = pack(rows, 9999)
    assert learner.update(streams, 0.0)["tokens_forwarded"] == sum(p.tokens for p in packs)  # both on one forward


def test_tokens_that_code_wrote_do_not_enter_the_loss() -> None:
    """FORCED tokens are no targets. The last one of a row is in nobody's context either: its id changes no bit."""
    built = model()
    made = traces(groups=1, size=2)
    last = replace(made[0].turns[0], provenance=made[0].turns[0].provenance.copy(), ids=made[0].turns[0].ids.copy())
    last.provenance[-1] = 3
    first = replace(made[0], turns=(last,))
    rows = rows_of([first, *made[1:]])
    before = gradient(build(built), [policy(rows)])
    assert all(int(row.at.max()) < len(row.ids) for row in rows)
    changed = next(row for row in rows if row.trace.key == first.key)
    assert int(changed.at.max()) < len(changed.ids) - 1
    changed.ids = changed.ids.copy()
    changed.ids[-1] = (changed.ids[-1] + 1) % 61
    after = gradient(build(built), [policy(rows)])
    assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("kind", ["full", "top8", "sampled"])
def test_targets_scored_on_one_view_pull_another(kind: str) -> None:
    built, teacher = model(), model(seed=3)
    rows, views = rows_of(traces()), rows_of(traces())
    build(teacher).score(views, frozenset({"target" if kind == "sampled" else f"target:{kind}"}))
    for row, view in zip(rows, views, strict=True):
        row.columns |= {name: view.columns[name] for name in ("target", "target_ids") if name in view.columns}
    weights = plain_weights(rows, "token")

    def loss(row: Row, full: torch.Tensor, heat: float) -> torch.Tensor:
        target = torch.from_numpy(row.columns["target"])
        if kind == "sampled":
            each = losses.kl(picked(row, full), target, "k2")
        elif kind == "full":
            each = (full.exp() * (full - target)).sum(-1)
        else:
            ids = torch.from_numpy(row.columns["target_ids"]).long()
            p, s = full.exp().gather(-1, ids), target.exp()
            rest_p, rest_s = 1 - p.sum(-1), 1 - s.sum(-1)
            each = (p * (p.log() - target)).sum(-1) + rest_p * (rest_p.log() - rest_s.log())
        return (torch.from_numpy(weights[id(row)]).float() * each).sum()

    expected, _ = brute(built, rows, loss)
    stream = Stream("distil", rows, "kl", "token", {"kl_kind": "k2"})
    assert difference(gradient(build(built, tokens_per_forward=70), [stream]), expected) < 1e-4


def test_a_stream_of_weight_zero_changes_no_bit() -> None:
    built = model()
    rows, others = rows_of(traces()), rows_of(traces(seed=9))
    alone = gradient(build(built), [policy(rows)])
    zero = Stream("off", others, "nll", "token", weight=0.0)
    muted = [replace_columns(row, "mute", 0.0) for row in others]
    masked = Stream("muted", muted, "nll", "token", token_weight="mute")
    beside = gradient(build(built), [zero, policy(rows), masked])
    assert all(torch.equal(alone[n], beside[n]) for n in alone)


def replace_columns(row: Row, name: str, value: float) -> Row:
    row.columns[name] = np.full(len(row.at), value, np.float32)
    return row


def test_rows_without_advantage_are_left_out_counted_and_change_no_gradient() -> None:
    built = model()
    rows = rows_of(traces(groups=3))
    dead = [row for row in rows if row.trace.slot == 1]
    for row in dead:
        row.columns["advantage"][:] = 0.0
    expected = gradient(build(built, skip_zero_advantage=False), [policy(rows, "group")])
    learner = build(built)
    assert difference(gradient(learner, [policy(rows, "group")]), expected) < 1e-6
    metrics = learner.update([policy(rows, "group")], 0.0)
    assert metrics["tokens_idle"] == sum(len(row.at) for row in dead)
    kept = pack([row for row in rows if row.trace.slot != 1], 9999)
    assert metrics["tokens_forwarded"] == sum(p.tokens for p in kept)


def test_value_stream_trains_the_head_and_only_the_head_when_detached() -> None:
    built = model()
    rows = rows_of(traces())
    stream = Stream("value", rows, "value", "token")
    learner = build(built, value_head=True, value_detached=True)
    before = {n: p.clone() for n, p in built.named_parameters()}
    first = learner.update([stream], 0.0)["loss"]
    assert first == pytest.approx(0.5 * np.mean(np.concatenate([r.columns["return"] for r in rows]) ** 2), rel=1e-5)
    for _ in range(60):
        last = learner.update([stream], 0.0)["loss"]
    assert last < 0.6 * first
    assert all(torch.equal(before[n], p) for n, p in built.named_parameters())
    learner.score(rows, frozenset({"value"}))
    weights, bias = learner.value_head.weight.detach(), learner.value_head.bias.detach()  # type: ignore[union-attr]
    row = rows[0]
    states = built.model(torch.from_numpy(row.ids.astype(np.int64))[None]).last_hidden_state[0][row.at - 1]
    np.testing.assert_allclose(row.columns["value"], (states @ weights[0] + bias).detach(), atol=2e-5)
    learner.value_detached = False
    learner.update([stream], 0.0)
    assert not all(torch.equal(before[n], p) for n, p in built.named_parameters())


COLUMNS = ("old_logprob", "advantage")


@pytest.mark.parametrize("layout", ["append", "window(1)"])
def test_a_cut_trace_has_the_value_of_its_final_context(layout: str) -> None:
    built = model()
    made = [replace(t, outcome=Outcome.CUT) if t.rollout == 1 else t for t in traces()]
    rows = rows_of(made, layout)
    learner = build(built, value_head=True)
    torch.manual_seed(3)
    torch.nn.init.normal_(learner.value_head.weight)  # type: ignore[union-attr]
    learner.score(rows, frozenset({"value"}))
    head = learner.value_head.weight.detach()[0]  # type: ignore[union-attr]
    for row in rows:
        last = row.trace.outcome is Outcome.CUT and row.turns[-1] == len(row.trace.turns) - 1
        assert ("final_value" in row.columns) == last
        if last:
            states = built.model(torch.from_numpy(row.ids.astype(np.int64))[None]).last_hidden_state[0]
            np.testing.assert_allclose(row.columns["final_value"], (states[-1] @ head).detach()[None], atol=2e-5)
