/* Decodes a chunk: undoes all its filters and checks the decoded length. */

static int64_t undo(Worker *w, const Filter *f, const uint8_t *in, int64_t n, uint8_t *out,
                    int64_t room)
{
    switch (f->kind) {
    case DEFLATE:
        return inflate(w, in, n, out, room);
    case SHUFFLE:
        return unshuffle(in, n, f->element, out, room);
    case LZF:
        return unlzf(in, n, out, room);
    case ZSTD:
        return unzstd(w, in, n, out, room);
    case LZ4:
        return unlz4_blocks(w, in, n, out, room);
    case BLOSC:
        return unblosc(w, in, n, out, room);
    case BITSHUFFLE:
        return unbitshuffle(w, in, n, f, out, room);
    case BITSHUFFLE_LZ4:
    case BITSHUFFLE_ZSTD:
        return unbitshuffle_blocks(w, in, n, f, out, room);
    case PLUGIN:
        return unplug(w, f, in, n, out, room);
    case BZIP2:
        return unbzip2(w, in, n, out, room);
    case SZIP:
        return unszip(w, f, in, n, out, room);
    case NBIT:
        return unpack_bits(f, in, n, out, room);
    case SCALEOFFSET:
        return unscale(f, in, n, out, room);
    case STORED:
        return convert_stored(f, in, n, out, room);
    default:
        return -1;
    }
}

static int is_skipped(uint32_t mask, int64_t filter)
{
    return filter < 32 && (mask >> filter & 1);
}

static int is_raw(const Dataset *d, uint32_t mask)
{
    for (int64_t i = 0; i < d->num_filters; i++)
        if (!is_skipped(mask, i))
            return 0;
    return 1;
}

/* Decode a chunk to exactly `chunk_nbytes` bytes at `out`; or, if the caller allows it (`least_nbytes`),
   to fewer, padded with zeros. */
static int decode(const Dataset *d, Worker *w, const uint8_t *in, int64_t n, uint32_t mask,
                  uint8_t *out)
{
    int64_t expected[MAX_FILTERS], nbytes = d->chunk_nbytes, first = -1;
    const int64_t least = w->least_nbytes > 0 ? w->least_nbytes : nbytes;
    for (int64_t i = 0; i < d->num_filters; i++) {
        if (is_skipped(mask, i))
            continue;
        int32_t kind = d->filters[i].kind;
        first = first < 0 ? i : first;
        expected[i] = nbytes;
        if (kind == FLETCHER32)
            nbytes = nbytes < 0 ? -1 : nbytes + 4;
        else if (kind == STORED)
            nbytes = nbytes / d->filters[i].values[0] * d->filters[i].values[1];
        else if (kind != SHUFFLE && kind != BITSHUFFLE && kind != NOTHING)
            nbytes = -1;
    }
    int now = 0;
    for (int64_t i = d->num_filters - 1; i >= 0 && first >= 0; i--) {
        const Filter *f = &d->filters[i];
        if (is_skipped(mask, i))
            continue;
        if (f->kind == FLETCHER32) {
            n = fletcher32(in, n);
        } else if (f->kind != NOTHING) {
            uint8_t *to = i == first ? out : w->between[now];
            int64_t room = expected[i] < 0 ? w->between_nbytes : expected[i];
            if (i != first && room > w->between_nbytes)
                return fail(w, NO_ROOM, i, w->between_nbytes, room);
            n = undo(w, f, in, n, to, room);
            in = to;
            now = 1 - now;
        }
        if (n < 0)
            return fail(w, DAMAGED, i, expected[i], n);
        if (expected[i] >= 0 && (n > expected[i] || n < least - d->chunk_nbytes + expected[i]))
            return fail(w, WRONG_SIZE, i, expected[i], n);
    }
    if (n < least || n > d->chunk_nbytes)
        return fail(w, WRONG_SIZE, -1, d->chunk_nbytes, n);
    if (in != out)
        memcpy(out, in, (size_t)n);
    memset(out + n, 0, (size_t)(d->chunk_nbytes - n));
    return 1;
}

/* Decode one chunk to exactly `room` bytes; returns whether that succeeded. */
PUBLIC int64_t h5async_decode(const Filter *filters, Worker *w, const uint8_t *in, uint8_t *out,
                              int64_t num_filters, int64_t n, int64_t mask, int64_t room)
{
    Dataset d = {.filters = filters, .num_filters = num_filters, .chunk_nbytes = room};
    return decode(&d, w, in, n, (uint32_t)mask, out);
}
