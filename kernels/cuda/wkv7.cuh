// What the forward and the backward of WKV-7 share: the head size and the decay.

#pragma once

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

}  // namespace
