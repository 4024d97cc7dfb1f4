"""Opens the dataset: indexes its files, and makes the orders of its samples.

Options enter; the layout of each field leaves, over all files, and how samples are dealt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, RaggedField, ReaderConfig, SparseField
from h5async.core.binding import mapping_mode
from h5async.errors import ConfigError, DatasetError, taking_memory
from h5async.fill.columns import Categories, Rows, SparseShape, columns_of, spans_of
from h5async.fill.filevalues import read_names
from h5async.fill.progress import on_indexed
from h5async.fill.ragged import (
    SparseShapes,
    heap_layout,
    is_ragged,
    sparse_layouts,
    with_kinds,
    with_spans,
)
from h5async.fill.records import FillRequest
from h5async.fill.selecting import Chosen, choose, step_rows
from h5async.fill.tables import find_categories
from h5async.index.groups import Grouping
from h5async.index.joined import join_layouts
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach
from h5async.index.obstacles import OtherKindError
from h5async.index.opening import layouts_of_files
from h5async.index.sequenced import aligned
from h5async.io.localfile import read_ahead
from h5async.order.sampling import Order, OrderKey, Sampling
from h5async.order.steps import StepRows
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.order.drawn import SamplerOrder
    from h5async.order.weighted import WeightedOrder


class OpenedDataset(NamedTuple):
    """What is known of a dataset.

    Attributes
    ----------
    config
        The options, with the kinds of all fields.
    layouts
        By name of columns, in their order.
    shapes
        Of sparse fields, by name.
    categories
        Of categorical fields, by name.
    """

    config: ReaderConfig
    layouts: dict[str, DatasetLayout]
    shapes: dict[str, SparseShape]
    categories: dict[str, Categories]


def open_dataset(config: ReaderConfig) -> OpenedDataset:
    """Index the files one by one; the system reads the beginning of the first one meanwhile.

    Raises
    ------
    H5AsyncError
        As `AsyncReader` says.
    """
    reach = Reach(config.allow_external, config.allow_missing, mapping_mode(config.io))
    if any(map(is_ragged, config.batch_fields.values())):
        _check_ragged(config)
        found = with_kinds(config, reach)
    else:
        try:
            layouts = _plain_layouts(config, config.batch_fields, reach)
            return OpenedDataset(config, layouts, {}, {})
        except OtherKindError:  # nobody has told of which
            if config.names_index:
                raise
            found = with_kinds(config, reach)
            if found.config is config:
                raise
    config = found.config
    if any(map(is_ragged, config.batch_fields.values())):
        layouts, shapes = _open_ragged(config, reach)
    else:
        layouts, shapes = _plain_layouts(config, config.batch_fields, reach), {}
    return OpenedDataset(config, layouts, shapes, find_categories(config, found.columns, reach))


def _open_ragged(
    config: ReaderConfig, reach: Reach
) -> tuple[dict[str, DatasetLayout], dict[str, SparseShape]]:
    """Return the layouts of a dataset that has ragged or sparse fields, and the shapes of these."""
    fields, files = config.batch_fields, config.files
    _check_ragged(config)
    found: dict[str, list[DatasetLayout]] = {name: [] for name in columns_of(fields)}
    shapes = {
        name: SparseShapes(name, field)
        for name, field in fields.items()
        if isinstance(field, SparseField)
    }
    in_heaps = {
        name: field
        for name, field in fields.items()
        if isinstance(field, RaggedField) and field.offsets is None
    }
    plain = {
        name: field for name, field in fields.items() if name not in shapes and name not in in_heaps
    }
    known: Iterator[dict[str, DatasetLayout]] = iter(())
    if plain:
        known = layouts_of_files(files, plain, reach, config.index_cache)
    for path in files:
        layouts: dict[str, DatasetLayout] = dict(next(known)) if plain else {}
        for name, field in fields.items():
            if isinstance(field, SparseField):
                several, group = sparse_layouts(name, field, path, reach)
                layouts |= several
                shapes[name].add(group, path, reach)
            elif name in in_heaps:
                layouts[name] = heap_layout(in_heaps[name], path, reach)
            elif isinstance(field, RaggedField):
                layouts[name] = with_spans(layouts[name], field, path, reach)
        layouts = {name: layouts[name] for name in found}
        _check_lengths(layouts)
        for name, layout in layouts.items():
            found[name].append(layout)
    for _ in known:  # what was learnt is saved at its end
        pass
    joined = {name: join_layouts(several) for name, several in found.items()}
    return joined, {name: one.shape() for name, one in shapes.items()}


def _check_ragged(config: ReaderConfig) -> None:
    """Refuse what does not go together with ragged and sparse fields.

    Raises
    ------
    ConfigError
        If it does not.
    """
    name, field = next(item for item in config.batch_fields.items() if is_ragged(item[1]))
    for is_given, option, remedy in (
        (config.cache is not None, f'cache="{config.cache}"', "leave it out"),
        (config.workers != "thread", f'workers="{config.workers}"', 'set workers="thread"'),
        (config.pin_memory, "pin_memory", "leave it out"),
        (config.sequences is not None, "sequences", "leave it out"),
        (config.names_index, "a saved index as hdf5_path", "give the HDF5 files themselves"),
        (config.device.startswith("cuda"), f'device="{config.device}"', 'set device="cpu"'),
    ):
        if is_given:
            raise ConfigError(
                f'"{field.path}" ({name}) has samples of differing lengths, for which {option} is'
                f" not supported; {remedy}"
            )


def _plain_layouts(
    config: ReaderConfig, fields: Mapping[str, Field], reach: Reach
) -> dict[str, DatasetLayout]:
    """Return the layouts of fields of one shape, by name, over all files."""
    files = config.files
    found: dict[str, list[DatasetLayout]] = {name: [] for name in fields}
    tell = on_indexed.get()
    known = layouts_of_files(files, fields, reach, config.index_cache, grouping_of(config, reach))
    for number, indexed in enumerate(known):
        layouts = aligned(indexed)
        _check_lengths(layouts)
        for name, layout in layouts.items():
            found[name].append(layout)
        if tell is not None:
            tell(number + 1, len(files))
        if not number and len(files) > 1 and not config.names_index:
            samples = config.batch_size * config.prefetch
            read_ahead(files[0], samples * sum(layout.row_nbytes for layout in layouts.values()))
    joined = {name: join_layouts(several) for name, several in found.items()}
    for name, field in fields.items():
        if field.steps is not None:
            joined[name] = joined[name].shared()
    return joined


def grouping_of(config: ReaderConfig, reach: Reach) -> Grouping | None:
    """Return which groups of the files are sequences; None: none are."""
    sequences = config.sequences
    if sequences is None or sequences.groups is None:
        return None
    return Grouping(sequences.groups, sequences.only or "", partial(read_names, reach))


class Samplings:
    """Orders of the samples of a dataset, each made once. Safe to use from many threads.

    Parameters
    ----------
    config, layouts
        What they depend on.
    chosen
        Which samples an epoch is made of, where that is known already.

    Attributes
    ----------
    selection
        Which samples an epoch is made of.
    sequences
        The sequences of rows that steps never leave.
    rows
        By column: which rows each sample consists of; None: its own.
    epoch_samples
        Positions in an epoch's order: how many are selected, or drawn.
    draws, sampler
        The orders of the options `weights` and `sampler`, if there are such.

    Raises
    ------
    H5AsyncError
        If what the samples are selected by does not fit the dataset, or cannot be read.
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
        spans = spans_of(layouts)
        steps = step_rows(config.batch_fields, self.sequences)
        self.rows: list[Rows] = [spans.get(name, steps.get(name)) for name in layouts]
        self.draws = None if weights is None else _weighted(weights, config.seed)
        self.sampler = None if config.sampler is None else self._sampler_order()
        self.epoch_samples = self.selection.size
        if self.draws is not None:
            self.epoch_samples = config.epoch_samples or self.selection.size
        if self.sampler is not None:
            self.epoch_samples = self.sampler.size

    def weights_digest(self) -> str | None:
        """Return a short text that depends on all weights; None: there are none."""
        return None if self.draws is None else self.draws.digest

    def samples(self, request: FillRequest) -> NDArray[np.int64]:
        """Return the samples of a batch, in its order, as a new array."""
        if request.samples is not None:
            return request.samples.copy()
        return self.at(request.order).batch_at(request.epoch, request.start)

    def check(self, samples: NDArray[np.int64], where: str) -> None:
        """Check that all steps of some samples are there, where they must be.

        Raises
        ------
        ConfigError
            If a sample is none for that; the message begins with `where`.
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
        """Return the order of samples, and how it is dealt."""
        found = self._made.get(order)
        if found is None:
            what = f"{self._layouts[0].file}: the order of samples"
            with taking_memory(what, f"use {named('shuffle', 'full')}"):
                found = self._new(*order)
            # The others are those of epochs that are over, nearly always.
            self._made = {order: found}
        return found

    def _new(self, rank: int, world_size: int, *resumed: int) -> Sampling:
        config, is_window = self._config, self._config.shuffle == "window"
        return Sampling(
            num_samples=self.epoch_samples,
            batch_size=config.batch_size,
            shuffle=config.shuffle,
            seed=config.seed,
            drop_last=config.drop_last,
            order=self._order(world_size),
            draws=self.draws,
            selection=None if self.sampler or self.selection.is_prefix else self.selection,
            rank=rank,
            world_size=world_size,
            resumed=(resumed[0], self._window(*resumed[1:])) if resumed and is_window else None,
        )

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

    def _order(self, world_size: int) -> Order | None:
        """Return the order of positions, where it is not that of `Sampling` itself."""
        if self._config.shuffle == "window":
            return self._window(self._config.batch_size, world_size)
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
            [rows for rows in self.rows if isinstance(rows, StepRows)],
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
