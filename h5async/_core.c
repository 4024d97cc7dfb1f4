/* A slice of a read plan enters; rows of a batch leave: read, checked, decoded and put in place.

   It is called by ctypes, which drops the GIL for the call, and knows nothing of Python: no header
   of Python's is needed to build it, and one build serves every version of it. `core.py` declares
   the same structures and says what lies where; `execute.py` is its twin in Python.

   Each function returns how many items it did. It stops before the first that it cannot do (bytes
   that are missing, damaged or of another length than is due, a bound that does not hold) and
   leaves the reason to the twin, which does that one item again and has the words for it. So what
   is refused here need not be an error, but what is taken must be what the twin would give.

   Codecs are called through the public C interfaces of libdeflate, zstd, lz4 and c-blosc, by
   pointers that are handed over. Formats: HDF5's shuffle and Fletcher-32 (H5Zshuffle.c,
   H5Zfletcher32.c), LibLZF's stream (h5py's lzf_filter.c), the framing of lz4 (H5Zlz4.c) and of
   bitshuffle (bshuf_h5filter.c), the header of c-blosc (README_CHUNK_FORMAT.rst). */

#include "_core/common.h"
#include "_core/file.h"
#include "_core/pieces.h"
#include "_core/rows.h"
#include "_core/decoders.h"
#include "_core/bits.h"
#include "_core/pipeline.h"
#include "_core/place.h"
#include "_core/chunks.h"
#include "_core/transform.h"
#include "_core/permute.h"
#include "_core/frames.h"

PUBLIC void h5async_free(Worker *w)
{
    if (w->deflate)
        w->libraries->deflate_free(w->deflate);
    if (w->zstd)
        w->libraries->zstd_free(w->zstd);
    w->deflate = w->zstd = NULL;
}

/* Sizes of the structures, by which core.py knows that this build fits it. */
PUBLIC int64_t h5async_abi(void)
{
    return ABI * 100000 + (int64_t)(sizeof(Libraries) + sizeof(Worker) + sizeof(File) +
                                    sizeof(Filter) + sizeof(Dataset) + sizeof(ChunkPlan) +
                                    sizeof(Rows) + sizeof(Transform) + sizeof(Frames));
}
