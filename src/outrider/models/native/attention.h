// Attention: scores of queries, and the values that they weigh. A part of kernels.cpp, in its namespace.

// A query: one head of one row, over the keys at `places`, in order.
struct Query {
    const float* q;
    const int32_t* places;
    int64_t seen, run;  // places, and how many of the first are 0, 1, 2 and so on
    float* scores;
    float* to;
};

constexpr int64_t LEAST_ASKING = 6;  // queries between whose work what is read next is asked for: with fewer it is asked for too fast

// Rows that are read next, asked of memory a few lines at a time between other work (LOG, 2026-11-20, keys and values asked for).
class RowsAhead {
  public:
    RowsAhead() : RowsAhead(nullptr, 0, 1) {}
    RowsAhead(const void* begin, int64_t floats, int64_t times)
        : at_(static_cast<const char*>(begin)), end_(at_ + (begin ? floats * sizeof(float) : 0)), step_((end_ - at_ + times - 1) / times) {}

    void ask() {
        const char* to = at_ + step_ < end_ ? at_ + step_ : end_;
        for (; at_ < to; at_ += LINE) soon(at_);
    }

  private:
    const char *at_, *end_;
    int64_t step_;  // bytes
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
                        float (&to)[N][TILE], RowsAhead ahead = {}, RowsAhead scales_ahead = {}) {
    constexpr int GROUPS = BLOCK / SCALED;
    Lanes sums[N];
    for (int n = 0; n < N; n++) sums[n] = all_lanes(0.0f);
    for (int64_t b = 0; b < blocks; b++, asked += step)
        for (int g = 0; g < GROUPS; g++) {
            ahead.ask();
            scales_ahead.ask();
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
    const int64_t groups = keys.groups();
    const auto numbers_of = [&](int64_t place) { return keys.numbers(place) + PagedRows::within(place) / TILE * blocks * BLOCK * TILE; };
    const auto scales_of = [&](int64_t place) { return keys.scales(place) + PagedRows::within(place) / TILE * groups * TILE; };
    for (int64_t i = 0; i < longest; i += TILE) {
        RowsAhead numbers, scales;
        if (i + TILE < longest) {
            numbers = {numbers_of(i + TILE), blocks * BLOCK * TILE / 4, groups};
            scales = {scales_of(i + TILE), groups * TILE, groups};
        }
        float to[N][TILE];
        tile_scores<N>(reinterpret_cast<const uint8_t*>(numbers_of(i)), scales_of(i), blocks, asked, N, factor, to, numbers, scales);
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
inline void mix_some(const Query* queries, const PagedRows& values, int64_t begin, int64_t some, int64_t d, RowsAhead ahead) {
    Lanes sums[N][MIXED];
    for (int n = 0; n < N; n++)
        for (int j = 0; j < MIXED; j++) sums[n][j] = load(queries[n].to + d + 16 * j);
    const int64_t stride = BYTES ? values.blocks() * BLOCK : values.size, groups = values.groups();
    const float* floats = BYTES ? nullptr : values.row(begin) + d;
    const int8_t* bytes = BYTES ? values.numbers(begin) + PagedRows::within(begin) * stride + d : nullptr;
    const float* scales = BYTES ? values.scales(begin) + PagedRows::within(begin) * groups + d / SCALED : nullptr;
    for (int64_t i = 0; i < some; i++) {
        ahead.ask();
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
void mix_page(const Query* queries, int64_t count, const PagedRows& values, int64_t begin, int64_t some, int64_t d, const RowsAhead& ahead) {
    switch (count) {
        case 1: return mix_some<1, BYTES>(queries, values, begin, some, d, ahead);
        case 2: return mix_some<2, BYTES>(queries, values, begin, some, d, ahead);
        case 3: return mix_some<3, BYTES>(queries, values, begin, some, d, ahead);
        case 4: return mix_some<4, BYTES>(queries, values, begin, some, d, ahead);
        case 5: return mix_some<5, BYTES>(queries, values, begin, some, d, ahead);
        default: return mix_some<6, BYTES>(queries, values, begin, some, d, ahead);
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
void run_dots(const Query* queries, int64_t count, const PagedRows& keys, const PagedRows& values, float factor) {
    const int64_t size = keys.size, longest = longest_run(queries, count);
#if WIDE
    const auto two = size == 64 ? dots8_of_two<64> : size == 128 ? dots8_of_two<128> : dots8_of_two<0>;
#endif
    for (int64_t i = 0; i < longest; i += 16) {
        const float* first = keys.row(i);  // the 16 lie in one page
        RowsAhead ahead(count < LEAST_ASKING ? nullptr : i + 16 < longest ? keys.row(i + 16) : values.row(0), 16 * size, (count + 1) / 2);
        for (int64_t n = 0; n < count; n++) {
            const int64_t some = queries[n].run - i;
            ahead.ask();
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
void float_scores(const Query* queries, int64_t count, const PagedRows& keys, const PagedRows& values, float factor, int64_t turning) {
#if WIDE
    const int64_t longest = longest_run(queries, count);
    if (turning && longest <= MOST_TURNED && (keys.size == 64 || keys.size == 128)) {
        const float* tiles = TurnedKeys::of_this_thread().tiles(keys, longest, turning);
        return (keys.size == 64 ? turned_scores<64> : turned_scores<128>)(tiles, queries, count, factor);
    }
#else
    static_cast<void>(turning);
#endif
    run_dots(queries, count, keys, values, factor);
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
    if (!keys.bytes) float_scores(queries, count, keys, values, factor, turning);
    float totals[TOGETHER];
    for (int64_t n = 0; n < count; n++) {
        const Query& query = queries[n];
        if (!keys.bytes) dots(query.q, keys, query.places + query.run, query.seen - query.run, factor, query.scores + query.run);
        totals[n] = exponentials(query.scores, query.seen, largest(query.scores, query.seen));
        std::memset(query.to, 0, size * sizeof(float));
    }
    const bool asks = values.bytes || count >= LEAST_ASKING;
    const int64_t page = PAGE * (values.bytes ? values.blocks() * BLOCK / 4 + values.groups() : size);  // floats
    for (int64_t begin = 0; begin < shared; begin += PAGE) {
        const int64_t some = shared - begin < PAGE ? shared - begin : PAGE;
        const float* next = asks && begin + PAGE < shared ? values.page(begin + PAGE) : nullptr;
        const int64_t calls = (count + ASKED - 1) / ASKED * (size / (16 * MIXED)), floats = page / calls;
        for (int64_t n = 0; n < count; n += ASKED)
            for (int64_t d = 0; d < size; d += 16 * MIXED, next += next ? floats : 0)
                (values.bytes ? mix_page<true> : mix_page<false>)(queries + n, count - n < ASKED ? count - n : ASKED, values, begin, some, d,
                                                                  {next, floats, some});
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
