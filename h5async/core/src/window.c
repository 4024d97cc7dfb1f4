/* Computes blocks of the order of order/window.py, which explains it. */

typedef struct {
    const int64_t *unit, *skip, *count; /* [num_units], as the units start */
    const int64_t *bounds;              /* by unit: its first sample, and behind the last unit */
    const int64_t *delay;               /* [size], ascending */
    int64_t num_units, size, group_rounds;
    uint64_t keys[ROUNDS];
} Window;

enum { NUM_DOMAINS = 16, HIGH_SHIFT = 30 }; /* of a hash of 63 bits: what is below is seldom needed to sort it */

/* The permutation of the samples of a unit; those of equal counts have `a` and `b` in common. */
typedef struct {
    uint64_t count, a, b;
} Domain;

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

static uint64_t permuted_in_unit(const Window *w, const Domain *domain, int64_t unit, int64_t slot)
{
    uint64_t own[ROUNDS], x = (uint64_t)slot;
    uint64_t name = hash64(hash64((uint64_t)unit + w->keys[0]) ^ w->keys[1]);
    for (int k = 0; k < ROUNDS; k++)
        own[k] = name + w->keys[k];
    do
        x = feistel(x, domain->a, domain->b, own);
    while (x >= domain->count);
    return x;
}

/* List the samples of a group of rounds, by where they come from: their hashes sort them. */
static int64_t list_group(const Window *w, int64_t first_round, Wanted *found)
{
    int64_t count = 0;
    for (int64_t r = 0; r < w->group_rounds; r++)
        for (int64_t s = 0; s < w->size; s++) {
            int64_t place = first_round + r - w->delay[s];
            if (place < 0)
                break; /* nor are others there */
            if (place >= w->num_units || s >= w->count[place])
                continue;
            uint64_t serial = (uint64_t)((first_round + r) * w->size + s);
            uint64_t mixed = hash64(hash64(serial + w->keys[0]) ^ w->keys[1]) >> 1;
            found[count++] = (Wanted){(int64_t)(mixed >> HIGH_SHIFT), (int32_t)(r * w->size + s),
                                      (int32_t)(mixed & ((1u << HIGH_SHIFT) - 1))};
        }
    return count;
}

/* Compute the samples of some rounds, of whole groups, into `samples`, which has room for `size` of
   each. Returns how many there are; -1: there is no memory. */
PUBLIC int64_t h5async_window_block(const Window *w, int64_t *samples, int64_t first_round,
                                    int64_t rounds)
{
    int64_t most = w->group_rounds * w->size, done = 0;
    Wanted *found = most < INT32_MAX ? malloc(2 * (size_t)most * sizeof *found) : NULL;
    Domain known[NUM_DOMAINS] = {{0, 0, 0}};
    if (found == NULL)
        return -1;
    for (int64_t round = first_round; round < first_round + rounds; round += w->group_rounds) {
        int64_t count = list_group(w, round, found);
        Wanted *sorted =
            sort_wanted(found, found + most, count, 0, ((int64_t)1 << (63 - HIGH_SHIFT)) - 1);
        for (int64_t i = 1; i < count; i++)
            if (sorted[i - 1].sample == sorted[i].sample) { /* rare: then sort by lower bits, too */
                insert_each(sorted, count);
                break;
            }
        for (int64_t i = 0; i < count; i++) {
            int64_t r = sorted[i].position / (int32_t)w->size;
            int64_t s = sorted[i].position - r * w->size;
            int64_t place = round + r - w->delay[s], unit = w->unit[place];
            const Domain *domain =
                find_domain(known, (uint64_t)(w->bounds[unit + 1] - w->bounds[unit]));
            uint64_t inside = permuted_in_unit(w, domain, unit, s + w->skip[place]);
            samples[done++] = w->bounds[unit] + (int64_t)inside;
        }
    }
    free(found);
    return done;
}
