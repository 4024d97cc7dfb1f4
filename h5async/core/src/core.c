/* The compiled core. Executes a slice of a read plan: reads, checks and decodes chunks, and copies
   samples into the rows of a batch.

   ctypes calls it, and releases the GIL for the call. It needs no header of Python's, so that one
   build serves every version of Python. core/structures.py declares the same structures.

   What the core cannot do (bytes that are missing or damaged, that have another length than expected,
   a bound that does not hold) it refuses with a reason, of which Python makes an error. What it does
   must be what HDF5 would do.

   Codecs are called through the public C interfaces of libdeflate, zstd, lz4, c-blosc, libaec and
   bzip2, by pointers that are handed over. Formats: HDF5's shuffle and Fletcher-32 (H5Zshuffle.c,
   H5Zfletcher32.c), LibLZF's stream (h5py's lzf_filter.c), the framing of lz4 (H5Zlz4.c) and of
   bitshuffle (bshuf_h5filter.c), the header of c-blosc (README_CHUNK_FORMAT.rst). Other filters are
   undone by HDF5's plugins (plugin.c). */

#include "common.h"
#include "trace.c"
#include "file.c"
#include "guard.c"
#include "pieces.c"
#include "heap.c"
#include "decoders.c"
#include "bits.c"
#include "blosc.c"
#include "packed.c"
#include "stored.c"
#include "plugin.c"
#include "pipeline.c"
#include "place.c"
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
#include "plan.c"
#include "window.c"
#include "cut.c"
#include "work.c"
#include "rows.c"
#include "elements.c"
#include "kept.c"
#include "piecewise.c"
#include "batch.c"
#include "queue.c"
#include "ranges.c"
#include "frames.c"
#include "visit.c"
#include "dense.c"
#include "runs.c"
#include "images.c"

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

/* The members of all structures: their names, offsets and sizes, by which Python knows that this
   build fits. */
typedef struct {
    const char *name;
    int64_t offset, nbytes;
} Member;

#define MEMBER(type, name) {#type "." #name, offsetof(type, name), sizeof(((type *)NULL)->name)}
static const Member MEMBERS[] = {
    {"ABI", ABI, 0},
    MEMBER(Libraries, libdeflate_alloc_decompressor),
    MEMBER(Libraries, libdeflate_free_decompressor), MEMBER(Libraries, libdeflate_zlib_decompress),
    MEMBER(Libraries, ZSTD_createDCtx), MEMBER(Libraries, ZSTD_freeDCtx),
    MEMBER(Libraries, ZSTD_decompressDCtx), MEMBER(Libraries, ZSTD_isError),
    MEMBER(Libraries, LZ4_decompress_safe), MEMBER(Libraries, blosc_decompress_ctx),
    MEMBER(Libraries, aec_buffer_decode), MEMBER(Libraries, BZ2_bzBuffToBuffDecompress),
    MEMBER(Worker, libraries), MEMBER(Worker, encoded), MEMBER(Worker, chunk),
    MEMBER(Worker, between), MEMBER(Worker, encoded_nbytes), MEMBER(Worker, chunk_nbytes),
    MEMBER(Worker, between_nbytes), MEMBER(Worker, deflate), MEMBER(Worker, zstd),
    MEMBER(Worker, heap),
    MEMBER(Worker, read_ns), MEMBER(Worker, decode_ns), MEMBER(Worker, place_ns),
    MEMBER(Worker, read_nbytes), MEMBER(Worker, decoded_chunks), MEMBER(Worker, decoded_nbytes),
    MEMBER(Worker, returned_ns), MEMBER(Worker, stop), MEMBER(Worker, transform_ns),
    MEMBER(Worker, trace), MEMBER(Worker, tracing), MEMBER(Worker, batch), MEMBER(Worker, latest),
    MEMBER(Worker, traced_field), MEMBER(Worker, traced_source), MEMBER(Worker, failure),
    MEMBER(Worker, least_nbytes), MEMBER(Failure, reason), MEMBER(Failure, filter),
    MEMBER(Failure, extent), MEMBER(Failure, cross), MEMBER(Failure, at),
    MEMBER(Failure, expected), MEMBER(Failure, found), MEMBER(Worker, held),
    MEMBER(TraceEvent, begin_ns), MEMBER(TraceEvent, end_ns), MEMBER(TraceEvent, thread),
    MEMBER(TraceEvent, batch), MEMBER(TraceEvent, stage), MEMBER(TraceEvent, field),
    MEMBER(TraceEvent, source), MEMBER(TraceEvent, padding),
    MEMBER(Trace, events), MEMBER(Trace, capacity), MEMBER(Trace, count),
    MEMBER(File, fd), MEMBER(File, io), MEMBER(File, map), MEMBER(File, map_nbytes),
    MEMBER(File, device), MEMBER(File, inode), MEMBER(File, nbytes), MEMBER(File, modified_ns),
    MEMBER(File, changed_ns), MEMBER(File, event), MEMBER(File, path),
    MEMBER(File, failed_at), MEMBER(File, error),
    MEMBER(Filter, kind), MEMBER(Filter, element), MEMBER(Filter, block),
    MEMBER(Filter, values), MEMBER(Filter, num_values), MEMBER(Filter, function),
    MEMBER(Dataset, filters), MEMBER(Dataset, chunk_offset), MEMBER(Dataset, chunk_stored),
    MEMBER(Dataset, chunk_mask), MEMBER(Dataset, chunk_strides), MEMBER(Dataset, row_strides),
    MEMBER(Dataset, extents), MEMBER(Dataset, row_begin), MEMBER(Dataset, piece_begin),
    MEMBER(Dataset, fill), MEMBER(Dataset, num_filters), MEMBER(Dataset, num_chunks),
    MEMBER(Dataset, num_cross), MEMBER(Dataset, rank), MEMBER(Dataset, chunk_nbytes),
    MEMBER(Dataset, chunk_samples), MEMBER(Dataset, sample_stride), MEMBER(Dataset, itemsize),
    MEMBER(Dataset, row_nbytes), MEMBER(Dataset, rows_are_whole), MEMBER(Dataset, begin),
    MEMBER(Transform, samples), MEMBER(Transform, points), MEMBER(Transform, channels),
    MEMBER(Transform, source), MEMBER(Transform, is_float), MEMBER(Transform, scale),
    MEMBER(Transform, offset),
    MEMBER(Unpack, rows), MEMBER(Unpack, count), MEMBER(Unpack, source),
    MEMBER(Unpack, is_double), MEMBER(Unpack, is_wide), MEMBER(Unpack, has_scale),
    MEMBER(Unpack, has_offset), MEMBER(Unpack, which), MEMBER(Unpack, scale),
    MEMBER(Unpack, offset), MEMBER(Unpack, fill), MEMBER(Unpack, low), MEMBER(Unpack, high),
    MEMBER(Frames, base), MEMBER(Frames, position), MEMBER(Frames, nbytes),
    MEMBER(Frames, base_nbytes), MEMBER(Frames, count), MEMBER(Frames, kind),
    MEMBER(Frames, has_checksum), MEMBER(Frames, element), MEMBER(Frames, block_nbytes),
    MEMBER(Frames, expected_nbytes), MEMBER(Frames, pitch), MEMBER(Frames, source),
    MEMBER(Frames, source_nbytes), MEMBER(Frames, target), MEMBER(Frames, target_nbytes),
    MEMBER(Frames, copy_source), MEMBER(Frames, copy_target), MEMBER(Frames, copy_nbytes),
    MEMBER(Frames, adler), MEMBER(Frames, max_tasks), MEMBER(Frames, max_copies),
    MEMBER(Frames, num_tasks), MEMBER(Frames, num_copies),
    MEMBER(Visit, iterate), MEMBER(Visit, save_thread), MEMBER(Visit, restore_thread),
    MEMBER(Visit, check_signals), MEMBER(Visit, dataset), MEMBER(Visit, rank),
    MEMBER(Visit, chunk), MEMBER(Visit, grid), MEMBER(Visit, number), MEMBER(Visit, offset),
    MEMBER(Visit, nbytes), MEMBER(Visit, mask), MEMBER(Visit, capacity), MEMBER(Visit, count),
    MEMBER(Visit, begin), MEMBER(Visit, end), MEMBER(Visit, least), MEMBER(Visit, most),
    MEMBER(Visit, is_ascending), MEMBER(Visit, is_apart), MEMBER(Visit, is_outside),
    MEMBER(Visit, thread),
    MEMBER(Heap, length), MEMBER(Heap, place), MEMBER(Heap, count), MEMBER(Heap, base),
    MEMBER(Heap, value_nbytes), MEMBER(Heap, address_nbytes), MEMBER(Heap, size_nbytes),
    MEMBER(Heap, is_text), MEMBER(Heap, padding),
    MEMBER(Sparse, data), MEMBER(Sparse, indices), MEMBER(Sparse, indptr), MEMBER(Sparse, out),
    MEMBER(Sparse, rows), MEMBER(Sparse, columns), MEMBER(Sparse, total),
    MEMBER(Sparse, row_nbytes), MEMBER(Sparse, data_kind), MEMBER(Sparse, out_kind),
    MEMBER(Sparse, index_nbytes), MEMBER(Sparse, padding),
    MEMBER(Source, path),
    MEMBER(Source, map),
    MEMBER(Source, map_nbytes),
    MEMBER(Source, device),
    MEMBER(Source, inode),
    MEMBER(Source, nbytes),
    MEMBER(Source, modified_ns),
    MEMBER(Source, changed_ns),
    MEMBER(Source, may_map),
    MEMBER(Source, fd),
    MEMBER(Source, is_open),
    MEMBER(Source, users),
    MEMBER(Source, has_swmr_writer),
    MEMBER(Source, is_stale),
    MEMBER(Source, was_cached),
    MEMBER(Source, uses),
    MEMBER(Source, checked_ns),
    MEMBER(Source, newer),
    MEMBER(Source, older),
    MEMBER(Shape, dataset),
    MEMBER(Shape, cross_number),
    MEMBER(Shape, number_stride),
    MEMBER(Shape, kind),
    MEMBER(Shape, source_row_nbytes),
    MEMBER(Shape, keeps),
    MEMBER(Shape, swaps),
    MEMBER(Layer, first),
    MEMBER(Layer, row),
    MEMBER(Layer, step),
    MEMBER(Layer, shape),
    MEMBER(Layer, source),
    MEMBER(Layer, begin),
    MEMBER(Layer, count),
    MEMBER(Layer, is_sparse),
    MEMBER(Layer, num_segments),
    MEMBER(Field, layers),
    MEMBER(Field, shapes),
    MEMBER(Field, number),
    MEMBER(Field, offset),
    MEMBER(Field, nbytes),
    MEMBER(Field, mask),
    MEMBER(Field, fill),
    MEMBER(Field, transform),
    MEMBER(Field, store),
    MEMBER(Field, nbytes_step),
    MEMBER(Field, mask_step),
    MEMBER(Field, num_layers),
    MEMBER(Field, num_extents),
    MEMBER(Field, row_nbytes),
    MEMBER(Field, itemsize),
    MEMBER(Field, is_filled_first), MEMBER(Field, steps), MEMBER(Field, spans),
    MEMBER(Field, heaps), MEMBER(Field, lengths), MEMBER(Field, num_rows),
    MEMBER(Field, limit), MEMBER(SpanRows, starts),
    MEMBER(SpanRows, num_samples),
    MEMBER(StepRows, offsets), MEMBER(StepRows, starts), MEMBER(StepRows, ends),
    MEMBER(StepRows, num_offsets), MEMBER(StepRows, num_sequences), MEMBER(StepRows, pad),
    MEMBER(Item, source),
    MEMBER(Item, field),
    MEMBER(Item, layer),
    MEMBER(Item, segment),
    MEMBER(Item, kind),
    MEMBER(Item, status),
    MEMBER(Item, number),
    MEMBER(Item, first_run),
    MEMBER(Item, num_runs),
    MEMBER(Item, cross),
    MEMBER(Item, cross_end),
    MEMBER(Item, nbytes),
    MEMBER(BatchPlan, items),
    MEMBER(BatchPlan, run_local),
    MEMBER(BatchPlan, run_position),
    MEMBER(BatchPlan, run_length),
    MEMBER(BatchPlan, wanted),
    MEMBER(BatchPlan, spare),
    MEMBER(BatchPlan, joined),
    MEMBER(BatchPlan, sorted),
    MEMBER(BatchPlan, order),
    MEMBER(BatchPlan, order_spare),
    MEMBER(BatchPlan, places),
    MEMBER(BatchPlan, num_items),
    MEMBER(BatchPlan, num_runs),
    MEMBER(BatchPlan, num_wanted),
    MEMBER(BatchPlan, most_items),
    MEMBER(BatchPlan, most_runs),
    MEMBER(BatchPlan, most_wanted),
    MEMBER(BatchPlan, most_order),
    MEMBER(BatchPlan, most_joined),
    MEMBER(BatchPlan, most_places),
    MEMBER(BatchPlan, first_wanted),
    MEMBER(BatchPlan, nbytes),
    MEMBER(BatchPlan, was_cached),
    MEMBER(Wanted, sample),
    MEMBER(Wanted, position),
    MEMBER(Wanted, rank),
    MEMBER(Target, raw),
    MEMBER(Target, out),
    MEMBER(Target, is_wanted),
    MEMBER(Target, capacity),
    MEMBER(Window, unit),
    MEMBER(Window, skip),
    MEMBER(Window, count),
    MEMBER(Window, bounds),
    MEMBER(Window, delay),
    MEMBER(Window, num_units),
    MEMBER(Window, size),
    MEMBER(Window, group_rounds),
    MEMBER(Window, keys),
};

PUBLIC const Member *h5async_members(void)
{
    return MEMBERS;
}

PUBLIC int64_t h5async_num_members(void)
{
    return (int64_t)(sizeof MEMBERS / sizeof MEMBERS[0]);
}
