"""`workers=N`: what threads give, from several helper processes, each of which may die alone."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import each
from conftest import require_extra
from test_helper import (
    DEADLOCK_SECONDS,
    _leaves_no_process,  # noqa: F401  # a fixture of all tests here
    assert_same,
    at_start,
    children,
    crossed,
    in_place,
    is_alive,
    of_any_size,
    run,
    to_others,
    wait_until,
)
from test_helper_faults import ENDS, PATCHES, check_end, starts

import h5async.opening.limits
import h5async.process.child
from h5async import (
    AsyncReader,
    Batch,
    ConfigError,
    Field,
    PostprocessError,
    ReaderConfig,
    ReadError,
)
from h5async.errors import BudgetError
from h5async.io.shared import SharedMemory
from h5async.opening.dataset import open_dataset
from h5async.opening.limits import MemoryBudget
from h5async.order.sampling import FillRequest
from h5async.order.selection import Selection
from h5async.plan.transform import row_transform
from h5async.process.helper import HelperFiller
from h5async.process.messages import Opened

N = 53
OPTIONS = {"batch_size": 8, "device": "cpu", "num_threads": 2, "timeout": 120}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("several") / "data.h5"
    images = np.random.default_rng(1).integers(0, 99, (N, 6, 5, 3), "u1")
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=images, chunks=(7, 3, 5, 3), compression="gzip")
        file["labels"] = np.arange(N)
    return path


def make(path, workers, **options):
    return AsyncReader(hdf5_path=path, workers=workers, **{**OPTIONS, **options})


def pids_of(reader):
    processes = [one.process for one in reader._engine.filler.supervisors]
    return [process and process._popen.pid for process in processes]


@functools.cache
def expected(path, count=2, **options):
    with make(path, "thread", **options) as reader:
        return [batch.copy() for _ in range(count) for batch in reader]


def found(path, workers, count=2, **options):
    with make(path, workers, **options) as reader:
        return [batch.copy() for _ in range(count) for batch in reader]


# --- what comes ----------------------------------------------------------------------------------


def random_function(data, labels, *, rng, index, epoch, number):
    return data + rng.random(data.shape, "f4"), labels + 1000 * epoch + index + number


@pytest.mark.sampled(5)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"postprocess": random_function, "shuffle": "full", "seed": 7},
        {"postprocess": random_function, "rank": 1, "world_size": 3, "num_threads": 0},
        {"postprocess": of_any_size, "shuffle": "full", "prefetch": 3},
        {"postprocess": to_others, "shuffle": "window", "prefetch": 1},
        {"postprocess": crossed, "num_threads": 7, "prefetch": 8},
        {"postprocess": in_place, "drop_last": True, "indices": "3:49:2"},
        {"weights": "labels", "epoch_samples": 90, "debug_lifetimes": True},
    ],
    ids=lambda options: "-".join(map(str, options)),  # (not what they are: functions)
)
def test_batches_are_those_of_threads(path, workers, options):
    assert_same(found(path, workers, **options), expected(path, **options))


@pytest.mark.slow
def test_rows_that_are_transformed_are_h5pys(path):
    fields = {"image": Field("data", axes=(0, 3, 1, 2), scale=0.5), "labels": "labels"}
    with h5py.File(path) as file, make(path, 3, fields=fields, shuffle="full") as reader:
        truth = file["data"][...].transpose(0, 3, 1, 2) * np.float32(0.5)
        for batch in [batch for _ in range(3) for batch in map(Batch.copy, reader)]:
            assert np.array_equal(batch.image, truth[batch.index])
            assert np.array_equal(batch.labels, batch.index)


@pytest.mark.slow
def test_it_goes_on_at_any_batch(path):
    options = {"postprocess": random_function, "shuffle": "full"}
    states = []
    with make(path, 2, **options) as reader:
        for _ in range(len(reader) + 2):
            states.append(json.loads(json.dumps(reader.state_dict())))
            reader.get_next_batch()
        for turn in [*range(len(states)), 3, 0]:
            reader.load_state_dict(states[turn])
            assert_same([batch.copy() for batch in reader], rest_of(path, turn, **options))
        reader.set_epoch(1)
        assert_same([batch.copy() for batch in reader], rest_of(path, len(reader), **options))


def rest_of(path, turn, **options):
    """Batches from one on to the end of its epoch."""
    batches = expected(path, **options)
    return [batch for batch in batches[turn:] if batch.epoch == batches[turn].epoch]


@pytest.mark.slow
def test_given_samples_come_in_their_turn(path):
    with make(path, 2, postprocess=random_function) as reader, h5py.File(path) as file:
        labels = file["labels"][...]
        for turn in range(6):
            reader.fetch_data([turn, 52, turn, 7])
            reader.fetch_data()
            given, own = reader.get_next_batch().copy(), reader.get_next_batch()
            assert given.index.tolist() == [turn, 52, turn, 7]
            assert given.labels.tolist() == (labels[given.index] - 1001 + given.index).tolist()
            assert (given.number, own.number) == (-1, turn)
        with pytest.raises(ConfigError, match='needs workers="thread"'):
            reader.read([1])


@pytest.mark.slow
def test_a_dataset_of_pytorchs(path):
    torch = require_extra("torch")
    from h5async.torch import H5Dataset

    with H5Dataset(hdf5_path=path, workers=2, postprocess=random_function, **OPTIONS) as dataset:
        found = [{name: tensor.clone() for name, tensor in batch.items()} for batch in dataset]
        truth = expected(path, 1, postprocess=random_function)
        assert len(found) == len(truth)
        for batch, other in zip(found, truth, strict=True):
            assert torch.equal(batch["data"], torch.from_numpy(other.data))


def process_numbers(data, labels):
    return data, np.full(len(labels), os.getpid())


@pytest.mark.slow
def test_all_helpers_fill_slots_and_what_they_did_is_added_up(path):
    with make(path, 3, batch_size=2, num_threads=6, postprocess=process_numbers) as reader:
        pids = set(pids_of(reader))
        filled = set()
        while filled != pids:  # the freest of them fills the next one
            for batch in reader:
                filled |= set(batch.labels.tolist())
        assert len(pids) == 3
        stats = reader.stats()
        assert (stats.workers, stats.num_threads) == (3, 6)
        each_one = [one.stats() for one in reader._engine.filler.supervisors]
        assert all(one.stage_seconds["postprocess"] > 0 for one in each_one)
        assert stats.decoded_chunks >= sum(one.counts.decoded_chunks for one in each_one) > 0
        assert "waiting for the GIL: the loop" not in str(stats)


@pytest.mark.slow
def test_what_postprocess_makes_lies_in_as_many_places_as_there_are_slots(path):
    """However many helpers fill them."""
    with make(path, 3, postprocess=to_others, prefetch=4, shuffle="full") as reader:
        shared = reader._engine.filler.shared
        places = {shared.spec(batch.data).offset for _ in range(12) for batch in reader}
        assert len(places) == 4


# --- options -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_threads_and_slots_are_divided():
    def config(**options):
        return ReaderConfig(hdf5_path="x.h5", **options)

    for workers, threads, helpers, of_each, prefetch in (
        ("thread", 8, 0, 8, 2),
        ("process", 8, 1, 8, 2),
        ("process", 0, 1, 1, 2),
        (1, 8, 1, 8, 2),
        (2, 8, 2, 4, 5),
        (3, 8, 3, 2, 7),
        (4, 2, 4, 1, 9),
        (4, 0, 4, 1, 9),
    ):
        made = config(workers=workers, num_threads=threads)
        assert (made.num_helpers, made.filler_threads, made.prefetch) == (
            helpers,
            of_each,
            prefetch,
        )
        assert "prefetch" not in made.model_fields_set
        assert config(workers=workers, prefetch=1).prefetch == 1
        assert ReaderConfig.load(json.loads(made.model_dump_json())).prefetch == prefetch
        assert ReaderConfig.load(made, workers=5).prefetch == 11
    assert config(workers="3").workers == config(workers=np.int8(3)).workers == 3


@pytest.mark.slow
@pytest.mark.parametrize("value", [0, -2, True, 2.5, "", "0", "many", "²", "-1", None, [2], 257])
def test_what_is_no_number_of_helpers(value):
    words = 'workers: must be "thread", "process", or a number of helper processes to 256, found'
    with pytest.raises(ConfigError, match=words):
        ReaderConfig(hdf5_path="x.h5", workers=value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"cache": "host"}, 'workers="process"'),
        ({"cache": "device", "device": "cuda"}, 'workers="process"'),
        ({"sampler": range(9)}, 'workers="thread"'),
    ],
)
def test_what_several_helpers_cannot_do(options, remedy):
    with pytest.raises(ConfigError, match=remedy):
        ReaderConfig(hdf5_path="x.h5", workers=2, **options)
    if "cache" in options:
        ReaderConfig(hdf5_path="x.h5", workers=1, **options)


# --- memory --------------------------------------------------------------------------------------


def budget(path, monkeypatch, free, **options):
    monkeypatch.setattr(h5async.opening.limits, "free_memory_nbytes", lambda: free)
    fields = {"data": Field("data", dtype="f8", scale=0.5)}
    config = ReaderConfig(hdf5_path=path, fields=fields, **{**OPTIONS, "prefetch": 4, **options})
    layouts = open_dataset(config).layouts
    transforms = {"data": row_transform(fields["data"], layouts["data"])}
    every = Selection.of_range(range(next(iter(layouts.values())).sample_count))
    return MemoryBudget(
        config, layouts, transforms, 8, made_nbytes={}, selection=every, fewer_threads_do=True
    )


@pytest.mark.slow
def test_each_helper_has_memory_of_its_own(path, monkeypatch):
    rows, wanted = 8 * 6 * 5 * 3, [1 << 20]
    plans = {}
    for workers in (1, 4):
        found = budget(path, monkeypatch, 4 << 20, workers=workers, num_threads=8)
        # As delivered once, and as read in each helper.
        assert found._slots() == {"data": 4 * (rows * 8 + workers * rows)}
        plans[workers] = found.plan(0, wanted)
    assert plans[1].most_threads == 8
    assert plans[4].most_threads == 2
    assert plans[1].kept_nbytes == (1 << 20,)
    (kept,) = plans[4].kept_nbytes
    assert (1 << 17) < kept < (1 << 19)
    assert plans[1].left_nbytes < 3 << 20
    assert plans[4].left_nbytes < (4 << 20) - 4 * kept

    scratch = [
        share.nbytes
        for workers in (1, 4)
        for share in budget(path, monkeypatch, 4 << 20, workers=workers)._shares(0, 2)
        if share.what.startswith("scratch of 2 threads")
    ]
    assert scratch[1] == 4 * scratch[0] > 0


@pytest.mark.slow
def test_what_several_helpers_need_is_refused_where_it_does_not_fit(path, monkeypatch):
    budget(path, monkeypatch, 400_000, workers=1).plan(0, [0])
    with pytest.raises(BudgetError, match=r"scratch of 1 thread, in 64 processes .* smaller"):
        budget(path, monkeypatch, 400_000, workers=64).plan(0, [0])


# --- who gets which request ----------------------------------------------------------------------


class Counting:
    """A supervisor that only counts."""

    def __init__(self):
        self.found = []

    num_outstanding = property(lambda self: len(self.found))

    def request(self, request):
        self.found.append(request.serial)
        return True


def test_a_request_goes_to_the_freest():
    filler = HelperFiller(ReaderConfig(hdf5_path="x.h5", workers=3))
    first, second, third = filler.supervisors = [Counting() for _ in range(3)]
    for serial in range(5):
        assert filler._request(FillRequest(serial, serial, 0, serial, 0))
    assert [one.found for one in filler.supervisors] == [[0, 3], [1, 4], [2]]
    first.found.clear()
    third.found.clear()
    for serial in range(5, 8):
        filler._request(FillRequest(serial, serial, 0, serial, 0))
    assert [one.found for one in (first, second, third)] == [[5, 7], [1, 4], [6]]
    filler.shared.close()


# --- shared memory -------------------------------------------------------------------------------

GROW = """
import sys
from h5async.io.shared import SharedMemory
memory = SharedMemory(int(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(3000):
    print(memory.spec(memory.empty(1 << 18)).offset)
"""


@pytest.mark.slow
def test_several_processes_may_make_it_larger():
    memory = SharedMemory()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", GROW, str(memory.fd)],
            pass_fds=[memory.fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(3)
    ]
    for program in programs:
        assert program.stdout.readline() == "ready\n"
    for program in programs:
        program.stdin.write("\n")
        program.stdin.flush()
    outputs = [program.communicate(timeout=DEADLOCK_SECONDS)[0] for program in programs]
    places = np.array([int(line) for output in outputs for line in output.split()])
    assert places.size == 9000
    assert (np.diff(np.sort(places)) == 1 << 18).all()
    memory.close()


# --- errors and ends of helpers ------------------------------------------------------------------


def fails_at_16(data, labels):
    if labels[0] == 16:
        raise ArithmeticError("sixteen")


@pytest.mark.slow
def test_an_error_costs_its_batch(path):
    with make(path, 3, postprocess=fails_at_16) as reader:
        pids = pids_of(reader)
        for turn in range(2 * len(reader)):
            if turn % len(reader) == 2:
                with pytest.raises(PostprocessError, match=r"batch 2 of .*: sixteen") as caught:
                    reader.get_next_batch()
                assert isinstance(caught.value, ArithmeticError)
                continue
            assert reader.get_next_batch().number == turn % len(reader)
        assert pids_of(reader) == pids


def crashes_at_16(data, labels):
    if labels[0] == 16:
        ctypes.string_at(0)


@pytest.mark.slow
def test_a_crash_costs_its_batch(path, monkeypatch):
    found = starts(monkeypatch)
    with make(path, 2, postprocess=crashes_at_16) as reader:
        seen = []
        for _ in range(len(reader)):
            try:
                seen.append(reader.get_next_batch().number)
            except ReadError as error:
                assert "SIGSEGV" in str(error)  # noqa: PT017
                seen.append(str(error).split("batch ")[1][:1])
    assert seen == [0, 1, "2", 3, 4, 5, 6]
    assert len(found) == 2 + 3


@pytest.mark.slow
def test_one_is_killed_and_the_others_go_on(path, tmp_path, monkeypatch):
    """Its batch waits for ever, until another helper takes its place."""
    first_time, here = tmp_path / "first", tmp_path / "here"
    os.mkfifo(here)

    def waits_at_8(data, labels):
        if labels[0] == 8 and not first_time.exists():
            first_time.touch()
            with here.open("w") as fifo:
                fifo.write(str(os.getpid()))
            signal.pause()

    found = starts(monkeypatch)
    with make(path, 2, num_threads=2, prefetch=5, postprocess=waits_at_8) as reader:
        for _ in range(5):
            reader.fetch_data()
        hangs = int(here.read_text())
        before = pids_of(reader)
        (other,) = set(before) - {hangs}
        assert reader.get_next_batch().number == 0
        hanging = reader._engine.filler.supervisors[before.index(hangs)]
        going_on = reader._engine.filler.supervisors[before.index(other)]
        wait_until(lambda: going_on.num_outstanding == 0)
        assert hanging.num_outstanding > 0
        assert len(found) == 2
        os.kill(hangs, signal.SIGKILL)
        for number in range(1, len(reader)):
            assert reader.get_next_batch().number == number
        assert len(found) == 3
        after = pids_of(reader)
        assert after[before.index(other)] == other
        assert after[before.index(hangs)] != hangs


@pytest.mark.slow
def test_killed_at_random_moments_every_batch_comes_or_says_why(path):
    rng, stop, kills = random.Random(5), threading.Event(), []

    def kill():
        while not stop.wait(rng.expovariate(1 / 0.3)):
            for pid in children():
                if rng.random() < 0.5:
                    os.kill(pid, signal.SIGKILL)
                    kills.append(pid)

    options = {"shuffle": "full", "batch_size": 2, "postprocess": random_function}
    truth = expected(path, 1, **options)
    lost = 0
    with make(path, 3, **options) as reader:
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            turn = 0
            while len(kills) < 30:
                try:
                    batch = reader.get_next_batch()
                    if turn < len(truth):
                        assert_same([batch], [truth[turn]])
                    assert (batch.epoch, batch.number) == divmod(turn, len(reader))
                except ReadError as error:
                    assert "SIGKILL" in str(error)  # noqa: PT017
                    lost += 1
                turn += 1
        finally:
            stop.set()
            killer.join(DEADLOCK_SECONDS)
    # A batch is lost with the third helper that had it; only the first may have had others, too.
    assert lost < len(kills) / 2


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_one_that_dies_while_a_reader_is_made_is_an_error(path, monkeypatch, which):
    inner, begun = h5async.process.child.HelperProcess.receive, []

    def receive(process):
        found = inner(process)
        if isinstance(found, Opened):
            begun.append(process)
            if len(begun) == 1 + which:
                os.kill(process._popen.pid, signal.SIGKILL)
        return found

    monkeypatch.setattr(h5async.process.child.HelperProcess, "receive", receive)
    with pytest.raises(ReadError, match=r"SIGKILL.*before it had started its threads"):
        make(path, 2)


@pytest.mark.slow
def test_helpers_that_find_different_files(path, tmp_path, monkeypatch):
    """The file is replaced while they open it."""
    copy, other, gate = tmp_path / "data.h5", tmp_path / "other.h5", threading.Barrier(2)
    for file in (copy, other):
        file.write_bytes(path.read_bytes())
    inner = h5async.process.child.HelperProcess.send_bytes
    lock, begun = threading.Lock(), []

    def send_bytes(process, data):
        with lock:
            is_first = process not in begun
            begun.append(process)
            is_second = is_first and len(begun) == 2
        if is_second:
            gate.wait(DEADLOCK_SECONDS)
            other.replace(copy)
        inner(process, data)

    def receive(process):
        found = taken(process)
        if isinstance(found, Opened) and process is begun[0]:
            gate.wait(DEADLOCK_SECONDS)
        return found

    taken = h5async.process.child.HelperProcess.receive
    monkeypatch.setattr(h5async.process.child.HelperProcess, "send_bytes", send_bytes)
    monkeypatch.setattr(h5async.process.child.HelperProcess, "receive", receive)
    with pytest.raises(ReadError, match=r"data.h5: this file was changed while the reader was"):
        make(copy, 2)


@pytest.mark.slow
def test_helpers_that_die_at_each_start_end_in_an_error(path, monkeypatch):
    with make(path, 2, prefetch=4) as reader:
        reader.get_next_batch()
        at_start(monkeypatch, "import os; os.abort()")
        for pid in pids_of(reader):
            os.kill(pid, signal.SIGKILL)
        for number in range(1, 4):
            with pytest.raises(ReadError, match=rf"SIGABRT.*batch {number} of epoch 0"):
                reader.get_next_batch()


# --- ends ----------------------------------------------------------------------------------------


def slow(data, labels, *, number):
    threading.Event().wait(0.01 * (number % 3))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_it_can_be_closed_at_any_time(path, workers):
    rng = random.Random(workers)
    for taken in range(5):
        with make(path, workers, postprocess=slow, prefetch=rng.randint(1, 7)) as reader:
            for _ in range(taken):
                reader.get_next_batch()
            for _ in range(rng.randint(0, 8)):
                reader.fetch_data()
            pids = pids_of(reader)
            if taken == 4:
                os.kill(pids[1], signal.SIGKILL)
        assert not any(map(is_alive, pids))


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", ENDS)
def test_scripts_end_as_they_should(path, tmp_path, how):
    check_end(path, tmp_path, how, 3, 3)


@pytest.mark.slow
def test_ctrl_c_is_the_readers(path, tmp_path):
    """A terminal sends it to the helpers too."""
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from h5async import AsyncReader\n"
        "reader = AsyncReader(hdf5_path=sys.argv[1], workers=2, batch_size=8, device='cpu')\n"
        "pids = lambda: [one.process._popen.pid for one in reader._engine.filler.supervisors]\n"
        "before = pids()\n"
        "for turn in range(3):\n"
        "    try:\n"
        "        os.killpg(0, signal.SIGINT)\n"
        "        reader.fetch_data()\n"
        "        while True: time.sleep(0.001)\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
        "    assert reader.get_next_batch().number == turn\n"
        "assert pids() == before\n"
        "print('fine')\n"
    )
    assert run(script, path, start_new_session=True).stdout == "fine\n"


@pytest.mark.slow
@each("patch", ["gevent", "eventlet", "eventlet's threads"])
@each("when", ["before", "after"])
def test_what_others_have_patched(path, tmp_path, patch, when):
    package = patch.split("'")[0]
    if importlib.util.find_spec(package) is None:
        if os.environ.get("H5ASYNC_REQUIRE_EXTRAS") == "1":
            pytest.fail(f"H5ASYNC_REQUIRE_EXTRAS=1, but this test needs {package}")
        pytest.skip(f"needs {package}")
    first, second = (PATCHES[patch], "") if when == "before" else ("", PATCHES[patch])
    script = tmp_path / "program.py"
    script.write_text(
        f"import os, signal, sys, warnings; warnings.simplefilter('ignore')\n{first}\n"
        f"from h5async import AsyncReader\n{second}\n"
        "options = dict(hdf5_path=sys.argv[1], workers=2, batch_size=2, shuffle='full',\n"
        "               device='cpu')\n"
        "with AsyncReader(options) as reader:\n"
        "    for turn in range(3):\n"
        "        for batch in reader:\n"
        "            assert batch.labels.tolist() == batch.index.tolist()\n"
        "        helper = reader._engine.filler.supervisors[turn % 2].process\n"
        "        os.kill(helper._popen.pid, signal.SIGKILL)\n"
        "    for _ in range(6): reader.fetch_data()\n"
        "reader = AsyncReader(options)\n"
        "reader.get_next_batch()\n"
        "print('fine')\n"
    )
    assert run(script, path).stdout == "fine\n"
