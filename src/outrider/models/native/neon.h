// Products on ARM: y = x W^T for one tile of 16 outputs (y: its first, rows apart by a stride), 4 at a time, by dot products of 8 bits
// (dotprod), or for two rows at once by products of small matrices (i8mm). A part of kernels.cpp, in its namespace.

constexpr int FEW = 8;  // rows that share one reading of a tile: their sums stay in the 32 registers

inline float32x4_t halves(const uint16_t* values) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(values))); }

// Of a group, at `values`; `above`: of its super-block.
template <bool SUPERS>
inline float32x4_t group_values(const uint8_t* values, const uint16_t* above) {
    if (!SUPERS) return halves(reinterpret_cast<const uint16_t*>(values));
    int8_t small[8] = {};
    std::memcpy(small, values, 4);
    return vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vld1_s8(small))))), halves(above));
}

// Half of a block for 4 outputs: 4 vectors of 4 outputs x 4 inputs. At 4 bits both halves lie in the same bytes, at 6 bits the last vector
// in the upper bits of the others.
template <int BITS>
inline void half_block(const uint8_t* q, int half, uint8x16_t (&w)[4]) {
    if (BITS == 6) {
        w[3] = vdupq_n_u8(0);
        for (int j = 2; j >= 0; j--) {
            const uint8x16_t all = vld1q_u8(q + 64 * (3 * half + j));
            w[j] = vandq_u8(all, vdupq_n_u8(63));
            w[3] = vsliq_n_u8(vshrq_n_u8(all, 6), w[3], 2);
        }
        return;
    }
    for (int j = 0; j < 4; j++) {
        if (BITS == 8) w[j] = vld1q_u8(q + 64 * (4 * half + j));
        else {
            const uint8x16_t both = vld1q_u8(q + 64 * j);
            w[j] = half ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
        }
    }
}

// sums + half a block times 16 activations of one row
inline int32x4_t add_dots(int32x4_t sums, const int8x16_t (&w)[4], int8x16_t x) {
    sums = vdotq_laneq_s32(sums, w[0], x, 0);
    sums = vdotq_laneq_s32(sums, w[1], x, 1);
    sums = vdotq_laneq_s32(sums, w[2], x, 2);
    return vdotq_laneq_s32(sums, w[3], x, 3);
}

// high and low sums of one row. Weights of 8 bits are taken as q - 128, which has a sign as the instruction wants it, and
// 128 times the sum of the activations is added. BYTES: activations of 8 bits, whose high parts are 0.
template <int BITS, bool BYTES>
inline void add_half(const uint8x16_t (&q)[4], const int8_t* x, int32x4_t& high, int32x4_t& low) {
    const int8x16_t xs[2] = {vld1q_s8(x), vld1q_s8(x + BLOCK)};
    int8x16_t w[4];
    for (int j = 0; j < 4; j++) w[j] = vreinterpretq_s8_u8(BITS == 8 ? veorq_u8(q[j], vdupq_n_u8(128)) : q[j]);
    if (!BYTES) high = add_dots(high, w, xs[0]);
    low = add_dots(low, w, xs[1]);
    if (BITS == 8) {
        if (!BYTES) high = vaddq_s32(high, vdupq_n_s32(128 * vaddlvq_s8(xs[0])));
        low = vaddq_s32(low, vdupq_n_s32(128 * vaddlvq_s8(xs[1])));
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// The same for two rows, `stride` bytes apart: [2 outputs x 8 inputs] times [8 inputs x 2 rows].
inline void add_two(const uint8x16_t (&q)[4], const int8_t* x, int stride, int32x4_t (&sums)[2]) {
    for (int g = 0; g < 2; g++) {
        const uint32x4_t a = vreinterpretq_u32_u8(q[2 * g]), b = vreinterpretq_u32_u8(q[2 * g + 1]);
        const int8x16_t rows = vcombine_s8(vld1_s8(x + 8 * g), vld1_s8(x + stride + 8 * g));
        sums[0] = vusmmlaq_s32(sums[0], vreinterpretq_u8_u32(vzip1q_u32(a, b)), rows);
        sums[1] = vusmmlaq_s32(sums[1], vreinterpretq_u8_u32(vzip2q_u32(a, b)), rows);
    }
}
#endif

// Halves [from, to) of a block times the activations of R rows, STRIDE bytes apart: 256 * high parts + low parts.
template <int BITS, bool BYTES, int R, int STRIDE = 2 * BLOCK>
inline void dots_of(const uint8_t* q, const int8_t* x, int from, int to, int32x4_t (&dots)[R]) {
    for (int r = 0; r < R; r++) dots[r] = vdupq_n_s32(0);
    for (int half = from; half < to; half++) {
        uint8x16_t w[4];
        half_block<BITS>(q, half, w);
        int r = 0;
#if defined(__ARM_FEATURE_MATMUL_INT8)
        for (; r + 1 < R; r += 2) {
            const int8_t* at = x + r * STRIDE + 16 * half;
            int32x4_t high[2] = {vdupq_n_s32(0), vdupq_n_s32(0)}, low[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
            if (!BYTES) add_two(w, at, STRIDE, high);
            add_two(w, at + BLOCK, STRIDE, low);
            for (int i = 0; i < 2; i++) low[i] = vaddq_s32(low[i], vshlq_n_s32(high[i], 8));
            dots[r] = vaddq_s32(dots[r], vuzp1q_s32(low[0], low[1]));
            dots[r + 1] = vaddq_s32(dots[r + 1], vuzp2q_s32(low[0], low[1]));
        }
#endif
        for (; r < R; r++) {
            int32x4_t high = vdupq_n_s32(0), low = dots[r];
            add_half<BITS, BYTES>(w, x + r * STRIDE + 16 * half, high, low);
            dots[r] = vaddq_s32(low, vshlq_n_s32(high, 8));
        }
    }
}

// A quarter of a tile: 4 outputs from `quarter` * 4 on. `begin`: where the first row's activations begin; those of its next
// block come `step` places later.
template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES, int R>
void tile_rows(const Matrix& w, int64_t tile, int quarter, const Activations& x, int64_t begin, int64_t step, float32x4_t* to) {
    float32x4_t sums[R];
    const int64_t blocks = w.inputs / BLOCK;
    constexpr int PARTS = BLOCK / GROUP, NUMBER = SUPERS ? 1 : 2;  // bytes of a scale
    constexpr Record AT(BITS, GROUP, MINIMUM, SUPERS);
    const uint8_t* record = AT.of(w, tile, 0);
    for (int r = 0; r < R; r++) sums[r] = vdupq_n_f32(0.0f);
    for (int64_t b = 0; b < blocks; b++, record += AT.size) {
        const int64_t first = begin + b * step;
        const uint8_t* q = record + tile % 2 * AT.weights + 16 * quarter;
        for (int part = 0; part < PARTS; part++) {
            const int64_t place = (part * TILE + 4 * quarter) * NUMBER;
            const auto above = [&](const uint16_t* supers) { return SUPERS ? super_of(supers, w, tile, b) + 4 * quarter : nullptr; };
            const float32x4_t scale = group_values<SUPERS>(record + AT.scales_at(tile) + place, above(w.super_scales));
            const float32x4_t minimum = MINIMUM ? group_values<SUPERS>(record + AT.minimums_at(tile) + place, above(w.super_minimums))
                                                : vmulq_n_f32(scale, static_cast<float>(-w.zero));
            const int start = start_of(BYTES, BITS, GROUP, MINIMUM, part);
            int32x4_t dots[R];
            dots_of<BITS, BYTES, R>(q, x.q + first * 2 * BLOCK, PARTS == 1 ? 0 : part, PARTS == 1 ? 2 : part + 1, dots);
            for (int r = 0; r < R; r++) {
                const int64_t at = first + r;
                if (start >= 0) dots[r] = vaddq_s32(dots[r], vdupq_n_s32(static_cast<int32_t>(x.sums[at].cross[start])));
                sums[r] = vfmaq_f32(sums[r], vcvtq_f32_s32(dots[r]), vmulq_n_f32(scale, x.scale[at]));
                if (start < 0) sums[r] = vfmaq_n_f32(sums[r], minimum, x.sums[at].sum(GROUP == 32 ? 2 : part));
            }
        }
    }
    for (int r = 0; r < R; r++) to[r] = sums[r];
}

template <int BITS, int GROUP, bool MINIMUM, bool SUPERS, bool BYTES>
void tile_all(const Matrix& w, int64_t tile, int64_t, const Activations& x, Rows some, float* y, const float* add, int64_t stride) {
    for (int64_t row = some.begin; row < some.end; row += FEW) {
        const int64_t count = group_rows(row, some.all), begin = row * (w.inputs / BLOCK);
        for (int quarter = 0; quarter < 4; quarter++) {
            float32x4_t sums[FEW];
            switch (count) {
                case 1: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 1>(w, tile, quarter, x, begin, count, sums); break;
                case 2: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 2>(w, tile, quarter, x, begin, count, sums); break;
                case 3: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 3>(w, tile, quarter, x, begin, count, sums); break;
                case 4: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 4>(w, tile, quarter, x, begin, count, sums); break;
                case 5: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 5>(w, tile, quarter, x, begin, count, sums); break;
                case 6: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 6>(w, tile, quarter, x, begin, count, sums); break;
                case 7: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 7>(w, tile, quarter, x, begin, count, sums); break;
                default: tile_rows<BITS, GROUP, MINIMUM, SUPERS, BYTES, 8>(w, tile, quarter, x, begin, count, sums);
            }
            const int64_t output = tile * TILE + 4 * quarter;
            for (int64_t r = 0; r < count; r++) {
                const int64_t place = (row + r) * stride + 4 * quarter;
                if (w.bias) sums[r] = vaddq_f32(sums[r], vld1q_f32(w.bias + output));
                if (add) sums[r] = vaddq_f32(sums[r], vld1q_f32(add + place));
                vst1q_f32(y + place, sums[r]);
            }
        }
    }
}
