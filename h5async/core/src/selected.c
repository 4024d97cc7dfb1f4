/* Reads a selection of a dataset that is not a batch of whole samples: parts of equal size and steps, at
   given places, in one call.

   A dataset that holds its values itself is treated as one row (`DatasetLayout.with_one_sample`), and the
   parts are parts of that row; for other datasets, they are parts of samples. */

typedef struct {
    BatchPlan plan; /* reused by each call */
    Field field;    /* a copy of `of`, with the crop of the selection */
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
    int64_t row_nbytes; /* from one part to the next */
    int64_t may_keep;   /* whether decoded chunks may be kept for later calls */
    int64_t in_order;   /* whether parts are in C order, so that strides are not given */
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

/* Plan and read the parts. Returns the number of refused items, or -1 if they cannot be planned. */
PUBLIC int64_t h5async_read_selected(Selected *s)
{
    if (h5async_plan_selected(s) < 1)
        return -1;
    return h5async_read_batch(&s->plan, &s->field, &s->target, s->sources, s->worker, 0,
                              s->plan.num_items);
}
