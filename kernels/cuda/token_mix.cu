// x060's token shift with shares that depend on the token, in one pass; forward and backward.
// Legend: B sequences, T time, R = B T rows, C channels, M = 5 mixed outputs; x, added and mixed in T, shares and first
// in float32.
//   mixed_m = x + (x of the token before - x) * (share_m + added_m)
//   Before the first token stands `first` (or zeros), before a token that `starts` marks stand zeros.
// Saved for the backward: the inputs. sizes: B, T, C, M, rows of a piece. A piece is a run of one sequence's tokens.
// A thread has four channels at all tokens of a piece: what one token hands to the next and sums over tokens stay in
// registers, and no thread waits for another. Not measured on a GPU.

#include <cstdint>

#include "device.cuh"
#include "fused.cuh"
#include "sequences.cuh"

namespace {

constexpr int M = 5, THREADS = 128;

__host__ __device__ __forceinline__ int64_t tiles_of(int64_t C) { return (C + 4 * THREADS - 1) / (4 * THREADS); }

// The first of the thread's channels, which may lie behind the last one.
__device__ __forceinline__ int first_channel(const Call& call) {
    return 4 * (block_number() % static_cast<int>(tiles_of(call.sizes[2])) * THREADS + thread_number());
}

__device__ __forceinline__ Run run_of_block(const Call& call) {
    return Run(call, block_number() / static_cast<int>(tiles_of(call.sizes[2])));
}

// What lies before the first token of a sequence.
__device__ __forceinline__ Floats<4> first_of(const Call& call, const Run& z, int c) {
    return get_if(call.tensors[3] != nullptr, call.tensor<float>(3) + z.of_sequence(c));
}

// Row t of one of M tensors of rows that lie behind each other.
template <typename T>
__device__ __forceinline__ T* row_of(const Call& call, int tensor, const Run& z, int m, int t) {
    return call.row<T>(tensor, m * (call.sizes[0] * z.T) + z.row(t), z.C);
}

__device__ __forceinline__ Floats<4> plus(const Floats<4>& x, const Floats<4>& y) {
    Floats<4> result;
#pragma unroll
    for (int i = 0; i < 4; i++) result.x[i] = x.x[i] + y.x[i];
    return result;
}

template <typename T>
__device__ __forceinline__ Floats<4> share_of(const Call& call, const Run& z, int m, int t, int c) {
    return plus(get(call.tensor<float>(2) + m * z.C + c), get(row_of<T>(call, 1, z, m, t) + c));
}

template <typename T>
__global__ void __launch_bounds__(THREADS) forward(const Call call) {
    const Run z = run_of_block(call);
    const int c = first_channel(call);
    if (c >= z.C) return;
    const uint8_t* const starts = call.tensor<uint8_t>(4);
    Floats<4> before = z.begin > 0 ? get(call.row<T>(0, z.row(z.begin - 1), z.C) + c) : first_of(call, z, c);
    for (int t = z.begin; t < z.end; t++) {
        if (z.marked(starts, t)) before = Floats<4>{};
        const Floats<4> own = get(call.row<T>(0, z.row(t), z.C) + c);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const Floats<4> share = share_of<T>(call, z, m, t, c);
            Floats<4> mixed;
#pragma unroll
            for (int i = 0; i < 4; i++) mixed.x[i] = own.x[i] + (before.x[i] - own.x[i]) * share.x[i];
            put(call.row<T>(5 + m, z.row(t), z.C) + c, mixed);
        }
        before = own;
    }
}

// What the first token behind the run hands back to its last one: nothing across a start or where there is none.
template <typename T>
__device__ __forceinline__ Floats<4> handed_back(const Call& call, const Run& z, int c) {
    Floats<4> moved{};
    if (z.end == z.T || z.marked(call.tensor<uint8_t>(4), z.end)) return moved;
#pragma unroll
    for (int m = 0; m < M; m++) {
        const Floats<4> share = share_of<T>(call, z, m, z.end, c);
        const Floats<4> grad = get(call.row<T>(9 + m, z.row(z.end), z.C) + c);
#pragma unroll
        for (int i = 0; i < 4; i++) moved.x[i] += grad.x[i] * share.x[i];
    }
    return moved;
}

template <typename T>
__global__ void __launch_bounds__(THREADS) backward(const Call call) {
    const Run z = run_of_block(call);
    const int c = first_channel(call);
    if (c >= z.C) return;
    const auto x_of = [&](int t) { return get(call.row<T>(0, z.row(t), z.C) + c); };
    Floats<4> dshares[M] = {}, later = handed_back<T>(call, z, c), own = x_of(z.end - 1);
#pragma unroll 1
    for (int turn = z.end - 1; turn >= z.begin; turn--) {
        const int t = anew(turn);
        const bool clear = z.marked(call.tensor<uint8_t>(4), t);
        const Floats<4> x_before = t > 0 ? x_of(t - 1) : first_of(call, z, c), before = clear ? Floats<4>{} : x_before;
        Floats<4> dx = later, moved{};
#pragma unroll
        for (int m = 0; m < M; m++) {
            const Floats<4> share = share_of<T>(call, z, m, t, c), grad = get(call.row<T>(9 + m, z.row(t), z.C) + c);
            Floats<4> product;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                product.x[i] = grad.x[i] * (before.x[i] - own.x[i]);
                moved.x[i] += grad.x[i] * share.x[i];
                dx.x[i] += grad.x[i];
            }
            dshares[m] = plus(dshares[m], product);
            put(row_of<T>(call, 6, z, m, t) + c, product);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            dx.x[i] -= moved.x[i];
            later.x[i] = clear ? 0.0f : moved.x[i];
        }
        put(call.row<T>(5, z.row(t), z.C) + c, dx);
        own = x_before;
    }
    if (z.begin == 0 && call.tensors[7] != nullptr) put(call.tensor<float>(7) + z.of_sequence(c), later);
    float* const sums = call.row<float>(8, z.piece, static_cast<int64_t>(M + 1) * z.C) + c;
#pragma unroll
    for (int m = 0; m < M; m++) put(sums + m * z.C, dshares[m]);
}

int64_t blocks_of(const int64_t* sizes) {
    const int64_t pieces = pieces_of_sequences(sizes);
    return pieces < 0 || pieces > INT32_MAX || sizes[3] != M ? -1 : pieces * tiles_of(sizes[2]);
}

}  // namespace

// tensors: x [B, T, C], added [M, R, C], shares [M, C], first [B, C] or null, starts [B, T] or null, mixed (M of them).
OPERATOR(token_mix_forward) {
    const Call call = call_of(sizes, 5, tensors, 5 + M, scalars, 0);
    const int64_t blocks = blocks_of(sizes);
    if (const int problem = problem_of(call, 5, blocks, 4)) return problem;
    return launch({forward<float>, forward<__nv_bfloat16>, forward<__half>}, dtype, blocks, THREADS, 0, stream, call);
}

// tensors: x, added, shares, first or null, starts or null, dx, dadded [M, R, C], dfirst [B, C] or null, sums [pieces,
// M + 1, C] (of the shares; the last row is not written), the gradients of mixed (M of them).
OPERATOR(token_mix_backward) {
    const Call call = call_of(sizes, 5, tensors, 9 + M, scalars, 0);
    const int64_t blocks = blocks_of(sizes);
    if (const int problem = problem_of(call, 5, blocks, 4)) return problem;
    return launch({backward<float>, backward<__nv_bfloat16>, backward<__half>}, dtype, blocks, THREADS, 0, stream,
                  call);
}
