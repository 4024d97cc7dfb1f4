"""Reads the sample data with the h5async that is installed, as a check of its package.

python -I scripts/check_installed.py sample_data [--pure]

It needs nothing of the checkout but these files, and fails where h5async is imported from there,
where the compiled core is missing (with --pure: where it is there), or where a value differs from
what h5py reads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import h5py
import numpy as np

import h5async
from h5async.core.binding import load_core


def main() -> None:
    """Check, and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="sample_data")
    parser.add_argument("--pure", action="store_true", help="expect the package without the core")
    arguments = parser.parse_args()
    package = Path(h5async.__file__).resolve()
    if package.is_relative_to(arguments.folder.resolve().parent):
        raise SystemExit(f"{package} is in the checkout; run it with another Python, and -I")
    has_core = load_core() is not None
    if has_core == arguments.pure:
        raise SystemExit(f"the compiled core is {'there' if has_core else 'missing'}")
    samples = sum(_check(path, has_core) for path in sorted(arguments.folder.glob("*.h5")))
    how = "by the core" if has_core else "through h5py"
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"h5async {h5async.__version__} on Python {version}: {samples:,} samples read {how}")


def _check(path: Path, has_core: bool) -> int:
    """Compare a shuffled epoch with h5py; return its number of samples."""
    with h5py.File(path) as file:
        expected = file["data"][...]
    with h5async.AsyncReader(hdf5_path=path, shuffle="full", device="cpu") as reader:
        for batch in reader:
            if not np.array_equal(batch.data, expected[batch.index]):
                raise SystemExit(f"{path}: batch {batch.number} differs from what h5py reads")
        if bool(reader.fallback_reads) == has_core:
            raise SystemExit(f"{path}: {reader.fallback_reads} batches were read through h5py")
        return reader.num_samples


if __name__ == "__main__":
    main()
