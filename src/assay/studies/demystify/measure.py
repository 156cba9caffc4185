"""What the study measures: exact probabilities of a string, exact entropies, and shares of sampled answers.

The target's probability is computed, not sampled: the product of the policy's own probabilities of its characters and of the
end token, each given those before (teacher forcing). It is that of the one token string; an answer with a doubled space says
the same sentence and counts as a hit, so rates of hits can be slightly higher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from assay.build import Bench
from assay.envs.inline import Inline
from assay.envs.pairs import Problem, boxed, milestone_reward, milestones
from assay.envs.quote import extract, similarity
from assay.model import Network, causal
from assay.protocols import Sampling
from assay.rollout import Driver, Job
from assay.studies.demystify.corpus import Piece
from assay.studies.demystify.policies import ANSWER, answer_ids, prompt_ids
from assay.studies.demystify.tasks import TaskName
from assay.trace import Trace

PANEL_SEED = 20_26  # of the samples that measure: not the cell's, so that cells are measured with the same luck


# ---------------------------------------------------------------------------------------------------- pure functions


def hit_probability(p: float, n: int) -> float:
    """Of at least one hit among n independent samples, 1 - (1 - p)^n; exact for tiny p."""
    if not 0 <= p <= 1 or n < 0:
        raise ValueError(f"a probability is in [0, 1] and a number of samples at least 0, not {p} and {n}")
    return 1.0 if p == 1 and n else -math.expm1(n * math.log1p(-p)) if n else 0.0


def entropy(logits: ArrayLike, temperature: float = 1.0) -> NDArray[np.float64]:
    """Eq. (6)'s H_t of each row of logits [..., V] at a temperature, nats; an entry of -inf counts as 0 log 0 = 0."""
    scaled = np.asarray(logits, np.float64) / temperature
    scaled = scaled - scaled.max(-1, keepdims=True)
    weights = np.exp(scaled)
    total = weights.sum(-1, keepdims=True)
    p = weights / total
    logp = np.where(p > 0, scaled, 0.0) - np.log(total)
    found: NDArray[np.float64] = -(p * logp).sum(-1)
    return found


def mean_entropy(entropies: Sequence[ArrayLike]) -> float:
    """Eq. (6): the mean over sequences of the mean over each one's own steps, its end token's included and nothing after
    it. NaN if there is no sequence with a step."""
    means = [float(np.mean(np.asarray(own, np.float64))) for own in entropies if len(np.asarray(own))]
    return float(np.mean(means)) if means else math.nan


def tilted(reference: ArrayLike, rewards: ArrayLike, c: float) -> NDArray[np.float64]:
    """The maximiser of eq. (1) on a bandit, pi* ~ pi_ref exp(r / c); [A] each."""
    p, r = np.asarray(reference, np.float64), np.asarray(rewards, np.float64)
    weights = p * np.exp((r - r.max()) / c)
    found: NDArray[np.float64] = weights / weights.sum()
    return found


# ------------------------------------------------------------------------------------------------------- the policy


@torch.no_grad()
def answer_logits(network: Network, prompt: NDArray[Any], answer: NDArray[Any]) -> Tensor:
    """fp32 [A, V]: the logits from which each token of the answer would have been drawn."""
    ids = torch.from_numpy(np.concatenate([prompt, answer[:-1]]).astype(np.int64))
    hidden = network.hidden(ids, torch.arange(len(ids)), causal)
    return network.logits(hidden[len(prompt) - 1 :])


def log_probability(
    network: Network, prompt: str, answer: str, temperature: float = 1.0, task: TaskName = "quote"
) -> float:
    """Natural log of the probability of the answer and its end token."""
    ids = answer_ids(answer, task)
    logits = answer_logits(network, prompt_ids(prompt, task), ids).double() / temperature
    return float(logits.log_softmax(-1).gather(-1, torch.from_numpy(ids.astype(np.int64))[:, None]).sum())


def reading(network: Network, pieces: Sequence[Piece], task: TaskName = "quote") -> dict[str, float]:
    """Teacher-forced on given text: `nats` -log p and `accuracy` share of right first guesses, per token."""
    nats, right, count = 0.0, 0, 0
    for piece in pieces:
        ids = torch.from_numpy(answer_ids(piece.line, task).astype(np.int64))
        logits = answer_logits(network, prompt_ids(piece.opening, task), ids.numpy())
        nats -= float(logits.log_softmax(-1).gather(-1, ids[:, None]).sum())
        right += int((logits.argmax(-1) == ids).sum())
        count += len(ids)
    return {"nats": nats / count, "accuracy": right / count}


@dataclass(frozen=True, slots=True)
class Heard:
    """Shares of n sampled answers. An answer that never ended, or is blank, is no quote at all: a parse failure, apart
    from wrong answers."""

    samples: int
    exact: float
    substring: float
    unparsed: float
    wrong: float
    similarity: float  # mean of eq. (3)
    entropy: float  # eq. (6), nats per step
    length: float  # mean tokens

    def as_json(self) -> dict[str, float | None]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Solved:
    """Shares of n sampled solutions of a problem of `pairs`. `exact`: the right number in the box, by whatever way."""

    samples: int
    exact: float
    twice: float  # boxed the answer with the origin counted twice
    unparsed: float  # no box
    factors: float  # both factors right (m2)
    derived: float  # the right number and every milestone before it
    milestones: float  # mean reward, eq. (4)
    entropy: float  # eq. (6), nats per step
    length: float  # mean tokens

    def as_json(self) -> dict[str, float | None]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def solved(traces: Sequence[Trace], problem: Problem) -> Solved:
    """What the solutions come to. ValueError: none."""
    texts = [trace.turns[0].action for trace in traces]
    boxes, reached = [boxed(text) for text in texts], [milestones(text, problem) for text in texts]
    right = [box == str(problem.answer) for box in boxes]
    return Solved(
        len(texts),
        float(np.mean(right)),
        float(np.mean([box == str(problem.answer + 1) for box in boxes])),
        float(np.mean([not box for box in boxes])),
        float(np.mean([marks[1] for marks in reached])),
        float(np.mean([hit and all(marks) for hit, marks in zip(right, reached, strict=True)])),
        float(np.mean([milestone_reward(m, b, problem.answer) for m, b in zip(reached, boxes, strict=True)])),
        mean_entropy([trace.turns[0].entropies for trace in traces]),
        float(np.mean([len(trace.turns[0].ids) for trace in traces])),
    )


def hear(traces: Sequence[Trace], target: str) -> Heard:
    """What the answers come to. UserError, ValueError: none."""
    ended = [trace.turns[0].stop == "stop" for trace in traces]
    said = [extract(trace.turns[0].action, "") for trace in traces]
    exact = [text == target for text in said]
    unparsed = [not (end and text) and not hit for end, text, hit in zip(ended, said, exact, strict=True)]
    wrong = [not hit and not bad for hit, bad in zip(exact, unparsed, strict=True)]
    return Heard(
        len(traces),
        float(np.mean(exact)),
        float(np.mean([target in text for text in said])),
        float(np.mean(unparsed)),
        float(np.mean(wrong)),
        float(np.mean([similarity(text, target) for text in said])),
        mean_entropy([trace.turns[0].entropies for trace in traces]),
        float(np.mean([len(trace.turns[0].ids) for trace in traces])),
    )


def sample(
    bench: Bench, settings: dict[str, Any], prompts: int, number: int, temperature: float, env: str = "quote"
) -> list[Trace]:
    """`number` answers to the first `prompts` prompts of the environment with these settings, each in turn. The same draws
    for every policy."""
    with Inline(env, settings) as pool:
        driver = Driver(
            bench.sampler,
            pool,
            bench.renderer,
            Sampling(temperature, ANSWER, bench.renderer.stop_ids),
            seed=PANEL_SEED,
            layout=bench.layout,
            max_episode_tokens=bench.config.max_episode_tokens,
        )
        jobs = [Job(i % prompts, "train", slot=i % prompts, rollout=i // prompts) for i in range(number)]
        return driver.collect(jobs, bench.sampler.version)
