"""What a comparison looks like: for the terminal, as Markdown and LaTeX tables, and as one page that opens offline.

All of it is drawn from compare.json, so that a result from another machine looks the same. A figure that decides gets a verdict
in words; the others are marked as exploratory and get intervals only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from rich.table import Table
from rich.text import Text

from assay import charts
from assay.charts import Line, number
from assay.files import write_file

COLOURS = 5  # of the page's style sheet
AXES = {"env_steps": "environment steps", "tokens": "generated tokens", "seconds": "seconds of training"}
LATEX = {
    "\\": r"\textbackslash{}",
    **{c: "\\" + c for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
WIDTH, ROW, LABEL = 560, 30, 190  # of a forest plot, in user units

Result = Mapping[str, Any]


# -------------------------------------------------------------------------------------------------------------- words


def interval(value: Mapping[str, Any] | None, sign: bool = False) -> str:
    """ "+0.031 [+0.012, +0.050]"; "-" where nothing is known, "?" for an end that is not."""
    if not value or value.get("estimate") is None:
        return "-"
    form = "+.3f" if sign else ".3f"
    low, high = (format(v, form) if v is not None else "?" for v in (value.get("low"), value.get("high")))
    return f"{value['estimate']:{form}} [{low}, {high}]"


def figure(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def p_value(value: float | None) -> str:
    return "-" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def deciding(result: Result) -> list[Mapping[str, Any]]:
    """Pairs of the figure that the comparison is about."""
    return [pair for pair in result["pairs"] if pair["metric"] == result["metric"]]


def exploratory(result: Result) -> list[Mapping[str, Any]]:
    return [pair for pair in result["pairs"] if pair["metric"] != result["metric"]]


def headlines(result: Result) -> list[tuple[str, str]]:
    """(verdict, sentence) of every pair; why there is none where there is none."""
    found = [(pair["verdict"], pair["sentence"]) for pair in deciding(result)]
    for noise in result["noise"]:
        found.append(
            ("noise", f"{noise['arm']} differs from itself with other seeds by {interval(noise['difference'], True)}")
        )
    return found or [("inconclusive", "nothing to compare yet: no pair of arms has finished seeds")]


def arm_rows(result: Result) -> list[list[str]]:
    """Per arm: name, mean of each figure with its interval over seeds, seeds, what one seed spent."""
    rows = []
    for name, arm in result["arms"].items():
        seeds = list(arm["seeds"].values())
        spent = [_mean([seed.get(key) for seed in seeds]) for key in ("env_steps", "tokens", "seconds")]
        minutes = "-" if spent[2] is None else f"{spent[2] / 60:.1f}"
        cells = [interval(arm["mean"].get(metric)) for metric in result["metrics"]]
        rows.append([name, *cells, str(len(seeds)), *("-" if v is None else number(v) for v in spent[:2]), minutes])
    return rows


def arm_head(result: Result) -> list[str]:
    return ["arm", *result["metrics"], "seeds", "env steps", "tokens", "minutes"]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


PAIR_HEAD = [
    "pair",
    "difference",
    "BCa",
    "p",
    "permutation p",
    "corrected p",
    "noise floor",
    "detectable",
    "seeds",
    "verdict",
]


def pair_rows(result: Result) -> list[list[str]]:
    return [
        [
            f"{p['a']} - {p['b']}",
            interval(p["difference"], True),
            interval(p["bootstrap"], True),
            *(p_value(p[name]) for name in ("p", "p_permutation", "p_corrected")),
            figure(p["noise_floor"]),
            figure(p["mde"]),
            str(p["n"]),
            p["verdict"],
        ]
        for p in deciding(result)
    ]


def tested(result: Result) -> str:
    """How, in three sentences."""
    looks = f" It was looked at {result['looks']} times, and p is multiplied by that." if result["looks"] > 1 else ""
    return (
        f"The figure is {result['metric']} ({_panel(result)}); the unit is the training seed, and arms share seeds, start and "
        f"task order. Intervals of a difference are paired t at {1 - result['alpha']:.0%}, p is corrected over the pairs "
        f"by Holm's method, and a verdict needs a corrected p of at most {result['alpha']:g}, or an interval within "
        f"{result['effect']:g} for no difference. The noise floor is what a method differs from itself by in 95 % of "
        f"comparisons; detectable is the true difference that this number of seeds finds in 80 %.{looks}"
    )


def _panel(result: Result) -> str:
    hashes = ", ".join(f"{name} {text}" for name, text in result["panel"].items() if name != "tasks")
    return f"panel of {result['panel'].get('tasks', '?')} tasks a split{': ' + hashes if hashes else ''}"


# ----------------------------------------------------------------------------------------------------------- terminal


def terminal(result: Result) -> list[Any]:
    """Verdicts first, then the arms, then the pairs."""
    styles = {"better": "bold green", "worse": "bold red", "no difference": "bold", "inconclusive": "bold yellow"}
    found: list[Any] = [Text(sentence, style=styles.get(verdict, "dim")) for verdict, sentence in headlines(result)]
    found.append(
        _table(f"mean over seeds, 95 % interval over seeds; {_panel(result)}", arm_head(result), arm_rows(result))
    )
    if deciding(result):
        found.append(_table(f"differences in {result['metric']}", PAIR_HEAD, pair_rows(result)))
    if exploratory(result):
        rows = [[p["metric"], f"{p['a']} - {p['b']}", interval(p["difference"], True)] for p in exploratory(result)]
        found.append(_table("exploratory: no verdict on these", ["figure", "pair", "difference"], rows))
    for gap in result["unfinished"]:
        found.append(Text(f"unfinished: {gap['arm']}, seed {gap['seed']}: {gap['error']}", style="red"))
    return found


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="dim", box=None, padding=(0, 2, 0, 0))
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


# ------------------------------------------------------------------------------------------------- Markdown and LaTeX


def markdown(result: Result) -> str:
    parts = [f"# {_md(result['title'])}", "", *(f"- **{v}**: {_md(s)}" for v, s in headlines(result)), ""]
    parts += [md_table(arm_head(result), arm_rows(result)), ""]
    if deciding(result):
        parts += [f"Differences in {_md(result['metric'])}:", "", md_table(PAIR_HEAD, pair_rows(result)), ""]
    if exploratory(result):
        rows = [[p["metric"], f"{p['a']} - {p['b']}", interval(p["difference"], True)] for p in exploratory(result)]
        parts += ["Exploratory, without verdict:", "", md_table(["figure", "pair", "difference"], rows), ""]
    for gap in result["unfinished"]:
        parts.append(f"- unfinished: {_md(gap['arm'])}, seed {gap['seed']}: {_md(gap['error'])}")
    parts += [
        _md(tested(result)),
        "",
        f"    {_line(result['command'])}",
        "",
        f"{result['date']}, assay {result['assay']}",
        "",
    ]
    return "\n".join(parts)


def md_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(map(_md, head)) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(_md, row)) + " |" for row in rows)])


def _md(text: Any) -> str:
    """Text that cannot leave its cell."""
    return re.sub(r"([\\`*_<>|#])", r"\\\1", _line(text)).strip()


def _line(text: Any) -> str:
    return " ".join(str(text).split())


def latex(result: Result) -> str:
    """A booktabs table of the arms and one of the pairs."""
    caption = (
        f"{result['title']}. Mean over training seeds with 95 % intervals over seeds; {_panel(result)}; budget "
        f"{result['budget']}."
    )
    first = _latex_table(arm_head(result), arm_rows(result), caption)
    second = _latex_table(PAIR_HEAD, pair_rows(result), f"Differences. {tested(result)}") if deciding(result) else ""
    return f"{first}\n{second}"


def _latex_table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    lines = [" & ".join(map(_tex, row)) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_tex(caption)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
            r"\toprule",
            " & ".join(map(_tex, head)) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _tex(text: Any) -> str:
    return "".join(LATEX.get(c, c) for c in _line(text))


# --------------------------------------------------------------------------------------------------------------- page


def write_page(result: Result, path: Path) -> None:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("assay", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("compare.html.j2").render(
        result=result,
        headlines=headlines(result),
        arms=(arm_head(result), arm_rows(result)),
        pairs=(PAIR_HEAD, pair_rows(result)),
        forest=forest(result, deciding(result)),
        others=[
            (m, forest(result, [p for p in exploratory(result) if p["metric"] == m])) for m in result["metrics"][1:]
        ],
        seeds=seed_plot(result),
        curves=[(AXES[axis], picture) for axis in AXES if (picture := curve_chart(result, axis))],
        legend=[(name, i % COLOURS) for i, name in enumerate(result["arms"])],
        differs=[(name, _line(arm["differs"])) for name, arm in result["arms"].items() if arm["differs"]],
        start=[(m, interval(_as_interval(v))) for m, v in result["start"].items()],
        tested=tested(result),
    )
    write_file(path, html.encode("utf-8", "replace"))


def _as_interval(rate: Mapping[str, Any]) -> dict[str, Any]:
    return {"estimate": rate.get("success"), "low": rate.get("low"), "high": rate.get("high")}


def forest(result: Result, pairs: Sequence[Mapping[str, Any]]) -> Markup:
    """A row per pair: mean difference with its interval, the noise floor as a band, the effect of interest as dashed lines."""
    known = [p for p in pairs if _known(p["difference"].get("estimate"))]
    if not known:
        return Markup("")
    primary = known[0]["metric"] == result["metric"]
    marks = [result["effect"]] if primary else []
    ends = [v for p in known for v in (p["difference"]["low"], p["difference"]["high"], p["difference"]["estimate"])]
    reach = (
        max([abs(v) for v in [*ends, *marks, *(p["noise_floor"] for p in known)] if _known(v)] or [1.0]) * 1.08 or 1.0
    )
    height = ROW * len(known) + 30

    def x(value: float) -> float:
        return LABEL + (value + reach) / (2 * reach) * (WIDTH - LABEL - 10)

    parts = [f'<path d="M{x(0):.1f} 4V{height - 26}" class="axis"/>']
    for mark in marks:
        parts += [f'<path d="M{x(s * mark):.1f} 4V{height - 26}" class="effect"/>' for s in (-1, 1)]
    for tick in charts.ticks(-reach, reach):
        if abs(tick) <= reach:
            parts.append(f'<text x="{x(tick):.1f}" y="{height - 10}" text-anchor="middle">{tick:+g}</text>')
    for i, p in enumerate(known):
        y, d = ROW * i + 18, p["difference"]
        if _known(p["noise_floor"]):
            low, high = x(-p["noise_floor"]), x(p["noise_floor"])
            parts.append(f'<rect x="{low:.1f}" y="{y - 11}" width="{high - low:.1f}" height="22" class="floor"/>')
        name = f"{p['a']} - {p['b']}"
        shown = " - ".join(arm if len(arm) <= 14 else f"{arm[:6]}…{arm[-7:]}" for arm in (p["a"], p["b"]))
        parts.append(f'<text x="0" y="{y + 4}">{escape(shown)}<title>{escape(name)}</title></text>')
        colour = {"better": "var(--good)", "worse": "var(--bad)"}.get(p["verdict"] if primary else "", "var(--c0)")
        if _known(d["low"]) and _known(d["high"]):
            parts.append(f'<path d="M{x(d["low"]):.1f} {y}H{x(d["high"]):.1f}" stroke="{colour}" stroke-width="2.5"/>')
        said = escape(f"{name}: {interval(d, True)}, {p['n']} paired seeds")
        parts.append(
            f'<circle cx="{x(d["estimate"]):.1f}" cy="{y}" r="5" fill="{colour}"><title>{said}</title></circle>'
        )
    label = escape(f"differences in {known[0]['metric']} with their intervals")
    return Markup(f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>')


def seed_plot(result: Result) -> Markup:
    """Every seed of every arm as a dot; the dots of one seed are joined."""
    metric, arms = result["metric"], list(result["arms"].items())
    values = {name: {s: v.get(metric) for s, v in arm["seeds"].items() if _known(v.get(metric))} for name, arm in arms}
    known = [v for seeds in values.values() for v in seeds.values()]
    if not known:
        return Markup("")
    marks = charts.ticks(min(known), max(known))
    width, height = max(320, 60 + 110 * len(arms)), 240

    def y(value: float) -> float:
        return height - 34 - (value - marks[0]) / ((marks[-1] - marks[0]) or 1) * (height - 54)

    def x(i: int) -> float:
        return 100 + i * (width - 140) / max(1, len(arms) - 1)

    parts = []
    for mark in marks:
        parts.append(f'<path d="M46 {y(mark):.1f}H{width}" class="grid"/>')
        parts.append(f'<text x="40" y="{y(mark) + 4:.1f}" text-anchor="end">{number(mark)}</text>')
    for seed in dict.fromkeys(s for seeds in values.values() for s in seeds):
        line = [(x(i), y(values[name][seed])) for i, (name, _) in enumerate(arms) if seed in values[name]]
        parts.append(f'<path d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in line)}" class="pairing"/>')
    for i, (name, _) in enumerate(arms):
        shown = name if len(name) <= 16 else name[:15] + "…"
        parts.append(f'<text x="{x(i):.1f}" y="{height - 12}" text-anchor="middle">{escape(shown)}</text>')
        for seed, value in values[name].items():
            said = escape(f"{name}, seed {seed}: {value:.3f}")
            place = f'cx="{x(i):.1f}" cy="{y(value):.1f}" r="4" fill="var(--c{i % COLOURS})"'
            parts.append(f"<circle {place}><title>{said}</title></circle>")
    label = escape(f"{metric} of every seed")
    return Markup(f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>')


def curve_chart(result: Result, axis: str) -> Markup:
    """Training success: interquartile mean over seeds with its band."""
    lines = []
    for i, name in enumerate(result["arms"]):
        found = result["curves"].get(axis, {}).get(name)
        if found and found["x"]:
            points = list(zip(found["x"], map(_nan, found["iqm"]), strict=True))
            low, high = ([_nan(v) for v in found[end]] for end in ("low", "high"))
            band = any(map(math.isfinite, low))
            lines.append(Line(name, points, low if band else (), high if band else (), i % COLOURS, AXES[axis]))
    return charts.line_chart(lines, percent=True, label=f"training success against {AXES[axis]}")


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# ----------------------------------------------------------------------------------------------------------- replicate


def replicate_table(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """docs/results.md: a row per claim, negative and inconclusive ones too, then what decided each."""
    head = ["claim", "arms", "seeds", "figure", "difference", "verdict", "scale", "fidelity", "command", "date"]
    rows = [
        [
            f"{v['claim']} ({v['paper']})",
            " - ".join(v["arms"]),
            str(v["seeds"]),
            v["metric"],
            interval(v["difference"], True),
            v["verdict"],
            v["scale"],
            v["fidelity"],
            v["command"],
            v["date"],
        ]
        for v in verdicts
    ]
    parts = [
        "# Published claims, put to the test",
        "",
        "Written by `assay replicate`, never by hand; a negative or inconclusive row stays. The difference is the first arm",
        "minus the second, the mean over paired training seeds with a paired t interval at 95 %. A verdict is on the claim at",
        "the scale that is stated, and says nothing about other scales.",
        "",
        md_table(head, rows),
        "",
    ]
    for v in verdicts:
        parts += [f"## {_md(v['name'])} ({v['scale']}): {v['verdict']}", ""]
        parts += [f"{_md(v['claim'])} ({_md(v['paper'])})", "", f"- Scale: {_md(v['about'])}."]
        parts += [f"- Rule, written before the runs: {_md(v['decision_rule'])}.", f"- Found: {_md(v['sentence'])}."]
        parts += [f"- Notes: {_md(v['notes'])}"] if v.get("notes") else []
        panel = ", ".join(f"{name} {text}" for name, text in v["panel"].items())
        parts += [
            f"- Environment version {v['environment_version']}, panel {panel}; assay {v['assay']}, {v['date']}.",
            "",
        ]
        means = [[arm, *(interval(mean.get(m)) for m in _figures(v))] for arm, mean in v["means"].items()]
        parts += [md_table(["mean over seeds", *_figures(v)], means), ""]
        others = [[other["metric"], interval(other["difference"], True)] for other in v["secondary"]]
        parts += [md_table(["exploratory, no verdict", " - ".join(v["arms"])], others), ""] if others else []
    return "\n".join(parts)


def _figures(verdict: Mapping[str, Any]) -> list[str]:
    return [verdict["metric"], *(other["metric"] for other in verdict["secondary"])]
