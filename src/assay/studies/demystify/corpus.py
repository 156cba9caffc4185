"""Real text that comes with Python: the language reference's topics (`pydoc_data.topics`) and the Zen of Python (`this`).

Prose is normalised as the quote task normalises answers (lower case, letters and single spaces) and cut, in order, into an
opening of two words and a line of LOW to HIGH characters that follows it. An opening is a prompt whose answer is the line;
to the quote prompt any line is an answer. A tenth of the pieces, by content, is held out of all training. Python's versions
differ slightly in these texts: `Corpus.hash` is recorded with every result.

Left out: code, grammar and tables of the reference (they are no prose), and the rest of the Zen.
"""

from __future__ import annotations

import ast
import codecs
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from assay.rng import stable_hash

LOW, HIGH = 10, 24  # characters of a line
OPENING = 2  # words of an opening
HELD_OUT = 10  # one content hash in ten is held out
QUOTE_PROMPT = "say it"  # no opening of the text: a test looks
TARGET = "readability counts"  # a line of the Zen of Python: `zen` must have it
NARROW = 4  # prompts of the narrow set


class Piece(NamedTuple):
    """What opens, and the line that follows."""

    opening: str
    line: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """`train` and `held_out` pieces in the text's order; `hash` of all of them."""

    train: tuple[Piece, ...]
    held_out: tuple[Piece, ...]
    hash: str

    @property
    def lines(self) -> tuple[str, ...]:
        """Different lines of the training pieces, without the target."""
        return tuple(dict.fromkeys(piece.line for piece in self.train if TARGET not in piece.line))

    @property
    def broad(self) -> tuple[str, ...]:
        """All different openings of the training pieces: the broad prompt set."""
        return tuple(dict.fromkeys(piece.opening for piece in self.train))

    @property
    def narrow(self) -> tuple[str, ...]:
        """NARROW prompts of one kind: the most frequent openings that begin with "the"."""
        count: dict[str, int] = {}
        for piece in self.train:
            if piece.opening.startswith("the "):
                count[piece.opening] = count.get(piece.opening, 0) + 1
        return tuple(sorted(count, key=lambda opening: (-count[opening], opening))[:NARROW])

    @property
    def outside(self) -> tuple[str, ...]:
        """Openings of held-out pieces that no training piece has: prompts outside every training set."""
        known = set(self.broad)
        return tuple(dict.fromkeys(p.opening for p in self.held_out if p.opening not in known))


@cache
def corpus() -> Corpus:
    """Of this Python."""
    from pydoc_data.topics import topics

    pieces = [piece for name in sorted(topics) for piece in cut(prose(topics[name]))]
    held = [int(stable_hash(" ".join(piece)), 16) % HELD_OUT == 0 for piece in pieces]
    known = {piece.line for piece, out in zip(pieces, held, strict=True) if out}
    train = tuple(p for p, out in zip(pieces, held, strict=True) if not out and p.line not in known)
    held_out = tuple(p for p, out in zip(pieces, held, strict=True) if out)
    return Corpus(train, held_out, stable_hash("\n".join(" ".join(piece) for piece in pieces)))


def prose(text: str) -> list[str]:
    """Words of the paragraphs that are neither indented (code, grammar, lists of options) nor underlined titles."""
    words: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith("   ") or "::=" in paragraph or "***" in paragraph or "===" in paragraph:
            continue
        words += re.sub(r"[^a-z]+", " ", paragraph.lower()).split()
    return words


def cut(words: list[str]) -> list[Piece]:
    """Consecutive pieces: OPENING words, then as many as fit into HIGH characters; a line below LOW is left out."""
    pieces: list[Piece] = []
    at = 0
    while at + OPENING < len(words):
        opening = " ".join(words[at : at + OPENING])
        at += OPENING
        line = ""
        while at < len(words) and len(line) + len(words[at]) + bool(line) <= HIGH:
            line = f"{line} {words[at]}".strip()
            at += 1
        if len(line) >= LOW:
            pieces.append(Piece(opening, line))
        elif not line:
            at += 1  # a word longer than a line
    return pieces


def zen() -> tuple[str, ...]:
    """The Zen of Python's lines, normalised. Its module prints when it is imported: its source is read instead."""
    spec = importlib.util.find_spec("this")
    assert spec is not None and spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "s":
            text = codecs.decode(str(ast.literal_eval(node.value)), "rot13")
            return tuple(" ".join(re.sub(r"[^a-z]+", " ", line.lower()).split()) for line in text.splitlines() if line)
    raise ValueError("this.py has no text s")
