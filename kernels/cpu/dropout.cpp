// Dropout without a state: whether an element stays is a pure function of (seed of its row, site, time, channel).
// Legend: x, y [B, T, C] in float32 or bfloat16; y = x * scale where it stays, else 0. Nothing is saved; the backward
// is the same call on the gradient. The plain form is in rwkv_spec/ops/dropout.py and gives the same bits.

#include <cstdint>

#include "lanes.hpp"
#include "threads.hpp"

namespace {

// Rows of one piece: enough work to share out, whatever the batch.
constexpr int64_t ROWS = 64;

struct Dropout {
    int64_t rows, T, C;
    bool bf16;
    const void* x;
    const int64_t* seed;
    void* y;
    uint32_t threshold;
    float scale;
    uint64_t site, start;
};

inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// 32 bits for each channel c from the two halves of a row's key.
INLINE UV bits_of(UV c, uint32_t low, uint32_t high) {
    UV x = c * 0x9e3779b9u + low;
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    x = (x ^ (x >> 16) ^ high) * 0x27d4eb2fu;
    return x ^ (x >> 15);
}

INLINE V dropped(V x, UV c, uint32_t low, uint32_t high, const Dropout& d) {
    return bits_of(c, low, high) >= d.threshold ? x * d.scale : V{};
}

void drop_row(const Dropout& d, int64_t row) {
    const uint64_t seed = static_cast<uint64_t>(d.seed[row / d.T]), t = d.start + static_cast<uint64_t>(row % d.T);
    const uint64_t key = mix(mix(seed + (d.site + 1) * 0x9e3779b97f4a7c15u) + (t + 1) * 0xd1342543de82ef95u);
    const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
    UV c;
    for (int n = 0; n < W; n++) c[n] = static_cast<uint32_t>(n);
    int64_t n = 0;
    if (d.bf16) {
        const uint16_t* x = static_cast<const uint16_t*>(d.x) + row * d.C;
        uint16_t* y = static_cast<uint16_t*>(d.y) + row * d.C;
        for (; n + W <= d.C; n += W, c += W) to_bf16(y + n, dropped(from_bf16(x + n), c, low, high, d));
        if (n == d.C) return;
        uint16_t in[W] = {}, out[W];
        std::memcpy(in, x + n, (d.C - n) * sizeof *in);
        to_bf16(out, dropped(from_bf16(in), c, low, high, d));
        std::memcpy(y + n, out, (d.C - n) * sizeof *out);
    } else {
        const float* x = static_cast<const float*>(d.x) + row * d.C;
        float* y = static_cast<float*>(d.y) + row * d.C;
        for (; n < d.C; n += W, c += W) {
            // A row may start anywhere, and its last vector may be short.
            const size_t bytes = (d.C - n < W ? d.C - n : W) * sizeof(float);
            V v = V{};
            if (bytes == sizeof v) std::memcpy(&v, x + n, sizeof v);
            else std::memcpy(&v, x + n, bytes);
            v = dropped(v, c, low, high, d);
            if (bytes == sizeof v) std::memcpy(y + n, &v, sizeof v);
            else std::memcpy(y + n, &v, bytes);
        }
    }
}

APART void drop_rows(const Dropout& d, int64_t piece, Nothing&) {
    const int64_t end = (piece + 1) * ROWS < d.rows ? (piece + 1) * ROWS : d.rows;
    for (int64_t row = piece * ROWS; row < end; row++) drop_row(d, row);
}

}  // namespace

// Returns 0, or 2 where no memory was left.
extern "C" int dropout(int64_t B, int64_t T, int64_t C, int bf16, const void* x, const int64_t* seed, void* y,
                       uint32_t threshold, float scale, int64_t site, int64_t start, int64_t num_threads,
                       Parallel parallel) {
    const Dropout d{B * T, T, C, bf16 != 0, x, seed, y, threshold, scale, static_cast<uint64_t>(site),
                    static_cast<uint64_t>(start)};
    return Work<Dropout, Nothing, drop_rows>::start(d, (B * T + ROWS - 1) / ROWS, num_threads, parallel);
}
