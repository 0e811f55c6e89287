// The products of kernels/cuda/mma.cuh for a test, one warp; `in` and `out` are plain row-major matrices.

#include "mma.cuh"

namespace {

// c = a b of 16 x 8, 8 x 8: lanes' numbers in the device's order, as NVIDIA's PTX manual lists them.
void device_order(const float* a, const float* b, float* out) {
    const int lane = thread_number(), g = lane / 4, c = lane % 4;
    const unsigned numbers[4] = {tf32(a[g * 8 + c]), tf32(a[(g + 8) * 8 + c]), tf32(a[g * 8 + c + 4]),
                                 tf32(a[(g + 8) * 8 + c + 4])};
    float sums[4] = {};
    mma(sums[0], sums[1], sums[2], sums[3], numbers, tf32(b[c * 8 + g]), tf32(b[(c + 4) * 8 + g]));
    for (int q = 0; q < 4; q++) out[(g + q / 2 * 8) * 8 + 2 * c + q % 2] = sums[q];
}

Square read(const float* from) {
    const Lane lane;
    Square x;
    for (int q = 0; q < 8; q++)
        x.part[q / 4].x[q % 4] = from[(lane.row + q % 2 * 8) * 16 + q / 4 * 8 + lane.column + q % 4 / 2];
    return x;
}

void write(float* to, const Square& x) {
    const Lane lane;
    for (int q = 0; q < 8; q++)
        to[(lane.row + q % 2 * 8) * 16 + q / 4 * 8 + lane.column + q % 4 / 2] = x.part[q / 4].x[q % 4];
}

// c = a b^T of 16 x 16 each, by the two products of the columns' halves.
template <bool THREE>
void squares(const float* a, const float* b, float* out) {
    Square c{};
    multiply<NOWHERE>(c, SquareFactor<THREE>(read(a)), SquareFactor<THREE>(read(b)));
    write(out, c);
}

// (I - a)^-1, given a and its transpose.
template <bool THREE>
void inverses(const float* a, const float* b, float* out) {
    write(out, inverse_of_unit_minus<THREE>(read(a), read(b), Lane()));
}

template <typename F>
int launched(F body) {
    cuemu::launch(dim3(1), dim3(32), 0, nullptr, body);
    return cudaGetLastError();
}

}  // namespace

extern "C" {

int run_device_order(const float* a, const float* b, float* out) {
    return launched([=] { device_order(a, b, out); });
}
int run_squares(const float* a, const float* b, float* out, int three) {
    return launched([=] { three != 0 ? squares<true>(a, b, out) : squares<false>(a, b, out); });
}
int run_inverses(const float* a, const float* b, float* out, int three) {
    return launched([=] { three != 0 ? inverses<true>(a, b, out) : inverses<false>(a, b, out); });
}
void round_to_tf32(int64_t count, const float* in, float* out) {
    for (int64_t i = 0; i < count; i++) out[i] = __uint_as_float(tf32(in[i]));
}
}
