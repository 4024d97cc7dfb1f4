"""Undoes HDF5's shuffle filter, which stores the first bytes of all elements, then the second, ...

The format is that of the HDF5 reference (H5Zshuffle.c).
"""

from __future__ import annotations

from functools import partial

import imagecodecs
import numpy as np

from h5async.codec.decoding import Bytes, filled, require_room
from h5async.codec.entry import Codec, CoreFilter, CoreKind, Parameters

_CORE_LIMIT = 1 << 31  # element sizes of the core are 32-bit numbers


def shuffle_codec(parameters: Parameters) -> Codec | None:
    """Return the codec for this client data, or None if HDF5 has to decode."""
    if not parameters or parameters[0] <= 0:
        return None
    element = parameters[0]
    return Codec(
        partial(unshuffle, element),
        added_nbytes=0,
        core=CoreFilter(CoreKind.SHUFFLE, element) if element < _CORE_LIMIT else None,
    )


def unshuffle(element_nbytes: int, encoded: Bytes, out: Bytes, _spare: Bytes) -> Bytes:
    """Gather the bytes of each element; bytes beyond the last whole element are unchanged."""
    require_room("shuffle", encoded.size, out)
    out = filled(out, encoded.size)
    count = encoded.size // element_nbytes
    body = count * element_nbytes
    if element_nbytes in (2, 4, 8) and count:
        dtype = f"u{element_nbytes}"
        imagecodecs.byteshuffle_decode(encoded[:body].view(dtype), out=out[:body].view(dtype))
    else:
        planes = encoded[:body].reshape(element_nbytes, count)
        np.copyto(out[:body].reshape(count, element_nbytes), planes.T)
    np.copyto(out[body:], encoded[body:])
    return out
