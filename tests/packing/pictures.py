"""Makes folders of images of all sorts, and says what Pillow reads of them."""

import io

import numpy as np
from PIL import Image


def pixels(height, width, seed=0):
    ramp = np.add.outer(np.arange(height) * 5, np.arange(width) * 3)[..., np.newaxis]
    return (ramp + np.array([0, 40, 90]) + seed * 11).astype(np.uint8)


def encoded(image, form, **options):
    into = io.BytesIO()
    image.save(into, form, **options)
    return into.getvalue()


def sorts():
    """Return encoded images by file name: those that a reader decodes, and others."""
    rgb = Image.fromarray(pixels(20, 30))
    turned = Image.Exif()
    turned[0x0112] = 6
    deep = Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100)
    return {
        "plain.jpg": encoded(rgb, "JPEG"),
        "upper.JPEG": encoded(rgb.resize((7, 9)), "JPEG", progressive=True),
        "turned.jpg": encoded(rgb, "JPEG", exif=turned),
        "grey.jpg": encoded(rgb.convert("L"), "JPEG"),
        "cmyk.jpg": encoded(rgb.convert("CMYK"), "JPEG"),
        "plain.png": encoded(rgb, "PNG"),
        "palette.png": encoded(rgb.convert("P"), "PNG"),
        "transparent.png": encoded(rgb.convert("RGBA"), "PNG"),
        "bits.png": encoded(rgb.convert("1"), "PNG"),
        "deep.png": encoded(deep, "PNG"),
        "plain.bmp": encoded(rgb, "BMP"),
        "plain.webp": encoded(rgb, "WEBP", lossless=True),
        "plain.ppm": encoded(rgb, "PPM"),
        "plain.tiff": encoded(rgb, "TIFF"),
    }


def damaged():
    """Return images that Pillow refuses, too."""
    whole = encoded(Image.fromarray(pixels(40, 40)), "JPEG")
    return {"cut.jpg": whole[: len(whole) // 2], "empty.png": b"", "text.jpg": b"no image"}


def write(folder, classes):
    """Write files of classes: a mapping of names to one of names and bytes."""
    for name, files in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / name / file).write_bytes(content)
    return folder


def by_pillow(content):
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))
