"""`h5async pack` and `h5async repack`: write HDF5 files, of other data and of HDF5 files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from h5async.cli.options import takes_model, typed_options
from h5async.cli.output import Json, Ray, counting, print_json, safe
from h5async.config.files import home_path, with_variables
from h5async.packing.writeoptions import PackOptions, RepackOptions
from h5async.system.interruptions import suppressing

_SHOWN_BAD = 20

_Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Folders of images or audio, or .tar, .tar.gz, .parquet, .arrow, .csv, .npy, .npz.",
    ),
]
_Files = Annotated[list[str], typer.Argument(metavar="IN...", help="HDF5 files, or globs.")]
_Packed = Annotated[
    str, typer.Option("--output", "-o", metavar="PATH", help="The file to write: train.h5.")
]
_Repacked = Annotated[
    str, typer.Option("--output", "-o", metavar="OUT", help="The file to write; may be one of IN.")
]
_Estimate = Annotated[
    bool, typer.Option("--dry-run", help="Write nothing; estimate samples, bytes and time.")
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Write nothing; say what would be done.")]


@takes_model(PackOptions)
def pack(
    sources: _Sources,
    output: _Packed,
    dry_run: _Estimate = False,
    as_json: Json = False,
    ray: Ray = None,
    **typed: Any,
) -> None:
    """Pack SOURCE into an HDF5 file, which readers read without options.

    Images and audio keep their encoded bytes. The folders that they lie in are their classes.
    """
    from h5async.packing.pack import estimate
    from h5async.packing.pack import pack as pack_sources

    options = typed_options(typed, PackOptions)
    for name in {"fill", "strings"} & options.keys():
        options[name] = {column: _value(text) for column, text in options[name].items()}
    (*paths, out), began = _resolved([*sources, output]), perf_counter()
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
    with counting("samples, {task.description}") as show:

        def tell(done: int, count: int | None, nbytes: int) -> None:
            show(done, count, f"{decimal(round(nbytes / (perf_counter() - began)))}/s")

        packed = pack_sources(paths, out, progress=tell, ray=ray, **options)
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


@takes_model(RepackOptions)
def repack(
    files: _Files,
    output: _Repacked,
    dry_run: _DryRun = False,
    as_json: Json = False,
    ray: Ray = None,
    **typed: Any,
) -> None:
    """Write IN anew, with other chunks, filters or samples; several files become one.

    All else stays: groups, attributes, links, references, dimension scales, datatypes. Chunks about
    which nothing changes are copied as they are stored.
    """
    from h5async.packing.newfiles import repack

    options = typed_options(typed, RepackOptions)
    if "fields" in options:
        options["fields"] = [path for one in options["fields"] for path in one.split(",")]
    *paths, out = _resolved([*files, output])
    told = (lambda _: None) if as_json else _print_plan
    with counting("bytes") as show:
        found = repack(paths, out, dry_run=dry_run, planned=told, progress=show, ray=ray, **options)
    if as_json:
        datasets = [one._asdict() for one in found.plan.datasets]
        plan = {**found.plan._asdict(), "datasets": datasets}
        print_json("repack", {"paths": found.paths, "plan": plan})
    elif not dry_run:
        for path in found.paths:
            typer.echo(f"{safe(path)}: {decimal(path.stat().st_size)}")


def _resolved(paths: Sequence[str]) -> list[str]:
    """Return paths in which ~ and variables are resolved."""
    return [home_path(with_variables(one)) for one in paths]


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


def _print_plan(plan: Any) -> None:
    for one in plan.datasets:
        chunks = f", chunks {one.chunks}" if one.chunks else ""
        typer.echo(f"  {safe(one.path)}  {one.how}: {one.shape}{chunks}, {decimal(one.nbytes)}")
    for path, reason in plan.left_out.items():
        typer.echo(f"  {safe(path)} is left out: it {reason}")
    typer.echo(f"at most about {decimal(plan.memory_nbytes)} of rows are in memory at a time")
