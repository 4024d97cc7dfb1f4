/* Copies rows that are not encoded from the file into the batch. */

typedef struct {
    const int64_t *offset, *position; /* position NULL: rows in order */
    int64_t num_items;
    uint8_t *rows;
    int64_t num_rows, row_nbytes;
    const uint8_t *fill;
    int64_t itemsize;
} Rows;

static int64_t valid_rows(const Rows *r)
{
    if (r->position == NULL)
        return r->num_items < r->num_rows ? r->num_items : r->num_rows;
    for (int64_t i = 0; i < r->num_items; i++)
        if (r->position[i] < 0 || r->position[i] >= r->num_rows)
            return i;
    return r->num_items;
}

static Pieces pieces_of_rows(const Rows *r, int64_t count)
{
    return (Pieces){.offset = r->offset, .position = r->position, .count = count,
                    .unit = r->row_nbytes, .base = r->rows, .fill = r->fill,
                    .itemsize = r->itemsize};
}

PUBLIC int64_t h5async_read_rows(File *file, Worker *worker, const Rows *r)
{
    int64_t begin = now_ns(), done = 0;
    Pieces pieces = pieces_of_rows(r, valid_rows(r));
    if (r->row_nbytes > 0 && r->itemsize > 0 && pieces.count > 0)
        done = read_pieces(file, worker, &pieces);
    worker->returned_ns = now_ns();
    worker->read_ns += worker->returned_ns - begin;
    worker->read_nbytes += done * r->row_nbytes;
    return done;
}
