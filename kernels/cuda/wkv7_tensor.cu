// WKV-7 on tensor cores, from sm_80 on, for head sizes up to 64: the C functions, inputs and results of wkv7.cu, by
// products of matrices over chunks of 16 tokens. A second kernel beside the plain one, chosen by nobody until measured.
// Legend as in wkv7.cu; S is the state before a chunk, S' that after it; f_t is the product of the decays from the
// chunk's middle to after token t (before the middle: 1 over it), so that no scale leaves [1/128, 128]:
//   a_t <- a_t f_{t-1},  r_t <- r_t f_t,  b_t <- b_t / f_t,  k_t <- k_t / f_t,  S <- S / f_{-1},  S' <- S' / f_15
//   AB, AK = scores of a with b and k, j < i;  RB, RK = those of r, j <= i;  X = (I - AB)^-1
//   sa = X (a S^T + AK v),  y = r S^T + RB sa + RK v,  S' = S + sa^T b + v^T k
// A token that clears the state zeroes the scores across it, a S^T and r S^T from it on; and in S' what is before it.
// The backward, with G the gradient of S', dz that of a S^T, and the same scales and zeros:
//   dz = X^T (RB^T dy + b G^T),  dv = RK^T dy + AK^T dz + k G^T,  G before the chunk = G + dy^T r + dz^T a
//   dAB, dAK, dRB, dRK = dz sa^T, dz v^T, dy sa^T, dy v^T where the scores aren't zero
//   da = dz S + dAB b + dAK k,      dr = dy S + dRB b + dRK k
//   db = sa G + dAB^T a + dRB^T r,  dk = v G + dAK^T a + dRK^T r
// Saved are the states before chunks alone; sa is neither written nor read. Every sum has a fixed order. bfloat16 takes
// one tf32 product for each product, float32 and float16 three (mma.cuh), for their results are rounded more finely.
//
// Counted on paper and in the machine code for sm_90 with N 64, not measured: nobody has run this on a device yet.
//                                                       forward   backward
//   threads; registers at most                         128; 168   128; 255
//   shared memory, bytes                                 29,696     54,048
//   blocks, warps on an H100's multiprocessor             3, 12       2, 8
//   barriers for a chunk                                      3          5
//   tensor core instructions, bfloat16 (others: x 3)        408      1,040    for a chunk of a head
//   instructions of warps, bfloat16; float32         760; 1,070  1,680; 2,600    for a token of a head
//   bytes, where inputs are of 16 bits                    1,920      2,688    for a token of a head
// The plain kernel takes 940 and 2,720 instructions: so with bfloat16 a gain of 1.5 is in sight where every
// multiprocessor has work, with float32 none; with few heads, where the time is that of one step after another, there
// is one step of a chunk instead of 16 of a token. Not done: the next chunk's rows are not on their way while a chunk
// is worked on.

#include <cstdint>

#include "device.cuh"
#include "mma.cuh"
#include "rows.cuh"
#include "wkv7.cuh"
#include "wkv7_tensor.cuh"
#include "wkv7_tensor_backward.cuh"
#include "wkv7_tensor_chunk.cuh"

namespace {

constexpr int FORWARD_THREADS = THREADS;
constexpr int FORWARD_BYTES = (CHUNK_FLOATS + ROWS_OF_CHUNK + 2 * N) * static_cast<int>(sizeof(float));

// A chunk's rows, by each thread half a column of all.
template <typename T>
__device__ __forceinline__ void read_forward(const Forward& c, const Chunk& m, float* v, float* ends,
                                             const Column& column) {
    float scale[CHUNK / 2 + 1];
    column.decays<T>(c.w_raw, scale);
    ends[column.half * N + column.key] = column.half == 0 ? inverse(scale[CHUNK / 2]) : scale[CHUNK / 2];
    column.copy_scaled<T, true, false>(c.a, scale, m.a);
    column.copy_scaled<T, false, false>(c.r, scale, m.r);
    column.copy_scaled<T, false, true>(c.b, scale, m.b);
    column.copy_scaled<T, false, true>(c.k, scale, m.k);
    column.copy<T>(c.v, v);
}

// [value][token]: v, and the products with the state before the chunk.
template <bool THREE>
__device__ __forceinline__ void begin_tokens(const Chunk& m, const Strip& S, const float* v, const Masks& masks,
                                             Square& value, Square& sa, Square& y) {
    const Lane lane;
    sa = y = Square{};
    multiply_strip<THREE>(sa, y, S, m.a, m.r, lane);
    keep_from_before(sa, lane, masks);
    keep_from_before(y, lane, masks);
    value = square_by_column<ROW>(v, lane.first, lane);
}

// [value][token]: what the chunk itself adds to the products with the state before it.
template <bool THREE>
__device__ __forceinline__ void finish_tokens(const Chunk& m, const Square& value, Square& sa, Square& y) {
    const Lane lane;
    const SquareFactor<THREE> v(value);
    multiply<ABOVE_DIAGONAL>(sa, v, SquareFactor<THREE>(square_by_row<SIDE>(m.ak, lane)));
    const Square without = sa;
    sa = Square{};
    multiply<ABOVE_DIAGONAL>(sa, SquareFactor<THREE>(without), SquareFactor<THREE>(square_by_row<SIDE>(m.x, lane)));
    multiply<ABOVE_DIAGONAL>(y, v, SquareFactor<THREE>(square_by_row<SIDE>(m.rk, lane)));
    multiply<ABOVE_DIAGONAL>(y, SquareFactor<THREE>(sa), SquareFactor<THREE>(square_by_row<SIDE>(m.rb, lane)));
}

template <bool THREE>
__device__ __forceinline__ void add_chunk(const Chunk& m, const Masks& masks, Square& value, Square& sa, Strip& S) {
    const Lane lane;
    if (masks.starts != 0) S.clear();
    keep_to_the_end(value, lane, masks);
    keep_to_the_end(sa, lane, masks);
    add_tokens(S, SquareFactor<THREE>(value), m.k, lane);
    add_tokens(S, SquareFactor<THREE>(sa), m.b, lane);
}

template <typename T>
__global__ void __launch_bounds__(FORWARD_THREADS, 3) forward(const Forward c) {
    const Chunk m(shared_memory());
    // v; and for each key the decays from the chunk's beginning to its middle, and from there to its end.
    float* const v = shared_memory() + CHUNK_FLOATS;
    float* const ends = v + ROWS_OF_CHUNK;
    Strip S;
    S.load_rows(matrix_of_block<N>(c.state_in), Lane());
    for (int chunk = 0; chunk < num_chunks(c.shape.T); chunk++) {
        if (chunk > 0 && c.chunk_states != nullptr)
            S.store_rows(matrix_of_chunk<N>(c.chunk_states, c.shape.T, chunk), Lane());
        const Masks masks = masks_of_chunk(c.shape, c.starts, chunk);
        // The rows and squares of the chunk before are still read.
        __syncthreads();
        read_forward<T>(c, m, v, ends, Column(c.shape, chunk));
        __syncthreads();
        make_scores<THREE<T>>(m, masks);
        S.scale_columns<false>(ends, Lane());
        Square value, sa, y;
        begin_tokens<THREE<T>>(m, S, v, masks, value, sa, y);
        // The squares are made.
        __syncthreads();
        finish_tokens<THREE<T>>(m, value, sa, y);
        write<T>(c.y, Tokens(c.shape, chunk), y, Lane());
        add_chunk<THREE<T>>(m, masks, value, sa, S);
        S.scale_columns<false>(ends + N, Lane());
    }
    S.store_rows(matrix_of_block<N>(c.state_out), Lane());
}

}  // namespace

#include "wkv7_calls.cuh"
