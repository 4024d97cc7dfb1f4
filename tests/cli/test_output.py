"""Output that cannot be written, and files that cannot be opened."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

import pytest
from conftest import reader_of
from typer.testing import CliRunner

from h5async import (
    AsyncReader,
    ConfigError,
    ReadError,
    cli,
)

SCRIPT = os.path.join(sysconfig.get_path("scripts"), "h5async")
SECONDS = 60  # for a subprocess


def run(code, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


COMMANDS = [
    "inspect file.h5",
    "read file.h5",
    "bench file.h5 --seconds 0.05",
    "--help",
    "--version",
    "read --help",
]


def shell(command, folder):
    path = f"{os.path.dirname(SCRIPT)}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("command", COMMANDS)
def test_output_that_cannot_be_written(plain, command):
    result = shell(f"h5async {command} > /dev/full", plain.parent)
    assert result.returncode == 1
    assert result.stderr == "error: the output cannot be written: No space left on device\n"
    result = shell(f"h5async {command} > /dev/full 2>&1", plain.parent)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_output_that_nobody_reads(plain, command):
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as nobody:
        result = subprocess.run(
            [SCRIPT, *command.split()],
            cwd=plain.parent,
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
        )
    assert (result.returncode, result.stderr) == (1, "")
    assert shell(f"h5async {command} | head -1", plain.parent).stderr == ""


def test_other_errors_of_the_system_are_none_of_the_outputs(monkeypatch):
    def fail():
        raise OSError(12, "another error")

    monkeypatch.setattr("typer.echo", lambda *_, **__: fail())
    result = CliRunner().invoke(cli.app, ["--version"])
    assert isinstance(result.exception, OSError)
    assert "another error" in str(result.exception)


AS_NOBODY = """
import os, sys
from h5async import AsyncReader, H5AsyncError, cli
try:
    AsyncReader(hdf5_path="/there/is/none.h5", device="cpu")  # what is loaded late, is now
except H5AsyncError:
    pass
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    AsyncReader(hdf5_path=sys.argv[1], device="cpu")
except H5AsyncError as error:
    print(type(error).__name__, error)
sys.argv = ["h5async", sys.argv[2], sys.argv[1]]
cli.app()
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "read"])
def test_a_folder_that_may_not_be_entered(plain, command):
    # In one that anybody may enter.
    folder = plain.parent / "closed"
    folder.mkdir()
    (folder / "file.h5").write_bytes(plain.read_bytes())
    folder.chmod(0)
    try:
        result = run(AS_NOBODY, folder / "file.h5", command)
    finally:
        folder.chmod(0o700)
    message = f"cannot open {folder / 'file.h5'}: Permission denied"
    assert result.stdout == f"ReadError {message}\n", result.stderr
    assert (result.returncode, result.stderr) == (1, f"error: {message}\n")


@pytest.mark.parametrize("number", [13, 5, 116])
def test_a_file_that_cannot_be_looked_at(plain, monkeypatch, number):
    stat = os.stat

    def failing(path, *others, **options):
        if str(path) == str(plain):
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, *others, **options)

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(ReadError) as caught:
        reader_of(plain)
    assert str(caught.value) == f"cannot open {plain}: {os.strerror(number)}"


@pytest.mark.parametrize("name", ["a" * 300, "a" * 300 + "*", "a" * 5000])
def test_names_of_files_that_are_too_long(tmp_path, name):
    with pytest.raises(ReadError, match=r"File name too long|no file matches"):
        reader_of(tmp_path / name)
    with pytest.raises(ConfigError, match="File name too long"):
        AsyncReader(str(tmp_path / name))
    result = CliRunner().invoke(cli.app, ["inspect", str(tmp_path / name)])
    assert result.exit_code == 1
    what = "no file matches" if name.endswith("*") else "cannot open"
    assert result.stderr.startswith(f"error: {what} ")
