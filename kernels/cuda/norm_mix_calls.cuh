// The C functions of norm_mix.cu. Included at its end, where the kernels forward<M, T> and backward<M, T> stand.

#pragma once

#include "device.cuh"
#include "fused.cuh"
#include "sequences.cuh"

namespace {

// Two numbers for each row of a piece and the one before it.
int shared_bytes(const int64_t* sizes) { return static_cast<int>((sizes[4] + 1) * sizeof(Stats)); }

template <int M>
int start_forward(const Call& call, int dtype, int64_t blocks, void* stream) {
    return launch({forward<M, float>, forward<M, __nv_bfloat16>, forward<M, __half>}, dtype, blocks, THREADS,
                  shared_bytes(call.sizes), stream, call);
}

template <int M>
int start_backward(const Call& call, int dtype, int64_t blocks, void* stream) {
    return launch({backward<M, float>, backward<M, __nv_bfloat16>, backward<M, __half>}, dtype, blocks, THREADS,
                  shared_bytes(call.sizes), stream, call);
}

}  // namespace

// tensors: x, added or null, weight, bias [C], shares [M, C], first [B, C] or null, starts [B, T] or null, sum or null,
// stats, last [B, C], nothing, mixed (M of them: 1, 2, 4 or 6).
OPERATOR(norm_mix_forward) {
    const int64_t blocks = pieces_of_sequences(sizes), M = sizes[3];
    if (M != 1 && M != 2 && M != 4 && M != 6) return cudaErrorInvalidValue;
    const Call call = call_of(sizes, 5, tensors, 11 + static_cast<int>(M), scalars, 1);
    if (const int problem = problem_of(call, 5, blocks, 6)) return problem;
    switch (M) {
        case 1: return start_forward<1>(call, dtype, blocks, stream);
        case 2: return start_forward<2>(call, dtype, blocks, stream);
        case 4: return start_forward<4>(call, dtype, blocks, stream);
        default: return start_forward<6>(call, dtype, blocks, stream);
    }
}

// tensors: sum, stats, weight, bias, shares, first or null, starts or null, dsum or null, dlast [B, C] or null, dx,
// dadded or null, dfirst [B, C] or null, sums [pieces, M + 2, C] of the shares, the weight and the bias, nothing, the
// gradients of mixed (M of them).
OPERATOR(norm_mix_backward) {
    const int64_t blocks = pieces_of_sequences(sizes), M = sizes[3];
    if (M != 1 && M != 2 && M != 4 && M != 6) return cudaErrorInvalidValue;
    const Call call = call_of(sizes, 5, tensors, 14 + static_cast<int>(M), scalars, 1);
    if (const int problem = problem_of(call, 5, blocks, 6)) return problem;
    switch (M) {
        case 1: return start_backward<1>(call, dtype, blocks, stream);
        case 2: return start_backward<2>(call, dtype, blocks, stream);
        case 4: return start_backward<4>(call, dtype, blocks, stream);
        default: return start_backward<6>(call, dtype, blocks, stream);
    }
}
