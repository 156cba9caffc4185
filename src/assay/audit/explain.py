"""What each check teaches: the pages of `assay audit --explain CODE` and of docs/audit.md."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from assay.audit.texts_credit import CREDIT
from assay.audit.texts_rest import REST
from assay.audit.texts_tokens import TOKENS

TEXTS: dict[str, dict[str, str]] = {**TOKENS, **CREDIT, **REST}
WIDTH = 120
PARTS = {  # part of a text -> its heading
    "why": "Why it costs months",
    "example": "Example",
    "by_hand": "By hand",
    "mend": "Mend",
    "reported": "Reported",
}
THEMES = {
    "A1": "Tokens and masks",
    "A2": "Log-probs and ratios",
    "A3": "Groups and advantages",
    "A4": "Rewards and outcomes",
    "A5": "Prompts, tasks, templates",
    "A6": "Numbers and weights",
}
HEAD = """# What `assay audit` looks for

`assay audit PATH` reads rollouts of any framework into columns and runs the checks below on the columns that are there.
An **error** is certainly wrong and makes the command end with 1, a **warning** is probably wrong, a **note** is worth
knowing. A check that lacks a column is named as not run. `--declare.NAME VALUE` says what the file does not: estimator,
temperature, top-p, rollouts per task, end ids, vocabulary, reward range, denominator, layout, hints.

This page is made from the texts of `assay audit --explain CODE`.
"""

Line = tuple[str, str, str, str, Sequence[str]]  # code, name, line, severity, needs


def render(code: str, name: str, line: str, severity: str, needs: Sequence[str]) -> str:
    """The text of one check, Markdown that also reads well in a terminal."""
    text = TEXTS[code]
    columns = ", ".join(need.replace("|", " or ") for need in needs)
    parts = [f"**{name}** ({severity}): {line}. Needs {columns}.", text["what"]]
    parts += [f"**{heading}.** {text[key]}" for key, heading in PARTS.items() if key in text]
    return "\n".join([f"### {code}\n", *(_wrapped(part) + "\n" for part in parts)])


def _wrapped(text: str) -> str:
    return fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


def page(lines: Sequence[Line]) -> str:
    """docs/audit.md, whole."""
    parts = [HEAD]
    for theme, title in THEMES.items():
        own = [line for line in lines if line[0].startswith(theme)]
        parts.append(f"## {title}\n")
        parts.append("| code | name | severity | looks for |\n|---|---|---|---|")
        parts[-1] += "".join(
            f"\n| [{c}](#{c.lower()}) | {name} | {severity} | {what} |" for c, name, what, severity, _ in own
        )
        parts[-1] += "\n"
        parts += [render(*line) for line in own]
    return "\n".join(parts)
