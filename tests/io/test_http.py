"""Ranges over HTTP by libcurl in the core, of a server with faults; the rest is the store's."""

from __future__ import annotations

import gc
import os
import random
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from httpserver import Rule, Server, serving

from h5async import ReadError
from h5async.core import binding as libraries
from h5async.core.binding import Core
from h5async.io.source import FileStamp, Source, WebAddress
from h5async.read import farsources
from h5async.read.farsources import HttpClient, http_client

DATA = np.random.default_rng(1).bytes(6 << 20)
SOME = [(0, 10), (5 << 20, 100_000), (len(DATA) - 1, 1), (1000, 3 << 20), (7, 1)]


class StoreSource(Source):
    """A source as stores have it, which remembers what it was asked for."""

    def __init__(self, server: Server, name: str = "a.bin", most_redirects: int = 0) -> None:
        self.server, self.name, self.most_redirects = server, name, most_redirects
        self.asked: list[tuple[int, int]] = []
        with urllib.request.urlopen(server.url(name)) as answer:
            self.tag = answer.headers["ETag"]
        server.log()  # from here on

    def stamp(self) -> FileStamp:
        return FileStamp.of_tag(self.tag, len(DATA))

    def web_address(self) -> WebAddress | None:
        headers = [f"If-Match: {self.tag}"]
        return WebAddress(self.server.url(self.name), headers, self.tag, self.most_redirects)

    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[bytes]:
        ranges = list(zip(offsets, lengths, strict=True))
        self.asked += ranges
        return expected(ranges)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "a.bin").write_bytes(DATA)
    with serving(folder) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.strike()
    running.heed_tags(True)
    running.delay(0)
    running.log()
    return running


@pytest.fixture
def client(core: Core) -> Iterator[HttpClient]:
    found = http_client(core)
    if found is None:
        assert os.environ.get("H5ASYNC_REQUIRE_EXTRAS") != "1"
        pytest.skip("needs libcurl")
    yield found
    found.close()


def got(source: Source, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    offsets, lengths = zip(*ranges, strict=True)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(source.get_ranges, offsets, lengths).result()
    return [bytes(memoryview(part)) for part in found]


def expected(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    return [DATA[offset : offset + nbytes] for offset, nbytes in ranges]


def test_ranges_come_without_the_store(server: Server, client: HttpClient) -> None:
    store = StoreSource(server)
    source = client.quicker(store, "a.bin")
    drawn = random.Random(1)
    for _ in range(20):
        ranges = [(drawn.randrange(len(DATA) - 9000), drawn.randrange(1, 9000)) for _ in range(80)]
        assert got(source, ranges) == expected(ranges)
    assert got(source, SOME) == expected(SOME)
    assert store.asked == []
    log = server.log()
    assert log.count == 20 * 80 + len(SOME)
    assert log.at_once <= 64
    assert server.connections() <= 64
    client.close()
    assert server.connections() == 0


def test_connections_serve_all_sources(server: Server, client: HttpClient) -> None:
    server.put("b.bin", DATA)
    sources = [client.quicker(StoreSource(server, name), name) for name in ("a.bin", "b.bin")]
    for source in sources * 5:
        assert got(source, SOME[:2]) == expected(SOME[:2])
    assert server.connections() <= 2


FAULTS = {
    "a status": Rule("status", 503),
    "no more access": Rule("status", 403),
    "a reset": Rule("reset"),
    "a reset in the body": Rule("reset_body"),
    "a connection that ends": Rule("truncated"),
    "all bytes": Rule("whole"),
    "another range": Rule("wrong_range"),
    "fewer bytes than told": Rule("short"),
    "a redirect": Rule("redirect", 307, "/b.bin"),
    "another version": Rule("other_version"),
    "no tag": Rule("no_etag"),
    "a weak tag": Rule("weak_etag"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(20)
def test_the_store_gets_what_fails(server: Server, client: HttpClient, fault: str) -> None:
    rule = FAULTS[fault]
    rule.after, rule.times = 1, 2
    server.strike(rule)
    store = StoreSource(server)
    source = client.quicker(store, "a.bin")
    assert got(source, SOME) == expected(SOME)
    assert server.struck() == [2]
    assert len(store.asked) == 2
    assert got(source, SOME) == expected(SOME)
    assert len(store.asked) == 2


def test_another_object_is_an_error(server: Server, client: HttpClient) -> None:
    server.heed_tags(False)
    server.strike(Rule("other_version", ranged=True, after=2, times=1))
    source = client.quicker(StoreSource(server), "s3://x/a.bin")
    with pytest.raises(ReadError, match=r"s3://x/a\.bin was replaced"):
        got(source, SOME)


def test_redirects(server: Server, client: HttpClient) -> None:
    """They are followed if the source says so, but not to other protocols, and not for ever."""
    server.put("b.bin", DATA)
    store = StoreSource(server, "a.bin", 5)
    server.strike(Rule("redirect", 302, "/a.bin", path="/b.bin"))
    store.name = "b.bin"
    assert got(client.quicker(store, "b.bin"), SOME) == expected(SOME)
    assert store.asked == []
    for bad in ("file:///etc/passwd", "/b.bin"):
        server.strike(Rule("redirect", 302, bad, path="/b.bin"))
        assert got(client.quicker(store, "b.bin"), SOME[:1]) == expected(SOME[:1])
        assert store.asked.pop() == SOME[0]


def test_a_source_that_always_fails_is_left_to_the_store(
    server: Server, client: HttpClient
) -> None:
    server.strike(Rule("status", 403, ranged=True))
    store = StoreSource(server)
    source = client.quicker(store, "a.bin")
    for _ in range(farsources._MOST_FAILURES + 3):
        assert got(source, SOME) == expected(SOME)
    assert server.struck() == [farsources._MOST_FAILURES * len(SOME)]


@pytest.mark.parametrize("fault", ["stall", "stall_body"])
def test_closing_ends_a_call(server: Server, client: HttpClient, fault: str) -> None:
    source = client.quicker(StoreSource(server), "a.bin")
    server.strike(Rule(fault))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(source.get_ranges([5], [10])))
    thread.start()
    while server.struck() == [0]:
        pass
    source.close()
    thread.join(timeout=60)
    assert [bytes(memoryview(part)) for part in found[0]] == expected([(5, 10)])  # by the store


@pytest.mark.slow
def test_memory_is_used_again_only_when_nobody_has_it(server: Server, client: HttpClient) -> None:
    source = client.quicker(StoreSource(server), "a.bin")
    drawn = random.Random(2)
    held: list[tuple[int, Any]] = []
    seen: list[int] = []

    def work() -> None:
        for _ in range(40):
            offsets = [drawn.randrange(len(DATA) - 300_000) for _ in range(6)]
            lengths = [drawn.choice((1, 4096, 300_000)) for _ in offsets]
            parts = source.get_ranges(offsets, lengths)
            arrays = [np.frombuffer(memoryview(part), np.uint8) for part in parts]
            seen.append(arrays[0].ctypes.data)
            held.extend(zip(offsets, arrays, strict=True))
            drawn.shuffle(held)
            del held[40:]
            for offset, array in held:
                assert array.tobytes() == DATA[offset : offset + array.size]

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    gc.collect()
    assert len(set(seen)) < len(seen)


def test_signals_are_heeded_in_the_main_thread(server: Server, client: HttpClient) -> None:
    store = StoreSource(server)
    parts = client.quicker(store, "a.bin").get_ranges([1], [2])
    assert bytes(memoryview(parts[0])) == DATA[1:3]
    assert store.asked == [(1, 2)]
    assert server.log().count == 0


def test_a_forked_child_has_connections_of_its_own(server: Server, client: HttpClient) -> None:
    source = client.quicker(StoreSource(server), "a.bin")
    assert got(source, SOME) == expected(SOME)
    child = os.fork()
    if child == 0:  # no cover
        is_right = False
        try:
            is_right = got(source, SOME) == expected(SOME)
            client.close()
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert got(source, SOME) == expected(SOME)
    assert server.log().count == 3 * len(SOME)


def test_without_libcurl(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    farsources._curl.cache_clear()
    monkeypatch.setattr(farsources, "find_curl", lambda _: None)
    assert http_client(core) is None
    farsources._curl.cache_clear()


def test_libcurl_is_that_of_pycurl(tmp_path: Path) -> None:
    pytest.importorskip("pycurl")
    assert "pycurl" in next(libraries._curl_paths())


@pytest.mark.slow
def test_numbers_of_options() -> None:
    """Those that pycurl exports are equal."""
    pycurl = pytest.importorskip("pycurl")
    source = (Path(libraries.__file__).parent / "src" / "http.c").read_text()
    text = source.partition("enum {")[2].partition("}")[0]
    found = dict(
        part.split("*/")[-1].strip().split(" = ") for part in text.replace("\n", " ").split(",")
        if " = " in part
    )  # fmt: skip
    checked = 0
    for name, value in found.items():
        known = getattr(pycurl, name.removeprefix("CURL_"), None)
        if name.startswith("CURL_") and isinstance(known, int):
            checked += 1
            assert int(value, 0) == known, name
    assert checked >= 14
