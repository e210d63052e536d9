// A few threads that help whoever has work in pieces.
#pragma once

#include <cstddef>
#include <functional>

namespace kvcairn {

// Calls work(0) to work(pieces - 1), each once, on the calling thread and up to `threads` - 1 others; returns when all
// have returned. The caller never waits for a thread to begin, so a busy host makes it slower but not stuck. Any number
// of callers at once; `work` does not throw. Threads start when they are first needed and live as long as the process;
// a forked child starts its own.
void run_pieces(std::size_t pieces, unsigned threads, const std::function<void(std::size_t)>& work);

}  // namespace kvcairn
