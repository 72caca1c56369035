"""The demo on a terminal: a table that grows with every request, then the totals."""

from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner

from .demo import run
from .demo_report import Row, rows_table, summary_table


def run_live(
    console: Console,
    model: str | None = None,
    sessions: Path | None = None,
    hbm_tokens: int | None = None,
    store: Path | None = None,
) -> dict[str, Any]:
    """Like run(), shown on `console` while it goes on."""
    rows: list[Row] = []
    spinner = Spinner("dots", "starting")
    live = Live(spinner, console=console, refresh_per_second=8, transient=True)

    def show() -> None:
        live.update(Group(rows_table(rows), spinner) if rows else spinner)

    def on_step(step: str) -> None:
        spinner.update(text=step)
        show()

    def on_row(row: Row) -> None:
        rows.append(row)
        show()

    with live:
        report = run(model, sessions, hbm_tokens, store, on_row, on_step)
    console.print(rows_table(rows))
    console.print()
    console.print(summary_table(report))
    for note in report["notes"]:
        console.print(f"note: {note}")
    return report
