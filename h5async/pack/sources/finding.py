"""Finds the kind of a source by what its path leads to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from h5async.errors import ConfigError
from h5async.pack.encodedsamples import KeptImages, ResizedImages, Samples
from h5async.pack.options import PackOptions
from h5async.pack.sources.folders import IMAGES, FolderSource
from h5async.pack.sources.source import Source


def open_source(sources: Any, options: PackOptions) -> Source:
    """Return the source that paths or objects are; ConfigError if it is none."""
    paths = [sources] if isinstance(sources, str | os.PathLike) else sources
    folder = Path(paths[0])
    if folder.is_dir():
        return FolderSource(folder, IMAGES, _images(options))
    raise ConfigError(f"{folder} is nothing that can be packed")


def _images(options: PackOptions) -> Samples:
    if options.size is None:
        return KeptImages(verifies=options.verify)
    return ResizedImages(options.size)
