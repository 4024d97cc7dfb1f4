"""Sources in object stores and on the web: their names, their identity, their failures."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import assert_epoch_is, require_extra, truth
from httpserver import Rule, Server, serving
from typer.testing import CliRunner

from h5async import AsyncReader, ConfigError, H5AsyncError, ReaderConfig, ReadError, cli
from h5async.config.files import SourceName
from h5async.io.objectstores import Place, RemoteSource, _matches
from h5async.io.obstoreclient import failure
from h5async.io.stores import open_hdf5, store_of

SCHEMES = ["http", "s3", "gs", "az"]
CONTENT = np.random.default_rng(1).integers(0, 256, 300_000, "u1").tobytes()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    require_extra("obstore")
    folder = tmp_path_factory.mktemp("served")
    with serving(folder) as server:
        path = folder / "a.h5"
        with h5py.File(path, "w") as file:
            rows = np.arange(2000).reshape(100, 20)
            file.create_dataset("data", data=rows, chunks=(7, 20), compression="gzip")
            file["labels"] = np.arange(100)
        for name in ("a.h5", "train/b.h5", "train/c d.h5", "train/deep/e.h5", "train/notes.txt"):
            server.put(f"bucket/{name}", path.read_bytes())
        server.put("bucket/bytes", CONTENT)
        server.put("bucket/empty", b"")
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.strike()
    running.heed_tags(True)
    running.log()
    return running


def name_of(server: Server, key: str, scheme: str = "http", **more: Any) -> SourceName:
    url = server.url(f"bucket/{key}") if scheme == "http" else f"{scheme}://bucket/{key}"
    return SourceName(url, {**server.client_options(scheme), **more})


def opened(server: Server, key: str, scheme: str = "http") -> RemoteSource:
    name = name_of(server, key, scheme)
    source = store_of(name).open(name)
    assert isinstance(source, RemoteSource)
    return source


def options_of(server: Server, scheme: str = "s3") -> dict[str, Any]:
    return {"storage_options": server.client_options(scheme), "device": "cpu"}


# --- names ---------------------------------------------------------------------------------------


def test_a_name_keeps_its_options_and_does_not_show_them():
    name = SourceName("s3://bucket/a.h5", {"aws_secret_access_key": "hidden"})
    for one in (name, str(name), pickle.loads(pickle.dumps(name))):
        assert one.options == {"aws_secret_access_key": "hidden"}
    assert name == "s3://bucket/a.h5"
    assert {name: 1}["s3://bucket/a.h5"] == 1
    assert "hidden" not in f"{name} {name!r} {json.dumps([name])}"


def test_no_text_shows_the_options(server: Server, tmp_path: Path):
    hidden = {"aws_access_key_id": "hidden", "aws_secret_access_key": "hidden"}
    options = {**server.client_options("s3"), **hidden}
    config = ReaderConfig(hdf5_path="s3://bucket/a.h5", storage_options=options)
    assert "hidden" not in f"{config!r}{config}{config.model_dump()}{config.model_dump_json()}"
    assert pickle.loads(pickle.dumps(config)).files[0].options == options
    with AsyncReader(config, device="cpu") as reader:
        batch = reader.get_next_batch()
        texts = [reader, reader.config, reader.layouts, reader.state_dict(), batch, reader.stats()]
        assert "hidden" not in repr(texts)
    misplaced = {**options, "client_options": {"timeout": "hidden"}}
    for wrong in ({**options, "aws_nonsense": "1"}, misplaced, ["hidden"], {1: "hidden"}):
        with pytest.raises(ConfigError) as caught:
            AsyncReader(hdf5_path="s3://bucket/a.h5", storage_options=wrong)
        assert "hidden" not in str(caught.value)
        assert "storage_options" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "root", "key"),
    [
        ("s3://bucket/some/a.h5", "s3://bucket", "some/a.h5"),
        ("s3://bucket/a%20b?c#d.h5", "s3://bucket", "a%20b?c#d.h5"),
        ("abfs://box@me.dfs.core.windows.net/a.h5", "abfs://box@me.dfs.core.windows.net", "a.h5"),
        ("https://host:80/x/a-1_2~.h5", "https://host:80", "x/a-1_2~.h5"),
        ("https://host/a%20b.h5", "https://host/a%20b.h5", ""),
        ("https://host/a.h5?key=[1]*&b", "https://host/a.h5?key=[1]*&b", ""),
        ("https://host/x/../a.h5", "https://host/x/../a.h5", ""),
        ("https://host/x//a.h5", "https://host/x//a.h5", ""),
    ],
)
def test_where_a_name_leads(name: str, root: str, key: str):
    assert Place.of(name) == (root, key, {})


@pytest.mark.parametrize(
    ("key", "pattern", "expected"),
    [
        ("a.h5", "*.h5", True),
        ("x/a.h5", "*.h5", False),
        ("x/a.h5", "*/?.h5", True),
        ("x/a.h5", "**/*.h5", True),
        ("a.h5", "**/*.h5", True),
        ("x/y/a.h5", "x/**/a.h5", True),
        ("x/y/a.h5", "x/**", True),
        (".a.h5", "*.h5", False),
        (".a.h5", ".*.h5", True),
        ("a1.h5", "a[0-9].h5", True),
    ],
)
def test_what_a_glob_matches(key: str, pattern: str, expected: bool):
    assert _matches(key.split("/"), pattern.split("/")) is expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("train/*.h5", ["train/b.h5", "train/c d.h5"]),
        ("train/**/*.h5", ["train/b.h5", "train/c d.h5", "train/deep/e.h5"]),
        ("*.h5", ["a.h5"]),
        ("[at]*/?.h5", ["train/b.h5"]),
    ],
)
@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_globs(server: Server, scheme: str, pattern: str, expected: Sequence[str]):
    options = server.client_options(scheme)
    config = ReaderConfig(hdf5_path=f"{scheme}://bucket/{pattern}", storage_options=options)
    assert config.files == [f"{scheme}://bucket/{key}" for key in expected]
    assert config.files[0].options == options


def test_globs_that_find_nothing(server: Server):
    with pytest.raises(ReadError, match=r"no file matches s3://bucket/none\*\.h5"):
        AsyncReader(hdf5_path="s3://bucket/none*.h5", **options_of(server))
    with pytest.raises(ConfigError, match="web servers have no lists"):
        AsyncReader(hdf5_path=server.url("bucket/").replace("%2A", "*") + "*.h5")


# --- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes(server: Server, scheme: str):
    source = opened(server, "bytes", scheme)
    assert source.stamp().nbytes == len(CONTENT)
    offsets, lengths = [0, 5, 299_000, 70_000], [65_536, 0, 1000, 9]
    for _ in range(2):
        found = source.get_ranges(offsets, lengths)
        expected = [CONTENT[at : at + n] for at, n in zip(offsets, lengths, strict=True)]
        assert [bytes(one) for one in found] == expected
    with pytest.raises(ReadError, match="ends before byte 300,001"):
        source.get_ranges([299_999], [2])
    source.close()
    with pytest.raises(ReadError, match="was closed"):
        source.read(100_000, 10)


def test_opening_takes_one_request(server: Server):
    source = opened(server, "bytes")
    assert bytes(source.read(0, 1000)) == CONTENT[:1000]
    assert source.stamp() == source.stamp()
    assert [asked.method for asked in server.log().asked] == ["GET"]
    assert opened(server, "empty").stamp().nbytes == 0


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("workers", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_batches(server: Server, scheme: str, workers: Any, tmp_path: Path):
    expected = truth(server_file(server, tmp_path))
    urls = [str(name_of(server, key, scheme)) for key in ("a.h5", "train/c d.h5")]
    with AsyncReader(hdf5_path=urls, workers=workers, **options_of(server, scheme)) as reader:
        assert_epoch_is(reader, np.concatenate([expected, expected]))


def server_file(server: Server, folder: Path) -> Path:
    path = folder / "there.h5"
    source = opened(server, "a.h5")
    path.write_bytes(source.read(0, source.stamp().nbytes))
    return path


def test_a_presigned_url(server: Server):
    url = server.url("bucket/a.h5") + "?X-Signature=ab*c[d]%2F&e=?"
    with AsyncReader(hdf5_path=url, **options_of(server, "http")) as reader:
        assert len(list(reader)) == len(reader)


@pytest.mark.parametrize("command", ["inspect", "read", "stats", "index"])
@pytest.mark.parametrize("key", ["b.h5", "*.h5"])
def test_commands(server: Server, command: str, key: str, tmp_path: Path):
    typed = [command, f"s3://bucket/train/{key}"]
    for name, value in server.client_options("s3").items():
        text = "{allow_http = true}" if name == "client_options" else str(value).lower()
        typed += ["--storage-option", f"{name}={text}"]
    more = {"stats": ["-o", "a.json"], "index": ["-o", "a.h5idx"]}.get(command, [])
    typed += [str(tmp_path / one) if "." in one else one for one in more]
    result = CliRunner().invoke(cli.app, typed)
    assert result.exit_code == 0, result.output
    assert ("its ETag" in result.output) == (command == "inspect")


def test_a_saved_index_of_far_files(server: Server, tmp_path: Path):
    options, index = options_of(server), tmp_path / "far.h5idx"
    for _ in range(2):
        with AsyncReader(hdf5_path="s3://bucket/a.h5", index_cache=index, **options) as reader:
            expected = truth(server_file(server, tmp_path))
            assert_epoch_is(reader, expected)
    assert index.is_file()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_several_ranges_of_a_call(server: Server, scheme: str):
    server.put("bucket/mine", CONTENT)
    source = opened(server, "mine", scheme)
    offsets = list(range(70_000, 290_000, 9_999))
    lengths = [1 + at % 5000 for at in offsets]
    expected = [CONTENT[at : at + n] for at, n in zip(offsets, lengths, strict=True)]
    assert [bytes(one) for one in source.get_ranges(offsets, lengths)] == expected
    with pytest.raises(ReadError, match="ends before byte 300,001"):
        source.get_ranges([0, 299_999], [1, 2])
    server.strike(Rule("replaced", times=1))
    with pytest.raises(ReadError, match="mine was replaced"):
        source.get_ranges(offsets, lengths)


# --- identity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "no_etag", "weak_etag"])
def test_an_object_that_changes(server: Server, fault: str):
    server.put("bucket/mine", CONTENT)
    server.strike(*[Rule(fault)] * bool(fault))
    source = opened(server, "mine")
    assert ("date" in source.identity) == (fault == "no_etag")
    assert source.read(100_000, 5) == CONTENT[100_000:100_005]
    assert store_of(name := name_of(server, "mine")).stamp(name) == source.stamp()
    server.strike(Rule("replaced", times=1), *[Rule(fault)] * bool(fault))
    with pytest.raises(ReadError, match="mine was replaced"):
        source.get_ranges([100_000, 5], [5, 5])
    assert store_of(name).stamp(name) != source.stamp()


@pytest.mark.parametrize("fault", ["short", "wrong_range", "whole", "other_version"])
def test_an_answer_that_is_wrong(server: Server, fault: str):
    server.heed_tags(False)
    source = opened(server, "bytes")
    server.heed_tags(False)
    server.strike(Rule(fault))
    with pytest.raises(ReadError, match="bucket/bytes"):
        source.read(100_000, 500)


def _read_again(server: Server, fault: str, times: int | None) -> bytes:
    source = opened(server, "bytes")
    server.strike(Rule(fault, times=times))
    found = source.read(100_000, 500)
    assert source.retries == times
    return found


@pytest.mark.parametrize("fault", ["short", "no_etag", "weak_etag"])
def test_an_answer_that_is_wrong_once(server: Server, fault: str):
    server.heed_tags(True)
    assert _read_again(server, fault, 2) == CONTENT[100_000:100_500]


@pytest.mark.parametrize("fault", ["no_etag", "weak_etag"])
def test_answers_without_the_tag_do_not_count_as_another_object(server: Server, fault: str):
    with pytest.raises(ReadError, match=r"bucket/bytes cannot be read: .* lack the ETag"):
        _read_again(server, fault, None)


def test_no_options_are_none(server: Server):
    assert ReaderConfig(hdf5_path="s3://bucket/a.h5", storage_options=None).storage_options == {}


def test_stamps_of_many_files_are_small_requests(server: Server):
    name = name_of(server, "bytes")
    server.log()
    stamp = store_of(name).stamp(name)
    log = server.log()
    assert (log.count, log.nbytes) == (1, 1)
    assert stamp == opened(server, "bytes").stamp()


def test_opening_for_rows_alone_is_a_small_request(server: Server):
    name = name_of(server, "bytes")
    server.log()
    with closing(store_of(name).open(name, is_patient=True)) as source:
        log = server.log()
        assert (log.count, log.nbytes) == (1, 1)
        assert bytes(source.get_ranges([0], [5])[0]) == CONTENT[:5]


def test_long_tags_are_left_to_the_store(server: Server):
    source = opened(server, "bytes")
    source.meta = {**source.meta, "e_tag": f'"{"x" * 300}"'}
    assert source.web_address() is None


def test_a_folder_is_no_file(server: Server):
    with pytest.raises(ConfigError, match=r"names a folder; .* s3://bucket/some/\*\.h5"):
        store_of("s3://").open("s3://bucket/some/")


# --- other clients -------------------------------------------------------------------------------


def test_addresses(server: Server):
    """The web's are URLs; those that nobody may sign, or whose clients have options, are none."""
    at = opened(server, "bytes").web_address()
    assert at is not None
    assert at.url == server.url("bucket/bytes")
    assert [f"If-Match: {at.etag}"] == [line for line in at.headers if "agent" not in line.lower()]
    for scheme in ("s3", "gs", "az"):  # with "skip_signature"
        assert opened(server, "bytes", scheme).web_address() is None
    options = {"client_options": {"allow_http": True, "default_headers": {"a": "b"}}}
    name = SourceName(server.url("bucket/bytes"), options)
    assert store_of(name).open(name).web_address() is None
    server.strike(Rule("no_etag"))
    assert opened(server, "bytes").web_address() is None


def test_timeouts_are_numbers_of_seconds_or_texts(server: Server):
    for timeout in (5, 0.5, "1min"):
        own = {"allow_http": True, "timeout": timeout, "connect_timeout": timeout}
        name = SourceName(server.url("bucket/bytes"), {"client_options": own})
        assert store_of(name).open(name).read(100_000, 5) == CONTENT[100_000:100_005]


def test_an_endpoint_of_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url().rstrip("/"))
    name = SourceName("s3://bucket/bytes", {"skip_signature": True, "region": "of-this-test"})
    assert store_of(name).open(name).read(100_000, 5) == CONTENT[100_000:100_005]


# --- failures ------------------------------------------------------------------------------------


class Failed(Exception):
    pass


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("status code: 400: <Error><Code>ExpiredToken</Code>", "the credentials have expired"),
        ("status code: 403: <Code>SignatureDoesNotMatch</Code>", "the credentials are wrong"),
        ("PermissionDenied: status: 403", "access was denied"),
        ("Received redirect ... inner: BareRedirect", "the bucket is in another region"),
        ("GET http://169.254.169.254/latest/api/token", "no credentials were found"),
        ('ConnectError("dns error")', "its host is unknown"),
        ("ConnectionRefused", "the server cannot be reached; check the name, the endpoint"),
        ("InvalidCertificate(UnknownIssuer)", "the server's certificate is not trusted"),
        ("status: 503 SlowDown", "the server is overloaded"),
        ("status: 418", "the server answered with status 418"),
        ("odd https://host/a?Signature=hidden\nmore", "odd its URL"),
    ],
)
def test_what_a_failure_says(text: str, reason: str):
    error = failure(Failed(text), "s3://bucket/a.h5")
    assert str(error.strerror).startswith(reason)
    assert "\n" not in str(error.strerror)
    assert not isinstance(error, FileNotFoundError)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_object_that_is_not_there(server: Server, scheme: str):
    name = name_of(server, "none.h5", scheme)
    with pytest.raises(FileNotFoundError):
        store_of(name).open(name)
    with pytest.raises(ReadError, match=f"cannot open {re.escape(name)}: there is no such object"):
        open_hdf5(name)


def test_obstore_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("h5async.io.obstoreclient._clients.library", None)
    monkeypatch.setattr("h5async.io.obstoreclient._PACKAGE", "obstore_that_is_missing")
    with pytest.raises(H5AsyncError, match=r"pip install 'h5async\[remote\]'"):
        AsyncReader(hdf5_path="s3://bucket/a.h5")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_reads(server: Server):
    assert opened(server, "bytes").read(100_000, 9) == CONTENT[100_000:100_009]
    child = os.fork()
    if not child:
        status = 1
        try:
            status = int(opened(server, "bytes").read(99_999, 9) != CONTENT[99_999:100_008])
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
