"""Defines filters as the compiled core takes them, with one of this package's own.

That filter converts stored elements to NumPy's. It stands first in a pipeline, so that it is undone
last, and gives the results of HDF5's conversion. Its parameters are the bytes of an element in
NumPy and as stored, then `Step`s. The core alone undoes it.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import chain
from typing import NamedTuple

CONVERSION = -1  # HDF5's numbers of filters are not negative, so no file can name it
MOST_STEPS = 1024
_STEP_VALUES = 13
_LARGEST = 1 << 31
_MANTISSAS = {2: 10, 4: 23, 8: 52}  # bits, by the bytes of a float of NumPy's

# A filter's client data, as HDF5 calls them: its numbers in the pipeline message.
Parameters = tuple[int, ...]


class CoreKind(IntEnum):
    """Numbers of the filters that the compiled core undoes: ``enum Kind`` of core/src/common.h."""

    DEFLATE = 1
    SHUFFLE = 2
    FLETCHER32 = 3
    LZF = 4
    ZSTD = 5
    LZ4 = 6
    BLOSC = 7
    BITSHUFFLE = 8
    BITSHUFFLE_LZ4 = 9
    BITSHUFFLE_ZSTD = 10
    NOTHING = 11
    PLUGIN = 12
    SZIP = 13
    NBIT = 14
    SCALEOFFSET = 15
    BZIP2 = 16
    STORED = 17


class CoreFilter(NamedTuple):
    """A filter as the compiled core takes it."""

    kind: CoreKind
    element_nbytes: int = 0  # for filters that shuffle; the traits of a plugin; else 0
    block: int = 0  # elements of a block, for bitshuffle; 0 means the default
    library: str | None = None  # the codec library that the core calls; see core/libraries.py
    values: Parameters = ()  # the client data, if the core reads them
    function: int = 0  # for a plugin, the address of the function that undoes the filter


# For a filter that does not change elements of some types.
NOTHING = CoreFilter(CoreKind.NOTHING)


class StepKind(IntEnum):
    """What a step does: ``enum StepKind`` of core/src/stored.c."""

    COPY = 0
    ENDED = 1  # a string terminated by NUL
    PADDED = 2  # a string padded with spaces
    BITS = 3  # an integer among other bits
    FLOAT = 4  # a float of a format that NumPy lacks


class Step(NamedTuple):
    """Makes some values of an element."""

    kind: StepKind
    start: int  # where values begin in the stored element,
    to: int  # and in NumPy's
    stored_nbytes: int  # of one value as stored,
    nbytes: int  # and in NumPy
    repeats: int = 1  # adjacent values
    is_big: bool = False  # both are big-endian
    # For bits: their offset and number, and whether they have a sign. For a float: the bit of the
    # sign, the first bit and the number of bits of exponent and mantissa, and the exponent's bias.
    given: tuple[int, ...] = ()

    def moved(self, start: int, to: int) -> Step:
        """Return the same step for values that lie further on by `start` and `to` bytes."""
        return self._replace(start=self.start + start, to=self.to + to)

    @property
    def is_valid(self) -> bool:
        """Whether the core can do it."""
        if self.kind <= StepKind.PADDED:
            return 0 < self.nbytes == self.stored_nbytes
        if not (0 < self.stored_nbytes <= 8 and self.nbytes in (1, 2, 4, 8)):
            return False
        bits = 8 * self.stored_nbytes
        if self.kind == StepKind.BITS:
            offset, precision, _ = self.given[:3]
            return 0 < precision <= 8 * self.nbytes and offset + precision <= bits
        sign, power, power_bits, mantissa, mantissa_bits, bias = self.given
        room, powers = _MANTISSAS.get(self.nbytes, 0), 8 * self.nbytes - 1
        return (
            max(sign + 1, power + power_bits, mantissa + mantissa_bits) <= bits
            and 0 < mantissa_bits <= room
            and 0 < power_bits <= powers - room
            and (1 << power_bits) - 2 - bias <= (1 << (powers - room - 1)) - 1
            and bias + mantissa_bits <= (1 << (powers - room - 1)) - 1 + room
        )


def parameters_of(nbytes: int, stored_nbytes: int, steps: list[Step]) -> Parameters | None:
    """Return the parameters of the filter, or None if the core cannot undo it."""
    flat = (
        (*step[:-1], *step.given, *(0,) * (_STEP_VALUES - len(step) + 1 - len(step.given)))
        for step in steps
    )
    found = tuple(map(int, (nbytes, stored_nbytes, *chain.from_iterable(flat))))
    return found if _are_valid(found) else None


def stored_filter(parameters: Parameters) -> CoreFilter | None:
    """Return the filter as the core takes it; None if the parameters are invalid."""
    return CoreFilter(CoreKind.STORED, values=parameters) if _are_valid(parameters) else None


def _are_valid(parameters: Parameters) -> bool:
    nbytes, stored_nbytes, *rest = (*parameters, 0, 0)[: max(2, len(parameters))]
    is_sized = 0 < stored_nbytes <= nbytes < _LARGEST  # so no chunk grows as it is stored
    if not is_sized or len(rest) % _STEP_VALUES or len(rest) > MOST_STEPS * _STEP_VALUES:
        return False
    for at in range(0, len(rest), _STEP_VALUES):
        kind, *numbers = rest[at : at + _STEP_VALUES]
        if kind not in set(StepKind) or not all(0 <= n < _LARGEST for n in numbers):
            return False
        start, to, one, each, count, is_big, *given = numbers
        step = Step(StepKind(kind), start, to, one, each, count, bool(is_big), tuple(given))
        is_within = (
            step.start + step.repeats * step.stored_nbytes <= stored_nbytes
            and step.to + step.repeats * step.nbytes <= nbytes
        )
        if not (is_within and step.is_valid):
            return False
    return True
