/* Keeps rows in memory, for the batches of a reader that come later: those of each batch that was read
   of files are copied there, sample by sample, in whatever order samples come. A batch all of whose
   samples are kept is read of that.

   Nobody waits for anybody: a sample is kept if its stamp is that of the generation. When their file has
   changed, all are forgotten, as the generation changes; whoever was at it meanwhile leaves old stamps. */

enum { GENERATION = 0, HAS_ALL, SEEN, NOTES, AHEAD, MOST_STAMPS = 255 };

/* Rows of samples that are kept in memory, in ascending order of samples. Python makes it, and changes
   the state, too (fill/resident.py). */
typedef struct {
    const Field *fields; /* whose samples are places among those here */
    Sources *sources;
    const int64_t *numbers; /* [count], ascending: samples, or NULL: start + step * place */
    int64_t start, step, count;
    uint8_t *stamps; /* [count], aligned to 8: of the generation in which each was kept last; 0: none */
    int64_t *state;  /* the generation; that in which all were kept, and 1 more; generation *
                        (count + 1) + place: all before that place are kept; how often some were noted;
                        which page of memory a thread without work is to touch, or 0 */
} KeptSamples;

/* Rows from `row` on, of so many samples. */
typedef struct {
    int64_t row, rows, samples;
} Run;

static uint8_t stamp_of(int64_t generation)
{
    return (uint8_t)(generation % MOST_STAMPS + 1);
}

static int64_t state_of(const KeptSamples *kept, int what)
{
    return __atomic_load_n(&kept->state[what], __ATOMIC_ACQUIRE);
}

static int is_stamped(const KeptSamples *kept, int64_t place, uint8_t stamp)
{
    return __atomic_load_n(&kept->stamps[place], __ATOMIC_ACQUIRE) == stamp;
}

/* Find the places of samples; 0: one has none. */
static int find_kept(const KeptSamples *kept, const int64_t *samples, int64_t *places, int64_t count)
{
    int are_found = 1;
    for (int64_t i = 0; kept->numbers == NULL && i < count; i++) {
        int64_t after = samples[i] - kept->start; /* a division takes as long as to keep a small row */
        places[i] = kept->step == 1 ? after : after / kept->step;
        are_found &= places[i] >= 0 && places[i] < kept->count && places[i] * kept->step == after;
    }
    for (int64_t i = 0; kept->numbers != NULL && i < count; i++) {
        int64_t low = -1, high = kept->count;
        FIND_LAST(low, high, at, kept->numbers[at] < samples[i])
        places[i] = low + 1;
        are_found &= places[i] < kept->count && kept->numbers[places[i]] == samples[i];
    }
    return are_found;
}

/* Whether all samples at some places are kept in a generation. */
static int are_kept(const KeptSamples *kept, const int64_t *places, int64_t count, int64_t generation)
{
    int64_t i = state_of(kept, HAS_ALL) == generation + 1 ? count : 0;
    while (i < count && is_stamped(kept, places[i], stamp_of(generation)))
        i++;
    return i == count;
}

/* Where a row of a field is kept. */
static uint8_t *place_of_kept(const KeptSamples *kept, const Field *f, int64_t row)
{
    const Layer *l = f->layers;
    int64_t segment = find_segment(l, row, 0);
    row = l->row[segment] + (row - l->first[segment]) * l->step[segment];
    int64_t offset = offset_of_row(l, &f->shapes[l->shape[segment]], segment, row);
    return (uint8_t *)(uintptr_t)kept->sources->sources[l->source[segment]].map + offset;
}

/* Have the system give the large page that was asked for. In order, two threads would touch it at the
   same time, both clear it, and the consumer would wait for them. */
static void touch_ahead(const KeptSamples *kept)
{
    uintptr_t page = (uintptr_t)__atomic_exchange_n(&kept->state[AHEAD], 0, __ATOMIC_RELAXED);
    for (int64_t i = 0; page && i < kept->sources->count; i++) {
        const Source *source = &kept->sources->sources[i];
        uintptr_t begin = (uintptr_t)source->map, end = begin + (uintptr_t)source->map_nbytes;
#if defined(MADV_POPULATE_WRITE)
        if (page >= begin && page < end) /* else it is of another field, or behind all of them */
            madvise((void *)page, end - page < LARGE_PAGE ? end - page : LARGE_PAGE, MADV_POPULATE_WRITE);
#endif
    }
}

/* Copy past the caches what is not read soon: so the lines that are replaced are not fetched. */
static void copy_away(uint8_t *to, const uint8_t *from, int64_t nbytes)
{
#if defined(SSE2)
    int64_t head = -(intptr_t)to & 63;
    copy_few(to, from, head);
    for (to += head, from += head, nbytes -= head; nbytes >= 64; nbytes -= 64, to += 64, from += 64)
        for (int64_t at = 0; at < 64; at += 16)
            _mm_stream_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(from + at)));
    copy_few(to, from, nbytes);
#else
    copy_long(to, from, nbytes);
#endif
}

/* Keep rows that follow each other, and ask for the next large page if they get into another one. */
ALWAYS_INLINE void keep_run(const KeptSamples *kept, uint8_t *to, const uint8_t *from, int64_t nbytes)
{
    uintptr_t page = ((uintptr_t)to + (uintptr_t)nbytes - 1) / LARGE_PAGE;
    if (nbytes <= FEW_NBYTES)
        copy_few(to, from, nbytes);
    else
        copy_away(to, from, nbytes);
    if (((uintptr_t)to - 1) / LARGE_PAGE < page)
        __atomic_store_n(&kept->state[AHEAD], (int64_t)((page + 1) * LARGE_PAGE), __ATOMIC_RELAXED);
}

/* Which rows of a field samples `from` to `end` are, if they follow each other where they are kept. */
static Run run_of_kept(const Field *f, const int64_t *places, int64_t from, int64_t end)
{
    if (f->spans != NULL) {
        int64_t row = f->spans->starts[places[from]];
        return (Run){row, f->spans->starts[places[from] + 1] - row, 1};
    }
    int64_t samples = 1; /* those of some have the step 0: they have a row in common */
    if (f->layers->num_segments == 1 && f->layers->step[0] == 1)
        while (from + samples < end && places[from + samples] == places[from] + samples)
            samples++;
    return (Run){places[from], samples, samples};
}

/* Keep the rows of samples `start` to `end` of a batch, if `is_valid`, and transform them. */
static void keep_rows(const KeptSamples *kept, const Field *f, const Target *target,
                      const int64_t *places, int64_t start, int64_t end, int is_valid)
{
    int64_t position = f->spans ? 0 : start, begin, ahead = rows_ahead(f->row_nbytes);
    int is_even = f->layers->num_segments == 1 && f->layers->step[0] == 1; /* so are places of rows */
    uint8_t *base = is_even ? place_of_kept(kept, f, 0) : NULL;
    int fetches = is_even && f->row_nbytes <= FEW_NBYTES && f->spans == NULL;
    for (int64_t i = 0; f->spans && i < start; i++)
        position += f->spans->starts[places[i] + 1] - f->spans->starts[places[i]];
    begin = position;
    for (int64_t i = start; i < end;) {
        Run run = run_of_kept(f, places, i, end);
        int64_t nbytes = run.rows * f->row_nbytes;
        if (fetches && i + ahead < end)
            __builtin_prefetch(base + places[i + ahead] * f->row_nbytes, 1);
        if (is_valid && nbytes) { /* where no sample has any rows, there is no place either */
            uint8_t *to = is_even ? base + run.row * f->row_nbytes : place_of_kept(kept, f, run.row);
            keep_run(kept, to, target->raw + position * f->row_nbytes, nbytes);
        }
        position += run.rows, i += run.samples;
    }
    if (f->transform != NULL && position > begin)
        transform_run(f, target, begin, position - begin);
}

/* Note that samples at some places are kept, whose rows were all copied. */
static void note_kept(KeptSamples *kept, const int64_t *places, int64_t count, int64_t generation)
{
    const uint8_t stamp = stamp_of(generation);
    const uint64_t several = 0x0101010101010101u * stamp;
#if defined(SSE2)
    _mm_sfence(); /* what was copied past the caches comes before its stamps */
#endif
    for (int64_t i = 0; i < count; i++)
        __atomic_store_n(&kept->stamps[places[i]], stamp, __ATOMIC_RELEASE);
    /* Of two that note the last ones, the one whose turn here is later sees both. */
    __atomic_fetch_add(&kept->state[NOTES], 1, __ATOMIC_ACQ_REL);
    int64_t size = kept->count + 1, seen = state_of(kept, SEEN);
    int64_t at = seen / size == generation ? seen % size & ~(int64_t)7 : 0;
    while (at + 8 <= kept->count &&
           __atomic_load_n((const uint64_t *)(kept->stamps + at), __ATOMIC_ACQUIRE) == several)
        at += 8;
    while (at < kept->count && is_stamped(kept, at, stamp))
        at++;
    __atomic_store_n(&kept->state[SEEN], generation * size + at, __ATOMIC_RELEASE);
    if (at == kept->count)
        __atomic_store_n(&kept->state[HAS_ALL], generation + 1, __ATOMIC_RELEASE);
}

/* Keep samples `start` to `end` of a batch, of the generation in which it was planned, and transform
   their rows, which so far are as read. */
static void keep_samples(KeptSamples *kept, const Target *targets, int64_t num_fields,
                         const int64_t *places, int64_t start, int64_t end, int64_t generation)
{
    int is_valid = state_of(kept, GENERATION) == generation;
    for (int64_t i = 0; i < num_fields; i++)
        if (kept->fields[i].row_nbytes > 0)
            keep_rows(kept, &kept->fields[i], &targets[i], places, start, end, is_valid);
    if (is_valid)
        note_kept(kept, places + start, end - start, generation);
}
