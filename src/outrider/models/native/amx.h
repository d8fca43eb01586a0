// Products of many rows in the tile registers of Intel's AMX: 16 rows times tiles of weights of 4 bits. A part of kernels.cpp, in its
// namespace.
//
// A register holds 16 rows of 64 bytes. One instruction multiplies the 16 rows of one by another and adds the results to the 16 x 16
// numbers of a third; what a block of 32 inputs has given is then stored and scaled as everywhere. A register cannot be shifted, so
// the high and the low parts of the activations meet as bfloat16, which has room for 256 * high, for low and for a weight. Sums are
// floats, and exact: 32 * 32512 * 15 is less than 2^24. So these are the whole numbers of the other kernels.

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

constexpr int64_t LEAST_AMX_ROWS = 64;   // rows of a pass from which on this is faster than vector registers (LOG, 2026-11-20, AMX)
constexpr int64_t BRAIN_ROWS = 16;       // rows that are multiplied together; it takes as long for fewer
constexpr int64_t LEAST_BRAIN_ROWS = 9;  // of the last rows of a pass, those that are worth it
constexpr int64_t MOST_BRAINS = 128;     // rows that share one reading of the weights: their sums with a tile are 8 KiB
constexpr int64_t BRAIN_CHUNK = 24;      // blocks of weights that stay near, in 27 KiB of a first cache of 48
constexpr int64_t AMX_BLOCK = 128;       // bytes of a block of one row

// Whether the group of 16 that begins with row `first` is multiplied here.
inline bool brains(int64_t first, int64_t rows) { return rows >= LEAST_AMX_ROWS && rows - first >= LEAST_BRAIN_ROWS; }

// Bytes of some rows' activations; there is room for whole groups of 16.
inline int64_t brain_bytes(int64_t rows, int64_t blocks) { return (rows + BRAIN_ROWS - 1) / BRAIN_ROWS * BRAIN_ROWS * blocks * AMX_BLOCK; }

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

// One block of a row, which `q` has as bytes, where a product with `w` reads it; `row`: one of `rows` of a pass.
inline void store_amx(const JoinedMatrices& w, const int8_t* q, int64_t block, int64_t blocks, int64_t row, int64_t rows, uint8_t* to) {
    const int64_t sixteen = row / BRAIN_ROWS * BRAIN_ROWS;
    bool four = false;
    for (int64_t p = 0; p < w.count; p++) four |= w.parts[p].bits == 4;
    if (!four || !brains(sixteen, rows)) return;
    uint8_t* const high = to + (sixteen * blocks + block * BRAIN_ROWS) * AMX_BLOCK + (row - sixteen) * 64;
    store_brains(q, w.activations == 8, high, high + amx::REGISTER);
}

// ---- products ----

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
            multiply(near, some, x.amx + (row * blocks + b * BRAIN_ROWS) * AMX_BLOCK, scales, sums_of, count,
                     totals + (row - begin) * TILE);
        }
    }
    for (int64_t r = 0; r < rows; r++) store_sums(w, tile, begin + r, 1, reinterpret_cast<const __m512*>(totals + r * TILE), y, add, stride);
}

// Row `row` of a product and those after it that are multiplied together: how many, or 0 where vector registers do it.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES>
int64_t amx_rows(const Matrix& w, int64_t tile, int64_t count, const Activations& x, int64_t row, Rows some, float* y, const float* add, int64_t stride) {
    if constexpr (BITS == 4)
        if (x.amx && brains(row / BRAIN_ROWS * BRAIN_ROWS, some.all)) {
            int64_t rows = std::min(some.end - row, MOST_BRAINS);
            if (rows % BRAIN_ROWS && rows % BRAIN_ROWS < LEAST_BRAIN_ROWS) rows -= rows % BRAIN_ROWS;
            for (int64_t t = 0; t < count; t++)
                brain_tile<MINIMUM, SUPERS, BYTES>(w, tile + t, x, row, rows, some.all, y + t * TILE, add ? add + t * TILE : nullptr, stride);
            return rows;
        }
    return 0;
}
