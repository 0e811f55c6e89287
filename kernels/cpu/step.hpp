// One token of B sequences in the step form, in float32: what lies between the matrix products of a block.
//
//   norm    out = the layer norm of x
//   mix     out[m] = x + (previous - x) * (weight[m] + added[m])
//   step7   from the products of RWKV-7's time-mix to the input of its output matrix, the state moved on by one token
//   step6   the same for RWKV-6, and for RWKV-5.2 with a decay that all tokens share (w_stride 0)
//
// Legend: B sequences, H heads of N channels (a multiple of 16, at most 128), C = H * N. States are float32
// [B, H, value, key] in step7 and [B, H, key, value] in step6; the new state may take the place of the old one.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "exponential.hpp"
#include "folds.hpp"
#include "threads.hpp"
#include "wkv7.hpp"

namespace {

constexpr int64_t MOST = 128;

// Tensors of the caller may begin at any address.
INLINE V get(const float* p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
INLINE void put(float* p, V x) { std::memcpy(p, &x, sizeof x); }

INLINE float sum(V x) {
    float total = 0.0f;
    UNROLL
    for (int n = 0; n < W; n++) total += x[n];
    return total;
}

INLINE V sigmoid(V x) {
    const V e = exponential(x < 0.0f ? x : -x).whole();
    return (x < 0.0f ? e : all(1.0f)) / (1.0f + e);
}

struct Mix {
    int64_t C, B, count;
    const float *x, *previous;
    const float* const* weights;
    const float* added;
    float* out;
};

APART void mix_piece(const Mix& c, int64_t row, Nothing&) {
    const float *x = c.x + row * c.C, *previous = c.previous + row * c.C;
    for (int64_t m = 0; m < c.count; m++) {
        const int64_t at = (m * c.B + row) * c.C;
        for (int64_t n = 0; n < c.C; n += W) {
            V weight = get(c.weights[m] + n);
            if (c.added != nullptr) weight += get(c.added + at + n);
            put(c.out + at + n, get(x + n) + (get(previous + n) - get(x + n)) * weight);
        }
    }
}

// y becomes its norm, with its weight and bias: a group norm's over one head, a layer norm's over all channels.
INLINE void norm_row(float* y, int64_t count, const float* weight, const float* bias, float eps) {
    V total = V{}, squares = V{};
    for (int64_t n = 0; n < count; n += W) total += get(y + n);
    const float mean = sum(total) / static_cast<float>(count);
    for (int64_t n = 0; n < count; n += W) {
        const V d = get(y + n) - mean;
        squares += d * d;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(count) + eps);
    for (int64_t n = 0; n < count; n += W) put(y + n, (get(y + n) - mean) * scale * get(weight + n) + get(bias + n));
}

struct Norm {
    int64_t C;
    float eps;
    const float* x;
    const float *weight, *bias;
    // May be x itself.
    float* out;
};

APART void norm_piece(const Norm& c, int64_t row, Nothing&) {
    if (c.out != c.x) std::memcpy(c.out + row * c.C, c.x + row * c.C, c.C * sizeof(float));
    norm_row(c.out + row * c.C, c.C, c.weight, c.bias, c.eps);
}

struct Step7 {
    int64_t H, N;
    float eps;
    // Products of the mixed inputs, [B, C]; share and v_first are null in block 0, whose v is v_first.
    const float *r, *w_low, *k, *v, *a_low, *gate, *share_low, *v_first;
    // Weights, [C].
    const float *w0, *a0, *v0, *k_k, *k_a, *r_k, *ln_weight, *ln_bias;
    const float* state_in;
    float *state_out, *v_out, *out;
};

struct Step7Room {
    alignas(64) float decay[MOST], a[MOST], b[MOST], k[MOST], v[MOST], y[MOST], sa[MOST], partial[W * W];
};

// decay, a = -kappa, b = kappa * rate, the new k and v; gives sum(r * k * r_k).
APART float vectors7(const Step7& c, int64_t at, int64_t of, Step7Room& m) {
    V square = V{}, bonus = V{};
    for (int64_t n = 0; n < c.N; n += W) {
        store(m.decay + n, get(c.w0 + of + n) + get(c.w_low + at + n));
        const V direction = get(c.k + at + n) * get(c.k_k + of + n);
        square += direction * direction;
        store(m.b + n, direction);
    }
    decay_rows(m.decay, nullptr, c.N);
    const float norm = std::sqrt(sum(square));
    const float inverse = 1.0f / (norm > 1e-12f ? norm : 1e-12f);
    for (int64_t n = 0; n < c.N; n += W) {
        const V rate = sigmoid(get(c.a0 + of + n) + get(c.a_low + at + n)), kappa = load(m.b + n) * inverse;
        const V k_a = get(c.k_a + of + n), k = get(c.k + at + n) * (1.0f - k_a + rate * k_a);
        V v = get(c.v + at + n);
        if (c.v_first != nullptr) {
            const V first = get(c.v_first + at + n);
            v += (first - v) * sigmoid(get(c.v0 + of + n) + get(c.share_low + at + n));
        }
        store(m.a + n, -kappa);
        store(m.b + n, kappa * rate);
        store(m.k + n, k);
        store(m.v + n, v);
        bonus += get(c.r + at + n) * k * get(c.r_k + of + n);
        if (c.v_out != nullptr) put(c.v_out + at + n, v);
    }
    return sum(bonus);
}

APART void step7_head(const Step7& c, int64_t item, Step7Room& m) {
    const int64_t N = c.N, at = item * N, of = item % c.H * N;
    const float *from = c.state_in + item * N * N, *r = c.r + at;
    float* const to = c.state_out + item * N * N;
    const float bonus = vectors7(c, at, of, m);
    for (int64_t i = 0; i < N; i += W) {
        for (int n = 0; n < W; n++) {
            V sa = V{};
            for (int64_t j = 0; j < N; j += W) sa += get(from + (i + n) * N + j) * load(m.a + j);
            store(m.partial + n * W, sa);
        }
        store(m.sa + i, sums_of_lanes(m.partial));
        for (int n = 0; n < W; n++) {
            const float sa = m.sa[i + n], v = m.v[i + n];
            V y = V{};
            for (int64_t j = 0; j < N; j += W) {
                const int64_t place = (i + n) * N + j;
                const V s = get(from + place) * load(m.decay + j) + load(m.b + j) * sa + load(m.k + j) * v;
                put(to + place, s);
                y += s * get(r + j);
            }
            store(m.partial + n * W, y);
        }
        store(m.y + i, sums_of_lanes(m.partial));
    }
    norm_row(m.y, N, c.ln_weight + of, c.ln_bias + of, c.eps);
    for (int64_t n = 0; n < N; n += W)
        put(c.out + at + n, (load(m.y + n) + load(m.v + n) * bonus) * get(c.gate + at + n));
}

struct Step6 {
    int64_t H, N, w_stride;
    float eps;
    // [B, C]; the gate before its SiLU. w_raw of sequence b begins at b * w_stride.
    const float *r, *w_raw, *k, *v, *gate;
    const float *u, *ln_weight, *ln_bias;
    const float* state_in;
    float *state_out, *out;
};

struct Step6Room {
    alignas(64) float y[MOST];
};

APART void step6_head(const Step6& c, int64_t item, Step6Room& m) {
    const int64_t N = c.N, at = item * N, of = item % c.H * N;
    const float *r = c.r + at, *k = c.k + at, *v = c.v + at, *u = c.u + of;
    const float* w_raw = c.w_raw + item / c.H * c.w_stride + of;
    const float* from = c.state_in + item * N * N;
    float* const to = c.state_out + item * N * N;
    float bonus = 0.0f;
    for (int64_t j = 0; j < N; j++) bonus += r[j] * u[j] * k[j];
    for (int64_t i = 0; i < N; i += W) store(m.y + i, get(v + i) * bonus);
    for (int64_t j = 0; j < N; j++) {
        // As in the parallel form, decay - 1: near 1 a float32 is too coarse for a decay.
        const float fade = std::expm1(-std::exp(w_raw[j])), r_j = r[j], k_j = k[j];
        for (int64_t i = 0; i < N; i += W) {
            const V s = get(from + j * N + i);
            store(m.y + i, load(m.y + i) + s * r_j);
            put(to + j * N + i, s + (s * fade + get(v + i) * k_j));
        }
    }
    norm_row(m.y, N, c.ln_weight + of, c.ln_bias + of, c.eps);
    for (int64_t n = 0; n < N; n += W) {
        const V gate = get(c.gate + at + n);
        put(c.out + at + n, load(m.y + n) * gate * sigmoid(gate));
    }
}

}  // namespace
