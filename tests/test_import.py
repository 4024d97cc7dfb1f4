"""What `import h5async` loads: nothing; and its names: what they need, and nothing that reads."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATER = (
    "h5async.cli",
    "h5async.core",
    "h5async.deliver",
    "h5async.reader.engine",
    "h5async.fill",
    "h5async.index",
    "h5async.process",
    "h5async.read",
    "cloudpickle",
    "pydantic",
    "cupy",
    "hdf5plugin",
    "imagecodecs",
    "pyarrow",
    "ray",
    "rich",
    "torch",
    "typer",
    "yaml",
)


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_what_is_loaded_later():
    code = "import sys; from h5async import AsyncReader; print(*sys.modules)"
    loaded = run(code).split()
    assert [name for name in LATER if name in loaded] == []
    assert "h5async.reader" in loaded


def test_the_package_alone_loads_nothing():
    loaded = run("import sys, h5async; print(*sys.modules)").split()
    assert [name for name in ("numpy", "h5py", "pydantic") if name in loaded] == []
    assert [name for name in loaded if name.startswith("h5async.")] == []


def test_names_are_listed_before_they_are_loaded():
    code = "import h5async; print({*h5async.__all__} == {*dir(h5async)})"
    assert run(code) == "True\n"


def test_options_are_checked_without_what_reads():
    code = (
        "import sys, h5async; h5async.ReaderConfig(hdf5_path='a.h5', fields={'a': 'b'})\n"
        "print('h5async.reader.engine' in sys.modules)"
    )
    assert run(code) == "False\n"


def test_all_names_are_there():
    code = (
        "import h5async; from h5async import *\n"
        "print(all(name in globals() for name in h5async.__all__), h5async.__version__)"
    )
    found, version = run(code).split()
    assert found == "True"
    assert version[0].isdigit()


@pytest.mark.slow
def test_modules_are_attributes_all_the_same():
    code = "import h5async; print(h5async.read.fallback.__name__, h5async.torch.__name__)"
    pytest.importorskip("torch")
    assert run(code) == "h5async.read.fallback h5async.torch\n"


def test_a_name_that_is_not_there():
    import h5async

    with pytest.raises(AttributeError, match="module 'h5async' has no attribute 'AsyncReeder'"):
        h5async.AsyncReeder  # noqa: B018


NAMES_IN_THREADS = """
import threading
import h5async
barrier, found = threading.Barrier(8), []
def use(names):
    barrier.wait()
    found.extend(name for name in names if getattr(h5async, name))
threads = [threading.Thread(target=use, args=(h5async.__all__[i::8],)) for i in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sorted(found) == sorted(h5async.__all__))
"""


@pytest.mark.parametrize("_", range(3))
def test_names_may_first_be_used_in_many_threads_at_once(_):
    assert run(NAMES_IN_THREADS) == "True\n"


MANY_THREADS = """
import sys, threading
import h5py, numpy as np
import h5async
with h5py.File(sys.argv[1], "w") as file:
    file["data"] = np.zeros((8, 2))
barrier, found = threading.Barrier(8), []
def make():
    barrier.wait()
    with h5async.AsyncReader(hdf5_path=sys.argv[1], labels_field=None, batch_size=4) as reader:
        found.append(len(list(reader)))
threads = [threading.Thread(target=make) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("_", range(3))
def test_the_first_readers_may_be_made_in_many_threads_at_once(tmp_path, _):
    assert run(MANY_THREADS, str(tmp_path / "a.h5")) == "[2, 2, 2, 2, 2, 2, 2, 2]\n"
