// cuDNN: batch normalisation, dropout, spatial transformers.
#include "cudnn.h"

namespace emu::dnn {

void draw(const Dropout& dropout, size_t count, unsigned char* mask) {
    auto* states = (States*)dropout.states;
    write(states, STATES_BYTES);
    memset(mask, 0, (count + 7) / 8);
    for (size_t i = 0; i < count; i++)
        if ((mixed(states->seed, states->position + i) >> 40) * (1.f / (1 << 24)) >= dropout.ratio) mask[i / 8] |= 1 << i % 8;
    states->position += count;
}

namespace {

struct Sampler { int type = 0; std::vector<int> shape; };

// Per channel, or per element of an image.
struct Groups {
    Planes planes;
    bool spatial;
    Groups(const Tensor& t, int mode) : planes(t), spatial(mode != 0) {}
    int count() const { return spatial ? planes.channels : planes.channels * planes.positions; }
    int members() const { return spatial ? planes.batch * planes.positions : planes.batch; }
    template <class F> void each(int group, F use) const {
        if (!spatial) {
            for (int n = 0; n < planes.batch; n++) use(planes.at(n, group / planes.positions, group % planes.positions));
            return;
        }
        for (int n = 0; n < planes.batch; n++)
            for (int p = 0; p < planes.positions; p++) use(planes.at(n, group, p));
    }
};

// What batch normalisation lays aside beside what it saves. Only the fast way through
// float16 in NHWC needs it, on a GPU too.
size_t const ROOM = 512;
uint64_t const LAID_ASIDE = 0x6C61696461736964;
bool needs_room(const Tensor& x, int mode) { return mode == 2 && x.type == HALF && x.strides[1] == 1 && x.shape[1] % 4 == 0; }

int check_normalization(int mode, const Tensor& x, const Tensor& parameters, double epsilon) {
    REFUSE_IF(mode < 0 || mode > 2 || epsilon < 0 || x.shape.size() < 4 || x.shape.size() > 5, BAD_PARAM);
    REFUSE_IF(parameters.type != (x.type == HALF ? FLOAT : x.type) || parameters.count() != Groups(x, mode).count(), BAD_PARAM);
    return SUCCESS;
}

float place(int i, int count) { return count > 1 ? 2.f * i / (count - 1) - 1 : 0; }

// The four pixels around a point of a grid, whose coordinates go from -1 to 1.
struct Corners {
    struct Corner { int at; float weight, du, dv; } all[4];
    Corners(const float* point, const Tensor& x) {
        int height = x.shape[2], width = x.shape[3];
        float u = (point[0] + 1) * (width - 1) / 2, v = (point[1] + 1) * (height - 1) / 2;
        float left = std::floor(u), top = std::floor(v);
        for (int k = 0; k < 4; k++) {
            float j = left + k % 2, i = top + k / 2;
            float across = 1 - std::abs(u - j), down = 1 - std::abs(v - i);
            bool inside = i >= 0 && i < height && j >= 0 && j < width;
            all[k] = {inside ? int(i) * x.strides[2] + int(j) * x.strides[3] : -1, across * down,
                      (k % 2 ? 1 : -1) * down * (width - 1) / 2, (k / 2 ? 1 : -1) * across * (height - 1) / 2};
        }
    }
};

}  // namespace
}  // namespace emu::dnn

using namespace emu;
using namespace emu::dnn;

extern "C" {
DESCRIPTOR(DropoutDescriptor, Dropout)
// ---- batch normalisation: per element of an image (mode 0) or per channel ----------------
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int, int, Tensor*, Tensor*, Tensor*, Tensor*, void*, size_t* out) {
    *out = ROOM;
    return SUCCESS;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, Tensor*, size_t* out) { *out = ROOM; return SUCCESS; }
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int mode, int, Tensor* x, Tensor*, Tensor*, Tensor*, Tensor*, Tensor*, void*, size_t* out) {
    *out = ROOM + Groups(*x, mode).count() * 2 * sizeof(float);
    return SUCCESS;
}
static int normalize(void* h, int mode, const void* al, const void* be, Tensor* xt, const void* x, Tensor* yt, void* y, Tensor* bt,
                     const void* gamma, const void* beta, double factor, void* mean_, void* variance_, double epsilon, void* save_mean,
                     void* save_inverse, void* workspace, size_t room, void* reserve, size_t reserved) {
    if (int status = check_normalization(mode, *xt, *bt, epsilon)) return status;
    REFUSE_IF(!good(*xt, *yt) || (save_mean == nullptr) != (save_inverse == nullptr), BAD_PARAM);
    return with_type(xt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, scale = Scale(al, be, xt->type), groups = Groups(*xt, mode), xt = *xt, bytes = bt->bytes()] {
            using S = Sum<T>;
            read(x, xt.bytes()), read(gamma, bytes), read(beta, bytes);
            write(y, xt.bytes());
            for (void* out : {mean_, variance_, save_mean, save_inverse}) if (out) write(out, bytes);
            if (room) write(workspace, room), memset(workspace, 0x5A, room);
            if (reserved) write(reserve, ROOM), *(uint64_t*)reserve = LAID_ASIDE;
            double members = groups.members();
            for (int g = 0; g < groups.count(); g++) {
                double sum = 0, squares = 0;
                groups.each(g, [&](size_t i) { sum += double(((const T*)x)[i]); });
                double mean = sum / members;
                groups.each(g, [&](size_t i) { double d = double(((const T*)x)[i]) - mean; squares += d * d; });
                double variance = squares / members;
                S inverse = 1 / std::sqrt(variance + epsilon), centre = mean;
                groups.each(g, [&](size_t i) {
                    S value = (S(((const T*)x)[i]) - centre) * inverse;
                    scale.put(((T*)y)[i], value * ((const S*)gamma)[g] + ((const S*)beta)[g]);
                });
                if (save_mean) ((S*)save_mean)[g] = centre, ((S*)save_inverse)[g] = inverse;
                if (!mean_) continue;
                S& running = ((S*)mean_)[g];
                S& spread = ((S*)variance_)[g];
                running = running * (1 - factor) + mean * factor;
                spread = spread * (1 - factor) + (members > 1 ? squares / (members - 1) : variance) * factor;
            }
        });
    });
}
int cudnnBatchNormalizationForwardTrainingEx(void* h, int mode, int ops, const void* al, const void* be, Tensor* xt, const void* x,
        Tensor*, const void*, Tensor* yt, void* y, Tensor* bt, const void* gamma, const void* beta, double factor, void* mean,
        void* variance, double epsilon, void* save_mean, void* save_inverse, void*, void* workspace, size_t room, void* reserve, size_t reserved) {
    REFUSE_IF(ops, NOT_SUPPORTED);
    REFUSE_IF(room < ROOM && (room || needs_room(*xt, mode)), BAD_PARAM);
    REFUSE_IF(reserved < ROOM && (reserved || needs_room(*xt, mode)), BAD_PARAM);
    return normalize(h, mode, al, be, xt, x, yt, y, bt, gamma, beta, factor, mean, variance, epsilon, save_mean, save_inverse,
                     workspace, room, reserve, reserved);
}
int cudnnBatchNormalizationForwardTraining(void* h, int mode, const void* al, const void* be, Tensor* xt, const void* x, Tensor* yt, void* y,
        Tensor* bt, const void* gamma, const void* beta, double factor, void* mean, void* variance, double epsilon, void* save_mean,
        void* save_inverse) {
    return normalize(h, mode, al, be, xt, x, yt, y, bt, gamma, beta, factor, mean, variance, epsilon, save_mean, save_inverse,
                     nullptr, 0, nullptr, 0);
}
int cudnnBatchNormalizationForwardInference(void* h, int mode, const void* al, const void* be, Tensor* xt, const void* x, Tensor* yt,
        void* y, Tensor* bt, const void* gamma, const void* beta, const void* mean, const void* variance, double epsilon) {
    REFUSE_IF(!good(*xt, *yt), BAD_PARAM);
    if (int status = check_normalization(mode, *xt, *bt, epsilon)) return status;
    return with_type(xt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, scale = Scale(al, be, xt->type), groups = Groups(*xt, mode), all = xt->bytes(), bytes = bt->bytes()] {
            using S = Sum<T>;
            read(x, all);
            write(y, all);
            for (const void* in : {gamma, beta, mean, variance}) read(in, bytes);
            for (int g = 0; g < groups.count(); g++) {
                S inverse = 1 / std::sqrt(double(((const S*)variance)[g]) + epsilon), centre = ((const S*)mean)[g];
                groups.each(g, [&](size_t i) {
                    S value = (S(((const T*)x)[i]) - centre) * inverse;
                    scale.put(((T*)y)[i], value * ((const S*)gamma)[g] + ((const S*)beta)[g]);
                });
            }
        });
    });
}
static int normalize_back(void* h, int mode, const void* al, const void* be, const void* alp, const void* bep, Tensor* xt, const void* x,
                          Tensor* gyt, const void* gy, Tensor* gxt, void* gx, Tensor* bt, const void* gamma, void* ggamma, void* gbeta,
                          double epsilon, const void* mean, const void* inverse, void* workspace, size_t room, void* reserve, size_t reserved) {
    if (int status = check_normalization(mode, *xt, *bt, epsilon)) return status;
    REFUSE_IF(!good(*xt, *gyt) || !good(*xt, *gxt), BAD_PARAM);
    REFUSE_IF(!mean || !inverse, NOT_SUPPORTED);
    return with_type(xt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, scale = Scale(al, be, xt->type), param = Scale(alp, bep, xt->type), groups = Groups(*xt, mode), xt = *xt, bytes = bt->bytes()] {
            using S = Sum<T>;
            read(x, xt.bytes()), read(gy, xt.bytes()), read(gamma, bytes), read(mean, bytes), read(inverse, bytes);
            write(gx, xt.bytes()), write(ggamma, bytes), write(gbeta, bytes);
            if (room) write(workspace, room), memset(workspace, 0x5A, room);
            if (reserved) read(reserve, ROOM);
            if (reserved && *(uint64_t*)reserve != LAID_ASIDE) die("batch normalisation: its reserve is not what forward wrote");
            for (int g = 0; g < groups.count(); g++) {
                S centre = ((const S*)mean)[g], factor = ((const S*)inverse)[g], members = groups.members();
                double sum = 0, product = 0;
                auto normal = [&](size_t i) { return (S(((const T*)x)[i]) - centre) * factor; };
                groups.each(g, [&](size_t i) {
                    S gradient = ((const T*)gy)[i];
                    sum += gradient, product += gradient * normal(i);
                });
                param.put(((S*)gbeta)[g], S(sum)), param.put(((S*)ggamma)[g], S(product));
                S each = ((const S*)gamma)[g] * factor;
                groups.each(g, [&](size_t i) {
                    S value = S(((const T*)gy)[i]) - (normal(i) * S(product) + S(sum)) / members;
                    scale.put(((T*)gx)[i], each * value);
                });
            }
        });
    });
}
int cudnnBatchNormalizationBackwardEx(void* h, int mode, int ops, const void* al, const void* be, const void* alp, const void* bep,
        Tensor* xt, const void* x, Tensor*, const void*, Tensor* gyt, const void* gy, Tensor*, void*, Tensor* gxt, void* gx, Tensor* bt,
        const void* gamma, const void*, void* ggamma, void* gbeta, double epsilon, const void* mean, const void* inverse, void*,
        void* workspace, size_t room, void* reserve, size_t reserved) {
    REFUSE_IF(ops, NOT_SUPPORTED);
    size_t needed;
    cudnnGetBatchNormalizationBackwardExWorkspaceSize(h, mode, ops, xt, xt, gyt, gxt, gxt, bt, nullptr, &needed);
    REFUSE_IF(room < needed || (reserved < ROOM && (reserved || needs_room(*xt, mode))), BAD_PARAM);
    return normalize_back(h, mode, al, be, alp, bep, xt, x, gyt, gy, gxt, gx, bt, gamma, ggamma, gbeta, epsilon, mean, inverse,
                          workspace, room, reserve, reserved);
}
int cudnnBatchNormalizationBackward(void* h, int mode, const void* al, const void* be, const void* alp, const void* bep, Tensor* xt,
        const void* x, Tensor* gyt, const void* gy, Tensor* gxt, void* gx, Tensor* bt, const void* gamma, void* ggamma, void* gbeta,
        double epsilon, const void* mean, const void* inverse) {
    return normalize_back(h, mode, al, be, alp, bep, xt, x, gyt, gy, gxt, gx, bt, gamma, ggamma, gbeta, epsilon, mean, inverse,
                          nullptr, 0, nullptr, 0);
}

// ---- dropout: which elements is said by states in the device's memory, which go on -------
int cudnnDropoutGetStatesSize(void*, size_t* out) { *out = STATES_BYTES; return SUCCESS; }
int cudnnDropoutGetReserveSpaceSize(Tensor* x, size_t* out) { *out = (x->count() + 127) / 128 * 16; return SUCCESS; }
int cudnnSetDropoutDescriptor(Dropout* d, void* h, float ratio, void* states, size_t bytes, unsigned long long seed) {
    d->ratio = ratio;
    if (!states) return SUCCESS;
    REFUSE_IF(bytes < STATES_BYTES, BAD_PARAM);
    d->states = states;
    launch(h, [=] {
        write(states, bytes);
        memset(states, 0x5A, bytes);
        *(States*)states = {seed, 0};
    });
    return SUCCESS;
}
int cudnnDropoutForward(void* h, Dropout* d, Tensor* xt, const void* x, Tensor* yt, void* y, void* reserve, size_t bytes) {
    size_t needed;
    cudnnDropoutGetReserveSpaceSize(xt, &needed);
    REFUSE_IF(!good(*xt, *yt) || bytes < needed || !d->states, BAD_PARAM);
    return with_type(xt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, n = xt->count(), d = *d] {
            auto* mask = (unsigned char*)reserve;
            write(reserve, bytes);
            draw(d, n, mask);
            Sum<T> factor = 1 / (1 - Sum<T>(d.ratio));
            map_elements(n, (T*)y, {x}, [=](size_t i) { ((T*)y)[i] = kept(mask, i) ? T(Sum<T>(((const T*)x)[i]) * factor) : T(0); });
        });
    });
}
int cudnnDropoutBackward(void* h, Dropout* d, Tensor* gyt, const void* gy, Tensor* gxt, void* gx, void* reserve, size_t bytes) {
    size_t needed;
    cudnnDropoutGetReserveSpaceSize(gyt, &needed);
    REFUSE_IF(!good(*gyt, *gxt) || bytes < needed, BAD_PARAM);
    return with_type(gyt->type, [&](auto zero) {
        using T = decltype(zero);
        launch(h, [=, n = gyt->count(), d = *d] {
            read(reserve, bytes);
            auto* mask = (const unsigned char*)reserve;
            Sum<T> factor = 1 / (1 - Sum<T>(d.ratio));
            map_elements(n, (T*)gx, {gy}, [=](size_t i) { ((T*)gx)[i] = kept(mask, i) ? T(Sum<T>(((const T*)gy)[i]) * factor) : T(0); });
        });
    });
}

// ---- spatial transformer: bilinear, nothing outside ----------------------------------------
DESCRIPTOR(SpatialTransformerDescriptor, Sampler)
int cudnnSetSpatialTransformerNdDescriptor(Sampler* s, int sampler, int type, int dims, const int* shape) {
    REFUSE_IF(sampler != 0 || dims != 4, NOT_SUPPORTED);
    *s = {type, {shape, shape + dims}};
    return SUCCESS;
}
int cudnnSpatialTfGridGeneratorForward(void* h, Sampler* s, const void* theta, void* grid) {
    REFUSE_IF(s->type != FLOAT, NOT_SUPPORTED);
    launch(h, [=, shape = s->shape] {
        int batch = shape[0], height = shape[2], width = shape[3];
        auto *from = (const float*)theta;
        auto *to = (float*)grid;
        read(from, batch * 6 * sizeof(float));
        write(to, (size_t)batch * height * width * 2 * sizeof(float));
        for (int n = 0; n < batch; n++, from += 6)
            for (int i = 0; i < height; i++) for (int j = 0; j < width; j++) {
                float u = place(j, width), v = place(i, height);
                for (int k = 0; k < 2; k++) *to++ = from[3 * k] * u + from[3 * k + 1] * v + from[3 * k + 2];
            }
    });
    return SUCCESS;
}
int cudnnSpatialTfGridGeneratorBackward(void* h, Sampler* s, const void* ggrid, void* gtheta) {
    REFUSE_IF(s->type != FLOAT, NOT_SUPPORTED);
    launch(h, [=, shape = s->shape] {
        int batch = shape[0], height = shape[2], width = shape[3];
        auto *from = (const float*)ggrid;
        auto *to = (float*)gtheta;
        read(from, (size_t)batch * height * width * 2 * sizeof(float));
        write(to, batch * 6 * sizeof(float));
        for (int n = 0; n < batch; n++, to += 6) {
            std::fill_n(to, 6, 0.f);
            for (int i = 0; i < height; i++) for (int j = 0; j < width; j++)
                for (int k = 0; k < 2; k++, from++) {
                    to[3 * k] += *from * place(j, width);
                    to[3 * k + 1] += *from * place(i, height);
                    to[3 * k + 2] += *from;
                }
        }
    });
    return SUCCESS;
}
int cudnnSpatialTfSamplerForward(void* h, Sampler* s, const void* al, Tensor* xt, const void* x, const void* grid,
                                 const void* be, Tensor* yt, void* y) {
    REFUSE_IF(xt->type != FLOAT || yt->type != FLOAT, NOT_SUPPORTED);
    REFUSE_IF(yt->shape != s->shape || xt->shape[1] != yt->shape[1], BAD_PARAM);
    launch(h, [=, scale = Scale(al, be, FLOAT), xt = *xt, yt = *yt] {
        Planes in(xt), out(yt);
        read(x, xt.bytes()), read(grid, (size_t)out.batch * out.positions * 2 * sizeof(float));
        write(y, yt.bytes());
        for (int n = 0; n < out.batch; n++) for (int q = 0; q < out.positions; q++) {
            Corners corners((const float*)grid + ((size_t)n * out.positions + q) * 2, xt);
            for (int c = 0; c < out.channels; c++) {
                float sum = 0;
                for (auto& corner : corners.all)
                    if (corner.at >= 0) sum += corner.weight * ((const float*)x)[in.at(n, c, 0) + corner.at];
                scale.put(((float*)y)[out.at(n, c, q)], sum);
            }
        }
    });
    return SUCCESS;
}
int cudnnSpatialTfSamplerBackward(void* h, Sampler* s, const void* al, Tensor* xt, const void* x, const void* be, Tensor* gxt, void* gx,
                                  const void* alg, Tensor* gyt, const void* gy, const void* grid, const void* beg, void* ggrid) {
    REFUSE_IF(xt->type != FLOAT, NOT_SUPPORTED);
    REFUSE_IF(!good(*xt, *gxt) || gyt->shape != s->shape, BAD_PARAM);
    launch(h, [=, scale = Scale(al, be, FLOAT), other = Scale(alg, beg, FLOAT), xt = *xt, yt = *gyt] {
        Planes in(xt), out(yt);
        size_t grid_bytes = (size_t)out.batch * out.positions * 2 * sizeof(float);
        read(x, xt.bytes()), read(gy, yt.bytes()), read(grid, grid_bytes);
        write(gx, xt.bytes()), write(ggrid, grid_bytes);
        std::vector<float> sums(xt.count());
        for (int n = 0; n < out.batch; n++) for (int q = 0; q < out.positions; q++) {
            size_t place = ((size_t)n * out.positions + q) * 2;
            Corners corners((const float*)grid + place, xt);
            float du = 0, dv = 0;
            for (int c = 0; c < out.channels; c++) {
                float gradient = ((const float*)gy)[out.at(n, c, q)];
                for (auto& corner : corners.all) {
                    if (corner.at < 0) continue;
                    float value = ((const float*)x)[in.at(n, c, 0) + corner.at];
                    sums[in.at(n, c, 0) + corner.at] += corner.weight * gradient;
                    du += corner.du * value * gradient, dv += corner.dv * value * gradient;
                }
            }
            other.put(((float*)ggrid)[place], du), other.put(((float*)ggrid)[place + 1], dv);
        }
        for (size_t i = 0; i < sums.size(); i++) scale.put(((float*)gx)[i], sums[i]);
    });
    return SUCCESS;
}
}
