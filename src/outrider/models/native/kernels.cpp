// The decoder layers of a llama-like model with packed weights, on a CPU.
//
// Every row of a pass (a token or a node of a draft) is computed by the same operations in the same order, whatever other
// rows share the pass and however many threads run. So a token's logits are the same bits in plain decoding, in a draft of
// any shape, in any batch and in any piece of a prompt: speculation cannot flip a near tie.
//
// Weights: 4 or 8 bits, w = scale * (q - zero) + minimum per group of 32 or 16 inputs. 16 outputs form a tile; a tile holds,
// for each block of 32 inputs, 8 vectors of 16 outputs x 4 inputs, which is what one dot-product instruction eats. At
// 4 bits, vectors j and j + 4 share the bytes (low and high halves).
// Activations: 16 bits with one scale per block of 32 inputs, multiplied as two parts of 8 bits. (8 bits alone, as ggml has
// it, change the greedy text of half of the prompts; the second part costs nothing where memory is the limit.) A matrix can
// be told to take 8 bits: then the high part is 0, and kernels may leave it out; and the zero of Q4_0's and Q6_K's weights is taken
// off in whole numbers, which saves a product of floats for each group.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "lanes.h"
#include "pool.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define VNNI 1  // dot products of 8 bits in registers of 512 bits, or of 256
#else
#define VNNI 0
#endif
// Parts of an inner loop: a call would put its sums into memory.
#define ALWAYS_INLINE inline __attribute__((always_inline))
#if HALF_WIDE && (defined(__AVXVNNI__) || VNNI)
#define HALF_VNNI 1  // dot products of 8 bits in registers of 256 bits
#else
#define HALF_VNNI 0
#endif
#if NEON && defined(__ARM_FEATURE_DOTPROD)
#define NEON_DOTS 1
#else
#define NEON_DOTS 0
#endif

namespace {

constexpr int TILE = 16;   // outputs of a tile
constexpr int BLOCK = 32;  // inputs of a block
constexpr int SUPER = 256; // inputs of a super-block
constexpr int ROWS = 8;    // rows that share one reading of a tile
constexpr int MOST_TILES = WIDE ? 2 : 1;  // tiles that are multiplied together, those of a record: see wide.h
constexpr float MOST = 32512.0f;  // the largest activation: 127 * 256, so that both parts fit 8 bits
constexpr float MOST_BYTE = 120.0f;  // the same for activations of 8 bits, so that a weight of 4 bits can be added to one (bytes.h)
constexpr float MOST_KEPT = 127.0f;  // the same for keys and values of 8 bits
constexpr int NIBBLE_ZERO = 8;   // the zero of weights of 4 bits without minimums (Q4_0)
constexpr int SIX_ZERO = 32;     // the same of weights in groups of 16 (Q6_K)
constexpr float LEAST = 1e-30f;   // blocks with nothing larger are zero: their scale would not be a normal number

constexpr bool WORDS = (WIDE && !VNNI) || (HALF_WIDE && !HALF_VNNI);  // no dot products of 8 bits: numbers of 16 bits are multiplied

// Whether inputs are multiplied in pairs (see paired_dots): not by default on Intel's processors, where additions take the
// vector units that multiply. Zen 4 has as many units again that only add.
#if (WIDE && !VNNI) || (HALF_WIDE && !HALF_VNNI)
#undef PAIRED
#define PAIRED 1  // the layout of pairs, though none are made: all numbers have 16 bits
#elif !defined(PAIRED)
#if WIDE && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))  // GCC 12 takes a Zen 4 for a Zen 3
#define PAIRED 1
#else
#define PAIRED 0
#endif
#endif
constexpr int PAIRS = VNNI ? 3 : 0;  // of each 4 vectors, those that are multiplied in pairs: so all units have work
constexpr int LEAST_PAIRED = VNNI ? 5 : 1;  // rows from which on that is faster: the weights must be widened to 16 bits for it
constexpr int BYTE_PAIRS = WIDE && VNNI && PAIRED ? 3 : 0;  // PAIRS of activations of 8 bits and weights of 4, see bytes.h
constexpr int LEAST_BYTE_PAIRED = 7;  // rows from which on that is faster: weights are made ready for it once for all of them
static_assert(LEAST_BYTE_PAIRED <= ROWS, "many.h takes groups of 8 in pairs");

constexpr int NEAR = 384 << 10;   // bytes of activations that are used for several tiles in turn: both fit a second cache of 1 MiB
constexpr int TOGETHER = 12;      // queries that share one reading of keys and values
constexpr int SERIAL = 4;         // rows whose small work is not worth sharing
constexpr int LEAST_TURNING = 32; // queries of a sequence from which on keys are turned round for them, see turned.h: to turn one takes as
                                  // long as the sums of about 8 scores
constexpr int PAGE = 32;          // tokens of a page of keys and values; a multiple of the 16 keys that are multiplied at a time
constexpr int SCALED = 16;        // numbers of a key or value of 8 bits that share a scale: a large one costs these their precision

struct Matrix {  // its weights lie in the order in which a pass reads them: one stream for each thread
    const uint8_t* records;  // [outputs / 32, rounded up][inputs / 32], each a Record
    const uint16_t* super_scales;    // [outputs / 16][inputs / 256][16] float16, or null
    const uint16_t* super_minimums;  // the same
    const float* bias;     // [outputs] or null
    int64_t outputs;       // a multiple of 16
    int64_t inputs;        // a multiple of 32
    int32_t bits, zero, group, minimums;  // minimums: whether there are any
};

// Where things lie in a block of two tiles, in bytes:
//   weights [2][8][16][4] at 8 bits, half of that at 4; scales [2][32 / group][16], float16, or int8 where there are super-blocks;
//   minimums, the same, if there are any.
struct Record {
    int64_t weights, scales, size;  // of one tile, of one tile, and of all

    constexpr Record(int bits, int group, bool minimums, bool supers)
        : weights(64 * bits), scales(BLOCK / group * TILE * (supers ? 1 : 2)), size(2 * (weights + (minimums ? 2 : 1) * scales)) {}
    explicit Record(const Matrix& w) : Record(w.bits, w.group, w.minimums, w.super_scales) {}

    constexpr int64_t scales_at(int64_t tile) const { return 2 * weights + tile % 2 * scales; }
    constexpr int64_t minimums_at(int64_t tile) const { return scales_at(tile) + 2 * scales; }

    // Of a block of a tile: its record, and in it its weights.
    const uint8_t* of(const Matrix& w, int64_t tile, int64_t block) const {
        return w.records + (tile / 2 * (w.inputs / BLOCK) + block) * size;
    }
    const uint8_t* weights_of(const Matrix& w, int64_t tile, int64_t block) const { return of(w, tile, block) + tile % 2 * weights; }
};

struct JoinedMatrices {  // matrices that read the same input; their outputs lie side by side
    Matrix parts[3];
    int64_t count, outputs;  // parts, and outputs of all of them
    int64_t activations;     // bits of its inputs: 16 or 8
};

struct Layer {
    JoinedMatrices qkv, output, gate_up, down;
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm;  // the last two may be null
    const int32_t* large;  // [kv_heads][32] numbers of a key that are kept with 16 bits among keys of 8, -1: none; or null
};

struct Span {
    float* const* pages;   // where the keys of each page of 32 tokens begin, of layer 0 and its first head; see PagedRows
    int64_t values;        // floats from a page's keys to its values
    int64_t head_stride;   // floats from one head's keys to the next one's
    int64_t layer_stride;  // floats from one layer's keys to the next one's
    int64_t start;         // tokens that were there before this pass
    int64_t first, rows;   // its rows of the pass
};

struct Shape {
    int64_t hidden, heads, kv_heads, head_dim, inner, layers, window;  // window: 0 for none
    int64_t kv_bits;  // of the numbers of keys and values: 32 (float), or 8 with scales
    float eps;
};

struct BlockSums {  // over the first 16 inputs of a block, the last 16, and all
    union {
        float half[2];   // scale * sum of q
        int32_t nibbles; // of activations of 8 bits: what products with paired weights of 4 bits begin with, see bytes.h
    };
    float all;
    uint32_t cross[3];  // minus the sum of products of paired inputs, see paired_dots. Of activations of 8 bits: -32 * the sum of q of
                        // each half, and what products with weights q - 8 begin with

    float sum(int which) const { return which == 2 ? all : half[which]; }
};

// Of all rows of a pass. Rows that are multiplied together lie side by side, so that one pointer serves them all: groups of
// 8 rows, the last of as many as are left, and in each group [inputs / 32][rows of the group].
struct Activations {
    int8_t* q;        // of each block [2][32] high parts, then low parts: x = scale * (256 * high + low); or, in groups that
                      // are multiplied in pairs, [2][16] numbers of 16 bits: those with even places, then those with odd ones
    float* scale;     // of each block
    BlockSums* sums;  // of each block
};

// Whether they are kept as numbers of 16 bits. Those of 8 bits are not, where bytes can be multiplied.
bool paired_rows(int64_t rows, int64_t bits) { return PAIRED && rows >= LEAST_PAIRED && !((VNNI || HALF_WIDE) && bits == 8); }

struct Rows {  // [begin, end) of all rows of a pass; a group of 8 is never cut
    int64_t begin, end, all;
};

// Rows of the group that begins with row `first`.
int64_t group_rows(int64_t first, int64_t rows) { return rows - first < ROWS ? rows - first : ROWS; }

float half_to_float(uint16_t h) {
#if WIDE || HALF_WIDE
    return _cvtsh_ss(h);
#else
    uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
    if (exponent == 31) bits = sign | 0x7f800000u | (mantissa << 13);
    else if (exponent) bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    else {
        float value = mantissa * 5.9604644775390625e-8f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
#endif
}

// Of a group, at `values`; `above`: of its super-block, or null.
float group_value(const uint8_t* values, const uint16_t* above, int64_t place) {
    if (!above) return half_to_float(reinterpret_cast<const uint16_t*>(values)[place]);
    return half_to_float(above[place % TILE]) * reinterpret_cast<const int8_t*>(values)[place];
}

// Of a block of a tile, what its super-block has; null where there are none.
const uint16_t* super_of(const uint16_t* supers, const Matrix& w, int64_t tile, int64_t block) {
    return supers ? supers + (tile * (w.inputs / SUPER) + block * BLOCK / SUPER) * TILE : nullptr;
}

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

// One of the `rows` rows of a pass, in 16 bits or 8.
void quantise_row(const float* x, int64_t inputs, int64_t row, int64_t rows, int64_t bits, const Activations& to) {
    const int64_t blocks = inputs / BLOCK, first = row / ROWS * ROWS, step = group_rows(first, rows);
    int64_t at = first * blocks + row - first;
    const QuantiseFunction quantise = quantise_function(step, bits);
    const float range = bits == 8 ? MOST_BYTE : MOST;
    for (int64_t b = 0; b < blocks; b++, at += step) quantise(x + b * BLOCK, range, to.q + at * 2 * BLOCK, to.scale + at, to.sums + at);
}

// One block of it.
void quantise_block_of(const float* x, int64_t block, int64_t blocks, int64_t row, int64_t rows, int64_t bits, const Activations& to) {
    const int64_t first = row / ROWS * ROWS, step = group_rows(first, rows), at = first * blocks + block * step + row - first;
    quantise_function(step, bits)(x, bits == 8 ? MOST_BYTE : MOST, to.q + at * 2 * BLOCK, to.scale + at, to.sums + at);
}

float inverse_rms(const float* x, int64_t size, float eps) {
    float parts[16] = {};
    for (int64_t i = 0; i + 16 <= size; i += 16)
        for (int j = 0; j < 16; j++) parts[j] += x[i + j] * x[i + j];
    float total = 0;
    for (float part : parts) total += part;
    for (int64_t i = size / 16 * 16; i < size; i++) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / size + eps);
}

void normalise(const float* x, const float* weight, float eps, int64_t size, float* to) {
    float factor = inverse_rms(x, size, eps);
    for (int64_t i = 0; i < size; i++) to[i] = x[i] * factor * weight[i];
}

// ---- y = x W^T for one tile of 16 outputs; `y` and `add`: of the tile's first output, `stride` floats from row to row ----

// Where the sums of products begin, of BlockSums::cross, where activations of 8 bits are multiplied with q - zero: weights of Q4_0 and
// Q6_K. -1: q is multiplied as it is, and the sum of activations times a minimum is added. `part`: of the groups of a block.
constexpr int start_of(bool bytes, int bits, int group, bool minimum, int part) {
    return !bytes || minimum ? -1 : bits == 4 ? 2 : group == 16 ? part : -1;
}

#if WIDE
#include "wide.h"
#elif HALF_WIDE
#include "half_wide.h"
#elif NEON_DOTS

#include "neon.h"

#endif

#if WIDE || HALF_WIDE || NEON_DOTS

using TileFunction = void (*)(const Matrix&, int64_t, int64_t, const Activations&, Rows, float*, const float*, int64_t);

// The kinds that files hold: Q4_0, Q4_1, Q4_K; Q8_0, Q5_1, Q5_K; Q6_K.
template <bool BYTES>
TileFunction tile_function_of(const Matrix& w) {
    if (w.bits == 4) {
        if (!w.minimums) return tile_all<4, 32, false, false, BYTES>;
        return w.super_scales ? tile_all<4, 32, true, true, BYTES> : tile_all<4, 32, true, false, BYTES>;
    }
    if (w.group == 16) return tile_all<8, 16, false, true, BYTES>;
    if (!w.minimums) return tile_all<8, 32, false, false, BYTES>;
    return w.super_scales ? tile_all<8, 32, true, true, BYTES> : tile_all<8, 32, true, false, BYTES>;
}

TileFunction tile_function(const Matrix& w, int64_t activations) {
    return activations == 8 ? tile_function_of<true>(w) : tile_function_of<false>(w);
}

#else  // any processor: the same numbers, left to the compiler to make fast

template <bool BYTES>
void tile_all(const Matrix& w, int64_t tile, int64_t, const Activations& x, Rows some, float* y, const float* add, int64_t stride) {
    const Record record(w);
    const int64_t blocks = w.inputs / BLOCK, parts = BLOCK / w.group;
    for (int64_t row = some.begin; row < some.end; row++) {
        const int64_t group = row / ROWS * ROWS, step = group_rows(group, some.all), begin = group * blocks + row - group;
        float sums[TILE] = {};
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t at = begin + b * step;
            for (int64_t part = 0; part < parts; part++) {
                const int start = start_of(BYTES, w.bits, w.group, w.minimums, static_cast<int>(part));
                const float sum = x.sums[at].sum(w.group == 32 ? 2 : static_cast<int>(part));
                int32_t dot[TILE];
                for (int o = 0; o < TILE; o++) dot[o] = start < 0 ? 0 : static_cast<int32_t>(x.sums[at].cross[start]);
                for (int64_t j = part * 8 / parts; j < (part + 1) * 8 / parts; j++) {
                    const int8_t* xq = x.q + at * 2 * BLOCK + 4 * j;
                    const uint8_t* q = record.weights_of(w, tile, b) + (w.bits == 4 ? j % 4 : j) * 64;
                    const int shift = w.bits == 4 && j >= 4 ? 4 : 0, mask = w.bits == 4 ? 15 : 255;
                    for (int o = 0; o < TILE; o++)
                        for (int i = 0; i < 4; i++) dot[o] += ((q[o * 4 + i] >> shift) & mask) * (xq[i] * 256 + xq[i + BLOCK]);
                }
                const uint8_t *scales = record.of(w, tile, b) + record.scales_at(tile), *minimums = record.of(w, tile, b) + record.minimums_at(tile);
                const uint16_t *above = super_of(w.super_scales, w, tile, b), *least = super_of(w.super_minimums, w, tile, b);
                for (int o = 0; o < TILE; o++) {
                    float scale = group_value(scales, above, part * TILE + o);
                    float minimum = w.minimums ? group_value(minimums, least, part * TILE + o) : scale * -w.zero;
                    sums[o] = std::fma(static_cast<float>(dot[o]), scale * x.scale[at], sums[o]);
                    if (start < 0) sums[o] = std::fma(minimum, sum, sums[o]);
                }
            }
        }
        for (int o = 0; o < TILE; o++) {
            int64_t place = row * stride + o;
            if (w.bias) sums[o] += w.bias[tile * TILE + o];
            y[place] = add ? sums[o] + add[place] : sums[o];  // adding a zero would turn -0 into 0
        }
    }
}

using TileFunction = void (*)(const Matrix&, int64_t, int64_t, const Activations&, Rows, float*, const float*, int64_t);
TileFunction tile_function(const Matrix&, int64_t activations) { return activations == 8 ? tile_all<true> : tile_all<false>; }

#endif

// Multiply-adds of 8 bits in a second by the instructions that the products use.
double dots_per_second(double seconds) {
#if WIDE || HALF_WIDE
    constexpr int CHAINS = 12, TIMES = 1000;  // sums that do not wait for each other; rounds between two looks at the clock
#if WIDE
    __m512i sums[CHAINS] = {}, a = _mm512_set1_epi8(1), b = a;
#if VNNI
#define OUTRIDER_DOT(i) asm volatile("vpdpbusd %2, %1, %0" : "+v"(sums[i]) : "v"(a), "v"(b))
#else  // each of 16 bits counts as two
#define OUTRIDER_DOT(i) asm volatile("vpmaddwd %2, %1, %0" : "=v"(sums[i]) : "v"(a), "v"(b))
#endif
#else
    __m256i sums[CHAINS] = {}, a = _mm256_set1_epi8(1), b = a;
#define OUTRIDER_DOT(i) asm volatile("vpmaddubsw %2, %1, %0" : "=x"(sums[i]) : "x"(a), "x"(b))
#endif
    const auto begin = std::chrono::steady_clock::now();
    for (double done = TIMES * CHAINS * sizeof(a);; done += TIMES * CHAINS * sizeof(a)) {
        for (int n = 0; n < TIMES; n++) {
            OUTRIDER_DOT(0); OUTRIDER_DOT(1); OUTRIDER_DOT(2); OUTRIDER_DOT(3); OUTRIDER_DOT(4); OUTRIDER_DOT(5);
            OUTRIDER_DOT(6); OUTRIDER_DOT(7); OUTRIDER_DOT(8); OUTRIDER_DOT(9); OUTRIDER_DOT(10); OUTRIDER_DOT(11);
        }
        const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        if (took >= seconds) return done / took;
    }
#undef OUTRIDER_DOT
#else
    static_cast<void>(seconds);
    return 0;
#endif
}

// ---- numbers of 16 bits that are made for one product, times tiles of 8 bits ----

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

// Tiles [begin, end) of all parts. `y`, `add`: of the first of these, `stride` floats from row to row.
void product_of_tiles(const JoinedMatrices& w, const Activations& x, Rows rows, int64_t begin, int64_t end, float* y, const float* add,
                      int64_t stride) {
    int64_t part = 0, first = 0, after = w.parts[0].outputs / TILE;  // which tiles this part has
    TileFunction multiply = tile_function(w.parts[0], w.activations);
    for (int64_t tile = begin, count; tile < end; tile += count) {
        for (; tile >= after; after += w.parts[part].outputs / TILE) {
            first = after;
            multiply = tile_function(w.parts[++part], w.activations);
        }
        const int64_t offset = (tile - begin) * TILE, left = std::min(end, after) - tile, most = MOST_TILES - (tile - first) % MOST_TILES;
        count = left < most ? left : most;
        multiply(w.parts[part], tile - first, count, x, rows, y + offset, add ? add + offset : nullptr, stride);
    }
}

// Calls some(from, to) for rows whose activations stay near.
template <class Some>
void rows_in_turn(const JoinedMatrices& w, int64_t rows, const Some& some) {
    const int64_t row = w.parts[0].inputs / BLOCK * (2 * BLOCK + sizeof(float) + sizeof(BlockSums));  // bytes
    const int64_t step = NEAR / row < 2 * ROWS ? 2 * ROWS : NEAR / row / ROWS * ROWS;
    for (int64_t from = 0; from < rows; from += step) some(from, from + step < rows ? from + step : rows);
}

// Tiles [begin, end) of all parts. `y`, `add`: [rows][outputs]
void some_outputs(const JoinedMatrices& w, const Activations& x, Rows rows, int64_t begin, int64_t end, float* y, const float* add) {
    const int64_t offset = begin * TILE;
    product_of_tiles(w, x, rows, begin, end, y + offset, add ? add + offset : nullptr, w.outputs);
}

// The tiles of a product are shared out so many at a time: none of those that are multiplied together is alone.
int64_t shares_of(const JoinedMatrices& w) { return (w.outputs / TILE + MOST_TILES - 1) / MOST_TILES; }

// The first tile of a share, and after the last one the end.
int64_t tile_of(const JoinedMatrices& w, int64_t share) { return std::min(share * MOST_TILES, w.outputs / TILE); }

void product(const JoinedMatrices& w, const Activations& x, int64_t rows, float* y, const float* add) {
    pool().run(shares_of(w), 1, [&](int64_t begin, int64_t end, int64_t) {
        rows_in_turn(w, rows, [&](int64_t from, int64_t to) {
            some_outputs(w, x, {from, to, rows}, tile_of(w, begin), tile_of(w, end), y, add);
        });
    });
}

#include "low_rank.h"

// ---- attention ----

// Numbers [0, size) -> 8 bits and their scales. A number that is none shows in all that share its scale.
void round_row(const float* x, int64_t size, int8_t* q, float* scales) {
    for (int64_t from = 0; from < size; from += SCALED) {
        const int64_t end = from + SCALED < size ? from + SCALED : size;
        float most = 0;
        bool finite = true;
        for (int64_t i = from; i < end; i++) {
            const float magnitude = std::fabs(x[i]);
            finite &= magnitude < INFINITY;
            most = magnitude > most ? magnitude : most;
        }
        const bool some = finite && most >= LEAST;
        const float inverse = some ? MOST_KEPT / most : 0.0f;
        for (int64_t i = from; i < end; i++) q[i] = some ? static_cast<int8_t>(std::nearbyint(x[i] * inverse)) : 0;
        scales[from / SCALED] = finite ? (some ? most / MOST_KEPT : 0.0f) : NAN;
    }
}

// The keys, or the values, of one layer and one head, wherever their pages lie. A page of 32 tokens is
//   floats: [32][size];
//   keys of 8 bits: 2 tiles of 16 keys, laid out as those of a matrix, [blocks of 32 numbers][8][16][4] bytes, with 128
//     added; then the scales of both, [tile][groups of 16 numbers][16]. Where some numbers of a key are large (a bias), one
//     more block has what rounding these to 8 bits has left: alone they would err more than all others together;
//   values of 8 bits: [32][whole blocks of 32 numbers], then the scales, [32][groups].
struct PagedRows {
    float* const* pages;
    int64_t offset, size;  // floats from where a page begins to these rows; numbers of one row
    bool bytes;
    float* wide;           // [size] where a value of 8 bits becomes floats
    const int32_t* large;  // of keys of 8 bits: as of a layer

    int64_t blocks() const { return (size + BLOCK - 1) / BLOCK + (large ? 1 : 0); }
    int64_t groups() const { return blocks() * (BLOCK / SCALED); }
    float* page(int64_t place) const { return pages[static_cast<uint64_t>(place) / PAGE] + offset; }  // unsigned: a shift
    static int64_t within(int64_t place) { return static_cast<int64_t>(static_cast<uint64_t>(place) % PAGE); }
    int8_t* numbers(int64_t place) const { return reinterpret_cast<int8_t*>(page(place)); }  // of 8 bits
    float* scales(int64_t place) const { return page(place) + PAGE * blocks() * BLOCK / 4; }

    // A row of floats, with those after it in its page; or a value of 8 bits as floats.
    const float* row(int64_t place) const {
        if (!bytes) return page(place) + within(place) * size;
        const int8_t* q = numbers(place) + within(place) * blocks() * BLOCK;
        const float* scale = scales(place) + within(place) * groups();
        for (int64_t i = 0; i < size; i++) wide[i] = static_cast<float>(q[i]) * scale[i / SCALED];
        return wide;
    }

    void store_value(int64_t place, const float* x) const {
        if (bytes) round_row(x, size, numbers(place) + within(place) * blocks() * BLOCK, scales(place) + within(place) * groups());
        else std::memcpy(page(place) + within(place) * size, x, size * sizeof(float));
    }

    void store_key(int64_t place, const float* x) const {
        if (!bytes) return store_value(place, x);
        const int64_t tile = within(place) / TILE, lane = within(place) % TILE;
        int8_t* to = numbers(place) + tile * blocks() * BLOCK * TILE + lane * 4;
        float* scale = scales(place) + tile * groups() * TILE + lane;
        store_groups(x, size, to, scale);
        if (!large) return;
        float rest[BLOCK] = {};
        for (int i = 0; i < BLOCK; i++) {
            const int64_t d = large[i];
            if (d < 0) continue;
            const int q = static_cast<int8_t>(to[d / 4 * 4 * TILE + d % 4] ^ -128);
            rest[i] = x[d] - static_cast<float>(q) * scale[d / SCALED * TILE];
        }
        const int64_t before = blocks() - 1;
        store_groups(rest, BLOCK, to + before * BLOCK * TILE, scale + before * (BLOCK / SCALED) * TILE);
    }

    // Numbers [0, size) of one key, into its lane of a tile.
    static void store_groups(const float* x, int64_t size, int8_t* to, float* scale) {
        for (int64_t from = 0; from < size; from += SCALED, scale += TILE) {
            int8_t q[SCALED] = {};
            round_row(x + from, size - from < SCALED ? size - from : SCALED, q, scale);
            for (int64_t i = 0; i < SCALED; i += 4, to += 4 * TILE)
                for (int64_t k = 0; k < 4; k++) to[k] = static_cast<int8_t>(q[i + k] ^ -128);
        }
    }
};

// ---- scores of keys of 8 bits ----

// Queries lie in groups of up to ASKED, and in each [blocks][queries of the group].
constexpr int ASKED = 6;

void ask(const float* q, const PagedRows& keys, int64_t step, AskedBlock* to) {
    const int64_t blocks = keys.blocks();
    for (int64_t b = 0; b < blocks; b++, to += step) {
        float x[BLOCK] = {};
        const int64_t from = b * BLOCK;
        if (keys.large && b == blocks - 1) {
            for (int i = 0; i < BLOCK; i++) x[i] = keys.large[i] < 0 ? 0.0f : q[keys.large[i]];
        } else std::memcpy(x, q + from, (keys.size - from < BLOCK ? keys.size - from : BLOCK) * sizeof(float));
        ask_block(x, to);
    }
}

// q . key * factor of N queries for the 16 keys of a tile. `step`: from a query's block to its next one.
template <int N>
inline void tile_scores(const uint8_t* keys, const float* scales, int64_t blocks, const AskedBlock* asked, int64_t step, float factor,
                        float (&to)[N][TILE]) {
    constexpr int GROUPS = BLOCK / SCALED;
    Lanes sums[N];
    for (int n = 0; n < N; n++) sums[n] = all_lanes(0.0f);
    for (int64_t b = 0; b < blocks; b++, asked += step)
        for (int g = 0; g < GROUPS; g++) {
            Lanes dots[N];
            asked_dots<N>(keys + b * BLOCK * TILE, asked, g * SCALED / 4, (g + 1) * SCALED / 4, dots);
            const Lanes scale = load(scales + (b * GROUPS + g) * TILE);
            for (int n = 0; n < N; n++) sums[n] = fused(dots[n], mul(scale, all_lanes(asked[n].scale)), sums[n]);
        }
    for (int n = 0; n < N; n++) store(to[n], mul(sums[n], all_lanes(factor)));
}

// Of N queries that see the first `runs` keys each.
template <int N>
void run_scores(const PagedRows& keys, const AskedBlock* asked, const int64_t* runs, float* const* scores, float factor) {
    int64_t longest = 0;
    for (int n = 0; n < N; n++) longest = runs[n] > longest ? runs[n] : longest;
    const int64_t blocks = keys.blocks();
    for (int64_t i = 0; i < longest; i += TILE) {
        const int64_t tile = PagedRows::within(i) / TILE;
        float to[N][TILE];
        tile_scores<N>(reinterpret_cast<const uint8_t*>(keys.numbers(i)) + tile * blocks * BLOCK * TILE,
                       keys.scales(i) + tile * keys.groups() * TILE, blocks, asked, N, factor, to);
        for (int n = 0; n < N; n++) {
            const int64_t some = runs[n] - i < TILE ? runs[n] - i : TILE;
            if (some > 0) std::memcpy(scores[n] + i, to[n], some * sizeof(float));
        }
    }
}

// Of one query for the keys at `places`: those that lie side by side in a tile are taken together.
void place_scores(const PagedRows& keys, const AskedBlock* asked, int64_t step, const int32_t* places, int64_t count, float factor,
                  float* scores) {
    const int64_t blocks = keys.blocks();
    for (int64_t i = 0, some; i < count; i += some) {
        const int64_t place = places[i], tile = PagedRows::within(place) / TILE, lane = PagedRows::within(place) % TILE;
        for (some = 1; lane + some < TILE && i + some < count && places[i + some] == place + some;) some++;
        float to[1][TILE];
        tile_scores<1>(reinterpret_cast<const uint8_t*>(keys.numbers(place)) + tile * blocks * BLOCK * TILE,
                       keys.scales(place) + tile * keys.groups() * TILE, blocks, asked, step, factor, to);
        std::memcpy(scores + i, to[0] + lane, some * sizeof(float));
    }
}

// q . key * factor for up to 16 keys; the last vectors repeat a key, so that all are added up alike.
// SIZE: that of a head where it is known to the compiler, else 0.
template <int SIZE, class Key>
inline void dots16_of(const float* q, Key key, int64_t some, int64_t size, float factor, float* scores) {
    if (SIZE) size = SIZE;
    Lanes sums[16];
    for (int k = 0; k < 16; k++) {
        const float* one = key(k < some ? k : some - 1);
        sums[k] = mul(load(q), load(one));
        for (int64_t d = 16; d < size; d += 16) sums[k] = fused(load(q + d), load(one + d), sums[k]);
    }
    store_some(scores, mul(sums_of(sums), all_lanes(factor)), some);
}

template <class Key>
inline void dots16(const float* q, Key key, int64_t some, int64_t size, float factor, float* scores) {
    if (size == 64) dots16_of<64>(q, key, some, size, factor, scores);
    else if (size == 128) dots16_of<128>(q, key, some, size, factor, scores);
    else dots16_of<0>(q, key, some, size, factor, scores);
}

// scores = q . key * factor for the keys at `places`
void dots(const float* q, const PagedRows& keys, const int32_t* places, int64_t seen, float factor, float* scores) {
    int64_t i = 0;
    for (; keys.size % 16 == 0 && i < seen; i += 16)
        dots16(q, [&](int64_t k) { return keys.row(places[i + k]); }, seen - i < 16 ? seen - i : 16, keys.size, factor, scores + i);
    for (; i < seen; i++) {
        const float* key = keys.row(places[i]);
        float total = 0;
        for (int64_t d = 0; d < keys.size; d++) total += q[d] * key[d];
        scores[i] = total * factor;
    }
}

// to = gate / (1 + e^-gate) * up
void gated(const float* gate, const float* up, int64_t size, float* to) {
    for (int64_t i = 0; i < size; i += 16) {  // a multiple of 16, as all inputs of a product
        const Lanes g = load(gate + i);
        const Lanes below = add(all_lanes(1.0f), exp16(smaller(sub(all_lanes(0.0f), g), all_lanes(87.0f))));
        store(to + i, mul(div(g, below), load(up + i)));
    }
}

// The largest score; a NaN does not count, it shows in the sum of exponentials.
float largest(const float* scores, int64_t size) {
    float most = -INFINITY;
    int64_t i = 0;
    Lanes parts = all_lanes(most);
    for (; i + 16 <= size; i += 16) parts = larger(load(scores + i), parts);
    most = largest_of(parts);
    for (; i < size; i++) most = scores[i] > most ? scores[i] : most;
    return most;
}

// scores -> e^(score - most); returns their sum
float exponentials(float* scores, int64_t size, float most) {
    Lanes sums = all_lanes(0.0f);
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        const Lanes e = exp16(sub(load(scores + i), all_lanes(most)));
        store(scores + i, e);
        sums = add(sums, e);
    }
    if (i < size) {
        const Lanes e = exp16(sub(load_some(scores + i, size - i), all_lanes(most)));
        store_some(scores + i, e, size - i);
        sums = add(sums, only(e, size - i));
    }
    return sum_of(sums);
}

// to = sum of scores[i] * values[places[i]] / total
void mix(const float* scores, const PagedRows& values, const int32_t* places, int64_t seen, float total, float* to) {
    const int64_t size = values.size;
    int64_t d = 0;
    const Lanes factor = all_lanes(1.0f / total);
    for (; d + 64 <= size; d += 64) {
        Lanes sum[4] = {all_lanes(0.0f), all_lanes(0.0f), all_lanes(0.0f), all_lanes(0.0f)};
        for (int64_t i = 0; i < seen; i++) {
            const float* value = values.row(places[i]) + d;
            const Lanes score = all_lanes(scores[i]);
            for (int j = 0; j < 4; j++) sum[j] = fused(score, load(value + 16 * j), sum[j]);
        }
        for (int j = 0; j < 4; j++) store(to + d + 16 * j, mul(sum[j], factor));
    }
    if (d == size) return;
    std::memset(to + d, 0, (size - d) * sizeof(float));
    for (int64_t i = 0; i < seen; i++) {
        const float* value = values.row(places[i]);
        for (int64_t j = d; j < size; j++) to[j] += scores[i] * value[j];
    }
    for (; d < size; d++) to[d] *= 1.0f / total;
}

void rotate(float* x, const float* cos, const float* sin, int64_t size) {
    for (int64_t i = 0; i < size / 2; i++) {
        float a = x[i], b = x[i + size / 2];
        x[i] = a * cos[i] + b * sin[i];
        x[i + size / 2] = b * cos[i + size / 2] + a * sin[i + size / 2];
    }
}

PagedRows keys_of(const Shape& s, const Layer& layer, const Span& span, int64_t index, int64_t kv_head, float* wide = nullptr) {
    const int32_t* large = layer.large ? layer.large + kv_head * BLOCK : nullptr;
    return {span.pages, index * span.layer_stride + kv_head * span.head_stride, s.head_dim, s.kv_bits == 8, wide, large};
}

// The values beside these keys.
PagedRows values_of(const Span& span, const PagedRows& keys) {
    return {keys.pages, keys.offset + span.values, keys.size, keys.bytes, keys.wide, nullptr};
}

// One head of a new row, x: queries and keys are normalised and rotated; keys and values go where they stay. `head`: of the queries,
// then of the keys, then of the values. `place`: the token's.
void store_head(const Shape& s, const Layer& layer, const Span& span, int64_t index, int64_t place, int64_t head, float* x,
                const float* cos, const float* sin) {
    const int64_t key = head - s.heads, value = key - s.kv_heads;
    if (value >= 0) return values_of(span, keys_of(s, layer, span, index, value)).store_value(place, x);
    if (const float* norm = key < 0 ? layer.query_norm : layer.key_norm) normalise(x, norm, s.eps, s.head_dim, x);
    rotate(x, cos, sin, s.head_dim);
    if (key >= 0) keys_of(s, layer, span, index, key).store_key(place, x);
}

// A query: one head of one row, over the keys at `places`, in order.
struct Query {
    const float* q;
    const int32_t* places;
    int64_t seen, run;  // places, and how many of the first are 0, 1, 2 and so on
    float* scores;
    float* to;
};

void attend(const Query& query, const PagedRows& keys, const PagedRows& values, AskedBlock* asked) {
    const float factor = 1.0f / std::sqrt(static_cast<float>(keys.size));
    if (keys.bytes) {
        ask(query.q, keys, 1, asked);
        place_scores(keys, asked, 1, query.places, query.seen, factor, query.scores);
    } else dots(query.q, keys, query.places, query.seen, factor, query.scores);
    float total = exponentials(query.scores, query.seen, largest(query.scores, query.seen));
    mix(query.scores, values, query.places, query.seen, total, query.to);
}

constexpr int MIXED = WIDE ? 4 : 1;  // vectors of a head that are mixed at a time: the sums of 6 queries stay in registers

// sums += score * value for `some` keys of one page from `begin` on and up to 6 queries, 16 * MIXED of the head's numbers
template <int N, bool BYTES>
inline void mix_some(const Query* queries, const PagedRows& values, int64_t begin, int64_t some, int64_t d) {
    Lanes sums[N][MIXED];
    for (int n = 0; n < N; n++)
        for (int j = 0; j < MIXED; j++) sums[n][j] = load(queries[n].to + d + 16 * j);
    const int64_t stride = BYTES ? values.blocks() * BLOCK : values.size, groups = values.groups();
    const float* floats = BYTES ? nullptr : values.row(begin) + d;
    const int8_t* bytes = BYTES ? values.numbers(begin) + PagedRows::within(begin) * stride + d : nullptr;
    const float* scales = BYTES ? values.scales(begin) + PagedRows::within(begin) * groups + d / SCALED : nullptr;
    for (int64_t i = 0; i < some; i++) {
        Lanes value[MIXED];
        for (int j = 0; j < MIXED; j++) {
            if (BYTES) value[j] = mul(load_bytes(bytes + i * stride + 16 * j), all_lanes(scales[i * groups + 16 * j / SCALED]));
            else value[j] = load(floats + i * stride + 16 * j);
        }
        for (int n = 0; n < N; n++) {
            const Lanes score = all_lanes(queries[n].scores[begin + i]);
            for (int j = 0; j < MIXED; j++) sums[n][j] = fused(score, value[j], sums[n][j]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int j = 0; j < MIXED; j++) store(queries[n].to + d + 16 * j, sums[n][j]);
}

template <bool BYTES>
void mix_page(const Query* queries, int64_t count, const PagedRows& values, int64_t begin, int64_t some, int64_t d) {
    switch (count) {
        case 1: return mix_some<1, BYTES>(queries, values, begin, some, d);
        case 2: return mix_some<2, BYTES>(queries, values, begin, some, d);
        case 3: return mix_some<3, BYTES>(queries, values, begin, some, d);
        case 4: return mix_some<4, BYTES>(queries, values, begin, some, d);
        case 5: return mix_some<5, BYTES>(queries, values, begin, some, d);
        default: return mix_some<6, BYTES>(queries, values, begin, some, d);
    }
}

// Scores of up to 6 queries for keys of 8 bits: those of their runs together, then each for what it sees beside its run.
void byte_scores(const Query* queries, int64_t count, const PagedRows& keys, AskedBlock* asked, float factor) {
    int64_t runs[ASKED];
    float* scores[ASKED];
    for (int64_t n = 0; n < count; n++) {
        ask(queries[n].q, keys, count, asked + n);
        runs[n] = queries[n].run;
        scores[n] = queries[n].scores;
    }
    switch (count) {
        case 1: run_scores<1>(keys, asked, runs, scores, factor); break;
        case 2: run_scores<2>(keys, asked, runs, scores, factor); break;
        case 3: run_scores<3>(keys, asked, runs, scores, factor); break;
        case 4: run_scores<4>(keys, asked, runs, scores, factor); break;
        case 5: run_scores<5>(keys, asked, runs, scores, factor); break;
        default: run_scores<6>(keys, asked, runs, scores, factor);
    }
    for (int64_t n = 0; n < count; n++)
        place_scores(keys, asked + n, count, queries[n].places + runs[n], queries[n].seen - runs[n], factor, scores[n] + runs[n]);
}

#if WIDE
// The same numbers as dots16 for two queries and 8 keys that lie side by side: each part of a key is read once for both.
// SIZE: as for dots16_of.
template <int SIZE>
inline void dots8_of_two(const Query& one, const Query& other, const float* keys, int64_t size, float factor, int64_t place) {
    if (SIZE) size = SIZE;
    __m512 sums[16];
#pragma GCC unroll 8
    for (int64_t d = 0; d < size; d += 16) {
        const __m512 first = _mm512_loadu_ps(one.q + d), second = _mm512_loadu_ps(other.q + d);
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            const __m512 key = _mm512_loadu_ps(keys + k * size + d);
            sums[k] = d ? _mm512_fmadd_ps(first, key, sums[k]) : _mm512_mul_ps(first, key);
            sums[k + 8] = d ? _mm512_fmadd_ps(second, key, sums[k + 8]) : _mm512_mul_ps(second, key);
        }
    }
    const __m512 scores = _mm512_mul_ps(sums_of(sums), _mm512_set1_ps(factor));
    _mm256_storeu_ps(one.scores + place, _mm512_castps512_ps256(scores));
    _mm256_storeu_ps(other.scores + place, _mm512_extractf32x8_ps(scores, 1));
}
#endif

int64_t longest_run(const Query* queries, int64_t count) {
    int64_t longest = 0;
    for (int64_t n = 0; n < count; n++) longest = queries[n].run > longest ? queries[n].run : longest;
    return longest;
}

#if WIDE
#include "turned.h"
#endif

// Scores of queries for keys that are floats, as far as their runs go.
void run_dots(const Query* queries, int64_t count, const PagedRows& keys, float factor) {
    const int64_t size = keys.size, longest = longest_run(queries, count);
#if WIDE
    const auto two = size == 64 ? dots8_of_two<64> : size == 128 ? dots8_of_two<128> : dots8_of_two<0>;
#endif
    for (int64_t i = 0; i < longest; i += 16) {
        const float* first = keys.row(i);  // the 16 lie in one page
        for (int64_t n = 0; n < count; n++) {
            const int64_t some = queries[n].run - i;
#if WIDE
            if (n + 1 < count && some >= 16 && queries[n + 1].run - i >= 16) {
                for (int64_t k = 0; k < 16; k += 8) two(queries[n], queries[n + 1], first + k * size, size, factor, i + k);
                n++;
                continue;
            }
#endif
            if (some > 0)
                dots16(queries[n].q, [&](int64_t k) { return first + k * size; }, some < 16 ? some : 16, size, factor,
                       queries[n].scores + i);
        }
    }
}

// The same; `turning`: a number of the job where many queries have these keys, else 0.
void float_scores(const Query* queries, int64_t count, const PagedRows& keys, float factor, int64_t turning) {
#if WIDE
    const int64_t longest = longest_run(queries, count);
    if (turning && longest <= MOST_TURNED && (keys.size == 64 || keys.size == 128)) {
        const float* tiles = TurnedKeys::of_this_thread().tiles(keys, longest, turning);
        return (keys.size == 64 ? turned_scores<64> : turned_scores<128>)(tiles, queries, count, factor);
    }
#else
    static_cast<void>(turning);
#endif
    run_dots(queries, count, keys, factor);
}

// Queries that see runs of the first keys: each piece of these keys, and of the values that all of them see, is read once.
// Every query's numbers are those that it would get alone.
void attend_together(const Query* queries, int64_t count, const PagedRows& keys, const PagedRows& values, AskedBlock* asked, int64_t turning) {
    const int64_t size = keys.size;
    const float factor = 1.0f / std::sqrt(static_cast<float>(size));
    int64_t shared = queries[0].run;
    for (int64_t n = 1; n < count; n++) shared = queries[n].run < shared ? queries[n].run : shared;
    for (int64_t n = 0; keys.bytes && n < count; n += ASKED)
        byte_scores(queries + n, count - n < ASKED ? count - n : ASKED, keys, asked, factor);
    if (!keys.bytes) float_scores(queries, count, keys, factor, turning);
    float totals[TOGETHER];
    for (int64_t n = 0; n < count; n++) {
        const Query& query = queries[n];
        if (!keys.bytes) dots(query.q, keys, query.places + query.run, query.seen - query.run, factor, query.scores + query.run);
        totals[n] = exponentials(query.scores, query.seen, largest(query.scores, query.seen));
        std::memset(query.to, 0, size * sizeof(float));
    }
    for (int64_t begin = 0; begin < shared; begin += PAGE) {
        const int64_t some = shared - begin < PAGE ? shared - begin : PAGE;
        for (int64_t n = 0; n < count; n += ASKED)
            for (int64_t d = 0; d < size; d += 16 * MIXED)
                (values.bytes ? mix_page<true> : mix_page<false>)(queries + n, count - n < ASKED ? count - n : ASKED, values, begin, some, d);
    }
    for (int64_t n = 0; n < count; n++) {
        const Query& query = queries[n];
        for (int64_t i = shared; i < query.seen; i++) {
            const float* value = values.row(query.places[i]);
            const Lanes score = all_lanes(query.scores[i]);
            for (int64_t d = 0; d < size; d += 16) store(query.to + d, fused(score, load(value + d), load(query.to + d)));
        }
        const Lanes inverse = all_lanes(1.0f / totals[n]);
        for (int64_t d = 0; d < size; d += 16) store(query.to + d, mul(load(query.to + d), inverse));
    }
}

void attend_all(const Query* queries, int64_t count, const PagedRows& keys, const PagedRows& values, AskedBlock* asked, int64_t turning) {
    bool together = keys.size % 64 == 0;  // not where a window hides the first keys: nothing would be shared
    for (int64_t n = 0; n < count; n++) together &= queries[n].run > 0;
    if (together) return attend_together(queries, count, keys, values, asked, turning);
    for (int64_t n = 0; n < count; n++) attend(queries[n], keys, values, asked);
}

// The place of the largest logit, and its chance under softmax; the logits are overwritten.
int64_t likeliest(float* logits, int64_t size, float* chance) {
    const float most = largest(logits, size);
    int64_t place = 0;
    while (place < size - 1 && logits[place] != most) place++;
    *chance = 1.0f / exponentials(logits, size, most);
    return place;
}

#include "grow.h"

struct Item {
    int64_t span, kv_head, first, count;  // queries [first, first + count) of the span's rows x heads of the group
};

// As many queries in an item as one reading of the keys serves. Each thread's items lie side by side, as the pool shares them out; of
// those that are left over, fewer than threads, each thread has a part, so that all end together.
std::vector<Item> attention_items(const Shape& s, const Span* spans, int64_t span_count) {
    const int64_t group = s.heads / s.kv_heads, threads = pool().size();
    const int64_t most = group > TOGETHER ? TOGETHER : TOGETHER / group * group;
    std::vector<Item> whole, items;
    for (int64_t n = 0; n < span_count; n++)
        for (int64_t h = 0; h < s.kv_heads; h++)
            for (int64_t first = 0; first < spans[n].rows * group; first += most) {
                const int64_t rest = spans[n].rows * group - first;
                whole.push_back({n, h, first, rest < most ? rest : most});
            }
    const size_t each = whole.size() / threads;
    for (int64_t id = 0; id < threads; id++) {
        items.insert(items.end(), whole.begin() + id * each, whole.begin() + (id + 1) * each);
        for (size_t i = threads * each; i < whole.size(); i++) {
            const Item& item = whole[i];
            const int64_t begin = id * item.count / threads, end = (id + 1) * item.count / threads;
            if (begin < end) items.push_back({item.span, item.kv_head, item.first + begin, end - begin});
        }
    }
    return items;
}

struct Work {
    Activations x, gated;                 // inputs of the product at hand, and of `down`
    float *normed, *qkv, *mixed, *inner;  // [rows][inputs of a head's first product], [rows][all heads], [rows][heads], [rows][2 * inner]
    float* scores;                        // [threads][12][longest]
    float* wide;                          // [threads][head_dim] where a value of 8 bits becomes floats
    AskedBlock* asked;                    // [threads][6][blocks of a head] queries for keys of 8 bits
    int32_t* places;                      // [rows][longest] what each row sees
    int32_t* seen;                        // [rows] how much of that
    int32_t* runs;                        // [rows] how many of these are 0, 1, 2 and so on
    int32_t* owners;                      // [rows] its span
    int64_t longest;
};

// What the layers of a head have that those of a model do not.
struct HeadInputs {
    const float* embedded;        // [rows][hidden]: the first layer reads norm(embedded) and norm(x) side by side; or null
    const float* embedding_norm;
    int64_t replaces;             // whether norm(x) then takes the place of x
    const int32_t* trails;        // [rows][length]: what a row sees between what all see and what this pass brings
    int64_t length;
    const int64_t* seen;          // [spans]: what all rows see; the new ones lie after `start`
    int64_t last;                 // whether only the last row's result is wanted: of the others the last layer keeps keys and values
};

// Rows of a pass whose results are rounded for the next product by whoever has them first; count 0: they are not.
struct Rounded {
    int64_t first, count;
};

// Whether the outputs of a head are whole blocks and records of two tiles, so that a thread can take heads.
bool whole_heads(const Shape& s) { return s.head_dim % BLOCK == 0; }

void attend_item(const Shape& s, const Layer& layer, const Item& item, const Span& span, int64_t index, int64_t all, Rounded rounded,
                 int64_t thread, int64_t job, const Work* work) {
    const int64_t group = s.heads / s.kv_heads;
    float* scores = work->scores + thread * TOGETHER * work->longest;
    const PagedRows keys = keys_of(s, layer, span, index, item.kv_head, work->wide + thread * s.head_dim);
    Query queries[TOGETHER];
    for (int64_t n = 0; n < item.count; n++) {
        const int64_t row = span.first + (item.first + n) / group, h = item.kv_head * group + (item.first + n) % group;
        queries[n] = {work->qkv + row * all + h * s.head_dim, work->places + row * work->longest, work->seen[row], work->runs[row],
                      scores + n * work->longest, work->mixed + (row * s.heads + h) * s.head_dim};
    }
    const int64_t turning = span.rows * group >= LEAST_TURNING ? job : 0;
    attend_all(queries, item.count, keys, values_of(span, keys), work->asked + thread * ASKED * keys.blocks(), turning);
    for (int64_t n = 0; rounded.count && n < item.count; n++) {
        const int64_t at = queries[n].to - work->mixed, row = at / (s.heads * s.head_dim), first = at % (s.heads * s.head_dim) / BLOCK;
        for (int64_t b = 0; b < s.head_dim / BLOCK; b++)
            quantise_block_of(queries[n].to + b * BLOCK, first + b, s.heads * s.head_dim / BLOCK, row - rounded.first, rounded.count,
                              layer.output.activations, work->x);
    }
}

#include "own.h"

// What the layers of a pass read and write; see outrider_layers.
struct LayerPass {
    const Shape& s;
    const Layer* layers;
    const Span* spans;
    float* x;
    const float *cos, *sin;
    const int32_t* wanted;
    int64_t wanted_count;
    float* kept;
    int64_t rows;
    const Work* work;

    int64_t q_size() const { return s.heads * s.head_dim; }
    int64_t all() const { return (s.heads + 2 * s.kv_heads) * s.head_dim; }  // outputs of qkv
};

// What each row sees: the tokens before this pass, then its own ancestors, oldest first.
void find_seen(const LayerPass& pass, int64_t span_count, const int32_t* positions, const int32_t* parents, const HeadInputs* head_inputs) {
    const int64_t window = pass.s.window;
    const Work* work = pass.work;
    const auto shared = [&](int64_t n) { return head_inputs && head_inputs->seen ? head_inputs->seen[n] : pass.spans[n].start; };
    for (int64_t n = 0; n < span_count; n++) {
        const Span& span = pass.spans[n];
        for (int64_t r = 0; r < span.rows; r++) {
            int64_t row = span.first + r, count = 0;
            int64_t oldest = window ? positions[row] - window + 1 : 0;
            int32_t* places = work->places + row * work->longest;
            for (int64_t p = oldest > 0 ? oldest : 0; p < shared(n); p++) places[count++] = static_cast<int32_t>(p);
            for (int64_t i = 0; head_inputs && i < head_inputs->length; i++) places[count++] = head_inputs->trails[row * head_inputs->length + i];
            int64_t before = count;
            for (int64_t a = r; a >= 0; a = parents[span.first + a])
                if (positions[span.first + a] >= oldest) places[count++] = static_cast<int32_t>(span.start + a);
            for (int64_t i = before, j = count - 1; i < j; i++, j--) {
                int32_t swap = places[i];
                places[i] = places[j];
                places[j] = swap;
            }
            int64_t run = oldest > 0 ? 0 : shared(n);
            while (run < count && places[run] == run) run++;
            work->runs[row] = static_cast<int32_t>(run);
            work->seen[row] = static_cast<int32_t>(count);
            work->owners[row] = static_cast<int32_t>(n);
        }
    }
}

// [norm(embedded), norm(x)] of each row, ready to be multiplied
void join(const Shape& s, const Layer& layer, const HeadInputs& head_inputs, int64_t rows, float* x, const Work* work) {
    pool().run(rows, SERIAL, [&](int64_t begin, int64_t end, int64_t) {
        for (int64_t r = begin; r < end; r++) {
            float *both = work->normed + r * 2 * s.hidden, *row = x + r * s.hidden;
            normalise(head_inputs.embedded + r * s.hidden, head_inputs.embedding_norm, s.eps, s.hidden, both);
            normalise(row, layer.attention_norm, s.eps, s.hidden, both + s.hidden);
            if (head_inputs.replaces) std::memcpy(row, both + s.hidden, s.hidden * sizeof(float));
            quantise_row(both, 2 * s.hidden, r, rows, layer.qkv.activations, work->x);
        }
    });
}

// norm(x) of one row; x itself where there is no norm
const float* normed(const float* x, const float* norm, float eps, int64_t size, Own& own) {
    if (!norm) return x;
    float* to = own.row(size);
    normalise(x, norm, eps, size, to);
    return to;
}

// One head of a row, see store_head; `row`: of the pass.
void store_head_of(const LayerPass& pass, int64_t index, int64_t row, int64_t head) {
    const Shape& s = pass.s;
    const Span& span = pass.spans[pass.work->owners[row]];
    store_head(s, pass.layers[index], span, index, span.start + row - span.first, head, pass.work->qkv + row * pass.all() + head * s.head_dim,
               pass.cos + row * s.head_dim, pass.sin + row * s.head_dim);
}

// Queries, keys and values of some rows, and these where attention reads them.
template <class Some>
void project(const LayerPass& pass, int64_t index, const Some& some) {
    const Shape& s = pass.s;
    const Layer& layer = pass.layers[index];
    const float* x = pass.x + some.first * s.hidden;
    const auto row = [&](int64_t r, Own& own) { return normed(x + r * s.hidden, layer.attention_norm, s.eps, s.hidden, own); };
    const auto store = [&](int64_t r, int64_t head) { store_head_of(pass, index, some.first + r, head); };
    some.heads(layer.qkv, row, s.head_dim, pass.work->qkv + some.first * pass.all(), store);
}

void attend_items(const LayerPass& pass, int64_t index, const std::vector<Item>& items, const std::vector<Span>& spans, Rounded rounded) {
    const int64_t job = Own::of_this_thread().next_job();
    pool().run(static_cast<int64_t>(items.size()), 1, [&](int64_t begin, int64_t end, int64_t id) {
        for (int64_t item = begin; item < end; item++)
            attend_item(pass.s, pass.layers[index], items[item], spans[items[item].span], index, pass.all(), rounded, id, job, pass.work);
    });
}

// What a layer does with some rows after attention. `mixed`, `x`: of the first of them.
template <class Some>
void finish_layer(const LayerPass& pass, int64_t index, const Some& some, const float* mixed, float* x) {
    const Shape& s = pass.s;
    const Layer& layer = pass.layers[index];
    const int64_t q_size = pass.q_size();
    some.output(layer.output, [&](int64_t r, Own&) { return mixed + r * q_size; }, x);
    some.feed_forward(layer, s.inner, [&](int64_t r, Own& own) { return normed(x + r * s.hidden, layer.mlp_norm, s.eps, s.hidden, own); }, x);
    for (int64_t k = 0; k < pass.wanted_count; k++)
        if (pass.wanted[k] == index) std::memcpy(pass.kept + (k * pass.rows + some.first) * s.hidden, x, some.count * s.hidden * sizeof(float));
}

// Layers whose products are shared by their outputs.
void run_shared(const LayerPass& pass, int64_t span_count, const HeadInputs* head_inputs, AdaptedRows* adapted) {
    const Shape& s = pass.s;
    std::vector<Item> items = attention_items(s, pass.spans, span_count);
    std::vector<Span> ends(pass.spans, pass.spans + span_count);
    SharedRows some = {0, pass.rows, pass.work, adapted, 0, whole_heads(s)};
    float* x = pass.x;
    for (int64_t index = 0; index < s.layers; index++) {
        some.index = index;
        if (index == 0 && head_inputs && head_inputs->embedded) {
            join(s, pass.layers[0], *head_inputs, some.count, x, pass.work);
            product(pass.layers[0].qkv, pass.work->x, some.count, pass.work->qkv, nullptr);
            some.each([&](int64_t r) {
                for (int64_t head = 0; head < s.heads + 2 * s.kv_heads; head++) store_head_of(pass, index, r, head);
            });
        } else project(pass, index, some);
        if (head_inputs && head_inputs->last && index == s.layers - 1 && some.count > 1) {  // of one span; from here on there is one row
            ends[0].first += ends[0].rows - 1;
            ends[0].rows = 1;
            items = attention_items(s, ends.data(), 1);
            x += (some.count - 1) * s.hidden;
            some.count = 1;
        }
        attend_items(pass, index, items, ends, {ends[0].first, some.attended ? some.count : 0});
        finish_layer(pass, index, some, pass.work->mixed + ends[0].first * pass.q_size(), x);
    }
}

// Layers whose rows stay with a thread, `chunk` at a time: the threads wait for each other before and after attention.
void run_chunks(const LayerPass& pass, int64_t span_count, int64_t chunk) {
    const std::vector<Item> items = attention_items(pass.s, pass.spans, span_count);
    const std::vector<Span> spans(pass.spans, pass.spans + span_count);
    for (int64_t index = 0; index <= pass.s.layers; index++) {
        pool().run((pass.rows + chunk - 1) / chunk, 1, [&](int64_t begin, int64_t end, int64_t) {
            for (int64_t first = begin * chunk; first < end * chunk && first < pass.rows; first += chunk) {
                const OwnRows some = {first, pass.rows - first < chunk ? pass.rows - first : chunk};
                if (index) finish_layer(pass, index - 1, some, pass.work->mixed + first * pass.q_size(), pass.x + first * pass.s.hidden);
                if (index < pass.s.layers) project(pass, index, some);
            }
        });
        if (index < pass.s.layers) attend_items(pass, index, items, spans, {0, 0});
    }
}

}  // namespace

extern "C" {

// Rows `ids` of a matrix as float32: an embedding. Returns how many are written: all, or those before one that is not there.
int64_t outrider_rows(const Matrix* w, const int64_t* ids, int64_t count, float* to) {
    const Record record(*w);
    const int64_t parts = BLOCK / w->group;
    for (int64_t n = 0; n < count; n++) {
        if (ids[n] < 0 || ids[n] >= w->outputs) return n;
        const int64_t tile = ids[n] / TILE, lane = ids[n] % TILE, blocks = w->inputs / BLOCK;
        for (int64_t part = 0; part < blocks * parts; part++) {
            const int64_t block = part / parts, place = part % parts * TILE + lane;
            const uint8_t* at = record.of(*w, tile, block);
            const float scale = group_value(at + record.scales_at(tile), super_of(w->super_scales, *w, tile, block), place);
            const float minimum = w->minimums ? group_value(at + record.minimums_at(tile), super_of(w->super_minimums, *w, tile, block), place) : 0.0f;
            const bool four = w->bits == 4;
            const uint8_t* q = record.weights_of(*w, tile, block) + lane * 4;
            float* row = to + n * w->inputs + part * w->group;
            for (int64_t i = 0; i < w->group; i++) {
                const int64_t vector = (part % parts * w->group + i) / 4;
                const uint8_t byte = q[(four ? vector % 4 : vector) * TILE * 4 + i % 4];
                const int quantum = !four ? byte : vector < 4 ? byte & 15 : byte >> 4;
                const float value = scale * static_cast<float>(quantum - w->zero);
                row[i] = w->minimums ? value + minimum : value;
            }
        }
    }
    return count;
}

// Multiply-adds of 8 bits in a second by all threads, in a loop on registers that runs for about this time: what the products
// could reach at best. 0 where the compiler chooses the instructions.
double outrider_peak(double seconds) {
    std::vector<double> found(pool().size(), 0.0);
    pool().run(pool().size(), 1, [&](int64_t begin, int64_t end, int64_t) {
        for (int64_t share = begin; share < end; share++) found[share] = dots_per_second(seconds);
    });
    double total = 0;
    for (double each : found) total += each;
    return total;
}

// How many threads the calling thread's kernels use.
void outrider_threads(int64_t threads) { pool().resize(threads > 1 ? threads : 1); }

// y = W norm(x); `norm` may be null.
void outrider_linear(const JoinedMatrices* w, const float* x, const float* norm, float eps, int64_t rows, float* y, const Work* work) {
    const SharedRows some = {0, rows, work, nullptr, 0, false};
    const int64_t size = w->parts[0].inputs;
    some.linear(*w, [&](int64_t r, Own& own) { return normed(x + r * size, norm, eps, size, own); }, y, nullptr, nullptr);
}

// The layers of a model over the rows of all spans; x [rows][hidden] is read and overwritten.
// cos, sin: [rows][head_dim]; positions: [rows]; parents: [rows], a row's parent among its span's rows, or -1.
// kept: for each layer of `wanted`, x after it, [count][rows][hidden].
// head_inputs: null for the layers of a model. adapters: null where no row has one; a head's rows never have.
void outrider_layers(const Shape* shape, const Layer* layers, const Span* spans, int64_t span_count, int64_t rows, float* x,
                     const float* cos, const float* sin, const int32_t* positions, const int32_t* parents,
                     const int32_t* wanted, int64_t wanted_count, float* kept, const Work* work, const HeadInputs* head_inputs,
                     const Adapters* adapters) {
    const LayerPass pass = {*shape, layers, spans, x, cos, sin, wanted, wanted_count, kept, rows, work};
    find_seen(pass, span_count, positions, parents, head_inputs);
    AdaptedRows adapted(adapters, rows, shape->layers);
    const int64_t chunk = head_inputs || adapters ? 0 : chunk_of(rows, pool().size());
    if (chunk) run_chunks(pass, span_count, chunk);
    else run_shared(pass, span_count, head_inputs, &adapted);
}

struct Head {  // of EAGLE-3, beside its layers
    JoinedMatrices fc, output;
    const Matrix* embedding;   // the target's, or null: then it writes no chains
    const float* input_norms;  // [blocks][hidden] or null
    const float* joined_norm;  // [blocks * hidden] or null
    const float *embedding_norm, *norm;
    const int64_t* ids;        // [tokens] that it can write
    int64_t tokens, blocks;    // blocks of the target that it reads
    int32_t norm_residual, norm_output;
};

// What the head reads of the target: x [rows][hidden]; shown: [rows][blocks], each [hidden].
void outrider_states(const Shape* shape, const Head* head, const float* const* shown, int64_t rows, float* x, const Work* work) {
    const int64_t size = shape->hidden, inputs = head->blocks * size;
    pool().run(rows, SERIAL, [&](int64_t begin, int64_t end, int64_t) {
        for (int64_t r = begin; r < end; r++) {
            float* joined = work->normed + r * inputs;
            for (int64_t b = 0; b < head->blocks; b++) {
                const float* state = shown[r * head->blocks + b];
                if (head->input_norms) normalise(state, head->input_norms + b * size, shape->eps, size, joined + b * size);
                else std::memcpy(joined + b * size, state, size * sizeof(float));
            }
            if (head->joined_norm) normalise(joined, head->joined_norm, shape->eps, inputs, joined);
            quantise_row(joined, inputs, r, rows, head->fc.activations, work->x);
        }
    });
    product(head->fc, work->x, rows, x, nullptr);
}

// What the next step of the head reads of x [rows][hidden], where that is what its output matrix reads.
void outrider_normed(const Shape* shape, const Head* head, int64_t rows, float* x) {
    for (int64_t r = 0; r < rows; r++) normalise(x + r * shape->hidden, head->norm, shape->eps, shape->hidden, x + r * shape->hidden);
}

// The head's layers over the rows of spans, each of which follows the one before; x is read and overwritten. cos, sin: of all
// positions. Of one span only the last row's result is computed to its end. Returns whether all tokens are there.
static bool follow(const Shape& s, const Layer* layers, const Head& head, const Span* spans, int64_t span_count, const int64_t* tokens,
                   float* x, const float* cos, const float* sin, const Work* work) {
    const int64_t rows = spans[span_count - 1].first + spans[span_count - 1].rows;
    std::vector<float> embedded(rows * s.hidden), own_cos, own_sin;
    if (outrider_rows(head.embedding, tokens, rows, embedded.data()) < rows) return false;
    std::vector<int32_t> positions(rows), parents(rows);
    for (int64_t n = 0; n < span_count; n++) {
        const Span& span = spans[n];
        for (int64_t r = 0; r < span.rows; r++) {
            positions[span.first + r] = static_cast<int32_t>(span.start + r);
            parents[span.first + r] = static_cast<int32_t>(r - 1);
        }
        if (span_count == 1) continue;
        own_cos.insert(own_cos.end(), cos + span.start * s.head_dim, cos + (span.start + span.rows) * s.head_dim);
        own_sin.insert(own_sin.end(), sin + span.start * s.head_dim, sin + (span.start + span.rows) * s.head_dim);
    }
    const int64_t turn = spans[0].start * s.head_dim, one = span_count == 1;
    const HeadInputs head_inputs = {embedded.data(), head.embedding_norm, head.norm_residual, nullptr, 0, nullptr, one};
    outrider_layers(&s, layers, spans, span_count, rows, x, one ? cos + turn : own_cos.data(), one ? sin + turn : own_sin.data(),
                    positions.data(), parents.data(), nullptr, 0, nullptr, work, &head_inputs, nullptr);
    return true;
}

// Take in the tokens of spans, each with what the target has shown before it. states: [spans][hidden], what the layers make of
// the last row of each. Returns whether all tokens are there.
static bool take_in(const Shape& s, const Layer* layers, const Head& head, const Span* spans, int64_t span_count, const int64_t* tokens,
                    const float* const* shown, const float* cos, const float* sin, std::vector<float>& states, const Work* work) {
    const int64_t rows = spans[span_count - 1].first + spans[span_count - 1].rows;
    std::vector<float> x(rows * s.hidden);
    outrider_states(&s, &head, shown, rows, x.data(), work);
    if (!follow(s, layers, head, spans, span_count, tokens, x.data(), cos, sin, work)) return false;
    for (int64_t n = 0; n < span_count; n++) {
        const auto last = x.begin() + (spans[n].first + spans[n].rows - 1) * s.hidden;
        states.insert(states.end(), last, last + s.hidden);
    }
    return true;
}

// Take in the tokens of a span, each with what the target has shown before it, and write on from there: the likeliest token
// again and again, `length` of them, or until the product of their chances is below `stop`. cos, sin: of all positions.
// The span's buffer has room for all of them. Returns how many are written, or -1 where a token is not there.
int64_t outrider_chain(const Shape* shape, const Layer* layers, const Head* head, const Span* span, const int64_t* tokens,
                       const float* const* shown, const float* cos, const float* sin, int64_t length, double stop,
                       int64_t* written, float* chances, const Work* work) {
    const Shape& s = *shape;
    std::vector<float> state, logits(head->output.outputs);
    if (!take_in(s, layers, *head, span, 1, tokens, shown, cos, sin, state, work)) return -1;
    Span next = *span;
    double reach = 1.0;
    for (int64_t count = 0;;) {
        outrider_linear(&head->output, state.data(), head->norm, s.eps, 1, logits.data(), work);
        if (head->norm_output) outrider_normed(shape, head, 1, state.data());
        hide_repeats(logits.data(), head->ids, head->tokens);
        written[count] = head->ids[likeliest(logits.data(), head->tokens, chances + count)];
        reach *= chances[count++];
        if (count == length || !(reach >= stop)) return count;
        next.start += next.rows;
        next.rows = 1;
        if (!follow(s, layers, *head, &next, 1, written + count - 1, state.data(), cos, sin, work)) return -1;
    }
}

// What follows rows of the head, x [rows][hidden], put into their trees: row r under the node `nodes[r]` of `trees[owners[r]]`.
// x becomes what the next step reads.
static void put_offers(const Shape& s, const Head& head, const Growth& growth, int64_t rows, float* x, const int64_t* owners,
                       const int64_t* nodes, Tree* trees, const Work* work) {
    const int64_t stride = head.output.outputs, width = growth.width;
    std::vector<float> logits(rows * stride), logarithms(rows * width);
    std::vector<int64_t> places(rows * width), found(rows);
    outrider_linear(&head.output, x, head.norm, s.eps, rows, logits.data(), work);
    if (head.norm_output) outrider_normed(&s, &head, rows, x);
    pool().run(rows, 1, [&](int64_t begin, int64_t end, int64_t) {
        for (int64_t r = begin; r < end; r++) {
            hide_repeats(logits.data() + r * stride, head.ids, head.tokens);
            found[r] = offers(logits.data() + r * stride, head.tokens, growth.heat, width, &places[r * width], &logarithms[r * width]);
        }
    });
    for (int64_t r = 0; r < rows; r++)
        for (int64_t n = 0; n < found[r]; n++) trees[owners[r]].put(nodes[r], head.ids[places[r * width + n]], logarithms[r * width + n]);
}

// The followed nodes of all trees as rows of one pass: each sees what was committed, then its ancestors.
struct TreeRows {
    std::vector<Span> spans;
    std::vector<int64_t> seen, owners, nodes, tokens;
    std::vector<int32_t> positions, parents, trails;
    std::vector<float> x, cos, sin;

    // `above` [rows][hidden]: what the head made of the rows of the depth before. `ends`: where what was committed ends;
    // `starts`: where each tree's next row lies.
    void take(const Shape& s, const Span* committed, int64_t span_count, Tree* trees, const int64_t* ends, int64_t* starts,
              const std::vector<float>& above, int64_t level, const float* all_cos, const float* all_sin) {
        for (int64_t n = 0; n < span_count; n++) {
            Tree& tree = trees[n];
            if (tree.followed.empty()) continue;
            Span span = committed[n];
            span.start = starts[n];
            span.first = static_cast<int64_t>(tokens.size());
            span.rows = static_cast<int64_t>(tree.followed.size());
            spans.push_back(span);
            seen.push_back(ends[n]);
            const int64_t position = ends[n] + level - 1;
            for (int64_t followed : tree.followed) {
                Node& node = tree.nodes[followed];
                const int64_t from = node.parent < 0 ? n : tree.nodes[node.parent].row;
                node.row = static_cast<int64_t>(tokens.size());
                node.place = starts[n]++;
                trails.resize(trails.size() + level - 1);
                int32_t* trail = trails.data() + trails.size();
                for (int64_t up = node.parent; up >= 0; up = tree.nodes[up].parent) *--trail = static_cast<int32_t>(tree.nodes[up].place);
                x.insert(x.end(), above.begin() + from * s.hidden, above.begin() + (from + 1) * s.hidden);
                cos.insert(cos.end(), all_cos + position * s.head_dim, all_cos + (position + 1) * s.head_dim);
                sin.insert(sin.end(), all_sin + position * s.head_dim, all_sin + (position + 1) * s.head_dim);
                owners.push_back(n);
                nodes.push_back(followed);
                tokens.push_back(node.token);
                positions.push_back(static_cast<int32_t>(position));
                parents.push_back(-1);
            }
        }
    }
};

// Take in the tokens of some spans, as a chain does, and let a tree grow after each, of up to sizes[n] nodes. The spans' rows
// follow one another; their buffers have room for all rows that are followed. `tokens`, `shown`: of all rows. To `written`,
// `above` (parents) and `chances` go the nodes of each, [spans][most], and to `counts` how many there are. Returns 0, or -1
// where a token is not there.
int64_t outrider_trees(const Shape* shape, const Layer* layers, const Head* head, const Span* spans, int64_t span_count,
                       const int64_t* tokens, const float* const* shown, const float* cos, const float* sin, const Growth* growth,
                       const int64_t* sizes, int64_t most, int64_t* written, int64_t* above, float* chances, int64_t* counts,
                       const Work* work) {
    const Shape& s = *shape;
    std::vector<Tree> trees;
    std::vector<int64_t> ends, owners, roots(span_count, -1);
    std::vector<float> states;
    for (int64_t n = 0; n < span_count; n++) {
        trees.emplace_back(*growth, sizes[n]);
        owners.push_back(n);
        ends.push_back(spans[n].start + spans[n].rows);
    }
    if (!take_in(s, layers, *head, spans, span_count, tokens, shown, cos, sin, states, work)) return -1;
    std::vector<int64_t> starts = ends;
    put_offers(s, *head, *growth, span_count, states.data(), owners.data(), roots.data(), trees.data(), work);
    for (int64_t level = 1; level < growth->depth; level++) {
        for (Tree& tree : trees) tree.choose();
        TreeRows rows;
        rows.take(s, spans, span_count, trees.data(), ends.data(), starts.data(), states, level, cos, sin);
        const int64_t count = static_cast<int64_t>(rows.tokens.size());
        if (!count) break;
        std::vector<float> embedded(count * s.hidden);
        if (outrider_rows(head->embedding, rows.tokens.data(), count, embedded.data()) < count) return -1;
        const HeadInputs head_inputs = {embedded.data(), head->embedding_norm, head->norm_residual, rows.trails.data(), level - 1, rows.seen.data(), 0};
        outrider_layers(shape, layers, rows.spans.data(), static_cast<int64_t>(rows.spans.size()), count, rows.x.data(), rows.cos.data(),
                        rows.sin.data(), rows.positions.data(), rows.parents.data(), nullptr, 0, nullptr, work, &head_inputs, nullptr);
        states.swap(rows.x);
        put_offers(s, *head, *growth, count, states.data(), rows.owners.data(), rows.nodes.data(), trees.data(), work);
    }
    for (int64_t n = 0; n < span_count; n++) counts[n] = trees[n].collect(written + n * most, above + n * most, chances + n * most);
    return 0;
}

}  // extern "C"
