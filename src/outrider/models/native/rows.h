// What is done with one row of numbers: norms, rotation, the gate of an MLP, softmax. A part of kernels.cpp, in its namespace.

float inverse_rms(const float* x, int64_t size, float eps) {
    float parts[16] = {};
    for (int64_t i = 0; i + 16 <= size; i += 16)
        for (int j = 0; j < 16; j++) parts[j] += x[i + j] * x[i + j];
    float total = 0;
    for (float part : parts) total += part;
    for (int64_t i = size / 16 * 16; i < size; i++) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / size + eps);
}

void normalise(const float* x, const float* weight, float eps, int64_t size, float* to) {
    float factor = inverse_rms(x, size, eps);
    for (int64_t i = 0; i < size; i++) to[i] = x[i] * factor * weight[i];
}

// to = gate / (1 + e^-gate) * up
void gated(const float* gate, const float* up, int64_t size, float* to) {
    for (int64_t i = 0; i < size; i += 16) {  // a multiple of 16, as all inputs of a product
        const Lanes g = load(gate + i);
        const Lanes below = add(all_lanes(1.0f), exp16(smaller(sub(all_lanes(0.0f), g), all_lanes(87.0f))));
        store(to + i, mul(div(g, below), load(up + i)));
    }
}

// The largest score; a NaN does not count, it shows in the sum of exponentials.
float largest(const float* scores, int64_t size) {
    float most = -INFINITY;
    int64_t i = 0;
    Lanes parts = all_lanes(most);
    for (; i + 16 <= size; i += 16) parts = larger(load(scores + i), parts);
    most = largest_of(parts);
    for (; i < size; i++) most = scores[i] > most ? scores[i] : most;
    return most;
}

// scores -> e^(score - most); returns their sum
float exponentials(float* scores, int64_t size, float most) {
    Lanes sums = all_lanes(0.0f);
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
        const Lanes e = exp16(sub(load(scores + i), all_lanes(most)));
        store(scores + i, e);
        sums = add(sums, e);
    }
    if (i < size) {
        const Lanes e = exp16(sub(load_some(scores + i, size - i), all_lanes(most)));
        store_some(scores + i, e, size - i);
        sums = add(sums, only(e, size - i));
    }
    return sum_of(sums);
}

// The place of the largest logit, and its chance under softmax; the logits are overwritten.
int64_t likeliest(float* logits, int64_t size, float* chance) {
    const float most = largest(logits, size);
    int64_t place = 0;
    while (place < size - 1 && logits[place] != most) place++;
    *chance = 1.0f / exponentials(logits, size, most);
    return place;
}

void rotate(float* x, const float* cos, const float* sin, int64_t size) {
    for (int64_t i = 0; i < size / 2; i++) {
        float a = x[i], b = x[i + size / 2];
        x[i] = a * cos[i] + b * sin[i];
        x[i + size / 2] = b * cos[i + size / 2] + a * sin[i + size / 2];
    }
}
