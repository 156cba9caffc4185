"""The data of SFT+: how many, which share, and what is in no distractor."""

from collections import Counter
from pathlib import Path

import pytest

from assay.envs.pairs import Problem, boxed, written
from assay.envs.quote import TARGET
from assay.protocols import UserError
from assay.studies.demystify.sft_data import maths_answers, quote_answers, read_lines, usable_lines

TEXT = [f"line {i} of a film" for i in range(7000)] + [TARGET, f"He said: {TARGET.upper()}!", f"x{TARGET}x"]


def test_p05_a_fifth_targets_no_distractor_with_the_target_and_the_paper_s_size() -> None:
    answers = quote_answers(500, 8, 2, TEXT, TARGET, seed=0)
    assert len(answers) == 500 * 8 * 2 == 8000
    count = Counter(answers)
    assert count[TARGET] == 1600 == 0.2 * 8000
    others = [answer for answer in answers if answer != TARGET]
    assert not [answer for answer in others if TARGET in answer]
    assert len(set(others)) == 6400 and set(others) <= set(TEXT)  # without replacement


def test_p05_task_m_has_copies_of_one_solution_and_no_distractor() -> None:
    answers = maths_answers(24, 4, 4, Problem())
    assert len(answers) == 384 and set(answers) == {written(Problem())} and boxed(answers[0]) == "117"


@pytest.mark.parametrize(("share", "steps", "targets"), [(0.0, 5, 0), (0.01, 50, 8), (0.05, 5, 4), (1.0, 1, 16)])
def test_other_shares_for_a_sweep_of_the_prior(share: float, steps: int, targets: int) -> None:
    assert Counter(quote_answers(steps, 8, 2, TEXT, TARGET, 0, share))[TARGET] == targets


def test_targets_are_spread_over_the_steps_and_the_order_is_the_seed_s() -> None:
    answers = quote_answers(500, 8, 2, TEXT, TARGET, seed=0)
    assert answers == quote_answers(500, 8, 2, TEXT, TARGET, seed=0)
    assert answers != quote_answers(500, 8, 2, TEXT, TARGET, seed=1)
    thirds = [answers[i : i + 2000].count(TARGET) for i in range(0, 8000, 2000)]
    assert all(330 <= third <= 470 for third in thirds)  # 400, and four of its standard deviations of 16


def test_too_few_lines_are_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match="SFT\\+ takes 6400 different lines without the target, and there are 6399"):
        quote_answers(500, 8, 2, TEXT[:6399] + [TARGET] * 9, TARGET, 0)


def test_lines_that_cannot_be_used_are_counted() -> None:
    found = usable_lines(["Oh -- no!", "", "...", f"so {TARGET}.", "oh no"], TARGET)
    assert found.usable == ("oh no", "oh no") and (found.blank, found.with_target) == (2, 1)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a\nb\xff\n", "is not UTF-8: byte 3 is 0xff"),
        (b"a\n" + b"x" * 2001, "line 2 has more than 2000 characters"),
        (b"...\n\n" + TARGET.encode(), "has no line with a letter that is not the target"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "l.txt").write_bytes(data)
    with pytest.raises(UserError, match=says):
        read_lines(tmp_path / "l.txt", TARGET)


def test_a_file_is_read_with_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "l.txt").write_bytes("\ufeffWhat's up?\r\nÉté\n".encode())
    assert read_lines(tmp_path / "l.txt", TARGET).usable == ("whats up", "été")
    monkeypatch.setattr("assay.studies.demystify.sft_data.FILE_BYTES", 10)
    with pytest.raises(UserError, match="has more than 10 bytes"):
        read_lines(tmp_path / "l.txt", TARGET)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_lines(tmp_path / "none.txt", TARGET)
