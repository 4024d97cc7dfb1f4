/* The compiled core: plans and reads batches. ctypes calls it, releasing the GIL for the call. It uses
   no Python headers, so one build serves every version of Python. Whatever it cannot do, it refuses
   with a reason that Python turns into an error. Its results must match HDF5's.

   Codecs are called through the public C interfaces of libdeflate, zstd, lz4, c-blosc, libaec, bzip2
   and libjpeg, by function pointers passed in from Python. Formats: HDF5's shuffle and Fletcher-32
   (H5Zshuffle.c, H5Zfletcher32.c), LibLZF's stream (h5py's lzf_filter.c), the framing of lz4
   (H5Zlz4.c) and of bitshuffle (bshuf_h5filter.c), the header of c-blosc
   (README_CHUNK_FORMAT.rst). Other filters are undone by HDF5's plugins (plugin.c). */

#include "common.h"
#include "trace.c"
#include "mirror.c"
#include "file.c"
#include "guard.c"
#include "pieces.c"
#include "decoders.c"
#include "bits.c"
#include "blosc.c"
#include "packed.c"
#include "stored.c"
#include "plugin.c"
#include "pipeline.c"
#include "place.c"
#include "weave.c"
#include "chunks.c"
#include "transform.c"
#include "unpack.c"
#include "permute.c"
#include "draw.c"
#include "sources.c"
#include "store.c"
#include "tables.c"
#include "plan.h"
#include "samples.c"
#include "items.c"
#include "crops.c"
#include "plan.c"
#include "window.c"
#include "cut.c"
#include "work.c"
#include "rows.c"
#include "heap.c"
#include "kept.c"
#include "piecewise.c"
#include "fetched.c"
#include "batch.c"
#include "selected.c"
#include "keep.c"
#include "upload.c"
#include "queue.c"
#include "advance.c"
#include "pyobjects.c"
#include "turns.c"
#include "given.c"
#include "ranges.c"
#include "frames.c"
#include "visit.c"
#include "describe.c"
#include "dense.c"
#include "counts.c"
#include "moments.c"
#include "images.c"
#include "jpeg.c"
#include "http.c"
#include "members.c"

PUBLIC void h5async_free(Worker *w)
{
    if (w->deflate)
        w->libraries->libdeflate_free_decompressor(w->deflate);
    if (w->zstd)
        w->libraries->ZSTD_freeDCtx(w->zstd);
    free(w->heap);
    free(w->held);
    w->deflate = w->zstd = w->heap = w->held = NULL;
}
