"""Dictionaries of phrases: how few phrases spell a set of sequences, and which dictionary is worth its own length.

A symbol is a number from 0 to K - 1, a sequence or phrase a tuple of symbols, a dictionary a set of phrases that always
has the K single symbols. Source: ReuseRL, arXiv 2605.31509; byte-pair merges under a two-part code.

All sequences are segmented side by side, one position at a time: a cluster of T positions and N distinct sequences
costs T steps over [L, N] arrays. Every decision is made on whole numbers (counts), so no order of sequences matters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Phrase = tuple[int, ...]
Ints = NDArray[np.int64]

LONGEST = 8  # symbols: the most that `max_phrase` may be
FEW = 16  # a cost and the length of its last phrase share a number: cost * FEW + length, so FEW > LONGEST
NEVER = 1 << 24  # the price of what is in no dictionary
DENSE = 1 << 20  # entries of a table over all codes, above which they are sorted instead


@dataclass(frozen=True, slots=True)
class Code:
    """The two-part code of a dictionary and the sequences that it spells, in bits or, for `count_sum`, in symbols.

    bits_sum:  sum over phrases of two symbols and more of (|p| log2 K + log2 L)  +  log2|C| * phrases used in all
    count_sum: sum over them of |p|  +  phrases used in all
    generic:   beta * (the first part of bits_sum)  +  log2|C| * mean of phrases used
    """

    symbols: int  # K, of the alphabet
    longest: int  # L, symbols of a phrase at most
    cost: str = "bits_sum"
    beta: float = 1.0

    def dictionary(self, phrases: int, length: int) -> float:
        """Bits D(C) of `phrases` phrases of two symbols and more, `length` symbols long together."""
        return length * math.log2(self.symbols) + phrases * math.log2(self.longest)

    def total(self, phrases: int, length: int, used: int, sequences: int) -> float:
        """L_BDL: what it takes to store the dictionary and to spell `sequences` sequences with `used` phrases."""
        if self.cost == "count_sum":
            return float(length + used)
        bits = math.log2(self.symbols + phrases)
        if self.cost == "generic":
            return self.beta * self.dictionary(phrases, length) + bits * used / max(sequences, 1)
        return self.dictionary(phrases, length) + bits * used


@dataclass(frozen=True, slots=True)
class Dictionary:
    """What `extract` found. `phrases` are those of two symbols and more in the order of their merges; `uses` counts
    every phrase used in the segmentation of the cluster; `cost` is the least number of phrases of each sequence."""

    phrases: tuple[Phrase, ...]
    uses: dict[Phrase, int]
    cost: dict[Phrase, int]
    total: float  # L_BDL


class Cluster:
    """A multiset of sequences, ready to be segmented: N distinct ones of up to T symbols, each as often as it occurs.

    An l-gram has a code: its symbols + 1 as digits of base K + 1, filled up with zeros to L digits, so that codes are
    ordered as tuples are. Codes that occur have numbers, `ids[t, L - l, n]` for the l-gram of sequence n that ends with
    its symbol t; number 0 is none.
    """

    def __init__(self, sequences: Iterable[Phrase], symbols: int, longest: int) -> None:
        counts = Counter(sequences)
        self.sequences = [s for s in counts if s]
        self.times = np.array([counts[s] for s in self.sequences], np.int64)
        self.size = sum(counts.values())
        self.base, self.longest = symbols + 1, longest
        self.lengths = np.array([len(s) for s in self.sequences], np.int64)
        rows, columns = int(self.lengths.max(initial=0)), len(self.sequences)
        digits = np.zeros((rows, columns), np.int64)
        inside = np.arange(rows)[:, None] < self.lengths
        digits.T[inside.T] = np.fromiter((a + 1 for s in self.sequences for a in s), np.int64)
        codes = np.zeros((rows, longest, columns), np.int64)
        codes[:, -1] = gram = digits * self.base ** (longest - 1)
        for length in range(2, longest + 1):  # the gram one shorter, ended one earlier, and one more digit
            digit = digits[length - 1 :]
            whole = (gram[:-1] > 0) & (digit > 0)
            gram = np.where(whole, gram[:-1] + digit * self.base ** (longest - length), 0)
            codes[length - 1 :, -length] = gram
        self.codes, self.ids = _numbered(codes, self.base**longest)
        weights = np.broadcast_to(self.times, codes.shape)
        self.occurrences = np.bincount(self.ids.ravel(), weights.ravel(), len(self.codes)).astype(np.int64)

    def id_of(self, phrase: Phrase) -> int:
        """Number of a phrase; 0 where it does not occur."""
        code = sum((a + 1) * self.base ** (self.longest - i) for i, a in enumerate(phrase, 1))
        at = int(np.searchsorted(self.codes, code))
        return at if at < len(self.codes) and self.codes[at] == code else 0

    def phrase(self, code: int) -> Phrase:
        digits = [code // self.base ** (self.longest - i) % self.base for i in range(1, self.longest + 1)]
        return tuple(int(d) - 1 for d in digits if d)

    def prices(self, phrases: Collection[Phrase]) -> NDArray[np.int32]:
        """[T, L, N]: what the l-gram that ends there costs as a phrase, FEW + l in the dictionary and NEVER outside."""
        known = np.zeros(len(self.codes), np.bool_)
        known[[self.id_of(p) for p in phrases]] = True
        known[0] = False
        lengths = np.arange(self.longest, 0, -1, dtype=np.int32)[:, None]
        prices = np.where(known[self.ids], FEW + lengths, NEVER).astype(np.int32)
        prices[:, -1] = FEW + 1  # single symbols, and what stands behind an end
        return prices


def segment(prices: NDArray[np.int32]) -> NDArray[np.int32]:
    """[T + 1, N]: the least number of phrases that spell the first t symbols, times FEW, plus the length of the last.

    The exact dynamic programme d[t] = min over l of d[t - l] + 1 with the l symbols before t in the dictionary; of
    equally cheap last phrases the shortest is taken.
    """
    rows, longest, columns = prices.shape
    least = np.full((longest + rows, columns), NEVER, np.int32)  # times FEW, longest rows before the first symbol
    last = np.zeros((rows + 1, columns), np.int32)
    least[longest - 1] = 0
    sums = np.empty((longest, columns), np.int32)
    for t in range(rows):
        np.add(least[t : t + longest], prices[t], out=sums)
        np.minimum.reduce(sums, axis=0, out=last[t + 1])
        np.bitwise_and(last[t + 1], -FEW, out=least[longest + t])
    return last


def extract(cluster: Cluster, code: Code, forbid_powers: bool = False) -> Dictionary:
    """The dictionary of a cluster: the most frequent pair of adjacent phrases that pays becomes one, until none does.

    Pairs are tried by count, then in the order of their symbols; after each merge all is segmented anew. A pair whose
    phrase is longer than L, known, or (with `forbid_powers`) a repetition of a shorter one is passed over.

    Adding q = p_a p_b saves at most one phrase for each place where q stands, since p_a p_b spells it in two: where that
    would not pay, q is rejected unseen.
    """
    phrases: list[Phrase] = []
    known: set[int] = set()  # their numbers
    length = 0  # symbols of all phrases
    prices = cluster.prices(())
    last = segment(prices)
    columns = np.arange(len(cluster.sequences))
    used = int((last[cluster.lengths, columns] // FEW) @ cluster.times)
    total = code.total(0, 0, used, cluster.size)
    merged = True
    while merged:
        merged, seen = False, set(known)
        for q in _pairs(cluster, last):
            if q in seen:
                continue
            seen.add(q)
            phrase = cluster.phrase(int(cluster.codes[q]))
            if forbid_powers and is_power(phrase):
                continue
            new = len(phrases) + 1, length + len(phrase)
            if code.total(*new, used - int(cluster.occurrences[q]), cluster.size) - total >= 0:
                continue
            row = cluster.longest - len(phrase)
            there = cluster.ids[:, row] == q
            prices[:, row][there] = FEW + len(phrase)
            found = segment(prices)
            now_used = int((found[cluster.lengths, columns] // FEW) @ cluster.times)
            now = code.total(*new, now_used, cluster.size)
            if now - total < 0:
                phrases.append(phrase)
                known.add(q)
                last, length, used, total, merged = found, new[1], now_used, now, True
                break
            prices[:, row][there] = NEVER
    return Dictionary(
        tuple(phrases), _uses(cluster, last), _costs(cluster, last[cluster.lengths, columns] // FEW), total
    )


def is_power(phrase: Phrase) -> bool:
    """True if the phrase repeats a shorter one: (1, 1), (1, 2, 1, 2)."""
    return any(
        len(phrase) % n == 0 and phrase == phrase[:n] * (len(phrase) // n) for n in range(1, len(phrase) // 2 + 1)
    )


def bound(mean_cost: float, dictionary_bits: float, longest: int, successes: int, risk: float = 0.05) -> float:
    """An upper bound on the expected seg/H that holds with probability 1 - risk, for all dictionaries at once.

    Occam's bound: mean + sqrt((B ln 2 + ln(1 / risk)) / 2m), B = D(C) + log2 L the length of the dictionary in a prefix
    code (the unused length 1 ends the list: Kraft's sum is 1). m successes, independent and of one policy.
    """
    bits = dictionary_bits + math.log2(longest)
    return mean_cost + math.sqrt((bits * math.log(2) + math.log(1 / risk)) / (2 * successes))


def _numbered(codes: Ints, most: int) -> tuple[Ints, Ints]:
    """(codes that occur, ascending, 0 first; the number of each)."""
    if most > DENSE:
        known, ids = np.unique(np.append(codes.ravel(), 0), return_inverse=True)
        return known, ids[:-1].reshape(codes.shape)
    table = np.zeros(most, np.int64)
    table[codes] = 1
    table[0] = 1
    known = np.flatnonzero(table)
    table[known] = np.arange(len(known))
    return known, table[codes]


def _walk(cluster: Cluster, last: NDArray[np.int32]) -> tuple[Ints, Ints]:
    """[J, N] each: ends of the phrases of each segmentation, from the last to the first, and their lengths; 0 is none."""
    columns = np.arange(len(cluster.sequences))
    lengths = (last & (FEW - 1)).astype(np.int64)
    end = cluster.lengths
    ends, steps = [], []
    while end.any():
        step = lengths[end, columns]
        ends.append(end)
        steps.append(step)
        end = end - step
    empty = np.zeros((0, len(columns)), np.int64)
    return (np.stack(ends), np.stack(steps)) if ends else (empty, empty)


def _pairs(cluster: Cluster, last: NDArray[np.int32]) -> list[int]:
    """Numbers of what adjacent phrases of at most L symbols spell together, the most frequent pair first; pairs that
    are equally frequent in the order of their symbols."""
    ends, steps = _walk(cluster, last)
    both = steps[:-1] + steps[1:]
    j, n = np.nonzero((steps[1:] > 0) & (both <= cluster.longest))
    ids = cluster.ids[ends[j, n] - 1, cluster.longest - both[j, n], n]
    split = steps[j + 1, n]  # symbols of the first of the two
    counts = np.bincount(ids * FEW + split, cluster.times[n])
    pairs = np.flatnonzero(counts)
    q, split = pairs // FEW, pairs % FEW
    upper = cluster.base ** (cluster.longest - split)
    first = cluster.codes[q] // upper
    second = cluster.codes[q] % upper * cluster.base**split
    order = np.lexsort((second, first * upper, -counts[pairs]))
    return [int(i) for i in q[order]]


def _uses(cluster: Cluster, last: NDArray[np.int32]) -> dict[Phrase, int]:
    ends, steps = _walk(cluster, last)
    j, n = np.nonzero(steps)
    ids = cluster.ids[ends[j, n] - 1, cluster.longest - steps[j, n], n]
    counts = np.bincount(ids, cluster.times[n])
    return {cluster.phrase(int(cluster.codes[i])): int(counts[i]) for i in np.flatnonzero(counts)}


def _costs(cluster: Cluster, costs: NDArray[np.int32]) -> dict[Phrase, int]:
    return {(): 0} | {s: int(c) for s, c in zip(cluster.sequences, costs, strict=True)}
