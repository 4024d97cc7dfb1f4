/* What NVRTC knows of itself, for g++; all threads of a kernel run one after the other. */
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(most)
#define __CUDACC_RTC__ 1
#define __CUDACC_VER_MAJOR__ 8 /* CuPy then has a class of its own for float16 */

using std::max;
using std::min;
class bfloat16;
struct dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;
EXPORT int is_running; /* the variables above serve one launch at a time */
int is_running;

template <class T> static T atomicAdd(T *at, T value) { T old = *at; *at = old + value; return old; }
static int atomicExch(int *at, int value) { int old = *at; *at = value; return old; }
static int atomicOr(int *at, int value) { int old = *at; *at = old | value; return old; }
static int __popc(unsigned value) { return __builtin_popcount(value); }
static int __popcll(unsigned long long value) { return __builtin_popcountll(value); }

/* A kernel that waits until a time has passed goes on at once. */
static long long clock64() { static long long now; return now += 1LL << 40; }

static unsigned __float_as_uint(float value) { unsigned u; memcpy(&u, &value, 4); return u; }
static float __uint_as_float(unsigned value) { float f; memcpy(&f, &value, 4); return f; }
static unsigned short __float2half_rn(float value)
{
    _Float16 half = (_Float16)value;
    unsigned short bits;
    memcpy(&bits, &half, 2);
    return bits;
}
static float __half2float(unsigned short bits)
{
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
}
