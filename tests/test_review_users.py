"""Files of single cells as users have them: names of genes, categories, splits by donors."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from imagecodecs import png_encode as encode_png
from typer.testing import CliRunner

import h5async.opening.filefacts
from h5async import AsyncReader, ImageField, SparseField, Split
from h5async.cli import app
from h5async.errors import BudgetError, ConfigError, DatasetError

CELLS = np.arange(20, dtype="f4").reshape(4, 5)


def write_cells(path, genes, index="_index"):
    """Write a matrix, and names of genes in a column that the table names as its index."""
    matrix = sp.csr_matrix(CELLS)
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", matrix.shape
        for part in ("data", "indices", "indptr"):
            group[part] = getattr(matrix, part)
        if index is None:  # AnnData before 0.7
            table = np.zeros(len(genes), [("index", "S9"), ("n", "i4")])
            table["index"] = genes
            file["var"] = table
        else:
            file.create_group("var").attrs["_index"] = index
            file["var"].create_dataset(index, data=genes, dtype=h5py.string_dtype())


def write_column(path, names, codes, *, older=False):
    with h5py.File(path, "w") as file:
        file["number"] = np.arange(len(codes))
        if older:
            file["obs/donor"] = np.array(codes, "i1")
            file.create_dataset("obs/__categories/donor", data=names, dtype=h5py.string_dtype())
            return
        group = file.create_group("obs/donor")
        group.attrs["encoding-type"], group.attrs["ordered"] = "categorical", False
        group["codes"] = np.array(codes, "i1")
        group.create_dataset("categories", data=names, dtype=h5py.string_dtype())


def chosen(path, names, **options):
    field = SparseField("X", columns=names, dense=True)
    with AsyncReader(
        hdf5_path=path, fields={"x": field}, batch_size=4, device="cpu", **options
    ) as reader:
        return reader.get_next_batch().x.copy()


@pytest.mark.parametrize("index", ["_index", "gene_symbols", None])
@pytest.mark.parametrize("saved", [False, True])
def test_columns_are_found_by_the_index_that_the_table_names(tmp_path, index, saved):
    path, options = tmp_path / "cells.h5ad", {"index_cache": False}
    write_cells(path, list("abcde"), index)
    if saved:
        options["index_cache"] = tmp_path / "cells.h5idx"
        chosen(path, ["e", "b"], **options)
    np.testing.assert_array_equal(chosen(path, ["e", "b"], **options), CELLS[:, [4, 1]])


@pytest.mark.parametrize("index", ["gene_symbols", None])
def test_a_saved_index_has_the_names_of_columns_wherever_the_table_has_them(
    tmp_path, monkeypatch, index
):
    path, saved = tmp_path / "cells.h5ad", tmp_path / "cells.h5idx"
    write_cells(path, list("abcde"), index)
    assert CliRunner().invoke(app, ["index", str(path), "-o", str(saved)]).exit_code == 0
    monkeypatch.delattr(
        h5async.opening.filefacts, "_index_layout"
    )  # which reads them from the file
    np.testing.assert_array_equal(chosen(saved, ["e", "b"]), CELLS[:, [4, 1]])


def test_a_name_that_is_chosen_twice_is_an_error_as_a_number_is(tmp_path):
    write_cells(tmp_path / "cells.h5ad", list("abcde"))
    for columns in (["e", "e"], [4, 4]):
        with pytest.raises(ConfigError, match="comes twice"):
            chosen(tmp_path / "cells.h5ad", columns)


def test_a_name_of_two_columns_is_an_error_where_it_is_chosen(tmp_path):
    path = tmp_path / "cells.h5ad"
    write_cells(path, list("aacde"))
    with pytest.raises(DatasetError, match=r'2 columns of the name "a".*var_names_make_unique'):
        chosen(path, ["e", "a"])
    np.testing.assert_array_equal(chosen(path, ["e", "c"]), CELLS[:, [4, 2]])


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("use", ["by", "stratify"])
def test_a_split_goes_by_the_names_of_categories(tmp_path, older, use):
    # Code 0 is another donor in each of the files, and each donor has cells in both.
    paths = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
    donors = [f"d{i}" for i in range(6)]
    write_column(paths[0], donors, [0, 1, 2, 3, 4, 5] * 4, older=older)
    write_column(paths[1], donors[::-1], [5, 4, 3, 2, 1, 0] * 4, older=older)
    numbers = np.array([*range(6)] * 8)
    split = Split("train", {"train": 0.5, "val": 0.5}, **{use: "obs/donor"})
    options = {"fields": {"x": "number"}, "batch_size": 48, "device": "cpu", "indices": split}
    with AsyncReader(hdf5_path=paths, **options) as reader:
        index = reader.get_next_batch().index
    counts = np.bincount(numbers[index], minlength=6)
    assert index.size == 24
    assert sorted(counts) == ([0, 0, 0, 8, 8, 8] if use == "by" else [4] * 6)


@pytest.mark.parametrize("older", [False, True])
def test_balanced_weights_go_by_the_names_of_categories(tmp_path, older):
    # 9 cells of B and 3 of T: as many codes 0 as codes 1.
    write_column(tmp_path / "a.h5ad", ["B", "T"], [0] * 6, older=older)
    write_column(tmp_path / "b.h5ad", ["T", "B"], [1] * 3 + [0] * 3, older=older)
    options = {"fields": {"labels": "obs/donor"}, "weights": "balanced", "epoch_samples": 4000}
    paths = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"]
    with AsyncReader(hdf5_path=paths, batch_size=4000, device="cpu", **options) as reader:
        counts = np.bincount(reader.get_next_batch().labels)
        assert reader.categories["labels"] == ("B", "T")
    assert abs(counts[0] - counts[1]) < 400


def test_tensors_of_images_of_differing_sizes_are_refused(tmp_path):
    torch = pytest.importorskip("h5async.torch")
    images = [encode_png(np.zeros((n, 4, 3), "u1")) for n in (3, 5)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        jpeg = file.create_dataset("jpeg", (2,), h5py.vlen_dtype("u1"))
        for number, image in enumerate(images):
            jpeg[number] = np.frombuffer(image, "u1")
    options = {"fields": {"image": ImageField("jpeg")}, "device": "cpu", "batch_size": 2}
    dataset = torch.H5Dataset(hdf5_path=tmp_path / "a.h5", **options)
    with pytest.raises(
        DatasetError, match=r"'image': images of differing sizes.*give the field a size"
    ):
        list(dataset)
    dataset.close()


def test_a_split_by_a_column_that_one_file_has_otherwise_says_so(tmp_path):
    write_column(tmp_path / "a.h5ad", ["d"], [0, 0])
    with h5py.File(tmp_path / "b.h5ad", "w") as file:
        file["number"], file["obs/donor"] = [0, 1], [0, 1]
    split = Split("train", {"train": 0.5, "val": 0.5}, by="obs/donor")
    with pytest.raises(DatasetError, match=r'b\.h5ad: "obs/donor" must be a categorical column'):
        AsyncReader(
            hdf5_path=str(tmp_path / "*.h5ad"), fields={"x": "number"}, indices=split, device="cpu"
        )


def test_codes_of_a_category_that_comes_twice_are_those_of_its_name(tmp_path):
    path = tmp_path / "cells.h5ad"
    write_column(path, ["B", "B", "T"], [0, 1, 2, -1])
    with AsyncReader(
        hdf5_path=path, fields={"x": "obs/donor"}, batch_size=4, device="cpu"
    ) as reader:
        assert reader.categories["x"] == ("B", "T")
        assert reader.get_next_batch().x.tolist() == [0, 0, 1, -1]


def test_what_takes_too_much_memory_is_the_longest_sample(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("data", (9,), h5py.vlen_dtype("u1"))
        made[5] = np.zeros(1_000_000, "u1")
        made[7] = np.zeros(10, "u1")
    options = {"hdf5_path": path, "fields": {"x": "data"}, "batch_size": 4, "prefetch": 2}
    AsyncReader(options, max_batch_bytes=2_500_000).close()
    with pytest.raises(BudgetError, match="sample 5, of 1,000,000 bytes; leave sample 5 out by i"):
        AsyncReader(options, max_batch_bytes=10_000)
    with AsyncReader(options, max_batch_bytes=10_000, indices=[0, 7, 3]) as reader:
        assert reader.get_next_batch().x.lengths.tolist() == [0, 10, 0]
