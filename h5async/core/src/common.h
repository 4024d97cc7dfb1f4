/* Declarations shared by all parts: structures, including those that Python fills in, and the clock. */

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
#error "the core supports only little-endian machines; others run without it"
#endif

/* H5ASYNC_PORTABLE builds the code paths of other processors and systems, to test them here, too. */
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
#define NOINLINE __attribute__((noinline)) /* leaves its loops enough registers */

/* Defines `name` by the inlined function `name`_inline, compiled a second time for AVX2. */
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

/* The same, and compiled once more for AVX-512, which can multiply 64-bit integers. */
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

/* Calls an inlined function with a size as its last argument: a constant if it is 1, 2, 4 or 8. */
#define BY_SIZE(size, function, ...)                                                              \
    ((size) == 1   ? function(__VA_ARGS__, 1)                                                     \
     : (size) == 2 ? function(__VA_ARGS__, 2)                                                     \
     : (size) == 4 ? function(__VA_ARGS__, 4)                                                     \
     : (size) == 8 ? function(__VA_ARGS__, 8)                                                     \
                   : function(__VA_ARGS__, (int64_t)(size)))

/* Binary search: sets the variable `low` to the last number in [low, high) for which a condition holds.
   It is assumed to hold for `low`, and to fail for all numbers after the first for which it fails. */
#define FIND_LAST(low, high, at, condition)                                                       \
    while ((low) + 1 < (high)) {                                                                  \
        int64_t at = (low) + ((high) - (low)) / 2;                                                \
        *((condition) ? &(low) : &(high)) = at;                                                   \
    }

/* A doubly linked list from `newest` to `oldest`: remove an element, or insert it at the front. */
#define UNLINK(list, one)                                                                         \
    (*((one)->newer ? &(one)->newer->older : &(list)->newest) = (one)->older,                     \
     *((one)->older ? &(one)->older->newer : &(list)->oldest) = (one)->newer,                     \
     (one)->newer = (one)->older = NULL)
#define PUT_NEWEST(list, one)                                                                     \
    ((one)->older = (list)->newest, (one)->newer = NULL,                                          \
     *((one)->older ? &(one)->older->newer : &(list)->oldest) = (one), (list)->newest = (one))

enum { ABI = 49 }; /* increased with each change of structures or functions that Python uses */
enum { MAX_FILTERS = 32, MAX_RANK = 33, MAX_IOVEC = 1024, MAX_PROBES = 16 };
enum { ADVISED_NBYTES = 128 * 1024 }; /* Linux cuts longer requests to its read-ahead window */
enum { LARGE_PAGE = 1 << 21 };
enum { LONG_RUN_NBYTES = 1 << 20, CLOSE_NBYTES = 4096 }; /* run left to read-ahead; gap in a span */
enum { TILE_ELEMENTS = 8, TILE_NBYTES = 16 * 1024 };
enum { MAX_LZ4_NBYTES = 0x7E000000 }; /* LZ4_MAX_INPUT_SIZE */

enum Kind { DEFLATE = 1, SHUFFLE, FLETCHER32, LZF, ZSTD, LZ4, BLOSC, BITSHUFFLE,
            BITSHUFFLE_LZ4, BITSHUFFLE_ZSTD, NOTHING, PLUGIN, SZIP, NBIT, SCALEOFFSET, BZIP2,
            STORED };
enum State { TO_SCRATCH = 0, TO_TARGET = 1, IN_TARGET = 2 };
enum Io { IO_AUTO = 0, IO_PREAD = 1, IO_MAP = 2 };
/* Why a call was given up, or its result is invalid: the file is not as indexed; a page of its memory
   map cannot be read; the reader is being closed. */
enum Event { NO_EVENT = 0, CHANGED = 1, FAULTED = 2, STOPPED = 3 };
/* Why an item cannot be read; read/rereading.py turns these into error messages. */
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

/* Python makes NumPy arrays of these: see core/binding.py. */
typedef struct {
    int64_t begin_ns, end_ns; /* end_ns 0: not recorded (yet) */
    int64_t thread, batch;    /* pthread_self(); the batch's serial number */
    int32_t stage, field, source, padding; /* negative: none, or several */
} TraceEvent;

/* What failed in an item, and why: the first failure since the caller set `reason` to 0. */
typedef struct {
    int64_t reason;
    int64_t filter;          /* index in the pipeline; negative: none. HEAP_LENGTH: the object */
    int64_t extent;          /* the chunk; negative: none. Of variable-length data: the element */
    int64_t cross;           /* the piece of the item */
    int64_t at;              /* the file offset; negative: unknown */
    int64_t expected, found; /* bytes, or as the reason implies */
} Failure;

/* Totals of what one worker, or all of them, have done so far. */
typedef struct {
    int64_t read_ns, decode_ns, place_ns, transform_ns;
    int64_t plan_ns, upload_ns; /* of batches in a queue */
    int64_t read_nbytes, decoded_chunks, decoded_nbytes;
} Done;

/* Adds to one of a worker's totals, only in its own thread; other threads may read it meanwhile. */
ALWAYS_INLINE void add_done(int64_t *of, int64_t more)
{
    __atomic_store_n(of, *of + more, __ATOMIC_RELAXED);
}

typedef struct Worker Worker;
struct Worker {
    const Libraries *libraries;
    uint8_t *encoded, *chunk, *between[3];
    int64_t encoded_nbytes, chunk_nbytes, between_nbytes;
    void *deflate, *zstd, *heap;  /* created on first use; `heap` is a HeapScratch */
    Done done;
    Worker *older;                /* in a list of all workers of a reader; see h5async_link_worker */
    int64_t returned_ns;          /* when the last call ended */
    const volatile int32_t *stop; /* nonzero: return as soon as possible */
    _Atomic(Trace *) trace, tracing; /* for future calls, and for the current one; NULL: off */
    int64_t batch;                   /* the serial number of the current one */
    TraceEvent latest;               /* which may still be extended */
    int32_t traced_field, traced_source;
    Failure failure;
    int64_t least_nbytes; /* above 0: chunks that decode to at least this many bytes are accepted */
    int64_t lists_all;    /* nonzero: ranges of far sources are listed even if the mirror has them */
    void *held; /* from malloc: a copy of the input, for a decoder that needs one */
};

/* A range of bytes of a far source (an object in a remote store) that was fetched, or is to be fetched.
   Arrays of fetched ranges are sorted by source and offset, and do not overlap. */
typedef struct {
    int64_t source, offset, nbytes;
    const uint8_t *data;
} Fetched;

typedef struct {
    Fetched *ranges;
    int64_t count, room; /* `count` may exceed `room` */
} Asked;

/* A local disk cache of a far source; see mirror.c. Created by Python. */
typedef struct {
    const uint8_t *map; /* of the whole cache file; guarded like the maps of sources */
    int64_t map_nbytes;
    uint8_t *marks; /* by block: 1 if its checksum was verified */
    const uint64_t *weights;
    const char *path;
    int64_t device, inode;
    int64_t nbytes; /* of the source */
} Mirror;

typedef struct {
    int32_t fd, io;
    const uint8_t *map; /* NULL: not mapped */
    int64_t map_nbytes;
    /* As indexed; not checked if `nbytes` is -1 (has a SWMR writer, or is memory) or -2. */
    int64_t device, inode, nbytes, modified_ns, changed_ns;
    int64_t event;                                          /* out: enum Event */
    const char *path; /* fd negative: its state is checked by path; NULL: memory, or far */
    int64_t failed_at, error; /* out: the offset of a failed read; its errno, 0: the file ended */
    int64_t is_far; /* only fetched ranges and the mirror can be read */
    const Mirror *mirror; /* NULL: none; else `path`, `device` and `inode` are the mirror's */
    const Fetched *fetched;
    int64_t num_fetched;
    Asked *asked; /* a list of ranges to fetch, if one is being made */
} File;

/* H5Z_func_t of H5Zdevelop.h */
typedef size_t (*PluginFunction)(unsigned, size_t, const unsigned *, size_t, size_t *, void **);

typedef struct {
    int32_t kind, element;   /* SHUFFLE, BITSHUFFLE*: element size in bytes; PLUGIN: its traits */
    int64_t block;           /* BITSHUFFLE: elements per block, 0: the default */
    const uint32_t *values;  /* client data of PLUGIN, SZIP, NBIT, SCALEOFFSET, STORED */
    int64_t num_values;
    PluginFunction function; /* of PLUGIN */
} Filter;

/* The part of each row that is delivered. Where it begins is drawn for each sample, or given; see
   crops.c. */
typedef struct {
    const int64_t *extents, *sizes; /* [rank]: shape of a row, and of the part */
    const int64_t *drawn;   /* [rank]: which random number gives the begin; negative: centered */
    const int64_t *flipped; /* [rank]: which one decides whether it is reversed; negative: never */
    const uint64_t *group;  /* [2]: fields with equal groups have equal places */
    int64_t rank, first;    /* first: numbers in the plan before these, per sample */
    int64_t rows_of_sample;
    const int64_t *given;   /* places: [samples][rank], or [rank] for all samples; NULL: drawn */
    int64_t given_step;     /* from one sample's place to the next; 0: all share one */
    const int64_t *steps, *strides; /* [rank]: between elements of the part, in elements of the row and
                                       in bytes of the batch; NULL: 1, and the dataset's strides */
} Crop;

/* The layout of a dataset. `rank` counts all dimensions except that of the samples. Its cross-section
   is the `num_cross` pieces that make up one sample. */
typedef struct {
    const Filter *filters;
    const int64_t *chunk_strides, *row_strides; /* [rank], bytes */
    const int64_t *extents;                     /* [num_cross][rank] */
    const int64_t *row_begin, *piece_begin;     /* [num_cross], in bytes: in a row, in a chunk */
    const uint8_t *fill;                        /* [itemsize] */
    int64_t num_filters, num_cross, rank;
    int64_t chunk_nbytes, chunk_samples, sample_stride, itemsize, row_nbytes;
    int64_t rows_are_whole;
    const Crop *crop;    /* NULL: whole rows are delivered; else, for each dimension here: */
    const int64_t *axis; /* [rank]: the dimension of a row that it is; negative: none, its size is 1 */
    const int64_t *num_cells;  /* [rank]: number of pieces along it */
    const int64_t *cell_begin; /* of all of these: where each begins in a row, in elements */
    const int64_t *places;     /* [samples][crop->rank]: of the current batch; see crops.c */
    int64_t begin; /* negative: chunked; else contiguous, and treated as a single chunk */
} Dataset;

static int fail(Worker *w, int64_t reason, int64_t filter, int64_t expected, int64_t found)
{
    if (w->failure.reason == 0)
        w->failure = (Failure){reason, filter, -1, 0, -1, expected, found};
    return 0;
}

/* Initializes a lock that is only held briefly: if supported, threads spin before they sleep on it. */
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
