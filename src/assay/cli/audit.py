"""`assay audit`: rollouts of any framework, read and checked; or one check explained; or all of them listed."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from rich.console import Console
from rich.text import Text

from assay.cli.flags import Help, Line, read, show_help
from assay.cli.tables import console
from assay.config import Section
from assay.protocols import UserError

if TYPE_CHECKING:
    from assay.audit.checks import Report
    from assay.audit.columns import Finding, Rollouts

UNSOUND = 1  # the exit code when there is an error among the findings
PATIENCE = 1.0  # seconds of reading after which a bar is shown
STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}

Integer = Annotated[int, Field(strict=False)]
Number = Annotated[float, Field(strict=False)]


class Declare(Section):
    """What the file does not say. It stands above what the file says."""

    estimator: str | None = None
    """Of the advantages: grpo, dr-grpo, rloo, reinforce++, reinforce++-baseline, gae."""
    temperature: float | None = Field(None, ge=0)
    """At which the tokens were sampled."""
    top_p: float | None = Field(None, gt=0, le=1)
    """With which they were sampled."""
    top_k: int | None = None
    """With which they were sampled."""
    rollouts_per_task: int | None = Field(None, ge=1)
    """Episodes of one group."""
    layout: str | None = None
    """Of our traces: append, or window(K)."""
    denominator: str | None = None
    """Of the loss: token, sequence, turn, episode, group, constant."""
    vocabulary: int | None = Field(None, ge=1)
    """Token ids end below this."""
    end_ids: list[Integer] = Field([])
    """Token ids that end an answer."""
    pad_id: int | None = None
    """Token id of padding."""
    reward_range: list[Number] = Field([], min_length=2, max_length=2)
    """Lowest and highest possible reward."""
    rewards: list[str] = Field([])
    """Reward columns of a TRL table."""
    hints: list[str] = Field([])
    """Strings that must not stand in a prompt."""


class Audit(Section):
    path: str = ""
    """A file, a folder of files, or a run directory."""
    format: str | None = None
    """assay, verifiers, verifiers-v0, verl, trl, skyrl, openai; absent: recognised by what is in the file."""
    codes: list[str] = Field([])
    """Run these checks only; A3 is every check whose code begins with it."""
    model: str | None = None
    """Score the tokens with this checkpoint, to compare with the recorded log-probs (its tokenizer is used too)."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, for checks that read the text of tokens."""
    limit: int | None = Field(None, ge=1)
    """Read this many samples at most."""
    explain: str | None = None
    """Teach one check by its code, and read nothing."""
    declare: Declare = Declare()


def audit(line: Line) -> int:
    examples = (
        "audit runs/NAME                       # your own run",
        "audit traces.jsonl                    # verifiers, prime-rl",
        "audit dump.parquet --format verl",
        "audit completions/ --declare.estimator grpo --declare.rollouts-per-task 8",
        "audit batch.safetensors --codes A2 A3 --json",
        "audit --explain A301",
    )
    about = (
        "Are these rollouts sound, or would you train on a bug? Masks, log-probs, groups, advantages, rewards, prompts. Exit\n"
        "code 1 if there is an error among the findings."
    )
    switches = {
        "list": (bool, "Every check, one line each."),
        "json": (bool, "One JSON object on standard output, and nothing else there."),
    }
    page = Help("audit", about, examples, ("path",), switches)
    if line.wants_help:
        return show_help(page, Audit)
    asked = read(line, Audit, page)
    if asked.explain is not None:
        return _explain(asked.explain, line.switch("json"))
    if line.switch("list"):
        return _list(line.switch("json"))
    if not asked.path:
        raise UserError("PATH is missing: a file, a folder or a run directory; 'assay audit --list' shows the checks")
    return _audit(asked, line.switch("json"))


def _audit(asked: Audit, as_json: bool) -> int:
    from assay.audit import checks, readers

    declared = {name: value for name, value in asked.declare.model_dump().items() if value not in (None, [])}
    codes = checks.select(asked.codes) if asked.codes else None  # a wrong one is told before minutes of reading
    with _bar("reading") as progress:
        rollouts = readers.read(Path(asked.path), asked.format, declared, asked.limit, progress)
    score, decode, encode = None, None, None
    if asked.model is not None or asked.tokenizer is not None:
        from assay.cli import audit_model

        decode, encode = audit_model.texts(asked.tokenizer or str(asked.model))
    if asked.model is not None:
        with _bar("scoring") as progress:
            scored = audit_model.score(rollouts, asked.model, progress)
        score = lambda _: scored  # noqa: E731
    report = checks.audit(rollouts, codes, score, decode, encode)
    if as_json:
        print(json.dumps(_finite(record(rollouts, report)), allow_nan=False))
    else:
        show(Console(highlight=False, soft_wrap=True), rollouts, report)
    return 0 if report.sound else UNSOUND


def record(rollouts: Rollouts, report: Report) -> dict[str, Any]:
    """What --json prints."""
    return {
        "source": rollouts.source,
        "format": rollouts.format,
        **report.counts,
        "columns": _columns(rollouts),
        "declared": rollouts.declared,
        "findings": [
            {name: getattr(finding, name) for name in ("code", "severity", "sentence", "count", "rows", "advice")}
            for finding in report.findings
        ],
        "ran": report.ran,
        "skipped": report.skipped,
    }


# -------------------------------------------------------------------------------------------------------------- words


def show(out: Console, rollouts: Rollouts, report: Report) -> None:
    """What was read, findings by severity, what did not run, one closing line. Text of a file is shown as it is safe."""
    for title, text in _read(rollouts, report).items():
        out.print(Text(f"{title:<10} {plain(text)}"))
    for finding in report.findings:
        _show_finding(out, finding)
    out.print()
    if report.skipped:
        missing: dict[str, list[str]] = {}
        for code, reason in report.skipped.items():
            missing.setdefault(reason, []).append(code)
        said = "; ".join(f"{' '.join(codes)} ({as_flags(reason)})" for reason, codes in missing.items())
        out.print(Text(f"not run    {plain(said)}", style="dim"))
    out.print(Text(_closing(report)))


def _read(rollouts: Rollouts, report: Report) -> dict[str, str]:
    counts = report.counts
    tokens = f"{counts['tokens']:,} tokens" if counts["tokens"] else "no tokens"
    if counts["tokens"] and counts["trained_tokens"] is not None:
        tokens += f", {counts['trained_tokens']:,} of them trained"
    many = [count(counts[f"{name}s"], name) for name in ("sample", "episode", "group")]
    lines = {"read": f"{rollouts.source} as {rollouts.format}", "": ", ".join([*many, tokens])}
    lines["columns"] = "; ".join(", ".join(names) for names in _columns(rollouts).values() if names)
    if rollouts.declared:
        lines["declared"] = ", ".join(f"{name} {_value(value)}" for name, value in rollouts.declared.items())
    return lines


def _show_finding(out: Console, finding: Finding) -> None:
    from assay.audit.checks import CHECKS

    head = f"\n{finding.severity} {finding.code}"
    name = CHECKS[finding.code].name if finding.code in CHECKS else ""
    out.print(Text(head, style=STYLES[finding.severity]), Text(name, style="dim"))
    out.print(Text(f"  {plain(finding.sentence)}"))
    if finding.rows:
        more = f" and {finding.count - len(finding.rows):,} more" if finding.count > len(finding.rows) else ""
        out.print(Text(f"  at   {plain('; '.join(finding.rows))}{more}"))
    if finding.advice:
        out.print(Text(f"  try  {plain(finding.advice)}"))


def _closing(report: Report) -> str:
    said = ", ".join(count(len(found), severity) for severity in STYLES if (found := report.of(severity)))
    ran = f"{count(len(report.ran), 'check')} ran"
    if not said:
        return f"{ran}: nothing found"
    return f"{ran}: {said}; 'assay audit --explain {report.findings[0].code}' says more"


def _columns(rollouts: Rollouts) -> dict[str, list[str]]:
    return {"tokens": list(rollouts.tokens), "samples": list(rollouts.samples), "texts": list(rollouts.texts)}


def _value(value: Any) -> str:
    return (
        f"{value:g}"
        if isinstance(value, float)
        else " ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )


def count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' if number != 1 else ''}"


def as_flags(reason: str) -> str:
    """What is missing, as what a person can give."""
    reason = reason.replace("with decode", "--tokenizer").replace("with score", "--model")
    return re.sub(r"declared\.(\w+)", lambda match: f"--declare.{match[1].replace('_', '-')}", reason)


def plain(text: str) -> str:
    """Printable: what would steer a terminal, or cannot be encoded, is shown as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _finite(value: Any) -> Any:
    """JSON has no NaN: null stands for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


@contextmanager
def _bar(title: str) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal, once it is clear that this takes a while."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    err = console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    task = bar.add_task(title, total=1.0)
    began, shown = time.monotonic(), False

    def advance(share: float) -> None:
        nonlocal shown
        if not shown and time.monotonic() - began > PATIENCE:
            bar.start()
            shown = True
        if shown:
            bar.update(task, completed=share)

    try:
        yield advance
    finally:
        bar.stop()


# --------------------------------------------------------------------------------------------------- without a file


def _explain(code: str, as_json: bool) -> int:
    """Of a check, or of a rule of the training guard (G101, ...)."""
    if code[:1].upper() == "G" and code[1:].isdigit():
        from assay.guard import explain as of_guard

        code, text = code.upper(), of_guard(code.upper())
    else:
        from assay.audit.checks import explain, select

        code, text = select([code])[0], explain(code)
    print(json.dumps({"code": code, "text": text}) if as_json else text)
    return 0


def _list(as_json: bool) -> int:
    from assay.audit.checks import CHECKS

    names: Sequence[str] = ("code", "name", "severity", "line", "needs")
    records = [{name: getattr(check, name) for name in names} for check in CHECKS.values()]
    if as_json:
        print(json.dumps(records))
        return 0
    width = max(len(record["name"]) for record in records)
    for r in records:
        print(f"{r['code']}  {r['severity']:<7}  {r['name']:<{width}}  {r['line']}")
    print("\n'assay audit --explain CODE' teaches one of them")
    return 0
