// Threads for the kernels. OpenMP's own put themselves to sleep between any two loops as soon as a second thread of the
// process has used it (torch does), which costs more than the loops; and when the machine is busy they wait for a fixed share of
// the work. These spin for a moment, sleep when there is nothing to do, and take the work piece by piece.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
inline void relax() { asm volatile("isb"); }  // waits some tens of cycles; "yield" does nothing on most of these
#else
inline void relax() { std::this_thread::yield(); }
#endif

constexpr int LINE = 64;  // bytes of a line of the caches, on most processors

// Ask memory for a line. Without the empty instruction GCC takes a function that does nothing else for one that does nothing.
inline void soon(const void* q) {
    __builtin_prefetch(q);
    asm volatile("");
}

class Pool {
  public:
    ~Pool() { resize(1); }

    int64_t size() const { return static_cast<int64_t>(workers_.size()) + 1; }

    // Threads that share the work, the calling one included.
    void resize(int64_t threads) {
        if (threads == size()) return;
        stop_ = true;
        announce();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
        stop_ = false;
        runs_ = std::vector<Run>(threads);
        const uint32_t now = generation_;
        for (int64_t id = 1; id < threads; id++) workers_.emplace_back([this, id, now] { serve(id, now); });
    }

    // Memory that the job after the next one will read: to ask for it is no access, so it may be gone by then.
    struct Ahead {
        struct Range {
            const char* begin;
            int64_t first, rest;  // bytes that the workers read; then those that all threads do, each a run
        };
        static constexpr int MOST = 4;
        int count = 0;
        Range ranges[MOST];
    };

    // work(begin, end, thread) over [0, count); returns when all is done. Each thread has a run of its own, which it takes in pieces
    // that become smaller towards the end, of at least `grain`: what it asks memory for beyond a piece is its next piece. Who is done
    // takes from the ends of the others' runs. Where work has a `done`, a thread calls it when it leaves a run, for what it has done of
    // that. Threads that wait ask for what lies ahead; a job without `ahead` changes nothing about that.
    template <class Work>
    void run(int64_t count, int64_t grain, const Work& work, const Ahead* ahead = nullptr) {
        if (workers_.empty() || count <= grain) {
            if (count > 0) {
                work(int64_t{0}, count, int64_t{0});
                if constexpr (HasDone<Work>::value) work.done(int64_t{0}, count);
            }
            return;
        }
        grain_ = grain;
        work_ = &work;
        has_ahead_ = ahead != nullptr;
        if (ahead) {
            ahead_.count = ahead->count;
            for (int i = 0; i < ahead->count; i++) ahead_.ranges[i] = ahead->ranges[i];
            own_.take(*ahead, 0, size());
        }
        call_ = [](const void* erased, int64_t begin, int64_t end, int64_t id) { (*static_cast<const Work*>(erased))(begin, end, id); };
        done_ = nullptr;
        if constexpr (HasDone<Work>::value)
            done_ = [](const void* erased, int64_t begin, int64_t end) { static_cast<const Work*>(erased)->done(begin, end); };
        const int64_t threads = size();
        for (int64_t id = 0; id < threads; id++)
            runs_[id].left.store(pair(id * count / threads, (id + 1) * count / threads), std::memory_order_relaxed);
        door_.store(OPEN);
        announce();
        take(0);
        door_.fetch_sub(OPEN);  // who has not come by now, because it sleeps, is not waited for
        for (int64_t spins = 0; door_.load(std::memory_order_acquire) > 0; spins++) {
            own_.ask();
            if (spins < PATIENCE) relax();
            else std::this_thread::yield();  // a worker has lost its core to somebody
        }
    }

  private:
    static constexpr int PATIENCE = 60000;  // turns of a waiting loop, about a millisecond
    static constexpr int BURST = 8;  // lines to ask for at a time: of many at once a processor forgets those that it has no place for
    static constexpr int64_t OPEN = int64_t{1} << 32;

    void announce() {
        generation_.fetch_add(1);
        if (asleep_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
    }

    // What a thread asks memory for while it waits: its part of what the next job will read, then of the one after it.
    class Asking {
      public:
        void take(const Ahead& ahead, int64_t id, int64_t threads) {
            next_ = then_;
            then_ = {};
            for (int i = 0; i < ahead.count; i++) {
                const Ahead::Range& range = ahead.ranges[i];
                const char* rest = range.begin + range.first;
                if (id) then_.add(range.begin + (id - 1) * range.first / (threads - 1), range.begin + id * range.first / (threads - 1));
                then_.add(rest + id * range.rest / threads, rest + (id + 1) * range.rest / threads);
            }
        }

        void ask() {
            if (!next_.ask()) then_.ask();
        }

      private:
        struct Job {
            struct Run {
                const char *at, *end;
            } runs[2 * Ahead::MOST];
            int count = 0, now = 0;

            void add(const char* begin, const char* end) { runs[count++] = {begin, end}; }

            bool ask() {
                if (now == count) return false;
                Run& run = runs[now];
                for (int line = 0; line < BURST && run.at < run.end; line++, run.at += LINE) soon(run.at);
                if (run.at >= run.end) now++;
                return true;
            }
        } next_, then_;
    };

    void serve(int64_t id, uint32_t seen) {
        Asking asking;
        for (;;) {
            seen = await(seen, asking);
            if (stop_) return;
            if (!enter()) continue;
            take(id);
            if (has_ahead_) asking.take(ahead_, id, size());
            door_.fetch_sub(1, std::memory_order_release);
        }
    }

    // Whether the job that was announced is still open; then it does not end before this worker has left it.
    bool enter() {
        int64_t inside = door_.load();
        while (inside >= OPEN)
            if (door_.compare_exchange_weak(inside, inside + 1)) return true;
        return false;
    }

    // The newest generation, once it is another than `seen`.
    uint32_t await(uint32_t seen, Asking& asking) {
        for (int spins = 0; spins < PATIENCE; spins++) {
            const uint32_t now = generation_.load(std::memory_order_acquire);
            if (now != seen) return now;
            asking.ask();
            relax();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_++;
        wake_.wait(lock, [&] { return generation_.load() != seen; });
        asleep_--;
        return generation_.load();
    }

    void take(int64_t id) {
        for (int64_t n = 0, threads = size(); n < threads; n++) {
            Run& run = runs_[(id + n) % threads];
            uint64_t left = run.left.load(std::memory_order_relaxed);
            int64_t first = 0, last = 0;  // what this thread has done of the run: pieces that lie side by side
            const auto done = [&] {
                if (done_ && first < last) done_(work_, first, last);
            };
            for (;;) {
                const int64_t begin = static_cast<int64_t>(left >> 32), end = static_cast<int64_t>(left & UINT32_MAX);
                if (begin >= end) break;
                const int64_t most = end - begin, half = (most + 1) / 2, some = half > grain_ ? half : most < grain_ ? most : grain_;
                const int64_t from = n ? end - some : begin;  // of another's run the end
                const uint64_t then = n ? pair(begin, from) : pair(begin + some, end);
                if (!run.left.compare_exchange_weak(left, then, std::memory_order_relaxed)) continue;
                call_(work_, from, from + some, id);
                if (from + some == first) first = from;
                else {
                    if (from != last) {  // another thread has taken what lies between
                        done();
                        first = from;
                    }
                    last = from + some;
                }
                left = run.left.load(std::memory_order_relaxed);
            }
            done();
        }
    }

    template <class Work, class = void>  // has it a `done`?
    struct HasDone : std::false_type {};
    template <class Work>
    struct HasDone<Work, std::void_t<decltype(&Work::done)>> : std::true_type {};

    // What is left of the run of a thread, in one number; on a line of its own.
    struct alignas(LINE) Run {
        std::atomic<uint64_t> left{0};
    };
    static uint64_t pair(int64_t begin, int64_t end) { return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end); }

    std::vector<std::thread> workers_;
    std::atomic<uint32_t> generation_{0};  // of jobs
    std::vector<Run> runs_ = std::vector<Run>(1);
    std::atomic<int64_t> door_{0};  // workers inside a job, and OPEN while it has something to give
    std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    alignas(LINE) int64_t grain_ = 1;  // of the job, and what follows
    const void* work_ = nullptr;
    void (*call_)(const void*, int64_t, int64_t, int64_t) = nullptr;
    void (*done_)(const void*, int64_t, int64_t) = nullptr;
    bool has_ahead_ = false;
    Ahead ahead_;
    alignas(LINE) Asking own_;  // of the calling thread
};

// One for each thread that calls the kernels: two engines do not wait for each other.
inline Pool& pool() {
    static thread_local Pool own;
    return own;
}
