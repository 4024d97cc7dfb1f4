/* Visits the chunks of a dataset with HDF5's H5Dchunk_iter, looks chunks up by their keys, and fetches
   some. HDF5 is called through function pointers into the library that h5py has loaded, under h5py's lock.

   hid_t has been 64 bits wide since HDF5 1.10, like hsize_t and haddr_t; the visitor has these
   parameters in 1.14 and 2.0 (H5Dpublic.h). */

enum { MAX_VISIT_RANK = 32, VISITS_BETWEEN_SIGNALS = 1 << 16 };

typedef int (*Visitor)(const uint64_t *corner, unsigned mask, uint64_t address, uint64_t nbytes,
                       void *data);

typedef int (*Lookup)(int64_t dataset, const uint64_t *corner, uint64_t *nbytes);

typedef struct {
    int (*iterate)(int64_t dataset, int64_t transfer, Visitor visitor, void *data);
    Lookup look_up;    /* H5Dget_chunk_storage_size, to look up visited chunks; NULL: do not */
    int64_t most_looked_up; /* of more chunks, only a sample is looked up */
    /* Python's PyEval_SaveThread, PyEval_RestoreThread, PyErr_CheckSignals. */
    void *(*save_thread)(void);
    void (*restore_thread)(void *);
    int (*check_signals)(void);
    int64_t dataset, rank;
    const int64_t *chunk, *grid; /* [rank]: extents of a chunk, and the number of chunks */
    int64_t *number, *offset, *nbytes; /* out, [capacity] */
    uint32_t *mask;
    int64_t capacity;
    /* Out: */
    int64_t count;
    int64_t end;                /* end of the chunks in the file, in bytes */
    int64_t least, most;        /* bytes of a chunk */
    int64_t is_ascending;       /* each number is higher than the one before */
    int64_t is_apart;           /* each chunk begins where the one before ends, or after that */
    int64_t is_outside;         /* a corner is not on the grid; `number` is then that of a chunk near it */
    int64_t unlike; /* index of a chunk not found by its key; -1: none; -2: none was looked up */
    void *thread;               /* internal: Python's state of this thread */
} Visit;

/* Takes the GIL and lets Python run its signal handlers, if this is the main thread. */
static int is_interrupted(Visit *v)
{
    v->restore_thread(v->thread);
    int status = v->check_signals();
    v->thread = v->save_thread();
    return status != 0;
}

static int visit_chunk(const uint64_t *corner, unsigned mask, uint64_t address, uint64_t nbytes,
                       void *data)
{
    Visit *v = data;
    if (v->count >= v->capacity || address > INT64_MAX || nbytes > INT64_MAX)
        return -1;
    int64_t number = 0;
    for (int64_t a = 0; a < v->rank; a++) {
        uint64_t extent = (uint64_t)v->chunk[a], last = (uint64_t)v->grid[a] - 1;
        uint64_t cell = corner[a] / extent;
        if (cell > last || cell * extent != corner[a]) {
            v->is_outside = 1;
            cell = cell > last ? last : cell;
        }
        number = number * v->grid[a] + (int64_t)cell;
    }
    int64_t at = v->count++, offset = (int64_t)address, size = (int64_t)nbytes;
    int64_t end = size > INT64_MAX - offset ? INT64_MAX : offset + size;
    v->is_ascending &= !at || number > v->number[at - 1];
    v->is_apart &= !at || (offset >= v->offset[at - 1] && offset - v->offset[at - 1] >= v->nbytes[at - 1]);
    v->end = v->end > end ? v->end : end;
    v->least = at && v->least < size ? v->least : size;
    v->most = v->most > size ? v->most : size;
    v->number[at] = number;
    v->offset[at] = offset;
    v->nbytes[at] = size;
    v->mask[at] = mask;
    return v->count % VISITS_BETWEEN_SIGNALS == 0 && is_interrupted(v) ? -1 : 0;
}

/* Looks a chunk up by its number; returns whether HDF5 finds it with the expected size. */
static int is_found_by_key(const Visit *v, int64_t number, int64_t expected)
{
    uint64_t corner[MAX_VISIT_RANK], nbytes = 0;
    for (int64_t a = v->rank; a-- > 0; number /= v->grid[a])
        corner[a] = (uint64_t)(number % v->grid[a]) * (uint64_t)v->chunk[a];
    return v->look_up(v->dataset, corner, &nbytes) >= 0 && nbytes == (uint64_t)expected;
}

/* Looks up some chunks; returns the index of the first that is not found, or -1. */
PUBLIC int64_t h5async_look_up(const Visit *v, const int64_t *number, const int64_t *expected,
                               int64_t count)
{
    int64_t step = count > v->most_looked_up ? (count - 1) / v->most_looked_up + 1 : 1;
    for (int64_t i = 0; i < count; i += step)
        if (!is_found_by_key(v, number[i], expected[i]))
            return i;
    return -1;
}

/* Fills the columns; returns 0, or -1 if HDF5 reports an error or the visitor stopped it: Python then
   visits the chunks again, and raises the error. Called with the GIL, which it releases meanwhile. */
PUBLIC int64_t h5async_visit(Visit *v)
{
    v->count = v->end = v->least = v->most = v->is_outside = 0;
    v->is_ascending = v->is_apart = 1;
    v->unlike = -2;
    v->thread = v->save_thread();
    int status = v->iterate(v->dataset, 0, visit_chunk, v);
    if (status >= 0 && v->look_up != NULL)
        v->unlike = h5async_look_up(v, v->number, v->nbytes, v->count);
    v->restore_thread(v->thread);
    return status < 0 ? -1 : 0;
}

/* H5Dread_chunk of HDF5 1.10 to 1.14, H5Dread_chunk1 of 2.0 */
typedef int (*ReadChunk)(int64_t dataset, int64_t transfer, const uint64_t *corner, uint32_t *mask,
                         void *out);

/* Reads `count` chunks, still encoded, one after the other into `w->encoded`, and writes the size and
   filter mask of each to `found` [count][2]. Returns 0 if they do not fit, or one was never written or
   cannot be read. Called under h5py's lock. */
PUBLIC int64_t h5async_fetch_chunks(const Worker *w, Lookup look_up, ReadChunk read, int64_t dataset,
                                    const uint64_t *corners, int64_t rank, int64_t count,
                                    int64_t *found)
{
    int64_t end = 0;
    for (int64_t i = 0; i < count; i++, corners += rank) {
        uint64_t nbytes = 0;
        uint32_t mask = 0;
        if (look_up(dataset, corners, &nbytes) < 0 || nbytes == 0 ||
            nbytes > (uint64_t)(w->encoded_nbytes - end) ||
            read(dataset, 0, corners, &mask, w->encoded + end) < 0)
            return 0;
        end += (int64_t)nbytes;
        found[2 * i] = (int64_t)nbytes;
        found[2 * i + 1] = mask;
    }
    return 1;
}

/* Decodes the fetched chunks one after the other, each to exactly `room` bytes; returns 0 if one fails. */
PUBLIC int64_t h5async_decode_fetched(const Filter *filters, Worker *w, uint8_t *out,
                                      int64_t num_filters, const int64_t *found, int64_t count,
                                      int64_t room)
{
    const uint8_t *in = w->encoded;
    for (int64_t i = 0; i < count; in += found[2 * i], out += room, i++)
        if (!h5async_decode(filters, w, in, out, num_filters, found[2 * i], found[2 * i + 1], room))
            return 0;
    return 1;
}
