"""A6xx: numbers that cannot be right, and what each token weighs."""

from __future__ import annotations

from typing import Any

import numpy as np

from assay.audit.sheet import ERROR_OUTCOMES, Found, Indices, Reals, Sheet, reduce_rows, share

FLAT = 1e-3  # relative: weights that differ by less are equal in half precision
HEAVY = 3.0  # times its fair share
LOSS_COLUMNS = ("advantages", "weights", "trainer_logprobs")


def not_finite(s: Sheet) -> list[Found]:
    found = []
    for name, column in s.tokens.items():
        if column.dtype.kind != "f":
            continue
        at = np.flatnonzero(np.isinf(column))
        if len(at):
            sentence = f"{len(at):,} {name} are infinite"
            found.append(
                Found(sentence, len(at), s.at_tokens(at), "find the division by 0 or the log of 0 that made them")
            )
        if name in LOSS_COLUMNS and s.trained is not None and s.has(name):
            at = _missing(s, name)
            if len(at):
                sentence = f"{name} of {len(at):,} trained tokens are NaN: so is the loss of every batch that holds one"
                found.append(
                    Found(sentence, len(at), s.at_tokens(at), "find the mean of nothing or the 0 / 0 that made them")
                )
    for name in ("reward", "score"):
        if name in s.samples:
            at = np.flatnonzero(np.isinf(np.asarray(s.samples[name], np.float64)))
            if len(at):
                sentence = f"{name} of {share(len(at), s.n)} samples is infinite"
                found.append(Found(sentence, len(at), s.at_samples(at), "a group with one such reward has no mean"))
    return found


def _missing(s: Sheet, name: str) -> Indices:
    """Trained tokens without a number. A sample without any has none on purpose where its reward is not known either,
    or an error ended it; for the trainer's log-probs always: not every file scores every sample."""
    assert s.trained is not None
    blank = np.isnan(s.tokens[name]) & s.trained & s.policy  # others are told as trained and not sampled
    if not blank.any():
        return np.zeros(0, np.int64)
    excused = s.count(~np.isnan(s.tokens[name])) == 0
    if name != "trainer_logprobs":
        without = s.among("outcome", ERROR_OUTCOMES)
        if s.has("reward"):
            without |= np.isnan(np.asarray(s.samples["reward"], np.float64))
        excused &= without
    at = np.flatnonzero(blank)
    return at[~excused[s.row_at(at)]]


def outside_vocabulary(s: Sheet) -> list[Found]:
    ids, size = s.tokens["ids"], s.declared.get("vocabulary")
    wrong = ids < 0
    if size is not None:
        wrong |= ids >= int(size)
    at = np.flatnonzero(wrong)
    if not len(at):
        return []
    limit = f"a vocabulary of {int(size):,}" if size is not None else "any vocabulary"
    sentence = f"{len(at):,} ids are outside {limit}, from {int(ids[at].min())} to {int(ids[at].max())}"
    advice = (
        "-100 is a label that says 'ignore', not a token" if (ids[at] == -100).any() else "is it the right tokenizer?"
    )
    return [Found(sentence, len(at), s.at_tokens(at), advice)]


def _sample_weights(s: Sheet) -> tuple[Indices, Reals]:
    """(samples whose trained tokens all weigh the same, that weight)."""
    weights, trained = s.tokens["weights"], s.trained
    known = np.isfinite(weights) & (weights > 0)
    known &= True if trained is None else trained
    low = reduce_rows(np.minimum, np.where(known, weights, np.inf), s.offsets, np.inf).astype(np.float64)
    high = reduce_rows(np.maximum, np.where(known, weights, 0), s.offsets, 0).astype(np.float64)
    at = np.flatnonzero((high > 0) & (high - low <= FLAT * np.where(high > 0, high, 1)))
    return at, high[at]


def padded_denominator(s: Sheet) -> list[Found]:
    """Weights that go with one over the padded width: the same answer counts less beside a longer one."""
    at, weight = _sample_weights(s)
    if len(at) < 4:
        return []
    width = (s.lengths + s.samples["padded"])[at].astype(np.float64)
    tokens = s.trained_count[at].astype(np.float64)
    if np.ptp(width) == 0 or _flat(weight) or _flat(weight * tokens):
        return []
    if not _flat(weight * width) and not _explained_by_width(weight, width, tokens):
        return []
    light, heavy = int(weight.argmin()), int(weight.argmax())
    sentence = (
        f"token weights go with one over the padded width: {weight[heavy]:.3g} at width {int(width[heavy])}, "
        f"{weight[light]:.3g} at width {int(width[light])}, so what stands beside a sample decides what it counts"
    )
    advice = "divide the sum by the number of trained tokens of the whole step, not by a mean over a padded tensor"
    return [Found(sentence, len(at), s.at_samples([int(at[heavy]), int(at[light])]), advice)]


def _flat(values: Reals) -> bool:
    return bool(values.max() - values.min() <= FLAT * values.max())


def _explained_by_width(weight: Reals, width: Reals, tokens: Reals) -> bool:
    """Samples of equal trained length, at different widths: do their weights go with 1 / width?"""
    order = np.lexsort((width, tokens))
    w, x, n = weight[order], width[order], tokens[order]
    pair = (n[1:] == n[:-1]) & (x[1:] != x[:-1])
    if pair.sum() < 2:
        return False
    ratio = (w[1:] * x[1:])[pair] / (w[:-1] * x[:-1])[pair]
    return bool((np.abs(ratio - 1) <= FLAT).all())


def other_denominator(s: Sheet) -> list[Found]:
    """Weights against the denominator that the file declares."""
    name = str(s.declared["denominator"]).lower()
    at, weight = _sample_weights(s)
    if len(at) < 2:
        return []
    tokens, episodes = s.trained_count[at].astype(np.float64), s.episodes
    if name in ("token", "constant", "token-mean", "token-sum"):
        value, unit = weight, "every token"
    elif name in ("sequence", "seq-mean-token-mean"):
        value, unit = weight * tokens, "every sample"
    elif name == "episode":
        total = np.asarray(np.bincount(episodes.of[at], weight * tokens), np.float64)
        value, unit = total[episodes.of[at]], "every episode"
    else:
        return []
    steps = s.samples.get("version", np.zeros(s.n, np.int64))[at]  # each step has a denominator of its own
    for step in np.unique(steps):
        value[steps == step] /= np.median(value[steps == step])
    off = np.abs(value - 1) > 5 * FLAT
    if not off.any():
        return []
    far = np.flatnonzero(off)
    sentence = (
        f"the declared denominator {name!r} weighs {unit} alike, and {share(len(far), len(at))} samples weigh otherwise, "
        f"up to {value[far].max():.3g} and down to {value[far].min():.3g} times the median"
    )
    return [
        Found(
            sentence, len(far), s.at_samples(at[far]), "is it one optimiser step, and its denominator over all of it?"
        )
    ]


def heavy_episodes(s: Sheet) -> list[Found]:
    """Episodes that hold several times their share of the gradient."""
    gradient, name = episode_shares(s)
    n = int((gradient > 0).sum())
    if n < 4:
        return []
    top = np.argsort(-gradient, kind="stable")[: max(1, n // 10)]
    held, fair = float(gradient[top].sum()), len(top) / n
    if held < HEAVY * fair and gradient[top[0]] * n < HEAVY:
        return []
    sentence = (
        f"the longest weighs most: {len(top):,} of {n:,} episodes hold {100 * held:.3g} % of the {name}, "
        f"{gradient[top[0]] * n:.2g} times the fair share for the first"
    )
    advice = "if long episodes should not count more, divide by episodes: mean over episodes of their token means"
    return [Found(sentence, len(top), s.at_episodes(top), advice)]


def episode_shares(s: Sheet) -> tuple[Reals, str]:
    """([E] share of each episode, of what): |weight x advantage| where both are known, else of what is."""
    return s.once(_episode_shares)


def _episode_shares(s: Sheet) -> tuple[Reals, str]:
    parts: list[Any] = [s.tokens[name] for name in ("weights", "advantages") if s.has(name) and name in s.tokens]
    if parts and s.trained is not None:
        size = np.abs(parts[0])
        for part in parts[1:]:
            size *= np.abs(part)
        size[~s.trained] = 0
        size[~np.isfinite(size)] = 0
        per_sample = reduce_rows(np.add, size, s.offsets, 0.0, np.float64)
        names = [name for name in ("weights", "advantages") if s.has(name)]
        words = f"gradient ({' x '.join('|' + name[:-1] + '|' for name in names)})"
    else:
        per_sample, words = s.trained_count.astype(np.float64), "trained tokens"
    total = np.bincount(s.episodes.of, per_sample, len(s.episodes))
    return total / max(float(total.sum()), 1e-30), words
