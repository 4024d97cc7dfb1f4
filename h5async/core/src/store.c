/* Keeps decoded chunks that later batches need: each is decoded by one thread, within a budget.

   An entry is one decoded chunk; or whole rows, put together once from all chunks that hold pieces of
   them, which several threads may decode at the same time. So an entry has one or more pieces, and a
   thread that finds one missing claims it.

   A thread that has claimed a piece publishes it, or gives it up, and never waits meanwhile; so nobody
   waits for long. Memory comes from the system, and is reused for the next entry of the same size. */

enum Claim { UNKEPT = 0, CLAIMED = 1, READY = 2, BUSY = 3 };
enum PieceState { PIECE_MISSING = 0, PIECE_CLAIMED, PIECE_READY };
enum { LEAST_KEPT = 2 }; /* chunks: if two batches share one, the later batch finds it */
enum { KEPT_OVERHEAD = 128 }; /* bytes of a chunk besides its data, and of malloc for both */

typedef struct Kept {
    uint64_t key;                 /* this and the next ones are read by each look-up */
    struct Kept *next;            /* in a bucket */
    int64_t missing;              /* pieces that are not ready */
    int32_t users, is_dropped;
    uint8_t *data;
    int64_t nbytes, num_pieces;
    struct Kept *newer, *older;   /* of all entries, by their last use: see is_scarce */
    uint8_t pieces[];             /* enum PieceState of each */
} Kept;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t published;
    Kept **buckets;
    int64_t num_buckets; /* a power of two */
    Kept *newest, *oldest;
    int64_t nbytes, budget_nbytes;
    int32_t is_scarce; /* chunks have been evicted: their order of use is recorded from then on */
    int64_t chunk_nbytes, most_chunk_nbytes; /* without KEPT_OVERHEAD: now, and at the peak */
    _Atomic int64_t whole_reads; /* of chunks that a batch took whole: see are_read_again */
} Store;

static Kept **bucket_of(Store *store, uint64_t key)
{
    uint64_t mixed = (key + 1) * 0x9E3779B97F4A7C15u;
    return &store->buckets[mixed >> 32 & (uint64_t)(store->num_buckets - 1)];
}

/* Cost of an entry in the budget. Rows cost less than their decoded chunks would. */
static int64_t cost_of_kept(int64_t nbytes, int64_t num_pieces)
{
    return nbytes + KEPT_OVERHEAD + num_pieces - 1;
}

/* Removes an entry from the table; its users go on using it. */
static void drop_kept(Store *store, Kept *kept)
{
    Kept **at = bucket_of(store, kept->key);
    while (*at != kept)
        at = &(*at)->next;
    __atomic_store_n(at, kept->next, __ATOMIC_RELAXED); /* see take_ready */
    UNLINK(store, kept);
    store->nbytes -= cost_of_kept(kept->nbytes, kept->num_pieces);
    store->chunk_nbytes -= kept->nbytes;
    kept->is_dropped = 1;
}

static void free_kept(Kept *kept)
{
    free(kept->data);
    free(kept);
}

/* Rows of many chunks are written in scattered order: large pages speed up address translation. */
static void *new_memory(size_t nbytes)
{
    void *memory = NULL;
    if (nbytes < 2 * LARGE_PAGE)
        return malloc(nbytes);
    if (posix_memalign(&memory, LARGE_PAGE, nbytes) != 0)
        return NULL;
#if defined(MADV_HUGEPAGE)
    madvise(memory, nbytes / LARGE_PAGE * LARGE_PAGE, MADV_HUGEPAGE);
#endif
    return memory;
}

/* Returns memory for an entry, evicting those unused for longest; NULL: there is none. */
static Kept *new_kept(Store *store, int64_t nbytes, int64_t num_pieces)
{
    int64_t cost = cost_of_kept(nbytes, num_pieces), least = LEAST_KEPT * cost;
    int64_t most = store->budget_nbytes > least ? store->budget_nbytes : least;
    Kept *again = NULL;
    for (Kept *kept = store->oldest, *newer; kept && store->nbytes + cost > most; kept = newer) {
        newer = kept->newer;
        store->is_scarce = 1;
        if (kept->users)
            continue;
        drop_kept(store, kept);
        if (again == NULL && kept->nbytes == nbytes && kept->num_pieces == num_pieces)
            again = kept;
        else
            free_kept(kept);
    }
    if (store->nbytes + cost > most) {
        if (again != NULL)
            free_kept(again);
        return NULL;
    }
    if (again == NULL) {
        again = calloc(1, sizeof *again + (size_t)num_pieces);
        if (again == NULL || (again->data = new_memory((size_t)nbytes)) == NULL) {
            free(again);
            return NULL;
        }
    }
    again->nbytes = nbytes, again->num_pieces = again->missing = num_pieces;
    memset(again->pieces, PIECE_MISSING, (size_t)num_pieces);
    return again;
}

/* Uses the entry of a key, creating it if necessary, until it is let go; NULL: there is no room. */
static Kept *use_rows(Store *store, uint64_t key, int64_t nbytes, int64_t num_pieces)
{
    pthread_mutex_lock(&store->lock);
    Kept **bucket = bucket_of(store, key), *kept = *bucket;
    while (kept != NULL && kept->key != key)
        kept = kept->next;
    if (kept != NULL) {
        UNLINK(store, kept);
    } else if ((kept = new_kept(store, nbytes, num_pieces)) != NULL) {
        kept->key = key, kept->users = 0, kept->is_dropped = 0;
        kept->next = *bucket;
        __atomic_store_n(bucket, kept, __ATOMIC_RELAXED);
        store->nbytes += cost_of_kept(nbytes, num_pieces);
        store->chunk_nbytes += nbytes;
        if (store->chunk_nbytes > store->most_chunk_nbytes)
            store->most_chunk_nbytes = store->chunk_nbytes;
    }
    if (kept != NULL) {
        PUT_NEWEST(store, kept);
        kept->users++;
    }
    pthread_mutex_unlock(&store->lock);
    return kept;
}

/* Whether the content of one of an entry's `num_cross` chunks is ready. */
static int is_ready(Store *store, uint64_t key, int64_t cross, int64_t num_cross)
{
    pthread_mutex_lock(&store->lock);
    const Kept *kept = *bucket_of(store, key);
    while (kept != NULL && kept->key != key)
        kept = kept->next;
    int is_there =
        kept != NULL && kept->pieces[cross * kept->num_pieces / num_cross] == PIECE_READY;
    pthread_mutex_unlock(&store->lock);
    return is_there;
}

/* Claims one of pieces `begin` to `end` that is missing, the next one from `at` on, and sets `at` to it;
   the caller has claimed `own` pieces before. READY: no others are missing. BUSY: other threads decode
   all that are missing; if the caller is to `wait`, it waits for them instead. */
static enum Claim claim_piece(Store *store, Kept *kept, int64_t own, int wait, int64_t begin,
                              int64_t end, int64_t *at)
{
    const uint8_t *found = NULL;
    pthread_mutex_lock(&store->lock);
    while (kept->missing != own) {
        found = memchr(kept->pieces + *at, PIECE_MISSING, (size_t)(end - *at));
        if (found == NULL) /* an earlier one may have been given up */
            found = memchr(kept->pieces + begin, PIECE_MISSING, (size_t)(*at - begin));
        if (found != NULL || !wait)
            break;
        pthread_cond_wait(&store->published, &store->lock);
    }
    enum Claim claim = found != NULL ? CLAIMED : kept->missing == own ? READY : BUSY;
    if (found != NULL) {
        *at = found - kept->pieces;
        kept->pieces[*at] = PIECE_CLAIMED;
        kept->users++;
    }
    pthread_mutex_unlock(&store->lock);
    return claim;
}

/* Removes a user; returns whether the caller has to free the entry. Called with the lock held. */
static int unuse_kept(Kept *kept)
{
    return --kept->users == 0 && kept->is_dropped;
}

/* Looks up several chunks at once; those that are not there decoded are NULL in `found`. */
static void take_ready(Store *store, const uint64_t *keys, int count, Kept **found)
{
    for (int i = 0; i < count; i++)
        __builtin_prefetch(bucket_of(store, keys[i]));
    for (int i = 0; i < count; i++) { /* before locking, to hold the lock for less time */
        const Kept *kept = __atomic_load_n(bucket_of(store, keys[i]), __ATOMIC_RELAXED);
        __builtin_prefetch(kept, 1);
        __builtin_prefetch((const uint8_t *)kept + offsetof(Kept, nbytes), 1);
    }
    pthread_mutex_lock(&store->lock);
    for (int i = 0; i < count; i++) {
        found[i] = *bucket_of(store, keys[i]);
        while (found[i] != NULL && found[i]->key != keys[i])
            found[i] = found[i]->next;
        if (found[i] == NULL || found[i]->missing) {
            found[i] = NULL;
            continue;
        }
        found[i]->users++;
        if (store->is_scarce) {
            __builtin_prefetch(found[i]->newer);
            __builtin_prefetch(found[i]->older);
        }
    }
    for (int i = 0; store->is_scarce && i < count; i++)
        if (found[i] != NULL) {
            UNLINK(store, found[i]);
            PUT_NEWEST(store, found[i]);
        }
    pthread_mutex_unlock(&store->lock);
}

/* Releases chunks that were looked up. */
static void give_back_ready(Store *store, Kept **found, int count)
{
    pthread_mutex_lock(&store->lock);
    for (int i = 0; i < count; i++)
        if (found[i] != NULL && !unuse_kept(found[i]))
            found[i] = NULL;
    pthread_mutex_unlock(&store->lock);
    for (int i = 0; i < count; i++)
        if (found[i] != NULL)
            free_kept(found[i]);
}

/* Releases a claimed piece; `is_filled`: its memory holds it; else others may try. With a negative
   `piece`, releases an entry that was found ready, or is in use. */
static void release_piece(Store *store, Kept *kept, int64_t piece, int is_filled)
{
    pthread_mutex_lock(&store->lock);
    if (piece >= 0) {
        kept->pieces[piece] = is_filled ? PIECE_READY : PIECE_MISSING;
        kept->missing -= is_filled;
        pthread_cond_broadcast(&store->published);
    }
    int is_free = unuse_kept(kept);
    pthread_mutex_unlock(&store->lock);
    if (is_free)
        free_kept(kept);
}

static void let_go(Store *store, Kept *kept)
{
    release_piece(store, kept, -1, 0);
}

/* Uses a decoded chunk, or claims it if it is missing. `wait`: waits while another thread decodes it. */
static enum Claim claim_chunk(Store *store, uint64_t key, int64_t nbytes, int wait, Kept **found)
{
    int64_t at = 0;
    Kept *kept = use_rows(store, key, nbytes, 1);
    enum Claim claim = kept ? claim_piece(store, kept, 0, wait, 0, 1, &at) : UNKEPT;
    *found = claim == CLAIMED || claim == READY ? kept : NULL;
    if (kept != NULL && claim != READY) /* a claim counts as a use of its own */
        let_go(store, kept);
    return claim;
}

/* With `keeps_all`, chunks that a batch takes whole are kept at once: see are_read_again. */
PUBLIC Store *h5async_new_store(int64_t budget_nbytes, int64_t least_chunk_nbytes, int64_t keeps_all)
{
    int64_t least = least_chunk_nbytes < 0 ? 0 : least_chunk_nbytes;
    int64_t most = budget_nbytes / (least + KEPT_OVERHEAD);
    Store *store = calloc(1, sizeof *store);
    if (store == NULL)
        return NULL;
    store->budget_nbytes = budget_nbytes, store->num_buckets = 16;
    store->whole_reads = keeps_all ? INT64_MAX / 2 : 0;
    while (store->num_buckets < most && store->num_buckets < 1 << 20)
        store->num_buckets *= 2;
    store->buckets = calloc((size_t)store->num_buckets, sizeof *store->buckets);
    if (store->buckets == NULL) {
        free(store);
        return NULL;
    }
    init_short_lock(&store->lock);
    pthread_cond_init(&store->published, NULL);
    return store;
}

/* Gives the pages of memory that is about to be freed back to the system: malloc would keep them, for
   each of its arenas up to twice the largest block that the process ever freed. */
static void drop_pages(uint8_t *data, int64_t nbytes)
{
#if defined(__linux__) /* elsewhere, MADV_DONTNEED is only a hint */
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = ((uintptr_t)data + page - 1) & ~(page - 1);
    uintptr_t end = ((uintptr_t)data + (uintptr_t)nbytes) & ~(page - 1);
    if (begin < end)
        madvise((void *)begin, end - begin, MADV_DONTNEED);
#endif
}

static void forget_all(Store *store, int drops_pages)
{
    pthread_mutex_lock(&store->lock);
    for (Kept *kept = store->oldest, *newer; kept != NULL; kept = newer) {
        newer = kept->newer;
        drop_kept(store, kept);
        if (kept->users == 0) {
            if (drops_pages)
                drop_pages(kept->data, kept->nbytes);
            free_kept(kept);
        }
    }
    pthread_mutex_unlock(&store->lock);
}

/* Drops all chunks: their file has changed, or nobody reads it any more. */
PUBLIC int64_t h5async_clear_store(Store *store)
{
    forget_all(store, 1);
    return 1;
}

/* Frees a store that nobody uses any more; extra calls are harmless. Its pages stay with malloc, for
   reuse by the next epoch's order, for example. */
PUBLIC int64_t h5async_free_store(Store **stored)
{
    Store *store = *stored;
    *stored = NULL;
    if (store == NULL)
        return 1;
    forget_all(store, 0);
    pthread_mutex_destroy(&store->lock);
    pthread_cond_destroy(&store->published);
    free(store->buckets);
    free(store);
    return 1;
}
