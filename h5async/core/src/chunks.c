/* Reads and decodes a chunk, and copies its samples into the batch. */

/* Read the wanted samples of an unfiltered chunk into the scratch buffer. */
static int read_raw_samples(const Dataset *d, Worker *w, File *file, int64_t offset,
                            const Runs *runs)
{
    int64_t stride = d->sample_stride;
    if (d->chunk_nbytes > w->chunk_nbytes)
        return fail(w, NO_ROOM, -1, w->chunk_nbytes, d->chunk_nbytes);
    if (stride * d->chunk_samples != d->chunk_nbytes)
        return read_fully(file, offset, w->chunk, d->chunk_nbytes);
    for (int64_t r = 0; r < runs->count; r++)
        if (!read_fully(file, offset + runs->local[r] * stride, w->chunk + runs->local[r] * stride,
                        runs->length[r] * stride))
            return 0;
    return 1;
}

/* The number of bytes read of an unfiltered chunk for a piece of the samples in `runs`. */
static int64_t raw_nbytes(const Dataset *d, const Piece *piece, const Runs *runs)
{
    int64_t samples = 0;
    for (int64_t r = 0; r < runs->count; r++)
        samples += runs->length[r];
    int64_t most = d->crop ? d->row_nbytes : piece_nbytes(piece);
    if (d->begin >= 0)
        return samples * most;
    if (d->sample_stride * d->chunk_samples != d->chunk_nbytes)
        return d->chunk_nbytes;
    return samples * (most < d->sample_stride ? most : d->sample_stride);
}

/* A chunk to read: how it is encoded, where it is stored, and where its samples go. */
typedef struct {
    Dataset d;
    Worker *w;
    File *file;
    int64_t is_stored, offset, stored; /* is_stored 0: it was never allocated */
    uint32_t mask;
    int64_t available; /* bytes that may be read from the map */
    uint8_t *batch;
    int64_t last_ns;
} Call;

enum { DIRECT_NBYTES = 4096 }; /* from this size on, the read itself costs more than the system call */

/* Read a piece of an unfiltered sample, line by line: each line in one read, including the gaps between
   its elements; or, if the elements are large, each directly to its destination. `line` holds one line. */
static int read_lines(const Call *call, const Piece *piece, int64_t from, uint8_t *to, uint8_t *line)
{
    const Dim inner = piece->rank ? piece->dims[piece->rank - 1] : ONE_LINE;
    const int are_large = piece->unit >= DIRECT_NBYTES;
    Place at = first_place(piece);
    do {
        if (is_stopped(call->file, call->w) ||
            !read_fully(call->file, from + at.from, are_large ? to + at.to : line,
                        are_large ? piece->unit : line_nbytes(piece)))
            return 0;
        if (!are_large)
            copy_elements(line, inner.from_stride, to + at.to, inner.to_stride, inner.extent,
                          piece->unit);
    } while (go_on(piece, are_large ? piece->rank : piece->rank - 1, &at));
    return 1;
}

/* Read unfiltered samples that are stored one after the other, one by one, without a map. */
static int read_raw_lines(Call *call, const Piece *piece, const Runs *runs)
{
    const Dataset *d = &call->d;
    uint8_t *line = NULL; /* holds the longest line so far: the lines of crops differ */
    int64_t room = 0;
    int is_good = 1;
    for (int64_t r = 0; is_good && r < runs->count; r++)
        for (int64_t k = 0; is_good && k < runs->length[r]; k++) {
            const int64_t local = runs->local[r] + k, position = runs->position[r] + k;
            Piece own;
            const Piece *p = piece_at(d, piece, position, &own);
            if (p == NULL)
                continue;
            if (line_nbytes(p) > room) {
                free(line);
                room = line_nbytes(p);
                line = malloc((size_t)room);
            }
            is_good = line != NULL
                          ? read_lines(call, p, call->offset + local * d->sample_stride + p->from,
                                       call->batch + position * d->row_nbytes, line)
                          : fail(call->w, NO_ROOM, -1, 0, room);
            add_done(&call->w->done.read_nbytes, is_good ? piece_nbytes(p) : 0);
        }
    free(line);
    end_stage(call->w, READING, &call->last_ns);
    return is_good;
}

/* Read a chunk; `state` says whether to decode it into the scratch buffer or into the store's memory
   (`target`), or whether it is already decoded there. The runs map samples of the chunk to rows of the
   batch. */
static int read_chunk(Call *call, int64_t cross, const Runs *runs, enum State state, uint8_t *target)
{
    const Dataset *d = &call->d;
    const int64_t offset = call->offset, stored = call->stored;
    Worker *w = call->w;
    Piece piece;
    if (cross < 0 || cross >= d->num_cross || !piece_of(d, cross, &piece))
        return 0;
    if (!call->is_stored) {
        place_fill(d, &piece, runs, call->batch);
        return 1;
    }
    if (state == IN_TARGET) {
        place(d, &piece, runs, target, call->batch);
        end_stage(w, PLACING, &call->last_ns);
        return 1;
    }
    if (offset < 0 || stored < 0 || offset > INT64_MAX - stored)
        return 0;
    const uint8_t *in = stored <= call->available && offset <= call->available - stored
                            ? call->file->map + offset
                            : fetched_at(call->file, offset, stored);
    if (in == NULL && d->begin >= 0 && d->sample_stride * d->chunk_samples == d->chunk_nbytes &&
        call->file->map == NULL)
        return read_raw_lines(call, &piece, runs);
    if (in == NULL && (call->file->io == IO_MAP || call->available > 0 || d->begin >= 0))
        return fail(w, d->begin >= 0 || call->file->map == NULL ? NOT_MAPPED : UNREADABLE, -1,
                    offset + stored, call->available); /* the file is too short, or must be read by map */
    int raw = is_raw(d, call->mask);
    int is_whole = state == TO_SCRATCH && d->rows_are_whole && runs->count == 1 &&
                   runs->length[0] == d->chunk_samples &&
                   d->chunk_samples * d->row_nbytes == d->chunk_nbytes;
    uint8_t *whole = is_whole ? call->batch + runs->position[0] * d->row_nbytes : NULL;
    const int is_scratch = state == TO_SCRATCH && !whole;
    if (raw && stored != d->chunk_nbytes)
        return fail(w, WRONG_SIZE, -1, d->chunk_nbytes, stored);
    int are_apart = d->sample_stride * d->chunk_samples == d->chunk_nbytes;
    int is_part = d->crop || piece_nbytes(&piece) < d->sample_stride ||
                  d->chunk_nbytes > w->chunk_nbytes;
    if (in == NULL && raw && is_scratch && are_apart && is_part)
        return read_raw_lines(call, &piece, runs);
    uint8_t *to = !raw ? w->encoded : state == TO_TARGET ? target : whole ? whole : w->chunk;
    if (in == NULL) {
        if (!raw && stored > w->encoded_nbytes)
            return fail(w, NO_ROOM, -1, w->encoded_nbytes, stored);
        if (raw && is_scratch ? !read_raw_samples(d, w, call->file, offset, runs)
                                  : !read_fully(call->file, offset, to, stored))
            return 0;
        in = to;
        end_stage(w, READING, &call->last_ns);
    } else if (raw && !is_scratch) {
        memcpy(to, in, (size_t)stored);
        in = to;
        end_stage(w, READING, &call->last_ns);
    }
    add_done(&w->done.read_nbytes,
             raw && state == TO_SCRATCH ? raw_nbytes(d, &piece, runs) : stored);
    if (!raw) {
        uint8_t *out = whole ? whole : state == TO_TARGET ? target : w->chunk;
        if (out == w->chunk && d->chunk_nbytes > w->chunk_nbytes)
            return fail(w, NO_ROOM, -1, w->chunk_nbytes, d->chunk_nbytes);
        if (!decode(d, w, in, stored, call->mask, out))
            return 0;
        in = out;
        add_done(&w->done.decoded_chunks, 1);
        add_done(&w->done.decoded_nbytes, d->chunk_nbytes);
        end_stage(w, DECODING, &call->last_ns);
    }
    if (!whole) {
        place(d, &piece, runs, in, call->batch);
        end_stage(w, raw ? READING : PLACING, &call->last_ns);
    }
    return 1;
}
