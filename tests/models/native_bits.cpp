// The kernels on made-up numbers: one line for each case, with a hash of the bits that come out. Built for every instruction
// set by test_native_bits.py, which compares what these programs print. KERNELS names kernels.cpp.

#include KERNELS

#include <cstdio>

namespace {

uint64_t state = 1;

uint64_t next() {  // splitmix64
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

float number() { return static_cast<float>(static_cast<int32_t>(next() >> 40) - (1 << 23)) / (1 << 22); }  // in [-2, 2)

std::vector<float> numbers(int64_t count) {
    std::vector<float> out(count);
    for (float& x : out) x = number();
    return out;
}

// What is not a number has many bit patterns, and which of them comes is the processor's choice.
uint64_t hash(const float* x, int64_t count) {
    uint64_t h = 0xcbf29ce484222325ull;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = 0x7fc00000u;
        if (x[i] == x[i]) std::memcpy(&bits, x + i, 4);
        h = (h ^ bits) * 0x100000001b3ull;
    }
    return h;
}

void say(const char* what, int64_t a, int64_t b, const float* x, int64_t count) {
    std::printf("%s %lld %lld %016llx\n", what, static_cast<long long>(a), static_cast<long long>(b),
                static_cast<unsigned long long>(hash(x, count)));
}

struct Kind {
    const char* name;
    int bits, zero, group;
    bool minimums, supers;
};

const Kind KINDS[] = {{"Q4_0", 4, 8, 32, false, false}, {"Q4_1", 4, 0, 32, true, false}, {"Q4_K", 4, 0, 32, true, true},
                      {"Q8_0", 8, 128, 32, false, false}, {"Q5_1", 8, 0, 32, true, false}, {"Q5_K", 8, 0, 32, true, true},
                      {"Q6_K", 6, 32, 16, false, true}};

// A matrix and what it points to.
struct Made {
    std::vector<uint8_t> records;
    std::vector<uint16_t> super_scales, super_minimums;
    std::vector<float> bias;
    JoinedMatrices joined{};

    Made(const Kind& kind, int64_t outputs, int64_t inputs, bool biased) {
        Matrix m{};
        const int64_t groups = outputs * inputs / kind.group, supers = outputs * inputs / SUPER;
        std::vector<uint8_t> q(outputs * inputs * kind.bits / 8), scales, minimums;
        for (uint8_t& byte : q) byte = static_cast<uint8_t>(next());
        if (kind.supers) {
            scales = bytes_of(bytes(groups));
            minimums = bytes_of(bytes(groups));
            super_scales = half_numbers(supers);
            super_minimums = half_numbers(supers);
            super_scales.resize(super_scales.size() + inputs / SUPER * TILE);  // a record has two tiles
            super_minimums.resize(super_scales.size());
            m.super_scales = super_scales.data();
            if (kind.minimums) m.super_minimums = super_minimums.data();
        } else {
            scales = bytes_of(half_numbers(groups));
            minimums = bytes_of(half_numbers(groups));
        }
        put_together(Record(kind.bits, kind.group, kind.minimums, kind.supers), outputs / TILE, inputs / BLOCK, q, scales, minimums);
        m.records = records.data();
        m.minimums = kind.minimums;
        if (biased) bias = numbers(outputs);
        m.bias = biased ? bias.data() : nullptr;
        m.outputs = outputs;
        m.inputs = inputs;
        m.bits = kind.bits;
        m.zero = kind.zero;
        m.group = kind.group;
        joined.parts[0] = m;
        joined.count = 1;
        joined.outputs = outputs;
        joined.activations = 16;
    }

    template <class T>
    static std::vector<uint8_t> bytes_of(const std::vector<T>& numbers) {
        const auto* first = reinterpret_cast<const uint8_t*>(numbers.data());
        return {first, first + numbers.size() * sizeof(T)};
    }

    // The records of parts in each of which the blocks of a tile follow one another.
    void put_together(const Record& record, int64_t tiles, int64_t blocks, const std::vector<uint8_t>& q, const std::vector<uint8_t>& scales,
                      const std::vector<uint8_t>& minimums) {
        records.resize((tiles + 1) / 2 * blocks * record.size);
        for (int64_t n = 0; n < tiles * blocks; n++) {
            const int64_t tile = n / blocks;
            uint8_t* to = records.data() + (tile / 2 * blocks + n % blocks) * record.size;
            std::memcpy(to + tile % 2 * record.weights, q.data() + n * record.weights, record.weights);
            std::memcpy(to + record.scales_at(tile), scales.data() + n * record.scales, record.scales);
            if (record.minimums_at(0) < record.size) std::memcpy(to + record.minimums_at(tile), minimums.data() + n * record.scales, record.scales);
        }
    }

    static std::vector<int8_t> bytes(int64_t count) {
        std::vector<int8_t> out(count);
        for (int8_t& x : out) x = static_cast<int8_t>(next() % 127 - 63);
        return out;
    }

    static std::vector<uint16_t> half_numbers(int64_t count) {  // of about 1/32 to 1/256, of any sign; one in 16 below the normal ones
        std::vector<uint16_t> out(count);
        for (uint16_t& x : out) {
            const uint64_t bits = next();
            x = static_cast<uint16_t>((bits & 0x83ff) | (bits >> 20 & 15 ? 7 + (bits >> 30) % 4 : 0) << 10);
        }
        return out;
    }
};

struct alignas(64) Line {
    uint8_t bytes[64];
};

struct Buffers {
    std::vector<Line> amx, gated_amx;
    std::vector<int8_t> q, gated_q;
    std::vector<float> scale, gated_scale, normed, qkv, mixed, inner, scores, wide, low;
    std::vector<AskedBlock> asked;
    std::vector<BlockSums> sums, gated_sums;
    std::vector<int32_t> places, seen, runs, owners;
    Work work{};

    Buffers(int64_t rows, int64_t widest, int64_t longest)
        : amx(amx_bytes(rows, widest) / 64), gated_amx(amx), q(rows * 2 * widest), gated_q(q), scale(rows * widest), gated_scale(scale), normed(rows * widest), qkv(rows * widest), mixed(rows * widest),
          inner(2 * rows * widest), scores(TOGETHER * longest), wide(widest), low(rows * widest), asked(ASKED * (widest / BLOCK + 1)), sums(rows * widest), gated_sums(sums),
          places(rows * longest), seen(rows), runs(rows), owners(rows) {
        work.x = {q.data(), scale.data(), sums.data(), amx.empty() ? nullptr : amx.data()->bytes};
        work.gated = {gated_q.data(), gated_scale.data(), gated_sums.data(), amx.empty() ? nullptr : gated_amx.data()->bytes};
        work.normed = normed.data();
        work.qkv = qkv.data();
        work.mixed = mixed.data();
        work.inner = inner.data();
        work.scores = scores.data();
        work.wide = wide.data();
        work.asked = asked.data();
        work.places = places.data();
        work.seen = seen.data();
        work.runs = runs.data();
        work.owners = owners.data();
        work.longest = longest;
    }
};

void products() {
    for (const Kind& kind : KINDS)
        for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 23, 71, 300}) {
            const int64_t inputs = kind.supers ? 512 : 288, outputs = 48;
            Made w(kind, outputs, inputs, rows % 2);
            std::vector<float> x = numbers(rows * inputs), norm = numbers(inputs), y(rows * outputs);
            for (int64_t i = 0; i < 32; i++) x[i] *= 1e-34f;            // a block that counts as zero
            for (int64_t i = 32; i < 64; i++) x[i] = x[i] < 0 ? -1.5f : 1.5f;  // the largest integers
            if (rows > 3) x[3 * inputs + 70] = NAN;
            if (rows > 4) x[4 * inputs + 70] = -INFINITY;
            Buffers buffers(rows, inputs, 1);
            outrider_linear(&w.joined, x.data(), nullptr, 0, rows, y.data(), &buffers.work);
            say(kind.name, rows, 0, y.data(), rows * outputs);
            outrider_linear(&w.joined, x.data(), norm.data(), 1e-5f, rows, y.data(), &buffers.work);
            say(kind.name, rows, 1, y.data(), rows * outputs);
            w.joined.activations = 8;
            outrider_linear(&w.joined, x.data(), nullptr, 0, rows, y.data(), &buffers.work);
            say(kind.name, rows, 8, y.data(), rows * outputs);
        }
}

void exponents() {
    std::vector<float> x;
    for (int i = -16 * 100; i < 16 * 100; i++) x.push_back(static_cast<float>(i) * 0.0546f);
    for (float odd : {0.0f, -0.0f, 1e-30f, -87.0f, -87.5f, -1e30f, -INFINITY, NAN}) x.insert(x.end(), {odd, odd});
    for (size_t i = 0; i < x.size(); i += 16) {
        const Lanes e = exp16(load(x.data() + i));
        store(x.data() + i, e);
    }
    say("exp", 0, 0, x.data(), static_cast<int64_t>(x.size()));
}

// An adapter of a layer's matrices, of rank 48; the joined ones have a part for the first outputs and one for the last, of ranks 6
// and 10, so that no block of inner values is whole.
struct MadeAdapter {
    static constexpr int64_t WIDEST = 48;
    std::vector<std::vector<uint8_t>> bytes;
    std::vector<std::vector<float>> scales;
    std::vector<AdapterLayer> layers;

    explicit MadeAdapter(const std::vector<Layer>& stack) : layers(stack.size()) {
        for (size_t i = 0; i < stack.size(); i++) {
            add(stack[i].qkv, 2, layers[i].qkv);
            add(stack[i].output, 1, layers[i].output);
            add(stack[i].gate_up, 2, layers[i].gate_up);
            add(stack[i].down, 1, layers[i].down);
        }
    }

    void add(const JoinedMatrices& w, int64_t parts, AdapterMatrix& to) {
        const int64_t inputs = w.parts[0].inputs, each = w.outputs / TILE / 2 * TILE;
        to.rank = parts == 1 ? WIDEST : TILE;
        to.a = made(to.rank * inputs);
        scales.push_back(numbers(to.rank));
        for (float& scale : scales.back()) scale *= 1e-4f;
        to.scales = scales.back().data();
        to.count = parts;
        for (int64_t p = 0, low = 0; p < parts; p++) {
            const int64_t first = parts == 1 || !p ? 0 : w.outputs - each, outputs = parts == 1 ? w.outputs : each;
            const int64_t rank = parts == 1 ? WIDEST : p ? 10 : 6;
            to.parts[p] = {made(outputs * ((rank + 3) / 4 * 4) + 256), first, outputs, low, rank};
            low += rank;
        }
    }

    const uint8_t* made(int64_t size) {
        const std::vector<int8_t> some = Made::bytes(size);
        bytes.emplace_back(some.begin(), some.end());
        return bytes.back().data();
    }
};

struct Numbers {  // how numbers are kept
    int64_t activations = 16, kv_bits = 32;
    bool large = false;    // some numbers of keys of 8 bits with 16
    bool adapted = false;  // every third row has no adapter
};

// A model of two layers: a prompt in two spans, then trees of drafts after them.
void layers(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window, const Kind& kind, Numbers kept_as = {}) {
    const int64_t hidden = 256, inner = 512, all = (heads + 2 * kv_heads) * head_dim, pages = 4;
    Shape shape{};
    shape.hidden = hidden;
    shape.heads = heads;
    shape.kv_heads = kv_heads;
    shape.head_dim = head_dim;
    shape.inner = inner;
    shape.layers = 2;
    shape.window = window;
    shape.kv_bits = kept_as.kv_bits;
    shape.eps = 1e-5f;
    std::vector<Made> made;
    std::vector<std::vector<float>> norms;
    std::vector<Layer> stack(2);
    std::vector<int32_t> large(kv_heads * BLOCK, -1);
    for (int64_t h = 0; h < kv_heads; h++)
        for (int64_t i = 0; i < 8; i++) {
            large[h * BLOCK + i] = static_cast<int32_t>((i + h) % head_dim);
            large[h * BLOCK + SCALED + i] = static_cast<int32_t>((i + h + head_dim / 2) % head_dim);
        }
    made.reserve(8);
    for (Layer& layer : stack) {
        const int64_t sizes[4][2] = {{all, hidden}, {hidden, heads * head_dim}, {2 * inner, hidden}, {hidden, inner}};
        JoinedMatrices* to[4] = {&layer.qkv, &layer.output, &layer.gate_up, &layer.down};
        for (int i = 0; i < 4; i++) {
            made.emplace_back(kind, sizes[i][0], sizes[i][1], i == 0);
            *to[i] = made.back().joined;
            to[i]->activations = kept_as.activations;
        }
        for (int i = 0; i < 4; i++) norms.push_back(numbers(i < 2 ? hidden : head_dim));
        layer.large = kept_as.large ? large.data() : nullptr;
        layer.attention_norm = norms[norms.size() - 4].data();
        layer.mlp_norm = norms[norms.size() - 3].data();
        layer.query_norm = window ? nullptr : norms[norms.size() - 2].data();
        layer.key_norm = window ? nullptr : norms[norms.size() - 1].data();
    }
    const MadeAdapter adapter(stack);
    const int64_t run = PAGE * (head_dim + BLOCK);           // floats: keys of 8 bits may take more than a small head's floats
    const int64_t page_size = 2 * 2 * kv_heads * run;  // layers x keys and values
    std::vector<float> memory(2 * pages * page_size);
    std::vector<float*> tables[2];
    for (int64_t n = 0; n < 2 * pages; n++) tables[n % 2].push_back(memory.data() + n * page_size);
    Span spans[2] = {};
    int64_t starts[2] = {0, 0};
    for (int64_t turn = 0; turn < 3; turn++) {
        const int64_t counts[2] = {turn == 0 ? 45 : 9, turn == 0 ? 3 : 1 + turn};
        const int64_t rows = counts[0] + counts[1];
        std::vector<int32_t> positions, parents;
        for (int64_t n = 0; n < 2; n++) {
            spans[n].pages = tables[n].data();
            spans[n].layer_stride = kv_heads * run;
            spans[n].head_stride = run;
            spans[n].values = 2 * kv_heads * run;
            spans[n].start = starts[n];
            spans[n].first = n ? counts[0] : 0;
            spans[n].rows = counts[n];
            for (int64_t r = 0; r < counts[n]; r++) {
                const int64_t parent = turn && r > 2 ? r - 3 : r - 1;  // a tree of three branches, or a chain
                parents.push_back(static_cast<int32_t>(parent));
                positions.push_back(parent < 0 ? static_cast<int32_t>(starts[n]) : positions[spans[n].first + parent] + 1);
            }
            starts[n] += turn ? 1 : counts[n];
        }
        std::vector<float> x = numbers(rows * hidden), cos = numbers(rows * head_dim), sin = numbers(rows * head_dim), kept(rows * hidden);
        Buffers buffers(rows, 1024, 128);
        const int32_t wanted = 0;
        std::vector<const AdapterLayer*> owners(rows, adapter.layers.data());
        for (int64_t r = 0; r < rows; r += 3) owners[r] = nullptr;
        const Adapters adapters = {owners.data(), buffers.low.data(), MadeAdapter::WIDEST};
        outrider_layers(&shape, stack.data(), spans, 2, rows, x.data(), cos.data(), sin.data(), positions.data(), parents.data(), &wanted,
                        1, kept.data(), &buffers.work, nullptr, kept_as.adapted ? &adapters : nullptr);
        say("kept", head_dim, turn, kept.data(), rows * hidden);
        say("layers", head_dim, turn, x.data(), rows * hidden);
    }
    std::vector<float> bytes;  // of 8 bits any four may look like no number
    for (float x : memory) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        bytes.insert(bytes.end(), {static_cast<float>(bits & 0xffff), static_cast<float>(bits >> 16)});
    }
    say("pages", head_dim, window, bytes.data(), static_cast<int64_t>(bytes.size()));
}

void laws() {
    for (int64_t size : {1, 15, 16, 17, 1000}) {
        std::vector<float> logits = numbers(size);
        float chance = 0;
        const int64_t place = likeliest(logits.data(), size, &chance);
        say("likeliest", size, place, &chance, 1);
    }
}

// A tree that grows over made-up logits: what is offered at each depth, and the nodes that are kept.
void trees(const Growth& growth, int64_t most) {
    constexpr int64_t TOKENS = 300;
    Tree tree(growth, most);
    std::vector<int64_t> under = {-1};
    for (int64_t depth = 1; depth <= growth.depth && !under.empty(); depth++) {
        for (int64_t parent : under) {
            std::vector<float> logits = numbers(TOKENS), logarithms(growth.width);
            std::vector<int64_t> places(growth.width);
            for (float& logit : logits) logit *= 8.0f;
            const int64_t found = offers(logits.data(), TOKENS, growth.heat, growth.width, places.data(), logarithms.data());
            for (int64_t n = 0; n < found; n++) tree.put(parent, places[n], logarithms[n]);
            say("offers", most, places[0], logarithms.data(), found);
        }
        tree.choose();
        under = tree.followed;
    }
    std::vector<int64_t> tokens(most), parents(most);
    std::vector<float> chances(most), both;
    const int64_t count = tree.collect(tokens.data(), parents.data(), chances.data());
    for (int64_t n = 0; n < count; n++) both.insert(both.end(), {chances[n], static_cast<float>(tokens[n]), static_cast<float>(parents[n])});
    say("tree", most, count, both.data(), static_cast<int64_t>(both.size()));
}

}  // namespace

int main() {
    outrider_threads(1);
    products();
    exponents();
    laws();
    trees({5, 6, 0.75f, 1e-4f, 0.0f, 0.0f}, 12);
    trees({3, 4, 1.0f, 1e-4f, 0.05f, 0.02f}, 7);
    layers(4, 2, 64, 0, KINDS[1]);
    layers(2, 1, 128, 0, KINDS[2]);
    layers(4, 4, 64, 7, KINDS[0]);
    layers(3, 1, 96, 0, KINDS[3]);   // heads that are no multiple of 64: nothing is read for several queries at once
    layers(4, 2, 40, 0, KINDS[1]);   // nor of 16: each product is added up one by one
    layers(16, 1, 16, 0, KINDS[6]);
    layers(4, 2, 64, 0, KINDS[1], {8, 8});
    layers(2, 1, 128, 0, KINDS[2], {16, 8, true});
    layers(4, 4, 64, 7, KINDS[0], {16, 8, false, true});
    layers(3, 1, 96, 0, KINDS[3], {8, 8, true, true});
    layers(4, 2, 40, 0, KINDS[1], {16, 8});
    layers(16, 1, 16, 0, KINDS[6], {8, 8, true});
    layers(6, 2, 64, 0, KINDS[1], {16, 32, false, true});
}
