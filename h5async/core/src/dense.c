/* Makes the rows of a sparse matrix (CSR) dense. */

enum ValueKind { OF_INT8 = 1, OF_INT16, OF_INT32, OF_INT64, OF_UINT8, OF_UINT16, OF_UINT32,
                 OF_UINT64, OF_FLOAT32, OF_FLOAT64 };

typedef struct {
    const void *data, *indices;
    const int64_t *indptr; /* [rows + 1] */
    uint8_t *out;
    int64_t rows, columns, total, row_nbytes; /* total: number of values; row_nbytes: stride of rows */
    int32_t data_kind, out_kind, index_nbytes;
    int32_t padding;
} Sparse;

/* Clear a row and add its values while it is in the cache. Integers are summed unsigned, so they wrap. */
#define DENSE_ROW(name, Value, Sum, Out, Index)                                                   \
    static int name(const Sparse *s, int64_t row)                                                 \
    {                                                                                             \
        const Value *data = s->data;                                                              \
        const Index *indices = s->indices;                                                        \
        Out *out = (Out *)(void *)(s->out + row * s->row_nbytes);                                 \
        memset(out, 0, (size_t)s->columns * sizeof(Out));                                         \
        for (int64_t i = s->indptr[row]; i < s->indptr[row + 1]; i++) {                           \
            int64_t column = (int64_t)indices[i];                                                 \
            if (column < 0 || column >= s->columns)                                               \
                return 0;                                                                         \
            out[column] = (Out)((Sum)out[column] + (Sum)data[i]);                                 \
        }                                                                                         \
        return 1;                                                                                 \
    }

/* Values of their own type, and as float32, each with indices of 4 and of 8 bytes. */
#define DENSE_ROWS(Value, Sum)                                                                    \
    DENSE_ROW(dense32_##Value, Value, Sum, Value, int32_t)                                        \
    DENSE_ROW(dense64_##Value, Value, Sum, Value, int64_t)                                        \
    DENSE_ROW(float32_##Value, Value, float, float, int32_t)                                      \
    DENSE_ROW(float64_##Value, Value, float, float, int64_t)
#define DENSE_OF(Value, Sum)                                                                      \
    {{dense32_##Value, dense64_##Value}, {float32_##Value, float64_##Value}},

/* Each kind of value, in the order of enum ValueKind. */
#define EACH_VALUE(DO)                                                                            \
    DO(int8_t, uint32_t) DO(int16_t, uint32_t) DO(int32_t, uint32_t) DO(int64_t, uint64_t)        \
    DO(uint8_t, uint32_t) DO(uint16_t, uint32_t) DO(uint32_t, uint32_t) DO(uint64_t, uint64_t)    \
    DO(float, float) DO(double, double)
EACH_VALUE(DENSE_ROWS)

typedef int (*DenseRow)(const Sparse *, int64_t);

static const DenseRow DENSE[][2][2] = {EACH_VALUE(DENSE_OF)};

/* Returns the number of rows made before the first with a column index or an indptr out of range; -1 if
   values or indices are of an unsupported kind. */
PUBLIC int64_t h5async_make_dense(const Sparse *s)
{
    if (s->data_kind < OF_INT8 || s->data_kind > OF_FLOAT64 ||
        (s->out_kind != s->data_kind && s->out_kind != OF_FLOAT32) ||
        (s->index_nbytes != 4 && s->index_nbytes != 8))
        return -1;
    DenseRow make = DENSE[s->data_kind - OF_INT8][s->out_kind != s->data_kind][s->index_nbytes == 8];
    for (int64_t row = 0; row < s->rows; row++)
        if (s->indptr[row] < 0 || s->indptr[row + 1] > s->total || !make(s, row))
            return row;
    return s->rows;
}
