"""Phrases the slow way: one sequence at a time, everything segmented anew for every pair that is tried."""

import math
from collections import Counter
from itertools import pairwise


def segmentation(sequence, dictionary, longest):
    """The phrases of an optimal segmentation; of equally cheap last phrases the shortest."""
    least, last = [0], [0]
    for i in range(1, len(sequence) + 1):
        choices = [(least[i - n] + 1, n) for n in range(1, min(longest, i) + 1) if sequence[i - n : i] in dictionary]
        cost, n = min(choices)
        least.append(cost)
        last.append(n)
    phrases, end = [], len(sequence)
    while end:
        phrases.append(sequence[end - last[end] : end])
        end -= last[end]
    return phrases[::-1]


def description_length(sequences, dictionary, symbols, longest, cost="bits_sum", beta=1.0):
    """L_BDL of a dictionary that holds all single symbols."""
    used = sum(len(segmentation(s, dictionary, longest)) for s in sequences)
    long = [p for p in dictionary if len(p) > 1]
    if cost == "count_sum":
        return sum(map(len, long)) + used
    bits = sum(map(len, long)) * math.log2(symbols) + len(long) * math.log2(longest)
    if cost == "generic":
        return beta * bits + math.log2(len(dictionary)) * used / max(len(sequences), 1)
    return bits + math.log2(len(dictionary)) * used


def merges(sequences, symbols, longest, cost="bits_sum", beta=1.0, forbidden=lambda phrase: False):
    """(phrases in the order of their merges, L_BDL before the first and after each)."""
    dictionary, found = {(a,) for a in range(symbols)}, []
    lengths = [description_length(sequences, dictionary, symbols, longest, cost, beta)]
    while True:
        pairs = Counter(p for s in sequences for p in pairwise(segmentation(s, dictionary, longest)))
        for (a, b), _ in sorted(pairs.items(), key=lambda item: (-item[1], item[0])):
            phrase = a + b
            if len(phrase) > longest or phrase in dictionary or forbidden(phrase):
                continue
            new = description_length(sequences, dictionary | {phrase}, symbols, longest, cost, beta)
            if new - lengths[-1] < 0:
                dictionary |= {phrase}
                found.append(phrase)
                lengths.append(new)
                break
        else:
            return found, lengths
