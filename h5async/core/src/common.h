/* Declares what all parts share: the structures that Python fills in, too, and the clock. */

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines; others do without"
#endif

/* H5ASYNC_PORTABLE builds what other processors and systems run, so that it is tested here too. */
#if defined(H5ASYNC_PORTABLE)
#undef RWF_NOWAIT
#undef POSIX_FADV_WILLNEED
#endif
#if defined(__SSE2__) && !defined(H5ASYNC_PORTABLE)
#include <emmintrin.h>
#define SSE2
#endif
#if defined(__x86_64__) && !defined(H5ASYNC_PORTABLE)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512dq,avx512vl")))
#define HAS_AVX2() __builtin_cpu_supports("avx2")
#define HAS_AVX512()                                                                              \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&                   \
     __builtin_cpu_supports("avx512vl"))
#endif

#define PUBLIC __attribute__((visibility("default")))
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline)) /* so that its loops have the registers that they need */

/* Define a function by one whose name ends with _inline, compiled a second time for AVX2. */
#if defined(AVX2)
#define ALSO_FOR_AVX2(name, parameters, arguments)                                                \
    AVX2 static void name##_avx2 parameters { name##_inline arguments; }                          \
    static void name parameters                                                                   \
    {                                                                                             \
        if (HAS_AVX2())                                                                           \
            name##_avx2 arguments;                                                                \
        else                                                                                      \
            name##_inline arguments;                                                              \
    }
#else
#define ALSO_FOR_AVX2(name, parameters, arguments)                                                \
    static void name parameters { name##_inline arguments; }
#endif

/* The same for AVX-512, too, which multiplies numbers of 64 bits. */
#if defined(AVX512)
#define ALSO_FOR_AVX512(name, parameters, arguments)                                              \
    AVX512 static void name##_avx512 parameters { name##_inline arguments; }                      \
    AVX2 static void name##_avx2 parameters { name##_inline arguments; }                          \
    static void name parameters                                                                   \
    {                                                                                             \
        if (HAS_AVX512())                                                                         \
            name##_avx512 arguments;                                                              \
        else if (HAS_AVX2())                                                                      \
            name##_avx2 arguments;                                                                \
        else                                                                                      \
            name##_inline arguments;                                                              \
    }
#else
#define ALSO_FOR_AVX512(name, parameters, arguments)                                              \
    static void name parameters { name##_inline arguments; }
#endif

/* Call a function that is inlined with a size, which the compiler knows in each case. */
#define BY_SIZE(size, function, ...)                                                              \
    ((size) == 1   ? function(__VA_ARGS__, 1)                                                     \
     : (size) == 2 ? function(__VA_ARGS__, 2)                                                     \
     : (size) == 4 ? function(__VA_ARGS__, 4)                                                     \
     : (size) == 8 ? function(__VA_ARGS__, 8)                                                     \
                   : function(__VA_ARGS__, (int64_t)(size)))

/* Find the last of the numbers `low` to `high` - 1 for which a condition holds, which does for `low`,
   and for none behind one for which it does not. The variable `low` has it then. */
#define FIND_LAST(low, high, at, condition)                                                       \
    while ((low) + 1 < (high)) {                                                                  \
        int64_t at = (low) + ((high) - (low)) / 2;                                                \
        *((condition) ? &(low) : &(high)) = at;                                                   \
    }

/* A list, from its `newest` to its `oldest`: take one out, or put one to its front. */
#define UNLINK(list, one)                                                                         \
    (*((one)->newer ? &(one)->newer->older : &(list)->newest) = (one)->older,                     \
     *((one)->older ? &(one)->older->newer : &(list)->oldest) = (one)->newer,                     \
     (one)->newer = (one)->older = NULL)
#define PUT_NEWEST(list, one)                                                                     \
    ((one)->older = (list)->newest, (one)->newer = NULL,                                          \
     *((one)->older ? &(one)->older->newer : &(list)->oldest) = (one), (list)->newest = (one))

enum { ABI = 49 }; /* counts changes of the structures and functions that Python uses */
enum { MAX_FILTERS = 32, MAX_RANK = 33, MAX_IOVEC = 1024, MAX_PROBES = 16 };
enum { ADVISED_NBYTES = 128 * 1024 }; /* Linux cuts longer requests to its read-ahead window */
enum { LARGE_PAGE = 1 << 21 };
enum { LONG_RUN_NBYTES = 1 << 20, CLOSE_NBYTES = 4096 }; /* of a run that the system reads ahead */
enum { TILE_ELEMENTS = 8, TILE_NBYTES = 16 * 1024 };
enum { MAX_LZ4_NBYTES = 0x7E000000 }; /* LZ4_MAX_INPUT_SIZE */

enum Kind { DEFLATE = 1, SHUFFLE, FLETCHER32, LZF, ZSTD, LZ4, BLOSC, BITSHUFFLE,
            BITSHUFFLE_LZ4, BITSHUFFLE_ZSTD, NOTHING, PLUGIN, SZIP, NBIT, SCALEOFFSET, BZIP2,
            STORED };
enum State { TO_SCRATCH = 0, TO_TARGET = 1, IN_TARGET = 2 };
enum Io { IO_AUTO = 0, IO_PREAD = 1, IO_MAP = 2 };
/* Why a call did not do its work, or why its work is worthless: the file is not what was indexed; a
   page of its map cannot be read; the reader is being closed. */
enum Event { NO_EVENT = 0, CHANGED = 1, FAULTED = 2, STOPPED = 3 };
/* Why an item cannot be done; read/rereading.py has the words. */
enum Reason { UNREADABLE = 1, WRONG_SIZE, DAMAGED, NO_ROOM, NOT_MAPPED, ABOVE_LIMIT, HEAP_NOWHERE,
              HEAP_BEHIND, HEAP_SIGNATURE, HEAP_VERSION, HEAP_SIZE, HEAP_FREE, HEAP_ENDS, HEAP_TWICE,
              HEAP_MISSING, HEAP_LENGTH, HEAP_NUL };

typedef struct { /* struct aec_stream of libaec.h */
    const unsigned char *next_in;
    size_t avail_in, total_in;
    unsigned char *next_out;
    size_t avail_out, total_out;
    unsigned bits_per_sample, block_size, rsi, flags;
    void *state;
} AecStream;

typedef struct {
    void *(*libdeflate_alloc_decompressor)(void);
    void (*libdeflate_free_decompressor)(void *);
    int (*libdeflate_zlib_decompress)(void *, const void *, size_t, void *, size_t, size_t *);
    void *(*ZSTD_createDCtx)(void);
    size_t (*ZSTD_freeDCtx)(void *);
    size_t (*ZSTD_decompressDCtx)(void *, void *, size_t, const void *, size_t);
    unsigned (*ZSTD_isError)(size_t);
    int (*LZ4_decompress_safe)(const char *, char *, int, int);
    int (*blosc_decompress_ctx)(const void *, void *, size_t, int);
    int (*aec_buffer_decode)(AecStream *);
    int (*BZ2_bzBuffToBuffDecompress)(char *, unsigned *, char *, unsigned, int, int);
    void *(*jpeg_std_error)(void *);
    void (*jpeg_CreateDecompress)(void *, int, size_t);
    void (*jpeg_mem_src)(void *, const unsigned char *, unsigned long);
    int (*jpeg_read_header)(void *, int);
    int (*jpeg_start_decompress)(void *);
    void (*jpeg_crop_scanline)(void *, unsigned *, unsigned *);
    unsigned (*jpeg_skip_scanlines)(void *, unsigned);
    unsigned (*jpeg_read_scanlines)(void *, unsigned char **, unsigned);
    int (*jpeg_finish_decompress)(void *);
    void (*jpeg_destroy_decompress)(void *);
} Libraries;

typedef struct Trace Trace; /* see trace.c */

/* NumPy declares it, too: h5async/system/timeline.py. */
typedef struct {
    int64_t begin_ns, end_ns; /* end_ns 0: not noted, or not yet */
    int64_t thread, batch;    /* what pthread_self() returned; the batch's serial number */
    int32_t stage, field, source, padding; /* below 0: none, or several */
} TraceEvent;

/* What of an item cannot be done, and why: the first reason since the caller has set it to 0. */
typedef struct {
    int64_t reason;
    int64_t filter;          /* of the pipeline; below 0: none */
    int64_t extent;          /* the chunk; below 0: none; of variable length, the element */
    int64_t cross;           /* which piece of the item */
    int64_t at;              /* the byte of the file; below 0: unknown */
    int64_t expected, found; /* bytes, or what the reason says */
} Failure;

/* What a worker has done so far, or all of them. */
typedef struct {
    int64_t read_ns, decode_ns, place_ns, transform_ns;
    int64_t plan_ns, upload_ns; /* of batches in a queue */
    int64_t read_nbytes, decoded_chunks, decoded_nbytes;
} Done;

/* Add to what a worker has done, which others may sum up meanwhile. Only the worker's thread does. */
ALWAYS_INLINE void add_done(int64_t *of, int64_t more)
{
    __atomic_store_n(of, *of + more, __ATOMIC_RELAXED);
}

typedef struct Worker Worker;
struct Worker {
    const Libraries *libraries;
    uint8_t *encoded, *chunk, *between[3];
    int64_t encoded_nbytes, chunk_nbytes, between_nbytes;
    void *deflate, *zstd, *heap;  /* made when first needed; heap: a HeapScratch */
    Done done;
    Worker *older;                /* of a list of all workers of a reader; see work.c */
    int64_t returned_ns;          /* when the last call ended */
    const volatile int32_t *stop; /* not 0: end as soon as possible */
    _Atomic(Trace *) trace, tracing; /* of calls from now on, and of this one; NULL: not traced */
    int64_t batch;                   /* its serial number */
    TraceEvent latest;               /* which may grow */
    int32_t traced_field, traced_source;
    Failure failure;
    int64_t least_nbytes; /* above 0: a chunk is taken that decodes to so many bytes at least */
    int64_t lists_all;    /* not 0: what is kept of far sources is to be fetched, too */
    void *held; /* of malloc: the input of a decoder that needs a copy */
};

/* Bytes of a source that lies elsewhere, which were fetched, or are to be. Several are sorted by source
   and offset, and do not overlap. */
typedef struct {
    int64_t source, offset, nbytes;
    const uint8_t *data;
} Fetched;

typedef struct {
    Fetched *ranges;
    int64_t count, room; /* more may be counted than there is room for */
} Asked;

/* Where bytes of a far source are kept; see mirror.c. Python makes it. */
typedef struct {
    const uint8_t *map; /* of the whole file, guarded as maps of sources are */
    int64_t map_nbytes;
    uint8_t *marks; /* by block: 1, if it was compared with its checksum */
    const uint64_t *weights;
    const char *path;
    int64_t device, inode;
    int64_t nbytes; /* of the source */
} Mirror;

typedef struct {
    int32_t fd, io;
    const uint8_t *map; /* NULL: not mapped */
    int64_t map_nbytes;
    /* As indexed. It is not checked if `nbytes` is -1, while a SWMR writer has the file, or -2. */
    int64_t device, inode, nbytes, modified_ns, changed_ns;
    int64_t event;                                          /* out: enum Event */
    const char *path; /* fd below 0: by which its state is asked for; NULL: it is memory */
    int64_t failed_at, error; /* out: where a read failed; what errno said, 0: the file ended */
    int64_t is_far; /* it lies elsewhere: there is nothing but what was fetched of it, or is kept */
    const Mirror *mirror; /* NULL: nothing is; else `path`, `device` and `inode` are the mirror's */
    const Fetched *fetched;
    int64_t num_fetched;
    Asked *asked; /* where ranges to be fetched are listed, if they are */
} File;

/* H5Z_func_t of H5Zdevelop.h */
typedef size_t (*PluginFunction)(unsigned, size_t, const unsigned *, size_t, size_t *, void **);

typedef struct {
    int32_t kind, element;   /* SHUFFLE, BITSHUFFLE*: bytes of an element; PLUGIN: its traits */
    int64_t block;           /* BITSHUFFLE: elements of a block, 0: the default */
    const uint32_t *values;  /* the client data, of PLUGIN, SZIP, NBIT, SCALEOFFSET, STORED */
    int64_t num_values;
    PluginFunction function; /* of PLUGIN */
} Filter;

/* The part of each row that is delivered, at a place that is drawn for each sample, or given; see
   crops.c. */
typedef struct {
    const int64_t *extents, *sizes; /* [rank]: of a row, and of the part */
    const int64_t *drawn;   /* [rank]: which random number says where it begins; below 0: the middle */
    const int64_t *flipped; /* [rank]: which one says whether it is reversed; below 0: it never is */
    const uint64_t *group;  /* [2]: fields of equal ones have equal places */
    int64_t rank, first;    /* numbers of the plan before these, per sample */
    int64_t rows_of_sample;
    const int64_t *given;   /* [samples][rank], or of all samples in common: places; NULL: drawn */
    int64_t given_step;     /* from the place of a sample to the next one; 0: all have one */
    const int64_t *steps, *strides; /* [rank]: between elements of the part, in elements of the row and
                                       in bytes of the batch; NULL: 1, and those of the dataset */
} Crop;

/* Of a dataset. `rank` counts all dimensions but that of the samples; its cross-section is the
   pieces that make up one sample, `num_cross` of them. */
typedef struct {
    const Filter *filters;
    const int64_t *chunk_strides, *row_strides; /* [rank], bytes */
    const int64_t *extents;                     /* [num_cross][rank] */
    const int64_t *row_begin, *piece_begin;     /* [num_cross], bytes: in a row, in a chunk */
    const uint8_t *fill;                        /* [itemsize] */
    int64_t num_filters, num_cross, rank;
    int64_t chunk_nbytes, chunk_samples, sample_stride, itemsize, row_nbytes;
    int64_t rows_are_whole;
    const Crop *crop;    /* NULL: whole rows are delivered; else, of each dimension here: */
    const int64_t *axis; /* [rank]: which dimension of a row it is; below 0: none, it has one element */
    const int64_t *num_cells;  /* [rank]: how many pieces follow each other along it */
    const int64_t *cell_begin; /* of all of them: where each begins in a row, in elements */
    const int64_t *places;     /* [samples][crop->rank]: of the batch at hand; see crops.c */
    int64_t begin; /* below 0: it has chunks; else it is contiguous, and its own only chunk */
} Dataset;

static int fail(Worker *w, int64_t reason, int64_t filter, int64_t expected, int64_t found)
{
    if (w->failure.reason == 0)
        w->failure = (Failure){reason, filter, -1, 0, -1, expected, found};
    return 0;
}

/* Make a lock that nobody holds for long: who finds it held looks again a while before it sleeps. */
static int init_short_lock(pthread_mutex_t *lock)
{
#if defined(PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP)
    *lock = (pthread_mutex_t)PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
    return 0;
#else
    return pthread_mutex_init(lock, NULL);
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
