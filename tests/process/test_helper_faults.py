"""`workers="process"` where the world is rough: kills, signals, patched modules, limits, exits."""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib.util
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading

import h5py
import numpy as np
import pytest
from test_helper import (
    DEADLOCK_SECONDS,
    _leaves_no_process,  # noqa: F401  # a fixture of all tests here
    at_start,
    children,
    is_alive,
    make,
    pid_of,
    run,
    wait_until,
)

import h5async.process.child
from h5async import AsyncReader, ConfigError, ReadError
from h5async.io.shared import SharedMemory
from h5async.process.helper_main import GROUP_SIGNALS
from h5async.process.messages import Answer, Opened, Started

N = 53


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "data.h5"
    with h5py.File(path, "w") as file:
        rows = np.random.default_rng(1).integers(0, 99, (N, 40), "i4")
        file.create_dataset("data", data=rows, chunks=(7, 40), compression="gzip")
        file["labels"] = np.arange(N)
    return path


def starts(monkeypatch):
    """Count helpers from now on."""
    found, inner = [], h5async.process.child._code
    monkeypatch.setattr(h5async.process.child, "_code", lambda *a: found.append(a) or inner(*a))
    return found


# --- kills ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("message", [Opened, Started, Answer])
def test_a_kill_at_any_step_costs_nothing(path, monkeypatch, message):
    """Also that of the helper which takes the place of one that was killed."""
    kills, inner = [], h5async.process.child.HelperProcess.receive

    def receive(process):
        found = inner(process)
        if is_begun and isinstance(found, message) and not kills:
            kills.append(process._popen.pid)
            os.kill(process._popen.pid, signal.SIGKILL)
        return found

    monkeypatch.setattr(h5async.process.child.HelperProcess, "receive", receive)
    is_begun = False
    with make(path, prefetch=3) as reader:
        assert reader.get_next_batch().number == 0
        is_begun = True
        os.kill(pid_of(reader), signal.SIGKILL)
        for turn in range(1, 2 * len(reader)):
            batch = reader.get_next_batch()
            assert (batch.epoch, batch.number) == divmod(turn, len(reader))
            assert batch.labels.tolist() == batch.index.tolist()
    assert kills


@pytest.mark.slow
@pytest.mark.parametrize("message", [Opened, Started])
def test_a_kill_while_a_reader_is_made_is_an_error(path, monkeypatch, message):
    inner = h5async.process.child.HelperProcess._open

    def opens(process, *arguments):
        inner(process, *arguments)
        os.kill(process._popen.pid, signal.SIGKILL)

    def receive(process):
        found = taken(process)
        if isinstance(found, Opened) and message is Started:
            os.kill(process._popen.pid, signal.SIGKILL)
        return found

    taken = h5async.process.child.HelperProcess.receive
    if message is Opened:
        monkeypatch.setattr(h5async.process.child.HelperProcess, "_open", opens)
    monkeypatch.setattr(h5async.process.child.HelperProcess, "receive", receive)
    step = "opened the files" if message is Opened else "started its threads"
    with pytest.raises(ReadError, match=f"SIGKILL.*before it had {step}"):
        make(path)


@pytest.mark.slow
def test_killed_at_random_moments_every_batch_comes_or_says_why(path):
    """At its start, in the middle of a message, while a slot is written: whenever."""
    rng, stop, kills = random.Random(3), threading.Event(), []

    def kill():
        while not stop.wait(rng.expovariate(1 / 0.3)):
            for pid in children():
                os.kill(pid, signal.SIGKILL)
                kills.append(pid)

    options = {"shuffle": "full", "prefetch": 4, "batch_size": 2}
    with h5py.File(path) as file, make(path, **options) as reader:
        truth, lost = file["data"][...], 0
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            turn = 0
            while len(kills) < 40:
                try:
                    batch = reader.get_next_batch()
                    assert (batch.epoch, batch.number) == divmod(turn, len(reader))
                    assert np.array_equal(batch.data, truth[batch.index])
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
def test_a_message_that_is_cut_off_is_no_message(path, monkeypatch):
    cut_off = (
        "import os, signal, threading, h5async.process.messages as c; inner = c.Channel.send;"
        "sent = []\n"
        "def send(self, data):\n"
        "    sent.append(data)\n"
        "    if len(sent) == 4:\n"
        "        self._socket.sendall(c._SIZE.pack(len(data)) + data[:20])\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    inner(self, data)\n"
        "c.Channel.send = send\n"
    )
    inner = h5async.process.child._code
    monkeypatch.setattr(h5async.process.child, "_code", lambda *a: cut_off + inner(*a))
    with make(path, prefetch=1) as reader:
        assert [reader.get_next_batch().number for _ in range(6)] == list(range(6))


def leaves_a_child(data, labels):
    if labels[0] == 0 and os.fork() == 0:
        signal.pause()


@pytest.mark.slow
def test_the_end_is_seen_though_a_child_of_the_helper_lives_on(path):
    with make(path, prefetch=1, postprocess=leaves_a_child) as reader:
        reader.get_next_batch()
        pid = pid_of(reader)
        tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
        (child,) = map(int, "".join(task.read_text() for task in tasks).split())
        try:
            os.kill(pid, signal.SIGKILL)
            assert reader.get_next_batch().number == 1
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGTERM)  # which it does not ignore
        wait_until(lambda: not is_alive(child))


def crashes_at_16(data, labels):
    if labels[0] == 16:
        ctypes.string_at(0)


@pytest.mark.slow
def test_what_helpers_die_of_is_not_tried_for_ever(path, monkeypatch):
    found = starts(monkeypatch)
    with make(path, prefetch=3, postprocess=crashes_at_16) as reader:
        seen = []
        for _ in range(len(reader)):
            try:
                seen.append(reader.get_next_batch().number)
            except ReadError as error:
                assert "SIGSEGV" in str(error)  # noqa: PT017
                seen.append(str(error).split("batch ")[1][:1])
    assert seen == [0, 1, "2", 3, 4, 5, 6]
    assert len(found) == 4


@pytest.mark.slow
def test_helpers_that_die_at_each_start_end_in_an_error(path, monkeypatch):
    with make(path, prefetch=2) as reader:
        reader.get_next_batch()
        at_start(monkeypatch, "import os; os.abort()")
        found = starts(monkeypatch)
        os.kill(pid_of(reader), signal.SIGKILL)
        with pytest.raises(ReadError, match=r"SIGABRT.*batch 1 of epoch 0 was to be filled"):
            reader.get_next_batch()
        assert len(found) <= 4


# --- signals -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", ["group", "helper"])
def test_signals_of_the_group_are_the_readers(path, tmp_path, target):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, sys\n"
        "from h5async import AsyncReader\n"
        "reader = AsyncReader(hdf5_path=sys.argv[1], workers='process', batch_size=8)\n"
        "pid, got = reader._engine.filler.supervisors[0].process._popen.pid, []\n"
        "for number in map(int, sys.argv[3:]):\n"
        "    signal.signal(number, lambda n, f: got.append(n))\n"
        "    if sys.argv[2] == 'group': os.killpg(0, number)\n"
        "    else: os.kill(pid, number)\n"
        "    reader.get_next_batch(); reader.get_next_batch()\n"
        "assert reader._engine.filler.supervisors[0].process._popen.pid == pid\n"
        "print(len(got))\n"
    )
    numbers = sorted(GROUP_SIGNALS)
    done = run(script, path, target, *map(int, numbers), start_new_session=True)
    assert int(done.stdout) == (len(numbers) if target == "group" else 0)


@pytest.mark.slow
def test_signals_before_the_helper_is_ready_for_them(path, monkeypatch):
    code = "; ".join(f"os.kill(os.getpid(), {int(number)})" for number in GROUP_SIGNALS)
    at_start(monkeypatch, f"import os; {code}")
    with make(path) as reader:
        assert reader.get_next_batch().number == 0


@pytest.mark.slow
def test_a_program_that_was_stopped_goes_on(path, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, sys\n"
        "from h5async import AsyncReader\n"
        "reader = AsyncReader(hdf5_path=sys.argv[1], workers='process', batch_size=8)\n"
        "print(reader._engine.filler.supervisors[0].process._popen.pid, flush=True)\n"
        "for _ in range(100): reader.get_next_batch()\n"
        "sys.stdin.readline()\n"
        "for _ in range(100): reader.get_next_batch()\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        helper = int(program.stdout.readline())
        os.killpg(program.pid, signal.SIGTSTP)  # (an orphaned group is not stopped by that)
        os.killpg(program.pid, signal.SIGSTOP)
        state = pathlib.Path(f"/proc/{program.pid}/stat")
        wait_until(lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "T")
        assert pathlib.Path(f"/proc/{helper}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T"
        os.killpg(program.pid, signal.SIGCONT)
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.wait(DEADLOCK_SECONDS) == 0
    wait_until(lambda: not is_alive(helper))


@pytest.mark.slow
def test_a_reader_that_lets_sigpipe_have_its_way(path, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, sys\n"
        "from h5async import AsyncReader\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "with AsyncReader(hdf5_path=sys.argv[1], workers='process', batch_size=8) as reader:\n"
        "    for turn in range(3):\n"
        "        process = reader._engine.filler.supervisors[0].process\n"
        "        assert reader.get_next_batch().number == 2 * turn\n"
        "        reader._engine.filler._lock.acquire()\n"  # the end is not noticed yet
        "        os.kill(process._popen.pid, signal.SIGKILL)\n"
        "        process._popen.wait()\n"
        "        process.send_bytes(b'anything')\n"
        "        reader._engine.filler._lock.release()\n"
        "        assert reader.get_next_batch().number == 2 * turn + 1\n"
    )
    run(script, path)


USUAL = GROUP_SIGNALS - {signal.SIGTTIN, signal.SIGTTOU}


def dispositions(data, labels):
    code = "import signal; print(*(signal.getsignal(n).name for n in map(int, '%s'.split())))"
    code %= " ".join(str(int(number)) for number in USUAL)
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    here, there = os.pipe()
    if os.fork() == 0:
        names = [signal.getsignal(number).name for number in USUAL]
        os.write(there, " ".join(names).encode())
        os._exit(0)
    os.wait()
    names = set(found.stdout.split()) | set(os.read(here, 10_000).decode().split())
    labels[0] = names == {"SIG_DFL"}


@pytest.mark.slow
def test_programs_that_postprocess_starts_get_signals_as_usual(path):
    with make(path, postprocess=dispositions) as reader:
        assert reader.get_next_batch().labels[0] == 1


# --- what others have patched --------------------------------------------------------------------

PATCHES = {
    "a default timeout": "import socket; socket.setdefaulttimeout(30)",
    "no default timeout": "import socket; socket.setdefaulttimeout(0)",
    "no poll": "import select; del select.poll, select.epoll",
    "other sockets": "import socket; socket.socketpair = socket.socket = None",
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
    "eventlet's sockets": "import eventlet; eventlet.monkey_patch(thread=False)",
    "eventlet's threads": "import eventlet; eventlet.monkey_patch(all=False, thread=True)",
}


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("patch", PATCHES)
def test_what_others_have_patched(path, tmp_path, patch, when):
    code = PATCHES[patch]
    for package in ("gevent", "eventlet"):
        is_there = importlib.util.find_spec(package) is not None
        if package in code and not is_there:
            if os.environ.get("H5ASYNC_REQUIRE_EXTRAS") == "1":
                pytest.fail(f"H5ASYNC_REQUIRE_EXTRAS=1, but this test needs {package}")
            pytest.skip(f"needs {package}")
    first, second = (code, "") if when == "before" else ("", code)
    script = tmp_path / "program.py"
    script.write_text(
        f"import os, signal, sys, warnings; warnings.simplefilter('ignore')\n{first}\n"
        f"from h5async import AsyncReader\n{second}\n"
        "options = dict(hdf5_path=sys.argv[1], workers='process', batch_size=2, prefetch=4,\n"
        "               shuffle='full', device='cpu', num_threads=2)\n"
        "with AsyncReader(options) as reader:\n"
        "    for _ in range(2):\n"
        "        for batch in reader:\n"
        "            assert batch.labels.tolist() == batch.index.tolist()\n"
        "    os.kill(reader._engine.filler.supervisors[0].process._popen.pid, signal.SIGKILL)\n"
        "    for batch in reader:\n"
        "        assert batch.labels.tolist() == batch.index.tolist()\n"
        "    for _ in range(6): reader.fetch_data()\n"
        "reader = AsyncReader(options)\n"
        "reader.get_next_batch()\n"
        "print('fine')\n"
    )
    assert run(script, path).stdout == "fine\n"


# --- no interpreter ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, "macosx_app"])
def test_a_frozen_program_is_not_started_again(path, monkeypatch, frozen):
    found = starts(monkeypatch)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    with pytest.raises(ConfigError, match=r'frozen.*workers="thread"'):
        make(path)
    assert not found


@pytest.mark.parametrize("executable", ["", None])
def test_a_program_that_embeds_python(path, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(ConfigError, match=r"sys.executable is .*embeds.*sys.executable"):
        make(path)


@pytest.mark.slow
def test_a_program_that_is_its_own_interpreter_is_not_started_without_end(path, tmp_path):
    """As one that embeds Python, and that does not say so."""
    log = tmp_path / "log"
    script = tmp_path / "program"
    script.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        f"with open({str(log)!r}, 'a') as file: print('started', file=file)\n"
        f"sys.path[:] = {sys.path!r}\n"
        "sys.executable = __file__\n"
        "from h5async import AsyncReader\n"
        f"AsyncReader(hdf5_path={str(path)!r}, workers='process')\n"
    )
    script.chmod(0o755)
    done = subprocess.run([script], capture_output=True, text=True, timeout=DEADLOCK_SECONDS)
    assert done.returncode == 1
    assert "is another program" in done.stderr
    assert log.read_text().split() == ["started"] * 2


# --- the environment -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_path_of_modules_that_holds_anything(path, monkeypatch):
    odd = [pathlib.Path("/nowhere"), b"/bytes", None, 7, "/sürrögate/\udcff", 'it\'s "quoted"\n']
    monkeypatch.setattr(sys, "path", [*odd, *sys.path])
    with make(path) as reader:
        assert reader.get_next_batch().number == 0


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", ["-I", "-S", "-E", "-s", "-P", "-O", "-X utf8", "-W error"])
def test_options_of_the_interpreter(path, tmp_path, options):
    import site

    folders = [str(pathlib.Path(__file__).parents[2]), *site.getsitepackages()]
    code = (
        f"import sys; sys.path += {folders!r}\n"
        "from h5async import AsyncReader\n"
        f"reader = AsyncReader(hdf5_path={str(path)!r}, workers='process', batch_size=8)\n"
        "def double(data, labels): return data, labels * 2\n"
        "other = AsyncReader(reader.config, postprocess=double)\n"
        "print(reader.get_next_batch().number, other.get_next_batch().labels[1])\n"
    )
    for more in ({}, {"PYTHONSAFEPATH": "1"}, {"PYTHONHOME": "/nowhere"}):
        if "PYTHONHOME" in more and options not in ("-I", "-E"):
            continue
        done = subprocess.run(
            [sys.executable, *options.split(), "-c", code],
            env={**os.environ, **more},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLOCK_SECONDS,
        )
        assert (done.stdout, done.returncode) == ("0 2\n", 0), done.stderr


@pytest.mark.slow
def test_a_folder_that_is_removed_later(path, tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with make(path, prefetch=1) as reader:
        reader.get_next_batch()
        monkeypatch.chdir("/")
        folder.rmdir()
        os.kill(pid_of(reader), signal.SIGKILL)
        assert reader.get_next_batch().number == 1


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_threads_that_run_out_leave_nothing(path, monkeypatch, workers, count):
    started, inner = [], threading.Thread.start

    def start(thread):
        if thread.name.startswith("h5async"):
            if len(started) >= count:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        inner(thread)

    if workers == "process" and count == 2:
        pytest.skip("it has no more than two threads")
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ReadError, match=r"data.h5: .*no more threads .*num_threads.*ulimit -u"):
        AsyncReader(hdf5_path=path, device="cpu", num_threads=4, workers=workers)
    gc.collect()
    for thread in started:
        thread.join(DEADLOCK_SECONDS)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_threads_that_run_out_in_the_helper(path, monkeypatch):
    at_start(
        monkeypatch,
        "import threading, _thread; n = []; inner = threading._start_new_thread;"
        " threading._start_new_thread = lambda *a: inner(*a) if n.append(1) or len(n) < 2"
        ' else (_ for _ in ()).throw(RuntimeError("can\'t start new thread"))',
    )
    with pytest.raises(ReadError, match=r"data.h5: .*no more threads .*num_threads"):
        make(path, num_threads=4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("timeout", [1e6, 1e9])
def test_a_timeout_of_any_length(path, workers, timeout):
    with AsyncReader(
        hdf5_path=path, device="cpu", num_threads=1, workers=workers, timeout=timeout
    ) as reader:
        assert reader.get_next_batch().number == 0
        assert reader.get_next_batch(timeout=timeout).number == 1


@pytest.mark.slow
def test_more_slots_than_descriptors(path, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, resource, sys\n"
        "from h5async import AsyncReader\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "with AsyncReader(hdf5_path=sys.argv[1], workers='process', batch_size=2, device='cpu',\n"
        "                 prefetch=20_000, timeout=200) as reader:\n"
        "    for turn in range(5):\n"
        "        assert reader.get_next_batch().number == turn\n"
        "    assert len(os.listdir('/proc/self/fd')) < before + 20\n"
    )
    run(script, path)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1000, 1 << 20])
def test_a_limit_on_the_size_of_files(path, tmp_path, limit):
    script = tmp_path / "program.py"
    script.write_text(
        "import resource, sys\n"
        "from h5async import AsyncReader, H5AsyncError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)\n"
        "try:\n"
        "    AsyncReader(hdf5_path=sys.argv[1], workers='process', batch_size=50, device='cpu',\n"
        "                prefetch=1000)\n"
        "except H5AsyncError as error: print(error)\n"
    )
    assert "ulimit -f" in run(script, path, limit).stdout


@pytest.mark.slow
def test_what_postprocess_makes_over_the_limit(path, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import resource, sys, numpy as np\n"
        "from h5async import AsyncReader, H5AsyncError\n"
        "def large(data, labels):\n"
        "    return np.zeros((len(data), 1 << (21 if labels[0] == 8 else 6))), labels\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20,) * 2)\n"
        "with AsyncReader(hdf5_path=sys.argv[1], workers='process', batch_size=8, device='cpu',\n"
        "                 postprocess=large) as reader:\n"
        "    for turn in range(4):\n"
        "        try: print(reader.get_next_batch().number)\n"
        "        except H5AsyncError as error: print(error)\n"
    )
    lines = run(script, path).stdout.splitlines()
    assert "ulimit -f" in lines[1]
    assert lines[::2] + lines[3:] == ["0", "2", "3"]


@pytest.mark.slow
def test_few_descriptors(path, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, resource, sys\n"
        "from h5async import AsyncReader, H5AsyncError\n"
        "import h5async.cli\n"
        "count = len(os.listdir('/proc/self/fd')) + int(sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "try:\n"
        "    with AsyncReader(hdf5_path=sys.argv[1], workers='process', batch_size=8) as reader:\n"
        "        assert reader.get_next_batch().number == 0\n"
        "        print('fine')\n"
        "except H5AsyncError as error:\n"
        "    print(error)\n"
        "assert len(os.listdir('/proc/self/fd')) == before\n"
    )
    found = [run(script, path, count).stdout for count in (0, 1, 2, 3, 4, 5, 8, 20, 40)]
    assert found[-1] == "fine\n"
    assert "ulimit -n" in found[1]


def test_processes_that_run_out(path, monkeypatch):
    def fails(*arguments):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("subprocess._fork_exec", fails)
    with pytest.raises(ReadError, match=r"no helper process .*ulimit -u"):
        make(path)


# --- memory --------------------------------------------------------------------------------------


def usage():
    gone = {child for child in children() if not is_alive(child)}
    status = pathlib.Path("/proc/self/status").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "maps": len(pathlib.Path("/proc/self/maps").read_text().splitlines()),
        "threads": threading.active_count(),
        "zombies": len(gone),
        "kilobytes": int(status.split("RssAnon:")[1].split()[0]),
    }


def test_closed_readers_leave_nothing_behind_without_the_garbage_collector(path):
    def use():
        with make(path, shuffle="full", prefetch=8) as reader:
            batch = reader.get_next_batch()
        return reader, batch

    use()
    gc.collect()
    gc.disable()
    try:
        before, kept = usage(), []
        for _ in range(3):
            kept.append(use()[0])
        now = usage()
        assert now["descriptors"] <= before["descriptors"]
        assert now["threads"] == before["threads"]
        assert now["maps"] <= before["maps"] + 4
        assert "memfd:h5async" not in pathlib.Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


@pytest.mark.slow
def test_readers_in_turn_take_no_more(path):
    def use():
        with make(path, num_threads=1) as reader:
            reader.get_next_batch()

    for _ in range(3):
        use()
    gc.collect()
    gc.disable()
    try:
        before = usage()
        for _ in range(int(os.environ.get("H5ASYNC_READERS", "12"))):
            use()
        now = usage()
    finally:
        gc.enable()
    assert now.pop("kilobytes") < before.pop("kilobytes") + 2000
    assert now.pop("maps") < before.pop("maps") + 12
    assert now == before


def test_a_place_of_memory_that_was_given_back_is_not_found_again():
    """New memory may lie at the address of other memory that is gone."""
    memory = SharedMemory()
    for turn in range(50):
        array = memory.empty((300 - turn) << 12)
        array[:] = turn
        place = memory.spec(array)
        found = os.pread(memory.fd, 1, place.offset)
        assert found == bytes([turn])
        assert memory.spec(array[4096:]).offset == place.offset + 4096
        del array
    memory.close()


# --- the end -------------------------------------------------------------------------------------

ENDS = {
    "break": ("for batch in reader: break", 0),
    "exception": ("for batch in reader: raise KeyError", 1),
    "sys.exit": ("for batch in reader: sys.exit(3)", 3),
    "os._exit": ("for batch in reader: os._exit(4)", 4),
    "SIGKILL": ("for batch in reader: os.kill(os.getpid(), 9)", -9),
    "SIGTERM": ("for batch in reader: os.kill(os.getpid(), 15)", -15),
    "SIGHUP": (  # which `nohup` has ignored
        "import signal; signal.signal(1, signal.SIG_DFL)\n"
        "for batch in reader: os.kill(os.getpid(), 1)",
        -1,
    ),
    "daemon": (
        "def use():\n"
        "    while True: reader.get_next_batch(); begun.set()\n"
        "begun = threading.Event(); threading.Thread(target=use, daemon=True).start();"
        " begun.wait()",
        0,
    ),
    "in a cycle": ("reader.itself = reader; reader.get_next_batch(); reader.fetch_data()", 0),
    "nothing asked for": ("pass", 0),
    "many": (
        "more = [AsyncReader(reader.config) for _ in range(3)]\n"
        "for other in more: other.get_next_batch(); other.fetch_data()",
        0,
    ),
    "helper is dead": (
        "for batch in reader: break\n"
        "os.kill(reader._engine.filler.supervisors[0].process._popen.pid, 9)",
        0,
    ),
    "helper is stopped": (
        "for batch in reader: break\n"
        "os.kill(reader._engine.filler.supervisors[0].process._popen.pid, 19)",
        0,
    ),
    "forked": (
        "for batch in reader: break\n"
        "child = os.fork()\nif child: assert os.waitpid(child, 0)[1] == 0",
        0,
    ),
}


def check_end(path, folder, how, workers, num_helpers):
    """Run a script that ends in some way; no helper process is left."""
    code, status = ENDS[how]
    script = folder / "program.py"
    script.write_text(
        "import os, sys, threading\n"
        "from h5async import AsyncReader\n"
        "def printing(data, labels): print('a line that is not flushed')\n"
        f"reader = AsyncReader(hdf5_path=sys.argv[1], workers={workers!r}, batch_size=2,\n"
        "                     prefetch=4, postprocess=printing, device='cpu')\n"
        "pids = [one.process._popen.pid for one in reader._engine.filler.supervisors]\n"
        "print(*pids, file=open(sys.argv[2], 'w'))\n"
        f"{code}\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(path), str(folder / "pids")],
        capture_output=True,
        text=True,
        timeout=DEADLOCK_SECONDS,
    )
    assert done.returncode == status, done.stderr
    assert "Fatal" not in done.stderr
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == num_helpers
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", ENDS)
def test_scripts_end_as_they_should(path, tmp_path, how):
    for _ in range(2):
        check_end(path, tmp_path, how, "process", 1)


@pytest.mark.slow
def test_standard_output_that_nobody_reads(path, tmp_path):
    """The helper's own end does not wait for its last words to be read."""
    here, there = os.pipe()
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, threading\n"
        "from h5async import AsyncReader\n"
        "def much(data, labels): sys.stdout.write('x' * 100_000)\n"
        "sys.stdout.reconfigure(line_buffering=False)\n"
        "reader = AsyncReader(hdf5_path=sys.argv[1], workers='process', batch_size=2,\n"
        "                     prefetch=4, postprocess=much, device='cpu')\n"
        "print(reader._engine.filler.supervisors[0].process._popen.pid, file=sys.stderr)\n"
        "for _ in range(6): reader.fetch_data()\n"
        "reader.close()\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, str(script), str(path)],
            stdout=there,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLOCK_SECONDS,
        )
        assert done.returncode == 0
        helper = int(done.stderr.split()[0])
        wait_until(lambda: not is_alive(helper))
    finally:
        os.close(here)
        os.close(there)


@pytest.mark.slow
def test_standard_output_that_is_closed_does_not_end_in_the_interpreters_end(path, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys\n"
        "import h5async.process.child\n"
        "from h5async import AsyncReader\n"
        f"h5async.process.child._END_SECONDS = {DEADLOCK_SECONDS}\n"  # a slow one is not killed
        "def prints(data, labels):\n"
        "    sys.stdout = open(1, 'w', buffering=1000, closefd=False)\n"
        "    print('something')\n"
        "here, there = os.pipe()\n"
        "os.dup2(there, 1); os.close(there); os.close(here)\n"
        "statuses = []\n"
        "for _ in range(3):\n"
        "    with AsyncReader(hdf5_path=sys.argv[1], workers='process', batch_size=2,\n"
        "                     postprocess=prints, device='cpu') as reader:\n"
        "        reader.get_next_batch()\n"
        "        popen = reader._engine.filler.supervisors[0].process._popen\n"
        "    statuses.append(popen.returncode)\n"
        "print(statuses, file=sys.stderr)\n"
        "os._exit(0)\n"
    )
    assert run(script, path).stderr == "[0, 0, 0]\n"
