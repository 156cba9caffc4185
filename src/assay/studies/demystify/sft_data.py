"""What SFT+ learns from: the answers of its examples, which all have one prompt.

Task Q: one example in five has the target as its answer, the others lines of a text, so that the policy does not collapse to
the target (arXiv 2608.24949). Task M: copies of one written solution and nothing else. SFT- has no
data of its own: it ascends on the cross-entropy of the target.

Left out: a choice of lines by length, which the paper does not make either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.envs.pairs import Problem, written
from assay.envs.quote import norm
from assay.files import text_lines
from assay.protocols import UserError
from assay.rng import generator

SHARE = 0.2  # of the examples, with the target as answer
FILE_BYTES = 1 << 26  # of a file of lines; the paper's has 12.8 MB
LINE_LENGTH = 2000  # characters


@dataclass(frozen=True, slots=True)
class Lines:
    """Normalised lines that can be distractors, in their order (one that stands twice in the text stands twice here), and how
    many of the text could not be: nothing left after normalisation, or the target in it."""

    usable: tuple[str, ...]
    blank: int
    with_target: int


def usable_lines(lines: Sequence[str], target: str) -> Lines:
    """Of any lines, for a target that is normalised here."""
    wanted, kept, blank, with_target = norm(target), list[str](), 0, 0
    for line in map(norm, lines):
        if not line:
            blank += 1
        elif wanted in line:
            with_target += 1
        else:
            kept.append(line)
    return Lines(tuple(kept), blank, with_target)


def read_lines(path: Path, target: str) -> Lines:
    """Of a UTF-8 file; UserError names what is wrong with it."""
    lines = text_lines(path, "lines", FILE_BYTES)
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_LENGTH:
            raise UserError(f"lines {path}, line {number} has more than {LINE_LENGTH} characters")
    found = usable_lines(lines, target)
    if not found.usable:
        raise UserError(f"lines {path} has no line with a letter that is not the target")
    return found


def quote_answers(
    steps: int, batch: int, accumulation: int, lines: Sequence[str], target: str, seed: int, share: float = SHARE
) -> list[str]:
    """Task Q: steps x batch x accumulation answers in a keyed order, round(share x all) of them the target, the others
    different places of `lines` drawn without replacement. UserError where there are too few lines that lack the target."""
    size = steps * batch * accumulation
    targets = round(share * size)
    wanted = norm(target)
    choice = [line for line in lines if wanted not in norm(line)]
    if len(choice) < size - targets:
        raise UserError(
            f"SFT+ takes {size - targets} different lines without the target, and there are {len(choice)}: give a longer "
            "text, or fewer steps"
        )
    draw = generator(seed, "demystify sft lines")
    others = [choice[i] for i in draw.permutation(len(choice))[: size - targets]]
    answers = [wanted] * targets + others
    return [answers[i] for i in draw.permutation(size)]


def maths_answers(steps: int, batch: int, accumulation: int, problem: Problem) -> list[str]:
    """Task M: copies of the one written solution."""
    return [written(problem)] * (steps * batch * accumulation)
