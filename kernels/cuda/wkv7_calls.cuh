// The C functions of a library of WKV-7. Included at the end of a .cu that has the kernels forward<T> and backward<T>
// and, for each, how many threads a block has and how much shared memory: FORWARD_THREADS, FORWARD_BYTES and so on.

#pragma once

#include "device.cuh"
#include "wkv7.cuh"

// HEAD_SIZE is given by the build, which compiles this file once for each size.
#define JOIN_(name, size) name##_##size
#define JOIN(name, size) JOIN_(name, size)

// Both return 0 or a CUDA error. dtype: 0 float32, 1 bfloat16, 2 float16, of r to b, y, dy and the gradients of r to b.
// Null means: starts, no resets; state_in, dy and dstate_out, zeros; chunk_states and sa in the forward, not saved;
// dstate_in, not wanted. Every address but that of starts is a multiple of 16.
extern "C" int JOIN(wkv7_forward, HEAD_SIZE)(
    int64_t B, int64_t T, int64_t H, int dtype, const void* r, const void* w_raw, const void* k, const void* v,
    const void* a, const void* b, const float* state_in, const uint8_t* starts, void* y, float* state_out,
    float* chunk_states, float* sa, void* stream) {
    if (!fits(B, T, H)) return cudaErrorInvalidValue;
    if (!on_16_bytes({r, w_raw, k, v, a, b, state_in, y, state_out, chunk_states, sa}))
        return cudaErrorMisalignedAddress;
    const Forward c{{static_cast<int>(T), static_cast<int>(H)}, r, w_raw, k, v, a, b, state_in, starts, y, state_out,
                    chunk_states, sa};
    return launch({forward<float>, forward<__nv_bfloat16>, forward<__half>}, dtype, B * H, FORWARD_THREADS,
                  FORWARD_BYTES, stream, c);
}

extern "C" int JOIN(wkv7_backward, HEAD_SIZE)(
    int64_t B, int64_t T, int64_t H, int dtype, const void* r, const void* w_raw, const void* k, const void* v,
    const void* a, const void* b, const float* state_in, const uint8_t* starts, const float* chunk_states,
    const float* sa, const void* dy, const float* dstate_out, void* dr, void* dw_raw, void* dk, void* dv, void* da,
    void* db, float* dstate_in, void* stream) {
    if (!fits(B, T, H)) return cudaErrorInvalidValue;
    if (!on_16_bytes({r, w_raw, k, v, a, b, state_in, chunk_states, sa, dy, dstate_out, dr, dw_raw, dk, dv, da, db,
                      dstate_in}))
        return cudaErrorMisalignedAddress;
    const Backward c{{static_cast<int>(T), static_cast<int>(H)}, r, w_raw, k, v, a, b, state_in, starts,
                     chunk_states, sa, dy, dstate_out, dr, dw_raw, dk, dv, da, db, dstate_in};
    return launch({backward<float>, backward<__nv_bfloat16>, backward<__half>}, dtype, B * H, BACKWARD_THREADS,
                  BACKWARD_BYTES, stream, c);
}
