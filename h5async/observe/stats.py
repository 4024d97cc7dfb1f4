"""Defines `ReaderStats`: times and counts of a reader, and its bottleneck in a sentence.

A stage is one step of delivering a batch, in the threads of the pool: plan, read, decode, place
(copying samples from decoded chunks into the batch), transform, postprocess, upload. Only the stage
fetch is no work of threads: batches wait for bytes from object stores and the web.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from h5async.spelling import (
    Bar,
    Cell,
    as_keyword,
    counted,
    named,
    seconds_text,
    size_text,
    spelled,
    table,
)

_DATA_BOUND = 0.02  # share of waiting from which a loop counts as data-bound
_HOLDS = 0.6  # share of waiting up to which the loop itself may be holding the GIL
_STARVED = 0.25  # share of the threads' time spent waiting for the GIL
_BUSY = 0.4  # minimum share of working time of threads with enough to do
_DECODES = 0.25  # share of the threads' time from which decoding is mentioned
_WASTED = 1.5  # samples decoded per sample used, from which waste is mentioned
_WAITS_FOR_BYTES = 0.5  # seconds that a batch waits for bytes, per second that the loop waits
_FULL = 0.5  # share of `requests_in_flight` or `MOST_RATE` from which that is the limit
_QUEUED = 4  # times the quickest request's time, from which requests queue; S3 varies by 3
MOST_RATE = 5500  # GETs a second that S3 permits for a prefix
_LARGE_NBYTES = 1 << 20  # of a request, from which its transfer takes longer than its latency
_WORK = {  # names of stages in the sentence
    "plan": "planning",
    "fetch": "fetching",
    "read": "reading",
    "decode": "decoding",
    "place": "copying samples out of chunks",
    "transform": "permuting, casting and scaling",
    "postprocess": "postprocess",
    "upload": "uploading",
}


class Remedy(NamedTuple):
    """A way to decode less; options are marked in its text."""

    text: str
    leaves: float = 1.0  # samples that would then be decoded per sample used


class Advice(NamedTuple):
    """Advice on chunks that hold more than is used."""

    name: str = ""  # the field whose chunks are decoded most, if there are several
    unit: str = "sample"  # of a chunk: "sample", "image", "row" or "value"
    remedies: tuple[Remedy, ...] = ()


class ChunkAdvice(NamedTuple):
    """Advice on chunks that the threads decode, those that only h5py reads, and unfiltered ones."""

    decoded: Advice = Advice()
    by_h5py: Advice = Advice()
    raw: tuple[Remedy, ...] = ()


@dataclass(frozen=True)
class ReaderStats:
    """Statistics of a reader so far; ``str()`` gives a sentence that says what to change.

    Attributes
    ----------
    batches, samples, nbytes
        Amount delivered; `nbytes` counts in the dtypes of the file.
    elapsed_seconds
        Time between the deliveries of the first and the last batch. For an epoch, it begins with
        the request for its first batch; with `since`, with the last batch before that.
    wait_seconds, wait_p50_seconds, wait_p99_seconds
        Time that the consumer waited after the first batch: the sum, and the median and 99th
        percentile of the last 4,096 waits.
    stage_seconds
        Time that threads spent in each stage (plan, read, decode, place, transform, postprocess,
        upload), for all filled batches. If h5py reads a dataset, all of it counts as ``"read"``.
        ``"fetch"`` is the time that requested batches waited for object stores and the web, each
        from its request to its last byte; it is not a thread's work, and not in `busy_seconds`.
    gil_wait_seconds
        Time that threads waited for the GIL after calls of the compiled core; no stage contains it.
    read_nbytes, decoded_chunks, decoded_nbytes
        Encoded bytes read, chunks decoded, and the bytes that these decode to.
    decoded_per_used
        Samples decoded per sample used, by bytes, of fields whose chunks are encoded; 1 means that
        each chunk was decoded once and used whole. Batches in progress count as used.
    read_per_used
        Bytes read per byte used, of fields that are not encoded.
    requests, requested_nbytes
        Requests to object stores and the web, with ``cache="disk"`` also to other files that it
        caches; and their bytes. Neither metadata nor bytes read from the cache count.
    retries
        Requests that were repeated after a fault; obstore does not report its own retries.
    requested_per_used
        Bytes requested per byte that batches read; less than 1 if several batches read bytes that
        were requested once.
    fallback_reads
        Reads through h5py: one per batch and field that needs it.
    direct_share
        Share of the bytes of a sample that are read without h5py.
    ways
        What reads each field: ``"core"``, ``"h5py"``, ``"memory"``, or several of these.
    cache
        Where rows are kept for later epochs, and how many; or why they are not.
    decode
        Where chunks are decoded, ``"host"`` or ``"device"``, and why.
    open_seconds
        Time to create the reader: opening files, allocating memory, starting threads; with helper
        processes, also their start, including the import of NumPy and h5py in each.
    num_threads, workers
        Threads of the pool (0: the consumer does the work), and the option `workers`.
    filters
        Names of the filters of all fields.
    broken_images
        Images that were replaced because they cannot be decoded; see `ImageField`.
    skipped
        Damaged samples that were left out of batches, with ``on_error="skip"``.
    epoch
        The requested epoch; None means all.
    first_batch
        Number of batches delivered before these statistics begin.

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
    ['decode', 'fetch', 'place', 'plan', 'postprocess', 'read', 'transform', 'upload']
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
    skipped: int = 0
    open_seconds: float = 0.0
    decoded_nbytes: int = 0
    decoded_per_used: float = 0.0
    read_per_used: float = 0.0
    requests: int = 0
    requested_nbytes: int = 0
    requested_per_used: float = 0.0
    retries: int = 0
    epoch: int | None = None
    first_batch: int = 0
    # As above, without kept decoded chunks that may be used later: certain waste.
    _least_decoded: float = 0.0
    _least_read: float = 0.0
    _h5py_per_used: float = 0.0
    _encoded_share: float = 0.0  # share of the bytes read that are chunks to decode
    _flight_seconds: float = 0.0  # sum over requests of their time in flight
    _quickest_seconds: float = 0.0  # shortest time of a call that made requests
    _most_flights: int = 1  # maximum number of requests at a time
    _is_scattered: bool = True  # whether samples of a chunk are far from each other in the order
    _waits: int = 0  # number of timed waits for batches
    _advice: ChunkAdvice = field(default=ChunkAdvice(), compare=False)
    _moment: object = field(default=None, compare=False)  # where statistics `since` these begin

    @property
    def waited_share(self) -> float:
        """Share of the time that the consumer spent waiting."""
        return self.wait_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0

    @property
    def busy_seconds(self) -> float:
        """Total working time of all threads."""
        return sum(self._work.values())

    @property
    def _work(self) -> Mapping[str, float]:
        """Seconds of the stages in which threads work."""
        return {stage: taken for stage, taken in self.stage_seconds.items() if stage != "fetch"}

    @property
    def _worked_share(self) -> float:
        return self.busy_seconds / (self.elapsed_seconds * max(1, self.num_threads) or 1.0)

    @property
    def headroom(self) -> float:
        """How many times faster the reader could deliver than the consumer takes batches."""
        if not self._waits or not self.busy_seconds:
            return 1.0
        interval = self.elapsed_seconds / self._waits
        return interval * max(1, self.num_threads) / (self.busy_seconds / self.batches)

    @property
    def limit(self) -> str:
        """The stage that takes most of the threads' time; "fetch" if they wait for the network."""
        return "fetch" if self._is_far else max(self._work, key=lambda one: self._work[one])

    @property
    def _is_far(self) -> bool:
        """Whether batches wait for the network while the loop waits, and threads have no work."""
        if not self._says_something or self.waited_share < _DATA_BOUND:
            return False
        of_batch = self.stage_seconds.get("fetch", 0.0) / self.batches
        waits = of_batch > _WAITS_FOR_BYTES * self.wait_seconds / self._waits
        return waits and self._worked_share < _BUSY

    @property
    def bottleneck(self) -> str:
        """A sentence on what limits the reader, regardless of the loop."""
        return spelled(reader_sentence(self), as_keyword)

    @property
    def _says_something(self) -> bool:
        return self._waits > 0 and self.batches > 0 and self.busy_seconds > 0

    @property
    def _span(self) -> str:
        """The period of these statistics, as part of a sentence."""
        if self.epoch is not None:
            return f" in epoch {self.epoch}"
        return f" since batch {self.first_batch}" if self.first_batch else ""

    @property
    def _amount(self) -> str:
        left_out = f" ({self.skipped:,} more skipped)" if self.skipped else ""
        batches, samples = (
            counted(self.batches, "batch", "batches"),
            counted(self.samples, "sample"),
        )
        return f"{batches}, {samples}{left_out}"

    def __str__(self) -> str:
        return spelled(loop_sentence(self), as_keyword)

    def __repr__(self) -> str:
        text = f"{self._amount} in {self.elapsed_seconds:.3g} s"
        if self._says_something:
            text += f", waited {_percent(self.waited_share)} %, most time in {self.limit}"
        return f"<ReaderStats{self._span}: {text}>"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON types: numbers, strings, None, lists and dicts.

        The keys are the attributes, `waited_share`, `busy_seconds`, `headroom`, `limit`,
        `bottleneck` and ``"sentence"``, which is ``str()``. Names end in their units: seconds,
        share, or nbytes for bytes.
        """
        names = [name for name in self.__dataclass_fields__ if not name.startswith("_")]
        names += ["waited_share", "busy_seconds", "headroom", "limit", "bottleneck"]
        found = {name: getattr(self, name) for name in names}
        found |= {name: dict(found[name]) for name in ("stage_seconds", "ways")}
        return {**found, "filters": list(self.filters), "sentence": str(self)}

    def _repr_html_(self) -> str:
        busy, gil, longest = self.busy_seconds, self.gil_wait_seconds, self.wait_p99_seconds
        bars = [
            (stage, seconds / busy, f"{_percent(seconds / busy)} %, {seconds_text(seconds)}")
            for stage, seconds in self._work.items()
            if seconds and busy
        ]
        if self.requests:
            fetched, size = self.stage_seconds["fetch"], size_text(self.requested_nbytes)
            share = fetched / (busy + fetched or 1.0)
            requests = counted(self.requests, "request")
            bars.append(("fetch", share, f"{seconds_text(fetched)} more: {size}, {requests}"))
        if gil and busy:
            share = gil / (busy + gil)
            bars.append(("GIL", share, f"{_percent(share)} %, {seconds_text(gil)} more"))
        if self._says_something:
            share, median = self.waited_share, self.wait_p50_seconds
            whole = seconds_text(self.elapsed_seconds)
            bars.append(("loop waited", share, f"{_percent(share)} % of {whole}"))
            share = median / longest if longest else 0.0
            bars.append(("wait, median", share, seconds_text(median)))
            bars.append(("wait, 99 %", 1.0, seconds_text(longest)))
        rows: list[list[Cell]] = [[name, Bar(share, text)] for name, share, text in bars]
        amount, title = f"{self._amount}, {size_text(self.nbytes)}", f"ReaderStats{self._span}"
        return table(title, rows, subtitle=amount, note=str(self))


def loop_sentence(stats: ReaderStats) -> str:
    """Say whether the loop waits for data, and what to do; options are marked."""
    if not stats._says_something:
        return reader_sentence(stats)
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
    limit = _limit_of_fetching(stats) if stats._is_far else _limit(stats)
    return f"data-bound{stats._span}: {waited}; {limit}"


def reader_sentence(stats: ReaderStats) -> str:
    """Say what limits the reader, regardless of the loop; options are marked."""
    if not stats._says_something:
        return f"nothing to tell{stats._span or ' yet'}: fewer than two batches were delivered"
    worked = stats._worked_share
    if stats._is_far:
        return _limit_of_fetching(stats)
    if worked < _BUSY and stats.waited_share >= _DATA_BOUND and stats.num_threads:
        return (
            f"the threads worked {_percent(worked)} % of the time: batches are too small to keep"
            f" them busy; make {named('batch_size')} or {named('prefetch')} larger"
        )
    return _limit(stats)


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.{0 if percent >= 10 else 1}f}"


def _limit(stats: ReaderStats) -> str:
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


def _limit_of_fetching(stats: ReaderStats) -> str:
    """Say what holds up requests, and what to do."""
    seconds, most = stats.elapsed_seconds or 1.0, stats._most_flights
    rate, count = stats.requests / seconds, max(1, stats.requests)
    size, takes = stats.requested_nbytes / count, stats._flight_seconds / count
    flights = stats._flight_seconds / seconds
    disk = "" if stats.cache.startswith("disk") else f", or use {named('cache', 'disk')}"
    larger = "larger chunks" if stats.filters else "compressed chunks of several rows"
    if stats.filters and stats._is_scattered:
        larger = f"{named('shuffle', 'window')} or {larger}"
    fewer = f"read larger pieces ({larger}){disk}"
    if rate >= _FULL * MOST_RATE:
        limit = "the rate of requests"
        advice = f"S3 permits some {MOST_RATE:,} a second for a prefix; {fewer}"
    elif not stats.num_threads:
        limit = "the latency of the network"
        advice = f"only threads fetch ahead: leave out {named('num_threads', 0)}"
    elif flights < _FULL * most:
        limit = "the latency of the network"
        advice = (
            f"only {flights:.1f} of {most} requests were on their way at a time: make"
            f" {named('prefetch')} or {named('fetch_bytes')} larger"
        )
    elif takes > _QUEUED * stats._quickest_seconds > 0:
        limit = "the bandwidth of the network, or the store"
        quickest = seconds_text(stats._quickest_seconds)
        advice = (
            f"requests wait for each other (the quickest took {quickest}), so more at a time would"
            f" not help; {fewer}, or read nearer to the data"
        )
    elif size < _LARGE_NBYTES:
        limit = "the latency of the network"
        advice = f"make {named('requests_in_flight')} larger ({most} now), {fewer}"
    else:
        limit = "the bandwidth of the network"
        advice = f"read nearer to the data, store them compressed{disk}"
    told = f"{rate:,.0f} requests a second of {size_text(round(size))}, {seconds_text(takes)} each"
    speed = stats.requested_nbytes / seconds / 1e9
    return f"the limit is {limit}, {speed:.2g} GB/s in {told}; {advice}{_waste(stats)}"


def _waste(stats: ReaderStats) -> str:
    """Describe wasted decoding or reading, if it is a large part of the limiting work."""
    if stats.cache.startswith(("host", "device")):
        return ""  # kept chunks are not decoded again
    advice, limit = stats._advice, stats.limit
    reads = stats.stage_seconds.get("read", 0.0) * stats._encoded_share
    decodes = (stats.stage_seconds.get("decode", 0.0) + reads) / stats.busy_seconds
    if limit == "fetch" or (limit in ("decode", "place", "read") and decodes >= _DECODES):
        if stats._least_decoded >= _WASTED:
            return _told(stats._least_decoded, advice.decoded)
    if limit != "read":
        return ""
    if stats.direct_share < 1:
        if stats._h5py_per_used < _WASTED:
            return ""
        return _told(stats._h5py_per_used, advice.by_h5py._replace(unit="sample"))
    if stats._least_read >= _WASTED:
        told = f"; {stats._least_read:.3g} bytes are read for each that is used"
        return told + _remedies(stats._least_read, advice.raw)
    return ""


def _told(ratio: float, advice: Advice) -> str:
    count = f"{ratio:.0f}" if ratio >= 9.5 else f"{ratio:.1f}".removesuffix(".0")
    of = f' of "{advice.name}"' if advice.name else ""
    remedies = _remedies(ratio, advice.remedies)
    return f"; {count} {advice.unit}s{of} are decoded for each that is used{remedies}"


def _remedies(ratio: float, remedies: Sequence[Remedy]) -> str:
    texts = [remedy.text for remedy in remedies if remedy.leaves * _WASTED <= ratio]
    if len(texts) > 1:
        texts[-1] = f"or {texts[-1]}"
    return f": {', '.join(texts)}" if texts else ""
