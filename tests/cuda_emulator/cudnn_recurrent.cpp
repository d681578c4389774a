// cuDNN: recurrent layers over packed sequences, the longest first.
#include "cudnn.h"

namespace emu::dnn {
namespace {

enum Mode { RELU, TANH, LSTM, GRU };

struct Recurrent {
    int units = 0, layers = 0, directions = 1, mode = 0, type = 0;
    Dropout* dropout = nullptr;
    int gates() const { return mode == LSTM ? 4 : mode == GRU ? 3 : 1; }
    int inputs(int layer, int first) const { return layer ? directions * units : first; }
    size_t matrix(int number, int inputs) const { return (size_t)units * (number < gates() ? inputs : units); }

    // Of a matrix or, behind all matrices, of a bias; in elements. Past the last: the size.
    size_t offset(int pseudo, int number, int first, bool bias) const {
        size_t sum = 0;
        for (int q = 0; q < (bias ? layers * directions : pseudo + 1); q++)
            for (int i = 0; i < (bias || q < pseudo ? 2 * gates() : number); i++)
                sum += matrix(i, inputs(q / directions, first));
        return bias ? sum + ((size_t)pseudo * 2 * gates() + number) * units : sum;
    }
    size_t count(int first) const { return offset(layers * directions, 0, first, true); }
};

struct Steps {
    std::vector<int> batch, first;  // sequences that go on, and the first row, of each step
    int rows = 0, inputs = 0;
    bool good = true;
    Steps(int count, Tensor* const* xs) {
        inputs = xs[0]->shape[1];
        for (int t = 0; t < count; t++) {
            batch.push_back(xs[t]->shape[0]);
            first.push_back(rows);
            rows += batch[t];
            good = good && xs[t]->shape[1] == inputs && (!t || batch[t] <= batch[t - 1]);
        }
    }
    int count() const { return batch.size(); }
    int at(int step, bool backwards) const { return backwards ? count() - 1 - step : step; }
    // Row of what a sequence had before, or -1 where it begins.
    int before(int t, int b, bool backwards) const {
        int other = backwards ? t + 1 : t - 1;
        return other >= 0 && other < count() && b < batch[other] ? first[other] + b : -1;
    }
};

// What forward leaves for backward, and backward of data for that of weights.
template <class S> struct Reserve {
    const Recurrent& r;
    size_t rows;
    S* start;
    size_t pseudo() const { return rows * r.units * (2 * r.gates() + 3); }
    size_t layer() const { return rows * r.units * r.directions; }
    S* gates(int q) const { return start + q * pseudo(); }
    S* cells(int q) const { return gates(q) + rows * r.units * r.gates(); }
    S* hidden(int q) const { return cells(q) + rows * r.units; }  // of GRU: what the recurrent matrix gives
    S* slopes(int q) const { return hidden(q) + rows * r.units; }
    S* hidden_slopes(int q) const { return slopes(q) + rows * r.units * r.gates(); }
    S* outputs(int l) const { return start + r.layers * r.directions * pseudo() + l * 3 * layer(); }
    S* dropped(int l) const { return outputs(l) + layer(); }  // the input of the layer above
    S* mask(int l) const { return dropped(l) + layer(); }
    size_t count() const { return r.layers * (r.directions * pseudo() + 3 * layer()); }
};

template <class S> S sigmoid(S x) { return S(1) / (S(1) + std::exp(-x)); }

// out[u] += matrix (units x inputs) in
template <class T, class S> void add_product(int units, int inputs, const T* matrix, const S* in, S* out) {
    for (int u = 0; u < units; u++) {
        S sum = 0;
        for (int k = 0; k < inputs; k++) sum += S(matrix[(size_t)u * inputs + k]) * in[k];
        out[u] += sum;
    }
}
template <class T, class S> void add_turned(int units, int inputs, const T* matrix, const S* in, S* out) {
    for (int u = 0; u < units; u++)
        for (int k = 0; k < inputs; k++) out[k] += S(matrix[(size_t)u * inputs + k]) * in[u];
}

template <class T> struct Pass {
    using S = Sum<T>;
    Recurrent r;
    Steps steps;
    const T *w, *hx, *cx;
    Reserve<S> keep;

    int units() const { return r.units; }
    int width() const { return r.units * r.directions; }
    const T* matrix(int q, int number) const { return w + r.offset(q, number, steps.inputs, false); }
    const T* bias(int q, int number) const { return w + r.offset(q, number, steps.inputs, true); }
    size_t state(int q, int b) const { return ((size_t)q * steps.batch[0] + b) * r.units; }

    void start(int q, int b, const T* from, std::vector<S>& out) const {
        out.assign(r.units, 0);
        if (from) for (int u = 0; u < r.units; u++) out[u] = from[state(q, b) + u];
    }
    std::vector<S> hidden_before(int q, int t, int b) const {
        std::vector<S> out;
        int d = q % r.directions, row = steps.before(t, b, d);
        if (row < 0) { start(q, b, hx, out); return out; }
        const S* from = keep.outputs(q / r.directions) + (size_t)row * width() + d * r.units;
        return {from, from + r.units};
    }
    std::vector<S> cell_before(int q, int t, int b) const {
        std::vector<S> out;
        int row = steps.before(t, b, q % r.directions);
        if (row < 0) { start(q, b, cx, out); return out; }
        const S* from = keep.cells(q) + (size_t)row * r.units;
        return {from, from + r.units};
    }
    const S* input(int layer, const S* x, int row) const {
        return layer ? keep.dropped(layer - 1) + (size_t)row * width() : x + (size_t)row * steps.inputs;
    }

    void cell(int q, int t, int b, const S* in) {
        int row = steps.first[t] + b, H = r.units, G = r.gates(), inputs = r.inputs(q / r.directions, steps.inputs);
        auto before = hidden_before(q, t, b);
        S *g = keep.gates(q) + (size_t)row * H * G, *extra = keep.hidden(q) + (size_t)row * H;
        S* out = keep.outputs(q / r.directions) + (size_t)row * width() + q % r.directions * H;
        for (int k = 0; k < G; k++) {
            S* gate = g + (size_t)k * H;
            for (int u = 0; u < H; u++) gate[u] = bias(q, k)[u];
            add_product(H, inputs, matrix(q, k), in, gate);
            S* to = r.mode == GRU && k == 2 ? extra : gate;
            if (to == extra) std::fill_n(extra, H, S(0));
            for (int u = 0; u < H; u++) to[u] += S(bias(q, G + k)[u]);
            add_product(H, H, matrix(q, G + k), before.data(), to);
        }
        if (r.mode < LSTM) {
            for (int u = 0; u < H; u++) out[u] = g[u] = r.mode == TANH ? std::tanh(g[u]) : std::max(g[u], S(0));
        } else if (r.mode == LSTM) {
            auto cells = cell_before(q, t, b);
            for (int u = 0; u < H; u++) {
                for (int k = 0; k < 4; k++) g[k * H + u] = k == 2 ? std::tanh(g[k * H + u]) : sigmoid(g[k * H + u]);
                S c = keep.cells(q)[(size_t)row * H + u] = g[H + u] * cells[u] + g[u] * g[2 * H + u];
                out[u] = g[3 * H + u] * std::tanh(c);
            }
        } else {
            for (int u = 0; u < H; u++) {
                g[u] = sigmoid(g[u]), g[H + u] = sigmoid(g[H + u]);
                g[2 * H + u] = std::tanh(g[2 * H + u] + g[u] * extra[u]);
                out[u] = (1 - g[H + u]) * g[2 * H + u] + g[H + u] * before[u];
            }
        }
    }

    void forward(const T* x, T* y, T* hy, T* cy, bool training) {
        std::vector<S> in(x, x + (size_t)steps.rows * steps.inputs);
        size_t all = (size_t)steps.rows * width();
        for (int l = 0; l < r.layers; l++) {
            for (int d = 0; d < r.directions; d++)
                for (int s = 0; s < steps.count(); s++) {
                    int t = steps.at(s, d);
                    for (int b = 0; b < steps.batch[t]; b++)
                        cell(l * r.directions + d, t, b, input(l, in.data(), steps.first[t] + b));
                }
            S *out = keep.outputs(l), *dropped = keep.dropped(l), *mask = keep.mask(l);
            std::fill_n(mask, all, S(1));
            float ratio = r.dropout ? r.dropout->ratio : 0;
            if (training && ratio > 0 && l + 1 < r.layers) {
                std::vector<unsigned char> drawn((all + 7) / 8);
                draw(*r.dropout, all, drawn.data());
                for (size_t i = 0; i < all; i++) mask[i] = kept(drawn.data(), i) ? 1 / (1 - S(ratio)) : S(0);
            }
            for (size_t i = 0; i < all; i++) dropped[i] = out[i] * mask[i];
        }
        std::copy_n(keep.outputs(r.layers - 1), all, y);
        for (int q = 0; q < r.layers * r.directions; q++)
            for (int b = 0; b < steps.batch[0]; b++) {
                int last = 0;
                while (last + 1 < steps.count() && b < steps.batch[last + 1]) last++;
                size_t row = steps.first[q % r.directions ? 0 : last] + b;
                for (int u = 0; u < r.units; u++) {
                    size_t to = state(q, b) + u;
                    if (hy) hy[to] = keep.outputs(q / r.directions)[row * width() + q % r.directions * r.units + u];
                    if (cy && r.mode == LSTM) cy[to] = keep.cells(q)[row * r.units + u];
                }
            }
    }

    void slope(int q, int t, int b, const S* dh, S* dhx, S* dcx) {
        int H = r.units, G = r.gates();
        size_t row = steps.first[t] + b;
        S *g = keep.gates(q) + row * H * G, *dg = keep.slopes(q) + row * H * G, *dr = keep.hidden_slopes(q) + row * H;
        auto before = hidden_before(q, t, b);
        if (r.mode < LSTM) {
            for (int u = 0; u < H; u++) dg[u] = dh[u] * (r.mode == TANH ? 1 - g[u] * g[u] : S(g[u] > 0));
        } else if (r.mode == LSTM) {
            auto cells = cell_before(q, t, b);
            for (int u = 0; u < H; u++) {
                S i = g[u], f = g[H + u], a = g[2 * H + u], o = g[3 * H + u];
                S c = std::tanh(keep.cells(q)[row * H + u]), dc = dcx[u] + dh[u] * o * (1 - c * c);
                dg[u] = dc * a * i * (1 - i), dg[H + u] = dc * cells[u] * f * (1 - f);
                dg[2 * H + u] = dc * i * (1 - a * a), dg[3 * H + u] = dh[u] * c * o * (1 - o);
                dcx[u] = dc * f;
            }
        } else {
            for (int u = 0; u < H; u++) {
                S reset = g[u], z = g[H + u], n = g[2 * H + u];
                S dn = dg[2 * H + u] = dh[u] * (1 - z) * (1 - n * n);
                dg[u] = dn * keep.hidden(q)[row * H + u] * reset * (1 - reset);
                dg[H + u] = dh[u] * (before[u] - n) * z * (1 - z);
                dr[u] = dn * reset;
            }
        }
        for (int u = 0; u < H; u++) dhx[u] = r.mode == GRU ? dh[u] * g[H + u] : S(0);
        for (int k = 0; k < G; k++) add_turned(H, H, matrix(q, G + k), recurrent_slope(q, row, k), dhx);
    }
    const S* recurrent_slope(int q, size_t row, int gate) const {
        if (r.mode == GRU && gate == 2) return keep.hidden_slopes(q) + row * r.units;
        return keep.slopes(q) + (row * r.gates() + gate) * r.units;
    }

    void backward_data(const T* dy, const T* dhy, const T* dcy, T* dx, T* dhx, T* dcx) {
        size_t all = (size_t)steps.rows * width();
        std::vector<S> upper(dy, dy + all), lower, dh(r.units);
        for (int l = r.layers; l-- > 0; upper = lower) {
            int inputs = r.inputs(l, steps.inputs);
            lower.assign((size_t)steps.rows * inputs, 0);
            for (int d = 0; d < r.directions; d++) {
                int q = l * r.directions + d;
                std::vector<std::vector<S>> h(steps.batch[0]), c(steps.batch[0]);
                for (int b = 0; b < steps.batch[0]; b++) start(q, b, dhy, h[b]), start(q, b, r.mode == LSTM ? dcy : nullptr, c[b]);
                for (int s = steps.count(); s-- > 0;) {
                    int t = steps.at(s, d);
                    for (int b = 0; b < steps.batch[t]; b++) {
                        size_t row = steps.first[t] + b;
                        for (int u = 0; u < r.units; u++) dh[u] = h[b][u] + upper[row * width() + d * r.units + u];
                        slope(q, t, b, dh.data(), h[b].data(), c[b].data());
                        for (int k = 0; k < r.gates(); k++)
                            add_turned(r.units, inputs, matrix(q, k), keep.slopes(q) + (row * r.gates() + k) * r.units, &lower[row * inputs]);
                    }
                }
                for (int b = 0; b < steps.batch[0]; b++) for (int u = 0; u < r.units; u++) {
                    if (dhx) dhx[state(q, b) + u] = h[b][u];
                    if (dcx && r.mode == LSTM) dcx[state(q, b) + u] = c[b][u];
                }
            }
            if (l) for (size_t i = 0; i < all; i++) lower[i] *= keep.mask(l - 1)[i];
        }
        std::copy(upper.begin(), upper.end(), dx);
    }

    void backward_weights(const T* x, T* dw) {
        std::vector<S> in(x, x + (size_t)steps.rows * steps.inputs), sums(r.count(steps.inputs));
        auto add = [&](size_t at, const S* slope, const S* value, int count) {
            for (int u = 0; u < r.units; u++) for (int k = 0; k < count; k++) sums[at + (size_t)u * count + k] += slope[u] * value[k];
        };
        S const one = 1;
        for (int q = 0; q < r.layers * r.directions; q++) for (int t = 0; t < steps.count(); t++)
            for (int b = 0; b < steps.batch[t]; b++) {
                int row = steps.first[t] + b, l = q / r.directions, G = r.gates();
                auto before = hidden_before(q, t, b);
                for (int k = 0; k < G; k++) {
                    const S *own = keep.slopes(q) + ((size_t)row * G + k) * r.units, *past = recurrent_slope(q, row, k);
                    add(r.offset(q, k, steps.inputs, false), own, input(l, in.data(), row), r.inputs(l, steps.inputs));
                    add(r.offset(q, G + k, steps.inputs, false), past, before.data(), r.units);
                    add(r.offset(q, k, steps.inputs, true), own, &one, 1);
                    add(r.offset(q, G + k, steps.inputs, true), past, &one, 1);
                }
            }
        for (size_t i = 0; i < sums.size(); i++) dw[i] += sums[i];
    }
};

size_t reserve_bytes(const Recurrent& r, const Steps& steps) {
    Reserve<float> all{r, (size_t)steps.rows, nullptr};
    return all.count() * (r.type == DOUBLE ? 8 : 4);
}
size_t constexpr ROOM = 4096;

int part(Recurrent* r, int pseudo, Tensor* x, void* w, int number, Tensor* out, void** at, bool bias) {
    if (pseudo >= r->layers * r->directions || number >= 2 * r->gates()) return BAD_PARAM;
    int inputs = x->shape[1], wide = number < r->gates() ? r->inputs(pseudo / r->directions, inputs) : r->units;
    lay_out(*out, r->type, {1, r->units, bias ? 1 : wide}, 0);
    *at = (char*)w + r->offset(pseudo, number, inputs, bias) * out->item();
    return SUCCESS;
}

}  // namespace
}  // namespace emu::dnn

using namespace emu;
using namespace emu::dnn;

extern "C" {
DESCRIPTOR(RNNDescriptor, Recurrent)
int cudnnSetRNNDescriptor_v6(void*, Recurrent* r, int units, int layers, Dropout* dropout, int input, int directions, int mode, int, int type) {
    if (input || mode > GRU) return NOT_SUPPORTED;
    *r = {units, layers, directions + 1, mode, type, dropout};
    return SUCCESS;
}
int cudnnGetRNNWorkspaceSize(void*, Recurrent*, int, Tensor**, size_t* out) { *out = ROOM; return SUCCESS; }
int cudnnGetRNNTrainingReserveSize(void*, Recurrent* r, int count, Tensor** xs, size_t* out) {
    *out = reserve_bytes(*r, Steps(count, xs));
    return SUCCESS;
}
int cudnnGetRNNParamsSize(void*, Recurrent* r, Tensor* x, size_t* out, int type) {
    *out = r->count(x->shape[1]) * Tensor{type}.item();
    return SUCCESS;
}
int cudnnGetRNNLinLayerMatrixParams(void*, Recurrent* r, int pseudo, Tensor* x, Tensor*, void* w, int number, Tensor* out, void** at) {
    return part(r, pseudo, x, w, number, out, at, false);
}
int cudnnGetRNNLinLayerBiasParams(void*, Recurrent* r, int pseudo, Tensor* x, Tensor*, void* w, int number, Tensor* out, void** at) {
    return part(r, pseudo, x, w, number, out, at, true);
}
static int run_forward(void* h, Recurrent* r, int count, Tensor** xs, const void* x, const void* hx, const void* cx, Tensor* wt,
                       const void* w, void* y, void* hy, void* cy, void* workspace, size_t room, void* reserve, size_t bytes, bool training) {
    Steps steps(count, xs);
    if (!steps.good || room < ROOM || (training && bytes < reserve_bytes(*r, steps))) return BAD_PARAM;
    if (wt->count() < r->count(steps.inputs)) return BAD_PARAM;
    return with_type(r->type, [&](auto zero) {
        using T = decltype(zero);
        using S = Sum<T>;
        launch(h, [=, r = *r, copy = r->dropout ? *r->dropout : Dropout()]() mutable {
            size_t item = sizeof(T), all = (size_t)steps.rows * r.units * r.directions;
            read(x, (size_t)steps.rows * steps.inputs * item), read(w, r.count(steps.inputs) * item);
            write(y, all * item), write(workspace, room);
            memset(workspace, 0x5A, room);
            r.dropout = &copy;
            std::vector<S> own;
            S* start = (S*)reserve;
            if (training) write(reserve, reserve_bytes(r, steps));
            else own.resize(Reserve<S>{r, (size_t)steps.rows, nullptr}.count()), start = own.data();
            Pass<T> pass{r, steps, (const T*)w, (const T*)hx, (const T*)cx, {r, (size_t)steps.rows, start}};
            pass.forward((const T*)x, (T*)y, (T*)hy, (T*)cy, training);
        });
    });
}
int cudnnRNNForwardTraining(void* h, Recurrent* r, int count, Tensor** xs, const void* x, Tensor*, const void* hx, Tensor*, const void* cx,
                            Tensor* wt, const void* w, Tensor**, void* y, Tensor*, void* hy, Tensor*, void* cy, void* workspace, size_t room,
                            void* reserve, size_t bytes) {
    return run_forward(h, r, count, xs, x, hx, cx, wt, w, y, hy, cy, workspace, room, reserve, bytes, true);
}
int cudnnRNNForwardInference(void* h, Recurrent* r, int count, Tensor** xs, const void* x, Tensor*, const void* hx, Tensor*, const void* cx,
                             Tensor* wt, const void* w, Tensor**, void* y, Tensor*, void* hy, Tensor*, void* cy, void* workspace, size_t room) {
    return run_forward(h, r, count, xs, x, hx, cx, wt, w, y, hy, cy, workspace, room, nullptr, 0, false);
}
int cudnnRNNBackwardData(void* h, Recurrent* r, int count, Tensor** ys, const void*, Tensor**, const void* dy, Tensor*, const void* dhy,
                         Tensor*, const void* dcy, Tensor*, const void* w, Tensor*, const void* hx, Tensor*, const void* cx, Tensor** dxs,
                         void* dx, Tensor*, void* dhx, Tensor*, void* dcx, void* workspace, size_t room, void* reserve, size_t bytes) {
    Steps steps(count, dxs);
    if (!steps.good || room < ROOM || bytes < reserve_bytes(*r, steps)) return BAD_PARAM;
    return with_type(r->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, r = *r] {
            size_t all = (size_t)steps.rows * r.units * r.directions;
            read(dy, all * sizeof(T)), read(w, r.count(steps.inputs) * sizeof(T));
            write(dx, (size_t)steps.rows * steps.inputs * sizeof(T)), write(reserve, reserve_bytes(r, steps)), write(workspace, room);
            memset(workspace, 0x5A, room);
            Pass<T> pass{r, steps, (const T*)w, (const T*)hx, (const T*)cx, {r, (size_t)steps.rows, (Sum<T>*)reserve}};
            pass.backward_data((const T*)dy, (const T*)dhy, (const T*)dcy, (T*)dx, (T*)dhx, (T*)dcx);
        });
    });
}
int cudnnRNNBackwardWeights(void* h, Recurrent* r, int count, Tensor** xs, const void* x, Tensor*, const void* hx, Tensor**, const void*,
                            void* workspace, size_t room, Tensor*, void* dw, void* reserve, size_t bytes) {
    Steps steps(count, xs);
    if (!steps.good || room < ROOM || bytes < reserve_bytes(*r, steps)) return BAD_PARAM;
    return with_type(r->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, r = *r] {
            read(x, (size_t)steps.rows * steps.inputs * sizeof(T)), read(reserve, reserve_bytes(r, steps));
            write(dw, r.count(steps.inputs) * sizeof(T)), write(workspace, room);
            memset(workspace, 0x5A, room);
            Pass<T> pass{r, steps, nullptr, (const T*)hx, nullptr, {r, (size_t)steps.rows, (Sum<T>*)reserve}};
            pass.backward_weights((const T*)x, (T*)dw);
        });
    });
}
}
