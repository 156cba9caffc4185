"""What the guard looks for in the metrics of a run: one pure function a rule, over all steps so far.

A rule compares the last steps with the run's own history: the median of up to 20 steps before, and their spread (1.4826 x
median absolute deviation, the standard deviation of a normal sample). It speaks where the change is several spreads AND
large enough to matter: the second number is the dead band, without which a quiet run is alarmed by nothing. The
numbers were set on 88 runs of five environments (docs/guard.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from assay.records import Records, series

WINDOW = 20  # steps that make the usual
ENOUGH = 4  # known steps without which there is no usual
MAD = 1.4826  # median absolute deviation -> standard deviation of a normal sample
SMALLER = "lower learning_rate or raise warmup_steps"


@dataclass(frozen=True, slots=True)
class Usual:
    """Median and spread of the steps before; NaN where there are too few, so that every comparison is false."""

    median: float
    spread: float

    def above(self, value: float, spreads: float, band: float) -> bool:
        """Is `value` above by several spreads and by more than the dead band?"""
        return value - self.median > max(spreads * self.spread, band)

    def below(self, value: float, spreads: float, band: float) -> bool:
        return self.median - value > max(spreads * self.spread, band)


class History:
    """All steps so far, the present one last."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def last(self, key: str) -> float:
        """Of the present step; NaN where not known."""
        return series(self.records[-1:], key)[0]

    def recent(self, key: str, steps: int = 3) -> float:
        """Median over the last steps, NaN unless known at each."""
        values = series(self.records[-steps:], key)
        return median(values) if len(values) == steps and all(map(math.isfinite, values)) else math.nan

    def usual(self, key: str, skip: int = 1) -> Usual:
        """Of the steps before the last `skip`."""
        return usual_of(series(self.records[-skip - WINDOW : -skip], key))

    def share(self, key: str, steps: slice, of: str = "episodes") -> float:
        """Sum of the key over sum of `of`; NaN where there is none."""
        part = self.records[steps]
        whole = sum(series(part, of, 0.0))
        return sum(series(part, key, 0.0)) / whole if whole else math.nan

    def update(self) -> str:
        """The update that made the policy of the present step, in words, if its gradient was unlike the others."""
        norm, before = (
            series(self.records[-2:-1], "grad_norm"),
            usual_of([v for v in series(self.records[-2 - WINDOW : -2], "grad_norm") if v > 0]),
        )
        if not norm or not norm[0] > 1.5 * before.median:
            return ""
        return f" after an update with gradient norm {norm[0]:.2g} (usual: {before.median:.2g})"


def usual_of(values: Sequence[float]) -> Usual:
    known = [value for value in values if math.isfinite(value)]
    if len(known) < ENOUGH:
        return Usual(math.nan, math.nan)
    middle = median(known)
    return Usual(middle, MAD * median(abs(value - middle) for value in known))


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else f"{100 * share:.1g} %"


# --------------------------------------------------------------------------------------------------------- the policy


def entropy_collapse(h: History) -> str:
    """Below 0.3 of what it was at most ten steps ago (and half of the first step's: what falls back after a rise is no
    collapse), or below 0.1 of the start, and no success for it."""
    now, success, reward = h.recent("entropy"), h.recent("success"), h.recent("reward")
    first = series(h.records[:1], "entropy")[0]
    if len(h.records) < 6 or success > 0.9 or now > 0.5 * first:
        return ""
    recent = [History(h.records[:end]) for end in range(max(3, len(h.records) - 10), len(h.records) - 2)]
    before = max(recent, key=lambda past: _or(past.recent("entropy"), 0.0))
    for past, share in ((before, 0.3), (History(h.records[:3]), 0.1)):
        was = past.recent("entropy")
        rose = success > past.recent("success") + 0.05 or reward > past.recent("reward") + 0.05
        if was > 0.05 and now < share * was and not rose:
            since = len(h.records) - len(past.records)
            return (
                f"entropy fell from {was:.2g} to {now:.2g} nats a token in {since} steps, and success did not rise: "
                "lower learning_rate, raise slots.clip_high, or sample at a higher temperature"
            )
    return ""


def entropy_explosion(h: History) -> str:
    """Twice the usual two steps in a row (2.5 times the first step's while there is no usual); or twice the start, and
    success fell meanwhile."""
    now, usual = min(series(h.records[-2:], "entropy")), h.usual("entropy", 2)
    start, success = History(h.records[:3]), h.recent("success")
    if math.isnan(usual.median):
        usual = Usual(series(h.records[:1], "entropy")[0], math.nan)
        jumped = now - usual.median > max(1.0, 1.5 * usual.median)
    else:
        jumped = usual.above(now, 6, max(0.3, usual.median))
    grown = h.recent("entropy") > max(2 * start.recent("entropy"), start.recent("entropy") + 0.3)
    if jumped or (grown and success < start.recent("success") - 0.1):
        was = usual.median if jumped else start.recent("entropy")
        return f"entropy rose from {was:.2g} to {now:.2g} nats a token{h.update() if jumped else ''}: {SMALLER}"
    return ""


def invalid_actions(h: History) -> str:
    """And a reward a fifth below the three steps before (its median is no measure while it is rising), or far below it."""
    now, usual = h.last("invalid_actions"), h.usual("invalid_actions")
    before, reward = History(h.records[:-1]).recent("reward"), h.last("reward")
    if usual.above(now, 6, 0.1) and before - reward > min(0.2 * abs(before), 3 * h.usual("reward").spread):
        return f"invalid actions rose from {percent(usual.median)} to {percent(now)}{h.update()}: {SMALLER}"
    first = [History(h.records[:end]) for end in range(1, min(len(h.records), ENOUGH + 1))]  # no usual yet
    was = max((past.last("invalid_actions") for past in first), default=math.nan)
    lowest = min((past.last("reward") for past in first), default=math.nan)
    if math.isnan(usual.median) and now > was + 0.3 and lowest - reward > 0.5 * abs(lowest):
        return f"invalid actions rose from {percent(was)} to {percent(now)} after the first updates: {SMALLER}"
    return ""


def success_fall(h: History) -> str:
    """Means of five steps, of the last hundred; 0.2 is four standard errors of 5 x 20 episodes."""
    values = series(h.records[-100:], "success")
    means = [sum(values[i : i + 5]) / 5 for i in range(len(values) - 4)]
    known = [mean for mean in means if math.isfinite(mean)]
    if len(known) < 2 or not math.isfinite(means[-1]):
        return ""
    best, now = max(known), means[-1]
    counts = series(h.records[-5:], "episodes", 1.0)
    error = math.sqrt(2 * 0.25 / max(sum(counts), 1.0))
    if best - now > max(0.2, 4 * error):
        return (
            f"success fell from {percent(best)} at best to {percent(now)} over the last five steps: go on from the best "
            "checkpoint with a lower learning_rate"
        )
    return ""


# --------------------------------------------------------------------------------------------------------- the update


def ratio_drift(h: History) -> str:
    """With one update a batch the ratio is 1 by definition; with several it moves by what the updates move."""
    ratio, updates = h.last("ratio_per_trained_token"), h.last("updates")
    if updates == 1 and abs(ratio - 1) > 0.01:
        return (
            f"the mean probability ratio is {ratio:.3f} on the first update of a batch, where it is 1: the old log-probs "
            "are not those of the policy that is updated; look at their temperature, tokens and dropout"
        )
    usual = h.usual("ratio_per_trained_token")
    if updates > 1 and (usual.above(ratio, 8, 0.05) or usual.below(ratio, 8, 0.05)):
        return (
            f"the mean probability ratio went from {usual.median:.3f} to {ratio:.3f} within a batch: lower learning_rate, "
            "epochs or updates_per_batch"
        )
    return ""


def kl_jump(h: History) -> str:
    for key, whom, band, first in (
        ("approx_kl_per_trained_token", "the policy that sampled", 0.05, 0.5),
        ("ref_kl_per_trained_token", "the reference", 0.2, 2.0),
    ):
        now, usual = h.last(key), h.usual(key)
        new = math.isnan(usual.median) and now > first
        if new or usual.above(now, 8, max(band, 4 * abs(usual.median))):
            was = "" if new else f" from {usual.median:.2g}"
            return f"the KL to {whom} jumped{was} to {now:.2g} nats a token: lower learning_rate, epochs or grad_clip"
    return ""


def clip_jump(h: History) -> str:
    keys = ("clip_low_per_trained_token", "clip_high_per_trained_token")
    total = [sum(pair) for pair in zip(*(series(h.records[-WINDOW - 1 :], key) for key in keys), strict=True)]
    now, usual = total[-1], usual_of(total[:-1])
    if usual.above(now, 8, max(0.15, 3 * usual.median)):
        return (
            f"clipped tokens jumped from {percent(usual.median)} to {percent(now)}: lower learning_rate, epochs or "
            "updates_per_batch"
        )
    return ""


def gradient_spike(h: History) -> str:
    """In powers of e: norms are spread over decades. A norm of 0 is a step without anything to train on."""
    norms = series(h.records[-WINDOW - 1 :], "grad_norm")
    logs = [math.log(norm) if norm > 0 and math.isfinite(norm) else math.nan for norm in norms]
    usual = usual_of(logs[:-1])
    if usual.above(logs[-1], 6, math.log(10)):
        return (
            f"the gradient norm is {norms[-1]:.2g} (usual: {math.exp(usual.median):.2g}): lower grad_clip towards "
            f"{2 * math.exp(usual.median):.1g}, or look at the step's traces for one episode unlike the others"
        )
    return ""


def update_skipped(h: History) -> str:
    skipped, updates = h.last("updates_skipped"), h.last("updates")
    if skipped > 0:
        return (
            f"{skipped:.0f} of {updates:.0f} updates skipped: loss or gradient was not finite; the rows to blame are in "
            "the run's folder failures: use runtime.dtype float32, a lower learning_rate, or repair the reward"
        )
    odd = [key for key, value in h.records[-1].items() if isinstance(value, float) and not math.isfinite(value)]
    return f"{', '.join(odd[:3])} is not finite: look at the reward and at what a method computes" if odd else ""


# ---------------------------------------------------------------------------------------------- reward and environment


def no_spread(h: History) -> str:
    """Three steps without any gradient, or five with 19 of 20 groups dead."""
    dead = [
        1.0 if record.get("tokens_trained") == 0 or record.get("kept_groups") == 0 else share
        for record, share in zip(h.records[-5:], series(h.records[-5:], "dead_groups"), strict=True)
    ]
    whole = len(dead) >= 3 and min(dead[-3:]) >= 1
    if not whole and not (len(dead) == 5 and sum(dead) / 5 >= 0.95):
        return ""
    steps, what = (3, "no group") if whole else (5, f"only {percent(1 - sum(dead) / 5)} of the groups")
    success = h.share("outcome_success", slice(-steps, None))
    best = max(series(h.records, "success", 0.0))
    advice = "choose tasks between always and never solved, or raise rollouts_per_task"
    if success >= 0.95:
        advice = f"{percent(success)} of the episodes succeed: stop here, or take harder tasks"
    elif success <= 0.01 and best > 0.1:
        advice = f"success was {percent(best)} at best: go on from that checkpoint with a lower learning_rate"
    elif success <= 0.01:
        advice = (
            "no episode succeeds: take easier tasks or a warm start (warm_start.episodes), and score a known right answer "
            "by hand"
        )
    elif whole:
        advice = "score a known right and a known wrong answer by hand: the reward does not tell them apart"
    return f"{what} of the last {steps} steps had rewards that differ, and nothing else teaches: {advice}"


def reward_with_length(h: History) -> str:
    """A reward that jumps together with the length, or while success falls."""
    reward, usual = h.recent("reward"), h.usual("reward", 3)
    if not usual.above(reward, 4, 0.1 * abs(usual.median)):
        return ""
    length, usual_length = h.recent("episode_tokens"), h.usual("episode_tokens", 3)
    success, usual_success = h.recent("success"), h.usual("success", 3)
    rise = f"the reward jumped from {usual.median:.3g} to {reward:.3g}"
    advice = "read the traces of this step: is the reward earned or gamed?"
    if usual_length.above(length, 4, 0.5 * usual_length.median):
        return f"{rise} while episodes grew from {usual_length.median:.0f} to {length:.0f} tokens: {advice}"
    if usual_success.below(success, 3, 0.05):
        return f"{rise} while success fell from {percent(usual_success.median)} to {percent(success)}: {advice}"
    return ""


def environment_errors(h: History) -> str:
    key, now = "outcome_environment_error", slice(-3, None)
    share, before = h.share(key, now), h.share(key, slice(-103, -3))
    if sum(series(h.records[now], key, 0.0)) >= 3 and share > max(0.02, 3 * _or(before, 0.0)):
        was = f" (before: {percent(before)})" if math.isfinite(before) else ""
        return (
            f"{percent(share)} of the episodes end in an environment error{was}, which is never learnt from: read `error` "
            "in the step's traces, raise runtime.step_timeout_s if they are time-outs"
        )
    return ""


def cut_episodes(h: History) -> str:
    share, before = h.share("outcome_cut", slice(-3, None)), h.share("outcome_cut", slice(-3 - WINDOW, -3))
    if share > (0.3 if math.isnan(before) else max(0.1, 2 * before + 0.05)):
        was = f" (before: {percent(before)})" if math.isfinite(before) else ""
        return (
            f"{percent(share)} of the episodes are cut by a token limit{was}: raise max_episode_tokens or "
            "max_turn_tokens, or leave them out with cut = drop"
        )
    return ""


def _or(value: float, default: float) -> float:
    return value if math.isfinite(value) else default


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    theme: str  # one event speaks once: what is found soon after another of its theme has spoken is that event
    heeds: str  # themes after which it waits: it speaks if it is still there when they have been quiet for long enough
    find: Callable[[History], str]  # "" or what was seen: what to try


RULES: dict[str, Rule] = {  # of one theme, the first that finds something speaks
    "G109": Rule("update-skipped", "skip", "skip", update_skipped),
    "G103": Rule("invalid-actions", "policy", "policy", invalid_actions),
    "G101": Rule("entropy-collapse", "collapse", "collapse", entropy_collapse),
    "G102": Rule("entropy-explosion", "policy", "policy", entropy_explosion),
    "G104": Rule("success-fall", "success", "success policy", success_fall),
    "G105": Rule("ratio-drift", "update", "update", ratio_drift),
    "G106": Rule("kl-jump", "update", "update", kl_jump),
    "G107": Rule("clip-jump", "update", "update", clip_jump),
    "G108": Rule("gradient-spike", "update", "update policy", gradient_spike),
    "G110": Rule("no-spread", "reward", "reward", no_spread),
    "G111": Rule("reward-with-length", "hack", "hack", reward_with_length),
    "G112": Rule("environment-errors", "environment", "environment", environment_errors),
    "G113": Rule("cut-episodes", "cut", "cut", cut_episodes),
}
