"""The command line: arguments enter, text for people leaves.

Tables and figures go to stdout, errors to stderr. Nothing is read or decided here: `inspect` prints
the index, `read` and `bench` run an `AsyncReader`. An `H5AsyncError` ends a command with a message
and exit code 1.
"""

from h5async.cli.main import app

__all__ = ["app"]
