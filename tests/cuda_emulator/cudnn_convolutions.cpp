// cuDNN: convolutions by algorithms that differ in workspace, in bits and in speed.
//
// An algorithm adds its products in an order of its own. Those that a GPU computes with
// atomic additions take another order in each call, if EMU_ATOMICS is set.
#include "cudnn.h"

namespace emu::dnn {
namespace {

enum Pass { FORWARD, DATA, FILTER };

struct Problem {
    Tensor x, w, y;
    Convolution convolution;
    int dims, groups, ins, outs;  // channels of one group
    Windows windows;

    static int check(const Tensor& x, const Tensor& w, const Convolution& c, const Tensor& y) {
        size_t dims = c.pad.size();
        REFUSE_IF(c.mode != 1 || dims < 2, NOT_SUPPORTED);
        for (auto* t : {&x, &w, &y}) REFUSE_IF(t->shape.size() != dims + 2 || t->type != x.type, BAD_PARAM);
        REFUSE_IF(c.computes != x.type && !(x.type == HALF && c.computes == FLOAT), NOT_SUPPORTED);
        REFUSE_IF(c.groups < 1 || w.shape[1] * c.groups != x.shape[1] || w.shape[0] % c.groups, BAD_PARAM);
        REFUSE_IF(y.shape[0] != x.shape[0] || y.shape[1] != w.shape[0], BAD_PARAM);
        for (size_t i = 0; i < dims; i++) {
            int reach = (w.shape[i + 2] - 1) * c.dilation[i] + 1;
            int size = x.shape[i + 2] + 2 * c.pad[i] - reach;
            REFUSE_IF(size < 0 || y.shape[i + 2] != size / c.stride[i] + 1, BAD_PARAM);
        }
        return SUCCESS;
    }
    Problem(const Tensor& x, const Tensor& w, const Convolution& c, const Tensor& y)
        : x(x), w(w), y(y), convolution(c), dims(c.pad.size()), groups(c.groups), ins(w.shape[1]),
          outs(w.shape[0] / c.groups),
          windows(tail(x.shape), tail(x.strides), tail(y.shape), tail(w.shape), c.pad, c.stride, c.dilation) {}

    int rows() const { return ins * windows.places; }
    double products() const { return double(x.shape[0]) * groups * outs * rows() * windows.positions; }
    bool plain() const {  // 3 or 5 pixels wide, one step at a time
        for (int i = 0; i < dims; i++) {
            int size = w.shape[i + 2];
            if ((size != 3 && size != 5) || convolution.stride[i] != 1 || convolution.dilation[i] != 1) return false;
        }
        return groups == 1 && dims == 2;
    }
    template <class T> auto factor() const {  // what is multiplied, of what is stored
        return [rounds = rounds_operands<T>(convolution.math)](T value) { return rounds ? Sum<T>(tf32(value)) : Sum<T>(value); };
    }
    bool spread() const {
        return std::any_of(convolution.dilation.begin(), convolution.dilation.end(), [](int d) { return d > 1; });
    }
};

// ---- algorithms ------------------------------------------------------------------------
struct Algorithm {
    int number;
    size_t room;  // bytes
    bool repeats;  // the same bits each time
    int variant;  // order of additions
    double seconds;
};

// Seconds are of no GPU: they let layers of different sizes prefer different algorithms.
std::vector<Algorithm> algorithms(Pass pass, const Problem& p) {
    size_t item = p.x.item(), columns = (size_t)p.rows() * p.windows.positions * item;
    size_t tiles = (p.x.count() + p.w.count() + p.y.count()) * item;
    double products = p.products();
    std::vector<Algorithm> found;
    auto add = [&](int number, size_t room, bool repeats, int variant, double each, double start) {
        found.push_back({number, room, repeats, variant, products * each + start});
    };
    if (pass == FORWARD) {
        add(0, 0, true, 0, 1.6e-12, 1e-6);
        if (!p.spread()) add(1, 64 + 4 * (size_t)p.rows(), true, 1, 1.0e-12, 3e-6);
        add(2, columns, true, 2, 1.3e-12, 2e-6);
        if (p.plain() && p.x.type == FLOAT) {
            if (p.w.shape[2] == 3) add(6, 1024 + p.w.count() * 4, true, 3, 0.6e-12, 6e-6);
            add(7, 4 * tiles, true, 3, 0.4e-12, 20e-6);
        }
    } else if (pass == DATA) {
        add(0, 0, false, 0, 1.2e-12, 1e-6);
        add(1, 64 + columns / 2, true, 1, 1.1e-12, 3e-6);
        if (p.plain() && p.x.type == FLOAT) add(5, 4 * tiles, true, 3, 0.4e-12, 20e-6);
    } else {
        add(0, 0, false, 0, 1.1e-12, 1e-6);
        add(1, 64 + columns / 4, true, 1, 1.2e-12, 2e-6);
        add(3, 64 + p.w.count() * item, false, 2, 0.9e-12, 4e-6);
        if (p.plain() && p.x.type == FLOAT) add(5, 4 * tiles, true, 3, 0.4e-12, 20e-6);
    }
    std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.seconds < b.seconds; });
    return found;
}

uint64_t calls = 0;
int variant_of(const Algorithm& algorithm) {
    static bool const atomics = getenv("EMU_ATOMICS") && atoi(getenv("EMU_ATOMICS"));
    return algorithm.repeats || !atomics ? algorithm.variant : mixed(calls++, 7) % 4;
}

// ---- products of matrices in four orders -------------------------------------------------
// out (rows x columns) += a (rows x inner) b (inner x columns)
template <class S>
void multiply(int rows, int inner, int columns, const S* a, const S* b, S* out, int variant) {
    constexpr int WIDE = 256, PARTS = 4;
    int parts = variant < 2 ? 1 : variant == 2 ? 2 : PARTS;
    for (int first = 0; first < columns; first += WIDE) {
        int wide = std::min(WIDE, columns - first);
        for (int i = 0; i < rows; i++) {
            S sums[PARTS][WIDE] = {};
            for (int step = 0; step < inner; step++) {
                int k = variant == 1 ? inner - 1 - step : step;
                S* sum = sums[parts == 2 ? k >= inner / 2 : k % parts];
                S factor = a[(size_t)i * inner + k];
                const S* from = b + (size_t)k * columns + first;
                for (int j = 0; j < wide; j++) sum[j] += factor * from[j];
            }
            S* to = out + (size_t)i * columns + first;
            for (int j = 0; j < wide; j++) to[j] += (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
        }
    }
}

// Weights of one group, outputs by rows of a window, or turned.
template <class T, class S> std::vector<S> weights(const Problem& p, const T* w, int group, bool turned) {
    std::vector<S> out((size_t)p.outs * p.rows());
    Planes planes(p.w);
    auto factor = p.factor<T>();
    int r = 0;
    for (int c = 0; c < p.ins; c++) for (int place = 0; place < p.windows.places; place++, r++)
        for (int o = 0; o < p.outs; o++) {
            S value = factor(w[planes.at(group * p.outs + o, c, place)]);
            out[turned ? (size_t)r * p.outs + o : (size_t)o * p.rows() + r] = value;
        }
    return out;
}

// What the windows of an image see: rows of a window by positions, or turned.
template <class T, class S> void see(const Problem& p, const T* x, int image, int group, bool turned, std::vector<S>& out) {
    int positions = p.windows.positions, rows = p.rows(), r = 0;
    auto factor = p.factor<T>();
    out.resize((size_t)rows * positions);
    for (int c = 0; c < p.ins; c++) {
        const T* from = x + (size_t)image * p.x.strides[0] + (size_t)(group * p.ins + c) * p.x.strides[1];
        for (int place = 0; place < p.windows.places; place++, r++)
            for (int q = 0; q < positions; q++) {
                int at = p.windows.at(place, q);
                out[turned ? (size_t)q * rows + r : (size_t)r * positions + q] = at < 0 ? S(0) : factor(from[at]);
            }
    }
}

template <class T, class S> void outputs(const Problem& p, const T* y, int image, int group, std::vector<S>& out) {
    Planes planes(p.y);
    auto factor = p.factor<T>();
    out.resize((size_t)p.outs * planes.positions);
    for (int o = 0, i = 0; o < p.outs; o++)
        for (int q = 0; q < planes.positions; q++) out[i++] = factor(y[planes.at(image, group * p.outs + o, q)]);
}

template <class T> void forward(const Problem& p, const T* x, const T* w, T* y, Scale scale, int variant) {
    using S = Sum<T>;
    Planes planes(p.y);
    std::vector<S> seen, sums;
    for (int g = 0; g < p.groups; g++) {
        auto matrix = weights<T, S>(p, w, g, false);
        for (int n = 0; n < planes.batch; n++) {
            see<T, S>(p, x, n, g, false, seen);
            sums.assign((size_t)p.outs * planes.positions, 0);
            multiply(p.outs, p.rows(), planes.positions, matrix.data(), seen.data(), sums.data(), variant);
            for (int o = 0, i = 0; o < p.outs; o++)
                for (int q = 0; q < planes.positions; q++) scale.put(y[planes.at(n, g * p.outs + o, q)], sums[i++]);
        }
    }
}

template <class T> void backward_data(const Problem& p, const T* w, const T* gy, T* gx, Scale scale, int variant) {
    using S = Sum<T>;
    int positions = p.windows.positions, places = p.windows.places;
    std::vector<S> gradient, spread, sums(p.x.extent());
    for (int g = 0; g < p.groups; g++) {
        auto matrix = weights<T, S>(p, w, g, true);
        for (int n = 0; n < p.x.shape[0]; n++) {
            outputs<T, S>(p, gy, n, g, gradient);
            spread.assign((size_t)p.rows() * positions, 0);
            multiply(p.rows(), p.outs, positions, matrix.data(), gradient.data(), spread.data(), variant);
            for (int c = 0; c < p.ins; c++) {
                S* to = &sums[(size_t)n * p.x.strides[0] + (size_t)(g * p.ins + c) * p.x.strides[1]];
                for (int step = 0; step < places; step++) {
                    int place = variant % 2 ? places - 1 - step : step;
                    const S* from = &spread[((size_t)c * places + place) * positions];
                    for (int q = 0; q < positions; q++) {
                        int at = p.windows.at(place, q);
                        if (at >= 0) to[at] += from[q];
                    }
                }
            }
        }
    }
    for (size_t i = 0; i < sums.size(); i++) scale.put(gx[i], sums[i]);
}

template <class T> void backward_filter(const Problem& p, const T* x, const T* gy, T* gw, Scale scale, int variant) {
    using S = Sum<T>;
    Planes planes(p.w);
    std::vector<S> gradient, seen, sums;
    for (int g = 0; g < p.groups; g++) {
        sums.assign((size_t)p.outs * p.rows(), 0);
        for (int step = 0; step < p.x.shape[0]; step++) {
            int n = variant % 2 ? p.x.shape[0] - 1 - step : step;
            outputs<T, S>(p, gy, n, g, gradient);
            see<T, S>(p, x, n, g, true, seen);
            multiply(p.outs, p.windows.positions, p.rows(), gradient.data(), seen.data(), sums.data(), variant);
        }
        for (int o = 0, i = 0; o < p.outs; o++)
            for (int c = 0; c < p.ins; c++)
                for (int place = 0; place < p.windows.places; place++)
                    scale.put(gw[planes.at(g * p.outs + o, c, place)], sums[i++]);
    }
}

struct Operands { const void *x, *w, *y; };  // one of them is written into

// Arguments of the three passes in one order; the written tensor is the pass's own.
int run(void* h, Pass pass, Tensor* xt, Tensor* wt, Convolution* c, Tensor* yt, Operands at, int number,
        void* workspace, size_t room, const void* al, const void* be) {
    if (int status = Problem::check(*xt, *wt, *c, *yt)) return status;
    REFUSE_IF(pass != FORWARD && !(xt->dense() && wt->dense()), NOT_SUPPORTED);
    auto problem = std::make_shared<Problem>(*xt, *wt, *c, *yt);
    auto all = algorithms(pass, *problem);
    auto chosen = std::find_if(all.begin(), all.end(), [=](auto& a) { return a.number == number; });
    REFUSE_IF(chosen == all.end(), NOT_SUPPORTED);
    REFUSE_IF(room < chosen->room || (chosen->room && !on_device(workspace)), BAD_PARAM);
    int variant = variant_of(*chosen);
    return with_type(xt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, scale = Scale(al, be, xt->type)] {
            const Problem& p = *problem;
            (pass == DATA ? write : read)(at.x, p.x.bytes());
            (pass == FILTER ? write : read)(at.w, p.w.bytes());
            (pass == FORWARD ? write : read)(at.y, p.y.bytes());
            if (room) write(workspace, room), memset(workspace, 0x5A, room);
            if (pass == FORWARD) forward(p, (const T*)at.x, (const T*)at.w, (T*)at.y, scale, variant);
            if (pass == DATA) backward_data(p, (const T*)at.w, (const T*)at.y, (T*)at.x, scale, variant);
            if (pass == FILTER) backward_filter(p, (const T*)at.x, (const T*)at.y, (T*)at.w, scale, variant);
        });
    });
}

// ---- which algorithm? --------------------------------------------------------------------
struct Performance { int number, status; float milliseconds; size_t room; int repeats, math, reserved[3]; };
static_assert(sizeof(Performance) == 48 && offsetof(Performance, room) == 16 && offsetof(Performance, math) == 28);

int count_of(Pass pass) { return pass == FORWARD ? 8 : pass == DATA ? 6 : 7; }

// What is found, the fastest first, and behind it, with a status, what does not do.
int list(Pass pass, const std::vector<Algorithm>& found, size_t room, const Convolution& c, int wanted, int* count, Performance* out) {
    REFUSE_IF(wanted < 1, BAD_PARAM);
    std::vector<Performance> all;
    std::vector<bool> listed(count_of(pass));
    for (auto& a : found)
        if (a.room <= room) {
            all.push_back({a.number, SUCCESS, float(a.seconds * 1e3), a.room, a.repeats, c.math, {}});
            listed[a.number] = true;
        }
    for (auto& a : found) {
        if (!listed[a.number]) all.push_back({a.number, ALLOC_FAILED, -1, a.room, a.repeats, c.math, {}});
        listed[a.number] = true;
    }
    for (int number = 0; number < count_of(pass); number++)
        if (!listed[number]) all.push_back({number, NOT_SUPPORTED, -1, 0, 0, c.math, {}});
    *count = std::min<int>(wanted, all.size());
    std::copy_n(all.begin(), *count, out);
    return SUCCESS;
}

int get(Pass pass, Tensor* x, Tensor* w, Convolution* c, Tensor* y, int wanted, int* count, Performance* out) {
    if (int status = Problem::check(*x, *w, *c, *y)) return status;
    return list(pass, algorithms(pass, Problem(*x, *w, *c, *y)), SIZE_MAX, *c, wanted, count, out);
}

// Runs what fits into the workspace, waits for it, and sorts by times that EMU_SEED shakes.
int find(void* h, Pass pass, Tensor* x, Tensor* w, Convolution* c, Tensor* y, Operands at, int wanted, int* count,
         Performance* out, void* workspace, size_t room) {
    if (int status = Problem::check(*x, *w, *c, *y)) return status;
    static uint64_t const seed = getenv("EMU_SEED") ? strtoull(getenv("EMU_SEED"), nullptr, 10) : 0;
    auto found = algorithms(pass, Problem(*x, *w, *c, *y));
    double const one[] = {1}, none[] = {0};
    float const one_f[] = {1}, none_f[] = {0};
    bool is_double = x->type == DOUBLE;
    for (auto& a : found) {
        if (a.room > room) continue;
        int status = run(h, pass, x, w, c, y, at, a.number, workspace, room, is_double ? (const void*)one : one_f,
                         is_double ? (const void*)none : none_f);
        if (status) return status;
        if (seed) a.seconds *= 1 + (mixed(seed, calls++) % 1000) / 2000.;
    }
    std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.seconds < b.seconds; });
    Lock lock(mutex);
    drain(((Context*)h)->stream);
    return list(pass, found, room, *c, wanted, count, out);
}

int room_of(Pass pass, Tensor* x, Tensor* w, Convolution* c, Tensor* y, int number, size_t* out) {
    if (int status = Problem::check(*x, *w, *c, *y)) return status;
    for (auto& a : algorithms(pass, Problem(*x, *w, *c, *y)))
        if (a.number == number) { *out = a.room; return SUCCESS; }
    return refuse(NOT_SUPPORTED, "no such algorithm for these shapes");
}

}  // namespace
}  // namespace emu::dnn

using namespace emu;
using namespace emu::dnn;

extern "C" {
int cudnnGetConvolutionForwardAlgorithmMaxCount(void*, int* out) { *out = count_of(FORWARD); return SUCCESS; }
int cudnnGetConvolutionBackwardDataAlgorithmMaxCount(void*, int* out) { *out = count_of(DATA); return SUCCESS; }
int cudnnGetConvolutionBackwardFilterAlgorithmMaxCount(void*, int* out) { *out = count_of(FILTER); return SUCCESS; }
int cudnnGetConvolutionForwardAlgorithm_v7(void*, Tensor* x, Tensor* w, Convolution* c, Tensor* y, int wanted, int* count, Performance* out) {
    return get(FORWARD, x, w, c, y, wanted, count, out);
}
int cudnnGetConvolutionBackwardDataAlgorithm_v7(void*, Tensor* w, Tensor* y, Convolution* c, Tensor* x, int wanted, int* count, Performance* out) {
    return get(DATA, x, w, c, y, wanted, count, out);
}
int cudnnGetConvolutionBackwardFilterAlgorithm_v7(void*, Tensor* x, Tensor* y, Convolution* c, Tensor* w, int wanted, int* count, Performance* out) {
    return get(FILTER, x, w, c, y, wanted, count, out);
}
int cudnnFindConvolutionForwardAlgorithmEx(void* h, Tensor* xt, const void* x, Tensor* wt, const void* w, Convolution* c, Tensor* yt,
                                           void* y, int wanted, int* count, Performance* out, void* workspace, size_t room) {
    return find(h, FORWARD, xt, wt, c, yt, {x, w, y}, wanted, count, out, workspace, room);
}
int cudnnFindConvolutionBackwardDataAlgorithmEx(void* h, Tensor* wt, const void* w, Tensor* yt, const void* y, Convolution* c, Tensor* xt,
                                                void* x, int wanted, int* count, Performance* out, void* workspace, size_t room) {
    return find(h, DATA, xt, wt, c, yt, {x, w, y}, wanted, count, out, workspace, room);
}
int cudnnFindConvolutionBackwardFilterAlgorithmEx(void* h, Tensor* xt, const void* x, Tensor* yt, const void* y, Convolution* c, Tensor* wt,
                                                  void* w, int wanted, int* count, Performance* out, void* workspace, size_t room) {
    return find(h, FILTER, xt, wt, c, yt, {x, w, y}, wanted, count, out, workspace, room);
}
int cudnnGetConvolutionForwardWorkspaceSize(void*, Tensor* x, Tensor* w, Convolution* c, Tensor* y, int number, size_t* out) {
    return room_of(FORWARD, x, w, c, y, number, out);
}
int cudnnGetConvolutionBackwardDataWorkspaceSize(void*, Tensor* w, Tensor* y, Convolution* c, Tensor* x, int number, size_t* out) {
    return room_of(DATA, x, w, c, y, number, out);
}
int cudnnGetConvolutionBackwardFilterWorkspaceSize(void*, Tensor* x, Tensor* y, Convolution* c, Tensor* w, int number, size_t* out) {
    return room_of(FILTER, x, w, c, y, number, out);
}
int cudnnConvolutionForward(void* h, const void* al, Tensor* xt, const void* x, Tensor* wt, const void* w, Convolution* c, int number,
                            void* workspace, size_t room, const void* be, Tensor* yt, void* y) {
    return run(h, FORWARD, xt, wt, c, yt, {x, w, y}, number, workspace, room, al, be);
}
int cudnnConvolutionBackwardData(void* h, const void* al, Tensor* wt, const void* w, Tensor* yt, const void* y, Convolution* c, int number,
                                 void* workspace, size_t room, const void* be, Tensor* xt, void* x) {
    return run(h, DATA, xt, wt, c, yt, {x, w, y}, number, workspace, room, al, be);
}
int cudnnConvolutionBackwardFilter(void* h, const void* al, Tensor* xt, const void* x, Tensor* yt, const void* y, Convolution* c, int number,
                                   void* workspace, size_t room, const void* be, Tensor* wt, void* w) {
    return run(h, FILTER, xt, wt, c, yt, {x, w, y}, number, workspace, room, al, be);
}
int cudnnConvolutionBackwardBias(void* h, const void* al, Tensor* yt, const void* y, const void* be, Tensor* bt, void* b) {
    REFUSE_IF(yt->type != bt->type || bt->shape[1] != yt->shape[1] || bt->count() != yt->shape[1], BAD_PARAM);
    return with_type(yt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, scale = Scale(al, be, yt->type), t = *yt] {
            Planes planes(t);
            read(y, t.bytes());
            write(b, planes.channels * t.item());
            for (int c = 0; c < planes.channels; c++) {
                Sum<T> sum = 0;
                for (int n = 0; n < planes.batch; n++)
                    for (int p = 0; p < planes.positions; p++) sum += Sum<T>(((const T*)y)[planes.at(n, c, p)]);
                scale.put(((T*)b)[c], sum);
            }
        });
    });
}
}
