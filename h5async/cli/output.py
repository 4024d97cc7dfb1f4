"""Outputs results of commands: JSON documents, text safe to print, progress bars, pictures.

Progress bars have no thread, which would take the GIL from readers.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from h5async.cli.options import spell_in_shell
from h5async.config.files import FileName, home_path, with_variables
from h5async.errors import ConfigError, needs_package
from h5async.observe.stats import ReaderStats, reader_sentence
from h5async.opening.fieldkinds import on_indexed
from h5async.spelling import printable, spelled

VERSION = 1  # of all schemas: raised if a key is renamed or removed, not if one is added
REFRESH_SECONDS = 0.1
_PATIENCE_SECONDS = 2.0  # before a bar for indexing is shown

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Run as jobs on Ray: on the cluster at ADDRESS, or one that runs here, or a new one.",
    ),
]
PlotFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Draw the results with Matplotlib (.png, .svg, .pdf)."),
]


def print_json(command: str, content: Mapping[str, Any]) -> None:
    """Print a document on standard output; docs/command-line.md describes it."""
    whole = {"schema": f"h5async {command} {VERSION}", **content}
    typer.echo(json.dumps(plain(whole), indent=2, allow_nan=False))


def plain(value: Any) -> Any:
    """Convert a value to JSON types: non-finite numbers become null, paths text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {printable(str(name)): plain(one) for name, one in value.items()}
    if isinstance(value, str | Path):
        return printable(str(value))
    if isinstance(value, Sequence):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def safe(text: object) -> str:
    """Escape characters in names that could control the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in printable(str(text)))


def limit_text(stats: ReaderStats) -> str:
    """Say what limits a reader, regardless of the loop, which only reads."""
    return spelled(reader_sentence(stats), spell_in_shell)


def resolved(path: str) -> str:
    """Return a path in which ~ and variables are resolved."""
    return home_path(with_variables(path))


def files_text(paths: Sequence[FileName]) -> str:
    """Name one file, or the first and the last of several."""
    first, last = str(paths[0]), str(paths[-1])
    return first if len(paths) == 1 else f"{len(paths)} files, {first} to {last}"


@contextmanager
def counting(
    counted: str, patience_seconds: float = 0.0, console: Console | None = None
) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr, if that is a terminal, after `patience_seconds`.

    Yields a function of the number of `counted` things done, the total, and how to describe them.
    """
    console = Console(stderr=True) if console is None else console
    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{counted}{{task.description}}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task, shown = bar.add_task(""), perf_counter() + patience_seconds - REFRESH_SECONDS

    def show(done: int, count: int | None, describe: Callable[[], str] = str) -> None:
        nonlocal shown
        if (now := perf_counter()) - shown > REFRESH_SECONDS:
            shown = now
            bar.start()  # extra calls are harmless
            bar.update(task, completed=done, total=count, description=describe(), refresh=True)

    try:
        yield show
    finally:
        bar.stop()


@contextmanager
def opening(console: Console | None = None) -> Iterator[None]:
    """Show the number of indexed files if opening a reader inside takes a while."""
    with ExitStack() as stack:
        show = stack.enter_context(counting("files indexed", _PATIENCE_SECONDS, console))

        def tell(done: int, count: int) -> None:
            if done == count:
                stack.close()
            else:
                show(done, count)

        token = on_indexed.set(tell)
        try:
            yield
        finally:
            on_indexed.reset(token)


class Picture:
    """A picture to be written; made before measuring, so that errors come first.

    The suffix of `path` decides its format. Raises `MissingPackageError` without Matplotlib, and
    `ConfigError` for a missing folder or an unknown format.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(resolved(str(path)))
        with needs_package("'h5async[plot]'", "pictures (--plot)"):
            figure = importlib.import_module("matplotlib.figure")
        self._path = path
        self.figure: Any = figure.Figure(layout="constrained")
        kinds = self.figure.canvas.get_supported_filetypes()
        if path.suffix[1:].lower() not in kinds:
            raise ConfigError(
                f"--plot {path}: the name must end in one of:"
                f" {', '.join(f'.{kind}' for kind in sorted(kinds))}"
            )
        if not path.parent.is_dir():
            raise ConfigError(f"--plot {path}: there is no folder {path.parent}; make it first")

    def write(self) -> None:
        """Write the picture, or raise `ConfigError` if it cannot be written."""
        try:
            self.figure.savefig(self._path, dpi=120)
        except OSError as error:
            raise ConfigError(
                f"--plot {self._path} cannot be written: {error.strerror or error}"
            ) from error


def tidy(panel: Any, title: str) -> None:
    """Give a panel a title, and remove its top and right borders."""
    panel.set_title(title, fontsize=10, loc="left", fontweight="bold")
    panel.spines[["top", "right"]].set_visible(False)
