"""Clean rollouts for the tests of the checks: all columns, any layout, numbers as a correct trainer writes them.

An episode is a prompt, then turns of observation, answer and closing. Answers are drawn from 70 ids and end in END; the
text of an id is its number. Faults are planted by the tests, one token or one group at a time.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.advantages import dr_grpo, grpo, reinforce_pp_baseline, rloo
from assay.audit.checks import Report, audit
from assay.audit.columns import Finding, Ragged, Rollouts

BOS, END, CLOSING, OPEN = 1, 2, 3, 4
ESTIMATORS: dict[str, Callable[..., Any]] = {"grpo": grpo, "dr-grpo": dr_grpo, "rloo": rloo}
Piece = tuple[list[int], bool]  # ids, were they sampled


def clean(
    groups: int = 6, members: int = 4, turns: int = 3, layout: str = "append", estimator: str = "grpo", seed: int = 0
) -> Rollouts:
    """Layouts: "append" (a sample is an episode), "steps" (a turn behind all before it), "window" (a turn behind one)."""
    rng = np.random.default_rng(seed)
    rows: list[list[Piece]] = []
    facts: list[dict[str, Any]] = []
    for group in range(groups):
        rewards = (
            rng.permutation((np.arange(members) < 1 + group % (members - 1)).astype(float))
            if group
            else np.ones(members)
        )
        for member, reward in enumerate(rewards):
            prompt: Piece = ([BOS, 200 + group, 300 + group], False)
            blocks = [_turn(rng) for _ in range(turns + (group + member) % 3)]
            blocks[0][0] = ([OPEN, 400 + group], False)  # a task begins alike for all
            for turn, end, first in _spans(layout, len(blocks)):
                pieces = [prompt, *(piece for block in blocks[first:end] for piece in block)]
                rows.append(pieces[:-1])  # nothing stands behind the last answer
                facts.append({
                    "reward": reward, "score": reward, "group": f"g{group}", "task": f"maze@1#{group}", "split": "train",
                    "rollout": f"{group}.{member}", "turn": turn, "outcome": "success" if reward else "failure",
                    "stop": "stop", "error": "", "version": 7, "padded": 0, "prompt": f"task {group}: find the key",
                    "gold": f"door code {group}{group}81", "completion": _text(pieces[-2][0]),
                })  # fmt: skip
    rollouts = _columns(rows, facts, layout)
    rollouts.declared |= {"estimator": estimator, "rollouts_per_task": members, "denominator": "token"}
    rollouts.declared |= {"layout": "window(1)"} if layout == "window" else {}
    credit(rollouts, estimator)
    logprobs = np.log(rng.uniform(0.01, 0.9, len(rollouts.tokens["ids"].values))).astype(np.float32)
    sampled, mask = rollouts.tokens["sampled"], rollouts.tokens["mask"].values
    logprobs[~(mask if layout == "window" else sampled.values)] = np.nan
    noise = rng.normal(0, 0.01, len(logprobs)).astype(np.float32)
    rollouts.tokens["logprobs"] = Ragged(logprobs, sampled.offsets)
    trainer = np.where(mask, logprobs + noise, np.nan).astype(np.float32)
    rollouts.tokens["trainer_logprobs"] = Ragged(np.minimum(trainer, 0), sampled.offsets)
    weights = np.where(mask, 1 / mask.sum(), np.nan).astype(np.float32)
    rollouts.tokens["weights"] = Ragged(weights, sampled.offsets)
    return rollouts


def _turn(rng: np.random.Generator) -> list[Piece]:
    answer = [*rng.integers(20, 90, rng.integers(4, 10)).tolist(), END]
    return [([OPEN, *rng.integers(100, 200, rng.integers(2, 6)).tolist()], False), (answer, True), ([CLOSING], False)]


def _spans(layout: str, turns: int) -> list[tuple[int, int, int]]:
    """(turn, end, first block) of each sample of an episode."""
    if layout == "append":
        return [(-1, turns, 0)]
    return [(t, t + 1, 0 if layout == "steps" else max(0, t - 1)) for t in range(turns)]


def _text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def _columns(rows: list[list[Piece]], facts: list[dict[str, Any]], layout: str) -> Rollouts:
    ids = [[i for part, _ in row for i in part] for row in rows]
    sampled = [[flag for part, flag in row for _ in part] for row in rows]
    own = [len(row[-1][0]) for row in rows]  # of the last answer
    mask = [
        flags if layout == "append" else [False] * (len(flags) - n) + [True] * n
        for flags, n in zip(sampled, own, strict=True)
    ]
    texts = {name: [fact.pop(name) for fact in facts] for name in ("prompt", "gold", "completion")}
    samples = {}
    for name in facts[0]:
        values = [fact[name] for fact in facts]
        samples[name] = np.array(values, object if isinstance(values[0], str) else None)
    return Rollouts(
        "rollouts.jsonl",
        "test",
        [f"line {i + 1}" for i in range(len(rows))],
        {"ids": Ragged.of(ids, np.int32), "mask": Ragged.of(mask, bool), "sampled": Ragged.of(sampled, bool)},
        samples,
        texts,
    )


def credit(rollouts: Rollouts, estimator: str) -> None:
    """Advantages of the estimator, each episode counted once."""
    names, groups, score = (rollouts.samples[n] for n in ("rollout", "group", "score"))
    tokens = rollouts.tokens["mask"]
    value: dict[Any, float] = {}
    first = {name: i for i, name in reversed(list(enumerate(names)))}
    if estimator in ESTIMATORS:
        for group in dict.fromkeys(groups):
            own = [name for name in dict.fromkeys(names) if groups[first[name]] == group]
            value |= dict(zip(own, ESTIMATORS[estimator]([score[first[n]] for n in own]), strict=True))
    else:
        count = np.bincount(tokens.row_of(), tokens.values, len(rollouts))
        own = list(dict.fromkeys(names))
        lengths = [int(count[names == name].sum()) for name in own]
        found = reinforce_pp_baseline([score[first[n]] for n in own], [groups[first[n]] for n in own], lengths)
        value = {name: float(a[0]) for name, a in zip(own, found, strict=True)}
    per_token = np.array([value[name] for name in names])[tokens.row_of()]
    advantages = np.where(tokens.values, per_token, np.nan).astype(np.float32)
    rollouts.tokens["advantages"] = Ragged(advantages, tokens.offsets)


# ------------------------------------------------------------------------------------------------ places and findings


def answer_ends(rollouts: Rollouts, row: int) -> NDArray[np.int64]:
    """Flat positions of the last token of each answer of a sample."""
    column = rollouts.tokens["sampled"]
    flags = np.append(column.row(row), False)
    return column.offsets[row] + np.flatnonzero(flags[:-1] & ~flags[1:])


def trained(rollouts: Rollouts, row: int) -> NDArray[np.int64]:
    """Flat positions under the loss of a sample."""
    return rollouts.tokens["mask"].offsets[row] + np.flatnonzero(rollouts.tokens["mask"].row(row))


def rows_of(rollouts: Rollouts, name: str, value: Any) -> NDArray[np.int64]:
    return np.flatnonzero(rollouts.samples[name] == value)


def loud(report: Report) -> list[Finding]:
    """Errors and warnings."""
    return [f for f in report.findings if f.severity != "note"]


def codes(report: Report) -> list[str]:
    return [f.code for f in loud(report)]


def only(rollouts: Rollouts, code: str, **functions: Any) -> Finding:
    """The one error or warning, which must be of this code."""
    report = audit(rollouts, **functions)
    assert codes(report) == [code], [(f.code, f.sentence) for f in report.findings]
    return loud(report)[0]


def without(rollouts: Rollouts, *names: str) -> Rollouts:
    """The same without these columns."""
    for columns in (rollouts.tokens, rollouts.samples, rollouts.texts, rollouts.declared):
        for name in names:
            columns.pop(name, None)  # type: ignore[attr-defined]
    return rollouts
