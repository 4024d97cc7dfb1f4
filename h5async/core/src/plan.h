/* The plan of a batch: items that do not depend on each other, and the samples that they name. */

enum { ITEM_NBYTES = 1 << 17 /* of rows, some 10 us */ };
enum { BLOCK_SEQUENCES = 512 }; /* elements of variable length of an item, at most */
enum { RUN_NBYTES = 96 }; /* are copied while memory far from others is fetched */
enum Status { TO_DO = 0, DONE = 1, REFUSED = 2 };
#define MOST_COST ((int64_t)1 << 40) /* of an item: so the sum of many is a number, too */

/* Pieces `cross` to `cross_end` of the samples of one chunk's worth of rows; or rows that lie in the
   file as they are; or rows that nothing holds. The runs say which samples, and where they go. Where whole rows are kept,
   an item takes them once all pieces are there, and one without runs helps to decode its pieces. Or
   elements of variable length of one heap: their runs say which element, to which byte its values go,
   and, in place of a length, which sample of the batch it is. */
typedef struct {
    int32_t source, field, layer, segment;
    int32_t kind, status;
    int64_t number;              /* of the chunk of piece 0, at sample 0 of the grid */
    int64_t first_run, num_runs; /* ROWS: the first of the sorted samples, and how many */
    int32_t cross, cross_end;
    int64_t nbytes;              /* what it costs */
} Item;

/* While they are sorted, a sample and its place in the batch. Then a run of such: `rank` is that of
   the first one among the sorted samples, and the next run's `rank` is the end. */
typedef struct {
    int64_t sample;
    int32_t position, rank;
} Wanted;

typedef struct {
    Item *items;
    int64_t *run_local, *run_position, *run_length;
    Wanted *wanted, *spare; /* room for one more than there are samples */
    Wanted *sorted;         /* `num_wanted` runs of all groups, and the end; see above */
    Wanted *order, *order_spare; /* of items, by source */
    int64_t *places; /* by sample of the batch: its first value, of the field that is planned */
    int64_t *crops;  /* places of parts of rows, of one field after the other; see crops.c */
    int64_t most_crops, num_samples;
    int64_t num_items, num_runs, num_wanted;
    int64_t most_items, most_runs, most_wanted, most_order, most_sorted, most_places;
    int64_t first_wanted; /* the first run of the group that is planned */
    int64_t nbytes;
    const Fetched *fetched; /* of sources that lie elsewhere; set by Python, which keeps them */
    int64_t num_fetched;
    _Atomic int64_t was_cached; /* whether all that was read by the last plan was in the page cache */
} BatchPlan;

typedef struct {
    uint8_t *raw, *out; /* rows as read; as delivered */
    int64_t is_wanted;
    int64_t capacity; /* rows that there is room for, of a ragged field */
    int64_t *offsets; /* where the rows of each of its samples begin, and the end; NULL: not listed */
} Target;
