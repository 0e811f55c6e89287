// max(x, 0) squared, in place, and its backward from the squares alone: their root is max(x, 0) again.
// Legend: x, y, dy, dx are any number of elements in T. Saved for the backward: y. sizes: elements.

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "fused.hpp"

namespace {

constexpr int64_t PIECE = 1 << 14;

INLINE V root(V x) {
#if defined(__AVX512F__)
    return _mm512_sqrt_ps(x);
#elif defined(__AVX__)
    return _mm256_sqrt_ps(x);
#else
    for (int n = 0; n < W; n++) x[n] = std::sqrt(x[n]);
    return x;
#endif
}

// Vectors of a piece, the last one filled up with zeros.
template <class T, class Function>
INLINE void over_piece(int64_t count, int64_t piece, const T* in, const T* other, T* out, Function function) {
    const int64_t end = smaller((piece + 1) * PIECE, count);
    int64_t n = piece * PIECE;
    for (; n + W <= end; n += W) put(out + n, function(get(in + n), other == nullptr ? V{} : get(other + n)));
    if (n == end) return;
    T one[W] = {}, two[W] = {}, result[W];
    std::memcpy(one, in + n, (end - n) * sizeof(T));
    if (other != nullptr) std::memcpy(two, other + n, (end - n) * sizeof(T));
    put(result, function(get(one), get(two)));
    std::memcpy(out + n, result, (end - n) * sizeof(T));
}

template <class T>
APART void forward(const Call& call, int64_t piece, Nothing&) {
    T* const x = call.tensor<T>(0);
    // Written so that what is not a number stays that.
    over_piece<T>(call.sizes[0], piece, x, nullptr, x, [](V value, V) { return value < 0.0f ? V{} : value * value; });
}

template <class T>
APART void backward(const Call& call, int64_t piece, Nothing&) {
    over_piece<T>(call.sizes[0], piece, call.tensor<T>(0), call.tensor<T>(1), call.tensor<T>(2),
                  [](V square, V grad) { return 2.0f * root(square) * grad; });
}

int64_t pieces_of(const int64_t* sizes) { return (sizes[0] + PIECE - 1) / PIECE; }

}  // namespace

// tensors: x, which becomes y.
OPERATOR(relu2_forward) {
    return start<forward<float>, forward<uint16_t>>({sizes, tensors, scalars}, dtype != 0, pieces_of(sizes), num_threads,
                                                    parallel);
}

// tensors: y, dy, dx.
OPERATOR(relu2_backward) {
    return start<backward<float>, backward<uint16_t>>({sizes, tensors, scalars}, dtype != 0, pieces_of(sizes),
                                                      num_threads, parallel);
}
