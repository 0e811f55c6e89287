// Residual sum, layer norm and token shift in one pass, forward and backward.
// Legend: B sequences, T time, C channels, M mixed outputs; x, sum, first, last in float32, added and mixed in T.
//   sum = x + added,  n = layer norm of sum,  mixed_m = n + (n of the token before - n) * share_m
//   Before the first token stands `first` (or zeros), before a token that `starts` marks stand zeros; last = n of the
//   last token.
// Saved for the backward: sum, and mean and 1/deviation of every row [B, T, 2]; n is computed again.
// sizes: B, T, C, M, rows of a piece. scalars: the norm's epsilon. A piece is a run of one sequence's tokens.

#include "fused.hpp"

namespace {

// The sum of one row into `row` and, if there is room, into `kept`; its mean and 1/deviation.
template <class T>
INLINE Stats add_row(const float* x, const T* added, float* row, float* kept, int64_t C, float eps) {
    V total = V{}, squares = V{};
    for (int64_t c = 0; c < C; c += W) {
        const V value = added == nullptr ? get(x + c) : get(x + c) + get(added + c);
        put(row + c, value);
        if (kept != nullptr) put(kept + c, value);
        total += value;
    }
    const float mean = sum_of(total) / C;
    for (int64_t c = 0; c < C; c += W) {
        const V off = get(row + c) - mean;
        squares += off * off;
    }
    return {mean, 1.0f / std::sqrt(sum_of(squares) / C + eps)};
}

INLINE V normed(V value, Stats s, const float* weight, const float* bias) {
    return (value - s.mean) * s.scale * get(weight) + get(bias);
}

template <int M, class T>
APART void forward_piece(const Call& call, int64_t piece, Nothing&) {
    const Sequences z(call);
    const int64_t C = z.C, b = piece / z.of_a_sequence, begin = piece % z.of_a_sequence * z.run;
    const int64_t end = smaller(begin + z.run, z.T), row0 = b * z.T;
    const float *weight = call.tensor<float>(2), *bias = call.tensor<float>(3), *shares = call.tensor<float>(4);
    const float* first = call.row<float>(5, b, C);
    const uint8_t* starts = call.row<uint8_t>(6, b, z.T);
    float* const work = call.row<float>(10, piece, 2 * C);
    float *before = work, *now = work + C;
    if (begin > 0) {
        const int64_t row = row0 + begin - 1;
        const Stats s = add_row(call.row<float>(0, row, C), call.row<T>(1, row, C), before, nullptr, C, call.scalars[0]);
        for (int64_t c = 0; c < C; c += W) put(before + c, normed(get(before + c), s, weight + c, bias + c));
    } else if (first != nullptr) {
        std::memcpy(before, first, C * sizeof(float));
    } else {
        std::memset(before, 0, C * sizeof(float));
    }
    for (int64_t t = begin; t < end; t++) {
        const int64_t row = row0 + t;
        const Stats s = add_row(call.row<float>(0, row, C), call.row<T>(1, row, C), now, call.row<float>(7, row, C), C,
                                call.scalars[0]);
        std::memcpy(call.row<float>(8, row, 2), &s, sizeof s);
        if (marked(starts, t)) std::memset(before, 0, C * sizeof(float));
        T* out[M];
        for (int m = 0; m < M; m++) out[m] = call.row<T>(11 + m, row, C);
        for (int64_t c = 0; c < C; c += W) {
            const V n = normed(get(now + c), s, weight + c, bias + c), delta = get(before + c) - n;
            put(now + c, n);
            UNROLL
            for (int m = 0; m < M; m++) put(out[m] + c, n + delta * get(shares + m * C + c));
        }
        float* const other = before;
        before = now;
        now = other;
    }
    if (end == z.T) std::memcpy(call.row<float>(9, b, C), before, C * sizeof(float));
}

// What the tokens of a piece get, from its last one to its first: a token's part for the one before it is carried. Rows
// are walked through downwards, too: processors fetch ahead badly where rows go one way and channels the other.
template <int M, class T>
APART void backward_piece(const Call& call, int64_t piece, Nothing&) {
    const Sequences z(call);
    const int64_t C = z.C, b = piece / z.of_a_sequence, begin = piece % z.of_a_sequence * z.run;
    const int64_t end = smaller(begin + z.run, z.T), row0 = b * z.T;
    const float *weight = call.tensor<float>(2), *bias = call.tensor<float>(3), *shares = call.tensor<float>(4);
    const float *first = call.row<float>(5, b, C), *dlast = call.row<float>(8, b, C);
    const uint8_t* starts = call.row<uint8_t>(6, b, z.T);
    // The sums of this piece: of the shares, the norm's weight and its bias; then room to work in.
    float *const sums = call.row<float>(12, piece, (M + 2) * C), *const work = call.row<float>(13, piece, 4 * C);
    float *const dweight = sums + M * C, *const dbias = dweight + C, *const moved = work, *const dnormed = work + C;
    float *now = dnormed + C, *before = now + C;
    std::memset(sums, 0, (M + 2) * C * sizeof(float));
    std::memset(moved, 0, C * sizeof(float));
    const T* grads[M];
    if (end < z.T && !marked(starts, end)) {
        for (int m = 0; m < M; m++) grads[m] = call.row<T>(14 + m, row0 + end, C);
        for (int64_t c = 0; c < C; c += W) {
            V part = V{};
            UNROLL
            for (int m = 0; m < M; m++) part += get(grads[m] + c) * get(shares + m * C + c);
            put(moved + c, part);
        }
    }
    const auto norm_again = [&](int64_t t, float* to) {
        const float* sum = call.row<float>(0, row0 + t, C);
        Stats s;
        std::memcpy(&s, call.row<float>(1, row0 + t, 2), sizeof s);
        for (int64_t c = C - W; c >= 0; c -= W) put(to + c, normed(get(sum + c), s, weight + c, bias + c));
    };
    norm_again(end - 1, now);
    for (int64_t t = end - 1; t >= begin; t--) {
        const int64_t row = row0 + t;
        const bool clear = marked(starts, t);
        if (clear || (t == 0 && first == nullptr)) std::memset(before, 0, C * sizeof(float));
        else if (t == 0) std::memcpy(before, first, C * sizeof(float));
        else norm_again(t - 1, before);
        for (int m = 0; m < M; m++) grads[m] = call.row<T>(14 + m, row, C);
        const float *sum = call.row<float>(0, row, C), *dsum = call.row<float>(7, row, C);
        Stats s;
        std::memcpy(&s, call.row<float>(1, row, 2), sizeof s);
        V along_one = V{}, along_x = V{};
        for (int64_t c = C - W; c >= 0; c -= W) {
            const V off = get(before + c) - get(now + c);
            V total = V{}, part = V{};
            UNROLL
            for (int m = 0; m < M; m++) {
                const V grad = get(grads[m] + c);
                total += grad;
                part += grad * get(shares + m * C + c);
                add_to(sums + m * C + c, grad * off);
            }
            V dn = total - part + get(moved + c);
            if (dlast != nullptr && t == z.T - 1) dn += get(dlast + c);
            put(moved + c, clear ? V{} : part);
            const V x = (get(sum + c) - s.mean) * s.scale;
            add_to(dweight + c, dn * x);
            add_to(dbias + c, dn);
            dn *= get(weight + c);
            put(dnormed + c, dn);
            along_one += dn;
            along_x += dn * x;
        }
        const float one = sum_of(along_one) / C, slope = sum_of(along_x) / C;
        float* const dx = call.row<float>(9, row, C);
        T* const dadded = call.row<T>(10, row, C);
        for (int64_t c = C - W; c >= 0; c -= W) {
            const V x = (get(sum + c) - s.mean) * s.scale;
            V grad = (get(dnormed + c) - one - x * slope) * s.scale;
            if (dsum != nullptr) grad += get(dsum + c);
            put(dx + c, grad);
            if (dadded != nullptr) put(dadded + c, grad);
        }
        // What stood before a marked token were zeros, not the token that is the next one here.
        if (clear && t > begin) norm_again(t - 1, before);
        float* const other = before;
        before = now;
        now = other;
    }
    if (begin == 0 && call.tensors[11] != nullptr) std::memcpy(call.row<float>(11, b, C), moved, C * sizeof(float));
}

template <int M>
int forward(const Call& call, bool bf16, int64_t num_threads, Parallel parallel) {
    const int64_t pieces = call.sizes[0] * Sequences(call).of_a_sequence;
    return start<forward_piece<M, float>, forward_piece<M, uint16_t>>(call, bf16, pieces, num_threads, parallel);
}

template <int M>
int backward(const Call& call, bool bf16, int64_t num_threads, Parallel parallel) {
    const int64_t pieces = call.sizes[0] * Sequences(call).of_a_sequence;
    return start<backward_piece<M, float>, backward_piece<M, uint16_t>>(call, bf16, pieces, num_threads, parallel);
}

}  // namespace

// tensors: x, added or null, weight, bias [C], shares [M, C], first [B, C] or null, starts [B, T] or null, sum or null,
// stats, last [B, C], work [pieces, 2, C], mixed (M of them). Returns 0, 2 without memory, 3 for another M.
OPERATOR(norm_mix_forward) {
    const Call call{sizes, tensors, scalars};
    switch (sizes[3]) {
        case 1: return forward<1>(call, dtype != 0, num_threads, parallel);
        case 2: return forward<2>(call, dtype != 0, num_threads, parallel);
        case 4: return forward<4>(call, dtype != 0, num_threads, parallel);
        case 6: return forward<6>(call, dtype != 0, num_threads, parallel);
    }
    return 3;
}

// tensors: sum, stats, weight, bias, shares, first or null, starts or null, dsum or null, dlast [B, C] or null, dx,
// dadded or null, dfirst [B, C] or null, sums [pieces, M + 2, C] of the shares, the weight and the bias, work [pieces, 4,
// C], the gradients of mixed (M of them).
OPERATOR(norm_mix_backward) {
    const Call call{sizes, tensors, scalars};
    switch (sizes[3]) {
        case 1: return backward<1>(call, dtype != 0, num_threads, parallel);
        case 2: return backward<2>(call, dtype != 0, num_threads, parallel);
        case 4: return backward<4>(call, dtype != 0, num_threads, parallel);
        case 6: return backward<6>(call, dtype != 0, num_threads, parallel);
    }
    return 3;
}
