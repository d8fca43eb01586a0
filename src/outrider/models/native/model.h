// A whole pass of a model in one call: from tokens to logits and the likeliest token of each row. A part of kernels.cpp, after what
// it exports.

namespace {

struct Pass {
    const Shape* shape;  // of the model: up to `norm` the same in every pass
    const Layer* layers;
    const Matrix* embedding;
    const JoinedMatrices* output;
    const float* norm;
    const Span* spans;
    int64_t span_count, rows;
    const int64_t* tokens;              // [rows]
    const float *cos, *sin;             // of all positions
    const int32_t *positions, *parents; // as of outrider_layers, or null: every span is a chain
    const int32_t* wanted;              // as of outrider_layers
    int64_t wanted_count;
    float* kept;
    const int64_t* judged;              // of each span: how many of its last rows have logits
    float *x, *logits;                  // [rows][hidden]; [judged rows][outputs]
    int64_t* best;                      // [judged rows]
    const Work* work;
    const Adapters* adapters;
    int64_t threads;
};

constexpr int64_t SCANNED = 256;  // numbers that are compared before the largest of them is looked for

// The place of the largest number, the first of equals; a NaN is larger than any number, as numpy has it.
int64_t first_largest(const float* x, int64_t size) {
    float most = -INFINITY, odd = 0;
    int64_t found = 0;
    Lanes nothing = all_lanes(0.0f);  // unless there is a NaN, or an infinity
    for (int64_t at = 0; at < size; at += SCANNED) {
        const int64_t end = at + SCANNED < size ? at + SCANNED : size;
        const float here = largest(x + at, end - at);
        if (here > most) most = here, found = at;
        int64_t i = at;
        for (; i + 16 <= end; i += 16) nothing = fused(load(x + i), all_lanes(0.0f), nothing);
        for (; i < end; i++) odd += x[i] * 0.0f;
    }
    if (sum_of(nothing) + odd == 0) {
        while (x[found] != most) found++;
        return found;
    }
    for (int64_t i = found = 0; i < size; i++) {
        if (std::isnan(x[i])) return i;
        if (x[i] > x[found]) found = i;
    }
    return found;
}

// cos or sin of each row: where positions follow one another they are there already.
const float* turns_of(const float* all, const std::vector<int32_t>& positions, int64_t size, std::vector<float>& own) {
    const int64_t rows = static_cast<int64_t>(positions.size());
    int64_t r = 1;
    while (r < rows && positions[r] == positions[0] + r) r++;
    if (r == rows) return all + positions[0] * size;
    for (int32_t position : positions) own.insert(own.end(), all + position * size, all + (position + 1) * size);
    return own.data();
}

}  // namespace

extern "C" {

// The place of the largest logit of each row, see first_largest. Mostly each thread looks at the outputs that it has just computed.
void outrider_likeliest(const float* logits, int64_t rows, int64_t size, int64_t* best) {
    const int64_t parts = pool().size(), each = (size / parts + SCANNED) / SCANNED * SCANNED;
    std::vector<int64_t> found(parts * rows);
    pool().run(parts * rows, 1, [&](int64_t begin, int64_t end, int64_t) {
        for (int64_t item = begin; item < end; item++) {
            const int64_t first = item / rows * each, left = size - first;
            const float* row = logits + item % rows * size + first;
            found[item] = left > 0 ? first + first_largest(row, left < each ? left : each) : -1;
        }
    });
    for (int64_t r = 0; r < rows; r++) {
        const float* row = logits + r * size;
        best[r] = found[r];
        for (int64_t part = 1; part < parts && !std::isnan(row[best[r]]); part++) {
            const int64_t other = found[part * rows + r];
            if (other >= 0 && (row[other] > row[best[r]] || std::isnan(row[other]))) best[r] = other;
        }
    }
}

// Returns the rows whose tokens the embedding has before one that it has not; where that is not all, nothing was run.
int64_t outrider_pass(const Pass* pass) {
    const Shape& s = *pass->shape;
    const int64_t rows = pass->rows, size = s.hidden;
    outrider_threads(pass->threads);
    const int64_t there = outrider_rows(pass->embedding, pass->tokens, rows, pass->x);
    if (there < rows) return there;
    std::vector<int32_t> positions(rows), parents(rows);
    for (int64_t n = 0; n < pass->span_count; n++) {
        const Span& span = pass->spans[n];
        for (int64_t r = 0; r < span.rows; r++) {
            const int64_t row = span.first + r;
            positions[row] = pass->positions ? pass->positions[row] : static_cast<int32_t>(span.start + r);
            parents[row] = pass->parents ? pass->parents[row] : static_cast<int32_t>(r - 1);
        }
    }
    std::vector<float> own_cos, own_sin;
    outrider_layers(&s, pass->layers, pass->spans, pass->span_count, rows, pass->x, turns_of(pass->cos, positions, s.head_dim, own_cos),
                    turns_of(pass->sin, positions, s.head_dim, own_sin), positions.data(), parents.data(), pass->wanted,
                    pass->wanted_count, pass->kept, pass->work, nullptr, pass->adapters);
    int64_t count = 0;  // judged rows, moved together
    for (int64_t n = 0; n < pass->span_count; n++)
        for (int64_t r = pass->spans[n].rows - pass->judged[n]; r < pass->spans[n].rows; r++, count++) {
            const int64_t row = pass->spans[n].first + r;
            if (row != count) std::memcpy(pass->x + count * size, pass->x + row * size, size * sizeof(float));
        }
    outrider_linear(pass->output, pass->x, pass->norm, s.eps, count, pass->logits, pass->work);
    outrider_likeliest(pass->logits, count, pass->output->outputs, pass->best);
    return rows;
}

}  // extern "C"
