"""Opens the dataset: indexes its files, and makes the orders of its samples.

Options enter; the layout of each field across all files leaves, and the distribution of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig, SparseField
from h5async.config.files import FileName, is_index
from h5async.errors import ConfigError, DatasetError, taking_memory
from h5async.index.datasettable import shared
from h5async.index.groups import Grouping
from h5async.index.joined import join_layouts
from h5async.index.layout import DatasetLayout
from h5async.index.layoutsource import known_of_files, layouts_of_files
from h5async.index.links import Reach
from h5async.index.obstacles import OtherKindError
from h5async.index.room import files_of
from h5async.index.savedindex import NamedIndex
from h5async.index.sequenced import aligned
from h5async.io.localfiles import read_ahead
from h5async.opening.categories import categories_of, of_one_dtype, require_codes
from h5async.opening.fieldkinds import Kinds, require_alike, with_kinds
from h5async.opening.filefacts import (
    CATEGORIES_OF,
    NAMES_OF,
    SHAPE_OF,
    needs_of,
    read_known,
    shape_of,
    texts_of,
)
from h5async.opening.filevalues import reach_of, read_names
from h5async.opening.progress import on_indexed
from h5async.opening.raggedcolumns import SparseShapes, indices_of_one_dtype, is_ragged, limit_of
from h5async.opening.samplelengths import lengths_of
from h5async.opening.selecting import Chosen, choose, step_rows
from h5async.order.requests import FillRequest
from h5async.order.sampling import Order, OrderKey, Sampling
from h5async.order.spans import LengthRows, SpanRows, StepSpans
from h5async.samples.columns import (
    INDICES,
    Categories,
    Rows,
    SparseShape,
    columns_of,
    spans_of,
    steps_of,
)
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.order.drawn import SamplerOrder
    from h5async.order.weighted import WeightedOrder


class OpenedDataset(NamedTuple):
    """An open dataset: `config` is the options with the kinds of all fields.

    Attributes
    ----------
    layouts
        By column name, in order.
    shapes, categories
        Of sparse and of categorical fields, by name.
    """

    config: ReaderConfig
    layouts: dict[str, DatasetLayout]
    shapes: dict[str, SparseShape]
    categories: dict[str, Categories]


def open_dataset(config: ReaderConfig) -> OpenedDataset:
    """Index the files one by one; meanwhile the system reads the beginning of the first one.

    Raises as in `AsyncReader`.
    """
    reach = reach_of(config)
    grouping = grouping_of(config, reach)
    indices: dict[FileName, NamedIndex] = {
        path: NamedIndex(path, reach) for path in config.files if is_index(path)
    }
    if any(map(is_ragged, config.batch_fields.values())):
        _check_ragged(config)
    elif not indices:
        try:
            layouts = _plain_layouts(config, reach, grouping)
            return OpenedDataset(config, layouts, {}, {})
        except OtherKindError:  # the kinds were not given
            found = with_kinds(config, reach, grouping, indices)
            if found.config is config:
                require_alike(config, reach, grouping)
                raise
            return _open_alike(config, found, reach, grouping, indices)
    found = with_kinds(config, reach, grouping, indices)
    return _open_alike(config, found, reach, grouping, indices)


def _open_alike(
    config: ReaderConfig,
    found: Kinds,
    reach: Reach,
    grouping: Grouping | None,
    indices: Mapping[FileName, NamedIndex],
) -> OpenedDataset:
    """Open a dataset whose fields' kinds are known; on error, check that they are alike."""
    try:
        return _open_kinds(found, reach, grouping, indices)
    except DatasetError:
        require_alike(config, reach, grouping)
        raise


def _open_kinds(
    found: Kinds, reach: Reach, grouping: Grouping | None, indices: Mapping[FileName, NamedIndex]
) -> OpenedDataset:
    """Open a dataset whose fields' kinds are known."""
    config = found.config
    if any(map(is_ragged, config.batch_fields.values())):
        _check_ragged(config)
    needs = needs_of(config.batch_fields, found.columns, grouping)

    def read(path: FileName, names: Sequence[str], reach: Reach) -> dict[str, DatasetLayout]:
        return read_known(path, {name: needs[name] for name in names}, reach, grouping)

    wanted = {name: need.wanted for name, need in needs.items()}
    several = known_of_files(config.files, wanted, read, reach, config.index_cache, indices)
    names = list(columns_of(config.batch_fields))
    columns: dict[str, list[DatasetLayout]] = {name: [] for name in names}
    further: dict[str, list[DatasetLayout]] = {name: [] for name in needs if name not in columns}
    for known in _telling(several, config):
        layouts = aligned({name: known[name] for name in names})
        _check_lengths(layouts)
        for name, layout in layouts.items():
            columns[name].append(layout)
        for name, kept in further.items():
            kept.append(known[name])
    for name in found.columns:
        columns[name] = of_one_dtype(columns[name], reach)
    for name in columns:
        if name.endswith(INDICES):
            columns[name] = indices_of_one_dtype(columns[name])
    joined, shapes = _joined(config, columns), _shapes(config, further, reach)
    for name, shape in shapes.items():
        if shape.places is None:
            of_field = joined[name + INDICES]
            joined[name + INDICES] = of_field.changed(limit=limit_of(of_field, shape.columns))
    categories = _categories(config, found.columns, further)
    for name, of_column in categories.items():
        if of_column.tables is None:  # no mapping will find invalid ones
            require_codes(joined[name], len(of_column.names), reach)
    return OpenedDataset(config, joined, shapes, categories)


def _joined(
    config: ReaderConfig, columns: Mapping[str, Sequence[DatasetLayout]]
) -> dict[str, DatasetLayout]:
    """Return the layouts of columns across all files."""
    joined = {name: join_layouts(several) for name, several in columns.items()}
    for name, field in config.batch_fields.items():
        if field.steps is not None:
            joined[name] = shared(joined[name])
        if name + INDICES in joined:  # its rows are those of the values: stored once
            spans = joined[name].spans
            joined[name + INDICES] = joined[name + INDICES].changed(spans=spans)
    return joined


def _shapes(
    config: ReaderConfig, further: Mapping[str, Sequence[DatasetLayout]], reach: Reach
) -> dict[str, SparseShape]:
    """Return the shapes of sparse fields across all files."""
    found = {}
    for name, field in config.batch_fields.items():
        if isinstance(field, SparseField):
            shapes = SparseShapes(name, field)
            named_columns = further.get(name + NAMES_OF, [None] * len(further[name + SHAPE_OF]))
            for shape, names in zip(further[name + SHAPE_OF], named_columns, strict=True):
                where = f'{shape.file}: group "{shape.path}"'
                columns = shape_of(shape)[1]
                if field.columns is not None:
                    what = f"{where}: {columns:,} columns, of which some are chosen,"
                    reach.room.take(8 * columns, what, files_of(shape))
                shapes.add(columns, where, () if names is None else texts_of(names))
            found[name] = shapes.shape()
    return found


def _categories(
    config: ReaderConfig,
    columns: Mapping[str, str],
    further: Mapping[str, Sequence[DatasetLayout]],
) -> dict[str, Categories]:
    """Return the categories of fields across all files."""
    found = {}
    for name in columns:
        several = further[name + CATEGORIES_OF]
        where = [f'{one.file}: column "{one.path}"' for one in several]
        found[name] = categories_of(name, config, list(map(texts_of, several)), where)
    return found


def _check_ragged(config: ReaderConfig) -> None:
    """Raise ConfigError for options that do not go together with ragged and sparse fields."""
    name, field = next(item for item in config.batch_fields.items() if is_ragged(item[1]))
    for is_given, option, remedy in (
        (config.cache == "device", f'cache="{config.cache}"', 'set cache="host"'),
        (config.cache is not None and field.steps is not None, "cache with steps", "leave it out"),
    ):
        if is_given:
            raise ConfigError(
                f'"{field.path}" ({name}) has samples of differing lengths, for which {option} is'
                f" not supported; {remedy}"
            )


def _plain_layouts(
    config: ReaderConfig, reach: Reach, grouping: Grouping | None
) -> dict[str, DatasetLayout]:
    """Return the layouts of fields of fixed shape, by name, across all files."""
    fields = config.batch_fields
    found: dict[str, list[DatasetLayout]] = {name: [] for name in fields}
    known = layouts_of_files(config.files, fields, reach, config.index_cache, grouping)
    for number, indexed in enumerate(_telling(known, config)):
        layouts = aligned(indexed)
        _check_lengths(layouts)
        for name, layout in layouts.items():
            found[name].append(layout)
        if not number and len(config.files) > 1:
            samples = config.batch_size * config.prefetch
            nbytes = samples * sum(layout.row_nbytes for layout in layouts.values())
            read_ahead(config.files[0], nbytes)
    return _joined(config, found)


def _telling(
    known: Iterator[dict[str, DatasetLayout]], config: ReaderConfig
) -> Iterator[dict[str, DatasetLayout]]:
    """Yield the layouts of each file, and report the progress after each."""
    tell = on_indexed.get()
    for number, found in enumerate(known, 1):
        yield found
        if tell is not None:
            tell(number, len(config.files))


def grouping_of(config: ReaderConfig, reach: Reach) -> Grouping | None:
    """Return which groups of the files are sequences, or None."""
    sequences = config.sequences
    if sequences is None or sequences.groups is None:
        return None
    return Grouping(sequences.groups, sequences.only or "", partial(read_names, reach))


class Samplings:
    """The orders of the samples of a dataset, each made once. Thread-safe.

    Parameters
    ----------
    config, layouts
        What they depend on.
    chosen
        The samples of an epoch, if already known.

    Attributes
    ----------
    selection
        The samples of an epoch.
    sequences
        The sequences of rows that steps never leave.
    rows
        Per column: which rows each sample consists of; None means its own.
    epoch_samples
        The number of positions in an epoch's order: samples selected, or drawn.
    draws, sampler
        The orders of the options `weights` and `sampler`, if given.
    lengths
        The number of values that samples count, if batches depend on it.

    Raises
    ------
    H5AsyncError
        If the datasets that select samples do not fit the dataset, or cannot be read.
    """

    def __init__(
        self,
        config: ReaderConfig,
        layouts: Mapping[str, DatasetLayout],
        chosen: Chosen | None = None,
    ) -> None:
        self._config = config
        self._layouts = list(layouts.values())
        self._made: dict[OrderKey, Sampling] = {}
        found = choose(config, layouts) if chosen is None else chosen
        self.selection, weights, self.sequences, self._possible = found
        count = self._layouts[0].sample_count
        self._all_are_possible = self._possible.is_prefix and self._possible.size == count
        steps = step_rows(config.batch_fields, self.sequences)
        spans = spans_of(layouts, steps)
        self.rows: list[Rows] = [spans.get(name, steps.get(name)) for name in layouts]
        self.lengths = lengths_of(config, layouts)
        self.draws = None if weights is None else _weighted(weights, config.seed)
        self.sampler = None if config.sampler is None else self._sampler_order()
        self.epoch_samples = self.selection.size
        if self.draws is not None:
            self.epoch_samples = config.epoch_samples or self.selection.size
        if self.sampler is not None:
            self.epoch_samples = self.sampler.size

    def weights_digest(self) -> str | None:
        """Return a short digest of all weights; None if there are none."""
        return None if self.draws is None else self.draws.digest

    def samples(self, request: FillRequest) -> NDArray[np.int64]:
        """Return the samples of a batch, in its order, as a new array."""
        if request.samples is not None:
            return request.samples.copy()
        return self.at(request.order).batch_at(request.epoch, request.start)

    def check(self, samples: NDArray[np.int64], where: str) -> None:
        """Check that samples have all the steps that they must have.

        ConfigError if one does not; the message begins with `where`.
        """
        if self._all_are_possible:
            return
        is_possible = self._possible.are_in(samples)
        if not is_possible.all():
            odd = int(samples[~is_possible][0])
            number = int(self.sequences.numbers(np.array([odd]))[0])
            if number < 0 or odd >= self.sequences.ends[number]:
                raise ConfigError(
                    f"{where}: row {odd} is no sample, because it lies in no sequence"
                )
            raise ConfigError(
                f"{where}: row {odd} is no sample: it lies in sequence {number}, and"
                " its steps leave that, or it is left out by every; choose another one, or set"
                f" {named('pad', 'edge')} or {named('pad', 'zero')}"
            )

    def at(self, order: OrderKey) -> Sampling:
        """Return the order of samples, and its distribution over ranks and batches."""
        found = self._made.get(order)
        if found is None:
            what = f"{self._layouts[0].file}: the order of samples"
            with taking_memory(what, f"use {named('shuffle', 'full')}"):
                found = self._new(*order)
            # The others nearly always belong to past epochs.
            self._made = {order: found}
        return found

    def most_samples(self, *, may_repeat: bool) -> int:
        """Return the maximum number of samples in a batch of an epoch."""
        most = min(self._config.batch_size, max(1, self.epoch_samples))
        if self.lengths is None:
            return most
        return self.lengths.most_samples(self.selection, most, may_repeat=may_repeat)

    def most_rows(self, rows: SpanRows, samples: int, *, may_repeat: bool) -> int:
        """Return the maximum number of rows of a column in a batch of `samples`."""
        if isinstance(rows, StepSpans):
            return rows.most(samples, may_repeat=may_repeat)
        selected = self.selection
        if not selected.is_prefix or selected.size < rows.size:
            numbers = selected.samples(np.arange(selected.size, dtype=np.int64))
            most = LengthRows(rows.lengths(numbers)).most(samples, may_repeat=may_repeat)
        else:
            most = rows.most(samples, may_repeat=may_repeat)
        if self.lengths is None or self.lengths.values is None or samples < 2:
            return most
        own = rows.all_lengths()
        # Rows that do not count, such as those of images, are not limited.
        if (own > self.lengths.of_sample).any():
            return most
        return min(most, max(self.lengths.values, int(own.max(initial=0))))

    def _new(self, rank: int, world_size: int, *resumed: int) -> Sampling:
        if self.lengths is not None:
            return self._new_by_length(rank, world_size, *resumed)
        config, is_window = self._config, self._config.shuffle == "window"
        return Sampling(
            **self._dealing(rank, world_size, config.batch_size),
            resumed=(resumed[0], self._window(*resumed[1:3])) if resumed and is_window else None,
        )

    def _new_by_length(self, rank: int, world_size: int, *resumed: int) -> Sampling:
        from h5async.order.lengths import SamplingByLength

        begun, own = None, (self._config.batch_size, world_size)
        assert self.lengths is not None
        if resumed:
            epoch, batch_size, ranks, start = resumed
            origin = None
            if (batch_size, ranks) != own:
                dealing = self._dealing(0, ranks, batch_size)
                origin = SamplingByLength(**dealing, lengths=self.lengths)
            begun = epoch, start, origin
        dealing = self._dealing(rank, world_size, own[0])
        return SamplingByLength(**dealing, lengths=self.lengths, begun=begun)

    def _dealing(self, rank: int, world_size: int, batch_size: int) -> dict[str, Any]:
        return {
            "num_samples": self.epoch_samples,
            "batch_size": batch_size,
            "shuffle": self._config.shuffle,
            "seed": self._config.seed,
            "drop_last": self._config.drop_last,
            "order": self._order(batch_size, world_size),
            "draws": self.draws,
            "selection": None if self.sampler or self.selection.is_prefix else self.selection,
            "rank": rank,
            "world_size": world_size,
        }

    def _sampler_order(self) -> SamplerOrder:
        from h5async.order.drawn import SamplerOrder

        config = self._config
        return SamplerOrder(
            config.sampler,
            self._layouts[0].sample_count,
            config.batch_size,
            config.epoch_samples,
            None
            if self._all_are_possible
            else partial(self.check, where=f"{self._layouts[0].file}: sampler"),
        )

    def _order(self, batch_size: int, world_size: int) -> Order | None:
        """Return the order of positions, if `Sampling` does not make it itself."""
        if self._config.shuffle == "window":
            return self._window(batch_size, world_size)
        return self.sampler

    def _window(self, batch_size: int, world_size: int) -> Order:
        from h5async.order.window import window_order

        config = self._config
        return window_order(
            self._layouts,
            config.window_bytes,
            config.seed,
            batch_size,
            world_size,
            self.selection,
            list(filter(None, map(steps_of, self.rows))),
            0 if self.lengths is None else self.lengths.moved_samples(batch_size),
        )


def _weighted(weights: NDArray[np.float64], seed: int) -> WeightedOrder:
    from h5async.order.weighted import WeightedOrder

    return WeightedOrder(weights, seed)


def _check_lengths(layouts: Mapping[str, DatasetLayout]) -> None:
    items = list(layouts.items())
    name, first = items[0]
    for other_name, other in items[1:]:
        if other.sample_count != first.sample_count:
            raise DatasetError(
                f'{first.file}: dataset "{first.path}" ({name}) has {first.sample_count} samples'
                f' along dimension {first.sample_axis}, but "{other.path}" ({other_name}) has'
                f" {other.sample_count} along dimension {other.sample_axis}; all fields must"
                " have the same number of samples"
            )
