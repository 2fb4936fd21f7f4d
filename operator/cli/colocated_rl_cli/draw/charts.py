"""Draw charts as HTML with inline SVG: no script, no external resource, readable on a phone and by a screen reader.

Shapes are drawn in a box of 100 by 100 that stretches to the available space; text is HTML beside it, so it keeps its
size on every screen. Colours are custom properties of the page's style, for light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Number = float | int


@dataclass(frozen=True)
class Series:
    """Holds a line of points; `spread` is half the height of a bar at each point, such as a standard error."""

    name: str
    colour: str  # name of a custom property, without dashes
    points: Sequence[tuple[Number, Number]]
    spread: Sequence[Number] = ()
    dots: bool = False


@dataclass(frozen=True)
class Bar:
    """Marks part of a row; start and end are in the unit of the axis."""

    start: Number
    end: Number
    colour: str
    title: str


@dataclass(frozen=True)
class ChartRow:
    """Holds a named row of bars."""

    name: str
    bars: Sequence[Bar]


def line_chart(
    series: Sequence[Series], *, label: str, across: str, unit: str, lines: Sequence[tuple[float, str]] = ()
) -> str:
    """Draw curves from 0 to 1 over steps. label: describes the chart in words. lines: levels with a name."""
    right = max((x for one in series for x, _ in one.points), default=1) or 1
    shapes = [f'<path class="grid" d="M0 {100 - 100 * y:.2f}H100"/>' for y in (0, 0.25, 0.5, 0.75, 1)]
    shapes += [
        f'<path class="level" d="M0 {100 - 100 * y:.2f}H100"><title>{escape(name)}</title></path>' for y, name in lines
    ]
    for one in series:
        places = [(100 * x / right, 100 - 100 * y) for x, y in one.points]
        path = "L".join(f"{x:.2f} {y:.2f}" for x, y in places)
        shapes.append(f'<path class="line" style="stroke:var(--{one.colour})" d="M{path}"/>' if places else "")
        for (x, y), half in zip(places, one.spread, strict=False):
            low, high = y + 100 * half, y - 100 * half
            shapes.append(
                f'<path class="spread" style="stroke:var(--{one.colour})" d="M{x:.2f} {low:.2f}V{high:.2f}"/>'
            )
        for (x, y), (step, value) in zip(places, one.points, strict=True):
            if one.dots:
                shapes.append(
                    f'<path class="dot" style="stroke:var(--{one.colour})" d="M{x:.2f} {y:.2f}h.001">'
                    f"<title>{escape(one.name)}, {escape(across)} {step}: {value:.3f}</title></path>"
                )
    names = "".join(f"<li>{_swatch(one.colour)}{escape(one.name)}</li>" for one in series)
    names += "".join(f'<li><i class="dash"></i>{escape(name)}</li>' for _, name in lines)
    across_ticks = "".join(_tick("left", 100 * x / right, f"{x:g}") for x in _ticks(right, least=1))
    up_ticks = "".join(_tick("bottom", 100 * y, f"{y:g}") for y in (0, 0.25, 0.5, 0.75, 1))
    return (
        f'<figure><ul class="key">{names}</ul><div class="plot"><div class="up" aria-hidden="true">{up_ticks}</div>'
        f"{_svg(shapes, label, 'tall')}"
        f'<div class="across" aria-hidden="true">{across_ticks}</div></div>'
        f'<p class="unit">across: {escape(across)} &nbsp; up: {escape(unit)}</p></figure>'
    )


def row_chart(
    rows: Sequence[ChartRow], *, label: str, key: Sequence[tuple[str, str]], unit: str, parted: bool = False
) -> str:
    """Draw bars along a common axis that begins at 0, one row for each name.

    key: colour and meaning. parted: leave a gap between bars, also between those of one colour.
    """
    right = max((bar.end for row in rows for bar in row.bars), default=1) or 1
    parts, kind = [], "flat parted" if parted else "flat"
    for row in rows:
        shapes = [
            f'<rect x="{100 * bar.start / right:.3f}" width="{100 * (bar.end - bar.start) / right:.3f}" height="100" '
            f'style="fill:var(--{bar.colour})"><title>{escape(bar.title)}</title></rect>'
            for bar in row.bars
        ]
        parts.append(f'<div class="name">{escape(row.name)}</div>{_svg(shapes, f"{row.name}: {label}", kind)}')
    names = "".join(f"<li>{_swatch(colour)}{escape(name)}</li>" for colour, name in key)
    ticks = "".join(_tick("left", 100 * x / right, f"{x:g}") for x in _ticks(right))
    return (
        f'<figure><ul class="key">{names}</ul><div class="rows">{"".join(parts)}'
        f'<div class="name"></div><div class="across" aria-hidden="true">{ticks}</div></div>'
        f'<p class="unit">across: {escape(unit)}</p></figure>'
    )


def bar_table(rows: Sequence[tuple[str, Number, str, str]], *, heading: tuple[str, str]) -> str:
    """Draw a table whose second column is a bar with its text. rows: name, length of the bar, text, colour."""
    most = max((value for _, value, _, _ in rows), default=0) or 1
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="bar"><i style="width:{100 * value / most:.1f}%;'
        f'background:var(--{colour})"></i><span>{escape(text)}</span></td></tr>'
        for name, value, text, colour in rows
    )
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in heading)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def table(rows: Sequence[Sequence[str]], *, heading: Sequence[str]) -> str:
    """Draw a table of text; the first cell of each row is its name."""
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in heading)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _svg(shapes: Sequence[str], label: str, kind: str) -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join(shapes)}</svg>"
    )


def _swatch(colour: str) -> str:
    return f'<i style="background:var(--{colour})"></i>'


def _tick(side: str, place: float, text: str) -> str:
    return f'<span style="{side}:{place:.2f}%">{text}</span>'


def _ticks(right: Number, *, least: float = 0.0) -> list[float]:
    """Return at most seven round numbers from 0 to `right`, at least `least` apart."""
    for unit in (10.0**power * factor for power in range(-4, 9) for factor in (1, 2, 5)):
        if right / unit <= 6 and unit >= least:
            return [unit * count for count in range(int(right / unit + 1e-9) + 1)]
    return [0.0]
