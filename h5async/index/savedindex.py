"""Defines `SavedIndex`: the saved layouts of some files, and their dependencies.

The layouts of a file are valid while it, and everything consulted to read them, stays unchanged.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from h5async.config import Field
from h5async.config.files import FileName, SourceName
from h5async.errors import ConfigError, ReadError
from h5async.index.datasettable import Columns, Datasets, table_of
from h5async.index.layout import DatasetLayout
from h5async.index.links import Consulted, Reach, require_same_store
from h5async.index.savedfile import (
    LARGEST,
    NotPortableError,
    SavedHeader,
    SavedIndexError,
    read_saved,
    write_saved,
)
from h5async.index.savedlayouts import LayoutReader, LayoutWriter, NotUsableError, require_below
from h5async.index.tables import Int64s, grid_of
from h5async.io.source import FileStamp
from h5async.io.stores import are_at, is_anything_at, real_name, store_of
from h5async.spelling import named
from h5async.system.interruptions import interruption, passing, suppressing

_MALFORMED = ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError


class Wanted(NamedTuple):
    """A dataset of a file, or a member, and the facts about it that are needed."""

    path: str  # in the file, or in each group
    num_dim: int | str | tuple[int | str, ...]  # the dimensions that count its samples
    has_names: bool = False  # whether its layout has the names of dimensions,
    has_cf: bool = False  # and how values are packed
    groups: str = ""  # whose datasets are joined
    kind: str = ""  # of a fact that is not just a dataset's layout; see `opening/filefacts.py`

    @classmethod
    def of(cls, field: Field) -> Wanted:
        """Return the dataset of a field; equivalent paths give equal results."""
        found = cls.at(field.path, field.num_dim)
        return found._replace(has_names=field.names_axes, has_cf=field.decode_cf)

    @classmethod
    def at(
        cls, path: str, num_dim: int | str | tuple[int | str, ...] = 0, *, kind: str = ""
    ) -> Wanted:
        """Return the dataset at a path, or a fact about it."""
        file, mark, rest = path.rpartition("::")
        names = (name for name in rest.split("/") if name not in ("", "."))
        return cls(f"{file}{mark}{'/'.join(names)}", num_dim, kind=kind)


class IndexedFile(NamedTuple):
    """The layouts of one file, and all files that were consulted."""

    path: str  # absolute
    layouts: Mapping[Wanted, DatasetLayout]
    consulted: Consulted  # the dependencies, including the file itself


# --- writing -------------------------------------------------------------------------------------


def write_index(
    path: Path, files: Sequence[IndexedFile], reach: Reach, *, key: str = "", is_entry: bool = False
) -> None:
    """Save the layouts of some files, in order, which were indexed with `reach`.

    Names of files below the folder of `path` are relative to it. `key` identifies the content, for
    a cache; if it `is_entry` of a cache, other users cannot read it, and it may get lost.

    OSError if it cannot be written; NotPortableError if a layout cannot be saved.
    """
    writer, entries, numbers = LayoutWriter(), [], []
    wanted: dict[Wanted, int] = {}
    needs: dict[int, list[int]] = {}
    absent: dict[int, list[str]] = {}
    for number, file in enumerate(files):
        if not file.consulted.is_stable:
            raise NotPortableError(f"{file.path}, which was changed")
        for dataset, layout in file.layouts.items():
            place = wanted.setdefault(dataset, len(wanted))
            entries.append((number, place, writer.add(layout)))
        own = file.consulted.files[file.path]
        numbers.append(writer.file(file.path, own))
        others = {name: stamp for name, stamp in file.consulted.files.items() if name != file.path}
        if others:
            needs[number] = [writer.file(*other) for other in others.items()]
        if file.consulted.absent:
            absent[number] = sorted(file.consulted.absent)
    header, arrays = writer.header_and_arrays()
    folder = f"{path.absolute().parent}{os.sep}"
    header["files"] = [[_below(name, folder), *stamp] for name, *stamp in header["files"]]
    several = [file.consulted for file in files]
    header.update(
        key=key,
        primary=numbers,
        wanted=list(wanted),
        needs=needs,
        absent=absent,
        at_opening=_unseen(files, writer),
        variables={name: value for one in several for name, value in one.variables.items()},
        folder=next((one.folder for one in several if one.folder is not None), None),
        allow_missing=reach.missing_is_fill,
    )
    arrays["entries"] = [np.array(entries, np.int64).reshape(-1, 3)]
    mode = 0o600 if is_entry else 0o644
    write_saved(path, header, arrays, mode=mode, is_lasting=not is_entry)


def _below(name: str, folder: str) -> str:
    rest = name.removeprefix(folder)
    return name if ".." in rest.split(os.sep) else rest


def _unseen(files: Sequence[IndexedFile], writer: LayoutWriter) -> list[int]:
    """Return the numbers of files whose changes would not be noticed when rows are read.

    These are files that hold metadata for others, whose values are in the index itself, or that
    have no values yet.
    """
    seen: dict[tuple[str, FileStamp], bool] = {}
    for file in files:
        for layout in file.layouts.values():
            datasets = table_of(layout)[1]
            columns = datasets.columns
            are_read = _are_read(datasets) & (not layout.is_ragged)
            unread = np.bincount(columns.file[~are_read], minlength=len(columns.files))
            for place, count in zip(columns.files, unread.tolist(), strict=True):
                seen[place] = seen.get(place, True) and not count
    return [number for place, number in writer.files.items() if not seen.get(place, False)]


def _are_read(datasets: Datasets) -> NDArray[np.bool_]:
    columns = datasets.columns
    has_values = datasets.by_kind(lambda kind: kind.values is not None, np.bool_)
    by_h5py = datasets.by_kind(lambda kind: kind.fallback_reason is not None, np.bool_)
    has_chunks = datasets.by_kind(lambda kind: kind.chunks is not None, np.bool_)
    is_whole = ~columns.is_sparse & (np.diff(columns.begin) > 0)
    is_read: NDArray[np.bool_] = by_h5py | np.where(has_chunks, is_whole, columns.offset >= 0)
    is_read &= (columns.rows > 0) & ~has_values
    return is_read


# --- reading -------------------------------------------------------------------------------------


class SavedIndex:
    """The saved layouts of some files. Used by one thread.

    Files of `owners` are trusted. `key` identifies the content, for a cache; `paths` are those of
    the files, absolute, in order.

    SavedIndexError if it cannot be used; the message says why. OSError if it cannot be opened or
    read.
    """

    def __init__(self, path: FileName, reach: Reach, owners: Sequence[int]) -> None:
        self._named = reach.named
        header, arrays, forget = read_saved(path, owners=owners, may_map=reach.io != "pread")
        try:
            saved = self._saved = SavedHeader.model_validate(header)
            folder = os.path.dirname(real_name(path))
            files = (_file(*found, folder=folder) for found in saved.files)
            self._files = self._here([(_with(reach.named, n), stamp) for n, stamp in files])
            named = {*saved.primary, *saved.at_opening, *itertools.chain(*saved.needs.values())}
            if max(named, default=-1) >= len(self._files):
                raise ValueError("there is no such file")
            if not {*saved.needs, *saved.absent} <= {*range(len(saved.primary))}:
                raise ValueError("there is no such indexed file")
            self._layouts = LayoutReader(saved, arrays, self._files, forget, reach.io)
            _require_sound(self._layouts.columns, self._layouts.kinds)
            self._entries: list[dict[Wanted, int]] = [{} for _ in saved.primary]
            wanted = [Wanted(*found) for found in saved.wanted]
            table = arrays["entries"].reshape(-1, 3)
            limits = len(saved.primary), len(wanted), len(self._layouts)
            if (table < 0).any() or (table >= np.array(limits)).any():
                raise ValueError("an entry refers to something that does not exist")
            for file, dataset, layout in table.tolist():
                self._entries[file][wanted[dataset]] = layout
        except _MALFORMED as error:
            raise _not_sensible(error) from error
        self.key = saved.key
        self.paths = [self._files[number][0] for number in saved.primary]

    def _here(self, files: list[tuple[str, FileStamp]]) -> list[tuple[str, FileStamp]]:
        """Return the files with the stamps that they have on this machine."""
        return files

    def find(self, number: int, wanted: Sequence[Wanted]) -> dict[Wanted, DatasetLayout]:
        """Return the layouts of a file's datasets that are known and valid here.

        SavedIndexError if a layout is invalid; for a `NamedIndex`, ReadError.
        """
        found = {}
        for one in wanted:
            at = self._entries[number].get(one)
            if at is None:
                continue
            try:
                found[one] = self._layouts.layout(at)
            except NotUsableError:
                continue
            except _MALFORMED as error:
                raise self._refusal(_not_sensible(error)) from error
        return found

    def _refusal(self, error: Exception) -> Exception:
        """Return the exception to raise for an invalid layout."""
        return error

    def stamp(self, number: int) -> FileStamp:
        """Return the stamp of a file, by its number."""
        return self._files[self._saved.primary[number]][1]

    def datasets(self, number: int) -> list[Wanted]:
        """Return the known datasets of a file."""
        return list(self._entries[number])

    def consulted(self, number: int) -> Consulted:
        """Return the dependencies of a file's layouts."""
        saved, found = self._saved, Consulted()
        found.files.update(self._files[at] for at in self._needed(number))
        found.absent = set(self._absent(number))
        found.variables = saved.variables
        found.folder = saved.folder
        return found

    def fresh_files(self) -> list[bool]:
        """Return, per file, whether its layouts are still valid."""
        saved = self._saved
        folder = None
        with suppressing(OSError):  # the current directory may have been removed
            folder = os.getcwd()
        is_here = all(os.environ.get(name, "") == value for name, value in saved.variables.items())
        if not is_here or (saved.folder is not None and saved.folder != folder):
            return [False] * len(self.paths)
        same = are_at(self._files)
        return [
            all(same[at] for at in self._needed(number))
            and not any(map(is_anything_at, self._absent(number)))
            for number in range(len(self.paths))
        ]

    def _absent(self, number: int) -> list[str]:
        return [_with(self._named, name) for name in self._saved.absent.get(number, ())]

    def _needed(self, number: int) -> tuple[int, ...]:
        return self._saved.primary[number], *self._saved.needs.get(number, ())


class NamedIndex(SavedIndex):
    """A saved index that a user has named in place of its files.

    Only files whose changes would not be noticed later are checked now; all others are checked when
    they are opened.

    ReadError if it cannot be used, or a file has changed; UnsafeFileError if its files refer to
    others that `reach` does not permit; ConfigError if it was made with other settings.
    """

    def __init__(self, path: FileName, reach: Reach) -> None:
        self._path = path
        with passing():
            try:
                super().__init__(path, reach, (os.geteuid(), 0))
            except SavedIndexError as error:
                raise self._refusal(error) from error
            except OSError as error:
                raise ReadError(f"cannot open {path}: {error.strerror or error}") from error
        self._require_permitted(reach)
        self._require_current()

    def changed(self, name: str) -> ReadError:
        """Return the error for a file that has changed since the index was made."""
        return ReadError(
            f"{name} was changed or removed since {self._path} was made; {self._remedy}"
        )

    @property
    def _remedy(self) -> str:
        return f"make it again: h5async index FILES... -o {os.path.basename(self._path)}"

    def _refusal(self, error: Exception) -> Exception:
        if not isinstance(error, SavedIndexError):
            return error
        return ReadError(f"{self._path} cannot be used as a saved index: {error}; {self._remedy}")

    def _here(self, files: list[tuple[str, FileStamp]]) -> list[tuple[str, FileStamp]]:
        """Use the device numbers of this machine: those of network file systems differ."""
        here: dict[int, int] = {}
        for name, stamp in files:
            if store_of(name).is_local and stamp.device not in here:
                with suppressing(OSError, ValueError):
                    found = store_of(name).stamp(name)
                    if found.inode == stamp.inode:
                        here[stamp.device] = found.device
        return [
            (name, stamp._replace(device=here.get(stamp.device, stamp.device)))
            for name, stamp in files
        ]

    def _require_permitted(self, reach: Reach) -> None:
        """Check that files refer only to permitted files; symbolic links are followed.

        An index in another store counts as a file there that refers to its files.
        """
        saved, primary = self._saved, set(self._saved.primary)
        if not store_of(self._path).is_local:
            for name in self.paths:
                require_same_store(str(self._path), name, str(self._path))
                reach.permitted_source(name, str(self._path), str(self._path))
        for number, others in saved.needs.items():
            holder = self.paths[number]
            for name in (self._files[other][0] for other in set(others) - primary):
                where = f"{self._path}: {holder}"
                require_same_store(holder, name, where)
                if store_of(name).is_local:
                    reach.permitted(Path(name), Path(holder), where)
                else:
                    reach.permitted_source(name, holder, where)
        known = primary.union(*saved.needs.values())
        if len(known) < len(self._files):
            raise self._refusal(SavedIndexError("it names a file that no other refers to"))
        if saved.allow_missing and not reach.missing_is_fill:
            raise ConfigError(
                f"{self._path} was made with {named('allow_missing', True)}: missing sources"
                " of virtual datasets have the fill value; give the reader the same option"
            )

    def _require_current(self) -> None:
        files = [self._files[at] for at in self._saved.at_opening]
        for (name, _), is_same in zip(files, are_at(files), strict=True):
            if not is_same:
                raise self.changed(name)
        for name in itertools.chain(*map(self._absent, self._saved.absent)):
            if is_anything_at(name):
                raise ReadError(
                    f"{name} exists, but was missing when {self._path} was made; {self._remedy}"
                )


def _not_sensible(error: Exception) -> Exception:
    """Return the error for invalid content, or the interruption that caused `error`."""
    causes, what = [error], repr(error)
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False)
        causes = [one["ctx"]["error"] for one in found if "error" in one.get("ctx", {})]
        what = f"{'.'.join(map(str, found[0]['loc']))}: {found[0]['msg']}"
    for cause in causes:
        if interruption(cause) is not None:
            return cause
    return SavedIndexError(f"its content is invalid ({what})")


def _with(named: Callable[[str], SourceName], name: str) -> str:
    return name if store_of(name).is_local else named(name)


def _file(name: str, *stamp: int, folder: str) -> tuple[str, FileStamp]:
    if not os.fsencode(name) or "\0" in name:
        raise ValueError("a file has no name")
    return os.path.join(folder, name) if store_of(name).is_local else name, FileStamp(*stamp)


# --- tables --------------------------------------------------------------------------------------

# Tables are checked as whole arrays, like HDF5's index: chunks must lie within the size that the
# file had when indexed, after its superblock, without overlap, and within the grid; unfiltered ones
# must have the length of a chunk.
_SUPERBLOCK_NBYTES = 48  # at least
_MANY_CHUNKS = 4096  # in a dataset: copying arrays to check it together with others does not pay


def _require_sound(columns: Columns, kinds: Sequence[DatasetLayout]) -> None:
    """Check a table of datasets of some kinds.

    ValueError if it is inconsistent; SavedIndexError if chunks cannot lie at their positions.
    """
    require_below(columns.kind, len(kinds), "kind")
    require_below(columns.file, len(columns.files), "file")
    rows, chunks, begin = columns.rows, columns.chunks, columns.begin
    limits = np.array([_limits(kind) for kind in kinds], np.int64).reshape(-1, 5).T
    row_nbytes, is_direct, chunk_rows, cross, expected = limits[:, columns.kind]
    if (rows < 0).any() or (columns.offset < -1).any() or (columns.stored_nbytes < 0).any():
        raise ValueError("a dataset has a negative size")
    if (rows > LARGEST).any():
        raise ValueError("a dataset has more rows than can be counted")
    end = np.array([stamp.nbytes for _, stamp in columns.files], np.int64)[columns.file]
    is_there = (is_direct != 0) & (chunk_rows == 0) & (columns.offset >= 0)
    if (rows > (end - columns.offset) // np.maximum(1, row_nbytes))[is_there].any():
        raise ValueError("values lie beyond the end of their file")
    count = np.diff(begin)
    if begin[0] or (count < 0).any() or begin[-1] != chunks.offset.size:
        raise ValueError("chunk tables are not consecutive")
    if ((count > 0) & (chunk_rows == 0)).any():
        raise ValueError("a dataset without chunks has a chunk table")
    along = -(-rows // np.maximum(1, chunk_rows))
    grid = np.where(along > LARGEST // np.maximum(1, cross), LARGEST, along * cross)
    has_table = chunk_rows > 0
    if ((count != grid) & has_table & ~columns.is_sparse).any():
        raise SavedIndexError("a chunk table does not fit its dataset")
    is_large = count >= _MANY_CHUNKS
    is_first = is_large | np.append(True, is_large[:-1])  # large ones alone, others together
    for some in np.split(np.arange(count.size), np.flatnonzero(is_first)[1:]):
        which = some[count[some] > 0]
        if which.size:
            part = columns.part(int(which[0]), int(which[-1] - which[0] + 1))
            at = slice(which[0], which[-1] + 1)
            _require_places(part, end[at], grid[at], expected[at])


def _limits(kind: DatasetLayout) -> tuple[int, bool, int, int, int]:
    """Return the limits of a kind of datasets.

    They are the bytes of a row; whether values without chunks lie at an offset; the rows of a
    chunk, 0 without chunks; the number of chunks that hold pieces of a row; and the bytes of a
    chunk, -1 for any size.
    """
    shape, axis, chunk_shape = kind.shape, kind.sample_axis, kind.chunk_shape
    grid = grid_of(shape, chunk_shape) if chunk_shape else ()
    cross = math.prod(n for at, n in enumerate(grid) if at != axis)
    row_nbytes, chunk_nbytes = kind.row_nbytes, kind.chunk_nbytes
    rows = chunk_shape[axis] if kind.chunks is not None else 0
    if max(row_nbytes, cross, chunk_nbytes, rows) > LARGEST:
        row_nbytes = cross = LARGEST  # anything with chunks or an offset is too large
    is_direct = kind.fallback_reason is None and not chunk_shape and kind.storage != "files"
    return row_nbytes, is_direct, min(rows, LARGEST), cross, -1 if kind.filters else chunk_nbytes


def _require_places(columns: Columns, end: Int64s, grid: Int64s, expected: Int64s) -> None:
    """Check the chunks of consecutive datasets; those of a single one without copying."""
    count, chunks = np.diff(columns.begin), columns.chunks
    offset, nbytes, index = chunks.offset, chunks.nbytes, chunks.index
    if count.size > 1:
        end, grid, expected = (np.repeat(limit, count) for limit in (end, grid, expected))
    if ((offset < _SUPERBLOCK_NBYTES) | (nbytes < 0) | (nbytes > end)).any():
        raise SavedIndexError("a chunk has an invalid address or length")
    if (offset > end - nbytes).any():
        raise SavedIndexError("a chunk lies beyond the end of its file")
    if np.where(expected < 0, nbytes == 0, nbytes != expected).any():
        raise SavedIndexError("a chunk has a wrong length")
    is_next = np.ones(offset.size, np.bool_)  # to the chunk before, of the same table
    is_next[columns.begin[:-1][count > 0]] = False
    if index is not None:
        is_outside = (index < 0) | (index >= grid) | (is_next & (np.diff(index, prepend=-1) <= 0))
        if (is_outside & np.repeat(columns.is_sparse, count)).any():
            raise SavedIndexError("a chunk lies outside its grid")
    if not (offset[1:] < offset[:-1] + nbytes[:-1])[is_next[1:]].any():
        return
    if count.size == 1 and not any(nbytes.strides):
        overlaps = np.diff(np.sort(offset)) < nbytes[0]
    else:  # several tables, or chunks of different sizes
        table = np.repeat(np.arange(count.size), count)
        order = np.lexsort((offset, table))
        table, offset, nbytes = table[order], offset[order], nbytes[order]
        overlaps = (offset[1:] < offset[:-1] + nbytes[:-1]) & (table[1:] == table[:-1])
    if overlaps.any():
        raise SavedIndexError("a chunk overlaps another one")
