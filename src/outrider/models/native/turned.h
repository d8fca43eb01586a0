// Keys turned round for the many queries of a prompt: 16 keys side by side, one of their numbers after the other, so that a vector
// holds the same number of each and no sum over lanes is needed. A part of kernels.cpp, in its namespace.
//
// The numbers lie in the order in which sums_of adds their products up, so the scores are those of dots16, bit for bit.

constexpr int64_t MOST_TURNED = 4096;  // keys of a head that a thread turns: 1 MiB of heads of 64, a second cache; 2 MiB of 128

// 16 rows of 16 numbers, `stride` floats apart -> numbers[i] has number i of each row
inline void turn(const float* rows, int64_t stride, __m512 (&numbers)[16]) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        const __m512 one = _mm512_loadu_ps(rows + i * stride), other = _mm512_loadu_ps(rows + (i + 1) * stride);
        a[i] = _mm512_unpacklo_ps(one, other);
        a[i + 1] = _mm512_unpackhi_ps(one, other);
    }
    for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 2; k++) {
            const __m512d one = _mm512_castps_pd(a[i + k]), other = _mm512_castps_pd(a[i + 2 + k]);
            b[i + 2 * k] = _mm512_castpd_ps(_mm512_unpacklo_pd(one, other));
            b[i + 2 * k + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(one, other));
        }
    for (int c = 0; c < 4; c++) {  // b[4 * j + c], quarter m: number 4 * m + c of rows 4 * j and the next three
        const __m512 even = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88), odd = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
        const __m512 even_last = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88), odd_last = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
        numbers[c] = _mm512_shuffle_f32x4(even, even_last, 0x88);
        numbers[4 + c] = _mm512_shuffle_f32x4(odd, odd_last, 0x88);
        numbers[8 + c] = _mm512_shuffle_f32x4(even, even_last, 0xdd);
        numbers[12 + c] = _mm512_shuffle_f32x4(odd, odd_last, 0xdd);
    }
}

constexpr int LANE_ORDER[4] = {0, 2, 1, 3};  // of the lanes of a quarter, the order in which they are added up; its own inverse

// A thread's copy of the keys of one head, which it makes as far as they are asked for.
class TurnedKeys {
  public:
    static TurnedKeys& of_this_thread() {
        static thread_local TurnedKeys own;
        return own;
    }

    // The first `count` keys, in tiles of 16. `job`: changes whenever the keys do.
    const float* tiles(const PagedRows& keys, int64_t count, int64_t job) {
        if (job != job_ || keys.pages != pages_ || keys.offset != offset_) done_ = 0;
        job_ = job, pages_ = keys.pages, offset_ = keys.offset;
        const int64_t all = (count + TILE - 1) / TILE;
        if (static_cast<int64_t>(vectors_.size()) < all * keys.size) vectors_.resize(all * keys.size);
        for (; done_ < all; done_++) {
            const float* next = done_ + 1 < all ? keys.row((done_ + 1) * TILE) : nullptr;
            turn_tile(keys.row(done_ * TILE), keys.size, vectors_.data() + done_ * keys.size, RowsAhead(next, TILE * keys.size, keys.size / TILE));
        }
        return reinterpret_cast<const float*>(vectors_.data());
    }

  private:
    struct alignas(LINE) Vector {
        float lanes[TILE];
    };

    static void turn_tile(const float* keys, int64_t size, Vector* to, RowsAhead ahead) {
        for (int64_t d = 0; d < size; d += TILE) {
            ahead.ask();
            __m512 numbers[TILE];
            turn(keys + d, size, numbers);
            for (int lane = 0; lane < TILE; lane++)
                _mm512_store_ps(to[(lane / 4 * 4 + LANE_ORDER[lane % 4]) * (size / TILE) + d / TILE].lanes, numbers[lane]);
        }
    }

    std::vector<Vector> vectors_;
    int64_t job_ = 0, offset_ = 0, done_ = 0;
    float* const* pages_ = nullptr;
};

// q . key of N queries and the 16 keys of a tile.
template <int SIZE, int N>
inline void turned_dots(const float* tile, const Query* queries, __m512 (&to)[N]) {
    constexpr int CHAIN = SIZE / TILE;  // products of a lane
    __m512 quarters[4][N];
    for (int quarter = 0; quarter < 4; quarter++, tile += 4 * CHAIN * TILE) {
        __m512 sums[4][N];  // of the lanes of a quarter
#pragma GCC unroll 4
        for (int place = 0; place < 4; place++) {
            const int lane = LANE_ORDER[place];
#pragma GCC unroll 8
            for (int k = 0; k < CHAIN; k++) {
                const __m512 key = _mm512_load_ps(tile + (place * CHAIN + k) * TILE);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) {
                    const __m512 q = _mm512_set1_ps(queries[n].q[4 * quarter + lane + k * TILE]);
                    sums[place][n] = k ? _mm512_fmadd_ps(q, key, sums[place][n]) : _mm512_mul_ps(q, key);
                }
            }
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            quarters[quarter][n] = _mm512_add_ps(_mm512_add_ps(sums[0][n], sums[1][n]), _mm512_add_ps(sums[2][n], sums[3][n]));
    }
    for (int n = 0; n < N; n++)
        to[n] = _mm512_add_ps(_mm512_add_ps(quarters[0][n], quarters[1][n]), _mm512_add_ps(quarters[2][n], quarters[3][n]));
}

// Scores of N queries for the runs that they see.
template <int SIZE, int N>
void turned_scores_of(const float* tiles, const Query* queries, float factor) {
    int64_t longest = 0;
    for (int n = 0; n < N; n++) longest = queries[n].run > longest ? queries[n].run : longest;
    for (int64_t i = 0; i < longest; i += TILE) {
        __m512 dots[N];
        turned_dots<SIZE, N>(tiles + i * SIZE, queries, dots);
        for (int n = 0; n < N; n++) {
            const int64_t some = queries[n].run - i < TILE ? queries[n].run - i : TILE;
            if (some > 0) store_some(queries[n].scores + i, _mm512_mul_ps(dots[n], _mm512_set1_ps(factor)), some);
        }
    }
}

template <int SIZE>
void turned_scores(const float* tiles, const Query* queries, int64_t count, float factor) {
    for (; count >= 6; count -= 6, queries += 6) turned_scores_of<SIZE, 6>(tiles, queries, factor);
    for (; count >= 3; count -= 3, queries += 3) turned_scores_of<SIZE, 3>(tiles, queries, factor);
    for (; count > 0; count--, queries++) turned_scores_of<SIZE, 1>(tiles, queries, factor);
}
