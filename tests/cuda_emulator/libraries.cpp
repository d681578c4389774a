// cuBLAS, cuRAND and sorting: sums in a fixed order, random numbers by their number.
#include "core.h"
#include <algorithm>
#include <cmath>
#include <library_types.h>
#include <numeric>

using namespace emu;
using Half = _Float16;

struct Handle { Stream* stream = stream_of(nullptr); };

static void put_on(Stream* stream, std::function<void()> run) {
    int place = here();
    Lock lock(mutex);
    counters[LAUNCH]++;
    put(stream, idle ? nullptr : std::move(run), place);
}

// ---- cuBLAS: matrices by columns -----------------------------------------------------
// alpha and beta of the host are read at once, those of a device when the work runs.
template <class S> struct Scalar {
    const S* late;
    S early;
    Scalar(const void* p) : late(on_device(p) ? (const S*)p : nullptr), early(late ? S(0) : *(const S*)p) {}
    S get() const { return late ? *late : early; }
};

template <class T> struct Matrix {
    T* at;
    int ld;  // from column to column
    bool turned;
    T& operator()(int i, int j) const { return at[turned ? (size_t)i * ld + j : (size_t)j * ld + i]; }
    void touched(int rows, int columns, bool writes) const {
        if (!watching) return;
        if (turned) std::swap(rows, columns);
        for (int j = 0; j < columns; j++)
            (writes ? write : read)(at + (size_t)j * ld, rows * sizeof(T));
    }
};

// Each sum runs over k in order, whatever the shape: a product in parts has the same bits.
template <class T, class S>
static void multiply(int m, int n, int k, S alpha, Matrix<const T> a, Matrix<const T> b, S beta, Matrix<T> c) {
    constexpr int ROWS = 512, COLUMNS = 4;
    a.touched(m, k, false);
    b.touched(k, n, false);
    c.touched(m, n, true);
    std::vector<S> left((size_t)std::min(m, ROWS) * k);
    for (int top = 0; top < m; top += ROWS) {
        int rows = std::min(ROWS, m - top);
        for (int p = 0; p < k; p++)
            for (int i = 0; i < rows; i++) left[(size_t)p * rows + i] = a(top + i, p);
        for (int first = 0; first < n; first += COLUMNS) {
            S sums[COLUMNS][ROWS] = {};
            int columns = std::min(COLUMNS, n - first);
            for (int p = 0; p < k; p++) {
                const S* column = &left[(size_t)p * rows];
                S right[COLUMNS] = {};
                for (int j = 0; j < columns; j++) right[j] = b(p, first + j);
                for (int i = 0; i < rows; i++)
                    for (int j = 0; j < COLUMNS; j++) sums[j][i] += column[i] * right[j];
            }
            for (int j = 0; j < columns; j++)
                for (int i = 0; i < rows; i++) {
                    T& out = c(top + i, first + j);
                    out = beta == S(0) ? alpha * sums[j][i] : alpha * sums[j][i] + beta * out;
                }
        }
    }
}

struct Sizes { int ta, tb, m, n, k, lda, ldb, ldc; };

template <class T, class S>
static void product(const Sizes& s, S alpha, const T* a, const T* b, S beta, T* c) {
    multiply<T, S>(s.m, s.n, s.k, alpha, {a, s.lda, s.ta != 0}, {b, s.ldb, s.tb != 0}, beta, {c, s.ldc, false});
}

template <class T, class S>
static int strided(void* h, Sizes s, const void* al, const void* A, long long sa, const void* B, long long sb,
                   const void* be, void* C, long long sc, int batch) {
    Scalar<S> alpha(al), beta(be);
    put_on(((Handle*)h)->stream, [=] {
        for (int i = 0; i < batch; i++)
            product<T, S>(s, alpha.get(), (const T*)A + i * sa, (const T*)B + i * sb, beta.get(), (T*)C + i * sc);
    });
    return 0;
}
template <class T>
static int batched(void* h, Sizes s, const T* al, const T** A, const T** B, const T* be, T** C, int batch) {
    Scalar<T> alpha(al), beta(be);
    put_on(((Handle*)h)->stream, [=] {
        for (int i = 0; i < batch; i++) product<T, T>(s, alpha.get(), A[i], B[i], beta.get(), C[i]);
    });
    return 0;
}
static int of_type(int type, bool half_scalars, void* h, Sizes s, const void* al, const void* A, long long sa,
                   const void* B, long long sb, const void* be, void* C, long long sc, int batch) {
    float alpha, beta;
    switch (type) {
        case CUDA_R_32F: return strided<float, float>(h, s, al, A, sa, B, sb, be, C, sc, batch);
        case CUDA_R_64F: return strided<double, double>(h, s, al, A, sa, B, sb, be, C, sc, batch);
        case CUDA_R_16F:
            if (!half_scalars) return strided<Half, float>(h, s, al, A, sa, B, sb, be, C, sc, batch);
            alpha = *(const Half*)al, beta = *(const Half*)be;
            return strided<Half, float>(h, s, &alpha, A, sa, B, sb, &beta, C, sc, batch);
        default:
            fprintf(stderr, "emulator: a product of matrices of type %d is not there\n", type);
            return 15;
    }
}

template <class T>
static int by_vector(void* h, int turned, int m, int n, const T* al, const T* A, int lda, const T* x, int ix,
                     const T* be, T* y, int iy) {
    Scalar<T> alpha(al), beta(be);
    put_on(((Handle*)h)->stream, [=] {
        Matrix<const T> a{A, lda, turned != 0};
        int rows = turned ? n : m, columns = turned ? m : n;
        a.touched(rows, columns, false);
        for (int i = 0; i < rows; i++) {
            T sum = 0, &out = y[(size_t)i * iy];
            for (int j = 0; j < columns; j++) {
                read(x + (size_t)j * ix, sizeof(T));
                sum += a(i, j) * x[(size_t)j * ix];
            }
            write(&out, sizeof(T));
            out = beta.get() == 0 ? alpha.get() * sum : alpha.get() * sum + beta.get() * out;
        }
    });
    return 0;
}
template <class T>
static int outer(void* h, int m, int n, const T* al, const T* x, int ix, const T* y, int iy, T* A, int lda) {
    Scalar<T> alpha(al);
    put_on(((Handle*)h)->stream, [=] {
        Matrix<T> a{A, lda, false};
        a.touched(m, n, true);
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++) a(i, j) += alpha.get() * x[(size_t)i * ix] * y[(size_t)j * iy];
    });
    return 0;
}
// C = alpha * op(A) + beta * op(B); a matrix whose factor is zero is not read.
template <class T>
static int sum_of(void* h, int ta, int tb, int m, int n, const T* al, const T* A, int lda, const T* be, const T* B,
                  int ldb, T* C, int ldc) {
    Scalar<T> alpha(al), beta(be);
    put_on(((Handle*)h)->stream, [=] {
        Matrix<const T> a{A, lda, ta != 0}, b{B, ldb, tb != 0};
        Matrix<T> c{C, ldc, false};
        if (alpha.get() != 0) a.touched(m, n, false);
        if (beta.get() != 0) b.touched(m, n, false);
        c.touched(m, n, true);
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++) {
                T sum = alpha.get() == 0 ? T(0) : alpha.get() * a(i, j);
                c(i, j) = beta.get() == 0 ? sum : sum + beta.get() * b(i, j);
            }
    });
    return 0;
}
template <class T> static int inner(void* h, int n, const T* x, int ix, const T* y, int iy, T* out) {
    Stream* stream = ((Handle*)h)->stream;
    put_on(stream, [=] {
        T sum = 0;
        for (int i = 0; i < n; i++) {
            read(x + (size_t)i * ix, sizeof(T));
            read(y + (size_t)i * iy, sizeof(T));
            sum += x[(size_t)i * ix] * y[(size_t)i * iy];
        }
        write(out, sizeof(T));
        *out = sum;
    });
    Lock lock(mutex);
    if (!on_device(out)) drain(stream);
    return 0;
}

constexpr int COMPUTE_16F = 64;

extern "C" {
int cublasCreate_v2(void** out) { Lock lock(mutex); *out = new Handle; return 0; }
int cublasDestroy_v2(void* handle) { delete (Handle*)handle; return 0; }
int cublasSetStream_v2(void* h, void* stream) { Lock lock(mutex); ((Handle*)h)->stream = stream_of(stream); return 0; }
int cublasGetStream_v2(void* h, void** out) {
    Lock lock(mutex);
    Stream* stream = ((Handle*)h)->stream;
    *out = stream == stream_of(nullptr) ? nullptr : stream;
    return 0;
}
int cublasSetMathMode(void*, int) { return 0; }
int cublasGetMathMode(void*, int* out) { *out = 0; return 0; }
int cublasSetPointerMode_v2(void*, int) { return 0; }
int cublasGetPointerMode_v2(void*, int* out) { *out = 0; return 0; }
int cublasGetVersion_v2(void*, int* out) { *out = CUDART_VERSION * 10; return 0; }

int cublasSgemm_v2(void* h, int ta, int tb, int m, int n, int k, const float* al, const float* A, int lda,
                   const float* B, int ldb, const float* be, float* C, int ldc) {
    return strided<float, float>(h, {ta, tb, m, n, k, lda, ldb, ldc}, al, A, 0, B, 0, be, C, 0, 1);
}
int cublasDgemm_v2(void* h, int ta, int tb, int m, int n, int k, const double* al, const double* A, int lda,
                   const double* B, int ldb, const double* be, double* C, int ldc) {
    return strided<double, double>(h, {ta, tb, m, n, k, lda, ldb, ldc}, al, A, 0, B, 0, be, C, 0, 1);
}
int cublasSgemmEx(void* h, int ta, int tb, int m, int n, int k, const float* al, const void* A, int type, int lda,
                  const void* B, int, int ldb, const float* be, void* C, int, int ldc) {
    return of_type(type, false, h, {ta, tb, m, n, k, lda, ldb, ldc}, al, A, 0, B, 0, be, C, 0, 1);
}
int cublasGemmEx(void* h, int ta, int tb, int m, int n, int k, const void* al, const void* A, int type, int lda,
                 const void* B, int, int ldb, const void* be, void* C, int, int ldc, int compute, int) {
    return of_type(type, compute == COMPUTE_16F, h, {ta, tb, m, n, k, lda, ldb, ldc}, al, A, 0, B, 0, be, C, 0, 1);
}
int cublasGemmStridedBatchedEx(void* h, int ta, int tb, int m, int n, int k, const void* al, const void* A, int type,
                               int lda, long long sa, const void* B, int, int ldb, long long sb, const void* be,
                               void* C, int, int ldc, long long sc, int batch, int compute, int) {
    return of_type(type, compute == COMPUTE_16F, h, {ta, tb, m, n, k, lda, ldb, ldc}, al, A, sa, B, sb, be, C, sc, batch);
}
int cublasSgemmStridedBatched(void* h, int ta, int tb, int m, int n, int k, const float* al, const float* A, int lda,
                              long long sa, const float* B, int ldb, long long sb, const float* be, float* C, int ldc,
                              long long sc, int batch) {
    return strided<float, float>(h, {ta, tb, m, n, k, lda, ldb, ldc}, al, A, sa, B, sb, be, C, sc, batch);
}
int cublasSgemmBatched(void* h, int ta, int tb, int m, int n, int k, const float* al, const float** A, int lda,
                       const float** B, int ldb, const float* be, float** C, int ldc, int batch) {
    return batched(h, {ta, tb, m, n, k, lda, ldb, ldc}, al, A, B, be, C, batch);
}
int cublasDgemmBatched(void* h, int ta, int tb, int m, int n, int k, const double* al, const double** A, int lda,
                       const double** B, int ldb, const double* be, double** C, int ldc, int batch) {
    return batched(h, {ta, tb, m, n, k, lda, ldb, ldc}, al, A, B, be, C, batch);
}
int cublasSgemv_v2(void* h, int t, int m, int n, const float* al, const float* A, int lda, const float* x, int ix,
                   const float* be, float* y, int iy) {
    return by_vector(h, t, m, n, al, A, lda, x, ix, be, y, iy);
}
int cublasDgemv_v2(void* h, int t, int m, int n, const double* al, const double* A, int lda, const double* x, int ix,
                   const double* be, double* y, int iy) {
    return by_vector(h, t, m, n, al, A, lda, x, ix, be, y, iy);
}
int cublasSger_v2(void* h, int m, int n, const float* al, const float* x, int ix, const float* y, int iy, float* A, int lda) {
    return outer(h, m, n, al, x, ix, y, iy, A, lda);
}
int cublasDger_v2(void* h, int m, int n, const double* al, const double* x, int ix, const double* y, int iy, double* A, int lda) {
    return outer(h, m, n, al, x, ix, y, iy, A, lda);
}
int cublasSgeam(void* h, int ta, int tb, int m, int n, const float* al, const float* A, int lda, const float* be,
                const float* B, int ldb, float* C, int ldc) {
    return sum_of(h, ta, tb, m, n, al, A, lda, be, B, ldb, C, ldc);
}
int cublasDgeam(void* h, int ta, int tb, int m, int n, const double* al, const double* A, int lda, const double* be,
                const double* B, int ldb, double* C, int ldc) {
    return sum_of(h, ta, tb, m, n, al, A, lda, be, B, ldb, C, ldc);
}
int cublasSdot_v2(void* h, int n, const float* x, int ix, const float* y, int iy, float* out) {
    return inner(h, n, x, ix, y, iy, out);
}
int cublasDdot_v2(void* h, int n, const double* x, int ix, const double* y, int iy, double* out) {
    return inner(h, n, x, ix, y, iy, out);
}
}

// ---- cuRAND --------------------------------------------------------------------------
struct Generator : Handle { uint64_t seed = 0, position = 0; };

static uint64_t bits_at(uint64_t seed, uint64_t i) {  // splitmix64
    uint64_t x = seed * 0x2545F4914F6CDD1Dull ^ (i + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}
static double uniform_at(uint64_t seed, uint64_t i) {  // above 0, up to 1
    return ((bits_at(seed, i) >> 11) + 1) * (1. / (1ull << 53));
}
template <class T, class F> static int fill(void* handle, T* out, size_t n, F value) {
    Generator* generator = (Generator*)handle;
    uint64_t seed = generator->seed, first = generator->position;
    generator->position += n;
    put_on(generator->stream, [=] {
        write(out, n * sizeof(T));
        for (size_t i = 0; i < n; i++) out[i] = value(seed, first + i);
    });
    return 0;
}
template <class T> static int normal(void* handle, T* out, size_t n, T mean, T deviation) {
    if (n % 2) return 105;  // CURAND_STATUS_LENGTH_NOT_MULTIPLE
    return fill(handle, out, n, [=](uint64_t seed, uint64_t i) {
        double radius = std::sqrt(-2 * std::log(uniform_at(seed, i & ~1ull)));
        double angle = 2 * M_PI * uniform_at(seed, i | 1);
        return (T)(mean + deviation * radius * (i % 2 ? std::sin(angle) : std::cos(angle)));
    });
}

extern "C" {
int curandCreateGenerator(void** out, int) {
    Lock lock(mutex);
    counters[GENERATOR_CREATE]++;
    *out = new Generator;
    return 0;
}
int curandDestroyGenerator(void* handle) { delete (Generator*)handle; return 0; }
int curandGetVersion(int* out) { *out = 10400; return 0; }
int curandSetStream(void* handle, void* stream) { return cublasSetStream_v2(handle, stream); }
int curandSetPseudoRandomGeneratorSeed(void* handle, unsigned long long seed) {
    ((Generator*)handle)->seed = seed;
    ((Generator*)handle)->position = 0;
    return 0;
}
int curandSetGeneratorOffset(void* handle, unsigned long long offset) { ((Generator*)handle)->position = offset; return 0; }
int curandSetGeneratorOrdering(void*, int) { return 0; }
int curandGenerate(void* handle, unsigned* out, size_t n) {
    return fill(handle, out, n, [](uint64_t seed, uint64_t i) { return unsigned(bits_at(seed, i) >> 32); });
}
int curandGenerateUniform(void* handle, float* out, size_t n) {
    return fill(handle, out, n, [](uint64_t seed, uint64_t i) { return ((bits_at(seed, i) >> 40) + 1) * (1.f / (1 << 24)); });
}
int curandGenerateUniformDouble(void* handle, double* out, size_t n) { return fill(handle, out, n, uniform_at); }
int curandGenerateNormal(void* handle, float* out, size_t n, float mean, float deviation) {
    return normal(handle, out, n, mean, deviation);
}
int curandGenerateNormalDouble(void* handle, double* out, size_t n, double mean, double deviation) {
    return normal(handle, out, n, mean, deviation);
}
}

// ---- sorting, in place of Thrust: rows of n, numbers that are none come last ----------
template <class T> static bool before(T a, T b) { return a < b || (b != b && a == a); }

template <class T> static void order_rows(T* data, int64_t* indexes, size_t rows, size_t n) {
    for (size_t r = 0; r < rows; r++) {
        T* row = data + r * n;
        if (!indexes) { std::stable_sort(row, row + n, before<T>); continue; }
        int64_t* index = indexes + r * n;
        std::iota(index, index + n, 0);
        std::stable_sort(index, index + n, [=](int64_t i, int64_t j) { return before(row[i], row[j]); });
    }
}

template <class T> static void order_keys(const T* keys, int64_t* index, size_t k, size_t n) {
    std::iota(index, index + n, 0);
    for (size_t r = 0; r < k; r++)
        std::stable_sort(index, index + n, [=](int64_t i, int64_t j) { return before(keys[r * n + i], keys[r * n + j]); });
}

template <class F> static bool with_type(const char* type, F use) {  // as NumPy writes it, without '<'
#define EMU_TYPE(name, T) if (!strcmp(type, name)) { use(T()); return true; }
    EMU_TYPE("f2", Half) EMU_TYPE("f4", float) EMU_TYPE("f8", double) EMU_TYPE("b1", bool)
    EMU_TYPE("i1", int8_t) EMU_TYPE("i2", int16_t) EMU_TYPE("i4", int32_t) EMU_TYPE("i8", int64_t)
    EMU_TYPE("u1", uint8_t) EMU_TYPE("u2", uint16_t) EMU_TYPE("u4", uint32_t) EMU_TYPE("u8", uint64_t)
#undef EMU_TYPE
    return false;
}

extern "C" {
int emu_sort(const char* type, void* data, int64_t* indexes, size_t rows, size_t n, void* stream) {
    return with_type(type, [=](auto zero) {
        using T = decltype(zero);
        put_on(stream_of(stream), [=] {
            indexes ? read(data, rows * n * sizeof(T)) : write(data, rows * n * sizeof(T));
            if (indexes) write(indexes, rows * n * sizeof *indexes);
            order_rows((T*)data, indexes, rows, n);
        });
    });
}
int emu_lexsort(const char* type, const void* keys, int64_t* indexes, size_t k, size_t n, void* stream) {
    return with_type(type, [=](auto zero) {
        using T = decltype(zero);
        put_on(stream_of(stream), [=] {
            read(keys, k * n * sizeof(T));
            write(indexes, n * sizeof *indexes);
            order_keys((const T*)keys, indexes, k, n);
        });
    });
}
}
