"""Opens the dataset: indexes its files, and makes the orders of its samples.

Options enter; the layout of each field across all files leaves, and the distribution of samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.config.files import FileName, is_index
from h5async.errors import ConfigError, DatasetError, taking_memory
from h5async.index.contents import Grouping
from h5async.index.hdf5 import OtherKindError
from h5async.index.layout import DatasetLayout
from h5async.index.layoutsource import known_of_files, layouts_of_files
from h5async.index.links import Reach
from h5async.index.savedindex import NamedIndex
from h5async.index.sequenced import aligned
from h5async.io.localfiles import read_ahead
from h5async.opening.fieldkinds import require_alike, with_kinds
from h5async.opening.filefacts import needs_of, read_known
from h5async.opening.filevalues import reach_of, read_names
from h5async.opening.selecting import Chosen, choose, step_rows
from h5async.order.rows import LengthRows, SpanRows, StepSpans
from h5async.order.sampling import FillRequest, Order, OrderKey, Sampling, WeightedOrder
from h5async.samples.assembly import columns_of, field_kinds, spans_of
from h5async.samples.fieldkind import FieldKind, Known, Rows, steps_of
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.order.drawn import SamplerOrder
    from h5async.order.lengths import Lengths


# Called after each file with the number of indexed files and the total.
on_indexed: ContextVar[Callable[[int, int], None] | None] = ContextVar("on_indexed", default=None)


class OpenedDataset(NamedTuple):
    """An open dataset.

    `config` is the options with the kinds of all fields; `layouts` are by column name, in order;
    `kinds` are by field name.
    """

    config: ReaderConfig
    layouts: dict[str, DatasetLayout]
    kinds: dict[str, FieldKind]


def open_dataset(config: ReaderConfig) -> OpenedDataset:
    """Index the files one by one; meanwhile the system reads the beginning of the first one.

    Raises as in `AsyncReader`.
    """
    reach = reach_of(config)
    grouping = grouping_of(config, reach)
    indices: dict[FileName, NamedIndex] = {
        path: NamedIndex(path, reach) for path in config.files if is_index(path)
    }
    kinds = field_kinds(config.batch_fields)
    if any(kind.is_ragged for kind in kinds.values()):
        _check_ragged(config, kinds)
    elif not indices:
        try:
            return OpenedDataset(config, _plain_layouts(config, kinds, reach, grouping), kinds)
        except OtherKindError:  # the kinds were not given
            found = with_kinds(config, reach, grouping, indices)
            if found[0] is config:
                require_alike(config, reach, grouping)
                raise
            return _open_alike(config, found, reach, grouping, indices)
    found = with_kinds(config, reach, grouping, indices)
    return _open_alike(config, found, reach, grouping, indices)


def _open_alike(
    config: ReaderConfig,
    found: tuple[ReaderConfig, dict[str, FieldKind]],
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
    found: tuple[ReaderConfig, dict[str, FieldKind]],
    reach: Reach,
    grouping: Grouping | None,
    indices: Mapping[FileName, NamedIndex],
) -> OpenedDataset:
    """Open a dataset whose fields' kinds are known."""
    config, kinds = found
    _check_ragged(config, kinds)
    needs = needs_of(kinds, grouping)

    def read(path: FileName, names: Sequence[str], reach: Reach) -> dict[str, DatasetLayout]:
        return read_known(path, {name: needs[name] for name in names}, reach, grouping)

    wanted = {name: need.wanted for name, need in needs.items()}
    several = known_of_files(config.files, wanted, read, reach, config.index_cache, indices)
    columns = columns_of(kinds)
    facts: dict[str, list[DatasetLayout]] = {name: [] for name in needs}
    for known in _telling(several, config):
        layouts = aligned({name: known[name] for name in columns})
        _check_lengths(layouts)
        for name, layout in (known | layouts).items():
            facts[name].append(layout)
    return OpenedDataset(config, _joined(kinds, facts, config, reach), kinds)


def _joined(
    kinds: Mapping[str, FieldKind], known: Known, config: ReaderConfig, reach: Reach
) -> dict[str, DatasetLayout]:
    """Return the layouts of columns across all files."""
    joined: dict[str, DatasetLayout] = {}
    for kind in kinds.values():
        joined |= kind.join(known, config, reach)
    return joined


def _check_ragged(config: ReaderConfig, kinds: Mapping[str, FieldKind]) -> None:
    """Raise ConfigError for options that do not go together with samples of differing lengths."""
    kind = next((kind for kind in kinds.values() if kind.is_ragged), None)
    if kind is None:
        return
    name, field = kind.name, kind.field
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
    config: ReaderConfig, kinds: Mapping[str, FieldKind], reach: Reach, grouping: Grouping | None
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
    return _joined(kinds, found, config, reach)


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

    `chosen` are the samples of an epoch, if already known; `selection` and `sequences` are of it.
    `rows` says, per column, which rows each sample consists of; None means its own. An epoch's
    order has `epoch_samples` positions: samples selected, or drawn. `draws` and `sampler` are the
    orders of the options `weights` and `sampler`, if given; `lengths` are the numbers of values
    that samples count, if batches depend on them.

    H5AsyncError if the datasets that select samples do not fit the dataset, or cannot be read.
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
        self.lengths = _lengths_of(config, layouts)
        self.draws = None if weights is None else WeightedOrder(weights, config.seed)
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


def _lengths_of(config: ReaderConfig, layouts: Mapping[str, DatasetLayout]) -> Lengths | None:
    """Return the number of values per sample; None if batches do not depend on it.

    A sample counts the delivered values of its longest field, so no field of a batch has more than
    `batch_values`.

    ConfigError if no field has samples of differing lengths.
    """
    option = "bucket" if config.batch_values is None else "batch_values"
    if getattr(config, option) is None:
        return None
    from h5async.order.lengths import (
        NO_LIMIT,
        Lengths,  # only needed here
    )

    first, counts = next(iter(layouts.values())), None
    kinds = field_kinds(config.batch_fields)
    with taking_memory(f"{first.file}: lengths of samples", f"leave out {named(option)}"):
        for name, rows in spans_of(layouts, {}).items():
            counted = kinds[name].counted(rows) if name in kinds else None
            if counted is not None:
                counts = np.zeros(first.sample_count, np.int64) if counts is None else counts
                np.maximum(counts, counted, out=counts)
        if counts is not None and not counts.max(initial=0) >> 32:
            counts = counts.astype(np.uint32)
    if counts is None:
        raise ConfigError(
            f"{first.file}: {named(option)} is for fields that are delivered as samples of"
            f" differing lengths, and none of {', '.join(kinds)} is, or their lengths are known"
            f" only once they are decoded; leave it out, and use {named('batch_size')}"
        )
    values = None if config.batch_values is None else min(NO_LIMIT, config.batch_values)
    return Lengths(counts, values, config.bucket)


def digest(lengths: Lengths) -> str:
    """Return a short digest of the lengths of all samples."""
    array = lengths.of_sample
    found = hashlib.blake2b(digest_size=16)
    for start in range(0, array.size, 1 << 20):
        found.update(array[start : start + (1 << 20)].astype("<i8").tobytes())
    return found.hexdigest()


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
