"""Finds HDF5's filter plugins: a filter's number enters, a function that undoes it leaves.

A plugin is a shared library whose `H5PLget_plugin_info` returns its filter's number and function
(H5PLextern.h, H5Zdevelop.h of the HDF5 reference). The compiled core calls that function, without
HDF5 and its lock. Plugins come from the folders where HDF5 itself looks for them
(HDF5_PLUGIN_PATH), else from hdf5plugin: as for HDF5 after ``import hdf5plugin``.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_uint, c_void_p
from functools import lru_cache
from pathlib import Path

import h5py

from h5async.codec.corefilters import CoreFilter, CoreKind, Parameters
from h5async.system.interruptions import suppressing

_FIRST_REGISTERED = 256  # smaller numbers are HDF5's own filters
_FILTER_TYPE, _CLASS_VERSION = 0, 1
_FILTERS_MAY_BE_LOADED = 1  # of H5PLget_loading_state
_TAKES_TURNS, _CHECKS_ITS_INPUT, _IS_BLOSC2 = 1, 2, 4  # enum PluginTrait of core/src/plugin.c

# Plugins that gave h5py's values in several threads at once (tests/read/test_plugins.py), and their
# other traits. All others take turns.
_BLOSC, _LZ4, _BITSHUFFLE, _ZFP, _ZSTD = 32001, 32004, 32008, 32013, 32015
_SZ3, _BLOSC2, _SPERR = 32024, 32026, 32028
_TRAITS = {
    _BLOSC: _CHECKS_ITS_INPUT,
    _LZ4: 0,
    _BITSHUFFLE: 0,
    _ZFP: 0,
    _ZSTD: _CHECKS_ITS_INPUT,
    _SZ3: 0,
    _BLOSC2: _CHECKS_ITS_INPUT | _IS_BLOSC2,
    _SPERR: 0,
}
_ZFP_MAGIC = int.from_bytes(b"zfp", "little")


class _FilterClass(Structure):
    """``H5Z_class2_t``."""

    _fields_ = [
        ("version", c_int),
        ("id", c_int),
        ("encoder_present", c_uint),
        ("decoder_present", c_uint),
        ("name", c_char_p),
        ("can_apply", c_void_p),
        ("set_local", c_void_p),
        ("filter", c_void_p),
    ]


def plugin_filter(number: int, parameters: Parameters) -> CoreFilter | None:
    """Return a filter that the core undoes by calling its plugin; None if there is none."""
    if number == _ZFP and (len(parameters) < 2 or parameters[1] & 0xFFFFFF != _ZFP_MAGIC):
        return None  # from a big-endian machine: the plugin would ask HDF5 to swap its bytes
    function = find_plugin(number)
    if function is None:
        return None
    traits = _TRAITS.get(number, _TAKES_TURNS)
    return CoreFilter(CoreKind.PLUGIN, traits, values=parameters, function=function)


def find_plugin(number: int) -> int | None:
    """Return the address of the plugin function that undoes a filter; None if there is none."""
    return _find(number, _folders()) if number >= _FIRST_REGISTERED else None


def is_safe_in_threads(number: int) -> bool:
    """Tell whether a plugin may be called in several threads at once."""
    return not _TRAITS.get(number, _TAKES_TURNS) & _TAKES_TURNS


def has_hdf5(number: int) -> bool:
    """Tell whether HDF5 can undo a filter in this process; imports hdf5plugin if necessary."""
    if not h5py.h5z.filter_avail(number) and folders_of_hdf5plugin():
        import hdf5plugin  # noqa: F401  (registers its filters with HDF5)
    return bool(h5py.h5z.filter_avail(number))


def _folders() -> tuple[Path, ...]:
    """Return the folders where HDF5 looks for plugins, in its order, then that of hdf5plugin."""
    found = []
    state = c_uint(_FILTERS_MAY_BE_LOADED)
    # HDF5_PLUGIN_PRELOAD may disable plugins. Only one thread at a time may call HDF5.
    with h5py._objects.phil, suppressing(OSError, AttributeError):
        ctypes.CDLL(h5py.h5z.__file__).H5PLget_loading_state(byref(state))
    if state.value & _FILTERS_MAY_BE_LOADED:
        paths = (h5py.h5pl.get(index) for index in range(h5py.h5pl.size()))
        found = [Path(path.decode("utf-8", "surrogateescape")) for path in paths]
    return (*found, *folders_of_hdf5plugin())


@lru_cache(maxsize=1)
def folders_of_hdf5plugin() -> tuple[Path, ...]:
    """Return the folder with the plugins of hdf5plugin; empty if it is not installed."""
    spec = importlib.util.find_spec("hdf5plugin")
    return () if spec is None or spec.origin is None else (Path(spec.origin).with_name("plugins"),)


@lru_cache(maxsize=256)
def _find(number: int, folders: tuple[Path, ...]) -> int | None:
    found = (_plugin(path) for folder in folders for path in _libraries(folder))
    return next((function for filter_number, function in found if filter_number == number), None)


def _libraries(folder: Path) -> Iterator[Path]:
    """Yield the shared libraries of a folder with names that HDF5 expects of plugins."""
    with suppressing(OSError):
        for path in sorted(folder.iterdir()):
            if path.name.startswith("lib") and (".so" in path.name or ".dylib" in path.name):
                yield path


@lru_cache(maxsize=256)
def _plugin(path: Path) -> tuple[int, int | None]:
    """Return the number of a library's filter, and the address of the function that undoes it."""
    with suppressing(OSError, AttributeError):
        library = ctypes.CDLL(str(path))  # never unloaded
        library.H5PLget_plugin_info.restype = POINTER(_FilterClass)
        if library.H5PLget_plugin_type() == _FILTER_TYPE:
            found = library.H5PLget_plugin_info()
            if found and found[0].version == _CLASS_VERSION:
                return int(found[0].id), found[0].filter
    return -1, None
