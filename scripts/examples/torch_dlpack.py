"""Train a small network of PyTorch on batches that it takes as they are, by DLPack.

`torch.from_dlpack` makes a tensor of the very memory of a batch: NumPy's on the CPU, CuPy's on a
GPU. On a GPU, PyTorch's stream waits for the batch; and when the batch is handed back, h5async
waits for all that PyTorch's current stream was given until then. So a tensor is valid until the
next iteration of the loop; what has to last longer is cloned.
"""

from __future__ import annotations

from pathlib import Path

import torch

from h5async import AsyncReader, Field

FILE = Path(__file__).parents[2] / "sample_data" / "digits.h5"
FIELDS = {"data": Field("data", dtype="float32", scale=1 / 16), "labels": "labels"}


def main(epochs: int = 20) -> float:
    torch.manual_seed(0)
    with AsyncReader(
        hdf5_path=FILE, fields=FIELDS, batch_size=64, shuffle="full", drop_last=True
    ) as reader:
        device = reader.device
        model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        ).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(epochs):
            right = torch.zeros((), dtype=torch.int64, device=device)
            for batch in reader:
                data, labels = map(torch.from_dlpack, batch)  # no copy
                scores = model(data)
                loss = torch.nn.functional.cross_entropy(scores, labels.long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += (scores.argmax(1) == labels).sum()
        accuracy = right.item() / (64 * len(reader))
    print(f"PyTorch on {device}: accuracy {accuracy:.2f} in the last of {epochs} epochs")
    return accuracy


if __name__ == "__main__":
    main()
