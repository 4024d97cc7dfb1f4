"""Reads the layouts of a reader's files: out of saved indices, as far as these hold, or anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from h5async.config import Field
from h5async.config.files import INDEX_SUFFIX
from h5async.index.consulted import Consulted
from h5async.index.groups import Grouping
from h5async.index.indexcache import open_cache
from h5async.index.layout import DatasetLayout
from h5async.index.links import Reach
from h5async.index.metadata import read_layouts
from h5async.index.savedindex import NamedIndex, Wanted


def layouts_of_files(
    paths: Sequence[Path],
    fields: Mapping[str, Field],
    reach: Reach,
    cache: bool | Path,
    grouping: Grouping | None = None,
) -> Iterator[dict[str, DatasetLayout]]:
    """Yield the layouts of all fields in each file, in the order of the files.

    Parameters
    ----------
    paths
        HDF5 files, and saved indices (``.h5idx``), each of which stands for its files.
    fields
        By name.
    reach
        Which other files may be read, and how.
    cache
        Where to keep what was learnt; see `open_cache`.
    grouping
        Which groups of the files are sequences, that fields are joined of.

    Raises
    ------
    ReadError
        If a saved index cannot be used, or as `read_layouts` does.
    H5AsyncError
        As `read_layouts` does.
    """
    plain = [path for path in paths if path.suffix != INDEX_SUFFIX]
    wanted = {name: Wanted.of(field, grouping) for name, field in fields.items()}
    kept = open_cache(cache, plain, list(wanted.values()), reach) if plain else None
    number = 0
    for path in paths:
        if path.suffix == INDEX_SUFFIX:
            yield from _layouts_of_index(path, fields, reach, grouping)
            continue
        known = {} if kept is None else kept.find(number)
        if not known and kept is not None:
            consulted = Consulted()
            found = read_layouts(path, fields, replace(reach, consulted=consulted), grouping)
            kept.note(number, {one: found[name] for name, one in wanted.items()}, consulted)
        elif kept is None:
            found = read_layouts(path, fields, reach, grouping)
        else:
            found = {name: known[one] for name, one in wanted.items()}
        number += 1
        yield found
    if kept is not None:
        kept.save()


def _layouts_of_index(
    path: Path, fields: Mapping[str, Field], reach: Reach, grouping: Grouping | None
) -> Iterator[dict[str, DatasetLayout]]:
    """Yield what a saved index has; what it does not have is read from its files."""
    index = NamedIndex(path, reach)
    wanted = {name: Wanted.of(field, grouping) for name, field in fields.items()}
    several = list(wanted.values())
    for number, name in enumerate(index.paths):
        known = index.find(number, several, reach)
        missing = {name: field for name, field in fields.items() if wanted[name] not in known}
        found = read_layouts(Path(name), missing, reach, grouping) if missing else {}
        stamp = index.stamp(number)
        for layout in found.values():
            if layout.file == name and layout.stamp != stamp:
                raise index.changed(name)
        yield {
            field: found[field] if field in missing else known[one] for field, one in wanted.items()
        }
