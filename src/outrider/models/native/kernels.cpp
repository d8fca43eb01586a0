// The decoder layers of a llama-like model with packed weights, on a CPU.
//
// Every row of a pass (a token or a node of a draft) is computed by the same operations in the same order, whatever other
// rows share the pass and however many threads run. So a token's logits are the same bits in plain decoding, in a draft of
// any shape, in any batch and in any piece of a prompt: speculation cannot flip a near tie.
//
// Weights: 4, 6 or 8 bits, w = scale * (q - zero) + minimum per group of 32 or 16 inputs. 16 outputs form a tile; a tile holds,
// for each block of 32 inputs, 8 vectors of 16 outputs x 4 inputs, which is what one dot-product instruction eats. At
// 4 bits, vectors j and j + 4 share the bytes (low and high halves); at 6 bits three vectors of each four lie in bytes, and the last of
// the four in the upper two bits of these (its low bits in the first).
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

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
#if WIDE && VNNI && !PAIRED && defined(__linux__) && defined(__AMX_BF16__)
#define AMX 1  // tile registers, where the system lets this process use them
#else
#define AMX 0
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
//   weights [2][8][16][4] at 8 bits, [2][6] at 6, [2][4] at 4; scales [2][32 / group][16], float16, or int8 where there are super-blocks;
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
    uint8_t* amx;     // the same rows as AMX reads them, see brain_bytes; null where there is none
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

// Vector j of a block whose weights begin at `q`, as bytes.
void read_vector(const uint8_t* q, int bits, int64_t j, uint8_t (&to)[TILE * 4]) {
    const auto each = [&](int64_t vector, const auto& number) {
        const uint8_t* const from = q + vector * TILE * 4;
        for (int i = 0; i < TILE * 4; i++) to[i] = static_cast<uint8_t>(number(from + i));
    };
    const int64_t first = j / 4 * 3;  // at 6 bits
    if (bits == 8) each(j, [](const uint8_t* at) { return *at; });
    else if (bits == 4 && j < 4) each(j, [](const uint8_t* at) { return *at & 15; });
    else if (bits == 4) each(j - 4, [](const uint8_t* at) { return *at >> 4; });
    else if (j % 4 < 3) each(first + j % 4, [](const uint8_t* at) { return *at & 63; });
    else each(first, [](const uint8_t* at) { return *at >> 6 | at[TILE * 4] >> 6 << 2 | at[2 * TILE * 4] >> 6 << 4; });
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

#include "rows.h"

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

#include "rounding.h"

#if WIDE || HALF_WIDE || NEON_DOTS

using TileFunction = void (*)(const Matrix&, int64_t, int64_t, const Activations&, Rows, float*, const float*, int64_t);

// The kinds that files hold: Q4_0, Q4_1, Q4_K; Q8_0, Q5_1, Q5_K; Q6_K.
template <bool BYTES>
TileFunction tile_function_of(const Matrix& w) {
    if (w.bits == 4) {
        if (!w.minimums) return tile_all<4, 32, false, false, BYTES>;
        return w.super_scales ? tile_all<4, 32, true, true, BYTES> : tile_all<4, 32, true, false, BYTES>;
    }
    if (w.bits == 6) return tile_all<6, 16, false, true, BYTES>;
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
                    uint8_t q[TILE * 4];
                    read_vector(record.weights_of(w, tile, b), w.bits, j, q);
                    for (int o = 0; o < TILE; o++)
                        for (int i = 0; i < 4; i++) dot[o] += q[o * 4 + i] * (xq[i] * 256 + xq[i + BLOCK]);
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

// Bytes that `rows` rows of so many inputs need as AMX reads them; 0 where it is not used.
int64_t amx_bytes([[maybe_unused]] int64_t rows, [[maybe_unused]] int64_t inputs) {
#if AMX
    if (rows >= LEAST_AMX_ROWS && amx::usable()) return brain_bytes(rows, inputs / BLOCK);
#endif
    return 0;
}

#include "peak.h"
#include "asked.h"

// Tiles [begin, end) of all parts. `y`, `add`: of the first of these, `stride` floats from row to row.
void product_of_tiles(const JoinedMatrices& w, const Activations& x, Rows rows, int64_t begin, int64_t end, float* y, const float* add,
                      int64_t stride) {
    int64_t part = 0, first = 0, after = w.parts[0].outputs / TILE;  // which tiles this part has
#if AMX
    const amx::Registers registers(x.amx && rows.all >= LEAST_AMX_ROWS);
#endif
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
    constexpr int64_t WHOLE = AMX ? 2 * ROWS : ROWS;  // rows that are never cut
    const int64_t step = NEAR / row < 2 * ROWS ? 2 * ROWS : NEAR / row / WHOLE * WHOLE;
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
#include "kept.h"
#include "attention.h"
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
bool whole_heads(int64_t head_dim) { return head_dim % BLOCK == 0; }

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
        quantise_blocks(layer.output, queries[n].to, first, first + s.head_dim / BLOCK, row - rounded.first, rounded.count, work->x);
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
            quantise_row(layer.qkv, both, r, rows, work->x);
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
        for (int64_t r = 0; pass.wanted[k] == index && r < some.count; r++)
            std::memcpy(pass.kept + ((some.first + r) * pass.wanted_count + k) * s.hidden, x + r * s.hidden, s.hidden * sizeof(float));
}

// Layers whose products are shared by their outputs.
void run_shared(const LayerPass& pass, int64_t span_count, const HeadInputs* head_inputs, AdaptedRows* adapted) {
    const Shape& s = pass.s;
    std::vector<Item> items = attention_items(s, pass.spans, span_count);
    std::vector<Span> ends(pass.spans, pass.spans + span_count);
    SharedRows some = {0, pass.rows, pass.work, adapted, 0, whole_heads(s.head_dim)};
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
            uint8_t q[TILE * 4];
            float* row = to + n * w->inputs + part * w->group;
            for (int64_t i = 0; i < w->group; i++) {
                if (i % 4 == 0) read_vector(record.weights_of(*w, tile, block), w->bits, (part % parts * w->group + i) / 4, q);
                const float value = scale * static_cast<float>(q[lane * 4 + i % 4] - w->zero);
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

// See amx_bytes.
int64_t outrider_amx_bytes(int64_t rows, int64_t inputs) { return amx_bytes(rows, inputs); }

// The layers of a model over the rows of all spans; x [rows][hidden] is read and overwritten.
// cos, sin: [rows][head_dim]; positions: [rows]; parents: [rows], a row's parent among its span's rows, or -1.
// kept: for each layer of `wanted`, x after it, [rows][count][hidden].
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

}  // extern "C"

#include "head.h"
#include "model.h"
