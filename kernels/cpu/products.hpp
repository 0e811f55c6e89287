// Products of one vector with several matrices at once, y = f(x W): each weight is read once, and reading is the work.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "step.hpp"
#include "threads.hpp"

namespace {

enum Activation { PLAIN, TANH, SIGMOID, SQUARED_RELU };

// weight is [out, in], or [in, out] where `columns` is set.
struct Product {
    const float *x, *weight;
    float* y;
    int64_t in, out;
    bool columns;
    Activation activation;
};

struct Products {
    const Product* list;
};

// Numbers of y in a piece of work: a whole number of registers.
constexpr int64_t PIECE = 64;
// A thread is not worth its waking for fewer numbers than these.
constexpr int64_t NUMBERS_A_THREAD = 1 << 17;

inline int64_t pieces_of(const Product& p) { return (p.out + PIECE - 1) / PIECE; }

template <int R>
INLINE void dot_rows(const Product& p, int64_t row, float* y) {
    const float* const from = p.weight + row * p.in;
    V total[R];
    UNROLL
    for (int n = 0; n < R; n++) total[n] = V{};
    int64_t j = 0;
    for (; j + W <= p.in; j += W) {
        const V x = get(p.x + j);
        UNROLL
        for (int n = 0; n < R; n++) {
            // The processor's own fetching ahead ends at a page.
            __builtin_prefetch(from + n * p.in + j + 256, 0, 3);
            total[n] += get(from + n * p.in + j) * x;
        }
    }
    for (int n = 0; n < R; n++) {
        y[n] = sum(total[n]);
        for (int64_t rest = j; rest < p.in; rest++) y[n] += from[n * p.in + rest] * p.x[rest];
    }
}

APART void rows_piece(const Product& p, int64_t first, int64_t count, float* y) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) dot_rows<4>(p, first + i, y + i);
    for (; i < count; i++) dot_rows<1>(p, first + i, y + i);
}

APART void columns_piece(const Product& p, int64_t first, int64_t count, float* y) {
    if (count == PIECE) {
        V total[PIECE / W];
        UNROLL
        for (int n = 0; n < PIECE / W; n++) total[n] = V{};
        for (int64_t j = 0; j < p.in; j++) {
            UNROLL
            for (int n = 0; n < PIECE / W; n++) total[n] += get(p.weight + j * p.out + first + n * W) * p.x[j];
        }
        UNROLL
        for (int n = 0; n < PIECE / W; n++) store(y + n * W, total[n]);
        return;
    }
    std::memset(y, 0, PIECE * sizeof(float));
    for (int64_t j = 0; j < p.in; j++)
        for (int64_t i = 0; i < count; i++) y[i] += p.weight[j * p.out + first + i] * p.x[j];
}

INLINE float activated(float x, Activation activation) {
    if (activation == TANH) return std::tanh(x);
    if (activation == SIGMOID) return 1.0f / (1.0f + std::exp(-x));
    if (activation == SQUARED_RELU) return x > 0.0f ? x * x : 0.0f;
    return x;
}

struct ProductRoom {
    alignas(64) float y[PIECE];
};

APART void product_piece(const Products& c, int64_t piece, ProductRoom& m) {
    const Product* p = c.list;
    for (; piece >= pieces_of(*p); p++) piece -= pieces_of(*p);
    const int64_t first = piece * PIECE, count = first + PIECE < p->out ? PIECE : p->out - first;
    if (p->columns) columns_piece(*p, first, count, m.y);
    else rows_piece(*p, first, count, m.y);
    for (int64_t i = 0; i < count; i++) p->y[first + i] = activated(m.y[i], p->activation);
}

// Products that do not wait for each other. Returns 0, or 2 where no memory was left.
template <int COUNT>
int multiply(const Product (&list)[COUNT], int64_t num_threads, Parallel parallel) {
    int64_t pieces = 0, numbers = 0;
    for (const Product& p : list) {
        pieces += pieces_of(p);
        numbers += p.in * p.out;
    }
    const int64_t worth = 1 + numbers / NUMBERS_A_THREAD;
    return Work<Products, ProductRoom, product_piece>::start(
        {list}, pieces, num_threads < worth ? num_threads : worth, parallel);
}

}  // namespace
