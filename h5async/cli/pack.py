"""`h5async pack`: packs folders and files into an HDF5 file for training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from h5async.cli.options import mapping_of, takes_model
from h5async.cli.output import REFRESH_SECONDS, Json, Ray, print_json, progress_bar, safe
from h5async.config.files import home_path, with_variables
from h5async.packing.packoptions import PackOptions
from h5async.system.interruptions import suppressing

_SHOWN_BAD = 20

_Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Folders of images or audio, or .tar, .tar.gz, .parquet, .arrow, .csv, .npy, .npz.",
    ),
]
_Output = Annotated[
    str, typer.Option("--output", "-o", metavar="PATH", help="The file to write: train.h5.")
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Write nothing; estimate samples, bytes and time.")
]


@takes_model(PackOptions)
def pack(
    sources: _Sources,
    output: _Output,
    dry_run: _DryRun = False,
    as_json: Json = False,
    ray: Ray = None,
    **typed: Any,
) -> None:
    """Pack SOURCE into an HDF5 file, which readers read without options.

    Images and audio keep their encoded bytes. The folders that they lie in are their classes.
    """
    from h5async.packing.estimating import estimate
    from h5async.packing.pack import pack as pack_sources

    options = {name: value for name, value in typed.items() if value not in (None, [])}
    for name, form in (("fill", "NAME=VALUE"), ("strings", "NAME=BYTES")):
        typed_values = mapping_of(options.get(name, ()), f"--{name.removesuffix('s')}", form)
        options[name] = {key: _value(text) for key, text in typed_values.items()}
    paths = [home_path(with_variables(one)) for one in sources]
    out = Path(home_path(with_variables(output)))
    if dry_run:
        found = estimate(paths, **options)
        if as_json:
            print_json("pack", {"estimate": found._asdict()})
            return
        count = "any number of" if found.samples is None else f"{found.samples:,}"
        typer.echo(f"{count} samples, like these {found.probed:,}:")
        _print_columns(found.columns)
        if found.nbytes is not None:
            typer.echo(f"about {decimal(found.nbytes)}, in about {_duration(found.seconds or 0)}")
        return
    with progress_bar("samples, {task.fields[rate]}") as bar:
        task, shown, began = bar.add_task("", rate=""), perf_counter(), perf_counter()

        def show(done: int, count: int | None, nbytes: int) -> None:
            nonlocal shown
            now = perf_counter()
            if now - shown > REFRESH_SECONDS:
                shown = now
                rate = f"{decimal(round(nbytes / (now - began)))}/s"
                bar.update(task, completed=done, total=count, rate=rate)
                bar.refresh()

        packed = pack_sources(paths, out, progress=show, ray=ray, **options)
    if as_json:
        bad = [{"name": name, "reason": reason} for name, reason in packed.bad]
        print_json("pack", {"packed": {**packed._asdict(), "bad": bad}})
        return
    rate = f"{packed.samples / max(packed.seconds, 1e-9):,.0f} samples/s"
    size = decimal(packed.nbytes)
    typer.echo(f"{safe(packed.path)}: {packed.samples:,} samples, {size}, {rate}")
    _print_columns(packed.columns)
    if packed.converted:
        typer.echo(f"{packed.converted:,} images were converted to PNG by Pillow, as RGB")
    for note in packed.notes:
        typer.echo(safe(note), err=True)
    for name, reason in packed.bad[:_SHOWN_BAD]:
        typer.echo(f"left out: {safe(name)}: {safe(reason)}", err=True)
    if len(packed.bad) > _SHOWN_BAD:
        typer.echo(f"left out: {len(packed.bad) - _SHOWN_BAD:,} more (--json has all)", err=True)


def _value(text: str) -> object:
    """Return a number, true or false, or else the text itself."""
    with suppressing(ValueError):
        return json.loads(text)
    return text


def _print_columns(columns: Mapping[str, str]) -> None:
    width = max(map(len, columns), default=0)
    for name, text in columns.items():
        typer.echo(f"  {safe(name):<{width}}  {text}")


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.0f} h"
