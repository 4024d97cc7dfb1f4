/* A web server for benches: fast enough to show what clients cost. It knows ranges, one ETag with
   If-Match, a delay before each answer, and a rate of answers: those beyond it wait in line.

   ./rangeserver PATH DELAY_US RATE prints its port, and serves a file by any name, or the files of a
   folder, on the loopback, until its standard input ends. /-/counts has the numbers of requests and
   of bytes so far. For Linux. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <signal.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MOST_HEAD = 8192, MOST_ANSWERS = 65536, MOST_FD = 16384 };

typedef struct {
    char *name;
    const char *content;
    int64_t nbytes;
} File;

typedef struct {
    char request[MOST_HEAD], head[512];
    const char *content;
    int64_t filled, head_nbytes, head_at, begin, end, due_ns;
    int is_waiting, is_writing;
} Connection;

static Connection connections[MOST_FD];
static int waiting[MOST_ANSWERS];
static unsigned first_waiting, end_waiting;
static const char *folder;
static File *files;
static int file_count;
static int64_t delay_ns, gap_ns, last_ns, asked, sent;
static int poller;
static const char *tag = "\"tag\"";

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void wait_for(int fd, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.fd = fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, fd, &event);
}

/* Write what is left of an answer, as far as the connection takes it. */
static void write_answer(int fd)
{
    Connection *c = &connections[fd];
    while (c->head_at < c->head_nbytes || c->begin < c->end) {
        struct iovec parts[2] = {{c->head + c->head_at, (size_t)(c->head_nbytes - c->head_at)},
                                 {(char *)c->content + c->begin, (size_t)(c->end - c->begin)}};
        ssize_t n = writev(fd, parts, 2);
        if (n < 0 && errno == EAGAIN) {
            if (!c->is_writing)
                wait_for(fd, EPOLLOUT);
            c->is_writing = 1;
            return;
        }
        if (n < 0) {
            close(fd);
            return;
        }
        int64_t of_head = n < c->head_nbytes - c->head_at ? n : c->head_nbytes - c->head_at;
        c->head_at += of_head;
        c->begin += n - of_head;
    }
    if (c->is_writing)
        wait_for(fd, EPOLLIN);
    c->is_writing = 0;
}

/* Map a file of the folder, if it is there. */
static const File *add(const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s%s%s", folder, *name ? "/" : "", name);
    int file = open(path, O_RDONLY);
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0 || !S_ISREG(status.st_mode))
        return NULL;
    void *content = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    files = realloc(files, (size_t)(file_count + 1) * sizeof *files);
    files[file_count] = (File){strdup(name), content, status.st_size};
    return &files[file_count++];
}

/* Return the file that a request names; NULL: there is none. A single file has every name. */
static const File *find(const char *request)
{
    const char *begin = strchr(request, '/'), *end = begin ? strpbrk(begin, " ?") : NULL;
    char name[1024];
    if (!end || end - begin > (int)sizeof name)
        return NULL;
    snprintf(name, sizeof name, "%.*s", (int)(end - begin - 1), begin + 1);
    for (int i = 0; i < file_count; i++)
        if (!*files[i].name || !strcmp(files[i].name, name))
            return &files[i];
    return add(name);
}

static void read_request(int fd)
{
    char counts[64];
    Connection *c = &connections[fd];
    ssize_t n = read(fd, c->request + c->filled, sizeof c->request - 1 - (size_t)c->filled);
    if (n <= 0) {
        if (n == 0 || errno != EAGAIN)
            close(fd);
        return;
    }
    c->filled += n;
    c->request[c->filled] = 0;
    if (!strstr(c->request, "\r\n\r\n"))
        return;
    c->filled = 0;
    if (strstr(c->request, "/-/counts")) {
        c->begin = c->end = c->head_at = 0;
        int n = snprintf(counts, sizeof counts, "%ld %ld", asked, sent);
        c->head_nbytes = sprintf(c->head, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", n, counts);
        write_answer(fd);
        return;
    }
    const File *file = find(c->request);
    const char *range = strcasestr(c->request, "\r\nrange: bytes=");
    const char *match = strcasestr(c->request, "\r\nif-match: ");
    int is_other = match && strncmp(match + 12, tag, strlen(tag)) != 0;
    int64_t nbytes = file ? file->nbytes : 0, begin = 0, last = nbytes - 1;
    if (range && sscanf(range + 15, "%ld-%ld", &begin, &last) == 1)
        last = nbytes - 1;
    c->content = file ? file->content : "";
    c->begin = begin;
    c->end = is_other || !file ? begin : last + 1 < nbytes ? last + 1 : nbytes;
    int at = sprintf(c->head,
                     "HTTP/1.1 %s\r\nContent-Type: application/octet-stream\r\nETag: %s\r\n"
                     "Accept-Ranges: bytes\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
                     "Content-Length: %ld\r\n",
                     !file      ? "404 Not Found"
                     : is_other ? "412 Precondition Failed"
                     : range    ? "206 Partial Content"
                                : "200 OK",
                     tag, c->end - c->begin);
    if (range && file && !is_other)
        at += sprintf(c->head + at, "Content-Range: bytes %ld-%ld/%ld\r\n", c->begin, c->end - 1, nbytes);
    at += sprintf(c->head + at, "\r\n");
    c->head_nbytes = at;
    c->head_at = 0;
    if (!strncmp(c->request, "HEAD", 4))
        c->end = c->begin;
    asked++;
    sent += c->end - c->begin;
    int64_t now = now_ns();
    last_ns = last_ns + gap_ns > now ? last_ns + gap_ns : now;
    if (last_ns + delay_ns == now) {
        write_answer(fd);
        return;
    }
    c->due_ns = last_ns + delay_ns;
    waiting[end_waiting++ % MOST_ANSWERS] = fd;
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    folder = argv[1];
    add("");
    delay_ns = argc > 2 ? atoll(argv[2]) * 1000 : 0;
    gap_ns = argc > 3 && atof(argv[3]) > 0 ? (int64_t)(1e9 / atof(argv[3])) : 0;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 512))
        return 1;
    getsockname(listener, (struct sockaddr *)&address, &length);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    poller = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[256];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    event.data.fd = STDIN_FILENO;
    epoll_ctl(poller, EPOLL_CTL_ADD, STDIN_FILENO, &event);
    for (;;) {
        struct timespec patience, *most = NULL;
        if (first_waiting != end_waiting) {
            int64_t left = connections[waiting[first_waiting % MOST_ANSWERS]].due_ns - now_ns();
            left = left < 0 ? 0 : left;
            patience = (struct timespec){left / 1000000000, left % 1000000000};
            most = &patience;
        }
        int n = epoll_pwait2(poller, events, 256, most, NULL);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == STDIN_FILENO)
                return 0;
            if (fd == listener) {
                int one = 1, made = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                if (made < 0)
                    continue;
                if (made >= MOST_FD) {
                    close(made);
                    continue;
                }
                setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                memset(&connections[made], 0, sizeof connections[made]);
                event = (struct epoll_event){.events = EPOLLIN, .data.fd = made};
                epoll_ctl(poller, EPOLL_CTL_ADD, made, &event);
            } else if (events[i].events & EPOLLOUT)
                write_answer(fd);
            else
                read_request(fd);
        }
        int64_t now = now_ns();
        while (first_waiting != end_waiting &&
               connections[waiting[first_waiting % MOST_ANSWERS]].due_ns <= now)
            write_answer(waiting[first_waiting++ % MOST_ANSWERS]);
    }
}
