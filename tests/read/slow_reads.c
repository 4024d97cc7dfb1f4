/* Preloaded: reads of files below $SLOW_FOLDER are counted, and wait while a gate is closed.

   That is storage as slow as a test wants it. What may not wait for a disk (RWF_NOWAIT) finds
   nothing in the page cache there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int is_closed, begun, waiting;

#define EXPORT __attribute__((visibility("default")))

EXPORT void slow_gate(int close)
{
    pthread_mutex_lock(&lock);
    is_closed = close;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Reads that have begun so far. */
EXPORT int slow_begun(void)
{
    pthread_mutex_lock(&lock);
    int count = begun;
    pthread_mutex_unlock(&lock);
    return count;
}

/* Waits until so many reads wait at the gate. */
EXPORT void slow_await(int count)
{
    pthread_mutex_lock(&lock);
    while (waiting < count)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static int is_slow(int fd)
{
    char name[64], path[4096];
    const char *folder = getenv("SLOW_FOLDER");
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = folder == NULL ? -1 : readlink(name, path, sizeof path);
    size_t wanted = folder == NULL ? 0 : strlen(folder);
    return length > (ssize_t)wanted && memcmp(path, folder, wanted) == 0 && path[wanted] == '/';
}

static void wait_at_gate(int fd)
{
    if (!is_slow(fd))
        return;
    pthread_mutex_lock(&lock);
    begun++, waiting++;
    pthread_cond_broadcast(&changed);
    while (is_closed)
        pthread_cond_wait(&changed, &lock);
    waiting--;
    pthread_mutex_unlock(&lock);
}

#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define PREAD(name, offset_type)                                                                  \
    EXPORT ssize_t name(int fd, void *to, size_t nbytes, offset_type offset)                      \
    {                                                                                             \
        NEXT(name);                                                                               \
        wait_at_gate(fd);                                                                         \
        return next(fd, to, nbytes, offset);                                                      \
    }
#define PREADV(name, offset_type)                                                                 \
    EXPORT ssize_t name(int fd, const struct iovec *to, int count, offset_type offset)            \
    {                                                                                             \
        NEXT(name);                                                                               \
        wait_at_gate(fd);                                                                         \
        return next(fd, to, count, offset);                                                       \
    }
#define PREADV2(name, offset_type)                                                                \
    EXPORT ssize_t name(int fd, const struct iovec *to, int count, offset_type offset, int flags) \
    {                                                                                             \
        NEXT(name);                                                                               \
        if (flags & RWF_NOWAIT && is_slow(fd))                                                    \
            return errno = EAGAIN, -1;                                                            \
        wait_at_gate(fd);                                                                         \
        return next(fd, to, count, offset, flags);                                                \
    }

EXPORT ssize_t read(int fd, void *to, size_t nbytes)
{
    NEXT(read);
    wait_at_gate(fd);
    return next(fd, to, nbytes);
}

PREAD(pread, off_t)
PREAD(pread64, off64_t)
PREADV(preadv, off_t)
PREADV(preadv64, off64_t)
PREADV2(preadv2, off_t)
PREADV2(preadv64v2, off64_t)
