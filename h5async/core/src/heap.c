/* Reads elements of variable-length datatypes: references enter; lengths, places and values leave.

   An element is stored as a reference: its length, the address of a global heap collection, and the index
   of an object there (see "Global Heap" and "Variable-Length" in the HDF5 file format specification). No
   checksum protects these, so every bound is checked. Whatever HDF5 refuses is refused here: a collection
   with another signature or version, objects that extend beyond it, a length that differs from the
   object's. So are two objects with the same index, of which HDF5 takes the last.

   The place of an element is first what its reference says and, once its collection has been walked, the
   file offset of its values; a walk also resolves neighbouring elements of the dataset. Threads may share
   the places: writes are atomic, and all threads write the same values. */

enum { COLLECTION_HEAD = 16, OBJECT_HEAD = 16, LEAST_COLLECTION = 4096, NUM_INDICES = 1 << 16 };
enum { INDEX_BITS = 16, MOST_SKIPPED = 64, HEAP_WINDOW = 16 * 1024 };
enum { MOST_COLLECTION = 1 << 20 }; /* maximum bytes of one that are fetched at once */
#define MOST_ADDRESS ((INT64_C(1) << 47) - 1)

typedef struct {
    int64_t offset, nbytes, visit; /* the walk that found it */
} HeapObject;

typedef struct {
    int64_t key, number;
} Ordered;

/* Of a thread; initially zeros. */
typedef struct {
    HeapObject object[NUM_INDICES];
    int64_t visit, begin, end;      /* the latest walk, and its range of the file */
    int64_t window_begin, window_end;
    uint8_t window[HEAP_WINDOW];
    Ordered ordered[BLOCK_SEQUENCES]; /* used by a call */
} HeapScratch;

/* core/binding.py counts it as HEAP_SCRATCH_NBYTES. */
_Static_assert(sizeof(HeapScratch) == NUM_INDICES * 24 + 5 * 8 + HEAP_WINDOW + BLOCK_SEQUENCES * 16,
               "HeapScratch has changed: update HEAP_SCRATCH_NBYTES in core/binding.py");

/* The elements to read, at most BLOCK_SEQUENCES: the values of `element[i]` go to `out + position[i]`. */
typedef struct {
    const Heap *heap;
    File *file;
    Worker *w;
    HeapScratch *scratch;
    const int64_t *element, *position;
    int64_t count;
    uint8_t *out;
    int64_t out_nbytes;
    int64_t available, file_nbytes; /* bytes of the map, 0: unused; and of the file */
    Span *asks; /* not NULL: missing parts of collections are requested, and the rest is resolved */
} HeapCall;

static int64_t unresolved(int64_t address, int64_t index)
{
    return -1 - (address << INDEX_BITS | index);
}

static int64_t address_of(int64_t place)
{
    return (-1 - place) >> INDEX_BITS;
}

static int64_t index_of(int64_t place)
{
    return (-1 - place) & (NUM_INDICES - 1);
}

static int64_t get_place(const Heap *h, int64_t number)
{
    return __atomic_load_n(&h->place[number], __ATOMIC_RELAXED);
}

/* An unsigned number of 2, 4 or 8 bytes; -1: above INT64_MAX. (Copies of constant size are loads.) */
ALWAYS_INLINE int64_t get_number(const uint8_t *from, int32_t nbytes)
{
    uint64_t number = 0;
    if (nbytes == 8)
        memcpy(&number, from, 8);
    else
        memcpy(&number, from, nbytes == 4 ? 4 : 2);
    return number > INT64_MAX ? -1 : (int64_t)number;
}

/* Decodes references (an address and 8 more bytes) to the first `count` elements. Returns their total
   number of values; -1 - i: element i has more than `most_nbytes` bytes. */
PUBLIC int64_t h5async_decode_references(const Heap *h, const uint8_t *references,
                                         int64_t most_nbytes)
{
    const int32_t nbytes = h->address_nbytes;
    int64_t total = 0;
    for (int64_t i = 0; i < h->count; i++) {
        const uint8_t *from = references + i * (nbytes + 8);
        int64_t length = get_number(from, 4), address = get_number(from + 4, nbytes);
        int64_t index = get_number(from + 4 + nbytes, 4);
        length = address == 0 ? 0 : length;
        if (length > most_nbytes / h->value_nbytes || __builtin_add_overflow(total, length, &total))
            return -1 - i;
        if (address == 0)
            index = 0;
        else if (address < 0 || address > MOST_ADDRESS || index >= NUM_INDICES)
            address = MOST_ADDRESS, index = 0; /* no file reaches that far */
        h->length[i] = (uint32_t)length;
        h->place[i] = unresolved(address, index);
    }
    return total;
}

/* Returns the 16 bytes at an offset, from the map or by reading; NULL: they cannot be read. */
static const uint8_t *heap_bytes(HeapCall *c, int64_t offset)
{
    HeapScratch *s = c->scratch;
    if (offset < 0 || offset > c->file_nbytes - OBJECT_HEAD ||
        (c->available > 0 && offset > c->available - OBJECT_HEAD)) {
        fail(c->w, HEAP_BEHIND, -1, c->file_nbytes, 0);
        return NULL;
    }
    if (c->available > 0)
        return c->file->map + offset;
    if (c->file->is_far) {
        const uint8_t *head = fetched_at(c->file, offset, OBJECT_HEAD);
        c->file->failed_at = head == NULL ? offset : c->file->failed_at;
        return head;
    }
    if (offset < s->window_begin || offset > s->window_end - OBJECT_HEAD) {
        int64_t rest = c->file_nbytes - offset;
        int64_t nbytes = rest < HEAP_WINDOW ? rest : HEAP_WINDOW;
        s->window_begin = s->window_end = 0;
        if (!read_fully(c->file, offset, s->window, nbytes))
            return NULL;
        s->window_begin = offset, s->window_end = offset + nbytes;
    }
    return s->window + (offset - s->window_begin);
}

/* Lists the objects of the collection at an offset. Returns 0 if it is damaged, which is recorded, or
   cannot be read. Free space comes last, with index 0, if there is room for its header. */
static int walk_collection(HeapCall *c, int64_t begin)
{
    HeapScratch *s = c->scratch;
    const uint8_t *head = heap_bytes(c, begin);
    if (head == NULL)
        return 0;
    if (memcmp(head, "GCOL", 4) != 0)
        return fail(c->w, HEAP_SIGNATURE, -1, 0, 0);
    if (head[4] != 1)
        return fail(c->w, HEAP_VERSION, -1, 1, head[4]);
    int64_t nbytes = get_number(head + 8, c->heap->size_nbytes);
    if (nbytes < LEAST_COLLECTION || nbytes > c->file_nbytes - begin)
        return fail(c->w, HEAP_SIZE, -1, c->file_nbytes, nbytes);
    s->visit++, s->begin = begin, s->end = begin + nbytes;
    for (int64_t at = begin + COLLECTION_HEAD; s->end - at >= OBJECT_HEAD;) {
        int64_t rest = s->end - at;
        if ((head = heap_bytes(c, at)) == NULL)
            return 0;
        int64_t index = get_number(head, 2);
        nbytes = get_number(head + 8, c->heap->size_nbytes);
        if (index == 0)
            return nbytes == rest || fail(c->w, HEAP_FREE, -1, rest, nbytes);
        HeapObject *object = &s->object[index];
        if (nbytes < 0 || nbytes > rest - OBJECT_HEAD)
            return fail(c->w, HEAP_ENDS, -1, 0, index);
        if (object->visit == s->visit)
            return fail(c->w, HEAP_TWICE, -1, 0, index);
        *object = (HeapObject){at + OBJECT_HEAD, nbytes, s->visit};
        at += OBJECT_HEAD + (nbytes + 7) / 8 * 8;
    }
    return 1;
}

/* Records the place of an element of the collection just walked. Returns 0 if its object is missing or has
   another length, which is a failure if it `is_wanted`. No walk lists an object with index 0. */
static int resolve(const HeapCall *c, int64_t number, int64_t place, int is_wanted)
{
    const Heap *h = c->heap;
    const HeapObject *object = &c->scratch->object[index_of(place)];
    int64_t nbytes = h->length[number] * h->value_nbytes;
    if (object->visit != c->scratch->visit)
        return is_wanted && fail(c->w, HEAP_MISSING, -1, 0, index_of(place));
    if (object->nbytes != nbytes)
        return is_wanted && fail(c->w, HEAP_LENGTH, index_of(place), nbytes, object->nbytes);
    __atomic_store_n(&h->place[number], object->offset, __ATOMIC_RELAXED);
    return 1;
}

/* Does the same for the elements before or after one, as long as they are in the same collection. */
static void resolve_neighbours(const HeapCall *c, int64_t number, int64_t step, int64_t address)
{
    int64_t skipped = 0;
    for (number += step; number >= 0 && number < c->heap->count; number += step) {
        int64_t place = get_place(c->heap, number);
        if (place < 0 && address_of(place) == address)
            resolve(c, number, place, 0), skipped = 0;
        else if ((place >= 0 ? place < c->scratch->begin || place >= c->scratch->end
                             : address_of(place) != 0) ||
                 ++skipped > MOST_SKIPPED)
            return;
    }
}

static int by_key(const void *a, const void *b)
{
    const Ordered *one = a, *other = b;
    return (one->key > other->key) - (one->key < other->key);
}

/* Does not sort without need: elements in dataset order are mostly in file order, too. */
static void sort_ordered(Ordered *ordered, int64_t count)
{
    for (int64_t i = 1; i < count; i++)
        if (ordered[i - 1].key > ordered[i].key) {
            qsort(ordered, (size_t)count, sizeof *ordered, by_key);
            return;
        }
}

/* If a read of a collection has failed, requests all of it, as far as its length is known. */
static void ask_for_collection(HeapCall *c, int64_t begin)
{
    HeapScratch *s = c->scratch;
    int64_t nbytes = s->begin == begin ? s->end - begin : HEAP_WINDOW;
    nbytes = nbytes < MOST_COLLECTION ? nbytes : MOST_COLLECTION;
    if (c->file->failed_at >= begin + nbytes)
        begin = c->file->failed_at;
    nbytes = nbytes < c->file_nbytes - begin ? nbytes : c->file_nbytes - begin;
    if (c->file->failed_at >= 0)
        ask_later(c->file, c->asks, begin, nbytes);
    c->file->failed_at = -1;
}

/* Resolves the places of all elements; fails if one is missing. */
static int resolve_all(HeapCall *c)
{
    const Heap *h = c->heap;
    int64_t count = 0, walked = -1;
    for (int64_t i = 0; i < c->count; i++) {
        int64_t place = c->element[i] < 0 || c->element[i] >= h->count ? unresolved(MOST_ADDRESS, 0)
                                                                       : get_place(h, c->element[i]);
        if (place < 0 && address_of(place) != 0)
            c->scratch->ordered[count++] = (Ordered){-1 - place, i};
    }
    sort_ordered(c->scratch->ordered, count);
    for (int64_t i = 0; i < count; i++) {
        int64_t place = -1 - c->scratch->ordered[i].key, address = address_of(place);
        int64_t number = c->element[c->scratch->ordered[i].number];
        int is_new = address != walked;
        if (is_stopped(c->file, c->w))
            return 0;
        if (c->asks != NULL && (address == MOST_ADDRESS ||
                                (is_new && !walk_collection(c, h->base + address)))) {
            ask_for_collection(c, h->base + address);
            continue;
        }
        if (address == MOST_ADDRESS ? !fail(c->w, HEAP_NOWHERE, -1, 0, 0)
            : (is_new && !walk_collection(c, h->base + address)) ||
                  !resolve(c, number, place, 1)) {
            fail(c->w, UNREADABLE, -1, 0, 0);
            c->w->failure.extent = number, c->w->failure.at = h->base + address;
            return 0;
        }
        walked = address;
        if (is_new) {
            resolve_neighbours(c, number, -1, address);
            resolve_neighbours(c, number, 1, address);
        }
    }
    return 1;
}

/* Copies the values of all elements, whose places are resolved. Reads are in file order. */
static int copy_all(const HeapCall *c)
{
    const Heap *h = c->heap;
    Ordered *ordered = c->scratch->ordered;
    int64_t offset[BLOCK_SEQUENCES], nbytes[BLOCK_SEQUENCES], position[BLOCK_SEQUENCES];
    int64_t element[BLOCK_SEQUENCES], count = 0;
    for (int64_t i = 0; i < c->count; i++)
        ordered[i] = (Ordered){get_place(h, c->element[i]), i};
    if (c->available == 0)
        sort_ordered(ordered, c->count);
    for (int64_t i = 0; i < c->count; i++) {
        int64_t number = ordered[i].number;
        offset[count] = ordered[i].key, element[count] = c->element[number];
        position[count] = c->position[number];
        nbytes[count] = h->length[element[count]] * h->value_nbytes;
        if (position[count] < 0 || position[count] > c->out_nbytes - nbytes[count])
            return 0;
        count += nbytes[count] > 0;
    }
    Pieces p = {.offset = offset, .nbytes = nbytes, .position = position, .count = count, .unit = 1,
                .base = c->out, .fill = (const uint8_t *)"", .itemsize = 1};
    int64_t done = c->available > 0 ? copy_pieces(c->file, c->w, &p, c->available)
                                    : pread_pieces(c->file, c->w, &p);
    for (int64_t i = 0; h->is_text && i < done; i++)
        if (memchr(c->out + position[i], 0, (size_t)nbytes[i]) != NULL)
            done = i, fail(c->w, HEAP_NUL, -1, 0, 0);
    add_done(&c->w->done.read_nbytes, sum_of(nbytes, done));
    if (done == count)
        return 1;
    fail(c->w, UNREADABLE, -1, 0, 0);
    c->w->failure.extent = element[done];
    return 0;
}

/* The file offset of an element's values or, until resolved, of its collection; not checked. -1: it has no
   values, or does not exist. */
static int64_t offset_of_element(const Heap *h, int64_t number)
{
    if (number < 0 || number >= h->count || h->length[number] == 0)
        return -1;
    int64_t place = get_place(h, number);
    return place < 0 ? h->base + address_of(place) : place;
}

static const Heap *heap_of_item(const Work *work, const Item *item)
{
    const Field *f = &work->fields[item->field];
    return &f->heaps[f->layers[item->layer].begin[item->segment]];
}

/* Describes the reading of an item. Its scratch is NULL if memory allocation fails. */
static HeapCall heap_call(const Work *work, const Field *f, const Target *target, const Item *item)
{
    HeapScratch *scratch = work->w->heap ? work->w->heap : calloc(1, sizeof *scratch);
    HeapCall call = {.heap = heap_of_item(work, item), .file = work->file, .w = work->w,
                     .scratch = scratch, .count = item->num_runs, .out = target->raw,
                     .element = work->plan->run_local + item->first_run,
                     .position = work->plan->run_position + item->first_run,
                     .out_nbytes = target->capacity * f->row_nbytes,
                     .available = work->available, .file_nbytes = nbytes_of_file(work->file)};
    work->w->heap = scratch;
    if (scratch != NULL)
        scratch->window_begin = scratch->window_end = 0;
    return call;
}

static int read_heap_item(Work *work, const Field *f, const Target *target, const Item *item)
{
    HeapCall call = heap_call(work, f, target, item);
    if (call.scratch == NULL || call.count > BLOCK_SEQUENCES)
        return fail(work->w, NO_ROOM, -1, 0, (int64_t)sizeof(HeapScratch));
    int can_read = call.available > 0 || work->file->fd >= 0 || work->file->is_far;
    int is_good = can_read && resolve_all(&call) && copy_all(&call);
    end_stage(work->w, READING, &work->last_ns);
    return is_good;
}

/* The file offset of the first element of an item that has values; -1: none has any. */
static int64_t offset_of_elements(const Work *work, const Item *item)
{
    const Heap *h = heap_of_item(work, item);
    int64_t offset = -1;
    for (int64_t i = 0; offset < 0 && i < item->num_runs; i++)
        offset = offset_of_element(h, work->plan->run_local[item->first_run + i]);
    return offset;
}

/* Requests an item's elements from the system. Large ones are mostly the first of their collection. */
static void ask_for_elements(const Work *work, const Item *item, Span *span)
{
    const Heap *h = heap_of_item(work, item);
    for (int64_t i = 0; i < item->num_runs; i++) {
        int64_t number = work->plan->run_local[item->first_run + i];
        int64_t offset = offset_of_element(h, number);
        if (offset < 0)
            continue;
        int64_t nbytes = h->length[number] * h->value_nbytes;
        if (get_place(h, number) < 0) {
            nbytes += COLLECTION_HEAD + OBJECT_HEAD;
            nbytes = nbytes < HEAP_WINDOW ? HEAP_WINDOW : nbytes;
        }
        ask_later(work->file, span, offset, nbytes);
    }
}
