/* The files that a reader reads from: opened when first needed, and kept as far as a budget goes.

   A source is open as a descriptor, a memory map, or both. Where a reader has more sources than
   descriptors, a mapped one gives its descriptor back at once, and its state is asked for by path.
   A source that cannot be opened, or is not what was indexed, is refused: the Python implementation
   reads from it, or has the words. One that has to be opened anew while several threads use it is
   stale: it is refused until the last of them has released it. A file that a writer has open for SWMR
   changes all the time: its state is not compared until the writer has ended. */

enum { PATH_CHECKED = -2 }; /* for a descriptor: it was given back */

typedef struct Source {
    const char *path;    /* NULL: memory, which `map` is */
    const uint8_t *map;
    int64_t map_nbytes;
    int64_t device, inode, nbytes, modified_ns, changed_ns; /* as indexed */
    int32_t may_map, fd;
    int64_t is_far; /* it is no file here; `path` and `map` are NULL */
    _Atomic(const Mirror *) mirror; /* of a far one; Python keeps all that it has set */
    int32_t is_open, users, has_swmr_writer, is_stale;
    _Atomic int32_t was_changed; /* since it was indexed: it may be again, at any time */
    _Atomic int32_t was_cached, uses; /* was_cached: how often in turn; below 0: it was not */
    _Atomic int64_t checked_ns; /* when it was last found to be what was indexed; 0: it may not be */
    struct Source *newer, *older; /* among those that are open and have no users */
} Source;

typedef struct {
    /* Set by Python, which keeps the table; the first members of its rows, too: */
    Source *sources;
    int64_t count, most_open, most_files; /* stay open; of these, with a descriptor: both at least 1,
                                             beside those in use */
    int64_t io, gives_back;               /* gives_back: descriptors of mapped sources */
    int64_t trusted_ns; /* for so long after it was checked, a source need not be for kept chunks,
                           unless it has changed: it may have been read amid a write */
    /* The core's: */
    int64_t num_open, num_files; /* num_open: without users too */
    pthread_mutex_t lock;
    Source *newest, *oldest;
} Sources;

static void close_source(Source *s)
{
    if (s->map != NULL)
        munmap((void *)(uintptr_t)s->map, (size_t)s->map_nbytes);
    if (s->fd >= 0)
        close(s->fd);
    s->map = NULL, s->fd = -1, s->is_open = 0, s->is_stale = 0;
}

/* Close a source that nobody uses, and that is in no list. Holds the lock. */
static void drop_source(Sources *all, Source *s)
{
    all->num_open--;
    all->num_files -= s->fd >= 0;
    close_source(s);
}

/* Whether a writer has the HDF5 file open for SWMR: the file consistency flags of its superblock
   say so, version 3 ("Disk Format: Level 0A" of the HDF5 file format specification). */
static int has_swmr_writer(int fd, int64_t nbytes)
{
    static const uint8_t signature[8] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
    uint8_t head[12];
    for (int64_t begin = 0; begin < nbytes && begin < INT64_MAX / 2; begin = begin ? 2 * begin : 512) {
        ssize_t count = pread(fd, head, sizeof head, begin);
        if (count < (ssize_t)sizeof signature)
            return 0;
        if (memcmp(head, signature, 8) == 0)
            return count == sizeof head && head[8] >= 3 && (head[11] & 4);
    }
    return 0;
}

/* Do `work`, which reads a file; 0: what was read is worth nothing, and the event says why. A file that
   was changed before, too, shows it afterwards. */
static int read_guarded(File *file, void (*work)(void *), void *data)
{
    if (!guarded(file, work, data))
        file->event = FAULTED;
    else if (file->event == NO_EVENT && is_as_indexed(file) && file->nbytes == -1 && file->fd >= 0 &&
             !has_swmr_writer(file->fd, INT64_MAX))
        file->event = CHANGED; /* the writer has ended, and left the file for good */
    return file->event == NO_EVENT;
}

/* Open and map what is known of a source; 0 where it cannot be, or is another file now. */
static int open_and_map(const Sources *all, Source *opened)
{
    struct stat status;
    if (fstat(opened->fd, &status) != 0 || !S_ISREG(status.st_mode) || !IS_SAME_FILE(opened, status))
        return 0;
    opened->has_swmr_writer = has_swmr_writer(opened->fd, status.st_size);
    if (!opened->has_swmr_writer && !IS_SAME_STATE(opened, status))
        return 0;
    if (!opened->may_map || status.st_size == 0)
        return 1;
    void *map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, opened->fd, 0);
    if (map == MAP_FAILED)
        return all->io != IO_MAP;
    opened->map = map, opened->map_nbytes = status.st_size;
    if (all->gives_back && !opened->has_swmr_writer) {
        close(opened->fd);
        opened->fd = PATH_CHECKED;
    }
    return 1;
}

static int open_source(const Sources *all, Source *opened)
{
    opened->map = NULL;
    opened->fd = open(opened->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* nothing comes of a pipe */
    opened->is_open = opened->fd >= 0;
    if (opened->is_open && open_and_map(all, opened))
        return 1;
    if (opened->is_open)
        close_source(opened);
    return 0;
}

/* Close sources that nobody uses, those first that were out of use for longest. Holds the lock. */
static void close_surplus(Sources *all)
{
    for (Source *s = all->oldest, *newer; s != NULL; s = newer) {
        int are_too_many = all->num_open > all->most_open;
        newer = s->newer;
        if (!are_too_many && all->num_files <= all->most_files)
            return;
        if (!are_too_many && s->fd < 0)
            continue; /* to close it gives no descriptor back */
        UNLINK(all, s);
        drop_source(all, s);
    }
}

/* Open a source that is not open; 0 where it is refused. Holds the lock, but not meanwhile. */
static int open_shared(Sources *all, Source *s)
{
    Source opened;
    memcpy(&opened, s, sizeof opened);
    for (int tries = 0;; tries++) {
        errno = 0;
        pthread_mutex_unlock(&all->lock);
        int is_good = open_source(all, &opened), error = errno;
        pthread_mutex_lock(&all->lock);
        if (is_good)
            break;
        if ((error != EMFILE && error != ENFILE) || tries)
            return 0;
        /* The rest of the program took descriptors meanwhile. */
        all->most_files = all->num_files > 1 ? all->num_files / 2 : 1;
        close_surplus(all);
    }
    if (s->is_open) { /* another thread was faster */
        close_source(&opened);
        return 1;
    }
    if (s->nbytes != opened.nbytes || s->modified_ns != opened.modified_ns ||
        s->changed_ns != opened.changed_ns || s->may_map != opened.may_map) {
        close_source(&opened); /* it was opened as what it was before */
        return 0;
    }
    s->map = opened.map, s->map_nbytes = opened.map_nbytes, s->fd = opened.fd;
    s->has_swmr_writer = opened.has_swmr_writer, s->is_open = 1;
    all->num_open++;
    all->num_files += s->fd >= 0;
    return 1;
}

/* Note one user more, and describe the file. Holds the lock. */
static void use_source(Sources *all, Source *s, File *file)
{
    if (s->users++ == 0 && (s->newer || s->older || all->newest == s))
        UNLINK(all, s);
    *file = (File){.fd = s->fd, .io = s->map || all->io != IO_MAP ? (int32_t)all->io : IO_PREAD,
                   .map = s->map, .map_nbytes = s->map_nbytes, .path = s->path,
                   .device = s->device, .inode = s->inode,
                   .nbytes = s->has_swmr_writer ? -1 : s->nbytes, .modified_ns = s->modified_ns,
                   .changed_ns = s->changed_ns};
}

static void forget_mirror(File *file)
{
    file->mirror = NULL, file->path = NULL, file->map_nbytes = file->nbytes;
}

/* Give a source, open until it is released, and its file; NULL where it is refused. */
static Source *acquire_source(Sources *all, int64_t number, File *file)
{
    Source *s;
    if (number < 0 || number >= all->count)
        return NULL;
    s = &all->sources[number];
    if (s->path == NULL) {
        const Mirror *m = s->mirror;
        *file = (File){.fd = PATH_CHECKED, .io = s->is_far ? IO_PREAD : IO_MAP, .map = s->map,
                       .map_nbytes = s->is_far ? s->nbytes : s->map_nbytes, .is_far = s->is_far};
        file->nbytes = s->is_far ? s->nbytes : -1;
        if (m != NULL)
            file->mirror = m, file->map_nbytes = m->map_nbytes, file->path = m->path,
            file->device = m->device, file->inode = m->inode;
        return s;
    }
    pthread_mutex_lock(&all->lock);
    int is_good = (s->is_open || open_shared(all, s)) && !s->is_stale;
    if (is_good) {
        use_source(all, s, file);
        close_surplus(all);
    }
    pthread_mutex_unlock(&all->lock);
    return is_good ? s : NULL;
}

/* After an event, what was read is worth nothing. A file that has changed stays open, because it may
   have another name by now, or none: see the function below. One of which a page cannot be had, or
   whose writer has ended, is opened anew when it is needed again. A mirror is not used any more,
   unless another one took its place meanwhile. */
static void release_source(Sources *all, Source *s, const File *file)
{
    const int64_t event = file->event;
    if (s->path == NULL) {
        const Mirror *used = file->mirror;
        if (event == CHANGED || event == FAULTED)
            atomic_compare_exchange_strong(&s->mirror, &used, NULL);
        return;
    }
    pthread_mutex_lock(&all->lock);
    if (event != NO_EVENT)
        s->checked_ns = 0;
    if (event == FAULTED)
        s->may_map = 0;
    if (event == FAULTED || (event == CHANGED && s->has_swmr_writer))
        s->is_stale = 1;
    if (--s->users == 0 && s->is_stale) {
        drop_source(all, s);
    } else if (s->users == 0) {
        PUT_NEWEST(all, s);
        close_surplus(all);
    }
    pthread_mutex_unlock(&all->lock);
}

PUBLIC int64_t h5async_open_sources(Sources *sources)
{
    return init_short_lock(&sources->lock) == 0;
}

/* Nobody uses them any more. */
PUBLIC int64_t h5async_close_sources(Sources *sources)
{
    for (int64_t i = 0; i < sources->count; i++)
        if (sources->sources[i].is_open)
            close_source(&sources->sources[i]);
    sources->newest = sources->oldest = NULL;
    sources->num_open = sources->num_files = 0;
    return 1;
}

/* Return another descriptor of an open source that is the same file; -1: there is none. */
static int another_descriptor(Sources *all, const Source *like)
{
    int fd = -1;
    pthread_mutex_lock(&all->lock);
    for (int64_t i = 0; i < all->count && fd < 0; i++) {
        const Source *s = &all->sources[i];
        if (s->is_open && s->fd >= 0 && s->device == like->device && s->inode == like->inode)
            fd = fcntl(s->fd, F_DUPFD_CLOEXEC, 0);
    }
    pthread_mutex_unlock(&all->lock);
    return fd;
}

/* Open a source for one thread, which closes it by the function below in any case. It is opened by
   its path or, where it does not lie there any more, as it is open elsewhere. Returns 0, or why it
   cannot be used: what errno said, or below 0; CANNOT_MAP: the error of the file has errno. */
enum { IS_REPLACED = -1, CANNOT_MAP = -2 };

PUBLIC int64_t h5async_open_again(Sources *all, int64_t number, File *file)
{
    struct stat status;
    if (number < 0 || number >= all->count || (all->sources[number].path == NULL &&
                                               !all->sources[number].is_far))
        return EINVAL;
    if (all->sources[number].is_far) {
        acquire_source(all, number, file); /* of which there is nothing to be released */
        forget_mirror(file);               /* it may change meanwhile */
        return 0;
    }
    pthread_mutex_lock(&all->lock);
    Source s;
    memcpy(&s, &all->sources[number], sizeof s);
    pthread_mutex_unlock(&all->lock);
    *file = (File){.io = (int32_t)all->io, .path = s.path, .device = s.device, .inode = s.inode,
                   .nbytes = s.nbytes, .modified_ns = s.modified_ns, .changed_ns = s.changed_ns};
    file->fd = open(s.path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* nothing comes of a pipe */
    int64_t error = file->fd < 0 || fstat(file->fd, &status) != 0 ? errno : 0;
    if (!error && !IS_SAME_FILE(&s, status))
        error = IS_REPLACED;
    int fd = error ? another_descriptor(all, &s) : -1;
    if (fd >= 0) {
        if (file->fd >= 0)
            close(file->fd);
        file->fd = fd;
        error = fstat(fd, &status) == 0 ? 0 : errno;
    }
    if (error)
        return error;
    if (has_swmr_writer(file->fd, status.st_size))
        file->nbytes = -1;
    if (!s.may_map && (all->io != IO_MAP || status.st_size > 0))
        return 0;
    void *map = MAP_FAILED;
    errno = EINVAL;
    if (status.st_size > 0)
        map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, file->fd, 0);
    if (map != MAP_FAILED)
        file->map = map, file->map_nbytes = status.st_size;
    else
        file->error = errno;
    return map == MAP_FAILED && all->io == IO_MAP ? CANNOT_MAP : 0;
}

PUBLIC int64_t h5async_close_again(File *file)
{
    if (file->map != NULL)
        munmap((void *)(uintptr_t)file->map, (size_t)file->map_nbytes);
    if (file->fd >= 0)
        close(file->fd);
    file->map = NULL, file->fd = -1;
    return 1;
}

/* Say that a file that was changed still holds what was indexed. A map of its former size is given
   up, and then the file is opened anew. */
PUBLIC int64_t h5async_restamp(Sources *sources, int64_t number, int64_t nbytes, int64_t modified_ns,
                               int64_t changed_ns, int32_t may_map)
{
    if (number < 0 || number >= sources->count)
        return 0;
    Source *s = &sources->sources[number];
    pthread_mutex_lock(&sources->lock);
    int is_fit = !s->has_swmr_writer && (s->map ? s->map_nbytes == nbytes : !may_map);
    s->nbytes = nbytes, s->modified_ns = modified_ns, s->changed_ns = changed_ns;
    s->checked_ns = 0;
    s->was_changed = 1;
    s->may_map = may_map;
    if (s->is_open && !is_fit && s->users) {
        s->is_stale = 1;
    } else if (s->is_open && !is_fit) {
        UNLINK(sources, s);
        drop_source(sources, s);
    }
    pthread_mutex_unlock(&sources->lock);
    return 1;
}

/* Open a source, so that it is the one that was indexed; 0 where it is refused. */
PUBLIC int64_t h5async_open_ahead(Sources *sources, int64_t number)
{
    File file;
    Source *s = acquire_source(sources, number, &file);
    if (s != NULL)
        release_source(sources, s, &file);
    return s != NULL;
}
