/* Byte ranges of a file: whether they can be had at once, asking for them, reading them. */

static int64_t mappable_nbytes(const File *file)
{
    struct stat status;
    if (file->map == NULL || file->io == IO_PREAD || fstat(file->fd, &status) != 0)
        return 0;
    return status.st_size < file->map_nbytes ? status.st_size : file->map_nbytes;
}

/* Whether one byte can be had without waiting for a disk; not so where the system cannot tell. */
static int is_cached(const File *file, int64_t offset)
{
#ifdef RWF_NOWAIT
    uint8_t byte;
    struct iovec one = {&byte, 1};
    return preadv2(file->fd, &one, 1, offset, RWF_NOWAIT) == 1;
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

static int read_fully(const File *file, int64_t offset, uint8_t *out, int64_t nbytes)
{
    while (nbytes > 0) {
        ssize_t count = pread(file->fd, out, (size_t)nbytes, offset);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return 0;
        offset += count, out += count, nbytes -= count;
    }
    return 1;
}

static void fill_elements(const uint8_t *fill, int64_t itemsize, uint8_t *out, int64_t nbytes)
{
    for (int64_t at = 0; at + itemsize <= nbytes; at += itemsize)
        memcpy(out + at, fill, (size_t)itemsize);
}
