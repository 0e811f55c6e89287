// The tokens of one piece where a token looks at the one before it: a run of one sequence's tokens.

#pragma once

#include <cstdint>

#include "device.cuh"
#include "fused.cuh"

namespace {

// A run of more rows is refused: there is room for so many rows' numbers in shared memory.
constexpr int64_t MOST_ROWS = 4096;

// From the sizes B, T, C, mixed outputs, rows of a piece.
struct Run {
    int C, T, piece, sequence, begin, end;
    int64_t first_row;

    __device__ __forceinline__ Run(const Call& call, int piece)
        : C(static_cast<int>(call.sizes[2])), T(static_cast<int>(call.sizes[1])), piece(piece) {
        const int length = static_cast<int>(call.sizes[4]), of_a_sequence = T / length + (T % length != 0);
        sequence = piece / of_a_sequence;
        begin = piece % of_a_sequence * length;
        end = T - begin < length ? T : begin + length;
        first_row = static_cast<int64_t>(sequence) * T;
    }

    __device__ __forceinline__ int64_t row(int t) const { return first_row + t; }
    // Where channel c of the sequence lies in a tensor [B, C].
    __device__ __forceinline__ int64_t of_sequence(int c) const { return static_cast<int64_t>(sequence) * C + c; }
    __device__ __forceinline__ bool marked(const uint8_t* starts, int t) const {
        return starts != nullptr && __ldg(starts + first_row + t) != 0;
    }
};

// How many pieces there are, or -1 for sizes that are not taken. Offsets among rows of parameters are ints.
inline int64_t pieces_of_sequences(const int64_t* sizes) {
    const int64_t B = sizes[0], T = sizes[1], C = sizes[2], run = sizes[4];
    if (B < 0 || T < 0 || C < 0 || C % 16 != 0 || C > INT32_MAX / 16 || run <= 0 || run > MOST_ROWS) return -1;
    if (T > INT32_MAX - MOST_ROWS || B > INT32_MAX) return -1;
    return B * pieces_of(T, run);
}

}  // namespace
