"""Small charts as inline SVG: no script, no font, colours from the page's style sheet (light and dark).

Left out on purpose: zooming and panning. Every point says its numbers when the pointer rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

SMALL, WIDE = (360, 200), (540, 240)  # user units, about the pixels they get: the page scales the picture
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
MOST_POINTS = 160  # of a line: more cannot be told apart; neighbours are averaged
SMOOTH_FROM = 30  # points from which a line gets a running mean over a fifteenth of them

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """`points` are (step, value), NaN where not known. `low` and `high` (same length) draw a band around them."""

    name: str
    points: Sequence[Point]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int = 0  # index of the page's colours
    at: str = "step"  # what x counts
    dots: bool = False  # few, separate measurements with their intervals rather than a line


@dataclass(frozen=True, slots=True)
class Frame:
    """Maps data to the picture."""

    x0: float
    x1: float
    y0: float
    y1: float
    size: tuple[int, int]

    @property
    def right(self) -> float:
        return self.size[0] - RIGHT

    @property
    def bottom(self) -> float:
        return self.size[1] - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / ((self.x1 - self.x0) or 1) * (self.right - LEFT)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y0) / ((self.y1 - self.y0) or 1) * (self.bottom - TOP)


def line_chart(lines: Sequence[Line], percent: bool = False, label: str = "", size: tuple[int, int] = SMALL) -> Markup:
    """One picture; "" when no line has a finite value. With `percent`, values are shares on a fixed axis from 0 to 1."""
    thinned = [thin(line) for line in lines]
    finite = [v for line in thinned for v in (*(y for _, y in line.points), *line.low, *line.high) if math.isfinite(v)]
    if not finite:
        return Markup("")
    steps = [x for line in thinned for x, _ in line.points]
    y_ticks = [0.0, 0.25, 0.5, 0.75, 1.0] if percent else ticks(min(finite), max(finite))
    frame = Frame(min(steps), max(steps), min(y_ticks[0], *finite), max(y_ticks[-1], *finite), size)
    parts = [_grid(frame, y_ticks, percent), _steps(frame)]
    for line in thinned:
        parts.append(_dots(frame, line, percent) if line.dots else _line(frame, line, percent))
    return _svg("".join(parts), *size, label)


def _line(frame: Frame, line: Line, percent: bool) -> str:
    colour = f"var(--c{line.colour})"
    parts = []
    if line.low:
        band = [
            (x, low, high)
            for (x, _), low, high in zip(line.points, line.low, line.high, strict=True)
            if math.isfinite(low) and math.isfinite(high)
        ]
        edge = [*((x, high) for x, _, high in band), *((x, low) for x, low, _ in reversed(band))]
        corners = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in edge)
        parts.append(f'<polygon points="{corners}" fill="{colour}" opacity=".16"/>')
    smooth = len(line.points) >= SMOOTH_FROM
    parts.append(_path(frame, line.points, colour, "opacity='.4' stroke-width='1'" if smooth else "stroke-width='2'"))
    if smooth:
        parts.append(_path(frame, running_mean(line.points, len(line.points) // 15), colour, "stroke-width='2.2'"))
    for i, (x, y) in enumerate(line.points):
        if math.isfinite(y):
            parts.append(_circle(frame.x(x), frame.y(y), 'r="6" class="point"', _said(line, i, percent)))
    return "".join(parts)


def _dots(frame: Frame, line: Line, percent: bool) -> str:
    parts = []
    for i, (x, y) in enumerate(line.points):
        if not math.isfinite(y):
            continue
        at, colour = frame.x(x), f"var(--c{line.colour})"
        if line.low:
            low, high = frame.y(line.low[i]), frame.y(line.high[i])
            parts.append(f'<path d="M{at:.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(_circle(at, frame.y(y), f'r="3.5" fill="{colour}"', _said(line, i, percent)))
    return "".join(parts)


def _said(line: Line, i: int, percent: bool) -> str:
    step, value = line.points[i]
    text = f"{line.name}, {line.at} {step:g}: {number(value, percent)}"
    if line.low:
        text += f" [{number(line.low[i], percent)}, {number(line.high[i], percent)}]"
    return text


def _path(frame: Frame, points: Sequence[Point], colour: str, style: str) -> str:
    """A line that is broken where a value is not known."""
    commands, pen = [], "M"
    for x, y in points:
        if math.isfinite(y):
            commands.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}")
            pen = "L"
        else:
            pen = "M"
    return f'<path d="{"".join(commands)}" fill="none" stroke="{colour}" stroke-linejoin="round" {style}/>'


def _grid(frame: Frame, y_ticks: Sequence[float], percent: bool) -> str:
    parts = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{frame.right}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick, percent)}</text>')
    return "".join(parts)


def _steps(frame: Frame) -> str:
    marks = [tick for tick in ticks(frame.x0, frame.x1, most=6) if frame.x0 <= tick <= frame.x1 and tick == int(tick)]
    return "".join(_below(frame, frame.x(tick), "middle", tick) for tick in marks)


def _below(frame: Frame, x: float, anchor: str, step: float) -> str:
    return f'<text x="{x:.1f}" y="{frame.bottom + 18}" text-anchor="{anchor}">{number(step)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, said: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="var(--{fill})"><title>{escape(said)}</title></rect>'


def _circle(x: float, y: float, style: str, said: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" {style}><title>{escape(said)}</title></circle>'


def stacked_bars(steps: Sequence[float], counts: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> Markup:
    """Shares of the named counts per step, neighbours added up where there are too many; "" without any count."""
    if not steps or not any(any(values) for values in counts.values()):
        return Markup("")
    per_bar = math.ceil(len(steps) / 60)
    bars = range(0, len(steps), per_bar)
    frame = Frame(0, len(bars), 0, 1, WIDE)
    parts = [_grid(frame, [0, 0.25, 0.5, 0.75, 1], percent=True)]
    for i, first in enumerate(bars):
        sums = {name: sum(values[first : first + per_bar]) for name, values in counts.items()}
        total, below = sum(sums.values()), 0.0
        last = steps[min(first + per_bar, len(steps)) - 1]
        span = f"step {steps[first]:g}" if per_bar == 1 else f"steps {steps[first]:g} to {last:g}"
        for name, value in sums.items():
            if value > 0:
                share = value / total
                said = f"{name}, {span}: {value:g} of {total:g}"
                width, height = frame.x(0.85) - LEFT, frame.bottom - frame.y(share)
                parts.append(_rect(frame.x(i), frame.y(below + share), width, height, colours[name], said))
                below += share
    parts += [_below(frame, LEFT, "start", steps[0]), _below(frame, frame.right, "end", steps[-1])]
    return _svg("".join(parts), *frame.size, "outcomes per step")


def heat_map(steps: Sequence[float], rows: Mapping[str, Sequence[float]], label: str = "") -> Markup:
    """One line of cells per row, deeper where the number is larger (the other colour: below 0), empty where it is not
    known; neighbouring steps are averaged where there are too many. "" without any number."""
    per_cell = math.ceil(len(steps) / 60) if steps else 1
    cells = {
        name: [mean(values[i : i + per_cell]) for i in range(0, len(steps), per_cell)] for name, values in rows.items()
    }
    most = max((abs(v) for values in cells.values() for v in values if math.isfinite(v)), default=math.nan)
    if not math.isfinite(most):
        return Markup("")
    width, left, height = 720, 220, 16
    size = (width - left - RIGHT) / math.ceil(len(steps) / per_cell)
    parts = []
    for y, (name, values) in enumerate(cells.items()):
        short = name if len(name) <= 36 else f"{name[:35]}…"
        parts.append(f'<text x="{left - 8}" y="{y * height + 12}" text-anchor="end">{escape(short)}</text>')
        for x, value in enumerate(values):
            if math.isfinite(value):
                first, last = steps[x * per_cell], steps[min((x + 1) * per_cell, len(steps)) - 1]
                span = f"step {first:g}" if first == last else f"steps {first:g} to {last:g}"
                place = f'x="{left + x * size:.1f}" y="{y * height}" width="{size:.2f}" height="{height - 1}"'
                depth = f'fill="var(--c{0 if value >= 0 else 1})" fill-opacity="{abs(value) / (most or 1):.3f}"'
                parts.append(
                    f"<rect {place} {depth}><title>{escape(f'{name}, {span}: {number(value)}')}</title></rect>"
                )
    bottom = len(cells) * height
    for x, anchor, step in ((left, "start", steps[0]), (width - RIGHT, "end", steps[-1])):
        parts.append(f'<text x="{x}" y="{bottom + 14}" text-anchor="{anchor}">{number(step)}</text>')
    return _svg("".join(parts), width, bottom + 20, label)


def share_bar(parts: Mapping[str, float]) -> Markup:
    """One horizontal bar of shares that add up to the whole."""
    total, left, drawn = sum(parts.values()), 0.0, []
    for i, (name, value) in enumerate(parts.items()):
        if value > 0:
            width = value / total * 720
            drawn.append(_rect(left, 0, width, 26, f"c{i}", f"{name}: {number(value / total, True)}"))
            left += width
    return _svg("".join(drawn), 720, 26, "shares of time") if drawn else Markup("")


def interval_bar(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> Markup:
    """Two rates with their intervals on one axis from 0 to 1: {"success", "low", "high"} each."""
    drawn = ['<path d="M5 28H215M5 24V32M110 25V31M215 24V32" class="grid"/>']
    for rate, y, colour in ((before, 9, "var(--muted)"), (after, 19, "var(--c0)")):
        if rate:
            low, mid, high = (5 + 210 * min(max(rate[name], 0), 1) for name in ("low", "success", "high"))
            drawn.append(f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="{colour}" stroke-width="2"/>')
            drawn.append(f'<circle cx="{mid:.1f}" cy="{y}" r="4" fill="{colour}"/>')
    return _svg("".join(drawn), 220, 34, "before and after on an axis from 0 to 100 %")


def _svg(inside: str, width: int, height: int, label: str) -> Markup:
    return Markup(f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{inside}</svg>')


# ---------------------------------------------------------------------------------------------------------- numbers


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers that cover [low, high], at most `most` and a few; two of them when low equals high."""
    if not high > low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    raw = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float, percent: bool = False) -> str:
    """Short: 63 %, 0.0312, 1.5k."""
    if not math.isfinite(value):
        return str(value)
    if percent:
        return f"{100 * value:.2g} %" if 0 < abs(value) < 0.1 else f"{100 * value:.0f} %"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (size if suffix != 'k' else 1e3):.3g}{suffix}"
    return f"{value:.4g}"


def thin(line: Line) -> Line:
    """At most MOST_POINTS points, each the mean of its neighbours; dots stay as they are."""
    width = math.ceil(len(line.points) / MOST_POINTS)
    if width <= 1 or line.dots:
        return line
    groups = range(0, len(line.points), width)
    points = [
        (mean([x for x, _ in line.points[i : i + width]]), mean([y for _, y in line.points[i : i + width]]))
        for i in groups
    ]
    low = [mean(line.low[i : i + width]) for i in groups] if line.low else ()
    high = [mean(line.high[i : i + width]) for i in groups] if line.high else ()
    return Line(line.name, points, low, high, line.colour, line.at)


def running_mean(points: Sequence[Point], reach: int) -> list[Point]:
    """Mean over each point and up to `reach` known neighbours on either side; unknown points stay unknown."""
    values = [y for _, y in points]
    return [
        (x, mean(values[max(0, i - reach) : i + reach + 1]) if math.isfinite(y) else y)
        for i, (x, y) in enumerate(points)
    ]


def mean(values: Sequence[float]) -> float:
    """Of the finite values; NaN if there is none."""
    known = [v for v in values if math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan
