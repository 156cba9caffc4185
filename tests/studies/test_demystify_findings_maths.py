"""Verdicts of the maths cells, from rows made by hand."""

from typing import Any

import pytest

from assay.studies.demystify.figures import figures
from assay.studies.demystify.findings_maths import findings
from assay.studies.demystify.study import MATHS, PLAIN
from assay.studies.grid import Row

PAPER = {
    ("base", "sparse"): 0.1, ("base", "dense"): 0.9, ("sft+", "sparse"): 0.9, ("sft+", "dense"): 0.95,
    ("sft-", "sparse"): 0.0, ("sft-", "dense"): 0.0,
}  # fmt: skip


def rows(after: dict[tuple[str, str], float], seeds: int = 3, worked: float = -20.0) -> list[Row]:
    def seen(right: float, log_p: float) -> dict[str, Any]:
        return {"inside": {"exact": right}, "log_p": log_p}

    found = []
    for (start, reward), right in after.items():
        for seed in range(seeds):
            settings = PLAIN | MATHS | {"start": start, "reward": reward}
            result = {
                "before": seen(0.0, -10.0), "after": seen(right * (1 - 0.01 * seed), worked - seed),
                "curves": {"success": [0.0, right]},
            }  # fmt: skip
            found.append({"name": "x", "seed": seed, "settings": settings, "seconds": 1.0, "result": result})
    return found


def verdicts(own: list[Row]) -> dict[str, str]:
    return {finding.name.removeprefix("maths, "): finding.verdict for finding in findings(own)}


def test_rows_like_the_papers_make_every_claim_hold() -> None:
    assert set(verdicts(rows(PAPER)).values()) == {"holds"} and len(findings(rows(PAPER))) == 5
    sentence = findings(rows(PAPER))[0].sentence
    assert "+0.891" in sentence and "3 seeds" in sentence  # .9 x .99 in the middle
    lines = findings(rows(PAPER))[0].table
    assert [line["after"] for line in lines[:2]] == pytest.approx([0.099, 0.891])


def test_the_opposite_is_said_to_be_so_and_one_seed_claims_nothing() -> None:
    opposite = PAPER | {
        ("base", "sparse"): 0.95, ("base", "dense"): 0.5, ("sft-", "sparse"): 0.03, ("sft-", "dense"): 0.2,
    }  # fmt: skip
    assert verdicts(rows(opposite, worked=-1.0)) == {
        "coverage": "holds", "crushed prior, sparse": "does not hold", "crushed prior, dense": "does not hold",
        "milestones lift base": "reversed", "the way to the answer": "reversed",
    }  # fmt: skip
    assert set(verdicts(rows(PAPER, seeds=1)).values()) == {"no claim"}
    assert findings([]) == []


def test_the_figure_has_a_curve_for_each_start_and_reward() -> None:
    figure, caption = figures(rows(PAPER))["maths"]
    assert [len(axis.lines) for axis in figure.axes[:3]] == [2, 2, 2] and "milestones" in caption
