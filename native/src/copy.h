// Moves bytes between pages that lie anywhere and blocks in one piece. Knows no Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stream.h"

namespace kvcairn {

constexpr std::size_t digest_bytes = 16;

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

// The four check everything first and throw std::invalid_argument, or std::out_of_range for an index or an offset,
// before the first byte moves. Ranges that are written overlap nothing else.
void gather(const Pages& pages, const Blocks<std::uint8_t>& blocks, unsigned threads, const Level& level = best_level());
void scatter(const Pages& pages, const Blocks<const std::uint8_t>& blocks, unsigned threads,
             const Level& level = best_level());
void copy(const Moves& moves, unsigned threads, const Level& level = best_level());

// `digests` has digest_bytes for each of `counts`: the xxh3-128 of so many pieces, one behind the other, counted from
// the first on. They are hashed by one thread, copied by all. Without memory `counts` is 1 for each piece.
void copy_hashed(const Moves& moves, Span<const std::int64_t> counts, std::uint8_t* digests, unsigned threads,
                 const Level& level = best_level());

void hash(Span<const std::uint8_t> data, std::uint8_t* digest, const Level& level = best_level());

}  // namespace kvcairn
