"""Six failures that cost their finders weeks, re-created with rollouts of our own: each is caught, the sound data passes.

A real policy plays real tasks once; the faults are then made the way that the frameworks made them.
"""

from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from audit_samples import codes, loud, only, rows_of

from assay.advantages import grpo
from assay.audit.checks import audit
from assay.audit.columns import Finding, Ragged, Rollouts
from assay.audit.readers.traces import from_rows, from_traces
from assay.build import build, build_learner
from assay.config import resolve
from assay.losses import token_logprobs
from assay.model import Network
from assay.rows import Batch, Layout, build_rows
from assay.trace import Group, Outcome, Provenance, Trace
from assay.train import Display, Trainer

SETTINGS: dict[str, Any] = {
    "env": "babyai/GoToRedBallNoDists",
    "model": "tiny-300k",
    "tasks_per_step": 8,
    "rollouts_per_task": 4,
    "max_turn_tokens": 6,
    "evaluation": {"tasks": 0},
    "out": "never written",
}


@dataclass
class Played:
    """One batch of real groups, and what scores it."""

    batch: Batch
    trainer: Trainer
    network: Network

    def rollouts(self, layout: str, traces: tuple[Trace, ...] | None = None, end: int | None = None) -> Rollouts:
        """Rows with old log-probs and GRPO's advantages, as a training step makes them, in the audit's columns."""
        batch = self.batch if traces is None else regrouped(traces)
        rows = build_rows(batch.traces, Layout.parse(layout))
        self.trainer.learner.score(rows, frozenset({"old_logprob"}), 1.0)
        for method in self.trainer.methods:
            assert method.advantage is not None
            method.advantage(batch, rows)
        said: dict[str, Any] = {"estimator": "grpo", "rollouts_per_task": 4, "layout": layout}
        return from_rows(rows, batch, **said, **({} if end is None else {"end_ids": [end]}))


def regrouped(traces: tuple[Trace, ...]) -> Batch:
    keys = dict.fromkeys(t.group_key for t in traces)
    members = {key: tuple(t for t in traces if t.group_key == key) for key in keys}
    return Batch([Group(own[0].task, own) for own in members.values()])


@pytest.fixture(scope="module")
def played() -> Any:
    with closing(build(resolve(SETTINGS, "test"))) as bench:
        trainer = Trainer(bench, build_learner(bench.config, bench.network, None), Display())
        batch = trainer.collect().batch
        rewards = [{t.reward for t in g.traces} for g in batch.groups]
        assert any(len(r) > 1 for r in rewards) and any(len(r) == 1 for r in rewards), "live and dead groups are needed"
        yield Played(batch, trainer, bench.network)


def caught(rollouts: Rollouts, code: str) -> Finding:
    found = [f for f in loud(audit(rollouts)) if f.code == code]
    assert len(found) == 1, [(f.code, f.sentence) for f in loud(audit(rollouts))]
    return found[0]


@pytest.mark.parametrize("layout", ["append", "window(0)", "window(2)"])
def test_a_real_batch_passes_in_every_layout(played: Played, layout: str) -> None:
    assert codes(audit(played.rollouts(layout))) == []
    assert codes(audit(from_traces(played.batch.traces, Layout.parse(layout)))) == []


def test_real_episodes_with_crashes_and_cuts_that_say_so_pass(played: Played) -> None:
    traces = list(played.batch.traces)
    traces[1] = replace(traces[1], outcome=Outcome.ENVIRONMENT_ERROR, reward=np.nan, error="simulator died")
    lost = next(i for i, t in enumerate(traces) if t.reward == 0 and i != 1)
    traces[lost] = replace(traces[lost], outcome=Outcome.CUT)
    assert codes(audit(played.rollouts("append", tuple(traces)))) == []
    assert codes(audit(from_traces(traces))) == []


def test_most_step_samples_were_given_advantage_zero(played: Played) -> None:
    """A per-step trainer wrote the episode's advantage to its last step only: (N - 1) of N step samples learnt nothing."""
    rollouts = played.rollouts("window(2)")
    assert codes(audit(rollouts)) == []
    turn, rollout = rollouts.samples["turn"], rollouts.samples["rollout"]
    last = {name: turn[rollout == name].max() for name in set(rollout)}
    early = np.array([turn[i] < last[rollout[i]] for i in range(len(rollouts))])
    advantages = rollouts.tokens["advantages"]
    live = np.array([np.nanmax(np.abs(advantages.row(i)), initial=0) > 0 for i in range(len(rollouts))])
    for i in np.flatnonzero(early):
        advantages.row(i)[~np.isnan(advantages.row(i))] = 0
    found = only(rollouts, "A311")
    assert found.count == (early & live).sum() > 0.8 * live.sum()
    assert found.rows[0] == rollouts.where[np.flatnonzero(early & live)[0]]
    assert found.severity == "error" and "only the last sample" in found.advice


def test_group_ids_from_the_request_turned_grpo_into_reinforce(played: Played) -> None:
    """Every rollout had an id of its own; the estimator gave a group of one its raw reward."""
    rollouts = played.rollouts("append")
    rollouts.samples["group"] = np.array([f"request-{i}" for i in range(len(rollouts))], object)
    advantages, mask = rollouts.tokens["advantages"], rollouts.tokens["mask"]
    raw = rollouts.samples["reward"][mask.row_of()]
    advantages.values[mask.values] = raw[mask.values]
    found = caught(rollouts, "A302")
    assert found.severity == "error" and found.count == 32 and "REINFORCE" in found.sentence
    assert "raw reward" in caught(rollouts, "A316").sentence


def test_group_ids_that_compared_different_tasks(played: Played) -> None:
    """Rollouts came back in the order of finishing, and groups were cut from that order."""
    rollouts = played.rollouts("append")
    order = np.random.default_rng(0).permutation(len(rollouts))
    rollouts.samples["group"] = np.array([f"g{k // 4}" for k in np.argsort(order)], object)
    for group in set(rollouts.samples["group"]):
        rows = rows_of(rollouts, "group", group)
        for row, value in zip(rows, grpo(rollouts.samples["score"][rows]), strict=True):
            values = rollouts.tokens["advantages"].row(row)
            values[~np.isnan(values)] = value
    found = only(rollouts, "A301")  # the numbers agree with the groups: only the tasks tell
    assert found.severity == "error" and "up to 4" in found.sentence
    sound = played.rollouts("append")
    a, b = rows_of(sound, "group", sound.samples["group"][0])[0], rows_of(sound, "group", sound.samples["group"][-1])[0]
    sound.samples["group"][[a, b]] = sound.samples["group"][[b, a]]  # two rollouts swapped are enough
    assert caught(sound, "A301").count == 2


def test_top_p_of_the_sampler_moved_the_mean_ratio(played: Played) -> None:
    """The engine logged the truncated distribution, the trainer knows the whole one."""
    rollouts = played.rollouts("append")
    assert codes(audit(rollouts)) == []
    kept = truncate(played, rollouts, top_p=0.95)
    assert 0.85 < kept < 0.99
    found = only(rollouts, "A205")
    ratio = np.exp(difference(rollouts)).mean()
    assert f"mean {ratio:.4f}" in found.sentence and abs(ratio - kept) < 0.02
    assert found.severity == "warning" and "top-p" in found.advice
    rollouts.declared["top_p"] = 0.95
    assert only(rollouts, "A205").severity == "error"


def test_sampling_from_the_whole_distribution_keeps_the_mean_ratio_at_one(played: Played) -> None:
    rollouts = played.rollouts("append")
    assert truncate(played, rollouts, top_p=1.0) == pytest.approx(1)
    assert codes(audit(rollouts)) == []


def truncate(played: Played, rollouts: Rollouts, top_p: float) -> float:
    """Draw every sampled token anew, in its real context, from the policy cut off at top-p; log what the sampler would.

    Returns the mean mass that was kept."""
    generator, masses = torch.Generator().manual_seed(0), []
    for row in range(len(rollouts)):
        ids, mask = rollouts.tokens["ids"].row(row), rollouts.tokens["mask"].row(row)
        at = np.flatnonzero(mask)
        with torch.no_grad():
            logits = played.network.model(torch.as_tensor(ids[None].astype(np.int64))).logits[0, at - 1].float()
        p = logits.softmax(-1)
        ordered, index = p.sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        mass = ordered.sum(-1)
        drawn = torch.multinomial(ordered, 1, generator=generator)
        chosen = index.gather(1, drawn)[:, 0]
        trainer = token_logprobs(logits, chosen)
        rollouts.tokens["trainer_logprobs"].row(row)[at] = trainer.numpy()
        rollouts.tokens["logprobs"].row(row)[at] = (trainer - mass.log()).numpy()
        masses += mass.tolist()
    return float(np.mean(masses))


def difference(rollouts: Rollouts) -> Any:
    mask = rollouts.tokens["mask"].values
    return (rollouts.tokens["trainer_logprobs"].values - rollouts.tokens["logprobs"].values)[mask]


def test_an_appended_end_token_entered_the_loss(played: Played) -> None:
    """The engine stops before the end token, code appends it, and the mask covers the whole answer."""
    traces = tuple(with_forced_end(t) for t in played.batch.traces)
    end = int(played.batch.traces[0].turns[0].ids[-1])
    rollouts = played.rollouts("append", traces, end)
    assert codes(audit(rollouts)) == []  # its provenance says that it was forced, and the mask leaves it out
    forced = rollouts.tokens["ids"].values == end
    forced &= np.append(False, rollouts.tokens["mask"].values[:-1]) & ~rollouts.tokens["mask"].values
    at = np.flatnonzero(forced)[7]
    for name in ("mask", "advantages", "trainer_logprobs"):  # one of them enters the loss
        rollouts.tokens[name].values[at] = rollouts.tokens[name].values[at - 1]
    found = only(rollouts, "A105")
    row = int(rollouts.tokens["ids"].row_of()[at])
    assert found.severity == "error" and found.count == 1 and found.rows[0].startswith(rollouts.where[row])
    rollouts.tokens["mask"].values[forced] = True  # all of them do
    assert caught(rollouts, "A105").count == forced.sum()


def with_forced_end(trace: Trace) -> Trace:
    """The same episode, as if code had appended the last token of each answer."""
    turns = []
    for turn in trace.turns:
        provenance, logprobs = turn.provenance.copy(), turn.logprobs.copy()
        if len(turn.ids) > 1:
            provenance[-1], logprobs[-1] = Provenance.FORCED, np.nan
        turns.append(replace(turn, provenance=provenance, logprobs=logprobs))
    return replace(trace, turns=tuple(turns))


def test_stripped_reasoning_turned_8_rollouts_into_64_samples(played: Played) -> None:
    """The template drops the reasoning of past answers, so no context begins with the one before."""
    traces = [t for t in played.batch.traces if len(t.turns) >= 8][:8]
    assert len(traces) == 8
    sound, stripped = conversation(traces, ()), conversation(traces, set(range(8)))
    assert len(stripped) == 64 == len(sound)
    assert codes(audit(sound)) == []
    found = only(stripped, "A503")
    assert found.count == 8 * 7 and "8 rollouts became 64 samples, with 7 forks" in found.sentence
    assert "reasoning" in found.advice
    assert f"{int(stripped.tokens['ids'].offsets[-1]):,} tokens" in found.sentence
    assert only(conversation(traces, {5}), "A503").rows[0] == "call 41"  # one of eight does so, from its second call
    one_sample_each = [i for i in range(64) if i % 8 == 7]
    assert codes(audit(pick(stripped, one_sample_each))) == []  # stripped on purpose, one sample an episode


def conversation(traces: list[Trace], stripped: Collection[int]) -> Rollouts:
    """Eight calls of each episode as samples: prompt, all turns before, answer. In the episodes `stripped` the answers of
    turns before have lost their first token."""
    ids, mask, rollout, turn = [], [], [], []
    for number, trace in enumerate(traces):
        strip = int(number in stripped)
        for t in range(8):
            history = [trace.prompt_ids]
            for past in trace.turns[:t]:
                history += [past.context_ids, past.ids[strip:], past.closing_ids]
            now = trace.turns[t]
            context = np.concatenate([*history, now.context_ids])
            ids.append(np.concatenate([context, now.ids]))
            mask.append(np.arange(len(context) + len(now.ids)) >= len(context))
            rollout.append(trace.key)
            turn.append(t)
    names = [f"call {i}" for i in range(len(ids))]
    columns = {"ids": Ragged.of(ids, np.int32), "mask": Ragged.of(mask, bool)}
    return Rollouts("calls", "test", names, columns, {"rollout": np.array(rollout, object), "turn": np.array(turn)})


def pick(rollouts: Rollouts, rows: list[int]) -> Rollouts:
    return Rollouts(
        "calls",
        "test",
        [rollouts.where[i] for i in rows],
        {name: Ragged.of([c.row(i) for i in rows], c.values.dtype) for name, c in rollouts.tokens.items()},
        {name: values[rows] for name, values in rollouts.samples.items()},
    )


def test_environment_crashes_were_learnt_as_reward_zero(played: Played) -> None:
    """The tool server failed, the episode was scored 0, and training went on."""
    sound = played.rollouts("append")
    sound.samples["error"][:] = ""
    messages = [
        [{"role": "user", "content": "go"}, {"role": "assistant", "content": "left"}] for _ in range(len(sound))
    ]
    sound.texts["messages"] = messages
    assert codes(audit(sound)) == []
    row = int(rows_of(sound, "reward", 0.0)[0])
    sound.samples["error"][row] = "HTTP 502 from the simulator"
    found = only(sound, "A401")
    assert found.severity == "error" and found.rows == (f"{sound.where[row]}: HTTP 502 from the simulator",)
    sound.samples["error"][row] = ""
    messages[row] = [*messages[row], {"role": "tool", "content": "Error executing tool: connection refused"}]
    found = only(sound, "A401")  # nothing but the text tells
    assert found.severity == "warning" and found.rows[0].startswith(sound.where[row])
