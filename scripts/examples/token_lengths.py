"""Tell how a text is meant by its words: sequences of tokens of any length, as nested tensors.

All tokens lie in one dataset, one text behind the other, and another one says where each text
ends. Batches are jagged nested tensors over the reader's memory: nothing is padded, neither in the
file, nor in memory, nor in the network.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

from h5async import RaggedField, Split
from h5async.torch import H5Dataset

WORDS, TEXTS = 500, 1500
FIELDS = {
    "tokens": RaggedField("tokens", offsets="ends", offsets_kind="ends"),
    "label": "label",
}
PARTS = {"train": 0.8, "test": 0.2}


def write_texts(path: Path) -> None:
    """Write texts of 1 to some hundred tokens; the first words of the vocabulary say yes."""
    rng = np.random.default_rng(0)
    lengths = 1 + rng.geometric(0.03, TEXTS)
    label = rng.integers(0, 2, TEXTS)
    tokens = rng.integers(40, WORDS, lengths.sum())
    ends = np.cumsum(lengths)
    for begin, end, is_yes in zip(ends - lengths, ends, label, strict=True):
        told = rng.choice(end - begin, 1 + (end - begin) // 10)
        tokens[begin + told] = rng.integers(0, 20, told.size) + 20 * (not is_yes)
    with h5py.File(path, "w") as file:
        file.create_dataset("tokens", data=tokens.astype("i4"), chunks=(4096,), compression="gzip")
        file["ends"], file["label"] = ends, label


class Weighing(nn.Module):
    """Weighs the words of a text, and adds them up."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, size)
        self.weight = nn.Linear(size, 1)
        self.answer = nn.Linear(size, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of both answers for nested `tokens` (texts, words)."""
        words = self.words(tokens)
        weighed = words * torch.sigmoid(self.weight(words))
        sums = torch.segment_reduce(weighed.values(), "sum", offsets=tokens.offsets())
        return self.answer(sums)


def main(epochs: int = 4) -> float:
    """Return the share of texts that were not trained on whose label is found."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "texts.h5")
        write_texts(path)
        options = {"hdf5_path": path, "fields": FIELDS, "batch_size": 64, "device": "cpu"}
        train = H5Dataset(options, indices=Split("train", PARTS), shuffle="window")
        test = H5Dataset(options, indices=Split("test", PARTS))
        model = Weighing()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(epochs):
            for batch in train:
                loss = nn.functional.cross_entropy(model(batch["tokens"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        found = [model(batch["tokens"]).argmax(dim=1) == batch["label"] for batch in test]
    share = torch.cat(found).float().mean().item()
    print(f"{share:.3f} of the texts are told right")
    return share


if __name__ == "__main__":
    main()
