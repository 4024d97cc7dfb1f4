/* The members of all structures that Python declares, too: their names, offsets and sizes, by which it
   knows that this build fits. */

typedef struct {
    const char *name;
    int64_t offset, nbytes;
} Member;

/* A macro is not expanded within its own expansion, but when that is scanned again. */
#define SCAN_AGAIN(...) SCAN_16(SCAN_16(SCAN_16(__VA_ARGS__)))
#define SCAN_16(...) SCAN_4(SCAN_4(SCAN_4(SCAN_4(__VA_ARGS__))))
#define SCAN_4(...) SCAN_1(SCAN_1(SCAN_1(SCAN_1(__VA_ARGS__))))
#define SCAN_1(...) __VA_ARGS__
#define PARENTHESES ()
#define MEMBER_LATER() MEMBER
#define MEMBER(type, name, ...)                                                                   \
    {#type "." #name, offsetof(type, name), sizeof(((type *)NULL)->name)},                        \
    __VA_OPT__(MEMBER_LATER PARENTHESES (type, __VA_ARGS__))
#define MEMBERS(...) SCAN_AGAIN(MEMBER(__VA_ARGS__))
#define OPAQUE(type) {#type, 0, sizeof(type)}

static const Member ALL_MEMBERS[] = {
    {"ABI", ABI, 0},
    OPAQUE(Sources), OPAQUE(Queue), OPAQUE(Job),
    MEMBERS(Libraries, libdeflate_alloc_decompressor, libdeflate_free_decompressor,
            libdeflate_zlib_decompress, ZSTD_createDCtx, ZSTD_freeDCtx, ZSTD_decompressDCtx,
            ZSTD_isError, LZ4_decompress_safe, blosc_decompress_ctx, aec_buffer_decode,
            BZ2_bzBuffToBuffDecompress)
    MEMBERS(TraceEvent, begin_ns, end_ns, thread, batch, stage, field, source, padding)
    MEMBERS(Trace, events, capacity, count)
    MEMBERS(Failure, reason, filter, extent, cross, at, expected, found)
    MEMBERS(Worker, libraries, encoded, chunk, between, encoded_nbytes, chunk_nbytes, between_nbytes,
            deflate, zstd, heap, read_ns, decode_ns, place_ns, read_nbytes, decoded_chunks,
            decoded_nbytes, returned_ns, stop, transform_ns, trace, tracing, batch, latest,
            traced_field, traced_source, failure, least_nbytes, held)
    MEMBERS(File, fd, io, map, map_nbytes, device, inode, nbytes, modified_ns, changed_ns, event,
            path, failed_at, error)
    MEMBERS(Filter, kind, element, block, values, num_values, function)
    MEMBERS(Dataset, filters, chunk_strides, row_strides, extents, row_begin, piece_begin, fill,
            num_filters, num_cross, rank, chunk_nbytes, chunk_samples, sample_stride, itemsize,
            row_nbytes, rows_are_whole, begin)
    MEMBERS(Transform, samples, points, channels, source, is_float, scale, offset)
    MEMBERS(Unpack, rows, count, source, is_double, is_wide, has_scale, has_offset, which, scale,
            offset, fill, low, high)
    MEMBERS(Frames, base, position, nbytes, base_nbytes, count, kind, has_checksum, element,
            block_nbytes, expected_nbytes, pitch, source, source_nbytes, target, target_nbytes,
            copy_source, copy_target, copy_nbytes, adler, max_tasks, max_copies, num_tasks,
            num_copies)
    MEMBERS(Visit, iterate, save_thread, restore_thread, check_signals, dataset, rank, chunk, grid,
            number, offset, nbytes, mask, capacity, count, end, least, most, is_ascending,
            is_apart, is_outside, thread)
    MEMBERS(Sparse, data, indices, indptr, out, rows, columns, total, row_nbytes, data_kind,
            out_kind, index_nbytes, padding)
    MEMBERS(Heap, length, place, count, base, value_nbytes, address_nbytes, size_nbytes, is_text,
            padding)
    MEMBERS(Source, path, map, map_nbytes, device, inode, nbytes, modified_ns, changed_ns, may_map,
            fd, is_open, users, has_swmr_writer, is_stale, was_cached, uses, checked_ns, newer,
            older)
    MEMBERS(Shape, dataset, cross_number, number_stride, kind, source_row_nbytes, keeps, swaps)
    MEMBERS(Layer, first, row, step, shape, source, begin, count, is_sparse, num_segments)
    MEMBERS(StepRows, offsets, starts, ends, num_offsets, num_sequences, pad)
    MEMBERS(SpanRows, starts, num_samples)
    MEMBERS(Field, layers, shapes, number, offset, nbytes, mask, fill, transform, store, nbytes_step,
            mask_step, num_layers, num_extents, row_nbytes, itemsize, is_filled_first, steps, spans,
            heaps, lengths, num_rows, limit)
    MEMBERS(Item, source, field, layer, segment, kind, status, number, first_run, num_runs, cross,
            cross_end, nbytes)
    MEMBERS(Wanted, sample, position, rank)
    MEMBERS(BatchPlan, items, run_local, run_position, run_length, wanted, spare, joined, sorted,
            order, order_spare, places, num_items, num_runs, num_wanted, most_items, most_runs,
            most_wanted, most_order, most_joined, most_places, first_wanted, nbytes, was_cached)
    MEMBERS(Target, raw, out, is_wanted, capacity)
    MEMBERS(Window, unit, skip, count, bounds, delay, num_units, size, group_rounds, keys)
};

PUBLIC const Member *h5async_members(void)
{
    return ALL_MEMBERS;
}

PUBLIC int64_t h5async_num_members(void)
{
    return (int64_t)(sizeof ALL_MEMBERS / sizeof ALL_MEMBERS[0]);
}
