// Sums and transpositions across the lanes of vectors, W vectors at a time.

#pragma once

#include <utility>

#include "lanes.hpp"

namespace {

// Two vectors exchanged across lane bit D: lanes without the bit come from x, the others from y. KEEP: each from its
// own place; otherwise from its partner's, lane ^ D.
template <int D, bool KEEP, int... L>
INLINE V exchange(V x, V y, std::integer_sequence<int, L...>) {
#if defined(__clang__)
    return __builtin_shufflevector(x, y, ((L & D ? W : 0) + (KEEP ? L : (L ^ D)))...);
#else
    return __builtin_shuffle(x, y, IV{((L & D ? W : 0) + (KEEP ? L : (L ^ D)))...});
#endif
}

template <int D>
INLINE V fold(V x, V y) {
    constexpr auto lanes = std::make_integer_sequence<int, W>{};
    return exchange<D, true>(x, y, lanes) + exchange<D, false>(x, y, lanes);
}

// Lane l of the result is the sum over all lanes of the l-th vector at p (W vectors of W floats).
template <int D>
INLINE void fold_all(V* x) {
    UNROLL
    for (int n = 0; n < D; n++) x[n] = fold<D>(x[n], x[n + D]);
    if constexpr (D > 1) fold_all<D / 2>(x);
}

INLINE V sums_of_lanes(const float* p) {
    V x[W];
    UNROLL
    for (int n = 0; n < W; n++) x[n] = load(p + n * W);
    fold_all<W / 2>(x);
    return x[0];
}

template <int D, int... L>
INLINE void swap_blocks(V& x, V& y, std::integer_sequence<int, L...>) {
#if defined(__clang__)
    V low = __builtin_shufflevector(x, y, (L & D ? W + (L ^ D) : L)...);
    V high = __builtin_shufflevector(x, y, (L & D ? W + L : (L ^ D))...);
#else
    V low = __builtin_shuffle(x, y, IV{(L & D ? W + (L ^ D) : L)...});
    V high = __builtin_shuffle(x, y, IV{(L & D ? W + L : (L ^ D))...});
#endif
    x = low;
    y = high;
}

template <int D>
INLINE void transpose_tile(V* x) {
    UNROLL
    for (int n = 0; n < W; n++)
        if (!(n & D)) swap_blocks<D>(x[n], x[n + D], std::make_integer_sequence<int, W>{});
    if constexpr (D > 1) transpose_tile<D / 2>(x);
}

// to[j][i] = from[i][j]; both lie on register boundaries.
template <int N>
APART void transpose(const float* from, float* to) {
    for (int i = 0; i < N; i += W)
        for (int j = 0; j < N; j += W) {
            V x[W];
            UNROLL
            for (int n = 0; n < W; n++) x[n] = load(from + (i + n) * N + j);
            transpose_tile<W / 2>(x);
            UNROLL
            for (int n = 0; n < W; n++) store(to + (j + n) * N + i, x[n]);
        }
}

}  // namespace
