"""Consecutive files as one sequence (`Sequences(across="files")`), against NumPy."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from cases import each
from conftest import assert_same_bits

from h5async import AsyncReader, ConfigError, Field, Sequences

COUNTS = (23, 0, 1, 46)
N = sum(COUNTS)
SCALES = 0.5, 2.0, 0.25, 4.0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write shards: packed values, each file in its own way, and a virtual dataset of a half."""
    folder, rng = tmp_path_factory.mktemp("across"), np.random.default_rng(0)
    paths = []
    for number, count in enumerate(COUNTS):
        paths.append(str(folder / f"{number}.h5"))
        packed = rng.integers(-99, 99, (count, 4, 3)).astype("i2")
        with h5py.File(paths[-1], "w") as file:
            storage = {"chunks": (min(5, count), 2, 3), "compression": "gzip"} if count else {}
            file.create_dataset("packed", data=packed, **storage)
            file["packed"].attrs["scale_factor"] = SCALES[number]
            file["packed"].attrs["_FillValue"] = np.int16(7)
            file["plain"] = packed[:, 0, 0].astype("f4")
            layout = h5py.VirtualLayout((count, 3), "i2")
            if count:
                layout[:] = h5py.VirtualSource(file["packed"])[:, 1]
            file.create_virtual_dataset("virtual", layout)
    return paths


@pytest.fixture(scope="module")
def truth(files):
    found: dict[str, list[np.ndarray]] = {"packed": [], "plain": [], "virtual": []}
    for path, scale in zip(files, SCALES, strict=True):
        with h5py.File(path) as file:
            packed = file["packed"][()]
            values = packed * np.float64(scale)
            values[packed == 7] = np.nan
            found["packed"].append(values.astype("f4") * np.float32(10) + np.float32(1))
            found["plain"].append(file["plain"][()])
            found["virtual"].append(file["virtual"][()])
    return {name: np.concatenate(several) for name, several in found.items()}


OPTIONS = [
    {},
    {"shuffle": "full", "num_threads": 0},
    {"shuffle": "window", "window_bytes": 8192},
    {"shuffle": "window", "rank": 1, "world_size": 2},
    {"cache": "host", "shuffle": "full"},
]


@each("options", OPTIONS)
@each("pad, every", [("drop", 1), ("edge", 1), ("zero", 4), ("drop", 7)])
def test_steps_reach_into_the_next_file(files, truth, options, pad, every):
    steps = (-2, 0, 3, 30)
    cf = {"decode_cf": True, "scale": 10.0, "offset": 1.0}
    fields = {
        "packed": Field("packed", steps=steps, pad="edge" if pad == "zero" else pad, **cf),
        "plain": Field("plain", steps=steps, pad=pad, pad_mask="is_there"),
        "virtual": Field("virtual", steps=(-1, 1), pad=pad),
    }
    sequences, seen = Sequences(across="files", every=every), []
    with AsyncReader(
        hdf5_path=files, fields=fields, sequences=sequences, batch_size=8, device="cpu", **options
    ) as reader:
        for batch in reader:
            seen += batch.index.tolist()
            assert (batch.sequence == 0).all()
            assert (batch.step == batch.index).all()
            for name in fields:
                wanted = batch.index[:, None] + np.array(fields[name].steps)
                is_there = (wanted >= 0) & (wanted < N)
                expected = truth[name][np.clip(wanted, 0, N - 1)]
                if fields[name].pad == "zero":
                    expected[~is_there] = 0
                assert_same_bits(batch[name].copy(), expected)
                assert pad != "drop" or is_there.all()
                assert name != "plain" or (batch.is_there == is_there).all()
    first = -(-max(2, 1) // every) * every if pad == "drop" else 0
    last = N - 30 if pad == "drop" else N
    if "rank" not in options:
        assert sorted(set(seen)) == list(range(first, last, every))


def test_across_files_excludes_what_else_makes_sequences(files):
    with pytest.raises(ConfigError, match="give ends or across, not both"):
        Sequences(ends="ends", across="files")
    fields = {"v": Field("packed", (0, 1))}
    with pytest.raises(ConfigError, match="leave out across of sequences"):
        AsyncReader(hdf5_path=files, fields=fields, sequences={"across": "files"})
    fields = {"v": "plain", "t": Field("plain", per="sequence")}
    with pytest.raises(ConfigError, match=r'all files are one sequence; set per="file"'):
        AsyncReader(hdf5_path=files, fields=fields, sequences={"across": "files"})
