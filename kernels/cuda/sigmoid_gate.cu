// The end of x052's and x060's channel-mix: out = value * sigmoid(gate); forward and backward.
// Legend: all tensors are elements in T, a multiple of 16 of them. Saved for the backward: the inputs. sizes: elements.
// A thread has four elements. Bytes for one of 16 bits: 6 in the forward, 10 in the backward. Not measured on a GPU.

#include <cstdint>

#include "device.cuh"
#include "fused.cuh"

namespace {

constexpr int THREADS = 256;

__device__ __forceinline__ int64_t first_of_thread() {
    return 4 * (static_cast<int64_t>(block_number()) * THREADS + thread_number());
}

template <typename T>
__global__ void __launch_bounds__(THREADS) forward(const Call call) {
    const int64_t n = first_of_thread();
    if (n >= call.sizes[0]) return;
    const Floats<4> gate = get(call.tensor<T>(0) + n), value = get(call.tensor<T>(1) + n);
    Floats<4> out;
#pragma unroll
    for (int i = 0; i < 4; i++) out.x[i] = value.x[i] * sigmoid(gate.x[i]).value;
    put(call.tensor<T>(2) + n, out);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) backward(const Call call) {
    const int64_t n = first_of_thread();
    if (n >= call.sizes[0]) return;
    const Floats<4> gate = get(call.tensor<T>(0) + n), value = get(call.tensor<T>(1) + n);
    const Floats<4> grad = get(call.tensor<T>(2) + n);
    Floats<4> dgate, dvalue;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Sigmoid opened = sigmoid(gate.x[i]);
        dgate.x[i] = grad.x[i] * value.x[i] * opened.slope();
        dvalue.x[i] = grad.x[i] * opened.value;
    }
    put(call.tensor<T>(3) + n, dgate);
    put(call.tensor<T>(4) + n, dvalue);
}

int start(void (*const (&kernels)[3])(Call), const int64_t* sizes, int dtype, void* const* tensors, int num_tensors,
          void* stream) {
    Call call = call_of(sizes, 1, tensors, num_tensors, nullptr, 0);
    const int64_t blocks = sizes[0] < 0 || sizes[0] % 16 != 0 ? -1 : pieces_of(sizes[0], 4 * THREADS);
    if (const int problem = problem_of(call, 0, blocks)) return problem;
    return launch(kernels, dtype, blocks, THREADS, 0, stream, call);
}

}  // namespace

// tensors: gate, value, out.
OPERATOR(sigmoid_gate_forward) {
    (void)scalars;
    return start({forward<float>, forward<__nv_bfloat16>, forward<__half>}, sizes, dtype, tensors, 3, stream);
}

// tensors: gate, value, dout, dgate, dvalue.
OPERATOR(sigmoid_gate_backward) {
    (void)scalars;
    return start({backward<float>, backward<__nv_bfloat16>, backward<__half>}, sizes, dtype, tensors, 5, stream);
}
