"""Says how the encoded chunks of a filter pipeline are cut into compressed blocks for a GPU.

A GPU decodes many blocks at once, each alone. A chunk may have passed at most one compressor, after
filters that only change the order of bytes or bits, which are undone afterwards; a checksum may
come last. The compiled core then cuts the chunks (core/src/frames.c).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from h5async.codec.entry import CoreFilter, CoreKind
from h5async.codec.filters import Filter, default_block

BlockCodec = Literal["deflate", "zstd", "lz4"]  # raw deflate, a zstd frame, an LZ4 block

_SHUFFLES = CoreKind.SHUFFLE, CoreKind.BITSHUFFLE
_OF_BITS = CoreKind.BITSHUFFLE, CoreKind.BITSHUFFLE_LZ4, CoreKind.BITSHUFFLE_ZSTD
_COMPRESSORS: dict[CoreKind, BlockCodec] = {
    CoreKind.DEFLATE: "deflate",
    CoreKind.ZSTD: "zstd",
    CoreKind.LZ4: "lz4",
    CoreKind.BITSHUFFLE_LZ4: "lz4",
    CoreKind.BITSHUFFLE_ZSTD: "zstd",
}


class Unshuffle(NamedTuple):
    """An order of bytes or bits, undone on the GPU after the blocks were decoded.

    `block` is the number of elements in a block of shuffled bits; 0 if bytes are shuffled.
    """

    itemsize: int
    block: int


@dataclass(frozen=True)
class FrameFormat:
    """How an encoded chunk is framed.

    Attributes
    ----------
    kind
        The core's number of the compressor; ``NOTHING`` if there is none.
    has_checksum
        Whether a Fletcher-32 checksum was added last.
    element, block_nbytes
        For bitshuffle with a compressor: bytes of an element, and of a block; else 0.
    codec
        Decodes one block.
    usual_block_nbytes
        For filters whose chunks state their blocks' size: the size by the filter's client data; 0
        means the whole chunk.
    """

    kind: CoreKind
    has_checksum: bool = False
    element: int = 0
    block_nbytes: int = 0
    codec: BlockCodec | None = None
    usual_block_nbytes: int = 0

    def usual_tasks(self, chunk_nbytes: int) -> int:
        """Return the number of compressed blocks in a chunk.

        It is the maximum, unless chunks state the size of their blocks. If they do not, at most one
        stretch of a chunk is not compressed.
        """
        nbytes = self.block_nbytes or self.usual_block_nbytes
        if nbytes:
            return -(-chunk_nbytes // nbytes)
        return 0 if self.codec is None else 1


def frame_format(filters: tuple[Filter, ...]) -> FrameFormat | None:
    """Return the framing of chunks to which all of these filters were applied, in this order.

    None means that the core does not cut them.
    """
    known = _known(filters)
    if known is None:
        return None
    rest = [one for one in known if one[1].kind != CoreKind.NOTHING]
    has_checksum = bool(rest) and rest[-1][1].kind == CoreKind.FLETCHER32
    if has_checksum:
        rest.pop()
    compressor = rest.pop() if rest and rest[-1][1].kind not in _SHUFFLES else None
    if any(core.kind not in _SHUFFLES for _, core in rest):
        return None
    if compressor is None:
        return FrameFormat(CoreKind.NOTHING, has_checksum)
    entry, core = compressor
    codec = _COMPRESSORS.get(core.kind)
    if codec is None:
        return None
    is_plain = core.kind not in _OF_BITS
    element, block = (0, 0) if is_plain else (core.element_nbytes, _block(core))
    if block % 8:
        return None
    usual = entry.parameters[0] if core.kind == CoreKind.LZ4 and entry.parameters else 0
    return FrameFormat(core.kind, has_checksum, element, block * element, codec, usual)


def unshuffles(filters: tuple[Filter, ...]) -> tuple[Unshuffle, ...]:
    """Return what is undone after the compressor, in this order."""
    return tuple(
        Unshuffle(core.element_nbytes, 0 if core.kind == CoreKind.SHUFFLE else _block(core))
        for _, core in reversed(_known(filters) or [])
        if core.kind == CoreKind.SHUFFLE or core.kind in _OF_BITS
    )


def _known(filters: tuple[Filter, ...]) -> list[tuple[Filter, CoreFilter]] | None:
    """Return filters as the core takes them; None if it does not know one."""
    known = [(entry, core) for entry in filters if (core := entry.core) is not None]
    return known if len(known) == len(filters) else None


def _block(core: CoreFilter) -> int:
    return core.block or default_block(core.element_nbytes)
