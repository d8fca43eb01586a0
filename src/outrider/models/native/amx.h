// Products in the tile registers of Intel's AMX: a group of rows times tiles of weights. A part of kernels.cpp, in its namespace.
//
// A register holds 16 rows of 64 bytes. One instruction multiplies the 16 rows of one by another and adds the results to the 16 x 16
// numbers of a third; what a block of 32 inputs has given is then stored and scaled as everywhere. A register cannot be shifted, so
// the high and the low parts of the activations meet in one of two ways, and both give the same whole numbers as the other kernels:
//
// - From 9 rows on, with weights of 4 bits: as bfloat16, which has room for 256 * high, for low and for a weight. Sums are floats, and
//   exact: 32 * 32512 * 15 is less than 2^24. 16 rows take as long as one.
// - Fewer rows, and weights of 6 and 8 bits: as bytes, two blocks at a time. A row of activations has 64 places, of which those of the other
//   block are zero, so the register has a row for each block, and with up to 4 rows one for each part, too.

namespace amx {

constexpr int64_t REGISTER = 1024;  // bytes: 16 rows of 64

// Whether the system lets this process use them; this library is only loaded where the processor has them.
inline bool found() {
    constexpr long ASK_PERMISSION = 0x1023, TILE_DATA = 18;  // of Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return syscall(SYS_arch_prctl, ASK_PERMISSION, TILE_DATA) == 0;
}

// All eight registers in full size.
inline void configure() {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, unused[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const config;
    asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void release() { asm volatile("tilerelease"); }

template <int TO>
ALWAYS_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TO));
}

template <int TO>
ALWAYS_INLINE void load(const void* from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t{64}), "i"(TO) : "memory");
}

template <int FROM>
ALWAYS_INLINE void store(void* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t{64}), "i"(FROM) : "memory");
}

// bfloat16 times bfloat16
template <int TO, int ROWS_OF, int WEIGHTS>
ALWAYS_INLINE void add_brains() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(ROWS_OF), "i"(WEIGHTS));
}

// bytes with a sign times bytes without one
template <int TO, int ROWS_OF, int WEIGHTS>
ALWAYS_INLINE void add_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(ROWS_OF), "i"(WEIGHTS));
}

inline bool usable() {
    static const bool is = found();
    return is;
}

// The registers are this thread's while one of these lives, of which there is one at a time: others (torch) may use them in between.
class Registers {
  public:
    explicit Registers(bool wanted) : wanted_(wanted) {
        if (wanted_) configure();
    }
    ~Registers() {
        if (wanted_) release();
    }
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;

  private:
    bool wanted_;
};

}  // namespace amx

constexpr int64_t BRAIN_ROWS = 16;       // rows that are multiplied together as bfloat16
constexpr int64_t LEAST_BRAIN_ROWS = 9;  // rows from which on that is reckoned to be faster than bytes (LOG, 2026-11-19, AMX)
constexpr int64_t LEAST_AMX_ROWS = 3;    // rows from which on bytes are reckoned to be faster here than in vector registers (the same)
constexpr int64_t MOST_BRAINS = 128;     // rows that share one reading of the weights: their sums with a tile are 8 KiB
constexpr int64_t BRAIN_CHUNK = 24;      // blocks of weights that stay near, in 27 KiB of a first cache of 48
constexpr int64_t AMX_BLOCK = 128;       // bytes of a block of one row in each of the two forms

// Rows that are multiplied together as bfloat16, if any: the group of 16 that begins with row `first` has so many of them.
inline bool brains(int64_t first, int64_t rows) { return rows - first >= LEAST_BRAIN_ROWS; }

// How many rows a group of 8 is made up to: 4 or 8.
inline int64_t slots_of(int64_t rows, bool bytes) { return rows > 4 || bytes ? 8 : 4; }

// Where the two forms of some rows' activations begin; each has room for whole groups of 16 rows and whole pairs of blocks.
struct AmxRows {
    uint8_t *brain, *pair;

    static int64_t size(int64_t rows, int64_t blocks) {  // bytes of one form
        return (rows + BRAIN_ROWS - 1) / BRAIN_ROWS * BRAIN_ROWS * (blocks + blocks % 2) * AMX_BLOCK;
    }
    AmxRows(uint8_t* at, int64_t rows, int64_t blocks) : brain(at), pair(at + size(rows, blocks)) {}
};

// ---- activations ----

// 32 activations as bfloat16, 256 * high and low, in the order of the weights: of each four inputs the even ones, then the odd ones.
inline void store_brains(const int8_t* q, bool bytes, uint8_t* high_to, uint8_t* low_to) {
    static const struct Order {
        alignas(64) uint16_t upper[BLOCK];  // the upper halves of floats
        Order() {
            for (int i = 0; i < BLOCK; i++) upper[i] = static_cast<uint16_t>(2 * (i / 4 * 4 + i % 2 * 2 + i / 2 % 2) + 1);
        }
    } ORDER;
    const __m512i order = _mm512_load_si512(ORDER.upper);
    const auto put = [&](const int8_t* from, int shift, uint8_t* to) {
        __m512i half[2];
        for (int i = 0; i < 2; i++) {
            const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * i)));
            half[i] = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_slli_epi32(wide, static_cast<unsigned>(shift))));
        }
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(half[0], order, half[1]));
    };
    if (!bytes) put(q, 8, high_to);
    put(q + BLOCK, 0, low_to);
}

// One block of a row, which `q` has as bytes, in the forms that products with `w` read; `row`: one of `rows` of a pass.
inline void store_amx(const JoinedMatrices& w, const int8_t* q, int64_t block, int64_t blocks, int64_t row, int64_t rows, uint8_t* at) {
    const bool bytes = w.activations == 8;
    bool four = false, more = false;
    for (int64_t p = 0; p < w.count; p++) (w.parts[p].bits == 4 ? four : more) = true;
    const AmxRows to(at, rows, blocks);
    const int64_t sixteen = row / BRAIN_ROWS * BRAIN_ROWS, first = row / ROWS * ROWS, count = group_rows(first, rows);
    const bool wide = brains(sixteen, rows);
    if (four && wide) {
        uint8_t* const registers = to.brain + (sixteen * blocks + block * BRAIN_ROWS) * AMX_BLOCK;
        uint8_t* const high = registers + (row - sixteen) * 64;
        store_brains(q, bytes, high, high + amx::REGISTER);
    }
    if ((more || !wide) && count >= LEAST_AMX_ROWS) {
        const int64_t slots = slots_of(count, bytes), pairs = (blocks + 1) / 2;
        uint8_t* const registers = to.pair + (first * pairs * 2 + block / 2 * 2 * slots) * AMX_BLOCK;
        for (int part = bytes ? 1 : 0; part < 2; part++) {
            const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + part * BLOCK)), none = _mm256_setzero_si256();
            uint8_t* const place = registers + ((bytes ? 0 : part * 2 * slots) + block % 2 * slots + row - first) * 64;
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), block % 2 ? none : some);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(place + BLOCK), block % 2 ? some : none);
        }
    }
}

// ---- as bfloat16: 9 and more rows, weights of 4 bits ----

// A block of a tile.
struct alignas(64) BrainBlock {
    uint16_t weights[BLOCK * TILE];  // a register: of each two inputs 16 outputs
    float scale[TILE], minimum[TILE];
};

// `ZERO`: what is taken off the weights.
template <bool MINIMUM, bool SUPERS, int ZERO>
ALWAYS_INLINE void make_brains(const Matrix& w, const uint8_t* record, int64_t tile, int64_t b, BrainBlock& to) {
    static const struct Table {
        alignas(64) uint16_t brains[32];  // of the numbers of 4 bits, twice: the fifth bit of an index may be anything
        Table() {
            for (int i = 0; i < 32; i++) {
                const float value = static_cast<float>(i % 16 - ZERO);
                uint32_t bits;
                std::memcpy(&bits, &value, 4);
                brains[i] = static_cast<uint16_t>(bits >> 16);
            }
        }
    } TABLE;
    constexpr Record AT(4, 32, MINIMUM, SUPERS);
    const __m512i table = _mm512_load_si512(TABLE.brains);
    const uint8_t* const q = record + tile % MOST_TILES * AT.weights;
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {  // vectors j and j + 4: their inputs 0 and 2, then 1 and 3
        const __m512i all = _mm512_loadu_si512(q + 64 * j);
        uint16_t* const at = to.weights + 2 * j * 32;
        _mm512_store_si512(at, _mm512_permutexvar_epi16(all, table));
        _mm512_store_si512(at + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 8), table));
        _mm512_store_si512(at + 8 * 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 4), table));
        _mm512_store_si512(at + 9 * 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(all, 12), table));
    }
    __m512 scale, minimum;
    group_factors<4, 32, MINIMUM, SUPERS>(w, record, tile, b, 0, scale, minimum);
    _mm512_store_ps(to.scale, scale);
    _mm512_store_ps(to.minimum, minimum);
}

// 16 rows, of which the last 8 - LAST count for nothing, times some blocks of a tile. `rows_at`: the first register of them; `scales`,
// `sums_of`: of the first 8 rows, and of the others, `count` a block. `sums`: what they have come to.
template <bool BYTES, bool SUBTRACTED, int LAST>
void brain_group(const BrainBlock* w, int64_t blocks, const uint8_t* rows_at, const float* const (&scales)[2], const BlockSums* const (&sums_of)[2],
                 int64_t count, float* sums) {
    constexpr int R = ROWS + LAST;
    alignas(64) float found[2][BRAIN_ROWS * TILE];
    __m512 total[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) total[r] = _mm512_load_ps(sums + r * TILE);
    const auto multiply = [&](int64_t b) __attribute__((always_inline)) {
        const uint8_t* const x = rows_at + b * 2 * amx::REGISTER;
        amx::load<1>(w[b].weights);
        amx::zero<0>();
        if (!BYTES) {
            amx::load<2>(x);
            amx::add_brains<0, 2, 1>();
        }
        amx::load<3>(x + amx::REGISTER);
        amx::add_brains<0, 3, 1>();
        amx::store<0>(found[b % 2]);
    };
    const auto take = [&](int64_t b) __attribute__((always_inline)) {
        const __m512 scale = _mm512_load_ps(w[b].scale), minimum = _mm512_load_ps(w[b].minimum);
        const float *const dots = found[b % 2], *const first = scales[0] + b * ROWS, *const last = scales[1] + b * count;
        const BlockSums *const first_sums = sums_of[0] + b * ROWS, *const last_sums = sums_of[1] + b * count;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const float same = r < ROWS ? first[r] : last[r - ROWS];
            total[r] = _mm512_fmadd_ps(_mm512_load_ps(dots + r * TILE), _mm512_mul_ps(scale, _mm512_set1_ps(same)), total[r]);
            if (!SUBTRACTED) {
                const float all = r < ROWS ? first_sums[r].all : last_sums[r - ROWS].all;
                total[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(all), total[r]);
            }
        }
    };
    multiply(0);
    for (int64_t b = 1; b < blocks; b++) {
        multiply(b);
        take(b - 1);
    }
    take(blocks - 1);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) _mm512_store_ps(sums + r * TILE, total[r]);
}

// Groups of 16 rows from `begin` on, the last of 9 and more, times one tile.
template <bool MINIMUM, bool SUPERS, bool BYTES>
void brain_tile(const Matrix& w, int64_t tile, const Activations& x, int64_t begin, int64_t rows, int64_t all, float* y, const float* add,
                int64_t stride) {
    constexpr bool SUBTRACTED = start_of(BYTES, 4, 32, MINIMUM, 0) >= 0;  // the zero, in whole numbers
    constexpr Record AT(4, 32, MINIMUM, SUPERS);
    const int64_t blocks = w.inputs / BLOCK;
    const AmxRows forms(x.amx, all, blocks);
    const uint8_t* record = AT.of(w, tile, 0);
    alignas(64) float totals[MOST_BRAINS * TILE];
    BrainBlock near[BRAIN_CHUNK];
    std::memset(totals, 0, (rows + BRAIN_ROWS - 1) / BRAIN_ROWS * BRAIN_ROWS * TILE * sizeof(float));
    for (int64_t b = 0; b < blocks; b += BRAIN_CHUNK) {
        const int64_t some = blocks - b < BRAIN_CHUNK ? blocks - b : BRAIN_CHUNK;
        for (int64_t i = 0; i < some; i++, record += AT.size) {
            if (tile % MOST_TILES == 0) ask_ahead<AT.size>(record);
            make_brains<MINIMUM, SUPERS, SUBTRACTED ? NIBBLE_ZERO : 0>(w, record, tile, b + i, near[i]);
        }
        for (int64_t row = begin; row < begin + rows; row += BRAIN_ROWS) {
            const int64_t count = group_rows(row + ROWS, all), first = row * blocks + b * ROWS, last = (row + ROWS) * blocks + b * count;
            const float* const scales[2] = {x.scale + first, x.scale + last};
            const BlockSums* const sums_of[2] = {x.sums + first, x.sums + last};
            const auto multiply = count > 4 ? brain_group<BYTES, SUBTRACTED, 8> : brain_group<BYTES, SUBTRACTED, 4>;
            multiply(near, some, forms.brain + (row * blocks + b * BRAIN_ROWS) * AMX_BLOCK, scales, sums_of, count,
                     totals + (row - begin) * TILE);
        }
    }
    for (int64_t r = 0; r < rows; r++) store_sums(w, tile, begin + r, 1, reinterpret_cast<const __m512*>(totals + r * TILE), y, add, stride);
}

// ---- as bytes: up to 8 rows, and weights of 6 and 8 bits ----

// Two blocks of a tile: a register for each group of a block, in which the inputs of the other groups are 0.
template <int BITS, int GROUP>
struct alignas(64) PairOfBlocks {
    static constexpr int PARTS = BLOCK / GROUP;
    uint8_t weights[PARTS][amx::REGISTER] = {};

    ALWAYS_INLINE void put(const uint8_t* q, int place) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) _mm512_store_si512(weights[PARTS == 1 ? 0 : j / 4] + (place * 8 + j) * 64, vector<BITS>(q, j));
    }
};

// A group of up to SLOTS rows times the two tiles of `tile`'s records.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES, int SLOTS>
void pair_rows(const Matrix& w, int64_t tile, const Activations& x, int64_t row, int64_t count, int64_t all, __m512 (&to)[MOST_TILES][ROWS]) {
    constexpr int T = MOST_TILES, PARTS = BLOCK / GROUP, HALVES = SLOTS == 8 && !BYTES ? 2 : 1;  // registers of activations
    constexpr bool SUBTRACTED = start_of(BYTES, BITS, GROUP, MINIMUM, 0) >= 0;
    constexpr Record AT(BITS, GROUP, MINIMUM, SUPERS);
    static_assert(!BYTES || SLOTS == 8, "a register has all rows of activations of 8 bits");
    const int64_t blocks = w.inputs / BLOCK, pairs = (blocks + 1) / 2;
    const uint8_t* const record = AT.of(w, tile, 0);
    const uint8_t* const rows_at = AmxRows(x.amx, all, blocks).pair + row * pairs * 2 * AMX_BLOCK;
    static thread_local PairOfBlocks<BITS, GROUP> near[2][T];  // a place that is not written stays 0
    alignas(64) int32_t found[2][T][PARTS][HALVES][amx::REGISTER / 4];
    __m512 sums[T][SLOTS];
    for (int t = 0; t < T; t++)
        for (int r = 0; r < SLOTS; r++) sums[t][r] = _mm512_setzero_ps();
    const auto multiply = [&](int64_t p) __attribute__((always_inline)) {
        const uint8_t* const at = record + 2 * p * AT.size;
        const uint8_t* const registers = rows_at + p * 2 * SLOTS * AMX_BLOCK;
        ask_ahead<2 * AT.size>(at);
        for (int t = 0; t < T; t++) {
            near[p % 2][t].put(at + t * AT.weights, 0);
            if (2 * p + 1 < blocks) near[p % 2][t].put(at + AT.size + t * AT.weights, 1);
        }
        amx::load<4>(registers);
        if (HALVES == 2) amx::load<5>(registers + amx::REGISTER);
#pragma GCC unroll 2
        for (int t = 0; t < T; t++)
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) {
                amx::load<6>(near[p % 2][t].weights[part]);
                amx::zero<0>();
                amx::add_bytes<0, 4, 6>();
                if (HALVES == 2) {
                    amx::zero<1>();
                    amx::add_bytes<1, 5, 6>();
                }
                amx::store<0>(found[p % 2][t][part][0]);
                if (HALVES == 2) amx::store<1>(found[p % 2][t][part][HALVES - 1]);
            }
    };
    const auto take = [&](int64_t b) __attribute__((always_inline)) {
        const int64_t first = row * blocks + b * count;
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            const int start = start_of(BYTES, BITS, GROUP, MINIMUM, part);
            __m512 scale[T], minimum[T];
            __m512i dots[T][SLOTS];
#pragma GCC unroll 2
            for (int t = 0; t < T; t++) {
                group_factors<BITS, GROUP, MINIMUM, SUPERS>(w, record + b * AT.size, tile / T * T + t, b, part, scale[t], minimum[t]);
                const int32_t* const high = found[b / 2 % 2][t][part][0] + b % 2 * SLOTS * TILE;
                const int32_t* const low = HALVES == 2 ? found[b / 2 % 2][t][part][HALVES - 1] + b % 2 * SLOTS * TILE : high + 2 * SLOTS * TILE;
#pragma GCC unroll 8
                for (int r = 0; r < SLOTS; r++) {
                    dots[t][r] = _mm512_load_si512(high + r * TILE);
                    if (!BYTES) dots[t][r] = _mm512_add_epi32(_mm512_slli_epi32(dots[t][r], 8), _mm512_load_si512(low + r * TILE));
                    else if (start >= 0) dots[t][r] = _mm512_add_epi32(dots[t][r], _mm512_set1_epi32(static_cast<int32_t>(x.sums[first + r].cross[start])));
                }
            }
            add_group<!SUBTRACTED>(dots, scale, minimum, x.scale + first, x.sums + first, GROUP == 32 ? 2 : part, sums);
        }
    };
    multiply(0);
    for (int64_t p = 1; p < pairs; p++) {
        multiply(p);
        take(2 * p - 2);
        take(2 * p - 1);
    }
    for (int64_t b = 2 * pairs - 2; b < blocks; b++) take(b);
    for (int t = 0; t < T; t++)
        for (int r = 0; r < SLOTS; r++) to[t][r] = sums[t][r];
}

// Row `row` of a product and those after it that are multiplied together: how many, or 0 where vector registers do it.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES>
int64_t amx_rows(const Matrix& w, int64_t tile, int64_t count, const Activations& x, int64_t row, Rows some, float* y, const float* add, int64_t stride) {
    if (!x.amx) return 0;
    if constexpr (BITS == 4)
        if (brains(row / BRAIN_ROWS * BRAIN_ROWS, some.all)) {
            int64_t rows = std::min(some.end - row, MOST_BRAINS);
            if (rows % BRAIN_ROWS && rows % BRAIN_ROWS < LEAST_BRAIN_ROWS) rows -= rows % BRAIN_ROWS;
            for (int64_t t = 0; t < count; t++)
                brain_tile<MINIMUM, SUPERS, BYTES>(w, tile + t, x, row, rows, some.all, y + t * TILE, add ? add + t * TILE : nullptr, stride);
            return rows;
        }
    const int64_t rows = group_rows(row, some.all);
    if (rows < LEAST_AMX_ROWS) return 0;
    __m512 sums[MOST_TILES][ROWS];
    if (slots_of(rows, BYTES) == 8) pair_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 8>(w, tile, x, row, rows, some.all, sums);
    else pair_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, BYTES ? 8 : 4>(w, tile, x, row, rows, some.all, sums);
    for (int64_t t = 0; t < count; t++)
        store_sums(w, tile + t, row, rows, sums[(tile + t) % MOST_TILES], y + t * TILE, add ? add + t * TILE : nullptr, stride);
    return rows;
}
