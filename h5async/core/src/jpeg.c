/* Decodes JPEGs with libjpeg, resizes the wanted part, and writes it to its place. Images that it cannot
   decode, or not without a warning of libjpeg, are refused: Python decodes them by other means.

   Rows are resized as they are decoded, with the arithmetic of OpenCV's linear interpolation of bytes:
   weights have 11 bits, a sum along a row is reduced to 15 bits, and that of two rows to 8. */

/* The beginning of libjpeg's structures (jpeglib.h), which all versions for 8 bits share. */
typedef struct {
    void (*error_exit)(void *);
    void (*emit_message)(void *, int);
    void (*others[3])(void);
    int32_t code, parameters[20];
    uint8_t rest[256];
    jmp_buf failed;
    int32_t has_warned;
} JpegErrors;

typedef struct {
    JpegErrors *errors;
    void *memory, *progress, *client;
    int32_t is_decompressor, state;
    void *source;
    uint32_t width, height;
    int32_t components, color_space, out_color_space;
    uint32_t scale_num, scale_denom;
    double gamma;
    int32_t options[12];
    uint32_t out_width, out_height;
    int32_t out_components[3], num_colors;
    void *colors;
    uint32_t row; /* the next one to be read */
    uint8_t rest[1024];
} Jpeg;

enum { JPEG_RGB = 2, WEIGHT_BITS = 11, JPEG_CHANNELS = 3, JPEG_MARGIN = 2, LOAD_NBYTES = 16 };

/* An image to decode, and the wanted part of it; Python fills these in, as arrays of numbers. */
typedef struct {
    const uint8_t *data;
    int64_t nbytes, height, width, top, bottom, left, right;
    uint8_t *out; /* [out_height][out_width][JPEG_CHANNELS] */
    int64_t out_height, out_width, is_flipped;
    int64_t denominator; /* 0: decode all of it; else only the part, scaled by 1 / this */
    int64_t number;      /* for Python's use */
} Picture;

/* The two neighbours of a result; the first, at `at`, may lie one before the first pixel or row. */
typedef struct {
    int32_t at;
    int16_t weights[2];
} Tap;

static void jpeg_failed(void *jpeg)
{
    longjmp(((Jpeg *)jpeg)->errors->failed, 1);
}

static void jpeg_warned(void *jpeg, int level)
{
    ((Jpeg *)jpeg)->errors->has_warned |= level < 0;
}

/* Makes a decompressor. libjpeg's errors tell its version, and its structure's size, if they differ. */
static int make_jpeg(const Libraries *l, Jpeg *jpeg, JpegErrors *errors)
{
    volatile int32_t known[2] = {0}, count = 0;
    memset(jpeg, 0, sizeof *jpeg), memset(errors, 0, sizeof *errors);
    jpeg->errors = l->jpeg_std_error(errors);
    errors->error_exit = jpeg_failed, errors->emit_message = jpeg_warned;
    if (setjmp(errors->failed)) {
        if (count == 2 || (size_t)errors->parameters[0] > sizeof *jpeg)
            return 0;
        known[count++] = errors->parameters[0];
    }
    l->jpeg_CreateDecompress(jpeg, known[0], (size_t)known[1]);
    return 1;
}

/* Finds the neighbours of `count` results that divide [from, to) of an image decoded at 1 / denominator,
   as indices in the decoded part, which begins at from / denominator. */
static void find_taps(Tap *taps, int64_t count, int64_t from, int64_t to, int64_t denominator)
{
    double step = 1 / ((double)count / (double)(to - from)) / (double)denominator;
    double begin = (double)(from % denominator) / (double)denominator - 0.5;
    for (int64_t i = 0; i < count; i++) {
        float place = (float)(((double)i + 0.5) * step + begin), whole = floorf(place);
        float weight = place - whole;
        taps[i].at = (int32_t)whole;
        taps[i].weights[0] = (int16_t)lrintf((1 - weight) * (1 << WEIGHT_BITS));
        taps[i].weights[1] = (int16_t)lrintf(weight * (1 << WEIGHT_BITS));
    }
}

/* Clamps columns to the part, whose last one is `last`, and reverses them if they are flipped. */
static void bound_taps(Tap *taps, int64_t count, int64_t last, int is_flipped)
{
    for (int64_t i = 0; i < count; i++)
        if (taps[i].at < 0 || taps[i].at >= last)
            taps[i] = (Tap){taps[i].at < 0 ? 0 : (int32_t)last, {1 << WEIGHT_BITS, 0}};
    for (int64_t i = 0; is_flipped && i < count / 2; i++) {
        Tap other = taps[i];
        taps[i] = taps[count - 1 - i], taps[count - 1 - i] = other;
    }
}

/* Up to LOAD_NBYTES beyond the pixels may be read from `row`, and written to `out`. */
ALWAYS_INLINE void resize_row_inline(const uint8_t *row, const Tap *taps, int64_t count, int16_t *out)
{
    for (int64_t i = 0; i < count; i++, out += JPEG_CHANNELS) {
        const uint8_t *at = row + taps[i].at * JPEG_CHANNELS;
#if defined(SSE2)
        int32_t both;
        memcpy(&both, taps[i].weights, sizeof both);
        __m128i pixels = _mm_loadl_epi64((const __m128i *)(const void *)at);
        __m128i pairs = _mm_unpacklo_epi8(pixels, _mm_srli_si128(pixels, JPEG_CHANNELS));
        __m128i words = _mm_unpacklo_epi8(pairs, _mm_setzero_si128());
        __m128i sums = _mm_srai_epi32(_mm_madd_epi16(words, _mm_set1_epi32(both)), 4);
        _mm_storel_epi64((__m128i *)(void *)out, _mm_packs_epi32(sums, sums));
#else
        for (int c = 0; c < JPEG_CHANNELS; c++)
            out[c] = (int16_t)((at[c] * taps[i].weights[0] +
                                at[c + JPEG_CHANNELS] * taps[i].weights[1]) >> 4);
#endif
    }
}

ALSO_FOR_AVX2(resize_row, (const uint8_t *row, const Tap *taps, int64_t count, int16_t *out),
              (row, taps, count, out))

ALWAYS_INLINE void join_rows_inline(const int16_t *one, const int16_t *other, const int16_t *weights,
                                    uint8_t *out, int64_t count)
{
    int16_t first = weights[0], second = weights[1];
    for (int64_t i = 0; i < count; i++)
        out[i] = (uint8_t)((int16_t)((int16_t)(one[i] * first >> 16) +
                                     (int16_t)(other[i] * second >> 16) + 2) >> 2);
}

ALSO_FOR_AVX2(join_rows,
              (const int16_t *one, const int16_t *other, const int16_t *weights, uint8_t *out,
               int64_t count),
              (one, other, weights, out, count))

static int64_t within(int64_t number, int64_t last)
{
    return number < 0 ? 0 : number > last ? last : number;
}

static void read_row(const Libraries *l, Jpeg *jpeg, uint8_t *row)
{
    if (l->jpeg_read_scanlines(jpeg, &row, 1) != 1)
        jpeg_failed(jpeg);
}

/* Reads and resizes the `height` rows of the part, which begins at `row + begin` in a decoded row. */
static void read_part(const Libraries *l, Jpeg *jpeg, const Picture *p, const Tap *rows,
                      const Tap *columns, int64_t height, uint8_t *row, int64_t begin, int16_t *sums)
{
    int64_t count = p->out_width * JPEG_CHANNELS, done = 0;
    int16_t *resized[2] = {sums, sums + count + LOAD_NBYTES};
    for (int64_t y = 0; y < height && done < p->out_height; y++) {
        read_row(l, jpeg, row);
        if (y < within(rows[done].at, height - 1))
            continue;
        resize_row(row + begin, columns, p->out_width, resized[y & 1]);
        for (; done < p->out_height && within(rows[done].at + 1, height - 1) <= y; done++) {
            int64_t first = within(rows[done].at, height - 1);
            join_rows(resized[first & 1], resized[y & 1], rows[done].weights, p->out + done * count,
                      count);
        }
    }
}

/* Decodes a picture. Errors jump to the caller's setjmp(); the caller frees `memory`. */
static void decode_picture(const Libraries *l, Jpeg *jpeg, const Picture *p, void *volatile *memory)
{
    int64_t denominator = p->denominator ? p->denominator : 1;
    l->jpeg_mem_src(jpeg, p->data, (unsigned long)p->nbytes);
    l->jpeg_read_header(jpeg, 1);
    if ((jpeg->components != 1 && jpeg->components != JPEG_CHANNELS) || jpeg->width != p->width ||
        jpeg->height != p->height)
        jpeg_failed(jpeg);
    jpeg->out_color_space = JPEG_RGB;
    jpeg->scale_num = 1, jpeg->scale_denom = (uint32_t)denominator;
    l->jpeg_start_decompress(jpeg);
    int64_t top = p->top / denominator, left = p->left / denominator;
    int64_t height = (p->bottom + denominator - 1) / denominator - top;
    int64_t width = (p->right + denominator - 1) / denominator - left;
    uint32_t begin = 0, decoded = jpeg->out_width;
    if (top + height > jpeg->out_height || left + width > decoded)
        jpeg_failed(jpeg);
    if (p->denominator) { /* with a margin, because colours are interpolated between neighbours */
        begin = (uint32_t)(left < JPEG_MARGIN ? 0 : left - JPEG_MARGIN);
        int64_t end = left + width + JPEG_MARGIN;
        decoded = (uint32_t)(end < decoded ? end : decoded) - begin;
        l->jpeg_crop_scanline(jpeg, &begin, &decoded);
        if (top > 0)
            l->jpeg_skip_scanlines(jpeg, (uint32_t)top);
    } else if (p->out_height == jpeg->height && p->out_width == jpeg->width && !p->is_flipped) {
        while (jpeg->row < jpeg->out_height)
            read_row(l, jpeg, p->out + jpeg->row * p->out_width * JPEG_CHANNELS);
        l->jpeg_finish_decompress(jpeg);
        return;
    }
    int64_t row_nbytes = 1 + decoded * JPEG_CHANNELS + LOAD_NBYTES;
    int64_t count = p->out_height + p->out_width;
    int64_t sums_nbytes = 2 * (p->out_width * JPEG_CHANNELS + LOAD_NBYTES) * (int64_t)sizeof(int16_t);
    Tap *taps = malloc((size_t)(count * (int64_t)sizeof(Tap) + sums_nbytes + row_nbytes));
    *memory = taps;
    if (!taps)
        jpeg_failed(jpeg);
    int16_t *sums = (int16_t *)(void *)(taps + count);
    /* At an odd address: libjpeg writes aligned rows past the caches, but they are read at once. */
    uint8_t *row = (uint8_t *)sums + sums_nbytes + 1;
    find_taps(taps, p->out_height, p->top, p->bottom, denominator);
    find_taps(taps + p->out_height, p->out_width, p->left, p->right, denominator);
    bound_taps(taps + p->out_height, p->out_width, width - 1, p->is_flipped != 0);
    while (jpeg->row < top)
        read_row(l, jpeg, row);
    read_part(l, jpeg, p, taps, taps + p->out_height, height, row, (left - begin) * JPEG_CHANNELS,
              sums);
    if (!p->denominator) { /* to find the same errors wherever the part lies */
        while (jpeg->row < jpeg->out_height)
            read_row(l, jpeg, row);
        l->jpeg_finish_decompress(jpeg);
    }
}

/* Decodes `count` pictures; is_done[i] says which were not refused. Returns 0 if there is no suitable
   libjpeg. */
PUBLIC int64_t h5async_decode_jpegs(const Libraries *l, const Picture *pictures, uint8_t *is_done,
                                    int64_t count)
{
    Jpeg jpeg;
    JpegErrors errors;
    if (!l->jpeg_std_error || !make_jpeg(l, &jpeg, &errors))
        return 0;
    l->jpeg_destroy_decompress(&jpeg);
    for (volatile int64_t i = 0; i < count; i++) {
        void *volatile memory = NULL;
        is_done[i] = 0;
        if (!make_jpeg(l, &jpeg, &errors)) /* a new one: the old one would use the last image's tables */
            continue;
        if (!setjmp(errors.failed)) {
            decode_picture(l, &jpeg, &pictures[i], &memory);
            is_done[i] = !errors.has_warned;
        }
        free(memory);
        l->jpeg_destroy_decompress(&jpeg);
    }
    return 1;
}
