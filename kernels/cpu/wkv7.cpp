// WKV-7 on the CPU, forward and backward, for float32 and bfloat16 inputs with float32 states.
// Legend: B batch, T time, H heads, N head size; S is the state of one head, S[i][j] with i the value, j the key index.
//   w_log = -exp(-1/2) * sigmoid(w_raw),  decay = exp(w_log),  sa = S a
//   S <- S diag(decay) + sa b^T + v k^T,  y = S r   (read after the update; `starts` clears S before its token)
// Saved for the backward: sa of every token, and S before tokens CHUNK, 2*CHUNK, ...; the states in between are
// computed again, never divided out.
// One (batch, head) pair is one piece of work, its sums in a fixed order: no bit depends on the number of threads.

#include <cstdint>
#include <cstring>

#include "folds.hpp"
#include "recurrence.hpp"
#include "rows.hpp"
#include "threads.hpp"
#include "wkv7.hpp"
#include "wkv7_backward.hpp"

namespace {

// In the forward the state lies transposed, S[j][i], so that values fill the lanes and no sum crosses them.

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
        const float *r = m.r + t * N, *decay = m.decay + t * N, *k = m.k + t * N, *b = m.b + t * N;
        const float* next = m.a + (t + 1) * N;
        if (resets(flags, t)) {
            UNROLL
            for (int q = 0; q < K; q++) sa[q] = V{};
            for (int j = 0; j < N; j++)
                UNROLL
                for (int q = 0; q < K; q++) store(S + j * N + q * W, V{});
        }
        if (i == 0) m.ahead.fetch(t, 0, 1);
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
        const int64_t next = left < CHUNK ? left : CHUNK;
        for (const void* from : {c.r, c.w_raw, c.k, c.v, c.a, c.b})
            m.ahead.add(s, from, at + CHUNK * s.H * N, next, s.bf16);
        m.ahead.add(s, c.y, at, rows, s.bf16);
        if (c.sa != nullptr) m.ahead.add(s, c.sa, at, rows, false);
        forward_chunk<N>(m, rows, starts == nullptr ? nullptr : starts + t);
        write_rows(s, c.y, at, rows, m.y, N);
        if (c.sa != nullptr) write_rows({s.T, s.H, N, false}, c.sa, at, rows, m.sa, N);
        std::memcpy(m.sa, m.sa + rows * N, N * sizeof(float));
    }
    transpose<N>(m.state, m.flipped);
    std::memcpy(c.state_out + item * N * N, m.flipped, sizeof m.flipped);
}

}  // namespace

// Both return 0, or 2 where no memory was left.
// Null means: starts, no resets; state_in, dy and dstate_out, zeros; chunk_states and sa in the forward, not saved;
// dstate_in, not wanted.
extern "C" int JOIN(wkv7_forward, HEAD_SIZE)(
    int64_t B, int64_t T, int64_t H, int bf16, const void* r, const void* w_raw, const void* k, const void* v,
    const void* a, const void* b, const float* state_in, const uint8_t* starts, void* y, float* state_out,
    float* chunk_states, float* sa, int64_t num_threads, Parallel parallel) {
    const Forward c{{T, H, HEAD_SIZE, bf16 != 0}, r, w_raw, k, v, a, b, state_in, starts, y, state_out,
                    chunk_states, sa};
    return Work<Forward, ForwardRows<HEAD_SIZE>, forward_head<HEAD_SIZE>>::start(c, B * H, num_threads, parallel);
}

extern "C" int JOIN(wkv7_backward, HEAD_SIZE)(
    int64_t B, int64_t T, int64_t H, int bf16, const void* r, const void* w_raw, const void* k, const void* v,
    const void* a, const void* b, const float* state_in, const uint8_t* starts, const float* chunk_states,
    const float* sa, const void* dy, const float* dstate_out, void* dr, void* dw_raw, void* dk, void* dv, void* da,
    void* db, float* dstate_in, int64_t num_threads, Parallel parallel) {
    const Backward c{{T, H, HEAD_SIZE, bf16 != 0}, r, w_raw, k, v, a, b, state_in, starts, chunk_states, sa, dy,
                     dstate_out, dr, dw_raw, dk, dv, da, db, dstate_in};
    return Work<Backward, BackwardRows<HEAD_SIZE>, backward_head<HEAD_SIZE>>::start(c, B * H, num_threads, parallel);
}
