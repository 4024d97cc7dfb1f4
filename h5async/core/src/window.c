/* Computes the order of order/window.py, which explains it.

   The order is computed in blocks of several groups of rounds. Sorting hashes gives the order of a
   block's samples, which is kept for all batches that take parts of the block. The samples of a group
   are first put into buckets by the upper bits of their hashes; each bucket is sorted when a batch
   first needs it, so that no batch waits until all of a large block is sorted. */

typedef struct {
    const int64_t *unit, *count; /* [num_units], in the order in which units start */
    const uint64_t *names;       /* [num_units]: hashes of `unit`; see name_by */
    const int64_t *bounds;       /* by unit: its first sample; then the end of the last unit */
    const int64_t *delay;        /* [size], ascending: rounds after the start of a unit */
    const int64_t *begin;        /* by block: its first position; then the end of the last block */
    const int64_t *drawn;        /* the samples that the results stand for; NULL: themselves */
    /* By unit: the square root of its size, rounded up. NULL: units have `size` samples, with the root
       `root`, except that the last one may have fewer, with `last_root`. */
    const uint64_t *roots;
    uint64_t root, last_root;
    /* skip: samples of the first unit that belong to the piece before; num_samples: of all units. */
    int64_t num_units, size, window, group_rounds, block_rounds, num_blocks, skip, num_samples;
    Store *blocks;
    uint64_t keys[ROUNDS];
} Window;

ALWAYS_INLINE uint64_t name_by(const uint64_t *keys, uint64_t number)
{
    return hash64(hash64(number + keys[0]) ^ keys[1]);
}

/* Keys for sorting the samples of a bucket: the upper bits of each sample's 63-bit hash (minus the bits
   shared by the whole bucket), with its place in the block in the lower `bits`. If the upper bits are
   equal, which is rare, the whole hashes decide. */
typedef struct {
    const uint64_t *keys;
    uint64_t *found, *spare, first; /* first: number of the sample at place 0 */
    int64_t count;
    int bits;
} Sorted;

/* Number of bits of the numbers below `count`. */
static int bits_below(int64_t count)
{
    int bits = 1;
    while (count > (int64_t)1 << bits)
        bits++;
    return bits;
}

static uint64_t hash_of(const Sorted *g, uint64_t one)
{
    return name_by(g->keys, g->first + (one & (((uint64_t)1 << g->bits) - 1))) >> 1;
}

static int comes_after(const Sorted *g, uint64_t one, uint64_t other)
{
    if (((one ^ other) >> g->bits) == 0 && hash_of(g, one) != hash_of(g, other))
        return hash_of(g, one) > hash_of(g, other);
    return one > other;
}

/* Radix sort by enough of the upper bits to tell most hashes apart, then insertion sort. */
static void sort_found(Sorted *g)
{
    uint32_t begin[1 << 11];
    int bits = bits_below(g->count) + 1, passes = (bits + 10) / 11;
    int digit = (bits + passes - 1) / passes;
    const uint64_t most = ((uint64_t)1 << digit) - 1;
    for (int shift = 63 - passes * digit; shift < 63; shift += digit) {
        const uint64_t *found = g->found;
        uint64_t *spare = g->spare;
        const int64_t count = g->count;
        uint32_t total = 0, here;
        memset(begin, 0, (size_t)(most + 1) * sizeof *begin);
        for (int64_t i = 0; i < count; i++)
            begin[found[i] >> shift & most]++;
        for (uint64_t i = 0; i <= most; i++)
            here = begin[i], begin[i] = total, total += here;
        for (int64_t i = 0; i < count; i++)
            spare[begin[found[i] >> shift & most]++] = found[i];
        g->found = spare, g->spare = (uint64_t *)(uintptr_t)found;
    }
    uint64_t *found = g->found, are_equal = 0;
    for (int64_t i = 1, at; i < g->count; i++) {
        uint64_t one = found[i];
        for (at = i; at > 0 && found[at - 1] > one; at--)
            found[at] = found[at - 1];
        found[at] = one;
    }
    for (int64_t i = 1; i < g->count; i++)
        are_equal |= (found[i] ^ found[i - 1]) >> g->bits == 0;
    for (int64_t i = 1, at; are_equal && i < g->count; i++) {
        uint64_t one = found[i];
        for (at = i; at > 0 && comes_after(g, found[at - 1], one); at--)
            found[at] = found[at - 1];
        found[at] = one;
    }
}

enum { BUCKET_SAMPLES = 512, MOST_BUCKET_BITS = 12 };
enum BucketState { UNSORTED = 0, IN_SORTING, IS_SORTED };

/* A block in memory. `bits`: number of upper hash bits that tell the buckets of a group apart. */
typedef struct {
    uint32_t *places; /* places in the block, bucket by bucket; those of sorted buckets are in order */
    uint32_t *begin;  /* by bucket: its first position; then the end of the last one */
    _Atomic uint8_t *states;
    uint64_t first; /* number of the sample at place 0 */
    int64_t num_buckets, most_samples, nbytes;
    int bits;
} Block;

static Block block_at(const Window *w, int64_t number, uint8_t *memory)
{
    const int64_t each = w->group_rounds * w->size, groups = w->block_rounds / w->group_rounds;
    Block b = {.most_samples = groups * each, .first = (uint64_t)(number * groups * each)};
    while (each >> b.bits > BUCKET_SAMPLES && b.bits < MOST_BUCKET_BITS)
        b.bits++;
    b.num_buckets = groups << b.bits;
    b.places = (uint32_t *)(void *)memory, b.begin = b.places + b.most_samples;
    b.states = (_Atomic uint8_t *)(b.begin + b.num_buckets + 1);
    b.nbytes = (b.most_samples + b.num_buckets + 1) * (int64_t)sizeof(uint32_t) + b.num_buckets;
    return b;
}

ALWAYS_INLINE void list_buckets_inline(const Window *w, const Block *b, int64_t begin, int64_t end,
                                       uint16_t *buckets)
{
    const uint64_t keys[] = {w->keys[0], w->keys[1]}, first = b->first;
    const int shift = 63 - b->bits;
    for (int64_t i = begin; i < end; i++)
        buckets[i] = (uint16_t)(name_by(keys, first + (uint64_t)i) >> 1 >> shift);
}

ALSO_FOR_AVX512(list_buckets,
                (const Window *w, const Block *b, int64_t begin, int64_t end, uint16_t *buckets),
                (w, b, begin, end, buckets))

/* Number of a unit's samples that come at most `rounds` rounds after it starts. */
static int64_t num_delayed(const Window *w, int64_t rounds)
{
    int64_t low = -1, high = w->size;
    FIND_LAST(low, high, at, w->delay[at] <= rounds)
    return high;
}

/* Lists the buckets of a group's samples, of which some are missing: these get a bucket after all
   others. Sets `begin` and `end`; samples outside of them are missing, too. */
static void list_some(const Window *w, const Block *b, int64_t first_round, int64_t *begin,
                      int64_t *end, uint16_t *buckets)
{
    const uint16_t missing = (uint16_t)(1 << b->bits);
    int64_t first = *begin;
    for (int64_t r = 0; r < w->group_rounds; r++) {
        int64_t round = first_round + r, at = first + r * w->size;
        int64_t low = num_delayed(w, round - w->num_units), high = num_delayed(w, round);
        if (r == 0)
            *begin = at + low;
        if (r + 1 == w->group_rounds)
            *end = at + high;
        for (int64_t s = 0; s < w->size && w->group_rounds > 1; s++)
            buckets[at + s] = missing;
        list_buckets(w, b, at + low, at + high, buckets);
        for (int64_t s = low; s < high; s++)
            if (s >= w->count[round - w->delay[s]])
                buckets[at + s] = missing;
    }
}

/* Puts the samples of a block into buckets. Returns 0 if memory allocation fails. */
static int fill_block(const Window *w, const Block *b, int64_t number)
{
    const int64_t each = w->group_rounds * w->size, num_buckets = 1 << b->bits;
    const int is_whole = w->begin[number + 1] - w->begin[number] == b->most_samples;
    uint16_t *buckets = malloc((size_t)b->most_samples * sizeof *buckets);
    uint32_t next[(1 << MOST_BUCKET_BITS) + 1], *bound = b->begin;
    *bound = 0;
    for (int64_t group = 0; buckets != NULL && group * each < b->most_samples; group++) {
        int64_t begin = group * each, end = begin + each;
        if (is_whole)
            list_buckets(w, b, begin, end, buckets);
        else
            list_some(w, b, number * w->block_rounds + group * w->group_rounds, &begin, &end,
                      buckets);
        memset(next, 0, (size_t)(num_buckets + 1) * sizeof *next);
        for (int64_t i = begin; i < end; i++) {
            if (i % 16 == 0) /* rows have evicted the previous block from the caches */
                __builtin_prefetch(b->places + *bound + (i - begin), 1);
            next[buckets[i]]++;
        }
        for (int64_t i = 0; i < num_buckets; i++, bound++)
            bound[1] = *bound + next[i], next[i] = *bound;
        next[num_buckets] = *bound; /* missing ones are overwritten by the next group */
        for (int64_t i = begin; i < end; i++)
            b->places[next[buckets[i]]++] = (uint32_t)i;
    }
    for (int64_t i = 0; i < b->num_buckets; i++)
        atomic_init(&b->states[i], UNSORTED);
    free(buckets);
    return buckets != NULL;
}

ALWAYS_INLINE void hash_places_inline(Sorted *g, const uint32_t *places, int shared)
{
    const uint64_t keys[] = {g->keys[0], g->keys[1]}, first = g->first;
    const uint64_t below = ((uint64_t)1 << g->bits) - 1;
    uint64_t *found = g->found;
    for (int64_t i = 0, count = g->count; i < count; i++)
        found[i] = (name_by(keys, first + places[i]) << shared >> 1 & ~below) | places[i];
}

ALSO_FOR_AVX512(hash_places, (Sorted * g, const uint32_t *places, int shared), (g, places, shared))

/* Sorts a bucket. Returns 0 if memory allocation fails. */
static int sort_bucket(const Window *w, const Block *b, int64_t bucket)
{
    uint32_t *places = b->places + b->begin[bucket];
    Sorted g = {.keys = w->keys, .first = b->first, .bits = bits_below(b->most_samples),
                .count = b->begin[bucket + 1] - b->begin[bucket]};
    uint64_t *memory = malloc((2 * (size_t)g.count + 1) * sizeof *memory);
    if (memory == NULL)
        return 0;
    g.found = memory, g.spare = memory + g.count;
    hash_places(&g, places, b->bits);
    sort_found(&g);
    for (int64_t i = 0; i < g.count; i++)
        places[i] = (uint32_t)(g.found[i] & (((uint64_t)1 << g.bits) - 1));
    free(memory);
    return 1;
}

/* Sorts the buckets with positions `begin` to `end` of a block. A thread that sorts one never waits
   meanwhile, so others that need it spin until it is done. Returns 0 if memory allocation fails. */
static int sort_buckets(const Window *w, const Block *b, int64_t begin, int64_t end)
{
    int64_t bucket = 0, behind = b->num_buckets;
    FIND_LAST(bucket, behind, at, b->begin[at] <= begin)
    for (int is_good; bucket < b->num_buckets && b->begin[bucket] < end; bucket++) {
        uint8_t state = UNSORTED;
        while (!atomic_compare_exchange_strong(&b->states[bucket], &state, IN_SORTING)) {
            if (state == IS_SORTED)
                break;
            sched_yield();
            state = UNSORTED;
        }
        if (state == IS_SORTED)
            continue;
        is_good = sort_bucket(w, b, bucket);
        atomic_store(&b->states[bucket], is_good ? IS_SORTED : UNSORTED);
        if (!is_good)
            return 0;
    }
    return 1;
}

/* Finds the samples at some places of a block, given its first round, `lanes` at a time; it is faster
   if all units have `size` samples. Returns how many it did. (Quotients of doubles are safe: none is
   rounded up to an integer.) */
ALWAYS_INLINE int64_t find_lanes(const Window *w, int64_t first_round, const uint32_t *places,
                                 int64_t count, Domain d, int lanes, int has_avx2, int64_t *samples)
{
    const double size = (double)w->size, window = (double)w->window;
    const int is_even = w->roots == NULL;
    int64_t done = 0;
    (void)has_avx2; /* unused without AVX2 */
    for (; done + lanes <= count; done += lanes) {
        uint64_t x[MAX_LANES], names[MAX_LANES], own[2][MAX_LANES];
        int64_t unit[MAX_LANES], first[MAX_LANES], sizes[MAX_LANES], differ = 0, are_outside = 0;
        int32_t place[MAX_LANES], start[MAX_LANES]; /* loops are simple, to be vectorized */
        memcpy(place, places + done, (size_t)lanes * sizeof *place);
        for (int j = 0; j < lanes; j++)
            start[j] = (int32_t)((double)place[j] / size);
        for (int j = 0; j < lanes; j++)
            place[j] -= start[j] * (int32_t)w->size;
        for (int j = 0; j < lanes; j++)
            start[j] -= (int32_t)((double)place[j] * window / size);
        for (int j = 0; j < lanes; j++)
            x[j] = (uint64_t)place[j];
        for (int j = 0; j < lanes; j++) {
            const int64_t at = first_round + start[j];
            unit[j] = w->unit[at], names[j] = w->names[at];
            x[j] += at == 0 ? (uint64_t)w->skip : 0;
        }
        for (int j = 0; j < lanes && is_even; j++) { /* vectorized, unlike table look-ups */
            first[j] = unit[j] * w->size;
            sizes[j] = w->num_samples - first[j];
            sizes[j] = sizes[j] < w->size ? sizes[j] : w->size;
        }
        for (int j = 0; j < lanes && !is_even; j++) {
            first[j] = w->bounds[unit[j]];
            sizes[j] = w->bounds[unit[j] + 1] - first[j];
        }
        for (int j = 0; j < lanes; j++)
            differ |= sizes[j] ^ w->size;
        for (int j = 0; j < lanes && differ; j++)
            own[0][j] = is_even ? sizes[j] < w->size ? w->last_root : d.a : w->roots[unit[j]];
        for (int j = 0; j < lanes && differ; j++)
            own[1][j] = own[0][j] - (own[0][j] * (own[0][j] - 1) >= (uint64_t)sizes[j]);
#if defined(AVX2)
        if (has_avx2 && (differ || d.factor != 0))
            feistel_avx2(x, lanes, d, differ ? own : NULL, names, w->keys);
        else
#endif
        if (differ)
            feistel_lanes(x, lanes, d, own, names, w->keys);
        else
            feistel_lanes(x, lanes, d, NULL, names, w->keys);
        for (int j = 0; j < lanes; j++)
            are_outside |= x[j] >= (uint64_t)sizes[j];
        for (int j = 0; j < lanes && are_outside; j++) {
            Domain its = {.count = (uint64_t)sizes[j],
                          .a = differ ? own[0][j] : d.a,
                          .b = differ ? own[1][j] : d.b};
            x[j] = permute_into(x[j], its, names[j], w->keys);
        }
        for (int j = 0; j < lanes; j++)
            samples[done + j] = first[j] + (int64_t)x[j];
    }
    return done;
}

#if defined(AVX512)
AVX512 static int64_t find_avx512(const Window *w, int64_t first_round, const uint32_t *places,
                                  int64_t count, Domain d, int64_t *samples)
{
    return find_lanes(w, first_round, places, count, d, MAX_LANES, 0, samples);
}

AVX2 static int64_t find_avx2(const Window *w, int64_t first_round, const uint32_t *places,
                              int64_t count, Domain d, int64_t *samples)
{
    /* Mostly 32 at a time: the compiler unrolls loops of 16, and then does not vectorize them. */
    int64_t i = find_lanes(w, first_round, places, count, d, MAX_LANES, 1, samples);
    return i + find_lanes(w, first_round, places + i, count - i, d, AVX2_LANES, 1, samples + i);
}
#endif

static void find_places(const Window *w, int64_t first_round, const uint32_t *places, int64_t count,
                        int64_t *samples)
{
    const Domain d = domain_of((uint64_t)w->size, w->root, ((uint64_t)w->size + w->root - 1) / w->root);
    int64_t i = 0;
#if defined(AVX512)
    if (HAS_AVX512())
        i = find_avx512(w, first_round, places, count, d, samples);
    else if (HAS_AVX2())
        i = find_avx2(w, first_round, places, count, d, samples);
#endif
    i += find_lanes(w, first_round, places + i, count - i, d, LANES, 0, samples + i);
    find_lanes(w, first_round, places + i, count - i, d, 1, 0, samples + i);
}

/* Computes the samples at `count` positions from `start` on, all of which must exist. Returns 0 if
   memory allocation fails, or a block or window is too large. */
PUBLIC int64_t h5async_window_samples(const Window *w, int64_t *samples, int64_t start, int64_t count)
{
    const int64_t all = count;
    int64_t number = 0, high = w->num_blocks;
    int is_good = block_at(w, 0, NULL).most_samples <= INT32_MAX && w->window <= INT32_MAX;
    FIND_LAST(number, high, at, w->begin[at] <= start)
    while (is_good && count > 0) {
        Kept *kept = NULL;
        const int64_t nbytes = block_at(w, number, NULL).nbytes;
        enum Claim claim = claim_chunk(w->blocks, (uint64_t)number, nbytes, 1, &kept);
        uint8_t *own = kept ? NULL : malloc((size_t)nbytes); /* if all that may be kept is in use */
        const Block b = block_at(w, number, kept ? kept->data : own);
        if (claim == CLAIMED) {
            is_good = fill_block(w, &b, number);
            release_piece(w->blocks, kept, 0, is_good);
            continue;
        }
        is_good = kept || (own && fill_block(w, &b, number));
        int64_t at = start - w->begin[number], left = w->begin[number + 1] - start;
        int64_t here = left < count ? left : count;
        is_good = is_good && sort_buckets(w, &b, at, at + here);
        if (is_good)
            find_places(w, number * w->block_rounds, b.places + at, here, samples);
        if (kept)
            let_go(w->blocks, kept);
        free(own);
        samples += here, start += here, count -= here, number++;
    }
    for (int64_t i = 1; w->drawn != NULL && is_good && i <= all; i++)
        samples[-i] = w->drawn[samples[-i]];
    return is_good;
}
