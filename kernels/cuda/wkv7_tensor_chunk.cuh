// A chunk of the WKV-7 on tensor cores: its rows scaled by the decays from its middle on, and its squares of scores.
// Legend and formulas stand in wkv7_tensor.cu.

#pragma once

#include "wkv7_tensor.cuh"

namespace {

// log(decay), as in Decay.
__device__ __forceinline__ float log_decay(float w_raw) {
    const float e = expf(-fabsf(w_raw));
    return (w_raw < 0.0f ? e : 1.0f) * inverse(1.0f + e) * -RATE;
}

// Half of a chunk's tokens, from its middle outwards, of key or value n % N: what thread n reads.
struct Column {
    Tokens tokens;
    int key, half;

    __device__ __forceinline__ Column(const Shape& shape, int chunk)
        : tokens(shape, chunk), key(thread_number() % N), half(thread_number() / N) {}

    // Token number n from the middle outwards.
    __device__ __forceinline__ int token(int n) const { return half == 0 ? CHUNK / 2 - 1 - n : CHUNK / 2 + n; }

    template <typename T>
    __device__ __forceinline__ float read(const void* tensor, int t) const {
        if (tensor == nullptr || t >= tokens.rows) return 0.0f;
        return Number<T>::read(__ldg(static_cast<const T*>(tensor) + tokens.of(t) + key));
    }

    template <typename T>
    __device__ __forceinline__ void copy(const void* tensor, float* to) const {
        float x[CHUNK / 2];
#pragma unroll
        for (int n = 0; n < CHUNK / 2; n++) x[n] = read<T>(tensor, token(n));
#pragma unroll
        for (int n = 0; n < CHUNK / 2; n++) to[row(token(n)) * ROW + key] = x[n];
    }

    // scale[n + 1] is the decay from the middle to the far side of token n, scale[n] that to its near side.
    template <typename T>
    __device__ __forceinline__ void decays(const void* w_raw, float (&scale)[CHUNK / 2 + 1]) const {
        float sum = 0.0f;
        scale[0] = 1.0f;
#pragma unroll
        for (int n = 0; n < CHUNK / 2; n++) {
            const int t = token(n);
            if (t < tokens.rows) sum += log_decay(read<T>(w_raw, t));
            scale[n + 1] = expf(half == 0 ? -sum : sum);
        }
    }

    // Rows times the decays from the middle to the state before the tokens (BEFORE) or after them, or over those.
    template <typename T, bool BEFORE, bool OVER>
    __device__ __forceinline__ void copy_scaled(const void* tensor, const float (&scale)[CHUNK / 2 + 1],
                                                float* to) const {
        float x[CHUNK / 2];
#pragma unroll
        for (int n = 0; n < CHUNK / 2; n++) x[n] = read<T>(tensor, token(n));
#pragma unroll
        for (int n = 0; n < CHUNK / 2; n++) {
            const float by = (half == 0) == BEFORE ? scale[n + 1] : scale[n];
            to[row(token(n)) * ROW + key] = x[n] * (OVER ? inverse(by) : by);
        }
    }
};

// Rows [token][key], scaled, and squares [late token][early token]: the first of what a kernel has in shared memory.
struct Chunk {
    float *a, *r, *b, *k;
    // (I - scores of a and b)^-1; the scores of a and k, r and k, r and b.
    float *x, *ak, *rk, *rb;

    __device__ __forceinline__ explicit Chunk(float* shared)
        : a(shared), r(a + ROWS_OF_CHUNK), b(r + ROWS_OF_CHUNK), k(b + ROWS_OF_CHUNK), x(k + ROWS_OF_CHUNK),
          ak(x + SQUARE), rk(ak + SQUARE), rb(rk + SQUARE) {}
};

constexpr int CHUNK_FLOATS = 4 * ROWS_OF_CHUNK + 4 * SQUARE;

// Each of four warps makes one square, or fewer warps make several.
template <bool THREE>
__device__ __forceinline__ void make_scores(const Chunk& m, const Masks& masks) {
    const Lane lane;
    for (int job = warp_number(); job < 4; job += WARPS) {
        const bool strict = job < 2;
        const float* const left = strict ? m.a : m.r;
        const float* const right = job == 1 || job == 2 ? m.k : m.b;
        Square scores{};
        multiply_rows<THREE>(scores, left, right, lane);
        keep_seen<false>(scores, lane, masks, strict);
        if (job == 0) {
            Square transposed{};
            multiply_rows<THREE>(transposed, right, left, lane);
            keep_seen<true>(transposed, lane, masks, strict);
            scores = inverse_of_unit_minus<THREE>(scores, transposed, lane);
        }
        store_square(m.x + job * SQUARE, scores, lane);
    }
}

}  // namespace
