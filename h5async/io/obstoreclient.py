"""Makes clients of object stores and the web with obstore, and explains failed requests.

The root of a store, ``s3://bucket`` or ``https://host``, and options enter; a `Client` leaves. The
sources of a process share its clients; each client has its own connections.

obstore's runtime does not survive a fork: its threads are missing in the child, and calls never
end. So if obstore was used before a fork, the child loads a copy of the library, with a state of
its own.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

from h5async.errors import ConfigError, needs_package
from h5async.spelling import named
from h5async.system.interruptions import passing, suppressing

WEB = ("http", "https")
_PACKAGE = "obstore"
_ALIASES = {"gcs": "gs"}
SIGNED_SECONDS = 900
_TIMEOUTS = ("connect_timeout", "pool_idle_timeout", "read_timeout", "timeout")
# Options of clients that do not matter when another client reads the same URL.
_PLAIN_OPTIONS = {*_TIMEOUTS, "allow_http", "http1_only", "http2_only", "pool_max_idle_per_host"}
_DURATIONS = ("retry_timeout", "init_backoff", "max_backoff", *_TIMEOUTS)
_ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT")

# By the use of a store. While a reader opens, errors are reported within seconds, although one of
# thousands of requests may stall; later, requests wait for faults to pass.
_DEFAULTS: dict[str, dict[str, Mapping[str, Any]]] = {
    "opening": {
        "client_options": {"connect_timeout": "2s", "timeout": "4s"},
        "retry_config": {"max_retries": 5, "retry_timeout": timedelta(seconds=3)},
    },
    "indexing": {
        "client_options": {"connect_timeout": "2s", "read_timeout": "4s", "timeout": "60s"},
        "retry_config": {"max_retries": 5, "retry_timeout": timedelta(seconds=5)},
    },
    "reading": {
        "client_options": {"connect_timeout": "5s", "read_timeout": "10s", "timeout": "60s"},
        "retry_config": {"max_retries": 10, "retry_timeout": timedelta(seconds=60)},
    },
}


class Client:
    """The client of a bucket or a host, or of a single URL of the web."""

    def __init__(self, library: Any, root: str, options: Mapping[str, Any]) -> None:
        self.library = library
        self._root = root
        self._options = options
        self._can_sign = not any("skip_signature" in name for name in options)
        self._stores: dict[str, Any] = {}

    def url(self, key: str) -> str | None:
        """Return a URL with which any client can read an object, for at least `SIGNED_SECONDS`.

        None if there is none, or if other clients would need options of this one.
        """
        if not _PLAIN_OPTIONS.issuperset(self._options.get("client_options") or ()):
            return None
        if self._root.partition("://")[0].lower() in WEB:
            return f"{self._root}/{key}" if key else self._root
        if self._can_sign:
            valid = timedelta(seconds=SIGNED_SECONDS)
            with suppressing(Exception):  # these credentials cannot sign
                return str(self.library.sign(self.store("opening"), "GET", key, valid))
            self._can_sign = False
        return None

    def store(self, use: str) -> Any:
        """Return the store for a use: "opening", "indexing" or "reading"."""
        found = self._stores.get(use)
        return found or self._stores.setdefault(use, self._made(use))

    def _made(self, use: str) -> Any:
        given, defaults = dict(self._options), _DEFAULTS[use]
        own = {name: {**defaults[name], **(given.pop(name, None) or {})} for name in defaults}
        values = [self._root, *given.values(), *map(os.environ.get, _ENDPOINTS)]
        if any(str(value).startswith("http://") for value in values):
            own["client_options"].setdefault("allow_http", True)
        own = _with_durations(own)
        store, scheme = self.library.store, self._root.partition("://")[0].lower()
        root = _ALIASES.get(scheme, scheme) + self._root[len(scheme) :]
        try:
            if scheme in WEB:
                return store.HTTPStore(root, **own)
            return store.from_url(root, **own, **given)
        except (ValueError, TypeError, self.library.exceptions.BaseError) as error:
            first = str(error).partition("\n")[0]
            for value in _texts(self._options):  # (one may be a misplaced secret)
                first = first.replace(value, "...")
            raise ConfigError(f"{named('storage_options')} for {self._root}: {first}") from None


def _texts(options: Mapping[str, Any]) -> Iterator[str]:
    for value in options.values():
        if isinstance(value, Mapping):
            yield from _texts(value)
        elif isinstance(value, str) and len(value) > 1:
            yield value


def _with_durations(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with numbers of seconds converted to obstore's durations."""
    found = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            value = _with_durations(value)
        elif name in _DURATIONS and isinstance(value, int | float):
            value = timedelta(seconds=value)
        found[name] = value
    return found


# --- the clients of this process ------------------------------------------------------------------


class _Clients:
    """The library that this process uses, and the clients made with it."""

    def __init__(self, is_forked: bool = False) -> None:
        self.lock = threading.Lock()
        self.library: Any = None
        self.is_forked = is_forked  # from a process that had used obstore
        self.made: dict[tuple[str, str], Client] = {}


_clients = _Clients()
_of_parents: list[_Clients] = []  # kept: destructors may wait for threads that no longer exist


@passing()
def client_of(root: str, options: Mapping[str, Any], *, is_shared: bool) -> Client:
    """Return the client of a store, a new one unless `is_shared`; thread-safe.

    `ConfigError` is raised for wrong options, `MissingPackageError` without obstore.
    """
    key, ours = (root, repr(sorted(options.items()))), _clients
    with ours.lock:
        if ours.library is None:
            ours.library = _copied_library() if ours.is_forked else _library()
        client = ours.made.get(key) or Client(ours.library, root, options)
        if is_shared:
            ours.made[key] = client
        return client


def _after_fork() -> None:
    global _clients
    _of_parents.append(_clients)
    _clients = _Clients(_clients.is_forked or _clients.library is not None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _library() -> Any:
    found: Any = None
    with needs_package("'h5async[remote]'", "files in object stores and on the web"):
        found = importlib.import_module(_PACKAGE)
        importlib.import_module(f"{_PACKAGE}.store")
    return found


def _copied_library() -> Any:
    """Load obstore from a copy of its file, which the system treats as another library."""
    original = f"{_PACKAGE}._{_PACKAGE}"
    file = sys.modules[original].__file__
    with tempfile.TemporaryDirectory() as folder, _forgotten_modules():
        spec = importlib.util.spec_from_file_location(original, shutil.copy(str(file), folder))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[original] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[original])
        return _library()


@contextmanager
def _forgotten_modules() -> Iterator[None]:
    def taken() -> dict[str, Any]:
        names = [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]
        return {name: sys.modules.pop(name) for name in names}

    before = taken()
    try:
        yield
    finally:
        taken()
        sys.modules.update(before)


# --- why a request failed -------------------------------------------------------------------------


class _Cause(NamedTuple):
    """A cause of failures: a pattern of obstore's message, our message, and an error number."""

    pattern: str
    reason: str
    number: int = errno.EIO


_CREDENTIALS = f"give them as {named('storage_options')}, or log in with the cloud's own tools"
_NETWORK = "check the name, the endpoint and the network"
_CAUSES = (
    _Cause(
        r"169\.254\.|metadata\.google|token request",
        f"no credentials were found; {_CREDENTIALS}; public data need"
        f" {named('storage_options', {'skip_signature': True})}",
        errno.EACCES,
    ),
    _Cause(
        "<Code>(ExpiredToken|TokenRefreshRequired|RequestExpired)|Request has expired|expired",
        f"the credentials have expired; {_CREDENTIALS}",
        errno.EACCES,
    ),
    _Cause(
        "<Code>(InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|AuthenticationFailed)",
        f"the credentials are wrong; {_CREDENTIALS}",
        errno.EACCES,
    ),
    _Cause(
        "BareRedirect|PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint",
        "the bucket is in another region; give it as"
        f" {named('storage_options', {'aws_region': '...'})}",
        errno.EACCES,
    ),
    _Cause("NoSuchBucket|ContainerNotFound", "there is no such bucket", errno.EACCES),
    _Cause(
        "PermissionDenied|Unauthenticated|status: 40[13]",
        "access was denied: the credentials may not read it, or there is no such object;"
        f" {_CREDENTIALS}",
        errno.EACCES,
    ),
    _Cause(
        "RangeNotSupported|non-partial response",
        "the server does not support range requests",
        errno.EOPNOTSUPP,
    ),
    _Cause(r"Requested \d+\.\.\d+, got", "the server sent another range than the requested one"),
    _Cause("dns error", f"its host is unknown; {_NETWORK}"),
    _Cause(
        "InvalidCertificate|InvalidMessage|[Cc]ertificate",
        "the server's certificate is not trusted, or it does not speak TLS; check the URL, or give"
        f" {named('storage_options', {'client_options': {'root_certificate': '...'}})}",
    ),
    _Cause(
        "BadScheme",
        "its endpoint is http://, which needs"
        f" {named('storage_options', {'client_options': {'allow_http': True}})}",
        errno.EACCES,
    ),
    _Cause("ConnectionRefused|kind: Connect", f"the server cannot be reached; {_NETWORK}"),
    _Cause("kind: Timeout|TimedOut", "the server did not answer in time"),
    _Cause("body error", "the connection was lost in the middle of an answer"),
    _Cause(
        "status: (429|503)|SlowDown",
        f"the server is overloaded; try a smaller {named('requests_in_flight')}",
    ),
)


def failure(error: Exception, name: str) -> OSError:
    """Return the error for a failed request, with a one-line reason without secrets."""
    if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
        return FileNotFoundError(errno.ENOENT, "there is no such object", name)
    text = f"{type(error).__name__} {error}"
    for cause in _CAUSES:
        if re.search(cause.pattern, text):
            return OSError(cause.number, cause.reason, name)
    status = re.search(r"status: (\d{3})|status code: (\d{3})", text)
    if status is not None:
        reason = f"the server answered with status {status[1] or status[2]}"
    else:  # (URLs may be signed)
        first = str(error).partition("\n")[0]
        reason = re.sub(r"\b\w+://\S+", "its URL", first)
    return OSError(errno.EIO, reason, name)
