"""Messages, as bytes, enter one end of a socket pair; they leave the other, whole and in order.

A channel waits in system calls of its own, whatever else the program has done to its sockets: it
knows no default timeout, and does not use what gevent or eventlet replace (`os.close` among that).
"""

from __future__ import annotations

import _socket
import struct
import threading

from h5async.system.interruptions import suppressing

_SIZE = struct.Struct("!Q")  # of the message that follows
_READ_NBYTES = 1 << 16  # of most messages, one call gets all
# The system would end a process that lets SIGPIPE have its way, when the other end is gone.
_SEND_FLAGS = getattr(_socket, "MSG_NOSIGNAL", 0)


class Channel:
    """One end of a socket pair. Any thread sends; one thread receives.

    Parameters
    ----------
    end
        Belongs to the channel from now on.
    """

    def __init__(self, end: _socket.socket) -> None:
        end.setblocking(True)  # `socket.setdefaulttimeout` says otherwise
        self._socket = end
        # Held by who sends, so that a descriptor's number is not used again in the middle of that.
        self._sending = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the descriptor's number."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send a message; blocks until the other end has room for it.

        Raises
        ------
        OSError
            If either end is closed.
        """
        with self._sending:
            self._socket.sendall(_SIZE.pack(len(data)) + data, _SEND_FLAGS)

    def receive(self) -> bytes:
        """Wait for a message, and return it.

        Raises
        ------
        EOFError
            If there will be none, or no more of it.
        """
        (size,) = _SIZE.unpack(self._take(_SIZE.size))
        return self._take(size)

    def hang_up(self) -> None:
        """Let both ends find the end of messages, also who waits for one. Never blocks."""
        with suppressing(OSError):  # there may be no other end any more
            self._socket.shutdown(_socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor; nobody may be in `receive`. Idempotent."""
        with self._sending:
            self._socket.close()

    def forget(self) -> None:
        """Close the descriptor in a forked child, where a lock of another thread is never free."""
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
    """Return both ends of a new channel.

    Raises
    ------
    OSError
        If the system has no descriptor left.
    """
    ours, theirs = _socket.socketpair()
    return Channel(ours), Channel(theirs)


def channel_of(fd: int) -> Channel:
    """Return the end that a descriptor is of; the channel owns it from now on."""
    return Channel(_socket.socket(fileno=fd))
