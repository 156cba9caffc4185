"""Facts of a trace: keys that decide order, blocks that splice, counts that agree with the rows."""

import dataclasses

import numpy as np
import pytest

from assay.trace import POLICY, Group, Outcome, Provenance, TaskKey, Trace, Turn

TASK = TaskKey("env/A", "v", "iid", 7, "beef")


def turn(context, answer, closing=(), kinds=None):
    kinds = [Provenance.SAMPLED] * len(answer) if kinds is None else kinds
    n = len(answer)
    return Turn(
        np.array(context, np.int32),
        np.full(len(context), Provenance.ENVIRONMENT, np.uint8),
        np.array(answer, np.int32),
        np.array(kinds, np.uint8),
        *(np.zeros(n, np.float32), np.zeros(n, np.float32), np.array(closing, np.int32)),
        *("seen", "done", 0.5, True, "anchor", "go", False, 2),
    )


def trace(*turns, **changes):
    fields = {"step": 3, "round": 1, "slot": 2, "rollout": 4, "reward": 1.0, "outcome": Outcome.SUCCESS, **changes}
    return Trace(TASK, prompt_ids=np.array([1, 2], np.int32), prompt_provenance=np.array([1, 1], np.uint8), turns=turns,
                 final_observation="end", temperature=1.0, **fields)  # fmt: skip


def test_a_block_is_context_answer_and_closing_with_their_provenance():
    ids, provenance = turn([5, 6], [7, 8], [9], [Provenance.SAMPLED, Provenance.FORCED]).block()
    assert ids.tolist() == [5, 6, 7, 8, 9]
    assert provenance.tolist() == [2, 2, 0, 3, 1]
    assert ids.dtype == np.int32 and provenance.dtype == np.uint8
    assert turn([], []).block()[0].tolist() == []


def test_length_is_that_of_the_spliced_blocks_and_policy_tokens_are_counted_by_provenance():
    made = trace(turn([5], [6, 7], [8]), turn([9], []), turn([1, 1], [2, 3, 4], [], [0, 3, 5]))
    assert made.length == 2 + sum(len(t.block()[0]) for t in made.turns) == 12
    assert made.sampled_tokens == 4
    assert trace().length == 2 and trace().sampled_tokens == 0


def test_policy_provenance_is_what_the_policy_sampled_wherever_it_stood():
    assert {p.name for p in Provenance} - {p.name for p in POLICY} == {"TEMPLATE", "ENVIRONMENT", "FORCED"}


def test_under_changes_the_prompt_alone():
    made = trace(turn([5], [6]))
    other = made.under(np.array([7, 8, 9]))
    assert other.prompt_ids.tolist() == [7, 8, 9] and other.prompt_ids.dtype == np.int32
    assert other.prompt_provenance.tolist() == [Provenance.TEMPLATE] * 3 and other.prompt_provenance.dtype == np.uint8
    assert other.turns is made.turns and other.key == made.key and made.prompt_ids.tolist() == [1, 2]
    kinds = np.array([2, 2, 1], np.uint8)
    assert made.under(np.array([7, 8, 9]), kinds).prompt_provenance is kinds


def test_keys_sort_by_step_round_slot_rollout():
    order = [{"step": -1}, {"step": 0}, {"step": 9}, {"step": 10}, {"step": 10, "round": 2}, {"step": 10, "round": 10},
             {"step": 10, "round": 10, "slot": 3}, {"step": 10, "round": 10, "slot": 30},
             {"step": 10, "round": 10, "slot": 30, "rollout": 5},
             {"step": 10, "round": 10, "slot": 30, "rollout": 50}]  # fmt: skip
    keys = [trace(**place).key for place in order]
    assert keys == sorted(keys) and len(set(keys)) == len(keys)


def test_kind_and_mode_make_keys_differ_inside_one_group():
    made = [trace(), trace(kind="child"), trace(kind="replaced"), trace(mode="explore")]
    assert len({t.key for t in made}) == 4 and len({t.group_key for t in made}) == 1


def test_groups_of_different_rounds_never_share_a_key():
    assert trace(round=1, slot=12).group_key != trace(round=11, slot=2).group_key


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_success_succeeds_and_only_environment_errors_are_not_learnt(outcome):
    made = trace(outcome=outcome)
    assert made.success == (outcome == "success")
    assert made.learnable == (outcome != "environment error")


def test_a_group_keeps_its_order_and_leaves_environment_errors_out_of_what_is_learnt():
    traces = tuple(
        trace(rollout=r, outcome=o) for r, o in enumerate([Outcome.CUT, Outcome.ENVIRONMENT_ERROR, Outcome.SUCCESS])
    )
    group = Group(TASK, traces, others=(trace(kind="child"),))
    assert group.learnable == (traces[0], traces[2]) and group.key == "000003.01.0002"


def test_traces_and_turns_are_immutable():
    for record in (trace(), turn([1], [2]), TASK):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, dataclasses.fields(record)[0].name, None)


def test_a_task_key_names_environment_version_split_id_and_content():
    assert str(TASK) == "env/A@v/iid/7#beef"
    assert TaskKey("env/A", "v", "iid", 7, "beef") == TASK and hash(TASK) == hash(
        TaskKey("env/A", "v", "iid", 7, "beef")
    )
    assert (
        len({str(dataclasses.replace(TASK, **{name: "x"})) for name in ("environment", "version", "split", "hash")})
        == 4
    )
