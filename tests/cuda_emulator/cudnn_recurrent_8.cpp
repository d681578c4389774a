// Recurrent layers as cuDNN 8 has them: sequences lie packed, the longest first, and each
// step has a descriptor of its own.
#include "cudnn_recurrent.h"

namespace emu::dnn {
namespace {

Steps steps_of(int count, Tensor* const* xs) {
    Steps steps;
    steps.inputs = xs[0]->shape[1], steps.sequences = xs[0]->shape[0];
    for (int t = 0; t < count; t++) {
        steps.good = steps.good && xs[t]->shape[1] == steps.inputs && (!t || xs[t]->shape[0] <= xs[t - 1]->shape[0]);
        steps.add(xs[t]->shape[0]);
    }
    steps.all_rows = steps.rows;
    for (int i = 0; i < steps.rows; i++) steps.places.push_back(i);
    for (int b = 0; b < steps.sequences; b++) steps.order.push_back(b);
    return steps;
}

int part(Recurrent* r, int pseudo, Tensor* x, void* w, int number, Tensor* out, void** at, bool bias) {
    REFUSE_IF(pseudo >= r->pseudo_layers() || number >= 2 * r->gates(), BAD_PARAM);
    int inputs = x->shape[1], wide = number < r->gates() ? r->inputs(pseudo / r->directions, inputs) : r->units;
    *out = r->part(number, bias ? 1 : wide);
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
    REFUSE_IF(input || mode > GRU, NOT_SUPPORTED);
    *r = {units, layers, directions + 1, mode, type, dropout};
    return SUCCESS;
}
int cudnnGetRNNWorkspaceSize(void*, Recurrent* r, int count, Tensor** xs, size_t* out) {
    *out = training_room(*r, steps_of(count, xs));
    return SUCCESS;
}
int cudnnGetRNNTrainingReserveSize(void*, Recurrent* r, int count, Tensor** xs, size_t* out) {
    *out = reserve_bytes(*r, steps_of(count, xs));
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
int cudnnRNNForwardTraining(void* h, Recurrent* r, int count, Tensor** xs, const void* x, Tensor*, const void* hx, Tensor*, const void* cx,
                            Tensor* wt, const void* w, Tensor**, void* y, Tensor*, void* hy, Tensor*, void* cy, void* workspace, size_t room,
                            void* reserve, size_t bytes) {
    Steps steps = steps_of(count, xs);
    REFUSE_IF(wt->count() < r->count(steps.inputs), BAD_PARAM);
    Arrays at{x, nullptr, w, hx, cx, nullptr, nullptr, nullptr, y, hy, cy, workspace, reserve, room, bytes};
    return recurrent_forward(h, *r, steps, at, true);
}
int cudnnRNNForwardInference(void* h, Recurrent* r, int count, Tensor** xs, const void* x, Tensor*, const void* hx, Tensor*, const void* cx,
                             Tensor* wt, const void* w, Tensor**, void* y, Tensor*, void* hy, Tensor*, void* cy, void* workspace, size_t room) {
    Steps steps = steps_of(count, xs);
    REFUSE_IF(wt->count() < r->count(steps.inputs), BAD_PARAM);
    Arrays at{x, nullptr, w, hx, cx, nullptr, nullptr, nullptr, y, hy, cy, workspace, nullptr, room, 0};
    return recurrent_forward(h, *r, steps, at, false);
}
int cudnnRNNBackwardData(void* h, Recurrent* r, int count, Tensor** ys, const void* y, Tensor**, const void* dy, Tensor*, const void* dhy,
                         Tensor*, const void* dcy, Tensor*, const void* w, Tensor*, const void* hx, Tensor*, const void* cx, Tensor** dxs,
                         void* dx, Tensor*, void* dhx, Tensor*, void* dcx, void* workspace, size_t room, void* reserve, size_t bytes) {
    Arrays at{nullptr, y, w, hx, cx, dy, dhy, dcy, dx, dhx, dcx, workspace, reserve, room, bytes};
    return recurrent_backward_data(h, *r, steps_of(count, dxs), at);
}
int cudnnRNNBackwardWeights(void* h, Recurrent* r, int count, Tensor** xs, const void* x, Tensor*, const void* hx, Tensor**, const void* y,
                            void* workspace, size_t room, Tensor*, void* dw, void* reserve, size_t bytes) {
    Arrays at{x, y, nullptr, hx, nullptr, nullptr, nullptr, nullptr, dw, nullptr, nullptr, workspace, reserve, room, bytes};
    return recurrent_backward_weights(h, *r, steps_of(count, xs), at);
}
}
