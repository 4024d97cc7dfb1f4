/* Reads a selection of a dataset, other than a batch of its samples: parts of equal size and with steps,
   at places that are given, in one call.

   A dataset that holds its values itself is one row then (`DatasetLayout.with_one_sample`), of which the
   parts are read; of others, the parts are of samples. */

typedef struct {
    BatchPlan plan; /* used again by each call */
    Field field;    /* the one below, with the part that is selected */
    Target target;
    Crop crop;
    const Field *of;
    Sources *sources;
    Worker *worker;
    int64_t num_samples;
    /* Of each call: */
    const int64_t *samples; /* [count]; NULL: one sample, the first */
    const int64_t *places;  /* [count][rank]; NULL: all parts are at the place in `numbers` */
    int64_t count;
    uint8_t *out;
    int64_t row_nbytes; /* from a part to the next one */
    int64_t may_keep;   /* whether decoded chunks may be kept for later calls */
    int64_t in_order;   /* whether strides are those of a part in C order, and not given */
    int64_t numbers[4 * MAX_RANK]; /* place, sizes, steps and strides: see Crop */
} Selected;

/* Plan the parts; see h5async_plan_batch. */
PUBLIC int64_t h5async_plan_selected(Selected *s)
{
    static const int64_t first = 0;
    s->field = *s->of;
    if (!s->may_keep)
        s->field.store = NULL;
    if (s->of->crop != NULL) {
        const int64_t rank = s->of->crop->rank;
        s->crop = *s->of->crop;
        s->crop.given = s->places ? s->places : s->numbers, s->crop.given_step = s->places ? rank : 0;
        s->crop.sizes = s->numbers + rank, s->crop.steps = s->numbers + 2 * rank;
        s->crop.strides = s->numbers + 3 * rank;
        s->field.crop = &s->crop, s->field.row_nbytes = s->row_nbytes;
        int64_t stride = s->field.itemsize;
        for (int64_t a = rank - 1; s->in_order && a >= 0; stride *= s->crop.sizes[a--])
            s->numbers[3 * rank + a] = stride;
    }
    s->target = (Target){.raw = s->out, .out = s->out, .is_wanted = 1, .capacity = s->count};
    return h5async_plan_batch(&s->plan, &s->field, &s->target, 1, s->samples ? s->samples : &first,
                              s->count, s->count, s->num_samples, 1, NULL);
}

/* Plan and read them. Returns how many items were refused; -1 where they cannot be planned. */
PUBLIC int64_t h5async_read_selected(Selected *s)
{
    if (h5async_plan_selected(s) < 1)
        return -1;
    return h5async_read_batch(&s->plan, &s->field, &s->target, s->sources, s->worker, 0,
                              s->plan.num_items);
}
