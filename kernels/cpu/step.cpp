// The step form for any number of sequences: the operators of step.hpp, each one call.

#include <cstdint>

#include "step.hpp"
#include "threads.hpp"

// Each returns 0, or 2 where no memory was left. Null means: added, nothing; v_out, not wanted.
extern "C" int mix(int64_t B, int64_t C, int64_t count, const float* x, const float* previous,
                   const float* const* weights, const float* added, float* out, int64_t num_threads,
                   Parallel parallel) {
    const Mix c{C, B, count, x, previous, weights, added, out};
    return Work<Mix, Nothing, mix_row>::start(c, B, num_threads, parallel);
}

extern "C" int step7(int64_t B, int64_t H, int64_t N, float eps, const float* const* products,
                     const float* const* weights, const float* state_in, float* state_out, float* v_out, float* out,
                     int64_t num_threads, Parallel parallel) {
    const float *const *p = products, *const *q = weights;
    const Step7 c{H,    N,    eps,  p[0], p[1], p[2], p[3], p[4],     p[5],      p[6],  p[7], q[0],
                  q[1], q[2], q[3], q[4], q[5], q[6], q[7], state_in, state_out, v_out, out};
    return Work<Step7, Step7Room, step7_head>::start(c, B * H, num_threads, parallel);
}

extern "C" int step6(int64_t B, int64_t H, int64_t N, int64_t w_stride, float eps, const float* const* products,
                     const float* const* weights, const float* state_in, float* state_out, float* out,
                     int64_t num_threads, Parallel parallel) {
    const float *const *p = products, *const *q = weights;
    const Step6 c{H,    N,    w_stride, eps,  p[0], p[1],     p[2],      p[3],
                  p[4], q[0], q[1],     q[2], state_in, state_out, out};
    return Work<Step6, Step6Room, step6_head>::start(c, B * H, num_threads, parallel);
}
