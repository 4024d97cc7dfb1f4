"""The command line: arguments enter, text for people leaves.

Tables and figures go to stdout, errors to stderr. Nothing is read or decided here: `inspect` prints
the index, `read` and `bench` run an `AsyncReader`. An `H5AsyncError` ends a command with a message
and exit code 1.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import h5async
from h5async import H5AsyncError, ReaderConfig
from h5async.cli import advise, bench, inspect, read, write
from h5async.cli.options import spell_in_shell
from h5async.cli.output import safe
from h5async.config.frozen import hint_for

_ADDRESS = re.compile(r"auto|local|ray://.+|[^/]+:\d+")  # of a cluster; --ray takes it optionally
_UsageError: Any = typer.BadParameter.__base__  # click's, or the copy in typer


class _Group(TyperGroup):
    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run a command; if its output cannot be written, end with a message.

        There is no message if the reader of a pipe has closed it.
        """
        if isinstance(sys.stdout, TextIOWrapper):
            # Names may have characters that the terminal lacks.
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

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Add ``=auto`` to ``--ray`` without an address: the parser has no optional values."""
        pairs = itertools.zip_longest(args, args[1:], fillvalue="")
        is_bare = [one == "--ray" and not _ADDRESS.fullmatch(after) for one, after in pairs]
        typed = [f"{one}=auto" if bare else one for one, bare in zip(args, is_bare, strict=True)]
        return super().parse_args(ctx, typed)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except H5AsyncError as error:
            _print_error("\n".join(map(safe, error.spelled(spell_in_shell).splitlines())))
            raise typer.Exit(1) from None
        except _UsageError as error:
            name = getattr(error, "option_name", "")  # an unknown option
            hint = hint_for(name, list(ReaderConfig.model_fields), spell_in_shell)
            if hint is None or ctx.invoked_subcommand == "inspect":
                raise
            raise _UsageError(f"No such option: {name}; {hint}.", error.ctx) from None


def _print_error(message: str) -> None:
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {message}", err=True)


def _output_error() -> OSError | None:
    """Return the error if standard output cannot be written, and discard further output."""
    if sys.stdout is None:
        return None
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # or the interpreter would try again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # names hold brackets; panels break long messages
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"h5async {h5async.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    """Minibatches from HDF5 for training loops."""


for _command in (
    inspect.inspect,
    read.read,
    bench.bench,
    advise.advise,
    write.index,
    write.stats,
    write.pack,
    write.repack,
):
    app.command()(_command)
