// Activations rounded to 16 bits or 8, in the forms that products read. A part of kernels.cpp, in its namespace.

// A block that no 16 bits can stand for: all but zero, or with an infinity or a NaN in it, which then shows in every output.
void degenerate_block(float value, bool bytes, int8_t* q, float* scale, BlockSums* sums) {
    std::memset(q, 0, 2 * BLOCK);
    *sums = {{{value, value}}, value, {0, 0, 0}};
    if (bytes) sums->nibbles = 0;
    *scale = value;
}

enum class Rounding { WORDS, PAIRED_WORDS, BYTES, PAIRED_BYTES };

constexpr bool to_bytes(Rounding kind) { return kind == Rounding::BYTES || kind == Rounding::PAIRED_BYTES; }

// How the rows of a group are rounded, and multiplied with weights of 4 bits.
Rounding rounding_of(int64_t rows, int64_t bits) {
    if (bits == 8) return BYTE_PAIRS && rows >= LEAST_BYTE_PAIRED ? Rounding::PAIRED_BYTES : Rounding::BYTES;
    return paired_rows(rows, bits) ? Rounding::PAIRED_WORDS : Rounding::WORDS;
}

#if WIDE && VNNI
// Two halves of a block, rounded -> bytes, and the sum of each half. Returns what products of pairs have too much, with a minus: of the
// inputs of the first PAIRED_VECTORS vectors, -((x0 + 128) x1 - 8 (x0 + x1)), see bytes.h.
template <int PAIRED_VECTORS>
inline int32_t store_bytes(__m512i first, __m512i last, int8_t* q, int32_t (&count)[2]) {
    const __m128i a = _mm512_cvtepi32_epi8(first), b = _mm512_cvtepi32_epi8(last), ones = _mm_set1_epi8(1), none = _mm_setzero_si128();
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_setzero_si256());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + BLOCK), a);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + BLOCK + 16), b);
    const __m128i sums_a = _mm_dpbusd_epi32(none, ones, a), sums_b = _mm_dpbusd_epi32(none, ones, b);  // of each vector's four
    const __m128i pairs = _mm_dpbusd_epi32(none, _mm_xor_si128(a, _mm_set1_epi8(-128)), b);            // x0 + 128 without a sign
    const __m128i zeros = _mm_slli_epi32(_mm_add_epi32(sums_a, sums_b), 3);
    const __m128i starts = _mm_maskz_sub_epi32((1 << PAIRED_VECTORS) - 1, zeros, pairs);
    const __m128i two = _mm_hadd_epi32(sums_a, sums_b), all = _mm_hadd_epi32(two, _mm_hadd_epi32(starts, none));
    count[0] = _mm_cvtsi128_si32(all);
    count[1] = _mm_extract_epi32(all, 1);
    return _mm_extract_epi32(all, 2);
}
#endif

#if WIDE && VNNI
constexpr struct WordOrder {  // of the 32 low words of two halves of a block: as they come, or those with even places first
    alignas(64) uint16_t plain[BLOCK] = {}, apart[BLOCK] = {};
    constexpr WordOrder() {
        for (int i = 0; i < BLOCK; i++) {
            plain[i] = static_cast<uint16_t>(2 * i);
            apart[i % 2 * (BLOCK / 2) + i / 2] = static_cast<uint16_t>(2 * i);
        }
    }
} WORD_ORDER;

// Two halves of a block, rounded -> numbers of 16 bits, those with even places first, and the sum of each half. To `cross` goes minus
// what products of pairs have too much.
inline void store_apart(__m512i first, __m512i last, int8_t* q, int32_t (&count)[2], uint32_t (&cross)[3]) {
    const __m512i all = _mm512_permutex2var_epi16(first, _mm512_load_si512(WORD_ORDER.apart), last);
    _mm512_storeu_si512(q, all);
    const __m256i even = _mm512_castsi512_si256(all), odd = _mm512_extracti64x4_epi64(all, 1), ones = _mm256_set1_epi16(1);
    const __m256i sums = _mm256_dpwssd_epi32(_mm256_madd_epi16(even, ones), odd, ones);  // of four numbers each
    constexpr int PAIRED_VECTORS = (1 << PAIRS) - 1;
    const __m256i products = _mm256_maskz_madd_epi16(PAIRED_VECTORS | PAIRED_VECTORS << 4, even, odd);
    const __m256i two = _mm256_hadd_epi32(sums, products), four = _mm256_hadd_epi32(two, two);  // of each half: sum, product
    const __m128i halves[2] = {_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1)};
    for (int i = 0; i < 2; i++) {
        const uint64_t both = static_cast<uint64_t>(_mm_cvtsi128_si64(halves[i]));
        count[i] = static_cast<int32_t>(both);
        cross[i] = -static_cast<uint32_t>(both >> 32);
    }
}

// The same -> 32 high parts, then 32 low ones.
inline void store_parts(__m512i first, __m512i last, int8_t* q, int32_t (&count)[2]) {
    const __m512i all = _mm512_permutex2var_epi16(first, _mm512_load_si512(WORD_ORDER.plain), last);
    const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(all, _mm512_set1_epi16(128)), 8);  // so that the low part is in [-128, 127]
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm512_cvtepi16_epi8(high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + BLOCK), _mm512_cvtepi16_epi8(all));
    const __m512i sums = _mm512_madd_epi16(all, _mm512_set1_epi16(1));
    const __m256i two = _mm256_hadd_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1)), four = _mm256_hadd_epi32(two, two);
    const __m128i eight = _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));  // hadd has halves of each half
    count[0] = _mm_cvtsi128_si32(eight);
    count[1] = _mm_extract_epi32(eight, 1);
}
#endif

// One row of 32 inputs -> 16 bits or 8, a scale, and the sums of both halves and of all. `range`: the largest number.
template <Rounding KIND>
void quantise_block(const float* x, float range, int8_t* q, float* scale, BlockSums* sums) {
    int32_t count[2];
    [[maybe_unused]] int32_t pairs = 0;  // minus what paired inputs of 8 bits add to a product
    // in 16 bits: those with even places, then those with odd ones
    [[maybe_unused]] constexpr bool WORDS_APART = KIND == Rounding::PAIRED_WORDS || (to_bytes(KIND) && WIDE && !VNNI);
#if WIDE
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    // The bits of magnitudes are ordered as these are, and an infinity and then a NaN come last.
    const int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(a)), _mm512_castps_si512(_mm512_abs_ps(b))));
    float most;
    std::memcpy(&most, &bits, 4);
    if (!(most < INFINITY)) return degenerate_block(NAN, to_bytes(KIND), q, scale, sums);
    if (most < LEAST) return degenerate_block(0.0f, to_bytes(KIND), q, scale, sums);
    const __m512 inverse = _mm512_set1_ps(range / most);
    const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), last = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
#if VNNI
    if (KIND == Rounding::PAIRED_WORDS) store_apart(first, last, q, count, sums->cross);
    else if (KIND == Rounding::WORDS) store_parts(first, last, q, count);
    else pairs = store_bytes<KIND == Rounding::PAIRED_BYTES ? BYTE_PAIRS : 0>(first, last, q, count);
#else
    for (int i = 0; i < 2; i++) {
        const __m512i all = i ? last : first;
        if (WORDS_APART) {
            const __m256i words = _mm512_cvtepi32_epi16(all);
            const __m256i apart = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
            const __m256i sorted = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(words, apart), 0xd8);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * i), _mm256_castsi256_si128(sorted));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 32 + 16 * i), _mm256_extracti128_si256(sorted, 1));
        } else {
            const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(all, _mm512_set1_epi32(128)), 8);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * i), _mm512_cvtepi32_epi8(high));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 32 + 16 * i), _mm512_cvtepi32_epi8(_mm512_sub_epi32(all, _mm512_slli_epi32(high, 8))));
        }
        count[i] = _mm512_reduce_add_epi32(all);
    }
    if (KIND == Rounding::PAIRED_WORDS) sums->cross[0] = sums->cross[1] = 0;
#endif
#else
    const Lanes a = load(x), b = load(x + LANES), zero = all_lanes(0.0f);
    const float most = largest_of(larger(larger(a, sub(zero, a)), larger(b, sub(zero, b))));
    if (sum_of(add(sub(a, a), sub(b, b))) != 0.0f) return degenerate_block(NAN, to_bytes(KIND), q, scale, sums);  // x - x is 0 or a NaN
    if (most < LEAST) return degenerate_block(0.0f, to_bytes(KIND), q, scale, sums);
    const Lanes inverse = all_lanes(range / most);
    for (int i = 0; i < 2; i++) {
        int32_t all[LANES];
        nearest_integers(mul(i ? b : a, inverse), all);
        count[i] = 0;
        int16_t words[LANES];
        for (int k = 0; k < LANES; k++) {
            const int32_t high = (all[k] + 128) >> 8;  // so that the low part is in [-128, 127]
            if (!WORDS_APART) {
                q[LANES * i + k] = static_cast<int8_t>(high);
                q[BLOCK + LANES * i + k] = static_cast<int8_t>(all[k] - high * 256);
            }
            words[k % 2 * (LANES / 2) + k / 2] = static_cast<int16_t>(all[k]);
            count[i] += all[k];
        }
        for (int odd = 0; WORDS_APART && odd < 2; odd++) std::memcpy(q + odd * BLOCK + i * LANES, words + odd * (LANES / 2), LANES);
    }
#endif
    *scale = most / range;
    sums->all = *scale * (count[0] + count[1]);
    for (int i = 0; i < 2; i++) {
        if (to_bytes(KIND)) sums->cross[i] = static_cast<uint32_t>(-SIX_ZERO * count[i]);
        else sums->half[i] = *scale * count[i];
    }
    if (to_bytes(KIND)) sums->cross[2] = static_cast<uint32_t>(pairs - NIBBLE_ZERO * (count[0] + count[1]));
    if (KIND == Rounding::PAIRED_BYTES) sums->nibbles = pairs;
    if (WIDE && KIND == Rounding::PAIRED_WORDS) sums->cross[2] = sums->cross[0] + sums->cross[1];
}

using QuantiseFunction = void (*)(const float*, float, int8_t*, float*, BlockSums*);

// For a group of so many rows.
QuantiseFunction quantise_function(int64_t rows, int64_t bits) {
    switch (rounding_of(rows, bits)) {
        case Rounding::PAIRED_WORDS: return quantise_block<PAIRED ? Rounding::PAIRED_WORDS : Rounding::WORDS>;
        case Rounding::BYTES: return quantise_block<Rounding::BYTES>;
        case Rounding::PAIRED_BYTES: return quantise_block<BYTE_PAIRS ? Rounding::PAIRED_BYTES : Rounding::BYTES>;
        default: return quantise_block<Rounding::WORDS>;
    }
}

// Blocks [begin, end) of one of the `rows` rows of a pass, as products with `w` read them; `x`: from the first of them on.
void quantise_blocks(const JoinedMatrices& w, const float* x, int64_t begin, int64_t end, int64_t row, int64_t rows, const Activations& to) {
    const int64_t blocks = w.parts[0].inputs / BLOCK, first = row / ROWS * ROWS, step = group_rows(first, rows);
    const QuantiseFunction quantise = quantise_function(step, w.activations);
    const float range = w.activations == 8 ? MOST_BYTE : MOST;
    for (int64_t b = begin; b < end; b++, x += BLOCK) {
        const int64_t at = first * blocks + b * step + row - first;
        quantise(x, range, to.q + at * 2 * BLOCK, to.scale + at, to.sums + at);
#if AMX
        if (to.amx) store_amx(w, to.q + at * 2 * BLOCK, b, blocks, row, rows, to.amx);
#endif
    }
}

void quantise_row(const JoinedMatrices& w, const float* x, int64_t row, int64_t rows, const Activations& to) {
    quantise_blocks(w, x, 0, w.parts[0].inputs / BLOCK, row, rows, to);
}
