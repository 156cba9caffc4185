"""What every baseline rests on: the rows of the composition table, PPO's pitfalls, the plumbing of many turns, and
what no baseline may change. Names carry the number of the list they hold.

Held elsewhere with numbers of their own, and here only where a run's path adds something:

    GAE's golden numbers over two turns (gamma, lambda)        tests/test_advantages.py
    aggregation and KL golden numbers, micro-batches           tests/test_losses.py
    ratio 1: one gradient for all gates; PPO against CISPO     tests/test_losses.py, tests/learner/test_learner_gradients.py
    17.1 what the sampler saw is what the row holds            tests/test_rollout.py
    17.2 spliced pieces are the template's own text            tests/test_renderers.py
    17.3 templates that cannot be spliced are refused          tests/test_renderers.py
    17.7 cut episodes are counted, dropped or bootstrapped     tests/test_train_edges.py, learner/test_learner_gradients.py
    17.10 policy version and sampler log-probs per turn        tests/test_rollout.py
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from assay import tiny
from assay.advantages import dr_grpo, gae, grpo, rloo, whiten
from assay.config import Slots
from assay.facts import without_cut
from assay.losses import policy_loss, stream_weights
from assay.methods.host import CRITICS, Host
from assay.methods.presets import PRESETS
from assay.model import load_tokenizer
from assay.renderers import ChatRenderer
from assay.rows import Batch, Layout, Row, Stream, build_rows, sampler_column
from assay.trace import Group, Outcome, Provenance, TaskKey, Trace, Turn

LAYOUTS = ("append", "window(0)", "window(2)")


def turn(answer: list[int], reward: float = 0.0, anchor: str = "x", closing: tuple[int, ...] = (), **more: Any) -> Turn:
    context, seen = np.array([1, 2], np.int32), np.full(2, Provenance.ENVIRONMENT, np.uint8)
    ids, n = np.array(answer, np.int32), len(answer)
    logprobs = -0.1 * np.arange(1, n + 1, dtype=np.float32)
    sampled = more.get("provenance", np.full(n, Provenance.SAMPLED, np.uint8))
    return Turn(context, seen, ids, sampled, logprobs, -logprobs, np.array(closing, np.int32), "o", "a", reward, True,
                anchor, "s", False, more.get("version", 0))  # fmt: skip


def trace(slot: int, rollout: int, *turns: Turn, outcome: Outcome | None = None) -> Trace:
    reward = sum(t.reward for t in turns)
    ended = outcome or (Outcome.SUCCESS if reward > 0 else Outcome.FAILURE)
    return Trace(
        TaskKey("e", "1", "train", slot, "h"), 1, 0, slot, rollout, np.array([9, 8], np.int32),
        np.full(2, Provenance.TEMPLATE, np.uint8), turns, "", reward, ended, 1.0,
    )  # fmt: skip


def batch(*traces: Trace) -> Batch:
    keys = sorted({t.group_key for t in traces})
    return Batch([Group(traces[0].task, tuple(t for t in traces if t.group_key == key)) for key in keys])


def host(preset: str, **slots: object) -> Host:
    return Host(Slots(**{**PRESETS[preset].slots, **slots}), episode_tokens=100)  # type: ignore[arg-type]


def credited(preset: str, data: Batch, layout: str = "append", **slots: object) -> list[Row]:
    rows = build_rows(data.traces, Layout.parse(layout))
    for row in rows:
        row.columns["value"] = np.full(len(row.at), 0.25, np.float32)
        row.columns["final_value"] = np.full(1, 0.5, np.float32)
    host(preset, **slots).advantage(data, rows)
    return rows


def by_trace(rows: list[Row], column: str = "advantage") -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.trace.key, []).extend(row.columns[column].tolist())
    return found


# --------------------------------------------------------------------------------------------------- 1: PPO with GAE


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("gamma", "lam", "raw"),
    [(1.0, 1.0, [0.8, 0.7, 0.6, 0.5]), (1.0, 0.95, [0.713938, 0.64625, 0.575, 0.5])],
)
def test_s01_the_golden_numbers_come_out_of_rows(layout: str, gamma: float, lam: float, raw: list[float]) -> None:
    """V = .2 .3 | .4 .5 around an observation that has no value at all; targets are taken before whitening."""
    data = batch(trace(0, 0, turn([5, 6]), turn([7, 8], 1.0)))
    rows, values = build_rows(data.traces, Layout.parse(layout)), iter([0.2, 0.3, 0.4, 0.5])
    for row in rows:
        row.columns["value"] = np.array([next(values) for _ in row.at], np.float32)
    host("ppo", gamma=gamma, lam=lam).advantage(data, rows)
    (target,), (found,) = by_trace(rows, "return").values(), by_trace(rows).values()
    np.testing.assert_allclose(np.subtract(target, [0.2, 0.3, 0.4, 0.5]), raw, atol=1e-6)
    np.testing.assert_allclose(found, whiten([raw])[0], atol=1e-5)


@pytest.mark.parametrize("preset", ["ppo", "ppo-turn"])
def test_s01_advantages_can_be_centred_without_being_scaled(preset: str) -> None:
    data = batch(trace(0, 0, turn([5, 6]), turn([7], 1.0)), trace(1, 0, turn([5]), turn([7, 8])))
    usual, centred = (by_trace(credited(preset, data, advantage_norm=norm)) for norm in ("std", "mean"))
    a, b = (np.concatenate([*found.values()]) for found in (usual, centred))
    assert abs(b.mean()) < 1e-6 and abs(b.std(ddof=1) - 1) > 0.1
    np.testing.assert_allclose(b / b.std(ddof=1), a, atol=1e-5)


def test_s01_a_discount_is_per_turn_so_that_long_answers_are_not_punished() -> None:
    short, long = trace(0, 0, turn([5]), turn([6], 1.0)), trace(0, 1, turn([5] * 9), turn([6] * 9, 1.0))
    found = by_trace(credited("ppo", batch(short, long), gamma=0.9), "return")
    assert found[short.key][0] == pytest.approx(found[long.key][0]) == pytest.approx(0.9)
    token = gae(np.eye(1, 18, 17)[0], np.zeros(18), gamma=0.9)[1][0]
    assert token == pytest.approx(0.9**17), "what a discount per token would have made of it"


def test_s01_the_first_loss_on_policy_is_zero_and_its_gradient_is_not() -> None:
    data = batch(trace(0, 0, turn([5, 6]), turn([7], 1.0)), trace(1, 0, turn([5]), turn([7, 8])))
    rows = credited("ppo", data)
    advantage = torch.tensor(np.concatenate([r.columns["advantage"] for r in rows]), dtype=torch.float64)
    logprob = torch.full_like(advantage, -1.0, requires_grad=True)
    loss, _ = policy_loss("ppo", logprob, logprob.detach(), advantage)
    loss.mean().backward()
    assert logprob.grad is not None
    assert abs(float(loss.mean().detach())) < 1e-7 and float(logprob.grad.abs().max()) > 0.1


def test_s01_defaults_of_the_preset() -> None:
    slots = Slots(**PRESETS["ppo"].slots)
    assert (slots.clip_low, slots.clip_high, slots.dual_clip, slots.gamma, slots.lam) == (0.2, 0.2, 3.0, 1.0, 1.0)
    policy, value = host("ppo").streams([], [], 0.0)
    assert policy.constants == {"low": 0.2, "high": 0.2, "dual": 3.0} and policy.denominator == "token"
    assert (value.loss, value.denominator, value.constants) == ("value", "token", {"clip": 0.5})


# ------------------------------------------------------------------------------- 17: token-level plumbing, many turns


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(load_tokenizer(str(tiny.folder_of("tiny-300k"))), "You act.")


def test_s17_01_ids_that_do_not_survive_decoding_stand_in_the_row_as_they_were_sampled(renderer: ChatRenderer) -> None:
    tokenizer = renderer.tokenizer
    pairs = ((a, b) for a in range(40, 200) for b in range(40, 200))
    drifting = next(
        p
        for p in pairs
        if tuple(tokenizer.encode(renderer.decode(np.array(p, np.int32)), add_special_tokens=False)) != p
    )
    first = turn(list(drifting))
    for layout in LAYOUTS:
        rows = build_rows([trace(0, 0, first, turn([7]))], Layout.parse(layout))
        assert rows[0].targets[:2].tolist() == list(drifting)
        if layout != "window(0)":  # and as context of the next turn
            assert rows[-1].ids[4:6].tolist() == list(drifting)


def test_s17_02_observation_ids_are_the_suffix_of_the_template_with_that_message(renderer: ChatRenderer) -> None:
    system = {"role": "system", "content": "You act.\ngo"}
    said, seen = {"role": "assistant", "content": "left"}, {"role": "user", "content": "wall"}
    apply = renderer.tokenizer.apply_chat_template
    start = [system, {"role": "user", "content": "door"}, said]
    short = apply(start, tokenize=False)
    whole = apply([*start, seen], add_generation_prompt=True, tokenize=False)
    assert whole.startswith(short)
    answer = renderer.answer("left")
    spliced = np.concatenate([renderer.closing(answer), renderer.observation("wall", first=False)[0]])
    assert renderer.decode(spliced).replace(" ", "").endswith(whole[len(short) :].replace(" ", ""))


def test_s17_03_rows_per_turn_need_no_prefix_and_carry_the_numbers_of_one_row() -> None:
    """A window forgets, so its rows do not extend each other; credit is the same as in one row per episode."""
    data = [trace(0, 0, turn([5, 6]), turn([7]), turn([5], 1.0)), trace(0, 1, turn([5]))]
    rows = build_rows(data[:1], Layout.parse("window(0)"))
    assert [len(row.ids) for row in rows] == [2 + 2 + 2, 2 + 2 + 1, 2 + 2 + 1]
    for preset in TABLE:
        append, window = (by_trace(credited(preset, batch(*data), layout)) for layout in ("append", "window(0)"))
        for key, values in append.items():
            assert values == pytest.approx(window[key], abs=1e-6), preset


def test_s17_04_lengths_agree_and_each_prompt_starts_with_the_last_one_and_its_answer() -> None:
    made = trace(0, 0, turn([5, 6], closing=(3,)), turn([7], closing=(3,)), turn([8, 9]))
    rows = build_rows([made], Layout.parse("window(9)"))
    for before, after in pairwise(rows):
        assert after.ids[: len(before.ids)].tolist() == before.ids.tolist()
    for row in rows:
        assert len(row.ids) == len(row.provenance)
        assert len(row.at) == len(row.turns) == len(sampler_column(row, "logprobs"))
    (whole,) = build_rows([made], Layout())
    assert whole.ids.tolist() == rows[-1].ids.tolist()


@pytest.mark.parametrize(("denominator", "fair"), [("token", True), ("episode", True), ("sequence", False)])
def test_s17_05_a_normaliser_per_turn_row_overweights_short_turns(denominator: str, fair: bool) -> None:
    rows = build_rows([trace(0, 0, turn([5]), turn([6] * 4))], Layout.parse("window(2)"))
    first, second = stream_weights(Stream("policy", rows, "policy", denominator))
    assert (first[0] == pytest.approx(second[0])) == fair
    assert fair or first[0] == pytest.approx(4 * second[0])


def test_s17_06_the_end_token_that_was_sampled_is_trained_and_the_template_after_it_is_not() -> None:
    end, newline, appended = 1, 4, np.array([Provenance.SAMPLED, Provenance.FORCED], np.uint8)
    (row,) = build_rows([trace(0, 0, turn([5, end], closing=(newline,)), turn([6, end]))], Layout())
    assert row.targets.tolist() == [5, end, 6, end] and newline in row.ids
    (row,) = build_rows([trace(0, 0, turn([5, end], provenance=appended), turn([6, end]))], Layout())
    assert row.targets.tolist() == [5, 6, end], "an end token that code appended is no target"


def test_s17_07_a_cut_episode_is_a_failure_is_dropped_or_bootstraps_by_choice() -> None:
    cut, won = trace(0, 0, turn([5]), turn([6]), outcome=Outcome.CUT), trace(0, 1, turn([5]), turn([6], 1.0))
    data = batch(cut, won)
    assert by_trace(credited("dr-grpo", data)) == {cut.key: [-0.5, -0.5], won.key: [0.5, 0.5]}
    assert by_trace(credited("dr-grpo", without_cut(data))) == {won.key: [0.0, 0.0]}
    assert by_trace(credited("ppo", data), "return")[cut.key] == pytest.approx([0.5, 0.5])


def test_s17_08_every_turn_is_credited_by_itself_and_a_step_without_peers_keeps_its_episode_s() -> None:
    """Not the last step's number broadcast backwards, which is 0 where that step is alone."""
    won = trace(0, 0, turn([5], anchor="a"), turn([6], 1.0, anchor="only here"))
    lost = trace(0, 1, turn([5], anchor="a"))
    found = by_trace(credited("gigpo", batch(won, lost), step_norm="none"))
    assert found[won.key] == pytest.approx([0.5 + 0.95 / 2, 0.5])


def test_s17_09_which_biases_an_estimator_has_is_said_by_its_slots() -> None:
    hard = [trace(0, i, turn([5], float(i == 0))) for i in range(8)]
    even = [trace(1, i, turn([5], float(i < 4))) for i in range(8)]
    with_std, without = (by_trace(credited(p, batch(*hard, *even))) for p in ("grpo", "dr-grpo"))
    assert with_std[hard[0].key] == pytest.approx([2.474867], abs=1e-5), "difficulty: a rare success counts most"
    assert without[hard[0].key] == [0.875] and without[even[0].key] == [0.5]
    assert (PRESETS["grpo"].slots["denominator"], PRESETS["dr-grpo"].slots["denominator"]) == ("episode", "constant")


def test_s17_10_each_turn_keeps_the_version_and_log_probs_of_the_weights_that_sampled_it() -> None:
    made = trace(0, 0, turn([5, 6], version=3), turn([7], version=4))
    assert [t.policy_version for t in made.turns] == [3, 4]
    for layout in LAYOUTS:
        rows = build_rows([made], Layout.parse(layout))
        kept = np.concatenate([sampler_column(row, "logprobs") for row in rows])
        assert kept == pytest.approx([-0.1, -0.2, -0.1])


# ------------------------------------------------------------------------------------------- 18: the composition table

TABLE: dict[str, tuple[Any, ...]] = {  # advantage, gate, low, high, dual, denominator, keep; None: the gate has none
    "ppo": ("gae", "ppo", 0.2, 0.2, 3.0, "token", "all"),
    "ppo-turn": ("turn-gae", "ppo", 0.2, 0.2, 3.0, "token", "all"),
    "grpo": ("grpo", "ppo", 0.2, 0.2, None, "episode", "all"),
    "dr-grpo": ("dr-grpo", "ppo", 0.2, 0.2, None, "constant", "all"),
    "rloo": ("rloo", "ppo", 0.2, 0.2, None, "token", "all"),
    "reinforce++": ("reinforce++", "ppo", 0.2, 0.2, None, "token", "all"),
    "reinforce++-baseline": ("reinforce++-baseline", "ppo", 0.2, 0.2, None, "token", "all"),
    "dapo": ("grpo", "ppo", 0.2, 0.28, 10.0, "token", "mixed"),
    "gspo": ("grpo", "gspo", 3e-4, 4e-4, None, "episode", "all"),
    "cispo": ("grpo", "cispo", None, 5.0, None, "token", "all"),
    "sapo": ("grpo", "sapo", None, None, None, "episode", "all"),
    "gigpo": ("gigpo", "ppo", 0.2, 0.2, None, "token", "all"),
    "hgpo": ("hgpo", "ppo", 0.2, 0.2, None, "token", "all"),
}


@pytest.mark.parametrize("preset", TABLE)
def test_s18_presets_are_the_rows_of_the_composition_table(preset: str) -> None:
    slots = Slots(**PRESETS[preset].slots)
    advantage, gate, low, high, dual, denominator, keep = TABLE[preset]
    assert (slots.advantage, slots.gate, slots.denominator, slots.keep) == (advantage, gate, denominator, keep)
    assert low is None or slots.clip_low == low
    assert high is None or slots.clip_high == high
    assert slots.dual_clip == dual
    assert slots.kl == "none", "no preset needs a reference model unless asked"
    assert (slots.invalid_penalty, slots.gamma) == (0.0, 0.95 if advantage in ("gigpo", "hgpo", "turn-gae") else 1.0)


# --------------------------------------------------------------------------------------- 19: what holds for all of them

RELATIVE = [p for p in TABLE if Slots(**PRESETS[p].slots).advantage not in (*CRITICS, "reinforce++")]


def four(shift: float = 0.0, scale: float = 1.0) -> list[Trace]:
    """One group; every step begins at x, lengths differ."""
    rewards = [1.0, 0.0, 0.25, 1.0]
    return [
        trace(0, i, *[turn([5, 6])] * i, turn([7], r * scale + shift), outcome=Outcome.SUCCESS)
        for i, r in enumerate(rewards)
    ]


@pytest.mark.parametrize("preset", RELATIVE)
def test_s19_a_constant_on_all_rewards_of_a_group_changes_no_advantage(preset: str) -> None:
    """With gamma 1: a discounted constant is another reward."""
    usual, shifted = (by_trace(credited(preset, batch(*four(shift)), gamma=1.0)) for shift in (0.0, 3.0))
    for key, values in usual.items():
        assert values == pytest.approx(shifted[key], abs=1e-5)


@pytest.mark.parametrize("preset", TABLE)
def test_s19_what_has_a_std_does_not_see_the_scale_of_rewards(preset: str) -> None:
    advantage = Slots(**PRESETS[preset].slots).advantage
    if advantage in CRITICS:
        return  # a critic's values have a scale of their own
    factor = 5.0 if advantage in ("dr-grpo", "rloo") else 1.0
    usual, scaled = (by_trace(credited(preset, batch(*four(scale=scale)))) for scale in (1.0, 5.0))
    for key, values in usual.items():
        assert scaled[key] == pytest.approx([factor * v for v in values], abs=2e-5)


@pytest.mark.parametrize("preset", TABLE)
def test_s19_the_order_of_rows_changes_nothing(preset: str) -> None:
    data = batch(*four(), trace(1, 0, turn([5], 1.0)), trace(1, 1, turn([5])))
    rows = build_rows(data.traces, Layout.parse("window(1)"))
    for row in rows:
        row.columns["value"] = np.full(len(row.at), 0.25, np.float32)
    host(preset).advantage(data, rows)
    before = [row.columns["advantage"].tolist() for row in rows]
    host(preset).advantage(data, rows[::-1])
    assert [row.columns["advantage"].tolist() for row in rows] == before


@pytest.mark.parametrize("preset", RELATIVE)
@pytest.mark.parametrize("members", [1, 3])
def test_s19_groups_of_equal_rewards_and_groups_of_one_give_exactly_zero(preset: str, members: int) -> None:
    """Also in float64, where .1 three times has a mean beside .1. Equal in length too: a discount tells lengths apart."""
    rows = credited(preset, batch(*[trace(0, i, turn([5, 6]), turn([7], 0.1), outcome=Outcome.SUCCESS)
                                    for i in range(members)]), gamma=1.0)  # fmt: skip
    assert not any(row.columns["advantage"].any() for row in rows)


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_s19_advantages_of_a_group_sum_to_zero_whatever_the_lengths(estimator: Callable[..., Any]) -> None:
    preset = {grpo: "grpo", dr_grpo: "dr-grpo", rloo: "rloo"}[estimator]
    found = by_trace(credited(preset, batch(*four()), "window(1)"))
    assert sum(values[0] for values in found.values()) == pytest.approx(0.0, abs=1e-6)
    np.testing.assert_allclose([v[0] for v in found.values()], estimator([1.0, 0.0, 0.25, 1.0]), atol=1e-6)


def test_s19_rloo_is_dr_grpo_times_g_over_g_minus_1() -> None:
    ours, theirs = (by_trace(credited(preset, batch(*four()))) for preset in ("rloo", "dr-grpo"))
    for key, values in ours.items():
        assert values == pytest.approx([4 / 3 * v for v in theirs[key]])


@pytest.mark.parametrize("preset", TABLE)
def test_s19_what_was_not_sampled_changes_no_advantage(preset: str) -> None:
    """Other observations and template tokens, one more of them, and other log-probs of a forced end."""
    before = by_trace(credited(preset, batch(*four())))
    moved = []
    for made in four():
        turns = [
            Turn(np.array([11, 12, 13], np.int32), np.full(3, Provenance.TEMPLATE, np.uint8),
                 np.append(t.ids, np.int32(1)), np.append(t.provenance, np.uint8(Provenance.FORCED)),
                 np.append(t.logprobs, np.float32(-9)), np.append(t.entropies, np.float32(9)), t.closing_ids,
                 "other words", t.action, t.reward, t.valid, t.anchor, t.skill, t.noop, t.policy_version)
            for t in made.turns
        ]  # fmt: skip
        moved.append(trace(0, made.rollout, *turns, outcome=Outcome.SUCCESS))
    assert by_trace(credited(preset, batch(*moved))) == before
