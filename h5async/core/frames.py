"""A filter pipeline enters; how stored chunks are framed leaves, as the core takes it to cut them.

A GPU decodes many blocks at once, each compressed by itself. One codec at most may lie between a
chunk and its stored bytes, behind filters that only change the order of bytes or bits, which are
undone afterwards; a checksum may come last.
"""

from __future__ import annotations

from dataclasses import dataclass

from h5async.codec.bitshuffle import default_block
from h5async.codec.filters import (
    BITSHUFFLE,
    DEFLATE,
    FLETCHER32,
    LZ4,
    ZSTD,
    Filter,
    decoder,
    keeps_length,
    pass_on,
)
from h5async.core.binding import BITSHUFFLE_KINDS, KINDS, NOTHING, filter_struct

_CODECS = {
    KINDS[DEFLATE]: "deflate",
    KINDS[ZSTD]: "zstd",
    KINDS[LZ4]: "lz4",
    BITSHUFFLE_KINDS[2]: "lz4",
    BITSHUFFLE_KINDS[3]: "zstd",
}


@dataclass(frozen=True)
class FrameFormat:
    """How the stored bytes of a chunk are framed.

    Attributes
    ----------
    kind
        The core's number of the codec, or of none.
    has_checksum
        A Fletcher-32 checksum was added last.
    element, block_nbytes
        Of bitshuffle with a codec: bytes of an element, and of a block; else 0.
    """

    kind: int
    has_checksum: bool = False
    element: int = 0
    block_nbytes: int = 0

    @property
    def codec(self) -> str | None:
        """Name of the codec of a block: ``"deflate"`` (raw), ``"zstd"``, ``"lz4"``, or None."""
        return _CODECS.get(self.kind)

    def most_tasks(self, chunk_nbytes: int) -> int | None:
        """Return how many compressed blocks a chunk has at most.

        None: only the chunk tells, as its block size does with lz4. Where it is not None, at most
        one stretch of a chunk is not compressed.
        """
        if self.block_nbytes:
            return -(-chunk_nbytes // self.block_nbytes)
        if self.kind == KINDS[LZ4]:
            return None
        return 0 if self.kind == NOTHING else 1


def frame_format(filters: tuple[Filter, ...]) -> FrameFormat | None:
    """Return how chunks are framed that all of these filters were applied to, in this order.

    None: in a way that the core does not cut.
    """
    rest = [entry for entry in filters if decoder(entry) is not pass_on]
    has_checksum = bool(rest) and rest[-1].number == FLETCHER32
    if has_checksum:
        rest.pop()
    codec = rest.pop() if rest and not keeps_length(rest[-1]) else None
    if not all(keeps_length(entry) and filter_struct(entry) for entry in rest):
        return None
    if codec is None:
        return FrameFormat(NOTHING, has_checksum)
    struct = filter_struct(codec)
    if struct is None or codec.number not in (DEFLATE, ZSTD, LZ4, BITSHUFFLE):
        return None
    if codec.number != BITSHUFFLE:
        return FrameFormat(struct.kind, has_checksum)
    block = struct.block or default_block(struct.element)
    if block % 8:
        return None
    return FrameFormat(struct.kind, has_checksum, struct.element, block * struct.element)
