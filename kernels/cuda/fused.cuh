// What the fused operators share on a device: how they are called, four numbers of a row at once, sums over lanes.
// Legend: sizes, tensors and scalars come in the order that each operator's header says; a tensor may be null where it
// says so. Rows are multiples of 16 numbers long. What a sum over all rows needs is summed over pieces of fixed rows
// into places of their own, which the caller adds up; every sum has a fixed order and nothing is added atomically.

#pragma once

#include <cstdint>

#include "device.cuh"

namespace {

constexpr int MOST_SIZES = 5, MOST_TENSORS = 20, MOST_SCALARS = 2;

// A kernel's argument. Tensors are named by constants, so that their addresses are read where they are needed.
struct Call {
    int64_t sizes[MOST_SIZES];
    void* tensors[MOST_TENSORS];
    float scalars[MOST_SCALARS];

    template <typename T>
    __device__ __forceinline__ T* tensor(int n) const {
        return static_cast<T*>(tensors[n]);
    }

    // Row `row` of a tensor of rows of `length`, or null where there is no tensor.
    template <typename T>
    __device__ __forceinline__ T* row(int n, int64_t row, int64_t length) const {
        return tensors[n] == nullptr ? nullptr : static_cast<T*>(tensors[n]) + row * length;
    }
};

// The same number, of which the compiler knows nothing: addresses that follow from it are computed where they are
// needed, instead of being kept in registers from one turn of a loop to the next.
__device__ __forceinline__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// ---- four numbers of a row ----

template <typename T>
struct alignas(4 * sizeof(T)) Pack {
    T x[4];
};

template <typename T>
__device__ __forceinline__ Floats<4> get(const T* from) {
    const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(from);
    Floats<4> result;
#pragma unroll
    for (int i = 0; i < 4; i++) result.x[i] = Number<T>::read(pack.x[i]);
    return result;
}

template <typename T>
__device__ __forceinline__ void put(T* to, const Floats<4>& x) {
    Pack<T> pack;
#pragma unroll
    for (int i = 0; i < 4; i++) pack.x[i] = Number<T>::written(x.x[i]);
    *reinterpret_cast<Pack<T>*>(to) = pack;
}

// Zeros for a lane that has no channels.
template <typename T>
__device__ __forceinline__ Floats<4> get_if(bool works, const T* from) {
    return works ? get(from) : Floats<4>{};
}

__device__ __forceinline__ float sum_of(const Floats<4>& x) { return (x.x[0] + x.x[1]) + (x.x[2] + x.x[3]); }

// The sum over `width` lanes, a power of two, in each of them: pairs are added both ways round, which gives equal bits.
__device__ __forceinline__ float sum_of_lanes(float x, int width) {
    for (int distance = 1; distance < width; distance *= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}

// ---- numbers ----

// 1 / (1 + exp(-x)), and what it lacks of 1, both to the last digits however near to 0 they are.
struct Sigmoid {
    float value, rest;

    __device__ __forceinline__ float slope() const { return value * rest; }
};

__device__ __forceinline__ Sigmoid sigmoid(float x) {
    const float e = expf(x < 0.0f ? x : -x), near_one = 1.0f / (1.0f + e), near_zero = e * near_one;
    return {x < 0.0f ? near_zero : near_one, x < 0.0f ? near_one : near_zero};
}

// The mean and 1/deviation of a norm.
struct Stats {
    float mean, scale;
};

// ---- heads ----

constexpr int HEAD_THREADS = 128;

// A group of lanes, as many as a power of two, has one head of channels, each lane four of them; a block has as many
// heads as fit, for the rows of one piece. Sizes: R, H, N, rows of a piece.
struct Heads {
    int width, c;
    bool works;
    int64_t C, N, piece, begin, end;

    static __host__ __device__ __forceinline__ int width_of(int64_t N) {
        return N > 64 ? 32 : N > 32 ? 16 : N > 16 ? 8 : 4;
    }
    static __host__ __device__ __forceinline__ int64_t tiles_of(int64_t H, int64_t N) {
        const int64_t heads = HEAD_THREADS / width_of(N);
        return (H + heads - 1) / heads;
    }

    __device__ __forceinline__ explicit Heads(const Call& call) : C(call.sizes[1] * call.sizes[2]), N(call.sizes[2]) {
        width = width_of(N);
        const int64_t tiles = tiles_of(call.sizes[1], N), heads = HEAD_THREADS / width;
        const int thread = thread_number(), lane = thread % width;
        const int64_t head = block_number() % tiles * heads + thread / width;
        piece = block_number() / tiles;
        begin = piece * call.sizes[3];
        end = begin + call.sizes[3] < call.sizes[0] ? begin + call.sizes[3] : call.sizes[0];
        works = head < call.sizes[1] && 4 * lane < N;
        c = works ? static_cast<int>(head * N) + 4 * lane : 0;
    }

    __device__ __forceinline__ float sum(const Floats<4>& x) const { return sum_of_lanes(sum_of(x), width); }
};

// ---- from the host ----

inline int64_t pieces_of(int64_t rows, int64_t of_a_piece) { return rows / of_a_piece + (rows % of_a_piece != 0); }

inline Call call_of(const int64_t* sizes, int num_sizes, void* const* tensors, int num_tensors, const float* scalars,
                    int num_scalars) {
    Call call{};
    for (int n = 0; n < num_sizes; n++) call.sizes[n] = sizes[n];
    for (int n = 0; n < num_tensors; n++) call.tensors[n] = tensors[n];
    for (int n = 0; n < num_scalars; n++) call.scalars[n] = scalars[n];
    return call;
}

// 0, or what is wrong: sizes below 0 or of more than an int, a grid of more blocks than there may be, an address that
// four numbers cannot be read from at once. `bytes_only` is the place of a tensor of bytes, or -1.
inline int problem_of(const Call& call, int num_sizes, int64_t blocks, int bytes_only = -1) {
    for (int n = 0; n < num_sizes; n++)
        if (call.sizes[n] < 0 || call.sizes[n] > INT32_MAX) return cudaErrorInvalidValue;
    if (blocks < 0 || blocks > INT32_MAX) return cudaErrorInvalidValue;
    for (int n = 0; n < MOST_TENSORS; n++)
        if (n != bytes_only && !on_16_bytes({call.tensors[n]})) return cudaErrorMisalignedAddress;
    return cudaSuccess;
}

// The blocks for heads, or -1 for sizes that are not taken: heads of 16 to 128 channels, in steps of 16.
inline int64_t blocks_of_heads(const int64_t* sizes) {
    const int64_t R = sizes[0], H = sizes[1], N = sizes[2], of_a_piece = sizes[3];
    if (R < 0 || H < 0 || N < 16 || N > 128 || N % 16 != 0 || of_a_piece <= 0) return -1;
    if (R > INT32_MAX || H > INT32_MAX / N) return -1;
    return pieces_of(R, of_a_piece) * Heads::tiles_of(H, N);
}

}  // namespace

// The head of every exported function. Returns 0 or the CUDA error; waits for nothing. dtype: 0 float32, 1 bfloat16, 2
// float16.
#define OPERATOR(name)                                                                                       \
    extern "C" int name(const int64_t* sizes, int dtype, void* const* tensors, const float* scalars, void* stream)
