"""Opens the dataset: indexes its files, and makes the orders of its samples.

Options enter; the layout of each field leaves, over all files, and how samples are dealt.
"""

from __future__ import annotations

from collections.abc import Mapping

from h5async.config import ReaderConfig
from h5async.core.binding import mapping_mode
from h5async.errors import DatasetError, taking_memory
from h5async.index.joined import join_layouts
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach
from h5async.index.opening import layouts_of_files
from h5async.io.localfile import read_ahead
from h5async.order.sampling import Order, OrderKey, Sampling


def open_dataset(config: ReaderConfig) -> dict[str, DatasetLayout]:
    """Index the files one by one; the system reads the beginning of the first one meanwhile.

    Returns
    -------
    dict
        By field name, in field order.

    Raises
    ------
    H5AsyncError
        As `AsyncReader` says.
    """
    reach = Reach(config.allow_external, config.allow_missing, mapping_mode(config.io))
    fields, files = config.batch_fields, config.files
    found: dict[str, list[DatasetLayout]] = {name: [] for name in fields}
    known = layouts_of_files(files, fields, reach, config.index_cache)
    for number, layouts in enumerate(known):
        _check_lengths(layouts)
        for name, layout in layouts.items():
            found[name].append(layout)
        if not number and len(files) > 1 and not config.names_index:
            samples = config.batch_size * config.prefetch
            read_ahead(files[0], samples * sum(layout.row_nbytes for layout in layouts.values()))
    return {name: join_layouts(several) for name, several in found.items()}


class Samplings:
    """Orders of the samples of a dataset, each made once. Safe to use from many threads.

    Parameters
    ----------
    config, layouts
        What they depend on.
    """

    def __init__(self, config: ReaderConfig, layouts: Mapping[str, DatasetLayout]) -> None:
        self._config = config
        self._layouts = list(layouts.values())
        self._made: dict[OrderKey, Sampling] = {}

    def at(self, order: OrderKey) -> Sampling:
        """Return the order of samples, and how it is dealt."""
        found = self._made.get(order)
        if found is None:
            what = f"{self._layouts[0].file}: the order of samples"
            with taking_memory(what, 'use shuffle="full"'):
                found = self._new(*order)
            # The others are those of epochs that are over, nearly always.
            self._made = {order: found}
        return found

    def _new(self, rank: int, world_size: int, *resumed: int) -> Sampling:
        config, is_window = self._config, self._config.shuffle == "window"
        return Sampling(
            num_samples=self._layouts[0].num_samples,
            batch_size=config.batch_size,
            shuffle=config.shuffle,
            seed=config.seed,
            drop_last=config.drop_last,
            window=self._window(config.batch_size, world_size) if is_window else None,
            rank=rank,
            world_size=world_size,
            resumed=(resumed[0], self._window(*resumed[1:])) if resumed and is_window else None,
        )

    def _window(self, batch_size: int, world_size: int) -> Order:
        from h5async.order.window import window_order

        config = self._config
        return window_order(self._layouts, config.window_bytes, config.seed, batch_size, world_size)


def _check_lengths(layouts: Mapping[str, DatasetLayout]) -> None:
    items = list(layouts.items())
    name, first = items[0]
    for other_name, other in items[1:]:
        if other.num_samples != first.num_samples:
            raise DatasetError(
                f'{first.file}: dataset "{first.path}" ({name}) has {first.num_samples} samples'
                f' along dimension {first.sample_axis}, but "{other.path}" ({other_name}) has'
                f" {other.num_samples} along dimension {other.sample_axis}; all fields must"
                " have the same number of samples"
            )
