/* Reads rows stored without filters; the offset of each is computed as it is read. */

enum { BLOCK_ROWS = 512 };

/* Some rows, as pieces of one or more rows that are adjacent both in the file and in the batch. */
typedef struct {
    int64_t offset[BLOCK_ROWS], nbytes[BLOCK_ROWS], position[BLOCK_ROWS];
    int64_t count, rows;
} RowBlock;

static Ranks ranks_of_item(const Item *item)
{
    return (Ranks){.run = item->number, .rank = item->first_run,
                   .end = item->first_run + item->num_runs};
}

/* (The highest bit is set in a negative number, and in `last` - number if the number is too large.) */
#define COLLECT_OUTSIDE(Number)                                                                   \
    {                                                                                             \
        const Number most = (Number)-1 >> 1;                                                      \
        const Number last = f->limit - 1 < (int64_t)most ? (Number)(f->limit - 1) : most;         \
        Number outside = 0;                                                                       \
        for (int64_t i = 0; i < length; i++) {                                                    \
            Number number = ((const Number *)(const void *)at)[i];                                \
            outside |= number | (last - number);                                                  \
        }                                                                                         \
        *is_within = outside <= most;                                                             \
    }

ALWAYS_INLINE void rows_are_within_inline(const Field *f, const uint8_t *at, int64_t length,
                                          int *is_within)
{
    if (f->row_nbytes == 4)
        COLLECT_OUTSIDE(uint32_t)
    else
        COLLECT_OUTSIDE(uint64_t)
}

ALSO_FOR_AVX2(rows_are_within, (const Field *f, const uint8_t *at, int64_t length, int *is_within),
              (f, at, length, is_within))

/* Whether all numbers read for an item are below its field's limit; they are still in the cache. */
static int item_is_within(const BatchPlan *plan, const Field *f, const Target *target,
                          const Item *item)
{
    int64_t at = item->first_run, end = at + item->num_runs, position, length, run = item->number;
    int is_within = 1;
    while (f->limit && at < end && is_within) {
        if (item->kind == ROWS) {
            const Wanted *w = &plan->sorted[run++];
            position = w->position + at - w->rank;
            length = (w[1].rank < end ? w[1].rank : end) - at;
            at += length;
        } else {
            position = plan->run_position[at], length = plan->run_length[at];
            at++;
        }
        rows_are_within(f, target->raw + position * f->row_nbytes, length, &is_within);
    }
    return is_within;
}

/* The file offset of a row; -1: it was never written; INT64_MAX: it is beyond what can be read. */
static int64_t offset_of_row(const Layer *l, const Shape *shape, int64_t segment, int64_t row)
{
    int64_t offset;
    if (l->begin[segment] < 0)
        return -1;
    if (__builtin_mul_overflow(row, shape->source_row_nbytes, &offset) ||
        __builtin_add_overflow(offset, l->begin[segment], &offset))
        return INT64_MAX;
    return offset;
}

/* Lists the next rows of an item, as at most `most` pieces, and advances `ranks`. */
static void list_rows(const BatchPlan *plan, const Field *f, const Item *item, Ranks *ranks,
                      RowBlock *block, int64_t most)
{
    const Layer *l = &f->layers[item->layer];
    const int64_t segment = item->segment, step = l->step[segment];
    const Shape *shape = &f->shapes[l->shape[segment]];
    const int64_t per_chunk = shape->dataset.chunk_samples, row_nbytes = f->row_nbytes;
    const int in_chunks = shape->kind == ROWS_IN_CHUNKS;
    const int64_t first = l->first[segment], first_row = l->row[segment];
    int64_t begin = 0, end = 0, base = -1, run = ranks->run, rank = ranks->rank, i = 0;
    for (; i < most && rank < ranks->end; i++) {
        const Wanted *w = &plan->sorted[run];
        int64_t behind = w[1].rank < ranks->end ? w[1].rank : ranks->end;
        int64_t here = step == 1 ? behind - rank : 1, inside = rank - w->rank;
        int64_t row = first_row + (w->sample + inside - first) * step;
        if (in_chunks) {
            if (row < begin || row >= end) {
                int64_t chunk = row / per_chunk;
                int64_t extent = find_extent(f, l, segment, chunk * shape->number_stride);
                begin = chunk * per_chunk, end = begin + per_chunk;
                base = extent == -2 ? INT64_MAX : extent < 0 ? -1 : f->offset[extent];
                if (base > INT64_MAX - per_chunk * row_nbytes)
                    base = INT64_MAX;
            }
            here = here < end - row ? here : end - row;
            block->offset[i] =
                base < 0 || base == INT64_MAX ? base : base + (row - begin) * row_nbytes;
        } else {
            block->offset[i] = offset_of_row(l, shape, segment, row);
        }
        block->nbytes[i] = here * row_nbytes;
        block->position[i] = w->position + inside;
        rank += here;
        run += rank == w[1].rank;
    }
    block->count = i, block->rows = rank - ranks->rank;
    ranks->run = run, ranks->rank = rank;
}

/* Transforms rows from the map directly, without a copy in between. */
static int64_t transform_rows(const Work *work, const Field *f, const Target *target,
                              const Pieces *p)
{
    Transform t = *f->transform;
    int64_t unit = source_nbytes(&t), done = 0;
    for (; done < p->count && !is_stopped(work->file, work->w); done++) {
        int64_t offset = p->offset[done], nbytes = nbytes_of_piece(p, done);
        if (offset > work->available - nbytes)
            break;
        const uint8_t *from = offset < 0 ? NULL : work->file->map + offset;
        if (offset < 0 || (uintptr_t)from % (uintptr_t)unit) {
            if (offset < 0)
                fill_piece(p, done);
            else
                memcpy(place_of_piece(p, done), from, (size_t)nbytes);
            from = place_of_piece(p, done);
        }
        t.samples = nbytes / p->unit;
        h5async_transform(&t, from, target->out + p->position[done] * out_nbytes(&t));
    }
    return done;
}

static int64_t read_row_pieces(Work *work, const Field *f, const Shape *shape, const Target *target,
                               const Pieces *p)
{
    int64_t done;
    if (work->available > 0 && f->transform && !shape->swaps)
        return transform_rows(work, f, target, p);
    if (work->available > 0)
        done = copy_pieces(work->file, work->w, p, work->available);
    else
        done = work->file->io == IO_MAP ? 0
               : work->is_cold          ? read_runs(work->file, work->w, p, NULL, 0)
                                        : pread_pieces(work->file, work->w, p);
    for (int64_t i = 0; shape->swaps && i < done; i++)
        swap_bytes(place_of_piece(p, i), nbytes_of_piece(p, i), shape->swaps);
    if (f->transform) {
        end_stage(work->w, READING, &work->last_ns);
        for (int64_t i = 0; i < done; i++)
            transform_run(f, target, p->position[i], nbytes_of_piece(p, i) / p->unit);
        end_stage(work->w, TRANSFORMING, &work->last_ns);
    }
    return done;
}

/* Copies rows, no two of which are adjacent, straight from the sorted samples: the first one lies at
   `from`, those of consecutive samples `stride` bytes apart. The rows copied next lie likewise from
   `next` on, and are prefetched at the end, so that as many fetches stay in flight. */
ALWAYS_INLINE void copy_singles(const Wanted *w, int64_t count, const uint8_t *from, int64_t stride,
                                const uint8_t *next, uint8_t *to, int64_t nbytes)
{
    int64_t first = w->sample, most = rows_ahead(nbytes), ahead = most < count ? most : count;
    for (int64_t i = 0; i < ahead; i++)
        fetch(from + (w[i].sample - first) * stride, nbytes);
    for (int64_t i = 0; i < count - ahead; i++) {
        fetch(from + (w[i + ahead].sample - first) * stride, nbytes);
        copy_few(to + w[i].position * nbytes, from + (w[i].sample - first) * stride, nbytes);
    }
    for (int64_t i = count - ahead, k = 0; i < count; i++, k++) {
        if (next != NULL)
            fetch(next + (w[k].sample - first) * stride, nbytes);
        copy_few(to + w[i].position * nbytes, from + (w[i].sample - first) * stride, nbytes);
    }
}

/* Finds the least and the greatest sample of an item; often they are those of the item before. */
static void find_bounds(Work *work, const Wanted *w, int64_t count)
{
    if (work->bounded == w && work->num_bounded == count)
        return;
    work->bounded = w, work->num_bounded = count;
    work->least = work->most = w->sample;
    for (int64_t i = 1; i < count; i++) {
        work->least = w[i].sample < work->least ? w[i].sample : work->least;
        work->most = w[i].sample > work->most ? w[i].sample : work->most;
    }
}

/* The file offset of the row of a sample of an item; INT64_MAX: see offset_of_row. */
static int64_t offset_of_sample(const Field *f, const Item *item, int64_t sample)
{
    const Layer *l = &f->layers[item->layer];
    const int64_t segment = item->segment, rows = sample - l->first[segment];
    return offset_of_row(l, shape_of(f, item), segment, l->row[segment] + rows * l->step[segment]);
}

/* The address of the next item's first row if it has the same samples, and is mapped; else NULL. */
static const uint8_t *after_item(const Work *work, const Item *item)
{
    const Item *next = item + 1;
    if (work->at + 1 >= work->end || next->kind != ROWS || next->number != item->number ||
        next->num_runs != item->num_runs)
        return NULL;
    const int64_t first = work->plan->sorted[next->number].sample;
    int64_t offset = offset_of_sample(&work->fields[next->field], next, first);
    return offset < 0 || offset >= work->available ? NULL : work->file->map + offset;
}

/* Copies an item's rows from the map by copy_singles; 0: they do not suit it, or are not all there. */
static int copy_item(Work *work, const Field *f, const Shape *shape, const Target *target,
                     const Item *item)
{
    const Layer *l = &f->layers[item->layer];
    const int64_t segment = item->segment, nbytes = f->row_nbytes, count = item->num_runs;
    const Wanted *w = &work->plan->sorted[item->number];
    if (work->available <= 0 || shape->kind != ROWS || shape->swaps || nbytes > FEW_NBYTES ||
        item->number + count > work->plan->num_wanted || w->rank != item->first_run ||
        w[count - 1].rank != item->first_run + count - 1 || /* (ends of groups take no rank) */
        w[count].rank != item->first_run + count)
        return 0;
    find_bounds(work, w, count);
    int64_t offset = offset_of_sample(f, item, work->least);
    int64_t last = offset_of_sample(f, item, work->most);
    if (offset < 0 || l->step[segment] < 0 || last > work->available - nbytes)
        return 0;
    int64_t stride = l->step[segment] * shape->source_row_nbytes;
    const uint8_t *from = work->file->map + offset + (w->sample - work->least) * stride;
    const uint8_t *next = after_item(work, item);
    if (nbytes == 16) /* a constant for the compiler */
        copy_singles(w, count, from, stride, next, target->raw, 16);
    else
        copy_singles(w, count, from, stride, next, target->raw, nbytes);
    if (f->transform) {
        end_stage(work->w, READING, &work->last_ns);
        for (int64_t i = 0; i < count; i++)
            transform_run(f, target, w[i].position, 1);
        end_stage(work->w, TRANSFORMING, &work->last_ns);
    }
    return 1;
}

/* Whether a source is memory; copies from it do not count as reads. */
static int is_memory(const File *file)
{
    return file->fd == PATH_CHECKED && file->path == NULL && !file->is_far;
}

static int read_row_item(Work *work, const Field *f, const Target *target, const Item *item)
{
    const Shape *shape = shape_of(f, item);
    Ranks ranks = ranks_of_item(item);
    RowBlock block;
    int64_t row_nbytes = is_memory(work->file) ? 0 : f->row_nbytes; /* as counted */
    int is_good = 1;
    if (copy_item(work, f, shape, target, item)) {
        add_done(&work->w->done.read_nbytes, (ranks.end - ranks.rank) * row_nbytes);
        ranks.rank = ranks.end;
    }
    while (is_good && ranks.rank < ranks.end) {
        list_rows(work->plan, f, item, &ranks, &block, BLOCK_ROWS);
        Pieces p = {.offset = block.offset, .position = block.position, .count = block.count,
                    .nbytes = block.rows == block.count ? NULL : block.nbytes,
                    .unit = f->row_nbytes, .base = target->raw, .fill = shape->dataset.fill,
                    .itemsize = f->itemsize};
        is_good = read_row_pieces(work, f, shape, target, &p) == p.count;
        add_done(&work->w->done.read_nbytes, is_good ? block.rows * row_nbytes : 0);
    }
    end_stage(work->w, READING, &work->last_ns);
    return is_good;
}

/* The file offset of an item's first row; see offset_of_row. */
static int64_t offset_of_rows(const Work *work, const Item *item)
{
    Ranks ranks = ranks_of_item(item);
    RowBlock block;
    list_rows(work->plan, &work->fields[item->field], item, &ranks, &block, 1);
    return block.count ? block.offset[0] : -1;
}

static void ask_for_rows(const Work *work, const Item *item, Span *span)
{
    const Field *f = &work->fields[item->field];
    Ranks ranks = ranks_of_item(item);
    RowBlock block;
    while (ranks.rank < ranks.end) {
        list_rows(work->plan, f, item, &ranks, &block, BLOCK_ROWS);
        for (int64_t i = 0; i < block.count; i++)
            if (block.offset[i] >= 0 && block.offset[i] != INT64_MAX)
                ask_later(work->file, span, block.offset[i], block.nbytes[i]);
    }
}
