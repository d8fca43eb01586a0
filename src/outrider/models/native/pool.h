// Threads for the kernels. OpenMP's own put themselves to sleep between any two loops as soon as a second thread of the
// process has used it (torch does), which costs more than the loops; and when the machine is busy they wait for a fixed share of
// the work. These spin for a moment, sleep when there is nothing to do, and take the work piece by piece.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
inline void relax() { asm volatile("isb"); }  // waits some tens of cycles; "yield" does nothing on most of these
#else
inline void relax() { std::this_thread::yield(); }
#endif

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
        const uint32_t now = generation_;
        for (int64_t id = 1; id < threads; id++) workers_.emplace_back([this, id, now] { serve(id, now); });
    }

    // work(begin, end, thread) over [0, count), in pieces that become smaller towards the end, of at least `grain`; returns
    // when all is done.
    template <class Work>
    void run(int64_t count, int64_t grain, const Work& work) {
        if (workers_.empty() || count <= grain) {
            if (count > 0) work(int64_t{0}, count, int64_t{0});
            return;
        }
        count_ = count;
        grain_ = grain;
        work_ = &work;
        call_ = [](const void* erased, int64_t begin, int64_t end, int64_t id) { (*static_cast<const Work*>(erased))(begin, end, id); };
        next_.store(0, std::memory_order_relaxed);
        door_.store(OPEN);
        announce();
        take(0);
        door_.fetch_sub(OPEN);  // who has not come by now, because it sleeps, is not waited for
        for (int spins = 0; door_.load(std::memory_order_acquire) > 0; spins++)
            if (spins < PATIENCE) relax();
            else std::this_thread::yield();  // a worker has lost its core to somebody
    }

  private:
    static constexpr int PATIENCE = 60000;  // turns of a waiting loop, about a millisecond
    static constexpr int64_t OPEN = int64_t{1} << 32;

    void announce() {
        generation_.fetch_add(1);
        if (asleep_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
    }

    void serve(int64_t id, uint32_t seen) {
        for (;;) {
            seen = await(seen);
            if (stop_) return;
            if (!enter()) continue;
            take(id);
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
    uint32_t await(uint32_t seen) {
        for (int spins = 0; spins < PATIENCE; spins++) {
            const uint32_t now = generation_.load(std::memory_order_acquire);
            if (now != seen) return now;
            relax();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_++;
        wake_.wait(lock, [&] { return generation_.load() != seen; });
        asleep_--;
        return generation_.load();
    }

    void take(int64_t id) {
        int64_t begin = next_.load(std::memory_order_relaxed);
        while (begin < count_) {
            const int64_t share = (count_ - begin) / (2 * size()), end = begin + (share > grain_ ? share : grain_);
            if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
            call_(work_, begin, end < count_ ? end : count_, id);
            begin = next_.load(std::memory_order_relaxed);
        }
    }

    std::vector<std::thread> workers_;
    std::atomic<uint32_t> generation_{0};  // of jobs
    std::atomic<int64_t> next_{0};
    std::atomic<int64_t> door_{0};  // workers inside a job, and OPEN while it has something to give
    std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    int64_t count_ = 0, grain_ = 1;
    const void* work_ = nullptr;
    void (*call_)(const void*, int64_t, int64_t, int64_t) = nullptr;
};

// One for each thread that calls the kernels: two engines do not wait for each other.
inline Pool& pool() {
    static thread_local Pool own;
    return own;
}
