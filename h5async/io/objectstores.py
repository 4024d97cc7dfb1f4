"""Reads sources in object stores and on the web.

All reads are of the state in which a source was opened: requests carry its ETag (``If-Match``), and
each response must have the expected length, and the expected ETag or date.
"""

from __future__ import annotations

import fnmatch
import math
import re
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from h5async.config.files import SourceName, scheme_of
from h5async.errors import ConfigError, H5AsyncError, ReadError
from h5async.io.diskcache import keeping
from h5async.io.obstoreclient import SIGNED_SECONDS, WEB, Client, client_of, failure
from h5async.io.source import FileStamp, SideBySide, Source, WebAddress, replaced
from h5async.io.stores import Store, register

if TYPE_CHECKING:
    from typing_extensions import Buffer

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss", *WEB)
_BEGINNING_NBYTES = 1 << 16  # comes with the answer to the first request
_MOST_REDIRECTS = 5
_MOST_TAG = 200  # characters that the core compares
_TRIES = 3  # of a request whose response is wrong although the client accepts it
_PLAIN = re.compile(r"(?:(?!\.\.?(?:/|$))[\w.~-]+(?:/|$))+", re.ASCII)  # needs no %-escapes
_MAGIC = re.compile(r"[*?[]")


class Place(NamedTuple):
    """Where a source is: the root of its store, and its key there; "" if the root is its URL."""

    root: str
    key: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, name: str) -> Place:
        """Return the place of a name. Keys of object stores are used as typed."""
        options = name.options if isinstance(name, SourceName) else {}
        scheme, _, rest = "".join(name).partition("://")
        host, _, key = rest.partition("/")
        root = f"{scheme}://{host}"
        if scheme_of(name) in WEB and not _PLAIN.fullmatch(key):
            return cls("".join(name), "", options)
        return cls(root, key, options)

    @property
    def client(self) -> Client:
        """The process's client for the store."""
        return client_of(self.root, self.options, is_shared=bool(self.key))


class RemoteSource(Source):
    """An open object. `meta` and `beginning` are the metadata and bytes of the first response.

    Calls end when the source is closed, or on an interruption. But `get_ranges` of a single range,
    outside the main thread, blocks until the client gives up, because that is cheaper.
    """

    def __init__(
        self, name: str, place: Place, use: str, meta: Mapping[str, Any], beginning: bytes
    ) -> None:
        self._name = name
        self._key = place.key
        self._client, self._use = place.client, use
        self.meta = meta
        self._beginning = memoryview(beginning)
        self._waiting = SideBySide()
        tag = meta["e_tag"] or meta["version"]
        self.identity = "its ETag" if tag else "the date and size that its server reports"
        self._stamp = FileStamp.of_tag(tag or meta["last_modified"].isoformat(), meta["size"])
        has_strong_tag = meta["e_tag"] and not meta["e_tag"].startswith("W/")
        self._condition = {"if_match": meta["e_tag"]} if has_strong_tag else {}
        self._address: tuple[WebAddress | None, float] = None, -math.inf  # and when it was made

    def stamp(self) -> FileStamp:
        """Return the state that all reads refer to."""
        return self._stamp

    def get_ranges(self, offsets: Sequence[int], lengths: Sequence[int]) -> Sequence[Buffer]:
        """Return ranges; several are fetched in parallel."""
        if len(offsets) == 1 and threading.current_thread() is not threading.main_thread():
            return [self._get(offsets[0], lengths[0])]
        wanted = zip(offsets, lengths, strict=True)
        return self._waiting.call([partial(self._get, *one) for one in wanted])

    def web_address(self) -> WebAddress | None:
        """Return its URL, signed if necessary; None if there is none, or no ETag."""
        found, made = self._address
        if time.monotonic() - made > SIGNED_SECONDS / 2:
            url, tag, found = self._client.url(self._key), self.meta["e_tag"], None
            if url is not None and tag and len(tag) < _MOST_TAG:
                headers = ["User-Agent: h5async"]
                headers += [f"If-Match: {value}" for value in self._condition.values()]
                is_signed = scheme_of(self._name) not in WEB
                found = WebAddress(url, headers, tag, 0 if is_signed else _MOST_REDIRECTS)
            self._address = found, time.monotonic()
        return found

    def close(self) -> None:
        """End waiting calls."""
        self._waiting.stop()

    def _get(self, offset: int, nbytes: int) -> memoryview:
        end = offset + nbytes
        if end > self._stamp.nbytes:
            raise ReadError(
                f"{self._name} ends before byte {end:,}: it has {self._stamp.nbytes:,} bytes"
            )
        if end <= len(self._beginning):  # used once: afterwards the caller has it
            beginning, self._beginning = self._beginning, memoryview(b"")
            return beginning[offset:end]
        if not nbytes:
            return memoryview(b"")
        fault = ""
        for _ in range(_TRIES):
            found, fault = self._answer(offset, end)
            if not fault:
                return found
            self.retries += 1
        raise ReadError(f"{self._name} cannot be read: {fault}")

    def _answer(self, offset: int, end: int) -> tuple[memoryview, str]:
        """Return the server's bytes, and a fault in the response that the client ignores, or ""."""
        client, options = self._client, {"range": (offset, end), **self._condition}
        try:
            answer = client.library.get(client.store(self._use), self._key, options=options)
            found = memoryview(answer.bytes())
        except H5AsyncError:
            raise
        except client.library.exceptions.PreconditionError as error:
            raise replaced(self._name) from error
        except Exception as error:
            reason = failure(error, self._name).strerror
            raise ReadError(f"{self._name} cannot be read: {reason}") from error
        known, told = self.meta, answer.meta
        tag = known["e_tag"]
        if told["size"] == known["size"] and tag and told["e_tag"] in (None, "", f"W/{tag}"):
            return found, "its server's responses lack the ETag, which shows if it was replaced"
        if any(told[y] != known[y] for y in ("size", "e_tag" if tag else "last_modified")):
            raise replaced(self._name)
        sent = f"the server sent {found.nbytes:,} of {end - offset:,} bytes at byte {offset:,}"
        return found, "" if found.nbytes == end - offset else f"{sent}, without an error"


class RemoteStore(Store):
    """Object stores and the web."""

    def open(self, name: str, *, is_patient: bool = False) -> Source:
        """Open an object in one request; its beginning is not fetched to read rows (`is_patient`).

        To read rows of an object that is already open, no request is made: its state is known.
        """
        use, nbytes = ("reading", 1) if is_patient else ("indexing", _BEGINNING_NBYTES)
        return keeping(name, self._opened(name, use, nbytes))

    def stamp(self, name: str) -> FileStamp:
        """Return the state of an object; raises like `open`."""
        return self._opened(name, "opening", 1).stamp()

    def _opened(self, name: str, use: str, nbytes: int) -> RemoteSource:
        place = Place.of(name)
        if scheme_of(name) not in WEB and (not place.key or place.key.endswith("/")):
            what = "a folder" if place.key else "a bucket"
            raise ConfigError(
                f"{name} names {what}; add the key of an object, or a glob:"
                f" {name.removesuffix('/')}/*.h5"
            )
        client = place.client
        known = _latest.get((client, place.key)) if use == "reading" else None
        if known is not None:
            return RemoteSource(name, place, use, known.meta, b"")
        try:
            begun = SideBySide().call([partial(_begin, client, place.key, nbytes)])[0]
            found = RemoteSource(name, place, use, *begun)
        except (H5AsyncError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise failure(error, name) from error
        if use != "reading":
            _latest[client, place.key] = found
        return found

    def matching(self, name: SourceName) -> list[str] | None:
        """Return the sources that match a glob, sorted; None if the name is not a glob."""
        place = Place.of(name)
        if scheme_of(name) in WEB:
            if "*" in name.partition("?")[0]:
                raise ConfigError(
                    f"{name}: web servers have no lists of files for a glob; name each file"
                )
            return None
        found = _MAGIC.search(place.key)
        if found is None:
            return None
        prefix = place.key[: found.start()].rpartition("/")[0]
        is_flat = "/" not in place.key[len(prefix) + bool(prefix) :]
        try:
            keys = SideBySide().call([partial(_listed, place.client, prefix, is_flat)])[0]
        except Exception as error:
            if isinstance(error, H5AsyncError):
                raise
            text = f"cannot list what matches {name}: {failure(error, name).strerror}"
            raise ReadError(text, filename=name) from error
        if place.key in keys:  # an object's own name has such characters
            return [name]
        pattern = place.key.split("/")
        matches = [key for key in keys if _matches(key.split("/"), pattern)]
        return [f"{place.root}/{key}" for key in sorted(matches)]


def _begin(client: Client, key: str, nbytes: int) -> tuple[Mapping[str, Any], bytes]:
    """Return the metadata of an object, and its first bytes."""
    library, store, options = client.library, client.store("opening"), {"range": (0, nbytes)}
    try:
        answer = library.get(store, key, options=options)
        return answer.meta, bytes(answer.bytes())
    except library.exceptions.GenericError as error:
        if "status: 416" not in str(error):
            raise
        return library.head(store, key), b""  # the object is empty


def _listed(client: Client, prefix: str, is_flat: bool) -> list[str]:
    library, store = client.library, client.store("opening")
    if is_flat:
        return [one["path"] for one in library.list_with_delimiter(store, prefix)["objects"]]
    return [one["path"] for part in library.list(store, prefix) for one in part]


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Tell whether the parts of a path match a glob, by the rules for local files."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        rest = range(len(names) + 1)
        return any(_matches(names[at:], pattern[1:]) for at in rest)
    if not names or (names[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


# Sources most recently opened to read metadata, as long as they are open: by client and key.
_latest: weakref.WeakValueDictionary[tuple[Client, str], RemoteSource] = (
    weakref.WeakValueDictionary()
)
_STORE = RemoteStore()
for _scheme in SCHEMES:
    register(_scheme, _STORE)
