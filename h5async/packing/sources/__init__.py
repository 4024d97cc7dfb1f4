"""Finds the kind of a source: paths or objects enter, a source of samples to pack leaves."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from h5async.config.files import matching_files
from h5async.errors import ConfigError, ReadError
from h5async.packing.sources import folders, tables
from h5async.packing.sources.arrays import ArraySource, RowSource, array_files
from h5async.packing.sources.base import Source, reading_file
from h5async.packing.sources.folders import FolderSource
from h5async.packing.sources.tables import (
    EpisodeSource,
    HuggingFaceSource,
    TableSource,
    saved_dataset,
)
from h5async.packing.writeoptions import PackOptions

_ARRAYS = (".npy", ".npz")
_SAVED = ("state.json", "dataset_dict.json")  # of datasets of Hugging Face
_KINDS = (
    "folders of images or audio, a folder of episodes, a dataset that datasets has saved, or .tar,"
    " .tar.gz, .parquet, .arrow, .feather, .csv, .npy and .npz files"
)


def open_source(sources: Any, options: PackOptions) -> Source:
    """Return the source that paths or objects are.

    ConfigError if it is none; H5AsyncError if it cannot be read.
    """
    if isinstance(sources, str | os.PathLike):
        return _at([Path(sources)], options)
    if type(sources).__module__.partition(".")[0] == "datasets" and hasattr(sources, "with_format"):
        return HuggingFaceSource(sources, options.fill)
    if isinstance(sources, Mapping):
        return ArraySource(sources, "the arrays")
    if isinstance(sources, Sequence) and sources and isinstance(sources[0], str | os.PathLike):
        return _at([Path(one) for one in sources], options)
    if isinstance(sources, Iterable):
        return RowSource(sources, options.varying)
    raise ConfigError(f"a {type(sources).__name__} cannot be packed; give {_KINDS}, or an iterable")


def _at(given: Sequence[Path], options: PackOptions) -> Source:
    paths = [Path(path) for path in matching_files(given)]
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise ReadError(f"{missing} cannot be packed: there is no such file or folder")
    are_folders = {path.is_dir() for path in paths}
    if are_folders == {True, False}:
        raise ConfigError(f"{paths[0]} and others are files and folders; give only one of these")
    if are_folders == {True}:
        return _in_folders(paths, options)
    suffixes = sorted({path.suffix.lower() for path in paths})
    if all(folders.ENDINGS.search(path.name) for path in paths):
        return folders.tar_source(paths)
    if set(suffixes) <= set(_ARRAYS):
        return array_files(paths, options.memory)
    if len(suffixes) == 1 and suffixes[0] in tables.SUFFIXES:
        return TableSource(paths, options.fill)
    raise ConfigError(f"{paths[0]} is not of a kind that can be packed; give {_KINDS}")


def _in_folders(paths: Sequence[Path], options: PackOptions) -> Source:
    """Return the source that folders of one kind are."""
    folder = paths[0]
    if len(paths) == 1 and (folder / "meta" / "info.json").is_file():
        return EpisodeSource(folder, options.fill)
    if len(paths) == 1 and any((folder / name).is_file() for name in _SAVED):
        return HuggingFaceSource(saved_dataset(folder), options.fill)
    with reading_file(folder):
        for kind, suffixes in folders.SUFFIXES.items():
            walked = chain.from_iterable(os.walk(path, followlinks=True) for path in paths)
            if any(name.lower().endswith(suffixes) for _, _, names in walked for name in names):
                return FolderSource(paths, kind)
        files = [file for path in paths for file in sorted(path.rglob("*"))]
        ends = (
            folders.ENDINGS,
            *(re.compile(f"{one}$", re.I) for one in (*tables.SUFFIXES, ".npy")),
        )
        for end in ends:
            found = [file for file in files if end.search(file.name)]
            if found:
                return _at(found, options)
    raise ConfigError(f"{folder} has nothing that can be packed; give {_KINDS}")
