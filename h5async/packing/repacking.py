"""Rewrites HDF5 files: open files enter; one file with new chunks, filters or samples leaves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5d, h5f, h5t
from numpy.typing import NDArray

from h5async.config import Field, ReaderConfig
from h5async.config.files import INDEX_SUFFIX
from h5async.errors import ConfigError, DatasetError, ReadError, WriteError
from h5async.index.groupfields import KIND
from h5async.index.links import open_index
from h5async.io.hdf5files import HDF5File
from h5async.io.stores import absolute_name, far_names
from h5async.opening.dataset import Samplings, open_dataset
from h5async.order.selection import Selection
from h5async.packing.chunkwriter import ChunkWriter
from h5async.packing.objects import ObjectCopy, is_outside, making_of, walk
from h5async.packing.rawvalues import has_references
from h5async.packing.rewriting import (
    Plan,
    Planned,
    Rewrite,
    Transfer,
    chunks_of_rows,
    differences,
    pieces_of,
)
from h5async.packing.rowsource import RowSource
from h5async.packing.safefile import SafeFile, partial_of
from h5async.packing.sparsegroups import (
    ElementRows,
    SparseRows,
    may_have_samples,
    ragged_rows,
    refuse_offsets,
    sparse_paths,
)
from h5async.packing.uniting import United, are_same, fitting_dtype, unite
from h5async.packing.writeoptions import RepackOptions
from h5async.spelling import name_text, named
from h5async.system.resources import free_memory

_LEAST_NBYTES = 1 << 10  # smaller datasets stay unchanged unless an option names them
_MEMORY_NBYTES, _MEMORY_SHARE = 1 << 30, 4  # default memory: 1 GiB, at most 1/4 of free memory
_LEAST_MEMORY_NBYTES = 8 << 20
_CHUNK_NBYTES = 64 << 10  # of a contiguous dataset that becomes chunked to be filtered
Progress = Callable[[int, int], None]


class Repacked(NamedTuple):
    """The result of `repack`: the files written, and what happened to each dataset."""

    paths: tuple[Path, ...]
    plan: Plan


class Repacking:
    """A repack of open `files`: the plan for each dataset of the first file."""

    def __init__(self, files: Sequence[HDF5File], config: ReaderConfig, options: RepackOptions):
        self._files, self.config, self._options = files, config, options
        self._stamps = [file.source.stamp() for file in files]
        memory = min(_MEMORY_NBYTES, free_memory()[0].nbytes // _MEMORY_SHARE)
        self.memory = max(_LEAST_MEMORY_NBYTES, options.memory or memory)
        self.rewrites: dict[str, Rewrite] = {}
        self.whole: dict[str, NDArray[Any]] = {}  # values of small datasets, written in one go
        self._united = United()
        self._long: list[ElementRows] = []  # ragged and sparse rows
        self._sampled: dict[str, RowSource] = {}
        self.selection = Selection(0, 1, 0)  # of samples
        self._part: range | None = None  # positions in the whole selection, if this is a shard
        self._parts: Sequence[tuple[str, int]] = ()  # names and sample counts of joined files
        found = {
            name_text(entry.path).strip("/"): entry.node
            for entry in walk(files[0].id, self._leaves_out)
            if entry.is_first and isinstance(entry.node, h5d.DatasetID)
        }
        self.datasets: dict[str, h5d.DatasetID] = found
        self._require_named()
        if not self._is_one or options.selects or options.changes_storage:
            self._plan()

    @property
    def _is_one(self) -> bool:
        """Whether samples come from one file and go to one file."""
        return len(self._files) == 1 and self._options.shards is None

    @property
    def piece_nbytes(self) -> int:
        """The maximum bytes of rows moved at a time; readers hold several such pieces."""
        return max(1, self.memory // 8)

    def digest(self) -> str:
        """Return a digest of everything that determines the new file: sources and options."""
        names = [absolute_name(file.filename) for file in self._files]
        # (Without the device number, which differs between nodes for a network file system.)
        stamps, part = [stamp[1:4] for stamp in self._stamps], [repr(self._part), self._parts]
        content = [names, stamps, self._options.digested(), part]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def require_unchanged(self) -> None:
        """Raise `ReadError` if a file has changed since it was opened."""
        for file, stamp in zip(self._files, self._stamps, strict=True):
            if not file.source.stamp().has_content_of(stamp):
                raise ReadError(
                    f"{file.filename} was changed while it was being repacked, so the output is"
                    " unusable; start over",
                    filename=file.filename,
                )

    def _require_named(self) -> None:
        """Raise `DatasetError` if an option names a dataset that does not exist."""
        options = self._options
        for name in ("fields", "chunks", "dtype", "encode", "offsets"):
            for path in getattr(options, name) or ():
                if path.strip("/") not in self.datasets:
                    listed = ", ".join(f'"{one}"' for one in list(self.datasets)[:20])
                    raise DatasetError(
                        f'{self._files[0].filename}: {named(name)}: there is no dataset "{path}";'
                        f" there are {listed}"
                    )

    def _plan(self) -> None:
        axis, options = self._options.num_dim, self._options
        chosen = {path.strip("/") for path in options.fields or ()}
        with_rows = {path: one for path, one in self.datasets.items() if one.rank > axis}
        if self._is_one and not options.selects:
            for path, one in with_rows.items():
                is_kept = is_outside(one) and options.virtual == "keep"
                nbytes = int(np.prod(one.shape)) * one.get_type().get_size()
                is_chosen = path in chosen or (not chosen and nbytes >= _LEAST_NBYTES)
                is_chosen = is_chosen or self._is_named(path)
                if not is_kept and (is_chosen or is_outside(one)):
                    source = RowSource(self._files, path, axis)
                    every = Selection(0, 1, source.counts[0])
                    self._add(path, source, every, is_chosen=is_chosen)
            return
        united = self._united = unite(self._files, self.datasets.keys(), options.join)
        self.datasets = {p: one for p, one in self.datasets.items() if not united.leaves_out(p)}
        with_rows = {p: one for p, one in with_rows.items() if p in self.datasets}
        self._long = ragged_rows(self._files, options.offsets)
        self._long += [
            SparseRows(
                self._files,
                path,
                united.maps.get(f"{path}/indices"),
                united.columns.get(path, 0),
            )
            for path in sparse_paths(self._files[0], self.datasets)
            if may_have_samples(self._files[0], f"{path}/data")
        ]
        counts = {rows.offsets: sum(rows.counts) for rows in self._long}
        if len({tuple(rows.counts) for rows in self._long}) > 1:
            raise DatasetError(
                f"{self._files[0].filename}: different numbers of ragged or sparse rows: {counts}"
            )
        of_long = {path for rows in self._long for path in (*rows.parts, rows.offsets)}
        rows_of = [p for p in with_rows.keys() - of_long if may_have_samples(self._files[0], p)]
        with_rows = {path: one for path, one in with_rows.items() if path in rows_of}
        sampled = self._sampled = self._with_samples(with_rows, chosen)
        refuse_offsets(self._files[0], with_rows, {one.counts[0] for one in sampled.values()})
        self.selection = self._selection(sampled)
        self._plan_samples(self.selection)

    def _plan_samples(self, selection: Selection) -> None:
        chosen = {path.strip("/") for path in self._options.fields or ()}
        self.whole |= self._united.values
        for rows in self._long:
            elements = rows.elements(selection)
            self.whole[rows.offsets] = rows.told(selection)
            for path in rows.parts:
                self._add(path, self._source(path, 0), elements, is_chosen=True)
        for path, source in self._sampled.items():
            is_chosen = not chosen or path in chosen or self._is_named(path)
            self._add(path, source, selection, is_chosen=is_chosen)

    def parts(self, nbytes: int) -> list[Repacking]:
        """Split this into repacks of consecutive samples, of whole chunks and about `nbytes`."""
        size, total = self.selection.size, max(1, self.nbytes)
        largest = max(self.rewrites.values(), key=lambda one: one.nbytes)
        unit = largest.chunks[largest.axis] if largest.chunks and not self._long else 1
        count = max(unit, size * nbytes // total // unit * unit)
        found = []
        for begin in range(0, max(1, size), count):
            part = copy(self)
            part._part, part.rewrites, part.whole = range(begin, min(begin + count, size)), {}, {}
            samples = self.selection.samples(np.array(part._part))
            part.selection = Selection.of_numbers(samples)
            part._plan_samples(part.selection)
            found.append(part)
        return found

    def joined(self, parts: Sequence[tuple[str, int]], paths: Iterable[str] = ()) -> Repacking:
        """Return a repack that copies all objects, and maps samples from other files virtually.

        `parts` are the names and sample counts of those files; `paths` are datasets of samples in
        addition to those that would be rewritten.
        """
        if self._long:
            raise ConfigError(
                "sparse and ragged rows of several files cannot form a virtual dataset; join the"
                f" files with a saved index: an output whose name ends in {INDEX_SUFFIX}"
            )
        found = copy(self)
        more = {path: self.copying(path) for path in paths if self.datasets[path].rank}
        found._parts, found.rewrites = parts, {**self.rewrites, **more}
        return found

    @property
    def nbytes(self) -> int:
        """Decoded bytes of all rewritten values."""
        return sum(one.nbytes for one in self.rewrites.values())

    def _is_named(self, path: str) -> bool:
        options = self._options
        return path in options.chunks or path in options.dtype or path in options.encode

    def _with_samples(
        self, with_rows: Mapping[str, h5d.DatasetID], chosen: set[str]
    ) -> dict[str, RowSource]:
        """Return the datasets whose rows are samples.

        The number of samples is that of the chosen datasets or, by default, of the largest one.
        """
        axis = self._options.num_dim
        sizes = {p: int(np.prod(o.shape)) * o.get_type().get_size() for p, o in with_rows.items()}
        pool = {p: n for p, n in sizes.items() if p in chosen} or sizes
        if not pool and self._long:
            return {}
        if not pool:
            raise DatasetError(
                f"{self._files[0].filename}: no dataset has a dimension {axis} that counts samples"
            )
        largest = max(pool, key=lambda path: pool[path])
        counts = self._source(largest, axis).counts
        for rows in self._long:
            largest, counts = rows.offsets, rows.counts
        found = {}
        for path, one in with_rows.items():
            if one.shape[axis] != counts[0]:
                if path in chosen:
                    raise DatasetError(
                        f'{self._files[0].filename}: dataset "{path}" has {one.shape[axis]:,}'
                        f' samples, but "{largest}" has {counts[0]:,}; name datasets with the same'
                        " number of samples"
                    )
                continue
            source = self._source(path, axis)
            if source.counts != counts:
                raise DatasetError(
                    f'datasets "{path}" and "{largest}" have different numbers of samples in some'
                    f" files: {source.counts} and {counts}"
                )
            if not self._is_one and has_references(source.kind):
                raise DatasetError(f"{source.where}: references cannot be joined across files")
            found[path] = source
        return found

    def _source(self, path: str, axis: int) -> RowSource:
        return RowSource(self._files, path, axis, self._united.maps.get(path))

    def _selection(self, sampled: Mapping[str, RowSource]) -> Selection:
        """Return the samples to write, in order."""
        if self._long and not self._united.columns:
            count, field = sum(self._long[0].counts), self._long[0].field
        else:  # (files with different columns can only be read with chosen columns)
            source = max(sampled.values(), key=lambda one: (one.is_plain, one.row_nbytes))
            count, field = int(source.starts[-1]), Field(source.path, num_dim=source.axis)
        if not self._options.selects:
            return Selection(0, 1, count)
        config = self.config.with_fields({"data": field})
        opened = open_dataset(config)
        samplings = Samplings(opened.config, opened.layouts)
        if not config.shuffle:
            return samplings.selection
        size = samplings.selection.size
        return Selection.of_numbers(samplings.at((0, 1)).samples(0, 0, size))

    def _add(self, path: str, source: RowSource, selection: Selection, *, is_chosen: bool) -> None:
        """Plan the rewrite of a dataset, unless it stays unchanged."""
        options, axis, first = self._options, source.axis, source.first
        shape = (*first.extents[:axis], selection.size, *first.extents[axis + 1 :])
        dtype = options.dtype.get(path)
        if dtype is not None and (not source.is_plain or source.dtype.kind not in "biufc"):
            raise ConfigError(f"{source.where}: {named('dtype')} is for datasets of numbers")
        if path in self._united.maps and dtype is None:
            dtype = fitting_dtype(source.kind.dtype, self._united.maps[path])
        if dtype is not None and dtype == source.dtype:
            dtype = None
        chunks, filters = first.chunks, options.filters if is_chosen else None
        encoding = options.encode.get(path, "")
        if encoding:
            if axis or len(shape) != 4 or shape[3] != 3 or source.dtype != np.uint8:
                raise ConfigError(
                    f"{source.where}: {named('encode')} is for images, uint8 (samples, height,"
                    f" width, 3), found {source.dtype} {shape}"
                )
            dtype, chunks, filters = None, (), None
        most = first.maxshape
        if encoding or (chunks and not all(shape)):
            pass
        elif path in options.chunks:
            chunks = self._chunks(path, shape, options.chunks[path])
        elif is_chosen and options.chunk_samples is not None:
            itemsize = source.itemsize if dtype is None else dtype.itemsize
            chunks = chunks_of_rows(shape, axis, options.chunk_samples, itemsize)
        elif not chunks and filters:
            chunks = chunks_of_rows(
                shape, axis, max(1, _CHUNK_NBYTES // max(1, source.row_nbytes)), source.itemsize
            )
        if chunks and most[axis] is not None:
            chunks = (*chunks[:axis], min(chunks[axis], max(1, shape[axis])), *chunks[axis + 1 :])
        stays = shape == first.extents and chunks == first.chunks and not (dtype or encoding)
        if stays and (filters is None or not chunks) and selection.is_prefix:
            if self._is_one and not is_outside(first.id):
                return
        filters = filters if chunks else None
        rewrite = Rewrite(source, selection, shape, chunks, filters, dtype, encoding)
        rewrite.require_lossless()
        self.rewrites[path] = rewrite

    def _chunks(self, path: str, shape: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
        if len(given) != len(shape):
            raise ConfigError(
                f'{named("chunks")}: "{path}" has {len(shape)} dimensions, found {given}'
            )
        return tuple(
            max(1, min(n or extent, extent)) for n, extent in zip(given, shape, strict=True)
        )

    def copying(self, path: str) -> Rewrite:
        """Return the plan for copying a non-scalar dataset unchanged."""
        source = RowSource(self._files[:1], path, 0)
        first = source.first
        return Rewrite(
            source, Selection(0, 1, source.counts[0]), first.extents, first.chunks, None, None
        )

    def verify(self, path: Path) -> None:
        """Compare the new file with its sources; raise `WriteError` if they differ."""
        with open_index(path) as target:
            for where in self._differences(target, self.objects(target.id, path)):
                raise WriteError(
                    f"{target.filename}: {where} differs from the source; keep the source, and"
                    " check disk and memory",
                    filename=target.filename,
                )

    def _differences(self, target: HDF5File, objects: ObjectCopy) -> Iterator[str]:
        """Yield the names of everything that differs in the new file."""
        yield from objects.differences(self._attributes)
        for name, dataset in self.datasets.items():
            rewrite = self.rewrites.get(name)
            if name in self.whole:
                if not are_same(target[name][...], self.whole[name]):
                    yield name
            elif rewrite is None and dataset.rank and not is_outside(dataset):
                rewrite = self.copying(name)
            if rewrite is not None and not (self._parts and name in self.rewrites):
                nbytes, options = self.piece_nbytes, self.reader_options
                yield from differences(rewrite, target, objects.references, nbytes, options)

    def plan(self) -> Plan:
        """Return a human-readable plan."""
        datasets = [
            Planned(path, one.how, one.shape, one.chunks, one.nbytes)
            for path, one in self.rewrites.items()
        ]
        return Plan(tuple(datasets), self.memory, self._united.left_out)

    @property
    def reader_options(self) -> dict[str, Any]:
        """The options for readers of rows."""
        return {
            "hdf5_path": self.config.files,
            "device": "cpu",
            "rank": 0,
            "world_size": 1,
            "max_batch_bytes": self.memory,
            "allow_external": self._options.allow_external,
            "num_threads": self._options.num_threads,
        }

    def replaces(self, path: Path) -> bool:
        """Return whether the new file replaces a source."""
        names = [str(file.filename) for file in self._files if not far_names([file.filename])]
        return path.exists() and any(path.samefile(name) for name in names)

    def write(self, path: Path, progress: Progress | None) -> bool:
        """Write the new file; return False if it had already been finished."""
        options, first = self._options, self._files[0]
        is_in_place = self.replaces(path)
        may_go_on = options.resume or (self._part is not None and not options.overwrite)
        resume = may_go_on and not (is_in_place and not partial_of(path).exists())
        overwrite = (options.overwrite or is_in_place) and not resume
        how: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "like": first}
        with SafeFile(path, digest=self.digest(), **how) as safe:
            if safe.is_finished:
                return False
            copy = self.objects(safe.file.id, path)
            if safe.state is None:
                missing = [name_text(one).strip("/") for one in copy.make()]
                self._write_whole(safe.file)
                safe.commit({"missing": missing, "done": 0})
            state = dict(safe.state or {})
            memory = self.memory // 4
            with ChunkWriter(safe, threads=options.num_threads, memory=memory) as writer:
                for done in self._move(copy, writer, safe, progress):
                    writer.commit({**state, "done": done})
            self.require_unchanged()
            safe.finish()
        return True

    def _leaves_out(self, path: bytes, node: Any) -> bool:
        """Return whether an object is left out: it neither is nor contains a wanted field."""
        name = name_text(path).strip("/")
        if self._united.leaves_out(name):
            return True
        if not self._options.only_fields or isinstance(node, h5t.TypeID):
            return False
        fields = [field.strip("/") for field in self._options.fields or ()]
        return not any(f"{field}/".startswith(f"{name}/") for field in fields)

    def objects(self, target: h5f.FileID, path: Path) -> ObjectCopy:
        """Return the copier of the objects to the new file."""
        first = self._files[0]
        names = Path(first.filename), path
        moved = {
            path
            for path, one in self.rewrites.items()
            if one.shape != one.source.first.extents or not one.selection.is_prefix
        }
        change, leaves_out = self._making, self._leaves_out
        return ObjectCopy(first.id, target, names, change, leaves_out, frozenset(moved))

    @property
    def _attributes(self) -> dict[str, dict[str, Any]]:
        """The attributes that change, by the paths of their objects."""
        shapes = {
            rows.path: {"shape": np.array([len(self.whole[rows.offsets]) - 1, rows.columns])}
            for rows in self._long
            if isinstance(rows, SparseRows)
        }
        images = {p: {KIND: "image"} for p, one in self.rewrites.items() if one.encoding}
        return {**self._united.attributes, **shapes, **images}

    def _write_whole(self, file: h5py.File) -> None:
        """Write the small datasets and the attributes that change."""
        for path, values in self.whole.items():
            file[path][...] = values
        for path, attributes in self._attributes.items():
            attrs = file[path].attrs
            for name, value in attributes.items():
                before = attrs.get_id(name).dtype if name in attrs else None
                is_text = before is not None and before.kind == "S"  # new strings may be longer
                attrs.create(name, value, dtype=None if is_text else before)

    def _making(self, path: bytes, dataset: h5d.DatasetID) -> Any:
        values = self.whole.get(name_text(path).strip("/"))
        if values is not None:
            return making_of(dataset, values)
        rewrite = self.rewrites.get(name_text(path).strip("/"))
        if rewrite is not None and self._parts:
            return rewrite.making_joined(self._parts)
        return None if rewrite is None else rewrite.making()

    def _move(
        self, copy: ObjectCopy, writer: ChunkWriter, safe: SafeFile, progress: Progress | None
    ) -> Iterator[int]:
        """Move the values of all datasets; yield the number of finished pieces after each."""
        assert safe.state is not None
        skipped, done, moved = int(safe.state["done"]), 0, 0
        rewrites = {p: self.rewrites.get(p) or self.copying(p) for p in safe.state["missing"]}
        total = sum(one.nbytes for one in rewrites.values())
        for path, rewrite in rewrites.items():
            target = safe.file[path]
            if not target.chunks:
                safe.write_directly(target)
            pieces = pieces_of(rewrite, self.piece_nbytes)
            here = min(len(pieces), max(0, skipped - done))
            done += here
            transfer = Transfer(rewrite, target, writer, copy, self.reader_options)
            for piece in transfer.move(pieces[here:]):
                done += 1
                moved += rewrite.nbytes_of(piece)
                self.require_unchanged()
                if progress is not None:
                    progress(moved, total)
                yield done
            writer.flush()
