/* Cuts the samples of one segment into items, and items into smaller ones. */

/* A range of the sorted samples, by rank, all in one segment; `run` is the run of the first sample, and
   `last` that of the last one. */
typedef struct {
    int64_t run, rank, end, last;
} Ranks;

static int64_t cost_of(int64_t nbytes, int64_t times)
{
    int64_t cost;
    if (__builtin_mul_overflow(nbytes, times, &cost) || cost > MOST_COST)
        return MOST_COST;
    return cost;
}

/* The shape of an item that has a source. */
static const Shape *shape_of(const Field *f, const Item *item)
{
    return &f->shapes[f->layers[item->layer].shape[item->segment]];
}

static int keeps_rows(const Field *f, const Item *item)
{
    return shape_of(f, item)->keeps == KEEPS_ROWS;
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

static int plan_rows(BatchPlan *plan, const Field *f, int32_t field, int32_t layer, int64_t segment,
                     Ranks ranks)
{
    int64_t rows = ranks.end - ranks.rank, runs = ranks.last + 1 - ranks.run;
    int64_t per_item = ITEM_NBYTES * rows / (cost_of(f->row_nbytes, rows) + RUN_NBYTES * runs) + 1;
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

/* Plan samples that are stored in chunks, or that the core has no values to read for. */
static int plan_chunks(BatchPlan *plan, const Field *f, int32_t field, int32_t layer,
                       int64_t segment, Ranks ranks)
{
    const Layer *l = &f->layers[layer];
    const Shape *shape = l->shape[segment] < 0 ? NULL : &f->shapes[l->shape[segment]];
    int64_t kind = shape ? shape->kind : NO_SOURCE;
    int64_t per_chunk = kind == CHUNKS ? shape->dataset.chunk_samples : INT64_MAX;
    int64_t begin = 0, end = 0, rows = 0; /* of a chunk; in an item */
    int is_one_chunk = kind != CHUNKS || shape->dataset.begin >= 0;
    /* If samples are not along the first dimension, neighbouring ones lie in the same lines. */
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

/* Cut an item into `takers`, which each take some of its runs, and `helpers`, which each take some of its
   pieces. If rows are kept, helpers have no runs: they let other threads help to decode the pieces. */
static int cut_item(BatchPlan *plan, int64_t number, int64_t takers, int64_t helpers)
{
    const Item whole = plan->items[number];
    int64_t runs = whole.num_runs, cross = whole.cross_end;
    if (!grow_items(plan, plan->num_items + takers + helpers))
        return 0;
    for (int64_t k = 0; k < takers + helpers; k++) {
        Item *item = k ? &plan->items[plan->num_items++] : &plan->items[number];
        int64_t piece = k - takers;
        *item = whole;
        item->nbytes = whole.nbytes / (takers + helpers);
        if (k < takers) {
            item->first_run = whole.first_run + runs * k / takers;
            item->num_runs = runs * (k + 1) / takers - runs * k / takers;
            continue;
        }
        item->num_runs = takers ? 0 : runs;
        item->cross = (int32_t)(cross * piece / helpers);
        item->cross_end = (int32_t)(cross * (piece + 1) / helpers);
    }
    return 1;
}

/* Whether `groups` groups of rows fit in the store at a time: otherwise, those of a batch evict each other. */
static int has_room(const Field *f, const Item *item, int64_t groups)
{
    const Dataset *d = &shape_of(f, item)->dataset;
    return f->store->budget_nbytes / cost_of_kept(d->chunk_samples * d->row_nbytes, d->num_cross) >= groups;
}

/* Cut items of many pieces if there are too few items for all threads. If rows are kept, rarely more than
   one item of a batch has rows to assemble, so each gets helpers, unless the assembled rows would be
   evicted before others come for them. */
static int cut_items(BatchPlan *plan, const Field *fields, int64_t threads)
{
    int64_t count = plan->num_items, wanted = 4 * threads;
    for (int64_t i = 0; threads > 1 && i < count; i++) {
        const Item *item = &plan->items[i];
        int64_t parts = wanted, takers = 0;
        if (item->kind != CHUNKS || fields[item->field].crop != NULL)
            continue;
        if (keeps_rows(&fields[item->field], item) &&
            (count < wanted || has_room(&fields[item->field], item, count))) {
            parts = (wanted + count - 1) / count;
            takers = parts < item->num_runs ? parts : item->num_runs;
        } else if (count >= wanted) {
            continue;
        }
        int64_t helpers = item->cross_end < 2 ? 0 : parts < item->cross_end ? parts : item->cross_end;
        if (takers + helpers > 0 && !cut_item(plan, i, takers, helpers))
            return 0;
    }
    return 1;
}
