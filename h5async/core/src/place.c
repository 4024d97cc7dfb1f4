/* Copies samples of a decoded chunk into their rows of the batch. */

typedef struct {
    int64_t extent, from_stride, to_stride;
} Dim;

/* The piece that a chunk holds of each sample: `unit` contiguous bytes, repeated along `rank` dimensions,
   the last one varying fastest. */
typedef struct {
    Dim dims[MAX_RANK];
    int64_t rank, unit, begin, from; /* begin: offset in a row; from: in a chunk */
    int64_t cross;
} Piece;

/* Appends a dimension inside those of a piece, or joins it to the last one if they are contiguous. */
static void add_dim(Piece *piece, Dim dim)
{
    Dim *outer = piece->rank ? &piece->dims[piece->rank - 1] : NULL;
    if (dim.extent == 1)
        return;
    if (outer && outer->from_stride == dim.extent * dim.from_stride &&
        outer->to_stride == dim.extent * dim.to_stride)
        *outer = (Dim){outer->extent * dim.extent, dim.from_stride, dim.to_stride};
    else
        piece->dims[piece->rank++] = dim;
}

/* Joins contiguous elements into one unit, after the last dimension was added. */
static void join_elements(Piece *piece)
{
    const Dim inner = piece->rank ? piece->dims[piece->rank - 1] : (Dim){1, 0, 0};
    if (inner.from_stride == piece->unit && inner.to_stride == piece->unit) {
        piece->unit *= inner.extent;
        piece->rank--;
    }
}

static int piece_of(const Dataset *d, int64_t cross, Piece *piece)
{
    if (d->rank < 0 || d->rank >= MAX_RANK)
        return 0;
    const int64_t *extents = d->extents + cross * d->rank;
    int64_t from_end = d->itemsize + d->piece_begin[cross] +
                       (d->chunk_samples - 1) * d->sample_stride;
    int64_t to_end = d->itemsize + d->row_begin[cross];
    piece->rank = 0, piece->unit = d->itemsize, piece->cross = cross;
    piece->begin = d->row_begin[cross], piece->from = d->piece_begin[cross];
    for (int64_t a = 0; a < d->rank; a++) {
        Dim dim = {extents[a], d->chunk_strides[a], d->row_strides[a]};
        if (dim.extent < 1)
            return 0;
        from_end += (dim.extent - 1) * dim.from_stride;
        to_end += d->crop ? 0 : (dim.extent - 1) * dim.to_stride;
        add_dim(piece, dim);
    }
    join_elements(piece);
    return from_end <= d->chunk_nbytes && to_end <= d->row_nbytes && piece->begin >= 0 && piece->from >= 0;
}

/* Number of elements of a part, `size` elements `step` apart, that lie before the element of its row that
   is `behind` elements after where the part begins. */
ALWAYS_INLINE int64_t elements_before(int64_t behind, int64_t step, int64_t size)
{
    if (behind <= 0)
        return 0;
    int64_t count = step == 1 ? behind : (behind + step - 1) / step;
    return count < size ? count : size;
}

/* The piece of the row at a position in the batch: `whole`, which is the same for all rows; or, if parts
   of rows are delivered, its overlap with the part of this row, put into `piece`; NULL: there is none. */
static const Piece *piece_at(const Dataset *d, const Piece *whole, int64_t position, Piece *piece)
{
    const Crop *crop = d->crop;
    if (crop == NULL)
        return whole;
    const int64_t *place = d->places + position / crop->rows_of_sample * crop->rank;
    int64_t cell[MAX_RANK], cross = whole->cross, first = 0;
    for (int64_t a = d->rank - 1; a >= 0; a--, cross /= d->num_cells[a + 1])
        cell[a] = cross % d->num_cells[a];
    piece->rank = 0, piece->unit = d->itemsize, piece->cross = whole->cross;
    piece->begin = 0, piece->from = whole->from;
    for (int64_t a = 0; a < d->rank; first += d->num_cells[a++]) {
        const int64_t axis = d->axis[a], extent = d->extents[whole->cross * d->rank + a];
        if (axis < 0)
            continue;
        const int64_t size = crop->sizes[axis], step = crop->steps ? crop->steps[axis] : 1;
        const int is_flipped = place[axis] < 0;
        const int64_t inside = d->cell_begin[first + cell[a]] - (is_flipped ? ~place[axis] : place[axis]);
        const int64_t low = elements_before(inside, step, size);
        const int64_t count = elements_before(inside + extent, step, size) - low;
        if (count <= 0)
            return NULL;
        const int64_t to = is_flipped ? size - 1 - low : low;
        const int64_t stride = crop->strides ? crop->strides[axis] : d->row_strides[a];
        piece->from += (low * step - inside) * d->chunk_strides[a];
        piece->begin += to * stride;
        add_dim(piece, (Dim){count, d->chunk_strides[a] * step, is_flipped ? -stride : stride});
    }
    join_elements(piece);
    return piece;
}

ALWAYS_INLINE void copy_units(const uint8_t *from, uint8_t *to, Dim lines, Dim inner, int64_t unit)
{
    for (int64_t line = 0; line < lines.extent; line++)
        for (int64_t i = 0; i < inner.extent; i++)
            memcpy(to + line * lines.to_stride + i * inner.to_stride,
                   from + line * lines.from_stride + i * inner.from_stride, (size_t)unit);
}

static void copy_lines(const uint8_t *from, uint8_t *to, Dim lines, Dim inner, int64_t unit)
{
    BY_SIZE(unit, copy_units, from, to, lines, inner);
}

static const Dim ONE_LINE = {1, 0, 0};

static void copy_elements(const uint8_t *from, int64_t from_stride, uint8_t *to, int64_t to_stride,
                          int64_t count, int64_t unit)
{
    if (unit == 1 && to_stride == 1)
        for (int64_t i = 0; i < count; i++)
            to[i] = from[i * from_stride];
    else
        copy_lines(from, to, ONE_LINE, (Dim){count, from_stride, to_stride}, unit);
}

/* Transposes a square of elements, 16 bytes wide, by interleaving. */
#if defined(SSE2)
#define TRANSPOSE(bytes, side, low, high)                                                         \
    static void transpose_##bytes(const uint8_t *from, int64_t from_stride, uint8_t *to,           \
                                  int64_t to_stride)                                              \
    {                                                                                             \
        __m128i a[side];                                                                          \
        for (int p = 0; p < side; p++)                                                            \
            a[p] = _mm_loadu_si128((const __m128i *)(const void *)(from + p * from_stride));      \
        INTERLEAVE_HALVES(a, side, low, high)                                                     \
        for (int p = 0; p < side; p++)                                                            \
            _mm_storeu_si128((__m128i *)(void *)(to + p * to_stride), a[p]);                      \
    }
TRANSPOSE(1, 16, _mm_unpacklo_epi8, _mm_unpackhi_epi8)
TRANSPOSE(2, 8, _mm_unpacklo_epi16, _mm_unpackhi_epi16)
TRANSPOSE(4, 4, _mm_unpacklo_epi32, _mm_unpackhi_epi32)
TRANSPOSE(8, 2, _mm_unpacklo_epi64, _mm_unpackhi_epi64)
#endif

/* Copies neighbouring samples, element by element, in squares; returns how many samples it copied. */
static int64_t copy_squares(const uint8_t *from, int64_t from_stride, int64_t samples, uint8_t *to,
                            int64_t to_stride, int64_t count, int64_t unit)
{
    int64_t done = 0;
#if defined(SSE2)
    int64_t side = 16 / unit;
    for (; done + side <= samples; done += side) {
        const uint8_t *source = from + done * unit;
        uint8_t *target = to + done * to_stride;
        int64_t i = 0;
        for (; i + side <= count; i += side) {
            const uint8_t *square = source + i * from_stride;
            if (unit == 1)
                transpose_1(square, from_stride, target + i * unit, to_stride);
            else if (unit == 2)
                transpose_2(square, from_stride, target + i * unit, to_stride);
            else if (unit == 4)
                transpose_4(square, from_stride, target + i * unit, to_stride);
            else
                transpose_8(square, from_stride, target + i * unit, to_stride);
        }
        for (int64_t k = 0; k < side && i < count; k++)
            copy_elements(source + i * from_stride + k * unit, from_stride,
                          target + i * unit + k * to_stride, unit, count - i, unit);
    }
#else
    (void)from, (void)from_stride, (void)samples, (void)to, (void)to_stride, (void)count, (void)unit;
#endif
    return done;
}

typedef struct {
    const int64_t *local, *position, *length;
    int64_t count;
} Runs;

/* Whether all samples are among the first `samples` of a chunk. */
static int runs_lie_within(const Runs *runs, int64_t samples)
{
    for (int64_t r = 0; r < runs->count; r++)
        if (runs->local[r] < 0 || runs->local[r] > samples - runs->length[r])
            return 0;
    return 1;
}

/* A place in a piece, by its outer dimensions; initially that of the first element. */
typedef struct {
    int64_t from, to, index[MAX_RANK];
} Place;

static Place first_place(const Piece *p)
{
    return (Place){.to = p->begin};
}

/* Advances to the next place along the first `rank` dimensions; 0: there is none. */
static int go_on(const Piece *p, int64_t rank, Place *at)
{
    for (int64_t a = rank - 1; a >= 0; a--) {
        const Dim *dim = &p->dims[a];
        int64_t back = ++at->index[a] == dim->extent ? dim->extent : 0;
        at->from += dim->from_stride * (1 - back);
        at->to += dim->to_stride * (1 - back);
        if (!back)
            return 1;
        at->index[a] = 0;
    }
    return 0;
}

static void place_sample(const Piece *p, const uint8_t *from, uint8_t *to)
{
    Place at = first_place(p);
    do
        copy_lines(from + at.from, to + at.to, p->rank < 2 ? ONE_LINE : p->dims[p->rank - 2],
                   p->dims[p->rank - 1], p->unit);
    while (go_on(p, p->rank - 2, &at));
}

static int64_t piece_nbytes(const Piece *p)
{
    int64_t nbytes = p->unit;
    for (int64_t a = 0; a < p->rank; a++)
        nbytes *= p->dims[a].extent;
    return nbytes;
}

/* Bytes from the first element along the last dimension of a piece to the end of the last one. */
static int64_t line_nbytes(const Piece *p)
{
    return p->rank ? (p->dims[p->rank - 1].extent - 1) * p->dims[p->rank - 1].from_stride + p->unit
                   : p->unit;
}

/* Copies a few elements of all samples, then the next ones, tile by tile: a tile stays in the cache. */
static void place_strided(const Dataset *d, const Piece *p, const Runs *runs, const uint8_t *chunk,
                          uint8_t *batch)
{
    Dim inner = p->dims[p->rank - 1];
    int64_t tile = TILE_NBYTES / (inner.from_stride + 1);
    Place place = first_place(p);
    int are_squares = (p->unit == 1 || p->unit == 2 || p->unit == 4 || p->unit == 8) &&
                      d->sample_stride == p->unit && inner.to_stride == p->unit &&
                      runs->length[0] >= 16 / p->unit;
    /* Elements that lie far apart often share a cache set, so tiles of few elements are better. */
    int64_t least = are_squares ? 2 * TILE_ELEMENTS : TILE_ELEMENTS;
    tile = tile < least ? least : tile;
    do
        for (int64_t at = 0; at < inner.extent; at += tile) {
            int64_t count = inner.extent - at < tile ? inner.extent - at : tile;
            for (int64_t r = 0; r < runs->count; r++) {
                const uint8_t *source = chunk + place.from + at * inner.from_stride +
                                        runs->local[r] * d->sample_stride;
                uint8_t *target = batch + place.to + at * inner.to_stride +
                                  runs->position[r] * d->row_nbytes;
                int64_t k = 0;
                if (are_squares)
                    k = copy_squares(source, inner.from_stride, runs->length[r], target,
                                     d->row_nbytes, count, p->unit);
                for (; k < runs->length[r]; k++)
                    copy_elements(source + k * d->sample_stride, inner.from_stride,
                                  target + k * d->row_nbytes, inner.to_stride, count, p->unit);
            }
        }
    while (go_on(p, p->rank - 1, &place));
}

static void place_rows(int64_t row_nbytes, const Runs *runs, const uint8_t *chunk, uint8_t *batch)
{
    for (int64_t r = 0; r < runs->count; r++) {
        const uint8_t *from = chunk + runs->local[r] * row_nbytes;
        uint8_t *to = batch + runs->position[r] * row_nbytes;
        int64_t nbytes = runs->length[r] * row_nbytes;
        if (nbytes <= FEW_NBYTES)
            copy_few(to, from, nbytes);
        else
            memcpy(to, from, (size_t)nbytes);
    }
}

/* Copies the overlap of the piece with each row's part. */
static void place_parts(const Dataset *d, const Piece *whole, const Runs *runs,
                        const uint8_t *chunk, uint8_t *batch)
{
    Piece own;
    for (int64_t r = 0; r < runs->count; r++)
        for (int64_t k = 0; k < runs->length[r]; k++) {
            const int64_t local = runs->local[r] + k, position = runs->position[r] + k;
            const Piece *p = piece_at(d, whole, position, &own);
            if (p == NULL)
                continue;
            const uint8_t *from = chunk + p->from + local * d->sample_stride;
            uint8_t *to = batch + position * d->row_nbytes;
            if (p->rank)
                place_sample(p, from, to);
            else
                memcpy(to + p->begin, from, (size_t)p->unit);
        }
}

static void place(const Dataset *d, const Piece *p, const Runs *runs, const uint8_t *chunk,
                  uint8_t *batch)
{
    if (d->crop) {
        place_parts(d, p, runs, chunk, batch);
        return;
    }
    chunk += p->from;
    if (p->rank && d->sample_stride >= p->dims[0].extent * p->dims[0].from_stride) {
        for (int64_t r = 0; r < runs->count; r++) /* samples lie apart in the chunk, too */
            for (int64_t k = 0; k < runs->length[r]; k++)
                place_sample(p, chunk + (runs->local[r] + k) * d->sample_stride,
                             batch + (runs->position[r] + k) * d->row_nbytes);
        return;
    }
    if (p->rank) {
        place_strided(d, p, runs, chunk, batch);
        return;
    }
    if (p->unit == d->row_nbytes && p->unit == d->sample_stride) {
        place_rows(p->unit, runs, chunk, batch);
        return;
    }
    for (int64_t r = 0; r < runs->count; r++)
        for (int64_t k = 0; k < runs->length[r]; k++)
            memcpy(batch + (runs->position[r] + k) * d->row_nbytes + p->begin,
                   chunk + (runs->local[r] + k) * d->sample_stride, (size_t)p->unit);
}

static void place_fill(const Dataset *d, const Piece *whole, const Runs *runs, uint8_t *batch)
{
    Piece own;
    for (int64_t r = 0; r < runs->count; r++)
        for (int64_t k = 0; k < runs->length[r]; k++) {
            const int64_t position = runs->position[r] + k;
            const Piece *p = piece_at(d, whole, position, &own);
            if (p == NULL)
                continue;
            Place at = first_place(p);
            do
                fill_elements(d->fill, d->itemsize, batch + at.to + position * d->row_nbytes, p->unit);
            while (go_on(p, p->rank, &at));
        }
}
