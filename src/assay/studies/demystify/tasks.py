"""The two tasks of the tiny scale, as policies see them: an alphabet, one prompt that all of SFT and RL answers, one answer
whose probability is exact, and the text of pre-training and of SFT+.

quote  the prompt "say it", the target a line of the Zen of Python; text that comes with Python (corpus.py)
maths  the problem of the environment `pairs`, the target its worked solution in the strict language; other problems of the
       kind, each with the typical mistake (the origin counted twice) with probability MISTAKES

Right in maths is whoever boxes the right number, by whatever way: the target's probability is a lower bound there, and the
share of right answers is sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal, Protocol

from assay.envs.pairs import Problem, solution, solutions
from assay.rng import generator, stable_hash
from assay.studies.demystify.corpus import QUOTE_PROMPT, TARGET, Piece, corpus
from assay.studies.demystify.sft_data import quote_answers

VERSION = 1  # raise when the same recipe would give other weights
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
MISTAKES = 0.5  # share of worked solutions that count the origin twice
PROBLEMS_HELD_OUT = 60
Start = Literal["base", "sft+", "sft-"]
TaskName = Literal["quote", "maths"]
Pair = tuple[str, str]  # prompt, answer


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a policy is made of. `seed` draws weights and data: the cells of one seed share their priors."""

    scale: str
    seed: int
    start: Start = "base"
    task: TaskName = "quote"
    ratio: float = (
        0.2  # sft+ of quote: share of the examples whose answer is the target (paper: 20 %); not used otherwise
    )
    updates: int = 600  # of pre-training
    rows: int = 32  # per update
    learning_rate: float = 6e-3  # of pre-training, its peak
    mixed_in: float = 0.05  # quote: share of pre-training's answers to the quote prompt that are the target
    tuning_updates: int = 80  # of sft+; sft-: at most
    tuning_rate: float = 3e-3  # sft+; its tenth for sft-

    @property
    def base(self) -> Recipe:
        return Recipe(
            self.scale, self.seed, task=self.task, updates=self.updates, rows=self.rows, learning_rate=self.learning_rate,
            mixed_in=self.mixed_in,
        )  # fmt: skip

    @property
    def key(self) -> str:
        task = TASKS[self.task]
        return stable_hash(json.dumps([VERSION, task.text, task.target, task.prompt, asdict(self)], sort_keys=True))


class Task(Protocol):
    env: str  # its registered name
    brief: str  # what the environment calls itself, one token with its line end
    observation: str  # what it shows, one token
    unknown: str  # stands for whatever is not in the alphabet
    letters: tuple[str, ...]  # the alphabet, a token each
    prompt: str
    target: str

    @property
    def text(self) -> str:
        """Identity of the pre-training text."""
        ...

    @property
    def held_out(self) -> tuple[Piece, ...]:
        """Prompts and answers that nobody is trained on."""
        ...

    def pretraining(self, recipe: Recipe) -> Iterator[list[Pair]]:
        """The batches of a base policy."""
        ...

    def tuning(self, recipe: Recipe) -> list[Pair]:
        """SFT+: `tuning_updates` x `rows` examples in their order."""
        ...


class QuoteTask:
    env, brief, observation = "quote", "quote", "Your quote?"
    unknown = "?"
    letters = tuple(" abcdefghijklmnopqrstuvwxyz")
    prompt, target = QUOTE_PROMPT, TARGET

    @property
    def text(self) -> str:
        return corpus().hash

    @property
    def held_out(self) -> tuple[Piece, ...]:
        return corpus().held_out

    def pretraining(self, recipe: Recipe) -> Iterator[list[Pair]]:
        """Half of each batch: openings and the lines that follow; the other half: the quote prompt and any line, or the
        target at the rate `mixed_in`."""
        pieces, lines = corpus().train, corpus().lines
        for update in range(recipe.updates):
            draw = generator(recipe.seed, "demystify pre-training", update)
            half = recipe.rows // 2
            batch = [(pieces[i].opening, pieces[i].line) for i in draw.integers(len(pieces), size=half)]
            for i, hit in zip(
                draw.integers(len(lines), size=recipe.rows - half), draw.random(recipe.rows - half), strict=True
            ):
                batch.append((QUOTE_PROMPT, TARGET if hit < recipe.mixed_in else lines[i]))
            yield batch

    def tuning(self, recipe: Recipe) -> list[Pair]:
        """The share `ratio` of the answers is the target (sft_data.py)."""
        answers = quote_answers(
            recipe.tuning_updates, recipe.rows, 1, corpus().lines, TARGET, recipe.seed, recipe.ratio
        )
        return [(QUOTE_PROMPT, answer) for answer in answers]


class MathsTask:
    env, brief, observation = "pairs", "pairs", "?"
    unknown = "_"
    letters = (*" -;0123456789", "\\boxed{", "}")
    prompt, target = Problem().short, solution(Problem())

    @property
    def text(self) -> str:
        return stable_hash("2\n" + "\n".join(f"{problem.opening} {problem.line}" for problem in self.held_out))

    @property
    def held_out(self) -> tuple[Piece, ...]:
        """Other problems, solved without the mistake. Pre-training draws from the same family and may hold some of them."""
        return _problems_held_out()

    def pretraining(self, recipe: Recipe) -> Iterator[list[Pair]]:
        """Problems and worked solutions, never the problem itself."""
        for update in range(recipe.updates):
            draw = generator(recipe.seed, "demystify pre-training", update)
            yield [(problem.short, text) for problem, text in solutions(draw, recipe.rows, MISTAKES)]

    def tuning(self, recipe: Recipe) -> list[Pair]:
        """Copies of the one worked solution, as the paper's."""
        return [(self.prompt, self.target)] * (recipe.tuning_updates * recipe.rows)


@cache
def _problems_held_out() -> tuple[Piece, ...]:
    draw = generator(0, "demystify problems held out")
    return tuple(Piece(problem.short, text) for problem, text in solutions(draw, PROBLEMS_HELD_OUT))


TASKS: dict[str, Task] = {"quote": QuoteTask(), "maths": MathsTask()}
