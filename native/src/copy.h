// Moves bytes between pages that lie anywhere and blocks in one piece. Knows no Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stream.h"

namespace kvcairn {

constexpr std::size_t digest_bytes = 16;

// An array of somebody else.
template <typename T>
struct Span {
    T* data;
    std::size_t size;
    T& operator[](std::size_t i) const { return data[i]; }
};

// Pages of several pools of one shape: page (i, p) begins at bases[p] + indices[i] * stride_bytes.
struct Pages {
    Span<const std::uint64_t> bases;
    std::int64_t pool_bytes;
    Span<const std::int64_t> indices;
    std::int64_t stride_bytes;
    std::int64_t page_bytes;
};

// Blocks of one size inside one range of memory, which together hold pages one after the other, the pools of an index
// side by side: (offsets, indices / offsets, bases, page_bytes).
template <typename Byte>
struct Blocks {
    Span<Byte> memory;
    Span<const std::int64_t> offsets;
};

// Pieces of memory: sizes[i] bytes from sources[i] to targets[i].
struct Moves {
    Span<const std::uint64_t> targets;
    Span<const std::uint64_t> sources;
    Span<const std::int64_t> sizes;
};

// The four check everything first and throw std::invalid_argument, or std::out_of_range for an index or an offset,
// before the first byte moves. Ranges that are written overlap nothing else.
void gather(const Pages& pages, const Blocks<std::uint8_t>& blocks, unsigned threads, const Level& level = best_level());
void scatter(const Pages& pages, const Blocks<const std::uint8_t>& blocks, unsigned threads,
             const Level& level = best_level());
void copy(const Moves& moves, unsigned threads, const Level& level = best_level());

// `digests` has digest_bytes for each piece: its xxh3-128. A piece is hashed by one thread, copied by all.
void copy_hashed(const Moves& moves, std::uint8_t* digests, unsigned threads, const Level& level = best_level());

void hash(Span<const std::uint8_t> data, std::uint8_t* digest, const Level& level = best_level());

}  // namespace kvcairn
