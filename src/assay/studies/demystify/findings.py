"""What the tiny cells say of each claim, by rules that stand here and were written before the full run was looked at.

The unit is the seed: one seed is one prior with all that was trained from it. Means over sizes are taken within a seed first.
Intervals are 95 % t intervals over seeds, of differences within a seed where two arms are compared. A claim of a direction
"holds" where the interval lies beyond 0 on its side, is "reversed" where it lies beyond 0 on the other side, and else is
"inconclusive"; with fewer than two seeds there is "no claim". NEAR and RAISED say what counts as staying at 0 and as raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from assay.stats import wilson
from assay.studies.charts import mean_interval
from assay.studies.demystify.measure import hit_probability
from assay.studies.demystify.policies import SCALES
from assay.studies.grid import Finding, Row, Verdict

NEAR = 1e-3  # a target's probability that counts as 0 after RL, for every seed
RAISED = 0.1  # a probability after RL that counts as raised, if it is also three times that before
EQUAL = 0.2  # a difference of probabilities below which two algorithms count as alike
STARTS = ("base", "sft+", "sft-")


def findings(rows: Sequence[Row]) -> list[Finding]:
    """In the order of the paper's argument; those without rows are left out."""
    made = [coverage(rows), crushed(rows), size(rows), transition(rows), first_hits(rows), dense_base(rows)]
    made += [dense_crushed(rows), proxy(rows), algorithms(rows)]
    made += [spurious(rows, prompts, updates) for prompts in ("narrow", "broad") for updates in (1, 8)]
    made += [spurious_apart(rows), spurious_held_out(rows)]
    return [finding for finding in made if finding is not None]


# ------------------------------------------------------------------------------------------------------------ numbers


def chance(row: Row, when: str) -> float:
    """Exact probability of the target at temperature 1, `when` "before" or "after" RL."""
    return math.exp(float(row["result"][when]["log_p"]))


def chance_after(row: Row) -> float:
    return chance(row, "after")


def gain(row: Row) -> float:
    return chance(row, "after") - chance(row, "before")


def pick(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Rows with these settings, in the order of their seeds."""
    own = [row for row in rows if all(row["settings"].get(key) == value for key, value in wanted.items())]
    return sorted(own, key=lambda row: row["seed"])


def by_seed(rows: Sequence[Row], value: Callable[[Row], float]) -> dict[int, float]:
    """Mean of `value` over each seed's rows."""
    found: dict[int, list[float]] = {}
    for row in rows:
        found.setdefault(row["seed"], []).append(value(row))
    return {seed: float(np.mean(values)) for seed, values in sorted(found.items())}


def paired(a: Sequence[Row], b: Sequence[Row], value: Callable[[Row], float], key: str = "scale") -> list[float]:
    """Per seed, the mean of value(a) - value(b) over the settings `key` that both have."""
    other = {(row["seed"], row["settings"][key]): value(row) for row in b}
    found: dict[int, list[float]] = {}
    for row in a:
        at = (row["seed"], row["settings"][key])
        if at in other:
            found.setdefault(row["seed"], []).append(value(row) - other[at])
    return [float(np.mean(values)) for _, values in sorted(found.items())]


def direction(values: Sequence[float], up: bool) -> tuple[Verdict, str]:
    """The verdict of a claim that the mean is above (`up`) or below 0, and its numbers."""
    mean, low, high = mean_interval(values)
    if len(values) < 2:
        return "no claim", f"{mean:+.3f}, one seed: no interval"
    text = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}] over {len(values)} seeds"
    if not up:
        low, high = -high, -low
    return ("holds" if low > 0 else "reversed" if high < 0 else "inconclusive"), text


def matrix(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return pick(rows, part="matrix", algorithm="grpo", **wanted)


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line a size: probabilities before and after, and how many hits the untrained start would give on average."""
    lines = []
    for scale in SCALES:
        own = pick(rows, scale=scale)
        if own:
            mean, low, high = mean_interval([chance(row, "after") for row in own])
            before = [chance(row, "before") for row in own]
            lines.append(
                {
                    "size": scale,
                    "before": float(np.mean(before)),
                    "expected hits": float(
                        np.mean([p * row["result"]["played"] for p, row in zip(before, own, strict=True)])
                    ),
                    "after": mean,
                    "low": low if math.isfinite(low) else None,
                    "high": high if math.isfinite(high) else None,
                    "seeds": len(own),
                }
            )
    return lines


# ------------------------------------------------------------------------------------------------- prior and reward


def coverage(rows: Sequence[Row]) -> Finding | None:
    own = matrix(rows, start="sft+", reward="sparse")
    if not own:
        return None
    verdict, text = direction(list(by_seed(own, gain).values()), up=True)
    sentence = f"After sparse RL from SFT+ the target's probability changed by {text}, mean over sizes."
    return Finding(
        "coverage",
        "Sparse RL raises a target that its start samples now and then (SFT+).",
        verdict,
        sentence,
        table(own),
    )


def crushed(rows: Sequence[Row]) -> Finding | None:
    own = matrix(rows, start="sft-", reward="sparse")
    claim = "Sparse RL leaves a target at 0 that its start never samples (SFT-)."
    return stays("crushed prior, sparse", claim, own, chance_after, NEAR, table(own))


def dense_crushed(rows: Sequence[Row]) -> Finding | None:
    own = matrix(rows, start="sft-", reward="dense")
    claim = "A dense reward does not bring back a target that was crushed (SFT-)."
    return stays("crushed prior, dense", claim, own, chance_after, NEAR, table(own))


def stays(
    name: str,
    claim: str,
    own: Sequence[Row],
    value: Callable[[Row], float],
    near: float,
    lines: Sequence[dict[str, Any]] = (),
) -> Finding | None:
    """Holds where the value of every row is `near` at most; does not hold where two seeds or more have one above."""
    if not own:
        return None
    most, seeds = max(map(value, own)), {row["seed"] for row in own}
    verdict: Verdict = "holds" if most <= near else "inconclusive"
    if len({row["seed"] for row in own if value(row) > near}) > 1:
        verdict = "does not hold"
    if len(seeds) < 2:
        verdict = "no claim"
    sentence = f"Over {len(own)} cells of {len(seeds)} seeds the largest value after RL is {most:.2g}."
    return Finding(name, claim, verdict, sentence, list(lines))


def size(rows: Sequence[Row]) -> Finding | None:
    """The paper's 8B base model stays at 0 where smaller ones rise. Here: largest and crushed against smallest and raised."""
    small, large = next(iter(SCALES)), next(reversed(SCALES))
    a, b = (
        matrix(rows, scale=small, start="sft+", reward="sparse"),
        matrix(rows, scale=large, start="sft-", reward="sparse"),
    )
    if not a or not b:
        return None
    pairs = {row["seed"]: chance(row, "after") for row in b}
    differences = [chance(row, "after") - pairs[row["seed"]] for row in a if row["seed"] in pairs]
    verdict, text = direction(differences, up=True)
    base = [entry for scale in SCALES for entry in table(matrix(rows, scale=scale, start="base", reward="sparse"))]
    sentence = (
        f"After sparse RL, SFT+ of {small} minus SFT- of {large}: {text}. The table has the base policies: size helps there as "
        "far as it raises the prior."
    )
    return Finding("size", "A larger model does not make up for a missing prior.", verdict, sentence, base)


def sparse_quote(rows: Sequence[Row]) -> list[Row]:
    """Every sparse GRPO run on the quote prompt: starts, sizes and the sweep of the prior."""
    return [row for row in pick(rows, reward="sparse", algorithm="grpo", prompts="quote")]


def rose(row: Row) -> bool:
    after = chance(row, "after")
    return after >= RAISED and after >= 3 * chance(row, "before")


def transition(rows: Sequence[Row]) -> Finding | None:
    """Runs by the hits that the untrained start would give on average. Holds where Wilson's intervals of "below 0.1" and
    "10 and more" do not overlap, the second being higher. Runs of one seed share a prior's text and weights: the intervals
    are over runs."""
    own = sparse_quote(rows)
    bins = ((0.0, 0.1), (0.1, 1.0), (1.0, 10.0), (10.0, math.inf))
    lines, intervals = [], {}
    for low, high in bins:
        inside = [row for row in own if low <= chance(row, "before") * row["result"]["played"] < high]
        if inside:
            share = wilson(sum(rose(row) for row in inside), len(inside), over="runs")
            intervals[low] = share
            name = f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} and more"
            lines.append(
                {"expected hits": name, "rose": share.estimate, "low": share.low, "high": share.high, "runs": share.n}
            )
    if 0.0 not in intervals or 10.0 not in intervals:
        return None
    few, many = intervals[0.0], intervals[10.0]
    verdict: Verdict = "holds" if many.low > few.high else "reversed" if many.high < few.low else "inconclusive"
    if len({row["seed"] for row in own}) < 2:
        verdict = "no claim"
    sentence = (
        f"With fewer than 0.1 expected hits {few.estimate:.0%} of {few.n} runs rose, with 10 and more {many.estimate:.0%} of "
        f"{many.n} (rose: to {RAISED:g} and three times the start)."
    )
    return Finding(
        "transition",
        "Whether sparse RL takes off is decided by the prior: a phase transition.",
        verdict,
        sentence,
        lines,
    )


def first_hits(rows: Sequence[Row]) -> Finding | None:
    """P7: under GRPO nothing is updated before the first hit, so hits come as 1 - (1 - p0)^N says. Holds where the number of
    runs with a hit is within two standard deviations of the sum of these probabilities. Runs of one seed are sampled with the
    same draws: within a seed standard deviations are added, which is their largest sum."""
    own = sparse_quote(rows)
    if not own:
        return None
    expected, spreads = 0.0, dict[int, float]()
    for row in own:
        p = hit_probability(math.exp(row["result"]["before"]["log_p_training"]), row["result"]["played"])
        expected += p
        spreads[row["seed"]] = spreads.get(row["seed"], 0.0) + math.sqrt(p * (1 - p))
    seen, spread = sum(row["result"]["first_hit"] is not None for row in own), math.hypot(*spreads.values())
    verdict: Verdict = "holds" if abs(seen - expected) <= max(2 * spread, 0.5) else "does not hold"
    if len(spreads) < 2:
        verdict = "no claim"
    theory = f"{expected:.1f} +- {spread:.1f}"
    sentence = f"{seen} of {len(own)} runs hit the target at least once; 1 - (1 - p0)^N gives {theory}."
    return Finding("first hits", "A target is first hit as often as its exact prior says.", verdict, sentence)


def dense_base(rows: Sequence[Row]) -> Finding | None:
    a, b = matrix(rows, start="base", reward="dense"), matrix(rows, start="base", reward="sparse")
    differences = paired(a, b, lambda row: chance(row, "after"))
    if not differences:
        return None
    verdict, text = direction(differences, up=True)
    alike = direction(
        list(by_seed(a, lambda row: _similarity(row, "after") - _similarity(row, "before")).values()), up=True
    )
    sentence = (
        f"From base, dense minus sparse after RL: {text}, mean over sizes. Under the dense reward the similarity of the "
        f"answers, which is what it pays, changed by {alike[1]}."
    )
    return Finding(
        "dense lifts base", "A dense reward lifts base policies further than a sparse one.", verdict, sentence, table(a)
    )


def proxy(rows: Sequence[Row]) -> Finding | None:
    a, b = matrix(rows, start="sft+", reward="dense"), matrix(rows, start="sft+", reward="sparse")
    differences = paired(a, b, lambda row: chance(row, "after"))
    if not differences:
        return None
    verdict, text = direction(differences, up=False)
    sentence = f"From SFT+, dense minus sparse in exact probability after RL: {text}, mean over sizes."
    claim = "From SFT+ the dense reward ends with fewer exact answers than the sparse one: closeness is a proxy."
    return Finding("dense is a proxy", claim, verdict, sentence, table(a))


def _similarity(row: Row, when: str) -> float:
    return float(row["result"][when]["inside"]["similarity"])


def algorithms(rows: Sequence[Row]) -> Finding | None:
    """Alike where each of the six intervals lies within +-EQUAL, unlike where one lies outside altogether."""
    ppo = pick(rows, part="matrix", algorithm="ppo")
    lines, outside, within = [], 0, 0
    for start in STARTS:
        for reward in ("sparse", "dense"):
            own = [row for row in ppo if (row["settings"]["start"], row["settings"]["reward"]) == (start, reward)]
            differences = paired(own, matrix(rows, start=start, reward=reward), lambda row: chance(row, "after"))
            if len(differences) < 2:
                continue
            mean, low, high = mean_interval(differences)
            within += low > -EQUAL and high < EQUAL
            outside += low > EQUAL or high < -EQUAL
            lines.append({"start": start, "reward": reward, "ppo - grpo": mean, "low": low, "high": high})
    if not ppo:
        return None
    verdict: Verdict = (
        "no claim" if len(lines) < 6 else "does not hold" if outside else "holds" if within == 6 else "inconclusive"
    )
    where = f"lies within +-{EQUAL:g}, in {outside} outside"
    sentence = f"In {within} of {len(lines)} cells the interval of PPO minus GRPO {where}."
    return Finding("algorithm", "With the rest fixed, PPO and GRPO end alike.", verdict, sentence, lines)


# ------------------------------------------------------------------------------------------------------ random rewards


def drift(row: Row) -> float:
    """Change of the entropy of answers to the cell's own prompts, nats per step."""
    result = row["result"]
    return float(result["after"]["inside"]["entropy"]) - float(result["before"]["inside"]["entropy"])


def forgotten(row: Row) -> float:
    """Change of the share of right first guesses on held-out text."""
    return float(row["result"]["after"]["reading"]["accuracy"]) - float(row["result"]["before"]["reading"]["accuracy"])


def spurious(rows: Sequence[Row], prompts: str, updates: int) -> Finding | None:
    own = pick(rows, part="random", prompts=prompts, updates=updates)
    if not own:
        return None
    up = prompts == "broad"
    verdict, text = direction([drift(row) for row in own], up)
    clipped = float(np.mean([share for row in own for share in row["result"]["curves"]["clipped"]]))
    sentence = (
        f"Entropy on the training prompts changed by {text} (nats per step); {clipped:.1%} of the tokens were clipped."
    )
    many = "eight updates" if updates == 8 else "one update"
    claim = f"Random rewards on {prompts} prompts, {many} a batch: entropy {'rises' if up else 'falls'}."
    return Finding(f"random, {prompts}, {updates}", claim, verdict, sentence)


def spurious_apart(rows: Sequence[Row]) -> Finding | None:
    broad, narrow = (pick(rows, part="random", prompts=prompts) for prompts in ("broad", "narrow"))
    differences = paired(broad, narrow, drift, "updates")
    if not differences:
        return None
    verdict, text = direction(differences, up=True)
    sentence = f"Change of entropy, broad minus narrow, mean over 1 and 8 updates: {text} (nats per step)."
    return Finding(
        "random, broad or narrow", "What a random reward does is a property of the prompt set.", verdict, sentence
    )


def spurious_held_out(rows: Sequence[Row]) -> Finding | None:
    broad, narrow = (pick(rows, part="random", prompts=prompts) for prompts in ("broad", "narrow"))
    differences = paired(broad, narrow, forgotten, "updates")
    if not differences:
        return None
    verdict, text = direction(differences, up=False)
    each = ", ".join(
        f"{name} {np.mean([forgotten(row) for row in own]):+.3f}"
        for name, own in (("broad", broad), ("narrow", narrow))
    )
    sentence = f"Change of the share of right first guesses on held-out text: {each}; broad minus narrow {text}."
    claim = "Random rewards cost more of what was learnt before on broad prompts than on narrow ones."
    return Finding("random, what is forgotten", claim, verdict, sentence)
