// What the fused operators share: how they are called, and rows of float32 or bfloat16 read and written as vectors.
// Legend: sizes, tensors and scalars come in the order that each operator's header says; a tensor may be null where it
// says so. Rows are multiples of 16 numbers long. What a sum over all rows needs is summed over pieces of fixed rows
// into places of their own, which the caller adds up: no bit of a result depends on the number of threads.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "exponential.hpp"
#include "lanes.hpp"
#include "threads.hpp"

namespace {

struct Call {
    const int64_t* sizes;
    void* const* tensors;
    const float* scalars;

    template <class T>
    T* tensor(int n) const {
        return static_cast<T*>(tensors[n]);
    }

    // Row `row` of a tensor of rows of `length`, or null where there is no tensor.
    template <class T>
    T* row(int n, int64_t row, int64_t length) const {
        return tensors[n] == nullptr ? nullptr : static_cast<T*>(tensors[n]) + row * length;
    }
};

INLINE V get(const float* p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
INLINE V get(const uint16_t* p) { return from_bf16(p); }
INLINE void put(float* p, V x) { std::memcpy(p, &x, sizeof x); }
INLINE void put(uint16_t* p, V x) { to_bf16(p, x); }
INLINE void add_to(float* p, V x) { put(p, get(p) + x); }

INLINE float sum_of(V x) {
    float sum = 0.0f;
    for (int n = 0; n < W; n++) sum += x[n];
    return sum;
}

// 1 / (1 + exp(-x)), and what it lacks of 1, both to the last digits however near to 0 they are.
struct Sigmoid {
    V value, rest;

    INLINE V slope() const { return value * rest; }
};

INLINE Sigmoid sigmoid(V x) {
    const V e = exponential(x < 0.0f ? x : -x).whole();
    const V near_one = 1.0f / (1.0f + e), near_zero = e * near_one;
    return {x < 0.0f ? near_zero : near_one, x < 0.0f ? near_one : near_zero};
}

inline int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

// The mean and 1/deviation of a norm.
struct Stats {
    float mean, scale;
};

// The rows of one piece, of H heads of N channels, from the sizes R, H, N, rows of a piece.
struct Rows {
    int64_t C, N, begin, end;

    Rows(const Call& call, int64_t piece)
        : C(call.sizes[1] * call.sizes[2]),
          N(call.sizes[2]),
          begin(piece * call.sizes[3]),
          end(smaller(begin + call.sizes[3], call.sizes[0])) {}
};

// Sequences of T tokens, from the sizes B, T, C, mixed outputs, rows of a piece. A piece is a run of one sequence's tokens.
struct Sequences {
    int64_t T, C, run, of_a_sequence;

    explicit Sequences(const Call& call)
        : T(call.sizes[1]), C(call.sizes[2]), run(call.sizes[4]), of_a_sequence((T + run - 1) / run) {}
};

inline bool marked(const uint8_t* starts, int64_t t) { return starts != nullptr && starts[t] != 0; }

typedef void Piece(const Call&, int64_t, Nothing&);

template <Piece IN_FLOAT, Piece IN_BF16>
int start(const Call& call, bool bf16, int64_t pieces, int64_t num_threads, Parallel parallel) {
    return bf16 ? Work<Call, Nothing, IN_BF16>::start(call, pieces, num_threads, parallel)
                : Work<Call, Nothing, IN_FLOAT>::start(call, pieces, num_threads, parallel);
}

}  // namespace

// The head of every exported function.
#define OPERATOR(name)                                                                                       \
    extern "C" int name(const int64_t* sizes, int dtype, void* const* tensors, const float* scalars,         \
                        int64_t num_threads, Parallel parallel)
