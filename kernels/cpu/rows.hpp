// Rows of one head: [B, T, H, N] tensors in float32 or bfloat16, read and written as float32 rows of N.

#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.hpp"

namespace {

struct Shape {
    int64_t T, H, N;
    bool bf16;
};

APART void read_rows(const Shape& s, const void* from, int64_t offset, int64_t rows, float* to) {
    for (int64_t t = 0; t < rows; t++) {
        const int64_t at = offset + t * s.H * s.N;
        float* row = to + t * s.N;
        if (!s.bf16) {
            std::memcpy(row, static_cast<const float*>(from) + at, s.N * sizeof(float));
            continue;
        }
        const uint16_t* p = static_cast<const uint16_t*>(from) + at;
        for (int64_t n = 0; n < s.N; n += W) store(row + n, from_bf16(p + n));
    }
}

APART void write_rows(const Shape& s, void* to, int64_t offset, int64_t rows, const float* from, int64_t stride) {
    for (int64_t t = 0; t < rows; t++) {
        const int64_t at = offset + t * s.H * s.N;
        const float* row = from + t * stride;
        if (!s.bf16) {
            std::memcpy(static_cast<float*>(to) + at, row, s.N * sizeof(float));
            continue;
        }
        uint16_t* p = static_cast<uint16_t*>(to) + at;
        for (int64_t n = 0; n < s.N; n += W) to_bf16(p + n, load(row + n));
    }
}

// Rows that will be read or written soon, fetched into the cache a few at a time while the present chunk is worked on.
struct Ahead {
    struct Rows {
        const char* first;
        int64_t bytes, stride, count;
    };
    Rows list[15];
    int count = 0;

    void add(const Shape& s, const void* first, int64_t offset, int64_t rows, bool bf16) {
        const int64_t size = bf16 ? 2 : 4;
        list[count++] = {static_cast<const char*>(first) + offset * size, s.N * size, s.H * s.N * size, rows};
    }

    // One row of every `step`-th entry.
    INLINE void fetch(int64_t row, int entry, int step) const {
        for (; entry < count; entry += step)
            if (row < list[entry].count)
                for (int64_t at = 0; at < list[entry].bytes; at += 64)
                    __builtin_prefetch(list[entry].first + row * list[entry].stride + at, 0, 2);
    }
};

}  // namespace
