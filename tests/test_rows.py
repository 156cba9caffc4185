"""Rows against a token-by-token reference: the same targets in the same order, whatever the layout or the view."""

import numpy as np
import pytest

from assay.rows import Batch, Layout, build_rows, sampler_column
from assay.trace import POLICY, Group, Outcome, Provenance, TaskKey, Trace, Turn

TASK = TaskKey("env", "1", "train", 0, "h")


def random_turn(rng, provenances=tuple(Provenance), context=True):
    """Lengths from 0, every provenance; each token id occurs once, so that a target cannot be mistaken for another."""
    c, n, closing = int(rng.integers(1 if context else 0, 4)), int(rng.integers(0, 5)), int(rng.integers(0, 3))
    fresh = rng.choice(1_000_000, c + n + closing, replace=False).astype(np.int32)
    return Turn(
        fresh[:c],
        rng.choice([1, 2], c).astype(np.uint8),
        fresh[c : c + n],
        rng.choice(provenances, n).astype(np.uint8),
        rng.normal(size=n).astype(np.float32),
        rng.random(n).astype(np.float32),
        fresh[c + n :],
        *("seen", "done", float(rng.normal()), True, "anchor", "go", False, 3),
    )


def random_trace(seed, rollout=0, outcome=Outcome.SUCCESS, **changes):
    rng = np.random.default_rng(seed)
    turns = tuple(random_turn(rng) for _ in range(rng.integers(0, 5)))
    prompt = rng.choice(1_000_000, 3, replace=False).astype(np.int32)
    fields = {"final_observation": "end", "reward": 1.0, "outcome": outcome, "temperature": 1.0, **changes}
    return Trace(TASK, 1, 0, 0, rollout, prompt, np.array([1, 1, 2], np.uint8), turns, **fields)


def reference(trace, turn, k, targets=POLICY):
    """(tokens, provenance, positions, turns) of one row, by appending one token after the other. turn -1: all."""
    last = len(trace.turns) - 1 if turn == -1 else turn
    first = 0 if turn == -1 else max(0, turn - k)
    tokens, provenance = list(trace.prompt_ids), list(trace.prompt_provenance)
    at, turns = [], []
    for t in range(first, last + 1):
        block = trace.turns[t]
        tokens += list(block.context_ids)
        provenance += list(block.context_provenance)
        for token, kind in zip(block.ids, block.provenance, strict=True):
            if kind in targets and turn in (-1, t):
                at.append(len(tokens))
                turns.append(t)
            tokens.append(token)
            provenance.append(kind)
        if t < last:
            tokens += list(block.closing_ids)
            provenance += [Provenance.TEMPLATE] * len(block.closing_ids)
    return tokens, provenance, at, turns


def check_row(row, k, targets=POLICY):
    tokens, provenance, at, turns = reference(row.trace, row.turn, k, targets)
    assert (row.ids.tolist(), row.provenance.tolist()) == (tokens, provenance)
    assert (row.at.tolist(), row.turns.tolist()) == (at, turns)
    assert (row.ids.dtype, row.at.dtype, row.turns.dtype) == (np.int32, np.int32, np.int32)
    assert row.provenance.dtype == np.uint8 and len(row) == len(tokens) and row.shared == len(row.trace.prompt_ids)
    assert row.at[0] >= 1 and (np.diff(row.at) > 0).all()


LAYOUTS = [Layout(), Layout("window", 0), Layout("window", 1), Layout("window", 3), Layout("window", 99)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_agree_with_a_token_by_token_reference(layout):
    for seed in range(60):
        trace = random_trace(seed)
        rows = build_rows([trace], layout)
        expected = [-1] if layout.name == "append" else range(len(trace.turns))
        assert [row.turn for row in rows] == [t for t in expected if reference(trace, t, layout.k)[2]]
        for row in rows:
            check_row(row, layout.k)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_all_layouts_give_the_same_targets_and_compact_columns_in_the_same_order(layout):
    traces = [random_trace(seed, rollout=seed) for seed in range(60)]
    append, window = build_rows(traces, Layout()), build_rows(traces, layout)
    for trace in traces:
        one = [row for row in append if row.trace is trace]
        many = [row for row in window if row.trace is trace]
        assert sum(len(row.at) for row in many) == trace.sampled_tokens == sum(len(row.at) for row in one)
        if not many:
            assert not one
            continue
        for column in (
            lambda row: row.targets,
            lambda row: row.turns,
            lambda row: row.provenance[row.at],
            lambda row: sampler_column(row, "logprobs"),
            lambda row: sampler_column(row, "entropies"),
        ):
            assert np.array_equal(np.concatenate([column(row) for row in many]), column(one[0]))


def test_a_window_that_holds_every_turn_shows_each_target_what_append_shows_it():
    for seed in range(60):
        trace = random_trace(seed)
        seen = {row.turn: row for row in build_rows([trace], Layout("window", 99))}
        for whole in build_rows([trace], Layout()):
            for at, turn in zip(whole.at, whole.turns, strict=True):
                row = seen[turn]
                here = row.at[np.flatnonzero(row.targets == whole.ids[at])[0]]
                assert row.ids[:here].tolist() == whole.ids[:at].tolist()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_views_under_another_prompt_align_one_to_one(layout):
    for seed in range(40):
        trace = random_trace(seed)
        for prompt in (np.arange(17), np.array([5])):
            other = trace.under(prompt)
            plain, view = build_rows([trace], layout), build_rows([other], layout, view="hint")
            assert [row.key[:2] for row in plain] == [row.key[:2] for row in view]
            for a, b in zip(plain, view, strict=True):
                assert b.key == (trace.key, a.turn, "hint") and b.shared == len(prompt)
                assert b.ids[: len(prompt)].tolist() == prompt.tolist() and b.ids.dtype == np.int32
                assert np.array_equal(a.targets, b.targets) and np.array_equal(a.turns, b.turns)
                assert np.array_equal(a.at - a.shared, b.at - b.shared)
                assert np.array_equal(sampler_column(a, "logprobs"), sampler_column(b, "logprobs"))
                check_row(b, layout.k)


def test_grafted_and_hinted_tokens_are_targets_and_forced_ones_are_context():
    nan = np.float32("nan")
    kinds = [Provenance.SAMPLED, Provenance.GRAFTED, Provenance.HINTED, Provenance.FORCED]
    turn = Turn(
        *(np.array([10], np.int32), np.array([2], np.uint8), np.array([1, 2, 3, 4], np.int32)),
        np.array(kinds, np.uint8),
        np.array([-1, nan, nan, nan], np.float32),
        np.array([0.5, nan, nan, nan], np.float32),
        np.array([11], np.int32),
        *("", "", 0.0, True, "", "go", False, 0),
    )
    trace = Trace(TASK, 1, 0, 0, 0, np.array([9], np.int32), np.array([1], np.uint8), (turn, turn), "", 0.0,
                  Outcome.FAILURE, 1.0)  # fmt: skip
    (row,) = build_rows([trace], Layout())
    assert row.ids.tolist() == [9, 10, 1, 2, 3, 4, 11, 10, 1, 2, 3, 4]
    assert row.at.tolist() == [2, 3, 4, 8, 9, 10] and row.turns.tolist() == [0, 0, 0, 1, 1, 1]
    assert row.targets.tolist() == [1, 2, 3, 1, 2, 3]
    assert np.array_equal(sampler_column(row, "logprobs"), [-1, nan, nan] * 2, equal_nan=True)  # not known is not 0
    first, second = build_rows([trace], Layout("window", 0))
    assert first.ids.tolist() == second.ids.tolist() == [9, 10, 1, 2, 3, 4] and second.turns.tolist() == [1, 1, 1]
    (forced,) = build_rows([trace], Layout(), targets=(Provenance.FORCED,))
    assert forced.targets.tolist() == [4, 4] and forced.at.tolist() == [5, 11]


@pytest.mark.parametrize("layout", [Layout(), Layout("window", 1)], ids=str)
def test_sampler_columns_belong_to_the_targets_of_the_row_whatever_these_are(layout):
    for seed in range(60):
        trace = random_trace(seed)
        logprob_of = {int(i): x for turn in trace.turns for i, x in zip(turn.ids, turn.logprobs, strict=True)}
        for targets in [POLICY, (Provenance.FORCED,), (Provenance.SAMPLED, Provenance.FORCED)]:
            for row in build_rows([trace], layout, targets=targets):
                check_row(row, layout.k, targets)
                assert sampler_column(row, "logprobs").tolist() == [logprob_of[int(i)] for i in row.targets]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_trace_without_policy_tokens_gives_no_row_and_is_no_error(layout):
    none = random_trace(0)
    none = none.under(none.prompt_ids)
    rng = np.random.default_rng(0)
    forced = tuple(random_turn(rng, [Provenance.FORCED]) for _ in range(3))
    for turns in [(), forced]:
        trace = Trace(TASK, 1, 0, 0, 0, none.prompt_ids, none.prompt_provenance, turns, "", 0.0, Outcome.CUT, 1.0)
        assert build_rows([trace], layout) == [] and trace.sampled_tokens == 0


@pytest.mark.parametrize("layout", [Layout(), Layout("window", 0)], ids=str)
def test_a_target_with_nothing_before_it_is_an_error_not_a_prediction_from_the_last_token(layout):
    """ids[at - 1] with at = 0 would read the end of the row."""
    bare = Turn(
        *(np.zeros(0, np.int32), np.zeros(0, np.uint8), np.array([1, 2], np.int32), np.zeros(2, np.uint8)),
        *(np.zeros(2, np.float32), np.zeros(2, np.float32), np.zeros(0, np.int32)),
        *("", "", 0.0, True, "", "go", False, 0),
    )
    empty = np.zeros(0, np.int32)
    trace = Trace(TASK, 1, 0, 0, 0, empty, empty.astype(np.uint8), (bare,), "", 0.0, Outcome.CUT, 1.0)
    with pytest.raises(ValueError, match="nothing before its first target"):
        build_rows([trace], layout)


def test_rows_come_in_key_order_whatever_order_the_traces_finished_in():
    traces = [random_trace(seed, rollout=seed) for seed in range(12)]
    shuffled = [traces[i] for i in np.random.default_rng(0).permutation(12)]
    for layout in (Layout(), Layout("window", 2)):
        keys = [row.key for row in build_rows(shuffled, layout)]
        assert keys == sorted(keys) == [row.key for row in build_rows(traces, layout)] and len(set(keys)) == len(keys)


def test_scores_start_as_facts_of_learnable_kept_traces_and_shaping_leaves_the_facts():
    good, bad = random_trace(1, rollout=0, reward=0.25), random_trace(2, rollout=1)
    broken = random_trace(3, rollout=2, outcome=Outcome.ENVIRONMENT_ERROR, reward=float("nan"))
    dropped = Group(TASK, (random_trace(4, rollout=3),))
    batch = Batch([Group(TASK, (good, bad, broken))], dropped=[dropped], scores={bad.key: -1.0})
    assert batch.traces == [good, bad]
    assert batch.scores == {good.key: 0.25, bad.key: -1.0}
    assert batch.turn_scores[good.key] == [turn.reward for turn in good.turns]
    batch.scores[good.key] += 1
    assert good.reward == 0.25


@pytest.mark.parametrize(
    ("text", "layout"), [("append", Layout()), ("window(0)", Layout("window", 0)), ("window(12)", Layout("window", 12))]
)
def test_layouts_are_parsed(text, layout):
    assert Layout.parse(text) == layout


@pytest.mark.parametrize(
    "text", ["", "Append", "window", "window()", "window(-1)", "window(1.5)", "window(²)", "window(1"]
)
def test_a_layout_that_does_not_exist_is_refused_with_what_was_found(text):
    with pytest.raises(ValueError, match="layout is 'append' or 'window"):
        Layout.parse(text)
