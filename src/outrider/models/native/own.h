// Inputs of a product that each thread rounds for itself, and rows of a pass that stay with one thread. A part of kernels.cpp, in
// its namespace.
//
// A line of memory that one core has written reaches another slowly (0.16 us between two cores of a Zen 4), and one that both have
// read is written as slowly. To round a block of 32 inputs takes 14 ns.

constexpr int64_t REPEATED = 8;      // rows, times the threads beside the first, up to which every thread rounds all rows itself: with
                                     // 16 rows on two threads that is slower
constexpr int64_t MOST_CHUNK = 128;  // rows that a thread takes through a layer at a time: inputs of up to 2,800 numbers stay in a second
                                     // cache of 1 MiB, and 64 would have their weights widened twice as often (see many.h): 0 to 3 %
                                     // slower
constexpr int64_t LEAST_CHUNK = 32;  // rows from which on widening weights pays (many.h): with fewer rows a thread the outputs are
                                     // shared. Measured on two threads with AVX-512 alone, and taken as it is elsewhere

// Memory of one thread for the inputs of a product. It stays as large as the largest pass needed it: about 3 bytes for each of 128
// rows and number of `hidden` and `inner` (9 MB for 8B).
class Own {
  public:
    static Own& of_this_thread() {
        static thread_local Own own;
        return own;
    }

    // Inputs of a product.
    class Inputs {
      public:
        // For `rows` rows; what was there before is lost.
        const Activations& fit(int64_t rows, int64_t size) {
            const size_t blocks = static_cast<size_t>(rows * size / BLOCK);
            if (q_.size() < blocks) q_.resize(blocks);
            if (scale_.size() < blocks) scale_.resize(blocks);
            if (sums_.size() < blocks) sums_.resize(blocks);
            x_ = {reinterpret_cast<int8_t*>(q_.data()), scale_.data(), sums_.data()};
            return x_;
        }
        const Activations& get() const { return x_; }

      private:
        struct alignas(LINE) Block {
            int8_t bytes[2 * BLOCK];
        };
        std::vector<Block> q_;
        std::vector<float> scale_;
        std::vector<BlockSums> sums_;
        Activations x_{};
    };

    Inputs inputs, gated;  // of the product at hand, and of the one after it

    float* row(int64_t size) { return floats(row_, size); }
    float* outputs(int64_t size) { return floats(outputs_, size); }

    // A number for a job that this thread gives to its workers, who serve no other.
    int64_t next_job() { return ++jobs_; }
    int64_t job = 0;  // the last one whose inputs it has

  private:
    struct alignas(LINE) Lane {
        float numbers[TILE];
    };

    static float* floats(std::vector<Lane>& of, int64_t size) {
        const size_t lanes = static_cast<size_t>((size + TILE - 1) / TILE);
        if (of.size() < lanes) of.resize(lanes);
        return reinterpret_cast<float*>(of.data());
    }

    std::vector<Lane> row_, outputs_;
    int64_t jobs_ = 0;
};

// Round rows [0, rows) of what a product reads. row(r, own): the floats of one, which may lie in memory of the thread's own.
template <class Row>
void round_rows(const JoinedMatrices& w, int64_t rows, const Row& row, Own& own) {
    const int64_t size = w.parts[0].inputs;
    const Activations& to = own.inputs.fit(rows, size);
    for (int64_t r = 0; r < rows; r++) quantise_row(row(r, own), size, r, rows, w.activations, to);
}

// All rows of a pass, whose products the threads share by their outputs.
struct SharedRows {
    int64_t first, count;
    const Work* work;
    AdaptedRows* adapted;  // or null
    int64_t index;         // of the layer

    // y [rows][outputs] = W x (+ add), with what adapters add.
    template <class Row>
    void linear(const JoinedMatrices& w, const Row& row, float* y, const float* add, AdapterField field) const {
        const Added added = {adapted, index, field};
        const int64_t others = pool().size() - 1;
        if (!others || added.some() || count * others > REPEATED) {
            each([&](int64_t r) { quantise_row(row(r, Own::of_this_thread()), w.parts[0].inputs, r, count, w.activations, work->x); });
            return adapted_product(w, work->x, count, y, add, added);
        }
        const int64_t job = Own::of_this_thread().next_job();
        pool().run(shares_of(w), 1, [&](int64_t begin, int64_t end, int64_t) {
            Own& own = Own::of_this_thread();
            if (own.job != job) round_rows(w, count, row, own);
            own.job = job;
            some_outputs(w, own.inputs.get(), {0, count, count}, tile_of(w, begin), tile_of(w, end), y, add);
        });
    }

    template <class Each>
    void each(const Each& each) const {
        pool().run(count, SERIAL, [&](int64_t begin, int64_t end, int64_t) {
            for (int64_t r = begin; r < end; r++) each(r);
        });
    }

    // x += the MLP, of which row() gives the inputs
    template <class Row>
    void feed_forward(const Layer& layer, int64_t inner, const Row& row, float* x) const {
        linear(layer.gate_up, row, work->inner, nullptr, &AdapterLayer::gate_up);
        const auto gated_row = [&](int64_t r, Own& own) {
            const float* gate = work->inner + r * 2 * inner;
            float* to = own.row(inner);
            gated(gate, gate + inner, inner, to);
            return to;
        };
        linear(layer.down, gated_row, x, x, &AdapterLayer::down);
    }
};

// Rows [first, first + count) of a pass, which one thread takes through all products of a layer.
struct OwnRows {
    int64_t first, count;

    template <class Row>
    void linear(const JoinedMatrices& w, const Row& row, float* y, const float* add, AdapterField) const {
        Own& own = Own::of_this_thread();
        round_rows(w, count, row, own);
        multiply(w, own.inputs.get(), y, add);
    }

    template <class Each>
    void each(const Each& each) const {
        for (int64_t r = 0; r < count; r++) each(r);
    }

    // As SharedRows has it; a block of what `down` reads is rounded as soon as its outputs of gate and up are there.
    template <class Row>
    void feed_forward(const Layer& layer, int64_t inner, const Row& row, float* x) const {
        constexpr int64_t STRIDE = 2 * BLOCK;
        Own& own = Own::of_this_thread();
        round_rows(layer.gate_up, count, row, own);
        const Activations& to = own.gated.fit(count, inner);
        float *const gate = own.outputs(count * STRIDE), *const up = gate + BLOCK;
        for (int64_t block = 0; block < inner / BLOCK; block++) {
            constexpr int64_t TILES = BLOCK / TILE;
            const int64_t gates = block * TILES, ups = inner / TILE + gates;
            product_of_tiles(layer.gate_up, own.inputs.get(), {0, count, count}, gates, gates + TILES, gate, nullptr, STRIDE);
            product_of_tiles(layer.gate_up, own.inputs.get(), {0, count, count}, ups, ups + TILES, up, nullptr, STRIDE);
            for (int64_t r = 0; r < count; r++) {
                float mixed[BLOCK];
                gated(gate + r * STRIDE, up + r * STRIDE, BLOCK, mixed);
                quantise_block_of(mixed, block, inner / BLOCK, r, count, layer.down.activations, to);
            }
        }
        multiply(layer.down, to, x, x);
    }

    void multiply(const JoinedMatrices& w, const Activations& x, float* y, const float* add) const {
        rows_in_turn(w, count, [&](int64_t from, int64_t to) { some_outputs(w, x, {from, to, count}, 0, w.outputs / TILE, y, add); });
    }
};

// Rows that a thread takes at a time: about as many for each thread, rounded up to 8; 0 where they are too few for that.
int64_t chunk_of(int64_t rows, int64_t threads) {
    if (rows < threads * LEAST_CHUNK) return 0;
    const int64_t chunks = threads * ((rows + threads * MOST_CHUNK - 1) / (threads * MOST_CHUNK));
    return ((rows + chunks - 1) / chunks + ROWS - 1) / ROWS * ROWS;
}
