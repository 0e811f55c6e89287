// The backward of WKV-7; the recurrence and the legend stand in wkv7.cpp. G is the gradient of the state S. Keys fill
// the lanes; sums over values stay in registers, sums over keys are folded W rows at a time. A chunk's states are
// made again from the one before it, then swept from its end. With sa and G of token t:
//   G += dy r^T,  dr = S^T dy,  dk = G^T v,  dv = G k,  db = G^T sa,  dsa = G b
//   da = S'^T dsa,  ddecay = sum over rows of G * S',  G <- G diag(decay) + dsa a^T     (S' is the state before t)

#pragma once

#include <cstdint>
#include <cstring>

#include "folds.hpp"
#include "recurrence.hpp"
#include "rows.hpp"
#include "wkv7.hpp"

namespace {

struct Backward {
    Shape shape;
    const void *r, *w_raw, *k, *v, *a, *b;
    const float* state_in;
    const uint8_t* starts;
    const float *chunk_states, *sa;
    const void* dy;
    const float* dstate_out;
    void *dr, *dw_raw, *dk, *dv, *da, *db;
    float* dstate_in;
};

// A chunk is worked on a few rows of S at a time, so that their states at all its tokens stay in the nearest cache.
constexpr int R = 16;

template <int N>
struct BackwardRows {
    static constexpr int64_t ROWS = CHUNK * N;
    alignas(64) float r[ROWS], decay[ROWS], slope[ROWS], k[ROWS], v[ROWS], a[ROWS], b[ROWS], dy[ROWS], sa[ROWS];
    // Step n of the sweep lies between tokens n - 1 and n. What it reads: decay and a of token n; r and k of token n
    // - 1; decay of n - 1 times b of n - 2. What it writes: the gradients of decay and a of token n; of r, k and b of
    // n - 1.
    alignas(64) float step_in[(CHUNK + 1) * 5 * N], step_out[(CHUNK + 1) * 5 * N];
    // ab[t] = a[t + 1] b[t], rb[t] = r[t] b[t].
    alignas(64) float dv[ROWS], ab[CHUNK], rb[CHUNK], folded_ab[CHUNK * W], folded_rb[CHUNK * W];
    alignas(64) float dsa[CHUNK * R], zero[R], partial[2 * R * W], sums[2 * R];
    alignas(64) float start[N * N], G[N * N];
    // states[t] is a block of S before token t of the chunk, not yet cleared where t starts anew; one more for the end.
    alignas(64) float states[(CHUNK + 1) * R * N];
    Ahead ahead;
};

template <int ROWS>
INLINE void fold_rows(const float* partial, float* sums) {
    for (int i = 0; i < ROWS; i += W) store(sums + i, sums_of_lanes(partial + i * W));
}

// One step of K vectors of keys of the states, as the forward made it.
template <int N, int K>
INLINE void replay_block(BackwardRows<N>& m, int64_t t, bool clear, int first, int j) {
    const float *from = m.states + t * R * N + j, *sa = m.sa + t * N + first, *v = m.v + t * N + first;
    float* const to = m.states + (t + 1) * R * N + j;
    V decay[K], b[K], k[K];
    UNROLL
    for (int q = 0; q < K; q++) {
        decay[q] = clear ? V{} : load(m.decay + t * N + j + q * W);
        b[q] = load(m.b + t * N + j + q * W);
        k[q] = load(m.k + t * N + j + q * W);
    }
    for (int i = 0; i < R; i++) {
        const V sa_i = all(sa[i]), v_i = all(v[i]);
        V s[K];
        UNROLL
        for (int q = 0; q < K; q++) s[q] = load(from + i * N + q * W) * decay[q] + b[q] * sa_i + k[q] * v_i;
        UNROLL
        for (int q = 0; q < K; q++) store(to + i * N + q * W, s[q]);
    }
}

template <int N>
APART void replay_token(BackwardRows<N>& m, int64_t t, bool clear, int first) {
    constexpr int REST = (N / W) % VECTORS;
    int j = 0;
    for (; j + VECTORS * W <= N; j += VECTORS * W) replay_block<N, VECTORS>(m, t, clear, first, j);
    if constexpr (REST > 0) replay_block<N, REST>(m, t, clear, first, j);
}

// dsa[t] = G b with G after token t has entered it, made of sums over the G before: so it is there a whole step
// before it is needed, and no step waits for a fold. `later` is dsa[t + 1].
template <int N>
INLINE void gradient_of_sa(BackwardRows<N>& m, int64_t t, const float* later, float ab, bool clear, int first) {
    for (int i = 0; i < R; i++)
        m.dsa[t * R + i] = clear ? 0.0f : m.sums[R + i] + later[i] * ab + m.dy[t * N + first + i] * m.rb[t];
}

// Step n. LEAVE: G goes back over token n (needs its dsa). ENTER: token n - 1 adds its own output's gradient to G and
// is read. Both meet at the state between the two tokens, so that G and that state are loaded once.
template <int N, int K, bool LEAVE, bool ENTER>
INLINE void sweep_block(BackwardRows<N>& m, int64_t n, int first, int j) {
    // Where there is no token its rows are not looked at, and their addresses not formed.
    const int64_t value = (ENTER ? n - 1 : 0) * N + first;
    const float *S = m.states + n * R * N + j, *dsa = m.dsa + (LEAVE ? n : 0) * R, *in = m.step_in + n * 5 * N + j;
    const float *dy = m.dy + value, *v = m.v + value, *sa = m.sa + value;
    float *G = m.G + first * N + j, *partial = m.partial, *out = m.step_out + n * 5 * N + j;
    V ddecay[K], da[K], dr[K], dk[K], db[K];
    UNROLL
    for (int q = 0; q < K; q++) {
        ddecay[q] = first == 0 ? V{} : load(out + q * W);
        da[q] = first == 0 ? V{} : load(out + N + q * W);
        dr[q] = first == 0 ? V{} : load(out + 2 * N + q * W);
        dk[q] = first == 0 ? V{} : load(out + 3 * N + q * W);
        db[q] = first == 0 ? V{} : load(out + 4 * N + q * W);
    }
    for (int i = 0; i < R; i++, G += N, S += N, partial += W) {
        V sum_k = j == 0 ? V{} : load(partial), sum_b = j == 0 ? V{} : load(partial + R * W);
        const V dsa_i = all(dsa[i]), dy_i = all(dy[i]), v_i = all(v[i]), sa_i = all(sa[i]);
        V g[K];
        UNROLL
        for (int q = 0; q < K; q++) {
            g[q] = load(G + q * W);
            const V s = load(S + q * W);
            if constexpr (LEAVE) {
                ddecay[q] += g[q] * s;
                da[q] += s * dsa_i;
                g[q] = g[q] * load(in + q * W) + load(in + N + q * W) * dsa_i;
            }
            if constexpr (ENTER) {
                dr[q] += s * dy_i;
                g[q] += load(in + 2 * N + q * W) * dy_i;
                sum_k += g[q] * load(in + 3 * N + q * W);
                sum_b += g[q] * load(in + 4 * N + q * W);
                dk[q] += g[q] * v_i;
                db[q] += g[q] * sa_i;
            }
        }
        UNROLL
        for (int q = 0; q < K; q++) store(G + q * W, g[q]);
        if constexpr (ENTER) {
            store(partial, sum_k);
            store(partial + R * W, sum_b);
        }
    }
    UNROLL
    for (int q = 0; q < K; q++) {
        store(out + q * W, ddecay[q]);
        store(out + N + q * W, da[q]);
        store(out + 2 * N + q * W, dr[q]);
        store(out + 3 * N + q * W, dk[q]);
        store(out + 4 * N + q * W, db[q]);
    }
}

template <int N, bool LEAVE, bool ENTER>
APART void sweep_step(BackwardRows<N>& m, int64_t n, const uint8_t* flags, int first) {
    constexpr int REST = (N / W) % VECTORS;
    int j = 0;
    for (; j + VECTORS * W <= N; j += VECTORS * W) sweep_block<N, VECTORS, LEAVE, ENTER>(m, n, first, j);
    if constexpr (REST > 0) sweep_block<N, REST, LEAVE, ENTER>(m, n, first, j);
    // The state before a token that starts anew is not its own, so this was not the gradient of its decay.
    if (LEAVE && resets(flags, n)) std::memset(m.step_out + n * 5 * N, 0, N * sizeof(float));
    if constexpr (ENTER) {
        fold_rows<2 * R>(m.partial, m.sums);
        std::memcpy(m.dv + (n - 1) * N + first, m.sums, R * sizeof(float));
        if (n > 1) gradient_of_sa<N>(m, n - 2, m.dsa + (n - 1) * R, m.ab[n - 2], resets(flags, n - 2), first);
        m.ahead.fetch(n - 1, first / R, N / R);
    }
}

template <int N>
APART void backward_block(BackwardRows<N>& m, int64_t rows, const uint8_t* flags, int first) {
    std::memcpy(m.states, m.start + first * N, R * N * sizeof(float));
    for (int64_t t = 0; t < rows; t++) replay_token<N>(m, t, resets(flags, t), first);
    const int64_t last = rows - 1;
    for (int i = 0; i < R; i++) {
        V sum = V{};
        for (int j = 0; j < N; j += W) sum += load(m.G + (first + i) * N + j) * load(m.b + last * N + j);
        store(m.partial + (R + i) * W, sum);
    }
    fold_rows<2 * R>(m.partial, m.sums);
    gradient_of_sa<N>(m, last, m.zero, 0.0f, resets(flags, last), first);
    sweep_step<N, false, true>(m, rows, flags, first);
    for (int64_t n = last; n > 0; n--) sweep_step<N, true, true>(m, n, flags, first);
    sweep_step<N, true, false>(m, 0, flags, first);
}

// Once for a chunk, for all its blocks: the rows of all steps, and the products of rows.
template <int N>
APART void prepare_chunk(BackwardRows<N>& m, int64_t rows, const uint8_t* flags) {
    std::memset(m.step_in, 0, sizeof m.step_in);
    std::memset(m.folded_ab, 0, sizeof m.folded_ab);
    std::memset(m.folded_rb, 0, sizeof m.folded_rb);
    for (int64_t t = 0; t < rows; t++) {
        // A token that starts anew lets nothing through: G becomes zero.
        const bool clear = resets(flags, t);
        float *leave = m.step_in + t * 5 * N, *enter = leave + 5 * N;
        V ab = V{}, rb = V{};
        for (int j = 0; j < N; j += W) {
            const V r = load(m.r + t * N + j), a = load(m.a + t * N + j), decay = load(m.decay + t * N + j);
            store(leave + j, clear ? V{} : decay);
            store(leave + N + j, a);
            store(enter + 2 * N + j, r);
            store(enter + 3 * N + j, load(m.k + t * N + j));
            rb += r * load(m.b + t * N + j);
            if (t == 0) continue;
            const V before = load(m.b + (t - 1) * N + j);
            ab += a * before;
            store(enter + 4 * N + j, clear ? V{} : decay * before);
        }
        if (t > 0) store(m.folded_ab + (t - 1) * W, ab);
        store(m.folded_rb + t * W, rb);
    }
    fold_rows<CHUNK>(m.folded_ab, m.ab);
    fold_rows<CHUNK>(m.folded_rb, m.rb);
}

template <int N>
APART void read_chunk(const Backward& c, BackwardRows<N>& m, int64_t at, int64_t rows) {
    const Shape& s = c.shape;
    read_rows(s, c.r, at, rows, m.r);
    read_rows(s, c.w_raw, at, rows, m.decay);
    decay_rows(m.decay, m.slope, rows * N);
    read_rows(s, c.k, at, rows, m.k);
    read_rows(s, c.v, at, rows, m.v);
    read_rows(s, c.a, at, rows, m.a);
    read_rows(s, c.b, at, rows, m.b);
    read_rows({s.T, s.H, N, false}, c.sa, at, rows, m.sa);
    if (c.dy != nullptr) read_rows(s, c.dy, at, rows, m.dy);
    else std::memset(m.dy, 0, sizeof m.dy);
}

template <int N>
APART void write_chunk(const Backward& c, BackwardRows<N>& m, int64_t at, int64_t rows) {
    const Shape& s = c.shape;
    for (int64_t t = 0; t < rows; t++)
        for (int64_t j = 0; j < N; j += W) {
            float* ddecay = m.step_out + t * 5 * N + j;
            store(ddecay, load(ddecay) * load(m.slope + t * N + j));
        }
    const float *leave = m.step_out, *enter = leave + 5 * N;
    write_rows(s, c.dw_raw, at, rows, leave, 5 * N);
    write_rows(s, c.da, at, rows, leave + N, 5 * N);
    write_rows(s, c.dr, at, rows, enter + 2 * N, 5 * N);
    write_rows(s, c.dk, at, rows, enter + 3 * N, 5 * N);
    write_rows(s, c.db, at, rows, enter + 4 * N, 5 * N);
    write_rows(s, c.dv, at, rows, m.dv, N);
}

// While chunk n is worked on: where its gradients will go, and what chunk n - 1 will read.
template <int N>
void look_ahead(const Backward& c, BackwardRows<N>& m, int64_t item, int64_t n, int64_t at, int64_t rows) {
    const Shape& s = c.shape;
    m.ahead.count = 0;
    for (const void* to : {c.dr, c.dw_raw, c.dk, c.dv, c.da, c.db}) m.ahead.add(s, to, at, rows, s.bf16);
    if (n == 0) return;
    const int64_t before = at - CHUNK * s.H * N;
    for (const void* from : {c.r, c.w_raw, c.k, c.v, c.a, c.b}) m.ahead.add(s, from, before, CHUNK, s.bf16);
    if (c.dy != nullptr) m.ahead.add(s, c.dy, before, CHUNK, s.bf16);
    m.ahead.add(s, c.sa, before, CHUNK, false);
    if (n == 1) return;
    constexpr int64_t share = N * N * sizeof(float) / CHUNK;
    const float* start = c.chunk_states + (item * ((s.T + CHUNK - 1) / CHUNK - 1) + n - 2) * N * N;
    m.ahead.list[m.ahead.count++] = {reinterpret_cast<const char*>(start), share, share, CHUNK};
}

template <int N>
APART void backward_head(const Backward& c, int64_t item, BackwardRows<N>& m) {
    const Shape& s = c.shape;
    const int64_t batch = item / s.H, head = item % s.H, chunks = (s.T + CHUNK - 1) / CHUNK;
    const int64_t base = (batch * s.T * s.H + head) * N;
    const uint8_t* starts = c.starts == nullptr ? nullptr : c.starts + batch * s.T;
    std::memset(m.zero, 0, sizeof m.zero);
    if (c.dstate_out != nullptr) std::memcpy(m.G, c.dstate_out + item * N * N, sizeof m.G);
    else std::memset(m.G, 0, sizeof m.G);
    for (int64_t n = chunks - 1; n >= 0; n--) {
        const int64_t t = n * CHUNK, rows = t + CHUNK < s.T ? CHUNK : s.T - t, at = base + t * s.H * N;
        const uint8_t* flags = starts == nullptr ? nullptr : starts + t;
        read_chunk<N>(c, m, at, rows);
        if (n > 0) std::memcpy(m.start, c.chunk_states + (item * (chunks - 1) + n - 1) * N * N, sizeof m.start);
        else if (c.state_in != nullptr) std::memcpy(m.start, c.state_in + item * N * N, sizeof m.start);
        else std::memset(m.start, 0, sizeof m.start);
        look_ahead<N>(c, m, item, n, at, rows);
        prepare_chunk<N>(m, rows, flags);
        for (int first = 0; first < N; first += R) backward_block<N>(m, rows, flags, first);
        write_chunk<N>(c, m, at, rows);
    }
    if (c.dstate_in != nullptr) std::memcpy(c.dstate_in + item * N * N, m.G, sizeof m.G);
}

}  // namespace
