// Products of many rows in pairs of inputs (see four_dots in wide.h, which includes this): the weights of some records
// are widened to 16 bits once, stay in the first cache, and serve all of the rows. The same numbers as tile_rows.

constexpr int LEAST_MANY = 32;  // rows from which on widening apart pays
constexpr int MOST_MANY = 128;  // rows that share it: their sums with two tiles are 16 KiB
constexpr int WIDE_CHUNK = 6;     // blocks that are widened at a time, in about 14 KiB for two tiles
constexpr int NIBBLE_CHUNK = 9;   // the same of activations of 8 bits, in about 12 KiB

// A block of a tile as 16-bit numbers for pairs.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS>
struct WideBlock {
    static constexpr int PARTS = BLOCK / GROUP;
    static constexpr bool ADDS_MINIMUM = true;
    __m512i even[8], odd[8];
    __m512i products[PARTS];  // of the paired inputs
    __m512 scale[PARTS], minimum[PARTS];

    ALWAYS_INLINE void widen(const Matrix& w, const uint8_t* record, int64_t tile, int64_t b, const uint8_t* q) {
        for (int part = 0; part < PARTS; part++) {
            group_factors<BITS, GROUP, MINIMUM, SUPERS>(w, record, tile, b, part, scale[part], minimum[part]);
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

    template <int T>
    static ALWAYS_INLINE void add_dots(const WideBlock (&w)[T], const int8_t* x, int part, __m512i (&dots)[T][ROWS]) {
        const auto vectors = [&](int j, __m512i (&first)[T], __m512i (&second)[T]) __attribute__((always_inline)) {
            for (int t = 0; t < T; t++) {
                first[t] = w[t].even[j];
                second[t] = w[t].odd[j];
            }
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

    ALWAYS_INLINE void widen(const Matrix& w, const uint8_t* record, int64_t tile, int64_t b, const uint8_t* q) {
        group_factors<4, BLOCK, MINIMUM, SUPERS>(w, record, tile, b, 0, scale[0], minimum[0]);
        products[0] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) nibble_vectors(q, j, low[j], high[j], products[0]);
    }

    static __m512i start(const BlockSums& sums, int) { return nibble_start<MINIMUM>(sums); }

    template <int T>
    static ALWAYS_INLINE void add_dots(const NibbleBlock (&w)[T], const int8_t* x, int, __m512i (&dots)[T][ROWS]) {
        const auto vectors = [&](int j, __m512i (&first)[T], __m512i (&second)[T]) __attribute__((always_inline)) {
            for (int t = 0; t < T; t++) {
                first[t] = w[t].low[j];
                second[t] = w[t].high[j];
            }
        };
        add_nibble_block(vectors, x, dots);
    }
};

// to[T][8][16] += `count` blocks of T tiles times 8 rows; nothing is there before the first of them.
template <int T, class Block>
void chunk_rows(const Block (*w)[T], int64_t count, const int8_t* x, const float* scales, const BlockSums* block_sums, bool first, float* to) {
    __m512 sums[T][ROWS];
    for (int t = 0; t < T; t++)
        for (int r = 0; r < ROWS; r++) sums[t][r] = first ? _mm512_setzero_ps() : _mm512_load_ps(to + (t * ROWS + r) * TILE);
    for (int64_t b = 0; b < count; b++, w++, x += ROWS * 2 * BLOCK, scales += ROWS, block_sums += ROWS) {
#pragma GCC unroll 2
        for (int part = 0; part < Block::PARTS; part++) {
            __m512i dots[T][ROWS];
            __m512 scale[T], minimum[T];
            for (int t = 0; t < T; t++) {
                const Block& block = (*w)[t];
                scale[t] = block.scale[part];
                minimum[t] = block.minimum[part];
                for (int r = 0; r < ROWS; r++) dots[t][r] = _mm512_sub_epi32(Block::start(block_sums[r], part), block.products[part]);
            }
            Block::add_dots(*w, x, part, dots);
            add_group<Block::ADDS_MINIMUM>(dots, scale, minimum, scales, block_sums, Block::PARTS == 1 ? 2 : part, sums);
        }
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < ROWS; r++) _mm512_store_ps(to + (t * ROWS + r) * TILE, sums[t][r]);
}

// The whole groups of 8 among `rows`, from `begin` on, at most MOST_MANY rows, times one tile or the two of a record: `count`.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES>
void tile_many(const Matrix& w, int64_t tile, int64_t count, const Activations& x, int64_t begin, int64_t rows, float* y, const float* add,
               int64_t stride) {
    using Block = std::conditional_t<BYTES, NibbleBlock<MINIMUM, SUPERS>, WideBlock<BITS, GROUP, MINIMUM, SUPERS>>;
    constexpr int64_t CHUNK = BYTES ? NIBBLE_CHUNK : WIDE_CHUNK;
    constexpr Record AT(BITS, GROUP, MINIMUM, SUPERS);
    constexpr int T = MOST_TILES;
    const int64_t blocks = w.inputs / BLOCK;
    const uint8_t* record = AT.of(w, tile, 0);
    alignas(64) float totals[MOST_MANY * T * TILE];
    Block wide[CHUNK][T];
    for (int64_t b = 0; b < blocks; b += CHUNK) {
        const int64_t some = blocks - b < CHUNK ? blocks - b : CHUNK;
        for (int64_t i = 0; i < some; i++, record += AT.size) {
            ask_ahead<AT.size>(record);
            for (int t = 0; t < T; t++) wide[i][t].widen(w, record, tile / T * T + t, b + i, record + t * AT.weights);
        }
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t first = (begin + row) * blocks + b * ROWS;
            chunk_rows<T>(wide, some, x.q + first * 2 * BLOCK, x.scale + first, x.sums + first, b == 0, totals + row * T * TILE);
        }
    }
    for (int64_t row = 0; row < rows; row += ROWS)
        for (int64_t t = 0; t < count; t++) {
            const __m512* sums = reinterpret_cast<const __m512*>(totals + (row * T + (tile + t) % T * ROWS) * TILE);
            store_sums(w, tile + t, begin + row, ROWS, sums, y + t * TILE, add ? add + t * TILE : nullptr, stride);
        }
}
