/* Sample numbers enter; the plan of a batch leaves: independent items, sorted by source. */

/* Fields of one layer each, whose segments begin at the same samples; or one layer of a field. */
typedef struct {
    const Field *fields;
    const Target *targets;
    int32_t begin, end, layer;
} Alike;

static int is_planned(const Field *fields, const Target *targets, int64_t field)
{
    return targets[field].is_wanted && fields[field].row_nbytes > 0;
}

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
    if (kind == CHUNKS && f->crop != NULL)
        return plan_crops(plan, f, field, layer, segment, ranks);
    return plan_chunks(plan, f, field, layer, segment, ranks);
}

/* Plans segment by segment, so that items of several fields come in the order of their sources, too. */
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
        run = &plan->sorted[ranks.last = last];
        ranks.end = behind - run->sample < run[1].rank - run->rank ? run->rank + behind - run->sample
                                                                   : run[1].rank;
        for (int32_t field = alike->begin; field < alike->end; field++)
            if (is_planned(alike->fields, alike->targets, field) &&
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

/* Sorts the items by source, stably. */
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
    for (int64_t i = 0; i < count; i++) { /* in place, cycle by cycle */
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

/* Whether samples have to be sorted to find where they lie. */
static int needs_order(const Field *fields, const Target *targets, int64_t num_fields)
{
    for (int64_t i = 0; i < num_fields; i++) {
        const Field *f = &fields[i];
        if (!is_planned(fields, targets, i))
            continue;
        if (f->num_layers != 1 || f->layers->num_segments != 1 || f->layers->shape[0] < 0)
            return 1;
        int64_t kind = f->shapes[f->layers->shape[0]].kind;
        if (kind != ROWS && kind != ROWS_IN_CHUNKS)
            return 1;
    }
    return 0;
}

static int plan_group(BatchPlan *plan, const Field *fields, const Target *targets,
                      int64_t num_fields, int32_t begin)
{
    const Field *first = &fields[begin];
    Alike alike = {.fields = fields, .targets = targets, .begin = begin};
    for (; alike.begin < num_fields; alike.begin = alike.end) {
        alike.end = end_of_alike(fields, alike.begin, num_fields);
        int is_wanted = 0;
        for (int32_t field = alike.begin; field < alike.end; field++)
            is_wanted |= is_same_group(&fields[field], first) && is_planned(fields, targets, field);
        for (alike.layer = 0; is_wanted && alike.layer < fields[alike.begin].num_layers; alike.layer++)
            if (!plan_alike(plan, &alike))
                return 0;
    }
    return 1;
}

/* Whether a field is wanted, and is the first wanted one of its group. */
static int begins_group(const Field *fields, const Target *targets, int32_t field)
{
    for (int32_t before = field - 1; before >= 0; before--)
        if (is_same_group(&fields[before], &fields[field]) && targets[before].is_wanted)
            return 0;
    return targets[field].is_wanted != 0;
}

/* Plans the rows of a field that are filled with zeros (PAD_ZERO). */
static int plan_zeros(BatchPlan *plan, const Field *f, int32_t field, const int64_t *samples,
                      int64_t count)
{
    const StepRows *steps = f->steps;
    int64_t position = 0;
    Item *item = NULL;
    for (int64_t i = 0; i < count; i++, position += steps->num_offsets) {
        int64_t sequence = last_at(steps->starts, steps->num_sequences, samples[i]);
        StepRun run = {0};
        for (; run.end < steps->num_offsets;) {
            run = run_of_steps(steps, sequence, samples[i], run.end, 1);
            int64_t at = position + run.step, behind = at + run.before + run.inside;
            if (!run.before && !run.behind)
                continue;
            if (item == NULL || item->nbytes >= ITEM_NBYTES) {
                if (!grow_items(plan, plan->num_items + 1))
                    return 0;
                item = &plan->items[plan->num_items++];
                *item = (Item){.field = field, .kind = ZEROS, .source = -1,
                               .first_run = plan->num_runs};
            }
            if ((run.before && !add_run(plan, item, 0, at, run.before)) ||
                (run.behind && !add_run(plan, item, 0, behind, run.behind)))
                return 0;
            item->nbytes += cost_of(f->row_nbytes, run.before + run.behind);
        }
    }
    return 1;
}

/* Plans a batch of at most `rows` samples. Returns 1; 0: there is no memory; -1: more samples, a
   number out of range, or a full target. `parts`: threads that may work on it; `draw`: see draw_places. */
PUBLIC int64_t h5async_plan_batch(BatchPlan *plan, const Field *fields, const Target *targets,
                                  int64_t num_fields, const int64_t *samples, int64_t count,
                                  int64_t rows, int64_t num_samples, int64_t parts,
                                  const uint64_t *draw)
{
    plan->num_items = plan->num_runs = plan->num_wanted = plan->nbytes = 0;
    if (count > rows)
        return -1;
    if (!draw_places(plan, fields, targets, num_fields, samples, count, draw))
        return 0;
    int is_sorted = !atomic_exchange(&plan->was_cached, 1) || needs_order(fields, targets, num_fields);
    for (int32_t field = 0; field < num_fields; field++) {
        const Field *f = &fields[field];
        if (begins_group(fields, targets, field)) {
            int listed =
                f->spans ? list_spans(plan, samples, count, f, &targets[field])
                         : list_samples(plan, samples, count,
                                        f->steps || f->heaps ? f->num_rows : num_samples,
                                        is_sorted, f->steps);
            if (listed == 1 && f->heaps != NULL)
                listed = list_places(plan, samples, count, f, &targets[field]);
            if (listed < 1)
                return listed;
            if (!plan_group(plan, fields, targets, num_fields, field))
                return 0;
        }
        if (!is_planned(fields, targets, field))
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
                      plan->wanted, plan->spare, plan->sorted, plan->order,
                      plan->order_spare, plan->places, plan->crops};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++)
        free(memory[i]);
    *plan = (BatchPlan){0};
    return 1;
}
