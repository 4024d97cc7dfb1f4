"""Change valid files at random, read them, and sort what comes of it.

    python scripts/fuzz.py --mutants 50000

The files are those of `tests/corpus.py`: every layout, filter and type, and of
`tests/raggedcorpus.py`: samples of differing lengths. Some bytes of a file are
changed, in its metadata or in its chunks (flips, zeros, addresses, other numbers, pieces moved,
the end cut off). Each mutant is read by h5async in a process of its own, with limits on time and
memory; what is not refused is then read by h5py in another one. Outcomes:

    equal          the same values as h5py's
    refused        an H5AsyncError
    original       h5py refuses what was read, and it is what the file held before
    unchecked      h5py refuses what was read, and it is something else
    wrong          other values than h5py's
    no library     h5py ends by a signal, and what was read is what the file held before
    unexpected     an error that is no H5AsyncError
    memory         more memory than the limit
    crash, hang    a signal ended the process, or nothing within the limit; "in h5py" where
                   h5py's calls were on top, or h5py alone does the same

Mutants with the last six are written to ``OUT/fuzz``, if there are any, and listed in
``OUT/fuzz.json``, by the file they were made of and a number. From these, and the seed, each is
made again, but for bytes that HDF5 leaves as they were in memory:

    python scripts/fuzz.py --again fill_value_compound 68

With ``--index``, not the file is changed but its saved index, by which it is then read; outcomes
are in ``OUT/fuzz_index.json``. Half of the changes are made to numbers and texts in it, and have
right checksums. Then one more outcome is

    believed       other values than h5py's, since the index consistently says so
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import gzip
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import re
import resource
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import h5py
import numpy as np
from bench_common import RESULTS, header, save
from corpus import QUIRKS, Quirk
from raggedcorpus import RAGGED, RaggedQuirk

from h5async import AsyncReader, Csr, Field, H5AsyncError, Ragged
from h5async.config import ReaderConfig
from h5async.index.links import Consulted, Reach
from h5async.index.metadata import read_layouts
from h5async.index.savedfile import read_saved, write_saved
from h5async.index.savedindex import IndexedFile, Wanted, write_index

MEMORY_BYTES = 4 << 30  # of addresses, beyond what the program has anyway
WALL_SECONDS = 3
SLOW_SECONDS = 0.2  # files that take longer are left out
KEPT = ("wrong", "unchecked", "unexpected", "memory", "hang", "crash")
MAX_FILE_NBYTES = 300_000  # larger ones take too long to write
FILES: dict[str, Quirk] = {**QUIRKS, **RAGGED}


# --- mutants -------------------------------------------------------------------------------------


def raw_ranges(path: Path, names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return where chunks and contiguous values lie."""
    found = []
    with h5py.File(path) as file, contextlib.suppress(Exception):
        for name in names:
            dataset = file[name]
            if dataset.chunks:
                for number in range(min(200, dataset.id.get_num_chunks())):
                    info = dataset.id.get_chunk_info(number)
                    found.append((info.byte_offset, info.byte_offset + info.size))
            elif dataset.id.get_offset():
                begin = dataset.id.get_offset()
                found.append((begin, begin + dataset.id.get_storage_size()))
    return [(a, b) for a, b in found if b > a]


def mutate(content: bytes, raw: list[tuple[int, int]], rng: random.Random) -> tuple[bytes, str]:
    """Return a changed file, and what was changed."""
    data, what = bytearray(content), []
    is_raw = np.zeros(len(data), np.bool_)
    for begin, end in raw:
        is_raw[begin:end] = True
    places = {
        "raw": np.flatnonzero(is_raw),
        "metadata": np.flatnonzero(~is_raw & (np.frombuffer(content, np.uint8) != 0)),
    }
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        part = rng.choice(["raw", "metadata", "metadata"])
        if not places[part].size:
            part = "metadata"
        at = int(places[part][rng.randrange(places[part].size)])
        kind = rng.choice(["flip", "flip", "byte", "word", "zero", "noise", "move", "cut"])
        match kind:
            case "flip":
                data[at] ^= 1 << rng.randrange(8)
            case "byte":
                data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            case "word":
                size = rng.choice([2, 4, 8])
                values = [0, 1, 8, len(data), len(data) - 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]
                number = rng.choice([*values, rng.randrange(1 << 16), rng.randrange(len(data))])
                at -= at % rng.choice([1, size])
                data[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
            case "zero":
                size = rng.randrange(1, 64)
                data[at : at + size] = bytes(min(size, len(data) - at))
            case "noise":
                size = min(rng.randrange(1, 32), len(data) - at)
                data[at : at + size] = rng.randbytes(size)
            case "move":
                size = min(rng.randrange(1, 256), len(data) - at)
                other = rng.randrange(len(data) - size + 1)
                data[at : at + size] = content[other : other + size]
            case "cut":
                if rng.random() < 0.8:
                    continue
                del data[at:]
        what.append(f"{kind} {part} at {at}")
        if kind == "cut":
            break
    del data[len(content) :]
    if rng.random() < 0.8:
        mend_checksums(data)
    return bytes(data[: len(content)]), ", ".join(what)


# What a saved index may say in place of what it says.
ODD = (
    *(0, 1, -1, 2, 7, 255, 1 << 31, 1 << 40, (1 << 62) - 1, 1 << 63, 1 << 70, None, True, 1.5),
    *("", "x", "data", "O", "<f8", "|V0", [], {}, [[]], [0], {"names": [], "formats": []}),
)


def save_index(path: Path, quirk: Quirk, options: dict[str, Any]) -> Path:
    """Write the saved index of a file's first dataset beside it."""
    config = ReaderConfig.load({"hdf5_path": path}, **options)
    consulted = Consulted()
    reach = Reach(config.allow_external, config.allow_missing, consulted=consulted)
    field = Field(quirk.names[0], quirk.num_dims[0])
    layouts = {Wanted.of(field): read_layouts(path, {"data": field}, reach)["data"]}
    index = path.with_suffix(".h5idx")
    write_index(index, [IndexedFile(str(path), layouts, consulted)], reach)
    return index


def mutate_index(index: Path, content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return a changed saved index, and what was changed."""
    index.write_bytes(content)
    if rng.random() < 0.5:
        return mutate(content, [], rng)
    header, arrays = read_saved(index, owners=(os.geteuid(),), may_map=False)[:2]
    places, what = [], []
    todo: list[Any] = [header]
    while todo:
        container = todo.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        places += [(container, key) for key in keys if key not in ("arrays", "checksum")]
        todo += [container[key] for key in keys if isinstance(container[key], list | dict)]
    changed = {name: np.array(array) for name, array in arrays.items()}
    for _ in range(rng.choice([1, 1, 2, 3])):
        name = rng.choice([name for name, array in changed.items() if array.size])
        if rng.random() < 0.5:
            container, key = rng.choice(places)
            container[key] = copy.deepcopy(rng.choice(ODD))
            what.append(f"mended {key}={container[key]}")
        else:
            at = rng.randrange(changed[name].size)
            numbers = [0, 1, -1, -2, 5, 48, 1000, 1 << 20, 1 << 40, 1 << 62, rng.randrange(4096)]
            number = np.int64(rng.choice(numbers))
            changed[name].reshape(-1)[at] = number.astype(changed[name].dtype)
            what.append(f"mended {name}[{at}]={number}")
    write_saved(index, header, {name: [array] for name, array in changed.items()}, mode=0o600)
    return index.read_bytes(), ", ".join(what)


def rng_of(quirk: Quirk, seed: int, number: int) -> random.Random:
    """Return what a mutant's changes are drawn from."""
    return random.Random(zlib.crc32(f"{quirk.name} {seed} {number}".encode()))


def write_again(name: str, number: int, seed: int, out: Path) -> None:
    """Write one mutant to ``OUT/fuzz``, and say what was changed."""
    quirk = FILES[name]
    (out / "fuzz").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = quirk.write(Path(folder))
        raw = raw_ranges(path, quirk.names)
        mutant, what = mutate(path.read_bytes(), raw, rng_of(quirk, seed, number))
    target = out / "fuzz" / f"{name}_{number}.h5"
    target.write_bytes(mutant)
    print(f"{target}: {what}")


def lookup3(data: bytes) -> int:
    """Return HDF5's checksum of metadata: Bob Jenkins's hashlittle of lookup3.c, begun with 0."""
    mask = 0xFFFFFFFF

    def turned(value: int, count: int) -> int:
        return (value << count | value >> (32 - count)) & mask

    a = b = c = 0xDEADBEEF + len(data) & mask
    at, left = 0, len(data)
    while left > 12:
        x, y, z = struct.unpack_from("<III", data, at)
        a, b, c = a + x & mask, b + y & mask, c + z & mask
        for count in (4, 6, 8, 16, 19, 4):
            a = (a - c & mask) ^ turned(c, count)
            c = c + b & mask
            a, b, c = b, c, a
        at, left = at + 12, left - 12
    if not left:
        return c
    x, y, z = struct.unpack("<III", data[at:].ljust(12, b"\0"))
    a, b, c = a + x & mask, b + y & mask, c + z & mask
    for count in (14, 11, 25, 16, 4, 14, 24):
        c = (c ^ b) - turned(b, count) & mask
        a, b, c = b, c, a
    return b


# Bytes before the checksum, of structures of fixed size.
_CHECKED = {b"BTHD": 34, b"FAHD": 24, b"EAHD": 68, b"\x89HDF": 44}


def mend_checksums(data: bytearray) -> None:
    """Let changed metadata have their right checksums, so that what is behind them is read."""
    for sign, size in _CHECKED.items():
        at = data.find(sign)
        while at >= 0:
            if sign != b"\x89HDF" or data[at + 8 : at + 9] in (b"\2", b"\3"):
                _mend(data, at, size)
            at = data.find(sign, at + 4)
    at = data.find(b"OHDR")
    while at >= 0:
        flags = int.from_bytes(data[at + 5 : at + 6], "little")
        begin = at + 6 + 16 * bool(flags & 32) + 4 * bool(flags & 16)
        width = 1 << (flags & 3)
        size = int.from_bytes(data[begin : begin + width], "little")
        _mend(data, at, begin + width - at + size)
        at = data.find(b"OHDR", at + 4)


def _mend(data: bytearray, at: int, size: int) -> None:
    if at + size + 4 <= len(data):
        data[at + size : at + size + 4] = lookup3(bytes(data[at : at + size])).to_bytes(4, "little")


# --- reading, in a process of its own ------------------------------------------------------------


def digest(array: np.ndarray) -> str:
    """Hash values; padding counts for nothing, nor which byte stands for True."""
    state = hashlib.blake2b(digest_size=12)
    state.update(repr(array.shape).encode())

    def add(part: np.ndarray) -> None:
        if part.dtype.names:
            for name in part.dtype.names:
                add(part[name])
            return
        part = part.astype(part.dtype.newbyteorder("="), copy=False)
        if part.dtype.kind == "b":
            part = part.view(np.uint8) != 0
        state.update(part.dtype.str.encode() + np.ascontiguousarray(part).tobytes())

    add(array)
    return state.hexdigest()


def by_h5async(path: Path, name: str, axis: int, options: dict[str, Any]) -> str:
    with AsyncReader(
        hdf5_path=path,
        data_field=name,
        labels_field=None,
        num_dim=axis,
        device="cpu",
        **{"num_threads": 0, "batch_size": 7, **options},
    ) as reader:
        batches = [batch.data.copy() for batch in reader] if len(reader) else []
        layout = reader.layouts["data"]
        row = tuple(n for i, n in enumerate(layout.shape) if i != layout.sample_axis)
        nothing = np.zeros((0, *row), layout.dtype.newbyteorder("="))
        return digest(np.concatenate([nothing, *batches]))


def digest_of_samples(samples: list[np.ndarray]) -> str:
    """Hash samples of differing lengths."""
    texts = [digest(np.asarray(sample)) for sample in samples]
    return hashlib.blake2b(repr(texts).encode(), digest_size=12).hexdigest()


def ragged_by_h5async(path: Path, name: str, axis: int, options: dict[str, Any]) -> str:
    """Read the field of a ragged quirk; `name` is the quirk's."""
    found: list[np.ndarray] = []
    with AsyncReader(
        hdf5_path=path,
        fields={"data": RAGGED[name].field},
        device="cpu",
        **{"num_threads": 0, "batch_size": 7, **options},
    ) as reader:
        for batch in reader if len(reader) else ():
            found += samples_of(batch.data)
    return digest_of_samples(found)


def samples_of(data: Ragged | Csr | np.ndarray) -> list[np.ndarray]:
    """Return copies of the samples of a batch; of sparse rows, columns and values of each."""
    if isinstance(data, Csr):
        rows = itertools.pairwise(data.indptr.tolist())
        return [part[a:b].copy() for a, b in rows for part in (data.indices, data.data)]
    return [np.array(sample) for sample in data]


def ragged_by_h5py(path: Path, name: str, axis: int, options: dict[str, Any]) -> str:
    """Read the field of a ragged quirk as h5py has it."""
    with h5py.File(path) as file:
        return digest_of_samples(RAGGED[name].truth(file))


def by_h5py(path: Path, name: str, axis: int, options: dict[str, Any]) -> str:
    with h5py.File(path) as file:
        try:
            return digest(np.moveaxis(file[name][...], axis, 0))
        except Exception:
            file.visititems(lambda *_: None)  # as h5async does, to say what is there
            raise


class Child:
    """A process with limits that reads files, one after the other; a new one where it ended."""

    def __init__(self, function: Callable[..., str], stacks: Path) -> None:
        self._function, self._stacks = function, stacks
        self._pid = 0

    def run(self, *arguments: Any) -> tuple[str, str]:
        """Return an outcome, and a text to it."""
        if not self._pid:
            self._start()
        data = pickle.dumps(arguments)
        os.write(self._to, struct.pack("<I", len(data)) + data)
        ready, _, _ = select.select([self._back], [], [], WALL_SECONDS)
        head = os.read(self._back, 4) if ready else b""
        if len(head) == 4:
            size = struct.unpack("<I", head)[0]
            data = b""
            while len(data) < size:
                data += os.read(self._back, size - len(data))
            found: tuple[str, str] = pickle.loads(data)
            return found
        if not ready:
            os.kill(self._pid, signal.SIGABRT)  # which writes where it is
        _, status = os.waitpid(self._pid, 0)
        self.close()
        frames = [x.strip() for x in self._stacks.read_text().splitlines() if "File" in x]
        top = re.sub(r'".*/((?:h5py|numpy|h5async|scripts)/)', r'"\1', frames[0]) if frames else "?"
        what = "hang" if not ready else "crash"
        end = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else status
        return what, f"{end} in {top}"

    def close(self) -> None:
        """End the process."""
        if self._pid:
            os.close(self._to)
            os.close(self._back)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._pid = 0

    def _start(self) -> None:
        ours, self._to = os.pipe()
        self._back, theirs = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(ours)
            os.close(theirs)
            return
        try:
            os.close(self._to)
            os.close(self._back)
            self._serve(ours, theirs)
        finally:
            os._exit(1)

    def _serve(self, reading: int, writing: int) -> None:
        faulthandler.enable(self._stacks.open("w"))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        while head := os.read(reading, 4):
            data = b""
            while len(data) < struct.unpack("<I", head)[0]:
                data += os.read(reading, struct.unpack("<I", head)[0] - len(data))
            try:
                found = "values", self._function(*pickle.loads(data))
            except H5AsyncError as error:
                found = "refused", f"{type(error).__name__}: {error}"
            except MemoryError as error:
                found = "memory", repr(error)
            except BaseException as error:
                found = "unexpected", f"{type(error).__name__}: {error}"
            data = pickle.dumps(found)
            os.write(writing, struct.pack("<I", len(data)) + data)


def sort_out(
    path: Path, quirk: Quirk, original: str, options: dict[str, Any], ours: Child, theirs: Child
) -> tuple[str, str]:
    """Read a mutant; return its outcome, and a text to it."""
    arguments = path, name_of(quirk), quirk.num_dims[0], options
    outcome, text = ours.run(*arguments)
    if outcome in ("crash", "hang"):
        alone = theirs.run(*arguments)[0] in ("crash", "hang")
        return f"{outcome} in h5py" if alone or is_in_h5py(text) else outcome, text
    if outcome != "values":
        return outcome, text
    found, reason = theirs.run(*arguments)
    if found == "values":
        return ("equal", "") if reason == text else ("wrong", "")
    if text == original:
        return ("no library" if found in ("crash", "hang") else "original"), reason
    return "unchecked", reason


def sort_out_index(
    index: Path, quirk: Quirk, what: str, original: str, options: dict[str, Any], ours: Child
) -> tuple[str, str]:
    """Read a file by a changed index; return the outcome, and a text to it."""
    outcome, text = ours.run(index, quirk.names[0], quirk.num_dims[0], options)
    if outcome != "values":
        return outcome, text
    if text == original:
        return "equal", ""
    return ("believed" if what.startswith("mended") else "wrong"), ""


def is_in_h5py(text: str) -> bool:
    """Tell whether a call of h5py's was on top; some are made of C, and have no frame."""
    return any(caller in text for caller in ("h5py/", "h5async/index/", "fallback.py"))


def name_of(quirk: Quirk) -> str:
    """Return what a process is told to read."""
    return quirk.name if isinstance(quirk, RaggedQuirk) else quirk.names[0]


# --- many of them --------------------------------------------------------------------------------


def work(quirks: list[Quirk], each: int, seed: int, folder: Path, out: Path) -> None:
    """Try mutants of some files; append a line of JSON for each file to `out`."""
    pairs = {
        False: (Child(by_h5async, folder / "ours"), Child(by_h5py, folder / "theirs")),
        True: (
            Child(ragged_by_h5async, folder / "ours of samples"),
            Child(ragged_by_h5py, folder / "theirs of samples"),
        ),
    }
    for quirk in quirks:
        ours, theirs = pairs[isinstance(quirk, RaggedQuirk)]
        home = folder / quirk.name.replace("/", "_")
        home.mkdir()
        try:
            path = quirk.write(home)
        except ModuleNotFoundError:
            continue
        content = path.read_bytes()
        if len(content) > MAX_FILE_NBYTES:
            continue
        options = quirk.options(home) if quirk.options else {}
        state, original = theirs.run(path, name_of(quirk), quirk.num_dims[0], {})
        if state != "values":
            continue
        begin = time.monotonic()
        ours.run(path, name_of(quirk), quirk.num_dims[0], options)
        if time.monotonic() - begin > SLOW_SECONDS:
            continue
        raw = raw_ranges(path, quirk.names)
        counts: Counter[str] = Counter()
        kept = []
        for number in range(each):
            rng = rng_of(quirk, seed, number)
            mutant, what = mutate(content, raw, rng)
            path.write_bytes(mutant)
            every = {**options, "io": rng.choice(["auto", "pread"])}
            outcome, text = sort_out(path, quirk, original, every, ours, theirs)
            if outcome.startswith(KEPT) and outcome != "hang in h5py":
                # What came before may have left its mark on a process.
                ours.close()
                theirs.close()
                outcome, text = sort_out(path, quirk, original, every, ours, theirs)
            counts[outcome] += 1
            if outcome.startswith(KEPT):
                packed = gzip.compress(mutant)
                kept.append([number, outcome, what, text[:300], packed.hex()])
        with out.open("a") as file:
            file.write(json.dumps([quirk.name, counts, kept]) + "\n")
    for children in pairs.values():
        for child in children:
            child.close()


def work_on_indices(quirks: list[Quirk], each: int, seed: int, folder: Path, out: Path) -> None:
    """Try mutants of the saved indices of some files, as `work` does of the files."""
    ours, theirs = Child(by_h5async, folder / "ours"), Child(by_h5py, folder / "theirs")
    for quirk in quirks:
        home = folder / quirk.name.replace("/", "_")
        home.mkdir()
        try:
            path = quirk.write(home)
        except ModuleNotFoundError:
            continue
        state, original = theirs.run(path, quirk.names[0], quirk.num_dims[0], {})
        if state != "values":
            continue
        options = quirk.options(home) if quirk.options else {}
        index = save_index(path, quirk, options)
        content = index.read_bytes()
        counts: Counter[str] = Counter()
        kept = []
        for number in range(each):
            rng = rng_of(quirk, seed, number)
            mutant, what = mutate_index(index, content, rng)
            index.write_bytes(mutant)
            every = {**options, "io": rng.choice(["auto", "pread"])}
            outcome, text = sort_out_index(index, quirk, what, original, every, ours)
            if outcome.startswith(KEPT):
                ours.close()
                outcome, text = sort_out_index(index, quirk, what, original, every, ours)
            counts[outcome] += 1
            if outcome.startswith(KEPT):
                kept.append([number, outcome, what, text[:300], gzip.compress(mutant).hex()])
        with out.open("a") as file:
            file.write(json.dumps([quirk.name, counts, kept]) + "\n")
    ours.close()
    theirs.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="names of files that contain this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--index", action="store_true", help="change saved indices, not files")
    parser.add_argument("--again", nargs=2, metavar=("FILE", "NUMBER"), help="write this one alone")
    options = parser.parse_args()
    if options.again:
        write_again(options.again[0], int(options.again[1]), options.seed, options.out)
        return 0
    quirks = [
        quirk
        for name, quirk in (QUIRKS if options.index else FILES).items()
        if quirk.way in ("direct", "h5py") and options.only in name
    ]
    if not quirks:
        parser.error(f"no file is called so: {options.only}")
    each = -(-options.mutants // len(quirks))
    begin = time.monotonic()
    shm = Path("/dev/shm")
    base = shm if shm.is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        children = []
        for job in range(options.jobs):
            own = Path(folder) / str(job)
            own.mkdir()
            child = os.fork()
            if not child:
                status = 1
                try:
                    tries = work_on_indices if options.index else work
                    tries(quirks[job :: options.jobs], each, options.seed, own, own / "results")
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(status)
            children.append((child, own / "results"))
        lines = []
        for child, results in children:
            if os.waitpid(child, 0)[1]:
                sys.exit("a job ended by an error, or was killed")
            if results.exists():  # else no file of its own can be tried
                lines += [json.loads(line) for line in results.read_text().splitlines()]
    total: Counter[str] = Counter()
    cases, kept = {}, []
    for name, counts, found in sorted(lines):
        total.update(counts)
        cases[name] = dict(sorted(counts.items()))
        kept += [[name, *entry] for entry in found]
    if kept:
        (options.out / "fuzz").mkdir(parents=True, exist_ok=True)
    for name, number, outcome, _, _, packed in kept:
        where = re.sub(r"[^\w.-]", "_", f"{outcome} {name} {number}")
        (options.out / "fuzz" / f"{where}.h5.gz").write_bytes(bytes.fromhex(packed))
    result = {
        **header(),
        "seed": options.seed,
        "mutants": sum(total.values()),
        "files": len(cases),
        "seconds": time.monotonic() - begin,
        "outcomes": dict(sorted(total.items())),
        "kept": [entry[:5] for entry in kept],
        "cases": cases,
    }
    save(result, options.out / ("fuzz_index.json" if options.index else "fuzz.json"))
    out = io.StringIO()
    for outcome, count in total.most_common():
        print(f"{outcome:16}{count:8}", file=out)
    print(out.getvalue())
    for entry in kept[:60]:
        print(entry[:5])
    return 0


if __name__ == "__main__":
    sys.exit(main())
