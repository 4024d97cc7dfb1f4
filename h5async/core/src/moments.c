/* Computes count, mean, sum of squares and range of groups of values, for measure/summaries.py.

   A tile of values of one group, or of several neighbouring groups, is converted to doubles in the cache
   and measured in two passes, which avoids cancellation. */

enum { TILE_VALUES = 4096, TILE_GROUPS = 16, TILE_LANES = 4 };

typedef struct {
    double count, nan, fill, mean, squares, low, high;
} Moments;

typedef double Lanes __attribute__((vector_size(TILE_LANES * 8)));
typedef int64_t Flags __attribute__((vector_size(TILE_LANES * 8))); /* -1: true */

#define CHOOSE(flags, yes, no) ((Lanes)(((flags) & (Flags)(yes)) | (~(flags) & (Flags)(no))))

ALWAYS_INLINE void add_tile(Moments *m, const Lanes *x, int64_t count, double equal)
{
    Lanes sum = {0}, squares = {0}, low = sum + INFINITY, high = sum - INFINITY;
    Flags valid = {0}, fills = {0};
    for (int64_t i = 0; i < count; i++) {
        Lanes v = x[i];
        Flags is_number = v == v;
        sum += (Lanes)(is_number & (Flags)v);
        valid -= is_number;
        fills -= v == equal;
        low = CHOOSE(v < low, v, low);
        high = CHOOSE(v > high, v, high);
    }
    double all = 0, total = 0;
    for (int l = 0; l < TILE_LANES; l++) {
        all += sum[l], total += (double)valid[l], m->fill += (double)fills[l];
        m->low = low[l] < m->low ? low[l] : m->low;
        m->high = high[l] > m->high ? high[l] : m->high;
    }
    if (!total)
        return;
    double mean = all / total, whole = m->count + total, gap = mean - m->mean;
    for (int64_t i = 0; i < count; i++) {
        Lanes gaps = (Lanes)((x[i] == x[i]) & (Flags)(x[i] - mean));
        squares += gaps * gaps;
    }
    for (int l = 0; l < TILE_LANES; l++)
        m->squares += squares[l];
    m->squares += gap * gap * (m->count * (total / whole));
    m->mean += gap * (total / whole);
    m->count = whole;
}

/* Distance between groups in doubles. Not a power of two, so that groups do not share cache sets. */
#define PITCH(width) (TILE_VALUES / (width) + TILE_LANES)

/* Convert `outer` times `inner` values of each of `width` groups into x[width][PITCH(width)]. */
#define TO_DOUBLES(type, _)                                                                       \
    ALWAYS_INLINE void doubles_##type(const type *restrict from, double *restrict x, int64_t outer, \
                                      int64_t inner, int64_t stride, int64_t width)               \
    {                                                                                             \
        for (int64_t o = 0; o < outer; o++)                                                       \
            for (int64_t w = 0; w < width; w++)                                                   \
                for (int64_t i = 0; i < inner; i++)                                               \
                    x[w * PITCH(width) + o * inner + i] =                                \
                        (double)from[o * stride + w * inner + i];                                 \
    }
EACH_VALUE(TO_DOUBLES)

#define DOUBLES_OF(type, _)                                                                       \
    if (kind == ++number)                                                                         \
        doubles_##type((const type *)values + at, x, outer, inner, stride, width);

typedef struct {
    const void *values;
    const int64_t *shape; /* outer, groups, inner */
    const double *fill;   /* the value to count; NaN: none */
    Moments *found;       /* [groups] */
    int32_t kind;         /* see dense.c */
} Measured;

ALWAYS_INLINE void measure_tile(const Measured *m, double *x, int64_t at, int64_t group, int64_t outer,
                                int64_t inner, int64_t stride, int64_t width)
{
    const void *values = m->values;
    int32_t kind = m->kind, number = 0;
    EACH_VALUE(DOUBLES_OF)
    int64_t count = outer * inner, lanes = (count + TILE_LANES - 1) / TILE_LANES;
    for (int64_t w = 0; w < width; w++) {
        double *own = x + w * PITCH(width);
        for (int64_t i = count; i < lanes * TILE_LANES; i++)
            own[i] = NAN;
        double before = m->found[group + w].count;
        add_tile(m->found + group + w, (const Lanes *)(const void *)own, lanes, *m->fill);
        m->found[group + w].nan += (double)count - (m->found[group + w].count - before);
    }
}

ALWAYS_INLINE void measure_inline(const Measured *m)
{
    double x[TILE_GROUPS * PITCH(TILE_GROUPS)] __attribute__((aligned(sizeof(Lanes))));
    int64_t outer = m->shape[0], groups = m->shape[1], inner = m->shape[2], stride = groups * inner;
    int64_t width = inner == 1 && groups >= TILE_GROUPS ? TILE_GROUPS : 1, step;
    int64_t rows = inner < TILE_VALUES / width ? TILE_VALUES / width / (inner ? inner : 1) : 1;
    for (int64_t o = 0; o < outer; o += rows) {
        int64_t height = outer - o < rows ? outer - o : rows;
        for (int64_t g = 0; g < groups; g += step) {
            step = groups - g >= width ? width : 1;
            for (int64_t i = 0; i < inner; i += TILE_VALUES) {
                int64_t length = inner - i < TILE_VALUES ? inner - i : TILE_VALUES;
                int64_t at = o * stride + g * inner + i;
                if (step == 1)
                    measure_tile(m, x, at, g, height, length, stride, 1);
                else
                    measure_tile(m, x, at, g, height, length, stride, TILE_GROUPS);
            }
        }
    }
}

ALSO_FOR_AVX2(measure, (const Measured *m), (m))

/* Add values of shape (outer, groups, inner) and of a kind to the moments of their groups. */
PUBLIC int64_t h5async_measure(const void *values, const int64_t *shape, const double *fill,
                               Moments *found, int32_t kind)
{
    Measured all = {values, shape, fill, found, kind};
    measure(&all);
    return 1;
}
