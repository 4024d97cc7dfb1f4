/* Decoded chunks that later batches need: each is decoded by one thread, and kept within a budget.

   A thread that is given a chunk to decode publishes it, or gives it up, and never waits meanwhile;
   so nobody waits for long. What a chunk is kept in comes from the system, and is used again for the
   next chunk of the same size. */

enum Claim { UNKEPT = 0, CLAIMED = 1, READY = 2, BUSY = 3 };
enum { LEAST_KEPT = 2 }; /* chunks: where two batches share one, the later batch finds it */
enum { KEPT_OVERHEAD = 128 }; /* what a chunk takes beside its bytes, and the system for both */

typedef struct Kept {
    uint64_t key;
    struct Kept *next;            /* in a bucket; or in the list of those that are not used */
    struct Kept *newer, *older;   /* among all that are there, by their last use: see is_scarce */
    int64_t nbytes;
    int32_t state, users, is_dropped;
    uint8_t *data;
} Kept;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t published;
    Kept **buckets;
    int64_t num_buckets; /* a power of two */
    Kept *newest, *oldest;
    int64_t nbytes, budget_nbytes;
    int32_t is_scarce; /* chunks had to make way for others: their order of use is noted from then on */
    int64_t chunk_nbytes, most_chunk_nbytes; /* without KEPT_OVERHEAD: now, and at most so far */
} Store;

static Kept **bucket_of(Store *store, uint64_t key)
{
    uint64_t mixed = (key + 1) * 0x9E3779B97F4A7C15u;
    return &store->buckets[mixed >> 32 & (uint64_t)(store->num_buckets - 1)];
}

static Kept *find_kept(Store *store, uint64_t key)
{
    Kept *kept = *bucket_of(store, key);
    while (kept != NULL && kept->key != key)
        kept = kept->next;
    return kept;
}

static void unlink_kept(Store *store, Kept *kept)
{
    *(kept->newer ? &kept->newer->older : &store->newest) = kept->older;
    *(kept->older ? &kept->older->newer : &store->oldest) = kept->newer;
    kept->newer = kept->older = NULL;
}

static void put_newest(Store *store, Kept *kept)
{
    kept->older = store->newest, kept->newer = NULL;
    *(kept->older ? &kept->older->newer : &store->oldest) = kept;
    store->newest = kept;
}

/* Take a chunk out of the table; who uses it goes on with it. */
static void drop_kept(Store *store, Kept *kept)
{
    Kept **at = bucket_of(store, kept->key);
    while (*at != kept)
        at = &(*at)->next;
    *at = kept->next;
    unlink_kept(store, kept);
    store->nbytes -= kept->nbytes + KEPT_OVERHEAD;
    store->chunk_nbytes -= kept->nbytes;
    kept->is_dropped = 1;
}

static void free_kept(Kept *kept)
{
    free(kept->data);
    free(kept);
}

/* Return memory for a chunk: what was out of use for longest makes way; NULL: there is none. */
static Kept *new_kept(Store *store, int64_t nbytes)
{
    int64_t cost = nbytes + KEPT_OVERHEAD, least = LEAST_KEPT * cost;
    int64_t most = store->budget_nbytes > least ? store->budget_nbytes : least;
    Kept *again = NULL;
    for (Kept *kept = store->oldest, *newer; kept && store->nbytes + cost > most; kept = newer) {
        newer = kept->newer;
        store->is_scarce = 1;
        if (kept->users)
            continue;
        drop_kept(store, kept);
        if (again == NULL && kept->nbytes == nbytes)
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
        again = calloc(1, sizeof *again);
        if (again == NULL || (again->data = malloc((size_t)nbytes)) == NULL) {
            free(again);
            return NULL;
        }
    }
    again->nbytes = nbytes;
    return again;
}

/* Look up a chunk, and claim it where it is not there. `wait`: until whoever decodes it is done. */
static enum Claim claim_chunk(Store *store, uint64_t key, int64_t nbytes, int wait, Kept **found)
{
    pthread_mutex_lock(&store->lock);
    Kept *kept = find_kept(store, key);
    while (wait && kept != NULL && kept->state == CLAIMED) {
        pthread_cond_wait(&store->published, &store->lock);
        kept = find_kept(store, key);
    }
    enum Claim claim = UNKEPT;
    if (kept == NULL) {
        kept = new_kept(store, nbytes);
        if (kept != NULL) {
            Kept **bucket = bucket_of(store, key);
            kept->key = key, kept->state = CLAIMED, kept->users = 1, kept->is_dropped = 0;
            kept->next = *bucket;
            *bucket = kept;
            put_newest(store, kept);
            store->nbytes += nbytes + KEPT_OVERHEAD;
            store->chunk_nbytes += nbytes;
            if (store->chunk_nbytes > store->most_chunk_nbytes)
                store->most_chunk_nbytes = store->chunk_nbytes;
            claim = CLAIMED;
        }
    } else if (kept->state == CLAIMED) {
        claim = BUSY;
    } else {
        kept->users++;
        unlink_kept(store, kept);
        put_newest(store, kept);
        claim = READY;
    }
    pthread_mutex_unlock(&store->lock);
    *found = claim == CLAIMED || claim == READY ? kept : NULL;
    return claim;
}

/* Look up some chunks at once; those that are not there decoded are NULL. */
static void take_ready(Store *store, const uint64_t *keys, int count, Kept **found)
{
    pthread_mutex_lock(&store->lock);
    for (int i = 0; i < count; i++)
        __builtin_prefetch(bucket_of(store, keys[i]));
    for (int i = 0; i < count; i++) {
        found[i] = *bucket_of(store, keys[i]);
        __builtin_prefetch(found[i]);
    }
    for (int i = 0; i < count; i++) {
        while (found[i] != NULL && found[i]->key != keys[i])
            found[i] = found[i]->next;
        if (found[i] == NULL || found[i]->state != READY) {
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
            unlink_kept(store, found[i]);
            put_newest(store, found[i]);
        }
    pthread_mutex_unlock(&store->lock);
}

/* Be done with chunks that were looked up. */
static void give_back_ready(Store *store, Kept **found, int count)
{
    pthread_mutex_lock(&store->lock);
    for (int i = 0; i < count; i++)
        if (found[i] != NULL && (--found[i]->users || !found[i]->is_dropped))
            found[i] = NULL;
    pthread_mutex_unlock(&store->lock);
    for (int i = 0; i < count; i++)
        if (found[i] != NULL)
            free_kept(found[i]);
}

/* Be done with a chunk that was claimed, or found ready; `is_filled`: its memory holds it. */
static void release_chunk(Store *store, Kept *kept, int is_filled)
{
    pthread_mutex_lock(&store->lock);
    if (kept->state == CLAIMED) {
        kept->state = READY;
        if (!is_filled && !kept->is_dropped)
            drop_kept(store, kept);
        pthread_cond_broadcast(&store->published);
    }
    int is_free = --kept->users == 0 && kept->is_dropped;
    pthread_mutex_unlock(&store->lock);
    if (is_free)
        free_kept(kept);
}

/* Returns a store, or NULL where there is no memory for it. */
PUBLIC Store *h5async_new_store(int64_t budget_nbytes, int64_t least_chunk_nbytes)
{
    int64_t least = least_chunk_nbytes < 0 ? 0 : least_chunk_nbytes;
    int64_t most = budget_nbytes / (least + KEPT_OVERHEAD);
    Store *store = calloc(1, sizeof *store);
    if (store == NULL)
        return NULL;
    store->budget_nbytes = budget_nbytes, store->num_buckets = 16;
    while (store->num_buckets < most && store->num_buckets < 1 << 20)
        store->num_buckets *= 2;
    store->buckets = calloc((size_t)store->num_buckets, sizeof *store->buckets);
    if (store->buckets == NULL) {
        free(store);
        return NULL;
    }
    pthread_mutex_init(&store->lock, NULL);
    pthread_cond_init(&store->published, NULL);
    return store;
}

/* Forget all chunks: their file has changed. */
PUBLIC int64_t h5async_clear_store(Store *store)
{
    pthread_mutex_lock(&store->lock);
    for (Kept *kept = store->oldest, *newer; kept != NULL; kept = newer) {
        newer = kept->newer;
        drop_kept(store, kept);
        if (kept->users == 0)
            free_kept(kept);
    }
    pthread_cond_broadcast(&store->published);
    pthread_mutex_unlock(&store->lock);
    return 1;
}

/* Bytes of chunks that it has held at most. */
PUBLIC int64_t h5async_most_kept(Store *store)
{
    pthread_mutex_lock(&store->lock);
    int64_t most = store->most_chunk_nbytes;
    pthread_mutex_unlock(&store->lock);
    return most;
}

/* Nobody uses any of it. It is freed once, however often this is called. */
PUBLIC int64_t h5async_free_store(Store **stored)
{
    Store *store = *stored;
    *stored = NULL;
    if (store == NULL)
        return 1;
    h5async_clear_store(store);
    pthread_mutex_destroy(&store->lock);
    pthread_cond_destroy(&store->published);
    free(store->buckets);
    free(store);
    return 1;
}
