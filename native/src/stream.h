// Copies that pass the processor's caches by, in the widest instructions that this processor has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcairn {

// An array of somebody else.
template <typename T>
struct Span {
    T* data;
    std::size_t size;
    T& operator[](std::size_t i) const { return data[i]; }
};

// Pieces of memory: sizes[i] bytes from sources[i] to targets[i].
struct Moves {
    Span<const std::uint64_t> targets;
    Span<const std::uint64_t> sources;
    Span<const std::int64_t> sizes;
};

// Copies n bytes of any alignment; the ranges do not overlap. Meanwhile asks for the n bytes at `ahead`, which is any
// address: a request for memory that is not there is passed over. `finish` makes the bytes visible to other threads.
using StreamCopy = void (*)(std::uint8_t* to, const std::uint8_t* from, std::size_t n, const std::uint8_t* ahead);

constexpr std::size_t task_bytes = std::size_t{1} << 18;  // what a thread takes at a time

// Whether the caller is the first to ask for task `number` of what `context` stands for.
using Take = bool (*)(void* context, std::size_t number);

// Digest of all pieces, one behind the other, as 16 bytes, most significant first. Copies those tasks of them on the
// way that it gets by `take`, with `copy`; none where `take` is null. Each piece begins with a task of its own.
using HashCopy = void (*)(const Moves& moves, StreamCopy copy, Take take, void* context, std::uint8_t* digest);

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
