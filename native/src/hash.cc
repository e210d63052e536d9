// xxh3-128 on the way. Compiled once for each instruction set: KVCAIRN_HASH_NAME is hash_base, hash_avx2, hash_avx512.
// Uses nothing of the standard library that could be inlined: the linker keeps one copy of such a function, and the
// copy it keeps must run on every processor.
#define XXH_INLINE_ALL
#include "xxhash.h"

#include "stream.h"

namespace kvcairn {

namespace {
constexpr std::size_t piece_bytes = 4096;  // small enough to be in the first cache when it is read a second time
}

void KVCAIRN_HASH_NAME(const Moves& moves, StreamCopy copy, Take take, void* context, std::uint8_t* digest) {
    XXH_ALIGN(64) XXH3_state_t state;
    XXH3_128bits_reset(&state);
    for (std::size_t i = 0, task = 0; i < moves.sizes.size; ++i) {
        const std::size_t n = static_cast<std::size_t>(moves.sizes.data[i]);
        auto* const to = reinterpret_cast<std::uint8_t*>(moves.targets.data[i]);
        auto* const from = reinterpret_cast<const std::uint8_t*>(moves.sources.data[i]);
        for (std::size_t at = 0; at < n; ++task) {
            const std::size_t end = n - at < task_bytes ? n : at + task_bytes;
            const bool is_ours = take != nullptr && take(context, task);
            // The first piece is a little shorter, so that the others begin with a whole line of the target.
            std::size_t size = piece_bytes - (reinterpret_cast<std::uintptr_t>(to) + at) % 64;
            for (; at < end; at += size, size = piece_bytes) {
                if (size > end - at) size = end - at;
                XXH3_128bits_update(&state, from + at, size);
                if (is_ours) copy(to + at, from + at, size, from + at + size);
            }
        }
    }
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state));
    for (std::size_t i = 0; i < sizeof canonical.digest; ++i) digest[i] = canonical.digest[i];
}

}  // namespace kvcairn
