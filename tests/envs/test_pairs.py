"""Pairs: counts by brute force over the whole square, rewards by hand, then the environment."""

import itertools

import numpy as np
import pytest

from assay.envs.inline import Inline
from assay.envs.pairs import (
    Pairs,
    Problem,
    boxed,
    milestone_reward,
    milestones,
    solution,
    solutions,
    sparse_reward,
    written,
)
from assay.envs.registry import make
from assay.protocols import Env, Reset, Restore, Snapshot, Step, UserError

RIGHT = "3 2 4 3;33 25;67 51;1;\\boxed{117}"
ALL, NONE = (True,) * 5, (False,) * 5


def by_force(a: int, b: int, c: int, n: int) -> int:
    """Solutions of a x^2 + b x y + c y^2 = 0, every pair of the square tried."""
    x, y = np.meshgrid(np.arange(-n, n + 1), np.arange(-n, n + 1))
    return int(np.count_nonzero(a * x * x + b * x * y + c * y * y == 0))


# --------------------------------------------------------------------------------------------------- the problem


def test_the_paper_s_problem_is_the_default() -> None:
    problem = Problem()
    assert problem.coefficients == (12, -1, -6) and problem.equation == "12x^2 - xy - 6y^2 = 0"
    assert problem.bounds == (33, 25) and problem.counts == (67, 51)
    assert problem.answer == 117 == by_force(12, -1, -6, 100)
    assert solution(problem) == RIGHT and problem.short == "12 -1 -6 100"


def test_counts_are_those_of_every_pair_tried() -> None:
    tried = 0
    for p, q, r, s in itertools.product((-3, 0, 1, 2), (-1, 2, 5), (-4, 1, 3), (0, 1, 7)):
        for n in (1, 4, 23):
            try:
                problem = Problem(p, q, r, s, n)
            except UserError:
                continue
            tried += 1
            assert problem.answer == by_force(*problem.coefficients, n), problem
    assert tried > 100


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((2, 4, 4, 3, 9), "no common factor"),
        ((0, 0, 4, 3, 9), "no common factor"),
        ((3, 2, 3, -2, 9), "same line"),
        ((3, 2, -3, 2, 9), "same line"),
        ((100, 1, 1, 1, 9), "p is 100; it must be -99 to 99"),
        ((1, 1, 1, 1, 0), "n is 0; it must be 1 to 10000"),
    ],
)
def test_what_is_no_problem_is_refused(values: tuple[int, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Problem(*values)


def test_forms_are_written_as_people_write_them() -> None:
    assert Problem(1, 1, 1, 1, 5).equation == "x^2 - y^2 = 0"
    assert Problem(0, 1, 1, 0, 5).equation == "xy = 0"
    assert Problem(-1, 2, 1, 3, 5).equation == "-x^2 + 5xy - 6y^2 = 0"


# ------------------------------------------------------------------------------------------------ parsing, rewards


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{117}", "117"),
        ("\\boxed{1} then \\boxed{ 117 }.", "117"),
        ("\\boxed{117} \\boxed{\\frac{1}{2}}", "117"),  # braces inside: not one that can be read
        ("\\boxed{\\frac{1}{2}}", ""),
        ("\\boxed{11", ""),
        ("\\boxed{}", ""),
        ("boxed{117}", None),
        ("117", None),
        ("", None),
    ],
)
def test_the_last_box_without_braces_counts(text: str, content: str | None) -> None:
    assert boxed(text) == content
    assert sparse_reward(text, Problem()) == float(content == "117")


def test_p04_the_dense_reward_line_by_line() -> None:
    assert milestone_reward(ALL, "116", 117) == 0.60
    assert milestone_reward(ALL, None, 117) == 0.10
    assert milestone_reward(NONE, "118", 117) == 0.60
    for reached in itertools.product((False, True), repeat=5):
        assert milestone_reward(reached, "117", 117) == 1.0
    # the fifth line, a judge that fails, is in tests/studies/test_demystify_judge.py


def test_milestones_are_worth_their_weights_and_a_missing_box_costs_a_half() -> None:
    for i, worth in enumerate((0.05, 0.05, 0.10, 0.15, 0.25)):
        one = tuple(j == i for j in range(5))
        assert milestone_reward(one, "", 117) == worth and milestone_reward(one, None, 117) == 0.0
    assert milestone_reward((False, False, True, True, True), "0", 117) == 0.5


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        (RIGHT, ALL),
        ("4 -3 3 -2;25 33;51 67;1;", ALL),  # the other factor first
        ("6 4 -4 -3;33 25;67 51;1", ALL),  # common factors
        (" 3 2 4 3 ; 33 25 ; 67 51 ; 1 ; \\boxed{117}", ALL),
        ("3 2 3 2;33 25;67 51;1;", (True, False, True, True, True)),
        ("3 2 3 -2;33 25;67 51;1;", (True, False, True, True, True)),  # one line twice is one factor
        ("0 0 4 3;33 33;0 51;2;", (True, False, False, True, False)),
        ("2 3 3 4;25 25;66 50;01 0;", NONE),
        ("3 2 4 3 1;33;67;1 1", NONE),
        ("3  2 4 3;33,25;67 +51;one", NONE),
        ("so 3 2 4 3;33 25", (False, False, True, False, False)),
        ("", NONE),
        (";;;;;;", NONE),
        ("9999999 2 4 3;٣٣ 25", NONE),
    ],
)
def test_the_strict_language_is_read_part_by_part(text: str, reached: tuple[bool, ...]) -> None:
    assert milestones(text, Problem()) == reached


# --------------------------------------------------------------------------------------------------- other problems


def test_pretraining_text_is_right_but_for_its_share_of_mistakes_and_never_of_the_task_itself() -> None:
    draw = np.random.default_rng(0)
    found = solutions(draw, 3000, 0.25)
    assert len(found) == 3000
    wrong = 0
    for problem, text in found[:150]:
        truth = by_force(*problem.coefficients, problem.n)
        mistake = boxed(text) != str(truth)
        wrong += mistake
        assert milestones(text, problem) == (True, True, True, True, not mistake)
        assert not mistake or boxed(text) == str(truth + 1)
        assert milestone_reward(milestones(text, problem), boxed(text), truth) == (0.6 if mistake else 1.0)
    assert 0.25 * 150 - 20 < wrong < 0.25 * 150 + 20  # four standard deviations
    spelt = {tuple(sorted((problem.coefficients, tuple(-i for i in problem.coefficients)))) for problem, _ in found}
    assert len(spelt) > 300
    own = {(12, -1, -6), (-12, 1, 6)}
    assert not [problem for problem, _ in found if problem.coefficients in own and problem.n == 100]
    assert max(len(text) for _, text in found) <= 40 and set("".join(text for _, text in found)) <= set(
        "0123456789 ;\\{}boxed"
    )


def test_the_task_can_be_another_problem_which_is_then_left_out() -> None:
    usual = solutions(np.random.default_rng(1), 1000)
    left_out, _ = usual[5]
    found = solutions(np.random.default_rng(1), 999, other_than=left_out)
    assert found == [(problem, text) for problem, text in usual if problem != left_out][:999]
    mirrored = Problem(-left_out.p, -left_out.q, left_out.r, left_out.s, left_out.n)  # the same pairs, another spelling
    assert solutions(np.random.default_rng(1), 999, other_than=mirrored) == found


def test_same_generator_same_solutions() -> None:
    assert solutions(np.random.default_rng(3), 20, 0.5) == solutions(np.random.default_rng(3), 20, 0.5)


def test_the_written_solution_ends_in_the_answer_and_says_each_step() -> None:
    text = written(Problem())
    assert text.endswith("\n\\boxed{117}") and sparse_reward(text, Problem()) == 1.0
    for step in ("(3x + 2y)(4x - 3y)", "(2k, -3k)", "(3k, 4k)", "|k| <= 33", "|k| <= 25", "67 + 51 - 1 = 117"):
        assert step in text


# ----------------------------------------------------------------------------------------------------- environment


def test_one_turn_in_words_ends_the_episode() -> None:
    env = make("pairs")
    assert isinstance(env, Env)
    observation, info = env.reset(options={"task": 3, "split": "iid"})
    assert "12x^2 - xy - 6y^2 = 0" in info["goal"] and info["horizon"] == 1 and observation
    assert "117" not in info["goal"] + env.instructions + observation and "\\boxed{}" in env.instructions
    *_, reward, terminated, truncated, info = env.step(env.expert())
    assert (reward, terminated, truncated) == (1.0, True, False) and info["success"] and info["valid"]
    for call in (lambda: env.step("again"), env.expert):
        with pytest.raises(UserError, match="no episode is running"):
            call()


@pytest.mark.parametrize(
    ("answer", "sparse", "dense", "valid"),
    [
        (RIGHT, 1.0, 1.0, True),
        ("3 2 4 3;33 25;67 51;0;\\boxed{118}", 0.0, 0.6, True),
        ("3 2 4 3;33 25;67 51;1;\\boxed{116}", 0.0, 0.6, True),
        ("3 2 4 3;33 25;67 51;1;", 0.0, 0.1, False),
        ("3 2 4 3;33 25;", 0.0, 0.0, False),
        ("3 2 4 3;33 25;\\boxed{1}", 0.0, 0.2, True),
        ("words and \\boxed{1}", 0.0, 0.0, True),
        ("3 2 4 3;33 25;67 51;1;\\boxed{}", 0.0, 0.6, False),
        ("", 0.0, 0.0, False),
    ],
)
def test_both_rewards_of_an_answer_in_the_strict_language(
    answer: str, sparse: float, dense: float, valid: bool
) -> None:
    for kind, worth in (("sparse", sparse), ("milestones", dense)):
        env = Pairs(reward=kind, form="short")
        env.reset(options={"task": 0})
        _, reward, _, _, info = env.step(answer)
        assert (reward, info["valid"], info["success"]) == (worth, valid, sparse == 1.0)


def test_the_short_form_asks_for_what_it_checks() -> None:
    env = Pairs(form="short")
    assert env.reset(options={"task": 0})[1]["goal"] == "12 -1 -6 100"
    assert env.expert() == RIGHT and env.brief == "pairs" and "p q r s;K L;A B;o;\\boxed{answer}" in env.instructions


def test_evidence_shows_the_milestones() -> None:
    env = Pairs()
    with pytest.raises(UserError, match="no episode has begun"):
        env.evidence()
    env.reset(options={"task": 0})
    env.step("3 2 4 3;33 25;67 51;0;\\boxed{118}")
    found = env.evidence()
    assert [check["passed"] for check in found["checks"]] == [False, True, True, True, True, False]
    assert found["gold"] == ["\\boxed{117}"] and found["checks"][0]["value"] == "118"


def test_splits_play_one_problem_and_their_hashes_differ() -> None:
    env = Pairs()
    seen = {split: env.reset(options={"task": 5, "split": split})[1] for split in ("train", "iid", "ood")}
    assert len({info["goal"] for info in seen.values()}) == 1 and len({info["hash"] for info in seen.values()}) == 3
    assert env.size("train") is None
    versions = {Pairs().version, Pairs(n=99).version, Pairs(reward="milestones").version, Pairs(form="short").version}
    assert len(versions) == 4


def test_it_runs_as_environments_do_with_snapshot_and_restore() -> None:
    with Inline("pairs", {"form": "short", "n": 10}) as pool:
        pool.submit(0, Reset("train", 1))
        pool.collect([0])
        pool.submit(0, Snapshot())
        (handle,) = pool.collect([0])
        answers = []
        for _ in range(2):
            pool.submit(0, Step(solution(Problem(n=10))))
            answers += pool.collect([0])
            pool.submit(0, Restore(handle))
            pool.collect([0])
    assert answers[0] == answers[1] and answers[0].reward == 1.0 and not answers[0].error


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reward": "dense"}, "one of sparse, milestones"),
        ({"form": "long"}, "one of words, short"),
        ({"p": 2}, "no common factor"),
    ],
)
def test_settings_out_of_range_are_the_users_error(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make("pairs", **settings)


@pytest.mark.parametrize("options", [{"task": -1}, {"task": 1 << 31}, {"split": "test", "task": 0}])
def test_tasks_out_of_range_are_the_users_error(options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Pairs().reset(options=options)
