/* The plan of a batch: independent units of work (items), and the samples that they refer to. */

enum { ITEM_NBYTES = 1 << 17 /* of rows: about 10 us */ };
enum { BLOCK_SEQUENCES = 512 }; /* maximum number of variable-length elements in an item */
enum { RUN_NBYTES = 96 }; /* cost of a run: bytes copied in the time of a jump to distant memory */
enum Status { TO_DO = 0, DONE = 1, REFUSED = 2 };
#define MOST_COST ((int64_t)1 << 40) /* of an item, so that sums do not overflow */

/* A unit of work. CHUNKS: pieces `cross` to `cross_end` of samples that share chunks; ROWS: rows stored
   as they are; NO_SOURCE, ZEROS, LEFT: rows without a source; HEAP: variable-length elements of one
   heap. The runs say which samples, and where they go; of a heap, which element, at which byte its
   values go and, in place of a length, which sample of the batch it is. Where whole rows are kept, an
   item copies them once all pieces are there; one without runs helps decode its pieces. */
typedef struct {
    int32_t source, field, layer, segment;
    int32_t kind, status;
    int64_t number;              /* CHUNKS: of piece c's chunk, less cross_number[c]; ROWS: of the first
                                    run */
    int64_t first_run, num_runs; /* ROWS: rank of the first sorted sample, and number of samples */
    int32_t cross, cross_end;
    int64_t nbytes;              /* estimated cost */
} Item;

/* While being sorted, a sample, or `rank` samples in a row, and its position in the batch. Then a run of
   sorted samples: `rank` is the rank of the first one, and the next run's `rank` is the end. */
typedef struct {
    int64_t sample;
    int32_t position, rank;
} Wanted;

typedef struct {
    Item *items;
    int64_t *run_local, *run_position, *run_length;
    Wanted *wanted, *spare; /* room for one more than the number of samples */
    Wanted *sorted;         /* `num_wanted` runs of all groups, and an end marker; see above */
    Wanted *order, *order_spare; /* of items, by source */
    int64_t *places; /* by sample of the batch: its first value, of the field being planned */
    int64_t *crops;  /* places of parts of rows, field by field; see crops.c */
    int64_t most_crops, num_samples;
    int64_t num_items, num_runs, num_wanted;
    int64_t most_items, most_runs, most_wanted, most_order, most_sorted, most_places;
    int64_t first_wanted; /* the first run of the group being planned */
    int64_t nbytes;
    const Fetched *fetched; /* of far sources; set and owned by Python */
    int64_t num_fetched;
    _Atomic int64_t was_cached; /* whether everything read by the last plan was in the page cache */
} BatchPlan;

typedef struct {
    uint8_t *raw, *out; /* rows as read; as delivered */
    int64_t is_wanted;
    int64_t capacity; /* room for rows, of a ragged field */
    int64_t *offsets; /* the begin of each sample's rows, and the end; NULL: not recorded */
} Target;
