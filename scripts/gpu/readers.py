"""Compares what random readers deliver with what was written: all options that matter on a GPU.

Batches are copied on the caller's stream without waiting, and looked at when the reader is closed,
so that a batch that is overwritten too early, or handed over too late, shows.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import h5py
import numpy as np
from findings import Findings, parse_options

from h5async import AsyncReader, DeviceError, Field

ROWS = 90
MAX_WRONG = 20  # readers; after a fault of the GPU there is no right one
NAMES = ("data", "labels", "floats")
DATA = {
    "as stored": Field("data"),
    "NCHW, scaled": Field("data", axes=(0, 3, 1, 2), scale=0.5),
    "axes exchanged": Field("data", axes=(0, 2, 1, 3), dtype="f4"),
    "float16": Field("data", dtype="f2"),
}
STORED: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "gzip": {"compression": "gzip"},
    "shuffle, gzip": {"compression": "gzip", "shuffle": True},
    "gzip, fletcher32": {"compression": "gzip", "fletcher32": True},
}


class Written(NamedTuple):
    """A file, and the rows of its datasets."""

    path: Path
    data: np.ndarray
    labels: np.ndarray
    floats: np.ndarray


class Case(NamedTuple):
    """A reader: its file, how images are delivered, and options."""

    file: str
    delivered: str
    options: dict[str, Any]


def write(folder: Path, name: str) -> Written:
    """Write images, labels and floats."""
    rng = np.random.default_rng(0)
    arrays = {
        "data": rng.integers(0, 255, (ROWS, 12, 10, 3), dtype=np.uint8),
        "labels": np.arange(ROWS),
        "floats": rng.normal(size=(ROWS, 7, 5)).astype("f4"),
    }
    chunk_rows = {"data": 4, "labels": 8, "floats": 3}
    path = folder / f"{name.replace(', ', '-')}.h5"
    with h5py.File(path, "w") as file:
        for field, values in arrays.items():
            options = dict(STORED[name])
            if options:
                options["chunks"] = (chunk_rows[field], *values.shape[1:])
            file.create_dataset(field, data=values, **options)
    return Written(path, *arrays.values())


def postprocess(data: np.ndarray, labels: np.ndarray, floats: np.ndarray) -> tuple[Any, ...]:
    """Return arrays whose shape depends on the batch."""
    return data[:, : 1 + int(labels[0]) % 5].astype("f4"), labels + 1, floats


def random_case(chance: random.Random, gpus: int) -> Case:
    """Return a reader's options."""
    file = chance.choice(list(STORED))
    decode = ["host", "auto", "auto", *(["device"] if "gzip" in file else [])]
    options: dict[str, Any] = {
        "batch_size": chance.choice([1, 5, 8, 16, 90, 100]),
        "prefetch": chance.choice([1, 2, 3, 4]),
        "num_threads": chance.choice([0, 1, 2, 4]),
        "shuffle": chance.choice([False, "full", "window"]),
        "drop_last": chance.choice([False, True]),
        "device": f"cuda:{chance.randrange(gpus)}",
        "decode": chance.choice(decode),
        "cache": chance.choice([None, None, "device"]),
        "debug_lifetimes": chance.random() < 0.1,
    }
    in_helpers = options["decode"] != "device" and chance.random() < 0.05
    options["workers"] = "process" if in_helpers else "thread"
    if chance.random() < 0.15:
        changed = {"postprocess": postprocess, "decode": "host", "cache": None, "workers": "thread"}
        return Case(file, "as stored", options | changed)
    return Case(file, chance.choice(list(DATA)), options)


def expected(written: Written, case: Case, index: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return what a batch has to hold."""
    data, labels, floats = written.data[index], written.labels[index], written.floats[index]
    if "postprocess" in case.options:
        return postprocess(data, labels, floats)
    if case.delivered == "NCHW, scaled":
        data = data.transpose(0, 3, 1, 2).astype("f4") * np.float32(0.5)
    elif case.delivered == "axes exchanged":
        data = data.transpose(0, 2, 1, 3).astype("f4")
    elif case.delivered == "float16":
        data = data.astype("f2")
    return data, labels, floats


def copies(written: Written, case: Case, chance: random.Random) -> list[tuple[Any, ...]]:
    """Read two epochs, left early now and then; return sample numbers and copies of batches."""
    fields = {"data": DATA[case.delivered], "labels": "labels", "floats": "floats"}
    kept = []
    with (
        cupy.cuda.Device(int(case.options["device"][-1])),
        AsyncReader(hdf5_path=written.path, fields=fields, **case.options) as reader,
        cupy.cuda.Stream(null=chance.random() < 0.5, non_blocking=True) as stream,
    ):
        for _ in range(2):
            for batch in reader:
                kept.append((batch.index, *(array.copy() for array in batch)))
                if chance.random() < 0.05:
                    break
        stream.synchronize()
    return kept


def wrong_fields(written: Written, case: Case, kept: list[tuple[Any, ...]]) -> list[str]:
    """Return which fields of which batches are not what was written."""
    wrong = []
    for number, (index, *found) in enumerate(kept):
        rights = expected(written, case, index)
        for name, array, right in zip(NAMES, found, rights, strict=True):
            if array.get().tobytes() != np.ascontiguousarray(right).tobytes():
                wrong.append(f"batch {number}, {name}")
    return wrong


def main() -> int:
    options = parse_options(__doc__, seconds=120.0, seed=1)
    findings = Findings(options.out / "readers.json")
    chance = random.Random(options.seed)
    gpus = cupy.cuda.runtime.getDeviceCount()
    end = time.monotonic() + options.seconds
    readers = refused = batches = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        files = {name: write(Path(folder), name) for name in STORED}
        while time.monotonic() < end and wrong < MAX_WRONG:
            case = random_case(chance, gpus)
            readers += 1
            try:
                kept = copies(files[case.file], case, chance)
                found = wrong_fields(files[case.file], case, kept)
            except Exception as error:  # of any kind: the next readers are tried all the same
                if isinstance(error, DeviceError) and "not possible" in str(error):
                    refused += 1
                else:
                    findings.add("errors", f"{case}: {type(error).__name__}: {error}")
                    wrong += 1
                continue
            batches += len(kept)
            if found:
                wrong += 1
                findings.add("wrong", f"{case}: {'; '.join(found[:10])}")
    findings.note("seed", options.seed)
    findings.note("readers", readers)
    findings.note("of which were refused", refused)
    findings.note("batches", batches)
    findings.note("readers with wrong batches or errors", wrong)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
