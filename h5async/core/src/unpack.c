/* Unpacks stored values by the CF conventions: replaces missing ones with NaN, scales, and adds an offset. */

typedef struct {
    int64_t rows, count;               /* count: values per row */
    int32_t source, is_double, is_wide; /* is_double: compute in double; is_wide: deliver double */
    const int64_t *which;               /* by row: its index in the arrays below; NULL: 0 */
    const double *scale, *offset, *fill, *low, *high; /* no-ops: 1, -0.0, NaN, -inf and inf */
} Unpack;

enum UnpackSource { I1 = 1, U1, I2, U2, I4, U4, F4, F8 };

/* Unpack one row. Parameters for computing in float are exact in double. */
#define UNPACK_ROW(name, stored, real, delivered)                                                 \
    ALWAYS_INLINE void unpack_##name(const Unpack *u, int64_t at, const stored *restrict in,      \
                                     delivered *restrict out)                                     \
    {                                                                                             \
        const real scale = (real)u->scale[at], offset = (real)u->offset[at];                      \
        const real fill = (real)u->fill[at], low = (real)u->low[at], high = (real)u->high[at];    \
        for (int64_t i = 0; i < u->count; i++) {                                                  \
            real value = (real)in[i];                                                             \
            int is_missing = (value == fill) | (value < low) | (value > high);                    \
            value = is_missing ? (real)NAN : value;                                               \
            out[i] = (delivered)(value * scale + offset);                                         \
        }                                                                                         \
    }

#define UNPACK_SOURCE(kind, stored)                                                               \
    UNPACK_ROW(floats_##kind, stored, float, float)                                               \
    UNPACK_ROW(narrowed_##kind, stored, double, float)                                            \
    UNPACK_ROW(doubles_##kind, stored, double, double)
#define UNPACK_CASE(kind, stored)                                                                 \
    case kind:                                                                                    \
        if (!u->is_double)                                                                        \
            unpack_floats_##kind(u, at, (const stored *)in, (float *)out);                        \
        else if (u->is_wide)                                                                      \
            unpack_doubles_##kind(u, at, (const stored *)in, (double *)out);                      \
        else                                                                                      \
            unpack_narrowed_##kind(u, at, (const stored *)in, (float *)out);                      \
        break;
#define EACH_STORED(DO)                                                                           \
    DO(I1, int8_t) DO(U1, uint8_t) DO(I2, int16_t) DO(U2, uint16_t)                               \
    DO(I4, int32_t) DO(U4, uint32_t) DO(F4, float) DO(F8, double)

EACH_STORED(UNPACK_SOURCE)

ALWAYS_INLINE void unpack_row(const Unpack *u, int64_t at, const void *in, void *out)
{
    switch (u->source) {
        EACH_STORED(UNPACK_CASE)
    }
}

ALWAYS_INLINE void unpack_inline(const Unpack *u, const uint8_t *in, uint8_t *out)
{
    const int64_t sizes[] = {0, 1, 1, 2, 2, 4, 4, 4, 8};
    int64_t from_nbytes = u->count * sizes[u->source], to_nbytes = u->count * (u->is_wide ? 8 : 4);
    for (int64_t row = 0; row < u->rows; row++)
        unpack_row(u, u->which ? u->which[row] : 0, in + row * from_nbytes, out + row * to_nbytes);
}

ALSO_FOR_AVX2(unpack, (const Unpack *u, const uint8_t *in, uint8_t *out), (u, in, out))

/* Unpack contiguous rows. */
PUBLIC int64_t h5async_unpack(const Unpack *u, const uint8_t *in, uint8_t *out)
{
    unpack(u, in, out);
    return 1;
}
