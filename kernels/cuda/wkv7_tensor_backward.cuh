// The backward of WKV-7 on tensor cores; legend and formulas stand in wkv7_tensor.cu. From the last chunk to the first.
// G, the gradient of the state, is in registers twice: a warp has 16 rows of it, and 16 columns (as rows of G^T). So no
// sum crosses warps: what belongs to a value is made where its row is, what belongs to a key where its column is.

#pragma once

#include <cstdint>

#include "device.cuh"
#include "mma.cuh"
#include "rows.cuh"
#include "wkv7.cuh"
#include "wkv7_tensor.cuh"
#include "wkv7_tensor_chunk.cuh"

namespace {

// Rows [token][value] besides the chunk's, the decays from the chunk's middle to the state before each token and after
// the last (17 rows), and the gradients of the squares of scores.
struct Flow {
    float *v, *dy, *sa, *dz, *decays, *dab, *dak, *drk, *drb;

    __device__ __forceinline__ explicit Flow(float* shared)
        : v(shared), dy(v + ROWS_OF_CHUNK), sa(dy + ROWS_OF_CHUNK), dz(sa + ROWS_OF_CHUNK),
          decays(dz + ROWS_OF_CHUNK), dab(decays + ROWS_OF_CHUNK + ROW), dak(dab + SQUARE), drk(dak + SQUARE),
          drb(drk + SQUARE) {}
};

constexpr int BACKWARD_THREADS = THREADS;
constexpr int BACKWARD_BYTES =
    (CHUNK_FLOATS + 5 * ROWS_OF_CHUNK + ROW + 4 * SQUARE) * static_cast<int>(sizeof(float));

template <typename T>
__device__ __forceinline__ void read_backward(const Backward& c, const Chunk& m, const Flow& f, const Column& column) {
    float scale[CHUNK / 2 + 1];
    column.decays<T>(c.w_raw, scale);
#pragma unroll
    for (int n = 0; n <= CHUNK / 2; n++) {
        // The middle itself belongs to the later half.
        const int at = column.half == 0 ? CHUNK / 2 - n : CHUNK / 2 + n;
        if (n > 0 || column.half == 1) f.decays[row(at) * ROW + column.key] = scale[n];
    }
    column.copy_scaled<T, true, false>(c.a, scale, m.a);
    column.copy_scaled<T, false, false>(c.r, scale, m.r);
    column.copy_scaled<T, false, true>(c.b, scale, m.b);
    column.copy_scaled<T, false, true>(c.k, scale, m.k);
    column.copy<T>(c.v, f.v);
    column.copy<T>(c.dy, f.dy);
}

// Of a warp's 16 values, [value][token].
struct Values {
    Square sa, dv, dz;
};

// What the state before the chunk and G after it give; sa is without the chunk's own part, dz is that of sa still.
template <bool THREE>
__device__ __forceinline__ void begin_values(Values& x, const Strip& G, const Chunk& m, const Flow& f,
                                             const float* start, const Masks& masks) {
    const Lane lane;
    x.sa = x.dv = x.dz = Square{};
    multiply_strip<THREE>(x.dz, x.dv, G, m.b, m.k, lane);
    keep_to_the_end(x.dz, lane, masks);
    keep_to_the_end(x.dv, lane, masks);
    if (start == nullptr) return;
    const float* const from = start + (lane.first + lane.row) * N + lane.column;
#pragma unroll 4
    for (int key = 0; key < N; key += 8) {
        const Floats<2> upper = load<2>(from + key), lower = load<2>(from + 8 * N + key),
                        decay = load<2>(f.decays + key + lane.column);
        const float even = inverse(decay.x[0]), odd = inverse(decay.x[1]);
        const Fragment scaled{{upper.x[0] * even, lower.x[0] * even, upper.x[1] * odd, lower.x[1] * odd}};
        const Factor<THREE> S(scaled), a(by_row<ROW>(m.a, key, lane));
        multiply_half(x.sa, S, a);
    }
    keep_from_before(x.sa, lane, masks);
}

template <bool THREE>
__device__ __forceinline__ void finish_values(Values& x, const Chunk& m, const Flow& f) {
    const Lane lane;
    const SquareFactor<THREE> v(square_by_column<ROW>(f.v, lane.first, lane));
    multiply<ABOVE_DIAGONAL>(x.sa, v, SquareFactor<THREE>(square_by_row<SIDE>(m.ak, lane)));
    const SquareFactor<THREE> z(x.sa);
    x.sa = Square{};
    multiply<ABOVE_DIAGONAL>(x.sa, z, SquareFactor<THREE>(square_by_row<SIDE>(m.x, lane)));
    const SquareFactor<THREE> dy(square_by_column<ROW>(f.dy, lane.first, lane));
    multiply<BELOW_DIAGONAL>(x.dz, dy, SquareFactor<THREE>(square_by_column<SIDE>(m.rb, 0, lane)));
    const SquareFactor<THREE> dsa(x.dz);
    x.dz = Square{};
    multiply<BELOW_DIAGONAL>(x.dz, dsa, SquareFactor<THREE>(square_by_column<SIDE>(m.x, 0, lane)));
    multiply<BELOW_DIAGONAL>(x.dv, dy, SquareFactor<THREE>(square_by_column<SIDE>(m.rk, 0, lane)));
    multiply<BELOW_DIAGONAL>(x.dv, SquareFactor<THREE>(x.dz),
                             SquareFactor<THREE>(square_by_column<SIDE>(m.ak, 0, lane)));
}

// As make_scores does with the scores.
template <bool THREE>
__device__ __forceinline__ void make_gradients_of_scores(const Flow& f, const Masks& masks) {
    const Lane lane;
    for (int job = warp_number(); job < 4; job += WARPS) {
        Square gradient{};
        multiply_rows<THREE>(gradient, job < 2 ? f.dz : f.dy, job == 1 || job == 2 ? f.v : f.sa, lane);
        keep_seen<false>(gradient, lane, masks, job < 2);
        store_square(f.dab + job * SQUARE, gradient, lane);
    }
}

// Gradients of a warp's 16 keys, scaled: [key][token]. E: the sum over values of S * G, for rows g and g + 8.
struct Keys {
    Square da, dr, db, dk;
    float E[2];
};

// What the state before the chunk and G after it give, and G^T before the chunk.
template <bool THREE>
__device__ __forceinline__ void begin_keys(Keys& x, Strip& G, const Chunk& m, const Flow& f, const float* start,
                                           const Masks& masks) {
    const Lane lane;
    x.da = x.dr = x.db = x.dk = Square{};
    multiply_strip<THREE>(x.db, x.dk, G, f.sa, f.v, lane);
    keep_to_the_end(x.db, lane, masks);
    keep_to_the_end(x.dk, lane, masks);
    if (masks.starts != 0) G.clear();
    Square r = square_by_column<ROW>(m.r, lane.first, lane);
    keep_from_before(r, lane, masks);
    add_tokens<THREE>(G, SquareFactor<THREE>(r), f.dy, lane);
    Square a = square_by_column<ROW>(m.a, lane.first, lane);
    keep_from_before(a, lane, masks);
    add_tokens<THREE>(G, SquareFactor<THREE>(a), f.dz, lane);
    x.E[0] = x.E[1] = 0.0f;
    if (start == nullptr) return;
    const float* const from = start + lane.column * N + lane.first + lane.row;
    const float upper = inverse(f.decays[lane.first + lane.row]), lower = inverse(f.decays[lane.first + lane.row + 8]);
#pragma unroll
    for (int k = 0; k < N / 8; k++) {
        const float* const even = from + 8 * k * N;
        const Fragment S{{even[0] * upper, even[8] * lower, even[N] * upper, even[N + 8] * lower}};
#pragma unroll
        for (int q = 0; q < 4; q++) x.E[q % 2] += S.x[q] * G.part[k].x[q];
        const Factor<THREE> factor(S);
        multiply_half(x.da, factor, Factor<THREE>(by_row<ROW>(f.dz, 8 * k, lane)));
        multiply_half(x.dr, factor, Factor<THREE>(by_row<ROW>(f.dy, 8 * k, lane)));
    }
    keep_from_before(x.da, lane, masks);
    keep_from_before(x.dr, lane, masks);
}

// What passes between the tokens of the chunk.
template <bool THREE>
__device__ __forceinline__ void finish_keys(Keys& x, const Chunk& m, const Flow& f) {
    const Lane lane;
    const SquareFactor<THREE> a(square_by_column<ROW>(m.a, lane.first, lane));
    const SquareFactor<THREE> r(square_by_column<ROW>(m.r, lane.first, lane));
    multiply<BELOW_DIAGONAL>(x.db, a, SquareFactor<THREE>(square_by_column<SIDE>(f.dab, 0, lane)));
    multiply<BELOW_DIAGONAL>(x.db, r, SquareFactor<THREE>(square_by_column<SIDE>(f.drb, 0, lane)));
    multiply<BELOW_DIAGONAL>(x.dk, a, SquareFactor<THREE>(square_by_column<SIDE>(f.dak, 0, lane)));
    multiply<BELOW_DIAGONAL>(x.dk, r, SquareFactor<THREE>(square_by_column<SIDE>(f.drk, 0, lane)));
    const SquareFactor<THREE> b(square_by_column<ROW>(m.b, lane.first, lane));
    const SquareFactor<THREE> k(square_by_column<ROW>(m.k, lane.first, lane));
    multiply<ABOVE_DIAGONAL>(x.da, b, SquareFactor<THREE>(square_by_row<SIDE>(f.dab, lane)));
    multiply<ABOVE_DIAGONAL>(x.da, k, SquareFactor<THREE>(square_by_row<SIDE>(f.dak, lane)));
    multiply<ABOVE_DIAGONAL>(x.dr, b, SquareFactor<THREE>(square_by_row<SIDE>(f.drb, lane)));
    multiply<ABOVE_DIAGONAL>(x.dr, k, SquareFactor<THREE>(square_by_row<SIDE>(f.drk, lane)));
}

// Writes the gradients without their scales, and leaves for decay_gradients, in the warp's columns of rows that nobody
// reads any more: a da in f.sa, r dr in f.dz, k dk + b db in f.v, E in the first row of f.dy.
template <typename T>
__device__ __forceinline__ void write_keys(const Backward& c, Keys& x, const Chunk& m, const Flow& f,
                                           const Tokens& tokens) {
    const Lane lane;
    Square P, A, R;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const int part = n / 4, q = n % 4, t = column_of(lane, part, q), key = lane.first + row_of(lane, q);
        float &da = x.da.part[part].x[q], &dr = x.dr.part[part].x[q], &db = x.db.part[part].x[q],
              &dk = x.dk.part[part].x[q];
        const int place = row(t) * ROW + key;
        A.part[part].x[q] = m.a[place] * da;
        R.part[part].x[q] = m.r[place] * dr;
        P.part[part].x[q] = m.k[place] * dk + m.b[place] * db;
        const float after = f.decays[row(t + 1) * ROW + key];
        da *= f.decays[place];
        dr *= after;
        db *= inverse(after);
        dk *= inverse(after);
    }
    store_columns(f.sa, A, lane);
    store_columns(f.dz, R, lane);
    store_columns(f.v, P, lane);
#pragma unroll
    for (int q = 0; q < 2; q++) {
        for (int distance = 1; distance < 4; distance *= 2) x.E[q] += __shfl_xor_sync(ALL_LANES, x.E[q], distance);
        if (lane.column == 0) f.dy[lane.first + row_of(lane, q)] = x.E[q];
    }
    write<T>(c.da, tokens, x.da, lane);
    write<T>(c.dr, tokens, x.dr, lane);
    write<T>(c.db, tokens, x.db, lane);
    write<T>(c.dk, tokens, x.dk, lane);
}

// E_t, for every key, is the sum over values of G * S after token t. By the recurrence it needs no state:
//   dw_log_t = E_{t-1} - (r dr)_{t-1} - (a da)_t,  E_t = dw_log_t + (k dk)_t + (b db)_t
template <typename T>
__device__ __forceinline__ void decay_gradients(const Backward& c, const Flow& f, const Tokens& tokens,
                                                const Masks& masks) {
    if (thread_number() % 32 >= 16) return;
    const int key = thread_number() / 32 * 16 + thread_number() % 32;
    float E = f.dy[key], before = 0.0f;
#pragma unroll
    for (int t = 0; t < CHUNK; t++)
        if (t < tokens.rows) {
            const int64_t token = tokens.of(t) + key;
            const int place = row(t) * ROW + key;
            const float dw_log = masks.clears(t) ? 0.0f : E - before - f.sa[place];
            const float slope = Decay::slope(Number<T>::read(__ldg(static_cast<const T*>(c.w_raw) + token)));
            static_cast<T*>(c.dw_raw)[token] = Number<T>::written(dw_log * slope);
            E = dw_log + f.v[place];
            before = f.dz[place];
        }
}

// G before the chunk from G after it.
template <bool THREE>
__device__ __forceinline__ void add_to_gradient(Strip& G, const Chunk& m, const Flow& f, Values& x,
                                                const Masks& masks) {
    const Lane lane;
    if (masks.starts != 0) G.clear();
    keep_from_before(x.dz, lane, masks);
    add_tokens(G, SquareFactor<THREE>(x.dz), m.a, lane);
    Square dy = square_by_column<ROW>(f.dy, lane.first, lane);
    keep_from_before(dy, lane, masks);
    add_tokens(G, SquareFactor<THREE>(dy), m.r, lane);
}

template <typename T>
__global__ void __launch_bounds__(BACKWARD_THREADS, 2) backward(const Backward c) {
    const Chunk m(shared_memory());
    const Flow f(shared_memory() + CHUNK_FLOATS);
    Strip by_value, by_key;
    by_value.load_rows(matrix_of_block<N>(c.dstate_out), Lane());
    by_key.load_columns(matrix_of_block<N>(c.dstate_out), Lane());
    for (int chunk = num_chunks(c.shape.T) - 1; chunk >= 0; chunk--) {
        const Masks masks = masks_of_chunk(c.shape, c.starts, chunk);
        // The rows and squares of the chunk behind are still read.
        __syncthreads();
        read_backward<T>(c, m, f, Column(c.shape, chunk));
        __syncthreads();
        make_scores<THREE<T>>(m, masks);
        by_value.scale_columns<false>(f.decays + CHUNK * ROW, Lane());
        by_key.scale_rows<false>(f.decays + CHUNK * ROW, Lane());
        Values x;
        begin_values<THREE<T>>(x, by_value, m, f, c.start_of(chunk), masks);
        // The squares are made.
        __syncthreads();
        finish_values<THREE<T>>(x, m, f);
        store_columns(f.sa, x.sa, Lane());
        store_columns(f.dz, x.dz, Lane());
        write<T>(c.dv, Tokens(c.shape, chunk), x.dv, Lane());
        add_to_gradient<THREE<T>>(by_value, m, f, x, masks);
        by_value.scale_columns<true>(f.decays, Lane());
        // sa and dz of all values are there.
        __syncthreads();
        make_gradients_of_scores<THREE<T>>(f, masks);
        Keys y;
        begin_keys<THREE<T>>(y, by_key, m, f, c.start_of(chunk), masks);
        by_key.scale_rows<true>(f.decays, Lane());
        // The squares' gradients are made, and the rows of values are read for the last time.
        __syncthreads();
        finish_keys<THREE<T>>(y, m, f);
        write_keys<T>(c, y, m, f, Tokens(c.shape, chunk));
        __syncwarp();
        decay_gradients<T>(c, f, Tokens(c.shape, chunk), masks);
    }
    if (c.dstate_in != nullptr) by_value.store_rows(matrix_of_block<N>(c.dstate_in), Lane());
}

}  // namespace
