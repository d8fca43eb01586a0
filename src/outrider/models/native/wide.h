// Products in registers of 512 bits: some rows times the two tiles of a record. A part of kernels.cpp, in its namespace.
//
// An activation is broadcast from memory into all lanes, and a processor does that twice a cycle, as often as it multiplies on Zen 5: so
// two tiles share each of them (LOG, 2026-11-19, two tiles). The sums of 8 rows and 2 tiles stay in registers.

constexpr int64_t AHEAD = 6 << 10;  // bytes that are asked for before they are used, in whole records; 10 KB: 0 to 3 % slower

ALWAYS_INLINE __m512 halves(const uint16_t* values) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
}

// Of a group, at `values`; `above`: of its super-block.
template <bool SUPERS>
ALWAYS_INLINE __m512 group_values(const uint8_t* values, const uint16_t* above) {
    if (!SUPERS) return halves(reinterpret_cast<const uint16_t*>(values));
    __m128i small = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(small)), halves(above));
}

// Of one group of a block of a tile, in its record: scale * (q - zero) = scale * q + minimum.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS>
ALWAYS_INLINE void group_factors(const Matrix& w, const uint8_t* record, int64_t tile, int64_t b, int part, __m512& scale, __m512& minimum) {
    constexpr Record AT(BITS, GROUP, MINIMUM, SUPERS);
    const int64_t within = part * TILE * (SUPERS ? 1 : 2);
    const uint16_t* above = SUPERS ? super_of(w.super_scales, w, tile, b) : nullptr;
    scale = group_values<SUPERS>(record + AT.scales_at(tile) + within, above);
    if (!MINIMUM) {
        minimum = _mm512_mul_ps(scale, _mm512_set1_ps(static_cast<float>(-w.zero)));
        return;
    }
    above = SUPERS ? super_of(w.super_minimums, w, tile, b) : nullptr;
    minimum = group_values<SUPERS>(record + AT.minimums_at(tile) + within, above);
}

// Vector j of a block; at 4 bits j and j + 4 lie in the same bytes, at 6 bits the last of each four in the upper two bits of the others.
template <int BITS>
ALWAYS_INLINE __m512i vector(const uint8_t* q, int j) {
    if (BITS == 8) return _mm512_loadu_si512(q + 64 * j);
    if (BITS == 4) {
        const __m512i both = _mm512_loadu_si512(q + 64 * (j % 4));
        return _mm512_and_si512(j < 4 ? both : _mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
    }
    const __m512i upper = _mm512_set1_epi8(static_cast<char>(192));  // the only mask: registers are scarce
    const auto bytes = [&](int place) __attribute__((always_inline)) { return _mm512_loadu_si512(q + 64 * (j / 4 * 3 + place)); };
    if (j % 4 < 3) return _mm512_andnot_si512(upper, bytes(j % 4));
    constexpr int OR_AND = 0xf8;  // a | (b & c)
    __m512i all = _mm512_srli_epi16(_mm512_and_si512(bytes(0), upper), 2);
    all = _mm512_srli_epi16(_mm512_ternarylogic_epi32(all, bytes(1), upper, OR_AND), 2);
    return _mm512_srli_epi16(_mm512_ternarylogic_epi32(all, bytes(2), upper, OR_AND), 2);
}

// Four activations in every lane.
ALWAYS_INLINE __m512i four(const int8_t* x) {
    int32_t bytes;
    std::memcpy(&bytes, x, 4);
    return _mm512_set1_epi32(bytes);
}

#if VNNI
struct Nothing {
    void operator()(int) const {}
};

// Vectors [from, to) of a block of T tiles times the activations of R rows: 256 * high parts + low parts. between(j): called before each.
template <int BITS, int T, int R, class Between = Nothing>
ALWAYS_INLINE void block_dots(const uint8_t* const (&q)[T], const int8_t* x, int from, int to, __m512i (&dots)[T][R], const Between& between = {}) {
    constexpr bool FEW = T * R <= 8;  // sums of low parts of their own: so the next product need not wait for the last
    __m512i low[T][R];
    const auto add_part = [&](const int8_t* part, int j, __m512i (&sums)[T][R]) __attribute__((always_inline)) {
        __m512i v[T];
        for (int t = 0; t < T; t++) v[t] = vector<BITS>(q[t], j);
        for (int r = 0; r < R; r++) {
            const __m512i same = four(part + r * 2 * BLOCK + 4 * j);
            for (int t = 0; t < T; t++) sums[t][r] = _mm512_dpbusd_epi32(sums[t][r], v[t], same);
        }
    };
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) dots[t][r] = low[t][r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = from; j < to; j++) {
        between(j);
        add_part(x, j, dots);
        if (FEW) add_part(x + BLOCK, j, low);
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) {
            dots[t][r] = _mm512_slli_epi32(dots[t][r], 8);
            if (FEW) dots[t][r] = _mm512_add_epi32(dots[t][r], low[t][r]);
        }
    if (FEW) return;
#pragma GCC unroll 8
    for (int j = from; j < to; j++) add_part(x + BLOCK, j, dots);
}
#endif

// Vector j of a block as two of 16 outputs x 2 inputs, in 16 bits: those with even numbers and those with odd ones.
template <int BITS>
ALWAYS_INLINE void words(const uint8_t* q, int j, __m512i& even, __m512i& odd) {
    if (BITS == 6 && j % 4 < 3) {
        const __m512i both = _mm512_loadu_si512(q + 64 * (j / 4 * 3 + j % 4)), low = _mm512_set1_epi16(63);
        even = _mm512_and_si512(both, low);
        odd = _mm512_and_si512(_mm512_srli_epi16(both, 8), low);
        return;
    }
    const __m512i both = BITS == 4 ? _mm512_loadu_si512(q + 64 * (j % 4)) : vector<BITS>(q, j);
    if (BITS != 4) {
        even = _mm512_and_si512(both, _mm512_set1_epi16(BITS == 6 ? 63 : 255));
        odd = _mm512_srli_epi16(both, 8);
    } else if (j < 4) {
        even = _mm512_and_si512(both, _mm512_set1_epi16(15));
        odd = _mm512_and_si512(_mm512_srli_epi16(both, 8), _mm512_set1_epi16(15));
    } else {
        even = _mm512_and_si512(_mm512_srli_epi16(both, 4), _mm512_set1_epi16(15));
        odd = _mm512_srli_epi16(both, 12);
    }
}

// sums + products of 16 bits, in pairs
ALWAYS_INLINE __m512i add_products(__m512i sums, __m512i a, __m512i b) {
#if VNNI
    return _mm512_dpwssd_epi32(sums, a, b);
#else
    return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
#endif
}

// dots += a vector of each of T tiles, paired or by halves, times the activations of R rows at `x`.
template <int T, int R>
ALWAYS_INLINE void add_half(const __m512i (&half)[T], const int8_t* x, __m512i (&dots)[T][R]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const __m512i same = four(x + r * 2 * BLOCK);
        for (int t = 0; t < T; t++) dots[t][r] = add_products(dots[t][r], half[t], same);
    }
}

template <bool PAIR, int T, int R>
ALWAYS_INLINE void add_vector(const __m512i (&even)[T], const __m512i (&odd)[T], const int8_t* x, __m512i (&dots)[T][R]) {
    if (!PAIR) {
        add_half(even, x, dots);
        add_half(odd, x + BLOCK, dots);
        return;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const __m512i first = four(x + r * 2 * BLOCK), second = four(x + r * 2 * BLOCK + BLOCK);
        for (int t = 0; t < T; t++)
            dots[t][r] = add_products(dots[t][r], _mm512_add_epi16(first, odd[t]), _mm512_add_epi16(second, even[t]));
    }
}

// The same numbers as block_dots with fewer multiplications (Winograd 1968):
//   x0 w0 + x1 w1 = (x0 + w1) (x1 + w0) - x0 x1 - w0 w1
// where x0 x1 does not depend on the output nor w0 w1 on the row. x + w fits 16 bits (32512 + 255 = 32767), and a sum that
// does not fit 32 bits loses only what is subtracted again. Of each four vectors the first PAIRS are paired, and the halves of
// the last come between them: so the units that only add and those that multiply have work at all times.
// dots += vectors [from, from + 4) of a block, which `vectors(j, even, odd)` gives, times the activations of R rows.
template <int T, int R, class Vectors>
ALWAYS_INLINE void four_dots(const Vectors& vectors, const int8_t* x, int from, __m512i (&dots)[T][R]) {
    __m512i even[T], odd[T], last_even[T], last_odd[T];
    x += 4 * from;
    vectors(from + 3, last_even, last_odd);
    vectors(from, even, odd);
    add_vector<(PAIRS > 0)>(even, odd, x, dots);
    add_half(last_even, x + 12, dots);
    vectors(from + 1, even, odd);
    add_vector<(PAIRS > 1)>(even, odd, x + 4, dots);
    add_half(last_odd, x + 12 + BLOCK, dots);
    vectors(from + 2, even, odd);
    add_vector<(PAIRS > 2)>(even, odd, x + 8, dots);
}

// `cross`: where the sums begin, of BlockSums::cross; -1: with 0.
template <int BITS, int T, int R>
ALWAYS_INLINE void paired_dots(const uint8_t* const (&q)[T], const int8_t* x, const BlockSums* sums, int cross, int from, int to, __m512i (&dots)[T][R]) {
    __m512i products[T];
    for (int t = 0; t < T; t++) {
        products[t] = _mm512_setzero_si512();
        for (int r = 0; r < R; r++) dots[t][r] = cross < 0 ? products[t] : _mm512_set1_epi32(static_cast<int32_t>(sums[r].cross[cross]));
    }
    const auto vectors = [&](int j, __m512i (&even)[T], __m512i (&odd)[T]) __attribute__((always_inline)) {
        for (int t = 0; t < T; t++) {
            words<BITS>(q[t], j, even[t], odd[t]);
            if (j % 4 < PAIRS) products[t] = add_products(products[t], even[t], odd[t]);
        }
    };
#pragma GCC unroll 2
    for (int j = from; j < to; j += 4) four_dots(vectors, x, j, dots);
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) dots[t][r] = _mm512_sub_epi32(dots[t][r], products[t]);
}

#if VNNI
#include "bytes.h"
#endif

// sums += products of a group of a block, which are whole numbers, with the scales of the rows and of the T tiles.
template <bool MINIMUM, int T, int R>
ALWAYS_INLINE void add_group(const __m512i (&dots)[T][R], const __m512 (&scale)[T], const __m512 (&minimum)[T], const float* scales,
                      const BlockSums* block_sums, int which, __m512 (&sums)[T][R]) {
    for (int r = 0; r < R; r++) {
        const __m512 same = _mm512_set1_ps(scales[r]), all = _mm512_set1_ps(MINIMUM ? block_sums[r].sum(which) : 0.0f);
        for (int t = 0; t < T; t++) {
            sums[t][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t][r]), _mm512_mul_ps(scale[t], same), sums[t][r]);
            if (MINIMUM) sums[t][r] = _mm512_fmadd_ps(minimum[t], all, sums[t][r]);
        }
    }
}

// Ask memory for the record that lies AHEAD of this one: for parts [part, end) of eight.
template <int64_t SIZE>
ALWAYS_INLINE void ask_ahead(const uint8_t* record, int part = 0, int end = 8) {
    const char* at = reinterpret_cast<const char*>(record) + AHEAD / SIZE * SIZE;
    for (int64_t line = part * SIZE / LINE / 8; line < end * SIZE / LINE / 8; line++) _mm_prefetch(at + line * LINE, _MM_HINT_T0);
}

// R rows times the two tiles of `tile`'s records.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES, int R>
void tile_rows(const Matrix& w, int64_t tile, const Activations& x, int64_t row, __m512 (&to)[MOST_TILES][ROWS]) {
    constexpr int T = MOST_TILES, PARTS = BLOCK / GROUP;  // groups in a block
    constexpr Record AT(BITS, GROUP, MINIMUM, SUPERS);
    const int64_t blocks = w.inputs / BLOCK;
    const uint8_t* record = AT.of(w, tile, 0);
    __m512 sums[T][R];  // local ones stay in registers
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) sums[t][r] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, record += AT.size) {
        // where little else is done, not all at once: a processor forgets prefetches that it has no place for (LOG, 2026-11-19)
        constexpr bool SPREAD = VNNI && (BYTES ? !(BITS == 4 && BYTE_PAIRS && R >= LEAST_BYTE_PAIRED) : !(PAIRED && R >= LEAST_PAIRED));
        if (!SPREAD) ask_ahead<AT.size>(record);
        [[maybe_unused]] const auto ask_part = [&](int j) __attribute__((always_inline)) { ask_ahead<AT.size>(record, j, j + 1); };
        const uint8_t* const q[T] = {record, record + AT.weights};
        const int64_t first = row * blocks + b * R;
        const int8_t* xq = x.q + first * 2 * BLOCK;
        const BlockSums* block_sums = x.sums + first;
#pragma GCC unroll 1  // GCC's own choice takes up to twice as long
        for (int part = 0; part < PARTS; part++) {
            __m512 scale[T], minimum[T];
            for (int t = 0; t < T; t++) group_factors<BITS, GROUP, MINIMUM, SUPERS>(w, record, tile / T * T + t, b, part, scale[t], minimum[t]);
            __m512i dots[T][R];
            constexpr bool SUBTRACTED = start_of(BYTES, BITS, GROUP, MINIMUM, 0) >= 0;  // the zero, in whole numbers
            const int from = part * 8 / PARTS, end = (part + 1) * 8 / PARTS;
            [[maybe_unused]] const int start = start_of(BYTES, BITS, GROUP, MINIMUM, part);
#if VNNI
            if constexpr (BYTES && BITS == 4 && BYTE_PAIRS && R >= LEAST_BYTE_PAIRED) paired_nibble_dots<MINIMUM>(q, xq, block_sums, dots);
            else if constexpr (BYTES) byte_dots<BITS>(q, xq, block_sums, start, from, end, dots, ask_part);
            else if constexpr (PAIRED && R >= LEAST_PAIRED) paired_dots<BITS>(q, xq, block_sums, GROUP == 32 ? 2 : part, from, end, dots);
            else block_dots<BITS>(q, xq, from, end, dots, ask_part);
#else
            paired_dots<BITS>(q, xq, block_sums, start, from, end, dots);
#endif
            add_group<!SUBTRACTED>(dots, scale, minimum, x.scale + first, block_sums, GROUP == 32 ? 2 : part, sums);
        }
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) to[t][r] = sums[t][r];
}

template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES>
void tile_some(const Matrix& w, int64_t tile, const Activations& x, int64_t row, int64_t rows, __m512 (&sums)[MOST_TILES][ROWS]) {
    switch (rows) {
        case 1: return tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 1>(w, tile, x, row, sums);
        case 2: return tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 2>(w, tile, x, row, sums);
        case 3: return tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 3>(w, tile, x, row, sums);
        case 4: return tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 4>(w, tile, x, row, sums);
        case 5: return tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 5>(w, tile, x, row, sums);
        case 6: return tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 6>(w, tile, x, row, sums);
        case 7: return tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 7>(w, tile, x, row, sums);
        default: return tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 8>(w, tile, x, row, sums);
    }
}

ALWAYS_INLINE void store_sums(const Matrix& w, int64_t tile, int64_t row, int64_t rows, const __m512* sums, float* y, const float* add,
                       int64_t stride) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t place = (row + r) * stride;
        __m512 sum = sums[r];
        if (w.bias) sum = _mm512_add_ps(sum, _mm512_loadu_ps(w.bias + tile * TILE));
        if (add) sum = _mm512_add_ps(sum, _mm512_loadu_ps(add + place));
        _mm512_storeu_ps(y + place, sum);
    }
}

#if VNNI && PAIRED
#include "many.h"
#endif
#if AMX
#include "amx.h"
#endif

// One tile, or the two of a record: `count`.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES>
void tile_all(const Matrix& w, int64_t tile, int64_t count, const Activations& x, Rows some, float* y, const float* add, int64_t stride) {
#if VNNI && PAIRED
    if constexpr (!BYTES || BITS == 4)
        while (some.end - some.begin >= LEAST_MANY) {
            const int64_t left = (some.end - some.begin) / ROWS * ROWS, rows = left < MOST_MANY ? left : MOST_MANY;
            tile_many<BITS, GROUP, MINIMUM, SUPERS, BYTES>(w, tile, count, x, some.begin, rows, y, add, stride);
            some.begin += rows;
        }
#endif
    __m512 sums[MOST_TILES][ROWS];
    for (int64_t row = some.begin, rows; row < some.end; row += rows) {
#if AMX
        rows = amx_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES>(w, tile, count, x, row, some, y, add, stride);
        if (rows) continue;
#endif
        rows = group_rows(row, some.all);
        tile_some<BITS, GROUP, MINIMUM, SUPERS, BYTES>(w, tile, x, row, rows, sums);
        for (int64_t t = 0; t < count; t++)
            store_sums(w, tile + t, row, rows, sums[(tile + t) % MOST_TILES], y + t * TILE, add ? add + t * TILE : nullptr, stride);
    }
}
