/* Computes the order of order/window.py, which explains it.

   It is made in blocks of some groups of rounds. Which sample of a block comes where is found by
   sorting hashes; this is kept for the batches that take parts of the block. */

typedef struct {
    const int64_t *unit, *skip, *count; /* [num_units], as the units start */
    const int64_t *bounds;              /* by unit: its first sample, and behind the last unit */
    const int64_t *delay;               /* [size], ascending */
    const int64_t *begin;               /* by block: its first position, and behind the last block */
    const int64_t *drawn;               /* what the numbers stand for that come of all this; or NULL */
    int64_t num_units, size, window, group_rounds, block_rounds, num_blocks;
    Store *blocks;
    uint64_t keys[ROUNDS];
} Window;

enum { NUM_DOMAINS = 16 };

static Domain domain_of(uint64_t count)
{
    uint64_t a = 1;
    while (a * a < count && a < UINT32_MAX) /* at most twice the square root */
        a *= 2;
    for (uint64_t step = a / 2; step; step /= 2)
        if ((a - step) * (a - step) >= count)
            a -= step;
    return (Domain){count, a, (count + a - 1) / a};
}

static const Domain *find_domain(Domain *known, uint64_t count)
{
    Domain *domain = &known[count % NUM_DOMAINS];
    if (domain->count != count)
        *domain = domain_of(count);
    return domain;
}

ALWAYS_INLINE uint64_t name_by(const uint64_t *keys, uint64_t number)
{
    return hash64(hash64(number + keys[0]) ^ keys[1]);
}

/* Samples of a group of rounds: of each its hash, of 63 bits, with its place in the group for the lower
   `bits`. Where the others are equal, which is rare, the whole hashes decide. */
typedef struct {
    const Window *w;
    uint64_t *found, *spare;
    int64_t first_round, count;
    int bits;
} Group;

/* The bits that numbers below `count` take. */
static int bits_below(int64_t count)
{
    int bits = 1;
    while (count > (int64_t)1 << bits)
        bits++;
    return bits;
}

static uint64_t hash_of(const Group *g, uint64_t one)
{
    uint64_t place = one & (((uint64_t)1 << g->bits) - 1);
    return name_by(g->w->keys, (uint64_t)(g->first_round * g->w->size) + place) >> 1;
}

static int comes_after(const Group *g, uint64_t one, uint64_t other)
{
    if (((one ^ other) >> g->bits) == 0 && hash_of(g, one) != hash_of(g, other))
        return hash_of(g, one) > hash_of(g, other);
    return one > other;
}

static void list_group(Group *g)
{
    const Window *w = g->w;
    const uint64_t above = ~(((uint64_t)1 << g->bits) - 1);
    g->count = 0;
    for (int64_t r = 0; r < w->group_rounds; r++)
        for (int64_t s = 0; s < w->size; s++) {
            int64_t start = g->first_round + r - w->delay[s];
            if (start < 0)
                break; /* nor are others there */
            if (start >= w->num_units || s >= w->count[start])
                continue;
            uint64_t place = (uint64_t)(r * w->size + s);
            uint64_t hash = name_by(w->keys, (uint64_t)(g->first_round * w->size) + place) >> 1;
            g->found[g->count++] = (hash & above) | place;
        }
}

/* The same where no sample is missing. */
ALWAYS_INLINE void list_whole_inline(Group *g)
{
    const uint64_t keys[] = {g->w->keys[0], g->w->keys[1]}, below = ((uint64_t)1 << g->bits) - 1;
    const uint64_t first = (uint64_t)(g->first_round * g->w->size);
    uint64_t *found = g->found;
    g->count = g->w->group_rounds * g->w->size;
    for (uint64_t i = 0, count = (uint64_t)g->count; i < count; i++)
        found[i] = (name_by(keys, first + i) >> 1 & ~below) | i;
}

ALSO_FOR_AVX2(list_whole, (Group *g), (g))

/* Sort by as many of the upper bits as tell most hashes apart, then one by one. */
static void sort_group(Group *g)
{
    uint32_t begin[1 << 11];
    int bits = bits_below(g->count) + 1, passes = (bits + 10) / 11, digit = (bits + passes - 1) / passes;
    for (int shift = 63 - passes * digit; shift < 63; shift += digit) {
        const uint64_t most = ((uint64_t)1 << digit) - 1;
        uint32_t total = 0, here;
        memset(begin, 0, (size_t)(most + 1) * sizeof *begin);
        for (int64_t i = 0; i < g->count; i++)
            begin[g->found[i] >> shift & most]++;
        for (uint64_t i = 0; i <= most; i++)
            here = begin[i], begin[i] = total, total += here;
        for (int64_t i = 0; i < g->count; i++)
            g->spare[begin[g->found[i] >> shift & most]++] = g->found[i];
        uint64_t *other = g->found;
        g->found = g->spare, g->spare = other;
    }
    for (int64_t i = 1, at; i < g->count; i++) {
        uint64_t one = g->found[i];
        for (at = i; at > 0 && comes_after(g, g->found[at - 1], one); at--)
            g->found[at] = g->found[at - 1];
        g->found[at] = one;
    }
}

/* Compute where in the block its samples come from, in their order; 0: there is no memory. */
static int make_block(const Window *w, int64_t number, uint32_t *places)
{
    const int64_t most = w->group_rounds * w->size;
    const int is_whole = w->begin[number + 1] - w->begin[number] == w->block_rounds * w->size;
    uint64_t *memory = malloc(2 * (size_t)most * sizeof *memory);
    Group g = {.w = w, .found = memory, .spare = memory + most, .bits = bits_below(most)};
    for (int64_t r = 0; memory != NULL && r < w->block_rounds; r += w->group_rounds) {
        g.first_round = number * w->block_rounds + r;
        if (is_whole)
            list_whole(&g);
        else
            list_group(&g);
        sort_group(&g);
        for (int64_t i = 0; i < g.count; i++)
            *places++ = (uint32_t)(g.found[i] & (((uint64_t)1 << g.bits) - 1)) +
                        (uint32_t)(r * w->size);
    }
    free(memory);
    return memory != NULL;
}

/* Find the samples at some places of a block whose first round is given; those of equally large units
   at a time. (Quotients of doubles are exact: none is rounded up to a number.) */
ALWAYS_INLINE int64_t find_lanes(const Window *w, int64_t first_round, const uint32_t *places,
                                 int64_t count, int lanes, Domain *known, int64_t *samples)
{
    const double size = (double)w->size, window = (double)w->window;
    int64_t done = 0;
    for (; done + lanes <= count; done += lanes) {
        uint64_t x[MAX_LANES], names[MAX_LANES];
        int64_t first[MAX_LANES], sizes[MAX_LANES], start[MAX_LANES], differ = 0, are_outside = 0;
        for (int j = 0; j < lanes; j++) {
            int64_t round = (int64_t)((double)places[done + j] / size);
            int64_t s = (int64_t)places[done + j] - round * w->size;
            start[j] = first_round + round - (int64_t)((double)s * window / size);
            x[j] = (uint64_t)s;
        }
        for (int j = 0; j < lanes; j++) {
            int64_t unit = w->unit[start[j]];
            first[j] = w->bounds[unit], sizes[j] = w->bounds[unit + 1] - first[j];
            x[j] += (uint64_t)w->skip[start[j]];
            names[j] = (uint64_t)unit;
            differ |= sizes[j] ^ sizes[0];
        }
        for (int j = 0; j < lanes; j++)
            names[j] = name_by(w->keys, names[j]);
        const Domain d = *find_domain(known, (uint64_t)sizes[0]);
        if (!differ)
            feistel_lanes(x, lanes, d, names, w->keys);
        for (int j = 0; j < lanes && !differ; j++)
            are_outside |= x[j] >= d.count;
        for (int j = 0; j < lanes && (differ || are_outside); j++) {
            const Domain *own = find_domain(known, (uint64_t)sizes[j]);
            if (differ)
                feistel_lanes(x + j, 1, *own, names + j, w->keys);
            x[j] = permute_into(x[j], *own, names[j], w->keys);
        }
        for (int j = 0; j < lanes; j++)
            samples[done + j] = first[j] + (int64_t)x[j];
    }
    return done;
}

#if defined(AVX512)
AVX512 static int64_t find_avx512(const Window *w, int64_t first_round, const uint32_t *places,
                                  int64_t count, Domain *known, int64_t *samples)
{
    return find_lanes(w, first_round, places, count, MAX_LANES, known, samples);
}
#endif

static void find_places(const Window *w, int64_t first_round, const uint32_t *places, int64_t count,
                        Domain *known, int64_t *samples)
{
    int64_t i = 0;
#if defined(AVX512)
    if (HAS_AVX512())
        i = find_avx512(w, first_round, places, count, known, samples);
#endif
    i += find_lanes(w, first_round, places + i, count - i, LANES, known, samples + i);
    find_lanes(w, first_round, places + i, count - i, 1, known, samples + i);
}

/* Compute the samples at `count` positions from `start` on, all of which the order has; 0: there is no
   memory for it. */
PUBLIC int64_t h5async_window_samples(const Window *w, int64_t *samples, int64_t start, int64_t count)
{
    Domain known[NUM_DOMAINS] = {{0, 0, 0}};
    const int64_t all = count, nbytes = w->block_rounds * w->size * (int64_t)sizeof(uint32_t);
    int64_t block = 0, high = w->num_blocks, is_good = nbytes / 4 <= UINT32_MAX;
    FIND_LAST(block, high, at, w->begin[at] <= start)
    while (is_good && count > 0) {
        Kept *kept = NULL;
        enum Claim claim = claim_chunk(w->blocks, (uint64_t)block, nbytes, 1, &kept);
        if (claim == CLAIMED) {
            is_good = make_block(w, block, (uint32_t *)(void *)kept->data);
            release_piece(w->blocks, kept, 0, (int)is_good);
            continue;
        }
        uint32_t *own = kept ? NULL : malloc((size_t)nbytes); /* where threads use all that is kept */
        is_good = kept || (own && make_block(w, block, own));
        const uint32_t *places = kept ? (const uint32_t *)(const void *)kept->data : own;
        int64_t left = w->begin[block + 1] - start, here = left < count ? left : count;
        if (is_good)
            find_places(w, block * w->block_rounds, places + (start - w->begin[block]), here, known,
                        samples);
        if (kept)
            let_go(w->blocks, kept);
        free(own);
        samples += here, start += here, count -= here, block++;
    }
    for (int64_t i = 1; w->drawn != NULL && is_good && i <= all; i++)
        samples[-i] = w->drawn[samples[-i]];
    return is_good;
}
