"""Starts a helper process, exchanges messages with it, and waits for its end.

The process is a new Python interpreter that runs `helper_main.main`. It inherits one end of a
channel and the descriptor of the shared memory, finds modules where this process does, and is in a
process group of its own.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from h5async.errors import ConfigError, ReadError
from h5async.io.shared import duplicate
from h5async.process.channel import channel_of, socket_pair
from h5async.process.helper_main import GROUP_SIGNALS, MARK
from h5async.process.messages import dump, load
from h5async.spelling import named
from h5async.system.interruptions import suppressing

_END_SECONDS = 2.0  # that a helper has to end after it was told to; then it is killed

_INTERPRETER = "set sys.executable to a Python interpreter that this user can run"
_POLICY = "a security policy (seccomp, SELinux, AppArmor) may forbid it"
_REMEDIES = {
    errno.EAGAIN: "raise the limit on processes (ulimit -u, or pids.max of the control group)",
    errno.ENOMEM: "leave more memory free, or raise the limit on it (ulimit -v)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "the whole system has too many open files: close some, or raise fs.file-max",
    errno.E2BIG: "make sys.path or the environment shorter: both are passed to the helper",
    errno.EACCES: _POLICY,
    errno.EPERM: _POLICY,
}
_EXECUTABLE_REMEDIES = {
    errno.EACCES: (
        "the file must be executable, on a file system that is not mounted noexec, below folders"
        f" that this user can enter; else {_INTERPRETER}"
    ),
    errno.ENOENT: _INTERPRETER,
    errno.ENOTDIR: _INTERPRETER,
    errno.ENOEXEC: _INTERPRETER,
}


class HelperDied(ReadError):
    """The helper process ended before it had answered."""


class HelperProcess:
    """A helper process, which is ended when the ``with`` block is left.

    `post` is called under a lock of the caller, `flush` by one thread, `receive` by one thread.

    Parameters
    ----------
    memory_fd
        Descriptor of the shared memory.
    what
        What it is to read, for messages.
    folder
        The folder that relative paths start from; None: the present one.

    Raises
    ------
    ReadError
        If it cannot be started.
    """

    def __init__(self, memory_fd: int, what: str, folder: str | None) -> None:
        self._what = what
        self._outbox: collections.deque[Any] = collections.deque()
        with contextlib.ExitStack() as stack:
            try:
                self._open(stack, memory_fd, folder)
            except OSError as error:
                raise ReadError(
                    f"{what}: no helper process could be started: {refusal(error, folder)}, or"
                    f" read with {named('workers', 'thread')}"
                ) from error
            self._resources = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack, memory_fd: int, folder: str | None) -> None:
        self._channel, theirs = socket_pair()
        stack.callback(self._channel.close)
        with contextlib.closing(theirs):
            inherited = channel_of(duplicate(theirs.fileno()))
        with contextlib.closing(inherited), _signals_blocked():
            code = _code(inherited.fileno(), memory_fd, os.getpid())
            self._popen = subprocess.Popen(
                [sys.executable, *_interpreter_options(), "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(inherited.fileno(), memory_fd),
                cwd=_folder_to_enter(folder),
                env={**os.environ, MARK: str(os.getpid())},
                # Signals to the reader's group would else reach the helper, too. (A session of its
                # own would do as well; but Linux divides the processors by sessions, and on a busy
                # machine a batch took 360 µs instead of 250.)
                process_group=0,
            )
        stack.callback(self._wait)
        stack.callback(self.hang_up)

    def post(self, message: Any) -> None:
        """Have the next `flush` send a message. Never blocks."""
        self._outbox.append(message)

    def flush(self) -> None:
        """Send what was posted; blocks until the helper has received it or has ended."""
        while self._outbox:
            self.send_bytes(dump(self._outbox.popleft()))

    def send_bytes(self, data: bytes) -> None:
        """Send a message that is pickled already; as `flush`."""
        with suppressing(OSError):  # `receive` will find that the helper has ended
            self._channel.send(data)

    def receive(self) -> Any:
        """Wait for the next message, and return it.

        Raises
        ------
        HelperDied
            If the helper has ended, so that there will be none.
        """
        try:
            return load(self._channel.receive())
        except EOFError:
            raise HelperDied(f"{self._what}: the helper process {self._wait()}") from None

    def hang_up(self) -> None:
        """End the conversation, for the helper and for a thread that is in `receive`."""
        self._channel.hang_up()

    def __enter__(self) -> HelperProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _wait(self) -> str:
        """Wait for the process to end; say how it ended."""
        try:
            status = self._popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            status = self._popen.wait()
        if status >= 0:
            return f"ended with status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = "unknown"
        hint = ", perhaps by the system because memory ran out" if name == "SIGKILL" else ""
        return f"was killed by signal {-status} ({name}{hint})"


def check_interpreter() -> None:
    """See that there is a Python interpreter to start.

    Raises
    ------
    ConfigError
        If there is none, or if what would be started is this program.
    """
    what = None
    if getattr(sys, "frozen", False):
        what = f"this program is frozen, so that {sys.executable} is the program itself"
    elif not sys.executable:
        what = f"sys.executable is {sys.executable!r}, as in a program that embeds Python"
    elif os.environ.get(MARK) == str(os.getppid()):
        what = f"{sys.executable} was started as one, and is another program"
    if what is not None:
        raise ConfigError(
            f"a helper process needs a Python interpreter to start, but {what}; set sys.executable"
            f" to a Python interpreter, or read with {named('workers', 'thread')}"
        )


def refusal(error: OSError, folder: str | None = None) -> str:
    """Say what the system refused, and what to do about it.

    Parameters
    ----------
    error
        Raised where a process was started, or where descriptors were made for it.
    folder
        That the process was to start in.
    """
    if error.filename is not None and error.filename == folder:
        remedy = "a new helper starts in the folder where the reader was made: make it accessible"
    elif error.filename is not None and error.filename == sys.executable:
        remedy = _EXECUTABLE_REMEDIES.get(error.errno or 0) or _REMEDIES.get(error.errno or 0, "")
    else:
        remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{error}; {remedy}" if remedy else str(error)


def _interpreter_options() -> list[str]:
    """Return the options with which a new interpreter finds the modules that this one does."""
    flags = {
        "-I": sys.flags.isolated,
        "-E": sys.flags.ignore_environment,
        "-s": sys.flags.no_user_site,
        "-S": sys.flags.no_site,
    }
    given = [option for option, is_given in flags.items() if is_given]
    return [*given, "-X", f"utf8={sys.flags.utf8_mode}"]  # file names are encoded alike in both


def _code(channel_fd: int, memory_fd: int, parent: int) -> str:
    """Return what a helper process runs; it finds modules where this process does."""
    path = [entry for entry in sys.path if isinstance(entry, str)]  # imports ignore all others
    return (
        f"import sys; sys.path[:] = {path!a}; from h5async.process.helper_main import main;"
        f" main({channel_fd}, {memory_fd}, {parent})"
    )


def _folder_to_enter(folder: str | None) -> str | None:
    """Return the folder that a helper must enter; None if it starts there, or if it is gone."""
    with suppressing(OSError):
        if os.getcwd() == folder:
            return None
    return folder if folder is not None and os.path.isdir(folder) else None


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Have a process that is started in here begin with the signals blocked that it will ignore.

    SIGINT (Ctrl-C) stays blocked there for good: it is the reader's to deal with.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *GROUP_SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
