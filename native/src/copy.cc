#include "copy.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool.h"

namespace kvcairn {
namespace {

// Below this the target may well be read again before it leaves the cache, and no other thread is worth waking.
constexpr std::size_t least_streamed_bytes = std::size_t{1} << 20;
constexpr std::size_t task_bytes = std::size_t{1} << 18;  // what a thread takes at a time
constexpr std::size_t ahead_bytes = 4096;

std::uint8_t* at(std::uint64_t address) { return reinterpret_cast<std::uint8_t*>(static_cast<std::uintptr_t>(address)); }

// Copies one page. Memory is asked for `ahead_bytes` ahead, past the end of the page in the next one: the processor's
// own prefetching ends with each 4 KiB.
void copy_page(std::uint8_t* to, const std::uint8_t* from, std::size_t n, const std::uint8_t* next, StreamCopy copy) {
    const std::size_t first = n > ahead_bytes ? n - ahead_bytes : 0;
    if (first > 0) copy(to, from, first, from + ahead_bytes);
    copy(to + first, from + first, n - first, next);
}

struct Work {
    StreamCopy copy;
    unsigned threads;
};

Work work_for(std::size_t nbytes, unsigned threads, const Level& level) {
    if (nbytes < least_streamed_bytes) return {plain_copy, 1};
    return {level.stream, std::max(threads, 1U)};
}

// Returns the bytes of all pages.
std::size_t check(const Pages& pages, std::size_t block_bytes) {
    if (pages.page_bytes <= 0) throw std::invalid_argument("page_bytes must be positive");
    if (pages.stride_bytes < pages.page_bytes) throw std::invalid_argument("stride_bytes must be at least page_bytes");
    if (pages.pool_bytes < 0) throw std::invalid_argument("pool_bytes must not be negative");
    std::size_t wanted = 0;
    if (__builtin_mul_overflow(pages.bases.size, pages.indices.size, &wanted) ||
        __builtin_mul_overflow(wanted, static_cast<std::size_t>(pages.page_bytes), &wanted) || wanted != block_bytes)
        throw std::invalid_argument("the block must have page_bytes for each index and base");
    for (std::size_t p = 0; p < pages.bases.size; ++p) {
        if (pages.bases[p] == 0 || pages.bases[p] > UINT64_MAX - static_cast<std::uint64_t>(pages.pool_bytes))
            throw std::invalid_argument("base " + std::to_string(p) + " is no address of a pool");
    }
    const std::int64_t room = pages.pool_bytes - pages.page_bytes;
    const std::int64_t count = room < 0 ? 0 : room / pages.stride_bytes + 1;
    for (std::size_t i = 0; i < pages.indices.size; ++i) {
        if (pages.indices[i] < 0 || pages.indices[i] >= count)
            throw std::out_of_range("index " + std::to_string(pages.indices[i]) + " is outside the " +
                                    std::to_string(count) + " pages of a pool");
    }
    return wanted;
}

std::size_t check(const Moves& moves) {
    if (moves.targets.size != moves.sizes.size || moves.sources.size != moves.sizes.size)
        throw std::invalid_argument("targets, sources and sizes must have one length");
    std::size_t total = 0;
    for (std::size_t i = 0; i < moves.sizes.size; ++i) {
        if (moves.sizes[i] < 0) throw std::invalid_argument("a size is negative");
        const auto size = static_cast<std::uint64_t>(moves.sizes[i]);
        const std::uint64_t lower = std::min(moves.targets[i], moves.sources[i]);
        const std::uint64_t upper = std::max(moves.targets[i], moves.sources[i]);
        if (size > 0 && (lower == 0 || upper > UINT64_MAX - size))
            throw std::invalid_argument("piece " + std::to_string(i) + " has no address");
        if (__builtin_add_overflow(total, size, &total)) throw std::invalid_argument("the sizes are too large");
    }
    return total;
}

// Calls move(page in its pool, page in the block, the pool's page after it) for all pages, in the block's order.
template <typename Move>
void for_pages(const Pages& pages, std::uint64_t block, unsigned threads, Move move) {
    const std::size_t count = pages.indices.size, pools = pages.bases.size;
    const auto size = static_cast<std::size_t>(pages.page_bytes), stride = static_cast<std::size_t>(pages.stride_bytes);
    if (count == 0 || pools == 0) return;
    const std::size_t rows = std::max<std::size_t>(1, task_bytes / size / pools);  // indices of one task
    run_pieces((count + rows - 1) / rows, threads, [&](std::size_t piece) {
        const std::size_t begin = piece * rows, end = std::min(count, begin + rows);
        std::uint64_t beside = block + begin * pools * size;
        for (std::size_t i = begin; i < end; ++i) {
            const std::size_t offset = static_cast<std::size_t>(pages.indices[i]) * stride;
            const std::size_t after = static_cast<std::size_t>(pages.indices[i + 1 < end ? i + 1 : i]) * stride;
            for (std::size_t p = 0; p < pools; ++p, beside += size) {
                const std::uint64_t next = p + 1 < pools ? pages.bases[p + 1] + offset : pages.bases[0] + after;
                move(pages.bases[p] + offset, beside, next);
            }
        }
        finish();
    });
}

}  // namespace

void gather(const Pages& pages, Span<std::uint8_t> block, unsigned threads, const Level& level) {
    const Work work = work_for(check(pages, block.size), threads, level);
    const auto size = static_cast<std::size_t>(pages.page_bytes);
    for_pages(pages, reinterpret_cast<std::uintptr_t>(block.data), work.threads,
              [&](std::uint64_t page, std::uint64_t beside, std::uint64_t next) {
                  copy_page(at(beside), at(page), size, at(next), work.copy);
              });
}

void scatter(const Pages& pages, Span<const std::uint8_t> block, unsigned threads, const Level& level) {
    const Work work = work_for(check(pages, block.size), threads, level);
    const auto size = static_cast<std::size_t>(pages.page_bytes);
    for_pages(pages, reinterpret_cast<std::uintptr_t>(block.data), work.threads,
              [&](std::uint64_t page, std::uint64_t beside, std::uint64_t) {
                  copy_page(at(page), at(beside), size, at(beside + size), work.copy);
              });
}

void copy(const Moves& moves, unsigned threads, const Level& level) {
    const Work work = work_for(check(moves), threads, level);
    struct Piece {
        std::size_t move, begin;
    };
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < moves.sizes.size; ++i) {
        const auto size = static_cast<std::size_t>(moves.sizes[i]);
        for (std::size_t begin = 0; begin < size; begin += task_bytes) pieces.push_back({i, begin});
    }
    run_pieces(pieces.size(), work.threads, [&](std::size_t number) {
        const auto [i, begin] = pieces[number];
        const std::size_t n = std::min(task_bytes, static_cast<std::size_t>(moves.sizes[i]) - begin);
        const std::uint8_t* const from = at(moves.sources[i]) + begin;
        const Piece next = pieces[number + 1 < pieces.size() ? number + 1 : number];
        copy_page(at(moves.targets[i]) + begin, from, n, at(moves.sources[next.move]) + next.begin, work.copy);
        finish();
    });
}

void copy_hashed(const Moves& moves, std::uint8_t* digests, unsigned threads, const Level& level) {
    const Work work = work_for(check(moves), threads, level);
    run_pieces(moves.sizes.size, work.threads, [&](std::size_t i) {
        level.hash(at(moves.targets[i]), at(moves.sources[i]), static_cast<std::size_t>(moves.sizes[i]), work.copy,
                   digests + i * digest_bytes);
        finish();
    });
}

void hash(Span<const std::uint8_t> data, std::uint8_t* digest, const Level& level) {
    level.hash(nullptr, data.data, data.size, plain_copy, digest);
}

}  // namespace kvcairn
