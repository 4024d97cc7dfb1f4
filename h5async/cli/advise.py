"""`h5async advise`: measures other chunks and filters on a sample, and says which are best."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from rich.filesize import decimal

from h5async.cli.bench import speed_of
from h5async.cli.datasetfacts import Dataset, FarCost, far_cost, listed
from h5async.cli.options import reader_config, takes_reader
from h5async.cli.output import Json, Picture, PlotFile, counting, print_json, safe, tidy
from h5async.cli.read import stopping_by_sigterm
from h5async.config import ReaderConfig
from h5async.config.files import FileName
from h5async.errors import ConfigError, DatasetError, H5AsyncError
from h5async.index.layout import DatasetLayout
from h5async.index.metadata import list_layouts, read_layouts
from h5async.io.stores import far_names
from h5async.opening.dataset import open_dataset
from h5async.opening.filevalues import reach_of
from h5async.packing.advising import (
    DATASET,
    Finding,
    Layout,
    best_of,
    joined_layout,
    layouts_to_try,
    rows_of_sample,
    scattered,
    stored_nbytes,
    whole_layout,
    write_sample,
)
from h5async.reader.asyncreader import AsyncReader
from h5async.spelling import named, printable, shell_word
from h5async.system.resources import free_memory

ORDERS: Mapping[str, Any] = {"in order": False, "window": "window", "shuffled": "full"}
MEMORY_SHARE = 0.5  # of the free memory, that a file may stay in
_COLD_SECONDS = 0.5
_HEAD: tuple[str, ...] = (
    "samples a chunk",
    "filter",
    "on disk",
    *ORDERS,
    "cold",
    "cold, shuffled",
    *ORDERS,
)
# Options that trials take as typed.
_KEPT = (
    "batch_size",
    "num_threads",
    "prefetch",
    "window_bytes",
    "io",
    "workers",
    "allow_external",
    "allow_missing",
    "max_batch_bytes",
)
_COLOURS = ("#8c959f", "#54aeff", "#1f6feb")


class Advised(NamedTuple):
    """The results for a dataset."""

    files: Sequence[FileName]
    layout: DatasetLayout
    sample_nbytes: int
    findings: Sequence[Finding]
    requests: Sequence[FarCost | None]
    best: Finding
    order: str  # for which `best` is the best
    memory_nbytes: float


@takes_reader
def advise(
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds to read with each layout, in each order.")
    ] = 0.75,
    rounds: Annotated[int, typer.Option(min=1, help="Number of turns of each.")] = 3,
    plot: PlotFile = None,
    as_json: Json = False,
    **typed: Any,
) -> None:
    """Say which chunks and filters would be better for a dataset of FILE, and how to get them.

    It writes a sample of the rows to a temporary folder in each layout, and reads it. The dataset
    is the one of --data-field, or else the largest of the fields, or of the file if it has none of
    these. Without --shuffle window, the speed of a full shuffle decides.
    """
    config = reader_config(typed)
    picture = Picture(plot) if plot else None
    with stopping_by_sigterm():  # which removes the samples
        found = advised(config, seconds, rounds)
    if picture is not None:
        _draw(picture, found)
    if as_json:
        print_json("advise", _content(found))
        return
    typer.echo("\n".join(map(safe, _lines(found))))


def advised(config: ReaderConfig, seconds: float = 0.75, rounds: int = 3) -> Advised:
    """Measure sensible layouts for the largest dataset of a configuration."""
    if any(field.num_dim != 0 for field in config.batch_fields.values()):
        raise ConfigError(
            f"{named('num_dim')}: only datasets whose first dimension counts the samples are"
            " measured; others are slow with any chunks (h5async repack can change these)"
        )
    found = _largest(config, config.files[0])
    trial = _options(config, config.files, found.path)
    if len(config.files) > 1:
        found = joined_layout(found, open_dataset(trial).layouts[DATASET])
    with AsyncReader(trial, indices=rows_of_sample(found, in_chunks=False)) as reader:
        values = np.concatenate([batch[DATASET].copy() for batch in reader])
    with tempfile.TemporaryDirectory(prefix="h5async-") as folder:
        findings = _measured(config, found, values, Path(folder), seconds / rounds, rounds)
    memory = MEMORY_SHARE * free_memory()[0].nbytes
    order = "window" if config.shuffle == "window" else "shuffled"
    requests = [far_cost(whole_layout(found, one.layout, one.stored_nbytes)) for one in findings]
    best = best_of(findings, order, memory)
    return Advised(config.files, found, values.nbytes, findings, requests, best, order, memory)


def _largest(config: ReaderConfig, file: FileName) -> DatasetLayout:
    """Return the dataset that was named, or the largest of the fields, or else of the file."""
    reach = reach_of(config)
    every = {one.path: one for one in listed(file, reach, [])}
    fields, typed = config.batch_fields, config.model_fields_set
    if "data_field" in typed:
        fields = {"data": fields["data"]}
    paths = [one.path.strip("/") for one in fields.values()]
    chosen = [every[path] for path in paths if path in every]
    if not chosen and typed & {"fields", "data_field"}:
        read_layouts(file, fields, reach)  # raises an error that names them
    chosen = chosen or list(every.values())
    groups = [one.path for one in every.values() if one.kind == "sparse"]
    good = [one for one in chosen if not _why_not(one, groups)]
    if not good:
        reasons = "; ".join(f"{one.path}: {_why_not(one, groups)}" for one in chosen)
        raise DatasetError(f"{file}: no dataset of equal rows to advise on ({reasons or 'none'})")
    path = max(good, key=lambda one: one.nbytes or 0).path
    layouts = list_layouts(file, reach, wanted=lambda name: name == path)
    found = next(layout for _, layout in layouts)
    if isinstance(found, H5AsyncError):
        raise found
    return found


def _why_not(one: Dataset, groups: Sequence[str]) -> str:
    """Say why other layouts of a dataset cannot be measured; "" if they can."""
    if one.read == "refused":
        return one.reason or ""
    if one.kind != "dataset" or any(one.path.startswith(f"{group}/") for group in groups):
        kind = "sparse" if one.kind == "dataset" else one.kind
        return f"{kind} rows, which h5async repack stores in chunks of their values"
    if not one.samples or not one.nbytes:
        return "it has no values"
    return ""


def _options(config: ReaderConfig, files: Sequence[FileName], path: str) -> ReaderConfig:
    """Return the options for reading a dataset."""
    kept = {name: getattr(config, name) for name in _KEPT if name in config.model_fields_set}
    return ReaderConfig(hdf5_path=list(files), fields={DATASET: path}, device="cpu", **kept)


class Trial(NamedTuple):
    """A layout to measure: the options to read it, and their changes for each order."""

    finding: Finding
    config: ReaderConfig
    changes: Mapping[str, Mapping[str, Any]]


def _measured(
    config: ReaderConfig,
    found: DatasetLayout,
    values: NDArray[Any],
    folder: Path,
    seconds: float,
    rounds: int,
) -> list[Finding]:
    """Return the size and the speeds of each layout; all of them take turns."""
    layouts, trials = layouts_to_try(found), list[Trial]()
    with counting("measured") as show:
        turns = len(layouts) * (1 + rounds)
        for number, layout in enumerate(layouts):
            show(number, turns)
            trials.append(trial_of(config, found, values, folder, layout))
        for number, (one, trial, changes) in enumerate(trials * rounds, len(layouts)):
            show(number, turns)
            for name, changed in changes.items():
                speed = samples_per_second(trial, changed, seconds, found.row_nbytes)
                one.speeds.setdefault(name, []).append(speed)
    return [trial.finding for trial in trials]


def trial_of(
    config: ReaderConfig,
    found: DatasetLayout,
    values: NDArray[Any],
    folder: Path,
    layout: Layout,
) -> Trial:
    """Write a sample, unless it is there; read it once from the disk, and once from memory."""
    one, rows, indices = Finding(layout, found.stored_nbytes), np.arange(len(values)), {}
    if layout.is_current and not far_names(config.files):
        trial = _options(config, config.files, found.path)
        rows = rows_of_sample(found, in_chunks=True)
        if rows.size < found.num_samples:
            indices = {"indices": rows}
    else:
        path = write_sample(folder, values, layout)
        trial = _options(config, [path], DATASET)
        if not layout.is_current:
            one.stored_nbytes = stored_nbytes(path) * found.num_samples / len(values)
    changes = {name: {"shuffle": order, **indices} for name, order in ORDERS.items()}
    batches = scattered(rows, max(1, layout.rows), found.num_samples, trial.batch_size)
    if batches is not None:
        changes["shuffled"] = {"sampler": batches}
    for name in ("in order", "shuffled"):
        one.cold[name] = _cold_speed(trial, changes[name])
    _epoch(trial, changes["in order"], math.inf)
    return Trial(one, trial, changes)


def samples_per_second(
    config: ReaderConfig, changed: Mapping[str, Any], seconds: float, row_nbytes: int
) -> float:
    """Return the samples per second that are read in an order, measured for some seconds.

    In a window, only first epochs are read, whole unless that takes 8 times as long: the first
    batches cost more, and later epochs of a small sample find its chunks decoded.
    """
    if changed.get("shuffle") != "window":
        return speed_of(config, changed, seconds) / row_nbytes
    samples, spent = 0, 0.0
    while spent <= seconds:
        count, taken = _epoch(config, changed, 8.0 * seconds - spent)
        samples, spent = samples + count, spent + taken
    return samples / spent


def _cold_speed(config: ReaderConfig, changed: Mapping[str, Any]) -> float:
    """Return the samples per second of an epoch, or its beginning, that is not in memory."""
    if hasattr(os, "posix_fadvise"):
        for name in config.files:
            with open(name, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    samples, seconds = _epoch(config, changed, _COLD_SECONDS)
    return samples / seconds


def _epoch(
    config: ReaderConfig, changed: Mapping[str, Any], most_seconds: float
) -> tuple[int, float]:
    """Read a first epoch, or its beginning; return the number of samples, and the seconds."""
    samples = 0
    with AsyncReader(config, **changed) as reader:
        begin = perf_counter()
        for batch in reader:
            samples += batch.size
            if perf_counter() - begin > most_seconds:
                break
        return samples, perf_counter() - begin


# --- text -----------------------------------------------------------------------------------------


def _lines(found: Advised) -> Iterator[str]:
    layout, best = found.layout, found.best
    shape = f"{layout.dtype} {layout.shape}"
    yield f"{_named(found)}: {layout.path}, {shape}, {decimal(layout.row_nbytes)} a sample"
    yield f"measured on {decimal(found.sample_nbytes)} of it; samples a second:"
    yield ""
    yield from _table(found)
    yield ""
    now = next(one for one in found.findings if one.layout.is_current)
    if best is now:
        yield f"best ({found.order}): as it is"
        return
    faster = _speed(found, best) / _speed(found, now)
    size = best.stored_nbytes / max(1.0, now.stored_nbytes)
    yield f"best ({found.order}): {faster:.3g} times as fast as now, {size:.2f} times the size:"
    yield f"  {_command(found)}"


def _named(found: Advised) -> str:
    others = len(found.files) - 1
    return f"{found.files[0]}{f' and {others} more' if others else ''}"


def _speed(found: Advised, one: Finding) -> float:
    return one.speed(found.order, found.memory_nbytes)


def _table(found: Advised) -> Iterator[str]:
    rows = [_HEAD, *(_cells(found, n) for n in range(len(found.findings)))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    asked = sum(widths[: -len(ORDERS)]) + 2 * (len(widths) - len(ORDERS))
    yield " " * asked + "requests a sample in a store"
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _cells(found: Advised, number: int) -> tuple[str, ...]:
    one, far = found.findings[number], found.requests[number]
    warm = [f"{one.warm(name):,.0f}" for name in ORDERS]
    cold = [f"{speed:,.0f}" for speed in one.cold.values()]
    asked = ("-",) * len(ORDERS)
    if far is not None:
        asked = tuple(f"{each.count:.3g}" for each in (far.in_order, far.window, far.full))
    rows = f"{one.layout.rows:,}" if one.layout.rows else "not chunked"
    return (
        rows + _mark(found, one),
        one.layout.filter,
        decimal(round(one.stored_nbytes)),
        *warm,
        *cold,
        *asked,
    )


def _mark(found: Advised, one: Finding) -> str:
    return " (now)" * one.layout.is_current + " (best)" * (one is found.best)


def _command(found: Advised) -> str:
    files, layout = found.files, found.best.layout
    name = PurePosixPath(str(files[0])).name if far_names(files) else files[0]
    path = Path(name)
    output = path.with_name(f"{path.stem}-repacked{path.suffix}")
    words = ["h5async", "repack", *map(str, files), "-o", str(output)]
    words += ["--fields", found.layout.path]
    words += ["--chunk-samples", str(layout.rows), "--filter", layout.filter]
    return " ".join(map(shell_word, words))


def _content(found: Advised) -> dict[str, Any]:
    return {
        "file": found.files[0],
        "files": found.files,
        "dataset": found.layout.path,
        "samples": found.layout.num_samples,
        "row_nbytes": found.layout.row_nbytes,
        "sample_nbytes": found.sample_nbytes,
        "order": found.order,
        "memory_nbytes": int(found.memory_nbytes),
        "layouts": [
            {
                "chunk_samples": one.layout.rows,
                "filter": one.layout.filter,
                "is_current": one.layout.is_current,
                "is_best": one is found.best,
                "stored_nbytes": round(one.stored_nbytes),
                "samples_per_second": {name: one.warm(name) for name in ORDERS},
                "cold_samples_per_second": one.cold,
                "requests": far,
            }
            for one, far in zip(found.findings, found.requests, strict=True)
        ],
        "command": None if found.best.layout.is_current else printable(_command(found)),
    }


def _draw(picture: Picture, found: Advised) -> None:
    """Draw the speeds, by order, and the sizes of all layouts."""
    several = found.findings
    names = [f"{one.layout.rows or '-'}, {one.layout.filter}{_mark(found, one)}" for one in several]
    picture.figure.set_size_inches(11, 2 + 0.42 * len(several))
    picture.figure.suptitle(f"h5async advise: {_named(found)}: {found.layout.path}", fontsize=11)
    speeds, sizes = picture.figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
    places = np.arange(len(several))
    for number, name in enumerate(ORDERS):
        values = [one.warm(name) for one in several]
        at = places + 0.27 * (number - 1)
        speeds.barh(at, values, height=0.25, color=_COLOURS[number], label=name)
    sizes.barh(places, [one.stored_nbytes / 1e9 for one in several], height=0.6, color=_COLOURS[2])
    speeds.set_yticks(places, names)
    speeds.invert_yaxis()
    speeds.set_xscale("log")
    speeds.set_xlabel("samples a second")
    sizes.set_xlabel("GB on disk")
    speeds.legend(fontsize=8)
    tidy(speeds, "Speed, by chunks and filter")
    tidy(sizes, "Size")
    picture.write()
