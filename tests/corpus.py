"""A quirk of HDF5 enters; a small file that has it leaves, and which way a reader owes it.

Each quirk is a function that writes a file; a family of quirks is one function with a table of
cases, of which each makes a file of its own. `test_corpus.py` reads them all. Values are the same
in every run. Filters of hdf5plugin are imported where a file needs them: without it, making such
a file raises `ModuleNotFoundError`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import h5py
import imagecodecs
import numpy as np
from h5py import h5d, h5f, h5p, h5s, h5t, h5z

from h5async import DatasetError, H5AsyncError, ReadError, UnsafeFileError

HDF5 = ctypes.CDLL(h5py.h5p.__file__)
SEED = 1969
DONT_FILTER_PARTIAL_CHUNKS = 2
GIB = 2**30

# --- the register --------------------------------------------------------------------------------

Way = Literal["direct", "h5py", "unreadable"] | type[H5AsyncError]


@dataclass(frozen=True, eq=False)
class Quirk:
    """A file to be made, and how a reader must treat it.

    Attributes
    ----------
    way
        "direct": no byte may come through h5py; "h5py": all must; "unreadable": an epoch ends in
        an error, at the latest when its batch is due; an error: it is raised when a reader is
        made. Errors name file and dataset.
    names, num_dims
        Datasets to read, and the dimensions to count samples along.
    create
        Keywords of `h5py.File`.
    after
        Called with the path of the closed file.
    options
        Called with the folder of the file; gives more options of the reader.
    hollow
        Whether all rows are the same, as the quirk wants it.
    """

    name: str
    make: Callable[[h5py.File], None]
    way: Way
    names: tuple[str, ...] = ("data",)
    num_dims: tuple[int, ...] = (0,)
    create: Mapping[str, Any] = field(default_factory=dict)
    after: Callable[[Path], None] | None = None
    options: Callable[[Path], dict[str, Any]] | None = None
    hollow: bool = False

    def write(self, folder: Path) -> Path:
        """Make the file, and any beside it, in a folder of its own; return its path."""
        path = folder / "quirk.h5"
        with h5py.File(path, "w", **self.create) as file:
            self.make(file)
        if self.after:
            self.after(path)
        return path


QUIRKS: dict[str, Quirk] = {}
_OF_QUIRK = ("way", "names", "num_dims", "after", "options", "hollow")
_OF_FILE = ("libver", "userblock_size", "fs_strategy", "fs_page_size", "track_order")


def quirk(way: Way, *, cases: Mapping[str, Mapping[str, Any]] | None = None, **common: Any):
    """Register a function as a quirk; with `cases`, one for each: suffix of its name -> keywords.

    Keywords that are a quirk's or a file's go there, the others to the function.
    """

    def register(make: Callable[..., None]) -> Callable[..., None]:
        for suffix, keywords in (cases or {"": {}}).items():
            name = "_".join(filter(None, (make.__name__, suffix.replace(" ", "_"))))
            given = {"way": way, **common, **keywords}
            of_quirk = {key: given.pop(key) for key in _OF_QUIRK if key in given}
            of_file = {key: given.pop(key) for key in _OF_FILE if key in given}
            assert name not in QUIRKS, name
            QUIRKS[name] = Quirk(name, partial(make, **given), create=of_file, **of_quirk)
        return make

    return register


def product(*tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Combine tables of cases: names are joined, keywords merged."""
    return {
        " ".join(filter(None, (name for name, _ in cases))): {
            key: value for _, keywords in cases for key, value in keywords.items()
        }
        for cases in itertools.product(*(table.items() for table in tables))
    }


# --- values, types, filters ----------------------------------------------------------------------


def values(*shape: int, dtype: Any = "i4") -> np.ndarray:
    """Return runs of growing numbers and runs of noise, in turns; a filter gains a little."""
    dtype = np.dtype(dtype)
    if dtype.subdtype:
        return values(*shape, *dtype.shape, dtype=dtype.base)
    if dtype.fields:
        result = np.zeros(shape, dtype)
        for name in dtype.names:
            result[name] = values(*shape, dtype=dtype[name])
        return result
    count = math.prod(shape)
    rng = np.random.default_rng([SEED, count, zlib.crc32(dtype.str.encode())])
    noise = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
    if dtype.kind == "b":
        return (noise > 128).reshape(shape)
    if dtype.kind in "SV":
        ramp = np.repeat(np.arange(1, count + 1), dtype.itemsize).astype(np.uint8).view(dtype)
    else:
        ramp = (7 + np.arange(count) // 3).astype(dtype)
    runs = np.arange(count) // 29 % 2 == 1
    return np.where(runs, noise.view(dtype), ramp).astype(dtype).reshape(shape)


def smooth(*shape: int, dtype: Any = "f4") -> np.ndarray:
    """Return a random walk of small finite numbers, for filters that round."""
    steps = np.random.default_rng(SEED).integers(-9, 10, math.prod(shape))
    return (
        (steps.cumsum() / 8 if np.dtype(dtype).kind == "f" else steps.cumsum())
        .astype(dtype)
        .reshape(shape)
    )


def noise(*shape: int, dtype: Any = "i4") -> np.ndarray:
    """Return what no filter makes smaller."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.random.default_rng(SEED).integers(0, 256, nbytes, np.uint8).view(dtype).reshape(shape)


FilterSpec = tuple[int, tuple[int, ...]]


def of_plugin(filter_name: str, *args: Any, **kwargs: Any) -> Callable[[], FilterSpec]:
    def resolve() -> FilterSpec:
        import hdf5plugin

        entry = getattr(hdf5plugin, filter_name)(*args, **kwargs)
        return entry["compression"], tuple(entry["compression_opts"])

    return resolve


def builtin(number: int, *parameters: int) -> Callable[[], FilterSpec]:
    return lambda: (number, parameters)


def without_parameters(filter_name: str) -> FilterSpec:
    return FILTERS[filter_name]()[0], ()


SZIP_EC, SZIP_NN = 4, 32
INTEGERS, D_SCALE = 2, 0  # kinds of scaleoffset
BLOSC_CODECS = ("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd")
BLOSC_SHUFFLES = ("plain", "shuffled", "bitshuffled")
BLOSC2_CODECS = ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
BLOSC2_FILTERS = (*BLOSC_SHUFFLES, "delta")

FILTERS: dict[str, Callable[[], FilterSpec]] = {
    "deflate": builtin(h5z.FILTER_DEFLATE, 4),
    "deflate level 0": builtin(h5z.FILTER_DEFLATE, 0),
    "deflate level 9": builtin(h5z.FILTER_DEFLATE, 9),
    "shuffle": builtin(h5z.FILTER_SHUFFLE),
    "fletcher32": builtin(h5z.FILTER_FLETCHER32),
    "lzf": builtin(h5z.FILTER_LZF),
    "szip": builtin(h5z.FILTER_SZIP, SZIP_NN, 8),
    "szip entropy": builtin(h5z.FILTER_SZIP, SZIP_EC, 16),
    "nbit": builtin(h5z.FILTER_NBIT),
    "scaleoffset": builtin(h5z.FILTER_SCALEOFFSET, INTEGERS, 0),
    "scaleoffset to 32 bits": builtin(h5z.FILTER_SCALEOFFSET, INTEGERS, 32),
    "zstd": of_plugin("Zstd"),
    "zstd level 22": of_plugin("Zstd", 22),
    "zstd level -5": of_plugin("Zstd", -5),
    "lz4": of_plugin("LZ4"),
    "lz4 small blocks": of_plugin("LZ4", 100),
    "bzip2": of_plugin("BZip2"),
    "bitshuffle": of_plugin("Bitshuffle", cname="none"),
    "bitshuffle lz4": of_plugin("Bitshuffle", cname="lz4"),
    "bitshuffle lz4 small blocks": of_plugin("Bitshuffle", 16, cname="lz4"),
    "bitshuffle zstd": of_plugin("Bitshuffle", cname="zstd"),
    "bitshuffle zstd small blocks": of_plugin("Bitshuffle", 64, cname="zstd"),
    "blosc level 0": of_plugin("Blosc", "lz4", 0, 1),
    "blosc2 level 0": of_plugin("Blosc2", "lz4", 0, 1),
    "blosc2 rounded": of_plugin("Blosc2", "zstd", 5, 4),
    "zfp": of_plugin("Zfp", rate=16),
    "zfp reversible": of_plugin("Zfp", reversible=True),
    "sz3": of_plugin("SZ3", absolute=0.1),
}
for _codec, (_mode, _name) in itertools.product(BLOSC_CODECS, enumerate(BLOSC_SHUFFLES)):
    FILTERS[f"blosc {_codec} {_name}"] = of_plugin("Blosc", _codec, 5, _mode)
for _codec, (_mode, _name) in itertools.product(BLOSC2_CODECS, enumerate(BLOSC2_FILTERS)):
    FILTERS[f"blosc2 {_codec} {_name}"] = of_plugin("Blosc2", _codec, 5, _mode)
FILTERS["blosc"], FILTERS["blosc2"] = FILTERS["blosc lz4 shuffled"], FILTERS["blosc2 zstd shuffled"]

for _name in ("zstd", "lz4", "bzip2", "bitshuffle", "blosc", "blosc2"):
    FILTERS[f"{_name} without parameters"] = partial(without_parameters, _name)

COMPRESSORS = (
    "deflate; lzf; szip; zstd; lz4; bzip2; blosc; blosc2; bitshuffle; bitshuffle lz4; "
    "bitshuffle zstd"
)


def filtered_by(chains: str) -> dict[str, dict[str, Any]]:
    """Return a case for each chain, given as "shuffle, deflate; zstd"."""
    return {
        chain.replace(", ", " then "): {"filters": tuple(chain.split(", "))}
        for chain in chains.split("; ")
    }


def plist_of(
    *,
    chunks: tuple[int, ...] | None = None,
    filters: tuple[str, ...] = (),
    fill: Any = None,
    fill_time: int | None = None,
    alloc_time: int | None = None,
    layout: int | None = None,
    raw_edges: bool = False,
) -> h5p.PropDCID:
    plist = h5p.create(h5p.DATASET_CREATE)
    if chunks:
        plist.set_chunk(chunks)
    for name in filters:
        number, parameters = FILTERS[name]()
        plist.set_filter(number, h5z.FLAG_OPTIONAL, parameters)
    if raw_edges:
        flag = ctypes.c_uint(DONT_FILTER_PARTIAL_CHUNKS)
        assert HDF5.H5Pset_chunk_opts(ctypes.c_int64(plist.id), flag) >= 0
    if fill is not None:
        plist.set_fill_value(np.asarray(fill))
    if fill_time is not None:
        plist.set_fill_time(fill_time)
    if alloc_time is not None:
        plist.set_alloc_time(alloc_time)
    if layout is not None:
        plist.set_layout(layout)
    return plist


def dataset(
    file: h5py.Group,
    content: np.ndarray,
    name: str = "data",
    *,
    stored: h5t.TypeID | np.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    chunks: tuple[int, ...] | None = None,
    maxshape: tuple[int | None, ...] | None = None,
    written: tuple[Any, ...] = (np.s_[...],),
    **properties: Any,
) -> h5py.Dataset:
    """Store `content`; as elements of an HDF5 type `stored`, its bytes."""
    plist = plist_of(chunks=chunks, **properties)
    as_it_is = isinstance(stored, h5t.TypeID)
    dtype = h5py.Datatype(stored) if as_it_is else content.dtype if stored is None else stored
    made = file.create_dataset(
        name,
        content.shape if shape is None else shape,
        dtype,
        chunks=chunks,
        maxshape=maxshape,
        dcpl=plist,
    )
    if as_it_is:
        made.id.write(h5s.ALL, h5s.ALL, content, mtype=stored)
    elif made.size:
        for where in written:
            made[where] = content[where]
    return made


def encoded(content: np.ndarray, filters: tuple[str, ...]) -> bytes:
    """Return the stored bytes of a chunk of `content`."""
    with h5py.File("encoder", "w", driver="core", backing_store=False) as file:
        made = dataset(file, content, chunks=content.shape, filters=filters)
        file.flush()
        mask, chunk = made.id.read_direct_chunk((0,) * content.ndim)
    assert mask == 0, "a filter gave up"
    return chunk


def beside(file: h5py.File, name: str) -> Path:
    return Path(file.filename).parent / name


# --- filters, alone ------------------------------------------------------------------------------


@quirk(
    "direct",
    cases=filtered_by(
        "; ".join(n for n in FILTERS if n not in ("zfp", "zfp reversible", "sz3", "blosc2 rounded"))
    ),
)
def filter_alone(file, filters):
    dataset(file, values(22, 60), chunks=(5, 60), filters=filters)


@quirk("direct", cases=filtered_by("blosc2 rounded; zfp; zfp reversible; sz3"))
def filter_that_rounds(file, filters):
    dataset(file, smooth(22, 16, 16), chunks=(4, 16, 16), filters=filters)


@quirk(
    "direct",
    cases=filtered_by(
        "deflate; lzf; szip; zstd; lz4; bzip2; blosc blosclz shuffled; "
        "blosc zstd bitshuffled; blosc2 lz4 bitshuffled; blosc2 blosclz delta; "
        "bitshuffle lz4; bitshuffle zstd; scaleoffset"
    ),
)
def chunk_of_many_blocks(file, filters):
    dataset(file, values(6, 70, 67), chunks=(5, 70, 67), filters=filters)


@quirk(
    "direct",
    cases=product(
        filtered_by("blosc2; blosc2 lz4 plain; blosc2 zstd delta"),
        {
            "rank 1": {"shape": (50,), "chunks": (8,)},
            "rank 2 tiles": {"shape": (11, 30), "chunks": (4, 7)},
            "rank 3 tiles": {"shape": (9, 10, 11), "chunks": (2, 6, 4)},
            "rank 4": {"shape": (9, 3, 4, 5), "chunks": (2, 3, 4, 5)},
            "wide": {"shape": (5, 130, 90), "chunks": (2, 100, 70)},
        },
    ),
)
def multidimensional_frames(file, filters, shape, chunks):
    dataset(file, values(*shape, dtype="u2"), chunks=chunks, filters=filters)


@quirk(
    "direct",
    cases=product(
        filtered_by("szip; szip entropy"),
        {
            "u1": {"dtype": "u1"},
            "i2": {"dtype": "<i2"},
            "i2 big-endian": {"dtype": ">i2"},
            "f4": {"dtype": "<f4"},
            "f8": {"dtype": "<f8"},
            "i8 big-endian": {"dtype": ">i8"},
        },
    ),
)
def samples_of(file, filters, dtype):
    dataset(file, values(22, 31, dtype=dtype), chunks=(4, 31), filters=filters)


@quirk("direct", cases=filtered_by("szip; szip entropy; lz4; bitshuffle lz4; lzf; blosc"))
def chunk_of_a_few_bytes(file, filters):
    dataset(file, values(9, 17, dtype="u1"), chunks=(1, 17), filters=filters)


SCALES = {
    "u1": {"content": smooth(22, 30, dtype="u1")},
    "i2": {"content": smooth(22, 30, dtype="i2")},
    "i4 big-endian": {"content": smooth(22, 30, dtype=">i4")},
    "i8": {"content": smooth(22, 30, dtype="i8")},
    "full range": {"content": noise(22, 30, dtype="i4")},
    "all equal": {"content": np.full((22, 30), 77, "i4")},
    "9 bits": {"content": smooth(22, 30, dtype="u2") % 512, "kind": (INTEGERS, 9)},
    "too few bits": {"content": smooth(22, 30, dtype="u2"), "kind": (INTEGERS, 3)},
    "fill value": {"content": smooth(22, 30, dtype="i4"), "fill": 10},
    "fill value u8": {"content": smooth(22, 30, dtype="u8"), "fill": 2**63 + 5},
    "f4": {"content": smooth(22, 30), "kind": (D_SCALE, 2)},
    "f8": {"content": smooth(22, 30, dtype="f8"), "kind": (D_SCALE, 3)},
    "f4 big-endian": {"content": smooth(22, 30, dtype=">f4"), "kind": (D_SCALE, 2)},
    "f4 fill value": {"content": smooth(22, 30), "kind": (D_SCALE, 2), "fill": 1.5},
    "f4 negative scale": {"content": smooth(22, 30) * 1000, "kind": (D_SCALE, -1 & 0xFFFFFFFF)},
}


@quirk("direct", cases=SCALES)
def scaleoffset(file, content, kind=(INTEGERS, 0), fill=None):
    plist = plist_of(chunks=(4, 30))
    plist.set_filter(h5z.FILTER_SCALEOFFSET, h5z.FLAG_OPTIONAL, kind)
    if fill is not None:
        content.flat[::5] = fill
        plist.set_fill_value(np.array(fill, content.dtype))
    made = file.create_dataset("data", content.shape, content.dtype, dcpl=plist, chunks=(4, 30))
    made[:18] = content[:18]


# --- filters, in chains --------------------------------------------------------------------------

CHAINS = (
    "shuffle, deflate; shuffle, lzf; shuffle, zstd; shuffle, lz4; shuffle, bzip2; "
    "shuffle, szip; shuffle, blosc lz4 plain; shuffle, blosc2 lz4 plain; "
    "shuffle, deflate, fletcher32; shuffle, zstd, fletcher32; fletcher32, deflate; "
    "fletcher32, shuffle, lz4; fletcher32, zstd; fletcher32, bitshuffle lz4; "
    "fletcher32, blosc; fletcher32, lzf, fletcher32; lz4, fletcher32; blosc, fletcher32; "
    "bitshuffle, fletcher32; deflate, lzf; deflate, deflate; zstd, deflate; lz4, zstd; "
    "blosc, deflate; bitshuffle, zstd; bitshuffle, deflate; bitshuffle lz4, bzip2; "
    "scaleoffset, deflate; scaleoffset, shuffle, zstd; nbit, deflate; "
    "deflate, shuffle; nbit, shuffle, bzip2, fletcher32"
)


@quirk("direct", cases=filtered_by(CHAINS))
def chain(file, filters):
    dataset(file, values(22, 60, dtype="<i4"), chunks=(5, 60), filters=filters)


@quirk(
    "direct",
    cases=filtered_by(
        "fletcher32, nbit; fletcher32, nbit, zstd; zstd, nbit; shuffle, nbit, zstd; "
        "fletcher32, scaleoffset to 32 bits, zstd"
    ),
)
def chain_with_a_filter_that_does_nothing(file, filters):
    """Integers of 32 bits are not packed, so what comes through may have any length.

    HDF5 hands on the capacity of the buffer, not its length: behind deflate or bzip2, which take
    too large a buffer, a filter before gets too much, and h5py gives garbage, or an error.
    """
    dataset(file, values(22, 60), chunks=(5, 60), filters=filters)


@quirk("direct")
def shuffle_twice(file):
    """HDF5 gives the second one no element size, and so masks it in every chunk."""
    dataset(file, values(22, 60), chunks=(5, 60), filters=("shuffle", "shuffle"))


ODD = {f"{nbytes} bytes": {"nbytes": nbytes} for nbytes in (3, 5, 7, 16)}
ODD_CHAINS = (
    "shuffle, deflate; shuffle, zstd; shuffle, lz4; blosc; blosc lz4 bitshuffled; "
    "blosc2; blosc2 lz4 bitshuffled; bitshuffle lz4; bitshuffle zstd; bitshuffle"
)


@quirk("direct", cases=product(filtered_by(ODD_CHAINS), ODD))
def elements_of(file, filters, nbytes):
    dataset(file, values(20, 13, dtype=f"V{nbytes}"), chunks=(3, 13), filters=filters)


@quirk("direct", cases=filtered_by("shuffle; shuffle, deflate; blosc; bitshuffle lz4"))
def filters_take_a_whole_array_for_an_element(file, filters):
    stored = np.dtype(("<i2", (3, 5)))
    dataset(
        file, values(17, dtype=stored), stored=stored, shape=(17,), chunks=(4,), filters=filters
    )


@quirk("direct", cases=filtered_by("shuffle; blosc; bitshuffle zstd; blosc2"))
def elements_of_300_bytes(file, filters):
    dataset(file, values(17, dtype="V300"), chunks=(4,), filters=filters)


@quirk("direct", cases={str(n): {"typesize": n} for n in (1, 2, 3, 8, 255)})
def blosc_frame_with_another_typesize(file, typesize):
    content = values(20, 51, dtype="i4")
    made = dataset(file, content, chunks=(4, 51), filters=("blosc",), written=())
    for at in range(0, 20, 4):
        made.id.write_direct_chunk(
            (at, 0), imagecodecs.blosc_encode(content[at : at + 4], typesize=typesize, shuffle=1)
        )


def say_another_element_size(path: Path) -> None:
    """Let the filter message say that shuffle took elements of 4 bytes; they have 8."""
    content = path.read_bytes()
    said = b"shuffle\0" + (8).to_bytes(4, "little")
    assert content.count(said) == 1
    path.write_bytes(content.replace(said, said[:-4] + (4).to_bytes(4, "little")))


@quirk("direct", after=say_another_element_size, libver="earliest")
def shuffle_with_another_element_size(file):
    dataset(file, values(20, 11, dtype="i8"), chunks=(3, 11), filters=("shuffle", "deflate"))


# --- filter masks --------------------------------------------------------------------------------


MASKED_CHAINS = (
    "; ".join(f"shuffle, {name}, fletcher32" for name in COMPRESSORS.split("; "))
    + "; fletcher32, lz4, deflate; deflate, zstd; bitshuffle, blosc2; shuffle, scaleoffset"
)


@quirk("direct", cases=filtered_by(MASKED_CHAINS))
def every_filter_mask(file, filters):
    content = smooth(24, 90, dtype="i8")
    made = dataset(file, content, chunks=(3, 90), filters=filters, written=())
    for number in range(8):
        mask = number % 2 ** len(filters)
        kept = tuple(name for bit, name in enumerate(filters) if not mask >> bit & 1)
        chunk = content[3 * number : 3 * number + 3]
        made.id.write_direct_chunk((3 * number, 0), encoded(chunk, kept), mask)


@quirk("direct")
def the_same_filter_mask_of_whole_chunks(file):
    """Batches of 6 samples hold whole chunks of 3."""
    content = smooth(25, 90, dtype="i8")
    made = dataset(file, content, chunks=(3, 90), filters=("shuffle", "deflate"), written=())
    for at in range(0, 25, 3):
        chunk = np.zeros((3, 90), "i8")
        chunk[: len(content[at : at + 3])] = content[at : at + 3]
        made.id.write_direct_chunk((at, 0), encoded(chunk, ("deflate",)), 1)


@quirk("direct")
def filter_mask_with_bits_of_filters_that_are_not_there(file):
    content = values(12, 9)
    made = dataset(file, content, chunks=(4, 9), filters=("deflate",), written=())
    for at in (0, 4, 8):
        chunk = encoded(content[at : at + 4], ("deflate",))
        made.id.write_direct_chunk((at, 0), chunk, 0xFFFFFFFE)


@quirk("direct", cases={name: {"compressor": name} for name in COMPRESSORS.split("; ")})
def chunks_that_do_not_compress(file, compressor):
    content = noise(13, 700, dtype="u1")
    content[::2] = 3
    dataset(file, content, chunks=(1, 700), filters=(compressor,))


# --- edge chunks ---------------------------------------------------------------------------------

EDGE_CHAINS = "shuffle; fletcher32; shuffle, lz4; shuffle, deflate, fletcher32; scaleoffset"
EDGES = filtered_by(f"{COMPRESSORS}; {EDGE_CHAINS}")


@quirk("direct", cases=EDGES)
def filtered_edge_chunks(file, filters):
    dataset(file, values(17, 35), chunks=(4, 16), filters=filters)


@quirk("direct", cases=EDGES, libver="latest")
def raw_edge_chunks(file, filters):
    dataset(file, values(17, 35), chunks=(4, 16), filters=filters, raw_edges=True)


RESIZES = {
    "grown by rows": {"steps": [(20, 35)]},
    "shrunk by rows": {"steps": [(15, 35)]},
    "grown": {"steps": [(23, 49)]},
    "shrunk": {"steps": [(16, 32)]},
    "shrunk and grown": {"steps": [(3, 20), (17, 35)]},
    "emptied and grown": {"steps": [(0, 35), (17, 40)], "hollow": True},
}


@quirk("direct", cases=RESIZES, libver="latest")
def raw_edge_chunks_that_were(file, steps):
    made = dataset(
        file,
        values(17, 35),
        chunks=(4, 16),
        maxshape=(None, None),
        filters=("shuffle", "deflate"),
        raw_edges=True,
    )
    for step in steps:
        made.resize(step)


@quirk(
    "direct",
    cases=product({"earliest": {"libver": "earliest"}, "latest": {"libver": "latest"}}, RESIZES),
)
def dataset_that_was(file, steps):
    made = dataset(
        file, values(17, 35), chunks=(4, 16), maxshape=(None, None), filters=("lzf",), fill=-3
    )
    for step in steps:
        made.resize(step)


@quirk("direct", cases=filtered_by("deflate; lz4; szip; blosc2; bitshuffle lz4"))
def chunk_larger_than_the_dataset(file, filters):
    dataset(file, values(7, 21), chunks=(16, 32), maxshape=(16, 32), filters=filters)


# --- chunk indices -------------------------------------------------------------------------------

INDICES = {
    "b-tree v1": {"libver": "earliest", "chunks": (2, 3)},
    "b-tree v1 unlimited": {"libver": "earliest", "chunks": (2, 3), "maxshape": (None, None)},
    "single chunk": {"libver": "latest", "chunks": (9, 7)},
    "implicit": {"libver": "latest", "chunks": (2, 3), "alloc_time": h5d.ALLOC_TIME_EARLY},
    "fixed array": {"libver": "latest", "chunks": (2, 3)},
    "fixed array not full": {"libver": "latest", "chunks": (2, 3), "maxshape": (20, 17)},
    "extensible array": {"libver": "latest", "chunks": (2, 3), "maxshape": (None, 7)},
    "extensible array of wide rows": {"libver": "latest", "chunks": (2, 3), "maxshape": (None, 17)},
    "extensible array of columns": {"libver": "latest", "chunks": (2, 3), "maxshape": (9, None)},
    "b-tree v2": {"libver": "latest", "chunks": (2, 3), "maxshape": (None, None)},
}
WRITTEN = {
    "full": {},
    "with holes": {"written": (np.s_[2:5, 3:], np.s_[8:, :1]), "fill": -3},
}
RAW_OR_NOT = {"raw": {}, "encoded": {"filters": ("shuffle", "deflate")}}


@quirk("direct", cases=product(INDICES, RAW_OR_NOT, WRITTEN), num_dims=(0, 1))
def index(file, **how):
    dataset(file, values(9, 7), **how)


PAGED = {
    "b-tree v1": {"libver": "earliest"},
    "fixed array": {"libver": "latest"},
    "extensible array": {"libver": "latest", "maxshape": (None,)},
}
PAGED_WRITTEN = {
    "full": {},
    "with holes": {"written": (np.s_[7:11], np.s_[1020:1031], np.s_[2495:]), "fill": -3},
}


@quirk("direct", cases=product(PAGED, RAW_OR_NOT, PAGED_WRITTEN))
def index_of_many_pages(file, **how):
    dataset(file, values(2500), chunks=(1,), **how)


@quirk("direct", cases=RAW_OR_NOT, libver="latest")
def index_of_many_pages_b_tree_v2(file, **how):
    dataset(file, values(50, 50), chunks=(1, 1), maxshape=(None, None), **how)


VERSIONS = {v: {"libver": (v, v) if v != "earliest" else v} for v in ("earliest", "v108", "v110")}
VERSIONS |= {v: {"libver": (v, "latest")} for v in ("v112", "v114", "v200", "latest")}
STORED = {
    "contiguous": {},
    "compact": {"layout": h5d.COMPACT},
    "encoded": {"chunks": (4, 5), "filters": ("shuffle", "deflate", "fletcher32")},
}


@quirk("direct", cases=product(VERSIONS, STORED))
def format_of(file, **how):
    dataset(file, values(13, 11), **how)


# --- compact and contiguous storage --------------------------------------------------------------

COMPOUND = np.dtype([("a", "u1"), ("b", ">f8"), ("c", "<i2", (3,)), ("d", "S5"), ("e", "?")])
COMPACT = {
    "u1": {"dtype": "u1"},
    "i2 big-endian": {"dtype": ">i2"},
    "i8": {"dtype": "<i8"},
    "f2": {"dtype": "<f2"},
    "f8 big-endian": {"dtype": ">f8"},
    "complex": {"dtype": "<c8"},
    "bool": {"dtype": "?"},
    "bytes": {"dtype": "S7"},
    "opaque": {"dtype": "V5"},
    "compound": {"dtype": COMPOUND},
    "datetime": {"dtype": h5py.opaque_dtype("<M8[ms]")},
    "enum": {"dtype": h5py.enum_dtype({"x": 0, "y": 1}, "i2")},
}


@quirk("direct", cases=COMPACT)
def compact(file, dtype):
    dataset(file, values(13, 9, dtype=dtype), stored=dtype, layout=h5d.COMPACT)


@quirk("direct", num_dims=(0, 1, 2))
def compact_along_every_dimension(file):
    dataset(file, values(5, 6, 7), layout=h5d.COMPACT)


@quirk("direct", userblock_size=512)
def compact_behind_a_user_block(file):
    dataset(file, values(13, 9), layout=h5d.COMPACT)


@quirk("direct")
def compact_of_an_array_type(file):
    stored = np.dtype((">i2", (3, 5)))
    dataset(file, values(9, dtype=stored), stored=stored, shape=(9,), layout=h5d.COMPACT)


@quirk("direct")
def compact_as_large_as_can_be(file):
    dataset(file, values(127, 64, dtype="i8"), layout=h5d.COMPACT)


@quirk("direct", hollow=True)
def compact_never_written(file):
    dataset(file, values(9, 4), layout=h5d.COMPACT, written=(), fill=-3)


@quirk("direct")
def compact_with_many_attributes(file):
    made = dataset(file, values(13, 9), layout=h5d.COMPACT)
    for number in range(40):
        made.attrs[f"attribute {number}"] = np.arange(number)


@quirk("direct")
def compact_of_a_type_that_is_not_numpys(file):
    stored = integer_of(h5t.STD_U16LE, 12)
    dataset(file, noise(13, 9, dtype="u2"), stored=stored, layout=h5d.COMPACT)


ALLOCATION = {
    "early": {"alloc_time": h5d.ALLOC_TIME_EARLY},
    "late": {"alloc_time": h5d.ALLOC_TIME_LATE},
    "incremental": {"alloc_time": h5d.ALLOC_TIME_INCR},
}
SOME = {
    "full": {},
    "a part written": {"written": (np.s_[3:5],)},
    "never written": {"written": (), "hollow": True},
}


@quirk("direct", cases=product(ALLOCATION, SOME))
def contiguous_allocated(file, **how):
    if how["alloc_time"] == h5d.ALLOC_TIME_INCR:
        how["chunks"] = (2, 9)  # HDF5 allows incremental allocation to chunks alone
    dataset(file, values(13, 9), fill=-7, **how)


@quirk("direct", num_dims=(0, 1, 2))
def contiguous_along_every_dimension(file):
    dataset(file, values(5, 6, 7))


# --- fill values ---------------------------------------------------------------------------------


def undefined_fill_value(plist: h5p.PropDCID) -> None:
    arguments = ctypes.c_int64(plist.id), ctypes.c_int64(h5t.STD_I32LE.id), None
    assert HDF5.H5Pset_fill_value(*arguments) >= 0


FILLS = {
    "never": {"fill_time": h5d.FILL_TIME_NEVER, "fill": np.int32(-7)},
    "if set": {"fill_time": h5d.FILL_TIME_IFSET, "fill": np.int32(-7)},
    "at allocation": {"fill_time": h5d.FILL_TIME_ALLOC, "fill": np.int32(-7)},
    "default": {},
}
HOLES = {
    "rows": {"chunks": (2, 5)},
    "tiles": {"chunks": (2, 3)},
    "one row a chunk": {"chunks": (1, 5)},
    "encoded": {"chunks": (2, 3), "filters": ("shuffle", "deflate")},
    "lz4": {"chunks": (2, 5), "filters": ("lz4",)},
}


@quirk("direct", cases=product(FILLS, HOLES), num_dims=(0, 1))
def holes_filled(file, **how):
    dataset(file, values(13, 5), written=(np.s_[:5], np.s_[9:10]), **how)


@quirk("direct", cases={"rows": {"chunks": (2, 5)}, "tiles": {"chunks": (2, 3)}})
def holes_with_an_undefined_fill_value(file, chunks):
    plist = plist_of(chunks=chunks)
    undefined_fill_value(plist)
    h5d.create(file.id, b"data", h5t.STD_I32LE, h5s.create_simple((13, 5)), plist)
    file["data"][:5] = values(5, 5)


@quirk("direct", cases=FILLS, hollow=True)
def never_written(file, **how):
    dataset(file, values(13, 5), written=(), chunks=(2, 3), **how)


FILL_VALUES = {
    "f8 big-endian": (">f8", -2.5),
    "negative zero": ("<f4", -0.0),
    "nan": ("<f2", np.nan),
    "bool": ("?", True),
    "bytes": ("S4", b"ab"),
    "complex big-endian": (">c8", 1 - 2j),
    "u8": ("u8", 2**64 - 2),
    "opaque": ("V3", b"\1\2\3"),
    "compound": (COMPOUND, (3, 1.5, (1, 2, 3), b"xy", True)),
}


@quirk("direct", cases={key: {"dtype": d, "fill": f} for key, (d, f) in FILL_VALUES.items()})
def fill_value(file, dtype, fill):
    made = file.create_dataset(
        "data", (13, 4), dtype, chunks=(2, 3), fillvalue=np.array(fill, dtype)
    )
    made[:4] = values(4, 4, dtype=dtype)


# --- where things lie in the file ----------------------------------------------------------------


def fill_the_user_block(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"not HDF5 " * 50)


@quirk(
    "direct",
    cases=product(
        {f"of {size}": {"userblock_size": size} for size in (512, 65536)},
        STORED,
        {"earliest": {"libver": "earliest"}, "latest": {"libver": "latest"}},
    ),
    after=fill_the_user_block,
)
def user_block(file, **how):
    dataset(file, values(13, 11), **how)


@quirk(
    "direct",
    cases=product(
        {"2 GiB": {"start": 2}, "4 GiB": {"start": 4}, "9 GiB": {"start": 9}},
        {
            "contiguous": {},
            "rows": {"chunks": (2, 11)},
            "encoded": {"chunks": (4, 5), "filters": ("deflate",)},
            "one row a chunk latest": {"chunks": (1, 11), "libver": "latest"},
        },
    ),
)
def behind(file, start, **how):
    """A large dataset, allocated and never written, costs no room on disk."""
    never = {"alloc_time": h5d.ALLOC_TIME_EARLY, "fill_time": h5d.FILL_TIME_NEVER}
    dataset(file, np.zeros(0, "u1"), "room", shape=(start * GIB - 100,), written=(), **never)
    dataset(file, values(13, 11), **how)


@quirk("direct")
def values_on_both_sides_of_4_GiB(file):
    """Chunks lie before and behind a large hole of the file."""
    made = dataset(file, values(13, 11), chunks=(2, 11), written=(np.s_[:4], np.s_[10:]))
    never = {"alloc_time": h5d.ALLOC_TIME_EARLY, "fill_time": h5d.FILL_TIME_NEVER}
    dataset(file, np.zeros(0, "u1"), "room", shape=(4 * GIB,), written=(), **never)
    made[4:10] = -values(6, 11)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"left by someone else" * 99)


@quirk("direct", after=grow)
def bytes_behind_the_end(file):
    dataset(file, values(13, 11), chunks=(2, 11), filters=("deflate",))


@quirk("direct", cases=STORED)
def addresses_of_four_bytes(file, **how):
    """Such a file must be made anew: h5py.File takes no creation property list."""
    plist = h5p.create(h5p.FILE_CREATE)
    plist.set_sizes(4, 4)
    name = Path(file.filename)
    file.close()
    with h5py.File(h5f.create(bytes(name), h5f.ACC_TRUNC, plist)) as small:
        dataset(small, values(13, 11), **how)


@quirk("direct", cases=STORED, fs_strategy="page", fs_page_size=4096, libver="latest")
def paged_file_space(file, **how):
    dataset(file, values(13, 11), **how)


@quirk("direct", libver="latest")
def written_by_swmr(file):
    made = dataset(file, values(13, 11), chunks=(1, 11), maxshape=(None, 11), written=())
    file.swmr_mode = True
    made[...] = values(13, 11)
    made.flush()
    made.resize(17, 0)
    made[13:] = values(4, 11)


@quirk("direct", cases=RAW_OR_NOT)
def room_of_deleted_datasets(file, **how):
    for number in range(3):
        dataset(file, noise(40, 40), f"old {number}", chunks=(4, 40))
    file.flush()
    del file["old 0"], file["old 2"]
    dataset(file, values(33, 11), chunks=(4, 5), **how)
    del file["old 1"]


@quirk("direct", cases=RAW_OR_NOT)
def chunks_that_were_written_again(file, **how):
    made = dataset(file, values(33, 11), chunks=(4, 5), **how)
    file.flush()
    made[5:20] = noise(15, 11)
    file.flush()
    made[7:9] = 0


@quirk("direct")
def copied_dataset(file):
    dataset(file, values(13, 11), "group/x", chunks=(4, 5), filters=("shuffle", "lzf"))
    file.copy("group/x", "data")
    del file["group"]


@quirk("direct")
def committed_type(file):
    file["type"] = COMPOUND
    dataset(file, values(13, dtype=COMPOUND), "kind of", chunks=(4,))
    made = file.create_dataset("data", (13,), file["type"], chunks=(4,))
    made[...] = values(13, dtype=COMPOUND)


# --- extents and dimensions ----------------------------------------------------------------------


@quirk(
    "direct",
    cases={
        "contiguous": {},
        "compact": {"layout": h5d.COMPACT},
        "chunked": {"chunks": (2, 3), "maxshape": (None, 5)},
        "encoded": {"chunks": (2, 3), "maxshape": (None, 5), "filters": ("deflate",)},
        "zstd": {"chunks": (2, 3), "maxshape": (None, 5), "filters": ("zstd",)},
    },
)
def no_samples(file, **how):
    dataset(file, values(0, 5), **how)


@quirk(
    "direct", cases={"": {}, "chunked": {"chunks": (2, 3), "maxshape": (None, None)}}, hollow=True
)
def samples_without_values(file, **how):
    dataset(file, values(7, 0), **how)


@quirk("direct", cases=STORED)
def one_sample(file, **how):
    if "chunks" in how:
        how["chunks"] = (1, 5)
    dataset(file, values(1, 11), **how)


DIMENSIONS = {
    "contiguous": {},
    "compact": {"layout": h5d.COMPACT},
    "rows": {"chunks": (3, 8, 9)},
    "one sample a chunk": {"chunks": (1, 8, 9)},
    "one column a chunk": {"chunks": (11, 1, 9)},
    "last dimension a chunk": {"chunks": (11, 8, 1)},
    "whole": {"chunks": (11, 8, 9)},
    "tiles": {"chunks": (3, 3, 4)},
    "tiles encoded": {"chunks": (3, 3, 4), "filters": ("shuffle", "deflate")},
    "tiles lz4": {"chunks": (3, 3, 4), "filters": ("lz4",)},
    "rows with holes": {"chunks": (3, 8, 9), "written": (np.s_[4:5],), "fill": -3},
    "tiles with holes": {"chunks": (3, 3, 4), "written": (np.s_[4:5, :2],), "fill": -3},
}


@quirk("direct", cases=DIMENSIONS, num_dims=(0, 1, 2, -1))
def samples_along_every_dimension(file, **how):
    dataset(file, values(11, 8, 9, dtype="u2"), **how)


@quirk(
    "direct",
    cases=product(
        {str(rank): {"rank": rank} for rank in (1, 2, 3, 4, 5, 6, 7, 8, 32)},
        {"contiguous": {}, "encoded": {"filters": ("shuffle", "deflate")}},
    ),
    num_dims=(0, -1),
)
def rank(file, rank, **how):
    shape = [5, 3, 2, 3, 2, 2, 2, 3][:rank] if rank <= 8 else [5, *[1] * (rank - 2), 3]
    if how:
        how["chunks"] = tuple(max(1, extent - 1) for extent in shape)
    dataset(file, values(*shape, dtype="i2"), **how)


@quirk("direct")
def samples_of_one_byte(file):
    dataset(file, values(301, dtype="u1"), chunks=(64,), filters=("deflate",))


# --- types ---------------------------------------------------------------------------------------

KINDS = {"u1": "", "i1": ""}
KINDS |= {f"{k}{n}": "<>" for k, ns in {"u": "248", "i": "248", "f": "248"}.items() for n in ns}
KINDS |= {"c8": "<>", "c16": "<>"}
NUMBERS = {
    f"{kind}{' big-endian' if order == '>' else ''}": {"dtype": f"{order}{kind}"}
    for kind, orders in KINDS.items()
    for order in orders or "|"
}
TYPE_LAYOUTS = {
    "contiguous": {},
    "encoded": {"chunks": (4, 5), "filters": ("shuffle", "deflate")},
}


@quirk("direct", cases=product(NUMBERS, TYPE_LAYOUTS))
def numbers(file, dtype, **how):
    dataset(file, values(13, 11, dtype=dtype), **how)


def compound(size: int, **members: tuple[int, h5t.TypeID]) -> h5t.TypeID:
    stored = h5t.create(h5t.COMPOUND, size)
    for name, (at, member) in members.items():
        stored.insert(name.encode(), at, member)
    return stored


def string_of(nbytes: int, pad: int, charset: int = h5t.CSET_ASCII) -> h5t.TypeID:
    stored = h5t.C_S1.copy()
    stored.set_size(nbytes)
    stored.set_strpad(pad)
    stored.set_cset(charset)
    return stored


def enum_on(base: h5t.TypeID, **members: int) -> h5t.TypeID:
    stored = h5t.enum_create(base)
    for name, number in members.items():
        stored.enum_insert(name.encode(), number)
    return stored


def integer_of(base: h5t.TypeID, precision: int, offset: int = 0) -> h5t.TypeID:
    stored = base.copy()
    stored.set_precision(precision)
    stored.set_offset(offset)
    return stored


def float_of(nbytes: int, exponent: int, mantissa: int, bias: int) -> h5t.TypeID:
    stored = h5t.IEEE_F32LE.copy()
    stored.set_fields(exponent + mantissa, mantissa, exponent, 0, mantissa)
    stored.set_size(nbytes)
    stored.set_ebias(bias)
    return stored


STRINGS = b"ab\0cd" + b"abcde" + b"ab   " + b"\0\0\0\0\0" + b"ab\0\0\0" + b"a \0 \0" + b"     "
NUL_PADDED, NUL_ENDED, SPACE_PADDED = h5t.STR_NULLPAD, h5t.STR_NULLTERM, h5t.STR_SPACEPAD
DIRECT_TYPES = {
    "bytes padded with nul": string_of(5, NUL_PADDED),
    "utf-8 padded with nul": string_of(5, NUL_PADDED, h5t.CSET_UTF8),
    "bool": enum_on(h5t.STD_I8LE, FALSE=0, TRUE=1),
    "bool upside down": enum_on(h5t.STD_I8LE, FALSE=1, TRUE=0),
    "enum i1": enum_on(h5t.STD_I8LE, x=0, y=1, z=-5),
    "enum u4 big-endian": enum_on(h5t.STD_U32BE, x=0, y=1),
    "opaque": h5t.create(h5t.OPAQUE, 6),
    "long double": h5t.NATIVE_LDOUBLE,
    "complex": h5t.py_create(np.dtype("c16")),
    "float16 big-endian": h5t.IEEE_F16BE,
    "array of bools": h5t.array_create(enum_on(h5t.STD_I8LE, FALSE=0, TRUE=1), (2,)),
    "complex swapped": compound(16, i=(0, h5t.IEEE_F64LE), r=(8, h5t.IEEE_F64LE)),
    "complex of integers": compound(8, r=(0, h5t.STD_I32LE), i=(4, h5t.STD_I32LE)),
    "complex f2": compound(4, r=(0, h5t.IEEE_F16LE), i=(2, h5t.IEEE_F16LE)),
    "compound packed": compound(
        11, a=(0, h5t.STD_U8LE), b=(1, h5t.IEEE_F64BE), c=(9, h5t.STD_I16LE)
    ),
    "compound with gaps": compound(24, a=(2, h5t.STD_U8LE), b=(8, h5t.IEEE_F64LE)),
    "compound out of order": compound(12, a=(8, h5t.STD_I32LE), b=(0, h5t.IEEE_F64LE)),
    "compound in a compound": compound(
        14, a=(0, compound(9, x=(0, h5t.IEEE_F64LE), y=(8, h5t.STD_I8LE))), b=(10, h5t.STD_U32BE)
    ),
    "compound with an array": compound(
        26, a=(0, h5t.array_create(h5t.IEEE_F32BE, (2, 3))), b=(24, h5t.STD_U16LE)
    ),
    "compound of one": compound(4, a=(0, h5t.STD_I32LE)),
    "array": h5t.array_create(h5t.STD_I16LE, (2, 3)),
    "array big-endian": h5t.array_create(h5t.IEEE_F32BE, (4,)),
    "array of compounds": h5t.array_create(
        compound(6, a=(0, h5t.STD_I32LE), b=(4, h5t.STD_I16LE)), (3,)
    ),
    "array of one": h5t.array_create(h5t.STD_I64LE, (1,)),
    "bitfield": h5t.STD_B8LE,
    "bitfield of 32": h5t.STD_B32LE,
    "u1 big-endian": h5t.STD_U8BE,
    "compound of bytes big-endian": compound(2, a=(0, h5t.STD_U8BE), b=(1, h5t.STD_I8BE)),
    "bytes ended by nul": string_of(5, NUL_ENDED),
    "bytes padded with spaces": string_of(5, SPACE_PADDED),
    "utf-8 ended by nul": string_of(5, NUL_ENDED, h5t.CSET_UTF8),
    "compound with a string ended by nul": compound(
        9, a=(0, h5t.STD_I32LE), b=(4, string_of(5, NUL_ENDED))
    ),
    "array of strings ended by nul": h5t.array_create(string_of(5, NUL_ENDED), (2,)),
    "complex big-endian and little": compound(16, r=(0, h5t.IEEE_F64LE), i=(8, h5t.IEEE_F64BE)),
}
H5PY_TYPES = {
    "bool on u1": enum_on(h5t.STD_U8LE, FALSE=0, TRUE=1),
    "bool on i4": enum_on(h5t.STD_I32LE, FALSE=0, TRUE=1),
    "bool on i2 big-endian": enum_on(h5t.STD_I16BE, FALSE=0, TRUE=1),
    "complex with a gap": compound(24, r=(0, h5t.IEEE_F64LE), i=(16, h5t.IEEE_F64LE)),
}
CONVERTED_TYPES = {
    "bitfield of 32 big-endian": h5t.STD_B32BE,
    "12 bits": integer_of(h5t.STD_U16LE, 12),
    "12 bits signed": integer_of(h5t.STD_I16LE, 12),
    "12 bits shifted": integer_of(h5t.STD_U16LE, 12, 4),
    "12 bits big-endian": integer_of(h5t.STD_I16BE, 12, 4),
    "24 of 32 bits": integer_of(h5t.STD_I32LE, 24),
    "bfloat16": float_of(2, 8, 7, 127),
    "float8": float_of(1, 5, 2, 15),
    "compound with a gap and a string ended by nul": compound(
        12, a=(0, h5t.STD_I32LE), b=(4, string_of(5, NUL_ENDED))
    ),
    "compound with 12 bits": compound(
        4, a=(0, h5t.STD_U16LE), b=(2, integer_of(h5t.STD_U16LE, 12))
    ),
    "array of 12 bits": h5t.array_create(integer_of(h5t.STD_U16LE, 12), (3,)),
}
if hasattr(h5t, "COMPLEX_IEEE_F64LE"):  # HDF5 2
    CONVERTED_TYPES["complex of HDF5 2"] = h5t.COMPLEX_IEEE_F64LE
    CONVERTED_TYPES["complex of HDF5 2 big-endian"] = h5t.COMPLEX_IEEE_F32BE


def stored_as(types: Mapping[str, h5t.TypeID]) -> dict[str, dict[str, Any]]:
    return {name: {"stored": stored} for name, stored in types.items()}


@quirk(
    "direct",
    cases=product(
        stored_as(DIRECT_TYPES | CONVERTED_TYPES), {"": {}, "encoded": {"filters": ("deflate",)}}
    ),
)
@quirk("h5py", cases=product(stored_as(H5PY_TYPES), {"": {}, "encoded": {"filters": ("deflate",)}}))
def type_of(file, stored, filters=()):
    count, nbytes = 14, stored.get_size()
    content = noise(count, nbytes, dtype="u1")
    if nbytes == 5:
        content = np.frombuffer(STRINGS * 2, "u1").reshape(count, nbytes)
    if isinstance(stored, h5t.TypeEnumID):
        content[::3] = 0
    if stored == h5t.NATIVE_LDOUBLE:
        content = (np.arange(count) - np.longdouble("2.1")).view("u1").reshape(count, nbytes)
    content = np.ascontiguousarray(content).view(f"V{nbytes}").reshape(count)
    dataset(file, content, stored=stored, chunks=(4,) if filters else None, filters=filters)


NBIT = {
    "u2 of 12 bits": {"stored": integer_of(h5t.STD_U16LE, 12), "way": "direct"},
    "i2 of 12 bits": {"stored": integer_of(h5t.STD_I16LE, 12), "way": "direct"},
    "u2 of 12 bits shifted": {"stored": integer_of(h5t.STD_U16LE, 12, 4), "way": "direct"},
    "i4 of 17 bits big-endian": {"stored": integer_of(h5t.STD_I32BE, 17, 5), "way": "direct"},
    "array of 12 bits": {"stored": h5t.array_create(integer_of(h5t.STD_U16LE, 12), (3,))},
    "compound with 12 bits": {"stored": CONVERTED_TYPES["compound with 12 bits"]},
    "f8": {"stored": h5t.IEEE_F64LE, "way": "direct"},
    "i2 big-endian": {"stored": h5t.STD_I16BE, "way": "direct"},
    "compound": {"stored": DIRECT_TYPES["compound packed"], "way": "direct"},
    "compound with gaps": {"stored": DIRECT_TYPES["compound with gaps"], "way": "direct"},
    "array": {"stored": DIRECT_TYPES["array"], "way": "direct"},
}


@quirk("h5py", cases=NBIT)
def nbit(file, stored):
    content = noise(37, stored.get_size(), dtype="u1").view(f"V{stored.get_size()}").reshape(37)
    dataset(file, content, stored=stored, chunks=(8,), filters=("nbit",))


@quirk("direct", cases={"": {"order": "<"}, "big-endian": {"order": ">"}})
def datetime(file, order):
    dtype = np.dtype(f"{order}M8[ms]")
    file["data"] = noise(13, 4, dtype=dtype).astype(h5py.opaque_dtype(dtype))


@quirk(
    "direct",
    cases={
        "i2": {"base": "<i2"},
        "f4 big-endian": {"base": ">f4"},
        "bool": {"base": "?"},
        "bytes": {"base": "S2"},
    },
    num_dims=(0, 1),
)
def array_type_adds_dimensions(file, base):
    stored = np.dtype((base, (2, 3)))
    dataset(
        file,
        values(5, 6, dtype=stored),
        stored=stored,
        shape=(5, 6),
        chunks=(3, 2),
        filters=("shuffle", "deflate"),
    )


REFUSED_TYPES = {
    "reference": {"dtype": h5py.ref_dtype},
    "region reference": {"dtype": h5py.regionref_dtype},
    "compound with a vlen string": {"dtype": np.dtype([("a", "i4"), ("b", h5py.string_dtype())])},
    "array of references": {"dtype": np.dtype((h5py.ref_dtype, (2,)))},
}


@quirk(DatasetError, cases=REFUSED_TYPES)
def no_fixed_size(file, dtype):
    file.create_dataset("data", (13,), dtype)


def integer_of_three_bytes() -> h5t.TypeID:
    stored = integer_of(h5t.STD_U32LE, 24)
    stored.set_size(3)
    return stored


@quirk(
    DatasetError,
    cases=stored_as({"time": h5t.UNIX_D32LE, "24 bits in 3 bytes": integer_of_three_bytes()}),
)
def no_numpy_type(file, stored):
    h5d.create(file.id, b"data", stored, h5s.create_simple((13,)))


@quirk(DatasetError, cases={"null": {"content": h5py.Empty("f4")}, "scalar": {"content": 3.0}})
def dataspace(file, content):
    file["data"] = content


@quirk(DatasetError)
def data_is_a_group(file):
    dataset(file, values(3), "data/x")


@quirk(DatasetError)
def data_is_a_type(file):
    file["data"] = np.dtype("f4")


# --- virtual datasets ----------------------------------------------------------------------------

Mapped = tuple[Any, str, np.ndarray, Any]


def virtual(
    file: h5py.File,
    shape: tuple[int, ...],
    parts: list[Mapped],
    *,
    dtype: Any = "i4",
    fill: Any = -9,
    maxshape: tuple[int | None, ...] | None = None,
    **how: Any,
) -> None:
    """Map parts (where, file, values, where in them) of files beside this one; "." is itself."""
    layout = h5py.VirtualLayout(shape, dtype, maxshape=maxshape)
    for number, (where, source, content, part) in enumerate(parts):
        name = f"source {number}"
        if source == ".":
            dataset(file, content, name, **how)
        else:
            with h5py.File(beside(file, source.replace("%%", "%")), "a") as other:
                dataset(other, content, name, **how)
        layout[where] = h5py.VirtualSource(source, name, content.shape)[part]
    file.create_virtual_dataset("data", layout, fillvalue=fill)


def stacked(count: int = 3, source: str = "source{}.h5", **kind: Any) -> list[Mapped]:
    """Return blocks of five rows, one below another."""
    blocks = values(5 * count, 7, **kind).reshape(count, 5, 7)
    return [
        (np.s_[5 * n : 5 * n + 5], source.format(n), block, ...) for n, block in enumerate(blocks)
    ]


SOURCES = {
    "contiguous": {},
    "compact": {"layout": h5d.COMPACT},
    "rows": {"chunks": (2, 7)},
    "deflate": {"chunks": (2, 3), "filters": ("shuffle", "deflate")},
    "zstd": {"chunks": (2, 7), "filters": ("zstd",)},
    "lz4": {"chunks": (5, 7), "filters": ("shuffle", "lz4")},
    "bitshuffle": {"chunks": (5, 7), "filters": ("bitshuffle lz4",)},
    "with holes": {"chunks": (2, 7), "written": (np.s_[:1],), "fill": 4},
    "never written": {"written": (), "fill": 4, "hollow": True},
    "zfp": {"chunks": (5, 7), "filters": ("zfp reversible",)},
}


@quirk("direct", cases=SOURCES)
def virtual_stack_of_sources(file, **how):
    virtual(file, (15, 7), stacked(), **how)


@quirk("direct", cases={key: SOURCES[key] for key in ("contiguous", "deflate")}, num_dims=(0, 1))
def virtual_of_the_same_file(file, **how):
    virtual(file, (15, 7), stacked(source="."), **how)


@quirk("direct", num_dims=(0, 1))
def virtual_with_one_source_a_row(file):
    content = values(12, 7)
    parts = [(n, f"row{n}.h5", row, ...) for n, row in enumerate(content)]
    virtual(file, (12, 7), parts)


@quirk("direct")
def virtual_with_many_sources_in_a_file(file):
    virtual(file, (15, 7), stacked(source="sources.h5"))


@quirk("direct")
def virtual_with_an_absolute_path(file):
    virtual(file, (15, 7), stacked(source=str(beside(file, "source{}.h5"))))


@quirk("direct")
def virtual_with_sources_in_a_folder(file):
    beside(file, "parts").mkdir()
    virtual(file, (15, 7), stacked(source="parts/source{}.h5"))


@quirk("direct")
def virtual_that_names_its_own_file(file):
    dataset(file, values(13, 7), "x", chunks=(2, 7), filters=("deflate",))
    layout = h5py.VirtualLayout((13, 7), "i4")
    layout[...] = h5py.VirtualSource(Path(file.filename).name, "x", (13, 7))
    file.create_virtual_dataset("data", layout)


@quirk("direct", cases=RAW_OR_NOT, num_dims=(0, 1))
def virtual_of_interleaved_sources(file, filters=()):
    how = {"chunks": (2, 7), "filters": filters}
    content = values(15, 7)
    parts = [(np.s_[n::3], f"source{n}.h5", content[n::3], ...) for n in range(3)]
    virtual(file, (15, 7), parts, **how)


@quirk("direct", num_dims=(0, 1))
def virtual_of_every_second_row_of_a_source(file):
    virtual(file, (15, 7), [(..., "source.h5", values(30, 7), np.s_[1::2])])


@quirk(
    "direct",
    cases={"": {}, "encoded": {"chunks": (2, 2), "filters": ("deflate",)}},
    num_dims=(0, 1),
)
def virtual_of_tiles(file, **how):
    content = values(12, 9)
    corners = [(np.s_[a : a + 6], np.s_[b : b + 3]) for a in (0, 6) for b in (0, 3, 6)]
    parts = [(at, f"tile{n}.h5", content[at], ...) for n, at in enumerate(corners)]
    virtual(file, (12, 9), parts, **how)


@quirk("direct", num_dims=(0, 1, 2))
def virtual_of_columns_in_turns(file):
    content = values(5, 8, 6)
    parts = [(np.s_[:, n::2], f"source{n}.h5", content[:, n::2], ...) for n in range(2)]
    virtual(file, (5, 8, 6), parts)


@quirk("direct", num_dims=(0, 1))
def virtual_of_cropped_sources(file):
    parts = [
        (np.s_[:6], "wide.h5", values(11, 20), np.s_[3:9, 4:11]),
        (np.s_[6:], "high.h5", values(20, 9), np.s_[2:9, 1:8]),
    ]
    virtual(file, (13, 7), parts)


@quirk("direct", num_dims=(0, 1))
def virtual_with_gaps(file):
    parts = [
        (np.s_[2:5, 1:3], "a.h5", values(3, 2), ...),
        (np.s_[7:9], "b.h5", values(2, 7), ...),
    ]
    virtual(file, (13, 7), parts)


@quirk("direct", hollow=True)
def virtual_without_sources(file):
    virtual(file, (13, 7), [])


OTHER_RANKS = {
    "deeper": {"shapes": ((4, 7, 1), (1, 4, 1, 7), (5, 7, 1, 1))},
    "deeper and encoded": {
        "shapes": ((4, 7, 1), (1, 4, 7), (5, 1, 7)),
        "chunks": (1, 1, 1),
        "filters": ("deflate",),
    },
    "flat": {"shapes": ((28,), (28,), (35,)), "way": "h5py"},
    "turned": {"shapes": ((4, 7), (4, 7), (7, 5)), "way": "h5py"},
}


@quirk("direct", cases=OTHER_RANKS)
def virtual_of_sources_of_another_rank(file, shapes, **how):
    places = (np.s_[:4], np.s_[4:8], np.s_[8:])
    parts = [
        (where, f"source{number}.h5", values(*shape), ...)
        for number, (where, shape) in enumerate(zip(places, shapes, strict=True))
    ]
    virtual(file, (13, 7), parts, **how)


@quirk("h5py", num_dims=(0, 1))
def virtual_of_sources_that_overlap(file):
    parts = [
        (np.s_[:8], "a.h5", values(8, 7), ...),
        (np.s_[5:13], "b.h5", -values(8, 7), ...),
        (np.s_[3:9, 2:4], "c.h5", 3 * values(6, 2), ...),
    ]
    virtual(file, (13, 7), parts)


OTHER_TYPES = {
    f"{source} as {dtype}": {"source": source, "dtype": dtype, "way": way}
    for way, pairs in {
        "direct": (
            "<i4 >i4; <i4 <f8; <i4 <i8; >i4 >i8; <u1 >u2; <u2 <i4; <u4 >f8; <i2 <f4; <f4 >f4"
        ),
        "h5py": ("<i4 <i2; <i4 <u8; <u4 <i4; <i4 <f4; <f8 <f4; <f8 <i8; <f2 <f4; <f4 <f8; >f4 <f8"),
    }.items()
    for source, dtype in map(str.split, pairs.split(";"))
}


@quirk("direct", cases=OTHER_TYPES)
def virtual_of_another_type(file, source, dtype):
    virtual(file, (15, 7), stacked(dtype=source), dtype=dtype)


@quirk("h5py")
def virtual_with_one_source_of_another_type(file):
    first, second, third = stacked()
    mixed = (second[0], second[1], second[2].astype("i8"), ...)
    virtual(file, (15, 7), [first, mixed, third])


@quirk("direct")
def virtual_of_virtual_datasets(file):
    with h5py.File(beside(file, "middle.h5"), "w") as middle:
        virtual(middle, (15, 7), stacked(), fill=5)
    layout = h5py.VirtualLayout((30, 7), "i4")
    layout[10:25] = h5py.VirtualSource("middle.h5", "data", (15, 7))
    file.create_virtual_dataset("data", layout, fillvalue=-9)


@quirk("direct")
def virtual_of_an_external_link(file):
    with h5py.File(beside(file, "far.h5"), "w") as far:
        far["x"] = values(13, 7)
    with h5py.File(beside(file, "near.h5"), "w") as near:
        near["link"] = h5py.ExternalLink("far.h5", "x")
    layout = h5py.VirtualLayout((13, 7), "i4")
    layout[...] = h5py.VirtualSource("near.h5", "link", (13, 7))
    file.create_virtual_dataset("data", layout)


@quirk("direct")
def virtual_with_a_soft_link_to_its_source(file):
    dataset(file, values(13, 7), "group/x")
    file["link"] = h5py.SoftLink("/group/x")
    layout = h5py.VirtualLayout((13, 7), "i4")
    layout[...] = h5py.VirtualSource(".", "link", (13, 7))
    file.create_virtual_dataset("data", layout)


@quirk("direct", libver="latest")
def virtual_of_numbered_sources(file):
    """Sources are found by number as long as they are there; the extent follows from them."""
    for number in range(4):
        with h5py.File(beside(file, f"part{number}.h5"), "w") as part:
            part["x"] = values(3, 7) * (number + 1)
    plist = plist_of()
    where = h5s.create_simple((3, 7), (h5s.UNLIMITED, 7))
    where.select_hyperslab((0, 0), (h5s.UNLIMITED, 1), (3, 7), (3, 7))
    plist.set_virtual(where, b"part%b.h5", b"x", h5s.create_simple((3, 7)))
    space = h5s.create_simple((3, 7), (h5s.UNLIMITED, 7))
    h5d.create(file.id, b"data", h5t.STD_I32LE, space, plist)


@quirk("direct", libver="latest")
def virtual_of_a_source_that_grew(file):
    with h5py.File(beside(file, "grows.h5"), "w", libver="latest") as other:
        dataset(other, values(17, 7), "x", chunks=(2, 7), maxshape=(None, 7))
    plist = plist_of()
    spaces = []
    for _ in range(2):
        space = h5s.create_simple((5, 7), (h5s.UNLIMITED, 7))
        space.select_hyperslab((0, 0), (1, 1), (1, 1), (h5s.UNLIMITED, 7))
        spaces.append(space)
    plist.set_virtual(spaces[0], b"grows.h5", b"x", spaces[1])
    space = h5s.create_simple((5, 7), (h5s.UNLIMITED, 7))
    h5d.create(file.id, b"data", h5t.STD_I32LE, space, plist)


def remove_a_source(path: Path) -> None:
    (path.parent / "source1.h5").unlink()


def remove_a_source_dataset(path: Path) -> None:
    with h5py.File(path.parent / "source1.h5", "r+") as file:
        del file["source 1"]


@quirk(
    H5AsyncError,
    cases={"": {"after": remove_a_source}, "dataset": {"after": remove_a_source_dataset}},
)
def virtual_with_a_missing_source(file):
    virtual(file, (15, 7), stacked())


@quirk("direct", cases={"contiguous": {}, "rows": {"chunks": (2, 7), "filters": ("deflate",)}})
def virtual_of_a_type_with_members(file, **how):
    virtual(file, (15, 7), stacked(dtype=COMPOUND), dtype=COMPOUND, fill=None, **how)


def behind_a_symlink(path: Path) -> Path:
    folder = path.parent / "elsewhere"
    folder.mkdir()
    path.rename(folder / path.name)
    path.symlink_to(folder / path.name)
    return folder


def behind_a_symlink_with_decoys(path: Path) -> None:
    """Sources lie beside the link, where HDF5 looks first; others beside the file itself."""
    folder = behind_a_symlink(path)
    for number in range(3):
        with h5py.File(folder / f"source{number}.h5", "w") as decoy:
            decoy[f"source {number}"] = np.full((5, 7), -1, "i4")


def behind_a_symlink_with_its_sources(path: Path) -> None:
    folder = behind_a_symlink(path)
    for source in path.parent.glob("source*.h5"):
        source.rename(folder / source.name)


@quirk(
    "direct",
    cases={
        "beside the link": {"after": behind_a_symlink_with_decoys},
        "beside the file": {"after": behind_a_symlink_with_its_sources},
    },
)
def virtual_behind_a_symlink_with_sources(file):
    virtual(file, (15, 7), stacked())


def move_the_sources(path: Path) -> None:
    for source in (path.parent / "gone").iterdir():
        source.rename(path.parent / source.name)


@quirk("direct", after=move_the_sources)
def virtual_with_absolute_paths_that_moved_along(file):
    """HDF5 then takes a file of that name beside the virtual dataset."""
    beside(file, "gone").mkdir()
    virtual(file, (15, 7), stacked(source=str(beside(file, "gone/source{}.h5"))))


@quirk("direct")
def virtual_with_a_percent_sign_in_a_name(file):
    virtual(file, (15, 7), stacked(source="100%%{}.h5"))


def shrink_a_source(path: Path) -> None:
    with h5py.File(path.parent / "source1.h5", "r+") as file:
        file["source 1"].resize(3, 0)


@quirk("unreadable", after=shrink_a_source)
def virtual_of_a_source_that_shrank(file):
    virtual(file, (15, 7), stacked(), chunks=(2, 7))


# --- external storage ----------------------------------------------------------------------------


def allow_here(folder: Path) -> dict[str, Any]:
    return {"allow_external": [folder]}


def allow_elsewhere(folder: Path) -> dict[str, Any]:
    return {"allow_external": [folder / "elsewhere"]}


def external(file: h5py.File, *cuts: int, start: int = 0, nbytes: int | None = None) -> None:
    """Store 13 rows of 11 values in files that are cut after these numbers of bytes."""
    content = values(13, 11).tobytes()[:nbytes]
    bounds = [0, *cuts, 13 * 11 * 4]
    segments = []
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        path = beside(file, f"segment{number}.raw")
        path.write_bytes(b"x" * start + content[first:last])
        segments.append((path, start, last - first))
    file.create_dataset("data", (13, 11), "i4", external=segments)


EXTERNAL = {
    "one segment": {"cuts": ()},
    "a segment with an offset": {"cuts": (), "start": 100},
    "segments of whole rows": {"cuts": (44, 176, 484), "start": 3},
    "many segments": {"cuts": (44, 90, 93, 300), "start": 3, "way": "h5py"},
    "a short file": {"cuts": (), "nbytes": 301, "way": ReadError},
}
REFUSED = {"one segment": {"cuts": ()}, "many segments": {"cuts": (44, 90, 93, 300), "start": 3}}


@quirk(UnsafeFileError, cases=REFUSED)
def external_storage_refused(file, cuts, **how):
    external(file, *cuts, **how)


@quirk(UnsafeFileError, options=allow_elsewhere)
def external_storage_allowed_elsewhere(file):
    external(file)


@quirk("direct", cases=EXTERNAL, options=allow_here)
def external_storage_allowed(file, cuts, **how):
    """What is missing of a short file HDF5 takes for zeros."""
    external(file, *cuts, **how)


# --- links and names -----------------------------------------------------------------------------


@quirk("direct", names=("hard", "soft", "soft group/data", "/group/data", "chain", "twice"))
def links_within_the_file(file):
    dataset(file, values(13, 11), "group/data", chunks=(4, 5), filters=("deflate",))
    file["hard"] = file["group/data"]
    file["soft"] = h5py.SoftLink("/group/data")
    file["soft group"] = h5py.SoftLink("/group")
    file["chain"] = h5py.SoftLink("soft")
    file["twice"] = h5py.SoftLink("soft group/data")


@quirk("direct", names=("link", "linked group/x", "soft", "chain"))
def links_to_another_file(file):
    with h5py.File(beside(file, "other.h5"), "w") as other:
        other["padding"] = values(500)
        other["group/x"] = values(13, 11)
    with h5py.File(beside(file, "between.h5"), "w") as between:
        between["link"] = h5py.ExternalLink("other.h5", "/group/x")
    file["here"] = values(4000)
    file["link"] = h5py.ExternalLink("other.h5", "/group/x")
    file["linked group"] = h5py.ExternalLink("other.h5", "/group")
    file["soft"] = h5py.SoftLink("/linked group/x")
    file["chain"] = h5py.ExternalLink("between.h5", "link")


@quirk("direct")
def link_to_another_file_that_leads_back(file):
    dataset(file, values(13, 11), "x")
    with h5py.File(beside(file, "other.h5"), "w") as other:
        other["back"] = h5py.ExternalLink(Path(file.filename).name, "x")
    file["data"] = h5py.ExternalLink("other.h5", "back")


@quirk(DatasetError, cases={"soft": {"link": h5py.SoftLink("/nowhere")}})
@quirk(
    DatasetError,
    cases={
        "external": {"link": h5py.ExternalLink("nowhere.h5", "x")},
        "loop": {"link": h5py.SoftLink("/data")},
    },
)
def dangling_link(file, link):
    file["data"] = link


NAMES = {
    "unicode": "daten/größe ✓ 数据",
    "spaces": " a name / with spaces ",
    "dots": "a.b/..c/d.",
    "quotes": 'it\'s "data"',
    "newline": "two\nlines",
    "backslash": "C:\\data\\x",
    "percent": "%b %d {} {0}",
    "glob": "data[0]*?",
    "long": "x" * 3000,
    "deep": "/".join("abcdefghij" * 5),
    "markup": "[bold]data[/bold]",
    "two dots": "../data",
}


@quirk("direct", cases={key: {"name": name, "names": (name,)} for key, name in NAMES.items()})
def name_with(file, name):
    dataset(file, values(13, 11), name)


@quirk("direct", names=("/data", "//data", "./data", "data/", "group//x", "group/./x", "/group/x/"))
def names_written_otherwise(file):
    dataset(file, values(13, 11))
    dataset(file, values(14, 11), "group/x")


@quirk("direct", names=tuple(f"weights/{n}" for n in (0, 57, 299)), track_order=True)
def group_of_many_datasets(file):
    for number in range(300):
        dataset(file, values(3, 2) + number, f"weights/{number}")


# --- errors, and never a wrong value -------------------------------------------------------------


def damaged(file: h5py.File, filters: tuple[str, ...], damage: Callable[..., bytes]) -> None:
    content = smooth(12, 90, dtype="i8")
    made = dataset(file, content, chunks=(4, 90), filters=filters)
    made.id.write_direct_chunk((4, 0), damage(content[4:8], filters))


@quirk("unreadable", cases=filtered_by(COMPRESSORS))
def chunk_that_was_cut_off(file, filters):
    damaged(file, filters, lambda *chunk: encoded(*chunk)[:-7])


@quirk("unreadable", cases=filtered_by(COMPRESSORS))
def chunk_that_was_cut_in_half(file, filters):
    damaged(file, filters, lambda *chunk: (whole := encoded(*chunk))[: len(whole) // 2])


@quirk("unreadable", cases=filtered_by(COMPRESSORS))
def chunk_that_holds_fewer_rows(file, filters):
    damaged(file, filters, lambda content, filters: encoded(content[:3], filters))


@quirk("unreadable", cases=filtered_by(COMPRESSORS))
def chunk_that_holds_more_rows(file, filters):
    damaged(file, filters, lambda content, filters: encoded(np.repeat(content, 2, 0), filters))


@quirk("unreadable", cases=filtered_by(COMPRESSORS))
def chunk_that_holds_zeros(file, filters):
    damaged(file, filters, lambda *_: bytes(64))


@quirk(
    "unreadable", cases=filtered_by("; ".join(f"{n}, fletcher32" for n in COMPRESSORS.split("; ")))
)
def chunk_with_a_flipped_byte(file, filters):
    def flip(*chunk: Any) -> bytes:
        whole = bytearray(encoded(*chunk))
        whole[len(whole) // 2] ^= 0x10
        return bytes(whole)

    damaged(file, filters, flip)


@quirk("unreadable", cases={"": {"chunks": None}, "chunked": {"chunks": (2, 3)}})
def never_written_with_an_undefined_fill_value(file, chunks):
    plist = plist_of(chunks=chunks)
    undefined_fill_value(plist)
    h5d.create(file.id, b"data", h5t.STD_I32LE, h5s.create_simple((13, 5)), plist)


@quirk("unreadable")
def opaque_with_a_foreign_tag(file):
    stored = h5t.create(h5t.OPAQUE, 4)
    stored.set_tag(b"a blob")
    dataset(file, values(13, dtype="V4"), stored=stored)


# --- what other programs write -------------------------------------------------------------------


def attributes(node: h5py.HLObject, **given: Any) -> None:
    for name, value in given.items():
        node.attrs[name] = np.bytes_(value) if isinstance(value, str) else value


@quirk("direct", names=("images", "earray", "carray", "table"))
def like_pytables(file):
    attributes(file, CLASS="GROUP", PYTABLES_FORMAT_VERSION="2.1", TITLE="", VERSION="1.0")
    dataset(file, values(13, 8, 8, dtype="u1"), "images")
    attributes(file["images"], CLASS="ARRAY", FLAVOR="numpy", VERSION="2.4")
    for kind, maxshape in (("earray", (None, 9)), ("carray", None)):
        made = dataset(
            file,
            values(23, 9, dtype="f4"),
            kind,
            chunks=(4, 9),
            maxshape=maxshape,
            filters=("shuffle", "blosc blosclz shuffled", "fletcher32"),
        )
        attributes(made, CLASS=kind.upper(), EXTDIM=0, TITLE="", VERSION="1.1")
    row = np.dtype([("energy", "<f4"), ("id", "<i8"), ("name", "S16"), ("position", "<f8", (3,))])
    table = dataset(
        file, values(37, dtype=row), "table", chunks=(8,), maxshape=(None,), filters=("blosc",)
    )
    attributes(table, CLASS="TABLE", NROWS=37, TITLE="", VERSION="2.7", FIELD_0_NAME="energy")


def matlab_header(path: Path) -> None:
    text = b"MATLAB 7.3 MAT-file, Platform: GLNXA64, Created on: Mon Jan  5 10:00:00 2026 HDF5"
    with path.open("r+b") as file:
        file.write(text.ljust(124) + b"\x00\x02IM")


@quirk("direct", userblock_size=512, after=matlab_header, num_dims=(0, 1), libver="earliest")
def like_matlab(file):
    made = dataset(file, values(9, 31, dtype="f8"), chunks=(2, 16), filters=("deflate",))
    attributes(made, MATLAB_class="double")


@quirk("direct", userblock_size=512, after=matlab_header, names=("text", "flag", "cplx"))
def like_matlab_with_other_classes(file):
    text = np.array([ord(c) for c in "größe and more"], "u2").reshape(14, 1)
    attributes(dataset(file, text, "text"), MATLAB_class="char", MATLAB_int_decode=np.int32(2))
    flag = values(13, 3, dtype="u1") % 2
    attributes(dataset(file, flag, "flag"), MATLAB_class="logical", MATLAB_int_decode=np.int32(1))
    parts = np.dtype([("real", "<f8"), ("imag", "<f8")])
    attributes(dataset(file, values(13, 3, dtype=parts), "cplx"), MATLAB_class="double")


@quirk("direct", names=("temperature", "time"), libver=("v110", "v110"), track_order=True)
def like_netcdf(file):
    for name, count in (("time", 17), ("lat", 6), ("lon", 7)):
        axis = dataset(file, np.arange(count, dtype="f8"), name, chunks=(count,))
        axis.make_scale(name)
        axis.attrs["_Netcdf4Dimid"] = np.int32(0)
    made = dataset(
        file,
        values(17, 6, 7, dtype="<i2"),
        "temperature",
        chunks=(1, 6, 7),
        maxshape=(None, 6, 7),
        filters=("shuffle", "deflate"),
        fill=np.int16(-32767),
        written=(np.s_[:12],),
    )
    attributes(made, _FillValue=np.array([-32767], "i2"), scale_factor=0.01, add_offset=273.15)
    for dimension, name in enumerate(("time", "lat", "lon")):
        made.dims[dimension].attach_scale(file[name])


@quirk("direct", names=("X/data", "X/indices", "X/indptr", "obs/type/codes", "layers/raw"))
def like_anndata(file):
    attributes(file, **{"encoding-type": "anndata", "encoding-version": "0.1.0"})
    for name, dtype, count in (("data", "f4", 500), ("indices", "i4", 500), ("indptr", "i4", 80)):
        dataset(file, values(count, dtype=dtype), f"X/{name}", chunks=(64,), filters=("lzf",))
    attributes(file["X"], **{"encoding-type": "csr_matrix", "shape": np.array([39, 77])})
    dataset(file, values(39, dtype="i1"), "obs/type/codes")
    file.create_dataset("obs/type/categories", data=["B", "T"], dtype=h5py.string_dtype())
    dataset(
        file,
        values(39, 77, dtype="f4"),
        "layers/raw",
        chunks=(10, 20),
        filters=("shuffle", "zstd"),
    )


@quirk(
    "direct",
    names=("layers/dense/vars/0", "layers/dense/vars/1", "optimizer/vars/3"),
    libver="earliest",
)
def like_keras(file):
    for layer in ("conv2d", "conv2d_1", "dense", "dense_1"):
        file.create_group(f"layers/{layer}/vars")
        dataset(file, values(16, 5, dtype="f4"), f"layers/{layer}/vars/0")
        dataset(file, values(5, dtype="f4"), f"layers/{layer}/vars/1")
    for number in range(8):
        dataset(file, values(16, 5, dtype="f4") * number, f"optimizer/vars/{number}")


@quirk("direct", names=("features", "targets"))
def like_fuel(file):
    """One long dataset of a kind, split by an attribute of references."""
    dataset(file, values(40, 3, 8, 8, dtype="u1"), "features")
    dataset(file, values(40, 1, dtype="u1"), "targets")
    for number, label in enumerate(("batch", "channel", "height", "width")):
        file["features"].dims[number].label = label
    split = np.zeros(2, [("split", "S5"), ("start", "i8"), ("indices", h5py.ref_dtype)])
    split["indices"] = h5py.Reference()
    file.attrs["split"] = split


def dectris_data_files(file: h5py.File) -> list[str]:
    """Write frames of 32-bit counts, one a chunk, bitshuffled; -1 marks a dead pixel."""
    names = []
    for number in range(1, 4):
        name = f"series_data_{number:06}.h5"
        frames = smooth(5, 32, 36, dtype="i4").astype("u4") % 40 * number
        frames[:, 3, 4] = 0xFFFFFFFF
        with h5py.File(beside(file, name), "w") as other:
            made = dataset(
                other,
                frames,
                "entry/data/data",
                chunks=(1, 32, 36),
                maxshape=(None, 32, 36),
                filters=("bitshuffle lz4",),
            )
            attributes(made, image_nr_low=5 * number - 4, image_nr_high=5 * number)
        names.append(name)
    return names


@quirk("direct", names=("entry/data/data_000001", "entry/data/data_000003"))
def like_dectris_with_links(file):
    for number, name in enumerate(dectris_data_files(file), 1):
        file[f"entry/data/data_{number:06}"] = h5py.ExternalLink(name, "entry/data/data")


@quirk("direct", names=("entry/data/data",), libver="latest")
def like_dectris_with_a_virtual_dataset(file):
    layout = h5py.VirtualLayout((15, 32, 36), "u4")
    for number, name in enumerate(dectris_data_files(file)):
        source = h5py.VirtualSource(name, "entry/data/data", (5, 32, 36), maxshape=(None, 32, 36))
        layout[5 * number : 5 * number + 5] = source[:5]
    file.create_virtual_dataset("entry/data/data", layout)


@quirk("direct", names=("entry/data/data",))
def like_dectris_data_file(file):
    frames = smooth(13, 32, 36, dtype="i4").astype("u4") % 40
    dataset(file, frames, "entry/data/data", chunks=(1, 32, 36), filters=("bitshuffle lz4",))


@quirk("direct", names=("events/x", "events/t"))
def like_event_cameras(file):
    """Blosc with zstd in every column, in long one-dimensional datasets."""
    how = {"chunks": (512,), "maxshape": (None,), "filters": ("blosc zstd shuffled",)}
    dataset(file, values(2000, dtype="u2"), "events/x", **how)
    dataset(file, np.cumsum(values(2000, dtype="u1"), dtype="u4"), "events/t", **how)
