"""Defines the common base of `Ragged`, `Images` and `Csr`: samples made of several arrays.

Code that moves batches (uploads, slots in shared memory, PyTorch) knows only this: a field of a
batch is one array, or `SampleArrays`. Further classes of samples derive from it.
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
        The number of leading arrays that lie where the values lie; the others stay in host memory.
    """

    __slots__ = ()

    kind: ClassVar[str]
    num_on_device: ClassVar[int] = 2

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__
        KINDS[cls.kind] = cls

    def __len__(self) -> int:
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
        """The shape of a sample; None for a dimension that varies between samples."""
        raise NotImplementedError

    @classmethod
    def of_arrays(cls, arrays: Sequence[Any], sample_shape: Sequence[int | None]) -> Self:
        """Return samples made of `arrays`; parameters are the properties of these names."""
        raise NotImplementedError

    def to_tensor(self) -> Any:
        """Return a PyTorch tensor that shares the memory.

        Raises
        ------
        NoTensorError
            If there is none for such samples; the message gives the remedy.
        """
        raise NotImplementedError

    def misfit(self) -> str | None:
        """Return why the arrays do not fit together, or None; libraries rely on this unchecked."""
        raise NotImplementedError


def memory_of(field: Any) -> tuple[Any, ...]:
    """Return the arrays of a field of a batch that lie with its values."""
    if isinstance(field, SampleArrays):
        return field.arrays[: field.num_on_device]
    return (field,)


def with_memory(field: Any, arrays: Sequence[Any]) -> Any:
    """Return the same field with other arrays in place of those of `memory_of`."""
    if isinstance(field, SampleArrays):
        others = field.arrays[field.num_on_device :]
        return field.of_arrays((*arrays, *others), field.sample_shape)
    return arrays[0]
