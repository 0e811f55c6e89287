// What the forward and the backward of WKV-7 share: the chunk, the decay, the resets.

#pragma once

#include <cstdint>

#include "lanes.hpp"

namespace {

// Tokens between two saved states; given by the build, which also sizes the memory for them.
constexpr int64_t CHUNK = CHUNK_LENGTH;

// exp(x) for x in [-87, 0], to two units in the last place; lower x count as -87.
INLINE V exp_not_positive(V x) {
    x = x < -87.0f ? all(-87.0f) : x;
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
    const V shifted = x * 1.44269504f + 12582912.0f;
    const V n = shifted - 12582912.0f;
    const V f = x - n * 0.693359375f + n * 2.12194440e-4f;
    V p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    return p * reinterpret_cast<V>((reinterpret_cast<IV>(shifted) + 127) << 23);
}

// exp(x) for x in [-0.61, 0], where a decay lies: there a polynomial of relative error 1e-9 is enough.
INLINE V exp_of_decay(V x) {
    V p = x * 1.025012658e-3f + 8.042956654e-3f;
    p = p * x + 4.154892455e-2f;
    p = p * x + 1.666421017e-1f;
    p = p * x + 4.999976094e-1f;
    p = p * x + 9.999999213e-1f;
    return p * x + 1.0f;
}

// 1 / x for x in [1, 2]: a parabola good to 1%, then two steps of Newton's; a division takes several times as long.
INLINE V reciprocal(V x) {
    V y = (x * 0.323232103f - 1.454544784f) * x + 2.121211638f;
    y += y * (1.0f - x * y);
    return y + y * (1.0f - x * y);
}

constexpr float RATE = 0.60653065971f;

// In place: w_raw becomes decay; slope, if wanted, becomes d decay / d w_raw. count is a multiple of W.
APART void decay_rows(float* rows, float* slope, int64_t count) {
    for (int64_t n = 0; n < count; n += W) {
        const V w_raw = load(rows + n);
        const V e = exp_not_positive(w_raw < 0.0f ? w_raw : -w_raw);
        const V inverse = reciprocal(1.0f + e);
        const V decay = exp_of_decay((w_raw < 0.0f ? e : all(1.0f)) * inverse * -RATE);
        store(rows + n, decay);
        // sigmoid * (1 - sigmoid) = e / (1 + e)^2 on both sides, without a difference of near numbers.
        if (slope != nullptr) store(slope + n, e * inverse * inverse * decay * -RATE);
    }
}

inline bool resets(const uint8_t* starts, int64_t t) { return starts != nullptr && starts[t] != 0; }

}  // namespace
