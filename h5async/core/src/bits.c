/* Undoes the filters that reorder bytes or bits: shuffle and bitshuffle. */

#if defined(SSE2)
/* Each round interleaves the first half of the vectors with the second half. */
#define INTERLEAVE_HALVES(vectors, count, low, high)                                              \
    for (int round = 1; round < count; round *= 2) {                                              \
        __m128i mixed[count];                                                                     \
        for (int p = 0; p < count / 2; p++) {                                                     \
            mixed[2 * p] = low(vectors[p], vectors[p + count / 2]);                               \
            mixed[2 * p + 1] = high(vectors[p], vectors[p + count / 2]);                          \
        }                                                                                         \
        memcpy(vectors, mixed, sizeof mixed);                                                     \
    }

/* Interleaves 16 bytes of each of `e` planes. */
#define INTERLEAVE(e)                                                                             \
    static int64_t interleave_##e(const uint8_t *const *planes, int64_t count, uint8_t *out)      \
    {                                                                                             \
        int64_t i = 0;                                                                            \
        for (; i + 16 <= count; i += 16) {                                                        \
            __m128i a[e];                                                                         \
            for (int p = 0; p < e; p++)                                                           \
                a[p] = _mm_loadu_si128((const __m128i *)(planes[p] + i));                         \
            INTERLEAVE_HALVES(a, e, _mm_unpacklo_epi8, _mm_unpackhi_epi8)                         \
            for (int p = 0; p < e; p++)                                                           \
                _mm_storeu_si128((__m128i *)(out + i * e + 16 * p), a[p]);                        \
        }                                                                                         \
        return i;                                                                                 \
    }
INTERLEAVE(2)
INTERLEAVE(4)
INTERLEAVE(8)
INTERLEAVE(16)
#endif

enum { MOST_PLANES = 16 };

/* Interleave at most MOST_PLANES separate planes of `count` bytes into `count` elements. */
static void interleave_planes(const uint8_t *const *planes, int64_t count, int64_t element,
                              uint8_t *out)
{
    int64_t i = 0;
#if defined(SSE2)
    if (element == 2)
        i = interleave_2(planes, count, out);
    else if (element == 4)
        i = interleave_4(planes, count, out);
    else if (element == 8)
        i = interleave_8(planes, count, out);
    else if (element == 16)
        i = interleave_16(planes, count, out);
#endif
    for (int64_t end; i < count; i = end) {
        end = i + 256 < count ? i + 256 : count;
        for (int64_t p = 0; p < element; p++)
            for (int64_t k = i; k < end; k++)
                out[k * element + p] = planes[p][k];
    }
}

static void interleave(const uint8_t *in, int64_t count, int64_t element, uint8_t *out)
{
    const uint8_t *planes[MOST_PLANES];
    if (element == 1) {
        memcpy(out, in, (size_t)count);
        return;
    }
    if (element <= MOST_PLANES) {
        for (int64_t p = 0; p < element; p++)
            planes[p] = in + p * count;
        interleave_planes(planes, count, element, out);
        return;
    }
    for (int64_t i = 0, end; i < count; i = end) {
        end = i + 256 < count ? i + 256 : count;
        for (int64_t p = 0; p < element; p++)
            for (int64_t k = i; k < end; k++)
                out[k * element + p] = in[p * count + k];
    }
}

static int64_t unshuffle(const uint8_t *in, int64_t n, int64_t element, uint8_t *out, int64_t room)
{
    if (n > room)
        return -1;
    int64_t count = n / element, body = count * element;
    interleave(in, count, element, out);
    memcpy(out + body, in + body, (size_t)(n - body));
    return n;
}

/* Transpose each 64 bits as a square of 8 x 8 bits (Warren, Hacker's Delight, 7-3). */
ALWAYS_INLINE void transpose_bits_inline(uint8_t *data, int64_t squares)
{
    for (int64_t i = 0; i < squares; i++) {
        uint64_t x, t;
        memcpy(&x, data + 8 * i, 8);
        t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAu;
        x = x ^ t ^ (t << 7);
        t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCu;
        x = x ^ t ^ (t << 14);
        t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0u;
        x = x ^ t ^ (t << 28);
        memcpy(data + 8 * i, &x, 8);
    }
}

ALSO_FOR_AVX2(transpose_bits, (uint8_t *data, int64_t squares), (data, squares))

/* Undo one block of a multiple of 8 elements, stored as 8 rows of bits per byte of an element. */
static void unbitshuffle_block(const uint8_t *in, int64_t count, int64_t element, uint8_t *planes,
                               uint8_t *out)
{
    uint8_t *to = element == 1 ? out : planes;
    for (int64_t p = 0; p < element; p++) {
        interleave(in + p * count, count / 8, 8, to + p * count);
        transpose_bits(to + p * count, count / 8);
    }
    if (element > 1)
        interleave(planes, count, element, out);
}

static int64_t default_block(int64_t element)
{
    int64_t block = 8192 / element / 8 * 8;
    return block > 128 ? block : 128;
}

static int64_t unbitshuffle(Worker *w, const uint8_t *in, int64_t n, const Filter *f, uint8_t *out,
                            int64_t room)
{
    int64_t element = f->element, block = f->block ? f->block : default_block(element);
    int64_t count = n / element, whole = count / 8 * 8;
    if (n > room || n % element || block % 8)
        return -1;
    block = block < whole ? block : whole;
    if (block > w->between_nbytes / element)
        return -1;
    for (int64_t at = 0; at < whole; at += block) {
        int64_t size = whole - at < block ? whole - at : block;
        unbitshuffle_block(in + at * element, size, element, w->between[2], out + at * element);
    }
    memcpy(out + whole * element, in + whole * element, (size_t)((count - whole) * element));
    return n;
}

/* Decompress each block, then undo its bitshuffle. */
static int64_t unbitshuffle_blocks(Worker *w, const uint8_t *in, int64_t n, const Filter *f,
                                   uint8_t *out, int64_t room)
{
    int64_t element = f->element;
    Blocks b;
    if (!read_head(in, n, &b) || b.nbytes > room || b.nbytes % element || b.block % (8 * element))
        return -1;
    int64_t body = b.nbytes / (8 * element) * (8 * element);
    int64_t block = b.block < body ? b.block : body;
    if (block > w->between_nbytes / 2)
        return -1;
    uint8_t *shuffled = w->between[2], *planes = w->between[2] + block;
    for (int64_t done = 0; done < body; done += block) {
        int64_t expected = body - done < block ? body - done : block, length;
        const uint8_t *from = next_block(&b, &length);
        if (from == NULL ||
            (f->kind == BITSHUFFLE_LZ4 ? unlz4 : unzstd)(w, from, length, shuffled, expected) !=
                expected)
            return -1;
        unbitshuffle_block(shuffled, expected / element, element, planes, out + done);
    }
    if (b.nbytes - body > b.n - b.at)
        return -1;
    memcpy(out + body, in + b.at, (size_t)(b.nbytes - body));
    return b.nbytes;
}
