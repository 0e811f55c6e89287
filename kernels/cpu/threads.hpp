// A job of many pieces, shared out over the caller's threads. Which thread takes a piece changes no bit of the result.
// The caller hands in GOMP_parallel of the OpenMP runtime that it uses itself: no second pool comes into the process.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "lanes.hpp"

namespace {

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

// Room where none is needed.
struct Nothing {};

// PIECE does one piece of the call, with room of its own for each thread.
template <class Call, class Room, void (*PIECE)(const Call&, int64_t, Room&)>
struct Work {
    const Call* call;
    int64_t pieces;
    std::atomic<int64_t> next{0};
    std::atomic<int> code{0};

    APART static void run(void* self) {
        Work& work = *static_cast<Work*>(self);
        // Room to move the start to a multiple of 64: aligned_alloc does not exist everywhere.
        void* const memory = std::malloc(sizeof(Room) + 64);
        Room* room = reinterpret_cast<Room*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
        if (memory == nullptr) {
            work.code = 2;
            return;
        }
        for (int64_t piece = work.next++; piece < work.pieces; piece = work.next++) PIECE(*work.call, piece, *room);
        std::free(memory);
    }

    static int start(const Call& call, int64_t pieces, int64_t num_threads, Parallel parallel) {
        Work work;
        work.call = &call;
        work.pieces = pieces;
        if (num_threads > pieces) num_threads = pieces;
        if (parallel == nullptr || num_threads <= 1) run(&work);
        else parallel(run, &work, static_cast<unsigned>(num_threads), 0);
        return work.code;
    }
};

}  // namespace
