"""Lists datasets of Hugging Face, whose rows are tables of Arrow; bytes of images are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from h5async.errors import ConfigError, needs_package
from h5async.packing.schema import Block
from h5async.packing.sources.base import Int64s, ListedSource, digest_of
from h5async.packing.sources.tables import Fill, block_of


class HuggingFaceSource(ListedSource):
    """A `datasets.Dataset`. Names of classes are those of its features."""

    def __init__(self, dataset: Any, fill: Fill) -> None:
        if isinstance(dataset, dict):
            raise ConfigError(
                f"the dataset has splits, {', '.join(map(str, dataset))}; give one of them:"
                ' dataset["train"]'
            )
        self.name = f"dataset {dataset.info.dataset_name or ''}".strip()
        self._dataset, self._fill = dataset.with_format("arrow"), fill
        self.count, self.rows = len(dataset), 64
        self.nbytes = dataset.data.nbytes
        features = dataset.features
        kinds = {name: type(feature).__name__ for name, feature in features.items()}
        known = {"Image": "image", "Audio": "audio"}
        self.kinds = {name: known[kind] for name, kind in kinds.items() if kind in known}
        labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
        self.classes = {name: list(features[name].names) for name in labels}

    def digest(self) -> str:
        """Return a digest of the dataset's own fingerprint."""
        return digest_of([self._dataset._fingerprint, self.count, self.classes])

    def read(self, numbers: Int64s) -> Block:
        """Return rows."""
        first, last = int(numbers[0]), int(numbers[-1]) + 1
        is_run = last - first == len(numbers) and bool((numbers[1:] > numbers[:-1]).all())
        chosen = slice(first, last) if is_run else numbers.tolist()
        return block_of(self._dataset[chosen], self._fill, self.name)


def saved_dataset(folder: Path) -> Any:
    """Return the dataset that was saved in a folder."""
    with needs_package("datasets", "datasets of Hugging Face"):
        import datasets
    return datasets.load_from_disk(str(folder))
