/* Reads byte ranges of a file, checks whether they are cached, and asks the system to cache them. */

#if defined(__APPLE__)
#define MODIFIED(status) (status).st_mtimespec
#define STATUS_CHANGED(status) (status).st_ctimespec
#else
#define MODIFIED(status) (status).st_mtim
#define STATUS_CHANGED(status) (status).st_ctim
#endif

static int64_t in_ns(struct timespec t)
{
    return (int64_t)((uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec); /* wraps in 2262 */
}

/* Whether a File or a Source, as indexed, matches the `struct stat` of a file. */
#define IS_SAME_FILE(known, status)                                                               \
    ((int64_t)(status).st_dev == (known)->device && (int64_t)(status).st_ino == (known)->inode)
#define IS_SAME_STATE(known, status)                                                              \
    (IS_SAME_FILE(known, status) && (status).st_size == (known)->nbytes &&                        \
     in_ns(MODIFIED(status)) == (known)->modified_ns &&                                           \
     in_ns(STATUS_CHANGED(status)) == (known)->changed_ns)

/* Whether the file is unchanged since it was indexed, by device, inode, size and times. */
static int is_as_indexed(File *file)
{
    struct stat status;
    if (file->nbytes < 0 || (file->fd < 0 && file->path == NULL))
        return 1;
    int is_there = file->fd < 0 ? stat(file->path, &status) : fstat(file->fd, &status);
    if (is_there == 0 &&
        (file->mirror ? IS_SAME_FILE(file, status) && status.st_size == file->map_nbytes
                      : IS_SAME_STATE(file, status)))
        return 1;
    file->event = CHANGED;
    return 0;
}

/* The size of a file that was just compared with its index, and so has the indexed size. */
static int64_t nbytes_of_file(const File *file)
{
    struct stat status;
    if (file->fd < 0 && file->path == NULL)
        return file->map_nbytes;
    if (file->nbytes >= 0)
        return file->nbytes;
    return fstat(file->fd, &status) == 0 ? status.st_size : 0;
}

static int64_t mappable_nbytes(const File *file)
{
    int64_t nbytes = nbytes_of_file(file);
    if (file->map == NULL || file->io == IO_PREAD)
        return 0;
    return nbytes < file->map_nbytes ? nbytes : file->map_nbytes;
}

/* Whether the reader is being closed, so that the rest is not needed. */
static int is_stopped(File *file, const Worker *w)
{
    if (w->stop == NULL || *w->stop == 0)
        return 0;
    file->event = STOPPED;
    return 1;
}

#ifdef RWF_NOWAIT
/* Whether mincore can be trusted for the file's map. For files that the process neither owns nor may write,
   Linux reports all pages as resident, even far beyond the end; harmless if memory will soon hold them all. */
static int map_tells(const File *file)
{
    const int64_t page_nbytes = sysconf(_SC_PAGESIZE);
    if (file->map_nbytes / page_nbytes <= sysconf(_SC_PHYS_PAGES) / 4)
        return 1;
    const int64_t far_behind = (file->map_nbytes / LARGE_PAGE + 2) * LARGE_PAGE;
    uint8_t is_there = 1;
    void *page = mmap(NULL, (size_t)page_nbytes, PROT_READ, MAP_SHARED, file->fd, far_behind);
    if (page == MAP_FAILED)
        return 0;
    int is_told = mincore(page, 1, &is_there) == 0 && !(is_there & 1);
    munmap(page, (size_t)page_nbytes);
    return is_told;
}
#endif

/* Whether one byte can be read without waiting for a disk. In-memory and stacked file systems (tmpfs,
   overlay) do not support RWF_NOWAIT; if the file is mapped, mincore may tell. */
static int is_cached(const File *file, int64_t offset)
{
#ifdef RWF_NOWAIT
    uint8_t byte;
    struct iovec one = {&byte, 1};
    ssize_t got = preadv2(file->fd, &one, 1, offset, RWF_NOWAIT);
    if (got >= 0 || errno != EOPNOTSUPP)
        return got == 1;
    int64_t page = offset & -(int64_t)sysconf(_SC_PAGESIZE);
    return file->map != NULL && offset < file->map_nbytes &&
           mincore((uint8_t *)file->map + page, 1, &byte) == 0 && (byte & 1) && map_tells(file);
#else
    (void)file, (void)offset;
    return 0;
#endif
}

static void ask_for(const File *file, int64_t offset, int64_t nbytes)
{
#ifdef POSIX_FADV_WILLNEED
    if (offset < 0 || offset > INT64_MAX - ADVISED_NBYTES - nbytes)
        return;
    for (; nbytes > 0; offset += ADVISED_NBYTES, nbytes -= ADVISED_NBYTES)
        posix_fadvise(file->fd, offset, nbytes < ADVISED_NBYTES ? nbytes : ADVISED_NBYTES,
                      POSIX_FADV_WILLNEED);
#else
    (void)file, (void)offset, (void)nbytes;
#endif
}

/* A range of bytes to ask for. */
typedef struct {
    int64_t begin, end, num_long; /* num_long: earlier runs that were too long to ask for */
} Span;

/* Add bytes to the pending span, first asking for the span if they do not follow it closely. A long run is
   not asked for: when it is read, the system itself reads ahead, in larger pages. For far sources, ranges
   missing from the mirror are listed in `asked` instead. */
static void ask_later(const File *file, Span *span, int64_t offset, int64_t nbytes)
{
    if (file->asked != NULL) {
        Asked *asked = file->asked;
        int is_missing = nbytes > 0 && !mirror_has(file->mirror, offset, nbytes);
        if (is_missing && asked->count < asked->room)
            asked->ranges[asked->count] = (Fetched){.offset = offset, .nbytes = nbytes};
        asked->count += is_missing;
        return;
    }
    if (nbytes > 0 && offset > INT64_MAX - nbytes)
        return;
    if (nbytes == 0 || offset < span->begin || offset - CLOSE_NBYTES > span->end) {
        if (span->end - span->begin < LONG_RUN_NBYTES)
            ask_for(file, span->begin, span->end - span->begin);
        else
            span->num_long++;
        span->begin = span->end = offset;
    }
    span->end = offset + nbytes > span->end ? offset + nbytes : span->end;
}

/* Set `at` to the fetched bytes at an offset, and return how many there are; 0 if none were fetched. */
static int64_t find_fetched(const File *file, int64_t offset, const uint8_t **at)
{
    int64_t low = -1, high = file->num_fetched;
    FIND_LAST(low, high, middle, file->fetched[middle].offset <= offset)
    if (low < 0)
        return 0;
    const Fetched *found = &file->fetched[low];
    int64_t inside = offset - found->offset;
    *at = found->data + (inside < found->nbytes ? inside : 0);
    return inside < found->nbytes ? found->nbytes - inside : 0;
}

/* Contiguous bytes in the mirror or in a fetched range; NULL if neither has all of them. */
static const uint8_t *fetched_at(const File *file, int64_t offset, int64_t nbytes)
{
    const uint8_t *at = NULL;
    if (mirror_has(file->mirror, offset, nbytes))
        return file->mirror->map + offset;
    return file->is_far && find_fetched(file, offset, &at) >= nbytes ? at : NULL;
}

static int read_fetched(File *file, int64_t offset, uint8_t *out, int64_t nbytes)
{
    const uint8_t *at = fetched_at(file, offset, nbytes);
    while (nbytes > 0) {
        int64_t count = at ? nbytes : find_fetched(file, offset, &at);
        if (count == 0) {
            file->failed_at = offset, file->error = 0;
            return 0;
        }
        count = count < nbytes ? count : nbytes;
        memcpy(out, at, (size_t)count);
        offset += count, out += count, nbytes -= count, at = NULL;
    }
    return 1;
}

static int read_fully(File *file, int64_t offset, uint8_t *out, int64_t nbytes)
{
    if (file->is_far)
        return read_fetched(file, offset, out, nbytes);
    while (nbytes > 0) {
        ssize_t count = pread(file->fd, out, (size_t)nbytes, offset);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0) {
            file->failed_at = offset, file->error = count < 0 ? errno : 0;
            return 0;
        }
        offset += count, out += count, nbytes -= count;
    }
    return 1;
}

static void fill_elements(const uint8_t *fill, int64_t itemsize, uint8_t *out, int64_t nbytes)
{
    for (int64_t at = 0; at + itemsize <= nbytes; at += itemsize)
        memcpy(out + at, fill, (size_t)itemsize);
}
