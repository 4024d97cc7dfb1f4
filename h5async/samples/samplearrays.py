"""Defines what `Ragged`, `Images` and `Csr` have in common: they consist of several arrays.

Whatever moves batches (uploads, slots in shared memory, PyTorch) knows only this: a field of a
batch is one array, or `SampleArrays`. Another class of samples derives from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

KINDS: dict[str, type[SampleArrays]] = {}  # by `SampleArrays.kind`


class NoTensorError(TypeError):
    """Samples for which PyTorch has no tensor."""


class SampleArrays:
    """Samples that several arrays describe together.

    Attributes
    ----------
    kind
        The name of the class in messages between processes.
    num_on_device
        How many of its arrays, the first ones, lie where the values lie; the others stay in host
        memory.
    """

    __slots__ = ()

    kind: ClassVar[str]
    num_on_device: ClassVar[int] = 2

    def __init_subclass__(cls) -> None:
        """Register the class by its name."""
        cls.kind = cls.__name__
        KINDS[cls.kind] = cls

    def __len__(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays: the values first."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        raise NotImplementedError

    @property
    def sample_shape(self) -> tuple[int | None, ...]:
        """The shape of a sample; None for a dimension that differs from sample to sample."""
        raise NotImplementedError

    @classmethod
    def of_arrays(cls, arrays: Sequence[Any], sample_shape: Sequence[int | None]) -> Self:
        """Return samples over `arrays`, as the properties of these names have them."""
        raise NotImplementedError

    def to_tensor(self) -> Any:
        """Return a PyTorch tensor, which shares the memory.

        Raises
        ------
        NoTensorError
            If there is none for such samples; the message says what to do.
        """
        raise NotImplementedError

    def misfit(self) -> str | None:
        """Return why the arrays do not fit together, or None: what libraries rely on unchecked."""
        raise NotImplementedError


def memory_of(field: Any) -> tuple[Any, ...]:
    """Return the arrays of a field of a batch that lie where its values lie."""
    if isinstance(field, SampleArrays):
        return field.arrays[: field.num_on_device]
    return (field,)


def with_memory(field: Any, arrays: Sequence[Any]) -> Any:
    """Return the same field over other arrays, as many as `memory_of` returns."""
    if isinstance(field, SampleArrays):
        others = field.arrays[field.num_on_device :]
        return field.of_arrays((*arrays, *others), field.sample_shape)
    return arrays[0]
