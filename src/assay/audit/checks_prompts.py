"""A5xx: prompts, tasks, splits, and the template between two turns."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from assay.audit.sheet import EVALUATION, Found, Indices, Sheet, factorise, share

SHORT, LONG = 3, 8  # characters of a gold string: shorter ones prove nothing; longer ones hardly stand there by chance


def leak(s: Sheet) -> list[Found]:
    """Gold strings of a sample, and declared hints, in its prompt."""
    return [*_gold(s), *_hints(s)]


def _gold(s: Sheet) -> list[Found]:
    if not (s.has("gold") and s.has("prompt")):
        return []
    long: dict[int, str] = {}
    short: dict[int, str] = {}
    for i, (gold, prompt) in enumerate(zip(s.texts["gold"], s.texts["prompt"], strict=True)):
        if not gold or not prompt:
            continue
        for text in filter(None, (line.strip() for line in gold.split("\n"))):
            if len(text) >= SHORT and _stands(text, prompt):
                (long if len(text) >= LONG else short).setdefault(i, text)
    found = []
    for leaked, severity in ((long, "warning"), ({i: t for i, t in short.items() if i not in long}, "note")):
        if not leaked:
            continue
        held = int(s.evaluation[list(leaked)].sum())
        sentence = f"the gold answer stands in the prompt of {share(len(leaked), s.n)} samples"
        sentence += f", {held:,} of them of an evaluation split" if held else ""
        rows = [f"{s.where[i]}: {text[:60]!r}" for i, text in list(leaked.items())[:5]]
        advice = "what scores must not be shown; if the task is to find it in a given text, this is by design"
        found.append(Found(sentence, len(leaked), rows, advice, severity))
    return found


def _stands(text: str, prompt: str) -> bool:
    """As a whole word."""
    at = prompt.find(text)
    while at >= 0:
        before, behind = prompt[at - 1 : at], prompt[at + len(text) : at + len(text) + 1]
        if not ((before.isalnum() and text[0].isalnum()) or (behind.isalnum() and text[-1].isalnum())):
            return True
        at = prompt.find(text, at + 1)
    return False


def _hints(s: Sheet) -> list[Found]:
    hints = [hint for hint in s.declared.get("hints", ()) if hint]
    if not hints or not s.has("prompt"):
        return []
    pattern = re.compile("|".join(map(re.escape, hints)))
    hit = {i: m.group(0) for i, p in enumerate(s.texts["prompt"]) if p and s.evaluation[i] and (m := pattern.search(p))}
    if not hit:
        return []
    sentence = (
        f"a declared hint stands in the prompt of {share(len(hit), int(s.evaluation.sum()))} samples of evaluation"
    )
    rows = [f"{s.where[i]}: {text[:60]!r}" for i, text in list(hit.items())[:5]]
    return [Found(sentence, len(hit), rows, "evaluate under the plain prompt", "error")]


def overlap(s: Sheet) -> list[Found]:
    """Tasks (by content where the key tells it) or prompts in training and in evaluation."""
    split = s.words("split")
    held = s.among("split", EVALUATION)
    known = np.array([str(v) != "" for v in split.tolist()], np.bool_)
    if not held.any() or not (known & ~held).any():
        return []
    by_task = s.has("task")
    if by_task:
        keys = [_content(str(task)) for task in s.samples["task"].tolist()]
    elif s.has("prompt"):
        keys = [text or "" for text in s.texts["prompt"]]
    else:
        return []
    codes, _ = factorise(keys)
    known &= codes >= 0
    both = np.intersect1d(codes[known & held], codes[known & ~held])
    if not len(both):
        return []
    at = np.flatnonzero(held & known & np.isin(codes, both))
    tasks = len(np.unique(codes[held & known]))
    what = "tasks" if by_task else "prompts"
    sentence = f"{share(len(both), tasks)} {what} of evaluation are trained on too"
    advice = "keep splits apart by the content of the task: fresh seeds repeat small tasks"
    return [Found(sentence, len(both), s.at_samples(at), advice, "error" if by_task else "warning")]


def _content(task: str) -> str:
    """Environment and content hash of a key "environment@version/split/id#hash", else the key itself."""
    head, mark, content = task.rpartition("#")
    return f"{head.partition('@')[0]}#{content}" if mark and "@" in head and content else task


@dataclass(frozen=True, slots=True)
class Steps:
    """Neighbouring samples of one episode: does the later begin with the earlier?"""

    before: Indices  # [P]
    after: Indices  # [P]
    common: Indices  # [P] tokens that both begin with


def steps(s: Sheet) -> Steps:
    return s.once(_steps)


def _steps(s: Sheet) -> Steps:
    order, of, ids, offsets = s.episodes.order, s.episodes.of, s.tokens["ids"], s.offsets
    same = np.flatnonzero(of[order[:-1]] == of[order[1:]]) if s.n > 1 else np.zeros(0, np.int64)
    before, after = order[same], order[same + 1]
    common = np.zeros(len(same), np.int64)
    for k in range(len(same)):
        a, b, n = offsets[before[k]], offsets[after[k]], min(s.lengths[before[k]], s.lengths[after[k]])
        unequal = ids[a : a + n] != ids[b : b + n]
        first = int(unequal.argmax()) if n else 0
        common[k] = first if n and unequal[first] else n
    return Steps(before, after, common)


def history_rewritten(s: Sheet) -> list[Found]:
    """A context that does not begin with the one before it, answer included: every turn becomes a sample of its own."""
    layout = str(s.declared.get("layout") or "")
    if layout.startswith("window"):
        return []
    pairs = steps(s)
    broken = pairs.common < s.lengths[pairs.before]
    if not broken.any():
        return []
    episodes = s.episodes
    forked = np.bincount(episodes.of[pairs.before[broken]], minlength=len(episodes))
    hit = np.flatnonzero(forked)
    answer = np.full(s.n, np.iinfo(np.int64).max)
    answer[s.answers.row] = s.answers.start - s.offsets[s.answers.row]
    inside = pairs.common[broken] >= answer[pairs.before[broken]]
    samples = int(episodes.samples[hit].sum())
    tokens = int(np.bincount(episodes.of, s.lengths, len(episodes))[hit].sum())
    last = int(s.lengths[episodes.last[hit]].sum())
    sentence = (
        f"the template rewrites history: {len(hit):,} rollouts became {samples:,} samples, with {int(forked.max())} forks in "
        f"one; {tokens:,} tokens are trained through where the last contexts have {last:,}"
    )
    advice = "use a template that keeps the reasoning of past turns, or declare the layout as window"
    if inside.mean() > 0.5:
        advice = "the answer itself was changed when it became history (reasoning stripped?): " + advice
    severity = "note" if int(forked.max()) == 1 else ""
    return [Found(sentence, int(broken.sum()), s.at_samples(pairs.after[broken]), advice, severity)]


def doubled_start(s: Sheet) -> list[Found]:
    """The same special token twice at the very beginning."""
    ids = s.tokens["ids"]
    long = np.flatnonzero(s.lengths > 1)
    twice = ids[s.offsets[long]] == ids[s.offsets[long] + 1]
    bos = s.declared.get("bos_id")
    if bos is not None:
        twice &= ids[s.offsets[long]] == int(bos)
    if not twice.any() or (bos is None and not (twice.all() and len(np.unique(ids[s.offsets[long]])) == 1)):
        return []
    at = long[twice]
    sentence = f"{share(len(at), s.n)} samples begin with id {ids[s.offsets[at[0]]]} twice"
    advice = "the template writes the start token and the tokenizer adds another: encode with add_special_tokens=False"
    return [Found(sentence, len(at), s.at_samples(at), advice, "warning" if bos is not None else "note")]
