"""Kinds of fields whose samples are not arrays of one shape: ragged and sparse ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import PlainSerializer, PlainValidator, model_validator

from h5async.config.field import Field
from h5async.config.frozen import documented, option
from h5async.config.indices import Values, plain_selection
from h5async.config.values import Bool, Name, Natural


@documented
class RaggedField(Field):
    """Samples of differing lengths, delivered as `Ragged`.

    Either a dataset of a variable-length datatype (strings are such, too), or flat values of which
    another dataset says where each sample begins.

    Raises
    ------
    ConfigError
        If a value does not fit.
    """

    offsets: Name | None = option(
        None,
        "Path of the dataset that says where samples begin, if the values have no variable-length"
        " datatype.",
    )
    offsets_kind: Literal["offsets", "ends", "lengths"] = option(
        "offsets",
        "What that dataset holds. `offsets`: where each sample begins, and, as one number more,"
        " where the last one ends. `ends`: where each sample ends. `lengths`: how many values each"
        " sample has.",
    )
    pad_to: Natural | None = option(
        None,
        "Deliver an array (samples, pad_to, ...) in place of `Ragged`: shorter samples end with"
        " zeros, and of longer ones the first values are taken. The batch has `NAME_mask`, too:"
        " bool (samples, pad_to), whether it is a value of the sample.",
    )

    @model_validator(mode="after")
    def _check_ragged(self) -> RaggedField:
        _require_rows(self)
        if self.offsets is None and self.offsets_kind != "offsets":
            raise ValueError("offsets_kind needs offsets")
        return self


def _columns(value: object) -> object:
    if value is None or isinstance(value, Values):
        return value
    words = "must be the numbers of columns, a mask, or their names"
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(words) from error
    if array.ndim != 1 or array.dtype.kind not in "biuUTO" or isinstance(value, str):
        raise ValueError(words)
    if array.dtype.kind in "UTO":
        names = array.tolist()
        if not all(isinstance(name, str) for name in names):
            raise ValueError(words)
        return tuple(names)
    return Values(array)


def _plain_columns(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else plain_selection(value)


@documented
class SparseField(Field):
    """Rows of a sparse matrix in compressed form (CSR), delivered as `Csr`, or as dense rows.

    The path leads to the group of the matrix, as AnnData and 10x Genomics write it.

    Raises
    ------
    ConfigError
        If a value does not fit.
    """

    dense: Bool = option(
        False, "Deliver ordinary arrays (samples, columns), float32 where `dtype` says no other."
    )
    columns: Annotated[
        Any,
        PlainValidator(_columns),
        PlainSerializer(_plain_columns, when_used="json-unless-none"),
    ] = option(
        None,
        "Which columns: their numbers, a mask, or names, which are looked up in each file in"
        " `var/_index`. They come in this order.",
    )

    @model_validator(mode="after")
    def _check_sparse(self) -> SparseField:
        _require_rows(self)
        return self


def _require_rows(field: Field) -> None:
    """Refuse options of fields whose samples have one shape."""
    if field.steps is not None:
        raise ValueError("steps are of fields whose samples have one shape; leave them out")
    if field.num_dim != 0:
        raise ValueError(f"num_dim must be 0 for this kind of field, found {field.num_dim}")


KINDS: Mapping[str, type[Field]] = {"ragged": RaggedField, "sparse": SparseField}
