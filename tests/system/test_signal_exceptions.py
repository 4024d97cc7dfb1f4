"""What a signal handler raises comes out as it is, wherever it strikes, and costs nothing."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import SAMPLE

import h5async
from h5async import AsyncReader, Field
from h5async.index.links import metadata_cache
from h5async.index.metadata import list_layouts
from h5async.io.source import owned
from h5async.system import interruptions
from h5async.system.interruptions import Once, call_when_gone

N = 64
PACKAGE = str(Path(h5async.__file__).parent)
# Of Python's library, what is written in Python and changes locks, threads and files.
LIBRARY = {contextlib.__file__, threading.__file__}
# Some of what clauses in the package are for; `SystemExit` is what a handler of SIGTERM raises.
KINDS = [TimeoutError, OSError, RuntimeError, ValueError, KeyError, ZeroDivisionError, SystemExit]
NUMBER = signal.SIGUSR1


# Between `open` and the `with` that closes it nobody owns a file: what strikes there leaves it to
# the garbage collector, which warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def _leftovers_are_collected_here():
    """Collect what a strike left, lest the warning come in the middle of another test."""
    yield
    gc.collect()


def is_struck(code):
    if code.co_filename.startswith(PACKAGE):
        return code.co_filename != interruptions.__file__
    is_finalizer = code.co_qualname.startswith("finalize.")  # of weakref: h5py uses the rest
    return code.co_filename in LIBRARY or is_finalizer


class Striker:
    """Has a signal come at the n-th place where Python looks for signals, of `is_struck` code.

    That is after calls, where a function begins, and where a loop turns.
    """

    def __init__(self, place, error):
        self.left = place
        self.error = error
        self.where = ""
        self.before = {}

    def handle(self, number, frame):
        raise self.error

    def trace(self, frame, event, argument):
        code = frame.f_code
        if not is_struck(code):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            before = self.before.get(frame)
            self.before[frame] = dis.opname[code.co_code[frame.f_lasti]]
            if before is None or before.startswith(("CALL", "RESUME", "JUMP_BACKWARD")):
                self.left -= 1
            if self.left == 0:
                self.left = -1
                self.where = f"{code.co_qualname}:{frame.f_lineno}"
                signal.raise_signal(NUMBER)
        elif event == "return":
            self.before.pop(frame, None)
        return self.trace

    def run(self, function):
        """Call a function; return its result, or None where a signal came.

        Its exception must have come out then, the very object, with no other one around it.
        """
        gc.disable()  # it may close other readers, of earlier tests, and swallow what is raised
        former = signal.signal(NUMBER, self.handle)
        result = raised = None
        sys.settrace(self.trace)
        try:
            result = function()
        except BaseException as error:
            raised = error
        finally:
            sys.settrace(None)
            signal.signal(NUMBER, former)
            gc.enable()
            self.before.clear()
        if raised is not None and raised is not self.error:
            raise raised
        self.error.__traceback__ = None  # it holds what was under way
        assert (raised is not None) == bool(self.where), f"swallowed at {self.where}"
        return result if raised is None else None


def every_place(function, kind, step):
    """Strike at every `step`-th place of a function; yield where, until it is done unharmed.

    Unless all cases of all tests are asked for, it is one of eleven of these places.
    """
    step *= 1 if SAMPLE == "all" else 11
    place = random.Random(repr(kind)).randrange(1, step + 1)
    while True:
        striker = Striker(place, kind("of a handler"))
        result = striker.run(function)
        if not striker.where:
            yield result
            return
        yield striker.where
        place += step


def fds():
    return sorted(os.listdir("/dev/fd"))


# --- files, and the options to read them ----------------------------------------------------------


def plain(folder, name="data.h5"):
    data = np.arange(N * 24, dtype="u2").reshape(N, 4, 6)
    with h5py.File(folder / name, "w") as file:
        file["data"] = data
        file["labels"] = np.arange(N)
    return folder / name


def gzip(folder):
    with h5py.File(folder / "gzip.h5", "w") as file:
        data = np.random.default_rng(1).integers(0, 99, (N, 5, 7), "u1")
        file.create_dataset("data", data=data, chunks=(10, 3, 4), compression="gzip", shuffle=True)
        file.create_dataset("labels", data=np.arange(N), chunks=(7,), compression="gzip")
    return {"hdf5_path": folder / "gzip.h5"}


def linked(folder):
    plain(folder)
    with h5py.File(folder / "links.h5", "w") as file:
        file["soft"] = h5py.SoftLink("/group/data")
        file.create_group("group")["data"] = h5py.ExternalLink("data.h5", "data")
        file["labels"] = h5py.ExternalLink("data.h5", "labels")
    return {"hdf5_path": folder / "links.h5", "data_field": "soft"}


def virtual(folder):
    plain(folder)
    with h5py.File(folder / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout((2 * N, 4, 6), "u2")
        layout[:N] = h5py.VirtualSource("data.h5", "data", (N, 4, 6))
        layout[N:] = h5py.VirtualSource("missing.h5", "data", (N, 4, 6))
        file.create_virtual_dataset("data", layout, fillvalue=3)
        file["labels"] = np.arange(2 * N)
    return {"hdf5_path": folder / "virtual.h5", "allow_missing": True}


def external(folder):
    (folder / "values.raw").write_bytes(np.arange(N * 6, dtype="u2").tobytes())
    with h5py.File(folder / "external.h5", "w") as file:
        where = [(str(folder / "values.raw"), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("data", (N, 6), "u2", external=where)
        file["labels"] = np.arange(N)
    return {"hdf5_path": folder / "external.h5", "allow_external": [folder]}


def compact(folder):
    with h5py.File(folder / "compact.h5", "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((N, 6))
        dataset = h5py.h5d.create(file.id, b"data", h5py.h5t.STD_U16LE, space, properties)
        h5py.Dataset(dataset)[...] = np.arange(N * 6).reshape(N, 6)
        file["labels"] = np.arange(N)
    return {"hdf5_path": folder / "compact.h5"}


def globbed(folder):
    for number in range(3):
        plain(folder, f"part-{number}.h5")
    return {"hdf5_path": str(folder / "part-*.h5")}


def toml(folder):
    plain(folder)
    text = 'hdf5_path = "data.h5"\n[fields]\ndata = {path = "data", scale = 2}\nlabels = "labels"\n'
    (folder / "options.toml").write_text(text)
    return folder / "options.toml"


def by_h5py(folder):
    """Elements that NumPy has no equal for, with chunks that are checked here."""
    with h5py.File(folder / "h5py.h5", "w") as file:
        kind = h5py.h5t.STD_U16LE.copy()
        kind.set_precision(12)
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((10, 6))
        properties.set_deflate(1)
        space = h5py.h5s.create_simple((N, 6))
        dataset = h5py.h5d.create(file.id, b"data", kind, space, properties)
        h5py.Dataset(dataset)[...] = np.arange(N * 6).reshape(N, 6)
        file["labels"] = np.arange(N)
    return {"hdf5_path": folder / "h5py.h5"}


def transformed(folder):
    fields = {"data": Field("data", dtype="float32", scale=0.5), "labels": "labels"}
    return {"hdf5_path": plain(folder), "fields": fields, "postprocess": twice}


def twice(data, labels):
    doubled = []
    for row in data:
        doubled.append(2 * row)
    return np.array(doubled), labels


def simple(folder):
    return {"hdf5_path": plain(folder)}


def read_only(folder):
    return {"hdf5_path": plain(folder), "io": "pread"}


def cached(folder):
    return {**gzip(folder), "cache": "host"}


def kept(folder):
    return {**virtual(folder), "index_cache": folder / "kept.h5idx"}


def indexed(folder):
    AsyncReader(**kept(folder), device="cpu", num_threads=0).close()
    return {"hdf5_path": folder / "kept.h5idx", "allow_missing": True}


INDEXED = [kept, indexed]
FORMS = [simple, gzip, linked, virtual, external, compact, globbed, toml, by_h5py, transformed]


def reader_of(options, **more):
    more = {"batch_size": 8, "device": "cpu", "timeout": 60, **more}
    if isinstance(options, dict):
        return AsyncReader(**options, **more)
    return AsyncReader(options, **more)


# --- opening --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_saving_an_index(tmp_path):
    """Each interruption comes out, and leaves the old index or the new one, and nothing else."""
    path, index = plain(tmp_path), tmp_path / "x.h5idx"
    before = fds()

    def save():
        index.unlink(missing_ok=True)
        reader = reader_of({"hdf5_path": path, "index_cache": index}, num_threads=0)
        reader.close()
        return reader  # which is collected outside: nothing comes out of its finalizer

    for kind in KINDS[:3]:
        for at in every_place(save, kind, 97):
            assert {name.name for name in tmp_path.iterdir()} <= {"data.h5", "x.h5idx"}, at
            gc.collect()
            assert fds() == before, at
    with reader_of({"hdf5_path": index}) as reader:
        assert reader.num_samples == N


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("form", [*FORMS, *INDEXED])
def test_opening(tmp_path, form):
    options = form(tmp_path)
    reader_of(options).close()  # what is imported, or found, once
    before, places = fds(), set()
    for kind in KINDS:
        for at in every_place(lambda: reader_of(options, num_threads=1), kind, 311):
            if isinstance(at, str):
                places.add(at)
                gc.collect()
                assert fds() == before, at
            else:
                assert len(list(at)) == len(at)
                at.close()
    assert len(places) > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [TimeoutError, SystemExit])
def test_opening_with_a_helper(tmp_path, kind):
    options = gzip(tmp_path)
    for at in every_place(lambda: reader_of(options, workers="process"), kind, 211):
        if not isinstance(at, str):
            assert len(list(at)) == len(at)
            at.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_datasets(tmp_path, kind):
    """No dataset is listed as one that cannot be read."""
    path = linked(tmp_path)["hdf5_path"]
    for at in every_place(lambda: list(list_layouts(path)), kind, 37):
        if not isinstance(at, str):
            assert [name for name, _ in at] == ["group/data", "labels", "soft"]


def test_settings_are_put_back_unless_the_file_is_closed_before(tmp_path):
    """As where a signal handler raises between the beginning of a context and its block."""
    with h5py.File(plain(tmp_path)) as file:
        before = file.id.get_mdc_config().max_size
        closed_later, closed_before = metadata_cache(file, 1 << 17), metadata_cache(file, 1 << 18)
        with closed_later:
            assert file.id.get_mdc_config().max_size == 1 << 17
        assert file.id.get_mdc_config().max_size == before
        closed_before.__enter__()
    closed_before.__exit__(None, None, None)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_is_not_there(tmp_path, kind):
    """The message, which lists what is there, is not made in an exception's place."""
    path = simple(tmp_path)["hdf5_path"]

    def misspelt():
        with pytest.raises(h5async.DatasetError, match='there is no dataset "date"'):
            reader_of({"hdf5_path": path, "data_field": "date"})
        return True

    for _ in every_place(misspelt, kind, 41):
        pass


# --- batches --------------------------------------------------------------------------------------


def batches_of(reader, epochs=2):
    return [(*map(np.copy, batch), batch.number) for _ in range(epochs) for batch in reader]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for array, due in zip(one, other, strict=True):
            np.testing.assert_array_equal(array, due)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("form", [*FORMS, read_only, cached])
def test_batches(tmp_path, monkeypatch, form, num_threads, core):
    """None is lost or comes twice; each comes out of the calls that no signal hit."""
    if not core:
        monkeypatch.setenv("H5ASYNC_CORE", "0")
    options, rng = form(tmp_path), random.Random(f"{form.__name__} {num_threads} {core}")
    with reader_of(options, num_threads=num_threads, shuffle="full") as reader:
        expected = batches_of(reader)
    places, found = set(), []
    with reader_of(options, num_threads=num_threads, shuffle="full") as reader:
        while len(found) < len(expected):
            for _ in range(12):
                striker = Striker(rng.randrange(1, 150), rng.choice(KINDS)("of a handler"))
                batch = striker.run(rng.choice([reader.get_next_batch, reader.fetch_data]))
                places.add(striker.where)
                if isinstance(batch, h5async.Batch):
                    found.append((*map(np.copy, batch), batch.number))
            batch = reader.get_next_batch()
            found.append((*map(np.copy, batch), batch.number))
    assert_equal(found[: len(expected)], expected)
    assert len(places) > 3


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 2])
def test_given_samples(tmp_path, num_threads):
    """A request that was struck is made or not; no batch is lost, or comes twice."""
    rng, due, places, numbers = random.Random(num_threads), [], set(), []
    with reader_of(gzip(tmp_path), num_threads=num_threads, shuffle="full") as reader:
        expected = [batch.index.tolist() for batch in reader]
        reader.set_epoch(0)

        def note(batch):
            index = batch.index.tolist()
            assert batch.labels.tolist() == index
            if batch.epoch == -1:
                while due[0][0] != index:
                    assert due.pop(0)[1]  # it was struck
                del due[0]
            else:
                numbers.append(batch.epoch * len(expected) + batch.number)
                assert batch.epoch or index == expected[batch.number]

        for _ in range(400):
            striker = Striker(
                rng.randrange(1, rng.choice([20, 400])), rng.choice(KINDS)("of a handler")
            )
            if rng.random() < 0.5 and len(due) < 5:
                index = [rng.randrange(N) for _ in range(rng.randrange(1, 9))]
                due.append((index, striker))
                striker.run(lambda index=index: reader.fetch_data(index))
                due[-1] = index, bool(striker.where)
            else:
                batch = striker.run(reader.get_next_batch)
                if isinstance(batch, h5async.Batch):
                    note(batch)
            places.add(striker.where)
        while any(not was_struck for _, was_struck in due):
            note(reader.get_next_batch())
        assert reader._engine.ring.turns.taken > 20
    assert numbers == list(range(len(numbers)))
    assert len(places) > 3


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [0, 2])
def test_jumps_and_states(tmp_path, num_threads):
    options, rng = gzip(tmp_path), random.Random(num_threads)
    with reader_of(options, num_threads=num_threads, shuffle="full") as reader:
        for _ in range(300):
            call = rng.choice(
                [
                    reader.state_dict,
                    lambda: reader.load_state_dict(reader.state_dict()),
                    lambda: reader.set_epoch(rng.randrange(3)),
                    lambda: next(iter(reader)),
                    lambda: len(reader),
                ]
            )
            Striker(rng.randrange(1, 300), rng.choice(KINDS)("of a handler")).run(call)
        reader.set_epoch(1)
        found = batches_of(reader, 1)
    with reader_of(options, num_threads=0, shuffle="full") as reader:
        reader.set_epoch(1)
        assert_equal(found, batches_of(reader, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_threads", "workers", "step"), [(0, "thread", 3), (2, "thread", 3), (1, "process", 7)]
)
@pytest.mark.parametrize("form", [gzip, by_h5py])
def test_closing(tmp_path, form, num_threads, workers, step):
    """A second call does what the first one left undone."""
    options, before = form(tmp_path), fds()
    for place in range(1, 150, step * (1 if SAMPLE == "all" else 3)):
        reader = reader_of(options, num_threads=num_threads, workers=workers)
        reader.get_next_batch()
        Striker(place, TimeoutError("of a handler")).run(reader.close)
        reader.close()
        with pytest.raises(h5async.ReaderClosedError):
            reader.get_next_batch()
        assert fds() == before, place


# --- forms that an interruption leaves half done -------------------------------------------------


# Forms of calls, and the modules that may have them.
ONLY = {
    "contextlib.suppress": {"cli/__init__.py"},  # `suppressing` passes interruptions
    "threading.Condition": set(),
    "threading.Event": set(),
    "threading.Semaphore": set(),
    "threading.Barrier": set(),
    "queue.Queue": set(),
    "weakref.finalize": {
        "io/shared.py",
        "deliver/gpu.py",
        "reader/asyncreader.py",
        "ray/blockreading.py",  # interrupted, the memory is not used again
    },  # of Python functions
    # As the program ends; of a folder, which no file object takes; others use `owned`.
    "os.open": {"cli/__init__.py", "packing/partialfile.py"},
    "os.dup": set(),
    "os.memfd_create": set(),
    "fcntl.fcntl": {"io/shared.py"},  # in `duplicate`, for threads
    "thread.start": {"system/interruptions.py"},
    "thread.join": {"system/interruptions.py"},
    "thread.is_alive": {"system/interruptions.py"},
}


def forms_in(source):
    """Return the forms of `ONLY` that some code has."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [called for call in calls if (called := ast.unparse(call.func)) in ONLY]


@pytest.mark.slow
def test_no_form_is_left_half_done():
    source = "with threading.Condition():\n  thread.start()\n  f = os.open(p, 0)"
    assert forms_in(source) == ["threading.Condition", "thread.start", "os.open"]
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for form in forms_in(path.read_text()):
            assert name in ONLY[form], (name, form)


def test_a_descriptor_has_an_owner_at_once(tmp_path):
    """Whoever gets none, as its caller was interrupted, leaves none open."""
    path, before = plain(tmp_path), fds()
    with owned(os.open, str(path), os.O_RDONLY) as file:
        assert file.read(4) == b"\x89HDF"
    for _ in range(3):
        owned(os.open, str(path), os.O_RDONLY)
    assert fds() == before
    with pytest.raises(FileNotFoundError):
        owned(os.open, str(tmp_path / "none"), os.O_RDONLY)


@pytest.mark.slow
def test_functions_are_called_when_objects_are_gone():
    class Owner:
        pass

    calls, owner, ring = [], Owner(), Owner()
    ring.itself = ring
    for which, name in ((owner, "first"), (owner, "second"), (ring, "ring")):
        call_when_gone(which, calls.append, name)
    before = len(interruptions._references)
    del owner, which
    assert calls == ["second", "first"]
    del ring
    gc.collect()
    assert calls == ["second", "first", "ring"]
    assert len(interruptions._references) == before - 3


def test_a_signal_as_something_done_once_is_told(monkeypatch):
    """Who waits for it is woken."""
    calls, once, tell = [], Once(), Once.set

    def strike(once):
        monkeypatch.setattr(Once, "set", tell)
        raise KeyboardInterrupt

    monkeypatch.setattr(Once, "set", strike)
    with pytest.raises(KeyboardInterrupt):
        once.do(lambda: calls.append(1))
    assert once.wait_set(0)
    assert calls == [1]


# --- traces, and samples read at once -------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 2])
def test_traces(tmp_path, num_threads):
    """Wherever one was interrupted, the next one begins, and is written."""
    path = tmp_path / "t.json"

    def trace():
        with reader.trace(path):
            reader.fetch_data()
        return True

    with reader_of(gzip(tmp_path), num_threads=num_threads) as reader:
        for kind in (TimeoutError, OSError):
            for _ in every_place(trace, kind, 29):
                path.unlink(missing_ok=True)
                with reader.trace(path):
                    reader.get_next_batch()
                assert json.loads(path.read_text())["traceEvents"]


def test_a_trace_that_nobody_can_end_is_ended_by_the_next(tmp_path):
    with reader_of(simple(tmp_path), num_threads=0) as reader:
        reader.trace(tmp_path / "dropped.json")
        reader.get_next_batch()
        running = reader.trace(tmp_path / "t.json")
        assert json.loads((tmp_path / "dropped.json").read_text())["traceEvents"]
        with pytest.raises(h5async.ConfigError, match="running already"):
            reader.trace(tmp_path / "other.json")
        running.stop()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("form", [gzip, by_h5py])
def test_samples_read_at_once(tmp_path, monkeypatch, form, num_threads, core):
    """And no chunk stays claimed that others then wait for."""
    if not core:
        monkeypatch.setenv("H5ASYNC_CORE", "0")
    with reader_of(form(tmp_path), num_threads=num_threads) as reader:
        for kind in (RuntimeError, ValueError):
            for at in every_place(lambda: reader.read([3, 60, 17]), kind, 17):
                if not isinstance(at, str):
                    assert at.labels.tolist() == [3, 60, 17]
                assert reader.get_next_batch().size


# --- locks ----------------------------------------------------------------------------------------


def calls_returned_under_locks(tree):
    """Yield lines of calls whose result is returned out of a ``with`` block of a lock.

    What is raised between such a call and the end of the block, as by a debugger, leaves it locked.
    """

    def ends_with_call(value):
        if isinstance(value, ast.BoolOp):
            return any(map(ends_with_call, value.values))
        if isinstance(value, ast.IfExp):
            return ends_with_call(value.body) or ends_with_call(value.orelse)
        return isinstance(value, ast.Call | ast.ListComp | ast.SetComp | ast.DictComp)

    def walk(node, locked):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.Lambda):
                yield from walk(child, False)
                continue
            if locked and isinstance(child, ast.Return) and ends_with_call(child.value):
                yield child.lineno
            names = [ast.unparse(item.context_expr) for item in getattr(child, "items", ())]
            is_lock = any(name.rstrip("()").endswith(LOCKS) for name in names)
            yield from walk(child, locked or is_lock)

    return list(walk(tree, False))


LOCKS = ("lock", "changed", "phil", "condition")


def test_numpy_compares_no_rows():
    """`unique` of rows turns what a handler raises into an error of its own."""
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        assert not re.search(r"unique\([^)]*\baxis=", path.read_text()), path


@pytest.mark.slow
def test_calls_are_not_returned_under_locks():
    assert calls_returned_under_locks(ast.parse("with a.lock:\n  return b()")) == [2]
    assert not calls_returned_under_locks(ast.parse("with a.lock:\n  b = c()\nreturn b"))
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        assert not calls_returned_under_locks(ast.parse(path.read_text())), path


# --- handlers -------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


def deleting(number, frame):
    del number, frame
    raise Stopped


def leaving(number, frame):
    signal.signal(number, signal.SIG_DFL)
    raise Stopped


def starred(*_):
    raise Stopped


class Handler:
    def __call__(self, number, frame):
        self.method(number, frame)

    def method(self, number, frame):
        raise Stopped

    def partial(self, what, number, frame):
        raise Stopped


HANDLERS = {
    "deleting": deleting,
    "leaving": leaving,
    "starred": starred,
    "object": Handler(),
    "method": Handler().method,
    "partial": functools.partial(Handler().partial, "this"),
    "partial of an object": functools.partial(Handler()),
    "lambda": lambda *_: starred(),
}


@pytest.fixture
def usr1():
    former = signal.getsignal(NUMBER)
    yield
    signal.signal(NUMBER, former)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("usr1")
@pytest.mark.parametrize("name", HANDLERS)
def test_any_handler(tmp_path, name):
    struck = []

    def strike(data, labels):
        if not struck:
            struck.append(True)
            signal.raise_signal(NUMBER)

    signal.signal(NUMBER, HANDLERS[name])
    with reader_of(simple(tmp_path), num_threads=0, postprocess=strike) as reader:
        with pytest.raises(Stopped) as caught:
            reader.get_next_batch()
        assert type(caught.value) is Stopped
        assert reader.get_next_batch().number == 0


@pytest.mark.usefixtures("usr1")
def test_what_postprocess_makes_of_it_is_its_own(tmp_path):
    """Only what nobody else took is passed."""

    def careful(data, labels):
        try:
            signal.raise_signal(NUMBER)
        except Stopped as error:
            raise LookupError("too late") from error

    signal.signal(NUMBER, starred)
    with reader_of(simple(tmp_path), num_threads=0, postprocess=careful) as reader:
        with pytest.raises(h5async.PostprocessError, match="too late"):
            reader.get_next_batch()
        with pytest.raises(h5async.PostprocessError, match="batch 1 of epoch 0"):
            reader.get_next_batch()


@pytest.mark.usefixtures("usr1")
def test_errors_while_another_is_handled_are_ours(tmp_path):
    """A reader may be made where a handler's exception was caught, and fail by itself there."""
    signal.signal(NUMBER, starred)
    try:
        signal.raise_signal(NUMBER)
    except Stopped:
        with pytest.raises(h5async.ReadError, match="no such file"):
            reader_of({"hdf5_path": tmp_path / "none.h5"})
        with pytest.raises(h5async.DatasetError, match="there is no dataset"):
            reader_of({**simple(tmp_path), "data_field": "none"})
        with reader_of(gzip(tmp_path), num_threads=0) as reader:
            assert len(batches_of(reader, 1)) == N // 8
    else:
        pytest.fail("no exception came")


SCRIPT = """
import os, random, signal, sys
import numpy as np
from h5async import AsyncReader

class Late(Exception):
    pass

kinds = [TimeoutError, Late, RuntimeError]
rng = random.Random(int(sys.argv[2]))
due, error, inside = 0, None, False

def handler(number, frame):
    global error, inside
    error = rng.choice(kinds)("late")
    while frame is not None and "h5async" not in frame.f_code.co_filename:
        frame = frame.f_back
    inside = frame is not None
    raise error

def once(function, seconds):
    global error
    error = None
    result = None
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, seconds))
        result = function()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as raised:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if raised is not error:
            raise
        return None
    return result

# What is imported, before: the import system takes a TimeoutError for a module that is not there.
for threads in 0, 1:
    with AsyncReader(hdf5_path=sys.argv[1], num_threads=threads, device="cpu") as reader:
        reader.get_next_batch()
signal.signal(signal.SIGALRM, handler)
hits = 0
for _ in range(60):
    made = once(lambda: AsyncReader(hdf5_path=sys.argv[1], num_threads=1, device="cpu"), 6e-3)
    hits += made is None and inside
    if made is not None:
        made.close()
with AsyncReader(
    hdf5_path=sys.argv[1], batch_size=8, num_threads=0, shuffle="full", device="cpu"
) as reader:
    for _ in range(200):
        batch = once(reader.get_next_batch, 2e-3)
        if batch is None and inside:
            hits += 1
        elif batch is None:  # it may have been returned, and lost by the script
            due = reader.state_dict()["epoch"] * len(reader) + reader.state_dict()["position"] // 8
        else:
            assert batch.epoch * len(reader) + batch.number == due, (batch, due)
            assert np.array_equal(batch.labels, batch.index)
            due += 1
    assert due
    batch = reader.get_next_batch()
    assert batch.epoch * len(reader) + batch.number == due, (batch, due)
print("hits", hits)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_timer(tmp_path, seed):
    """At any time, in C and in other packages too."""
    path = gzip(tmp_path)["hdf5_path"]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(path), str(seed)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with contextlib.suppress(ValueError):
        assert int(done.stdout.split()[1]) > 20
