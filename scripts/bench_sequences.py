"""Measures samples of several steps: robots' episodes, simulations, and opening many groups.

All ways of a case take turns, in the same run, with warm caches; what counts is the ratio of the
medians. Batches that were made while others had their turn are not counted.

- episodes: windows of 10 steps, padded, of episodes of 150 steps with two images of 84x84x3 bytes
  and actions, in batches of 16, in random order; stored raw, and behind gzip in the chunks that
  h5py chooses. Ours with a full shuffle and with a window, against robomimic's `SequenceDataset`
  (`hdf5_cache_mode="low_dim"`, in a DataLoader with 0 or 2 workers, whichever is faster).
- simulations: four input steps and one target step of files as The Well has them, (trajectory,
  step, x, y); against its `WellDataset` in a DataLoader, and a DataLoader over h5py, each with 0 or
  2 workers.
- opening: so many episodes of six datasets, until a reader is ready; against a walk with h5py that
  asks each dataset for its shape, and from a saved index.

What no loader can pass, two threads do with nothing else to do. Raw: they copy the bytes of windows
out of a map. Full shuffle of gzip: libdeflate decodes the chunks of each window. Window shuffle:
each chunk once, of which the windows are then copied, each of them; without the copies, too.

Needs robomimic, the_well and torch.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import imagecodecs
import numpy as np
import torch
from bench_common import RESULTS
from bench_turns import Bench, Target, Way, paced, reader_sizes, run_cases, threaded
from torch.utils.data import DataLoader, Dataset

from h5async import AsyncReader, Field, Sequences
from h5async.cli import app

SIDE, CAMERAS, STEPS, BATCH = 84, ("agentview", "wrist"), 10, 16
ROW_NBYTES = SIDE * SIDE * 3
DISTINCT = 20  # episodes that differ; others have copies of their images
THREADS = 2
INPUTS, OUTPUTS = 4, 1


def loader_sizes(loader: Any, field: str) -> Iterator[int]:
    while True:
        for batch in loader:
            found = batch[field]
            yield len(next(iter(found.values())) if isinstance(found, dict) else found)


def better(dataset: Any, batch_size: int, field: str, seconds: float) -> tuple[str, Way]:
    """Return the faster of DataLoaders with 0 and with 2 workers, and what it is called."""
    ways = {}
    for workers in (0, 2):
        loader = DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            generator=torch.Generator().manual_seed(0),
        )
        ways[f"{workers} workers"] = paced(loader_sizes(loader, field))
    speeds = {name: way(seconds) for name, way in ways.items()}
    name = max(speeds, key=lambda found: speeds[found])
    return name, ways[name]


# --- episodes of a robot -------------------------------------------------------------------------


def scenes(count: int, length: int) -> np.ndarray:
    """Return episodes of images of a specked scene that moves, with a little noise."""
    rng = np.random.default_rng(0)
    found = np.empty((count, length, SIDE, SIDE, 3), np.uint8)
    ramp = (np.arange(SIDE) // 3).astype(np.uint8)[:, None, None]
    for episode in found:
        scene = ramp + rng.integers(0, 160, (1, SIDE, 3), dtype=np.uint8)
        scene = scene + rng.integers(0, 4, (SIDE, SIDE, 3), dtype=np.uint8)
        for step, image in enumerate(episode):
            image[...] = np.roll(scene, step // 4, axis=1)
            image += rng.integers(0, 255, image.shape, dtype=np.uint8) < 8
    return found


def write_episodes(path: Path, images: np.ndarray, episodes: int, compression: str | None) -> None:
    """Write a file as robomimic has it; equal images are encoded once."""
    rng, length = np.random.default_rng(1), images.shape[1]
    encoded: dict[int, list[tuple[tuple[int, ...], bytes]]] = {}
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"], data.attrs["env_args"] = episodes * length, "{}"
        for number in range(episodes):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = length
            demo["actions"] = rng.random((length, 7))
            for camera, name in enumerate(CAMERAS):
                which = (number * len(CAMERAS) + camera) % len(images)
                at = f"obs/{name}"
                if compression is None:
                    demo[at] = images[which]
                elif which not in encoded:
                    dataset = demo.create_dataset(at, data=images[which], compression=compression)
                    encoded[which] = [
                        (offset, dataset.id.read_direct_chunk(offset)[1])
                        for offset in (
                            dataset.id.get_chunk_info(n).chunk_offset
                            for n in range(dataset.id.get_num_chunks())
                        )
                    ]
                else:
                    shape = images[which].shape
                    dataset = demo.create_dataset(at, shape, "u1", compression=compression)
                    for offset, chunk in encoded[which]:
                        dataset.id.write_direct_chunk(offset, chunk)


def robomimic_dataset(path: Path) -> Any:
    import robomimic.utils.obs_utils as of_robomimic
    from robomimic.utils.dataset import SequenceDataset

    of_robomimic.initialize_obs_modality_mapping_from_dict({"rgb": list(CAMERAS)})
    return SequenceDataset(
        str(path),
        obs_keys=CAMERAS,
        dataset_keys=("actions",),
        seq_length=STEPS,
        pad_seq_length=True,
        hdf5_cache_mode="low_dim",
        load_next_obs=False,
    )


def episodes_reader(path: Path, **options: Any) -> AsyncReader:
    fields = {f"obs/{name}": Field(f"obs/{name}", **WINDOW) for name in CAMERAS}
    return AsyncReader(
        hdf5_path=path,
        fields=fields | {"actions": Field("actions", **WINDOW)},
        sequences=Sequences(groups="data/demo_*"),
        batch_size=BATCH,
        device="cpu",
        index_cache=False,
        **options,
    )


WINDOW: dict[str, Any] = {"steps": range(STEPS), "pad": "edge"}


def check_episodes(reader: AsyncReader, theirs: Any) -> None:
    """Compare some samples of ours with robomimic's."""
    assert reader.num_samples == len(theirs)
    chosen = np.random.default_rng(2).choice(len(theirs), BATCH, replace=False)
    batch = reader.read(chosen)
    for i, number in enumerate(chosen.tolist()):
        item = theirs[number]
        same = (batch["actions"][i].astype("f4") == item["actions"]).all()  # as it keeps them
        for name in CAMERAS:
            same &= (batch[f"obs/{name}"][i] == item["obs"][name]).all()
        if not same:
            raise AssertionError(f"sample {number} is not what robomimic reads")


class Chunk(NamedTuple):
    """Where an encoded chunk lies."""

    offset: int
    nbytes: int


COPY = """
#include <stdint.h>
#include <string.h>
void copy_all(const char *from, const int64_t *offset, int64_t count, int64_t nbytes, char *to)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(to + i * nbytes, from + offset[i], nbytes);
}
"""


def compiled(folder: Path) -> Any:
    """Return a function that copies pieces of equal size, without the GIL."""
    source, library = folder / "copy.c", folder / "copy.so"
    if not library.exists():
        source.write_text(COPY)
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
    function = ctypes.CDLL(str(library)).copy_all
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p]
    function.restype = None
    return function


class Bytes:
    """A file, mapped, and where the images of each episode lie in it."""

    def __init__(self, path: Path, episodes: int) -> None:
        self.copy_all = compiled(path.parent)
        with path.open("rb") as file:
            self.map = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self.raw: list[tuple[int, ...]] = []
        self.chunks: list[list[dict[int, list[Chunk]]]] = []
        with h5py.File(path) as file:
            for number in range(episodes):
                several = [file[f"data/demo_{number}/obs/{name}"] for name in CAMERAS]
                self.shape = several[0].shape
                self.chunk_shape = several[0].chunks
                if self.chunk_shape is None:
                    self.raw.append(tuple(dataset.id.get_offset() for dataset in several))
                else:
                    self.chunks.append([self._chunks(dataset) for dataset in several])

    def _chunks(self, dataset: h5py.Dataset) -> dict[int, list[Chunk]]:
        found: dict[int, list[Chunk]] = {}

        def note(chunk: Any) -> None:
            first = chunk.chunk_offset[0] // self.chunk_shape[0]
            found.setdefault(first, []).append(Chunk(chunk.byte_offset, chunk.size))

        dataset.id.chunk_iter(note)
        return found

    def copies(self, seed: int) -> Iterator[int]:
        """Copy the bytes of random windows, a batch a call, to buffers as a reader has them."""
        rng, length, nbytes = np.random.default_rng(seed), self.shape[0], STEPS * ROW_NBYTES
        source = np.frombuffer(self.map, np.uint8).ctypes.data
        slots = np.ones((3, BATCH * len(CAMERAS), nbytes), np.uint8)
        for slot in itertools.cycle(slots):
            offsets = np.array(self.raw)[rng.integers(len(self.raw), size=BATCH)]
            offsets += rng.integers(length - STEPS + 1, size=(BATCH, 1)) * ROW_NBYTES
            self.copy_all(source, offsets.ctypes.data, offsets.size, nbytes, slot.ctypes.data)
            yield BATCH

    def decode(self, chunks: list[Chunk], out: Any) -> None:
        """Decode some chunks, one after the other to the same memory."""
        for offset, nbytes in chunks:
            imagecodecs.deflate_decode(self.map[offset : offset + nbytes], out=out)

    def windows(self, seed: int) -> Iterator[int]:
        """Decode the chunks of random windows."""
        rng, length = np.random.default_rng(seed), self.shape[0]
        rows, out = self.chunk_shape[0], bytearray(int(np.prod(self.chunk_shape)))
        while True:
            episode = self.chunks[rng.integers(len(self.chunks))]
            first = int(rng.integers(length - STEPS + 1))
            for camera in episode:
                for number in range(first // rows, (first + STEPS - 1) // rows + 1):
                    self.decode(camera[number], out)
            yield 1

    def once(self, seed: int) -> Iterator[int]:
        """Decode each chunk of random episodes once, a camera at a time."""
        rng, out = np.random.default_rng(seed), bytearray(int(np.prod(self.chunk_shape)))
        while True:
            for camera in self.chunks[rng.integers(len(self.chunks))]:
                for chunks in camera.values():
                    self.decode(chunks, out)
                yield self.shape[0] // len(CAMERAS)


def bound(work: Callable[[int], Iterator[int]]) -> Way:
    return threaded([work(seed) for seed in range(THREADS)])


def episodes(bench: Bench) -> None:
    count, length = bench.options.episodes, bench.options.length
    images = scenes(min(DISTINCT, 2 * count), length)
    copied = 0.0
    for stored, compression in (("raw", None), ("gzip", "gzip")):
        path = bench.folder / f"{stored}.hdf5"
        write_episodes(path, images, count, compression)
        theirs, lies = robomimic_dataset(path), Bytes(path, count)
        name, way = better(theirs, BATCH, "obs", bench.options.seconds)
        name = f"robomimic, {name}"
        with (
            episodes_reader(path, shuffle="full") as full,
            episodes_reader(path, shuffle="window") as window,
        ):
            check_episodes(full, theirs)
            ways = {name: way}
            ways |= {f"ours, {n}": paced(reader_sizes(r)) for n, r in by_shuffle(full, window)}
            if compression is None:
                ways["copies of windows"] = bound(lies.copies)
                targets = [
                    *(Target(f"ours, {n}", name, 10) for n in ("full", "window")),
                    *(Target(f"ours, {n}", "copies of windows", 0.7) for n in ("full", "window")),
                ]
            else:
                ways["chunks of each window"] = bound(lies.windows)
                ways["each chunk once"] = bound(lies.once)
                targets = [
                    Target("ours, full", name, 5),
                    Target("ours, full", "chunks of each window", 0.7),
                    Target("ours, window", name, 100),
                    Target("ours, window", "each chunk once", 0.7),
                ]
            bench.measure(f"episodes, {stored}", ways, targets)
            speeds = {p["way"]: p["speed"] for p in bench.speeds[-len(ways) :]}
            if compression is None:
                copied = speeds["copies of windows"]
            else:
                both = 1 / (1 / speeds["each chunk once"] + 1 / copied)
                ratio = speeds["ours, window"] / both
                what = "each chunk once, each window copied"
                bench.note(f"episodes, {stored}", "ours, window", what, ratio, 0.9)
            bench.print(f"{'':16} {window.stats()}")
        path.unlink()


def by_shuffle(*readers: AsyncReader) -> Iterator[tuple[str, AsyncReader]]:
    return zip(("full", "window"), readers, strict=True)


# --- simulations ---------------------------------------------------------------------------------


def write_simulation(path: Path, trajectories: int, length: int, side: int, seed: int) -> None:
    """Write a file as The Well has it."""
    rng = np.random.default_rng(seed)
    shape = (trajectories, length, side, side)
    with h5py.File(path, "w") as file:
        file.attrs.update(
            dataset_name="bench",
            grid_type="cartesian",
            n_spatial_dims=2,
            n_trajectories=trajectories,
            simulation_parameters=[],
        )
        file.create_group("boundary_conditions")
        dimensions = file.create_group("dimensions")
        dimensions.attrs["spatial_dims"] = ["x", "y"]
        for name, size in ("time", length), ("x", side), ("y", side):
            dimensions[name] = np.linspace(0, 1, size, dtype=np.float32)
            dimensions[name].attrs["sample_varying"] = False
        file.create_group("scalars").attrs["field_names"] = []
        for order, names in enumerate(FIELDS_OF_ORDER):
            group = file.create_group(f"t{order}_fields")
            group.attrs["field_names"] = names
            for name in names:
                group[name] = rng.random((*shape, *[2] * order), np.float32)
                group[name].attrs.update(
                    dim_varying=[True, True], sample_varying=True, time_varying=True
                )


FIELDS_OF_ORDER: tuple[list[str], ...] = (["density", "pressure"], ["velocity"], [])
PATHS = ["t0_fields/density", "t0_fields/pressure", "t1_fields/velocity"]


class OverH5py(Dataset):
    """What many write: a window of steps of each field, of files that stay open."""

    def __init__(self, paths: list[Path], trajectories: int, length: int) -> None:
        self.paths = paths
        self.each = length - INPUTS - OUTPUTS + 1
        self.trajectories = trajectories
        self.files: list[h5py.File] = []

    def __len__(self) -> int:
        return len(self.paths) * self.trajectories * self.each

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not self.files:
            self.files = [h5py.File(path) for path in self.paths]
        rest, step = divmod(index, self.each)
        number, trajectory = divmod(rest, self.trajectories)
        file, found = self.files[number], {}
        for path in PATHS:
            rows = file[path][trajectory, step : step + INPUTS + OUTPUTS]
            found[f"{path}, input"], found[f"{path}, output"] = rows[:INPUTS], rows[INPUTS:]
        return found


def simulations(bench: Bench) -> None:
    from the_well.data import WellDataset

    trajectories, length, side = bench.options.simulations
    folder = bench.folder / "well"
    folder.mkdir()
    paths = [folder / f"{number}.hdf5" for number in range(2)]
    for number, path in enumerate(paths):
        write_simulation(path, trajectories, length, side, number)
    well = WellDataset(
        path=str(folder),
        n_steps_input=INPUTS,
        n_steps_output=OUTPUTS,
        return_grid=False,
        boundary_return_type=None,
    )
    plain = OverH5py(paths, trajectories, length)
    steps = {"input": range(INPUTS), "output": range(INPUTS, INPUTS + OUTPUTS)}
    fields = {
        f"{path}, {name}": Field(path, (0, 1), steps=taken)
        for path in PATHS
        for name, taken in steps.items()
    }
    with AsyncReader(
        hdf5_path=paths, fields=fields, batch_size=8, shuffle="full", device="cpu"
    ) as reader:
        assert reader.num_samples == len(well) == len(plain)
        chosen = np.random.default_rng(3).choice(len(plain), 8, replace=False)
        rows = chosen // plain.each * length + chosen % plain.each
        batch = reader.read(rows)
        for i, number in enumerate(chosen.tolist()):
            item, theirs = plain[number], well[number]["input_fields"].numpy()
            same = all((batch[name][i] == item[name]).all() for name in fields)
            if not same or not (batch[f"{PATHS[0]}, input"][i] == theirs[..., 0]).all():
                raise AssertionError(f"sample {number} is not what the others read")
        plain.files = []  # of this process, which workers must not share
        ways: dict[str, Way] = {}
        for name, dataset, field in (
            ("The Well", well, "input_fields"),
            ("h5py", plain, f"{PATHS[0]}, input"),
        ):
            workers, way = better(dataset, 8, field, bench.options.seconds)
            ways[f"{name}, {workers}"] = way
        targets = [Target("ours", other, 3) for other in ways]
        ways["ours"] = paced(reader_sizes(reader))
        bench.measure("simulations", ways, targets)


# --- opening -------------------------------------------------------------------------------------


def opening(bench: Bench) -> None:
    path, index, count = bench.folder / "open.h5", bench.folder / "open.h5idx", bench.options.groups
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number in range(count):
            for name in "abcdef":
                file[f"data/demo_{number}/{name}"] = rng.random((20, 4), "f4")
    fields = {name: Field(name, steps=range(4), pad="edge") for name in "abcdef"}
    groups = "data/demo_*"

    def opened(source: Path) -> Callable[[], float]:
        def work() -> float:
            begin = time.perf_counter()
            reader = AsyncReader(
                hdf5_path=source,
                fields=fields,
                sequences=Sequences(groups=groups),
                device="cpu",
                index_cache=False,
            )
            taken = time.perf_counter() - begin
            assert reader.num_samples == 20 * count
            reader.close()
            return taken

        return work

    def walk() -> float:
        begin = time.perf_counter()
        with h5py.File(path) as file:
            for group in file["data"].values():
                for dataset in group.values():
                    _ = dataset.shape
        return time.perf_counter() - begin

    table = ["--sequences", f"{{groups = '{groups}'}}"]
    app(["index", str(path), "-o", str(index), *table], standalone_mode=False)
    works = {"walk with h5py": walk, "reader": opened(path), "from the index": opened(index)}
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(bench.options.repeats + 1):
        for name, work in works.items():
            found[name].append(work())
    medians = {name: statistics.median(several[1:]) for name, several in found.items()}
    for name, seconds in medians.items():
        rounds = [round(one, 4) for one in found[name][1:]]
        bench.speeds.append({"case": "opening", "way": name, "seconds": seconds, "rounds": rounds})
        bench.print(f"{'opening':16} {name:34} {seconds:>12.3f} s")
    walked, read = medians["walk with h5py"], medians["reader"]
    bench.note("opening", "reader", "walk with h5py", walked / read, 0.5)
    bench.note("opening", "from the index", "0.1 s", 0.1 / medians["from the index"], 1)


CASES = {function.__name__: function for function in (episodes, simulations, opening)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--length", type=int, default=150, help="steps of an episode")
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--seconds", type=float, default=1.0, help="that each way takes in a round")
    parser.add_argument("--only", nargs="*", choices=list(CASES), help="cases; default: all")
    parser.add_argument("--quick", action="store_true", help="few and small: no figures to quote")
    parser.add_argument("--out", type=Path, help="folder for the results; default: scripts/results")
    options = parser.parse_args()
    options.simulations = (8, 50, 128)
    if options.quick:
        options.episodes, options.length, options.groups = 4, 40, 20
        options.repeats, options.seconds, options.simulations = 2, 0.05, (2, 10, 16)
    elif options.out is None and not options.only:
        options.out = RESULTS
    run_cases("bench_sequences", CASES, options)


if __name__ == "__main__":
    main()
