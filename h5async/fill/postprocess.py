"""Calls the user's function on the arrays of a batch, and checks its result."""

from __future__ import annotations

import functools
import hashlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ConfigError, PostprocessError, postprocess_error
from h5async.order.sampling import FillRequest
from h5async.samples.fieldkind import FieldKind, Mask, Rows
from h5async.samples.samplearrays import SampleArrays
from h5async.spelling import named
from h5async.system.interruptions import suppressing

_FURTHER = ("rng", "index", "epoch", "number")


def load_function(function: Callable[..., Any] | str | None) -> Callable[..., Any] | None:
    """Import a ``"module:function"``; return anything else as it is.

    `ConfigError` is raised if there is no such module or function.
    """
    if not isinstance(function, str):
        return function
    try:
        found = pkgutil.resolve_name(function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{named('postprocess')}: cannot import {function!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{named('postprocess')}: {function!r} is not callable")
    return cast("Callable[..., Any]", found)


def masks_of(
    kinds: Mapping[str, FieldKind], columns: Iterable[str], several: Sequence[Rows]
) -> dict[str, Mask]:
    """Return, by the mask's name, a function from sample numbers to each mask of a batch."""
    rows = dict(zip(columns, several, strict=True))
    found: dict[str, Mask] = {}
    for name, kind in kinds.items():
        found |= kind.masks(rows[name])
    return found


class Postprocess:
    """A user's function to call for batches. As thread-safe as the function.

    It gets the arrays in field order or, if its parameters have the `names` of all fields, by name.
    Of ``rng``, ``index``, ``epoch``, ``number`` and `masks`, it also gets those that are among its
    further parameters, by name. `masks` are made of sample numbers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        names: Sequence[str],
        seed: int,
        masks: Mapping[str, Mask] = MappingProxyType({}),
    ) -> None:
        self._function = function
        self._masks = masks
        self._names = names
        self._seed = seed
        parameters: list[inspect.Parameter] = []
        with suppressing(ValueError, TypeError):  # a function in C may have no signature
            parameters = list(inspect.signature(function).parameters.values())
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._by_name = bool(names) and set(names) <= set(named)
        further = [
            p.name
            for at, p in enumerate(parameters)
            if p.kind is p.KEYWORD_ONLY
            or (p.kind is p.POSITIONAL_OR_KEYWORD and (self._by_name or at >= len(names)))
        ]
        bound = function.keywords if isinstance(function, functools.partial) else ()
        taken = {*bound, *(names if self._by_name else ())}
        known = *_FURTHER, *masks
        self._wanted = [name for name in known if name in further and name not in taken]

    def __call__(
        self,
        arrays: tuple[NDArray[Any], ...],
        request: FillRequest,
        index: NDArray[np.int64],
        where: str,
    ) -> tuple[Any, ...]:
        """Return the result of the function for a batch; `where` begins messages.

        `PostprocessError` is raised if the function raises, or returns another number of arrays.
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
        found = arrays if result is None else _arrays_of(result, len(arrays), where)
        for array in found:  # libraries rely on this
            misfit = array.misfit() if isinstance(array, SampleArrays) else None
            if misfit is not None:
                raise PostprocessError(f"{where} made {misfit}")
        return found

    def _value(self, name: str, request: FillRequest, index: NDArray[np.int64]) -> Any:
        if name in self._masks:
            return self._masks[name](index)
        if name == "index":
            return index.copy()  # the function may change it
        return self._rng(request, index) if name == "rng" else getattr(request, name)

    def _rng(self, request: FillRequest, index: NDArray[np.int64]) -> np.random.Generator:
        """Return random numbers that depend only on the seed, the epoch, the batch and the rank.

        For a batch of no epoch, they depend on its samples instead.
        """
        which = [self._seed, request.epoch, request.number, *request.order[:1]]
        digest = hashlib.blake2b(f"h5async postprocess {which}".encode(), digest_size=32)
        if request.number < 0:
            digest.update(index.astype("<i8").tobytes())
        return np.random.default_rng(np.frombuffer(digest.digest(), "<u4"))


def _arrays_of(result: Any, count: int, where: str) -> tuple[Any, ...]:
    """Return what a function has returned as so many arrays; `PostprocessError` otherwise."""
    if count == 1 and not isinstance(result, tuple | list):
        result = (result,)
    if not isinstance(result, tuple | list) or len(result) != count:
        found = len(result) if isinstance(result, tuple | list) else type(result).__name__
        raise PostprocessError(
            f"{where} returned {found}; it must return {count} arrays, or None when it"
            " worked in place"
        )
    try:
        made = tuple(a if isinstance(a, SampleArrays) else np.asarray(a) for a in result)
    except Exception as error:  # rows of unequal lengths, say
        raise postprocess_error(f"{where} returned no arrays: {error}", error) from error
    for given, array in zip(result, made, strict=True):
        if isinstance(array, np.ndarray) and array.dtype == object and not array.ndim:
            raise PostprocessError(
                f"{where} returned {type(given).__name__}, which is no array; return NumPy arrays,"
                " Ragged, or Csr(m.data, m.indices, m.indptr, m.shape) of a SciPy matrix m"
            )
    if len({len(array) for array in made if getattr(array, "ndim", 1)}) > 1:
        shapes = ", ".join(str(getattr(array, "shape", (len(array),))) for array in made)
        raise PostprocessError(
            f"{where} returned arrays of unequal numbers of rows, of shapes {shapes}; each row is"
            " a sample, so all arrays must have the same number of rows"
        )
    return made
