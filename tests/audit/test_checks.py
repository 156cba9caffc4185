"""Every check both ways: clean rollouts pass, and a small planted fault is found, by its own check, in its own row."""

from typing import Any

import numpy as np
import pytest
from audit_samples import (
    END,
    ESTIMATORS,
    answer_ends,
    clean,
    codes,
    credit,
    loud,
    only,
    rows_of,
    trained,
    without,
)

from assay.advantages import grpo, whiten
from assay.audit.checks import CHECKS, audit, select
from assay.audit.columns import Ragged, Rollouts
from assay.audit.sheet import Sheet, factorise, reduce_rows, reduce_runs
from assay.protocols import UserError

LAYOUTS = ("append", "steps", "window")


def column(rollouts: Rollouts, name: str) -> Any:
    return rollouts.tokens[name].values


# --------------------------------------------------------------------------------------------------- what is clean


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("estimator", [*ESTIMATORS, "reinforce++-baseline"])
def test_clean_rollouts_pass_every_check_without_a_word(layout: str, estimator: str) -> None:
    report = audit(clean(layout=layout, estimator=estimator))
    assert report.findings == []
    assert set(report.skipped) == {"A108", "A204", "A206", "A405"}
    assert set(report.ran) | set(report.skipped) == set(CHECKS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_undeclared_estimator_passes(layout: str) -> None:
    for estimator in ESTIMATORS:
        assert audit(without(clean(layout=layout, estimator=estimator), "estimator")).findings == []


def test_rloo_of_two_passes() -> None:
    assert loud(audit(clean(members=2, estimator="rloo"))) == []


def test_group_with_an_environment_error_left_out_passes() -> None:
    rollouts = clean()
    row = int(rows_of(rollouts, "group", "g2")[1])
    rollouts.samples["reward"][row] = rollouts.samples["score"][row] = np.nan
    rollouts.samples["outcome"][row], rollouts.samples["error"][row] = "environment error", "simulator died"
    column(rollouts, "mask")[trained(rollouts, row)] = False
    credit(rollouts, "grpo")
    column(rollouts, "weights")[column(rollouts, "mask")] = 1 / column(rollouts, "mask").sum()
    assert audit(rollouts).findings == []


def test_group_whose_failed_member_was_removed_from_the_file_is_a_note() -> None:
    rollouts = clean()
    kept = np.ones(len(rollouts), bool)
    kept[rows_of(rollouts, "group", "g2")[1]] = False
    assert [(f.code, f.severity) for f in audit(subset(rollouts, kept)).findings] == [("A303", "note")]


def test_greedy_evaluation_in_groups_of_one_passes() -> None:
    rollouts = without(
        clean(groups=8, members=2), "advantages", "weights", "trainer_logprobs", "estimator", "rollouts_per_task"
    )
    rollouts = subset(rollouts, np.arange(len(rollouts)) % 2 == 0)
    rollouts.samples["split"][:] = "iid"
    rollouts.samples["reward"][:] = rollouts.samples["score"][:] = 1.0
    rollouts.samples["outcome"][:] = "success"
    rollouts.declared["temperature"] = 0.0
    assert audit(rollouts).findings == []


def test_forced_tokens_that_the_mask_leaves_out_pass() -> None:
    rollouts = clean()
    for row in range(len(rollouts)):
        inside = answer_ends(rollouts, row) - 2
        for name, value in (("sampled", False), ("mask", False), ("advantages", np.nan), ("logprobs", np.nan)):
            column(rollouts, name)[inside] = value
    column(rollouts, "weights")[:] = 1 / column(rollouts, "mask").sum()
    assert audit(rollouts).findings == []


def test_columns_that_are_missing_are_said_and_not_guessed() -> None:
    report = audit(without(clean(), "advantages", "reward", "score", "group"))
    assert report.skipped["A311"] == "no advantages, no reward or score"
    assert report.skipped["A301"] == "no group"
    assert "A101" in report.ran


def test_empty_file_passes() -> None:
    report = audit(Rollouts("empty", "test", []))
    assert report.findings == [] and report.ran == [] and report.counts["samples"] == 0


def test_every_check_survives_one_sample_and_no_tokens() -> None:
    one = subset(clean(), np.arange(len(clean())) == 5)
    assert loud(audit(without(one, "rollouts_per_task", "estimator"))) == []
    none = Ragged(np.zeros(0), np.zeros(4, np.int64))
    names = ("mask", "sampled", "logprobs", "trainer_logprobs", "advantages", "weights")
    bare = Rollouts("x", "t", ["a", "b", "c"], {"ids": Ragged(np.zeros(0, np.int32), np.zeros(4, np.int64))})
    bare.tokens |= {
        n: Ragged(none.values.astype(bool if n in ("mask", "sampled") else float), none.offsets) for n in names
    }
    bare.samples |= {"reward": np.array([0.0, 1.0, 0.0]), "group": np.array(["a", "a", "a"], object)}
    assert codes(audit(bare)) == ["A109"]


# --------------------------------------------------------------------------------------------------- A1: tokens, masks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_observation_token_under_the_loss(layout: str) -> None:
    rollouts = clean(layout=layout)
    at = answer_start(rollouts, 4) - 1
    column(rollouts, "mask")[at] = True
    column(rollouts, "advantages")[at] = column(rollouts, "advantages")[at + 1]
    column(rollouts, "weights")[at] = column(rollouts, "weights")[at + 1]
    found = only(rollouts, "A101")
    assert (found.severity, found.count) == ("error", 1)
    assert found.rows == (
        f"line 5, token {at - rollouts.tokens['mask'].offsets[4]} (id {column(rollouts, 'ids')[at]})",
    )


def test_mask_that_lies_one_token_early_is_called_so() -> None:
    rollouts = without(clean(), "advantages", "weights", "logprobs", "trainer_logprobs")
    mask = column(rollouts, "sampled")
    rollouts.tokens["mask"] = Ragged(np.append(mask[1:], False), rollouts.tokens["mask"].offsets)
    [found] = [f for f in audit(rollouts).findings if f.code == "A101"]
    assert "one token early" in found.advice


def test_one_sample_without_loss() -> None:
    rollouts = clean()
    at = trained(rollouts, 6)
    for name, value in (("mask", False), ("advantages", np.nan), ("weights", np.nan)):
        column(rollouts, name)[at] = value
    assert only(rollouts, "A102").rows == ("line 7",)


def test_sample_that_was_cut_may_be_left_out_of_the_loss() -> None:
    rollouts = clean()
    column(rollouts, "mask")[trained(rollouts, 6)] = False
    rollouts.samples["stop"][6] = "length"
    assert loud(audit(rollouts)) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_sampled_token_inside_an_answer_without_loss(layout: str) -> None:
    rollouts = clean(layout=layout)
    at = trained(rollouts, 8)[2]
    column(rollouts, "mask")[at] = False
    found = only(rollouts, "A103")
    assert found.rows == (f"line 9, token {at - rollouts.tokens['ids'].offsets[8]} (id {column(rollouts, 'ids')[at]})",)
    assert found.count == 1 and "does not learn to stop" not in found.advice


def test_end_tokens_without_loss_are_called_so() -> None:
    rollouts = clean()
    for row in range(len(rollouts)):
        column(rollouts, "mask")[answer_ends(rollouts, row)] = False
    assert "does not learn to stop" in only(rollouts, "A103").advice


def test_only_the_last_answer_of_an_episode_is_trained() -> None:
    rollouts = clean()
    at = trained(rollouts, 3)
    last = at > answer_ends(rollouts, 3)[-2]
    for name, value in (("mask", False), ("advantages", np.nan)):
        column(rollouts, name)[at[~last]] = value
    found = only(rollouts, "A104")
    assert found.rows == ("line 4",) and "only the last" in found.advice
    assert found.count == len(answer_ends(rollouts, 3)) - 1


def test_history_of_a_turn_that_other_samples_train_passes() -> None:
    assert (
        codes(audit(clean(layout="steps"))) == []
    )  # each sample holds answers without loss: they are trained elsewhere


def test_one_appended_end_token_under_the_loss() -> None:
    rollouts = clean()
    at = answer_ends(rollouts, 2)[1]
    column(rollouts, "sampled")[at] = False
    column(rollouts, "logprobs")[at] = column(rollouts, "trainer_logprobs")[at] = np.nan
    found = only(rollouts, "A105")
    assert found.severity == "error" and f"(id {END})" in found.rows[0] and found.rows[0].startswith("line 3,")


def test_appended_end_token_without_provenance_shows_by_its_missing_logprob() -> None:
    rollouts = without(clean(), "sampled")
    at = answer_ends(clean(), 2)[1]
    column(rollouts, "logprobs")[at] = np.nan
    assert only(rollouts, "A105").rows[0].startswith("line 3,")


def test_end_tokens_that_code_always_appends_are_known_by_their_place() -> None:
    rollouts = clean()
    for row in range(len(rollouts)):
        at = answer_ends(rollouts, row)
        column(rollouts, "sampled")[at] = False
        column(rollouts, "logprobs")[at] = np.nan
    assert only(rollouts, "A105").count == sum(len(answer_ends(clean(), row)) for row in range(len(rollouts)))


def test_answer_at_the_length_limit_that_ends_in_an_end_token() -> None:
    rollouts = clean()
    row = int(np.flatnonzero(rollouts.samples["reward"] == 1)[0])
    rollouts.samples["stop"][row] = "length"
    found = only(rollouts, "A105")
    assert (found.severity, found.count) == ("warning", 1) and found.rows[0].startswith(f"line {row + 1},")


@pytest.mark.parametrize("name", ["mask", "sampled", "logprobs", "advantages", "trainer_logprobs"])
def test_one_row_of_another_length(name: str) -> None:
    rollouts = clean()
    rows = [rollouts.tokens[name].row(i) for i in range(len(rollouts))]
    rows[5] = rows[5][:-1]
    rollouts.tokens[name] = Ragged.of(rows, rows[0].dtype)
    report = audit(rollouts)
    [found] = [f for f in report.findings if f.severity == "error"]
    n = len(rollouts.tokens["ids"].row(5))
    assert found.code == "A106" and found.rows == (f"line 6: {n - 1} of {name}, {n} of ids",)
    assert any(f"{name} (its lengths differ)" in words for words in report.skipped.values())


def test_answer_that_was_tokenised_again_in_the_next_context() -> None:
    rollouts = clean(layout="steps")
    row = int(rows_of(rollouts, "rollout", "1.1")[1])  # its history holds the answer of turn 0
    start = trained(rollouts, row - 1)[0] - rollouts.tokens["ids"].offsets[row - 1]
    later = rows_of(rollouts, "rollout", "1.1")[1:]
    for i in later:
        rollouts.tokens["ids"].row(i)[start] = 95  # another id, of the same text
    text = rollouts.texts["completion"][row - 1]
    rollouts.texts["prompt"][row] = f"task 1: find the key {text} and then"
    found = [f for f in audit(rollouts).findings if f.code == "A107"]
    assert [f.rows for f in found] == [(f"line {row}",)]
    rollouts.texts["prompt"][row] = (
        "task 1: find the key"  # the text is not there either: rewritten, not tokenised again
    )
    assert not [f for f in audit(rollouts).findings if f.code == "A107"]


def test_answer_that_stands_elsewhere_in_the_next_context_was_not_tokenised_again() -> None:
    rollouts = clean(layout="window")  # history moves forward as turns leave the window
    for row in range(1, len(rollouts)):
        rollouts.texts["prompt"][row] = f"{rollouts.texts['prompt'][row]} {rollouts.texts['completion'][row - 1]}"
    assert "A107" not in codes(audit(rollouts))


def test_decoder_tells_drift_from_a_change_of_text() -> None:
    rollouts = without(clean(layout="steps"), "prompt", "completion")
    later = rows_of(rollouts, "rollout", "1.1")[1:]
    start = trained(rollouts, later[0] - 1)[0] - rollouts.tokens["ids"].offsets[later[0] - 1]
    old = rollouts.tokens["ids"].row(later[0])[start]
    for i in later:
        rollouts.tokens["ids"].row(i)[start] = old + 1000
    same_text = [
        f
        for f in audit(rollouts, decode=lambda ids: " ".join(f"{i % 1000:04}" for i in ids)).findings
        if f.code == "A107"
    ]
    other_text = [
        f for f in audit(rollouts, decode=lambda ids: " ".join(f"{i:04}" for i in ids)).findings if f.code == "A107"
    ]
    assert [f.rows for f in same_text] == [(f"line {later[0]}",)] and other_text == []


def test_answers_that_do_not_survive_the_tokenizer_are_a_note() -> None:
    def encode(text: str) -> list[int]:
        return [21 if word == "20" else int(word) for word in text.split()]

    rollouts = clean()
    report = audit(rollouts, decode=lambda ids: " ".join(map(str, ids)), encode=encode)
    sampled = column(rollouts, "ids")[column(rollouts, "sampled")]
    [found] = report.findings
    assert found.code == "A107" and found.severity == "note" and 0 < found.count <= (sampled == 20).sum()


def test_one_token_of_padding_under_the_loss() -> None:
    rollouts = clean()
    attention = np.ones(len(column(rollouts, "ids")), bool)
    rollouts.tokens["attention"] = Ragged(attention, rollouts.tokens["ids"].offsets)
    assert audit(rollouts).findings == []
    attention[trained(rollouts, 1)[-1]] = False
    assert only(rollouts, "A108").rows[0].startswith("line 2, token")


def test_sample_without_a_sampled_token() -> None:
    rollouts = clean()
    at = trained(rollouts, 6)
    for name, value in (("mask", False), ("sampled", False), ("advantages", np.nan), ("logprobs", np.nan)):
        column(rollouts, name)[at] = value
    assert only(rollouts, "A109").rows == ("line 7",)


def test_pile_of_samples_at_the_largest_length() -> None:
    rng = np.random.default_rng(0)
    lengths = np.append(rng.integers(10, 60, 40), [64] * 5)
    rows = [rng.integers(10, 90, n) for n in lengths]
    for row in rows[:40]:
        row[-1] = END
    flags = [np.arange(n) >= 3 for n in lengths]
    rollouts = Rollouts("x", "t", [f"line {i + 1}" for i in range(45)], {"ids": Ragged.of(rows, np.int32)})
    rollouts.tokens |= {"sampled": Ragged.of(flags, bool)}
    found = only(rollouts, "A110")
    assert found.count == 5 and found.rows[0] == "line 41"
    rollouts.samples["stop"] = np.array(["stop"] * 40 + ["length"] * 5, object)  # they say so
    assert codes(audit(rollouts)) == []


# ------------------------------------------------------------------------------------------- A2: log-probs and ratios


def test_one_logprob_above_zero() -> None:
    rollouts = clean()
    column(rollouts, "logprobs")[trained(rollouts, 9)[4]] = 0.7
    found = only(rollouts, "A201")
    assert found.count == 1 and found.rows[0].startswith("line 10,") and "0.7" in found.sentence


def test_one_trained_token_without_a_logprob() -> None:
    rollouts = without(clean(), "trainer_logprobs")
    column(rollouts, "logprobs")[trained(rollouts, 9)[3]] = np.nan
    assert only(rollouts, "A202").rows[0].startswith("line 10,")
    scored = clean()
    column(scored, "logprobs")[trained(scored, 9)[3]] = np.nan
    assert [(f.code, f.severity) for f in audit(scored).findings] == [("A202", "note")]  # the trainer's is there


def test_logprobs_of_one_sample_that_were_never_filled_in() -> None:
    rollouts = without(clean(), "trainer_logprobs")
    column(rollouts, "logprobs")[trained(rollouts, 9)] = 0
    assert (only(rollouts, "A203").rows, only(rollouts, "A203").severity) == (("line 10",), "warning")
    column(rollouts, "logprobs")[column(rollouts, "mask")] = 0
    found = only(rollouts, "A203")
    assert found.severity == "error" and "different answers" in found.sentence and found.count == 24


def test_policy_that_is_sure_or_knows_nothing_has_constant_logprobs() -> None:
    rollouts = without(clean(), "trainer_logprobs")
    mask = column(rollouts, "mask")
    sure = -np.random.default_rng(0).uniform(0, 2e-4, mask.sum())
    column(rollouts, "logprobs")[mask] = sure  # and here and there so sure that float32 says 0
    column(rollouts, "logprobs")[trained(rollouts, 9)] = 0
    assert [(f.code, f.severity) for f in audit(rollouts, ["A203"]).findings] == [("A203", "note")]
    column(rollouts, "logprobs")[mask] = -np.log(512)
    assert only(rollouts, "A203").severity == "warning"
    rollouts.declared["vocabulary"] = 512
    assert loud(audit(rollouts)) == []


def test_model_that_scores_one_sample_otherwise() -> None:
    rollouts = clean()
    truth = column(rollouts, "logprobs").copy()
    assert loud(audit(rollouts, score=lambda r: Ragged(truth, r.tokens["ids"].offsets))) == []
    truth[trained(rollouts, 9)] -= 1.5
    found = only(rollouts, "A204", score=lambda r: Ragged(truth, r.tokens["ids"].offsets))
    assert found.rows == ("line 10",) and found.severity == "warning"
    truth[:] = column(rollouts, "logprobs")
    truth[trained(rollouts, 3)[1]] -= 3  # one token
    assert (
        only(rollouts, "A204", score=lambda r: Ragged(truth, r.tokens["ids"].offsets))
        .rows[0]
        .startswith("line 4, token")
    )
    with pytest.raises(UserError, match="the scorer gave 0 log-probs in 0 rows"):
        audit(rollouts, score=lambda r: Ragged.of([], float))


def test_model_whose_scores_lie_one_token_off() -> None:
    rollouts = without(clean(), "trainer_logprobs")
    mask, sampled = column(rollouts, "mask"), column(rollouts, "logprobs")
    moved = np.full(len(mask), np.nan, np.float32)
    moved[mask] = np.roll(sampled[mask], 1)
    found = only(rollouts, "A204", score=lambda r: Ragged(moved, r.tokens["ids"].offsets))
    assert found.severity == "error" and "one token late" in found.sentence


@pytest.mark.parametrize("kept", [0.9, 0.97])
def test_truncated_sampler_moves_the_mean_ratio_to_the_kept_mass(kept: float) -> None:
    rollouts = clean(groups=20)
    column(rollouts, "trainer_logprobs")[:] += np.float32(np.log(kept))
    found = only(rollouts, "A205")
    assert f"about {100 * kept:.1f} %" in found.sentence and found.severity == "warning"
    rollouts.declared["top_p"] = 0.9
    assert (only(rollouts, "A205").severity, "top_p 0.9" in only(rollouts, "A205").advice) == ("error", True)


def test_ratio_far_from_one_token_by_token_with_mean_one_is_no_bias() -> None:
    rollouts = clean(groups=20)
    mask = column(rollouts, "mask")
    noise = np.random.default_rng(1).normal(-0.5 * 0.2**2, 0.2, mask.sum())  # mean of exp is 1
    column(rollouts, "logprobs")[mask] -= 1
    column(rollouts, "trainer_logprobs")[mask] = column(rollouts, "logprobs")[mask] + noise
    [found] = audit(rollouts).findings
    assert (found.code, found.severity) == ("A209", "note")
    assert f"ratio of {(np.abs(noise) > np.log(2)).sum()} of {mask.sum():,}" in found.sentence
    assert f"by {np.abs(noise).mean():.3f} nats" in found.sentence


def test_sure_tokens_need_not_go_together() -> None:
    rollouts = clean(groups=20)
    mask, rng = column(rollouts, "mask"), np.random.default_rng(2)
    for name in ("logprobs", "trainer_logprobs"):
        column(rollouts, name)[mask] = -rng.uniform(0, 0.01, mask.sum())
    assert codes(audit(rollouts)) == []


def test_declared_top_p_without_logprobs_to_look_at() -> None:
    rollouts = without(clean(), "trainer_logprobs")
    rollouts.declared["top_p"] = 0.95
    assert "top_p 0.95" in only(rollouts, "A206").sentence
    rollouts.declared |= {"top_p": 1.0, "top_k": -1}
    assert loud(audit(rollouts)) == []


def test_trainer_logprobs_that_lie_one_token_off() -> None:
    rollouts = clean()
    mask = column(rollouts, "mask")
    column(rollouts, "trainer_logprobs")[mask] = np.roll(column(rollouts, "trainer_logprobs")[mask], -1)
    found = only(rollouts, "A207")
    assert found.severity == "error" and "one token early" in found.sentence


def test_one_group_of_several_versions_is_a_note() -> None:
    rollouts = clean()
    rollouts.samples["version"][rows_of(rollouts, "group", "g3")[0]] = 4
    [found] = audit(rollouts).findings
    assert (found.code, found.severity, found.count) == ("A208", "note", 1) and "3 versions apart" in found.sentence
    rollouts.samples["version"][:] = np.unique(rollouts.samples["group"], return_inverse=True)[1]
    assert audit(rollouts).findings == []  # groups of different steps
    rollouts.samples["version"][:] = -1
    assert "A208" in audit(rollouts).skipped


# --------------------------------------------------------------------------------------------------------- A30x: groups


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("by", ["task", "prompt", "ids"])
def test_two_groups_whose_rollouts_were_swapped(layout: str, by: str) -> None:
    rollouts = clean(layout=layout)
    for rollout, group in (("1.0", "g2"), ("2.0", "g1")):
        rollouts.samples["group"][rows_of(rollouts, "rollout", rollout)] = group
    without(rollouts, *{"task": (), "prompt": ("task",), "ids": ("task", "prompt")}[by])
    found = next(f for f in audit(rollouts).findings if f.code == "A301")
    first = rows_of(rollouts, "group", "g2")[0] + 1
    assert found.count == 2 and f"group g2 (line {first})" in found.rows
    assert found.severity == ("error" if by == "task" else "warning")


def test_tasks_whose_rollouts_stand_in_groups_of_one() -> None:
    rollouts = clean()
    at = rows_of(rollouts, "task", "maze@1#3")
    rollouts.samples["group"][at] = [f"request {i}" for i in at]
    found = next(f for f in audit(rollouts).findings if f.code == "A302")
    assert found.count == 4 and found.severity == "error" and found.rows[0] == f"line {at[0] + 1}"


def test_tasks_that_come_back_in_later_steps_pass() -> None:
    rollouts = clean()
    rollouts.samples["task"][rows_of(rollouts, "task", "maze@1#3")] = "maze@1#2"
    assert codes(audit(rollouts)) == []


def test_group_that_two_steps_share() -> None:
    rollouts = clean()
    at = rows_of(rollouts, "group", "g3")
    rollouts.samples["group"][at] = "g2"
    rollouts.samples["task"][at] = "maze@1#2"
    credit(rollouts, "grpo")
    found = only(rollouts, "A303")
    assert found.severity == "error" and "up to 8" in found.sentence and found.rows[0].startswith("group g2")


def test_groups_of_all_sizes_break_no_rule() -> None:
    rollouts = without(clean(), "rollouts_per_task", "estimator", "advantages", "weights")
    sizes = [4, 3, 2, 1, 4, 3]
    kept = np.zeros(len(rollouts), bool)
    for group, size in enumerate(sizes):
        kept[rows_of(rollouts, "group", f"g{group}")[:size]] = True
    assert "A303" not in [f.code for f in audit(subset(rollouts, kept)).findings]


def test_one_member_alone_in_its_group() -> None:
    rollouts = clean()
    kept = rollouts.samples["group"] != "g4"
    kept[rows_of(rollouts, "group", "g4")[0]] = True
    alone = subset(rollouts, kept)
    credit(alone, "grpo")
    found = only(alone, "A303")
    assert found.severity == "warning" and found.count == 1 and "group g4" in found.rows[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rollout_twice_in_its_group(layout: str) -> None:
    rollouts = clean(layout=layout)
    first, second = rows_of(rollouts, "rollout", "2.1"), rows_of(rollouts, "rollout", "2.2")
    order = np.arange(len(rollouts))
    kept = ~np.isin(order, second)
    copy = subset(rollouts, np.concatenate([order[kept], first]))  # the same samples once more ...
    copy.where = [f"line {i + 1}" for i in range(len(copy))]
    copy.samples["rollout"][kept.sum() :] = "2.9"  # ... under another name
    credit(copy, "grpo")
    found = only(copy, "A304")
    assert found.rows == (f"line {first[0] + 1} = line {kept.sum() + 1}",) and found.count == 1


def test_short_likely_answers_may_repeat() -> None:
    rollouts = clean()
    a, b = rows_of(rollouts, "group", "g2")[:2]
    rollouts = subset(rollouts, np.where(np.arange(len(rollouts)) == b, a, np.arange(len(rollouts))))
    rollouts.samples["rollout"][b] = "2.1"
    column(rollouts, "logprobs")[column(rollouts, "mask")] = -0.02
    without(rollouts, "trainer_logprobs")
    credit(rollouts, "grpo")
    assert "A304" not in codes(audit(rollouts))


def test_one_episode_in_two_groups() -> None:
    rollouts = clean(layout="steps")
    row = rows_of(rollouts, "rollout", "2.1")[1]
    rollouts.samples["group"][row] = "g3"
    assert next(f for f in audit(rollouts).findings if f.code == "A305").rows == (f"line {row}",)


# ----------------------------------------------------------------------------------------------------- A31x: advantages


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("declared", [True, False])
def test_one_sample_with_advantage_zero(layout: str, declared: bool) -> None:
    rollouts = clean(layout=layout)
    if not declared:
        without(rollouts, "estimator")
    row = int(rows_of(rollouts, "rollout", "2.1")[0])
    column(rollouts, "advantages")[trained(rollouts, row)] = 0
    found = only(rollouts, "A311")
    assert (found.severity, found.count, found.rows) == ("error", 1, (f"line {row + 1}",))


def test_step_with_advantage_zero_beside_others_of_its_episode_needs_no_group() -> None:
    rollouts = without(clean(layout="steps"), "group", "estimator", "rollouts_per_task")
    row = int(rows_of(rollouts, "rollout", "2.1")[1])
    column(rollouts, "advantages")[trained(rollouts, row)] = 0
    found = only(rollouts, "A311")
    assert found.rows == (f"line {row + 1}",) and found.count == 1
    for name in ("gae", "turn-gae", "gigpo", "hgpo"):  # a critic, or a comparison of steps, may say so of one
        rollouts.declared["estimator"] = name
        assert codes(audit(rollouts)) == [], name


def test_zero_on_all_but_the_last_step_is_called_so_and_on_the_cut_ones_it_is_a_note() -> None:
    rollouts = clean(layout="steps")
    rows = rows_of(rollouts, "rollout", "2.1")
    for row in rows[:-1]:
        column(rollouts, "advantages")[trained(rollouts, row)] = 0
    assert "only the last sample" in only(rollouts, "A311").advice
    column(rollouts, "advantages")[trained(rollouts, rows[-1])] = 0
    rollouts.samples["outcome"][rows] = "cut"
    assert [(f.code, f.severity) for f in audit(rollouts).findings] == [("A311", "note")]


def test_undeclared_advantages_of_no_known_estimator_are_not_recomputed() -> None:
    rollouts = without(clean(), "estimator")
    rng, centred = np.random.default_rng(0), clean(estimator="dr-grpo")
    for row in range(len(rollouts)):  # of the right sign, of any size
        column(rollouts, "advantages")[trained(rollouts, row)] = column(centred, "advantages")[
            trained(centred, row)
        ] * rng.uniform(0.2, 3)
    assert codes(audit(rollouts)) == []


def test_episode_at_the_mean_of_its_group_has_advantage_zero() -> None:
    rollouts = clean()
    at = rows_of(rollouts, "group", "g2")
    rollouts.samples["reward"][at] = rollouts.samples["score"][at] = [0.0, 0.5, 0.5, 1.0]
    rollouts.samples["outcome"][at] = ""
    credit(rollouts, "grpo")
    assert codes(audit(rollouts)) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_group_of_equal_rewards_with_advantages(layout: str) -> None:
    rollouts = clean(layout=layout)
    for row in rows_of(rollouts, "group", "g0"):
        column(rollouts, "advantages")[trained(rollouts, row)] = 0.07
    found = only(rollouts, "A312")
    assert found.count == 1 and found.rows[0].startswith("group g0") and "0.07" in found.sentence


def test_advantage_that_is_one_number_for_all() -> None:
    rollouts = without(clean(), "estimator", "group", "rollouts_per_task")
    column(rollouts, "advantages")[column(rollouts, "mask")] = 1
    assert "1 on every trained token" in only(rollouts, "A313").sentence


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_token_with_another_advantage_than_its_episode(layout: str) -> None:
    rollouts = clean(layout=layout)
    row = int(rows_of(rollouts, "rollout", "3.1")[0])
    column(rollouts, "advantages")[trained(rollouts, row)[1]] += 0.5
    found = only(rollouts, "A314")
    assert found.rows == (f"line {row + 1}",) and "0.5" in found.sentence


def test_turns_of_one_episode_with_different_advantages() -> None:
    rollouts = clean(layout="steps")
    row = int(rows_of(rollouts, "rollout", "3.1")[0])
    column(rollouts, "advantages")[trained(rollouts, row)] += 0.5
    assert f"line {row + 1}" in only(rollouts, "A314").rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rollout_with_the_opposite_sign(layout: str) -> None:
    rollouts = clean(layout=layout)
    rows = rows_of(rollouts, "rollout", "3.1")
    for row in rows:
        column(rollouts, "advantages")[trained(rollouts, row)] *= -1
    found = only(rollouts, "A315")
    assert found.rows == (f"line {rows[0] + 1}",) and found.severity == "error"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_group_that_another_estimator_made(layout: str, estimator: str) -> None:
    rollouts = clean(layout=layout, estimator=estimator)
    for row in rows_of(rollouts, "group", "g2"):
        column(rollouts, "advantages")[trained(rollouts, row)] *= 1.3
    found = only(rollouts, "A316")
    assert found.count == 1 and found.rows[0].startswith("group g2") and found.severity == "error"
    largest = (
        0.3
        / 1.3
        * max(abs(column(rollouts, "advantages")[trained(rollouts, r)[0]]) for r in rows_of(rollouts, "group", "g2"))
    )
    assert f"difference is {largest:.3g}" in found.sentence and "1.3 times" in found.advice


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimator_that_most_groups_follow_is_held_against_the_others(layout: str, estimator: str) -> None:
    rollouts = without(clean(groups=8, layout=layout, estimator=estimator), "estimator")
    for row in rows_of(rollouts, "group", "g2"):
        column(rollouts, "advantages")[trained(rollouts, row)] *= 1.3
    found = only(rollouts, "A316")
    assert found.count == 1 and found.severity == "warning" and f"what {estimator}" in found.sentence


def test_without_a_score_shaping_may_explain_all_groups_but_not_one() -> None:
    rollouts = without(clean(), "score")
    for row in rows_of(rollouts, "group", "g2"):
        column(rollouts, "advantages")[trained(rollouts, row)] *= 1.3
    assert only(rollouts, "A316").severity == "error"
    column(rollouts, "advantages")[:] *= 1.3
    assert only(rollouts, "A316").severity == "warning"
    rollouts = without(clean(), "score")
    for row in rows_of(rollouts, "group", "g0"):
        column(rollouts, "advantages")[trained(rollouts, row)] = 0.07
    assert only(rollouts, "A312").severity == "warning"


@pytest.mark.parametrize(("ddof", "epsilon"), [(1, 1e-6), (0, 1e-4), (1, 1e-4), (0, 0.0)])
def test_every_form_of_the_group_std_is_known(ddof: int, epsilon: float) -> None:
    rollouts = clean()
    for group in range(1, 6):
        rows = rows_of(rollouts, "group", f"g{group}")
        rewards = rollouts.samples["reward"][rows]
        for row, a in zip(rows, (rewards - rewards.mean()) / (rewards.std(ddof=ddof) + epsilon), strict=True):
            column(rollouts, "advantages")[trained(rollouts, row)] = a
    assert codes(audit(rollouts)) == []


def test_half_precision_advantages_pass() -> None:
    rollouts = clean()
    bits = column(rollouts, "advantages").view(np.uint32)
    bits &= np.uint32(0xFFFF0000)  # bf16, cut off
    assert codes(audit(rollouts)) == []


def test_statistic_that_counts_each_turn_instead_of_each_episode() -> None:
    rollouts = clean(layout="steps")
    groups, rewards = rollouts.samples["group"], rollouts.samples["reward"]
    for group in dict.fromkeys(groups):
        rows = rows_of(rollouts, "group", group)
        for row, a in zip(rows, grpo(rewards[rows]), strict=True):  # [samples], not [episodes]
            column(rollouts, "advantages")[trained(rollouts, row)] = a
    assert "count an episode once" in only(rollouts, "A316").advice


def test_raw_rewards_as_advantages_are_called_so() -> None:
    rollouts = clean(estimator="dr-grpo")
    values = rollouts.samples["reward"][rollouts.tokens["mask"].row_of()] + 1
    rollouts.samples["reward"] += 1
    rollouts.samples["score"] += 1
    column(rollouts, "advantages")[column(rollouts, "mask")] = values[column(rollouts, "mask")]
    found = {f.code: f for f in audit(rollouts).findings}
    assert {"A312", "A315", "A316"} <= set(found) and "no baseline" in found["A316"].advice


def test_batch_that_was_not_whitened() -> None:
    rollouts = clean(estimator="reinforce++-baseline")
    column(rollouts, "advantages")[:] *= 1.2
    assert "std 1.2" in only(rollouts, "A316").sentence
    rollouts.declared["estimator"] = "reinforce++"
    reward = rollouts.samples["reward"]
    counts = [len(trained(rollouts, row)) for row in range(len(rollouts))]
    right = whiten([np.full(n, r) for n, r in zip(counts, reward, strict=True)])
    for row, values in enumerate(right):
        column(rollouts, "advantages")[trained(rollouts, row)] = values + 0.25
    assert "largest difference from the whitened rewards is 0.25" in only(rollouts, "A316").sentence


# --------------------------------------------------------------------------------------------------------- A4: rewards


def failed_row(rollouts: Rollouts) -> int:
    return int(np.flatnonzero(rollouts.samples["reward"] == 0)[1])


@pytest.mark.parametrize(("name", "text"), [("error", "tool server: 502"), ("outcome", "environment error")])
def test_one_crash_that_is_learnt_as_reward_zero(name: str, text: str) -> None:
    rollouts = clean()
    row = failed_row(rollouts)
    rollouts.samples[name][row] = text
    found = only(rollouts, "A401")
    assert found.severity == "error" and found.rows == (f"line {row + 1}: {text}",)


@pytest.mark.parametrize("text", ["Error executing tool: no route", "requests: Read timed out.", "Connection refused"])
def test_one_crash_that_stands_only_in_a_tool_message(text: str) -> None:
    rollouts = clean()
    row = failed_row(rollouts)
    quiet = [{"role": "user", "content": "go"}, {"role": "assistant", "content": f"I fear a {text}"}]
    rollouts.texts["messages"] = [quiet for _ in range(len(rollouts))]
    assert codes(audit(rollouts)) == []  # the policy may say so
    rollouts.texts["messages"][row] = [*quiet, {"role": "tool", "content": text}]
    found = only(rollouts, "A401")
    assert found.severity == "warning" and found.rows[0].startswith(f"line {row + 1}: ")
    rollouts.samples["reward"][row] = rollouts.samples["score"][row] = 1.0
    assert "A401" not in codes(audit(rollouts))  # it got over it


def test_traceback_that_ends_an_episode() -> None:
    rollouts = clean()
    row = failed_row(rollouts)
    crash = "Traceback (most recent call last):\n  File 'env.py', line 3\nKeyError: 'door'"
    rollouts.texts["completion"][row] += crash
    assert "traceback" in only(rollouts, "A401").sentence
    rollouts.texts["completion"][row] += "x" * 3000  # it went on
    assert codes(audit(rollouts)) == []


def test_error_that_is_not_trained_on_passes() -> None:
    rollouts = clean()
    row = failed_row(rollouts)
    rollouts.samples["outcome"][row] = "environment error"
    column(rollouts, "mask")[trained(rollouts, row)] = False
    assert codes(audit(rollouts)) == []


@pytest.mark.parametrize("outcome", ["", "failure"])
def test_one_cut_episode_that_is_learnt_as_a_failure(outcome: str) -> None:
    rollouts = clean()
    row = failed_row(rollouts)
    rollouts.samples["stop"][row], rollouts.samples["outcome"][row] = "length", outcome
    column(rollouts, "ids")[answer_ends(rollouts, row)[-1]] = 50
    assert only(rollouts, "A402").rows == (f"line {row + 1}",)
    rollouts.samples["outcome"][row] = "cut"
    assert codes(audit(rollouts)) == []


def test_cut_episode_shows_by_its_missing_end_token() -> None:
    rollouts = without(clean(), "stop")
    row = failed_row(rollouts)
    column(rollouts, "ids")[answer_ends(rollouts, row)[-1]] = 50
    assert only(rollouts, "A402").rows == (f"line {row + 1}",)


def test_one_reward_for_all() -> None:
    rollouts = clean()
    rollouts.samples["reward"][:] = rollouts.samples["score"][:] = 0
    rollouts.samples["outcome"][:] = "failure"
    credit(rollouts, "grpo")
    assert "the reward is 0 for all 24" in only(rollouts, "A403").sentence


def test_no_group_with_two_rewards() -> None:
    rollouts = clean()
    for name in ("reward", "score"):
        rollouts.samples[name] = np.array([float(g in ("g0", "g1")) for g in rollouts.samples["group"]])
    rollouts.samples["outcome"][:] = ""
    credit(rollouts, "grpo")
    found = only(rollouts, "A404")
    assert found.count == 6 and "2 the highest" in found.sentence


def test_one_reward_outside_the_range() -> None:
    rollouts = clean()
    rollouts.declared["reward_range"] = (0, 1)
    assert codes(audit(rollouts)) == []
    row = rows_of(rollouts, "reward", 1.0)[-1]
    rollouts.samples["reward"][row] = 1.2
    assert only(rollouts, "A405").rows == (f"line {row + 1}",)


def test_unknown_reward_with_an_advantage() -> None:
    rollouts = clean()
    row = failed_row(rollouts)
    rollouts.samples["reward"][row] = rollouts.samples["score"][row] = np.nan
    found = [f for f in audit(rollouts).findings if f.code == "A406"]
    assert found[0].rows == (f"line {row + 1}",)


def test_success_that_is_rewarded_less_than_a_failure() -> None:
    rollouts = clean()
    a, b = failed_row(rollouts), rows_of(rollouts, "reward", 1.0)[-1]
    rollouts.samples["outcome"][[a, b]] = "success", "failure"
    assert only(rollouts, "A407").rows == (f"line {a + 1}",)


# ------------------------------------------------------------------------------------------------- A5: prompts, tasks


def test_gold_answer_in_one_prompt() -> None:
    rollouts = clean()
    rollouts.texts["prompt"][9] += " (" + rollouts.texts["gold"][9] + ")"
    assert only(rollouts, "A501").rows == (f"line 10: {rollouts.texts['gold'][9]!r}",)


def test_gold_answer_must_stand_as_a_word_and_short_ones_are_a_note() -> None:
    rollouts = clean()
    rollouts.texts["gold"][9] = "key"
    assert [(f.code, f.severity) for f in audit(rollouts).findings] == [("A501", "note")]
    rollouts.texts["gold"][9] = "ke"
    rollouts.texts["gold"][8] = "fin"
    assert audit(rollouts).findings == []


def test_hint_in_a_prompt_of_evaluation() -> None:
    rollouts = clean()
    rollouts.declared["hints"] = ["the key is under"]
    rollouts.samples["split"][9:12] = "ood"
    rollouts.samples["task"][9:12] = "maze@1#77"
    rollouts.texts["prompt"][3] += ": the key is under the mat"  # training may be hinted
    assert "A501" not in codes(audit(rollouts))
    rollouts.texts["prompt"][10] += ": the key is under the mat"
    found = [f for f in audit(rollouts).findings if f.code == "A501"]
    assert found[0].severity == "error" and found[0].rows == ("line 11: 'the key is under'",)


@pytest.mark.parametrize("key", ["maze@1#3", "maze@2/iid/77#3"])
def test_one_task_of_evaluation_that_is_trained_on(key: str) -> None:
    evaluation = clean(groups=1, members=1, seed=5)
    evaluation.samples["split"][:] = "iid"
    both = joined(clean(), evaluation)
    both.samples["task"][-1], both.samples["group"][-1] = "maze@1#77", ""
    assert "A502" not in codes(audit(both))
    both.samples["task"][-1] = key
    found = [f for f in audit(both).findings if f.code == "A502"]
    assert found[0].count == 1 and found[0].rows == ("line 25",) and found[0].severity == "error"


def test_equal_prompts_of_different_tasks_do_not_overlap() -> None:
    both = joined(clean(), clean(groups=1, members=1, seed=5))
    both.samples["split"][-1], both.samples["task"][-1] = "iid", "maze@1#77"
    assert both.texts["prompt"][0] == both.texts["prompt"][-1]
    assert "A502" not in codes(audit(both))
    assert "A502" in codes(audit(without(both, "task")))


def stripped(rollouts: Rollouts, episodes: tuple[str, ...]) -> Rollouts:
    """Every answer of these episodes loses its first two tokens (its reasoning) once it is history."""
    names = list(rollouts.tokens)
    rows = {name: [rollouts.tokens[name].row(i) for i in range(len(rollouts))] for name in names}
    for episode in episodes:
        for row in rows_of(rollouts, "rollout", episode):
            flags = rollouts.tokens["sampled"].row(row) & ~rollouts.tokens["mask"].row(row)
            starts = np.flatnonzero(flags & ~np.append(False, flags[:-1]))
            gone = np.concatenate([starts, starts + 1])
            for name in names:
                rows[name][row] = np.delete(rows[name][row], gone)
    rollouts.tokens = {name: Ragged.of(rows[name], rollouts.tokens[name].values.dtype) for name in names}
    return rollouts


def test_history_that_one_episode_rewrites() -> None:
    rollouts = stripped(clean(layout="steps"), ("2.1",))
    rows = rows_of(rollouts, "rollout", "2.1")
    found = only(rollouts, "A503")
    assert found.count == len(rows) - 1 and found.rows[0] == f"line {rows[1] + 1}"
    assert f"1 rollouts became {len(rows)} samples, with {len(rows) - 1} forks" in found.sentence
    assert "the answer itself was changed" in found.advice


def test_one_fork_of_an_episode_is_a_note() -> None:
    rollouts = stripped(clean(turns=2, layout="steps"), ("3.0",))
    assert len(rows_of(rollouts, "rollout", "3.0")) == 2
    assert [(f.code, f.severity) for f in audit(rollouts).findings] == [("A503", "note")]


def test_two_start_tokens() -> None:
    rollouts = clean()
    column(rollouts, "ids")[rollouts.tokens["ids"].offsets[4] + 1] = 1
    without(rollouts, "task", "prompt")
    assert "A504" not in codes(audit(rollouts))  # one sample may begin so by chance
    every = clean()
    column(every, "ids")[every.tokens["ids"].offsets[:-1] + 1] = 1
    assert [(f.severity, f.count) for f in audit(every).findings if f.code == "A504"] == [("note", 24)]
    rollouts.declared["bos_id"] = 1
    assert [f.rows for f in audit(rollouts).findings if f.code == "A504"] == [("line 5",)]


# --------------------------------------------------------------------------------------------- A6: numbers and weights


@pytest.mark.parametrize("name", ["logprobs", "trainer_logprobs", "advantages", "weights"])
def test_one_infinite_number(name: str) -> None:
    rollouts = clean()
    column(rollouts, name)[trained(rollouts, 7)[0]] = -np.inf
    found = [f for f in audit(rollouts).findings if f.code == "A601"]
    assert found[0].rows[0].startswith("line 8, token ") and found[0].severity == "error"


@pytest.mark.parametrize("name", ["advantages", "weights"])
def test_one_trained_token_without_a_number(name: str) -> None:
    rollouts = clean()
    column(rollouts, name)[trained(rollouts, 7)[0]] = np.nan
    assert only(rollouts, "A601").rows[0].startswith("line 8, token ")
    rollouts = clean()
    column(rollouts, name)[trained(rollouts, 7)] = np.nan  # all of a sample: std of a group of one
    assert only(rollouts, "A601").count == len(trained(rollouts, 7))
    rollouts.samples["outcome"][7] = "environment error"  # none on purpose
    rollouts.samples["reward"][7] = rollouts.samples["score"][7] = np.nan
    assert "A601" not in codes(audit(rollouts))


def test_infinite_reward() -> None:
    rollouts = clean()
    rollouts.samples["reward"][3] = np.inf
    assert "A601" in codes(audit(rollouts))


def test_one_id_that_is_no_token() -> None:
    rollouts = clean()
    rollouts.declared["vocabulary"] = 500
    assert codes(audit(rollouts)) == []
    at = trained(rollouts, 2)[0]
    column(rollouts, "ids")[at] = 500
    assert only(rollouts, "A602").rows[0].endswith("(id 500)")
    column(rollouts, "ids")[at] = -100
    assert "ignore" in only(without(rollouts, "vocabulary"), "A602").advice


def padded(rollouts: Rollouts, batch: int = 4) -> Rollouts:
    """Micro-batches of `batch` samples, padded to their longest."""
    lengths = rollouts.tokens["ids"].lengths
    widths = np.array([lengths[i - i % batch : i - i % batch + batch].max() for i in range(len(lengths))])
    rollouts.samples["padded"] = widths - lengths
    return rollouts


def weigh(rollouts: Rollouts, per_sample: Any) -> None:
    mask = rollouts.tokens["mask"]
    column(rollouts, "weights")[:] = np.where(mask.values, np.asarray(per_sample)[mask.row_of()], np.nan)


def test_weights_that_go_with_the_padded_width() -> None:
    rollouts = without(padded(clean()), "denominator")
    lengths, tokens = rollouts.tokens["ids"].lengths, rollouts.tokens["mask"]
    widths = lengths + rollouts.samples["padded"]
    counts = np.bincount(tokens.row_of(), tokens.values)
    for right in (np.full(len(rollouts), 0.01), 1 / counts, 1 / (counts * 24)):
        weigh(rollouts, right)
        assert codes(audit(rollouts)) == []
    weigh(rollouts, 1 / widths)
    found = only(rollouts, "A603")
    assert f"at width {widths.max()}" in found.sentence and found.severity == "error"


def test_equal_answers_whose_weights_go_with_the_width() -> None:
    rollouts = without(clean(), "denominator", "advantages")
    row, n = int(rows_of(rollouts, "rollout", "1.0")[0]), len(rollouts)
    rollouts = subset(rollouts, [row, row, row, *range(n)])  # one answer in three batches, the others as they may be
    lengths = rollouts.tokens["ids"].lengths
    rollouts.samples["padded"] = np.array([0, 40, 90, *[7] * n])
    widths = lengths + rollouts.samples["padded"]
    counts = np.bincount(rollouts.tokens["mask"].row_of(), rollouts.tokens["mask"].values)
    weigh(rollouts, 1 / counts**2)
    assert "A603" not in codes(audit(rollouts))
    weigh(rollouts, 1 / (widths * counts))
    assert "A603" in codes(audit(rollouts))
    uneven = 1 / (widths * counts)
    uneven[1] *= 1.1
    weigh(rollouts, uneven)
    assert "A603" not in codes(audit(rollouts))


def test_one_sample_that_weighs_otherwise_than_the_declared_denominator() -> None:
    rollouts = clean()
    column(rollouts, "weights")[trained(rollouts, 7)] *= 2
    found = only(rollouts, "A604")
    assert found.rows == ("line 8",) and "up to 2" in found.sentence


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_each_declared_denominator_pass(layout: str) -> None:
    rollouts = clean(layout=layout)
    counts = np.bincount(rollouts.tokens["mask"].row_of(), rollouts.tokens["mask"].values)
    names = rollouts.samples["rollout"]
    episode = np.array([counts[names == name].sum() for name in names])
    for name, right in (("sequence", 1 / counts), ("episode", 1 / episode), ("constant", np.full(len(counts), 0.01))):
        rollouts.declared["denominator"] = name
        weigh(rollouts, right)
        assert "A604" not in codes(audit(rollouts)), name
    rollouts.declared["denominator"] = "episode"
    assert "A604" in codes(audit(rollouts))


def test_episode_that_holds_several_times_its_share_is_a_note() -> None:
    rollouts = without(clean(), "denominator")
    weigh(rollouts, np.where(np.arange(24) == 20, 1.0, 0.01))
    [found] = [f for f in audit(rollouts).findings if f.code == "A605"]
    assert (found.severity, found.rows[0]) == ("note", "line 21")


def test_shares_of_the_gradient_are_those_of_weight_times_advantage() -> None:
    rollouts = clean(layout="steps")
    report = audit(rollouts)
    size = np.nan_to_num(np.abs(column(rollouts, "weights") * column(rollouts, "advantages")))
    row_of = rollouts.tokens["ids"].row_of()
    names = rollouts.samples["rollout"]
    share = {name: size[np.isin(row_of, np.flatnonzero(names == name))].sum() / size.sum() for name in set(names)}
    top = report.counts["longest"]
    assert [entry["share"] for entry in top] == pytest.approx(sorted(share.values(), reverse=True)[:5], rel=1e-5)
    assert report.counts["trained_tokens"] == column(rollouts, "mask").sum()
    assert (report.counts["episodes"], report.counts["groups"]) == (24, 6)


# ------------------------------------------------------------------------------------------------ the audit as a whole


def test_errors_come_first_and_make_the_report_unsound() -> None:
    rollouts = clean()
    rollouts.texts["prompt"][9] += " (" + rollouts.texts["gold"][9] + ")"
    assert audit(rollouts).sound
    column(rollouts, "logprobs")[trained(rollouts, 9)[4]] = 0.7
    report = audit(rollouts)
    assert [f.severity for f in report.findings] == ["error", "warning"] and not report.sound


def test_codes_are_chosen_by_code_theme_or_name() -> None:
    assert select(["A1"]) == [code for code in CHECKS if code.startswith("A1")]
    assert select(["group-size", "a101"]) == ["A101", "A303"]
    assert audit(clean(), ["A101"]).ran == ["A101"]
    with pytest.raises(UserError, match="no check 'A999'"):
        select(["A999"])


def test_column_of_the_wrong_length_is_a_mistake_of_the_user() -> None:
    rollouts = clean()
    rollouts.samples["reward"] = np.zeros(3)
    with pytest.raises(UserError, match="'reward' has 3 rows, but there are 24"):
        audit(rollouts)


@pytest.mark.parametrize(("name", "value"), [
    ("top_p", "0.9"), ("top_k", [3]), ("rollouts_per_task", 2.5), ("vocabulary", True), ("reward_range", [1]),
    ("reward_range", "x"), ("end_ids", "a"), ("end_ids", [2, None]), ("hints", 5), ("estimator", ["grpo"]), ("bos_id", {}),
])  # fmt: skip
def test_what_is_declared_in_the_wrong_type_is_said_in_one_sentence(name: str, value: Any) -> None:
    rollouts = clean(groups=2)
    rollouts.declared[name] = value
    with pytest.raises(UserError, match=f"rollouts.jsonl: declared {name}: expected .*, found "):
        audit(rollouts)


def test_one_end_id_or_several_may_be_declared() -> None:
    for value in (2, [2], (2, 3), np.int64(2)):
        rollouts = clean(groups=2)
        rollouts.declared["end_ids"] = value
        assert 2 in Sheet(rollouts).end_ids


def test_checks_change_no_column() -> None:
    rollouts, again = clean(), clean()
    audit(rollouts, decode=lambda ids: str(ids), encode=lambda text: [1], score=lambda r: r.tokens["logprobs"])
    for name, value in again.tokens.items():
        np.testing.assert_array_equal(rollouts.tokens[name].values, value.values)


FUZZED = ("ids", "mask", "sampled", "attention", "logprobs", "trainer_logprobs", "advantages", "weights")


@pytest.mark.parametrize("seed", range(150))
def test_no_combination_of_columns_and_values_breaks_a_check(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 7))
    lengths = rng.integers(0, 5, n)
    rollouts = Rollouts("x", "t", [f"line {i}" for i in range(n)])
    strange = np.array([0.0, 0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 1e30])
    for name in rng.permutation(FUZZED)[: rng.integers(0, 9)].tolist():
        crooked = rng.random() < 0.1
        sizes = lengths + rng.integers(0, 2, n) if crooked else lengths
        if name == "ids":
            rollouts.tokens[name] = Ragged.of([rng.integers(-1, 4, k) for k in sizes], np.int32)
        elif name in ("mask", "sampled", "attention"):
            rollouts.tokens[name] = Ragged.of([rng.random(k) < 0.6 for k in sizes], bool)
        else:
            rollouts.tokens[name] = Ragged.of([rng.choice(strange, k) for k in sizes], np.float32)
    words = {
        "group": ["", "a", "b"], "task": ["", "e@1/train/3#h", "#", "b"], "split": ["", "train", "iid"],
        "rollout": ["", "x", "y"], "outcome": ["", "success", "failure", "cut", "environment error"],
        "stop": ["", "stop", "length"], "error": ["", "it broke"],
    }  # fmt: skip
    numbers = {"reward": strange, "score": strange, "turn": [-1, 0, 1], "version": [-1, 0, 3], "padded": [0, 2]}
    for name, values in {**words, **numbers}.items():
        if rng.random() < 0.6:
            kind = object if name in words else float if name in ("reward", "score") else np.int64
            rollouts.samples[name] = np.array(rng.choice(np.array(values), n).tolist(), kind)
    for name in ("prompt", "completion", "gold"):
        if rng.random() < 0.5:
            rollouts.texts[name] = rng.choice(np.array(["", "a key here", "timed out", "key here", None]), n).tolist()
    if rng.random() < 0.5:
        rollouts.texts["messages"] = [
            None if rng.random() < 0.3 else [{"role": "tool", "content": None}] for _ in range(n)
        ]
    said = {
        "estimator": ["grpo", "GRPO", "rloo", "gae", "reinforce++", "own"], "top_p": [0.9], "top_k": [-1, 5],
        "rollouts_per_task": [1, 2], "reward_range": [(0, 1)], "vocabulary": [3], "end_ids": [[2], 2], "bos_id": [1],
        "denominator": ["token", "episode", "sequence", "x"], "hints": ["key"], "temperature": [0.0, 1.0],
    }  # fmt: skip
    for name, choices in said.items():
        if rng.random() < 0.3:
            rollouts.declared[name] = choices[int(rng.integers(len(choices)))]
    report = audit(rollouts)
    assert set(report.ran) | set(report.skipped) == set(CHECKS)
    assert all(f.sentence and f.count > 0 and f.severity in ("error", "warning", "note") for f in report.findings)


def test_rows_and_runs_are_reduced_as_a_loop_would() -> None:
    rng = np.random.default_rng(3)
    ragged = Ragged.of([rng.normal(size=n) for n in (0, 3, 0, 0, 5, 1, 0)], np.float64)
    expected = [ragged.row(i).sum() if len(ragged.row(i)) else -7 for i in range(7)]
    np.testing.assert_allclose(reduce_rows(np.add, ragged.values, ragged.offsets, -7.0), expected)
    flags = rng.random(12) < 0.5
    start, end = np.array([0, 4, 5, 9]), np.array([2, 5, 9, 12])
    assert reduce_runs(flags, start, end).tolist() == [flags[a:b].sum() for a, b in zip(start, end, strict=True)]


def test_end_id_is_what_ends_most_answers_and_stands_nowhere_else() -> None:
    rollouts = clean()
    assert Sheet(rollouts).end_ids == {END}
    for row in range(len(rollouts)):  # a token that often comes last is none
        column(rollouts, "ids")[trained(rollouts, row)[0]] = END
    assert Sheet(rollouts).end_ids == set()
    rollouts.declared["end_ids"] = [5, 6]
    assert Sheet(rollouts).end_ids == {5, 6}


def test_unknown_groups_are_no_group() -> None:
    for unknown in (-1, ""):
        codes_, names = factorise([7, unknown, 8, 7])
        assert codes_.tolist() == [0, -1, 1, 0] and names == [7, 8]


def test_answers_are_the_runs_of_sampled_tokens_and_end_with_their_sample() -> None:
    flags = [[True, True, False, True], [True], [], [False, True]]
    rollouts = Rollouts("x", "t", list("abcd"), {"sampled": Ragged.of(flags, bool)})
    answers = Sheet(rollouts).answers
    assert (answers.start.tolist(), answers.end.tolist()) == ([0, 3, 4, 6], [2, 4, 5, 7])
    assert answers.row.tolist() == [0, 0, 1, 3]


# -------------------------------------------------------------------------------------------------------------- parts


def answer_start(rollouts: Rollouts, row: int) -> int:
    """Flat position of the first trained token of a sample."""
    return int(trained(rollouts, row)[0])


def subset(rollouts: Rollouts, rows: Any) -> Rollouts:
    """Some samples, in this order, as a file of their own."""
    rows = np.flatnonzero(rows) if np.asarray(rows).dtype == bool else np.asarray(rows)
    return Rollouts(
        rollouts.source,
        rollouts.format,
        [rollouts.where[i] for i in rows],
        {name: Ragged.of([c.row(i) for i in rows], c.values.dtype) for name, c in rollouts.tokens.items()},
        {name: values[rows].copy() for name, values in rollouts.samples.items()},
        {name: [values[i] for i in rows] for name, values in rollouts.texts.items()},
        dict(rollouts.declared),
    )


def joined(a: Rollouts, b: Rollouts) -> Rollouts:
    """Both files in one."""
    both = [(a, i) for i in range(len(a))] + [(b, i) for i in range(len(b))]
    return Rollouts(
        a.source,
        a.format,
        [f"line {k + 1}" for k in range(len(both))],
        {n: Ragged.of([r.tokens[n].row(i) for r, i in both], c.values.dtype) for n, c in a.tokens.items()},
        {n: np.concatenate([a.samples[n], b.samples[n]]) for n in a.samples},
        {n: [*a.texts[n], *b.texts[n]] for n in a.texts},
        dict(a.declared),
    )
