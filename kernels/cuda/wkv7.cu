// WKV-7 on CUDA devices from sm_80 on, forward and backward: float32, bfloat16 or float16 inputs, float32 states.
// Legend: B batch, T time, H heads, N head size; S is the state of one head, S[i][j] with i the value, j the key index.
//   w_log = -exp(-1/2) * sigmoid(w_raw),  decay = exp(w_log),  sa = S a
//   S <- S diag(decay) + sa b^T + v k^T,  y = S r   (read after the update; `starts` clears S before its token)
// Saved for the backward: sa of every token, and S before tokens CHUNK, 2*CHUNK, ...; the states in between are
// computed again, never divided out. One block works on one (batch, head) pair, every sum in a fixed order.
//
// Counted on paper and in the machine code for sm_90, not measured: nobody has run this on a device yet.
//                                            forward, N 64   backward, N 64   forward, N 128   backward, N 128
//   threads, registers at most                     64, 128         192, 168         256, 128          256, 255
//   shared memory, bytes                            24,576           73,984           49,152            90,624
//   blocks, warps on an H100's multiprocessor        8, 16            2, 12            2, 16              1, 8
//   multiply-adds, of 5 and 15 passes over S        20,480           61,440           81,920           245,760
//   instructions of warps                              940            2,720            3,700            11,300
//   bytes, where inputs are of 16 bits                2,176            2,944            6,400             7,936
// all of the last three for one token of one head. An H100 (132 multiprocessors at 1.755 GHz issue 9.3e11 warp
// instructions a second; 3.35 TB/s) can so not need less than 1.0 + 2.9 ns for one token of one head of 64, by the
// instructions; by the bytes 0.7 + 0.9 ns. With fewer blocks than fit, the time is that of one token after another.

#include <cstdint>

#include "device.cuh"
#include "rows.cuh"
#include "tile.cuh"
#include "wkv7.cuh"
#include "wkv7_backward.cuh"

namespace {

constexpr int FORWARD_ROWS = 6, FORWARD_THREADS = L::THREADS;
constexpr int FORWARD_BYTES = FORWARD_ROWS * CHUNK * N * static_cast<int>(sizeof(float));

// One token: values are the short dimension of S, keys the long one.
template <typename T>
__device__ __forceinline__ void forward_token(Tile<L>& S, const L& lay, const float* const (&in)[FORWARD_ROWS], int t,
                                              T* y, float* kept_sa) {
    float sa[L::SHORT] = {}, sum[L::SHORT] = {};
#pragma unroll
    for (int q = 0; q < L::FOURS; q++) {
        const Floats<4> a = load<4>(in[4] + t * N + lay.four(q));
#pragma unroll
        for (int s = 0; s < L::SHORT; s++)
#pragma unroll
            for (int e = 0; e < 4; e++) sa[s] += S.x[s][4 * q + e] * a.x[e];
    }
    sum_all(sa, lay);
    const Floats<L::SHORT> v = load<L::SHORT>(in[3] + t * N + lay.first);
#pragma unroll
    for (int q = 0; q < L::FOURS; q++) {
        const int at = t * N + lay.four(q);
        const Floats<4> r = load<4>(in[0] + at), decay = load<4>(in[1] + at), k = load<4>(in[2] + at),
                        b = load<4>(in[5] + at);
#pragma unroll
        for (int s = 0; s < L::SHORT; s++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = S.x[s][4 * q + e];
                x = __fmaf_rn(v.x[s], k.x[e], __fmaf_rn(sa[s], b.x[e], x * decay.x[e]));
                sum[s] += x * r.x[e];
            }
    }
    const float one = sum_one(sum, lay);
    if (lay.has_one()) y[lay.one()] = Number<T>::written(one);
    if (kept_sa != nullptr && lay.group == 0) {
        Floats<L::SHORT> out;
#pragma unroll
        for (int s = 0; s < L::SHORT; s++) out.x[s] = sa[s];
        store<L::SHORT>(kept_sa + lay.first, out);
    }
}

template <typename T>
__global__ void __launch_bounds__(L::THREADS, N == 64 ? 8 : N == 128 ? 2 : 1) forward(const Forward c) {
    float* const shared = shared_memory();
    const Place place = place_of_block<N>(c.shape);
    const int chunks = num_chunks(c.shape.T), thread = static_cast<int>(threadIdx.x);
    const L lay(thread);
    const T* const from[FORWARD_ROWS] = {static_cast<const T*>(c.r), static_cast<const T*>(c.w_raw),
                                         static_cast<const T*>(c.k), static_cast<const T*>(c.v),
                                         static_cast<const T*>(c.a), static_cast<const T*>(c.b)};
    float* to[FORWARD_ROWS];
    const float* in[FORWARD_ROWS];
#pragma unroll
    for (int q = 0; q < FORWARD_ROWS; q++) in[q] = to[q] = shared + q * CHUNK * N;
    Tile<L> S;
    S.load_short_rows(matrix_of_block<N>(c.state_in), lay);
    for (int chunk = 0; chunk < chunks; chunk++) {
        const int rows = rows_of_chunk(c.shape.T, chunk);
        if (chunk > 0 && c.chunk_states != nullptr)
            S.store_short_rows(matrix_of_chunk<N>(c.chunk_states, c.shape.T, chunk), lay);
        const unsigned starts = starts_of_chunk(c.starts, place.tokens + chunk * CHUNK, rows);
        read_rows<N, N, FORWARD_ROWS, 1, Decay, false>(from, to, place.of_token(chunk * CHUNK), place.stride, rows,
                                                       thread, L::THREADS);
        __syncthreads();
        for (int t = 0; t < rows;) {
            if (starts >> t & 1) S.clear();
            for (const int next = next_start(starts, t, rows); t < next; t++) {
                const int64_t token = place.of_token(chunk * CHUNK + t);
                forward_token<T>(S, lay, in, t, static_cast<T*>(c.y) + token, c.sa == nullptr ? nullptr : c.sa + token);
            }
        }
        // The next chunk's rows take the place of these.
        __syncthreads();
    }
    S.store_short_rows(matrix_of_block<N>(c.state_out), lay);
}

}  // namespace

#include "wkv7_calls.cuh"
