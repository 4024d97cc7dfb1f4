/* Maps positions to sample numbers, by the permutations of order/sampling.py. */

enum { ROUNDS = 6, LANES = 4 };

ALWAYS_INLINE uint64_t hash64(uint64_t x)
{
    x *= 0xBF58476D1CE4E5B9u;
    x ^= x >> 32;
    return x * 0x94D049BB133111EBu;
}

ALWAYS_INLINE uint64_t shifted(uint64_t half, uint64_t other, uint64_t modulus, uint64_t key)
{
    half += (hash64(other + key) >> 32) * modulus >> 32;
    return half - (modulus & -(uint64_t)(half >= modulus)); /* no branch: it could not be predicted */
}

ALWAYS_INLINE uint64_t feistel(uint64_t x, uint64_t a, uint64_t b, const uint64_t *keys)
{
    uint64_t right, left;
    if ((x | a) >> 32)
        right = x / a, left = x % a;
    else
        right = (uint32_t)x / (uint32_t)a, left = (uint32_t)x % (uint32_t)a;
    for (int i = 0; i < ROUNDS; i += 2) {
        left = shifted(left, right, a, keys[i]);
        right = shifted(right, left, b, keys[i + 1]);
    }
    return right * a + left;
}

ALWAYS_INLINE void feistel_lanes(uint64_t *x, uint64_t a, uint64_t b, const uint64_t *keys)
{
    uint64_t right[LANES], left[LANES];
    for (int j = 0; j < LANES; j++) {
        int is_long = (int)((x[j] | a) >> 32 != 0);
        right[j] = is_long ? x[j] / a : (uint32_t)x[j] / (uint32_t)a;
        left[j] = x[j] - right[j] * a;
    }
    for (int i = 0; i < ROUNDS; i += 2) {
        for (int j = 0; j < LANES; j++)
            left[j] = shifted(left[j], right[j], a, keys[i]);
        for (int j = 0; j < LANES; j++)
            right[j] = shifted(right[j], left[j], b, keys[i + 1]);
    }
    for (int j = 0; j < LANES; j++)
        x[j] = right[j] * a + left[j];
}

/* Permutes numbers below `count` in place; `a` * `b` is a few more than `count`. */
PUBLIC int64_t h5async_permute(uint64_t *numbers, int64_t n, uint64_t count, uint64_t a, uint64_t b,
                               const uint64_t *keys)
{
    int64_t i = 0;
    if (a == 0 || b == 0 || count == 0)
        return 0;
    for (; i + LANES <= n; i += LANES) { /* several at a time: one alone waits for its products */
        uint64_t x[LANES];
        for (int j = 0; j < LANES; j++)
            x[j] = numbers[i + j];
        feistel_lanes(x, a, b, keys);
        for (int j = 0; j < LANES; j++)
            numbers[i + j] = x[j];
    }
    for (int64_t j = i; j < n; j++)
        numbers[j] = feistel(numbers[j], a, b, keys);
    for (int64_t j = 0; j < n; j++)
        while (numbers[j] >= count)
            numbers[j] = feistel(numbers[j], a, b, keys);
    return n;
}

/* The same with a permutation, and a count, for each number. */
PUBLIC int64_t h5async_permute_each(uint64_t *numbers, int64_t n, const uint64_t *count,
                                    const uint64_t *a, const uint64_t *b, const uint64_t *names,
                                    const uint64_t *keys)
{
    for (int64_t i = 0; i < n; i++) {
        uint64_t own[ROUNDS];
        if (a[i] == 0 || b[i] == 0 || count[i] == 0)
            return i;
        uint64_t name = hash64(hash64(names[i] + keys[0]) ^ keys[1]);
        for (int k = 0; k < ROUNDS; k++)
            own[k] = name + keys[k];
        uint64_t x = feistel(numbers[i], a[i], b[i], own);
        while (x >= count[i])
            x = feistel(x, a[i], b[i], own);
        numbers[i] = x;
    }
    return n;
}
