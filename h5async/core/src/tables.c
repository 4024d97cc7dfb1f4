/* Where the rows of a reader's fields are stored: segments of samples, and the extents (byte ranges in
   the file) of their chunks.

   A field has layers, nearly always one: each holds a piece of every row (the whole row, or a region
   of it). A layer is a table of segments, sorted by their first sample. The rows of a segment are evenly
   spaced in one dataset of one source; similar datasets share a shape, which describes how their
   chunks are encoded and where their pieces go in rows. */

/* What is kept of chunks that a batch takes a part of: nothing; the decoded chunks; or the assembled rows,
   all rows of the chunks that hold pieces of the same samples. */
enum Keeps { KEEPS_NONE = 0, KEEPS_CHUNKS = 1, KEEPS_ROWS = 2 };

enum RowsKind { NO_SOURCE = 0, ROWS = 1, ROWS_IN_CHUNKS = 2, CHUNKS = 3, LEFT = 4, ZEROS = 5,
                HEAP = 6 };

typedef struct {
    Dataset dataset;             /* without its chunks, which the segment has */
    const int64_t *cross_number; /* [num_cross]: numbers of the chunks of sample 0 */
    int64_t number_stride;       /* between the numbers of chunks that are adjacent along the samples */
    int64_t kind;                /* enum RowsKind */
    int64_t source_row_nbytes;   /* ROWS: between rows in the file */
    int64_t keeps;               /* enum Keeps */
    int64_t swaps;               /* size of numbers to byte-swap in the batch; 0: none */
} Shape;

typedef struct {
    const int64_t *first; /* [num_segments + 1], ascending, ending with the end of the last segment.
                             Fields whose segments begin at the same samples share it */
    const int64_t *row;   /* of the first sample in the source; and `step` rows to the next one */
    const int64_t *step;
    const int32_t *shape, *source; /* shape -1: nothing holds these samples */
    const int64_t *begin;          /* contiguous: byte of row 0, or -1; chunked: the first extent;
                                      variable length: index of the heap */
    const int64_t *count;          /* extents */
    const uint8_t *is_sparse;      /* whether extents are found by the number of their chunk */
    int64_t num_segments;
} Layer;

/* Fields with steps: a sample has the rows at some offsets from its own row, within its sequence. */
enum Pad { PAD_EDGE = 0, PAD_ZERO = 1 };

typedef struct {
    const int64_t *offsets; /* [num_offsets] */
    const int64_t *starts;  /* [num_sequences], not descending: the first row of each sequence */
    const int64_t *ends;    /* [num_sequences]: the end of each sequence */
    const int64_t *run_end; /* [num_offsets]: end of the consecutive offsets that begin here */
    int64_t num_offsets, num_sequences, pad;
} StepRows;

/* Consecutive steps of a sample, from `step` to `end`: `before` of them are before its sequence, `inside`
   in it from `row` on, and `behind` after it. */
typedef struct {
    int64_t step, end, before, row, inside, behind;
} StepRun;

/* Ragged fields: sample i has rows starts[i] to starts[i + 1]. */
typedef struct {
    const int64_t *starts; /* [num_samples + 1], not descending */
    int64_t num_samples;
} SpanRows;

/* Elements of variable length of a dataset, or of part of it; see heap.c. */
typedef struct {
    uint32_t *length;      /* [count]: in values, as stored; 0 where there is no address */
    int64_t *place;        /* [count]: below 0: see `unresolved`; else the first byte in the file */
    int64_t count;
    int64_t base;          /* the base address: size of the userblock */
    int64_t value_nbytes;  /* of one value of a sequence; 1 for strings */
    int32_t address_nbytes, size_nbytes; /* 4 or 8: of addresses and of sizes in the file */
    int32_t is_text;       /* strings: HDF5 ends them at a NUL byte, so those with one are refused */
    int32_t padding;
} Heap;

typedef struct {
    const Layer *layers;
    const Shape *shapes;
    const int64_t *number, *offset, *nbytes; /* of all extents; number NULL: none is sparse */
    const uint32_t *mask;
    const uint8_t *fill;
    const Transform *transform; /* done as rows are read; NULL: done later, or not at all */
    Store *store;
    int64_t nbytes_step, mask_step; /* to the next extent; 0: one value for all */
    int64_t num_layers, num_extents, row_nbytes, itemsize;
    int64_t is_filled_first; /* whether parts of rows may have no source */
    const StepRows *steps;   /* NULL: a sample is a row. Fields with equal steps share it */
    const SpanRows *spans;   /* of ragged fields; else NULL */
    const Heap *heaps;       /* by segment, of elements of variable length; else NULL */
    const uint32_t *lengths; /* likewise: the number of rows of each sample */
    const Crop *crop;        /* NULL: whole rows are delivered */
    int64_t num_rows;        /* of the dataset; of elements of variable length: samples */
    int64_t limit; /* of fields of 4- or 8-byte indices, which must be in [0, limit); 0: no limit */
} Field;

/* FIND_LAST, faster if the result is near `low`. */
#define FIND_LAST_NEAR(low, high, at, condition)                                                  \
    for (int64_t step = 1, at; (at = (low) + step) < (high); step *= 2) {                         \
        *((condition) ? &(low) : &(high)) = at;                                                   \
    }                                                                                             \
    FIND_LAST(low, high, at, condition)

/* Whether a chunk is a whole small dataset without filters, which is kept. It may have fewer rows than
   the shape says: those that are stored. */
static int is_small(const Shape *shape)
{
    return shape->keeps && shape->dataset.num_filters == 0 && shape->dataset.begin < 0;
}

/* The extent of a chunk; -1: never allocated; -2: no such chunk. */
static int64_t find_extent(const Field *f, const Layer *layer, int64_t segment, int64_t number)
{
    int64_t begin = layer->begin[segment], count = layer->count[segment];
    if (number < 0)
        return -2;
    if (!layer->is_sparse[segment])
        return number < count ? begin + number : -2;
    int64_t low = begin - 1, high = begin + count;
    FIND_LAST(low, high, at, f->number[at] <= number)
    return low >= begin && f->number[low] == number ? low : -1;
}

/* The store's key for the assembled rows of the chunks whose piece 0 has this number. It is unique among
   the rows and chunks of the field. -1: none of the chunks was ever allocated. */
static int64_t key_of_rows(const Field *f, const Layer *layer, int64_t segment, int64_t number)
{
    int64_t shape_number = layer->shape[segment];
    const Shape *shape = &f->shapes[shape_number];
    for (int64_t c = 0; c < shape->dataset.num_cross; c++) {
        int64_t extent = find_extent(f, layer, segment, number + shape->cross_number[c]);
        if (extent >= 0 && extent < f->num_extents)
            return extent + (shape_number + 1) * f->num_extents;
    }
    return -1;
}

/* The index of the last of some ascending numbers that is not above `sample`; 0 if all are above it. */
static int64_t last_at(const int64_t *starts, int64_t count, int64_t sample)
{
    int64_t low = 0;
    FIND_LAST(low, count, at, starts[at] <= sample)
    return low;
}

/* The segment that holds a sample, which the table contains, at or after segment `from`. */
static int64_t find_segment(const Layer *layer, int64_t sample, int64_t from)
{
    int64_t high = layer->num_segments;
    FIND_LAST_NEAR(from, high, at, layer->first[at] <= sample)
    return from;
}

ALWAYS_INLINE int64_t clamped(int64_t number, int64_t most)
{
    return number < 0 ? 0 : number < most ? number : most;
}

/* The consecutive steps from `step` on of a sample in a sequence; only that step unless `is_joined`. */
ALWAYS_INLINE StepRun run_of_steps(const StepRows *steps, int64_t sequence, int64_t sample,
                                   int64_t step, int is_joined)
{
    StepRun run = {.step = step, .end = is_joined ? steps->run_end[step] : step + 1};
    int64_t row = sample + steps->offsets[step], length = run.end - step;
    run.before = clamped(steps->starts[sequence] - row, length);
    run.behind = clamped(row + length - steps->ends[sequence], length - run.before);
    run.row = row + run.before, run.inside = length - run.before - run.behind;
    return run;
}
