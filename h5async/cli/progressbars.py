"""Shows progress bars on a terminal, without a thread, which would take the GIL from readers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from h5async.opening.dataset import on_indexed

REFRESH_SECONDS = 0.1
_PATIENCE_SECONDS = 2.0  # before a bar for indexing is shown


def progress_bar(counted: str, console: Console | None = None) -> Progress:
    """Return a bar for stderr, shown if that is a terminal.

    `counted` names the things counted, and may have fields of a task, such as
    ``{task.description}``.
    """
    console = Console(stderr=True) if console is None else console
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(counted),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


@contextmanager
def opening(console: Console | None = None) -> Iterator[None]:
    """Show the number of indexed files if opening a reader inside takes a while."""
    began = shown = perf_counter()
    progress = progress_bar("files indexed", console)
    task = progress.add_task("")

    def show(done: int, count: int) -> None:
        nonlocal shown
        now = perf_counter()
        if done == count:
            progress.stop()
            return
        if now - began < _PATIENCE_SECONDS or now - shown < REFRESH_SECONDS:
            return
        shown = now
        progress.start()  # extra calls are harmless
        progress.update(task, completed=done, total=count)
        progress.refresh()

    token = on_indexed.set(show)
    try:
        yield
    finally:
        on_indexed.reset(token)
        progress.stop()
