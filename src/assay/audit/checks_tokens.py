"""A1xx: which tokens the loss sees. Every check takes the sheet and hands back what it found."""

from __future__ import annotations

import numpy as np

from assay.audit.sheet import CUT_STOPS, Found, Indices, Sheet, reduce_runs, share

DRIFT_PAIRS = 4000  # pairs of turns whose texts are looked at: decoding is slow
PILE = 0.05  # share of the samples at one length that looks like a limit
DISTINCT = 10  # lengths that a file must have before a pile of equal ones means something


def loss_on_unsampled(s: Sheet) -> list[Found]:
    mask, sampled = s.tokens["mask"], s.tokens["sampled"]
    wrong = mask & ~sampled
    wrong[appended_ends(s)] = False
    at = np.flatnonzero(wrong)
    if not len(at):
        return []
    rows = len(np.unique(s.row_at(at)))
    advice = "mask every token whose provenance is not the policy: observations, tool results, template, prompt"
    shifted = {
        "one token early": int((mask[:-1] != sampled[1:]).sum()),
        "one token late": int((mask[1:] != sampled[:-1]).sum()),
    }
    place = min(shifted, key=lambda k: shifted[k])
    if shifted[place] * 5 < int((mask != sampled).sum()):
        advice = f"the mask lies {place}: it is that of the logits' positions; shift it by one, or not twice"
    found = f"{share(len(at), int(mask.sum()))} trained tokens were not sampled by the policy, in {rows:,} samples"
    return [Found(found, len(at), s.at_tokens(at), advice)]


def sample_without_loss(s: Sheet) -> list[Found]:
    sampled = s.count(s.tokens["sampled"])
    lost = (sampled > 0) & (s.trained_count == 0) & ~s.cut & ~s.evaluation
    if s.has("reward"):
        lost &= ~np.isnan(s.samples["reward"])
    if not lost.any() or not (s.trained_count > 0).any():  # where nothing is trained at all it is no training file
        return []
    at = np.flatnonzero(lost)
    found = (
        f"{share(len(at), s.n)} samples were sampled by the policy ({int(sampled[at].sum()):,} tokens) and have no token "
        "under the loss, and nothing says that a limit or an error took them out"
    )
    advice = "if a filter dropped them, drop them from the file and from the denominator too"
    return [Found(found, len(at), s.at_samples(at), advice)]


def answer_partly_masked(s: Sheet) -> list[Found]:
    answers, mask = s.answers, s.tokens["mask"]
    trained = reduce_runs(mask, answers.start, answers.end)
    length = answers.end - answers.start
    broken = np.flatnonzero((trained > 0) & (trained < length))
    if not len(broken):
        return []
    lost = int((length - trained)[broken].sum())
    found = f"{lost:,} sampled tokens inside {share(len(broken), len(answers.start))} answers have no loss, though the rest has"
    last = ~mask[answers.end[broken] - 1]
    advice = "train on the whole answer, its end token included, or say that the token was forced (sampled = False)"
    if last.all() and lost == len(broken):
        advice = "it is always the last token: an agent whose end token is never trained does not learn to stop"
    at = np.array([answers.start[k] + np.flatnonzero(~mask[answers.start[k] : answers.end[k]])[0] for k in broken[:50]])
    return [Found(found, len(broken), s.at_tokens(at), advice)]


def answers_without_loss(s: Sheet) -> list[Found]:
    """Whole answers of an episode that is stored in one sample: no other sample can train them."""
    answers, mask = s.answers, s.tokens["mask"]
    trained = reduce_runs(mask, answers.start, answers.end) > 0
    with_loss = np.bincount(answers.row[trained], minlength=s.n)
    without = np.bincount(answers.row[~trained], minlength=s.n)
    alone = s.episodes.samples[s.episodes.of] == 1
    if "turn" in s.samples:
        alone &= s.samples["turn"] <= 0
    at = np.flatnonzero((with_loss > 0) & (without > 0) & alone)
    if not len(at):
        return []
    found = (
        f"{int(without[at].sum()):,} whole answers in {share(len(at), s.n)} samples have no loss while other answers of "
        "the same sample have, and no other sample holds them"
    )
    final = np.flatnonzero(np.append(answers.row[1:] != answers.row[:-1], True))
    only_last = np.isin(answers.row[final][trained[final]], at).sum() == len(at) and (with_loss[at] == 1).all()
    advice = (
        "only the last answer is trained: mask by role over all turns" if only_last else "mask by role over all turns"
    )
    return [Found(found, int(without[at].sum()), s.at_samples(at), advice)]


def appended_ends(s: Sheet) -> Indices:
    """Trained tokens that code put behind an answer: not sampled, right behind a sampled one, and an end id."""
    return s.once(_appended_ends)


def _appended_ends(s: Sheet) -> Indices:
    mask, sampled, ids = s.tokens["mask"], s.tokens["sampled"], s.tokens.get("ids")
    if ids is None or not len(ids):
        return np.zeros(0, np.int64)
    heads = s.offsets[:-1][s.lengths > 0]
    wrong = mask & ~sampled
    behind = np.append(False, sampled[:-1]) & ~sampled
    behind[heads] = False
    goes_on = np.append(
        wrong[1:], False
    )  # more trained tokens that were not sampled: not an end token but a wrong mask
    goes_on[heads[1:] - 1] = False
    at = np.flatnonzero(wrong & behind & ~goes_on)
    ends = set(s.end_ids)
    if s.declared.get("end_ids") is None:
        values, counts = np.unique(ids[behind], return_counts=True)
        ends |= set(values[2 * counts >= max(counts.sum(), 3)].tolist())  # what stands behind most answers
    return at[np.isin(ids[at], list(ends))]


def appended_end_trained(s: Sheet) -> list[Found]:
    ids, mask, ends = s.tokens["ids"], s.tokens["mask"], list(s.end_ids)
    found = []
    advice = "set the loss mask of the appended token to 0, or let the policy sample its own end token"
    if "sampled" in s.tokens:
        at = appended_ends(s)
        sentence = (
            f"{len(at):,} end tokens that code appended behind an answer, and the policy did not sample, are trained on"
        )
        found.append(Found(sentence, len(at), s.at_tokens(at), advice))
    elif s.has("logprobs"):
        last = s.answers.end - 1
        known = ~np.isnan(s.tokens["logprobs"])
        longer = s.answers.end - s.answers.start > 1
        at = last[longer & np.isin(ids[last], ends) & mask[last] & ~known[last] & known[np.maximum(last - 1, 0)]]
        sentence = (
            f"{len(at):,} trained end tokens have no log-prob though the token before has one: code appended them"
        )
        found.append(Found(sentence, len(at), s.at_tokens(at), advice))
    if s.has("stop"):
        last = _last_answer_end(s)[s.among("stop", CUT_STOPS)]
        last = last[last >= 0]
        at = last[np.isin(ids[last], ends) & mask[last]]
        sentence = (
            f"{len(at):,} answers stopped at the length limit and yet end in a trained end token: it was appended"
        )
        found.append(Found(sentence, len(at), s.at_tokens(at), advice, "warning"))
    return [f for f in found if f.count]


def _last_answer_end(s: Sheet) -> Indices:
    """[N] position of the last sampled token of each sample, -1 without one."""
    out = np.full(s.n, -1)
    out[s.answers.row] = s.answers.end - 1  # the last one of a row is written last
    return out


def lengths_differ(s: Sheet) -> list[Found]:
    base = "ids" if "ids" in s.rollouts.tokens else next(iter(s.rollouts.tokens))
    found = []
    for name, rows in s.misaligned.items():
        lengths = s.rollouts.tokens[name].lengths
        words = [f"{s.where[i]}: {lengths[i]} of {name}, {s.lengths[i]} of {base}" for i in rows[:5]]
        sentence = (
            f"{name} and {base} differ in length in {share(len(rows), s.n)} samples, so no token can be told its value"
        )
        by = np.unique(lengths[rows] - s.lengths[rows])
        advice = f"{name} is always {abs(by[0])} {'longer' if by[0] > 0 else 'shorter'}" if len(by) == 1 else ""
        found.append(Found(sentence, len(rows), words, advice or "write one value per token, prompt included"))
    return found


def loss_on_padding(s: Sheet) -> list[Found]:
    at = np.flatnonzero(s.tokens["mask"] & ~s.tokens["attention"])
    if not len(at):
        return []
    found = f"{len(at):,} tokens of padding (attention 0) are under the loss: they train the policy and fill the denominator"
    return [Found(found, len(at), s.at_tokens(at), "multiply the loss mask by the attention mask")]


def empty_sample(s: Sheet) -> list[Found]:
    policy = s.policy
    if policy is None:
        return []
    empty = (s.count(policy) == 0) & ~s.among("outcome", ("environment error", "env_error", "error"))
    at = np.flatnonzero(empty)
    if not len(at):
        return []
    if len(at) == s.n:
        return [Found("no sample has a token that the policy sampled: is the mask read right?", s.n, s.at_samples(at))]
    sentence = f"{share(len(at), s.n)} samples hold no token that the policy sampled"
    advice = "keep them in the group statistic if they were scored, and out of the loss and its denominator"
    return [Found(sentence, len(at), s.at_samples(at), advice)]


def one_length(s: Sheet) -> list[Found]:
    """A pile of samples at the largest length that do not end as others do."""
    lengths = s.lengths
    values, counts = np.unique(lengths[lengths > 0], return_counts=True)
    if len(values) < DISTINCT or counts[-1] < max(3, PILE * s.n) or counts[-1] < 3 * counts[-4:-1].max():
        return []
    at = np.flatnonzero(lengths == values[-1])
    told = s.cut[at] | (s.among("stop", ("stop", "eos", "end", "finished"))[at] & s.has("stop"))
    if s.end_ids and "ids" in s.tokens:
        told |= np.isin(s.tokens["ids"][s.offsets[at + 1] - 1], list(s.end_ids))
    at = at[~told]
    if len(at) < 3:
        return []
    sentence = (
        f"{share(len(at), s.n)} samples have {values[-1]:,} tokens, the largest length, and no end: they were cut"
    )
    advice = "record why generation stopped; do not score what the limit cut as if the agent had ended there"
    return [Found(sentence, len(at), s.at_samples(at), advice, "warning" if s.end_ids else "note")]


def retokenised(s: Sheet) -> list[Found]:
    """Answers whose text stands in the next turn's context and whose ids do not."""
    found = [*_drift(s)]
    if s.decode is not None and s.encode is not None:
        found += _unstable(s)
    return found


def _drift(s: Sheet) -> list[Found]:
    """The answer of a turn is looked for in the ids of the next sample of the same episode."""
    ids, offsets, episodes = s.tokens["ids"], s.offsets, s.episodes
    order = episodes.order
    same = np.flatnonzero(episodes.of[order[:-1]] == episodes.of[order[1:]]) if s.n > 1 else np.zeros(0, np.int64)
    final = np.full(s.n, -1)
    final[s.answers.row] = np.arange(len(s.answers.row))
    drifted: list[int] = []
    looked = 0
    for k in same:
        a, b = int(order[k]), int(order[k + 1])
        if final[a] < 0 or looked >= DRIFT_PAIRS:
            continue
        start, end = s.answers.start[final[a]], s.answers.end[final[a]]
        behind = ids[offsets[b] : offsets[b + 1]]
        place = start - offsets[a]
        if np.array_equal(behind[place : place + end - start], ids[start:end]) or _inside(ids[start:end], behind):
            continue
        looked += 1
        if _text_stands(s, a, b, ids[start:end], behind):
            drifted.append(a)
    if not drifted:
        return []
    found = (
        f"the answers of {share(len(drifted), len(same))} turns stand in the next turn's context as text, but not as the "
        "ids that were sampled: they were decoded and tokenised again"
    )
    return [
        Found(found, len(drifted), s.at_samples(drifted), "append sampled ids to the context; never encode them again")
    ]


def _inside(needle: Indices, hay: Indices) -> bool:
    """Does the one run of ids stand in the other, at the place of an id?"""
    wanted, data, width = needle.tobytes(), hay.tobytes(), hay.itemsize
    at = data.find(wanted)
    while at >= 0 and at % width:
        at = data.find(wanted, at + 1)
    return at >= 0


def _text_stands(s: Sheet, a: int, b: int, answer: Indices, behind: Indices) -> bool:
    if s.decode is not None:
        return s.decode(answer.tolist()) in s.decode(behind.tolist())
    completion, prompt = s.texts["completion"][a], s.texts["prompt"][b]
    if not completion or not prompt:
        return False
    return completion.strip() != "" and completion.strip() in prompt


def _unstable(s: Sheet) -> list[Found]:
    assert s.decode is not None and s.encode is not None
    ids, answers = s.tokens["ids"], s.answers
    changed = []
    looked = np.arange(len(answers.start))[:DRIFT_PAIRS]
    for k in looked:
        sampled = ids[answers.start[k] : answers.end[k]].tolist()
        if list(s.encode(s.decode(sampled))) != sampled:
            changed.append(k)
    if not changed:
        return []
    found = (
        f"{share(len(changed), len(looked))} sampled answers become other ids when their text is tokenised again: "
        "whatever passes through text trains on tokens that were not sampled"
    )
    at = answers.start[np.array(changed)]
    return [Found(found, len(changed), s.at_tokens(at), "keep ids from the sampler to the loss", "note")]
