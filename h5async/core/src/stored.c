/* Converts stored elements to NumPy's by the steps that codec/filters.py has declared and checked: each
   step converts some values of every element. */

enum { STEP_VALUES = 13 };
enum StepKind { STEP_COPY, STEP_ENDED, STEP_PADDED, STEP_BITS, STEP_FLOAT, STEP_KINDS };

typedef struct {
    uint32_t kind, from, to, from_nbytes, nbytes, count, is_big, given[6];
} Step;

/* `count` bits from bit `at` on; 0 < count <= 64. */
ALWAYS_INLINE uint64_t field_of(uint64_t bits, uint32_t at, uint32_t count)
{
    return bits >> at & (UINT64_MAX >> (64 - count));
}

/* Convert a float of any format to an IEEE format that holds all its values; HDF5 keeps a NaN's sign only. */
ALWAYS_INLINE uint64_t float_bits(const uint32_t *g, uint64_t bits, uint32_t nbytes)
{
    const int msize = nbytes == 2 ? 10 : nbytes == 4 ? 23 : 52;
    const int64_t most = nbytes == 2 ? 31 : nbytes == 4 ? 255 : 2047;
    int64_t power = (int64_t)field_of(bits, g[1], g[2]);
    uint64_t mantissa = field_of(bits, g[3], g[4]);
    uint64_t sign = field_of(bits, g[0], 1) << (8 * nbytes - 1);
    if (power == (int64_t)(UINT64_MAX >> (64 - g[2])))
        return sign | (uint64_t)most << msize | (mantissa ? ((uint64_t)1 << msize) - 1 : 0);
    if (power == 0 && mantissa == 0)
        return sign;
    if (power != 0)
        mantissa |= (uint64_t)1 << g[4];
    else
        for (power = 1; !(mantissa >> g[4]); power--)
            mantissa <<= 1;
    power += most / 2 - (int64_t)g[5];
    mantissa <<= msize - (int)g[4];
    if (power > 0)
        return sign | (uint64_t)power << msize | (mantissa & (((uint64_t)1 << msize) - 1));
    return sign | (power > -64 ? mantissa >> (1 - power) : 0);
}

ALWAYS_INLINE void convert_value(const Step *s, const uint8_t *in, uint8_t *out)
{
    if (s->kind <= STEP_PADDED) {
        size_t n = s->nbytes;
        if (s->kind == STEP_ENDED)
            n = strnlen((const char *)in, n);
        while (s->kind == STEP_PADDED && n && in[n - 1] == ' ')
            n--;
        memcpy(out, in, n);
        memset(out + n, 0, s->nbytes - n);
        return;
    }
    uint64_t bits = 0;
    memcpy(&bits, in, s->from_nbytes);
    if (s->is_big)
        bits = __builtin_bswap64(bits) >> (64 - 8 * s->from_nbytes);
    if (s->kind == STEP_FLOAT) {
        bits = float_bits(s->given, bits, s->nbytes);
    } else {
        bits = field_of(bits, s->given[0], s->given[1]);
        if (s->given[2] && bits >> (s->given[1] - 1))
            bits |= ~(UINT64_MAX >> (64 - s->given[1]));
    }
    if (s->is_big)
        bits = __builtin_bswap64(bits << (64 - 8 * s->nbytes));
    memcpy(out, &bits, s->nbytes);
}

static int64_t convert_stored(const Filter *f, const uint8_t *in, int64_t n, uint8_t *out,
                              int64_t room)
{
    const int64_t to = f->values[0], from = f->values[1];
    if (f->num_values < 2 || n % from || n / from > room / to)
        return -1;
    memset(out, 0, (size_t)(n / from * to)); /* clears the padding between members */
    for (int64_t v = 2; v + STEP_VALUES <= f->num_values; v += STEP_VALUES) {
        Step s;
        memcpy(&s, f->values + v, sizeof s);
        for (int64_t i = 0; i < n / from; i++)
            for (int64_t k = 0; k < s.count; k++)
                convert_value(&s, in + i * from + s.from + k * s.from_nbytes,
                              out + i * to + s.to + k * s.nbytes);
    }
    return n / from * to;
}
