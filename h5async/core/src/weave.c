/* Copies several decoded chunks to rows at once if their pieces interleave there, such as chunks that split
   the channels of images: the rows are written line by line, and only once. This is called weaving. */

enum { MOST_WOVEN = 4, MOST_VECTORS = 8 };

typedef struct {
    Piece pieces[MOST_WOVEN];
    int64_t count, from_stride, to_stride, length; /* of a line: strides in bytes, length in elements */
    /* How a block is woven with vectors; num_out 0: element by element. */
    int64_t num_in, num_out, block;
    uint8_t lanes[MOST_VECTORS][MOST_VECTORS][16]; /* shuffle masks, by output vector and input vector */
} Woven;

/* Whether a piece directly follows the first `nbytes` of each element of a line. */
static int is_beside(const Piece *first, const Piece *next, int64_t nbytes)
{
    return next->rank == first->rank && next->begin == first->begin + nbytes &&
           memcmp(next->dims, first->dims, (size_t)first->rank * sizeof(Dim)) == 0;
}

/* Find the pieces from `cross` on that together fill lines of rows. Returns their number; 1 if none do. */
static int64_t find_woven(const Dataset *d, int64_t cross, Woven *woven)
{
    Piece *pieces = woven->pieces;
    if (!piece_of(d, cross, pieces) || pieces->rank == 0)
        return 1;
    const Dim *line = &pieces->dims[pieces->rank - 1];
    int64_t nbytes = pieces->unit, count = 1;
    while (nbytes < line->to_stride && count < MOST_WOVEN && cross + count < d->num_cross &&
           piece_of(d, cross + count, &pieces[count]) && is_beside(pieces, &pieces[count], nbytes))
        nbytes += pieces[count++].unit;
    woven->count = count, woven->length = line->extent;
    woven->from_stride = line->from_stride, woven->to_stride = line->to_stride;
    return nbytes == line->to_stride ? count : 1;
}

/* The number of consecutive chunks that together fill lines of rows, the same all over a row. */
static int64_t num_woven(const Dataset *d)
{
    Woven woven;
    int64_t count = find_woven(d, 0, &woven);
    return d->num_cross % count ? 1 : count;
}

/* Plan where each byte of a block goes. */
static void plan_vectors(Woven *woven, const Dataset *d)
{
    const int64_t size = d->itemsize, each = woven->from_stride / size;
    woven->num_in = each * woven->count, woven->num_out = woven->to_stride / size;
    woven->block = 16 / size;
    int64_t end = woven->from_stride; /* of a sample in a chunk: nothing beyond it is read */
    for (int64_t a = 0; a < woven->pieces->rank; a++)
        end += (woven->pieces->dims[a].extent - 1) * woven->pieces->dims[a].from_stride;
    for (int64_t k = 0; k < woven->count; k++)
        if (woven->pieces[k].from + end > d->sample_stride)
            woven->num_out = 0;
    if (16 % size || woven->num_in > MOST_VECTORS || woven->num_out > MOST_VECTORS)
        woven->num_out = 0;
    memset(woven->lanes, 0x80, sizeof woven->lanes);
    for (int64_t at = 0, in = 0; at < 16 * woven->num_out; at++, in++) {
        int64_t element = at / woven->to_stride, inside = at % woven->to_stride, k = 0;
        for (; inside >= woven->pieces[k].unit; k++)
            inside -= woven->pieces[k].unit;
        in = element * woven->from_stride + inside;
        woven->lanes[at / 16][k * each + in / 16][at % 16] = (uint8_t)(in % 16);
    }
}

#if defined(AVX2)
AVX2 ALWAYS_INLINE void weave_line(const Woven *woven, const uint8_t *const *from, uint8_t *to,
                                   int64_t count, int64_t num_in, int64_t num_out)
{
    const int64_t each = num_in / count, last = woven->length - woven->block;
    for (int64_t i = 0, end = 0; !end; i += woven->block) {
        end = i >= last;
        i = end ? last : i; /* the last block may overlap the one before */
        __m128i in[MOST_VECTORS];
        for (int64_t v = 0; v < num_in; v++)
            in[v] = _mm_loadu_si128((const __m128i *)(const void *)(from[v / each] + v % each * 16 +
                                                                    i * woven->from_stride));
        for (int64_t v = 0; v < num_out; v++) {
            __m128i out = _mm_setzero_si128();
            for (int64_t k = 0; k < num_in; k++)
                out = _mm_or_si128(out, _mm_shuffle_epi8(in[k], _mm_loadu_si128(
                          (const __m128i *)(const void *)woven->lanes[v][k])));
            _mm_storeu_si128((__m128i *)(void *)(to + i * woven->to_stride + v * 16), out);
        }
    }
}

AVX2 ALWAYS_INLINE void weave_samples(const Woven *woven, const Dataset *d, const uint8_t *const *from,
                                      uint8_t *to, Dim lines, int64_t samples, int64_t count,
                                      int64_t num_in, int64_t num_out)
{
    for (int64_t sample = 0; sample < samples; sample++)
        for (int64_t line = 0; line < lines.extent; line++) {
            uint8_t *at = to + sample * d->row_nbytes + line * lines.to_stride;
            const uint8_t *own[MOST_WOVEN];
            for (int64_t k = 0; k < count; k++)
                own[k] = from[k] + sample * d->sample_stride + line * lines.from_stride;
            for (int64_t next = 0; next < woven->length * woven->to_stride; next += 64)
                __builtin_prefetch(at + 2 * d->row_nbytes + next, 1);
            weave_line(woven, own, at, count, num_in, num_out);
        }
}

AVX2 static void weave_vectors(const Woven *woven, const Dataset *d, const uint8_t *const *from,
                               uint8_t *to, Dim lines, int64_t samples)
{
    if (woven->count == 3 && woven->num_in == 3)
        weave_samples(woven, d, from, to, lines, samples, 3, 3, 3);
    else if (woven->count == 2 && woven->num_in == 4 && woven->num_out == 3)
        weave_samples(woven, d, from, to, lines, samples, 2, 4, 3);
    else
        weave_samples(woven, d, from, to, lines, samples, woven->count, woven->num_in, woven->num_out);
}
#endif

/* Copy some lines of each sample. */
static void weave(const Woven *woven, const Dataset *d, const uint8_t *const *from, uint8_t *to, Dim lines,
                  int64_t samples)
{
#if defined(AVX2)
    if (woven->num_out && woven->length >= woven->block && HAS_AVX2()) {
        weave_vectors(woven, d, from, to, lines, samples);
        return;
    }
#endif
    for (int64_t at = 0; at < samples * lines.extent; at++) {
        int64_t sample = at / lines.extent, line = at % lines.extent, inside = 0;
        for (int64_t k = 0; k < woven->count; inside += woven->pieces[k++].unit)
            copy_elements(from[k] + sample * d->sample_stride + line * lines.from_stride,
                          woven->from_stride,
                          to + sample * d->row_nbytes + line * lines.to_stride + inside,
                          woven->to_stride, woven->length, woven->pieces[k].unit);
    }
}

/* Copy samples of decoded chunks, which are contiguous in memory, to rows. */
static void place_woven(Woven *woven, const Dataset *d, const Runs *runs, const uint8_t *chunks,
                        uint8_t *rows)
{
    const Piece *first = woven->pieces;
    const Dim lines = first->rank < 2 ? ONE_LINE : first->dims[first->rank - 2];
    Place at = first_place(first);
    plan_vectors(woven, d);
    do {
        for (int64_t r = 0; r < runs->count; r++) {
            const uint8_t *from[MOST_WOVEN];
            for (int64_t k = 0; k < woven->count; k++)
                from[k] = chunks + k * d->chunk_nbytes + woven->pieces[k].from + at.from +
                          runs->local[r] * d->sample_stride;
            weave(woven, d, from, rows + at.to + runs->position[r] * d->row_nbytes, lines,
                  runs->length[r]);
        }
    } while (go_on(first, first->rank - 2, &at));
}
