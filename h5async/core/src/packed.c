/* Undoes HDF5's n-bit and scale-offset filters, byte for byte as HDF5 does (H5Znbit.c,
   H5Zscaleoffset.c). Both pack numbers without gaps, the most significant bit first. Python has checked
   the client data. */

/* The `width` bits from `bit` on; the caller has checked that `in` has them. */
ALWAYS_INLINE uint64_t bits_at(const uint8_t *in, int64_t n, int64_t bit, int width)
{
    int64_t at = bit >> 3;
    int shift = (int)(bit & 7);
    uint8_t last[9] = {0};
    if (width == 0)
        return 0;
    if (n - at < 9) {
        memcpy(last, in + at, (size_t)(n - at));
        in = last, at = 0;
    }
    uint64_t word;
    memcpy(&word, in + at, 8);
    word = __builtin_bswap64(word) << shift;
    word |= (uint64_t)in[at + 8] >> (8 - shift);
    return word >> (64 - width);
}

static int is_size_of_number(int64_t size)
{
    return size == 1 || size == 2 || size == 4 || size == 8;
}

ALWAYS_INLINE void put_number(uint8_t *out, uint64_t value, int64_t size, int is_big)
{
    if (is_big)
        value = __builtin_bswap64(value << (64 - 8 * size));
    memcpy(out, &value, (size_t)size);
}

/* How scale-offset's packed numbers become values. */
typedef struct {
    int64_t count;
    uint64_t minimum, fill, power; /* power: the bits of a float of this size */
    int width, is_big, is_float, has_fill;
} Scaled;

ALWAYS_INLINE uint64_t scaled(const Scaled *s, uint64_t number, int64_t size)
{
    if (!s->is_float)
        return number + s->minimum;
    if (size == 4) {
        float power, minimum;
        memcpy(&power, &s->power, 4), memcpy(&minimum, &s->minimum, 4);
        float value = (float)(int32_t)number / power + minimum;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        return bits;
    }
    double power, minimum;
    memcpy(&power, &s->power, 8), memcpy(&minimum, &s->minimum, 8);
    double value = (double)(int64_t)number / power + minimum;
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}

ALWAYS_INLINE void unscale_numbers(const Scaled *s, const uint8_t *in, int64_t n, uint8_t *out,
                                   int64_t size)
{
    const uint64_t ones = s->width == 64 ? UINT64_MAX : ((uint64_t)1 << s->width) - 1;
    for (int64_t i = 0; i < s->count; i++) {
        uint64_t number = bits_at(in, n, i * s->width, s->width);
        int is_fill = s->has_fill && number == ones;
        put_number(out + i * size, is_fill ? s->fill : scaled(s, number, size), size, s->is_big);
    }
}

enum { SCALED_HEADER = 21 };

static int64_t unscale(const Filter *f, const uint8_t *in, int64_t n, uint8_t *out, int64_t room)
{
    const uint32_t *v = f->values;
    int64_t size = v[4];
    Scaled s = {.count = v[2], .is_float = v[3] == 1, .is_big = v[6] == 1, .has_fill = v[7] == 1,
                .fill = v[8] | (uint64_t)v[9] << 32};
    if (!is_size_of_number(size) || n < SCALED_HEADER || s.count > room / size)
        return -1;
    uint32_t width = little32(in);
    if (width > 8 * size || n - SCALED_HEADER < (s.count * (int64_t)width + 7) / 8)
        return -1;
    s.width = (int)width;
    memcpy(&s.minimum, in + 5, in[4] < 8 ? in[4] : 8);
    if (s.is_float && size == 4) {
        float power = powf(10.0f, (float)(int32_t)v[1]);
        memcpy(&s.power, &power, 4);
    } else if (s.is_float) {
        double power = pow(10.0, (double)(int32_t)v[1]);
        memcpy(&s.power, &power, 8);
    }
    in += SCALED_HEADER, n -= SCALED_HEADER;
    if (s.width == 8 * size) { /* the values themselves, little-endian */
        for (int64_t i = 0; i < s.count; i++) {
            uint64_t value = 0;
            memcpy(&value, in + i * size, (size_t)size);
            put_number(out + i * size, value, size, s.is_big);
        }
        return s.count * size;
    }
    BY_SIZE(size, unscale_numbers, &s, in, n, out);
    return s.count * size;
}

/* Unpack numbers of one type, each shifted to its bit offset and surrounded by zeros. */
ALWAYS_INLINE void unpack_numbers(const uint8_t *in, int64_t n, uint8_t *out, int64_t count,
                                  const uint32_t *v, int64_t size)
{
    int is_big = v[5] == 1, width = (int)v[6], offset = (int)v[7];
    for (int64_t i = 0; i < count; i++)
        put_number(out + i * size, bits_at(in, n, i * width, width) << offset, size, is_big);
}

static int64_t unpack_bits(const Filter *f, const uint8_t *in, int64_t n, uint8_t *out,
                           int64_t room)
{
    const uint32_t *v = f->values;
    int64_t count = v[2], size = v[4];
    if (!is_size_of_number(size) || count > room / size || n < (count * (int64_t)v[6] + 7) / 8)
        return -1;
    BY_SIZE(size, unpack_numbers, in, n, out, count, v);
    return count * size;
}
