// CUDA C++ for g++: what NVRTC knows by itself. Each kernel's source starts with this.
#pragma once
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __inline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other
#define __constant__ static
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))

// ---- threads
struct emu_index { unsigned x, y, z; };
extern "C" {
extern emu_index emu_thread, emu_block, emu_block_size, emu_grid_size;
extern char emu_dynamic_shared[];
extern unsigned long long emu_lanes[];
void emu_sync_block();
void emu_sync_warp();
unsigned emu_lane();
void emu_run_block(void (*)(void*), void*);
}
#define threadIdx emu_thread
#define blockIdx emu_block
#define blockDim emu_block_size
#define gridDim emu_grid_size
static const int warpSize = 32;
inline void __syncthreads() { emu_sync_block(); }
inline void __syncwarp(unsigned = ~0u) { emu_sync_warp(); }
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- warps: every lane shows its value, then reads another one's
template <class T> inline T emu_show(T value, int lane, bool inside) {
    static_assert(sizeof(T) <= sizeof(emu_lanes[0]), "at most eight bytes go from lane to lane");
    unsigned me = emu_lane(), from = inside ? me / 32 * 32 + lane : me;
    std::memcpy(&emu_lanes[me], &value, sizeof(T));
    emu_sync_warp();
    std::memcpy(&value, &emu_lanes[from], sizeof(T));
    emu_sync_warp();
    return value;
}
template <class T> inline T __shfl_sync(unsigned, T value, int lane, int width = 32) {
    int me = emu_lane() % 32;
    return emu_show(value, me / width * width + lane % width, true);
}
template <class T> inline T __shfl_up_sync(unsigned, T value, unsigned by, int width = 32) {
    int me = emu_lane() % 32, lane = me - (int)by;
    return emu_show(value, lane, lane >= me / width * width);
}
template <class T> inline T __shfl_down_sync(unsigned, T value, unsigned by, int width = 32) {
    int me = emu_lane() % 32, lane = me + (int)by;
    return emu_show(value, lane, lane < me / width * width + width);
}
template <class T> inline T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
    int me = emu_lane() % 32, lane = me ^ mask;
    return emu_show(value, lane, lane < me / width * width + width);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    unsigned first = emu_lane() / 32 * 32, bits = 0;
    emu_lanes[emu_lane()] = predicate != 0;
    emu_sync_warp();
    for (int i = 0; i < 32; i++) bits |= unsigned(emu_lanes[first + i] & 1) << i;
    emu_sync_warp();
    return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return (__ballot_sync(mask, predicate) & mask) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return (__ballot_sync(mask, predicate) & mask) == mask; }

// ---- atomics: one thread runs at a time
template <class T, class F> inline T emu_change(T* p, F change) { T old = *p; *p = change(old); return old; }
template <class T, class U> inline T atomicAdd(T* p, U v) { return emu_change(p, [=](T old) { return T(old + v); }); }
template <class T, class U> inline T atomicSub(T* p, U v) { return emu_change(p, [=](T old) { return T(old - v); }); }
template <class T, class U> inline T atomicMax(T* p, U v) { return emu_change(p, [=](T old) { return old < T(v) ? T(v) : old; }); }
template <class T, class U> inline T atomicMin(T* p, U v) { return emu_change(p, [=](T old) { return T(v) < old ? T(v) : old; }); }
template <class T, class U> inline T atomicExch(T* p, U v) { return emu_change(p, [=](T) { return T(v); }); }
template <class T, class U> inline T atomicOr(T* p, U v) { return emu_change(p, [=](T old) { return T(old | v); }); }
template <class T, class U> inline T atomicAnd(T* p, U v) { return emu_change(p, [=](T old) { return T(old & v); }); }
template <class T, class U, class V> inline T atomicCAS(T* p, U expected, V v) {
    return emu_change(p, [=](T old) { return old == T(expected) ? T(v) : old; });
}

// ---- mathematics
using std::abs;
using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;
using std::signbit;
template <class T, class U> inline std::common_type_t<T, U> max(T a, U b) {
    using R = std::common_type_t<T, U>;
    return R(a) < R(b) ? R(b) : R(a);
}
template <class T, class U> inline std::common_type_t<T, U> min(T a, U b) {
    using R = std::common_type_t<T, U>;
    return R(b) < R(a) ? R(b) : R(a);
}
inline float rsqrt(float x) { return 1.f / std::sqrt(x); }
inline double rsqrt(double x) { return 1. / std::sqrt(x); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __fmul_rn(float a, float b) { return a * b; }  // nothing is contracted here
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float saturate(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }
inline int __mul24(int a, int b) { return a * b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T> inline T __ldg(const T* p) { return *p; }
static long long emu_ticks = 0;
inline long long clock64() { return emu_ticks += 1000000; }

// ---- bits; half precision is CuPy's class on the compiler's _Float16
template <class To, class From> inline To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "of the same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }
inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
struct half;
inline unsigned short __float2half_rn(float x) { return emu_bits<unsigned short>((_Float16)x); }
inline float __half2float(unsigned short x) { return (float)emu_bits<_Float16>(x); }
template <class H> inline unsigned short __half_as_ushort(const H& h) { return emu_bits<unsigned short>(h); }
template <class H = half> inline H __ushort_as_half(unsigned short x) {
    H h;
    std::memcpy(&h, &x, 2);
    return h;
}

// ---- launching: the arguments are copied at once, the grid runs later
template <class... A> struct emu_call {
    using Tuple = std::tuple<std::decay_t<A>...>;
    template <size_t... I> static void* pack(void** p, std::index_sequence<I...>) {
        return new Tuple(*(std::decay_t<A>*)p[I]...);
    }
    template <size_t... I> static void go(void (*f)(A...), Tuple& t, std::index_sequence<I...>) { f(std::get<I>(t)...); }
};
template <class... A> void* emu_pack(void (*)(A...), void** p) {
    return emu_call<A...>::pack(p, std::index_sequence_for<A...>{});
}
template <class... A> void emu_go(void (*f)(A...), void* t) {
    emu_call<A...>::go(f, *(typename emu_call<A...>::Tuple*)t, std::index_sequence_for<A...>{});
}
template <class... A> void emu_drop(void (*)(A...), void* t) { delete (typename emu_call<A...>::Tuple*)t; }

// How: 0, one thread does everything (a loop over the grid); 1, one after the other; 2, fibers.
inline void emu_run(int how, void (*one)(void*), void* t, const unsigned* sizes) {
    if (how == 0) {
        emu_grid_size = emu_block_size = {1, 1, 1};
        emu_thread = emu_block = {0, 0, 0};
        one(t);
        return;
    }
    emu_grid_size = {sizes[0], sizes[1], sizes[2]};
    emu_block_size = {sizes[3], sizes[4], sizes[5]};
    unsigned blocks = sizes[0] * sizes[1] * sizes[2], threads = sizes[3] * sizes[4] * sizes[5];
    for (unsigned b = 0; b < blocks; b++) {
        emu_block = {b % sizes[0], b / sizes[0] % sizes[1], b / sizes[0] / sizes[1]};
        if (how == 2) { emu_run_block(one, t); continue; }
        for (unsigned i = 0; i < threads; i++) {
            emu_thread = {i % sizes[3], i / sizes[3] % sizes[4], i / sizes[3] / sizes[4]};
            one(t);
        }
    }
}
#define EMU_KERNEL(name, how) \
    extern "C" void* name##__pack(void** p) { return emu_pack(name, p); } \
    static void name##__one(void* t) { emu_go(name, t); } \
    extern "C" void name##__run(void* t, const unsigned* sizes) { emu_run(how, name##__one, t, sizes); emu_drop(name, t); }
