"""`h5async bench`: reads flat out, says where the time goes, and tries what may be faster."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.filesize import decimal

from h5async import ReaderStats
from h5async.bench import Measurement, alternatives, run_flat_out
from h5async.cli.options import reader_config, takes_reader
from h5async.cli.progress import opening
from h5async.cli.text import safe

_SHOWN_SHARE = 0.001  # of the time, below which a stage is left out


@takes_reader
def bench(
    seconds: Annotated[float, typer.Option(min=0.0, help="How long to read.")] = 2.0, **typed: Any
) -> None:
    """Read FILE as fast as it goes, say where the time goes, and try what may be faster."""
    config = reader_config(typed)
    with opening():
        given = run_flat_out(config, seconds)
    typer.echo("\n".join(_breakdown(given.stats)))
    typer.echo(f"\n{safe(given.stats)}\n")
    typer.echo(_speed_line("as given", given, given))
    for changed in alternatives(config):
        found = run_flat_out(config, seconds, **changed)
        options = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        typer.echo(_speed_line(options, found, given))


def _breakdown(stats: ReaderStats) -> list[str]:
    """Say where the threads' time went: a line for each stage that took some."""
    total = stats.busy_seconds + stats.gil_wait_seconds or 1.0
    times = {**stats.stage_seconds, "GIL": stats.gil_wait_seconds}
    methods = ", ".join(f"{name}: {method}" for name, method in stats.ways.items())
    return [
        f"read by    {methods}",
        f"decoded    {decimal(stats.nbytes)} of {decimal(stats.read_nbytes)} in the file,"
        f" {stats.samples:,} samples, {stats.decoded_chunks:,} chunks",
        *(
            f"{stage:<11}{seconds:8.3f} s of threads {seconds / total:6.1%}"
            for stage, seconds in times.items()
            if seconds / total >= _SHOWN_SHARE
        ),
    ]


def _speed_line(name: str, found: Measurement, given: Measurement) -> str:
    ratio = found.speed / given.speed if given.speed else 0.0
    return f"{name:<24}{found.speed:8.3g} GB/s {ratio:7.2f}x"
