"""The checks of `assay audit` by code, and the audit itself: a linter for rollouts of any framework.

A check is a pure function over optional columns (columns.py, by way of sheet.py). It runs where what it needs is known
of some sample, and is named as skipped where not. An error is certainly wrong, a warning probably; a note is worth
knowing. Left out: judging whether the rewards are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from assay.audit import checks_advantages as advantages
from assay.audit import checks_groups as groups
from assay.audit import checks_numbers as numbers
from assay.audit import checks_prompts as prompts
from assay.audit import checks_ratios as ratios
from assay.audit import checks_rewards as rewards
from assay.audit import checks_tokens as tokens
from assay.audit.columns import SEVERITIES, Finding, Ragged, Rollouts
from assay.audit.explain import TEXTS, page, render
from assay.audit.sheet import SHOWN, Found, Sheet
from assay.protocols import UserError


@dataclass(frozen=True, slots=True)
class Check:
    code: str  # "A101"
    name: str  # "loss-on-unsampled"
    severity: str  # of what it finds, where the finding does not know better
    line: str  # what it looks for
    needs: tuple[
        str, ...
    ]  # columns, all of them; "a|b" is one of the two, "declared.x" what was said, "with x" a function
    run: Callable[[Sheet], list[Found]]

    @property
    def explain(self) -> str:
        """The page of the check."""
        return render(self.code, self.name, self.line, self.severity, self.needs)


@dataclass(frozen=True, slots=True)
class Report:
    findings: list[Finding]  # errors first, then by code
    ran: list[str]  # codes
    skipped: dict[str, str]  # code -> what is missing, in words
    counts: dict[
        str, Any
    ]  # samples, episodes, groups, tokens, trained_tokens, longest: [{where, tokens, share}], share_of

    def of(self, severity: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]

    @property
    def sound(self) -> bool:
        """No error."""
        return not self.of("error")


_TABLE: tuple[tuple[str, str, str, str, tuple[str, ...], Callable[[Sheet], list[Found]]], ...] = (
    ("A101", "loss-on-unsampled", "error", "tokens under the loss that the policy did not sample",
     ("mask", "sampled"), tokens.loss_on_unsampled),
    ("A102", "sample-without-loss", "warning", "samples with sampled tokens and none under the loss",
     ("mask", "sampled"), tokens.sample_without_loss),
    ("A103", "answer-partly-masked", "warning", "sampled tokens without loss inside an answer that has loss",
     ("mask", "sampled"), tokens.answer_partly_masked),
    ("A104", "answers-without-loss", "warning", "whole answers of an episode that no sample trains",
     ("mask", "sampled"), tokens.answers_without_loss),
    ("A105", "appended-end-token", "error", "end tokens that code appended and the loss sees",
     ("ids", "mask", "sampled|logprobs|stop"), tokens.appended_end_trained),
    ("A106", "lengths-differ", "error", "token columns of another length than the ids",
     ("mask|sampled|logprobs|trainer_logprobs|advantages|weights|attention",), tokens.lengths_differ),
    ("A107", "re-tokenised", "warning", "answers that became other ids in the next turn's context",
     ("ids", "mask|sampled", "with decode|completion", "with decode|prompt"), tokens.retokenised),
    ("A108", "loss-on-padding", "error", "padding under the loss", ("mask", "attention"), tokens.loss_on_padding),
    ("A109", "empty-sample", "warning", "samples without a sampled token", ("mask|sampled",), tokens.empty_sample),
    ("A110", "one-length", "warning", "many samples at exactly the largest length, without an end",
     ("ids",), tokens.one_length),
    ("A201", "logprob-above-zero", "error", "log-probs above 0", ("logprobs|trainer_logprobs",), ratios.above_zero),
    ("A202", "logprob-missing", "warning", "trained tokens without a log-prob", ("logprobs", "mask"), ratios.missing),
    ("A203", "logprob-constant", "error", "log-probs that are 0, or one number, throughout", ("logprobs",), ratios.constant),
    ("A204", "logprob-of-another-model", "warning", "recorded log-probs against those of a model",
     ("ids", "logprobs", "with score"), ratios.rescored),
    ("A205", "ratio-mean", "warning", "a mean importance ratio that is not 1",
     ("logprobs", "trainer_logprobs"), ratios.ratio_mean),
    ("A206", "truncated-sampler", "warning", "top-p or top-k while training",
     ("declared.top_p|declared.top_k",), ratios.truncated_sampler),
    ("A207", "logprobs-misaligned", "warning", "the trainer's log-probs belong to other tokens",
     ("logprobs", "trainer_logprobs"), ratios.misaligned),
    ("A208", "stale-versions", "note", "several policy versions in one comparison", ("version",), ratios.stale),
    ("A209", "engines-apart", "note", "sampler and trainer disagree token by token",
     ("logprobs", "trainer_logprobs"), ratios.apart),
    ("A301", "mixed-group", "error", "rollouts of different tasks in one group",
     ("group", "task|prompt|ids"), groups.mixed_tasks),
    ("A302", "scattered-task", "error", "rollouts of one task in groups of one",
     ("group", "task|prompt|ids"), groups.scattered),
    ("A303", "group-size", "warning", "groups of another size than the rule", ("group",), groups.wrong_size),
    ("A304", "duplicate-rollouts", "warning", "the same rollout twice in a group", ("group", "ids"), groups.duplicates),
    ("A305", "split-episode", "error", "one episode in several groups or tasks",
     ("rollout", "group|task"), groups.split_episode),
    ("A311", "zero-advantage", "error", "advantage 0 where the rewards differ",
     ("advantages", "reward|score", "group|rollout"), advantages.zero_advantage),
    ("A312", "advantage-of-equals", "error", "an advantage where all rewards of the group are equal",
     ("advantages", "reward|score", "group"), advantages.advantage_of_equals),
    ("A313", "constant-advantage", "warning", "one advantage for everything", ("advantages",), advantages.same_everywhere),
    ("A314", "uneven-advantage", "warning", "advantages that differ inside an episode where the estimator gives one number",
     ("advantages", "reward|score", "group"), advantages.varies_inside),
    ("A315", "opposite-sign", "error", "advantages with the sign opposite to reward minus group mean",
     ("advantages", "reward|score", "group"), advantages.opposite_sign),
    ("A316", "other-estimator", "error", "advantages that the estimator does not give for these rewards",
     ("advantages", "reward|score", "group|declared.estimator"), advantages.recomputed),
    ("A401", "learnt-error", "error", "errors of the environment, tool or engine learnt as reward 0",
     ("reward|score", "error|outcome|messages|completion"), rewards.learnt_error),
    ("A402", "cut-as-failure", "warning", "episodes that a limit cut, learnt as failures",
     ("reward|score", "stop|ids"), rewards.cut_as_failure),
    ("A403", "constant-reward", "warning", "one reward for all episodes", ("reward|score",), rewards.constant_reward),
    ("A404", "dead-groups", "warning", "groups whose rollouts all have one reward",
     ("reward|score", "group"), rewards.dead_groups),
    ("A405", "reward-range", "error", "rewards outside the declared range",
     ("reward", "declared.reward_range"), rewards.out_of_range),
    ("A406", "unscored-trained", "error", "samples without a reward and with an advantage",
     ("reward|score", "advantages"), rewards.unscored_trained),
    ("A407", "outcome-contradicts", "warning", "successes that are rewarded less than failures",
     ("reward|score", "outcome"), rewards.contradiction),
    ("A501", "prompt-leak", "warning", "the gold answer or a hint in the prompt",
     ("prompt", "gold|declared.hints"), prompts.leak),
    ("A502", "splits-overlap", "error", "tasks of evaluation in training", ("split", "task|prompt"), prompts.overlap),
    ("A503", "history-rewritten", "warning", "turns whose context does not begin with the turn before",
     ("ids", "rollout"), prompts.history_rewritten),
    ("A504", "doubled-start", "warning", "two start tokens", ("ids",), prompts.doubled_start),
    ("A601", "not-finite", "error", "NaN and infinities", ("logprobs|trainer_logprobs|advantages|weights|reward|score",),
     numbers.not_finite),
    ("A602", "outside-vocabulary", "error", "ids that are no token", ("ids",), numbers.outside_vocabulary),
    ("A603", "padded-denominator", "error", "token weights that depend on the padding",
     ("weights", "padded"), numbers.padded_denominator),
    ("A604", "other-denominator", "warning", "token weights that the declared denominator does not give",
     ("weights", "declared.denominator"), numbers.other_denominator),
    ("A605", "heavy-episodes", "note", "episodes with several times their share of the gradient",
     ("mask|sampled",), numbers.heavy_episodes),
)  # fmt: skip

CHECKS: dict[str, Check] = {row[0]: Check(*row) for row in _TABLE}


def audit(
    rollouts: Rollouts,
    codes: Sequence[str] | None = None,
    score: Callable[[Rollouts], Ragged] | None = None,
    decode: Callable[[Any], str] | None = None,
    encode: Callable[[str], list[int]] | None = None,
) -> Report:
    """Run the checks (all, or those of `codes`; "A2" is every check of that theme).

    Args:
      rollouts: what a reader made of a file.
      codes: codes or their beginnings; UserError for one that is none.
      score: log-probs [M] of the sampled tokens by a model, in the rows of `ids`, NaN where it gives none.
      decode: text of a list of ids.
      encode: ids of a text, as whatever re-tokenises would.
    """
    chosen = list(CHECKS) if codes is None else select(codes)
    sheet = Sheet(rollouts, score, decode, encode)
    findings: list[Finding] = []
    ran, skipped = [], {}
    for code in chosen:
        check = CHECKS[code]
        if missing := lacking(sheet, check):
            skipped[code] = missing
            continue
        ran.append(code)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # NaN and inf are what is looked for
            findings += [_finding(check, found) for found in check.run(sheet)]
    findings.sort(key=lambda f: (SEVERITIES.index(f.severity), f.code))
    return Report(findings, ran, skipped, counts(sheet))


def _finding(check: Check, found: Found) -> Finding:
    severity = found.severity or check.severity
    return Finding(check.code, severity, found.sentence, found.count, tuple(found.rows[:SHOWN]), found.advice)


def select(codes: Sequence[str]) -> list[str]:
    """Codes in order, of codes and beginnings of codes."""
    found: set[str] = set()
    for wanted in codes:
        own = [code for code in CHECKS if wanted and code.startswith(wanted.upper())]
        own = own or [code for code, check in CHECKS.items() if check.name == wanted]
        if not own:
            near = get_close_matches(wanted.upper(), CHECKS, 1)
            raise UserError(
                f"there is no check {wanted!r}" + (f": did you mean {near[0]}?" if near else ": --list names them")
            )
        found |= set(own)
    return [code for code in CHECKS if code in found]


def lacking(sheet: Sheet, check: Check) -> str:
    """What the check needs and the file does not have, in words; "" if nothing."""
    if check.code == "A106":  # reads the very columns that no other check can
        return "" if len(sheet.rollouts.tokens) > 1 else "one token column only"
    missing = []
    for need in check.needs:
        options = need.split("|")
        if not any(sheet.has(option) for option in options):
            crooked = [name for name in options if name in sheet.misaligned]
            missing.append(f"{crooked[0]} (its lengths differ)" if crooked else " or ".join(options))
    return "no " + ", no ".join(missing) if missing else ""


def counts(sheet: Sheet) -> dict[str, Any]:
    """How much there is, and what share of the gradient the heaviest episodes have."""
    shares, share_of = numbers.episode_shares(sheet)
    told = sheet.trained is not None
    tokens_of = np.bincount(sheet.episodes.of, sheet.lengths, len(sheet.episodes))
    heaviest = np.argsort(-shares, kind="stable")[: SHOWN if told else 0]
    return {
        "samples": sheet.n,
        "episodes": len(sheet.episodes),
        "groups": len(sheet.episodes.names),
        "tokens": int(sheet.offsets[-1]),
        "trained_tokens": int(sheet.trained_count.sum()) if told else None,
        "share_of": share_of,
        "longest": [
            {
                "where": sheet.where[int(sheet.episodes.first[e])],
                "tokens": int(tokens_of[e]),
                "share": float(shares[e]),
            }
            for e in heaviest
        ],
    }


def explain(code: str) -> str:
    """What the check of this code (or name) finds, why it matters, how to see it by hand and how to mend it."""
    [first, *_] = select([code])
    return CHECKS[first].explain


def documentation() -> str:
    """docs/audit.md."""
    return page([(c.code, c.name, c.line, c.severity, c.needs) for c in CHECKS.values() if c.code in TEXTS])
