"""The registry of HDF5 filters, one entry per filter, and how the compiled core undoes each.

docs/architecture.md explains how to add one.

One filter is this package's own: it converts stored elements to NumPy's. It comes first in a
pipeline, so that it is undone last, and gives the same results as HDF5's conversion. Its parameters
are the bytes of an element in NumPy and as stored, then `Step`s. Only the core undoes it.

Other filters are undone by HDF5 filter plugins: shared libraries whose `H5PLget_plugin_info`
returns a filter's number and function (H5PLextern.h, H5Zdevelop.h of the HDF5 reference). The core
calls that function without HDF5 or its lock. Plugins are found in the folders where HDF5 itself
looks for them (HDF5_PLUGIN_PATH), then in hdf5plugin: as in HDF5 after ``import hdf5plugin``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_uint, c_void_p
from enum import IntEnum
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import h5py

from h5async.system.interruptions import suppressing

DEFLATE, SHUFFLE, FLETCHER32, SZIP, NBIT, SCALEOFFSET = 1, 2, 3, 4, 5, 6
BZIP2, LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2 = 307, 32000, 32001, 32004, 32008, 32015, 32026
ZFP, SZ, FCIDECOMP, SZ3, SPERR = 32013, 32017, 32018, 32024, 32028
_OF_INTEGERS = 2  # the scale type of scaleoffset for integers
CONVERSION = -1  # HDF5's filter numbers are not negative, so no file can name it
MOST_STEPS = 1024
_STEP_VALUES = 13
_LARGEST = 1 << 31  # element sizes of the core are 32-bit numbers
_MANTISSAS = {2: 10, 4: 23, 8: 52}  # bits, by the bytes of a NumPy float

# A filter's client data, in HDF5's terms: its numbers in the filter pipeline message.
Parameters = tuple[int, ...]


class CoreKind(IntEnum):
    """Numbers of the filters that the compiled core undoes: ``enum Kind`` of core/src/common.h."""

    DEFLATE = 1
    SHUFFLE = 2
    FLETCHER32 = 3
    LZF = 4
    ZSTD = 5
    LZ4 = 6
    BLOSC = 7
    BITSHUFFLE = 8
    BITSHUFFLE_LZ4 = 9
    BITSHUFFLE_ZSTD = 10
    NOTHING = 11
    PLUGIN = 12
    SZIP = 13
    NBIT = 14
    SCALEOFFSET = 15
    BZIP2 = 16
    STORED = 17


class CoreFilter(NamedTuple):
    """A filter in the compiled core's form."""

    kind: CoreKind
    element_nbytes: int = 0  # of filters that shuffle; for a plugin, its traits; else 0
    block: int = 0  # elements of a block, for bitshuffle; 0 means the default
    library: str | None = None  # the codec library that the core calls; see core/binding.py
    values: Parameters = ()  # the client data, if the core reads them
    function: int = 0  # for a plugin, the address of the function that undoes the filter


# For a filter whose parameters leave the data unchanged.
NOTHING = CoreFilter(CoreKind.NOTHING)


class StepKind(IntEnum):
    """Kinds of steps: ``enum StepKind`` of core/src/stored.c."""

    COPY = 0
    ENDED = 1  # a string terminated by NUL
    PADDED = 2  # a string padded with spaces
    BITS = 3  # an integer in some of the bits
    FLOAT = 4  # a float of a format that NumPy lacks


class Step(NamedTuple):
    """Converts some values of each element."""

    kind: StepKind
    start: int  # byte offset of the values in the stored element,
    to: int  # and in NumPy's
    stored_nbytes: int  # size of one value as stored,
    nbytes: int  # and in NumPy
    repeats: int = 1  # the number of adjacent values
    is_big: bool = False  # whether both are big-endian
    # BITS: bit offset, number of bits, and whether they are signed. FLOAT: the sign bit, the first
    # bit and the number of bits of the exponent, the same of the mantissa, and the exponent's bias.
    given: tuple[int, ...] = ()

    def moved(self, start: int, to: int) -> Step:
        """Return the same step with its offsets increased by `start` and `to` bytes."""
        return self._replace(start=self.start + start, to=self.to + to)

    @property
    def is_valid(self) -> bool:
        """Whether the core can do the step."""
        if self.kind <= StepKind.PADDED:
            return 0 < self.nbytes == self.stored_nbytes
        if not (0 < self.stored_nbytes <= 8 and self.nbytes in (1, 2, 4, 8)):
            return False
        bits = 8 * self.stored_nbytes
        if self.kind == StepKind.BITS:
            offset, precision, _ = self.given[:3]
            return 0 < precision <= 8 * self.nbytes and offset + precision <= bits
        sign, power, power_bits, mantissa, mantissa_bits, bias = self.given
        room, powers = _MANTISSAS.get(self.nbytes, 0), 8 * self.nbytes - 1
        return (
            max(sign + 1, power + power_bits, mantissa + mantissa_bits) <= bits
            and 0 < mantissa_bits <= room
            and 0 < power_bits <= powers - room
            and (1 << power_bits) - 2 - bias <= (1 << (powers - room - 1)) - 1
            and bias + mantissa_bits <= (1 << (powers - room - 1)) - 1 + room
        )


def parameters_of(nbytes: int, stored_nbytes: int, steps: list[Step]) -> Parameters | None:
    """Return the parameters of a conversion filter, or None if the core cannot undo it."""
    flat = (
        (*step[:-1], *step.given, *(0,) * (_STEP_VALUES - len(step) + 1 - len(step.given)))
        for step in steps
    )
    found = tuple(map(int, (nbytes, stored_nbytes, *chain.from_iterable(flat))))
    return found if _are_valid(found) else None


def stored_filter(parameters: Parameters) -> CoreFilter | None:
    """Return a conversion filter in the core's form; None if the parameters are invalid."""
    return CoreFilter(CoreKind.STORED, values=parameters) if _are_valid(parameters) else None


def _are_valid(parameters: Parameters) -> bool:
    nbytes, stored_nbytes, *rest = (*parameters, 0, 0)[: max(2, len(parameters))]
    is_sized = 0 < stored_nbytes <= nbytes < _LARGEST  # the stored form is never the larger one
    if not is_sized or len(rest) % _STEP_VALUES or len(rest) > MOST_STEPS * _STEP_VALUES:
        return False
    for at in range(0, len(rest), _STEP_VALUES):
        kind, *numbers = rest[at : at + _STEP_VALUES]
        if kind not in set(StepKind) or not all(0 <= n < _LARGEST for n in numbers):
            return False
        start, to, one, each, count, is_big, *given = numbers
        step = Step(StepKind(kind), start, to, one, each, count, bool(is_big), tuple(given))
        is_within = (
            step.start + step.repeats * step.stored_nbytes <= stored_nbytes
            and step.to + step.repeats * step.nbytes <= nbytes
        )
        if not (is_within and step.is_valid):
            return False
    return True


# --- plugins --------------------------------------------------------------------------------------

_FIRST_REGISTERED = 256  # smaller numbers are HDF5's own filters
_FILTER_TYPE, _CLASS_VERSION = 0, 1
_FILTERS_MAY_BE_LOADED = 1  # of H5PLget_loading_state
_TAKES_TURNS, _CHECKS_ITS_INPUT, _IS_BLOSC2 = 1, 2, 4  # enum PluginTrait of core/src/plugin.c

# Plugins that gave h5py's values when called in several threads at once
# (tests/read/test_plugins.py), with their other traits. All others take turns.
_TRAITS = {
    BLOSC: _CHECKS_ITS_INPUT,
    LZ4: 0,
    BITSHUFFLE: 0,
    ZFP: 0,
    ZSTD: _CHECKS_ITS_INPUT,
    SZ3: 0,
    BLOSC2: _CHECKS_ITS_INPUT | _IS_BLOSC2,
    SPERR: 0,
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
    """Return a filter that the core undoes through its plugin; None if no plugin can do it."""
    if number == ZFP and (len(parameters) < 2 or parameters[1] & 0xFFFFFF != _ZFP_MAGIC):
        return None  # from a big-endian machine: the plugin would ask HDF5 to swap its bytes
    function = find_plugin(number)
    if function is None:
        return None
    traits = _TRAITS.get(number, _TAKES_TURNS)
    return CoreFilter(CoreKind.PLUGIN, traits, values=parameters, function=function)


def is_lossy(entry: Filter) -> bool:
    """Return whether a filter may change values whenever it encodes them."""
    if entry.number == SCALEOFFSET:  # lossless only for integers with automatic bit width
        return entry.parameters[:2] != (_OF_INTEGERS, 0)
    return entry.number in (ZFP, SZ, FCIDECOMP, SZ3, SPERR)


def find_plugin(number: int) -> int | None:
    """Return the address of the plugin function that undoes a filter; None if there is none."""
    return _find(number, _folders()) if number >= _FIRST_REGISTERED else None


def is_safe_in_threads(number: int) -> bool:
    """Tell whether several threads may call a plugin at once."""
    return not _TRAITS.get(number, _TAKES_TURNS) & _TAKES_TURNS


def _folders() -> tuple[Path, ...]:
    """Return the folders where HDF5 looks for plugins, in its order, then hdf5plugin's."""
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
    """Return the folder with hdf5plugin's plugins; empty if it is not installed."""
    spec = importlib.util.find_spec("hdf5plugin")
    return () if spec is None or spec.origin is None else (Path(spec.origin).with_name("plugins"),)


@lru_cache(maxsize=256)
def _find(number: int, folders: tuple[Path, ...]) -> int | None:
    found = (_plugin(path) for folder in folders for path in _libraries(folder))
    return next((function for filter_number, function in found if filter_number == number), None)


def _libraries(folder: Path) -> Iterator[Path]:
    """Yield the shared libraries of a folder whose names HDF5 would accept for plugins."""
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


# --- the registry ---------------------------------------------------------------------------------

# Values in client data, as in H5Zscaleoffset.c and H5Znbit.c.
_NBYTES_DECODED = (1, 2, 4, 8)
_SCALEOFFSET_PARAMETERS, _NBIT_PARAMETERS = 20, 8
_FLOAT_D_SCALING, _INTEGER = 0, 2
_POWERS_OF_TEN = {4: range(-45, 39), 8: range(-323, 309)}  # exponents, by the bytes of the float
_INTEGER_CLASS, _FLOAT_CLASS = 0, 1
_NBIT_ATOMIC = 1


class FilterEntry(NamedTuple):
    """A filter of the registry."""

    number: int  # as registered by The HDF Group
    name: str  # for messages
    # Client data -> the filter in the core's form; None if HDF5 or a plugin has to decode.
    core: Callable[[Parameters], CoreFilter | None] = lambda parameters: None


def _same(kind: CoreKind, library: str | None = None) -> Callable[[Parameters], CoreFilter]:
    return lambda _parameters: CoreFilter(kind, library=library)


def _shuffle(parameters: Parameters) -> CoreFilter | None:
    if not parameters or not 0 < parameters[0] < _LARGEST:
        return None
    return CoreFilter(CoreKind.SHUFFLE, parameters[0])


def _szip(parameters: Parameters) -> CoreFilter | None:
    if len(parameters) < 4:
        return None
    _, block, bits, pixels_a_line = parameters[:4]
    if not (1 <= bits <= 32 or bits == 64) or block % 2 or not block or not pixels_a_line:
        return None
    return CoreFilter(CoreKind.SZIP, library="aec", values=parameters)


def _bitshuffle(parameters: Parameters) -> CoreFilter | None:
    _, _, element, block, compressor = (*parameters, 0, 0, 0, 0, 0)[:5]
    if not 0 < element < _LARGEST:
        return None
    if compressor == 0:
        return None if block % 8 else CoreFilter(CoreKind.BITSHUFFLE, element, block)
    if compressor == 2:
        return CoreFilter(CoreKind.BITSHUFFLE_LZ4, element, block, "lz4")
    if compressor == 3:
        return CoreFilter(CoreKind.BITSHUFFLE_ZSTD, element, block, "zstd")
    return None


def _scaleoffset(parameters: Parameters) -> CoreFilter | None:
    if len(parameters) != _SCALEOFFSET_PARAMETERS or sys.byteorder != "little":
        return None
    scale_type, factor, count, class_, nbytes, sign, order, has_fill = parameters[:8]
    factor = (factor + (1 << 31)) % (1 << 32) - (1 << 31)  # stored as unsigned
    if nbytes not in _NBYTES_DECODED or order not in (0, 1) or has_fill not in (0, 1) or count < 1:
        return None
    if class_ == _INTEGER_CLASS:
        if scale_type != _INTEGER or sign not in (0, 1) or factor > 8 * nbytes:
            return None
        if factor == 8 * nbytes:
            return NOTHING
    elif class_ != _FLOAT_CLASS or scale_type != _FLOAT_D_SCALING or nbytes < 4:
        return None
    elif factor not in _POWERS_OF_TEN[nbytes]:
        return None
    return CoreFilter(CoreKind.SCALEOFFSET, values=parameters)


def _nbit(parameters: Parameters) -> CoreFilter | None:
    if len(parameters) < 2 or parameters[0] != len(parameters):
        return None
    if parameters[1]:  # HDF5 says "need not compress"
        return NOTHING
    if len(parameters) != _NBIT_PARAMETERS or sys.byteorder != "little":
        return None
    count, class_, nbytes, order, precision, offset = parameters[2:]
    if count < 1 or class_ != _NBIT_ATOMIC or nbytes not in _NBYTES_DECODED or order not in (0, 1):
        return None
    if precision < 1 or precision + offset > 8 * nbytes:
        return None
    return CoreFilter(CoreKind.NBIT, values=parameters)


def default_block(element: int) -> int:
    """Return the number of elements in a bitshuffle block if the client data do not say."""
    return max(128, 8192 // element // 8 * 8)


_ENTRIES = (
    FilterEntry(DEFLATE, "deflate", _same(CoreKind.DEFLATE, "deflate")),
    FilterEntry(SHUFFLE, "shuffle", _shuffle),
    FilterEntry(FLETCHER32, "fletcher32", _same(CoreKind.FLETCHER32)),
    FilterEntry(SZIP, "szip", _szip),
    FilterEntry(NBIT, "nbit", _nbit),
    FilterEntry(SCALEOFFSET, "scaleoffset", _scaleoffset),
    FilterEntry(305, "lzo"),
    FilterEntry(BZIP2, "bzip2", _same(CoreKind.BZIP2, "bz2")),
    FilterEntry(LZF, "lzf", _same(CoreKind.LZF)),
    FilterEntry(BLOSC, "blosc", _same(CoreKind.BLOSC, "blosc")),
    FilterEntry(LZ4, "lz4", _same(CoreKind.LZ4, "lz4")),
    FilterEntry(BITSHUFFLE, "bitshuffle", _bitshuffle),
    FilterEntry(ZFP, "zfp"),
    FilterEntry(ZSTD, "zstd", _same(CoreKind.ZSTD, "zstd")),
    FilterEntry(32017, "sz"),
    FilterEntry(32018, "fcidecomp"),
    FilterEntry(SZ3, "sz3"),
    FilterEntry(BLOSC2, "blosc2"),
    FilterEntry(SPERR, "sperr"),
    FilterEntry(CONVERSION, "conversion", stored_filter),
)
REGISTRY = {entry.number: entry for entry in _ENTRIES}


class Filter(NamedTuple):
    """One filter of a pipeline: its registered number, client data, and name in the file."""

    number: int
    parameters: Parameters
    name: str

    @property
    def entry(self) -> FilterEntry:
        """The filter's entry in the registry; an empty one if it is not registered."""
        return REGISTRY.get(self.number) or FilterEntry(self.number, self.name)

    @property
    def label(self) -> str:
        """The filter's name for messages."""
        return self.entry.name or f"filter {self.number}"

    @property
    def core(self) -> CoreFilter | None:
        """The filter in the core's form; None if HDF5 has to undo it."""
        return _registered(self.number, self.parameters) or plugin_filter(
            self.number, self.parameters
        )

    @property
    def stated_chunk_nbytes(self) -> int | None:
        """The decoded size of a chunk according to the client data; None if they do not say."""
        if self.number not in (NBIT, SCALEOFFSET) or len(self.parameters) < 5:
            return None
        return self.parameters[2] * self.parameters[4]


@lru_cache(maxsize=256)
def _registered(number: int, parameters: Parameters) -> CoreFilter | None:
    entry = REGISTRY.get(number)
    return None if entry is None else entry.core(parameters)


def is_known_to_hdf5(entry: Filter) -> bool:
    """Tell whether HDF5 can undo a filter in this process, possibly with hdf5plugin."""
    if entry.number == CONVERSION or h5py.h5z.filter_avail(entry.number):
        return True
    if folders_of_hdf5plugin():
        import hdf5plugin  # noqa: F401  (registers its filters with HDF5)
    return bool(h5py.h5z.filter_avail(entry.number))
