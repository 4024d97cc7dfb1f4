/* Sums and scales the values of sparse rows (CSR), such as counts of genes in cells. */

/* log(1 + x) for x from -0.5 to 2**20, with a relative error of 1e-11: from the exponent of 1 + x and a
   series in its fraction, which is between sqrt(1/2) and sqrt(2). The rounding error of 1 + x is added
   back: it matters where 1 + x is near 1. */
ALWAYS_INLINE double log_of_one_plus(double x)
{
    const double u = 1.0 + x, lost = x - (u - 1.0);
    uint64_t bits;
    memcpy(&bits, &u, sizeof bits);
    uint64_t shifted = bits - 0x3FE6A09E667F3BCDu; /* of sqrt(1/2) */
    int64_t exponent = (int64_t)(shifted >> 52 | (shifted >> 63 ? 0xFFFFFFFFFFFFF000u : 0));
    bits -= (uint64_t)exponent << 52;
    double fraction;
    memcpy(&fraction, &bits, sizeof fraction);
    const double s = (fraction - 1.0) / (fraction + 1.0), t = s * s;
    const double series =
        2.0 + t * (2.0 / 3 + t * (2.0 / 5 + t * (2.0 / 7 + t * (2.0 / 9 + t * (2.0 / 11 + t * (2.0 / 13))))));
    return (double)(int32_t)exponent * 0.6931471805599453 + (s * series + lost);
}

/* Divide the values of a row into `out`; returns whether all are in the range of log_of_one_plus. */
#define SCALE_ROW(Value, _)                                                                       \
    ALWAYS_INLINE int scale_##Value(const Value *restrict in, int64_t count, double divisor,      \
                                    double *restrict out)                                         \
    {                                                                                             \
        int is_usual = 1;                                                                         \
        for (int64_t i = 0; i < count; i++) {                                                     \
            out[i] = (double)in[i] / divisor;                                                     \
            is_usual &= (out[i] >= -0.5) & (out[i] < 1 << 20);                                      \
        }                                                                                         \
        return is_usual;                                                                          \
    }                                                                                             \
    static double sum_##Value(const Value *in, int64_t count)                                     \
    {                                                                                             \
        double sums[8] = {0}; /* independent: each addition waits for the one before it */        \
        int64_t i = 0;                                                                            \
        for (; i + 8 <= count; i += 8)                                                            \
            for (int k = 0; k < 8; k++)                                                           \
                sums[k] += (double)in[i + k];                                                     \
        for (; i < count; i++)                                                                    \
            sums[0] += (double)in[i];                                                             \
        return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +                                      \
               ((sums[4] + sums[5]) + (sums[6] + sums[7]));                                       \
    }
EACH_VALUE(SCALE_ROW)

/* Dispatch on the kind of the values, numbered from 1. */
#define SCALE_OF(Value, _)                                                                        \
    if (kind == ++number)                                                                         \
        is_usual = scale_##Value((const Value *)in, count, divisor, scaled);
#define SUM_OF(Value, _)                                                                          \
    if (kind == ++number)                                                                         \
        sums[row] = sum_##Value((const Value *)data + indptr[row], count);

enum { SCALED_AT_ONCE = 512 };

ALWAYS_INLINE void scale_some_inline(const void *in, int64_t kind, int64_t count, double divisor,
                                     int64_t is_log, float *out)
{
    double scaled[SCALED_AT_ONCE];
    int is_usual = 0, number = 0;
    EACH_VALUE(SCALE_OF)
    if (is_log && is_usual)
        for (int64_t i = 0; i < count; i++)
            scaled[i] = log_of_one_plus(scaled[i]);
    else if (is_log)
        for (int64_t i = 0; i < count; i++)
            scaled[i] = log1p(scaled[i]);
    for (int64_t i = 0; i < count; i++)
        out[i] = (float)scaled[i];
}

ALSO_FOR_AVX2(scale_some,
              (const void *in, int64_t kind, int64_t count, double divisor, int64_t is_log, float *out),
              (in, kind, count, divisor, is_log, out))

/* Bytes of a value, by its kind. */
static const int8_t COUNT_NBYTES[] = {0, 1, 2, 4, 8, 1, 2, 4, 8, 4, 8};

/* Sum the values of each row; `kind` is an enum ValueKind. */
PUBLIC int64_t h5async_sum_rows(const void *data, const int64_t *indptr, double *sums, int64_t rows,
                                int64_t kind)
{
    for (int64_t row = 0; row < rows; row++) {
        int64_t count = indptr[row + 1] - indptr[row], number = 0;
        EACH_VALUE(SUM_OF)
    }
    return rows;
}

/* Divide the values of each row by its divisor, and take log(1 + value) if `is_log`; `out` is float32. */
PUBLIC int64_t h5async_scale_rows(const uint8_t *data, const int64_t *indptr, const double *divisors,
                                  float *out, int64_t rows, int64_t kind, int64_t is_log)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = indptr[row], count; at < indptr[row + 1]; at += count) {
            count = indptr[row + 1] - at;
            count = count < SCALED_AT_ONCE ? count : SCALED_AT_ONCE;
            scale_some((const void *)(data + at * COUNT_NBYTES[kind]), kind, count, divisors[row],
                       is_log, out + at);
        }
    return rows;
}
