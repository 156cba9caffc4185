"""Credit per turn in a run: step groups, GAE over turns and the penalty on invalid actions, from traces to rows."""

from dataclasses import replace

import numpy as np
import pytest

from assay.advantages import first_tokens, gae, turn_gae, whiten
from assay.cli.plan import slots_in_words
from assay.config import Slots
from assay.losses import stream_weights
from assay.methods.host import Host, total
from assay.methods.presets import PRESETS
from assay.rows import Batch, Layout, Row, build_rows
from assay.trace import Group, Outcome, Provenance, TaskKey, Trace, Turn

LAYOUTS = ("append", "window(0)", "window(2)")


def turn(anchor: str, reward: float = 0.0, tokens: int = 1, valid: bool = True) -> Turn:
    context, template = np.array([1, 2], np.int32), np.full(2, Provenance.TEMPLATE, np.uint8)
    ids, sampled = np.arange(tokens, dtype=np.int32) + 5, np.full(tokens, Provenance.SAMPLED, np.uint8)
    known = np.full(tokens, -0.5, np.float32)
    return Turn(context, template, ids, sampled, known, -known, np.zeros(0, np.int32), "o", "a", reward, valid,
                anchor, "s", False, 0)  # fmt: skip


def trace(slot: int, rollout: int, *turns: Turn, mode: str = "", outcome: Outcome | None = None) -> Trace:
    reward = sum(t.reward for t in turns)
    ended = outcome or (Outcome.SUCCESS if reward > 0 else Outcome.FAILURE)
    return Trace(
        TaskKey("e", "1", "train", slot, "h"), 1, 0, slot, rollout, np.array([9], np.int32),
        np.array([Provenance.TEMPLATE], np.uint8), turns, "", reward, ended, 1.0, mode,
    )  # fmt: skip


def batch(*traces: Trace) -> Batch:
    keys = sorted({t.group_key for t in traces})
    return Batch([Group(traces[0].task, tuple(t for t in traces if t.group_key == key)) for key in keys])


def host(preset: str, **slots: object) -> Host:
    return Host(Slots(**{**PRESETS[preset].slots, **slots}), episode_tokens=100)  # type: ignore[arg-type]


def credited(preset: str, data: Batch, layout: str = "append", **slots: object) -> tuple[list[Row], dict[str, float]]:
    made, rows = host(preset, **slots), build_rows(data.traces, Layout.parse(layout))
    for row in rows:
        row.columns["value"] = np.linspace(0.1, 0.4, len(row.at)).astype(np.float32)
    made.reward(data, rows)
    return rows, made.advantage(data, rows)


def per_trace(rows: list[Row], column: str = "advantage") -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.trace.key, []).extend(row.columns[column].tolist())
    return found


# the golden data of the reference: A sees s0, s1, s2 and succeeds, B sees s0, s3 and fails; uneven answers
A = trace(0, 0, turn("s0", tokens=2), turn("s1"), turn("s2", 1.0, tokens=3))
B = trace(0, 1, turn("s0"), turn("s3", tokens=2))


# ------------------------------------------------------------------------------------------------------ step groups


@pytest.mark.parametrize("layout", LAYOUTS)
def test_s09_the_golden_numbers_stand_on_all_tokens_of_their_turn(layout: str) -> None:
    rows, _ = credited("gigpo", batch(A, B), layout, step_norm="none")
    found = per_trace(rows)
    assert found[A.key] == pytest.approx([0.95125] * 2 + [0.5] * 4)
    assert found[B.key] == pytest.approx([-0.95125, -0.5, -0.5])
    rows, _ = credited("hgpo", batch(A, B), layout, step_norm="none")
    found = per_trace(rows)
    assert found[A.key] == pytest.approx([0.45125] * 2 + [0.0] * 4, abs=1e-6)
    assert found[B.key] == pytest.approx([-0.45125, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("preset", ["gigpo", "hgpo"])
def test_both_layouts_have_the_same_bits(preset: str) -> None:
    data = [A, B, trace(0, 2, turn("s0"), turn("s1", 0.5)), trace(1, 0, turn("s0", 1.0)), trace(1, 1, turn("s0"))]
    expected = per_trace(credited(preset, batch(*data))[0])
    for layout in LAYOUTS[1:]:
        assert per_trace(credited(preset, batch(*data), layout)[0]) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("norm", "preset"), [("std", "grpo"), ("none", "dr-grpo")])
def test_s09_weight_zero_is_grpo_bit_for_bit(layout: str, norm: str, preset: str) -> None:
    data = [A, B, trace(0, 2, turn("s0"), turn("s1", 0.5))]
    ours = per_trace(credited("gigpo", batch(*data), layout, step_weight=0.0, step_norm=norm)[0])
    assert ours == per_trace(credited(preset, batch(*data), layout)[0])


def test_s09_steps_are_compared_inside_their_task_group_only() -> None:
    """s0 also begins another task, where everything succeeds: it neither moves nor is moved."""
    others = [trace(1, i, turn("s0", 1.0)) for i in range(3)]
    rows, metrics = credited("gigpo", batch(A, B, *others), step_norm="none")
    found = per_trace(rows)
    assert found[A.key][0] == pytest.approx(0.95125)
    assert all(found[t.key] == [0.0] for t in others)
    assert metrics["dead_groups"] == 0.5


def test_s09_prompt_modes_are_compared_apart() -> None:
    modes = [A, B, trace(0, 2, turn("s0", 1.0), mode="x"), trace(0, 3, turn("s0"), mode="x")]
    found = per_trace(credited("gigpo", batch(*modes), step_norm="none")[0])
    assert found[A.key][0] == pytest.approx(0.95125)
    assert found[modes[2].key] == pytest.approx([1.0])  # .5 of its episode, .5 of its step


def test_s09_environment_errors_are_in_no_statistic() -> None:
    broken = replace(trace(0, 2, turn("s0"), outcome=Outcome.ENVIRONMENT_ERROR), reward=float("nan"))
    rows, metrics = credited("gigpo", batch(A, B, broken), step_norm="none")
    assert per_trace(rows)[A.key][0] == pytest.approx(0.95125)
    assert metrics["anchor_size"] == pytest.approx(5 / 4)


def test_s09_rows_that_are_repeated_do_not_enter_the_statistics() -> None:
    """The reference repeats random rows to fill its devices, before it takes means."""
    data = batch(A, B)
    rows = build_rows(data.traces, Layout.parse("window(0)"))
    host("gigpo", step_norm="none").advantage(data, [*rows, *rows[:2]])
    assert per_trace(rows)[A.key] == pytest.approx([0.95125] * 2 + [0.5] * 4)


def test_s09_a_turn_that_sampled_nothing_is_a_step_all_the_same() -> None:
    """A's first turn was written by code: its return still is what B's first turn is compared with."""
    forced = replace(A.turns[0], provenance=np.full(2, Provenance.FORCED, np.uint8))
    data = batch(replace(A, turns=(forced, *A.turns[1:])), B)
    for layout in LAYOUTS:
        found = per_trace(credited("gigpo", data, layout, step_norm="none")[0])
        assert found[A.key] == pytest.approx([0.5] * 4)
        assert found[B.key] == pytest.approx([-0.95125, -0.5, -0.5])


def test_s09_anchor_metrics_count_the_steps_of_the_batch() -> None:
    looping = trace(1, 0, turn("x"), turn("x"), turn("y"))
    _, metrics = credited("hgpo", batch(A, B, looping))
    # anchor groups: s0 (A, B), s1, s2, s3; x (twice in one trace), y
    expected = {"anchor_groups": 2 / 6, "anchor_singletons": 4 / 8, "anchor_size": 8 / 6, "anchor_within": 1 / 2}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_shaped_scores_enter_returns_and_episodes() -> None:
    """Reward hooks take .2 from the second turn and .3 from the episode; k1 in the reward takes .1 from a token of the
    second turn. The peer begins every turn alike and gets nothing."""
    data = batch(A, trace(0, 1, turn("s0"), turn("s1"), turn("s2")))
    data.turn_scores[A.key][1] -= 0.2
    data.scores[A.key] -= 0.3
    data.token_scores[A.key] = np.array([0, 0, -0.1, 0, 0, 0], np.float32)
    rows = build_rows(data.traces, Layout())
    host("gigpo", step_norm="none", gamma=0.5).advantage(data, rows)
    last = 1 - 0.3
    middle = -0.2 - 0.1 + 0.5 * last
    first = 0.5 * middle
    assert total(data, A) == pytest.approx(0.4)
    expected = [0.2 + value / 2 for value in (first, first, middle, last, last, last)]
    assert per_trace(rows)[A.key] == pytest.approx(expected, abs=1e-6)


def test_s10_history_and_alpha_are_slots() -> None:
    """Level 1 says 1/3 of A's second step, level 2 says 1/2."""
    made = [trace(0, i, turn("s0" if i < 2 else "s4", tokens=2), turn("s1", float(i != 1))) for i in range(3)]
    for slots, value in (
        ({"history": 0}, 1 / 3),
        ({"history": 1}, (2 / 3 + 3 / 2) / 5),
        ({"history": 1, "step_alpha": 0.0}, (1 / 3 + 1 / 2) / 2),
    ):
        found = per_trace(credited("hgpo", batch(*made), step_norm="none", **slots)[0])
        assert found[made[0].key][2] == pytest.approx(value, abs=1e-6), slots


def test_presets_discount_by_turn_and_weigh_tokens_alike() -> None:
    for name in ("gigpo", "hgpo"):
        slots = Slots(**PRESETS[name].slots)
        assert (slots.gamma, slots.step_weight, slots.step_norm, slots.history, slots.step_alpha) == (
            0.95, 1.0, "std", 2, 1.0,
        )  # fmt: skip
        assert (slots.denominator, slots.gate, slots.clip_low, slots.clip_high, slots.kl) == (
            "token", "ppo", 0.2, 0.2, "none",
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ invalid actions


def test_s09_invalid_turns_cost_their_episode_and_the_returns_of_the_turns_before() -> None:
    clumsy = trace(0, 0, turn("s0"), turn("s1", valid=False), turn("s2", 1.0))
    data = batch(clumsy, B)
    made = host("gigpo", step_norm="none", invalid_penalty=0.1)
    rows = build_rows(data.traces, Layout())
    made.reward(data, rows)
    assert data.turn_scores[clumsy.key] == pytest.approx([0.0, -0.1, 1.0])
    assert total(data, clumsy) == pytest.approx(0.9)
    assert clumsy.reward == 1.0 and clumsy.turns[1].reward == 0.0, "the facts stay"
    made.advantage(data, rows)
    first = 0.95 * (-0.1 + 0.95 * 1.0)
    assert per_trace(rows)[clumsy.key] == pytest.approx([0.45 + first / 2, 0.45, 0.45])


def test_the_plan_names_the_penalty() -> None:
    words = slots_in_words(Slots(advantage="gigpo", invalid_penalty=0.1))["advantage"]
    assert words.endswith(", 0.1 off for every invalid action")
    assert "invalid" not in slots_in_words(Slots())["advantage"]


def test_the_penalty_reaches_every_estimator_and_zero_touches_nothing() -> None:
    clumsy = trace(0, 0, turn("s0", valid=False), turn("s1", 1.0))
    for preset in PRESETS:
        data = batch(clumsy, B)
        before = {key: list(scores) for key, scores in data.turn_scores.items()}
        host(preset).reward(data, [])
        assert data.turn_scores == before
        host(preset, invalid_penalty=0.25).reward(data, [])
        assert total(data, clumsy) == 0.75 and total(data, B) == 0.0
    found = per_trace(credited("dr-grpo", batch(clumsy, B), invalid_penalty=0.25)[0])
    assert found[clumsy.key] == [0.375, 0.375]


# ---------------------------------------------------------------------------------------------------- GAE over turns


def test_turn_gae_golden_numbers() -> None:
    """Two turns of two tokens: V .2 and .4 at their first tokens, reward 1 at the end; gamma .9, lambda .5.
    delta_1 = 1 - .4 = .6; delta_0 = .9 x .4 - .2 = .16; A_0 = .16 + .9 x .5 x .6 = .43."""
    advantages, targets = turn_gae([0, 0, 0, 1], [0.2, 7, 0.4, 8], [0, 0, 1, 1], 0.9, 0.5)
    np.testing.assert_allclose(advantages, [0.43, 0.43, 0.6, 0.6])
    np.testing.assert_allclose(targets, [0.63, 0.63, 1.0, 1.0])
    cut, _ = turn_gae([0, 0, 0, 1], [0.2, 7, 0.4, 8], [0, 0, 1, 1], 0.9, 0.5, bootstrap=2.0)
    np.testing.assert_allclose(cut[2:], [0.6 + 0.9 * 2.0] * 2)


@pytest.mark.parametrize("seed", range(20))
def test_turn_gae_is_the_discounted_sum_over_turns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, 6)  # turns without a token are no actions
    turns = np.repeat(np.arange(6), lengths)
    if not len(turns):
        return
    rewards, values = rng.normal(size=len(turns)), rng.normal(size=len(turns))
    gamma, lam, bootstrap = rng.uniform(0.5, 1), rng.uniform(0, 1), float(rng.normal())
    own = [t for t in range(6) if lengths[t]]
    first = {t: int(np.flatnonzero(turns == t)[0]) for t in own}
    r = [rewards[turns == t].sum() for t in own]
    v = [values[first[t]] for t in own] + [bootstrap]
    advantages, targets = turn_gae(rewards, values, turns, gamma, lam, bootstrap)
    for k, t in enumerate(own):
        expected = sum((gamma * lam) ** (m - k) * (r[m] + gamma * v[m + 1] - v[m]) for m in range(k, len(own)))
        np.testing.assert_allclose(advantages[turns == t], expected, atol=1e-12)
        np.testing.assert_allclose(targets[turns == t], expected + v[k], atol=1e-12)


def test_one_token_a_turn_is_gae_and_values_inside_a_turn_do_not_matter() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=5), rng.normal(size=5)
    np.testing.assert_allclose(
        turn_gae(rewards, values, np.arange(5), 0.9, 0.8), gae(rewards, values, 0.9, 0.8), atol=1e-12
    )
    turns = np.array([0, 0, 1, 1, 1])
    moved = values + np.array([0, 5, 0, -3, 9])
    np.testing.assert_array_equal(turn_gae(rewards, values, turns), turn_gae(rewards, moved, turns))
    assert first_tokens(turns).tolist() == [True, False, True, False, False]
    assert first_tokens([]).shape == (0,)
    with pytest.raises(ValueError, match="one entry per token"):
        turn_gae(rewards, values, turns[:3])


def values_of(rows: list[Row]) -> None:
    """The same number for the same token in every layout."""
    for row in rows:
        spots = np.concatenate([np.arange((row.turns == t).sum()) for t in np.unique(row.turns)])
        row.columns["value"] = (0.3 * row.turns + 0.05 * spots + 0.1 * row.trace.rollout).astype(np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ppo_turn_whitens_over_tokens_and_trains_the_value_of_first_tokens_only(layout: str) -> None:
    made, data = host("ppo-turn", lam=0.5), batch(A, B)
    assert made.needs == {"value"}
    rows = build_rows(data.traces, Layout.parse(layout))
    values_of(rows)
    made.advantage(data, rows)
    # A: V 0, .3, .6 and reward 1 at the end; B: V .1, .4 and nothing
    a2, a1, a0 = 0.4, 0.95 * 0.6 - 0.3, 0.95 * 0.3
    raw_a = [a0 + 0.475 * (a1 + 0.475 * a2), a1 + 0.475 * a2, a2]
    raw_b = [0.95 * 0.4 - 0.1 + 0.475 * -0.4, -0.4]
    by_token = whiten([np.repeat(raw_a, [2, 1, 3]), np.repeat(raw_b, [1, 2])])
    found = per_trace(rows)
    np.testing.assert_allclose(found[A.key], by_token[0], atol=1e-6)
    np.testing.assert_allclose(found[B.key], by_token[1], atol=1e-6)
    targets = per_trace(rows, "return")
    np.testing.assert_allclose(targets[A.key], np.repeat(np.add(raw_a, [0, 0.3, 0.6]), [2, 1, 3]), atol=1e-6)

    policy, value = made.streams(rows, [], 0.0)
    assert (policy.denominator, value.denominator, value.loss) == ("token", "turn", "value")
    weights: dict[str, list[float]] = {}
    for row, weight in zip(value.rows, stream_weights(value), strict=True):
        weights.setdefault(row.trace.key, []).extend(weight.tolist())
    fifth = 1 / 5  # five turns in the batch, each of which counts once, by its first token
    assert weights[A.key] == pytest.approx([fifth, 0, fifth, fifth, 0, 0])
    assert weights[B.key] == pytest.approx([fifth, fifth, 0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ppo_turn_bootstraps_a_cut_episode_from_its_final_context(layout: str) -> None:
    cut = trace(0, 1, turn("s0"), turn("s3", tokens=2), outcome=Outcome.CUT)
    rows = build_rows([A, cut], Layout.parse(layout))
    values_of(rows)
    rows[-1].columns["final_value"] = np.array([2.0], np.float32)
    host("ppo-turn").advantage(batch(A, cut), rows)
    assert per_trace(rows, "return")[cut.key] == pytest.approx([0.95**2 * 2.0, 0.95 * 2.0, 0.95 * 2.0])
    assert per_trace(rows, "return")[A.key] == pytest.approx([0.9025] * 2 + [0.95] + [1.0] * 3)
