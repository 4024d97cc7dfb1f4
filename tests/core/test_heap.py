"""Elements of variable length, by the core and by the reference in Python, against h5py.

Damaged files lie in memory of exactly their size, and values go to memory with canaries on both
sides, so that a build with sanitizers (scripts/check_core) tells of any byte beyond.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import zlib
from pathlib import Path

import h5py
import hypothesis
import numpy as np
import pytest
from collecting import Guarded
from conftest import assert_same_bits
from heapreference import HeapReader, decoded_by, read_in_python
from hypothesis import given
from hypothesis import strategies as st

from h5async.errors import ReadError
from h5async.index.hdf5 import NotDirectError
from h5async.index.storedtypes import VariableLength, variable_length

SEED = 20160704
COMPOUND = np.dtype([("x", "<i2"), ("y", ">f8"), ("z", "u1", (3,))])
DTYPES = ["u1", "i2", "i4", "i8", "f4", "f8", ">f4", ">i8", "?", COMPOUND]
SIZES = [(8, 8), (4, 4), (4, 8), (8, 4)]


# --- files ----------------------------------------------------------------------------------------


def new_file(path, sizes=(8, 8), userblock=0, libver="earliest"):
    """Create a file with other sizes of addresses and sizes than usual."""
    created = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    created.set_sizes(*sizes)
    if userblock:
        created.set_userblock(userblock)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    lowest = {"earliest": h5py.h5f.LIBVER_EARLIEST, "latest": h5py.h5f.LIBVER_LATEST}[libver]
    access.set_libver_bounds(lowest, h5py.h5f.LIBVER_LATEST)
    flags = h5py.h5f.ACC_TRUNC
    return h5py.File(h5py.h5f.create(os.fsencode(path), flags, fcpl=created, fapl=access))


def vlen(dtype):
    return h5py.string_dtype() if dtype == "text" else h5py.vlen_dtype(np.dtype(dtype))


def raw_references(dataset, form):
    """Return the references of a dataset as they are stored, (n, reference_nbytes)."""
    shape, width = dataset.shape, form.reference_nbytes
    found = np.zeros((*shape, width), np.uint8)
    if dataset.chunks is None:
        if dataset.id.get_storage_size() and found.size:  # else it was never written
            offset = dataset.id.get_offset()
            stored = Path(dataset.file.filename).read_bytes()[offset : offset + found.size]
            found[...] = np.frombuffer(stored, np.uint8).reshape(found.shape)
        return found.reshape(-1, width)
    infos = []
    dataset.id.chunk_iter(infos.append)
    for info in infos:
        mask, stored = dataset.id.read_direct_chunk(info.chunk_offset)
        if dataset.compression == "gzip" and not mask:
            stored = zlib.decompress(stored)
        chunk = np.frombuffer(stored, np.uint8).reshape(*dataset.chunks, width)
        here = tuple(
            slice(at, min(at + extent, end))
            for at, extent, end in zip(info.chunk_offset, dataset.chunks, shape, strict=True)
        )
        found[here] = chunk[tuple(slice(0, s.stop - s.start) for s in here)]
    return found.reshape(-1, width)


def expected_bytes(dataset, form):
    """Return what h5py gives of each element, as bytes like those in the file."""
    if form.is_text:
        return [bytes(value) for value in dataset[()].reshape(-1)]
    # (h5py gives the bytes of big-endian numbers as they are stored, but calls them native.)
    return [np.asarray(value).tobytes() for value in dataset[()].reshape(-1)]


class Opened:
    """A file, its elements of variable length, and what h5py makes of them."""

    def __init__(self, path, core, name="data"):
        self.path, self.core = Path(path), core
        with h5py.File(path) as file:
            dataset = file[name]
            self.form = variable_length(dataset.id)
            self.references = raw_references(dataset, self.form)
            self.expected = expected_bytes(dataset, self.form)
        self.nbytes = self.path.stat().st_size

    def sequences(self, core):
        where = f'{self.path.name}: dataset "data"'
        return decoded_by(self.references, self.form, self.nbytes, where, core)

    def read(self, element, io="auto", core=None, sequences=None):
        """Return the bytes of some elements, by the core or the reference."""
        sequences = self.sequences(core) if sequences is None else sequences
        with HeapReader(core, sequences, str(self.path), io) as reader:
            return collected(sequences, element, reader.read)

    def assert_reads_as_h5py(self, element):
        expected = [self.expected[i] for i in element]
        for core in (self.core, None):
            lengths = [len(value) // self.form.dtype.itemsize for value in self.expected]
            sequences = self.sequences(core)
            assert sequences.length.tolist() == lengths
            assert sequences.total == sum(lengths)
            for io in ("map", "pread"):
                assert self.read(element, io, core) == expected
            sequences = self.sequences(core)
            for _ in range(2):  # places are known at the second time
                assert self.read(element, "map", core, sequences) == expected
            wanted = {i for i in element if self.expected[i]}
            assert all(sequences.place[i] > 0 for i in wanted)


def collected(sequences, element, read):
    """Have elements read, one behind the other, into guarded memory; return their bytes."""
    element = np.array(element, np.int64)
    nbytes = sequences.length[element].astype(np.int64) * sequences.form.dtype.itemsize
    position = np.cumsum(np.append(0, nbytes))
    out = Guarded(int(position[-1]))
    read(element, out.inside)
    assert out.is_intact(), "written beside the memory"
    data = out.inside.tobytes()
    return [data[a:b] for a, b in itertools.pairwise(position.tolist())]


# --- whole files ----------------------------------------------------------------------------------


@st.composite
def cases(draw):
    """Draw what a file is to hold."""
    return dict(
        dtype=draw(st.sampled_from([*DTYPES, "text"])),
        lengths=draw(
            st.lists(
                st.one_of(
                    st.none(),  # never written
                    st.integers(0, 20),
                    st.sampled_from([0, 300, 4000, 9000]),
                ),
                max_size=30,
            )
        ),
        rewritten=draw(st.lists(st.tuples(st.integers(0, 29), st.integers(0, 400)), max_size=10)),
        sizes=draw(st.sampled_from(SIZES)),
        userblock=draw(st.sampled_from([0, 0, 512, 2048])),
        libver=draw(st.sampled_from(["earliest", "latest"])),
        options=draw(
            st.sampled_from([{}, {"chunks": (7,)}, {"chunks": (4,), "compression": "gzip"}])
        ),
        shuffles=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )


def some_value(rng, dtype, length):
    if dtype == "text":
        return "".join(rng.choice(list("abcdefgäöü€"), length))
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, length).astype(bool)
    data = rng.integers(0, 100, (length, dtype.itemsize), np.uint8)
    return data.view(dtype).reshape(-1)


def write(path, case):
    rng = np.random.default_rng(case["seed"])
    lengths, dtype, options = case["lengths"], case["dtype"], case["options"]
    options = options | ({"maxshape": (1000,)} if options else {})
    with new_file(path, case["sizes"], case["userblock"], case["libver"]) as file:
        data = file.create_dataset("data", (len(lengths),), vlen(dtype), **options)
        order = rng.permutation(len(lengths)) if case["shuffles"] else range(len(lengths))
        for i in order:
            if lengths[i] is not None:
                data[i] = some_value(rng, dtype, lengths[i])
        for i, length in case["rewritten"]:
            if i < len(lengths):
                data[i] = some_value(rng, dtype, length)
    return path


@pytest.mark.slow
@given(case=cases(), data=st.data())
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_files_read_as_h5py_reads_them(core, tmp_path, case, data):
    opened = Opened(write(tmp_path / "a.h5", case), core)
    count = len(opened.expected)
    if count:
        drawn = st.lists(st.integers(0, count - 1), max_size=2 * count)
        opened.assert_reads_as_h5py(data.draw(drawn))
    opened.assert_reads_as_h5py(range(count))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.h5"


def file_of(path, values, dtype="u1", **options):
    with new_file(path, **options) as file:
        data = file.create_dataset("data", (len(values),), vlen(dtype))
        for i, value in enumerate(values):
            data[i] = value
    return path


def test_many_small_strings_and_empty_ones(core, path):
    rng = np.random.default_rng(SEED)
    opened = Opened(
        file_of(path, [some_value(rng, "text", i % 9) for i in range(3000)], "text"), core
    )
    assert b"" in opened.expected
    opened.assert_reads_as_h5py(range(3000))
    opened.assert_reads_as_h5py(rng.permutation(3000).tolist())


def test_objects_that_have_a_collection_of_their_own(core, path):
    """One element is longer than all others together; those above 64 kB end their collections."""
    rng = np.random.default_rng(SEED)
    lengths = [65_000, 65_536, 70_000, 3, 0, 2_000_001, 65_513, 65_519, 65_520, 65_521]
    opened = Opened(file_of(path, [some_value(rng, "u1", n) for n in lengths]), core)
    for count in range(len(lengths) + 1):
        opened.assert_reads_as_h5py(rng.permutation(len(lengths))[:count].tolist())


def test_elements_that_were_rewritten_again_and_again(core, path):
    rng = np.random.default_rng(SEED)
    file_of(path, [some_value(rng, "i4", 50) for _ in range(200)], "i4")
    for _ in range(5):
        with h5py.File(path, "r+") as file:
            for i in rng.integers(0, 200, 100):
                file["data"][i] = some_value(rng, "i4", rng.integers(0, 200))
    Opened(path, core).assert_reads_as_h5py(rng.permutation(200).tolist())


def test_several_dimensions(core, path):
    rng = np.random.default_rng(SEED)
    with h5py.File(path, "w") as file:
        data = file.create_dataset("data", (5, 7), vlen("i2"), chunks=(2, 3), compression="gzip")
        for i in range(0, 5, 2):
            data[i] = np.array([some_value(rng, "i2", j) for j in range(1, 8)], object)
    Opened(path, core).assert_reads_as_h5py(range(35))


def test_dataset_that_was_never_written(core, path):
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (9,), vlen("f4"))
    Opened(path, core).assert_reads_as_h5py(range(9))


def test_big_endian_numbers(core, path):
    """They are read as they were written; h5py takes their bytes for native numbers."""
    values = np.array([1.5, -2.25])
    opened = Opened(file_of(path, [values, [], values[:1]], ">f8"), core)
    assert opened.form.dtype == ">f8"
    opened.assert_reads_as_h5py(range(3))
    with h5py.File(path) as file:
        assert_same_bits(file["data"][0], values.byteswap())
    assert opened.read([0], core=core) == [values.astype(">f8").tobytes()]


def test_neighbours_are_found_with_an_element(core, path):
    """Elements that lie in one collection are found at once, and a collection is walked once."""
    opened = Opened(file_of(path, [[i % 250] * (1 + i % 5) for i in range(3000)]), core)
    sequences = opened.sequences(core)
    starts = -1 - sequences.place >> 16
    opened.read([1000], "map", core, sequences)
    assert ((sequences.place > 0) == (starts == starts[1000])).all()
    assert 100 < (sequences.place > 0).sum() < 3000


def test_many_threads_share_the_places(core, path):
    rng = np.random.default_rng(SEED)
    opened = Opened(file_of(path, [some_value(rng, "i4", i % 30) for i in range(2000)], "i4"), core)
    for io in ("map", "pread"):
        sequences, wrong = opened.sequences(core), []

        def work(seed, io=io, sequences=sequences, wrong=wrong):
            order = np.random.default_rng(seed)
            for _ in range(10):
                element = order.integers(0, 2000, 200).tolist()
                if opened.read(element, io, core, sequences) != [
                    opened.expected[i] for i in element
                ]:
                    wrong.append(element)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_elements_of_a_changed_file_are_refused(core, path):
    opened = Opened(file_of(path, [[1, 2], [3]]), core)
    with HeapReader(core, opened.sequences(core), str(path)) as reader:
        os.utime(path, (0, 0))
        with pytest.raises(ReadError):
            reader.read(np.zeros(1, np.int64), np.zeros(2, np.uint8))


# --- datatypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, "text"], ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_how_elements_are_stored(path, dtype, sizes):
    with new_file(path, sizes, 1024) as file:
        data = file.create_dataset("data", (3,), vlen(dtype))
        data[0] = some_value(np.random.default_rng(SEED), dtype, 3)
        form = variable_length(data.id)
        assert form.reference_nbytes == sizes[0] + 8
        assert data.id.get_storage_size() == 3 * form.reference_nbytes
        assert variable_length(file.create_dataset("fixed", (3,), "i4").id) is None
        assert variable_length(file.create_dataset("strings", (3,), "S4").id) is None
    is_text = dtype == "text"
    stored = np.dtype(np.uint8 if is_text else dtype)
    assert form == VariableLength(stored, is_text, False, 1024, *sizes)


def test_strings_say_whether_they_are_ascii(path):
    with h5py.File(path, "w") as file:
        for encoding in ("ascii", "utf-8"):
            data = file.create_dataset(encoding, (1,), h5py.string_dtype(encoding))
            assert variable_length(data.id).is_ascii == (encoding == "ascii")


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (h5py.vlen_dtype(h5py.vlen_dtype(np.int32)), "sequences of sequences"),
        (h5py.vlen_dtype(h5py.string_dtype()), "sequences of sequences"),
        (h5py.vlen_dtype(h5py.ref_dtype), "sequences of sequences"),
        (h5py.vlen_dtype(np.dtype([("a", h5py.string_dtype())])), "sequences of sequences"),
    ],
)
def test_types_that_only_h5py_reads(path, dtype, reason):
    with h5py.File(path, "w") as file:
        data = file.create_dataset("data", (1,), dtype)
        with pytest.raises(NotDirectError, match=reason):
            variable_length(data.id)


def test_stored_values_that_are_not_numpys(path):
    stored = h5py.h5t.STD_I32LE.copy()
    stored.set_precision(20)
    space = h5py.h5s.create_simple((1,))
    with h5py.File(path, "w") as file:
        data = h5py.h5d.create(file.id, b"data", h5py.h5t.vlen_create(stored), space)
        with pytest.raises(NotDirectError, match="stored values differ from NumPy's int32"):
            variable_length(data)


# --- damaged files --------------------------------------------------------------------------------


class InMemory:
    """A file whose bytes lie in memory of exactly their size, and in a file of the system."""

    def __init__(self, core, opened, data=None, references=None):
        self.core, self.form, self.path = core, opened.form, opened.path
        self.data = np.array(bytearray(opened.path.read_bytes() if data is None else data))
        self.data = np.frombuffer(bytearray(self.data), np.uint8).copy()
        self.references = opened.references.copy() if references is None else references
        self.descriptor = os.memfd_create("heap") if hasattr(os, "memfd_create") else -1
        if self.descriptor >= 0:
            os.write(self.descriptor, self.data)

    def close(self):
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def sequences(self, core):
        return decoded_by(self.references, self.form, self.data.size, 'a.h5: dataset "data"', core)

    def reader(self, sequences, io):
        if io == "map":
            return HeapReader(self.core, sequences, str(self.path), io, self.data)
        return HeapReader(self.core, sequences, f"/proc/self/fd/{self.descriptor}", io)

    def read_into(self, offset, buffers):
        for buffer in buffers:
            assert 0 <= offset <= self.data.size - len(buffer), "read beyond the file"
            buffer[:] = self.data[offset : offset + len(buffer)].data
            offset += len(buffer)

    def outcome(self, element, way):
        """Return the bytes of elements, or the error; `way` "map" and "pread": by the core."""
        try:
            sequences = self.sequences(None if way == "python" else self.core)
            if sequences.total * self.form.dtype.itemsize > 1 << 22:
                return "more than fits into the test's memory"

            if way != "python":
                with self.reader(sequences, way) as reader:
                    return collected(sequences, element, reader.read)

            def read(*arguments):
                read_in_python(sequences, self.read_into, self.data.size, *arguments)

            return collected(sequences, element, read)
        except ReadError as error:
            return error

    def assert_all_agree(self, element):
        """Read by all ways; return what came of it."""
        ways = ["python", "map", *(["pread"] if self.descriptor >= 0 else [])]
        outcomes = [self.outcome(element, way) for way in ways]
        if isinstance(outcomes[0], ReadError):
            assert all(isinstance(outcome, ReadError) for outcome in outcomes), outcomes
        else:
            assert all(outcome == outcomes[0] for outcome in outcomes)
        return outcomes[0]


def small_files(tmp_path, core):
    """Yield files with collections of several kinds."""
    rng = np.random.default_rng(SEED)
    for number, (dtype, lengths, options) in enumerate(
        [
            ("u1", [5, 0, 17, 300, 1, 8], {}),
            ("i4", [3, 70, 0, 2000, 1] * 4, {"userblock": 512}),
            ("text", [4, 0, 9, 30] * 20, {}),
            (">f8", [9, 2, 8200, 1], {"sizes": (4, 4), "libver": "latest"}),
        ]
    ):
        values = [some_value(rng, dtype, length) for length in lengths]
        path = file_of(tmp_path / f"{number}.h5", values, dtype, **options)
        with h5py.File(path, "r+") as file:
            for i in (0, 2):
                file["data"][i] = some_value(rng, dtype, lengths[i] // 2 + 3)
        yield Opened(path, core)


@pytest.fixture(params=range(4))
def opened(request, tmp_path, core):
    return next(itertools.islice(small_files(tmp_path, core), request.param, None))


def collections_of(data):
    """Return where collections begin."""
    found, at = [], data.find(b"GCOL")
    while at >= 0:
        found.append(at)
        at = data.find(b"GCOL", at + 1)
    return found


def heads_of(opened):
    """Return where the heads of collections and of their objects begin."""
    data, heads = opened.path.read_bytes(), []
    for begin in collections_of(data):
        width = opened.form.size_nbytes
        end = begin + int.from_bytes(data[begin + 8 : begin + 8 + width], "little")
        heads.append(begin)
        at = begin + 16
        while end - at >= 16:
            heads.append(at)
            if data[at : at + 2] == b"\0\0":
                break
            at += 16 + -(-int.from_bytes(data[at + 8 : at + 8 + width], "little") // 8) * 8
    return heads


def test_undamaged_ones_are_read(core, opened):
    memory = InMemory(core, opened)
    everything = range(len(opened.expected))
    assert memory.assert_all_agree(everything) == opened.expected
    assert memory.assert_all_agree(list(everything)[::-1]) == opened.expected[::-1]
    memory.close()


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, b"g", "has no signature"),
        (3, b"\0", "has no signature"),
        (4, b"\2", "is of version 2, not 1"),
        (8, (4095).to_bytes(4, "little"), "cannot have 4095 bytes in a file of"),
        (8, (2**31).to_bytes(4, "little"), "cannot have 2147483648 bytes in a file of"),
        (16, b"\0\0", "free bytes, instead of"),
        (16, b"\7\0", "has no object 1"),
        (16, b"\2\0", "has two objects 2"),
        (24, b"\x06", "has 6 bytes in object 1, instead of 8"),
        (24, (2**31).to_bytes(4, "little"), "ends before object 1"),
        (24, b"\xff" * 4, "ends before object 1"),
    ],
)
def test_damage_is_described(core, path, at, value, words):
    opened = Opened(file_of(path, [[1] * 8, [2] * 8]), core)
    data = bytearray(path.read_bytes())
    begin = collections_of(data)[0]
    data[begin + at : begin + at + len(value)] = value
    memory = InMemory(core, opened, data)
    found = memory.assert_all_agree([0])
    assert isinstance(found, ReadError)
    where = f'a.h5: dataset "data", element 0: the heap collection at byte {begin}, where its'
    assert str(found).startswith(where)
    assert words in str(found)
    assert str(found).endswith("; the file is damaged")
    memory.close()


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ((9, "first", 1), "has 8 bytes in object 1, instead of 9"),
        ((0, "first", 1), "has 8 bytes in object 1, instead of 0"),
        ((8, "first", 3), "has no object 3"),
        ((8, "first", 0), "has no object 0"),
        ((8, "first", 1 << 16 | 1), "its address or the index of the object is too large"),
        ((8, 1, 1), "has no signature"),
        ((8, "end", 1), "would end beyond the "),
        ((8, 2**47 - 1, 1), "its address or the index of the object is too large"),
        ((8, 2**47, 1), "its address or the index of the object is too large"),
        ((8, 2**64 - 1, 1), "its address or the index of the object is too large"),
        ((2**32 - 1, "first", 1), "its 4294967295 values of 1 bytes do not fit into the file"),
        ((5, 0, 1), None),  # no address: it is empty, whatever the rest says
        ((2**32 - 1, 0, 2**32 - 1), None),
    ],
)
def test_references_that_lie(core, path, reference, words):
    opened = Opened(file_of(path, [[1] * 8, [2] * 8]), core)
    length, start, index = reference
    start = {"first": collections_of(path.read_bytes())[0], "end": opened.nbytes - 8}.get(
        start, start
    )
    references = opened.references.copy()
    stored = b"".join(n.to_bytes(w, "little") for n, w in ((length, 4), (start, 8), (index, 4)))
    references[0] = np.frombuffer(stored, np.uint8)
    memory = InMemory(core, opened, references=references)
    found = memory.assert_all_agree([1, 0])
    if words is None:
        assert found == [b"\2" * 8, b""]
    else:
        assert isinstance(found, ReadError)
        assert 'a.h5: dataset "data", element 0: ' in str(found)
        assert words in str(found)
    memory.close()


def test_a_string_with_a_nul_byte(core, path):
    opened = Opened(file_of(path, ["good", "fine"], "text"), core)
    data = bytearray(path.read_bytes())
    data[data.find(b"fine") + 2] = 0
    memory = InMemory(core, opened, data)
    assert memory.assert_all_agree([0]) == [b"good"]
    assert "element 1: the string has a NUL byte" in str(memory.assert_all_agree([0, 1]))
    memory.close()


def test_what_is_asked_for_is_checked(core, path):
    memory = InMemory(core, Opened(file_of(path, [[1] * 8]), core))
    out = Guarded(8)
    with memory.reader(memory.sequences(core), "map") as reader:
        for element, room in ((-1, 8), (1, 8), (2**62, 8), (0, 7), (0, 0)):
            with pytest.raises(IndexError):
                reader.read(np.array([element]), out.inside[:room])
        assert out.is_fresh()
        assert out.is_intact()
        reader.read(np.array([0]), out.inside)
    assert out.inside.tobytes() == b"\1" * 8
    memory.close()


def test_files_that_were_cut_short(core, opened):
    data, everything = opened.path.read_bytes(), range(len(opened.expected))
    ends = {at + extra for at in heads_of(opened) for extra in (0, 1, 8, 15, 16, 17)}
    for end in sorted(ends | {0, 7, 16, len(data) - 1}):
        memory = InMemory(core, opened, data[:end])
        memory.assert_all_agree(everything)
        memory.close()


def mutated(rng, opened, heads):
    """Return the bytes of a file, and its references, with some damage."""
    data = np.frombuffer(bytearray(opened.path.read_bytes()), np.uint8)
    references = opened.references.copy()
    for _ in range(rng.integers(1, 4)):
        kind = rng.integers(6)
        at = int(rng.choice(heads)) + int(rng.integers(16))
        if kind == 0:
            data[at] ^= 1 << rng.integers(8)
        elif kind == 1:
            data[at] = rng.integers(256)
        elif kind == 2:
            size = int(rng.choice([0, 1, 7, 8, 4080, 4096, 65536, 2**31, 2**32 - 1]))
            head = int(rng.choice(heads)) + 8
            data[head : head + 4] = np.frombuffer(size.to_bytes(4, "little"), np.uint8)
        elif kind == 3:
            other = int(rng.choice(heads))
            head = int(rng.choice(heads))
            data[head : head + 16] = data[other : other + 16]
        elif kind == 4:
            row = references[rng.integers(len(references))]
            row[rng.integers(row.size)] ^= 1 << rng.integers(8)
        else:
            references[rng.integers(len(references))] = references[rng.integers(len(references))]
    return data.tobytes(), references


@pytest.mark.slow
def test_thousands_of_damaged_files(core, opened):
    """The core does what its twin does; and what it reads comes from within the file."""
    rng = np.random.default_rng(SEED)
    count, heads, refused = len(opened.expected), heads_of(opened), 0
    for _ in range(20_000 if os.environ.get("H5ASYNC_TESTS") == "all" else 1500):
        memory = InMemory(core, opened, *mutated(rng, opened, heads))
        element = rng.integers(0, count, rng.integers(1, 2 * count)).tolist()
        refused += isinstance(memory.assert_all_agree(element), ReadError)
        memory.close()
    assert 20 < refused


@given(st.data())
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_references_are_decoded_alike(core, data):
    form = VariableLength(
        np.dtype(data.draw(st.sampled_from(["u1", "i4", COMPOUND]))),
        False,
        False,
        0,
        data.draw(st.sampled_from([4, 8])),
        8,
    )
    number = st.one_of(
        st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**16, 2**32, 2**47, 2**63])
    )
    rows = data.draw(st.lists(st.tuples(number, number, number), max_size=8))
    stored = b"".join(
        (value % 256**width).to_bytes(width, "little")
        for row in rows
        for value, width in zip(row, (4, form.address_nbytes, 4), strict=True)
    )
    references = np.frombuffer(stored, np.uint8).reshape(-1, form.reference_nbytes)
    most = data.draw(st.sampled_from([0, 1000, 2**31, 2**40]))
    found = []
    for one in (core, None):
        try:
            decoded = decoded_by(references, form, most, "a", one)
            found.append((decoded.length.tolist(), decoded.place.tolist(), decoded.total))
        except ReadError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_a_page_of_the_map_that_is_missing(core, path):
    opened = Opened(file_of(path, [[1] * 50_000, [2] * 50_000]), core)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        memory = np.frombuffer(mapped, np.uint8)
        with HeapReader(core, opened.sequences(core), str(path), "map", memory) as reader:
            os.truncate(path, 4096)
            with pytest.raises(ReadError):
                reader.read(np.arange(2), np.zeros(100_000, np.uint8))
        del memory, reader
