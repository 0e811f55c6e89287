// WKV-6 on CUDA devices from sm_80 on, forward and backward: float32, bfloat16 or float16 inputs, float32 states and u.
// Legend: B batch, T time, H heads, N head size; S is the state of one head, S[j][i] with j the key, i the value index.
//   decay = exp(-exp(w_raw)),  y = (S + (u * k) v^T)^T r,  S <- diag(decay) S + k v^T
// The read comes before the update; `starts` clears S before its token.
// Saved for the backward: S before tokens CHUNK, 2*CHUNK, ...; of the states in between only products are needed.
// One block works on one (batch, head) pair, every sum in a fixed order.
//
// Counted on paper and in the machine code for sm_90, not measured: nobody has run this on a device yet.
//                                            forward, N 64   backward, N 64   forward, N 128   backward, N 128
//   threads, registers at most                     64, 128         128, 168         256, 128          256, 255
//   shared memory, bytes                            17,984           33,536           34,880            63,232
//   blocks, warps on an H100's multiprocessor        8, 16            3, 12            2, 16              1, 8
//   multiply-adds, 3 and 5 passes over S and more   12,300           27,500           49,200            95,900
//   instructions of warps                              590            1,620            2,310             5,330
//   bytes, where inputs are of 16 bits               1,664            2,176            5,376             6,400
// all of the last three for one token of one head. An H100 (132 multiprocessors at 1.755 GHz issue 9.3e11 warp
// instructions a second; 3.35 TB/s) can so not need less than 0.6 + 1.7 ns for one token of one head of 64, by the
// instructions; by the bytes 0.5 + 0.7 ns. With fewer blocks than fit, the time is that of one chunk after another.

#include <cstdint>

#include "device.cuh"
#include "wkv6_backward.cuh"
#include "wkv6_forward.cuh"

// HEAD_SIZE is given by the build, which compiles this file once for each size.
#define JOIN_(name, size) name##_##size
#define JOIN(name, size) JOIN_(name, size)

// Both return 0 or a CUDA error. dtype: 0 float32, 1 bfloat16, 2 float16, of r, w_raw, k, v, y, dy and their gradients;
// u is float32, and du [B, H, N], of each sequence apart. Null means: starts, no resets; state_in, dy and dstate_out,
// zeros; chunk_states in the forward, not saved; dstate_in, not wanted. Addresses but starts are multiples of 16.
extern "C" int JOIN(wkv6_forward, HEAD_SIZE)(
    int64_t B, int64_t T, int64_t H, int dtype, const void* r, const void* w_raw, const void* k, const void* v,
    const float* u, const float* state_in, const uint8_t* starts, void* y, float* state_out, float* chunk_states,
    void* stream) {
    if (!fits(B, T, H)) return cudaErrorInvalidValue;
    if (!on_16_bytes({r, w_raw, k, v, u, state_in, y, state_out, chunk_states})) return cudaErrorMisalignedAddress;
    const Forward c{{static_cast<int>(T), static_cast<int>(H)}, r, w_raw, k, v, u, state_in, starts, y, state_out,
                    chunk_states};
    return launch({forward<float, true>, forward<__nv_bfloat16, true>, forward<__half, true>}, dtype, B * H,
                  FORWARD_THREADS, FORWARD_BYTES, stream, c);
}

extern "C" int JOIN(wkv6_backward, HEAD_SIZE)(
    int64_t B, int64_t T, int64_t H, int dtype, const void* r, const void* w_raw, const void* k, const void* v,
    const float* u, const float* state_in, const uint8_t* starts, const float* chunk_states, const void* dy,
    const float* dstate_out, void* dr, void* dw_raw, void* dk, void* dv, float* du, float* dstate_in, void* stream) {
    if (!fits(B, T, H)) return cudaErrorInvalidValue;
    if (!on_16_bytes({r, w_raw, k, v, u, state_in, chunk_states, dy, dstate_out, dr, dw_raw, dk, dv, du, dstate_in}))
        return cudaErrorMisalignedAddress;
    const Backward c{{static_cast<int>(T), static_cast<int>(H)}, r, w_raw, k, v, u, state_in, starts, chunk_states,
                     dy, dstate_out, dr, dw_raw, dk, dv, du, dstate_in};
    return launch({backward<float, true>, backward<__nv_bfloat16, true>, backward<__half, true>}, dtype, B * H,
                  BACKWARD_THREADS, BACKWARD_BYTES, stream, c);
}
