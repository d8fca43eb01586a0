// Jobs of the kernels' threads whose pieces take any time: each item has to be worked on once, and to be told as done once, later and
// by the same thread. Built and run by test_native_pool.py; POOL names pool.h.

#include POOL

#include <chrono>
#include <cstdio>

namespace {

struct Item {
    std::atomic<int> worked{0}, told{0};
    std::atomic<int64_t> by{-1};
};

struct Job {
    std::vector<Item>& items;
    int64_t seed;

    void operator()(int64_t begin, int64_t end, int64_t id) const {
        for (int64_t i = begin; i < end; i++) {
            items[i].worked++;
            items[i].by = id;
            const int64_t some = (i * 7919 + seed * 104729) % 40;
            std::this_thread::sleep_for(std::chrono::microseconds(i ? some : 3000));  // the others share the rest of the first run
        }
        me = id;
    }
    void done(int64_t begin, int64_t end) const {
        for (int64_t i = begin; i < end; i++) items[i].told += items[i].worked == 1 && items[i].by == me ? 1 : 1000;
    }
    static thread_local int64_t me;
};

thread_local int64_t Job::me = -1;

}  // namespace

int main() {
    const int64_t threads = 5;
    pool().resize(threads);
    for (int64_t seed = 0; seed < 100; seed++) {
        const int64_t count = 1 + seed * 37 % 300, grain = 1 + seed % 3;
        std::vector<Item> items(count);
        pool().run(count, grain, Job{items, seed});
        for (int64_t i = 0; i < count; i++)
            if (items[i].worked != 1 || items[i].told != 1) {
                std::printf("job %lld, item %lld of %lld: worked on %d times, told %d\n", static_cast<long long>(seed),
                            static_cast<long long>(i), static_cast<long long>(count), items[i].worked.load(), items[i].told.load());
                return 1;
            }
    }
}
