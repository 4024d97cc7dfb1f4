/* Transforms rows from stored to delivered form: channels first, cast, scaled. */

typedef struct {
    int64_t samples, points, channels; /* in this order as read; delivered with channels before points */
    int32_t source, is_float;          /* source: enum SourceKind; is_float: deliver float32 */
    const float *scale, *offset;       /* [channels], or NULL */
} Transform;

enum SourceKind { BYTES_1 = 1, BYTES_2 = 2, BYTES_4 = 4, BYTES_8 = 8, UINT8 = 11, UINT16 = 12,
              INT16 = 13, FLOAT32 = 14 };

/* The size of an element as read. */
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
           float scale = t->scale ? t->scale[c] : 1;                                              \
           float offset = t->offset ? t->offset[c] : -0.0f; /* adding it changes no number */         \
           for (int64_t i = 0; i < count; i++)                                                    \
               to[i] = (float)from[i * channels + c] * scale + offset;)

#define PLANES_OF(kind, planes, type)                                                             \
    case kind:                                                                                    \
        planes(type)                                                                              \
        break;

/* Transform `count` points of a sample; with a constant `channels`, the compiler vectorizes the loops. */
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

ALWAYS_INLINE void transform_inline(const Transform *t, const uint8_t *in, uint8_t *out,
                                    int64_t from_size, int64_t to_size)
{
    int64_t tile = 4096 / (t->channels * from_size) + 64;
    for (int64_t s = 0; s < t->samples; s++)
        for (int64_t at = 0; at < t->points; at += tile) {
            int64_t count = t->points - at < tile ? t->points - at : tile;
            const uint8_t *from = in + (s * t->points + at) * t->channels * from_size;
            uint8_t *to = out + (s * t->points * t->channels + at) * to_size;
            if (t->channels == 1)
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

/* Transform (samples, points, channels) to (samples, channels, points). */
PUBLIC int64_t h5async_transform(const Transform *t, const uint8_t *in, uint8_t *out)
{
    int64_t from_size = source_nbytes(t);
    transform(t, in, out, from_size, t->is_float ? 4 : from_size);
    return 1;
}
