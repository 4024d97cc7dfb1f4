"""Sends messages, as bytes, between two processes: they arrive whole and in order.

A channel is a socket pair. It calls the system directly: Python's default socket timeouts do not
apply, and it uses no function that gevent or eventlet replace (as they do with `os.close`).
"""

from __future__ import annotations

import _socket
import struct
import threading

from h5async.system.interruptions import suppressing

_SIZE = struct.Struct("!Q")  # the size of the message that follows
_READ_NBYTES = 1 << 16  # one call receives the whole of most messages
# Without it, sending to a closed end is fatal in a program that does not ignore SIGPIPE.
_SEND_FLAGS = getattr(_socket, "MSG_NOSIGNAL", 0)


class Channel:
    """One end of a socket pair; it owns the socket. Any thread sends; one thread receives."""

    def __init__(self, end: _socket.socket) -> None:
        end.setblocking(True)  # `socket.setdefaulttimeout` may have set a timeout
        self._socket = end
        # Held while sending, so that the descriptor is not closed and its number reused meanwhile.
        self._sending = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the descriptor number."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send a message. Blocks until the other end has room; OSError if either end is closed."""
        with self._sending:
            self._socket.sendall(_SIZE.pack(len(data)) + data, _SEND_FLAGS)

    def receive(self) -> bytes:
        """Wait for a message and return it; EOFError if the other end closes, even within one."""
        (size,) = _SIZE.unpack(self._take(_SIZE.size))
        return self._take(size)

    def hang_up(self) -> None:
        """End messages in both directions, also for a thread in `receive`. Never blocks."""
        with suppressing(OSError):  # the other end may be closed already
            self._socket.shutdown(_socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor; no thread may be in `receive`. Idempotent."""
        with self._sending:
            self._socket.close()

    def forget(self) -> None:
        """Close the descriptor in a forked child, where another thread's lock stays locked."""
        self._socket.close()

    def _take(self, nbytes: int) -> bytes:
        while len(self._received) < nbytes:
            try:
                data = self._socket.recv(max(nbytes - len(self._received), _READ_NBYTES))
            except OSError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._received += data
        taken = bytes(self._received[:nbytes])
        del self._received[:nbytes]
        return taken


def socket_pair() -> tuple[Channel, Channel]:
    """Return both ends of a new channel; OSError if the system has no descriptor left."""
    ours, theirs = _socket.socketpair()
    return Channel(ours), Channel(theirs)


def channel_of(fd: int) -> Channel:
    """Return a channel that owns the socket with this descriptor."""
    return Channel(_socket.socket(fileno=fd))
