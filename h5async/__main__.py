"""Runs the command line: `python -m h5async`."""

from h5async.cli import app

if __name__ == "__main__":
    app(prog_name="h5async")  # which completion and messages show
