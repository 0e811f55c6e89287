// Cross-entropy of rows of logits, and over the logits themselves their gradient, with the published logit regulariser.
// Legend: P rows of V logits in T; targets [P] in int64, weights and losses [P] in float32; m the largest logit, at
//   place `largest` (the first, if several are equal).
//   loss = weight * (log(sum of exp(logits)) - logits[target])
//   gradient = weight * (softmax(logits) - [target] + [largest] * l2wrap * m)
// A row of weight 0 has a loss and a gradient of exactly 0, whatever it holds. Nothing is saved.
// sizes: P, V. scalars: l2wrap, and 1 where the gradient is wanted.

#include <limits>

#include "fused.hpp"

namespace {

constexpr int64_t ROWS = 8;

inline float one(const float* p) { return *p; }
inline float one(const uint16_t* p) {
    const uint32_t bits = static_cast<uint32_t>(*p) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

template <class T>
inline void set_one(T* p, float x) {
    T lanes[W];
    put(lanes, all(x));
    *p = lanes[0];
}

// The last vector of a row, filled up with what adds nothing to a sum of exponentials.
template <class T>
INLINE V get_end(const T* row, int64_t n, int64_t length) {
    V x = all(-std::numeric_limits<float>::infinity());
    for (int64_t i = 0; n + i < length; i++) x[i] = one(row + n + i);
    return x;
}

template <class T>
INLINE void put_end(T* row, int64_t n, int64_t length, V x) {
    T lanes[W];
    put(lanes, x);
    std::memcpy(row + n, lanes, (length - n) * sizeof(T));
}

template <class T>
INLINE float largest_of(const T* row, int64_t length) {
    V largest = all(-std::numeric_limits<float>::infinity());
    int64_t n = 0;
    for (; n + W <= length; n += W) {
        const V x = get(row + n);
        largest = x > largest ? x : largest;
    }
    if (n < length) {
        const V x = get_end(row, n, length);
        largest = x > largest ? x : largest;
    }
    float result = largest[0];
    for (int i = 1; i < W; i++) result = largest[i] > result ? largest[i] : result;
    return result;
}

template <class T>
INLINE float sum_of_exponentials(const T* row, int64_t length, float largest) {
    V sum = V{};
    int64_t n = 0;
    for (; n + W <= length; n += W) sum += exponential(get(row + n) - largest).whole();
    if (n < length) sum += exponential(get_end(row, n, length) - largest).whole();
    return sum_of(sum);
}

template <class T>
INLINE void write_softmax(T* row, int64_t length, float largest, float factor) {
    int64_t n = 0;
    for (; n + W <= length; n += W) put(row + n, exponential(get(row + n) - largest).whole() * factor);
    if (n < length) put_end(row, n, length, exponential(get_end(row, n, length) - largest).whole() * factor);
}

template <class T>
APART void piece_of(const Call& call, int64_t piece, Nothing&) {
    const int64_t length = call.sizes[1], end = smaller((piece + 1) * ROWS, call.sizes[0]);
    const float l2wrap = call.scalars[0];
    const bool wants_gradient = call.scalars[1] != 0.0f;
    for (int64_t p = piece * ROWS; p < end; p++) {
        T* const row = call.row<T>(0, p, length);
        const int64_t target = call.tensor<int64_t>(1)[p];
        const float weight = call.tensor<float>(2)[p];
        if (weight == 0.0f) {
            call.tensor<float>(3)[p] = 0.0f;
            if (wants_gradient) std::memset(row, 0, length * sizeof(T));
            continue;
        }
        const float largest = largest_of(row, length), sum = sum_of_exponentials(row, length, largest);
        const float own = one(row + target);
        call.tensor<float>(3)[p] = weight * (std::log(sum) + (largest - own));
        if (!wants_gradient) continue;
        int64_t place = 0;
        // Of logits that are not numbers none may be equal to it.
        while (place < length - 1 && one(row + place) != largest) place++;
        write_softmax(row, length, largest, weight / sum);
        // These two are rounded once, not before and after what is added to them.
        const float pull = weight * l2wrap * largest;
        if (place != target) set_one(row + place, weight / sum + pull);
        set_one(row + target, weight * (std::exp(own - largest) / sum - 1.0f) + (place == target ? pull : 0.0f));
    }
}

}  // namespace

// tensors: logits, targets, weights, losses.
OPERATOR(softmax_loss) {
    return start<piece_of<float>, piece_of<uint16_t>>({sizes, tensors, scalars}, dtype != 0,
                                                      (sizes[0] + ROWS - 1) / ROWS, num_threads, parallel);
}
