"""A case's chance enters; random datasets, a field of them, and its right values leave."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
from hdf5files import TEXT, write_compact

from h5async import Csr, Field, Ragged, RaggedField, SparseField

STORED = ("i1", "u1", "i2", ">i2", "u2", "i4", ">i4", "i8", "f4", ">f4", "f8", "?", "S3", "c8")
PACKED = ("i1", "u1", "i2", ">i2", "i4", "f4")
Get = Callable[[str], Any]


def same(found: Any, right: Any) -> bool:
    """Tell whether two arrays have the same shape, dtype and values."""
    if isinstance(right, Csr):
        return found.shape == right.shape and all(
            same(getattr(found, name), getattr(right, name))
            for name in ("data", "indices", "indptr")
        )
    if isinstance(right, Ragged):
        return same(found.values, right.values) and same(found.offsets, right.offsets)
    found, right = np.asarray(found), np.asarray(right)
    if found.shape != right.shape or found.dtype != right.dtype:
        return False
    return np.array_equal(found, right, equal_nan=right.dtype.kind in "fc")


def assert_same(found: Any, right: Any, what: str) -> None:
    """Compare two arrays."""
    assert same(found, right), f"{what}:\n{found!r}\nis not\n{right!r}"


def store(case: Any, group: h5py.Group, name: str, array: np.ndarray, file: int) -> None:
    """Write a dataset in one of many ways."""
    choose = case.chance.choice
    kinds = ["plain", "chunks", "gzip", "gzip", "gzip", "lzf", "checked", "virtual", "elsewhere"]
    kinds += ["external", "compact", "holes"]
    kind = choose(kinds) if array.size else "plain"
    chunks = tuple(case.chance.randrange(1, max(1, size) + 1) for size in array.shape)
    storage: dict[str, Any] = {"chunks": chunks} if kind != "plain" else {}
    if kind in ("gzip", "holes", "virtual", "elsewhere"):
        storage |= {"compression": "gzip", "shuffle": case.maybe(0.5)}
    if kind == "lzf":
        storage["compression"] = "lzf"
    storage["fletcher32"] = kind == "checked" or (kind == "gzip" and case.maybe(0.2))
    full = f"{group.name.rstrip('/')}/{name}".strip("/")
    if kind == "compact" and array.dtype.kind != "b" and array.nbytes < 60_000:
        write_compact(group, name, array)
    elif kind == "external":
        raw = case.folder / f"{file}_{full.replace('/', '_')}.bin"
        external = [(raw, 0, array.nbytes)]
        raw.write_bytes(np.ascontiguousarray(array).tobytes())
        group.create_dataset(name, array.shape, array.dtype, external=external)
    elif kind in ("virtual", "elsewhere"):
        _store_virtual(case, group, name, array, storage, kind == "virtual")
    elif kind == "holes":
        storage["fillvalue"] = array.flat[0]
        dataset = group.create_dataset(name, array.shape, array.dtype, **storage)
        some = slice(case.chance.randrange(array.shape[0]), None)
        dataset[some] = array[some]
    else:
        group.create_dataset(name, data=array, **storage)
        if storage["fletcher32"] or kind == "gzip":
            case.spoilable.append((file, full))


def _store_virtual(
    case: Any, group: h5py.Group, name: str, array: np.ndarray, storage: Any, is_here: bool
) -> None:
    """Write a virtual dataset of two halves, here or in a file beside it."""
    half = len(array) // 2
    layout = h5py.VirtualLayout(array.shape, array.dtype)
    other = group.file if is_here else h5py.File(f"{group.file.filename}.{name}.src", "a")
    for number, part in enumerate((array[:half], array[half:])):
        if part.size:
            where = f"sources/{group.name.strip('/') or 'root'}/{name}_{number}"
            chunks = tuple(map(min, storage["chunks"], part.shape))
            source = other.create_dataset(where, data=part, **{**storage, "chunks": chunks})
            begin = number * half
            layout[begin : begin + len(part)] = h5py.VirtualSource(source)[...]
    group.create_virtual_dataset(name, layout)
    if not is_here:
        other.close()


class Column:
    """A field, the datasets that it is of, and what is right."""

    counts = False  # values, for batch_values
    dropped_steps: tuple[int, ...] = ()
    further: tuple[str, ...] = ()  # other positional arrays of a batch
    field: Any

    def __init__(self, case: Any, name: str) -> None:
        self.case, self.name, self.delivered = case, name, (name,)

    def count_in(self, part: Any) -> int:
        """Return the number of samples in a part."""
        return int(part.count)

    def is_bad(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tell which samples are damaged, certainly and maybe."""
        none = np.zeros(index.size, bool)
        return none, none

    def numbers(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return random values of a dtype."""
        dtype, rng = np.dtype(dtype), self.case.rng
        if dtype.kind == "S":
            return rng.integers(97, 100, (*shape, 3), "u1").view("S3").reshape(shape)
        if dtype.kind in "fc":
            return (rng.integers(-40, 40, shape) / 4).astype(dtype)
        return rng.integers(0, 2 if dtype.kind == "b" else 99, shape).astype(dtype)

    def write(self, group: h5py.Group, part: Any) -> None:
        """Write what a part of the rows has."""
        raise NotImplementedError

    def load(self) -> None:
        """Read with h5py what is right."""
        raise NotImplementedError

    def check(self, get: Get, index: np.ndarray, flips: Any, batch: Any) -> None:
        """Compare the values of a batch of some samples."""
        raise NotImplementedError


class Plain(Column):
    """Rows of one shape."""

    def __init__(self, case: Any, name: str, twin: Any = None) -> None:
        super().__init__(case, name)
        choose, maybe = case.chance.choice, case.maybe
        self.is_pairs = case.sequences == "pairs"
        self.row = tuple(choose([1, 2, 3, 5, 7]) for _ in range(choose([0, 1, 1, 2, 2, 3])))
        self.stored = np.dtype(choose(STORED))
        self.is_packed = maybe(0.15)
        if self.is_packed:
            self.stored = np.dtype(choose(PACKED))
        self.before = choose(range(len(self.row) + 1)) if maybe(0.3) and not self.is_pairs else 0
        if twin is not None:
            self.row, self.before = twin.row, twin.before
        self.member = maybe(0.15) and not self.before and not self.is_packed
        self.in_dataset = choose(range(len(self.row) + 1)) if self.member else 0
        self.options: dict[str, Any] = {}
        count = len(self.row) + 1 + self.is_pairs
        of_samples = {0, 1} if self.is_pairs else {self.before}
        self.dims = [dim for dim in range(count) if dim not in of_samples]
        self.num_dim: Any = (0, 1) if self.is_pairs else self.before
        self.labels = "xyz"[: len(self.row)] if maybe(0.3) and not self.member else ""
        self._draw_parts(twin)
        self._draw_steps()
        self._draw_values()
        path = f"{name}/v" if self.member else name
        self.field = Field(path, num_dim=self.num_dim, **self.options)

    def _dim(self, at: int) -> Any:
        return self.labels[at] if self.labels else self.dims[at]

    def _draw_parts(self, twin: Any) -> None:
        chance, maybe = self.case.chance, self.case.maybe
        self.region = [slice(None)] * len(self.row)
        self.crop: dict[int, int] | None = None
        self.flipped: tuple[int, ...] = ()
        self.at = chance.choice(["random", "random", "center"])
        if twin is not None:
            self.region, self.crop, self.flipped, self.at = twin.crop_of
            self.group = twin.group
        elif self.row and maybe(0.5):
            self.group = self.name
            if maybe(0.5):
                for at, size in enumerate(self.row):
                    begin = chance.randrange(size)
                    end = chance.choice([None, chance.randrange(begin + 1, size + 1)])
                    self.region[at] = slice(begin, end, chance.choice([None, 1, 2, 3]))
            if maybe(0.6):
                several = chance.sample(
                    range(len(self.row)), chance.randrange(1, len(self.row) + 1)
                )
                self.crop = {at: chance.randrange(1, self.sizes[at] + 1) for at in several}
                if maybe(0.5):
                    self.flipped = tuple(
                        chance.sample(several, chance.randrange(1, len(several) + 1))
                    )
        self.crop_of = (self.region, self.crop, self.flipped, self.at)
        some = {at: one for at, one in enumerate(self.region) if one != slice(None)}
        if some:
            self.options["region"] = {self._dim(at): one for at, one in some.items()}
        if self.crop is not None:
            sizes = {self._dim(at): size for at, size in self.crop.items()}
            self.options |= {"crop": sizes, "crop_at": self.at, "crop_group": self.group}
            if self.flipped:
                self.options["flip"] = [self._dim(at) for at in self.flipped]

    @property
    def sizes(self) -> list[int]:
        """The shape of rows within the region."""
        return [len(range(size)[part]) for size, part in zip(self.row, self.region, strict=True)]

    def _draw_steps(self) -> None:
        chance = self.case.chance
        self.steps: tuple[int, ...] | None = None
        if self.case.maybe(0.35):
            self.steps = chance.choice([(0,), (0, 1), (-2, 0, 1), (1,), (-1, -1, 3), (0, 2, 4)])
            pad = chance.choice(["drop", "edge", "zero"])
            self.options |= {"steps": self.steps, "pad": pad}
            if pad == "drop":
                self.dropped_steps = self.steps
            elif self.case.maybe(0.5):
                self.options["pad_mask"] = f"{self.name}_there"

    def _draw_values(self) -> None:
        chance, maybe = self.case.chance, self.case.maybe
        sizes = self.sizes
        for at, size in (self.crop or {}).items():
            sizes[at] = size
        self.order = list(range(len(self.row)))
        if maybe(0.3) and self.row:
            chance.shuffle(self.order)
            axes = [self.dims[at] for at in self.order]
            first = self.num_dim if self.is_pairs else (self.num_dim,)
            self.options["axes"] = (*first, *axes)
        self.sizes_out = tuple(sizes[at] for at in self.order)
        self.scale: Any = None
        self.shift: Any = None
        self.dtype = self.stored.newbyteorder("=")
        if self.is_packed:
            self.options["decode_cf"] = True
            self._draw_packing()
        if self.stored.kind in "Sc":
            return
        if maybe(0.35):
            self.scale = self._factor()
            self.shift = self._factor() if maybe(0.5) else None
            self.dtype = np.dtype("f4")
            found = {"scale": self.scale, "offset": self.shift}
            self.options |= {key: one for key, one in found.items() if one is not None}
        floats = self.is_packed or self.scale is not None
        if maybe(0.3):
            self.dtype = np.dtype(
                chance.choice(["f4", "f8"] if floats else ["f4", "f8", "i4", "i8", "i2"])
            )
            self.options["dtype"] = self.dtype

    def _factor(self) -> Any:
        rng, out = self.case.rng, self.sizes_out
        kind = self.case.chance.choice(["one", "channel", "element"])
        if kind == "one" or not out:
            return float(rng.integers(1, 9) / 4)
        count = math.prod(out)
        if kind == "channel":
            at = self.options.get("channel_dim")
            if at is None and self.case.maybe(0.5):
                at = self.options["channel_dim"] = self._dim(
                    self.case.chance.randrange(len(self.row))
                )
            count = out[self._channel]
        return (rng.integers(1, 9, count) / 4).tolist()

    @property
    def _channel(self) -> int:
        at = self.options.get("channel_dim")
        return (
            0 if at is None else self.order.index([*map(self._dim, range(len(self.row)))].index(at))
        )

    def _broadcast(self, factor: Any) -> np.ndarray:
        """Return a factor in a shape that fits delivered rows."""
        found, out = np.asarray(factor, self.dtype), self.sizes_out
        if not found.ndim or not out:
            return found
        if found.size in (1, out[self._channel]):
            return found.reshape(-1, *[1] * (len(out) - 1 - self._channel))
        return found.reshape(out)

    # --- packed values ---------------------------------------------------------------------------

    def _draw_packing(self) -> None:
        kind = self.case.chance.choice(["f4", "f8"])
        scaled, shifted, filled = (self.case.maybe(0.6) for _ in range(3))
        self.packing = scaled and kind, shifted and kind, filled
        stored, is_wide = self.stored, self.stored.kind in "iu" and self.stored.itemsize == 4
        own = self.dtype
        if scaled or shifted:
            own = np.dtype("f8" if shifted and (is_wide or not scaled) else kind)
        elif filled and stored.kind != "f":
            own = np.dtype("f4" if stored.itemsize <= 2 else "f8")
        self.unpacked = self.dtype = own
        self.attributes: dict[Any, dict[str, Any]] = {}

    def _packing_of(self, part: Any) -> dict[str, Any]:
        if part not in self.attributes:
            scaled, shifted, filled = self.packing
            kinds = {"scale_factor": scaled, "add_offset": shifted}
            found = {
                key: np.dtype(kind).type(self.case.rng.integers(1, 9) / 4)
                for key, kind in kinds.items()
                if kind
            }
            if filled:
                found["_FillValue"] = self.numbers((), self.stored)[()]
            self.attributes[part] = found
        return self.attributes[part]

    def _unpack(self, raw: np.ndarray, part: Any) -> np.ndarray:
        how = self._packing_of(part)
        values = raw.astype(self.unpacked)
        if "_FillValue" in how:
            fill = how["_FillValue"].astype(self.stored.newbyteorder("="))
            if self.unpacked.kind == "f":
                values[raw == fill] = np.nan
        if "scale_factor" in how:
            values *= how["scale_factor"]
        if "add_offset" in how:
            values += how["add_offset"]
        return values

    # --- files -----------------------------------------------------------------------------------

    def count_in(self, part: Any) -> int:
        return int(part.count * (self.case.steps_of_pairs if self.is_pairs else 1))

    def write(self, group: h5py.Group, part: Any) -> None:
        lead = (part.count, self.case.steps_of_pairs) if self.is_pairs else (part.count,)
        values = np.moveaxis(self.numbers((*lead, *self.row), self.stored), 0, self.before)
        if self.member:
            cut = len(lead) + self.in_dataset
            own = [("a", "u1"), ("v", self.stored, values.shape[cut:]), ("b", "f8")]
            table = np.zeros(values.shape[:cut], own)
            table["v"] = values
            values = table
        store(self.case, group, self.name, np.ascontiguousarray(values), part.file)
        dataset = group[self.name]
        if self.is_packed:
            dataset.attrs.update(self._packing_of(part))
        for at, label in enumerate(self.labels):
            dataset.dims[self.dims[at]].label = label

    def load(self) -> None:
        self.values = np.concatenate([self._rows(part, False) for part in self.case.parts])
        if self.is_packed:
            self.part_of = np.repeat(
                np.arange(len(self.case.parts)), [self.count_in(part) for part in self.case.parts]
            )

    def _rows(self, part: Any, bad: bool) -> np.ndarray:
        found = self.case.read(part, self.name)
        if bad:
            mask = self.case.is_spoiled(part, self.name, found.shape)
            if self.member:
                inner = found["v"].shape[found.ndim :]
                mask = np.broadcast_to(
                    mask.reshape(mask.shape + (1,) * len(inner)), mask.shape + inner
                )
            found = mask
        elif self.member:
            found = found["v"]
            found = found.astype(found.dtype.newbyteorder("="))
        found = np.moveaxis(found, self.before, 0)
        return found.reshape(-1, *self.row)

    # --- what is right ---------------------------------------------------------------------------

    def _taken(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of samples, and which of them exist: (n,), or (n, steps)."""
        case = self.case
        if self.steps is None:
            return index, np.ones(index.size, bool)
        rows = index[:, None] + np.array(self.steps)
        first, end = case.first[index, None], case.end[index, None]
        there = (rows >= first) & (rows < end)
        return np.clip(rows, first, np.maximum(first, end - 1)), there

    def _part(self, array: np.ndarray, begins: np.ndarray | None) -> np.ndarray:
        """Return the region, and of that the crop, of values (n, [steps,] *row)."""
        lead = array.ndim - len(self.row)
        found = array[(..., *self.region)]
        if self.crop is None or begins is None:
            return found
        parts = []
        for one, begin in zip(found, begins, strict=True):
            cut = [slice(None)] * one.ndim
            for (at, size), first in zip(self.crop.items(), begin.tolist(), strict=True):
                assert 0 <= first <= self.sizes[at] - size, "a crop outside of the row"
                cut[lead - 1 + at] = slice(first, first + size)
            parts.append(one[tuple(cut)])
        sizes = list(array.shape[1:lead]) + [
            self.crop.get(at, n) for at, n in enumerate(self.sizes)
        ]
        return np.stack(parts) if parts else np.zeros((0, *sizes), array.dtype)

    def _centered(self, count: int) -> np.ndarray:
        begins = [(self.sizes[at] - size) // 2 for at, size in (self.crop or {}).items()]
        return np.tile(np.array(begins, int), (count, 1))

    def is_bad(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self.case.spoiled:
            return super().is_bad(index)
        if not hasattr(self, "bad"):
            self.bad = np.concatenate([self._rows(part, True) for part in self.case.parts])
        rows, there = self._taken(index)
        bad = self.bad[rows]
        if self.options.get("pad") != "edge":
            bad[~there] = False
        is_centered = self.crop is not None and self.at == "center"
        found = self._part(bad, self._centered(index.size) if is_centered else None)
        found = found.any(axis=tuple(range(1, found.ndim)))
        is_drawn = self.crop is not None and self.at == "random"
        return np.zeros_like(found) if is_drawn else found, found

    def check(self, get: Get, index: np.ndarray, flips: Any, batch: Any) -> None:
        rows, there = self._taken(index)
        raw = self.values[rows]
        if self.options.get("pad") == "zero":
            raw[~there] = np.zeros((), raw.dtype)
        begins = None
        if self.crop is not None:
            begins = batch[f"{self.name}_crop"]
            assert self.at == "random" or same(begins, self._centered(index.size)), "not centered"
        found = get(self.name)
        owner = np.where(there, rows, index if self.steps is None else index[:, None])
        raw = self._part(raw, begins)
        can_be = []
        choices = [(False, True) if at in self.flipped else (False,) for at in range(len(self.row))]
        for turned in itertools.product(*choices):
            turn = tuple(slice(None, None, -1 if one else 1) for one in turned)
            right = self._delivered(raw[(..., *turn)], owner)
            if len(index) == 0 or not self.flipped:
                assert_same(found, right, self.name)
                can_be.append(np.ones(index.size, bool))
            else:
                assert found.shape == right.shape
                assert found.dtype == right.dtype
                pairs = zip(found, right, strict=True)
                can_be.append(np.array([same(one, other) for one, other in pairs]))
        ways = np.stack(can_be)
        if self.crop is not None:
            ways &= flips.get(self.group, (ways, None))[0]
            flips[self.group] = ways, begins
            assert same(flips[self.group][1], begins), "a group is cropped at different places"
        assert ways.any(axis=0).all(), f"{self.name}: no way of flipping gives\n{found!r}"
        if "pad_mask" in self.options and not self.case.renames:
            assert_same(batch[self.options["pad_mask"]], there, "pad_mask")

    def _delivered(self, raw: np.ndarray, owner: np.ndarray) -> np.ndarray:
        if self.is_packed:
            values = np.empty(raw.shape, self.unpacked)
            for number, part in enumerate(self.case.parts):
                here = self.part_of[owner] == number
                values[here] = self._unpack(raw[here], part)
            raw = values
        lead = raw.ndim - len(self.row)
        turned = raw.transpose(*range(lead), *(lead + at for at in self.order))
        with np.errstate(all="ignore"):
            out = turned.astype(self.dtype)
            if self.scale is not None:
                out *= self._broadcast(self.scale)
            if self.shift is not None:
                out += self._broadcast(self.shift)
        return out


class Lengths(Column):
    """Values one behind the other, with the lengths of samples."""

    counts = True
    tail: tuple[int, ...] = ()

    def lengths_of(self, part: Any) -> np.ndarray:
        """Return the lengths of a part's samples."""
        if part not in self._lengths:
            self._lengths[part] = self.case.rng.integers(0, 6, part.count)
        return self._lengths[part]

    def __init__(self, case: Any, name: str) -> None:
        super().__init__(case, name)
        self._lengths: dict[Any, np.ndarray] = {}

    def _bounds(self) -> None:
        """Find where samples begin among all values, and which are damaged."""
        lengths = [self.lengths_of(part) for part in self.case.parts]
        self.ends = np.cumsum(np.concatenate(lengths))
        self.begins = self.ends - np.concatenate(lengths)

    def spans(self, index: np.ndarray) -> Iterator[slice]:
        """Yield the values of each sample."""
        for one in index.tolist():
            yield slice(self.begins[one], self.ends[one])

    def is_bad(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self.case.spoiled:
            return super().is_bad(index)
        bad = np.zeros(int(self.ends[-1]) if self.ends.size else 0, bool)
        for name in self.names:
            several = [
                self.case.is_spoiled(part, name, (int(self.lengths_of(part).sum()), *self.tail))
                for part in self.case.parts
            ]
            bad |= np.concatenate([one.any(axis=tuple(range(1, one.ndim))) for one in several])
        found = np.array([bad[span].any() for span in self.spans(index)], bool)
        return found, found

    names: tuple[str, ...] = ()

    def gather(self, name: str) -> np.ndarray:
        """Return the values of all parts."""
        return np.concatenate([self.case.read(part, name) for part in self.case.parts])


class Flat(Lengths):
    """Ragged samples with offsets."""

    def __init__(self, case: Any, name: str) -> None:
        super().__init__(case, name)
        self.tail = case.chance.choice([(), (), (2,), (3, 2)])
        self.kind = case.chance.choice(["offsets", "ends", "lengths"])
        self.stored = np.dtype(case.chance.choice(["u1", ">i2", "i4", "f4", "f8"]))
        self.options: dict[str, Any] = {"offsets": f"{name}_at", "offsets_kind": self.kind}
        self.scale, self.pad_to = None, None
        if case.maybe(0.3):
            self.scale = self.options["scale"] = 0.5
        if case.maybe(0.3):
            self.pad_to = self.options["pad_to"] = case.chance.choice([0, 1, 3, 8])
        self.field = RaggedField(name, **self.options)
        self.names = (name,)

    def write(self, group: h5py.Group, part: Any) -> None:
        lengths = self.lengths_of(part)
        ends = np.cumsum(lengths)
        values = self.numbers((int(lengths.sum()), *self.tail), self.stored)
        store(self.case, group, self.name, values, part.file)
        kinds = {"offsets": np.append(0, ends), "ends": ends, "lengths": lengths}
        group[f"{self.name}_at"] = kinds[self.kind]

    def load(self) -> None:
        self._bounds()
        self.values = self.gather(self.name)
        if self.scale is not None:
            self.values = self.values.astype("f4") * np.float32(self.scale)

    def check(self, get: Get, index: np.ndarray, flips: Any, batch: Any) -> None:
        several = [self.values[span] for span in self.spans(index)]
        found = get(self.name)
        if self.pad_to is None:
            offsets = np.cumsum([0, *map(len, several)])
            assert_same(
                found, Ragged(np.concatenate([self.values[:0], *several]), offsets), self.name
            )
            return
        right = np.zeros((index.size, self.pad_to, *self.tail), self.values.dtype)
        mask = np.zeros((index.size, self.pad_to), bool)
        for number, one in enumerate(several):
            right[number, : len(one)], mask[number, : len(one)] = one[: self.pad_to], True
        assert_same(found, right, self.name)
        if not self.case.renames:
            assert_same(batch[f"{self.name}_mask"], mask, "mask")


class Packed(Flat):
    """Windows of documents; all such columns of a case have the same lengths."""

    counts = False

    def __init__(self, case: Any, name: str, lengths: list[np.ndarray]) -> None:
        super().__init__(case, name)
        self._lengths = dict(zip(case.parts, lengths, strict=True))
        self.options.pop("pad_to", None)
        self.pad_to = None
        self.size = case.__dict__.setdefault("pack", case.chance.choice([1, 4, 7, 16]))
        self.field = RaggedField(name, **self.options, pack=self.size)

    def count_in(self, part: Any) -> int:
        return int(-(-self.lengths_of(part).sum() // self.size))

    def load(self) -> None:
        super().load()
        documents, self.begins, self.ends, first = [], [], [], 0
        for part in self.case.parts:
            count = int(self.lengths_of(part).sum())
            for at in range(0, count, self.size):
                self.begins.append(first + at)
                self.ends.append(first + min(count, at + self.size))
            first += count
            documents.append(self.lengths_of(part))
        lengths = np.concatenate(documents)
        self.document = np.repeat(np.arange(lengths.size), lengths)
        self.place = np.arange(first) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.begins, self.ends = np.array(self.begins, int), np.array(self.ends, int)

    def check(self, get: Get, index: np.ndarray, flips: Any, batch: Any) -> None:
        shape = (index.size, self.size)
        right = np.zeros((*shape, *self.tail), self.values.dtype)
        documents, places = np.full(shape, -1), np.full(shape, -1, "i4")
        for number, span in enumerate(self.spans(index)):
            count = span.stop - span.start
            right[number, :count] = self.values[span]
            documents[number, :count], places[number, :count] = (
                self.document[span],
                self.place[span],
            )
        assert_same(get(self.name), right, self.name)
        if not self.case.renames:
            assert_same(batch[f"{self.name}_documents"], documents, "documents")
            assert_same(batch[f"{self.name}_positions"], places, "positions")


class Variable(Lengths):
    """Elements of a variable-length datatype."""

    def __init__(self, case: Any, name: str) -> None:
        super().__init__(case, name)
        self.stored = case.chance.choice([None, "u1", "i4", "f8"])
        self.field = Field(name) if case.maybe(0.5) else RaggedField(name)

    def write(self, group: h5py.Group, part: Any) -> None:
        kind = TEXT if self.stored is None else h5py.vlen_dtype(self.stored)
        chunks = (max(1, part.count // 2),) if self.case.maybe(0.5) else None
        dataset = group.create_dataset(
            self.name, (part.count,), kind, chunks=chunks, maxshape=chunks and (None,)
        )
        for at, length in enumerate(self.lengths_of(part).tolist()):
            values = self.numbers((length,), self.stored or "u1")
            dataset[at] = "".join(chr(97 + n) for n in values) if self.stored is None else values

    def load(self) -> None:
        self.several = []
        for part in self.case.parts:
            for one in self.case.read(part, self.name):
                is_text = self.stored is None
                self.several.append(
                    np.frombuffer(one, "u1") if is_text else np.asarray(one, self.stored)
                )

    def is_bad(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return Column.is_bad(self, index)

    def check(self, get: Get, index: np.ndarray, flips: Any, batch: Any) -> None:
        several = [self.several[one] for one in index.tolist()]
        values = np.concatenate([np.zeros(0, self.stored or "u1"), *several])
        offsets = np.cumsum([0, *map(len, several)])
        assert_same(get(self.name), Ragged(values, offsets), self.name)


class Sparse(Lengths):
    """Rows of a sparse matrix."""

    WIDTH = 9

    def __init__(self, case: Any, name: str) -> None:
        super().__init__(case, name)
        choose, maybe = case.chance.choice, case.maybe
        self.stored, self.index_dtype = (
            np.dtype(choose(["f4", "f8", "i4", "u2"])),
            choose(["i4", "i8"]),
        )
        self.options: dict[str, Any] = {"dense": maybe(0.5)}
        self.columns = None
        if maybe(0.5):
            self.columns = case.rng.permutation(self.WIDTH)[: choose([1, 4, 9])]
            self.options["columns"] = self.columns
            if maybe(0.3):
                self.columns = np.sort(self.columns)
                self.options["columns"] = np.isin(np.arange(self.WIDTH), self.columns)
        self.has_counts = maybe(0.4)
        if self.has_counts:
            found = {"totals": f"{name}_total", "target_sum": choose([1.0, 100.0]), "log1p": True}
            self.options |= {key: one for key, one in found.items() if maybe(0.6)}
        elif maybe(0.3):
            self.options |= {"scale": 0.5, **({"offset": 2.0} if self.options["dense"] else {})}
        self.counts = not self.options["dense"]
        self.field = SparseField(name, **self.options)
        if "totals" in self.options:
            self.further = (self.options["totals"],)
        self.names = (f"{name}/data", f"{name}/indices")

    def write(self, group: h5py.Group, part: Any) -> None:
        lengths = self.lengths_of(part)
        several = [np.sort(self.case.rng.permutation(self.WIDTH)[:n]) for n in lengths]
        matrix = group.create_group(self.name)
        matrix.attrs["encoding-type"], matrix.attrs["shape"] = (
            "csr_matrix",
            (part.count, self.WIDTH),
        )
        values = self.numbers((int(lengths.sum()),), self.stored)
        store(self.case, matrix, "data", np.abs(values), part.file)
        indices = np.concatenate([np.zeros(0, int), *several]).astype(self.index_dtype)
        store(self.case, matrix, "indices", indices, part.file)
        matrix["indptr"] = np.append(0, np.cumsum(lengths))

    def load(self) -> None:
        self._bounds()
        self.values, self.indices = (self.gather(name) for name in self.names)

    def check(self, get: Get, index: np.ndarray, flips: Any, batch: Any) -> None:
        options, width = self.options, self.WIDTH if self.columns is None else len(self.columns)
        place = np.full(self.WIDTH, -1)
        place[np.arange(self.WIDTH) if self.columns is None else self.columns] = np.arange(width)
        rows, totals = [], []
        scaled = {"target_sum", "log1p"} & options.keys()
        for span in self.spans(index):
            values, at = self.values[span], place[self.indices[span]]
            total = values.astype("f8").sum()
            totals.append(total)
            if scaled:
                values = values.astype("f8")
                if "target_sum" in options:
                    values = values / ((total or 1) / options["target_sum"])
                values = (np.log1p(values) if "log1p" in options else values).astype("f4")
            if "scale" in options:
                values = values.astype("f4") * np.float32(options["scale"])
            rows.append((values[at >= 0], at[at >= 0]))
        dtype = self.values.dtype if not (scaled or "scale" in options) else np.dtype("f4")
        dense = np.zeros((index.size, width), dtype)
        for number, (values, at) in enumerate(rows):
            np.add.at(dense[number], at, values)
        found = get(self.name)
        if options["dense"]:
            dense += dtype.type(options.get("offset", 0))
            assert found.dtype == dense.dtype
            assert np.allclose(found, dense, rtol=3e-7, atol=0), f"{found!r} is not {dense!r}"
        else:
            assert found.shape == dense.shape
            assert found.data.dtype == dtype
            assert same(found.indptr, np.cumsum([0, *(len(at) for _, at in rows)]))
            at = np.concatenate([np.zeros(0, int), *(at for _, at in rows)])
            assert np.array_equal(found.indices, at), f"{found.indices!r} is not {at!r}"
            values = np.concatenate([np.zeros(0), *(values for values, _ in rows)])
            assert np.allclose(found.data, values, rtol=3e-7, atol=0)
        if "totals" in options:
            assert_same(get(options["totals"]), np.array(totals, "f4"), "totals")


class Classes(Column):
    """Strings, or numbers, delivered as codes."""

    def __init__(self, case: Any, name: str) -> None:
        super().__init__(case, name)
        self.kind = case.chance.choice(["fixed", "strings", "numbers", "places"])
        given: Any = f"{name}_names" if self.kind == "places" else True
        if self.kind in ("fixed", "strings") and case.maybe(0.4):
            given = ["dog", "ant", "cat", "bee"]
        self.given = given
        self.field = Field(name, categories=given)

    def write(self, group: h5py.Group, part: Any) -> None:
        names = ["ant", "bee", "cat", "dog"]
        drawn = self.case.rng.integers(0, 4, part.count)
        if self.kind == "strings":
            group.create_dataset(self.name, data=np.array(names, object)[drawn], dtype=TEXT)
        elif self.kind == "fixed":
            group[self.name] = np.array(names, "S")[drawn]
        else:
            group[self.name] = drawn if self.kind == "places" else drawn * 7 - 3
        if self.kind == "places" and f"{self.name}_names" not in group.file:
            own = self.case.rng.permutation(np.array(names, "S"))
            group.file[f"{self.name}_names"] = own

    def load(self) -> None:
        self.values: list[Any] = []
        for part in self.case.parts:
            found = self.case.read(part, self.name).tolist()
            if self.kind == "places":
                names = self.case.read(part, f"/{self.name}_names")
                found = [names[at] for at in found]
            self.values += [one.decode() if isinstance(one, bytes) else one for one in found]
        self.codes = self.given if isinstance(self.given, list) else sorted(set(self.values))

    def check(self, get: Get, index: np.ndarray, flips: Any, batch: Any) -> None:
        found = get(self.name)
        assert found.dtype == np.int64
        if self.kind == "places":  # the codes of all names, in any order
            pairs = {(int(code), self.values[at]) for code, at in zip(found, index, strict=True)}
            self.pairs = getattr(self, "pairs", set()) | pairs
            assert (
                len(self.pairs)
                == len({a for a, _ in self.pairs})
                == len({b for _, b in self.pairs})
            )
            return
        right = [self.codes.index(self.values[at]) for at in index.tolist()]
        assert_same(found, np.array(right, np.int64), self.name)


class Once(Column):
    """A value for each file, each sequence of groups, or the dataset."""

    def __init__(self, case: Any, name: str) -> None:
        super().__init__(case, name)
        choose = case.chance.choice
        self.per = choose(["file", "dataset", "sequence"])
        if self.per == "sequence" and case.sequences in ("across", "ids", "last"):
            self.per = "file"
        self.is_attribute, self.row = case.maybe(0.4), choose([(), (3,), (2, 4)])
        self.of_rows = self.per == "sequence" and case.sequences in ("ends", "lengths", "starts")
        if self.of_rows:
            self.is_attribute = False
        self.in_root = case.sequences != "groups" or self.per == "sequence"
        path = f"@{name}" if self.is_attribute else name
        self.field = Field(path, per=self.per)
        if self.per == "dataset":
            self.delivered = ()

    def write(self, group: h5py.Group, part: Any) -> None:
        chance, rng = self.case.chance, self.case.rng
        if not self.in_root:  # that of the file
            group = group.file
            if self.name in group or self.name in group.attrs:
                return
        shape = (len(group[self.case.sequences]), *self.row) if self.of_rows else self.row
        values = rng.random(shape).astype("f4")
        if self.per == "dataset":
            values = np.full(shape, 2.5, "f4")
        if self.is_attribute:
            group.attrs[self.name] = values
        elif shape and chance.random() < 0.5:
            store(self.case, group, self.name, values, part.file)
            self.case.spoilable = [
                one for one in self.case.spoilable if one[1].split("/")[-1] != self.name
            ]
        else:
            group[self.name] = values

    def load(self) -> None:
        self.several = []
        for part in self.case.parts:
            with h5py.File(self.case.paths[part.file]) as file:
                group = file[part.group] if self.in_root else file
                value = group.attrs[self.name] if self.is_attribute else group[self.name][()]
            self.several.append(np.asarray(value))

    def check(self, get: Get, index: np.ndarray, flips: Any, batch: Any) -> None:
        if self.per == "dataset":
            assert_same(batch.static[self.name], self.several[0], self.name)
            return
        case = self.case
        if self.of_rows:
            right = np.concatenate(self.several)[case.sequence[index]]
        else:
            counts = [case.count_in(part) for part in case.parts]
            right = np.stack(self.several)[np.repeat(np.arange(len(counts)), counts)[index]]
        assert_same(get(self.name), right, self.name)


KINDS = (Flat, Flat, Variable, Sparse, Sparse, Classes, Once)
