// Small kernels for the test of the emulator: what works on a device must work, what is a fault must be found.

#include "cuemu.hpp"

namespace {

void shuffles(const float* in, float* out) {
    const int n = static_cast<int>(blockDim.x * blockDim.y), t = static_cast<int>(threadIdx.x + 16 * threadIdx.y);
    out[t] = __shfl_xor_sync(~0u, in[t], 5);
    out[n + t] = __shfl_down_sync(~0u, in[t], 3, 8);
    out[2 * n + t] = __shfl_sync(~0u, in[t], 2, 4);
    // Lanes of other masks do another number of operations.
    const unsigned four = 15u << (t % 32 / 4 * 4);
    float sum = in[t];
    for (int turn = 0; turn <= t % 32 / 4; turn++) sum += __shfl_xor_sync(four, sum, 1 + turn % 3);
    out[3 * n + t] = sum;
}

// Every thread writes one place and reads one that a thread of another warp writes.
void reverses(const float* in, float* out, bool waits) {
    float* const shared = cuemu::dynamic_shared<float>();
    const int t = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
    shared[t] = in[blockIdx.x * blockDim.x + threadIdx.x];
    if (waits) __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = shared[n - 1 - t];
}

// The second round overwrites what slow threads of the first still read.
void rotates(const float* in, float* out, bool waits) {
    float* const shared = cuemu::dynamic_shared<float>();
    const int t = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
    float x = in[t];
    for (int round = 0; round < 2; round++) {
        shared[t] = x;
        __syncthreads();
        x = shared[(t + 32) % n];
        if (waits) __syncthreads();
    }
    out[t] = x;
}

void diverges() {
    if (threadIdx.x < 40) __syncthreads();
}

void leaves_its_warp(const float* in, float* out) {
    const unsigned t = threadIdx.x;
    if (t == 7) return;
    out[t] = __shfl_xor_sync(~0u, in[t], 1);
}

void names_too_few(const float* in, float* out) { out[threadIdx.x] = __shfl_xor_sync(1u, in[threadIdx.x], 0); }

void writes_behind_shared(int place) {
    if (threadIdx.x == 0) cuemu::dynamic_shared<float>()[place] = 1.0f;
}

void shows_shared(float* out) { out[threadIdx.x] = cuemu::dynamic_shared<float>()[threadIdx.x]; }

template <typename F>
int launched(unsigned blocks, dim3 threads, std::size_t bytes, F body) {
    cuemu::launch(dim3(blocks), threads, bytes, nullptr, body);
    return cudaGetLastError();
}

}  // namespace

extern "C" {

int run_shuffles(const float* in, float* out) {
    return launched(1, dim3(16, 4), 0, [=] { shuffles(in, out); });
}
int run_reverses(const float* in, float* out, int waits) {
    return launched(2, dim3(96), 96 * sizeof(float), [=] { reverses(in, out, waits != 0); });
}
int run_rotates(const float* in, float* out, int waits) {
    return launched(1, dim3(96), 96 * sizeof(float), [=] { rotates(in, out, waits != 0); });
}
int run_diverges() {
    return launched(1, dim3(64), 0, [] { diverges(); });
}
int run_leaves_its_warp(const float* in, float* out) {
    return launched(1, dim3(32), 0, [=] { leaves_its_warp(in, out); });
}
int run_names_too_few(const float* in, float* out) {
    return launched(1, dim3(32), 0, [=] { names_too_few(in, out); });
}
int run_writes_shared(int place) {
    return launched(1, dim3(32), 64, [=] { writes_behind_shared(place); });
}
int run_shows_shared(float* out) {
    return launched(1, dim3(32), 32 * sizeof(float), [=] { shows_shared(out); });
}
int run_with_shared(int64_t bytes, int asks) {
    if (asks != 0) {
        const int code = cudaFuncSetAttribute(shows_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (code != 0) return code;
    }
    return launched(1, dim3(32), bytes, [] {});
}
int run_threads(int threads) {
    return launched(1, dim3(threads), 0, [] {});
}

void convert(int64_t count, const float* in, uint16_t* bfloat16, uint16_t* float16, float* from16) {
    for (int64_t i = 0; i < count; i++) {
        bfloat16[i] = __float2bfloat16_rn(in[i]).bits;
        float16[i] = __float2half_rn(in[i]).bits;
        from16[2 * i] = __bfloat162float(__ushort_as_bfloat16(bfloat16[i]));
        from16[2 * i + 1] = __half2float(__ushort_as_half(float16[i]));
    }
}
}
