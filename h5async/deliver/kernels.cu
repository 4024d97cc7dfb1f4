/* Undo filters, copy samples to their rows, and verify decoded chunks, all in GPU memory.

   Compiled at run time (NVRTC, C++17, no headers). Every kernel works with any number of blocks
   and threads. It uses grid-stride loops: along x over the bytes of one piece of work, along y over
   the pieces, if there are many. Threads share only sums and flags, so tests can run them one by
   one on a CPU (tests/cuda_on_cpu.py). Launch bounds limit registers, so that the largest blocks
   are possible. No address of bytes need be aligned: a kernel finds out how wide its reads and
   writes may be. Little-endian, like GPUs. */

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;
typedef unsigned short uint16;
typedef unsigned char byte;

static __device__ int64 first_of_grid() { return (int64)blockIdx.x * blockDim.x + threadIdx.x; }

static __device__ int64 stride_of_grid() { return (int64)gridDim.x * blockDim.x; }

/* The widest word, in bytes, of at most `most` (a power of 2), that divides all that was or-ed
   into `mask`. */
static __device__ int64 width_of(uint64 mask, int64 most)
{
    mask |= (uint64)most;
    return (int64)(mask & (~mask + 1));
}

/* Copies one piece with several threads. If source and target differ modulo 16, words of 8 bytes
   are written, each made of two aligned ones if need be: copying byte by byte would be slow. */
static __device__ void copy_piece(const byte *__restrict__ from, byte *__restrict__ to,
                                  int64 nbytes, int64 thread, int64 threads)
{
    int64 head, count, width;
    if ((((uint64)from ^ (uint64)to) & 15) == 0) {
        width = 16;
        head = (int64)((16 - ((uint64)to & 15)) & 15);
        count = nbytes > head ? (nbytes - head) / 16 : 0;
        const uint4 *source = (const uint4 *)(from + head);
        uint4 *target = (uint4 *)(to + head);
#pragma unroll 4
        for (int64 i = thread; i < count; i += threads)
            target[i] = source[i];
    } else {
        width = 8;
        head = (int64)((8 - ((uint64)to & 7)) & 7);
        int64 ahead = (int64)(((uint64)from + (uint64)head) & 7);
        if (ahead > head) /* else the first word read would begin before the piece */
            head += 8;
        int64 words = nbytes > head - ahead ? (nbytes - (head - ahead)) / 8 : 0;
        count = ahead && words ? words - 1 : words;
        if (count) {
            const uint64 *source = (const uint64 *)(from + (head - ahead));
            uint64 *target = (uint64 *)(to + head);
            int down = (int)ahead * 8, up = (64 - down) & 63;
            if (ahead) {
#pragma unroll 4
                for (int64 i = thread; i < count; i += threads)
                    target[i] = source[i] >> down | source[i + 1] << up;
            } else {
#pragma unroll 4
                for (int64 i = thread; i < count; i += threads)
                    target[i] = source[i];
            }
        }
    }
    int64 rest = nbytes - count * width;
    for (int64 i = thread; i < rest; i += threads) {
        int64 at = i < head ? i : i + count * width;
        to[at] = from[at];
    }
}

/* Copies `count` pieces (y) of `nbytes[p]` bytes (x). */
extern "C" __global__ void __launch_bounds__(1024) h5async_copy(
    const unsigned char *__restrict__ from, unsigned char *__restrict__ to, const int64 *source,
    const int64 *target, const int64 *nbytes, int64 count)
{
    for (int64 p = blockIdx.y; p < count; p += gridDim.y)
        copy_piece(from + source[p], to + target[p], nbytes[p], first_of_grid(), stride_of_grid());
}

/* Copies rows of `row_nbytes` (y) from rows index[r], or, if it `scatters`, to these. */
extern "C" __global__ void __launch_bounds__(1024) h5async_copy_rows(
    const unsigned char *__restrict__ from, unsigned char *__restrict__ to, const int64 *index,
    int64 count, int64 row_nbytes, int scatters)
{
    for (int64 r = blockIdx.y; r < count; r += gridDim.y)
        copy_piece(from + (scatters ? r : index[r]) * row_nbytes,
                   to + (scatters ? index[r] : r) * row_nbytes, row_nbytes, first_of_grid(),
                   stride_of_grid());
}

/* Makes elements from planes of bytes, one word of an element at a time. */
template <typename Word>
static __device__ void unshuffle_words(const byte *__restrict__ from, byte *__restrict__ to,
                                       int64 elements, int64 itemsize)
{
    for (int64 at = 0; at < itemsize; at += (int64)sizeof(Word)) {
        const byte *planes = from + at * elements;
        for (int64 i = first_of_grid(); i < elements; i += stride_of_grid()) {
            uint64 word = 0;
#pragma unroll
            for (int64 j = 0; j < (int64)sizeof(Word); j++)
                word |= (uint64)planes[j * elements + i] << (8 * j);
            *(Word *)(to + i * itemsize + at) = (Word)word;
        }
    }
}

/* Undoes HDF5's shuffle of `count` chunks (y) of `nbytes` bytes, `pitch` apart in both buffers.
   Bytes after the last whole element stay as they are. */
extern "C" __global__ void __launch_bounds__(1024) h5async_unshuffle(
    const unsigned char *__restrict__ from, unsigned char *__restrict__ to, int64 pitch,
    int64 nbytes, int64 count, int itemsize)
{
    int64 elements = nbytes / itemsize, body = elements * itemsize;
    for (int64 k = blockIdx.y; k < count; k += gridDim.y) {
        const byte *source = from + k * pitch;
        byte *target = to + k * pitch;
        int64 width = width_of((uint64)target | (uint64)itemsize, 8);
        if (itemsize == 1)
            copy_piece(source, target, body, first_of_grid(), stride_of_grid());
        else if (width == 8)
            unshuffle_words<uint64>(source, target, elements, itemsize);
        else if (width == 4)
            unshuffle_words<uint32>(source, target, elements, itemsize);
        else if (width == 2)
            unshuffle_words<uint16>(source, target, elements, itemsize);
        else
            unshuffle_words<byte>(source, target, elements, itemsize);
        for (int64 i = body + first_of_grid(); i < nbytes; i += stride_of_grid())
            target[i] = source[i];
    }
}

/* Transposes 8 x 8 bits, one byte from each of 8 lines (Warren, Hacker's Delight, 7-3): byte e of
   the result belongs to element e. */
static __device__ uint64 transposed_bits(const byte *__restrict__ lines, int64 line_nbytes)
{
    uint64 x = 0, t;
#pragma unroll
    for (int64 bit = 0; bit < 8; bit++)
        x |= (uint64)lines[bit * line_nbytes] << (8 * bit);
    t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAull;
    x = x ^ t ^ (t << 7);
    t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCull;
    x = x ^ t ^ (t << 14);
    t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0ull;
    return x ^ t ^ (t << 28);
}

/* The place of a group of 8 elements in a chunk: the first element of its block, the group's byte
   in each line of the block, and the length of a line. The last block may be shorter. */
struct Group {
    int64 block_begin, in_line, line_nbytes;
};

static __device__ Group find_group(int64 group, int64 groups, int64 groups_of_block)
{
    int64 first = group / groups_of_block * groups_of_block;
    int64 rest = groups - first;
    return {first * 8, group - first, rest < groups_of_block ? rest : groups_of_block};
}

/* For elements of 1, 2, 4 or 8 bytes: a thread makes 8 consecutive elements. */
template <int itemsize>
static __device__ void bitunshuffle_whole(const byte *__restrict__ from, byte *__restrict__ to,
                                          int64 groups, int64 groups_of_block)
{
    for (int64 group = first_of_grid(); group < groups; group += stride_of_grid()) {
        Group at = find_group(group, groups, groups_of_block);
        const byte *lines = from + at.block_begin * itemsize + at.in_line;
        uint64 squares[itemsize], words[itemsize];
#pragma unroll
        for (int j = 0; j < itemsize; j++)
            squares[j] = transposed_bits(lines + j * 8 * at.line_nbytes, at.line_nbytes);
#pragma unroll
        for (int word = 0; word < itemsize; word++) {
            words[word] = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int element = (word * 8 + i) / itemsize, j = (word * 8 + i) % itemsize;
                words[word] |= (squares[j] >> (8 * element) & 255) << (8 * i);
            }
        }
        if constexpr (itemsize == 1) {
            ((uint64 *)to)[group] = words[0];
        } else {
            uint4 *target = (uint4 *)to + group * (itemsize / 2);
#pragma unroll
            for (int pair = 0; pair < itemsize / 2; pair++) {
                uint64 low = words[2 * pair], high = words[2 * pair + 1];
                uint4 both;
                both.x = (uint32)low, both.y = (uint32)(low >> 32);
                both.z = (uint32)high, both.w = (uint32)(high >> 32);
                target[pair] = both;
            }
        }
    }
}

/* For any elements: a thread makes 8 consecutive elements, byte by byte. */
static __device__ void bitunshuffle_bytes(const byte *__restrict__ from, byte *__restrict__ to,
                                          int64 groups, int64 groups_of_block, int64 itemsize)
{
    for (int64 group = first_of_grid(); group < groups; group += stride_of_grid()) {
        Group at = find_group(group, groups, groups_of_block);
        const byte *lines = from + at.block_begin * itemsize + at.in_line;
        for (int64 j = 0; j < itemsize; j++) {
            uint64 square = transposed_bits(lines + j * 8 * at.line_nbytes, at.line_nbytes);
            byte *target = to + group * 8 * itemsize + j;
#pragma unroll
            for (int element = 0; element < 8; element++)
                target[element * itemsize] = (byte)(square >> (8 * element));
        }
    }
}

/* Undoes bitshuffle's transposition of `count` decompressed chunks (y) of `nbytes` bytes, `pitch`
   apart in both buffers, in blocks of `block` elements, a multiple of 8. The last elements, up to
   7, and bytes after the last whole element stay as they are. */
extern "C" __global__ void __launch_bounds__(1024) h5async_bitunshuffle(
    const unsigned char *__restrict__ from, unsigned char *__restrict__ to, int64 pitch,
    int64 nbytes, int64 count, int itemsize, int64 block)
{
    int64 groups = nbytes / itemsize / 8, of_block = block / 8, body = groups * 8 * itemsize;
    for (int64 k = blockIdx.y; k < count; k += gridDim.y) {
        const byte *source = from + k * pitch;
        byte *target = to + k * pitch;
        bool is_whole = ((uint64)target & (itemsize == 1 ? 7 : 15)) == 0;
        if (itemsize == 1 && is_whole)
            bitunshuffle_whole<1>(source, target, groups, of_block);
        else if (itemsize == 2 && is_whole)
            bitunshuffle_whole<2>(source, target, groups, of_block);
        else if (itemsize == 4 && is_whole)
            bitunshuffle_whole<4>(source, target, groups, of_block);
        else if (itemsize == 8 && is_whole)
            bitunshuffle_whole<8>(source, target, groups, of_block);
        else
            bitunshuffle_bytes(source, target, groups, of_block, itemsize);
        for (int64 i = body + first_of_grid(); i < nbytes; i += stride_of_grid())
            target[i] = source[i];
    }
}

/* Copies runs of `unit` contiguous bytes along `rank` dimensions and `samples`. */
template <typename Word>
static __device__ void place_words(const byte *__restrict__ from, byte *__restrict__ to,
                                   int64 unit, const int64 *__restrict__ extents,
                                   const int64 *__restrict__ chunk_strides,
                                   const int64 *__restrict__ row_strides, int rank,
                                   int64 samples, int64 sample_stride, int64 row_nbytes)
{
    int64 words = unit / (int64)sizeof(Word), count = words * samples;
    for (int d = 0; d < rank; d++)
        count *= extents[d];
    for (int64 i = first_of_grid(); i < count; i += stride_of_grid()) {
        int64 rest = i, source = 0, target = 0;
        if (words > 1) {
            rest = i / words;
            source = target = (i - rest * words) * (int64)sizeof(Word);
        }
        for (int d = rank - 1; d >= 0; d--) {
            int64 extent = extents[d];
            if (extent == 1) /* saves a division */
                continue;
            int64 outer = rest / extent, index = rest - outer * extent;
            source += index * chunk_strides[d];
            target += index * row_strides[d];
            rest = outer;
        }
        source += rest * sample_stride;
        target += rest * row_nbytes;
        *(Word *)(to + target) = *(const Word *)(from + source);
    }
}

/* Copies samples of decoded chunks to their rows in the batch. Task t (y) copies samples local[t]
   .. local[t] + length[t] - 1 of the chunk at `chunks + item[t] * pitch` to the rows from
   position[t] on. The chunk has piece cross[t] of the cross-section of a row: it has
   extents[cross[t]][rank] elements, and begins at byte row_begin[cross[t]] of the row. Strides are
   in bytes; those of samples are `sample_stride` in a chunk and `row_nbytes` in the batch. */
extern "C" __global__ void __launch_bounds__(1024) h5async_place(
    const unsigned char *__restrict__ chunks, unsigned char *__restrict__ rows, const int64 *item,
    const int64 *cross, const int64 *local, const int64 *position, const int64 *length,
    int64 count, const int64 *extents, const int64 *row_begin, const int64 *chunk_strides,
    const int64 *row_strides, int rank, int64 pitch, int64 sample_stride, int64 row_nbytes,
    int itemsize)
{
    for (int64 t = blockIdx.y; t < count; t += gridDim.y) {
        const int64 *extent = extents + cross[t] * rank;
        const byte *from = chunks + item[t] * pitch + local[t] * sample_stride;
        byte *to = rows + position[t] * row_nbytes + row_begin[cross[t]];
        int64 unit = itemsize, samples = length[t];
        int dims = rank;
        /* Merge the last dimensions as far as they are contiguous in both chunk and row. */
        for (; dims > 0; dims--) {
            int64 n = extent[dims - 1];
            if (n > 1 && (chunk_strides[dims - 1] != unit || row_strides[dims - 1] != unit))
                break;
            unit *= n;
        }
        if (dims == 0 && sample_stride == unit && row_nbytes == unit)
            unit *= samples, samples = 1;
        if (dims == 0 && samples == 1) {
            copy_piece(from, to, unit, first_of_grid(), stride_of_grid());
            continue;
        }
        uint64 mask = (uint64)from | (uint64)to | (uint64)unit;
        if (samples > 1)
            mask |= (uint64)sample_stride | (uint64)row_nbytes;
        for (int d = 0; d < dims; d++)
            if (extent[d] > 1)
                mask |= (uint64)chunk_strides[d] | (uint64)row_strides[d];
        auto place = [&](auto word) {
            place_words<decltype(word)>(from, to, unit, extent, chunk_strides, row_strides, dims,
                                        samples, sample_stride, row_nbytes);
        };
        int64 width = width_of(mask, 16);
        if (width == 16)
            place(uint4());
        else if (width == 8)
            place(uint64());
        else if (width == 4)
            place(uint32());
        else if (width == 2)
            place(uint16());
        else
            place(byte());
    }
}

static constexpr uint64 ADLER_BASE = 65521;
static constexpr int64 ADLER_WORDS = 32; /* minimum per thread, to be worth two atomic additions */

/* The sums of Adler-32: of bytes, and of each byte times the number of bytes from it to the end.
   A byte's weight depends only on its place, so different threads may add neighbouring bytes. */
struct AdlerSums {
    uint64 plain, weighted;
};

static __device__ void add_weighted(AdlerSums *sums, uint64 plain, uint64 weighted)
{
    sums->plain += plain;
    sums->weighted += weighted;
    if (sums->weighted >> 62) /* a thread may have to add gigabytes */
        sums->weighted %= ADLER_BASE;
}

/* Adds eight bytes, the first of weight `weight`. A product adds up four 16-bit numbers. */
static __device__ void add_word(AdlerSums *sums, uint64 word, uint64 weight)
{
    uint64 even = word & 0x00FF00FF00FF00FFull, odd = word >> 8 & 0x00FF00FF00FF00FFull;
    uint64 plain = (even + odd) * 0x0001000100010001ull >> 48;
    uint64 less = (even * 0x0000000200040006ull >> 48) + (odd * 0x0001000300050007ull >> 48);
    add_weighted(sums, plain, weight * plain - less);
}

/* Adds up sums[2 k] and sums[2 k + 1], initially 0, for zlib's Adler-32 of piece k (y), which is
   b << 16 | a, with a = (1 + sums[2 k]) % 65521 and b = (nbytes + sums[2 k + 1]) % 65521. Pieces
   must be smaller than 2^32 bytes. */
extern "C" __global__ void __launch_bounds__(1024) h5async_adler32(
    const unsigned char *__restrict__ data, int64 pitch, int64 nbytes, int64 count, uint64 *sums)
{
    int64 thread = first_of_grid(), threads = nbytes / (8 * ADLER_WORDS) + 1;
    threads = threads < stride_of_grid() ? threads : stride_of_grid();
    if (thread >= threads)
        return;
    for (int64 k = blockIdx.y; k < count; k += gridDim.y) {
        const byte *piece = data + k * pitch;
        int64 head = (int64)((8 - ((uint64)piece & 7)) & 7);
        head = head < nbytes ? head : nbytes;
        int64 words = (nbytes - head) / 8, rest = nbytes - words * 8;
        const uint64 *word = (const uint64 *)(piece + head);
        AdlerSums own = {0, 0};
#pragma unroll 4
        for (int64 i = thread; i < words; i += threads)
            add_word(&own, word[i], (uint64)(nbytes - head - i * 8));
        for (int64 i = thread; i < rest; i += threads) {
            int64 at = i < head ? i : i + words * 8;
            add_weighted(&own, piece[at], (uint64)(nbytes - at) * piece[at]);
        }
        atomicAdd(sums + 2 * k, own.plain % ADLER_BASE);
        atomicAdd(sums + 2 * k + 1, own.weighted % ADLER_BASE);
    }
}

/* Sets *bad to 1 if a task (x) failed, or its number of bytes is not the one expected (`due`); and,
   unless `adler` is null, if a chunk's Adler-32 by the sums of `h5async_adler32` is wrong. */
extern "C" __global__ void __launch_bounds__(1024) h5async_verify(
    const int *status, const uint64 *actual, const uint64 *due, int64 tasks, const uint64 *sums,
    const unsigned int *adler, int64 chunks, int64 nbytes, int *bad)
{
    bool is_bad = false;
    for (int64 i = first_of_grid(); i < tasks; i += stride_of_grid())
        is_bad |= status[i] != 0 || actual[i] != due[i];
    if (adler)
        for (int64 k = first_of_grid(); k < chunks; k += stride_of_grid()) {
            uint64 a = (1 + sums[2 * k]) % ADLER_BASE;
            uint64 b = ((uint64)nbytes + sums[2 * k + 1]) % ADLER_BASE;
            is_bad |= (b << 16 | a) != adler[k];
        }
    if (is_bad)
        atomicExch(bad, 1);
}
