// WKV-5 (of RWKV-5.2) on the CPU: WKV-6 with one decay for each channel, whatever the token. Recurrence, legend and
// what is saved stand in wkv6.cpp. w_raw and u are [H, N] in float32, whatever the dtype of the tokens.

#include <cstdint>

#include "recurrence.hpp"
#include "threads.hpp"
#include "wkv6.hpp"
#include "wkv6_backward.hpp"

// Both return 0, or 2 where no memory was left; null means what it does in wkv6.cpp. dw_raw and du are [B, H, N], those
// of each sequence apart.
extern "C" int JOIN(wkv5_forward, HEAD_SIZE)(
    int64_t B, int64_t T, int64_t H, int bf16, const void* r, const void* k, const void* v, const float* w_raw,
    const float* u, const float* state_in, const uint8_t* starts, void* y, float* state_out, float* chunk_states,
    int64_t num_threads, Parallel parallel) {
    const Forward c{{T, H, HEAD_SIZE, bf16 != 0}, r, w_raw, k, v, u, state_in, starts, y, state_out, chunk_states};
    return Work<Forward, ForwardRows<HEAD_SIZE>, forward_head<HEAD_SIZE, false>>::start(c, B * H, num_threads,
                                                                                        parallel);
}

extern "C" int JOIN(wkv5_backward, HEAD_SIZE)(
    int64_t B, int64_t T, int64_t H, int bf16, const void* r, const void* k, const void* v, const float* w_raw,
    const float* u, const float* state_in, const uint8_t* starts, const float* chunk_states, const void* dy,
    const float* dstate_out, void* dr, void* dk, void* dv, float* dw_raw, float* du, float* dstate_in,
    int64_t num_threads, Parallel parallel) {
    const Backward c{{T, H, HEAD_SIZE, bf16 != 0}, r, w_raw, k, v, u, state_in, starts, chunk_states, dy, dstate_out,
                     dr, dw_raw, dk, dv, du, dstate_in};
    return Work<Backward, BackwardRows<HEAD_SIZE>, backward_head<HEAD_SIZE, false>>::start(c, B * H, num_threads,
                                                                                           parallel);
}
