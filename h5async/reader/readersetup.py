"""Opens everything a reader needs: dataset, orders of samples, device, and the slots' memory.

It also checks samples that the caller gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h5async.config import ReaderConfig
from h5async.config.files import paths_text
from h5async.core.binding import load_core
from h5async.deliver.device import Device, DeviceSlot, SlotContents
from h5async.deliver.devicepolicy import DevicePolicy, find_device
from h5async.errors import ConfigError, DeviceError, taking_memory
from h5async.fill.finishing import masks_of
from h5async.fill.outcomes import FillerStats
from h5async.fill.resident import Budget, Residency, wanted_kept_nbytes
from h5async.index.layout import DatasetLayout
from h5async.opening.dataset import OpenedDataset, Samplings, open_dataset
from h5async.opening.limits import MemoryBudget, made_nbytes, slot_transforms
from h5async.opening.selecting import sample_numbers
from h5async.order.rows import SpanRows
from h5async.samples.assembly import SlotMemory, by_field, names_of, outlines_of
from h5async.samples.fieldkind import FieldKind, field_of
from h5async.spelling import named

if TYPE_CHECKING:
    from h5async.process.helper import HelperFiller


class ReaderSetup:
    """All parts of a reader that do not change after `open`, except the filler.

    `transforms` are by column; a slot has room for `rows` samples; the device keeps the samples in
    `cache`. The dataset has `sample_count` samples, of which `num_samples` are selected.
    """

    def __init__(self, config: ReaderConfig) -> None:
        # The number of threads is fixed here: affinity and quotas may change later.
        self.config = config.model_copy(update={"num_threads": config.thread_count})
        self._fewer_threads_do = config.num_threads is None
        self.kinds: Mapping[str, FieldKind] = {}
        self.static: Mapping[str, Any] = {}
        self.device: Device = Device()
        self.slots: list[DeviceSlot] = []
        self.cache: Residency | Budget | None = None

    def open(self, helper: HelperFiller | None) -> None:
        """Open everything, through helper processes if there are any."""
        self.helper = helper
        if helper is not None:
            helper.begin()  # meanwhile CuPy is imported here, if there is a GPU
        self.device = find_device(self.config.device, self.config.pin_memory)
        self._open_dataset()
        self._plan_memory()
        self._open_slots()

    def _open_dataset(self) -> None:
        chosen = None
        if self.helper is None:
            self.opened = open_dataset(self.config)
        else:
            found = self.helper.open()
            fields = {name: kind.field for name, kind in found.kinds.items()}
            config = self.config.model_copy(update={"fields": fields})
            sent = found.layouts, found.kinds, found.static, found.skipped
            self.opened, chosen = OpenedDataset(config, *sent), found.chosen
        self.config, self.layouts, self.kinds, self.static, _ = self.opened
        self.samplings = Samplings(self.config, self.layouts, chosen)
        self.path = paths_text(self.config.hdf5_path)
        self.num_samples = self.samplings.selection.size
        self.sample_count = next(iter(self.layouts.values())).sample_count
        self.names = names_of(self.kinds)
        self.masks = masks_of(self.kinds, self.layouts, self.samplings.rows)

    def _plan_memory(self) -> None:
        config, layouts, samplings = self.config, self.layouts, self.samplings
        self.rows = samplings.most_samples()
        self.transforms = slot_transforms(config, layouts, samplings, self.rows)
        # Of fields whose batches have limited room: the maximum number of rows, and the rows.
        self._limits = [
            (transform.capacity, rows)
            for transform, rows in zip(self.transforms.values(), samplings.rows, strict=True)
            if isinstance(rows, SpanRows) and transform.capacity is not None
        ]
        for name, one in self.transforms.items():
            if self.is_on_gpu and one.dtype.name == "bfloat16":
                raise DeviceError(
                    f"CuPy has no bfloat16, which field {field_of(name)!r} has; choose"
                    f" {named('device', 'cpu')}, and have PyTorch upload or convert tensors"
                )
        leaves = self.is_on_gpu and self.helper is None and config.postprocess is None
        can_transform = self.device.can_transform if leaves else None
        self.outlines = outlines_of(self.kinds, self.transforms, can_transform)
        budget = MemoryBudget(
            config,
            layouts,
            self.transforms,
            self.rows,
            made_nbytes=made_nbytes(self.kinds, self.outlines, self.rows),
            selection=samplings.selection,
            fewer_threads_do=self._fewer_threads_do,
        )
        budget.check()
        self.device_policy = DevicePolicy(
            config,
            self.device,
            layouts,
            self.transforms,
            self.rows,
            budget.beside_rows_nbytes,
            [name for name, kind in self.kinds.items() if kind.is_mapped],
        )
        selected = self.num_samples / max(1, self.sample_count)
        # Per column, bytes of decoded chunks that would help later batches.
        self.wanted_nbytes = wanted_kept_nbytes(config, layouts, samplings.rows, selected)
        self.memory_plan = budget.plan(self.device_policy.host_nbytes, self.wanted_nbytes)
        threads = min(config.filler_threads, self.memory_plan.most_threads)
        self.has_threads = threads > 0  # a helper process always has one
        self.num_threads = max(1, config.num_helpers) * max(1, threads)

    def _open_slots(self) -> None:
        config, file = self.config, next(iter(self.layouts.values())).file
        what = f"{file}: {config.prefetch} batches of {self.rows} samples"
        with taking_memory(what, f"make {named('batch_size')} or {named('prefetch')} smaller"):
            self.slots = self.device.open_slots(
                config.prefetch,
                SlotContents(
                    self.rows,
                    self.transforms,
                    self.outlines,
                    self.device_policy.formats,
                    config.postprocess is not None,
                    None if self.helper is None else self.helper.shared,
                ),
            )
        if config.cache == "device":
            self.cache = self.device.open_cache(self.samplings.selection, config.cache_bytes)

    def uploaded_by_core(self) -> tuple[Any, Sequence[SlotMemory]]:
        """Return the core's uploads, None if it makes none, and the memory they go to."""
        core = None if self.masks else load_core()
        uploads = None if core is None else self.device.uploads(core)
        return uploads, () if uploads is None else [slot.delivered for slot in self.slots]

    # --- given samples ----------------------------------------------------------------------------

    @property
    def takes_any_samples(self) -> bool:
        """Whether a batch may have any samples of the dataset, up to a slot's size."""
        is_limited = self._limits or self.config.keeps_rows
        return not is_limited and self.samplings.all_are_possible

    def samples(self, index: ArrayLike) -> NDArray[np.int64]:
        """Return sample numbers as a new, non-empty array, or raise `ConfigError`."""
        where = f"index: {self.path}"
        found = sample_numbers(index, self.sample_count, where)
        if not found.size:
            raise ConfigError("index: give at least one sample number, found none")
        self.samplings.check(found, where)
        return found

    def samples_of_batch(self, index: ArrayLike) -> NDArray[np.int64]:
        """Do the same for the samples of a batch, which must fit into a slot and the cache."""
        found, config = self.samples(index), self.config
        if found.size > self.rows:
            remedy = "use read()"  # a larger batch_size would not help
            if self.rows == config.batch_size:
                remedy = f"make {named('batch_size')} larger, or {remedy}"
            elif config.batch_values is not None:
                remedy = f"make {named('batch_values')} larger, or {remedy}"
            raise ConfigError(
                f"index: a batch of this reader has {self.rows} samples at most, found"
                f" {found.size}; {remedy}"
            )
        for capacity, rows in self._limits:
            total = rows.total(found)
            if total > capacity:
                raise ConfigError(
                    f"index: these samples have {total:,} values, and a batch of this reader"
                    f" has room for {capacity:,}; give fewer, or use read()"
                )
        if config.keeps_rows and not self.samplings.selection.are_in(found).all():
            raise ConfigError(
                "index: with a cache, only samples that `indices` selects can be requested; use"
                " read(), or leave out the cache"
            )
        return found

    # --- facts ------------------------------------------------------------------------------------

    @property
    def field_layouts(self) -> dict[str, DatasetLayout]:
        """Layouts by field; for a sparse field, that of its stored values."""
        return by_field(self.layouts, lambda values, indices: values)

    @property
    def is_on_gpu(self) -> bool:
        """Whether batches are delivered on a GPU."""
        return self.device.name != "cpu"

    @property
    def device_cache(self) -> Residency | None:
        """The samples that the device keeps; None if it keeps none."""
        return self.cache if isinstance(self.cache, Residency) else None

    def cache_text(self, done: FillerStats) -> str:
        """Say where rows are kept for later epochs; `done` is the filler's work."""
        return done.cache if self.cache is None else str(self.cache)

    def close(self) -> None:
        """Free the memory of the slots, after all work."""
        self.device.close()
        self.slots = []
