// Copies that pass the processor's caches by, in the widest instructions that this processor has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcairn {

// Copies n bytes of any alignment; the ranges do not overlap. Meanwhile asks for the n bytes at `ahead`, which is any
// address: a request for memory that is not there is passed over. `finish` makes the bytes visible to other threads.
using StreamCopy = void (*)(std::uint8_t* to, const std::uint8_t* from, std::size_t n, const std::uint8_t* ahead);

constexpr std::size_t task_bytes = std::size_t{1} << 18;  // what a thread takes at a time

// Whether the caller is the first to ask for task `number` of what `context` stands for.
using Take = bool (*)(void* context, std::size_t number);

// Digest of n bytes as 16 bytes, most significant first. Copies those tasks of them to `to` on the way that it gets
// by `take`, with `copy`; none where `take` is null.
using HashCopy = void (*)(std::uint8_t* to, const std::uint8_t* from, std::size_t n, StreamCopy copy, Take take,
                          void* context, std::uint8_t* digest);

struct Level {
    const char* name;
    StreamCopy stream;
    HashCopy hash;
};

// What this processor can run, plainest first. The first is plain memcpy.
const std::vector<Level>& levels();

// The last of `levels`.
const Level& best_level();

// Plain memcpy, for copies whose bytes will be read again at once.
void plain_copy(std::uint8_t* to, const std::uint8_t* from, std::size_t n, const std::uint8_t* ahead);

// Orders non-temporal stores of this thread before whatever it stores next.
void finish();

}  // namespace kvcairn
