// What x070's recurrence takes, from what the matrix products gave: decay, value, key, removal; forward and backward.
// Legend: R rows (tokens), H heads of N channels, C = H N; rows in T, parameters [C] in float32.
//   w_raw = w0 + w_low,  v_out = v + (v_first - v) * sigmoid(v0 + v_low)   (block 0 has no v_first and leaves v as it is)
//   rate = sigmoid(a0 + a_low),  k_out = k * (1 + (rate - 1) * k_a)
//   kappa = k * k_k / max(|k * k_k| of the head, 1e-12),  a = -kappa,  b = kappa * rate
// Saved for the backward: the inputs, all but w_low. sizes: R, H, N, rows of a piece.
// A lane keeps its four channels for all rows of a piece, as in gated_norm.cu. Not measured on a GPU.

#include <cstdint>

#include "device.cuh"
#include "fused.cuh"

namespace {

constexpr float NORM_FLOOR = 1e-12f;

// 1 / max(norm of `direction`, NORM_FLOOR) of the head.
__device__ __forceinline__ float inverse_norm(const Floats<4>& direction, const Heads& z) {
    Floats<4> squares;
#pragma unroll
    for (int i = 0; i < 4; i++) squares.x[i] = direction.x[i] * direction.x[i];
    const float norm = sqrtf(z.sum(squares));
    return 1.0f / (norm < NORM_FLOOR ? NORM_FLOOR : norm);
}

__device__ __forceinline__ Floats<4> product(const Floats<4>& x, const Floats<4>& y) {
    Floats<4> result;
#pragma unroll
    for (int i = 0; i < 4; i++) result.x[i] = x.x[i] * y.x[i];
    return result;
}

template <typename T>
__global__ void __launch_bounds__(HEAD_THREADS) forward(const Call call) {
    const Heads z(call);
    const bool mixes = call.tensors[5] != nullptr;
    const Floats<4> w0 = get_if(z.works, call.tensor<float>(6) + z.c);
    const Floats<4> a0 = get_if(z.works, call.tensor<float>(7) + z.c);
    const Floats<4> v0 = get_if(z.works && mixes, call.tensor<float>(8) + z.c);
    const Floats<4> k_k = get_if(z.works, call.tensor<float>(9) + z.c);
    const Floats<4> k_a = get_if(z.works, call.tensor<float>(10) + z.c);
    for (int64_t row = z.begin; row < z.end; row++) {
        const int64_t at = row * z.C + z.c;
        const Floats<4> k = get_if(z.works, call.tensor<T>(2) + at), direction = product(k, k_k);
        const float inverse = inverse_norm(direction, z);
        if (!z.works) continue;
        const Floats<4> w_low = get(call.tensor<T>(0) + at), a_low = get(call.tensor<T>(1) + at);
        Floats<4> w_raw, k_out, a, b;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Sigmoid rate = sigmoid(a0.x[i] + a_low.x[i]);
            const float kappa = direction.x[i] * inverse;
            w_raw.x[i] = w0.x[i] + w_low.x[i];
            k_out.x[i] = k.x[i] * (1.0f - rate.rest * k_a.x[i]);
            a.x[i] = -kappa;
            b.x[i] = kappa * rate.value;
        }
        put(call.tensor<T>(11) + at, w_raw);
        put(call.tensor<T>(12) + at, k_out);
        put(call.tensor<T>(14) + at, a);
        put(call.tensor<T>(15) + at, b);
        if (!mixes) continue;
        const Floats<4> v = get(call.tensor<T>(3) + at), v_low = get(call.tensor<T>(4) + at);
        const Floats<4> v_first = get(call.tensor<T>(5) + at);
        Floats<4> v_out;
#pragma unroll
        for (int i = 0; i < 4; i++)
            v_out.x[i] = v.x[i] + (v_first.x[i] - v.x[i]) * sigmoid(v0.x[i] + v_low.x[i]).value;
        put(call.tensor<T>(13) + at, v_out);
    }
}

// What belongs to the value, of one row; adds to the gradient of v0.
template <typename T>
__device__ __forceinline__ void value_backward(const Call& call, int64_t at, const Floats<4>& v0, Floats<4>& dv0) {
    const Floats<4> v = get(call.tensor<T>(2) + at), v_low = get(call.tensor<T>(3) + at);
    const Floats<4> v_first = get(call.tensor<T>(4) + at), grad = get(call.tensor<T>(11) + at);
    Floats<4> dv, dv_low, dv_first;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Sigmoid share = sigmoid(v0.x[i] + v_low.x[i]);
        dv.x[i] = grad.x[i] * share.rest;
        dv_first.x[i] = grad.x[i] * share.value;
        dv_low.x[i] = grad.x[i] * (v_first.x[i] - v.x[i]) * share.slope();
        dv0.x[i] += dv_low.x[i];
    }
    put(call.tensor<T>(16) + at, dv);
    put(call.tensor<T>(17) + at, dv_low);
    put(call.tensor<T>(18) + at, dv_first);
}

template <typename T>
__global__ void __launch_bounds__(HEAD_THREADS) backward(const Call call) {
    const Heads z(call);
    const bool mixes = call.tensors[4] != nullptr;
    const Floats<4> a0 = get_if(z.works, call.tensor<float>(5) + z.c);
    const Floats<4> v0 = get_if(z.works && mixes, call.tensor<float>(6) + z.c);
    const Floats<4> k_k = get_if(z.works, call.tensor<float>(7) + z.c);
    const Floats<4> k_a = get_if(z.works, call.tensor<float>(8) + z.c);
    Floats<4> dw0{}, da0{}, dv0{}, dk_k{}, dk_a{};
    for (int64_t row = z.begin; row < z.end; row++) {
        const int64_t at = row * z.C + z.c;
        const Floats<4> a_low = get_if(z.works, call.tensor<T>(0) + at), k = get_if(z.works, call.tensor<T>(1) + at);
        const Floats<4> da = get_if(z.works, call.tensor<T>(12) + at), db = get_if(z.works, call.tensor<T>(13) + at);
        const Floats<4> direction = product(k, k_k);
        const float inverse = inverse_norm(direction, z);
        Sigmoid rate[4];
        Floats<4> dkappa;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            rate[i] = sigmoid(a0.x[i] + a_low.x[i]);
            dkappa.x[i] = db.x[i] * rate[i].value - da.x[i];
        }
        // A norm's gradient has no part along the direction itself, unless the floor stands in its place.
        const float total = z.sum(product(dkappa, direction));
        const float along = inverse < 1.0f / NORM_FLOOR ? total * inverse : 0.0f;
        if (!z.works) continue;
        const Floats<4> dw_raw = get(call.tensor<T>(9) + at), dk_out = get(call.tensor<T>(10) + at);
        Floats<4> da_low, dk;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float kappa = direction.x[i] * inverse, pull = (dkappa.x[i] - kappa * along) * inverse;
            da_low.x[i] = (db.x[i] * kappa + dk_out.x[i] * k.x[i] * k_a.x[i]) * rate[i].slope();
            dk.x[i] = dk_out.x[i] * (1.0f - rate[i].rest * k_a.x[i]) + pull * k_k.x[i];
            dw0.x[i] += dw_raw.x[i];
            da0.x[i] += da_low.x[i];
            dk_k.x[i] += pull * k.x[i];
            dk_a.x[i] -= dk_out.x[i] * k.x[i] * rate[i].rest;
        }
        put(call.tensor<T>(14) + at, da_low);
        put(call.tensor<T>(15) + at, dk);
        if (mixes) value_backward<T>(call, at, v0, dv0);
    }
    if (!z.works) return;
    float* const sums = call.row<float>(19, z.piece, 5 * z.C) + z.c;
    put(sums, dw0);
    put(sums + z.C, da0);
    put(sums + 2 * z.C, dv0);
    put(sums + 3 * z.C, dk_k);
    put(sums + 4 * z.C, dk_a);
}

}  // namespace

// tensors: w_low, a_low, k, v, v_low, v_first, w0, a0, v0, k_k, k_a; w_raw, k_out, v_out, a, b. In block 0 v, v_low,
// v_first, v0 and v_out are null.
OPERATOR(wkv7_prepare_forward) {
    const Call call = call_of(sizes, 4, tensors, 16, scalars, 0);
    const int64_t blocks = blocks_of_heads(sizes);
    if (const int problem = problem_of(call, 4, blocks)) return problem;
    return launch({forward<float>, forward<__nv_bfloat16>, forward<__half>}, dtype, blocks, HEAD_THREADS, 0, stream,
                  call);
}

// tensors: a_low, k, v, v_low, v_first, a0, v0, k_k, k_a; dw_raw (which is the gradient of w_low too), dk_out, dv_out,
// da, db; da_low, dk, dv, dv_low, dv_first, sums [pieces, 5, C] of w0, a0, v0, k_k and k_a. In block 0 all that belongs
// to v is null.
OPERATOR(wkv7_prepare_backward) {
    const Call call = call_of(sizes, 4, tensors, 20, scalars, 0);
    const int64_t blocks = blocks_of_heads(sizes);
    if (const int problem = problem_of(call, 4, blocks)) return problem;
    return launch({backward<float>, backward<__nv_bfloat16>, backward<__half>}, dtype, blocks, HEAD_THREADS, 0, stream,
                  call);
}
