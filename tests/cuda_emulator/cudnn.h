// cuDNN: what its parts share. Numbers are those of its interface. CUDNN_MAJOR is 8 (8.9,
// for CuPy 13) or 9 (9.28, for CuPy 14).
#pragma once
#include "core.h"
#include <algorithm>
#include <cmath>
#include <type_traits>

namespace emu::dnn {

using Half = _Float16;
constexpr bool IS_9 = CUDNN_MAJOR >= 9;
enum Status { SUCCESS = 0, NOT_INITIALIZED = IS_9 ? 1001 : 1, BAD_PARAM = IS_9 ? 2000 : 3, NOT_SUPPORTED = IS_9 ? 3000 : 9, ALLOC_FAILED = IS_9 ? 4003 : 2 };
enum Type { FLOAT = 0, DOUBLE = 1, HALF = 2 };
enum Math { DEFAULT, TENSOR_OP, CONVERSION, FMA };

int refuse(int status, const char* why);  // keeps why for cudnnGetLastErrorString
#define REFUSE_IF(condition, status) if (condition) return refuse(status, #condition)

struct Context { Stream* stream; };

struct Tensor {  // also a filter: outputs, inputs, window
    int type = -1;
    std::vector<int> shape, strides;  // in elements
    int format = 0;

    size_t item() const { return type == DOUBLE ? 8 : type == HALF ? 2 : 4; }
    size_t count() const {
        size_t product = 1;
        for (int s : shape) product *= s;
        return product;
    }
    size_t extent() const {  // elements from the first to behind the last
        size_t last = 0;
        for (size_t i = 0; i < shape.size(); i++) last += size_t(shape[i] - 1) * strides[i];
        return last + 1;
    }
    size_t bytes() const { return extent() * item(); }
    bool dense() const { return extent() == count(); }
    bool operator==(const Tensor& o) const { return type == o.type && shape == o.shape && strides == o.strides; }
};

struct Convolution {
    std::vector<int> pad, stride, dilation;
    int mode = 1, computes = FLOAT, groups = 1, math = DEFAULT;
};

// Batch, channels, and all positions as one; positions are `step` elements apart.
struct Planes {
    int batch, channels, positions;
    size_t next, channel, step;  // strides

    explicit Planes(const Tensor& t) : batch(t.shape[0]), channels(t.shape[1]), positions(1) {
        for (size_t i = 2; i < t.shape.size(); i++) positions *= t.shape[i];
        next = t.strides[0], channel = t.strides[1];
        step = t.shape.size() > 2 ? t.strides.back() : 1;
    }
    size_t at(int n, int c, int p) const { return n * next + c * channel + p * step; }
};

// Where the windows of an operation lie: for each place in a window and each output
// position the offset of the input position, or -1 outside.
struct Windows {
    int places = 1, positions = 1;
    std::vector<int> offsets;  // places x positions

    Windows(const std::vector<int>& in, const std::vector<int>& strides, const std::vector<int>& out,
            const std::vector<int>& window, const std::vector<int>& pad, const std::vector<int>& stride,
            const std::vector<int>& dilation);
    int at(int place, int position) const { return offsets[(size_t)place * positions + position]; }
};

// TF32 as tensor cores read it: ten bits behind the point. A GPU from 8.0 on, as the
// emulated one is, multiplies so unless the type of math is FMA. With cuDNN 8 the emulator
// does not: CuPy 13 cannot ask for FMA.
inline float tf32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7F800000) != 0x7F800000) bits = (bits + 0x1000) & ~0x1FFFu;
    memcpy(&value, &bits, 4);
    return value;
}
template <class T> bool rounds_operands(int math) { return IS_9 && std::is_same_v<T, float> && math != FMA; }

template <class T> using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

struct Scale {  // of the host, read when the call is made
    double alpha, beta;
    Scale(const void* a, const void* b, int type)
        : alpha(type == DOUBLE ? *(const double*)a : *(const float*)a),
          beta(type == DOUBLE ? *(const double*)b : *(const float*)b) {}
    template <class T> void put(T& out, Sum<T> value) const {
        out = beta == 0 ? T(Sum<T>(alpha) * value) : T(Sum<T>(alpha) * value + Sum<T>(beta) * Sum<T>(out));
    }
};

template <class F> int with_type(int type, F use) {
    switch (type) {
        case FLOAT: use(float()); return SUCCESS;
        case DOUBLE: use(double()); return SUCCESS;
        case HALF: use(Half()); return SUCCESS;
        default: return refuse(NOT_SUPPORTED, "type of data");
    }
}

inline std::vector<int> tail(const std::vector<int>& all) { return {all.begin() + 2, all.end()}; }
inline uint64_t mixed(uint64_t a, uint64_t b) {  // splitmix64
    uint64_t x = a * 0x2545F4914F6CDD1Dull ^ (b + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

struct Dropout { float ratio = 0; void* states = nullptr; };
struct States { uint64_t seed, position; };  // in the memory of the device
constexpr size_t STATES_BYTES = 1 << 14;  // a GPU has more, some for each of its threads

inline bool kept(const unsigned char* mask, size_t i) { return mask[i / 8] >> i % 8 & 1; }
void draw(const Dropout& dropout, size_t count, unsigned char* mask);

inline bool good(const Tensor& a, const Tensor& b) { return a == b && a.dense(); }

// out[i] from the elements i of inputs, all of them dense and alike
template <class T, class F>
void map_elements(size_t count, T* out, std::initializer_list<const void*> inputs, F value) {
    for (const void* input : inputs) read(input, count * sizeof(T));
    write(out, count * sizeof(T));
    for (size_t i = 0; i < count; i++) value(i);
}

void launch(void* handle, std::function<void()> run);
void lay_out(Tensor& tensor, int type, std::vector<int> shape, int format);  // 0: NCHW, 1: NHWC

}  // namespace emu::dnn

#define DESCRIPTOR(name, T) \
    int cudnnCreate##name(void** out) { *out = new T; return SUCCESS; } \
    int cudnnDestroy##name(void* descriptor) { delete (T*)descriptor; return SUCCESS; }
