// Vectors as wide as one register of the machine that this is compiled for, and float32 or bfloat16 memory read as
// such.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace {

// W floats fill one register; VECTORS of them are worked on side by side.
#if defined(__AVX512F__)
constexpr int W = 16, VECTORS = 4;
constexpr const char* INSTRUCTIONS = "AVX-512";
#elif defined(__AVX__)
constexpr int W = 8, VECTORS = 2;
constexpr const char* INSTRUCTIONS = "AVX";
#else
constexpr int W = 4, VECTORS = 4;
constexpr const char* INSTRUCTIONS = "128-bit vectors";
#endif

typedef float V __attribute__((vector_size(W * sizeof(float))));
typedef int32_t IV __attribute__((vector_size(W * sizeof(float))));
typedef uint32_t UV __attribute__((vector_size(W * sizeof(float))));
typedef uint16_t HV __attribute__((vector_size(W * sizeof(uint16_t))));

// Speed does not hang on the optimiser's taste: what is to be inlined, unrolled or called is marked, and -O2 is enough.
// Called functions hide their inside: gcc 12 took one for pure at head size 32, and left its calls out.
#define INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define APART __attribute__((noinline))
#else
#define APART __attribute__((noipa))
#endif
#define UNROLL _Pragma("GCC unroll 16")

// The same memory is read as floats and as vectors, which the compiler has to be told.
typedef V Shared __attribute__((may_alias));

INLINE V load(const float* p) { return *reinterpret_cast<const Shared*>(p); }
INLINE void store(float* p, V x) { *reinterpret_cast<Shared*>(p) = x; }

template <int... L>
INLINE V all_of(float x, std::integer_sequence<int, L...>) {
    return V{((void)L, x)...};
}

// x in every lane.
INLINE V all(float x) { return all_of(x, std::make_integer_sequence<int, W>{}); }

INLINE V from_bf16(const uint16_t* p) {
    HV half;
    std::memcpy(&half, p, sizeof half);
    return reinterpret_cast<V>(__builtin_convertvector(half, UV) << 16);
}

// To nearest, ties to even. Not a number stays one: rounding could carry its mantissa away.
INLINE void to_bf16(uint16_t* p, V x) {
    const UV bits = reinterpret_cast<UV>(x);
    const UV rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const UV kept = (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded;
    const HV half = __builtin_convertvector(kept, HV);
    std::memcpy(p, &half, sizeof half);
}

}  // namespace
