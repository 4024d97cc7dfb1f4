"""Opens the dataset: indexes its files, and makes the orders of its samples.

Options enter; the layout of each field across all files, and the distribution of samples, leave.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from h5async.config import ReaderConfig
from h5async.config.files import FileName, is_index
from h5async.errors import (
    ConfigError,
    DamagedError,
    DatasetError,
    ReadError,
    Skipped,
    taking_memory,
)
from h5async.index.composition import aligned
from h5async.index.contents import Grouping
from h5async.index.hdf5 import OtherKindError
from h5async.index.indexcache import known_of_files
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach
from h5async.index.savedindex import NamedIndex
from h5async.io.metadatafile import opening_ahead
from h5async.io.source import read_ahead
from h5async.io.stores import far_names
from h5async.opening.fieldkinds import on_indexed, unlike, with_kinds
from h5async.opening.filefacts import needs_of, read_known
from h5async.opening.filevalues import grouping_of, reach_of
from h5async.opening.oncefields import static_values, with_rows_of_samples
from h5async.opening.selecting import Chosen, choose, step_rows
from h5async.order.drawn import SamplerOrder
from h5async.order.rows import LengthRows, SpanRows, StepSpans
from h5async.order.sampling import NO_LIMIT, FillRequest, Order, OrderKey, Sampling
from h5async.order.selection import WeightedOrder
from h5async.plan.crops import require_same_places
from h5async.samples.assembly import columns_of, field_kinds, spans_of
from h5async.samples.fieldkind import FieldKind, Rows, steps_of
from h5async.spelling import named
from h5async.system.interruptions import suppressing

if TYPE_CHECKING:
    from h5async.order.lengths import Lengths

_LEAST_AHEAD = 1 << 16  # least samples of an epoch whose order a thread makes


class OpenedDataset(NamedTuple):
    """An open dataset.

    `config` has the options with the kinds of all fields resolved; `layouts` are by column name, in
    order; `kinds`, and the `static` values of the whole dataset, are by field name. `skipped` are
    the files that were left out.
    """

    config: ReaderConfig
    layouts: dict[str, DatasetLayout]
    kinds: dict[str, FieldKind]
    static: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()


def open_dataset(config: ReaderConfig) -> OpenedDataset:
    """Index the files one by one; meanwhile the system reads the beginning of the first one.

    Raises like `AsyncReader`.
    """
    given = config.batch_fields | config.static_fields
    fields = {name: field.normalized(name) for name, field in given.items()}
    if any(one is not given[name] for name, one in fields.items()):
        config = config.model_copy(update={"fields": fields})
    with opening_ahead(far_names(config.files)):
        if config.on_error == "raise" or config.names_index:
            return _open(config, None)
        return _open_good(config)


def _open_good(config: ReaderConfig) -> OpenedDataset:
    files, failed = config.files, dict[FileName, Exception]()
    for file in files:  # the first good one determines the fields
        try:
            _open(config.model_copy(update={"hdf5_path": file, "index_cache": False}), None)
            break
        except (DamagedError, DatasetError) as error:
            failed[file] = error
            if len(failed) == len(files):
                raise failed[files[0]] from None
    left = tuple(file for file in files if file not in failed)
    return _open(config.model_copy(update={"hdf5_path": left}), failed)


def _open(config: ReaderConfig, failed: dict[FileName, Exception] | None) -> OpenedDataset:
    """Open a dataset; files that cannot be read are added to `failed`, if given, and left out."""
    reach = reach_of(config)
    grouping = grouping_of(config, reach)
    indices: dict[FileName, NamedIndex] = {
        path: NamedIndex(path, reach) for path in config.files if is_index(path)
    }
    kinds = field_kinds(config.batch_fields)
    try:
        if not indices and not any(kind.is_ragged for kind in kinds.values()):
            try:
                return _open_kinds(config, kinds, reach, grouping, indices, failed)
            except OtherKindError:  # the kinds were not given
                found, kinds = with_kinds(config, reach, grouping, indices)
                if found is config:
                    raise
        else:
            found, kinds = with_kinds(config, reach, grouping, indices)
        return _open_kinds(found, kinds, reach, grouping, indices, failed)
    except DatasetError as error:
        other = unlike(config, reach, grouping)
        if other is None:
            raise
        raise other from error


def _open_kinds(
    config: ReaderConfig,
    kinds: dict[str, FieldKind],
    reach: Reach,
    grouping: Grouping | None,
    indices: Mapping[FileName, NamedIndex],
    failed: dict[FileName, Exception] | None,
) -> OpenedDataset:
    """Open a dataset whose fields are of these kinds; `OtherKindError` if one is not."""
    _check_ragged(config, kinds)
    needs = needs_of(kinds, grouping, config)

    def read(path: FileName, names: Sequence[str], reach: Reach) -> dict[str, DatasetLayout]:
        try:
            return read_known(path, {name: needs[name] for name in names}, reach, grouping)
        except (DamagedError, DatasetError) as error:
            if isinstance(error, ReadError):
                error.filename = error.filename or str(path)
            if failed is None or isinstance(error, OtherKindError):
                raise
            failed[path] = error
            return {}

    wanted = {name: need.wanted for name, need in needs.items()}
    files = config.files  # expands globs on each access
    several = known_of_files(files, wanted, read, reach, config.index_cache, indices)
    columns = columns_of(kinds)
    once = {name: field for name, field in columns.items() if field.per is not None}
    facts: dict[str, list[DatasetLayout]] = {name: [] for name in needs}
    tell = on_indexed.get()
    for number, known in enumerate(several, 1):
        if not known:  # it was left out
            continue
        layouts = aligned({name: known[name] for name in columns if name not in once})
        try:
            _check_lengths(layouts)
        except DatasetError as error:
            if failed is None:
                raise
            failed[files[number - 1]] = error
            continue
        for name, layout in (known | layouts).items():
            facts[name].append(layout)
        if number == 1 < len(files) and not indices:
            samples = config.batch_size * config.prefetch
            nbytes = samples * sum(layout.part_nbytes for layout in layouts.values())
            read_ahead(files[0], nbytes)
        if tell is not None:
            tell(number, len(files))
    joined: dict[str, DatasetLayout] = {}
    for kind in kinds.values():
        joined |= kind.join(facts, config, reach)
    require_same_places(kind.places for kind in kinds.values())
    cropped = next((name for name, layout in joined.items() if layout.crop is not None), None)
    if cropped is not None and config.cache == "device":
        raise ConfigError(
            f'"{cropped}" is cropped or flipped at random, for which cache="device" is not'
            ' supported; set cache="host"'
        )
    _check_lengths({name: joined[name] for name in columns if name not in once})
    if failed:
        left = tuple(file for file in files if file not in failed)
        config = config.model_copy(update={"hdf5_path": left})
    layouts = with_rows_of_samples(config, joined, once, facts)
    static = static_values(config.static_fields, facts, reach)
    skipped = (Skipped(str(file), None, None, str(one)) for file, one in (failed or {}).items())
    return OpenedDataset(config, layouts, kinds, static, tuple(skipped))


def _check_ragged(config: ReaderConfig, kinds: Mapping[str, FieldKind]) -> None:
    """Raise ConfigError for options that do not support samples of differing lengths."""
    kind = next((kind for kind in kinds.values() if kind.is_ragged), None)
    if kind is None or not config.keeps_rows:
        return
    option = f'cache="{config.cache}"'
    if kind.field.steps is not None:
        option, remedy = f"{option} with steps", 'leave it out, or set cache="disk"'
    elif config.cache == "device":
        remedy = 'set cache="host"'
    else:
        return
    raise ConfigError(
        f'"{kind.field.path}" ({kind.name}) has samples of differing lengths, for which {option} is'
        f" not supported; {remedy}"
    )


class Samplings:
    """The orders of the samples of a dataset, each made once. Thread-safe.

    `chosen` are the samples of an epoch, if already known; `selection` and `sequences` are part of
    it. `rows` are, per column, the rows of each sample; None means its own row. An epoch's order
    has `epoch_samples` positions, for selected or drawn samples. `has_passes`: there are more or
    fewer selected samples than positions, so epochs continue each other in passes over all of them.
    `draws` and `sampler` are the orders of the options `weights` and `sampler`, if given; `lengths`
    are the numbers of values of samples, if batches depend on them.

    H5AsyncError if the datasets that select samples do not fit the dataset, or cannot be read.
    """

    def __init__(
        self,
        config: ReaderConfig,
        layouts: Mapping[str, DatasetLayout],
        chosen: Chosen | None = None,
    ) -> None:
        self.config, self.layouts = config, layouts
        self._first = next(iter(layouts.values()))
        self._made: dict[OrderKey, Sampling] = {}
        # Has a thread call a function, if there is one; the order and epoch last made that way.
        self.aside: Callable[[Callable[[], None]], None] | None = None
        self._ahead: tuple[OrderKey, int] | None = None
        found = choose(config, layouts) if chosen is None else chosen
        self.selection, weights, self.sequences, self._possible, self.offsets = found
        count = self._first.sample_count
        self.all_are_possible = self._possible.is_prefix and self._possible.size == count
        steps = step_rows(config.batch_fields, self.sequences)
        spans = spans_of(layouts, steps)
        self.rows: list[Rows] = [spans.get(name, steps.get(name)) for name in layouts]
        self.lengths = _lengths_of(config, layouts)
        self.draws = None if weights is None else WeightedOrder(weights, config.seed)
        self.sampler: SamplerOrder | None = None
        self.epoch_samples = self.selection.size and (config.epoch_samples or self.selection.size)
        self.has_passes = self.epoch_samples != self.selection.size and self.draws is None
        if config.sampler is not None:
            check = partial(self.check, where=f"{self._first.file}: sampler")
            sizes = count, config.batch_size, config.epoch_samples
            self.sampler = SamplerOrder(config.sampler, *sizes, check)
            self.epoch_samples, self.has_passes = self.sampler.size, False

    def weights_digest(self) -> str | None:
        """Return a short digest of all weights; None if there are none."""
        return None if self.draws is None else self.draws.digest

    def samples(self, request: FillRequest) -> NDArray[np.int64]:
        """Return the samples of a batch, in its order, as a new array."""
        if request.samples is not None:
            return request.samples.copy()
        return self.of(request).batch_at(request.epoch, request.start)

    def of(self, request: FillRequest) -> Sampling:
        """Return the order that a request refers to."""
        if request.number >= self.config.prefetch:  # no batch of the last epoch is under way
            self.make_ahead(request.order, request.epoch + 1)
        return self.at(request.order)

    def make_ahead(self, order: OrderKey, epoch: int) -> None:
        """Have a thread make the order of an epoch, if that takes long. Never blocks.

        Of earlier orders, only the previous epoch's is still needed.
        """
        aside = self.aside  # another thread may close the reader
        if aside is not None and self.makes_ahead and self._ahead != (order, epoch):
            self._ahead = order, epoch
            aside(partial(_make_ahead, self.at(order), epoch))

    @property
    def makes_ahead(self) -> bool:
        """Whether orders take so long to make that a thread makes them."""
        is_long = self.epoch_samples >= _LEAST_AHEAD and self.sampler is None
        is_made = self.config.shuffle == "window" or self.lengths is not None
        return is_long and is_made and self.aside is not None

    def following(self, request: FillRequest) -> FillRequest | None:
        """Return the request after one, in order; None if that is not known."""
        if request.samples is not None or self.sampler is not None:
            return None
        slot, serial, epoch, number, start, order, _ = request
        sampling = self.at(order)
        if sampling.batches_from(epoch, start) > 1:
            number, start = sampling.step_at(epoch, start, 1)
        else:
            epoch, number, start, order = epoch + 1, 0, 0, order[:2]
        return FillRequest(slot, serial + 1, epoch, number, start, order)

    def check(self, samples: NDArray[np.int64], where: str) -> None:
        """Check that rows can be samples; ConfigError if one cannot be.

        The message begins with `where`.
        """
        if self.all_are_possible:
            return
        is_possible = self._possible.are_in(samples)
        if not is_possible.all():
            odd = int(samples[~is_possible][0])
            number = int(self.sequences.numbers(np.array([odd]))[0])
            if number < 0 or odd >= self.sequences.ends[number]:
                raise ConfigError(f"{where}: row {odd} is not a sample: it lies in no sequence")
            raise ConfigError(
                f"{where}: row {odd} is not a sample: its steps leave sequence {number},"
                " or it is left out by every; choose another one, or set"
                f" {named('pad', 'edge')} or {named('pad', 'zero')}"
            )

    def at(self, order: OrderKey) -> Sampling:
        """Return the order of samples, and its distribution over ranks and batches."""
        found = self._made.get(order)
        if found is None:
            what = f"{self._first.file}: the order of samples"
            with taking_memory(what, f"use {named('shuffle', 'full')}"):
                found = self._new(*order)
            # The others nearly always belong to past epochs.
            self._made = {order: found}
        return found

    @property
    def _times(self) -> int:
        """The maximum number of times that a sample may occur in a batch."""
        is_drawn = self.draws is not None or self.sampler is not None
        is_sorted = self.has_passes and self.config.bucket is not None  # by length, over passes
        if is_drawn or is_sorted or self.selection.has_repeats:
            return NO_LIMIT
        # A batch may begin in one pass and end in another one.
        return 2 + self.config.batch_size // self.selection.size if self.has_passes else 1

    def most_samples(self) -> int:
        """Return the maximum number of samples in a batch of an epoch."""
        most = min(self.config.batch_size, max(1, self.epoch_samples))
        if self.lengths is None:
            return most
        return self.lengths.most_samples(self.selection, most, times=self._times)

    def most_rows(self, rows: SpanRows, samples: int) -> int:
        """Return the maximum number of rows of a column in a batch of `samples`."""
        times = self._times
        if isinstance(rows, StepSpans):
            return rows.most(samples)
        selected = self.selection if self.offsets is None else self._possible  # they move within it
        if not selected.is_prefix or selected.size < rows.size:
            numbers = selected.samples(np.arange(selected.size, dtype=np.int64))
            most = LengthRows(rows.lengths(numbers)).most(samples, times=times)
        else:
            most = rows.most(samples, times=times)
        if self.lengths is None or self.lengths.values is None or samples < 2:
            return most
        own = rows.all_lengths()
        # Rows that do not count, such as those of images, are not limited.
        if (own > self.lengths.of_sample).any():
            return most
        return min(most, max(self.lengths.values, int(own.max(initial=0))))

    def _new(self, rank: int, world_size: int, *resumed: int) -> Sampling:
        size, lengths = self.config.batch_size, self.lengths
        dealing = self._dealing(rank, world_size, size)
        if lengths is None:
            begun_by_window = None
            if resumed and self.config.shuffle == "window":
                begun_by_window = resumed[0], self._window(*resumed[1:3])
            return Sampling(**dealing, resumed=begun_by_window)
        from h5async.order.lengths import SamplingByLength

        begun = None
        if resumed:
            epoch, batch_size, ranks, start = resumed
            origin = None
            if (batch_size, ranks) != (size, world_size):
                origin = SamplingByLength(**self._dealing(0, ranks, batch_size), lengths=lengths)
            begun = epoch, start, origin
        return SamplingByLength(**dealing, lengths=lengths, begun=begun)

    def _dealing(self, rank: int, world_size: int, batch_size: int) -> dict[str, Any]:
        is_window = self.config.shuffle == "window"
        return {
            "num_samples": self.epoch_samples,
            "batch_size": batch_size,
            "shuffle": self.config.shuffle,
            "seed": self.config.seed,
            "drop_last": self.config.drop_last,
            "order": self._window(batch_size, world_size) if is_window else self.sampler,
            "draws": None if is_window else self.draws,
            "offsets": self.offsets,
            "pass_samples": self.selection.size if self.has_passes else None,
            "selection": None if self.sampler or self.selection.is_prefix else self.selection,
            "rank": rank,
            "world_size": world_size,
        }

    def _window(self, batch_size: int, world_size: int) -> Order:
        from h5async.order.window import window_order

        config = self.config
        return window_order(
            list(self.layouts.values()),
            config.window_bytes,
            config.seed,
            batch_size,
            world_size,
            self.selection,
            list(filter(None, map(steps_of, self.rows))),
            0 if self.lengths is None else self.lengths.moved_samples(batch_size),
            self.epoch_samples,
            self.draws,
        )


def _make_ahead(sampling: Sampling, epoch: int) -> None:
    with suppressing(Exception):  # the consumer makes it again, and raises the error
        sampling.batch_at(epoch, 0)


def _lengths_of(config: ReaderConfig, layouts: Mapping[str, DatasetLayout]) -> Lengths | None:
    """Return the number of values per sample; None if batches do not depend on it.

    A sample counts the delivered values of its longest field, so no field of a batch has more than
    `batch_values`.

    ConfigError if no field has samples of differing lengths.
    """
    option = "bucket" if config.batch_values is None else "batch_values"
    if getattr(config, option) is None:
        return None
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
            f"{first.file}: {named(option)} needs a field that is delivered as samples of"
            f" differing lengths, and none of {', '.join(kinds)} is, or their lengths are not known"
            f" before decoding; leave it out, and use {named('batch_size')}"
        )
    from h5async.order.lengths import Lengths

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
    (name, first), *rest = layouts.items()
    for other_name, other in rest:
        if other.sample_count != first.sample_count:
            raise DatasetError(
                f'{first.file}: dataset "{first.path}" ({name}) has {first.sample_count} samples'
                f' along dimension {first.sample_axis}, but "{other.path}" ({other_name}) has'
                f" {other.sample_count} along dimension {other.sample_axis}; all fields must"
                " have the same number of samples"
            )
