"""Gets the layouts of a reader's files from saved indices while these are valid, or by indexing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from h5async.config.files import FileName, is_index
from h5async.index.indexcache import open_cache
from h5async.index.layout import DatasetLayout
from h5async.index.links import Consulted, Reach
from h5async.index.savedindex import NamedIndex, Wanted


def known_of_files(
    paths: Sequence[FileName],
    wanted: Mapping[str, Wanted],
    read: Callable[[FileName, Sequence[str], Reach], Mapping[str, DatasetLayout]],
    reach: Reach,
    cache: bool | Path,
    indices: Mapping[FileName, NamedIndex] = MappingProxyType({}),
) -> Iterator[dict[str, DatasetLayout]]:
    """Yield the facts wanted of each file, in the order of the files.

    Parameters
    ----------
    paths
        HDF5 files, and saved indices (``.h5idx``), each of which represents its files.
    wanted
        By name.
    read
        Reads facts that no index has: some names, of one file.
    reach
        Which other files may be read, and how.
    cache
        Where to store layouts; see `open_cache`.
    indices
        Saved indices that are already open.

    Raises
    ------
    H5AsyncError
        As `read`; `ReadError` if a saved index cannot be used.
    """
    plain = [path for path in paths if not is_index(path)]
    kept = open_cache(cache, plain, list(wanted.values()), reach) if plain else None
    number = 0
    for path in paths:
        if is_index(path):
            index = indices.get(path) or NamedIndex(path, reach)
            yield from _known_of_index(index, wanted, read, reach)
            continue
        known = {} if kept is None else kept.find(number)
        found: Mapping[str, DatasetLayout]
        if not known and kept is not None:
            consulted = Consulted()
            found = read(path, list(wanted), replace(reach, consulted=consulted))
            kept.note(number, {one: found[name] for name, one in wanted.items()}, consulted)
        elif kept is None:
            found = read(path, list(wanted), reach)
        else:
            found = {name: known[one] for name, one in wanted.items()}
        number += 1
        yield dict(found)
    if kept is not None:
        kept.save()


def _known_of_index(
    index: NamedIndex,
    wanted: Mapping[str, Wanted],
    read: Callable[[FileName, Sequence[str], Reach], Mapping[str, DatasetLayout]],
    reach: Reach,
) -> Iterator[dict[str, DatasetLayout]]:
    """Yield the facts in a saved index; others are read from its files."""
    several = list(wanted.values())
    for number, name in enumerate(index.paths):
        known = index.find(number, several, reach)
        missing = [name for name, one in wanted.items() if one not in known]
        found = read(name, missing, reach) if missing else {}
        stamp = index.stamp(number)
        for layout in found.values():
            if layout.file == name and layout.stamp != stamp:
                raise index.changed(name)
        yield {field: found.get(field) or known[one] for field, one in wanted.items()}
