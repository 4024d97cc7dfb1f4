"""Reads what a saved index has of files: the options of a reader enter; facts leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from h5async.config import ReaderConfig
from h5async.errors import H5AsyncError
from h5async.index.layout import DatasetLayout
from h5async.index.links import Consulted, Reach
from h5async.index.savedindex import IndexedFile
from h5async.io.stores import absolute_name
from h5async.opening.dataset import grouping_of, on_indexed
from h5async.opening.fieldkinds import with_kinds
from h5async.opening.filefacts import Need, encoded_kind, list_known, needs_of, read_known
from h5async.samples.fieldkind import HEAP


def index_files(
    config: ReaderConfig, reach: Reach, refused: list[H5AsyncError]
) -> Iterator[IndexedFile]:
    """Yield the index of each file; add why datasets have no layout to `refused`."""
    tell = on_indexed.get()
    grouping = grouping_of(config, reach)
    needs: dict[str, Need] = {}
    if config.fields is not None:
        needs = needs_of(with_kinds(config, reach, grouping, {})[1], grouping, config)
    for number, path in enumerate(config.files, 1):
        consulted = Consulted()
        recorded = replace(reach, consulted=consulted)
        if needs:
            found = read_known(path, needs, recorded, grouping)
            layouts = {need.wanted: found[name] for name, need in needs.items()}
            for wanted in [one for one in layouts if one.kind == HEAP]:
                layouts |= encoded_kind(path, wanted, recorded, grouping)
        else:
            layouts = {}
            for wanted, layout in list_known(path, recorded, config.num_dim, grouping):
                if isinstance(layout, DatasetLayout):
                    layouts[wanted] = layout
                else:
                    refused.append(layout)
        yield IndexedFile(absolute_name(path), layouts, consulted)
        if tell is not None:
            tell(number, len(config.files))
