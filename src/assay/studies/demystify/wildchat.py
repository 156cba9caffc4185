"""A broad prompt set from real conversations: the first user message of each WildChat row that may be used.

The prompt distributions of arXiv 2608.24949: English only; nothing toxic, nothing redacted; the first turn must be a user
message that is not empty, and it alone is the prompt. Rows come as JSON Lines, fields as the data set names them
(`language`, `toxic`, `redacted`, `conversation` with `role` and `content`); the file is a stranger's, so it is bounded, and
every row that is left out is counted with its reason.

Left out: fetching the data set, and its other formats (export it to JSON Lines).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.protocols import UserError

ROW_BYTES = 1 << 22  # of one line: the longest conversations have some hundred kilobytes
ROWS = 5_000_000  # of a file; the data set has 1 million (4.8 million in its largest edition)
PROMPT_LENGTH = 20_000  # characters; what the quote environment takes from a file of prompts


@dataclass(frozen=True, slots=True)
class Prompts:
    """`kept` prompts in the file's order; `dropped`: how many rows for which reason."""

    kept: tuple[str, ...]
    dropped: dict[str, int]


def keep(row: Any) -> tuple[str | None, str]:
    """(prompt, "") of a row that may be used, else (None, why not). A row that lacks a mark is not taken for unmarked."""
    if not isinstance(row, dict):
        return None, "no object"
    if row.get("language") != "English":
        return None, "not English"
    for mark in ("toxic", "redacted"):
        if row.get(mark) is not False:
            return None, mark if row.get(mark) is True else f"no mark {mark!r}"
    turns = row.get("conversation")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return None, "no conversation"
    if turns[0].get("role") != "user":
        return None, "first turn not the user's"
    text = turns[0].get("content")
    if not isinstance(text, str) or not text.strip():
        return None, "first turn empty"
    for mark in ("toxic", "redacted"):  # turns may carry marks of their own
        if turns[0].get(mark) not in (None, False):
            return None, mark
    if len(text) > PROMPT_LENGTH:
        return None, "first turn too long"
    return text.strip(), ""


def prompts(path: Path, most: int = 0) -> Prompts:
    """The prompts of a JSON Lines file, of its first `most` usable rows (0: of all). UserError names the line of what is no
    JSON, and a file without a usable row."""
    kept: list[str] = []
    dropped: Counter[str] = Counter()
    for row in _rows(path):
        prompt, reason = keep(row)
        if prompt is None:
            dropped[reason] += 1
            continue
        kept.append(prompt)
        if len(kept) == most:
            break
    if not kept:
        raise UserError(f"{path} has no usable row; left out: {_said(dropped)}")
    return Prompts(tuple(kept), dict(dropped))


def _rows(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as file:
            for number in range(1, ROWS + 2):
                line = file.readline(ROW_BYTES + 1)
                if not line:
                    return
                if number > ROWS:
                    raise UserError(f"{path} has more than {ROWS} lines: give fewer")
                if len(line) > ROW_BYTES:
                    raise UserError(f"{path}, line {number} has more than {ROW_BYTES} bytes")
                if line.strip():
                    yield _parsed(line, path, number)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _parsed(line: bytes, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UserError(f"{path}, line {number} is not JSON ({error})") from error


def _said(dropped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "nothing, as it is empty"


def write_prompts(found: Prompts, path: Path) -> None:
    """As a file of prompts for the quote environment: one a line, white space inside a prompt made single spaces."""
    path.write_text("".join(" ".join(prompt.split()) + "\n" for prompt in found.kept), "utf-8")
