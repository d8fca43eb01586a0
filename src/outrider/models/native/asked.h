// Numbers of 16 bits that are made for one product, times tiles of 8 bits. A part of kernels.cpp, in its namespace.

struct AskedBlock {
    int8_t q[2 * BLOCK];           // high parts, then low parts; or numbers of 16 bits (WORDS), those with even places first
    float scale;
    int32_t sums[BLOCK / SCALED];  // 128 * the sum of each group of numbers: what the 128 in the bytes adds
};

void ask_block(const float* x, AskedBlock* to) {
    BlockSums unused;
    quantise_block<WORDS ? Rounding::PAIRED_WORDS : Rounding::WORDS>(x, MOST, to->q, &to->scale, &unused);
    int16_t words[BLOCK];
    std::memcpy(words, to->q, sizeof(words));
    for (int g = 0; g < BLOCK / SCALED; g++) {
        to->sums[g] = 0;
        for (int i = g * SCALED; i < (g + 1) * SCALED; i++)
            to->sums[g] += 128 * (WORDS ? words[i / 2 + i % 2 * (BLOCK / 2)] : to->q[i] * 256 + to->q[i + BLOCK]);
    }
}

// Vectors [from, to) of a block of 16 outputs, in bytes with 128 added, times N rows: those of one group of numbers or of both; the
// numbers of a group that have no vector are 0.
template <int N>
inline void asked_dots(const uint8_t* block, const AskedBlock* asked, int from, int to, Lanes (&dots)[N]) {
    int32_t less[N];
    for (int n = 0; n < N; n++) less[n] = (from < 4 ? asked[n].sums[0] : 0) + (to > 4 ? asked[n].sums[1] : 0);
#if WIDE
    __m512i high[N], low[N];
    for (int n = 0; n < N; n++) high[n] = low[n] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = from; j < to; j++) {
#if VNNI
        const __m512i v = _mm512_loadu_si512(block + 64 * j);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            high[n] = _mm512_dpbusd_epi32(high[n], v, four(asked[n].q + 4 * j));
            low[n] = _mm512_dpbusd_epi32(low[n], v, four(asked[n].q + BLOCK + 4 * j));
        }
    }
    for (int n = 0; n < N; n++) low[n] = _mm512_add_epi32(_mm512_slli_epi32(high[n], 8), low[n]);
#else
        __m512i even, odd;
        words<8>(block, j, even, odd);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            high[n] = add_products(high[n], even, four(asked[n].q + 4 * j));
            low[n] = add_products(low[n], odd, four(asked[n].q + BLOCK + 4 * j));
        }
    }
    for (int n = 0; n < N; n++) low[n] = _mm512_add_epi32(high[n], low[n]);
#endif
    for (int n = 0; n < N; n++) dots[n] = _mm512_cvtepi32_ps(_mm512_sub_epi32(low[n], _mm512_set1_epi32(less[n])));
#elif HALF_WIDE
    __m256i sums[2][N];
    dots_of<8, false, N, sizeof(AskedBlock)>(block, asked->q, from, to, sums);
    for (int half = 0; half < 2; half++)
        for (int n = 0; n < N; n++) dots[n].part[half] = _mm256_cvtepi32_ps(_mm256_sub_epi32(sums[half][n], _mm256_set1_epi32(less[n])));
#elif NEON_DOTS
    for (int quarter = 0; quarter < 4; quarter++) {
        int32x4_t sums[N];
        dots_of<8, false, N, sizeof(AskedBlock)>(block + 16 * quarter, asked->q, from / 4, (to + 3) / 4, sums);
        for (int n = 0; n < N; n++) dots[n].part[quarter] = vcvtq_f32_s32(vsubq_s32(sums[n], vdupq_n_s32(less[n])));
    }
#else
    for (int n = 0; n < N; n++) {
        int32_t sums[TILE];
        for (int o = 0; o < TILE; o++) sums[o] = -less[n];
        for (int j = from; j < to; j++)
            for (int o = 0; o < TILE; o++)
                for (int i = 0; i < 4; i++)
                    sums[o] += block[(j * TILE + o) * 4 + i] * (asked[n].q[4 * j + i] * 256 + asked[n].q[BLOCK + 4 * j + i]);
        dots[n] = load_integers(sums);
    }
#endif
}
