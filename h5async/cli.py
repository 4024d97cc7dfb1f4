"""A command line enters; text for people leaves: tables and figures on stdout, errors on stderr.

Nothing is read or decided here: `inspect` prints what `metadata.py` found, `read` runs an
`AsyncReader` and counts. An `H5AsyncError` of any command ends it with one message and exit
code 1.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from io import TextIOWrapper
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, get_type_hints

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from h5async import AsyncReader, H5AsyncError, ReaderConfig, ReaderStats, __version__
from h5async.bench import Trial, alternatives, run_flat_out
from h5async.core.binding import load_core
from h5async.index.cost import read_cost
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach
from h5async.index.metadata import list_layouts
from h5async.names import printable
from h5async.read.executors import method_of

_REFRESH_SECONDS = 0.1
_BLOCK_SECONDS = 0.5  # for which rows may be held back that could be printed with others
_STACKED_COLUMNS = (
    ("dataset",),
    ("shape", "dtype"),
    ("layout", "chunks", "filters"),
    ("on disk", "decoded"),
    ("in order", "shuffled"),
    ("read",),
)
_RIGHT = frozenset({"decoded", "on disk", "in order", "shuffled"})
_LEGEND = "in order, shuffled: bytes read from the file for each sample used"

_SHOWN_SHARE = 0.001  # of the time, below which a stage is left out

_COLUMNS = tuple(name for names in _STACKED_COLUMNS for name in names)


class _Group(TyperGroup):
    """The commands, with one way to report what the library refuses."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run a command; where nobody takes its output, end in peace (a pipe) or with a message."""
        if isinstance(sys.stdout, TextIOWrapper):  # names may hold what the terminal cannot show
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            try:
                return super().main(*arguments, **options)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except OSError as error:
            reason = _output_error()
            if reason is None:  # something else failed
                raise
            if reason.errno != errno.EPIPE:
                text = f"the output cannot be written: {reason.strerror}"
                with contextlib.suppress(OSError):
                    _print_error(text)
            raise SystemExit(1) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except H5AsyncError as error:
            _print_error("\n".join(map(_safe, str(error).splitlines())))
            raise typer.Exit(1) from None


def _print_error(message: str) -> None:
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {message}", err=True)


def _output_error() -> OSError | None:
    """Return why nothing can be written to standard output, if so; then it takes all in silence."""
    if sys.stdout is None:
        return None
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # else the interpreter would try again in its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # names and messages hold brackets; its panels break long messages
)


def _option(name: str, text: str, *, metavar: str | None = None, unset: str = "") -> Any:
    """Declare an option of `ReaderConfig`; `unset` says what an empty default means.

    Its value is None where the user did not type it, and the default is only shown: passed on,
    it would override a configuration file.
    """
    default = ReaderConfig.model_fields[name].default
    shown = unset if default is None or default is False or default == () else str(default)
    text = f"{text} [default: {shown}]" if shown else text
    return typer.Option(help=text, metavar=metavar, show_default=False)


_ALLOW_EXTERNAL = _option(
    "allow_external",
    "Other files may be read below it, wherever FILE lies. Repeatable.",
    metavar="DIRECTORY",
    unset="none",
)
_ALLOW_MISSING = _option(
    "allow_missing", "What is missing of a virtual dataset has its fill value.", unset="no"
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"h5async {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    """Minibatches from HDF5 for training loops."""


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The HDF5 file.")],
    allow_external: Annotated[list[Path] | None, _ALLOW_EXTERNAL] = None,
    allow_missing: Annotated[bool, _ALLOW_MISSING] = False,
) -> None:
    """List the datasets of FILE, how each is stored and read, and what a sample costs."""
    reach = Reach(tuple(allow_external or ()), allow_missing)
    listing = _Listing()
    for name, found in list_layouts(file, reach):
        listing.add(tuple(_safe(cell) for cell in _cells(file, name, found)))
    listing.print()
    typer.echo(f"\n{_LEGEND}" if listing.has_begun else f"{_safe(file)} holds no datasets")


class _Listing:
    """A table that is printed in pieces, as its rows come; columns get only wider.

    Attributes
    ----------
    has_begun
        Whether anything was printed.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._rows: list[Sequence[str]] = []
        self._widths = [cell_len(name) for name in _COLUMNS]
        self._console = Console(highlight=False)
        self._since = 0.0

    def add(self, row: Sequence[str]) -> None:
        """Take a row, which may be printed somewhat later, for the sake of even columns."""
        if not self._rows:
            self._since = perf_counter()
        self._rows.append(row)
        if perf_counter() - self._since > _BLOCK_SECONDS:
            self.print()

    def print(self) -> None:
        """Print the rows that were not printed yet."""
        if not self._rows:
            return
        for row in self._rows:
            self._widths = [max(n, cell_len(c)) for n, c in zip(self._widths, row, strict=True)]
        console, width = self._console, sum(self._widths) + 2 * (len(_COLUMNS) - 1)
        if console.is_terminal and width > console.width:
            with console.capture() as capture:
                console.print(_stacked(self._rows))
            typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))
        else:
            head = () if self.has_begun else (self._line(_COLUMNS), _rule(width))
            typer.echo("\n".join([*head, *map(self._line, self._rows)]))
        self.has_begun = True
        self._rows.clear()

    def _line(self, row: Sequence[str]) -> str:
        cells = []
        for name, cell, width in zip(_COLUMNS, row, self._widths, strict=True):
            space = " " * (width - cell_len(cell))
            cells.append(space + cell if name in _RIGHT else cell + space)
        return "  ".join(cells).rstrip()


def _rule(width: int) -> str:
    try:
        "─".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return "-" * width
    return "─" * width


def _stacked(rows: Sequence[Sequence[str]]) -> Table:
    """Lay rows out for a narrow terminal: columns have several of `_COLUMNS`, one below another."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), show_lines=True)
    for names in _STACKED_COLUMNS:
        right = not _RIGHT.isdisjoint(names)
        table.add_column("\n".join(names), overflow="fold", justify="right" if right else "left")
    for row in rows:
        cell = dict(zip(_COLUMNS, row, strict=True))
        stacks = ([cell[name] for name in names if cell[name] != "-"] for names in _STACKED_COLUMNS)
        table.add_row(*(Text("\n".join(stack) or "-") for stack in stacks))
    return table


def _cells(file: Path, name: str, found: DatasetLayout | H5AsyncError) -> Sequence[str]:
    """Return the cells of a dataset's row, in the order of `_COLUMNS`."""
    if isinstance(found, H5AsyncError):
        reason = str(found).removeprefix(printable(f'{file}: dataset "{name}"')).lstrip(":, ")
        return name, *("-" for _ in _COLUMNS[2:]), f"refused: {reason}"
    cost = read_cost(found)
    return (
        name,
        str(found.shape),
        str(found.dtype),
        found.storage,
        str(found.chunk_shape) if found.chunk_shape else "-",
        "+".join(entry.label for entry in found.filters) or "-",
        decimal(found.stored_nbytes),
        decimal(found.nbytes),
        decimal(round(cost.in_order)),
        decimal(round(cost.shuffled)),
        _way(found),
    )


def _way(layout: DatasetLayout) -> str:
    if layout.fallback_reason is not None:
        return f"h5py: {layout.fallback_reason}"
    ways = {method_of(load_core(), source) for source in layout.leaves()}
    by = ", by the core" if ways == {"core"} else ", in Python" if "python" in ways else ""
    sources = len({(source.file, source.path) for source in layout.leaves()})
    return f"direct{by}, from {sources} sources" if sources > 1 else f"direct{by}"


def _safe(text: object) -> str:
    """Escape the characters by which a name in a file could steer the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in printable(str(text)))


_FILES = typer.Argument(
    metavar="FILE...", help="The HDF5 file, or several as one dataset; may be left to --config."
)
_CONFIG = typer.Option(metavar="TOML", help="File of options; those typed here win.")
_FIELD = typer.Option(
    "--field",
    metavar="NAME=PATH",
    help="A field of the batches and its dataset, instead of data and labels. Repeatable.",
)
_SHUFFLE = _option("shuffle", "Order of the samples.", metavar="full|window|none", unset="none")
_IO = _option("io", "Whether files are mapped into memory.", metavar="auto|pread|map")
_DROP_LAST = _option("drop_last", "Leave out an epoch's short last batch.", unset="no")
_THREADS = _option("num_threads", "Threads; 0: all work in the caller.", unset="usable cores")
_DEVICE = _option("device", "Where batches go.", metavar="auto|cpu|cuda|cuda:N")
_POSTPROCESS = _option("postprocess", "Called on every batch.", metavar="MODULE:FUNCTION")
_DECODE = _option("decode", "Where chunks are decoded for a GPU.", metavar="auto|host|device")
_CACHE = _option("cache", "Keep all rows for later epochs.", metavar="host|device", unset="no")
_CACHE_BYTES = _option("cache_bytes", "What the cache may take.", unset="a share of the memory")
_WORLD_SIZE = _option("world_size", "Processes that share the work.", unset="the launcher's")
_PIN = _option("pin_memory", "Keep batches on the host, pinned (PyTorch).", unset="no")
_MAX_BYTES = _option("max_batch_bytes", "What all slots may take.", unset="half of what is free")
_LIFETIMES = _option("debug_lifetimes", "Catch batches that are used too late.", unset="no")
_TIMEOUT = _option("timeout", "Seconds to wait for a batch.", unset="no limit")


@app.command()
def read(
    ctx: typer.Context,
    hdf5_path: Annotated[list[Path] | None, _FILES] = None,
    config: Annotated[Path | None, _CONFIG] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often to read everything.")] = 1,
    data_field: Annotated[str | None, _option("data_field", "Dataset of the data.")] = None,
    labels_field: Annotated[str | None, _option("labels_field", "Dataset of the labels.")] = None,
    no_labels: Annotated[bool, typer.Option("--no-labels", help="Read no labels.")] = False,
    fields: Annotated[list[str] | None, _FIELD] = None,
    num_dim: Annotated[int | None, _option("num_dim", "Dimension of the samples.")] = None,
    h_dim: Annotated[int | None, _option("h_dim", "Dimension of an image's height.")] = None,
    w_dim: Annotated[int | None, _option("w_dim", "Dimension of an image's width.")] = None,
    cha_dim: Annotated[int | None, _option("cha_dim", "Dimension of the channels.")] = None,
    batch_size: Annotated[int | None, _option("batch_size", "Samples in a batch.")] = None,
    shuffle: Annotated[str | None, _SHUFFLE] = None,
    window_bytes: Annotated[int | None, _option("window_bytes", "Memory for the window.")] = None,
    seed: Annotated[int | None, _option("seed", "What the shuffled order depends on.")] = None,
    drop_last: Annotated[bool | None, _DROP_LAST] = None,
    num_threads: Annotated[int | None, _THREADS] = None,
    workers: Annotated[str | None, _option("workers", "Where the threads live.")] = None,
    prefetch: Annotated[int | None, _option("prefetch", "Preallocated batches.")] = None,
    device: Annotated[str | None, _DEVICE] = None,
    pin_memory: Annotated[bool | None, _PIN] = None,
    postprocess: Annotated[str | None, _POSTPROCESS] = None,
    timeout: Annotated[float | None, _TIMEOUT] = None,
    max_batch_bytes: Annotated[int | None, _MAX_BYTES] = None,
    decode: Annotated[str | None, _DECODE] = None,
    cache: Annotated[str | None, _CACHE] = None,
    cache_bytes: Annotated[int | None, _CACHE_BYTES] = None,
    debug_lifetimes: Annotated[bool | None, _LIFETIMES] = None,
    rank: Annotated[int | None, _option("rank", "Which of them.", unset="the launcher's")] = None,
    world_size: Annotated[int | None, _WORLD_SIZE] = None,
    io: Annotated[str | None, _IO] = None,
    allow_external: Annotated[list[Path] | None, _ALLOW_EXTERNAL] = None,
    allow_missing: Annotated[bool | None, _ALLOW_MISSING] = None,
) -> None:
    """Read FILE in batches, and say how fast that was."""
    with AsyncReader(_reader_config(ctx.params)) as reader:
        tally = _stream(reader, epochs)
        typer.echo(_summary(reader, epochs, tally))


def bench(ctx: typer.Context, seconds: float, **_: Any) -> None:
    """Read FILE as fast as it goes, say where the time goes, and try what may be faster."""
    config = _reader_config(ctx.params)
    given = run_flat_out(config, seconds)
    typer.echo("\n".join(_breakdown(given.stats)))
    typer.echo(f"\n{_safe(given.stats)}\n")
    typer.echo(_speed_line("as given", given, given))
    for changed in alternatives(config):
        trial = run_flat_out(config, seconds, **changed)
        options = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        typer.echo(_speed_line(options, trial, given))


def _with_options_of_read(function: Any, **others: Any) -> Any:
    """Let a command take what `read` takes, but `epochs`, and others."""
    taken = signature(read)
    options = {name: p for name, p in taken.parameters.items() if name != "epochs"}
    for name, annotation in others.items():
        options[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=2.0, annotation=annotation)
    hints = get_type_hints(read, include_extras=True)
    parameters = [
        p.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints.get(name, p.annotation))
        for name, p in options.items()
    ]
    function.__signature__ = taken.replace(parameters=parameters)
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


_SECONDS = Annotated[float, typer.Option(min=0.0, help="How long to read.")]


app.command(name="bench")(_with_options_of_read(bench, seconds=_SECONDS))


def _breakdown(stats: ReaderStats) -> list[str]:
    """Say where the threads' time went: a line for each stage that took some."""
    total = stats.busy_seconds + stats.gil_wait_seconds or 1.0
    times = {**stats.stage_seconds, "GIL": stats.gil_wait_seconds}
    ways = ", ".join(f"{name}: {way}" for name, way in stats.ways.items())
    return [
        f"read by    {ways}",
        f"decoded    {decimal(stats.nbytes)} of {decimal(stats.read_nbytes)} in the file,"
        f" {stats.samples:,} samples, {stats.decoded_chunks:,} chunks",
        *(
            f"{stage:<11}{seconds:8.3f} s of threads {seconds / total:6.1%}"
            for stage, seconds in times.items()
            if seconds / total >= _SHOWN_SHARE
        ),
    ]


def _speed_line(name: str, trial: Trial, given: Trial) -> str:
    ratio = trial.speed / given.speed if given.speed else 0.0
    return f"{name:<24}{trial.speed:8.3g} GB/s {ratio:7.2f}x"


def _reader_config(typed: Mapping[str, Any]) -> ReaderConfig:
    """Return the configuration of a command's options."""
    if not typed["hdf5_path"] and typed["config"] is None:
        raise typer.BadParameter("give it, or --config with an hdf5_path", param_hint="FILE")
    config = ReaderConfig.load(typed["config"], **_typed_options(typed))
    if config.postprocess is not None:
        sys.path.insert(0, "")  # as `python -m` has it; a script finds no modules next to the user
    return config


def _typed_options(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reader's options among the command's, as far as the user typed them."""
    options = {
        name: value
        for name, value in typed.items()
        if name in ReaderConfig.model_fields and value is not None and value not in ([], ())
    }
    if len(options.get("hdf5_path", ())) == 1:
        options["hdf5_path"] = options["hdf5_path"][0]
    if typed["no_labels"]:
        if "labels_field" in options:
            raise typer.BadParameter("not both", param_hint="--labels-field, --no-labels")
        options["labels_field"] = None
    if options.get("shuffle") == "none":
        options["shuffle"] = False
    pairs = [entry.partition("=") for entry in options.pop("fields", ())]
    if pairs:
        options["fields"] = {name: path for name, _, path in pairs}
        if not all(name and path for name, _, path in pairs):
            raise typer.BadParameter("must be NAME=PATH", param_hint="--field")
        if len(options["fields"]) < len(pairs):
            raise typer.BadParameter("two fields of one name", param_hint="--field")
    return options


@dataclass(slots=True)
class _Tally:
    """What was read so far, and how long it took."""

    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0

    @property
    def speed(self) -> str:
        """Samples and decoded bytes a second."""
        seconds = self.seconds or float("inf")
        return f"{self.samples / seconds:,.0f} samples/s, {self.nbytes / seconds / 1e9:.3g} GB/s"


def _progress() -> Progress:
    """Return a progress bar for stderr, shown where that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches, {task.description}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        auto_refresh=False,  # no thread of its own: it would take the GIL from those measured
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _stream(reader: AsyncReader, epochs: int) -> _Tally:
    """Read epochs, counting batches, bytes and the time spent waiting for them."""
    tally = _Tally()
    row_nbytes = sum(layout.row_nbytes for layout in reader.layouts.values())
    with _progress() as progress:
        task = progress.add_task(tally.speed, total=epochs * len(reader))
        began = shown = perf_counter()
        for _ in range(epochs):
            batches = iter(reader)
            while True:
                asked = perf_counter()
                batch = next(batches, None)
                now = perf_counter()
                tally.waited_seconds += now - asked
                tally.seconds = now - began
                if batch is None:
                    break
                tally.batches += 1
                tally.samples += batch.size
                tally.nbytes += batch.size * row_nbytes
                if now - shown > _REFRESH_SECONDS:
                    shown = now
                    progress.update(task, completed=tally.batches, description=tally.speed)
                    progress.refresh()
    return tally


def _files(paths: Sequence[Path]) -> str:
    first, last = str(paths[0]), str(paths[-1])
    return first if len(paths) == 1 else f"{len(paths)} files, {first} to {last}"


def _summary(reader: AsyncReader, epochs: int, tally: _Tally) -> str:
    """Say what was read, how, and how fast: a line for each thing."""
    waited = f"{tally.waited_seconds:.3f} s of {tally.seconds:.3f} s"
    share = tally.waited_seconds / tally.seconds if tally.seconds else 0.0
    lines = [
        ("file", _files(reader.config.files)),
        *(
            ("field", f'{name} = "{layout.path}" ({_way(layout)})')
            for name, layout in reader.layouts.items()
        ),
        ("epochs", f"{epochs:,}"),
        ("batches", f"{tally.batches:,}"),
        ("samples", f"{tally.samples:,}"),
        ("decoded", decimal(tally.nbytes)),
        ("device", reader.device),
        ("speed", tally.speed),
        ("waited", f"{waited} ({share:.1%}; this loop does nothing else)"),
        ("limit", str(reader.stats())),
    ]
    return "\n".join(f"{name:<9}{_safe(text)}" for name, text in lines)
