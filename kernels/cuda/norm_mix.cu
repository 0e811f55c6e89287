// Residual sum, layer norm and token shift in one pass, forward and backward.
// Legend: B sequences, T time, C channels, M mixed outputs; x, sum, first, last in float32, added and mixed in T.
//   sum = x + added,  n = layer norm of sum,  mixed_m = n + (n of the token before - n) * share_m
//   Before the first token stands `first` (or zeros), before a token that `starts` marks stand zeros; last = n of the
//   last token.
// Saved for the backward: sum, and mean and 1/deviation of every row [B, T, 2]; n is computed again.
// sizes: B, T, C, M, rows of a piece. scalars: the norm's epsilon. A piece is a run of one sequence's tokens.
// A block has a piece and goes over it twice: first a warp a row, for the row's sums; then a thread its channels at all
// tokens, so that what one token hands to the next and sums over tokens stay in registers.
// The second time the rows come from the caches, if few blocks' pieces fill them: 16 rows do. Not measured on a GPU.

#include <cstdint>

#include "device.cuh"
#include "fused.cuh"
#include "sequences.cuh"

namespace {

constexpr int THREADS = 256, LANES = 32, WARPS = THREADS / LANES;

template <typename T>
__device__ __forceinline__ Floats<4> sum_at(const float* x, const T* added, int c) {
    Floats<4> value = get(x + c);
    if (added == nullptr) return value;
    const Floats<4> more = get(added + c);
#pragma unroll
    for (int i = 0; i < 4; i++) value.x[i] += more.x[i];
    return value;
}

__device__ __forceinline__ Floats<4> normed(const Floats<4>& value, Stats s) {
    Floats<4> result;
#pragma unroll
    for (int i = 0; i < 4; i++) result.x[i] = (value.x[i] - s.mean) * s.scale;
    return result;
}

__device__ __forceinline__ Floats<4> scaled(const Floats<4>& x, const Floats<4>& weight, const Floats<4>& bias) {
    Floats<4> result;
#pragma unroll
    for (int i = 0; i < 4; i++) result.x[i] = x.x[i] * weight.x[i] + bias.x[i];
    return result;
}

// By a whole warp: mean and 1/deviation of x + added, and the sum itself where it is kept.
template <typename T>
__device__ __forceinline__ Stats stats_of(const float* x, const T* added, float* kept, int C, float eps, int lane) {
    float total = 0.0f, squares = 0.0f;
    for (int c = 4 * lane; c < C; c += 4 * LANES) {
        const Floats<4> value = sum_at(x, added, c);
        if (kept != nullptr) put(kept + c, value);
        total += sum_of(value);
    }
    const float mean = sum_of_lanes(total, LANES) / C;
    for (int c = 4 * lane; c < C; c += 4 * LANES) {
        Floats<4> off = sum_at(x, added, c);
#pragma unroll
        for (int i = 0; i < 4; i++) off.x[i] = (off.x[i] - mean) * (off.x[i] - mean);
        squares += sum_of(off);
    }
    return {mean, 1.0f / sqrtf(sum_of_lanes(squares, LANES) / C + eps)};
}

template <int M, typename T>
__global__ void __launch_bounds__(THREADS, 2) forward(const Call call) {
    const Run z(call, block_number());
    const int C = z.C, warp = thread_number() / LANES, lane = thread_number() % LANES;
    // Of the token before the run, then of its own.
    Stats* const stats = reinterpret_cast<Stats*>(shared_memory());
    for (int n = warp; n <= z.end - z.begin; n += WARPS) {
        const int t = z.begin + n - 1;
        if (t < 0) continue;
        float* const kept = n == 0 ? nullptr : call.row<float>(7, z.row(t), C);
        const float* const x = call.row<float>(0, z.row(t), C);
        const Stats s = stats_of(x, call.row<T>(1, z.row(t), C), kept, C, call.scalars[0], lane);
        if (lane != 0) continue;
        stats[n] = s;
        if (n > 0) *reinterpret_cast<Stats*>(call.row<float>(8, z.row(t), 2)) = s;
    }
    __syncthreads();
    const uint8_t* const starts = call.tensor<uint8_t>(6);
    for (int c = 4 * thread_number(); c < C; c += 4 * THREADS) {
        const Floats<4> weight = get(call.tensor<float>(2) + c), bias = get(call.tensor<float>(3) + c);
        Floats<4> shares[M], before{};
#pragma unroll
        for (int m = 0; m < M; m++) shares[m] = get(call.tensor<float>(4) + m * C + c);
        const auto norm_of = [&](int t) {
            const Floats<4> sum = sum_at(call.row<float>(0, z.row(t), C), call.row<T>(1, z.row(t), C), c);
            return scaled(normed(sum, stats[t - z.begin + 1]), weight, bias);
        };
        if (z.begin > 0) before = norm_of(z.begin - 1);
        else if (call.tensors[5] != nullptr) before = get(call.tensor<float>(5) + z.of_sequence(c));
        for (int t = z.begin; t < z.end; t++) {
            if (z.marked(starts, t)) before = Floats<4>{};
            const Floats<4> n = norm_of(t);
#pragma unroll
            for (int m = 0; m < M; m++) {
                Floats<4> mixed;
#pragma unroll
                for (int i = 0; i < 4; i++) mixed.x[i] = n.x[i] + (before.x[i] - n.x[i]) * shares[m].x[i];
                put(call.row<T>(11 + m, z.row(t), C) + c, mixed);
            }
            before = n;
        }
        if (z.end == z.T) put(call.tensor<float>(9) + z.of_sequence(c), before);
    }
}

// What the norm of a token gets of its outputs' gradients, and what of them the norm of the token before it gets.
struct Flow {
    Floats<4> total{}, moved{};

    __device__ __forceinline__ void add(const Floats<4>& grad, const Floats<4>& share) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            total.x[i] += grad.x[i];
            moved.x[i] += grad.x[i] * share.x[i];
        }
    }

    // With what the norm of token t gets of the one after it, and of `last`.
    __device__ __forceinline__ Floats<4> dn(const Call& call, const Run& z, int t, int c,
                                            const Floats<4>& later) const {
        const float* const dlast = call.tensor<float>(8);
        Floats<4> result = get_if(dlast != nullptr && t == z.T - 1, dlast + z.of_sequence(c));
#pragma unroll
        for (int i = 0; i < 4; i++) result.x[i] += total.x[i] - moved.x[i] + later.x[i];
        return result;
    }
};

template <int M, typename T>
__device__ __forceinline__ Flow flow_of(const Call& call, const Run& z, int t, int c) {
    Flow flow;
#pragma unroll
    for (int m = 0; m < M; m++)
        flow.add(get(call.row<T>(14 + m, z.row(t), z.C) + c), get(call.tensor<float>(4) + m * z.C + c));
    return flow;
}

// What token t gets of token t + 1: nothing across a start or where there is none.
template <int M, typename T>
__device__ __forceinline__ Floats<4> flow_of_next(const Call& call, const Run& z, int t, int c) {
    if (t + 1 == z.T || z.marked(call.tensor<uint8_t>(6), t + 1)) return Floats<4>{};
    return flow_of<M, T>(call, z, t + 1, c).moved;
}

__device__ __forceinline__ Stats saved_stats(const Call& call, const Run& z, int t) {
    return *reinterpret_cast<const Stats*>(call.row<float>(1, z.row(t), 2));
}

// By a whole warp: what the row's own mean and deviation take from the gradient of its norm.
template <int M, typename T>
__device__ __forceinline__ Stats pull_of(const Call& call, const Run& z, int t, int lane) {
    const Stats s = saved_stats(call, z, t);
    float along_one = 0.0f, along_x = 0.0f;
#pragma unroll 1
    for (int c = 4 * lane; c < z.C; c += 4 * LANES) {
        const Floats<4> later = flow_of_next<M, T>(call, z, t, c);
        Floats<4> dx = flow_of<M, T>(call, z, t, c).dn(call, z, t, c, later);
        const Floats<4> weight = get(call.tensor<float>(2) + c);
        const Floats<4> x = normed(get(call.row<float>(0, z.row(t), z.C) + c), s);
        Floats<4> products;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            dx.x[i] *= weight.x[i];
            products.x[i] = dx.x[i] * x.x[i];
        }
        along_one += sum_of(dx);
        along_x += sum_of(products);
    }
    return {sum_of_lanes(along_one, LANES) / z.C, sum_of_lanes(along_x, LANES) / z.C};
}

// What stood before token t, less its norm: in a document, where the bias does not matter, and at its beginning.
__device__ __forceinline__ Floats<4> difference(const Floats<4>& before, const Floats<4>& x, const Floats<4>& weight) {
    Floats<4> result;
#pragma unroll
    for (int i = 0; i < 4; i++) result.x[i] = (before.x[i] - x.x[i]) * weight.x[i];
    return result;
}

__device__ __forceinline__ Floats<4> off_of_first(const Call& call, const Run& z, int t, int c, const Floats<4>& x,
                                                  const Floats<4>& weight) {
    const bool has_first = call.tensors[5] != nullptr && !z.marked(call.tensor<uint8_t>(6), t);
    const Floats<4> n = scaled(x, weight, get(call.tensor<float>(3) + c));
    Floats<4> result = get_if(has_first, call.tensor<float>(5) + z.of_sequence(c));
#pragma unroll
    for (int i = 0; i < 4; i++) result.x[i] -= n.x[i];
    return result;
}

// A thread's four channels at all tokens of a run, from the last to the first.
template <int M, typename T>
__device__ __forceinline__ void sweep(const Call& call, const Run& z, const Stats* pulls, int c) {
    const int C = z.C;
    const uint8_t* const starts = call.tensor<uint8_t>(6);
    const Floats<4> weight = get(call.tensor<float>(2) + c);
    Floats<4> dshares[M] = {}, dweight{}, dbias{}, moved = flow_of_next<M, T>(call, z, z.end - 1, c);
    const auto x_of = [&](int t) { return normed(get(call.row<float>(0, z.row(t), C) + c), saved_stats(call, z, t)); };
    Floats<4> x = x_of(z.end - 1);
    // Unrolled, either loop would need more registers than are left.
#pragma unroll 1
    for (int t = z.end - 1; t >= z.begin; t--) {
        const bool clear = z.marked(starts, t);
        const Floats<4> x_before = t > 0 ? x_of(t - 1) : Floats<4>{};
        const Floats<4> off =
            t > 0 && !clear ? difference(x_before, x, weight) : off_of_first(call, z, t, c, x, weight);
        Flow flow;
#pragma unroll
        for (int m = 0; m < M; m++) {
            const Floats<4> grad = get(call.row<T>(14 + m, z.row(t), C) + c);
            // Shares are read anew for each token, from the nearest cache: there are no registers left to keep them in.
            flow.add(grad, get(call.tensor<float>(4) + m * C + c));
#pragma unroll
            for (int i = 0; i < 4; i++) dshares[m].x[i] += grad.x[i] * off.x[i];
        }
        const Floats<4> dn = flow.dn(call, z, t, c, moved);
        moved = clear ? Floats<4>{} : flow.moved;
        const float scale = saved_stats(call, z, t).scale;
        const Stats pull = pulls[t - z.begin];
        Floats<4> dx = get_if(call.tensors[7] != nullptr, call.row<float>(7, z.row(t), C) + c);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            dweight.x[i] += dn.x[i] * x.x[i];
            dbias.x[i] += dn.x[i];
            dx.x[i] += (dn.x[i] * weight.x[i] - pull.mean - x.x[i] * pull.scale) * scale;
        }
        put(call.row<float>(9, z.row(t), C) + c, dx);
        if (call.tensors[10] != nullptr) put(call.row<T>(10, z.row(t), C) + c, dx);
        x = x_before;
    }
    if (z.begin == 0 && call.tensors[11] != nullptr) put(call.tensor<float>(11) + z.of_sequence(c), moved);
    float* const sums = call.row<float>(12, z.piece, static_cast<int64_t>(M + 2) * C) + c;
#pragma unroll
    for (int m = 0; m < M; m++) put(sums + m * C, dshares[m]);
    put(sums + M * C, dweight);
    put(sums + (M + 1) * C, dbias);
}

template <int M, typename T>
__global__ void __launch_bounds__(THREADS, 2) backward(const Call call) {
    const Run z(call, block_number());
    Stats* const pulls = reinterpret_cast<Stats*>(shared_memory());
    const int warp = thread_number() / LANES, lane = thread_number() % LANES;
    for (int t = z.begin + warp; t < z.end; t += WARPS) {
        const Stats pull = pull_of<M, T>(call, z, t, lane);
        if (lane == 0) pulls[t - z.begin] = pull;
    }
    __syncthreads();
    for (int c = 4 * thread_number(); c < z.C; c += 4 * THREADS) sweep<M, T>(call, z, pulls, c);
}

}  // namespace

#include "norm_mix_calls.cuh"
