"""Calls the user's function on the arrays of a batch, and checks what it returns."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ConfigError, PostprocessError, postprocess_error


def load_function(function: Callable[..., Any] | str | None) -> Callable[..., Any] | None:
    """Import a ``"module:function"``; return anything else as it is.

    Raises
    ------
    ConfigError
        If there is no such module or function.
    """
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"postprocess: cannot import {function!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"postprocess: {function!r} is not callable")
    return cast("Callable[..., Any]", found)


def postprocessed(
    function: Callable[..., Any], arrays: tuple[NDArray[Any], ...], where: str
) -> tuple[NDArray[Any], ...]:
    """Return what a function makes of the arrays of a batch.

    Parameters
    ----------
    function
        Returns as many arrays, or None where it has worked in place.
    arrays
        The batch, in field order.
    where
        Names the file and the function's batch in messages.

    Raises
    ------
    PostprocessError
        If the function raises, or returns anything else.
    """
    try:
        result = function(*arrays)
    except Exception as error:
        raise postprocess_error(f"{where} raised {type(error).__name__}: {error}", error) from error
    if result is None:
        return arrays
    if len(arrays) == 1 and not isinstance(result, tuple | list):
        result = (result,)
    if not isinstance(result, tuple | list) or len(result) != len(arrays):
        found = len(result) if isinstance(result, tuple | list) else type(result).__name__
        raise PostprocessError(
            f"{where} returned {found}; it must return {len(arrays)} arrays, or None when it"
            " worked in place"
        )
    try:
        made = tuple(np.asarray(array) for array in result)
    except Exception as error:  # rows of unequal lengths, say
        raise postprocess_error(f"{where} returned no arrays: {error}", error) from error
    if len({len(array) for array in made if array.ndim}) > 1:
        shapes = ", ".join(str(array.shape) for array in made)
        raise PostprocessError(
            f"{where} returned arrays of unequal numbers of rows, of shapes {shapes}; each row is"
            " a sample, so all arrays must have the same number of rows"
        )
    return made
