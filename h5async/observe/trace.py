"""Defines `Trace`, with which the caller ends a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class Trace:
    """A running trace of a reader, begun by `AsyncReader.trace` and ended by `stop`.

    It also ends at the end of its ``with`` block, and with its reader.

    Attributes
    ----------
    path
        The file that is written at the end; None means no file.
    is_ending
        Whether it has ended or is ending.

    Examples
    --------
    >>> with AsyncReader(hdf5_path="sample_data/digits.h5") as reader:
    ...     trace = reader.trace("t.json")
    ...     batch = reader.get_next_batch()
    ...     trace.stop()
    >>> trace.path.name
    't.json'
    """

    def __init__(self, path: Path | None, end: Callable[[Trace], None]) -> None:
        self.path = path
        self.is_ending = False
        self._end = end

    def stop(self) -> None:
        """End the trace and write the file. Extra calls are harmless.

        Raises
        ------
        ReadError
            If the file cannot be written.

        Examples
        --------
        >>> reader = AsyncReader(hdf5_path="sample_data/digits.h5")
        >>> trace = reader.trace("t.json")
        >>> batch = reader.get_next_batch()
        >>> trace.stop()
        >>> reader.close()
        """
        self.is_ending = True
        self._end(self)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "ended" if self.is_ending else "running"
        return f"<Trace {self.path or 'without a file'}, {state}>"
