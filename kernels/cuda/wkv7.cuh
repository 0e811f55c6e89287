// What all kernels of WKV-7 share: the head size, the decay, and what a forward and a backward are given.

#pragma once

#include <cstdint>

#include "rows.cuh"
#include "tile.cuh"

namespace {

constexpr int N = HEAD_SIZE;
using L = Layout<N>;
constexpr float RATE = 0.60653065971f;

// 1 / x for x in [1, 2]: the device's estimate and a step of Newton's, without the call that a division makes for
// numbers too small or too large.
__device__ __forceinline__ float inverse(float x) {
    const float y = __fdividef(1.0f, x);
    return y + y * (1.0f - x * y);
}

// The two sides of 0 apart: no exponential overflows, and no difference of near numbers is formed.
struct Decay {
    static __device__ __forceinline__ float of(float w_raw) {
        const float e = expf(-fabsf(w_raw));
        return expf((w_raw < 0.0f ? e : 1.0f) * inverse(1.0f + e) * -RATE);
    }
    // d w_log / d w_raw
    static __device__ __forceinline__ float slope(float w_raw) {
        const float e = expf(-fabsf(w_raw)), y = inverse(1.0f + e);
        return e * y * y * -RATE;
    }
};

struct Forward {
    Shape shape;
    const void *r, *w_raw, *k, *v, *a, *b;
    const float* state_in;
    const uint8_t* starts;
    void* y;
    float *state_out, *chunk_states, *sa;
};

struct Backward {
    Shape shape;
    const void *r, *w_raw, *k, *v, *a, *b;
    const float* state_in;
    const uint8_t* starts;
    const float *chunk_states, *sa;
    const void* dy;
    const float* dstate_out;
    void *dr, *dw_raw, *dk, *dv, *da, *db;
    float* dstate_in;

    // S before the first token of a chunk; null is zeros.
    __device__ __forceinline__ const float* start_of(int chunk) const {
        return chunk > 0 ? matrix_of_chunk<N>(chunk_states, shape.T, chunk) : matrix_of_block<N>(state_in);
    }
};

}  // namespace
