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
from assay.audit.explain import PARTS
from assay.audit.readers.traces import from_rows
from assay.guard_rules import RULES, History
from assay.methods.host import GROUP_ESTIMATORS, total
from assay.protocols import Learner, Metrics, UserError
from assay.rows import Batch, Row
from assay.rundir import RunDir
from assay.trace import Trace

FIRST_STEPS = 2  # whose batches are audited
TOKENS = 16384  # of whole groups, audited a step at most: 2 % of a step's time (docs/guard.md)
SCORED = 128  # sampled tokens that are forwarded once more, without gradients: what the checks of ratios need
COOL_DOWN = 10  # steps for which a theme is quiet after it has spoken
CLEAR = 10  # steps without a finding after which it may be said again
SOUND = ("A101", "A102", "A106", "A201", "A202", "A203", "A205", "A207", "A209", "A301", "A305", "A313", "A406", "A601")
CREDIT = ("A311", "A312", "A315")  # where the estimator is a group's, and nothing but the host writes advantages
REWARD = ("A403", "A404", "A407")  # of all episodes of the batch
SAME = {"A403": "G110", "A404": "G110"}  # said of a batch -> the rule that sees it again in the metrics
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

    def say(self, step: int, code: str) -> bool:
        """Is this finding news? Remembers it if so."""
        theme, heeds = themes_of(code)
        told = step <= max(self.standing.get(code, -CLEAR) + CLEAR, self.quiet.get(theme, 0))
        news = not told and all(step > self.quiet.get(other, 0) for other in heeds)
        if told or news:
            self.standing[code] = step
        if news:
            self.quiet[theme] = step + COOL_DOWN
            self.standing |= {SAME[code]: step} if code in SAME else {}
        return news


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
                    self._memory.say(line["step"], line["code"])
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
            if step > FIRST_STEPS or self._memory.say(step, f.code)
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
        return [Line(step, code, text) for code, text in found.items() if self._memory.say(step, code)]


def themes_of(code: str) -> tuple[str, list[str]]:
    """The theme of a code, and those after which it is quiet. A check of the audit is a theme of its own."""
    if code in RULES:
        return RULES[code].theme, RULES[code].heeds.split()
    return code, [code]


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
    columns = scored(learner, own, config.temperature)
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


def scored(learner: Learner, rows: Sequence[Row], temperature: float) -> list[Row]:
    """The rows with column "old_logprob"; where no score pass wrote it, on copies, and for a few short rows only.

    Those of the trainer and of the sampler differ where the two are not one policy, whatever the number of updates.
    """
    if not rows or "old_logprob" in rows[0].columns:
        return list(rows)
    copies = [replace(row, columns=dict(row.columns)) for row in rows]
    chosen: list[Row] = []
    for row in sorted(copies[:: max(1, len(copies) // 16)], key=len):
        if sum(len(other.at) for other in chosen) >= SCORED:
            break
        chosen.append(row)
    learner.score(chosen, frozenset({"old_logprob"}), temperature)
    return copies


# ------------------------------------------------------------------------------------------------------- what it says

TEXTS: dict[str, dict[str, str]] = {
    "G101": {
        "what": "The entropy of the policy is below 0.3 of what it was at most ten steps ago (and half of the first step's), "
        "or below 0.1 of the start, and neither success nor reward rose meanwhile. Not said where success is above 90 %: "
        "there it is natural.",
        "why": "A policy that always does the same gets groups without spread, and learns no more, whatever the budget.",
        "by_hand": "Plot `entropy` beside `success`; read ten rollouts of one task: are they one rollout?",
        "mend": "Lower learning_rate; raise slots.clip_high; sample at a higher temperature; go back to a checkpoint.",
    },
    "G102": {
        "what": "The entropy is twice the usual two steps in a row (at least 0.3 nats more, and six spreads; in the first "
        "steps, 2.5 times and 1 nat more), or twice that of the start while success fell by 0.1.",
        "why": "The policy is losing the language of the task; words outside it follow, and then the reward.",
        "by_hand": "Read the last traces (report.html) for text that no one asked for.",
        "mend": "Lower learning_rate or raise warmup_steps; mind old log-probs at another temperature, and entropy bonuses.",
    },
    "G103": {
        "what": "The share of invalid actions is six spreads and 10 points above the usual, and the reward is a fifth below "
        "the three steps before; in the first steps, 30 points and a half. The gradient norm is that of the update that made "
        "this policy, if it was unusual.",
        "why": "One update too large sent the policy to words that the environment does not know. Runs often come back from "
        "it, after ten lost steps; some never do.",
        "by_hand": "Compare the actions of this step's traces with those of the step before.",
        "mend": "Lower learning_rate, raise warmup_steps, or use several groups more per step.",
    },
    "G104": {
        "what": "Mean success of the last five steps is 0.2 (and four standard errors) below the best five in a hundred.",
        "why": "What was learnt is being unlearnt; the run's last checkpoint is not its best.",
        "by_hand": "Plot `success`; evaluate the best checkpoint and the last on the same panel.",
        "mend": "Go on from the best checkpoint with a lower learning_rate, or with schedule linear.",
    },
    "G105": {
        "what": "The mean probability ratio of a batch's only update is not 1, or that of several moved by 0.05 and eight "
        "spreads from the usual.",
        "why": "On the first update the ratio is 1 by definition. Anything else means that the old log-probs are of other "
        "tokens, temperature, precision or weights; clipping then acts on noise.",
        "by_hand": "Score one row twice before the update: both passes must agree to rounding.",
        "mend": "Look at temperature, dropout and dtype of the score pass; with several updates, take fewer or smaller ones.",
    },
    "G106": {
        "what": "The KL to the sampling policy (or to the reference) is five times the usual, by 0.05 (0.2) nats and eight "
        "spreads; 0.5 (2) nats where there is no usual yet.",
        "why": "The updates of one batch moved the policy far from what sampled it; the batch says little about where it went.",
        "by_hand": "Plot `approx_kl_per_trained_token` beside `learning_rate` and `grad_norm`.",
        "mend": "Lower learning_rate, epochs, updates_per_batch or grad_clip.",
    },
    "G107": {
        "what": "The share of clipped tokens is four times the usual, by 15 points and eight spreads.",
        "why": "Clipped tokens have no gradient: most of the batch is thrown away, silently.",
        "by_hand": "Plot `clip_low_per_trained_token` and `clip_high_per_trained_token`.",
        "mend": "Lower learning_rate, epochs or updates_per_batch; only then widen the bounds.",
    },
    "G108": {
        "what": "The gradient norm before clipping is ten times the usual and six spreads above it, both as logarithms.",
        "why": "One episode or token dominates the step; where grad_clip is far above the usual norm, it is not bounded.",
        "by_hand": "Look for one very long, very wrong or oddly rewarded episode in the step's traces.",
        "mend": "Set grad_clip to about twice the usual norm.",
    },
    "G109": {
        "what": "An update was skipped because its loss or gradient was not finite, or a metric is not finite.",
        "why": "Skipped batches are paid for and not learnt from; a NaN that is not skipped ends the run.",
        "by_hand": "Read the rows in the run's folder failures; find the first column that is not finite.",
        "mend": "runtime.dtype float32, a lower learning_rate, or repair the reward that gave the number.",
    },
    "G110": {
        "what": "For three steps no group had rewards that differ (or nothing was trained, or no group was kept); or 95 % of "
        "the groups of five steps had none.",
        "why": "A group estimator learns from differences inside a group only. Such steps cost everything and teach nothing.",
        "by_hand": "Are the rewards 0, 1, or something else? Score a right and a wrong answer by hand.",
        "mend": "Never solved: easier tasks, or a warm start. Always solved: harder tasks. In between: mend the reward.",
    },
    "G111": {
        "what": "The reward of three steps is four spreads and a tenth above the usual, while episodes grew by half (and "
        "four spreads) or success fell.",
        "why": "Reward that comes with length, or without success, is often gamed: the policy has found what the checker pays "
        "for instead of what was meant.",
        "by_hand": "Read the five best-rewarded episodes of the step.",
        "mend": "Repair the reward; hold out checks that the policy is not trained on; shape against length.",
    },
    "G112": {
        "what": "More than 2 % of the episodes of three steps ended in an environment error, and three times the share before.",
        "why": "They are never learnt from. If errors depend on the action, what is left is a biased sample.",
        "by_hand": "Read `error` in the step's traces: time-out, crash, or exception?",
        "mend": "Repair the environment; raise runtime.step_timeout_s; use fewer runtime.workers.",
    },
    "G113": {
        "what": "A token limit cut more than a tenth of the episodes of three steps, and twice the share before; or 30 % of "
        "the first ones.",
        "why": "A cut episode is trained as a failure (cut = failure): the policy learns to be short, not to be right.",
        "by_hand": "Plot `episode_tokens` beside `outcome_cut`; read one cut episode.",
        "mend": "Raise max_episode_tokens or max_turn_tokens, or cut = drop.",
    },
}  # fmt: skip


def explain(code: str) -> str:
    """The page of a code of the guard, as `assay audit --explain` shows those of the audit. UserError for no code of it."""
    if (name := code.upper()) not in RULES:
        raise UserError(f"there is no rule {code!r} of the guard: the rules are {', '.join(RULES)}")
    parts = [f"### {name}\n", f"**{RULES[name].name}**. {TEXTS[name]['what']}\n"]
    parts += [f"**{heading}.** {TEXTS[name][key]}\n" for key, heading in PARTS.items() if key in TEXTS[name]]
    return "\n".join(parts)
