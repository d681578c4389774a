// Recurrent layers as cuDNN 9 has them (version 8 of that interface). Stricter than the
// library: without projections, with two biases, without skipped inputs, by the standard
// and the persistent algorithm.
#include "cudnn_recurrent.h"
#include <numeric>

namespace emu::dnn {
namespace {

struct Network : Recurrent {
    int inputs_of_first = 0;
    bool padded = false;
    size_t bytes() const { return count(inputs_of_first) * part(0, 1).item(); }
};

enum Layout { STEPS_PADDED, STEPS_PACKED, SEQUENCES_PADDED };

struct Sequences {
    int type = -1, layout = 0, longest = 0, wide = 0;
    std::vector<int> lengths;
    std::vector<char> fill;

    int count() const { return lengths.size(); }
    bool alike(const Sequences& o) const {
        return type == o.type && layout == o.layout && longest == o.longest && lengths == o.lengths;
    }
    Steps steps() const {
        Steps steps;
        steps.inputs = wide, steps.sequences = count();
        steps.order.resize(count());
        std::iota(steps.order.begin(), steps.order.end(), 0);
        std::stable_sort(steps.order.begin(), steps.order.end(), [&](int a, int b) { return lengths[a] > lengths[b]; });
        for (int t = 0; t < longest; t++) {
            int going_on = std::count_if(lengths.begin(), lengths.end(), [=](int length) { return length > t; });
            if (!going_on) break;
            for (int b = 0; b < going_on; b++) {
                int sequence = steps.order[b];
                steps.places.push_back(layout == STEPS_PACKED ? steps.rows + b
                                       : layout == STEPS_PADDED ? t * count() + sequence : sequence * longest + t);
            }
            steps.add(going_on);
        }
        steps.all_rows = layout == STEPS_PACKED ? steps.rows : longest * count();
        return steps;
    }
};

int check(const void* h, const Network* r, const Sequences* x) {
    REFUSE_IF(!h || !r || !x, BAD_PARAM);
    REFUSE_IF(r->units < 1 || x->type < 0, BAD_PARAM);
    REFUSE_IF(x->type != r->type || x->wide != r->inputs_of_first, BAD_PARAM);
    REFUSE_IF(x->layout != STEPS_PACKED && !r->padded, BAD_PARAM);
    return SUCCESS;
}

int check_states(const Network& r, const Sequences& x, const Tensor* t) {
    REFUSE_IF(!t, BAD_PARAM);
    std::vector<int> const wanted{r.pseudo_layers(), x.count(), r.units};
    REFUSE_IF(t->type != r.type || t->shape != wanted || !t->dense(), BAD_PARAM);
    return SUCCESS;
}

int check_all(const void* h, const Network* r, const void* lengths, const Sequences* x, const Sequences* y, const Tensor* hidden) {
    if (int status = check(h, r, x)) return status;
    REFUSE_IF(!y || !x->alike(*y) || y->wide != r->units * r->directions, BAD_PARAM);
    REFUSE_IF(lengths && !on_device(lengths), BAD_PARAM);
    return check_states(*r, *x, hidden);
}

bool all_on_device(std::initializer_list<const void*> pointers) {
    Lock lock(mutex);
    return std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) { return on_device(pointer); });
}
bool none_on_host(std::initializer_list<const void*> pointers) {
    Lock lock(mutex);
    return std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) { return !pointer || on_device(pointer); });
}

}  // namespace
}  // namespace emu::dnn

using namespace emu;
using namespace emu::dnn;

extern "C" {
DESCRIPTOR(RNNDescriptor, Network)
DESCRIPTOR(RNNDataDescriptor, Sequences)
int cudnnSetRNNDescriptor_v8(Network* r, int algorithm, int cell, int bias, int direction, int input, int type, int precision, int math,
                             int32_t inputs, int32_t units, int32_t projection, int32_t layers, Dropout* dropout, uint32_t flags) {
    REFUSE_IF(!r, BAD_PARAM);
    REFUSE_IF(algorithm < 0 || algorithm > 3 || cell < 0 || cell > GRU || bias < 0 || bias > 3, BAD_PARAM);
    REFUSE_IF(direction < 0 || direction > 1 || input < 0 || input > 1 || math < DEFAULT || math > FMA || flags > 1, BAD_PARAM);
    REFUSE_IF(inputs < 1 || units < 1 || projection < 1 || layers < 1, BAD_PARAM);
    REFUSE_IF(type < 0 || type > HALF || !(precision == type || (type == HALF && precision == FLOAT)), NOT_SUPPORTED);
    REFUSE_IF(projection != units, NOT_SUPPORTED);
    REFUSE_IF(algorithm > 1 || bias != 2 || input, NOT_SUPPORTED);
    static_cast<Recurrent&>(*r) = {units, layers, direction + 1, cell, type, dropout, math, algorithm};
    r->inputs_of_first = inputs, r->padded = flags;
    return SUCCESS;
}
int cudnnGetRNNWeightSpaceSize(void* h, Network* r, size_t* out) {
    REFUSE_IF(!h || !r || !out || r->units < 1, BAD_PARAM);
    *out = r->bytes();
    return SUCCESS;
}
int cudnnGetRNNWeightParams(void* h, Network* r, int32_t pseudo, size_t bytes, const void* w, int32_t number, Tensor* matrix, void** matrix_at,
                            Tensor* bias, void** bias_at) {
    REFUSE_IF(!h || !r || !w || !matrix || !matrix_at || !bias || !bias_at, BAD_PARAM);
    REFUSE_IF(r->units < 1 || bytes < r->bytes(), BAD_PARAM);
    bool projection = r->mode == LSTM && number == 2 * r->gates();
    REFUSE_IF(pseudo < 0 || pseudo >= r->pseudo_layers() || number < 0 || (number >= 2 * r->gates() && !projection), BAD_PARAM);
    *matrix = *bias = Tensor{r->type};
    *matrix_at = *bias_at = nullptr;
    if (projection) return SUCCESS;
    int first = r->inputs_of_first, wide = number < r->gates() ? r->inputs(pseudo / r->directions, first) : r->units;
    *matrix = r->part(number, wide), *bias = r->part(number, 1);
    *matrix_at = (char*)w + r->offset(pseudo, number, first, false) * matrix->item();
    *bias_at = (char*)w + r->offset(pseudo, number, first, true) * bias->item();
    return SUCCESS;
}
int cudnnSetRNNDataDescriptor(Sequences* x, int type, int layout, int longest, int count, int wide, const int* lengths, void* fill) {
    REFUSE_IF(!x || !lengths || longest < 1 || count < 1 || wide < 1, BAD_PARAM);
    REFUSE_IF(layout < STEPS_PADDED || layout > SEQUENCES_PADDED, BAD_PARAM);
    REFUSE_IF(type < 0 || type > HALF, NOT_SUPPORTED);
    std::vector<int> all(lengths, lengths + count);
    for (int length : all) REFUSE_IF(length < 0 || length > longest, BAD_PARAM);
    bool packed = layout == STEPS_PACKED;
    REFUSE_IF(packed && (all.front() != longest || all.back() < 1), BAD_PARAM);
    REFUSE_IF(packed && !std::is_sorted(all.rbegin(), all.rend()), BAD_PARAM);
    *x = {type, layout, longest, wide, all, {}};
    if (fill) x->fill.assign((char*)fill, (char*)fill + Tensor{type}.item());
    return SUCCESS;
}
int cudnnGetRNNDataDescriptor(Sequences* x, int* type, int* layout, int* longest, int* count, int* wide, int wanted, int* lengths, void* fill) {
    REFUSE_IF(!x || wanted < 0, BAD_PARAM);
    *type = x->type, *layout = x->layout, *longest = x->longest, *count = x->count(), *wide = x->wide;
    std::copy_n(x->lengths.begin(), std::min(wanted, x->count()), lengths);
    memcpy(fill, x->fill.data(), x->fill.size());
    return SUCCESS;
}
int cudnnGetRNNTempSpaceSizes(void* h, Network* r, int training, Sequences* x, size_t* room, size_t* reserve) {
    if (int status = check(h, r, x)) return status;
    REFUSE_IF(training < 0 || training > 1 || (training && !reserve), BAD_PARAM);
    if (room) *room = training ? training_room(*r, x->steps()) : INFERENCE_ROOM;
    if (reserve) *reserve = training ? reserve_bytes(*r, x->steps()) : 0;
    return SUCCESS;
}
int cudnnRNNForward(void* h, Network* r, int training, const int32_t* lengths, Sequences* xd, const void* x, Sequences* yd, void* y,
                    Tensor* hd, const void* hx, void* hy, Tensor* cd, const void* cx, void* cy, size_t bytes, const void* w, size_t room,
                    void* workspace, size_t reserved, void* reserve) {
    REFUSE_IF(training < 0 || training > 1, BAD_PARAM);
    if (int status = check_all(h, r, lengths, xd, yd, hd)) return status;
    if (r->mode == LSTM) if (int status = check_states(*r, *xd, cd)) return status;
    REFUSE_IF(bytes < r->bytes() || !all_on_device({x, y, w, workspace}) || !none_on_host({hx, hy, cx, cy}), BAD_PARAM);
    REFUSE_IF(training && !on_device(reserve), BAD_PARAM);
    Arrays at{x, nullptr, w, hx, cx, nullptr, nullptr, nullptr, y, hy, cy, workspace, reserve, room, reserved, yd->fill};
    return recurrent_forward(h, *r, xd->steps(), at, training);
}
int cudnnRNNBackwardData_v8(void* h, Network* r, const int32_t* lengths, Sequences* yd, const void* y, const void* dy, Sequences* xd, void* dx,
                            Tensor* hd, const void* hx, const void* dhy, void* dhx, Tensor* cd, const void* cx, const void* dcy, void* dcx,
                            size_t bytes, const void* w, size_t room, void* workspace, size_t reserved, void* reserve) {
    if (int status = check_all(h, r, lengths, xd, yd, hd)) return status;
    if (r->mode == LSTM) if (int status = check_states(*r, *xd, cd)) return status;
    REFUSE_IF(bytes < r->bytes() || !all_on_device({y, dy, dx, w, workspace, reserve}), BAD_PARAM);
    REFUSE_IF(!none_on_host({hx, dhy, dhx, cx, dcy, dcx}), BAD_PARAM);
    Arrays at{nullptr, y, w, hx, cx, dy, dhy, dcy, dx, dhx, dcx, workspace, reserve, room, reserved, xd->fill};
    return recurrent_backward_data(h, *r, xd->steps(), at);
}
int cudnnRNNBackwardWeights_v8(void* h, Network* r, int sets, const int32_t* lengths, Sequences* xd, const void* x, Tensor* hd, const void* hx,
                               Sequences* yd, const void* y, size_t bytes, void* dw, size_t room, void* workspace, size_t reserved,
                               void* reserve) {
    if (int status = check_all(h, r, lengths, xd, yd, hd)) return status;
    REFUSE_IF(sets, NOT_SUPPORTED);  // as the library, which only adds
    REFUSE_IF(bytes < r->bytes() || !all_on_device({x, y, dw, workspace, reserve}) || !none_on_host({hx}), BAD_PARAM);
    Arrays at{x, y, nullptr, hx, nullptr, nullptr, nullptr, nullptr, dw, nullptr, nullptr, workspace, reserve, room, reserved};
    return recurrent_backward_weights(h, *r, xd->steps(), at);
}
}
