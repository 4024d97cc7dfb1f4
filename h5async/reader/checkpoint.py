"""Writes and checks a reader's state: a saved position, and what the order depends on.

A state is a small dict of JSON types, the same in all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from h5async.config import ReaderConfig
from h5async.config.files import paths_text
from h5async.errors import ConfigError, ReadError
from h5async.index.fingerprint import fingerprint
from h5async.index.layout import DatasetLayout
from h5async.index.units import unit_nbytes
from h5async.opening.dataset import Samplings
from h5async.opening.samplelengths import digest
from h5async.reader.position import SavedPosition

_VERSION = 1
# Optional parts of a state; those in the first line are digests.
_DIGESTS = ("indices", "weights", "sampler")
_OPTIONAL = (*_DIGESTS, "batch_values", "bucket")
_MOST_RANKS = 1 << 20  # bounds what a bad state can cost


class Checkpoints:
    """Makes the states of one reader, and checks those that it is given."""

    def __init__(
        self,
        config: ReaderConfig,
        layouts: Mapping[str, DatasetLayout],
        samplings: Samplings,
    ) -> None:
        self._config = config
        self._samplings = samplings
        self._layouts = layouts

    def state(self, position: SavedPosition) -> dict[str, Any]:
        """Return the state of a reader at a position."""
        return {
            "version": _VERSION,
            "epoch": position.epoch,
            "position": position.start,
            "batch_size": position.batch_size,
            "world_size": position.world_size,
            **self._order_depends_on,
            **self._sampler_state(position.epoch),
        }

    def _sampler_state(self, epoch: int) -> dict[str, Any]:
        """Return the sampler's state at the beginning of an epoch, if there is one."""
        sampler = self._samplings.sampler
        return {} if sampler is None else {"sampler": sampler.state(epoch)}

    def position(self, state: Mapping[str, Any]) -> SavedPosition:
        """Return the position in a state, which must fit the reader.

        Raises `ConfigError` if it was saved with other options or is not a state, and `ReadError`
        if a file has changed since.
        """
        if not _is(state.get("version"), _VERSION):
            raise ConfigError(
                f"the state has version {state.get('version')}, and this h5async reads version"
                f" {_VERSION}; start anew, without the state"
            )
        self._check_order(state)
        numbers = [state.get(n) for n in ("epoch", "position", "batch_size", "world_size")]
        if (
            not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)  # (not a bool)
            or not all(numbers[2:])
            or cast("int", numbers[3]) > _MOST_RANKS
        ):
            raise ConfigError(
                f"the state holds no valid position: {dict(state)!r}; give what state_dict()"
                " returned"
            )
        position = SavedPosition(*cast("list[int]", numbers))
        sampler = self._samplings.sampler
        if sampler is not None:
            sampler.restore(position.epoch, state["sampler"])
            if sampler.draws_batches:  # each stands for `batch_size` positions
                own = self._config.batch_size
                start = position.start // position.batch_size * own
                position = position._replace(start=start, batch_size=own)
        return position

    def _check_order(self, state: Mapping[str, Any]) -> None:
        """Check that state and reader have the same order of samples."""
        for name in _OPTIONAL:
            mine = name in self._order_depends_on
            mine = self._config.sampler is not None if name == "sampler" else mine
            if (name in state) != mine:
                who, other = ("reader", "state") if mine else ("state", "reader")
                raise ConfigError(
                    f"the {who} has {name}, and the {other} has none; give the reader what it had"
                    " when the state was saved, or start anew, without the state"
                )
        for name, value in self._order_depends_on.items():
            if _is(state.get(name), value):
                continue
            if name == "fingerprint":
                raise ReadError(
                    f"{paths_text(self._config.hdf5_path)}: a file has changed since the state"
                    " was saved: its size, shapes, dtypes, chunks, sequences or the lengths of its"
                    " samples differ; start anew, without the state"
                )
            if name == "num_samples":
                raise ConfigError(
                    f"the state was saved from files with {state.get(name)!r} samples, and the"
                    f" files of this reader have {value}; give it the same files, or start anew,"
                    " without the state"
                )
            if name == "lengths":
                raise ReadError(
                    f"{paths_text(self._config.hdf5_path)}: samples have other lengths than when"
                    " the state was saved; start anew, without the state"
                )
            if name in _DIGESTS:
                raise ConfigError(
                    f"the state was saved with other {name}; give the reader what it had then, or"
                    " start anew, without the state"
                )
            raise ConfigError(
                f"the state was saved with {name}={state.get(name)!r}, and this reader has"
                f" {value!r}; give the reader the same, or start anew, without the state"
            )

    @functools.cached_property
    def _order_depends_on(self) -> dict[str, Any]:
        """Everything that an order of samples depends on."""
        config = self._config
        found: dict[str, Any] = {
            "seed": config.seed,
            "shuffle": config.shuffle,
            "num_samples": next(iter(self._layouts.values())).sample_count,
            "fingerprint": self._fingerprint(),
        }
        if config.shuffle == "window":
            found["window_bytes"] = config.window_bytes
        if not self._samplings.selection.is_prefix or (
            self._samplings.selection.size != found["num_samples"]
        ):
            found["indices"] = self._samplings.selection.digest()
        if config.weights is not None:
            found["weights"] = self._samplings.weights_digest()
            found["epoch_samples"] = self._samplings.epoch_samples
        lengths = self._samplings.lengths
        if lengths is not None:
            given = {"batch_values": lengths.values, "bucket": lengths.bucket}
            found |= {name: value for name, value in given.items() if value is not None}
            found["lengths"] = digest(lengths)
        return found

    def _fingerprint(self) -> str:
        """Return a hash of the data's structure, as far as the order depends on it."""
        layouts, sequences = list(self._layouts.values()), self._samplings.sequences
        also = [sequences.starts, sequences.ends]
        if self._config.shuffle == "window":
            also.append(np.array([*map(unit_nbytes, layouts)]))
        return fingerprint(layouts, *also)


def _is(found: object, expected: object) -> bool:
    """Compare values of a state: True and 1.0 are not 1."""
    return type(found) is type(expected) and found == expected
