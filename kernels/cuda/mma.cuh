// Products of small matrices on tensor cores from sm_80 on: mma.sync m16n8k8 of tf32 numbers, sums in float32.
// A fragment is a matrix of 16 rows and 8 columns over the lanes of a warp, four numbers a lane. The two columns 2c and
// 2c + 1 of a lane are given to the device as its columns c and c + 4: the order in a sum is free, and so one and the
// same fragment serves as first factor, as second factor (transposed) and as sum, and nothing is ever moved between
// lanes. THREE: each number as the sum of two tf32 numbers, and three products of them, as exact as float32 nearly.

#pragma once

#include "device.cuh"

namespace {

#ifdef __CUDACC__
// Rounded to the nearest number of 11 significant bits, ties away from zero.
__device__ __forceinline__ unsigned tf32(float x) {
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}

// c += a b, with the lanes' numbers in the device's order; all lanes of the warp must be here.
__device__ __forceinline__ void mma(float& c0, float& c1, float& c2, float& c3, const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
inline unsigned tf32(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & ~0x1fffu;
}

// What a lane gives: a (g, c), (g + 8, c), (g, c + 4), (g + 8, c + 4) and b (c, g), (c + 4, g), with g = lane / 4 and
// c = lane % 4. It gets c (g, 2c), (g, 2c + 1), (g + 8, 2c), (g + 8, 2c + 1).
struct Given {
    float a[4], b[2];
};

inline void mma(float& c0, float& c1, float& c2, float& c3, const unsigned (&a)[4], unsigned b0, unsigned b1) {
    // Two places a lane, by turns: who is one product ahead of the others overwrites nothing that they still read.
    static thread_local Given places[2][1024];
    static thread_local unsigned char turns[1024];
    const int thread = thread_number(), lane = thread % 32;
    Given* const warp = places[turns[thread] ^= 1] + (thread - lane);
    // The device does not look at the last 13 bits.
    for (int q = 0; q < 4; q++) warp[lane].a[q] = __uint_as_float(a[q] & ~0x1fffu);
    warp[lane].b[0] = __uint_as_float(b0 & ~0x1fffu);
    warp[lane].b[1] = __uint_as_float(b1 & ~0x1fffu);
    __syncwarp();
    float* const sums[4] = {&c0, &c1, &c2, &c3};
    for (int q = 0; q < 4; q++) {
        const int column = lane % 4 * 2 + q % 2;
        for (int k = 0; k < 8; k++)
            *sums[q] += warp[lane / 4 * 4 + k % 4].a[k / 4 * 2 + q / 2] * warp[column * 4 + k % 4].b[k / 4];
    }
}
#endif

// Numbers (g, 2c), (g + 8, 2c), (g, 2c + 1) and (g + 8, 2c + 1) of 16 rows and 8 columns.
struct Fragment {
    float x[4];
};

// The place of a lane's first number, g and 2c, and the first of the 16 rows that are the warp's. Made anew in each
// step: what is computed from it would else be kept in registers through all steps.
struct Lane {
    int row, column, first;
    __device__ __forceinline__ Lane() {
        const int thread = thread_number();
        row = thread % 32 / 4;
        column = thread % 4 * 2;
        first = thread / 32 * 16;
    }
};

// A fragment as a factor; `rest` is what the rounding to tf32 lost.
template <bool THREE>
struct Factor {
    unsigned big[4], rest[4];

    __device__ __forceinline__ explicit Factor(const Fragment& from) {
#pragma unroll
        for (int q = 0; q < 4; q++) {
            big[q] = tf32(from.x[q]);
            if (THREE) rest[q] = tf32(from.x[q] - __uint_as_float(big[q]));
        }
    }
};

// c += a b^T with rows 8 * half to 8 * half + 7 of b.
template <bool THREE>
__device__ __forceinline__ void multiply(Fragment& c, const Factor<THREE>& a, const Factor<THREE>& b, int half) {
    float (&x)[4] = c.x;
    if (THREE) {
        mma(x[0], x[2], x[1], x[3], a.rest, b.big[half], b.big[half + 2]);
        mma(x[0], x[2], x[1], x[3], a.big, b.rest[half], b.rest[half + 2]);
    }
    mma(x[0], x[2], x[1], x[3], a.big, b.big[half], b.big[half + 2]);
}

// ---- 16 rows, 16 columns ----

struct Square {
    Fragment part[2];
};

// c += a b^T over 8 of the columns of a and b.
template <bool THREE>
__device__ __forceinline__ void multiply_half(Square& c, const Factor<THREE>& a, const Factor<THREE>& b) {
    multiply(c.part[0], a, b, 0);
    multiply(c.part[1], a, b, 1);
}

template <bool THREE>
struct SquareFactor {
    Factor<THREE> part[2];
    __device__ __forceinline__ explicit SquareFactor(const Square& from)
        : part{Factor<THREE>(from.part[0]), Factor<THREE>(from.part[1])} {}
};

// Where the second factor has an 8 x 8 block of zeros, which is then left out.
enum Zeros { NOWHERE, ABOVE_DIAGONAL, BELOW_DIAGONAL };

// c += a b^T
template <Zeros ZEROS, bool THREE>
__device__ __forceinline__ void multiply(Square& c, const SquareFactor<THREE>& a, const SquareFactor<THREE>& b) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (ZEROS == ABOVE_DIAGONAL && half == 0 && k == 1) continue;
            if (ZEROS == BELOW_DIAGONAL && half == 1 && k == 0) continue;
            multiply(c.part[half], a.part[k], b.part[k], half);
        }
}

// (I - a)^-1 of a strictly lower triangular a, given with its transpose: (I + a)(I + a^2)(I + a^4)(I + a^8), for a^16
// is zero. The transpose goes along because a second factor is always taken transposed.
template <bool THREE>
__device__ __forceinline__ Square inverse_of_unit_minus(const Square& lower, const Square& upper, const Lane& lane) {
    Square inverse = lower, power = lower, transposed = upper;
#pragma unroll
    for (int q = 0; q < 4; q++)
        if (lane.row == lane.column + q / 2) {
            // Of both halves the diagonal lies in the same lanes: rows g in the first, g + 8 in the second.
            if (q % 2 == 0) inverse.part[0].x[q] += 1.0f;
            else inverse.part[1].x[q] += 1.0f;
        }
#pragma unroll 1
    for (int exponent = 2; exponent <= 8; exponent *= 2) {
        const SquareFactor<THREE> a(power), b(transposed);
        power = transposed = Square{};
        multiply<ABOVE_DIAGONAL>(transposed, b, a);
        if (exponent < 8) multiply<BELOW_DIAGONAL>(power, a, b);
        multiply<BELOW_DIAGONAL>(inverse, SquareFactor<THREE>(inverse), SquareFactor<THREE>(transposed));
    }
    return inverse;
}

}  // namespace
