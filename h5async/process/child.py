"""Starts a helper process, exchanges messages with it, and waits for its end.

The process is a new Python interpreter that runs `helper_main.main`. It inherits one end of a
channel and the descriptor of the shared memory, uses the same module search path, and runs in its
own process group.
"""

from __future__ import annotations

import _socket
import collections
import contextlib
import errno
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from h5async.errors import ConfigError, ReadError
from h5async.io.shared import duplicate
from h5async.process.helper_main import GROUP_SIGNALS, MARK
from h5async.process.messages import Channel, dump
from h5async.spelling import named
from h5async.system.interruptions import suppressing

_END_SECONDS = 2.0  # for a helper to end when told to; then it is killed

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
    """The helper process ended before it answered."""


class HelperProcess:
    """A helper process that ends when the ``with`` block is left; ReadError if it cannot start.

    The caller holds a lock for `post`; one thread calls `flush`, and one thread calls `receive`.
    `what` names the files that the helper reads, for messages; relative paths start from `folder`;
    None: the current one.
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
        ours, theirs = _socket.socketpair()
        self._channel = Channel(ours)
        stack.callback(self._channel.close)
        with contextlib.closing(theirs):
            inherited = _socket.socket(fileno=duplicate(theirs.fileno()))
        with contextlib.closing(inherited), _signals_blocked():
            code = _code(inherited.fileno(), memory_fd, os.getpid())
            self._popen = subprocess.Popen(
                [sys.executable, *_interpreter_options(), "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(inherited.fileno(), memory_fd),
                cwd=_folder_to_enter(folder),
                env={**os.environ, MARK: str(os.getpid())},
                # Otherwise signals to the reader's group would reach the helper. (A new session
                # would also do, but Linux divides processors among sessions: on a busy machine, a
                # batch took 360 µs instead of 250.)
                process_group=0,
            )
        stack.callback(self._wait)
        stack.callback(self.hang_up)

    def post(self, message: Any) -> None:
        """Queue a message for the next `flush`. Never blocks."""
        self._outbox.append(message)

    def flush(self) -> None:
        """Send queued messages; blocks until the helper has received them or has ended."""
        while self._outbox:
            self.send_bytes(dump(self._outbox.popleft()))

    def send_bytes(self, data: bytes) -> None:
        """Send a message that is already pickled, like `flush`."""
        with suppressing(OSError):  # `receive` will find that the helper has ended
            self._channel.send(data)

    def receive(self) -> Any:
        """Wait for the next message and return it; HelperDied if the helper has ended."""
        try:
            return pickle.loads(self._channel.receive())
        except EOFError:
            raise HelperDied(f"{self._what}: the helper process {self._wait()}") from None

    def hang_up(self) -> None:
        """Close the channel, which ends the helper and a thread in `receive`."""
        self._channel.hang_up()

    def __enter__(self) -> HelperProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _wait(self) -> str:
        """Wait for the process to end; return how it ended, for messages."""
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
    """Raise ConfigError unless `sys.executable` is a Python interpreter that can be started."""
    what = None
    if getattr(sys, "frozen", False):
        what = f"this program is frozen, so that {sys.executable} is the program itself"
    elif not sys.executable:
        what = f"sys.executable is {sys.executable!r}, as in a program that embeds Python"
    elif os.environ.get(MARK) == str(os.getppid()):
        what = (
            f"{sys.executable} was started as one, and is another program, or imports a module that"
            ' makes readers (move that below `if __name__ == "__main__":`)'
        )
    if what is not None:
        raise ConfigError(
            f"a helper process needs a Python interpreter to start, but {what}; set sys.executable"
            f" to a Python interpreter, or read with {named('workers', 'thread')}"
        )


def refusal(error: OSError, folder: str | None = None) -> str:
    """Describe why the system refused to start a process in `folder`, and the remedy."""
    if error.filename is not None and error.filename == folder:
        remedy = "a new helper starts in the folder where the reader was made: make it accessible"
    elif error.filename is not None and error.filename == sys.executable:
        remedy = (_REMEDIES | _EXECUTABLE_REMEDIES).get(error.errno or 0, "")
    else:
        remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{error}; {remedy}" if remedy else str(error)


def _interpreter_options() -> list[str]:
    """Return options for a new interpreter to find the same modules as this one."""
    flags = {
        "-I": sys.flags.isolated,
        "-E": sys.flags.ignore_environment,
        "-s": sys.flags.no_user_site,
        "-S": sys.flags.no_site,
    }
    given = [option for option, is_given in flags.items() if is_given]
    return [*given, "-X", f"utf8={sys.flags.utf8_mode}"]  # same file name encoding


def _code(channel_fd: int, memory_fd: int, parent: int) -> str:
    """Return the code that a helper process runs."""
    path = [entry for entry in sys.path if isinstance(entry, str)]  # imports ignore other types
    return (
        f"import sys; sys.path[:] = {path!a}; from h5async.process.helper_main import main;"
        f" main({channel_fd}, {memory_fd}, {parent})"
    )


def _folder_to_enter(folder: str | None) -> str | None:
    """Return the folder that a helper must enter; None if it starts there, or it is gone."""
    with suppressing(OSError):
        if os.getcwd() == folder:
            return None
    return folder if folder is not None and os.path.isdir(folder) else None


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that processes started in the ``with`` block will ignore.

    SIGINT (Ctrl-C) stays blocked in them: the reader handles it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *GROUP_SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
