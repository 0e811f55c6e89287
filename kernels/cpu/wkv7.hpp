// The decay of WKV-7, for its forward and its backward.

#pragma once

#include <cstdint>

#include "exponential.hpp"
#include "lanes.hpp"

namespace {

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
        const V e = exponential(w_raw < 0.0f ? w_raw : -w_raw).whole();
        const V inverse = reciprocal(1.0f + e);
        const V decay = exp_of_decay((w_raw < 0.0f ? e : all(1.0f)) * inverse * -RATE);
        store(rows + n, decay);
        // sigmoid * (1 - sigmoid) = e / (1 + e)^2 on both sides, without a difference of near numbers.
        if (slope != nullptr) store(slope + n, e * inverse * inverse * decay * -RATE);
    }
}

}  // namespace
