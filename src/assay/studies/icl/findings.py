"""Verdicts of the experiments "rewards", "supervision" and "recursions", by the rule of verdicts.py and the bounds below,
both fixed before looking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from assay.bandits import bayes, count_game, pulls
from assay.studies.grid import Finding, Row
from assay.studies.icl import recursions, rewards, supervision
from assay.studies.icl.verdicts import Quantity, average, finding, gap, less, seen, values

HOW = ("sample", "argmax")
CLOSED = 0.8  # share of the way from uniform play to the optimum that counts as reaching it
WITHIN = 0.02  # of the optimum
SAME_LAW, SAME_VALUE = 0.02, 0.05  # distance and sum of rewards within which a policy is the reference
ACCURATE = 0.25  # standard deviations of a state, or share of wrong intervals
ROUNDING = 1e-4


# ---------------------------------------------------------------------------------------------------------- rewards


def of_rewards(rows: Sequence[Row]) -> list[Finding]:
    def sample(name: str, key: str) -> dict[int, float]:
        return values(rows, name, "sample", key)

    names = seen(rows, list(rewards.ARMS))
    keys = ("return", "optimum", "uniform", "closed", "cum", "final", "pulls")
    table = [{"cell": name} | {key: average(sample(name, key)) for key in keys} for name in names]
    sides = [
        {
            "cell": name,
            "takes cum's action": average(sample(name, "cum_side"), 3),
            "where it meets them": average(sample(name, "cum_side_met"), 3),
        }
        | {f"to {ref}": average(sample(name, f"distance {ref}"), 3) for ref in rewards.REFERENCES}
        for name in names
        if not name.startswith("cost")
    ]
    aims = [name for name in rewards.ARMS if name in ("cum", "final", "info") or name.startswith("cost")]
    reached = [Quantity(f"{name}, share of the way", sample(name, "closed"), CLOSED, digits=2) for name in aims]
    lost = [
        Quantity(f"{name}, short of its optimum by", _short(rows, name), WITHIN, above=False)
        for name in ("cum", "final")
    ]
    learned = [name for name in rewards.ARMS if name.startswith("cost")]
    fewer = [
        Quantity(f"pulls at {a[5:]} less pulls at {b[5:]}", less(sample(a, "pulls"), sample(b, "pulls")))
        for a, b in pairwise(learned)
    ]
    prices = [
        {"price": price, "pulls": average(sample(name, "pulls"), 3), "optimal pulls": round(best, 3)}
        for name in learned
        for price in [rewards.ARMS[name]["price"]]
        for best in [pulls(bayes(count_game(5), ("cost", price)).law, count_game(5))]
    ]
    return [
        finding(
            "two returns, two policies",
            "From the same weights and tasks, the sum of rewards and the final posterior mean teach different policies: "
            "where their optima share no action, one takes the action of the one and the other that of the other.",
            [
                Quantity("probability of cum's action, trained on cum", sample("cum", "cum_side"), 0.5),
                Quantity("trained on final", sample("final", "cum_side"), 0.5, above=False),
                Quantity("sum of rewards, cum less final", less(sample("cum", "cum"), sample("final", "cum"))),
            ],
            sides,
        ),
        finding(
            "two policies where they go",
            "The same, asked only of the contexts without a shared optimal action that the policy itself meets.",
            [
                Quantity("probability of cum's action, trained on cum", sample("cum", "cum_side_met"), 0.5),
                Quantity("trained on final", sample("final", "cum_side_met"), 0.5, above=False),
            ],
            [],
            "Added after the finding above had been seen for one seed at other settings.",
        ),
        finding("near the optimum", f"Cum and final end within {WITHIN:.0%} of their own exact optimum.", lost, table),
        finding(
            "most of the way",
            f"Each policy goes at least {CLOSED:.0%} of the way from uniform play to the exact optimum of its own return.",
            reached,
            [],
            "One finding with the one above until the five seeds had been seen.",
        ),
        finding("price of a pull", "A higher price of a pull teaches fewer pulls.", fewer, prices),
        finding(
            "information is not reward",
            "Pure information gain teaches what the final return teaches, not what the sum of rewards teaches.",
            [
                Quantity(
                    "probability of cum's action, trained on information", sample("info", "cum_side"), 0.5, above=False
                ),
                Quantity(
                    "distance to the cum optimum less distance to the final optimum",
                    less(sample("info", "distance bayes-cum"), sample("info", "distance bayes-final")),
                ),
            ],
            [],
        ),
        finding(
            "baseline of a group",
            "A baseline from episodes of the same hidden means ends nearer to the optimum than one from the whole batch.",
            [
                Quantity(
                    f"{k}, share of the way, group less batch",
                    less(sample(k, "closed"), sample(f"{k}-batch", "closed")),
                )
                for k in ("cum", "final")
            ],
            [],
        ),
        finding(
            "entropy bonus",
            "An entropy bonus from 0.1 ends nearer to the optimum of the sum of rewards than one from 0.01.",
            [
                Quantity(
                    "share of the way, 0.1 less 0.01",
                    less(sample("cum", "closed"), sample("cum-low-entropy", "closed")),
                )
            ],
            [],
        ),
    ]


def _short(rows: Sequence[Row], name: str) -> dict[int, float]:
    best, got = values(rows, name, "sample", "optimum"), values(rows, name, "sample", "return")
    return {seed: 1 - got[seed] / best[seed] for seed in got}


# ------------------------------------------------------------------------------------------------------ supervision


def of_supervision(rows: Sequence[Row]) -> list[Finding]:
    def of(name: str, key: str, how: str = "sample") -> dict[int, float]:
        return values(rows, name, how, key)

    names = seen(rows, list(supervision.ARMS))
    exact = supervision.reference_values(supervision.HORIZON)
    table: list[dict[str, Any]] = [
        {
            "trained on": name,
            "read": how,
            "cum": average(of(name, "cum", how)),
            "final": average(of(name, "final", how)),
        }
        | {f"to {ref}": average(of(name, f"distance {ref}", how), 3) for ref in supervision.REFERENCES}
        for name in names
        for how in ("sample", "argmax")
    ]
    table += [
        {"trained on": name, "read": "exact", "cum": round(c, 4), "final": round(f, 4)}
        for name, (c, f) in exact.items()
    ]
    table = [{key: row.get(key) for key in table[0]} for row in table]
    loops = [
        {"cell": name}
        | {
            key: average(of(name, key), 4)
            for key in ("tv", "drift", "cum_gap", "cum_bound", "final_gap", "final_bound")
        }
        for name in names
    ]
    sides = (("tv", "drift"), ("cum_gap", "cum_bound"), ("final_gap", "final_bound"))
    worst = {
        seed: max(
            r["result"][how][a] - r["result"][how][b]
            for r in rows
            if r["seed"] == seed
            for how in HOW
            for a, b in sides
        )
        for seed in sorted({row["seed"] for row in rows})
        if {row["name"] for row in rows if row["seed"] == seed} >= set(supervision.ARMS)  # it is a claim of all
    }
    return [
        finding(
            "process supervision copies the learner",
            "Taught UCB1's steps, the network executes UCB1, its regret included.",
            [
                Quantity("distance to UCB1", of("process-ucb1", "distance ucb1"), SAME_LAW, above=False),
                Quantity(
                    "sum of rewards off UCB1's by", gap(of("process-ucb1", "cum"), exact["ucb1"][0]), SAME_VALUE, False
                ),
            ],
            table,
        ),
        finding(
            "hindsight labels are Thompson sampling",
            "Taught the best arm in hindsight, the sampled network is Thompson sampling; by argmax it earns more.",
            [
                Quantity("distance to Thompson, sampled", of("oracle-arm", "distance thompson"), SAME_LAW, above=False),
                Quantity(
                    "cum off Thompson's by", gap(of("oracle-arm", "cum"), exact["thompson"][0]), SAME_VALUE, False
                ),
                Quantity("cum, argmax less sampled", less(of("oracle-arm", "cum", "argmax"), of("oracle-arm", "cum"))),
            ],
            [],
        ),
        finding(
            "outcome-optimal actions beat the learner",
            "Taught the Bayes-optimal actions for a return, the network earns more of that return than one taught UCB1.",
            [
                Quantity("cum, Bayes-cum less UCB1", less(of("bayes-cum", "cum"), of("process-ucb1", "cum"))),
                Quantity(
                    "final, Bayes-final less UCB1",
                    less(of("bayes-final", "final"), of("process-ucb1", "final")),
                    digits=4,
                ),
            ],
            [],
        ),
        finding(
            "closed-loop bounds",
            "Inequalities (4) and (5) hold for every trained network and read-out, against the law its labels aim at.",
            [Quantity("largest left side less right side", worst, ROUNDING, above=False)],
            loops,
            "By enumeration of all contexts; that they hold is a theorem, how loose they are is the measurement.",
        ),
        finding(
            "an expert's actions leak",
            "On contexts of an expert who knows the best arm, hindsight labels teach to copy one's own actions: the sum of "
            "rewards falls.",
            [
                Quantity("cum, without leak less with leak", less(of("oracle-arm", "cum"), of("oracle-leak", "cum"))),
                Quantity(
                    "distance to the law that the leak implies", of("oracle-leak", "distance leak"), SAME_LAW, False
                ),
            ],
            [],
        ),
        finding(
            "whose contexts",
            "Labels on the network's own contexts (DAgger) imitate UCB1 more closely than labels on uniform play.",
            [
                Quantity(
                    "distance to UCB1, uniform less own",
                    less(of("ucb1-on-uniform", "distance ucb1"), of("ucb1-on-own", "distance ucb1")),
                )
            ],
            [
                {
                    "contexts": name,
                    "to ucb1": average(of(name, "distance ucb1"), 4),
                    "drift": average(of(name, "drift"), 4),
                }
                for name in seen(
                    rows, ("process-ucb1", "ucb1-on-own", "ucb1-on-learner", "ucb1-on-uniform", "ucb1-and-state")
                )
            ],
        ),
        finding(
            "ties are masked",
            "With tied states masked out of the loss, final-optimal labels are learned more closely than with uniform labels "
            "on ties.",
            [
                Quantity(
                    "distance to Bayes-final, uniform labels less masked",
                    less(of("bayes-final-ties", "distance bayes-final"), of("bayes-final", "distance bayes-final")),
                )
            ],
            [],
        ),
    ]


# ------------------------------------------------------------------------------------------------------- recursions


def of_recursions(rows: Sequence[Row]) -> list[Finding]:
    horizon = recursions.HORIZON
    kinds = [kind for kind in recursions.RECURSIONS if any(row["name"].startswith(f"{kind}-") for row in rows)]

    def error(kind: str, way: str, t: int = horizon, key: str = "error") -> dict[int, float]:
        return values(rows, f"{kind}-{way}", key, t - 1)

    def ratio(one: str, other: str, kinds: Sequence[str], t: int = horizon) -> dict[int, float]:
        """Mean over recursions of log2 of the ratio of two errors; seeds that have all of them."""
        logs = []
        for kind in kinds:
            a, b = error(kind, one, t), error(kind, other, t)
            logs.append({seed: np.log2(max(a[seed], 1e-3) / max(b[seed], 1e-3)) for seed in set(a) & set(b)})
        both = sorted(set.intersection(*(set(found) for found in logs))) if logs else []
        return {seed: float(np.mean([found[seed] for found in logs])) for seed in both}

    at_end = [
        {"recursion": kind}
        | {way: average(error(kind, way), 3) for way in recursions.WAYS}
        | {"one step": _one_step(rows, kind)}
        for kind in kinds
    ]
    beyond = [
        {"recursion": kind}
        | {way: average(error(kind, way, 2 * horizon), 3) for way in ("none-2", "relative-2", "pad-2")}
        for kind in recursions.BEYOND_OF
    ]
    bounded = [kind for kind in kinds if recursions.RECURSIONS[kind].lipschitz is not None]
    growth = [
        {
            "recursion": kind,
            "t": t,
            "error": average(error(kind, "pad-2", t, "gap")),
            "bound (7)": average(error(kind, "pad-2", t, "bound")),
        }
        for kind in bounded
        for t in (horizon // 2, horizon, 2 * horizon)
    ]
    excess: dict[int, float] = {}
    for name in (f"{kind}-pad-{depth}" for kind in bounded for depth in (1, 2)):
        for seed, value in values(rows, name, "excess").items():
            excess[seed] = max(value, excess.get(seed, 0.0))
    return [
        finding(
            "recursions are carried",
            f"Two layers, taught at every t, read each state at t = H within {ACCURATE} standard deviations (the interval: "
            "that share of states wrong).",
            [Quantity(kind, error(kind, "direct-2"), ACCURATE, above=False) for kind in recursions.RECURSIONS],
            at_end,
        ),
        finding(
            "a second layer",
            "Two layers read the constant-step recursion better than one, as construction (6) suggests.",
            [Quantity("error at H, one layer less two", less(error("ema", "direct-1"), error("ema", "direct-2")))],
            [
                {"recursion": kind}
                | {f"{depth} layers": average(error(kind, f"direct-{depth}"), 3) for depth in (1, 2, 4)}
                for kind in kinds
            ],
        ),
        finding(
            "process against outcome supervision",
            "Teaching the state at every t gives a smaller error at H than teaching the last state alone, at equal updates.",
            [
                Quantity(
                    "log2 of the errors' ratio, last alone to every t",
                    ratio("final-2", "direct-2", list(recursions.RECURSIONS)),
                    digits=2,
                )
            ],
            [],
        ),
        *(
            finding(
                f"a state token against the prefix: {kind}",
                f"Carrying the state of {kind} in a token gives a smaller error at t = 2H than reading the prefix without "
                "positions or with relative ones.",
                [
                    Quantity(
                        f"error, {way} less pad-2",
                        less(error(kind, way, 2 * horizon), error(kind, "pad-2", 2 * horizon)),
                    )
                    for way in recursions.BEYOND
                ],
                [row for row in beyond if row["recursion"] == kind],
                "Learned positions are refused beyond H.",
            )
            for kind in recursions.BEYOND_OF
        ),
        finding(
            "error growth",
            "A carried state's error stays within (7), with each episode's own one-step errors and L = 1.",
            [Quantity("largest excess over the bound", excess, ROUNDING, above=False, digits=5)],
            growth,
            "That it holds is a theorem; the table says how loose it is.",
        ),
    ]


def _one_step(rows: Sequence[Row], kind: str) -> float | None:
    """Mean over t = 1..H and seeds of the pad's error after one step from the true state."""
    found = [row["result"]["one_step"][: recursions.HORIZON] for row in rows if row["name"] == f"{kind}-pad-2"]
    return round(float(np.mean(found)), 3) if found else None


FINDINGS: dict[str, Callable[[Sequence[Row]], list[Finding]]] = {
    "rewards": of_rewards,
    "supervision": of_supervision,
    "recursions": of_recursions,
}
