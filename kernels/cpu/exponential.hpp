// exp(x) in two parts, from which both exp(x) and exp(x) - 1 come without a loss of digits.

#pragma once

#include <cstdint>

#include "lanes.hpp"

namespace {

// scale * (1 + rest), scale a power of two.
struct Exponential {
    V scale, rest;

    INLINE V whole() const { return scale * rest + scale; }
    INLINE V minus_one() const { return scale * rest + (scale - 1.0f); }
};

// exp(x) for x in [-80, 80], to two units in the last place; lower x count as -80. Any lower, and the parts would be
// numbers below the normal ones, which cost a processor a hundred times as much.
INLINE Exponential exponential(V x) {
    x = x < -80.0f ? all(-80.0f) : x;
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
    const V shifted = x * 1.44269504f + 12582912.0f;
    const V n = shifted - 12582912.0f;
    const V f = x - n * 0.693359375f + n * 2.12194440e-4f;
    V p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    return {reinterpret_cast<V>((reinterpret_cast<IV>(shifted) + 127) << 23), p * f * f + f};
}

}  // namespace
