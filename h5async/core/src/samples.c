/* Lists the rows of a batch for its plan.

   Samples are sorted, and those adjacent both in the dataset and in the batch are joined into runs: a
   batch in order is a single run. So rows that are stored as they are cost nothing more here: their
   items refer to a range of the sorted samples, which all fields share. If all fields are such rows,
   each of one dataset, and in the page cache, any order is as good: then the samples are not sorted.

   A sample here is a row of the dataset. A field with steps has several for each sample of the batch;
   fields with equal steps are a group, whose rows are listed and sorted separately. */

/* Grows arrays to room for `count` elements each, keeping their contents; 0: there is no memory. */
static int grow(void **const *arrays, int num_arrays, int64_t *most, int64_t count, size_t nbytes)
{
    if (count <= *most)
        return 1;
    int64_t more = *most * 2 > count ? *most * 2 : count + 64;
    for (int i = 0; i < num_arrays; i++) {
        void *grown = realloc(*arrays[i], (size_t)more * nbytes);
        if (grown == NULL)
            return 0; /* arrays grown so far have more room than `most` says */
        *arrays[i] = grown;
    }
    *most = more;
    return 1;
}

static int grow_items(BatchPlan *p, int64_t count)
{
    return grow((void **[]){(void **)&p->items}, 1, &p->most_items, count, sizeof(Item));
}

static int grow_runs(BatchPlan *p, int64_t count)
{
    void **arrays[] = {(void **)&p->run_local, (void **)&p->run_position, (void **)&p->run_length};
    return grow(arrays, 3, &p->most_runs, count, sizeof(int64_t));
}

static int grow_wanted(BatchPlan *p, int64_t count)
{
    void **arrays[] = {(void **)&p->wanted, (void **)&p->spare};
    return grow(arrays, 2, &p->most_wanted, count, sizeof(Wanted));
}

enum { FEW = 48, MANY = 2048 };

/* Sorts by sample, then by rank; stable. */
static void insert_each(Wanted *wanted, int64_t count)
{
    for (int64_t i = 1; i < count; i++) {
        Wanted one = wanted[i];
        int64_t at = i;
        for (; at > 0 && (wanted[at - 1].sample > one.sample ||
                          (wanted[at - 1].sample == one.sample && wanted[at - 1].rank > one.rank));
             at--)
            wanted[at] = wanted[at - 1];
        wanted[at] = one;
    }
}

/* Sorts by sample; stable (if few, by rank among equal ones). All are in [least, least + span]. Returns
   the array that has the result. */
static Wanted *sort_wanted(Wanted *wanted, Wanted *spare, int64_t count, int64_t least, int64_t span)
{
    int bits = count < MANY ? 8 : 11; /* more at a time if that many counters cost little */
    int64_t digit = (1 << bits) - 1;
    uint32_t begin[(1 << 11) + 1];
    if (count <= FEW) {
        insert_each(wanted, count);
        return wanted;
    }
    for (int shift = 0; shift < 63 && span >> shift; shift += bits) {
        memset(begin, 0, (size_t)(digit + 2) * sizeof *begin);
        for (int64_t i = 0; i < count; i++)
            begin[((wanted[i].sample - least) >> shift & digit) + 1]++;
        for (int64_t i = 1; i < digit; i++)
            begin[i + 1] += begin[i];
        for (int64_t i = 0; i < count; i++)
            spare[begin[(wanted[i].sample - least) >> shift & digit]++] = wanted[i];
        Wanted *other = wanted;
        wanted = spare, spare = other;
    }
    return wanted;
}

/* Copies sorted runs to `runs`, joining those adjacent both in the dataset and in the batch. `rank` is
   first the length of each; afterwards, ranks count from `rank` on. Returns the number of runs; -1:
   their rows are not sorted, because some runs share several rows. */
static int64_t join_wanted(const Wanted *wanted, int64_t count, int64_t rank, Wanted *runs,
                           int is_sorted)
{
    int64_t num_runs = 0, behind = -1, place = 0; /* end of the run before: its row, and its place */
    for (int64_t i = 0; i < count; i++) {
        Wanted one = wanted[i];
        int64_t length = one.rank;
        int is_new = one.sample != behind || one.position != place;
        if (is_sorted && one.sample < behind - 1)
            return -1;
        behind = one.sample + length, place = one.position + length;
        if (is_new) {
            one.rank = (int32_t)rank;
            runs[num_runs++] = one;
        }
        rank += length;
    }
    runs[num_runs] = (Wanted){INT64_MAX, 0, (int32_t)rank};
    return num_runs;
}

typedef struct {
    int64_t count, least, most, latest;
    int is_ascending;
} Listed;

static const Listed NONE_LISTED = {0, INT64_MAX, -1, -1, 1};

ALWAYS_INLINE void list_run(Listed *listed, Wanted *wanted, int64_t sample, int64_t position,
                            int64_t length)
{
    listed->least = sample < listed->least ? sample : listed->least;
    int64_t last = sample + (length - 1);
    listed->most = last > listed->most ? last : listed->most;
    listed->is_ascending &= listed->latest <= sample;
    listed->latest = sample;
    wanted[listed->count++] = (Wanted){sample, (int32_t)position, (int32_t)length};
}

static NOINLINE Listed list_each(Wanted *wanted, const int64_t *samples, int64_t count, int is_joined)
{
    Listed listed = NONE_LISTED;
    for (int64_t i = 0, end; i < count; i = end) {
        for (end = i + 1; is_joined && end < count && samples[end] > 0 &&
                          samples[end - 1] == samples[end] - 1;)
            end++;
        list_run(&listed, wanted, samples[i], i, end - i);
    }
    return listed;
}

/* Lists the rows of all samples of a batch, except those filled with zeros (PAD_ZERO). */
static NOINLINE Listed list_steps(Wanted *wanted, const int64_t *samples, int64_t count,
                                  const StepRows *steps, int is_joined)
{
    Listed listed = NONE_LISTED;
    int64_t sequence = 0, position = 0;
    for (int64_t i = 0; i < count; i++, position += steps->num_offsets) {
        int64_t sample = samples[i];
        if (sample < steps->starts[sequence] || (sequence + 1 < steps->num_sequences &&
                                                 sample >= steps->starts[sequence + 1]))
            sequence = last_at(steps->starts, steps->num_sequences, sample);
        int64_t first = steps->starts[sequence], last = steps->ends[sequence] - 1;
        StepRun run = {0};
        for (; run.end < steps->num_offsets;) {
            run = run_of_steps(steps, sequence, sample, run.end, is_joined);
            int64_t at = position + run.step, behind = at + run.before + run.inside;
            if (steps->pad != PAD_ZERO)
                for (int64_t k = 0; k < run.before; k++)
                    list_run(&listed, wanted, first, at + k, 1);
            if (run.inside)
                list_run(&listed, wanted, run.row, at + run.before, run.inside);
            if (steps->pad != PAD_ZERO)
                for (int64_t k = 0; k < run.behind; k++)
                    list_run(&listed, wanted, last, behind + k, 1);
        }
    }
    return listed;
}

/* Lists the rows of samples of a ragged field one by one. */
static NOINLINE Listed list_span_rows(Wanted *wanted, const int64_t *samples, int64_t count,
                             const SpanRows *spans)
{
    Listed listed = NONE_LISTED;
    for (int64_t i = 0; i < count; i++)
        for (int64_t row = spans->starts[samples[i]]; row < spans->starts[samples[i] + 1]; row++)
            list_run(&listed, wanted, row, listed.count, 1);
    return listed;
}

/* Sorts what was listed, if `is_sorted`, and appends its runs, `num_rows` in all, to those of earlier
   groups. Returns 1; 0: there is no memory, or too many rows; -1: see join_wanted. */
static NOINLINE int put_runs(BatchPlan *plan, const Listed *listed, int64_t num_rows, int is_sorted)
{
    const Wanted *wanted = plan->wanted;
    int64_t first = plan->num_wanted ? plan->num_wanted + 1 : 0;
    int64_t rank = first ? plan->sorted[plan->num_wanted].rank : 0;
    if (rank + num_rows >= INT32_MAX ||
        !grow((void **[]){(void **)&plan->sorted}, 1, &plan->most_sorted, first + listed->count + 1,
              sizeof(Wanted)))
        return 0;
    if (is_sorted && !listed->is_ascending)
        wanted = sort_wanted(plan->wanted, plan->spare, listed->count, listed->least,
                             listed->most - listed->least);
    int64_t num_runs = join_wanted(wanted, listed->count, rank, plan->sorted + first, is_sorted);
    if (num_runs < 0)
        return -1;
    plan->first_wanted = first, plan->num_wanted = first + num_runs;
    return 1;
}

/* Lists the rows of a group of ragged fields, as runs. Returns as list_samples; -1: also no room for them. */
static int list_spans(BatchPlan *plan, const int64_t *samples, int64_t count, const Field *f,
                      const Target *target)
{
    const SpanRows *spans = f->spans;
    Listed listed = NONE_LISTED;
    int64_t total = 0;
    if (count >= INT32_MAX || !grow_wanted(plan, count + 1))
        return 0;
    for (int64_t i = 0; i < count; i++) {
        if (samples[i] < 0 || samples[i] >= spans->num_samples)
            return -1;
        int64_t begin = spans->starts[samples[i]];
        int64_t length = spans->starts[samples[i] + 1] - begin;
        if (begin < 0 || length < 0 || begin > f->num_rows - length ||
            length > target->capacity - total)
            return -1;
        if (target->offsets != NULL)
            target->offsets[i] = total;
        if (length > 0)
            list_run(&listed, plan->wanted, begin, total, length);
        total += length;
    }
    if (target->offsets != NULL)
        target->offsets[count] = total;
    int is_put = put_runs(plan, &listed, total, 1);
    if (is_put >= 0)
        return is_put;
    if (!grow_wanted(plan, total + 1)) /* a sample comes twice */
        return 0;
    listed = list_span_rows(plan->wanted, samples, count, spans);
    return put_runs(plan, &listed, total, 1);
}

/* Lists the rows of a group of fields, sorted or not, after those of earlier groups. Returns 1; 0: there
   is no memory, or too many rows; -1: a number is out of range. `steps` NULL: a sample is a row. */
static int list_samples(BatchPlan *plan, const int64_t *samples, int64_t count, int64_t num_samples,
                        int is_sorted, const StepRows *steps)
{
    int64_t most_rows = count;
    if (steps != NULL && __builtin_mul_overflow(count, steps->num_offsets, &most_rows))
        return 0;
    if (most_rows >= INT32_MAX || !grow_wanted(plan, most_rows + 1))
        return 0;
    Listed listed = steps == NULL ? list_each(plan->wanted, samples, count, 1)
                                  : list_steps(plan->wanted, samples, count, steps, 1);
    if (listed.least < 0 || listed.most >= num_samples)
        return -1;
    int is_put = put_runs(plan, &listed, most_rows, is_sorted);
    if (is_put >= 0)
        return is_put;
    listed = steps == NULL ? list_each(plan->wanted, samples, count, 0) /* samples share rows */
                           : list_steps(plan->wanted, samples, count, steps, 0);
    return put_runs(plan, &listed, most_rows, is_sorted);
}

/* Lists where the values of each sample go, for a field of variable-length elements, after its samples
   were listed. Returns 1; 0: there is no memory; -1: there is no room for so many values. */
static int list_places(BatchPlan *plan, const int64_t *samples, int64_t count, const Field *f,
                       const Target *target)
{
    int64_t total = 0;
    if (!grow((void **[]){(void **)&plan->places}, 1, &plan->most_places, count, sizeof(int64_t)))
        return 0;
    for (int64_t i = 0; i < count; i++) {
        plan->places[i] = total;
        total += f->lengths[samples[i]];
    }
    if (target->offsets != NULL) {
        memcpy(target->offsets, plan->places, (size_t)count * sizeof total);
        target->offsets[count] = total;
    }
    return total > target->capacity ? -1 : 1;
}

/* The last run from `run` on, itself included, that begins at or before a rank, or before a sample. */
static int64_t run_of_rank(const BatchPlan *plan, int64_t run, int64_t rank)
{
    int64_t most = rank - plan->sorted[run].rank + 1; /* each run has at least one sample */
    int64_t high = most < plan->num_wanted - run ? run + most : plan->num_wanted;
    FIND_LAST(run, high, at, plan->sorted[at].rank <= rank)
    return run;
}

static int64_t run_before_sample(const BatchPlan *plan, int64_t run, int64_t sample)
{
    int64_t high = plan->num_wanted;
    if (plan->sorted[high - 1].sample < sample)
        return high - 1;
    FIND_LAST_NEAR(run, high, at, plan->sorted[at].sample < sample)
    return run;
}
