"""Tells how the encoded chunks of a filter pipeline are cut into compressed blocks for a GPU.

A GPU decodes many blocks at once, each alone. A chunk may have gone through one compressor at most,
behind filters that only change the order of bytes or bits, which are undone after it; a checksum
may come last. The compiled core then cuts the chunks (core/src/frames.h).
"""

from __future__ import annotations

from dataclasses import dataclass

from h5async.codec.entry import BlockCodec, CoreKind
from h5async.codec.filters import Filter


@dataclass(frozen=True)
class FrameFormat:
    """How an encoded chunk is framed.

    Attributes
    ----------
    kind
        The core's number of the filter that compressed it; ``NOTHING``: none did.
    has_checksum
        Whether a Fletcher-32 checksum was added last.
    element, block_nbytes
        Of bitshuffle with a compressor: bytes of an element, and of a block; else 0.
    codec
        What decodes one block; see `Blocks`.
    usual_block_nbytes
        Of filters whose chunks say for themselves how large their blocks are: how large they are
        where the filter's client data hold; 0: as large as the chunk.
    """

    kind: CoreKind
    has_checksum: bool = False
    element: int = 0
    block_nbytes: int = 0
    codec: BlockCodec | None = None
    usual_block_nbytes: int = 0

    def usual_tasks(self, chunk_nbytes: int) -> int:
        """Return how many compressed blocks a chunk has.

        It has no more, except where it says itself how large its blocks are. Where it does not say
        that, at most one stretch of a chunk is not compressed.
        """
        nbytes = self.block_nbytes or self.usual_block_nbytes
        if nbytes:
            return -(-chunk_nbytes // nbytes)
        return 0 if self.codec is None else 1


def frame_format(filters: tuple[Filter, ...]) -> FrameFormat | None:
    """Return how chunks are framed that all of these filters were applied to, in this order.

    None: in a way that the core does not cut.
    """
    codecs = [entry.codec for entry in filters]
    rest = [codec for codec in codecs if codec is None or not codec.does_nothing]
    last = rest[-1] if rest else None
    has_checksum = (
        last is not None and last.core is not None and last.core.kind == CoreKind.FLETCHER32
    )
    if has_checksum:
        rest.pop()
    compressor = rest.pop() if rest and rest[-1] is not None and not rest[-1].keeps_length else None
    if not all(codec is not None and codec.keeps_length and codec.core for codec in rest):
        return None
    if compressor is None:
        return FrameFormat(CoreKind.NOTHING, has_checksum)
    core, blocks = compressor.core, compressor.blocks
    if core is None or blocks is None:
        return None
    return FrameFormat(
        core.kind,
        has_checksum,
        core.element_nbytes,
        blocks.nbytes,
        blocks.codec,
        blocks.usual_nbytes,
    )
