"""Dictionaries of phrases: numbers by hand, and the slow way of phrase_reference.py for everything else."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from phrase_reference import description_length, merges, segmentation

from assay.methods.phrases import Cluster, Code, bound, extract, is_power, segment

D, M, S, T, X = range(5)  # the order of their names
STMD, TSDM = (S, T, M, D), (T, S, D, M)
COSTS = ("bits_sum", "count_sum", "generic")


def found(sequences, symbols, longest=4, cost="bits_sum", beta=1.0, forbid_powers=False):
    return extract(Cluster(sequences, symbols, longest), Code(symbols, longest, cost, beta), forbid_powers)


def least(sequences, phrases, symbols, longest):
    """seg of each sequence in a given dictionary."""
    cluster = Cluster(sequences, symbols, longest)
    last = segment(cluster.prices(phrases))
    return {s: int(last[len(s), n]) // 16 for n, s in enumerate(cluster.sequences)}


def some(rng, longest=20, most=25):
    """(sequences, symbols): made of a few words, with noise."""
    symbols = rng.randint(1, 6)
    words = [tuple(rng.randrange(symbols) for _ in range(rng.randint(1, 5))) for _ in range(3)]
    sequences = []
    for _ in range(rng.randint(0, most)):
        s, length = (), rng.randint(0, longest)
        while len(s) < length:
            s += rng.choice(words) if rng.random() < 0.8 else (rng.randrange(symbols),)
        sequences.append(s)
    return sequences, symbols


@pytest.fixture
def rng():
    return random.Random(7)


# ------------------------------------------------------------------------------------------------ golden numbers


@pytest.mark.parametrize(("symbols", "first"), [(5, 5), (4, 6)])
def test_copies_of_one_sequence_become_phrases_from_the_golden_number_on(symbols, first):
    for n in range(1, first):
        assert found([STMD] * n, symbols).phrases == ()
    for n in range(first, first + 3):
        assert found([STMD] * n, symbols).phrases == ((M, D), (S, T), STMD)


def test_copies_counted_in_symbols_become_phrases_from_three_on():
    for symbols in (4, 5):
        assert [len(found([STMD] * n, symbols, cost="count_sum").phrases) for n in (1, 2)] == [0, 0]
        assert found([STMD] * 3, symbols, cost="count_sum").phrases[:2] == ((M, D), (S, T))


def test_description_lengths_of_20_copies_are_the_golden_ones():
    golden = [185.7542, 161.7416, 125.5819, 84.5754]
    assert merges([STMD] * 20, 5, 4)[1] == pytest.approx(golden, abs=5e-5)
    assert found([STMD] * 20, 5).total == pytest.approx(golden[-1], abs=5e-5)
    code = Code(5, 4)
    by_hand = [code.total(0, 0, 80, 20), code.total(1, 2, 60, 20), code.total(2, 4, 40, 20), code.total(3, 8, 20, 20)]
    assert by_hand == pytest.approx(golden, abs=5e-5)
    assert by_hand[1] == pytest.approx(2 * math.log2(5) + 2 + 60 * math.log2(6))


def test_an_average_with_weight_one_accepts_no_merge():
    assert found([STMD] * 500, 5, cost="generic", beta=1.0).phrases == ()
    assert found([STMD] * 500, 5, cost="generic", beta=1 / 500).phrases == found([STMD] * 500, 5).phrases


def test_equally_cheap_segmentations_end_with_the_shortest_phrase():
    s = (0, 1, 0, 1)  # three phrases as 0 10 1 and as 01 0 1 and as 0 1 01, and two as 01 01
    cluster = Cluster([s], 2, 2)
    last = segment(cluster.prices([(0, 1), (1, 0)]))[:, 0]
    assert [int(x) // 16 for x in last] == [0, 1, 1, 2, 2]
    assert [int(x) % 16 for x in last] == [0, 1, 2, 1, 2]  # 010 ends with 0, though 0 10 costs as much as 01 0
    assert segmentation(s[:3], {(0,), (1,), (0, 1), (1, 0)}, 2) == [(0, 1), (0,)]


# ------------------------------------------------------------------------------------------- numbered properties


def test_p01_without_phrases_a_sequence_costs_its_length(rng):
    sequences, symbols = some(rng)
    assert least(sequences, (), symbols, 4) == {s: len(s) for s in sequences if s}
    assert found(sequences, symbols, longest=1).cost == {s: len(s) for s in sequences} | {(): 0}


def test_p02_cost_lies_between_length_over_longest_and_length(rng):
    for _ in range(60):
        sequences, symbols = some(rng)
        longest = rng.randint(1, 5)
        for s, cost in found(sequences, symbols, longest, rng.choice(COSTS), 0.01).cost.items():
            assert math.ceil(len(s) / longest) <= cost <= len(s)


def compositions(n):
    for cuts in itertools.product((False, True), repeat=max(n - 1, 0)):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [n]
        yield list(zip([0, *ends[:-1]], ends, strict=True))


def test_p03_segmentation_is_as_short_as_the_shortest_of_all(rng):
    for _ in range(150):
        symbols, longest = rng.randint(1, 3), rng.randint(1, 4)
        s = tuple(rng.randrange(symbols) for _ in range(rng.randint(1, 9)))
        phrases = {tuple(rng.randrange(symbols) for _ in range(rng.randint(1, longest))) for _ in range(5)}
        whole = phrases | {(a,) for a in range(symbols)}
        brute = min(len(c) for c in compositions(len(s)) if all(s[i:j] in whole for i, j in c))
        assert least([s], phrases, symbols, longest)[s] == brute == len(segmentation(s, whole, longest))


def test_p04_more_phrases_never_cost_more(rng):
    for _ in range(60):
        sequences, symbols = some(rng)
        phrases, costs = [], least(sequences, (), symbols, 4)
        for _ in range(6):
            phrases.append(tuple(rng.randrange(symbols) for _ in range(rng.randint(2, 4))))
            more = least(sequences, phrases, symbols, 4)
            assert all(more[s] <= costs[s] for s in costs)
            costs = more


def test_p05_two_sequences_in_a_row_cost_at_most_both(rng):
    for _ in range(60):
        symbols = rng.randint(1, 4)
        u, v = (tuple(rng.randrange(symbols) for _ in range(rng.randint(1, 12))) for _ in range(2))
        phrases = [tuple(rng.randrange(symbols) for _ in range(rng.randint(2, 4))) for _ in range(5)]
        costs = least([u, v, u + v], phrases, symbols, 4)
        assert costs[u + v] <= costs[u] + costs[v]


def test_p06_each_merge_shortens_the_code_and_at_the_end_none_would(rng):
    for _ in range(12):
        sequences, symbols = some(rng, longest=12, most=12)
        for cost, beta in (("bits_sum", 1.0), ("count_sum", 1.0), ("generic", 0.02)):
            result = found(sequences, symbols, 4, cost, beta)
            dictionary = {(a,) for a in range(symbols)}
            lengths = [description_length(sequences, dictionary, symbols, 4, cost, beta)]
            for phrase in result.phrases:
                dictionary |= {phrase}
                lengths.append(description_length(sequences, dictionary, symbols, 4, cost, beta))
            assert all(b < a for a, b in itertools.pairwise(lengths))
            assert result.total == lengths[-1]
            for s in sequences:
                for a, b in itertools.pairwise(segmentation(s, dictionary, 4)):
                    if len(a + b) <= 4:
                        assert (
                            description_length(sequences, dictionary | {a + b}, symbols, 4, cost, beta) >= lengths[-1]
                        )


def test_p07_single_symbols_always_spell_and_no_phrase_is_too_long(rng):
    for _ in range(60):
        sequences, symbols = some(rng)
        longest = rng.randint(1, 5)
        result = found(sequences, symbols, longest, "count_sum")
        assert all(2 <= len(p) <= longest for p in result.phrases)
        assert len(set(result.phrases)) == len(result.phrases)
    rare = found([STMD] * 20 + [(X,)], 5)
    assert rare.cost[(X,)] == 1 and rare.uses[(X,)] == 1


def test_p08_the_order_of_sequences_changes_nothing(rng):
    for _ in range(40):
        sequences, symbols = some(rng)
        first = found(sequences, symbols)
        rng.shuffle(sequences)
        again = found(sequences, symbols)
        assert first.phrases == again.phrases and first.uses == again.uses
        assert first.cost == again.cost and first.total == again.total


def test_p11_equal_length_and_different_structure_have_different_prices():
    result = found([STMD] * 20 + [TSDM], 5)
    assert result.phrases == ((M, D), (S, T), STMD)
    assert result.cost == {STMD: 1, TSDM: 4, (): 0}


def test_p13_nothing_gives_the_alphabet():
    for nothing in ([], [()], [(), ()]):
        result = found(nothing, 5)
        assert (result.phrases, result.uses, result.cost) == ((), {}, {(): 0})


def test_p14_more_copies_never_undo_a_merge_that_paid(rng):
    paid = 0
    for _ in range(12):
        sequences, symbols = some(rng, longest=10, most=8)
        plain = {(a,) for a in range(symbols)}
        grams = {s[i : i + n] for s in sequences for n in (2, 3, 4) for i in range(len(s) - n + 1)}
        for phrase in sorted(grams):
            gains = [
                description_length(sequences * k, plain, symbols, 4, "count_sum")
                - description_length(sequences * k, plain | {phrase}, symbols, 4, "count_sum")
                for k in (1, 2, 5)
            ]
            if gains[0] > 0:
                paid += 1
                assert gains[0] < gains[1] < gains[2]
        if found(sequences, symbols, cost="count_sum").phrases:
            assert found(sequences * 3, symbols, cost="count_sum").phrases
    assert paid > 20


def test_p16_the_bound_falls_with_successes_and_with_a_smaller_dictionary():
    nine = Code(5, 4).dictionary(9, 36)
    assert nine == pytest.approx(36 * math.log2(5) + 18)
    assert bound(0.0, nine, 4, 512) == pytest.approx(0.2703, abs=5e-5)  # (103.589 ln 2 + ln 20) / 1024, its root
    over_m = [bound(0.3, nine, 4, m) for m in (1, 10, 100, 1000)]
    over_d = [bound(0.3, bits, 4, 100) for bits in (200.0, 100.0, 10.0, 0.0)]
    assert over_m == sorted(over_m, reverse=True) and over_d == sorted(over_d, reverse=True)
    assert len(set(over_m + over_d)) == 8 and min(over_m + over_d) > 0.3


def test_p16_the_code_of_the_bound_is_a_prefix_code():
    for symbols, longest in ((5, 4), (17, 3), (2, 2)):
        code = Code(symbols, longest)
        one = sum(symbols**n * 2 ** -code.dictionary(1, n) for n in range(2, longest + 1))  # all phrases
        end = 2 ** -math.log2(longest)
        assert sum(one**n * end for n in range(400)) == pytest.approx(1.0)  # lists of 0, 1, 2, ... phrases


# -------------------------------------------------------------------------------------------- the slow way agrees


def test_fast_and_slow_extraction_agree_in_every_part(rng):
    for _ in range(100):
        sequences, symbols = some(rng)
        longest, cost, beta = rng.randint(1, 5), rng.choice(COSTS), rng.choice([0.002, 0.05, 1.0])
        powers = rng.random() < 0.3
        slow, lengths = merges(sequences, symbols, longest, cost, beta, is_power if powers else lambda phrase: False)
        fast = found(sequences, symbols, longest, cost, beta, powers)
        assert list(fast.phrases) == slow
        dictionary = {(a,) for a in range(symbols)} | set(slow)
        spelled = {s: segmentation(s, dictionary, longest) for s in sequences}
        assert fast.cost == {s: len(phrases) for s, phrases in spelled.items()} | {(): 0}
        assert fast.uses == Counter(p for s in sequences for p in spelled[s])
        assert fast.total == lengths[-1]


def test_large_alphabets_take_sorted_codes_and_agree(rng):
    sequences = [tuple(rng.choice((3, 50, 199)) for _ in range(12)) for _ in range(20)]
    assert list(found(sequences, 200, 3).phrases) == merges(sequences, 200, 3)[0] != []


def test_loops_compress_unless_powers_are_forbidden():
    loops = [(0,) * 16] * 30
    assert found(loops, 3).cost[(0,) * 16] == 4
    assert found(loops, 3, forbid_powers=True).cost[(0,) * 16] == 16
    assert [is_power(p) for p in ((0, 0), (0, 1, 0, 1), (0, 1, 0), (0,), (0, 0, 0))] == [True, True, False, False, True]


def test_occurrences_count_every_place_in_every_copy():
    cluster = Cluster([(0, 0, 0)] * 3 + [(1, 0, 0)], 2, 2)
    assert cluster.occurrences[cluster.id_of((0, 0))] == 7
    assert cluster.phrase(int(cluster.codes[cluster.id_of((1, 0))])) == (1, 0)
    assert cluster.id_of((1, 1)) == 0
    assert np.all(np.diff(cluster.codes) > 0)
