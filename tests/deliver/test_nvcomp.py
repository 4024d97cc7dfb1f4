"""nvCOMP's interface, as far as it works without a GPU; elsewhere `fake_nvcomp` stands in."""

from __future__ import annotations

import ctypes
import inspect

import fake_nvcomp
import pytest
from conftest import require_extra

from h5async.deliver import devicedecode as module
from h5async.deliver.devicedecode import FORMATS, Nvcomp, NvcompError, load_nvcomp


@pytest.fixture
def nvcomp():
    require_extra("nvidia.libnvcomp")
    return load_nvcomp()


def test_it_is_found_and_its_version_is_known(nvcomp):
    major, minor, patch = map(int, nvcomp.version.split("."))
    assert major in (5, 6)
    assert (minor, patch) >= (0, 0)
    assert load_nvcomp() is nvcomp


@pytest.mark.parametrize("form", FORMATS)
def test_the_memory_that_many_blocks_need_suffices_for_fewer(nvcomp, form):
    """It is reserved once, for the most that a batch may have; and the call's shape is right."""
    most = nvcomp.temp_nbytes(form, 256, 150_528, 256 * 150_528)
    assert 0 <= most < 1 << 30
    for count in (1, 2, 17, 100, 255):
        assert nvcomp.temp_nbytes(form, count, 150_528, count * 150_528) <= most


def test_all_functions_are_there(nvcomp):
    library = nvcomp._library
    for name in ("Deflate", "Zstd", "LZ4"):
        assert getattr(library, f"nvcompBatched{name}DecompressAsync")


@pytest.mark.parametrize("form", FORMATS)
def test_alignments_are_those_that_are_kept(nvcomp, form):
    """Deflate's stream lies at a multiple of 4; the memory to work with begins an allocation."""

    class Alignments(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_size_t) for name in ("input", "output", "temp"))

    name = {"deflate": "Deflate", "zstd": "Zstd", "lz4": "LZ4"}[form]
    found = Alignments()
    function = getattr(nvcomp._library, f"nvcompBatched{name}DecompressGetRequiredAlignments")
    assert function(nvcomp._options, ctypes.byref(found)) == 0
    assert found.input <= (4 if form == "deflate" else 1)
    assert found.output == 1
    assert found.temp <= 256


def test_what_is_no_library_is_refused(tmp_path):
    path = tmp_path / "libnvcomp.so.6"
    with pytest.raises(NvcompError, match="cannot be loaded"):
        Nvcomp(path)
    path.write_bytes(b"no library")
    with pytest.raises(NvcompError, match="cannot be loaded"):
        Nvcomp(path)


def test_an_unknown_version_is_refused(nvcomp, monkeypatch):
    monkeypatch.setattr(module, "_MAJOR_VERSIONS", (99,))
    with pytest.raises(NvcompError, match=r"nvCOMP \d+\.\d+\.\d+ is installed; versions"):
        load_nvcomp.__wrapped__()


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NvcompError, match="nvCOMP is not installed"):
        load_nvcomp.__wrapped__()


@pytest.mark.parametrize("method", ["temp_nbytes", "decompress"])
def test_the_stand_in_takes_the_same_arguments(method):
    real = inspect.signature(getattr(Nvcomp, method)).parameters
    fake = inspect.signature(getattr(fake_nvcomp.FakeNvcomp, method)).parameters
    assert list(real) == list(fake)
