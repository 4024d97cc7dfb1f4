/* Undoes the blosc filter: with the library, except for shuffled chunks compressed by lz4 or zstd.

   A chunk is a header, the offsets of its blocks, and the blocks; a block is one stream, or one per byte
   of an element, each preceded by its length (c-blosc, README_CHUNK_FORMAT.rst). A stream that did not
   shrink is stored uncompressed, which is common for noisy numbers; the library would copy it first, but
   here it is unshuffled straight from the input. Anything unexpected is left to the library. */

enum { BLOSC_HEADER = 16, BLOSC_VERSION = 2, LEAST_SPLIT = 128 };
enum BloscFlag { IS_SHUFFLED = 0x01, IS_STORED = 0x02, IS_BITSHUFFLED = 0x04, IS_NEW = 0x08,
                 IS_NOT_SPLIT = 0x10 };

typedef struct {
    const uint8_t *in;
    int64_t n, nbytes, block, element, splits; /* n: stored bytes of the chunk */
    int is_lz4;
} Blosc;

/* Find the streams of the block at `at`, decoding the compressed ones to `room`; 0: one is damaged. */
static int blosc_planes(Worker *w, const Blosc *b, int64_t at, int64_t splits, int64_t nbytes,
                        uint8_t *room, const uint8_t **planes)
{
    for (int64_t p = 0; p < splits; p++, room += nbytes) {
        if (b->n - at < 4)
            return 0;
        int64_t length = little32(b->in + at);
        at += 4;
        if (length < 1 || length > b->n - at)
            return 0;
        planes[p] = length == nbytes ? b->in + at : room;
        if (length != nbytes &&
            (b->is_lz4 ? unlz4 : unzstd)(w, b->in + at, length, room, nbytes) != nbytes)
            return 0;
        at += length;
    }
    return 1;
}

/* Read the header; returns 0 if the chunk is left to the library. */
static int blosc_header(const uint8_t *in, int64_t n, Blosc *b)
{
    int flags = in[2], format = in[2] >> 5;
    *b = (Blosc){.in = in, .n = little32(in + 12), .nbytes = little32(in + 4),
                 .block = little32(in + 8), .element = in[3], .is_lz4 = format == 1};
    b->splits = !(flags & IS_NOT_SPLIT) && b->element <= MOST_PLANES &&
                        b->block / (b->element + !b->element) >= LEAST_SPLIT
                    ? b->element
                    : 1;
    return in[0] == BLOSC_VERSION && in[1] == 1 && (format == 1 || format == 4) &&
           (flags & (IS_SHUFFLED | IS_STORED | IS_BITSHUFFLED | IS_NEW)) == IS_SHUFFLED &&
           b->n <= n && b->element > 1 && b->block > 0 && b->block <= b->nbytes &&
           b->block % b->element == 0;
}

static int64_t unblosc_shuffled(Worker *w, const uint8_t *in, int64_t n, uint8_t *out)
{
    Blosc b;
    if (!blosc_header(in, n, &b) || b.block > w->between_nbytes)
        return -1;
    int64_t blocks = (b.nbytes + b.block - 1) / b.block;
    if (blocks > (b.n - BLOSC_HEADER) / 4)
        return -1;
    for (int64_t k = 0; k < blocks; k++) {
        const uint8_t *planes[MOST_PLANES];
        int64_t at = little32(in + BLOSC_HEADER + 4 * k), done = k * b.block;
        int64_t nbytes = b.nbytes - done < b.block ? b.nbytes - done : b.block;
        int64_t splits = nbytes < b.block ? 1 : b.splits;
        if (at < BLOSC_HEADER ||
            !blosc_planes(w, &b, at, splits, nbytes / splits, w->between[2], planes))
            return -1;
        if (splits > 1)
            interleave_planes(planes, nbytes / splits, b.element, out + done);
        else if (unshuffle(planes[0], nbytes, b.element, out + done, nbytes) != nbytes)
            return -1;
    }
    return b.nbytes;
}

static int64_t unblosc(Worker *w, const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    if (w->libraries->blosc_decompress_ctx == NULL || n < BLOSC_HEADER)
        return -1;
    int64_t nbytes = little32(in + 4), stored = little32(in + 12);
    if (stored > n || nbytes > room || nbytes > INT32_MAX)
        return -1;
    if (nbytes == 0)
        return 0;
    if (unblosc_shuffled(w, in, n, out) == nbytes)
        return nbytes;
    return w->libraries->blosc_decompress_ctx(in, out, (size_t)room, 1) == nbytes ? nbytes : -1;
}
