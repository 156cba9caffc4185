"""Verdicts, from rows made by hand."""

import math
from typing import Any

import pytest

from assay.studies.demystify import findings as rules
from assay.studies.demystify.figures import figures
from assay.studies.demystify.findings import findings
from assay.studies.demystify.study import PLAIN, RANDOM, tiny_cells
from assay.studies.grid import Finding, Row

SEEDS = 5


def row(seed: int, before: float, after: float, played: int = 3072, hit: int | None = 1, **settings: Any) -> Row:
    def seen(p: float, name: str) -> dict[str, Any]:
        heat = settings.get("heats", {}).get(name, 1.5)
        return {
            "log_p": math.log(p), "log_p_training": math.log(p), "log_p_cold": math.log(p),
            "inside": {"entropy": heat, "similarity": 0.5}, "outside": {"entropy": 1.0},
            "reading": {"nats": 1.0, "accuracy": settings.get("right", {}).get(name, 0.5)},
        }  # fmt: skip

    curves = {"log_p": [math.log(before), math.log(after)], "entropy": [1.0], "clipped": [0.1], "success": [0.0]}
    result = {
        "before": seen(before, "before"), "after": seen(after, "after"), "played": played, "first_hit": hit,
        "curves": curves, "probe": {"at": [0, 1], "outside": [1.0, 1.1]},
    }  # fmt: skip
    own = {key: value for key, value in settings.items() if key not in ("heats", "right")}
    return {"name": "x", "seed": seed, "settings": PLAIN | own, "seconds": 1.0, "result": result}


def grid(after: dict[tuple[str, str], float], **more: Any) -> list[Row]:
    """The matrix with these probabilities after RL, a little different from seed to seed."""
    before = {"sft+": 0.1, "base": 1e-3, "sft-": 1e-30}
    return [
        row(seed, before[start], p * (1 - 0.01 * seed), start=start, reward=reward, scale=scale, **more)
        for (start, reward), p in after.items()
        for scale in ("24k", "51k", "134k", "333k")
        for seed in range(SEEDS)
    ]


def named(found: list[Finding], name: str) -> Finding:
    return next(finding for finding in found if finding.name == name)


PAPER = {
    ("sft+", "sparse"): 0.95, ("sft+", "dense"): 0.8, ("base", "sparse"): 0.01, ("base", "dense"): 0.6,
    ("sft-", "sparse"): 1e-30, ("sft-", "dense"): 1e-20,
}  # fmt: skip


def test_rows_like_the_papers_make_every_claim_hold() -> None:
    found = findings(grid(PAPER))
    names = (
        "coverage",
        "crushed prior, sparse",
        "crushed prior, dense",
        "size",
        "dense lifts base",
        "dense is a proxy",
    )
    assert {name: named(found, name).verdict for name in names} == dict.fromkeys(names, "holds")
    assert "+0.83" in named(found, "coverage").sentence  # .95 x .98 - .1
    assert named(found, "coverage").table[0]["expected hits"] == pytest.approx(307.2)


def test_one_size_above_the_line_in_two_seeds_is_not_averaged_away() -> None:
    rows = grid(PAPER)
    for own in rows[:]:
        s = own["settings"]
        if (s["start"], s["reward"], s["scale"]) == ("sft-", "sparse", "24k") and own["seed"] < 2:
            own["result"]["after"]["log_p"] = math.log(0.003)
    assert named(findings(rows), "crushed prior, sparse").verdict == "does not hold"


def test_rows_of_the_opposite_are_said_to_be_so() -> None:
    opposite = {
        ("sft+", "sparse"): 0.05, ("sft+", "dense"): 0.9, ("base", "sparse"): 0.9, ("base", "dense"): 0.1,
        ("sft-", "sparse"): 0.2, ("sft-", "dense"): 0.2,
    }  # fmt: skip
    found = findings(grid(opposite))
    verdicts = {finding.name: finding.verdict for finding in found}
    assert verdicts["coverage"] == verdicts["dense lifts base"] == verdicts["dense is a proxy"] == "reversed"
    assert verdicts["crushed prior, sparse"] == verdicts["crushed prior, dense"] == "does not hold"


def test_one_seed_makes_no_claim() -> None:
    found = findings([r for r in grid(PAPER) if r["seed"] == 0])
    assert {finding.verdict for finding in found} - {"holds"} == {"no claim"}
    assert [f.name for f in found if f.verdict == "holds"] == []


def test_one_crushed_seed_of_five_that_rises_is_inconclusive() -> None:
    rows = [row(s, 1e-30, 0.5 if s == 4 else 1e-30, start="sft-", reward="sparse", scale="24k") for s in range(SEEDS)]
    assert named(findings(rows), "crushed prior, sparse").verdict == "inconclusive"


def test_p07_first_hits_are_compared_with_the_sum_of_exact_chances() -> None:
    p0 = 1 - 0.5 ** (1 / 3072)  # a hit in half of the runs
    rows = [row(s, p0, p0, hit=7 if s < 10 else None) for s in range(20)]
    finding = named(findings(rows), "first hits")
    assert finding.verdict == "holds" and "10 of 20" in finding.sentence and "10.0 +- 2.2" in finding.sentence
    twins = [row(s, p0, p0, hit=7 if s < 10 else None, scale=scale) for s in range(20) for scale in ("24k", "51k")]
    assert "20.0 +- 4.5" in named(findings(twins), "first hits").sentence  # the same draws: not 2.2 x sqrt 2
    none = [row(s, p0, p0, hit=None) for s in range(20)]
    assert named(findings(none), "first hits").verdict == "does not hold"


def test_the_transition_is_between_few_and_many_expected_hits() -> None:
    rows = [row(s, 1e-7, 1e-7, hit=None) for s in range(10)] + [row(s, 0.05, 0.9) for s in range(10)]
    finding = named(findings(rows), "transition")
    assert finding.verdict == "holds" and [line["rose"] for line in finding.table] == [0.0, 1.0]
    assert rules.rose(row(0, 0.05, 0.16)) and not rules.rose(row(0, 0.05, 0.14)) and not rules.rose(row(0, 1e-3, 0.09))


def spurious(prompts: str, updates: int, change: float, right: float = 0.4) -> list[Row]:
    return [
        row(
            s, 0.01, 0.01, **(RANDOM | {"prompts": prompts, "updates": updates}),
            heats={"before": 1.5, "after": 1.5 + change + 0.01 * s}, right={"before": 0.5, "after": right + 0.001 * s},
        )
        for s in range(SEEDS)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompts", "change", "verdict"),
    [
        ("narrow", -0.3, "holds"),
        ("narrow", 0.3, "reversed"),
        ("narrow", -0.02, "inconclusive"),
        ("broad", 0.3, "holds"),
        ("broad", -0.3, "reversed"),
    ],
)
def test_random_rewards_by_the_sign_of_the_entropys_change(prompts: str, change: float, verdict: str) -> None:
    assert named(findings(spurious(prompts, 8, change)), f"random, {prompts}, 8").verdict == verdict


def test_broad_against_narrow_is_paired_by_seed_and_updates() -> None:
    rows = [r for u in (1, 8) for r in spurious("narrow", u, -0.2) + spurious("broad", u, 0.3, right=0.2)]
    found = findings(rows)
    assert named(found, "random, broad or narrow").verdict == "holds"
    assert "+0.500" in named(found, "random, broad or narrow").sentence
    assert named(found, "random, what is forgotten").verdict == "holds"


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, "holds"), (-0.5, "does not hold")])
def test_ppo_and_grpo_are_alike_within_a_margin_in_all_six_cells(shift: float, verdict: str) -> None:
    ppo = [
        row(s, 0.1, max(p + shift, 1e-9), start=start, reward=reward, algorithm="ppo")
        for (start, reward), p in PAPER.items()
        for s in range(SEEDS)
    ]
    assert named(findings(grid(PAPER) + ppo), "algorithm").verdict == verdict


def test_no_rows_no_findings_and_no_figures() -> None:
    assert findings([]) == [] and figures([]) == {}


def test_figures_are_drawn_of_whatever_rows_there_are() -> None:
    everything = [
        row(seed, 0.01, 0.5, hit=None if seed else 9, **settings) for _, settings in tiny_cells() for seed in range(2)
    ]
    made = figures(everything)
    assert set(made) == {"matrix", "curves", "prior", "entropy", "algorithms", "random", "maths"}
    for figure, caption in made.values():
        assert caption and all(axis.get_ylabel() or i for i, axis in enumerate(figure.axes))
    for some in (everything[:1], everything[-1:], [r for r in everything if r["settings"]["part"] == "prior"]):
        for figure, _ in figures(some).values():
            figure.canvas.draw()
