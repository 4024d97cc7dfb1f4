"""Write `sample_data/*.h5` from what scikit-learn carries. Needs scikit-learn and Pillow.

The same versions of scikit-learn, h5py and Pillow give the same bytes: nothing is random, and no
time is stored.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from sklearn.datasets import load_digits, load_sample_images

SAMPLE_DATA = Path(__file__).resolve().parent.parent / "sample_data"
PATCH = 32  # pixels
STRIDE = 10  # pixels from one patch to the next: neighbours overlap

DIGITS_ORIGIN = {
    "title": "Handwritten digits, 8 x 8 pixels of 0 to 16",
    "origin": "UCI Optical Recognition of Handwritten Digits (1998), its 1,797 test samples,"
    " doi:10.24432/C50P49, as in scikit-learn's load_digits",
    "authors": "E. Alpaydin, C. Kaynak",
    "licence": "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/",
    "changes": "stored as uint8",
}
PATCHES_ORIGIN = {
    "title": "RGB patches of two photographs, 32 x 32 pixels",
    "origin": "china.jpg (label 0), https://www.flickr.com/photos/danielbuechele/6061409035/ and"
    " flower.jpg (label 1), https://www.flickr.com/photos/vultilion/6056698931/, as in"
    " scikit-learn's load_sample_images",
    "authors": "china.jpg: danielbuechele; flower.jpg: vultilion (Flickr names)",
    "licence": "CC BY 2.0, https://creativecommons.org/licenses/by/2.0/",
    "changes": f"cut into patches, one every {STRIDE} pixels, row by row",
}


def main() -> None:
    SAMPLE_DATA.mkdir(exist_ok=True)
    digits = load_digits()
    write("digits.h5", digits.images.astype(np.uint8), digits.target, 128, DIGITS_ORIGIN)
    patches = [cut_patches(photograph) for photograph in load_sample_images().images]
    labels = np.repeat(np.arange(len(patches)), [len(some) for some in patches])
    write("patches.h5", np.concatenate(patches), labels, 32, PATCHES_ORIGIN)


def cut_patches(image: np.ndarray) -> np.ndarray:
    """Return (n, PATCH, PATCH, channels): all patches of a picture, row by row."""
    windows = np.lib.stride_tricks.sliding_window_view(image, (PATCH, PATCH), axis=(0, 1))
    patches = np.moveaxis(windows[::STRIDE, ::STRIDE], 2, -1)
    return patches.reshape(-1, PATCH, PATCH, image.shape[2])


def write(
    name: str, data: np.ndarray, labels: np.ndarray, chunk_rows: int, origin: dict[str, str]
) -> None:
    """Write a file of two compressed datasets; `shuffle` has a use only for the wide labels."""
    with h5py.File(SAMPLE_DATA / name, "w") as file:
        file.attrs.update(origin)
        options = {"compression": "gzip", "compression_opts": 9, "track_times": False}
        file.create_dataset("data", data=data, chunks=(chunk_rows, *data.shape[1:]), **options)
        file.create_dataset(
            "labels", data=labels.astype("<i8"), chunks=(1024,), shuffle=True, **options
        )
    size = (SAMPLE_DATA / name).stat().st_size
    print(f"{name}: data {data.shape} {data.dtype}, labels {labels.shape}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
