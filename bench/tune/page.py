"""The report of `rootcellar tune`: one HTML page that needs nothing else, drawn from its document.

The charts are our own SVG: a plotting library draws letters as paths and fixes colours, so its
pictures neither follow the reader's dark mode nor can be read aloud.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from .advice import advise, advise_trace
from .charts_hits import hit_curve, hits_and_writes
from .charts_time import first_token, tiers_over_time
from .choice import best_hit, choose, rated_dwpd
from .markup import Html, element, join, prose, text
from .points import (
    Document,
    Point,
    knee_of,
    points_of,
    tiers_text,
    trace_facts,
    trace_names,
)
from .rounded import count, number, seconds, share, size
from .table import cells_table, columns_explained

_TEXTS = Path(__file__).parents[1] / "texts"
_CHARTS = (hit_curve, hits_and_writes, tiers_over_time, first_token)

MAX_REASONS = 12
"""Why chunks were refused: so many reasons are listed, most frequent first."""


def render(document: Document) -> str:
    """The page, in UTF-8. Whatever is unknown (null, or not there) is left out."""
    traces = trace_names(document)
    sections = [_section(document, trace, n, len(traces)) for n, trace in enumerate(traces)]
    return Template((_TEXTS / "report.html").read_text(encoding="utf-8")).substitute(
        style=(_TEXTS / "report.css").read_text(encoding="utf-8"),
        title=text(f"Cache report: {_named_traces(traces)}"),
        made=_made(document),
        advice=prose(str(document.get("advice") or advise(document))),
        sections=join(*sections),
        table=_table(document),
        assumed=_assumed(document),
        command=text(str(document.get("command") or "rootcellar tune")),
    )


def _named_traces(traces: Sequence[str]) -> str:
    return traces[0] if len(traces) == 1 else f"{len(traces) or 'no'} traces"


def _made(document: Document) -> Html:
    """Version, model and time, on one line."""
    model = (document.get("model") or {}).get("name")
    said = [
        f"rootcellar {document['rootcellar']}" if document.get("rootcellar") else "",
        f"for {model}" if model else "",
        f"made {document['made_at']}" if document.get("made_at") else "",
    ]
    return text(" · ".join(part for part in said if part))


def _section(document: Document, trace: str, number_: int, num_traces: int) -> Html:
    """One trace: what it is, its key figures, its charts and why chunks were refused."""
    chosen = choose(points_of(document, trace))
    drawn = (chart(document, trace, f"{chart.__name__}-{number_}") for chart in _CHARTS)
    return element(
        "section",
        element("h2", trace),
        element("p", prose(_traffic(document, trace)), class_="quiet"),
        text("") if num_traces == 1 else element("p", prose(advise_trace(document, trace))),
        element("div", *_key_figures(document, trace, chosen), class_="figures"),
        element("div", *(chart for chart in drawn if chart), class_="charts"),
        _refusals(chosen),
        class_="trace",
    )


def _traffic(document: Document, trace: str) -> str:
    facts = trace_facts(document, trace)
    known = [
        (facts.get("requests"), "{} requests"),
        (facts.get("refs"), "{} chunks asked for"),
        (facts.get("distinct"), "{} of them different"),
        (facts.get("input_tokens"), "{} prompt tokens"),
    ]
    said = [form.format(count(value)) for value, form in known if value is not None]
    if facts.get("hours"):
        said.append(f"in {seconds(3600 * facts['hours'])}")
    return ", ".join(said)


def _key_figures(document: Document, trace: str, chosen: Point | None) -> Iterator[Html]:
    if chosen is not None:
        yield _big(share(chosen.hit), f"hits: {chosen.policy}, {tiers_text(chosen)}")
        if best := best_hit(document, trace, chosen):
            yield _big(share(chosen.hit / best), "of what the best possible policy would hit there")
    if knee := knee_of(document, trace):
        yield _big(
            size(knee["bytes"]), f"the knee: LRU at {share(knee['hit_share'])} of an endless cache"
        )
    if chosen is not None:
        yield from _key_costs(document, chosen)


def _key_costs(document: Document, chosen: Point) -> Iterator[Html]:
    without, cached = chosen.mean("ttft_p95_no_cache_s"), chosen.mean("ttft_p95_s")
    if without is not None and cached is not None:
        times = f"{seconds(without)} → {seconds(cached)}"
        yield _big(times, "time to first token, 95th percentile")
    daily, worn, rated = (
        chosen.mean("nvme_tb_per_day"),
        chosen.mean("nvme_dwpd"),
        rated_dwpd(document),
    )
    if chosen.nvme_bytes and daily is not None:
        wear = f", {number(worn)} drive writes a day" if worn is not None else ""
        limit = f" of {number(rated)} rated" if wear and rated else ""
        yield _big(f"{number(daily)} TB", f"written to NVMe a day{wear}{limit}")


def _big(value: str, words: str) -> Html:
    return element("p", element("strong", prose(value)), " ", element("span", prose(words)))


def _refusals(chosen: Point | None) -> Html:
    """By reason, of all seeds of the recommended point."""
    totals: dict[str, int] = {}
    for cell in chosen.cells if chosen else ():
        for reason, chunks in (cell.get("refusals") or {}).items():
            totals[reason] = totals.get(reason, 0) + int(chunks or 0)
    every = sum(totals.values())
    if chosen is None or not every:
        return text("")
    most = sorted(totals.items(), key=lambda entry: -entry[1])[:MAX_REASONS]
    entries = [
        join(element("dt", reason), element("dd", f"{count(chunks)} ({share(chunks / every)})"))
        for reason, chunks in most
        if chunks
    ]
    head = element("h3", f"Why {chosen.policy} refused chunks with {tiers_text(chosen)}")
    return join(head, element("dl", *entries, class_="facts"))


def _table(document: Document) -> Html:
    table = cells_table(document)
    if table is None:
        return element("p", "No cell was measured.")
    meaning = element(
        "details", element("summary", "What the columns mean"), columns_explained(document)
    )
    return join(table, meaning)


def _assumed(document: Document) -> Html:
    """The model, the device and how each trace was taken, every value under its name."""
    parts = []
    for title, name in (("Model", "model"), ("Device", "device")):
        values: Mapping[str, Any] = document.get(name) or {}
        if entries := [_fact(key, value) for key, value in values.items() if value is not None]:
            parts.append(_named(title, element("dl", *entries, class_="facts")))
    for trace in trace_names(document):
        notes = [
            element("li", str(note)) for note in trace_facts(document, trace).get("notes") or ()
        ]
        tokens = trace_facts(document, trace).get("chunk_tokens")
        if tokens:
            notes.insert(0, element("li", f"A chunk is {number(tokens)} tokens."))
        if notes:
            parts.append(_named(trace, element("ul", *notes)))
    return join(*parts)


def _named(title: str, content: Html) -> Html:
    return element("div", element("h3", title), content)


def _fact(name: str, value: Any) -> Html:
    whole = isinstance(value, float) and value.is_integer()
    shown = f"{value:,.0f}" if whole or type(value) is int else str(value)
    return join(element("dt", element("code", name)), element("dd", shown))
