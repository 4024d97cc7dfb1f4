/* Transforms rows as they are read to rows as they are delivered: channels first, cast, scaled. */

typedef struct {
    int64_t samples, points, channels; /* the order; channels come before points then */
    int32_t source, is_float;          /* source: see below; is_float: deliver float32 */
    const float *scale, *offset;       /* [channels], or NULL */
} Transform;

enum SourceKind { BYTES_1 = 1, BYTES_2 = 2, BYTES_4 = 4, BYTES_8 = 8, UINT8 = 11, UINT16 = 12,
              INT16 = 13, FLOAT32 = 14 };

/* The type of an element as it is read. */
static int64_t source_nbytes(const Transform *t)
{
    if (t->source <= BYTES_8)
        return t->source;
    return t->source == UINT8 ? 1 : t->source == FLOAT32 ? 4 : 2;
}

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
   they belong, and the three results are combined. */
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

#define PLANES_OF(kind, planes, type)                                                             \
    case kind:                                                                                    \
        planes(type)                                                                              \
        break;

/* `count` points of one sample; the compiler vectorizes loops over a known number of channels. */
ALWAYS_INLINE void transform_points(const Transform *t, const uint8_t *in, uint8_t *out,
                                    int64_t points, int64_t count, int64_t channels)
{
    switch (t->source) {
        PLANES_OF(BYTES_1, COPY_PLANE, uint8_t)
        PLANES_OF(BYTES_2, COPY_PLANE, uint16_t)
        PLANES_OF(BYTES_4, COPY_PLANE, uint32_t)
        PLANES_OF(BYTES_8, COPY_PLANE, uint64_t)
        PLANES_OF(UINT8, CAST_PLANE, uint8_t)
        PLANES_OF(UINT16, CAST_PLANE, uint16_t)
        PLANES_OF(INT16, CAST_PLANE, int16_t)
        PLANES_OF(FLOAT32, CAST_PLANE, float)
    }
}

/* Images of 3 channels of bytes, through planes that stay in the first-level cache. */
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

ALSO_FOR_AVX2(transform, (const Transform *t, const uint8_t *in, uint8_t *out, int64_t from_size,
                          int64_t to_size), (t, in, out, from_size, to_size))

/* Transform (samples, points, channels) to (samples, channels, points); 0: not a known conversion. */
PUBLIC int64_t h5async_transform(const Transform *t, const uint8_t *in, uint8_t *out)
{
    int64_t from_size = source_nbytes(t);
    int64_t to_size = t->is_float ? 4 : from_size;
    int is_copy = t->source == BYTES_1 || t->source == BYTES_2 || t->source == BYTES_4 ||
                  t->source == BYTES_8;
    if (!is_copy && (t->source < UINT8 || t->source > FLOAT32))
        return 0;
    if (is_copy == !!t->is_float || t->samples < 0 || t->points < 1 || t->channels < 1)
        return 0;
    transform(t, in, out, from_size, to_size);
    return 1;
}
