"""pyproject.toml enters; wheels for a GPU machine without network leave, in the folder wheels/.

For Python 3.12 on Linux, x86-64. What that machine has anyway is left out: CuPy, h5py, NumPy,
PyTorch. nvCOMP's wheel is cut down to its library, and h5async's own is built here, with the core.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

from carried import FOR_PYTHON, ROOT, WHEELS

TAGS = ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5", "2014", "1")
PRESENT = ("h5py", "numpy")  # on that machine
TOOLS = ("hypothesis", "pytest")  # of the extra "test"; tests that need more of it skip
UNBUILT = ("build", "wheels", "tests", "scripts", "sample_data")  # of the tree
MAX_NBYTES = 64 << 20  # of the wheels, and of the tree that travels with them


def pack() -> None:
    """Fill wheels/ anew, and check what it weighs.

    Raises
    ------
    SystemExit
        If a wheel is not there for the machine, or all together are too large.
    """
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        download(requirements(), fresh)
        for name in PRESENT:
            for wheel in fresh.glob(f"{name}-*.whl"):
                wheel.unlink()
        for wheel in (*fresh.glob("nvidia_libnvcomp_*.whl"), *fresh.glob("imagecodecs-*.whl")):
            trim(wheel)
        build(fresh)
        shutil.rmtree(WHEELS, ignore_errors=True)
        WHEELS.mkdir()
        for wheel in fresh.glob("*.whl"):
            shutil.copy(wheel, WHEELS)
    weigh()


def requirements() -> list[str]:
    """Return what h5async and the tests of a GPU need, and nvCOMP."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    tools = [one for one in extras["test"] if one.startswith(TOOLS)]
    return [*project["dependencies"], *tools, *extras["nvcomp13"]]


def download(wanted: list[str], folder: Path) -> None:
    """Download wheels for the GPU machine, with what they need."""
    platforms = [
        f"--platform=manylinux{'' if tag in ('1', '2014') else '_'}{tag}_x86_64" for tag in TAGS
    ]
    version = ".".join(map(str, FOR_PYTHON))
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", f"--dest={folder}"]
    subprocess.run([*pip, *options, *platforms, *wanted], check=True)


def trim(wheel: Path) -> None:
    """Write a wheel again, packed tighter; nvCOMP's with the library that h5async calls alone."""
    small = wheel.with_suffix(".part")
    records = io.StringIO()
    lines = csv.writer(records, lineterminator="\n")
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(small, "w", zipfile.ZIP_LZMA) as target,
    ):
        is_nvcomp = wheel.name.startswith("nvidia_libnvcomp_")
        names = [name for name in source.namelist() if not name.endswith(".dist-info/RECORD")]
        kept = [name for name in names if not is_nvcomp or is_kept(name)]
        for name in kept:
            data = source.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.writerow((name, f"sha256={digest}", len(data)))
            target.writestr(name, data)
        record = next(name for name in source.namelist() if name.endswith(".dist-info/RECORD"))
        lines.writerow((record, "", ""))
        target.writestr(record, records.getvalue())
    if is_nvcomp and not any("/lib64/libnvcomp.so" in name for name in kept):
        raise SystemExit(f"{wheel.name} holds no libnvcomp.so where h5async looks for it")
    small.replace(wheel)


def is_kept(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    if folder.endswith(".dist-info"):
        return file in ("METADATA", "WHEEL")
    return file == "LICENSE" or file.endswith(".py") or file.startswith("libnvcomp.so")


def build(folder: Path) -> None:
    """Build h5async's wheel out of a copy of the tree, in which nothing is left behind."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "h5async")
        skip = shutil.ignore_patterns(".*", "*.so", "*.egg-info", *UNBUILT)
        shutil.copytree(ROOT, copy, ignore=skip)
        options = ["--quiet", "--no-deps", f"--wheel-dir={folder}"]
        subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(copy)], check=True)
    for wheel in folder.glob("h5async-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if not any(name.endswith(".so") for name in archive.namelist()):
                raise SystemExit("h5async was built without its core: is there a C compiler?")


def weigh() -> None:
    """Print what there is, and check that it may travel."""
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(WHEELS.glob("*.whl"))}
    for name, nbytes in sizes.items():
        print(f"{nbytes / 1e6:7.2f} MB  {name}")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    tree = sum(file.stat().st_size for file in files if file.is_file())
    total = sum(sizes.values()) + tree
    print(f"{total / 2**20:.1f} MiB with the tree ({tree / 2**20:.1f}), of {MAX_NBYTES >> 20}")
    if total > MAX_NBYTES:
        raise SystemExit("that is too much: leave a wheel out that the machine has already")
