// 16 numbers at a time on any processor: with AVX-512 in one register, with AVX2 in two, on ARM in four, else in an array.
//
// The same operations in the same order on each of them, every one rounded once: so all processors compute the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

// The instructions that are used, from the compiler's flags. NARROW=1 leaves the 512-bit registers out, for tests.
#ifndef NARROW
#define NARROW 0
#endif
#if !NARROW && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define WIDE 1
#else
#define WIDE 0
#endif
#if !WIDE && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HALF_WIDE 1
#else
#define HALF_WIDE 0
#endif
#if defined(__aarch64__) && defined(__ARM_NEON)
#define NEON 1
#else
#define NEON 0
#endif
#if WIDE || HALF_WIDE
#include <immintrin.h>
#elif NEON
#include <arm_neon.h>
#endif

namespace {

constexpr int LANES = 16;

#if WIDE

using Lanes = __m512;

inline Lanes load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* to, Lanes x) { _mm512_storeu_ps(to, x); }
inline Lanes all_lanes(float x) { return _mm512_set1_ps(x); }
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes sub(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes div(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }            // a * b + c
inline Lanes fused_minus(Lanes a, Lanes b, Lanes c) { return _mm512_fnmadd_ps(a, b, c); }     // c - a * b
inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }                         // a > b ? a : b
inline Lanes smaller(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }                        // a < b ? a : b
inline Lanes nearest(Lanes a) { return _mm512_roundscale_ps(a, 0); }
inline Lanes scaled(Lanes a, Lanes n) { return _mm512_scalef_ps(a, n); }                      // a * 2^n for n in [-126, 127]
inline __mmask16 first_lanes(int64_t some) { return static_cast<__mmask16>((1u << some) - 1); }
inline Lanes load_some(const float* x, int64_t some) { return _mm512_maskz_loadu_ps(first_lanes(some), x); }
inline void store_some(float* to, Lanes x, int64_t some) { _mm512_mask_storeu_ps(to, first_lanes(some), x); }
inline Lanes only(Lanes x, int64_t some) { return _mm512_maskz_mov_ps(first_lanes(some), x); }  // zeros after the first

#elif HALF_WIDE

struct Lanes {
    __m256 part[2];
};

#define OUTRIDER_EACH(expression) \
    Lanes to;                     \
    for (int i = 0; i < 2; i++) to.part[i] = expression; \
    return to
inline Lanes load(const float* x) { OUTRIDER_EACH(_mm256_loadu_ps(x + 8 * i)); }
inline void store(float* to, const Lanes& x) {
    for (int i = 0; i < 2; i++) _mm256_storeu_ps(to + 8 * i, x.part[i]);
}
inline Lanes all_lanes(float x) { OUTRIDER_EACH(_mm256_set1_ps(x)); }
inline Lanes add(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(_mm256_add_ps(a.part[i], b.part[i])); }
inline Lanes sub(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(_mm256_sub_ps(a.part[i], b.part[i])); }
inline Lanes mul(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(_mm256_mul_ps(a.part[i], b.part[i])); }
inline Lanes div(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(_mm256_div_ps(a.part[i], b.part[i])); }
inline Lanes fused(const Lanes& a, const Lanes& b, const Lanes& c) { OUTRIDER_EACH(_mm256_fmadd_ps(a.part[i], b.part[i], c.part[i])); }
inline Lanes fused_minus(const Lanes& a, const Lanes& b, const Lanes& c) { OUTRIDER_EACH(_mm256_fnmadd_ps(a.part[i], b.part[i], c.part[i])); }
inline Lanes larger(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(_mm256_max_ps(a.part[i], b.part[i])); }
inline Lanes smaller(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(_mm256_min_ps(a.part[i], b.part[i])); }
inline Lanes nearest(const Lanes& a) { OUTRIDER_EACH(_mm256_round_ps(a.part[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
inline __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Lanes scaled(const Lanes& a, const Lanes& n) { OUTRIDER_EACH(_mm256_mul_ps(a.part[i], power_of_two(n.part[i]))); }

#elif NEON

struct Lanes {
    float32x4_t part[4];
};

#define OUTRIDER_EACH(expression) \
    Lanes to;                     \
    for (int i = 0; i < 4; i++) to.part[i] = expression; \
    return to
inline Lanes load(const float* x) { OUTRIDER_EACH(vld1q_f32(x + 4 * i)); }
inline void store(float* to, const Lanes& x) {
    for (int i = 0; i < 4; i++) vst1q_f32(to + 4 * i, x.part[i]);
}
inline Lanes all_lanes(float x) { OUTRIDER_EACH(vdupq_n_f32(x)); }
inline Lanes add(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(vaddq_f32(a.part[i], b.part[i])); }
inline Lanes sub(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(vsubq_f32(a.part[i], b.part[i])); }
inline Lanes mul(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(vmulq_f32(a.part[i], b.part[i])); }
inline Lanes div(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(vdivq_f32(a.part[i], b.part[i])); }
inline Lanes fused(const Lanes& a, const Lanes& b, const Lanes& c) { OUTRIDER_EACH(vfmaq_f32(c.part[i], a.part[i], b.part[i])); }
inline Lanes fused_minus(const Lanes& a, const Lanes& b, const Lanes& c) { OUTRIDER_EACH(vfmsq_f32(c.part[i], a.part[i], b.part[i])); }
inline Lanes larger(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(vbslq_f32(vcgtq_f32(a.part[i], b.part[i]), a.part[i], b.part[i])); }
inline Lanes smaller(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(vbslq_f32(vcltq_f32(a.part[i], b.part[i]), a.part[i], b.part[i])); }
inline Lanes nearest(const Lanes& a) { OUTRIDER_EACH(vrndnq_f32(a.part[i])); }
inline float32x4_t power_of_two(float32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
inline Lanes scaled(const Lanes& a, const Lanes& n) { OUTRIDER_EACH(vmulq_f32(a.part[i], power_of_two(n.part[i]))); }

#else

struct Lanes {
    float part[LANES];
};

#define OUTRIDER_EACH(expression) \
    Lanes to;                     \
    for (int i = 0; i < LANES; i++) to.part[i] = expression; \
    return to
inline Lanes load(const float* x) { OUTRIDER_EACH(x[i]); }
inline void store(float* to, const Lanes& x) { std::memcpy(to, x.part, sizeof(x.part)); }
inline Lanes all_lanes(float x) { OUTRIDER_EACH(x); }
inline Lanes add(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(a.part[i] + b.part[i]); }
inline Lanes sub(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(a.part[i] - b.part[i]); }
inline Lanes mul(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(a.part[i] * b.part[i]); }
inline Lanes div(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(a.part[i] / b.part[i]); }
inline Lanes fused(const Lanes& a, const Lanes& b, const Lanes& c) { OUTRIDER_EACH(std::fma(a.part[i], b.part[i], c.part[i])); }
inline Lanes fused_minus(const Lanes& a, const Lanes& b, const Lanes& c) { OUTRIDER_EACH(std::fma(-a.part[i], b.part[i], c.part[i])); }
inline Lanes larger(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(a.part[i] > b.part[i] ? a.part[i] : b.part[i]); }
inline Lanes smaller(const Lanes& a, const Lanes& b) { OUTRIDER_EACH(a.part[i] < b.part[i] ? a.part[i] : b.part[i]); }
inline Lanes nearest(const Lanes& a) { OUTRIDER_EACH(std::nearbyint(a.part[i])); }
inline float power_of_two(float n) {
    const uint32_t bits = n == n ? static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23 : 0;
    float power;
    std::memcpy(&power, &bits, 4);
    return power;
}
inline Lanes scaled(const Lanes& a, const Lanes& n) { OUTRIDER_EACH(a.part[i] * power_of_two(n.part[i])); }

#endif

#if !WIDE
#undef OUTRIDER_EACH

inline Lanes load_some(const float* x, int64_t some) {
    float copy[LANES] = {};
    std::memcpy(copy, x, some * sizeof(float));
    return load(copy);
}

inline void store_some(float* to, const Lanes& x, int64_t some) {
    float copy[LANES];
    store(copy, x);
    std::memcpy(to, copy, some * sizeof(float));
}

inline Lanes only(const Lanes& x, int64_t some) {
    float copy[LANES];
    store(copy, x);
    return load_some(copy, some);
}
#endif

// Each rounded to the nearest integer; what does not fit 32 bits is anything.
inline void nearest_integers(const Lanes& x, int32_t* to) {
#if WIDE
    _mm512_storeu_si512(to, _mm512_cvtps_epi32(x));
#elif HALF_WIDE
    for (int i = 0; i < 2; i++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * i), _mm256_cvtps_epi32(x.part[i]));
#elif NEON
    for (int i = 0; i < 4; i++) vst1q_s32(to + 4 * i, vcvtnq_s32_f32(x.part[i]));
#else
    for (int i = 0; i < LANES; i++) to[i] = static_cast<int32_t>(std::nearbyint(x.part[i]));
#endif
}

inline Lanes load_integers(const int32_t* x) {
#if WIDE
    return _mm512_cvtepi32_ps(_mm512_loadu_si512(x));
#else
    Lanes to;
#if HALF_WIDE
    for (int i = 0; i < 2; i++) to.part[i] = _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * i)));
#elif NEON
    for (int i = 0; i < 4; i++) to.part[i] = vcvtq_f32_s32(vld1q_s32(x + 4 * i));
#else
    for (int i = 0; i < LANES; i++) to.part[i] = static_cast<float>(x[i]);
#endif
    return to;
#endif
}

inline Lanes load_bytes(const int8_t* x) {
#if WIDE
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
#else
    Lanes to;
#if HALF_WIDE
    for (int i = 0; i < 2; i++)
        to.part[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x + 8 * i))));
#elif NEON
    const int8x16_t all = vld1q_s8(x);
    for (int i = 0; i < 2; i++) {
        const int16x8_t half = vmovl_s8(i ? vget_high_s8(all) : vget_low_s8(all));
        to.part[2 * i] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(half)));
        to.part[2 * i + 1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(half)));
    }
#else
    for (int i = 0; i < LANES; i++) to.part[i] = static_cast<float>(x[i]);
#endif
    return to;
#endif
}

// The sum of all 16: halves, quarters, then places 0 and 2, 1 and 3, and these two.
inline float sum_of(const Lanes& x) {
    float v[LANES];
    store(v, x);
    for (int i = 0; i < 8; i++) v[i] += v[i + 8];
    for (int i = 0; i < 4; i++) v[i] += v[i + 4];
    return (v[0] + v[2]) + (v[1] + v[3]);
}

inline float largest_of(const Lanes& x) {
    float v[LANES];
    store(v, x);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) v[i] = v[i + step] > v[i] ? v[i + step] : v[i];
    return v[0];
}

// Sums of 16 vectors, one per lane; every vector is added up by the same tree: of each quarter (0 + 2) + (1 + 3), and then
// (first + second) + (third + fourth).
#if WIDE
inline Lanes sums_of(Lanes (&v)[16]) {
    for (int i = 0; i < 8; i++) v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 8]), _mm512_unpackhi_ps(v[i], v[i + 8]));
    for (int i = 0; i < 4; i++) v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 4]), _mm512_unpackhi_ps(v[i], v[i + 4]));
    // now v[i], lane 4 * k + j is a quarter of the sum of vector i + 4 * j
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x88), _mm512_shuffle_f32x4(v[2], v[3], 0xdd));
    __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), all);
}
#elif HALF_WIDE
inline Lanes sums_of(Lanes (&v)[16]) {
    __m128 four[4];  // four[i], lane j: the sum of vector i + 4 * j
    for (int i = 0; i < 4; i++) {
        __m128 halves[2];
        for (int h = 0; h < 2; h++) {
            __m256 pair[2];
            for (int k = 0; k < 2; k++) {
                const __m256 a = v[i + 4 * k].part[h], b = v[i + 4 * k + 8].part[h];
                pair[k] = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            }
            const __m256 quarters = _mm256_add_ps(_mm256_unpacklo_ps(pair[0], pair[1]), _mm256_unpackhi_ps(pair[0], pair[1]));
            halves[h] = _mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps(quarters, 1));
        }
        four[i] = _mm_add_ps(halves[0], halves[1]);
    }
    _MM_TRANSPOSE4_PS(four[0], four[1], four[2], four[3]);
    Lanes to;
    to.part[0] = _mm256_insertf128_ps(_mm256_castps128_ps256(four[0]), four[1], 1);
    to.part[1] = _mm256_insertf128_ps(_mm256_castps128_ps256(four[2]), four[3], 1);
    return to;
}
#elif NEON
inline float32x2_t quarter_sums(float32x4_t a, float32x4_t b) {
    return vpadd_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a)), vadd_f32(vget_low_f32(b), vget_high_f32(b)));
}

inline Lanes sums_of(Lanes (&v)[16]) {
    Lanes to;
    for (int i = 0; i < 16; i += 4) {
        float32x4_t quarters[4];
        for (int k = 0; k < 4; k++)
            quarters[k] = vcombine_f32(quarter_sums(v[i].part[k], v[i + 1].part[k]), quarter_sums(v[i + 2].part[k], v[i + 3].part[k]));
        to.part[i / 4] = vaddq_f32(vaddq_f32(quarters[0], quarters[1]), vaddq_f32(quarters[2], quarters[3]));
    }
    return to;
}
#else
inline Lanes sums_of(Lanes (&v)[16]) {
    Lanes to;
    for (int i = 0; i < 16; i++) {
        const float* x = v[i].part;
        float quarters[4];
        for (int k = 0; k < 4; k++) quarters[k] = (x[4 * k] + x[4 * k + 2]) + (x[4 * k + 1] + x[4 * k + 3]);
        to.part[i] = (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
    }
    return to;
}
#endif

// e^x: x = n ln 2 + r with |r| <= ln 2 / 2, then a polynomial in r (Cephes' coefficients).
inline Lanes exp16(Lanes x) {
    x = larger(all_lanes(-87.0f), x);  // in this order a NaN stays one
    const Lanes n = nearest(mul(x, all_lanes(1.44269504f)));
    Lanes r = fused_minus(n, all_lanes(0.693359375f), x);
    r = fused_minus(n, all_lanes(-2.12194440e-4f), r);
    Lanes p = all_lanes(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fused(p, r, all_lanes(c));
    p = fused(p, mul(r, r), add(r, all_lanes(1.0f)));
    return scaled(p, n);
}

}  // namespace
