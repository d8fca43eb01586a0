// Products in registers of 256 bits: the same numbers as wide.h, the 16 outputs of a tile in two halves, which share each activation
// that is broadcast. A part of kernels.cpp, in its namespace.

constexpr int FEW = 4;  // rows that share one reading of a tile: their sums stay in the 16 registers

ALWAYS_INLINE __m256 halves(const uint16_t* values) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
}

// Of a group, at `values`; `above`: of its super-block.
template <bool SUPERS>
ALWAYS_INLINE __m256 group_values(const uint8_t* values, const uint16_t* above) {
    if (!SUPERS) return halves(reinterpret_cast<const uint16_t*>(values));
    __m128i small = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(small)), halves(above));
}

ALWAYS_INLINE __m256i four(const int8_t* x) {
    int32_t bytes;
    std::memcpy(&bytes, x, 4);
    return _mm256_set1_epi32(bytes);
}

// The 8 outputs of a half of vector j of a block, of 16 outputs x 4 inputs; at 4 bits with those of the vector that shares its bytes, at
// 6 bits put together: the last of each four lies in the upper bits of the others.
template <int BITS>
ALWAYS_INLINE __m256i half_vector(const uint8_t* q, int j, int half) {
    const auto bytes = [&](int place) __attribute__((always_inline)) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + 64 * place + 32 * half));
    };
    if (BITS != 6) return bytes(BITS == 8 ? j : j % 4);
    const int first = j / 4 * 3;
    if (j % 4 < 3) return _mm256_and_si256(bytes(first + j % 4), _mm256_set1_epi8(63));
    const __m256i upper = _mm256_set1_epi8(static_cast<char>(192));
    const __m256i low = _mm256_srli_epi16(_mm256_and_si256(bytes(first), upper), 6);
    const __m256i middle = _mm256_srli_epi16(_mm256_and_si256(bytes(first + 1), upper), 4);
    return _mm256_or_si256(_mm256_or_si256(low, middle), _mm256_srli_epi16(_mm256_and_si256(bytes(first + 2), upper), 2));
}

#if HALF_VNNI
ALWAYS_INLINE __m256i add_dots(__m256i sums, __m256i w, __m256i x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, w, x);
#else
    return _mm256_dpbusd_epi32(sums, w, x);
#endif
}

// Vectors [from, to) of a block times the activations of R rows, STRIDE bytes apart: 256 * high parts + low parts.
template <int BITS, bool BYTES, int R, int STRIDE = 2 * BLOCK>
ALWAYS_INLINE void dots_of(const uint8_t* q, const int8_t* x, int from, int to, __m256i (&dots)[2][R]) {
    const auto add_part = [&](const int8_t* part, int j) __attribute__((always_inline)) {
        __m256i w[2];
        for (int half = 0; half < 2; half++) {
            const __m256i both = half_vector<BITS>(q, j, half);
            w[half] = BITS != 4 ? both : _mm256_and_si256(j < 4 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m256i same = four(part + r * STRIDE + 4 * j);
            for (int half = 0; half < 2; half++) dots[half][r] = add_dots(dots[half][r], w[half], same);
        }
    };
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < R; r++) dots[half][r] = _mm256_setzero_si256();
    if (!BYTES) {
#pragma GCC unroll 8
        for (int j = from; j < to; j++) add_part(x, j);
        for (int half = 0; half < 2; half++)
            for (int r = 0; r < R; r++) dots[half][r] = _mm256_slli_epi32(dots[half][r], 8);
    }
#pragma GCC unroll 8
    for (int j = from; j < to; j++) add_part(x + BLOCK, j);
}
#else
// A vector of bytes, or one of 4 bits as it lies, as numbers of 16 bits: those with even places, and those with odd ones.
template <int BITS>
ALWAYS_INLINE void words(__m256i both, bool first, __m256i& even, __m256i& odd) {
    const __m256i low = _mm256_set1_epi16(BITS == 4 ? 15 : 255);
    if (BITS != 4 || first) even = _mm256_and_si256(both, low);
    else even = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    if (BITS != 4) odd = _mm256_srli_epi16(both, 8);
    else odd = first ? _mm256_and_si256(_mm256_srli_epi16(both, 8), low) : _mm256_srli_epi16(both, 12);
}

// Vectors [from, to) of a block times the activations of R rows, STRIDE bytes apart: numbers of 16 bits, those with even places first.
template <int BITS, int R, int STRIDE>
ALWAYS_INLINE void word_dots(const uint8_t* q, const int8_t* x, int from, int to, __m256i (&dots)[2][R]) {
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < R; r++) dots[half][r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = from; j < to; j++) {
        __m256i even[2], odd[2];
        for (int half = 0; half < 2; half++) words<BITS>(half_vector<BITS>(q, j, half), j < 4, even[half], odd[half]);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m256i first = four(x + r * STRIDE + 4 * j), second = four(x + r * STRIDE + BLOCK + 4 * j);
            for (int half = 0; half < 2; half++) {
                const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(even[half], first), _mm256_madd_epi16(odd[half], second));
                dots[half][r] = _mm256_add_epi32(dots[half][r], products);
            }
        }
    }
}

// A block of 4 bits times activations of 8 bits. Eight products of pairs fit 16 bits: 8 * 2 * 15 * 120 < 32768.
template <int R, int STRIDE>
ALWAYS_INLINE void nibble_dots(const uint8_t* q, const int8_t* x, __m256i (&dots)[2][R]) {
    const __m256i ones = _mm256_set1_epi16(1), mask = _mm256_set1_epi8(15);
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < R; r++) dots[half][r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
#pragma GCC unroll 2
        for (int high = 0; high < 2; high++) {
            __m256i w[2];
            for (int half = 0; half < 2; half++) {
                const __m256i both = half_vector<4>(q, j, half);
                w[half] = _mm256_and_si256(high ? _mm256_srli_epi16(both, 4) : both, mask);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m256i same = four(x + r * STRIDE + BLOCK + 16 * high + 4 * j);
                for (int half = 0; half < 2; half++) dots[half][r] = _mm256_add_epi16(dots[half][r], _mm256_maddubs_epi16(w[half], same));
            }
        }
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < R; r++) dots[half][r] = _mm256_madd_epi16(dots[half][r], ones);
}

// The low parts of a block of a row, which has no high ones, as numbers of 16 bits.
inline void widened(const int8_t* x, int8_t* to) {
    const __m128i bytes[2] = {_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + BLOCK)), _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + BLOCK + 16))};
    const __m256i all = _mm256_set_m128i(bytes[1], bytes[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + BLOCK), _mm256_srai_epi16(all, 8));
}

// Vectors [from, to) of a block times the activations of R rows, STRIDE bytes apart.
template <int BITS, bool BYTES, int R, int STRIDE = 2 * BLOCK>
ALWAYS_INLINE void dots_of(const uint8_t* q, const int8_t* x, int from, int to, __m256i (&dots)[2][R]) {
    if constexpr (!BYTES) word_dots<BITS, R, STRIDE>(q, x, from, to, dots);
    else if constexpr (BITS == 4) nibble_dots<R, STRIDE>(q, x, dots);
    else {
        int8_t wide[R * 2 * BLOCK];
        for (int r = 0; r < R; r++) widened(x + r * STRIDE, wide + r * 2 * BLOCK);
        word_dots<BITS, R, 2 * BLOCK>(q, wide, from, to, dots);
    }
}
#endif

// R rows times a tile. `begin`: where the first row's activations begin; those of its next block come `step` places later.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES, int R>
void tile_rows(const Matrix& w, int64_t tile, const Activations& x, int64_t begin, int64_t step, __m256 (&to)[2][FEW]) {
    constexpr int PARTS = BLOCK / GROUP, NUMBER = SUPERS ? 1 : 2;  // bytes of a scale
    constexpr Record AT(BITS, GROUP, MINIMUM, SUPERS);
    const int64_t blocks = w.inputs / BLOCK;
    const uint8_t* record = AT.of(w, tile, 0);
    __m256 sums[2][R];
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < R; r++) sums[half][r] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b++, record += AT.size) {
        const int64_t first = begin + b * step;
#if HALF_VNNI
#pragma GCC unroll 1  // see wide.h; with products of 16 bits it would be slower
#endif
        for (int part = 0; part < PARTS; part++) {
            __m256i dots[2][R];
            dots_of<BITS, BYTES, R>(record + tile % 2 * AT.weights, x.q + first * 2 * BLOCK, part * 8 / PARTS, (part + 1) * 8 / PARTS, dots);
            for (int half = 0; half < 2; half++) {
                const int64_t place = (part * TILE + 8 * half) * NUMBER;
                const auto above = [&](const uint16_t* supers) { return SUPERS ? super_of(supers, w, tile, b) + 8 * half : nullptr; };
                const __m256 scale = group_values<SUPERS>(record + AT.scales_at(tile) + place, above(w.super_scales));
                const __m256 minimum = MINIMUM ? group_values<SUPERS>(record + AT.minimums_at(tile) + place, above(w.super_minimums))
                                               : _mm256_mul_ps(scale, _mm256_set1_ps(static_cast<float>(-w.zero)));
                const int start = start_of(BYTES, BITS, GROUP, MINIMUM, part);
                for (int r = 0; r < R; r++) {
                    const int64_t at = first + r;
                    __m256i dot = dots[half][r];
                    if (start >= 0) dot = _mm256_add_epi32(dot, _mm256_set1_epi32(static_cast<int32_t>(x.sums[at].cross[start])));
                    const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(x.scale[at]));
                    __m256& sum = sums[half][r];
                    sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), factor, sum);
                    if (start < 0) sum = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x.sums[at].sum(GROUP == 32 ? 2 : part)), sum);
                }
            }
        }
    }
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < R; r++) to[half][r] = sums[half][r];
}

template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES>
void tile_all(const Matrix& w, int64_t tile, int64_t, const Activations& x, Rows some, float* y, const float* add, int64_t stride) {
    for (int64_t row = some.begin; row < some.end; row += FEW) {
        const int64_t group = row / ROWS * ROWS, step = group_rows(group, some.all), begin = group * (w.inputs / BLOCK) + row - group;
        const int64_t count = some.end - row < FEW ? some.end - row : FEW;
        __m256 sums[2][FEW];
        switch (count) {
            case 1: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 1>(w, tile, x, begin, step, sums); break;
            case 2: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 2>(w, tile, x, begin, step, sums); break;
            case 3: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 3>(w, tile, x, begin, step, sums); break;
            default: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 4>(w, tile, x, begin, step, sums);
        }
        for (int64_t r = 0; r < count; r++)
            for (int half = 0; half < 2; half++) {
                const int64_t place = (row + r) * stride + 8 * half;
                __m256 sum = sums[half][r];
                if (w.bias) sum = _mm256_add_ps(sum, _mm256_loadu_ps(w.bias + tile * TILE + 8 * half));
                if (add) sum = _mm256_add_ps(sum, _mm256_loadu_ps(add + place));
                _mm256_storeu_ps(y + place, sum);
            }
    }
}
