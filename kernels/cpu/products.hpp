// Products of B vectors with several matrices at once, y = f(x W). A weight is read from memory once, as it lies: for
// few vectors reading it is the work, and a general matrix product would first lay it out anew.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "folds.hpp"
#include "step.hpp"
#include "threads.hpp"

namespace {

enum Activation { PLAIN, TANH, SIGMOID, SQUARED_RELU };

// x [B, in], y [B, out]; weight [out, in], or [in, out] where `columns` is set.
struct Product {
    const float *x, *weight;
    float* y;
    int64_t in, out;
    bool columns;
    Activation activation;
};

struct Products {
    const Product* list;
    int64_t B;
};

// Outputs in a piece of work: a whole number of registers.
constexpr int64_t PIECE = 64;
// A thread is not worth its waking for fewer multiplications than these.
constexpr int64_t WORTH_A_THREAD = 1 << 17;
// Sums that are kept side by side: rows of a weight times vectors, as many as a register has lanes.
constexpr int64_t ROWS = 4, VECTORS_OF_X = W / 4;

inline int64_t pieces_of(const Product& p) { return (p.out + PIECE - 1) / PIECE; }

INLINE float activated(float x, Activation activation) {
    if (activation == TANH) return std::tanh(x);
    if (activation == SIGMOID) return 1.0f / (1.0f + std::exp(-x));
    // What is not a number stays so.
    if (activation == SQUARED_RELU) return x < 0.0f ? 0.0f : x * x;
    return x;
}

INLINE void finish(const Product& p, int64_t b, int64_t row, float y) {
    p.y[b * p.out + row] = activated(y, p.activation);
}

// One vector: R rows of the weight.
template <int R>
INLINE void dot_rows(const Product& p, int64_t row) {
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
        float y = sum(total[n]);
        for (int64_t rest = j; rest < p.in; rest++) y += from[n * p.in + rest] * p.x[rest];
        finish(p, 0, row + n, y);
    }
}

// ROWS rows by VECTORS_OF_X vectors; what lies beyond the last row or vector is the last one again and not kept.
APART void dot_block(const Product& p, int64_t row, int64_t rows, int64_t b, int64_t vectors) {
    const float *from[ROWS], *x[VECTORS_OF_X];
    for (int64_t n = 0; n < ROWS; n++) from[n] = p.weight + (row + (n < rows ? n : rows - 1)) * p.in;
    for (int64_t q = 0; q < VECTORS_OF_X; q++) x[q] = p.x + (b + (q < vectors ? q : vectors - 1)) * p.in;
    V total[ROWS][VECTORS_OF_X];
    UNROLL
    for (int64_t n = 0; n < ROWS; n++)
        UNROLL
        for (int64_t q = 0; q < VECTORS_OF_X; q++) total[n][q] = V{};
    int64_t j = 0;
    for (; j + W <= p.in; j += W) {
        V part[VECTORS_OF_X];
        UNROLL
        for (int64_t q = 0; q < VECTORS_OF_X; q++) part[q] = get(x[q] + j);
        UNROLL
        for (int64_t n = 0; n < ROWS; n++) {
            __builtin_prefetch(from[n] + j + 256, 0, 3);
            const V weight = get(from[n] + j);
            UNROLL
            for (int64_t q = 0; q < VECTORS_OF_X; q++) total[n][q] += weight * part[q];
        }
    }
    alignas(64) float sums[W], partial[W * W];
    for (int64_t n = 0; n < ROWS; n++)
        for (int64_t q = 0; q < VECTORS_OF_X; q++) store(partial + (n * VECTORS_OF_X + q) * W, total[n][q]);
    store(sums, sums_of_lanes(partial));
    for (int64_t n = 0; n < rows; n++)
        for (int64_t q = 0; q < vectors; q++) {
            float y = sums[n * VECTORS_OF_X + q];
            for (int64_t rest = j; rest < p.in; rest++) y += from[n][rest] * x[q][rest];
            finish(p, b + q, row + n, y);
        }
}

APART void rows_piece(const Product& p, int64_t B, int64_t first, int64_t end) {
    int64_t row = first;
    if (B == 1) {
        for (; row + ROWS <= end; row += ROWS) dot_rows<ROWS>(p, row);
        for (; row < end; row++) dot_rows<1>(p, row);
        return;
    }
    // Two blocks of rows stay in the nearest cache while all vectors pass by.
    for (; row < end; row += 2 * ROWS)
        for (int64_t b = 0; b < B; b += VECTORS_OF_X)
            for (int64_t at = row; at < end && at < row + 2 * ROWS; at += ROWS)
                dot_block(p, at, end - at < ROWS ? end - at : ROWS, b, B - b < VECTORS_OF_X ? B - b : VECTORS_OF_X);
}

// COUNT vectors by REGISTERS * W outputs, whose sums fill the lanes.
template <int COUNT, int REGISTERS>
INLINE void columns_block(const Product& p, int64_t b, int64_t first) {
    V total[COUNT][REGISTERS];
    UNROLL
    for (int q = 0; q < COUNT; q++)
        UNROLL
        for (int n = 0; n < REGISTERS; n++) total[q][n] = V{};
    for (int64_t j = 0; j < p.in; j++) {
        UNROLL
        for (int n = 0; n < REGISTERS; n++) {
            const V weight = get(p.weight + j * p.out + first + n * W);
            UNROLL
            for (int q = 0; q < COUNT; q++) total[q][n] += weight * p.x[(b + q) * p.in + j];
        }
    }
    alignas(64) float y[REGISTERS * W];
    for (int q = 0; q < COUNT; q++) {
        for (int n = 0; n < REGISTERS; n++) store(y + n * W, total[q][n]);
        for (int64_t i = 0; i < REGISTERS * W; i++) finish(p, b + q, first + i, y[i]);
    }
}

template <int REGISTERS>
APART void columns_of_registers(const Product& p, int64_t B, int64_t first) {
    int64_t b = 0;
    for (; b + VECTORS_OF_X <= B; b += VECTORS_OF_X) columns_block<VECTORS_OF_X, REGISTERS>(p, b, first);
    for (; b < B; b++) columns_block<1, REGISTERS>(p, b, first);
}

APART void columns_piece(const Product& p, int64_t B, int64_t first, int64_t end) {
    if (end - first == PIECE) return columns_of_registers<PIECE / W>(p, B, first);
    for (; first + W <= end; first += W) columns_of_registers<1>(p, B, first);
    for (int64_t b = 0; b < B; b++)
        for (int64_t row = first; row < end; row++) {
            float y = 0.0f;
            for (int64_t j = 0; j < p.in; j++) y += p.weight[j * p.out + row] * p.x[b * p.in + j];
            finish(p, b, row, y);
        }
}

APART void product_piece(const Products& c, int64_t piece, Nothing&) {
    const Product* p = c.list;
    for (; piece >= pieces_of(*p); p++) piece -= pieces_of(*p);
    const int64_t first = piece * PIECE, end = first + PIECE < p->out ? first + PIECE : p->out;
    if (p->columns) columns_piece(*p, c.B, first, end);
    else rows_piece(*p, c.B, first, end);
}

}  // namespace
