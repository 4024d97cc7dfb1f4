/* A thread's share of a plan, and helpers for all kinds of items: filling rows that nothing holds,
   swapping bytes, and transforming rows as they are read. */

enum { MAX_CLAIMS = 16, SURE_USES = 3, USES_PER_PROBE = 8, COLD_USES = 64 };

/* A piece of a store's entry that a thread has claimed, to decode it. */
typedef struct {
    Store *store;
    Kept *kept;
    int64_t piece;
} Claimed;

/* A range of a plan's items, done by one thread. */
typedef struct {
    BatchPlan *plan;
    const Field *fields;
    const Target *targets;
    Worker *w;
    File *file;
    Source *source;
    int64_t at, end, skipped;    /* of the items of one source; the first that was skipped */
    int32_t cross;               /* the current piece of the item */
    int64_t available, mappable, last_ns; /* bytes to read from the map: if cached; in any case */
    Claimed claims[MAX_CLAIMS]; /* to be published if the file was not changed meanwhile */
    Kept *rows; /* for the current item, while its pieces are assembled; or NULL */
    Store *rows_store;
    const Wanted *bounded; /* the last samples whose bounds were computed, their number and bounds */
    int64_t num_bounded, least, most;
    int num_claims, may_wait, is_cold; /* is_cold: not in the page cache, so it is asked for */
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

/* Fill rows that nothing holds, or that are to be zeros. */
static void fill_rows(const BatchPlan *plan, const Field *f, const Target *target, const Item *item)
{
    Runs runs = runs_of_item(plan, item);
    for (int64_t r = 0; r < runs.count; r++) {
        uint8_t *rows = target->raw + runs.position[r] * f->row_nbytes;
        if (item->kind == ZEROS)
            memset(rows, 0, (size_t)(runs.length[r] * f->row_nbytes));
        else
            fill_elements(f->fill, f->itemsize, rows, runs.length[r] * f->row_nbytes);
    }
    transform_item(plan, f, target, item);
}

#define SWAP_EACH(Number, swapped)                                                                \
    for (int64_t i = 0; i < nbytes; i += (int64_t)sizeof(Number)) {                               \
        Number value;                                                                             \
        memcpy(&value, at + i, sizeof value);                                                     \
        value = swapped(value);                                                                   \
        memcpy(at + i, &value, sizeof value);                                                     \
    }

static void swap_bytes(uint8_t *at, int64_t nbytes, int64_t number)
{
    if (number == 2)
        SWAP_EACH(uint16_t, __builtin_bswap16)
    else if (number == 4)
        SWAP_EACH(uint32_t, __builtin_bswap32)
    else if (number == 8)
        SWAP_EACH(uint64_t, __builtin_bswap64)
}

static void swap_piece(const Piece *piece, int64_t number, uint8_t *row)
{
    Place at = first_place(piece);
    do
        swap_bytes(row + at.to, piece->unit, number);
    while (go_on(piece, piece->rank, &at));
}

static void swap_pieces(const Dataset *d, int64_t number, int32_t cross, const Runs *runs,
                        uint8_t *batch)
{
    Piece whole, own;
    if (!number || !piece_of(d, cross, &whole))
        return;
    for (int64_t r = 0; r < runs->count; r++)
        for (int64_t k = 0; k < runs->length[r]; k++) {
            const Piece *piece = piece_at(d, &whole, runs->position[r] + k, &own);
            if (piece != NULL)
                swap_piece(piece, number, batch + (runs->position[r] + k) * d->row_nbytes);
        }
}

/* The dataset of an item, with the places of its crop, if the field has one. */
static Dataset dataset_of(const BatchPlan *plan, const Field *f, const Item *item)
{
    return with_places(plan, f, shape_of(f, item)->dataset);
}
