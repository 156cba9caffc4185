"""AEM: the numbered properties of its specification, and what happens at the edges."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entropy_parts import NAN, advantages, batch, random_batch, rows_of, trace, turn

from assay.learner.torch_learner import TorchLearner
from assay.methods.aem import AEM, Responses, coefficients
from assay.methods.registry import make
from assay.model import Network
from assay.protocols import UserError
from assay.rows import Row, Stream
from assay.train import train

GOLDEN = [trace(0, 0, [[0.2, 0.2], [0.4, 0.5, 0.6]]), trace(0, 1, [[1.0]])]  # mean entropies 0.2, 0.5 and 1.0


def brute(entropies: list[float], lam: float, gate: float) -> list[float]:
    """The definition, by loops over one group."""
    low, high = min(entropies), max(entropies)
    if high == low or high - low < gate:
        return [1.0] * len(entropies)
    powers = [math.exp(-lam * (h - low) / (high - low)) for h in entropies]
    return [p / (sum(powers) / len(powers)) for p in powers]


def one(entropies: Any, lam: float = 1.0, gate: float = 0.1) -> np.ndarray:
    """Coefficients of a single group."""
    return coefficients(entropies, np.zeros(len(entropies), int), lam, gate)


def random_groups(seed: int, n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.gamma(1.0, 0.5, n), rng.permutation(np.arange(n) % 5)


def test_coefficients_are_those_of_the_definition_by_loops() -> None:
    h, group = random_groups(0)
    for lam in (-1.0, 0.5, 1.0, 3.0):
        found = coefficients(h, group, lam, 0.1)
        for g in range(5):
            assert found[group == g] == pytest.approx(brute(h[group == g].tolist(), lam, 0.1), rel=1e-12)


def test_p01_the_mean_coefficient_of_a_group_is_one() -> None:
    h, group = random_groups(1)
    alpha = coefficients(h, group, 1.0, 0.1)
    assert np.ptp(alpha) > 1
    assert [alpha[group == g].mean() for g in range(5)] == pytest.approx([1.0] * 5, abs=1e-12)


def test_p02_equal_entropies_leave_the_advantage_as_it_is_to_the_bit() -> None:
    data = batch(trace(0, 0, [[0.7, 0.7], [0.7]]), trace(0, 1, [[0.7]]))
    rows = rows_of(data)
    for row in rows:
        row.columns["advantage"] *= np.float32(0.1234567)
    before = [row.columns["advantage"].tobytes() for row in rows]
    metrics = AEM(gate=0.0).modulate(data, rows)
    assert [row.columns["advantage"].tobytes() for row in rows] == before
    assert (metrics["aem_active"], metrics["aem_range"], metrics["aem_min"], metrics["aem_max"]) == (0, 0, 1, 1)


def test_p03_a_range_just_below_the_gate_is_left_alone_and_just_above_is_not() -> None:
    assert one([0.5, 0.5 + 0.0999]).tolist() == [1.0, 1.0]
    assert one([0.5, 0.5 + 0.1001])[0] > 1.4
    assert one([0.0, 0.25, 0.1], gate=0.25)[0] > 1.3, "the gate itself is past"


def test_p04_lambda_zero_touches_nothing_and_needs_nothing() -> None:
    data = batch(*GOLDEN)
    rows = rows_of(data)
    columns = [row.columns["advantage"] for row in rows]
    method = AEM(lam=0.0, score=True)
    assert method.modulate(data, rows) == {}
    assert all(row.columns["advantage"] is column for row, column in zip(rows, columns, strict=True))
    assert method.needs == frozenset() == AEM().needs
    assert one([0.0, 1.0, 2.0], lam=0.0).tolist() == [1.0] * 3


def test_p05_signs_stay_and_zero_stays_zero() -> None:
    data = random_batch(5)
    rows = rows_of(data)
    rng = np.random.default_rng(5)
    for row in rows:
        row.columns["advantage"] = rng.choice([-2.0, -0.3, 0.0, 0.4, 1.0], len(row.at)).astype(np.float32)
    before = [row.columns["advantage"].copy() for row in rows]
    AEM(lam=2.0).modulate(data, rows)
    for row, old in zip(rows, before, strict=True):
        assert np.array_equal(np.sign(row.columns["advantage"]), np.sign(old))
        assert not np.array_equal(row.columns["advantage"], old) or not old.any()


@pytest.mark.parametrize("lam", [0.5, 1.0, 2.0])
def test_p06_the_ratio_of_the_extremes_is_e_to_the_lambda(lam: float) -> None:
    h, group = random_groups(6)
    alpha = coefficients(h, group, lam, 0.1)
    for g in range(5):
        own = alpha[group == g]
        assert own.max() / own.min() == pytest.approx(math.exp(lam), rel=1e-12)
        assert math.exp(-lam) <= own.min() <= own.max() <= math.exp(lam)


def test_p07_the_coefficient_falls_strictly_with_entropy() -> None:
    h, group = random_groups(7)
    alpha = coefficients(h, group, 1.0, 0.1)
    for g in range(5):
        order = np.argsort(h[group == g])
        assert (np.diff(h[group == g][order]) > 0).all()
        assert (np.diff(alpha[group == g][order]) < 0).all()


def test_p08_affine_maps_of_the_entropies_change_nothing_without_a_gate() -> None:
    h, group = random_groups(8)
    expected = coefficients(h, group, 1.0, 0.0)
    for scale, shift in ((3.0, 0.7), (0.01, -2.0), (50.0, 0.0)):
        assert coefficients(scale * h + shift, group, 1.0, 0.0) == pytest.approx(expected, rel=1e-9)


def test_p08_equal_entropies_without_a_gate_give_one_and_no_nan() -> None:
    assert one([0.3, 0.3], gate=0.0).tolist() == [1.0, 1.0]
    assert one([0.3], gate=0.0).tolist() == [1.0]
    assert one([], gate=0.0).tolist() == []


def test_p09_order_does_not_matter_and_other_groups_do_not() -> None:
    h, group = random_groups(9)
    alpha = coefficients(h, group, 1.0, 0.1)
    order = np.random.default_rng(9).permutation(len(h))
    assert coefficients(h[order], group[order], 1.0, 0.1) == pytest.approx(alpha[order], rel=1e-12)
    other = np.where(group == 2, h, 100 * h + 3)
    assert coefficients(other, group, 1.0, 0.1)[group == 2] == pytest.approx(alpha[group == 2], rel=1e-12)
    data = random_batch(9)
    alone = batch(*data.groups[1].traces)
    all_rows, rows = rows_of(data), rows_of(alone)
    AEM().modulate(data, all_rows)
    AEM().modulate(alone, rows)
    together = advantages(all_rows)
    assert all(together[key] == pytest.approx(values, rel=1e-6) for key, values in advantages(rows).items())


def test_p10_only_sampled_tokens_count_and_repeating_them_changes_nothing() -> None:
    plain = batch(*GOLDEN)
    padded = batch(
        trace(0, 0, [turn([0.2, 0.2], forced=3), turn([0.4, 0.5, 0.6] * 2)]), trace(0, 1, [turn([], forced=2), [1.0]])
    )
    found = {}
    for name, data in (("plain", plain), ("padded", padded)):
        rows = rows_of(data)
        AEM().modulate(data, rows)
        found[name] = [values[0] for values in advantages(rows).values()]
    assert found["padded"] == pytest.approx(found["plain"], rel=1e-6)


def test_p11_both_layouts_give_every_response_the_same_advantage() -> None:
    data = random_batch(11)
    found = {}
    for layout in ("append", "window(0)", "window(2)"):
        rows = rows_of(data, layout)
        metrics = AEM().modulate(data, rows)
        found[layout] = advantages(rows), metrics
    assert found["append"] == found["window(0)"] == found["window(2)"]
    assert len({v[0] for v in found["append"][0].values()}) > 20


def tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    built: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for p in built.parameters():
            p.mul_(20.0) if p.dim() > 1 else p
    return built.eval()


def full_logprobs(built: Any, row: Row) -> torch.Tensor:
    """[N, V]."""
    logits = built(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None], use_cache=False).logits[0]
    return logits[row.at - 1].log_softmax(-1)


def policy_gradient(built: Any, rows: list[Row], through: bool) -> tuple[float, torch.Tensor]:
    """Loss and its gradient (flat), by plain autograd: minus the mean over tokens of alpha A ratio; ratio 1. With
    `through`, alpha is a function of the weights."""
    built.zero_grad()
    logprobs, spans = [], []
    for row in rows:
        full = full_logprobs(built, row)
        logprobs.append(full[torch.arange(len(row.at)), torch.from_numpy(row.targets.astype(np.int64))])
        entropy = -(full.exp() * full).sum(-1)
        spans += [entropy[row.turns == t].mean() for t in sorted(set(row.turns.tolist()))]
    h = torch.stack(spans).double()
    scaled = (h - h.min()) / (h.max() - h.min())
    alpha = torch.exp(-scaled) / torch.exp(-scaled).mean()
    assert float((h.max() - h.min()).detach()) > 0.1
    alpha = alpha if through else alpha.detach()
    total, at = torch.zeros(()), 0
    for row, logprob in zip(rows, logprobs, strict=True):
        for t in sorted(set(row.turns.tolist())):
            own = logprob[row.turns == t]
            advantage = 1.0 if row.trace.success else -1.0
            total = total - (alpha[at] * advantage * (own - own.detach()).exp()).sum()
            at += 1
    loss = total / sum(len(row.at) for row in rows)
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.reshape(-1) for p in built.parameters()])


def learner_gradient(built: Any, rows: list[Row]) -> tuple[float, torch.Tensor]:
    """Loss and gradient (flat) of the learner's own step, read just before its optimiser acts."""
    built.zero_grad()
    found: list[torch.Tensor] = []
    learner = TorchLearner(Network(built), learning_rate=1e-6, grad_clip=1e9)
    learner.optimizer.register_step_pre_hook(
        lambda *_: found.append(torch.cat([p.grad.reshape(-1).clone() for p in built.parameters()]))
    )
    metrics = learner.update([Stream("policy", rows, "policy:ppo", "token", {"low": 0.2, "high": 0.2})], 0.0)
    return metrics["loss"], found[0]


def modulated(built: Any) -> list[Row]:
    """Rows of three traces after AEM on the entropies that the learner computed."""
    data = batch(trace(0, 0, [[NAN] * 2, [NAN] * 3]), trace(0, 1, [[NAN] * 4]), trace(0, 2, [[NAN], [NAN] * 2]))
    rows = rows_of(data)
    method = AEM(score=True)
    TorchLearner(Network(built), learning_rate=1e-6).score(rows, method.needs)
    method.modulate(data, rows)
    return rows


def test_p12_no_gradient_flows_through_the_coefficient() -> None:
    built = tiny()
    rows = modulated(built)
    through, detached = policy_gradient(built, rows, True)[1], policy_gradient(built, rows, False)[1]
    found = learner_gradient(built, rows)[1]
    assert (through - detached).norm() > 0.01 * detached.norm(), "this test could not tell"
    assert (found - detached).norm() < 1e-5 * detached.norm()


def test_p13_the_coefficients_minimise_the_entropy_regularised_objective() -> None:
    rng = np.random.default_rng(13)
    for lam in (0.5, 1.0, 2.0):
        h = rng.uniform(0, 2, 12)
        scaled = (h - h.min()) / np.ptp(h)

        def objective(alpha: np.ndarray, scaled: np.ndarray = scaled, lam: float = lam) -> float:
            return float(np.mean(alpha * scaled) + np.mean(alpha * np.log(alpha)) / lam)

        best = one(h, lam)
        for _ in range(200):
            direction = rng.normal(size=12)
            direction -= direction.mean()
            other = best + rng.choice([1e-3, 1e-2, 0.1]) * best.min() * direction / np.abs(direction).max()
            assert objective(other) > objective(best)


def entropy_of(logits: np.ndarray) -> float:
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return float(-(p * np.log(p)).sum())


def test_p14_entropy_drifts_by_advantage_times_relative_surprisal() -> None:
    rng = np.random.default_rng(14)
    for _ in range(100):
        z = rng.normal(size=6)
        p = np.exp(z) / np.exp(z).sum()
        a, advantage = int(rng.integers(6)), float(rng.normal())
        step = np.zeros(6)
        step[a] = advantage / p[a]  # the natural gradient in the logits
        eta = 1e-6 * p[a]
        drift = (entropy_of(z + eta * step) - entropy_of(z - eta * step)) / (2 * eta)
        assert drift == pytest.approx(advantage * (-math.log(p[a]) - entropy_of(z)), abs=1e-6, rel=1e-4)


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_p14_with_surprisal_for_entropy_failures_keep_and_successes_spend_entropy(advantage: float) -> None:
    rng = np.random.default_rng(140)
    apart = 0
    for _ in range(200):
        z = 1.5 * rng.normal(size=6)
        p = np.exp(z) / np.exp(z).sum()
        chosen = rng.choice(6, 8, p=p)
        surprisal = -np.log(p[chosen])
        drift = []
        for alpha in (np.ones(8), one(surprisal, gate=0.0)):
            step = np.bincount(chosen, advantage * alpha / p[chosen], 6)
            eta = 1e-6 / np.abs(step).max()
            drift.append((entropy_of(z + eta * step) - entropy_of(z - eta * step)) / (2 * eta))
        assert -advantage * (drift[1] - drift[0]) >= -1e-4 * (1 + abs(drift[0]))
        apart += abs(drift[1] - drift[0]) > 1e-2
    assert apart > 150, "this test could not tell"


def test_p15_the_worked_example() -> None:
    assert one([0.2, 0.5, 1.0]) == pytest.approx([1.4597, 1.0033, 0.5370], abs=5e-5)
    data = batch(*GOLDEN)
    rows = rows_of(data)
    metrics = AEM().modulate(data, rows)
    assert rows[0].columns["advantage"] == pytest.approx([1.4597, 1.4597, 1.0033, 1.0033, 1.0033], abs=5e-5)
    assert rows[1].columns["advantage"] == pytest.approx([-0.5370], abs=5e-5)
    assert rows[0].columns["advantage"].dtype == np.float32
    expected = {"aem_range": 0.8, "aem_active": 1.0, "aem_min": 0.5370, "aem_max": 1.4597, "aem_shift": 0.3087}
    assert metrics == pytest.approx(expected, abs=5e-5)  # shift: (0.4597 + 0.0033 + 0.4630) / 3


def test_p16_loss_and_gradient_are_the_hosts_with_advantages_multiplied_before() -> None:
    built = tiny()
    rows = modulated(built)
    loss, gradient = policy_gradient(built, rows, False)
    found_loss, found = learner_gradient(built, rows)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert (found - gradient).norm() < 1e-5 * gradient.norm()


def test_environment_errors_are_in_no_statistic() -> None:
    data, broken = batch(*GOLDEN), batch(*GOLDEN, trace(0, 2, [[7.0]], bad=True))
    rows, other = rows_of(data), rows_of(broken)
    AEM().modulate(data, rows)
    AEM().modulate(broken, other)
    assert advantages(rows) == advantages(other)


def test_prompt_modes_are_groups_of_their_own() -> None:
    data = batch(*GOLDEN, replace(trace(0, 2, [[9.0], [9.5]]), mode="x"))
    rows = rows_of(data)
    AEM().modulate(data, rows)
    assert rows[0].columns["advantage"][0] == pytest.approx(1.4597, abs=5e-5)


def test_scope_says_whose_answers_are_compared() -> None:
    data = batch(trace(0, 0, [[0.0], [1.0]]), trace(0, 2, [[2.0], [2.0]]), trace(1, 0, [[4.0]]))
    e = math.exp
    expected = {
        "trace": [*brute([0, 1], 1, 0.1), 1, 1, 1],
        "group": [*brute([0, 1, 2, 2], 1, 0.1), 1],
        "batch": brute([0, 1, 2, 2, 4], 1, 0.1),
    }
    assert expected["trace"][:2] == pytest.approx([2 / (1 + e(-1)), 2 * e(-1) / (1 + e(-1))])
    for scope, alpha in expected.items():
        rows = rows_of(data)
        AEM(scope=scope).modulate(data, rows)
        assert [v[0] for v in advantages(rows).values()] == pytest.approx(alpha, rel=1e-6)


def test_a_negative_lambda_reverses_the_direction() -> None:
    assert one([0.2, 0.5, 1.0], lam=-1.0)[2] > 1 > one([0.2, 0.5, 1.0], lam=-1.0)[0]


def test_a_very_large_lambda_stays_finite() -> None:
    for lam in (1e4, -1e4):
        assert sorted(one([0.2, 0.5, 1.0], lam=lam).tolist()) == pytest.approx([0.0, 0.0, 3.0])


def test_an_entropy_that_the_sampler_did_not_record_is_an_error_that_says_what_to_do() -> None:
    data = batch(trace(0, 0, [[0.2], [NAN, 0.3]]), trace(0, 1, [[1.0]]))
    with pytest.raises(UserError, match="1 of 3 answers: set score of aem to true"):
        AEM().modulate(data, rows_of(data))
    assert AEM(score=True).needs == {"entropy"}


def test_statistics_are_kept_in_double_precision() -> None:
    small = 2.0**-24  # 1 + small is 1 in single precision
    responses = Responses(rows_of(batch(trace(0, 0, [[1.0, small, small]]))))
    assert responses.entropy("aem")[0] == (1.0 + 2 * small) / 3


def test_a_batch_without_rows_says_nothing() -> None:
    assert AEM().modulate(batch(), []) == {}


def test_the_next_response_is_that_of_the_next_turn_whatever_the_order_of_rows() -> None:
    rows = rows_of(batch(trace(0, 0, [[1.0], turn([], 1), [2.0, 3.0]]), trace(0, 1, [[4.0]])), "window(0)")
    assert Responses(rows).following().tolist() == [1, -1, -1]
    assert Responses(rows[::-1]).following().tolist() == [-1, -1, 1]


@pytest.mark.parametrize(
    "settings", [{"lam": float("nan")}, {"gate": -0.1}, {"gate": float("inf")}, {"scope": "rows"}, {"sharp": 1}]
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        make("aem", settings)


def test_every_setting_has_its_line() -> None:
    names = list(inspect.signature(AEM).parameters)
    assert [line.split(":")[0].strip() for line in (AEM.__doc__ or "").splitlines() if "(paper" in line] == names


def test_coefficients_refuses_arrays_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="one entry per response"):
        coefficients([0.1, 0.2], [0])


RUN: dict[str, Any] = {
    "env": "babyai/GoToRedBallNoDists", "model": "tiny-300k", "steps": 2, "tasks_per_step": 3, "rollouts_per_task": 4,
    "learning_rate": 1e-3, "max_turn_tokens": 4, "evaluation": {"tasks": 0}, "updates_per_batch": 2,
}  # fmt: skip


@pytest.mark.slow
def test_a_run_with_lambda_zero_is_the_hosts_run_to_the_bit_and_with_one_it_is_not(tmp_path: Path) -> None:
    def bits(name: str, method: list[str], **settings: Any) -> bytes:
        args = {"aem": settings} if settings else {}
        train({**RUN, "method": method, "method_args": args, "out": str(tmp_path / name)})
        return b"".join(path.read_bytes() for path in sorted((tmp_path / name / "policy").glob("*.safetensors")))

    host = bits("host", ["grpo"])
    assert bits("zero", ["grpo", "aem"], lam=0.0) == host
    assert bits("one", ["grpo", "aem"]) != host
