// What forward and backward of the WKV-7 on tensor cores share: masks, fragments of rows in shared memory, products.
// Legend as in wkv7_tensor.cu. Rows lie ROW floats apart, token t's in place row(t): so a warp's loads of eight rows
// side by side and of the same columns of eight tokens both meet every bank of the memory once.

#pragma once

#include <type_traits>

#include "device.cuh"
#include "mma.cuh"
#include "rows.cuh"
#include "wkv7.cuh"

namespace {

static_assert(CHUNK == 16, "a chunk is the side of the squares");
static_assert(N <= 64, "the backward has no registers for both copies of a wider head's gradient");

// A warp has 16 rows of the state.
constexpr int WARPS = N / 16, THREADS = WARPS * 32;
constexpr int ROW = N + 8, SIDE = CHUNK + 8;
constexpr int ROWS_OF_CHUNK = CHUNK * ROW, SQUARE = CHUNK * SIDE;

// bfloat16 is rounded more coarsely than tf32; float16 as finely, so there as in float32 one product is not enough.
template <typename T>
constexpr bool THREE = !std::is_same<T, __nv_bfloat16>::value;

__device__ __forceinline__ int row(int t) { return t ^ (t >> 2 & 3); }

// Asked of lane 0, for the compiler must see that a warp does one thing.
__device__ __forceinline__ int warp_number() { return __shfl_sync(ALL_LANES, thread_number() / 32, 0); }

// ---- which tokens see one another across the tokens that clear the state ----

struct Masks {
    // Bit t: the state is cleared before token t of the chunk.
    unsigned starts;

    __device__ __forceinline__ bool clears(int t) const { return starts >> t & 1; }
    // Token t sees the state before the chunk.
    __device__ __forceinline__ bool from_before(int t) const { return (starts & ((2u << t) - 1u)) == 0; }
    // The state after the chunk holds token t.
    __device__ __forceinline__ bool to_the_end(int t) const { return starts >> t >> 1 == 0; }
    // Token `late` sees token `early`, or is it.
    __device__ __forceinline__ bool together(int late, int early) const {
        return (starts & ((2u << late) - (2u << early))) == 0;
    }
};

// The token or key of number q of part `half` of a square.
__device__ __forceinline__ int column_of(const Lane& lane, int half, int q) { return 8 * half + lane.column + q / 2; }
__device__ __forceinline__ int row_of(const Lane& lane, int q) { return lane.row + q % 2 * 8; }

// Square [late token][early token] or its transpose: what is not seen becomes zero. `strict`: no token sees itself.
template <bool TRANSPOSED>
__device__ __forceinline__ void keep_seen(Square& x, const Lane& lane, const Masks& masks, bool strict) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const int i = row_of(lane, q), j = column_of(lane, half, q);
            const int late = TRANSPOSED ? j : i, early = TRANSPOSED ? i : j;
            if (late < early + strict || !masks.together(late, early)) x.part[half].x[q] = 0.0f;
        }
}

// Square [value or key][token].
__device__ __forceinline__ void keep_from_before(Square& x, const Lane& lane, const Masks& masks) {
#pragma unroll
    for (int q = 0; q < 8; q++)
        if (!masks.from_before(column_of(lane, q / 4, q % 4))) x.part[q / 4].x[q % 4] = 0.0f;
}

__device__ __forceinline__ void keep_to_the_end(Square& x, const Lane& lane, const Masks& masks) {
#pragma unroll
    for (int q = 0; q < 8; q++)
        if (!masks.to_the_end(column_of(lane, q / 4, q % 4))) x.part[q / 4].x[q % 4] = 0.0f;
}

// ---- fragments of rows in shared memory ----

// Tokens by columns `column` to `column` + 7.
template <int STRIDE>
__device__ __forceinline__ Fragment by_row(const float* from, int column, const Lane& lane) {
    const Floats<2> upper = load<2>(from + row(lane.row) * STRIDE + column + lane.column);
    const Floats<2> lower = load<2>(from + row(lane.row + 8) * STRIDE + column + lane.column);
    return {{upper.x[0], lower.x[0], upper.x[1], lower.x[1]}};
}

// Columns `column` to `column` + 15 by tokens `first` to `first` + 7.
template <int STRIDE>
__device__ __forceinline__ Fragment by_column(const float* from, int first, int column, const Lane& lane) {
    const float* const even = from + row(first + lane.column) * STRIDE + column + lane.row;
    const float* const odd = from + row(first + lane.column + 1) * STRIDE + column + lane.row;
    return {{even[0], even[8], odd[0], odd[8]}};
}

template <int STRIDE>
__device__ __forceinline__ Square square_by_row(const float* from, const Lane& lane) {
    return {{by_row<STRIDE>(from, 0, lane), by_row<STRIDE>(from, 8, lane)}};
}

template <int STRIDE>
__device__ __forceinline__ Square square_by_column(const float* from, int column, const Lane& lane) {
    return {{by_column<STRIDE>(from, 0, column, lane), by_column<STRIDE>(from, 8, column, lane)}};
}

// A square of tokens by tokens, where square_by_row finds it.
__device__ __forceinline__ void store_square(float* to, const Square& x, const Lane& lane) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int q = 0; q < 2; q++) {
            const Floats<2> pair{{x.part[half].x[q], x.part[half].x[q + 2]}};
            store<2>(to + row(row_of(lane, q)) * SIDE + column_of(lane, half, q), pair);
        }
}

// [value or key][token] of the warp, where square_by_column finds it.
__device__ __forceinline__ void store_columns(float* to, const Square& x, const Lane& lane) {
#pragma unroll
    for (int q = 0; q < 8; q++)
        to[row(column_of(lane, q / 4, q % 4)) * ROW + lane.first + row_of(lane, q % 4)] = x.part[q / 4].x[q % 4];
}

// Where the tokens of a chunk lie. Made anew in each step, as Lane is.
struct Tokens {
    int64_t first;
    int stride, rows;

    __device__ __forceinline__ Tokens(const Shape& shape, int chunk) {
        const Place place = place_of_block<N>(shape);
        first = place.of_token(chunk * CHUNK);
        stride = place.stride;
        rows = rows_of_chunk(shape.T, chunk);
    }
    __device__ __forceinline__ int64_t of(int t) const { return first + static_cast<int64_t>(t) * stride; }
};

__device__ __forceinline__ Masks masks_of_chunk(const Shape& shape, const uint8_t* starts, int chunk) {
    const int64_t token = place_of_block<N>(shape).tokens + chunk * CHUNK;
    return {starts_of_chunk(starts, token, rows_of_chunk(shape.T, chunk))};
}

// [value or key][token] of the warp to a tensor.
template <typename T>
__device__ __forceinline__ void write(void* tensor, const Tokens& tokens, const Square& x, const Lane& lane) {
#pragma unroll
    for (int q = 0; q < 8; q++) {
        const int t = column_of(lane, q / 4, q % 4);
        if (t < tokens.rows)
            static_cast<T*>(tensor)[tokens.of(t) + lane.first + row_of(lane, q % 4)] =
                Number<T>::written(x.part[q / 4].x[q % 4]);
    }
}

// ---- products ----

// c += left right^T over all N columns of both.
template <bool THREE>
__device__ __forceinline__ void multiply_rows(Square& c, const float* left, const float* right, const Lane& lane) {
#pragma unroll 1
    for (int column = 0; column < N; column += 8) {
        const Factor<THREE> a(by_row<ROW>(left, column, lane)), b(by_row<ROW>(right, column, lane));
        multiply_half(c, a, b);
    }
}

// 16 rows of a state in a warp's registers.
struct Strip {
    Fragment part[N / 8];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; k < N / 8; k++) part[k] = Fragment{};
    }

    // The warp's rows of a matrix; null gives zeros.
    __device__ __forceinline__ void load_rows(const float* matrix, const Lane& lane) {
        if (matrix == nullptr) return clear();
        const float* const from = matrix + (lane.first + lane.row) * N + lane.column;
#pragma unroll
        for (int k = 0; k < N / 8; k++) {
            const Floats<2> upper = load<2>(from + 8 * k), lower = load<2>(from + 8 * N + 8 * k);
            part[k] = {{upper.x[0], lower.x[0], upper.x[1], lower.x[1]}};
        }
    }

    // The same of its transpose.
    __device__ __forceinline__ void load_columns(const float* matrix, const Lane& lane) {
        if (matrix == nullptr) return clear();
        const float* const from = matrix + lane.column * N + lane.first + lane.row;
#pragma unroll
        for (int k = 0; k < N / 8; k++) {
            const float* const even = from + 8 * k * N;
            part[k] = {{even[0], even[8], even[N], even[N + 8]}};
        }
    }

    __device__ __forceinline__ void store_rows(float* matrix, const Lane& lane) const {
        float* const to = matrix + (lane.first + lane.row) * N + lane.column;
#pragma unroll
        for (int k = 0; k < N / 8; k++) {
            store<2>(to + 8 * k, Floats<2>{{part[k].x[0], part[k].x[2]}});
            store<2>(to + 8 * N + 8 * k, Floats<2>{{part[k].x[1], part[k].x[3]}});
        }
    }

    // Every row times the N numbers `by`, or over them.
    template <bool OVER>
    __device__ __forceinline__ void scale_columns(const float* by, const Lane& lane) {
#pragma unroll
        for (int k = 0; k < N / 8; k++) {
            const Floats<2> x = load<2>(by + 8 * k + lane.column);
            const float even = OVER ? inverse(x.x[0]) : x.x[0], odd = OVER ? inverse(x.x[1]) : x.x[1];
#pragma unroll
            for (int q = 0; q < 4; q++) part[k].x[q] *= q < 2 ? even : odd;
        }
    }

    // Every column times the numbers of `by` that are the warp's, or over them.
    template <bool OVER>
    __device__ __forceinline__ void scale_rows(const float* by, const Lane& lane) {
        const float upper = OVER ? inverse(by[lane.first + lane.row]) : by[lane.first + lane.row];
        const float lower = OVER ? inverse(by[lane.first + lane.row + 8]) : by[lane.first + lane.row + 8];
#pragma unroll
        for (int k = 0; k < N / 8; k++)
#pragma unroll
            for (int q = 0; q < 4; q++) part[k].x[q] *= q % 2 == 0 ? upper : lower;
    }
};

// c += strip left^T and d += strip right^T. Side by side, for else the strip's factors of one product would wait in
// registers for the other.
template <bool THREE>
__device__ __forceinline__ void multiply_strip(Square& c, Square& d, const Strip& strip, const float* left,
                                               const float* right, const Lane& lane) {
#pragma unroll
    for (int k = 0; k < N / 8; k++) {
        const Factor<THREE> factor(strip.part[k]);
        multiply_half(c, factor, Factor<THREE>(by_row<ROW>(left, 8 * k, lane)));
        multiply_half(d, factor, Factor<THREE>(by_row<ROW>(right, 8 * k, lane)));
    }
}

// strip += x right, x of 16 rows by the chunk's tokens.
template <bool THREE>
__device__ __forceinline__ void add_tokens(Strip& strip, const SquareFactor<THREE>& x, const float* right,
                                           const Lane& lane) {
#pragma unroll
    for (int k = 0; k < N / 16; k++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Factor<THREE> b(by_column<ROW>(right, 8 * half, 16 * k, lane));
            multiply(strip.part[2 * k], x.part[half], b, 0);
            multiply(strip.part[2 * k + 1], x.part[half], b, 1);
        }
}

}  // namespace
