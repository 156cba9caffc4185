"""Random rewards: coins that know nothing, and what they do to a policy on and off its own data (property 8)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mixture_parts import gather, play, setting

from assay.advantages import grpo
from assay.config import Slots
from assay.methods.host import Host, token_rewards, total, turn_rewards
from assay.methods.random_reward import RandomReward
from assay.methods.registry import make
from assay.rows import Batch
from assay.rundir import RunDir
from assay.trace import Outcome, Trace
from assay.train import train


def traces(step: int = 1, slots: int = 4, rollouts: int = 8, reward: float = 0.3, turns: int = 1) -> list[Trace]:
    made = [play("e", slot, rollout, [[0.5, 0.5]] * turns) for slot in range(slots) for rollout in range(rollouts)]
    return [
        replace(t, step=step, reward=turns * reward, turns=tuple(replace(own, reward=reward) for own in t.turns))
        for t in made
    ]


def rewarded(made: list[Trace], seed: int = 0, p: float = 0.5) -> tuple[Batch, dict[str, float]]:
    method = RandomReward(p)
    method.bind(replace(setting("e"), seed=seed))
    batch = gather(made)
    return batch, method.reward(batch, [])


def coins(made: list[Trace], **more: float) -> list[float]:
    batch, _ = rewarded(made, **more)
    return [batch.scores[t.key] for t in made]


def test_p08_rewards_are_coins_of_their_own_redrawn_every_rollout() -> None:
    every = np.array([coins(traces(step)) for step in range(300)])  # [300, 32]
    assert set(every.ravel()) == {0.0, 1.0}
    sure = 4 * 0.5 / np.sqrt(every.size)
    assert abs(every.mean() - 0.5) < sure
    agree = (every[1:] == every[:-1]).mean()  # the same place, one step later
    assert abs(agree - 0.5) < sure
    within = np.corrcoef(every.T)[np.triu_indices(32, 1)]
    assert np.abs(within).max() < 5 / np.sqrt(300), "two responses share their coin"
    assert coins(traces(1)) == coins(traces(1)) != coins(traces(1), seed=1)
    assert abs(np.mean([coins(traces(step), p=0.1) for step in range(100)]) - 0.1) < 4 * 0.3 / np.sqrt(3200)


def test_p08_a_coin_depends_on_the_place_alone_not_on_prompt_or_answer() -> None:
    made = traces()
    others = [
        replace(
            t,
            task=replace(t.task, id=t.task.id + 7, hash="other", environment="f"),
            prompt_ids=t.prompt_ids + 1,
            turns=tuple(replace(turn, ids=turn.ids + 3, action="else", observation="else") for turn in t.turns),
            reward=1.0,
            outcome=Outcome.SUCCESS,
        )
        for t in made
    ]
    assert coins(others) == coins(made) and coins(made[::-1]) == coins(made)[::-1]


def test_p08_the_mean_policy_gradient_is_zero_on_policy_and_not_so_for_a_reward_that_knows_the_answer() -> None:
    """A categorical policy of five answers, one prompt, groups of 8: the gradient of its logits, sum of A (1[y] - pi)."""
    pi = np.array([0.05, 0.4, 0.3, 0.2, 0.05])
    draws = np.random.default_rng(1)
    steps = 400
    found = {"coin": np.zeros((steps, 5)), "true": np.zeros((steps, 5))}
    for step in range(steps):
        made = traces(step)
        answers = draws.choice(5, len(made), p=pi)
        batch, _ = rewarded(made)
        for kind in found:
            if kind == "true":
                batch.scores = {t.key: float(y == 1) for t, y in zip(made, answers, strict=True)}
            groups = [[total(batch, t) for t in made if t.slot == slot] for slot in range(4)]
            advantage = np.concatenate([grpo(group) for group in groups])
            score = np.eye(5)[answers] - pi
            found[kind][step] = np.mean(advantage[:, None] * score, axis=0)
    z = {kind: g.mean(0) / (g.std(0, ddof=1) / np.sqrt(steps)) for kind, g in found.items()}
    assert np.abs(z["coin"]).max() < 3.5
    assert found["coin"].std() > 0.01, "single steps do move the policy"
    assert z["true"][1] > 20


@pytest.mark.parametrize("updates", [1, 8])
def test_p08_the_clip_acts_where_a_batch_is_updated_on_several_times(updates: int, tmp_path: Path) -> None:
    train(
        {
            "env": "quote",
            "method": ["grpo", "random-reward"],
            "model": "tiny-300k",
            "steps": 2,
            "tasks_per_step": 8,
            "rollouts_per_task": 4,
            "updates_per_batch": updates,
            "learning_rate": 2e-3,
            "warmup_steps": 0,
            "max_turn_tokens": 8,
            "evaluation": {"tasks": 0},
            "runtime": {"workers": 0},
            "out": str(tmp_path / "run"),
        }
    )
    metrics = RunDir(tmp_path / "run").read_metrics()
    clipped = [m["clip_low_per_trained_token"] + m["clip_high_per_trained_token"] for m in metrics]
    assert min(clipped) > 0.01 if updates == 8 else max(clipped) == 0.0
    assert all(m["success"] == 0.0 and 0.2 < m["random_reward"] < 0.8 for m in metrics), "figures stay the truth"


def test_the_environment_s_reward_leaves_every_estimator_and_the_facts_stay() -> None:
    made = traces(turns=3)
    batch, metrics = rewarded(made)
    for trace in made:
        coin = batch.scores[trace.key]
        assert total(batch, trace) == coin
        at = np.array([0, 0, 1, 1, 2, 2])
        np.testing.assert_allclose(token_rewards(batch, trace, at), [0, 0, 0, 0, 0, coin], atol=1e-12)
        np.testing.assert_allclose(turn_rewards(batch, trace, at), [0, 0, coin], atol=1e-12)
        assert trace.reward == 3 * 0.3 and [t.reward for t in trace.turns] == [0.3] * 3
    assert metrics["random_reward"] == np.mean(list(batch.scores.values()))


def test_penalties_of_the_host_are_replaced_too() -> None:
    made = [replace(t, turns=tuple(replace(turn, valid=False) for turn in t.turns)) for t in traces(reward=0.0)]
    batch = gather(made)
    Host(Slots(invalid_penalty=0.25), 100).reward(batch, [])
    assert total(batch, made[0]) == -0.25
    RandomReward().reward(batch, [])
    assert {total(batch, t) for t in made} == {0.0, 1.0}


def test_it_counts_how_often_the_coin_is_right() -> None:
    made = [replace(t, outcome=Outcome.SUCCESS if t.rollout < 2 else Outcome.FAILURE) for t in traces(step=3)]
    batch, metrics = rewarded(made)
    right = sum(batch.scores[t.key] == (t.rollout < 2) for t in made)
    assert right != sum(batch.scores.values()), "the two figures are told apart"
    assert metrics["random_reward_agrees"] == right / 32 and 0 < right < 32
    assert rewarded([])[1] == {}


def test_settings_that_cannot_or_do_not_work_are_said() -> None:
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(Exception, match="must be a probability"):
            make("random-reward", {"p": p})
    assert RandomReward().bind(setting("e", updates=8)) == []
    assert "expected gradient is 0" in RandomReward().bind(setting("e", updates=1))[0]
    assert "nothing to learn from" in RandomReward(p=1).bind(setting("e", updates=8))[0]
