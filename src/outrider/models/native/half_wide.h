// Products in registers of 256 bits: the same numbers as wide.h, 8 outputs at a time. A part of kernels.cpp, in its namespace.

constexpr int FEW = 4;  // rows that share one reading of a tile: their sums stay in the 16 registers

inline __m256 halves(const uint16_t* values) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
}

// Of a group, at `values`; `above`: of its super-block.
template <bool SUPERS>
inline __m256 group_values(const uint8_t* values, const uint16_t* above) {
    if (!SUPERS) return halves(reinterpret_cast<const uint16_t*>(values));
    __m128i small = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(small)), halves(above));
}

inline __m256i four(const int8_t* x) {
    int32_t bytes;
    std::memcpy(&bytes, x, 4);
    return _mm256_set1_epi32(bytes);
}

#if HALF_VNNI
inline __m256i add_dots(__m256i sums, __m256i w, __m256i x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, w, x);
#else
    return _mm256_dpbusd_epi32(sums, w, x);
#endif
}

// Vectors [from, to) of 8 outputs of a block times the activations of R rows, STRIDE bytes apart.
template <int BITS, bool BYTES, int R, int STRIDE = 2 * BLOCK>
inline void dots_of(const uint8_t* q, const int8_t* x, int from, int to, __m256i (&dots)[R]) {
    __m256i low[R];
    for (int r = 0; r < R; r++) dots[r] = low[r] = _mm256_setzero_si256();
    for (int j = from; j < to; j++) {
        __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + 64 * (BITS == 8 ? j : j % 4)));
        if (BITS == 4) v = _mm256_and_si256(j < 4 ? v : _mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
        for (int r = 0; r < R; r++) {
            if (!BYTES) dots[r] = add_dots(dots[r], v, four(x + r * STRIDE + 4 * j));
            low[r] = add_dots(low[r], v, four(x + r * STRIDE + BLOCK + 4 * j));
        }
    }
    for (int r = 0; r < R; r++) dots[r] = _mm256_add_epi32(_mm256_slli_epi32(dots[r], 8), low[r]);
}
#else
// 8 outputs of a 4-bit block times the activations of R rows. Eight products of pairs fit 16 bits: 8 * 2 * 15 * 128 < 32768.
template <bool BYTES, int R>
inline void dots4(const uint8_t* q, const int8_t* x, __m256i (&dots)[R]) {
    constexpr int stride = 2 * BLOCK;
    const __m256i ones = _mm256_set1_epi16(1), mask = _mm256_set1_epi8(15);
    __m256i high[R], low[R];
    for (int r = 0; r < R; r++) high[r] = low[r] = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) {  // vectors j and j + 4 lie in the same bytes
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + 64 * j));
        const __m256i first = _mm256_and_si256(both, mask), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
        for (int r = 0; r < R; r++) {
            const int8_t* at = x + r * stride + 4 * j;
            if (!BYTES) high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(first, four(at)));
            low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(first, four(at + BLOCK)));
            if (!BYTES) high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(second, four(at + 16)));
            low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(second, four(at + BLOCK + 16)));
        }
    }
    for (int r = 0; r < R; r++)
        dots[r] = _mm256_add_epi32(_mm256_slli_epi32(_mm256_madd_epi16(high[r], ones), 8), _mm256_madd_epi16(low[r], ones));
}

// The same of vectors [from, to) of an 8-bit block, whose pairs would not fit: activations of 16 bits, STRIDE bytes from row
// to row.
template <int R, int STRIDE = 2 * BLOCK>
inline void dots8(const uint8_t* q, const int16_t* x, int from, int to, __m256i (&dots)[R]) {
    __m256i left[R], right[R];  // of the first 4 outputs and the last 4: two sums for each
    for (int r = 0; r < R; r++) left[r] = right[r] = _mm256_setzero_si256();
    for (int j = from; j < to; j++) {
        const __m128i* at = reinterpret_cast<const __m128i*>(q + 64 * j);
        const __m256i first = _mm256_cvtepu8_epi16(_mm_loadu_si128(at)), last = _mm256_cvtepu8_epi16(_mm_loadu_si128(at + 1));
        for (int r = 0; r < R; r++) {
            int64_t bits;
            std::memcpy(&bits, reinterpret_cast<const int8_t*>(x) + r * STRIDE + 8 * j, 8);
            const __m256i same = _mm256_set1_epi64x(bits);
            left[r] = _mm256_add_epi32(left[r], _mm256_madd_epi16(first, same));
            right[r] = _mm256_add_epi32(right[r], _mm256_madd_epi16(last, same));
        }
    }
    for (int r = 0; r < R; r++)  // the sum of two lanes each, in the order of the outputs
        dots[r] = _mm256_permute4x64_epi64(_mm256_hadd_epi32(left[r], right[r]), 0xd8);
}

// 256 * high parts + low parts of one block of a row.
inline void joined_parts(const int8_t* x, int16_t* to) {
    for (int i = 0; i < BLOCK; i += 16) {
        __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i)));
        __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + BLOCK + i)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_add_epi16(_mm256_slli_epi16(high, 8), low));
    }
}
#endif

// Half of a tile: 8 outputs from `half` * 8 on. `begin`: where the first row's activations begin; those of its next block
// come `step` places later.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES, int R>
void tile_rows(const Matrix& w, int64_t tile, int half, const Activations& x, int64_t begin, int64_t step, __m256* to) {
    __m256 sums[R];
    const int64_t blocks = w.inputs / BLOCK;
    constexpr int PARTS = BLOCK / GROUP, NUMBER = SUPERS ? 1 : 2;  // bytes of a scale
    constexpr Record AT(BITS, GROUP, MINIMUM, SUPERS);
    const uint8_t* record = AT.of(w, tile, 0);
    for (int r = 0; r < R; r++) sums[r] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, record += AT.size) {
        const int64_t first = begin + b * step;
        const uint8_t* q = record + tile % 2 * AT.weights + 32 * half;
        const int8_t* xq = x.q + first * 2 * BLOCK;
#if !HALF_VNNI
        int16_t whole[R][BLOCK];
        if (BITS == 8)
            for (int r = 0; r < R; r++) joined_parts(xq + r * 2 * BLOCK, whole[r]);
#endif
        for (int part = 0; part < PARTS; part++) {
            const int64_t place = (part * TILE + 8 * half) * NUMBER;
            const auto above = [&](const uint16_t* supers) { return SUPERS ? super_of(supers, w, tile, b) + 8 * half : nullptr; };
            const __m256 scale = group_values<SUPERS>(record + AT.scales_at(tile) + place, above(w.super_scales));
            const __m256 minimum = MINIMUM ? group_values<SUPERS>(record + AT.minimums_at(tile) + place, above(w.super_minimums))
                                           : _mm256_mul_ps(scale, _mm256_set1_ps(static_cast<float>(-w.zero)));
            const int start = start_of(BYTES, BITS, GROUP, MINIMUM, part);
            __m256i dots[R];
#if HALF_VNNI
            dots_of<BITS, BYTES, R>(q, xq, part * 8 / PARTS, (part + 1) * 8 / PARTS, dots);
#else
            if (BITS == 4) dots4<BYTES, R>(q, xq, dots);
            else dots8<R>(q, whole[0], part * 8 / PARTS, (part + 1) * 8 / PARTS, dots);
#endif
            for (int r = 0; r < R; r++) {
                const int64_t at = first + r;
                if (start >= 0) dots[r] = _mm256_add_epi32(dots[r], _mm256_set1_epi32(static_cast<int32_t>(x.sums[at].cross[start])));
                __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(x.scale[at]));
                sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), factor, sums[r]);
                if (start < 0) sums[r] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x.sums[at].sum(GROUP == 32 ? 2 : part)), sums[r]);
            }
        }
    }
    for (int r = 0; r < R; r++) to[r] = sums[r];
}

template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES>
void tile_all(const Matrix& w, int64_t tile, int64_t, const Activations& x, Rows some, float* y, const float* add, int64_t stride) {
    for (int64_t row = some.begin; row < some.end; row += FEW) {
        const int64_t group = row / ROWS * ROWS, step = group_rows(group, some.all), begin = group * (w.inputs / BLOCK) + row - group;
        const int64_t count = some.end - row < FEW ? some.end - row : FEW;
        for (int half = 0; half < 2; half++) {
            __m256 sums[FEW];
            switch (count) {
                case 1: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 1>(w, tile, half, x, begin, step, sums); break;
                case 2: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 2>(w, tile, half, x, begin, step, sums); break;
                case 3: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 3>(w, tile, half, x, begin, step, sums); break;
                default: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 4>(w, tile, half, x, begin, step, sums);
            }
            const int64_t output = tile * TILE + 8 * half;
            for (int64_t r = 0; r < count; r++) {
                const int64_t place = (row + r) * stride + 8 * half;
                if (w.bias) sums[r] = _mm256_add_ps(sums[r], _mm256_loadu_ps(w.bias + output));
                if (add) sums[r] = _mm256_add_ps(sums[r], _mm256_loadu_ps(add + place));
                _mm256_storeu_ps(y + place, sums[r]);
            }
        }
    }
}
