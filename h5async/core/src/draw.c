/* Draws samples with replacement, as order/selection.py does: from an alias table, with the random numbers
   of a counter-based generator (Philox 4x64 with 10 rounds). The counter is the position of the draw. */

/* In each group of DRAWN_TOGETHER draws, the random numbers of all columns come before those of all coins. */
enum { DRAWN_TOGETHER = 4096, DRAWN_AT_ONCE = 64, COUNTS_AT_ONCE = DRAWN_AT_ONCE / 4 };
enum { PHILOX_ROUNDS = 10 };

/* A column of an alias table yields its own index with probability `share`, and `alias` otherwise. */
typedef struct {
    double share;
    int64_t alias;
} Column;

ALWAYS_INLINE uint64_t high_product(uint64_t x, uint64_t y)
{
    return (uint64_t)((unsigned __int128)x * y >> 64);
}

/* Four random numbers in [0, 1) for each of COUNTS_AT_ONCE counter values from `counter` on. Computes two
   at a time: a single one would stall on its multiplications. */
static void random_numbers(uint64_t counter, const uint64_t *key, double *found)
{
    static const uint64_t factor[] = {0xCA5A826395121157u, 0xD2E7470EE14C6C93u};
    static const uint64_t step[] = {0x9E3779B97F4A7C15u, 0xBB67AE8584CAA73Bu};
    for (uint64_t done = 0; done < COUNTS_AT_ONCE; done += 2) {
        uint64_t x[2][4] = {{counter + done}, {counter + done + 1}}, first = key[0], second = key[1];
        for (int i = 0; i < PHILOX_ROUNDS; i++, first += step[0], second += step[1])
            for (int j = 0; j < 2; j++) {
                uint64_t one = x[j][0], other = x[j][2];
                x[j][0] = high_product(factor[0], other) ^ x[j][1] ^ first;
                x[j][1] = factor[0] * other;
                x[j][2] = high_product(factor[1], one) ^ x[j][3] ^ second;
                x[j][3] = factor[1] * one;
            }
        for (int j = 0; j < 2; j++)
            for (int k = 0; k < 4; k++)
                *found++ = (double)(int64_t)(x[j][k] >> 11) * 0x1p-53;
    }
}

/* Draws for `n` positions from `begin` on. Computes the table indices of a group before it looks any of
   them up, so that the processor fetches many entries from memory at a time. */
PUBLIC int64_t h5async_draw(const Column *table, const uint64_t *key, int64_t *drawn, int64_t count,
                            int64_t begin, int64_t n)
{
    double columns[DRAWN_AT_ONCE], coins[DRAWN_AT_ONCE];
    for (int64_t done = 0, some; done < n; done += some) {
        int64_t skipped = (begin + done) % DRAWN_AT_ONCE, first = begin + done - skipped;
        uint64_t counter = (uint64_t)(first / DRAWN_TOGETHER) * (DRAWN_TOGETHER / 2) + 1 +
                           (uint64_t)(first % DRAWN_TOGETHER) / 4;
        int64_t *out = drawn + done;
        some = n - done < DRAWN_AT_ONCE - skipped ? n - done : DRAWN_AT_ONCE - skipped;
        random_numbers(counter, key, columns);
        random_numbers(counter + DRAWN_TOGETHER / 4, key, coins);
        for (int64_t i = 0; i < some; i++) {
            int64_t column = (int64_t)(columns[skipped + i] * (double)count);
            out[i] = column < count ? column : count - 1;
            __builtin_prefetch(&table[out[i]]);
        }
        for (int64_t i = 0; i < some; i++) {
            Column column = table[out[i]];
            int64_t is_own = -(int64_t)(coins[skipped + i] < column.share); /* all bits, or none */
            out[i] = (out[i] & is_own) | (column.alias & ~is_own); /* a branch would be unpredictable */
        }
    }
    return n;
}

/* Sort draws by unit (numbered below `num_units`), stably. `ends`, zeroed by the caller, is set to where
   the draws of each unit end. */
PUBLIC int64_t h5async_group(const int64_t *drawn, const int64_t *unit, int64_t *grouped, int64_t *ends,
                             int64_t n, int64_t num_units)
{
    int64_t total = 0, here;
    for (int64_t i = 0; i < n; i++)
        ends[unit[i]]++;
    for (int64_t i = 0; i < num_units; i++)
        here = ends[i], ends[i] = total, total += here;
    for (int64_t i = 0; i < n; i++)
        grouped[ends[unit[i]]++] = drawn[i];
    return n;
}
