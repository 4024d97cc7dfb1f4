/* The files that a reader reads from: opened on first use, and kept open within a budget.

   A source is open as a file descriptor, a memory map, or both. If a reader has more sources than
   descriptors, a mapped one gives its descriptor back at once, and its state is checked by path. A
   source that cannot be opened, or is not as indexed, is refused: Python then reads from it, or reports
   the error. One that has to be reopened while several threads use it is stale: it is refused until the
   last of them has released it. A file that a SWMR writer has open changes all the time: its state is
   not compared until the writer has closed it. */

enum { PATH_CHECKED = -2 }; /* in place of a descriptor that was given back */

typedef struct Source {
    const char *path;    /* NULL: memory, which is `map`; or far */
    const uint8_t *map;
    int64_t map_nbytes;
    int64_t device, inode, nbytes, modified_ns, changed_ns; /* as indexed */
    int32_t may_map, fd;
    int64_t is_far; /* it is not a local file; `path` and `map` are NULL */
    _Atomic(const Mirror *) mirror; /* of a far one; Python keeps all that it ever set alive */
    int32_t is_open, users, has_swmr_writer, is_stale;
    _Atomic int32_t was_changed; /* since it was indexed; it may change again at any time */
    _Atomic int32_t was_cached, uses; /* was_cached: how many times in a row; negative: it was not */
    _Atomic int64_t checked_ns; /* when it was last found to be as indexed; 0: it may not be */
    struct Source *newer, *older; /* in the list of open sources without users */
} Source;

typedef struct {
    /* Set by Python, which owns the table, and sets the first members of its rows, too: */
    Source *sources;
    int64_t count, most_open, most_files; /* maximum that stay open, and of these with a descriptor:
                                             both at least 1; more may be in use */
    int64_t io, gives_back;               /* gives_back: descriptors of mapped sources */
    int64_t trusted_ns; /* for this long after a check, kept chunks are used without another one, unless
                           the source has ever changed: it may have been read amid a write */
    /* The core's: */
    int64_t num_open, num_files; /* num_open: including those without users */
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

/* Closes a source that has no users, and is in no list. Called with the lock held. */
static void drop_source(Sources *all, Source *s)
{
    all->num_open--;
    all->num_files -= s->fd >= 0;
    close_source(s);
}

/* Whether a writer has the HDF5 file open for SWMR, by the file consistency flags of its superblock,
   version 3 ("Disk Format: Level 0A" in the HDF5 file format specification). */
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

/* Does `work`, which reads a file. Returns 0 if the result is invalid; the event says why. It is enough
   to check the file afterwards: if it had changed before, it shows then, too. */
static int read_guarded(File *file, void (*work)(void *), void *data)
{
    if (!guarded(file, work, data))
        file->event = FAULTED;
    else if (file->event == NO_EVENT && is_as_indexed(file) && file->nbytes == -1 && file->fd >= 0 &&
             !has_swmr_writer(file->fd, INT64_MAX))
        file->event = CHANGED; /* the writer has closed the file */
    return file->event == NO_EVENT;
}

/* Checks and maps the file of a source; 0: it is not the one that was indexed, or cannot be mapped. */
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
    opened->fd = open(opened->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not block */
    opened->is_open = opened->fd >= 0;
    if (opened->is_open && open_and_map(all, opened))
        return 1;
    if (opened->is_open)
        close_source(opened);
    return 0;
}

/* Closes surplus sources without users, least recently used first. Called with the lock held. */
static void close_surplus(Sources *all)
{
    for (Source *s = all->oldest, *newer; s != NULL; s = newer) {
        int are_too_many = all->num_open > all->most_open;
        newer = s->newer;
        if (!are_too_many && all->num_files <= all->most_files)
            return;
        if (!are_too_many && s->fd < 0)
            continue; /* closing it would free no descriptor */
        UNLINK(all, s);
        drop_source(all, s);
    }
}

/* Opens a source that is not open; 0: refused. Called with the lock held; releases it meanwhile. */
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
        close_source(&opened); /* its state was updated meanwhile: see h5async_restamp */
        return 0;
    }
    s->map = opened.map, s->map_nbytes = opened.map_nbytes, s->fd = opened.fd;
    s->has_swmr_writer = opened.has_swmr_writer, s->is_open = 1;
    all->num_open++;
    all->num_files += s->fd >= 0;
    return 1;
}

/* Adds a user, and describes the file. Called with the lock held. */
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

/* Returns a source, open until it is released, and its file; NULL: it is refused. */
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

/* Releases a source. After an event, whatever was read is invalid. A file that has changed stays open,
   because it may have been renamed or removed: see h5async_open_again. One with an unreadable page, or
   whose SWMR writer has closed it, is reopened when it is next needed. A mirror is no longer used,
   unless another one has replaced it meanwhile. */
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

/* Closes all sources; none may have users. */
PUBLIC int64_t h5async_close_sources(Sources *sources)
{
    for (int64_t i = 0; i < sources->count; i++)
        if (sources->sources[i].is_open)
            close_source(&sources->sources[i]);
    sources->newest = sources->oldest = NULL;
    sources->num_open = sources->num_files = 0;
    return 1;
}

/* Returns another descriptor of an open source that is the same file; -1: there is none. */
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

/* Opens a source for one thread, which has to call h5async_close_again in any case. It is opened by its
   path or, if the file is no longer there, by an open descriptor of it. Returns 0, an errno, or one of
   the numbers below, if it cannot be used; for CANNOT_MAP, `file->error` has the errno. */
enum { IS_REPLACED = -1, CANNOT_MAP = -2 };

PUBLIC int64_t h5async_open_again(Sources *all, int64_t number, File *file)
{
    struct stat status;
    if (number < 0 || number >= all->count || (all->sources[number].path == NULL &&
                                               !all->sources[number].is_far))
        return EINVAL;
    if (all->sources[number].is_far) {
        acquire_source(all, number, file); /* it need not be released */
        forget_mirror(file);               /* the mirror may change meanwhile */
        return 0;
    }
    pthread_mutex_lock(&all->lock);
    Source s;
    memcpy(&s, &all->sources[number], sizeof s);
    pthread_mutex_unlock(&all->lock);
    *file = (File){.io = (int32_t)all->io, .path = s.path, .device = s.device, .inode = s.inode,
                   .nbytes = s.nbytes, .modified_ns = s.modified_ns, .changed_ns = s.changed_ns};
    file->fd = open(s.path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not block */
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

/* Records that a changed file still holds what was indexed, with its new state. It is reopened if a
   SWMR writer had it open, or if its map (or the lack of one) does not fit that state. */
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

/* Opens a source ahead of use, so that it is the file that was indexed; 0: it is refused. */
PUBLIC int64_t h5async_open_ahead(Sources *sources, int64_t number)
{
    File file;
    Source *s = acquire_source(sources, number, &file);
    if (s != NULL)
        release_source(sources, s, &file);
    return s != NULL;
}
