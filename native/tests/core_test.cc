// Tests of the core without Python, for the sanitizers. Prints the first thing that is wrong, and its line.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "copy.h"
#include "pool.h"

#define CHECK(condition)                                                                  \
    if (!(condition)) {                                                                   \
        std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);    \
        std::exit(1);                                                                     \
    }

using Bytes = std::vector<std::uint8_t>;
using kvcairn::Level;

namespace {

std::mt19937_64 random_number(20261201);

std::uint64_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

Bytes random_bytes(std::size_t n) {
    Bytes bytes(n);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random_number());
    return bytes;
}

// Every end and offset that differs: neither a byte too few is written nor one too many.
void every_level_copies_at_any_alignment(const Level& level) {
    const Bytes from = random_bytes(1200);
    for (std::size_t n : {0, 1, 63, 64, 65, 255, 256, 257, 319, 320, 321, 1000}) {
        for (std::size_t shift = 0; shift < 130; shift += 13) {
            Bytes to(1400, 0xEE), wanted = to;
            std::memcpy(wanted.data() + shift, from.data() + shift / 2, n);
            level.stream(to.data() + shift, from.data() + shift / 2, n, from.data());
            kvcairn::finish();
            CHECK(to == wanted);
        }
    }
}

void every_level_has_the_same_checksum(const Level& level) {
    const Bytes data = random_bytes(100'000);
    for (std::size_t n : {0, 1, 16, 128, 240, 241, 1024, 8191, 8192, 8193, 100'000}) {
        std::uint8_t digest[kvcairn::digest_bytes], plain[kvcairn::digest_bytes];
        Bytes to(n);
        const kvcairn::Take first = [](void*, std::size_t) { return true; };
        const std::uint64_t target = address(to.data()), source = address(data.data());
        const auto size = static_cast<std::int64_t>(n);
        level.hash({{&target, 1}, {&source, 1}, {&size, 1}}, level.stream, first, nullptr, digest);
        kvcairn::hash({data.data(), n}, plain, kvcairn::levels().front());
        CHECK(std::memcmp(digest, plain, sizeof digest) == 0);
        CHECK(std::equal(to.begin(), to.end(), data.begin()));
    }
}

// What xxHash itself gives for no bytes, in its canonical form.
void the_checksum_is_xxh3_128() {
    const std::uint8_t empty[] = {0x99, 0xaa, 0x06, 0xd3, 0x01, 0x47, 0x98, 0xd8,
                                  0x60, 0x01, 0xc3, 0x24, 0x46, 0x8d, 0x49, 0x7f};
    std::uint8_t digest[kvcairn::digest_bytes];
    kvcairn::hash({nullptr, 0}, digest);
    CHECK(std::memcmp(digest, empty, sizeof empty) == 0);
}

void pages_go_out_and_back(const Level& level, std::size_t page_bytes, unsigned threads) {
    const std::size_t count = std::max<std::size_t>(4, (3 << 20) / page_bytes / 4 * 2), stride = page_bytes + 24;
    const Bytes first = random_bytes(count * stride), second = random_bytes(count * stride);
    std::vector<std::int64_t> indices(count);
    std::iota(indices.begin(), indices.end(), 0);
    std::shuffle(indices.begin(), indices.end(), random_number);
    const std::uint64_t bases[] = {address(first.data()), address(second.data())};
    const auto sized = [&](const std::uint64_t* from) {
        return kvcairn::Pages{{from, 2}, static_cast<std::int64_t>(count * stride), {indices.data(), count},
                              static_cast<std::int64_t>(stride), static_cast<std::int64_t>(page_bytes)};
    };
    // Two blocks, the first behind the second, with a byte between them.
    const std::size_t half = count / 2 * 2 * page_bytes;
    const std::int64_t offsets[] = {static_cast<std::int64_t>(half) + 1, 0};
    Bytes block(2 * half + 2), back1(count * stride), back2(count * stride);
    kvcairn::gather(sized(bases), {{block.data() + 1, 2 * half + 1}, {offsets, 2}}, threads, level);
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t at = static_cast<std::size_t>(indices[i]) * stride;
        const std::uint8_t* const row = &block[1 + (i < count / 2 ? half + 1 + i * 2 * page_bytes
                                                                  : (i - count / 2) * 2 * page_bytes)];
        CHECK(std::memcmp(row, &first[at], page_bytes) == 0);
        CHECK(std::memcmp(row + page_bytes, &second[at], page_bytes) == 0);
    }
    const std::uint64_t targets[] = {address(back1.data()), address(back2.data())};
    kvcairn::scatter(sized(targets), {{block.data() + 1, 2 * half + 1}, {offsets, 2}}, threads, level);
    for (std::size_t at = 0; at < count * stride; ++at) {
        const bool is_page = at % stride < page_bytes;
        CHECK(back1[at] == (is_page ? first[at] : 0) && back2[at] == (is_page ? second[at] : 0));
    }
}

template <typename Error, typename Act>
bool throws(Act act) {
    try {
        act();
    } catch (const Error&) {
        return true;
    }
    return false;
}

void a_bad_place_moves_nothing() {
    const Bytes pool = random_bytes(4096);
    Bytes block(2 * 100);
    const std::uint64_t base = address(pool.data());
    const auto refuses = [&](std::int64_t index, std::int64_t offset) {
        const std::int64_t indices[] = {0, index}, offsets[] = {100, offset};
        const kvcairn::Pages pages{{&base, 1}, 4096, {indices, 2}, 100, 100};
        return throws<std::out_of_range>([&] { kvcairn::gather(pages, {{block.data(), 200}, {offsets, 2}}, 1); }) &&
               throws<std::out_of_range>([&] { kvcairn::scatter(pages, {{block.data(), 200}, {offsets, 2}}, 1); });
    };
    for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{40}, INT64_MAX, INT64_MIN}) CHECK(refuses(bad, 0));
    for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{101}, INT64_MAX, INT64_MIN}) CHECK(refuses(1, bad));
    CHECK(block == Bytes(2 * 100));
    const std::int64_t last[] = {39, 0}, offset = 0;
    const kvcairn::Pages pages{{&base, 1}, 4096, {last, 2}, 100, 100};
    CHECK(throws<std::out_of_range>([&] { kvcairn::gather(pages, {{block.data(), 199}, {&offset, 1}}, 1); }));
    CHECK(throws<std::invalid_argument>([&] { kvcairn::gather(pages, {{block.data(), 200}, {&offset, 0}}, 1); }));
    kvcairn::gather(pages, {{block.data(), block.size()}, {&offset, 1}}, 1);
    CHECK(std::memcmp(block.data(), &pool[3900], 100) == 0);
}

// Several callers at once, each with helpers; in a child of a fork too.
void callers_do_not_mix() {
    const auto call = [](std::uint8_t seed) {
        const std::size_t n = 3 << 20;
        const Bytes from(n, seed);
        Bytes to(n);
        std::uint8_t digests[2 * kvcairn::digest_bytes], whole[kvcairn::digest_bytes];
        const std::uint64_t sources[] = {address(from.data()), address(from.data())};
        const std::uint64_t targets[] = {address(to.data()), address(to.data() + n / 2)};
        const std::int64_t sizes[] = {n / 2, n / 2};
        const kvcairn::Moves moves{{targets, 2}, {sources, 2}, {sizes, 2}};
        for (int round = 0; round < 10; ++round) {
            kvcairn::copy(moves, 3);
            CHECK(to == from);
            to.assign(n, 0);
            kvcairn::copy_hashed(moves, {nullptr, 0}, digests, 2);
            CHECK(to == from);
            kvcairn::hash({from.data(), n / 2}, whole);
            CHECK(std::memcmp(digests + kvcairn::digest_bytes, whole, sizeof whole) == 0);
            to.assign(n, 0);  // both pieces in one digest
            const std::int64_t both = 2;
            const std::uint64_t halves[] = {address(from.data()), address(from.data() + n / 2)};
            kvcairn::copy_hashed({{targets, 2}, {halves, 2}, {sizes, 2}}, {&both, 1}, digests, 3);
            CHECK(to == from);
            kvcairn::hash({from.data(), from.size()}, whole);
            CHECK(std::memcmp(digests, whole, sizeof whole) == 0);
            to.assign(n, 0);  // one piece and three threads: two only copy
            const std::int64_t all = n;
            kvcairn::copy_hashed({{targets, 1}, {sources, 1}, {&all, 1}}, {nullptr, 0}, digests, 3);
            CHECK(to == from);
            kvcairn::hash({from.data(), from.size()}, whole);
            CHECK(std::memcmp(digests, whole, sizeof whole) == 0);
        }
    };
    std::vector<std::thread> callers;
    for (std::uint8_t seed = 1; seed <= 4; ++seed) callers.emplace_back(call, seed);
    for (auto& caller : callers) caller.join();
    const pid_t child = fork();
    if (child == 0) {
        call(9);
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

}  // namespace

int main() {
    the_checksum_is_xxh3_128();
    a_bad_place_moves_nothing();
    for (const Level& level : kvcairn::levels()) {
        every_level_copies_at_any_alignment(level);
        every_level_has_the_same_checksum(level);
        for (const std::size_t page_bytes : {96, 4096, 4100, 70'000, 1 << 20}) {
            pages_go_out_and_back(level, page_bytes, 1);
            pages_go_out_and_back(level, page_bytes, 3);
        }
    }
    callers_do_not_mix();
    std::printf("core_test: all good, up to %s\n", kvcairn::best_level().name);
}
