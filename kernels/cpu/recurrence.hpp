// What all recurrences share: the chunk, the resets, the names of the functions for each head size.

#pragma once

#include <cstdint>

namespace {

// Tokens between two saved states; given by the build, which also sizes the memory for them.
constexpr int64_t CHUNK = CHUNK_LENGTH;

inline bool resets(const uint8_t* starts, int64_t t) { return starts != nullptr && starts[t] != 0; }

}  // namespace

// HEAD_SIZE is given by the build, which compiles an operator once for each size: the objects build side by side.
#define JOIN_(name, size) name##_##size
#define JOIN(name, size) JOIN_(name, size)
