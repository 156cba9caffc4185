"""What the tiny study measures, against numbers by hand or brute force."""

import itertools
import math

import numpy as np
import pytest
import torch

from assay.advantages import all_equal, grpo
from assay.envs.pairs import Problem
from assay.model import Network, check_exact
from assay.studies.demystify.corpus import Piece
from assay.studies.demystify.measure import (
    answer_logits,
    entropy,
    hear,
    hit_probability,
    log_probability,
    mean_entropy,
    reading,
    solved,
    tilted,
)
from assay.studies.demystify.policies import answer_ids, build_model, prompt_ids
from assay.trace import Outcome, Provenance, TaskKey, Trace, Turn

NO_INTS = np.zeros(0, np.int32)


def test_p07_hits_among_n_are_one_minus_the_misses() -> None:
    assert hit_probability(0.5, 1) == 0.5
    assert hit_probability(0.5, 3) == pytest.approx(7 / 8)
    assert hit_probability(0.0, 10**6) == 0 and hit_probability(1.0, 1) == 1 and hit_probability(0.3, 0) == 0
    misses = [p for p in itertools.product((0, 1), repeat=4) if not any(p)]
    assert hit_probability(0.25, 4) == pytest.approx(1 - 0.75**4) and len(misses) == 1
    assert hit_probability(1e-18, 4096) == pytest.approx(4096e-18, rel=1e-9, abs=0)  # 1 - (1 - p)^N is 0 in floats
    assert pytest.approx(12.7, abs=0.01) == 4096 * 0.0031  # the paper's case: a dozen hits are to be expected
    assert hit_probability(0.0031, 4096) == pytest.approx(1 - math.exp(4096 * math.log(0.9969)))


@pytest.mark.parametrize(("p", "n"), [(-0.1, 1), (1.1, 1), (0.5, -1)])
def test_a_probability_out_of_range_is_refused(p: float, n: int) -> None:
    with pytest.raises(ValueError, match="a probability is in"):
        hit_probability(p, n)


def test_p07_without_support_a_sparse_reward_gives_zero_advantages_forever() -> None:
    """A policy whose support lacks the target: every group is all zero, so nothing ever moves."""
    logits = np.array([0.0, 1.0, -np.inf])  # arm 2 is the target
    draw = np.random.default_rng(0)
    for _ in range(50):
        p = np.exp(logits) / np.exp(logits).sum()
        arms = draw.choice(3, 32, p=p)
        advantage = grpo((arms == 2).astype(float))
        assert not advantage.any()
        finite = np.where(np.isfinite(logits), logits, 0.0)
        gradient = sum(a * (np.eye(3)[arm] - p) for a, arm in zip(advantage, arms, strict=True))
        logits = np.where(np.isfinite(logits), finite + gradient, -np.inf)
    assert logits.tolist() == [0.0, 1.0, -np.inf]


@pytest.mark.parametrize("ones", range(17))
def test_p09_group_normalisation_is_unbiased_and_sums_to_zero(ones: int) -> None:
    rewards = np.array([1.0] * ones + [0.0] * (16 - ones))
    advantage = grpo(rewards, epsilon=1e-9)
    if ones in (0, 16):
        assert all_equal(rewards) and not advantage.any()
        return
    mean = ones / 16
    std = math.sqrt((ones * (1 - mean) ** 2 + (16 - ones) * mean**2) / 15)  # 15: unbiased
    assert advantage[0] == pytest.approx((1 - mean) / (std + 1e-9), rel=1e-12)
    assert advantage[-1] == pytest.approx(-mean / (std + 1e-9), rel=1e-12)
    assert advantage[0] * ones + advantage[-1] * (16 - ones) == pytest.approx(0, abs=1e-12)


def test_p10_entropy_of_uniform_one_hot_shifted_and_heated_logits() -> None:
    assert entropy(np.zeros(7)) == pytest.approx(math.log(7), abs=1e-15)
    assert entropy(np.array([0.0, -np.inf, -np.inf])) == 0.0
    logits = np.array([0.3, -1.2, 2.0, 0.0])
    p = [math.exp(x) / sum(map(math.exp, logits)) for x in logits]
    assert entropy(logits) == pytest.approx(-sum(q * math.log(q) for q in p), abs=1e-12)
    assert entropy(logits + 1234.5) == pytest.approx(entropy(logits), abs=1e-9)
    heats = [float(entropy(logits, t)) for t in (0.25, 0.5, 1.0, 1.5, 4.0)]
    assert heats == sorted(heats) and len(set(heats)) == 5
    some = np.array([2.0, 2.0, -np.inf])  # all finite logits equal: the temperature changes nothing
    assert entropy(some, 3.0) == pytest.approx(math.log(2)) == entropy(some)
    assert entropy(np.stack([logits, np.zeros(4)])).shape == (2,)


def test_eq6_is_a_mean_of_means_not_a_mean_over_tokens() -> None:
    assert mean_entropy([[1.0], [0.0, 0.0, 0.0]]) == 0.5
    assert math.isnan(mean_entropy([])) and math.isnan(mean_entropy([[]]))


def test_p11_the_optimum_of_eq_1_is_the_tilted_reference_and_ascent_finds_it() -> None:
    reference, rewards, c = np.array([0.6, 0.3, 0.1]), np.array([0.0, 1.0, 0.5]), 0.7
    optimum = tilted(reference, rewards, c)
    unnormalised = [0.6, 0.3 * math.exp(1 / 0.7), 0.1 * math.exp(0.5 / 0.7)]
    assert optimum == pytest.approx(np.array(unnormalised) / sum(unnormalised), abs=1e-12)

    def utility(p: np.ndarray) -> float:
        return float(p @ (rewards / c) - p @ np.log(p / reference))

    grid = [np.array([a, b, 1 - a - b]) for a in np.arange(0.01, 1, 0.01) for b in np.arange(0.01, 1 - a - 1e-9, 0.01)]
    grid = [p for p in grid if p[2] > 1e-6]
    assert max(map(utility, grid)) <= utility(optimum)
    logits = np.log(reference)  # exact policy gradient of r - c KL
    for _ in range(4000):
        p = np.exp(logits) / np.exp(logits).sum()
        score = rewards - c * np.log(p / reference)
        logits = logits + 0.3 * p * (score - p @ score)
    assert np.exp(logits) / np.exp(logits).sum() == pytest.approx(optimum, abs=1e-4)


@pytest.fixture(scope="module")
def network() -> Network:
    made = Network(build_model("24k", 3))
    check_exact(made)
    return made


def test_exact_probability_is_the_product_over_the_models_own_distributions(network: Network) -> None:
    ids, prompt = answer_ids("abc"), prompt_ids("say it")
    assert len(ids) == 4  # the end token is part of it
    total, total_cold = 0.0, 0.0
    context = [int(i) for i in prompt]
    for token in ids:
        with torch.no_grad():
            logits = network.model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1].double()
        total += float(logits.log_softmax(-1)[int(token)])
        total_cold += float((logits / 0.4).log_softmax(-1)[int(token)])
        context.append(int(token))
    assert log_probability(network, "say it", "abc") == pytest.approx(total, abs=1e-4)
    assert log_probability(network, "say it", "abc", 0.4) == pytest.approx(total_cold, abs=1e-4)


def test_probabilities_of_all_next_tokens_sum_to_one(network: Network) -> None:
    prompt, answer = prompt_ids("say it"), answer_ids("ab")
    p = answer_logits(network, prompt, answer).softmax(-1)
    assert p.shape == (3, network.vocabulary) and torch.allclose(p.sum(-1), torch.ones(3))


def test_reading_counts_every_token_once(network: Network) -> None:
    pieces = [Piece("say it", "ab"), Piece("say it", "abcdef")]
    parts = [log_probability(network, p.opening, p.line) for p in pieces]
    found = reading(network, pieces)
    assert found["nats"] == pytest.approx(-sum(parts) / (3 + 7), abs=1e-4)
    assert 0 <= found["accuracy"] <= 1


def trace(action: str, stop: str = "stop", entropies: tuple[float, ...] = (1.0,)) -> Trace:
    n = len(entropies)
    heat = np.array(entropies, np.float32)
    turn = Turn(
        NO_INTS, np.zeros(0, np.uint8), np.zeros(n, np.int32), np.full(n, Provenance.SAMPLED, np.uint8), heat, heat,
        NO_INTS, "", action, 0.0, True, "", "other", False, 0, stop,
    )  # fmt: skip
    key = TaskKey("quote", "1", "train", 0, "")
    return Trace(key, 0, 0, 0, 0, NO_INTS, np.zeros(0, np.uint8), (turn,), "", 0.0, Outcome.FAILURE, 1.0)


def test_parse_failures_are_counted_apart_from_wrong_answers() -> None:
    said = [
        trace("ab cd"),
        trace("ab cd", "length"),
        trace("xx ab cd"),
        trace("never ends", "length"),
        trace(""),
        trace("zz"),
    ]
    found = hear(said, "ab cd")
    assert found.samples == 6
    assert found.exact == pytest.approx(2 / 6)  # a hit that ran into the limit is a hit all the same
    assert found.substring == pytest.approx(3 / 6)
    assert found.unparsed == pytest.approx(2 / 6)  # one that never ended, one that is blank
    assert found.wrong == pytest.approx(2 / 6)
    assert found.similarity == pytest.approx((1 + 1 + 5 / 8 + sum(_close(t) for t in ("never ends", "zz"))) / 6)


def _close(text: str) -> float:
    """By the recursion's definition, not the library's rows."""

    def distance(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        if a[-1] == b[-1]:
            return distance(a[:-1], b[:-1])
        return 1 + min(distance(a[:-1], b), distance(a, b[:-1]), distance(a[:-1], b[:-1]))

    return 1 - distance(text, "ab cd") / max(len(text), 5)


def test_what_is_not_known_is_null_in_a_result() -> None:
    assert hear([trace("a", entropies=())], "ab").as_json()["entropy"] is None


def test_solutions_are_counted_by_hand() -> None:
    """12x^2 - xy - 6y^2 = 0 in -100..100: factors 3 2 and 4 3, bounds 33 and 25, 67 and 51 points, answer 117."""
    found = solved(
        [
            trace("3 2 4 3;33 25;67 51;1;\\boxed{117}"),
            trace("4 -3 3 -2;25 33;51 67;1;\\boxed{118}"),  # both factors in the other order; the origin twice
            trace("1 1 1 1;\\boxed{117}"),
            trace("3 2 5 5;33 25"),
        ],
        Problem(),
    )
    assert (found.samples, found.exact, found.twice, found.unparsed) == (4, 0.5, 0.25, 0.25)
    assert (found.factors, found.derived) == (0.5, 0.25)
    assert found.milestones == pytest.approx((1 + 0.6 + 1 + 0) / 4)  # .05 + .1 - .5 for the last: not below 0
