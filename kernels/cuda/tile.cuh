// How a head's [N, N] matrix lies in the registers of a group of threads, and the sums over it.
// A thread holds a tile of SHORT neighbours along one dimension and LONG elements along the other. The LONG elements
// come in fours, and the fours of GROUPS neighbouring lanes take turns: what these lanes read together is 16 bytes
// from each, side by side. A sum along the long dimension is finished by log2(GROUPS) shuffles among these lanes.

#pragma once

#include "device.cuh"

namespace {

template <int HEAD, int NEIGHBOURS = (HEAD > 64 && HEAD < 128) ? 2 : 4>
struct Layout {
    static_assert(HEAD % 16 == 0 && HEAD <= 128, "head sizes are multiples of 16 up to 128");
    static constexpr int N = HEAD;
    static constexpr int GROUPS = N == 128 ? 8 : 4;
    static constexpr int SHORT = NEIGHBOURS;
    static constexpr int LONG = N / GROUPS, FOURS = LONG / 4;
    static constexpr int THREADS = N / SHORT * GROUPS;
    static constexpr int WARPS = (THREADS + 31) / 32;

    // The lane's place in its group, and the first of its SHORT elements.
    int group, first;

    __device__ __forceinline__ explicit Layout(int thread, int begin = 0)
        : group(thread % GROUPS), first(begin + thread / GROUPS * SHORT) {}

    // Where four number q begins along the long dimension.
    __device__ __forceinline__ int four(int q) const { return 4 * (q * GROUPS + group); }

    // After sum_one each of the first SHORT lanes of a group has the sum of one of their elements: this one.
    __device__ __forceinline__ bool has_one() const { return group < SHORT; }
    __device__ __forceinline__ int one() const { return first + (group & (SHORT - 1)); }

    // The lanes that shuffle together: the warp, or the group where the last warp isn't full.
    __device__ __forceinline__ unsigned lanes() const {
        if constexpr (THREADS % 32 == 0) return ALL_LANES;
        return ((1u << GROUPS) - 1) << (threadIdx.x % 32 / GROUPS * GROUPS);
    }
};

template <typename L>
struct Tile {
    static constexpr int N = L::N;
    float x[L::SHORT][L::LONG];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int s = 0; s < L::SHORT; s++)
#pragma unroll
            for (int l = 0; l < L::LONG; l++) x[s][l] = 0.0f;
    }

    // matrix[short][long] in memory; null gives zeros.
    __device__ __forceinline__ void load_short_rows(const float* matrix, const L& lay) {
        if (matrix == nullptr) return clear();
#pragma unroll
        for (int s = 0; s < L::SHORT; s++)
#pragma unroll
            for (int q = 0; q < L::FOURS; q++) {
                const Floats<4> from = load<4>(matrix + (lay.first + s) * N + lay.four(q));
#pragma unroll
                for (int e = 0; e < 4; e++) x[s][4 * q + e] = from.x[e];
            }
    }

    __device__ __forceinline__ void store_short_rows(float* matrix, const L& lay) const {
#pragma unroll
        for (int s = 0; s < L::SHORT; s++)
#pragma unroll
            for (int q = 0; q < L::FOURS; q++) {
                Floats<4> to;
#pragma unroll
                for (int e = 0; e < 4; e++) to.x[e] = x[s][4 * q + e];
                store<4>(matrix + (lay.first + s) * N + lay.four(q), to);
            }
    }

    // Adds the products with matrix[short][long], over this thread's long elements.
    __device__ __forceinline__ void times_short_rows(const float* matrix, const L& lay, float (&sum)[L::SHORT]) const {
#pragma unroll
        for (int s = 0; s < L::SHORT; s++)
#pragma unroll
            for (int q = 0; q < L::FOURS; q++) {
                const Floats<4> from = load<4>(matrix + (lay.first + s) * N + lay.four(q));
#pragma unroll
                for (int e = 0; e < 4; e++) sum[s] += x[s][4 * q + e] * from.x[e];
            }
    }

    // matrix[long][short] in memory; null gives zeros.
    __device__ __forceinline__ void load_long_rows(const float* matrix, const L& lay) {
        if (matrix == nullptr) return clear();
#pragma unroll
        for (int l = 0; l < L::LONG; l++) {
            const auto from = load<L::SHORT>(matrix + (lay.four(l / 4) + l % 4) * N + lay.first);
#pragma unroll
            for (int s = 0; s < L::SHORT; s++) x[s][l] = from.x[s];
        }
    }

    // Adds the products with matrix[long][short], over this thread's long elements.
    __device__ __forceinline__ void times_long_rows(const float* matrix, const L& lay, float (&sum)[L::SHORT]) const {
#pragma unroll
        for (int l = 0; l < L::LONG; l++) {
            const auto from = load<L::SHORT>(matrix + (lay.four(l / 4) + l % 4) * N + lay.first);
#pragma unroll
            for (int s = 0; s < L::SHORT; s++) sum[s] += x[s][l] * from.x[s];
        }
    }

    __device__ __forceinline__ void store_long_rows(float* matrix, const L& lay) const {
#pragma unroll
        for (int l = 0; l < L::LONG; l++) {
            Floats<L::SHORT> to;
#pragma unroll
            for (int s = 0; s < L::SHORT; s++) to.x[s] = x[s][l];
            store<L::SHORT>(matrix + (lay.four(l / 4) + l % 4) * N + lay.first, to);
        }
    }
};

// Every lane of a group gets the group's sums.
template <typename L>
__device__ __forceinline__ void sum_all(float (&x)[L::SHORT], const L& lay) {
#pragma unroll
    for (int distance = 1; distance < L::GROUPS; distance *= 2)
#pragma unroll
        for (int s = 0; s < L::SHORT; s++) x[s] += __shfl_xor_sync(lay.lanes(), x[s], distance);
}

// The group's sum of element lay.one(): with each shuffle a lane gives away half of its elements.
template <typename L>
__device__ __forceinline__ float sum_one(float (&x)[L::SHORT], const L& lay) {
#pragma unroll
    for (int distance = L::SHORT / 2; distance > 0; distance /= 2) {
        const bool upper = (lay.group & distance) != 0;
#pragma unroll
        for (int s = 0; s < distance; s++) {
            const float given = upper ? x[s] : x[s + distance];
            x[s] = (upper ? x[s + distance] : x[s]) + __shfl_xor_sync(lay.lanes(), given, distance);
        }
    }
#pragma unroll
    for (int distance = L::SHORT; distance < L::GROUPS; distance *= 2)
        x[0] += __shfl_xor_sync(lay.lanes(), x[0], distance);
    return x[0];
}

}  // namespace
