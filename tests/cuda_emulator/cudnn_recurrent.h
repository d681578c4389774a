// Recurrent layers: what both interfaces, of cuDNN 8 and of cuDNN 9, share.
#pragma once
#include "cudnn.h"

namespace emu::dnn {

enum Cell { RELU, TANH, LSTM, GRU };

struct Recurrent {
    int units = 0, layers = 0, directions = 1, mode = 0, type = 0;
    Dropout* dropout = nullptr;
    int math = FMA, algorithm = 0;
    int gates() const { return mode == LSTM ? 4 : mode == GRU ? 3 : 1; }
    int pseudo_layers() const { return layers * directions; }
    int inputs(int layer, int first) const { return layer ? directions * units : first; }
    size_t matrix(int number, int inputs) const { return (size_t)units * (number < gates() ? inputs : units); }

    // Of a matrix or, behind all matrices, of a bias; in elements. Past the last: the size.
    size_t offset(int pseudo, int number, int first, bool bias) const {
        size_t sum = 0;
        for (int q = 0; q < (bias ? pseudo_layers() : pseudo + 1); q++)
            for (int i = 0; i < (bias || q < pseudo ? 2 * gates() : number); i++)
                sum += matrix(i, inputs(q / directions, first));
        return bias ? sum + ((size_t)pseudo * 2 * gates() + number) * units : sum;
    }
    size_t count(int first) const { return offset(pseudo_layers(), 0, first, true); }
    Tensor part(int number, int wide) const {  // of a matrix or a bias
        Tensor out;
        lay_out(out, type, {1, units, wide}, 0);
        return out;
    }
};

// Rows of sequences: step by step, and in a step the longest sequence first. Where the
// memory has another order, `places` and `order` say which.
struct Steps {
    std::vector<int> batch, first;  // sequences that go on, and the first row, of each step
    std::vector<int> places;  // where each row lies in memory
    std::vector<int> order;  // the sequence that comes first, second, ...
    int rows = 0, all_rows = 0;  // without and with padding
    int inputs = 0, sequences = 0;
    bool good = true;

    void add(int going_on) {
        batch.push_back(going_on);
        first.push_back(rows);
        rows += going_on;
    }
    int count() const { return batch.size(); }
    int at(int step, bool backwards) const { return backwards ? count() - 1 - step : step; }
    // Row of what a sequence had before, or -1 where it begins.
    int before(int t, int b, bool backwards) const {
        int other = backwards ? t + 1 : t - 1;
        return other >= 0 && other < count() && b < batch[other] ? first[other] + b : -1;
    }
};

// Addresses on the device; which of them a call needs, and may be null, is as in cuDNN.
struct Arrays {
    const void *x, *y, *w, *hx, *cx, *dy, *dhy, *dcy;  // that are read
    void *out, *h, *c;  // y, hy, cy; or dx, dhx, dcx; or dw
    void *workspace, *reserve;
    size_t room, reserved;  // bytes of both
    std::vector<char> fill;  // the value of padding in `out`; empty: nonsense
};

constexpr size_t INFERENCE_ROOM = 4096;  // bytes of workspace
size_t training_room(const Recurrent& r, const Steps& steps);
size_t reserve_bytes(const Recurrent& r, const Steps& steps);
int recurrent_forward(void* h, const Recurrent& r, Steps steps, Arrays at, bool training);
int recurrent_backward_data(void* h, const Recurrent& r, Steps steps, Arrays at);
int recurrent_backward_weights(void* h, const Recurrent& r, Steps steps, Arrays at);

}  // namespace emu::dnn
