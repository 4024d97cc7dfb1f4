/* Where the rows of a reader's fields lie: segments of samples, and the extents of their chunks.

   A field has layers, nearly always one: each holds a piece of every row (the whole row, or a region
   of it). A layer is a table of segments, sorted by their first sample. The rows of a segment lie at
   equal distances in one dataset of one source; datasets that are alike share a shape, which tells
   how their chunks are encoded and how their pieces lie in rows. */

/* Chunks of which a batch takes a part: they are not kept; decoded chunks are; or the whole rows that
   are put together of them, all rows of the chunks that hold pieces of the same samples. */
enum Keeps { KEEPS_NONE = 0, KEEPS_CHUNKS = 1, KEEPS_ROWS = 2 };

enum RowsKind { NO_SOURCE = 0, ROWS = 1, ROWS_IN_CHUNKS = 2, CHUNKS = 3, LEFT = 4, ZEROS = 5,
                HEAP = 6 };

typedef struct {
    Dataset dataset;             /* but for its chunks, which the segment has */
    const int64_t *cross_number; /* [num_cross]: numbers of the chunks of sample 0 */
    int64_t number_stride;       /* between the numbers of chunks that follow along the samples */
    int64_t kind;                /* enum RowsKind */
    int64_t source_row_nbytes;   /* ROWS: between rows in the file */
    int64_t keeps;               /* enum Keeps */
    int64_t swaps;               /* bytes of numbers that are reversed in the batch; 0: none are */
} Shape;

typedef struct {
    const int64_t *first; /* [num_segments + 1], ascending; at the end, behind the last sample. Fields
                             whose segments begin at the same samples share it */
    const int64_t *row;   /* of the first sample in the source, and the distance to the next one */
    const int64_t *step;
    const int32_t *shape, *source; /* shape -1: nothing holds these samples */
    const int64_t *begin;          /* contiguous: byte of row 0, or -1; chunked: the first extent;
                                      of variable length: which heap */
    const int64_t *count;          /* extents */
    const uint8_t *is_sparse;      /* whether extents are found by the number of their chunk */
    int64_t num_segments;
} Layer;

/* Which rows of a field each sample is: those at some offsets from its own, in its sequence. */
enum Pad { PAD_EDGE = 0, PAD_ZERO = 1 };

typedef struct {
    const int64_t *offsets; /* [num_offsets] */
    const int64_t *starts;  /* [num_sequences], not descending: the first row of each sequence */
    const int64_t *ends;    /* [num_sequences]: the row behind the last one */
    const int64_t *run_end; /* [num_offsets]: behind the offsets from here on that follow each other */
    int64_t num_offsets, num_sequences, pad;
} StepRows;

/* The steps of a sample that follow each other, from its step `step` to `end`: so many are before its
   sequence, in it from `row` on, and behind it. */
typedef struct {
    int64_t step, end, before, row, inside, behind;
} StepRun;

/* The same where their number differs: sample i is rows starts[i] to starts[i + 1]. */
typedef struct {
    const int64_t *starts; /* [num_samples + 1], not descending */
    int64_t num_samples;
} SpanRows;

/* Elements of variable length of one dataset, or of any part of it; see heap.c. */
typedef struct {
    uint32_t *length;      /* [count]: in values, as stored; 0 where there is no address */
    int64_t *place;        /* [count]: below 0: see `unresolved`; else the first byte in the file */
    int64_t count;
    int64_t base;          /* what addresses count from: bytes of the userblock */
    int64_t value_nbytes;  /* of one value of a sequence; of a string 1 */
    int32_t address_nbytes, size_nbytes; /* 4 or 8: of addresses and of sizes in the file */
    int32_t is_text;       /* strings, which HDF5 ends at a NUL byte: those with one are refused */
    int32_t padding;
} Heap;

typedef struct {
    const Layer *layers;
    const Shape *shapes;
    const int64_t *number, *offset, *nbytes; /* of all extents; number NULL: none is sparse */
    const uint32_t *mask;
    const uint8_t *fill;
    const Transform *transform; /* as rows are read, where that can be; NULL: later, or never */
    Store *store;
    int64_t nbytes_step, mask_step; /* to the next extent; 0: one number stands for all */
    int64_t num_layers, num_extents, row_nbytes, itemsize;
    int64_t is_filled_first; /* whether parts of rows may have no source */
    const StepRows *steps;   /* NULL: a sample is a row. Fields with equal steps share it */
    const SpanRows *spans;   /* the same: NULL, but of ragged fields */
    const Heap *heaps;       /* by segment, of elements of variable length; else NULL */
    const uint32_t *lengths; /* the same: how many rows each sample has */
    const Crop *crop;        /* NULL: whole rows are delivered */
    int64_t num_rows;        /* of the dataset; of elements of variable length: samples */
    int64_t limit; /* of indices, of 4 or 8 bytes: each must be from 0 on and below it; 0: any may be */
} Field;

/* FIND_LAST, sooner where it is near `low`. */
#define FIND_LAST_NEAR(low, high, at, condition)                                                  \
    for (int64_t step = 1, at; (at = (low) + step) < (high); step *= 2) {                         \
        *((condition) ? &(low) : &(high)) = at;                                                   \
    }                                                                                             \
    FIND_LAST(low, high, at, condition)

/* Whether a chunk is a small dataset without filters, which is kept whole. It may have fewer rows than
   the shape says: as many as are stored. */
static int is_small(const Shape *shape)
{
    return shape->keeps && shape->dataset.num_filters == 0 && shape->dataset.begin < 0;
}

/* The extent of a chunk; -1: never allocated; -2: there is no such chunk. */
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

/* The key under which the rows are kept of chunks of which piece 0 is of this number: no other rows of
   the field have it, nor has a chunk. -1: none of the chunks was ever allocated. */
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

/* The last of some ascending numbers that is not above `sample`; the first one, if all are. */
static int64_t last_at(const int64_t *starts, int64_t count, int64_t sample)
{
    int64_t low = 0;
    FIND_LAST(low, count, at, starts[at] <= sample)
    return low;
}

/* The segment that holds a sample, at or behind `from`; the table has it. */
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

/* The steps from `step` on of a sample in a sequence; or that step alone, if they are not joined. */
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
