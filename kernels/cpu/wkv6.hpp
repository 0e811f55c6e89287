// WKV-6 and WKV-5, the forward and what it shares with the backward; the recurrence and the legend stand in wkv6.cpp.
// OWN says whether each token has a decay of its own (WKV-6) or a channel one for all its tokens (WKV-5).
// A tile of the state, some keys times K vectors of values, stays in registers for all tokens of a chunk.

#pragma once

#include <cstdint>
#include <cstring>

#include "exponential.hpp"
#include "folds.hpp"
#include "recurrence.hpp"
#include "rows.hpp"

namespace {

struct Forward {
    Shape shape;
    const void *r, *w_raw, *k, *v;
    const float *u, *state_in;
    const uint8_t* starts;
    void* y;
    float *state_out, *chunk_states;
};

// Keys of a tile that is K vectors wide. It fills half of the registers; the other half is for rows and sums.
constexpr int tile_keys(int K) { return (W == 16 ? 16 : 8) / (K == 3 ? 4 : K); }

template <int N>
struct ForwardRows {
    alignas(64) float r[CHUNK * N], fade[CHUNK * N], k[CHUNK * N], v[CHUNK * N], y[CHUNK * N];
    alignas(64) float u[N], bonus[CHUNK], folded[CHUNK * W], state[N * N];
    Ahead ahead;
};

// In place: w_raw becomes fade = decay - 1; slope, if wanted, becomes d decay / d w_raw. count is a multiple of W.
// Near 1 a float32 is too coarse for a decay: rounded, it would be wrong by up to 3e-8 in the same way at every token.
APART void fade_rows(float* rows, float* slope, int64_t count) {
    for (int64_t n = 0; n < count; n += W) {
        const V w_raw = load(rows + n);
        // From log(80) on the decay is below 2e-35, and a larger w_raw changes nothing.
        const V e = exponential(w_raw > 4.382f ? all(4.382f) : w_raw).whole();
        const Exponential decay = exponential(-e);
        store(rows + n, decay.minus_one());
        if (slope != nullptr) store(slope + n, -e * decay.whole());
    }
}

// The decays of one head: rows of the chunk's tokens, or the one row of WKV-5, which is there from the start.
template <int N, bool OWN>
INLINE void read_fades(const Shape& s, const void* w_raw, int64_t at, int64_t rows, float* fade, float* slope) {
    if constexpr (!OWN) return;
    read_rows(s, w_raw, at, rows, fade);
    fade_rows(fade, slope, rows * N);
}

template <int N>
void read_head_fades(const void* w_raw, int64_t head, float* fade, float* slope) {
    std::memcpy(fade, static_cast<const float*>(w_raw) + head * N, N * sizeof(float));
    fade_rows(fade, slope, N);
}

// bonus[t], the sum over keys of r u k: what the token's own value is read with.
template <int N>
APART void sum_bonus(const float* r, const float* u, const float* k, int64_t rows, float* folded, float* bonus) {
    for (int64_t t = 0; t < rows; t++) {
        V sum = V{};
        for (int j = 0; j < N; j += W) sum += load(r + t * N + j) * load(u + j) * load(k + t * N + j);
        store(folded + t * W, sum);
    }
    for (int64_t t = 0; t < rows; t += W) store(bonus + t, sums_of_lanes(folded + t * W));
}

// One tile, from key j and value i on, through `rows` tokens, with the starts of these tokens (or null).
template <int N, int K, bool OWN>
INLINE void forward_tile(ForwardRows<N>& m, int j, int i, int64_t rows, const uint8_t* flags, int tile, int tiles) {
    constexpr int KEYS = tile_keys(K);
    V S[KEYS][K];
    UNROLL
    for (int n = 0; n < KEYS; n++)
        UNROLL
        for (int q = 0; q < K; q++) S[n][q] = load(m.state + (j + n) * N + i + q * W);
    for (int64_t t = 0; t < rows; t++) {
        const float *r = m.r + t * N + j, *k = m.k + t * N + j, *fade = m.fade + (OWN ? t * N : 0) + j;
        if (resets(flags, t)) {
            UNROLL
            for (int n = 0; n < KEYS; n++)
                UNROLL
                for (int q = 0; q < K; q++) S[n][q] = V{};
        }
        m.ahead.fetch(t, tile, tiles);
        V v[K], y[K];
        UNROLL
        for (int q = 0; q < K; q++) {
            v[q] = load(m.v + t * N + i + q * W);
            y[q] = load(m.y + t * N + i + q * W);
        }
        UNROLL
        for (int n = 0; n < KEYS; n++) {
            const V r_j = all(r[n]), k_j = all(k[n]), fade_j = all(fade[n]);
            UNROLL
            for (int q = 0; q < K; q++) {
                y[q] += S[n][q] * r_j;
                S[n][q] += S[n][q] * fade_j;
                S[n][q] += v[q] * k_j;
            }
        }
        UNROLL
        for (int q = 0; q < K; q++) store(m.y + t * N + i + q * W, y[q]);
    }
    UNROLL
    for (int n = 0; n < KEYS; n++)
        UNROLL
        for (int q = 0; q < K; q++) store(m.state + (j + n) * N + i + q * W, S[n][q]);
}

template <int N, int K, bool OWN>
APART void forward_tiles(ForwardRows<N>& m, int i, int64_t rows, const uint8_t* flags) {
    constexpr int KEYS = tile_keys(K);
    for (int j = 0; j < N; j += KEYS) forward_tile<N, K, OWN>(m, j, i, rows, flags, j / KEYS, N / KEYS);
    // What was fetched for the first values is fetched for all.
    m.ahead.count = 0;
}

template <int N, bool OWN>
APART void forward_chunk(ForwardRows<N>& m, int64_t rows, const uint8_t* flags) {
    constexpr int REST = (N / W) % VECTORS;
    sum_bonus<N>(m.r, m.u, m.k, rows, m.folded, m.bonus);
    for (int64_t t = 0; t < rows; t++)
        for (int i = 0; i < N; i += W) store(m.y + t * N + i, load(m.v + t * N + i) * m.bonus[t]);
    int i = 0;
    for (; i + VECTORS * W <= N; i += VECTORS * W) forward_tiles<N, VECTORS, OWN>(m, i, rows, flags);
    if constexpr (REST > 0) forward_tiles<N, REST, OWN>(m, i, rows, flags);
}

template <int N, bool OWN>
APART void forward_head(const Forward& c, int64_t item, ForwardRows<N>& m) {
    const Shape& s = c.shape;
    const int64_t batch = item / s.H, head = item % s.H, chunks = (s.T + CHUNK - 1) / CHUNK;
    const int64_t base = (batch * s.T * s.H + head) * N;
    const uint8_t* starts = c.starts == nullptr ? nullptr : c.starts + batch * s.T;
    if (c.state_in != nullptr) std::memcpy(m.state, c.state_in + item * N * N, sizeof m.state);
    else std::memset(m.state, 0, sizeof m.state);
    std::memcpy(m.u, c.u + head * N, sizeof m.u);
    std::memset(m.folded, 0, sizeof m.folded);
    if constexpr (!OWN) read_head_fades<N>(c.w_raw, head, m.fade, nullptr);
    for (int64_t n = 0; n < chunks; n++) {
        const int64_t t = n * CHUNK, rows = t + CHUNK < s.T ? CHUNK : s.T - t, at = base + t * s.H * N;
        if (c.chunk_states != nullptr && n > 0)
            std::memcpy(c.chunk_states + (item * (chunks - 1) + n - 1) * N * N, m.state, sizeof m.state);
        read_rows(s, c.r, at, rows, m.r);
        read_rows(s, c.k, at, rows, m.k);
        read_rows(s, c.v, at, rows, m.v);
        read_fades<N, OWN>(s, c.w_raw, at, rows, m.fade, nullptr);
        m.ahead.count = 0;
        const int64_t left = s.T - t - rows, next = left < CHUNK ? left : CHUNK;
        for (const void* from : {c.r, c.k, c.v}) m.ahead.add(s, from, at + CHUNK * s.H * N, next, s.bf16);
        if (OWN) m.ahead.add(s, c.w_raw, at + CHUNK * s.H * N, next, s.bf16);
        m.ahead.add(s, c.y, at, rows, s.bf16);
        forward_chunk<N, OWN>(m, rows, starts == nullptr ? nullptr : starts + t);
        write_rows(s, c.y, at, rows, m.y, N);
    }
    std::memcpy(c.state_out + item * N * N, m.state, sizeof m.state);
}

}  // namespace
