"""What the maths cells say. Right is whoever boxes the right number, and shares of right answers are sampled; the worked
solution's probability is exact. Verdicts by the rules of findings.py; written after one look at seed 100, which is no seed of
the study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from assay.studies.charts import mean_interval
from assay.studies.demystify.findings import STARTS, by_seed, direction, paired, pick, stays
from assay.studies.grid import Finding, Row

NEAR = 0.02  # a share of right answers that counts as 0: two of 128


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Those that have rows."""
    made = [coverage(rows), crushed(rows, "sparse"), crushed(rows, "dense"), milestones(rows), derivation(rows)]
    return [finding for finding in made if finding is not None]


def cells(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return pick(rows, part="maths", **wanted)


def right(row: Row, when: str = "after") -> float:
    """Share of right answers among the samples."""
    return float(row["result"][when]["inside"]["exact"])


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line a start and reward."""
    lines = []
    for start in STARTS:
        for reward in ("sparse", "dense"):
            own = cells(rows, start=start, reward=reward)
            if own:
                mean, low, high = mean_interval([right(row) for row in own])
                lines.append(
                    {
                        "start": start,
                        "reward": reward,
                        "right before": float(np.mean([right(row, "before") for row in own])),
                        "after": mean,
                        "low": low if len(own) > 1 else None,
                        "high": high if len(own) > 1 else None,
                        "ln P(worked solution), before": float(
                            np.mean([row["result"]["before"]["log_p"] for row in own])
                        ),
                        "and after": float(np.mean([row["result"]["after"]["log_p"] for row in own])),
                    }
                )
    return lines


def coverage(rows: Sequence[Row]) -> Finding | None:
    own = cells(rows, start="sft+", reward="sparse")
    if not own:
        return None
    verdict, text = direction([right(row) - right(row, "before") for row in own], up=True)
    sentence = f"After sparse RL from SFT+ the share of right answers changed by {text}."
    claim = "Maths: sparse RL raises an answer that its start samples now and then (SFT+)."
    return Finding("maths, coverage", claim, verdict, sentence, table(rows))


def crushed(rows: Sequence[Row], reward: str) -> Finding | None:
    name = "Sparse RL leaves" if reward == "sparse" else "Milestones leave"
    claim = f"Maths: {name} an answer at 0 whose worked solution was crushed (SFT-)."
    return stays(f"maths, crushed prior, {reward}", claim, cells(rows, start="sft-", reward=reward), right, NEAR)


def milestones(rows: Sequence[Row]) -> Finding | None:
    base = [cells(rows, start="base", reward=reward) for reward in ("dense", "sparse")]
    differences = paired(base[0], base[1], right)
    if not differences:
        return None
    verdict, text = direction(differences, up=True)
    sentence = f"From base, share of right answers after RL, milestones minus the answer alone: {text}."
    claim = "Maths: a reward for milestones lifts the base policy further than one for the answer alone."
    return Finding("maths, milestones lift base", claim, verdict, sentence)


def derivation(rows: Sequence[Row]) -> Finding | None:
    """Not a claim of the paper."""
    own = cells(rows, start="sft+")
    if not own:
        return None

    def change(row: Row) -> float:
        return float(row["result"]["after"]["log_p"]) - float(row["result"]["before"]["log_p"])

    verdict, text = direction(list(by_seed(own, change).values()), up=False)
    sentence = f"From SFT+, log P(worked solution) changed, in nats and as the mean over both rewards, by {text}."
    claim = "Maths: RL on the answer makes the worked solution that leads to it rarer (a claim of ours)."
    return Finding("maths, the way to the answer", claim, verdict, sentence)
