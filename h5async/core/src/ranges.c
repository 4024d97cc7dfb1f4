/* Reads ranges of a source as they are stored. */

typedef struct {
    File *file;
    const Worker *w;
    const Pieces *pieces;
    int64_t done; /* the number read before the first that cannot be */
} PiecesCall;

/* Uses the map only if it is the only way: a read costs little more than a copy from the map. */
static void read_pieces(void *data)
{
    PiecesCall *call = data;
    File *file = call->file;
    int is_mapped = file->map != NULL && (file->io == IO_MAP || file->fd < 0);
    call->done = is_mapped ? copy_pieces(file, call->w, call->pieces, mappable_nbytes(file))
                           : pread_pieces(file, call->w, call->pieces);
}

/* Read `nbytes[i]` bytes at `offset[i]` of a source into `base + target[i]`, for each i up to the first
   that cannot be read. Returns the number read: 0 if the source has changed since it was indexed. */
PUBLIC int64_t h5async_read_ranges(Sources *sources, Worker *w, const int64_t *offset,
                                   const int64_t *nbytes, const int64_t *target, uint8_t *base,
                                   int64_t base_nbytes, int64_t count, int64_t number)
{
    int64_t since = now_ns(), valid = 0;
    File file;
    Source *source = acquire_source(sources, number, &file);
    if (source == NULL)
        return 0;
    begin_tracing(w);
    while (valid < count && nbytes[valid] >= 0 && nbytes[valid] <= base_nbytes &&
           target[valid] >= 0 && target[valid] <= base_nbytes - nbytes[valid] &&
           offset[valid] >= 0 && offset[valid] <= INT64_MAX - nbytes[valid])
        valid++;
    Pieces pieces = {.offset = offset, .nbytes = nbytes, .position = target, .count = valid,
                     .unit = 1, .base = base};
    PiecesCall call = {&file, w, &pieces, 0};
    if (valid > 0 && is_as_indexed(&file)) {
        if (file.map != NULL)
            install_guard();
        if (!read_guarded(&file, read_pieces, &call))
            call.done = 0;
    }
    add_done(&w->done.read_nbytes, sum_of(nbytes, call.done));
    release_source(sources, source, &file);
    end_stage(w, READING, &since);
    end_tracing(w);
    w->returned_ns = since;
    return call.done;
}
