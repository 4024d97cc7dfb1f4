/* CUDA's runtime and driver, simulated on the CPU: calls enter, host memory is what they change.

   What is simulated. A stream does its work in turn, but late: when somebody waits, in any order
   of the streams that CUDA allows, drawn from a seed; where several threads wait, work of several
   streams runs at once. Two GPUs or more, each with memory of a size that can be set, streams and
   a context. Pageable, pinned and registered host memory. Errors as CUDA reports them: the last one
   is kept for each thread until it is asked for, a sticky one fails all later calls on its GPU.

   What is not: how long anything takes, shared memory and __syncthreads, graphs, memory pools of
   CUDA's own, rounding by a GPU's special functions, what a kernel does between its threads
   (they run one after the other), and an access by the host to device memory, which succeeds here.

   Whatever a program must not do is written, one line each, to standard error and to the file
   that SIMULATED_GPU_COMPLAINTS names; the tests fail if there is a line in it. Memory is never
   given the same address twice, and ends at a page that nobody may touch.

   Compiled as libcuda.so.1 with CUDA's own headers, so that the compiler compares each function
   with CUDA's declaration. `__init__.py` is the other side. */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 8
#define PAGE ((size_t)4096)
#define ROUND_UP(n, unit) (((n) + (unit) - 1) / (unit) * (unit))
#define GARBAGE 0xDB

typedef enum { PAGEABLE, DEVICE, PINNED, REGISTERED, FREED } Kind;
static const char *const KINDS[] = {"pageable memory", "device memory", "pinned memory",
                                    "registered memory", "memory that was freed"};

typedef struct Range { /* of addresses that CUDA knows */
    char *begin;
    size_t nbytes;
    Kind kind;
    int gpu;
    struct Range *next;
} Range;

typedef struct Event {
    unsigned magic, flags;
    int gpu;
    long recorded, done; /* how often */
    double milliseconds; /* when it was last done */
} Event;

typedef struct Function { /* a kernel, built for the CPU */
    char name[200];
    int count; /* of parameters */
    const size_t *sizes;
    int *is_running; /* shared by kernels that cannot run at once */
    void (*launch)(const unsigned *grid, const unsigned *block, unsigned order, void **arguments);
} Function;

typedef struct Operation { /* work on a stream */
    enum { COPY, FILL, RECORD, WAIT, KERNEL, CALL } what;
    char *target;
    const char *source;
    size_t nbytes;
    int value, is_guarded;
    enum cudaMemcpyKind direction;
    uint64_t source_sum, target_sum; /* of pinned memory, that the host must leave alone; or 0 */
    Event *event;
    long ticket; /* how often the event has to be recorded */
    Function *function;
    unsigned grid[3], block[3], order;
    void **arguments;
    void (*call)(long);
    void *owned; /* freed with it */
    long sequence;
    struct Operation *next;
} Operation;

typedef struct Stream {
    unsigned magic, flags;
    int gpu, is_legacy;
    Operation *first, *last, *running;
    struct Graph *captured; /* what takes the work that it is given, if it is captured */
    struct Stream *next; /* of all streams */
} Stream;

typedef struct Graph { /* never freed */
    unsigned magic;
    Operation *first, *last;
} Graph;

enum { STREAM = 0x57EA, EVENT = 0xE7E7, GRAPH = 0x62A9 };

static struct {
    int has_context;
    cudaError_t fault; /* a sticky error */
    size_t total, used;
    Stream legacy; /* the default stream */
} gpus[MAX_GPUS];

static struct Fault { /* to be injected */
    char where[64];
    long after;
    cudaError_t error;
} faults[16];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows, and of gpus */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Range *ranges;
static Stream *streams;
static long operations; /* that there ever were */
static unsigned seed = 1, allowed_gpus = ~0u;
static int gpu_count = 1, pageable_is_wrong = 1, eagerness;
static pid_t process;
static char *arena, *arena_next; /* addresses for memory of our own */
static const size_t ARENA = (size_t)1 << 41;

static __thread int current;   /* GPU */
static __thread int chosen;    /* GPU, for when no context is bound to the thread */
static __thread int has_bound; /* a context */
static __thread cudaError_t last_error;
static __thread sigjmp_buf *guarded; /* where an operation goes on that touched what is not there */
static struct sigaction before;

static int (*build)(const char *image, const char *name, Function *function);

/* --- complaints -------------------------------------------------------------------------------*/

static void write_line(const char *path, const char *line)
{
    FILE *file = path ? fopen(path, "a") : NULL;
    fprintf(stderr, "simulated GPU: %s\n", line);
    if (file) {
        fprintf(file, "%s\n", line);
        fclose(file);
    }
}

__attribute__((format(printf, 1, 2))) static void complain(const char *format, ...)
{
    char line[500];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    write_line(getenv("SIMULATED_GPU_COMPLAINTS"), line);
}

/* --- errors and contexts ----------------------------------------------------------------------*/

static cudaError_t note(cudaError_t error)
{
    if (error)
        last_error = error;
    return error;
}

static int is_sticky(cudaError_t error)
{
    return error == cudaErrorIllegalAddress || error == cudaErrorLaunchFailure ||
           error == cudaErrorECCUncorrectable || error == cudaErrorMisalignedAddress ||
           error == cudaErrorLaunchTimeout;
}

/* The error that a test wants here, if any; with the lock. */
static cudaError_t injected(const char *where, int gpu)
{
    for (struct Fault *fault = faults; fault < faults + 16; fault++)
        if (fault->error && !strcmp(fault->where, where) && fault->after-- == 0) {
            cudaError_t error = fault->error;
            fault->error = cudaSuccess;
            if (is_sticky(error))
                gpus[gpu].fault = error;
            return error;
        }
    return cudaSuccess;
}

static void make_context(int gpu)
{
    char line[60];
    if (gpus[gpu].has_context)
        return;
    gpus[gpu].has_context = 1;
    snprintf(line, sizeof line, "a context was made on GPU %d", gpu);
    if (getenv("SIMULATED_GPU_CONTEXTS"))
        write_line(getenv("SIMULATED_GPU_CONTEXTS"), line);
    if (!(allowed_gpus >> gpu & 1))
        complain("%s, which is not to be used", line);
}

/* What nearly each call begins with: it makes a context on the current GPU. */
static cudaError_t begin(const char *where)
{
    if (getpid() != process) /* a child that was forked has no CUDA */
        return cudaErrorInitializationError;
    pthread_mutex_lock(&lock);
    make_context(current);
    has_bound = 1;
    cudaError_t error = injected(where, current);
    if (!error)
        error = gpus[current].fault;
    pthread_mutex_unlock(&lock);
    return error;
}

/* With a name of its own in each function, which is what a test names to have it fail. */
#define BEGIN()                                                                                    \
    do {                                                                                           \
        cudaError_t error_ = note(begin(__func__));                                                \
        if (error_)                                                                                \
            return error_;                                                                         \
    } while (0)

/* --- memory -----------------------------------------------------------------------------------*/

static Range *find(const void *address)
{
    for (Range *range = ranges; range; range = range->next)
        if ((char *)address >= range->begin && (char *)address < range->begin + range->nbytes)
            return range;
    return NULL;
}

static Kind kind_of(const void *address)
{
    Range *range = find(address);
    if (range)
        return range->kind;
    return (char *)address >= arena && (char *)address < arena + ARENA ? FREED : PAGEABLE;
}

static void add_range(char *begin, size_t nbytes, Kind kind)
{
    Range *range = malloc(sizeof *range);
    *range = (Range){begin, nbytes, kind, current, ranges};
    ranges = range;
}

/* Forget the range that begins there, and return its size; 0 if there is none of this kind. */
static size_t remove_range(const void *begin, Kind kind, int *gpu)
{
    for (Range **at = &ranges; *at; at = &(*at)->next)
        if ((*at)->begin == begin && (*at)->kind == kind) {
            Range *range = *at;
            size_t nbytes = range->nbytes;
            *gpu = range->gpu;
            *at = range->next;
            free(range);
            return nbytes;
        }
    return 0;
}

/* Memory that ends, up to alignment, where a page begins that nobody may touch. */
static char *take(size_t nbytes)
{
    size_t whole = ROUND_UP(nbytes, PAGE);
    if (arena_next + whole + PAGE > arena + ARENA ||
        mprotect(arena_next, whole, PROT_READ | PROT_WRITE))
        return NULL;
    char *begin = arena_next + whole - ROUND_UP(nbytes, (size_t)512);
    arena_next += whole + PAGE;
    if (nbytes <= (size_t)64 << 20)
        memset(begin, GARBAGE, nbytes);
    return begin;
}

static void give_back(char *begin, size_t nbytes)
{
    char *page = (char *)((uintptr_t)begin & ~(PAGE - 1));
    mmap(page, ROUND_UP(nbytes, PAGE), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

/* Complain, if `nbytes` there are not memory of `kind`, -1 is any that a GPU copies; or if they are
   another GPU's than that of the stream, -1 is any. */
static int is_right(const char *where, const char *side, const void *address, size_t nbytes,
                    int kind, int gpu)
{
    Range *range = find(address);
    Kind found = kind_of(address);
    if (found == FREED || (kind == DEVICE && found != DEVICE) ||
        (kind == PAGEABLE && found == DEVICE)) {
        complain("%s: the %s is %s, and should be on the %s", where, side, KINDS[found],
                 kind == DEVICE ? "GPU" : "host");
        return 0;
    }
    if (range && (char *)address + nbytes > range->begin + range->nbytes) {
        complain("%s: the %s ends %zu bytes behind the end of its %s", where, side,
                 (size_t)((char *)address + nbytes - range->begin - range->nbytes), KINDS[found]);
        return 0;
    }
    if (range && range->kind == DEVICE && gpu != -1 && range->gpu != gpu) {
        complain("%s: the %s is memory of GPU %d, and the stream is of GPU %d", where, side,
                 range->gpu, gpu);
        return 0;
    }
    return 1;
}

static int can_copy(const char *where, const Operation *o, int gpu)
{
    static const int TARGET[] = {PAGEABLE, DEVICE, PAGEABLE, DEVICE, -1};
    static const int SOURCE[] = {PAGEABLE, PAGEABLE, DEVICE, DEVICE, -1};
    if (o->direction == cudaMemcpyDefault) /* what CuPy asks for between GPUs */
        gpu = -1;
    return is_right(where, "target", o->target, o->nbytes, TARGET[o->direction], gpu) &&
           (o->owned || is_right(where, "source", o->source, o->nbytes, SOURCE[o->direction], gpu));
}

static uint64_t sum_of(const char *data, size_t nbytes)
{
    uint64_t sum = 1, word = 0;
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        memcpy(&word, data, 8);
        sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
        sum ^= sum >> 29;
    }
    for (; nbytes; data++, nbytes--)
        sum = (sum ^ (unsigned char)*data) * 0x9E3779B97F4A7C15u;
    return sum | 1;
}

/* --- streams ----------------------------------------------------------------------------------*/

static void put_in_list(Stream *stream)
{
    stream->magic = STREAM;
    stream->next = streams;
    streams = stream;
}

static Stream *stream_of(const char *where, cudaStream_t handle)
{
    if (!handle || handle == cudaStreamLegacy)
        return &gpus[current].legacy;
    Stream *stream = (Stream *)handle;
    if (handle == cudaStreamPerThread || stream->magic != STREAM) {
        complain("%s: %s", where, handle == cudaStreamPerThread ? "there is no stream per thread"
                                                                : "the stream was destroyed");
        return NULL;
    }
    return stream;
}

static long oldest(const Stream *stream)
{
    const Operation *o = stream->running ? stream->running : stream->first;
    return o ? o->sequence : LONG_MAX;
}

/* Whether a stream's next operation may begin. The default stream waits for what came before on
   streams that are blocking, and they for it. */
static int is_ready(const Stream *stream)
{
    const Operation *o = stream->first;
    if (stream->running || !o || (o->what == WAIT && o->event->done < o->ticket) ||
        (o->what == KERNEL && *o->function->is_running))
        return 0;
    if (stream->flags & cudaStreamNonBlocking)
        return 1;
    for (const Stream *other = streams; other; other = other->next)
        if (other->gpu == stream->gpu && other->is_legacy != stream->is_legacy &&
            !(other->flags & cudaStreamNonBlocking) && oldest(other) < o->sequence)
            return 0;
    return 1;
}

static void on_segfault(int number, siginfo_t *info, void *context)
{
    (void)info, (void)context;
    if (guarded)
        siglongjmp(*guarded, 1);
    sigaction(number, &before, NULL); /* what was touched is touched again, with that handler */
}

static void work(const Operation *o)
{
    switch (o->what) {
    case COPY:
        memmove(o->target, o->source, o->nbytes);
        break;
    case FILL:
        memset(o->target, o->value, o->nbytes);
        break;
    case KERNEL:
        o->function->launch(o->grid, o->block, o->order, o->arguments);
        break;
    default:
        break;
    }
}

/* Look, before an operation runs, at what may have changed since it was asked for. */
static int may_run(const Operation *o, int gpu)
{
    const char *where = o->what == KERNEL ? "kernel" : "copy";
    int may;
    pthread_mutex_lock(&lock);
    may = !gpus[gpu].fault;
    if (may && o->is_guarded)
        may = !injected(where, gpu);
    if (may && o->what == COPY)
        may = can_copy("a copy that was waiting on a stream", o, gpu);
    if (may && o->what == FILL)
        may = is_right("a memset that was waiting on a stream", "target", o->target, o->nbytes,
                       DEVICE, gpu);
    if (may && o->source_sum && sum_of(o->source, o->nbytes) != o->source_sum)
        complain("the host changed memory while a copy out of it was waiting on a stream");
    if (may && o->target_sum && sum_of(o->target, o->nbytes) != o->target_sum)
        complain("the host changed memory while a copy into it was waiting on a stream");
    pthread_mutex_unlock(&lock);
    return may;
}

static void execute(const Operation *o, int gpu)
{
    sigjmp_buf place;
    if (!may_run(o, gpu))
        return;
    if (o->what == CALL) {
        o->call(o->ticket);
        return;
    }
    if (sigsetjmp(place, 0) == 0) {
        guarded = &place;
        work(o);
    } else {
        complain("%s touched memory that is not there",
                 o->what == KERNEL ? o->function->name : "a copy");
        pthread_mutex_lock(&lock);
        gpus[gpu].fault = cudaErrorIllegalAddress;
        pthread_mutex_unlock(&lock);
    }
    guarded = NULL;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

/* Run an operation of any stream that may go on; with the lock, which is released meanwhile. */
static int run_one(void)
{
    Stream *stream = NULL;
    unsigned count = 0;
    for (Stream *one = streams; one; one = one->next)
        if (is_ready(one) && rand_r(&seed) % ++count == 0)
            stream = one;
    if (!stream)
        return 0;
    Operation *o = stream->running = stream->first;
    stream->first = o->next;
    if (o->what == KERNEL)
        *o->function->is_running = 1;
    pthread_mutex_unlock(&lock);
    execute(o, stream->gpu);
    pthread_mutex_lock(&lock);
    if (o->what == KERNEL)
        *o->function->is_running = 0;
    if (o->what == RECORD && o->event->done < o->ticket) {
        o->event->done = o->ticket;
        o->event->milliseconds = now();
    }
    stream->running = NULL;
    pthread_cond_broadcast(&changed);
    free(o->owned);
    free(o);
    return 1;
}

static int is_touched(const Stream *stream, const char *begin, size_t nbytes)
{
    const Operation *o = stream->running ? stream->running : stream->first;
    for (; o; o = o == stream->running ? stream->first : o->next)
        if (o->what == COPY && ((o->target < begin + nbytes && begin < o->target + o->nbytes) ||
                                (o->source < begin + nbytes && begin < o->source + o->nbytes)))
            return 1;
    return 0;
}

static int is_touched_by_any(const char *begin, size_t nbytes)
{
    int found = 0;
    for (Stream *stream = streams; stream && !found; stream = stream->next)
        found = is_touched(stream, begin, nbytes);
    return found;
}

static void put_locked(Stream *stream, Operation given)
{
    Operation *o = malloc(sizeof *o);
    *o = given;
    o->next = NULL;
    if (stream->captured) {
        Graph *graph = stream->captured;
        *(graph->first ? &graph->last->next : &graph->first) = o;
        graph->last = o;
        return;
    }
    o->sequence = ++operations;
    if (stream->first)
        stream->last->next = o;
    else
        stream->first = o;
    stream->last = o;
    while (rand_r(&seed) % 8 < eagerness && run_one())
        ;
}

static void put(Stream *stream, Operation given)
{
    pthread_mutex_lock(&lock);
    put_locked(stream, given);
    pthread_mutex_unlock(&lock);
}

/* Run operations until a stream, a GPU (-1: none) and an event have come so far. */
static void wait_for(const Stream *stream, int gpu, const Event *event, long ticket)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        int is_done = !event || event->done >= ticket, is_running = 0;
        for (Stream *one = streams; one; one = one->next) {
            is_running |= one->running != NULL;
            if (one == stream || one->gpu == gpu)
                is_done &= oldest(one) == LONG_MAX;
        }
        if (is_done)
            break;
        if (run_one())
            continue;
        if (!is_running) {
            complain("streams wait for each other, or for nothing");
            break;
        }
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
}

static cudaError_t fault_of(int gpu)
{
    pthread_mutex_lock(&lock);
    cudaError_t fault = gpus[gpu].fault;
    pthread_mutex_unlock(&lock);
    return note(fault);
}

/* --- the runtime: devices ---------------------------------------------------------------------*/

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = gpu_count;
    return gpu_count ? cudaSuccess : note(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *gpu)
{
    *gpu = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int gpu)
{
    if (gpu < 0 || gpu >= gpu_count)
        return note(cudaErrorInvalidDevice);
    current = chosen = gpu;
    BEGIN(); /* since CUDA 12 */
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int gpu)
{
    (void)gpu;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = 132;
        break;
    case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        break;
    case cudaDevAttrWarpSize:
        *value = 32;
        break;
    default:
        *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int gpu)
{
    *found = (struct cudaDeviceProp){.name = "simulated",
                                     .major = 9,
                                     .multiProcessorCount = 132,
                                     .totalGlobalMem = gpus[gpu].total,
                                     .warpSize = 32,
                                     .maxThreadsPerBlock = 1024};
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    BEGIN();
    wait_for(NULL, current, NULL, 0);
    return fault_of(current);
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int gpu, int peer)
{
    (void)gpu, (void)peer;
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaPeekAtLastError(void)
{
    pthread_mutex_lock(&lock);
    cudaError_t error = gpus[current].fault ? gpus[current].fault : last_error;
    pthread_mutex_unlock(&lock);
    return error;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

/* --- the runtime: memory ----------------------------------------------------------------------*/

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total)
{
    BEGIN();
    pthread_mutex_lock(&lock);
    *total = gpus[current].total;
    *unused = *total - gpus[current].used;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static cudaError_t allocate(void **address, size_t nbytes, Kind kind)
{
    size_t taken = ROUND_UP(nbytes, (size_t)512);
    *address = NULL;
    if (!nbytes)
        return cudaSuccess;
    pthread_mutex_lock(&lock);
    if (kind != DEVICE || taken <= gpus[current].total - gpus[current].used)
        *address = take(nbytes);
    if (*address)
        add_range(*address, nbytes, kind);
    if (*address && kind == DEVICE)
        gpus[current].used += taken;
    pthread_mutex_unlock(&lock);
    return note(*address ? cudaSuccess : cudaErrorMemoryAllocation);
}

static cudaError_t release(const char *where, void *address, Kind kind)
{
    int gpu = 0;
    if (!address)
        return cudaSuccess;
    for (int i = 0; i < gpu_count; i++) /* to free waits for all that uses the memory */
        if (gpus[i].has_context)
            wait_for(NULL, i, NULL, 0);
    pthread_mutex_lock(&lock);
    size_t nbytes = remove_range(address, kind, &gpu);
    if (!nbytes)
        complain("%s: this is %s, or not the beginning of it", where, KINDS[kind_of(address)]);
    if (nbytes && kind == DEVICE)
        gpus[gpu].used -= ROUND_UP(nbytes, (size_t)512);
    if (nbytes)
        give_back(address, nbytes);
    pthread_mutex_unlock(&lock);
    return nbytes ? cudaSuccess : note(cudaErrorInvalidValue);
}

cudaError_t cudaMalloc(void **address, size_t nbytes)
{
    BEGIN();
    return allocate(address, nbytes, DEVICE);
}

cudaError_t cudaFree(void *address)
{
    BEGIN();
    return release(__func__, address, DEVICE);
}

cudaError_t cudaHostAlloc(void **address, size_t nbytes, unsigned flags)
{
    (void)flags;
    BEGIN();
    return allocate(address, nbytes, PINNED);
}

cudaError_t cudaFreeHost(void *address)
{
    BEGIN();
    return release(__func__, address, PINNED);
}

static int is_mapped(const void *address)
{
    unsigned char in_memory;
    return mincore((void *)((uintptr_t)address & ~(PAGE - 1)), 1, &in_memory) == 0;
}

cudaError_t cudaHostRegister(void *address, size_t nbytes, unsigned flags)
{
    (void)flags;
    BEGIN();
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&lock);
    if (!nbytes || !is_mapped(address))
        error = cudaErrorInvalidValue;
    for (Range *range = ranges; range && !error; range = range->next)
        if ((char *)address < range->begin + range->nbytes && range->begin < (char *)address + nbytes)
            error = cudaErrorHostMemoryAlreadyRegistered;
    if (error)
        complain("%s: %zu bytes are %s", __func__, nbytes,
                 error == cudaErrorInvalidValue ? "none, or not mapped" : "registered already");
    else
        add_range(address, nbytes, REGISTERED);
    pthread_mutex_unlock(&lock);
    return note(error);
}

cudaError_t cudaHostUnregister(void *address)
{
    int gpu;
    BEGIN();
    pthread_mutex_lock(&lock);
    size_t nbytes = remove_range(address, REGISTERED, &gpu);
    if (!nbytes)
        complain("%s: this memory is not registered", __func__);
    else if (!is_mapped(address))
        complain("%s: this memory is not mapped any more", __func__);
    else if (is_touched_by_any(address, nbytes))
        complain("%s: a copy of this memory is waiting on a stream", __func__);
    pthread_mutex_unlock(&lock);
    return nbytes ? cudaSuccess : note(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address)
{
    BEGIN();
    pthread_mutex_lock(&lock);
    Range *range = find(address);
    *found = (struct cudaPointerAttributes){.device = -2};
    if (range) {
        found->type = range->kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        found->device = range->gpu;
        found->devicePointer = (void *)address;
        found->hostPointer = range->kind == DEVICE ? NULL : (void *)address;
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

/* Put a copy on a stream. Out of pageable memory all is read at once, and into it a copy is done
   when the call returns, as in CUDA. */
static cudaError_t copy(const char *where, Stream *stream, Operation o)
{
    int is_pageable = 0;
    if (!stream)
        return note(cudaErrorInvalidResourceHandle);
    if (!o.nbytes)
        return cudaSuccess;
    pthread_mutex_lock(&lock);
    if (!can_copy(where, &o, stream->gpu)) {
        pthread_mutex_unlock(&lock);
        return note(cudaErrorInvalidValue);
    }
    Kind source = kind_of(o.source), target = kind_of(o.target);
    is_pageable = target == PAGEABLE;
    /* On the default stream, a copy between two GPUs begins after all work that either was given,
       and ends before all that either is given later (CUDA's programming guide, "Peer-to-Peer
       Memory Copy"). */
    int is_between = stream->is_legacy && source == DEVICE && target == DEVICE &&
                     find(o.source)->gpu != find(o.target)->gpu;
    int from = is_between ? find(o.source)->gpu : -1, to = is_between ? find(o.target)->gpu : -1;
    if (is_between) {
        pthread_mutex_unlock(&lock);
        wait_for(stream, from, NULL, 0);
        wait_for(stream, to, NULL, 0);
        pthread_mutex_lock(&lock);
    }
    if (source == PAGEABLE) {
        if (pageable_is_wrong && stream->flags & cudaStreamNonBlocking)
            complain("%s: the source is pageable memory, and the stream is non-blocking", where);
        o.owned = malloc(o.nbytes);
        o.source = memcpy(o.owned, o.source, o.nbytes);
    } else if (source != DEVICE && !is_touched_by_any(o.source, o.nbytes))
        o.source_sum = sum_of(o.source, o.nbytes);
    if (target != DEVICE && target != PAGEABLE && !is_touched_by_any(o.target, o.nbytes)) {
        memset(o.target, GARBAGE, o.nbytes); /* who reads too early reads that */
        o.target_sum = sum_of(o.target, o.nbytes);
    }
    put_locked(stream, o);
    pthread_mutex_unlock(&lock);
    if (is_pageable || is_between)
        wait_for(stream, -1, NULL, 0);
    return is_pageable ? fault_of(stream->gpu) : cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t nbytes,
                            enum cudaMemcpyKind direction, cudaStream_t stream)
{
    BEGIN();
    return copy(__func__, stream_of(__func__, stream),
                (Operation){COPY, target, source, nbytes, .direction = direction, .is_guarded = 1});
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t nbytes,
                       enum cudaMemcpyKind direction)
{
    BEGIN();
    Stream *stream = &gpus[current].legacy;
    cudaError_t error =
        copy(__func__, stream,
             (Operation){COPY, target, source, nbytes, .direction = direction, .is_guarded = 1});
    wait_for(stream, -1, NULL, 0);
    return error ? error : fault_of(current);
}

cudaError_t cudaMemcpyPeerAsync(void *target, int target_gpu, const void *source, int source_gpu,
                                size_t nbytes, cudaStream_t stream)
{
    (void)target_gpu, (void)source_gpu;
    BEGIN();
    return cudaMemcpyAsync(target, source, nbytes, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemcpyPeer(void *target, int target_gpu, const void *source, int source_gpu,
                           size_t nbytes)
{
    (void)target_gpu, (void)source_gpu;
    BEGIN();
    return cudaMemcpy(target, source, nbytes, cudaMemcpyDefault);
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t nbytes, cudaStream_t handle)
{
    BEGIN();
    Stream *stream = stream_of(__func__, handle);
    if (!stream)
        return note(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&lock);
    int right = !nbytes || is_right(__func__, "target", target, nbytes, DEVICE, stream->gpu);
    if (right && nbytes)
        put_locked(stream, (Operation){FILL, target, .nbytes = nbytes, .value = value});
    pthread_mutex_unlock(&lock);
    return right ? cudaSuccess : note(cudaErrorInvalidValue);
}

cudaError_t cudaMemset(void *target, int value, size_t nbytes)
{
    BEGIN();
    return cudaMemsetAsync(target, value, nbytes, NULL);
}

/* --- the runtime: streams and events ----------------------------------------------------------*/

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority)
{
    (void)priority;
    BEGIN();
    Stream *stream = calloc(1, sizeof *stream);
    stream->flags = flags;
    stream->gpu = current;
    pthread_mutex_lock(&lock);
    put_in_list(stream);
    pthread_mutex_unlock(&lock);
    *made = (cudaStream_t)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags)
{
    BEGIN();
    return cudaStreamCreateWithPriority(made, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *made)
{
    BEGIN();
    return cudaStreamCreateWithPriority(made, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle)
{
    BEGIN();
    Stream *stream = stream_of(__func__, handle);
    if (!stream)
        return note(cudaErrorInvalidResourceHandle);
    stream->magic = 0; /* its work goes on, so its memory stays */
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    BEGIN();
    Stream *stream = stream_of(__func__, handle);
    if (!stream)
        return note(cudaErrorInvalidResourceHandle);
    wait_for(stream, -1, NULL, 0);
    return fault_of(stream->gpu);
}

cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    BEGIN();
    Stream *stream = stream_of(__func__, handle);
    if (!stream)
        return note(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&lock);
    run_one();
    int is_done = oldest(stream) == LONG_MAX;
    pthread_mutex_unlock(&lock);
    return is_done ? fault_of(stream->gpu) : note(cudaErrorNotReady);
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned *flags)
{
    BEGIN();
    Stream *stream = stream_of(__func__, handle);
    *flags = stream ? stream->flags : 0;
    return stream ? cudaSuccess : note(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority)
{
    *priority = 0;
    return stream_of(__func__, handle) ? cudaSuccess : note(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status)
{
    *status = cudaStreamCaptureStatusNone;
    return stream_of(__func__, handle) ? cudaSuccess : note(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags)
{
    BEGIN();
    Event *event = calloc(1, sizeof *event);
    *event = (Event){EVENT, flags, .gpu = current};
    *made = (cudaEvent_t)event;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *made)
{
    BEGIN();
    return cudaEventCreateWithFlags(made, cudaEventDefault);
}

static Event *event_of(const char *where, cudaEvent_t handle)
{
    Event *event = (Event *)handle;
    if (event && event->magic == EVENT)
        return event;
    complain("%s: the event was destroyed", where);
    return NULL;
}

cudaError_t cudaEventDestroy(cudaEvent_t handle)
{
    BEGIN();
    Event *event = event_of(__func__, handle);
    if (!event)
        return note(cudaErrorInvalidResourceHandle);
    event->magic = 0; /* work that waits for it goes on, so its memory stays */
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags)
{
    (void)flags;
    BEGIN();
    Event *event = event_of(__func__, handle);
    Stream *stream = stream_of(__func__, stream_handle);
    if (event && stream && event->gpu != stream->gpu) {
        complain("%s: the event is of GPU %d, and the stream of GPU %d", __func__, event->gpu,
                 stream->gpu);
        stream = NULL;
    }
    if (!event || !stream)
        return note(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&lock);
    put_locked(stream, (Operation){RECORD, .event = event, .ticket = ++event->recorded});
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    BEGIN();
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t handle)
{
    BEGIN();
    Event *event = event_of(__func__, handle);
    if (!event)
        return note(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&lock);
    run_one();
    int is_done = event->done >= event->recorded;
    pthread_mutex_unlock(&lock);
    return is_done ? fault_of(event->gpu) : note(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle)
{
    BEGIN();
    Event *event = event_of(__func__, handle);
    if (!event)
        return note(cudaErrorInvalidResourceHandle);
    wait_for(NULL, -1, event, event->recorded);
    return fault_of(event->gpu);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t then)
{
    BEGIN();
    Event *a = event_of(__func__, first), *b = event_of(__func__, then);
    if (!a || !b || a->gpu != b->gpu || (a->flags | b->flags) & cudaEventDisableTiming ||
        !a->recorded || !b->recorded) {
        complain("%s: an event has no time, or they are of two GPUs", __func__);
        return note(cudaErrorInvalidResourceHandle);
    }
    *milliseconds = (float)(b->milliseconds - a->milliseconds);
    int is_done = a->done >= a->recorded && b->done >= b->recorded;
    return is_done ? cudaSuccess : note(cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags)
{
    (void)flags;
    BEGIN();
    Event *event = event_of(__func__, handle);
    Stream *stream = stream_of(__func__, stream_handle);
    if (!event || !stream)
        return note(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&lock);
    put_locked(stream, (Operation){WAIT, .event = event, .ticket = event->recorded});
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    return (CUresult)cudaEventRecord(event, stream);
}

CUresult cuEventQuery(CUevent event)
{
    return (CUresult)cudaEventQuery(event);
}

CUresult cuEventSynchronize(CUevent event)
{
    return (CUresult)cudaEventSynchronize(event);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t nbytes, CUstream stream)
{
    return (CUresult)cudaMemcpyAsync((void *)target, source, nbytes, cudaMemcpyHostToDevice, stream);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    return (CUresult)cudaStreamWaitEvent(stream, event, flags);
}

/* --- the driver: contexts, modules, kernels ---------------------------------------------------*/

CUresult cuGetErrorName(CUresult error, const char **name)
{
    (void)error;
    *name = "an error of the simulated driver";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    static __thread char line[60];
    snprintf(line, sizeof line, "CUresult %d", (int)error);
    *text = line;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = has_bound ? (CUcontext)&gpus[current] : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    has_bound = context != NULL;
    current = chosen;
    for (int i = 0; i < gpu_count; i++)
        if (context == (CUcontext)&gpus[i])
            current = i;
    return CUDA_SUCCESS;
}

enum { MAX_PUSHED = 8 };
static __thread CUcontext pushed[MAX_PUSHED];
static __thread int num_pushed;

CUresult cuCtxPushCurrent(CUcontext context)
{
    if (num_pushed == MAX_PUSHED)
        return CUDA_ERROR_INVALID_CONTEXT;
    cuCtxGetCurrent(&pushed[num_pushed++]);
    return cuCtxSetCurrent(context);
}

CUresult cuCtxPopCurrent(CUcontext *context)
{
    if (num_pushed == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    cuCtxGetCurrent(context);
    return cuCtxSetCurrent(pushed[--num_pushed]);
}

CUresult cuCtxGetDevice(CUdevice *gpu)
{
    *gpu = current;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *context)
{
    Stream *stream = stream_of(__func__, handle);
    *context = stream ? (CUcontext)&gpus[stream->gpu] : NULL;
    return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* An image is what `under_cupy` made of NVRTC's result: text, that tells how to build the kernels. */
CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    cudaError_t error = begin(__func__);
    *module = error ? NULL : (CUmodule)strdup(image);
    return (CUresult)error;
}

CUresult cuModuleUnload(CUmodule module)
{
    (void)module; /* work that is waiting may need it */
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name)
{
    cudaError_t error = begin(__func__);
    Function *function = calloc(1, sizeof *function);
    if (error)
        return (CUresult)error;
    snprintf(function->name, sizeof function->name, "%s", name);
    if (build((const char *)module, name, function)) {
        complain("the kernel %s could not be built for the CPU", name);
        return CUDA_ERROR_NOT_FOUND;
    }
    *found = (CUfunction)function;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    (void)attribute, (void)function;
    *value = 1024;
    return CUDA_SUCCESS;
}

/* Complain of an argument that looks like an address of device memory, and is none that a kernel may
   use. An array's address comes first in what CuPy passes for it; what comes later may be what was
   in that memory before. */
static void check_argument(const Function *function, const char *argument, size_t nbytes)
{
    char *address;
    if (nbytes < sizeof address)
        return;
    memcpy(&address, argument, sizeof address);
    Range *range = find(address);
    if (!range) /* the end of an array is no wrong address */
        range = find(address - 1);
    if (range && range->kind == DEVICE && range->gpu != current)
        complain("%s: an argument is memory of GPU %d, and the kernel runs on GPU %d",
                 function->name, range->gpu, current);
    if (!range && kind_of(address) == FREED)
        complain("%s: an argument is memory that was freed", function->name);
}

CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                        CUstream stream_handle, void **parameters, void **extra)
{
    (void)shared, (void)extra;
    cudaError_t error = begin(__func__);
    Stream *stream = stream_of(__func__, stream_handle);
    Function *function = (Function *)handle;
    if (error || !stream)
        return error ? (CUresult)error : CUDA_ERROR_INVALID_HANDLE;
    if (stream->gpu != current) {
        complain("%s: the stream is of GPU %d, and GPU %d is current", function->name, stream->gpu,
                 current);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!grid_x || !grid_y || !grid_z || grid_x > INT_MAX || grid_y > 65535 || grid_z > 65535 ||
        !block_x || !block_y || !block_z || (size_t)block_x * block_y * block_z > 1024) {
        complain("%s: a grid of %ux%ux%u blocks of %ux%ux%u threads is not allowed",
                 function->name, grid_x, grid_y, grid_z, block_x, block_y, block_z);
        return CUDA_ERROR_INVALID_VALUE;
    }
    size_t nbytes = (size_t)function->count * sizeof(void *), at = ROUND_UP(nbytes, (size_t)16);
    for (int i = 0; i < function->count; i++)
        nbytes += ROUND_UP(function->sizes[i], (size_t)16);
    char *owned = aligned_alloc(16, ROUND_UP(nbytes + 16, (size_t)16));
    void **arguments = (void **)owned;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < function->count; i++) {
        arguments[i] = memcpy(owned + at, parameters[i], function->sizes[i]);
        at += ROUND_UP(function->sizes[i], (size_t)16);
        check_argument(function, arguments[i], function->sizes[i]);
    }
    put_locked(stream, (Operation){.what = KERNEL,
                                   .function = function,
                                   .grid = {grid_x, grid_y, grid_z},
                                   .block = {block_x, block_y, block_z},
                                   .order = (unsigned)rand_r(&seed),
                                   .arguments = arguments,
                                   .owned = owned,
                                   .is_guarded = 1});
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* --- graphs -----------------------------------------------------------------------------------*/

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode)
{
    (void)mode;
    BEGIN();
    Stream *stream = stream_of(__func__, handle);
    if (!stream || stream->captured)
        return note(cudaErrorInvalidResourceHandle);
    stream->captured = calloc(1, sizeof *stream->captured);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph)
{
    BEGIN();
    Stream *stream = stream_of(__func__, handle);
    if (!stream || !stream->captured)
        return note(cudaErrorInvalidResourceHandle);
    stream->captured->magic = GRAPH;
    *graph = (cudaGraph_t)stream->captured;
    stream->captured = NULL;
    return cudaSuccess;
}

static Graph *graph_of(const char *where, void *handle)
{
    Graph *graph = handle;
    if (graph && graph->magic == GRAPH)
        return graph;
    complain("%s: there is no such graph (any more)", where);
    return NULL;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t handle, unsigned long long flags)
{
    (void)flags;
    BEGIN();
    Graph *graph = graph_of(__func__, handle), *copied = malloc(sizeof *copied);
    if (!graph)
        return note(cudaErrorInvalidValue);
    *copied = *graph;
    *made = (cudaGraphExec_t)copied;
    return cudaSuccess;
}

static cudaError_t destroy_graph(const char *where, void *handle)
{
    Graph *graph = graph_of(where, handle);
    if (graph)
        graph->magic = 0;
    return graph ? cudaSuccess : note(cudaErrorInvalidValue);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    return destroy_graph(__func__, graph);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph)
{
    return destroy_graph(__func__, graph);
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle)
{
    cudaError_t error = begin(__func__);
    Graph *graph = graph_of(__func__, handle);
    Stream *stream = stream_of(__func__, stream_handle);
    if (error || !stream || !graph)
        return error ? (CUresult)error : CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    for (const Operation *o = graph->first; o; o = o->next) {
        Operation again = *o;
        again.owned = NULL, again.order = (unsigned)rand_r(&seed);
        put_locked(stream, again);
    }
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* --- for the tests, and for `under_cupy` ------------------------------------------------------*/

/* Begin: so many GPUs, with so much memory each. */
void simulated_begin(int count, size_t nbytes, int (*builder)(const char *, const char *, Function *))
{
    struct sigaction action = {.sa_sigaction = on_segfault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    process = getpid();
    gpu_count = count;
    build = builder;
    arena = arena_next = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                              -1, 0);
    for (int i = 0; i < MAX_GPUS; i++) {
        gpus[i].total = nbytes;
        gpus[i].legacy.gpu = i;
        gpus[i].legacy.is_legacy = 1;
        put_in_list(&gpus[i].legacy);
    }
    sigaction(SIGSEGV, &action, &before);
}

/* The order of work; by some seeds, part of it is done when it is asked for. */
void simulated_seed(unsigned value)
{
    pthread_mutex_lock(&lock);
    seed = value;
    eagerness = value % 4 == 3 ? 3 : value % 4 == 0 ? 6 : 0; /* of 8 */
    pthread_mutex_unlock(&lock);
}

/* GPUs on which a context may be made: bits. */
void simulated_allow(unsigned bits)
{
    allowed_gpus = bits;
}

/* Whether a copy on a non-blocking stream out of pageable memory is complained of. */
void simulated_forbid_pageable(int is_forbidden)
{
    pageable_is_wrong = is_forbidden;
}

int simulated_has_context(int gpu)
{
    return gpus[gpu].has_context;
}

void simulated_set_memory(int gpu, size_t nbytes)
{
    pthread_mutex_lock(&lock);
    gpus[gpu].total = nbytes > gpus[gpu].used ? nbytes : gpus[gpu].used;
    pthread_mutex_unlock(&lock);
}

/* Bytes in use: of a GPU's memory; or, of GPU -1, of pinned and registered host memory. */
size_t simulated_used(int gpu)
{
    size_t nbytes = 0;
    pthread_mutex_lock(&lock);
    for (Range *range = ranges; range; range = range->next)
        if (gpu < 0 ? range->kind != DEVICE : range->kind == DEVICE && range->gpu == gpu)
            nbytes += range->nbytes;
    pthread_mutex_unlock(&lock);
    return nbytes;
}

/* The next but `after` call of a function, or execution of a "kernel" or "copy", fails. */
void simulated_fail(const char *where, long after, int error)
{
    pthread_mutex_lock(&lock);
    for (struct Fault *fault = faults; fault < faults + 16; fault++)
        if (!fault->error) {
            snprintf(fault->where, sizeof fault->where, "%s", where);
            fault->after = after;
            fault->error = error;
            break;
        }
    pthread_mutex_unlock(&lock);
}

/* Faults that were to come and sticky errors are forgotten. */
void simulated_heal(void)
{
    pthread_mutex_lock(&lock);
    memset(faults, 0, sizeof faults);
    for (int i = 0; i < MAX_GPUS; i++)
        gpus[i].fault = cudaSuccess;
    last_error = cudaSuccess;
    pthread_mutex_unlock(&lock);
}

/* Do all work that is waiting. */
void simulated_finish(void)
{
    for (int i = 0; i < gpu_count; i++)
        wait_for(NULL, i, NULL, 0);
}

/* Put a call on a stream. */
int simulated_call(cudaStream_t handle, void (*call)(long), long argument)
{
    Stream *stream = stream_of(__func__, handle);
    if (!stream)
        return cudaErrorInvalidResourceHandle;
    put(stream, (Operation){.what = CALL, .call = call, .ticket = argument});
    return cudaSuccess;
}

/* Whether so many bytes of device memory are there; complains if not. */
int simulated_is_device(const char *where, const void *address, size_t nbytes)
{
    pthread_mutex_lock(&lock);
    int right = is_right(where, "address", address, nbytes, DEVICE, -1);
    pthread_mutex_unlock(&lock);
    return right;
}

static cudaError_t unsupported(const char *name)
{
    complain("%s is not simulated", name);
    return cudaErrorNotSupported;
}

/* Have code at an address (x86-64) go on in `function`; if that is NULL, complain of `name`. */
int simulated_replace(void *address, const void *function, const char *name)
{
    unsigned char code[22] = {0x48, 0xBF, [10] = 0x48, 0xB8, [20] = 0xFF, 0xE0}; /* mov, mov, jmp */
    char *page = (char *)((uintptr_t)address & ~(PAGE - 1));
    const char *kept = function ? NULL : strdup(name);
    const void *to = function ? function : (const void *)(uintptr_t)unsupported;
    memcpy(code + 2, &kept, 8);
    memcpy(code + 12, &to, 8);
    if (mprotect(page, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC))
        return -1;
    if (function)
        memcpy(address, code + 10, 12);
    else
        memcpy(address, code, sizeof code);
    return 0;
}
