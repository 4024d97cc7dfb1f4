"""Runs the command line: `python -m h5async.cli`."""

from h5async.cli import app

if __name__ == "__main__":
    app(prog_name="h5async")  # the name in completion and messages
