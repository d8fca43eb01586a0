// Inputs of a product that each thread rounds for itself, and rows of a pass that stay with one thread. A part of kernels.cpp, in
// its namespace.
//
// A line of memory that one core has written reaches another slowly (0.16 us on two cores of a Zen 4), and one that both have
// read is written as slowly: to round a block of 32 inputs takes 14 ns, and took 110 where the threads shared the results.

constexpr int64_t REPEATED = 16;    // rows, times the threads beside the first, up to which every thread rounds all rows itself
constexpr int64_t MOST_CHUNK = 64;  // rows that a thread takes through a layer at a time: what they need stays in the second cache
constexpr int64_t LEAST_CHUNK = 32; // rows from which on widening their weights pays, see many.h: with fewer rows a thread the
                                    // outputs are shared instead

// Memory of one thread for the inputs of a product.
class Own {
  public:
    static Own& of_this_thread() {
        static thread_local Own own;
        return own;
    }

    // Inputs of `rows` rows; what was there before is lost.
    const Activations& inputs(int64_t rows, int64_t size) {
        const size_t blocks = static_cast<size_t>(rows * size / BLOCK);
        if (q_.size() < blocks) q_.resize(blocks);
        if (scale_.size() < blocks) scale_.resize(blocks);
        if (sums_.size() < blocks) sums_.resize(blocks);
        x_ = {q_[0].bytes, scale_.data(), sums_.data()};
        return x_;
    }
    const Activations& inputs() const { return x_; }

    float* row(int64_t size) { return floats(row_, size); }
    float* inner(int64_t size) { return floats(inner_, size); }

    // A number for a job that this thread gives to its workers, who serve no other.
    int64_t next_job() { return ++jobs_; }
    int64_t job = 0;  // the last one whose inputs it has

  private:
    struct alignas(LINE) Block {
        int8_t bytes[2 * BLOCK];
    };

    static float* floats(std::vector<float>& of, int64_t size) {
        if (of.size() < static_cast<size_t>(size)) of.resize(size);
        return of.data();
    }

    std::vector<Block> q_;
    std::vector<float> scale_, row_, inner_;
    std::vector<BlockSums> sums_;
    Activations x_{};
    int64_t jobs_ = 0;
};

// Round rows [0, rows) of what a product reads. row(r, own): the floats of one, which may lie in memory of the thread's own.
template <class Row>
void round_rows(const JoinedMatrices& w, int64_t rows, const Row& row, Own& own) {
    const int64_t size = w.parts[0].inputs;
    const Activations& to = own.inputs(rows, size);
    for (int64_t r = 0; r < rows; r++) quantise_row(row(r, own), size, r, rows, w.activations, to);
}

// All rows of a pass, whose products the threads share by their outputs.
struct SharedRows {
    int64_t first, count;
    const Work* work;
    AdaptedRows* adapted;  // or null
    int64_t layer;

    // y [rows][outputs] = W x (+ add), with what adapters add.
    template <class Row>
    void linear(const JoinedMatrices& w, const Row& row, float* y, const float* add, AdapterField field) const {
        const Added added = {adapted, layer, field};
        if (added.some() || count * (pool().size() - 1) > REPEATED) {
            each([&](int64_t r) { quantise_row(row(r, Own::of_this_thread()), w.parts[0].inputs, r, count, w.activations, work->x); });
            return adapted_product(w, work->x, count, y, add, added);
        }
        const int64_t job = Own::of_this_thread().next_job();
        pool().run(w.outputs / TILE, 1, [&](int64_t begin, int64_t end, int64_t) {
            Own& own = Own::of_this_thread();
            if (own.job != job) round_rows(w, count, row, own);
            own.job = job;
            product_of_tiles(w, own.inputs(), {0, count, count}, begin, end, y, add);
        });
    }

    template <class Each>
    void each(const Each& each) const {
        pool().run(count, SERIAL, [&](int64_t begin, int64_t end, int64_t) {
            for (int64_t r = begin; r < end; r++) each(r);
        });
    }

    float* inner(int64_t) const { return work->inner; }
};

// Rows [first, first + count) of a pass, which one thread takes through all products of a layer.
struct OwnRows {
    int64_t first, count;

    template <class Row>
    void linear(const JoinedMatrices& w, const Row& row, float* y, const float* add, AdapterField) const {
        Own& own = Own::of_this_thread();
        round_rows(w, count, row, own);
        product_of_tiles(w, own.inputs(), {0, count, count}, 0, w.outputs / TILE, y, add);
    }

    template <class Each>
    void each(const Each& each) const {
        for (int64_t r = 0; r < count; r++) each(r);
    }

    float* inner(int64_t size) const { return Own::of_this_thread().inner(count * size); }
};

// Rows that a thread takes at a time: an equal number for all threads, in whole groups of 8; 0 where they are too few for that.
int64_t chunk_of(int64_t rows, int64_t threads) {
    if (rows < threads * LEAST_CHUNK) return 0;
    const int64_t chunks = threads * ((rows + threads * MOST_CHUNK - 1) / (threads * MOST_CHUNK));
    return ((rows + chunks - 1) / chunks + ROWS - 1) / ROWS * ROWS;
}
