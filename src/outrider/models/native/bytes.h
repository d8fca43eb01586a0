// Dot products of activations of 8 bits. A part of kernels.cpp, in its namespace.
//
// With weights of 4 bits inputs can be multiplied in pairs as in four_dots, but in bytes. With w' = w - 8:
//   x0 w0' + x1 w1' = (x0 + 128 + w1') (x1 + w0') - (x0 + 128) x1 - (128 + w1') w0'
// where the second product does not depend on the output (store_bytes has it), nor the third on the row. Activations are at most
// 120, so the first factor is in [0, 255] and the other in [-128, 127], as the instruction wants them. The input that shares a byte
// of weights with x0, 16 places later, is x1: so weights need no other layout.

// Vectors [from, to) of a block of T tiles times the activations of R rows. `start`: where the sums begin, of BlockSums::cross; -1:
// with 0. between(j): called before each.
template <int BITS, int T, int R, class Between>
ALWAYS_INLINE void byte_dots(const uint8_t* const (&q)[T], const int8_t* x, const BlockSums* sums, int start, int from, int to, __m512i (&dots)[T][R],
                             const Between& between) {
    constexpr int CHAINS = T * R <= 2 ? 2 : 1;  // few rows: two sums for each
    __m512i chains[T][R][CHAINS];
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < CHAINS; c++) chains[t][r][c] = _mm512_setzero_si512();
            if (start >= 0) chains[t][r][0] = _mm512_set1_epi32(static_cast<int32_t>(sums[r].cross[start]));
        }
#pragma GCC unroll 8
    for (int j = from; j < to; j++) {
        between(j);
        __m512i v[T];
        for (int t = 0; t < T; t++) v[t] = vector<BITS>(q[t], j);
        for (int r = 0; r < R; r++) {
            const __m512i same = four(x + r * 2 * BLOCK + BLOCK + 4 * j);
            for (int t = 0; t < T; t++) chains[t][r][j % CHAINS] = _mm512_dpbusd_epi32(chains[t][r][j % CHAINS], v[t], same);
        }
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++)
            dots[t][r] = CHAINS == 2 ? _mm512_add_epi32(chains[t][r][0], chains[t][r][CHAINS - 1]) : chains[t][r][0];
}

// dots += vector j and the one that shares its bytes, of T tiles, times the activations of R rows at `x`.
template <bool PAIR, int T, int R>
ALWAYS_INLINE void add_nibbles(const __m512i (&low)[T], const __m512i (&high)[T], const int8_t* x, __m512i (&dots)[T][R]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const int8_t* at = x + r * 2 * BLOCK;
        const __m512i first = four(at), second = four(at + 16);
        for (int t = 0; t < T; t++) {
            if (PAIR) dots[t][r] = _mm512_dpbusd_epi32(dots[t][r], _mm512_add_epi8(first, high[t]), _mm512_add_epi8(second, low[t]));
            else dots[t][r] = _mm512_dpbusd_epi32(dots[t][r], low[t], first);
        }
    }
    if (PAIR) return;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const __m512i second = four(x + r * 2 * BLOCK + 16);
        for (int t = 0; t < T; t++) dots[t][r] = _mm512_dpbusd_epi32(dots[t][r], high[t], second);
    }
}

// Vectors j and j + 4 of a block: as they are, or as two such factors, whose products are added to `products`.
ALWAYS_INLINE void nibble_vectors(const uint8_t* q, int j, __m512i& low, __m512i& high, __m512i& products) {
    const __m512i both = _mm512_loadu_si512(q + 64 * j), mask = _mm512_set1_epi8(15);
    low = _mm512_and_si512(both, mask);
    high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    if (j >= BYTE_PAIRS) return;
    low = _mm512_sub_epi8(low, _mm512_set1_epi8(NIBBLE_ZERO));
    high = _mm512_add_epi8(high, _mm512_set1_epi8(128 - NIBBLE_ZERO));
    products = _mm512_dpbusd_epi32(products, high, low);
}

// dots += a block of T tiles, whose vectors `vectors(j, low, high)` gives, times the activations of R rows.
template <int T, int R, class Vectors>
ALWAYS_INLINE void add_nibble_block(const Vectors& vectors, const int8_t* x, __m512i (&dots)[T][R]) {
    __m512i low[T], high[T];
    x += BLOCK;  // the low parts
    vectors(0, low, high);
    add_nibbles<(BYTE_PAIRS > 0)>(low, high, x, dots);
    vectors(3, low, high);
    add_nibbles<(BYTE_PAIRS > 3)>(low, high, x + 12, dots);
    vectors(1, low, high);
    add_nibbles<(BYTE_PAIRS > 1)>(low, high, x + 4, dots);
    vectors(2, low, high);
    add_nibbles<(BYTE_PAIRS > 2)>(low, high, x + 8, dots);
}

// Where the sums of a row begin: with minimums weights are q, without q - 8.
template <bool MINIMUM>
ALWAYS_INLINE __m512i nibble_start(const BlockSums& sums) {
    return _mm512_set1_epi32(MINIMUM ? sums.nibbles : static_cast<int32_t>(sums.cross[2]));
}

template <bool MINIMUM, int T, int R>
ALWAYS_INLINE void paired_nibble_dots(const uint8_t* const (&q)[T], const int8_t* x, const BlockSums* sums, __m512i (&dots)[T][R]) {
    __m512i products[T];
    for (int t = 0; t < T; t++) {
        products[t] = _mm512_setzero_si512();
        for (int r = 0; r < R; r++) dots[t][r] = nibble_start<MINIMUM>(sums[r]);
    }
    const auto vectors = [&](int j, __m512i (&low)[T], __m512i (&high)[T]) __attribute__((always_inline)) {
        for (int t = 0; t < T; t++) nibble_vectors(q[t], j, low[t], high[t], products[t]);
    };
    add_nibble_block(vectors, x, dots);
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) dots[t][r] = _mm512_sub_epi32(dots[t][r], products[t]);
}
