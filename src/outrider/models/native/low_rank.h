// Adapters: y += B (A x), with whole numbers as the packed product has them; each row by the same operations in the same order,
// whatever rows are beside it. A part of kernels.cpp, in its namespace.
//
// A and B have 8 bits, with 128 added. x is there already, in 16 bits, as the packed product reads it. A x is rounded to 16 bits too,
// in blocks of 32 inner values.

struct AdapterPart {  // of one of the joined matrices
    const uint8_t* b;     // [outputs / 16][rank / 4, rounded up][16][4]; 256 bytes after the last tile may be read
    int64_t first, outputs;  // which outputs of the joined matrices these are
    int64_t low, rank;       // which of the inner values are its own
};

struct AdapterMatrix {  // A, scales, and B of the parts lie one behind the other
    const uint8_t* a;     // [rank / 16][inputs / 32][8][16][4]
    const float* scales;  // [rank] of A's rows, B's columns and the adapter together
    int64_t rank;         // of all parts together, a multiple of 16; 0: nothing is added to these matrices
    int64_t count;        // parts
    AdapterPart parts[3];
};

struct AdapterLayer {
    AdapterMatrix qkv, output, gate_up, down;
};

using AdapterField = AdapterMatrix AdapterLayer::*;

struct Adapters {
    const AdapterLayer* const* rows;  // [rows] the layers of each row's adapter, or null
    float* low;                       // [rows][stride] A x of the matrix at hand
    int64_t stride;
};

struct RowGroup {  // neighbours with the same adapter, within a group of 8 rows
    const AdapterLayer* layers;
    int64_t first, count;
};

constexpr int ADAPTED = 4;    // rows of one adapter that share a reading of its matrices
constexpr int SEGMENT = 6;    // blocks of inputs whose products are added up by themselves, so that threads can share one row's
constexpr int FEW_GROUPS = 4; // groups of rows up to which they do
constexpr int LATE = 2;       // rows up to which a product is as fast as memory; see AdaptedProduct

// The rows of a pass that have adapters, and memory that its products use one after the other.
struct AdaptedRows {
    const Adapters* adapters;
    int64_t layers;  // of the model
    int64_t blocks;  // of inner values that a row has at most
    std::vector<RowGroup> groups;
    std::vector<float> parts;
    std::vector<AskedBlock> inner;  // [rows][blocks], in a group of rows [blocks][rows]
    int64_t items = 0;  // pieces of inner values in all products until now, the one at hand included; see Narrowing
    alignas(LINE) std::atomic<int64_t> taken{0};  // how many of them some thread has begun
    std::atomic<int64_t> done{0};                 // and ended
    alignas(LINE) std::atomic<int64_t> ready{0};  // `items` of the last product whose inner values are all there

    AdaptedRows(const Adapters* given, int64_t rows, int64_t layers)
        : adapters(given), layers(layers), blocks(given ? given->stride / BLOCK + 3 : 0), inner(rows * blocks) {
        for (int64_t row = 0; given && row < rows;) {
            RowGroup group = {given->rows[row], row, 1};
            for (int64_t next = row + 1; group.count < ADAPTED && next < rows && next % ROWS && given->rows[next] == group.layers; next++)
                group.count++;
            if (group.layers) groups.push_back(group);
            row += group.count;
        }
    }
    bool few() const { return static_cast<int64_t>(groups.size()) <= FEW_GROUPS; }
};

// What the rows of a pass add to one matrix; without rows, nothing.
struct Added {
    AdaptedRows* rows;
    int64_t layer;
    AdapterField field;

    bool some() const {
        if (rows)
            for (const RowGroup& group : rows->groups)
                if (of(group).rank) return true;
        return false;
    }
    const AdapterMatrix& of(const RowGroup& group) const { return group.layers[layer].*field; }
    float* low(int64_t row) const { return rows->adapters->low + row * rows->adapters->stride; }
    AskedBlock* inner(const RowGroup& group) const { return rows->inner.data() + group.first * rows->blocks; }

    // What the product that comes `later` ones after this adds; null after the last.
    const AdapterMatrix* later(const RowGroup& group, int64_t later) const {
        const AdapterMatrix *const first = &group.layers->qkv, *const found = &of(group) + later;  // four in a layer, in a pass's order
        return found - first < 4 * rows->layers ? found : nullptr;
    }
};

// Ask memory for where A and B of a product lie, or for nothing.
inline void ask(const AdapterMatrix* matrix) {
    for (size_t i = 0; matrix && i < sizeof(AdapterMatrix); i += LINE) soon(reinterpret_cast<const char*>(matrix) + i);
}

// A block of a tile of A times the activations of N rows, whose blocks lie side by side; PAIRED_ROWS: see Activations.
template <int N, bool PAIRED_ROWS>
inline void activation_dots(const uint8_t* q, const int8_t* x, [[maybe_unused]] const BlockSums* cross, Lanes (&dots)[N]) {
#if WIDE
    __m512i sums[1][N];
    if constexpr (PAIRED_ROWS || !VNNI) paired_dots<8>({q}, x, cross, VNNI ? 2 : -1, 0, 8, sums);
#if VNNI
    else block_dots<8>({q}, x, 0, 8, sums);
#endif
    for (int n = 0; n < N; n++) dots[n] = _mm512_cvtepi32_ps(sums[0][n]);
#elif HALF_WIDE
    __m256i sums[2][N];
    dots_of<8, WORDS && !PAIRED_ROWS, N>(q, x, 0, 8, sums);
    for (int half = 0; half < 2; half++)
        for (int n = 0; n < N; n++) dots[n].part[half] = _mm256_cvtepi32_ps(sums[half][n]);
#elif NEON_DOTS
    for (int quarter = 0; quarter < 4; quarter++) {
        int32x4_t sums[N];
        dots_of<8, false, N>(q + 16 * quarter, x, 0, 2, sums);
        for (int n = 0; n < N; n++) dots[n].part[quarter] = vcvtq_f32_s32(sums[n]);
    }
#else
    for (int n = 0; n < N; n++, x += 2 * BLOCK) {
        int32_t sums[TILE] = {};
        for (int j = 0; j < 8; j++)
            for (int o = 0; o < TILE; o++)
                for (int i = 0; i < 4; i++) sums[o] += q[(j * TILE + o) * 4 + i] * (x[4 * j + i] * 256 + x[BLOCK + 4 * j + i]);
        dots[n] = load_integers(sums);
    }
#endif
}

// Of one tile of A: the products of blocks [begin, end) with N rows, the first of which has its blocks from `at` on, `step` apart.
template <int N, bool PAIRED_ROWS>
inline void segment_sums(const uint8_t* a, const Activations& x, int64_t at, int64_t step, int64_t begin, int64_t end, Lanes (&sums)[N]) {
    for (int n = 0; n < N; n++) sums[n] = all_lanes(0.0f);
    at += begin * step;
    for (int64_t b = begin; b < end; b++, at += step) {
        const uint8_t* q = a + b * BLOCK * TILE;
        for (int line = 0; line < 8; line++) soon(q + 1024 + line * LINE);
        Lanes dots[N];
        activation_dots<N, PAIRED_ROWS>(q, x.q + at * 2 * BLOCK, x.sums + at, dots);
        for (int n = 0; n < N; n++) {
            sums[n] = fused(dots[n], all_lanes(x.scale[at + n]), sums[n]);
            sums[n] = fused(all_lanes(-128.0f), all_lanes(x.sums[at + n].all), sums[n]);
        }
    }
}

// y += B low for N rows and some tiles of outputs.
template <int N>
void widen_tiles(const uint8_t* b, int64_t rank, int64_t tiles, const AskedBlock* inner, float* y, int64_t step) {
    const int64_t whole = rank / BLOCK, vectors = (rank + 3) / 4;
    const int rest = static_cast<int>(vectors - 8 * whole);
    for (int64_t tile = 0; tile < tiles; tile++, b += vectors * 4 * TILE, y += TILE) {
        Lanes sums[N], dots[N];
        for (int n = 0; n < N; n++) sums[n] = all_lanes(0.0f);
        const auto take = [&](int64_t block) {
            for (int n = 0; n < N; n++) sums[n] = fused(dots[n], all_lanes(inner[block * N + n].scale), sums[n]);
        };
        for (int64_t block = 0; block < whole; block++) {
            asked_dots<N>(b + block * BLOCK * TILE, inner + block * N, 0, 8, dots);
            take(block);
        }
        if (rest) {
            if (rest == 4) asked_dots<N>(b + whole * BLOCK * TILE, inner + whole * N, 0, 4, dots);  // rank 16, most often
            else asked_dots<N>(b + whole * BLOCK * TILE, inner + whole * N, 0, rest, dots);
            take(whole);
        }
        for (int n = 0; n < N; n++) store(y + n * step, add(load(y + n * step), sums[n]));
    }
}

// The inner values of all rows of a product, computed by the threads that run it. Where there are few rows the workers compute
// them before their first tile, having asked for A while they waited, and the caller helps only when it needs them; else everybody
// does. Where few rows meet many workers, the segments of a row's sums are shared out, and the last thread that is done adds them up;
// a row's sums are the same.
//
// What threads tell each other costs more than the sums of one row. So this is a value that lies in the work itself, on few lines, and
// the counters go on from product to product: nobody sets them back.
class Narrowing {
  public:
    Narrowing(const Added& added, const JoinedMatrices& w, const Activations& x, int64_t rows)
        : added_(added), x_(x), rows_(rows), bits_(w.activations), blocks_(w.parts[0].inputs / BLOCK),
          segments_((blocks_ + SEGMENT - 1) / SEGMENT), split_(added.rows->few() && pool().size() > 2) {
        const int64_t workers = pool().size() > 1 ? pool().size() - 1 : 1;
        int64_t count = 0, tiles = 0;
        for (size_t g = 0; g < added_.rows->groups.size(); g++) {
            count += items(g);
            tiles += this->tiles(g) * group(g).count;
        }
        std::vector<float>& parts = added_.rows->parts;
        if (split_ && static_cast<int64_t>(parts.size()) < tiles * segments_ * TILE) parts.resize(tiles * segments_ * TILE);
        share_ = split_ ? (count + workers - 1) / workers : 1;
        first_ = added_.rows->items;
        end_ = added_.rows->items += count;
    }

    // Take part, as long as there is something to do.
    void help() const {
        std::atomic<int64_t>& taken = added_.rows->taken;
        for (int64_t begin = taken.load(std::memory_order_relaxed); begin < end_;) {
            const int64_t end = begin + share_ < end_ ? begin + share_ : end_;
            if (!taken.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
            for (int64_t item = begin; item < end; item++) run(item - first_);
            if (added_.rows->done.fetch_add(end - begin, std::memory_order_acq_rel) + end - begin == end_) {
                if (split_) add_up();
                added_.rows->ready.store(end_, std::memory_order_release);
            }
            begin = taken.load(std::memory_order_relaxed);
        }
    }

    bool ready() const { return added_.rows->ready.load(std::memory_order_acquire) == end_; }

    // Until all inner values are there: others are about to finish theirs. Who need not wait writes nothing that others read.
    void wait() const {
        if (ready()) return;
        help();
        for (int spins = 0; !ready(); spins++)
            if (spins < 60000) relax();
            else std::this_thread::yield();  // a thread has lost its core to somebody
    }

  private:
    using Run = void (Narrowing::*)(size_t, int64_t) const;

    template <bool PAIRED_ROWS>
    static Run run_of(int64_t count) {
        return count == 1   ? &Narrowing::run_rows<1, PAIRED_ROWS>
               : count == 2 ? &Narrowing::run_rows<2, PAIRED_ROWS>
               : count == 3 ? &Narrowing::run_rows<3, PAIRED_ROWS>
                            : &Narrowing::run_rows<4, PAIRED_ROWS>;
    }

    void run(int64_t item) const {
        size_t g = 0;
        for (; item >= items(g); g++) item -= items(g);
        const RowGroup& group = this->group(g);
        ask(added_.later(group, 1));
        const bool paired = paired_rows(group_rows(group.first / ROWS * ROWS, rows_), bits_);
        (this->*(paired ? run_of<PAIRED> : run_of<false>)(group.count))(g, item);
    }

    // A segment of a tile, or all of a group.
    template <int N, bool PAIRED_ROWS>
    void run_rows(size_t g, int64_t item) const {
        const RowGroup& group = this->group(g);
        const int64_t eight = group.first / ROWS * ROWS, step = group_rows(eight, rows_), at = eight * blocks_ + group.first - eight;
        const auto sums = [&](int64_t tile, int64_t segment, Lanes(&to)[N]) {
            const int64_t begin = segment * SEGMENT, end = begin + SEGMENT < blocks_ ? begin + SEGMENT : blocks_;
            segment_sums<N, PAIRED_ROWS>(added_.of(group).a + tile * blocks_ * BLOCK * TILE, x_, at, step, begin, end, to);
        };
        Lanes some[N];
        if (split_) {
            sums(item / segments_, item % segments_, some);
            for (int n = 0; n < N; n++) store(part(g, n, item / segments_, item % segments_), some[n]);
            return;
        }
        for (int64_t tile = 0; tile < tiles(g); tile++) {
            Lanes total[N];
            sums(tile, 0, total);
            for (int64_t segment = 1; segment < segments_; segment++) {
                sums(tile, segment, some);
                for (int n = 0; n < N; n++) total[n] = add(total[n], some[n]);
            }
            for (int n = 0; n < N; n++) scale(group, n, tile, total[n]);
        }
        finish(group);
    }

    void add_up() const {
        for (size_t g = 0; g < added_.rows->groups.size(); g++) {
            for (int64_t n = 0; n < group(g).count; n++)
                for (int64_t tile = 0; tile < tiles(g); tile++) {
                    Lanes total = load(part(g, n, tile, 0));
                    for (int64_t s = 1; s < segments_; s++) total = add(total, load(part(g, n, tile, s)));
                    scale(group(g), n, tile, total);
                }
            finish(group(g));
        }
    }

    void scale(const RowGroup& group, int64_t n, int64_t tile, const Lanes& total) const {
        store(added_.low(group.first + n) + tile * TILE, mul(total, load(added_.of(group).scales + tile * TILE)));
    }

    // The inner values of a group in 16 bits, each part's from a block of its own on.
    void finish(const RowGroup& group) const {
        const AdapterMatrix& matrix = added_.of(group);
        AskedBlock* to = added_.inner(group);
        for (int64_t p = 0; p < matrix.count; p++)
            for (int64_t from = 0; from < matrix.parts[p].rank; from += BLOCK)
                for (int64_t n = 0; n < group.count; n++, to++) {
                    const int64_t some = matrix.parts[p].rank - from < BLOCK ? matrix.parts[p].rank - from : BLOCK;
                    float x[BLOCK] = {};
                    std::memcpy(x, added_.low(group.first + n) + matrix.parts[p].low + from, some * sizeof(float));
                    ask_block(x, to);
                }
    }

    const RowGroup& group(size_t g) const { return added_.rows->groups[g]; }
    int64_t tiles(size_t g) const { return added_.of(group(g)).rank / TILE; }
    int64_t items(size_t g) const { return split_ ? tiles(g) * segments_ : 1; }

    float* part(size_t g, int64_t n, int64_t tile, int64_t segment) const {
        int64_t before = 0;
        for (size_t i = 0; i < g; i++) before += group(i).count * tiles(i);
        return added_.rows->parts.data() + ((before + n * tiles(g) + tile) * segments_ + segment) * TILE;
    }

    Added added_;
    Activations x_;
    int64_t rows_, bits_, blocks_, segments_, first_, end_, share_;  // [first, end) of all items of the pass
    bool split_;
};

// Of some tiles of B.
int64_t part_bytes(const AdapterPart& part, int64_t tiles) { return tiles * ((part.rank + 3) / 4 * 4 * TILE); }

// Calls some(part, its first block of inner values, B of the first tile, first tile, tiles) for what an adapter adds to tiles
// [begin, end) of a product.
template <class Some>
void parts_of_tiles(const AdapterMatrix& matrix, int64_t begin, int64_t end, const Some& some) {
    for (int64_t p = 0, blocks = 0; matrix.rank && p < matrix.count; p++) {
        const AdapterPart& part = matrix.parts[p];
        const int64_t first = part.first / TILE, last = first + part.outputs / TILE;
        const int64_t from = begin > first ? begin : first, to = end < last ? end : last;
        if (from < to) some(part, blocks, part.b + part_bytes(part, from - first), from, to - from);
        blocks += (part.rank + BLOCK - 1) / BLOCK;
    }
}

// y += what the adapters of rows [from, to) add to tiles [begin, end).
void widen(const Added& added, int64_t begin, int64_t end, int64_t from, int64_t to, float* y, int64_t outputs) {
    for (const RowGroup& group : added.rows->groups) {
        if (group.first < from || group.first >= to) continue;
        const auto some = group.count == 1   ? widen_tiles<1>
                          : group.count == 2 ? widen_tiles<2>
                          : group.count == 3 ? widen_tiles<3>
                                             : widen_tiles<4>;
        const auto add_part = [&](const AdapterPart& part, int64_t blocks, const uint8_t* b, int64_t tile, int64_t tiles) {
            some(b, part.rank, tiles, added.inner(group) + blocks * group.count, y + group.first * outputs + tile * TILE, outputs);
        };
        parts_of_tiles(added.of(group), begin, end, add_part);
    }
}

// A and B of the product after the next one. Where they lie is read here, so for where those of the one after it lie memory is asked.
Pool::Ahead ahead_of(const Added& added) {
    Pool::Ahead ahead;
    for (const RowGroup& group : added.rows->groups) {
        const AdapterMatrix* const next = added.later(group, 2);
        if (next && next->rank && ahead.count < Pool::Ahead::MOST) {
            const AdapterPart& last = next->parts[next->count - 1];
            const int64_t a = next->parts[0].b - next->a, all = last.b + part_bytes(last, last.outputs / TILE) - next->a;
            ahead.ranges[ahead.count++] = {reinterpret_cast<const char*>(next->a), a, all - a};
        }
        ask(added.later(group, 3));
    }
    return ahead;
}

// y = x W^T (+ add), and what adapters add: the work of the threads, on few lines, which they read from the caller. To few rows,
// whose product is as fast as memory, B is added when a thread has done its tiles: nothing comes between the weights that it reads. To
// more rows it is added piece by piece, while y is near.
class AdaptedProduct {
  public:
    AdaptedProduct(const JoinedMatrices& w, const Activations& x, int64_t rows, float* y, const float* add, const Added& added)
        : w_(&w), x_(x), rows_(rows), y_(y), add_(add), added_(added), narrowing_(added, w, x, rows), few_(added.rows->few()),
          late_(rows <= LATE) {}

    void operator()(int64_t begin, int64_t end, int64_t id) const {
        if (!few_ || id) narrowing_.help();
        rows_in_turn(*w_, rows_, [&](int64_t from, int64_t to) {
            some_outputs(*w_, x_, {from, to, rows_}, tile_of(*w_, begin), tile_of(*w_, end), y_, add_);
            if (!late_) widen_rows(begin, end, from, to);
        });
    }

    void done(int64_t begin, int64_t end) const {
        if (late_) widen_rows(begin, end, 0, rows_);
    }

  private:
    void widen_rows(int64_t begin, int64_t end, int64_t from, int64_t to) const {
        narrowing_.wait();
        widen(added_, tile_of(*w_, begin), tile_of(*w_, end), from, to, y_, w_->outputs);
    }

    const JoinedMatrices* w_;
    Activations x_;
    int64_t rows_;
    float* y_;
    const float* add_;
    Added added_;
    Narrowing narrowing_;
    bool few_, late_;
};

void adapted_product(const JoinedMatrices& w, const Activations& x, int64_t rows, float* y, const float* add, const Added& added) {
    if (!added.some()) return product(w, x, rows, y, add);
    const AdaptedProduct work(w, x, rows, y, add, added);
    const Pool::Ahead ahead = added.rows->few() ? ahead_of(added) : Pool::Ahead{};
    pool().run(shares_of(w), 1, work, &ahead);
}
