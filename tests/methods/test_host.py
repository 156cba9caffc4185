"""The host: one estimator per preset, statistics per group and prompt mode, each trace counted once."""

import numpy as np
import pytest

from assay.config import Slots
from assay.methods.host import Host, mixed, total
from assay.methods.presets import PRESETS
from assay.rows import Batch, Layout, build_rows
from assay.trace import Group, Outcome, Provenance, TaskKey, Trace, Turn


def turn(tokens: int, reward: float = 0.0) -> Turn:
    """A turn of two context tokens and `tokens` sampled ones."""
    context, template = np.array([1, 2], np.int32), np.full(2, Provenance.TEMPLATE, np.uint8)
    ids, sampled = np.arange(tokens, dtype=np.int32) + 5, np.full(tokens, Provenance.SAMPLED, np.uint8)
    known = np.full(tokens, -0.5, np.float32)
    return Turn(context, template, ids, sampled, known, -known, np.zeros(0, np.int32), "o", "a", reward, True, "x",
                "s", False, 0)  # fmt: skip


def trace(slot: int, rollout: int, turns: list[int], reward: float, mode: str = "", cut: bool = False) -> Trace:
    rewards = [0.0] * (len(turns) - 1) + [reward]
    outcome = Outcome.CUT if cut else Outcome.SUCCESS if reward > 0 else Outcome.FAILURE
    return Trace(
        TaskKey("e", "1", "train", slot, "h"), 1, 0, slot, rollout, np.array([9], np.int32),
        np.array([Provenance.TEMPLATE], np.uint8),
        tuple(turn(n, r) for n, r in zip(turns, rewards, strict=True)), "", reward, outcome, 1.0, mode,
    )  # fmt: skip


def batch(*traces: Trace) -> Batch:
    keys = sorted({t.group_key for t in traces})
    groups = [Group(traces[0].task, tuple(t for t in traces if t.group_key == key)) for key in keys]
    return Batch(groups)


def advantages(preset: str, data: Batch, layout: str = "append", **slots: object) -> dict[str, list[float]]:
    """Trace key -> advantages of all its sampled tokens."""
    host = Host(Slots(**{**PRESETS[preset].slots, **slots}), episode_tokens=100)  # type: ignore[arg-type]
    rows = build_rows(data.traces, Layout.parse(layout))
    for row in rows:
        row.columns["value"] = np.full(len(row.at), 0.25, np.float32)
        row.columns["old_logprob"] = np.full(len(row.at), -1.0, np.float32)
        row.columns["ref_logprob"] = np.full(len(row.at), -1.5, np.float32)
    host.reward(data, rows)
    host.advantage(data, rows)
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.trace.key, []).extend(row.columns["advantage"].tolist())
    return found


FOUR = [trace(0, i, [2, 1], r) for i, r in enumerate((1.0, 0.0, 0.0, 1.0))]


@pytest.mark.parametrize(("preset", "value"), [("grpo", 0.866024), ("dr-grpo", 0.5), ("rloo", 0.666667)])
def test_group_estimators_give_the_golden_numbers(preset: str, value: float) -> None:
    found = advantages(preset, batch(*FOUR))
    for one in FOUR:
        sign = 1.0 if one.reward else -1.0
        assert found[one.key] == pytest.approx([sign * value] * 3, abs=2e-6)


@pytest.mark.parametrize("preset", [p for p in PRESETS])
def test_layouts_agree_on_every_preset(preset: str) -> None:
    traces = [*FOUR, trace(1, 0, [1, 3, 2], 1.0), trace(1, 1, [4], 0.0)]
    append, window = advantages(preset, batch(*traces)), advantages(preset, batch(*traces), "window(1)")
    assert append.keys() == window.keys()
    for key, values in append.items():
        assert values == pytest.approx(window[key], abs=1e-6)


def test_long_episodes_do_not_weigh_more_in_group_statistics() -> None:
    data = batch(trace(0, 0, [1] * 9, 1.0), trace(0, 1, [1], 0.0))
    found = advantages("dr-grpo", data, "window(2)")
    assert set(np.concatenate(list(found.values())).round(6)) == {0.5, -0.5}


def test_modes_have_statistics_of_their_own() -> None:
    traces = [trace(0, 0, [1], 1.0), trace(0, 1, [1], 1.0), trace(0, 2, [1], 0.0, "x"), trace(0, 3, [1], 1.0, "x")]
    found = advantages("dr-grpo", batch(*traces))
    assert [found[t.key][0] for t in traces] == pytest.approx([0, 0, -0.5, 0.5])


def test_environment_errors_are_in_no_statistic() -> None:
    broken = trace(0, 2, [1], float("nan"))
    broken = Trace(
        **{**{f: getattr(broken, f) for f in broken.__dataclass_fields__}, "outcome": Outcome.ENVIRONMENT_ERROR}
    )
    found = advantages("dr-grpo", batch(trace(0, 0, [1], 1.0), trace(0, 1, [1], 0.0), broken))
    assert broken.key not in found
    assert sorted(v[0] for v in found.values()) == [-0.5, 0.5]


def test_reward_kl_is_k1_on_every_token() -> None:
    data = batch(*FOUR)
    advantages("reinforce++", data, kl="reward", kl_coefficient=0.1)
    for one in FOUR:  # k1 = -1 - (-1.5) = 0.5 on each of three tokens
        assert data.token_scores[one.key] == pytest.approx([-0.05] * 3)
        assert total(data, one) == pytest.approx(one.reward - 0.15)
        assert one.reward in (0.0, 1.0), "the fact stays"


def test_gae_ends_with_value_zero_and_a_cut_episode_bootstraps() -> None:
    ended, cut = trace(0, 0, [1, 1], 0.0), trace(0, 1, [1, 1], 0.0, cut=True)
    host = Host(Slots(advantage="gae"), 100)
    rows = build_rows([ended, cut], Layout())
    for row in rows:
        row.columns["value"] = np.array([0.2, 0.4], np.float32)
        row.columns["final_value"] = np.array([0.6], np.float32)
    host.advantage(batch(ended, cut), rows)
    assert rows[0].columns["return"] == pytest.approx([0.0, 0.0])
    assert rows[1].columns["return"] == pytest.approx([0.6, 0.6])


def test_mixed_keeps_groups_with_both_outcomes_only() -> None:
    wins, losses = [trace(0, i, [1], 1.0) for i in range(2)], [trace(0, i + 2, [1], 0.0) for i in range(2)]
    assert mixed(Group(wins[0].task, tuple(wins + losses)))
    assert not mixed(Group(wins[0].task, tuple(wins)))
    assert not mixed(Group(wins[0].task, tuple(losses)))


def test_presets_name_slots_that_exist() -> None:
    for name, preset in PRESETS.items():
        Slots(**preset.slots)
        assert preset.fidelity in ("paper", "reconstruction", "inferred"), name
