"""What the cells of the experiment "text" say: findings by rules stated here, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from assay.bandits import bayes, context_game, law_of, policy_value
from assay.studies.charts import GREY, PALETTE, band, points, subplots
from assay.studies.grid import Finding, Row
from assay.studies.icl.text_law import HORIZON, REFERENCES, N
from assay.studies.icl.verdicts import Quantity, average, finding, less, seen, values

LABELS = {
    "text-bandit-cum": "cum",
    "text-bandit-final": "final",
    "text-bandit-process": "process (UCB1)",
    "text-threshold-found": "outcome",
    "text-threshold-info": "information",
    "text-threshold-process": "process",
}
BANDITS, GAMES = list(LABELS)[:3], list(LABELS)[3:]
COLOURS = dict(zip(LABELS.values(), PALETTE, strict=True))
COLUMNS = ("cum", "final", "as_cum", "other", *(f"to_{name}" for name in REFERENCES))
CLOSED = 0.8  # share of the way from uniform play to the optimum that counts as reaching it


# ------------------------------------------------------------------------------------------------------------- findings


def findings(rows: Sequence[Row], options: Any) -> list[Finding]:
    """By the rule of verdicts.py. What has no cell yet has no finding."""

    def end(name: str, key: str) -> dict[int, float]:
        return values(rows, name, key, -1)

    cum, final, process = (f"text-bandit-{name}" for name in ("cum", "final", "process"))
    found: list[Finding] = []
    bandits, games = seen(rows, BANDITS), seen(rows, GAMES)
    if cum in bandits and final in bandits:
        found.append(
            finding(
                "text: two returns, two policies",
                "From one start, the return alone decides which policy a language model learns: each is better at its own, "
                "and they part where the optima do.",
                [
                    Quantity("exact sum of payments, cum less final", less(end(cum, "cum"), end(final, "cum"))),
                    Quantity(
                        "exact posterior mean of the recommended arm, final less cum",
                        less(end(final, "final"), end(cum, "final")),
                        digits=4,
                    ),
                    Quantity(
                        "probability of cum's action where the optima disagree, cum less final",
                        less(end(cum, "as_cum"), end(final, "as_cum")),
                    ),
                ],
                [{"trained on": LABELS[name]} | {key: average(end(name, key)) for key in COLUMNS} for name in bandits],
            )
        )
        game = context_game(HORIZON)
        uniform = dict(zip(("cum", "final"), policy_value(law_of("uniform", game), game), strict=True))
        best = {key: bayes(game, key).value for key in uniform}
        shares = {
            key: {
                seed: (value - uniform[key]) / (best[key] - uniform[key])
                for seed, value in end(f"text-bandit-{key}", key).items()
            }
            for key in uniform
        }
        found.append(
            finding(
                "text: near the optimum",
                f"Each policy goes at least {CLOSED:.0%} of the way from uniform play to the exact optimum of its return.",
                [Quantity(f"{key}, share of the way", shares[key], CLOSED, digits=2) for key in shares],
                [],
                f"Uniform and optimum: cum {uniform['cum']:.4f}, {best['cum']:.4f}; final {uniform['final']:.4f}, "
                f"{best['final']:.4f}.",
            )
        )
    if cum in bandits and process in bandits:
        game = context_game(HORIZON)
        found.append(
            finding(
                "text: process imitates its learner",
                "Reward for UCB1's own pulls gives a policy nearer to UCB1 than reward for payments, its regret included.",
                [
                    Quantity("distance to UCB1, cum less process", less(end(cum, "to_ucb1"), end(process, "to_ucb1"))),
                    Quantity("exact sum of payments, cum less process", less(end(cum, "cum"), end(process, "cum"))),
                ],
                [],
                f"Process collects {average(end(process, 'cum'))}, UCB1 itself "
                f"{policy_value(law_of('ucb1', game), game)[0]:.4f}.",
            )
        )
    if len(games) == len(GAMES):
        by_outcome, by_bits, by_process = (end(name, "success") for name in GAMES)
        found.append(
            finding(
                "text: process against outcome on threshold",
                "Reward for each of bisection's questions finds more numbers in time than reward for having found one, and "
                "than reward for each answer's information.",
                [
                    Quantity("success, process less outcome", less(by_process, by_outcome)),
                    Quantity("success, process less information", less(by_process, by_bits)),
                ],
                [
                    {"trained on": LABELS[name]}
                    | {key: average(end(name, key)) for key in ("success", "halves", "bisects")}
                    for name in games
                ],
            )
        )
    return found


# -------------------------------------------------------------------------------------------------------------- figures


def figures(rows: Sequence[Row], options: Any) -> dict[str, Any]:
    """Curves of exact values over training; and each policy after it, in the plane of the two returns."""
    found: dict[str, Any] = {}
    bandits, games = seen(rows, BANDITS), seen(rows, GAMES)
    if bandits:
        figure, axes = subplots(1, 3)
        titles = {
            "cum": "exact sum of payments",
            "final": "exact posterior mean\nof the recommended arm",
            "as_cum": "P(cum's action)\nwhere the optima disagree",
        }
        game = context_game(HORIZON)
        for axis, (key, title) in zip(axes[0], titles.items(), strict=True):
            for name in bandits:
                steps, curves = _curves(rows, name, key)
                band(axis, steps, curves, LABELS[name], COLOURS[LABELS[name]])
            if key != "as_cum":
                axis.axhline(bayes(game, key).value, color=GREY, linestyle="--", linewidth=1, label="optimum")
            axis.set_xlabel("step (128 episodes)")
            axis.set_ylabel(title)
        axes[0, 0].legend(fontsize=7, frameon=False, loc="lower left")
        caption = (
            f"A tiny language model on a text bandit of {HORIZON} pulls, from one start; only the reward differs. Look at "
            "whether each colour is highest in its own panel, and in the last panel which optimum each policy sides with. "
            "Mean and 95 % t interval over seeds; values are exact, from the policy's probabilities in all 341 contexts."
        )
        found["text-bandit"] = (figure, caption)
    if games:
        figure, axes = subplots(1, 2)
        for name in games:
            steps, curves = _curves(rows, name, "success")
            band(axes[0, 0], steps, curves, LABELS[name], COLOURS[LABELS[name]])
        axes[0, 0].set_xlabel("step (128 episodes)")
        axes[0, 0].set_ylabel("success (512 episodes)")
        axes[0, 0].legend(fontsize=7, frameon=False)
        points(axes[0, 1], {LABELS[n]: list(values(rows, n, "halves", -1).values()) for n in games}, COLOURS)
        axes[0, 1].set_ylabel("P(bisection's question)\nafter training")
        caption = (
            f"The threshold game, numbers 0 to {N} and 4 questions. Look at where the curves part: process pays each of "
            "bisection's questions, information each answer's bits, outcome the number alone; the right panel shows which of "
            "them ask as bisection does. Mean and 95 % t interval over seeds."
        )
        found["text-threshold"] = (figure, caption)
    return found


def _curves(rows: Sequence[Row], name: str, key: str) -> tuple[list[int], list[list[float]]]:
    """(steps, one curve a seed) of an arm that has rows."""
    own = [row["result"] for row in rows if row["name"] == name]
    return own[0]["steps"], [one[key] for one in own]
