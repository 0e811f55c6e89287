// WKV-7 on the CPU, forward and backward, for float32 and bfloat16 inputs with float32 states.
// Legend: B batch, T time, H heads, N head size; S is the state of one head, S[i][j] with i the value and j the key index.
//   w_log = -exp(-1/2) * sigmoid(w_raw),  decay = exp(w_log),  sa = S a
//   S <- S diag(decay) + sa b^T + v k^T,  y = S r   (read after the update; a set `starts` flag clears S before its token)
// Saved for the backward: sa of every token, and S before tokens CHUNK, 2*CHUNK, ...; the states in between are computed
// again, never divided out.
// One (batch, head) pair is one piece of work and its sums have a fixed order: the bits don't depend on the thread count.

#include <cstdint>
#include <cstring>
#include <utility>

#include "lanes.hpp"
#include "threads.hpp"

namespace {

constexpr int64_t CHUNK = 16;
constexpr int BLOCK = 16;

// Two vectors exchanged across lane bit D. keep: lanes without the bit come from x, the others from y, each at its own place.
// Otherwise each lane takes its partner (lane ^ D) of the same vector.
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

// ---- inputs and outputs: [B, T, H, N] in float32 or bfloat16, worked on as float32 rows of one head ----

struct Shape {
    int64_t T, H, N;
    bool bf16;
};

APART void read_rows(const Shape& s, const void* from, int64_t offset, int64_t rows, float* to) {
    for (int64_t t = 0; t < rows; t++) {
        const int64_t at = offset + t * s.H * s.N;
        float* row = to + t * s.N;
        if (!s.bf16) {
            std::memcpy(row, static_cast<const float*>(from) + at, s.N * sizeof(float));
            continue;
        }
        const uint16_t* p = static_cast<const uint16_t*>(from) + at;
        for (int64_t n = 0; n < s.N; n += W) store(row + n, from_bf16(p + n));
    }
}

APART void write_rows(const Shape& s, void* to, int64_t offset, int64_t rows, const float* from) {
    for (int64_t t = 0; t < rows; t++) {
        const int64_t at = offset + t * s.H * s.N;
        const float* row = from + t * s.N;
        if (!s.bf16) {
            std::memcpy(static_cast<float*>(to) + at, row, s.N * sizeof(float));
            continue;
        }
        uint16_t* p = static_cast<uint16_t*>(to) + at;
        for (int64_t n = 0; n < s.N; n += W) to_bf16(p + n, load(row + n));
    }
}

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

// The rows that the next chunk will read, fetched into the cache while this one is worked on.
struct Ahead {
    struct Rows {
        const char* first;
        int64_t bytes, stride;
    };
    Rows list[9];
    int count = 0;
    int64_t rows = 0;

    void add(const Shape& s, const void* from, int64_t offset, bool bf16) {
        const int64_t size = bf16 ? 2 : 4;
        list[count++] = {static_cast<const char*>(from) + offset * size, s.N * size, s.H * s.N * size};
    }

    INLINE void fetch(int64_t row) const {
        if (row >= rows) return;
        for (int n = 0; n < count; n++)
            for (int64_t at = 0; at < list[n].bytes; at += 64)
                __builtin_prefetch(list[n].first + row * list[n].stride + at, 0, 2);
    }
};

inline bool resets(const uint8_t* starts, int64_t t) { return starts != nullptr && starts[t] != 0; }

// ---- forward: the state lies transposed, S[j][i], so that values fill the lanes and no sum crosses them ----

struct Forward {
    Shape shape;
    const void *r, *w_raw, *k, *v, *a, *b;
    const float* state_in;
    const uint8_t* starts;
    void* y;
    float *state_out, *chunk_states, *sa;
};

template <int N>
struct ForwardRows {
    alignas(64) float r[CHUNK * N], decay[CHUNK * N], k[CHUNK * N], v[CHUNK * N], b[CHUNK * N], y[CHUNK * N];
    // One row more: each step also takes the product of the new state with the next token's a.
    alignas(64) float a[(CHUNK + 1) * N];
    // sa of every token, and of the one to come.
    alignas(64) float sa[(CHUNK + 1) * N];
    alignas(64) float state[N * N], flipped[N * N];
    Ahead ahead;
};

// K vectors of values, from value i on, through `rows` tokens, with the starts of these tokens (or null).
template <int N, int K>
INLINE void forward_block(ForwardRows<N>& m, int i, int64_t rows, const uint8_t* flags) {
    V sa[K];
    UNROLL
    for (int q = 0; q < K; q++) sa[q] = load(m.sa + i + q * W);
    float* const S = m.state + i;
    for (int64_t t = 0; t < rows; t++) {
        const float *r = m.r + t * N, *decay = m.decay + t * N, *k = m.k + t * N, *b = m.b + t * N, *next = m.a + (t + 1) * N;
        if (resets(flags, t)) {
            UNROLL
            for (int q = 0; q < K; q++) sa[q] = V{};
            for (int j = 0; j < N; j++)
                UNROLL
                for (int q = 0; q < K; q++) store(S + j * N + q * W, V{});
        }
        if (i == 0) m.ahead.fetch(t);
        V v[K], y[K], product[K];
        UNROLL
        for (int q = 0; q < K; q++) {
            store(m.sa + t * N + i + q * W, sa[q]);
            v[q] = load(m.v + t * N + i + q * W);
            y[q] = product[q] = V{};
        }
        for (int j = 0; j < N; j++) {
            // All of a row is read before any of it is written: what a store might change would be read again.
            const V decay_j = all(decay[j]), b_j = all(b[j]), k_j = all(k[j]), r_j = all(r[j]), next_j = all(next[j]);
            V s[K];
            UNROLL
            for (int q = 0; q < K; q++) s[q] = load(S + j * N + q * W);
            UNROLL
            for (int q = 0; q < K; q++) {
                s[q] *= decay_j;
                s[q] += sa[q] * b_j;
                s[q] += v[q] * k_j;
                y[q] += s[q] * r_j;
                product[q] += s[q] * next_j;
            }
            UNROLL
            for (int q = 0; q < K; q++) store(S + j * N + q * W, s[q]);
        }
        UNROLL
        for (int q = 0; q < K; q++) {
            store(m.y + t * N + i + q * W, y[q]);
            sa[q] = product[q];
        }
    }
    UNROLL
    for (int q = 0; q < K; q++) store(m.sa + rows * N + i + q * W, sa[q]);
}

template <int N>
APART void forward_chunk(ForwardRows<N>& m, int64_t rows, const uint8_t* flags) {
    constexpr int ALL = N / W, REST = ALL % VECTORS;
    int i = 0;
    for (; i + VECTORS * W <= N; i += VECTORS * W) forward_block<N, VECTORS>(m, i, rows, flags);
    if constexpr (REST > 0) forward_block<N, REST>(m, i, rows, flags);
}

template <int N>
APART void forward_head(const Forward& c, int64_t item, ForwardRows<N>& m) {
    const Shape& s = c.shape;
    const int64_t batch = item / s.H, head = item % s.H, chunks = (s.T + CHUNK - 1) / CHUNK;
    const int64_t base = (batch * s.T * s.H + head) * N;
    const uint8_t* starts = c.starts == nullptr ? nullptr : c.starts + batch * s.T;
    if (c.state_in != nullptr) {
        std::memcpy(m.flipped, c.state_in + item * N * N, sizeof m.flipped);
        transpose<N>(m.flipped, m.state);
    } else {
        std::memset(m.state, 0, sizeof m.state);
    }
    if (s.T > 0) read_rows(s, c.a, base, 1, m.a);
    for (int i = 0; i < N; i += W) {
        V sa = V{};
        for (int j = 0; j < N; j++) sa += load(m.state + j * N + i) * m.a[j];
        store(m.sa + i, sa);
    }
    for (int64_t n = 0; n < chunks; n++) {
        const int64_t t = n * CHUNK, rows = t + CHUNK < s.T ? CHUNK : s.T - t, at = base + t * s.H * N;
        if (c.chunk_states != nullptr && n > 0) {
            transpose<N>(m.state, m.flipped);
            std::memcpy(c.chunk_states + (item * (chunks - 1) + n - 1) * N * N, m.flipped, sizeof m.flipped);
        }
        read_rows(s, c.r, at, rows, m.r);
        read_rows(s, c.w_raw, at, rows, m.decay);
        decay_rows(m.decay, nullptr, rows * N);
        read_rows(s, c.k, at, rows, m.k);
        read_rows(s, c.v, at, rows, m.v);
        read_rows(s, c.b, at, rows, m.b);
        const int64_t left = s.T - t - rows;
        read_rows(s, c.a, at, rows + (left > 0), m.a);
        if (left == 0) std::memset(m.a + rows * N, 0, N * sizeof(float));
        m.ahead.count = 0;
        m.ahead.rows = left < CHUNK ? left : CHUNK;
        for (const void* from : {c.r, c.w_raw, c.k, c.v, c.a, c.b}) m.ahead.add(s, from, at + CHUNK * s.H * N, s.bf16);
        forward_chunk<N>(m, rows, starts == nullptr ? nullptr : starts + t);
        write_rows(s, c.y, at, rows, m.y);
        if (c.sa != nullptr) write_rows({s.T, s.H, N, false}, c.sa, at, rows, m.sa);
        std::memcpy(m.sa, m.sa + rows * N, N * sizeof(float));
    }
    transpose<N>(m.state, m.flipped);
    std::memcpy(c.state_out + item * N * N, m.flipped, sizeof m.flipped);
}

// ---- backward: rows of S and of its gradient G are keys in lanes; sums over keys are folded W rows at a time ----

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

// A chunk is worked on a few rows of S at a time, so that these rows' states at all its tokens stay near.
template <int N>
constexpr int block_rows() {
    return N % (2 * BLOCK) == 0 ? 2 * BLOCK : BLOCK;
}

template <int N>
struct BackwardRows {
    static constexpr int64_t ROWS = CHUNK * N;
    static constexpr int R = block_rows<N>();
    alignas(64) float r[ROWS], decay[ROWS], slope[ROWS], k[ROWS], v[ROWS], a[ROWS], b[ROWS], dy[ROWS], sa[ROWS];
    alignas(64) float dr[ROWS], ddecay[ROWS], dk[ROWS], dv[ROWS], da[ROWS], db[ROWS];
    alignas(64) float dsa[R], zero[N], fold_k[R * W], fold_b[R * W];
    alignas(64) float start[N * N], G[N * N];
    // states[t] is a block of S before token t of the chunk, not yet cleared where t starts anew; one more for the end.
    alignas(64) float states[(CHUNK + 1) * R * N];
    Ahead ahead;
};

template <int R>
APART void fold_rows(const float* partial, float* sums) {
    for (int i = 0; i < R; i += W) store(sums + i, sums_of_lanes(partial + i * W));
}

// One step of K vectors of keys of the states, as the forward made it.
template <int N, int K>
INLINE void replay_block(BackwardRows<N>& m, int64_t t, bool clear, int first, int j) {
    constexpr int R = BackwardRows<N>::R;
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

// LEAVE: G goes back over token t + 1 (needs its dsa). ENTER: token t adds its own output's gradient to G and is read.
// Both meet at the state between the two tokens, so that G and that state are loaded once.
template <int N, int K, bool LEAVE, bool ENTER>
INLINE void sweep_block(BackwardRows<N>& m, int64_t t, const float* decay_row, int first, int j) {
    constexpr int R = BackwardRows<N>::R;
    // Without ENTER there is no token t: the addresses of its rows are not formed.
    const int64_t late = (LEAVE ? t + 1 : 0) * N + j, row = (ENTER ? t : 0) * N + j, value = (ENTER ? t : 0) * N + first;
    const float *S = m.states + (t + 1) * R * N + j, *dy = m.dy + value, *v = m.v + value, *sa = m.sa + value;
    float* const G = m.G + first * N + j;
    V ddecay[K], da[K], dr[K], dk[K], db[K];
    UNROLL
    for (int q = 0; q < K; q++) {
        ddecay[q] = da[q] = dr[q] = dk[q] = db[q] = V{};
        if (first == 0) continue;
        if constexpr (LEAVE) {
            ddecay[q] = load(m.ddecay + late + q * W);
            da[q] = load(m.da + late + q * W);
        }
        if constexpr (ENTER) {
            dr[q] = load(m.dr + row + q * W);
            dk[q] = load(m.dk + row + q * W);
            db[q] = load(m.db + row + q * W);
        }
    }
    for (int i = 0; i < R; i++) {
        V sum_k = j == 0 ? V{} : load(m.fold_k + i * W), sum_b = j == 0 ? V{} : load(m.fold_b + i * W);
        const V dsa_i = all(m.dsa[i]), dy_i = all(dy[i]), v_i = all(v[i]), sa_i = all(sa[i]);
        V g[K];
        UNROLL
        for (int q = 0; q < K; q++) {
            g[q] = load(G + i * N + q * W);
            const V s = load(S + i * N + q * W);
            if constexpr (LEAVE) {
                ddecay[q] += g[q] * s;
                da[q] += s * dsa_i;
                g[q] *= load(decay_row + j + q * W);
                g[q] += load(m.a + late + q * W) * dsa_i;
            }
            if constexpr (ENTER) {
                dr[q] += s * dy_i;
                g[q] += load(m.r + row + q * W) * dy_i;
                sum_k += g[q] * load(m.k + row + q * W);
                sum_b += g[q] * load(m.b + row + q * W);
                dk[q] += g[q] * v_i;
                db[q] += g[q] * sa_i;
            }
        }
        UNROLL
        for (int q = 0; q < K; q++) store(G + i * N + q * W, g[q]);
        if constexpr (ENTER) {
            store(m.fold_k + i * W, sum_k);
            store(m.fold_b + i * W, sum_b);
        }
    }
    UNROLL
    for (int q = 0; q < K; q++) {
        if constexpr (LEAVE) {
            store(m.ddecay + late + q * W, ddecay[q]);
            store(m.da + late + q * W, da[q]);
        }
        if constexpr (ENTER) {
            store(m.dr + row + q * W, dr[q]);
            store(m.dk + row + q * W, dk[q]);
            store(m.db + row + q * W, db[q]);
        }
    }
}

template <int N, bool LEAVE, bool ENTER>
APART void sweep_token(BackwardRows<N>& m, int64_t t, const uint8_t* flags, int first) {
    const bool clear = LEAVE && resets(flags, t + 1);
    // A token that starts anew lets nothing through: G becomes zero, and the state before it has no gradient.
    if (clear) std::memset(m.dsa, 0, sizeof m.dsa);
    const float* decay_row = clear || !LEAVE ? m.zero : m.decay + (t + 1) * N;
    constexpr int REST = (N / W) % VECTORS;
    int j = 0;
    for (; j + VECTORS * W <= N; j += VECTORS * W) sweep_block<N, VECTORS, LEAVE, ENTER>(m, t, decay_row, first, j);
    if constexpr (REST > 0) sweep_block<N, REST, LEAVE, ENTER>(m, t, decay_row, first, j);
    if (clear) std::memset(m.ddecay + (t + 1) * N, 0, N * sizeof(float));
    if constexpr (ENTER) {
        fold_rows<BackwardRows<N>::R>(m.fold_k, m.dv + t * N + first);
        fold_rows<BackwardRows<N>::R>(m.fold_b, m.dsa);
        if (first == 0) m.ahead.fetch(t);
    }
}

template <int N>
APART void backward_block(BackwardRows<N>& m, int64_t rows, const uint8_t* flags, int first) {
    std::memcpy(m.states, m.start + first * N, BackwardRows<N>::R * N * sizeof(float));
    for (int64_t t = 0; t < rows; t++) replay_token<N>(m, t, resets(flags, t), first);
    sweep_token<N, false, true>(m, rows - 1, flags, first);
    for (int64_t t = rows - 2; t >= 0; t--) sweep_token<N, true, true>(m, t, flags, first);
    sweep_token<N, true, false>(m, -1, flags, first);
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
    for (int64_t n = 0; n < rows * N; n += W) store(m.ddecay + n, load(m.ddecay + n) * load(m.slope + n));
    write_rows(s, c.dr, at, rows, m.dr);
    write_rows(s, c.dw_raw, at, rows, m.ddecay);
    write_rows(s, c.dk, at, rows, m.dk);
    write_rows(s, c.dv, at, rows, m.dv);
    write_rows(s, c.da, at, rows, m.da);
    write_rows(s, c.db, at, rows, m.db);
}

// Chunk n, at `at`, comes next (none does after chunk 0).
template <int N>
void look_ahead(const Backward& c, BackwardRows<N>& m, int64_t n, int64_t item, int64_t chunks, int64_t at) {
    m.ahead.count = 0;
    m.ahead.rows = n < 0 ? 0 : CHUNK;
    if (n < 0) return;
    for (const void* from : {c.r, c.w_raw, c.k, c.v, c.a, c.b}) m.ahead.add(c.shape, from, at, c.shape.bf16);
    if (c.dy != nullptr) m.ahead.add(c.shape, c.dy, at, c.shape.bf16);
    m.ahead.add(c.shape, c.sa, at, false);
    if (n == 0) return;
    constexpr int64_t share = N * N * sizeof(float) / CHUNK;
    const float* start = c.chunk_states + (item * (chunks - 1) + n - 1) * N * N;
    m.ahead.list[m.ahead.count++] = {reinterpret_cast<const char*>(start), share, share};
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
        look_ahead<N>(c, m, n - 1, item, chunks, at - CHUNK * s.H * N);
        for (int first = 0; first < N; first += BackwardRows<N>::R) backward_block<N>(m, rows, flags, first);
        write_chunk<N>(c, m, at, rows);
    }
    if (c.dstate_in != nullptr) std::memcpy(c.dstate_in + item * N * N, m.G, sizeof m.G);
}

}  // namespace

// HEAD_SIZE is given by the build, which compiles this file once for each size: the objects build side by side.
#define JOIN_(name, size) name##_##size
#define JOIN(name, size) JOIN_(name, size)

// Both return 0, or 2 where no memory was left.
// Null means: starts, no resets; state_in, dy, dstate_out, zeros; chunk_states and sa in the forward, not saved; dstate_in, not
// wanted.
extern "C" int JOIN(wkv7_forward, HEAD_SIZE)(int64_t B, int64_t T, int64_t H, int bf16, const void* r, const void* w_raw,
                                             const void* k, const void* v, const void* a, const void* b,
                                             const float* state_in, const uint8_t* starts, void* y, float* state_out,
                                             float* chunk_states, float* sa, int64_t num_threads,
                                             Parallel parallel) {
    const Forward c{{T, H, HEAD_SIZE, bf16 != 0}, r, w_raw, k, v, a, b, state_in, starts, y, state_out, chunk_states, sa};
    return Work<Forward, ForwardRows<HEAD_SIZE>, forward_head<HEAD_SIZE>>::start(c, B * H, num_threads, parallel);
}

extern "C" const char* JOIN(wkv7_instructions, HEAD_SIZE)() { return INSTRUCTIONS; }

extern "C" int JOIN(wkv7_backward, HEAD_SIZE)(int64_t B, int64_t T, int64_t H, int bf16, const void* r, const void* w_raw,
                                              const void* k, const void* v, const void* a, const void* b,
                                              const float* state_in, const uint8_t* starts, const float* chunk_states,
                                              const float* sa, const void* dy, const float* dstate_out, void* dr, void* dw_raw, void* dk,
                                              void* dv, void* da, void* db, float* dstate_in, int64_t num_threads,
                                              Parallel parallel) {
    const Backward c{{T, H, HEAD_SIZE, bf16 != 0}, r, w_raw, k, v, a, b, state_in, starts, chunk_states, sa, dy, dstate_out,
                     dr, dw_raw, dk, dv, da, db, dstate_in};
    return Work<Backward, BackwardRows<HEAD_SIZE>, backward_head<HEAD_SIZE>>::start(c, B * H, num_threads, parallel);
}
