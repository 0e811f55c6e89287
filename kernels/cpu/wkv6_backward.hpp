// The backward of WKV-6 and WKV-5; the recurrence and the legend stand in wkv6.cpp. G is the gradient of the state S
// after token t. Both lie turned here, [i][j], so that keys fill the lanes: sums over values stay in registers, sums
// over keys are folded W at a time. A tile of S goes forward through the chunk once more, then one of G goes back:
//   forward   dr = S' dy                                                            (S' is the state before t)
//   back      dk = G v,  dv = G^T k,  ddecay = sum over values of G * S',  G <- diag(decay) G + r dy^T
// The token's own value adds, with bonus = sum over keys of r u k, and dyv = dy v:
//   dr += u k dyv,  dk += u r dyv,  dv += dy bonus,  du = sum over tokens of r k dyv

#pragma once

#include <cstdint>
#include <cstring>

#include "wkv6.hpp"

namespace {

struct Backward {
    Shape shape;
    const void *r, *w_raw, *k, *v;
    const float *u, *state_in;
    const uint8_t* starts;
    const float* chunk_states;
    const void* dy;
    const float* dstate_out;
    void *dr, *dw_raw, *dk, *dv;
    float *du, *dstate_in;
};

// A tile is one vector of keys of so many values: what a larger one reads and writes would leave the nearest cache.
constexpr int VALUES = W < 8 ? W : 8;

template <int N>
struct BackwardRows {
    static constexpr int64_t ROWS = CHUNK * N;
    alignas(64) float r[ROWS], fade[ROWS], slope[ROWS], k[ROWS], v[ROWS], dy[ROWS];
    alignas(64) float dr[ROWS], ddecay[ROWS], dk[ROWS], dv[ROWS];
    alignas(64) float u[N], bonus[CHUNK], dyv[CHUNK], ones[N], folded[CHUNK * W];
    alignas(64) float start[N * N], G[N * N], flipped[N * N];
    // The tile's S' at all tokens of the chunk, and its sums over keys before they are folded.
    alignas(64) float states[CHUNK * VALUES * W], partial[CHUNK * VALUES * W];
    // Sums over all tokens, wide enough for any number of them.
    double du[N], ddecay_of_head[N];
    Ahead ahead;
};

// The tile of S from value i and key j on goes through the chunk as it did in the forward.
template <int N, bool OWN>
APART void replay_tile(BackwardRows<N>& m, int i, int j, int64_t rows, const uint8_t* flags) {
    V S[VALUES];
    UNROLL
    for (int n = 0; n < VALUES; n++) S[n] = load(m.start + (i + n) * N + j);
    for (int64_t t = 0; t < rows; t++) {
        const float *dy = m.dy + t * N + i, *v = m.v + t * N + i;
        const V k = load(m.k + t * N + j), fade = load(m.fade + (OWN ? t * N : 0) + j);
        V dr = load(m.dr + t * N + j);
        if (resets(flags, t)) {
            UNROLL
            for (int n = 0; n < VALUES; n++) S[n] = V{};
        }
        UNROLL
        for (int n = 0; n < VALUES; n++) {
            store(m.states + (t * VALUES + n) * W, S[n]);
            dr += S[n] * dy[n];
            S[n] += S[n] * fade;
            S[n] += k * v[n];
        }
        store(m.dr + t * N + j, dr);
    }
}

// The tile of G goes back through the chunk.
template <int N, bool OWN>
APART void sweep_tile(BackwardRows<N>& m, int i, int j, int64_t rows, const uint8_t* flags) {
    V G[VALUES];
    UNROLL
    for (int n = 0; n < VALUES; n++) G[n] = load(m.G + (i + n) * N + j);
    for (int64_t t = rows - 1; t >= 0; t--) {
        const float *dy = m.dy + t * N + i, *v = m.v + t * N + i, *S = m.states + t * VALUES * W;
        float* const partial = m.partial + t * VALUES * W;
        const V r = load(m.r + t * N + j), k = load(m.k + t * N + j), fade = load(m.fade + (OWN ? t * N : 0) + j);
        V ddecay = load(m.ddecay + t * N + j), dk = load(m.dk + t * N + j);
        UNROLL
        for (int n = 0; n < VALUES; n++) {
            const V sum = j == 0 ? V{} : load(partial + n * W);
            store(partial + n * W, sum + G[n] * k);
            ddecay += G[n] * load(S + n * W);
            dk += G[n] * v[n];
            G[n] += G[n] * fade;
            G[n] += r * dy[n];
        }
        store(m.ddecay + t * N + j, ddecay);
        store(m.dk + t * N + j, dk);
        // A token that starts anew lets nothing through.
        if (resets(flags, t)) {
            UNROLL
            for (int n = 0; n < VALUES; n++) G[n] = V{};
        }
    }
    UNROLL
    for (int n = 0; n < VALUES; n++) store(m.G + (i + n) * N + j, G[n]);
}

// dv of a tile's values: the partial sums of W / VALUES tokens fill the lanes of one fold.
template <int N>
APART void fold_values(BackwardRows<N>& m, int i, int64_t rows) {
    static_assert(W % VALUES == 0 && CHUNK % W == 0);
    for (int64_t t = 0; t < rows; t += W / VALUES) {
        alignas(64) float sums[W];
        store(sums, sums_of_lanes(m.partial + t * VALUES * W));
        for (int n = 0; n < W / VALUES; n++)
            std::memcpy(m.dv + (t + n) * N + i, sums + n * VALUES, VALUES * sizeof(float));
    }
}

// What the token's own value gives; the tiles add theirs to it.
template <int N>
APART void prepare_chunk(BackwardRows<N>& m, int64_t rows) {
    sum_bonus<N>(m.r, m.u, m.k, rows, m.folded, m.bonus);
    sum_bonus<N>(m.dy, m.ones, m.v, rows, m.folded, m.dyv);
    std::memset(m.ddecay, 0, rows * N * sizeof(float));
    for (int j = 0; j < N; j += W) {
        const V u = load(m.u + j);
        V du = V{};
        for (int64_t t = 0; t < rows; t++) {
            const V r = load(m.r + t * N + j), k = load(m.k + t * N + j), dyv = all(m.dyv[t]);
            store(m.dr + t * N + j, u * k * dyv);
            store(m.dk + t * N + j, u * r * dyv);
            du += r * k * dyv;
        }
        for (int n = 0; n < W; n++) m.du[j + n] += du[n];
    }
}

template <int N, bool OWN>
APART void finish_chunk(BackwardRows<N>& m, int64_t rows) {
    for (int j = 0; j < N; j += W) {
        V of_head = V{};
        for (int64_t t = 0; t < rows; t++) {
            const int64_t n = t * N + j;
            store(m.dv + n, load(m.dv + n) + load(m.dy + n) * m.bonus[t]);
            if constexpr (OWN) store(m.ddecay + n, load(m.ddecay + n) * load(m.slope + n));
            else of_head += load(m.ddecay + n);
        }
        for (int n = 0; n < W; n++) m.ddecay_of_head[j + n] += of_head[n];
    }
}

template <int N, bool OWN>
APART void backward_chunk(BackwardRows<N>& m, int64_t rows, const uint8_t* flags) {
    prepare_chunk<N>(m, rows);
    for (int i = 0; i < N; i += VALUES) {
        for (int64_t t = 0; t < rows; t++) m.ahead.fetch(t, i / VALUES, N / VALUES);
        for (int j = 0; j < N; j += W) {
            replay_tile<N, OWN>(m, i, j, rows, flags);
            sweep_tile<N, OWN>(m, i, j, rows, flags);
        }
        fold_values<N>(m, i, rows);
    }
    finish_chunk<N, OWN>(m, rows);
}

// The state of a head, published [j][i], turned to [i][j] or back; null is a state of zeros.
template <int N>
void turn(BackwardRows<N>& m, const float* from, float* to) {
    if (from == nullptr) {
        std::memset(to, 0, sizeof m.flipped);
        return;
    }
    // It may lie anywhere; a transposition needs the borders of registers.
    std::memcpy(m.flipped, from, sizeof m.flipped);
    transpose<N>(m.flipped, to);
}

template <int N, bool OWN>
APART void read_chunk(const Backward& c, BackwardRows<N>& m, int64_t at, int64_t rows) {
    const Shape& s = c.shape;
    read_rows(s, c.r, at, rows, m.r);
    read_rows(s, c.k, at, rows, m.k);
    read_rows(s, c.v, at, rows, m.v);
    read_fades<N, OWN>(s, c.w_raw, at, rows, m.fade, m.slope);
    if (c.dy != nullptr) read_rows(s, c.dy, at, rows, m.dy);
    else std::memset(m.dy, 0, sizeof m.dy);
}

template <int N, bool OWN>
APART void write_chunk(const Backward& c, const BackwardRows<N>& m, int64_t at, int64_t rows) {
    const Shape& s = c.shape;
    write_rows(s, c.dr, at, rows, m.dr, N);
    write_rows(s, c.dk, at, rows, m.dk, N);
    write_rows(s, c.dv, at, rows, m.dv, N);
    if (OWN) write_rows(s, c.dw_raw, at, rows, m.ddecay, N);
}

// While chunk n is worked on: where its gradients will go, and what chunk n - 1 will read.
template <int N, bool OWN>
void look_ahead(const Backward& c, BackwardRows<N>& m, int64_t item, int64_t n, int64_t at, int64_t rows) {
    const Shape& s = c.shape;
    m.ahead.count = 0;
    for (const void* to : {c.dr, c.dk, c.dv}) m.ahead.add(s, to, at, rows, s.bf16);
    if (OWN) m.ahead.add(s, c.dw_raw, at, rows, s.bf16);
    if (n == 0) return;
    const int64_t before = at - CHUNK * s.H * N;
    for (const void* from : {c.r, c.k, c.v}) m.ahead.add(s, from, before, CHUNK, s.bf16);
    if (OWN) m.ahead.add(s, c.w_raw, before, CHUNK, s.bf16);
    if (c.dy != nullptr) m.ahead.add(s, c.dy, before, CHUNK, s.bf16);
    if (n == 1) return;
    constexpr int64_t share = N * N * sizeof(float) / CHUNK;
    const float* start = c.chunk_states + (item * ((s.T + CHUNK - 1) / CHUNK - 1) + n - 2) * N * N;
    m.ahead.list[m.ahead.count++] = {reinterpret_cast<const char*>(start), share, share, CHUNK};
}

template <int N, bool OWN>
APART void backward_head(const Backward& c, int64_t item, BackwardRows<N>& m) {
    const Shape& s = c.shape;
    const int64_t batch = item / s.H, head = item % s.H, chunks = (s.T + CHUNK - 1) / CHUNK;
    const int64_t base = (batch * s.T * s.H + head) * N;
    const uint8_t* starts = c.starts == nullptr ? nullptr : c.starts + batch * s.T;
    std::memcpy(m.u, c.u + head * N, sizeof m.u);
    std::memset(m.folded, 0, sizeof m.folded);
    for (int j = 0; j < N; j++) {
        m.ones[j] = 1.0f;
        m.du[j] = m.ddecay_of_head[j] = 0.0;
    }
    if constexpr (!OWN) read_head_fades<N>(c.w_raw, head, m.fade, m.slope);
    turn<N>(m, c.dstate_out == nullptr ? nullptr : c.dstate_out + item * N * N, m.G);
    for (int64_t n = chunks - 1; n >= 0; n--) {
        const int64_t t = n * CHUNK, rows = t + CHUNK < s.T ? CHUNK : s.T - t, at = base + t * s.H * N;
        read_chunk<N, OWN>(c, m, at, rows);
        const float* start = n > 0 ? c.chunk_states + (item * (chunks - 1) + n - 1) * N * N : c.state_in;
        if (n == 0 && start != nullptr) start += item * N * N;
        turn<N>(m, start, m.start);
        look_ahead<N, OWN>(c, m, item, n, at, rows);
        backward_chunk<N, OWN>(m, rows, starts == nullptr ? nullptr : starts + t);
        write_chunk<N, OWN>(c, m, at, rows);
    }
    for (int j = 0; j < N; j++) c.du[item * N + j] = static_cast<float>(m.du[j]);
    if (!OWN)
        for (int j = 0; j < N; j++)
            static_cast<float*>(c.dw_raw)[item * N + j] = static_cast<float>(m.ddecay_of_head[j] * m.slope[j]);
    if (c.dstate_in == nullptr) return;
    transpose<N>(m.G, m.flipped);
    std::memcpy(c.dstate_in + item * N * N, m.flipped, sizeof m.flipped);
}

}  // namespace
