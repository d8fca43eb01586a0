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

// Memory of one thread for the inputs of a product, and for outputs of gate and up. It stays as large as the largest pass needed it:
// with chunks about 3 bytes (7 with AMX) for each of 128 rows and number of `hidden` and `inner` (9 MB for 8B); with an adapter 8 bytes
// for each row of a piece of a prompt and number of the thread's part of `inner` (29 MB for 512 rows of 8B on two threads).
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
            const size_t blocks = static_cast<size_t>(rows * size / BLOCK) + ROWS;  // what a whole group would have may be read
            if (q_.size() < blocks) q_.resize(blocks);
            if (scale_.size() < blocks) scale_.resize(blocks);
            if (sums_.size() < blocks) sums_.resize(blocks);
            uint8_t* amx = nullptr;
            if (const size_t lines = static_cast<size_t>(amx_bytes(rows, size)) / LINE) {
                if (amx_.size() < lines) amx_.resize(lines);
                amx = amx_.data()->bytes;
            }
            x_ = {reinterpret_cast<int8_t*>(q_.data()), scale_.data(), sums_.data(), amx};
            return x_;
        }
        const Activations& get() const { return x_; }

      private:
        struct alignas(LINE) Block {
            int8_t bytes[2 * BLOCK];
        };
        struct alignas(LINE) Line {
            uint8_t bytes[LINE];
        };
        std::vector<Block> q_;
        std::vector<float> scale_;
        std::vector<BlockSums> sums_;
        std::vector<Line> amx_;
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
    for (int64_t r = 0; r < rows; r++) quantise_row(w, row(r, own), r, rows, to);
}

// A block of what `down` reads, of one of `rows` rows.
void round_gated(const float* gate, const float* up, const JoinedMatrices& down, int64_t block, int64_t row, int64_t rows, const Activations& to) {
    float mixed[BLOCK];
    gated(gate, up, BLOCK, mixed);
    quantise_blocks(down, mixed, block, block + 1, row, rows, to);
}

// All rows of a pass, whose products the threads share by their outputs. Who has outputs makes of them what the next product reads,
// where they are whole blocks of it: of the numbers that the other threads need a quarter goes from core to core.
struct SharedRows {
    int64_t first, count;
    const Work* work;
    AdaptedRows* adapted;  // or null
    int64_t index;         // of the layer
    bool attended;         // whether attention leaves its results rounded, in work->x

    // y [rows][outputs] = W x (+ add), with what adapters add.
    template <class Row>
    void linear(const JoinedMatrices& w, const Row& row, float* y, const float* add, AdapterField field) const {
        const Added added = {adapted, index, field};
        if (added.some()) {
            round(w, row);
            return adapted_product(w, work->x, count, y, add, added);
        }
        rounded(w, row, shares_of(w),
                [&](const Activations& x, int64_t begin, int64_t end) { tiles_of(w, x, tile_of(w, begin), tile_of(w, end), y, add); });
    }

    // y [rows][outputs] = W x, then store(row, head): by the thread that has computed the head, where it can.
    template <class Row, class Store>
    void heads(const JoinedMatrices& w, const Row& row, int64_t head_dim, float* y, const Store& store) const {
        const int64_t tiles = head_dim / TILE, all = w.outputs / head_dim;
        if (!whole_heads(head_dim) || Added{adapted, index, &AdapterLayer::qkv}.some()) {
            linear(w, row, y, nullptr, &AdapterLayer::qkv);
            return each([&](int64_t r) {
                for (int64_t head = 0; head < all; head++) store(r, head);
            });
        }
        rounded(w, row, all, [&](const Activations& x, int64_t begin, int64_t end) {
            tiles_of(w, x, begin * tiles, end * tiles, y, nullptr);
            for (int64_t r = 0; r < count; r++)
                for (int64_t head = begin; head < end; head++) store(r, head);
        });
    }

    // x += W of what attention has given
    template <class Row>
    void output(const JoinedMatrices& w, const Row& row, float* x) const {
        if (attended) adapted_product(w, work->x, count, x, x, {adapted, index, &AdapterLayer::output});
        else linear(w, row, x, x, &AdapterLayer::output);
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
        if (!Added{adapted, index, &AdapterLayer::gate_up}.some()) {
            constexpr int64_t TILES = BLOCK / TILE;
            rounded(layer.gate_up, row, inner / BLOCK, [&](const Activations& x, int64_t begin, int64_t end) {
                Own& own = Own::of_this_thread();
                const int64_t some = (end - begin) * BLOCK, stride = 2 * some + TILE;  // rows do not share their places in a cache
                float *const gate = own.outputs(count * stride), *const up = gate + some;
                rows_in_turn(layer.gate_up, count, [&](int64_t from, int64_t to) {
                    product_of_tiles(layer.gate_up, x, {from, to, count}, begin * TILES, end * TILES, gate, nullptr, stride);
                    product_of_tiles(layer.gate_up, x, {from, to, count}, inner / TILE + begin * TILES, inner / TILE + end * TILES, up, nullptr, stride);
                });
                for (int64_t r = 0; r < count; r++)
                    for (int64_t b = 0; b < end - begin; b++)
                        round_gated(gate + r * stride + b * BLOCK, up + r * stride + b * BLOCK, layer.down, begin + b, r, count, work->gated);
            });
            return adapted_product(layer.down, work->gated, count, x, x, {adapted, index, &AdapterLayer::down});
        }
        linear(layer.gate_up, row, work->inner, nullptr, &AdapterLayer::gate_up);
        const auto gated_row = [&](int64_t r, Own& own) {
            const float* gate = work->inner + r * 2 * inner;
            float* to = own.row(inner);
            gated(gate, gate + inner, inner, to);
            return to;
        };
        linear(layer.down, gated_row, x, x, &AdapterLayer::down);
    }

  private:
    void tiles_of(const JoinedMatrices& w, const Activations& x, int64_t begin, int64_t end, float* y, const float* add) const {
        rows_in_turn(w, count, [&](int64_t from, int64_t to) { some_outputs(w, x, {from, to, count}, begin, end, y, add); });
    }

    template <class Row>
    void round(const JoinedMatrices& w, const Row& row) const {
        each([&](int64_t r) { quantise_row(w, row(r, Own::of_this_thread()), r, count, work->x); });
    }

    // Threads share [0, shares): some(rounded rows, begin, end). Few rows are rounded by each of them.
    template <class Row, class Some>
    void rounded(const JoinedMatrices& w, const Row& row, int64_t shares, const Some& some) const {
        const int64_t others = pool().size() - 1;
        if (!others || count * others > REPEATED) {
            round(w, row);
            return pool().run(shares, 1, [&](int64_t begin, int64_t end, int64_t) { some(work->x, begin, end); });
        }
        const int64_t job = Own::of_this_thread().next_job();
        pool().run(shares, 1, [&](int64_t begin, int64_t end, int64_t) {
            Own& own = Own::of_this_thread();
            if (own.job != job) round_rows(w, count, row, own);
            own.job = job;
            some(own.inputs.get(), begin, end);
        });
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

    template <class Row, class Store>
    void heads(const JoinedMatrices& w, const Row& row, int64_t head_dim, float* y, const Store& store) const {
        linear(w, row, y, nullptr, &AdapterLayer::qkv);
        for (int64_t r = 0; r < count; r++)
            for (int64_t head = 0; head < w.outputs / head_dim; head++) store(r, head);
    }

    template <class Row>
    void output(const JoinedMatrices& w, const Row& row, float* x) const {
        linear(w, row, x, x, &AdapterLayer::output);
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
            for (int64_t r = 0; r < count; r++) round_gated(gate + r * STRIDE, up + r * STRIDE, layer.down, block, r, count, to);
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
