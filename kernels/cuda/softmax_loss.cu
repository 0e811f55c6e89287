// Cross-entropy of rows of logits, and over the logits themselves their gradient, with the published logit regulariser.
// Legend: P rows of V logits in T; targets [P] in int64, weights and losses [P] in float32; m the largest logit, at
//   place `largest` (the first, if several are equal).
//   loss = weight * (log(sum of exp(logits)) - logits[target])
//   gradient = weight * (softmax(logits) - [target] + [largest] * l2wrap * m)
// A row of weight 0 has a loss and a gradient of exactly 0, whatever it holds; one whose target is none of its logits
// gets what is not a number. Nothing is saved. sizes: P, V. scalars: l2wrap, and 1 where the gradient is wanted.
// A block has a row and goes over it once for the largest logit and the sum together, each thread with a largest of its
// own, and once to write; then one thread writes the two places where more is added. Not measured on a GPU.

#include <cfloat>
#include <cstdint>

#include "device.cuh"
#include "fused.cuh"

namespace {

constexpr int THREADS = 256, LANES = 32, WARPS = THREADS / LANES;

// K numbers at once: four, or one where rows do not begin at multiples of four.
template <int K, typename T>
__device__ __forceinline__ Floats<K> read(const T* from) {
    if constexpr (K == 4) return get(from);
    else return {{Number<T>::read(*from)}};
}

template <int K, typename T>
__device__ __forceinline__ void write(T* to, const Floats<K>& x) {
    if constexpr (K == 4) put(to, x);
    else *to = Number<T>::written(x.x[0]);
}

struct Sum {
    __device__ __forceinline__ float operator()(float x, float y) const { return x + y; }
};
struct Largest {
    __device__ __forceinline__ float operator()(float x, float y) const { return x > y ? x : y; }
};
struct Smallest {
    __device__ __forceinline__ int operator()(int x, int y) const { return x < y ? x : y; }
};

// What the whole block has, in each thread. `slots` is room for WARPS of them, used once.
template <typename Value, typename Function>
__device__ __forceinline__ Value over_block(Value x, Value* slots, Function function) {
    for (int distance = 1; distance < LANES; distance *= 2) x = function(x, __shfl_xor_sync(ALL_LANES, x, distance));
    if (thread_number() % LANES == 0) slots[thread_number() / LANES] = x;
    __syncthreads();
    Value result = slots[0];
#pragma unroll
    for (int n = 1; n < WARPS; n++) result = function(result, slots[n]);
    return result;
}

// A thread's largest logit and the sum of exp(logit - largest). What is not a number comes into the sum.
struct Tally {
    // Not infinity, from which no infinity could be taken away.
    float largest = -FLT_MAX, sum = 0.0f;

    template <int K>
    __device__ __forceinline__ void add(const Floats<K>& x) {
        float most = x.x[0];
#pragma unroll
        for (int i = 1; i < K; i++) most = x.x[i] > most ? x.x[i] : most;
        if (most > largest) {
            sum *= expf(largest - most);
            largest = most;
        }
#pragma unroll
        for (int i = 0; i < K; i++) sum += expf(x.x[i] - largest);
    }
};

// Of the logits by the thread's numbers; gives the first place of the largest.
template <int K, typename T>
__device__ __forceinline__ int write_softmax(T* row, int length, float largest, float factor) {
    int place = INT32_MAX;
    for (int n = K * thread_number(); n < length; n += K * THREADS) {
        Floats<K> x = read<K>(row + n);
#pragma unroll
        for (int i = K - 1; i >= 0; i--) {
            if (x.x[i] == largest && n + i < place) place = n + i;
            x.x[i] = expf(x.x[i] - largest) * factor;
        }
        write<K>(row + n, x);
    }
    return place;
}

template <int K, typename T>
__global__ void __launch_bounds__(THREADS) forward(const Call call) {
    float* const shared = shared_memory();
    const int64_t p = block_number();
    const int length = static_cast<int>(call.sizes[1]), thread = thread_number();
    T* const row = call.row<T>(0, p, length);
    const int64_t target = call.tensor<int64_t>(1)[p];
    const float weight = call.tensor<float>(2)[p];
    const bool wants_gradient = call.scalars[1] != 0.0f;
    if (weight == 0.0f) {
        if (thread == 0) call.tensor<float>(3)[p] = 0.0f;
        if (wants_gradient)
            for (int n = K * thread; n < length; n += K * THREADS) write<K>(row + n, Floats<K>{});
        return;
    }
    // Read before anything is written.
    const bool there = target >= 0 && target < length;
    const float own = there ? Number<T>::read(row[target]) : __uint_as_float(0x7fc00000u);
    Tally tally;
    for (int n = K * thread; n < length; n += K * THREADS) tally.add(read<K>(row + n));
    const float largest = over_block(tally.largest, shared, Largest{});
    const float sum = over_block(tally.sum * expf(tally.largest - largest), shared + WARPS, Sum{});
    if (thread == 0) call.tensor<float>(3)[p] = weight * (logf(sum) + (largest - own));
    if (!wants_gradient) return;
    const float factor = there ? weight / sum : own;
    int place = write_softmax<K>(row, length, largest, factor);
    place = over_block(place, reinterpret_cast<int*>(shared + 2 * WARPS), Smallest{});
    // Behind the barrier in there. These two are rounded once, not before and after what is added to them.
    if (thread != 0 || !there) return;
    const float pull = weight * call.scalars[0] * largest;
    if (place != target && place < length) row[place] = Number<T>::written(factor + pull);
    row[target] = Number<T>::written(weight * (expf(own - largest) / sum - 1.0f) + (place == target ? pull : 0.0f));
}

}  // namespace

// tensors: logits, targets, weights, losses; the logits may lie anywhere.
OPERATOR(softmax_loss) {
    const Call call = call_of(sizes, 2, tensors, 4, scalars, 2);
    if (sizes[0] < 0 || sizes[0] > INT32_MAX || sizes[1] < 0 || sizes[1] > INT32_MAX - 4 * THREADS)
        return cudaErrorInvalidValue;
    constexpr int bytes = 3 * WARPS * static_cast<int>(sizeof(float));
    if (sizes[1] % 4 == 0 && on_16_bytes({tensors[0]}))
        return launch({forward<4, float>, forward<4, __nv_bfloat16>, forward<4, __half>}, dtype, sizes[0], THREADS,
                      bytes, stream, call);
    return launch({forward<1, float>, forward<1, __nv_bfloat16>, forward<1, __half>}, dtype, sizes[0], THREADS, bytes,
                  stream, call);
}
