#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace kvcairn {
namespace {

constexpr unsigned most_helpers = 15;

// Lies on the stack of its caller, who leaves only when no helper is in it or could still find it.
struct Job {
    const std::function<void(std::size_t)>& work;
    const std::size_t pieces;
    std::atomic<std::size_t> next{0};
    unsigned helping = 0;  // under the lock of the pool

    void go() {
        for (std::size_t piece = next++; piece < pieces; piece = next++) work(piece);
    }
};

class Pool {
   public:
    void run(Job& job, unsigned helpers) {
        {
            const std::lock_guard guard(lock_);
            start(helpers);
            waiting_.insert(waiting_.end(), std::min(helpers, started_), &job);
        }
        for (unsigned i = 0; i < helpers; ++i) has_work_.notify_one();
        job.go();
        std::unique_lock guard(lock_);
        waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), &job), waiting_.end());
        has_ended_.wait(guard, [&] { return job.helping == 0; });
    }

   private:
    void start(unsigned wanted) {
        try {
            for (; started_ < std::min(wanted, most_helpers); ++started_) std::thread([this] { help(); }).detach();
        } catch (const std::system_error&) {  // no more threads to be had: those that there are do the work
        }
    }

    [[noreturn]] void help() {
        std::unique_lock guard(lock_);
        while (true) {
            has_work_.wait(guard, [&] { return !waiting_.empty(); });
            Job& job = *waiting_.front();
            waiting_.pop_front();
            ++job.helping;
            guard.unlock();
            job.go();
            guard.lock();
            --job.helping;
            has_ended_.notify_all();
        }
    }

    std::mutex lock_;
    std::condition_variable has_work_, has_ended_;
    std::deque<Job*> waiting_;
    unsigned started_ = 0;
};

// Never deleted: its threads may still wait in it when the process ends.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
    static const int at_fork = pthread_atfork(nullptr, nullptr, [] { the_pool = new Pool; });
    static Pool* const first = new Pool;
    static_cast<void>(at_fork);
    Pool* none = nullptr;
    the_pool.compare_exchange_strong(none, first);
    return *the_pool;
}

}  // namespace

void run_pieces(std::size_t pieces, unsigned threads, const std::function<void(std::size_t)>& work) {
    const std::size_t helpers = std::min<std::size_t>(pieces, threads);
    Job job{work, pieces};
    if (helpers <= 1) return job.go();
    pool().run(job, static_cast<unsigned>(helpers) - 1);
}

}  // namespace kvcairn
