#include "copy.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool.h"

namespace kvcairn {
namespace {

// Below this the target may well be read again before it leaves the cache, and no other thread is worth waking.
constexpr std::size_t least_streamed_bytes = std::size_t{1} << 20;
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

// Throws unless 0 <= value and value + nbytes <= room for all of them, in steps of `stride`.
void check_places(const char* what, Span<const std::int64_t> values, std::int64_t stride, std::int64_t nbytes,
                  std::int64_t room) {
    const std::int64_t count = room < nbytes ? 0 : (room - nbytes) / stride + 1;
    for (std::size_t i = 0; i < values.size; ++i) {
        if (values[i] < 0 || values[i] >= count)
            throw std::out_of_range(std::string(what) + " " + std::to_string(values[i]) + " is not below " +
                                    std::to_string(count));
    }
}

// Returns the bytes of all pages.
std::size_t check(const Pages& pages, Span<const std::int64_t> offsets, std::size_t memory_bytes) {
    if (pages.page_bytes <= 0) throw std::invalid_argument("page_bytes must be positive");
    if (pages.stride_bytes < pages.page_bytes) throw std::invalid_argument("stride_bytes must be at least page_bytes");
    if (pages.pool_bytes < 0) throw std::invalid_argument("pool_bytes must not be negative");
    for (std::size_t p = 0; p < pages.bases.size; ++p) {
        if (pages.bases[p] == 0 || pages.bases[p] > UINT64_MAX - static_cast<std::uint64_t>(pages.pool_bytes))
            throw std::invalid_argument("base " + std::to_string(p) + " is no address of a pool");
    }
    check_places("index", pages.indices, pages.stride_bytes, pages.page_bytes, pages.pool_bytes);
    if (pages.indices.size == 0) return 0;
    if (offsets.size == 0 || pages.indices.size % offsets.size != 0)
        throw std::invalid_argument("each block must have the same number of indices");
    std::int64_t block_bytes = 0, total = 0;
    if (__builtin_mul_overflow(pages.indices.size / offsets.size, pages.bases.size, &block_bytes) ||
        __builtin_mul_overflow(block_bytes, pages.page_bytes, &block_bytes) ||
        __builtin_mul_overflow(block_bytes, offsets.size, &total))
        throw std::invalid_argument("the pages are too large");
    check_places("offset", offsets, 1, block_bytes, static_cast<std::int64_t>(memory_bytes));
    return static_cast<std::size_t>(total);
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

// Calls move(page in its pool, page in its block, the pool's page after it) for all pages, in the order of the blocks.
template <typename Move>
void for_pages(const Pages& pages, std::uint64_t memory, Span<const std::int64_t> offsets, unsigned threads, Move move) {
    const std::size_t count = pages.indices.size, pools = pages.bases.size;
    const auto size = static_cast<std::size_t>(pages.page_bytes), stride = static_cast<std::size_t>(pages.stride_bytes);
    if (count == 0 || pools == 0) return;
    const std::size_t rows = count / offsets.size;                                 // indices of one block
    const std::size_t share = std::max<std::size_t>(1, task_bytes / size / pools);  // indices of one task
    run_pieces((count + share - 1) / share, threads, [&](std::size_t piece) {
        const std::size_t begin = piece * share, end = std::min(count, begin + share);
        for (std::size_t i = begin; i < end; ++i) {
            std::uint64_t beside = memory + static_cast<std::uint64_t>(offsets[i / rows]) + i % rows * pools * size;
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

struct Task {
    std::size_t move, begin;
};

std::vector<Task> tasks_of(const Moves& moves) {
    std::vector<Task> tasks;
    for (std::size_t i = 0; i < moves.sizes.size; ++i) {
        const auto size = static_cast<std::size_t>(moves.sizes[i]);
        for (std::size_t begin = 0; begin < size; begin += task_bytes) tasks.push_back({i, begin});
    }
    return tasks;
}

// Returns the pieces of each digest.
std::vector<Moves> grouped(const Moves& moves, Span<const std::int64_t> counts) {
    std::vector<Moves> groups;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < (counts.data != nullptr ? counts.size : moves.sizes.size); ++i) {
        const std::int64_t count = counts.data != nullptr ? counts[i] : 1;
        if (count < 0 || static_cast<std::size_t>(count) > moves.sizes.size - begin)
            throw std::invalid_argument("the counts must add up to the pieces");
        const auto n = static_cast<std::size_t>(count);
        groups.push_back({{moves.targets.data + begin, n}, {moves.sources.data + begin, n}, {moves.sizes.data + begin, n}});
        begin += n;
    }
    if (begin != moves.sizes.size) throw std::invalid_argument("the counts must add up to the pieces");
    return groups;
}

void copy_task(const Moves& moves, const std::vector<Task>& tasks, std::size_t number, StreamCopy copy) {
    const auto [i, begin] = tasks[number];
    const Task next = tasks[number + 1 < tasks.size() ? number + 1 : number];
    const std::size_t n = std::min(task_bytes, static_cast<std::size_t>(moves.sizes[i]) - begin);
    copy_page(at(moves.targets[i]) + begin, at(moves.sources[i]) + begin, n, at(moves.sources[next.move]) + next.begin, copy);
    finish();
}

}  // namespace

void gather(const Pages& pages, const Blocks<std::uint8_t>& blocks, unsigned threads, const Level& level) {
    const Work work = work_for(check(pages, blocks.offsets, blocks.memory.size), threads, level);
    const auto size = static_cast<std::size_t>(pages.page_bytes);
    for_pages(pages, reinterpret_cast<std::uintptr_t>(blocks.memory.data), blocks.offsets, work.threads,
              [&](std::uint64_t page, std::uint64_t beside, std::uint64_t next) {
                  copy_page(at(beside), at(page), size, at(next), work.copy);
              });
}

void scatter(const Pages& pages, const Blocks<const std::uint8_t>& blocks, unsigned threads, const Level& level) {
    const Work work = work_for(check(pages, blocks.offsets, blocks.memory.size), threads, level);
    const auto size = static_cast<std::size_t>(pages.page_bytes);
    for_pages(pages, reinterpret_cast<std::uintptr_t>(blocks.memory.data), blocks.offsets, work.threads,
              [&](std::uint64_t page, std::uint64_t beside, std::uint64_t) {
                  copy_page(at(page), at(beside), size, at(beside + size), work.copy);
              });
}

void copy(const Moves& moves, unsigned threads, const Level& level) {
    const Work work = work_for(check(moves), threads, level);
    const std::vector<Task> tasks = tasks_of(moves);
    run_pieces(tasks.size(), work.threads, [&](std::size_t number) { copy_task(moves, tasks, number, work.copy); });
}

void copy_hashed(const Moves& moves, Span<const std::int64_t> counts, std::uint8_t* digests, unsigned threads,
                 const Level& level) {
    const Work work = work_for(check(moves), threads, level);
    const std::vector<Moves> groups = grouped(moves, counts);
    const std::vector<Task> tasks = tasks_of(moves);
    std::vector<std::atomic<bool>> taken(tasks.size());
    const Take take = [](void* flags, std::size_t number) {
        return !static_cast<std::atomic<bool>*>(flags)[number].exchange(true, std::memory_order_relaxed);
    };
    std::vector<std::size_t> first;  // task of each group
    for (std::size_t number = 0, begin = 0, i = 0; i < groups.size(); begin += groups[i++].sizes.size) {
        while (number < tasks.size() && tasks[number].move < begin) ++number;
        first.push_back(number);
    }
    // A thread takes whole groups, since a hash cannot be divided. When there are no more, it copies from the end what
    // the others have still before them, and leaves them only the hashing of it.
    const std::size_t helpers = work.threads - 1;
    run_pieces(groups.size() + helpers, work.threads, [&](std::size_t i) {
        if (i < groups.size()) {
            level.hash(groups[i], work.copy, take, taken.data() + first[i], digests + i * digest_bytes);
        } else {
            for (std::size_t number = tasks.size(); number-- > 0;)
                if (take(taken.data(), number)) copy_task(moves, tasks, number, work.copy);
        }
        finish();
    });
}

void hash(Span<const std::uint8_t> data, std::uint8_t* digest, const Level& level) {
    const std::uint64_t nowhere = 0, source = reinterpret_cast<std::uintptr_t>(data.data);
    const auto size = static_cast<std::int64_t>(data.size);
    level.hash({{&nowhere, 1}, {&source, 1}, {&size, 1}}, plain_copy, nullptr, nullptr, digest);
}

}  // namespace kvcairn
