"""Sources of tables that PyArrow reads: files, folders of episodes, Hugging Face datasets.

Numbers keep their types; times become integers with their unit in an attribute. Fixed-size lists
become arrays, and others samples of any length; dictionaries become categories. Structs are split
into columns.

``episode_ends`` has the end of each episode, for ``Sequences(ends="episode_ends")``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from h5async.errors import ConfigError, DatasetError, ReadError, needs_package
from h5async.packing.schema import Block, Coded, Values
from h5async.packing.sources import (
    BLOCK_NBYTES,
    Files,
    Int64s,
    ListedSource,
    Source,
    Work,
    as_slice,
    digest_of,
    reading_file,
)
from h5async.spelling import named

SUFFIXES = (".parquet", ".arrow", ".feather", ".csv")
_ROWS = 1 << 12
_EPISODE = "episode_index"
_UNITS: Mapping[Any, str] = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}

Fill = Mapping[str, Any]  # values that replace nulls, by column


@cache
def _arrow() -> Any:
    """Import and return pyarrow, which only tables need."""
    with needs_package("pyarrow", "tables that are packed"):
        import pyarrow.csv
        import pyarrow.parquet
    return pyarrow


class TableSource(Source):
    """The rows of several table files, one after the other."""

    files_are_sources = True

    def __init__(self, paths: Sequence[Path], fill: Fill, name: str = "") -> None:
        _arrow()
        self.name, self.files, self._fill = name or str(paths[0]), Files(paths), fill
        self.nbytes = self.files.nbytes
        counts = [self._reading(path, _count) for path in paths]
        self._counts = counts
        known = [count for count in counts if count is not None]
        self.count = sum(known) if len(known) == len(counts) else None

    def work(self, start: int) -> Iterator[Work]:
        """Yield functions that convert batches of rows."""
        first = 0
        for path, count in zip(self.files.paths, self._counts, strict=True):
            if count is not None and first + count <= start:
                first += count
                continue
            row = max(0, start - first)
            batches = self._reading(Path(path), partial(_batches, skipped=row))
            following = partial(next, batches, None)
            while (batch := self._reading(Path(path), lambda _, go=following: go())) is not None:
                yield partial(block_of, batch, self._fill, f"{path}: rows from {row:,} on")
                row += batch.num_rows
            first += row

    def _reading(self, path: Path, read: Callable[..., Any]) -> Any:
        with reading_file(path):
            try:
                return read(path)
            except (_arrow().ArrowException, ValueError) as error:
                raise ReadError(f"cannot read {path}: {error}") from error


def _count(path: Path) -> int | None:
    """Return the number of rows in a file, if it is stored there."""
    if path.suffix.lower() == ".csv":
        return None
    if path.suffix.lower() != ".parquet":
        return int(sum(batch.num_rows for batch in _arrow_batches(path, 0)))
    with _arrow().parquet.ParquetFile(path) as file:
        return int(file.metadata.num_rows)


def _batches(path: Path, skipped: int) -> Iterator[Any]:
    """Yield the record batches of a file after `skipped` rows, cut to about `BLOCK_NBYTES`."""
    known = {".parquet": _parquet_batches, ".csv": _csv_batches}
    several = known.get(path.suffix.lower(), _arrow_batches)
    for batch in several(path, skipped):
        rows = max(1, min(_ROWS, batch.num_rows * BLOCK_NBYTES // max(1, batch.nbytes)))
        for at in range(0, batch.num_rows, rows):
            yield batch.slice(at, rows)


def _parquet_batches(path: Path, skipped: int) -> Iterator[Any]:
    with _arrow().parquet.ParquetFile(path, pre_buffer=False) as file:
        groups = [file.metadata.row_group(at) for at in range(file.num_row_groups)]
        nbytes = sum(group.total_byte_size for group in groups)
        rows = max(1, min(_ROWS, file.metadata.num_rows * BLOCK_NBYTES // max(1, nbytes)))
        first = 0
        while first < len(groups) and groups[first].num_rows <= skipped:
            skipped -= groups[first].num_rows
            first += 1
        wanted = range(first, len(groups))
        yield from _without(file.iter_batches(rows, wanted, use_threads=False), skipped)


def _csv_batches(path: Path, skipped: int) -> Iterator[Any]:
    with _arrow().csv.open_csv(path) as reader:
        for name, kind in zip(reader.schema.names, reader.schema.types, strict=True):
            if _is_binary(kind):
                raise ReadError(
                    f'cannot read {path}: its column "{name}" is not encoded as UTF-8;'
                    " convert the file, with iconv -f latin1 -t utf-8 if it is Latin-1"
                )
        yield from _without(reader, skipped)


def _arrow_batches(path: Path, skipped: int) -> Iterator[Any]:
    with _arrow().memory_map(str(path)) as source:
        try:
            file = _arrow().ipc.open_file(source)
        except _arrow().ArrowInvalid:
            yield from _without(_arrow().ipc.open_stream(source), skipped)
            return
        numbers = range(file.num_record_batches)
        yield from _without(map(file.get_batch, numbers), skipped)


def _without(batches: Iterable[Any], skipped: int) -> Iterator[Any]:
    for batch in batches:
        left = min(skipped, batch.num_rows)
        skipped -= left
        if left < batch.num_rows:
            yield batch.slice(left)


def block_of(table: Any, fill: Fill, where: str) -> Block:
    """Return the columns of a record batch or table."""
    columns: dict[str, Values] = {}
    names = table.schema.names
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DatasetError(f'{where}: several columns have the name "{twice}"; rename them')
    for name in names:
        array = table.column(name)
        if hasattr(array, "combine_chunks"):
            array = array.combine_chunks()
        columns |= dict(_columns(name, array, fill, where))
    units = {field.name: unit for field in table.schema if (unit := _unit(field.type))}
    return Block(columns, table.num_rows, units=units)


def _unit(kind: Any) -> str:
    """Return the unit of a time type as stored, in CF notation; "" for other types."""
    types = _arrow().types
    if types.is_date(kind):
        return f"{'days' if types.is_date32(kind) else 'milliseconds'} since 1970-01-01"
    if not types.is_temporal(kind):
        return ""
    unit = _UNITS[kind.unit]
    return f"{unit} since 1970-01-01" if types.is_timestamp(kind) else unit


def _columns(name: str, array: Any, fill: Fill, where: str) -> Iterable[tuple[str, Values]]:
    """Yield the columns of an array: several for structs."""
    array = _filled(array, name, fill, where)
    types = _arrow().types
    if isinstance(array.type, _arrow().FixedShapeTensorType):
        yield name, array.to_numpy_ndarray()
        return
    if isinstance(array, _arrow().ExtensionArray):
        array = array.storage
    if types.is_struct(array.type):
        _require_values(array, name, where)
        fields = [array.type.field(number).name for number in range(array.type.num_fields)]
        parts = dict(zip(fields, array.flatten(), strict=True))
        if parts.keys() == {"bytes", "path"}:  # as Hugging Face stores images and audio
            yield name, _contents(parts["bytes"], parts["path"], name, where)
            return
        for field, part in parts.items():
            yield from _columns(f"{name}/{field}", part, fill, where)
        return
    yield name, _values(array, name, fill, where)


def _filled(array: Any, name: str, fill: Fill, where: str) -> Any:
    if name not in fill or not array.null_count:
        return array
    try:
        if _arrow().types.is_integer(array.type) and fill[name] != int(fill[name]):
            raise ValueError("it is no integer")  # Arrow would cut off its fraction
        return array.fill_null(fill[name])
    except (_arrow().ArrowException, OverflowError, ValueError, TypeError) as error:
        raise DatasetError(
            f'{where}: {named("fill", {name: fill[name]})} cannot replace nulls of "{name}",'
            f" {array.type}: {error}"
        ) from error


def _values(array: Any, name: str, fill: Fill, where: str) -> Values:
    types, kind = _arrow().types, array.type
    if types.is_dictionary(kind):
        codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return Coded(codes, [str(one) for one in array.dictionary.to_pylist()])
    if types.is_floating(kind):
        return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    _require_values(array, name, where)
    if types.is_fixed_size_list(kind):
        inner = _values(_filled(array.flatten(), name, fill, where), name, fill, where)
        if isinstance(inner, np.ndarray):
            return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    elif types.is_list(kind) or types.is_large_list(kind):
        inner = _values(_filled(array.flatten(), name, fill, where), name, fill, where)
        ends = np.cumsum(array.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
        if isinstance(inner, np.ndarray) and inner.ndim == 1:
            bounds = itertools.pairwise([0, *ends.tolist()])
            return [inner[begin:end] for begin, end in bounds]
    elif types.is_temporal(kind):
        return array.cast(_arrow().int64() if kind.bit_width == 64 else _arrow().int32()).to_numpy()  # type: ignore[no-any-return]
    elif any(is_one(kind) for is_one in (types.is_string, types.is_large_string, _is_binary)):
        return array.to_pylist()  # type: ignore[no-any-return]
    elif types.is_fixed_size_binary(kind):
        rows = np.frombuffer(b"".join(array.to_pylist()), np.uint8)
        return rows.reshape(len(array), kind.byte_width)
    elif types.is_integer(kind) or types.is_boolean(kind):
        return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    raise DatasetError(
        f'{where}: column "{name}" has the type {kind}, which cannot be packed; convert or drop it'
    )


def _is_binary(kind: Any) -> bool:
    types = _arrow().types
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _contents(contents: Any, paths: Any, name: str, where: str) -> list[bytes]:
    """Return bytes; where they are null, those of the file at the path."""
    found = contents.to_pylist()
    for number, (content, path) in enumerate(zip(found, paths.to_pylist(), strict=True)):
        if content is None:
            if path is None:
                raise DatasetError(f'{where}: column "{name}" has neither bytes nor a path')
            with reading_file(path):
                found[number] = Path(path).read_bytes()
    return found  # type: ignore[no-any-return]


def _require_values(array: Any, name: str, where: str) -> None:
    if array.null_count:
        raise DatasetError(
            f'{where}: column "{name}", {array.type}, has {array.null_count:,} nulls, which HDF5'
            f" cannot store; give a value to replace them: {named('fill', {name: _example(array)})}"
        )


def _example(array: Any) -> object:
    """Return a value that may replace nulls of this type."""
    types, kind = _arrow().types, array.type
    if types.is_boolean(kind):
        return False
    if types.is_fixed_size_binary(kind):
        return "?" * kind.byte_width
    if types.is_string(kind) or types.is_large_string(kind) or _is_binary(kind):
        return ""
    if types.is_list(kind) or types.is_large_list(kind):
        return []
    if types.is_fixed_size_list(kind):
        return [0] * kind.list_size
    return 0


class EpisodeSource(TableSource):
    """The rows of all episodes, in order, in a folder written by LeRobot."""

    files_are_sources = False

    def __init__(self, folder: Path, fill: Fill) -> None:
        paths = sorted((folder / "data").rglob("*.parquet"))
        if not paths:
            raise DatasetError(f'{folder}: there is no .parquet file in its folder "data"')
        super().__init__(paths, fill, str(folder))
        numbers: list[Any] = []
        for path in paths:
            table = self._reading(
                path, lambda one: _arrow().parquet.read_table(one, columns=[_EPISODE])
            )
            numbers.append(table.column(_EPISODE).to_numpy())
        every = np.concatenate(numbers)
        changes = np.flatnonzero(every[1:] != every[:-1]) + 1
        self.once = {"episode_ends": np.append(changes, len(every)).astype(np.int64)}
        videos = sum(1 for _ in (folder / "videos").rglob("*.mp4"))
        if videos:
            self.notes = [
                f"not packed: {videos:,} video{'s' * (videos > 1)} in {folder / 'videos'}; if you"
                " need the frames, decode them, and pack samples with these images from Python"
            ]
        tasks = folder / "meta" / "tasks.jsonl"
        if tasks.is_file():
            with reading_file(tasks):
                lines = map(json.loads, tasks.read_text("utf-8").splitlines())
                found = sorted((one["task_index"], one["task"]) for one in lines)
            self.once = {**self.once, "tasks": [task for _, task in found]}


class HuggingFaceSource(ListedSource):
    """A `datasets.Dataset`, with class names from its features."""

    def __init__(self, dataset: Any, fill: Fill) -> None:
        if isinstance(dataset, dict):
            raise ConfigError(
                f"the dataset has splits, {', '.join(map(str, dataset))}; give one of them:"
                ' dataset["train"]'
            )
        self.name = f"dataset {dataset.info.dataset_name or ''}".strip()
        self._dataset, self._fill = dataset.with_format("arrow"), fill
        self.count = len(dataset)
        self.nbytes = dataset.data.nbytes
        features = dataset.features
        kinds = {name: type(feature).__name__ for name, feature in features.items()}
        known = {"Image": "image", "Audio": "audio"}
        self.kinds = {name: known[kind] for name, kind in kinds.items() if kind in known}
        labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
        self.classes = {name: list(features[name].names) for name in labels}

    def digest(self) -> str:
        """Return a digest of the dataset's own fingerprint."""
        return digest_of([self._dataset._fingerprint, self.count, self.classes])

    def read(self, numbers: Int64s) -> Block:
        """Return rows."""
        return block_of(self._dataset[as_slice(numbers)], self._fill, self.name)


def saved_dataset(folder: Path) -> Any:
    """Load a Hugging Face dataset that was saved in a folder."""
    with needs_package("datasets", "datasets of Hugging Face"):
        import datasets
    return datasets.load_from_disk(str(folder))
