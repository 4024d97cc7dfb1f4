/* Copies pieces (runs of bytes) of a file into memory: from the map, or by reads. */

typedef struct {
    const int64_t *offset;   /* negative: not in the file, but filled */
    const int64_t *nbytes;   /* NULL: `unit` each */
    const int64_t *position; /* where they go, in units; NULL: one after the other */
    int64_t count, unit;
    uint8_t *base;
    const uint8_t *fill;
    int64_t itemsize;
} Pieces;

static uint8_t *place_of_piece(const Pieces *p, int64_t i)
{
    return p->base + (p->position ? p->position[i] : i) * p->unit;
}

static int64_t nbytes_of_piece(const Pieces *p, int64_t i)
{
    return p->nbytes ? p->nbytes[i] : p->unit;
}

static int64_t sum_of(const int64_t *nbytes, int64_t count)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += nbytes[i];
    return sum;
}

static void fill_piece(const Pieces *p, int64_t i)
{
    fill_elements(p->fill, p->itemsize, place_of_piece(p, i), nbytes_of_piece(p, i));
}

enum { FEW_NBYTES = 512, LINES_AHEAD = 128, LEAST_AHEAD = 8, MOST_AHEAD = 64 };
enum { EARLY_NBYTES = 32 * 1024, AHEAD_NBYTES = 4096, STEP_NBYTES = 256 };
enum { TWO_PAGES = 8 * 1024, FIRST_NBYTES = 1024, SAFE_NBYTES = 2048 };

/* Copies a few bytes, at less than the cost of a call. The last two moves may overlap. */
ALWAYS_INLINE void copy_few(uint8_t *to, const uint8_t *from, int64_t nbytes)
{
    if (nbytes >= 16) {
        for (int64_t at = 0; at < nbytes - 16; at += 16)
            memcpy(to + at, from + at, 16);
        memcpy(to + nbytes - 16, from + nbytes - 16, 16);
    } else if (nbytes >= 8) {
        memcpy(to, from, 8);
        memcpy(to + nbytes - 8, from + nbytes - 8, 8);
    } else if (nbytes >= 4) {
        memcpy(to, from, 4);
        memcpy(to + nbytes - 4, from + nbytes - 4, 4);
    } else {
        for (int64_t at = 0; at < nbytes; at++)
            to[at] = from[at];
    }
}

/* Number of rows to prefetch ahead of the one being copied, to have LINES_AHEAD cache lines in flight. */
ALWAYS_INLINE int64_t rows_ahead(int64_t nbytes)
{
    int64_t ahead = LINES_AHEAD / (nbytes / 64 + 1);
    return ahead < LEAST_AHEAD ? LEAST_AHEAD : ahead > MOST_AHEAD ? MOST_AHEAD : ahead;
}

/* Prefetches into the L2 cache, for which more lines may be in flight than for L1. */
ALWAYS_INLINE void fetch(const uint8_t *from, int64_t nbytes)
{
    for (int64_t at = 0; at < nbytes; at += 64)
        __builtin_prefetch(from + at, 0, 2);
    __builtin_prefetch(from + nbytes - 1, 0, 2);
}

/* Copies pieces of a few bytes each, with many of them in flight from memory at a time. */
ALWAYS_INLINE int64_t copy_small(File *file, const Worker *w, const Pieces *p, int64_t available,
                                 int64_t nbytes)
{
    const uint8_t *map = file->map;
    int64_t ahead = rows_ahead(nbytes);
    for (int64_t i = 0; i < p->count; i++) {
        int64_t offset = p->offset[i], next = i + ahead < p->count ? p->offset[i + ahead] : -1;
        if (next >= 0 && next <= available - nbytes)
            fetch(map + next, nbytes);
        if (i % 64 == 0 && is_stopped(file, w))
            return i;
        if (offset < 0)
            fill_piece(p, i);
        else if (offset > available - nbytes)
            return i;
        else
            copy_few(p->base + p->position[i] * nbytes, map + offset, nbytes);
    }
    return p->count;
}

/* Prefetches what will be copied soon into the L2 cache. The hardware prefetcher alone starts over in each
   piece, and at each page boundary. */
ALWAYS_INLINE void fetch_early(const uint8_t *from, int64_t nbytes)
{
    for (int64_t at = 0; at < nbytes && at < EARLY_NBYTES; at += 64)
        __builtin_prefetch(from + at, 0, 2);
}

/* Copies as memcpy does, which from 8 kB on may use one instruction. With that, some AMD processors take
   four times as long if, modulo the page size, the target lies less than a line after the source. */
ALWAYS_INLINE void copy_long(uint8_t *to, const uint8_t *from, int64_t nbytes)
{
    const uintptr_t behind = ((uintptr_t)to - (uintptr_t)from) % 4096;
    for (; behind > 0 && behind < 64 && nbytes > SAFE_NBYTES; nbytes -= SAFE_NBYTES) {
        memcpy(to, from, SAFE_NBYTES);
        to += SAFE_NBYTES, from += SAFE_NBYTES;
    }
    memcpy(to, from, (size_t)nbytes);
}

/* Copies a piece while prefetching one that is copied soon, so that the processor waits for neither. A
   piece of at most two pages is copied at once, and only the first lines of the next one are prefetched:
   working in steps, or requesting all its lines, takes longer than it saves. */
ALWAYS_INLINE void copy_and_fetch(uint8_t *to, const uint8_t *from, int64_t nbytes, const uint8_t *soon,
                                  int64_t soon_nbytes)
{
    int64_t at = 0, most = nbytes > TWO_PAGES ? EARLY_NBYTES : FIRST_NBYTES;
    int64_t early = soon_nbytes < most ? soon_nbytes : most;
    for (; nbytes > TWO_PAGES && at < early && at <= nbytes - STEP_NBYTES; at += STEP_NBYTES) {
        for (int64_t line = 0; line < STEP_NBYTES; line += 64)
            __builtin_prefetch(soon + at + line, 0, 2);
        memcpy(to + at, from + at, STEP_NBYTES);
    }
    if (at < early)
        fetch_early(soon + at, early - at);
    copy_long(to + at, from + at, nbytes - at);
}

static int64_t copy_pieces(File *file, const Worker *w, const Pieces *p, int64_t available)
{
    if (p->nbytes == NULL && p->position != NULL && p->unit <= FEW_NBYTES)
        return copy_small(file, w, p, available, p->unit);
    int64_t ahead = 0, fetched = 0; /* bytes prefetched from piece i on; pieces prefetched */
    for (int64_t i = 0; i < p->count; i++) {
        int64_t offset = p->offset[i], nbytes = nbytes_of_piece(p, i), soon = -1, soon_nbytes = 0;
        for (; fetched < p->count && (fetched <= i || ahead - nbytes < AHEAD_NBYTES); fetched++) {
            if (soon >= 0)
                fetch_early(file->map + soon, soon_nbytes);
            soon_nbytes = nbytes_of_piece(p, fetched);
            soon = p->offset[fetched] <= available - soon_nbytes ? p->offset[fetched] : -1;
            ahead += soon_nbytes;
        }
        ahead -= nbytes;
        if (is_stopped(file, w))
            return i;
        if (offset < 0)
            fill_piece(p, i);
        else if (offset > available - nbytes)
            return i;
        else
            copy_and_fetch(place_of_piece(p, i), file->map + offset, nbytes, file->map + soon,
                           soon < 0 ? 0 : soon_nbytes);
    }
    return p->count;
}

/* The end of the pieces from `begin` on that are adjacent in the file. */
static int64_t end_of_run(const Pieces *p, int64_t begin)
{
    int64_t end = begin + 1;
    while (end < p->count && end - begin < MAX_IOVEC &&
           p->offset[end] >= nbytes_of_piece(p, end - 1) &&
           p->offset[end] - nbytes_of_piece(p, end - 1) == p->offset[end - 1])
        end++;
    return end;
}

/* The bytes of a run; this does not overflow, because it lies in the file. */
static int64_t nbytes_of_run(const Pieces *p, int64_t begin, int64_t end)
{
    return p->offset[end - 1] - p->offset[begin] + nbytes_of_piece(p, end - 1);
}

static int read_run(const File *file, const Pieces *p, int64_t begin, int64_t end, int flags)
{
    struct iovec parts[MAX_IOVEC];
    int count = 0;
    if (file->is_far)
        return 0;
    for (int64_t i = begin; i < end; i++) {
        uint8_t *to = place_of_piece(p, i);
        size_t nbytes = (size_t)nbytes_of_piece(p, i);
        if (count && (uint8_t *)parts[count - 1].iov_base + parts[count - 1].iov_len == to)
            parts[count - 1].iov_len += nbytes;
        else
            parts[count++] = (struct iovec){to, nbytes};
    }
#ifdef RWF_NOWAIT
    ssize_t got = preadv2(file->fd, parts, count, p->offset[begin], flags);
#else
    (void)flags;
    ssize_t got = preadv(file->fd, parts, count, p->offset[begin]);
#endif
    return got == nbytes_of_run(p, begin, end);
}

static int read_run_slowly(File *file, const Worker *w, const Pieces *p, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        if (is_stopped(file, w) ||
            !read_fully(file, p->offset[i], place_of_piece(p, i), nbytes_of_piece(p, i)))
            return 0;
    return 1;
}

/* Reads run by run; returns the number of pieces before the first that cannot be read. `is_late`: the runs
   to read, NULL: all; or with `not_wait`, set for runs that would block, and are only requested. */
static int64_t read_runs(File *file, const Worker *w, const Pieces *p, uint8_t *is_late, int not_wait)
{
    for (int64_t i = 0, end; i < p->count; i = end) {
        end = i + 1;
        if (is_late && !not_wait && !is_late[i])
            continue;
        if (p->offset[i] < 0) {
            fill_piece(p, i);
            continue;
        }
        end = end_of_run(p, i);
        if (is_stopped(file, w))
            return i;
        if (read_run(file, p, i, end, not_wait))
            continue;
        if (not_wait)
            ask_for(file, p->offset[i], nbytes_of_run(p, i, end)), is_late[i] = 1;
        else if (!read_run_slowly(file, w, p, i, end))
            return i;
    }
    return p->count;
}

/* Reads at once what the page cache holds, and requests all the rest from the system before the first read
   that blocks, so that as many reads are in flight as the disk takes. */
static int64_t pread_pieces(File *file, const Worker *w, const Pieces *p)
{
#ifdef RWF_NOWAIT
    if (file->is_far)
        return read_runs(file, w, p, NULL, 0);
    uint8_t *is_late = calloc((size_t)p->count + 1, 1);
    int64_t done = is_late ? read_runs(file, w, p, is_late, RWF_NOWAIT) : 0;
    if (done == p->count && is_late && memchr(is_late, 1, (size_t)done) != NULL)
        done = read_runs(file, w, p, is_late, 0);
    free(is_late);
    return done;
#else
    return read_runs(file, w, p, NULL, 0);
#endif
}

/* Copies runs of bytes from one memory to another; the caller has checked their bounds. */
PUBLIC int64_t h5async_copy_runs(uint8_t *to, const uint8_t *from, const int64_t *to_begin,
                                 const int64_t *from_begin, const int64_t *nbytes, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(to + to_begin[i], from + from_begin[i], (size_t)nbytes[i]);
    return count;
}
