"""Converts stored elements to NumPy's: a filter of this package's own.

It stands first in a pipeline, so that it is undone last, and gives the results of HDF5's
conversion. Its parameters are the bytes of an element in NumPy and as stored, then `Step`s. The
core alone undoes it.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import chain
from typing import NamedTuple

from h5async.codec.entry import CoreFilter, CoreKind, Parameters

NUMBER = -1  # HDF5's numbers are not negative, so no file can name it
_STEP_VALUES = 13
MOST_STEPS = 1024
_LARGEST = 1 << 31
_MANTISSAS = {2: 10, 4: 23, 8: 52}  # bits, by the bytes of a float of NumPy's


class StepKind(IntEnum):
    """What a step does: ``enum StepKind`` of core/src/stored.c."""

    COPY = 0
    ENDED = 1  # a string terminated by NUL
    PADDED = 2  # a string padded with spaces
    BITS = 3  # an integer among other bits
    FLOAT = 4  # a float of a format that NumPy lacks


class Step(NamedTuple):
    """Makes some values of an element.

    Attributes
    ----------
    kind
        What it does.
    start, to
        Where values begin in the stored element, and in NumPy's.
    stored_nbytes, nbytes
        Bytes of one value, as stored and in NumPy.
    repeats
        The number of adjacent values.
    is_big
        Whether both are big-endian.
    given
        For bits: their offset and number, and whether they have a sign. For a float: the bit of the
        sign, the first bit and the number of bits of exponent and mantissa, and the exponent's
        bias.
    """

    kind: StepKind
    start: int
    to: int
    stored_nbytes: int
    nbytes: int
    repeats: int = 1
    is_big: bool = False
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
