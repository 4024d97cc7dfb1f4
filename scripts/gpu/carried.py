"""Wheels of the folder wheels/ enter; an environment in which the steps run leaves.

The wheels are installed into a folder of their own (build/gpu-site) that comes before what Python
has already, so that CuPy, PyTorch and the other large packages of the machine are used as they
are. h5async itself is used as it is in this tree: of its wheel only the compiled core is taken, and
put where building in place would put it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "wheels"
SITE = ROOT / "build" / "gpu-site"
FOR_PYTHON = (3, 12)  # what the wheels are packed for


def environment() -> dict[str, str]:
    """Return environment variables for the steps; install the wheels first, if there are any."""
    if WHEELS.is_dir():
        install()
    # PyTorch, and all that asks for h5async by name, find this tree and the wheels.
    paths = [ROOT, ROOT / "scripts", *([SITE] if SITE.is_dir() else [])]
    more = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([more] if more else [])]),
        "PYTHONUNBUFFERED": "1",
        "H5ASYNC_REQUIRE_GPU": "1",  # that a test finds no GPU is a failure here
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # JAX takes three quarters of a GPU otherwise
    }


def install() -> None:
    """Install what wheels/ holds, without network.

    Raises
    ------
    SystemExit
        If the wheels are for another Python.
    """
    if sys.version_info[:2] != FOR_PYTHON:
        wanted, here = (".".join(map(str, v)) for v in (FOR_PYTHON, sys.version_info[:2]))
        raise SystemExit(
            f"wheels/ is for Python {wanted}, and this is {here}: name the other one by PYTHON=..."
            " before the command, or remove wheels/ where this Python has all that is needed"
        )
    wheels = sorted(WHEELS.glob("*.whl"))
    stamp = SITE / "installed.txt"
    names = "\n".join(f"{wheel.name} {wheel.stat().st_mtime_ns}" for wheel in wheels)
    if stamp.exists() and stamp.read_text() == names:
        return
    options = "--quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade"
    pip = [sys.executable, "-m", "pip", "install", *options.split(), "--target", str(SITE)]
    subprocess.run([*pip, *map(str, wheels)], check=True)
    for wheel in WHEELS.glob("h5async-*.whl"):
        _take_core(wheel)
    _join_nvidia()
    stamp.write_text(names)


def _take_core(wheel: Path) -> None:
    if any((ROOT / "h5async" / "core").glob("_core*.so")):
        return  # it was built here
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                archive.extract(name, ROOT)


def _join_nvidia() -> None:
    """Have the packages named nvidia.* be found in all folders of Python's path.

    Without this a nvidia/__init__.py among the machine's packages would hide nvCOMP's here.
    """
    if (folder := SITE / "nvidia").is_dir():
        text = "from pkgutil import extend_path\n\n__path__ = extend_path(__path__, __name__)\n"
        (folder / "__init__.py").write_text(text)
