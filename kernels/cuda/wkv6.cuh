// What WKV-6 and WKV-5 share, forward and backward: they differ in whether each token has decays of its own.
// The recurrence and the legend stand in wkv6.cu.

#pragma once

#include <cstdint>

#include "device.cuh"
#include "rows.cuh"
#include "tile.cuh"

namespace {

constexpr int N = HEAD_SIZE;
using L = Layout<N>;
// Rows in shared memory lie so far apart that eight lanes with a row each do not wait for one another.
constexpr int ROW = N + 4;

struct Decay {
    static __device__ __forceinline__ float of(float w_raw) { return expf(-expf(w_raw)); }
    // d decay / d w_raw; where decay is 0 the exponential may be infinite.
    static __device__ __forceinline__ float slope(float w_raw, float decay) {
        return decay > 0.0f ? -decay * expf(w_raw) : 0.0f;
    }
};

// The vectors of the block's head: u and, for WKV-5, its decays. The caller waits for them at a barrier.
template <bool EACH>
__device__ __forceinline__ void read_head(const Shape& shape, const float* u, const void* w_raw, float* to_u,
                                          float* to_decay, int threads) {
    const int head = block_number() % shape.H;
    for (int j = thread_number(); j < N; j += threads) {
        to_u[j] = u[static_cast<int64_t>(head) * N + j];
        if (!EACH) to_decay[j] = Decay::of(static_cast<const float*>(w_raw)[static_cast<int64_t>(head) * N + j]);
    }
}

// A chunk's rows of r, decay, k, v and (if LAST) dy, in this order; `fixed` are the decays of WKV-5.
// Rows behind the last token are zeros, their decays 1.
template <typename T, bool EACH, bool LAST>
__device__ __forceinline__ void read_chunk(const void* r, const void* w_raw, const void* k, const void* v,
                                           const void* dy, const float* fixed, float* const (&to)[5],
                                           const Place& place, int chunk, int rows, int threads) {
    const int64_t at = place.of_token(chunk * CHUNK);
    const int thread = thread_number();
    const T *const r_ = static_cast<const T*>(r), *const k_ = static_cast<const T*>(k),
            *const v_ = static_cast<const T*>(v), *const dy_ = static_cast<const T*>(dy);
    constexpr int COUNT = 3 + EACH + LAST;
    const T* from[COUNT] = {};
    float* target[COUNT] = {};
    from[0] = r_, target[0] = to[0];
    if constexpr (EACH) from[1] = static_cast<const T*>(w_raw), target[1] = to[1];
    from[1 + EACH] = k_, target[1 + EACH] = to[2];
    from[2 + EACH] = v_, target[2 + EACH] = to[3];
    if constexpr (LAST) from[3 + EACH] = dy_, target[3 + EACH] = to[4];
    read_rows<N, ROW, COUNT, EACH ? 1 : -1, Decay, true>(from, target, at, place.stride, rows, thread, threads);
    if (!EACH)
        for (int n = thread; n < CHUNK * N; n += threads)
            to[1][n / N * ROW + n % N] = n / N < rows ? fixed[n % N] : 1.0f;
}

}  // namespace
