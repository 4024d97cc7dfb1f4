"""Tell the types of cells by their genes: sparse matrices of AnnData, read as they are.

Two files (.h5ad) have other cell types, and their genes in another order. Genes are chosen by their
names, codes of types are those of both files together, and a function in the reader's threads
normalizes the counts of each cell. The model is a logistic regression in NumPy.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import scipy.sparse

from h5async import AsyncReader, SparseField, Split

CELLS, GENES = 1200, 300
TYPES = ("B", "Monocyte", "NK", "T")
MARKERS = np.random.default_rng(0).gamma(0.5, 1.0, (len(TYPES), GENES))
NAMES = np.array([f"gene{i}" for i in range(GENES)])
FIELDS = {
    "counts": SparseField("X", dense=True, columns=NAMES[:200]),
    "cell_type": "obs/cell_type",
}
PARTS = {"train": 0.8, "test": 0.2}


def write_cells(path: Path, types: list[int], seed: int) -> None:
    """Write the cells of an experiment, of these types, as anndata does."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(types, CELLS)
    depth = rng.uniform(0.3, 1.5, (CELLS, 1))
    order = rng.permutation(GENES)
    counts = rng.poisson(MARKERS[kind] * depth)[:, order].astype(np.float32)
    cells = anndata.AnnData(
        scipy.sparse.csr_matrix(counts),
        pd.DataFrame(
            {"cell_type": pd.Categorical(np.array(TYPES)[kind])},
            index=[f"cell{i}" for i in range(CELLS)],
        ),
        pd.DataFrame(index=NAMES[order]),
    )
    cells.write_h5ad(path, compression="gzip")


def normalized(counts: np.ndarray, cell_type: np.ndarray) -> None:
    """Make counts of each cell comparable, in place."""
    counts *= 100 / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    np.log1p(counts, out=counts)


def main(epochs: int = 15) -> float:
    """Return the share of cells that were not trained on whose type is found."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what anndata says of its own next versions
        paths = [Path(folder, "healthy.h5ad"), Path(folder, "ill.h5ad")]
        write_cells(paths[0], [0, 3], 1)
        write_cells(paths[1], [1, 2, 3], 2)
        options = {"hdf5_path": paths, "fields": FIELDS, "batch_size": 64, "device": "cpu"}
        options["postprocess"] = normalized
        with AsyncReader(options, indices=Split("train", PARTS), shuffle="window") as reader:
            names = reader.categories["cell_type"]
            weights = np.zeros((200, len(names)), np.float32)
            for _ in range(epochs):
                for counts, cell_type in reader:
                    scores = np.exp(counts @ weights)
                    wrong = scores / scores.sum(axis=1, keepdims=True)
                    wrong -= np.eye(len(names), dtype=np.float32)[cell_type]
                    weights -= 0.02 * counts.T @ wrong / len(counts)
        with AsyncReader(options, indices=Split("test", PARTS)) as reader:
            right = sum(
                int(((counts @ weights).argmax(axis=1) == cell_type).sum())
                for counts, cell_type in reader
            )
            share = right / reader.num_samples
    print(f"{share:.3f} of the cells are of the type that was found ({', '.join(names)})")
    return share


if __name__ == "__main__":
    main()
