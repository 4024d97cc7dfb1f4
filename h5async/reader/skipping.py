"""Keeps what a reader has left out: damaged files, and damaged samples of delivered batches.

Batches and their skipped samples enter; a bounded list leaves, or the error for too many of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from h5async.config.files import FileName, paths_text
from h5async.errors import DamagedError, Skipped
from h5async.spelling import named

_MOST_LISTED = 10_000  # samples
_log = logging.getLogger("h5async.reader")


class SkippedSamples:
    """The samples and `files` that a reader has left out; only its consumer notes any.

    `most` is the option `max_skipped`, the limit for an epoch. `path` is for messages.
    """

    def __init__(
        self, path: FileName | Sequence[FileName], files: Sequence[Skipped], most: float | None
    ) -> None:
        self._what = paths_text(path)
        self._files, self._most = tuple(files), most
        self._samples: dict[tuple[str | None, int | None], Skipped] = {}
        self._epoch = self._last = -1  # and the number of the last batch that had any
        self._count = 0  # in this epoch

    @property
    def listed(self) -> tuple[Skipped, ...]:
        """All files, and the first samples, each once, in the order in which they were found."""
        return (*self._files, *self._samples.values())

    def note(
        self, skipped: Sequence[Skipped], epoch: int, number: int, epoch_samples: int
    ) -> DamagedError | None:
        """Note the skipped samples of a batch; return an error if its epoch now has too many.

        `epoch_samples` are those of the epoch in this rank.
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
