// The inputs of a chunk of tokens of one head: rows [t][N], from global memory into shared memory as float32.
// Legend: B batch, T time, H heads, N head size; tensors are [B, T, H, N], so a head's rows lie H * N numbers apart.

#pragma once

#include <cstdint>

#include "device.cuh"

namespace {

// Tokens between two saved states; given by the build, which also sizes the memory for them.
constexpr int CHUNK = CHUNK_LENGTH;
static_assert(CHUNK < 32, "the starts of a chunk are the bits of a word");

// A sequence of 2^31 tokens is refused: counters of 64 bits would take registers that the state needs.
struct Shape {
    int T, H;
};

inline bool fits(int64_t B, int64_t T, int64_t H) {
    constexpr int64_t most = INT32_MAX;
    return B >= 0 && T >= 0 && H >= 0 && T <= most - 2 * CHUNK && H <= most / 128 && (H == 0 || B <= most / H);
}

// Where one head of one sequence lies. Offsets count numbers, and are of 64 bits from the first on.
struct Place {
    int64_t tokens, first;
    int stride;

    __device__ __forceinline__ int64_t of_token(int t) const { return first + static_cast<int64_t>(t) * stride; }
};

template <int N>
__device__ __forceinline__ Place place_of_block(const Shape& shape) {
    const int block = block_number(), batch = block / shape.H, head = block % shape.H;
    const int64_t tokens = static_cast<int64_t>(batch) * shape.T;
    return {tokens, (tokens * shape.H + head) * N, shape.H * N};
}

__host__ __device__ __forceinline__ int num_chunks(int T) { return T / CHUNK + (T % CHUNK != 0); }

__device__ __forceinline__ int rows_of_chunk(int T, int chunk) {
    const int left = T - chunk * CHUNK;
    return left < CHUNK ? left : CHUNK;
}

// The matrix of the block's head in a tensor [B, H, N, N], or null.
template <int N, typename F>
__device__ __forceinline__ F* matrix_of_block(F* tensor) {
    return tensor == nullptr ? nullptr : tensor + static_cast<int64_t>(block_number()) * (N * N);
}

// The same in a tensor [B, H, chunks - 1, N, N]: the state before the first token of a chunk, of any but the first.
template <int N, typename F>
__device__ __forceinline__ F* matrix_of_chunk(F* tensor, int T, int chunk) {
    return tensor + (static_cast<int64_t>(block_number()) * (num_chunks(T) - 1) + chunk - 1) * (N * N);
}

// Bit t: the state is cleared before token t of the chunk.
__device__ __forceinline__ unsigned starts_of_chunk(const uint8_t* starts, int64_t token, int rows) {
    unsigned bits = 0;
    if (starts != nullptr)
        for (int t = 0; t < rows; t++) bits |= static_cast<unsigned>(__ldg(starts + token + t) != 0) << t;
    return bits;
}

// The first token after t that clears the state, or `rows`. Loops run from one such token to the next, so that clearing
// costs nothing where it isn't wanted.
__device__ __forceinline__ int next_start(unsigned starts, int t, int rows) {
    const unsigned later = starts & ~((2u << t) - 1u);
    return later == 0 ? rows : __ffs(static_cast<int>(later)) - 1;
}

struct AsItIs {
    static __device__ __forceinline__ float of(float x) { return x; }
};

// K tensors' rows at once, so that their loads are on their way together; tensor number D becomes Decay::of(it).
// A null tensor gives zeros. With FILL, rows behind the last are set too: to 0, and the decay to 1. In shared memory
// rows lie ROW floats apart.
template <int N, int ROW, int K, int D, typename Decay, bool FILL, typename T>
__device__ __forceinline__ void read_rows(const T* const (&from)[K], float* const (&to)[K], int64_t at,
                                          int stride, int rows, int thread, int threads) {
    constexpr int PACK = PER_LOAD<T>, IN_ROW = N / PACK;
    // Unrolled further, the loads of several turns would need more registers than are left.
#pragma unroll 1
    for (int n = thread; n < (FILL ? CHUNK : rows) * IN_ROW; n += threads) {
        const int t = n / IN_ROW, column = n % IN_ROW * PACK;
        uint4 bits[K];
#pragma unroll
        for (int q = 0; q < K; q++) {
            const T* const row = from[q] + at + static_cast<int64_t>(t) * stride;
            bits[q] = uint4{};
            if (from[q] != nullptr && (!FILL || t < rows))
                bits[q] = __ldg(reinterpret_cast<const uint4*>(row + column));
        }
#pragma unroll
        for (int q = 0; q < K; q++) {
            float x[PACK];
            unpack<T>(bits[q], x);
#pragma unroll
            for (int i = 0; i < PACK; i += 4) {
                Floats<4> out;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    out.x[e] = x[i + e];
                    if (q == D) out.x[e] = FILL && t >= rows ? 1.0f : Decay::of(x[i + e]);
                }
                store<4>(to[q] + t * ROW + column + i, out);
            }
        }
    }
}

template <int N, typename T>
__device__ __forceinline__ void read_rows_of(const T* from, float* to, int64_t at, int stride, int rows, int thread,
                                             int threads) {
    const T* const sources[1] = {from};
    float* const targets[1] = {to};
    read_rows<N, N, 1, -1, AsItIs, false>(sources, targets, at, stride, rows, thread, threads);
}

}  // namespace
