// The forward of WKV-6 and WKV-5, token by token; the recurrence and the legend stand in wkv6.cu.
// S lies in registers with values short and keys long, so that y is a sum among a few lanes.

#pragma once

#include <cstdint>

#include "wkv6.cuh"

namespace {

struct Forward {
    Shape shape;
    const void *r, *w_raw, *k, *v;
    const float *u, *state_in;
    const uint8_t* starts;
    void* y;
    float *state_out, *chunk_states;
};

constexpr int FORWARD_THREADS = L::THREADS;
constexpr int FORWARD_BYTES = (4 * CHUNK * ROW + CHUNK + 2 * N) * static_cast<int>(sizeof(float));

// The sum over keys of r u k for every token of the chunk: what u adds to y is this times v.
__device__ __forceinline__ void sum_bonus(const float* r, const float* k, const float* u, float* bonus, const L& lay) {
    constexpr int AT_ONCE = N / L::SHORT;
    for (int first = 0; first < CHUNK; first += AT_ONCE) {
        const int t = first + lay.first / L::SHORT;
        float sum = 0.0f;
        if (t < CHUNK)
#pragma unroll
            for (int q = 0; q < L::FOURS; q++) {
                const Floats<4> r_ = load<4>(r + t * ROW + lay.four(q)), k_ = load<4>(k + t * ROW + lay.four(q)),
                                u_ = load<4>(u + lay.four(q));
#pragma unroll
                for (int e = 0; e < 4; e++) sum += r_.x[e] * u_.x[e] * k_.x[e];
            }
#pragma unroll
        for (int distance = 1; distance < L::GROUPS; distance *= 2)
            sum += __shfl_xor_sync(lay.lanes(), sum, distance);
        if (t < CHUNK && lay.group == 0) bonus[t] = sum;
    }
}

template <typename T>
__device__ __forceinline__ void forward_token(Tile<L>& S, const L& lay, const float* r, const float* decay,
                                              const float* k, const float* v, float bonus, T* y) {
    const Floats<L::SHORT> v_ = load<L::SHORT>(v + lay.first);
    float sum[L::SHORT] = {};
#pragma unroll
    for (int q = 0; q < L::FOURS; q++) {
        const int at = lay.four(q);
        const Floats<4> r_ = load<4>(r + at), decay_ = load<4>(decay + at), k_ = load<4>(k + at);
#pragma unroll
        for (int s = 0; s < L::SHORT; s++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = S.x[s][4 * q + e];
                sum[s] += x * r_.x[e];
                x = __fmaf_rn(v_.x[s], k_.x[e], x * decay_.x[e]);
            }
    }
    const float one = sum_one(sum, lay);
    if (lay.has_one()) y[lay.one()] = Number<T>::written(one + v[lay.one()] * bonus);
}

template <typename T, bool EACH>
__global__ void __launch_bounds__(FORWARD_THREADS, N == 64 ? 8 : N == 128 ? 2 : 1) forward(const Forward c) {
    float* const shared = shared_memory();
    float *const r = shared, *const decay = r + CHUNK * ROW, *const k = decay + CHUNK * ROW,
                *const v = k + CHUNK * ROW, *const u = v + CHUNK * ROW, *const fixed = u + N, *const bonus = fixed + N;
    Tile<L> S;
    S.load_long_rows(matrix_of_block<N>(c.state_in), L(thread_number()));
    read_head<EACH>(c.shape, c.u, c.w_raw, u, fixed, FORWARD_THREADS);
    for (int chunk = 0; chunk < num_chunks(c.shape.T); chunk++) {
        const Place place = place_of_block<N>(c.shape);
        const L lay(thread_number());
        const int rows = rows_of_chunk(c.shape.T, chunk);
        if (chunk > 0 && c.chunk_states != nullptr)
            S.store_long_rows(matrix_of_chunk<N>(c.chunk_states, c.shape.T, chunk), lay);
        const unsigned starts = starts_of_chunk(c.starts, place.tokens + chunk * CHUNK, rows);
        // The rows of the chunk before are still read, and those of the head not yet written.
        __syncthreads();
        read_chunk<T, EACH, false>(c.r, c.w_raw, c.k, c.v, nullptr, fixed, {r, decay, k, v, nullptr}, place, chunk,
                                   rows, FORWARD_THREADS);
        __syncthreads();
        sum_bonus(r, k, u, bonus, lay);
        __syncthreads();
        for (int t = 0; t < rows;) {
            if (starts >> t & 1) S.clear();
            for (const int next = next_start(starts, t, rows); t < next; t++)
                forward_token<T>(S, lay, r + t * ROW, decay + t * ROW, k + t * ROW, v + t * ROW, bonus[t],
                                 static_cast<T*>(c.y) + place.of_token(chunk * CHUNK + t));
        }
    }
    S.store_long_rows(matrix_of_block<N>(c.state_out), L(thread_number()));
}

}  // namespace
