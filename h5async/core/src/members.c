/* Describes the structures that Python shares; core/binding.py builds its ctypes structures from this. */

typedef struct {
    const char *name, *type; /* type: see TYPE_OF; "": any other pointer */
    int64_t offset, nbytes;
} Member;

typedef struct {
    const char *name;
    int64_t nbytes;
    const Member *members; /* ends with one without a name */
} Structure;

#define POINTED_TO(type) type *: "*" #type, const type *: "*" #type
#define TYPE_OF(member)                                                                           \
    _Generic((member), int32_t: "int32", uint32_t: "uint32", int64_t: "int64",                    \
        TraceEvent: "TraceEvent", Failure: "Failure", Done: "Done", Taken: "Taken", Dataset: "Dataset", POINTED_TO(Libraries),  \
        POINTED_TO(Filter), POINTED_TO(Crop), POINTED_TO(Transform), POINTED_TO(Heap), POINTED_TO(Shape),           \
        POINTED_TO(Layer), POINTED_TO(StepRows), POINTED_TO(SpanRows), POINTED_TO(BatchPlan),     \
        POINTED_TO(Target), POINTED_TO(Field), POINTED_TO(Job), POINTED_TO(Sources), POINTED_TO(Queue), POINTED_TO(KeptSamples), POINTED_TO(Uploads), POINTED_TO(Worker),              \
        BatchPlan: "BatchPlan", Field: "Field", Target: "Target", default: "")

/* A macro is not expanded within its own expansion, only when the result is scanned again. */
#define SCAN_AGAIN(...) SCAN_16(SCAN_16(SCAN_16(__VA_ARGS__)))
#define SCAN_16(...) SCAN_4(SCAN_4(SCAN_4(SCAN_4(__VA_ARGS__))))
#define SCAN_4(...) SCAN_1(SCAN_1(SCAN_1(SCAN_1(__VA_ARGS__))))
#define SCAN_1(...) __VA_ARGS__
#define PARENTHESES ()
#define MEMBER_LATER() MEMBER
#define MEMBER(type, name, ...)                                                                   \
    {#name, TYPE_OF(((type *)NULL)->name), offsetof(type, name), sizeof(((type *)NULL)->name)},   \
    __VA_OPT__(MEMBER_LATER PARENTHESES (type, __VA_ARGS__))
#define MEMBERS(type, ...)                                                                        \
    {#type, sizeof(type), (const Member[]){SCAN_AGAIN(MEMBER(type, __VA_ARGS__)) {0}}},

/* Each comes after those it contains or points to. Members that Python does not use are left out. */
static const Structure ALL_STRUCTURES[] = {
    MEMBERS(Libraries, libdeflate_alloc_decompressor, libdeflate_free_decompressor,
            libdeflate_zlib_decompress, ZSTD_createDCtx, ZSTD_freeDCtx, ZSTD_decompressDCtx,
            ZSTD_isError, LZ4_decompress_safe, blosc_decompress_ctx, aec_buffer_decode,
            BZ2_bzBuffToBuffDecompress, jpeg_std_error, jpeg_CreateDecompress, jpeg_mem_src,
            jpeg_read_header, jpeg_start_decompress, jpeg_crop_scanline, jpeg_skip_scanlines,
            jpeg_read_scanlines, jpeg_finish_decompress,
            jpeg_destroy_decompress)
    MEMBERS(TraceEvent, begin_ns, end_ns, thread, batch, stage, field, source, padding)
    MEMBERS(Trace, events, capacity, count)
    MEMBERS(Failure, reason, filter, extent, cross, at, expected, found)
    MEMBERS(Done, read_ns, decode_ns, place_ns, transform_ns, plan_ns, upload_ns, read_nbytes,
            decoded_chunks, decoded_nbytes)
    MEMBERS(Worker, libraries, encoded, chunk, between, encoded_nbytes, chunk_nbytes, between_nbytes,
            done, returned_ns, stop, batch, failure, least_nbytes, lists_all)
    MEMBERS(Fetched, source, offset, nbytes, data)
    MEMBERS(Mirror, map, map_nbytes, marks, weights, path, device, inode, nbytes)
    MEMBERS(File, fd, io, map, map_nbytes, device, inode, nbytes, modified_ns, changed_ns, event,
            path, failed_at, error, is_far, mirror, fetched, num_fetched)
    MEMBERS(Filter, kind, element, block, values, num_values, function)
    MEMBERS(Crop, extents, sizes, drawn, flipped, group, rank, first, rows_of_sample)
    MEMBERS(Dataset, filters, chunk_strides, row_strides, extents, row_begin, piece_begin, fill,
            num_filters, num_cross, rank, chunk_nbytes, chunk_samples, sample_stride, itemsize,
            row_nbytes, rows_are_whole, crop, axis, num_cells, cell_begin, begin)
    MEMBERS(Transform, samples, points, channels, source, is_float, scale, offset)
    MEMBERS(Unpack, rows, count, source, is_double, is_wide, which, scale, offset, fill, low, high)
    MEMBERS(Frames, base, position, nbytes, base_nbytes, count, kind, has_checksum, element,
            block_nbytes, expected_nbytes, pitch, source, source_nbytes, target, target_nbytes,
            copy_source, copy_target, copy_nbytes, adler, max_tasks, max_copies, num_tasks,
            num_copies)
    MEMBERS(Visit, iterate, look_up, most_looked_up, save_thread, restore_thread, check_signals,
            dataset, rank, chunk, grid, number, offset, nbytes, mask, capacity, count, end, least,
            most, is_ascending, is_apart, is_outside, unlike)
    MEMBERS(Sparse, data, indices, indptr, out, rows, columns, total, row_nbytes, data_kind,
            out_kind, index_nbytes, padding)
    MEMBERS(Heap, length, place, count, base, value_nbytes, address_nbytes, size_nbytes, is_text,
            padding)
    MEMBERS(Source, path, map, map_nbytes, device, inode, nbytes, modified_ns, changed_ns, may_map,
            fd, is_far, mirror)
    MEMBERS(Shape, dataset, cross_number, number_stride, kind, source_row_nbytes, keeps, swaps)
    MEMBERS(Layer, first, row, step, shape, source, begin, count, is_sparse, num_segments)
    MEMBERS(StepRows, offsets, starts, ends, run_end, num_offsets, num_sequences, pad)
    MEMBERS(SpanRows, starts, num_samples)
    MEMBERS(Field, layers, shapes, number, offset, nbytes, mask, fill, transform, store, nbytes_step,
            mask_step, num_layers, num_extents, row_nbytes, itemsize, is_filled_first, steps, spans,
            heaps, lengths, crop, num_rows, limit)
    MEMBERS(Item, source, field, layer, segment, kind, status, number, first_run, num_runs, cross,
            cross_end, nbytes)
    MEMBERS(Wanted, sample, position, rank)
    MEMBERS(BatchPlan, items, run_local, run_position, run_length, sorted, num_items, num_runs,
            num_wanted, nbytes, fetched, num_fetched)
    MEMBERS(Target, raw, out, is_wanted, capacity, offsets)
    MEMBERS(Store, most_chunk_nbytes)
    MEMBERS(Sources, sources, count, most_open, most_files, io, gives_back, trusted_ns)
    MEMBERS(Selected, plan, field, target, of, sources, worker, num_samples, samples, places, count,
            out, row_nbytes, may_keep, in_order, numbers)
    MEMBERS(Job, plan, targets, samples, rows, begun_ns, state, is_planned, is_kept, generation)
    MEMBERS(KeptSamples, fields, sources, numbers, start, step, count, stamps, state)
    MEMBERS(UploadedSlot, host, places, device, places_on_device, uploaded, ready, released, graph)
    MEMBERS(Uploads, cuCtxPushCurrent_v2, cuCtxPopCurrent_v2, cuMemcpyHtoDAsync_v2, cuEventRecord,
            cuEventQuery, cuEventSynchronize, cuStreamWaitEvent, cuGraphLaunch, context, copy_stream,
            work_stream, slots, begins, row_nbytes, num_columns, rows, nbytes)
    MEMBERS(Queue, fields, sources, jobs, num_fields, num_samples, num_jobs, num_threads, selected,
            start, step, table, num_columns, num_cores, is_remote, kept, uploads, reads_files, tickets, num_idle,
            fill_ns, spinners, workers, num_inside, num_changes)
    MEMBERS(Taken, batches, samples, waits, wait_ns, at_ns)
    MEMBERS(EpochEnd, begin, end, done, epoch, count)
    MEMBERS(Turns, queue, worker, num_slots, slot_of, waits_ns, num_samples, draw, is_lent, is_inside,
            is_alone, waits_not, is_open, num_reading, fields, array, lasting, spare, next, asked, held, assigned, reads_ahead, loops, given_begin, given_end,
            given, next_in_run, first, stop, stride, count, epoch_end,
            epoch_batches, num_epochs, epochs, epoch, number, type, made, later, size, index, samples, run, names, arrays, part, on_left, on_epoch,
            taken, before, begun, is_in_epoch, ends, num_ends, changes, num_rows)
    MEMBERS(Window, unit, count, names, bounds, delay, begin, drawn, roots, root, last_root, num_units, size,
            window, group_rounds, block_rounds, num_blocks, skip, num_samples, blocks, keys)
    MEMBERS(Curl, curl_global_init, curl_easy_init, curl_easy_setopt, curl_easy_getinfo,
            curl_easy_cleanup, curl_multi_init, curl_multi_setopt, curl_multi_add_handle,
            curl_multi_remove_handle, curl_multi_perform, curl_multi_poll, curl_multi_info_read,
            curl_multi_cleanup, curl_slist_append, curl_slist_free_all)
    MEMBERS(HttpRange, offset, nbytes, into, status, got)
    MEMBERS(HttpCall, url, headers, etag, ca_file, protocols, ranges, stop, num_ranges, object_nbytes,
            most_at_once, most_redirects)
    {0},
};

PUBLIC const Structure *h5async_structures(void)
{
    return ALL_STRUCTURES;
}

PUBLIC int64_t h5async_abi(void)
{
    return ABI;
}
