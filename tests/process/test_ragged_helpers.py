"""Fields of all kinds out of helper processes: what threads give, to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import h5py
import numpy as np
import pytest
from conftest import require_extra
from test_helper import children, is_alive, wait_until
from test_ragged import (
    KINDS,
    OBS,
    annotated,
    check,
    check_obs,
    fields_of,
    several,
    sparse_file,
)

from h5async import (
    AsyncReader,
    ConfigError,
    Csr,
    DatasetError,
    ImageField,
    Images,
    OutOfMemoryError,
    PostprocessError,
    Ragged,
    RaggedField,
    ReadError,
    SparseField,
    Split,
)

SEED = 19690720
OPTIONS = {"batch_size": 8, "device": "cpu", "num_threads": 2, "timeout": 100}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Two files and an empty one, with a field of each kind."""
    rng = np.random.default_rng(SEED)
    files = [rng.integers(0, 9, 41).tolist(), [], [*rng.integers(0, 4, 20).tolist(), 100]]
    return several(tmp_path_factory, files, KINDS, "gzip")


@pytest.fixture(autouse=True)
def _leaves_no_process():
    yield
    wait_until(lambda: not children())


def make(mixed, workers, **options):
    paths, truths = mixed
    fields = options.pop("fields", None) or fields_of(truths)
    return AsyncReader(hdf5_path=paths, fields=fields, workers=workers, **{**OPTIONS, **options})


def epochs(mixed, workers, count=2, **options):
    with make(mixed, workers, **options) as reader:
        return [batch.copy() for _ in range(count) for batch in reader]


def arrays_of(value):
    if isinstance(value, Images):
        return value.values, value.offsets, value.shapes
    if isinstance(value, Ragged):
        return value.values, value.offsets
    if isinstance(value, Csr):
        return value.data, value.indices, value.indptr, np.array(value.shape)
    return (value,)


def assert_same(found, wanted):
    """Compare batches to the bit, with their types."""
    assert len(found) == len(wanted)
    for batch, other in zip(found, wanted, strict=True):
        assert np.array_equal(batch.index, other.index)
        assert batch.keys() == other.keys()
        assert (batch.epoch, batch.number, batch.last) == (other.epoch, other.number, other.last)
        for mine, theirs in zip(batch, other, strict=True):
            assert type(mine) is type(theirs)
            for array, truth in zip(arrays_of(mine), arrays_of(theirs), strict=True):
                assert (array.dtype, array.shape) == (truth.dtype, truth.shape)
                assert array.tobytes() == truth.tobytes()


def pids_of(reader):
    return [one.process._popen.pid for one in reader._engine.filler.supervisors]


# --- what comes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        ("process", {}),
        ("process", {"shuffle": "full", "prefetch": 1, "debug_lifetimes": True}),
        ("process", {"shuffle": "full", "num_threads": 0, "copy": True}),
        ("process", {"shuffle": "full", "cache": "host"}),
        ("process", {"weights": np.arange(62.0), "epoch_samples": 50}),
        ("process", {"batch_size": 1000, "io": "pread"}),
        (2, {"shuffle": "window", "prefetch": 4, "drop_last": True}),
        (2, {"shuffle": "full", "rank": 1, "world_size": 3}),
        (3, {"indices": Split("train", {"train": 0.5, "val": 0.5}), "shuffle": "window"}),
        (3, {"indices": [61, 3, 61, 61, 0, 7], "prefetch": 1}),
    ],
    ids=str,
)
def test_batches_are_those_of_threads_and_of_the_files(mixed, workers, options):
    found = epochs(mixed, workers, **options)
    assert_same(found, epochs(mixed, "thread", **options))
    for batch in found:
        check(batch, mixed[1])


@pytest.mark.slow
def test_batches_are_views_of_shared_memory(mixed):
    with make(mixed, "process", shuffle="full") as reader:
        spec = reader._engine.filler.shared.spec
        for batch in reader:
            for name in mixed[1]:
                assert all(spec(a) is not None for a in arrays_of(batch[name])[:3])
            check(batch, mixed[1])


@pytest.mark.slow
def test_given_samples_come_in_their_turn(mixed):
    with make(mixed, 2) as reader:
        for turn in range(3):
            reader.fetch_data([turn, 61, turn, 7])
            reader.fetch_data()
            given = reader.get_next_batch().copy()
            assert given.index.tolist() == [turn, 61, turn, 7]
            check(given, mixed[1])
            check(reader.get_next_batch(), mixed[1])
        with pytest.raises(ConfigError, match=r"have 800 values, .* room for"):
            reader.fetch_data([61] * 8)
        with pytest.raises(ConfigError, match='needs workers="thread"'):
            reader.read([1])


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["full", "window"])
def test_a_state_goes_from_threads_to_helpers_and_back(mixed, shuffle):
    states, wanted = [], []
    for workers in ("thread", 2):
        with make(mixed, workers, shuffle=shuffle) as reader:
            for _ in range(3):
                reader.get_next_batch()
            states.append(json.loads(json.dumps(reader.state_dict())))
            wanted.append([reader.get_next_batch().copy() for _ in range(9)])
    assert states[0] == states[1]
    with make(mixed, 2, shuffle=shuffle) as reader:
        reader.load_state_dict(states[0])
        found = [reader.get_next_batch().copy() for _ in range(9)]
    assert_same(found, wanted[0])
    assert_same(found, wanted[1])


@pytest.mark.slow
def test_paths_alone_say_the_kinds(mixed):
    """Which the helper finds out, and tells the reader."""
    fields = {"csr": "csr", "vlen": "vlen", "strings": "strings", "plain": "plain"}
    truths = {name: mixed[1][name] for name in fields}
    with make(mixed, "process", fields=fields) as reader:
        for batch in reader:
            check(batch, truths)
        assert list(reader.layouts) == list(reader.stats().ways) == list(fields)
        assert reader.nbytes == reader.stats().nbytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["process", 2])
def test_columns_of_obs(tmp_path, workers):
    pandas = require_extra("pandas")
    kinds = [["T", None, "B"] * 4, ["NK", "T", None, "A", "B"] * 3, ["B"] * 4]
    paths = [tmp_path / f"{i}.h5ad" for i in range(3)]
    obs = [annotated(p, k, i).obs for i, (p, k) in enumerate(zip(paths, kinds, strict=True))]
    obs = pandas.concat([one.astype({"kind": object}) for one in obs])
    options = {"hdf5_path": paths, "fields": OBS | {"x": "X"}, "shuffle": "full", **OPTIONS}
    with AsyncReader(**options, workers=workers) as reader, AsyncReader(**options) as threads:
        assert reader.categories == threads.categories
        assert reader.categories["kind"] == ("B", "T", "A", "NK")
        for _ in range(2):
            for batch, other in zip(reader, threads, strict=True):
                check_obs(batch, reader.categories, obs)
                assert_same([batch], [other])


@pytest.mark.slow
def test_an_empty_dataset(tmp_path_factory):
    empty = several(tmp_path_factory, [[]], KINDS, "contiguous")
    with make(empty, "process") as reader:
        assert (reader.num_samples, reader.nbytes, list(reader)) == (0, 0, [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_tensors_of_pytorch(mixed):
    torch = require_extra("torch")
    from h5async.torch import H5Dataset

    fields = {name: mixed[1][name].field for name in ("csr", "vlen", "dense")}
    options = {"hdf5_path": mixed[0], "fields": fields, **OPTIONS}
    with H5Dataset(options, workers=2) as dataset, H5Dataset(options) as expected:
        for batch, other in zip(dataset, expected, strict=True):
            assert batch["csr"].layout is torch.sparse_csr
            assert torch.equal(batch["csr"].to_dense(), other["csr"].to_dense())
            assert torch.equal(batch["dense"], other["dense"])
            assert batch["vlen"].layout is torch.jagged
            assert torch.equal(batch["vlen"].values(), other["vlen"].values())
            assert torch.equal(batch["vlen"].offsets(), other["vlen"].offsets())


# --- images --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Images of any size, of one size, and one that is broken; and where they are."""
    require_extra("PIL.Image")
    require_extra("cv2")
    from test_images import encoded, write

    folder = tmp_path_factory.mktemp("pictures")
    of_any_size = [encoded((20 + n % 7, 30 + n % 5), seed=n) for n in range(30)]
    equal = [encoded((20, 30), seed=n) for n in range(30)]
    broken = [*equal[:11], equal[11][:-90], *equal[12:]]
    return {
        "any": write(folder / "any.h5", of_any_size),
        "flat": write(folder / "flat.h5", of_any_size, ragged=True),
        "equal": write(folder / "equal.h5", equal),
        "broken": write(folder / "broken.h5", broken),
    }


RANDOM = {"size": (12, 16), "crop": "random", "flip": True}
IMAGES = [
    ("any", ImageField("jpeg")),
    ("any", ImageField("jpeg", axes=(0, 3, 1, 2), scale=0.5)),
    ("equal", ImageField("jpeg")),
    ("flat", ImageField("jpeg", offsets="ends", offsets_kind="ends", **RANDOM)),
    ("any", ImageField("jpeg", axes=(0, 3, 1, 2), dtype="f4", **RANDOM)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "field"), IMAGES)
def test_images_are_those_of_threads(pictures, file, field):
    options = {"fields": {"image": field, "label": "labels"}, "shuffle": "full"}
    for workers, more in (("process", {}), (2, {"prefetch": 1, "cache": None})):
        found = epochs((pictures[file], {}), workers, **options, **more)
        assert_same(found, epochs((pictures[file], {}), "thread", **options))


@pytest.mark.slow
def test_images_lie_in_shared_memory_as_they_are_decoded(pictures):
    """No helper copies them; what all slots may take is there once, and is given when touched."""
    fields = {"image": ImageField("jpeg")}
    with make((pictures["any"], {}), 2, fields=fields) as reader:
        shared, slots = reader._engine.filler.shared, reader._engine.filler.supervisors[0]._slots
        made = [(spec.offset, spec.nbytes) for one in slots.specs for spec in one.made if spec]
        assert len(made) == reader.config.prefetch
        for batch in [batch for _ in range(2) for batch in reader]:
            offset = shared.spec(batch.image.values).offset
            assert any(begin <= offset < begin + nbytes for begin, nbytes in made)
        status = os.fstat(shared.fd)
        assert status.st_blocks * 512 < 200 << 20 < status.st_size


@pytest.mark.slow
def test_images_where_no_more_memory_can_be_shared(pictures, monkeypatch):
    """They are copied then, into as much as they take."""
    from h5async.process.messages import ReaderSlots

    options = {"fields": {"image": ImageField("jpeg")}, "shuffle": "full"}
    wanted = epochs((pictures["any"], {}), "thread", **options)
    with monkeypatch.context() as patched:
        patched.setattr(ReaderSlots, "_new", lambda self, nbytes: None)
        assert_same(epochs((pictures["any"], {}), 2, **options), wanted)


@pytest.mark.slow
def test_broken_images(pictures):
    files = (pictures["broken"], {})
    with make(files, "process", fields={"image": ImageField("jpeg")}) as reader:
        reader.get_next_batch()
        with pytest.raises(ReadError, match=r'broken\.h5: dataset "jpeg": the image of sample 11 '):
            reader.get_next_batch()
        assert reader.get_next_batch().index[0] == 16
    zero = {"image": ImageField("jpeg", size=9, on_error="zero")}
    with make(files, 2, fields=zero) as reader, make(files, "thread", fields=zero) as threads:
        assert_same([b.copy() for b in reader], [b.copy() for b in threads])
        assert min(reader.stats().broken_images, threads.stats().broken_images) >= 1


# --- postprocess ---------------------------------------------------------------------------------


def in_place(csr, vlen, dense, plain):
    csr.data[...] *= 2
    vlen.values[...] += 1
    dense[...] = -dense
    plain += 1


def others(csr, vlen, dense, plain):
    """Lengths and dtypes change, and nothing of it lies in the slot."""
    half = Csr(
        csr.data[::2].astype("f8"), csr.indices[::2].copy(), (csr.indptr + 1) // 2, csr.shape
    )
    ends = np.append(0, np.cumsum(np.arange(len(vlen)) * 3))
    return half, Ragged(np.arange(ends[-1]), ends), dense[:, ::-1], np.asfortranarray(plain)


def crossed(csr, vlen, dense, plain):
    return plain, dense, vlen, csr


def parts(csr, vlen, dense, plain):
    """Views of what lies there: of other fields, of a part, and one twice."""
    shifted = vlen.offsets[1:] - vlen.offsets[1] if len(vlen) > 1 else vlen.offsets
    rest = Ragged(vlen.values[vlen.offsets[1] :], shifted) if len(vlen) > 1 else vlen
    return csr[1:], rest, dense[1:], dense[1:]


def fewer(csr, vlen, dense, plain):
    return csr[:3], vlen[:3], dense[:3], plain[:3]


@pytest.mark.slow
@pytest.mark.parametrize("function", [in_place, others, crossed, parts, fewer])
@pytest.mark.parametrize("workers", ["process", 2])
def test_what_postprocess_makes_comes_over(mixed, workers, function):
    fields = {name: mixed[1][name].field for name in ("csr", "vlen", "dense", "plain")}
    options = {"fields": fields, "postprocess": function, "shuffle": "full", "drop_last": True}
    assert_same(epochs(mixed, workers, **options), epochs(mixed, "thread", **options))


def objects(vlen):
    return Ragged(vlen.values.astype(object), vlen.offsets)


def fails_later(vlen, *, number):
    if number == 1:
        raise PostprocessError("this one")


@pytest.mark.slow
def test_errors_of_postprocess(mixed):
    fields = {"vlen": "vlen"}
    with make(mixed, "process", fields=fields, postprocess=objects) as reader:
        with pytest.raises(PostprocessError, match="Python objects cannot be in shared memory"):
            reader.get_next_batch()
    with make(mixed, 2, fields=fields, postprocess=fails_later) as reader:
        check(reader.get_next_batch(), {"vlen": mixed[1]["vlen"]})
        with pytest.raises(PostprocessError, match="this one"):
            reader.get_next_batch()
        check(reader.get_next_batch(), {"vlen": mixed[1]["vlen"]})


# --- deaths --------------------------------------------------------------------------------------


def crash(vlen, csr, *, number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return vlen, Csr(csr.data / 2, csr.indices, csr.indptr, csr.shape)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["process", 2])
def test_a_crash_costs_its_batch_alone(mixed, workers):
    options = {"fields": {"vlen": "vlen", "csr": "csr"}, "shuffle": "full"}
    wanted = epochs(mixed, "thread", 1, **options)
    with make(mixed, workers, **options, postprocess=crash) as reader:
        for number, other in enumerate(wanted):
            if number == 2:
                with pytest.raises(ReadError, match="killed by signal 9"):
                    reader.get_next_batch()
                continue
            batch = reader.get_next_batch()
            assert np.array_equal(batch.vlen.values, other.vlen.values)
            assert np.array_equal(batch.csr.data, other.csr.data / 2)


@pytest.mark.slow
def test_killed_helpers_lose_nothing_and_leave_nothing(mixed, pictures):
    options = {"shuffle": "full", "prefetch": 5}
    wanted = epochs(mixed, "thread", 3, **options)
    names = sorted(os.listdir("/dev/shm"))
    with make(mixed, 2, **options) as reader:
        sizes, batches = [], iter(wanted)
        for turn in range(3):
            for _ in range(len(reader)):
                assert_same([reader.get_next_batch().copy()], [next(batches)])
            sizes.append(os.fstat(reader._engine.filler.shared.fd).st_size)
            if turn < 2:
                # (One that was killed is replaced when it is needed, as it was for these batches.)
                wait_until(lambda: all(s.process for s in reader._engine.filler.supervisors))
                pid = pids_of(reader)[turn]
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda pid=pid: not is_alive(pid))
        assert sizes[2] <= sizes[0] * 1.2
        fd = reader._engine.filler.shared.fd
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert sorted(os.listdir("/dev/shm")) == names


@pytest.mark.slow
@pytest.mark.parametrize("what", ["X/indptr", "X/shape", "names"])
def test_a_new_helper_finds_what_was_rewritten_in_place(tmp_path, what):
    path = sparse_file(tmp_path / "a.h5", rows=20)
    with h5py.File(path, "r+") as file:
        file["var/_index"] = [b"a", b"b", b"c", b"d"]
    field = SparseField("X", columns=["c", "a"])
    with make((path, {}), "process", fields={"x": field}, prefetch=1) as reader:
        reader.get_next_batch()
        os.kill(pids_of(reader)[0], signal.SIGKILL)
        with h5py.File(path, "r+") as file:
            if what == "X/indptr":
                file[what][1] = 2
            elif what == "names":
                file["var/_index"][...] = [b"c", b"b", b"a", b"d"]
            else:
                del file["X/indptr"]
                file["X/indptr"] = np.append(np.arange(19) * 4, 79)
                file["X"].attrs["shape"] = (19, 4)
        for _ in range(2):
            with pytest.raises(ReadError, match=r"a\.h5: .*has changed .*new reader"):
                reader.get_next_batch()


@pytest.mark.slow
def test_readers_that_nobody_closes(mixed, tmp_path):
    """Their helpers end with the program, which ends as usual."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from h5async import AsyncReader\n"
        "reader = AsyncReader(hdf5_path=sys.argv[1], fields={'csr': 'csr', 'vlen': 'vlen'},\n"
        "                     workers=2, batch_size=8, device='cpu')\n"
        "batch = reader.get_next_batch()\n"
        "print(batch.csr, *[s.process._popen.pid for s in reader._engine.filler.supervisors])\n"
    )
    found = subprocess.run(
        [sys.executable, script, mixed[0][0]], capture_output=True, text=True, timeout=200
    )
    assert (found.returncode, found.stderr) == (0, "")
    for pid in found.stdout.split()[-2:]:
        wait_until(lambda pid=int(pid): not is_alive(pid))


# --- errors and memory ---------------------------------------------------------------------------


@pytest.mark.slow
def test_offsets_that_lie(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["v"], file["at"] = np.arange(10), [0, 5, 3, 10]
    with pytest.raises(DatasetError, match="sample 1 would begin at value 5"):
        make((path, {}), "process", fields={"v": RaggedField("v", offsets="at")})


@pytest.mark.slow
def test_memory_is_bounded_and_taken_as_it_is_touched(tmp_path):
    """A long sample among short ones: its bytes count for the bound, and cost nothing unread."""
    path = tmp_path / "long.h5"
    lengths = [10] * 40 + [100 << 20]
    with h5py.File(path, "w") as file:
        file.create_dataset("v", (sum(lengths),), "u1", chunks=(1 << 20,), compression="gzip")
        file["at"] = lengths
    fields = {"v": RaggedField("v", offsets="at", offsets_kind="lengths")}
    with make((path, {}), "process", fields=fields) as reader:
        for _ in range(5):
            assert reader.get_next_batch().v.values.size == 80
        status = os.fstat(reader._engine.filler.shared.fd)
        assert status.st_blocks * 512 < 20 << 20 < 200 << 20 < status.st_size
        assert reader.get_next_batch().v.lengths.tolist() == [100 << 20]
    for workers in ("thread", "process"):
        with pytest.raises(OutOfMemoryError, match="2 batches of 8 samples take 209,"):
            make((path, {}), workers, fields=fields, max_batch_bytes=200_000_000)


@pytest.mark.slow
def test_dense_rows_count(tmp_path):
    path = sparse_file(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["X"].attrs["shape"] = (6, 1_000_000)
    fields = {"x": SparseField("X", dense=True)}
    for workers in ("thread", "process"):
        with pytest.raises(OutOfMemoryError, match="2 batches of 6 samples take 48,"):
            make((path, {}), workers, fields=fields, max_batch_bytes=40_000_000)


def test_what_is_still_refused(tmp_path):
    path = sparse_file(tmp_path / "a.h5")
    with pytest.raises(ConfigError, match="cache"):
        make((path, {}), 2, fields={"x": SparseField("X")}, cache="host")
