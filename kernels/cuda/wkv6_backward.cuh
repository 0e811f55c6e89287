// The backward of WKV-6 and WKV-5; the recurrence and the legend stand in wkv6.cu. G is the gradient of the state S.
// A chunk is taken as a whole, from the last to the first. With S0 the state before it and G that after it, D(s, t) the
// product of the decays of the tokens between s and t, 0 where one of these or t starts anew:
//   <S before t, dy_u> and <S before t, G> go from token to token for every key, from S0 dy_u and <S0, G>, by
//   v_t dy_u and G v_t: so dr, dk and the decay's gradient are sums of products, and no near numbers are subtracted
//   dv_t = G^T (k_t D(t, end)) + sum over u > t of dy_u (sum over keys of k_t r_u D(t, u)) + dy_t (sum of r u k)
//   G <- D(start, end) G + sum over t of (r_t D(start, t)) dy_t^T
// No power of a decay is divided by another, so that decays near 0 cost no digits.

#pragma once

#include <cstdint>

#include "wkv6.cuh"

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

    // S before the first token of a chunk; null is zeros.
    __device__ __forceinline__ const float* start_of(int chunk) const {
        return chunk > 0 ? matrix_of_chunk<N>(chunk_states, shape.T, chunk) : matrix_of_block<N>(state_in);
    }
};

// Where registers allow it two groups of threads work side by side, one on the keys and one on the values.
constexpr int ROLES = N <= 64 ? 2 : 1;
constexpr int ROLE_THREADS = ROLES == 2 ? L::WARPS * 32 : L::THREADS;
constexpr int BACKWARD_THREADS = ROLES * ROLE_THREADS;
constexpr int BACKWARD_BLOCKS = ROLES == 2 ? 3 : 1;
constexpr int STATE_PARTS = N == 128 ? 2 : 1;
using StateLayout = Layout<N, L::SHORT / STATE_PARTS>;
static_assert(CHUNK == 16, "the products of tokens are spread over 64 threads");

__device__ __forceinline__ int thread_in_role() { return thread_number() % ROLE_THREADS; }

// In shared memory. gv[t] is G v_t and becomes k_t D(t, end); sdy[t] is S0 dy_t and becomes r_t D(start, t).
// vdy[s][t] is v_s dy_t, rk[s][t] the sum over keys of k_s r_t D(s, t), 0 for s > t, and of r u k for s = t.
struct Rows {
    float *r, *decay, *k, *v, *dy, *gv, *sdy, *vdy, *rk, *u, *fixed, *start, *through;

    __device__ __forceinline__ explicit Rows(float* shared) {
        float** const rows[] = {&r, &decay, &k, &v, &dy, &gv, &sdy};
        float** const vectors[] = {&u, &fixed, &start, &through};
#pragma unroll
        for (int q = 0; q < 7; q++) *rows[q] = shared + q * CHUNK * ROW;
        vdy = shared + 7 * CHUNK * ROW;
        rk = vdy + CHUNK * CHUNK;
#pragma unroll
        for (int q = 0; q < 4; q++) *vectors[q] = rk + CHUNK * CHUNK + q * N;
    }
};

constexpr int BACKWARD_BYTES =
    (7 * CHUNK * ROW + 2 * CHUNK * CHUNK + 4 * N) * static_cast<int>(sizeof(float));

__device__ __forceinline__ float keeps(unsigned starts, int t) { return starts >> t & 1 ? 0.0f : 1.0f; }

// out[t] = matrix in[t] for all tokens: keys short, values long.
template <typename M>
__device__ __forceinline__ void times_rows(const Tile<M>& matrix, const M& lay, const float* in, float* out) {
#pragma unroll 1
    for (int t = 0; t < CHUNK; t++) {
        float sum[M::SHORT] = {};
#pragma unroll
        for (int q = 0; q < M::FOURS; q++) {
            const Floats<4> x = load<4>(in + t * ROW + lay.four(q));
#pragma unroll
            for (int s = 0; s < M::SHORT; s++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[s] += matrix.x[s][4 * q + e] * x.x[e];
        }
        const float one = sum_one(sum, lay);
        if (lay.has_one()) out[t * ROW + lay.one()] = one;
    }
}

// G v_t, S0 dy_t and <S0, G>.
__device__ __forceinline__ void multiply_keys(const Tile<L>& G, const Rows& m, const float* start) {
    const L lay(thread_in_role());
    times_rows(G, lay, m.v, m.gv);
    float sum[L::SHORT] = {};
    if (start != nullptr) G.times_short_rows(start, lay, sum);
    const float one = sum_one(sum, lay);
    if (lay.has_one()) m.start[lay.one()] = one;
#pragma unroll 1
    for (int part = 0; part < STATE_PARTS; part++) {
        // Beside both G there is room for half of S.
        const StateLayout half(thread_in_role(), part * N / 2);
        Tile<StateLayout> S0;
        S0.load_short_rows(start, half);
        times_rows(S0, half, m.dy, m.sdy);
    }
}

// vdy: 64 threads with 4 products each.
__device__ __forceinline__ void multiply_tokens(const Rows& m) {
    for (int n = thread_in_role(); n < CHUNK * CHUNK / 4; n += ROLE_THREADS) {
        const int s = n / 4, t = n % 4 * 4;
        float sum[4] = {};
#pragma unroll 4
        for (int i = 0; i < N; i += 4) {
            const Floats<4> v = load<4>(m.v + s * ROW + i);
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const Floats<4> dy = load<4>(m.dy + (t + q) * ROW + i);
#pragma unroll
                for (int e = 0; e < 4; e++) sum[q] += v.x[e] * dy.x[e];
            }
        }
        store<4>(m.vdy + s * CHUNK + t, {sum[0], sum[1], sum[2], sum[3]});
    }
}

// rk: four neighbouring lanes for each token s, with a quarter of the keys each, in turns of four as in a tile.
__device__ __forceinline__ void multiply_decays(const Rows& m, unsigned starts) {
    constexpr int FOURS = N / 16;
#pragma unroll 1
    for (int n = thread_in_role(); n < CHUNK * 4; n += ROLE_THREADS) {
        const int s = n / 4, first = n % 4 * 4;
        float k[FOURS][4];
#pragma unroll
        for (int q = 0; q < FOURS; q++) {
            const Floats<4> from = load<4>(m.k + s * ROW + first + 16 * q);
#pragma unroll
            for (int e = 0; e < 4; e++) k[q][e] = from.x[e];
        }
#pragma unroll 1
        for (int t = 0; t < CHUNK; t++) {
            // k is k_s D(s, t) once t is past s.
            const float keep = t > s ? keeps(starts, t) : 1.0f;
            float sum = 0.0f;
#pragma unroll
            for (int q = 0; q < FOURS; q++) {
                const int at = first + 16 * q;
                const Floats<4> r = load<4>(m.r + t * ROW + at), decay = load<4>(m.decay + t * ROW + at),
                                u = load<4>(m.u + at);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    k[q][e] *= keep;
                    sum += k[q][e] * r.x[e] * (t == s ? u.x[e] : 1.0f);
                    if (t > s) k[q][e] *= decay.x[e];
                }
            }
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            if (first == 0) m.rk[s * CHUNK + t] = t < s ? 0.0f : sum;
        }
    }
}

// One key: dr, dk and the gradient of its decay for all tokens; what u and, for WKV-5, the decay get in all.
template <typename T, bool EACH>
__device__ __forceinline__ void key_gradients(const Backward& c, const Rows& m, int chunk, int rows, unsigned starts,
                                              int key, float& du, float& ddecay) {
    const Place place = place_of_block<N>(c.shape);
    const float u = m.u[key];
    // carry[t]: over token t and into the next. ahead[t]: <S before the present token, dy_t> of a later token t.
    float r[CHUNK], carry[CHUNK], ahead[CHUNK];
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        r[t] = m.r[t * ROW + key];
        carry[t] = m.decay[t * ROW + key] * (t + 1 < CHUNK ? keeps(starts, t + 1) : 1.0f);
        ahead[t] = m.sdy[t * ROW + key] * keeps(starts, 0);
    }
    float through = keeps(starts, 0), end = m.start[key] * through;
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        float vdy[CHUNK];
#pragma unroll
        for (int q = t / 4; q < CHUNK / 4; q++) {
            const Floats<4> from = load<4>(m.vdy + t * CHUNK + 4 * q);
#pragma unroll
            for (int e = 0; e < 4; e++) vdy[4 * q + e] = from.x[e];
        }
        const float k = m.k[t * ROW + key], gv = m.gv[t * ROW + key];
        const float keep = t + 1 < CHUNK ? keeps(starts, t + 1) : 1.0f;
        float product = keep, dk = u * r[t] * vdy[t], ddecay_t = 0.0f;
#pragma unroll
        for (int later = t + 1; later < CHUNK; later++) {
            const float read = product * r[later];
            dk += read * vdy[later];
            ddecay_t += read * ahead[later];
            product *= carry[later];
            ahead[later] = carry[t] * ahead[later] + k * keep * vdy[later];
        }
        dk += product * gv;
        ddecay_t += product * end;
        end = carry[t] * end + k * keep * gv;
        du += r[t] * k * vdy[t];
        m.gv[t * ROW + key] = product * k;
        m.sdy[t * ROW + key] = through * r[t];
        through *= carry[t];
        if (t < rows) {
            const int64_t at = place.of_token(chunk * CHUNK + t) + key;
            static_cast<T*>(c.dr)[at] = Number<T>::written(ahead[t] + u * k * vdy[t]);
            static_cast<T*>(c.dk)[at] = Number<T>::written(dk);
            if constexpr (EACH) {
                const float w_raw = Number<T>::read(static_cast<const T*>(c.w_raw)[at]);
                const float slope = Decay::slope(w_raw, m.decay[t * ROW + key]);
                static_cast<T*>(c.dw_raw)[at] = Number<T>::written(ddecay_t * slope);
            } else {
                ddecay += ddecay_t;
            }
        }
    }
    m.through[key] = through;
}

// dv: values short, keys long.
template <typename T>
__device__ __forceinline__ void value_gradients(const Tile<L>& G, const Backward& c, const Rows& m, int chunk,
                                                int rows) {
    const L lay(thread_in_role());
    const Place place = place_of_block<N>(c.shape);
    float dy[CHUNK];
#pragma unroll
    for (int t = 0; t < CHUNK; t++) dy[t] = m.dy[t * ROW + lay.one()];
#pragma unroll 1
    for (int t = 0; t < rows; t++) {
        float sum[L::SHORT] = {};
#pragma unroll
        for (int q = 0; q < L::FOURS; q++) {
            const Floats<4> k = load<4>(m.gv + t * ROW + lay.four(q));
#pragma unroll
            for (int s = 0; s < L::SHORT; s++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[s] += G.x[s][4 * q + e] * k.x[e];
        }
        float one = sum_one(sum, lay);
#pragma unroll
        for (int q = 0; q < CHUNK / 4; q++) {
            const Floats<4> rk = load<4>(m.rk + t * CHUNK + 4 * q);
#pragma unroll
            for (int e = 0; e < 4; e++) one += rk.x[e] * dy[4 * q + e];
        }
        if (lay.has_one())
            static_cast<T*>(c.dv)[place.of_token(chunk * CHUNK + t) + lay.one()] = Number<T>::written(one);
    }
}

// G over the chunk. KEYS_SHORT: keys are the short dimension, else the long one.
template <bool KEYS_SHORT>
__device__ __forceinline__ void pass_over(Tile<L>& G, const Rows& m, int rows) {
    const L lay(thread_in_role());
    const Floats<L::SHORT> through_short = load<L::SHORT>(m.through + lay.first);
#pragma unroll
    for (int q = 0; q < L::FOURS; q++) {
        const Floats<4> through_long = load<4>(m.through + lay.four(q));
#pragma unroll
        for (int s = 0; s < L::SHORT; s++)
#pragma unroll
            for (int e = 0; e < 4; e++) G.x[s][4 * q + e] *= KEYS_SHORT ? through_short.x[s] : through_long.x[e];
    }
#pragma unroll 1
    for (int t = 0; t < rows; t++) {
        const Floats<L::SHORT> of_short = load<L::SHORT>((KEYS_SHORT ? m.sdy : m.dy) + t * ROW + lay.first);
#pragma unroll
        for (int q = 0; q < L::FOURS; q++) {
            const Floats<4> of_long = load<4>((KEYS_SHORT ? m.dy : m.sdy) + t * ROW + lay.four(q));
#pragma unroll
            for (int s = 0; s < L::SHORT; s++)
#pragma unroll
                for (int e = 0; e < 4; e++) G.x[s][4 * q + e] += of_short.x[s] * of_long.x[e];
        }
    }
}

// A group's way through all chunks; every group meets the same barriers.
template <typename T, bool EACH, bool KEYS, bool VALUES>
__device__ __forceinline__ void work(const Backward& c) {
    const Rows m(shared_memory());
    const bool works = ROLE_THREADS == L::THREADS || thread_in_role() < L::THREADS;
    float du = 0.0f, ddecay = 0.0f;
    Tile<L> by_key, by_value;
    if (KEYS && works) by_key.load_short_rows(matrix_of_block<N>(c.dstate_out), L(thread_in_role()));
    if (VALUES && works) by_value.load_long_rows(matrix_of_block<N>(c.dstate_out), L(thread_in_role()));
    read_head<EACH>(c.shape, c.u, c.w_raw, m.u, m.fixed, BACKWARD_THREADS);
    __syncthreads();
    for (int chunk = num_chunks(c.shape.T) - 1; chunk >= 0; chunk--) {
        const int rows = rows_of_chunk(c.shape.T, chunk);
        const Place place = place_of_block<N>(c.shape);
        const unsigned starts = starts_of_chunk(c.starts, place.tokens + chunk * CHUNK, rows);
        read_chunk<T, EACH, true>(c.r, c.w_raw, c.k, c.v, c.dy, m.fixed, {m.r, m.decay, m.k, m.v, m.dy}, place, chunk,
                                  rows, BACKWARD_THREADS);
        __syncthreads();
        if (KEYS && works) multiply_keys(by_key, m, c.start_of(chunk));
        if (VALUES) {
            multiply_tokens(m);
            multiply_decays(m, starts);
        }
        __syncthreads();
        if (KEYS && thread_in_role() < N)
            key_gradients<T, EACH>(c, m, chunk, rows, starts, thread_in_role(), du, ddecay);
        __syncthreads();
        if (VALUES && works) {
            value_gradients<T>(by_value, c, m, chunk, rows);
            pass_over<false>(by_value, m, rows);
        }
        if (KEYS && works) pass_over<true>(by_key, m, rows);
        // The next chunk's rows take the place of these.
        __syncthreads();
    }
    if (KEYS && works && c.dstate_in != nullptr)
        by_key.store_short_rows(matrix_of_block<N>(c.dstate_in), L(thread_in_role()));
    if (KEYS && thread_in_role() < N) {
        const int key = thread_in_role();
        const int64_t at = static_cast<int64_t>(block_number()) * N + key;
        c.du[at] = du;
        if constexpr (!EACH) {
            const float w_raw = static_cast<const float*>(c.w_raw)[block_number() % c.shape.H * N + key];
            static_cast<float*>(c.dw_raw)[at] = ddecay * Decay::slope(w_raw, m.fixed[key]);
        }
    }
}

template <typename T, bool EACH>
__global__ void __launch_bounds__(BACKWARD_THREADS, BACKWARD_BLOCKS) backward(const Backward c) {
    // Asked of lane 0, for the compiler must see that a warp has one role: else every shuffle gets a slow second way.
    const int role = ROLES == 1 ? 0 : __shfl_sync(ALL_LANES, thread_number() / ROLE_THREADS, 0);
    if constexpr (ROLES == 1) work<T, EACH, true, true>(c);
    else if (role == 0) work<T, EACH, true, false>(c);
    else work<T, EACH, false, true>(c);
}

}  // namespace
