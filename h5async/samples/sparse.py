"""Defines `Csr`: sparse rows in the compressed form of HDF5 files, SciPy and PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from h5async.errors import ConfigError, DatasetError, needs_package
from h5async.samples.ragged import preview
from h5async.samples.samplearrays import (
    SampleArrays,
    dense_on_gpu,
    native,
    offsets_misfit,
    on_host,
)
from h5async.spelling import Bar, Cell, counted, size_text, table

_OF_CUPYX = "?fdFD"  # NumPy's one-letter codes


class Csr(SampleArrays):
    """Compressed sparse rows: only some values are stored, others are 0.

    Rows of a batch share its memory and live as long as it does; `copy` gives rows that last. They
    may be read from many threads.

    Parameters
    ----------
    data, indices, indptr, shape
        As the attributes.

    Attributes
    ----------
    data
        (total,): the stored values, row by row. A NumPy or CuPy array, like `indices` and `indptr`.
    indices
        int32 or int64 (total,): the column of each value.
    indptr
        int32 or int64 (rows + 1,): row i has the values ``data[indptr[i] : indptr[i + 1]]``; the
        first one is 0.
    shape
        The numbers of rows and columns.

    Raises
    ------
    ConfigError
        If the arrays do not fit together. Not checked: that `indptr` is non-decreasing, and that
        indices are columns.

    Examples
    --------
    >>> data, indices = np.array([1.0, 2.0, 3.0], "f4"), np.array([7, 99, 0])
    >>> rows = Csr(data, indices, np.array([0, 2, 3]), shape=(2, 100))
    >>> rows
    <Csr: 2 rows of 100 columns, 3 values of float32>
    >>> rows[0]
    (array([ 7, 99]), array([1., 2.], dtype=float32))
    """

    __slots__ = ("_columns", "data", "indices", "indptr")

    num_on_device = 3

    def __init__(self, data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> None:
        is_whole = indices.dtype.kind in "iu" and indptr.dtype.kind in "iu"
        if not is_whole or data.shape != indices.shape or indptr.shape != (shape[0] + 1,):
            raise ConfigError(
                f"{shape[0]} sparse rows are made of values, as many integer indices, and"
                f" {shape[0] + 1} integers indptr; found values {data.shape}, {indices.dtype}"
                f" indices {indices.shape} and {indptr.dtype} indptr {indptr.shape}"
            )
        self.data = data
        self.indices = indices
        self.indptr = indptr
        self._columns = int(shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return len(self), self._columns

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.indptr.shape[0]) - 1

    def __getitem__(self, key: Any) -> Any:
        """Return views: indices and values of one row, or a `Csr` for a slice.

        Raises
        ------
        IndexError
            If there is no such row.
        ConfigError
            If the slice has a step.
        """
        if isinstance(key, slice):
            begin, end = self._bounds_of(key, "sparse rows", ", or use to_scipy()")
            indptr = self.indptr[begin : end + 1]
            first, last = int(indptr[0]), int(indptr[-1])
            some, columns = slice(first, last), self.shape[1]
            return Csr(self.data[some], self.indices[some], indptr - first, (end - begin, columns))
        number = range(len(self))[key]
        here = slice(int(self.indptr[number]), int(self.indptr[number + 1]))
        return self.indices[here], self.data[here]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Iterate over the indices and values of the rows, as views."""
        return map(self.__getitem__, range(len(self)))

    def __repr__(self) -> str:
        total = counted(self.data.shape[0], "value")
        return f"<Csr: {self._size}, {total} of {self.dtype}>"

    def _repr_html_(self) -> str:
        """Show a small table in a notebook. Nothing is copied from a GPU."""
        stored = self.data.shape[0]
        filled = stored / max(1, self.shape[0] * self.shape[1])
        rows: list[list[Cell]] = [
            ["dtype", str(self.dtype)],
            ["stored values", Bar(filled, f"{stored:,}, {100 * filled:.3g} %")],
            ["size", size_text(self.nbytes)],
            ["first row", preview(self)],
        ]
        return table("Csr", rows, subtitle=self._size)

    @property
    def _size(self) -> str:
        return f"{counted(self.shape[0], 'row')} of {counted(self.shape[1], 'column')}"

    @property
    def arrays(self) -> tuple[Any, ...]:
        """`data`, `indices` and `indptr`."""
        return self.data, self.indices, self.indptr

    @property
    def sample_shape(self) -> tuple[int | None, ...]:
        """The number of columns."""
        return (self.shape[1],)

    @classmethod
    def of_arrays(cls, arrays: Sequence[Any], sample_shape: Sequence[int | None]) -> Self:
        """Return rows made of `arrays`, with `sample_shape` columns."""
        (columns,) = sample_shape
        assert columns is not None
        data, indices, indptr = arrays
        return cls(data, indices, indptr, (len(indptr) - 1, columns))

    def misfit(self) -> str | None:
        """Return why the arrays do not fit together, or None."""
        if self.indices.size:
            low, high = self.indices.min(), self.indices.max()
            if low < 0 or high >= self.shape[1]:
                return (
                    f"sparse rows with indices from {low} to {high}, and there are"
                    f" {self.shape[1]} columns"
                )
        return offsets_misfit("sparse rows", "indptr", self.indptr, len(self.data))

    def to_tensor(self) -> Any:
        """Return a sparse tensor, as `to_torch` does."""
        return self.to_torch()

    def to_scipy(self) -> Any:
        """Return a ``scipy.sparse.csr_matrix``, as AnnData has it; rows on a GPU are copied.

        It shares the values, and indices of int32 or int64; arrays in another byte order than this
        machine's are copied. The matrix is not checked, which would take longer than making it.

        Raises
        ------
        MissingPackageError
            If SciPy is not installed.
        """
        with needs_package("scipy", "sparse matrices of SciPy"):
            import scipy.sparse
        rows = self.get()
        data = native(rows.data)
        matrix = scipy.sparse.csr_matrix(self.shape, dtype=data.dtype)
        # Its own constructor may look at all indices, and copy them to another dtype.
        matrix.data = data
        matrix.indices, matrix.indptr = rows._signed()
        return matrix

    def to_torch(self) -> Any:
        """Return a tensor of layout ``torch.sparse_csr``, on the device of the rows.

        It shares the values, and indices of int32 or int64; arrays in another byte order than this
        machine's are copied. The content is not checked again.

        Raises
        ------
        MissingPackageError
            If PyTorch is not installed.
        """
        with needs_package("torch", "tensors"):
            import torch
        make = torch.from_numpy if isinstance(self.data, np.ndarray) else torch.from_dlpack
        indices, indptr = self._signed()
        return torch.sparse_csr_tensor(
            make(indptr), make(indices), make(native(self.data)), self.shape, check_invariants=False
        )

    def to_cupy(self) -> Any:
        """Return a ``cupyx.scipy.sparse.csr_matrix`` that shares the memory of rows on a GPU.

        It shares the values, and indices of int32, the dtype that CuPy needs. Rows in host memory
        are uploaded to the current device.

        Raises
        ------
        MissingPackageError
            If CuPy is not installed.
        ConfigError
            If CuPy has no sparse matrices of the dtype, such as integers.
        """
        with needs_package("cupy-cuda13x", "sparse matrices of CuPy"):
            import cupy
            import cupyx.scipy.sparse
        if self.dtype.char not in _OF_CUPYX:
            raise ConfigError(
                f"CuPy has no sparse matrices of {self.dtype}, but of bool, float32, float64,"
                ' complex64 and complex128; give the field dtype="float32", for example'
            )
        arrays = tuple(map(cupy.asarray, (native(self.data), *self._signed())))
        return cupyx.scipy.sparse.csr_matrix(arrays, shape=self.shape)

    def to_dense(self, out: Any = None) -> Any:
        """Return the rows as a dense array, with 0 where no value is stored.

        Values of the same row and column are added up. For rows in host memory the compiled core
        does this without the GIL if it supports the dtypes (values: integers or floats of 4 or 8
        bytes; `out`: their dtype, or float32). Rows on a GPU are made dense there, on the current
        stream, which is then synchronized.

        Parameters
        ----------
        out
            (rows, columns): the destination, on the device of the values; its dtype may differ.
            None means a new array of the dtype of the values.

        Returns
        -------
        array
            `out`, or the new one.

        Raises
        ------
        ConfigError
            If `out` has another shape, or a dtype that the values cannot be cast to.
        DatasetError
            If an index is not a column; the content of `out` is then undefined.

        Examples
        --------
        >>> rows = Csr(np.array([1.0, 2.0]), np.array([0, 2]), np.array([0, 1, 2]), shape=(2, 3))
        >>> rows.to_dense()
        array([[1., 0., 0.],
               [0., 0., 2.]])
        """
        if out is None:
            out = np.empty_like(self.data, shape=self.shape)
        elif out.shape != self.shape or not np.can_cast(self.dtype, out.dtype, "same_kind"):
            raise ConfigError(
                f"out is a {out.dtype} array of shape {out.shape}; {self.dtype} rows of shape"
                f" {self.shape} need one of their shape, and of a dtype to which they can be cast"
            )
        if not isinstance(out, np.ndarray):
            self._make_on_gpu(out)
            return out
        rows = self._made_by_core(out)
        if rows is None:
            self._make_dense(out)
        elif rows < len(self):
            raise self._no_column(rows)
        return out

    def _signed(self) -> tuple[Any, Any]:
        """Return `indices` and `indptr` in the one dtype that libraries accept; mostly views."""
        kind = self.indices.dtype
        if not (kind.isnative and kind in (np.dtype(np.int32), np.dtype(np.int64))):
            kind = np.dtype(np.int64)
        if kind == np.int32 and self.data.shape[0] > np.iinfo(np.int32).max:
            kind = np.dtype(np.int64)
        return self.indices.astype(kind, copy=False), self.indptr.astype(kind, copy=False)

    def _made_by_core(self, out: NDArray[Any]) -> int | None:
        """Have the core make the rows; return the number made, or None for unsupported arrays."""
        # Imported here because it is slow, and not every program makes dense rows.
        from h5async.core.binding import VALUE_KINDS, address, load_core

        core, data, indices = load_core(), self.data, self.indices
        kinds = VALUE_KINDS.get(data.dtype), VALUE_KINDS.get(out.dtype)
        can_read = all(one.flags.c_contiguous and one.flags.aligned for one in (data, indices))
        is_near = out.strides[0] >= 0 and (out.strides[1] == out.itemsize or out.shape[1] <= 1)
        can_write = is_near and out.flags.aligned and out.flags.writeable
        is_index = indices.dtype.isnative and indices.dtype.kind == "i"
        if core is None or None in kinds or not (can_read and can_write and is_index):
            return None
        indptr = np.ascontiguousarray(self.indptr, np.int64)
        sparse = core.Sparse(
            data=address(data),
            indices=address(indices),
            indptr=address(indptr),
            out=address(out),
            rows=self.shape[0],
            columns=self.shape[1],
            total=data.size,
            row_nbytes=out.strides[0],
            data_kind=kinds[0],
            out_kind=kinds[1],
            index_nbytes=indices.itemsize,
        )
        made: int = core.make_dense(ctypes.byref(sparse))
        return None if made < 0 else made

    def _make_dense(self, out: NDArray[Any]) -> None:
        out[...] = 0
        row = np.searchsorted(self.indptr, np.arange(self.data.shape[0]), side="right") - 1
        indices = self.indices.astype(np.int64)
        self._check(indices, self.indptr)
        np.add.at(out, (row, indices), self.data.astype(out.dtype))

    def _make_on_gpu(self, out: Any) -> None:
        with needs_package("cupy-cuda13x", "arrays on a GPU"):
            import cupy
        dense = out if out.flags.c_contiguous else cupy.empty(out.shape, out.dtype)
        bad = cupy.zeros(1, np.int32)
        indptr = self.indptr.astype(np.int64, copy=False)
        dense_on_gpu(cupy, self.data, self.indices, indptr, dense, bad)
        if int(bad[0]):
            self._check(on_host(self.indices).astype(np.int64), on_host(self.indptr))
        if dense is not out:
            out[...] = dense

    def _check(self, indices: NDArray[np.int64], indptr: NDArray[Any]) -> None:
        is_outside = (indices < 0) | (indices >= self.shape[1])
        if is_outside.any():
            at = int(is_outside.argmax())
            raise self._no_column(int(np.searchsorted(indptr, at, side="right")) - 1)

    def _no_column(self, row: int) -> DatasetError:
        return DatasetError(
            f"sparse row {row} of {len(self)} has an index that is not one of its {self.shape[1]}"
            " columns; the file holds a damaged matrix"
        )
