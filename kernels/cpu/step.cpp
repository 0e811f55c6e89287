// The step form of a whole model: one token of each of B sequences, from ids to logits and the new state, in float32.
//
// Legend: C channels in H heads of N, F channels inside the channel-mix, V ids; R_* ranks. Rows [B, C] lie one after
// the other. Weights bear their published names and come as addresses in the order of the enums below; what a layer
// lacks is null. The parts are those of step.hpp and products.hpp.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "products.hpp"
#include "step.hpp"
#include "threads.hpp"

namespace {

constexpr float LAYER_EPS = 1e-5f, GROUP_EPS = 64e-5f;

struct Sizes {
    int64_t layers, C, H, N, F, V, R_decay, R_iclr, R_value, R_gate, R_mix;
};

// What all generations begin with, and then each its own.
enum { LN0, LN0_BIAS, LN1, LN1_BIAS, LN2, LN2_BIAS, RECEPTANCE, KEY, VALUE, OUTPUT, LN_X, LN_X_BIAS, FFN_KEY, FFN_VALUE,
       OWN };
enum { X_R = OWN, X_W, X_K, X_V, X_A, X_G, W0, W1, W2, A0, A1, A2, V0, V1, V2, G1, G2, K_K, K_A, R_K, FFN_X_K,
       COUNT_X070 };
enum { GATE = OWN, FAAAA, DECAY, FFN_RECEPTANCE, MIX_R, MIX_K, MIX_V, MIX_G, FFN_MIX_K, FFN_MIX_R, COUNT_X052 };
enum { MAA_X = MIX_R, MAA_W, MAA_K, MAA_V, MAA_R, MAA_G, MAA_W1, MAA_W2, DECAY_W1, DECAY_W2, FFN_MAA_K, FFN_MAA_R,
       COUNT_X060 };

struct Step {
    Sizes s;
    int64_t B, num_threads;
    Parallel parallel;
    const float* const* layer = nullptr;
    // Work space of B rows each: `mixed` holds six times C numbers a row, `low` what lies between low-rank pairs.
    float *x = nullptr, *normed = nullptr, *mixed = nullptr, *r = nullptr, *k = nullptr, *v = nullptr, *decay = nullptr;
    float *a = nullptr, *g = nullptr, *share = nullptr, *first = nullptr, *out = nullptr, *low = nullptr;
    float* hidden = nullptr;
    bool is_first = true;
    int code = 0;

    const float* at(int weight) const { return layer[weight]; }

    // `numbers`: what the job has to do, as a count of multiplications.
    template <class Call, class Room, void (*PIECE_OF)(const Call&, int64_t, Room&)>
    void run(const Call& call, int64_t pieces, int64_t numbers) {
        const int64_t worth = 1 + numbers / WORTH_A_THREAD;
        const int found =
            Work<Call, Room, PIECE_OF>::start(call, pieces, num_threads < worth ? num_threads : worth, parallel);
        if (found != 0) code = found;
    }

    // Products that do not wait for each other.
    template <int COUNT>
    void multiply(const Product (&list)[COUNT]) {
        int64_t pieces = 0, numbers = 0;
        for (const Product& p : list) {
            pieces += pieces_of(p);
            numbers += B * p.in * p.out;
        }
        run<Products, Nothing, product_piece>({list, B}, pieces, numbers);
    }

    Product rows(const float* from, int weight, float* to, int64_t in, int64_t count, Activation f = PLAIN) const {
        return {from, at(weight), to, in, count, false, f};
    }

    Product columns(const float* from, int weight, float* to, int64_t in, int64_t count, Activation f = PLAIN) const {
        return {from, at(weight), to, in, count, true, f};
    }

    void norm(const float* from, float* to, const float* weight, const float* bias) {
        run<Norm, Nothing, norm_piece>({s.C, LAYER_EPS, from, weight, bias, to}, B, B * s.C);
    }

    // Row m of `mixed`, at m * B * C: one + (other - one) * (weight[m] + added[m]).
    template <int COUNT>
    void mix(const float* one, const float* other, const int (&weights)[COUNT], const float* added) {
        const float* list[COUNT];
        for (int n = 0; n < COUNT; n++) list[n] = at(weights[n]);
        run<Mix, Nothing, mix_piece>({s.C, B, COUNT, one, other, list, added, mixed}, B, B * s.C * COUNT);
    }

    float* mixed_for(int64_t m) const { return mixed + m * B * s.C; }

    void add(const float* y) {
        for (int64_t n = 0; n < B * s.C; n += W) put(x + n, get(x + n) + get(y + n));
    }
};

void time_mix_x070(Step& t, const float* shift, const float* state_in, float* state_out) {
    const Sizes& s = t.s;
    const int64_t C = s.C;
    t.mix(t.normed, shift, {X_R, X_W, X_K, X_V, X_A, X_G}, nullptr);
    float *const low_w = t.low, *const low_a = low_w + t.B * s.R_decay, *const low_g = low_a + t.B * s.R_iclr;
    float* const low_v = low_g + t.B * s.R_gate;
    t.multiply({t.rows(t.mixed_for(0), RECEPTANCE, t.r, C, C), t.rows(t.mixed_for(2), KEY, t.k, C, C),
                t.rows(t.mixed_for(3), VALUE, t.v, C, C), t.columns(t.mixed_for(1), W1, low_w, C, s.R_decay, TANH),
                t.columns(t.mixed_for(4), A1, low_a, C, s.R_iclr),
                t.columns(t.mixed_for(5), G1, low_g, C, s.R_gate, SIGMOID)});
    t.multiply({t.columns(low_w, W2, t.decay, s.R_decay, C), t.columns(low_a, A2, t.a, s.R_iclr, C),
                t.columns(low_g, G2, t.g, s.R_gate, C)});
    // The first block makes the value that the others mix in.
    if (!t.is_first) {
        t.multiply({t.columns(t.mixed_for(3), V1, low_v, C, s.R_value)});
        t.multiply({t.columns(low_v, V2, t.share, s.R_value, C)});
    }
    const Step7 call{s.H, s.N, GROUP_EPS, t.r, t.decay, t.k, t.v, t.a, t.g, t.is_first ? nullptr : t.share,
                     t.is_first ? nullptr : t.first, t.at(W0), t.at(A0), t.at(V0), t.at(K_K), t.at(K_A), t.at(R_K),
                     t.at(LN_X), t.at(LN_X_BIAS), state_in, state_out, t.is_first ? t.first : nullptr, t.out};
    t.run<Step7, Step7Room, step7_head>(call, t.B * s.H, t.B * C * s.N);
}

void channel_mix_x070(Step& t, const float* shift) {
    t.mix(t.normed, shift, {FFN_X_K}, nullptr);
    t.multiply({t.rows(t.mixed, FFN_KEY, t.hidden, t.s.C, t.s.F, SQUARED_RELU)});
    t.multiply({t.rows(t.hidden, FFN_VALUE, t.out, t.s.F, t.s.C)});
}

// `row`: where in `mixed` the inputs for r, k, v and the gate lie.
void end_of_time_mix(Step& t, const int (&row)[4], const float* w_raw, int64_t w_stride, const float* state_in,
                     float* state_out) {
    const int64_t C = t.s.C;
    t.multiply({t.rows(t.mixed_for(row[0]), RECEPTANCE, t.r, C, C), t.rows(t.mixed_for(row[1]), KEY, t.k, C, C),
                t.rows(t.mixed_for(row[2]), VALUE, t.v, C, C), t.rows(t.mixed_for(row[3]), GATE, t.g, C, C)});
    const Step6 call{t.s.H, t.s.N, w_stride, GROUP_EPS, t.r, w_raw, t.k, t.v, t.g, t.at(FAAAA), t.at(LN_X),
                     t.at(LN_X_BIAS), state_in, state_out, t.out};
    t.run<Step6, Step6Room, step6_head>(call, t.B * t.s.H, t.B * C * t.s.N);
}

void time_mix_x052(Step& t, const float* shift, const float* state_in, float* state_out) {
    // These weights are shares of the present token, so that the two change places.
    t.mix(shift, t.normed, {MIX_R, MIX_K, MIX_V, MIX_G}, nullptr);
    end_of_time_mix(t, {0, 1, 2, 3}, t.at(DECAY), 0, state_in, state_out);
}

void time_mix_x060(Step& t, const float* shift, const float* state_in, float* state_out) {
    const int64_t C = t.s.C, R = t.s.R_mix;
    t.mix(t.normed, shift, {MAA_X}, nullptr);
    // Five pairs side by side: the first matrix makes 5 R numbers a row, of which each second matrix takes its own R.
    t.multiply({t.columns(t.mixed, MAA_W1, t.low, C, 5 * R, TANH)});
    float *const own = t.low + t.B * 5 * R, *const added = t.hidden;
    Product second[5];
    for (int64_t n = 0; n < 5; n++) {
        for (int64_t b = 0; b < t.B; b++)
            std::memcpy(own + (n * t.B + b) * R, t.low + (b * 5 + n) * R, R * sizeof(float));
        second[n] = {own + n * t.B * R, t.at(MAA_W2) + n * R * C, added + n * t.B * C, R, C, true, PLAIN};
    }
    t.multiply(second);
    t.mix(t.normed, shift, {MAA_W, MAA_K, MAA_V, MAA_R, MAA_G}, added);
    t.multiply({t.columns(t.mixed_for(0), DECAY_W1, t.low, C, t.s.R_decay, TANH)});
    t.multiply({t.columns(t.low, DECAY_W2, t.decay, t.s.R_decay, C)});
    for (int64_t b = 0; b < t.B; b++)
        for (int64_t n = 0; n < C; n += W)
            put(t.decay + b * C + n, get(t.decay + b * C + n) + get(t.at(DECAY) + n));
    end_of_time_mix(t, {3, 1, 2, 4}, t.decay, C, state_in, state_out);
}

// The mixed inputs for the key and the receptance are the first two.
void gated_channels(Step& t) {
    const int64_t C = t.s.C, F = t.s.F;
    t.multiply({t.rows(t.mixed_for(0), FFN_KEY, t.hidden, C, F, SQUARED_RELU),
                t.rows(t.mixed_for(1), FFN_RECEPTANCE, t.r, C, C, SIGMOID)});
    t.multiply({t.rows(t.hidden, FFN_VALUE, t.out, F, C)});
    for (int64_t n = 0; n < t.B * C; n += W) put(t.out + n, get(t.out + n) * get(t.r + n));
}

void channel_mix_x052(Step& t, const float* shift) {
    t.mix(shift, t.normed, {FFN_MIX_K, FFN_MIX_R}, nullptr);
    gated_channels(t);
}

void channel_mix_x060(Step& t, const float* shift) {
    t.mix(t.normed, shift, {FFN_MAA_K, FFN_MAA_R}, nullptr);
    gated_channels(t);
}

using TimeMix = void (*)(Step&, const float*, const float*, float*);
using ChannelMix = void (*)(Step&, const float*);

struct States {
    const float *att_shift, *wkv, *ffn_shift;
    float *new_att_shift, *new_wkv, *new_ffn_shift;
};

void run_layers(Step& t, const States& states, const float* const* weights, int64_t per_layer, TimeMix time_mix,
                ChannelMix channel_mix) {
    const int64_t rows = t.B * t.s.C, state = rows * t.s.N;
    for (int64_t l = 0; l < t.s.layers; l++) {
        t.layer = weights + l * per_layer;
        t.is_first = l == 0;
        if (t.is_first) t.norm(t.x, t.x, t.at(LN0), t.at(LN0_BIAS));
        t.norm(t.x, t.normed, t.at(LN1), t.at(LN1_BIAS));
        time_mix(t, states.att_shift + l * rows, states.wkv + l * state, states.new_wkv + l * state);
        std::memcpy(states.new_att_shift + l * rows, t.normed, rows * sizeof(float));
        t.multiply({t.rows(t.out, OUTPUT, t.mixed, t.s.C, t.s.C)});
        t.add(t.mixed);
        t.norm(t.x, t.normed, t.at(LN2), t.at(LN2_BIAS));
        channel_mix(t, states.ffn_shift + l * rows);
        std::memcpy(states.new_ffn_shift + l * rows, t.normed, rows * sizeof(float));
        t.add(t.out);
    }
}

}  // namespace

// generation is 5, 6 or 7. weights: the addresses of each layer in turn; ends: emb.weight, ln_out's weight and bias,
// head.weight. The new states may lie where the old ones do. Returns 0, or 2 where no memory was left.
extern "C" int step(int64_t generation, const Sizes* sizes, int64_t B, const int64_t* ids, const float* const* weights,
                    const float* const* ends, const float* const* states, float* const* new_states, float* logits,
                    int64_t num_threads, Parallel parallel) {
    const Sizes& s = *sizes;
    const int64_t low = s.R_decay + s.R_iclr + s.R_gate + s.R_value + 10 * s.R_mix;
    const int64_t hidden = s.F > 5 * s.C ? s.F : 5 * s.C;
    float* const memory = static_cast<float*>(std::malloc(B * (17 * s.C + hidden + low) * sizeof(float)));
    if (memory == nullptr) return 2;
    Step t{s, B, num_threads, parallel};
    float* next = memory;
    const auto take = [&next, B](int64_t a_row) { return next += B * a_row, next - B * a_row; };
    for (float** row : {&t.x, &t.normed, &t.r, &t.k, &t.v, &t.decay, &t.a, &t.g, &t.share, &t.first, &t.out})
        *row = take(s.C);
    t.mixed = take(6 * s.C);
    t.hidden = take(hidden);
    t.low = take(low);
    for (int64_t b = 0; b < B; b++) std::memcpy(t.x + b * s.C, ends[0] + ids[b] * s.C, s.C * sizeof(float));
    const States all{states[0], states[1], states[2], new_states[0], new_states[1], new_states[2]};
    if (generation == 7) run_layers(t, all, weights, COUNT_X070, time_mix_x070, channel_mix_x070);
    if (generation == 6) run_layers(t, all, weights, COUNT_X060, time_mix_x060, channel_mix_x060);
    if (generation == 5) run_layers(t, all, weights, COUNT_X052, time_mix_x052, channel_mix_x052);
    t.norm(t.x, t.normed, ends[1], ends[2]);
    t.multiply({Product{t.normed, ends[3], logits, s.C, s.V, false, PLAIN}});
    std::free(memory);
    return t.code;
}
