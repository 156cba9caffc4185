"""What checks derive from the columns: answers, episodes, groups. Flat arrays, computed once, no loop over tokens.

N samples, M tokens of all of them, E episodes. An episode is what `rollout` names; where it does not, each sample is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from assay.audit.columns import Ragged, Rollouts
from assay.protocols import UserError

Bools = NDArray[np.bool_]
Indices = NDArray[np.int64]
Reals = NDArray[np.float64]
T = TypeVar("T")

SHOWN = 5  # rows that a finding names
EVALUATION = ("eval", "evaluation", "iid", "ood", "test", "val", "valid", "validation", "dev", "heldout", "held-out")
CUT_STOPS = ("length", "max_length", "max_tokens", "truncated", "context", "model_length")
CUT_OUTCOMES = ("cut", "truncated", "aborted")
DECLARED = {  # name -> what it is, and of how many: 0 is one alone, 1 a list
    **dict.fromkeys(("estimator", "layout", "denominator"), ("text", 0)),
    **dict.fromkeys(("temperature", "top_p", "top_k"), ("number", 0)),
    **dict.fromkeys(("rollouts_per_task", "vocabulary", "bos_id"), ("integer", 0)),
    "end_ids": ("integer", 1),
    "hints": ("text", 1),
    "reward_range": ("number", 2),
}
ERROR_OUTCOMES = ("environment error", "env_error", "engine_error", "environment_error", "error")


@dataclass(frozen=True, slots=True)
class Found:
    """What a check hands back; `audit` adds its code. `severity` only where it is not the check's own."""

    sentence: str
    count: int
    rows: Sequence[str] = ()
    advice: str = ""
    severity: str = ""


@dataclass(frozen=True, slots=True)
class Answers:
    """Runs of sampled tokens, K of them, in order: positions in the flat columns."""

    start: Indices  # [K]
    end: Indices  # [K], exclusive
    row: Indices  # [K] sample


@dataclass(frozen=True, slots=True)
class Episodes:
    """E episodes in order of appearance, and which samples are theirs."""

    of: Indices  # [N] episode of each sample
    order: Indices  # [N] samples, by episode, then turn, then place in the file
    start: Indices  # [E + 1]: order[start[e] : start[e + 1]] are the samples of e
    group: Indices  # [E] group of its first sample, -1 where not known
    names: list[Any]  # group -> its id as the file has it

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def first(self) -> Indices:
        return self.order[self.start[:-1]]

    @property
    def last(self) -> Indices:
        return self.order[self.start[1:] - 1]

    @property
    def samples(self) -> Indices:
        return np.diff(self.start)

    @property
    def size(self) -> Indices:
        """[groups]: episodes in each."""
        return np.bincount(self.group[self.group >= 0], minlength=len(self.names))


def reduce_rows(ufunc: np.ufunc, values: NDArray[Any], offsets: Indices, empty: Any, dtype: Any = None) -> NDArray[Any]:
    """[N]: `ufunc` over each row of the flat `values`; `empty` for rows without any."""
    out = np.full(len(offsets) - 1, empty, dtype or values.dtype)
    some = np.diff(offsets) > 0
    if some.any():  # what lies between two starts of rows that are not empty is the row: empty ones take no room
        out[some] = ufunc.reduceat(values, offsets[:-1][some], dtype=dtype)
    return out


def reduce_runs(values: Bools, start: Indices, end: Indices) -> Indices:
    """[K]: how many of `values` are true in each run [start, end), in order and not empty."""
    if not len(start):
        return np.zeros(0, np.int64)
    cuts = np.stack([start, end], 1).ravel()
    cuts = cuts[:-1] if cuts[-1] == len(values) else cuts
    return np.add.reduceat(values, cuts, dtype=np.int64)[::2]


def factorise(values: Sequence[Any]) -> tuple[Indices, list[Any]]:
    """(code of each value in order of appearance, the values); "not known" ("" or -1) is code -1."""
    codes: dict[Any, int] = {}
    found = np.fromiter(
        (-1 if value == "" or value == -1 else codes.setdefault(value, len(codes)) for value in values),
        np.int64,
        len(values),
    )
    return found, list(codes)


def _checked(rollouts: Rollouts) -> dict[str, Any]:
    """What is declared, in the types that checks compare with; a file may say anything. UserError names what is not."""
    found = {name: value for name, value in rollouts.declared.items() if value is not None}
    for name, (kind, length) in DECLARED.items():
        if name not in found:
            continue
        listed = isinstance(found[name], list | tuple | set | frozenset)
        values = list(found[name]) if listed else [found[name]]
        if listed > bool(length) or (length > 1 and len(values) != length) or not all(_is(v, kind) for v in values):
            words = {0: f"one {kind}", 1: f"a list of {kind}s"}.get(length, f"{length} {kind}s")
            raise UserError(f"{rollouts.source}: declared {name}: expected {words}, found {found[name]!r:.60}")
        found[name] = values if length else values[0]
    return found


def _is(value: Any, kind: str) -> bool:
    if kind == "text":
        return isinstance(value, str)
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return number and (kind == "number" or float(value).is_integer())


class Sheet:
    """The columns of one audit, and what is derived from them."""

    def __init__(
        self,
        rollouts: Rollouts,
        score: Callable[[Rollouts], Ragged] | None = None,
        decode: Callable[[Any], str] | None = None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.rollouts, self.n = rollouts, len(rollouts)
        self.score, self.decode, self.encode = score, decode, encode
        self.where, self.samples, self.texts = rollouts.where, rollouts.samples, rollouts.texts
        self.declared = _checked(rollouts)
        columns: dict[str, Sized] = {**rollouts.tokens, **rollouts.samples, **rollouts.texts}
        for name, column in columns.items():
            if len(column) != self.n:
                raise UserError(
                    f"{rollouts.source}: column {name!r} has {len(column)} rows, but there are {self.n} samples"
                )
        base = rollouts.tokens.get("ids") or next(iter(rollouts.tokens.values()), None)
        self.offsets: Indices = np.zeros(self.n + 1, np.int64) if base is None else base.offsets
        self.misaligned = {  # told by one check, and no column for any other
            name: np.flatnonzero(ragged.lengths != np.diff(self.offsets))
            for name, ragged in rollouts.tokens.items()
            if not np.array_equal(ragged.offsets, self.offsets)
        }
        self.tokens = {k: ragged.values for k, ragged in rollouts.tokens.items() if k not in self.misaligned}
        self._known: dict[str, bool] = {}
        self._memo: dict[Any, Any] = {}

    def once(self, derive: Callable[[Sheet], T]) -> T:
        """`derive(self)`, computed for the first check that asks."""
        if derive not in self._memo:
            self._memo[derive] = derive(self)
        found: T = self._memo[derive]
        return found

    def has(self, name: str) -> bool:
        """Is the column there, and known of any sample at all?"""
        if name not in self._known:
            self._known[name] = self._look(name)
        return self._known[name]

    def _look(self, name: str) -> bool:
        if name.startswith("declared."):
            return self.declared.get(name.removeprefix("declared.")) is not None
        if name.startswith("with "):
            return getattr(self, name.removeprefix("with ")) is not None
        if name in self.texts:
            return any(text for text in self.texts[name])
        column = self.tokens.get(name, self.samples.get(name))
        if column is None or not self.n:
            return False
        if column.dtype.kind == "f":
            return not bool(np.isnan(column).all())
        if column.dtype.kind in "OU":
            return any(value != "" for value in column)
        return name in self.tokens or name in ("turn", "padded") or bool((column != -1).any())

    # ----------------------------------------------------------------------------------------------------- tokens

    @cached_property
    def lengths(self) -> Indices:
        return np.diff(self.offsets)

    @cached_property
    def policy(self) -> Bools | None:
        """[M] tokens that the policy sampled: as the file says, else those that it trains on."""
        return self.tokens.get("sampled", self.tokens.get("mask"))

    @cached_property
    def trained(self) -> Bools | None:
        """[M] tokens under the loss: the mask, else what the policy sampled."""
        return self.tokens.get("mask", self.tokens.get("sampled"))

    @cached_property
    def trained_count(self) -> Indices:
        """[N] tokens under the loss; 1 for each sample where no column tells."""
        if self.trained is None:
            return np.ones(self.n, np.int64)
        return self.count(self.trained)

    @cached_property
    def answers(self) -> Answers:
        sampled = self.policy
        if sampled is None or not len(sampled):
            return Answers(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
        heads = self.offsets[:-1][self.lengths > 0]
        begins = sampled.copy()
        begins[1:] &= ~sampled[:-1]
        begins[heads] = sampled[heads]
        ends = sampled.copy()
        ends[:-1] &= ~sampled[1:]
        tails = self.offsets[1:][self.lengths > 0] - 1
        ends[tails] = sampled[tails]
        start = np.flatnonzero(begins)
        return Answers(start, np.flatnonzero(ends) + 1, self.row_at(start))

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids that end an answer: as declared, else the one that ends at least half of the answers and stands nowhere
        else in them (answers that a limit cut, and answers of one token, tell nothing)."""
        declared = self.declared.get("end_ids")
        if declared is not None:
            return frozenset(declared)
        answers, ids, policy = self.answers, self.tokens.get("ids"), self.policy
        if ids is None or policy is None:
            return frozenset()
        whole = ~self.cut[answers.row] & (answers.end - answers.start > 1)
        last = ids[answers.end[whole] - 1]
        if len(last) < 4:
            return frozenset()
        (end, count), *_ = Counter(last.tolist()).most_common(1)
        at_ends = int((ids[answers.end - 1] == end).sum())
        elsewhere = int((ids[policy] == end).sum()) - at_ends
        return frozenset({int(end)}) if 2 * count >= len(last) and 50 * elsewhere <= at_ends else frozenset()

    def count(self, flags: Bools) -> Indices:
        """[N] of flags [M]."""
        return reduce_rows(np.add, flags, self.offsets, 0, np.int64)

    def row_at(self, positions: Indices) -> Indices:
        """The sample of each flat position."""
        return np.searchsorted(self.offsets, positions, side="right") - 1

    # ---------------------------------------------------------------------------------------------------- samples

    def words(self, name: str) -> NDArray[Any]:
        """[N] strings of a column, "" where it is not there."""
        column = self.samples.get(name)
        return np.full(self.n, "", object) if column is None else column

    def among(self, name: str, wanted: Sequence[str]) -> Bools:
        """[N] is the column's word (in small letters) one of `wanted`?"""
        column = self.samples.get(name)
        if column is None:
            return np.zeros(self.n, np.bool_)
        cache = {word: str(word).lower() in wanted for word in set(column.tolist())}
        return np.fromiter((cache[word] for word in column.tolist()), np.bool_, self.n)

    @cached_property
    def evaluation(self) -> Bools:
        """[N] samples of an evaluation split, or of greedy decoding: nothing is learnt from them."""
        if self.declared.get("temperature") == 0:
            return np.ones(self.n, np.bool_)
        return self.among("split", EVALUATION)

    @cached_property
    def cut(self) -> Bools:
        """[N] samples that say that a limit cut them, or that the environment failed: leaving them out is a choice."""
        said = self.among("outcome", (*CUT_OUTCOMES, *ERROR_OUTCOMES))
        return said | self.among("stop", CUT_STOPS)

    @cached_property
    def episodes(self) -> Episodes:
        names = self.samples.get("rollout")
        of = np.arange(self.n) if names is None else factorise(names.tolist())[0]
        lone = of < 0
        of[lone] = of.max(initial=-1) + 1 + np.arange(lone.sum())
        _, first, of = np.unique(of, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        of = rank[of]
        turn = self.samples.get("turn", np.full(self.n, -1))
        order = np.lexsort((np.arange(self.n), turn, of))
        start = np.searchsorted(of[order], np.arange(len(first) + 1))
        groups = self.samples.get("group")
        group, known = factorise(groups.tolist()) if groups is not None else (np.full(self.n, -1), [])
        return Episodes(of, order, start, group[order[start[:-1]]] if self.n else group, known)

    @cached_property
    def expected_size(self) -> int | None:
        """Episodes of a group: as declared, else what at least half of the groups have; None: there is no rule."""
        declared = self.declared.get("rollouts_per_task")
        if declared is not None:
            return int(declared)
        size = self.episodes.size
        if not len(size):
            return None
        common = int(np.bincount(size).argmax())
        return common if 2 * (size == common).sum() >= len(size) else None

    def of_episodes(self, name: str) -> tuple[Reals, Bools]:
        """(value of each episode, is it clear which): a number that all its samples share, or that only the last one
        has beside zeros; where turns have numbers of their own, their sum, which is not clear. NaN: not known."""
        episodes = self.episodes
        values = np.asarray(self.samples[name], np.float64)[episodes.order]
        low = reduce_rows(np.fmin, values, episodes.start, np.nan)
        high = reduce_rows(np.fmax, values, episodes.start, np.nan)
        total = reduce_rows(np.add, np.nan_to_num(values, posinf=np.inf, neginf=np.inf), episodes.start, 0.0)
        last = values[episodes.start[1:] - 1] if len(episodes) else values
        with np.errstate(invalid="ignore"):
            same = high - low <= 1e-9 * np.maximum(1, np.abs(high))
            clear = same | (total == last) | np.isnan(high)
        return np.where(np.isnan(high), np.nan, np.where(same, high, total)), clear

    @cached_property
    def task_of(self) -> tuple[Indices, str]:
        """([E] code of what each episode was about, -1 where not known; by which column): the task, else the prompt."""
        first = self.episodes.first
        if self.has("task"):
            return factorise(self.samples["task"][first].tolist())[0], "task"
        if self.has("prompt"):
            prompts = self.texts["prompt"]
            return factorise([prompts[i] or "" for i in first])[0], "prompt"
        ids, answers = self.tokens.get("ids"), self.answers
        if ids is None or not len(answers.start):
            return np.full(len(first), -1), ""
        head = np.full(self.n, -1)
        head[answers.row[::-1]] = answers.start[::-1]  # the first answer of each row is written last
        return factorise([ids[self.offsets[i] : head[i]].tobytes() if head[i] >= 0 else "" for i in first])[0], "prompt"

    # ------------------------------------------------------------------------------------------------------ words

    def at_samples(self, samples: Sequence[int] | Indices) -> list[str]:
        return [self.where[int(i)] for i in samples[:SHOWN]]

    def at_tokens(self, positions: Indices) -> list[str]:
        """ "line 12, token 45 (id 2)" of flat positions, one of each sample as long as there are samples."""
        rows = self.row_at(positions)
        _, firsts = np.unique(rows, return_index=True)
        ids = self.tokens.get("ids")
        said = []
        for k in firsts[:SHOWN]:
            name = "" if ids is None else f" (id {ids[positions[k]]})"
            said.append(f"{self.where[rows[k]]}, token {positions[k] - self.offsets[rows[k]]}{name}")
        return said

    def at_groups(self, groups: Sequence[int] | Indices) -> list[str]:
        """ "group 7 (line 12)" of group codes."""
        first = {}
        for e in range(len(self.episodes) - 1, -1, -1):
            first[int(self.episodes.group[e])] = int(self.episodes.first[e])
        return [f"group {self.episodes.names[int(g)]} ({self.where[first[int(g)]]})" for g in groups[:SHOWN]]

    def at_episodes(self, episodes: Sequence[int] | Indices) -> list[str]:
        return self.at_samples(self.episodes.first[np.asarray(episodes[:SHOWN], np.int64)])


def share(part: float, whole: float) -> str:
    """ "12 of 96 (12.5 %)"."""
    return f"{part:,} of {whole:,} ({100 * part / max(whole, 1):.3g} %)"
