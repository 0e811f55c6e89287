// The backward of WKV-7; the recurrence and the legend stand in wkv7.cu. G is the gradient of the state S.
// Three sweeps over a chunk, from the last chunk to the first; G twice, so that no sum crosses many threads:
//   G += dy r^T;  dv = G k;  dsa = G b;  G <- G diag(decay) + dsa a^T         values short: needs no state
//   the same G;  dk = G^T v;  db = G^T sa                                      keys short
//   da = S'^T dsa;  S as in the forward;  dr = S^T dy                          keys short, S' before the token
// The gradient of the decays follows from these by sums over the chunk alone (decay_gradients).

#pragma once

#include <cstdint>

#include "device.cuh"
#include "rows.cuh"
#include "tile.cuh"
#include "wkv7.cuh"

namespace {

// Three groups of threads, each with one sweep of its own, work side by side where their registers allow it: the
// first then is one chunk ahead of the others. Else one group makes the three sweeps in turn.
constexpr int ROLES = N <= 64 ? 3 : 1;
constexpr int AHEAD = ROLES == 3 ? 1 : 0;
constexpr int STATE_PARTS = N == 128 ? 2 : 1;
using StateLayout = Layout<N, L::SHORT / STATE_PARTS>;
constexpr int ROLE_THREADS = ROLES == 3 ? L::WARPS * 32 : L::THREADS;
constexpr int BACKWARD_THREADS = ROLES * ROLE_THREADS;
constexpr int BACKWARD_BLOCKS = ROLES == 3 ? 2 : 1;

// Rows in shared memory. r to dsa are there twice where the first sweep is ahead; v to M belong to the chunk behind.
struct Rows {
    float *r, *decay, *k, *a, *b, *dy, *dsa, *v, *sa, *P, *M, *E;

    __device__ __forceinline__ explicit Rows(float* shared, int half) {
        float* const both = shared + half * 7 * CHUNK * N;
        float* const once = shared + (AHEAD + 1) * 7 * CHUNK * N;
        float** const first[] = {&r, &decay, &k, &a, &b, &dy, &dsa};
        float** const second[] = {&v, &sa, &P, &M, &E};
#pragma unroll
        for (int q = 0; q < 7; q++) *first[q] = both + q * CHUNK * N;
#pragma unroll
        for (int q = 0; q < 5; q++) *second[q] = once + q * CHUNK * N;
    }
};

constexpr int BACKWARD_BYTES =
    (((AHEAD + 1) * 7 + 4) * CHUNK * N + N) * static_cast<int>(sizeof(float));

// The chunk that a sweep works on: where its tokens lie, how many there are, which of them clear the state.
struct Chunk {
    int64_t first;
    int stride, rows;
    unsigned starts;

    __device__ __forceinline__ Chunk(const Backward& c, int number) {
        const Place place = place_of_block<N>(c.shape);
        first = place.of_token(number * CHUNK);
        stride = place.stride;
        rows = rows_of_chunk(c.shape.T, number);
        starts = starts_of_chunk(c.starts, place.tokens + number * CHUNK, rows);
    }
    __device__ __forceinline__ int64_t of_token(int t) const { return first + static_cast<int64_t>(t) * stride; }
    __device__ __forceinline__ bool clears(int t) const { return starts >> t & 1; }
};

// From the last token to the first; G's values short, keys long: dv = G k and dsa = G b, which the other sweeps need.
template <typename T>
__device__ __forceinline__ void sweep_values(Tile<L>& G, const L& lay, const Rows& m, const Chunk& n, T* dv) {
    for (int t = n.rows - 1; t >= 0; t--) {
        const Floats<L::SHORT> dy = load<L::SHORT>(m.dy + t * N + lay.first);
        float sum_v[L::SHORT] = {}, dsa[L::SHORT] = {};
#pragma unroll
        for (int q = 0; q < L::FOURS; q++) {
            const int at = t * N + lay.four(q);
            const Floats<4> r = load<4>(m.r + at), k = load<4>(m.k + at), b = load<4>(m.b + at);
#pragma unroll
            for (int s = 0; s < L::SHORT; s++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float& g = G.x[s][4 * q + e];
                    g += dy.x[s] * r.x[e];
                    sum_v[s] += g * k.x[e];
                    dsa[s] += g * b.x[e];
                }
        }
        sum_all(dsa, lay);
        const float one = sum_one(sum_v, lay);
        if (lay.has_one()) dv[n.of_token(t) + lay.one()] = Number<T>::written(one);
        if (lay.group == 0) {
            Floats<L::SHORT> out;
#pragma unroll
            for (int s = 0; s < L::SHORT; s++) out.x[s] = dsa[s];
            store<L::SHORT>(m.dsa + t * N + lay.first, out);
        }
        if (n.clears(t)) {
            G.clear();
            continue;
        }
#pragma unroll
        for (int q = 0; q < L::FOURS; q++) {
            const Floats<4> decay = load<4>(m.decay + t * N + lay.four(q)), a = load<4>(m.a + t * N + lay.four(q));
#pragma unroll
            for (int s = 0; s < L::SHORT; s++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    G.x[s][4 * q + e] = __fmaf_rn(dsa[s], a.x[e], G.x[s][4 * q + e] * decay.x[e]);
        }
    }
}

// The same G again with keys short, values long: dk = G^T v, db = G^T sa, P = k dk + b db; at the end E of `start`.
template <typename T>
__device__ __forceinline__ void sweep_keys(Tile<L>& G, const L& lay, const Rows& m, const Chunk& n, const float* start,
                                           T* dk, T* db) {
    for (int t = n.rows - 1; t >= 0; t--) {
        const Floats<L::SHORT> r = load<L::SHORT>(m.r + t * N + lay.first);
        Floats<L::SHORT> decay = load<L::SHORT>(m.decay + t * N + lay.first);
        Floats<L::SHORT> a = load<L::SHORT>(m.a + t * N + lay.first);
        if (n.clears(t)) decay = a = Floats<L::SHORT>{};
        float sum_k[L::SHORT] = {}, sum_b[L::SHORT] = {};
#pragma unroll
        for (int q = 0; q < L::FOURS; q++) {
            const int at = t * N + lay.four(q);
            const Floats<4> dy = load<4>(m.dy + at), v = load<4>(m.v + at), sa = load<4>(m.sa + at),
                            dsa = load<4>(m.dsa + at);
#pragma unroll
            for (int s = 0; s < L::SHORT; s++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float g = G.x[s][4 * q + e] + r.x[s] * dy.x[e];
                    sum_k[s] += g * v.x[e];
                    sum_b[s] += g * sa.x[e];
                    // In this order no product waits in a register of its own.
                    G.x[s][4 * q + e] = __fmaf_rn(a.x[s], dsa.x[e], g * decay.x[s]);
                }
        }
        const float one_k = sum_one(sum_k, lay), one_b = sum_one(sum_b, lay);
        if (lay.has_one()) {
            const int at = t * N + lay.one();
            dk[n.of_token(t) + lay.one()] = Number<T>::written(one_k);
            db[n.of_token(t) + lay.one()] = Number<T>::written(one_b);
            m.P[at] = m.k[at] * one_k + m.b[at] * one_b;
        }
    }
    float sum[L::SHORT] = {};
    if (start != nullptr) G.times_long_rows(start, lay, sum);
    const float one = sum_one(sum, lay);
    if (lay.has_one()) m.E[lay.one()] = one;
}

// S over one token, keys short, values long: da = S'^T dsa, dr = S^T dy, M = a da + r dr of the token before.
template <typename T, typename L>
__device__ __forceinline__ void state_token(Tile<L>& S, const L& lay, const Rows& m, int t, float& before, T* da,
                                            T* dr) {
    const Floats<L::SHORT> decay = load<L::SHORT>(m.decay + t * N + lay.first),
                           k = load<L::SHORT>(m.k + t * N + lay.first), b = load<L::SHORT>(m.b + t * N + lay.first);
    float sum_a[L::SHORT] = {}, sum_r[L::SHORT] = {};
#pragma unroll
    for (int q = 0; q < L::FOURS; q++) {
        const int at = t * N + lay.four(q);
        const Floats<4> dy = load<4>(m.dy + at), v = load<4>(m.v + at), sa = load<4>(m.sa + at),
                        dsa = load<4>(m.dsa + at);
#pragma unroll
        for (int s = 0; s < L::SHORT; s++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = S.x[s][4 * q + e];
                sum_a[s] += x * dsa.x[e];
                x = __fmaf_rn(k.x[s], v.x[e], __fmaf_rn(b.x[s], sa.x[e], x * decay.x[s]));
                sum_r[s] += x * dy.x[e];
            }
    }
    const float one_a = sum_one(sum_a, lay), one_r = sum_one(sum_r, lay);
    if (lay.has_one()) {
        const int at = t * N + lay.one();
        da[lay.one()] = Number<T>::written(one_a);
        dr[lay.one()] = Number<T>::written(one_r);
        m.M[at] = m.a[at] * one_a + before;
        before = m.r[at] * one_r;
    }
}

// From the first token to the last.
template <typename T, typename L>
__device__ __forceinline__ void sweep_state(const L& lay, const Rows& m, const Chunk& n, const float* start, T* da,
                                            T* dr) {
    Tile<L> S;
    S.load_long_rows(start, lay);
    float before = 0.0f;
    for (int t = 0; t < n.rows;) {
        if (n.clears(t)) S.clear();
        for (const int next = next_start(n.starts, t, n.rows); t < next; t++)
            state_token<T>(S, lay, m, t, before, da + n.of_token(t), dr + n.of_token(t));
    }
}

// E_t, for every key, is the sum over values of G * S after token t. By the recurrence it needs no state:
//   dw_log_t = E_{t-1} - (r dr)_{t-1} - (a da)_t,  E_t = dw_log_t + (k dk)_t + (b db)_t
// The sums begin anew with every chunk, so that their rounding errors stay small.
template <typename T>
__device__ __forceinline__ void decay_gradients(const Rows& m, const Chunk& n, int key, const T* w_raw, T* dw_raw) {
    // All loads are on their way before the first is needed.
    float slope[CHUNK];
#pragma unroll
    for (int t = 0; t < CHUNK; t++)
        slope[t] = t < n.rows ? Decay::slope(Number<T>::read(w_raw[n.of_token(t) + key])) : 0.0f;
    float E = m.E[key];
#pragma unroll
    for (int t = 0; t < CHUNK; t++)
        if (t < n.rows) {
            const float dw_log = n.clears(t) ? 0.0f : E - m.M[t * N + key];
            dw_raw[n.of_token(t) + key] = Number<T>::written(dw_log * slope[t]);
            E = dw_log + m.P[t * N + key];
        }
}

__device__ __forceinline__ int thread_in_role() { return thread_number() % ROLE_THREADS; }

// The rows of chunk `number` that all sweeps read, and of the one behind it what only the later sweeps read.
template <typename T>
__device__ __forceinline__ void read_chunks(const Backward& c, const Rows& ahead, const Rows& behind, int number) {
    const Place place = place_of_block<N>(c.shape);
    const int thread = thread_number();
    if (number >= 0) {
        const int64_t at = place.of_token(number * CHUNK);
        const int rows = rows_of_chunk(c.shape.T, number);
        const T* const from[6] = {static_cast<const T*>(c.r), static_cast<const T*>(c.w_raw),
                                  static_cast<const T*>(c.k), static_cast<const T*>(c.a),
                                  static_cast<const T*>(c.b), static_cast<const T*>(c.dy)};
        float* const to[6] = {ahead.r, ahead.decay, ahead.k, ahead.a, ahead.b, ahead.dy};
        read_rows<N, N, 6, 1, Decay, false>(from, to, at, place.stride, rows, thread, BACKWARD_THREADS);
    }
    if (number + AHEAD < num_chunks(c.shape.T)) {
        const int64_t at = place.of_token((number + AHEAD) * CHUNK);
        const int rows = rows_of_chunk(c.shape.T, number + AHEAD);
        read_rows_of<N>(static_cast<const T*>(c.v), behind.v, at, place.stride, rows, thread, BACKWARD_THREADS);
        read_rows_of<N>(c.sa, behind.sa, at, place.stride, rows, thread, BACKWARD_THREADS);
    }
}

// A group's way through all chunks, with the sweeps that are its own; every group meets the same barriers.
template <typename T, bool VALUES, bool KEYS, bool STATE>
__device__ __forceinline__ void work(const Backward& c) {
    float* const shared = shared_memory();
    const bool works = ROLE_THREADS == L::THREADS || thread_in_role() < L::THREADS;
    const float* const dstate_out = matrix_of_block<N>(c.dstate_out);
    Tile<L> by_value, by_key;
    if (VALUES && works) by_value.load_short_rows(dstate_out, L(thread_in_role()));
    if (KEYS && works) by_key.load_long_rows(dstate_out, L(thread_in_role()));
    // Chunk `number` is that of the first sweep.
    for (int number = num_chunks(c.shape.T) - 1; number >= -AHEAD; number--) {
        const Rows ahead(shared, AHEAD * (number & 1)), behind(shared, AHEAD * (~number & 1));
        const bool others_work = number + AHEAD < num_chunks(c.shape.T);
        read_chunks<T>(c, ahead, behind, number);
        __syncthreads();
        if (VALUES && works && number >= 0)
            sweep_values<T>(by_value, L(thread_in_role()), ahead, Chunk(c, number), static_cast<T*>(c.dv));
        if (AHEAD == 0) __syncthreads();
        if (others_work && works) {
            const Chunk n(c, number + AHEAD);
            const float* const start = c.start_of(number + AHEAD);
            if (KEYS)
                sweep_keys<T>(by_key, L(thread_in_role()), behind, n, start, static_cast<T*>(c.dk),
                              static_cast<T*>(c.db));
            // Beside both G there is room for half of S.
            for (int half = 0; STATE && half < STATE_PARTS; half++)
                sweep_state<T>(StateLayout(thread_in_role(), half * N / 2), behind, n, start, static_cast<T*>(c.da),
                               static_cast<T*>(c.dr));
        }
        __syncthreads();
        // What this reads nobody writes before the next barrier.
        if (STATE && others_work && thread_in_role() < N)
            decay_gradients<T>(behind, Chunk(c, number + AHEAD), thread_in_role(), static_cast<const T*>(c.w_raw),
                               static_cast<T*>(c.dw_raw));
    }
    if (VALUES && works && c.dstate_in != nullptr)
        by_value.store_short_rows(matrix_of_block<N>(c.dstate_in), L(thread_in_role()));
}

template <typename T>
__global__ void __launch_bounds__(BACKWARD_THREADS, BACKWARD_BLOCKS) backward(const Backward c) {
    // Asked of lane 0, for the compiler must see that a warp has one role: else every shuffle gets a slow second way.
    const int role = ROLES == 1 ? 0 : __shfl_sync(ALL_LANES, thread_number() / ROLE_THREADS, 0);
    if constexpr (ROLES == 1) work<T, true, true, true>(c);
    else if (role == 0) work<T, true, false, false>(c);
    else if (role == 1) work<T, false, true, false>(c);
    else work<T, false, false, true>(c);
}

}  // namespace
