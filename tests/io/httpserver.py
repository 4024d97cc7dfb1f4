"""A web server of ours for tests and benches, with ranges, latency, a log, and faults by rule.

``with serving(folder) as server`` serves a folder on the loopback, from a process of its own, so
that it does not share the GIL with what is tested. `server.url("a.h5")` is for clients; the other
methods control it: what it serves, how late, with which faults, and what it was asked. A file below
``bucket/`` is also an object of S3, GCS and Azure, whose clients get `server.client_options()`.

``python tests/io/httpserver.py FOLDER --port 8000 --latency 0.02`` serves by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import email.utils
import fnmatch
import hashlib
import http.client
import json
import mmap
import os
import random
import socket
import struct
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote

CONTROL = "/-/"  # below it are requests to the server itself, which have no latency and no log

# --- rules of faults -----------------------------------------------------------------------------


@dataclasses.dataclass
class Rule:
    """A fault, and which requests it strikes. The first rule that strikes a request has it.

    Parameters
    ----------
    fault
        ``status``: `value` is the status. ``redirect``: `value` is the status; to `target`.
        ``reset``: before the head; ``reset_body``: in the body. ``stall``: no answer until the
        client goes away, or for `value` seconds; ``stall_body``: in the body. ``truncated``: closed
        in the body. ``whole``: 200 and all bytes for a range. ``wrong_range``: bytes and head of
        another range. ``short``: a body that is shorter than its Content-Range says. ``replaced``:
        the object has other bytes and another ETag from now on; ``other_version``: in this
        answer only. ``no_etag``, ``weak_etag``: in this answer.
    path, method
        A pattern of the shell; of requests to it, and by this method.
    ranged
        Only requests of a range.
    after, times
        Spare the first requests that match, and strike so many; None: all that follow.
    probability, seed
        Of those, strike some, drawn by the seed.
    """

    fault: str
    value: float | None = None
    target: str = ""
    path: str = "*"
    method: str = "*"
    ranged: bool = False
    after: int = 0
    times: int | None = None
    probability: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.matched = self.struck = 0
        self.chance = random.Random(self.seed)

    def strikes(self, method: str, path: str, ranged: bool) -> bool:
        if not fnmatch.fnmatchcase(path, self.path) or not fnmatch.fnmatchcase(method, self.method):
            return False
        if self.ranged and not ranged:
            return False
        self.matched += 1
        is_due = self.matched > self.after and (self.times is None or self.struck < self.times)
        if not is_due or self.chance.random() >= self.probability:
            return False
        self.struck += 1
        return True


class Asked(NamedTuple):
    """A request of the log: the range it asked for, what was answered, and the fault, if any."""

    method: str
    path: str
    start: int
    stop: int
    status: int
    nbytes: int
    fault: str


@dataclasses.dataclass
class Log:
    """What the server was asked since the log was last read.

    `at_once` is the largest number of requests that waited at the same time, which latency shows.
    """

    asked: list[Asked]
    count: int
    nbytes: int
    at_once: int

    def paths(self) -> set[str]:
        return {asked.path for asked in self.asked}


# --- what is served ------------------------------------------------------------------------------


class Held(NamedTuple):
    """An object: its bytes, its ETag, and when it was changed."""

    data: Any
    etag: str
    modified: float

    def other(self) -> Held:
        """Return what may have been written in its place: as long, and every byte is another."""
        data = bytes(self.data).translate(bytes(255 - i for i in range(256)))
        return Held(data, f'"{hashlib.sha256(data[:4096]).hexdigest()[:20]}"', self.modified + 60)


class Holdings:
    """Objects by their paths: of a folder, and those that were put, which come first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.put: dict[str, Held | None] = {}
        self._mapped: dict[str, tuple[tuple[int, int, int], Held]] = {}

    def find(self, path: str) -> Held | None:
        if path in self.put:
            return self.put[path]
        file = self.folder / path.lstrip("/")
        try:
            status = os.stat(file)
        except OSError:
            return None
        if not file.is_file():
            return None
        state = (status.st_mtime_ns, status.st_size, status.st_ino)
        known = self._mapped.get(path)
        if known is None or known[0] != state:
            with file.open("rb") as opened:
                empty = not status.st_size
                data = b"" if empty else mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            etag = f'"{state[0]:x}-{state[1]:x}-{state[2]:x}"'
            known = (state, Held(memoryview(data), etag, status.st_mtime))
            self._mapped[path] = known
        return known[1]

    def names(self, prefix: str) -> list[str]:
        files = (file for file in self.folder.rglob("*") if file.is_file())
        found = {f"/{file.relative_to(self.folder).as_posix()}" for file in files}
        found |= set(self.put)
        return sorted(name for name in found if name.startswith(prefix) and self.find(name))


# --- requests ------------------------------------------------------------------------------------

REASONS = {
    301: "PermanentRedirect",
    307: "TemporaryRedirect",
    400: "InvalidRequest",
    403: "AccessDenied",
    404: "NoSuchKey",
    412: "PreconditionFailed",
    416: "InvalidRange",
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
}


class Request:
    """A request that was read: its method, its path without escapes, its query, its headers."""

    def __init__(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.target, _version = first.split(" ", 2)
        path, _, self.query = self.target.partition("?")
        self.path = unquote(path)
        self.headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        self.body_nbytes = int(self.headers.get("content-length", "0"))

    def bounds(self, nbytes: int) -> tuple[int, int] | None:
        """Return the bytes of the range; all without one, and None if there are none."""
        text = self.headers.get("range", "")
        if not text.startswith("bytes=") or "," in text:
            return 0, nbytes
        first, _, last = text[6:].partition("-")
        start = int(first) if first else max(0, nbytes - int(last))
        stop = min(nbytes, int(last) + 1) if first and last else nbytes
        return (start, stop) if start < stop else None


class Answer(NamedTuple):
    """What is sent. `cut` bytes of the body are, then `end` happens: "", reset, close or stall."""

    status: int
    headers: dict[str, str]
    body: Any = b""
    start: int = 0
    cut: int | None = None
    end: str = ""

    def head(self) -> bytes:
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        reason = http.client.responses.get(self.status, "")
        return f"HTTP/1.1 {self.status} {reason}\r\n{lines}\r\n".encode("latin-1")


def failure(status: int, **headers: str) -> Answer:
    code = REASONS.get(status, "Error")
    text = f"<Message>{code} of the tests</Message>"
    body = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code>{text}</Error>'.encode()
    about = {"Content-Type": "application/xml", "Content-Length": str(len(body))}
    return Answer(status, {**about, **headers}, body)


def answer(request: Request, held: Held | None, rule: Rule | None, heeds_tags: bool) -> Answer:
    """Return what is answered to a GET or HEAD of an object."""
    fault = rule.fault if rule is not None else ""
    if rule is not None and fault == "status":
        return failure(int(rule.value or 500))
    if rule is not None and fault == "redirect":
        return failure(int(rule.value or 307), Location=rule.target)
    if held is None:
        return failure(404)
    if fault == "other_version":
        held = held.other()
    match = request.headers.get("if-match", "*")
    since = email.utils.parsedate_to_datetime(
        request.headers.get("if-unmodified-since", "Fri, 31 Dec 9999 23:59:59 GMT")
    ).timestamp()
    if heeds_tags and (match not in ("*", held.etag) or int(held.modified) > since):
        return failure(412)
    bounds = request.bounds(len(held.data))
    if bounds is None and "range" in request.headers:
        return failure(416, **{"Content-Range": f"bytes */{len(held.data)}"})
    start, stop = bounds or (0, 0)
    if fault == "wrong_range":
        start, stop = (start + 1, stop + 1) if stop < len(held.data) else (start, stop - 1)
    status = 206 if "range" in request.headers and fault != "whole" else 200
    if fault == "whole":
        start, stop = 0, len(held.data)
    headers = {
        "ETag": f"W/{held.etag}" if fault == "weak_etag" else held.etag,
        "Last-Modified": email.utils.formatdate(held.modified, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    if fault == "no_etag":
        del headers["ETag"]
    if status == 206:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(held.data)}"
    if fault == "short":
        stop -= (stop - start + 1) // 2
    headers["Content-Length"] = str(stop - start)
    end = {"reset_body": "reset", "truncated": "close", "stall_body": "stall"}.get(fault, "")
    cut = (stop - start) // 2 if end else None
    return Answer(status, headers, held.data[start:stop], start, cut, end)


def listing(bucket: str, query: dict[str, list[str]], holdings: Holdings) -> Answer:
    """Return the answer of S3 and GCS, or of Azure, to a question for the objects of a bucket."""
    is_azure = "comp" in query
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    root = ET.Element("EnumerationResults" if is_azure else "ListBucketResult")
    parent = ET.SubElement(root, "Blobs") if is_azure else root
    folders = set()
    for name in holdings.names(f"/{bucket}/{prefix}"):
        key, held = name[len(bucket) + 2 :], holdings.find(name)
        folder, is_below, _ = key[len(prefix) :].partition(delimiter or "\0")
        if is_below or held is None:
            folders.add(prefix + folder + delimiter)
            continue
        about = ET.SubElement(parent, "Blob" if is_azure else "Contents")
        ET.SubElement(about, "Name" if is_azure else "Key").text = key
        about = ET.SubElement(about, "Properties") if is_azure else about
        ET.SubElement(about, "Content-Length" if is_azure else "Size").text = str(len(held.data))
        ET.SubElement(about, "Etag" if is_azure else "ETag").text = held.etag
        if is_azure:
            date = email.utils.formatdate(held.modified, usegmt=True)
            ET.SubElement(about, "Last-Modified").text = date
            ET.SubElement(about, "Content-Type").text = "application/octet-stream"
        else:
            date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(held.modified))
            ET.SubElement(about, "LastModified").text = date
    for folder in sorted(folders):
        about = ET.SubElement(parent, "BlobPrefix" if is_azure else "CommonPrefixes")
        ET.SubElement(about, "Name" if is_azure else "Prefix").text = folder
    if not is_azure:
        ET.SubElement(root, "IsTruncated").text = "false"
    text = ET.tostring(root, xml_declaration=True, encoding="utf-8")
    return Answer(200, {"Content-Type": "application/xml", "Content-Length": str(len(text))}, text)


# --- the server ----------------------------------------------------------------------------------


class Service:
    """What all connections share."""

    def __init__(self, folder: Path, latency: float) -> None:
        self.holdings = Holdings(folder)
        self.latency = latency
        self.heeds_tags = True
        self.rules: list[Rule] = []
        self.connections: set[Connection] = set()
        self.forget()

    def forget(self) -> None:
        self.asked: deque[Asked] = deque(maxlen=100_000)
        self.count = self.nbytes = self.waiting = self.at_once = 0

    def control(self, request: Request, body: bytes) -> Answer:
        """Do what a test wants, and return what it wants to know."""
        what, found = request.path[len(CONTROL) :], {}
        if what == "log":
            found = {"asked": list(self.asked), "count": self.count, "nbytes": self.nbytes}
            found["at_once"] = self.at_once
            self.forget()
        elif what == "rules":
            self.rules = [Rule(**rule) for rule in json.loads(body)]
        elif what == "struck":
            found = {"struck": [rule.struck for rule in self.rules]}
        elif what == "heeding":
            self.heeds_tags = json.loads(body)
        elif what == "latency":
            self.latency = json.loads(body)
        elif what == "connections":
            found = {"connections": len(self.connections) - 1}
        text = json.dumps(found).encode()
        return Answer(200, {"Content-Length": str(len(text))}, text)

    def store(self, request: Request, body: bytes) -> Answer:
        """Put or delete an object."""
        if request.method == "DELETE":
            self.holdings.put[request.path] = None
            return Answer(204, {"Content-Length": "0"})
        etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        self.holdings.put[request.path] = Held(body, etag, time.time())
        return Answer(200, {"Content-Length": "0", "ETag": etag})

    def answer(self, request: Request, body: bytes) -> tuple[Answer, Rule | None]:
        """Return what is answered, and the rule of the fault that it has."""
        if request.method in ("PUT", "DELETE"):
            return self.store(request, body), None
        ranged = "range" in request.headers
        strikes = (r for r in self.rules if r.strikes(request.method, request.path, ranged))
        rule = next(strikes, None)
        bucket, _, key = request.path.strip("/").partition("/")
        is_list = not key and ("list-type=2" in request.query or "comp=list" in request.query)
        if is_list and (rule is None or rule.fault != "status"):
            return listing(bucket, parse_qs(request.query), self.holdings), None
        held = self.holdings.find(request.path)
        if held is not None and rule is not None and rule.fault == "replaced":
            held = self.holdings.put[request.path] = held.other()
        return answer(request, held, rule, self.heeds_tags), rule

    def note(self, request: Request, found: Answer, rule: Rule | None) -> None:
        nbytes = 0 if request.method == "HEAD" else len(found.body)
        fault = rule.fault if rule is not None else ""
        stop = found.start + len(found.body) if found.status in (200, 206) else 0
        asked = (request.method, request.path, found.start, stop, found.status, nbytes, fault)
        self.asked.append(Asked(*asked))
        self.count += 1
        self.nbytes += nbytes


class Connection(asyncio.Protocol):
    """A connection of a client: one request after the other."""

    transport: asyncio.Transport

    def __init__(self, service: Service) -> None:
        self.service = service
        self.unread = bytearray()
        self.is_busy = False
        self.is_counted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.service.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.service.connections.discard(self)
        self.is_busy = True
        self.is_waiting(False)

    def is_waiting(self, waits: bool) -> None:
        """Count the request among those that wait, or not any more."""
        if waits != self.is_counted:
            self.is_counted = waits
            self.service.waiting = max(0, self.service.waiting + (1 if waits else -1))
            self.service.at_once = max(self.service.at_once, self.service.waiting)

    def data_received(self, data: bytes) -> None:
        self.unread += data
        self.go_on()

    def go_on(self) -> None:
        """Take the next request up, if all of it is there."""
        end = self.unread.find(b"\r\n\r\n")
        if self.is_busy or end < 0:
            return
        request = Request(bytes(self.unread[:end]))
        stop = end + 4 + request.body_nbytes
        if len(self.unread) < stop:
            return
        body = bytes(self.unread[end + 4 : stop])
        del self.unread[:stop]
        self.is_busy = True
        if request.path.startswith(CONTROL):
            self.send(request, self.service.control(request, body))
            return
        self.is_waiting(True)
        found, rule = self.service.answer(request, body)
        self.service.note(request, found, rule)
        fault, latency = rule.fault if rule is not None else "", self.service.latency
        if rule is not None and fault == "stall":
            if rule.value is None:
                return
            latency = rule.value
        reply = self.reset if fault == "reset" else partial(self.send, request, found)
        if latency:
            asyncio.get_running_loop().call_later(latency, reply)
        else:
            reply()

    def send(self, request: Request, found: Answer) -> None:
        if self.transport.is_closing():
            return
        self.is_waiting(False)
        body = b"" if request.method == "HEAD" else memoryview(found.body)[: found.cut]
        if len(body) < 4096:
            self.transport.write(found.head() + bytes(body))
        else:
            self.transport.write(found.head())
            self.transport.write(body)
        if found.end and request.method != "HEAD":
            if found.end != "stall":
                # What is sent must be on its way before a reset, which takes back what is not.
                end = self.reset if found.end == "reset" else self.transport.close
                asyncio.get_running_loop().call_later(0.005, end)
            return
        self.is_busy = False
        if request.headers.get("connection", "").lower() == "close":
            self.transport.close()
        elif self.unread:
            self.go_on()

    def reset(self) -> None:
        if not self.transport.is_closing():
            linger = struct.pack("ii", 1, 0)
            connected = self.transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.transport.abort()


async def serve(folder: Path, port: int, latency: float, begun: Callable[[int], None]) -> None:
    """Serve until the standard input ends, so that no server outlives who started it."""
    loop, service = asyncio.get_running_loop(), Service(folder, latency)
    server = await loop.create_server(lambda: Connection(service), "127.0.0.1", port, backlog=1024)
    begun(server.sockets[0].getsockname()[1])
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), lambda: os.read(sys.stdin.fileno(), 4096) or ended.set())
    await ended.wait()


# --- control -------------------------------------------------------------------------------------


class Server:
    """A running server, for those who control it."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.pid = pid

    def url(self, name: str = "") -> str:
        """Return the address of an object."""
        return f"http://127.0.0.1:{self.port}/{quote(name)}"

    def client_options(self, scheme: str = "http") -> dict[str, Any]:
        """Return options of obstore's client of a scheme, for ``s3://bucket/...`` in bucket/."""
        base, plain = self.url().rstrip("/"), {"client_options": {"allow_http": True}}
        if scheme == "s3":
            endpoint = {"endpoint": base, "virtual_hosted_style_request": False}
            return {**endpoint, "region": "us-east-1", "skip_signature": True, **plain}
        if scheme == "gs":
            return {"base_url": base, "skip_signature": True, **plain}
        if scheme == "az":
            return {"account_name": "a", "endpoint": base, "skip_signature": True, **plain}
        return plain

    def strike(self, *rules: Rule) -> None:
        """Have these faults, and no others, from now on."""
        self._ask("rules", [dataclasses.asdict(rule) for rule in rules])

    def struck(self) -> list[int]:
        """Return how often each of the rules struck."""
        found: list[int] = self._ask("struck")["struck"]
        return found

    def delay(self, seconds: float) -> None:
        """Answer every request so much later."""
        self._ask("latency", seconds)

    def heed_tags(self, does: bool) -> None:
        """Heed If-Match and If-Unmodified-Since, as many plain servers do not, or ignore them."""
        self._ask("heeding", does)

    def log(self) -> Log:
        """Return what was asked since the last call."""
        found = self._ask("log")
        return Log(**{**found, "asked": [Asked(*asked) for asked in found["asked"]]})

    def connections(self) -> int:
        """Return the number of open connections."""
        found: int = self._ask("connections")["connections"]
        return found

    def put(self, name: str, data: bytes) -> None:
        """Serve these bytes under a name from now on, in place of a file, too."""
        self._send("PUT", f"/{quote(name)}", data)

    def delete(self, name: str) -> None:
        """Serve nothing under a name any more."""
        self._send("DELETE", f"/{quote(name)}")

    def _ask(self, what: str, body: Any = None) -> Any:
        return json.loads(self._send("POST", CONTROL + what, json.dumps(body).encode()))

    def _send(self, method: str, path: str, body: bytes = b"") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body)
            with connection.getresponse() as response:
                return response.read()


@contextlib.contextmanager
def serving(folder: Path | str, *, latency: float = 0.0, port: int = 0) -> Iterator[Server]:
    """Serve a folder from a process of its own, which ends with this block."""
    command = [sys.executable, "-I", __file__, str(folder)]
    command += ["--port", str(port), "--latency", str(latency)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, close_fds=True) as process:
        assert process.stdout is not None
        try:
            yield Server(int(process.stdout.readline()), process.pid)
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds a request")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            serve(options.folder, options.port, options.latency, partial(print, flush=True))
        )


if __name__ == "__main__":
    main()
