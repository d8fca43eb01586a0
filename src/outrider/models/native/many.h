// Products of many rows in pairs of inputs (see four_dots in kernels.cpp, which includes this): the weights of some blocks of
// a tile are widened to 16 bits once, stay in the first cache, and serve all of the rows. The same numbers as tile_rows.

constexpr int LEAST_MANY = 32;  // rows from which on widening apart pays
constexpr int MOST_MANY = 256;  // rows that share it: their sums are 16 KiB
constexpr int WIDE_CHUNK = 6;     // blocks that are widened at a time, in about 7 KiB
constexpr int NIBBLE_CHUNK = 9;   // the same of activations of 8 bits, in about 6 KiB

// A block of a tile as 16-bit numbers for pairs.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS>
struct WideBlock {
    static constexpr int PARTS = BLOCK / GROUP;
    static constexpr bool ADDS_MINIMUM = true;
    __m512i even[8], odd[8];
    __m512i products[PARTS];  // of the paired inputs
    __m512 scale[PARTS], minimum[PARTS];

    inline void widen(const Matrix& w, int64_t tile, int64_t b, const uint8_t* q) {
        for (int part = 0; part < PARTS; part++) {
            group_factors<GROUP, MINIMUM, SUPERS>(w, tile, b, part, scale[part], minimum[part]);
            products[part] = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int j = part * 8 / PARTS; j < (part + 1) * 8 / PARTS; j++) {
                words<BITS>(q, j, even[j], odd[j]);
                if (j % 4 < PAIRS) products[part] = add_products(products[part], even[j], odd[j]);
            }
        }
    }

    static __m512i start(const BlockSums& sums, int part) {
        return _mm512_set1_epi32(static_cast<int32_t>(sums.cross[PARTS == 1 ? 2 : part]));
    }

    inline void add_dots(const int8_t* x, int part, __m512i (&dots)[ROWS]) const {
        const auto vectors = [&](int j, __m512i& first, __m512i& second) {
            first = even[j];
            second = odd[j];
        };
#pragma GCC unroll 2
        for (int j = part * 8 / PARTS; j < (part + 1) * 8 / PARTS; j += 4) four_dots(vectors, x, j, dots);
    }
};

// A block of 4 bits as bytes, for activations of 8 bits.
template <bool MINIMUM, bool SUPERS>
struct NibbleBlock {
    static constexpr int PARTS = 1;
    static constexpr bool ADDS_MINIMUM = MINIMUM;
    __m512i low[4], high[4];
    __m512i products[1];  // of the paired inputs
    __m512 scale[1], minimum[1];

    inline void widen(const Matrix& w, int64_t tile, int64_t b, const uint8_t* q) {
        group_factors<BLOCK, MINIMUM, SUPERS>(w, tile, b, 0, scale[0], minimum[0]);
        products[0] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) nibble_vectors(q, j, low[j], high[j], products[0]);
    }

    static __m512i start(const BlockSums& sums, int) { return nibble_start<MINIMUM>(sums); }

    inline void add_dots(const int8_t* x, int, __m512i (&dots)[ROWS]) const {
        const auto vectors = [&](int j, __m512i& first, __m512i& second) {
            first = low[j];
            second = high[j];
        };
        add_nibble_block<ROWS>(vectors, x, dots);
    }
};

// to[8][16] += `count` blocks times 8 rows; nothing is there before the first of them.
template <class Block>
void chunk_rows(const Block* w, int64_t count, const int8_t* x, const float* scales, const BlockSums* block_sums, bool first, float* to) {
    __m512 sums[ROWS];
    for (int r = 0; r < ROWS; r++) sums[r] = first ? _mm512_setzero_ps() : _mm512_load_ps(to + r * TILE);
    for (int64_t b = 0; b < count; b++, w++, x += ROWS * 2 * BLOCK, scales += ROWS, block_sums += ROWS) {
#pragma GCC unroll 2
        for (int part = 0; part < Block::PARTS; part++) {
            const int which = Block::PARTS == 1 ? 2 : part;
            __m512i dots[ROWS];
            for (int r = 0; r < ROWS; r++) dots[r] = _mm512_sub_epi32(Block::start(block_sums[r], part), w->products[part]);
            w->add_dots(x, part, dots);
            for (int r = 0; r < ROWS; r++) {
                const __m512 dot = _mm512_cvtepi32_ps(dots[r]);
                sums[r] = _mm512_fmadd_ps(dot, _mm512_mul_ps(w->scale[part], _mm512_set1_ps(scales[r])), sums[r]);
                if (Block::ADDS_MINIMUM) sums[r] = _mm512_fmadd_ps(w->minimum[part], _mm512_set1_ps(block_sums[r].sum(which)), sums[r]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++) _mm512_store_ps(to + r * TILE, sums[r]);
}

// The whole groups of 8 among `rows`, from `begin` on; at most MOST_MANY rows.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES>
void tile_many(const Matrix& w, int64_t tile, const Activations& x, int64_t begin, int64_t rows, float* y, const float* add, int64_t stride) {
    using Block = std::conditional_t<BYTES, NibbleBlock<MINIMUM, SUPERS>, WideBlock<BITS, GROUP, MINIMUM, SUPERS>>;
    constexpr int64_t LINES = BITS, CHUNK = BYTES ? NIBBLE_CHUNK : WIDE_CHUNK;
    const int64_t blocks = w.inputs / BLOCK;
    alignas(64) float totals[MOST_MANY * TILE];
    Block wide[CHUNK];
    for (int64_t b = 0; b < blocks; b += CHUNK) {
        const int64_t count = blocks - b < CHUNK ? blocks - b : CHUNK;
        for (int64_t i = 0; i < count; i++) {
            const uint8_t* q = w.q + (tile * blocks + b + i) * 64 * LINES;
            for (int line = 0; line < LINES; line++) _mm_prefetch(reinterpret_cast<const char*>(q) + AHEAD + 64 * line, _MM_HINT_T0);
            wide[i].widen(w, tile, b + i, q);
        }
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t first = (begin + row) * blocks + b * ROWS;
            chunk_rows(wide, count, x.q + first * 2 * BLOCK, x.scale + first, x.sums + first, b == 0, totals + row * TILE);
        }
    }
    for (int64_t row = 0; row < rows; row += ROWS)
        store_sums(w, tile, begin + row, ROWS, reinterpret_cast<const __m512*>(totals + row * TILE), y, add, stride);
}
