"""Quote: say one exact sentence. Success is a single string, so the prior probability of it can be moved and measured.

    goal "Give a famous movie quote ..."   action "quote: life is like a box of chocolates ..."   success, or closeness

One turn. The sandbox of "Demystifying Reinforcement Learning Post-Training of Language Models" (arXiv 2608.24949), task Q:
the algorithm is frozen, and the prior, the reward's granularity and the prompts are varied. Parsing and rewards follow the
released code, which gives credit to a target with words around it; prompts are in our own words.

Left out: the judge and milestones of the paper's second task (a mathematics problem with a 32B judge).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from assay.envs.base import TextEnv, check_task
from assay.files import text_lines
from assay.protocols import SPLITS, UserError
from assay.rng import stable_hash

TARGET = "life is like a box of chocolates you never know what youre gonna get"
PROMPT = "Give a famous movie quote. It has 7 to 15 words, in lower case and without punctuation."
PREFIX = "quote:"
REWARDS = ("sparse", "dense")
PROMPT_BYTES = 1 << 24  # of a file of prompts
PROMPT_LENGTH = 20_000  # characters of one prompt
TARGET_LENGTH = 1000  # characters
HELD_OUT = 5  # one content hash in five is "iid", another one in five "ood"


# ---------------------------------------------------------------------------------------------------- pure functions


def norm(text: str) -> str:
    """Lower case, only word characters (letters, digits, "_") and single spaces. norm(norm(s)) = norm(s)."""
    return " ".join(re.sub(r"[^\w\s]", "", text.lower()).split())


def legacy_norm(text: str) -> str:
    """As the released code has it: stripped before the deletion, so that "- a" keeps a leading space and is not "a"."""
    return re.sub(r"\s+", " ", re.sub(r"[^\w\s]", "", text.lower().strip()))


def find(text: str, prefix: str = PREFIX) -> str | None:
    """What stands behind the first `prefix` (any case, white space before its colon), up to a newline, "|" or "<"; None
    where there is no prefix. Without a prefix to look for: the text itself, None where it is blank."""
    if not prefix:
        return text if text.strip() else None
    word = re.escape(prefix.removesuffix(":"))
    colon = r"\s*:" if prefix.endswith(":") else ""
    match = re.search(rf"{word}{colon}\s*([^\n|<]*)", text, re.IGNORECASE)
    return match[1] if match else None


def extract(text: str, prefix: str = PREFIX, legacy: bool = False) -> str:
    """ext of section 3.2: what `find` finds, else the first line that is not blank without a leading prefix (the colon is
    optional there), else ""; normalised."""
    found = find(text, prefix)
    if found is None:
        line = next((line for line in text.split("\n") if line.strip()), "").strip()
        word = re.escape(prefix.removesuffix(":"))
        found = re.sub(rf"^{word}\s*:?\s*", "", line, flags=re.IGNORECASE)
    return legacy_norm(found) if legacy else norm(found)


def levenshtein(a: str, b: str) -> int:
    """Least number of inserted, deleted and replaced characters between a and b. O(min) rows of O(max) array operations."""
    if len(a) > len(b):
        a, b = b, a
    letters = np.array([ord(letter) for letter in b], np.int64)
    steps = np.arange(len(b) + 1)
    row = steps.copy()  # distances of a's prefix so far to every prefix of b
    for i, letter in enumerate(a, 1):
        best = np.empty_like(row)
        best[0] = i
        np.minimum(row[:-1] + (letters != ord(letter)), row[1:] + 1, out=best[1:])  # replace or keep, delete
        row = np.minimum.accumulate(best - steps) + steps  # insert
    return int(row[-1])


def similarity(a: str, b: str) -> float:
    """1 - levenshtein / longer length, in [0, 1]; 0 where both are empty."""
    longer = max(len(a), len(b))
    return 1.0 - levenshtein(a, b) / longer if longer else 0.0


def sparse_reward(text: str, target: str, substring_credit: bool = True, legacy: bool = False) -> float:
    """Eq. (2) of a normalised text g and the target t: 1 where equal; else max(0.5, 1 - 0.5 (|g| - |t|) / |g|) where t is
    part of g, which `substring_credit` = False leaves out; else 0. `legacy`: normalise the target as the released code."""
    g, t = text, legacy_norm(target) if legacy else norm(target)
    if g == t:
        return 1.0
    if substring_credit and t and t in g:
        return max(0.5, 1.0 - 0.5 * (len(g) - len(t)) / len(g))
    return 0.0


def dense_reward(text: str, target: str, legacy: bool = False) -> float:
    """Eq. (3) of a normalised text g and the target t: 1 - d(g, t) / max(|g|, |t|), which is 1 only where equal."""
    return similarity(text, legacy_norm(target) if legacy else norm(target))


# ------------------------------------------------------------------------------------------------------- environment


class Quote(TextEnv):
    """Quote (task Q).

    target            what must be said; compared after normalisation
    reward            "sparse": eq. (2), all or nothing but for the credit below; "dense": eq. (3), closeness in characters
    substring_credit  sparse: 0.5 to 1 for an answer that contains the target (the released code); false: exact only
    legacy_norm       normalise as the released code, which keeps a space where punctuation stood at the start
    prompts           "one": the same prompt for every task; or a UTF-8 file with one prompt a line, task i has line
                      i modulo the number of lines
    held_out          of a file: keep a fifth of its lines for "iid" and another fifth for "ood", by content
    prefix            what answers must begin with; "": the whole answer is the quote, for small policies

    Without `held_out` **the splits are not disjoint**: "iid" and "ood" play the same prompts as "train", and success there
    is the probability of the target on the prompts that were trained on, which is what the paper measures. It says nothing
    of generalisation. The hash of a task then covers its split, so that no table takes two splits for one panel. Held-out
    lines are disjoint by content, and "ood" is no other distribution than "iid".
    One prompt (and "iid", "ood" without `held_out`) has unboundedly many tasks: each is a further sample.

    An answer without the prefix is invalid; it is still compared, by its first line. Success is an exact match, the only
    way to a reward of 1. Raises UserError for settings out of range and for a file that cannot be used.
    """

    skills = ()
    brief = "quote"

    def __init__(
        self,
        target: str = "life is like a box of chocolates you never know what youre gonna get",
        reward: str = "sparse",
        substring_credit: bool = True,
        legacy_norm: bool = False,
        prompts: str = "one",
        held_out: bool = False,
        prefix: str = "quote:",
    ) -> None:
        super().__init__(
            observation_length=64, action_length=4096
        )  # defaults are literals: flags are read from the source
        if reward not in REWARDS:
            raise UserError(f"quote: reward is {reward!r}; it must be one of {', '.join(REWARDS)}")
        if not norm(target) or len(target) > TARGET_LENGTH:
            raise UserError(
                f"quote: target has {len(target)} characters; it needs a letter and at most {TARGET_LENGTH}"
            )
        if prefix != prefix.strip() or "\n" in prefix or prefix == ":":
            raise UserError(f"quote: prefix is {prefix!r}; it must be a word, with or without a colon, or nothing")
        self.target, self.reward, self.prefix = target, reward, prefix
        self.substring_credit, self.legacy = substring_credit, legacy_norm
        self.held_out = held_out
        lines = (PROMPT,) if prompts == "one" else read_prompts(Path(prompts))
        self.lines = {split: lines for split in SPLITS}
        if held_out:
            self.lines = {split: tuple(line for line in lines if _split_of(line) == split) for split in SPLITS}
            empty = [split for split, own in self.lines.items() if not own]
            if empty:
                raise UserError(f"quote: held_out leaves no prompt for {' and '.join(empty)}: more prompts are needed")
        form = f"`{prefix} <quote>`" if prefix else "the quote"
        self.instructions = f"Answer with {form} and nothing else: no reasoning, no explanation."
        settings = [1, target, reward, substring_credit, legacy_norm, held_out, prefix, *lines]
        self.version = stable_hash("\0".join(map(str, settings)))
        self._prompt: str | None = None
        self._answer: str | None = None  # None: not given yet

    def size(self, split: str) -> int | None:
        """Lines of the split; None where tasks are further samples of the same prompts."""
        lines = self.lines[split]
        return None if not self.held_out and (split != "train" or len(lines) == 1) else len(lines)

    # ------------------------------------------------------------------------------------------------ gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        split, task = self.pick(seed, options)
        check_task("quote", task)
        lines = self.lines[split]
        self._prompt, self._answer = lines[task % len(lines)], None
        shown = "Your quote?"
        content = [self._prompt, self.target] + ([] if self.held_out else [split])
        info = {
            "hash": stable_hash("\0".join(content)),
            "goal": self._prompt,
            "horizon": 1,
            "admissible": None,
            "anchor": self.anchor(shown),
        }
        return shown, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._running()
        self._answer = action
        said = extract(action, self.prefix, self.legacy)
        reward = (
            sparse_reward(said, self.target, self.substring_credit, self.legacy)
            if self.reward == "sparse"
            else dense_reward(said, self.target, self.legacy)
        )
        info = {
            "valid": find(action, self.prefix) is not None,
            "success": reward == 1.0,
            "anchor": self.anchor(""),
            "skill": "other",
            "noop": False,
            "admissible": None,
        }
        return "", reward, True, False, info

    def _running(self) -> None:
        if self._prompt is None or self._answer is not None:
            raise UserError("quote: no episode is running: call reset() before step() or expert()")

    # --------------------------------------------------------------------------------------------------- powers

    def expert(self) -> str:
        """The target in the format that is asked for."""
        self._running()
        return f"{self.prefix} {self.target}".strip()

    def snapshot(self) -> tuple[str | None, str | None]:
        return self._prompt, self._answer

    def restore(self, state: tuple[str | None, str | None]) -> None:
        self._prompt, self._answer = state

    def evidence(self) -> dict[str, Any]:
        """Exact match, target as a part, and similarity of eq. (3), of the answer; `gold` is the target."""
        if self._prompt is None:
            raise UserError("quote: no episode has begun: call reset() before evidence()")
        said = extract(self._answer or "", self.prefix, self.legacy)
        target = legacy_norm(self.target) if self.legacy else norm(self.target)
        close = similarity(said, target)
        checks = [
            {"name": "exact match", "passed": said == target, "where": "answer", "value": said},
            {"name": "substring match", "passed": target in said, "where": "answer", "value": said},
            {"name": "levenshtein similarity", "passed": close == 1.0, "where": "answer", "value": close},
        ]
        return {"checks": checks, "gold": [self.target]}


def read_prompts(path: Path) -> tuple[str, ...]:
    """The lines of a UTF-8 file; UserError names what is wrong with it. A blank line is refused, not skipped."""
    lines = text_lines(path, "quote: prompts", PROMPT_BYTES)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise UserError(f"quote: prompts {path}, line {number} is blank: one prompt a line")
        if len(line) > PROMPT_LENGTH:
            raise UserError(f"quote: prompts {path}, line {number} has more than {PROMPT_LENGTH} characters")
    return tuple(line.strip() for line in lines)


def _split_of(prompt: str) -> str:
    return {0: "iid", 1: "ood"}.get(int(stable_hash(prompt), 16) % HELD_OUT, "train")
