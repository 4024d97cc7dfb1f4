"""Counts a reader's work, and computes statistics: in total, of an epoch, or since earlier ones.

Deliveries and the filler's counts enter; `ReaderStats` leaves. Also lists the damaged samples that
a reader has skipped, and enforces their limit.
"""

from __future__ import annotations

import logging
import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from h5async.config.files import FileName, paths_text
from h5async.errors import ConfigError, DamagedError, Skipped
from h5async.fill.outcomes import Done, FillerStats
from h5async.index.datasettable import kinds_of
from h5async.index.layout import DatasetLayout
from h5async.observe.chunkuse import ChunkFacts, Used, direct_share
from h5async.observe.stats import ReaderStats
from h5async.opening.dataset import Samplings
from h5async.order.rows import SpanRows, StepRows
from h5async.read.queue import MAX_ENDS, MAX_WAITS, Taken, Turns
from h5async.samples.assembly import by_field
from h5async.spelling import named
from h5async.system.timeline import StageTimes, ThreadCounts

_MOST_LISTED = 10_000  # skipped samples
_log = logging.getLogger("h5async.reader")
_KEPT_EPOCHS = MAX_ENDS - 1  # one more end is kept: the one before the first epoch
_KEPT_WAITS = MAX_WAITS
_FEW = _KEPT_WAITS // _KEPT_EPOCHS  # waits in an epoch; those of all kept epochs then fit

Work = Callable[[], FillerStats]  # returns the work done up to its creation


class WaitTotals(NamedTuple):
    """The consumer's waits so far, without the first, which is start-up."""

    number: int = 0
    seconds: float = 0.0
    elapsed_seconds: float = 0.0  # from the first batch to the end of the last wait


class Waits:
    """The consumer's waits for batches; only it calls `note`, any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may interrupt `note`, and read
        self._last: deque[float] = deque(maxlen=_KEPT_WAITS)
        self.noted = WaitTotals()  # without those noted by the core
        self.before = WaitTotals()  # `noted` as it was when its last wait began
        self._begin: float | None = None
        self.turns: Turns | None = None  # the core, which notes waits, too

    @property
    def have_begun(self) -> bool:
        """Whether the first wait was noted."""
        return self._begin is not None

    def passed(self, at: float) -> float:
        """Return the seconds between the first batch and a time."""
        return at - (self._begin or 0.0)

    def note(self, begin: float, end: float) -> None:
        """Note a wait, in seconds of `time.perf_counter`; leave out the first one, start-up."""
        with self._lock:
            if self._begin is None:
                self._begin = end
                return
            self._catch_up()
            number, seconds, _ = self.noted
            self.before = WaitTotals(number, seconds, begin - self._begin)
            self._last.append(end - begin)
            self.noted = WaitTotals(number + 1, seconds + end - begin, end - self._begin)

    def _catch_up(self) -> None:
        """Add the waits that the core has noted since; under the lock."""
        if self.turns is not None:
            self._last.extend(self.turns.new_waits())

    @property
    def number(self) -> int:
        """Number of waits, including those noted by the core."""
        return self.noted.number + (0 if self.turns is None else self.turns.num_waits)

    def percentiles(self, end: int, begin: int) -> tuple[float, float]:
        """Return median and 99th percentile of the kept waits from number `begin` to `end`."""
        with self._lock:
            self._catch_up()
            later = self.number - end
            kept = sorted(islice(reversed(self._last), later, later + end - begin))
        if not kept:
            return 0.0, 0.0
        return _percentile(kept, 0.5), _percentile(kept, 0.99)


class _Moment(NamedTuple):
    """The amount delivered and the work done up to some time, as in `ReaderStats`."""

    batches: int = 0
    samples: int = 0
    skipped: int = 0
    nbytes: int = 0
    used: Used = Used()  # bytes that these samples need, each read and decoded once
    waits: WaitTotals = WaitTotals()
    work: FillerStats = FillerStats()
    reader: object = None  # whose moment this is


class _Mark(NamedTuple):
    """The counts from which a `_Moment` is computed, if it is needed.

    `batches`, `skipped`, `counted` (samples and rows, by the keys of `_sizes`) and `noted` (waits)
    were counted in Python, `taken` in the core.
    """

    batches: int
    skipped: int
    counted: Mapping[SpanRows | None, int]
    noted: WaitTotals
    taken: Taken
    work: Work

    @property
    def num_batches(self) -> int:
        """Number of batches, including the core's."""
        return self.batches + self.taken.batches

    @property
    def num_waits(self) -> int:
        """Number of waits, including the core's."""
        return self.noted.number + self.taken.waits


class _Span(NamedTuple):
    """The period of an epoch, with the percentiles of its waits, if already known."""

    begin: _Mark
    end: _Mark
    percentiles: tuple[float, float] | None
    epoch: int


class ReaderCounts:
    """Counts of deliveries, and of the consumer's waits.

    The consumer's thread counts; `stats` may be called from any thread. `kept_nbytes` limits
    decoded chunks kept for later batches.
    """

    def __init__(self, samplings: Samplings, kept_nbytes: int) -> None:
        layouts = self._layouts = samplings.layouts
        self._selection = samplings.selection
        self._kept_nbytes = kept_nbytes
        self._facts = ChunkFacts(samplings)
        # Bytes per sample (None) or per row of ragged samples: delivered, and needed for that.
        self._sizes: dict[SpanRows | None, tuple[int, Used]] = {}
        for (name, layout), one in zip(layouts.items(), samplings.rows, strict=True):
            key = one if isinstance(one, SpanRows) else None
            nbytes = layout.part_nbytes * (one.size if isinstance(one, StepRows) else 1)
            known, used = self._sizes.get(key, (0, Used()))
            self._sizes[key] = known + nbytes, used.plus(self._facts.used(name, nbytes))
        row_nbytes = sum(map(_sample_nbytes, layouts.values()))
        direct = sum(_sample_nbytes(one) * direct_share(one) for one in layouts.values())
        self._direct_share = direct / row_nbytes if row_nbytes else 1.0
        leaves = [leaf for layout in layouts.values() for leaf, _ in kinds_of(layout)]
        self._filters = tuple(dict.fromkeys(entry.label for y in leaves for entry in y.filters))
        # Batches that may be filled but not delivered.
        config = samplings.config
        self._ahead = max(0, config.prefetch - 1)
        self._is_scattered = config.shuffle == "full"
        self._most_flights = config.requests_in_flight * max(1, config.num_helpers)
        self.waits = Waits()
        self.upload_times = StageTimes()
        self.last: tuple[int, int] | None = None  # epoch and number, except given samples
        self._lock = threading.RLock()  # a signal handler may interrupt `note`, and read
        self._batches = self._skipped = 0
        self._ragged = [one for one in self._sizes if one is not None]
        self._columns = {one: samplings.rows.index(one) for one in self._ragged}  # the first one
        self._counted = dict.fromkeys([None, *self._ragged], 0)  # samples, and rows
        self._reader = object()
        self._epochs: deque[_Span] = deque(maxlen=_KEPT_EPOCHS)
        self._open_epoch = -1
        self._last_end = self._begin = self._mark(FillerStats)  # `_begin`: of `_open_epoch`
        # Epochs in the core that are noted: when the last one began, and the number of ends.
        self._seen_begin_ns = self._num_ends = 0
        self._done: Done = lambda in_core: FillerStats(counts=in_core)  # at these ends
        self._warned: set[str] = set()

    # --- the consumer's calls ---------------------------------------------------------------------

    def note_skipped(self, skipped: int) -> None:
        """Count samples that were left out of a batch."""
        with self._lock:
            self._skipped += skipped

    def note(self, index: NDArray[np.int64], skipped: int) -> None:
        """Count the samples of a delivered batch, and those that were left out of it."""
        counts = [(rows, int(rows.lengths(index).sum())) for rows in self._ragged]
        with self._lock:
            self._batches += 1
            self._skipped += skipped
            self._counted[None] += index.size
            for rows, count in counts:
                self._counted[rows] += count

    def note_wait(self, begin: float, end: float) -> None:
        """Note a wait, after catching up with an epoch that began in the core."""
        with self._lock:
            self._catch_up()
            self.waits.note(begin, end)

    def begin_epoch(self, epoch: int, work: Work) -> None:
        """Note that the last wait was for the first batch of an epoch."""
        with self._lock:
            now = self._mark(work)._replace(noted=self.waits.before)
            self._end(now)
            self._open_epoch, self._begin = epoch, now._replace(work=self._last_end.work)

    def end_epoch(self, work: Work) -> None:
        """Note the end of the epoch; harmless if none has begun."""
        with self._lock:
            self._catch_up()
            self._end(self._mark(work))

    def end_epoch_of_turns(self, done: Done) -> None:
        """Count and note the end of an epoch in the core; `done` is the work done elsewhere.

        It also holds for the ends of later epochs, until the next call.
        """
        with self._lock:
            self._catch_up()
            self._done, turns = done, self.waits.turns
            assert turns is not None
            turns.struct.num_ends += 1
            self._catch_up()

    @property
    def open_epoch(self) -> int:
        """The epoch whose batches are being delivered; -1 if none was begun, or it has ended."""
        with self._lock:
            self._catch_up()
            return self._open_epoch

    def _catch_up(self) -> None:
        """Note the epochs that have ended in the core, and one that has begun; under the lock."""
        turns = self.waits.turns
        while turns is not None and self._num_ends < turns.struct.num_ends:
            number = max(self._num_ends, turns.struct.num_ends - MAX_ENDS)
            of = turns.ended(number)
            if number + MAX_ENDS < turns.struct.num_ends:  # overwritten: the consumer has gone on
                continue
            self._begin_in_core(of.begin, of.epoch)
            self.last = of.epoch, of.batches - 1
            self._end(self._mark(partial(self._done, of.done), of.end), is_in_core=True)
            self._num_ends = number + 1
        if turns is not None and turns.struct.before.at_ns != self._seen_begin_ns:
            self._begin_in_core(turns.counts(before_epoch=True), turns.struct.begun)

    def _begin_in_core(self, before: Taken, epoch: int) -> None:
        """Note that an epoch has begun in the core, unless that was noted before."""
        if before.at_ns != self._seen_begin_ns:
            self._begin = self._mark(self._last_end.work, before)
            self._open_epoch, self._seen_begin_ns = epoch, before.at_ns

    def _end(self, end: _Mark, *, is_in_core: bool = False) -> None:
        """Note the end of the open epoch, if any; `is_in_core`: it ended there."""
        if self._open_epoch < 0:
            return
        begin = self._begin
        # It had ended before: its only batch was put back, or an exception interrupted this.
        is_again = self._epochs and self._epochs[-1].begin.num_batches == begin.num_batches
        if is_again:
            begin = self._epochs[-1].begin
        is_short = end.num_waits - begin.num_waits <= _FEW
        found = None if is_in_core and is_short else self._percentiles(begin, end)
        span = _Span(begin, end, found, self._open_epoch)
        if is_again:
            self._epochs[-1] = span
        else:
            self._epochs.append(span)
        self._open_epoch, self._last_end = -1, end

    def _percentiles(self, begin: _Mark, end: _Mark) -> tuple[float, float]:
        return self.waits.percentiles(end.num_waits, begin.num_waits)

    def _mark(self, work: Work, taken: Taken | None = None) -> _Mark:
        """Return a mark of now, or of when the core had `taken` so much; under the lock."""
        if taken is None:
            taken = Taken() if self.waits.turns is None else self.waits.turns.counts()
        counted = self._batches, self._skipped, self._counted.copy()
        return _Mark(*counted, self.waits.noted, taken, work)

    def new_warnings(self, found: Sequence[str]) -> list[str]:
        """Return the warnings that the caller has not seen yet."""
        new = [text for text in found if text not in self._warned]
        self._warned.update(new)
        return new

    # --- any thread's calls -----------------------------------------------------------------------

    def epoch_nbytes(self, samples: int) -> int:
        """Return the bytes of `samples` samples of the selection's mean length."""
        found, selection = 0, self._selection
        for rows, (nbytes, _) in self._sizes.items():
            if rows is None:
                found += nbytes * samples
            elif selection.size:
                selected = selection.samples(np.arange(selection.size))
                found += int(rows.lengths(selected).sum()) * nbytes * samples // selection.size
        return found

    @staticmethod
    def work(
        filler: Done,
        uploads: Mapping[str, int],
        device_chunks: int,
        device_nbytes: int,
        in_core: ThreadCounts,
    ) -> FillerStats:
        """Return the work of a filler, plus uploads, and chunks decoded on a GPU."""
        done = filler(in_core)
        counts, stages = done.counts, dict(done.stage_seconds)
        stages["plan"] += counts.plan_ns / 1e9
        stages["transform"] += counts.transform_ns / 1e9
        stages["upload"] += (uploads.get("upload", 0) + counts.upload_ns) / 1e9
        stages["read"] += counts.read_ns / 1e9
        stages["decode"] += counts.decode_ns / 1e9
        stages["place"] += counts.place_ns / 1e9
        stages["fetch"] += done.fetched.waited_ns / 1e9
        here = ThreadCounts(decoded_chunks=device_chunks, decoded_nbytes=device_nbytes)
        return done._replace(stage_seconds=stages, counts=counts.plus(here))

    def stats(
        self,
        since: ReaderStats | None,
        epoch: int | None,
        work: FillerStats,
        methods: Sequence[str],
        **how: Any,
    ) -> ReaderStats:
        """Return the statistics of a reader, as `AsyncReader.stats`.

        `methods` say what reads each column; `how` are other fields of `ReaderStats`.
        """
        if since is not None and epoch is not None:
            raise ConfigError("stats() takes since or epoch, not both")
        with self._lock:
            self._catch_up()
            now = self._mark(lambda: work)
            if epoch is None:
                end, begin = self._moment(now), self._since(since)
                if begin.batches > end.batches:
                    raise ConfigError(
                        f"since was taken at batch {begin.batches:,}, and this is batch"
                        f" {end.batches:,}: it is newer; give earlier statistics"
                    )
                percentiles = self.waits.percentiles(now.num_waits, begin.waits.number)
            else:
                span = self._span_of(epoch, now)
                begin, end, epoch = *map(self._moment, span[:2]), span.epoch
                percentiles = span.percentiles or self._percentiles(*span[:2])
        ways = by_field(dict(zip(self._layouts, methods, strict=True)), _both_ways)
        return self._made(begin, end, percentiles, epoch, ways=ways, **how)

    def _moment(self, mark: _Mark) -> _Moment:
        nbytes, used, turns, taken = 0, Used(), self.waits.turns, mark.taken
        samples = mark.counted[None] + taken.samples
        for rows, (of_each, used_of_each) in self._sizes.items():
            count = samples if rows is None else mark.counted[rows]
            if rows is not None and taken.num_rows:
                count += taken.num_rows[self._columns[rows]]
            nbytes, used = nbytes + count * of_each, used.plus(used_of_each, count)
        passed = mark.noted.elapsed_seconds
        if turns is not None and taken.at_ns:
            passed = max(passed, self.waits.passed(turns.seconds(taken.at_ns)))
        seconds = mark.noted.seconds + taken.wait_ns / 1e9
        waits = WaitTotals(mark.num_waits, seconds, passed)
        counts = mark.batches + taken.batches, samples, mark.skipped, nbytes
        return _Moment(*counts, used, waits, mark.work(), self._reader)

    def _since(self, since: ReaderStats | None) -> _Moment:
        if since is None:
            return _Moment()
        if not isinstance(since, ReaderStats):
            raise ConfigError(
                f"since takes an earlier result of stats(), found {type(since).__name__}"
            )
        begin = since._moment
        if not isinstance(begin, _Moment) or begin.reader is not self._reader:
            raise ConfigError(
                "since is of another reader; give an earlier result of this reader's stats(), from"
                " this process"
            )
        return begin

    def _span_of(self, epoch: int, now: _Mark) -> _Span:
        if isinstance(epoch, bool) or not isinstance(epoch, SupportsIndex):
            raise ConfigError(f"epoch takes a number, -1 for the last one, found {epoch!r}")
        epoch, found = operator.index(epoch), list(self._epochs)
        if self._open_epoch >= 0:
            found.append(_Span(self._begin, now, None, self._open_epoch))
        if epoch < 0 and -epoch <= len(found):
            return found[epoch]
        for span in reversed(found):
            if span.epoch == epoch:
                return span
        if not found:
            raise ConfigError(
                f"there are no statistics of epoch {epoch}: no batch of any was delivered yet"
            )
        kept = f"those of the last {_KEPT_EPOCHS} are kept, {found[0].epoch} to {found[-1].epoch}"
        if epoch < 0:
            raise ConfigError(f"epoch={epoch} goes back too far: there are {len(found)} ({kept})")
        raise ConfigError(f"there are no statistics of epoch {epoch}: {kept}")

    def _made(
        self,
        begin: _Moment,
        end: _Moment,
        percentiles: tuple[float, float],
        epoch: int | None,
        **how: Any,
    ) -> ReaderStats:
        work = end.work.plus(begin.work, -1)
        batches, counts, fetched = end.batches - begin.batches, work.counts, work.fetched
        # Samples decoded for upcoming batches are not wasted.
        ahead = self._ahead if how["num_threads"] and begin.work.counts == ThreadCounts() else 0
        share = (batches + ahead) / batches if batches else 1.0
        used = Used().plus(end.used.plus(begin.used, -1.0), share)
        encoded_nbytes = min(counts.read_nbytes, counts.decoded_nbytes * self._facts.stored_share)
        raw_nbytes = counts.read_nbytes - encoded_nbytes
        return ReaderStats(
            batches=batches,
            samples=end.samples - begin.samples,
            skipped=end.skipped - begin.skipped,
            nbytes=end.nbytes - begin.nbytes,
            elapsed_seconds=end.waits.elapsed_seconds - begin.waits.elapsed_seconds,
            wait_seconds=max(0.0, end.waits.seconds - begin.waits.seconds),
            wait_p50_seconds=percentiles[0],
            wait_p99_seconds=percentiles[1],
            stage_seconds=work.stage_seconds,
            gil_wait_seconds=counts.gil_wait_ns / 1e9,
            read_nbytes=counts.read_nbytes,
            decoded_chunks=counts.decoded_chunks,
            decoded_nbytes=counts.decoded_nbytes,
            fallback_reads=work.fallback_reads,
            broken_images=work.broken_images,
            requests=fetched.requests,
            requested_nbytes=fetched.requested_nbytes,
            retries=fetched.retries,
            direct_share=self._direct_share,
            filters=self._filters,
            decoded_per_used=_ratio(counts.decoded_nbytes, used.encoded),
            read_per_used=_ratio(raw_nbytes, used.raw),
            requested_per_used=_ratio(fetched.requested_nbytes, fetched.used_nbytes),
            epoch=epoch,
            first_batch=begin.batches,
            _least_decoded=_ratio(counts.decoded_nbytes - self._kept_nbytes, used.encoded),
            _least_read=_ratio(raw_nbytes - self._kept_nbytes, used.raw),
            _h5py_per_used=_ratio(counts.h5py_decoded_nbytes, used.by_h5py),
            _encoded_share=_ratio(encoded_nbytes, counts.read_nbytes),
            _flight_seconds=fetched.flight_ns / 1e9,
            _quickest_seconds=end.work.fetched.quickest_ns / 1e9,
            _most_flights=self._most_flights,
            _is_scattered=self._is_scattered,
            _waits=end.waits.number - begin.waits.number,
            _advice=self._facts.advice,
            _moment=end,
            **how,
        )


def _percentile(ascending: Sequence[float], share: float) -> float:
    """Return an interpolated percentile, as NumPy does (in 50 us, even for few values)."""
    below, part = divmod(share * (len(ascending) - 1), 1)
    first, second = ascending[int(below)], ascending[math.ceil(below + part)]
    return first + (second - first) * part


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0


def _sample_nbytes(layout: DatasetLayout) -> float:
    """Return the bytes of a sample; the mean if samples are ragged."""
    if not layout.is_ragged:
        return float(layout.part_nbytes)
    values = layout.num_samples if layout.spans is None else int(layout.spans[-1] - layout.spans[0])
    return layout.part_nbytes * values / max(1, layout.sample_count)


def _both_ways(one: str, other: str) -> str:
    return " and ".join(sorted({*one.split(" and "), *other.split(" and ")}))


class SkippedSamples:
    """The samples and `files` that a reader has skipped; only its consumer calls `note`.

    `most` is the option `max_skipped`, the limit for an epoch. `path` is for messages.
    """

    def __init__(
        self, path: FileName | Sequence[FileName], files: Sequence[Skipped], most: float | None
    ) -> None:
        self._what = paths_text(path)
        self._files, self._most = tuple(files), most
        self._samples: dict[tuple[str | None, int | None], Skipped] = {}
        self._epoch = self._last = -1  # of the last batch that had any: epoch and number
        self._count = 0  # in this epoch

    @property
    def listed(self) -> tuple[Skipped, ...]:
        """All files, and the first samples, each once, in the order in which they were found."""
        return (*self._files, *self._samples.values())

    def note(
        self, skipped: Sequence[Skipped], epoch: int, number: int, epoch_samples: int
    ) -> DamagedError | None:
        """Note the skipped samples of a batch; return an error if its epoch now has too many.

        `epoch_samples` is the number of samples in the epoch, of this rank.
        """
        if not self._samples:
            text = "%s: damaged samples are left out, and listed in reader.skipped; the first: %s"
            _log.warning(text, self._what, skipped[0].reason)
        for one in skipped:
            if len(self._samples) < _MOST_LISTED:
                self._samples.setdefault((one.file, one.sample), one)
        if epoch < 0 or self._most is None:
            return None
        is_new = epoch != self._epoch or number < self._last
        if (epoch, number) != (self._epoch, self._last):  # else it was noted before an interruption
            self._count = len(skipped) + (0 if is_new else self._count)
            self._epoch, self._last = epoch, number
        most = self._most if isinstance(self._most, int) else self._most * epoch_samples
        if self._count <= most:
            return None
        last = skipped[-1]
        error = DamagedError(
            f"{self._what}: {self._count:,} samples of epoch {epoch} are damaged, more than"
            f" {named('max_skipped', self._most)} allows; the last one: {last.reason}",
            filename=last.file,
            dataset=last.dataset,
        )
        error.samples = tuple(one.sample for one in skipped if one.sample is not None)
        return error
