/* Cuts encoded chunks into their independently compressed blocks.

   A GPU then decodes all blocks of a batch at once. Lengths, headers and checksums are checked, but no
   block is decoded here. A chunk that the host's decoders would refuse is never cut, and any unusual
   chunk is left to them. */

typedef struct {
    const uint8_t *base;
    const int64_t *position, *nbytes; /* [count]: offsets of the encoded chunks from `base` */
    int64_t base_nbytes, count;
    int32_t kind, has_checksum;       /* kind NOTHING: uncompressed; has_checksum: Fletcher-32 at the end */
    int64_t element, block_nbytes;    /* BITSHUFFLE_*: bytes of an element, of a block */
    int64_t expected_nbytes, pitch;        /* size of a decoded chunk; chunk k goes to k * pitch */
    int64_t *source;                  /* [max_tasks]: offsets of the blocks from `base` */
    uint64_t *source_nbytes;
    int64_t *target;                  /* where they go */
    uint64_t *target_nbytes;
    int64_t *copy_source, *copy_target, *copy_nbytes; /* [max_copies]: uncompressed parts */
    uint32_t *adler;                  /* [count], DEFLATE: of the decoded chunk */
    int64_t max_tasks, max_copies, num_tasks, num_copies;
} Frames;

enum { ZSTD_BLOCK_NBYTES = 128 * 1024, ZSTD_MAX_WINDOW_LOG = 27 };
static const uint32_t ZSTD_FRAME = 0xFD2FB528u;

static int add_task(Frames *f, int64_t source, int64_t nbytes, int64_t target, int64_t expected)
{
    if (f->num_tasks >= f->max_tasks)
        return 0;
    f->source[f->num_tasks] = source, f->source_nbytes[f->num_tasks] = (uint64_t)nbytes;
    f->target[f->num_tasks] = target, f->target_nbytes[f->num_tasks] = (uint64_t)expected;
    f->num_tasks++;
    return 1;
}

static int add_copy(Frames *f, int64_t source, int64_t target, int64_t nbytes)
{
    if (f->num_copies >= f->max_copies)
        return 0;
    f->copy_source[f->num_copies] = source, f->copy_target[f->num_copies] = target;
    f->copy_nbytes[f->num_copies++] = nbytes;
    return 1;
}

/* Whether bytes begin with the header of a zlib frame without a dictionary, and are long enough for a
   stream and its checksum (RFC 1950). Only a decoder can find the end of the stream. */
static int is_zlib_frame(const uint8_t *in, int64_t n)
{
    return n > 6 && (in[0] & 15) == 8 && in[0] >> 4 <= 7 && !(in[1] & 0x20) &&
           (in[0] << 8 | in[1]) % 31 == 0;
}

/* Whether bytes are exactly one zstd frame that may decode to `expected` bytes (RFC 8878), by the headers
   of all its blocks. Refuses frames with a dictionary, or with a checksum, because not every decoder
   verifies it. */
static int is_zstd_frame(const uint8_t *in, int64_t n, int64_t expected)
{
    if (n < 9 || little32(in) != ZSTD_FRAME || in[4] & 0x1F)
        return 0;
    int is_single = in[4] >> 5 & 1, flag = in[4] >> 6;
    int64_t width = flag ? 1 << flag : is_single, at = 5, window = expected;
    if (!is_single) {
        if ((in[at] >> 3) + 10 > ZSTD_MAX_WINDOW_LOG)
            return 0;
        window = (int64_t)1 << ((in[at] >> 3) + 10);
        window += window / 8 * (in[at] & 7);
        at++;
    }
    if (width > n - at)
        return 0;
    uint64_t content = width == 2 ? 256 : 0;
    for (int64_t i = 0; i < width; i++)
        content += (uint64_t)in[at + i] << (8 * i);
    if (width > 0 && content != (uint64_t)expected)
        return 0;
    at += width;
    int64_t most = window < ZSTD_BLOCK_NBYTES ? window : ZSTD_BLOCK_NBYTES;
    for (int is_last = 0; !is_last;) {
        if (n - at < 3)
            return 0;
        int header = in[at] | in[at + 1] << 8 | in[at + 2] << 16, type = header >> 1 & 3;
        int64_t size = header >> 3, encoded = type == 1 ? 1 : size; /* type 1: one byte, repeated */
        is_last = header & 1;
        at += 3;
        if (type == 3 || size > most || encoded > n - at)
            return 0;
        at += encoded;
    }
    return at == n;
}

/* Cut one of a chunk's blocks, which are each preceded by their length. */
static int cut_block(Frames *f, int64_t at, int64_t n, int64_t target, int64_t expected)
{
    switch (f->kind) {
    case LZ4: /* a block as long as its content is stored uncompressed, so none is longer */
        if (n == expected)
            return add_copy(f, at, target, expected);
        return n > 0 && n < expected && add_task(f, at, n, target, expected);
    case BITSHUFFLE_LZ4: /* always compressed, even if that makes it longer */
        return n > 0 && n <= expected + expected / 255 + 16 && add_task(f, at, n, target, expected);
    default:
        return is_zstd_frame(f->base + at, n, expected) && add_task(f, at, n, target, expected);
    }
}

/* Bitshuffle stores up to 7 elements at the end unchanged: they do not fill an 8 x 8 square of bits. */
static int cut_blocks(Frames *f, int64_t at, int64_t n, int64_t target)
{
    int64_t square = f->kind == LZ4 ? 1 : 8 * f->element;
    Blocks b;
    if (!read_head(f->base + at, n, &b) || b.nbytes != f->expected_nbytes ||
        b.block > MAX_LZ4_NBYTES || b.block % square ||
        (f->kind != LZ4 && b.block != f->block_nbytes))
        return 0;
    int64_t body = b.nbytes / square * square;
    for (int64_t done = 0; done < body; done += b.block) {
        int64_t expected = body - done < b.block ? body - done : b.block, length;
        const uint8_t *from = next_block(&b, &length);
        if (from == NULL || !cut_block(f, from - f->base, length, target + done, expected))
            return 0;
    }
    return n - b.at == b.nbytes - body &&
           (b.nbytes == body || add_copy(f, at + b.at, target + body, b.nbytes - body));
}

static int cut_chunk(Frames *f, int64_t k)
{
    int64_t at = f->position[k], n = f->nbytes[k], target = k * f->pitch;
    int64_t expected = f->expected_nbytes;
    if (at < 0 || n < 0 || n > f->base_nbytes || at > f->base_nbytes - n)
        return 0;
    const uint8_t *in = f->base + at;
    if (f->has_checksum && (n = fletcher32(in, n)) < 0)
        return 0;
    switch (f->kind) {
    case NOTHING:
        return n == expected && add_copy(f, at, target, n);
    case DEFLATE:
        if (!is_zlib_frame(in, n))
            return 0;
        f->adler[k] = (uint32_t)big32(in + n - 4);
        return add_task(f, at + 2, n - 6, target, expected);
    case ZSTD:
        return is_zstd_frame(in, n, expected) && add_task(f, at, n, target, expected);
    default:
        return cut_blocks(f, at, n, target);
    }
}

static int can_cut(const Frames *f)
{
    int is_shuffled = f->kind == BITSHUFFLE_LZ4 || f->kind == BITSHUFFLE_ZSTD;
    if (f->kind != NOTHING && f->kind != DEFLATE && f->kind != ZSTD && f->kind != LZ4 &&
        !is_shuffled)
        return 0;
    if (is_shuffled && (f->element < 1 || f->element > INT32_MAX || f->block_nbytes < 1))
        return 0;
    return f->base_nbytes >= 0 && f->expected_nbytes > 0 && f->pitch >= f->expected_nbytes &&
           f->count > 0 && f->count <= INT64_MAX / f->pitch;
}

/* Returns the number of chunks cut. Stops at the first one that is unusual in any way, or whose blocks
   there is no room for, and removes any blocks it had added for that chunk. */
PUBLIC int64_t h5async_cut_frames(Frames *f)
{
    int64_t done = 0;
    f->num_tasks = f->num_copies = 0;
    if (!can_cut(f))
        return 0;
    for (; done < f->count; done++) {
        int64_t num_tasks = f->num_tasks, num_copies = f->num_copies;
        if (!cut_chunk(f, done)) {
            f->num_tasks = num_tasks, f->num_copies = num_copies;
            break;
        }
    }
    return done;
}
