"""A2xx: log-probs of the sampler, of the trainer, and the ratio between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assay.audit.sheet import Bools, Found, Indices, Reals, Sheet, factorise, reduce_rows, share
from assay.protocols import UserError

ABOVE = 1e-3  # nats above 0 that rounding (bf16) explains
RATIO_OFF = 0.01  # of the mean ratio; smaller is rounding between two engines
STANDARD_ERRORS = 4.0
GAP_NOTE, GAP_WARNING = 0.05, 0.3  # nats, mean |difference|: two healthy engines in bf16 differ by 0.01 to 0.02
RESCORE_NOTE, RESCORE_WARNING, RESCORE_ERROR = 0.02, 0.05, 0.5  # nats, mean |difference|
LONG = 8  # tokens of a sample before equal log-probs are no accident
WRONG_TOKEN = 2.0  # nats that rounding never makes of one token
LARGEST = 20.0  # of a log ratio before exp
FEWEST = 50  # tokens before a mean means something
ENOUGH = 1_000_000  # tokens that a correlation looks at


@dataclass(frozen=True, slots=True)
class Gap:
    """Two sets of log-probs on the trained tokens where both are known: K tokens."""

    known: Bools  # [M]
    difference: NDArray[np.float32]  # [M] second minus first; 0 where not known
    count: Indices  # [N] known tokens of each sample
    first: Reals  # [K] or the first of them: enough to correlate
    second: Reals

    @property
    def size(self) -> int:
        return int(self.count.sum())


def _gap(s: Sheet, first: NDArray[np.float32], second: NDArray[np.float32]) -> Gap:
    known = np.isfinite(first) & np.isfinite(second)
    if s.trained is not None:
        known &= s.trained
    difference = second - first
    difference[~known] = 0
    some = np.flatnonzero(known[:ENOUGH])
    pair = (first[some].astype(np.float64), second[some].astype(np.float64))
    return Gap(known, difference, s.count(known), *pair)


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
    """Log-probs that are exactly 0 (or one other number) over whole samples: a place that was never filled, most likely.

    A policy can be that sure; but then it gives one answer to a context, and is not unsure elsewhere."""
    logprobs, trained = s.tokens["logprobs"], s.trained
    known = np.isfinite(logprobs) if trained is None else trained & np.isfinite(logprobs)
    low = reduce_rows(np.minimum, np.where(known, logprobs, np.inf), s.offsets, np.inf)
    high = reduce_rows(np.maximum, np.where(known, logprobs, -np.inf), s.offsets, -np.inf)
    count = s.count(known)
    flat = (low == high) & (count >= LONG) & ~s.evaluation
    at = np.flatnonzero(flat)
    if not len(at):
        return []
    others = (count > 0) & ~flat
    unsure = bool(others.any()) and float(low[others].mean()) < -0.1
    vocabulary = s.declared.get("vocabulary")
    uniform = vocabulary is not None and bool(np.all(np.abs(low[at] + np.log(float(vocabulary))) < 1e-3))
    severity = "warning" if (unsure or not others.any()) and not uniform else "note"
    sentence = f"the log-probs of {share(len(at), s.n)} samples are exactly {low[at[0]]:g} on every trained token"
    if not low[at].any() and _answers_differ(s, at):
        sentence += ", although one context was given different answers: they were never filled in"
        severity = "warning" if others.any() else "error"
    advice = "a ratio against 0 is the probability itself: record the sampler's log-probs, or score before the update"
    return [Found(sentence, len(at), s.at_samples(at), advice, severity)]


def _answers_differ(s: Sheet, rows: Indices) -> bool:
    """Do two of these samples begin alike and give different first answers?"""
    ids, answers = s.tokens.get("ids"), s.answers
    if ids is None:
        return False
    first = np.full(s.n, -1)
    first[answers.row[::-1]] = np.arange(len(answers.row))[::-1]
    given: dict[bytes, bytes] = {}
    for i in rows[first[rows] >= 0]:
        start, end = answers.start[first[i]], answers.end[first[i]]
        answer = ids[start:end].tobytes()
        if given.setdefault(ids[s.offsets[i] : start].tobytes(), answer) != answer:
            return True
    return False


def ratio_mean(s: Sheet) -> list[Found]:
    """E[p_trainer / p_sampler] over sampled tokens is 1 wherever the sampler drew from what it logged."""
    gap = trainer_gap(s)
    if gap.size < FEWEST or misaligned(s):
        return []
    ratio = np.clip(gap.difference, -LARGEST, LARGEST)
    np.exp(ratio, out=ratio)
    ratio[~gap.known] = 0
    total = reduce_rows(np.add, ratio, s.offsets, 0.0, np.float64)
    mean = float(total.sum()) / gap.size
    apart = np.bincount(s.episodes.of, total - mean * gap.count)  # the unit is an episode: its tokens go together
    used = max(int((np.bincount(s.episodes.of, gap.count) > 0).sum()), 2)
    error = np.sqrt((apart**2).sum() * used / (used - 1)) / gap.size
    if abs(mean - 1) <= max(RATIO_OFF, STANDARD_ERRORS * error):
        return []
    truncated = _truncation(s)
    sentence = f"the importance ratio (trainer over sampler) has mean {mean:.4f} over {gap.size:,} tokens, not 1"
    advice = "suspect log-probs before the temperature or the logits processors, or of other weights than sampled"
    if mean < 1:
        sentence += f": the sampler kept about {100 * mean:.1f} % of the probability mass and logged it as 100 %"
        advice = "suspect top-p, top-k or min-p (look into the generation config), or log-probs at another temperature"
    if mean < 1 and truncated:
        advice = f"{truncated} is declared: sample with top_p 1 and no top_k, or renormalise the trainer's alike"
    own = np.abs(total - gap.count) / np.sqrt(np.maximum(gap.count, 1))
    worst = np.argsort(-own, kind="stable")[:5]
    severity = "error" if mean < 1 and truncated else ""
    return [Found(sentence, int((gap.count > 0).sum()), s.at_samples(worst), advice, severity)]


def _truncation(s: Sheet) -> str:
    """What is declared of top-p and top-k, in words; "" if they leave the distribution whole."""
    top_p, top_k = s.declared.get("top_p"), s.declared.get("top_k")
    told = [f"top_p {top_p}"] if top_p is not None and top_p < 1 else []
    told += [f"top_k {top_k}"] if top_k is not None and top_k > 0 else []
    return " and ".join(told)


def truncated_sampler(s: Sheet) -> list[Found]:
    told = _truncation(s)
    if not told or s.evaluation.all() or (s.has("logprobs") and s.has("trainer_logprobs")):
        return []  # with both log-probs the ratio itself is measured
    sentence = f"{told} is declared, and no pair of log-probs is here to show what it does to the ratio"
    advice = "train on samples of the whole distribution (top_p 1, no top_k), or record both log-probs"
    return [Found(sentence, s.n, (), advice)]


def misaligned(s: Sheet) -> list[Found]:
    """Log-probs of the same tokens go together; those that lie one token off do not."""
    return _alignment(trainer_gap(s), "the trainer's log-probs")


def _alignment(gap: Gap, name: str) -> list[Found]:
    a, b = gap.first, gap.second
    if len(a) < 2 * FEWEST or min(a.std(), b.std()) < 0.05:
        return []
    together = float(np.corrcoef(a, b)[0, 1])
    if together > 0.5:
        return []
    late, early = float(np.corrcoef(a[:-1], b[1:])[0, 1]), float(np.corrcoef(a[1:], b[:-1])[0, 1])
    sentence = f"{name} and the sampler's hardly go together (correlation {together:.2f} over {len(a):,} tokens)"
    if max(late, early) > 0.8:
        side = "late" if late > early else "early"
        sentence += f", but they do when one is moved by a token ({max(late, early):.2f}): they lie one token {side}"
        return [Found(sentence, gap.size, (), "logits at position t predict token t + 1: shift once", "error")]
    return [Found(sentence, gap.size, (), "are they of the same tokens, order of samples and weights?")]


def apart(s: Sheet) -> list[Found]:
    gap = trainer_gap(s)
    if gap.size < FEWEST or misaligned(s):
        return []
    distance = np.abs(gap.difference)
    own = reduce_rows(np.add, distance, s.offsets, 0.0, np.float64)
    mean = float(own.sum()) / gap.size
    if mean <= GAP_NOTE:
        return []
    beyond = int((distance > np.log(2)).sum())
    sentence = (
        f"sampler and trainer differ by {mean:.3f} nats a token on average; the ratio of {share(beyond, gap.size)} tokens "
        "is beyond 1/2 to 2 before any update"
    )
    advice = "compare precision, kernels, temperature and weight version of the two; truncated importance weights help"
    worst = np.argsort(-own / np.maximum(gap.count, 1), kind="stable")[:5]
    return [Found(sentence, gap.size, s.at_samples(worst), advice, "warning" if mean > GAP_WARNING else "note")]


def rescored(s: Sheet) -> list[Found]:
    """The sampler's log-probs against those of a model that is given now."""
    assert s.score is not None
    column = s.score(s.rollouts)
    if not np.array_equal(column.offsets, s.offsets):
        raise UserError(
            f"{s.rollouts.source}: the scorer gave {column.offsets[-1]} log-probs in {len(column)} rows, expected one for "
            f"each of {s.offsets[-1]} tokens in {s.n}"
        )
    gap = _gap(s, s.tokens["logprobs"], np.asarray(column.values, np.float32))
    if not gap.size:
        return []
    if found := _alignment(gap, "the model's log-probs"):
        return found
    distance = np.abs(gap.difference)
    own = reduce_rows(np.add, distance, s.offsets, 0.0, np.float64) / np.maximum(gap.count, 1)
    mean = float((own * gap.count).sum()) / gap.size
    wrong = np.flatnonzero(distance > WRONG_TOKEN)
    rows = np.flatnonzero(own > RESCORE_ERROR)
    if mean <= RESCORE_NOTE and not len(wrong) and not len(rows):
        return []
    sentence = f"recorded log-probs differ from those of the given model by {mean:.3f} nats a token on average"
    sentence += f", by more than {RESCORE_ERROR:g} in {share(len(rows), s.n)} samples" if len(rows) else ""
    sentence += f", by more than {WRONG_TOKEN:g} at {share(len(wrong), gap.size)} tokens" if len(wrong) else ""
    severity = "warning" if mean > RESCORE_WARNING or len(rows) or len(wrong) else "note"
    advice = "is it the model, at the weights and temperature that sampled? Are special tokens and padding the same?"
    worst = np.argsort(-own, kind="stable")[: len(rows) or 5]
    named = s.at_tokens(wrong) if len(wrong) else s.at_samples(worst)
    severity = "error" if mean > RESCORE_ERROR else severity
    return [Found(sentence, max(len(wrong), len(rows), 1), named, advice, severity)]


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
