"""Reads what a saved index has of files: the options of a reader enter; facts leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from h5async.config import ReaderConfig
from h5async.config.files import FileName
from h5async.errors import H5AsyncError
from h5async.index.layout import DatasetLayout
from h5async.index.links import Consulted, Reach
from h5async.index.savedindex import IndexedFile
from h5async.io.metadatafile import opening_ahead
from h5async.io.stores import absolute_name, far_names
from h5async.opening.dataset import grouping_of, on_indexed
from h5async.opening.fieldkinds import with_kinds
from h5async.opening.filefacts import Need, encoded_kind, list_known, needs_of, read_known
from h5async.opening.filevalues import reach_of
from h5async.samples.fieldkind import HEAP
from h5async.system.jobs import run_jobs

_FILES_OF_JOB = 16


def index_files(
    config: ReaderConfig, reach: Reach, refused: list[H5AsyncError], *, ray: str | None = None
) -> Iterator[IndexedFile]:
    """Yield the index of each file; add why datasets have no layout to `refused`.

    If `ray` is a cluster, jobs there index some files each.
    """
    tell, paths, number = on_indexed.get(), config.files, 0
    step = 1 if ray is None else _FILES_OF_JOB
    jobs = [paths[begin : begin + step] for begin in range(0, len(paths), step)]
    for found in run_jobs(_Indexing(config, reach), jobs, ray):
        for file, reasons in found:
            refused += reasons
            yield file
            number += 1
            if tell is not None:
                tell(number, len(paths))


class _Indexing:
    """Indexes files: here, or in other processes."""

    def __init__(self, config: ReaderConfig, reach: Reach | None) -> None:
        self._config, self._reach = config, reach
        self._needs: dict[str, Need] | None = None

    def __reduce__(self) -> Any:
        """Return what another process needs."""
        return _Indexing, (self._config, None)

    def __call__(self, paths: Sequence[FileName]) -> list[tuple[IndexedFile, list[H5AsyncError]]]:
        """Return the index of each file, and why datasets have no layout."""
        if self._reach is not None:
            return [self._index(path, self._reach) for path in paths]
        reach = reach_of(self._config)
        with opening_ahead(far_names(paths)):
            return [self._index(path, reach) for path in paths]

    def _index(self, path: FileName, reach: Reach) -> tuple[IndexedFile, list[H5AsyncError]]:
        config, grouping = self._config, grouping_of(self._config, reach)
        if self._needs is None:
            self._needs = {}
            if config.fields is not None:
                fields = with_kinds(config, reach, grouping, {})[1]
                self._needs = needs_of(fields, grouping, config)
        consulted, refused = Consulted(), list[H5AsyncError]()
        recorded = replace(reach, consulted=consulted)
        if self._needs:
            found = read_known(path, self._needs, recorded, grouping)
            layouts = {need.wanted: found[name] for name, need in self._needs.items()}
            for wanted in [one for one in layouts if one.kind == HEAP]:
                layouts |= encoded_kind(path, wanted, recorded, grouping)
        else:
            layouts = {}
            for wanted, layout in list_known(path, recorded, config.num_dim, grouping):
                if isinstance(layout, DatasetLayout):
                    layouts[wanted] = layout
                else:
                    refused.append(layout)
        return IndexedFile(absolute_name(path), layouts, consulted), refused
