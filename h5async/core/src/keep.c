/* Keeps rows in memory for later batches of a reader: the rows of each batch read from files are copied
   there, sample by sample, in whatever order they come. A batch whose samples are all kept is read from
   that memory.

   No thread waits for another: a sample is kept if its stamp is that of the current generation. A changed
   file changes the generation, which forgets all samples; threads at work then leave only old stamps. */

enum { GENERATION = 0, HAS_ALL, SEEN, NOTES, AHEAD, MOST_STAMPS = 255 };

/* The rows of samples kept in memory, in ascending order of samples: the place of a sample is its position
   among them. Python makes the structure, and also changes the state (fill/resident.py). */
typedef struct {
    const Field *fields; /* whose samples are numbered by place */
    Sources *sources;
    const int64_t *numbers; /* [count], ascending: samples, or NULL: start + step * place */
    int64_t start, step, count;
    uint8_t *stamps; /* [count], aligned to 8: of the generation in which each was last kept; 0: never */
    int64_t *state;  /* GENERATION; HAS_ALL: 1 + the generation in which all were kept; SEEN: generation *
                        (count + 1) + place, where all before that place are kept; NOTES: the number of
                        calls of note_kept; AHEAD: a page for an idle thread to touch, or 0 */
} KeptSamples;

/* `rows` rows from `row` on, which belong to `samples` samples. */
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

/* Find the places of samples; returns 0 if one is not among those to keep. */
static int find_kept(const KeptSamples *kept, const int64_t *samples, int64_t *places, int64_t count)
{
    int are_found = 1;
    for (int64_t i = 0; kept->numbers == NULL && i < count; i++) {
        int64_t after = samples[i] - kept->start; /* a division takes as long as keeping a small row */
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

/* The memory where a row of a field is kept. */
static uint8_t *place_of_kept(const KeptSamples *kept, const Field *f, int64_t row)
{
    const Layer *l = f->layers;
    int64_t segment = find_segment(l, row, 0);
    row = l->row[segment] + (row - l->first[segment]) * l->step[segment];
    int64_t offset = offset_of_row(l, &f->shapes[l->shape[segment]], segment, row);
    return (uint8_t *)(uintptr_t)kept->sources->sources[l->source[segment]].map + offset;
}

/* Populate the large page noted in the state. If samples come in order, two threads would otherwise touch
   it first at the same time and both clear it, and the consumer would wait for them. */
static void touch_ahead(const KeptSamples *kept)
{
    uintptr_t page = (uintptr_t)__atomic_exchange_n(&kept->state[AHEAD], 0, __ATOMIC_RELAXED);
    for (int64_t i = 0; page && i < kept->sources->count; i++) {
        const Source *source = &kept->sources->sources[i];
        uintptr_t begin = (uintptr_t)source->map, end = begin + (uintptr_t)source->map_nbytes;
#if defined(MADV_POPULATE_WRITE)
        if (page >= begin && page < end) /* else it belongs to another field, or is beyond all of them */
            madvise((void *)page, end - page < LARGE_PAGE ? end - page : LARGE_PAGE, MADV_POPULATE_WRITE);
#endif
    }
}

/* Copy data that is not needed soon around the caches, so that the target's lines are not fetched. */
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

/* Keep consecutive rows, and request the next large page if they reach into a new one. */
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

/* The rows of a field for sample `from` and as many of those before `end` as are kept right after it. */
static Run run_of_kept(const Field *f, const int64_t *places, int64_t from, int64_t end)
{
    if (f->spans != NULL) {
        int64_t row = f->spans->starts[places[from]];
        return (Run){row, f->spans->starts[places[from] + 1] - row, 1};
    }
    int64_t samples = 1; /* segments with step 0 share one row among their samples */
    if (f->layers->num_segments == 1 && f->layers->step[0] == 1)
        while (from + samples < end && places[from + samples] == places[from] + samples)
            samples++;
    return (Run){places[from], samples, samples};
}

/* Keep the rows of samples `start` to `end` of a batch if `is_valid`, and transform them in any case. */
static void keep_rows(const KeptSamples *kept, const Field *f, const Target *target,
                      const int64_t *places, int64_t start, int64_t end, int is_valid)
{
    int64_t position = f->spans ? 0 : start, begin, ahead = rows_ahead(f->row_nbytes);
    int is_even = f->layers->num_segments == 1 && f->layers->step[0] == 1; /* rows are evenly spaced */
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
        if (is_valid && nbytes) { /* if no sample has rows, there is no memory for them either */
            uint8_t *to = is_even ? base + run.row * f->row_nbytes : place_of_kept(kept, f, run.row);
            keep_run(kept, to, target->raw + position * f->row_nbytes, nbytes);
        }
        position += run.rows, i += run.samples;
    }
    if (f->transform != NULL && position > begin)
        transform_run(f, target, begin, position - begin);
}

/* Note that the samples at some places are kept, now that all their rows have been copied. */
static void note_kept(KeptSamples *kept, const int64_t *places, int64_t count, int64_t generation)
{
    const uint8_t stamp = stamp_of(generation);
    const uint64_t several = 0x0101010101010101u * stamp;
#if defined(SSE2)
    _mm_sfence(); /* orders the non-temporal stores of rows before their stamps */
#endif
    for (int64_t i = 0; i < count; i++)
        __atomic_store_n(&kept->stamps[places[i]], stamp, __ATOMIC_RELEASE);
    /* Of two threads that note the last samples, the later one here sees the stamps of both. */
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

/* Keep samples `start` to `end` of a batch, unless the generation has changed since it was planned, and
   transform their rows, which so far are as read. */
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
