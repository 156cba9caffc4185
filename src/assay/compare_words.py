"""What a comparison says, in words and rows: the sentences, how it was tested, and the cells of its tables.

The same for all outputs, which compare_report.py makes of them. A figure that decides gets a verdict; others get intervals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from assay.charts import number
from assay.compare_charts import SUCCESS, Result, interval, plain
from assay.records import is_number

MOST_SENTENCES = 6  # pairs whose verdicts are read one by one: those of four arms
MOST_ERROR = 300  # characters of an error
SHARE = "share of tasks solved, where 0.01 is one percentage point"


# -------------------------------------------------------------------------------------------------------------- words


def p_value(value: Any) -> str:
    return "-" if not is_number(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"


def figure(value: Any) -> str:
    return f"{value:.3f}" if is_number(value) else "-"


def deciding(result: Result) -> list[Mapping[str, Any]]:
    """Pairs of the figure that the comparison is about."""
    return [pair for pair in result["pairs"] if pair["metric"] == result["metric"]]


def exploratory(result: Result) -> list[Mapping[str, Any]]:
    return [pair for pair in result["pairs"] if pair["metric"] != result["metric"]]


def sentences(result: Result) -> list[tuple[str, str]]:
    """(verdict, sentence) of every pair of the figure that decides."""
    return [(pair["verdict"], plain(pair["sentence"])) for pair in deciding(result)]


def headlines(result: Result) -> list[tuple[str, str]]:
    """(verdict, sentence): each pair's, or what many come to; why there is none; what a method differs from itself by."""
    pairs = deciding(result)
    found = sentences(result) if len(pairs) <= MOST_SENTENCES else [_summary(result, pairs)]
    if not found:
        found = [("inconclusive", "inconclusive: there is no pair of arms, since no training seed is finished")]
    for noise in result["noise"]:
        apart = interval(noise["difference"], sign=True)
        found.append(("noise", f"{plain(noise['arm'])} differs from itself with other seeds by {apart}"))
    return found


def _summary(result: Result, pairs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Of many pairs: how many got which verdict, and which arms no other beats."""
    count = Counter(pair["verdict"] for pair in pairs)
    apart = count["better"] + count["worse"]
    text = (
        f"{len(pairs)} pairs of {len(result['arms'])} arms: {apart} apart, {count['no difference']} without a difference of "
        f"{result['effect']:g} or more, {count['inconclusive']} inconclusive"
    )
    needed = [p["seeds_needed"] for p in pairs if p["verdict"] == "inconclusive" and p["seeds_needed"]]
    text += f" (about {max(needed)} more seeds needed)" if needed else ""
    if not apart:
        return ("no difference" if not count["inconclusive"] else "inconclusive"), text
    beaten = {p["b"] if p["verdict"] == "better" else p["a"] for p in pairs if p["verdict"] in ("better", "worse")}
    best = [plain(arm) for arm in result["arms"] if arm not in beaten]
    return "better", f"{text}; beaten by no other: {', '.join(best) or 'none'}"


def unfinished(result: Result) -> list[str]:
    return [
        f"unfinished: {plain(gap['arm'])}, seed {gap['seed']}: {plain(gap['error'], MOST_ERROR)}"
        for gap in result["unfinished"]
    ]


def tested(result: Result) -> list[str]:
    """How, in three sentences."""
    pairs, seeds, level = len(deciding(result)), len(result["seeds"]), 100 * (1 - result["alpha"])
    looks = f", multiplied by the {result['looks']} looks at this comparison," if result["looks"] > 1 else ""
    family = f" corrected by Holm's method over the {pairs} pairs of arms" if pairs > 1 else ""
    return [
        f"Every arm trained with the same {seeds} training seed{'s'[: seeds != 1]}, which are the unit of all intervals and "
        f"tests, and was measured on the same panel ({panel(result)}).",
        f"A difference in {plain(result['metric'])} is the mean over paired seeds with a paired t interval at {level:g} %; an "
        f"arm is better or worse if p{family}{looks} is at most {result['alpha']:g}, there is no difference if the "
        f"{100 - 200 * result['alpha']:g} % interval lies within ±{result['effect']:g}, and all else is inconclusive.",
        "The noise floor is what 95 % of comparisons of a method with itself, other seeds on either side, stay within; "
        "the MDE (minimum detectable effect) is the true difference that so many pairs find in 80 % of comparisons.",
    ]


def panel(result: Result) -> str:
    known = result["panel"]
    hashes = ", ".join(f"{name} {plain(text)}" for name, text in known.items() if name != "tasks" and text)
    return f"{known.get('tasks', '?')} held-out tasks a split{': ' + hashes if hashes else ''}"


def unit(metric: str) -> str:
    return SHARE if metric.partition("[")[0] in SUCCESS else "in its own unit"


# ------------------------------------------------------------------------------------------------------------- tables


def arm_head(result: Result, metrics: Sequence[str]) -> list[str]:
    return ["arm", *metrics, "seeds", "env steps", "tokens", "minutes", "fidelity"]


def arm_rows(result: Result, metrics: Sequence[str]) -> list[list[str]]:
    """Per arm: name, mean of each figure with its interval over seeds, seeds, what one seed spent on average."""
    rows = []
    for name, arm in result["arms"].items():
        seeds = list(arm["seeds"].values())
        steps, tokens, seconds = (
            _mean([seed.get(key) for seed in seeds]) for key in ("env_steps", "tokens", "seconds")
        )
        spent = ["-" if v is None else number(v) for v in (steps, tokens)]
        minutes = "-" if seconds is None else f"{seconds / 60:.1f}"
        means = [interval(arm["mean"].get(metric)) for metric in metrics]
        rows.append([plain(name), *means, str(len(seeds)), *spent, minutes, plain(arm["fidelity"])])
    return rows


def _mean(values: Sequence[Any]) -> float | None:
    known = [float(v) for v in values if is_number(v)]
    return sum(known) / len(known) if known else None


PAIR_HEAD = ["arm", "against", "difference", "BCa", "p", "sign-flip p", "corrected p", "noise floor", "MDE"]
PAIR_HEAD += ["pairs", "more seeds", "verdict"]


def pair_rows(result: Result) -> list[list[str]]:
    return [
        [
            plain(p["a"]),
            plain(p["b"]),
            interval(p["difference"], sign=True),
            _ends(p["bootstrap"]),
            *(p_value(p[name]) for name in ("p", "p_permutation", "p_corrected")),
            figure(p["noise_floor"]),
            figure(p["mde"]),
            str(p["n"]),
            "-" if p["seeds_needed"] is None else str(p["seeds_needed"]),
            p["verdict"],
        ]
        for p in deciding(result)
    ]


def _ends(value: Mapping[str, Any] | None) -> str:
    """Of an interval whose estimate stands beside it."""
    text = interval(value)
    return text[text.index("[") :] if "[" in text else "-"


OTHER_HEAD = ["figure", "arm", "against", "difference"]


def other_rows(result: Result) -> list[list[str]]:
    return [
        [plain(p["metric"]), plain(p["a"]), plain(p["b"]), interval(p["difference"], True)] for p in exploratory(result)
    ]


def made(result: Result) -> str:
    return f"assay {result['assay']}, {result['date']}, {result['machine']}"
