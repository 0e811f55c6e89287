// What every CUDA kernel here needs of the device: the headers, numbers in memory as floats, shared memory, the launch.
// Without nvcc the same names come from an emulator, so that the kernels' logic runs where there is no GPU.

#pragma once

#include <cstdint>
#include <initializer_list>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define LAUNCH(kernel, blocks, threads, bytes, stream, arguments) \
    kernel<<<blocks, threads, bytes, static_cast<cudaStream_t>(stream)>>>(arguments)
#else
#include <cuemu.hpp>
#define LAUNCH(kernel, blocks, threads, bytes, stream, arguments) \
    cuemu::launch(dim3(blocks), dim3(threads), bytes, stream, [&, given = arguments] { kernel(given); })
#endif

namespace {

#ifdef __CUDACC__
__device__ __forceinline__ float* shared_memory() {
    extern __shared__ uint4 memory[];
    return reinterpret_cast<float*>(memory);
}
// Read anew at each place that asks: so offsets are computed again where they are needed, a few instructions a chunk,
// instead of being kept in registers that the state needs.
__device__ __forceinline__ int block_number() {
    int number;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
    return number;
}
__device__ __forceinline__ int thread_number() {
    int number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return number;
}
#else
inline float* shared_memory() { return cuemu::dynamic_shared<float>(); }
inline int block_number() { return static_cast<int>(blockIdx.x); }
inline int thread_number() { return static_cast<int>(threadIdx.x); }
#endif

constexpr unsigned ALL_LANES = 0xffffffffu;

// K floats that are moved at once; the address is a multiple of their size.
template <int K>
struct alignas(4 * K) Floats {
    float x[K];
};

template <int K>
__device__ __forceinline__ Floats<K> load(const float* from) {
    return *reinterpret_cast<const Floats<K>*>(from);
}

template <int K>
__device__ __forceinline__ void store(float* to, const Floats<K>& x) {
    *reinterpret_cast<Floats<K>*>(to) = x;
}

// ---- numbers in memory, rounded to the nearest when written ----

template <typename T>
struct Number;

template <>
struct Number<float> {
    static __device__ __forceinline__ float read(float x) { return x; }
    static __device__ __forceinline__ float written(float x) { return x; }
};

template <>
struct Number<__nv_bfloat16> {
    static __device__ __forceinline__ float read(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ __forceinline__ float of_bits(unsigned bits) {
        return read(__ushort_as_bfloat16(static_cast<unsigned short>(bits)));
    }
    static __device__ __forceinline__ __nv_bfloat16 written(float x) { return __float2bfloat16_rn(x); }
};

template <>
struct Number<__half> {
    static __device__ __forceinline__ float read(__half x) { return __half2float(x); }
    static __device__ __forceinline__ float of_bits(unsigned bits) {
        return read(__ushort_as_half(static_cast<unsigned short>(bits)));
    }
    static __device__ __forceinline__ __half written(float x) { return __float2half_rn(x); }
};

// How many numbers of type T come with 16 bytes.
template <typename T>
constexpr int PER_LOAD = 16 / static_cast<int>(sizeof(T));

// 16 bytes of T as floats, in order.
template <typename T>
__device__ __forceinline__ void unpack(const uint4& bits, float (&x)[PER_LOAD<T>]) {
    const unsigned* words = reinterpret_cast<const unsigned*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (sizeof(T) == 4) {
            x[i] = __uint_as_float(words[i]);
        } else {
            x[2 * i] = Number<T>::of_bits(words[i] & 0xffffu);
            x[2 * i + 1] = Number<T>::of_bits(words[i] >> 16);
        }
    }
}

// ---- from the host ----

// What rows and states are read by: 16 bytes at once.
inline bool on_16_bytes(std::initializer_list<const void*> addresses) {
    for (const void* address : addresses)
        if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return false;
    return true;
}

// The kernel for the dtype (0 float32, 1 bfloat16, 2 float16), `blocks` blocks of it, on `stream`.
// Returns 0 or the CUDA error; waits for nothing.
template <typename Arguments>
int launch(void (*const (&kernels)[3])(Arguments), int dtype, int64_t blocks, int threads, int shared_bytes,
           void* stream, const Arguments& arguments) {
    if (dtype < 0 || dtype > 2) return cudaErrorInvalidValue;
    if (blocks == 0) return cudaSuccess;
    const auto kernel = kernels[dtype];
    const int code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (code != cudaSuccess) return code;
    LAUNCH(kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes, stream, arguments);
    return cudaGetLastError();
}

}  // namespace
