"""Measure how long opening takes, and the memory, of 10,000,000 samples of any length.

    python scripts/bench_ragged_opening.py

A process of its own opens a reader of each kind: elements of variable length, flat values with
their offsets, ends or lengths, and a sparse matrix; without an index, by an index that was kept,
and by a named one. Before that it opens a small reader, so that no imports are measured. Memory is
what it has more afterwards: `held`, `anonymous` (not mapped of files), and `peak` meanwhile,
divided by the number of samples. Times are the best of some runs; `decode_seconds` is the time that
one thread of zlib takes to decode the chunks of the dataset that says the lengths, and no more.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import h5py
import imagecodecs
import numpy as np
from bench_common import RESULTS, header, save

from h5async import AsyncReader, RaggedField

CHUNK = 65536
MOST_SECONDS, MOST_BYTES = 2.0, 12.0
WAYS = ("no index", "kept index", "named index")


def cases(folder: Path) -> dict[str, tuple[Path, Any, str]]:
    """Return, by name: the file, the field, and the dataset that says the lengths."""
    flat, vlen, csr = (folder / f"{name}.h5" for name in ("flat", "vlen", "csr"))
    found: dict[str, tuple[Path, Any, str]] = {
        "vlen": (vlen, "tokens", "tokens"),
        "vlen, gzip": (vlen, "tokens_gzip", "tokens_gzip"),
        "CSR": (csr, "X", "X/indptr"),
        "CSR, gzip": (csr, "Y", "Y/indptr"),
    }
    for kind in ("offsets", "ends", "lengths"):
        for name, suffix in ((kind, ""), (f"{kind}, gzip", "_gzip")):
            options = {"path": "tokens", "offsets": kind + suffix, "offsets_kind": kind}
            found[name] = flat, options, kind + suffix
    return found


def write(folder: Path, count: int) -> None:
    """Write the files."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, count).astype(np.uint16)
    ends = np.cumsum(lengths, dtype=np.int64)
    gzip = {"chunks": (min(CHUNK, count),), "compression": "gzip", "shuffle": True}
    with h5py.File(folder / "flat.h5", "w") as file:
        file["tokens"] = np.zeros(int(ends[-1]), np.uint8)
        offsets = np.append(0, ends)
        for name, values in (("offsets", offsets), ("ends", ends), ("lengths", lengths)):
            file[name] = values
            file.create_dataset(f"{name}_gzip", data=values, **gzip)
    with h5py.File(folder / "csr.h5", "w") as file:
        for name, more in (("X", {}), ("Y", gzip)):
            group = file.create_group(name)
            group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", (count, 100)
            group["data"] = np.zeros(int(ends[-1]), np.float32)
            group["indices"] = np.zeros(int(ends[-1]), np.int32)
            group.create_dataset("indptr", data=offsets, **more)
    write_vlen(folder / "vlen.h5", count)


def write_vlen(path: Path, count: int) -> None:
    """Write elements of variable length: h5py writes some, to which all references refer."""
    few = min(count, 200_000)
    lengths = np.random.default_rng(1).integers(0, 30, few)
    dtype = h5py.vlen_dtype(np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("few", (few,), dtype)[:] = np.array(
            [np.ones(length, np.uint8) for length in lengths], object
        )
    with h5py.File(path, "r+") as file:
        offset = file["few"].id.get_offset()
        stored = np.fromfile(path, np.uint8, few * 16, offset=offset).reshape(few, 16)
        size = min(CHUNK, count)
        for name in ("tokens", "tokens_gzip"):
            more = {"compression": "gzip"} if name == "tokens_gzip" else {}
            data = file.create_dataset(name, (count,), dtype, chunks=(size,), **more)
            for begin in range(0, count, size):
                block = stored[np.arange(begin, begin + size) % few].tobytes()
                data.id.write_direct_chunk((begin,), zlib.compress(block, 4) if more else block)


def decode_seconds(path: Path, name: str) -> float:
    """Return how long one thread takes to decode all chunks of a dataset."""
    with h5py.File(path) as file:
        data = file[name]
        if data.chunks is None or data.compression is None:
            return 0.0
        several = [
            data.id.read_direct_chunk((begin,))[1]
            for begin in range(0, data.shape[0], data.chunks[0])
        ]
        out = np.empty(data.chunks[0] * (16 if data.dtype.hasobject else data.dtype.itemsize), "u1")
    begin = time.perf_counter()
    for encoded in several:
        imagecodecs.zlib_decode(encoded, out=out)
    return time.perf_counter() - begin


def memory() -> dict[str, int]:
    """Return bytes of this process."""
    text = Path("/proc/self/status").read_text()
    names = {"held": "VmRSS", "anonymous": "RssAnon", "peak": "VmHWM"}
    found = {}
    for name, field in names.items():
        match = re.search(rf"{field}:\s+(\d+)", text)
        assert match is not None
        found[name] = int(match[1]) * 1024
    return found


def measure(path: str, field: Any, cache: Any) -> dict[str, float]:
    """Open a reader, and return what that took."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "small.h5")
        with h5py.File(small, "w") as file:
            file["tokens"], file["ends"] = np.zeros(9, np.uint8), [3, 9]
        fields = {"x": RaggedField("tokens", offsets="ends", offsets_kind="ends")}
        with AsyncReader(hdf5_path=small, fields=fields, device="cpu") as reader:
            reader.get_next_batch()
    fields = {"x": field if isinstance(field, str) else RaggedField(**field)}
    before, cpu, begin = memory(), time.process_time(), time.perf_counter()
    reader = AsyncReader(
        hdf5_path=path, fields=fields, device="cpu", shuffle="full", index_cache=cache
    )
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    after = memory()
    count = reader.num_samples
    reader.get_next_batch()
    reader.close()
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        **{name: (after[name] - before[name]) / count for name in after},
    }


def in_process(*arguments: Any) -> dict[str, float]:
    """Call `measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure"]
    text = json.dumps([str(a) if isinstance(a, Path) else a for a in arguments])
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def run(folder: Path, runs: int) -> list[dict[str, Any]]:
    """Measure all cases by all ways."""
    found = []
    for name, (path, field, lengths) in cases(folder).items():
        index, kept = folder / f"{name}.h5idx", folder / f"{name} kept.h5idx"
        text = field if isinstance(field, str) else json.dumps({"kind": "ragged"} | field)
        typed = f"x={text}".replace('": ', '" = ')
        command = [sys.executable, "-m", "h5async", "index", path, "-o", index, "--field", typed]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        in_process(path, field, str(kept))
        ways = {"no index": (path, False), "kept index": (path, str(kept))}
        ways["named index"] = index, False
        decoding = min(decode_seconds(path, lengths) for _ in range(runs))
        for way, (opened, cache) in ways.items():
            several = [in_process(opened, field, cache) for _ in range(runs)]
            best = min(several, key=lambda one: one["seconds"])
            row = {"case": name, "way": way, **best}
            row["decode_seconds"] = decoding if way == "no index" else 0.0
            row["all_seconds"] = [one["seconds"] for one in several]
            found.append(row)
            print(
                f"{name:14} {way:12} {best['seconds']:5.2f} s ({best['cpu_seconds']:5.2f} of"
                f" processors, decoding {row['decode_seconds']:4.2f}); bytes each:"
                f" held {best['held']:5.1f}, anonymous {best['anonymous']:5.1f},"
                f" peak {best['peak']:5.1f}",
                flush=True,
            )
    return found


def plot(rows: list[dict[str, Any]], count: int, path: Path) -> None:
    """Draw times and memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["case"] for row in rows))
    figure, panels = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    described = (
        ("seconds", MOST_SECONDS, "seconds to open"),
        ("anonymous", MOST_BYTES, "bytes of memory for each sample (without mapped files)"),
    )
    for panel, (key, most, label) in zip(panels, described, strict=True):
        for number, way in enumerate(WAYS):
            values = [row[key] for row in rows if row["way"] == way]
            places = np.arange(len(names)) + 0.27 * (number - 1)
            panel.barh(places, values, 0.25, label=way)
        panel.axvline(most, color="#d62728", lw=2)
        panel.set_xlabel(label)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    panels[0].legend()
    figure.suptitle(f"Opening {count:,} samples of any length")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Write the files, measure, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*json.load(sys.stdin))))
        return
    folder = Path(tempfile.mkdtemp())
    try:
        write(folder, options.count)
        rows = run(folder, options.runs)
    finally:
        shutil.rmtree(folder)
    result = {**header(), "count": options.count, "runs": options.runs, "cases": rows}
    save(result, options.out / "bench_ragged_opening.json")
    plot(rows, options.count, options.out / "bench_ragged_opening.png")


if __name__ == "__main__":
    main()
