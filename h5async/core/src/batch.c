/* The plan of a batch enters; its rows leave, of all fields, from all sources.

   Threads take ranges of a plan's items, each in one call. Pieces that are kept decoded come first, as
   they need no file (kept.c); then everything else, source by source. An item that cannot be read is
   marked: Python reopens its file, checks it if it has changed, and has the item read again from it, to
   learn the reason (read/rereading.py). */

/* The file offset of a piece of an item; -1: it has none, or is not to be requested. */
static int64_t offset_of_piece(const Work *work, const Item *item, int32_t cross, int64_t *nbytes)
{
    const Field *f = &work->fields[item->field];
    const Layer *l = &f->layers[item->layer];
    const Shape *shape = shape_of(f, item);
    if (shape->dataset.begin >= 0)
        return -1; /* contiguous: the wanted rows lie anywhere in it */
    int64_t extent = find_extent(f, l, item->segment, item->number + shape->cross_number[cross]);
    if (extent < 0 || extent >= f->num_extents)
        return -1;
    *nbytes = f->nbytes[extent * f->nbytes_step];
    return f->offset[extent];
}

/* Requests everything to be read from the system, except long runs, which its own read-ahead does
   better. Returns whether there were any. */
static int ask_for_items(Work *work)
{
    int64_t nbytes = 0;
    Span span = {0, 0, 0};
    for (int64_t i = work->at; i < work->end && !is_stopped(work->file, work->w); i++) {
        const Item *item = &work->plan->items[i];
        if (item->status != TO_DO)
            continue;
        if (item->kind == ROWS)
            ask_for_rows(work, item, &span);
        if (item->kind == HEAP)
            ask_for_elements(work, item, &span);
        for (int32_t c = item->cross; item->kind == CHUNKS && c < item->cross_end; c++) {
            int64_t offset = offset_of_piece(work, item, c, &nbytes);
            if (offset >= 0)
                ask_later(work->file, &span, offset, nbytes);
        }
    }
    ask_later(work->file, &span, INT64_MAX, 0);
    return span.num_long > 0;
}

static int seem_cached(const Work *work)
{
    int64_t count = work->end - work->at, step = count / MAX_PROBES + 1, nbytes;
    for (int64_t i = work->at; i < work->end; i += step) {
        const Item *item = &work->plan->items[i];
        if (item->status != TO_DO)
            continue;
        int64_t offset = item->kind == ROWS   ? offset_of_rows(work, item)
                         : item->kind == HEAP ? offset_of_elements(work, item)
                                              : offset_of_piece(work, item, item->cross, &nbytes);
        if (offset >= 0 && offset != INT64_MAX && !is_cached(work->file, offset))
            return 0;
    }
    return 1;
}

/* Decides whether to read from the map; a source that was cached several times is not probed each time.
   If long runs of a file were not in the page cache a moment ago, it is still read as then: the system's
   read-ahead is cached, too, but what follows need not be. */
static void probe(Work *work)
{
    Source *s = work->source;
    int can_wait = work->file->io == IO_MAP || work->file->fd < 0; /* pages are loaded on access */
    int is_cached = can_wait;
    if (!can_wait)
        is_cached = (s->was_cached >= SURE_USES && ++s->uses % USES_PER_PROBE) || seem_cached(work);
    work->is_cold = !can_wait && (!is_cached || s->was_cached < 0);
    if (work->is_cold)
        work->plan->was_cached = 0;
    if (!is_cached)
        s->was_cached = ask_for_items(work) ? -COLD_USES : 0;
    else if (s->was_cached < SURE_USES)
        s->was_cached++;
    work->mappable = mappable_nbytes(work->file);
    work->available = work->is_cold ? 0 : work->mappable;
}

static void go_to(Work *work, int64_t item)
{
    work->at = item;
    if (item < work->end)
        work->cross = work->plan->items[item].cross;
}

/* Does items of one source until all are done or skipped, or a chunk has to be waited for. If possible,
   an item is skipped while another thread decodes one of its chunks, which will be there soon. */
static void do_section(void *data)
{
    Work *work = data;
    BatchPlan *plan = work->plan;
    if (work->available < 0)
        probe(work);
    for (; work->at < work->end && !is_stopped(work->file, work->w); go_to(work, work->at + 1)) {
        Item *item = &plan->items[work->at];
        const Field *f = &work->fields[item->field];
        const Target *target = &work->targets[item->field];
        enum Outcome outcome = READ;
        if (item->status != TO_DO)
            continue;
        set_traced(work->w, item->field, is_memory(work->file) ? IN_MEMORY : item->source);
        if (work->file->mirror != NULL)
            look_into_mirror(work, item);
        if (item->kind == ROWS) {
            outcome = read_row_item(work, f, target, item) ? READ : FAILED;
        } else if (item->kind == HEAP) {
            outcome = read_heap_item(work, f, target, item) ? READ : FAILED;
        } else if (keeps_rows(f, item)) {
            outcome = read_kept_rows(work, f, target, item);
            if (outcome == IS_FULL || (outcome == IS_BUSY && work->rows != NULL))
                return;
        } else {
            while (work->cross < item->cross_end && outcome == READ)
                outcome = read_next(work, f, target, item, &work->cross);
            if (outcome == IS_BUSY && (work->num_claims == MAX_CLAIMS || work->cross > item->cross))
                return;
        }
        if (item->kind == CHUNKS && outcome == READ && f->transform) {
            transform_item(plan, f, target, item);
            end_stage(work->w, TRANSFORMING, &work->last_ns);
        }
        if (outcome == READ && !item_is_within(plan, f, target, item))
            outcome = fail(work->w, ABOVE_LIMIT, -1, f->limit, 0) ? READ : FAILED;
        if (outcome == FAILED)
            fail(work->w, UNREADABLE, -1, 0, 0);
        if (outcome != IS_BUSY)
            item->status = outcome == READ ? DONE : REFUSED;
        else if (work->skipped == work->end)
            work->skipped = work->at;
    }
}

static void release_claims(Work *work, int are_filled)
{
    for (int i = 0; i < work->num_claims; i++)
        release_piece(work->claims[i].store, work->claims[i].kept, work->claims[i].piece, are_filled);
    work->num_claims = 0;
}

/* Reads items `begin` to `end`, all of one source, from its open file. */
static void read_file(Work *work, File *file, Source *s, int64_t begin, int64_t end)
{
    work->file = file, work->source = s;
    work->end = work->skipped = end, work->may_wait = 0;
    work->available = -1;
    go_to(work, begin);
    while (work->at < end) {
        int64_t now = now_ns();
        int is_good = read_guarded(file, do_section, work);
        release_claims(work, is_good);
        for (int64_t i = begin; !is_good && i < end; i++)
            work->plan->items[i].status = REFUSED;
        if (!is_good)
            break;
        s->checked_ns = s->was_changed ? 0 : now;
        if (work->at == end && work->skipped < end) {
            go_to(work, work->skipped);
            work->skipped = end;
        }
        work->may_wait = 1;
    }
    let_go_of_rows(work); /* if it was given up midway */
}

/* Reads items `begin` to `end`, all of one source. */
static void read_source(Work *work, Sources *sources, int64_t begin, int64_t end)
{
    File file;
    Source *s = acquire_source(sources, work->plan->items[begin].source, &file);
    if (s == NULL) {
        for (int64_t i = begin; i < end; i++)
            work->plan->items[i].status = REFUSED;
        return;
    }
    if (file.is_far)
        use_fetched(&file, work->plan, work->plan->items[begin].source);
    read_file(work, &file, s, begin, end);
    release_source(sources, s, &file);
}

/* Reads a refused item again, from an open file. Returns whether that succeeded; if not, the event of
   the file or the failure of the worker says why. */
PUBLIC int64_t h5async_read_again(BatchPlan *plan, const Field *fields, const Target *targets,
                                  File *file, Worker *w, int64_t number)
{
    Work work = {.plan = plan, .fields = fields, .targets = targets, .w = w, .last_ns = now_ns()};
    Source source = {.fd = file->fd};
    Item *item = &plan->items[number];
    w->failure = (Failure){.filter = -1, .extent = -1, .at = -1};
    file->event = NO_EVENT;
    file->failed_at = -1, file->error = 0;
    if (number < 0 || number >= plan->num_items)
        return 0;
    install_guard();
    begin_tracing(w);
    item->status = TO_DO;
    read_file(&work, file, &source, number, number + 1);
    end_tracing(w);
    w->returned_ns = now_ns();
    return item->status == DONE;
}

static void fill_items(Work *work, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++) {
        Item *item = &work->plan->items[i];
        item->status = item->kind == NO_SOURCE || item->kind == ZEROS ? DONE : REFUSED;
        if (item->status == DONE)
            fill_rows(work->plan, &work->fields[item->field], &work->targets[item->field], item);
    }
}

/* Reads items `start` to `stop` of a plan. Returns how many were refused; -1: the reader is being
   closed. Safe to call from many threads, each with its own worker and items. */
PUBLIC int64_t h5async_read_batch(BatchPlan *plan, const Field *fields, const Target *targets,
                                  Sources *sources, Worker *w, int64_t start, int64_t stop)
{
    Work work = {.plan = plan, .fields = fields, .targets = targets, .w = w, .last_ns = now_ns()};
    int64_t refused = 0;
    if (start < 0 || stop > plan->num_items)
        return -1;
    for (int64_t i = start; i < stop; i++)
        if (plan->items[i].status == REFUSED)
            plan->items[i].status = TO_DO; /* what it lacked has been fetched meanwhile */
    install_guard();
    begin_tracing(w);
    read_kept(&work, sources, start, stop);
    for (int64_t i = start, end; i < stop; i = end) {
        Item *item = &plan->items[i];
        if (w->stop != NULL && *w->stop)
            break;
        int64_t first = item->status == TO_DO ? i : stop;
        for (end = i + 1; end < stop && plan->items[end].source == item->source; end++)
            if (first == stop && plan->items[end].status == TO_DO)
                first = end;
        if (item->source >= 0 && first < stop)
            read_source(&work, sources, i, end);
        else if (item->source < 0)
            fill_items(&work, i, end);
    }
    for (int64_t i = start; i < stop; i++) {
        Item *item = &plan->items[i];
        if (item->kind == CHUNKS && item->num_runs == 0)
            item->status = DONE; /* it only helped others, as far as it could */
        refused += item->status == REFUSED;
    }
    end_tracing(w);
    w->returned_ns = now_ns();
    return w->stop != NULL && *w->stop ? -1 : refused;
}

/* Plans and reads samples in one call. Returns whether all was read; else targets are undefined. */
PUBLIC int64_t h5async_read_samples(BatchPlan *plan, const Field *fields, const Target *targets,
                                    Sources *sources, Worker *w, const int64_t *samples,
                                    const uint64_t *draw, int64_t num_fields, int64_t count,
                                    int64_t num_samples)
{
    return h5async_plan_batch(plan, fields, targets, num_fields, samples, count, count, num_samples, 1,
                              draw) == 1 &&
           h5async_read_batch(plan, fields, targets, sources, w, 0, plan->num_items) == 0;
}
