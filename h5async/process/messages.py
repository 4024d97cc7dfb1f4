"""What a reader and its helper process say to each other, one after the other, by pickle.

First `Opening` is answered by `Opened`, and `Starting` by `Started`; then come requests to fill
slots (`FillRequest`, as a plain tuple), each answered by one `Answer` in any order, and notes that
nobody answers. Arrays are left where they are, in memory that both have.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import traceback
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]

from h5async import errors
from h5async.config import ReaderConfig
from h5async.errors import H5AsyncError
from h5async.fill.limits import MemoryPlan
from h5async.fill.records import FillerStats
from h5async.index.layout import DatasetLayout
from h5async.io.shared import Place
from h5async.plan.stored import StoredFormat, StoredPlan

_MAX_CAUSES = 8
_KNOWN = {kind for kind in vars(errors).values() if isinstance(kind, type)}


class Opening(NamedTuple):
    """Open the dataset of these options."""

    config: ReaderConfig


class Opened(NamedTuple):
    """The dataset is open."""

    layouts: dict[str, DatasetLayout]


class SlotPlaces(NamedTuple):
    """Where the memory of a slot lies: arrays of `SlotMemory`, and the batch's sample numbers.

    Attributes
    ----------
    raw, out, stored
        By field; None for what only the helper needs, or nobody.
    numbers
        int64 (batch,): of samples.
    """

    raw: tuple[Place | None, ...]
    out: tuple[Place, ...]
    stored: tuple[Place | None, ...]
    numbers: Place


class Starting(NamedTuple):
    """Start to fill slots."""

    slots: list[SlotPlaces]
    memory_plan: MemoryPlan
    stored_formats: list[StoredFormat | None]
    has_device_cache: bool
    others: dict[tuple[int, int], Place]  # what an earlier helper took for `postprocess`


class Started(NamedTuple):
    """Slots can be filled; and how each field is read."""

    ways: list[str]


class NoteUploaded(NamedTuple):
    """The device's cache has the samples of the batch in a slot."""

    slot: int


class DropStored(NamedTuple):
    """Give the memory for stored chunks back."""


class Answer(NamedTuple):
    """What became of a request.

    Attributes
    ----------
    request
        The `FillRequest`, as a plain tuple.
    size
        Samples in the batch.
    others
        By field: where an array lies that is none of the slot's; None for the slot's own.
    error
        What went wrong, if anything, by `portable`.
    is_resident, stored, busy_seconds, warnings
        As in `FillOutcome`.
    stats
        What the filler has done so far.
    """

    request: tuple[Any, ...]
    size: int
    others: tuple[Place | None, ...]
    error: tuple[bytes, ...]
    is_resident: bool
    stored: tuple[StoredPlan | None, ...]
    busy_seconds: float
    warnings: tuple[str, ...]
    stats: FillerStats


class Failed(NamedTuple):
    """In place of `Opened` or `Started`: what went wrong, by `portable`."""

    error: tuple[bytes, ...]


def dump_opening(opening: Opening) -> bytes:
    """Return the first message as bytes; functions in it may be local ones, or of ``__main__``.

    Raises
    ------
    Exception
        If something in it cannot be pickled.
    """
    return bytes(cloudpickle.dumps(opening))


def dump(message: Any) -> bytes:
    """Return any other message as bytes."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def load(data: bytes) -> Any:
    """Return the message that bytes are of."""
    return pickle.loads(data)


class _Parts(NamedTuple):
    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]


def _load_error(data: bytes) -> BaseException:
    found: BaseException | _Parts = pickle.loads(data)
    if isinstance(found, BaseException):
        return found
    error = found.kind.__new__(found.kind, *found.args)
    error.args = found.args
    error.__dict__.update(found.attributes)
    return error


def portable(error: BaseException) -> tuple[bytes, ...]:
    """Return an error, and what caused it, to be sent: pickled alone it would lose that.

    Each is of the same type where that can be pickled. Notes tell where they were raised.
    """
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(links) < _MAX_CAUSES:
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    for link in links:
        lines = "".join(traceback.format_tb(link.__traceback__)).rstrip()
        with contextlib.suppress(Exception):  # an exception may refuse to be changed
            link.add_note(f"in the helper process:\n{lines}")
    return tuple(_dump_error(link) for link in links)


def received(sent: tuple[bytes, ...]) -> BaseException:
    """Return an error that was sent, with its causes."""
    links: list[BaseException] = []
    for data in sent:
        try:
            links.append(_load_error(data))
        except Exception as error:  # its type is not known here, say
            links.append(H5AsyncError(f"an error of the helper process cannot be read ({error})"))
    for link, cause in itertools.pairwise(links):
        link.__cause__ = cause
    return links[0]


def _dump_error(error: BaseException) -> bytes:
    # Not every exception can be made of its `args`, as pickle makes it.
    for sent in (error, _Parts(type(error), error.args, error.__dict__)):
        try:
            data = bytes(cloudpickle.dumps(sent))
            copy = _load_error(data)
            if isinstance(copy, BaseException) and str(copy) == str(error):
                return data
        except Exception:  # whatever its own code does, there is something to send
            continue
    known = next((kind for kind in type(error).__mro__ if kind in _KNOWN), None)
    try:
        message = str(error) if known else f"{type(error).__name__}: {error}"
    except Exception:
        message = type(error).__name__
    return pickle.dumps((known or H5AsyncError)(message))
