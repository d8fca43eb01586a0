// Products of many rows in pairs of inputs (see four_dots in kernels.cpp, which includes this): the weights of some blocks of
// a tile are widened to 16 bits once, stay in the first cache, and serve all of the rows. The same numbers as tile_rows.

constexpr int LEAST_MANY = 32;  // rows from which on widening apart pays
constexpr int MOST_MANY = 256;  // rows that share it: their sums are 16 KiB
constexpr int CHUNK = 6;        // blocks that are widened at a time, in about 7 KiB

template <int PARTS>
struct WideBlock {
    __m512i even[8], odd[8];
    __m512i products[PARTS];  // of the paired inputs
    __m512 scale[PARTS], minimum[PARTS];
};

template <int BITS, int GROUP, bool MINIMUM, bool SUPERS>
inline void widen_block(const Matrix& w, int64_t tile, int64_t b, WideBlock<BLOCK / GROUP>& to) {
    constexpr int PARTS = BLOCK / GROUP, LINES = BITS;
    const uint8_t* q = w.q + (tile * (w.inputs / BLOCK) + b) * 64 * LINES;
    for (int line = 0; line < LINES; line++) _mm_prefetch(reinterpret_cast<const char*>(q) + AHEAD + 64 * line, _MM_HINT_T0);
    for (int part = 0; part < PARTS; part++) {
        group_factors<GROUP, MINIMUM, SUPERS>(w, tile, b, part, to.scale[part], to.minimum[part]);
        to.products[part] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = part * 8 / PARTS; j < (part + 1) * 8 / PARTS; j++) {
            words<BITS>(q, j, to.even[j], to.odd[j]);
            if (j % 4 < PAIRS) to.products[part] = add_products(to.products[part], to.even[j], to.odd[j]);
        }
    }
}

// to[8][16] += `count` blocks times 8 rows; nothing is there before the first of them.
template <int PARTS>
void chunk_rows(const WideBlock<PARTS>* w, int64_t count, const int8_t* x, const float* scales, const BlockSums* block_sums, bool first,
                float* to) {
    __m512 sums[ROWS];
    for (int r = 0; r < ROWS; r++) sums[r] = first ? _mm512_setzero_ps() : _mm512_load_ps(to + r * TILE);
    for (int64_t b = 0; b < count; b++, w++, x += ROWS * 2 * BLOCK, scales += ROWS, block_sums += ROWS) {
        const auto vectors = [&](int j, __m512i& even, __m512i& odd) {
            even = w->even[j];
            odd = w->odd[j];
        };
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            const int which = PARTS == 1 ? 2 : part;
            __m512i dots[ROWS];
            for (int r = 0; r < ROWS; r++)
                dots[r] = _mm512_sub_epi32(_mm512_set1_epi32(static_cast<int32_t>(block_sums[r].cross[which])), w->products[part]);
#pragma GCC unroll 2
            for (int j = part * 8 / PARTS; j < (part + 1) * 8 / PARTS; j += 4) four_dots(vectors, x, j, dots);
            for (int r = 0; r < ROWS; r++) {
                const __m512 dot = _mm512_cvtepi32_ps(dots[r]);
                sums[r] = _mm512_fmadd_ps(dot, _mm512_mul_ps(w->scale[part], _mm512_set1_ps(scales[r])), sums[r]);
                sums[r] = _mm512_fmadd_ps(w->minimum[part], _mm512_set1_ps(block_sums[r].sum[which]), sums[r]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++) _mm512_store_ps(to + r * TILE, sums[r]);
}

// The whole groups of 8 among `rows`, from `begin` on; at most MOST_MANY rows.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS>
void tile_many(const Matrix& w, int64_t tile, const Activations& x, int64_t begin, int64_t rows, float* y, const float* add, int64_t stride) {
    const int64_t blocks = w.inputs / BLOCK;
    alignas(64) float totals[MOST_MANY * TILE];
    WideBlock<BLOCK / GROUP> wide[CHUNK];
    for (int64_t b = 0; b < blocks; b += CHUNK) {
        const int64_t count = blocks - b < CHUNK ? blocks - b : CHUNK;
        for (int64_t i = 0; i < count; i++) widen_block<BITS, GROUP, MINIMUM, SUPERS>(w, tile, b + i, wide[i]);
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t first = (begin + row) * blocks + b * ROWS;
            chunk_rows(wide, count, x.q + first * 2 * BLOCK, x.scale + first, x.sums + first, b == 0, totals + row * TILE);
        }
    }
    for (int64_t row = 0; row < rows; row += ROWS)
        store_sums(w, tile, begin + row, ROWS, reinterpret_cast<const __m512*>(totals + row * TILE), y, add, stride);
}
