/* Reads the pieces of rows that chunks hold: either straight into the batch, or all rows of a group of
   chunks, which are assembled once, kept, and copied to everyone who wants them.

   Several threads may assemble the same rows. A thread that needs the rows decodes the unclaimed pieces
   and waits for the rest; a helper only decodes. */

/* IS_FULL: there is no room until this thread has published its claims. */
enum Outcome { FAILED = 0, READ = 1, IS_BUSY = 2, IS_FULL = 3 };

/* Find the chunk of a piece of an item's samples, and its extent (-1: none). Returns 0 if there is no such
   chunk, or it does not have all the wanted samples. */
static int locate_piece(const Work *work, const Field *f, const Item *item, const Runs *runs,
                        int32_t cross, uint8_t *rows, Call *call, int64_t *extent)
{
    const Layer *l = &f->layers[item->layer];
    const Shape *shape = shape_of(f, item);
    Dataset *d = &call->d;
    *extent = -1;
    *call = (Call){.d = dataset_of(work->plan, f, item), .w = work->w, .file = work->file, .batch = rows,
                   .available = work->available, .last_ns = work->last_ns};
    if (d->begin >= 0) { /* contiguous: pieces may be read from the map, cached or not */
        call->available = work->mappable;
        call->offset = l->begin[item->segment], call->stored = d->chunk_nbytes;
        call->is_stored = call->offset >= 0;
        return item->number == 0;
    }
    *extent = find_extent(f, l, item->segment, item->number + shape->cross_number[cross]);
    if (*extent == -2 || *extent >= f->num_extents)
        return 0;
    if (*extent < 0)
        return 1;
    call->is_stored = 1;
    call->offset = f->offset[*extent];
    call->stored = f->nbytes[*extent * f->nbytes_step];
    call->mask = f->mask[*extent * f->mask_step];
    if (is_small(shape)) {
        d->chunk_nbytes = call->stored, d->chunk_samples = d->chunk_nbytes / d->sample_stride;
        return d->chunk_samples <= shape->dataset.chunk_samples &&
               runs_lie_within(runs, d->chunk_samples);
    }
    return 1;
}

static void note_claim(Work *work, Store *store, Kept *kept, int64_t piece)
{
    work->claims[work->num_claims++] = (Claimed){store, kept, piece};
}

/* Read a piece found by locate_piece; see read_chunk. */
static int read_located(Work *work, const Shape *shape, Call *call, int64_t extent, int32_t cross,
                        const Runs *runs, enum State state, uint8_t *target)
{
    int is_good = !is_stopped(work->file, work->w) && read_chunk(call, cross, runs, state, target);
    work->last_ns = call->last_ns;
    if (is_good) {
        swap_pieces(&call->d, shape->swaps, cross, runs, call->batch);
        return 1;
    }
    fail(work->w, UNREADABLE, -1, 0, 0);
    work->w->failure.extent = extent, work->w->failure.cross = cross;
    return 0;
}

/* Whether to keep, for later epochs, chunks that a single batch of each epoch takes whole: from the second
   epoch on, if there is room for all of them. It costs one extra copy of each chunk. */
static int are_read_again(const Field *f, const Dataset *d)
{
    int64_t room = f->store->budget_nbytes / cost_of_kept(d->chunk_nbytes, 1);
    return room >= f->num_extents &&
           atomic_fetch_add_explicit(&f->store->whole_reads, 1, memory_order_relaxed) >= f->num_extents;
}

/* Whether a chunk is looked up in the store, or put there. */
static int is_looked_up(const Field *f, const Shape *shape, const Call *call, const Runs *runs,
                        int64_t extent)
{
    const Dataset *d = &call->d;
    int is_whole = runs->count == 1 && runs->length[0] == d->chunk_samples &&
                   f->steps == NULL; /* with steps, other samples need it, too */
    is_whole &= d->rows_are_whole || (f->store != NULL && f->store->budget_nbytes == 0);
    return f->store != NULL && shape->keeps == KEEPS_CHUNKS && extent >= 0 &&
           (is_small(shape) ||
            (!is_raw(d, call->mask) && (!is_whole || are_read_again(f, d))));
}

/* Decode the chunks of `count` pieces from `first` on, and copy the wanted samples to rows; all at once if
   the pieces are interleaved (see weave.c). */
static int put_pieces(Work *work, const Field *f, const Item *item, int32_t first, int32_t count, Runs runs,
                      uint8_t *rows)
{
    const Shape *shape = shape_of(f, item);
    const Dataset *d = &shape->dataset;
    const Runs none = {.count = 0};
    Woven woven;
    Call calls[MOST_WOVEN];
    int64_t extents[MOST_WOVEN];
    int is_woven = count > 1 && find_woven(d, first, &woven) == count &&
                   d->chunk_nbytes <= work->w->chunk_nbytes / count;
    for (int32_t k = 0; k < count; k++) {
        if (!locate_piece(work, f, item, &runs, first + k, rows, &calls[k], &extents[k]))
            return 0;
        is_woven &= calls[k].is_stored != 0;
    }
    for (int32_t k = 0; k < count; k++) {
        calls[k].last_ns = work->last_ns;
        if (!read_located(work, shape, &calls[k], extents[k], first + k, is_woven ? &none : &runs,
                          is_woven ? TO_TARGET : TO_SCRATCH, work->w->chunk + k * d->chunk_nbytes))
            return 0;
    }
    if (is_woven)
        place_woven(&woven, d, &runs, work->w->chunk, rows);
    for (int32_t k = 0; is_woven && k < count; k++)
        swap_pieces(d, shape->swaps, first + k, &runs, rows);
    end_stage(work->w, PLACING, &work->last_ns);
    return 1;
}

/* Read the piece at `cross`, or several interleaved ones, and advance `cross` past them. */
static enum Outcome read_next(Work *work, const Field *f, const Target *target, const Item *item,
                              int32_t *cross)
{
    const Shape *shape = shape_of(f, item);
    Runs runs = runs_of_item(work->plan, item);
    Call call;
    int64_t extent;
    if (!locate_piece(work, f, item, &runs, *cross, target->raw, &call, &extent))
        return FAILED;
    Kept *kept = NULL;
    enum Claim claim = UNKEPT;
    if (is_looked_up(f, shape, &call, &runs, extent)) {
        if (work->num_claims == MAX_CLAIMS)
            return IS_BUSY;
        claim = claim_chunk(f->store, (uint64_t)extent, call.d.chunk_nbytes,
                            work->may_wait && work->num_claims == 0, &kept);
        if (claim == BUSY)
            return IS_BUSY;
        if (claim == CLAIMED)
            note_claim(work, f->store, kept, 0);
    } else if (extent >= 0 && item->cross_end - *cross > 1 && !is_raw(&call.d, call.mask)) {
        const int32_t count = (int32_t)num_woven(&shape->dataset);
        if (count > 1 && *cross % count == 0 && count <= item->cross_end - *cross && !call.d.crop) {
            *cross += count;
            return put_pieces(work, f, item, *cross - count, count, runs, target->raw) ? READ : FAILED;
        }
    }
    enum State state = claim == CLAIMED ? TO_TARGET : claim == READY ? IN_TARGET : TO_SCRATCH;
    int is_good = read_located(work, shape, &call, extent, *cross, &runs, state,
                               kept ? kept->data : NULL);
    if (claim == READY)
        let_go(f->store, kept);
    if (claim == CLAIMED && !is_good) { /* others may try; earlier claims remain good */
        work->num_claims--;
        release_piece(f->store, kept, 0, 0);
    }
    *cross += is_good;
    return is_good ? READ : FAILED;
}

static void let_go_of_rows(Work *work)
{
    if (work->rows != NULL)
        let_go(work->rows_store, work->rows);
    work->rows = NULL;
}

/* Decode all pieces of an item into `work->rows`; for a helper (an item without runs), only those it names
   that no other thread decodes. IS_BUSY: publish the claims first, or wait for other threads. */
static enum Outcome gather_rows(Work *work, const Field *f, const Item *item)
{
    const int64_t count = shape_of(f, item)->dataset.num_cross / work->rows->num_pieces;
    const int64_t first = 0, all = shape_of(f, item)->dataset.chunk_samples;
    const Runs whole = {&first, &first, &all, 1};
    int64_t own = 0, at;
    for (int i = 0; i < work->num_claims; i++)
        own += work->claims[i].kept == work->rows;
    for (;; own++) {
        at = work->cross / count;
        if (work->num_claims == MAX_CLAIMS)
            return IS_BUSY;
        enum Claim claim =
            claim_piece(f->store, work->rows, own,
                        item->num_runs && work->may_wait && work->num_claims == 0,
                        item->cross / count, (item->cross_end + count - 1) / count, &at);
        if (claim == READY || (claim == BUSY && item->num_runs == 0))
            return READ;
        if (claim == BUSY)
            return IS_BUSY;
        work->cross = (int32_t)(at * count);
        note_claim(work, f->store, work->rows, at);
        if (!put_pieces(work, f, item, work->cross, (int32_t)count, whole, work->rows->data)) {
            work->num_claims--;
            release_piece(f->store, work->rows, at, 0);
            return FAILED;
        }
    }
}

/* Copy rows from the store once they are assembled in `work->rows`. */
static enum Outcome read_kept_rows(Work *work, const Field *f, const Target *target,
                                   const Item *item)
{
    const Layer *l = &f->layers[item->layer];
    const Shape *shape = shape_of(f, item);
    const Dataset *d = &shape->dataset;
    enum Outcome outcome = READ;
    if (work->rows == NULL) {
        int64_t key = key_of_rows(f, l, item->segment, item->number);
        if (key >= 0)
            work->rows = use_rows(f->store, (uint64_t)key, d->chunk_samples * d->row_nbytes,
                                  d->num_cross / num_woven(d));
        work->rows_store = f->store;
        if (work->rows == NULL && key >= 0 && work->num_claims)
            return IS_FULL; /* otherwise, the last group of a batch would be missing for the next one */
    }
    if (work->rows == NULL) { /* no room in the store: read pieces straight into the batch */
        for (int32_t c = 0; c < item->cross_end && item->num_runs && outcome == READ;)
            outcome = read_next(work, f, target, item, &c);
        return outcome;
    }
    outcome = gather_rows(work, f, item);
    if (outcome == READ && item->num_runs) {
        Runs runs = runs_of_item(work->plan, item);
        place_rows(d->row_nbytes, &runs, work->rows->data, target->raw);
        end_stage(work->w, PLACING, &work->last_ns);
    }
    /* A thread that will come back holds on to the rows, unless others decode them and it has more to do. */
    if (outcome != IS_BUSY || (work->num_claims < MAX_CLAIMS && !work->may_wait))
        let_go_of_rows(work);
    return item->num_runs || outcome == IS_BUSY ? outcome : READ;
}
