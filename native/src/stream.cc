#include "stream.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvcairn {

// hash.cc is compiled once for each of these.
#define KVCAIRN_HASH(level) void hash_##level(const Moves&, StreamCopy, Take, void*, std::uint8_t*)
KVCAIRN_HASH(base);
#if defined(__x86_64__)
KVCAIRN_HASH(avx2);
KVCAIRN_HASH(avx512);
#endif

namespace {

constexpr std::size_t line_bytes = 64;
constexpr std::size_t least_streamed_bytes = 4 * line_bytes;  // below it the ends cost more than the middle saves

// Copies what stands before the first whole line of `to`, then whole lines by `lines`, then the rest. A line is
// written whole or by ordinary stores: a non-temporal store of a part of a line would read it first.
template <typename Lines>
inline void by_lines(std::uint8_t* to, const std::uint8_t* from, std::size_t n, Lines lines) {
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % line_bytes;
    if (n < least_streamed_bytes + head) {
        std::memcpy(to, from, n);
        return;
    }
    std::memcpy(to, from, head);
    const std::size_t middle = (n - head) / line_bytes * line_bytes;
    lines(head, head + middle);
    std::memcpy(to + head + middle, from + head + middle, n - head - middle);
}

#if defined(__x86_64__)

__attribute__((target("sse2"))) void stream_sse2(std::uint8_t* to, const std::uint8_t* from, std::size_t n,
                                                 const std::uint8_t* ahead) {
    by_lines(to, from, n, [=](std::size_t begin, std::size_t end) __attribute__((target("sse2"))) {
        for (std::size_t at = begin; at < end; at += line_bytes) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead + at), _MM_HINT_T0);
            auto* in = reinterpret_cast<const __m128i*>(from + at);
            auto* out = reinterpret_cast<__m128i*>(to + at);
            const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
            const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
            _mm_stream_si128(out, a);
            _mm_stream_si128(out + 1, b);
            _mm_stream_si128(out + 2, c);
            _mm_stream_si128(out + 3, d);
        }
    });
}

__attribute__((target("avx2"))) void stream_avx2(std::uint8_t* to, const std::uint8_t* from, std::size_t n,
                                                 const std::uint8_t* ahead) {
    by_lines(to, from, n, [=](std::size_t begin, std::size_t end) __attribute__((target("avx2"))) {
        for (std::size_t at = begin; at < end; at += line_bytes) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead + at), _MM_HINT_T0);
            auto* in = reinterpret_cast<const __m256i*>(from + at);
            auto* out = reinterpret_cast<__m256i*>(to + at);
            const __m256i a = _mm256_loadu_si256(in), b = _mm256_loadu_si256(in + 1);
            _mm256_stream_si256(out, a);
            _mm256_stream_si256(out + 1, b);
        }
    });
}

__attribute__((target("avx512f"))) void stream_avx512(std::uint8_t* to, const std::uint8_t* from, std::size_t n,
                                                      const std::uint8_t* ahead) {
    by_lines(to, from, n, [=](std::size_t begin, std::size_t end) __attribute__((target("avx512f"))) {
        for (std::size_t at = begin; at < end; at += line_bytes) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead + at), _MM_HINT_T0);
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
        }
    });
}

#elif defined(__aarch64__)

void stream_neon(std::uint8_t* to, const std::uint8_t* from, std::size_t n, const std::uint8_t* ahead) {
    by_lines(to, from, n, [=](std::size_t begin, std::size_t end) {
        for (std::size_t at = begin; at < end; at += line_bytes) {
            __builtin_prefetch(ahead + at);
            const uint8x16x4_t line = vld1q_u8_x4(from + at);
            vst1q_u8_x4(to + at, line);
        }
    });
}

#endif

std::vector<Level> find_levels() {
    std::vector<Level> found = {{"plain", plain_copy, hash_base}};
#if defined(__x86_64__)
    found.push_back({"sse2", stream_sse2, hash_base});
    if (__builtin_cpu_supports("avx2")) found.push_back({"avx2", stream_avx2, hash_avx2});
    if (__builtin_cpu_supports("avx512f")) found.push_back({"avx512", stream_avx512, hash_avx512});
#elif defined(__aarch64__)
    found.push_back({"neon", stream_neon, hash_base});
#endif
    return found;
}

}  // namespace

const std::vector<Level>& levels() {
    static const std::vector<Level> found = find_levels();
    return found;
}

const Level& best_level() { return levels().back(); }

void plain_copy(std::uint8_t* to, const std::uint8_t* from, std::size_t n, const std::uint8_t*) {
    std::memcpy(to, from, n);
}

void finish() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace kvcairn
