"""Defines `FieldKind`: a field's datasets, its layout in slots, and its delivered form.

The packages above ask a field's kind, and make no other distinction between fields. The base class
is the kind of plain fields: one dataset, with a row, or steps of rows, per sample. Ragged fields
are here, too, and the base class of decoded fields. Each other kind has a module of its own, and a
line in `assembly.py`.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from h5async.config import Field, RaggedField, ReaderConfig
from h5async.core.binding import Core, address
from h5async.errors import DamagedError, DatasetError
from h5async.index.composition import join_layouts, joined_cf
from h5async.index.datasettable import shared
from h5async.index.layout import DatasetLayout, values_of
from h5async.index.links import Reach, files_of
from h5async.index.savedindex import Wanted
from h5async.io.source import FileStamp
from h5async.order.rows import Packing, SpanRows, StepRows, StepSpans
from h5async.plan.crops import Places, parts_of_rows
from h5async.plan.transform import RowTransform
from h5async.samples.ragged import Ragged, put_padded

Rows = StepRows | SpanRows | None  # the rows of each sample in a column; None: its own row
Mask = Callable[[NDArray[np.int64]], NDArray[Any]]  # of sample numbers
OfSamples = Callable[[NDArray[np.int64], int], NDArray[Any]]  # of sample numbers, and an epoch
Transforms = Sequence[RowTransform]  # of the columns of a field
CanTransform = Callable[[RowTransform], bool] | None  # a device's; None: the host does everything
Known = Mapping[str, Sequence[DatasetLayout]]  # per file, by the names of fields and facts
# Decodes samples. Returns False if one was broken and replaced, or a list of remaining work.
DecodingWork: TypeAlias = "Callable[[], bool | list[DecodingWork]]"

INDICES = "\0indices"  # suffix of a field's name: its column of indices

# Kinds of facts, as in `Wanted` (see `opening/filefacts.py`): elements of variable length; rows,
# shape and column names of a sparse matrix; the categories of a column; that a column has a mask;
# values as codes; their categories; that elements of variable length are encoded images or audio.
HEAP, ROWS, SHAPE, TEXTS = "heap", "rows", "shape", "texts"
CATEGORIES, NULLABLE, LABELS, LABEL_NAMES = "categories", "nullable", "labels", "label-names"
IMAGE, AUDIO = "image", "audio"


class Categories(NamedTuple):
    """The categories of a field.

    `names` are the united names of all files: code c stands for ``names[c]``. `tables` map, per
    file, its own codes to these, int64 (categories of the file + 1,), with -1 at the end for the
    code -1; None if the codes need no mapping. `where` names the column of each file in messages.
    """

    names: tuple[Any, ...]
    tables: tuple[NDArray[np.int64], ...] | None = None
    where: tuple[str, ...] = ()


class SparseShape(NamedTuple):
    """The columns of a sparse field.

    `columns` is the number of delivered columns. `places` has, per file, the delivered position of
    each of its columns, int64, or -1 if it is not delivered; None means all in their own order.
    `where` names the matrix of each file in messages.
    """

    columns: int
    places: tuple[NDArray[np.int64], ...] | None = None
    where: tuple[str, ...] = ()


class Outline(NamedTuple):
    """How a field is assembled from its columns, and the device's part in it.

    `columns` are the numbers of its columns. `is_varying`: samples differ in their number of
    values; `made` is then the row shape and dtype of the plain array made from them, if any.
    `is_encoded`: samples are decoded, such as images. `pixels` is the transform of decoded images
    of one size, if a device applies it. `is_left`: a device makes the plain array, or transforms
    the pixels; it then adds `added`, if given, to all values of dense rows.
    """

    name: str
    columns: tuple[int, ...] = ()
    is_varying: bool = False
    is_encoded: bool = False
    made: tuple[tuple[int, ...], np.dtype[Any]] | None = None
    pixels: RowTransform | None = None
    is_left: bool = False
    added: NDArray[Any] | None = None

    @property
    def made_on_host_nbytes(self) -> int:
        """Bytes of a row of the plain array, if the host makes it."""
        if self.made is None or self.is_left:
            return 0
        return math.prod(self.made[0]) * self.made[1].itemsize


class Filled(NamedTuple):
    """The rows of a field for a batch, in a slot.

    The arrays of `columns` may have room for more rows; `rows` are those of each of the `samples`.
    `made` is memory for a plain array, if there is one. `is_left`: a device pads samples, or makes
    them dense. `is_checked`: the core has checked indices that have a limit. `first_samples`, int64
    (files + 1,), is the first sample of each file.
    """

    columns: Sequence[NDArray[Any]]
    rows: Rows
    samples: NDArray[np.int64]
    made: NDArray[Any] | None
    is_left: bool
    is_checked: bool
    first_samples: NDArray[np.int64]

    def files(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each sample's file."""
        return np.searchsorted(self.first_samples, samples, side="right") - 1


class EncodedBatch(NamedTuple):
    """The encoded samples of a batch, for `FieldDecoder.begin`.

    `encoded` are their bytes or, with steps, those of the batch's runs (`StepSpans`). `numbers` are
    the random numbers of `samples` (`plan/crops.py`), if needed. `empty` returns memory for decoded
    values, at most `most_nbytes`. `refuse` raises the error of a broken sample, or records it, in
    which case the batch is not delivered.
    """

    encoded: Ragged
    samples: NDArray[np.int64]
    numbers: NDArray[np.float64] | None
    empty: Callable[[int], NDArray[np.uint8]]
    most_nbytes: int
    refuse: Callable[[DamagedError], None]


class FieldDecoder(ABC):
    """Decodes the samples of one field. Safe to use from many threads.

    DatasetError if the dataset does not hold bytes. `what` is a sample, in messages; `layout` and
    `rows` are those of the column of bytes. `is_random`: random numbers are needed.
    """

    is_random = False

    def __init__(self, what: str, layout: DatasetLayout, rows: Rows) -> None:
        is_plain = layout.dtype.kind in "iuV" and layout.dtype.names is None  # V: opaque
        if not is_plain or layout.row_nbytes != 1:
            raise DatasetError(
                f'{layout.file}: dataset "{layout.path}": {what}s are bytes (uint8), found'
                f" {layout.dtype}{list(layout.row_shape) or ''}; give the dataset of encoded"
                f" {what}s"
            )
        self._what, self._layout, self._spans = what, layout, rows

    def having(self, error: DamagedError, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples of a batch that an error from `broken` affects."""
        if not isinstance(self._spans, StepSpans):
            return np.array([error.place], np.int64)
        runs = np.searchsorted(self._spans.runs(samples), error.place)
        return samples[self._spans.having(runs, samples)]

    def broken(self, sample: int, what: str) -> DamagedError:
        """Return the error for one of the dataset's encoded samples."""
        text = f"{self._where(sample)} {what}"
        file = file_and_row(self._layout, sample)[0]
        error = DamagedError(text, filename=file, dataset=self._layout.path)
        error.place = sample
        return error

    @abstractmethod
    def begin(self, batch: EncodedBatch) -> tuple[Any, list[DecodingWork]]:
        """Return the delivered values of a batch, still to be filled, and the work that does so.

        ReadError if a sample is broken, or the batch takes too much memory.
        """

    def _where(self, sample: int) -> str:
        layout = self._layout
        if layout.sequences is not None and layout.heaps:  # each sequence has a dataset of its own
            heap = [one for one in layout.heaps if one.first_sample <= sample][-1]
            element = sample - heap.first_sample
            return f"{heap.elements.where}: the {self._what} of element {element} (sample {sample})"
        file, row = file_and_row(layout, sample)
        among = f" (sample {row} of this file)" if row < sample else ""
        return f'{file}: dataset "{layout.path}": the {self._what} of sample {sample}{among}'


class FieldKind:
    """A plain field, and the base of all kinds. Immutable after a call of `join`; picklable.

    `of` is the class of its options; `found_as` is the kind of fact that turns a plain `Field` into
    this kind. `is_ragged`: samples may differ in their number of values. `is_encoded`: they are
    decoded. `is_mapped`: the host maps the values read to others. `needs_work`: more than views
    must be made. `further` names arrays that are delivered beside the field's own. `table_column`
    is the path of the table column whose codes these are, if any.
    """

    of: ClassVar[type[Field]] = Field
    found_as: ClassVar[str] = ""
    is_ragged: ClassVar[bool] = False
    is_encoded: ClassVar[bool] = False
    table_column = ""
    categories: Categories | None = None
    shape: SparseShape | None = None
    is_mapped = False
    needs_work = False
    places: Places | None = None  # where parts of rows begin
    further: tuple[str, ...] = ()

    def __init__(self, name: str, field: Field) -> None:
        self.name, self.field = name, field

    # --- what is read -----------------------------------------------------------------------------

    @property
    def columns(self) -> dict[str, Field]:
        """The datasets that rows are read from, by name; the first one has the field's name."""
        return {self.name: self.field}

    def facts(self) -> dict[str, Wanted]:
        """Return the facts needed of each file or its columns, beyond plain layouts, by name."""
        return {}

    def join(self, known: Known, config: ReaderConfig, reach: Reach) -> dict[str, DatasetLayout]:
        """Return the layouts of the columns across all files; keep the content of other facts.

        H5AsyncError if the files do not fit together.
        """
        join = join_layouts if self.field.per is None else join_values
        layout, self.places = parts_of_rows(self.field, join(known[self.name]), config.seed)
        return {self.name: layout if self.field.steps is None else shared(layout)}

    def is_same(self, other: FieldKind) -> bool:
        """Return whether both have the same categories and shape from `join`."""
        return are_same((self.categories, self.shape), (other.categories, other.shape))

    # --- how a slot is laid out -------------------------------------------------------------------

    def outline(self, transforms: Transforms, can_transform: CanTransform) -> Outline:
        """Return how the field is assembled, except for the numbers of its columns.

        ConfigError if a device cannot do its part.
        """
        is_varying = transforms[0].capacity is not None
        return Outline(self.name, is_varying=is_varying, is_encoded=self.is_encoded)

    def channel_axis(self, transform: RowTransform) -> int:
        """Return the channel dimension of a delivered row; `transform` is that of a row."""
        return transform.channel

    def decoded_nbytes(self, rows: int) -> int:
        """Return the bytes of `rows` decoded samples; 0 if not decoded, or of varying size."""
        return 0

    @property
    def as_decoded(self) -> FieldKind:
        """The same field without a transform, which a device applies to decoded samples."""
        return self

    def decoder(
        self, layout: DatasetLayout, rows: Rows, core: Core | None, limit_nbytes: int
    ) -> FieldDecoder | None:
        """Return the decoder of the samples; None if they are not encoded.

        `layout` and `rows` are those of the column; `limit_nbytes` is the maximum memory for
        decoding a sample.
        """
        return None

    # --- what is delivered ------------------------------------------------------------------------

    @property
    def is_plain(self) -> bool:
        """Whether the slot's array is delivered unchanged, with a row per sample."""
        return not (self.is_ragged or self.is_mapped)

    @property
    def is_view(self) -> bool:
        """Whether views of the slot are delivered, with values that the core has checked."""
        return not (self.needs_work or self.is_mapped)

    def views(
        self, columns: Sequence[NDArray[Any]], offsets: NDArray[np.int64] | None
    ) -> tuple[Any, ...] | None:
        """Return the parts from which the core makes the delivered values; None if it cannot.

        For a plain field: its array, whose first rows are delivered. For `SampleArrays`: the
        address of `offsets`, int64 (rows + 1,), which the core sets; the class, which is not
        called; and tuples of members' names and values: fixed ones, arrays of rows, and `offsets`.
        """
        return (columns[0],)

    def deliver(self, filled: Filled) -> Any:
        """Return the array, or the samples, of a batch; views of the slot's memory if possible.

        With `further` arrays: a tuple of it and these. DatasetError if the values read are invalid.
        """
        return filled.columns[0][: filled.samples.size]

    def masks(self, rows: Rows) -> dict[str, Mask]:
        """Return the functions that make the masks of a batch, by name."""
        steps, name = steps_of(rows), self.field.pad_mask
        return {} if steps is None or name is None else {name: steps.are_there}

    def counted(self, rows: SpanRows) -> NDArray[Any] | int | None:
        """Return the number of values of each sample for `batch_values`; None if none count."""
        return None


class RaggedKind(FieldKind):
    """Samples of any length: elements of variable length, or flat values with offsets."""

    of: ClassVar[type[Field]] = RaggedField
    found_as = HEAP
    is_ragged = True
    field: RaggedField

    def __init__(self, name: str, field: Field) -> None:
        super().__init__(name, field)
        self.needs_work = self.is_encoded or self.field.pad_to is not None
        self._packing: Packing | None = None

    @property
    def _length(self) -> int | None:
        return self.field.pad_to if self.field.pack is None else self.field.pack

    def facts(self) -> dict[str, Wanted]:
        """Return the elements of variable length, or the values and their offsets."""
        offsets, kind = self.field.offsets, HEAP
        if offsets is not None:
            kind = f"{self.field.offsets_kind} {Wanted.at(offsets).path}"
        return {self.name: Wanted.at(self.field.path, kind=kind)}

    def join(self, known: Known, config: ReaderConfig, reach: Reach) -> dict[str, DatasetLayout]:
        """Return the layout across all files; DatasetError if groups are to be packed."""
        found = super().join(known, config, reach)
        if self.field.pack is None:
            return found
        layout = found[self.name]
        if layout.sequences is not None:
            raise DatasetError(
                f'{layout.file}: dataset "{layout.path}" ({self.name}): pack joins the samples of'
                " files, not of groups; leave out groups"
            )
        files = layout.file_samples or ((layout.file, layout.sample_count),)
        reach.room.take(
            layout.starts().nbytes, f"{layout.file}: the offsets of its documents", files_of(layout)
        )
        counts = [count for _, count in files]
        packing = self._packing = Packing(layout.starts(), self.field.pack, counts)
        of_files = zip((file for file, _ in files), packing.counts.tolist(), strict=True)
        several = tuple(of_files) if layout.file_samples else ()
        return {self.name: layout.changed(spans=packing.windows, file_samples=several)}

    def outline(self, transforms: Transforms, can_transform: CanTransform) -> Outline:
        """Return how the field is assembled."""
        outline = super().outline(transforms, can_transform)
        # (Packed windows lie in the slot as they are delivered, except the last one of a file.)
        if self._length is None or (self._packing is not None and can_transform is None):
            return outline
        made = (self._length, *transforms[0].row), transforms[0].dtype
        return outline._replace(made=made, is_left=can_transform is not None)

    def views(
        self, columns: Sequence[NDArray[Any]], offsets: NDArray[np.int64] | None
    ) -> tuple[Any, ...] | None:
        """Return the parts of `Ragged` for the core; None for an array of padded samples."""
        if self._length is not None or offsets is None:
            return None
        return address(offsets), Ragged, (), ("values", columns[0]), ("offsets", offsets)

    def deliver(self, filled: Filled) -> Any:
        """Return `Ragged`, or an array of padded samples."""
        assert isinstance(filled.rows, SpanRows)
        offsets = filled.rows.offsets(filled.samples)
        values = filled.columns[0][: offsets[-1]]
        if self._length is None or filled.is_left:
            return Ragged(values, offsets)
        size = filled.samples.size
        shape = size, self._length, *values.shape[1:]
        if self._packing is not None and len(values) == size * self._length:
            return values.reshape(shape)
        found = np.empty(shape, values.dtype) if filled.made is None else filled.made[:size]
        found[...] = np.zeros((), values.dtype)
        put_padded(values, offsets, found)
        return found

    def masks(self, rows: Rows) -> dict[str, Mask]:
        """Return the function for the mask of padded samples, or those for packed documents."""
        if self._packing is not None:
            name, packing = self.name, self._packing
            return {f"{name}_documents": packing.documents, f"{name}_positions": packing.positions}
        if self.field.pad_to is None or not isinstance(rows, SpanRows):
            return super().masks(rows)
        return {f"{self.name}_mask": partial(rows.are_there, self.field.pad_to)}

    def counted(self, rows: SpanRows) -> NDArray[Any] | int | None:
        """Return the lengths of samples, or their padded length; None if they are decoded."""
        if self.is_encoded:  # the number of bytes says little about the decoded values
            return None
        return rows.all_lengths() if self._length is None else self._length


class EncodedKind(RaggedKind):
    """Encoded samples, such as JPEG; the base of the kinds that decode them."""

    found_as = ""
    is_encoded = True

    @property
    def columns(self) -> dict[str, Field]:
        """The bytes, without options for the decoded values."""
        field = self.field
        kind = field.offsets_kind
        return {self.name: RaggedField(field.path, offsets=field.offsets, offsets_kind=kind)}


def are_same(one: Any, other: Any) -> bool:
    """Return whether values are equal; they may be arrays, or tuples with arrays."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    return type(one) is type(other) and bool(one == other)


def field_of(column: str) -> str:
    """Return the name of the field that a column is of."""
    return column.removesuffix(INDICES)


def steps_of(rows: Rows) -> StepRows | None:
    """Return the steps of the samples of a column; None if it has none."""
    if isinstance(rows, StepSpans):
        return rows.steps
    return rows if isinstance(rows, StepRows) else None


def file_and_row(layout: DatasetLayout, sample: int) -> tuple[str, int]:
    """Return the file that holds a sample, and the number of the sample there."""
    for file, count in layout.file_samples:
        if sample < count:
            return file, sample
        sample -= count
    return layout.file, sample


def layout_of_values(file: str, stamp: FileStamp, path: str, values: NDArray[Any]) -> DatasetLayout:
    """Return the layout of values that are kept in memory, one for each sample."""
    return DatasetLayout(
        file=file,
        stamp=stamp,
        path=path,
        shape=values.shape,
        dtype=values.dtype,
        sample_axis=0,
        storage="compact",
        fallback_reason=None,
        fill=np.zeros((), values.dtype),
        values=np.ascontiguousarray(values).view(np.uint8) if values.dtype.kind == "b" else values,
    )


def join_values(layouts: Sequence[DatasetLayout]) -> DatasetLayout:
    """Return one layout of concatenated datasets; one array if all are in memory.

    Strings get the length of the longest. DatasetError names two files whose rows differ otherwise.
    """
    arrays = [y.values.view(y.dtype) for y in layouts if y.values is not None]
    kinds = {(y.row_shape, y.dtype.kind == "S" or y.dtype, y.sample_axis) for y in layouts}
    if len(layouts) == 1 or len(arrays) < len(layouts) or len(kinds) > 1:
        return join_layouts(layouts)
    first = layouts[0]
    found = layout_of_values(first.file, first.stamp, first.path, np.concatenate(arrays))
    return found.changed(cf=joined_cf(layouts))


def texts_of(fact: DatasetLayout) -> tuple[Any, ...]:
    """Return the names, or the numbers, of a fact."""
    values = values_of(fact)
    if fact.spans is None:
        return tuple(values.tolist())
    pairs = itertools.pairwise(fact.spans.tolist())
    data = values.tobytes()
    return tuple(data[a:b].decode("utf-8", "surrogateescape") for a, b in pairs)
