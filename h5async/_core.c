/* A slice of a read plan enters; rows of a batch leave: read, checked, decoded and put in place.

   It is called by ctypes, which drops the GIL for the call, and knows nothing of Python: no header
   of Python's is needed to build it, and one build serves every version of it. `core.py` declares
   the same structures and says what lies where; `execute.py` is its twin in Python.

   Each function returns how many items it did. It stops before the first that it cannot do (bytes
   that are missing, damaged or of another length than is due, a bound that does not hold) and
   leaves the reason to the twin, which does that one item again and has the words for it. So what
   is refused here need not be an error, but what is taken must be what the twin would give.

   Codecs are called through the public C interfaces of libdeflate, zstd, lz4 and c-blosc, by
   pointers that are handed over. Formats: HDF5's shuffle and Fletcher-32 (H5Zshuffle.c,
   H5Zfletcher32.c), LibLZF's stream (h5py's lzf_filter.c), the framing of lz4 (H5Zlz4.c) and of
   bitshuffle (bshuf_h5filter.c), the header of c-blosc (README_CHUNK_FORMAT.rst). */

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines; others do without"
#endif

/* With H5ASYNC_PORTABLE, what other processors and systems do is done here too, for tests. */
#if defined(H5ASYNC_PORTABLE)
#undef RWF_NOWAIT
#undef POSIX_FADV_WILLNEED
#endif
#if defined(__SSE2__) && !defined(H5ASYNC_PORTABLE)
#include <emmintrin.h>
#define SSE2
#endif
#if defined(__x86_64__) && !defined(H5ASYNC_PORTABLE)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define SSSE3 __attribute__((target("ssse3")))
#define HAS_AVX2() __builtin_cpu_supports("avx2")
#endif

#define PUBLIC __attribute__((visibility("default")))
#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { ABI = 2 };
enum { MAX_FILTERS = 32, MAX_RANK = 33, MAX_IOVEC = 1024, MAX_PROBES = 16 };
enum { ADVISED_NBYTES = 128 * 1024 }; /* Linux cuts longer requests to its window, often this */
enum { TILE_ELEMENTS = 8, TILE_NBYTES = 16 * 1024 };
enum { MAX_LZ4_NBYTES = 0x7E000000 }; /* LZ4_MAX_INPUT_SIZE */

enum Kind { DEFLATE = 1, SHUFFLE, FLETCHER32, LZF, ZSTD, LZ4, BLOSC, BITSHUFFLE,
            BITSHUFFLE_LZ4, BITSHUFFLE_ZSTD, NOTHING };
enum State { TO_SCRATCH = 0, TO_TARGET = 1, IN_TARGET = 2, SKIPPED = 3 };
enum Io { IO_AUTO = 0, IO_PREAD = 1, IO_MAP = 2 };

typedef struct {
    void *(*deflate_new)(void);
    void (*deflate_free)(void *);
    int (*zlib_decompress)(void *, const void *, size_t, void *, size_t, size_t *);
    void *(*zstd_new)(void);
    size_t (*zstd_free)(void *);
    size_t (*zstd_decompress)(void *, void *, size_t, const void *, size_t);
    unsigned (*zstd_is_error)(size_t);
    int (*lz4_decompress)(const char *, char *, int, int);
    int (*blosc_decompress)(const void *, void *, size_t, int);
} Libraries;

typedef struct {
    const Libraries *libraries;
    uint8_t *encoded, *chunk, *between[3];
    int64_t encoded_nbytes, chunk_nbytes, between_nbytes;
    void *deflate, *zstd;                 /* made when first needed */
    int64_t read_ns, decode_ns, place_ns; /* where the time went, summed up */
    int64_t read_nbytes, decoded_chunks;
    int64_t returned_ns;                  /* when the last call came to its end */
} Worker;

typedef struct {
    int32_t fd, io;
    const uint8_t *map; /* NULL: not mapped */
    int64_t map_nbytes;
} File;

typedef struct {
    int32_t kind, element; /* SHUFFLE, BITSHUFFLE*: bytes of an element */
    int64_t block;         /* BITSHUFFLE: elements of a block, 0: the default */
} Filter;

/* Of a dataset. `rank` counts all dimensions but that of the samples; its cross-section is the
   pieces that make up one sample, `num_cross` of them. */
typedef struct {
    const Filter *filters;
    const int64_t *chunk_offset, *chunk_stored;
    const uint32_t *chunk_mask;
    const int64_t *chunk_strides, *row_strides; /* [rank], bytes */
    const int64_t *extents;                     /* [num_cross][rank] */
    const int64_t *row_begin, *piece_begin;     /* [num_cross], bytes: in a row, in a chunk */
    const uint8_t *fill;                        /* [itemsize] */
    int64_t num_filters, num_chunks, num_cross, rank;
    int64_t chunk_nbytes, chunk_samples, sample_stride, itemsize, row_nbytes;
    int64_t rows_are_whole;
    int64_t begin; /* of a contiguous dataset, which is its own only chunk; else -1 */
} Dataset;

typedef struct {
    const int64_t *place;
    const int32_t *cross, *group;
    const int64_t *run_start, *run_local, *run_position, *run_length;
    int64_t num_items, num_groups, num_runs;
} ChunkPlan;

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- Bytes of a file ---------------------------------------------------------------------- */

static int64_t mappable_nbytes(const File *file)
{
    struct stat status;
    if (file->map == NULL || file->io == IO_PREAD || fstat(file->fd, &status) != 0)
        return 0;
    return status.st_size < file->map_nbytes ? status.st_size : file->map_nbytes;
}

/* Whether one byte can be had without waiting for a disk; not so where the system cannot tell. */
static int is_cached(const File *file, int64_t offset)
{
#ifdef RWF_NOWAIT
    uint8_t byte;
    struct iovec one = {&byte, 1};
    return preadv2(file->fd, &one, 1, offset, RWF_NOWAIT) == 1;
#else
    (void)file, (void)offset;
    return 0;
#endif
}

static void ask_for(const File *file, int64_t offset, int64_t nbytes)
{
#ifdef POSIX_FADV_WILLNEED
    if (offset < 0 || offset > INT64_MAX - ADVISED_NBYTES - nbytes)
        return;
    for (; nbytes > 0; offset += ADVISED_NBYTES, nbytes -= ADVISED_NBYTES)
        posix_fadvise(file->fd, offset, nbytes < ADVISED_NBYTES ? nbytes : ADVISED_NBYTES,
                      POSIX_FADV_WILLNEED);
#else
    (void)file, (void)offset, (void)nbytes;
#endif
}

static int read_fully(const File *file, int64_t offset, uint8_t *out, int64_t nbytes)
{
    while (nbytes > 0) {
        ssize_t count = pread(file->fd, out, (size_t)nbytes, offset);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return 0;
        offset += count, out += count, nbytes -= count;
    }
    return 1;
}

static void fill_elements(const uint8_t *fill, int64_t itemsize, uint8_t *out, int64_t nbytes)
{
    for (int64_t at = 0; at + itemsize <= nbytes; at += itemsize)
        memcpy(out + at, fill, (size_t)itemsize);
}

/* ---- Rows that lie in the file as they are ------------------------------------------------ */

typedef struct {
    const int64_t *offset, *position; /* position NULL: rows in order */
    int64_t num_items;
    uint8_t *rows;
    int64_t num_rows, row_nbytes;
    const uint8_t *fill;
    int64_t itemsize;
} Rows;

static uint8_t *row_of(const Rows *r, int64_t i)
{
    return r->rows + (r->position ? r->position[i] : i) * r->row_nbytes;
}

static int64_t valid_rows(const Rows *r)
{
    if (r->position == NULL)
        return r->num_items < r->num_rows ? r->num_items : r->num_rows;
    for (int64_t i = 0; i < r->num_items; i++)
        if (r->position[i] < 0 || r->position[i] >= r->num_rows)
            return i;
    return r->num_items;
}

static int rows_are_cached(const File *file, const Rows *r)
{
    int64_t step = r->num_items / MAX_PROBES + 1;
    for (int64_t i = 0; i < r->num_items; i += step)
        if (r->offset[i] >= 0 && (r->offset[i] > INT64_MAX - r->row_nbytes ||
                                  !is_cached(file, r->offset[i] + r->row_nbytes - 1)))
            return 0;
    return 1;
}

static int64_t copy_rows(const File *file, const Rows *r, int64_t available)
{
    int64_t nbytes = r->row_nbytes;
    for (int64_t i = 0; i < r->num_items; i++) {
        int64_t offset = r->offset[i];
        if (nbytes < 4096 && i + 8 < r->num_items && r->offset[i + 8] >= 0 &&
            r->offset[i + 8] < available)
            __builtin_prefetch(file->map + r->offset[i + 8]);
        if (offset < 0)
            fill_elements(r->fill, r->itemsize, row_of(r, i), nbytes);
        else if (offset > available - nbytes)
            return i;
        else
            memcpy(row_of(r, i), file->map + offset, (size_t)nbytes);
    }
    return r->num_items;
}

/* The end of the rows from `begin` on that follow each other in the file. */
static int64_t end_of_run(const Rows *r, int64_t begin)
{
    int64_t end = begin + 1;
    while (end < r->num_items && end - begin < MAX_IOVEC &&
           r->offset[end] >= r->row_nbytes &&
           r->offset[end] - r->row_nbytes == r->offset[end - 1])
        end++;
    return end;
}

static int read_run(const File *file, const Rows *r, int64_t begin, int64_t end, int flags)
{
    struct iovec parts[MAX_IOVEC];
    int count = 0;
    for (int64_t i = begin; i < end; i++) {
        uint8_t *row = row_of(r, i);
        if (count && (uint8_t *)parts[count - 1].iov_base + parts[count - 1].iov_len == row)
            parts[count - 1].iov_len += (size_t)r->row_nbytes;
        else
            parts[count++] = (struct iovec){row, (size_t)r->row_nbytes};
    }
#ifdef RWF_NOWAIT
    ssize_t got = preadv2(file->fd, parts, count, r->offset[begin], flags);
#else
    (void)flags;
    ssize_t got = preadv(file->fd, parts, count, r->offset[begin]);
#endif
    return got == (end - begin) * r->row_nbytes;
}

static int read_run_slowly(const File *file, const Rows *r, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        if (!read_fully(file, r->offset[i], row_of(r, i), r->row_nbytes))
            return 0;
    return 1;
}

/* What the page cache holds is read at once. The rest is asked for, all of it, before the first
   read that waits: so as many reads are in flight as the disk takes. */
static int64_t pread_rows(const File *file, const Rows *r)
{
    uint8_t *is_late = calloc((size_t)r->num_items + 1, 1);
    int64_t done = 0, end, late = 0;
    if (is_late == NULL)
        return 0;
    for (int64_t i = 0; i < r->num_items; i = end) {
        end = i + 1;
        if (r->offset[i] < 0) {
            fill_elements(r->fill, r->itemsize, row_of(r, i), r->row_nbytes);
            continue;
        }
        end = end_of_run(r, i);
#ifdef RWF_NOWAIT
        if (read_run(file, r, i, end, RWF_NOWAIT))
            continue;
        ask_for(file, r->offset[i], (end - i) * r->row_nbytes);
        is_late[i] = 1, late = 1;
#else
        if (!read_run(file, r, i, end, 0) && !read_run_slowly(file, r, i, end)) {
            free(is_late);
            return i;
        }
#endif
    }
    done = r->num_items;
    for (int64_t i = 0; late && i < r->num_items; i++) {
        if (!is_late[i])
            continue;
        end = end_of_run(r, i);
        if (!read_run(file, r, i, end, 0) && !read_run_slowly(file, r, i, end)) {
            done = i;
            break;
        }
    }
    free(is_late);
    return done;
}

PUBLIC int64_t h5async_read_rows(const File *file, Worker *worker, const Rows *rows)
{
    Rows r = *rows;
    int64_t begin = now_ns(), done = 0;
    r.num_items = valid_rows(&r);
    if (r.row_nbytes > 0 && r.itemsize > 0 && r.num_items > 0) {
        int64_t available = mappable_nbytes(file);
        int is_mapped = available > 0 && (file->io == IO_MAP || rows_are_cached(file, &r));
        done = is_mapped ? copy_rows(file, &r, available) : pread_rows(file, &r);
    }
    worker->returned_ns = now_ns();
    worker->read_ns += worker->returned_ns - begin;
    worker->read_nbytes += done * r.row_nbytes;
    return done;
}

/* ---- Decoders: bytes enter, their number leaves, -1 where they are not as they should be --- */

static int64_t inflate(Worker *w, const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    size_t count = 0;
    const Libraries *l = w->libraries;
    if (l->zlib_decompress == NULL || (w->deflate == NULL && !(w->deflate = l->deflate_new())))
        return -1;
    if (l->zlib_decompress(w->deflate, in, (size_t)n, out, (size_t)room, &count) != 0)
        return -1;
    return (int64_t)count;
}

static int64_t unzstd(Worker *w, const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    const Libraries *l = w->libraries;
    if (l->zstd_decompress == NULL || (w->zstd == NULL && !(w->zstd = l->zstd_new())))
        return -1;
    size_t count = l->zstd_decompress(w->zstd, out, (size_t)room, in, (size_t)n);
    return l->zstd_is_error(count) ? -1 : (int64_t)count;
}

static int64_t unlz4(Worker *w, const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    if (w->libraries->lz4_decompress == NULL || n > INT32_MAX)
        return -1;
    if (room > INT32_MAX)
        room = INT32_MAX;
    return w->libraries->lz4_decompress((const char *)in, (char *)out, (int)n, (int)room);
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

static int64_t unblosc(Worker *w, const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    if (w->libraries->blosc_decompress == NULL || n < 16)
        return -1;
    int64_t nbytes = little32(in + 4), stored = little32(in + 12);
    if (stored > n || nbytes > room || nbytes > INT32_MAX)
        return -1;
    if (nbytes == 0)
        return 0;
    return w->libraries->blosc_decompress(in, out, (size_t)room, 1) == nbytes ? nbytes : -1;
}

static int64_t unlz4_blocks(Worker *w, const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    if (n < 12)
        return -1;
    int64_t nbytes = big64(in), block = big32(in + 8), at = 12, done = 0;
    if (nbytes > room || block == 0 || block > MAX_LZ4_NBYTES)
        return -1;
    while (done < nbytes) {
        int64_t due = nbytes - done < block ? nbytes - done : block;
        if (n - at < 4)
            return -1;
        int64_t length = big32(in + at);
        at += 4;
        if (length > n - at)
            return -1;
        if (length == due)
            memcpy(out + done, in + at, (size_t)due);
        else if (unlz4(w, in + at, length, out + done, due) != due)
            return -1;
        at += length;
        done += due;
    }
    return done;
}

/* Copies by whole 8 bytes, which may write up to 7 bytes too many, where there is room. */
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

/* Whether the last 4 bytes are the checksum of the others: sums modulo 65535 of big-endian words,
   in which zero stands for no other multiple; each half may lie in either byte order. */
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

/* ---- Bytes and bits put back in order ------------------------------------------------------ */

#if defined(SSE2)
/* Interleaves 16 bytes of each of `e` planes: in every round, the first and the second half. */
#define INTERLEAVE(e, rounds)                                                                     \
    static int64_t interleave_##e(const uint8_t *in, int64_t count, uint8_t *out)                 \
    {                                                                                             \
        int64_t i = 0;                                                                            \
        for (; i + 16 <= count; i += 16) {                                                        \
            __m128i a[e], b[e];                                                                   \
            for (int p = 0; p < e; p++)                                                           \
                a[p] = _mm_loadu_si128((const __m128i *)(in + p * count + i));                    \
            for (int round = 0; round < rounds; round++) {                                        \
                for (int p = 0; p < e / 2; p++) {                                                 \
                    b[2 * p] = _mm_unpacklo_epi8(a[p], a[p + e / 2]);                             \
                    b[2 * p + 1] = _mm_unpackhi_epi8(a[p], a[p + e / 2]);                         \
                }                                                                                 \
                memcpy(a, b, sizeof a);                                                           \
            }                                                                                     \
            for (int p = 0; p < e; p++)                                                           \
                _mm_storeu_si128((__m128i *)(out + i * e + 16 * p), a[p]);                        \
        }                                                                                         \
        return i;                                                                                 \
    }
INTERLEAVE(2, 1)
INTERLEAVE(4, 2)
INTERLEAVE(8, 3)
INTERLEAVE(16, 4)
#endif

/* Planes of `count` bytes, one for each byte of an element, become `count` elements. */
static void interleave(const uint8_t *in, int64_t count, int64_t element, uint8_t *out)
{
    int64_t i = 0;
    if (element == 1) {
        memcpy(out, in, (size_t)count);
        return;
    }
#if defined(SSE2)
    if (element == 2)
        i = interleave_2(in, count, out);
    else if (element == 4)
        i = interleave_4(in, count, out);
    else if (element == 8)
        i = interleave_8(in, count, out);
    else if (element == 16)
        i = interleave_16(in, count, out);
#endif
    for (int64_t end; i < count; i = end) {
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

/* Each 64 bits are a square of 8 x 8 bits, which is transposed (Warren, Hacker's Delight, 7-3). */
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

#if defined(AVX2)
AVX2 static void transpose_bits_avx2(uint8_t *data, int64_t squares)
{
    transpose_bits_inline(data, squares);
}
#endif

static void transpose_bits(uint8_t *data, int64_t squares)
{
#if defined(AVX2)
    if (HAS_AVX2()) {
        transpose_bits_avx2(data, squares);
        return;
    }
#endif
    transpose_bits_inline(data, squares);
}

/* One block of a multiple of 8 elements: 8 rows of bits for each byte of an element. */
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
    if (n > room || n % element || block % 8 || block > w->between_nbytes / element)
        return -1;
    int64_t count = n / element, whole = count / 8 * 8;
    for (int64_t at = 0; at < whole; at += block) {
        int64_t size = whole - at < block ? whole - at : block;
        unbitshuffle_block(in + at * element, size, element, w->between[2], out + at * element);
    }
    memcpy(out + whole * element, in + whole * element, (size_t)((count - whole) * element));
    return n;
}

/* A header, then blocks, each compressed after its bits were transposed, behind its length. */
static int64_t unbitshuffle_blocks(Worker *w, const uint8_t *in, int64_t n, const Filter *f,
                                   uint8_t *out, int64_t room)
{
    int64_t element = f->element;
    if (n < 12)
        return -1;
    int64_t nbytes = big64(in), block = big32(in + 8), at = 12;
    if (nbytes > room || nbytes % element || block == 0 || block % (8 * element) ||
        block > w->between_nbytes / 2)
        return -1;
    int64_t body = nbytes / (8 * element) * (8 * element);
    uint8_t *shuffled = w->between[2], *planes = w->between[2] + block;
    for (int64_t done = 0; done < body; done += block) {
        int64_t due = body - done < block ? body - done : block, count;
        if (n - at < 4)
            return -1;
        int64_t length = big32(in + at);
        at += 4;
        if (length > n - at)
            return -1;
        if (f->kind == BITSHUFFLE_LZ4)
            count = unlz4(w, in + at, length, shuffled, due);
        else
            count = unzstd(w, in + at, length, shuffled, due);
        if (count != due)
            return -1;
        unbitshuffle_block(shuffled, due / element, element, planes, out + done);
        at += length;
    }
    if (nbytes - body > n - at)
        return -1;
    memcpy(out + body, in + at, (size_t)(nbytes - body));
    return nbytes;
}

/* ---- Chunks ------------------------------------------------------------------------------- */

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

/* Bring a chunk to exactly `chunk_nbytes` bytes at `out`. */
static int decode(const Dataset *d, Worker *w, const uint8_t *in, int64_t n, uint32_t mask,
                  uint8_t *out)
{
    int64_t due[MAX_FILTERS], nbytes = d->chunk_nbytes, first = -1;
    for (int64_t i = 0; i < d->num_filters; i++) {
        if (is_skipped(mask, i))
            continue;
        int32_t kind = d->filters[i].kind;
        first = first < 0 ? i : first;
        due[i] = nbytes;
        if (kind == FLETCHER32)
            nbytes = nbytes < 0 ? -1 : nbytes + 4;
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
            int64_t room = due[i] < 0 ? w->between_nbytes : due[i];
            if (i != first && room > w->between_nbytes)
                return 0;
            n = undo(w, f, in, n, to, room);
            in = to;
            now = 1 - now;
        }
        if (n < 0 || (due[i] >= 0 && n != due[i]))
            return 0;
    }
    if (n != d->chunk_nbytes)
        return 0;
    if (in != out)
        memcpy(out, in, (size_t)n);
    return 1;
}

typedef struct {
    int64_t extent, from_stride, to_stride;
} Dim;

/* A piece of a sample, for every sample of a chunk: `unit` bytes in one piece, repeated along
   `rank` dimensions, the last one fastest. */
typedef struct {
    Dim dims[MAX_RANK];
    int64_t rank, unit, begin, from; /* begin: in a row; from: in a chunk */
} Piece;

static int piece_of(const Dataset *d, int64_t cross, Piece *piece)
{
    const int64_t *extents = d->extents + cross * d->rank;
    int64_t from_end = d->itemsize + d->piece_begin[cross] +
                       (d->chunk_samples - 1) * d->sample_stride;
    int64_t to_end = d->itemsize + d->row_begin[cross];
    piece->rank = 0, piece->unit = d->itemsize;
    piece->begin = d->row_begin[cross], piece->from = d->piece_begin[cross];
    for (int64_t a = 0; a < d->rank; a++) {
        Dim dim = {extents[a], d->chunk_strides[a], d->row_strides[a]};
        if (dim.extent < 1)
            return 0;
        from_end += (dim.extent - 1) * dim.from_stride;
        to_end += (dim.extent - 1) * dim.to_stride;
        Dim *outer = piece->rank ? &piece->dims[piece->rank - 1] : NULL;
        if (dim.extent == 1)
            continue;
        if (outer && outer->from_stride == dim.extent * dim.from_stride &&
            outer->to_stride == dim.extent * dim.to_stride)
            *outer = (Dim){outer->extent * dim.extent, dim.from_stride, dim.to_stride};
        else
            piece->dims[piece->rank++] = dim;
    }
    if (piece->rank) {
        const Dim *inner = &piece->dims[piece->rank - 1];
        if (inner->from_stride == piece->unit && inner->to_stride == piece->unit) {
            piece->unit *= inner->extent;
            piece->rank--;
        }
    }
    return from_end <= d->chunk_nbytes && to_end <= d->row_nbytes && piece->begin >= 0 && piece->from >= 0;
}

#define COPY_ELEMENTS(type)                                                                       \
    for (int64_t i = 0; i < count; i++) {                                                         \
        type value;                                                                               \
        memcpy(&value, from + i * from_stride, sizeof value);                                     \
        memcpy(to + i * to_stride, &value, sizeof value);                                         \
    }

static void copy_elements(const uint8_t *from, int64_t from_stride, uint8_t *to, int64_t to_stride,
                          int64_t count, int64_t unit)
{
    if (unit == 1 && to_stride == 1)
        for (int64_t i = 0; i < count; i++)
            to[i] = from[i * from_stride];
    else if (unit == 1)
        COPY_ELEMENTS(uint8_t)
    else if (unit == 2)
        COPY_ELEMENTS(uint16_t)
    else if (unit == 4)
        COPY_ELEMENTS(uint32_t)
    else if (unit == 8)
        COPY_ELEMENTS(uint64_t)
    else
        for (int64_t i = 0; i < count; i++)
            memcpy(to + i * to_stride, from + i * from_stride, (size_t)unit);
}

/* A square of elements, 16 bytes wide, with rows and columns exchanged: interleaving, as above. */
#if defined(SSE2)
#define TRANSPOSE(bytes, side, low, high)                                                         \
    static void transpose_##bytes(const uint8_t *from, int64_t from_stride, uint8_t *to,           \
                                  int64_t to_stride)                                              \
    {                                                                                             \
        __m128i a[side], b[side];                                                                 \
        for (int p = 0; p < side; p++)                                                            \
            a[p] = _mm_loadu_si128((const __m128i *)(const void *)(from + p * from_stride));      \
        for (int round = 1; round < side; round *= 2) {                                           \
            for (int p = 0; p < side / 2; p++) {                                                  \
                b[2 * p] = low(a[p], a[p + side / 2]);                                            \
                b[2 * p + 1] = high(a[p], a[p + side / 2]);                                       \
            }                                                                                     \
            memcpy(a, b, sizeof a);                                                               \
        }                                                                                         \
        for (int p = 0; p < side; p++)                                                            \
            _mm_storeu_si128((__m128i *)(void *)(to + p * to_stride), a[p]);                      \
    }
TRANSPOSE(1, 16, _mm_unpacklo_epi8, _mm_unpackhi_epi8)
TRANSPOSE(2, 8, _mm_unpacklo_epi16, _mm_unpackhi_epi16)
TRANSPOSE(4, 4, _mm_unpacklo_epi32, _mm_unpackhi_epi32)
TRANSPOSE(8, 2, _mm_unpacklo_epi64, _mm_unpackhi_epi64)
#endif

/* Samples that are neighbours, element by element, in squares; returns how many samples it did. */
static int64_t copy_squares(const uint8_t *from, int64_t from_stride, int64_t samples, uint8_t *to,
                            int64_t to_stride, int64_t count, int64_t unit)
{
    int64_t done = 0;
#if defined(SSE2)
    int64_t side = 16 / unit;
    for (; done + side <= samples; done += side) {
        const uint8_t *source = from + done * unit;
        uint8_t *target = to + done * to_stride;
        int64_t i = 0;
        for (; i + side <= count; i += side) {
            const uint8_t *square = source + i * from_stride;
            if (unit == 1)
                transpose_1(square, from_stride, target + i * unit, to_stride);
            else if (unit == 2)
                transpose_2(square, from_stride, target + i * unit, to_stride);
            else if (unit == 4)
                transpose_4(square, from_stride, target + i * unit, to_stride);
            else
                transpose_8(square, from_stride, target + i * unit, to_stride);
        }
        for (int64_t k = 0; k < side && i < count; k++)
            copy_elements(source + i * from_stride + k * unit, from_stride,
                          target + i * unit + k * to_stride, unit, count - i, unit);
    }
#else
    (void)from, (void)from_stride, (void)samples, (void)to, (void)to_stride, (void)count, (void)unit;
#endif
    return done;
}

typedef struct {
    const int64_t *local, *position, *length;
    int64_t count;
} Runs;

/* One element and its neighbours of all samples, tile by tile: a tile's lines stay in the cache. */
static void place_strided(const Dataset *d, const Piece *p, const Runs *runs, const uint8_t *chunk,
                          uint8_t *batch)
{
    Dim inner = p->dims[p->rank - 1];
    int64_t tile = TILE_NBYTES / (inner.from_stride + 1);
    int64_t index[MAX_RANK] = {0};
    int are_squares = (p->unit == 1 || p->unit == 2 || p->unit == 4 || p->unit == 8) &&
                      d->sample_stride == p->unit && inner.to_stride == p->unit &&
                      runs->length[0] >= 16 / p->unit;
    /* Far apart, elements had better be few: their lines often share one place in the cache. */
    int64_t least = are_squares ? 2 * TILE_ELEMENTS : TILE_ELEMENTS;
    tile = tile < least ? least : tile;
    for (;;) {
        int64_t from = 0, to = p->begin;
        for (int64_t a = 0; a < p->rank - 1; a++) {
            from += index[a] * p->dims[a].from_stride;
            to += index[a] * p->dims[a].to_stride;
        }
        for (int64_t at = 0; at < inner.extent; at += tile) {
            int64_t count = inner.extent - at < tile ? inner.extent - at : tile;
            for (int64_t r = 0; r < runs->count; r++) {
                const uint8_t *source = chunk + from + at * inner.from_stride +
                                        runs->local[r] * d->sample_stride;
                uint8_t *target = batch + to + at * inner.to_stride +
                                  runs->position[r] * d->row_nbytes;
                int64_t k = 0;
                if (are_squares)
                    k = copy_squares(source, inner.from_stride, runs->length[r], target,
                                     d->row_nbytes, count, p->unit);
                for (; k < runs->length[r]; k++)
                    copy_elements(source + k * d->sample_stride, inner.from_stride,
                                  target + k * d->row_nbytes, inner.to_stride, count, p->unit);
            }
        }
        int64_t a = p->rank - 2;
        while (a >= 0 && ++index[a] == p->dims[a].extent)
            index[a--] = 0;
        if (a < 0)
            return;
    }
}

static void place(const Dataset *d, const Piece *p, const Runs *runs, const uint8_t *chunk,
                  uint8_t *batch)
{
    chunk += p->from;
    if (p->rank) {
        place_strided(d, p, runs, chunk, batch);
        return;
    }
    int in_one = p->unit == d->row_nbytes && p->unit == d->sample_stride;
    for (int64_t r = 0; r < runs->count; r++) {
        const uint8_t *from = chunk + runs->local[r] * d->sample_stride;
        uint8_t *to = batch + runs->position[r] * d->row_nbytes + p->begin;
        int64_t times = in_one ? 1 : runs->length[r];
        int64_t nbytes = in_one ? p->unit * runs->length[r] : p->unit;
        for (int64_t k = 0; k < times; k++)
            memcpy(to + k * d->row_nbytes, from + k * d->sample_stride, (size_t)nbytes);
    }
}

static void place_fill(const Dataset *d, const Piece *p, const Runs *runs, uint8_t *batch)
{
    int64_t index[MAX_RANK] = {0};
    for (;;) {
        int64_t to = p->begin;
        for (int64_t a = 0; a < p->rank; a++)
            to += index[a] * p->dims[a].to_stride;
        for (int64_t r = 0; r < runs->count; r++)
            for (int64_t k = 0; k < runs->length[r]; k++)
                fill_elements(d->fill, d->itemsize,
                              batch + to + (runs->position[r] + k) * d->row_nbytes, p->unit);
        int64_t a = p->rank - 1;
        while (a >= 0 && ++index[a] == p->dims[a].extent)
            index[a--] = 0;
        if (a < 0)
            return;
    }
}

static int runs_of(const Dataset *d, const ChunkPlan *plan, int64_t group, int64_t batch_rows,
                   Runs *runs)
{
    if (group < 0 || group >= plan->num_groups)
        return 0;
    int64_t first = plan->run_start[group], last = plan->run_start[group + 1];
    if (first < 0 || last <= first || last > plan->num_runs)
        return 0;
    *runs = (Runs){plan->run_local + first, plan->run_position + first, plan->run_length + first,
                   last - first};
    for (int64_t r = 0; r < runs->count; r++)
        if (runs->length[r] < 1 || runs->local[r] < 0 || runs->position[r] < 0 ||
            runs->local[r] > d->chunk_samples - runs->length[r] ||
            runs->position[r] > batch_rows - runs->length[r])
            return 0;
    return 1;
}

/* Of a chunk that no filter was applied to, read the samples that are wanted into the scratch. */
static int read_raw_samples(const Dataset *d, Worker *w, const File *file, int64_t offset,
                            const Runs *runs)
{
    int64_t stride = d->sample_stride;
    if (d->chunk_nbytes > w->chunk_nbytes)
        return 0;
    if (stride * d->chunk_samples != d->chunk_nbytes)
        return read_fully(file, offset, w->chunk, d->chunk_nbytes);
    for (int64_t r = 0; r < runs->count; r++)
        if (!read_fully(file, offset + runs->local[r] * stride, w->chunk + runs->local[r] * stride,
                        runs->length[r] * stride))
            return 0;
    return 1;
}

typedef struct {
    const Dataset *d;
    Worker *w;
    const File *file;
    int64_t available; /* bytes that may be read out of the map */
    uint8_t *batch;
    int64_t last_ns;
} Call;

static void count_time(Call *call, int64_t *counter)
{
    int64_t t = now_ns();
    *counter += t - call->last_ns;
    call->last_ns = t;
}

static int read_chunk(Call *call, int64_t number, int64_t cross, const Runs *runs, int state,
                      uint8_t *target)
{
    const Dataset *d = call->d;
    Worker *w = call->w;
    Piece piece;
    if (cross < 0 || cross >= d->num_cross || number >= d->num_chunks || !piece_of(d, cross, &piece))
        return 0;
    if (number < 0) {
        place_fill(d, &piece, runs, call->batch);
        return 1;
    }
    if (state == IN_TARGET) {
        place(d, &piece, runs, target, call->batch);
        count_time(call, &w->place_ns);
        return 1;
    }
    int64_t offset = d->begin, stored = d->chunk_nbytes;
    uint32_t mask = 0;
    if (d->begin < 0 && d->chunk_offset == NULL)
        return 0;
    if (d->begin < 0) {
        offset = d->chunk_offset[number], stored = d->chunk_stored[number];
        mask = d->chunk_mask[number];
    }
    if (offset < 0 || stored < 0 || offset > INT64_MAX - stored)
        return 0;
    const uint8_t *in = stored <= call->available && offset <= call->available - stored
                            ? call->file->map + offset
                            : NULL;
    if (in == NULL && (call->file->io == IO_MAP || call->available > 0 || d->begin >= 0))
        return 0; /* the file is too short, or can only be mapped */
    int raw = is_raw(d, mask);
    int is_whole = state == TO_SCRATCH && d->rows_are_whole && runs->count == 1 &&
                   runs->length[0] == d->chunk_samples &&
                   d->chunk_samples * d->row_nbytes == d->chunk_nbytes;
    uint8_t *whole = is_whole ? call->batch + runs->position[0] * d->row_nbytes : NULL;
    if (raw && (stored != d->chunk_nbytes || state == TO_TARGET))
        return 0; /* what is stored raw is not kept */
    if (raw && in == NULL) {
        if (whole ? !read_fully(call->file, offset, whole, stored)
                  : !read_raw_samples(d, w, call->file, offset, runs))
            return 0;
        in = w->chunk;
        count_time(call, &w->read_ns);
    } else if (in == NULL) {
        if (stored > w->encoded_nbytes || !read_fully(call->file, offset, w->encoded, stored))
            return 0;
        in = w->encoded;
        count_time(call, &w->read_ns);
    } else if (raw && whole) {
        memcpy(whole, in, (size_t)stored);
        count_time(call, &w->read_ns);
    }
    w->read_nbytes += stored;
    if (!raw) {
        uint8_t *out = whole ? whole : state == TO_TARGET ? target : w->chunk;
        if (out == w->chunk && d->chunk_nbytes > w->chunk_nbytes)
            return 0;
        if (!decode(d, w, in, stored, mask, out))
            return 0;
        in = out;
        w->decoded_chunks++;
        count_time(call, &w->decode_ns);
    }
    if (!whole) {
        place(d, &piece, runs, in, call->batch);
        count_time(call, raw ? &w->read_ns : &w->place_ns);
    }
    return 1;
}

/* Whether all seems to lie in the page cache; if not, ask for all of it. */
static int ask_for_chunks(const Dataset *d, const File *file, const int64_t *place,
                          const uint8_t *state, int64_t count)
{
    int64_t step = count / MAX_PROBES + 1, cached = 1;
    if (d->chunk_offset == NULL)
        return 1;
    for (int64_t i = 0; i < count && cached; i += step)
        if (place[i] >= 0 && place[i] < d->num_chunks && state[i] < IN_TARGET)
            cached = is_cached(file, d->chunk_offset[place[i]]);
    for (int64_t i = 0; i < count && !cached; i++)
        if (place[i] >= 0 && place[i] < d->num_chunks && state[i] < IN_TARGET)
            ask_for(file, d->chunk_offset[place[i]], d->chunk_stored[place[i]]);
    return (int)cached;
}

/* Items `start` to `stop` of a plan. `state` and `target`, for each of them: whether a chunk that
   is not a whole piece of the batch is decoded to scratch or to memory that is kept (target), lies
   decoded there, or is left out. */
PUBLIC int64_t h5async_read_chunks(const Dataset *d, const File *file, Worker *w,
                                   const ChunkPlan *plan, int64_t start, int64_t stop,
                                   const uint8_t *state, uint8_t *const *target, uint8_t *batch,
                                   int64_t batch_rows)
{
    int64_t done = 0;
    Call call = {d, w, file, 0, batch, now_ns()};
    if (start < 0 || stop > plan->num_items || stop <= start || d->num_filters > MAX_FILTERS ||
        d->rank < 0 || d->rank >= MAX_RANK || d->itemsize < 1 || d->chunk_samples < 1 ||
        batch_rows < 0)
        return 0;
    int is_mapped = ask_for_chunks(d, file, plan->place + start, state, stop - start);
    if (is_mapped || file->io == IO_MAP)
        call.available = mappable_nbytes(file);
    for (; done < stop - start; done++) {
        int64_t i = start + done;
        Runs runs;
        if (state[done] == SKIPPED)
            continue;
        if (state[done] != TO_SCRATCH && target[done] == NULL)
            break;
        if (!runs_of(d, plan, plan->group[i], batch_rows, &runs))
            break;
        if (!read_chunk(&call, plan->place[i], plan->cross[i], &runs, state[done], target[done]))
            break;
    }
    w->returned_ns = now_ns();
    return done;
}

/* ---- Rows as read to rows as delivered ----------------------------------------------------- */

typedef struct {
    int64_t samples, points, channels; /* (samples, points, channels), channels come first then */
    int32_t source, is_float;          /* source: see below; is_float: deliver float32 */
    const float *scale, *offset;       /* [channels], or NULL */
} Transform;

enum Source { BYTES_1 = 1, BYTES_2 = 2, BYTES_4 = 4, BYTES_8 = 8, UINT8 = 11, UINT16 = 12,
              INT16 = 13, FLOAT32 = 14 };

#define PLANES(type, body)                                                                        \
    {                                                                                             \
        const type *restrict from = (const type *)(const void *)in;                               \
        for (int64_t c = 0; c < channels; c++) {                                                  \
            body                                                                                  \
        }                                                                                         \
    }

#define COPY_PLANE(type)                                                                          \
    PLANES(type, type *restrict to = (type *)(void *)out + c * points;                            \
           for (int64_t i = 0; i < count; i++) to[i] = from[i * channels + c];)

#define CAST_PLANE(type)                                                                          \
    PLANES(type, float *restrict to = (float *)(void *)out + c * points;                          \
           float scale = t->scale ? t->scale[c] : 1; float offset = t->offset ? t->offset[c] : 0; \
           if (t->scale && t->offset) for (int64_t i = 0; i < count; i++)                         \
               to[i] = (float)from[i * channels + c] * scale + offset;                            \
           else if (t->scale) for (int64_t i = 0; i < count; i++)                                 \
               to[i] = (float)from[i * channels + c] * scale;                                     \
           else if (t->offset) for (int64_t i = 0; i < count; i++)                                \
               to[i] = (float)from[i * channels + c] + offset;                                    \
           else for (int64_t i = 0; i < count; i++) to[i] = (float)from[i * channels + c];)

enum { SPLIT_POINTS = 1024 };

#if defined(SSSE3)
/* 16 points of 3 bytes at a time: of each of three vectors, a channel's bytes are shuffled to where
   they go, and the three put together. */
SSSE3 static int64_t split3_ssse3(const uint8_t *in, int64_t count, uint8_t *const out[3])
{
    int8_t order[3][3][16];
    __m128i shuffle[3][3];
    memset(order, -1, sizeof order);
    for (int c = 0; c < 3; c++)
        for (int k = 0; k < 16; k++)
            order[c][(3 * k + c) / 16][k] = (int8_t)((3 * k + c) % 16);
    for (int c = 0; c < 3; c++)
        for (int v = 0; v < 3; v++)
            shuffle[c][v] = _mm_loadu_si128((const __m128i *)(const void *)order[c][v]);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m128i *from = (const __m128i *)(const void *)(in + 3 * i);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1),
                c2 = _mm_loadu_si128(from + 2);
        for (int c = 0; c < 3; c++) {
            __m128i plane = _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(a, shuffle[c][0]),
                                                      _mm_shuffle_epi8(b, shuffle[c][1])),
                                         _mm_shuffle_epi8(c2, shuffle[c][2]));
            _mm_storeu_si128((__m128i *)(void *)(out[c] + i), plane);
        }
    }
    return i;
}
#endif

/* Points of 3 bytes to 3 planes. */
static void split3(const uint8_t *in, int64_t count, uint8_t *const out[3])
{
    int64_t i = 0;
#if defined(SSSE3)
    if (__builtin_cpu_supports("ssse3"))
        i = split3_ssse3(in, count, out);
#endif
    for (; i < count; i++)
        for (int c = 0; c < 3; c++)
            out[c][i] = in[3 * i + c];
}

/* `count` points of one sample; with the number of channels known, loops turn to vector code. */
ALWAYS_INLINE void transform_points(const Transform *t, const uint8_t *in, uint8_t *out,
                                    int64_t points, int64_t count, int64_t channels)
{
    switch (t->source) {
    case BYTES_1:
        COPY_PLANE(uint8_t)
        break;
    case BYTES_2:
        COPY_PLANE(uint16_t)
        break;
    case BYTES_4:
        COPY_PLANE(uint32_t)
        break;
    case BYTES_8:
        COPY_PLANE(uint64_t)
        break;
    case UINT8:
        CAST_PLANE(uint8_t)
        break;
    case UINT16:
        CAST_PLANE(uint16_t)
        break;
    case INT16:
        CAST_PLANE(int16_t)
        break;
    case FLOAT32:
        CAST_PLANE(float)
        break;
    }
}

/* Images of 3 channels of bytes, by way of planes that stay in the nearest cache. */
ALWAYS_INLINE void transform_rgb(const Transform *t, const uint8_t *in, uint8_t *out,
                                 int64_t points, int64_t count)
{
    uint8_t planes[3][SPLIT_POINTS];
    uint8_t *const to[3] = {planes[0], planes[1], planes[2]};
    uint8_t *const direct[3] = {out, out + points, out + 2 * points};
    split3(in, count, t->is_float ? to : direct);
    for (int c = 0; t->is_float && c < 3; c++) {
        Transform plane = *t;
        plane.scale = t->scale ? t->scale + c : NULL;
        plane.offset = t->offset ? t->offset + c : NULL;
        transform_points(&plane, planes[c], out + c * points * 4, points, count, 1);
    }
}

ALWAYS_INLINE void transform_inline(const Transform *t, const uint8_t *in, uint8_t *out,
                                    int64_t from_size, int64_t to_size)
{
    int64_t tile = 4096 / (t->channels * from_size) + 64;
    int is_rgb = t->channels == 3 && from_size == 1;
    tile = is_rgb ? SPLIT_POINTS : tile;
    for (int64_t s = 0; s < t->samples; s++)
        for (int64_t at = 0; at < t->points; at += tile) {
            int64_t count = t->points - at < tile ? t->points - at : tile;
            const uint8_t *from = in + (s * t->points + at) * t->channels * from_size;
            uint8_t *to = out + (s * t->points * t->channels + at) * to_size;
            if (is_rgb)
                transform_rgb(t, from, to, t->points, count);
            else if (t->channels == 1)
                transform_points(t, from, to, t->points, count, 1);
            else if (t->channels == 3)
                transform_points(t, from, to, t->points, count, 3);
            else if (t->channels == 4)
                transform_points(t, from, to, t->points, count, 4);
            else
                transform_points(t, from, to, t->points, count, t->channels);
        }
}

#if defined(AVX2)
AVX2 static void transform_avx2(const Transform *t, const uint8_t *in, uint8_t *out,
                                int64_t from_size, int64_t to_size)
{
    transform_inline(t, in, out, from_size, to_size);
}
#endif

/* Bring (samples, points, channels) to (samples, channels, points); 0: not of a known kind. */
PUBLIC int64_t h5async_transform(const Transform *t, const uint8_t *in, uint8_t *out)
{
    int64_t from_size = t->source <= BYTES_8 ? t->source
                        : t->source == UINT8 ? 1
                        : t->source == FLOAT32 ? 4
                                               : 2;
    int64_t to_size = t->is_float ? 4 : from_size;
    int is_copy = t->source == BYTES_1 || t->source == BYTES_2 || t->source == BYTES_4 ||
                  t->source == BYTES_8;
    if (!is_copy && (t->source < UINT8 || t->source > FLOAT32))
        return 0;
    if (is_copy == !!t->is_float || t->samples < 0 || t->points < 1 || t->channels < 1)
        return 0;
#if defined(AVX2)
    if (HAS_AVX2()) {
        transform_avx2(t, in, out, from_size, to_size);
        return 1;
    }
#endif
    transform_inline(t, in, out, from_size, to_size);
    return 1;
}

/* ---- Permutations, as sampling.py has them ------------------------------------------------- */

enum { ROUNDS = 6, LANES = 4 };

ALWAYS_INLINE uint64_t hash64(uint64_t x)
{
    x *= 0xBF58476D1CE4E5B9u;
    x ^= x >> 32;
    return x * 0x94D049BB133111EBu;
}

ALWAYS_INLINE uint64_t shifted(uint64_t half, uint64_t other, uint64_t modulus, uint64_t key)
{
    half += (hash64(other + key) >> 32) * modulus >> 32;
    return half - (modulus & -(uint64_t)(half >= modulus)); /* no branch: nobody could predict it */
}

ALWAYS_INLINE uint64_t feistel(uint64_t x, uint64_t a, uint64_t b, const uint64_t *keys)
{
    uint64_t right, left;
    if ((x | a) >> 32)
        right = x / a, left = x % a;
    else
        right = (uint32_t)x / (uint32_t)a, left = (uint32_t)x % (uint32_t)a;
    for (int i = 0; i < ROUNDS; i += 2) {
        left = shifted(left, right, a, keys[i]);
        right = shifted(right, left, b, keys[i + 1]);
    }
    return right * a + left;
}

ALWAYS_INLINE void feistel_lanes(uint64_t *x, uint64_t a, uint64_t b, const uint64_t *keys)
{
    uint64_t right[LANES], left[LANES];
    for (int j = 0; j < LANES; j++) {
        int is_long = (int)((x[j] | a) >> 32 != 0);
        right[j] = is_long ? x[j] / a : (uint32_t)x[j] / (uint32_t)a;
        left[j] = x[j] - right[j] * a;
    }
    for (int i = 0; i < ROUNDS; i += 2) {
        for (int j = 0; j < LANES; j++)
            left[j] = shifted(left[j], right[j], a, keys[i]);
        for (int j = 0; j < LANES; j++)
            right[j] = shifted(right[j], left[j], b, keys[i + 1]);
    }
    for (int j = 0; j < LANES; j++)
        x[j] = right[j] * a + left[j];
}

/* Numbers below `count` = `a` * `b` less a few, permuted in place. */
PUBLIC int64_t h5async_permute(uint64_t *numbers, int64_t n, uint64_t count, uint64_t a, uint64_t b,
                               const uint64_t *keys)
{
    int64_t i = 0;
    if (a == 0 || b == 0 || count == 0)
        return 0;
    for (; i + LANES <= n; i += LANES) { /* several at a time: one alone waits for its products */
        uint64_t x[LANES];
        for (int j = 0; j < LANES; j++)
            x[j] = numbers[i + j];
        feistel_lanes(x, a, b, keys);
        for (int j = 0; j < LANES; j++)
            numbers[i + j] = x[j];
    }
    for (int64_t j = i; j < n; j++)
        numbers[j] = feistel(numbers[j], a, b, keys);
    for (int64_t j = 0; j < n; j++)
        while (numbers[j] >= count)
            numbers[j] = feistel(numbers[j], a, b, keys);
    return n;
}

/* The same with a permutation, and a count, for each number. */
PUBLIC int64_t h5async_permute_each(uint64_t *numbers, int64_t n, const uint64_t *count,
                                    const uint64_t *a, const uint64_t *b, const uint64_t *names,
                                    const uint64_t *keys)
{
    for (int64_t i = 0; i < n; i++) {
        uint64_t own[ROUNDS];
        if (a[i] == 0 || b[i] == 0 || count[i] == 0)
            return i;
        uint64_t name = hash64(hash64(names[i] + keys[0]) ^ keys[1]);
        for (int k = 0; k < ROUNDS; k++)
            own[k] = name + keys[k];
        uint64_t x = feistel(numbers[i], a[i], b[i], own);
        while (x >= count[i])
            x = feistel(x, a[i], b[i], own);
        numbers[i] = x;
    }
    return n;
}

/* ---- Housekeeping -------------------------------------------------------------------------- */

PUBLIC void h5async_free(Worker *w)
{
    if (w->deflate)
        w->libraries->deflate_free(w->deflate);
    if (w->zstd)
        w->libraries->zstd_free(w->zstd);
    w->deflate = w->zstd = NULL;
}

/* Sizes of the structures, by which core.py knows that this build fits it. */
PUBLIC int64_t h5async_abi(void)
{
    return ABI * 100000 + (int64_t)(sizeof(Libraries) + sizeof(Worker) + sizeof(File) +
                                    sizeof(Filter) + sizeof(Dataset) + sizeof(ChunkPlan) +
                                    sizeof(Rows) + sizeof(Transform));
}
