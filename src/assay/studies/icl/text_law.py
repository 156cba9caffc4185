"""The law of a language model that plays the bandit or the threshold game: probabilities of its answers in every context, and
what follows from them exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from assay.bandits import (
    Array,
    bayes,
    context_digits,
    context_game,
    disagreement,
    distance,
    law_of,
    policy_value,
    visits,
)
from assay.build import Bench
from assay.envs.threshold import bisect
from assay.evaluate import PANEL_SEED
from assay.model import causal
from assay.rollout import Job

HORIZON = 5  # pulls
N = 15  # of the threshold game
PANEL = 32  # episodes with each number of the threshold game: a standard error of at most .022
REFERENCES = ("ucb1", "bayes-cum", "bayes-final")


@torch.no_grad()
def answer_probabilities(bench: Bench, seen: Sequence[str], given: Sequence[str], answers: Sequence[str]) -> Array:
    """[len(seen), len(answers)]: probability of each answer's first token after each observation, in the context of the
    observations `seen` and the answers `given` between them. Answers must differ in their first token."""
    renderer, ids, asked = bench.renderer, [bench.renderer.prompt("")[0]], []
    length = len(ids[0])
    for turn, text in enumerate(seen):
        parts = [renderer.observation(text, first=turn == 0)[0]]
        if turn:
            said = renderer.answer(given[turn - 1])
            parts = [said, renderer.closing(said), *parts]
        ids += parts
        length += sum(map(len, parts))
        asked.append(length - 1)
    flat = torch.as_tensor(np.concatenate(ids), dtype=torch.int64)
    hidden = bench.network.hidden(flat, torch.arange(len(flat)), causal)
    probabilities = bench.network.logits(hidden[asked]).double().softmax(-1).numpy()
    return np.asarray(probabilities[:, [int(renderer.answer(answer)[0]) for answer in answers]])


def bandit_law(bench: Bench) -> tuple[list[Array], list[Array]]:
    """(law over the arms, renormalised; probability of anything else), by step, on the rows of `context_game`."""
    last = HORIZON - 1
    arms, outcomes = context_digits(last)
    found = np.empty((len(arms), HORIZON, 2))
    for row, (pulled, paid) in enumerate(zip(arms.tolist(), outcomes.tolist(), strict=True)):
        after = [f"{a + 1}: {y}, {last - t} left" for t, (a, y) in enumerate(zip(pulled, paid, strict=True))]
        given = [str(a + 1) for a in pulled]
        found[row] = answer_probabilities(bench, [f"{HORIZON} left", *after], given, ("1", "2"))
    law, other = [], []
    for step in range(HORIZON):
        own = found[:: 4 ** (last - step), step]  # contexts of the last step that begin alike agree on earlier ones
        law.append(own / own.sum(1, keepdims=True))
        other.append(1 - own.sum(1))
    return law, other


def read_bandit(bench: Bench) -> dict[str, Any]:
    """Exact values of the policy, what it does where the two optima disagree, and its distances."""
    law, other = bandit_law(bench)
    game = context_game(HORIZON)
    cum, final = policy_value(law, game)
    seen = visits(law, game)
    found: dict[str, float | None] = {
        "cum": cum,
        "final": final,
        "other": sum(float(p @ q) for p, q in zip(seen, other, strict=False)) / HORIZON,
        "as_cum": as_cum(law),
    }
    for name in REFERENCES:
        gap = distance(law, law_of(name, game), game)
        found[f"to_{name}"] = gap if np.isfinite(gap) else None
    return found


def as_cum(law: Sequence[Array]) -> float:
    """Probability of the action that is best for "cum", where the one that is best for "final" is the other one; contexts
    weighted as uniform play visits them."""
    game = context_game(HORIZON)
    best = bayes(game, "cum")
    where = disagreement(best, bayes(game, "final"))
    seen = visits(law_of("uniform", game), game)
    weights = [p * mask for p, mask in zip(seen, where, strict=False)]
    total = sum(float(w.sum()) for w in weights)
    return sum(float(w @ (p * b).sum(1)) for w, p, b in zip(weights, law, best.optimal, strict=True)) / total


def read_threshold(bench: Bench) -> dict[str, Any]:
    """`success` on each number `PANEL` times, sampled with draws that are always the same (other questions than bisection's
    find some numbers, so the contexts are too many to read); and, read, what it does in the 15 contexts that bisection
    meets: `halves`, the mean probability of bisection's question, and `bisects`, that of asking nothing else, both with
    each number equally often."""
    answers = [str(k) for k in range(1, N + 1)]
    turns = N.bit_length()
    halves = bisects = 0.0
    for theta in range(N + 1):
        lo, hi, seen, given = 0, N, [f"1 to {N}"], []
        while lo < hi:
            query = bisect(lo, hi)
            lo, hi = (query, hi) if theta >= query else (lo, query - 1)
            given.append(str(query))
            seen.append(f"{query} {'yes' if theta >= query else 'no'}")
        found = answer_probabilities(bench, seen[:turns], given, answers)
        own = [float(found[t, int(query) - 1]) for t, query in enumerate(given)]
        bisects += float(np.prod(own)) / (N + 1)
        halves += sum(own) / turns / (N + 1)
    return {"success": sampled_success(bench), "halves": halves, "bisects": bisects}


def sampled_success(bench: Bench) -> float:
    """Share of the numbers found in time: every number `PANEL` times."""
    jobs = [Job(task, "train", slot=task) for task in range(PANEL * (N + 1))]
    traces = bench.driver(1.0, PANEL_SEED).collect(jobs, bench.sampler.version)
    return sum(trace.success for trace in traces) / len(traces)
