"""Pictures of a comparison as inline SVG, in the way of charts.py: differences, every seed, curves, who beats whom.

Names and numbers stand as the page's own text beside the pictures wherever they can: it wraps on a phone, can be selected
and is read aloud. Pictures are about as wide as a phone, so that the little text inside stays readable there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup, escape

from assay.charts import LEFT, SMALL, Frame, number, ticks
from assay.records import is_number

Result = Mapping[str, Any]

COLOURS = 10  # of the page's style sheet: arms beyond begin anew
SOLID = 5  # arms whose line is solid; the others are dashed, so that colour is not all that tells them apart
WIDTH, MARGIN = 360, 14  # of strips and forests, in user units
STRIP, DOTS = 46, 26  # height of an arm in the seed plot, and how far down its dots are
MOST_LABEL = 50  # characters of a name that fit the width
HOVERS = 16  # points of a curve that say their numbers
SUCCESS = ("iid sampled", "iid greedy", "ood sampled", "ood greedy")
AXES = {"env_steps": "environment steps", "tokens": "generated tokens", "seconds": "seconds of training"}
MINUTES_FROM = 600  # seconds at the right end from which the axis is in minutes
MARKS = {"better": "▲", "worse": "▼", "no difference": "=", "inconclusive": "?"}
TURNED = {"better": "worse", "worse": "better"}  # the same pair, read the other way round


# ------------------------------------------------------------------------------------------------------- differences


def forest(result: Result, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of one scale, {"a", "b", "text", "verdict", "picture"} each, and the axis below them; {} with nothing known.

    A row is the mean difference with its interval over a small dot for every paired seed. Only of the figure that decides
    are drawn, besides: noise floor (grey), effect of interest (dashed), and a method against itself, where that was run.
    """
    known = [pair for pair in pairs if pair["difference"] and is_number(pair["difference"].get("estimate"))]
    if not known:
        return {}
    primary = known[0]["metric"] == result["metric"]
    effect = result["effect"] if primary else None
    rows = [(p["a"], p["b"], p["difference"], _paired(result, p), p["noise_floor"], p["verdict"]) for p in known]
    if primary:
        itself = "itself, other seeds"
        noises = [noise for noise in result["noise"] if is_number(noise["difference"].get("estimate"))]
        rows += [(noise["arm"], itself, noise["difference"], [], None, "") for noise in noises]
    reach = _reach(effect, ((d, dots, floor if primary else None) for _, _, d, dots, floor, _ in rows))
    drawn = []
    for a, b, difference, dots, floor, verdict in rows:
        said = f"{a} against {b}: {interval(difference, sign=True)}"
        verdict = verdict if primary else ""
        picture = _difference(reach, difference, dots, floor if primary else None, effect, verdict, said)
        names = {"a": plain(a), "b": plain(b)}
        drawn.append(names | {"text": interval(difference, sign=True), "verdict": verdict, "picture": picture})
    return {"rows": drawn, "axis": _scale(reach)}


def _paired(result: Result, pair: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(seed, difference) where both arms have a number."""
    a, b = (result["arms"].get(pair[side], {}).get("seeds", {}) for side in ("a", "b"))
    values = [(s, a[s].get(pair["metric"]), b[s].get(pair["metric"])) for s in a if s in b]
    return [(s, x - y) for s, x, y in values if is_number(x) and is_number(y)]


def _reach(effect: float | None, rows: Iterable[tuple[Mapping[str, Any], Sequence[tuple[str, float]], Any]]) -> float:
    """Half of the scale, which is symmetric: that no difference is the middle should be seen."""
    ends: list[Any] = [effect]
    for difference, dots, floor in rows:
        ends += [difference.get(name) for name in ("estimate", "low", "high")] + [floor, *(v for _, v in dots)]
    return 1.06 * max(abs(v) for v in ends if is_number(v)) or 1.0


def _across(value: float, reach: float) -> float:
    return MARGIN + (value + reach) / (2 * reach) * (WIDTH - 2 * MARGIN)


def _difference(
    reach: float,
    difference: Mapping[str, Any],
    dots: Sequence[tuple[str, float]],
    floor: Any,
    effect: float | None,
    verdict: str,
    said: str,
) -> Markup:
    parts = []
    if is_number(floor):
        left, right = _across(-floor, reach), _across(floor, reach)
        parts.append(f'<rect x="{left:.1f}" y="0" width="{right - left:.1f}" height="34" class="floor"/>')
    marks = [-effect, effect] if effect else []
    parts += [f'<path d="M{_across(mark, reach):.1f} 0V34" class="effect"/>' for mark in marks]
    parts.append(f'<path d="M{_across(0, reach):.1f} 0V34" class="axis"/>')
    colour = {"better": "var(--good)", "worse": "var(--bad)"}.get(verdict, "var(--text)")
    low, high = (difference.get(end, math.nan) for end in ("low", "high"))
    if _all(low, high):
        left, right = _across(low, reach), _across(high, reach)
        path = f"M{left:.1f} 8v8M{left:.1f} 12H{right:.1f}M{right:.1f} 8v8"
        parts.append(f'<path d="{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
    parts.append(_dot(_across(difference["estimate"], reach), 12, 5, f'fill="{colour}"', said))
    for seed, value in dots:
        parts.append(_dot(_across(value, reach), 26, 2.5, 'class="seed"', f"seed {seed}: {signed(value)}"))
    return _svg("".join(parts), WIDTH, 34, said)


def _scale(reach: float) -> Markup:
    parts = [f'<path d="M{MARGIN} 1H{WIDTH - MARGIN}" class="grid"/>']
    for tick in ticks(-reach, reach):
        if abs(tick) <= reach:
            x = _across(tick, reach)
            text = f"{tick:+g}" if tick else "0"
            parts.append(f'<path d="M{x:.1f} 1v4" class="grid"/>')
            parts.append(f'<text x="{x:.1f}" y="17" text-anchor="middle">{text}</text>')
    return _svg("".join(parts), WIDTH, 22, "scale of the differences")


# -------------------------------------------------------------------------------------------------------- every seed


def seed_plot(result: Result) -> Markup:
    """An arm a strip: a dot for every seed, the mean with its interval below; lines join the dots of one seed."""
    metric, arms = result["metric"], result["arms"]
    values = {
        name: {s: v[metric] for s, v in arm["seeds"].items() if is_number(v.get(metric))} for name, arm in arms.items()
    }
    means = {name: arm["mean"].get(metric) or {} for name, arm in arms.items()}
    ends = [v for seeds in values.values() for v in seeds.values()]
    if not ends:
        return Markup("")
    ends += [m[end] for m in means.values() for end in ("low", "high") if is_number(m.get(end))]
    marks, percent = _marks(ends, metric.partition("[")[0] in SUCCESS)
    height = STRIP * len(arms) + 26

    def x(value: float) -> float:
        return MARGIN + 8 + (value - marks[0]) / (marks[-1] - marks[0]) * (WIDTH - 2 * MARGIN - 16)

    parts = []
    for mark in marks:
        parts.append(f'<path d="M{x(mark):.1f} 4V{height - 22}" class="grid"/>')
        parts.append(f'<text x="{x(mark):.1f}" y="{height - 6}" text-anchor="middle">{rate(mark, percent)}</text>')
    parts += _joined(values, x)
    for i, name in enumerate(arms):
        top, colour = STRIP * i, f"var(--c{i % COLOURS})"
        parts.append(_label(2, top + 13, name))
        parts += [
            _dot(x(v), top + DOTS, 4, f'fill="{colour}" class="ring"', f"{name}, seed {s}: {v:.3f}")
            for s, v in values[name].items()
        ]
        if is_number(means[name].get("estimate")):
            parts.append(_mean(x, top + DOTS + 11, means[name], colour, name))
    return _svg("".join(parts), WIDTH, height, f"{metric} of every training seed")


def _joined(values: Mapping[str, Mapping[str, float]], x: Any) -> list[str]:
    """A line from arm to the next arm that has the same seed."""
    parts = []
    for seed in dict.fromkeys(s for seeds in values.values() for s in seeds):
        places = [(x(seeds[seed]), STRIP * i + DOTS) for i, seeds in enumerate(values.values()) if seed in seeds]
        if len(places) > 1:
            path = "L".join(f"{left:.1f} {top}" for left, top in places)
            parts.append(f'<path d="M{path}" class="pairing"/>')
    return parts


def _mean(x: Any, y: int, mean: Mapping[str, Any], colour: str, name: str) -> str:
    middle, said = x(mean["estimate"]), escape(plain(f"{name}, mean over seeds: {interval(mean)}"))
    path = f"M{middle:.1f} {y - 4}v8"
    if is_number(mean.get("low")) and is_number(mean.get("high")):
        path += f"M{x(mean['low']):.1f} {y}H{x(mean['high']):.1f}"
    return f'<path d="{path}" stroke="{colour}" stroke-width="2" fill="none"><title>{said}</title></path>'


# ------------------------------------------------------------------------------------------------------------ curves


def curves(result: Result) -> list[tuple[str, Markup]]:
    """(what x counts, picture) of training success: interquartile mean over seeds with its band, as it is, unsmoothed."""
    found = []
    for axis, name in AXES.items():
        lines = {arm: line for arm, line in (result["curves"].get(axis) or {}).items() if line and _any(line["iqm"])}
        if lines:
            last = max(x for line in lines.values() for x in line["x"] if is_number(x))
            unit = 60 if axis == "seconds" and last >= MINUTES_FROM else 1
            name = name.replace("seconds", "minutes") if unit > 1 else name
            found.append((name, _curves(list(result["arms"]), lines, unit, name)))
    return found


def _curves(arms: Sequence[str], lines: Mapping[str, Mapping[str, Any]], unit: int, name: str) -> Markup:
    ys = [v for line in lines.values() for end in ("iqm", "low", "high") for v in line[end] if is_number(v)]
    xs = [x / unit for line in lines.values() for x in line["x"] if is_number(x)]
    marks, percent = _marks(ys, share=True)
    frame = Frame(min(xs), max(xs), marks[0], marks[-1], SMALL)
    parts = []
    for mark in marks:
        y = frame.y(mark)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{frame.right}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{rate(mark, percent)}</text>')
    for mark in ticks(frame.x0, frame.x1):
        if frame.x0 <= mark <= frame.x1:
            place = f'x="{frame.x(mark):.1f}" y="{frame.bottom + 18}"'
            parts.append(f'<text {place} text-anchor="middle">{number(mark)}</text>')
    numbered = [(i, arm, [x / unit for x in lines[arm]["x"]], lines[arm]) for i, arm in enumerate(arms) if arm in lines]
    parts += [_band(frame, i, x, line) for i, _, x, line in numbered]
    parts += [_curve(frame, i, arm, x, line, name) for i, arm, x, line in numbered]
    return _svg("".join(parts), *SMALL, f"training success against {name}")


def _band(frame: Frame, i: int, x: Sequence[float], line: Mapping[str, Any]) -> str:
    ends = [(a, low, high) for a, low, high in zip(x, line["low"], line["high"], strict=True) if _all(low, high)]
    edge = [*((a, high) for a, _, high in ends), *((a, low) for a, low, _ in reversed(ends))]
    corners = " ".join(f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in edge)
    return f'<polygon points="{corners}" fill="var(--c{i % COLOURS})" opacity=".15"/>' if edge else ""


def _curve(frame: Frame, i: int, arm: str, x: Sequence[float], line: Mapping[str, Any], name: str) -> str:
    """The line, broken where a value is not known, and what some of its points say."""
    points = [(a, b if is_number(b) else math.nan) for a, b in zip(x, line["iqm"], strict=True)]
    path = ""
    for before, (a, b) in pairwise([(0.0, math.nan), *points]):
        if math.isfinite(b):
            path += f"{'L' if math.isfinite(before[1]) else 'M'}{frame.x(a):.1f} {frame.y(b):.1f}"
    parts = [f'<path d="{path}" fill="none" stroke="var(--c{i % COLOURS})" stroke-width="2" {dash(i)}/>']
    for at in range(0, len(points), math.ceil(len(points) / HOVERS)):
        a, b = points[at]
        if math.isfinite(b):
            ends = {"estimate": b, "low": line["low"][at], "high": line["high"][at], "n": line.get("n")}
            said = f"{arm}, {number(a)} {name}: {interval(ends)}"
            parts.append(_dot(frame.x(a), frame.y(b), 5, 'class="point"', said))
    return "".join(parts)


def dash(i: int) -> Markup:
    """Of the i-th arm's line."""
    return Markup('stroke-dasharray="5 3"' if i % COLOURS >= SOLID else "")


# ---------------------------------------------------------------------------------------------------- who beats whom


def matrix(result: Result, pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """{"name", "cells"} of each arm against each: for more pairs than are read one by one."""
    found = {}
    for pair in pairs:
        estimate: Any = pair["difference"].get("estimate") if pair["difference"] else None
        for row, column, sign, verdict in (
            (pair["a"], pair["b"], 1, pair["verdict"]),
            (pair["b"], pair["a"], -1, TURNED.get(pair["verdict"], pair["verdict"])),
        ):
            text = signed(sign * estimate, 2) if is_number(estimate) else ""
            found[row, column] = {"mark": MARKS.get(verdict, ""), "text": text, "verdict": verdict}
    blank = {"mark": "", "text": "", "verdict": ""}
    arms = result["arms"]
    return [{"name": plain(row), "cells": [found.get((row, column), blank) for column in arms]} for row in arms]


# ------------------------------------------------------------------------------------------------------------- pieces


def interval(value: Mapping[str, Any] | None, sign: bool = False) -> str:
    """ "+0.031 [0.012, 0.050]"; why there is no interval where there is none; "-" where nothing is known."""
    if not value or not is_number(value.get("estimate")):
        return "-"
    estimate, low, high = (value.get(name, math.nan) for name in ("estimate", "low", "high"))
    digits = _digits([v for v in (estimate, low, high) if is_number(v)])
    estimate, low, high = (round(v, digits) + 0.0 if is_number(v) else v for v in (estimate, low, high))  # no "-0.000"
    text = signed(estimate, digits) if sign else f"{estimate:.{digits}f}"
    if value.get("n") == 1:
        return f"{text} (1 seed)"
    if value.get("method") in ("point", "all equal"):
        return f"{text} (all equal)"
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]" if _all(low, high) else f"{text} (no interval)"


def plain(text: Any, most: int = 0) -> str:
    """One line without control characters, which could steer a terminal; at most `most` characters, if given."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if not most or len(line) <= most else line[: most - 1] + "…"


def signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}"


def _digits(values: Sequence[float]) -> int:
    """Three for shares; fewer where hundreds are counted, more where all would be 0.000."""
    size = max(map(abs, values))
    return 1 if size >= 100 else 2 if size >= 10 else 3 if size >= 0.001 or size == 0 else 6


def rate(value: float, percent: bool) -> str:
    return f"{100 * value:.3g} %" if percent else number(value)


def _marks(values: Sequence[float], share: bool) -> tuple[list[float], bool]:
    """Round numbers around the values, and whether they are shares: those never leave 0 to 1."""
    marks = ticks(min(values), max(values))
    if share and min(values) >= 0 and max(values) <= 1:
        marks = [mark for mark in marks if 0 <= mark <= 1]
        marks = marks if len(marks) > 1 else [0.0, 0.25, 0.5, 0.75, 1.0]
    return marks, share


def _all(*values: Any) -> bool:
    return all(map(is_number, values))


def _any(values: Sequence[Any]) -> bool:
    return any(map(is_number, values))


def _dot(x: float, y: float, radius: float, style: str, said: str) -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"'
    return f"<circle {place} {style}><title>{escape(plain(said))}</title></circle>"


def _label(x: float, y: float, name: str) -> str:
    shown, whole = escape(plain(name, MOST_LABEL)), escape(plain(name))
    return f'<text x="{x:g}" y="{y:g}" class="label">{shown}<title>{whole}</title></text>'


def _svg(inside: str, width: int, height: int, label: str) -> Markup:
    return Markup(f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(plain(label))}">{inside}</svg>')
