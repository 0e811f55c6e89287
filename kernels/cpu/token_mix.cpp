// x060's token shift with shares that depend on the token, in one pass; forward and backward.
// Legend: B sequences, T time, R = B T rows, C channels, M = 5 mixed outputs; x, added and mixed in T, shares and first
// in float32.
//   mixed_m = x + (x of the token before - x) * (share_m + added_m)
//   Before the first token stands `first` (or zeros), before a token that `starts` marks stand zeros.
// Saved for the backward: the inputs. sizes: B, T, C, M, rows of a piece. A piece is a run of one sequence's tokens.

#include "fused.hpp"

namespace {

constexpr int M = 5;

// A token's row, and where what stands before it is found: in the row before, in `first`, or nowhere.
template <class T>
struct Token {
    const T *x, *before;
    const float* first;

    Token(const Call& call, int64_t row, int64_t b, int64_t t, int64_t C, int first_tensor, bool clear)
        : x(call.row<T>(0, row, C)),
          before(clear || t == 0 ? nullptr : x - C),
          first(clear || t > 0 ? nullptr : call.row<float>(first_tensor, b, C)) {}

    INLINE V delta(int64_t c) const {
        const V own = get(x + c);
        return before != nullptr ? get(before + c) - own : first != nullptr ? get(first + c) - own : -own;
    }
};

template <class T>
APART void forward_piece(const Call& call, int64_t piece, Nothing&) {
    const Sequences z(call);
    const int64_t C = z.C, b = piece / z.of_a_sequence, begin = piece % z.of_a_sequence * z.run;
    const int64_t end = smaller(begin + z.run, z.T), rows = call.sizes[0] * z.T;
    const float* shares = call.tensor<float>(2);
    const uint8_t* starts = call.row<uint8_t>(4, b, z.T);
    for (int64_t t = begin; t < end; t++) {
        const int64_t row = b * z.T + t;
        const Token<T> token(call, row, b, t, C, 3, marked(starts, t));
        const T* added[M];
        T* out[M];
        for (int m = 0; m < M; m++) added[m] = call.row<T>(1, m * rows + row, C);
        for (int m = 0; m < M; m++) out[m] = call.row<T>(5 + m, row, C);
        for (int64_t c = 0; c < C; c += W) {
            const V own = get(token.x + c), delta = token.delta(c);
            UNROLL
            for (int m = 0; m < M; m++) put(out[m] + c, own + delta * (get(shares + m * C + c) + get(added[m] + c)));
        }
    }
}

// What a token gets itself waits until the next one has said what it hands on to the token before it. Memory is walked
// through upwards, as in the forward: in the other direction processors fetch ahead badly.
template <class T>
APART void backward_piece(const Call& call, int64_t piece, Nothing&) {
    const Sequences z(call);
    const int64_t C = z.C, b = piece / z.of_a_sequence, begin = piece % z.of_a_sequence * z.run;
    const int64_t end = smaller(begin + z.run, z.T), rows = call.sizes[0] * z.T;
    const float* shares = call.tensor<float>(2);
    const uint8_t* starts = call.row<uint8_t>(4, b, z.T);
    // The sums of this piece; then what waits.
    float* const sums = call.row<float>(8, piece, (M + 1) * C);
    float *const own = sums + M * C, *const dfirst = call.row<float>(7, b, C);
    std::memset(sums, 0, (M + 1) * C * sizeof(float));
    for (int64_t t = begin; t < end; t++) {
        const int64_t row = b * z.T + t;
        const bool clear = marked(starts, t);
        const Token<T> token(call, row, b, t, C, 3, clear);
        T *const before = t > begin ? call.row<T>(5, row - 1, C) : nullptr, *dadded[M];
        const T *grads[M], *added[M];
        for (int m = 0; m < M; m++) grads[m] = call.row<T>(9 + m, row, C);
        for (int m = 0; m < M; m++) added[m] = call.row<T>(1, m * rows + row, C);
        for (int m = 0; m < M; m++) dadded[m] = call.row<T>(6, m * rows + row, C);
        for (int64_t c = 0; c < C; c += W) {
            const V delta = token.delta(c);
            V total = V{}, moved = V{};
            UNROLL
            for (int m = 0; m < M; m++) {
                const V grad = get(grads[m] + c), product = grad * delta;
                total += grad;
                moved += grad * (get(shares + m * C + c) + get(added[m] + c));
                put(dadded[m] + c, product);
                add_to(sums + m * C + c, product);
            }
            const V handed_on = clear ? V{} : moved;
            if (before != nullptr) put(before + c, get(own + c) + handed_on);
            if (t == 0 && dfirst != nullptr) put(dfirst + c, handed_on);
            put(own + c, total - moved);
        }
    }
    T* const last = call.row<T>(5, b * z.T + end - 1, C);
    const bool is_followed = end < z.T && !marked(starts, end);
    for (int64_t c = 0; c < C; c += W) {
        V moved = V{};
        for (int m = 0; is_followed && m < M; m++) {
            const int64_t row = b * z.T + end;
            const V share = get(shares + m * C + c) + get(call.row<T>(1, m * rows + row, C) + c);
            moved += get(call.row<T>(9 + m, row, C) + c) * share;
        }
        put(last + c, get(own + c) + moved);
    }
}

}  // namespace

// tensors: x [B, T, C], added [M, R, C], shares [M, C], first [B, C] or null, starts [B, T] or null, mixed (M of them).
// Returns 0, 2 without memory, 3 for another M.
OPERATOR(token_mix_forward) {
    const Call call{sizes, tensors, scalars};
    if (sizes[3] != M) return 3;
    return start<forward_piece<float>, forward_piece<uint16_t>>(call, dtype != 0, sizes[0] * Sequences(call).of_a_sequence,
                                                                num_threads, parallel);
}

// tensors: x, added, shares, first or null, starts or null, dx, dadded [M, R, C], dfirst [B, C] or null, sums [pieces,
// M + 1, C] (of the shares come first), the gradients of mixed (M of them).
OPERATOR(token_mix_backward) {
    const Call call{sizes, tensors, scalars};
    if (sizes[3] != M) return 3;
    return start<backward_piece<float>, backward_piece<uint16_t>>(
        call, dtype != 0, sizes[0] * Sequences(call).of_a_sequence, num_threads, parallel);
}
