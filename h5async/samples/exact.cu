/* Device functions with exactly the results of the host.

   CuPy's elementwise kernels call them; CuPy compiles this file with each kernel. Threads never
   wait for each other, and no two write to the same value: sums are added up in the order of the
   file, as on the host, and are reproducible.

   The results are those of the host, bit for bit (except NaN payloads): no fused multiply-add, and
   subnormal numbers are preserved, although CuPy compiles with -ftz=true. Tests run this code on a
   CPU, without PTX. */

template <class T, class S>
static __device__ inline T h5async_to(const S &value) { return T(value); }
template <class T>
static __device__ inline T h5async_mul(const T &a, const T &b) { return T(a * b); }
template <class T>
static __device__ inline T h5async_add(const T &a, const T &b) { return T(a + b); }
#ifdef __CUDA_ARCH__
template <>
__device__ inline float h5async_to<float, double>(const double &value)
{
    float result;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(value));
    return result;
}
template <>
__device__ inline double h5async_to<double, float>(const float &value)
{
    double result;
    asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(value));
    return result;
}
template <>
__device__ inline float h5async_mul<float>(const float &a, const float &b)
{
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
template <>
__device__ inline float h5async_add<float>(const float &a, const float &b)
{
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
#endif

/* LANES neighbouring threads make a row. Each owns every LANES-th column: it clears these, and
   searches all indices of the row for them. (So all threads of a warp read the same index, in one
   access, and neighbours clear neighbouring values.) LANES is a power of two. */
template <int LANES, class T, class S, class I>
static __device__ inline void h5async_fill_row(long long i, const S *data, const I *indices,
                                               const long long *indptr, long long columns,
                                               T *dense, int *bad)
{
    const long long row = i / LANES, lane = i % LANES;
    const long long from = indptr[row], to = indptr[row + 1];
    T *values = &dense[row * columns];
    for (long long column = lane; column < columns; column += LANES)
        values[column] = T(0);
    for (long long at = from; at < to; ++at) {
        const long long column = indices[at];
        if (column < 0 || column >= columns)
            bad[0] = 1;
        else if ((column & (LANES - 1)) == lane)
            values[column] = h5async_add<T>(values[column], h5async_to<T>(data[at]));
    }
}

/* Each thread makes one scalar of a padded sample; `inner` scalars are one value of the file. */
template <class T>
static __device__ inline T h5async_pad_value(long long i, const T *values,
                                             const long long *offsets, long long length,
                                             long long inner, const T *value)
{
    const long long sample = i / (length * inner), rest = i - sample * (length * inner);
    const long long from = offsets[sample] * inner, to = offsets[sample + 1] * inner;
    return rest < to - from ? values[from + rest] : value[0];
}
