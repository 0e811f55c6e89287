// CUDA on the CPU, for tests: one fiber a CUDA thread, so that the very source of a .cu runs under g++.
// Promises: barriers and warp operations wait for exactly the threads that CUDA makes wait; the order of threads is
// forward (whole warps run ahead), reverse, or random, so that a missing barrier shows; shared memory begins as NaN and
// is fenced. What would hang or be undefined on a device ends the launch with an error and a message instead.
// Needs g++ -O2 -U_FORTIFY_SOURCE: fibers jump between stacks, which the fortified longjmp forbids.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(8) float2 {
    float x, y;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

namespace cuemu {

constexpr int WARP = 32;
constexpr std::size_t STACK_BYTES = 64 * 1024, FENCE_BYTES = 256;
// What a kernel may take without asking, and what the smallest device from sm_80 on gives where asked.
constexpr std::size_t SHARED_BYTES_UNASKED = 48 * 1024, SHARED_BYTES_MOST = 99 * 1024;
constexpr char FENCE = 0x5a;
constexpr int INVALID_VALUE = 1, INVALID_CONFIGURATION = 9, LAUNCH_FAILURE = 719;

enum class Wait { NOTHING, BLOCK, WARP, FOREVER };

struct Fiber {
    ucontext_t context;
    jmp_buf place;
    dim3 index;
    Wait wait;
    bool begun;
    // Of the warp operation it waits in: what kind, for whom, what it gives, from which lane it takes, what it got.
    int kind;
    uint32_t mask, given, got;
    int from;
};

// One thread of the test runs one launch at a time, so the state of a launch is the thread's.
struct Device {
    dim3 block, block_size, grid_size;
    std::vector<Fiber> fibers;
    std::vector<char> stacks, shared;
    Fiber* now = nullptr;
    jmp_buf scheduler;
    void (*body)(void*) = nullptr;
    void* body_data = nullptr;
    int order = 0, error = 0;
    uint32_t random = 1;
    std::size_t shared_bytes_allowed = SHARED_BYTES_UNASKED;
    std::string message;
};

inline thread_local Device device;

inline void fail(int error, const std::string& message) {
    if (device.error == 0) {
        device.error = error;
        device.message = message;
    }
}

inline unsigned linear(dim3 index) {
    return index.x + device.block_size.x * (index.y + device.block_size.y * index.z);
}

// ---- fibers ----

inline void begin_fiber() {
    device.body(device.body_data);
    device.now->wait = Wait::FOREVER;
    _longjmp(device.scheduler, 1);
}

inline void run(Fiber& fiber) {
    device.now = &fiber;
    if (_setjmp(device.scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

inline void pause(Wait wait) {
    device.now->wait = wait;
    if (!_setjmp(device.now->place)) _longjmp(device.scheduler, 1);
}

inline uint32_t next_random() {
    uint32_t& x = device.random;
    x ^= x << 13;
    x ^= x >> 17;
    return x ^= x << 5;
}

// ---- what releases a fiber ----

// A warp operation is done when all lanes of its mask are in it.
inline void release_warp(std::size_t warp, Fiber& last) {
    const std::size_t first = warp * WARP, size = device.fibers.size();
    for (int lane = 0; lane < WARP; lane++) {
        if (!(last.mask >> lane & 1)) continue;
        if (first + lane >= size) return fail(LAUNCH_FAILURE, "a mask names a lane that does not exist");
        const Fiber& other = device.fibers[first + lane];
        if (other.wait == Wait::FOREVER) return fail(LAUNCH_FAILURE, "a mask names a lane that has ended");
        if (other.wait != Wait::WARP) return;
        if (other.mask != last.mask || other.kind != last.kind)
            return fail(LAUNCH_FAILURE, "lanes of one mask are in different warp operations");
    }
    for (int lane = 0; lane < WARP; lane++) {
        if (!(last.mask >> lane & 1)) continue;
        Fiber& fiber = device.fibers[first + lane];
        if (!(last.mask >> fiber.from & 1)) return fail(LAUNCH_FAILURE, "a lane takes from one outside the mask");
        fiber.got = device.fibers[first + fiber.from].given;
        fiber.wait = Wait::NOTHING;
    }
}

// False where no thread is left; an error where some wait for others that have ended.
inline bool release_block() {
    std::size_t waiting = 0, ended = 0;
    for (const Fiber& fiber : device.fibers) {
        waiting += fiber.wait == Wait::BLOCK;
        ended += fiber.wait == Wait::FOREVER;
    }
    if (ended == device.fibers.size()) return false;
    if (waiting < device.fibers.size()) {
        fail(LAUNCH_FAILURE, "deadlock: " + std::to_string(waiting) + " threads are at a barrier, " +
                                 std::to_string(ended) + " have ended, the others wait in a warp operation");
        return false;
    }
    for (Fiber& fiber : device.fibers) fiber.wait = Wait::NOTHING;
    return true;
}

// ---- the order of threads ----

inline void step(std::size_t i) {
    Fiber& fiber = device.fibers[i];
    run(fiber);
    if (fiber.wait == Wait::WARP) release_warp(i / WARP, fiber);
}

// One warp after another, each as far as it goes.
inline void run_warps(bool reverse) {
    const std::size_t size = device.fibers.size(), warps = (size + WARP - 1) / WARP;
    for (std::size_t n = 0; n < warps; n++) {
        const std::size_t first = (reverse ? warps - 1 - n : n) * WARP;
        const std::size_t lanes = std::min<std::size_t>(WARP, size - first);
        for (bool moved = true; moved && device.error == 0;) {
            moved = false;
            for (std::size_t q = 0; q < lanes && device.error == 0; q++) {
                const std::size_t i = first + (reverse ? lanes - 1 - q : q);
                if (device.fibers[i].wait != Wait::NOTHING) continue;
                step(i);
                moved = true;
            }
        }
    }
}

inline void run_at_random() {
    std::vector<std::size_t> ready;
    do {
        ready.clear();
        for (std::size_t i = 0; i < device.fibers.size(); i++)
            if (device.fibers[i].wait == Wait::NOTHING) ready.push_back(i);
        for (std::size_t n = ready.size(); n > 1; n--) std::swap(ready[n - 1], ready[next_random() % n]);
        // Some are left out of a round, so that threads drift far apart.
        for (std::size_t i : ready)
            if (device.error == 0 && (ready.size() < 4 || next_random() % 2)) step(i);
    } while (!ready.empty() && device.error == 0);
}

// ---- blocks and launches ----

inline void begin_block(std::size_t shared_bytes) {
    // Whatever a kernel reads before it was written is not a number.
    device.shared.assign(shared_bytes + 2 * FENCE_BYTES, FENCE);
    std::fill_n(device.shared.begin() + FENCE_BYTES, shared_bytes, '\xff');
    for (std::size_t i = 0; i < device.fibers.size(); i++) {
        Fiber& fiber = device.fibers[i];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = device.stacks.data() + i * STACK_BYTES;
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        fiber.begun = false;
        fiber.wait = Wait::NOTHING;
        const dim3 size = device.block_size;
        fiber.index = dim3(i % size.x, i / size.x % size.y, i / size.x / size.y);
        makecontext(&fiber.context, begin_fiber, 0);
    }
}

inline void end_block(std::size_t shared_bytes) {
    for (std::size_t i = 0; i < FENCE_BYTES; i++)
        if (device.shared[i] != FENCE || device.shared[FENCE_BYTES + shared_bytes + i] != FENCE)
            fail(LAUNCH_FAILURE, "written outside of shared memory");
}

inline void run_block(std::size_t shared_bytes) {
    begin_block(shared_bytes);
    do {
        if (device.order < 2) run_warps(device.order == 1);
        else run_at_random();
    } while (device.error == 0 && release_block());
    end_block(shared_bytes);
}

template <typename F>
void launch(dim3 grid, dim3 block, std::size_t shared_bytes, void* /*stream*/, F body) {
    const std::size_t threads = std::size_t{block.x} * block.y * block.z, allowed = device.shared_bytes_allowed;
    device.shared_bytes_allowed = SHARED_BYTES_UNASKED;
    if (threads == 0 || threads > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0)
        return fail(INVALID_CONFIGURATION, "a grid or block of a size that no device has");
    if (shared_bytes > allowed) return fail(INVALID_VALUE, "more shared memory than was asked for or than there is");
    device.grid_size = grid;
    device.block_size = block;
    device.body = [](void* data) { (*static_cast<F*>(data))(); };
    device.body_data = &body;
    device.fibers.resize(threads);
    device.stacks.resize(threads * STACK_BYTES);
    device.random = 2654435761u * static_cast<uint32_t>(device.order + 1) | 1;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                device.block = dim3(x, y, z);
                if (device.error == 0) run_block(shared_bytes);
            }
}

// ---- what a kernel calls ----

enum Kind { SYNC, SHUFFLE };

inline uint32_t warp_operation(int kind, uint32_t mask, uint32_t given, int from) {
    Fiber& fiber = *device.now;
    const int lane = static_cast<int>(linear(fiber.index) % WARP);
    if (!(mask >> lane & 1)) fail(LAUNCH_FAILURE, "a lane is not in the mask that it gives");
    fiber.kind = kind;
    fiber.mask = mask;
    fiber.given = given;
    fiber.from = from;
    pause(Wait::WARP);
    return fiber.got;
}

inline int lane_of_now() { return static_cast<int>(linear(device.now->index) % WARP); }

template <typename T>
T shuffle(uint32_t mask, T value, int from) {
    static_assert(sizeof(T) == 4, "shuffles carry four bytes here");
    uint32_t given;
    std::memcpy(&given, &value, 4);
    const uint32_t got = warp_operation(SHUFFLE, mask, given, from);
    std::memcpy(&value, &got, 4);
    return value;
}

// A source outside the lane's part of the warp, `width` wide, gives the lane its own value.
template <typename T>
T shuffle_xor(uint32_t mask, T value, int bits, int width = WARP) {
    const int lane = lane_of_now(), from = lane ^ bits;
    return shuffle(mask, value, from / width == lane / width ? from : lane);
}

template <typename T>
T shuffle_down(uint32_t mask, T value, int distance, int width = WARP) {
    const int lane = lane_of_now();
    return shuffle(mask, value, lane % width + distance < width ? lane + distance : lane);
}

template <typename T>
T shuffle_index(uint32_t mask, T value, int from, int width = WARP) {
    return shuffle(mask, value, lane_of_now() / width * width + from % width);
}

inline void sync_warp(uint32_t mask = ~0u) { warp_operation(SYNC, mask, 0, lane_of_now()); }

template <typename T>
T* dynamic_shared() {
    return reinterpret_cast<T*>(device.shared.data() + FENCE_BYTES);
}

}  // namespace cuemu

// ---- the names of CUDA ----

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static thread_local
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define threadIdx (cuemu::device.now->index)
#define blockIdx (cuemu::device.block)
#define blockDim (cuemu::device.block_size)
#define gridDim (cuemu::device.grid_size)
#define __syncthreads() cuemu::pause(cuemu::Wait::BLOCK)
#define __syncwarp(...) cuemu::sync_warp(__VA_ARGS__)
#define __shfl_xor_sync(...) cuemu::shuffle_xor(__VA_ARGS__)
#define __shfl_down_sync(...) cuemu::shuffle_down(__VA_ARGS__)
#define __shfl_sync(...) cuemu::shuffle_index(__VA_ARGS__)

template <typename T>
T __ldg(const T* at) {
    return *at;
}

// ---- numbers ----

struct __nv_bfloat16 {
    uint16_t bits;
};

struct __half {
    uint16_t bits;
};

inline int __ffs(int x) { return __builtin_ffs(x); }

// Rounded twice, for without the instruction the exact one takes a hundred times as long.
inline float __fmaf_rn(float x, float y, float z) { return x * y + z; }
inline float __fdividef(float x, float y) { return x / y; }

inline float __uint_as_float(uint32_t bits) {
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }

// To the nearest, ties to even; what is not a number stays so.
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline float __half2float(__half x) {
    _Float16 value;
    std::memcpy(&value, &x, 2);
    return static_cast<float>(value);
}

inline __half __float2half_rn(float x) {
    const _Float16 value = static_cast<_Float16>(x);
    __half result;
    std::memcpy(&result, &value, 2);
    return result;
}

// ---- the runtime ----

using cudaStream_t = void*;
enum { cudaSuccess = 0, cudaErrorInvalidValue = cuemu::INVALID_VALUE, cudaErrorMisalignedAddress = 716 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

template <typename F>
int cudaFuncSetAttribute(F*, cudaFuncAttribute, int bytes) {
    if (static_cast<std::size_t>(bytes) > cuemu::SHARED_BYTES_MOST) return cuemu::INVALID_VALUE;
    cuemu::device.shared_bytes_allowed = static_cast<std::size_t>(bytes);
    return 0;
}

inline int cudaGetLastError() { return std::exchange(cuemu::device.error, 0); }

// ---- for the test that loads the library ----

extern "C" {
__attribute__((used)) void cuemu_set_order(int order) { cuemu::device.order = order; }
__attribute__((used)) const char* cuemu_message() { return cuemu::device.message.c_str(); }
}
