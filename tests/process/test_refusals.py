"""What the system refuses a helper process, and what the messages make of it."""

from __future__ import annotations

import errno
import os
import sys

import h5py
import numpy as np
import pytest
from test_helper import (
    _leaves_no_process,  # noqa: F401  # a fixture of all tests here
    at_start,
    make,
    pid_of,
)

import h5async.process.supervisor
from h5async import AsyncReader, BatchTimeoutError, ConfigError, ReadError
from h5async.errors import OutOfMemoryError
from h5async.io.shared import SharedMemory
from h5async.process.child import refusal
from h5async.process.helper_main import MARK
from h5async.process.supervisor import Supervisor

N = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("refusals") / "data.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(N * 3).reshape(N, 3)
        file["labels"] = np.arange(N)
    return path


# --- a process -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "mode", "found", "remedy"),
    [
        ("#!/bin/sh\n", 0o644, "Permission denied", "must be executable.* noexec"),
        (None, 0, "No such file", "set sys.executable to a Python interpreter"),
        ("no program", 0o755, "Exec format error", "set sys.executable to a Python interpreter"),
    ],
)
def test_an_interpreter_that_cannot_run(path, tmp_path, monkeypatch, content, mode, found, remedy):
    program = tmp_path / "python"
    if content is not None:
        program.write_text(content)
        program.chmod(mode)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ReadError, match=rf"data\.h5: no helper .*{found}.*{remedy}") as caught:
        make(path)
    assert str(program) in str(caught.value)
    assert "ulimit" not in str(caught.value)


def test_a_path_of_modules_that_is_too_long(path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, "x" * 200_000])
    with pytest.raises(ReadError, match=r"make sys\.path or the environment shorter"):
        make(path)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EAGAIN, "ulimit -u"),
        (errno.ENOMEM, "memory free"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "whole system"),
        (errno.EPERM, "security policy"),
        (errno.EACCES, "security policy"),
    ],
)
def test_what_the_system_refuses(path, monkeypatch, number, remedy):
    def fails(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("subprocess._fork_exec", fails)
    with pytest.raises(ReadError, match=rf'{remedy}.*, or read with workers="thread"'):
        make(path)


def test_a_folder_that_cannot_be_entered():
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/closed")
    assert "folder where the reader was made" in refusal(error, "/closed")
    assert refusal(OSError(errno.EIO, "I/O error")) == "[Errno 5] I/O error"


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSYS])
def test_no_shared_memory(path, monkeypatch, number):
    def fails(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.memfd_create", fails)
    with pytest.raises(ReadError, match="no memory could be shared") as caught:
        make(path)
    assert ("ulimit -n" in str(caught.value)) == (number == errno.EMFILE)


def test_more_than_a_file_can_hold_is_no_matter_of_limits():
    memory = SharedMemory()
    with pytest.raises(OutOfMemoryError, match="make batch_size or prefetch smaller") as caught:
        memory.empty(1 << 62)
    memory.close()
    assert "ulimit -f" not in str(caught.value)


# --- the start -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_that_takes_too_long_is_named(path, monkeypatch):
    code = "import h5async.fill.filling as f, time; f.Filler.start = lambda self: time.sleep(1e6)"
    at_start(monkeypatch, code)
    await_started, seconds = Supervisor.await_started, []

    def given_up_soon(supervisor, timeout_seconds):
        """Wait for this step only a moment; the one before it may take its time."""
        seconds.append(timeout_seconds)
        monkeypatch.setattr(h5async.process.supervisor, "_STEP_SECONDS", 0.1)
        await_started(supervisor, 0.2)

    monkeypatch.setattr(Supervisor, "await_started", given_up_soon)
    with pytest.raises(BatchTimeoutError, match=r"did not start its threads within 0\.2 s"):
        make(path, timeout=200)
    assert seconds == [200]


def of_a_module(data, labels):
    return data, labels


@pytest.mark.slow
def test_postprocess_of_a_module_that_the_helper_does_not_find(path, monkeypatch):
    """It can be pickled, by its name, but not loaded."""
    at_start(monkeypatch, f"import sys; sys.modules[{of_a_module.__module__!r}] = None")
    with pytest.raises(ConfigError, match="postprocess cannot be loaded in the helper process"):
        make(path, postprocess=of_a_module)


def reads_by_itself(data, labels):
    """A reader in a helper may have a helper, too."""
    assert MARK not in os.environ
    with AsyncReader(
        hdf5_path=os.environ["H5ASYNC_TEST_PATH"], batch_size=4, device="cpu", workers="process"
    ) as reader:
        labels[:4] = -reader.get_next_batch().labels


@pytest.mark.slow
def test_a_reader_in_a_helper(path, monkeypatch):
    monkeypatch.setenv("H5ASYNC_TEST_PATH", str(path))
    with make(path, postprocess=reads_by_itself, prefetch=1) as reader:
        assert reader.get_next_batch().labels[:5].tolist() == [0, -1, -2, -3, 4]


def test_a_module_that_makes_readers_as_it_is_imported(path, tmp_path, monkeypatch):
    """Each helper would import it, and start another one."""
    code = f"""
from h5async import AsyncReader
def same(data, labels):
    return data, labels
AsyncReader(hdf5_path={str(path)!r}, workers="process", postprocess="makes_readers:same").close()
"""
    (tmp_path / "makes_readers.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="imports a module that makes readers"):
        make(path, postprocess="makes_readers:same")


# --- a new helper --------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_several_files_the_one_that_changed_is_named(path, tmp_path):
    files = [tmp_path / name for name in ("a.h5", "b.h5", "c.h5")]
    for file in files:
        file.write_bytes(path.read_bytes())
    with make(files, prefetch=1) as reader:
        reader.get_next_batch()
        (tmp_path / "new.h5").write_bytes(path.read_bytes())
        (tmp_path / "new.h5").rename(files[1])
        os.kill(pid_of(reader), 9)
        with pytest.raises(ReadError, match=r"b\.h5: this file has changed"):
            reader.get_next_batch()
