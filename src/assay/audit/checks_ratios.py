"""A2xx: log-probs of the sampler, of the trainer, and the ratio between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assay.audit.sheet import Bools, Found, Indices, Reals, Sheet, factorise, reduce_rows, share

ABOVE = 1e-3  # nats above 0 that rounding (bf16) explains
RATIO_OFF = 0.01  # of the mean ratio; smaller is rounding between two engines
STANDARD_ERRORS = 4.0
GAP_NOTE, GAP_WARNING = 0.05, 0.3  # nats, mean |difference|: two healthy engines in bf16 differ by 0.01 to 0.02
RESCORE_NOTE, RESCORE_WARNING, RESCORE_ERROR = 0.02, 0.05, 0.5  # nats, mean |difference|
LARGEST = 20.0  # of a log ratio before exp


@dataclass(frozen=True, slots=True)
class Gap:
    """Two sets of log-probs where both are known and trained."""

    at: Indices  # [K] positions
    first: Reals  # [K]
    second: Reals  # [K]

    @property
    def difference(self) -> Reals:
        return self.second - self.first


def _gap(s: Sheet, first: NDArray[np.float32], second: NDArray[np.float32]) -> Gap:
    both = np.isfinite(first) & np.isfinite(second)
    if s.trained is not None:
        both &= s.trained
    at = np.flatnonzero(both)
    return Gap(at, first[at].astype(np.float64), second[at].astype(np.float64))


def trainer_gap(s: Sheet) -> Gap:
    return s.once(_trainer_gap)


def _trainer_gap(s: Sheet) -> Gap:
    return _gap(s, s.tokens["logprobs"], s.tokens["trainer_logprobs"])


def above_zero(s: Sheet) -> list[Found]:
    found = []
    for name in ("logprobs", "trainer_logprobs"):
        if name not in s.tokens:
            continue
        at = np.flatnonzero(s.tokens[name] > ABOVE)
        if len(at):
            sentence = f"{share(len(at), len(s.tokens[name]))} {name} are above 0, up to {s.tokens[name][at].max():.4g}"
            advice = "a log-probability is at most 0: are these probabilities, losses (negated), or ratios?"
            found.append(Found(sentence, len(at), s.at_tokens(at), advice))
    return found


def missing(s: Sheet) -> list[Found]:
    trained = s.tokens["mask"] & s.tokens.get("sampled", s.tokens["mask"])
    bare = trained & np.isnan(s.tokens["logprobs"])
    ends = s.tokens["ids"][bare] if "ids" in s.tokens and "sampled" not in s.tokens else None
    at = np.flatnonzero(bare)
    if ends is not None and len(at):  # a bare end token was appended, which is told under its own code
        at = at[~np.isin(ends, list(s.end_ids))]
    if not len(at):
        return []
    rescued = s.has("trainer_logprobs") and not np.isnan(s.tokens["trainer_logprobs"][at]).any()
    sentence = f"{share(len(at), int(trained.sum()))} sampled and trained tokens have no log-prob of the sampler"
    sentence += ", though the trainer's is there" if rescued else ""
    advice = "take the old log-prob from a score pass for them, or leave them out of the ratio; never fill in 0"
    return [Found(sentence, len(at), s.at_tokens(at), advice, "note" if rescued else "warning")]


def constant(s: Sheet) -> list[Found]:
    """Log-probs that are exactly 0 (or one other number) over whole samples: a place that was never filled."""
    logprobs, trained = s.tokens["logprobs"], s.trained
    known = np.isfinite(logprobs) if trained is None else trained & np.isfinite(logprobs)
    low = reduce_rows(np.minimum, np.where(known, logprobs, np.inf), s.offsets, np.inf)
    high = reduce_rows(np.maximum, np.where(known, logprobs, -np.inf), s.offsets, -np.inf)
    at = np.flatnonzero((low == high) & (s.count(known) >= 8) & ~s.evaluation)
    if not len(at):
        return []
    everywhere = len(np.unique(low[at])) == 1 and len(at) == int((s.count(known) > 0).sum())
    value = f"exactly {low[at[0]]:g}"
    sentence = (
        f"the log-probs of {share(len(at), s.n)} samples are {value} on every trained token: they were never filled in"
    )
    advice = "a ratio against 0 is the probability itself: record the sampler's log-probs, or score before the update"
    return [Found(sentence, len(at), s.at_samples(at), advice, "error" if everywhere else "warning")]


def ratio_mean(s: Sheet) -> list[Found]:
    """E[p_trainer / p_sampler] over sampled tokens is 1 wherever the sampler drew from what it logged."""
    gap = trainer_gap(s)
    if len(gap.at) < 50:
        return []
    ratio = np.exp(np.clip(gap.difference, -LARGEST, LARGEST))
    row = s.row_at(gap.at)
    total, count = np.bincount(row, ratio, s.n), np.bincount(row, minlength=s.n)
    mean = total.sum() / count.sum()
    episode = s.episodes.of
    spread = np.bincount(episode, total - mean * count)  # an episode is the unit: its tokens are not independent
    used = max(int((np.bincount(episode, count) > 0).sum()), 2)
    error = np.sqrt((spread**2).sum() * used / (used - 1)) / count.sum()
    if abs(mean - 1) <= max(RATIO_OFF, STANDARD_ERRORS * error):
        return []
    top_p, top_k = s.declared.get("top_p"), s.declared.get("top_k")
    truncated = [f"top_p {top_p}"] if top_p is not None and top_p < 1 else []
    truncated += [f"top_k {top_k}"] if top_k is not None and top_k > 0 else []
    sentence = f"the importance ratio (trainer over sampler) has mean {mean:.4f} over {len(gap.at):,} tokens, not 1"
    if mean < 1:
        sentence += f": the sampler kept about {100 * mean:.1f} % of the probability mass and logged it as 100 %"
    if mean < 1 and truncated:
        advice = (
            f"{' and '.join(truncated)} is declared: sample with top_p 1 and no top_k, or renormalise the trainer alike"
        )
    elif mean < 1:
        advice = (
            "suspect top-p, top-k or min-p in the sampler or its generation config, or log-probs at another temperature"
        )
    else:
        advice = "suspect log-probs before the temperature or the logits processors, or of other weights than sampled"
    own = np.abs(np.divide(total, count, out=np.ones(s.n), where=count > 0) - 1)
    worst = np.argsort(-own * np.sqrt(count), kind="stable")[:5]
    severity = "error" if mean < 1 and truncated else ""
    return [Found(sentence, int((count > 0).sum()), s.at_samples(worst), advice, severity)]


def truncated_sampler(s: Sheet) -> list[Found]:
    top_p, top_k = s.declared.get("top_p"), s.declared.get("top_k")
    told = [f"top_p {top_p}"] if top_p is not None and top_p < 1 else []
    told += [f"top_k {top_k}"] if top_k is not None and top_k > 0 else []
    if not told or s.evaluation.all() or (s.has("logprobs") and s.has("trainer_logprobs")):
        return []  # with both log-probs the ratio itself is measured
    sentence = f"{' and '.join(told)} is declared, and no pair of log-probs is here to show what it does to the ratio"
    advice = "train on samples of the whole distribution (top_p 1, no top_k), or record both log-probs"
    return [Found(sentence, s.n, (), advice)]


def misaligned(s: Sheet) -> list[Found]:
    """Log-probs of the same tokens go together; those that lie one token off do not."""
    gap = trainer_gap(s)
    return _alignment(gap, "the trainer's log-probs")


def _alignment(gap: Gap, name: str) -> list[Found]:
    if len(gap.at) < 100 or min(gap.first.std(), gap.second.std()) < 0.05:
        return []
    together = float(np.corrcoef(gap.first, gap.second)[0, 1])
    if together > 0.5:
        return []
    late = float(np.corrcoef(gap.first[:-1], gap.second[1:])[0, 1])
    early = float(np.corrcoef(gap.first[1:], gap.second[:-1])[0, 1])
    sentence = f"{name} and the sampler's hardly go together (correlation {together:.2f} over {len(gap.at):,} tokens)"
    if max(late, early) > 0.8:
        side = "late" if late > early else "early"
        sentence += f", but they do when one is moved by a token ({max(late, early):.2f}): they lie one token {side}"
        return [Found(sentence, len(gap.at), (), "logits at position t predict token t + 1: shift once", "error")]
    return [Found(sentence, len(gap.at), (), "are they of the same tokens, order of samples and weights?")]


def apart(s: Sheet) -> list[Found]:
    gap = trainer_gap(s)
    mean = float(np.abs(gap.difference).mean()) if len(gap.at) >= 50 else 0.0
    if mean <= GAP_NOTE:
        return []
    row = s.row_at(gap.at)
    own = np.bincount(row, np.abs(gap.difference), s.n) / np.maximum(np.bincount(row, minlength=s.n), 1)
    beyond = int((np.abs(gap.difference) > np.log(2)).sum())
    sentence = (
        f"sampler and trainer differ by {mean:.3f} nats a token on average; the ratio of "
        f"{share(beyond, len(gap.at))} tokens is beyond 1/2 to 2 before any update"
    )
    advice = (
        "compare precision, kernels, temperature and weight version of the two; correct by truncated importance weights"
    )
    severity = "warning" if mean > GAP_WARNING else "note"
    return [Found(sentence, len(gap.at), s.at_samples(np.argsort(-own, kind="stable")[:5]), advice, severity)]


def rescored(s: Sheet) -> list[Found]:
    """The sampler's log-probs against those of a model that is given now."""
    assert s.score is not None
    column = s.score(s.rollouts)
    if not np.array_equal(column.offsets, s.offsets):
        return [Found("the scorer gave other numbers of tokens than the samples have", s.n)]
    gap = _gap(s, s.tokens["logprobs"], np.asarray(column.values, np.float32))
    if not len(gap.at):
        return []
    if found := _alignment(gap, "the model's log-probs"):
        return found
    mean = float(np.abs(gap.difference).mean())
    found_rows = _worst_rows(s, gap, RESCORE_ERROR)
    if mean <= RESCORE_NOTE and not len(found_rows):
        return []
    severity = "error" if mean > RESCORE_ERROR else "warning" if mean > RESCORE_WARNING or len(found_rows) else "note"
    sentence = f"recorded log-probs differ from those of the given model by {mean:.3f} nats a token on average"
    if len(found_rows):
        sentence += f", by more than {RESCORE_ERROR} in {share(len(found_rows), s.n)} samples"
    advice = (
        "is it the model, at the weights and the temperature that sampled? Are special tokens and padding the same?"
    )
    worst = found_rows if len(found_rows) else np.unique(s.row_at(gap.at))
    return [Found(sentence, max(len(found_rows), 1), s.at_samples(worst), advice, severity)]


def _worst_rows(s: Sheet, gap: Gap, most: float) -> Indices:
    row = s.row_at(gap.at)
    own = np.bincount(row, np.abs(gap.difference), s.n) / np.maximum(np.bincount(row, minlength=s.n), 1)
    at = np.flatnonzero(own > most)
    return at[np.argsort(-own[at], kind="stable")]


def stale(s: Sheet) -> list[Found]:
    """Weights of several versions in one comparison: the episodes of a group, or the turns of an episode."""
    version, episodes = s.samples["version"], s.episodes
    known: Bools = version >= 0
    if s.has("group"):
        unit, what = episodes.group[episodes.of], "groups"
    elif s.has("rollout"):
        unit, what = episodes.of, "episodes"
    else:
        unit, what = np.zeros(s.n, np.int64), "file"
    known &= unit >= 0
    if not known.any():
        return []
    unit, version, index = unit[known], version[known], np.flatnonzero(known)
    codes, units = factorise(unit.tolist())
    low, high = np.full(len(units), np.iinfo(np.int64).max), np.full(len(units), -1)
    np.minimum.at(low, codes, version)
    np.maximum.at(high, codes, version)
    mixed = np.flatnonzero(high > low)
    if not len(mixed):
        return []
    at = index[np.unique(codes, return_index=True)[1][mixed]]
    where = f"in {share(len(mixed), len(units))} {what}" if what != "file" else "in this file"
    sentence = f"samples of several policy versions are mixed {where}, up to {int((high - low).max())} versions apart"
    return [Found(sentence, len(mixed), s.at_samples(at), "correct by the ratio, bound the staleness, or wait")]
