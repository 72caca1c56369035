"""The command line: each command parses, calls one function and shows what it returned.

With --json a command writes exactly one JSON document to standard output and nothing else; what
it shows otherwise goes there as a table, progress and errors to standard error. Exit status: 0
fine, 1 the command found something wrong, 2 it could not do its work.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .tiers.errors import TierError

# Nothing heavier is imported here: `rootcellar --help` must not wait for torch.

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Measure one part, next to the raw calls it makes.")
app.add_typer(bench, name="bench")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
StoreDir = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a store.")]
Progress = Callable[[int, int], None]
"""Called with (done, total) as work goes on."""

_REDRAW_S = 0.1


def main() -> None:
    """Entry point: an error the user can mend is one line on standard error and exit status 2."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # cleans up
    try:
        app()
    except (TierError, ValueError, OSError) as error:
        print(f"rootcellar: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """A tiered KV-cache store for LLM inference."""
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="Path or name of a model; else a small random one.")
    ] = None,
    sessions: Annotated[
        Path | None, typer.Option(help='JSON lines of {"input": ...}; else conversations of ours.')
    ] = None,
    hbm_tokens: Annotated[
        int | None, typer.Option(help="Tokens the HBM pool holds; else a quarter of the workload.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Directory of the store, kept; else a temporary one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve conversations from HBM, DRAM and NVMe, next to the same model without a cache.

    Exit status 1 if any token differs.
    """
    with _quiet_stdout(as_json):
        if as_json:
            from .bench.demo import run

            report = run(model, sessions, hbm_tokens, store)
        else:
            from rich.console import Console

            from .bench.demo_view import run_live

            report = run_live(Console(), model, sessions, hbm_tokens, store)
    if as_json:
        _print_json(report)
    _exit_unless(report["outputs_identical"] and report["restart"]["outputs_identical"])


@bench.command("hit-latency")
def bench_hit_latency(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where to put what is read; removed again.")
    ] = Path(),
    rounds: Annotated[
        int | None, typer.Option(help="How often each is measured, in turns with the others.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small and rough: does it work?")] = False,
    as_json: AsJson = False,
) -> None:
    """DRAM hit, NVMe hit and miss, next to a memcpy and raw reads of the same bytes."""
    with _quiet_stdout(as_json), _progress("measuring", as_json) as progress:
        from .bench import hit_latency as program

        size = program.QUICK if quick else program.FULL
        result = program.run(
            directory,
            rounds=size.rounds if rounds is None else rounds,
            round_bytes=size.round_bytes,
            round_chunks=size.round_chunks,
            progress=progress,
        )
    _show(result, program.table, as_json)


@bench.command("radix")
def bench_radix(as_json: AsJson = False) -> None:
    """Match, insert and evict in the HBM tree, and bytes per node."""
    with _quiet_stdout(as_json):
        from .bench import radix as program

        result = program.run()
    _show(result, program.table, as_json)


@bench.command("device")
def bench_device(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="On the drive to read hits from; left as it is.")
    ] = Path(),
    minutes: Annotated[
        float, typer.Option(help="About how long; fewer rounds are measured in fewer minutes.")
    ] = 8.0,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Small and on the CPU: does all of it run?")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Kernels, link, decode beside write-down, and hits on a GPU, each next to its target.

    Exit status 1 if a section failed or a byte differed. With --json, each section is also a line
    on standard error as it ends: a crash in one loses none before it.
    """
    with _quiet_stdout(as_json), _progress("measuring", as_json) as progress:
        from .bench import device_check as program

        document = program.run(
            directory,
            minutes=minutes,
            dry_run=dry_run,
            seed=seed,
            command=["rootcellar", *sys.argv[1:]],
            progress=progress,
            ended=(lambda row: print(json.dumps(row), file=sys.stderr)) if as_json else None,
        )
    _show(document, program.table, as_json)
    _exit_unless(not document["num_failed"])


@bench.command("vllm-scheduler")
def bench_vllm_scheduler(
    rounds: Annotated[int, typer.Option(help="Prompts per block size.")] = 5,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens in each prompt.")] = 32_768,
    as_json: AsJson = False,
) -> None:
    """What the connector costs vLLM's scheduler, next to its hashing; where vLLM is installed."""
    with _quiet_stdout(as_json):
        from .bench import vllm_scheduler as program

        result = program.run(rounds, prompt_tokens)
    _show(result, program.table, as_json)


@app.command()
def tune(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Files of requests; see the README.")
    ],
    model: Annotated[
        str, typer.Option(help="Whose KV: a preset, a config.json, or the folder of a model.")
    ] = "llama-3.1-8b",
    kv_dtype: Annotated[str, typer.Option(help="Of the KV; auto for the model's own.")] = "auto",
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="Of the machine times are estimated for; repeat."),
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(help="DRAM as a share of the trace's distinct chunks; repeat."),
    ] = None,
    nvme_share: Annotated[
        list[float] | None, typer.Option(help="NVMe below each --share; repeat.")
    ] = None,
    hbm: Annotated[
        str, typer.Option(help='What engines cache in HBM, such as "40GiB": counts as DRAM.')
    ] = "0",
    dram: Annotated[str, typer.Option(help='Size of DRAM, such as "256GiB".')] = "0",
    nvme: Annotated[str, typer.Option(help="Size of NVMe below it.")] = "0",
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Shares from 1 to 50 %; so, too, if no size is given."),
    ] = False,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="default, lru, opt or another; repeat. These three unless given."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="How often to draw what a trace does not say: when sessions start.")
    ] = 1,
    write_budget: Annotated[
        str | None,
        typer.Option(help='Of the default policy: NVMe writes per reference ("0.15"), or "1DWPD".'),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report there, one HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """How much cache, and which policy, for the requests in a trace."""
    with _quiet_stdout(as_json), _progress("replaying", as_json) as progress:
        from .bench.tune import ask as program

        document = program.run(
            traces,
            model=model,
            kv_dtype=kv_dtype,
            device=device or (),
            shares=share or (),
            nvme_shares=nvme_share or (),
            hbm=hbm,
            dram=dram,
            nvme=nvme,
            sweep=sweep,
            policies=policy or (),
            seeds=seeds,
            write_budget=write_budget,
            out=out,
            command=["rootcellar", *sys.argv[1:]],
            progress=progress,
        )
    if as_json or out is None:
        _show(document, program.view, as_json)
    else:
        print(f"{document['advice']}\n\nThe report is in {out}.")


@app.command()
def size(
    model: Annotated[
        str, typer.Option(help="A preset, a config.json, or the folder of a model.")
    ] = "llama-3.1-8b",
    kv_dtype: Annotated[str, typer.Option(help="Of the KV; auto for the model's own.")] = "auto",
    gpu_gb: Annotated[float, typer.Option(help="HBM of each GPU in GiB.")] = 80.0,
    gpus: Annotated[int, typer.Option(help="Of one tensor-parallel group.")] = 1,
    dram: Annotated[str, typer.Option(help="DRAM for chunks.")] = "64GiB",
    nvme: Annotated[str, typer.Option(help="NVMe for chunks.")] = "1TiB",
    concurrency: Annotated[int, typer.Option(help="Sequences of the running batch.")] = 32,
    context: Annotated[int, typer.Option(help="Tokens of each.")] = 8192,
    as_json: AsJson = False,
) -> None:
    """How much KV a model makes, and how many tokens of it each tier holds."""
    from .bench.tune import size as program

    result = program.run(
        model,
        kv_dtype=kv_dtype,
        gpu_gb=gpu_gb,
        gpus=gpus,
        dram=dram,
        nvme=nvme,
        concurrency=concurrency,
        context=context,
    )
    _show(result, program.table, as_json)


@app.command()
def inspect(directory: StoreDir, as_json: AsJson = False) -> None:
    """What is in a store, by namespace: chunks, bytes, age, hits."""
    from .tiers import inspect as program

    _show(program.inspect_store(directory), program.table, as_json)


@app.command()
def verify(
    directory: StoreDir,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop what is bad and what hangs from it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read and check every chunk of a store; exit status 1 if any is bad, repaired or not."""
    from .tiers import verify as program

    with _progress("verifying", as_json) as progress:
        result = program.verify_store(directory, repair=repair, progress=progress)
    _show(result, program.table, as_json)
    _exit_unless(not result["bad"])


@app.command()
def doctor(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where a store would live.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """What of this machine the store can use, and what to change.

    Exit status 1 if the store cannot work here.
    """
    with _quiet_stdout(as_json):
        from .bench import doctor as program

        result = program.run(directory)
    _show(result, program.table, as_json)
    _exit_unless(not result["num_bad"])


@contextmanager
def _quiet_stdout(as_json: bool) -> Iterator[None]:
    """With --json, what libraries print goes to standard error: the document stands alone."""
    if not as_json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def _progress(what: str, as_json: bool) -> Iterator[Progress]:
    """A progress bar on standard error, only where that is a terminal and --json was not given.

    Drawn by the caller's thread: a drawing thread would take the interpreter lock from a benchmark.
    """
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    hidden = as_json or not console.is_terminal
    with Bar(console=console, disable=hidden, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what)
        drawn_s = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal drawn_s
            due = time.monotonic() - drawn_s > _REDRAW_S
            drawn_s = time.monotonic() if due else drawn_s
            bar.update(task, completed=done, total=total, refresh=due)

        yield progress


def _show(result: dict[str, Any], table: Callable[[Any], Any], as_json: bool) -> None:
    if as_json:
        _print_json(result)
        return
    from rich.console import Console

    Console().print(table(result))


def _print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result, indent=2, allow_nan=False))


def _exit_unless(fine: bool) -> None:
    if not fine:
        raise typer.Exit(1)
