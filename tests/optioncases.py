"""A number enters; random files, options that fit them, and a check of all that is delivered leave.

Truth is NumPy on what h5py reads from the files before some of their chunks are damaged.
`scripts/fuzz_options.py` goes through thousands of these cases;
`test_option_cases.py` goes through some.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from conftest import poison
from memorystore import MemoryStore, new_store
from optioncolumns import KINDS, Column, Packed, Plain, same

from h5async import AsyncReader, ConfigError, DatasetError, H5AsyncError, Sequences

KINDS_OF_SEQUENCES = ("ends", "starts", "lengths", "ids", "last", "groups", "across", "pairs")


class Part(NamedTuple):
    """Rows of a file, or of one of its groups."""

    file: int
    group: str
    count: int


def far_name(path: Path | str) -> str:
    return f"memory://bucket{path}"


def renamed(*arrays: Any, index: Any) -> dict[str, Any]:
    """Return a mapping, as a `postprocess` may."""
    return {f"out{number}": array for number, array in enumerate(arrays)} | {"own_index": index}


class Case:
    """Files in a folder, the options of readers, and what they should deliver."""

    def __init__(self, seed: int, number: int, folder: Path, *, helpers: bool = True) -> None:
        self.chance = random.Random(f"{seed} {number}")
        self.rng = np.random.default_rng(self.chance.randrange(1 << 32))
        self.folder = folder
        self.known: dict[tuple[Part, str], Any] = {}
        self.spoilable: list[tuple[int, str]] = []
        self.spoiled: dict[tuple[int, str], np.ndarray] = {}
        self.paths = [
            folder / f"{letter}.h5" for letter in "abc"[: self.chance.choice([1, 1, 2, 3])]
        ]
        self.has_helpers = helpers and self.chance.random() < 0.02
        self.skips = self.chance.random() < 0.3
        self.sequences = "files"
        if self.chance.random() < 0.6:
            self.sequences = self.chance.choice(KINDS_OF_SEQUENCES)
        self.parts = list(self._parts())
        self.columns = self._columns()
        self._write()
        self.lost = self._lose_files()
        for column in self.columns:
            column.load()
        self.count = sum(self.count_in(part) for part in self.parts)
        (folder / "cache").mkdir()
        self.runs = list(self._runs())
        if self.skips:
            self._spoil()
        self.options = self._options()
        self._find_samples()

    def count_in(self, part: Part) -> int:
        """Return the number of samples in a part."""
        return next(column.count_in(part) for column in self.columns if column.field.per is None)

    def maybe(self, probability: float) -> bool:
        """Return True with a probability."""
        return self.chance.random() < probability

    # --- files -----------------------------------------------------------------------------------

    def _parts(self) -> Iterator[Part]:
        for file in range(len(self.paths)):
            if self.sequences == "groups":
                for number in range(self.chance.choice([1, 2, 4])):
                    yield Part(file, f"ep_{number}", self.chance.randrange(1, 13))
            else:
                few = self.maybe(0.1) and file
                yield Part(
                    file, "/", self.chance.choice([0, 1]) if few else self.chance.randrange(5, 31)
                )

    @property
    def steps_of_pairs(self) -> int:
        """The length of all sequences if a dataset has a dimension of them."""
        return 5

    def _columns(self) -> list[Column]:
        if self.sequences == "files" and self.maybe(0.15):
            lengths = [self.rng.integers(0, 9, part.count) for part in self.parts]
            return [Packed(self, "p", lengths), *([Packed(self, "q", lengths)] * self.maybe(0.3))]
        kinds: list[Any] = [Plain] if self.sequences == "pairs" else [Plain, Plain, Plain, *KINDS]
        columns = [
            self.chance.choice(kinds)(self, f"c{n}") for n in range(self.chance.choice([1, 2, 3]))
        ]
        if all(column.field.per is not None for column in columns):
            columns.append(Plain(self, "rows"))
        cropped = [one for one in columns if isinstance(one, Plain) and one.crop is not None]
        if cropped and self.maybe(0.5):
            columns.append(Plain(self, "twin", twin=cropped[0]))
        return columns

    def _write(self) -> None:
        for number, path in enumerate(self.paths):
            with h5py.File(path, "w") as file:
                for part in self.parts:
                    if part.file == number:
                        group = file.require_group(part.group)
                        self._write_bounds(group, part)
                        for column in self.columns:
                            column.write(group, part)

    def _lose_files(self) -> set[str]:
        """Cut some files short, or remove them; return their names."""
        lost = set()
        for number, path in enumerate(self.paths):
            left = {part.file for part in self.parts if part.count and part.file != number}
            if self.skips and left and self.maybe(0.15):
                lost.add(str(path))
                self.parts = [part for part in self.parts if part.file != number]
                self.spoilable = [one for one in self.spoilable if one[0] != number]
                if self.maybe(0.5):
                    path.unlink()
                else:
                    os.truncate(path, path.stat().st_size // 2)
        return lost

    def _write_bounds(self, group: h5py.Group, part: Part) -> None:
        count = part.count
        cuts = sorted(self.chance.choices(range(count + 1), k=self.chance.choice([1, 2, 4])))
        group["ends"], group["starts"] = cuts, sorted(set(cuts) - {count} or {0})
        group["lengths"] = np.diff([0, *cuts])
        group["ids"] = np.searchsorted(cuts, np.arange(count), side="right") % 3
        group["last"] = np.isin(np.arange(count) + 1, cuts)

    def read(self, part: Part, name: str) -> np.ndarray:
        """Return what h5py reads, in native byte order, before anything is damaged."""
        if (part, name) in self.known:
            return self.known[part, name]
        with h5py.File(self.paths[part.file]) as file:
            found = file[part.group][name][()]
        if isinstance(found, np.ndarray) and found.dtype.kind != "O":
            found = found.astype(found.dtype.newbyteorder("="))
        self.known[part, name] = found
        return found

    def is_spoiled(self, part: Part, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return which elements of a dataset lie in a damaged chunk."""
        full = f"{part.group.rstrip('/')}/{name}"
        return self.spoiled.get((part.file, full.strip("/")), np.zeros(shape, bool))

    def _spoil(self) -> None:
        for file, name in self.chance.sample(self.spoilable, min(2, len(self.spoilable))):
            with h5py.File(self.paths[file]) as opened:
                dataset = opened[name]
                chunks = [
                    dataset.id.get_chunk_info(at) for at in range(dataset.id.get_num_chunks())
                ]
                is_bad, extent = np.zeros(dataset.shape, bool), dataset.chunks
            with self.paths[file].open("r+b") as raw:
                for chunk in chunks:
                    if chunk.filter_mask == 0 and self.maybe(0.25):
                        pairs = zip(chunk.chunk_offset, extent, strict=True)
                        is_bad[tuple(slice(a, a + n) for a, n in pairs)] = True
                        raw.seek(chunk.byte_offset)
                        raw.write(b"\x1f" + self.rng.bytes(chunk.size - 1))
            self.spoiled[file, name] = is_bad

    # --- which samples there are -----------------------------------------------------------------

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each sequence, and the end."""
        begin = 0
        for part in self.parts:
            count = self.count_in(part)
            bounds = [(0, count)]
            if self.sequences == "pairs":
                bounds = list(itertools.pairwise(range(0, count + 1, self.steps_of_pairs)))
            elif self.sequences in ("ends", "lengths"):
                bounds = list(itertools.pairwise([0, *self.read(part, "ends").tolist()]))
            elif self.sequences == "starts" and count:
                bounds = list(itertools.pairwise([*self.read(part, "starts").tolist(), count]))
            elif self.sequences in ("ids", "last"):
                ids, last = self.read(part, "ids"), self.read(part, "last")
                is_end = last if self.sequences == "last" else ids != np.append(ids[1:], -1)
                ends = sorted({*(np.flatnonzero(is_end) + 1).tolist(), count} - {0})
                bounds = list(itertools.pairwise([0, *ends]))
            for a, b in bounds:
                yield begin + a, begin + b
            begin += count

    def _find_samples(self) -> None:
        """Find the sequence of each row, and the rows that are samples, in order."""
        if self.sequences == "across":
            self.runs = [(0, self.count)]
        self.sequence = np.full(self.count, -1)
        self.first, self.end = np.zeros(self.count, int), np.zeros(self.count, int)
        for number, (begin, end) in enumerate(self.runs):
            self.sequence[begin:end], self.first[begin:end], self.end[begin:end] = (
                number,
                begin,
                end,
            )
        rows = np.arange(self.count)
        can_be = self.sequence >= 0
        for column in self.columns:
            for step in column.dropped_steps:
                can_be &= (rows + step >= self.first) & (rows + step < self.end)
        self.can_be = can_be.copy()
        if not self.is_drawn:
            can_be &= (rows - self.first) % self.every == self.offset
        self.samples = np.flatnonzero(can_be)
        if self.is_drawn:  # others in each epoch
            counts = [can_be[begin:end].sum() for begin, end in self.runs]
            self.samples = self.samples[: sum(-(-count // self.every) for count in counts)]
        if self.indices is not None:
            chosen = np.atleast_1d(rows[self.indices])
            self.samples = chosen[can_be[chosen]]

    # --- options ---------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        choose, maybe = self.chance.choice, self.maybe
        self.every, self.offset = choose([1, 1, 1, 2, 5]), 0
        self.is_drawn = self.every > 1 and maybe(0.2)
        if self.every > 1 and not self.is_drawn:
            self.offset = self.chance.randrange(self.every)
        given = {"groups": "ep_*", "across": "files", "last": ["last"]}
        sequences: dict[str, Any] = {}
        if self.sequences not in ("files", "pairs"):
            sequences[self.sequences] = given.get(self.sequences, self.sequences)
        if self.every > 1:
            sequences |= {"every": self.every, "offset": "random" if self.is_drawn else self.offset}
        options: dict[str, Any] = {
            "hdf5_path": self.paths,
            "fields": {column.name: column.field for column in self.columns},
            "sequences": Sequences(**sequences) if sequences else None,
            "batch_size": choose([1, 3, 4, 8, 50]),
            "shuffle": choose([False, False, "full", "window"]),
            "seed": self.chance.randrange(99),
            "num_threads": choose([0, 2]),
            "drop_last": maybe(0.2),
            "cache": "host" if maybe(0.2) and not self.is_drawn else None,
            "copy": maybe(0.1),
            "device": "cpu",
            "allow_external": self.folder,
            "debug_lifetimes": maybe(0.1),
            "prefetch": choose([1, 2, 2, 4]),
            "io": choose(["auto", "auto", "pread", "map"]),
            "window_bytes": choose([1 << 28, 4096, 500]),
            "index_cache": self.folder / "cache" if maybe(0.2) else False,
            "on_error": "skip" if self.skips else "raise",
            "workers": choose(["process", 2]) if self.has_helpers else "thread",
        }
        if options["workers"] == 2:
            options |= {"cache": None, "prefetch": 5}
        self.indices: Any = None
        if maybe(0.2) and not self.is_drawn and self.count:
            start, step = self.chance.randrange(self.count), choose([1, 2, 3])
            drawn = self.rng.integers(0, self.count, self.count)
            self.indices = choose(
                [slice(start, None, step), self.rng.random(self.count) < 0.6, drawn]
            )
            options["indices"] = self.indices
        self.weights: Any = None
        if maybe(0.15):
            self.weights = self.rng.integers(0, 3, self.count) * 0.5
            options["weights"] = self.weights
        self.epoch_samples = None
        if maybe(0.2):
            options["epoch_samples"] = self.epoch_samples = self.chance.randrange(1, 60)
        self.by_values = not self.is_drawn and maybe(0.3) and any(c.counts for c in self.columns)
        if self.by_values:
            options |= choose(
                [{"batch_values": 20}, {"bucket": 2}, {"batch_values": 30, "bucket": 3}]
            )
        self.renames = maybe(0.15) and not self.has_helpers
        self.renames &= not any(getattr(c, "crop", None) is not None for c in self.columns)
        if self.renames:
            options["postprocess"] = renamed
        self.world_size = choose([1, 1, 2, 3])
        return options

    def keep(self) -> None:
        """Have what is read of the files be kept on the disk, now and then."""
        if self.options["cache"] is None and self.maybe(0.4):
            self.options |= {"cache": "disk", "cache_dir": self.folder / "kept"}
            self.options |= {"cache_bytes": self.chance.choice([None, 100_000])}

    def put_in(self, store: MemoryStore) -> None:
        """Have the files lie in a store, by names that end in their paths."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                store.put(path, far_name(path))
        self.options["hdf5_path"] = list(map(far_name, self.paths))
        self.options["allow_external"] = far_name(self.folder)
        self.options |= {"fetch_bytes": self.chance.choice([1, 500, 1 << 20])}
        self.keep()
        self.lost = set(map(far_name, self.lost))

    # --- checks ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Read some epochs in each rank, resume one of them, and compare all with the truth."""
        epochs = 1 if self.has_helpers else 3 if self.epoch_samples else 2
        resumed = self.chance.randrange(self.world_size)
        found = []
        for rank in range(self.world_size):
            with self._reader(rank) as reader:
                if not self.has_helpers:
                    poison(reader)
                    assert self.weights is not None or reader.num_samples == self.samples.size
                found.append(self._epochs(reader, epochs, rank == resumed))
                if rank == 0 and not self.has_helpers and self.samples.size and self.maybe(0.3):
                    self._check_given(reader)
        self._check_orders([[[b.index for b in epoch] for epoch in rank] for rank in found])
        self._check_resumed(resumed, found[resumed])

    def _reader(self, rank: int, **changed: Any) -> AsyncReader:
        place = {"rank": rank, "world_size": self.world_size} if self.world_size > 1 else {}
        return AsyncReader(**{**self.options, **place, **changed})

    def _epochs(self, reader: AsyncReader, epochs: int, is_kept: bool) -> list[list[Any]]:
        self.state, self.after, count = None, 0, 0
        stop = self.chance.randrange(1, 9)
        found: list[list[Any]] = []
        for epoch in range(epochs):
            found.append([])
            expected = len(reader)
            for batch in reader:
                self._check_batch(batch)
                assert (batch.epoch, batch.number) == (epoch, len(found[-1]))
                found[-1].append(batch.copy())
                count += 1
                if is_kept and count == stop:
                    self.state, self.after = json.dumps(reader.state_dict()), count
            assert len(found[-1]) == expected, "another number of batches than len() says"
        skipped = [one for one in reader.skipped if one.sample is not None]
        assert {one.file for one in reader.skipped if one.sample is None} == self.lost
        bad = np.array([one.sample for one in skipped], int)
        assert not self._without_bad(bad, certainly=False).size or not self.spoiled
        return found

    def _check_batch(self, batch: Any) -> None:
        index = batch.index
        assert self.can_be[index].all(), "no samples"
        assert same(batch.sequence, self.sequence[index]), "batch.sequence"
        assert same(batch.step, index - self.first[index]), "batch.step"
        names = [name for column in self.columns for name in column.delivered]
        names += [name for column in self.columns for name in column.further]
        places = {name: f"out{number}" for number, name in enumerate(names)}
        if self.renames:
            assert same(batch["own_index"], index)
        flips: dict[Any, np.ndarray] = {}
        for column in self.columns:
            column.check(lambda n: batch[places[n] if self.renames else n], index, flips, batch)

    def _check_given(self, reader: AsyncReader) -> None:
        index = self.chance.choices(self.samples.tolist(), k=3)
        if self.is_drawn:
            return
        batches = [reader.read(index) for _ in range(2)]  # the first one in Python
        with contextlib.suppress(ConfigError):  # it is larger than a batch
            reader.fetch_data(index)
            batches.append(next(b for b in iter(reader.get_next_batch, None) if b.epoch < 0).copy())
        for batch in batches:
            assert same(batch.index, self._without_bad(np.array(index))) or self._has_maybe
            self._check_batch(batch)

    def _check_resumed(self, rank: int, found: list[list[Any]]) -> None:
        if self.state is None:
            return
        changed = {"num_threads": 2 - self.options["num_threads"], "prefetch": 3}
        if self.options["workers"] == 2:
            changed = {}
        rest = list(itertools.chain(*found))[self.after :]
        with self._reader(rank, **changed) as reader:
            reader.load_state_dict(json.loads(self.state))
            for expected in rest:
                batch = reader.get_next_batch()
                assert same(batch.index, expected.index), "other samples after a resume"
                for name in expected.keys():
                    assert same(batch[name], expected[name]), f"{name}: another after a resume"

    @property
    def _has_maybe(self) -> bool:
        return any(
            (c.is_bad(self.samples)[0] != c.is_bad(self.samples)[1]).any() for c in self.columns
        )

    def _without_bad(self, index: np.ndarray, *, certainly: bool = True) -> np.ndarray:
        """Return samples without those that are damaged; or also those that may be."""
        kept = np.ones(index.size, bool)
        for column in self.columns:
            kept &= ~column.is_bad(index)[0 if certainly else 1]
        return index[kept]

    def _check_orders(self, found: list[list[list[np.ndarray]]]) -> None:
        """Check what all ranks have, epoch by epoch: ``found[rank][epoch]`` are their batches."""
        n, size = self.samples.size, self.options["batch_size"] * self.world_size
        whole = []
        for epoch in range(len(found[0])):
            steps = list(zip(*(rank[epoch] for rank in found), strict=True))
            got = np.concatenate([np.zeros(0, int), *itertools.chain(*steps)])
            whole.append(got)
            if not self.by_values:
                of_epoch = (self.epoch_samples or n) * (n > 0)
                count = of_epoch // size if self.options["drop_last"] else -(-of_epoch // size)
                assert len(steps) == count, f"{len(steps)} steps, {count} are right"
            if self.weights is None and not self.epoch_samples and not self.is_drawn:
                self._check_once(got)
            if self.is_drawn and not self.epoch_samples and self.weights is None:
                most = max(Counter(got.tolist()).values(), default=1)
                assert most <= self.world_size, "drawn samples come more than once"
        if self.weights is not None and not self.is_drawn:  # else of where samples come from
            assert (self.weights[np.concatenate(whole)] > 0).all(), "a sample of weight 0"
        elif self.epoch_samples and not self.options["drop_last"] and not self.is_drawn:
            most = Counter(np.concatenate(whole).tolist())
            passes = -(-self.epoch_samples * len(whole) // max(1, n)) + 1
            times = Counter(self.samples.tolist())
            repeated = (self.world_size - 1) * len(whole)  # by the last steps of epochs
            assert all(most[one] <= passes * times[one] + repeated for one in most)

    def _check_once(self, got: np.ndarray) -> None:
        right, found = Counter(self._without_bad(self.samples).tolist()), Counter(got.tolist())
        extra, missing = found - right, right - found
        most = self.world_size - 1  # the last step may repeat some
        assert extra.total() <= most, f"these come too often: {extra}"
        assert not set(extra) - set(right), f"these should not come: {set(extra) - set(right)}"
        if not self.options["drop_last"]:
            certain = Counter(self._without_bad(self.samples, certainly=False).tolist())
            assert not missing & certain, f"these are missing: {missing & certain}"
        is_plain = not self.options["shuffle"] and not self.by_values and not self._has_maybe
        if is_plain and max(right.values(), default=0) == 1:
            got = np.array(list(dict.fromkeys(got.tolist())), int)
            assert same(got, self._without_bad(self.samples)[: got.size]), "another order"


def try_case(
    seed: int, number: int, folder: Path, *, helpers: bool = True, far: bool = False
) -> str:
    """Run a case; return an empty text, or the reason for which its options are refused.

    `far`: its files are read out of a store that is no local one.
    """
    case = Case(seed, number, folder, helpers=helpers and not far)
    case.put_in(new_store()) if far else case.keep()
    try:
        if far and case.skips:  # what only HDF5 can read is refused, not damaged
            paths = [path for path in case.options["hdf5_path"] if path not in case.lost]
            AsyncReader(**case.options | {"on_error": "raise", "hdf5_path": paths}).close()
        case.run()
    except ConfigError as error:
        return str(error)
    except Exception as error:
        if isinstance(error, DatasetError) and "an epoch has no batch" in str(error):
            return str(error)
        if far and isinstance(error, H5AsyncError) and "which opens no other files" in str(error):
            return str(error)
        options = [f"{name}={value!r}" for name, value in case.options.items()]
        found = f"samples={case.samples.tolist()}, ranks={case.world_size}, runs={case.runs}"
        error.add_note("\n".join(["In this case:", *options, found]))
        raise
    return ""
