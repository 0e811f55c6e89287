// WKV-6 on the CPU, forward and backward, for float32 and bfloat16 inputs with float32 states and u.
// Legend: B batch, T time, H heads, N head size; S is the state of one head, S[j][i] with j the key, i the value index.
//   decay = exp(-exp(w_raw)),  y = (S + (u * k) v^T)^T r,  S <- diag(decay) S + k v^T
// The read comes before the update; `starts` clears S before its token.
// Saved for the backward: S before tokens CHUNK, 2*CHUNK, ...; the states in between are computed again.
// One (batch, head) pair is one piece of work, its sums in a fixed order: no bit depends on the number of threads.

#include <cstdint>

#include "recurrence.hpp"
#include "threads.hpp"
#include "wkv6.hpp"
#include "wkv6_backward.hpp"

// Both return 0, or 2 where no memory was left. u and du are float32, du [B, H, N] of each sequence apart.
// Null means: starts, no resets; state_in, dy and dstate_out, zeros; chunk_states in the forward, not saved; dstate_in,
// not wanted.
extern "C" int JOIN(wkv6_forward, HEAD_SIZE)(
    int64_t B, int64_t T, int64_t H, int bf16, const void* r, const void* w_raw, const void* k, const void* v,
    const float* u, const float* state_in, const uint8_t* starts, void* y, float* state_out, float* chunk_states,
    int64_t num_threads, Parallel parallel) {
    const Forward c{{T, H, HEAD_SIZE, bf16 != 0}, r, w_raw, k, v, u, state_in, starts, y, state_out, chunk_states};
    return Work<Forward, ForwardRows<HEAD_SIZE>, forward_head<HEAD_SIZE, true>>::start(c, B * H, num_threads, parallel);
}

extern "C" int JOIN(wkv6_backward, HEAD_SIZE)(
    int64_t B, int64_t T, int64_t H, int bf16, const void* r, const void* w_raw, const void* k, const void* v,
    const float* u, const float* state_in, const uint8_t* starts, const float* chunk_states, const void* dy,
    const float* dstate_out, void* dr, void* dw_raw, void* dk, void* dv, float* du, float* dstate_in,
    int64_t num_threads, Parallel parallel) {
    const Backward c{{T, H, HEAD_SIZE, bf16 != 0}, r, w_raw, k, v, u, state_in, starts, chunk_states, dy, dstate_out,
                     dr, dw_raw, dk, dv, du, dstate_in};
    return Work<Backward, BackwardRows<HEAD_SIZE>, backward_head<HEAD_SIZE, true>>::start(c, B * H, num_threads,
                                                                                          parallel);
}
