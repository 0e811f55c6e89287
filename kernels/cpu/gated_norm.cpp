// The end of a time-mix: group norm, bonus of the present token (x070 alone) and gate; forward and backward.
// Legend: R rows (tokens), H heads of N channels, C = H N; rows in T, weight, bias and r_k [C] in float32.
//   n = weight * (y - mean of the head) / deviation of the head + bias
//   x070: out = (n + v * sum over the head of (r k r_k)) * gate;   x052, x060: out = n * gate * sigmoid(gate)
// Saved for the backward: the inputs. sizes: R, H, N, rows of a piece. scalars: the norm's epsilon.

#include "fused.hpp"

namespace {

template <class T>
INLINE Stats stats_of(const T* y, int64_t N, float eps) {
    V total = V{}, squares = V{};
    for (int64_t n = 0; n < N; n += W) total += get(y + n);
    const float mean = sum_of(total) / N;
    for (int64_t n = 0; n < N; n += W) {
        const V off = get(y + n) - mean;
        squares += off * off;
    }
    return {mean, 1.0f / std::sqrt(sum_of(squares) / N + eps)};
}

template <class T>
INLINE float bonus_of(const T* r, const T* k, const float* r_k, int64_t N) {
    V total = V{};
    for (int64_t n = 0; n < N; n += W) total += get(r + n) * get(k + n) * get(r_k + n);
    return sum_of(total);
}

template <bool BONUS, class T>
APART void forward_piece(const Call& call, int64_t piece, Nothing&) {
    const Rows z(call, piece);
    const float *weight = call.tensor<float>(5), *bias = call.tensor<float>(6), *r_k = call.tensor<float>(7);
    for (int64_t row = z.begin; row < z.end; row++) {
        const T *y = call.row<T>(0, row, z.C), *gate = call.row<T>(1, row, z.C), *r = call.row<T>(2, row, z.C);
        const T *k = call.row<T>(3, row, z.C), *v = call.row<T>(4, row, z.C);
        T* const out = call.row<T>(8, row, z.C);
        for (int64_t head = 0; head < z.C; head += z.N) {
            const Stats s = stats_of(y + head, z.N, call.scalars[0]);
            const float bonus = BONUS ? bonus_of(r + head, k + head, r_k + head, z.N) : 0.0f;
            for (int64_t c = head; c < head + z.N; c += W) {
                const V opened = get(gate + c);
                V value = (get(y + c) - s.mean) * s.scale * get(weight + c) + get(bias + c);
                if (BONUS) value += get(v + c) * bonus;
                put(out + c, BONUS ? value * opened : value * opened * sigmoid(opened).value);
            }
        }
    }
}

template <bool BONUS, class T>
APART void backward_piece(const Call& call, int64_t piece, Nothing&) {
    const Rows z(call, piece);
    const float *weight = call.tensor<float>(5), *bias = call.tensor<float>(6), *r_k = call.tensor<float>(7);
    float* const sums = call.row<float>(14, piece, 3 * z.C);
    float *dweight = sums, *dbias = dweight + z.C, *dr_k = dbias + z.C;
    std::memset(sums, 0, 3 * z.C * sizeof(float));
    for (int64_t row = z.begin; row < z.end; row++) {
        const T *y = call.row<T>(0, row, z.C), *gate = call.row<T>(1, row, z.C), *r = call.row<T>(2, row, z.C);
        const T *k = call.row<T>(3, row, z.C), *v = call.row<T>(4, row, z.C), *dout = call.row<T>(8, row, z.C);
        T *dy = call.row<T>(9, row, z.C), *dgate = call.row<T>(10, row, z.C), *dr = call.row<T>(11, row, z.C);
        T *dk = call.row<T>(12, row, z.C), *dv = call.row<T>(13, row, z.C);
        for (int64_t head = 0; head < z.C; head += z.N) {
            const Stats s = stats_of(y + head, z.N, call.scalars[0]);
            const float bonus = BONUS ? bonus_of(r + head, k + head, r_k + head, z.N) : 0.0f;
            V along_one = V{}, along_x = V{}, along_v = V{};
            for (int64_t c = head; c < head + z.N; c += W) {
                const V x = (get(y + c) - s.mean) * s.scale, grad = get(dout + c), opened = get(gate + c);
                V value = x * get(weight + c) + get(bias + c), dvalue;
                if (BONUS) {
                    const V own = get(v + c);
                    put(dgate + c, grad * (value + own * bonus));
                    dvalue = grad * opened;
                    along_v += dvalue * own;
                    put(dv + c, dvalue * bonus);
                } else {
                    const Sigmoid half = sigmoid(opened);
                    dvalue = grad * opened * half.value;
                    put(dgate + c, grad * value * half.value * (1.0f + opened * half.rest));
                }
                add_to(dweight + c, dvalue * x);
                add_to(dbias + c, dvalue);
                dvalue *= get(weight + c);
                along_one += dvalue;
                along_x += dvalue * x;
            }
            const float one = sum_of(along_one) / z.N, slope = sum_of(along_x) / z.N, dbonus = sum_of(along_v);
            for (int64_t c = head; c < head + z.N; c += W) {
                const V x = (get(y + c) - s.mean) * s.scale, opened = get(gate + c);
                const V gated = BONUS ? opened : opened * sigmoid(opened).value;
                put(dy + c, (get(dout + c) * gated * get(weight + c) - one - x * slope) * s.scale);
                if (!BONUS) continue;
                const V read = get(r + c), key = get(k + c), scale = get(r_k + c) * dbonus;
                put(dr + c, key * scale);
                put(dk + c, read * scale);
                add_to(dr_k + c, read * key * dbonus);
            }
        }
    }
}

template <bool BONUS>
int forward(const Call& call, bool bf16, int64_t num_threads, Parallel parallel) {
    const int64_t pieces = (call.sizes[0] + call.sizes[3] - 1) / call.sizes[3];
    return start<forward_piece<BONUS, float>, forward_piece<BONUS, uint16_t>>(call, bf16, pieces, num_threads, parallel);
}

template <bool BONUS>
int backward(const Call& call, bool bf16, int64_t num_threads, Parallel parallel) {
    const int64_t pieces = (call.sizes[0] + call.sizes[3] - 1) / call.sizes[3];
    return start<backward_piece<BONUS, float>, backward_piece<BONUS, uint16_t>>(call, bf16, pieces, num_threads,
                                                                                parallel);
}

}  // namespace

// tensors: y, gate, r, k, v, weight, bias, r_k, out; without a bonus r, k, v and r_k are null.
OPERATOR(gated_norm_forward) {
    const Call call{sizes, tensors, scalars};
    return tensors[7] != nullptr ? forward<true>(call, dtype != 0, num_threads, parallel)
                                 : forward<false>(call, dtype != 0, num_threads, parallel);
}

// tensors: y, gate, r, k, v, weight, bias, r_k, dout, dy, dgate, dr, dk, dv, sums [pieces, 3, C] of weight, bias and
// r_k; without a bonus r, k, v, r_k, dr, dk and dv are null.
OPERATOR(gated_norm_backward) {
    const Call call{sizes, tensors, scalars};
    return tensors[7] != nullptr ? backward<true>(call, dtype != 0, num_threads, parallel)
                                 : backward<false>(call, dtype != 0, num_threads, parallel);
}
