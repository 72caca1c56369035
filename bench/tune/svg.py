"""The parts of a chart: scales with their ticks, a frame to draw in, markers, a figure with words.

Charts are drawn 400 units wide, so that their text is readable on a phone, where a unit is a little
less than a pixel, and in a column of a desktop, where it is a little more. Colours and dashes come
from the page's style by class: series are s0, s1, …
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10

from .markup import Html, element, join, text
from .rounded import size

WIDTH, HEIGHT = 400.0, 294.0
LEFT, RIGHT, TOP, BOTTOM = 42.0, 388.0, 60.0, 256.0
"""Where the plot's edges are; above it is room for the words of two standing lines."""

UNUSED = 32.0
"""Height of what a chart without standing lines leaves out at its top."""

Y_LABEL = "prefix hits, share of chunks asked for"

NUM_COLOURS = 6

_WORDS = 130.0
"""Room that the words of a standing line may take."""

_SHAPES = (
    "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0z",
    "M-4,-4h8v8h-8z",
    "M0,-5.2L5,3.8H-5z",
    "M0,-5.6L5,0L0,5.6L-5,0z",
    "M0,5.2L5,-3.8H-5z",
    "M-1.7,-5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
    "M0,-5.4L5.1,-1.7L3.2,4.4H-3.2L-5.1,-1.7z",
)


@dataclass(frozen=True, slots=True)
class Scale:
    """From values low..high to units from..to; what lies outside is put on the edge."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = log2(low), log2(high), log2(value)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def size_scale(low: float, high: float) -> Scale:
    """Bytes, from left to right, by powers of two; low and high are positive."""
    high = max(high, 2 * low)
    first, last = ceil(log2(low) - 1e-9), floor(log2(high) + 1e-9)
    step = max(1, ceil((last - first) / 5))
    ticks = [2.0**power for power in range(first, last + 1, step)]
    return Scale(low, high, LEFT, RIGHT, tuple((tick, size(tick)) for tick in ticks), log=True)


def share_scale(highest: float) -> Scale:
    """Fractions from 0, upwards, shown as percentages."""
    high, step = _nice(min(1.0, max(highest, 0.01)))
    ticks = tuple((n * step, f"{100 * n * step:g} %") for n in range(round(high / step) + 1))
    return Scale(0, min(1.0, high), BOTTOM, TOP, tuple(t for t in ticks if t[0] <= 1))


def plain_scale(highest: float, start: float = LEFT, stop: float = RIGHT) -> Scale:
    """Any quantity from 0, from left to right."""
    high, step = _nice(highest if highest > 0 else 1.0)
    ticks = tuple((n * step, f"{n * step:,.10g}") for n in range(round(high / step) + 1))
    return Scale(0, high, start, stop, ticks)


def time_scale(last: float) -> Scale:
    """From 0 to just where the data ends, from left to right."""
    _, step = _nice(last)
    ticks = tuple((n * step, f"{n * step:,.10g}") for n in range(int(last / step + 1e-9) + 1))
    return Scale(0, last, LEFT, RIGHT, ticks)


def axes(x: Scale, y: Scale, x_label: str, y_label: str, top: float = 0) -> Html:
    """Grid, ticks and what they count; the label of y lies at the top, to be read upright."""
    rows = [
        join(
            element("line", class_="grid", x1=LEFT, x2=RIGHT, y1=y(tick), y2=y(tick)),
            element("text", shown, class_="tick", x=LEFT - 5, y=y(tick) + 4, text_anchor="end"),
        )
        for tick, shown in y.ticks
    ]
    columns = [
        join(
            element("line", class_="grid", x1=x(tick), x2=x(tick), y1=BOTTOM, y2=BOTTOM + 4),
            element(
                "text", shown, class_="tick", x=x(tick), y=BOTTOM + 17, text_anchor=_side(x, tick)
            ),
        )
        for tick, shown in x.ticks
    ]
    names = [
        element("text", y_label, class_="axis", x=2, y=top + 13),
        element("text", x_label, class_="axis", x=RIGHT, y=HEIGHT - 4, text_anchor="end"),
    ]
    return join(*rows, *columns, *names)


def path(points: Sequence[tuple[float, float]], class_: str, closed: bool = False) -> Html:
    """A line through points, or the area inside them."""
    through = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return element("path", d=f"M{through}{'z' if closed else ''}", class_=class_)


def marker(series: int, x: float, y: float, words: str, hollow: bool = False) -> Html:
    """One point of a series, with words that a pointer over it brings up."""
    return element(
        "path",
        element("title", words),
        class_=f"mark s{series % NUM_COLOURS}{' hollow' if hollow else ''}",
        d=_SHAPES[series % len(_SHAPES)],
        transform=f"translate({x:.1f},{y:.1f})",
    )


def ring(x: float, y: float, words: str) -> Html:
    """Around the marker that is recommended."""
    return element("circle", element("title", words), class_="ring", cx=x, cy=y, r=9)


def standing_lines(lines: Sequence[tuple[float, str, str]]) -> Html:
    """At most two lines (x, words, class) over the plot's height, their words above the plot: in
    such rows and on such sides that no line runs through the other's words."""
    ordered = sorted(lines)
    right_turns = len(ordered) > 1 and ordered[-1][0] > WIDTH - _WORDS
    rows = (TOP - 10, TOP - 25) if right_turns or len(ordered) == 1 else (TOP - 25, TOP - 10)
    drawn = []
    for n, (x, words, class_) in enumerate(ordered):
        last = n == len(ordered) - 1
        leftwards = x > WIDTH - _WORDS if last else x > _WORDS
        drawn += [
            element("line", class_=class_, x1=x, x2=x, y1=rows[n] - 8, y2=BOTTOM),
            beside(x, rows[n], words, leftwards, gap=4),
        ]
    return join(*drawn)


def beside(x: float, y: float, words: str, leftwards: bool = False, gap: float = 9) -> Html:
    """Words that end before x or begin behind it."""
    at, side = (x - gap, "end") if leftwards else (x + gap, "start")
    return element("text", words, class_="label", x=at, y=y, text_anchor=side)


def key(series: int, words: str, hollow: bool = False) -> Html:
    """An entry of a legend: a marker and what it stands for."""
    return _entry(marker(series, 7, 7, words, hollow), words)


def line_key(class_: str, words: str) -> Html:
    """An entry of a legend: a line and what it stands for."""
    return _entry(element("line", class_=class_, x1=0, x2=22, y1=7, y2=7), words, 22)


def text_key(words: str) -> Html:
    """An entry of a legend that explains the others."""
    return element("li", words)


def ring_key(words: str) -> Html:
    """An entry of a legend: the ring and what it stands for."""
    return _entry(element("circle", class_="ring", cx=7, cy=7, r=6), words)


def area_key(class_: str, words: str) -> Html:
    """An entry of a legend: a filled area and what it stands for."""
    box = element("rect", class_=class_, x=0.5, y=0.5, width=13, height=13)
    return _entry(box, words)


def figure(
    name: str,
    title: str,
    description: str,
    drawing: Sequence[Html],
    legend: Sequence[Html] = (),
    top: float = 0,
    bottom: float = HEIGHT,
) -> Html:
    """A chart under its title; `name` is unique on the page. description: what it shows, in words,
    for those who do not see it."""
    picture = element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        *drawing,
        viewBox=f"0 {top:g} {WIDTH:g} {bottom - top:g}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )
    keys = element("ul", *legend, class_="legend") if legend else text("")
    return element("figure", element("figcaption", title), picture, keys)


def _entry(sign: Html, words: str, width: float = 14) -> Html:
    sign = element(
        "svg", sign, width=width, height=14, viewBox=f"0 0 {width:g} 14", aria_hidden="true"
    )
    return element("li", sign, " ", words)


def _side(x: Scale, tick: float) -> str:
    return "end" if x(tick) > RIGHT - 14 else "middle"


def _nice(highest: float) -> tuple[float, float]:
    """An end at or above `highest`, and a step that divides it into two to five parts."""
    power = 10.0 ** floor(log10(highest))
    for step in (0.2 * power, 0.5 * power, power, 2 * power, 5 * power):
        parts = ceil(highest / step - 1e-9)
        if parts <= 5:
            return parts * step, step
    return 10 * power, 2 * power
