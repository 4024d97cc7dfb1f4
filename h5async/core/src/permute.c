/* Maps positions to sample numbers, by the permutations of order/selection.py. */

enum { ROUNDS = 6, LANES = 4, MAX_LANES = 32 };

ALWAYS_INLINE uint64_t hash64(uint64_t x)
{
    x *= 0xBF58476D1CE4E5B9u;
    x ^= x >> 32;
    return x * 0x94D049BB133111EBu;
}

ALWAYS_INLINE uint64_t shifted(uint64_t half, uint64_t other, uint64_t modulus, uint64_t key)
{
    half += (hash64(other + key) >> 32) * (uint32_t)modulus >> 32;
    return half - (modulus & -(uint64_t)(half >= modulus)); /* no branch: it could not be predicted */
}

/* Numbers below `count`; `a` * `b` is a few more. */
typedef struct {
    uint64_t count, a, b;
} Domain;

/* Several numbers at a time: one alone waits for its products. `lanes` is known to the compiler, which
   has them in vectors where the processor multiplies these. `own`: the `a` and then the `b` of each, in
   place of those of `d`, which all share; or NULL. `names` are added to the keys. */
ALWAYS_INLINE void feistel_lanes(uint64_t *x, int lanes, Domain d, const uint64_t (*own)[MAX_LANES],
                                 const uint64_t *names, const uint64_t *keys)
{
    uint64_t right[MAX_LANES], left[MAX_LANES], all = d.a;
    for (int j = 0; j < lanes; j++)
        all |= x[j];
    for (int j = 0; j < lanes && all >> 32; j++)
        right[j] = x[j] / (own ? own[0][j] : d.a);
    for (int j = 0; j < lanes && !(all >> 32); j++) /* exact: no quotient is rounded up to a number */
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

/* Permute one number again, until it is in the domain. */
static uint64_t permute_into(uint64_t x, Domain d, uint64_t name, const uint64_t *keys)
{
    while (x >= d.count)
        feistel_lanes(&x, 1, d, NULL, &name, keys);
    return x;
}

static const uint64_t NO_NAMES[MAX_LANES] = {0};

/* Permute numbers, `lanes` at a time; returns how many, those at the end are left. */
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

/* Permutes numbers below `count` in place; `a` * `b` is a few more than `count`. */
PUBLIC int64_t h5async_permute(uint64_t *numbers, int64_t n, uint64_t count, uint64_t a, uint64_t b,
                               const uint64_t *keys)
{
    const Domain d = {count, a, b};
    int64_t i = 0;
    if (a == 0 || b == 0 || count == 0)
        return 0;
#if defined(AVX512)
    if (HAS_AVX512())
        i = permute_avx512(numbers, n, d, keys);
#endif
    i += permute_lanes(numbers + i, n - i, LANES, d, keys);
    permute_lanes(numbers + i, n - i, 1, d, keys);
    for (int64_t j = 0; j < n; j++)
        numbers[j] = permute_into(numbers[j], d, 0, keys);
    return n;
}
