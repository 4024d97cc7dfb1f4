"""What all tests share: h5py as the truth, poisoned buffers, no leaks, and GPUs only by -m gpu.

Test modules import the helpers by name: ``from conftest import assert_reads_like_h5py``.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import hypothesis
import numpy as np
import pytest
from memorystore import MemoryStore, new_store

from h5async import AsyncReader
from h5async.core.binding import Core, load_core

if load_core() is None:
    # Without the core files are not mapped by default. Here they are, so that both ways of Python's
    # are tested: by maps in this process, and by reads in those that tests start.
    for module in ("core.binding", "opening.dataset", "fill.filling"):
        importlib.import_module(f"h5async.{module}").mapping_mode = lambda io: io  # type: ignore[attr-defined]

EXAMPLES = Path(__file__).parents[1] / "scripts" / "examples"
POISON = 0xA5  # what a buffer holds before anything was read into it

# "all" (scripts/test --all): every test and case runs, and more random ones; else a sample does.
SAMPLE = os.environ.get("H5ASYNC_TESTS", "0")

hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=400 if SAMPLE == "all" else 25, derandomize=True
)
hypothesis.settings.register_profile(
    "thorough",
    deadline=None,
    max_examples=20_000,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# --- a sample of what takes long ----------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector, and keep it away from what was collected.

    It would go through all tests, and all modules that they import, again and again: also each
    time that a test asks it for what the test itself let go of.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        # Hypothesis asks the collector who holds NumPy's random state: once, before that is frozen.
        hypothesis.given(hypothesis.strategies.none())(lambda _: None)()
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest orders them by their fixtures: it takes long
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a small sample of the tests, the same each time.

    Tests that are named by ``::`` or -k run whole, unless H5ASYNC_TESTS is set.

    Of a test's n cases, sqrt(n) run, or as many as its mark ``sampled(count)`` says, and also
    sqrt(n) of those that `cases.each` gives it; of the tests marked ``slow``, none.
    H5ASYNC_TESTS=all runs everything, and a number another sample.
    """
    by_name = "H5ASYNC_TESTS" not in os.environ
    if SAMPLE == "all" or (by_name and config.option.keyword):
        return
    named = {
        argument.partition("::")[2].partition("[")[0] for argument in config.args if by_name
    } - {""}
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for name, found in cases.items():
        if name.partition("::")[2] in named:
            continue
        chance = random.Random(f"{SAMPLE} {name}")
        count = _few(len(found))
        if mark := found[0].get_closest_marker("sampled"):
            count = min(len(found), mark.args[0])
        if found[0].get_closest_marker("slow"):
            count = 0
        left_out |= set(found) - set(chance.sample(found, count))
        cases_inside = getattr(getattr(found[0], "obj", None), "_cases", [])  # of `cases.each`
        numbers = chance.sample(range(len(cases_inside)), _few(len(cases_inside)))
        cases_inside[:] = [cases_inside[number] for number in sorted(numbers)]
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _few(count: int) -> int:
    return min(count, math.ceil(math.sqrt(count)))


# --- GPU tests -----------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Keep nothing in the cache folder, and hide GPUs, unless tests are chosen by ``-m gpu``.

    All others assume the CPU, which device="auto" then means, also in the processes they start.
    CUDA looks at this variable once a process: so the two kinds of tests never share one.
    """
    os.environ["XDG_CACHE_HOME"] = os.devnull
    if "gpu" not in config.getoption("markexpr").replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _why_no_gpu() -> str | None:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "needs a CUDA GPU; if there is one, choose the tests for it by -m gpu"
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
    except ImportError as error:
        return f"needs CuPy ({error})"
    try:
        return None if runtime.getDeviceCount() else "needs a CUDA GPU"
    except runtime.CUDARuntimeError as error:
        return f"needs a CUDA GPU ({error})"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none; with H5ASYNC_REQUIRE_GPU=1 let it fail."""
    if item.get_closest_marker("simulated_gpu") is not None and "SIMULATED_GPU" not in os.environ:
        pytest.skip("needs simulated GPUs: scripts/test_gpu")
    if item.get_closest_marker("gpu") is None:
        return
    reason = _why_no_gpu()
    if reason is not None and os.environ.get("H5ASYNC_REQUIRE_GPU") == "1":
        pytest.fail(f"H5ASYNC_REQUIRE_GPU=1, but this test {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(reason)


def require_extra(name: str) -> Any:
    """Import an optional package; without it skip, or with H5ASYNC_REQUIRE_EXTRAS=1 fail."""
    if os.environ.get("H5ASYNC_REQUIRE_EXTRAS") == "1":
        return importlib.import_module(name)
    return pytest.importorskip(name)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """A store in memory, of which nothing may be left open."""
    made = new_store()
    yield made
    assert not made.open_sources
    made.held.clear()


@pytest.fixture(scope="session")
def core() -> Core:
    """Return the compiled core; without it skip, or with H5ASYNC_REQUIRE_EXTRAS=1 fail."""
    found = load_core()
    if found is not None:
        return found
    reason = "needs the compiled core: install h5async where a C compiler is, without H5ASYNC_CORE"
    if os.environ.get("H5ASYNC_REQUIRE_EXTRAS") == "1":
        pytest.fail(f"H5ASYNC_REQUIRE_EXTRAS=1, but this test {reason}", pytrace=False)
    pytest.skip(reason)


# --- leaks ---------------------------------------------------------------------------------------

_HAS_FAILED = pytest.StashKey[bool]()


def our_threads() -> set[threading.Thread]:
    """Return the threads that a reader started and that are still alive."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("h5async")}


def open_descriptors(directory: Path) -> dict[str, str]:
    """Return the open descriptors of this process that lead below `directory`: number -> target."""
    found = {}
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the descriptor that lists the directory
            continue
        if target.startswith(f"{directory}{os.sep}"):
            found[number] = target
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if call.when == "call":
        item.stash[_HAS_FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def _leaks_nothing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Fail a test that leaves a thread of ours, or an open file, behind."""
    directory = tmp_path_factory.getbasetemp().resolve()
    threads, descriptors = our_threads(), open_descriptors(directory)
    yield
    if request.node.stash.get(_HAS_FAILED, True):
        return  # its traceback holds readers and arrays: nothing can be said
    if our_threads() - threads or open_descriptors(directory).keys() - descriptors.keys():
        gc.collect()
    for thread in our_threads() - threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), f"the test left the thread {thread.name} behind"
    left = {
        number: target
        for number, target in open_descriptors(directory).items()
        if descriptors.get(number) != target
    }
    assert not left, f"the test left files open: {sorted(left.values())}"


# --- the truth -----------------------------------------------------------------------------------


def truth(path: os.PathLike[str] | str, name: str = "data", num_dim: int = 0) -> np.ndarray:
    """Return what h5py reads: all samples, the sample dimension first, in native byte order."""
    with h5py.File(path, "r") as file:
        values = file[name][...]
    values = np.moveaxis(values, num_dim, 0)
    return np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False))


def assert_same_bits(found: Any, expected: Any) -> None:
    """Assert equal shape, dtype and bytes: payloads of NaN and signs of zero count.

    Bytes between the fields of a compound do not count, nor which byte stands for True.
    """
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if expected.dtype.fields:
        for name in expected.dtype.names:
            assert_same_bits(found[name], expected[name])
        return
    bits = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (found, expected)]
    if expected.dtype.kind == "b":
        assert found.size == 0 or bits[0].max() <= 1, "NumPy takes no byte but 1 as True"
        bits = [a != 0 for a in bits]
    different = np.flatnonzero(bits[0] != bits[1])
    if different.size:
        at = np.unravel_index(different[0] // expected.dtype.itemsize, expected.shape)
        raise AssertionError(
            f"{different.size} of {bits[0].size} bytes differ, the first at {at}:"
            f" {found[at]!r} was read, {expected[at]!r} is right"
        )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a path for a file; modules with a file of their own have their own fixture."""
    return tmp_path / "file.h5"


@pytest.fixture
def plain(path: Path) -> Path:
    """Write 100 samples without chunks."""
    with h5py.File(path, "w") as file:
        file["data"] = np.zeros((100, 3))
        file["labels"] = np.arange(100)
    return path


def reader_of(path: Any, **options: Any) -> AsyncReader:
    """Return a reader of a file without labels."""
    return AsyncReader(hdf5_path=path, device="cpu", **{"labels_field": None, **options})


def first_batch(path: Any, **options: Any) -> Any:
    """Return a copy of the first batch of a file without labels."""
    with reader_of(path, **options) as reader:
        return reader.get_next_batch().copy()


def read_exactly_an_epoch(reader: AsyncReader) -> None:
    """Read an epoch, and nothing of the one that follows."""
    for _ in range(len(reader)):
        reader.fetch_data()
    for _ in range(len(reader)):
        reader.get_next_batch()


def example(name: str) -> Any:
    """Import a script of scripts/examples."""
    path = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_each_sample_once(folder: Path, count: int) -> None:
    """Compare what ranks 0 and 1 wrote down, the epoch and the samples of each of their batches."""
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert len(first) == len(second)
    for epoch in range(3):
        seen = [index for number, some in first + second if number == epoch for index in some]
        assert len(seen) == len(set(seen)) == count


def spoil_chunk(path: Path, number: int, name: str = "data") -> None:
    """Overwrite a chunk of a dataset with what no filter undoes."""
    with h5py.File(path) as file:
        chunk = file[name].id.get_chunk_info(number)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)


def poison(reader: AsyncReader) -> None:
    """Overwrite the buffers of a reader that was not used yet: what is not written shows."""
    for slot in reader._engine.setup.slots:
        for array in (*slot.memory.raw, *slot.memory.out):
            array.reshape(-1).view(np.uint8)[...] = POISON


def assert_epoch_is(
    reader: AsyncReader, expected: np.ndarray, *, name: str = "data", in_order: bool = True
) -> None:
    """Read one epoch of a reader, and compare each batch with its rows of `expected`."""
    indices = []
    for batch in reader:
        assert batch.index.size == batch.size <= reader.config.batch_size
        indices.append(batch.index.copy())
        assert_same_bits(np.asarray(batch[name]), expected[batch.index])
    assert len(indices) == len(reader)
    index = np.concatenate([np.zeros(0, np.int64), *indices])
    assert np.array_equal(index if in_order else np.sort(index), np.arange(len(expected)))


def assert_reads_like_h5py(
    path: os.PathLike[str] | str,
    name: str = "data",
    *,
    num_dim: int = 0,
    num_threads: int = 0,
    prefetch: int = 2,
    batch_size: int = 4,
    fallback: str | None = None,
    orders: Sequence[Any] = (False, "full"),
    **options: Any,
) -> None:
    """Read an epoch in order and a shuffled one, and compare each batch with h5py bit for bit.

    Parameters
    ----------
    orders
        Values of `shuffle`.
    fallback
        None: assert that no byte came through h5py. Else: assert that all did, and that the
        reason holds this text.
    options
        More options of the reader.
    """
    expected = truth(path, name, num_dim)
    for shuffle in orders:
        with AsyncReader(
            hdf5_path=path,
            data_field=name,
            labels_field=None,
            num_dim=num_dim,
            batch_size=batch_size,
            shuffle=shuffle,
            num_threads=num_threads,
            prefetch=prefetch,
            device="cpu",
            **options,
        ) as reader:
            poison(reader)
            assert_epoch_is(reader, expected, in_order=not shuffle)
            reason = reader.layouts["data"].fallback_reason
            if fallback is None:
                assert reason is None
                assert reader.fallback_reads == 0
            else:
                assert reason is not None
                assert fallback in reason
                assert reader.fallback_reads >= len(reader)


def fetch_and_keep_the_gil(reader: AsyncReader) -> None:
    """Ask for a batch, and give the GIL to nobody until it is filled.

    By another thread: the loop is kept from calls in which it fills small batches itself.
    """
    reader._engine.delivery.take_turn = reader._engine.delivery.ask_turn = lambda *_: False
    submissions = reader._engine.delivery._submissions
    assert submissions is not None
    seen = submissions.events()
    reader.fetch_data()
    end = time.monotonic() + 60
    while submissions.events() == seen:
        assert time.monotonic() < end


@pytest.fixture
def nobody_else_gets_the_gil() -> Iterator[None]:
    """Let a thread that holds the GIL keep it until it gives it away."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def h5py_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read all through h5py, though the compiled core may be there."""
    monkeypatch.setattr("h5async.fill.filling.load_core", lambda: None)


def read(path: Any, fields: Any, **options: Any) -> Any:
    """Return the first batch, in memory of its own."""
    options = {"device": "cpu", "batch_size": 64, "index_cache": False} | options
    with AsyncReader(hdf5_path=path, fields=fields, **options) as reader:
        return reader.get_next_batch().copy()
