"""Finishes batches whose rows are read: decodes samples, and calls the user's function.

Encoded samples, such as images, enter as `Ragged` bytes; decoded arrays leave. All threads decode
the samples of a batch in parallel, to memory of the slot, which is allocated once if its size is
known, and otherwise grows to fit the largest batch. The user's function then gets the arrays of all
fields, and its result is checked.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import pkgutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from h5async.config.field import check_names
from h5async.errors import ConfigError, DamagedError, PostprocessError, postprocess_error
from h5async.fill.reading import BatchReader
from h5async.io.shared import Growing, plain_memory
from h5async.opening.dataset import OpenedDataset, Samplings
from h5async.order.sampling import FillRequest
from h5async.plan.crops import random_numbers
from h5async.plan.records import Int64s
from h5async.samples.assembly import names_of
from h5async.samples.fieldkind import (
    DecodingWork,
    EncodedBatch,
    FieldDecoder,
    FieldKind,
    Mask,
    OfSamples,
    Rows,
)
from h5async.samples.samplearrays import SampleArrays
from h5async.spelling import named
from h5async.system.interruptions import suppressing

Refuse = Callable[[DamagedError], None]  # `EncodedBatch.refuse`


class BatchDecoder:
    """Decodes the encoded fields of batches. Safe to use from many threads.

    Up to `threads` threads, in all processes, decode at the same time. `limit_nbytes` limits the
    decoded samples in all slots, and the additional memory that decoding takes. A device transforms
    the fields `left`: their samples are only decoded here.

    Raises the same errors as `FieldKind.decoder`.
    """

    def __init__(
        self,
        opened: OpenedDataset,
        reader: BatchReader,
        threads: int,
        limit_nbytes: int,
        left: Collection[str],
    ) -> None:
        self._seed, slots, self._reader = opened.config.seed, reader.slots, reader
        self._of_batch = limit_nbytes // max(1, len(slots.memory))
        spans = dict(zip(opened.layouts, reader.samplings.rows, strict=True))
        of_slots = {
            name: kind.as_decoded if name in left else kind for name, kind in opened.kinds.items()
        }

        def decoders(kinds: Mapping[str, FieldKind]) -> dict[int, FieldDecoder]:
            of_sample = limit_nbytes // max(1, threads)
            found = {
                number: kind.decoder(opened.layouts[name], spans[name], reader.core, of_sample)
                for number, (name, kind) in enumerate(kinds.items())
            }
            return {number: one for number, one in found.items() if one is not None}

        self.fields = decoders(opened.kinds)
        self._of_slots = decoders(of_slots) if left else self.fields
        sizes = [kind.decoded_nbytes(slots.rows) for kind in of_slots.values()]
        self._memory = [
            {
                number: Growing(
                    slots.new_memory, sizes[number], slot.made[number] if slot.made else None
                )
                for number in self._of_slots
            }
            for slot in slots.memory
        ]
        self._lock = threading.Lock()
        self.broken_images = 0  # replaced so far

    def note_broken(self) -> None:
        """Count a sample that was replaced."""
        with self._lock:
            self.broken_images += 1

    def batch(
        self,
        arrays: tuple[Any, ...],
        index: Int64s,
        epoch: int,
        slot: int | None,
        damage: list[DamagedError] | None,
    ) -> DecodedBatch:
        """Prepare the decoding of a batch, which `DecodedBatch.work` does.

        `arrays` are those of all fields; random numbers depend on `epoch` and `index`. Without a
        `slot`, memory is new, and no transform is left to a device. Errors for broken samples are
        added to `damage`, if given; otherwise `ReadError` is raised. It is also raised if samples
        take too much memory.
        """
        found, most = list(arrays), self._of_batch
        todo: list[tuple[DecodingWork, Refuse]] = []
        numbers = None
        if any(one.is_random for one in self.fields.values()):
            numbers = random_numbers(self._seed, epoch, index)
        for number, decoder in (self.fields if slot is None else self._of_slots).items():
            memory = Growing(plain_memory) if slot is None else self._memory[slot][number]
            refuse = functools.partial(self._refuse, decoder, index, damage)
            encoded = EncodedBatch(arrays[number], index, numbers, memory.of, most, refuse)
            found[number], works = decoder.begin(encoded)
            todo += [(work, refuse) for work in works]
        return DecodedBatch(tuple(found), todo, self.note_broken)

    def _refuse(
        self,
        field: FieldDecoder,
        index: Int64s,
        damage: list[DamagedError] | None,
        error: DamagedError,
    ) -> None:
        self._reader.damage.name(error, field.having(error, index))
        error.place = None
        if damage is None:
            raise error
        damage.append(error)

    def close(self) -> None:
        """Release the memory."""
        self._memory = []


@dataclass(eq=False)
class DecodedBatch:
    """The encoded samples of one batch, which `work` decodes to the delivered `arrays`.

    Each of `works` decodes some samples, and has a function that takes their errors.
    """

    arrays: tuple[Any, ...]
    works: list[tuple[DecodingWork, Refuse]]
    note_broken: Callable[[], None]
    # Threads take works one by one, because decoding times vary widely.
    todo: Iterator[int] = field(default_factory=itertools.count)

    def work(self, must_end: Callable[[], bool], end: int) -> None:
        """Decode samples until `end` works have begun, or `must_end()`; in any number of threads.

        `ReadError` is raised for a broken sample unless `damage` takes it.
        """
        while not must_end():
            number = next(self.todo)
            if number >= len(self.works):
                return
            self._do(*self.works[number])
            if number + 1 >= end:
                return

    def _do(self, work: DecodingWork, refuse: Refuse) -> None:
        try:
            left = work()
        except DamagedError as error:
            refuse(error)
            return
        if left is False:
            self.note_broken()
        elif left is not True:
            for one in left:
                self._do(one, refuse)


def _function_of(option: Callable[..., Any] | str | None) -> Callable[..., Any]:
    try:
        found: Any = pkgutil.resolve_name(option) if isinstance(option, str) else option
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{named('postprocess')}: cannot import {option!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{named('postprocess')}: {option!r} is not callable")
    return cast("Callable[..., Any]", found)


def masks_of(
    kinds: Mapping[str, FieldKind], columns: Iterable[str], several: Sequence[Rows]
) -> dict[str, OfSamples]:
    """Return, by name, functions from sample numbers and an epoch to a batch's masks.

    Also to the arrays of where cropped parts of rows begin (``<field>_crop``).
    """
    rows = dict(zip(columns, several, strict=True))
    found: dict[str, OfSamples] = {}
    for name, kind in kinds.items():
        found |= {own: partial(_mask, mask) for own, mask in kind.masks(rows[name]).items()}
        if kind.places is not None and kind.places.num_cut:
            found[f"{name}_crop"] = kind.places.begins
    return found


def _mask(mask: Mask, index: Int64s, _: int) -> NDArray[Any]:
    return mask(index)


class Postprocess:
    """A user's function to call for batches. As thread-safe as the function.

    It gets the arrays in field order, followed by further ones, such as totals; or all of them by
    name, if it has parameters of those names. If its further parameters include any of ``rng``,
    ``index``, ``epoch``, ``number``, ``sequence``, ``step``, ``static`` or a mask, it gets these by
    name, too; and ``crop``, where crops begin, if all cropped fields are cropped alike.

    Raises `ConfigError` if the function cannot be imported or called.
    """

    def __init__(self, opened: OpenedDataset, samplings: Samplings) -> None:
        config = opened.config
        function = self._function = _function_of(config.postprocess)
        self._names = names_of(opened.kinds)
        self._returned, self._seed = config.postprocess_fields, config.seed
        self._static = opened.static
        sequences = samplings.sequences
        self._of_index: dict[str, Callable[[Int64s], NDArray[Any]]] = {
            "index": np.copy,  # the function may change it
            "sequence": np.zeros_like if sequences is None else sequences.numbers,
            "step": np.copy if sequences is None else sequences.steps,
        }
        self._masks = masks_of(opened.kinds, opened.layouts, samplings.rows)
        several = [kind.places for kind in opened.kinds.values() if kind.places is not None]
        crops = {(one.crop.group, one.key): one.begins for one in several if one.num_cut}
        if len(crops) == 1:
            self._masks.setdefault("crop", *crops.values())
        parameters: list[inspect.Parameter] = []
        with suppressing(ValueError, TypeError):  # a function in C may have no signature
            parameters = list(inspect.signature(function).parameters.values())
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._by_name = set(self._names) <= set(named)
        further = [
            p.name
            for at, p in enumerate(parameters)
            if p.kind is p.KEYWORD_ONLY
            or (p.kind is p.POSITIONAL_OR_KEYWORD and (self._by_name or at >= len(self._names)))
        ]
        bound = function.keywords if isinstance(function, functools.partial) else ()
        taken = {*bound, *(self._names if self._by_name else ())}
        known = "rng", "epoch", "number", "static", *self._of_index, *self._masks
        self._wanted = [name for name in known if name in further and name not in taken]

    def __call__(
        self, arrays: tuple[Any, ...], request: FillRequest, index: Int64s, where: str
    ) -> dict[str, Any]:
        """Return the function's result for a batch, by name; `where` begins error messages.

        `PostprocessError` is raised if the function raises, or its result is not valid.
        """
        try:
            further = {name: self._value(name, request, index) for name in self._wanted}
            if self._by_name:
                result = self._function(**dict(zip(self._names, arrays, strict=True)), **further)
            else:
                result = self._function(*arrays, **further)
        except Exception as error:
            message = f"{where} raised {type(error).__name__}: {error}"
            raise postprocess_error(message, error) from error
        if result is None and self._returned is None:
            found = dict(zip(self._names, arrays, strict=True))
        else:
            found = _by_name(result, self._names, self._returned, where)
        for array in found.values():  # libraries rely on consistent arrays
            misfit = array.misfit() if isinstance(array, SampleArrays) else None
            if misfit is not None:
                raise PostprocessError(f"{where} made {misfit}")
        return found

    def _value(self, name: str, request: FillRequest, index: Int64s) -> Any:
        if name in self._of_index:
            return self._of_index[name](index)
        if name in self._masks:
            return self._masks[name](index, request.epoch)
        if name == "static":
            return MappingProxyType(self._static)
        return self._rng(request, index) if name == "rng" else getattr(request, name)

    def _rng(self, request: FillRequest, index: Int64s) -> np.random.Generator:
        """Return a generator that depends only on the seed, the epoch, the batch and the rank.

        For a batch outside of epochs, it depends on the samples as well.
        """
        which = [self._seed, request.epoch, request.number, *request.order[:1]]
        digest = hashlib.blake2b(f"h5async postprocess {which}".encode(), digest_size=32)
        if request.number < 0:
            digest.update(index.astype("<i8").tobytes())
        return np.random.default_rng(np.frombuffer(digest.digest(), "<u4"))


def _by_name(
    result: Any, names: Sequence[str], returned: Sequence[str] | None, where: str
) -> dict[str, Any]:
    """Return the arrays in a function's result, by name; `PostprocessError` if it is not valid."""
    if isinstance(result, Mapping):
        if returned is not None and set(result) != set(returned):
            raise PostprocessError(
                f"{where} returned a mapping of {', '.join(map(str, result)) or 'nothing'}; it must"
                f" return {', '.join(returned)}, as {named('postprocess_fields')} says"
            )
        names = tuple(result if returned is None else returned)
        if not names:
            raise PostprocessError(f"{where} returned an empty mapping; it must name an array")
        try:
            check_names(names)
        except (TypeError, ValueError) as error:
            raise PostprocessError(f"{where} returned a mapping: {error}") from error
        return dict(zip(names, _arrays_of([result[name] for name in names], where), strict=True))
    names = names if returned is None else returned
    if len(names) == 1 and not isinstance(result, tuple | list):
        result = (result,)
    if not isinstance(result, tuple | list) or len(result) != len(names):
        found = len(result) if isinstance(result, tuple | list) else type(result).__name__
        in_place = ", or None if it works in place" if returned is None else ""
        raise PostprocessError(
            f"{where} returned {found}; it must return {len(names)} arrays{in_place}, or a mapping"
            " of names to arrays"
        )
    return dict(zip(names, _arrays_of(result, where), strict=True))


def _arrays_of(result: Sequence[Any], where: str) -> list[Any]:
    try:
        made = [a if isinstance(a, SampleArrays) else np.asarray(a) for a in result]
    except Exception as error:  # rows of unequal lengths, say
        raise postprocess_error(f"{where} returned no arrays: {error}", error) from error
    for given, array in zip(result, made, strict=True):
        if isinstance(array, np.ndarray) and array.dtype == object and not array.ndim:
            raise PostprocessError(
                f"{where} returned {type(given).__name__}, which is not an array; return NumPy"
                " arrays, Ragged, or Csr(m.data, m.indices, m.indptr, m.shape) of a SciPy matrix m"
            )
    if len({len(array) for array in made if getattr(array, "ndim", 1)}) > 1:
        shapes = ", ".join(str(getattr(array, "shape", (len(array),))) for array in made)
        raise PostprocessError(
            f"{where} returned arrays of unequal numbers of rows, of shapes {shapes}; each row is"
            " a sample, so all arrays must have the same number of rows"
        )
    return made
