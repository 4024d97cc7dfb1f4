/* Sample numbers enter; the plan of a batch leaves: items that do not depend on each other, sorted
   by source.

   The samples are sorted, and those that follow each other both in the dataset and in the batch are
   joined to runs: in order, a batch is one run. So rows that lie in a file as they are cost nothing
   here: their items name a range of the sorted samples, which all fields share. Where all fields are
   such rows, each of one dataset, and the page cache holds them, any order is as good: then the
   samples stay as they are.

   What is called a sample here is a row of the dataset. A field with steps has several for each sample
   of the batch; fields with equal steps are a group, whose rows are listed and sorted on their own. */

enum { ITEM_NBYTES = 1 << 17 /* of rows, some 10 us */ };
enum { RUN_NBYTES = 96 }; /* are copied while memory far from others is fetched */
enum Status { TO_DO = 0, DONE = 1, REFUSED = 2 };
#define MOST_COST ((int64_t)1 << 40) /* of an item: so the sum of many is a number, too */

/* Pieces `cross` to `cross_end` of the samples of one chunk's worth of rows; or rows that lie in the
   file as they are; or rows that nothing holds. The runs say which samples, and where they go. Where whole rows are kept,
   an item takes them once all pieces are there, and one without runs helps to decode its pieces. Or
   elements of variable length of one heap: their runs say which element, to which byte its values go,
   and, in place of a length, which sample of the batch it is. */
typedef struct {
    int32_t source, field, layer, segment;
    int32_t kind, status;
    int64_t number;              /* of the chunk of piece 0, at sample 0 of the grid */
    int64_t first_run, num_runs; /* ROWS: the first of the sorted samples, and how many */
    int32_t cross, cross_end;
    int64_t nbytes;              /* what it costs */
} Item;

/* While they are sorted, a sample and its place in the batch. Then a run of such: `rank` is that of
   the first one among the sorted samples, and the next run's `rank` is the end. */
typedef struct {
    int64_t sample;
    int32_t position, rank;
} Wanted;

typedef struct {
    Item *items;
    int64_t *run_local, *run_position, *run_length;
    Wanted *wanted, *spare; /* room for one more than there are samples */
    Wanted *joined;         /* runs of all groups, where there are several */
    const Wanted *sorted;   /* one of the three: `num_wanted` runs, and the end; see above */
    Wanted *order, *order_spare; /* of items, by source */
    int64_t *places; /* by sample of the batch: its first value, of the field that is planned */
    int64_t num_items, num_runs, num_wanted;
    int64_t most_items, most_runs, most_wanted, most_order, most_joined, most_places;
    int64_t first_wanted; /* the first run of the group that is planned */
    int64_t nbytes;
    _Atomic int64_t was_cached; /* whether all that was read by the last plan was in the page cache */
} BatchPlan;

typedef struct {
    uint8_t *raw, *out; /* rows as read; as delivered */
    int64_t is_wanted;
    int64_t capacity; /* rows that there is room for, of a ragged field */
} Target;

/* See that some arrays have room for `count` elements each; they keep what they hold. */
static int grow(void **const *arrays, int num_arrays, int64_t *most, int64_t count, size_t nbytes)
{
    if (count <= *most)
        return 1;
    int64_t more = *most * 2 > count ? *most * 2 : count + 64;
    for (int i = 0; i < num_arrays; i++) {
        void *grown = realloc(*arrays[i], (size_t)more * nbytes);
        if (grown == NULL)
            return 0; /* those that have grown have more room than `most` says */
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

/* --- the samples, sorted ----------------------------------------------------------------------- */

enum { FEW = 48, MANY = 2048 };

static void insert_each(Wanted *wanted, int64_t count)
{
    for (int64_t i = 1; i < count; i++) {
        Wanted one = wanted[i];
        int64_t at = i;
        for (; at > 0 && wanted[at - 1].sample > one.sample; at--)
            wanted[at] = wanted[at - 1];
        wanted[at] = one;
    }
}

/* Sort by sample, and those that are equal by their position, as they come; none is below `least`,
   nor above it by more than `span`. Returns which of the two arrays has them then. */
static Wanted *sort_wanted(Wanted *wanted, Wanted *spare, int64_t count, int64_t least, int64_t span)
{
    int bits = count < MANY ? 8 : 11; /* more at a time, where that many counters cost little */
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

/* Join samples that follow each other in the dataset and in the batch, and put them to `runs`, which
   may be the same array; ranks count from `rank` on. Returns how many runs. */
static int64_t join_wanted(const Wanted *wanted, int64_t count, int64_t rank, Wanted *runs)
{
    int64_t num_runs = 0;
    for (int64_t i = 0; i < count; i++) {
        Wanted one = wanted[i];
        int64_t length = num_runs ? rank + i - runs[num_runs - 1].rank : 0;
        if (num_runs && runs[num_runs - 1].sample + length == one.sample &&
            runs[num_runs - 1].position + length == one.position)
            continue;
        one.rank = (int32_t)(rank + i);
        runs[num_runs++] = one;
    }
    runs[num_runs] = (Wanted){INT64_MAX, 0, (int32_t)(rank + count)};
    return num_runs;
}

/* What is known of some samples when they are listed. */
typedef struct {
    int64_t count, least, most;
    int is_ascending;
} Listed;

/* List the samples of a batch. */
static Listed list_each(Wanted *wanted, const int64_t *samples, int64_t count)
{
    Listed listed = {count, INT64_MAX, -1, 1};
    int64_t before = -1;
    for (int64_t i = 0; i < count; i++) {
        int64_t sample = samples[i];
        listed.least = sample < listed.least ? sample : listed.least;
        listed.most = sample > listed.most ? sample : listed.most;
        listed.is_ascending &= before <= sample;
        before = sample;
        wanted[i] = (Wanted){sample, (int32_t)i, 0};
    }
    return listed;
}

/* List the rows of all samples of a batch, but those in whose place there are zeros. */
static Listed list_steps(Wanted *wanted, const int64_t *samples, int64_t count, const StepRows *steps)
{
    Listed listed = {0, INT64_MAX, -1, 1};
    int64_t before = -1, sequence = 0, position = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t sample = samples[i];
        if (sample < steps->starts[sequence] || (sequence + 1 < steps->num_sequences &&
                                                 sample >= steps->starts[sequence + 1]))
            sequence = last_at(steps->starts, steps->num_sequences, sample);
        int64_t first = steps->starts[sequence], last = steps->ends[sequence] - 1;
        for (int64_t k = 0; k < steps->num_offsets; k++, position++) {
            int64_t row = sample + steps->offsets[k];
            if (row < first || row > last) {
                if (steps->pad == PAD_ZERO)
                    continue;
                row = row < first ? first : last;
            }
            listed.least = row < listed.least ? row : listed.least;
            listed.most = row > listed.most ? row : listed.most;
            listed.is_ascending &= before <= row;
            before = row;
            wanted[listed.count++] = (Wanted){row, (int32_t)position, 0};
        }
    }
    return listed;
}

/* Put runs of rows, whose `rank` is their length, in order; 0: some have rows in common. */
static int rank_runs(const Wanted *wanted, int64_t count, int64_t rank, Wanted *runs,
                     int64_t *num_runs)
{
    *num_runs = 0;
    for (int64_t i = 0; i < count; i++) {
        Wanted one = wanted[i];
        int64_t length = one.rank;
        if (i + 1 < count && one.sample + length > wanted[i + 1].sample)
            return 0;
        int64_t before = *num_runs ? rank - runs[*num_runs - 1].rank : 0;
        if (!*num_runs || runs[*num_runs - 1].sample + before != one.sample ||
            runs[*num_runs - 1].position + before != one.position) {
            one.rank = (int32_t)rank;
            runs[(*num_runs)++] = one;
        }
        rank += length;
    }
    runs[*num_runs] = (Wanted){INT64_MAX, 0, (int32_t)rank};
    return 1;
}

/* List the rows of samples of a ragged field one by one, of `rows` in all. */
static Listed list_span_rows(Wanted *wanted, const int64_t *samples, int64_t count,
                             const SpanRows *spans)
{
    Listed listed = {0, INT64_MAX, -1, 0};
    for (int64_t i = 0; i < count; i++)
        for (int64_t row = spans->starts[samples[i]]; row < spans->starts[samples[i] + 1]; row++) {
            listed.least = row < listed.least ? row : listed.least;
            listed.most = row > listed.most ? row : listed.most;
            wanted[listed.count] = (Wanted){row, (int32_t)listed.count, 0};
            listed.count++;
        }
    return listed;
}

/* Where the runs of a group begin: in the arrays that were sorted, or behind those of the groups
   before. NULL: there is no memory. */
static Wanted *place_of_runs(BatchPlan *plan, Wanted *sorted, int64_t count, int64_t num_rows,
                             int is_only_group, int64_t *rank)
{
    *rank = 0;
    plan->first_wanted = 0;
    if (is_only_group)
        return sorted;
    *rank = plan->num_wanted ? plan->joined[plan->num_wanted].rank : 0;
    plan->first_wanted = plan->num_wanted ? plan->num_wanted + 1 : 0;
    if (*rank + num_rows >= INT32_MAX ||
        !grow((void **[]){(void **)&plan->joined}, 1, &plan->most_joined,
              plan->first_wanted + count + 1, sizeof(Wanted)))
        return NULL;
    return plan->joined + plan->first_wanted;
}

/* List the rows of a group of ragged fields, which are runs; as list_samples does. */
static int list_spans(BatchPlan *plan, const int64_t *samples, int64_t count, const Field *f,
                      int64_t capacity, int is_only_group)
{
    const SpanRows *spans = f->spans;
    Listed listed = {0, INT64_MAX, -1, 1};
    int64_t total = 0, before = -1, rank, num_runs;
    if (count >= INT32_MAX || !grow_wanted(plan, count + 1))
        return 0;
    for (int64_t i = 0; i < count; i++) {
        if (samples[i] < 0 || samples[i] >= spans->num_samples)
            return -1;
        int64_t begin = spans->starts[samples[i]];
        int64_t length = spans->starts[samples[i] + 1] - begin;
        if (begin < 0 || length < 0 || begin > f->num_rows - length || length > capacity - total)
            return -1;
        if (length == 0)
            continue;
        listed.least = begin < listed.least ? begin : listed.least;
        listed.most = begin > listed.most ? begin : listed.most;
        listed.is_ascending &= before <= begin;
        before = begin;
        plan->wanted[listed.count++] = (Wanted){begin, (int32_t)total, (int32_t)length};
        total += length;
    }
    if (total >= INT32_MAX)
        return 0;
    Wanted *sorted = plan->wanted;
    if (!listed.is_ascending)
        sorted = sort_wanted(plan->wanted, plan->spare, listed.count, listed.least,
                             listed.most - listed.least);
    Wanted *runs = place_of_runs(plan, sorted, listed.count, total, is_only_group, &rank);
    if (runs == NULL)
        return 0;
    if (!rank_runs(sorted, listed.count, rank, runs, &num_runs)) { /* a sample comes twice */
        if (!grow_wanted(plan, total + 1))
            return 0;
        listed = list_span_rows(plan->wanted, samples, count, spans);
        sorted = sort_wanted(plan->wanted, plan->spare, total, listed.least,
                             listed.most - listed.least);
        if (!is_only_group) /* the groups before are counted as they were */
            plan->num_wanted = plan->first_wanted ? plan->first_wanted - 1 : 0;
        runs = place_of_runs(plan, sorted, total, total, is_only_group, &rank);
        if (runs == NULL)
            return 0;
        num_runs = join_wanted(sorted, total, rank, runs);
    }
    plan->num_wanted = plan->first_wanted + num_runs;
    plan->sorted = is_only_group ? runs : plan->joined;
    return 1;
}

/* List the rows of a group of fields, sorted or not, behind those of the groups before it; -1: there
   is one that no field has; 0: there is no memory. Fields with `steps` NULL: a sample is a row. */
static int list_samples(BatchPlan *plan, const int64_t *samples, int64_t count, int64_t num_samples,
                        int is_sorted, const StepRows *steps, int is_only_group)
{
    int64_t most_rows = count, rank;
    if (steps != NULL && __builtin_mul_overflow(count, steps->num_offsets, &most_rows))
        return 0;
    if (most_rows >= INT32_MAX || !grow_wanted(plan, most_rows + 1))
        return 0;
    Listed listed = steps == NULL ? list_each(plan->wanted, samples, count)
                                  : list_steps(plan->wanted, samples, count, steps);
    if (listed.least < 0 || listed.most >= num_samples)
        return -1;
    Wanted *sorted = plan->wanted;
    if (is_sorted && !listed.is_ascending)
        sorted = sort_wanted(plan->wanted, plan->spare, listed.count, listed.least,
                             listed.most - listed.least);
    Wanted *runs = place_of_runs(plan, sorted, listed.count, listed.count, is_only_group, &rank);
    if (runs == NULL)
        return 0;
    plan->num_wanted = plan->first_wanted + join_wanted(sorted, listed.count, rank, runs);
    plan->sorted = is_only_group ? sorted : plan->joined;
    return 1;
}

/* List where the values of each sample go, of a field of elements of variable length, after the samples
   were; 0: there is no memory for it; -1: there is no room for so many values. */
static int list_places(BatchPlan *plan, const int64_t *samples, int64_t count, const Field *f,
                       int64_t capacity)
{
    int64_t total = 0;
    if (!grow((void **[]){(void **)&plan->places}, 1, &plan->most_places, count, sizeof(int64_t)))
        return 0;
    for (int64_t i = 0; i < count; i++) {
        plan->places[i] = total;
        total += f->lengths[samples[i]];
    }
    return total > capacity ? -1 : 1;
}

/* The run that begins last of those below `run_end` that begin at or before a rank, or before a
   sample; that of number `run` does. */
static int64_t run_of_rank(const BatchPlan *plan, int64_t run, int64_t rank)
{
    int64_t low = run, high = plan->num_wanted;
    if (low + (rank - plan->sorted[low].rank) < high)
        high = low + (rank - plan->sorted[low].rank) + 1; /* each run has a sample */
    while (low + 1 < high) {
        int64_t middle = low + (high - low) / 2;
        *(plan->sorted[middle].rank <= rank ? &low : &high) = middle;
    }
    return low;
}

static int64_t run_before_sample(const BatchPlan *plan, int64_t run, int64_t sample)
{
    int64_t low = run, high = plan->num_wanted, step = 1;
    if (plan->sorted[high - 1].sample < sample)
        return high - 1;
    while (low + step < high && plan->sorted[low + step].sample < sample) {
        low += step;
        step *= 2;
    }
    high = low + step < high ? low + step : high;
    while (low + 1 < high) {
        int64_t middle = low + (high - low) / 2;
        *(plan->sorted[middle].sample < sample ? &low : &high) = middle;
    }
    return low;
}

/* --- items ------------------------------------------------------------------------------------- */

/* Some of the sorted samples, by rank, all in one segment; `run` is the run of the first. */
typedef struct {
    int64_t run, rank, end;
} Ranks;

/* What it costs to read so many bytes so many times. */
static int64_t cost_of(int64_t nbytes, int64_t times)
{
    int64_t cost;
    if (__builtin_mul_overflow(nbytes, times, &cost) || cost > MOST_COST)
        return MOST_COST;
    return cost;
}

static int keeps_rows(const Field *f, const Item *item)
{
    return f->shapes[f->layers[item->layer].shape[item->segment]].keeps == KEEPS_ROWS;
}

static int has_source(const Field *f, const Layer *l, int64_t segment)
{
    return l->shape[segment] >= 0 && f->shapes[l->shape[segment]].kind != LEFT;
}

static Item *new_item(BatchPlan *plan, const Field *f, int32_t field, int32_t layer, int64_t segment)
{
    if (!grow_items(plan, plan->num_items + 1))
        return NULL;
    Item *item = &plan->items[plan->num_items++];
    const Layer *l = &f->layers[layer];
    *item = (Item){.field = field, .layer = layer, .segment = (int32_t)segment,
                   .source = has_source(f, l, segment) ? l->source[segment] : -1,
                   .first_run = plan->num_runs};
    return item;
}

static int add_run(BatchPlan *plan, Item *item, int64_t local, int64_t position, int64_t length)
{
    if (!grow_runs(plan, plan->num_runs + 1))
        return 0;
    plan->run_local[plan->num_runs] = local;
    plan->run_position[plan->num_runs] = position;
    plan->run_length[plan->num_runs++] = length;
    item->num_runs++;
    return 1;
}

/* Samples whose rows lie in the file as they are. */
static int plan_rows(BatchPlan *plan, const Field *f, int32_t field, int32_t layer, int64_t segment,
                     Ranks ranks)
{
    int64_t per_item = ITEM_NBYTES / (f->row_nbytes + RUN_NBYTES) + 1;
    while (ranks.rank < ranks.end) {
        int64_t left = ranks.end - ranks.rank, here = left < per_item ? left : per_item;
        Item *item = new_item(plan, f, field, layer, segment);
        if (item == NULL)
            return 0;
        item->kind = ROWS, item->first_run = ranks.rank, item->num_runs = here;
        item->number = ranks.run;
        ranks.rank += here;
        int64_t last = run_of_rank(plan, ranks.run, ranks.rank - 1);
        item->nbytes = cost_of(f->row_nbytes, here) + RUN_NBYTES * (last + 1 - ranks.run);
        ranks.run = last + (plan->sorted[last + 1].rank == ranks.rank);
    }
    return 1;
}

/* Samples that lie in chunks, or for which nothing can be read here. */
static int plan_chunks(BatchPlan *plan, const Field *f, int32_t field, int32_t layer,
                       int64_t segment, Ranks ranks)
{
    const Layer *l = &f->layers[layer];
    const Shape *shape = l->shape[segment] < 0 ? NULL : &f->shapes[l->shape[segment]];
    int64_t kind = shape ? shape->kind : NO_SOURCE;
    int64_t per_chunk = kind == CHUNKS ? shape->dataset.chunk_samples : INT64_MAX;
    int64_t begin = 0, end = 0, rows = 0; /* of a chunk; in an item */
    int is_one_chunk = kind != CHUNKS || shape->dataset.begin >= 0;
    /* Where samples are not counted by the first dimension, neighbours lie in the same lines. */
    int is_cut = kind != CHUNKS || (is_one_chunk && shape->dataset.sample_stride >= f->row_nbytes);
    Item *item = NULL;
    while (ranks.rank < ranks.end) {
        const Wanted *run = &plan->sorted[ranks.run];
        int64_t behind = run[1].rank < ranks.end ? run[1].rank : ranks.end;
        int64_t here = behind - ranks.rank, inside = ranks.rank - run->rank;
        int64_t row = run->sample + inside - l->first[segment];
        if (kind == CHUNKS) {
            row = l->row[segment] + row * l->step[segment];
            here = l->step[segment] == 1 ? here : 1;
        }
        if (item == NULL || row < begin || row >= end ||
            (is_cut && item->nbytes >= ITEM_NBYTES)) {
            int64_t group = row / per_chunk;
            begin = group * per_chunk;
            end = per_chunk < INT64_MAX - begin ? begin + per_chunk : INT64_MAX;
            item = new_item(plan, f, field, layer, segment);
            if (item == NULL)
                return 0;
            item->kind = (int32_t)kind, rows = 0;
            if (kind == CHUNKS) {
                item->number = group * shape->number_stride;
                item->cross_end = (int32_t)shape->dataset.num_cross;
                if (!is_one_chunk)
                    item->nbytes = cost_of(shape->dataset.chunk_nbytes, shape->dataset.num_cross);
            }
        }
        here = here < end - row ? here : end - row;
        if (!add_run(plan, item, row - begin, run->position + inside, here))
            return 0;
        if (is_one_chunk)
            item->nbytes = cost_of(f->row_nbytes, rows += here);
        ranks.rank += here;
        ranks.run += ranks.rank == run[1].rank;
    }
    return 1;
}

/* Samples that are elements of variable length. */
static int plan_heap(BatchPlan *plan, const Field *f, int32_t field, int32_t layer, int64_t segment,
                     Ranks ranks)
{
    int64_t first = f->layers[layer].first[segment];
    Item *item = NULL;
    for (; ranks.rank < ranks.end; ranks.rank++) {
        const Wanted *run = &plan->sorted[ranks.run];
        int64_t sample = run->sample + ranks.rank - run->rank;
        int64_t position = run->position + ranks.rank - run->rank;
        if (item == NULL || item->num_runs == BLOCK_SEQUENCES || item->nbytes >= ITEM_NBYTES) {
            item = new_item(plan, f, field, layer, segment);
            if (item == NULL)
                return 0;
            item->kind = HEAP;
        }
        if (!add_run(plan, item, sample - first, plan->places[position] * f->row_nbytes, position))
            return 0;
        item->nbytes += cost_of(f->row_nbytes, f->lengths[sample]) + RUN_NBYTES;
        ranks.run += ranks.rank + 1 == run[1].rank;
    }
    return 1;
}

/* Some fields with one layer each, whose segments begin at the same samples; or one layer of a field. */
typedef struct {
    const Field *fields;
    const Target *targets;
    int32_t begin, end, layer;
} Alike;

static int is_planned(const Alike *alike, int32_t field)
{
    return alike->targets[field].is_wanted && alike->fields[field].row_nbytes > 0;
}

/* Samples of one segment. */
static int plan_segment(BatchPlan *plan, const Field *f, int32_t field, int32_t layer,
                        int64_t segment, Ranks ranks)
{
    const Layer *l = &f->layers[layer];
    int64_t kind = l->shape[segment] < 0 ? NO_SOURCE : f->shapes[l->shape[segment]].kind;
    if (kind == ROWS || kind == ROWS_IN_CHUNKS)
        return plan_rows(plan, f, field, layer, segment, ranks);
    if (kind == NO_SOURCE && (f->is_filled_first || f->num_layers > 1 || f->heaps != NULL))
        return 1;
    if (kind == HEAP)
        return plan_heap(plan, f, field, layer, segment, ranks);
    return plan_chunks(plan, f, field, layer, segment, ranks);
}

/* Segment by segment: so items of several fields, too, come in the order of their sources. */
static int plan_alike(BatchPlan *plan, const Alike *alike)
{
    const Layer *l = &alike->fields[alike->begin].layers[alike->layer];
    int64_t segment = 0, end = plan->sorted[plan->num_wanted].rank;
    Ranks ranks = {.run = plan->first_wanted, .rank = plan->sorted[plan->first_wanted].rank};
    for (; ranks.rank < end; ranks.rank = ranks.end) {
        const Wanted *run = &plan->sorted[ranks.run];
        segment = find_segment(l, run->sample + ranks.rank - run->rank, segment);
        int64_t behind = l->first[segment + 1];
        int64_t last = run_before_sample(plan, ranks.run, behind);
        run = &plan->sorted[last];
        ranks.end = behind - run->sample < run[1].rank - run->rank ? run->rank + behind - run->sample
                                                                   : run[1].rank;
        for (int32_t field = alike->begin; field < alike->end; field++)
            if (is_planned(alike, field) &&
                !plan_segment(plan, &alike->fields[field], field, alike->layer, segment, ranks))
                return 0;
        ranks.run = last + (ranks.end == run[1].rank);
    }
    return 1;
}

static int is_same_group(const Field *one, const Field *other)
{
    return one->steps == other->steps && one->spans == other->spans && one->heaps == other->heaps;
}

/* The end of the fields from `begin` on whose segments begin at the same samples. */
static int32_t end_of_alike(const Field *fields, int32_t begin, int64_t num_fields)
{
    int32_t end = begin + 1;
    while (fields[begin].num_layers == 1 && end < num_fields && fields[end].num_layers == 1 &&
           is_same_group(&fields[end], &fields[begin]) &&
           fields[end].layers->first == fields[begin].layers->first)
        end++;
    return end;
}

/* Cut an item that takes rows which are kept: into such as take some of its runs, and as many without
   runs, with which other threads help to decode the pieces. */
static int cut_rows(BatchPlan *plan, int64_t number, int64_t parts)
{
    const Item whole = plan->items[number];
    int64_t cross = whole.cross_end, runs = whole.num_runs;
    int64_t takers = parts < runs ? parts : runs, helpers = parts < cross ? parts : cross;
    if (!grow_items(plan, plan->num_items + takers + helpers))
        return 0;
    for (int64_t k = 0; k < takers; k++) {
        Item *item = k ? &plan->items[plan->num_items++] : &plan->items[number];
        *item = whole;
        item->first_run = whole.first_run + runs * k / takers;
        item->num_runs = runs * (k + 1) / takers - runs * k / takers;
        item->nbytes = whole.nbytes / (takers + helpers);
    }
    for (int64_t k = 0; k < helpers && cross > 1; k++) {
        Item *item = &plan->items[plan->num_items++];
        *item = whole;
        item->num_runs = 0;
        item->cross = (int32_t)(cross * k / helpers);
        item->cross_end = (int32_t)(cross * (k + 1) / helpers);
        item->nbytes = whole.nbytes / (takers + helpers);
    }
    return 1;
}

/* Cut items of many pieces, where there are too few items for all threads. */
static int cut_items(BatchPlan *plan, const Field *fields, int64_t parts)
{
    int64_t count = plan->num_items, wanted = 4 * parts;
    if (parts < 2 || count >= wanted)
        return 1;
    for (int64_t i = 0; i < count; i++) {
        Item whole = plan->items[i];
        int64_t cross = whole.cross_end;
        if (whole.kind == CHUNKS && keeps_rows(&fields[whole.field], &whole)) {
            if (!cut_rows(plan, i, (wanted + count - 1) / count))
                return 0;
            continue;
        }
        if (whole.kind != CHUNKS || cross < 2)
            continue;
        int64_t pieces = wanted < cross ? wanted : cross;
        if (!grow_items(plan, plan->num_items + pieces))
            return 0;
        for (int64_t k = 0; k < pieces; k++) {
            Item *item = k ? &plan->items[plan->num_items++] : &plan->items[i];
            *item = whole;
            item->cross = (int32_t)(cross * k / pieces);
            item->cross_end = (int32_t)(cross * (k + 1) / pieces);
            item->nbytes = whole.nbytes / cross * (item->cross_end - item->cross);
        }
    }
    return 1;
}

/* Put the items in the order of their sources; those of one source stay as they are. */
static int sort_items(BatchPlan *plan)
{
    int64_t count = plan->num_items, most = -1;
    int is_sorted = 1;
    void **arrays[] = {(void **)&plan->order, (void **)&plan->order_spare};
    for (int64_t i = 0; i < count; i++) {
        is_sorted &= most <= plan->items[i].source;
        most = plan->items[i].source > most ? plan->items[i].source : most;
    }
    if (is_sorted)
        return 1;
    if (count >= INT32_MAX || !grow(arrays, 2, &plan->most_order, count, sizeof(Wanted)))
        return 0;
    for (int64_t i = 0; i < count; i++)
        plan->order[i] = (Wanted){plan->items[i].source, (int32_t)i, 0};
    Wanted *order = sort_wanted(plan->order, plan->order_spare, count, -1, most + 1);
    for (int64_t i = 0; i < count; i++) { /* each cycle of places: an item goes where it belongs */
        if (order[i].position < 0)
            continue;
        Item first = plan->items[i];
        int64_t to = i, from;
        for (; (from = order[to].position) != i; to = from) {
            plan->items[to] = plan->items[from];
            order[to].position = -1;
        }
        plan->items[to] = first;
        order[to].position = -1;
    }
    return 1;
}

/* Whether samples need be sorted to find where they lie. */
static int needs_order(const Field *fields, const Target *targets, int64_t num_fields)
{
    for (int64_t i = 0; i < num_fields; i++) {
        const Field *f = &fields[i];
        if (!targets[i].is_wanted || f->row_nbytes == 0)
            continue;
        if (f->num_layers != 1 || f->layers->num_segments != 1 || f->layers->shape[0] < 0)
            return 1;
        int64_t kind = f->shapes[f->layers->shape[0]].kind;
        if (kind != ROWS && kind != ROWS_IN_CHUNKS)
            return 1;
    }
    return 0;
}

/* Plan the fields of one group, from `begin` on. */
static int plan_group(BatchPlan *plan, const Field *fields, const Target *targets,
                      int64_t num_fields, int32_t begin)
{
    const Field *first = &fields[begin];
    Alike alike = {.fields = fields, .targets = targets, .begin = begin};
    for (; alike.begin < num_fields; alike.begin = alike.end) {
        alike.end = end_of_alike(fields, alike.begin, num_fields);
        int is_wanted = 0;
        for (int32_t field = alike.begin; field < alike.end; field++)
            is_wanted |= is_same_group(&fields[field], first) && is_planned(&alike, field);
        for (alike.layer = 0; is_wanted && alike.layer < fields[alike.begin].num_layers; alike.layer++)
            if (!plan_alike(plan, &alike))
                return 0;
    }
    return 1;
}

/* Whether a field is wanted, and is the first one of its group. */
static int begins_group(const Field *fields, const Target *targets, int32_t field)
{
    for (int32_t before = field - 1; before >= 0; before--)
        if (is_same_group(&fields[before], &fields[field]) && targets[before].is_wanted)
            return 0;
    return targets[field].is_wanted != 0;
}

/* Samples in whose place a field has zeros. */
static int plan_zeros(BatchPlan *plan, const Field *f, int32_t field, const int64_t *samples,
                      int64_t count)
{
    const StepRows *steps = f->steps;
    int64_t position = 0, sequence = 0, per_item = ITEM_NBYTES / (f->row_nbytes + 1) + 1;
    Item *item = NULL;
    for (int64_t i = 0; i < count; i++) {
        sequence = last_at(steps->starts, steps->num_sequences, samples[i]);
        for (int64_t k = 0; k < steps->num_offsets; k++, position++) {
            int64_t row = samples[i] + steps->offsets[k];
            if (row >= steps->starts[sequence] && row < steps->ends[sequence])
                continue;
            if (item == NULL || item->num_runs >= per_item) {
                if (!grow_items(plan, plan->num_items + 1))
                    return 0;
                item = &plan->items[plan->num_items++];
                *item = (Item){.field = field, .kind = ZEROS, .source = -1,
                               .first_run = plan->num_runs};
            }
            if (!add_run(plan, item, 0, position, 1))
                return 0;
            item->nbytes = cost_of(f->row_nbytes, item->num_runs);
        }
    }
    return 1;
}

/* Plan a batch of at most `rows` samples; 0: there is no memory for it; -1: there are more samples,
   or one that no field has. `parts`: threads that may work on it. */
PUBLIC int64_t h5async_plan_batch(BatchPlan *plan, const Field *fields, const Target *targets,
                                  int64_t num_fields, const int64_t *samples, int64_t count,
                                  int64_t rows, int64_t num_samples, int64_t parts)
{
    plan->num_items = plan->num_runs = plan->num_wanted = plan->nbytes = 0;
    if (count > rows)
        return -1;
    int is_sorted = !atomic_exchange(&plan->was_cached, 1) || needs_order(fields, targets, num_fields);
    int num_groups = 0;
    for (int32_t field = 0; field < num_fields; field++)
        num_groups += begins_group(fields, targets, field);
    for (int32_t field = 0; field < num_fields; field++) {
        const Field *f = &fields[field];
        if (begins_group(fields, targets, field)) {
            int listed =
                f->spans ? list_spans(plan, samples, count, f, targets[field].capacity,
                                      num_groups == 1)
                         : list_samples(plan, samples, count,
                                        f->steps || f->heaps ? f->num_rows : num_samples,
                                        is_sorted, f->steps, num_groups == 1);
            if (listed == 1 && f->heaps != NULL)
                listed = list_places(plan, samples, count, f, targets[field].capacity);
            if (listed < 1)
                return listed;
            if (!plan_group(plan, fields, targets, num_fields, field))
                return 0;
        }
        if (!targets[field].is_wanted || f->row_nbytes == 0)
            continue;
        if (f->is_filled_first) {
            int64_t filled = f->spans ? 0 : count * (f->steps ? f->steps->num_offsets : 1);
            for (int64_t i = 0; f->spans && i < count; i++)
                filled += f->spans->starts[samples[i] + 1] - f->spans->starts[samples[i]];
            fill_elements(f->fill, f->itemsize, targets[field].raw, filled * f->row_nbytes);
        }
        if (f->steps != NULL && f->steps->pad == PAD_ZERO &&
            !plan_zeros(plan, f, field, samples, count))
            return 0;
    }
    if (!cut_items(plan, fields, parts) || !sort_items(plan))
        return 0;
    for (int64_t i = 0; i < plan->num_items; i++)
        plan->nbytes += plan->items[i].nbytes;
    return 1;
}

PUBLIC int64_t h5async_free_plan(BatchPlan *plan)
{
    void *memory[] = {plan->items, plan->run_local, plan->run_position, plan->run_length,
                      plan->wanted, plan->spare, plan->joined, plan->order,
                      plan->order_spare, plan->places};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++)
        free(memory[i]);
    *plan = (BatchPlan){0};
    return 1;
}
