/* Asks HDF5 how a dataset is stored, in one call, through function pointers into the HDF5 library that
   h5py has loaded. Called under h5py's lock. */

enum { MOST_VALUES = 64, NAME_NBYTES = 64, ID_RANK = 32 };
enum { IS_CHUNKED = 2, IS_VIRTUAL = 3 }; /* H5D_layout_t */

typedef struct {
    int64_t (*get_type)(int64_t dataset), (*get_plist)(int64_t dataset), (*get_space)(int64_t dataset);
    uint64_t (*get_offset)(int64_t dataset);
    int (*release)(int64_t id);
    int (*encode)(int64_t type, void *to, size_t *nbytes);
    int (*get_layout)(int64_t plist);
    int (*get_chunk)(int64_t plist, int most, uint64_t *chunk);
    int (*get_external_count)(int64_t plist);
    int (*get_nfilters)(int64_t plist);
    int (*get_filter)(int64_t plist, unsigned index, unsigned *flags, size_t *count,
                      unsigned *values, size_t name_nbytes, char *name, unsigned *config);
    int (*get_extents)(int64_t space, uint64_t *extents, uint64_t *most);
    int (*get_class)(int64_t space);
} AskHDF5;

/* Appended bytes; `end` goes on counting beyond `room` when they do not fit. */
typedef struct {
    uint8_t *at;
    size_t end, room;
} Key;

static void put(Key *k, const void *from, size_t nbytes)
{
    if (k->end + nbytes <= k->room)
        memcpy(k->at + k->end, from, nbytes);
    k->end += nbytes;
}

static void put_int(Key *k, int64_t number)
{
    put(k, &number, sizeof number);
}

static int put_filters(const AskHDF5 *f, int64_t plist, Key *k)
{
    int num_filters = f->get_nfilters(plist);
    put_int(k, num_filters);
    for (int i = 0; i < num_filters; i++) {
        unsigned flags, values[MOST_VALUES];
        char name[NAME_NBYTES] = "";
        size_t count = MOST_VALUES;
        int number = f->get_filter(plist, (unsigned)i, &flags, &count, values, sizeof name, name, NULL);
        if (number < 0 || count > MOST_VALUES || memchr(name, 0, sizeof name - 1) == NULL)
            return 0;
        put_int(k, number);
        put_int(k, (int64_t)count);
        put(k, values, count * sizeof *values);
        put(k, name, strlen(name) + 1);
    }
    return num_filters >= 0;
}

/* Returns 0 if other datasets or files hold the values, which is left to Python. */
static int put_properties(const AskHDF5 *f, int64_t plist, Key *k)
{
    uint64_t chunk[ID_RANK];
    int layout = f->get_layout(plist);
    put_int(k, layout);
    if (layout < 0 || layout >= IS_VIRTUAL || f->get_external_count(plist) != 0)
        return 0;
    if (layout != IS_CHUNKED)
        return 1;
    int rank = f->get_chunk(plist, ID_RANK, chunk);
    put_int(k, rank);
    if (rank < 0 || rank > ID_RANK)
        return 0;
    put(k, chunk, (size_t)rank * sizeof *chunk);
    return put_filters(f, plist, k);
}

/* Writes to `key` what identically stored datasets have in common; returns its length, or 0 if h5py has
   to be asked. `shape` [1 + 32] receives rank and extents; the rank of a null dataspace is -1. */
PUBLIC int64_t h5async_describe(const AskHDF5 *f, int64_t dataset, int64_t *shape, uint8_t *key,
                                int64_t room)
{
    Key k = {key, 0, (size_t)room};
    int is_contiguous = f->get_offset(dataset) != UINT64_MAX, is_done = 1;
    put_int(&k, is_contiguous);
    if (!is_contiguous) {
        int64_t plist = f->get_plist(dataset);
        is_done = plist >= 0 && put_properties(f, plist, &k);
        if (plist >= 0)
            f->release(plist);
    }
    int64_t type = is_done && k.end < k.room ? f->get_type(dataset) : -1;
    size_t nbytes = k.end < k.room ? k.room - k.end : 0, left = nbytes;
    is_done = type >= 0 && f->encode(type, key + k.end, &nbytes) >= 0 && nbytes <= left;
    if (type >= 0)
        f->release(type);
    int64_t space = is_done ? f->get_space(dataset) : -1;
    if (space < 0)
        return 0;
    shape[0] = f->get_extents(space, (uint64_t *)shape + 1, NULL);
    if (shape[0] == 0 && f->get_class(space) == 2) /* H5S_NULL */
        shape[0] = -1;
    else
        is_done = shape[0] >= 0;
    f->release(space);
    return is_done ? (int64_t)(k.end + nbytes) : 0;
}
