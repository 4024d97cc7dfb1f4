"""Writes a file, and is killed at a call of the system; what tests of writing share.

``python killing.py FOLDER ROWS FIRST STEP`` kills a child at its FIRST call, the next one STEP
calls later, until one ends; after each, others go on with the file, and are killed, too.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

import h5py
import numpy as np

from h5async.packing.chunkwriter import ChunkWriter
from h5async.packing.safefile import SafeFile

ROWS, STEP = 48, 6
VALUES = np.random.default_rng(1).integers(0, 9, (3 * ROWS, 5))
CALLS = ("pwrite", "fsync", "replace", "ftruncate", "unlink")


def write(path, rows=ROWS, threads=2, **options):
    """Write rows of several kinds, or go on with them, or append; commit every few of them."""
    with SafeFile(path, digest="rows", **options) as safe:
        if safe.is_finished:
            return
        file, begin = safe.file, rows - ROWS
        if safe.state is not None:
            begin = safe.state["rows"]
        elif not begin:
            file.create_dataset(
                "a", (0, 5), "i8", maxshape=(None, 5), chunks=(1, 5), compression="gzip"
            )
            file.create_dataset("names", (0,), h5py.string_dtype(), maxshape=(None,), chunks=(7,))
            file.create_dataset("fixed", (3 * ROWS,), "i2", chunks=(5,))
        with ChunkWriter(safe, threads=threads) as writer:
            a, names = writer.open(file["a"]), writer.open(file["names"])
            for row in range(begin, rows, STEP):
                numbers = range(row, row + STEP)
                a.write((row, 0), VALUES[row : row + STEP])
                names.write((row,), np.array([f"name {k}" * k for k in numbers], object))
                writer.call(lambda row=row: _assign(file, row))
                writer.commit({"rows": row + STEP}, now=True)
        safe.finish()


def _assign(file, row):
    file["fixed"][row : row + STEP] = np.arange(row, row + STEP)
    file.attrs["last"] = row


def assert_whole(path, rows=ROWS):
    """Assert that a file is as `write` makes it, and that nothing else is left."""
    with h5py.File(path) as file:
        assert set(file) == {"a", "names", "fixed"}
        assert file["a"][...].tolist() == VALUES[:rows].tolist()
        assert file["names"].asstr()[...].tolist() == [f"name {k}" * k for k in range(rows)]
        assert file["fixed"][...].tolist() == [*range(rows), *[0] * (3 * ROWS - rows)]
        assert file.attrs["last"] == rows - STEP
    assert os.listdir(path.parent) == [path.name]


def strike(at):
    """Have this process killed at a call: before it, after it, or half through it."""
    count = 0

    def struck(name, call):
        def called(*arguments):
            nonlocal count
            count += 1
            if count == at:
                if name == "pwrite":
                    call(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
                elif at % 2:
                    with suppress(FileNotFoundError):
                        call(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments)

        return called

    for name in CALLS:
        setattr(os, name, struck(name, getattr(os, name)))


def in_child(*functions):
    """Call functions in a child; return whether it was not killed."""
    child = os.fork()
    if not child:
        try:
            for function in functions:
                function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status)
    return not os.WIFSIGNALED(status)


def _is_finished(path, rows):
    if path.with_name("out.h5.journal").exists() or not path.exists():
        return False
    with h5py.File(path) as file:  # maybe it was killed before it began to append
        return len(file["a"]) == rows


def main(folder, rows, at, step):
    """Kill, and go on."""
    path, options = folder / "out.h5", {"rows": rows, "append": rows > ROWS}
    original, is_over, kills = None, False, 0
    if rows > ROWS:
        write(path)
        original = path.read_bytes()
    while not is_over:
        if original is not None:
            path.write_bytes(original)
        is_over = in_child(partial(strike, at), partial(write, path, **options))
        again = 2 * at % 60 + 20  # later each time, so that there is an end
        while not is_over and not _is_finished(path, rows):
            kills += 1
            in_child(partial(strike, again), partial(write, path, resume=True, **options))
            again += 50
        assert_whole(path, rows)
        path.unlink()
        at += step
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
