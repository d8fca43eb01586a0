// Keys and values in pages, as floats or in 8 bits. A part of kernels.cpp, in its namespace.

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
