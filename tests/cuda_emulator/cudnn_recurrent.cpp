// Recurrent layers: the arithmetic.
#include "cudnn_recurrent.h"

namespace emu::dnn {
namespace {

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

template <class T> struct Pass {
    using S = Sum<T>;
    Recurrent r;
    Steps steps;
    const T *w, *hx, *cx;
    Reserve<S> keep;
    bool rounds = rounds_operands<T>(r.math);

    S factor(S value) const { return rounds ? S(tf32(value)) : value; }
    // out[u] += matrix (units x inputs) in
    void add_product(int units, int inputs, const T* matrix, const S* in, S* out) const {
        for (int u = 0; u < units; u++) {
            S sum = 0;
            for (int step = 0; step < inputs; step++) {
                int k = r.algorithm ? inputs - 1 - step : step;
                sum += factor(matrix[(size_t)u * inputs + k]) * factor(in[k]);
            }
            out[u] += sum;
        }
    }
    void add_turned(int units, int inputs, const T* matrix, const S* in, S* out) const {
        for (int step = 0; step < units; step++) {
            int u = r.algorithm ? units - 1 - step : step;
            for (int k = 0; k < inputs; k++) out[k] += factor(matrix[(size_t)u * inputs + k]) * factor(in[u]);
        }
    }
    std::vector<S> load(const T* from, int wide) const {
        std::vector<S> out((size_t)steps.rows * wide);
        for (int i = 0; i < steps.rows; i++) std::copy_n(from + (size_t)steps.places[i] * wide, wide, &out[(size_t)i * wide]);
        return out;
    }
    void store(const S* from, int wide, T* to, const std::vector<char>& fill) const {
        T padding = T(NAN);
        if (!fill.empty()) memcpy(&padding, fill.data(), sizeof(T));
        if (steps.rows < steps.all_rows) std::fill_n(to, (size_t)steps.all_rows * wide, padding);
        for (int i = 0; i < steps.rows; i++)
            for (int k = 0; k < wide; k++) to[(size_t)steps.places[i] * wide + k] = from[(size_t)i * wide + k];
    }
    // The outputs that backward is given are those that it uses.
    void take(const T* y) const {
        auto given = load(y, width());
        std::copy(given.begin(), given.end(), keep.outputs(r.layers - 1));
    }

    int units() const { return r.units; }
    int width() const { return r.units * r.directions; }
    const T* matrix(int q, int number) const { return w + r.offset(q, number, steps.inputs, false); }
    const T* bias(int q, int number) const { return w + r.offset(q, number, steps.inputs, true); }
    size_t state(int q, int b) const { return ((size_t)q * steps.sequences + steps.order[b]) * r.units; }

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
            for (int u = 0; u < H; u++) out[u] = g[u] = T(r.mode == TANH ? std::tanh(g[u]) : std::max(g[u], S(0)));
        } else if (r.mode == LSTM) {
            auto cells = cell_before(q, t, b);
            for (int u = 0; u < H; u++) {
                for (int k = 0; k < 4; k++) g[k * H + u] = k == 2 ? std::tanh(g[k * H + u]) : sigmoid(g[k * H + u]);
                S c = keep.cells(q)[(size_t)row * H + u] = g[H + u] * cells[u] + g[u] * g[2 * H + u];
                out[u] = T(g[3 * H + u] * std::tanh(c));
            }
        } else {
            for (int u = 0; u < H; u++) {
                g[u] = sigmoid(g[u]), g[H + u] = sigmoid(g[H + u]);
                g[2 * H + u] = std::tanh(g[2 * H + u] + g[u] * extra[u]);
                out[u] = T((1 - g[H + u]) * g[2 * H + u] + g[H + u] * before[u]);
            }
        }
    }

    void forward(const Arrays& at, bool training) {
        auto in = load((const T*)at.x, steps.inputs);
        T *hy = (T*)at.h, *cy = r.mode == LSTM ? (T*)at.c : nullptr;
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
        store(keep.outputs(r.layers - 1), width(), (T*)at.out, at.fill);
        for (int q = 0; q < r.pseudo_layers(); q++)
            for (int b = 0; b < steps.sequences; b++) {
                int length = 0;
                while (length < steps.count() && b < steps.batch[length]) length++;
                std::vector<S> h, c;
                start(q, b, hx, h), start(q, b, cx, c);  // of a sequence without a step
                if (length) {
                    size_t row = steps.first[q % r.directions ? 0 : length - 1] + b;
                    std::copy_n(keep.outputs(q / r.directions) + row * width() + q % r.directions * r.units, r.units, h.data());
                    std::copy_n(keep.cells(q) + row * r.units, r.units, c.data());
                }
                if (hy) std::copy(h.begin(), h.end(), hy + state(q, b));
                if (cy) std::copy(c.begin(), c.end(), cy + state(q, b));
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

    void backward_data(const Arrays& at) {
        take((const T*)at.y);
        size_t all = (size_t)steps.rows * width();
        T *dhx = (T*)at.h, *dcx = r.mode == LSTM ? (T*)at.c : nullptr;
        auto *dhy = (const T*)at.dhy, *dcy = r.mode == LSTM ? (const T*)at.dcy : nullptr;
        std::vector<S> upper = load((const T*)at.dy, width()), lower, dh(r.units);
        for (int l = r.layers; l-- > 0; upper = lower) {
            int inputs = r.inputs(l, steps.inputs);
            lower.assign((size_t)steps.rows * inputs, 0);
            for (int d = 0; d < r.directions; d++) {
                int q = l * r.directions + d;
                std::vector<std::vector<S>> h(steps.sequences), c(steps.sequences);
                for (int b = 0; b < steps.sequences; b++) start(q, b, dhy, h[b]), start(q, b, dcy, c[b]);
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
                for (int b = 0; b < steps.sequences; b++) {
                    if (dhx) std::copy(h[b].begin(), h[b].end(), dhx + state(q, b));
                    if (dcx) std::copy(c[b].begin(), c[b].end(), dcx + state(q, b));
                }
            }
            if (l) for (size_t i = 0; i < all; i++) lower[i] *= keep.mask(l - 1)[i];
        }
        store(upper.data(), steps.inputs, (T*)at.out, at.fill);
    }

    void backward_weights(const Arrays& at) {
        take((const T*)at.y);
        auto in = load((const T*)at.x, steps.inputs);
        std::vector<S> sums(r.count(steps.inputs));
        auto add = [&](size_t at, const S* slope, const S* value, int count) {
            for (int u = 0; u < r.units; u++) for (int k = 0; k < count; k++) sums[at + (size_t)u * count + k] += factor(slope[u]) * factor(value[k]);
        };
        S const one = 1;
        for (int q = 0; q < r.pseudo_layers(); q++) for (int t = 0; t < steps.count(); t++)
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
        T* dw = (T*)at.out;
        for (size_t i = 0; i < sums.size(); i++) dw[i] += sums[i];
    }
};

struct Bytes {  // of arrays
    size_t x, y, states, weights;
    Bytes(const Recurrent& r, const Steps& steps) {
        size_t item = r.part(0, 1).item();
        x = item * steps.all_rows * steps.inputs, y = item * steps.all_rows * r.units * r.directions;
        states = item * r.pseudo_layers() * steps.sequences * r.units, weights = item * r.count(steps.inputs);
    }
};

void read_given(const void* pointer, size_t bytes) { if (pointer) read(pointer, bytes); }
void write_given(void* pointer, size_t bytes) { if (pointer) write(pointer, bytes); }
void spoil(const Arrays& at) { write(at.workspace, at.room), memset(at.workspace, 0x5A, at.room); }

}  // namespace

size_t training_room(const Recurrent& r, const Steps& steps) {
    return INFERENCE_ROOM + (size_t)steps.sequences * r.units * r.gates() * 8;
}
size_t reserve_bytes(const Recurrent& r, const Steps& steps) {
    Reserve<float> all{r, (size_t)steps.rows, nullptr};
    return all.count() * (r.type == DOUBLE ? 8 : 4);
}

int recurrent_forward(void* h, const Recurrent& r, Steps steps, Arrays at, bool training) {
    REFUSE_IF(!steps.good, BAD_PARAM);
    REFUSE_IF(at.room < (training ? training_room(r, steps) : INFERENCE_ROOM), BAD_PARAM);
    REFUSE_IF(training && at.reserved < reserve_bytes(r, steps), BAD_PARAM);
    return with_type(r.type, [&](auto zero) {
        using T = decltype(zero);
        using S = Sum<T>;
        launch(h, [=, r = r, dropout = r.dropout ? *r.dropout : Dropout()]() mutable {
            Bytes bytes(r, steps);
            read(at.x, bytes.x), read(at.w, bytes.weights), read_given(at.hx, bytes.states);
            write(at.out, bytes.y), write_given(at.h, bytes.states), spoil(at);
            if (r.mode == LSTM) read_given(at.cx, bytes.states), write_given(at.c, bytes.states);
            r.dropout = &dropout;
            std::vector<S> own;
            S* start = (S*)at.reserve;
            if (training) write(at.reserve, reserve_bytes(r, steps));
            else own.resize(Reserve<S>{r, (size_t)steps.rows, nullptr}.count()), start = own.data();
            Pass<T> pass{r, steps, (const T*)at.w, (const T*)at.hx, (const T*)at.cx, {r, (size_t)steps.rows, start}};
            pass.forward(at, training);
        });
    });
}

int recurrent_backward_data(void* h, const Recurrent& r, Steps steps, Arrays at) {
    REFUSE_IF(!steps.good, BAD_PARAM);
    REFUSE_IF(at.room < training_room(r, steps) || at.reserved < reserve_bytes(r, steps), BAD_PARAM);
    return with_type(r.type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, r = r] {
            Bytes bytes(r, steps);
            read(at.y, bytes.y), read(at.dy, bytes.y), read(at.w, bytes.weights);
            for (auto* given : {at.hx, at.dhy}) read_given(given, bytes.states);
            write(at.out, bytes.x), write_given(at.h, bytes.states), write(at.reserve, reserve_bytes(r, steps)), spoil(at);
            if (r.mode == LSTM) {
                for (auto* given : {at.cx, at.dcy}) read_given(given, bytes.states);
                write_given(at.c, bytes.states);
            }
            Pass<T> pass{r, steps, (const T*)at.w, (const T*)at.hx, (const T*)at.cx, {r, (size_t)steps.rows, (Sum<T>*)at.reserve}};
            pass.backward_data(at);
        });
    });
}

int recurrent_backward_weights(void* h, const Recurrent& r, Steps steps, Arrays at) {
    REFUSE_IF(!steps.good, BAD_PARAM);
    REFUSE_IF(at.room < training_room(r, steps) || at.reserved < reserve_bytes(r, steps), BAD_PARAM);
    return with_type(r.type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, r = r] {
            Bytes bytes(r, steps);
            read(at.x, bytes.x), read(at.y, bytes.y), read_given(at.hx, bytes.states);
            write(at.out, bytes.weights), write(at.reserve, reserve_bytes(r, steps)), spoil(at);
            Pass<T> pass{r, steps, nullptr, (const T*)at.hx, nullptr, {r, (size_t)steps.rows, (Sum<T>*)at.reserve}};
            pass.backward_weights(at);
        });
    });
}

}  // namespace emu::dnn
