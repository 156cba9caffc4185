"""EnvRL: which transitions are targets, what their prompts may show, and that the two losses are what they claim.

The property that a test is about stands in its name (p01 .. p13). Words are tokens here: what a row shows can be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from assay.config import Slots
from assay.learner.packing import pack
from assay.learner.terms import prepare
from assay.learner.torch_learner import TorchLearner
from assay.methods.envrl import WORDING, EnvRL, multiplicities, subset, transitions
from assay.methods.host import Host
from assay.methods.presets import PRESETS
from assay.model import Network
from assay.protocols import Setting, UserError, World
from assay.renderers import ChatRenderer
from assay.rows import Batch, Layout, Row, Stream, build_rows
from assay.schedules import SCHEDULES
from assay.tiny import WEIGHTS
from assay.trace import Group, Ids, Outcome, Provenance, TaskKey, Trace, Turn

TEMPLATE, ENVIRONMENT = Provenance.TEMPLATE, Provenance.ENVIRONMENT
SPECIAL = ("<pad>", "<end>", "<system>", "<user>", "<agent>")
END = 1


class Words:
    """A renderer whose tokens are words, numbered as they come."""

    stop_ids, stop_strings = (END,), ()

    def __init__(self, instructions: str = "move") -> None:
        self.instructions = instructions
        self.names = list(SPECIAL)

    def ids(self, text: str) -> list[int]:
        for word in text.split():
            if word not in self.names:
                self.names.append(word)
        return [self.names.index(word) for word in text.split()]

    def prompt(self, goal: str, mode: str = "") -> tuple[Ids, Any]:
        ids = np.array([2, *self.ids(f"{self.instructions} {goal}")], np.int32)
        return ids, np.full(len(ids), TEMPLATE, np.uint8)

    def observation(self, text: str, first: bool) -> tuple[Ids, Any]:
        seen = self.ids(text)
        provenance = [TEMPLATE, *[ENVIRONMENT] * len(seen), TEMPLATE]
        return np.array([3, *seen, 4], np.int32), np.array(provenance, np.uint8)

    def closing(self, ids: Ids) -> Ids:
        return np.zeros(0, np.int32) if len(ids) and ids[-1] == END else np.array([END], np.int32)

    def answer(self, action: str) -> Ids:
        return np.array([*self.ids(action), END], np.int32)

    def action(self, ids: Ids) -> str:
        return self.decode(ids).removesuffix("<end>").strip()

    def decode(self, ids: Ids) -> str:
        return " ".join(self.names[i] for i in ids)


def episode(
    renderer: Any,
    seen: Sequence[str],
    did: Sequence[str],
    slot: int = 0,
    rollout: int = 0,
    outcome: Outcome = Outcome.SUCCESS,
    reward: float = 1.0,
    valid: Sequence[bool] = (),
    noop: Sequence[bool] = (),
    stop: str = "stop",
    goal: str = "goal",
) -> Trace:
    """`seen` has one observation more than `did` has actions: the last is the final one. `stop` is of the last turn."""
    turns = []
    for t, action in enumerate(did):
        ids = renderer.answer(action)
        context, provenance = renderer.observation(seen[t], first=t == 0)
        known = np.full(len(ids), -0.5, np.float32)
        turns.append(
            Turn(
                context, provenance, ids, np.full(len(ids), Provenance.SAMPLED, np.uint8), known, -known,
                renderer.closing(ids), seen[t], action, 0.0, valid[t] if valid else True, seen[t], "other",
                noop[t] if noop else False, 0, stop if t == len(did) - 1 else "stop",
            )
        )  # fmt: skip
    prompt, provenance = renderer.prompt(goal)
    return Trace(
        TaskKey("toy", "1", "train", slot, "h"), 1, 0, slot, rollout, prompt, provenance, tuple(turns), seen[len(did)],
        reward, outcome, 1.0,
    )  # fmt: skip


def bound(renderer: Any, room: int = 512, seed: int = 0, layout: str = "append", **settings: Any) -> EnvRL:
    method = EnvRL(**settings)
    worlds = {"toy": World("toy", (), renderer)}
    assert method.bind(Setting(worlds, Layout.parse(layout), 1, room, seed)) == ()
    return method


def added(method: EnvRL, traces: Sequence[Trace], progress: float = 0.0, layout: str = "append") -> dict[str, Stream]:
    streams = method.streams(build_rows(traces, Layout.parse(layout)), [], progress)
    return {stream.name: stream for stream in streams}


def numbers(stream: Stream) -> dict[str, float]:
    """The metrics without their prefix and suffix."""
    return {k.removeprefix("envrl_").removesuffix(f"_{stream.name}"): v for k, v in stream.metrics.items()}


def asked(renderer: Words, row: Row) -> str:
    return renderer.decode(row.ids[: row.at[0]])


def told(renderer: Words, row: Row) -> str:
    return renderer.decode(row.targets)


def invented(seed: int, episodes: int = 4, words: int = 8) -> tuple[Words, list[Trace]]:
    """Random episodes of one to four turns, in groups of two; every action is a word that stands nowhere else."""
    rng, renderer, traces = np.random.default_rng(seed), Words(), []
    for i in range(episodes):
        turns = int(rng.integers(1, 5))
        seen = [" ".join(f"w{k}" for k in rng.integers(0, words, rng.integers(1, 5))) for _ in range(turns + 1)]
        did = [f"act{seed}.{i}.{t} fast" if rng.random() < 0.5 else f"act{seed}.{i}.{t}" for t in range(turns)]
        valid = [bool(rng.random() < 0.8) for _ in range(turns)]
        traces.append(episode(renderer, seen, did, i // 2, i % 2, reward=float(i % 2), valid=valid))
    return renderer, traces


# ---------------------------------------------------------------------------------------------------- a tiny network


def network(vocabulary: int = 64, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=END, pad_token_id=None,
    )  # fmt: skip
    built: Any = LlamaForCausalLM(shape)
    with torch.no_grad():
        for p in built.parameters():
            p.mul_(3.0) if p.dim() > 1 else p.add_(0.3 * torch.randn_like(p))
    return built.eval()


def learner_of(built: Any, tokens: int = 16384, rate: float = 1e-3) -> TorchLearner:
    return TorchLearner(Network(built), learning_rate=rate, tokens_per_forward=tokens)


def gradient(learner: TorchLearner, streams: Sequence[Stream]) -> dict[str, torch.Tensor]:
    """Of the whole step, before clipping."""
    terms = prepare(streams, learner.skip_zero_advantage)
    learner._clear()
    rows = list({id(r): r for term in terms for r in term.rows}.values())
    assert learner._backward(terms, pack(rows, learner.tokens_per_forward))
    found = {n: p.grad.clone() for n, p in learner.network.model.named_parameters() if p.grad is not None}
    learner._clear()
    return found


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm."""
    assert a.keys() == b.keys()
    difference = sum(float((a[n] - b[n]).double().square().sum()) for n in a)
    return math.sqrt(difference / sum(float(b[n].double().square().sum()) for n in b))


def hosted(traces: Sequence[Trace], preset: str = "grpo") -> tuple[list[Row], list[Stream], Batch]:
    """Default rows with advantages, and the host's streams, as a training step makes them."""
    slots: dict[str, Any] = PRESETS[preset].slots
    host, rows = Host(Slots(**slots), 100), build_rows(traces, Layout())
    keys = sorted({t.group_key for t in traces})
    batch = Batch([Group(traces[0].task, tuple(t for t in traces if t.group_key == key)) for key in keys])
    host.advantage(batch, rows)
    return rows, host.streams(rows, [], 0.0), batch


def by_hand(built: Any, words: Words, traces: Sequence[Trace], name: str, mean: str) -> torch.Tensor:
    """The loss from its definition: every transition written out, one forward each, plain loops."""
    examples = []
    for trace in traces:
        seen = [*(t.observation for t in trace.turns), trace.final_observation]
        for t, turn in enumerate(trace.turns):
            if name == "sp":
                question, answer = f"{seen[t]} > {turn.action} next?", seen[t + 1]
            elif turn.valid:
                question, answer = f"{seen[t]} next: {seen[t + 1]} action?", turn.action
            else:
                continue
            context = [*trace.prompt_ids.tolist(), 3, *words.ids(question), 4]
            target = [*words.ids(answer), END]
            logits = built(input_ids=torch.tensor([context + target]), use_cache=False).logits[0]
            logprobs = logits[len(context) - 1 : -1].log_softmax(-1)
            examples.append(-logprobs[torch.arange(len(target)), torch.tensor(target)])
    if mean == "token":
        return torch.cat(examples).mean()
    return torch.stack([example.mean() for example in examples]).mean()


# --------------------------------------------------------------------------------------------------- the weights


def test_p01_the_weight_is_half_a_cosine_of_the_budget_and_gone_at_its_end() -> None:
    words, traces = invented(1)
    method = bound(words, lam_sp=0.2, lam_id=0.4)
    start, middle = added(method, traces, 0.0), added(method, traces, 0.5)
    assert (start["sp"].weight, start["id"].weight) == (0.2, 0.4)
    assert middle["sp"].weight == pytest.approx(0.1, abs=1e-15)
    assert middle["id"].weight == pytest.approx(0.2, abs=1e-15)
    for n in range(150):  # the paper's 150 steps
        expected = 0.2 * 0.5 * (1 + math.cos(math.pi * n / 150))
        assert added(method, traces[:1], n / 150)["sp"].weight == pytest.approx(expected, rel=1e-12)
    weights = [added(method, traces[:1], p)["sp"].weight for p in np.linspace(0, 0.999, 40)]
    assert all(a >= b for a, b in pairwise(weights))
    assert added(method, traces, 1.0) == added(method, traces, 1.5) == {}, "nothing at the end, and nothing comes back"


@pytest.mark.parametrize(("schedule", "quarter"), [("linear", 0.15), ("constant", 0.2), ("cosine", 0.1707107)])
def test_schedules_by_name(schedule: str, quarter: float) -> None:
    words, traces = invented(1)
    assert added(bound(words, schedule=schedule), traces, 0.25)["sp"].weight == pytest.approx(quarter, abs=1e-7)
    assert set(SCHEDULES) == {"linear", "constant", "cosine"}


@pytest.mark.parametrize("preset", [name for name in ("grpo", "gigpo") if name in PRESETS])
def test_p02_without_weights_the_gradient_has_the_base_algorithms_bits(preset: str) -> None:
    words, traces = invented(2)
    rows, streams, _ = hosted(traces, preset)
    method = EnvRL(lam_sp=0, lam_id=0)
    worlds = {"toy": World("toy", (), words)}
    assert len(method.bind(Setting(worlds, Layout(), 1, 512, 0))) == 1, "it says that it does nothing"
    assert method.streams(rows, streams, 0.0) is streams
    assert method.needs == frozenset()
    learner = learner_of(network())
    without, beside = gradient(learner, streams), gradient(learner, method.streams(rows, streams, 0.0))
    assert all(torch.equal(without[n], beside[n]) for n in without)


def test_one_weight_of_zero_leaves_one_stream() -> None:
    words, traces = invented(2)
    assert set(added(bound(words, lam_sp=0), traces)) == {"id"}
    assert set(added(bound(words, lam_id=0), traces)) == {"sp"}


def test_p03_the_joint_gradient_is_the_weighted_sum() -> None:
    words, traces = invented(3)
    rows, base, _ = hosted(traces)
    learner = learner_of(network())
    joint = gradient(learner, bound(words, lam_sp=0.3, lam_id=0.7).streams(rows, base, 0.0))
    alone = bound(words, lam_sp=1.0, lam_id=1.0).streams(rows, [], 0.0)
    parts = [gradient(learner, streams) for streams in (base, alone[:1], alone[1:])]
    total = {n: parts[0][n] + 0.3 * parts[1][n] + 0.7 * parts[2][n] for n in joint}
    assert apart(joint, total) < 1e-5
    assert apart(joint, parts[0]) > 0.1, "the two losses are felt"


# ----------------------------------------------------------------------------------------------- rows and prompts


@pytest.mark.parametrize("seed", range(5))
def test_p04_targets_are_exactly_the_next_observation_or_the_action_and_the_end(seed: int) -> None:
    words, traces = invented(seed)
    streams = added(bound(words), traces)
    expected: dict[str, list[str]] = {"sp": [], "id": []}
    for trace in traces:
        for turn, following in zip(trace.turns, [*trace.turns[1:], None], strict=True):
            expected["sp"].append((following.observation if following else trace.final_observation) + " <end>")
            expected["id"] += [turn.action + " <end>"] if turn.valid else []
    for name, stream in streams.items():
        assert sorted(told(words, row) for row in stream.rows) == sorted(expected[name])
        for row in stream.rows:
            assert row.at.tolist() == list(range(row.at[0], len(row.ids))), "one span, and nothing behind it"
            assert set(row.provenance[row.at]) == {Provenance.FORCED}
            assert len(row.provenance) == len(row.ids)
            assert set(row.turns.tolist()) == {row.turn}
            assert (row.view, row.shared) == (name, len(row.trace.prompt_ids))
            assert asked(words, row).startswith("<system> move goal <user>")
            assert asked(words, row).endswith("<agent>")


def test_the_two_questions_in_words() -> None:
    words = Words()
    streams = added(bound(words), [episode(words, ["a b", "c"], ["go east"])])
    (sp,), (inverse,) = streams["sp"].rows, streams["id"].rows
    assert asked(words, sp) == "<system> move goal <user> a b > go east next? <agent>"
    assert asked(words, inverse) == "<system> move goal <user> a b next: c action? <agent>"
    assert (told(words, sp), told(words, inverse)) == ("c <end>", "go east <end>")


@pytest.mark.parametrize("history", [0, 2])
@pytest.mark.parametrize("seed", range(6))
def test_p05_no_prompt_shows_its_target(seed: int, history: int) -> None:
    words, traces = invented(seed, episodes=6)
    streams = added(bound(words, history=history), traces)
    for row in streams["id"].rows:
        assert row.trace.turns[row.turn].action.split()[0] not in asked(words, row).split()
    for row in streams["sp"].rows:
        turn, after = row.trace.turns[row.turn], told(words, row).removesuffix(" <end>")
        shown = [turn.observation, turn.action, "move goal"]
        shown += [past.observation for past in row.trace.turns[max(0, row.turn - history) : row.turn]]
        question = asked(words, row)
        if not any(f" {after} " in f" {text} " for text in shown):
            assert f" {after} " not in f" {question} "


def test_history_shows_earlier_turns_in_order_and_stops_before_the_action() -> None:
    words = Words()
    trace = episode(words, ["a", "b", "c", "d"], ["x", "y", "z"])
    streams = added(bound(words, history=1), [trace])
    assert [asked(words, row).split("<user> ")[1] for row in streams["sp"].rows] == [
        "a > x next? <agent>", "a > x b > y next? <agent>", "b > y c > z next? <agent>",
    ]  # fmt: skip
    assert asked(words, streams["id"].rows[2]).split("<user> ")[1] == "b > y c next: d action? <agent>"


def test_p06_transitions_are_the_turns_with_an_answer() -> None:
    words = Words()
    seen, did = ["a", "b", "c", "d"], ["x", "y", "z"]
    whole = episode(words, seen, did)
    assert [(t.turn, t.after) for t in transitions(whole)] == [(0, "b"), (1, "c"), (2, "d")]
    unanswered = {
        "out of context": episode(words, seen, did, rollout=1, outcome=Outcome.CUT, stop="context"),
        "environment error": episode(words, seen, did, rollout=2, outcome=Outcome.ENVIRONMENT_ERROR),
        "nothing said": episode(words, [*seen[:3], ""], did, rollout=3),
    }
    for trace in unanswered.values():
        assert [(t.turn, t.after) for t in transitions(trace)] == [(0, "b"), (1, "c")]
    cut = episode(
        words, seen, did, rollout=4, outcome=Outcome.CUT
    )  # before its next answer: the last turn was answered
    no_turn = episode(words, ["a"], [], rollout=5)
    error = episode(words, ["a"], [], rollout=6, outcome=Outcome.ENVIRONMENT_ERROR)
    assert (len(transitions(cut)), transitions(no_turn), transitions(error)) == (3, [], [])
    lost = episode(words, seen, did, rollout=7, outcome=Outcome.FAILURE, valid=[False, True, True])
    traces = [whole, *unanswered.values(), cut, no_turn, lost]
    streams = added(bound(words), traces)
    assert streams["sp"].metrics["envrl_transitions"] == 3 + 2 + 2 + 2 + 3 + 0 + 3
    assert numbers(streams["sp"])["examples"] == 15
    assert numbers(streams["id"])["examples"] == 14, "what was not understood is no action"


def test_noops_are_left_out_of_inverse_dynamics_on_request_only() -> None:
    words = Words()
    traces = [episode(words, ["a", "b", "b", "c"], ["x", "y", "z"], noop=[False, False, True])]
    assert [told(words, row) for row in added(bound(words, skip_noop=True), traces)["id"].rows] == ["x <end>"]
    assert len(added(bound(words), traces)["id"].rows) == 3
    assert len(added(bound(words, skip_noop=True), traces)["sp"].rows) == 3


def test_the_response_as_target_is_spliced_and_never_encoded_again() -> None:
    words = Words()
    trace = episode(words, ["a", "b"], ["go east"])
    thought = np.array([*words.ids("hm go"), 0, *words.ids("east")], np.int32)  # cut off: no end token; <pad> inside
    source = np.array([Provenance.SAMPLED] * 3 + [Provenance.GRAFTED], np.uint8)
    trace = replace(trace, turns=(replace(trace.turns[0], ids=thought, provenance=source, stop="length"),))
    streams = added(bound(words, view="response"), [trace])
    row = streams["id"].rows[0]
    assert row.targets.tolist() == thought.tolist()
    assert row.provenance[row.at].tolist() == source.tolist()
    assert asked(words, streams["sp"].rows[0]).endswith("a > go east next? <agent>"), "the action is the executed one"


def test_long_targets_are_cut_and_counted_and_rows_without_room_are_dropped_and_counted() -> None:
    words = Words()
    trace = episode(words, ["a", "b c d e"], ["x"])
    twin = replace(trace, rollout=1)
    stream = added(bound(words, max_target=2), [trace, twin])["sp"]
    assert [told(words, row) for row in stream.rows] == ["b c"]
    assert numbers(stream) | {"transitions": 0} == {
        "lam": 0.2, "examples": 2, "rows": 1, "truncated": 2, "dropped": 0, "transitions": 0,
    }  # fmt: skip
    start = 9  # <system> move goal <user> a > x next? <agent>
    for room, expected in ((start + 5, "b c d e <end>"), (start + 1, "b")):
        stream = added(bound(words, room=room), [trace])["sp"]
        assert [told(words, row) for row in stream.rows] == [expected]
        assert len(stream.rows[0]) == room
        assert numbers(stream)["truncated"] == float(room == start + 1)
    stream = added(bound(words, room=start), [trace, twin])["sp"]
    assert stream.rows == []
    assert (numbers(stream)["dropped"], numbers(stream)["examples"]) == (2, 0)
    found = learner_of(network()).update([stream], 0.0)
    assert (found["loss"], found["grad_norm"]) == (0.0, 0.0)


@pytest.mark.parametrize("layout", ["window(0)", "window(2)"])
def test_each_trace_is_taken_once_in_every_layout_and_view(layout: str) -> None:
    words, traces = invented(4)
    method = bound(words)
    rows = build_rows(traces, Layout.parse(layout))
    views = [replace(row, view="hint") for row in rows]
    foreign = [replace(row, view="child", trace=replace(row.trace, kind="child")) for row in rows]
    streams = {s.name: s for s in method.streams([*views, *foreign, *rows], [], 0.0)}
    plain = added(method, traces)
    for name in ("sp", "id"):
        assert [r.key for r in streams[name].rows] == [r.key for r in plain[name].rows]
        assert streams[name].metrics == plain[name].metrics
    assert method.rows(Batch([])) == [], "nothing of it is scored"


# ------------------------------------------------------------------------------------------------- the losses


@pytest.mark.parametrize("mean", ["token", "sequence"])
@pytest.mark.parametrize("name", ["sp", "id"])
def test_loss_and_gradient_are_those_of_all_transitions_written_out(name: str, mean: str) -> None:
    words = Words()
    traces = [
        episode(words, ["a", "b c d", "a", "b c d"], ["x", "back", "x"]),
        episode(words, ["a", "b c d", "b c d"], ["x", "wait a bit"], rollout=1, valid=[True, False]),
        episode(words, ["a", "e", "a", "b c d"], ["x", "back", "x"], slot=1),
    ]
    built = network()
    expected = by_hand(built, words, traces, name, mean)
    expected.backward()
    true = {n: p.grad.clone() for n, p in built.named_parameters()}
    built.zero_grad()
    stream = added(bound(words, lam_sp=1.0, lam_id=1.0, denominator=mean), traces)[name]
    assert numbers(stream)["rows"] < numbers(stream)["examples"], "equal transitions are one row"
    learner = learner_of(built)
    assert apart(gradient(learner, [stream]), true) < 2e-5
    assert learner.update([stream], 0.0)["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)


def test_what_is_equal_but_for_the_goal_stays_apart() -> None:
    words = Words()
    moves = [episode(words, ["a", "b"], ["x"], i, 0, goal=goal) for i, goal in enumerate(("red", "red", "blue"))]
    stream = added(bound(words), moves)["sp"]
    assert [asked(words, row).split()[2] for row in stream.rows] == ["red", "blue"]
    # token: 6 tokens are meant, 4 are seen
    assert [row.columns["multiplicity"].tolist() for row in stream.rows] == [
        pytest.approx([4 / 3] * 2),
        pytest.approx([2 / 3] * 2),
    ]
    assert numbers(stream)["examples"] == 3


def test_multiplicities_keep_the_mean_of_the_multiset() -> None:
    assert multiplicities([1, 1], [3, 5], "token").tolist() == [1, 1]
    # 3 x 2 tokens and 1 x 4 tokens: 10 tokens are meant, 6 are seen
    assert multiplicities([3, 1], [2, 4], "token") == pytest.approx([3 * 6 / 10, 6 / 10])
    # 3 and 1 examples: 4 are meant, 2 are seen
    assert multiplicities([3, 1], [2, 4], "sequence") == pytest.approx([3 * 2 / 4, 2 / 4])


def test_p07_neither_the_order_of_episodes_nor_the_size_of_a_forward_changes_the_loss() -> None:
    words, traces = invented(7, episodes=6)
    method, built = bound(words), network(128)
    rows = build_rows(traces, Layout())
    reference: list[Any] = []
    for order, tokens in ((rows, 16384), (rows[::-1], 16384), (rows, 48), (rows[::-1], 24)):
        streams = method.streams(order, [], 0.0)
        assert len(pack([r for s in streams for r in s.rows], tokens)) > (5 if tokens < 100 else 0)
        learner = learner_of(built, tokens)
        reference.append((gradient(learner, streams), [[r.key for r in s.rows] for s in streams]))
    for found, keys in reference[1:]:
        assert apart(found, reference[0][0]) < 1e-6
        assert keys == reference[0][1]
    losses = [learner_of(network(128), tokens).update(method.streams(rows, [], 0.0), 0.0) for tokens in (16384, 24)]
    for name in ("loss_sp", "loss_id"):
        assert losses[1][name] == pytest.approx(losses[0][name], rel=1e-5)


def test_p08_rewards_and_advantages_are_not_read() -> None:
    words, traces = invented(8)
    method = bound(words)
    first, _, _ = hosted(traces)
    other = build_rows([replace(t, reward=-7.5, outcome=Outcome.FAILURE) for t in traces], Layout())
    for row in other:
        row.columns["advantage"] = np.random.default_rng(0).normal(size=len(row.at)).astype(np.float32)
    for a, b in zip(method.streams(first, [], 0.3), method.streams(other, [], 0.3), strict=True):
        assert a.metrics == b.metrics
        assert a.weight == b.weight
        for x, y in zip(a.rows, b.rows, strict=True):
            assert x.ids.tolist() == y.ids.tolist()
            assert {k: v.tolist() for k, v in x.columns.items()} == {k: v.tolist() for k, v in y.columns.items()}


def test_p09_rewards_advantages_and_the_policy_stream_stay_as_they_are() -> None:
    words, traces = invented(9)
    rows, streams, batch = hosted(traces)
    method = bound(words)
    kept = [row.columns["advantage"].tobytes() for row in rows]
    scores = dict(batch.scores)
    assert method.reward(batch, rows) == method.modulate(batch, rows) == {}
    assert (method.advantage, method.select, method.keep, method.revise) == (None, None, None, None)
    found = method.streams(rows, streams, 0.0)
    assert found[: len(streams)] == streams
    assert [s.name for s in found[len(streams) :]] == ["sp", "id"]
    assert [row.columns["advantage"].tobytes() for row in rows] == kept
    assert batch.scores == scores
    assert all(set(row.columns) == {"advantage"} for row in rows), "no column of the policy's rows is touched"
    own = [row for s in found[len(streams) :] for row in s.rows]
    assert not {id(row) for row in own} & {id(row) for row in rows}


@pytest.mark.parametrize(("n", "fraction", "k"), [(10, 0.5, 5), (5, 0.5, 3), (3, 0.5, 2), (10, 0.04, 0), (7, 1.0, 7)])
def test_p10_a_fraction_takes_that_many_and_halves_round_up(n: int, fraction: float, k: int) -> None:
    chosen = subset(n, fraction, np.random.default_rng(0))
    assert len(chosen) == k
    assert sorted(set(chosen.tolist())) == chosen.tolist()
    assert all(0 <= i < n for i in chosen)


def test_p10_every_transition_is_as_likely_as_any_and_the_row_mean_is_unbiased() -> None:
    n, draws, values = 7, 4000, np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    chosen = [subset(n, 0.4, np.random.default_rng(seed)) for seed in range(draws)]
    share = np.bincount(np.concatenate(chosen), minlength=n) / draws
    assert share == pytest.approx(np.full(n, 3 / 7), abs=4 * math.sqrt(3 / 7 * 4 / 7 / draws))
    means = np.array([values[c].mean() for c in chosen])
    assert abs(means.mean() - values.mean()) < 4 * means.std() / math.sqrt(draws)


def test_p10_the_subset_is_the_runs_own_and_the_same_again() -> None:
    words, traces = invented(10, episodes=8)
    keys = {seed: [r.key for r in added(bound(words, fraction=0.5, seed=seed), traces)["sp"].rows] for seed in range(6)}
    total = added(bound(words), traces)["sp"].metrics["envrl_transitions"]
    for seed, found in keys.items():
        stream = added(bound(words, fraction=0.5, seed=seed), traces[::-1])["sp"]
        assert [r.key for r in stream.rows] == found
        assert numbers(stream)["examples"] == math.floor(total / 2 + 0.5)
        assert stream.metrics["envrl_transitions"] == total
    assert len({tuple(found) for found in keys.values()}) > 3
    later = [replace(t, step=2) for t in traces]
    other = added(bound(words, fraction=0.5), later)["sp"].rows
    assert [r.key[1:] for r in other] != [r.key[1:] for r in added(bound(words, fraction=0.5), traces)["sp"].rows]


def toy_world(words: Words) -> list[Trace]:
    """Every move once as often as it is likely. Rooms r0 .. r3 in a ring: "left", "right" lead to a neighbour; "jump"
    leads to either of two rooms beyond, equally often; "stay" and "wait" do the same."""
    moves = []
    for room in range(4):
        for _ in range(2):
            moves += [(room, "left", (room - 1) % 4), (room, "right", (room + 1) % 4)]
            moves += [(room, "stay", room), (room, "wait", room)]
        moves += [(room, "jump", 4), (room, "jump", 5)]
    return [episode(words, [f"r{a}", f"r{b}"], [did], 0, i) for i, (a, did, b) in enumerate(moves)]


def test_p11_the_losses_fall_to_the_entropies_of_the_toy_world() -> None:
    words = Words()
    traces = toy_world(words)
    streams = added(bound(words, lam_sp=1.0, lam_id=1.0), traces)
    learner = learner_of(network(32), rate=3e-3)
    for _ in range(180):
        found = learner.update(list(streams.values()), 0.0)
    # 40 moves; every target is one word and the end, so a token-mean is half the nats of a move.
    # SP: 8 jumps of log 2. ID: 16 times stay or wait, log 2 each; a jump and its place name each other.
    assert found["loss_sp"] == pytest.approx(8 * math.log(2) / 80, abs=0.01)
    assert found["loss_id"] == pytest.approx(16 * math.log(2) / 80, abs=0.01)
    for stream in streams.values():
        learner.score(stream.rows, frozenset({"target"}))
        for row in stream.rows:
            did = row.trace.turns[0].action
            blurred = did == "jump" if stream.name == "sp" else did in ("stay", "wait")
            nats = -float(row.columns["target"].sum())
            assert nats == pytest.approx(math.log(2) if blurred else 0.0, abs=0.1), (stream.name, did)


def test_p12_the_weight_is_a_function_of_progress_alone() -> None:
    words, traces = invented(12)
    played, fresh = bound(words), bound(words)
    for progress in (0.0, 0.1, 0.2):
        added(played, traces, progress)
    assert played.state_dict() == {}
    fresh.load_state_dict(played.state_dict())
    a, b = added(played, traces, 0.3), added(fresh, traces, 0.3)
    assert a["sp"].weight == b["sp"].weight == 0.2 * 0.5 * (1 + math.cos(math.pi * 0.3))
    assert a["id"].metrics == b["id"].metrics


@pytest.mark.slow
def test_p12_stopped_and_resumed_gives_the_bits_of_an_uninterrupted_run(tmp_path: Path) -> None:
    from assay.train import resume, train

    values: dict[str, Any] = {
        "env": "babyai/GoToRedBallNoDists", "model": "tiny-300k", "method": ["grpo", "envrl"], "planned_steps": 4,
        "method_args": {"envrl": {"fraction": 0.5}}, "tasks_per_step": 2, "rollouts_per_task": 3, "max_turn_tokens": 4,
        "evaluation": {"tasks": 0}, "updates_per_batch": 2, "runtime": {"checkpoint_every": 1},
    }  # fmt: skip
    train({**values, "steps": 4, "out": str(tmp_path / "whole")})
    train({**values, "steps": 2, "out": str(tmp_path / "parts")})
    resume(tmp_path / "parts", "4")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert (whole / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    for weights in (whole / "policy").glob("*.safetensors"):
        assert weights.read_bytes() == (parts / "policy" / weights.name).read_bytes()


@pytest.mark.parametrize("case", ["no transition", "fraction rounds to none"])
def test_p13_without_a_transition_the_step_is_the_base_algorithms(case: str) -> None:
    words = Words()
    seen = ["a", ""] if case == "no transition" else ["a", "b"]
    traces = [episode(words, seen, [did], 0, i, reward=float(i)) for i, did in enumerate(("x y", "z"))]
    rows, streams, _ = hosted(traces)
    method = bound(words, fraction=1.0 if case == "no transition" else 0.2)
    found = method.streams(rows, streams, 0.0)
    learner = learner_of(network())
    without, beside = gradient(learner, streams), gradient(learner, found)
    assert all(torch.equal(without[n], beside[n]) for n in without)
    assert any(g.any() for g in without.values())
    assert all(math.isfinite(v) for v in learner.update(found, 0.0).values())


# ------------------------------------------------------------------------------------- a real tokenizer; settings


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(WEIGHTS / "tiny-300k")


def test_a_chat_models_rows_are_its_own_prompt_its_template_and_the_target(tokenizer: Any) -> None:
    renderer = ChatRenderer(tokenizer, "one move")
    trace = episode(renderer, ["wall ahead", "key <|end|> left"], ["left"], goal="go to the key")
    streams = added(bound(renderer), [trace])
    (sp,), (inverse,) = streams["sp"].rows, streams["id"].rows
    assert sp.ids[: sp.shared].tolist() == trace.prompt_ids.tolist()
    plain = tokenizer.encode("key <|end|> left", add_special_tokens=False, split_special_tokens=True)
    assert sp.targets.tolist() == [*plain, *trace.turns[0].ids[-1:]], "what the environment writes is text, no control"
    assert inverse.targets.tolist() == trace.turns[0].ids.tolist(), "code's answer has the ids that a policy gives"
    text = tokenizer.decode(sp.ids[: sp.at[0]])
    assert text.startswith(tokenizer.decode(trace.prompt_ids) + "<|user|> wall ahead")
    assert text.endswith("next?<|end|><|assistant|>")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert (inverse.ids[: inverse.at[0]] == end).sum() == 2, "of the system's and of the user's message"


def test_wording_follows_the_instructions_or_the_setting() -> None:
    long = Words("You are in a maze. Answer with one move, such as left, right or forward.")
    for words, settings, expected in (
        (Words("move"), {}, "brief"),
        (long, {}, "full"),
        (Words(""), {}, "full"),
        (long, {"wording": "brief"}, "brief"),
        (Words("move"), {"wording": "full"}, "full"),
    ):
        method = bound(words, **settings)
        assert method.words["toy"] == WORDING[expected]
        assert {"sp", "id"} == set(added(method, [episode(words, ["a", "b"], ["x"])]))


def test_full_wording_says_what_is_asked() -> None:
    words = Words()
    streams = added(bound(words, wording="full", history=1), [episode(words, ["a", "b", "c"], ["x", "y"])])
    assert asked(words, streams["sp"].rows[1]).split("<user> ")[1] == (
        "Observation: a Action: x Observation: b Action: y Predict the next observation. Answer with its text only. "
        "<agent>"
    )
    assert asked(words, streams["id"].rows[1]).split("<user> ")[1] == (
        "Observation: a Action: x Observation: b Next observation: c Which single action led to the next observation? "
        "Answer with the action only. <agent>"
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lam_sp", -0.1), ("lam_id", float("nan")), ("lam_id", float("inf")), ("fraction", 0.0), ("fraction", 1.5),
        ("view", "both"), ("history", -1), ("max_target", 0), ("schedule", "step"), ("denominator", "episode"),
        ("wording", "short"),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_named(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=setting):
        EnvRL(**{setting: value})


def test_a_renderer_that_cannot_write_answers_is_refused() -> None:
    class Mute:
        instructions = "move"

    with pytest.raises(UserError, match="no answer"):
        EnvRL().bind(Setting({"toy": World("toy", (), Mute())}, Layout(), 1, 512, 0))  # type: ignore[arg-type]
