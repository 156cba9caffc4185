"""Verdicts of agentic-icl from rows made by hand: each claim with values just on its side, and just on the other."""

from typing import Any

import pytest

from assay.studies.grid import Row
from assay.studies.icl import recursions, rewards, supervision
from assay.studies.icl.findings import FINDINGS

SEEDS = range(5)
OPTIMUM = {"cum": 2.0, "final": 1.0}


def made(names: Any, result: Any) -> list[Row]:
    """Rows of every name and seed; `result(name, shift)` with shifts of -0.0002 to 0.0002 between seeds."""
    return [
        {"name": name, "seed": seed, "settings": {}, "seconds": 1.0, "result": result(name, (seed - 2) * 1e-4)}
        for name in names
        for seed in SEEDS
    ]


def verdicts(experiment: str, rows: list[Row]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in FINDINGS[experiment](rows)}


# ----------------------------------------------------------------------------------------------------------- rewards

GOOD: dict[str, Any] = {
    "side": {"cum": 0.6, "final": 0.4, "info": 0.4}, "short": {"cum": 0.015, "final": 0.015}, "closed": 0.85,
    "pulls": {"cost-0.01": 3.0, "cost-0.02": 2.0, "cost-0.05": 1.0}, "batch": 0.1, "low": 0.1, "near": 0.1,
}  # fmt: skip


def rewards_rows(**changed: Any) -> list[Row]:
    at = GOOD | changed

    def result(name: str, shift: float) -> dict[str, Any]:
        best = OPTIMUM.get(name, 1.0)
        lost = at["closed"] - (at["batch"] if "batch" in name else at["low"] if "low" in name else 0.0)
        sample: dict[str, Any] = {f"distance {ref}": 0.5 for ref in rewards.REFERENCES}
        sample |= {
            "return": best * (1 - at["short"].get(name, 0.0)) + shift, "optimum": best, "uniform": 0.0,
            "closed": lost + shift, "cum": (1.0 if name == "final" else 2.0) + shift, "final": 0.6,
            "pulls": at["pulls"].get(name, 5.0) + shift, "cum_side": at["side"].get(name, 0.5) + shift,
            "cum_side_met": at["side"].get(name, 0.5) + shift, "distance bayes-final": 0.5 - at["near"] + shift,
        }  # fmt: skip
        return {"sample": sample}

    return made(rewards.ARMS, result)


def test_rewards_hold_just_inside_every_bound() -> None:
    found = verdicts("rewards", rewards_rows())
    assert set(found.values()) == {"holds"} and len(found) == 8


@pytest.mark.parametrize(
    ("name", "changed", "verdict"),
    [
        ("two returns, two policies", {"side": {"cum": 0.45, "final": 0.4}}, "does not hold"),
        ("two policies where they go", {"side": {"cum": 0.6, "final": 0.55}}, "does not hold"),
        ("near the optimum", {"short": {"cum": 0.015, "final": 0.025}}, "does not hold"),
        ("near the optimum", {"short": {"cum": 0.025, "final": 0.015}}, "does not hold"),
        ("most of the way", {"closed": 0.75}, "does not hold"),
        ("price of a pull", {"pulls": {"cost-0.01": 1.0, "cost-0.02": 2.0, "cost-0.05": 3.0}}, "reversed"),
        ("information is not reward", {"near": -0.1}, "reversed"),
        ("baseline of a group", {"batch": -0.1}, "reversed"),
        ("entropy bonus", {"low": -0.1}, "reversed"),
    ],
)
def test_rewards_fail_just_outside(name: str, changed: dict[str, Any], verdict: str) -> None:
    assert verdicts("rewards", rewards_rows(**changed))[name] == verdict


def test_a_claim_of_several_cells_is_no_claim_without_one_of_them() -> None:
    for gone, name in (("cum", "near the optimum"), ("cost-0.02", "price of a pull"), ("info", "most of the way")):
        rows = [row for row in rewards_rows() if row["name"] != gone]
        assert verdicts("rewards", rows)[name] == "no claim"
    rows = [row for row in recursion_rows() if not row["name"].startswith("q-learning")]
    found = verdicts("recursions", rows)
    assert found["recursions are carried"] == found["process against outcome supervision"] == "no claim"


# ------------------------------------------------------------------------------------------------------- supervision


def supervision_rows(**changed: Any) -> list[Row]:
    exact = supervision.reference_values(supervision.HORIZON)
    at: dict[str, Any] = {
        "ucb1": 0.015, "off": 0.04, "thompson": 0.015, "argmax": 0.1, "leak": 0.1, "leaked": 0.015, "ties": 0.1,
        "own": 0.1, "better": 0.1, "slack": 0.01,
    } | changed  # fmt: skip

    def result(name: str, shift: float) -> dict[str, Any]:
        one: dict[str, Any] = {f"distance {ref}": 0.5 for ref in supervision.REFERENCES} | {"distance leak": 0.5}
        cum, final = 5.0, 0.60
        if name == "process-ucb1":
            cum, one["distance ucb1"] = exact["ucb1"][0] - at["off"], at["ucb1"] + shift
        if name == "oracle-arm":
            cum, one["distance thompson"] = exact["thompson"][0] - at["off"], at["thompson"] + shift
        if name == "oracle-leak":
            cum, one["distance leak"] = exact["thompson"][0] - at["off"] - at["leak"], at["leaked"] + shift
        if name == "bayes-cum":
            cum = exact["ucb1"][0] - at["off"] + at["better"]
        if name == "bayes-final":
            final, one["distance bayes-final"] = 0.60 + at["better"], 0.3 + shift
        if name == "bayes-final-ties":
            one["distance bayes-final"] = 0.3 + at["ties"] - shift
        if name in ("ucb1-on-uniform", "ucb1-on-own"):
            one["distance ucb1"] = 0.3 + (at["own"] if name == "ucb1-on-uniform" else 0.0) * (1 + shift)
        one |= {"cum": cum + shift, "final": final + shift, "tv": 0.1, "drift": 0.1 + at["slack"] + shift}
        one |= {"cum_gap": 0.0, "cum_bound": 1.0, "final_gap": 0.0, "final_bound": 1.0}
        return {"sample": one, "argmax": one | {"cum": cum + at["argmax"] - shift}}

    return made(supervision.ARMS, result)


def test_supervision_holds_just_inside_every_bound() -> None:
    found = verdicts("supervision", supervision_rows())
    assert set(found.values()) == {"holds"} and len(found) == 7


@pytest.mark.parametrize(
    ("name", "changed", "verdict"),
    [
        ("process supervision copies the learner", {"ucb1": 0.025}, "does not hold"),
        ("process supervision copies the learner", {"off": 0.06}, "does not hold"),
        ("hindsight labels are Thompson sampling", {"thompson": 0.025}, "does not hold"),
        ("hindsight labels are Thompson sampling", {"argmax": -0.1}, "reversed"),
        ("outcome-optimal actions beat the learner", {"better": -0.1}, "reversed"),
        ("closed-loop bounds", {"slack": -0.01}, "does not hold"),
        ("an expert's actions leak", {"leak": -0.1}, "reversed"),
        ("an expert's actions leak", {"leaked": 0.025}, "does not hold"),
        ("whose contexts", {"own": -0.1}, "reversed"),
        ("ties are masked", {"ties": -0.1}, "reversed"),
    ],
)
def test_supervision_fails_just_outside(name: str, changed: dict[str, Any], verdict: str) -> None:
    assert verdicts("supervision", supervision_rows(**changed))[name] == verdict


# -------------------------------------------------------------------------------------------------------- recursions


def recursion_rows(**changed: float) -> list[Row]:
    at = {"direct-2": 0.2, "direct-1": 0.3, "final-2": 0.3, "none-2": 0.4, "relative-2": 0.4, "excess": 0.0} | changed

    def result(name: str, shift: float) -> dict[str, Any]:
        way = "-".join(name.split("-")[-2:])
        found: dict[str, Any] = {"error": [at.get(way, 0.25) + shift] * 40, "one_step": [0.1] * 40}
        bounded = way.startswith("pad") and name.split("-")[0] in ("ema", "counts", "q")
        return found | ({"gap": [0.1] * 40, "bound": [0.2] * 40, "excess": at["excess"]} if bounded else {})

    names = [f"{kind}-{way}" for kind in recursions.RECURSIONS for way in recursions.WAYS]
    return made(names + [f"{k}-{w}" for k in recursions.BEYOND_OF for w in recursions.BEYOND], result)


def test_recursions_hold_just_inside_every_bound() -> None:
    found = verdicts("recursions", recursion_rows())
    assert set(found.values()) == {"holds"} and len(found) == 7


@pytest.mark.parametrize(
    ("name", "changed", "verdict"),
    [
        ("recursions are carried", {"direct-2": 0.26}, "does not hold"),
        ("a second layer", {"direct-1": 0.1}, "reversed"),
        ("process against outcome supervision", {"final-2": 0.1}, "reversed"),
        ("a state token against the prefix: counts", {"relative-2": 0.1}, "reversed"),
        ("error growth", {"excess": 0.001}, "does not hold"),
    ],
)
def test_recursions_fail_just_outside(name: str, changed: dict[str, float], verdict: str) -> None:
    assert verdicts("recursions", recursion_rows(**changed))[name] == verdict
