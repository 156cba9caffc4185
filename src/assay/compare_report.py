"""What a comparison looks like: for the terminal, as Markdown and LaTeX tables, and as one page that opens offline.

All of it is drawn from compare.json, so that a result from another machine looks the same. The figure that decides gets a
verdict in words; the others are marked as exploratory and get intervals only. Names and errors are untrusted: each kind of
output escapes them in its own way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from rich.table import Table
from rich.text import Text

from assay.compare_charts import (
    COLOURS,
    MARKS,
    Result,
    curves,
    dash,
    forest,
    interval,
    matrix,
    plain,
    seed_plot,
)
from assay.compare_words import (
    MOST_SENTENCES,
    OTHER_HEAD,
    PAIR_HEAD,
    arm_head,
    arm_rows,
    deciding,
    exploratory,
    headlines,
    made,
    other_rows,
    pair_rows,
    panel,
    sentences,
    tested,
    unfinished,
    unit,
)
from assay.files import write_file
from assay.records import is_number

MOST_OPEN = 24  # exploratory rows that are shown without being asked for
LONG_NAME = 24  # characters from which a name may wrap in LaTeX
STYLES = {"better": "bold green", "worse": "bold red", "no difference": "bold", "inconclusive": "bold yellow"}
TEX_PAIR_HEAD = ["arm", "against", "difference", "BCa", "p", "flips", "corrected", "floor", "MDE", "pairs", "verdict"]
LATEX = {
    "\\": r"\textbackslash{}",
    **{c: "\\" + c for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "{''}",
    "`": r"\textasciigrave{}",
    "±": r"$\pm$",
}


# ----------------------------------------------------------------------------------------------------------- terminal


def terminal(result: Result) -> list[Any]:
    """Verdicts first, then the arms, then the pairs; it fits 80 columns where names are short."""
    found: list[Any] = [Text(sentence, style=STYLES.get(verdict, "dim")) for verdict, sentence in headlines(result)]
    metric, pairs = result["metric"], deciding(result)
    title = f"{plain(metric)}: mean [95 % interval] over seeds; {panel(result)}; spent a seed"
    found.append(_table(title, arm_head(result, ["mean"]), arm_rows(result, [metric])))
    if 0 < len(pairs) <= MOST_SENTENCES:
        rows = [_stacked(row) for row in pair_rows(result)]
        found.append(_table(f"differences in {plain(metric)}", ["pair", "difference", "p", "noise floor", "MDE"], rows))
    elif pairs:
        rows = [[row[0], row[1], row[2], row[6], row[-1]] for row in pair_rows(result)]
        found.append(
            _table(
                f"differences in {plain(metric)}; all columns are in the tables",
                ["arm", "against", "difference", "corrected p", "verdict"],
                rows,
            )
        )
    others = other_rows(result)
    if 0 < len(others) <= MOST_OPEN:
        found.append(_table("exploratory, no verdict", OTHER_HEAD, others))
    elif others:
        found.append(Text(f"exploratory: {len(others)} differences in further figures are in the report", style="dim"))
    return found + [Text(line, style="red") for line in unfinished(result)]


def _stacked(row: Sequence[str]) -> list[str]:
    """A row of `pair_rows` on three lines, since a terminal is narrow."""
    a, b, difference, ends, p, flip, corrected, floor, detectable, *_ = row
    return [
        f"{a}\nagainst {b}",
        f"{difference}\n{'BCa':>6} {ends}",
        f"t {p}\nsign flips {flip}\ncorrected {corrected}",
        floor,
        detectable,
    ]


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="dim", box=None, padding=(0, 2, 0, 0), header_style="dim"
    )
    for name in head:
        if name in ("arm", "against", "pair", "figure"):  # what can be long gives way to the numbers
            table.add_column(name, overflow="fold", max_width=60)
        else:
            table.add_column(name.replace(" ", "\n"), no_wrap=True, vertical="top")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


# ----------------------------------------------------------------------------------------------------------- Markdown


def markdown(result: Result) -> str:
    metrics = result["metrics"]
    parts = [f"# {_md(result['title'])}", "", *(f"- **{v}**: {_md(s)}" for v, s in headlines(result))]
    parts += [f"- **{_md(line)}**" for line in unfinished(result)]
    parts += [
        "",
        f"Means over training seeds with 95 % intervals over seeds ({unit(result['metric'])}). Steps, tokens and",
    ]
    parts += ["minutes are those of one seed.", "", md_table(arm_head(result, metrics), arm_rows(result, metrics)), ""]
    if deciding(result):
        parts += [f"Differences in {_md(result['metric'])}:", "", md_table(PAIR_HEAD, pair_rows(result)), ""]
    if exploratory(result):
        parts += ["Exploratory, without a verdict:", "", md_table(OTHER_HEAD, other_rows(result)), ""]
    parts += [_md(" ".join(tested(result))), "", f"    {plain(result['command'])}", ""]
    parts += [_md(f"{result['env']}, {result['model']}, {result['budget']} a seed; {made(result)}"), ""]
    return "\n".join(parts)


def md_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(map(_md, head)) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(_md, row)) + " |" for row in rows)])


def _md(text: Any) -> str:
    """Text that neither leaves its cell nor becomes a link, a heading, a formula or HTML."""
    text = re.sub(r"([\\`*_<>|#~$&])", r"\\\1", plain(text))
    return re.sub(r"\](?=[(\[:])", r"\\]", text)


# -------------------------------------------------------------------------------------------------------------- LaTeX


def latex(result: Result) -> str:
    """A booktabs table of the arms and one of the pairs; both need `booktabs` and nothing else."""
    metrics, seeds = result["metrics"], len(result["seeds"])
    spread = f"Mean over {seeds} training seeds with the 95 % interval over seeds in brackets (n = {seeds})"
    caption = (
        f"{result['title']}, {result['model']}, {result['budget']}. {spread}; {unit(result['metric'])}; {panel(result)}. "
        "Environment steps, tokens and minutes are those of one seed."
    )
    rows = [line for row in arm_rows(result, metrics) for line in _two_lines(row, 1 + len(metrics))]
    first = _latex_table(arm_head(result, metrics), rows, caption, "arms", names=1)
    if not deciding(result):
        return first
    rows = [[*row[:10], row[11]] for row in pair_rows(result)]
    caption = f"Differences in {result['metric']} ({unit(result['metric'])}). {' '.join(tested(result))}"
    return f"{first}\n{_latex_table(TEX_PAIR_HEAD, rows, caption, 'pairs', names=2)}"


def _two_lines(row: Sequence[str], means: int) -> list[list[str]]:
    """Each interval below its estimate: four of them in a line are wider than a page of text."""
    above, below = zip(*(cell.partition(" ")[::2] for cell in row[1:means]), strict=True)
    return [[row[0], *above, *row[means:]], ["", *below, *("" for _ in row[means:])]]


def _latex_table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str, label: str, names: int) -> str:
    long = any(len(name) > LONG_NAME for row in rows for name in row[:names])
    columns = ("p{3.2cm}" if long else "l") * names + "r" * (len(head) - names)
    lines = [" & ".join([*(_tex(c, wrap=long) for c in row[:names]), *map(_tex, row[names:])]) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{table*}",
            r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{_tex(caption)}}}",
            rf"\label{{tab:{label}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            " & ".join(map(_tex, head)) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table*}",
            "",
        ]
    )


def _tex(text: Any, wrap: bool = False) -> str:
    """Escaped; a minus of a number is one, two hyphens stay two; with `wrap` a name may break after its punctuation."""
    text = plain(text)
    found = []
    for i, c in enumerate(text):
        before, after = text[i - 1 : i], text[i + 1 : i + 2]
        if c in "[*" and i == 0:
            found.append(f"{{{c}}}")  # after \\ either would be its argument
        elif c == "-" and after.isdigit() and before in ("", " ", "["):
            found.append("$-$")
        elif c == "-" and after == "-":
            found.append("-{}")
        else:
            found.append(LATEX.get(c, c) + (r"\allowbreak{}" if wrap and c in "_./=,-" else ""))
    return "".join(found)


# --------------------------------------------------------------------------------------------------------------- page


def write_page(result: Result, path: Path) -> None:
    """The page as one file: no script, no font, nothing from elsewhere."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("assay", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("compare.html.j2").render(page(result))
    write_file(path, html.encode("utf-8", "replace"))


def page(result: Result) -> dict[str, Any]:
    """What the template shows; empty values leave their section out."""
    pairs, metrics = deciding(result), result["metrics"]
    others = [(m, forest(result, [p for p in exploratory(result) if p["metric"] == m])) for m in metrics]
    many = len(pairs) > MOST_SENTENCES
    return {
        "title": plain(result["title"]),
        "metric": plain(result["metric"]),
        "unit": unit(result["metric"]),
        "effect": f"{result['effect']:g}",
        "facts": facts(result),
        "headlines": [(verdict, _unbroken(text)) for verdict, text in headlines(result)],
        "sentences": sentences(result) if many else [],
        "unfinished": unfinished(result),
        "forest": forest(result, pairs),
        "seeds": seed_plot(result),
        "matrix": matrix(result, pairs) if many else [],
        "marks": MARKS,
        "curves": curves(result),
        "legend": [(plain(name), i % COLOURS, dash(i)) for i, name in enumerate(result["arms"])],
        "arms": (arm_head(result, metrics), arm_rows(result, metrics)),
        "pairs": (PAIR_HEAD, pair_rows(result)),
        "tested": tested(result),
        "others": [(plain(m), unit(m), rows) for m, rows in others if rows],
        "others_open": sum(len(rows["rows"]) for _, rows in others if rows) <= MOST_OPEN,
        "same": same(result),
        "start": [(m, interval(_rate(rate))) for m, rate in result["start"].items() if is_number(rate.get("success"))],
        "differs": differs(result),
        "command": plain(result["command"]),
        "made": made(result),
    }


def _unbroken(text: str) -> str:
    """An interval stays on one line, as on paper."""
    return re.sub(r"(\[[-+.,\d]+,) (?=[-+.,\d]+\])", "\\1\N{NO-BREAK SPACE}", text)


def facts(result: Result) -> list[tuple[str, str]]:
    """The line under the title."""
    found = {"environment": result["env"], "version": result["environment_version"], "model": result["model"]}
    found |= {"budget a seed": result["budget"], "seeds": len(result["seeds"])}
    return [(name, plain(value)) for name, value in found.items()]


def same(result: Result) -> list[tuple[str, str]]:
    """What all arms share: what a key that differs decides is not among it."""
    changed = {name.split(".")[0] for arm in result["arms"].values() for name in arm["differs"]}
    found: list[tuple[str, Any, set[str]]] = [
        ("environment", f"{result['env']}, version {result['environment_version']}", set()),
        ("model", result["model"], {"model"}),
        ("budget of a seed", result["budget"], {"budget", "steps"}),
        ("training seeds", ", ".join(map(str, result["seeds"])), set()),
        ("panel", panel(result), set()),
    ]
    return [(name, plain(value)) for name, value, keys in found if not changed & keys]


def differs(result: Result) -> list[tuple[str, str, str, list[tuple[str, str]]]]:
    """(arm, method, fidelity, keys in which it is not like the first arm)."""
    return [
        (
            plain(name),
            " + ".join(map(plain, arm["method"])),
            plain(arm["fidelity"]),
            [(plain(key), _value(value)) for key, value in arm["differs"].items()],
        )
        for name, arm in result["arms"].items()
    ]


def _value(value: Any) -> str:
    if value is None:
        return "absent"
    return plain(" + ".join(map(str, value)) if isinstance(value, list) else value)


def _rate(rate: Mapping[str, Any]) -> dict[str, Any]:
    return {"estimate": rate.get("success"), "low": rate.get("low"), "high": rate.get("high"), "n": rate.get("n")}


# ----------------------------------------------------------------------------------------------------------- replicate

INTRODUCTION = """# Published claims, put to the test

Written by `assay replicate`, never by hand; a negative or inconclusive row stays. The difference is the first arm minus the
second, the mean over paired training seeds with a paired t interval at 95 %. A verdict is on the claim at the scale that is
stated, and says nothing about other scales.
"""
CLAIM_HEAD = ["claim", "arms", "seeds", "figure", "difference", "verdict", "scale", "fidelity", "command", "date"]


def replicate_table(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """docs/results.md: a row per claim, negative and inconclusive ones too, then what decided each."""
    if not verdicts:
        return f"{INTRODUCTION}\nNo claim has been put to the test yet.\n"
    lines = ["| " + " | ".join(CLAIM_HEAD) + " |", "|" + "---|" * len(CLAIM_HEAD)]
    lines += ["| " + " | ".join(_claim_row(v)) + " |" for v in verdicts]
    return "\n".join([INTRODUCTION, *lines, "", *(line for v in verdicts for line in _claim(v))])


def _claim_row(verdict: Mapping[str, Any]) -> list[str]:
    cells = [f"{verdict['claim']} ({verdict['paper']})", " against ".join(verdict["arms"]), verdict["seeds"]]
    cells += [verdict["metric"], interval(verdict["difference"], sign=True)]
    cells += [verdict[name] for name in ("verdict", "scale", "fidelity")]
    return [*map(_md, cells), _code(verdict["command"]), _md(verdict["date"])]


def _code(text: Any) -> str:
    """A command that can be copied; one with a backtick is escaped instead."""
    line = plain(text)
    return _md(line) if "`" in line else "`" + line.replace("|", r"\|") + "`"


def _claim(verdict: Mapping[str, Any]) -> list[str]:
    """One section: rule, what was found, every other figure."""
    a, b = verdict["arms"][:2]
    lines = [f"## {_md(verdict['name'])} ({_md(verdict['scale'])}): {_md(verdict['verdict'])}", ""]
    lines += [f"{_md(verdict['claim'])} ({_md(verdict['paper'])})", ""]
    lines += [f"- Rule, written before the runs: {_md(verdict['decision_rule'])}."]
    lines += [f"- Found: {_md(verdict['sentence'])}."]
    lines += [f"- Scale {_md(verdict['scale'])}: {_md(verdict['about'])}."] if verdict.get("about") else []
    lines += [f"- Fidelity of the arms: {_md(verdict['fidelity'])}. {_md(verdict.get('notes') or '')}".rstrip()]
    lines += [f"- {_md(_where(verdict))}.", f"- Again: {_code(verdict['command'])}", ""]
    means = verdict.get("means") or {}
    figures = [
        (verdict["metric"], verdict["difference"]),
        *((o["metric"], o["difference"]) for o in verdict["secondary"]),
    ]
    rows = [
        [
            f"{metric}{': decides' if i == 0 else ''}",
            *(interval(mean.get(metric)) for mean in means.values()),
            interval(difference, sign=True),
        ]
        for i, (metric, difference) in enumerate(figures)
    ]
    lines += [md_table(["figure", *means, f"{a} against {b}"], rows), ""]
    if verdict["secondary"]:
        lines += ["Figures that do not decide are exploratory: intervals without correction, and no verdict.", ""]
    return lines


def _where(verdict: Mapping[str, Any]) -> str:
    found = f"{verdict['model']} on {verdict['env']}"
    if verdict.get("environment_version"):
        found += f", version {verdict['environment_version']}"
    return (
        f"{found}; {panel(verdict) + '; ' if verdict.get('panel') else ''}assay {verdict['assay']}, {verdict['date']}"
    )
