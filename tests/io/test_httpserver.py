"""The web server of the tests, asked by the plainest of clients: its faults are what they say."""

from __future__ import annotations

import http.client
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from conftest import require_extra
from httpserver import Rule, Server, serving

DATA = bytes(range(256)) * 400
OTHER = bytes(255 - byte for byte in DATA)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "bucket").mkdir()
    for name in ("a.bin", "b c.bin", "empty"):
        (folder / "bucket" / name).write_bytes(DATA if name != "empty" else b"")
    with serving(folder) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.put("bucket/a.bin", DATA)
    running.strike()
    running.delay(0)
    running.heed_tags(True)
    running.log()
    return running


class Answered(http.client.HTTPResponse):
    body: bytes


def ask(
    server: Server,
    name: str = "bucket/a.bin",
    method: str = "GET",
    timeout: float = 60,
    **headers: str,
) -> Answered:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    with closing(connection):
        path = server.url(name).partition(str(server.port))[2]
        connection.request(method, path, headers={k.replace("_", "-"): headers[k] for k in headers})
        response: Answered = connection.getresponse()  # type: ignore[assignment]
        with response:
            response.body = response.read()
        return response


def test_ranges(server: Server) -> None:
    whole = ask(server)
    assert (whole.status, whole.body) == (200, DATA)
    assert ask(server, "bucket/b c.bin").body == DATA
    assert ask(server, "bucket/empty").body == b""
    for text, start, stop in (("5-9", 5, 10), ("102390-", 102390, 102400), ("-7", 102393, 102400)):
        part = ask(server, Range=f"bytes={text}")
        assert (part.status, part.body) == (206, DATA[start:stop])
        assert part.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"
    past = ask(server, Range="bytes=102399-200000")
    assert (past.status, past.body) == (206, DATA[-1:])
    assert ask(server, Range="bytes=102400-102401").status == 416
    assert ask(server, "bucket/none").status == 404
    head = ask(server, method="HEAD")
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", "102400")


def test_a_tag_is_that_of_the_bytes(server: Server) -> None:
    tag = ask(server).headers["ETag"]
    assert ask(server, If_Match=tag).status == 200
    server.put("bucket/a.bin", OTHER)
    assert ask(server).headers["ETag"] != tag
    assert ask(server, If_Match=tag, Range="bytes=0-3").status == 412
    server.heed_tags(False)
    assert ask(server, If_Match=tag, Range="bytes=0-3").body == OTHER[:4]
    server.delete("bucket/a.bin")
    assert ask(server).status == 404


def test_the_log(server: Server) -> None:
    ask(server, Range="bytes=10-19")
    ask(server, method="HEAD")
    ask(server, "none")
    log = server.log()
    assert (log.count, log.asked[0][:6]) == (3, ("GET", "/bucket/a.bin", 10, 20, 206, 10))
    assert [asked.status for asked in log.asked] == [206, 200, 404]
    assert log.paths() == {"/bucket/a.bin", "/none"}
    assert server.log().count == 0


STATUS = {
    **{f"status {status}": (status, b"<Error>") for status in (403, 404, 429, 500, 503)},
    "redirect 301": (301, b"<Error>"),
    "redirect 307": (307, b"<Error>"),
    "whole": (200, DATA),
    "wrong_range": (206, DATA[101:201]),
    "short": (206, DATA[100:150]),
    "replaced": (412, b"<Error>"),
    "other_version": (412, b"<Error>"),
    "no_etag": (206, DATA[100:200]),
    "weak_etag": (206, DATA[100:200]),
}
ENDS: dict[str, type[Exception]] = {
    "reset": ConnectionResetError,
    "reset_body": ConnectionResetError,
    "truncated": http.client.IncompleteRead,
    "stall": TimeoutError,
    "stall_body": TimeoutError,
}


@pytest.mark.parametrize("name", [*STATUS, *ENDS])
@pytest.mark.sampled(20)
def test_faults(server: Server, name: str) -> None:
    """The second range is struck, and no other request."""
    tag = ask(server).headers["ETag"]
    fault, _, value = name.partition(" ")
    rule = Rule(fault, int(value) if value else None, "/else", ranged=True, after=1, times=1)
    server.strike(rule)
    headers = {"Range": "bytes=100-199", "If_Match": tag}
    assert ask(server, **headers).body == DATA[100:200]
    if name in ENDS:
        with pytest.raises(ENDS[name]):
            ask(server, timeout=0.3 if "stall" in name else 60, **headers)
    else:
        status, body = STATUS[name]
        struck = ask(server, **headers)
        assert struck.status == status
        assert body in struck.body
        assert struck.headers["Location"] == ("/else" if fault == "redirect" else None)
        expected = {"no_etag": None, "weak_etag": f"W/{tag}"}
        if fault in expected:
            assert struck.headers["ETag"] == expected[fault]
    assert server.struck() == [1]
    after = ask(server, **headers)
    assert after.status == (412 if name == "replaced" else 206)
    assert [asked.fault for asked in server.log().asked if asked.fault] == [fault]


def test_faults_are_drawn_by_the_seed(server: Server) -> None:
    drawn = []
    for seed in (1, 1, 2):
        server.strike(Rule("status", 503, probability=0.3, seed=seed))
        drawn.append([ask(server).status for _ in range(40)])
    assert drawn[0] == drawn[1] != drawn[2]
    assert 3 < drawn[0].count(503) < 25


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "http"])
def test_clients_of_object_stores(server: Server, scheme: str) -> None:
    obstore = require_extra("obstore")
    server.put("bucket/below/c d.bin", b"12")
    options = server.client_options(scheme)
    address = server.url("bucket") if scheme == "http" else f"{scheme}://bucket"
    store = obstore.store.from_url(address, **options)
    if scheme != "http":
        found = obstore.list_with_delimiter(store)
        names = {"a.bin", "b c.bin", "empty"}
        assert {about["path"]: about["size"] for about in found["objects"]} == {
            name: len(DATA) * (name != "empty") for name in names
        }
        assert found["common_prefixes"] == ["below"]
        assert [about["path"] for about in obstore.list(store, "below").collect()] == [
            "below/c d.bin"
        ]
    assert bytes(obstore.get_range(store, "below/c d.bin", start=1, length=1)) == b"2"
    tag = obstore.head(store, "a.bin")["e_tag"]
    assert tag == ask(server).headers["ETag"]
    server.put("bucket/a.bin", OTHER)
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.get(store, "a.bin", options={"if_match": tag})
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "none")


def test_it_ends_with_its_block(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert ask(server, "none").status == 404
    with pytest.raises(ConnectionRefusedError):
        ask(server, "none")
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
