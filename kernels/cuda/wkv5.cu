// WKV-5 on CUDA devices from sm_80 on: WKV-6 (see wkv6.cu) with one decay for each key of a head, w_raw [H, N].
// Legend: B batch, T time, H heads, N head size; S is the state of one head, S[j][i] with j the key, i the value index.
//   decay = exp(-exp(w_raw)),  y = (S + (u * k) v^T)^T r,  S <- diag(decay) S + k v^T
// The read comes before the update; `starts` clears S before its token. Saved for the backward: S before tokens CHUNK,
// 2*CHUNK, ...; the gradients of w_raw and u are summed over the tokens in registers.
// What wkv6.cu counts holds here too, but for the bytes of w_raw and its gradient: 1,536 and 1,920 for one token of one
// head of 64, 5,120 and 5,888 of 128. Counted, not measured: nobody has run this on a device yet.

#include <cstdint>

#include "device.cuh"
#include "wkv6_backward.cuh"
#include "wkv6_forward.cuh"

// HEAD_SIZE is given by the build, which compiles this file once for each size.
#define JOIN_(name, size) name##_##size
#define JOIN(name, size) JOIN_(name, size)

// Both return 0 or a CUDA error. dtype: 0 float32, 1 bfloat16, 2 float16, of r, k, v, y, dy and their gradients; w_raw
// and u are float32, dw_raw and du [B, H, N], of each sequence apart. Null means: starts, no resets; state_in, dy and
// dstate_out, zeros; chunk_states in the forward, not saved; dstate_in, not wanted. Addresses but starts are multiples
// of 16.
extern "C" int JOIN(wkv5_forward, HEAD_SIZE)(
    int64_t B, int64_t T, int64_t H, int dtype, const void* r, const void* k, const void* v, const float* w_raw,
    const float* u, const float* state_in, const uint8_t* starts, void* y, float* state_out, float* chunk_states,
    void* stream) {
    if (!fits(B, T, H)) return cudaErrorInvalidValue;
    if (!on_16_bytes({r, k, v, w_raw, u, state_in, y, state_out, chunk_states})) return cudaErrorMisalignedAddress;
    const Forward c{{static_cast<int>(T), static_cast<int>(H)}, r, w_raw, k, v, u, state_in, starts, y, state_out,
                    chunk_states};
    return launch({forward<float, false>, forward<__nv_bfloat16, false>, forward<__half, false>}, dtype, B * H,
                  FORWARD_THREADS, FORWARD_BYTES, stream, c);
}

extern "C" int JOIN(wkv5_backward, HEAD_SIZE)(
    int64_t B, int64_t T, int64_t H, int dtype, const void* r, const void* k, const void* v, const float* w_raw,
    const float* u, const float* state_in, const uint8_t* starts, const float* chunk_states, const void* dy,
    const float* dstate_out, void* dr, void* dk, void* dv, float* dw_raw, float* du, float* dstate_in, void* stream) {
    if (!fits(B, T, H)) return cudaErrorInvalidValue;
    if (!on_16_bytes({r, k, v, w_raw, u, state_in, chunk_states, dy, dstate_out, dr, dk, dv, dw_raw, du, dstate_in}))
        return cudaErrorMisalignedAddress;
    const Backward c{{static_cast<int>(T), static_cast<int>(H)}, r, w_raw, k, v, u, state_in, starts, chunk_states,
                     dy, dstate_out, dr, dw_raw, dk, dv, du, dstate_in};
    return launch({backward<float, false>, backward<__nv_bfloat16, false>, backward<__half, false>}, dtype, B * H,
                  BACKWARD_THREADS, BACKWARD_BYTES, stream, c);
}
