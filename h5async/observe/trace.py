"""Defines `Trace`: what the caller ends a trace with that a reader has begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class Trace:
    """A trace of what a reader does, which `AsyncReader.trace` began; ends by `stop`.

    As a context it ends where that does. It ends with its reader, too.

    Attributes
    ----------
    path
        The file that is written at the end; None: no file.
    is_ending
        Whether it was ended, or its end was begun.

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
        """End the trace, and write the file. Extra calls are harmless.

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
        """Return the trace itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the trace."""
        self.stop()

    def __repr__(self) -> str:
        """Describe the trace in a line."""
        state = "ended" if self.is_ending else "running"
        return f"<Trace {self.path or 'without a file'}, {state}>"
