/* Crops: parts of rows that begin at a different place for each sample. Draws the places, and plans the
   pieces that lie in the parts, so that only the chunks they touch are read.

   A place has one number per dimension of a row: the index of the part's first element, or its bitwise
   complement (`~`) if the part is reversed. It depends only on the seed, the epoch and the sample;
   plan/crops.py documents the scheme and computes the same places. */

static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* Random number `which` of a sample, in [0, 1). */
static double random_number(uint64_t of_sample, int64_t which)
{
    uint64_t step = 0x9E3779B97F4A7C15u * ((uint64_t)which + 1);
    return (double)(mixed(of_sample + step) >> 11) * 0x1p-53;
}

static void draw_place(const Crop *crop, uint64_t of_sample, int64_t *place)
{
    for (int64_t a = 0; a < crop->rank; a++) {
        int64_t room = crop->extents[a] - crop->sizes[a], at = room / 2;
        if (crop->drawn[a] >= 0) {
            at = (int64_t)(random_number(of_sample, crop->drawn[a]) * (double)(room + 1));
            at = at < room ? at : room; /* the product may be rounded up */
        }
        int is_flipped = crop->flipped[a] >= 0 && random_number(of_sample, crop->flipped[a]) < 0.5;
        place[a] = is_flipped ? ~at : at;
    }
}

/* Draw the places of all cropped fields of a batch from the two numbers `draw` of the epoch, or copy
   those given. Returns 0 if memory allocation fails, or places are neither given nor to be drawn. */
static int draw_places(BatchPlan *plan, const Field *fields, const Target *targets,
                       int64_t num_fields, const int64_t *samples, int64_t count,
                       const uint64_t *draw)
{
    plan->num_samples = count;
    for (int64_t i = 0; i < num_fields; i++) {
        const Crop *crop = fields[i].crop;
        if (crop == NULL || !targets[i].is_wanted)
            continue;
        if ((draw == NULL && crop->given == NULL) || !grow((void **[]){(void **)&plan->crops}, 1, &plan->most_crops,
                                  (crop->first + crop->rank) * count, sizeof(int64_t)))
            return 0;
        for (int64_t k = 0; crop->given != NULL && k < count * crop->rank; k++)
            plan->crops[crop->first * count + k] =
                crop->given[k / crop->rank * crop->given_step + k % crop->rank];
        if (crop->given != NULL)
            continue;
        uint64_t first = draw[0] + crop->group[0], second = draw[1] ^ crop->group[1];
        int64_t *places = plan->crops + crop->first * count;
        for (int64_t k = 0; k < count; k++)
            draw_place(crop, mixed(mixed((uint64_t)samples[k] + first) ^ second),
                       places + k * crop->rank);
    }
    return 1;
}

/* The cells of a dimension that a part touches: from `first` up to, not including, `end`. */
typedef struct {
    int64_t first, end;
} CellRange;

static CellRange cells_within(const Dataset *d, int64_t a, const int64_t *begin, int64_t place)
{
    const int64_t axis = d->axis[a], count = d->num_cells[a];
    if (axis < 0)
        return (CellRange){0, count};
    const int64_t step = d->crop->steps ? d->crop->steps[axis] : 1;
    const int64_t origin = place < 0 ? ~place : place;
    const int64_t last = origin + (d->crop->sizes[axis] - 1) * step;
    if (last < begin[0])
        return (CellRange){0, 0};
    return (CellRange){last_at(begin, count, origin), last_at(begin, count, last) + 1};
}

/* Append to `wanted` the pieces that the part of the row at `position` touches: the number of each, and
   the index `row`. */
static int list_pieces(BatchPlan *plan, const Dataset *d, int64_t position, int64_t row, int64_t *count)
{
    const int64_t *place = d->places + position / d->crop->rows_of_sample * d->crop->rank;
    Piece own;
    CellRange ranges[MAX_RANK];
    int64_t cell[MAX_RANK], first = 0, total = 1;
    for (int64_t a = 0; a < d->rank; first += d->num_cells[a++]) {
        ranges[a] = cells_within(d, a, d->cell_begin + first, d->axis[a] < 0 ? 0 : place[d->axis[a]]);
        total *= ranges[a].end - ranges[a].first;
        cell[a] = ranges[a].first;
    }
    if (*count + total >= INT32_MAX || !grow_wanted(plan, *count + total + 1))
        return 0;
    for (int64_t i = 0; i < total; i++) {
        int64_t cross = 0;
        for (int64_t a = 0; a < d->rank; a++)
            cross = cross * d->num_cells[a] + cell[a];
        if (d->crop->steps == NULL || piece_at(d, &(Piece){.cross = cross}, position, &own) != NULL)
            plan->wanted[(*count)++] = (Wanted){cross, (int32_t)row, 0};
        for (int64_t a = d->rank - 1; a >= 0 && ++cell[a] == ranges[a].end; a--)
            cell[a] = ranges[a].first;
    }
    return 1;
}

/* Rows stored in the same chunks: where they lie in the chunks, and in the batch. */
typedef struct {
    int64_t local[BLOCK_SEQUENCES], position[BLOCK_SEQUENCES], count, group;
} RowGroup;

/* Take the next rows that share chunks, and advance `ranks` past them. */
static void next_group(const BatchPlan *plan, const Layer *l, int64_t segment, int64_t per_chunk,
                       Ranks *ranks, RowGroup *rows)
{
    for (rows->count = 0; ranks->rank < ranks->end && rows->count < BLOCK_SEQUENCES;) {
        const Wanted *run = &plan->sorted[ranks->run];
        int64_t inside = ranks->rank - run->rank;
        int64_t row = l->row[segment] + (run->sample + inside - l->first[segment]) * l->step[segment];
        int64_t group = row / per_chunk;
        if (rows->count && group != rows->group)
            return;
        rows->group = group;
        rows->local[rows->count] = row - group * per_chunk;
        rows->position[rows->count++] = run->position + inside;
        ranks->run += ++ranks->rank == run[1].rank;
    }
}

/* Complete a dataset with the field's crop and the places of this batch, if the field has a crop. */
static Dataset with_places(const BatchPlan *plan, const Field *f, Dataset d)
{
    if (d.crop == NULL)
        return d;
    d.crop = f->crop, d.row_nbytes = f->row_nbytes;
    d.places = plan->crops + f->crop->first * plan->num_samples;
    return d;
}

/* Plan parts of rows: each item is one piece, and the rows that need it. */
static int plan_crops(BatchPlan *plan, const Field *f, int32_t field, int32_t layer, int64_t segment,
                      Ranks ranks)
{
    const Layer *l = &f->layers[layer];
    const Shape *shape = &f->shapes[l->shape[segment]];
    const Dataset own = with_places(plan, f, shape->dataset), *d = &own;
    RowGroup rows;
    while (ranks.rank < ranks.end) {
        int64_t count = 0;
        next_group(plan, l, segment, d->chunk_samples, &ranks, &rows);
        for (int64_t i = 0; i < rows.count; i++)
            if (!list_pieces(plan, d, rows.position[i], i, &count))
                return 0;
        Wanted *pieces = sort_wanted(plan->wanted, plan->spare, count, 0, d->num_cross);
        Item *item = NULL;
        for (int64_t i = 0; i < count; i++) {
            if (item == NULL || pieces[i].sample != item->cross ||
                (d->begin >= 0 && item->nbytes >= ITEM_NBYTES)) {
                item = new_item(plan, f, field, layer, segment);
                if (item == NULL)
                    return 0;
                item->kind = CHUNKS, item->number = rows.group * shape->number_stride;
                item->cross = (int32_t)pieces[i].sample, item->cross_end = item->cross + 1;
                item->nbytes = d->begin < 0 ? cost_of(d->chunk_nbytes, 1) : 0;
            }
            int64_t row = pieces[i].position;
            if (!add_run(plan, item, rows.local[row], rows.position[row], 1))
                return 0;
            item->nbytes += d->begin < 0 ? 0 : f->row_nbytes;
        }
    }
    return 1;
}
