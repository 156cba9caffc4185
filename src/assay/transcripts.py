"""Episodes as a page shows them: turns, and tokens with what is known about each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.trace import POLICY, Ids, Provenance, Trace, Turn

MOST_TURNS = 40  # of one episode on the page
MOST_BYTES = 4  # of one UTF-8 character: as many tokens may share one

Decode = Callable[[Ids], str]


def paired_examples(before: Sequence[Trace], after: Sequence[Trace], most: int = 2) -> list[dict[str, Trace]]:
    """{"before", "after"} traces of the same task: first one that training solved, then one that it did not, then
    others in panel order. If one side is missing, the other's first traces."""
    later = {str(trace.task): trace for trace in after if trace.kind == "root"}
    earlier = {str(trace.task): trace for trace in before if trace.kind == "root"}
    pairs = [{"before": trace, "after": later[task]} for task, trace in earlier.items() if task in later]
    if not pairs:
        side, single = ("before", earlier) if earlier else ("after", later)
        return [{side: trace} for trace in list(single.values())[:most]]
    solved = [p for p in pairs if p["after"].success and not p["before"].success]
    unsolved = [p for p in pairs if not p["after"].success]
    first = solved[:1] + unsolved[:1]
    return (first + [p for p in pairs if not any(p is q for q in first)])[:most]


def episode(trace: Trace, decode: Decode | None, advantages: Sequence[float] | None = None) -> dict[str, Any]:
    """What the template shows of one trace. `advantages` has one number per policy token, or is None."""
    policy = [int(np.isin(turn.provenance, POLICY).sum()) for turn in trace.turns]
    if advantages is not None and len(advantages) != sum(policy):
        raise ValueError(f"trace {trace.key} has {sum(policy)} policy tokens, not {len(advantages)} advantages")
    starts = np.cumsum([0, *policy])
    credit = [None if advantages is None else advantages[a:b] for a, b in pairwise(starts)]
    shown = list(zip(trace.turns, credit, strict=True))[:MOST_TURNS]
    return {
        "outcome": trace.outcome.value,
        "reward": trace.reward,
        "turns": [_turn(turn, decode, numbers) for turn, numbers in shown],
        "hidden": len(trace.turns) - len(shown),
        "length": len(trace.turns),
        "tokens": trace.sampled_tokens,
        "final": trace.final_observation,
        "error": trace.error,
        "prompt": tokens(trace.prompt_ids, trace.prompt_provenance, decode) if decode else [],
    }


def _turn(turn: Turn, decode: Decode | None, advantages: Sequence[float] | None) -> dict[str, Any]:
    full = np.full(len(turn.ids), np.nan)
    if advantages is not None:
        full[np.isin(turn.provenance, POLICY)] = advantages
    numbers = {"log-prob": turn.logprobs, "entropy": turn.entropies, "advantage": full}
    return {
        "observation": turn.observation,
        "action": turn.action,
        "valid": turn.valid,
        "noop": turn.noop,
        "reward": turn.reward,
        "stop": turn.stop,
        "context": tokens(turn.context_ids, turn.context_provenance, decode) if decode else [],
        "answer": tokens(turn.ids, turn.provenance, decode, numbers) if decode else [],
    }


def tokens(
    ids: Ids, provenance: NDArray[np.uint8], decode: Decode, numbers: dict[str, NDArray[Any]] | None = None
) -> list[dict[str, Any]]:
    """One entry per token, or per few tokens that only together make a character: text, provenance, what the pointer
    says, `surprise` (0 for a certain token, 1 for one of probability below 1 %) and the sign of the advantage."""
    found, start = [], 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if (
            text.endswith("\ufffd")
            and end - start < MOST_BYTES
            and end < len(ids)
            and provenance[end] == provenance[start]
        ):
            continue
        known = {name: values[start:end][np.isfinite(values[start:end])] for name, values in (numbers or {}).items()}
        logprob, advantage = (
            float(known[n].sum()) if n in known and len(known[n]) else math.nan for n in ("log-prob", "advantage")
        )
        origin = Provenance(int(provenance[start])).name.lower()
        said = [f"{origin}, id {', '.join(str(int(i)) for i in ids[start:end])}"]
        said += [f"{name} {', '.join(f'{v:.3f}' for v in values)}" for name, values in known.items() if len(values)]
        found.append(
            {
                "text": text,
                "origin": origin,
                "said": "\n".join(said),
                "surprise": round(min(-logprob / math.log(100), 1.0), 2) if math.isfinite(logprob) else 0.0,
                "credit": "up" if advantage > 0 else "down" if advantage < 0 else "",
            }
        )
        start = end
    return found
