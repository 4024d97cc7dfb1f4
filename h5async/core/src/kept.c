/* Copies rows from chunks kept decoded in the store, without opening their file, or checking it again if
   that was done a moment ago. Looks up many chunks at a time, so that threads seldom wait for each other
   and memory accesses far apart overlap. */

enum { MAX_KEPT = 64, NUM_BLOCKS = 8, FETCHED_AHEAD = 4, MOST_FETCHED = 512,
       SOURCES_AHEAD = 16 };

/* A batch of lookups in one store: the pieces of some items. */
typedef struct {
    Store *store;
    Item *items[MAX_KEPT];
    int32_t first[MAX_KEPT + 1]; /* by item: its first piece */
    uint64_t keys[MAX_KEPT];     /* by piece */
    Kept *found[MAX_KEPT];
    int num_items, num_pieces;
} KeptBlock;

static void fetch_piece(const Shape *shape, const Runs *runs, const Kept *kept)
{
    const Dataset *d = &shape->dataset;
    int64_t stride = shape->keeps == KEEPS_ROWS ? d->row_nbytes : d->sample_stride;
    if (runs->count == 0)
        return;
    const uint8_t *from = kept->data + runs->local[0] * stride;
    int64_t nbytes = stride * runs->length[0];
    if (nbytes > MOST_FETCHED)
        fetch_early(from, nbytes);
    else
        fetch(from, nbytes);
}

static int32_t num_kept(const Shape *shape, const Item *item)
{
    return shape->keeps == KEEPS_ROWS ? 1 : item->cross_end - item->cross;
}

/* Copy the rows of an item; returns 0 if its pieces, or its indices, are out of bounds. */
static int place_kept(const Work *work, const Item *item, Kept *const *found)
{
    const Field *f = &work->fields[item->field];
    const Target *target = &work->targets[item->field];
    const Shape *shape = shape_of(f, item);
    Runs runs = runs_of_item(work->plan, item);
    Dataset own;
    const Dataset *d = &shape->dataset;
    if (d->crop)
        own = dataset_of(work->plan, f, item), d = &own;
    int are_rows = shape->keeps == KEEPS_ROWS || (d->rows_are_whole && !shape->swaps);
    int64_t stride = are_rows ? d->row_nbytes : d->sample_stride;
    Piece piece;
    for (int32_t i = 0; i < num_kept(shape, item); i++) {
        if (!runs_lie_within(&runs, found[i]->nbytes / stride))
            return 0;
        if (are_rows) {
            place_rows(d->row_nbytes, &runs, found[i]->data, target->raw);
            continue;
        }
        if (!piece_of(d, item->cross + i, &piece))
            return 0;
        place(d, &piece, &runs, found[i]->data, target->raw);
        swap_pieces(d, shape->swaps, item->cross + i, &runs, target->raw);
    }
    transform_item(work->plan, f, target, item);
    return item_is_within(work->plan, f, target, item);
}

static int is_found(const KeptBlock *block, int number)
{
    for (int32_t i = block->first[number]; i < block->first[number + 1]; i++)
        if (block->found[i] == NULL)
            return 0;
    return 1;
}

static void place_block(const Work *work, KeptBlock *block)
{
    if (block->num_items == 0)
        return;
    take_ready(block->store, block->keys, block->num_pieces, block->found);
    block->first[block->num_items] = block->num_pieces;
    for (int i = 0, ahead = 0; i < block->num_items; i++) {
        for (; ahead < block->num_items && ahead <= i + FETCHED_AHEAD; ahead++) {
            const Item *item = block->items[ahead];
            const Field *f = &work->fields[item->field];
            Runs runs = runs_of_item(work->plan, item);
            if (block->found[block->first[ahead]] != NULL)
                fetch_piece(shape_of(f, item), &runs,
                            block->found[block->first[ahead]]);
        }
        if (is_found(block, i) && place_kept(work, block->items[i], block->found + block->first[i]))
            block->items[i]->status = DONE;
    }
    give_back_ready(block->store, block->found, block->num_pieces);
    block->num_items = block->num_pieces = 0;
}

/* Add the pieces of an item if all of them may be kept; returns whether it was added. Items of different
   fields alternate, so each field has a block of its own, or shares one with a few others. */
static int add_kept(const Work *work, KeptBlock *blocks, Item *item)
{
    KeptBlock *block = &blocks[item->field % NUM_BLOCKS];
    const Field *f = &work->fields[item->field];
    const Layer *l = &f->layers[item->layer];
    const Shape *shape = shape_of(f, item);
    int32_t count = num_kept(shape, item);
    if (!shape->keeps || f->store == NULL || count > MAX_KEPT)
        return 0;
    if (block->num_items == MAX_KEPT || block->num_pieces + count > MAX_KEPT ||
        block->store != f->store)
        place_block(work, block);
    block->store = f->store;
    for (int32_t c = 0; c < count; c++) {
        int64_t key = shape->keeps == KEEPS_ROWS
                          ? key_of_rows(f, l, item->segment, item->number)
                          : find_extent(f, l, item->segment,
                                        item->number + shape->cross_number[item->cross + c]);
        if (key < 0 || (shape->keeps != KEEPS_ROWS && key >= f->num_extents))
            return 0;
        block->keys[block->num_pieces + c] = (uint64_t)key;
    }
    block->first[block->num_items] = block->num_pieces;
    block->items[block->num_items++] = item;
    block->num_pieces += count;
    return 1;
}

/* Do those of items `start` to `stop` whose pieces are all in the store and whose files were found
   unchanged a moment ago. */
static void read_kept(Work *work, const Sources *sources, int64_t start, int64_t stop)
{
    KeptBlock blocks[NUM_BLOCKS];
    int32_t field = SEVERAL - 1; /* none */
    for (int i = 0; i < NUM_BLOCKS; i++)
        blocks[i].store = NULL, blocks[i].num_items = blocks[i].num_pieces = 0;
    for (int64_t i = start, ahead = start; i < stop; i++) {
        Item *item = &work->plan->items[i];
        for (; ahead < stop && ahead <= i + SOURCES_AHEAD; ahead++)
            __builtin_prefetch(&sources->sources[work->plan->items[ahead].source].checked_ns);
        if (item->kind != CHUNKS || item->source < 0 || item->source >= sources->count)
            continue;
        int64_t checked_ns = sources->sources[item->source].checked_ns;
        if (checked_ns && work->last_ns - checked_ns < sources->trusted_ns &&
            add_kept(work, blocks, item))
            field = field == SEVERAL - 1 || field == item->field ? item->field : SEVERAL;
    }
    if (field == SEVERAL - 1)
        return; /* no file was checked recently */
    for (int i = 0; i < NUM_BLOCKS; i++)
        place_block(work, &blocks[i]);
    set_traced(work->w, field, SEVERAL);
    end_stage(work->w, PLACING, &work->last_ns);
}
