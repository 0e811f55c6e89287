// The end of x052's and x060's channel-mix: out = value * sigmoid(gate); forward and backward.
// Legend: all tensors are elements in T, a multiple of 16 of them. Saved for the backward: the inputs. sizes: elements.

#include "fused.hpp"

namespace {

constexpr int64_t PIECE = 1 << 14;

template <class T>
APART void forward_piece(const Call& call, int64_t piece, Nothing&) {
    const T *gate = call.tensor<T>(0), *value = call.tensor<T>(1);
    T* const out = call.tensor<T>(2);
    const int64_t end = smaller((piece + 1) * PIECE, call.sizes[0]);
    for (int64_t n = piece * PIECE; n < end; n += W) put(out + n, get(value + n) * sigmoid(get(gate + n)).value);
}

template <class T>
APART void backward_piece(const Call& call, int64_t piece, Nothing&) {
    const T *gate = call.tensor<T>(0), *value = call.tensor<T>(1), *dout = call.tensor<T>(2);
    T *const dgate = call.tensor<T>(3), *const dvalue = call.tensor<T>(4);
    const int64_t end = smaller((piece + 1) * PIECE, call.sizes[0]);
    for (int64_t n = piece * PIECE; n < end; n += W) {
        const Sigmoid opened = sigmoid(get(gate + n));
        const V grad = get(dout + n);
        put(dgate + n, grad * get(value + n) * opened.slope());
        put(dvalue + n, grad * opened.value);
    }
}

int64_t pieces_of(const int64_t* sizes) { return (sizes[0] + PIECE - 1) / PIECE; }

}  // namespace

// tensors: gate, value, out.
OPERATOR(sigmoid_gate_forward) {
    return start<forward_piece<float>, forward_piece<uint16_t>>({sizes, tensors, scalars}, dtype != 0, pieces_of(sizes),
                                                                num_threads, parallel);
}

// tensors: gate, value, dout, dgate, dvalue.
OPERATOR(sigmoid_gate_backward) {
    return start<backward_piece<float>, backward_piece<uint16_t>>({sizes, tensors, scalars}, dtype != 0,
                                                                  pieces_of(sizes), num_threads, parallel);
}
