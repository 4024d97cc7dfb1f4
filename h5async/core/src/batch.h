/* Sample numbers enter; the rows of a batch leave, of all fields, out of all sources.

   A batch is planned once: its samples are sorted, and cut into items that do not depend on each
   other, sorted by source. Then threads take ranges of items, each in one call. An item that cannot
   be done is marked, and left to the Python implementation, which has the words for what is wrong. */

enum { MAX_CLAIMS = 64, USES_PER_PROBE = 8, ITEM_NBYTES = 1 << 17 /* of rows, some 10 us */ };
enum Status { TO_DO = 0, DONE = 1, REFUSED = 2 };
#define MOST_COST ((int64_t)1 << 40) /* of an item: so the sum of many is a number, too */

/* Pieces `cross` to `cross_end` of the samples of one chunk's worth of rows; or rows that lie in the
   file as they are; or rows that nothing holds. The runs say which samples, and where they go. */
typedef struct {
    int32_t source, field, layer, segment;
    int32_t kind, status;
    int64_t number;           /* of the chunk of piece 0, at sample 0 of the grid */
    int64_t first_run, num_runs; /* or rows */
    int32_t cross, cross_end;
    int64_t nbytes;           /* what it costs */
} Item;

typedef struct {
    int64_t sample, position;
} Wanted;

typedef struct {
    Item *items;
    int64_t *run_local, *run_position, *run_length;
    int64_t *offset, *position; /* of rows that lie in the file as they are */
    Wanted *wanted, *spare;
    int64_t num_items, num_runs, num_rows;
    int64_t most_items, most_runs, most_rows, most_wanted;
    int64_t nbytes;
} BatchPlan;

typedef struct {
    uint8_t *raw, *out; /* rows as read; as delivered */
    int64_t is_wanted;
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

static int grow_rows(BatchPlan *p, int64_t count)
{
    void **arrays[] = {(void **)&p->offset, (void **)&p->position};
    return grow(arrays, 2, &p->most_rows, count, sizeof(int64_t));
}

static int grow_wanted(BatchPlan *p, int64_t count)
{
    void **arrays[] = {(void **)&p->wanted, (void **)&p->spare};
    return grow(arrays, 2, &p->most_wanted, count, sizeof(Wanted));
}

/* By sample, and those that are equal by their position, as they come. */
static Wanted *sort_wanted(Wanted *wanted, Wanted *spare, int64_t count)
{
    int64_t most = 0;
    int is_sorted = 1;
    for (int64_t i = 0; i < count; i++) {
        most = wanted[i].sample > most ? wanted[i].sample : most;
        is_sorted &= i == 0 || wanted[i - 1].sample <= wanted[i].sample;
    }
    if (is_sorted)
        return wanted;
    if (count <= 48) {
        for (int64_t i = 1; i < count; i++) {
            Wanted one = wanted[i];
            int64_t at = i;
            for (; at > 0 && wanted[at - 1].sample > one.sample; at--)
                wanted[at] = wanted[at - 1];
            wanted[at] = one;
        }
        return wanted;
    }
    for (int shift = 0; shift < 63 && most >> shift; shift += 8) {
        int64_t begin[257] = {0};
        for (int64_t i = 0; i < count; i++)
            begin[(wanted[i].sample >> shift & 255) + 1]++;
        for (int i = 1; i < 256; i++)
            begin[i] += begin[i - 1];
        for (int64_t i = 0; i < count; i++)
            spare[begin[wanted[i].sample >> shift & 255]++] = wanted[i];
        Wanted *other = wanted;
        wanted = spare, spare = other;
    }
    return wanted;
}

/* What it costs to read so many bytes so many times. */
static int64_t cost_of(int64_t nbytes, int64_t times)
{
    int64_t cost;
    if (__builtin_mul_overflow(nbytes, times, &cost) || cost > MOST_COST)
        return MOST_COST;
    return cost;
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

static int add_sample(BatchPlan *plan, Item *item, int64_t local, int64_t position)
{
    int64_t last = plan->num_runs - 1;
    if (item->num_runs && plan->run_local[last] + plan->run_length[last] == local &&
        plan->run_position[last] + plan->run_length[last] == position) {
        plan->run_length[last]++;
        return 1;
    }
    if (!grow_runs(plan, plan->num_runs + 1))
        return 0;
    plan->run_local[plan->num_runs] = local;
    plan->run_position[plan->num_runs] = position;
    plan->run_length[plan->num_runs++] = 1;
    item->num_runs++;
    return 1;
}

static int plan_rows(BatchPlan *plan, const Field *f, int32_t field, int32_t layer, int64_t segment,
                     const Wanted *wanted, int64_t count)
{
    const Layer *l = &f->layers[layer];
    const Shape *shape = &f->shapes[l->shape[segment]];
    const int64_t row_nbytes = f->row_nbytes, per_chunk = shape->dataset.chunk_samples;
    int64_t per_item = ITEM_NBYTES / (row_nbytes + 1) + 1;
    if (!grow_rows(plan, plan->num_rows + count))
        return 0;
    for (int64_t done = 0; done < count;) {
        int64_t here = count - done < per_item ? count - done : per_item;
        Item *item = new_item(plan, f, field, layer, segment);
        if (item == NULL)
            return 0;
        item->kind = ROWS, item->first_run = plan->num_rows, item->num_runs = here;
        item->nbytes = cost_of(row_nbytes, here);
        for (int64_t end = done + here; done < end; done++) {
            int64_t row = l->row[segment] +
                          (wanted[done].sample - l->first[segment]) * l->step[segment];
            int64_t offset = -1;
            if (shape->kind == ROWS) {
                if (l->begin[segment] >= 0 &&
                    (__builtin_mul_overflow(row, shape->source_row_nbytes, &offset) ||
                     __builtin_add_overflow(offset, l->begin[segment], &offset)))
                    offset = INT64_MAX; /* which no read takes */
            } else {
                int64_t extent = find_extent(f, l, segment, row / per_chunk * shape->number_stride);
                if (extent == -2)
                    offset = INT64_MAX;
                else if (extent >= 0)
                    offset = f->offset[extent] + row % per_chunk * row_nbytes;
            }
            plan->offset[plan->num_rows] = offset;
            plan->position[plan->num_rows++] = wanted[done].position;
        }
    }
    return 1;
}

/* Samples of one segment that lie in chunks, or for which nothing can be read here. */
static int plan_chunks(BatchPlan *plan, const Field *f, int32_t field, int32_t layer,
                       int64_t segment, const Wanted *wanted, int64_t count)
{
    const Layer *l = &f->layers[layer];
    const Shape *shape = l->shape[segment] < 0 ? NULL : &f->shapes[l->shape[segment]];
    int64_t kind = shape ? shape->kind : NO_SOURCE, group = -1;
    int64_t per_chunk = kind == CHUNKS ? shape->dataset.chunk_samples : INT64_MAX;
    Item *item = NULL;
    for (int64_t i = 0; i < count; i++) {
        int64_t row = wanted[i].sample - l->first[segment];
        if (kind == CHUNKS)
            row = l->row[segment] + row * l->step[segment];
        if (item == NULL || row / per_chunk != group) {
            group = row / per_chunk;
            item = new_item(plan, f, field, layer, segment);
            if (item == NULL)
                return 0;
            item->kind = (int32_t)kind;
            if (kind == CHUNKS) {
                item->number = group * shape->number_stride;
                item->cross_end = (int32_t)shape->dataset.num_cross;
                if (shape->dataset.begin < 0)
                    item->nbytes = cost_of(shape->dataset.chunk_nbytes, shape->dataset.num_cross);
            }
        }
        if (!add_sample(plan, item, row - group * (kind == CHUNKS ? per_chunk : 0),
                        wanted[i].position))
            return 0;
        if (kind != CHUNKS || shape->dataset.begin >= 0)
            item->nbytes = cost_of(f->row_nbytes, i + 1);
    }
    return 1;
}

static int plan_layer(BatchPlan *plan, const Field *f, int32_t field, int32_t layer,
                      const Wanted *wanted, int64_t count)
{
    const Layer *l = &f->layers[layer];
    int64_t segment = 0;
    for (int64_t i = 0, end; i < count; i = end) {
        segment = find_segment(l, wanted[i].sample, segment);
        int64_t behind = l->first[segment + 1];
        end = i + 1;
        while (end < count && wanted[end].sample < behind)
            end++;
        int64_t kind = l->shape[segment] < 0 ? NO_SOURCE : f->shapes[l->shape[segment]].kind;
        if (kind == NO_SOURCE && (f->is_filled_first || f->num_layers > 1))
            continue;
        int is_good = kind == ROWS || kind == ROWS_IN_CHUNKS
                          ? plan_rows(plan, f, field, layer, segment, wanted + i, end - i)
                          : plan_chunks(plan, f, field, layer, segment, wanted + i, end - i);
        if (!is_good)
            return 0;
    }
    return 1;
}

/* Cut items of many pieces, where there are too few items for all threads. */
static int cut_items(BatchPlan *plan, int64_t parts)
{
    int64_t count = plan->num_items, wanted = 4 * parts;
    if (parts < 2 || count >= wanted)
        return 1;
    for (int64_t i = 0; i < count; i++) {
        Item whole = plan->items[i];
        int64_t cross = whole.cross_end;
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

static int by_source(const void *one, const void *other)
{
    const Item *a = one, *b = other;
    if (a->source != b->source)
        return a->source < b->source ? -1 : 1;
    if (a->field != b->field)
        return a->field < b->field ? -1 : 1;
    if (a->first_run != b->first_run)
        return a->first_run < b->first_run ? -1 : 1;
    return a->cross < b->cross ? -1 : a->cross > b->cross;
}

/* Plan a batch of at most `rows` samples; 0: there is no memory for it; -1: there are more samples,
   or one that no field has. `parts`: threads that may work on it. */
PUBLIC int64_t h5async_plan_batch(BatchPlan *plan, const Field *fields, const Target *targets,
                                  int64_t num_fields, const int64_t *samples, int64_t count,
                                  int64_t rows, int64_t num_samples, int64_t parts)
{
    plan->num_items = plan->num_runs = plan->num_rows = plan->nbytes = 0;
    if (count > rows)
        return -1;
    if (!grow_wanted(plan, count))
        return 0;
    for (int64_t i = 0; i < count; i++) {
        if (samples[i] < 0 || samples[i] >= num_samples)
            return -1;
        plan->wanted[i] = (Wanted){samples[i], i};
    }
    const Wanted *sorted = sort_wanted(plan->wanted, plan->spare, count);
    for (int32_t field = 0; field < num_fields; field++) {
        const Field *f = &fields[field];
        if (!targets[field].is_wanted || f->row_nbytes == 0)
            continue;
        for (int32_t layer = 0; layer < f->num_layers; layer++)
            if (!plan_layer(plan, f, field, layer, sorted, count))
                return 0;
        if (f->is_filled_first)
            fill_elements(f->fill, f->itemsize, targets[field].raw, count * f->row_nbytes);
    }
    if (!cut_items(plan, parts))
        return 0;
    int is_sorted = 1;
    for (int64_t i = 1; i < plan->num_items && is_sorted; i++)
        is_sorted = by_source(&plan->items[i - 1], &plan->items[i]) <= 0;
    if (!is_sorted)
        qsort(plan->items, (size_t)plan->num_items, sizeof(Item), by_source);
    for (int64_t i = 0; i < plan->num_items; i++)
        plan->nbytes += plan->items[i].nbytes;
    return 1;
}

PUBLIC int64_t h5async_free_plan(BatchPlan *plan)
{
    void *memory[] = {plan->items, plan->run_local, plan->run_position, plan->run_length,
                      plan->offset, plan->position, plan->wanted, plan->spare};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++)
        free(memory[i]);
    *plan = (BatchPlan){0};
    return 1;
}

/* A range of a plan's items, in one thread. */
typedef struct {
    BatchPlan *plan;
    const Field *fields;
    const Target *targets;
    Worker *w;
    File *file;
    Source *source;
    int64_t at, end; /* of the items of one source */
    int32_t cross;               /* at which piece of the item */
    int64_t available, mappable, last_ns; /* bytes to read out of the map: while cached; at all */
    Kept *claims[MAX_CLAIMS]; /* to be published if the file was not changed meanwhile */
    Store *stores[MAX_CLAIMS];
    int num_claims, may_wait;
} Work;

static Runs runs_of_item(const BatchPlan *plan, const Item *item)
{
    return (Runs){plan->run_local + item->first_run, plan->run_position + item->first_run,
                  plan->run_length + item->first_run, item->num_runs};
}

static int64_t out_nbytes(const Transform *t)
{
    return t->points * t->channels * (t->is_float ? 4 : source_nbytes(t));
}

static void transform_run(const Field *f, const Target *target, int64_t position, int64_t length)
{
    Transform t = *f->transform;
    t.samples = length;
    h5async_transform(&t, target->raw + position * f->row_nbytes,
                      target->out + position * out_nbytes(&t));
}

static void transform_item(const BatchPlan *plan, const Field *f, const Target *target,
                           const Item *item)
{
    if (f->transform == NULL)
        return;
    Runs runs = runs_of_item(plan, item);
    for (int64_t r = 0; r < runs.count; r++)
        transform_run(f, target, runs.position[r], runs.length[r]);
}

/* Rows that nothing holds. */
static void fill_rows(const BatchPlan *plan, const Field *f, const Target *target, const Item *item)
{
    Runs runs = runs_of_item(plan, item);
    for (int64_t r = 0; r < runs.count; r++)
        fill_elements(f->fill, f->itemsize, target->raw + runs.position[r] * f->row_nbytes,
                      runs.length[r] * f->row_nbytes);
    transform_item(plan, f, target, item);
}

/* Reverse the bytes of each number. */
static void swap_bytes(uint8_t *at, int64_t nbytes, int64_t number)
{
    if (number == 2)
        for (int64_t i = 0; i < nbytes; i += 2) {
            uint16_t value;
            memcpy(&value, at + i, sizeof value);
            value = __builtin_bswap16(value);
            memcpy(at + i, &value, sizeof value);
        }
    else if (number == 4)
        for (int64_t i = 0; i < nbytes; i += 4) {
            uint32_t value;
            memcpy(&value, at + i, sizeof value);
            value = __builtin_bswap32(value);
            memcpy(at + i, &value, sizeof value);
        }
    else if (number == 8)
        for (int64_t i = 0; i < nbytes; i += 8) {
            uint64_t value;
            memcpy(&value, at + i, sizeof value);
            value = __builtin_bswap64(value);
            memcpy(at + i, &value, sizeof value);
        }
}

/* Swap what a piece has put into one row. */
static void swap_piece(const Piece *piece, int64_t number, uint8_t *row)
{
    int64_t index[MAX_RANK] = {0}, a;
    do {
        int64_t to = piece->begin;
        for (a = 0; a < piece->rank; a++)
            to += index[a] * piece->dims[a].to_stride;
        swap_bytes(row + to, piece->unit, number);
        for (a = piece->rank - 1; a >= 0 && ++index[a] == piece->dims[a].extent; a--)
            index[a] = 0;
    } while (a >= 0);
}

static void swap_pieces(const Shape *shape, int32_t cross, const Runs *runs, uint8_t *batch)
{
    Piece piece;
    if (!shape->swaps || !piece_of(&shape->dataset, cross, &piece))
        return;
    for (int64_t r = 0; r < runs->count; r++)
        for (int64_t k = 0; k < runs->length[r]; k++)
            swap_piece(&piece, shape->swaps,
                       batch + (runs->position[r] + k) * shape->dataset.row_nbytes);
}

/* Rows out of the map, transformed on the way: there is no copy between. */
static int64_t transform_rows(const Work *work, const Field *f, const Target *target,
                              const Pieces *p)
{
    Transform t = *f->transform;
    int64_t unit = source_nbytes(&t), done = 0;
    t.samples = 1;
    for (; done < p->count && !is_stopped(work->file, work->w); done++) {
        int64_t offset = p->offset[done], position = p->position[done];
        if (offset > work->available - p->unit)
            break;
        const uint8_t *from = offset < 0 ? NULL : work->file->map + offset;
        if (offset < 0 || (uintptr_t)from % (uintptr_t)unit) {
            if (offset < 0)
                fill_piece(p, done);
            else
                memcpy(place_of_piece(p, done), from, (size_t)p->unit);
            from = place_of_piece(p, done);
        }
        h5async_transform(&t, from, target->out + position * out_nbytes(&t));
    }
    return done;
}

static int read_row_item(Work *work, const Field *f, const Target *target, const Item *item)
{
    const BatchPlan *plan = work->plan;
    const Shape *shape = &f->shapes[f->layers[item->layer].shape[item->segment]];
    Pieces p = {.offset = plan->offset + item->first_run, .position = plan->position + item->first_run,
                .count = item->num_runs, .unit = f->row_nbytes, .base = target->raw,
                .fill = shape->dataset.fill, .itemsize = f->itemsize};
    int64_t done;
    if (work->available > 0 && f->transform && !shape->swaps) {
        done = transform_rows(work, f, target, &p);
    } else {
        if (work->available > 0)
            done = copy_pieces(work->file, work->w, &p, work->available);
        else
            done = work->file->io == IO_MAP ? 0 : pread_pieces(work->file, work->w, &p);
        for (int64_t i = 0; shape->swaps && i < done; i++)
            swap_bytes(place_of_piece(&p, i), p.unit, shape->swaps);
        for (int64_t i = 0; f->transform && i < done; i++)
            transform_run(f, target, p.position[i], 1);
    }
    int64_t now = now_ns();
    work->w->read_ns += now - work->last_ns;
    work->w->read_nbytes += done * f->row_nbytes;
    work->last_ns = now;
    return done == p.count;
}

enum Outcome { FAILED = 0, READ = 1, IS_BUSY = 2 };

static enum Outcome read_piece(Work *work, const Field *f, const Target *target, const Item *item,
                               int32_t cross)
{
    const Layer *l = &f->layers[item->layer];
    const Shape *shape = &f->shapes[l->shape[item->segment]];
    Dataset d = shape->dataset;
    Runs runs = runs_of_item(work->plan, item);
    Call call = {.d = &d, .w = work->w, .file = work->file, .available = work->available,
                 .batch = target->raw, .last_ns = work->last_ns};
    int64_t number = 0, extent = -1;
    if (d.begin >= 0) { /* contiguous: only out of a map, cached or not, can pieces be had */
        if (item->number != 0)
            return FAILED;
        call.available = work->mappable;
        d.begin = l->begin[item->segment];
        number = d.begin < 0 ? -1 : 0;
        d.begin = d.begin < 0 ? 0 : d.begin;
        d.num_chunks = 1;
    } else {
        extent = find_extent(f, l, item->segment, item->number + shape->cross_number[cross]);
        if (extent == -2 || extent >= f->num_extents)
            return FAILED;
        number = extent < 0 ? -1 : 0;
        d.chunk_offset = f->offset + (extent < 0 ? 0 : extent);
        d.chunk_stored = f->nbytes + (extent < 0 ? 0 : extent);
        d.chunk_mask = f->mask + (extent < 0 ? 0 : extent);
        d.num_chunks = 1;
    }
    int is_whole = d.rows_are_whole && runs.count == 1 && runs.length[0] == d.chunk_samples;
    Kept *kept = NULL;
    enum Claim claim = UNKEPT;
    if (shape->keeps && extent >= 0 && !is_whole && !is_raw(&d, d.chunk_mask[0])) {
        if (work->num_claims == MAX_CLAIMS)
            return IS_BUSY;
        claim = claim_chunk(f->store, (uint64_t)extent, d.chunk_nbytes, work->num_claims == 0, &kept);
        if (claim == BUSY)
            return IS_BUSY;
        if (claim == CLAIMED) {
            work->stores[work->num_claims] = f->store;
            work->claims[work->num_claims++] = kept;
        }
    }
    enum State state = claim == CLAIMED ? TO_TARGET : claim == READY ? IN_TARGET : TO_SCRATCH;
    int is_good = read_chunk(&call, number, cross, &runs, (int)state, kept ? kept->data : NULL);
    if (is_good)
        swap_pieces(shape, cross, &runs, target->raw);
    work->last_ns = call.last_ns;
    if (claim == CLAIMED && !is_good)
        work->num_claims--; /* others may try; what was decoded before is good */
    if (claim == READY || (claim == CLAIMED && !is_good))
        release_chunk(f->store, kept, is_good);
    return is_good ? READ : FAILED;
}

/* Where a piece of an item lies; -1: nowhere, or it is not asked for. */
static int64_t offset_of_piece(const Work *work, const Item *item, int32_t cross, int64_t *nbytes)
{
    const Field *f = &work->fields[item->field];
    const Layer *l = &f->layers[item->layer];
    const Shape *shape = &f->shapes[l->shape[item->segment]];
    if (shape->dataset.begin >= 0)
        return -1; /* what is wanted of it lies anywhere in it */
    int64_t extent = find_extent(f, l, item->segment, item->number + shape->cross_number[cross]);
    if (extent < 0 || extent >= f->num_extents)
        return -1;
    *nbytes = f->nbytes[extent];
    return f->offset[extent];
}

/* Whether all seems to lie in the page cache; if not, ask for what is not read row by row. */
static int ask_for_items(Work *work)
{
    int64_t count = work->end - work->at, step = count / MAX_PROBES + 1, nbytes = 0;
    int cached = 1;
    if (work->file->fd < 0)
        return 1; /* pages of the map come as they are touched */
    for (int64_t i = work->at; i < work->end && cached; i += step) {
        const Item *item = &work->plan->items[i];
        int64_t offset = item->kind == ROWS ? work->plan->offset[item->first_run]
                                            : offset_of_piece(work, item, item->cross, &nbytes);
        if (offset >= 0 && offset != INT64_MAX)
            cached = is_cached(work->file, offset);
    }
    for (int64_t i = work->at; i < work->end && !cached; i++) {
        const Item *item = &work->plan->items[i];
        for (int32_t c = item->cross; item->kind != ROWS && c < item->cross_end; c++) {
            int64_t offset = offset_of_piece(work, item, c, &nbytes);
            if (is_stopped(work->file, work->w))
                return 0;
            if (offset >= 0)
                ask_for(work->file, offset, nbytes);
        }
    }
    return cached;
}

/* Whether it is time to ask if a source lies in the page cache: not each time where it did. */
static int needs_probe(Source *s)
{
    return !s->was_cached || ++s->uses % USES_PER_PROBE == 0;
}

/* Items of one source, until all are done, or a chunk has to be waited for. */
static void do_section(void *data)
{
    Work *work = data;
    BatchPlan *plan = work->plan;
    if (work->available < 0) {
        int cached = work->file->io == IO_MAP || !needs_probe(work->source) || ask_for_items(work);
        work->source->was_cached = cached;
        work->mappable = mappable_nbytes(work->file);
        work->available = cached ? work->mappable : 0;
    }
    while (work->at < work->end && !is_stopped(work->file, work->w)) {
        Item *item = &plan->items[work->at];
        const Field *f = &work->fields[item->field];
        const Target *target = &work->targets[item->field];
        enum Outcome outcome = READ;
        if (item->kind == ROWS) {
            outcome = read_row_item(work, f, target, item) ? READ : FAILED;
        } else {
            for (; work->cross < item->cross_end && outcome == READ; work->cross += outcome == READ)
                outcome = read_piece(work, f, target, item, work->cross);
            if (outcome == IS_BUSY)
                return;
            if (outcome == READ)
                transform_item(plan, f, target, item);
        }
        item->status = outcome == READ ? DONE : REFUSED;
        work->at++;
        if (work->at < work->end)
            work->cross = plan->items[work->at].cross;
    }
}

static void release_claims(Work *work, int are_filled)
{
    for (int i = 0; i < work->num_claims; i++)
        release_chunk(work->stores[i], work->claims[i], are_filled);
    work->num_claims = 0;
}

/* Items `begin` to `end`, all of one source. */
static void read_source(Work *work, Sources *sources, int64_t begin, int64_t end)
{
    BatchPlan *plan = work->plan;
    File file;
    Source *s = acquire_source(sources, plan->items[begin].source, &file);
    if (s == NULL) {
        for (int64_t i = begin; i < end; i++)
            plan->items[i].status = REFUSED;
        return;
    }
    work->file = &file, work->source = s;
    work->at = begin, work->end = end, work->cross = plan->items[begin].cross;
    work->available = -1;
    while (work->at < end && file.event == NO_EVENT) {
        int64_t first = work->at;
        /* A file that was changed before, too, shows it afterwards. */
        int is_good = guarded(&file, do_section, work);
        if (!is_good)
            file.event = FAULTED;
        else
            is_good = file.event == NO_EVENT && is_as_indexed(&file);
        if (is_good && file.nbytes < 0 && !has_swmr_writer(file.fd, INT64_MAX)) {
            file.event = CHANGED; /* the writer has ended, and left the file for good */
            is_good = 0;
        }
        release_claims(work, is_good);
        for (int64_t i = first; !is_good && i < end; i++)
            plan->items[i].status = REFUSED;
    }
    release_source(sources, s, file.event);
}

/* Read items `start` to `stop` of a plan. Returns how many were refused; -1: the reader is being
   closed. Safe from many threads, each with a worker and items of its own. */
PUBLIC int64_t h5async_read_batch(BatchPlan *plan, const Field *fields, const Target *targets,
                                  Sources *sources, Worker *w, int64_t start, int64_t stop)
{
    Work work = {.plan = plan, .fields = fields, .targets = targets, .w = w, .last_ns = now_ns()};
    int64_t refused = 0;
    if (start < 0 || stop > plan->num_items)
        return -1;
    install_guard();
    for (int64_t i = start, end; i < stop; i = end) {
        Item *item = &plan->items[i];
        if (w->stop != NULL && *w->stop)
            break;
        end = i + 1;
        if (item->source < 0) {
            item->status = item->kind == NO_SOURCE ? DONE : REFUSED;
            if (item->kind == NO_SOURCE)
                fill_rows(plan, &fields[item->field], &targets[item->field], item);
            continue;
        }
        while (end < stop && plan->items[end].source == item->source)
            end++;
        read_source(&work, sources, i, end);
    }
    for (int64_t i = start; i < stop; i++)
        refused += plan->items[i].status == REFUSED;
    w->returned_ns = now_ns();
    return w->stop != NULL && *w->stop ? -1 : refused;
}
