// max(x, 0) squared, in place, and its backward from the squares alone: their root is max(x, 0) again.
// Legend: x, y, dy, dx are any number of elements in T, at any addresses. Saved for the backward: y. sizes: elements.
// A thread has four elements. Bytes for one of 16 bits: 4 in the forward, 6 in the backward. Not measured on a GPU.

#include <cstdint>

#include "device.cuh"
#include "fused.cuh"

namespace {

constexpr int THREADS = 256;

// sizes[1] is how many elements lie in whole fours that can be read at once.
template <typename T, typename Function>
__device__ __forceinline__ void over(const Call& call, const T* in, const T* other, T* out, Function function) {
    const int64_t first = 4 * (static_cast<int64_t>(block_number()) * THREADS + thread_number());
    if (first + 4 <= call.sizes[1]) {
        const Floats<4> x = get(in + first), y = get_if(other != nullptr, other + first);
        Floats<4> result;
#pragma unroll
        for (int i = 0; i < 4; i++) result.x[i] = function(x.x[i], y.x[i]);
        put(out + first, result);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t n = first + i;
        if (n >= call.sizes[0]) return;
        const float y = other == nullptr ? 0.0f : Number<T>::read(other[n]);
        out[n] = Number<T>::written(function(Number<T>::read(in[n]), y));
    }
}

// Written so that what is not a number stays that.
struct Square {
    __device__ __forceinline__ float operator()(float x, float) const { return x < 0.0f ? 0.0f : x * x; }
};

struct Slope {
    __device__ __forceinline__ float operator()(float square, float grad) const { return 2.0f * sqrtf(square) * grad; }
};

template <typename T>
__global__ void __launch_bounds__(THREADS) forward(const Call call) {
    T* const x = call.tensor<T>(0);
    over<T>(call, x, nullptr, x, Square{});
}

template <typename T>
__global__ void __launch_bounds__(THREADS) backward(const Call call) {
    over<T>(call, call.tensor<T>(0), call.tensor<T>(1), call.tensor<T>(2), Slope{});
}

// -1 where there are more elements than a grid has threads for.
int64_t blocks_of(int64_t count) {
    const int64_t blocks = count / (4 * THREADS) + (count % (4 * THREADS) != 0);
    return count < 0 || blocks > INT32_MAX ? -1 : blocks;
}

Call call_for(const int64_t* sizes, void* const* tensors, int num_tensors) {
    Call call = call_of(sizes, 1, tensors, num_tensors, nullptr, 0);
    bool aligned = true;
    for (int n = 0; n < num_tensors; n++) aligned = aligned && on_16_bytes({tensors[n]});
    call.sizes[1] = aligned ? sizes[0] : 0;
    return call;
}

}  // namespace

// tensors: x, which becomes y.
OPERATOR(relu2_forward) {
    (void)scalars;
    const int64_t blocks = blocks_of(sizes[0]);
    if (blocks < 0) return cudaErrorInvalidValue;
    return launch({forward<float>, forward<__nv_bfloat16>, forward<__half>}, dtype, blocks, THREADS, 0, stream,
                  call_for(sizes, tensors, 1));
}

// tensors: y, dy, dx.
OPERATOR(relu2_backward) {
    (void)scalars;
    const int64_t blocks = blocks_of(sizes[0]);
    if (blocks < 0) return cudaErrorInvalidValue;
    return launch({backward<float>, backward<__nv_bfloat16>, backward<__half>}, dtype, blocks, THREADS, 0, stream,
                  call_for(sizes, tensors, 3));
}
