"""What goes wrong in implementations of the group baselines, one trap each, and their golden numbers inside the host.

Names carry the section of the list they hold: 00 aggregation and KL, 02 GRPO, 03 Dr.GRPO, 04 RLOO, 05 REINFORCE++,
06 DAPO, 07 GSPO, 08 CISPO, 12 StarPO-S, 14 correction, 15 one-liners, 18 composition. Held elsewhere, with numbers of
their own:

    00  aggregation and KL golden numbers, micro-batches, rows that leave the denominator      tests/test_losses.py
    00  idle rows stay in the denominator and cost no forward                 tests/learner/test_learner_gradients.py
    02  golden numbers, ties, the floor under the std, NaN, groups of one               tests/test_advantages.py
    02  episodes, not rows, in group statistics; modes apart                            tests/methods/test_host.py
    05  returns carried over observations; whitening over tokens                        tests/test_advantages.py
    06  refills until the budget is spent, surplus counted                              tests/test_rollout.py
    06  the penalty on length                                                           tests/methods/test_slots.py
    07  the gradient of the sequence objective; one ratio over several rows     tests/test_losses.py, tests/learner
    08  the cap is the weight itself; a capped token keeps its gradient                 tests/test_losses.py
    12, 13.1, 14  StarPO-S's filter, Clip-Cov, KL-Cov, DPPO, TIS, IcePop                tests/methods/test_slots.py
    18, 19  the older presets; what no baseline may change                    tests/methods/test_baselines_core.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from assay.advantages import dr_grpo, opo, reinforce_pp, rloo, whiten
from assay.build import build, build_learner
from assay.cli.plan import slots_in_words
from assay.config import Slots, resolve
from assay.losses import GATES, kl, policy_loss, weights
from assay.methods.host import Host, mixed
from assay.methods.presets import PRESETS
from assay.rows import Batch, Layout, Row, build_rows
from assay.trace import Group, Outcome, Provenance, TaskKey, Trace, Turn
from assay.train import Display, Trainer


def turn(tokens: int, reward: float = 0.0) -> Turn:
    context, seen = np.array([1, 2], np.int32), np.full(2, Provenance.ENVIRONMENT, np.uint8)
    ids, sampled = np.arange(tokens, dtype=np.int32) + 5, np.full(tokens, Provenance.SAMPLED, np.uint8)
    known = np.full(tokens, -0.5, np.float32)
    return Turn(context, seen, ids, sampled, known, -known, np.zeros(0, np.int32), "o", "a", reward, True, "x", "s",
                False, 0)  # fmt: skip


def trace(slot: int, rollout: int, turns: list[int], reward: float) -> Trace:
    rewards = [0.0] * (len(turns) - 1) + [reward]
    return Trace(
        TaskKey("e", "1", "train", slot, "h"), 1, 0, slot, rollout, np.array([9], np.int32),
        np.array([Provenance.TEMPLATE], np.uint8), tuple(turn(n, r) for n, r in zip(turns, rewards, strict=True)), "",
        reward, Outcome.SUCCESS if reward > 0 else Outcome.FAILURE, 1.0,
    )  # fmt: skip


def batch(*traces: Trace) -> Batch:
    keys = sorted({t.group_key for t in traces})
    return Batch([Group(traces[0].task, tuple(t for t in traces if t.group_key == key)) for key in keys])


def host(preset: str, **slots: Any) -> Host:
    return Host(Slots(**{**PRESETS[preset].slots, **slots}), episode_tokens=100)


def credited(preset: str, data: Batch, layout: str = "append", **slots: Any) -> tuple[list[Row], dict[str, float]]:
    rows = build_rows(data.traces, Layout.parse(layout))
    made = host(preset, **slots)
    return rows, made.advantage(data, rows)


def tensor(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def gradient(loss: torch.Tensor, of: torch.Tensor) -> list[float]:
    return torch.autograd.grad(loss.sum(), of)[0].tolist()


# --------------------------------------------------------------------------------------------- 00 aggregation and KL


def test_s00_the_mean_over_tokens_is_not_the_mean_of_micro_batches_means() -> None:
    """Losses 1 1 1 1 | 4: the mean over all is 1.6; averaging the means of two micro-batches gives 2.5."""
    loss, row = np.array([1.0, 1, 1, 1, 4]), [0, 0, 0, 0, 1]
    parts = np.split(weights("token", row) * loss, [4])
    assert sum(part.sum() for part in parts) == pytest.approx(1.6)
    assert np.mean([1.0, 4.0]) == 2.5


def test_s00_dead_groups_stay_in_the_mean_over_tokens_and_shrink_the_step() -> None:
    """The step of one live group beside a dead one is half of its own; dynamic sampling takes the dead one out, and
    gpg scales the live one up instead."""
    live = [trace(0, i, [3], float(i % 2)) for i in range(2)]
    dead = [trace(1, i, [3], 1.0) for i in range(2)]
    rows, metrics = credited("dr-grpo", batch(*live, *dead))
    w = weights("token", np.repeat(np.arange(4), 3))
    pull = w * np.abs(np.concatenate([row.columns["advantage"] for row in rows]))
    alone = weights("token", np.repeat(np.arange(2), 3)) * 0.5
    assert pull.sum() == pytest.approx(alone.sum() / 2) and metrics == {"dead_groups": 0.5}
    assert [mixed(group) for group in batch(*live, *dead).groups] == [True, False]
    scaled, _ = credited("gpg", batch(*live, *dead))
    pull = w * np.abs(np.concatenate([row.columns["advantage"] for row in scaled]))
    assert pull.sum() == pytest.approx(alone.sum())


def test_s00_kl_in_the_reward_is_k1_whatever_the_loss_s_kind() -> None:
    """k2 and k3 there would make a drift below the reference look as dear as one above."""
    data = batch(trace(0, 0, [2], 1.0))
    (row,) = build_rows(data.traces, Layout())
    row.columns |= {"old_logprob": np.array([-1, -2], np.float32), "ref_logprob": np.array([-1.5, -1], np.float32)}
    host("grpo", kl="reward", kl_coefficient=0.1, kl_kind="k3").reward(data, [row])
    assert data.token_scores[data.traces[0].key] == pytest.approx([-0.05, 0.1])


def test_s00_k1_as_a_loss_pulls_nowhere_on_average() -> None:
    """Its slope is 1 on every token, whatever the reference: weighed by the policy, the sum of d log pi is 0."""
    logits = tensor(0.3, -0.4, 1.1, grad=True)
    logprob = torch.log_softmax(logits, -1)
    loss = (logprob.exp().detach() * kl(logprob, tensor(-9, -1, -1), "k1")).sum()
    np.testing.assert_allclose(gradient(loss, logits), 0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------- 02 GRPO


def test_s02_grpo_golden_in_rows_of_both_layouts() -> None:
    for layout in ("append", "window(1)"):
        rows, _ = credited("grpo", batch(*[trace(0, i, [2, 1], float(i == 0)) for i in range(8)]), layout)
        for row in rows:
            expected = 2.474867 if row.trace.rollout == 0 else -0.353552
            assert row.columns["advantage"] == pytest.approx([expected] * len(row.at), abs=2e-6)


def test_s02_a_group_of_equals_gives_no_loss_and_only_the_kl_moves_the_weights() -> None:
    rows, metrics = credited("grpo", batch(*[trace(0, i, [2], 0.1) for i in range(3)]))
    assert metrics["dead_groups"] == 1.0
    advantage = torch.from_numpy(np.concatenate([row.columns["advantage"] for row in rows])).double()
    logprob = tensor(*[-1.0] * 6, grad=True)
    loss, _ = policy_loss("ppo", logprob, logprob.detach() - 0.1, advantage)
    assert not loss.detach().any()
    whole = loss + 0.04 * kl(logprob, logprob.detach() - 0.5, "k2")
    np.testing.assert_allclose(gradient(whole, logprob), [0.04 * 0.5] * 6)


def test_s02_a_mean_over_episodes_makes_each_token_of_a_long_failure_cheap_and_a_mean_over_tokens_does_not() -> None:
    """The length bias, as the weights of a token in an episode of 1 and in one of 9."""
    row = np.repeat([0, 1], [1, 9])
    by_episode = weights("episode", row, traces=["a", "b"])
    by_token, constant = weights("token", row), weights("constant", row, traces=["a", "b"], constant=10)
    assert by_episode[0] / by_episode[-1] == pytest.approx(9)
    assert by_token[0] == by_token[-1] and constant[0] == constant[-1]


# ---------------------------------------------------------------------------------------- 03 Dr.GRPO, 04 RLOO


def test_s03_dr_grpo_divides_by_the_token_budget_and_the_episodes_of_the_step() -> None:
    rows, _ = credited("dr-grpo", batch(*[trace(0, i, [i + 1], float(i in (0, 3))) for i in range(4)]))
    assert [row.columns["advantage"][0] for row in rows] == pytest.approx([0.5, -0.5, -0.5, 0.5])
    (stream,) = host("dr-grpo").streams(rows, [], 0.0)
    assert stream.constants["length"] == 100.0, "the episode's token budget, not the longest row of the batch"
    (given,) = host("dr-grpo", constant_tokens=7).streams(rows, [], 0.0)
    assert given.constants["length"] == 7.0


def test_s04_the_original_one_action_form_is_a_product_of_ratios_over_the_answer() -> None:
    logprob = tensor(-1, -1, -1, grad=True)
    old = logprob.detach() - torch.log(tensor(1.1, 1.05, 0.9))
    loss, _ = policy_loss("sequence", logprob, old, tensor(2, 2, 2), torch.tensor([0, 0, 1]))
    np.testing.assert_allclose(loss.detach(), [-2 * 1.1 * 1.05] * 2 + [-1.8])
    long, metrics = policy_loss("sequence", tensor(*[-1.0] * 50), tensor(*[-3.0] * 50), tensor(*[-1.0] * 50),
                                torch.zeros(50, dtype=torch.int64))  # fmt: skip
    assert torch.isfinite(long).all() and float(metrics["ratio"][0]) == pytest.approx(math.exp(20)), (
        "100 nats: held at 20"
    )


@pytest.mark.parametrize("estimator", [dr_grpo, rloo])
def test_s04_a_group_of_one_gives_zero_and_not_its_raw_reward(estimator: Any) -> None:
    assert estimator([1.0]).tolist() == [0.0]
    rows, _ = credited("rloo", batch(trace(0, 0, [2], 1.0)))
    assert rows[0].columns["advantage"].tolist() == [0.0, 0.0]


# ----------------------------------------------------------------------------------------------- 05 REINFORCE++


def test_s05_the_first_turn_of_a_success_is_credited_in_rows_of_both_layouts() -> None:
    """A return that is reset at the observation would give it -.5401."""
    for layout in ("append", "window(0)"):
        data = batch(trace(0, 0, [2, 2], 1.0), trace(0, 1, [2, 2], 0.0))
        rows, _ = credited("reinforce++", data, layout)
        found = np.concatenate([row.columns["advantage"] for row in rows])
        assert found == pytest.approx([0.9354] * 4 + [-0.9354] * 4, abs=5e-5)


def test_s05_whitening_counts_tokens_so_that_one_long_success_sets_the_mean() -> None:
    """Means over episodes would give +-; here the long success is near 0 and the short failure far below."""
    long, short = reinforce_pp([[0] * 9 + [1], [0]])
    assert long[0] == pytest.approx(-short[0] / 10) and 0 < long[0] < 0.4


def test_s05_kl_of_the_baseline_form_is_a_loss_with_the_gradient_of_the_kl() -> None:
    assert PRESETS["reinforce++-baseline"].slots["kl_kind"] == "k2"


def test_s05_no_group_std_before_the_global_whitening() -> None:
    """Two groups, rewards 1 0 and .1 0: with a group std both would give the same advantages."""
    data = batch(*[trace(s, r, [1], x) for s, r, x in ((0, 0, 1.0), (0, 1, 0.0), (1, 0, 0.1), (1, 1, 0.0))])
    rows, _ = credited("reinforce++-baseline", data)
    (expected,) = whiten([[0.5, -0.5, 0.05, -0.05]])
    assert np.concatenate([row.columns["advantage"] for row in rows]) == pytest.approx(expected, abs=1e-6)


# ------------------------------------------------------------------------------------------------------- 06 DAPO


def test_s06_clip_higher_and_dual_clip_reach_the_stream() -> None:
    (stream,) = host("dapo").streams([], [], 0.0)
    assert stream.constants == {"low": 0.2, "high": 0.28, "dual": 10.0} and stream.denominator == "token"


def test_s06_the_filter_judges_outcomes_and_not_rewards() -> None:
    """Two successes of unlike reward have a spread and nothing to learn; a shaped reward would keep them."""
    group = batch(trace(0, 0, [1], 1.0), trace(0, 1, [9], 0.4)).groups[0]
    assert not mixed(group)


class Quiet(Display):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


RUN: dict[str, Any] = {
    "env": "babyai/GoToRedBallNoDists",
    "model": "tiny-300k",
    "steps": 1,
    "tasks_per_step": 3,
    "rollouts_per_task": 3,
    "max_turn_tokens": 4,
    "evaluation": {"tasks": 0},
    "runtime": {"guard": False},
}


def one_step(**more: Any) -> tuple[dict[str, float], Batch, Quiet]:
    config = resolve({**RUN, **more}, "test")
    with closing(build(config)) as bench:
        display = Quiet()
        trainer = Trainer(bench, build_learner(config, bench.network, None), display)
        metrics, _, data = trainer.step()
    return metrics, data, display


@pytest.fixture(scope="module")
def spent() -> Iterator[tuple[dict[str, float], Batch, Quiet]]:
    """Groups of one: none is mixed, so two rounds are spent for nothing."""
    yield one_step(slots={"keep": "mixed"}, rollouts_per_task=1, rounds=2)


def test_s06_a_spent_generation_budget_is_said_and_what_was_generated_is_counted(spent: Any) -> None:
    metrics, data, _ = spent
    assert (metrics["rounds"], metrics["kept_groups"], metrics["dropped_groups"]) == (2, 0, 6)
    assert metrics["surplus_groups"] == 0 and metrics["episodes"] == metrics["total_episodes"] == 6
    assert metrics["generated_tokens"] == sum(t.sampled_tokens for g in data.dropped for t in g.traces) > 0
    assert metrics["tokens_trained"] == 0 and metrics["updates"] == 1, "the step counts, and does not wait for ever"


@pytest.mark.slow
def test_s06_when_the_budget_ends_the_step_trains_on_what_was_kept() -> None:
    """An untrained policy at a seed that gives some mixed groups, and never three of three."""
    metrics, data, _ = one_step(slots={"keep": "mixed"}, rounds=2, rollouts_per_task=4, seed=3)
    kept = int(metrics["kept_groups"])
    assert metrics["rounds"] == 2 and 0 < kept < 3
    assert kept + metrics["dropped_groups"] == metrics["episodes"] / 4
    assert metrics["tokens_trained"] == sum(t.sampled_tokens for t in data.traces)
    assert all(mixed(group) for group in data.groups)


@pytest.mark.slow
def test_s12_a_step_of_equal_groups_trains_on_nothing_and_says_so() -> None:
    metrics, data, _ = one_step(method=["starpo-s"], rollouts_per_task=1)
    assert (metrics["kept_groups"], metrics["dropped_groups"], metrics["tokens_trained"]) == (0, 3, 0)
    assert data.groups == [] and metrics["episodes"] == 3


# --------------------------------------------------------------------------------------------- 07 GSPO, 08 CISPO


def test_s07_gspo_s_bounds_are_a_thousand_times_smaller_than_ppo_s_or_nothing_is_clipped() -> None:
    """Nine tokens at ratio 1.01 have a geometric mean of 1.01: beyond 4e-4, and far from .2."""
    logprob, sequence = tensor(*[-1.0] * 9, grad=True), torch.zeros(9, dtype=torch.int64)
    old, ones = logprob.detach() - math.log(1.01), tensor(*[1.0] * 9)
    for high, slope in ((4e-4, 0.0), (0.2, -1.01)):
        loss, _ = policy_loss("gspo", logprob, old, ones, sequence, low=3e-4, high=high)
        np.testing.assert_allclose(gradient(loss, logprob), [slope] * 9)
    (stream,) = host("gspo").streams([], [], 0.0)
    assert stream.constants == {"low": 3e-4, "high": 4e-4} and stream.denominator == "episode"


def test_s08_cispo_has_no_lower_bound_and_weighs_rare_tokens_by_their_ratio() -> None:
    logprob = tensor(-1, -1, grad=True)
    loss, metrics = policy_loss("cispo", logprob, logprob.detach() - torch.log(tensor(0.01, 7.0)), tensor(1, -1))
    np.testing.assert_allclose(gradient(loss, logprob), [-0.01, 5.0])
    assert metrics["clip_low"].tolist() == [0, 0]
    (stream,) = host("cispo").streams([], [], 0.0)
    assert stream.constants == {"cispo_weight_cap": 5.0}


@pytest.mark.parametrize("gate", [g for g in GATES if g != "sequence"])
def test_s08_no_effect_trap_at_one_update_no_gate_differs_from_reinforce(gate: str) -> None:
    """All ratios are 1: a comparison of gates with one update per batch compares nothing."""
    logprob = tensor(-0.2, -3, -1, -0.5, grad=True)
    extra = {"chosen": tensor(1, 0, 1, 0)} if gate == "kl-cov" else {}
    extra |= {"sampler_logprob": logprob.detach()} if gate == "dppo" else {}
    advantage = tensor(1, -2, 0.5, 0)
    loss, _ = policy_loss(gate, logprob, logprob.detach(), advantage, torch.tensor([0, 1, 2, 3]), **extra)
    np.testing.assert_allclose(gradient(loss, logprob), (-advantage).tolist(), atol=1e-12)


# ------------------------------------------------------------------------------------------------- 14 correction


def test_s14_sampler_and_learner_here_are_one_policy_so_that_a_correction_weighs_one() -> None:
    """In one process, to rounding: what remains is what TIS would correct elsewhere."""
    metrics, _, display = one_step(method=["dppo"], slots={"correction": "tis"})
    assert metrics["mismatch"] < 1e-5
    for name in ("tis_mean", "tis_max", "tis_ess"):
        assert metrics[name] == pytest.approx(1.0, abs=1e-4)
    assert metrics["tis_dropped"] == 0 and metrics["clip_high_per_trained_token"] == 0
    assert any("--updates-per-batch" in note for note in display.notes), "dppo with one update per batch"


# ----------------------------------------------------------------------------------------------- 15 one-liners


def test_s15_opo_golden_numbers_and_its_sum_weighted_by_length_is_zero() -> None:
    """Rewards 1 0 0, lengths 1 1 2: the baseline is a quarter."""
    assert opo([1, 0, 0], [1, 1, 2]).tolist() == [0.75, -0.25, -0.25]
    assert opo([1, np.nan, 0], [1, 9, 3]).tolist()[::2] == [0.75, -0.25]
    assert opo([0.1] * 3, [1, 2, 3]).tolist() == [0.0] * 3 and opo([1.0], [4]).tolist() == [0.0]
    assert opo([1, 0], [0, 0]).tolist() == [0.5, -0.5], "nothing was sampled: the plain mean"
    rng = np.random.default_rng(0)
    for _ in range(20):
        r, l = rng.normal(size=5), rng.integers(1, 9, 5)
        np.testing.assert_allclose(opo(r, l), r - (l * r).sum() / l.sum())
        assert abs((l * opo(r, l)).sum()) < 1e-9
    with pytest.raises(ValueError, match="one entry per episode"):
        opo([1, 0], [1])


def test_s15_opo_counts_the_policy_s_tokens_once_in_either_layout() -> None:
    for layout in ("append", "window(2)"):
        rows, _ = credited("opo", batch(trace(0, 0, [1], 1.0), trace(0, 1, [2, 1], 0.0)), layout)
        assert {round(float(row.columns["advantage"][0]), 6) for row in rows} == {0.75, -0.25}


def test_s15_gpg_counts_episodes_of_live_groups_and_not_rewards_that_are_not_zero() -> None:
    """Rewards of +-1: verl's count of rewards other than 0 would scale nothing. Three groups, one of them live."""
    rewards = [[1, -1], [1, 1], [-1, -1]]
    rows, _ = credited("gpg", batch(*[trace(s, r, [1], x) for s, own in enumerate(rewards) for r, x in enumerate(own)]))
    assert [float(row.columns["advantage"][0]) for row in rows] == [3.0, -3.0, 0, 0, 0, 0]
    dead, _ = credited("gpg", batch(trace(0, 0, [1], 1.0), trace(0, 1, [1], 1.0)))
    assert not any(row.columns["advantage"].any() for row in dead)


# ------------------------------------------------------------------------------------------------ 18 composition


TABLE: dict[str, tuple[Any, ...]] = {  # advantage, denominator, keep, what the policy stream's gate is given
    "starpo-s": ("gae", "token", "top-std", {"low": 0.2, "high": 0.28}),
    "dppo": ("grpo", "token", "all", {"low": 0.2, "high": 0.2, "penalty": 0.0}),
    "clip-cov": ("grpo", "token", "all", {"low": 1.0, "high": 1.0}),
    "kl-cov": ("grpo", "token", "all", {"penalty": 1.0}),
    "opo": ("opo", "token", "all", {}),
    "gpg": ("gpg", "token", "all", {}),
}


@pytest.mark.parametrize("preset", TABLE)
def test_s18_presets_are_the_rows_of_the_composition_table(preset: str) -> None:
    slots = Slots(**PRESETS[preset].slots)
    advantage, denominator, keep, constants = TABLE[preset]
    assert (slots.advantage, slots.denominator, slots.keep) == (advantage, denominator, keep)
    stream = host(preset).streams([], [], 0.0)[0]
    assert (stream.constants, stream.denominator) == (constants, denominator)
    assert slots.kl == "none" and slots.gamma == slots.lam == 1.0 and slots.correction == "none"


@pytest.mark.parametrize("preset", PRESETS)
def test_s18_every_preset_can_be_said_in_words(preset: str) -> None:
    words = json.dumps(slots_in_words(Slots(**PRESETS[preset].slots)))
    assert "{" not in words.strip("{}") and "KL" in words


def test_s18_a_correction_goes_around_any_preset() -> None:
    for preset in PRESETS:
        made = host(preset, correction="icepop")
        assert "old_logprob" in made.needs
        assert Path(PRESETS[preset].paper).name, "and says where it is from"
