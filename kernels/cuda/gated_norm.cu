// The end of a time-mix: group norm, bonus of the present token (x070 alone) and gate; forward and backward.
// Legend: R rows (tokens), H heads of N channels, C = H N; rows in T, weight, bias and r_k [C] in float32.
//   n = weight * (y - mean of the head) / deviation of the head + bias
//   x070: out = (n + v * sum over the head of (r k r_k)) * gate;   x052, x060: out = n * gate * sigmoid(gate)
// Saved for the backward: the inputs. sizes: R, H, N, rows of a piece. scalars: the norm's epsilon.
// A lane keeps its four channels for all rows of a piece: the parameters are read once, sums over rows stay in
// registers, and a head is summed by shuffles, so no thread waits for another warp. Not measured on a GPU.

#include <cstdint>

#include "device.cuh"
#include "fused.cuh"

namespace {

__device__ __forceinline__ Stats stats_of(const Floats<4>& y, const Heads& z, float eps) {
    const float mean = z.sum(y) / z.N;
    Floats<4> squares{};
    if (z.works)
#pragma unroll
        for (int i = 0; i < 4; i++) squares.x[i] = (y.x[i] - mean) * (y.x[i] - mean);
    return {mean, 1.0f / sqrtf(z.sum(squares) / z.N + eps)};
}

__device__ __forceinline__ float bonus_of(const Floats<4>& r, const Floats<4>& k, const Floats<4>& r_k,
                                          const Heads& z) {
    Floats<4> products;
#pragma unroll
    for (int i = 0; i < 4; i++) products.x[i] = r.x[i] * k.x[i] * r_k.x[i];
    return z.sum(products);
}

template <bool BONUS, typename T>
__global__ void __launch_bounds__(HEAD_THREADS) forward(const Call call) {
    const Heads z(call);
    const Floats<4> weight = get_if(z.works, call.tensor<float>(5) + z.c);
    const Floats<4> bias = get_if(z.works, call.tensor<float>(6) + z.c);
    const Floats<4> r_k = get_if(BONUS && z.works, call.tensor<float>(7) + z.c);
    for (int64_t row = z.begin; row < z.end; row++) {
        const int64_t at = row * z.C + z.c;
        const Floats<4> y = get_if(z.works, call.tensor<T>(0) + at), gate = get_if(z.works, call.tensor<T>(1) + at);
        const Floats<4> r = get_if(BONUS && z.works, call.tensor<T>(2) + at);
        const Floats<4> k = get_if(BONUS && z.works, call.tensor<T>(3) + at);
        const Floats<4> v = get_if(BONUS && z.works, call.tensor<T>(4) + at);
        const Stats s = stats_of(y, z, call.scalars[0]);
        const float bonus = BONUS ? bonus_of(r, k, r_k, z) : 0.0f;
        Floats<4> out;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float value = (y.x[i] - s.mean) * s.scale * weight.x[i] + bias.x[i];
            if (BONUS) value += v.x[i] * bonus;
            out.x[i] = BONUS ? value * gate.x[i] : value * gate.x[i] * sigmoid(gate.x[i]).value;
        }
        if (z.works) put(call.tensor<T>(8) + at, out);
    }
}

template <bool BONUS, typename T>
__global__ void __launch_bounds__(HEAD_THREADS) backward(const Call call) {
    const Heads z(call);
    const Floats<4> weight = get_if(z.works, call.tensor<float>(5) + z.c);
    const Floats<4> bias = get_if(z.works, call.tensor<float>(6) + z.c);
    const Floats<4> r_k = get_if(BONUS && z.works, call.tensor<float>(7) + z.c);
    Floats<4> dweight{}, dbias{}, dr_k{};
    for (int64_t row = z.begin; row < z.end; row++) {
        const int64_t at = row * z.C + z.c;
        const Floats<4> y = get_if(z.works, call.tensor<T>(0) + at), gate = get_if(z.works, call.tensor<T>(1) + at);
        const Floats<4> dout = get_if(z.works, call.tensor<T>(8) + at);
        const Floats<4> r = get_if(BONUS && z.works, call.tensor<T>(2) + at);
        const Floats<4> k = get_if(BONUS && z.works, call.tensor<T>(3) + at);
        const Floats<4> v = get_if(BONUS && z.works, call.tensor<T>(4) + at);
        const Stats s = stats_of(y, z, call.scalars[0]);
        const float bonus = BONUS ? bonus_of(r, k, r_k, z) : 0.0f;
        Floats<4> x, dvalue, dgate, dv, along_x, along_v;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float grad = dout.x[i], opened = gate.x[i];
            x.x[i] = (y.x[i] - s.mean) * s.scale;
            const float value = x.x[i] * weight.x[i] + bias.x[i];
            float slope;
            if (BONUS) {
                dgate.x[i] = grad * (value + v.x[i] * bonus);
                slope = grad * opened;
                along_v.x[i] = slope * v.x[i];
                dv.x[i] = slope * bonus;
            } else {
                const Sigmoid half = sigmoid(opened);
                dgate.x[i] = grad * value * half.value * (1.0f + opened * half.rest);
                slope = grad * opened * half.value;
            }
            dweight.x[i] += slope * x.x[i];
            dbias.x[i] += slope;
            dvalue.x[i] = slope * weight.x[i];
            along_x.x[i] = dvalue.x[i] * x.x[i];
        }
        // A lane without channels adds zeros, for all that flows into it are zeros.
        const float one = z.sum(dvalue) / z.N, slope = z.sum(along_x) / z.N, dbonus = BONUS ? z.sum(along_v) : 0.0f;
        Floats<4> dy, dr, dk;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            dy.x[i] = (dvalue.x[i] - one - x.x[i] * slope) * s.scale;
            dr.x[i] = k.x[i] * r_k.x[i] * dbonus;
            dk.x[i] = r.x[i] * r_k.x[i] * dbonus;
            dr_k.x[i] += r.x[i] * k.x[i] * dbonus;
        }
        if (!z.works) continue;
        put(call.tensor<T>(9) + at, dy);
        put(call.tensor<T>(10) + at, dgate);
        if (!BONUS) continue;
        put(call.tensor<T>(11) + at, dr);
        put(call.tensor<T>(12) + at, dk);
        put(call.tensor<T>(13) + at, dv);
    }
    if (!z.works) return;
    float* const sums = call.row<float>(14, z.piece, 3 * z.C) + z.c;
    put(sums, dweight);
    put(sums + z.C, dbias);
    put(sums + 2 * z.C, dr_k);
}

}  // namespace

// tensors: y, gate, r, k, v, weight, bias, r_k, out; without a bonus r, k, v and r_k are null.
OPERATOR(gated_norm_forward) {
    const Call call = call_of(sizes, 4, tensors, 9, scalars, 1);
    const int64_t blocks = blocks_of_heads(sizes);
    if (const int problem = problem_of(call, 4, blocks)) return problem;
    if (tensors[7] != nullptr)
        return launch({forward<true, float>, forward<true, __nv_bfloat16>, forward<true, __half>}, dtype, blocks,
                      HEAD_THREADS, 0, stream, call);
    return launch({forward<false, float>, forward<false, __nv_bfloat16>, forward<false, __half>}, dtype, blocks,
                  HEAD_THREADS, 0, stream, call);
}

// tensors: y, gate, r, k, v, weight, bias, r_k, dout, dy, dgate, dr, dk, dv, sums [pieces, 3, C] of weight, bias and
// r_k; without a bonus r, k, v, r_k, dr, dk and dv are null.
OPERATOR(gated_norm_backward) {
    const Call call = call_of(sizes, 4, tensors, 15, scalars, 1);
    const int64_t blocks = blocks_of_heads(sizes);
    if (const int problem = problem_of(call, 4, blocks)) return problem;
    if (tensors[7] != nullptr)
        return launch({backward<true, float>, backward<true, __nv_bfloat16>, backward<true, __half>}, dtype, blocks,
                      HEAD_THREADS, 0, stream, call);
    return launch({backward<false, float>, backward<false, __nv_bfloat16>, backward<false, __half>}, dtype, blocks,
                  HEAD_THREADS, 0, stream, call);
}
