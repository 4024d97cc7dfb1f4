"""Lists folders of episodes, as LeRobot writes them: Parquet files enter; rows, and ends, leave.

``episode_ends`` says where each episode ends, so that ``Sequences(ends="episode_ends")`` reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from h5async.errors import DatasetError
from h5async.packing.sources.base import reading_file
from h5async.packing.sources.tables import Fill, TableSource

_EPISODE = "episode_index"


class EpisodeSource(TableSource):
    """The rows of all episodes, in order."""

    files_are_sources = False

    def __init__(self, folder: Path, fill: Fill) -> None:
        paths = sorted((folder / "data").rglob("*.parquet"))
        if not paths:
            raise DatasetError(f'{folder}: there is no .parquet file in its folder "data"')
        super().__init__(paths, fill, str(folder))
        import pyarrow.parquet

        numbers: list[Any] = []
        for path in paths:
            table = self._reading(
                path, lambda one: pyarrow.parquet.read_table(one, columns=[_EPISODE])
            )
            numbers.append(table.column(_EPISODE).to_numpy())
        every = np.concatenate(numbers)
        changes = np.flatnonzero(every[1:] != every[:-1]) + 1
        self.once = {"episode_ends": np.append(changes, len(every)).astype(np.int64)}
        videos = sum(1 for _ in (folder / "videos").rglob("*.mp4"))
        if videos:
            self.notes = [
                f"not packed: {videos:,} video{'s' * (videos > 1)} in {folder / 'videos'}; decode"
                " them, if frames are needed, and pack samples with their images from Python"
            ]
        tasks = folder / "meta" / "tasks.jsonl"
        if tasks.is_file():
            with reading_file(tasks):
                lines = map(json.loads, tasks.read_text("utf-8").splitlines())
                found = sorted((one["task_index"], one["task"]) for one in lines)
            self.once = {**self.once, "tasks": [task for _, task in found]}
