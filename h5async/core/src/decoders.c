/* Undoes single filters. Each function returns the number of decoded bytes, or -1 if the encoded bytes
   are damaged. */

/* Copy `in` to memory that the worker owns, with room for `more` bytes. A decoder that allocated its own
   would leak it if a page of the file's map cannot be read; this memory is freed by the next call. */
static uint8_t *hold(Worker *w, const uint8_t *in, int64_t n, int64_t more)
{
    free(w->held);
    w->held = more > INT64_MAX - n - 1 ? NULL : malloc((size_t)(n + more + 1));
    if (w->held != NULL)
        memcpy(w->held, in, (size_t)n);
    return w->held;
}

static int64_t inflate(Worker *w, const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    size_t count = 0;
    const Libraries *l = w->libraries;
    if (l->libdeflate_zlib_decompress == NULL || (w->deflate == NULL && !(w->deflate = l->libdeflate_alloc_decompressor())))
        return -1;
    if (l->libdeflate_zlib_decompress(w->deflate, in, (size_t)n, out, (size_t)room, &count) != 0)
        return -1;
    return (int64_t)count;
}

static int64_t unzstd(Worker *w, const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    const Libraries *l = w->libraries;
    if (l->ZSTD_decompressDCtx == NULL || (w->zstd == NULL && !(w->zstd = l->ZSTD_createDCtx())))
        return -1;
    size_t count = l->ZSTD_decompressDCtx(w->zstd, out, (size_t)room, in, (size_t)n);
    return l->ZSTD_isError(count) ? -1 : (int64_t)count;
}

/* Uses the library, because HDF5's plugin never returns on a truncated stream. */
static int64_t unbzip2(Worker *w, const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    unsigned count = room > UINT32_MAX ? UINT32_MAX : (unsigned)room;
    uint8_t *encoded = n > UINT32_MAX || w->libraries->BZ2_bzBuffToBuffDecompress == NULL
                           ? NULL
                           : hold(w, in, n, 0);
    if (encoded == NULL || w->libraries->BZ2_bzBuffToBuffDecompress(
                               (char *)out, &count, (char *)encoded, (unsigned)n, 0, 0) != 0)
        return -1;
    return count;
}

static int64_t unlz4(Worker *w, const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    if (w->libraries->LZ4_decompress_safe == NULL || n > INT32_MAX)
        return -1;
    if (room > INT32_MAX)
        room = INT32_MAX;
    return w->libraries->LZ4_decompress_safe((const char *)in, (char *)out, (int)n, (int)room);
}

static uint32_t little32(const uint8_t *in)
{
    uint32_t value;
    memcpy(&value, in, 4);
    return value;
}

static int64_t big32(const uint8_t *in)
{
    return (int64_t)__builtin_bswap32(little32(in));
}

static int64_t big64(const uint8_t *in)
{
    uint64_t value;
    memcpy(&value, in, 8);
    value = __builtin_bswap64(value);
    return value > INT64_MAX ? INT64_MAX : (int64_t)value;
}

/* The framing shared by the lz4 and bitshuffle filters: the number of decoded bytes, in total and per
   block; then the blocks, each preceded by its length. */
typedef struct {
    const uint8_t *in;
    int64_t n, at, nbytes, block; /* at: end of what has been read */
} Blocks;

static int read_head(const uint8_t *in, int64_t n, Blocks *b)
{
    if (n < 12)
        return 0;
    *b = (Blocks){in, n, 12, big64(in), big32(in + 8)};
    return b->block > 0;
}

/* Return the next block, or NULL if it is truncated. */
static const uint8_t *next_block(Blocks *b, int64_t *length)
{
    if (b->n - b->at < 4)
        return NULL;
    *length = big32(b->in + b->at);
    b->at += 4;
    if (*length > b->n - b->at)
        return NULL;
    b->at += *length;
    return b->in + b->at - *length;
}

static int64_t unlz4_blocks(Worker *w, const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    Blocks b;
    if (!read_head(in, n, &b) || b.nbytes > room || b.block > MAX_LZ4_NBYTES)
        return -1;
    for (int64_t done = 0; done < b.nbytes; done += b.block) {
        int64_t expected = b.nbytes - done < b.block ? b.nbytes - done : b.block, length;
        const uint8_t *from = next_block(&b, &length);
        if (from == NULL)
            return -1;
        if (length == expected)
            memcpy(out + done, from, (size_t)expected);
        else if (unlz4(w, from, length, out + done, expected) != expected)
            return -1;
    }
    return b.nbytes;
}

/* Where there is room, copies more than needed: words of 8 bytes for matches, 32 bytes for literals. */
static int64_t unlzf(const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    const uint8_t *const end = in + n;
    uint8_t *to = out, *const limit = out + room;
    if (n == 0)
        return -1;
    while (in < end) {
        int64_t length, control = *in++;
        if (control < 32) {
            length = control + 1;
            if (length > end - in || length > limit - to)
                return -1;
            if (end - in >= 32 && limit - to >= 32)
                memcpy(to, in, 32);
            else
                memcpy(to, in, (size_t)length);
            in += length, to += length;
            continue;
        }
        length = control >> 5;
        if (length == 7) {
            if (in == end)
                return -1;
            length += *in++;
        }
        length += 2;
        if (in == end)
            return -1;
        int64_t back = ((control & 31) << 8) + *in++ + 1;
        if (back > to - out || length > limit - to)
            return -1;
        const uint8_t *from = to - back;
        uint8_t *const stop = to + length;
        if (back >= 8 && limit - stop >= 8) {
            for (; to < stop; to += 8, from += 8)
                memcpy(to, from, 8);
            to = stop;
        } else if (back == 1) {
            memset(to, *from, (size_t)length);
            to = stop;
        } else {
            while (to < stop)
                *to++ = *from++;
        }
    }
    return to - out;
}

/* Return the number of bytes before the checksum in the last 4 bytes, or -1 if it does not match: sums
   modulo 65535 of big-endian words, with 65535 not reduced to zero; each half may have either byte order. */
static int64_t fletcher32(const uint8_t *in, int64_t n)
{
    uint64_t sum1 = 0, sum2 = 0;
    if (n < 4)
        return -1;
    n -= 4;
    int64_t words = n / 2, at = 0;
    while (at < words) {
        int64_t block = words - at < 256 ? words - at : 256;
        uint32_t plain = 0, weighted = 0; /* 65535 * 256 * 257 / 2 fits 32 bits */
        for (int64_t i = 0; i < block; i++) {
            uint16_t word;
            memcpy(&word, in + 2 * (at + i), 2);
            uint32_t value = (uint16_t)(word << 8 | word >> 8);
            plain += value;
            weighted += value * (uint32_t)(block - i);
        }
        sum2 += (uint64_t)block * sum1 + weighted;
        sum1 += plain;
        sum1 = (sum1 & 0xffff) + (sum1 >> 16);
        sum2 = (sum2 & 0xffff) + (sum2 >> 16);
        at += block;
    }
    if (n & 1) {
        sum1 += (uint64_t)in[n - 1] << 8;
        sum2 += sum1;
    }
    for (int i = 0; i < 4; i++) {
        sum1 = (sum1 & 0xffff) + (sum1 >> 16);
        sum2 = (sum2 & 0xffff) + (sum2 >> 16);
    }
    uint32_t computed = (uint32_t)(sum2 << 16 | sum1);
    uint32_t swapped = (computed & 0x00ff00ff) << 8 | (computed >> 8 & 0x00ff00ff);
    uint32_t stored = little32(in + n);
    return stored == computed || stored == swapped ? n : -1;
}
