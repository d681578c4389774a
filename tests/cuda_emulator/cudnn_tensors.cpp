// cuDNN: descriptors, activations, softmax, pooling.
#include "cudnn.h"

namespace emu::dnn {

static thread_local std::string refused;
int refuse(int status, const char* why) { refused = why; return status; }

void launch(void* handle, std::function<void()> run) {
    int place = here();
    Lock lock(mutex);
    counters[LAUNCH]++;
    put(((Context*)handle)->stream, idle ? nullptr : std::move(run), place);
}

void lay_out(Tensor& tensor, int type, std::vector<int> shape, int format) {
    size_t dims = shape.size();
    tensor = {type, shape, std::vector<int>(dims), format};
    if (format == 0) {
        int step = 1;
        for (size_t i = dims; i-- > 0; step *= shape[i]) tensor.strides[i] = step;
        return;
    }
    int step = shape[1];
    tensor.strides[1] = 1;
    for (size_t i = dims; i-- > 2; step *= shape[i]) tensor.strides[i] = step;
    tensor.strides[0] = step;
}

Windows::Windows(const std::vector<int>& in, const std::vector<int>& strides, const std::vector<int>& out,
                 const std::vector<int>& window, const std::vector<int>& pad, const std::vector<int>& stride,
                 const std::vector<int>& dilation) {
    size_t dims = in.size();
    for (size_t i = 0; i < dims; i++) places *= window[i], positions *= out[i];
    offsets.resize((size_t)places * positions);
    for (int place = 0; place < places; place++)
        for (int position = 0; position < positions; position++) {
            int offset = 0, p = place, q = position;
            for (size_t i = dims; i-- > 0; p /= window[i], q /= out[i]) {
                int at = q % out[i] * stride[i] - pad[i] + p % window[i] * dilation[i];
                if (at < 0 || at >= in[i]) { offset = -1; break; }
                offset += at * strides[i];
            }
            offsets[(size_t)place * positions + position] = offset;
        }
}

namespace {

struct Activation { int mode = 0; double coefficient = 0; };
struct Pooling { int mode = 0; std::vector<int> window, pad, stride; };

template <class S> S activate(int mode, S x, S limit) {
    switch (mode) {
        case 0: return S(1) / (S(1) + std::exp(-x));
        case 1: return x > 0 || x != x ? x : S(0);
        case 2: return std::tanh(x);
        case 3: return x != x ? x : std::min(std::max(x, S(0)), limit);
        default: return x > 0 ? x : limit * (std::exp(x) - S(1));
    }
}

template <class S> S slope(int mode, S x, S y, S limit) {
    switch (mode) {
        case 0: return y * (S(1) - y);
        case 1: return x > 0 ? S(1) : S(0);
        case 2: return S(1) - y * y;
        case 3: return x > 0 && x < limit ? S(1) : S(0);
        default: return x > 0 ? S(1) : y + limit;
    }
}

// Softmax over channels at each position, or over all of an image.
struct Rows {
    size_t batch, count, positions, step;
    Rows(const Tensor& t, int mode) {
        size_t all = t.count() / t.shape[0];
        batch = t.shape[0], count = mode ? t.shape[1] : all, positions = all / count, step = positions;
    }
    template <class F> void each(F use) const {
        for (size_t n = 0; n < batch; n++)
            for (size_t p = 0; p < positions; p++) use(n * count * positions + p);
    }
};

int check_windows(const Pooling& pool, const Tensor& x, const Tensor& y) {
    size_t dims = pool.window.size();
    REFUSE_IF(x.type != y.type || x.shape.size() != dims + 2 || y.shape.size() != dims + 2, BAD_PARAM);
    REFUSE_IF(x.shape[0] != y.shape[0] || x.shape[1] != y.shape[1], BAD_PARAM);
    REFUSE_IF(!x.dense() || !y.dense() || dims < 2, NOT_SUPPORTED);
    return SUCCESS;
}

Windows windows_of(const Pooling& pool, const Tensor& x, const Tensor& y) {
    return {tail(x.shape), tail(x.strides), tail(y.shape), pool.window, pool.pad, pool.stride,
            std::vector<int>(pool.window.size(), 1)};
}

}  // namespace
}  // namespace emu::dnn

using namespace emu;
using namespace emu::dnn;

extern "C" {
size_t cudnnGetVersion() { return IS_9 ? 92800 : 8907; }
size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
int cudnnGetProperty(int which, int* out) {
    REFUSE_IF(which < 0 || which > 2, BAD_PARAM);
    int const parts[] = {CUDNN_MAJOR, IS_9 ? 28 : 9, IS_9 ? 0 : 7};
    *out = parts[which];
    return SUCCESS;
}
const char* cudnnGetErrorString(int status) {
    switch (status) {
        case SUCCESS: return "CUDNN_STATUS_SUCCESS";
        case BAD_PARAM: return "CUDNN_STATUS_BAD_PARAM";
        case NOT_SUPPORTED: return "CUDNN_STATUS_NOT_SUPPORTED";
        case NOT_INITIALIZED: return "CUDNN_STATUS_NOT_INITIALIZED";
        case IS_9 ? 4000 : 4: return "CUDNN_STATUS_INTERNAL_ERROR";
        case ALLOC_FAILED: return IS_9 ? "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED" : "CUDNN_STATUS_ALLOC_FAILED";
        case IS_9 ? 5000 : 8: return "CUDNN_STATUS_EXECUTION_FAILED";
        default: return "CUDNN_UNKNOWN_STATUS";
    }
}
#if CUDNN_MAJOR >= 9
void cudnnGetLastErrorString(char* out, size_t bytes) {
    if (bytes) snprintf(out, bytes, "%s", refused.c_str());
    refused.clear();
}
#endif
int cudnnCreate(void** out) {
    REFUSE_IF(!device_count(), NOT_INITIALIZED);
    Lock lock(mutex);
    *out = new Context{stream_of(nullptr)};
    return SUCCESS;
}
int cudnnDestroy(void* handle) { delete (Context*)handle; return SUCCESS; }
int cudnnSetStream(void* handle, void* stream) {
    REFUSE_IF(!handle, BAD_PARAM);
    Lock lock(mutex);
    ((Context*)handle)->stream = stream_of(stream);
    return SUCCESS;
}
int cudnnGetStream(void* handle, void** out) {
    Lock lock(mutex);
    Stream* stream = ((Context*)handle)->stream;
    *out = stream == stream_of(nullptr) ? nullptr : stream;
    return SUCCESS;
}
int cudnnQueryRuntimeError(void*, int* out, int, void*) { *out = SUCCESS; return SUCCESS; }

// ---- descriptors -----------------------------------------------------------------------
DESCRIPTOR(TensorDescriptor, Tensor)
DESCRIPTOR(FilterDescriptor, Tensor)
DESCRIPTOR(ConvolutionDescriptor, Convolution)
DESCRIPTOR(ActivationDescriptor, Activation)
DESCRIPTOR(PoolingDescriptor, Pooling)

int cudnnSetTensor4dDescriptor(Tensor* t, int format, int type, int n, int c, int h, int w) {
    REFUSE_IF(type > HALF || format > 1, NOT_SUPPORTED);
    REFUSE_IF(n < 1 || c < 1 || h < 1 || w < 1, BAD_PARAM);
    lay_out(*t, type, {n, c, h, w}, format);
    return SUCCESS;
}
int cudnnSetTensor4dDescriptorEx(Tensor* t, int type, int n, int c, int h, int w, int sn, int sc, int sh, int sw) {
    REFUSE_IF(type < 0, BAD_PARAM);
    REFUSE_IF(type > HALF, NOT_SUPPORTED);
    REFUSE_IF(n < 1 || c < 1 || h < 1 || w < 1 || !sn || !sc || !sh || !sw, BAD_PARAM);
    *t = {type, {n, c, h, w}, {sn, sc, sh, sw}};
    return SUCCESS;
}
int cudnnSetTensorNdDescriptor(Tensor* t, int type, int dims, const int* shape, const int* strides) {
    REFUSE_IF(type < 0 || dims < 3, BAD_PARAM);
    REFUSE_IF(type > HALF || dims > 8, NOT_SUPPORTED);
    for (int i = 0; i < dims; i++) REFUSE_IF(shape[i] < 1 || !strides[i], BAD_PARAM);
    *t = {type, {shape, shape + dims}, {strides, strides + dims}};
    return SUCCESS;
}
int cudnnGetTensor4dDescriptor(const Tensor* t, int* type, int* n, int* c, int* h, int* w, int* sn, int* sc, int* sh, int* sw) {
    REFUSE_IF(t->shape.size() != 4 && t->shape.size() != 5, BAD_PARAM);
    *type = t->type;
    *n = t->shape[0], *c = t->shape[1], *h = t->shape[2], *w = t->shape[3];
    *sn = t->strides[0], *sc = t->strides[1], *sh = t->strides[2], *sw = t->strides[3];
    return SUCCESS;
}
int cudnnGetTensorNdDescriptor(const Tensor* t, int wanted, int* type, int* dims, int* shape, int* strides) {
    *type = t->type, *dims = t->shape.size();
    std::copy_n(t->shape.begin(), std::min(wanted, *dims), shape);
    std::copy_n(t->strides.begin(), std::min(wanted, *dims), strides);
    return SUCCESS;
}
int cudnnGetTensorSizeInBytes(const Tensor* t, size_t* out) { *out = t->bytes(); return SUCCESS; }
int cudnnSetFilter4dDescriptor(Tensor* t, int type, int format, int k, int c, int h, int w) {
    return cudnnSetTensor4dDescriptor(t, format, type, k, c, h, w);
}
int cudnnSetFilterNdDescriptor(Tensor* t, int type, int format, int dims, const int* shape) {
    REFUSE_IF(type < 0 || dims < 3 || format < 0, BAD_PARAM);
    REFUSE_IF(type > HALF || dims > 8 || format > 1, NOT_SUPPORTED);
    for (int i = 0; i < dims; i++) REFUSE_IF(shape[i] < 1, BAD_PARAM);
    lay_out(*t, type, {shape, shape + dims}, format);
    return SUCCESS;
}
int cudnnGetFilterNdDescriptor(const Tensor* t, int wanted, int* type, int* format, int* dims, int* shape) {
    *type = t->type, *format = t->format, *dims = t->shape.size();
    std::copy_n(t->shape.begin(), std::min(wanted, *dims), shape);
    return SUCCESS;
}
int cudnnGetFilter4dDescriptor(const Tensor* t, int* type, int* format, int* k, int* c, int* h, int* w) {
    REFUSE_IF(t->shape.size() != 4, BAD_PARAM);
    *type = t->type, *format = t->format;
    *k = t->shape[0], *c = t->shape[1], *h = t->shape[2], *w = t->shape[3];
    return SUCCESS;
}
int cudnnSetConvolutionNdDescriptor(Convolution* c, int dims, const int* pad, const int* stride, const int* dilation, int mode, int computes) {
    REFUSE_IF(mode < 0 || mode > 1 || computes < 0, BAD_PARAM);
    REFUSE_IF(dims < 1 || dims > 3 || computes > HALF, NOT_SUPPORTED);
    for (int i = 0; i < dims; i++) REFUSE_IF(pad[i] < 0 || stride[i] < 1 || dilation[i] < 1, BAD_PARAM);
    c->pad = {pad, pad + dims}, c->stride = {stride, stride + dims}, c->dilation = {dilation, dilation + dims};
    c->mode = mode, c->computes = computes;
    return SUCCESS;
}
int cudnnSetConvolution2dDescriptor(Convolution* c, int ph, int pw, int sh, int sw, int dh, int dw, int mode, int computes) {
    int const pad[] = {ph, pw}, stride[] = {sh, sw}, dilation[] = {dh, dw};
    return cudnnSetConvolutionNdDescriptor(c, 2, pad, stride, dilation, mode, computes);
}
int cudnnGetConvolutionNdForwardOutputDim(const Convolution* c, const Tensor* x, const Tensor* w, int wanted, int* out) {
    size_t dims = c->pad.size();
    REFUSE_IF(x->shape.size() != dims + 2 || w->shape.size() != dims + 2 || wanted > dims + 2, BAD_PARAM);
    REFUSE_IF(w->shape[1] * c->groups != x->shape[1], BAD_PARAM);
    std::vector<int> shape{x->shape[0], w->shape[0]};
    for (size_t i = 0; i < dims; i++) {
        int size = x->shape[i + 2] + 2 * c->pad[i] - ((w->shape[i + 2] - 1) * c->dilation[i] + 1);
        REFUSE_IF(size < 0, BAD_PARAM);
        shape.push_back(size / c->stride[i] + 1);
    }
    std::copy_n(shape.begin(), wanted, out);
    return SUCCESS;
}
int cudnnGetConvolution2dForwardOutputDim(const Convolution* c, const Tensor* x, const Tensor* w, int* n, int* k, int* height, int* width) {
    REFUSE_IF(c->pad.size() != 2, BAD_PARAM);
    int shape[4];
    if (int status = cudnnGetConvolutionNdForwardOutputDim(c, x, w, 4, shape)) return status;
    *n = shape[0], *k = shape[1], *height = shape[2], *width = shape[3];
    return SUCCESS;
}
int cudnnSetConvolutionMathType(Convolution* c, int math) {
    REFUSE_IF(math < DEFAULT || math > FMA, BAD_PARAM);
    c->math = math;
    return SUCCESS;
}
int cudnnGetConvolutionMathType(Convolution* c, int* out) { *out = c->math; return SUCCESS; }
int cudnnSetConvolutionGroupCount(Convolution* c, int groups) {
    REFUSE_IF(groups < 1, BAD_PARAM);
    c->groups = groups;
    return SUCCESS;
}
int cudnnGetConvolutionGroupCount(Convolution* c, int* out) { *out = c->groups; return SUCCESS; }
int cudnnSetActivationDescriptor(Activation* a, int mode, int nan, double coefficient) {
    REFUSE_IF(mode < 0 || nan < 0 || nan > 1, BAD_PARAM);
    REFUSE_IF(mode > 4, NOT_SUPPORTED);
    *a = {mode, coefficient};
    return SUCCESS;
}
int cudnnSetPoolingNdDescriptor(Pooling* p, int mode, int nan, int dims, const int* window, const int* pad, const int* stride) {
    REFUSE_IF(mode < 0 || mode > 3 || nan < 0 || nan > 1, BAD_PARAM);
    REFUSE_IF(dims < 1 || dims > 3, NOT_SUPPORTED);
    for (int i = 0; i < dims; i++) REFUSE_IF(window[i] < 1 || pad[i] < 0 || stride[i] < 1, BAD_PARAM);
    *p = {mode, {window, window + dims}, {pad, pad + dims}, {stride, stride + dims}};
    return SUCCESS;
}
int cudnnSetPooling2dDescriptor(Pooling* p, int mode, int nan, int h, int w, int ph, int pw, int sh, int sw) {
    int const window[] = {h, w}, pad[] = {ph, pw}, stride[] = {sh, sw};
    return cudnnSetPoolingNdDescriptor(p, mode, nan, 2, window, pad, stride);
}
int cudnnGetPoolingNdForwardOutputDim(const Pooling* p, const Tensor* x, int wanted, int* out) {
    size_t dims = p->window.size();
    REFUSE_IF(x->shape.size() != dims + 2 || wanted != dims + 2, BAD_PARAM);
    std::copy_n(x->shape.begin(), 2, out);
    for (size_t i = 0; i < dims; i++) {
        int size = x->shape[i + 2] + 2 * p->pad[i] - p->window[i];
        REFUSE_IF(size < 0, BAD_PARAM);
        out[i + 2] = size / p->stride[i] + 1;
    }
    return SUCCESS;
}
int cudnnGetPooling2dForwardOutputDim(const Pooling* p, const Tensor* x, int* n, int* c, int* height, int* width) {
    int shape[4];
    REFUSE_IF(p->window.size() != 2, BAD_PARAM);
    if (int status = cudnnGetPoolingNdForwardOutputDim(p, x, 4, shape)) return status;
    *n = shape[0], *c = shape[1], *height = shape[2], *width = shape[3];
    return SUCCESS;
}
int cudnnDeriveBNTensorDescriptor(Tensor* out, const Tensor* x, int mode) {
    REFUSE_IF(mode < 0 || mode > 2, BAD_PARAM);
    std::vector<int> shape = x->shape;
    shape[0] = 1;
    if (mode) std::fill(shape.begin() + 2, shape.end(), 1);
    lay_out(*out, x->type == HALF ? FLOAT : x->type, shape, 0);
    return SUCCESS;
}

// ---- elements --------------------------------------------------------------------------
int cudnnActivationForward(void* h, Activation* a, const void* al, Tensor* xt, const void* x, const void* be, Tensor* yt, void* y) {
    REFUSE_IF(!good(*xt, *yt), BAD_PARAM);
    return with_type(xt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, scale = Scale(al, be, xt->type), n = xt->count(), a = *a] {
            map_elements(n, (T*)y, {x}, [=](size_t i) {
                scale.put(((T*)y)[i], activate<Sum<T>>(a.mode, ((const T*)x)[i], a.coefficient));
            });
        });
    });
}
int cudnnActivationBackward(void* h, Activation* a, const void* al, Tensor* yt, const void* y, Tensor* gyt, const void* gy,
                            Tensor* xt, const void* x, const void* be, Tensor* gxt, void* gx) {
    REFUSE_IF(!good(*yt, *gyt) || !good(*xt, *gxt) || !(*xt == *yt), BAD_PARAM);
    return with_type(xt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, scale = Scale(al, be, xt->type), n = xt->count(), a = *a] {
            map_elements(n, (T*)gx, {x, y, gy}, [=](size_t i) {
                Sum<T> s = slope<Sum<T>>(a.mode, ((const T*)x)[i], ((const T*)y)[i], a.coefficient);
                scale.put(((T*)gx)[i], Sum<T>(((const T*)gy)[i]) * s);
            });
        });
    });
}
int cudnnAddTensor(void* h, const void* al, Tensor* at, const void* a, const void* be, Tensor* ct, void* c) {
    size_t dims = ct->shape.size();
    REFUSE_IF(at->type != ct->type || at->shape.size() != dims || dims > 5, BAD_PARAM);
    for (size_t i = 0; i < dims; i++) REFUSE_IF(at->shape[i] != 1 && at->shape[i] != ct->shape[i], BAD_PARAM);
    return with_type(ct->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, scale = Scale(al, be, ct->type), from = *at, to = *ct] {
            read(a, from.bytes());
            write(c, to.bytes());
            std::vector<int> index(dims);
            for (size_t n = to.count(); n--;) {
                size_t i = 0, j = 0;
                for (size_t d = 0; d < dims; d++) {
                    i += from.shape[d] == 1 ? 0 : (size_t)index[d] * from.strides[d];
                    j += (size_t)index[d] * to.strides[d];
                }
                scale.put(((T*)c)[j], ((const T*)a)[i]);
                for (size_t d = dims; d-- > 0 && ++index[d] == to.shape[d];) index[d] = 0;
            }
        });
    });
}
int cudnnSoftmaxForward(void* h, int algorithm, int mode, const void* al, Tensor* xt, const void* x, const void* be, Tensor* yt, void* y) {
    REFUSE_IF(!good(*xt, *yt), BAD_PARAM);
    return with_type(xt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, scale = Scale(al, be, xt->type), rows = Rows(*xt, mode), bytes = xt->bytes()] {
            read(x, bytes);
            write(y, bytes);
            rows.each([&](size_t first) {
                using S = Sum<T>;
                auto in = [&](size_t i) { return S(((const T*)x)[first + i * rows.step]); };
                S top = in(0), sum = 0;
                for (size_t i = 1; i < rows.count; i++) top = std::max(top, in(i));
                if (!algorithm) top = 0;
                for (size_t i = 0; i < rows.count; i++) sum += std::exp(in(i) - top);
                for (size_t i = 0; i < rows.count; i++)
                    scale.put(((T*)y)[first + i * rows.step],
                              algorithm == 2 ? in(i) - top - std::log(sum) : std::exp(in(i) - top) / sum);
            });
        });
    });
}
int cudnnSoftmaxBackward(void* h, int algorithm, int mode, const void* al, Tensor* yt, const void* y, Tensor* gyt,
                         const void* gy, const void* be, Tensor* gxt, void* gx) {
    REFUSE_IF(!good(*yt, *gyt) || !good(*yt, *gxt), BAD_PARAM);
    return with_type(yt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, scale = Scale(al, be, yt->type), rows = Rows(*yt, mode), bytes = yt->bytes()] {
            read(y, bytes), read(gy, bytes);
            write(gx, bytes);
            rows.each([&](size_t first) {
                using S = Sum<T>;
                auto out = [&](size_t i) { return S(((const T*)y)[first + i * rows.step]); };
                auto gradient = [&](size_t i) { return S(((const T*)gy)[first + i * rows.step]); };
                S sum = 0;
                for (size_t i = 0; i < rows.count; i++) sum += algorithm == 2 ? gradient(i) : gradient(i) * out(i);
                for (size_t i = 0; i < rows.count; i++)
                    scale.put(((T*)gx)[first + i * rows.step],
                              algorithm == 2 ? gradient(i) - std::exp(out(i)) * sum : out(i) * (gradient(i) - sum));
            });
        });
    });
}

// ---- pooling: the largest (modes 0 and 3), the mean with and without what lies outside ---
int cudnnPoolingForward(void* h, Pooling* pool, const void* al, Tensor* xt, const void* x, const void* be, Tensor* yt, void* y) {
    if (int status = check_windows(*pool, *xt, *yt)) return status;
    return with_type(xt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, scale = Scale(al, be, xt->type), pool = *pool, xt = *xt, yt = *yt] {
            using S = Sum<T>;
            Windows windows = windows_of(pool, xt, yt);
            Planes in(xt), out(yt);
            read(x, xt.bytes());
            write(y, yt.bytes());
            for (int n = 0; n < in.batch; n++) for (int c = 0; c < in.channels; c++) {
                const T* from = (const T*)x + in.at(n, c, 0);
                for (int q = 0; q < windows.positions; q++) {
                    S sum = 0, top = -INFINITY;
                    int inside = 0;
                    for (int p = 0; p < windows.places; p++) {
                        int at = windows.at(p, q);
                        if (at < 0) continue;
                        S value = from[at];
                        inside++, sum += value;
                        if (value > top || value != value) top = value;
                    }
                    int share = pool.mode == 1 ? windows.places : inside;
                    scale.put(((T*)y)[out.at(n, c, q)], pool.mode % 3 ? sum / S(share) : top);
                }
            }
        });
    });
}
int cudnnPoolingBackward(void* h, Pooling* pool, const void* al, Tensor* yt, const void* y, Tensor* gyt, const void* gy,
                         Tensor* xt, const void* x, const void* be, Tensor* gxt, void* gx) {
    if (int status = check_windows(*pool, *xt, *yt)) return status;
    REFUSE_IF(!(*yt == *gyt) || !(*xt == *gxt), BAD_PARAM);
    return with_type(xt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, scale = Scale(al, be, xt->type), pool = *pool, xt = *xt, yt = *yt] {
            using S = Sum<T>;
            Windows windows = windows_of(pool, xt, yt);
            Planes in(xt), out(yt);
            read(x, xt.bytes()), read(y, yt.bytes()), read(gy, yt.bytes());
            write(gx, xt.bytes());
            std::vector<S> sums(xt.count());
            for (int n = 0; n < in.batch; n++) for (int c = 0; c < in.channels; c++) {
                const T* from = (const T*)x + in.at(n, c, 0);
                S* to = &sums[in.at(n, c, 0)];
                for (int q = 0; q < windows.positions; q++) {
                    size_t o = out.at(n, c, q);
                    S gradient = ((const T*)gy)[o], top = ((const T*)y)[o];
                    int inside = 0;
                    for (int p = 0; p < windows.places; p++) inside += windows.at(p, q) >= 0;
                    S share = gradient / S(pool.mode == 1 ? windows.places : inside);
                    for (int p = 0; p < windows.places; p++) {
                        int at = windows.at(p, q);
                        if (at < 0) continue;
                        if (pool.mode % 3) { to[at] += share; continue; }
                        if (S(from[at]) == top || top != top) { to[at] += gradient; break; }
                    }
                }
            }
            for (size_t i = 0; i < sums.size(); i++) scale.put(((T*)gx)[i], sums[i]);
        });
    });
}
}
