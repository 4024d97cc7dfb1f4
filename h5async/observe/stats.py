"""Collects times and counts while a reader works, and says in a sentence what holds it up.

`ReaderStats` is what the caller gets of them: of all that was done, of an epoch, or of the time
since earlier ones.

A stage is one step of delivering a batch, in the threads of the pool: plan, read, decode, place
(copying samples from decoded chunks into the batch), transform, postprocess, upload. The consumer's
own time is what it spends in `get_next_batch()`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from h5async.html import Bar, Cell, counted, seconds_text, size_text, table
from h5async.spelling import as_keyword, named, spelled

_KEPT_WAITS = 4096
_DATA_BOUND = 0.02  # share of its time that a loop may wait without being held up by the data
_HOLDS = 0.6  # share of its time that a loop may wait and still be what holds the GIL
_STARVED = 0.25  # share of the threads' time that they may spend waiting for the GIL
_BUSY = 0.4  # share of their time that threads work at least, where they have enough to do
_DECODES = 0.25  # share of the threads' time from which decoding is worth a word
_WASTED = 1.5  # samples decoded for each that is used, from which they are worth a word
_WORK = {  # what a stage is called in the sentence
    "plan": "planning",
    "read": "reading",
    "decode": "decoding",
    "place": "copying samples out of chunks",
    "transform": "permuting, casting and scaling",
    "postprocess": "postprocess",
    "upload": "uploading",
}


class WaitTotals(NamedTuple):
    """How the consumer waited so far.

    Attributes
    ----------
    number
        Waits that count: all but the first, which is start-up.
    seconds
        Their sum.
    elapsed_seconds
        From the first batch to the end of the last wait.
    """

    number: int = 0
    seconds: float = 0.0
    elapsed_seconds: float = 0.0


class Waits:
    """How long the consumer waited for each batch; it notes, and any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may ask in the midst of a note
        self._last: deque[float] = deque(maxlen=_KEPT_WAITS)
        self._totals = self._before = WaitTotals()
        self._begin: float | None = None

    def note(self, begin: float, end: float) -> None:
        """Note one wait, in seconds of `time.perf_counter`; the first is left out, as start-up."""
        with self._lock:
            if self._begin is None:
                self._begin = end
                return
            number, seconds, _ = self._totals
            self._before = self._totals._replace(elapsed_seconds=begin - self._begin)
            self._last.append(end - begin)
            self._totals = WaitTotals(number + 1, seconds + end - begin, end - self._begin)

    @property
    def totals(self) -> WaitTotals:
        """All waits that count."""
        return self._totals

    @property
    def before(self) -> WaitTotals:
        """The same at the beginning of the last wait."""
        return self._before

    def percentiles(self, totals: WaitTotals, since: WaitTotals) -> tuple[float, float]:
        """Return median and 99th percentile of the waits between two moments, of those kept."""
        with self._lock:
            later = self._totals.number - totals.number
            kept = list(self._last)
        kept = sorted(kept[: max(0, len(kept) - later)][since.number - totals.number :])
        if totals.number <= since.number:
            return 0.0, 0.0
        return percentile(kept, 50), percentile(kept, 99)


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Return a percentile of numbers, as NumPy interpolates it; 0 of none."""
    if not ascending:
        return 0.0
    at = (len(ascending) - 1) * percent / 100
    below = int(at)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (at - below)


class Remedy(NamedTuple):
    """What would decode less.

    Attributes
    ----------
    text
        What to do; options are marked.
    leaves
        How many samples would be decoded then for each that is used.
    """

    text: str
    leaves: float = 1.0


class ChunkAdvice(NamedTuple):
    """What may be said of chunks that hold more than is used.

    Attributes
    ----------
    name
        The field of whose chunks most is decoded; empty: there is one field only.
    unit
        What a chunk has several of: "sample", "image", "row" or "value".
    remedies
        What would decode less.
    h5py_name, h5py_remedies
        The same of chunks that only h5py reads.
    raw_remedies
        What would read less of chunks without filters.
    """

    name: str = ""
    unit: str = "sample"
    remedies: tuple[Remedy, ...] = ()
    h5py_name: str = ""
    h5py_remedies: tuple[Remedy, ...] = ()
    raw_remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True)
class ReaderStats:
    """What a reader has done so far; ``str()`` gives a sentence that says what to change.

    Attributes
    ----------
    batches, samples, nbytes
        How much was delivered; `nbytes` counts in the dtypes of the file.
    elapsed_seconds
        Time between the first batch and the last one that was delivered. Of an epoch: from the
        moment at which its first batch was asked for; since an earlier moment: from the last batch
        before it.
    wait_seconds, wait_p50_seconds, wait_p99_seconds
        Time that the consumer waited for batches since the first one: the sum, and the median and
        99th percentile of the last 4,096 waits.
    stage_seconds
        Time that threads spent in each stage (plan, read, decode, place, transform, postprocess,
        upload), for all batches that were filled. Where h5py reads a dataset, all of it counts as
        ``"read"``.
    gil_wait_seconds
        Time that threads waited for the GIL after calls of the compiled core; no stage contains it.
    read_nbytes, decoded_chunks, decoded_nbytes
        Encoded bytes that were read, chunks that were decoded, and what these hold.
    decoded_per_used
        Samples that were decoded for each that was used; by bytes, over the fields whose chunks are
        encoded. 1: each chunk was decoded once, and all of it was used. 0: nothing was decoded.
        Batches that are probably on their way count as used.
    read_per_used
        Bytes that were read for each that was used, of fields that are not encoded.
    fallback_reads
        Reads that went through h5py, one for each batch of each field that needs it.
    direct_share
        Share of the bytes of a sample that are read without h5py.
    ways
        How each field is read: ``"core"``, ``"python"``, ``"h5py"``, ``"memory"``, or several of
        them for several files.
    cache
        Where rows are kept for later epochs, and how many; or why they are not.
    decode
        Where chunks are decoded, ``"host"`` or ``"device"``, and why.
    num_threads
        Threads of the pool; 0: the consumer's thread does the work.
    filters
        Names of the filters of all fields.
    broken_images
        Images that were replaced because they cannot be decoded; see `ImageField`.
    workers
        As the option says it: which processes the threads, and their GIL, belong to.
    epoch
        The epoch that was asked for; None: all of them.
    first_batch
        How many batches had been delivered before, where the statistics begin later.

    Examples
    --------
    >>> with AsyncReader(hdf5_path="sample_data/digits.h5", batch_size=64) as reader:
    ...     for data, labels in reader:
    ...         pass
    ...     stats = reader.stats()
    >>> stats
    <ReaderStats: 29 batches, 1,797 samples in ... s, waited ... %, most time in ...>
    >>> stats.samples, stats.fallback_reads, stats.direct_share
    (1797, 0, 1.0)
    >>> sorted(stats.stage_seconds)
    ['decode', 'place', 'plan', 'postprocess', 'read', 'transform', 'upload']
    """

    batches: int
    samples: int
    nbytes: int
    elapsed_seconds: float
    wait_seconds: float
    wait_p50_seconds: float
    wait_p99_seconds: float
    stage_seconds: Mapping[str, float]
    gil_wait_seconds: float
    read_nbytes: int
    decoded_chunks: int
    fallback_reads: int
    direct_share: float
    ways: Mapping[str, str]
    num_threads: int
    filters: Sequence[str] = field(default=())
    workers: str | int = "thread"
    cache: str = "none"
    decode: str = "host"
    broken_images: int = 0
    decoded_nbytes: int = 0
    decoded_per_used: float = 0.0
    read_per_used: float = 0.0
    epoch: int | None = None
    first_batch: int = 0
    # The same without what is kept decoded, and may be used yet: what is in vain for certain.
    _least_decoded: float = 0.0
    _least_read: float = 0.0
    _h5py_per_used: float = 0.0
    _encoded_share: float = 0.0  # of the bytes that are read: those of chunks that are decoded
    _waits: int | None = None  # None: one fewer than batches
    _advice: ChunkAdvice = field(default=ChunkAdvice(), compare=False)
    _mark: object = field(default=None, compare=False)  # by which later ones are told from these

    @property
    def waited_share(self) -> float:
        """Share of its time that the consumer waited."""
        return self.wait_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0

    @property
    def busy_seconds(self) -> float:
        """Time that all threads worked."""
        return sum(self.stage_seconds.values())

    @property
    def headroom(self) -> float:
        """How many times faster the reader could deliver than the consumer takes batches."""
        if self._intervals < 1 or not self.busy_seconds:
            return 1.0
        interval = self.elapsed_seconds / self._intervals
        return interval * max(1, self.num_threads) / (self.busy_seconds / self.batches)

    @property
    def limit(self) -> str:
        """The stage that takes most time of the threads."""
        return max(self.stage_seconds, key=lambda stage: self.stage_seconds[stage])

    @property
    def bottleneck(self) -> str:
        """What limits the reader, as a sentence: also where the loop does nothing but read."""
        return spelled(reader_sentence(self), as_keyword)

    @property
    def _intervals(self) -> int:
        """Batches whose time is known."""
        return max(0, self.batches - 1) if self._waits is None else self._waits

    @property
    def _says_something(self) -> bool:
        return self._intervals > 0 and self.batches > 0 and self.busy_seconds > 0

    @property
    def _span(self) -> str:
        """Which time this is of, as part of a sentence."""
        if self.epoch is not None:
            return f" in epoch {self.epoch}"
        return f" since batch {self.first_batch}" if self.first_batch else ""

    @property
    def _amount(self) -> str:
        """How much was delivered, as text."""
        return f"{counted(self.batches, 'batch', 'batches')}, {counted(self.samples, 'sample')}"

    def __str__(self) -> str:
        """Say whether the loop waits for data, and what to do."""
        return spelled(loop_sentence(self), as_keyword)

    def __repr__(self) -> str:
        """Describe the statistics in a line."""
        return f"<ReaderStats{self._span}: {self._glance()}>"

    def _glance(self) -> str:
        text = f"{self._amount} in {self.elapsed_seconds:.3g} s"
        if not self._says_something:
            return text
        return f"{text}, waited {_percent(self.waited_share)} %, most time in {self.limit}"

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it: numbers, strings, None, and lists and dicts of these.

        The keys are the attributes, with `waited_share`, `busy_seconds`, `headroom`, `limit`,
        `bottleneck` and ``"sentence"``, which is ``str()``. Names end in their units: seconds, and
        nbytes for bytes; the names of shares say so, too.

        Examples
        --------
        >>> with AsyncReader(hdf5_path="sample_data/digits.h5", batch_size=64) as reader:
        ...     for data, labels in reader:
        ...         pass
        ...     told = reader.stats().as_dict()
        >>> told["samples"], told["filters"], told["epoch"]
        (1797, ['deflate', 'shuffle'], None)
        """
        names = [name for name in self.__dataclass_fields__ if not name.startswith("_")]
        found = {name: getattr(self, name) for name in names}
        for name in ("waited_share", "busy_seconds", "headroom", "limit", "bottleneck"):
            found[name] = getattr(self, name)
        found["stage_seconds"], found["ways"] = dict(self.stage_seconds), dict(self.ways)
        found["filters"] = list(self.filters)
        return {**found, "sentence": str(self)}

    def _repr_html_(self) -> str:
        """Show a small table in a notebook: where the time went, as bars."""
        busy = self.busy_seconds
        rows: list[list[Cell]] = []
        for stage, seconds in self.stage_seconds.items():
            if seconds and busy:
                share = seconds / busy
                text = f"{_percent(share)} %, {seconds_text(seconds)}"
                rows.append([stage, Bar(share, text)])
        if self.gil_wait_seconds and busy:
            share = self.gil_wait_seconds / (busy + self.gil_wait_seconds)
            text = f"{_percent(share)} %, {seconds_text(self.gil_wait_seconds)} more"
            rows.append(["GIL", Bar(share, text)])
        if self._says_something:
            text = f"{_percent(self.waited_share)} % of {seconds_text(self.elapsed_seconds)}"
            rows.append(["loop waited", Bar(self.waited_share, text)])
            longest = self.wait_p99_seconds
            middle = self.wait_p50_seconds / longest if longest else 0.0
            rows.append(["wait, median", Bar(middle, seconds_text(self.wait_p50_seconds))])
            rows.append(["wait, 99 %", Bar(1.0, seconds_text(longest))])
        amount = f"{self._amount}, {size_text(self.nbytes)}"
        title = f"ReaderStats{self._span}"
        return table(title, rows, subtitle=amount, note=str(self))


def loop_sentence(stats: ReaderStats) -> str:
    """Say whether the loop waits for data, and what to do; options are marked."""
    if not stats._says_something:
        return _nothing(stats)
    waited = f"waited {_percent(stats.waited_share)} % of the time"
    if stats.waited_share < _DATA_BOUND:
        headroom = f"{stats.headroom:.1f}x what the loop takes"
        return f"not data-bound{stats._span}: {waited}; the reader could give {headroom}"
    starved = stats.gil_wait_seconds / (stats.gil_wait_seconds + stats.busy_seconds)
    is_loop = stats.headroom > 1 and stats.waited_share <= _HOLDS
    if starved > _STARVED and is_loop and stats.workers == "thread":
        return (
            f"data-bound{stats._span}: {waited}; the reader's threads spent"
            f" {100 * starved:.0f} % of their time waiting for the GIL: the loop holds it; call"
            " less Python in it, or make batches larger"
        )
    return f"data-bound{stats._span}: {waited}; {_limit(stats)}"


def reader_sentence(stats: ReaderStats) -> str:
    """Say what limits the reader, whatever the loop does; options are marked."""
    if not stats._says_something:
        return _nothing(stats)
    threads = max(1, stats.num_threads)
    worked = stats.busy_seconds / (stats.elapsed_seconds * threads or 1.0)
    if worked < _BUSY and stats.waited_share >= _DATA_BOUND and stats.num_threads:
        return (
            f"the threads worked {_percent(worked)} % of the time: batches are too small to keep"
            f" them busy; make {named('batch_size')} or {named('prefetch')} larger"
        )
    return _limit(stats)


def _nothing(stats: ReaderStats) -> str:
    when = stats._span or " yet"
    return f"nothing to tell{when}: fewer than two batches were delivered"


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.{0 if percent >= 10 else 1}f}"


def _limit(stats: ReaderStats) -> str:
    """Name the stage that limits, and what it does in vain."""
    stage, threads = stats.limit, max(1, stats.num_threads)
    work = _WORK[stage]
    if stage == "decode" and stats.filters:
        work = f"{'+'.join(stats.filters)} decoding"
    elif stage == "read" and stats.direct_share < 1:
        work = "reading through h5py"
    seconds = stats.stage_seconds[stage] / threads
    speed = stats.nbytes / seconds / 1e9 if seconds else 0.0
    on = f"{threads} thread{'s' * (threads > 1)}"
    return f"the limit is {work}, {speed:.2g} GB/s on {on}{_waste(stats)}"


def _waste(stats: ReaderStats) -> str:
    """Say what chunks have decoded or read in vain, where that is much of what limits."""
    if stats.cache.startswith(("host", "device")):
        return ""  # what is kept is not decoded again
    advice, limit = stats._advice, stats.limit
    reads = stats.stage_seconds.get("read", 0.0) * stats._encoded_share
    decodes = (stats.stage_seconds.get("decode", 0.0) + reads) / stats.busy_seconds
    if limit in ("decode", "place", "read") and decodes >= _DECODES:
        if stats._least_decoded >= _WASTED:
            return _told(stats._least_decoded, advice.unit, advice.name, advice.remedies)
    if limit != "read":
        return ""
    if stats.direct_share < 1:
        if stats._h5py_per_used < _WASTED:
            return ""
        return _told(stats._h5py_per_used, "sample", advice.h5py_name, advice.h5py_remedies)
    if stats._least_read >= _WASTED:
        told = f"; {stats._least_read:.3g} bytes are read for each that is used"
        return told + _remedies(stats._least_read, advice.raw_remedies)
    return ""


def _told(ratio: float, unit: str, name: str, remedies: Sequence[Remedy]) -> str:
    count = f"{ratio:.0f}" if ratio >= 9.5 else f"{ratio:.1f}".removesuffix(".0")
    of = f' of "{name}"' if name else ""
    return f"; {count} {unit}s{of} are decoded for each that is used{_remedies(ratio, remedies)}"


def _remedies(ratio: float, remedies: Sequence[Remedy]) -> str:
    """Name what would help noticeably."""
    texts = [remedy.text for remedy in remedies if remedy.leaves * _WASTED <= ratio]
    if len(texts) > 1:
        texts[-1] = f"or {texts[-1]}"
    return f": {', '.join(texts)}" if texts else ""
