/* Rows that lie in the file as they are go to the batch: out of the map, or by reads. */

typedef struct {
    const int64_t *offset, *position; /* position NULL: rows in order */
    int64_t num_items;
    uint8_t *rows;
    int64_t num_rows, row_nbytes;
    const uint8_t *fill;
    int64_t itemsize;
} Rows;

static uint8_t *row_of(const Rows *r, int64_t i)
{
    return r->rows + (r->position ? r->position[i] : i) * r->row_nbytes;
}

static int64_t valid_rows(const Rows *r)
{
    if (r->position == NULL)
        return r->num_items < r->num_rows ? r->num_items : r->num_rows;
    for (int64_t i = 0; i < r->num_items; i++)
        if (r->position[i] < 0 || r->position[i] >= r->num_rows)
            return i;
    return r->num_items;
}

static int rows_are_cached(const File *file, const Rows *r)
{
    int64_t step = r->num_items / MAX_PROBES + 1;
    for (int64_t i = 0; i < r->num_items; i += step)
        if (r->offset[i] >= 0 && (r->offset[i] > INT64_MAX - r->row_nbytes ||
                                  !is_cached(file, r->offset[i] + r->row_nbytes - 1)))
            return 0;
    return 1;
}

static int64_t copy_rows(const File *file, const Rows *r, int64_t available)
{
    int64_t nbytes = r->row_nbytes;
    for (int64_t i = 0; i < r->num_items; i++) {
        int64_t offset = r->offset[i];
        if (nbytes < 4096 && i + 8 < r->num_items && r->offset[i + 8] >= 0 &&
            r->offset[i + 8] < available)
            __builtin_prefetch(file->map + r->offset[i + 8]);
        if (offset < 0)
            fill_elements(r->fill, r->itemsize, row_of(r, i), nbytes);
        else if (offset > available - nbytes)
            return i;
        else
            memcpy(row_of(r, i), file->map + offset, (size_t)nbytes);
    }
    return r->num_items;
}

/* The end of the rows from `begin` on that follow each other in the file. */
static int64_t end_of_run(const Rows *r, int64_t begin)
{
    int64_t end = begin + 1;
    while (end < r->num_items && end - begin < MAX_IOVEC &&
           r->offset[end] >= r->row_nbytes &&
           r->offset[end] - r->row_nbytes == r->offset[end - 1])
        end++;
    return end;
}

static int read_run(const File *file, const Rows *r, int64_t begin, int64_t end, int flags)
{
    struct iovec parts[MAX_IOVEC];
    int count = 0;
    for (int64_t i = begin; i < end; i++) {
        uint8_t *row = row_of(r, i);
        if (count && (uint8_t *)parts[count - 1].iov_base + parts[count - 1].iov_len == row)
            parts[count - 1].iov_len += (size_t)r->row_nbytes;
        else
            parts[count++] = (struct iovec){row, (size_t)r->row_nbytes};
    }
#ifdef RWF_NOWAIT
    ssize_t got = preadv2(file->fd, parts, count, r->offset[begin], flags);
#else
    (void)flags;
    ssize_t got = preadv(file->fd, parts, count, r->offset[begin]);
#endif
    return got == (end - begin) * r->row_nbytes;
}

static int read_run_slowly(const File *file, const Rows *r, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        if (!read_fully(file, r->offset[i], row_of(r, i), r->row_nbytes))
            return 0;
    return 1;
}

/* What the page cache holds is read at once. The rest is asked for, all of it, before the first
   read that waits: so as many reads are in flight as the disk takes. */
static int64_t pread_rows(const File *file, const Rows *r)
{
    uint8_t *is_late = calloc((size_t)r->num_items + 1, 1);
    int64_t done = 0, end, late = 0;
    if (is_late == NULL)
        return 0;
    for (int64_t i = 0; i < r->num_items; i = end) {
        end = i + 1;
        if (r->offset[i] < 0) {
            fill_elements(r->fill, r->itemsize, row_of(r, i), r->row_nbytes);
            continue;
        }
        end = end_of_run(r, i);
#ifdef RWF_NOWAIT
        if (read_run(file, r, i, end, RWF_NOWAIT))
            continue;
        ask_for(file, r->offset[i], (end - i) * r->row_nbytes);
        is_late[i] = 1, late = 1;
#else
        if (!read_run(file, r, i, end, 0) && !read_run_slowly(file, r, i, end)) {
            free(is_late);
            return i;
        }
#endif
    }
    done = r->num_items;
    for (int64_t i = 0; late && i < r->num_items; i++) {
        if (!is_late[i])
            continue;
        end = end_of_run(r, i);
        if (!read_run(file, r, i, end, 0) && !read_run_slowly(file, r, i, end)) {
            done = i;
            break;
        }
    }
    free(is_late);
    return done;
}

PUBLIC int64_t h5async_read_rows(const File *file, Worker *worker, const Rows *rows)
{
    Rows r = *rows;
    int64_t begin = now_ns(), done = 0;
    r.num_items = valid_rows(&r);
    if (r.row_nbytes > 0 && r.itemsize > 0 && r.num_items > 0) {
        int64_t available = mappable_nbytes(file);
        int is_mapped = available > 0 && (file->io == IO_MAP || rows_are_cached(file, &r));
        done = is_mapped ? copy_rows(file, &r, available) : pread_rows(file, &r);
    }
    worker->returned_ns = now_ns();
    worker->read_ns += worker->returned_ns - begin;
    worker->read_nbytes += done * r.row_nbytes;
    return done;
}
