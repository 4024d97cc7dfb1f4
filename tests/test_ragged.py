"""Readers of ragged and sparse fields, from end to end: h5py and SciPy say what is right."""

from __future__ import annotations

import json
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import require_extra
from hypothesis import given, settings
from hypothesis import strategies as st

from h5async import (
    AsyncReader,
    ConfigError,
    Csr,
    H5AsyncError,
    PostprocessError,
    Ragged,
    RaggedField,
    SparseField,
    Split,
)

SEED = 20160704
COLUMNS = 13
STORAGES = ("contiguous", "gzip", "virtual", "big-endian", "shuffled")
KINDS = ("ends", "lengths", "offsets", "vlen", "strings", "bytes", "csr", "dense", "some", "padded")


# --- what is written, and what has to come -----------------------------------------------------


def put(file, name, values, storage, **rest):
    """Write a dataset as `storage` says."""
    if storage == "gzip":
        return file.create_dataset(
            name,
            data=values,
            chunks=(7, *values.shape[1:]),
            **rest,
            compression="gzip",
            maxshape=(None, *values.shape[1:]),
        )
    if storage == "shuffled":
        return file.create_dataset(
            name,
            data=values,
            chunks=(5, *values.shape[1:]),
            **rest,
            shuffle=True,
            maxshape=(None, *values.shape[1:]),
        )
    if storage == "big-endian":
        return file.create_dataset(name, data=values.astype(values.dtype.newbyteorder(">")))
    if storage == "virtual" and len(values) > 2:
        cut = len(values) // 3
        layout = h5py.VirtualLayout(values.shape, values.dtype)
        for number, (a, b) in enumerate(((0, cut), (cut, len(values)))):
            part = file.create_dataset(f"{name}_parts/{number}", data=values[a:b])
            layout[a:b] = h5py.VirtualSource(part)
        return file.create_virtual_dataset(name, layout)
    return file.create_dataset(name, data=values)


def put_sparse(file, name, matrix, storage):
    """Write a sparse matrix as AnnData does."""
    group = file.create_group(name)
    group.attrs["encoding-type"] = "csr_matrix"
    group.attrs["encoding-version"] = "0.1.0"
    group.attrs["shape"] = matrix.shape
    put(group, "data", matrix.data, storage)
    put(group, "indices", matrix.indices, "contiguous" if storage == "big-endian" else storage)
    group["indptr"] = matrix.indptr
    return group


class Truth:
    """The samples of a field, one by one.

    Parameters
    ----------
    field
        As a reader is given it.
    samples
        Of all files: arrays, strings, or dense rows.
    """

    def __init__(self, field: Any, samples: list[Any]) -> None:
        self.field, self.samples = field, samples


def write(path, lengths, kinds, storage, userblock=0):
    """Write a file with a field of each kind; return what has to come of each."""
    scipy = require_extra("scipy.sparse")
    rng = np.random.default_rng([SEED, *lengths])
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    total = int(ends[-1]) if len(lengths) else 0
    count = len(lengths)
    found = {}
    with h5py.File(path, "w", userblock_size=userblock) as file:
        for kind in kinds:
            if kind in ("ends", "lengths", "offsets", "padded"):
                values = rng.integers(-99, 99, (total + 4 * (kind == "offsets"), 2)).astype("i4")
                put(file, kind, values, storage)
                shift = 3 if kind == "offsets" else 0  # values before and behind are in no sample
                own = [values[a + shift : b + shift] for a, b in zip(begins, ends, strict=True)]
                file[f"{kind}_at"] = {
                    "ends": ends.astype("i4"),
                    "lengths": np.asarray(lengths, "u2"),
                    "offsets": np.append(0, ends) + shift,
                    "padded": np.append(0, ends),
                }[kind]
                how = kind if kind != "padded" else "offsets"
                options = {"pad_to": 3} if kind == "padded" else {}
                field = RaggedField(kind, offsets=f"{kind}_at", offsets_kind=how, **options)
                found[kind] = Truth(field, own)
            elif kind in ("vlen", "bytes"):
                dtype = np.dtype(">f4" if kind == "vlen" else "u1")
                more = {"chunks": (4,), "compression": "gzip"} if storage == "gzip" else {}
                if more:
                    more["maxshape"] = (None,)
                node = file.create_dataset(kind, (count,), h5py.vlen_dtype(dtype), **more)
                own = [rng.integers(0, 255, n).astype(dtype.newbyteorder("=")) for n in lengths]
                for number, one in enumerate(own):
                    node[number] = one
                found[kind] = Truth(kind, own)
            elif kind == "strings":
                own = ["ä" * n for n in lengths]
                node = file.create_dataset(kind, (count,), h5py.string_dtype())
                for number, one in enumerate(own):
                    node[number] = one
                found[kind] = Truth(kind, own)
            else:
                matrix = scipy.csr_matrix(
                    (
                        rng.normal(size=total).astype("f4"),
                        np.concatenate(
                            [np.sort(rng.permutation(COLUMNS * 9)[:n]) for n in lengths]
                            or [np.zeros(0, int)]
                        ).astype("i4"),
                        np.append(0, ends),
                    ),
                    (count, COLUMNS * 9),
                )
                put_sparse(file, kind, matrix, storage)
                dense = matrix.toarray()
                options = {"csr": {}, "dense": {"dense": True}, "some": {"columns": [5, 0, 7]}}
                own = list(dense[:, [5, 0, 7]] if kind == "some" else dense)
                found[kind] = Truth(SparseField(kind, **options[kind]), own)
        file["plain"] = np.arange(count * 3, dtype="f8").reshape(count, 3) + len(lengths)
        found["plain"] = Truth("plain", list(file["plain"][()]))
    return found


def check(batch, truths):
    """Check all fields of a batch."""
    for name, truth in truths.items():
        wanted, found = [truth.samples[i] for i in batch.index], batch[name]
        if name == "strings":
            assert found.to_strings() == wanted
        elif name == "padded":
            assert found.shape == (len(wanted), 3, 2)
            mask = batch["padded_mask"]
            for row, there, one in zip(found, mask, wanted, strict=True):
                assert there.tolist() == [i < len(one) for i in range(3)]
                np.testing.assert_array_equal(row[there], one[:3])
                assert not row[~there].any()
        elif name in ("csr", "some"):
            assert isinstance(found, Csr)
            assert found.shape == (len(wanted), wanted[0].size)
            np.testing.assert_array_equal(found.to_scipy().toarray(), np.array(wanted))
        elif name in ("dense", "plain"):
            np.testing.assert_array_equal(found, np.array(wanted))
        else:
            assert isinstance(found, Ragged)
            assert found.lengths.tolist() == [len(one) for one in wanted]
            assert found.dtype == wanted[0].dtype
            for mine, one in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(mine, one)


def several(tmp_path_factory, files, kinds, storage, userblock=0):
    """Write files; return their paths and the truths over all."""
    folder = tmp_path_factory.mktemp("ragged")
    paths, truths = [], {}
    for number, lengths in enumerate(files):
        paths.append(folder / f"{number}.h5")
        for name, one in write(paths[-1], lengths, kinds, storage, userblock).items():
            truths.setdefault(name, Truth(one.field, [])).samples.extend(one.samples)
    return paths, truths


def fields_of(truths):
    return {name: truth.field for name, truth in truths.items()}


def lengths_of_samples(most=9):
    some = st.lists(st.integers(0, most), max_size=30)
    return st.builds(
        lambda a, long, b: [*a, *long, *b], some, st.lists(st.just(COLUMNS * 8), max_size=1), some
    )


# --- values ------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=60)
def test_any_fields_are_what_is_in_the_files(tmp_path_factory, data):
    draw = data.draw
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4, unique=True))
    files = draw(st.lists(lengths_of_samples(), min_size=1, max_size=3))
    storage = draw(st.sampled_from(STORAGES))
    paths, truths = several(
        tmp_path_factory, files, kinds, storage, draw(st.sampled_from([0, 512]))
    )
    options = {
        "batch_size": draw(st.integers(1, 40)),
        "shuffle": draw(st.sampled_from([False, "full", "window"])),
        "num_threads": draw(st.sampled_from([0, 2])),
        "drop_last": draw(st.booleans()),
        "copy": draw(st.booleans()),
        "prefetch": draw(st.integers(1, 3)),
    }
    count = sum(map(len, files))
    with AsyncReader(hdf5_path=paths, fields=fields_of(truths), device="cpu", **options) as reader:
        assert reader.num_samples == count
        for _ in range(2):
            seen = []
            for batch in reader:
                check(batch, truths)
                seen += batch.index.tolist()
            if options["drop_last"]:
                assert len(set(seen)) == len(seen) == count - count % options["batch_size"]
            else:
                assert sorted(seen) == list(range(count))
        if count:
            some = [0, count - 1, 0, count // 2]
            check(reader.read(some), truths)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Two files and an empty one, with a field of each kind."""
    rng = np.random.default_rng(SEED)
    files = [rng.integers(0, 9, 41).tolist(), [], [*rng.integers(0, 4, 20).tolist(), 100]]
    return several(tmp_path_factory, files, KINDS, "gzip")


def reader_of(mixed, **options):
    paths, truths = mixed
    options = {"batch_size": 8, "num_threads": 2, "device": "cpu"} | options
    return AsyncReader(hdf5_path=paths, fields=fields_of(truths), **options)


@pytest.mark.parametrize("shuffle", [False, "full", "window"])
def test_ranks_share_the_samples(mixed, shuffle):
    seen = []
    for rank in range(3):
        with reader_of(mixed, shuffle=shuffle, rank=rank, world_size=3) as reader:
            for batch in reader:
                check(batch, mixed[1])
                seen += batch.index.tolist()
    assert sorted(set(seen)) == list(range(62))


@pytest.mark.parametrize("shuffle", [False, "full", "window"])
def test_a_resumed_reader_gives_the_rest(mixed, shuffle):
    with reader_of(mixed, shuffle=shuffle) as reader:
        batches = iter(reader)
        seen = next(batches).index.tolist() + next(batches).index.tolist()
        state = json.loads(json.dumps(reader.state_dict()))
        wanted = [batch.index.tolist() for batch in batches]
    with reader_of(mixed, shuffle=shuffle) as reader:
        reader.load_state_dict(state)
        found = []
        for batch in reader:
            check(batch, mixed[1])
            found.append(batch.index.tolist())
    assert found == wanted
    assert sorted(seen + sum(found, [])) == list(range(62))


@pytest.mark.parametrize(
    "options",
    [
        {"indices": slice(3, 60, 2)},
        {"indices": Split("train", {"train": 0.5, "val": 0.5}), "shuffle": "window"},
        {"weights": np.r_[np.zeros(61), 1.0], "epoch_samples": 50},  # the longest one, always
        {"weights": np.arange(62.0), "epoch_samples": 50},
        {"sampler": [61, 61, 61, 61, 61, 61, 61, 61, 61, 3]},
        {"sampler": [[61] * 8, [0, 1], [61, 61, 2]]},
    ],
)
@pytest.mark.parametrize("num_threads", [0, 2])
def test_selected_drawn_and_sampled_samples(mixed, options, num_threads):
    with reader_of(mixed, **options, num_threads=num_threads) as reader:
        for _ in range(2):
            for batch in reader:
                check(batch, mixed[1])


@pytest.mark.parametrize("num_threads", [0, 2])
def test_given_samples(mixed, num_threads):
    with reader_of(mixed, num_threads=num_threads) as reader:
        reader.fetch_data([61, 3, 3, 40])
        check(reader.get_next_batch(), mixed[1])
        check(reader.read([61] * 20), mixed[1])
        with pytest.raises(ConfigError, match=r"have 800 values, .* room for .*read\(\)"):
            reader.fetch_data([61] * 8)
        check(reader.get_next_batch(), mixed[1])


def test_batches_that_last(mixed):
    with reader_of(mixed, copy=True) as reader:
        for batch in list(reader):
            check(batch, mixed[1])
    with reader_of(mixed) as reader:
        for batch in [batch.copy() for batch in reader]:
            check(batch, mixed[1])


def test_batches_that_are_used_after_their_life_are_poison(mixed):
    with reader_of(mixed, debug_lifetimes=True, shuffle="full") as reader:
        batches = iter(reader)
        first = next(batches)
        check(first, mixed[1])
        ragged, sparse = first["ends"], first["csr"]
        second = next(batches)
        check(second, mixed[1])
        with pytest.raises(H5AsyncError, match="was used after"):
            first["ends"]
        assert (ragged.values == -1).all()
        assert (ragged.offsets == -1).all()
        assert np.isnan(sparse.data).all()
        assert (sparse.indices == -1).all()
        assert (sparse.indptr == -1).all()


# --- postprocess -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 2])
def test_postprocess_in_place(mixed, num_threads):
    def double(ends, csr, plain):
        assert isinstance(ends, Ragged)
        assert isinstance(csr, Csr)
        ends.values *= 2
        csr.data *= 2
        plain *= 2

    paths, truths = mixed
    fields = {name: truths[name].field for name in ("ends", "csr", "plain")}
    twice = {name: Truth(None, [2 * s for s in truths[name].samples]) for name in fields}
    with AsyncReader(
        hdf5_path=paths,
        fields=fields,
        batch_size=8,
        num_threads=num_threads,
        device="cpu",
        postprocess=double,
    ) as reader:
        for batch in reader:
            check(batch, twice)
        check(reader.read([3, 61]), twice)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_postprocess_may_return_arrays_and_the_samples_as_they_are(mixed, num_threads):
    def changed(ends, csr, plain):
        return csr.to_dense(), ends, csr

    paths, truths = mixed
    fields = {name: truths[name].field for name in ("ends", "csr", "plain")}
    with AsyncReader(
        hdf5_path=paths,
        fields=fields,
        batch_size=8,
        num_threads=num_threads,
        device="cpu",
        postprocess=changed,
    ) as reader:
        for batch in reader:
            rows = np.array([truths["csr"].samples[i] for i in batch.index])
            np.testing.assert_array_equal(batch["ends"], rows)
            assert isinstance(batch["csr"], Ragged)
            assert isinstance(batch["plain"], Csr)
            lengths = [len(truths["ends"].samples[i]) for i in batch.index]
            assert batch["csr"].lengths.tolist() == lengths
            np.testing.assert_array_equal(batch["plain"].to_dense(), rows)


def test_postprocess_that_returns_other_numbers_of_samples(mixed):
    paths, truths = mixed
    fields = {name: truths[name].field for name in ("ends", "plain")}
    with (
        AsyncReader(
            hdf5_path=paths,
            fields=fields,
            batch_size=8,
            device="cpu",
            postprocess=lambda ends, plain: (ends[:3], plain),
        ) as reader,
        pytest.raises(PostprocessError, match="unequal numbers of rows"),
    ):
        reader.get_next_batch()
