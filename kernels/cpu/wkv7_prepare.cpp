// What x070's recurrence takes, from what the matrix products gave: decay, value, key, removal; forward and backward.
// Legend: R rows (tokens), H heads of N channels, C = H N; rows in T, parameters [C] in float32.
//   w_raw = w0 + w_low,  v_out = v + (v_first - v) * sigmoid(v0 + v_low)   (block 0 has no v_first and leaves v as it is)
//   rate = sigmoid(a0 + a_low),  k_out = k * (1 + (rate - 1) * k_a)
//   kappa = k * k_k / max(|k * k_k| of the head, 1e-12),  a = -kappa,  b = kappa * rate
// Saved for the backward: the inputs, all but w_low. sizes: R, H, N, rows of a piece.

#include "fused.hpp"

namespace {

constexpr float FLOOR = 1e-12f;

// 1 / max(norm of key * k_k, FLOOR) of one head.
template <class T>
INLINE float inverse_norm(const T* k, const float* k_k, int64_t N) {
    V squares = V{};
    for (int64_t n = 0; n < N; n += W) {
        const V x = get(k + n) * get(k_k + n);
        squares += x * x;
    }
    const float norm = std::sqrt(sum_of(squares));
    return 1.0f / (norm < FLOOR ? FLOOR : norm);
}

template <class T>
APART void forward_piece(const Call& call, int64_t piece, Nothing&) {
    const Rows z(call, piece);
    const float *w0 = call.tensor<float>(6), *a0 = call.tensor<float>(7), *v0 = call.tensor<float>(8);
    const float *k_k = call.tensor<float>(9), *k_a = call.tensor<float>(10);
    for (int64_t row = z.begin; row < z.end; row++) {
        const T *w_low = call.row<T>(0, row, z.C), *a_low = call.row<T>(1, row, z.C), *k = call.row<T>(2, row, z.C);
        const T *v = call.row<T>(3, row, z.C), *v_low = call.row<T>(4, row, z.C), *v_first = call.row<T>(5, row, z.C);
        T *w_raw = call.row<T>(11, row, z.C), *k_out = call.row<T>(12, row, z.C), *v_out = call.row<T>(13, row, z.C);
        T *a = call.row<T>(14, row, z.C), *b = call.row<T>(15, row, z.C);
        for (int64_t head = 0; head < z.C; head += z.N) {
            const float inverse = inverse_norm(k + head, k_k + head, z.N);
            for (int64_t c = head; c < head + z.N; c += W) {
                const V key = get(k + c), kappa = key * get(k_k + c) * inverse;
                const Sigmoid rate = sigmoid(get(a0 + c) + get(a_low + c));
                put(w_raw + c, get(w0 + c) + get(w_low + c));
                put(k_out + c, key * (1.0f - rate.rest * get(k_a + c)));
                put(a + c, -kappa);
                put(b + c, kappa * rate.value);
                if (v_first == nullptr) continue;
                const V value = get(v + c), share = sigmoid(get(v0 + c) + get(v_low + c)).value;
                put(v_out + c, value + (get(v_first + c) - value) * share);
            }
        }
    }
}

template <class T>
APART void backward_piece(const Call& call, int64_t piece, Nothing&) {
    const Rows z(call, piece);
    const float *a0 = call.tensor<float>(5), *v0 = call.tensor<float>(6);
    const float *k_k = call.tensor<float>(7), *k_a = call.tensor<float>(8);
    float* const sums = call.row<float>(19, piece, 5 * z.C);
    float *dw0 = sums, *da0 = dw0 + z.C, *dv0 = da0 + z.C, *dk_k = dv0 + z.C, *dk_a = dk_k + z.C;
    std::memset(sums, 0, 5 * z.C * sizeof(float));
    for (int64_t row = z.begin; row < z.end; row++) {
        const T *a_low = call.row<T>(0, row, z.C), *k = call.row<T>(1, row, z.C), *v = call.row<T>(2, row, z.C);
        const T *v_low = call.row<T>(3, row, z.C), *v_first = call.row<T>(4, row, z.C);
        const T *dw_raw = call.row<T>(9, row, z.C), *dk_out = call.row<T>(10, row, z.C);
        const T *dv_out = call.row<T>(11, row, z.C), *da = call.row<T>(12, row, z.C), *db = call.row<T>(13, row, z.C);
        T *da_low = call.row<T>(14, row, z.C), *dk = call.row<T>(15, row, z.C), *dv = call.row<T>(16, row, z.C);
        T *dv_low = call.row<T>(17, row, z.C), *dv_first = call.row<T>(18, row, z.C);
        for (int64_t head = 0; head < z.C; head += z.N) {
            const float inverse = inverse_norm(k + head, k_k + head, z.N);
            V product = V{};
            for (int64_t c = head; c < head + z.N; c += W) {
                const V rate = sigmoid(get(a0 + c) + get(a_low + c)).value;
                product += (get(db + c) * rate - get(da + c)) * get(k + c) * get(k_k + c);
            }
            // A norm's gradient has no part along the direction itself, unless the floor stands in its place.
            const float along = inverse < 1.0f / FLOOR ? sum_of(product) * inverse : 0.0f;
            for (int64_t c = head; c < head + z.N; c += W) {
                const V key = get(k + c), scale = get(k_k + c), kappa = key * scale * inverse, mixing = get(k_a + c);
                const V grad_key = get(dk_out + c), grad_b = get(db + c);
                const Sigmoid rate = sigmoid(get(a0 + c) + get(a_low + c));
                const V low = (grad_b * kappa + grad_key * key * mixing) * rate.slope();
                const V direction = (grad_b * rate.value - get(da + c) - kappa * along) * inverse;
                put(da_low + c, low);
                put(dk + c, grad_key * (1.0f - rate.rest * mixing) + direction * scale);
                add_to(dw0 + c, get(dw_raw + c));
                add_to(da0 + c, low);
                add_to(dk_k + c, direction * key);
                add_to(dk_a + c, -grad_key * key * rate.rest);
                if (v_first == nullptr) continue;
                const Sigmoid share = sigmoid(get(v0 + c) + get(v_low + c));
                const V grad = get(dv_out + c), low_v = grad * (get(v_first + c) - get(v + c)) * share.slope();
                put(dv + c, grad * share.rest);
                put(dv_first + c, grad * share.value);
                put(dv_low + c, low_v);
                add_to(dv0 + c, low_v);
            }
        }
    }
}

int64_t pieces_of(const int64_t* sizes) { return (sizes[0] + sizes[3] - 1) / sizes[3]; }

}  // namespace

// tensors: w_low, a_low, k, v, v_low, v_first, w0, a0, v0, k_k, k_a; w_raw, k_out, v_out, a, b. In block 0 v, v_low,
// v_first, v0 and v_out are null.
OPERATOR(wkv7_prepare_forward) {
    return start<forward_piece<float>, forward_piece<uint16_t>>({sizes, tensors, scalars}, dtype != 0, pieces_of(sizes),
                                                                num_threads, parallel);
}

// tensors: a_low, k, v, v_low, v_first, a0, v0, k_k, k_a; dw_raw (which is the gradient of w_low too), dk_out, dv_out,
// da, db; da_low, dk, dv, dv_low, dv_first, sums [pieces, 5, C] of w0, a0, v0, k_k and k_a. In block 0 all that belongs
// to v is null.
OPERATOR(wkv7_prepare_backward) {
    return start<backward_piece<float>, backward_piece<uint16_t>>({sizes, tensors, scalars}, dtype != 0,
                                                                  pieces_of(sizes), num_threads, parallel);
}
