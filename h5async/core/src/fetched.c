/* Lists the ranges of far (remote) sources to fetch before a plan, or an item of it, is read.

   A plan lists everything at once, except for elements of variable length: where their values are is only
   known once their collections have been fetched. So the caller lists and fetches until nothing is new. */

static void use_fetched(File *file, const BatchPlan *plan, int64_t source)
{
    const Fetched *all = plan->fetched;
    int64_t low = -1, high = plan->num_fetched;
    FIND_LAST(low, high, at, all[at].source < source)
    int64_t first = low + 1, end = first;
    for (; end < plan->num_fetched && all[end].source == source;)
        end++;
    file->fetched = all + first, file->num_fetched = end - first;
    file->failed_at = -1;
}

/* Whether a piece, with its chunk at `extent`, is already in the store that its read looks in. */
static int piece_is_kept(const Field *f, const Item *item, int32_t cross, const Call *call,
                         const Runs *runs, int64_t extent)
{
    const Shape *shape = shape_of(f, item);
    if (f->store == NULL)
        return 0;
    if (shape->keeps != KEEPS_ROWS)
        return is_looked_up(f, shape, call, runs, extent) &&
               is_ready(f->store, (uint64_t)extent, 0, 1);
    int64_t key = key_of_rows(f, &f->layers[item->layer], item->segment, item->number);
    return key >= 0 && is_ready(f->store, (uint64_t)key, cross, shape->dataset.num_cross);
}

/* Ask for the lines of unfiltered samples that are stored one after the other. */
static void ask_for_lines(const Work *work, const Call *call, const Piece *whole, const Runs *runs,
                          Span *span)
{
    const Dataset *d = &call->d;
    for (int64_t r = 0; r < runs->count; r++)
        for (int64_t k = 0; k < runs->length[r]; k++) {
            Piece own;
            const Piece *piece = piece_at(d, whole, runs->position[r] + k, &own);
            if (piece == NULL)
                continue;
            int64_t from = call->offset + (runs->local[r] + k) * d->sample_stride + piece->from;
            Place at = first_place(piece);
            do
                ask_later(work->file, span, from + at.from, line_nbytes(piece));
            while (go_on(piece, piece->rank - 1, &at));
        }
}

/* Ask for the chunk of a piece; of an unfiltered one, only for the wanted lines. */
static void ask_for_piece(const Work *work, const Item *item, int32_t cross, Span *span)
{
    const Field *f = &work->fields[item->field];
    const Shape *shape = shape_of(f, item);
    Runs runs = runs_of_item(work->plan, item);
    Piece piece;
    Call call;
    int64_t extent;
    if (!locate_piece(work, f, item, &runs, cross, NULL, &call, &extent) || !call.is_stored ||
        call.offset < 0 || call.stored < 0 || call.offset > INT64_MAX - call.stored ||
        piece_is_kept(f, item, cross, &call, &runs, extent))
        return;
    const Dataset *d = &call.d;
    int are_apart = d->sample_stride * d->chunk_samples == d->chunk_nbytes;
    int is_whole = !are_apart || is_small(shape) || shape->keeps == KEEPS_ROWS ||
                   (d->begin < 0 && !is_raw(d, call.mask));
    if (!is_whole && runs_lie_within(&runs, d->chunk_samples) && piece_of(d, cross, &piece))
        ask_for_lines(work, &call, &piece, &runs, span);
    else
        ask_later(work->file, span, call.offset, call.stored);
}

/* Ask for elements of variable length. Resolves those whose collections were fetched, and asks for the
   other collections, also for elements without values, because these are checked, too. */
static void ask_for_values(Work *work, const Item *item, Span *span)
{
    HeapCall call = heap_call(work, &work->fields[item->field], &work->targets[item->field], item);
    if (call.scratch != NULL && call.count <= BLOCK_SEQUENCES) {
        call.asks = span;
        resolve_all(&call);
    }
    ask_for_elements(work, item, span);
}

static void list_item(Work *work, const Item *item)
{
    Span span = {0, 0, 0};
    if (item->kind == ROWS)
        ask_for_rows(work, item, &span);
    if (item->kind == HEAP)
        ask_for_values(work, item, &span);
    for (int32_t c = item->cross; item->kind == CHUNKS && c < item->cross_end; c++)
        ask_for_piece(work, item, c, &span);
}

enum { BLOCKS_PER_ROW = 64 }; /* checking this many marks takes as long as asking for one row */

/* Whether the whole span from the first to the last of many rows is known to be kept: checking each row
   would take as long as copying small ones. */
static int span_is_kept(const Work *work, const Item *item)
{
    const Field *f = &work->fields[item->field];
    const Layer *l = &f->layers[item->layer];
    const Shape *shape = shape_of(f, item);
    const int64_t segment = item->segment, end = item->first_run + item->num_runs;
    const Wanted *w = &work->plan->sorted[item->number];
    int64_t first = INT64_MAX, last = -1;
    if (item->kind != ROWS || shape->kind != ROWS || l->step[segment] != 1)
        return 0;
    for (int64_t rank = item->first_run, behind; rank < end; rank = behind, w++) {
        int64_t sample = w->sample + rank - w->rank;
        behind = w[1].rank < end ? w[1].rank : end;
        first = sample < first ? sample : first;
        last = sample + behind - rank > last ? sample + behind - rank : last;
    }
    int64_t before = l->row[segment] - l->first[segment];
    int64_t offset = offset_of_row(l, shape, segment, first + before);
    int64_t nbytes = offset_of_row(l, shape, segment, last + before) - offset;
    return nbytes / MIRROR_BLOCK < BLOCKS_PER_ROW * item->num_runs &&
           mirror_is_marked(work->file->mirror, offset, nbytes);
}

/* Let an item be read from the mirror as from a map if everything it needs is there. */
static void look_into_mirror(Work *work, const Item *item)
{
    Asked missing = {NULL, 0, 0};
    File *file = work->file;
    Failure before = work->w->failure;
    file->map = NULL, work->available = work->mappable = 0;
    file->asked = &missing;
    if (!span_is_kept(work, item))
        list_item(work, item);
    file->asked = NULL, work->w->failure = before;
    if (missing.count == 0)
        file->map = file->mirror->map, work->available = work->mappable = file->nbytes;
}

/* List what the current items need, except those already done. */
static void list_section(void *data)
{
    Work *work = data;
    Asked *asked = work->file->asked;
    for (; work->at < work->end; work->at++) {
        const Item *item = &work->plan->items[work->at];
        int64_t before = asked->count;
        if (item->status != DONE)
            list_item(work, item);
        for (; before < asked->count && before < asked->room; before++)
            asked->ranges[before].source = item->source;
    }
}

/* List the ranges of far sources that items `start` to `stop` of a plan read, by source, with repetitions,
   without those in a mirror unless `lists_all`. Returns their number, of which at most `room` are written. */
PUBLIC int64_t h5async_list_ranges(BatchPlan *plan, const Field *fields, const Target *targets,
                                   Sources *sources, Worker *w, int64_t start, int64_t stop,
                                   Fetched *ranges, int64_t room)
{
    Work work = {.plan = plan, .fields = fields, .targets = targets, .w = w, .last_ns = now_ns()};
    Asked asked = {ranges, 0, room};
    File file;
    install_guard();
    start = start < 0 ? 0 : start;
    stop = stop < plan->num_items ? stop : plan->num_items;
    for (int64_t end; start < stop; start = end) {
        int32_t number = plan->items[start].source;
        Source *source = number < 0 ? NULL : acquire_source(sources, number, &file);
        int64_t before = asked.count;
        for (end = start + 1; end < stop && plan->items[end].source == number;)
            end++;
        if (source == NULL)
            continue;
        if (file.is_far) {
            use_fetched(&file, plan, number);
            if (w->lists_all)
                forget_mirror(&file);
            file.asked = &asked, work.file = &file, work.at = start, work.end = end;
            if (!read_guarded(&file, list_section, &work) && file.event != STOPPED)
                end = start, asked.count = before; /* retry without the mirror */
        }
        release_source(sources, source, &file);
    }
    w->failure = (Failure){.filter = -1, .extent = -1, .at = -1};
    w->returned_ns = now_ns();
    return asked.count;
}
