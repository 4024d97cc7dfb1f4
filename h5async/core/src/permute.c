/* Maps positions to sample numbers with the permutations of order/selection.py. */

enum { ROUNDS = 6, LANES = 4, MAX_LANES = 32 };

static const uint64_t FIRST_FACTOR = 0xBF58476D1CE4E5B9u, SECOND_FACTOR = 0x94D049BB133111EBu;

ALWAYS_INLINE uint64_t hash64(uint64_t x)
{
    x *= FIRST_FACTOR;
    x ^= x >> 32;
    return x * SECOND_FACTOR;
}

ALWAYS_INLINE uint64_t shifted(uint64_t half, uint64_t other, uint64_t modulus, uint64_t key)
{
    half += (hash64(other + key) >> 32) * (uint32_t)modulus >> 32;
    return half - (modulus & -(uint64_t)(half >= modulus)); /* no branch: it could not be predicted */
}

/* The numbers below `count`; `a` * `b` is slightly larger. If that is at most 2**31, x / `a` equals
   x * `factor` >> `shift`; otherwise `factor` is 0. */
typedef struct {
    uint64_t count, a, b, factor;
    int shift;
} Domain;

static Domain domain_of(uint64_t count, uint64_t a, uint64_t b)
{
    Domain d = {.count = count, .a = a, .b = b, .shift = 31};
    if (a > (uint64_t)1 << 31 || b > ((uint64_t)1 << 31) / a)
        return d;
    while ((uint64_t)1 << (d.shift - 31) < a)
        d.shift++;
    d.factor = (((uint64_t)1 << d.shift) + a - 1) / a;
    return d;
}

/* Apply the Feistel network to several numbers at a time: one alone would stall on its multiplications.
   `lanes` is a compile-time constant, so that loops are vectorized where the processor can multiply vectors.
   `own`: each number's `a`, then each one's `b`, instead of those of `d`; or NULL. `names` are added to keys. */
ALWAYS_INLINE void feistel_lanes(uint64_t *x, int lanes, Domain d, const uint64_t (*own)[MAX_LANES],
                                 const uint64_t *names, const uint64_t *keys)
{
    uint64_t right[MAX_LANES], left[MAX_LANES], all = d.a;
    for (int j = 0; j < lanes; j++)
        all |= x[j];
    const int is_multiplied = own == NULL && d.factor != 0;
    for (int j = 0; j < lanes && is_multiplied; j++)
        right[j] = x[j] * d.factor >> d.shift;
    for (int j = 0; j < lanes && !is_multiplied && all >> 32; j++)
        right[j] = x[j] / (own ? own[0][j] : d.a);
    for (int j = 0; j < lanes && !is_multiplied && !(all >> 32); j++) /* exact: none is rounded up */
        right[j] = (uint64_t)((double)x[j] / (double)(own ? own[0][j] : d.a));
    for (int j = 0; j < lanes; j++)
        left[j] = x[j] - right[j] * (own ? own[0][j] : d.a);
    for (int i = 0; i < ROUNDS; i += 2) {
        for (int j = 0; j < lanes; j++)
            left[j] = shifted(left[j], right[j], own ? own[0][j] : d.a, names[j] + keys[i]);
        for (int j = 0; j < lanes; j++)
            right[j] = shifted(right[j], left[j], own ? own[1][j] : d.b, names[j] + keys[i + 1]);
    }
    for (int j = 0; j < lanes; j++)
        x[j] = right[j] * (own ? own[0][j] : d.a) + left[j];
}

#if defined(AVX2)
/* `shifted` with 32-bit multiplications: all arguments are below 2**32 except `key`, which has already been
   multiplied by the first factor. */
AVX2 ALWAYS_INLINE __m256i shifted_avx2(__m256i half, __m256i other, __m256i modulus, __m256i key)
{
    const __m256i first = _mm256_set1_epi64x((int64_t)FIRST_FACTOR);
    const __m256i second = _mm256_set1_epi64x((int64_t)SECOND_FACTOR);
    __m256i x = _mm256_mul_epu32(other, _mm256_srli_epi64(first, 32)), upper;
    x = _mm256_add_epi64(_mm256_slli_epi64(x, 32), _mm256_mul_epu32(other, first));
    x = _mm256_add_epi64(x, key);
    upper = _mm256_srli_epi64(x, 32);
    x = _mm256_xor_si256(x, upper);
    upper = _mm256_add_epi64(_mm256_mul_epu32(upper, second),
                             _mm256_mul_epu32(x, _mm256_srli_epi64(second, 32)));
    upper = _mm256_add_epi64(upper, _mm256_srli_epi64(_mm256_mul_epu32(x, second), 32));
    upper = _mm256_srli_epi64(_mm256_mul_epu32(upper, modulus), 32);
    half = _mm256_add_epi64(half, upper);
    return _mm256_min_epu32(half, _mm256_sub_epi64(half, modulus)); /* below 0, it is large */
}

enum { VECTORS = 4, AVX2_LANES = 4 * VECTORS };

/* Quotients of numbers below 2**31: of doubles, which are exact. */
AVX2 ALWAYS_INLINE __m256i divided_avx2(__m256i x, __m256i by)
{
    const __m256i exponent = _mm256_set1_epi64x(0x4330000000000000); /* of 2**52, to which they are added */
    const __m256d zero = _mm256_castsi256_pd(exponent);
    __m256d one = _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(x, exponent)), zero);
    __m256d other = _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(by, exponent)), zero);
    return _mm256_cvtepi32_epi64(_mm256_cvttpd_epi32(_mm256_div_pd(one, other)));
}

/* feistel_lanes for numbers below 2**31, in a domain with a factor or their own `a` and `b`; `lanes` is a
   multiple of AVX2_LANES. */
AVX2 ALWAYS_INLINE void feistel_vectors(uint64_t *x, int lanes, Domain d, const uint64_t (*own)[MAX_LANES],
                                        const uint64_t *names, const uint64_t *keys)
{
    const __m256i factor = _mm256_set1_epi64x((int64_t)d.factor);
    for (int begin = 0; begin < lanes; begin += AVX2_LANES) {
        __m256i left[VECTORS], right[VECTORS], name[VECTORS], *at = (__m256i *)(void *)(x + begin);
        __m256i a[VECTORS], b[VECTORS];
        for (int j = 0; j < VECTORS; j++) {
            a[j] = own ? _mm256_loadu_si256((const __m256i *)(const void *)(own[0] + begin) + j)
                       : _mm256_set1_epi64x((int64_t)d.a);
            b[j] = own ? _mm256_loadu_si256((const __m256i *)(const void *)(own[1] + begin) + j)
                       : _mm256_set1_epi64x((int64_t)d.b);
        }
        uint64_t multiplied[AVX2_LANES];
        for (int j = 0; j < AVX2_LANES; j++)
            multiplied[j] = names[begin + j] * FIRST_FACTOR;
        memcpy(name, multiplied, sizeof name);
        for (int j = 0; j < VECTORS; j++) {
            __m256i all = _mm256_loadu_si256(at + j);
            right[j] = own ? divided_avx2(all, a[j])
                           : _mm256_srli_epi64(_mm256_mul_epu32(all, factor), d.shift);
            left[j] = _mm256_sub_epi64(all, _mm256_mul_epu32(right[j], a[j]));
        }
        for (int i = 0; i < ROUNDS; i += 2) {
            const __m256i even = _mm256_set1_epi64x((int64_t)(keys[i] * FIRST_FACTOR));
            const __m256i odd = _mm256_set1_epi64x((int64_t)(keys[i + 1] * FIRST_FACTOR));
            for (int j = 0; j < VECTORS; j++)
                left[j] = shifted_avx2(left[j], right[j], a[j], _mm256_add_epi64(name[j], even));
            for (int j = 0; j < VECTORS; j++)
                right[j] = shifted_avx2(right[j], left[j], b[j], _mm256_add_epi64(name[j], odd));
        }
        for (int j = 0; j < VECTORS; j++)
            _mm256_storeu_si256(at + j, _mm256_add_epi64(_mm256_mul_epu32(right[j], a[j]), left[j]));
    }
}

AVX2 static void feistel_avx2(uint64_t *x, int lanes, Domain d, const uint64_t (*own)[MAX_LANES],
                              const uint64_t *names, const uint64_t *keys)
{
    if (own == NULL)
        feistel_vectors(x, lanes, d, NULL, names, keys);
    else
        feistel_vectors(x, lanes, d, own, names, keys);
}
#endif

/* Permute a number again until it is in the domain. */
static uint64_t permute_into(uint64_t x, Domain d, uint64_t name, const uint64_t *keys)
{
    while (x >= d.count)
        feistel_lanes(&x, 1, d, NULL, &name, keys);
    return x;
}

static const uint64_t NO_NAMES[MAX_LANES] = {0};

/* Permute numbers, `lanes` at a time; returns the number done, which leaves out a remainder at the end. */
ALWAYS_INLINE int64_t permute_lanes(uint64_t *numbers, int64_t n, int lanes, Domain d,
                                    const uint64_t *keys)
{
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
        feistel_lanes(numbers + i, lanes, d, NULL, NO_NAMES, keys);
    return i;
}

#if defined(AVX512)
AVX512 static int64_t permute_avx512(uint64_t *numbers, int64_t n, Domain d, const uint64_t *keys)
{
    return permute_lanes(numbers, n, MAX_LANES, d, keys);
}
#endif

/* Permutes numbers below `count` in place; `a` * `b` is slightly larger than `count`. */
PUBLIC int64_t h5async_permute(uint64_t *numbers, int64_t n, uint64_t count, uint64_t a, uint64_t b,
                               const uint64_t *keys)
{
    int64_t i = 0;
    if (a == 0 || b == 0 || count == 0)
        return 0;
    const Domain d = domain_of(count, a, b);
#if defined(AVX512)
    if (HAS_AVX512())
        i = permute_avx512(numbers, n, d, keys);
    else if (HAS_AVX2() && d.factor != 0)
        for (; i + MAX_LANES <= n; i += MAX_LANES)
            feistel_avx2(numbers + i, MAX_LANES, d, NULL, NO_NAMES, keys);
#endif
    i += permute_lanes(numbers + i, n - i, LANES, d, keys);
    permute_lanes(numbers + i, n - i, 1, d, keys);
    for (int64_t j = 0; j < n; j++)
        numbers[j] = permute_into(numbers[j], d, 0, keys);
    return n;
}
