// An EAGLE head: chains and trees, each in one call. A part of kernels.cpp, after what it exports.

namespace {

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

}  // namespace

extern "C" {

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
            quantise_row(head->fc, joined, r, rows, work->x);
        }
    });
    product(head->fc, work->x, rows, x, nullptr);
}

// What the next step of the head reads of x [rows][hidden], where that is what its output matrix reads.
void outrider_normed(const Shape* shape, const Head* head, int64_t rows, float* x) {
    for (int64_t r = 0; r < rows; r++) normalise(x + r * shape->hidden, head->norm, shape->eps, shape->hidden, x + r * shape->hidden);
}

}  // extern "C"

namespace {

// The head's layers over the rows of spans, each of which follows the one before; x is read and overwritten. cos, sin: of all
// positions. Of one span only the last row's result is computed to its end. Returns whether all tokens are there.
bool follow(const Shape& s, const Layer* layers, const Head& head, const Span* spans, int64_t span_count, const int64_t* tokens,
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
bool take_in(const Shape& s, const Layer* layers, const Head& head, const Span* spans, int64_t span_count, const int64_t* tokens,
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

}  // namespace

extern "C" {

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

}  // extern "C"

namespace {

// What follows rows of the head, x [rows][hidden], put into their trees: row r under the node `nodes[r]` of `trees[owners[r]]`.
// x becomes what the next step reads.
void put_offers(const Shape& s, const Head& head, const Growth& growth, int64_t rows, float* x, const int64_t* owners,
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

}  // namespace

extern "C" {

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
