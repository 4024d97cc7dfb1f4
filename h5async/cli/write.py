"""Commands that write: `h5async index`, `stats`, `pack` and `repack`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.filesize import decimal

from h5async.cli.options import (
    reader_config,
    spell_in_shell,
    takes,
    takes_reader,
    typed_options,
)
from h5async.cli.output import Json, Ray, counting, opening, print_json, resolved, safe
from h5async.config import ReaderConfig
from h5async.config.files import INDEX_SUFFIX
from h5async.config.statistics import FieldStatistics
from h5async.errors import ConfigError, H5AsyncError
from h5async.index.indexcache import cache_folder, clear_cache
from h5async.index.savedfile import NotPortableError
from h5async.index.savedindex import write_index
from h5async.io.metadatafile import opening_ahead
from h5async.io.stores import far_names
from h5async.measure.statistics import QUANTILES, statistics
from h5async.opening.fieldkinds import index_files
from h5async.opening.filevalues import reach_of
from h5async.packing.writeoptions import PackOptions, RepackOptions
from h5async.samples.fieldkind import AUDIO, CATEGORIES, IMAGE, NULLABLE, SHAPE, TEXTS
from h5async.system.interruptions import suppressing

# Kinds of entries other than the layouts of datasets.
_FACTS = (SHAPE, TEXTS, CATEGORIES, NULLABLE, IMAGE, AUDIO)

_Indexed = Annotated[
    list[str] | None, typer.Argument(metavar="FILES...", help="HDF5 files, or globs.")
]
_Index = Annotated[
    str | None, typer.Option("--output", "-o", metavar="INDEX", help="The index: train.h5idx.")
]
_Clear = Annotated[bool, typer.Option("--clear", help="Empty the user's cache folder of indices.")]


@takes(
    ReaderConfig,
    ["fields", "num_dim", "sequences", "io", "allow_external", "allow_missing", "storage_options"],
)
def index(
    files: _Indexed = None,
    output: _Index = None,
    clear: _Clear = False,
    as_json: Json = False,
    ray: Ray = None,
    **typed: Any,
) -> None:
    """Save an index of FILES, which `hdf5_path` takes instead of them.

    It has all datasets of the files, by their first dimension; with --field, only these. If readers
    use groups as sequences, give the same --sequences here.
    """
    if bool(files) != (output is not None) or not (files or clear):
        raise typer.BadParameter("give FILES, and -o INDEX", param_hint="FILES")
    if output is not None and Path(resolved(output)).suffix != INDEX_SUFFIX:
        raise ConfigError(f"the name of a saved index ends in {INDEX_SUFFIX}, found {output!r}")
    cleared = _clear() if clear else None
    if cleared is not None and not as_json:
        removed = f"removed {cleared['entries']:,} entries, {decimal(cleared['nbytes'])}"
        no_home = "there is no cache folder, because there is no home directory"
        typer.echo(f"{safe(cleared['folder'])}: {removed}" if cleared["folder"] else no_home)
    if not files or output is None:
        if as_json:
            print_json("index", {"index": None, "left_out": [], "cleared": cleared})
        return
    path = Path(resolved(output))
    config = _config(files, typed)
    reach = reach_of(config)
    refused: list[H5AsyncError] = []
    with opening(), opening_ahead(far_names(config.files)):
        found = list(index_files(config, reach, refused, ray=ray))
    left_out = [error.spelled(spell_in_shell) for error in refused]
    datasets = sum(
        len({one.path for one in file.layouts if one.kind not in _FACTS}) for file in found
    )
    try:
        write_index(path, found, reach)
    except NotPortableError as error:
        raise H5AsyncError(f"{path} cannot be made: it cannot hold {error}") from error
    except OSError as error:
        raise H5AsyncError(f"cannot write {path}: {error.strerror or error}") from error
    nbytes = path.stat().st_size
    if as_json:
        made = {"path": path, "files": len(found), "datasets": datasets, "nbytes": nbytes}
        print_json("index", {"index": made, "left_out": left_out, "cleared": cleared})
        return
    typer.echo(f"{safe(path)}: {len(found):,} files, {datasets:,} datasets, {decimal(nbytes)}")
    if left_out:
        more = f", and {len(left_out) - 1:,} more" if len(left_out) > 1 else ""
        typer.echo(f"left out, because no reader can read it: {safe(left_out[0])}{more}", err=True)


def _config(files: Sequence[str], typed: Mapping[str, Any]) -> ReaderConfig:
    given = typed_options({**typed, "hdf5_path": files})
    if "fields" in given:
        num_dim = given.pop("num_dim", 0)
        given["fields"] = {
            name: {"path": field, "num_dim": num_dim} if isinstance(field, str) else field
            for name, field in given["fields"].items()
        }
    return ReaderConfig.load(given)


def _clear() -> dict[str, Any]:
    """Empty the user's cache folder; return what was removed."""
    folder = cache_folder()
    try:
        entries, nbytes = (0, 0) if folder is None else clear_cache(folder)
    except OSError as error:
        raise H5AsyncError(f"cannot empty {folder}: {error.strerror or error}") from error
    return {"folder": folder, "entries": entries, "nbytes": nbytes}


# --- statistics -----------------------------------------------------------------------------------

_Saved = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="PATH", help="The file to write: JSON, or .toml."),
]
_Per = Annotated[
    str,
    typer.Option(
        metavar="channel|feature|none",
        help="Statistics of each channel, of each element of a row, or of all values together.",
    ),
]
_Quantiles = Annotated[
    list[float] | None,
    typer.Option("--quantile", metavar="Q", help="A quantile to compute, from 0 to 1. Repeatable."),
]
_SHOWN = ("mean", "std", "min", "max")
_SHOWN_GROUPS, _SHOWN_CLASSES = 4, 8


@takes_reader
def stats(
    output: _Saved = None,
    per: _Per = "channel",
    quantiles: _Quantiles = None,
    as_json: Json = False,
    ray: Ray = None,
    **typed: Any,
) -> None:
    """Compute mean, std, quantiles and frequencies of all values in FILE, and save them.

    A field takes the saved file by its option normalize. It reads each selected sample once,
    whatever the order, and regardless of normalize.
    """
    config = reader_config(typed)
    if per not in ("channel", "feature", "none"):
        raise ConfigError(f"--per must be channel, feature or none, found {per!r}")
    with opening(), counting("samples") as show:
        found = statistics(
            config,
            per=None if per == "none" else per,  # type: ignore[arg-type]
            quantiles=quantiles or QUANTILES,
            progress=show,
            ray=ray,
        )
    if output is not None:
        found.save(resolved(output))
    if as_json:
        content = found.as_dict()
        del content["schema"]
        print_json("stats", {"output": output, **content})
        return
    for name, one in found.items():
        typer.echo(f"{safe(name)}: {safe(one.path)}, {one.dtype}, {_amount(one)}")
        for label, text in _lines(one):
            typer.echo(f"  {label:<8}{safe(text)}")
    if output is not None:
        typer.echo(f"written to {safe(Path(output))}")


def _amount(one: FieldStatistics) -> str:
    if one.count is None:
        return "no numbers"
    nan = 0 if one.nan is None else int(one.nan.sum())
    text = f"{int(one.count.sum()):,} values" + (f", {nan:,} NaN" if nan else "")
    if one.per == "channel" and one.count.ndim:
        where = "channels" if one.channel_dim is None else f"indices of dimension {one.channel_dim}"
        text += f", for each of {one.count.size:,} {where} (--per none: of all together)"
    return text


def _lines(one: FieldStatistics) -> list[tuple[str, str]]:
    """Return the lines to show for a field, as labels and texts."""
    several = {name: getattr(one, name) for name in _SHOWN}
    several |= {f"q {q}": values for q, values in (one.quantiles or {}).items()}
    lines = []
    for label, values in several.items():
        if values is not None:
            flat = np.ravel(values)
            more = f" and {flat.size - _SHOWN_GROUPS:,} more" if flat.size > _SHOWN_GROUPS else ""
            lines.append((label, " ".join(f"{v:.6g}" for v in flat[:_SHOWN_GROUPS]) + more))
    if one.frequencies:
        most = sorted(one.frequencies.items(), key=lambda pair: -pair[1])
        more = f" and {len(most) - _SHOWN_CLASSES:,} more" if len(most) > _SHOWN_CLASSES else ""
        text = ", ".join(f"{name}: {count:,}" for name, count in most[:_SHOWN_CLASSES])
        lines.append(("classes", text + more))
    return lines


# --- files ----------------------------------------------------------------------------------------

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


@takes(PackOptions)
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
    (*paths, out), began = map(resolved, [*sources, output]), perf_counter()
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
    with counting("samples, ") as show:

        def tell(done: int, count: int | None, nbytes: int) -> None:
            show(done, count, lambda: f"{decimal(round(nbytes / (perf_counter() - began)))}/s")

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


@takes(RepackOptions)
def repack(
    files: _Files,
    output: _Repacked,
    dry_run: _DryRun = False,
    as_json: Json = False,
    ray: Ray = None,
    **typed: Any,
) -> None:
    """Write IN anew, with other chunks, filters or samples; several files become one.

    All else stays: groups, attributes, links, references, dimension scales, datatypes. Chunks that
    need no change are copied as they are stored.
    """
    from h5async.packing.newfiles import repack

    options = typed_options(typed, RepackOptions)
    if "fields" in options:
        options["fields"] = [path for one in options["fields"] for path in one.split(",")]
    *paths, out = map(resolved, [*files, output])
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
