"""The training guard: says in one line what silently ruins a run, and what to try. It never stops one.

Two parts. On the first batches, audit checks over the rows that are about to be trained on, and the sampler's log-probs
against the learner's on a few of them. At every step, rules over the metrics so far (guard_rules.py). What is learnt does
not depend on it. Its state is a function of metrics.jsonl and of its own lines, so that a killed and resumed run has the
same guard.jsonl. Left out: anything that needs a second forward of the whole batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from assay.audit.checks import CHECKS, audit
from assay.audit.columns import Finding, Rollouts
from assay.audit.readers.traces import from_rows
from assay.guard_rules import RULES, History
from assay.methods.host import GROUP_ESTIMATORS, total
from assay.protocols import Learner, Metrics
from assay.rows import Batch, Row
from assay.rundir import RunDir
from assay.trace import Trace

FIRST_STEPS = 2  # whose batches are audited
TOKENS = 16384  # of whole groups, audited a step at most: 2 % of a step's time (docs/guard.md)
SCORED = 0.01  # share of the batch's tokens that are forwarded once more, without gradients
COOL_DOWN = 10  # steps for which a theme is quiet after it has spoken
CLEAR = 5  # steps without a finding after which it may be said again
SOUND = ("A101", "A102", "A106", "A201", "A202", "A203", "A205", "A207", "A209", "A301", "A305", "A313", "A406", "A601")
CREDIT = ("A311", "A312", "A315")  # where the estimator is a group's, and nothing but the host writes advantages
REWARD = ("A403", "A404", "A407")  # of all episodes of the batch; the first two say what G110 would say again
KINDS = ("error", "warning")  # notes are for whoever asks


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was seen. `text` ends with what to try."""

    step: int
    code: str
    text: str

    def __str__(self) -> str:
        return f"guard: step {self.step}: {self.text} (assay audit --explain {self.code} says more)"


@dataclass(slots=True)
class Memory:
    """What was said, so that one thing is said once: by code, and by theme for things that come together."""

    standing: dict[str, int] = field(default_factory=dict)  # code -> last step at which it was still found
    quiet: dict[str, int] = field(default_factory=dict)  # theme -> last step of its silence

    def say(self, step: int, code: str, theme: str) -> bool:
        """Is this finding news? Remembers it if so."""
        told = step - self.standing.get(code, step - CLEAR - 1) <= CLEAR
        if told:
            self.standing[code] = step
        elif news := step > self.quiet.get(theme, 0):
            self.standing[code] = step
            self.quiet[theme] = step + COOL_DOWN
            return news
        return False


class Guard:
    """`batch` before the updates of a step, `step` after them with its metrics. `seconds`: what both took this step.

    `history` are the metrics of the steps before, `said` the lines of guard.jsonl: those of a run that goes on.
    """

    def __init__(
        self,
        config: Any,
        learner: Learner,
        history: Sequence[Mapping[str, Any]] = (),
        said: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.config, self.learner = config, learner
        self.seconds = 0.0
        self.resumed = bool(history)
        self._records: list[Mapping[str, Any]] = []
        self._memory = Memory()
        self._found: list[Finding] = []
        for record in history:
            for line in said:
                if line["step"] == record["step"] and line["code"] in CHECKS:
                    self._memory.say(line["step"], line["code"], theme_of(line["code"]))
            self._watch(record)

    def batch(self, step: int, batch: Batch, rows: Sequence[Row]) -> None:
        """Looks at the rows that are about to be trained on: on the first batches, and on the first after a resume."""
        self._found = []
        began = time.perf_counter()
        if rows and (step <= FIRST_STEPS or self.resumed):
            self._found = look(self.config, self.learner, batch, rows)
        self.seconds = time.perf_counter() - began

    def step(self, record: Mapping[str, Any]) -> tuple[list[Line], list[Line]]:
        """(lines for guard.jsonl, lines to be shown only) of a step whose metrics, with "step", are `record`.

        What the first batch after a resume shows is not written: a run that was not interrupted has not looked at it.
        """
        began = time.perf_counter()
        step = int(record["step"])
        found = [f for f in self._found if step <= FIRST_STEPS or f.severity == "error"]
        lines = [
            Line(step, f.code, f"{f.sentence}; {f.advice}" if f.advice else f.sentence)
            for f in found
            if step > FIRST_STEPS or self._memory.say(step, f.code, theme_of(f.code))
        ]
        shown = lines if step > FIRST_STEPS else []
        written = [line for line in lines if not shown] + self._watch(record)
        self.resumed = False
        self.seconds += time.perf_counter() - began
        return written, shown

    def _watch(self, record: Mapping[str, Any]) -> list[Line]:
        self._records.append(record)
        step, history = int(record["step"]), History(self._records)
        found = {code: text for code, rule in RULES.items() if (text := rule.find(history))}
        return [Line(step, code, text) for code, text in found.items() if self._memory.say(step, code, theme_of(code))]


def theme_of(code: str) -> str:
    """What says the same thing in another way has the same theme."""
    return "reward" if code in REWARD[:2] else RULES[code].theme if code in RULES else code


def watch(guard: Guard, run: RunDir, step: int, metrics: Metrics, note: Callable[[str], None]) -> float:
    """After a step: says and keeps what the guard has found; how many seconds it took."""
    written, shown = guard.step({"step": step, **metrics})
    for line in written:
        run.append_guard(step, {"code": line.code, "text": line.text})
    for line in (*written, *shown):
        note(str(line))
    return guard.seconds


# --------------------------------------------------------------------------------------------------------- the batch


def look(config: Any, learner: Learner, batch: Batch, rows: Sequence[Row]) -> list[Finding]:
    """Errors and warnings of the audit: of all outcomes, and of the rows of some groups."""
    own = some_groups(rows, TOKENS)
    keys = {row.trace.key for row in own}
    scores = {trace.key: total(batch, trace) for trace in batch.traces}
    declared = {"estimator": config.slots.advantage, "temperature": config.temperature}
    columns = scored(learner, own, sum(map(len, rows)), config.temperature)
    plain = len(config.method) == 1 and config.slots.advantage in GROUP_ESTIMATORS
    modes = {row.trace.mode for row in own}
    codes = SOUND + CREDIT if plain and len(modes) == 1 else SOUND
    kept = [group for group in batch.groups if any(trace.key in keys for trace in group.traces)]
    rollouts = from_rows(columns, Batch(kept, scores=scores), "the batch", **declared)
    found = audit(rollouts, codes).findings + audit(outcomes(batch.traces, scores), REWARD).findings
    return [finding for finding in found if finding.severity in KINDS]


def outcomes(traces: Sequence[Trace], scores: Mapping[str, float]) -> Rollouts:
    """What each episode came to, without its tokens."""
    samples = {
        "reward": np.array([trace.reward for trace in traces], np.float64),
        "score": np.array([scores[trace.key] for trace in traces], np.float64),
        "group": np.array([trace.group_key for trace in traces], object),
        "rollout": np.array([trace.key for trace in traces], object),
        "outcome": np.array([trace.outcome.value for trace in traces], object),
    }
    return Rollouts("the batch", "assay", [trace.key for trace in traces], samples=samples)


def some_groups(rows: Sequence[Row], tokens: int) -> list[Row]:
    """Whole groups in key order until they have so many tokens: at least one."""
    chosen: list[Row] = []
    for _, group in groupby(sorted(rows, key=lambda row: row.key), key=lambda row: row.trace.group_key):
        more = list(group)
        if chosen and sum(map(len, chosen)) + sum(map(len, more)) > tokens:
            break
        chosen += more
    return chosen


def scored(learner: Learner, rows: Sequence[Row], tokens: int, temperature: float) -> list[Row]:
    """The rows with column "old_logprob"; where no score pass wrote it, on copies, and for a few rows of each size only.

    Those of the trainer and of the sampler differ where the two are not one policy, whatever the number of updates.
    """
    if not rows or "old_logprob" in rows[0].columns:
        return list(rows)
    copies = [replace(row, columns=dict(row.columns)) for row in rows]
    chosen: list[Row] = []
    room = SCORED * tokens
    for row in sorted(copies[:: max(1, len(copies) // 8)], key=len):
        room -= len(row)
        if chosen and room < 0:
            break
        chosen.append(row)
    learner.score(chosen, frozenset({"old_logprob"}), temperature)
    return copies
